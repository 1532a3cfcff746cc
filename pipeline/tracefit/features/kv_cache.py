"""What KV-cache events tell of steps: blocks stored and evicted, transfers in flight, offload pressure."""

from __future__ import annotations

import polars as pl

from tracefit.tables.kv_events import ENGINE, GPU, transfers

KV_COLUMNS = {
    "kv_blocks_stored": "block",
    "kv_blocks_evicted": "block",
    "kv_blocks_transferred": "block",
    "kv_blocks_offloaded": "block",
    "kv_blocks_loaded": "block",
    "kv_offload_evicted": "block",
    "kv_transfers_in_flight": "transfer",
    "kv_blocks_in_flight": "block",
    "kv_bytes_in_flight": "byte",
    "kv_offload_pressure": "ratio",
    "kv_block_lifetime_us": "us",
    "kv_prefix_hit_ratio": "ratio",
}
"""Columns of steps, with their units."""


def with_kv_cache(
    timeline: pl.DataFrame,
    events: pl.DataFrame,
    *,
    block_size: int | None = None,
    kv_bytes_per_token: float | None = None,
) -> pl.DataFrame:
    """Add what KV-cache events tell of each step; null throughout for an engine without such events.

    `kv_blocks_stored` and `kv_blocks_evicted` are those of the engine's own cache, `kv_blocks_transferred` those of the
    transfers that begin with the step, `kv_blocks_offloaded` and `kv_blocks_loaded` what the scheduler commits to store
    to and load from other media, `kv_offload_evicted` what these evict. A transfer is in flight from the step it is
    initiated in to the one before it is seen to be complete; one whose end is never seen stays in flight. Pressure is
    blocks in flight / KV blocks of the engine. The lifetime is the mean over blocks removed in the step. The prefix hit
    ratio is the share of prompt tokens found in the cache, over the requests scheduled first in the step: null without
    any, see `with_prefix_hits`.

    Args:
        timeline: The `timeline` table.
        events: The `kv_events` table of the same runs.
        block_size: Tokens of a block, where the events do not tell.
        kv_bytes_per_token: Bytes of a token's keys and values over all layers and ranks; null where not known.
    """
    step = [*ENGINE, "step_id"]
    placed = events.filter(pl.col("step_id").is_not_null())
    of_engine = pl.col("medium").fill_null(GPU) == GPU

    def blocks(event: str, where: pl.Expr | None = None) -> pl.Expr:
        mine = pl.col("event") == event if where is None else (pl.col("event") == event) & where
        return pl.col("block_count").filter(mine).sum()

    sums = placed.group_by(step).agg(
        kv_blocks_stored=blocks("BlockStored", of_engine),
        kv_blocks_evicted=blocks("BlockRemoved", of_engine),
        kv_blocks_transferred=blocks("TransferInitiated") + blocks("RemoteTransferInitiated"),
        kv_blocks_offloaded=blocks("CacheStoreCommitted"),
        kv_blocks_loaded=blocks("CacheLoadCommitted"),
        kv_offload_evicted=blocks("CacheEviction"),
        kv_block_lifetime_us=pl.col("lifetime_us").mean(),
    )
    rows = timeline.join(sums, on=step, how="left", maintain_order="left")
    rows = rows.join(_in_flight(timeline, events), on=step, how="left", maintain_order="left")
    told = events.select(ENGINE).unique().with_columns(_told=pl.lit(value=True))
    rows = rows.join(told, on=ENGINE, how="left", maintain_order="left")
    counts = [c for c, unit in KV_COLUMNS.items() if unit in ("block", "transfer") and c in rows.columns]
    sizes = events.group_by(ENGINE).agg(_block_size=pl.col("block_size").max())
    rows = rows.join(sizes, on=ENGINE, how="left", maintain_order="left")
    size = pl.coalesce("_block_size", pl.lit(block_size, pl.Int64))
    filled = rows.with_columns(pl.when("_told").then(pl.col(c).fill_null(0)).alias(c) for c in counts)
    total = pl.when(pl.col("kv_blocks_total") > 0).then("kv_blocks_total")
    return filled.with_columns(
        kv_bytes_in_flight=pl.col("kv_blocks_in_flight") * size * pl.lit(kv_bytes_per_token, pl.Float64),
        kv_offload_pressure=pl.col("kv_blocks_in_flight") / total,
    ).drop("_told", "_block_size")


def _in_flight(timeline: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    """Transfers and blocks in flight at every step of the timeline."""
    moved = transfers(events).filter(pl.col("initiated_step").is_not_null())
    begun = moved.select(*ENGINE, step_id="initiated_step", transfers=pl.lit(1), blocks="block_count")
    ended = moved.filter(pl.col("completed_step").is_not_null()).select(
        *ENGINE,
        # One that was complete within its own step was in flight in it all the same.
        step_id=pl.max_horizontal("completed_step", pl.col("initiated_step") + 1),
        transfers=pl.lit(-1),
        blocks=-pl.col("block_count"),
    )
    edges = pl.concat([begun, ended]).group_by(*ENGINE, "step_id").agg(pl.sum("transfers", "blocks"))
    edges = edges.sort("step_id").with_columns(
        kv_transfers_in_flight=pl.col("transfers").cum_sum().over(ENGINE).cast(pl.Int64),
        kv_blocks_in_flight=pl.col("blocks").cum_sum().over(ENGINE),
    )
    steps = timeline.select(*ENGINE, "step_id").sort("step_id")
    return steps.join_asof(edges.drop("transfers", "blocks"), on="step_id", by=ENGINE, check_sortedness=False)


def with_prefix_hits(timeline: pl.DataFrame, requests: pl.DataFrame) -> pl.DataFrame:
    """Add `kv_prefix_hit_ratio` of each step: cached over all prompt tokens of the requests first scheduled in it."""
    told = requests.filter(pl.col("cached_prompt_tokens").is_not_null() & (pl.col("prompt_tokens") > 0))
    ratio = pl.col("cached_prompt_tokens").sum() / pl.col("prompt_tokens").sum()
    hits = told.group_by(*ENGINE, pl.col("first_scheduled_step").alias("step_id")).agg(
        kv_prefix_hit_ratio=ratio
    )
    return timeline.join(hits, on=[*ENGINE, "step_id"], how="left", maintain_order="left")
