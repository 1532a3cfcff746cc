"""Frames to batches of spans."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from tracefit.otlp import json_attributes
from tracefit.otlp.columns import build_batch
from tracefit.otlp.json_decode import decode_json
from tracefit.otlp.model import Decoded, FieldError, SpanGroup, TooMuchError, UncheckedAttributeError
from tracefit.otlp.proto_decode import decode_protobuf
from tracefit.otlp.rejects import Rejects
from tracefit.sources.records import Frame, Reject

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tracefit.otlp.batch import SpanBatch

MAX_EVENTS = 500_000
"""Events of JSON records that are held at a time, of more than one record: those of good spans have attributes."""

LEAST_EVENT_BYTES = 16
"""An event with a name and a time is three times as long: a record with more events than this allows holds hollow ones."""

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
            yield from _decode_batch(held, rejects)
            held, rejects, size = [], [], 0
        held.append(item)
        size += len(item.payload)
    if held or rejects:
        yield from _decode_batch(held, rejects)


def _decode_batch(frames: list[Frame], rejects: list[Reject]) -> Iterator[SpanBatch]:
    if frames and frames[0].encoding == "protobuf":
        decode: Callable[[list[Frame]], SpanBatch] = decode_protobuf
    else:
        decode = _decode_json
    for batch in _in_parts(decode, frames):
        yield replace(batch, rejects=(*rejects, *batch.rejects))
        rejects = []


def _in_parts(decode: Callable[[list[Frame]], SpanBatch], frames: list[Frame]) -> Iterator[SpanBatch]:
    """Decode records together, or the halves of them one after the other if there is too much in them."""
    try:
        batch = decode(frames)
    except TooMuchError:
        middle = len(frames) // 2
        yield from _in_parts(decode, frames[:middle])
        yield from _in_parts(decode, frames[middle:])
    else:
        yield batch


def _decode_json(frames: list[Frame]) -> SpanBatch:
    """Take the attributes of events on trust, and check them one by one only if that fails."""
    try:
        return _decode_json_as(frames, check_events=False)
    except (FieldError, UncheckedAttributeError):
        return _decode_json_as(frames, check_events=True)


def _decode_json_as(frames: list[Frame], *, check_events: bool) -> SpanBatch:
    groups: list[SpanGroup] = []
    collected = Rejects()
    counted = events = 0
    for frame in frames:
        decode_json(frame, groups, collected, check_events=check_events)
        found = sum(len(span.events) for group in groups[counted:] for span in group.spans)
        if found > MAX_EVENTS and found * LEAST_EVENT_BYTES > len(frame.payload):
            groups[counted:] = [_without_hollow(group, frame, collected) for group in groups[counted:]]
            found = 0
        events += found
        counted = len(groups)
        if events > MAX_EVENTS and len(frames) > 1:
            raise TooMuchError
    return build_batch(Decoded(groups, collected.all()), json_attributes.READER)


def _without_hollow(group: SpanGroup, frame: Frame, rejects: Rejects) -> SpanGroup:
    """Reject spans of very many events, which would take a hundred times their bytes as columns."""
    spans = []
    for span in group.spans:
        if len(span.events) > MAX_EVENTS // 10:
            rejects.add(
                frame, partial(frame.reject, f"a span of {len(span.events)} events, most of them empty")
            )
        else:
            spans.append(span)
    return SpanGroup(group.origin, spans)
