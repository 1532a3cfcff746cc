"""Protobuf spans as arrays to the frames of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.otlp.batch import ATTRIBUTE_COLUMNS, SPAN_COLUMNS, SpanBatch
from tracefit.otlp.columns import KINDS, STATUS_CODES
from tracefit.otlp.model import UINT32_MAX
from tracefit.otlp.octets import NotTextError, text_column
from tracefit.otlp.proto_attributes import Codes
from tracefit.otlp.proto_event_frames import event_frames
from tracefit.otlp.proto_tree import SpanTag, StatusTag
from tracefit.otlp.proto_values import not_texts, records_of_not_texts, texts, texts_of, unless_zero
from tracefit.otlp.proto_walk import UnusualRecordsError

if TYPE_CHECKING:
    from tracefit.otlp.octets import Positions
    from tracefit.otlp.proto_level import Level
    from tracefit.otlp.proto_tree import Tree

_ENUM_MAX = 127
_TRACE_ID_BYTES, _SPAN_ID_BYTES = 16, 8
_ORIGIN_COLUMNS = (
    "scope", "service_name", "service_instance_id", "host_name", "source_file", "source_offset",
)  # fmt: skip


def batch_of(tree: Tree) -> SpanBatch | None:
    """Build the frames of a batch.

    Returns:
        The batch, or None if the events have too many names or keys.

    Raises:
        UnusualRecordsError: If some records are to be decoded by the general way.
    """
    events = event_frames(tree)
    if events is None:
        return None
    return SpanBatch(_span_frame(tree), _attribute_frame(tree), events)


def _span_frame(tree: Tree) -> pl.DataFrame:
    spans = tree.spans
    origins = {
        name: pl.Series(name, [getattr(origin, name) for origin in tree.origins], SPAN_COLUMNS[name])
        for name in _ORIGIN_COLUMNS
    }
    columns = {name: column.gather(tree.origin) for name, column in origins.items()} | {
        "span_row": pl.Series(np.arange(len(spans.messages), dtype=np.uint32)),
        "trace_id": _ids(spans, SpanTag.TRACE_ID, _TRACE_ID_BYTES),
        "span_id": _ids(spans, SpanTag.SPAN_ID, _SPAN_ID_BYTES),
        "parent_span_id": _parent_ids(spans),
        "name": _strings(spans, SpanTag.NAME),
        "kind": _named(KINDS, spans.numbers(SpanTag.KIND, _ENUM_MAX)),
        "start_unix_ns": unless_zero(spans.times(SpanTag.START_TIME)),
        "end_unix_ns": unless_zero(spans.times(SpanTag.END_TIME)),
        "status_code": _named(STATUS_CODES, tree.statuses.numbers(StatusTag.CODE, _ENUM_MAX)),
        "status_message": _strings(tree.statuses, StatusTag.MESSAGE),
        "dropped_events": spans.numbers(SpanTag.DROPPED_EVENTS, UINT32_MAX),
        "dropped_attributes": _dropped_attributes(tree),
    }
    return pl.DataFrame({name: columns[name] for name in SPAN_COLUMNS}, schema=SPAN_COLUMNS)


def _attribute_frame(tree: Tree) -> pl.DataFrame:
    attributes, values = tree.span_attributes, tree.span_attributes.values
    codes = Codes(tree.octets)
    code_of = codes.of(attributes.key_start, attributes.key_size)
    record = tree.spans.messages.record
    keys = texts(codes, code_of, record[values.owner])
    _refuse_repeated(values.owner * len(keys) + code_of, record[values.owner])
    try:
        column = texts_of(tree.octets, values)
    except NotTextError as error:
        raise UnusualRecordsError(records_of_not_texts(tree.octets, record, values)) from error
    columns = {
        "span_row": pl.Series(values.owner.astype(np.uint32)),
        "key": pl.Series(keys, dtype=pl.String).gather(code_of),
        "value": column,
    }
    return pl.DataFrame(columns, schema=ATTRIBUTE_COLUMNS)


def _refuse_repeated(key_of_span: Positions, record: Positions) -> None:
    """Refuse records with a span that has a key twice: the last counts, in the place of the first."""
    order = np.argsort(key_of_span, kind="stable")
    again = np.flatnonzero(np.diff(key_of_span[order]) == 0)
    if len(again):
        raise UnusualRecordsError(record[order[again]])


def _ids(spans: Level, tag: int, size: int) -> pl.Series:
    starts, sizes = spans.stretches(tag)
    words = spans.octets.rows(starts, size).view("<u8").reshape(len(starts), size // 8)
    spans.messages.refuse((sizes != size) | (words == 0).all(axis=1))
    return text_column(spans.octets.hex(starts, size), np.full(len(starts), 2 * size))


def _parent_ids(spans: Level) -> pl.Series:
    starts, sizes = spans.stretches(SpanTag.PARENT_SPAN_ID)
    spans.messages.refuse((sizes != 0) & (sizes != _SPAN_ID_BYTES))
    is_root = spans.octets.words[starts] == 0
    digits = spans.octets.hex(starts, _SPAN_ID_BYTES)
    return text_column(digits, np.full(len(starts), 2 * _SPAN_ID_BYTES), is_null=is_root | (sizes == 0))


def _strings(level: Level, tag: int) -> pl.Series:
    starts, sizes = level.stretches(tag)
    try:
        return text_column(level.octets.cut(starts, sizes), sizes, is_null=sizes == 0)
    except NotTextError as error:
        unusual = not_texts(level.octets, level.messages.record, starts, sizes)
        raise UnusualRecordsError(unusual) from error


def _named(names: tuple[str | None, ...], numbers: Positions) -> pl.Series:
    """Return the names of enumerated values, null for those that have none."""
    return pl.Series([*names, None], dtype=pl.String).gather(np.minimum(numbers, len(names)))


def _dropped_attributes(tree: Tree) -> Positions:
    """Return how many attributes each span and its events lack."""
    of_spans = tree.spans.numbers(SpanTag.DROPPED_ATTRIBUTES, UINT32_MAX)
    in_order = np.concatenate([np.zeros(1, np.int64), tree.events.dropped.cumsum()])
    ends = np.bincount(tree.span, minlength=len(of_spans)).cumsum()
    of_events_of_spans: Positions = np.diff(in_order[ends], prepend=0)
    return of_spans + of_events_of_spans
