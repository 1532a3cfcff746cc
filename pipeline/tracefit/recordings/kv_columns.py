"""Make the `kv_events` table from recordings of vLLM's KV cache events, and columns of other tables from it.

Events come without an engine and often without a step: both are determined first, by request, rank and time.
The facts of events then become columns: of requests (blocks loaded and stored), of the run (hit ratio,
lifetimes) and of steps, the ones used in training too (transfers in flight).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl
from msgspec.structs import asdict

from tracefit.tables import schema
from tracefit.tables.runs import COMPLETE_SHARE
from tracefit.tables.schema import ENGINE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tracefit.recordings.kv_batches import KvRows

KV_COLUMNS = {
    **dict.fromkeys(("kv_blocks_stored", "kv_blocks_evicted", "kv_blocks_transferred"), "block"),
    **dict.fromkeys(("kv_blocks_offloaded", "kv_blocks_loaded", "kv_offload_evicted"), "block"),
    "kv_transfers_in_flight": "transfer",
    "kv_blocks_in_flight": "block",
    "kv_bytes_in_flight": "byte",
    "kv_offload_pressure": "ratio",
    "kv_block_lifetime_us": "us",
    "kv_prefix_hit_ratio": "ratio",
}
"""Columns of steps, with their units."""

GPU = "GPU"
"""The medium of the engine's cache on the GPU; an event without a medium means it too."""

_KV_STEP = [*ENGINE, "step_id"]
_IN_GPU_CACHE = pl.col("medium").fill_null(GPU) == GPU
_REJECT_COLUMNS = {column.name: column.polars for column in schema.REJECTS.columns if column.name != "run_id"}


# -- the events -------------------------------------------------------------------------------------------

_END_OF = {"TransferInitiated": "TransferCompleted", "RemoteTransferInitiated": "RemoteTransferCompleted"}
"""The event that a transfer begins with, and the one it ends with."""


def build_kv_events(
    rows: pl.DataFrame, steps: pl.DataFrame, journeys: pl.DataFrame, *, run_id: str
) -> tuple[pl.DataFrame, int]:
    """Return the `kv_events` table of one run, and how many events were left out as duplicates.

    An event belongs to the engine of its request, else to the only engine of the run, else to none. Its
    step is the one it names, else that of its batch, else, if the steps before and after its time are both
    known, the one that was running. The end of a transfer names the step it was initiated in: that is
    `initiated_step`, and the step it ended in is the batch's.

    Some builds report the beginning of a transfer twice: the first event of a transfer id and step counts.

    Args:
        rows: Columns as `batches.ROW_COLUMNS`, in the order they were read.
        steps: The `steps` table of the run.
        journeys: Its `journey_events` table.
        run_id: The run.
    """
    is_end = pl.col("event") == "TransferCompleted"
    assigned = rows.with_row_index("_order").with_columns(
        run_id=pl.lit(run_id),
        initiated_step=pl.when(is_end).then("event_step"),
        step_id=pl.when(is_end).then("batch_step").otherwise(pl.coalesce("event_step", "batch_step")),
    )
    assigned = _with_epoch(_with_server(assigned, steps, journeys), steps, journeys)
    assigned = _with_step(assigned, steps).sort("_order")
    transfer = pl.struct(*ENGINE, "data_parallel_rank", "event", "transfer_id", "step_id")
    kept = assigned.filter(~pl.col("event").is_in(list(_END_OF)) | transfer.is_first_distinct())
    return schema.KV_EVENTS.conform(kept), assigned.height - kept.height


def _with_server(rows: pl.DataFrame, steps: pl.DataFrame, journeys: pl.DataFrame) -> pl.DataFrame:
    core = journeys.filter(pl.col("layer") == "core")
    servers = pl.concat([steps["server"], core["server"]]).drop_nulls().unique()
    if len(servers) <= 1:
        return rows.with_columns(server=pl.lit(servers[0] if len(servers) else None, pl.String))
    owners = core.group_by("request_id").agg(pl.col("server").first())
    owned = rows.join(owners, on="request_id", how="left", maintain_order="left")
    # A data-parallel rank is one engine: all its events have the same server.
    ranks = (
        owned.drop_nulls("server")
        .group_by("data_parallel_rank")
        .agg(rank_server=pl.col("server").mode().sort().first())
    )
    joined = owned.join(ranks, on="data_parallel_rank", how="left", nulls_equal=True, maintain_order="left")
    return joined.with_columns(server=pl.coalesce("server", "rank_server"))


def _with_epoch(rows: pl.DataFrame, steps: pl.DataFrame, journeys: pl.DataFrame) -> pl.DataFrame:
    """Attach the epoch that was running at each event's time; epoch 0 before the first epoch."""
    times = pl.concat([frame.select("server", "epoch", "unix_ns") for frame in (steps, journeys)])
    begins = times.drop_nulls().group_by("server", "epoch").agg(pl.col("unix_ns").min()).sort("unix_ns")
    joined = rows.sort("unix_ns").join_asof(begins, on="unix_ns", by="server", check_sortedness=False)
    return joined.with_columns(pl.col("epoch").fill_null(0))


