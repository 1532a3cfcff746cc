"""Decoded span batches of one run to its span, journey, step and snapshot tables."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from tracefit.otlp.batch import REJECT_COLUMNS, SpanBatch
from tracefit.tables import dialects, schema
from tracefit.tables.clocks import on_core_clock, tell_apart
from tracefit.tables.epochs import assign_epochs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

UNKNOWN_SERVER = "unknown"


@dataclass(frozen=True, slots=True)
class IngestCounts:
    """What went through, for the report: nothing is lost without a number here."""

    spans: int = 0
    other_spans: int = 0
    duplicate_spans: int = 0
    dropped_events: int = 0
    dropped_attributes: int = 0
    rejects: int = 0
    moved_events: int = 0
    """API events whose clock was not the engine core's: moved to it by way of the wall clock."""
    events: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class EventTables:
    """Tables straight from the events of one run, conformed to their schema, and the counts."""

    spans: pl.DataFrame
    journey_events: pl.DataFrame
    steps: pl.DataFrame
    request_snapshots: pl.DataFrame
    rejects: pl.DataFrame
    api_spans: pl.DataFrame
    """trace_id, span_id, request_id, route, prompt_tokens, completion_tokens, max_tokens of `llm_request` spans."""
    counts: IngestCounts


@dataclass(frozen=True, slots=True)
class _Joined:
    spans: pl.DataFrame
    attributes: pl.DataFrame
    events: Mapping[str, pl.DataFrame]
    rejects: pl.DataFrame


def build_event_tables(batches: Iterable[SpanBatch], *, run_id: str) -> EventTables:
    """Turn all span batches of one run into its event tables.

    A span is its (trace_id, span_id): one that was read twice counts once. Spans of other scopes are counted and
    left out. An event without the fields that place it (step id, clock) becomes a reject.
    """
    joined = _join_batches(batches)
    ours = joined.spans.filter(pl.col("scope").is_in(dialects.VLLM_SCOPES))
    kept = ours.unique(["trace_id", "span_id"], keep="first", maintain_order=True)
    kept = _with_server(kept, joined.events)
    kept = kept.join(_wide_attributes(joined.attributes, _REQUEST_ATTRIBUTES), on="span_row", how="left")
    events = _events_of(kept, joined.events)

    journeys, bad_journeys = _journey_events(events)
    journeys, moved = on_core_clock(journeys)
    steps, bad_steps = _split_complete(
        _table_of(events.get(dialects.STEP_EVENT), dialects.STEP_KEYS, schema.STEPS),
        ("step_id", "ts_start_ns"),
        "step.BATCH_SUMMARY without step.id or step.ts_start_ns",
    )
    snapshots, bad_snapshots = _split_complete(
        _table_of(events.get(dialects.SNAPSHOT_EVENT), dialects.SNAPSHOT_KEYS, schema.REQUEST_SNAPSHOTS),
        ("step_id", "request_id"),
        "step.REQUEST_SNAPSHOT without step.id or request.id",
    )
    journeys, steps, snapshots = assign_epochs(journeys, steps, snapshots)
    rejects = pl.concat([joined.rejects, bad_journeys, bad_steps, bad_snapshots], how="vertical")
    run = pl.lit(run_id).alias("run_id")
    counts = IngestCounts(
        spans=kept.height,
        other_spans=joined.spans.height - ours.height,
        duplicate_spans=ours.height - kept.height,
        dropped_events=int(kept["dropped_events"].sum() or 0),
        dropped_attributes=int(kept["dropped_attributes"].sum() or 0),
        rejects=rejects.height,
        moved_events=moved,
        events=tuple(sorted((name, frame.height) for name, frame in events.items() if frame.height)),
    )
    return EventTables(
        spans=schema.SPANS.conform(_spans_table(kept, joined.attributes).with_columns(run)),
        journey_events=schema.JOURNEY_EVENTS.conform(journeys.with_columns(run)),
        steps=schema.STEPS.conform(steps.with_columns(run)),
        request_snapshots=schema.REQUEST_SNAPSHOTS.conform(snapshots.with_columns(run)),
        rejects=schema.REJECTS.conform(rejects.with_columns(run)),
        api_spans=kept.filter(pl.col("scope") == dialects.API_SCOPE),
        counts=counts,
    )


