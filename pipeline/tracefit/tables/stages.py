"""Make the steps of SGLang from its spans of stages: the results of a batch, which end together, are one step.

The scheduler handles the results of a batch request by request, within microseconds, and ends a span for
each: `decode_loop`, `chunked_prefill`, or `prefill_forward` for a prompt in one chunk. These spans exist at
trace level 3 (`set_last_decode_finish_time` and similar functions in `sglang.srt.observability.req_time_stats`).
"""

from __future__ import annotations

import polars as pl

from tracefit.tables import dialects, schema
from tracefit.tables.sources import CycleSource, declare

_LOOP, _CHUNK, _PROMPT_STAGES = "decode_loop", "chunked_prefill", "prefill_forward"
BLOCK_NS = 600_000_000_000
"""Length of the blocks of results that steps are made from: ten minutes fit into memory."""

SGLANG_SOURCE = declare(
    CycleSource(
        name="sglang",
        interval=(
            "results of a step to those of the next, after idling from the arrival to the results, by SGLang's spans"
        ),
        error="microseconds: the scheduler handles the results of a step one after the other",
        seen_by="spans",
    )
)
"""The steps that SGLang's spans show."""

_APART_STEPS = 8
"""Results belong to different batches if their ends differ by more than the shorter of their times divided by this."""

RESULTS: dict[str, pl.DataType] = {
    "server": pl.String(),
    "block": pl.Int64(),
    "end_ns": pl.Int64(),
    "busy_ns": pl.Int64(),
    "lasted_ns": pl.Int64(),
    "is_loop": pl.Boolean(),
    "tokens": pl.Int64(),
    "context": pl.Int64(),
}
"""Columns of results, each of a request in a batch: its end, the time since which the engine is certainly busy, its
duration, its computed tokens, and its tokens in the cache before; null if unknown."""


def results_of(spans: pl.DataFrame, requests: pl.DataFrame) -> pl.DataFrame:
    """Return the results of requests whose steps are traced.

    Args:
        spans: The result of `request_spans` for all spans of some traces.
        requests: The requests of the same traces: trace_id, owner, prompt_tokens, output_tokens,
            cached_prompt_tokens, queued_ns.

    Returns:
        Columns as `RESULTS`.
    """
    stages = spans.filter(
        pl.col("scope") == dialects.SGLANG_SCOPE, pl.col("name").is_in([_LOOP, _CHUNK, _PROMPT_STAGES])
    )
    facts = requests.select("trace_id", "owner", "prompt_tokens", "output_tokens", "cached_prompt_tokens", "queued_ns")
    loop, chunk = (pl.col("name") == name for name in (_LOOP, _CHUNK))
    request = ["trace_id", "owner"]
    number = pl.col("decode_ct").cast(pl.Int64, strict=False)
    in_cache = pl.when(number.is_between(0, schema.MOST_TOKENS)).then(pl.col("prompt_tokens") + number)
    cached = pl.col("cached_prompt_tokens").fill_null(0)
    # Spans do not state the size of a chunk. Without one token per step, several are decoded at once.
    is_whole = chunk.any().over(request).not_()
    is_plain = loop.sum().over(request) == pl.col("output_tokens") - 1
    with_facts = stages.join(facts, on=request, how="inner").with_columns(
        is_loop=loop,
        tokens=pl.when(loop).then(1).when(is_whole).then(pl.col("prompt_tokens") - cached),
        context=pl.when(loop & is_plain).then(in_cache).when(~loop & is_whole).then(cached),
        is_result=loop | chunk | is_whole,
    )
    start, end = pl.col("start_unix_ns"), pl.col("end_unix_ns")
    columns = {
        "block": end // BLOCK_NS,
        "end_ns": end,
        # A request keeps the engine busy from the time it is queued.
        "busy_ns": pl.min_horizontal(start, "queued_ns"),
        "lasted_ns": end - start,
    }
    results = with_facts.filter("is_result").with_columns(**columns)
    return results.select(pl.col(name).cast(kind) for name, kind in RESULTS.items())


def batch_numbers(results: pl.DataFrame, apart: int = _APART_STEPS) -> pl.DataFrame:
    """Return results in the order of time, with the number of their batch from 0; `apart` is `_APART_STEPS` for
    them.
    """
    gap, shorter = pl.col("end_ns").diff(), pl.min_horizontal("lasted_ns", pl.col("lasted_ns").shift(1))
    is_new = (gap * apart > shorter).fill_null(value=True)
    return results.sort("end_ns", maintain_order=True).with_columns(batch=is_new.cum_sum() - 1)


def steps_of(
    results: pl.DataFrame, first_step: int, source: CycleSource = SGLANG_SOURCE, apart: int = _APART_STEPS
) -> pl.DataFrame:
    """Return the steps of a server in one block.

    A step lasts from the results of the previous step to its own results; if the engine was idle, from the time
    at which a request was queued.

    Args:
        results: Columns as `RESULTS`.
        first_step: Number of the first step.
        source: The source of the results.
        apart: `_APART_STEPS` for them.

    Returns:
        Rows of `steps`. The first and the last of a block have a null time: their results may continue in
        another block.
    """
    loop = pl.col("is_loop")

    def total(column: str, of: pl.Expr) -> pl.Expr:
        values = pl.col(column).filter(of)
        return pl.when(values.null_count() == 0).then(values.sum())

    steps = (
        batch_numbers(results, apart)
        .group_by(step_id=pl.col("batch") + first_step, maintain_order=True)
        .agg(
            pl.col("server").first(),
            pl.col("busy_ns").min(),
            unix_ns=pl.col("end_ns").max(),
            running_depth=pl.len(),
            num_prefill_reqs=(~loop).sum(),
            num_decode_reqs=loop.sum(),
            prefill_tokens=total("tokens", ~loop),
            decode_tokens=total("tokens", loop),
            context_tokens=total("context", loop),
            prefill_context_tokens=total("context", ~loop),
        )
        .with_columns(
            scheduled_tokens=pl.col("prefill_tokens") + pl.col("decode_tokens"),
            # Requests outside a step, because prompts come first, keep the engine busy too.
            since_ns=pl.max_horizontal(pl.col("unix_ns").shift(1), pl.col("busy_ns").cum_min(reverse=True)),
            is_inner=pl.col("unix_ns").shift(1).is_not_null() & pl.col("unix_ns").shift(-1).is_not_null(),
        )
    )
    return steps.with_columns(
        cycle_us=pl.when("is_inner").then((pl.col("unix_ns") - pl.col("since_ns")) / 1e3),
        cycle_source=pl.lit(source.name),
        epoch=pl.lit(0, pl.Int64),
    )
