"""What the OTLP room hands on: decoded spans as columns, and what could not be decoded."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

import polars as pl

from tracefit.sources.records import Reject

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "ATTRIBUTE_COLUMNS",
    "EVENT_COLUMNS",
    "REJECT_COLUMNS",
    "SPAN_COLUMNS",
    "Reject",
    "SpanBatch",
    "reject_frame",
]

SPAN_COLUMNS: dict[str, type[pl.DataType]] = {
    "span_row": pl.UInt32,
    "trace_id": pl.String,
    "span_id": pl.String,
    "parent_span_id": pl.String,
    "scope": pl.String,
    "name": pl.String,
    "kind": pl.String,
    "start_unix_ns": pl.Int64,
    "end_unix_ns": pl.Int64,
    "status_code": pl.String,
    "status_message": pl.String,
    "service_name": pl.String,
    "service_instance_id": pl.String,
    "host_name": pl.String,
    "dropped_events": pl.Int64,
    "dropped_attributes": pl.Int64,
    "source_file": pl.String,
    "source_offset": pl.Int64,
}
"""Columns of `SpanBatch.spans`; a missing value is null.

Ids are lower-case hex. `kind` is INTERNAL, SERVER, CLIENT, PRODUCER, CONSUMER or null; `status_code` is
UNSET, OK or ERROR. `source_offset` is the byte offset of the record in the decompressed file.
"""

ATTRIBUTE_COLUMNS: dict[str, type[pl.DataType]] = {
    "span_row": pl.UInt32,
    "key": pl.String,
    "value": pl.String,
}
"""Columns of `SpanBatch.attributes`: one row per span attribute, scalars and nested values as JSON text."""

EVENT_COLUMNS: dict[str, type[pl.DataType]] = {
    "span_row": pl.UInt32,
    "event_index": pl.UInt32,
    "unix_ns": pl.Int64,
}
"""Leading columns of every frame in `SpanBatch.events`; the event's attributes follow, one column per key."""

REJECT_COLUMNS: dict[str, type[pl.DataType]] = {
    "source_file": pl.String,
    "source_offset": pl.Int64,
    "length": pl.Int64,
    "reason": pl.String,
    "excerpt": pl.String,
    "count": pl.Int64,
}
"""Columns of the rejects frame: one row per record that was left out, and why; of very many, one for the last of them."""


def reject_frame(rejects: Iterable[Reject]) -> pl.DataFrame:
    """Return rejects as rows with `REJECT_COLUMNS`."""
    return pl.DataFrame(list(map(attrgetter(*REJECT_COLUMNS), rejects)), schema=REJECT_COLUMNS, orient="row")


@dataclass(frozen=True, slots=True)
class SpanBatch:
    """Spans of some records as columns, in the order they were read.

    Attributes:
        spans: One row per span, columns as in `SPAN_COLUMNS`; `span_row` counts from 0 in this batch.
        attributes: Span attributes in long form, columns as in `ATTRIBUTE_COLUMNS`.
        events: Event name to a frame of its events: `EVENT_COLUMNS`, then one column per attribute key, sorted, under
            its OTLP key (`step.id`; a key that is in `EVENT_COLUMNS` gets `attribute:` before it). A column is
            Int64, Float64, Boolean or String as its values were; a column whose values were of several kinds is
            String (JSON text for what is not a string). Absent is null. Batches type their columns by themselves.
        rejects: What of the input is not in the frames.
    """

    spans: pl.DataFrame
    attributes: pl.DataFrame
    events: dict[str, pl.DataFrame]
    rejects: tuple[Reject, ...] = field(default=())

    @classmethod
    def empty(cls) -> SpanBatch:
        """Return a batch of nothing, with the columns in place."""
        return cls(
            spans=pl.DataFrame(schema=SPAN_COLUMNS),
            attributes=pl.DataFrame(schema=ATTRIBUTE_COLUMNS),
            events={},
        )