def _join_batches(batches: Iterable[SpanBatch]) -> _Joined:
    """Concatenate batches; `span_row` becomes unique over the whole run."""
    spans: list[pl.DataFrame] = []
    attributes: list[pl.DataFrame] = []
    events: dict[str, list[pl.DataFrame]] = {}
    rejects: list[tuple[object, ...]] = []
    offset = 0
    for batch in batches:
        shift = (pl.col("span_row") + offset).cast(pl.UInt32)
        spans.append(batch.spans.with_columns(shift))
        attributes.append(batch.attributes.with_columns(shift))
        for name, frame in batch.events.items():
            events.setdefault(name, []).append(frame.with_columns(shift))
        rejects += [(r.source_file, r.source_offset, r.length, r.reason, r.excerpt) for r in batch.rejects]
        offset += batch.spans.height
    empty = SpanBatch.empty()
    return _Joined(
        spans=pl.concat(spans or [empty.spans]),
        attributes=pl.concat(attributes or [empty.attributes]),
        # Batches may disagree on an attribute's type (an int here, a string there): the wider type holds both.
        events={n: pl.concat(_align(f), how="diagonal_relaxed") for n, f in events.items()},
        rejects=pl.DataFrame(rejects, schema=REJECT_COLUMNS, orient="row"),
    )


def _align(frames: list[pl.DataFrame]) -> list[pl.DataFrame]:
    """Cast columns that are strings in one frame and something else in another to strings in all."""
    kinds: dict[str, set[pl.DataType]] = {}
    for frame in frames:
        for name, dtype in frame.schema.items():
            kinds.setdefault(name, set()).add(dtype)
    mixed = [n for n, k in kinds.items() if len(k) > 1 and not all(d.is_numeric() for d in k)]
    return [f.with_columns(pl.col(n).cast(pl.String) for n in mixed if n in f.columns) for f in frames]


_REQUEST_ATTRIBUTES = {
    "request_id": "gen_ai.request.id",
    "route": "http.route",
    "api_prompt_tokens": "gen_ai.usage.prompt_tokens",
    "api_completion_tokens": "gen_ai.usage.completion_tokens",
    "api_max_tokens": "gen_ai.request.max_tokens",
    "model": "gen_ai.response.model",
}


def _wide_attributes(attributes: pl.DataFrame, keys: Mapping[str, str]) -> pl.DataFrame:
    """Long attributes to one row per span with one string column per wanted key."""
    wanted = attributes.filter(pl.col("key").is_in(list(keys.values())))
    return wanted.group_by("span_row").agg(
        pl.col("value").filter(pl.col("key") == key).last().alias(name) for name, key in keys.items()
    )


def _with_server(spans: pl.DataFrame, events: Mapping[str, pl.DataFrame]) -> pl.DataFrame:
    """Name each span's server.

    The API process and the engine core are two processes and, with newer SDKs, two service.instance.ids: an API
    span belongs to the server of the core span under it. Without one it goes to the only engine there is, if so.
    Engines that share a name get one each.
    """
    own = pl.coalesce("service_instance_id", "host_name", "service_name", pl.lit(UNKNOWN_SERVER))
    spans = spans.with_columns(server=own)
    is_api = pl.col("scope") == dialects.API_SCOPE
    apart = tell_apart(spans.filter(~is_api), _engine_marks(events))
    spans = spans.join(apart, on="span_row", how="left", suffix="_apart", maintain_order="left")
    spans = spans.with_columns(server=pl.coalesce("server_apart", "server")).drop("server_apart")
    engines = spans.filter(~is_api)
    parents = (
        spans.filter(pl.col("scope") == dialects.CORE_SCOPE)
        .select("trace_id", pl.col("parent_span_id").alias("span_id"), pl.col("server").alias("engine"))
        .unique(["trace_id", "span_id"], keep="first", maintain_order=True)
    )
    names = engines["server"].unique()
    only = pl.lit(names[0] if len(names) == 1 else None, pl.String)
    inherited = pl.coalesce("engine", only, "server")
    return (
        spans.join(parents, on=["trace_id", "span_id"], how="left", maintain_order="left")
        .with_columns(server=pl.when(is_api).then(inherited).otherwise("server"))
        .drop("engine")
    )


