"""The zstd framing of older exporters: a length, then one zstd frame with one record, again and again."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from tracefit.sources import wire
from tracefit.sources.compression import unzstd_record
from tracefit.sources.framing import LENGTH_BYTES, bare_records, declared, fault, skip_damage
from tracefit.sources.json_records import objects
from tracefit.sources.limits import MAX_HELD_BYTES, MAX_RECORD_BYTES
from tracefit.sources.records import Reject, joined
from tracefit.sources.window import Window
from tracefit.sources.zstd_frames import SMALL_BYTES, ZSTD_MAGIC, unzstd_small

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracefit.sources.records import Frame, Source


def framed_zstd_records(window: Window, source: Source) -> Iterator[Frame | Reject]:
    """Yield the records of a file of 4-byte big-endian lengths, each followed by one zstd frame.

    Args:
        window: The file; its frames are the compressed part.
        source: The file, for frames and rejects.

    Yields:
        One frame per record, JSON or protobuf as it is; one reject per damaged stretch.
    """
    return joined(_framed(window, source))


def _framed(window: Window, source: Source) -> Iterator[Frame | Reject]:
    while window.fill(1):
        size = declared(window)
        stop = LENGTH_BYTES + size
        if not (0 < size <= MAX_RECORD_BYTES and window.fill(stop)):
            reason = fault(window, size) if size else "record of no bytes"
            yield skip_damage(window, source, reason, lambda start, _: next_zstd_frame(window, start))
            continue
        small = unzstd_small(window.peek(LENGTH_BYTES, stop)) if size <= SMALL_BYTES else None
        if small is not None:
            yield _frame(source, window.offset + LENGTH_BYTES, small)
            window.skip(stop)
            continue
        record = Window(unzstd_record(window.peek(LENGTH_BYTES, stop)))
        if record.fill(MAX_HELD_BYTES + 1):
            yield from _large_record(record, source, window.offset + LENGTH_BYTES, size)
        elif record.damage:
            yield skip_damage(window, source, record.damage, lambda start, _: next_zstd_frame(window, start))
            continue
        else:
            yield _frame(source, window.offset + LENGTH_BYTES, record.take(len(record)))
        window.skip(stop)


def _frame(source: Source, offset: int, payload: bytes) -> Frame:
    is_protobuf = wire.is_message(payload, 0, len(payload))
    return source.frame(offset, payload, "protobuf" if is_protobuf else "json")


def _large_record(record: Window, source: Source, offset: int, size: int) -> Iterator[Frame | Reject]:
    """Yield a record in pieces, all of which are where its compressed bytes are."""
    protobuf = wire.begins_traces_message(record.buffered(), 0, sys.maxsize)
    for item in (bare_records if protobuf else objects)(record, source):
        if isinstance(item, Reject):
            yield replace(item, source_offset=offset, length=size)
        else:
            yield replace(item, offset=offset)


def next_zstd_frame(window: Window, start: int) -> int:
    """Return where, from `start` of the buffer, a length followed by a zstd frame begins, or -1."""
    found = window.buffered().find(ZSTD_MAGIC, start + LENGTH_BYTES)
    return found - LENGTH_BYTES if found >= 0 else -1
