"""JSON text to records: one per line, or the objects of a document that goes over many lines."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from tracefit.sources.compression import DamagedStreamError
from tracefit.sources.excerpt import is_json
from tracefit.sources.json_pieces import object_pieces
from tracefit.sources.json_scan import Scanner, next_piece, scan_contents
from tracefit.sources.limits import CHUNK_BYTES, MAX_GUESSES, MAX_HELD_BYTES
from tracefit.sources.records import Reject, joined
from tracefit.sources.shape import BOM, RECORD_START
from tracefit.sources.short_lines import SHORTEST_RECORD, TRACE_LINES, LineReader, ShortLines
from tracefit.sources.window import Window

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tracefit.sources.records import Frame, Source

_BETWEEN = b" \t\r\n,[]"
_SHOWN_BYTES, _EDGE_BYTES = 4096, 1024
_GLUED = re.compile(rb"\}\s*\{")
_FIRST_BYTES = 4096
_MANY = 100
"""Objects too short for spans that are handed on together."""
_RECORD_KEYS = (b'resourceSpans"', b'resource_spans"', b'batches"')
_INSIDE_TEMPO = re.compile(rb'"trace"\s*:\s*\Z')


def line_records(window: Window, source: Source) -> Iterator[Frame | Reject]:
    """Yield the lines of a file of traces that are not blank; see `lines`. One that is too large comes in pieces."""
    return lines(window, source, too_large=objects)


def lines(
    window: Window,
    source: Source,
    *,
    too_large: Callable[[Window, Source], Iterator[Frame | Reject]],
    short: ShortLines | None = None,
) -> Iterator[Frame | Reject]:
    """Yield the lines of a file that are not blank.

    Args:
        window: The decompressed file.
        source: The file, for frames and rejects.
        too_large: Yields what a line of more than `MAX_HELD_BYTES` holds; it is given the line alone.
        short: What is known of lines that are too short to hold anything; those of traces if not given.

    Yields:
        One frame per line without its line end, unread; a reject for a last line that is cut because the compressed
        stream is. Of very many short lines those that do no harm are passed over, and all but the first of the others are
        one reject at the end.
    """
    reader = LineReader(source, short or TRACE_LINES)
    while window.fill(1):
        window.fill(CHUNK_BYTES)
        if window.peek(0, 1) == b"\n":
            blank = window.peek(0, CHUNK_BYTES)
            window.skip(len(blank) - len(blank.lstrip(b"\n")))
            continue
        if whole := window.buffered().rfind(b"\n", 0, CHUNK_BYTES) + 1:
            start = window.offset
            yield from reader.read(start, window.take(whole))
            continue
        end = window.find(b"\n", MAX_HELD_BYTES + 1)
        if end < 0 and window.fill(MAX_HELD_BYTES + 1):
            line_window = Window(window.take_past(b"\n"))
            line_window.offset = window.offset
            yield from too_large(line_window, source)
            line_window.drain()
            continue
        start = window.offset
        line = window.take(end if end >= 0 else len(window))
        window.skip(1)
        text = line.removeprefix(BOM)
        if text and not text.isspace():
            start += len(line) - len(text)
            yield source.frame(start, text, "json") if end >= 0 else _last(window, source, start, text)
    yield from reader.rest()


def document_records(window: Window, source: Source) -> Iterator[Frame | Reject]:
    """Yield a pretty-printed object, an array of objects, or several of these.

    Args:
        window: The decompressed file.
        source: The file, for frames and rejects.

    Yields:
        One frame for the whole document if it is whole and not too large; else what `objects` does.
    """
    window.fill(len(BOM))
    if window.peek(0, len(BOM)) == BOM:
        window.skip(len(BOM))
    if not window.fill(MAX_HELD_BYTES + 1) and is_json(text := window.peek(0, len(window))):
        yield source.frame(window.offset, text, "json")
        window.skip(len(text))
    else:
        yield from objects(window, source)


def objects(window: Window, source: Source) -> Iterator[Frame | Reject]:
    """Yield the objects of a text: a frame for each, several for one that is too large or cut, rejects for the rest.

    No string of JSON can hold the beginning of a record unescaped: a record ends at the latest where another begins.
    """
    return joined(_by_record(window, source))


def _by_record(window: Window, source: Source) -> Iterator[Frame | Reject]:
    guesses_left = MAX_GUESSES
    while window.fill(1):
        yield from _whole_objects(window, source)
        if not guesses_left:
            yield from skip_large(window, source, "too many damaged records")
            return
        record = Window(_until_record(window))
        record.offset = window.offset
        for item in _objects(record, source):
            yield item
            guesses_left -= isinstance(item, Reject) and guesses_left > 0


def _whole_objects(window: Window, source: Source) -> Iterator[Frame]:
    """Yield objects as long as each is whole and good, and there is nothing but punctuation between them."""
    size = _FIRST_BYTES
    while text := next_piece(window, 0, size):
        lead = len(text) - len(text.lstrip(_BETWEEN))
        begins = text[lead : lead + 1] == b"{"
        ends = [lead, *(lead + Scanner().ends(text[lead:]).ends).tolist()] if begins else []
        if len(ends) <= 1:
            return
        if len(ends) > _MANY and int(np.diff(ends).max()) < min(SHORTEST_RECORD, MAX_HELD_BYTES):
            inside = text[lead : ends[-1]]
            if together := _as_array(inside):
                yield source.frame(window.offset + lead, together, "json")
                window.skip(lead + len(inside))
                continue
        taken = 0
        for start, end in pairwise(ends):
            whole = text[start:end].lstrip(_BETWEEN)
            if whole[:1] != b"{" or len(whole) > MAX_HELD_BYTES or not is_json(whole):
                return
            window.skip(end - len(whole) - taken)
            yield source.frame(window.offset, window.take(len(whole)), "json")
            taken = end
        size = min(2 * size, CHUNK_BYTES)


def _as_array(objects: bytes) -> bytes:
    """Return objects, with commas between them or not, as an array; nothing if they are none."""
    if is_json(array := b"[%b]" % objects) or is_json(array := b"[%b]" % _GLUED.sub(b"},{", objects)):
        return array
    return b""


def _objects(window: Window, source: Source) -> Iterator[Frame | Reject]:
    while window.fill(1):
        yield from _between(window, source)
        if size := _object_size(window):
            yield source.frame(window.offset, window.take(size), "json")
        elif window.fill(1):
            yield from object_pieces(window, source)


def _until_record(window: Window) -> Iterator[bytes]:
    """Take what is before the next record, chunk by chunk.

    Raises:
        DamagedStreamError: Behind the last byte of a stream that ended before its end.
    """
    first = 1  # what begins right here is the record itself
    while window.fill(1):
        goes_on = window.fill(CHUNK_BYTES)
        text = window.peek(0, CHUNK_BYTES)
        start = _next_record(text, first)
        # What could be a beginning across the edge stays in sight, and what is before it.
        yield window.take(start if start >= 0 else len(text) - 2 * _EDGE_BYTES if goes_on else len(text))
        if start >= 0:
            return
        first = _EDGE_BYTES
    if window.damage:
        raise DamagedStreamError(window.damage)


def _next_record(text: bytes, first: int) -> int:
    if not any(key in text for key in _RECORD_KEYS):
        return -1
    found = (match.start() for match in RECORD_START.finditer(text, first))
    return next((start for start in found if not _INSIDE_TEMPO.search(text, 0, start)), -1)


def object_end(text: bytes) -> int:
    """Return the length of the JSON object that the text begins with, or -1 if it does not end in it."""
    positions, depths = Scanner().scan(text)
    closed = np.flatnonzero(depths <= 0)[:1]
    return int(positions[closed[0]]) + 1 if len(closed) and text[:1] == b"{" else -1


def skip_large(window: Window, source: Source, reason: str = "record too large") -> Iterator[Reject]:
    """Yield a text as one reject."""
    begins = window.peek(0, _SHOWN_BYTES)
    yield source.reject(window.offset, window.drain(), reason, begins)


def _between(window: Window, source: Source) -> Iterator[Reject]:
    """Move to the next object; what is neither space nor the punctuation of an array is reported."""
    start, begins, found = window.offset, b"", -1
    while found < 0 and window.fill(1):
        found = window.find(b"{", CHUNK_BYTES)
        gap = window.take(found if found >= 0 else CHUNK_BYTES)
        begins = begins or gap.lstrip(_BETWEEN)[:_SHOWN_BYTES]
    if begins:
        yield source.reject(start, window.offset - start, "not a JSON object", begins)


def _object_size(window: Window) -> int:
    """Return the length of the object at the beginning of the window, or 0 if it is cut or too large to be held."""
    if not window.fill(MAX_HELD_BYTES + 1) and is_json(text := window.peek(0, len(window)).rstrip(_BETWEEN)):
        return len(text)
    ends = scan_contents(window, MAX_HELD_BYTES, count=1).ends
    return int(ends[0]) if len(ends) else 0


def _last(window: Window, source: Source, start: int, text: bytes) -> Frame | Reject:
    """Make a frame of a text that ran into the end of the file, or a reject if nothing of it can be good."""
    if window.damage and not is_json(text) and len(RECORD_START.findall(text)) < 2:
        return source.reject(start, len(text), window.damage, text)
    return source.frame(start, text, "json")
