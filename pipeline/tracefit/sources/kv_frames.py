"""Files of KV-cache events to one frame per batch: JSON lines, or msgpack batches one after the other."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tracefit.sources.compression import decompressed
from tracefit.sources.json_records import lines, skip_large
from tracefit.sources.limits import CHUNK_BYTES, HEAD_BYTES, MAX_RECORD_BYTES
from tracefit.sources.msgpack import message_size
from tracefit.sources.records import Frame, Reject, Source
from tracefit.sources.shape import BOM
from tracefit.sources.window import Window

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tracefit.sources.files import TraceFile

KV_NAME = re.compile(r"kv_events.*\.(jsonl|json|msgpack|bin)(\.(gz|zst))?")

_LENGTH_BYTES = 4
_BATCH_START = re.compile(rb"[\x92-\x9f]\xcb\x41[\xd0-\xdf]")
"""An array whose first element is a float64 between 2**30 and 2**31: a batch with its unix time, from 2004 to 2038."""
_START_BYTES = 4


def read_kv_frames(
    file: TraceFile, *, on_read: Callable[[int], object] | None = None
) -> Iterator[Frame | Reject]:
    """Read the batches of one file of KV-cache events, in their order, in bounded memory.

    Compression and encoding are told from the content. What cannot be read is reported as a reject, which never shows
    values: these files hold token ids. What follows it is read on.

    Args:
        file: The file.
        on_read: Told of the bytes of the file, as stored, that were read.

    Yields:
        A `Frame` per batch, its payload not yet decoded; a `Reject` per stretch of the file that holds none.

    Raises:
        UsageError: If the file cannot be opened, or not be read to its end.
    """
    source = Source(file.name)
    with file.open(on_read=on_read) as raw:
        window = Window(decompressed(raw))
        window.fill(HEAD_BYTES)
        head = window.peek(0, HEAD_BYTES).removeprefix(BOM).lstrip()
        binary = _is_start(window, 0) or _is_start(window, _LENGTH_BYTES) or head[:1] not in b"[{"
        yield from (
            _messages(window, source) if binary and head else lines(window, source, too_large=skip_large)
        )
        if window.damage:
            yield Reject(source.name, window.offset, 0, window.damage)


def _is_start(window: Window, position: int) -> bool:
    window.fill(position + _START_BYTES)
    return bool(_BATCH_START.match(window.peek(position, position + _START_BYTES)))


def _messages(window: Window, source: Source) -> Iterator[Frame | Reject]:
    """Yield msgpack messages, each perhaps behind its length as a 4-byte number."""
    while window.fill(1):
        lead = 0 if _is_start(window, 0) or not _is_start(window, _LENGTH_BYTES) else _LENGTH_BYTES
        window.skip(lead)
        if not _is_start(window, 0):
            yield _skip(window, source, "not a batch of KV-cache events", lead)
            continue
        size = _size(window)
        if size > 0 and _is_followed(window, size):
            yield source.frame(window.offset, window.take(size), "msgpack")
        else:
            reason = "record cut" if size <= 0 else "record cut: another begins inside"
            yield _skip(window, source, reason, lead)


def _size(window: Window) -> int:
    """Return the length of the message at the beginning of the window; 0 if it does not end, or is none."""
    wanted = CHUNK_BYTES
    while True:
        more = window.fill(wanted)
        size = message_size(window.buffered(), min(len(window), MAX_RECORD_BYTES))
        if size >= 0 or not more or wanted > MAX_RECORD_BYTES:
            return max(size, 0)
        wanted *= 2


def _is_followed(window: Window, size: int) -> bool:
    """Tell whether the file ends behind a message or another begins; one that lost bytes reaches into the next."""
    if not window.fill(size + 1) or _is_start(window, size) or _is_start(window, size + _LENGTH_BYTES):
        return True
    return _BATCH_START.search(window.peek(1, size)) is None


def _skip(window: Window, source: Source, reason: str, lead: int) -> Reject:
    """Move to the next batch, or to the end, and report what was passed over and `lead` bytes before."""
    start, first = window.offset - lead, 1
    while True:
        window.fill(HEAD_BYTES)
        found = _BATCH_START.search(window.peek(first, HEAD_BYTES))
        if found or not window.fill(HEAD_BYTES + 1):
            break
        window.skip(HEAD_BYTES - _START_BYTES)
        first = 0
    size = first + found.start() if found else len(window)
    framed = size >= _LENGTH_BYTES and found and _announced(window, size)
    window.skip(size - _LENGTH_BYTES if framed else size)
    length = window.offset - start
    return source.reject(start, length, reason, b"", "msgpack")


def _announced(window: Window, position: int) -> bool:
    """Tell whether the four bytes before a batch are its length."""
    size = int.from_bytes(window.peek(position - _LENGTH_BYTES, position), "big")
    if not 0 < size <= MAX_RECORD_BYTES or not window.fill(position + size):
        return False
    return message_size(window.buffered()[position : position + size], size) == size
