"""Span batches to rows in the words of the tables.

Everything here needs one span at a time: what needs a view of the whole run (duplicates, servers, epochs) comes later,
in `resolve`. A row knows its span by `row`, the span's number in its part. A span or a reject knows its file by `file`,
the file's number among those of the part.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING

import polars as pl

from tracefit.otlp.batch import reject_frame
from tracefit.tables import dialects, schema
from tracefit.tables.span_requests import TOLD_KEYS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tracefit.otlp.batch import SpanBatch

UNKNOWN_SERVER = "unknown"

NO_STEP = "step.BATCH_SUMMARY without step.id or step.ts_start_ns"
NO_SNAPSHOT = "step.REQUEST_SNAPSHOT without step.id or request.id"
NO_CLOCK = "journey event without a time on the engine's clock"


@dataclass(frozen=True, slots=True)
class RowOptions:
    """What of the input is kept.

    Attributes:
        attributes: Keys of the span attributes that go into `spans.attributes`.
        all_spans: Whether spans of other scopes go into `spans` too.
        show_values: Whether excerpts of rejects may show what is in the records, which is private.
    """

    attributes: tuple[str, ...] = dialects.SPAN_ATTRIBUTES
    all_spans: bool = False
    show_values: bool = False


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of some records, by what they are about.

    Attributes:
        spans: One row per span of the vLLM scopes: what the `spans` table has, the request's facts, and what its events
            say of its clock (`zero`: wall clock less engine clock) and its step counter.
        journeys: `journey_events`, both layers.
        steps: `steps`.
        snapshots: `request_snapshots`.
        events: row, name, count: how many events of each name a span has.
        incomplete: row, reason: events without the fields that place them.
        rejects: What could not be read.
        others: Spans of other scopes, as the `spans` table has them, if they are kept.
        counts: file, spans, other_spans (kept or not), rejects: of files that have any.
    """

    spans: pl.DataFrame
    journeys: pl.DataFrame
    steps: pl.DataFrame
    snapshots: pl.DataFrame
    events: pl.DataFrame
    incomplete: pl.DataFrame
    rejects: pl.DataFrame
    others: pl.DataFrame
    counts: pl.DataFrame

    def frames(self) -> dict[str, pl.DataFrame]:
        """Return the frames by name."""
        return {name: getattr(self, name) for name in FRAMES}


_ATTRIBUTES = pl.List(pl.Struct({"key": pl.String, "value": pl.String}))
_REQUEST_ATTRIBUTES = {
    "request_id": "gen_ai.request.id",
    "route": "http.route",
    "api_prompt_tokens": "gen_ai.usage.prompt_tokens",
    "api_completion_tokens": "gen_ai.usage.completion_tokens",
    "api_max_tokens": "gen_ai.request.max_tokens",
    "model": "gen_ai.response.model",
    **TOLD_KEYS,
}
_CLOCK = ("zero", "first_ns", "last_ns", "first_step", "last_step")


def rows_of(batch: SpanBatch, options: RowOptions, files: Sequence[str]) -> Rows:
    """Put one batch into the words of the tables.

    Args:
        batch: Decoded spans.
        options: What of them is kept.
        files: Names of the files they are from.

    Returns:
        Its rows. An event name or an attribute no table asks for leaves its count alone.
    """
    every = _numbered(batch.spans, files)
    others = every.filter(~dialects.is_known())
    ours = every.filter(dialects.is_known()).with_row_index("row")
    rejects = _numbered(reject_frame(batch.rejects), files)
    events = _located(batch.events, ours)
    journeys = _journeys(events)
    steps = _table_of(events.get(dialects.STEP_EVENT), dialects.STEP_KEYS, schema.STEPS)
    snapshots = _table_of(
        events.get(dialects.SNAPSHOT_EVENT), dialects.SNAPSHOT_KEYS, schema.REQUEST_SNAPSHOTS
    )
    steps, no_step = _split_complete(steps, ("step_id", "ts_start_ns"), NO_STEP)
    snapshots, no_snapshot = _split_complete(snapshots, ("step_id", "request_id"), NO_SNAPSHOT)
    return Rows(
        spans=_spans(ours, batch.attributes, _clocks(journeys, steps), options),
        journeys=journeys,
        steps=steps,
        snapshots=snapshots,
        events=_event_counts(events),
        incomplete=pl.concat([no_step, no_snapshot]),
        rejects=rejects,
        others=_others(others, batch.attributes, options),
        counts=_counts({"spans": ours, "other_spans": others, "rejects": rejects}),
    )


