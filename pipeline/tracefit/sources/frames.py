"""A trace file, whatever its shape, to one frame per record."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, BinaryIO

from tracefit.errors import DataError
from tracefit.sources import wire
from tracefit.sources.compression import decompressed, decompressed_behind_damage
from tracefit.sources.files import TraceFile
from tracefit.sources.framed_zstd import framed_zstd_records
from tracefit.sources.framing import bare_records, framed_records, is_frame_at
from tracefit.sources.json_records import document_records, line_records
from tracefit.sources.limits import HEAD_BYTES
from tracefit.sources.records import Frame, Reject, Source
from tracefit.sources.shape import TRACES_KEY, Shape, other_signal_of, tell_shape
from tracefit.sources.window import Window

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

STDIN = "-"

_Splitter = Callable[[Window, Source], Iterator[Frame | Reject]]
_SPLITTERS: dict[Shape, _Splitter] = {
    "lines": line_records,
    "document": document_records,
    "bare": bare_records,
    "framed": framed_records,
    "framed zstd": framed_zstd_records,
}


def read_frames(
    file: str | Path | TraceFile,
    *,
    stdin: BinaryIO | None = None,
    on_read: Callable[[int], object] | None = None,
    show_values: bool = False,
) -> Iterator[Frame | Reject]:
    """Read the records of one trace file, in their order, in bounded memory.

    Compression and framing are told from the content. Whatever cannot be read is reported as a reject, and what
    follows it is read on.

    Args:
        file: The file; a path `-` reads standard input.
        stdin: The stream that `-` stands for, in place of the process's own.
        on_read: Told of the bytes of the file, as stored, that were read; not for standard input.
        show_values: Whether excerpts of rejects may show what is in the records, which is private.

    Yields:
        A `Frame` per record, its payload not yet decoded; a `Reject` per stretch of the file that holds none.

    Raises:
        UsageError: If the file cannot be opened, or not be read to its end.
        DataError: If the file holds OTLP logs or metrics.
    """
    source = Source(file.name if isinstance(file, TraceFile) else str(file), show_values)
    with _opened(file, stdin, on_read) as raw:
        window, shape = _recognised(raw)
        has_traces = TRACES_KEY.search(window.peek(0, HEAD_BYTES)) is not None
        last: Frame | Reject | None = None
        for item in records_of(window, source, shape):
            if last is None and not has_traces and isinstance(item, Frame):
                refuse_other_signal(source.name, signal_of(item))
            last = item
            yield item
            yield from _gaps(window, source)
        yield from _gaps(window, source)
        if window.damage and not _reports_the_end(last, window):
            yield Reject(source.name, window.offset, 0, window.damage)


def _recognised(raw: BinaryIO) -> tuple[Window, Shape]:
    """Tell a file's shape; one that is nothing at first sight may be compressed and lack its beginning."""
    window = Window(decompressed(raw))
    shape = tell_shape(window)
    is_guess = shape == "unknown" or (shape == "framed" and not is_frame_at(window, 0))
    if is_guess and raw.seekable():
        position = raw.tell()
        if chunks := decompressed_behind_damage(raw):
            behind = Window(chunks)
            if (told := tell_shape(behind)) != "unknown":
                return behind, told
        raw.seek(position)
    return window, shape


def _opened(
    file: str | Path | TraceFile, stdin: BinaryIO | None, on_read: Callable[[int], object] | None
) -> AbstractContextManager[BinaryIO]:
    if isinstance(file, TraceFile):
        return file.open(on_read=on_read)
    if str(file) == STDIN:
        return nullcontext(stdin or sys.stdin.buffer)
    return TraceFile.local(file).open(on_read=on_read)


def records_of(window: Window, source: Source, shape: Shape) -> Iterator[Frame | Reject]:
    """Yield the records of a stream of known shape, and rejects for the rest of it."""
    if shape == "unknown":
        head = window.peek(0, HEAD_BYTES)
        size = window.drain()
        is_text = head.lstrip()[:1] in (b"{", b"[")
        yield source.reject(0, size, "not OTLP traces", head, "json" if is_text else "protobuf")
    elif shape != "empty":
        yield from _SPLITTERS[shape](window, source)
    else:
        window.drain()


def signal_of(frame: Frame) -> wire.Signal:
    """Tell which signal a record holds; `traces` also where it does not say."""
    if frame.encoding == "json":
        return other_signal_of(frame.payload[:HEAD_BYTES]) or "traces"
    return wire.signal_of(frame.payload)


def refuse_other_signal(name: str, signal: wire.Signal) -> None:
    """Refuse a file of another signal.

    Raises:
        DataError: If it is one.
    """
    if signal != "traces":
        raise DataError(f"holds OTLP {signal}, not traces", where=name, hint="leave it out of the input")


def _gaps(window: Window, source: Source) -> Iterator[Reject]:
    """Report what the decompressor had to leave out; its size is not known."""
    while window.gaps:
        offset, reason = window.gaps.pop(0)
        yield Reject(source.name, offset, 0, reason)


def _reports_the_end(item: Frame | Reject | None, window: Window) -> bool:
    return isinstance(item, Reject) and item.source_offset + item.length == window.offset
