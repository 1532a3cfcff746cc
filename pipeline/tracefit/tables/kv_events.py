"""Decoded KV-cache events to the `kv_events` table: which engine, which step, each transfer once."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from tracefit.tables import schema

_TWICE = ("TransferInitiated", "RemoteTransferInitiated")
_COMPLETED = {"TransferInitiated": "TransferCompleted", "RemoteTransferInitiated": "RemoteTransferCompleted"}
ENGINE = ["run_id", "server", "epoch"]
GPU = "GPU"
"""The medium of the engine's own cache; events without one mean it too."""


@dataclass(frozen=True, slots=True)
class KvTables:
    """The `kv_events` table of one run, and how many events were there twice."""

    events: pl.DataFrame
    duplicates: int


def build_kv_events(
    rows: pl.DataFrame, steps: pl.DataFrame, journeys: pl.DataFrame, *, run_id: str
) -> KvTables:
    """Place the events of one run.

    An event belongs to the engine that had its request, else to the only engine of the run, else to none that is known.
    Its step is the one it names, else that of its batch, else, where the steps before and after its time are both known,
    the one that was running. The end of a transfer names the step it was initiated in: that is `initiated_step`, and the
    step it ended in is the batch's.

    Some builds tell of the beginning of a transfer twice: of several with one transfer id and step the first counts.

    Args:
        rows: As `decode_kv` returns them.
        steps: The `steps` table of the run.
        journeys: Its `journey_events`.
        run_id: The run.
    """
    ended = pl.col("event") == "TransferCompleted"
    placed = rows.with_row_index("_order").with_columns(
        run_id=pl.lit(run_id),
        initiated_step=pl.when(ended).then("own_step"),
        step_id=pl.when(ended).then("batch_step").otherwise(pl.coalesce("own_step", "batch_step")),
    )
    placed = placed.with_columns(
        step_source=pl.when(pl.col("step_id").is_not_null()).then(pl.lit("event")),
    )
    placed = _with_step_by_clock(_with_epoch(_with_server(placed, steps, journeys), steps, journeys), steps)
    transfer = [*ENGINE, "data_parallel_rank", "event", "transfer_id", "step_id"]
    again = pl.col("event").is_in(_TWICE) & ~pl.struct(transfer).is_first_distinct()
    kept = placed.sort("_order").filter(~again)
    return KvTables(schema.KV_EVENTS.conform(kept.drop("_order")), placed.height - kept.height)


def _with_server(rows: pl.DataFrame, steps: pl.DataFrame, journeys: pl.DataFrame) -> pl.DataFrame:
    core = journeys.filter(pl.col("layer") == "core")
    engines = pl.concat([steps["server"], core["server"]]).drop_nulls().unique()
    if len(engines) <= 1:
        return rows.with_columns(server=pl.lit(engines[0] if len(engines) else None, pl.String))
    owners = core.group_by("request_id").agg(pl.col("server").first())
    owned = rows.join(owners, on="request_id", how="left", maintain_order="left")
    # A data-parallel rank is one engine: what one of its events tells holds for all of them.
    ranks = (
        owned.drop_nulls("server")
        .group_by("data_parallel_rank")
        .agg(rank_server=pl.col("server").mode().sort().first())
    )
    joined = owned.join(ranks, on="data_parallel_rank", how="left", nulls_equal=True, maintain_order="left")
    return joined.with_columns(server=pl.coalesce("server", "rank_server")).drop("rank_server")


def _with_epoch(rows: pl.DataFrame, steps: pl.DataFrame, journeys: pl.DataFrame) -> pl.DataFrame:
    """Attach the epoch that was running at each event's time; before the first known one that is epoch 0."""
    marks = pl.concat(
        [frame.select("server", "epoch", "unix_ns") for frame in (steps, journeys)]
    ).drop_nulls()
    begins = marks.group_by("server", "epoch").agg(pl.col("unix_ns").min()).sort("unix_ns")
    joined = rows.sort("unix_ns").join_asof(begins, on="unix_ns", by="server", check_sortedness=False)
    return joined.with_columns(pl.col("epoch").fill_null(0))


