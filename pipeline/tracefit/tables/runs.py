"""Build the `runs` table: one row per run and server, with all facts that `train` needs without the traces.

`run_rows` adds up the other tables of a run, and estimates which shares of steps, snapshots and requests were traced.
`find_overlaps` finds runs that were ingested under two names, by their spans.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING

import msgspec
import polars as pl

from tracefit.statistics import divided
from tracefit.tables import dialects, schema
from tracefit.tables.rows import INCOMPLETE
from tracefit.tables.sources import is_by_client, is_from

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tracefit.tables.store import TableStore

_SERVER = "server"

COMPLETE_SHARE = 0.97
"""Journeys of at least this share of requests count as complete: clients that reuse ids lose a few."""

_STEP_WINDOW = 1 << 20
"""Number of steps in memory at once."""


def run_rows(scan: Callable[[str], pl.LazyFrame], run: pl.Expr, columns: pl.DataFrame) -> pl.DataFrame:
    """Return the `runs` table of some runs: one row per server.

    Args:
        scan: Returns a table of the runs.
        run: The number of a run, from the server.
        columns: Values that all servers of a run share: `run`, its number, and columns of the table.
    """
    spans = scan("spans").filter(dialects.is_known()).group_by(_SERVER).agg(**_SPAN_COUNTS)
    recorded = scan("steps").filter(_IS_RECORDED).group_by(_SERVER).agg(**_of_records())
    naming = scan("journey_events").filter(_NAMES_A_STEP).select(_STEP_IN_RUN)
    counters = _counters(pl.concat([naming, scan("steps").select(_STEP_IN_RUN)]), _ENGINE_IN_RUN)
    epochs = counters.group_by(_SERVER).agg(
        epochs=pl.len(), counted=(pl.col("last_step") - pl.col("first_step") + 1).sum()
    )
    requests = scan("requests").group_by(_SERVER).agg(**_RATIOS, requests=pl.len())
    # In streams, because the tables may not fit into memory.
    rows, records, *parts = pl.collect_all([spans, recorded, epochs, requests], engine="streaming")
    # A server has spans, recorded steps, or both.
    rows = pl.concat([rows, records], how="diagonal").group_by(_SERVER, maintain_order=True).agg(**_SUMS)
    for part in (*parts, _sampling(scan)):
        rows = rows.join(part, on=_SERVER, how="left")
    shared = pl.Schema({name: schema.RUNS.types.get(name, kind) for name, kind in columns.schema.items()})
    rows = rows.with_columns(run=run.cast(shared["run"])).join(columns.cast(shared), on="run", how="left")
    traced = pl.col("steps") > 0
    return schema.RUNS.conform(
        rows.with_columns(
            *(pl.col(c).fill_null(0) for c in ("steps", "requests", "epochs", "rich_steps", "spans", "dropped_events")),
            *(pl.when(pl.col(c).is_finite()).then(c).alias(c) for c in _RATIOS),
        ).with_columns(
            lost_steps=pl.when(pl.col("recorded_steps") > 0).then(pl.col("counted") - pl.col("recorded_steps")),
            step_sampling=pl.when(traced).then(pl.col("steps") / pl.col("counted")).otherwise(0.0),
            snapshot_sampling=pl.when(traced).then(pl.col("rich_steps") / pl.col("steps")),
        )
    )


def with_implausible(runs: pl.DataFrame, rejects: pl.DataFrame, odd: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Add the values that break a rule to the `runs` and `rejects` tables of their runs.

    Args:
        runs: Rows of `runs`.
        rejects: The rows of `rejects` of these runs.
        odd: The second result of `TableSchema.sift_derived`: run_id, reason, count.
    """
    counts = {run_id: Counter(json.loads(text or "{}")) for run_id, text in runs.select("run_id", "implausible").rows()}
    for run_id, reason, count in odd.iter_rows():
        counts[run_id][reason] += count
    texts = {run_id: json.dumps(count, sort_keys=True) for run_id, count in counts.items() if count}
    named = pl.col("run_id").replace_strict(texts, default=None, return_dtype=pl.String)
    return (
        runs.with_columns(implausible=pl.coalesce(named, "implausible")),
        schema.REJECTS.conform(pl.concat([rejects, schema.REJECTS.shape(odd)])),
    )


