"""Read the trace files of a run as tasks of decoding; known files are skipped, remote ones are fetched first.

One rule: a file with the same name, size and hash as in the manifest is not decoded again; any other file is.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Literal

import msgspec

from tracefit._version import __version__
from tracefit.engines.decode import Decoded, Task, decode_task
from tracefit.inputs.blocks import BLOCK_BYTES, Block, ReadLimits, read_blocks
from tracefit.inputs.discovery import refuse_other_signal
from tracefit.inputs.files import ContentHash, content_hash_of, fetch
from tracefit.inputs.rejects import Reject
from tracefit.tables import dialects
from tracefit.tables.build import BuildLimits
from tracefit.tables.manifest import IngestedRun, Manifest, ReadFile, StagedPart
from tracefit.tables.rows import RowOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tracefit.inputs.discovery import RunSource
    from tracefit.inputs.files import TraceFile
    from tracefit.progress import Progress
    from tracefit.tables.places import Place

EXPANSION = 10
"""Decompressed bytes of a compressed one, about."""


@dataclass(frozen=True, slots=True)
class KnownFiles:
    """What a run's manifest entry knows of files, as far as it is of use with these options and this version."""

    files: dict[str, ReadFile]

    @classmethod
    def of(cls, run: IngestedRun | None, options: str, there: Callable[[], set[str]]) -> KnownFiles:
        """Return the files of a run whose staged parts exist; `there` returns the names of all parts that do."""
        if run is None or run.options != options:
            return cls({})
        return cls(
            {
                file.path: file
                for file in run.files
                if file.tool_version == __version__ and all(part.name in there() for part in file.parts)
            }
        )

    def looks_known(self, file: TraceFile) -> bool:
        """Return whether a file has the name and size of a known one."""
        known = self.files.get(file.name)
        return known is not None and known.size_bytes == file.size

    def unchanged_remote(self, file: TraceFile) -> ReadFile | None:
        """Return the entry of an unchanged file in a bucket, by its size and modification time."""
        known = self.files.get(file.name)
        if file.filesystem is None or file.modified_ns is None or known is None:
            return None
        return known if (known.size_bytes, known.modified_ns) == (file.size, file.modified_ns) else None

    def unchanged(self, file: TraceFile, sha256: str | None = None) -> ReadFile | None:
        """Return the entry of an unchanged file, by name, size and hash; it is hashed only if name and size are equal.

        Raises:
            UsageError: It cannot be read.
        """
        known = self.files.get(file.name)
        if known is None or known.size_bytes != file.size:
            return None
        return known if known.sha256 == (sha256 or content_hash_of(file)) else None

    def status(self, file: TraceFile) -> Literal["new", "grown", "known"]:
        """Say whether a file is known, has changed or grown, or is new.

        Raises:
            UsageError: It cannot be read.
        """
        if file.name not in self.files:
            return "new"
        known = self.unchanged_remote(file) or self.unchanged(file)
        return "known" if known else "grown"


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


@dataclass(frozen=True, slots=True)
class Reading:
    """How trace files are read; the same for the files of all runs.

    Attributes:
        options: What is kept of the traces, and bounds.
        place: Where the tables are; copies of files in buckets lie in its scratch folder for a while.
        by_path: Whether blocks of local files come as ranges, which another process of this machine reads.
        progress: Receives the bytes read, and warnings about files that are not read to their end.
    """

    options: IngestOptions
    place: Place
    by_path: bool
    progress: Progress


