"""Turn decoded spans into rows with the column names of the tables.

This module sees one batch of spans at a time; `resolve` later adds the facts of the whole run (duplicates,
servers, epochs). Column `row` is the number of the span in its part, and column `file` the number of the file
in its part.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import polars as pl

from tracefit.tables import dialects, schema
from tracefit.tables.clocks import CLOCK_FACTS, SAME_CLOCK_NS
from tracefit.tables.unread import values_read

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from tracefit.options import IngestOptions
    from tracefit.otlp.decode import SpanBatch, Wanted

UNKNOWN_SERVER = "unknown"
OTHER_REASON = "other"
_MOST_SCOPE_CHARS = 64

RECORDED_STEPS: dict[str, pl.DataType] = {
    "file": pl.UInt32(),
    **{
        name: schema.STEPS.types[name]
        for name in (
            *("source_offset", "server", "step_id", "unix_ns", "cycle_us", "cycle_source"),
            *("running_depth", "waiting_depth", "num_prefill_reqs", "num_decode_reqs", "scheduled_tokens"),
            *(
                "prefill_tokens",
                "decode_tokens",
                "context_tokens",
                "prefill_context_tokens",
                "waiting_tokens",
                "kv_usage_ratio",
            ),
        )
    },
}
"""Columns of recorded steps: those of the `steps` table that a record can fill."""


def _without(event: str, keys: Mapping[str, tuple[str, ...]], columns: Iterable[str]) -> str:
    return f"{event} without {' or '.join(keys[column][0] for column in columns)}"


_IDENTITY = {"steps": ("step_id", "ts_start_ns"), "request_snapshots": ("step_id", "request_id")}
NO_STEP = _without(dialects.STEP_EVENT, dialects.STEP_KEYS, _IDENTITY["steps"])
NO_SNAPSHOT = _without(dialects.SNAPSHOT_EVENT, dialects.SNAPSHOT_KEYS, _IDENTITY["request_snapshots"])
INCOMPLETE = {"steps": NO_STEP, "request_snapshots": NO_SNAPSHOT}
"""Table of events to the reason for rejecting events that lack their step or request."""
NO_CLOCK = "journey event without a time on the engine's clock"


_NO_EVENTS = pl.DataFrame(schema={"row": pl.UInt32, "unix_ns": pl.Int64, "span_scope": pl.String})
"""Replaces the events that a batch lacks: their attributes are null."""


def _kept_attributes(options: IngestOptions) -> frozenset[str]:
    return frozenset(dialects.SPAN_ATTRIBUTES).union(options.keep_attributes)


def hash_of_kept(options: IngestOptions) -> str:
    """Return the hash of the options that decide which part of a span is kept."""
    columns = dialects.SPAN_KEYS
    kept = (
        *(sorted(_kept_attributes(options)), columns),
        *(options.all_spans, options.show_values, options.max_rejects),
    )
    return hashlib.sha256(repr(kept).encode()).hexdigest()


def wanted_of(options: IngestOptions) -> Wanted:
    """Return the data that the decoder turns into columns."""
    from tracefit.otlp.decode import Wanted  # noqa: PLC0415 - staged rows are read without the decoder

    return Wanted(dialects.SPAN_KEYS, _kept_attributes(options), _event_types())


class SpanRows(msgspec.Struct, frozen=True):
    """Rows of some records, one frame per subject.

    Attributes:
        spans: One row per span of the vLLM scopes: the columns of the `spans` table, facts of the request, and facts of
            its events: clock (`zero`: wall clock less engine clock) and range of the step counter.
        journeys: Rows of `journey_events`, both layers.
        steps: Rows of `steps`.
        snapshots: Rows of `request_snapshots`.
        events: row, name, count: how many events of each name a span has.
        incomplete: row, reason: events without a required field.
        rejects: Input that could not be read.
        other_scope_spans: Spans of other scopes, with the columns of the `spans` table, if they are kept.
        other_scopes: file, scope (cut), count of the spans of other scopes, kept or not.
        recorded_steps: Steps of recordings, columns as `RECORDED_STEPS`.
        values_read: How many requests have lengths and times: see `unread.values_read`.
        counts: file, spans, other_spans (kept or not), rejects, steps (recorded ones), of files that have any.
    """

    spans: pl.DataFrame
    journeys: pl.DataFrame
    steps: pl.DataFrame
    snapshots: pl.DataFrame
    events: pl.DataFrame
    incomplete: pl.DataFrame
    rejects: pl.DataFrame
    other_scope_spans: pl.DataFrame
    other_scopes: pl.DataFrame
    recorded_steps: pl.DataFrame
    values_read: pl.DataFrame
    counts: pl.DataFrame

    def frames(self) -> dict[str, pl.DataFrame]:
        """Return the frames by name."""
        return {name: getattr(self, name) for name in FRAMES}


@cache  # the same for every batch of a process
def _event_types() -> dict[str, dict[str, pl.DataType]]:
    """Return, by event name and attribute key, the type of the column."""
    journey = _types(dialects.JOURNEY_KEYS, schema.JOURNEY_EVENTS)
    journey |= dict.fromkeys(dialects.TS_NS_KEYS, pl.Int64()) | dict.fromkeys(dialects.TS_S_KEYS, pl.Float64())
    types = {spelled: journey for kind in dialects.EVENT_KINDS for spelled in kind.spellings}
    types[dialects.STEP_EVENT] = _types(dialects.STEP_KEYS, schema.STEPS)
    types[dialects.SNAPSHOT_EVENT] = _types(dialects.SNAPSHOT_KEYS, schema.REQUEST_SNAPSHOTS)
    return types


def _types(keys: Mapping[str, tuple[str, ...]], table: schema.TableSchema) -> dict[str, pl.DataType]:
    types = table.types
    return {key: types[name] for name, spellings in keys.items() for key in spellings}


def rows_of(
    batch: SpanBatch,
    options: IngestOptions,
    recorded: pl.DataFrame | None = None,
    lacking: Mapping[int, Collection[str]] = {},
) -> SpanRows:
    """Return one batch as rows with the column names of the tables.

    Args:
        batch: Decoded spans, with the data of `wanted_of`.
        options: Which of them are kept.
        recorded: Steps of recordings, columns as `RECORDED_STEPS`.
        lacking: File to the values that the requests of its format never have; see `unread.values_read`.
    """
    recorded = pl.DataFrame(schema=RECORDED_STEPS) if recorded is None else recorded
    spans = batch.spans.with_columns(
        server=pl.coalesce("service_instance_id", "host_name", "service_name", pl.lit(UNKNOWN_SERVER)),
        status_message=_or_other(pl.col("status_message")),
    ).drop("service_instance_id", "host_name")
    # Rows are numbered among the spans that are read: events of other services are dropped with their spans.
    is_known = spans.select(dialects.is_known()).to_series()
    row = is_known.cum_sum().cast(pl.Int64) - 1
    row_of_span = pl.DataFrame(
        [row.set(~is_known, None).cast(pl.UInt32).alias("row"), spans["scope"].alias("span_scope")]
    )
    other_scope_spans = spans.filter(~is_known).drop("span_row", "dropped_attributes", *dialects.SPAN_KEYS)
    vllm_spans = spans.filter(is_known).with_row_index("row")
    del spans  # texts may be long: two copies are enough
    events = {name: _numbered(frame, row_of_span) for name, frame in batch.events.items()}
    journeys = _journeys(events)
    steps = events.get(dialects.STEP_EVENT, _NO_EVENTS)
    steps = steps.select(_columns_of(steps, dialects.STEP_KEYS, schema.STEPS))
    steps, no_step = _split_complete(steps, _IDENTITY["steps"], NO_STEP)
    snapshots = events.get(dialects.SNAPSHOT_EVENT, _NO_EVENTS)
    snapshots = snapshots.select(_columns_of(snapshots, dialects.SNAPSHOT_KEYS, schema.REQUEST_SNAPSHOTS))
    snapshots, no_snapshot = _split_complete(snapshots, _IDENTITY["request_snapshots"], NO_SNAPSHOT)
    return SpanRows(
        spans=vllm_spans.drop("span_row")
        .with_columns(
            *(pl.coalesce(keys).alias(name) for name, keys in dialects.REQUEST_ATTRIBUTES.items()),
            thread=_thread(),
        )
        .join(_clocks(journeys, steps), on="row", how="left", maintain_order="left"),
        journeys=journeys,
        steps=steps,
        snapshots=snapshots,
        events=_numbered(batch.event_counts, row_of_span).select("row", "name", "count"),
        incomplete=pl.concat([no_step, no_snapshot]),
        rejects=batch.rejects,
        other_scope_spans=other_scope_spans if options.all_spans else other_scope_spans.clear(),
        other_scopes=other_scope_spans.group_by(
            "file", pl.col("scope").str.head(_MOST_SCOPE_CHARS), maintain_order=True
        ).agg(count=pl.len().cast(pl.Int64)),
        recorded_steps=recorded,
        values_read=values_read(vllm_spans, batch.keys_of, lacking),
        counts=_counts(
            {
                "spans": vllm_spans,
                "other_spans": other_scope_spans,
                "rejects": batch.rejects,
                "steps": recorded,
            }
        ),
    )


def _thread() -> pl.Expr:
    """Return which of SGLang's threads a span is: label, ranks in a replica, and replica; empty for a request."""
    tp, pp, dp = (pl.col(key).fill_null("") for key in dialects.THREAD_KEYS[2:])
    thread = pl.format("{}|{}|{}", "thread_label", pl.format("{} {}", tp, pp).str.strip_chars(), dp)
    return pl.when(pl.col("rid").is_not_null()).then(pl.lit("")).when(pl.col("thread_label").is_not_null()).then(thread)