def _with_step(rows: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Fill `step_id` by the clock where the event has none, and name the source in `step_source`."""
    # A record of a step has the time at which it was received, after the step.
    timed = steps.filter(pl.col("cycle_source").is_null()).drop_nulls("unix_ns").sort(*ENGINE, "step_id")
    following = pl.col("step_id", "unix_ns").shift(-1).over(ENGINE).name.prefix("next_")
    between = timed.select(*ENGINE, "unix_ns", "step_id", following).filter(
        pl.col("next_step_id") == pl.col("step_id") + 1
    )
    clock = between.select(*ENGINE, "unix_ns", clock_step="step_id", until_ns="next_unix_ns").sort("unix_ns")
    joined = rows.sort("unix_ns").join_asof(clock, on="unix_ns", by=ENGINE, check_sortedness=False)
    by_clock = pl.when(pl.col("unix_ns") < pl.col("until_ns")).then("clock_step")
    return joined.with_columns(
        step_id=pl.coalesce("step_id", by_clock),
        step_source=pl.when(pl.col("step_id").is_not_null())
        .then(pl.lit("event"))
        .when(by_clock.is_not_null())
        .then(pl.lit("clock")),
    )


def transfers(events: pl.DataFrame) -> pl.DataFrame:
    """Return one row per transfer with a recorded beginning, and its end if known.

    Columns are those of the event that it begins with, `step_id` and `unix_ns` as `initiated_step` and
    `initiated_ns`, and completed_step, completed_ns (wall clock; null: no end was recorded) and success.
    """
    key = [*ENGINE, "data_parallel_rank", "event", "transfer_id"]
    # Ids may come again after a restart that left no trace: the n-th end belongs to the n-th beginning.
    turn = pl.int_range(pl.len()).over(key).alias("turn")
    begun = (
        events.filter(pl.col("event").is_in(list(_END_OF)))
        .sort("unix_ns")
        .drop("success", "initiated_step")
        .rename({"step_id": "initiated_step", "unix_ns": "initiated_ns"})
        .with_columns(turn)
    )
    ends = (
        events.filter(pl.col("event").is_in(list(_END_OF.values())))
        .sort("unix_ns")
        .with_columns(pl.col("event").replace({end: begin for begin, end in _END_OF.items()}))
        .select(*key, turn, "success", completed_step="step_id", completed_ns="unix_ns")
    )
    return begun.join(ends, on=[*key, "turn"], how="left", nulls_equal=True, maintain_order="left")


# -- the other tables -------------------------------------------------------------------------------------


def kv_tables(
    read: KvRows, tables: Mapping[str, pl.DataFrame], *, run_id: str, block_size: int | None = None
) -> dict[str, pl.DataFrame]:
    """Return the tables of one run with its recordings added: kv_events, requests, runs and rejects.

    `tables` has the steps, journey_events, requests, runs and rejects of its traces. `block_size` is the tokens of a
    block, if the events do not have it.
    """
    journeys = tables["journey_events"]
    events, duplicates = build_kv_events(read.rows, tables["steps"], journeys, run_id=run_id)
    requests = schema.REQUESTS.shape(tables["requests"])
    bad = pl.DataFrame([asdict(reject) for reject in read.rejects], schema=_REJECT_COLUMNS)
    rejects = [tables["rejects"], bad.with_columns(run_id=pl.lit(run_id))]
    count = int(bad["count"].sum())
    return {
        "kv_events": events,
        "requests": schema.REQUESTS.conform(with_kv_requests(requests, events, journeys, block_size=block_size)),
        "runs": with_kv_counts(tables["runs"], events, requests, duplicates=duplicates, rejects=count),
        "rejects": schema.REJECTS.conform(pl.concat(map(schema.REJECTS.shape, rejects))),
    }


def with_kv_requests(
    requests: pl.DataFrame, events: pl.DataFrame, journeys: pl.DataFrame, *, block_size: int | None = None
) -> pl.DataFrame:
    """Fill `kv_blocks_offloaded`, `kv_blocks_loaded` and, if snapshots lack it, `cached_prompt_tokens`.

    After a preemption the blocks of a request start over: blocks offloaded before it do not count. Prompt tokens
    loaded from another medium before the first token are prefix hits; hits in the engine's own cache leave no event, so
    they are a lower bound. `block_size` is the tokens of a block, if the events do not have it.
    """
    key = [*ENGINE, "core_request_id"]
    preempted = (
        journeys.filter(pl.col("event") == "PREEMPTED")
        .group_by(*ENGINE, core_request_id="request_id")
        .agg(preempted_step=pl.col("step_id").max(), preempted_ns=pl.col("unix_ns").max())
    )
    is_after_preemption = pl.coalesce(
        pl.col("step_id") >= pl.col("preempted_step"),
        pl.col("unix_ns") >= pl.col("preempted_ns"),
        pl.lit(value=True),
    )
    sums = (
        events.drop_nulls("request_id")
        .rename({"request_id": "core_request_id"})
        .join(preempted, on=key, how="left", maintain_order="left")
        .group_by(key)
        .agg(
            kv_blocks_offloaded=_blocks("CacheStoreCommitted", is_after_preemption).sum(),
            kv_blocks_loaded=_blocks("CacheLoadCommitted").sum(),
            _first_load=_blocks("CacheLoadCommitted").first(),
        )
    )
    loaded = pl.col("_first_load") * pl.coalesce("_block_size", pl.lit(block_size, pl.Int64))
    # `min_horizontal` skips nulls: without a block size the hits are unknown.
    hits = pl.when(loaded.is_not_null()).then(pl.min_horizontal(loaded, "prompt_tokens"))
    return (
        requests.drop("kv_blocks_offloaded", "kv_blocks_loaded")
        .join(sums, on=key, how="left", maintain_order="left")
        .join(_block_sizes(events), on=ENGINE, how="left", maintain_order="left")
        .with_columns(cached_prompt_tokens=pl.coalesce("cached_prompt_tokens", hits))
        .select(requests.columns)
    )


def with_kv_counts(
    runs: pl.DataFrame, events: pl.DataFrame, requests: pl.DataFrame, *, duplicates: int, rejects: int
) -> pl.DataFrame:
    """Fill the columns of the `runs` table that come from KV-cache events.

    Full blocks of a server's requests that were never stored were hits in the cache. Blocks of a preempted request are
    stored again, so the prefix hit ratio is a lower bound with preemptions. `duplicates` are
    events that were left out, `rejects` batches and events that could not be read: they add to those of the run.
    """
    removed = pl.col("block_count").filter(pl.col("lifetime_us").is_not_null()).sum()
    # The lifetime of an event is the mean of its blocks.
    lifetimes_us = (pl.col("lifetime_us") * pl.col("block_count")).sum()
    sums = events.group_by("server").agg(
        kv_events=pl.len(),
        kv_block_lifetime_us=pl.when(removed > 0).then(lifetimes_us / removed),
        _stored=_blocks("BlockStored", _IN_GPU_CACHE).sum(),
        _block_size=pl.col("block_size").filter((pl.col("event") == "BlockStored") & _IN_GPU_CACHE).max(),
    )
    moved = (
        transfers(events)
        .group_by("server")
        .agg(kv_transfers=pl.len(), kv_transfers_unfinished=pl.col("completed_ns").is_null().sum())
    )
    # The last token is never computed, hence not cached.
    computed = pl.col("prompt_tokens") + pl.col("output_tokens").fill_null(0) - 1
    needs = (
        requests.join(sums, on="server")
        .group_by("server")
        .agg(
            _needed=(computed // pl.col("_block_size")).sum(),
            _prompt=(pl.col("prompt_tokens") // pl.col("_block_size")).sum(),
        )
    )
    new = ["kv_events", "kv_block_lifetime_us", "kv_transfers", "kv_transfers_unfinished"]
    rows = runs.drop(new, strict=False).join(sums, on="server", how="left")
    rows = rows.join(moved, on="server", how="left").join(needs, on="server", how="left")
    ratio = (pl.col("_needed") - pl.col("_stored")) / pl.col("_prompt")
    # The blocks of requests without a journey are unknown.
    is_known = (pl.col("_prompt") > 0) & (pl.col("journey_sampling") >= COMPLETE_SHARE)
    has_events = pl.col("kv_events").is_not_null()
    return schema.RUNS.conform(
        rows.with_columns(
            pl.when(has_events).then(pl.col("kv_transfers", "kv_transfers_unfinished").fill_null(0)),
            kv_prefix_hit_ratio=pl.when(is_known).then(ratio.clip(0.0, 1.0)),
            kv_duplicate_events=pl.lit(duplicates, pl.Int64),
            rejects=pl.col("rejects") + rejects,
        )
    )


def with_kv_cache(
    timeline: pl.DataFrame,
    events: pl.DataFrame,
    *,
    block_size: int | None = None,
    kv_bytes_per_token: float | None = None,
) -> pl.DataFrame:
    """Add `KV_COLUMNS` except the prefix hit ratio; all null for an engine without KV-cache events.

    `kv_blocks_stored` and `kv_blocks_evicted` are those of the engine's own cache, `kv_blocks_transferred`
    those of the transfers that begin with the step, `kv_blocks_offloaded` and `kv_blocks_loaded` those that
    the scheduler commits to store to and load from other media, `kv_offload_evicted` those that these evict.
    A transfer is in flight from the step that initiates it to the one before its end is recorded; one without
    a recorded end stays in flight. Pressure is blocks in flight / KV blocks of the engine. The lifetime is
    the mean over the events that remove blocks in the step.

    Args:
        timeline: The `timeline` table.
        events: The `kv_events` table of the same runs.
        block_size: Tokens of a block, if the events do not have it.
        kv_bytes_per_token: Bytes of a token's keys and values over all layers and ranks; None if unknown.
    """
    sums = (
        events.drop_nulls("step_id")
        .group_by(_KV_STEP)
        .agg(
            kv_blocks_stored=_blocks("BlockStored", _IN_GPU_CACHE).sum(),
            kv_blocks_evicted=_blocks("BlockRemoved", _IN_GPU_CACHE).sum(),
            kv_blocks_transferred=_blocks("TransferInitiated").sum() + _blocks("RemoteTransferInitiated").sum(),
            kv_blocks_offloaded=_blocks("CacheStoreCommitted").sum(),
            kv_blocks_loaded=_blocks("CacheLoadCommitted").sum(),
            kv_offload_evicted=_blocks("CacheEviction").sum(),
            kv_block_lifetime_us=pl.col("lifetime_us").mean(),
        )
    )
    sizes = _block_sizes(events).with_columns(_has_events=pl.lit(value=True))
    rows = (
        timeline.join(sums, on=_KV_STEP, how="left", maintain_order="left")
        .join(_in_flight(timeline, events), on=_KV_STEP, how="left", maintain_order="left")
        .join(sizes, on=ENGINE, how="left", maintain_order="left")
    )
    counts = [c for c, unit in KV_COLUMNS.items() if unit in ("block", "transfer")]
    size = pl.coalesce("_block_size", pl.lit(block_size, pl.Int64))
    total = pl.when(pl.col("kv_blocks_total") > 0).then("kv_blocks_total")
    return (
        rows.with_columns(pl.when("_has_events").then(pl.col(counts).fill_null(0)))
        .with_columns(
            kv_bytes_in_flight=pl.col("kv_blocks_in_flight") * size * pl.lit(kv_bytes_per_token, pl.Float64),
            kv_offload_pressure=pl.col("kv_blocks_in_flight") / total,
        )
        .drop("_has_events", "_block_size")
    )


def _blocks(event: str, where: pl.Expr | None = None) -> pl.Expr:
    """Return the block counts of the events of one kind."""
    is_counted = pl.col("event") == event
    return pl.col("block_count").filter(is_counted if where is None else is_counted & where)


def _block_sizes(events: pl.DataFrame) -> pl.DataFrame:
    """Return the engines that have events, each with its `_block_size` in tokens, null if no event has it."""
    return events.group_by(ENGINE).agg(_block_size=pl.col("block_size").max())


def _in_flight(timeline: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    """Return transfers and blocks in flight at every step of the timeline."""
    begun = transfers(events).drop_nulls("initiated_step")
    begins = begun.select(*ENGINE, pl.lit(1).alias("transfers"), blocks="block_count", step_id="initiated_step")
    ends = begun.drop_nulls("completed_step").select(
        *ENGINE,
        pl.lit(-1).alias("transfers"),
        blocks=-pl.col("block_count"),
        # A transfer that completed within its own step was still in flight in it.
        step_id=pl.max_horizontal("completed_step", pl.col("initiated_step") + 1),
    )
    changes = pl.concat([begins, ends]).group_by(_KV_STEP).agg(pl.sum("transfers", "blocks")).sort("step_id")
    in_flight = changes.select(
        *_KV_STEP,
        kv_transfers_in_flight=pl.col("transfers").cum_sum().over(ENGINE).cast(pl.Int64),
        kv_blocks_in_flight=pl.col("blocks").cum_sum().over(ENGINE),
    )
    steps = timeline.select(_KV_STEP).sort("step_id")
    return steps.join_asof(in_flight, on="step_id", by=ENGINE, check_sortedness=False)


def with_prefix_hits(timeline: pl.DataFrame, requests: pl.DataFrame) -> pl.DataFrame:
    """Add `kv_prefix_hit_ratio` of each step: cached / all prompt tokens of the requests first scheduled in it."""
    with_hits = requests.filter(pl.col("cached_prompt_tokens").is_not_null() & (pl.col("prompt_tokens") > 0))
    hits = with_hits.group_by(*ENGINE, step_id="first_scheduled_step").agg(
        kv_prefix_hit_ratio=pl.col("cached_prompt_tokens").sum() / pl.col("prompt_tokens").sum()
    )
    return timeline.join(hits, on=_KV_STEP, how="left", maintain_order="left")