def _engine_marks(events: Mapping[str, pl.DataFrame]) -> pl.DataFrame:
    """Clock and step counter of the engines' events, for `tell_apart`."""
    steps = {dialects.STEP_EVENT: dialects.STEP_KEYS, dialects.SNAPSHOT_EVENT: dialects.SNAPSHOT_KEYS}
    parts = [
        events[name].select(
            "span_row",
            "unix_ns",
            ts_ns=_pick(events[name], keys.get("ts_start_ns", ()), pl.Int64()),
            step=_pick(events[name], keys["step_id"], pl.Int64()),
            is_summary=pl.lit(name == dialects.STEP_EVENT),
        )
        for name, keys in steps.items()
        if name in events
    ]
    spelled = {
        s: kind.event for kind in dialects.JOURNEY_EVENTS if kind.layer == "core" for s in kind.spellings
    }
    for name in sorted(spelled.keys() & events.keys()):
        # Inside a step's schedule() or, for all others, after its execution.
        late = 0 if spelled[name] in ("SCHEDULED", "PREEMPTED") else 1
        frame = events[name]
        step = _pick(frame, dialects.JOURNEY_KEYS["step_id"], pl.Int64()) + late
        parts.append(
            frame.select(
                "span_row", "unix_ns", ts_ns=_ts_ns(frame), step=step, is_summary=pl.lit(value=False)
            )
        )
    types = {
        "span_row": pl.UInt32,
        "unix_ns": pl.Int64,
        "ts_ns": pl.Int64,
        "step": pl.Int64,
        "is_summary": pl.Boolean,
    }
    marks = pl.concat([pl.DataFrame(schema=types), *parts], how="vertical_relaxed")
    return marks.with_columns(unix_ns=pl.when(pl.col("unix_ns") > 0).then("unix_ns"))


_CARRIED = ("trace_id", "span_id", "scope", "server", "request_id", "source_file", "source_offset")


def _events_of(spans: pl.DataFrame, events: Mapping[str, pl.DataFrame]) -> dict[str, pl.DataFrame]:
    """Keep the events of the spans that were kept, with what identifies their span (prefixed `span.`)."""
    carried = spans.select("span_row", *(pl.col(c).alias(f"span.{c}") for c in _CARRIED))
    joined = {name: frame.join(carried, on="span_row", how="inner") for name, frame in events.items()}
    return {name: frame for name, frame in joined.items() if frame.height}


def _pick(frame: pl.DataFrame, keys: tuple[str, ...], dtype: pl.DataType) -> pl.Expr:
    """Return the first of `keys` the frame has, cast to `dtype`; null where none is."""
    present = [pl.col(k).cast(dtype, strict=False) for k in keys if k in frame.columns]
    return pl.coalesce(present) if present else pl.lit(None, dtype)


def _table_of(
    frame: pl.DataFrame | None, keys: Mapping[str, tuple[str, ...]], table: schema.Table
) -> pl.DataFrame:
    """Map attribute columns to table columns; `unix_ns`, server and source come along."""
    if frame is None:
        base = {"server": pl.String, "unix_ns": pl.Int64, "source_file": pl.String, "source_offset": pl.Int64}
        types = {c.name: c.polars for c in table.columns if c.name in keys}
        return pl.DataFrame(schema={**types, **base})
    types = {c.name: c.polars for c in table.columns}
    return frame.select(
        *(_pick(frame, aliases, types[name]).alias(name) for name, aliases in keys.items()),
        pl.col("span.server").alias("server"),
        pl.when(pl.col("unix_ns") > 0).then("unix_ns").alias("unix_ns"),
        pl.col("span.source_file").alias("source_file"),
        pl.col("span.source_offset").alias("source_offset"),
    )


