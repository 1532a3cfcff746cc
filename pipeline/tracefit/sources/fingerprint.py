"""What tells two contents of a trace file apart, and whether one is the beginning of the other."""

from __future__ import annotations

import hashlib
import zlib
from typing import TYPE_CHECKING, BinaryIO

from tracefit.sources.compression import read_fully

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tracefit.sources.files import TraceFile

BLOCK_BYTES = 64 << 10
_BLOCKS_AT_ONCE = 16


def fingerprints(file: TraceFile, sizes: Iterable[int] = ()) -> dict[int, str]:
    """Hash a file, and its beginnings.

    The hash is SHA-256 over the CRC-32 of each 64 KiB block: it tells accidents apart, not forgeries, and costs a fifth
    of a hash of every byte.

    Args:
        file: The file.
        sizes: Lengths of beginnings to hash too; those longer than the file are left out.

    Returns:
        Length to hash in hex; the last is the whole file's.

    Raises:
        UsageError: The file cannot be read.
    """
    with file.open() as stream:
        return fingerprints_of(pieces_of(stream), sizes)


def pieces_of(stream: BinaryIO) -> Iterator[bytes]:
    """Yield a stream in pieces of whole blocks, but for the last: a store may give fewer bytes than it was asked for."""
    while piece := read_fully(stream, BLOCK_BYTES * _BLOCKS_AT_ONCE):
        yield piece


def fingerprints_of(pieces: Iterable[bytes], sizes: Iterable[int]) -> dict[int, str]:
    """Hash the contents of a file as they come from `pieces_of`; see `fingerprints`."""
    wanted = sorted(set(sizes), reverse=True)
    hashes: dict[int, str] = {}
    digest, done = hashlib.sha256(), 0

    def hash_at(size: int, block: bytes | memoryview) -> None:
        ending = digest.copy()
        if size > done:
            ending.update(_crc(block[: size - done]))
        hashes[size] = ending.hexdigest()

    for piece in pieces:
        view = memoryview(piece)
        for start in range(0, len(piece), BLOCK_BYTES):
            block = view[start : start + BLOCK_BYTES]
            while wanted and wanted[-1] < done + len(block):
                hash_at(wanted.pop(), block)
            digest.update(_crc(block))
            done += len(block)
    hashes[done] = digest.hexdigest()
    return hashes


def _crc(block: bytes | memoryview) -> bytes:
    return zlib.crc32(block).to_bytes(4, "big")
