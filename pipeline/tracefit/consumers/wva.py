"""Export to llm-d's workload-variant-autoscaler: `serviceParms` in ms, and the older `perfParms`.

iteration = alpha + B * (beta * t_C + gamma * t_M) with t_C = (in + out)/(out + 1) and t_M = in + out/2 for mean input and
output tokens. On average over the lives of requests, B * t_C is the tokens of a step and B * t_M the tokens in the caches of
its requests. The fit takes these two step by step; the evaluation applies the formula itself to segments of the hold-out.

Older: ITL = alpha + beta * B, TTFT = gamma + delta * tokens * B. Its queueing formula has a request served in
TTFT + (out - 1) * ITL. An ITL is the time of any step that a request decodes in, including steps that prefill other requests,
and the mean over these steps counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.consumers.base import (
    Export,
    Source,
    commented,
    held_out,
    number,
    timed_requests,
    train_and_holdout,
    worse_than_baseline,
    written,
)
from tracefit.errors import DataError
from tracefit.fit.estimators import fit_nonnegative
from tracefit.fit.fitted import matrix, target_of
from tracefit.fit.splits import counted
from tracefit.tables.schema import SERVER

if TYPE_CHECKING:
    from tracefit.results.models import HeldOut

_REQUESTS = ("num_prefill_reqs", "num_decode_reqs")
_COLUMNS = ("prefill_tokens", "decode_tokens", "context_tokens", "prefill_context_tokens", *_REQUESTS)
SEGMENT_REQUESTS = 20
"""Requests per segment of the hold-out, whose mean input and output enter the formula."""


def to_wva(source: Source) -> Export:
    """Fit both forms on steps and requests of one scope.

    Raises:
        DataError: The data cannot support it, with the reason.
    """
    prefill, decode, context, prefill_context, *requests = map(pl.col, _COLUMNS)
    rows = source.steps(_COLUMNS).with_columns(
        step_tokens=prefill + decode,
        step_cache_tokens=context + prefill_context + prefill,
        step_requests=requests[0] + requests[1],
    )
    train, _ = train_and_holdout(source, rows, _COLUMNS, "step times")
    y = target_of(train) / 1e3
    x = np.column_stack([np.ones(train.height), matrix(train, ["step_tokens", "step_cache_tokens"])])
    # The formula is about means: a rare long prefill step counts in full.
    weights = train["interval_steps"].to_numpy().astype(float)
    alpha, beta, gamma = (written(v) for v in fit_nonnegative(x, y, weights, huber=np.inf))
    segments = _segments(source, rows)
    predicted = alpha + segments["batch"].to_numpy() * (
        beta * segments["t_c"].to_numpy() + gamma * segments["t_m"].to_numpy()
    )
    error = held_out(
        f"iteration, mean over segments of {SEGMENT_REQUESTS} requests",
        "ms",
        segments["y"].to_numpy(),
        predicted,
        y,
    )
    older, older_errors = _older(source, rows)
    text = f"serviceParms:\n  alpha: {number(alpha)}\n  beta: {number(beta)}\n  gamma: {number(gamma)}\n"
    perf = 'perfParms:\n  decodeParms:\n    alpha: "{0}"\n    beta: "{1}"\n  prefillParms:\n    gamma: "{2}"\n    delta: "{3}"\n'
    errors = (error, *older_errors)
    slots = source.scope.context.settings.max_num_seqs
    size = f"beside maxBatchSize {slots}" if slots else "beside maxBatchSize, the server's max_num_seqs"
    notes = (
        f"milliseconds; perfParms belong under an accelerator of spec.modelProfile, as in October 2025, {size}",
        "serviceParms: no field of the custom resource takes them up to February 2026",
        *worse_than_baseline(errors),
    )
    files: dict[str, str | bytes] = {
        "service-parms.yaml": commented(notes, text),
        "perf-parms.yaml": commented(notes, perf.format(*(number(v) for v in older))),
    }
    return Export(files, errors, notes, "kubectl edit variantautoscalings")


def _segments(source: Source, rows: pl.DataFrame) -> pl.DataFrame:
    """Cut each server's hold-out into segments of `SEGMENT_REQUESTS`; return mean cycle in ms, batch, t_C and t_M of each."""
    steps = counted(rows, "holdout")
    requests = source.tables.requests.filter(
        pl.col("first_scheduled_ns").is_not_null() & (pl.col("output_tokens") > 0)
    ).sort(*SERVER, "first_scheduled_ns")
    # Requests of the hold-out only: segments from before it would be evaluated on training steps.
    begins = steps.group_by(SERVER).agg(from_ns=pl.col("ts_ns").min())
    held = requests.join(begins, on=SERVER).filter(pl.col("first_scheduled_ns") >= pl.col("from_ns"))
    held = held.with_columns(segment=pl.int_range(pl.len()).over(SERVER) // SEGMENT_REQUESTS)
    means = held.group_by(*SERVER, "segment").agg(
        begin_ns=pl.col("first_scheduled_ns").min(),
        n=pl.len(),
        tokens_in=pl.col("prompt_tokens").mean(),
        tokens_out=pl.col("output_tokens").mean(),
    )
    means = means.filter(pl.col("n") == SEGMENT_REQUESTS).sort("begin_ns")  # the last one is rarely whole
    at = steps.sort("ts_ns").join_asof(
        means, left_on="ts_ns", right_on="begin_ns", by=SERVER, check_sortedness=False
    )
    found = (
        at.drop_nulls("segment")
        .group_by(*SERVER, "segment")
        .agg(
            pl.col("tokens_in", "tokens_out").first(),
            # A row of an interval holds a mean: it counts once per step.
            y=(pl.col("y") * pl.col("interval_steps")).sum() / pl.col("interval_steps").sum() / 1e3,
            batch=(pl.col("step_requests") * pl.col("interval_steps")).sum() / pl.col("interval_steps").sum(),
        )
    )
    out = pl.col("tokens_out")
    # Sorted: groups come in any order, and with them the last digits of the errors.
    found = (
        found.sort(*SERVER, "segment")
        .with_columns(t_c=(pl.col("tokens_in") + out) / (out + 1), t_m=pl.col("tokens_in") + out / 2)
        .drop_nulls()
    )
    if found.height < 2:
        raise DataError(
            f"the hold-out has {held.height} requests, too few for two segments of {SEGMENT_REQUESTS}",
            hint="trace a longer run",
        )
    return found


def _older(source: Source, rows: pl.DataFrame) -> tuple[tuple[float, ...], tuple[HeldOut, ...]]:
    decode = rows.filter(pl.col("num_decode_reqs") > 0)
    train, held = train_and_holdout(source, decode, _REQUESTS, "steps that decode")
    y, batch = target_of(train) / 1e3, matrix(train, ["step_requests"])[:, 0]
    # Every request that decodes in a step waits for all of it: a long one with prefills in it counts in full.
    weights = (train["num_decode_reqs"] * train["interval_steps"]).to_numpy().astype(float)
    x = np.column_stack([np.ones(len(y)), batch])
    alpha, beta = (written(v) for v in fit_nonnegative(x, y, weights / weights.mean(), huber=np.inf))
    itl = held_out(
        "older form: ITL, all steps that decode",
        "ms",
        target_of(held) / 1e3,
        alpha + beta * matrix(held, ["step_requests"])[:, 0],
        y,
    )
    requests = timed_requests(source, "prefill_us").with_columns(
        y=pl.col("y") / 1e3, work=pl.col("uncached_tokens") * pl.col("running_start").clip(lower_bound=1)
    )
    train, held = train_and_holdout(source, requests, ["work"], "prefill of requests")
    y, work = train["y"].to_numpy(), train["work"].to_numpy()
    gamma, delta = (written(v) for v in fit_nonnegative(np.column_stack([np.ones(len(y)), work]), y))
    ttft = held_out(
        "older form: prefill of a request",
        "ms",
        held["y"].to_numpy(),
        gamma + delta * held["work"].to_numpy(),
        y,
    )
    # What the autoscaler computes of the four numbers, against requests that were decoding too.
    several = held.filter(pl.col("decode_us").is_not_null() & pl.col("running_decode").is_not_null())
    after = pl.col("output_tokens") - 1
    service = several.select(
        predicted=gamma + delta * pl.col("work") + after * (alpha + beta * pl.col("running_decode")),
        service_ms=pl.col("y") + pl.col("decode_us") / 1e3,
    )
    trained = train.select(service_ms=pl.col("y") + pl.col("decode_us") / 1e3).drop_nulls()
    whole = held_out(
        "older form: service of a request, prefill + (out - 1) ITL",
        "ms",
        service["service_ms"].to_numpy(),
        service["predicted"].to_numpy(),
        trained["service_ms"].to_numpy(),
    )
    return (alpha, beta, gamma, delta), (itl, ttft, whole)
