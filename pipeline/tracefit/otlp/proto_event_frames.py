"""Events in protobuf to one frame per event name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.otlp import columns
from tracefit.otlp.batch import EVENT_COLUMNS
from tracefit.otlp.octets import NotTextError
from tracefit.otlp.proto_attributes import Values
from tracefit.otlp.proto_values import column_of, records_of_not_texts, spread, texts, unless_zero
from tracefit.otlp.proto_walk import UnusualRecordsError

if TYPE_CHECKING:
    from tracefit.otlp.octets import Octets, Positions
    from tracefit.otlp.proto_events import Events
    from tracefit.otlp.proto_tree import Tree


def event_frames(tree: Tree) -> dict[str, pl.DataFrame] | None:
    """Build the frames of `SpanBatch.events`.

    Returns:
        Event name to frame, in the order of their first events, or None if there are too many names, or keys of a name.

    Raises:
        UnusualRecordsError: If names, keys or values of some records are not UTF-8.
    """
    names = texts(tree.events.names, tree.events.name, tree.events.record)
    columns_of = _runs_of_columns(tree.events, len(names))
    if len(names) > columns.MAX_EVENT_NAMES or any(len(runs) > columns.MAX_EVENT_KEYS for runs in columns_of):
        return None
    counts = np.bincount(tree.events.name, minlength=len(names))
    stops = counts.cumsum()
    order = np.argsort(tree.events.name, kind="stable")
    row_of = np.empty(len(order), np.int64)
    row_of[order] = np.arange(len(order)) - np.repeat(stops - counts, counts)
    places = _places(tree)[order]
    numbers, first = np.unique(tree.events.name, return_index=True)
    first_seen = numbers[np.argsort(first)].tolist()
    frames, unusual = {}, []
    for number in first_seen:
        count, stop, found = int(counts[number]), int(stops[number]), []
        for key, runs in sorted(columns_of[number].items()):
            values = Values.concat(runs)
            try:
                found.append(_column(tree.octets, values, row_of[values.owner], count).alias(key))
            except NotTextError:
                unusual.append(records_of_not_texts(tree.octets, tree.events.record, values))
        frames[names[number]] = places[stop - count : stop].hstack(found)
    if unusual:
        raise UnusualRecordsError(np.concatenate(unusual))
    return frames


def _runs_of_columns(events: Events, count: int) -> list[dict[str, list[Values]]]:
    """Return, by the number of the event's name and then by column, the runs of values."""
    keys = events.keys.texts
    columns_of: list[dict[str, list[Values]]] = [{} for _ in range(count)]
    unusual = []
    for (name, key), runs in events.runs.items():
        try:
            column = columns.column_name(keys[key].decode())
        except UnicodeDecodeError:
            unusual += [events.record[run.owner] for run in runs]
        else:
            if column in columns_of[name]:  # such as `attribute:unix_ns` and `unix_ns`
                unusual += [events.record[run.owner] for run in runs]
            columns_of[name][column] = runs
    if unusual:
        raise UnusualRecordsError(np.concatenate(unusual))
    return columns_of


def _places(tree: Tree) -> pl.DataFrame:
    """Return the leading columns of all events."""
    counts = np.bincount(tree.span, minlength=len(tree.spans.messages))
    first = counts.cumsum() - counts
    return pl.DataFrame(
        {
            "span_row": tree.span.astype(np.uint32),
            "event_index": (np.arange(len(tree.span)) - first[tree.span]).astype(np.uint32),
            "unix_ns": unless_zero(tree.events.time),
        },
        schema=EVENT_COLUMNS,
    )


def _column(octets: Octets, values: Values, rows: Positions, count: int) -> pl.Series:
    """Build a column of so many events; of values that are of one event, the last counts."""
    if len(rows) == count and rows[0] == 0 and (np.diff(rows) == 1).all():
        return column_of(octets, values)
    last = np.full(count, -1)
    last[rows] = np.arange(len(rows))
    is_there = last >= 0
    if int(is_there.sum()) < len(rows):
        column_of(octets, values)  # what does not count has to be UTF-8 all the same
    column = column_of(octets, values[last[is_there]])
    return column if is_there.all() else spread(column, np.where(is_there, is_there.cumsum() - 1, -1))
