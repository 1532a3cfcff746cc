"""Compressed files to plain chunks: gzip of many members, zstd of many frames, whatever of them is damaged."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Protocol, cast

from tracefit.errors import TracefitError
from tracefit.sources.gzip_members import GzipMembers
from tracefit.sources.limits import (
    CHUNK_BYTES,
    HEAD_BYTES,
    MAX_GUESSES,
    MAX_REREAD_BYTES,
    MAX_REREAD_SHARE,
)
from tracefit.sources.units import Damage, bounded
from tracefit.sources.zstd_frames import ZstdFrames, unzstd

if TYPE_CHECKING:
    from collections.abc import Iterator


class DamagedStreamError(TracefitError):
    """The compressed stream stops making sense; every byte before that has been handed out."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A stretch of the stream that could not be decompressed; what comes next is from another member or frame."""

    reason: str


class _Units(Protocol):
    """A kind of compression: files of it are units, each of which can be decompressed by itself."""

    @property
    def magic(self) -> bytes:
        """What a unit begins with."""
        ...

    @property
    def unit(self) -> str:
        """What a unit is called."""
        ...

    def read(self, raw: BinaryIO, start: int) -> Iterator[bytes]:
        """Yield what is in the units from `start` on; raise `Damage` behind the last byte before any."""
        ...

    def starts(self, raw: BinaryIO, start: int) -> Iterator[int]:
        """Yield where, from `start` on, something begins like a unit."""
        ...

    def is_unit(self, raw: BinaryIO, start: int) -> bool:
        """Return whether something can be decompressed there."""
        ...


_KINDS: tuple[_Units, ...] = (GzipMembers(), ZstdFrames())
_LONGEST_MAGIC = max(len(kind.magic) for kind in _KINDS)


def compression_of(head: bytes) -> str | None:
    """Return `gzip` or `zstd` if a file begins so."""
    return next((kind.unit.split()[0] for kind in _KINDS if head.startswith(kind.magic)), None)


def decompressed(raw: BinaryIO) -> Iterator[bytes | Gap]:
    """Yield the content of a file in chunks, decompressed if it begins like gzip or zstd.

    Behind damage, reading goes on at the next gzip member or zstd frame, if there is one.

    Args:
        raw: The file, at its beginning; it need not be seekable.

    Yields:
        Chunks of at most a few MiB, and gaps between them.

    Raises:
        DamagedStreamError: After the last byte that could be decompressed, if the compressed data is cut,
            corrupt, or expands beyond what `limits` allows.
    """
    head = read_fully(raw, _LONGEST_MAGIC)
    kind = next((kind for kind in _KINDS if head.startswith(kind.magic)), None)
    if kind is None:
        yield from _pieces(head, raw)
    elif raw.seekable():
        yield from _Recovering(raw, kind).read(0)
    else:
        with _spooled(_pieces(head, raw)) as file:
            yield from _Recovering(file, kind).read(0)


def decompressed_behind_damage(raw: BinaryIO) -> Iterator[bytes | Gap] | None:
    """Return the content of a compressed file whose very beginning is damaged, or None if it is none."""
    for kind in _KINDS:
        recovering = _Recovering(raw, kind)
        start = recovering.next(0, HEAD_BYTES)
        if start >= 0:
            return recovering.read(start, gap=f"{kind.unit} is missing its beginning")
    return None


def unzstd_record(compressed: bytes) -> Iterator[bytes]:
    """Decompress one zstd frame that holds one record.

    Args:
        compressed: The whole frame.

    Yields:
        The record, in chunks.

    Raises:
        DamagedStreamError: If the frame is cut or corrupt, or expands out of all proportion.
    """
    try:
        yield from unzstd(compressed)
    except Damage as damage:
        raise DamagedStreamError(damage.what) from damage


class _Recovering:
    """Reads units, and what can be read behind damage. The number of looks at likely beginnings is bounded."""

    def __init__(self, raw: BinaryIO, kind: _Units) -> None:
        self._raw = raw
        self._kind = kind
        self._guesses_left = MAX_GUESSES

    def read(self, start: int, *, gap: str | None = None) -> Iterator[bytes | Gap]:
        reread = 0
        if gap:
            yield Gap(gap)
        while start >= 0:
            try:
                yield from bounded(self._raw, start, self._kind.read(self._raw, start))
            except Damage as damage:
                # Where the unit seems to end does not count: if it was cut, that is inside another one.
                end = self._raw.tell()
                reread += end - damage.unit_start
                is_final = damage.is_final or reread > MAX_REREAD_BYTES + MAX_REREAD_SHARE * end
                start = -1 if is_final else self.next(damage.unit_start + 1)
                if start < 0:
                    raise DamagedStreamError(damage.what) from damage
                yield Gap(f"{damage.what}; read on at the next {self._kind.unit}")
            else:
                return

    def next(self, start: int, limit: int | None = None) -> int:
        """Return where the next unit begins that can be decompressed, or -1."""
        for found in self._kind.starts(self._raw, start):
            if not self._guesses_left or (limit is not None and found > limit):
                return -1
            self._guesses_left -= 1
            if self._kind.is_unit(self._raw, found):
                return found
        return -1


def read_fully(raw: BinaryIO, size: int) -> bytes:
    """Read `size` bytes, or all there are: a pipe may give fewer than asked at a time."""
    data = b""
    while len(data) < size and (piece := raw.read(size - len(data))):
        data += piece
    return data


def _pieces(head: bytes, raw: BinaryIO) -> Iterator[bytes]:
    if head:
        yield head
    while piece := raw.read(CHUNK_BYTES):
        yield piece


def _spooled(pieces: Iterator[bytes]) -> BinaryIO:
    """Keep a stream that cannot be rewound on disk: where it is damaged, parts are read twice."""
    file = cast("BinaryIO", tempfile.TemporaryFile())  # noqa: SIM115 - the caller closes it
    for piece in pieces:
        file.write(piece)
    return file
