"""Decode the trace files of a run into staged parts; known files are skipped, remote ones are fetched first.

One rule: a file with the same name, size and hash as in the manifest is not decoded again; any other file is.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Literal

import msgspec

from tracefit._version import __version__
from tracefit.engines.local import Decoded, Task, decode_task, run_tasks
from tracefit.inputs.blocks import Block, ReadLimits, read_blocks
from tracefit.inputs.discovery import refuse_other_signal
from tracefit.inputs.files import ContentHash, content_hash_of
from tracefit.inputs.rejects import Reject
from tracefit.inputs.remote import fetch
from tracefit.tables.disk import inside, scratch_folder
from tracefit.tables.manifest import IngestedRun, Manifest, ReadFile, StagedPart
from tracefit.tables.staging import STAGE_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from tracefit.inputs.discovery import RunSource
    from tracefit.inputs.files import TraceFile
    from tracefit.progress import Progress
    from tracefit.tables.rows import RowOptions

FETCHED_BYTES = 1 << 30
"""Bytes of files of buckets that lie on disk together, unless one alone is larger."""

EXPANSION = 10
"""Decompressed bytes of a compressed one, about."""


@dataclass(frozen=True, slots=True)
class FilesRead:
    """The manifest entries of a run's files, in the order of their names, and whether they are unchanged."""

    files: tuple[ReadFile, ...]
    all_known: bool


@dataclass(frozen=True, slots=True)
class KnownFiles:
    """What a run's manifest entry knows of files, as far as it is of use with these options and this version."""

    files: dict[str, ReadFile]

    @classmethod
    def of(cls, run: IngestedRun | None, options: str, root: Path) -> KnownFiles:
        """Return the files of a run whose staged parts exist.

        Raises:
            UsageError: The folder of parts is a symbolic link.
        """
        if run is None or run.options != options:
            return cls({})
        there = {part.name for part in inside(root, STAGE_NAME).glob("*")}
        return cls(
            {
                file.path: file
                for file in run.files
                if file.tool_version == __version__ and all(part.name in there for part in file.parts)
            }
        )

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
class Reading:
    """How the files of a run are read; the same for all of them.

    Attributes:
        known: Files that need not be decoded again.
        options: Which part of a span is kept.
        limits: Bounds on reading one file.
        root: The tables folder; copies of files in buckets lie there for a while.
        workers: Most processes to use.
        bytes_per_worker: Bytes that are worth another process.
        progress: Receives the bytes read, and warnings about files that are not read to their end.
    """

    known: KnownFiles
    options: RowOptions
    limits: ReadLimits
    root: Path
    workers: int
    bytes_per_worker: int
    progress: Progress

    def read(self, files: Iterable[TraceFile]) -> FilesRead:
        """Decode all files into staged parts; return them in the order of their names.

        Raises:
            UsageError: A file cannot be read.
            DataError: A file holds other data than traces, or a worker died.
            OSError: A part or a copy cannot be written.
        """
        read: list[ReadFile] = []
        local: list[TraceFile] = []
        remote: list[TraceFile] = []
        for file in files:
            is_local = file.filesystem is None
            if known := self.known.unchanged(file) if is_local else self.known.unchanged_remote(file):
                read.append(known)
            else:
                (local if is_local else remote).append(file)
        # Known files are not read: they are no part of the work that the bar shows.
        if local or remote:
            self.progress.expect(sum(file.size for file in (*local, *remote)))
        read += self._decoded(local, self.progress.read)
        for group in _in_groups(remote):
            with scratch_folder(self.root) as scratch:
                copies = fetch(group, scratch, self.progress.read)
                for copy in copies:
                    refuse_other_signal(copy.file)
                times = {file.name: file.modified_ns for file in group}
                # The time of a file in a bucket changes with every upload, its content need not.
                same = [self.known.unchanged(copy.file, copy.content_hash) for copy in copies]
                new = [copy.file for copy, known in zip(copies, same, strict=True) if known is None]
                found = [known for known in same if known] + self._decoded(new, lambda _: None)
                read += [msgspec.structs.replace(file, modified_ns=times[file.path]) for file in found]
        ordered = tuple(sorted(read, key=lambda file: file.path))
        before = tuple(sorted(self.known.files.values(), key=lambda file: file.path))
        return FilesRead(ordered, all_known=ordered == before)

    def _decoded(self, files: Sequence[TraceFile], on_read: Callable[[int], object]) -> list[ReadFile]:
        if not files:
            return []
        with scratch_folder(self.root) as scratch:
            decoder = _FilesDecoder(files, self, scratch, on_read)
            parts = decoder.run()
        return [
            ReadFile(
                path=file.name,
                size_bytes=file.size,
                sha256=decoder.hashes[file.name].of(file),
                tool_version=__version__,
                parts=tuple(parts[file.name]),
            )
            for file in files
        ]