def filled_attributes(table: str, rows: pl.DataFrame) -> pl.DataFrame:
    """Return how many events of each run and name have a usable value of each attribute.

    Args:
        table: A table of events: see `EVENT_TABLES`.
        rows: Some of its rows.

    Returns:
        run_id, event (the table itself if its events have one name), and the columns that are read from attributes.
    """
    if table == "steps":
        rows = rows.filter(~_IS_RECORDED)
    if table != "journey_events":
        rows = rows.with_columns(event=pl.lit(table))
    return rows.group_by("run_id", "event").agg(pl.col(*_EVENTS_OF[table]).count())


def missing_attributes(
    filled: Mapping[str, Sequence[pl.DataFrame]], rejects: pl.LazyFrame
) -> dict[str, dict[str, list[str]]]:
    """Return, by run and event, the attributes without a usable value in any of the run's events of that name.

    Args:
        filled: Table to the results of `filled_attributes` for all its rows.
        rejects: The table of that name.
    """
    missing: dict[str, dict[str, list[str]]] = {}
    names = set()
    for table, counts in filled.items():
        events = pl.concat(counts).group_by("run_id", "event").agg(pl.all().sum())
        for row in events.rows(named=True):
            name = _EVENT_NAMES[row["event"]]
            names.add((row["run_id"], name))
            lacking = [_EVENTS_OF[table][c][0] for c in _expected(table, row["event"]) if not row[c]]
            if lacking:
                missing.setdefault(row["run_id"], {})[name] = sorted(lacking)
    is_incomplete = pl.col("reason").is_in(list(INCOMPLETE.values()))
    incomplete = rejects.filter(is_incomplete).select("run_id", "reason").unique().collect()
    tables_of = {reason: table for table, reason in INCOMPLETE.items()}
    for run_id, reason in incomplete.iter_rows():
        # No table has events that lack their step or request: if it has no event of this name, all lack the attribute.
        event, _, attributes = reason.partition(" without ")
        if (run_id, event) not in names:
            missing.setdefault(run_id, {})[_EVENT_NAMES[tables_of[reason]]] = [attributes]
    return {run_id: dict(sorted(events.items())) for run_id, events in missing.items()}


_EVENTS_OF = {
    "journey_events": dialects.JOURNEY_KEYS,
    "steps": dialects.STEP_KEYS,
    "request_snapshots": dialects.SNAPSHOT_KEYS,
}
"""Table of events to its columns and the attributes that each is read from."""

EVENT_TABLES = frozenset(_EVENTS_OF)
"""The tables of events."""

_EVENT_NAMES = {
    **{kind.event: kind.spellings[0] for kind in dialects.EVENT_KINDS},
    "steps": dialects.STEP_EVENT,
    "request_snapshots": dialects.SNAPSHOT_EVENT,
}
"""Name of an event in the tables to its name in traces."""

_CORE_EVENTS = tuple(kind.event for kind in dialects.EVENT_KINDS if kind.layer == "core")
_ONE_EVENT = {"schedule_kind": "SCHEDULED", "finish_status": "FINISHED", "reason": "ABORTED"}
"""Column to the one event that has it."""

_OPTIONAL = ("effective_prompt_len", "context_tokens", "prefill_context_tokens")
"""Columns that have no values on a server without a prefix cache, or without the plugin."""


def _expected(table: str, event: str) -> list[str]:
    """Return the columns that every event of a name should fill."""
    of_event = [c for c in _EVENTS_OF[table] if _ONE_EVENT.get(c, event) == event and c not in _OPTIONAL]
    of_api = table == "journey_events" and event not in _CORE_EVENTS
    return [c for c in of_event if c in _ONE_EVENT] if of_api else of_event


_ENGINE_IN_RUN = schema.ENGINE[1:]  # within the one run that is tallied
_STEP_IN_RUN = [*_ENGINE_IN_RUN, "step_id"]
_NARROW_STEP = (pl.col(_SERVER).cast(pl.Categorical), pl.col("epoch").cast(pl.UInt32), pl.col("step_id"))
"""Compact types, for frames with every request or step of a run."""

