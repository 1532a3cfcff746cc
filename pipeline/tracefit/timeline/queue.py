"""The state of the queue and the engine at the instant a request was queued, exact from complete journeys.

Who waits ahead follows from the order of the events; what runs follows from the timeline's row of the step before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from tracefit.tables.schema import ENGINE
from tracefit.timeline.segments import CORE_SPAN, core_events

if TYPE_CHECKING:
    from tracefit.timeline.composition import EngineLimits

_AHEAD = ("waiting_ahead", "tokens_ahead", "blocks_ahead", "outputs_ahead", "token_steps_ahead")
_AFTER = ("running_after", "remaining_after", "prefill_left_after", "kv_blocks_total")


def queue_state(journeys: pl.DataFrame, timeline: pl.DataFrame, limits: EngineLimits) -> pl.DataFrame:
    """Return the state that every request met when it was QUEUED.

    Who waits follows from the order of the events; who runs, and what they hold, from the step before (its outputs
    are processed by then). Before the first step nothing runs.

    Args:
        journeys: The `journey_events` table, complete.
        timeline: The `timeline` table.
        limits: Slots, token budget and blocks of the scheduler.

    Returns:
        One row per request: request columns, request_id, waiting_ahead, tokens_ahead, blocks_ahead, running_reqs,
        running_remaining_tokens, free_slots, free_tokens (of the next step's budget, once those ahead have taken
        theirs), kv_blocks_free, kv_blocks_total, block_demand (blocks of those ahead and of its own prompt). Null where not known.
    """
    queued = _waiting_ahead(journeys, limits.block_size)
    free = pl.col("kv_blocks_total") - pl.col("kv_blocks_used") + pl.col("kv_blocks_freed")
    after = timeline.select(*ENGINE, "step_id", *_AFTER, kv_blocks_free=free)
    total = timeline.group_by(ENGINE).agg(
        total=pl.col("kv_blocks_total").max(), first_step=pl.col("step_id").min()
    )
    found = queued.join(after, on=[*ENGINE, "step_id"], how="left").join(total, on=ENGINE, how="left")
    # QUEUED carries the counter of the step before: below the first step the engine had not run yet.
    fresh = pl.col("step_id") < pl.col("first_step")

    def at_start(name: str, value: int) -> pl.Expr:
        return pl.when(fresh).then(value).otherwise(pl.col(name))

    running, left = at_start("running_after", 0), at_start("prefill_left_after", 0)
    slots = limits.max_num_seqs
    budget = limits.max_num_batched_tokens
    # Of the next step's budget: a token for each that runs, prompts in progress, and those ahead.
    taken = running + left + pl.col("tokens_ahead")
    return found.select(
        *CORE_SPAN,
        "request_id",
        *_AHEAD,
        running_reqs=running,
        running_remaining_tokens=at_start("remaining_after", 0),
        free_slots=slots - running - pl.col("waiting_ahead") if slots else pl.lit(None, pl.Int64),
        free_tokens=budget - taken if budget else pl.lit(None, pl.Int64),
        kv_blocks_free=pl.when(fresh).then("total").otherwise("kv_blocks_free"),
        kv_blocks_total="total",
        block_demand=pl.col("blocks_ahead") + pl.col("own_blocks"),
    )


def _waiting_ahead(journeys: pl.DataFrame, block_size: int) -> pl.DataFrame:
    """Count requests, tokens and blocks in the waiting queue just before each QUEUED."""
    core = core_events(journeys).filter(pl.col("event") != "FIRST_TOKEN")
    same = pl.col("request") == pl.col("request").shift(1)
    before = pl.when(same).then(pl.col("event").shift(1))
    enters = pl.col("event").is_in(["QUEUED", "PREEMPTED"])
    # A request that finishes while it waits (an abort) leaves the queue; one that runs left it when scheduled.
    leaves = (pl.col("event") == "SCHEDULED") | (
        (pl.col("event") == "FINISHED") & before.is_in(["QUEUED", "PREEMPTED"])
    )
    tokens = pl.col("prefill_total_tokens") + pl.col("decode_done_tokens").fill_null(0)
    blocks = (tokens + block_size - 1) // block_size
    ordered = core.with_columns(
        outputs=(pl.col("decode_max_tokens") - pl.col("decode_done_tokens").fill_null(0)).clip(lower_bound=0),
        change=enters.cast(pl.Int64) - leaves.fill_null(value=False).cast(pl.Int64),
        tokens=tokens,
        own_blocks=blocks,
    )
    ordered = ordered.sort(*ENGINE, "ts_ns", maintain_order=True)

    def ahead(amount: pl.Expr) -> pl.Expr:
        signed = pl.col("change") * amount
        return signed.cum_sum().over(ENGINE) - signed

    return (
        ordered.with_columns(
            outputs_ahead=ahead(pl.col("outputs")),
            # Σ over outputs of the tokens in cache: what reading the caches of those ahead will cost.
            token_steps_ahead=ahead(pl.col("outputs") * (pl.col("tokens") + pl.col("outputs") / 2)),
            waiting_ahead=ahead(pl.lit(1)),
            tokens_ahead=ahead(pl.col("tokens")),
            blocks_ahead=ahead(pl.col("own_blocks")),
        )
        .filter(pl.col("event") == "QUEUED")
        .unique(CORE_SPAN, keep="first", maintain_order=True)
        .select(*CORE_SPAN, "request_id", "step_id", "own_blocks", *_AHEAD)
    )
