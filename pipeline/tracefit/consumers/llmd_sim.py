"""Export to llm-d-inference-sim, latency calculator `per-token`: Go durations in YAML.

prefill = (prefill-overhead + uncached prompt tokens * prefill-time-per-token) * load; every token after the first takes
inter-token-latency * load; load = 1 + (time-factor-under-load - 1) * (running requests - 1) / (max-num-seqs - 1).

Up to v0.9.2 the simulator refuses a prefill-time-std-dev above 30 % of prefill-time-per-token; v0.10.0 has no such
bound.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.consumers.base import (
    OUT,
    Export,
    Source,
    commented,
    held_out,
    model_name,
    number,
    timed_requests,
    train_and_holdout,
    worse_than_baseline,
    written,
    yaml_text,
)
from tracefit.errors import DataError
from tracefit.fit.estimators import fit_nonnegative
from tracefit.fit.fitted import target_of
from tracefit.options import ConsumerVersionOption, ServerOptions, flag_of, named

if TYPE_CHECKING:
    from tracefit.statistics import Vector

MOST_SD_SHARE = 0.3
"""The simulator refuses a standard deviation above this share of its mean."""

UNBOUNDED_FROM = (0, 10, 0)
"""First version without that bound on the standard deviation of prefill."""

NEWEST = (0, 10, 0)
"""Version that files are written for by default."""


def to_llmd_sim(source: Source) -> Export:
    """Fit prefill and decode of whole requests against the load they ran under.

    Raises:
        DataError: The data cannot support it, with the reason.
    """
    slots = source.deployment.context.settings.max_num_seqs
    if slots is None or slots < 2:
        raise DataError(
            "the load factor runs from one request to max-num-seqs, which is not known or 1",
            hint=f"ingest the run again with {named(ServerOptions, 'settings')}: max_num_seqs",
        )
    decode, holdout_decode = train_and_holdout(
        source, timed_requests(source, "itl_us"), ["running_decode"], "inter-token latency"
    )
    prefill, holdout_prefill = train_and_holdout(
        source, timed_requests(source, "prefill_us"), ["running_start", "uncached_tokens"], "prefill time"
    )
    itl, factor, itl_sd = _decode(decode, slots)
    overhead, per_token, sd = _prefill(prefill, slots, factor)
    bounded = (source.consumer_version or NEWEST) < UNBOUNDED_FROM
    prefill_sd = _at_most(sd, per_token) if bounded else sd
    length, length_note = _model_length(source)
    values = {
        "model": yaml_text(model_name(source)),
        # The simulator refuses requests beyond its default of 1,024 tokens.
        "max-model-len": str(length),
        "max-num-seqs": str(slots),
        "latency-calculator": "per-token",
        "prefill-overhead": _duration(overhead),
        "prefill-time-per-token": _duration(per_token),
        "prefill-time-std-dev": _duration(prefill_sd),
        "inter-token-latency": _duration(itl),
        "inter-token-latency-std-dev": _duration(itl_sd),
        "time-factor-under-load": number(factor),
    }
    text = "".join(f"{key}: {value}\n" for key, value in values.items())
    load = _load(holdout_prefill["running_start"].to_numpy(), slots, factor)
    took = (overhead + per_token * holdout_prefill["uncached_tokens"].to_numpy()) * load
    gap = itl * _load(holdout_decode["running_decode"].to_numpy(), slots, factor)
    actual, trained = target_of(holdout_decode), target_of(decode)
    gaps, trained_gaps = (part["output_tokens"].to_numpy() - 1 for part in (holdout_decode, decode))
    errors = (
        held_out("prefill of a request", "us", target_of(holdout_prefill), took, target_of(prefill)),
        held_out("inter-token latency of a request", "us", actual, gap, trained),
        held_out("decode of a request", "us", actual * gaps, gap * gaps, trained * trained_gaps),
    )
    notes = (_version_note(prefill_sd, sd, bounded=bounded), *length_note, *worse_than_baseline(errors))
    use = f"llm-d-inference-sim --config {OUT}/config.yaml"
    return Export({"config.yaml": commented(notes, text)}, errors, notes, use)


def _version_note(written_sd: float, sd: float, *, bounded: bool) -> str:
    if bounded and written_sd < sd:
        return (
            f"for llm-d-inference-sim up to v0.9.2: prefill-time-std-dev is cut from {_duration(sd)} to 30 % of "
            "prefill-time-per-token, the most it takes"
        )
    if bounded:
        return "for llm-d-inference-sim up to v0.9.2, and newer"
    return (
        f"loads from llm-d-inference-sim v0.10.0; `tracefit export {flag_of(ConsumerVersionOption)} 0.9.2` cuts "
        "prefill-time-std-dev to what older ones take"
    )


def _model_length(source: Source) -> tuple[int, tuple[str, ...]]:
    """Return max-model-len, and a note where the server's is not known (the simulator's own default, 1024, is too
    short).
    """
    if (stated := source.deployment.context.settings.max_model_len) is not None:
        return stated, ()
    tokens = pl.col("prompt_tokens") + pl.col("output_tokens").fill_null(0)
    longest = int(source.tables.requests.select(tokens).drop_nulls().to_numpy().max(initial=1))
    return longest, (f"max-model-len is not known: {longest} tokens, the longest request traced, stand in for it",)


def _share(running: Vector, slots: int) -> Vector:
    return np.asarray((np.maximum(running, 1.0) - 1) / (slots - 1))


def _load(running: Vector, slots: int, factor: float) -> Vector:
    return np.asarray(1 + (factor - 1) * _share(running, slots))


def _decode(rows: pl.DataFrame, slots: int) -> tuple[float, float, float]:
    """Return the inter-token latency of a single request, the factor at full load, and the standard deviation."""
    y, share = target_of(rows), _share(rows["running_decode"].to_numpy(), slots)
    # Linear in the load, as the simulator interpolates: the sum of both coefficients is the latency at full load.
    single, more = fit_nonnegative(np.column_stack([np.ones(len(y)), share]), y)
    if single <= 0:
        raise DataError("inter-token latency grows from 0 with the load, which no factor can express")
    itl, factor = _us(single), written(1 + more / single)
    sd = float(np.std(y - itl * _load(rows["running_decode"].to_numpy(), slots, factor)))
    return itl, factor, _at_most(sd, itl)


def _prefill(rows: pl.DataFrame, slots: int, factor: float) -> tuple[float, float, float]:
    """Return the overhead, the time per uncached token, and the standard deviation about them."""
    # The simulator has one factor for both phases; decode, which is most of a request's time, decides it.
    load = _load(rows["running_start"].to_numpy(), slots, factor)
    tokens, y = rows["uncached_tokens"].to_numpy(), target_of(rows)
    overhead, per_token = fit_nonnegative(np.column_stack([load, tokens * load]), y)
    overhead, per_token = _us(overhead), _us(per_token)
    return overhead, per_token, _us(float(np.std(y - (overhead + per_token * tokens) * load)))


def _at_most(sd: float, mean: float) -> float:
    """Return a standard deviation no larger than `MOST_SD_SHARE` of its mean, rounded down to a nanosecond."""
    # Rounded up, a standard deviation of exactly the limit would be refused.
    return math.floor(min(sd, MOST_SD_SHARE * mean) * 1e3) / 1e3


def _us(value: float) -> float:
    """Return microseconds as a Go duration holds them, to the nanosecond."""
    return round(float(value), 3)


def _duration(us: float) -> str:
    text = f"{us:.3f}".rstrip("0").rstrip(".")
    return f"{text or '0'}us"
