"""Read the trace files of a run in blocks for decoding; known files are skipped, remote ones are fetched first.

One rule: a file with the same name, size and hash as in the manifest is not decoded again; any other file is.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import msgspec

from tracefit._version import __version__
from tracefit.engines.decode import Task, decode_task
from tracefit.engines.jobs import take_together
from tracefit.inputs.blocks import BLOCK_BYTES, Block, ReadLimits, read_blocks
from tracefit.inputs.discovery import refuse_other_signal
from tracefit.inputs.files import ContentHash, content_hash_of, fetch
from tracefit.inputs.rejects import Reject
from tracefit.tables import dialects
from tracefit.tables.build import BuildLimits
from tracefit.tables.manifest import IngestedRun, Manifest, ReadFile, StagedPart
from tracefit.tables.rows import RowOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tracefit.inputs.discovery import RunSource
    from tracefit.inputs.files import TraceFile
    from tracefit.progress import Progress
    from tracefit.tables.places import Place

EXPANSION = 10
"""Decompressed bytes of a compressed one, about."""


def known_files(run: IngestedRun | None, options: str, there: Callable[[], set[str]]) -> dict[str, ReadFile]:
    """Return what a run's manifest entry knows of files, by name, as far as it is of use with these options and this version.

    Staged parts of them exist; `there` returns the names of all that do.
    """
    if run is None or run.options != options:
        return {}
    return {
        file.path: file
        for file in run.files
        if file.tool_version == __version__ and all(part.name in there() for part in file.parts)
    }


def is_unchanged(file: TraceFile, known: ReadFile | None, sha256: str | None = None) -> bool:
    """Return whether a file is the known one of its name, by size and hash; it is hashed only if the sizes are equal.

    A file in a bucket whose hash is not known goes by its size and modification time.

    Raises:
        UsageError: It cannot be read.
    """
    if known is None or known.size_bytes != file.size:
        return False
    if sha256 is None and file.filesystem is not None:
        return file.modified_ns is not None and known.modified_ns == file.modified_ns
    return known.sha256 == (sha256 or content_hash_of(file))


@dataclass(frozen=True, slots=True)
class IngestOptions:
    """Which part of the traces is kept. Traces are private data: text of users is not kept, except on request.

    Attributes:
        all_spans: Keep spans of other services and scopes too, in the `spans` table alone.
        keep_attributes: Keys of span attributes to keep beside the usual ones (ids, counts, routes, the model, sampling
            parameters).
        show_values: Show the beginning of a rejected record as it is, not only its structure and keys.
        max_document: Bytes of the longest record; it is held whole.
        max_rejects: Bad records of a file after which reading it stops.
        block_bytes: Bytes of a file that are decoded at once; with more, a worker takes more memory.
        bytes_per_worker: Bytes that are worth another process: it takes about as long to start as to decode 64 MiB.
        fetched_bytes: Bytes of files of buckets that lie on disk together, unless one alone is larger.
        build: How much of a run is in memory while its tables are built.
    """

    all_spans: bool = False
    keep_attributes: tuple[str, ...] = ()
    show_values: bool = False
    max_document: int = 256 << 20
    max_rejects: int = 100_000
    block_bytes: int = BLOCK_BYTES
    bytes_per_worker: int = 64 << 20
    fetched_bytes: int = 1 << 30
    build: BuildLimits = field(default_factory=BuildLimits)

    @property
    def limits(self) -> ReadLimits:
        """Bounds on reading one file."""
        return ReadLimits(self.max_document, self.max_rejects, self.block_bytes)

    @property
    def rows(self) -> RowOptions:
        """The options for the rows of the tables."""
        attributes = tuple(sorted({*dialects.SPAN_ATTRIBUTES, *self.keep_attributes}))
        return RowOptions(attributes, self.all_spans, self.show_values, self.max_rejects)


@dataclass(slots=True, eq=False)
class FilePiece:
    """A block, or a reject between blocks: its place in its file, and its staged parts once it is decoded."""

    file: _FileAtWork
    offset: int
    parts: tuple[StagedPart, ...] = ()


@dataclass(slots=True, eq=False)
class _FileAtWork:
    """A file that is read: its hash or what takes it, what was read so far, and the rejects in what is decoded."""

    file: TraceFile
    content: ContentHash | str
    pieces: list[FilePiece] = field(default_factory=list)
    rejects: int = 0


@dataclass(slots=True, eq=False)
class RunReading:
    """Reads the files of one run: gives out pieces, takes what they are decoded to in any order.

    A file with too many rejects is not read to its end; what counts of it does not depend on the order of the results.

    Attributes:
        trace_files: The files.
        known: What the manifest knows of them.
        options: What is kept of the traces, and bounds.
        place: Where the tables are; copies of files in buckets lie in its scratch folder for a while.
        by_path: Whether blocks of local files come as ranges, which another process of this machine reads.
        progress: Receives the bytes read, and warnings about files that are not read to their end.
    """

    trace_files: Sequence[TraceFile]
    known: Mapping[str, ReadFile]
    options: IngestOptions
    place: Place
    by_path: bool
    progress: Progress
    _unchanged: list[ReadFile] = field(default_factory=list)
    _read: list[_FileAtWork] = field(default_factory=list)
    _decoding: int = 0
    _all_given: bool = False

    def pieces(self) -> Iterator[tuple[FilePiece, Block | Reject]]:
        """Yield the pieces of all files that are not known.

        Raises:
            UsageError: A file cannot be read.
            DataError: A file holds other data than traces.
            OSError: A copy cannot be written.
        """
        local: list[TraceFile] = []
        remote: deque[TraceFile] = deque()
        for file in self.trace_files:
            if not self._is_known(file):
                (local if file.filesystem is None else remote).append(file)
        for file in local:
            yield from self._pieces_of(_FileAtWork(file, ContentHash()), file)
        most_bytes = self.options.fetched_bytes
        while group := take_together(remote, lambda file: file.size, most=len(remote), most_bytes=most_bytes):
            # The copies are gone when the last block is read, not when it is decoded: blocks carry their bytes.
            with self.place.scratch() as scratch:
                for file, copy in zip(group, fetch(group, scratch, self.progress.read), strict=True):
                    refuse_other_signal(copy.file)
                    if not self._is_known(file, copy.content_hash):
                        yield from self._pieces_of(_FileAtWork(file, copy.content_hash), copy.file)
        self._all_given = True

    def _is_known(self, file: TraceFile, sha256: str | None = None) -> bool:
        known = self.known.get(file.name)
        if known is None or not is_unchanged(file, known, sha256):
            return False
        # The time of a file in a bucket changes with every upload, its content need not.
        modified_ns = None if file.filesystem is None else file.modified_ns
        self._unchanged.append(msgspec.structs.replace(known, modified_ns=modified_ns))
        return True

    def _pieces_of(self, work: _FileAtWork, copy: TraceFile) -> Iterator[tuple[FilePiece, Block | Reject]]:
        """Read a file, from its copy if it is in a bucket: the bytes of that were hashed and reported when it was made."""
        self._read.append(work)
        is_hashed = isinstance(work.content, str)
        for item in read_blocks(
            copy,
            self.options.limits,
            on_read=None if is_hashed else self.progress.read,
            content_hash=None if isinstance(work.content, str) else work.content,
            show_values=self.options.show_values,
            by_path=self.by_path and not is_hashed,
        ):
            if work.rejects >= self.options.max_rejects:
                break
            work.pieces.append(
                FilePiece(work, item.offset if isinstance(item, Block) else item.source_offset)
            )
            self._decoding += 1
            yield work.pieces[-1], item

    def take(self, piece: FilePiece, parts: tuple[StagedPart, ...]) -> None:
        """Take the staged parts of a piece."""
        piece.parts = parts
        piece.file.rejects += sum(part.rejects for part in parts)
        self._decoding -= 1

    @property
    def is_complete(self) -> bool:
        """Whether every piece was given out and has its parts."""
        return self._all_given and not self._decoding

    def files(self) -> tuple[tuple[ReadFile, ...], bool]:
        """Return the manifest entries of the files in the order of their names, and whether they are as they were before.

        Raises:
            UsageError: A file cannot be read.
        """
        read = sorted([*self._unchanged, *map(self._entry, self._read)], key=lambda file: file.path)
        return tuple(read), read == sorted(self.known.values(), key=lambda file: file.path)

    def _entry(self, work: _FileAtWork) -> ReadFile:
        file, most = work.file, self.options.max_rejects
        parts: list[StagedPart] = []
        rejects = 0
        for piece in work.pieces:
            parts += piece.parts
            rejects += sum(part.rejects for part in piece.parts)
            # In the order of the file, whichever block was decoded first: rows after the last listed reject do not count.
            if rejects >= most:
                reason = f"more than {most} rejects: the rest of the file is not read (--max-rejects sets the limit)"
                self.progress.warn(f"{file.name}: {reason}")
                last = Reject(file.name, piece.offset, 0, reason)
                parts += decode_task(Task((last,), self.options.rows, self.place))[0]
                break
        return ReadFile(
            path=file.name,
            size_bytes=file.size,
            sha256=work.content if isinstance(work.content, str) else work.content.of(file),
            tool_version=__version__,
            parts=tuple(parts),
            modified_ns=None if file.filesystem is None else file.modified_ns,
        )


def work_bytes(file: TraceFile) -> int:
    """Return about how many decompressed bytes a file has: that is work, and a small compressed file may have much.

    Raises:
        UsageError: It cannot be read.
    """
    return file.size * (EXPANSION if _is_compressed(file) else 1)


def _is_compressed(file: TraceFile) -> bool:
    if file.filesystem is not None:  # a look at the content costs a round trip
        return file.name.endswith((".gz", ".zst"))
    with file.open() as raw:
        return raw.read(2) == b"\x1f\x8b" or b"\x28\xb5\x2f\xfd" in raw.read(8)


def resolve_run_id(manifest: Manifest, source: RunSource) -> str:
    """Return the id of a run: its name, with a number if another run has that name.

    A stored run is the same run if it was read from the same folder, or has the files of the source.
    """
    hashes = cache(lambda: {content_hash_of(file) for file in source.trace_files})
    number, run_id = 1, source.run_id
    while (run := manifest.runs.get(run_id)) is not None:
        if not run.tables or (source.folder is not None and run.source == source.folder):
            break
        if _has_files_of(run, source, hashes):
            break
        number += 1
        run_id = f"{source.run_id}-{number}"
    return run_id


def _has_files_of(run: IngestedRun, source: RunSource, hashes: Callable[[], set[str]]) -> bool:
    """Return whether each file of a stored run is in the source, under its name or with its content, or was rotated away.

    Files were rotated away if they do not exist any more, and another one of the run is in the source with its content,
    or begins with it. `hashes` gives the hashes of the source's files, which takes long.
    """
    files = {file.name: file for file in source.trace_files}
    missing = [known for known in run.files if known.path not in files]
    gone = [known for known in missing if known.sha256 not in hashes()]
    if any("://" in known.path or os.path.lexists(known.path) for known in gone):
        return False
    return not gone or any(
        known.sha256 in hashes() or (known.path in files and _begins_as(files[known.path], known))
        for known in run.files
    )


def _begins_as(file: TraceFile, known: ReadFile) -> bool:
    digest, left = hashlib.sha256(), known.size_bytes
    with file.open() as raw:
        while left and (piece := raw.read(min(left, 1 << 20))):
            digest.update(piece)
            left -= len(piece)
    return not left and digest.hexdigest() == known.sha256


def content_hash(files: Iterable[ReadFile]) -> str:
    """Hash the hashes of a run's files, so that their names and order do not matter."""
    return hashlib.sha256("".join(sorted(file.sha256 for file in files)).encode()).hexdigest()


def options_hash(options: RowOptions) -> str:
    """Hash the options that decide which part of a span is kept."""
    return hashlib.sha256(repr(options).encode()).hexdigest()