_NAMES_A_STEP = pl.col("step_id").is_not_null() & (pl.col("event") != "QUEUED")
"""QUEUED carries the last step before it, 0 at a fresh start, and so names no step."""

_IS_TIMED = pl.col("start_unix_ns") < int(1e9 * dialects.NOT_SENT_S)
_SPAN_COUNTS = {
    "spans": pl.len(),
    "dropped_events": pl.col("dropped_events").sum(),
    "first_unix_ns": pl.col("start_unix_ns").filter(_IS_TIMED).min(),
    "last_unix_ns": pl.col("end_unix_ns").filter(_IS_TIMED).max(),
    "dialects": pl.col("scope").unique().sort().str.join(","),
}
_IS_RECORDED = pl.col("cycle_source").is_not_null()


def _of_records() -> dict[str, pl.Expr]:
    """Return the facts of a server from its recorded steps."""
    of_engine = is_from(lambda source: source.seen_by == "engine")
    return {
        # The steps that a client saw have numbers of ours.
        "recorded_steps": (~is_by_client()).sum(),
        # Other steps come with spans, or with requests as spans, which have a dialect.
        "dialects": pl.col("cycle_source").filter(of_engine).first(),
        "first_unix_ns": pl.col("unix_ns").min(),
        "last_unix_ns": pl.col("unix_ns").max(),
    }


_SUMS = {
    **{name: pl.col(name).sum() for name in ("spans", "dropped_events")},
    "recorded_steps": pl.col("recorded_steps").first(ignore_nulls=True),
    # From spans if there are any, because a log may state a local time.
    **{name: pl.col(name).first() for name in ("first_unix_ns", "last_unix_ns")},
    "dialects": pl.col("dialects").drop_nulls().str.join(","),
}
_ARRIVAL = pl.col("arrival_ns")
_CACHED = pl.col("cached_prompt_tokens")
_RATIOS = {
    "arrival_rate_per_s": (_ARRIVAL.count() - 1) / divided(_ARRIVAL.max() - _ARRIVAL.min(), 1e9),
    "prefix_hit_ratio": _CACHED.sum() / pl.col("prompt_tokens").filter(_CACHED.is_not_null()).sum(),
    # From sums of integers, because the last digit of a mean may depend on the order of rows.
    **{f"{c}_mean": pl.col(c).sum() / pl.col(c).count() for c in ("prompt_tokens", "max_tokens", "output_tokens")},
}


def _sampling(scan: Callable[[str], pl.LazyFrame]) -> pl.DataFrame:
    """Count steps and steps with snapshots per server, and estimate the share of requests with a journey.

    A traced request decodes in the sampled steps between its first token and its end, while a summary counts all
    requests: the ratio of the two sums is the share. A server without step summaries has no estimate.
    """
    ends = scan("requests").filter(pl.all_horizontal(pl.col("first_token_step", "finished_step").is_not_null()))
    edges = pl.concat(
        ends.select(*_NARROW_STEP[:2], step_id=pl.col(step) + 1, change=pl.lit(change, pl.Int32))
        for step, change in (("first_token_step", 1), ("finished_step", -1))
    )
    rich, ordered = pl.collect_all(
        [scan("request_snapshots").select(_NARROW_STEP).unique(), edges.sort("step_id")], engine="streaming"
    )
    # The number of traced requests that decode from each step on.
    running = ordered.select(*_STEP_IN_RUN, members=pl.col("change").cum_sum().over(_ENGINE_IN_RUN))
    counts = []
    narrow = scan("steps").select(*_NARROW_STEP, "num_decode_reqs")
    # The empty first batch gives a run without steps its sums of 0.
    for steps in chain([narrow.clear().collect()], narrow.collect_batches(chunk_size=_STEP_WINDOW)):
        at_steps = steps.sort("step_id").join_asof(running, on="step_id", by=_ENGINE_IN_RUN, check_sortedness=False)
        is_rich = steps.join(rich, on=_STEP_IN_RUN, how="semi").group_by(_SERVER).agg(rich_steps=pl.len())
        decoding = at_steps.group_by(_SERVER).agg(
            steps=pl.len(),
            traced_decodes=pl.col("members").cast(pl.Int64).sum(),
            decodes=pl.col("num_decode_reqs").sum(),
        )
        counts.append(decoding.join(is_rich, on=_SERVER, how="left"))
    sums = pl.concat(counts).group_by(pl.col(_SERVER).cast(pl.String)).agg(pl.all().sum())
    share = (pl.col("traced_decodes") / pl.col("decodes")).clip(0.0, 1.0)
    return sums.with_columns(journey_sampling=pl.when(share.is_finite()).then(share))


