"""The state of the queue and the engine when a request was queued, exact if journeys are complete."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from tracefit.tables.schema import ENGINE
from tracefit.timeline.segments import CORE_SPAN, core_events

if TYPE_CHECKING:
    from tracefit.timeline.composition import EngineLimits

_AHEAD_COLUMNS = ("waiting_ahead", "tokens_ahead", "blocks_ahead", "outputs_ahead", "token_steps_ahead")
_AFTER = ("running_after", "remaining_after", "prefill_left_after", "kv_blocks_total")


def queue_state(journeys: pl.DataFrame, timeline: pl.DataFrame, limits: EngineLimits) -> pl.DataFrame:
    """Return the state of queue and engine when each request was QUEUED.

    The order of the events gives the waiting requests. The step before, whose outputs are processed by then, gives the
    running requests and their blocks; before the first step nothing runs.

    Args:
        journeys: The `journey_events` table, complete.
        timeline: The `timeline` table.
        limits: Slots, token budget and blocks of the scheduler.

    Returns:
        One row per request: request columns, request_id, waiting_ahead, tokens_ahead, blocks_ahead, running_reqs,
        running_remaining_tokens, free_slots, free_tokens (of the next step's budget, after the requests ahead have
        taken theirs), kv_blocks_free, kv_blocks_total, block_demand (blocks of those ahead and of the request's
        prompt). Null if unknown.
    """
    queued = _waiting_ahead(journeys, limits.block_size)
    # Without a summary, blocks that requests share are counted for each of them.
    used = (pl.col("kv_blocks_used") - pl.col("kv_blocks_freed")).clip(0, pl.col("kv_blocks_total"))
    free = pl.col("kv_blocks_total") - used
    after = timeline.select(*ENGINE, "step_id", *_AFTER, kv_blocks_free=free)
    total = timeline.group_by(ENGINE).agg(total=pl.col("kv_blocks_total").max(), first_step=pl.col("step_id").min())
    joined = queued.join(after, on=[*ENGINE, "step_id"], how="left").join(total, on=ENGINE, how="left")
    # QUEUED carries the counter of the step before: below the first step, the engine has not run yet.
    fresh = pl.col("step_id") < pl.col("first_step")

    def at_start(name: str, value: int) -> pl.Expr:
        return pl.when(fresh).then(value).otherwise(pl.col(name))

    running, left = at_start("running_after", 0), at_start("prefill_left_after", 0)
    slots, budget = (pl.lit(most, pl.Int64) for most in (limits.max_num_seqs, limits.max_num_batched_tokens))
    # The next step's budget goes to a token of each running request, prompts in progress, and the requests ahead.
    taken = running + left + pl.col("tokens_ahead")
    return joined.select(
        *CORE_SPAN,
        "request_id",
        *_AHEAD_COLUMNS,
        running_reqs=running,
        running_remaining_tokens=at_start("remaining_after", 0),
        free_slots=slots - running - pl.col("waiting_ahead"),
        free_tokens=budget - taken,
        kv_blocks_free=pl.when(fresh).then("total").otherwise("kv_blocks_free"),
        kv_blocks_total="total",
        block_demand=pl.col("blocks_ahead") + pl.col("own_blocks"),
    )


def _waiting_ahead(journeys: pl.DataFrame, block_size: int) -> pl.DataFrame:
    """Count requests, tokens and blocks in the waiting queue just before each QUEUED."""
    core = core_events(journeys).filter(pl.col("event") != "FIRST_TOKEN")
    same = pl.col("request") == pl.col("request").shift(1)
    before = pl.when(same).then(pl.col("event").shift(1))
    waits, waited = (event.is_in(["QUEUED", "PREEMPTED"]).fill_null(value=False) for event in (pl.col("event"), before))
    tokens = pl.col("prefill_total_tokens") + pl.col("decode_done_tokens").fill_null(0)
    blocks = (tokens + block_size - 1) // block_size
    outputs = (pl.col("decode_max_tokens") - pl.col("decode_done_tokens").fill_null(0)).clip(lower_bound=0)
    amounts = {
        "waiting_ahead": waits.cast(pl.Int64),
        "tokens_ahead": tokens,
        "blocks_ahead": blocks,
        "outputs_ahead": outputs,
        # The sum over outputs of the tokens in the cache: what decoding the requests ahead reads.
        "token_steps_ahead": outputs * (tokens + outputs / 2),
    }

    def change(amount: pl.Expr) -> pl.Expr:
        """Add a request when it begins to wait, and take it off at the end of the wait, which must have a beginning in
        the trace.
        """
        added, left = pl.when(waits & ~waited).then(amount), pl.when(waited & ~waits).then(amount.shift(1))
        return pl.coalesce(added, -left, pl.when(waits == waited).then(0))

    changes = core.with_columns(own_blocks=blocks, **{name: change(amount) for name, amount in amounts.items()})
    ordered = changes.sort(*ENGINE, "ts_ns", maintain_order=True)
    return (
        ordered.with_columns(pl.col(name).cum_sum().over(ENGINE) - pl.col(name) for name in amounts)
        .filter(pl.col("event") == "QUEUED")
        .unique(CORE_SPAN, keep="first", maintain_order=True)
        .select(*CORE_SPAN, "request_id", "step_id", "own_blocks", *_AHEAD_COLUMNS)
    )
