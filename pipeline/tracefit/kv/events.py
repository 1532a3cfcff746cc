"""Build the `kv_events` table: find the engine and step of each event, and drop repeated transfers."""

from __future__ import annotations

import polars as pl

from tracefit.tables import schema
from tracefit.tables.keys import ENGINE

GPU = "GPU"
"""The medium of the engine's own cache; events without one mean it too."""

_ENDS = {"TransferInitiated": "TransferCompleted", "RemoteTransferInitiated": "RemoteTransferCompleted"}
"""The event that a transfer begins with, and the one it ends with."""


def build_kv_events(
    rows: pl.DataFrame, steps: pl.DataFrame, journeys: pl.DataFrame, *, run_id: str
) -> tuple[pl.DataFrame, int]:
    """Return the `kv_events` table of one run, and how many events were left out as duplicates.

    An event belongs to the engine of its request, else to the only engine of the run, else to no known engine.
    Its step is the one it names, else that of its batch, else, where the steps before and after its time are both known,
    the one that was running. The end of a transfer names the step it was initiated in: that is `initiated_step`, and the
    step it ended in is the batch's.

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
        initiated_step=pl.when(is_end).then("own_step"),
        step_id=pl.when(is_end).then("batch_step").otherwise(pl.coalesce("own_step", "batch_step")),
    )
    assigned = _with_epoch(_with_server(assigned, steps, journeys), steps, journeys)
    assigned = _with_step(assigned, steps).sort("_order")
    transfer = pl.struct(*ENGINE, "data_parallel_rank", "event", "transfer_id", "step_id")
    kept = assigned.filter(~pl.col("event").is_in(list(_ENDS)) | transfer.is_first_distinct())
    return schema.KV_EVENTS.conform(kept), assigned.height - kept.height


def _with_server(rows: pl.DataFrame, steps: pl.DataFrame, journeys: pl.DataFrame) -> pl.DataFrame:
    core = journeys.filter(pl.col("layer") == "core")
    servers = pl.concat([steps["server"], core["server"]]).drop_nulls().unique()
    if len(servers) <= 1:
        return rows.with_columns(server=pl.lit(servers[0] if len(servers) else None, pl.String))
    owners = core.group_by("request_id").agg(pl.col("server").first())
    owned = rows.join(owners, on="request_id", how="left", maintain_order="left")
    # A data-parallel rank is one engine: the server of one of its events is that of all of them.
    ranks = (
        owned.drop_nulls("server")
        .group_by("data_parallel_rank")
        .agg(rank_server=pl.col("server").mode().sort().first())
    )
    joined = owned.join(ranks, on="data_parallel_rank", how="left", nulls_equal=True, maintain_order="left")
    return joined.with_columns(server=pl.coalesce("server", "rank_server"))


def _with_epoch(rows: pl.DataFrame, steps: pl.DataFrame, journeys: pl.DataFrame) -> pl.DataFrame:
    """Attach the epoch that was running at each event's time; epoch 0 before the first known one."""
    times = pl.concat([frame.select("server", "epoch", "unix_ns") for frame in (steps, journeys)])
    begins = times.drop_nulls().group_by("server", "epoch").agg(pl.col("unix_ns").min()).sort("unix_ns")
    joined = rows.sort("unix_ns").join_asof(begins, on="unix_ns", by="server", check_sortedness=False)
    return joined.with_columns(pl.col("epoch").fill_null(0))


def _with_step(rows: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Fill `step_id` by the clock where the event has none, and name the source in `step_source`."""
    known = steps.drop_nulls("unix_ns").sort(*ENGINE, "step_id")
    following = pl.col("step_id", "unix_ns").shift(-1).over(ENGINE).name.prefix("next_")
    between = known.select(*ENGINE, "unix_ns", "step_id", following).filter(
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

    Columns are those of the event that it begins with, `step_id` and `unix_ns` as `initiated_step` and `initiated_ns`, and
    completed_step, completed_ns (wall clock; null: no end was recorded) and success.
    """
    key = [*ENGINE, "data_parallel_rank", "event", "transfer_id"]
    # Ids may come again after a restart that left no trace: the n-th end belongs to the n-th beginning.
    turn = pl.int_range(pl.len()).over(key).alias("turn")
    begun = (
        events.filter(pl.col("event").is_in(list(_ENDS)))
        .sort("unix_ns")
        .drop("success", "initiated_step")
        .rename({"step_id": "initiated_step", "unix_ns": "initiated_ns"})
        .with_columns(turn)
    )
    ends = (
        events.filter(pl.col("event").is_in(list(_ENDS.values())))
        .sort("unix_ns")
        .with_columns(pl.col("event").replace({end: begin for begin, end in _ENDS.items()}))
        .select(*key, turn, "success", completed_step="step_id", completed_ns="unix_ns")
    )
    return begun.join(ends, on=[*key, "turn"], how="left", nulls_equal=True, maintain_order="left")