class RunReading:
    """Reads the files of one run: gives out tasks, takes their results in any order.

    A file with too many rejects is not read to its end; what counts of it does not depend on the order of the results.
    """

    def __init__(self, files: Iterable[TraceFile], known: KnownFiles, how: Reading) -> None:
        self._known = known
        self._how = how
        self._unchanged: list[ReadFile] = []
        self._read: list[TraceFile] = []
        self._hashes: dict[str, ContentHash | str] = {}
        self._parts: dict[str, list[StagedPart]] = {}
        self._rejects: dict[str, int] = {}
        self._stopped: list[Reject] = []
        self._given: deque[Task] = deque()
        self._ended: dict[int, Decoded] = {}
        self._left = self._tasks(files)
        self._all_given = False

    def next_task(self) -> Task | None:
        """Return the next task; null after the last one.

        Raises:
            UsageError: A file cannot be read.
            DataError: A file holds other data than traces.
            OSError: A copy cannot be written.
        """
        task = next(self._left, None)
        if task is None:
            self._all_given = True
        else:
            self._given.append(task)
        return task

    def take(self, task: Task, decoded: Decoded) -> None:
        """Take the result of a task."""
        self._ended[id(task)] = decoded
        # Rejects are counted in the order of the file, whichever block is decoded first.
        while self._given and id(self._given[0]) in self._ended:
            first = self._given.popleft()
            self._count(first, self._ended.pop(id(first)))

    @property
    def is_complete(self) -> bool:
        """Whether every task was given out and has its result."""
        return self._all_given and not self._given

    def files(self) -> tuple[tuple[ReadFile, ...], bool]:
        """Return the manifest entries of the files in the order of their names, and whether they are as they were before.

        Raises:
            UsageError: A file cannot be read.
        """
        # After all blocks: later blocks of the file are on their way when it is stopped.
        for reject in self._stopped:
            self._parts[reject.source_file] += decode_task(self._task([reject]))[0]
        self._stopped.clear()
        read = [*self._unchanged, *map(self._entry, self._read)]
        ordered = tuple(sorted(read, key=lambda file: file.path))
        before = tuple(sorted(self._known.files.values(), key=lambda file: file.path))
        return ordered, ordered == before

    def _entry(self, file: TraceFile) -> ReadFile:
        found = self._hashes[file.name]
        return ReadFile(
            path=file.name,
            size_bytes=file.size,
            sha256=found if isinstance(found, str) else found.of(file),
            tool_version=__version__,
            parts=tuple(self._parts[file.name]),
            modified_ns=None if file.filesystem is None else file.modified_ns,
        )

    def _tasks(self, files: Iterable[TraceFile]) -> Iterator[Task]:
        local: list[TraceFile] = []
        remote: list[TraceFile] = []
        for file in files:
            is_local = file.filesystem is None
            if known := self._known.unchanged(file) if is_local else self._known.unchanged_remote(file):
                self._unchanged.append(known)
            else:
                (local if is_local else remote).append(file)
        for file in local:
            self._hashes[file.name] = ContentHash()
        self._begin(local)
        yield from self._tasks_of(local, self._how.progress.read, by_path=self._how.by_path)
        for group in _in_groups(remote, self._how.options.fetched_bytes):
            # The copies are gone when the last block is read, not when it is decoded: blocks carry their bytes.
            with self._how.place.scratch() as scratch:
                new = []
                for file, copy in zip(group, fetch(group, scratch, self._how.progress.read), strict=True):
                    refuse_other_signal(copy.file)
                    # The time of a file in a bucket changes with every upload, its content need not.
                    if known := self._known.unchanged(copy.file, copy.content_hash):
                        self._unchanged.append(msgspec.structs.replace(known, modified_ns=file.modified_ns))
                    else:
                        new.append(copy.file)
                        self._hashes[file.name] = copy.content_hash
                        self._begin([file])
                yield from self._tasks_of(new, lambda _: None, by_path=False)

    def _begin(self, files: Sequence[TraceFile]) -> None:
        self._read += files
        for file in files:
            self._parts[file.name] = []
            self._rejects[file.name] = 0

    def _count(self, task: Task, decoded: Decoded) -> None:
        limit = self._how.options.limits.max_rejects
        for item, parts in zip(task.items, decoded, strict=True):
            name = item.source_file
            # Rows after the last listed reject do not count.
            if self._rejects[name] >= limit:
                continue
            self._parts[name] += parts
            self._rejects[name] += sum(part.rejects for part in parts)
            if self._rejects[name] >= limit:
                reason = f"more than {limit} rejects: the rest of the file is not read (--max-rejects sets the limit)"
                self._how.progress.warn(f"{name}: {reason}")
                offset = item.offset if isinstance(item, Block) else item.source_offset
                self._stopped.append(Reject(name, offset, 0, reason))

    def _tasks_of(
        self, files: Sequence[TraceFile], on_read: Callable[[int], object], *, by_path: bool
    ) -> Iterator[Task]:
        """Yield tasks; small blocks share one, because each task has a fixed cost."""
        items: list[Block | Reject] = []
        size, encoding = 0, None
        most = self._how.options.limits.block_bytes
        for item in self._items(files, on_read, by_path=by_path):
            if isinstance(item, Block):
                if items and (size + item.size > most or encoding not in (None, item.encoding)):
                    yield self._task(items)
                    items, size, encoding = [], 0, None
                size, encoding = size + item.size, item.encoding
            items.append(item)
        if items:
            yield self._task(items)

    def _task(self, items: Sequence[Block | Reject]) -> Task:
        return Task(tuple(items), self._how.options.rows, self._how.place)

    def _items(
        self, files: Sequence[TraceFile], on_read: Callable[[int], object], *, by_path: bool
    ) -> Iterator[Block | Reject]:
        limits = self._how.options.limits
        for file in files:
            found = self._hashes[file.name]
            blocks = read_blocks(
                file,
                limits,
                on_read=on_read,
                content_hash=found if isinstance(found, ContentHash) else None,
                show_values=self._how.options.show_values,
                by_path=by_path,
            )
            for item in blocks:
                if self._rejects[file.name] >= limits.max_rejects:
                    break
                # A copy of a file in a bucket is named as the file.
                yield replace(item, source_file=file.name)


def _in_groups(files: Sequence[TraceFile], size_bytes: int) -> Iterator[list[TraceFile]]:
    """Yield files in groups of so many bytes at most; a larger file comes alone."""
    group: list[TraceFile] = []
    for file in files:
        if group and sum(each.size for each in group) + file.size > size_bytes:
            yield group
            group = []
        group.append(file)
    if group:
        yield group


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
