"""What KV-cache events tell of a run's servers, for the `runs` table."""

from __future__ import annotations

import polars as pl

from tracefit.tables import schema
from tracefit.tables.kv_events import GPU, transfers
from tracefit.tables.runs import COMPLETE_SHARE

_SERVER = "server"


def with_kv_counts(
    runs: pl.DataFrame, events: pl.DataFrame, requests: pl.DataFrame, *, duplicates: int, rejects: int
) -> pl.DataFrame:
    """Fill what the `runs` table says of KV-cache events.

    Full blocks that a server's requests have and that were never stored were found in the cache. Blocks of a preempted
    request are stored again, so that the prefix hit ratio is a lower bound where there are preemptions.

    Args:
        runs: Rows of one run.
        events: Its `kv_events` table.
        requests: Its `requests` table.
        duplicates: Events that were there twice.
        rejects: Batches and events that could not be read; they add to those of the run.
    """
    sums = _sums(events, requests)
    names = [c for c in sums.columns if c != _SERVER]
    rows = runs.drop(names, strict=False).join(sums, on=_SERVER, how="left")
    complete = pl.col("journey_sampling") >= COMPLETE_SHARE
    return schema.RUNS.conform(
        rows.with_columns(
            # Of requests without a journey nobody knows the blocks.
            kv_prefix_hit_ratio=pl.when(complete).then("kv_prefix_hit_ratio"),
            kv_duplicate_events=pl.lit(duplicates, pl.Int64),
            rejects=pl.col("rejects") + rejects,
        )
    )


def _sums(events: pl.DataFrame, requests: pl.DataFrame) -> pl.DataFrame:
    counts = events.group_by(_SERVER).agg(kv_events=pl.len(), kv_block_lifetime_us=_block_lifetime())
    ends = (
        transfers(events)
        .group_by(_SERVER)
        .agg(kv_transfers=pl.len(), kv_transfers_unfinished=pl.col("completed_ns").is_null().sum())
    )
    own = pl.col("medium").fill_null(GPU) == GPU
    stored = events.filter((pl.col("event") == "BlockStored") & own).group_by(_SERVER)
    stores = stored.agg(stored=pl.col("block_count").sum(), block_size=pl.col("block_size").max())
    sizes = requests.join(stores, on=_SERVER)
    # The last token is never computed, hence not cached.
    computed = (pl.col("prompt_tokens") + pl.col("output_tokens").fill_null(0) - 1) // pl.col("block_size")
    needs = sizes.group_by(_SERVER).agg(
        needed=computed.sum(), prompt=(pl.col("prompt_tokens") // pl.col("block_size")).sum()
    )
    rows = counts.join(ends, on=_SERVER, how="left").join(stores, on=_SERVER, how="left")
    found = (pl.col("needed") - pl.col("stored")) / pl.col("prompt")
    return rows.join(needs, on=_SERVER, how="left").select(
        _SERVER,
        "kv_events",
        "kv_block_lifetime_us",
        pl.col("kv_transfers", "kv_transfers_unfinished").fill_null(0),
        kv_prefix_hit_ratio=pl.when(pl.col("prompt") > 0).then(found.clip(0.0, 1.0)),
    )


def _block_lifetime() -> pl.Expr:
    """Mean over removed blocks; an event's lifetime is the mean over its own."""
    blocks = pl.col("block_count").filter(pl.col("lifetime_us").is_not_null())
    total = (pl.col("lifetime_us") * pl.col("block_count")).sum()
    return pl.when(blocks.sum() > 0).then(total / blocks.sum())
