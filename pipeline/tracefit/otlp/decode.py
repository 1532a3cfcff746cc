"""Frames to batches of spans."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tracefit.otlp import json_attributes
from tracefit.otlp.columns import build_batch
from tracefit.otlp.json_decode import decode_json
from tracefit.otlp.model import Decoded, FieldError, UncheckedAttributeError
from tracefit.otlp.proto_decode import decode_protobuf
from tracefit.otlp.rejects import Rejects
from tracefit.sources.records import Frame, Reject

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tracefit.otlp.batch import SpanBatch
    from tracefit.otlp.model import SpanGroup

BATCH_BYTES = 32 << 20
"""Payload bytes that make a batch."""


def decode_frames(frames: Iterable[Frame | Reject], *, batch_bytes: int = BATCH_BYTES) -> Iterator[SpanBatch]:
    """Decode frames into batches of spans, in their order.

    Args:
        frames: Frames and rejects of any number of files.
        batch_bytes: Payload bytes, at least, in each batch but the last and those before a change of encoding. A
            batch takes up to ten times as much memory while it is built.

    Yields:
        Batches; none if there is neither a frame nor a reject. A batch's rejects are those among its frames, then
        what its frames could not yield.
    """
    held: list[Frame] = []
    rejects: list[Reject] = []
    size = 0
    for item in frames:
        if isinstance(item, Reject):
            rejects.append(item)
            continue
        if held and (size >= batch_bytes or item.encoding != held[0].encoding):
            yield _decode_batch(held, rejects)
            held, rejects, size = [], [], 0
        held.append(item)
        size += len(item.payload)
    if held or rejects:
        yield _decode_batch(held, rejects)


def _decode_batch(frames: list[Frame], rejects: list[Reject]) -> SpanBatch:
    if frames and frames[0].encoding == "protobuf":
        batch = decode_protobuf(frames)
        return replace(batch, rejects=(*rejects, *batch.rejects))
    return _decode_json(frames, rejects)


def _decode_json(frames: list[Frame], rejects: list[Reject]) -> SpanBatch:
    """Take the attributes of events on trust, and check them one by one only if that fails."""
    try:
        return _decode_json_as(frames, rejects, check_events=False)
    except (FieldError, UncheckedAttributeError):
        return _decode_json_as(frames, rejects, check_events=True)


def _decode_json_as(frames: list[Frame], rejects: list[Reject], *, check_events: bool) -> SpanBatch:
    groups: list[SpanGroup] = []
    collected = Rejects(rejects)
    for frame in frames:
        decode_json(frame, groups, collected, check_events=check_events)
    return build_batch(Decoded(groups, collected.all()), json_attributes.READER)
