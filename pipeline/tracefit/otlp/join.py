"""Two batches of records that came mixed to one batch in the order of the records."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.otlp import columns
from tracefit.otlp.batch import EVENT_COLUMNS, SpanBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


def join(batches: Sequence[SpanBatch], records: Sequence[NDArray[np.int64]]) -> SpanBatch | None:
    """Put batches together.

    Args:
        batches: The batches.
        records: The number of the record that each span of each batch is in, ascending; no record is in two batches.

    Returns:
        The spans in the order of their records, and the rejects of one batch after those of the other; None if the
        events have too many names or keys together.
    """
    order = np.argsort(np.concatenate(records), kind="stable")
    row_of = np.empty(len(order), np.uint32)
    row_of[order] = np.arange(len(order))
    ends = np.cumsum([len(numbers) for numbers in records])
    rows = [pl.Series(part) for part in np.split(row_of, ends[:-1])]
    events = _events(batches, rows)
    if events is None:
        return None
    spans = pl.concat([batch.spans for batch in batches])[order]
    attributes = [_moved(batch.attributes, row) for batch, row in zip(batches, rows, strict=True)]
    return SpanBatch(
        spans=spans.with_columns(span_row=np.arange(len(order), dtype=np.uint32)),
        attributes=pl.concat(attributes).sort("span_row", maintain_order=True),
        events=events,
        rejects=tuple(reject for batch in batches for reject in batch.rejects),
    )


def _events(batches: Sequence[SpanBatch], rows: Sequence[pl.Series]) -> dict[str, pl.DataFrame] | None:
    parts: dict[str, list[pl.DataFrame]] = {}
    for batch, row in zip(batches, rows, strict=True):
        for name, frame in batch.events.items():
            parts.setdefault(name, []).append(_moved(frame, row))
    frames = {name: columns.united(some) for name, some in parts.items()}
    too_wide = columns.MAX_EVENT_KEYS + len(EVENT_COLUMNS)
    if len(frames) > columns.MAX_EVENT_NAMES or any(frame.width > too_wide for frame in frames.values()):
        return None
    return dict(sorted(frames.items(), key=lambda item: item[1].row(0)[:2]))


def _moved(frame: pl.DataFrame, rows: pl.Series) -> pl.DataFrame:
    return frame.with_columns(span_row=rows.gather(frame["span_row"]))
