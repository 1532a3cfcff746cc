"""JSON text to records: one per line, or the objects of a document that goes over many lines."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tracefit.sources.excerpt import excerpt
from tracefit.sources.limits import CHUNK_BYTES, MAX_RECORD_BYTES
from tracefit.sources.records import Frame, Reject
from tracefit.sources.shape import BOM, RECORD_START, is_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracefit.sources.window import Window

_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[{}]', re.DOTALL)
_BETWEEN = b" \t\r\n,[]"


def line_records(window: Window, name: str) -> Iterator[Frame | Reject]:
    """Yield the lines of a file that are not blank.

    Args:
        window: The decompressed file.
        name: The file's name for frames and rejects.

    Yields:
        One frame per line without its line end, unread; a reject for a line that is too large, and for a last line
        that is cut because the compressed stream is.
    """
    while window.fill(1):
        end = window.find(b"\n", MAX_RECORD_BYTES + 1)
        if end < 0 and window.fill(MAX_RECORD_BYTES + 1):
            yield _too_large(window, name, to_line_end=True)
            continue
        start = window.offset
        line = window.take(end if end >= 0 else len(window))
        window.skip(1)
        text = line.removeprefix(BOM)
        if text and not text.isspace():
            start += len(line) - len(text)
            yield Frame(name, start, text, "json") if end >= 0 else _last(window, name, start, text)


def document_records(window: Window, name: str) -> Iterator[Frame | Reject]:
    """Yield the objects of a pretty-printed object, of an array of objects, or of several of these.

    Args:
        window: The decompressed file.
        name: The file's name for frames and rejects.

    Yields:
        One frame for the whole document if it is whole; else one per object, and rejects for what is between.
    """
    window.fill(len(BOM))
    if window.peek(0, len(BOM)) == BOM:
        window.skip(len(BOM))
    if not window.fill(MAX_RECORD_BYTES + 1) and is_json(text := window.peek(0, len(window))):
        yield Frame(name, window.offset, text, "json")
        window.skip(len(text))
        return
    yield from _objects(window, name)


def object_end(text: bytes) -> int:
    """Return the length of the JSON object that the text begins with, or -1 if it does not end in it."""
    depth = 0
    for token in _TOKEN.finditer(text):
        if token[0][:1] != b'"':
            depth += 1 if token[0] == b"{" else -1
            if depth <= 0:
                return token.end() if text[:1] == b"{" else -1
    return -1


def _objects(window: Window, name: str) -> Iterator[Frame | Reject]:
    while window.fill(1):
        yield from _between(window, name)
        if not window.fill(1):
            return
        end = _object_end(window)
        if end > MAX_RECORD_BYTES or (end < 0 and window.fill(MAX_RECORD_BYTES + 1)):
            yield _too_large(window, name, to_line_end=False)
            return
        start = window.offset
        text = window.take(end if end >= 0 else len(window))
        yield Frame(name, start, text, "json") if end >= 0 else _last(window, name, start, text)


def _between(window: Window, name: str) -> Iterator[Reject]:
    """Move to the next object; what is neither space nor the punctuation of an array is reported."""
    found = window.find(b"{", MAX_RECORD_BYTES)
    size = found if found >= 0 else len(window)
    start, gap = window.offset, window.take(size)
    if gap.strip(_BETWEEN):
        yield Reject(name, start, size, "not a JSON object", excerpt(gap, "json"))


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


def _last(window: Window, name: str, start: int, text: bytes) -> Frame | Reject:
    """Make a frame of a text that ran into the end of the file, or a reject if nothing of it can be good."""
    if window.damage and not is_json(text) and len(RECORD_START.findall(text)) < 2:
        return Reject(name, start, len(text), window.damage, excerpt(text, "json"))
    return Frame(name, start, text, "json")


def _too_large(window: Window, name: str, *, to_line_end: bool) -> Reject:
    start, outline = window.offset, excerpt(window.peek(0, CHUNK_BYTES), "json")
    if to_line_end:
        window.skip_past(b"\n")
    else:
        window.drain()
    return Reject(name, start, window.offset - start, "record too large", outline)
