"""Files of object stores to files on disk: read once, hashed on the way."""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, BinaryIO

from tracefit.sources.fingerprint import fingerprints_of, pieces_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from tracefit.sources.files import TraceFile

AT_ONCE = 8
"""Files on the way at a time: a small one is little more than a round trip."""

GROUP_BYTES = 1 << 30
"""Bytes of files that lie on disk together, unless one alone is larger."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A copy of a file on disk, under the file's own name, and the hashes of its beginnings and of the whole."""

    file: TraceFile
    hashes: dict[int, str]


def in_groups(files: Iterable[TraceFile]) -> Iterator[list[TraceFile]]:
    """Yield files, in their order, in groups of `GROUP_BYTES` at most; a larger file comes alone."""
    group: list[TraceFile] = []
    size = 0
    for file in files:
        if group and size + file.size > GROUP_BYTES:
            yield group
            group, size = [], 0
        group.append(file)
        size += file.size
    if group:
        yield group


def fetch(
    files: Iterable[TraceFile], folder: Path, sizes: Iterable[int], on_read: Callable[[int], object]
) -> list[Fetched]:
    """Copy files of object stores to disk.

    Args:
        files: The files.
        folder: Where to put the copies.
        sizes: Lengths of beginnings to hash.
        on_read: Told of the bytes that were read, by one thread at a time.

    Returns:
        The copies, in the order of the files.

    Raises:
        UsageError: A file cannot be read.
        OSError: A copy cannot be written.
    """
    wanted = set(sizes)
    lock = threading.Lock()

    def tell(size: int) -> None:
        with lock:
            on_read(size)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda file: _fetch(file, folder, wanted, tell), files))


def _fetch(file: TraceFile, folder: Path, sizes: Iterable[int], on_read: Callable[[int], object]) -> Fetched:
    target = folder / uuid.uuid4().hex
    with file.open(on_read=on_read) as stream, target.open("wb") as copy:
        hashes = fingerprints_of(_copied(stream, copy), sizes)
    return Fetched(replace(file, path=str(target), size=max(hashes), filesystem=None), hashes)


def _copied(stream: BinaryIO, copy: BinaryIO) -> Iterator[bytes]:
    for piece in pieces_of(stream):
        copy.write(piece)
        yield piece
