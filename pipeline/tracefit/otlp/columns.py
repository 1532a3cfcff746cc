"""Decoded spans to the frames of a batch: columns are built whole, not row by row."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from tracefit.otlp.batch import ATTRIBUTE_COLUMNS, EVENT_COLUMNS, SPAN_COLUMNS, SpanBatch
from tracefit.otlp.values import scalar_text
from tracefit.sources.records import Reject

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tracefit.otlp.model import AttributeReader, Decoded, EventLike, Origin, Pairs, Scalar, Span

MAX_EVENT_KEYS = 512
"""Attribute keys, hence columns, that are kept of the events of one name in a batch: those most events have."""

MAX_EVENT_NAMES = 256
"""Event names, hence frames, that are kept in a batch: those most events have."""

KINDS = (None, "INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER")
STATUS_CODES = ("UNSET", "OK", "ERROR")
_DTYPES: dict[type, type[pl.DataType]] = {int: pl.Int64, float: pl.Float64, bool: pl.Boolean, str: pl.String}


def build_batch(decoded: Decoded, reader: AttributeReader) -> SpanBatch:
    """Build the frames of a batch.

    Args:
        decoded: Spans that have been checked, all of one encoding, and the rejects beside them.
        reader: Reads the attributes of that encoding.

    Returns:
        The batch.

    Raises:
        UncheckedAttributeError: If the reader cannot read an attribute.
    """
    spans = [span for group in decoded.groups for span in group.spans]
    origins = [group.origin for group in decoded.groups for _ in group.spans]
    rejects = list(decoded.rejects)
    events = _event_frames(spans, origins, reader, rejects)
    return SpanBatch(_span_frame(spans, origins), _attribute_frame(spans), events, tuple(rejects))


def _span_frame(spans: list[Span], origins: list[Origin]) -> pl.DataFrame:
    columns: dict[str, Sequence[Any]] = {
        "span_row": range(len(spans)),
        "trace_id": [s.trace_id for s in spans],
        "span_id": [s.span_id for s in spans],
        "parent_span_id": [s.parent_span_id or None for s in spans],
        "scope": [o.scope for o in origins],
        "name": [s.name or None for s in spans],
        "kind": [KINDS[s.kind] if 0 <= s.kind < len(KINDS) else None for s in spans],
        "start_unix_ns": [s.start_time_unix_nano or None for s in spans],
        "end_unix_ns": [s.end_time_unix_nano or None for s in spans],
        "status_code": [_status(s.status_code) for s in spans],
        "status_message": [s.status_message or None for s in spans],
        "service_name": [o.service_name for o in origins],
        "service_instance_id": [o.service_instance_id for o in origins],
        "host_name": [o.host_name for o in origins],
        "dropped_events": [s.dropped_events_count for s in spans],
        "dropped_attributes": [_dropped_attributes(s) for s in spans],
        "source_file": [o.source_file for o in origins],
        "source_offset": [o.source_offset for o in origins],
    }
    return pl.DataFrame(columns, schema=SPAN_COLUMNS)


def _status(code: int) -> str | None:
    return STATUS_CODES[code] if 0 <= code < len(STATUS_CODES) else None


def _dropped_attributes(span: Span) -> int:
    return span.dropped_attributes_count + sum([e.dropped_attributes_count for e in span.events])


def _attribute_frame(spans: list[Span]) -> pl.DataFrame:
    rows: list[int] = []
    keys: list[str] = []
    values: list[str | None] = []
    for row, span in enumerate(spans):
        last = dict(span.attributes)  # of a key that is there twice, the last counts
        rows += [row] * len(last)
        keys += last
        values += map(scalar_text, last.values())
    return pl.DataFrame({"span_row": rows, "key": keys, "value": values}, schema=ATTRIBUTE_COLUMNS)


def _event_frames(
    spans: list[Span], origins: list[Origin], reader: AttributeReader, rejects: list[Reject]
) -> dict[str, pl.DataFrame]:
    """Build one frame per event name; what is left out is added to the rejects."""
    events = list(chain.from_iterable([span.events for span in spans]))
    places = _event_places(spans)
    names = [event.name for event in events]
    codes = {name: code for code, name in enumerate(dict.fromkeys(names))}
    code_of = np.fromiter(map(codes.__getitem__, names), np.int64, len(names))
    usual = _usual_codes(code_of, len(codes))
    if len(usual) < len(codes):
        rare = places["span_row"].to_numpy()[~np.isin(code_of, list(usual))]
        reason = f"{len(rare)} events of rare names left out: there are more than {MAX_EVENT_NAMES} names"
        rejects.append(_left_out(origins[rare[0]], reason))
    frames = {}
    for name, code in codes.items():
        if code not in usual:
            continue
        rows = np.flatnonzero(code_of == code)
        group = [events[row] for row in rows.tolist()]
        frame = _event_frame(places[rows], group, reader)
        frames[name] = _narrowed(frame)
        if frames[name].width < frame.width:
            reason = f"rare attribute keys left out: events of one name have more than {MAX_EVENT_KEYS}"
            rejects.append(_left_out(origins[frame["span_row"][0]], reason))
    return frames


def _usual_codes(code_of: NDArray[np.int64], count: int) -> set[int]:
    """Return the codes of the names that most events have."""
    if count <= MAX_EVENT_NAMES:
        return set(range(count))
    order = np.argsort(-np.bincount(code_of, minlength=count), kind="stable")
    return set(order[:MAX_EVENT_NAMES].tolist())


def _left_out(origin: Origin, reason: str) -> Reject:
    return Reject(origin.source_file, origin.source_offset, 0, reason)


def _narrowed(frame: pl.DataFrame) -> pl.DataFrame:
    """Keep the attribute columns that most events have, if they are too many."""
    keys = [column for column in frame if column.name not in EVENT_COLUMNS]
    if len(keys) <= MAX_EVENT_KEYS:
        return frame
    kept = {column.name for column in sorted(keys, key=lambda c: c.null_count())[:MAX_EVENT_KEYS]}
    return frame.select([name for name in frame.columns if name in kept or name in EVENT_COLUMNS])


def _event_frame(places: pl.DataFrame, events: list[EventLike], reader: AttributeReader) -> pl.DataFrame:
    times = pl.Series("unix_ns", [event.time_unix_nano or None for event in events], dtype=pl.Int64)
    leading = places.with_columns(times)
    attributes = [event.attributes for event in events]
    frames = []
    for part in reader.parts(attributes):
        columns = part.columns
        if columns is None:
            columns = _columns_of_rows([reader.pairs(attributes[row]) for row in part.rows.tolist()])
        renamed = {column_name(key): column for key, column in columns.items()}
        frames.append(leading[part.rows].with_columns(**renamed))
    return united(frames)


def _event_places(spans: list[Span]) -> pl.DataFrame:
    """Return span row and index in the span of each event."""
    counts = np.array([len(span.events) for span in spans], dtype=np.int64)
    starts = np.repeat(counts.cumsum() - counts, counts)
    return pl.DataFrame(
        {
            "span_row": np.repeat(np.arange(len(counts)), counts),
            "event_index": np.arange(len(starts)) - starts,
        },
        schema={name: EVENT_COLUMNS[name] for name in ("span_row", "event_index")},
    )


def column_name(key: str) -> str:
    """Keep an attribute key from taking the place of a leading column."""
    return f"attribute:{key}" if key in EVENT_COLUMNS else key


def _columns_of_rows(attributes: list[Pairs]) -> dict[str, pl.Series]:
    """Build columns of events that are not alike; of a key that is there twice, the last counts.

    Of too many keys there is one more than is kept, the least rare, for `_narrowed` to notice.
    """
    rows = [dict(pairs) for pairs in attributes]
    counts = Counter(chain.from_iterable(rows))
    usual = {key for key, _ in counts.most_common(MAX_EVENT_KEYS + 1)}
    return {key: _typed(key, [row.get(key) for row in rows]) for key in counts if key in usual}


def _typed(key: str, values: list[Scalar]) -> pl.Series:
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) == 1:
        return pl.Series(key, values, dtype=_DTYPES[kinds.pop()])
    return pl.Series(key, [scalar_text(value) for value in values], dtype=pl.String)


def united(parts: list[pl.DataFrame]) -> pl.DataFrame:
    """Put the parts of one event name together, in the order of their spans and with the keys in theirs."""
    if len(parts) > 1:
        kinds = _kinds(parts)
        united = pl.concat([_retyped(part, kinds) for part in parts], how="diagonal")
        parts = [united.sort("span_row", "event_index")]
    leading = list(EVENT_COLUMNS)
    return parts[0].select(leading + sorted(set(parts[0].columns) - set(leading)))


def _kinds(parts: list[pl.DataFrame]) -> dict[str, set[pl.DataType]]:
    """Return the types of each column's values; none for what is nothing but nulls."""
    kinds: dict[str, set[pl.DataType]] = {}
    for column in [column for part in parts for column in part]:
        found = kinds.setdefault(column.name, set())
        if column.null_count() < len(column):
            found.add(column.dtype)
    return kinds


def _retyped(part: pl.DataFrame, kinds: dict[str, set[pl.DataType]]) -> pl.DataFrame:
    return part.with_columns(
        [_as_kind(column, kinds[column.name]) for column in part if column.name not in EVENT_COLUMNS]
    )


def _as_kind(column: pl.Series, kinds: set[pl.DataType]) -> pl.Series:
    if not kinds or kinds == {column.dtype}:
        return column
    if len(kinds) == 1:  # this part has nothing but nulls
        return column.cast(next(iter(kinds)))
    return pl.Series(column.name, [scalar_text(value) for value in column], dtype=pl.String)
