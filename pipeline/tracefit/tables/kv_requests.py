"""What KV-cache events tell of requests: blocks loaded and offloaded, prefix hits."""

from __future__ import annotations

import polars as pl

from tracefit.tables.kv_events import ENGINE


def with_kv_requests(
    requests: pl.DataFrame, events: pl.DataFrame, journeys: pl.DataFrame, *, block_size: int | None = None
) -> pl.DataFrame:
    """Fill `kv_blocks_offloaded`, `kv_blocks_loaded` and, where snapshots do not tell, `cached_prompt_tokens`.

    After a preemption the blocks of a request start over: what was offloaded before it does not count. Prompt tokens
    loaded from another medium before the first token are prefix hits; hits in the engine's own cache leave no event, so
    that the ratio is a lower bound then.

    Args:
        requests: The `requests` table.
        events: The `kv_events` table of the same runs.
        journeys: Their `journey_events`.
        block_size: Tokens of a block, where the events do not tell.
    """
    key = [*ENGINE, "core_request_id"]
    mine = events.filter(pl.col("request_id").is_not_null()).rename({"request_id": "core_request_id"})
    lost = journeys.filter(pl.col("event") == "PREEMPTED").group_by(
        *ENGINE, pl.col("request_id").alias("core_request_id")
    )
    lost_at = lost.agg(lost_step=pl.col("step_id").max(), lost_ns=pl.col("unix_ns").max())
    mine = mine.join(lost_at, on=key, how="left")
    started_over = pl.coalesce(
        pl.col("step_id") >= pl.col("lost_step"), pl.col("unix_ns") >= pl.col("lost_ns"), pl.lit(value=True)
    )

    def blocks(event: str, where: pl.Expr) -> pl.Expr:
        return pl.col("block_count").filter((pl.col("event") == event) & where).sum()

    sums = mine.group_by(key).agg(
        kv_blocks_offloaded=blocks("CacheStoreCommitted", started_over),
        kv_blocks_loaded=blocks("CacheLoadCommitted", pl.lit(value=True)),
        _first_load=pl.col("block_count").filter(pl.col("event") == "CacheLoadCommitted").first(),
    )
    sizes = events.group_by(ENGINE).agg(_block_size=pl.col("block_size").max())
    joined = requests.drop("kv_blocks_offloaded", "kv_blocks_loaded").join(
        sums, on=key, how="left", maintain_order="left"
    )
    joined = joined.join(sizes, on=ENGINE, how="left", maintain_order="left")
    loaded = pl.col("_first_load") * pl.coalesce("_block_size", pl.lit(block_size, pl.Int64))
    told = pl.coalesce("cached_prompt_tokens", pl.min_horizontal(loaded, "prompt_tokens"))
    return joined.with_columns(
        cached_prompt_tokens=pl.when(pl.col("_first_load").is_null())
        .then("cached_prompt_tokens")
        .otherwise(told)
    ).select(requests.columns)