def _with_step_by_clock(rows: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    known = steps.drop_nulls("unix_ns").sort(*ENGINE, "step_id")
    followed = pl.col("step_id").shift(-1).over(ENGINE) == pl.col("step_id") + 1
    spans = known.filter(followed.fill_null(value=False)).select(
        *ENGINE, "unix_ns", clock_step="step_id", until_ns=pl.col("unix_ns").shift(-1).over(ENGINE)
    )
    # The end of a span is the next summary of the engine, whether or not that one is followed itself.
    nexts = known.select(*ENGINE, clock_step=pl.col("step_id") - 1, until_ns="unix_ns")
    spans = spans.drop("until_ns").join(nexts, on=[*ENGINE, "clock_step"]).sort("unix_ns")
    joined = rows.sort("unix_ns").join_asof(spans, on="unix_ns", by=ENGINE, check_sortedness=False)
    inside = pl.col("unix_ns") < pl.col("until_ns")
    by_clock = pl.when(pl.col("step_id").is_null() & inside).then("clock_step")
    return joined.with_columns(
        step_id=pl.coalesce("step_id", by_clock),
        step_source=pl.coalesce("step_source", pl.when(by_clock.is_not_null()).then(pl.lit("clock"))),
    ).drop("clock_step", "until_ns")


def transfers(events: pl.DataFrame) -> pl.DataFrame:
    """One row per transfer that was begun, with what is known of its end.

    A store is committed in the step before its transfer is initiated, a load in the same one.

    Args:
        events: The `kv_events` table.

    Returns:
        Columns of the engine, data_parallel_rank, transfer_id, request_id, event, block_count, committed_step,
        initiated_step, initiated_ns, completed_step, completed_ns (of the wall clock; null: no end was seen), success.
    """
    key = [*ENGINE, "data_parallel_rank", "event", "transfer_id"]
    begun = events.filter(pl.col("event").is_in(_TWICE)).sort("unix_ns")
    ends = (
        events.filter(pl.col("event").is_in(_COMPLETED.values()))
        .sort("unix_ns")
        .select(
            *ENGINE,
            "data_parallel_rank",
            "transfer_id",
            event=pl.col("event").replace({done: began for began, done in _COMPLETED.items()}),
            completed_step="step_id",
            completed_ns="unix_ns",
            end_success="success",
            begun_step="initiated_step",
        )
    )
    # Ids may come again after a restart nobody noticed: the n-th end belongs to the n-th beginning.
    turn = pl.int_range(pl.len()).over(key).alias("turn")
    joined = begun.with_columns(turn).join(
        ends.with_columns(turn), on=[*key, "turn"], how="left", nulls_equal=True, maintain_order="left"
    )
    rows = joined.select(
        *key,
        "request_id",
        "source_medium",
        "dest_medium",
        "block_count",
        "block_size",
        "completed_step",
        "completed_ns",
        initiated_step="step_id",
        initiated_ns="unix_ns",
        success="end_success",
    )
    rows = rows.with_columns(is_store=pl.col("dest_medium") != GPU)
    return rows.join(_commits(events), on=[*ENGINE, "request_id", "is_store", "initiated_step"], how="left")


def _commits(events: pl.DataFrame) -> pl.DataFrame:
    """Return the steps in which transfers were committed, by the step these are expected in."""
    stores = pl.col("event") == "CacheStoreCommitted"
    committed = events.filter(pl.col("event").is_in(["CacheStoreCommitted", "CacheLoadCommitted"]))
    return committed.group_by(
        *ENGINE, "request_id", is_store=stores, initiated_step=pl.col("step_id") + stores.cast(pl.Int64)
    ).agg(committed_step=pl.col("step_id").min())
