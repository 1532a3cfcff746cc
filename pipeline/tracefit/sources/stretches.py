"""Large files in stretches that can be read by themselves: cut between lines, or between what lengths are told of.

Where a file is cut follows from the file alone, so that neither the number of workers nor how often it is read again as
it grows can make a difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from tracefit.sources import wire
from tracefit.sources.frames import read_frames, records_of
from tracefit.sources.framing import LENGTH_BYTES
from tracefit.sources.limits import CHUNK_BYTES
from tracefit.sources.records import Frame, Reject, Source
from tracefit.sources.sniff import Contents, sniff
from tracefit.sources.window import Window
from tracefit.sources.zstd_frames import ZSTD_MAGIC

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tracefit.sources.files import TraceFile
    from tracefit.sources.shape import Shape

STRETCH_BYTES = 32 << 20
"""Bytes of a stretch, about: the first cut at or behind every multiple of it."""

EXPANSION = 10
"""Bytes that a compressed byte is taken for: a stretch of compressed records is so much shorter."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes of a file that hold whole records; `end` is None where it is not cut: read on to the end."""

    begin: int = 0
    end: int | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """How a file's records lie in it.

    Attributes:
        contents: What its head shows.
        can_grow: Whether a stretch can be read without those before it, so that what is appended is all there is to
            read.
        stretches: In order, without gaps; one of the whole file where it cannot be cut.
    """

    contents: Contents
    can_grow: bool
    stretches: tuple[Stretch, ...]

    @property
    def shape(self) -> Shape:
        """The shape, told from the content."""
        return self.contents.shape


def lay_out(file: TraceFile, *, begin: int = 0) -> Layout:
    """Tell a file's shape, and cut it into stretches.

    Args:
        file: The file.
        begin: Where to begin cutting: the beginning of a stretch.

    Raises:
        UsageError: The file cannot be read.
    """
    contents = file.contents or sniff(file)
    local = file.filesystem is None
    cuts = _CUTS.get(contents.shape)
    if contents.compression or cuts is None or not local:
        return Layout(contents, can_grow=False, stretches=(Stretch(),))
    with file.open() as raw:
        bounds = [begin, *cuts(raw, file.size, begin)]
    pairs = zip(bounds, [*bounds[1:], None], strict=True)
    return Layout(contents, can_grow=True, stretches=tuple(Stretch(*pair) for pair in pairs))


def read_stretch(
    file: TraceFile,
    stretch: Stretch,
    shape: Shape,
    *,
    on_read: Callable[[int], object] = lambda _: None,
    show_values: bool = False,
) -> Iterator[Frame | Reject]:
    """Read the records of one stretch, with their offsets in the file.

    Args:
        file: The file.
        stretch: One of its layout's.
        shape: The layout's.
        on_read: Told of the bytes of the file that were read.
        show_values: Whether excerpts of rejects may show what is in the records, which is private.

    Raises:
        UsageError: The file cannot be read.
        DataError: It holds OTLP logs or metrics.
    """
    if stretch == Stretch():
        yield from read_frames(file, on_read=on_read, show_values=show_values)
        return
    with file.open() as raw:
        raw.seek(stretch.begin)
        window = Window(_pieces(raw, None if stretch.end is None else stretch.end - stretch.begin, on_read))
        window.offset = stretch.begin
        yield from records_of(window, Source(file.name, show_values), shape)


def _pieces(raw: BinaryIO, size: int | None, on_read: Callable[[int], object]) -> Iterator[bytes]:
    left = size
    while piece := raw.read(CHUNK_BYTES if left is None else min(CHUNK_BYTES, left)):
        on_read(len(piece))
        yield piece
        left = None if left is None else left - len(piece)


def _line_cuts(raw: BinaryIO, size: int, begin: int) -> Iterator[int]:
    wanted = _next_multiple(begin, STRETCH_BYTES)
    while wanted < size:
        raw.seek(wanted - 1)  # a line that begins right here is not cut
        position = wanted - 1
        while (piece := raw.read(CHUNK_BYTES)) and (found := piece.find(b"\n")) < 0:
            position += len(piece)
        cut = position + found + 1
        if not piece or cut >= size:
            return
        yield cut
        wanted = _next_multiple(cut, STRETCH_BYTES)


def _message_cuts(raw: BinaryIO, size: int, begin: int) -> Iterator[int]:
    return _frame_cuts(raw, size, begin, bytes([wire.RESOURCE_SPANS_TAG]), STRETCH_BYTES)


def _zstd_cuts(raw: BinaryIO, size: int, begin: int) -> Iterator[int]:
    return _frame_cuts(raw, size, begin, ZSTD_MAGIC, STRETCH_BYTES // EXPANSION)


def _frame_cuts(raw: BinaryIO, size: int, begin: int, start: bytes, every: int) -> Iterator[int]:
    """Follow the lengths from frame to frame; behind the first that makes no sense nothing is cut."""
    position, wanted = begin, _next_multiple(begin, every)
    while True:
        raw.seek(position)
        head = raw.read(LENGTH_BYTES + len(start))
        length = int.from_bytes(head[:LENGTH_BYTES], "big")
        position += LENGTH_BYTES + length
        if head[LENGTH_BYTES:] != start or position >= size:
            return
        if position >= wanted:
            yield position
            wanted = _next_multiple(position, every)


def _next_multiple(position: int, every: int) -> int:
    return (position // every + 1) * every


_CUTS: dict[Shape, Callable[[BinaryIO, int, int], Iterator[int]]] = {
    "lines": _line_cuts,
    "framed": _message_cuts,
    "framed zstd": _zstd_cuts,
}