def _journey_events(events: Mapping[str, pl.DataFrame]) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Collect the events of both layers, whatever their spelling."""
    parts = [
        _journey_part(frame, kind) for kind in dialects.JOURNEY_EVENTS for frame in _spelled(events, kind)
    ]
    ids = {"trace_id": pl.String, "span_id": pl.String, "request_id": pl.String}
    marks = {"layer": pl.String, "event": pl.String, "ts_ns": pl.Int64}
    nothing = _table_of(None, dialects.JOURNEY_KEYS, schema.JOURNEY_EVENTS)
    nothing = nothing.with_columns(
        pl.lit(None, dtype).alias(name) for name, dtype in {**ids, **marks}.items()
    )
    rows = pl.concat([nothing, *parts], how="diagonal")
    # A layer that stamps wall-clock time alone still has a place on the engine's clock: their difference is constant.
    shift = (pl.col("unix_ns") - pl.col("ts_ns")).median().over("server").cast(pl.Int64)
    rows = rows.with_columns(ts_ns=pl.coalesce("ts_ns", pl.col("unix_ns") - shift))
    return _split_complete(rows, ("ts_ns",), "journey event without a time on the engine's clock")


def _spelled(events: Mapping[str, pl.DataFrame], kind: dialects.JourneyEvent) -> list[pl.DataFrame]:
    scope = dialects.LAYER_SCOPES[kind.layer]
    frames = [events[s].filter(pl.col("span.scope") == scope) for s in kind.spellings if s in events]
    return [f for f in frames if f.height]


def _journey_part(frame: pl.DataFrame, kind: dialects.JourneyEvent) -> pl.DataFrame:
    table = _table_of(frame, dialects.JOURNEY_KEYS, schema.JOURNEY_EVENTS)
    ids = frame.select(
        *(pl.col(f"span.{c}").alias(c) for c in ("trace_id", "span_id", "request_id")), ts_ns=_ts_ns(frame)
    )
    return pl.concat([table, ids], how="horizontal").with_columns(
        layer=pl.lit(kind.layer), event=pl.lit(kind.event)
    )


def _ts_ns(frame: pl.DataFrame) -> pl.Expr:
    """Time of journey events on the engine's clock."""
    exact = _pick(frame, dialects.TS_NS_KEYS, pl.Int64())
    seconds = _pick(frame, dialects.TS_S_KEYS, pl.Float64())
    # Older builds write 0 where they have no nanoseconds.
    return pl.coalesce(pl.when(exact > 0).then(exact), (seconds * 1e9).round().cast(pl.Int64, strict=False))


def _split_complete(
    frame: pl.DataFrame, needed: tuple[str, ...], reason: str
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Split rows that have every needed column from those that do not, the latter as rejects."""
    bad = pl.any_horizontal(pl.col(c).is_null() for c in needed)
    rejects = frame.filter(bad).select(
        "source_file",
        "source_offset",
        length=pl.lit(None, pl.Int64),
        reason=pl.lit(reason),
        excerpt=pl.lit(""),
    )
    return frame.filter(~bad), rejects


def _spans_table(spans: pl.DataFrame, attributes: pl.DataFrame) -> pl.DataFrame:
    """Attach the allow-listed attributes of each span as a list of key and value."""
    allowed = attributes.filter(pl.col("key").is_in(dialects.SPAN_ATTRIBUTES)).sort("span_row", "key")
    lists = allowed.group_by("span_row").agg(attributes=pl.struct("key", "value"))
    return spans.join(lists, on="span_row", how="left")


def event_counts(counts: Iterable[IngestCounts]) -> dict[str, int]:
    """Sum event counts by name over runs, in name order."""
    total: Counter[str] = Counter()
    for one in counts:
        total.update(dict(one.events))
    return dict(sorted(total.items()))