class _FilesDecoder:
    """Decodes files block by block, and stops with a file that has too many rejects."""

    def __init__(
        self, files: Sequence[TraceFile], reading: Reading, scratch: Path, on_read: Callable[[int], object]
    ) -> None:
        self.hashes = {file.name: ContentHash() for file in files}
        self._files = files
        self._reading = reading
        self._scratch = scratch
        self._on_read = on_read
        self._parts: dict[str, list[StagedPart]] = {file.name: [] for file in files}
        self._rejects = dict.fromkeys(self._parts, 0)
        self._stopped: list[Reject] = []

    def run(self) -> dict[str, list[StagedPart]]:
        """Return the staged parts of each file, by its name."""
        # Work is decompressed bytes: a small compressed file may be worth several processes.
        size = sum(file.size * (EXPANSION if _is_compressed(file) else 1) for file in self._files)
        workers = min(self._reading.workers, max(size // self._reading.bytes_per_worker, 1))
        for task, decoded in run_tasks(self._tasks(by_path=workers > 1), workers=workers):
            self._take(task, decoded)
        # After all blocks: results come in order, but later blocks of the file are on their way when it is stopped.
        for reject in self._stopped:
            self._parts[reject.source_file] += decode_task(self._task([reject]))[0]
        return self._parts

    def _take(self, task: Task, decoded: Decoded) -> None:
        limit = self._reading.limits.max_rejects
        for item, parts in zip(task.items, decoded, strict=True):
            name = item.source_file
            # Results come in the order of the file: rows after the last listed reject do not count.
            if self._rejects[name] >= limit:
                continue
            self._parts[name] += parts
            self._rejects[name] += sum(part.rejects for part in parts)
            if self._rejects[name] >= limit:
                reason = f"more than {limit} rejects: the rest of the file is not read (--max-rejects sets the limit)"
                self._reading.progress.warn(f"{name}: {reason}")
                offset = item.offset if isinstance(item, Block) else item.source_offset
                self._stopped.append(Reject(name, offset, 0, reason))

    def _tasks(self, *, by_path: bool) -> Iterator[Task]:
        """Yield tasks; small blocks share one, because each task has a fixed cost."""
        items: list[Block | Reject] = []
        size, encoding = 0, None
        most = self._reading.limits.block_bytes
        for item in self._items(by_path=by_path):
            if isinstance(item, Block):
                if items and (size + item.size > most or encoding not in (None, item.encoding)):
                    yield self._task(items)
                    items, size, encoding = [], 0, None
                size, encoding = size + item.size, item.encoding
            items.append(item)
        if items:
            yield self._task(items)

    def _task(self, items: Sequence[Block | Reject]) -> Task:
        stage = self._reading.root / STAGE_NAME
        return Task(tuple(items), self._reading.options, self._scratch, stage)

    def _items(self, *, by_path: bool) -> Iterator[Block | Reject]:
        show_values, limits = self._reading.options.show_values, self._reading.limits
        for file in self._files:
            blocks = read_blocks(
                file,
                limits,
                on_read=self._on_read,
                content_hash=self.hashes[file.name],
                show_values=show_values,
                by_path=by_path,
            )
            for item in blocks:
                if self._rejects[file.name] >= limits.max_rejects:
                    break
                # A copy of a file in a bucket is named as the file.
                yield replace(item, source_file=file.name)


def _in_groups(files: Sequence[TraceFile]) -> Iterator[list[TraceFile]]:
    """Yield files in groups of `FETCHED_BYTES` at most, which lie on disk together; a larger file comes alone."""
    group: list[TraceFile] = []
    for file in files:
        if group and sum(each.size for each in group) + file.size > FETCHED_BYTES:
            yield group
            group = []
        group.append(file)
    if group:
        yield group


def _is_compressed(file: TraceFile) -> bool:
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
    """Return whether a file begins with the content of a known one."""
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