def _numbered(frame: pl.DataFrame, row_of_span: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of spans of the vLLM scopes, with their row and span_scope (one row per span) for `span_row`."""
    # Gathering rows by number takes a fraction of the time of a join.
    numbered = frame.drop("span_row").hstack(row_of_span[frame["span_row"]])
    return numbered.drop_nulls("row") if numbered["row"].has_nulls() else numbered


def _counts(kinds: Mapping[str, pl.DataFrame]) -> pl.DataFrame:
    ends = [rows["file"].max() for rows in kinds.values() if rows.height]
    size = max((int(end) for end in ends if isinstance(end, int)), default=-1) + 1
    weights = {kind: rows["count"] if "count" in rows.columns else None for kind, rows in kinds.items()}
    counts = {k: np.bincount(rows["file"], weights[k], size).astype(np.int64) for k, rows in kinds.items()}
    every = pl.DataFrame({"file": np.arange(size, dtype=np.uint32), **counts})
    return every.filter(pl.any_horizontal(pl.col(*kinds) > 0))


def _clocks(journeys: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Return clock and step counter of each span, from its events: row, zero, first and last time and step.

    Each event has a stamp of both clocks, so that the median difference is the zero to microseconds.
    """
    # Impossible times would overflow the differences; the rules of the tables report them later.
    steps = steps.filter(_is_possible("ts_start_ns", schema.STEPS), _is_possible("step_id", schema.STEPS))
    journeys = journeys.filter(_is_possible("ts_ns", schema.JOURNEY_EVENTS))
    stamps = pl.concat(
        [journeys.select("row", "unix_ns", "ts_ns"), steps.select("row", "unix_ns", ts_ns="ts_start_ns")]
    )
    zero = (pl.col("unix_ns") - pl.col("ts_ns")).median()
    zeros = stamps.group_by("row").agg(zero=zero.cast(pl.Int64))
    # A summary far from the span's zero has a wrong time, and its step would make the range of the counter absurd.
    away = pl.col("unix_ns") - pl.col("ts_start_ns") - pl.col("zero")
    with_zero = steps.join(zeros, on="row", how="left")
    counters = (
        with_zero.filter((away.abs() <= SAME_CLOCK_NS).fill_null(value=True))
        .group_by("row")
        .agg(
            first_ns=pl.col("ts_start_ns").min(),
            last_ns=pl.col("ts_start_ns").max(),
            first_step=pl.col("step_id").min(),
            last_step=pl.col("step_id").max(),
        )
    )
    return zeros.join(counters, on="row", how="left").select("row", *CLOCK_FACTS)


def _is_possible(name: str, table: schema.TableSchema) -> pl.Expr:
    """Return whether values are within the bounds of their column; true for null."""
    column = next(c for c in table.columns if c.name == name)
    return pl.col(name).is_between(column.least, column.most).fill_null(value=True)


def _first(frame: pl.DataFrame, spellings: Iterable[str], dtype: pl.DataType) -> pl.Expr:
    """Return the first non-null value of the columns that the frame has."""
    present = [name for name in spellings if name in frame.columns]
    return pl.coalesce(present) if present else pl.lit(None, dtype)


def _columns_of(frame: pl.DataFrame, keys: Mapping[str, tuple[str, ...]], table: schema.TableSchema) -> list[pl.Expr]:
    """Return attribute columns as table columns, with row and `unix_ns`."""
    types = table.types
    return [
        pl.col("row"),
        pl.when(pl.col("unix_ns") > 0).then("unix_ns").alias("unix_ns"),
        *(_column(frame, name, spellings, types[name]) for name, spellings in keys.items()),
    ]


def _column(frame: pl.DataFrame, name: str, spellings: Iterable[str], dtype: pl.DataType) -> pl.Expr:
    value = _first(frame, spellings, dtype)
    return (_or_other(value) if name == "reason" else value).alias(name)


def _or_other(text: pl.Expr) -> pl.Expr:
    """Return text with words that servers use unchanged; any other text, which may quote a prompt, becomes `other`."""
    is_known = text.is_in(dialects.REASONS) | text.is_null() | (text == "")
    return pl.when(is_known).then(text).otherwise(pl.lit(OTHER_REASON))


def _journeys(events: Mapping[str, pl.DataFrame]) -> pl.DataFrame:
    """Return the events of both layers, in every spelling."""
    parts = [
        events[spelled].with_columns(own_scope=pl.lit(kind.scope), layer=pl.lit(kind.layer), event=pl.lit(kind.event))
        for kind in dialects.EVENT_KINDS
        for spelled in kind.spellings
        if spelled in events
    ] or [_NO_EVENTS.with_columns(pl.lit("").alias(c) for c in ("own_scope", "layer", "event"))]
    # The name of an event counts only in its scope: other scopes may use the same word.
    every = pl.concat(parts, how="diagonal").filter(pl.col("span_scope") == pl.col("own_scope"))
    columns = _columns_of(every, dialects.JOURNEY_KEYS, schema.JOURNEY_EVENTS)
    return every.select(*columns, "layer", "event", ts_ns=_ts_ns(every))


def _ts_ns(frame: pl.DataFrame) -> pl.Expr:
    """Return the time of journey events on the engine's clock."""
    exact = _first(frame, dialects.TS_NS_KEYS, pl.Int64())
    seconds = _first(frame, dialects.TS_S_KEYS, pl.Float64())
    # Older builds write 0 if they have no nanoseconds.
    return pl.coalesce(pl.when(exact > 0).then(exact), (seconds * 1e9).round().cast(pl.Int64, strict=False))


def _split_complete(frame: pl.DataFrame, needed: tuple[str, ...], reason: str) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the rows that have every needed column, and the others as rejects."""
    bad = frame.filter(pl.any_horizontal(pl.col(needed).is_null()))
    return frame.drop_nulls(needed), bad.select("row", reason=pl.lit(reason))


FRAMES = tuple(name for name in SpanRows.__struct_fields__ if name != "counts")
