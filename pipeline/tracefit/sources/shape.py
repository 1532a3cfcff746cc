"""What a file is, told from its content: names are no promise."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Literal

from tracefit.sources import wire
from tracefit.sources.excerpt import is_json
from tracefit.sources.framing import LENGTH_BYTES, FrameFinder, is_frame_at
from tracefit.sources.limits import HEAD_BYTES, MAX_HELD_BYTES, MAX_RECORD_BYTES
from tracefit.sources.zstd_frames import ZSTD_MAGIC, frame_end

if TYPE_CHECKING:
    from tracefit.sources.window import Window

Shape = Literal["empty", "lines", "document", "bare", "framed", "framed zstd", "unknown"]

BOM = b"\xef\xbb\xbf"
TRACES_KEY = re.compile(rb'"(?:resourceSpans|resource_spans|batches)"\s*:')
RECORD_START = re.compile(rb'\{\s*"(?:trace"\s*:\s*\{\s*")?(?:resourceSpans|resource_spans|batches)"\s*:')
_OTHER_SIGNAL = re.compile(rb'(?:\xef\xbb\xbf)?[\s\[]*\{\s*"resource_?(logs|metrics)"\s*:', re.IGNORECASE)
_EMPTY_JSON = re.compile(rb"(?:\xef\xbb\xbf)?(?:\s*(?:\{\s*\}|\[\s*\]))+\s*")


def other_signal_of(head: bytes) -> wire.Signal | None:
    """Return `logs` or `metrics` if JSON begins as a request of these, else None."""
    found = _OTHER_SIGNAL.match(head)
    if found is None:
        return None
    return "logs" if found[1].lower() == b"logs" else "metrics"


def tell_shape(window: Window) -> Shape:
    """Tell the shape of a file from its head.

    Args:
        window: The decompressed file, at its beginning; nothing of it is taken.

    Returns:
        The shape; `unknown` if nothing in the head looks like OTLP traces.
    """
    window.fill(HEAD_BYTES)
    head = window.peek(0, HEAD_BYTES)
    if not head.removeprefix(BOM).strip():
        return "lines" if window.fill(HEAD_BYTES + 1) else "empty"
    if head[LENGTH_BYTES : LENGTH_BYTES + 4] == ZSTD_MAGIC:
        return "framed zstd"
    # A string in protobuf can hold anything, the keys of JSON included, and JSON can have lost its beginning.
    is_text = head.removeprefix(BOM).lstrip()[:1] in (b"{", b"[") and not _begins_bare(head)
    binary = "unknown" if is_text else _binary_shape(window, head)
    if binary != "unknown":
        return binary
    if TRACES_KEY.search(head) or other_signal_of(head) or _EMPTY_JSON.fullmatch(head):
        return "document" if _is_document(window) else "lines"
    return "unknown"


def _binary_shape(window: Window, head: bytes) -> Shape:
    if _begins_bare(head):
        return "bare"
    if is_frame_at(window, 0) or FrameFinder(window).next(0, HEAD_BYTES) >= 0:
        return "framed"
    return "framed zstd" if _has_framed_zstd(head) else "unknown"


def _has_framed_zstd(head: bytes) -> bool:
    """Return whether some zstd frame has its length before it, as far as the head shows where it ends."""
    for found in re.finditer(re.escape(ZSTD_MAGIC), head):
        start = found.start() - LENGTH_BYTES
        size = int.from_bytes(head[max(start, 0) : found.start()], "big")
        stop = frame_end(io.BytesIO(head), found.start())
        goes_on = (
            stop < 0 and len(head) >= HEAD_BYTES and len(head) - found.start() < size <= MAX_RECORD_BYTES
        )
        if start >= 0 and (stop == found.start() + size or goes_on):
            return True
    return False


def _begins_bare(head: bytes) -> bool:
    field = wire.read_field(head, 0)
    if head[0] != wire.RESOURCE_SPANS_TAG or field is None:
        return False
    stop = field[3]
    if stop <= len(head):
        followed = stop == len(head) or head[stop] == wire.RESOURCE_SPANS_TAG
        return followed and wire.is_traces_message(head, 0, stop)
    return wire.begins_traces_message(head, 0, stop)


def _is_document(window: Window) -> bool:
    """Tell one JSON document over many lines from one record per line.

    The first line decides: a record is whole on its line, a document breaks after a bracket, a colon or a comma. A
    record may be cut there too; then the next line begins another.
    """
    first, second = _first_lines(window)
    if second is None or is_json(first) or first[-1:] not in b"{[,:":
        return False
    return first.startswith(b"[") or not RECORD_START.match(second)


def _first_lines(window: Window) -> tuple[bytes, bytes | None]:
    """Return the first line that is not blank and the beginning of the next such line."""
    stop, first = 0, b""
    while not first:
        start = stop
        stop = _line_end(window, start)
        if stop < 0:
            return window.peek(start, HEAD_BYTES), None
        first = window.peek(start, stop).strip().removeprefix(BOM)
    while window.fill(stop + 1):
        window.fill(stop + 256)
        if second := window.peek(stop, stop + 256).lstrip():
            return first, second
        stop += 256
    return first, None


def _line_end(window: Window, start: int) -> int:
    """Return the position behind the line that begins at `start`, or -1 if nothing ends it."""
    index = window.find(b"\n", start + MAX_HELD_BYTES, start)
    return index + 1 if index >= 0 else -1
