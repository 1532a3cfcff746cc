"""JSON text to records: one per line, or the objects of a document that goes over many lines."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tracefit.sources.excerpt import is_json
from tracefit.sources.limits import CHUNK_BYTES, HEAD_BYTES, MAX_RECORD_BYTES
from tracefit.sources.shape import BOM, RECORD_START

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracefit.sources.records import Frame, Reject, Source
    from tracefit.sources.window import Window

_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[{}]', re.DOTALL)
_BETWEEN = b" \t\r\n,[]"


def line_records(window: Window, source: Source) -> Iterator[Frame | Reject]:
    """Yield the lines of a file that are not blank.

    Args:
        window: The decompressed file.
        source: The file, for frames and rejects.

    Yields:
        One frame per line without its line end, unread; a reject for a line that is too large, and for a last line
        that is cut because the compressed stream is.
    """
    while window.fill(1):
        end = window.find(b"\n", MAX_RECORD_BYTES + 1)
        if end < 0 and window.fill(MAX_RECORD_BYTES + 1):
            yield _too_large(window, source, to_line_end=True)
            continue
        start = window.offset
        line = window.take(end if end >= 0 else len(window))
        window.skip(1)
        text = line.removeprefix(BOM)
        if text and not text.isspace():
            start += len(line) - len(text)
            yield source.frame(start, text, "json") if end >= 0 else _last(window, source, start, text)


def document_records(window: Window, source: Source) -> Iterator[Frame | Reject]:
    """Yield the objects of a pretty-printed object, of an array of objects, or of several of these.

    Args:
        window: The decompressed file.
        source: The file, for frames and rejects.

    Yields:
        One frame for the whole document if it is whole; else one per object, and rejects for what is between.
    """
    window.fill(len(BOM))
    if window.peek(0, len(BOM)) == BOM:
        window.skip(len(BOM))
    if not window.fill(MAX_RECORD_BYTES + 1) and is_json(text := window.peek(0, len(window))):
        yield source.frame(window.offset, text, "json")
        window.skip(len(text))
        return
    yield from _objects(window, source)


def object_end(text: bytes) -> int:
    """Return the length of the JSON object that the text begins with, or -1 if it does not end in it."""
    depth = 0
    for token in _TOKEN.finditer(text):
        if token[0][:1] != b'"':
            depth += 1 if token[0] == b"{" else -1
            if depth <= 0:
                return token.end() if text[:1] == b"{" else -1
    return -1


def _objects(window: Window, source: Source) -> Iterator[Frame | Reject]:
    while window.fill(1):
        yield from _between(window, source)
        if not window.fill(1):
            return
        end = _object_end(window)
        if end > MAX_RECORD_BYTES or (end < 0 and window.fill(MAX_RECORD_BYTES + 1)):
            yield _too_large(window, source, to_line_end=False)
            return
        start = window.offset
        text = window.take(end if end >= 0 else len(window))
        yield source.frame(start, text, "json") if end >= 0 else _last(window, source, start, text)


def _between(window: Window, source: Source) -> Iterator[Reject]:
    """Move to the next object; what is neither space nor the punctuation of an array is reported."""
    found = window.find(b"{", MAX_RECORD_BYTES)
    size = found if found >= 0 else len(window)
    start, gap = window.offset, window.take(size)
    if gap.strip(_BETWEEN):
        yield source.reject(start, size, "not a JSON object", gap)


def _object_end(window: Window) -> int:
    """Return the length of the object at the beginning of the window, or -1 if it does not end."""
    depth, position, size = 0, 0, CHUNK_BYTES
    while window.fill(position + 1) and position <= MAX_RECORD_BYTES:
        window.fill(position + size)
        piece = window.peek(position, position + size)
        resume = len(piece)
        for token in _TOKEN.finditer(piece):
            mark = token[0]
            if mark[:1] == b'"':
                if token.end() == len(piece):  # the string may go on behind this piece
                    resume = token.start()
                continue
            depth += 1 if mark == b"{" else -1
            if depth == 0:
                return position + token.end()
        if resume == 0 and len(piece) < size:
            return -1
        size = 2 * size if resume == 0 else CHUNK_BYTES
        position += resume
    return -1


def _last(window: Window, source: Source, start: int, text: bytes) -> Frame | Reject:
    """Make a frame of a text that ran into the end of the file, or a reject if nothing of it can be good."""
    if window.damage and not is_json(text) and len(RECORD_START.findall(text)) < 2:
        return source.reject(start, len(text), window.damage, text)
    return source.frame(start, text, "json")


def _too_large(window: Window, source: Source, *, to_line_end: bool) -> Reject:
    start, begins = window.offset, window.peek(0, HEAD_BYTES)
    if to_line_end:
        window.skip_past(b"\n")
    else:
        window.drain()
    return source.reject(start, window.offset - start, "record too large", begins)