def _numbered(rows: pl.DataFrame, files: Sequence[str]) -> pl.DataFrame:
    """Put the number of a row's file in the place of its name, which may change."""
    number = (
        pl.col("source_file").replace_strict(list(files), range(len(files)), return_dtype=pl.UInt32)
        if len(files) > 1
        else pl.lit(0, pl.UInt32)
    )
    return rows.with_columns(file=number).drop("source_file")


def _counts(kinds: Mapping[str, pl.DataFrame]) -> pl.DataFrame:
    one = pl.lit(1, pl.Int64)
    every = pl.concat(
        [
            rows.select("file", kind=pl.lit(kind), count="count" if "count" in rows.columns else one)
            for kind, rows in kinds.items()
        ]
    )
    counts = [pl.col("count").filter(pl.col("kind") == kind).sum().alias(kind) for kind in kinds]
    return every.group_by("file").agg(counts).sort("file")


def _located(events: Mapping[str, pl.DataFrame], spans: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """Keep the events of spans that are kept; `span.row` and `span.scope` come first, whatever attributes are called."""
    place = spans.select("span_row", pl.col("row").alias("span.row"), pl.col("scope").alias("span.scope"))
    located = {
        name: place.join(frame.drop("span.row", "span.scope", strict=False), on="span_row", how="inner")
        for name, frame in events.items()
    }
    return {name: frame for name, frame in located.items() if frame.height}


@cache
def no_rows() -> Rows:
    """Return rows of nothing, with the columns in place."""
    from tracefit.otlp.batch import SpanBatch  # noqa: PLC0415 - the decoder is not needed to read what was stored

    return rows_of(SpanBatch.empty(), RowOptions(), ())


_OWN_SERVER = pl.coalesce("service_instance_id", "host_name", "service_name", pl.lit(UNKNOWN_SERVER))


def _others(others: pl.DataFrame, attributes: pl.DataFrame, options: RowOptions) -> pl.DataFrame:
    kept = others if options.all_spans else others.clear()
    theirs = attributes.join(kept.select("span_row"), on="span_row", how="semi")
    allowed = _allowed(theirs, options.attributes)
    spans = kept.with_columns(server=_OWN_SERVER).join(
        allowed, on="span_row", how="left", maintain_order="left"
    )
    return spans.drop("span_row", "service_instance_id", "host_name", "dropped_attributes")


def _spans(
    ours: pl.DataFrame, attributes: pl.DataFrame, clocks: pl.DataFrame, options: RowOptions
) -> pl.DataFrame:
    spans = ours.with_columns(server=_OWN_SERVER)
    mine = attributes.join(ours.select("span_row"), on="span_row", how="semi")
    parts = (_wide(mine, _REQUEST_ATTRIBUTES), _allowed(mine, options.attributes))
    for part in parts:
        spans = spans.join(part, on="span_row", how="left", maintain_order="left")
    spans = spans.join(clocks, on="row", how="left", maintain_order="left")
    return spans.drop("span_row", "service_instance_id", "host_name")


def _wide(attributes: pl.DataFrame, keys: Mapping[str, str]) -> pl.DataFrame:
    """Long attributes to one row per span with one string column per wanted key."""
    wanted = attributes.filter(pl.col("key").is_in(list(keys.values())))
    return wanted.group_by("span_row").agg(
        pl.col("value").filter(pl.col("key") == key).last().alias(name) for name, key in keys.items()
    )


def _allowed(attributes: pl.DataFrame, keys: tuple[str, ...]) -> pl.DataFrame:
    """Keep the allow-listed attributes of each span as a list of key and value."""
    allowed = attributes.filter(pl.col("key").is_in(keys)).sort("span_row", "key")
    return allowed.group_by("span_row").agg(attributes=pl.struct("key", "value").cast(_ATTRIBUTES.inner))


def _event_counts(events: Mapping[str, pl.DataFrame]) -> pl.DataFrame:
    none = pl.DataFrame(schema={"row": pl.UInt32, "name": pl.String, "count": pl.Int64})
    counts = [
        frame.group_by(row="span.row").agg(name=pl.lit(name), count=pl.len().cast(pl.Int64))
        for name, frame in events.items()
    ]
    return pl.concat([none, *(c.select(none.columns) for c in counts)])


def _clocks(journeys: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Sum up what the events of each span say of its clock and of its step counter.

    An event is stamped on both clocks at once, so that the middle of a span's differences is its zero to microseconds.
    """
    stamps = pl.concat(
        [journeys.select("row", "unix_ns", "ts_ns"), steps.select("row", "unix_ns", ts_ns="ts_start_ns")]
    )
    zeros = stamps.group_by("row").agg(zero=(pl.col("unix_ns") - pl.col("ts_ns")).median().cast(pl.Int64))
    counters = steps.group_by("row").agg(
        first_ns=pl.col("ts_start_ns").min(),
        last_ns=pl.col("ts_start_ns").max(),
        first_step=pl.col("step_id").min(),
        last_step=pl.col("step_id").max(),
    )
    return zeros.join(counters, on="row", how="left").select("row", *_CLOCK)


def _pick(frame: pl.DataFrame, keys: tuple[str, ...], dtype: pl.DataType) -> pl.Expr:
    """Return the first of `keys` the frame has, as `dtype`; null where none is.

    A key whose values are of several kinds is text in the batches that show it: what a value becomes must not depend
    on its neighbours, so that text is read as the number it stands for.
    """
    present = [_as_type(frame.schema[k], k, dtype) for k in keys if k in frame.columns]
    return pl.coalesce(present) if present else pl.lit(None, dtype)


def _as_type(have: pl.DataType, key: str, wanted: pl.DataType) -> pl.Expr:
    column = pl.col(key)
    if have == pl.Boolean and wanted.is_numeric():
        return pl.lit(None, wanted)
    if have == pl.String and wanted.is_integer():
        number = column.cast(pl.Float64, strict=False).cast(wanted, strict=False)
        return pl.coalesce(column.cast(wanted, strict=False), number)
    return column.cast(wanted, strict=False)


def _table_of(
    frame: pl.DataFrame | None, keys: Mapping[str, tuple[str, ...]], table: schema.Table
) -> pl.DataFrame:
    """Map attribute columns to table columns; row and `unix_ns` come along."""
    types = {c.name: c.polars for c in table.columns}
    if frame is None:
        base = {"row": pl.UInt32(), "unix_ns": pl.Int64()}
        return pl.DataFrame(schema={**base, **{name: types[name] for name in keys}})
    return frame.select(
        pl.col("span.row").alias("row"),
        pl.when(pl.col("unix_ns") > 0).then("unix_ns").alias("unix_ns"),
        *(_pick(frame, aliases, types[name]).alias(name) for name, aliases in keys.items()),
    )


def _journeys(events: Mapping[str, pl.DataFrame]) -> pl.DataFrame:
    """Collect the events of both layers, whatever their spelling."""
    marks = {"layer": pl.String, "event": pl.String, "ts_ns": pl.Int64}
    nothing = _table_of(None, dialects.JOURNEY_KEYS, schema.JOURNEY_EVENTS)
    parts = [nothing.with_columns(pl.lit(None, dtype).alias(name) for name, dtype in marks.items())]
    for kind in dialects.JOURNEY_EVENTS:
        for frame in _spelled(events, kind):
            told = _table_of(frame, dialects.JOURNEY_KEYS, schema.JOURNEY_EVENTS)
            clock = frame.select(layer=pl.lit(kind.layer), event=pl.lit(kind.event), ts_ns=_ts_ns(frame))
            parts.append(pl.concat([told, clock], how="horizontal"))
    return pl.concat(parts)


def _spelled(events: Mapping[str, pl.DataFrame], kind: dialects.JourneyEvent) -> list[pl.DataFrame]:
    scope = dialects.LAYER_SCOPES[kind.layer]
    frames = [events[s].filter(pl.col("span.scope") == scope) for s in kind.spellings if s in events]
    return [f for f in frames if f.height]


def _ts_ns(frame: pl.DataFrame) -> pl.Expr:
    """Time of journey events on the engine's clock."""
    exact = _pick(frame, dialects.TS_NS_KEYS, pl.Int64())
    seconds = _pick(frame, dialects.TS_S_KEYS, pl.Float64())
    # Older builds write 0 where they have no nanoseconds.
    return pl.coalesce(pl.when(exact > 0).then(exact), (seconds * 1e9).round().cast(pl.Int64, strict=False))


def _split_complete(
    frame: pl.DataFrame, needed: tuple[str, ...], reason: str
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Split rows that have every needed column from those that do not."""
    bad = pl.any_horizontal(pl.col(c).is_null() for c in needed)
    return frame.filter(~bad), frame.filter(bad).select("row", reason=pl.lit(reason))


FRAMES = tuple(f.name for f in fields(Rows) if f.name != "counts")
