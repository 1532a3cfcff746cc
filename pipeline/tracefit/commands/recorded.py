"""The load of recorded runs: their complete requests, how many a second a server carried, and their lengths."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import polars as pl

from tracefit.replay.acceptance import ACCEPTANCE_COLUMNS
from tracefit.replay.closed_loop import WHOLE_LOOP_SHARE
from tracefit.replay.plan import CARRIED_S, carried_per_s
from tracefit.results.requests import RecordedLoad
from tracefit.tables.schema import ENGINE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tracefit.tables.store import TableStore

_MOST_RECORDED_REQUESTS = 50_000
"""Most requests of some runs; the latest are taken."""
_RECORDED_COLUMNS = (
    *(*ACCEPTANCE_COLUMNS, "arrival_ns", "prompt_tokens", "cached_prompt_tokens", "finish_status", "finished_ns"),
)
_MOST_SPREAD = 0.9
"""A load generator draws lengths from a tenth of the mean on: shorter ones would have no tokens."""


def complete_requests(store: TableStore, runs: Iterable[str]) -> pl.DataFrame:
    """Return the requests of some runs that ran to their end and have lengths; `sampling` is the share that was
    traced.
    """
    known = pl.col("arrival_ns", "prompt_tokens", "output_tokens").is_not_null()
    complete = pl.col("finish_status").fill_null("stopped").is_in(["stopped", "length"])
    rows = store.read("requests", list(runs), _RECORDED_COLUMNS).filter(pl.all_horizontal(known), complete)
    rows = rows.sort(*ENGINE, "arrival_ns").tail(_MOST_RECORDED_REQUESTS)
    sampled = store.read("runs", list(runs), ["journey_sampling"]).to_series().drop_nulls()
    share = float(sampled.min()) if sampled.len() else 1.0  # type: ignore[arg-type]  # a number
    return rows.with_columns(sampling=pl.lit(share or 1.0))


def is_whole(traced: pl.DataFrame) -> bool:
    """Return whether all requests of the server were traced, and not a sample of them."""
    return float(traced["sampling"][0]) > WHOLE_LOOP_SHARE


def carried(traced: pl.DataFrame) -> float | None:
    """Return the requests per second that a recorded server finished, of mean lengths; null where that is not known."""
    return max(_carried(traced).values(), default=None)


def _carried(traced: pl.DataFrame) -> dict[tuple[object, ...], float]:
    """Return this rate of each engine, by its key; engines that ran for a short time are left out."""
    if not traced.height or not is_whole(traced):
        return {}
    computed = pl.col("prompt_tokens") - pl.col("cached_prompt_tokens").fill_null(0)
    work = traced.drop_nulls("finished_ns").select(*ENGINE, "finished_ns", computed, "output_tokens")
    means = work.select(pl.col("prompt_tokens", "output_tokens").mean()).row(0)
    found = {
        key: carried_per_s(
            part["finished_ns"].to_numpy(), part.select("prompt_tokens", "output_tokens").to_numpy(), means
        )
        for key, part in work.sort("finished_ns").partition_by(*ENGINE, as_dict=True).items()
    }
    return {key: rate for key, rate in found.items() if rate is not None}


def recorded_load(store: TableStore, runs: Iterable[str]) -> RecordedLoad | None:
    """Return the load of some runs of one deployment; null where no request was recorded to its end."""
    traced = complete_requests(store, runs)
    if not traced.height:
        return None
    lengths = pl.col("prompt_tokens", "output_tokens").cast(pl.Float64)
    prompt, output = traced.select(lengths.mean()).row(0)
    prompt_sd, output_sd = traced.select(lengths.std().fill_null(0.0)).row(0)
    cached = traced["cached_prompt_tokens"].fill_null(0).mean()
    rates, over_s = _carried(traced), CARRIED_S
    if not rates:
        rates, over_s = _mean_rates(traced)
    together = [sum(rate for key, rate in rates.items() if key[0] == run) for run in {key[0] for key in rates}]
    return RecordedLoad(
        carried_per_s=max(rates.values(), default=None),
        carried_together_per_s=max(together, default=None),
        over_s=over_s,
        prompt_tokens=prompt,
        computed_tokens=prompt - (float(cached) if isinstance(cached, float) else 0.0),
        output_tokens=output,
        prompt_spread=_spread(prompt_sd, prompt),
        output_spread=_spread(output_sd, output),
    )


def _mean_rates(traced: pl.DataFrame) -> tuple[dict[tuple[object, ...], float], float]:
    """Return the mean rate of requests at each engine, from the first arrival to the last end, and the longest time of
    one in s.
    """
    share = float(traced["sampling"][0])
    took = pl.max_horizontal("arrival_ns", "finished_ns").max() - pl.col("arrival_ns").min()
    spans = {
        key: (part.height, float(part.select(took).item()) / 1e9)
        for key, part in traced.partition_by(*ENGINE, as_dict=True).items()
    }
    rates = {key: n / seconds / share for key, (n, seconds) in spans.items() if seconds > 0}
    return rates, max((seconds for _, seconds in spans.values()), default=0.0)


def _spread(sd: float, mean: float) -> float:
    """Return half the width of a uniform distribution over its mean, at most `_MOST_SPREAD`; its standard deviation is
    width / sqrt(12).
    """
    return min(math.sqrt(3) * sd / mean, _MOST_SPREAD) if mean > 0 else 0.0
