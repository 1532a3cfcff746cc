"""Protobuf records to a batch: those that are written as usual all at once, the others one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tracefit.otlp.columns import build_batch
from tracefit.otlp.join import join
from tracefit.otlp.model import Decoded
from tracefit.otlp.proto_columns import batch_of
from tracefit.otlp.proto_general import READER, decode_general
from tracefit.otlp.proto_tree import read_tree
from tracefit.otlp.proto_walk import UnusualRecordsError
from tracefit.otlp.rejects import Rejects

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tracefit.otlp.batch import SpanBatch
    from tracefit.otlp.model import SpanGroup
    from tracefit.sources.records import Frame


def decode_protobuf(frames: Sequence[Frame]) -> SpanBatch:
    """Decode protobuf records.

    Args:
        frames: Protobuf frames, one at least.

    Returns:
        Their spans in the order of the records, and a reject for whatever could not be read.
    """
    usual, fast = decode_usual(frames)
    if fast is None:
        return decode_one_by_one(frames)[0]
    unusual = np.setdiff1d(np.arange(len(frames)), usual)
    if not len(unusual):
        return fast[0]
    general = decode_one_by_one([frames[number] for number in unusual.tolist()])
    joined = join((fast[0], general[0]), (usual[fast[1]], unusual[general[1]]))
    return joined or decode_one_by_one(frames)[0]


_Batch = tuple["SpanBatch", "NDArray[np.int64]"]
"""A batch, and the number of the record of each of its spans."""


def decode_usual(frames: Sequence[Frame]) -> tuple[NDArray[np.int64], _Batch | None]:
    """Decode the records that are written as usual.

    Returns:
        Which records these are, and their batch with the number, among these, of each span's record; no batch if there
        is none of them, or if the events have too many names or keys.
    """
    usual = np.arange(len(frames))
    while len(usual):
        try:
            tree = read_tree([frames[number] for number in usual.tolist()])
            batch = batch_of(tree)
        except UnusualRecordsError as error:
            usual = np.delete(usual, np.unique(error.records))
        else:
            return usual, (batch, tree.spans.messages.record) if batch else None
    return usual, None


def decode_one_by_one(frames: Sequence[Frame]) -> _Batch:
    """Decode records the general way; also return the number of the record of each span."""
    groups: list[SpanGroup] = []
    rejects = Rejects()
    counts = []
    for frame in frames:
        found = decode_general(frame, listed=rejects.left(frame.source_file))
        counts.append(sum(len(group.spans) for group in found.groups))
        groups += found.groups
        rejects.add_spans(frame, found)
    return build_batch(Decoded(groups, rejects.all()), READER), np.repeat(np.arange(len(frames)), counts)