def are_stock(runs: pl.DataFrame) -> bool:
    """Return whether no span of the `runs` comes from the instrumented server, whose flags would be useless advice."""
    return not runs["dialects"].str.split(",").explode().is_in(dialects.EVENT_SCOPES).any()


def step_counters(steps: pl.DataFrame, journeys: pl.DataFrame) -> pl.DataFrame:
    """Return the first and last step of every epoch: run_id, server, epoch, first_step, last_step."""
    columns = [*schema.ENGINE, "step_id"]
    named = pl.concat([steps.select(columns), journeys.filter(_NAMES_A_STEP).select(columns)])
    return _counters(named.lazy(), schema.ENGINE).collect()


def _counters(named: pl.LazyFrame, engine: list[str]) -> pl.LazyFrame:
    step = pl.col("step_id")
    return named.group_by(engine).agg(first_step=step.min(), last_step=step.max())


_SPAN_ID_COLUMNS = ("trace_id", "span_id", "start_unix_ns", "end_unix_ns")
"""Columns that identify a span across runs: spans with equal ids and different times differ."""

_RECORD_IDS = ("server", "epoch", "step_id", "cycle_us", "cycle_source", "num_decode_reqs", "context_tokens")
_FIRST_NS, _LAST_NS = -(2**62), 2**62


class Overlap(msgspec.Struct, frozen=True):
    """A run that shares spans with a run of at least the same size.

    Attributes:
        run_id: The run.
        other: The run to keep.
        spans: Number of shared spans.
    """

    run_id: str
    other: str
    spans: int


def find_overlaps(store: TableStore, runs: pl.DataFrame) -> tuple[Overlap, ...]:
    """Find runs that share spans with a run to keep: the same traces under two names, such as rotated files.

    Such spans would count twice, and hold-out rows of one run would train the model through the other. Larger
    runs are kept before smaller ones, equal ones by name. Only runs that overlap in time are compared, with
    eight bytes in memory for each of their spans.

    Args:
        store: The tables.
        runs: Rows of the `runs` table.

    Returns:
        One overlap per run to leave out, in the order of the rows.
    """
    spans = runs.group_by("run_id", maintain_order=True).agg(
        pl.col("spans").sum() + pl.col("steps").filter(pl.col("lost_steps").is_not_null()).sum(),
        # Records without a time may have run at any time.
        pl.col("first_unix_ns").min().fill_null(_FIRST_NS),
        pl.col("last_unix_ns").max().fill_null(_LAST_NS),
    )
    ordered = spans.sort(pl.col("spans"), pl.col("run_id"), descending=[True, False])
    ids_of: dict[str, pl.Series] = {}

    def ids(run_id: str) -> pl.Series:
        if run_id not in ids_of:
            spans = store.read("spans", [run_id], _SPAN_ID_COLUMNS).select(_SPAN_ID_COLUMNS).hash_rows()
            steps = store.read("steps", [run_id], _RECORD_IDS).filter(_IS_RECORDED).select(_RECORD_IDS)
            ids_of[run_id] = pl.concat([spans, steps.hash_rows()])
        return ids_of[run_id]

    kept: list[tuple[str, int, int]] = []
    overlaps: dict[str, Overlap] = {}
    for run_id, _, first, last in ordered.iter_rows():
        concurrent = [name for name, begin, end in kept if begin <= last and first <= end]
        shared = {name: int(ids(run_id).is_in(ids(name).implode()).sum()) for name in concurrent}
        other = max(shared, key=shared.__getitem__, default=None)
        if other is not None and shared[other]:
            overlaps[run_id] = Overlap(run_id, other, shared[other])
            del ids_of[run_id]
        else:
            kept.append((run_id, first, last))
    return tuple(overlaps[name] for name in spans["run_id"] if name in overlaps)
