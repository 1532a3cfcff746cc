"""A trace file, whatever its shape, to one frame per record."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from tracefit.errors import DataError, UsageError
from tracefit.sources import wire
from tracefit.sources.compression import decompressed
from tracefit.sources.excerpt import excerpt
from tracefit.sources.framing import bare_records, framed_records, framed_zstd_records
from tracefit.sources.json_records import document_records, line_records
from tracefit.sources.limits import HEAD_BYTES
from tracefit.sources.records import Frame, Reject
from tracefit.sources.shape import Shape, other_signal_of, tell_shape
from tracefit.sources.window import Window

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

STDIN = "-"

_Splitter = Callable[[Window, str], Iterator[Frame | Reject]]
_SPLITTERS: dict[Shape, _Splitter] = {
    "lines": line_records,
    "document": document_records,
    "bare": bare_records,
    "framed": framed_records,
    "framed zstd": framed_zstd_records,
}


def read_frames(path: str | Path, *, stdin: BinaryIO | None = None) -> Iterator[Frame | Reject]:
    """Read the records of one trace file, in their order, in bounded memory.

    Compression and framing are told from the content. Whatever cannot be read is reported as a reject, and what
    follows it is read on.

    Args:
        path: The file; `-` reads standard input.
        stdin: The stream that `-` stands for, in place of the process's own.

    Yields:
        A `Frame` per record, its payload not yet decoded; a `Reject` per stretch of the file that holds none.

    Raises:
        UsageError: If the file cannot be opened.
        DataError: If the file holds OTLP logs or metrics.
    """
    name = str(path)
    with _opened(name, stdin) as raw:
        window = Window(decompressed(raw))
        last: Frame | Reject | None = None
        for item in _records(window, name):
            if last is None and isinstance(item, Frame):
                _check_signal(item)
            last = item
            yield item
        if window.damage and not _reports_the_end(last, window):
            yield Reject(name, window.offset, 0, window.damage)


def _opened(name: str, stdin: BinaryIO | None) -> AbstractContextManager[BinaryIO]:
    if name == STDIN:
        return nullcontext(stdin or sys.stdin.buffer)
    try:
        return Path(name).open("rb")
    except OSError as error:
        raise UsageError(
            f"cannot be opened ({error.strerror})", where=name, hint="check the path and its permissions"
        ) from error


def _records(window: Window, name: str) -> Iterator[Frame | Reject]:
    shape = tell_shape(window)
    if shape == "unknown":
        head = window.peek(0, HEAD_BYTES)
        size = window.drain()
        is_text = head.lstrip()[:1] in (b"{", b"[")
        outline = excerpt(head, "json") if is_text else f"<{size} bytes>"
        yield Reject(name, 0, size, "not OTLP traces", outline)
    elif shape != "empty":
        yield from _SPLITTERS[shape](window, name)
    else:
        window.drain()


def _check_signal(frame: Frame) -> None:
    if frame.encoding == "json":
        signal = other_signal_of(frame.payload[:HEAD_BYTES])
    else:
        told = wire.signal_of(frame.payload)
        signal = None if told == "traces" else told
    if signal:
        raise DataError(
            f"holds OTLP {signal}, not traces", where=frame.source_file, hint="leave it out of the input"
        )


def _reports_the_end(item: Frame | Reject | None, window: Window) -> bool:
    return isinstance(item, Reject) and item.source_offset + item.length == window.offset
