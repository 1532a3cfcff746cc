"""Bring the tables of many runs up to date at once: which files are read, which blocks are decoded next, and which runs
are built.

A file with the same name, size and hash as in the manifest is not decoded again; any other file is. The largest run is
read first, for its tables are built by one worker: the others have work until then. A run is built as soon as its last
block is decoded, while blocks of other runs are. Small runs share jobs. Only this process publishes.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from contextlib import suppress
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from tracefit._version import __version__
from tracefit.engines.build import RunTask, build_runs, rows_beside
from tracefit.engines.decode import Task, decode_task
from tracefit.engines.jobs import Job, take_together
from tracefit.errors import DataError
from tracefit.inputs.blocks import Block, read_blocks
from tracefit.inputs.discovery import refuse_other_signal
from tracefit.inputs.files import ContentHash, content_hash_of, fetch
from tracefit.inputs.rejects import Rejects, TooManyRejectsError
from tracefit.server.context import gpu_to_json
from tracefit.server.settings import settings_to_json
from tracefit.tables import schema
from tracefit.tables.rows import hash_of_kept
from tracefit.tables.staging import is_whole, staged_parts
from tracefit.tables.storage import Disk
from tracefit.tables.store import IngestedRun, Manifest, ReadFile, StagedPart, has_location, put_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import polars as pl

    from tracefit.engines.build import BuiltRun
    from tracefit.engines.decode import Decoded
    from tracefit.engines.jobs import TaskEngine
    from tracefit.inputs.discovery import RunSource
    from tracefit.inputs.files import TraceFile
    from tracefit.inputs.rejects import Reject
    from tracefit.options import IngestOptions
    from tracefit.progress import Progress
    from tracefit.server.context import RunContext
    from tracefit.tables.store import TableStore

EXPANSION = 10
"""Decompressed bytes of a compressed one, about."""

_PARALLEL_BUILD_FACTOR = 4
"""Several processes build a run from this multiple of the size from which decoding in another process is faster."""

_WORK_PER_BUILD = 2
"""About the times that decoding and building some bytes take as long as building them."""

_BUILD_BLOCKS = 3
"""Small runs are built together up to the size of this many blocks, because each job has a fixed cost; one more block
adds about 40 MiB to the peak."""

_SPAN_BYTES = 512
"""About the bytes in memory of a span and its events."""

_PUBLISHING_SHARE = 0.1
"""Largest share of the time that goes into writing the manifest, which grows with the runs: meanwhile, finished runs
wait."""


def usable_files(run: IngestedRun | None, options: str, there: Callable[[], set[str]]) -> dict[str, ReadFile]:
    """Return the files of a run's manifest entry, by name, whose staged parts these options and this version can use.

    The parts exist: `there` returns the names of all that do.
    """
    if run is None or run.options != options:
        return {}
    return {
        file.path: file
        for file in run.files
        if file.tool_version == __version__ and all(part.name in there() for part in file.parts)
    }


def unchanged(file: TraceFile, entry: ReadFile | None, sha256: str | None = None) -> ReadFile | None:
    """Return the manifest's entry of a file, with its present time of change, if its content is the same.

    It is the same with an equal size and time; with another time, a file on disk is hashed, one in a bucket only if
    `sha256` is its hash.

    Raises:
        UsageError: It cannot be read.
    """
    if entry is None or entry.size_bytes != file.size:
        return None
    if sha256 is None:
        if file.modified_ns is not None and entry.modified_ns == file.modified_ns:
            return entry
        if file.filesystem is not None:
            return None
    is_same = entry.sha256 == (sha256 or content_hash_of(file))
    return replace(entry, modified_ns=file.modified_ns) if is_same else None


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


def resolve_run_id(manifest: Manifest, source: RunSource, taken: Iterable[str] = ()) -> str:
    """Return the id of a run: its name, with a number if another run has that name.

    A stored run is the same run if it was read from the same folder or files, or has the files of the source.

    Args:
        manifest: The stored runs.
        source: The run.
        taken: Ids of other runs that are being read.
    """
    if (known := _stored_at_location_of(manifest, source)) is not None:
        return known
    hashes = cache(lambda: {content_hash_of(file) for file in source.trace_files})
    number, run_id = 1, source.run_id
    while True:
        run = manifest.runs.get(run_id)
        if run is None and run_id not in taken:
            return run_id
        if run is not None and (not run.tables or _has_files_of(run, source, hashes)):
            return run_id
        number += 1
        run_id = f"{source.run_id}-{number}"


def _stored_at_location_of(manifest: Manifest, source: RunSource) -> str | None:
    """Return the id of the stored run of the same folder or files; files named one by one may have become more."""
    if source.folder and (known := manifest.at_locations.get(source.folder)):
        return known
    locations = {file.location for file in source.trace_files if file.location}
    for known in dict.fromkeys(filter(None, map(manifest.at_locations.get, sorted(locations)))):
        stored = {entry.path for entry in manifest.runs[known].files}
        if stored == locations or (source.folder is None and stored < locations):
            return known
    return None


def _has_files_of(run: IngestedRun, source: RunSource, hashes: Callable[[], set[str]]) -> bool:
    """Return whether each file of a stored run is in the source, under its name or with its content, or was rotated
    away.

    Files were rotated away if they do not exist any more, and another one of the run is in the source with its content,
    or begins with it. `hashes` gives the hashes of the source's files, which takes long. Bytes of a pipe, and files
    that an earlier version stored under a relative name, are compared by content only.
    """
    files = {file.location: file for file in source.trace_files if file.location}
    missing = [entry for entry in run.files if entry.path not in files]
    gone = [entry for entry in missing if entry.sha256 not in hashes()]
    if any("://" in entry.path or (has_location(entry) and Path(entry.path).is_file()) for entry in gone):
        return False
    return not gone or any(
        entry.sha256 in hashes() or any(_begins_as(file, entry) for file in _same_named(source, entry))
        for entry in run.files
    )


def _same_named(source: RunSource, entry: ReadFile) -> list[TraceFile]:
    """Return the files of a source that may be a stored file which has grown."""
    if has_location(entry):
        return [file for file in source.trace_files if file.key == entry.path]
    name = entry.path.rpartition("/")[2]
    return [file for file in source.trace_files if not file.location or file.name.rpartition("/")[2] == name]


def _begins_as(file: TraceFile, entry: ReadFile) -> bool:
    digest, left = hashlib.sha256(), entry.size_bytes
    with file.open() as raw:
        while left and (piece := raw.read(min(left, 1 << 20))):
            digest.update(piece)
            left -= len(piece)
    return not left and digest.hexdigest() == entry.sha256


class FilePiece(msgspec.Struct, eq=False):
    """A block, or a reject between blocks: its place in its file, and its staged parts once it is decoded."""

    file: _FileIngest
    offset: int
    parts: tuple[StagedPart, ...] = ()


class _FileIngest(msgspec.Struct, eq=False):
    """A file being read: its hash or the object that computes it, the rejects in decoded pieces, and the pieces read so
    far.
    """

    file: TraceFile
    content: ContentHash | str
    rejects: Rejects
    pieces: list[FilePiece] = msgspec.field(default_factory=list)


class RunIngest(msgspec.Struct, eq=False):
    """A run on its way from files to tables.

    Attributes:
        source: Its files.
        context: Its server.
        run_id: Its id in the tables.
        before: Its entry in the manifest, if its tables are whole.
        files: The files that are read.
        unchanged: Entries of the other files in the manifest.
        decoding: Pieces of its files that are on their way through a worker.
        is_read: Whether all pieces were given out.
        kv_hashes: Hashes of its recordings of KV-cache events, once they are needed.
        columns: Values of the `runs` table for the whole run, once it is read.
        entry: Its new entry in the manifest, without tables, once it is built.
        rows: Its rows of the `runs` table, once it is published; null for a run that stays as it is.
        warnings: Warnings for the user.
        failed: Why there are no tables of it.
    """

    source: RunSource
    context: RunContext
    run_id: str = ""
    before: IngestedRun | None = None
    files: list[_FileIngest] = msgspec.field(default_factory=list)
    unchanged: list[ReadFile] = msgspec.field(default_factory=list)
    decoding: int = 0
    is_read: bool = False
    kv_hashes: list[str] | None = None
    columns: dict[str, str | int | None] = msgspec.field(default_factory=dict)
    entry: IngestedRun | None = None
    rows: pl.DataFrame | None = None
    warnings: list[str] = msgspec.field(default_factory=list)
    failed: DataError | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of its trace files, as they are stored."""
        return sum(file.size for file in self.source.trace_files)


class IngestScheduler:
    """Reads, builds and publishes the runs of one ingest. The caller holds the folder's lock."""

    def __init__(
        self,
        runs: Sequence[RunIngest],
        store: TableStore,
        scratch: Path,
        engine: TaskEngine,
        options: IngestOptions,
        progress: Progress,
    ) -> None:
        self._runs = runs
        self._store = store
        self._scratch = scratch.absolute()
        self._engine = engine
        self._progress = progress
        self._options = options
        self._options_hash = hash_of_kept(options)
        self._staged_names = cache(lambda: staged_parts(store.storage))
        self._is_whole_part = cache(partial(is_whole, store.storage))
        # Workers may have another working folder.
        self._storage = Disk(store.storage.root.absolute()) if isinstance(store.storage, Disk) else store.storage
        engine.check(self._scratch if isinstance(self._storage, Disk) else None)
        self._manifest = store.manifest()
        new = [file for run in runs for file in self._new_files(run)]
        engine.limit(max(sum(map(work_bytes, new)) // options.bytes_per_worker, 1))
        self._by_path = not (engine.is_here or engine.carries_bytes)
        self._unread = deque(sorted(runs, key=lambda run: -run.size_bytes))
        self._ready: deque[RunIngest] = deque()
        self._postponed: deque[RunIngest] = deque()
        self._undecoded_bytes = sum(run.size_bytes for run in runs)
        self._running = 0
        self._built: dict[str, tuple[RunIngest, BuiltRun]] = {}
        self._restamped: dict[str, IngestedRun] = {}
        self._ended = 0
        self._publish_from = 0.0
        progress.stage(f"reading {runs[0].source.run_id if len(runs) == 1 else f'{len(runs):,} runs'}")
        self._show()
        # The bar shows the work, so it leaves out files that are not read.
        if new:
            progress.expect(sum(file.size for file in new))

    def ingest_all(self) -> None:
        """Read, build and publish all runs; one that fails has its error.

        Raises:
            WorkerError: A worker died.
            UsageError: A file cannot be read.
            OSError: Something cannot be written.
        """
        # Which run is meant by a name that comes twice shows only when the first one is published.
        first = {run.source.run_id: run for run in reversed(self._runs)}
        repeated = [run for run in self._runs if first[run.source.run_id] is not run]
        self._unread = deque(run for run in self._unread if first[run.source.run_id] is run)
        self._run_jobs()
        for run in repeated:
            self._unread.append(run)
            self._run_jobs()

    def _run_jobs(self) -> None:
        self._decoding = self._decode_jobs()
        for job, result in self._engine.run(self._next_job):
            self._running -= 1
            # `work` is the method that takes the job's result: decoded blocks, or the tables of runs.
            job.work(result)
            # The names would keep the job's blocks in memory while the next blocks are read.
            del job, result
            if time.monotonic() >= self._publish_from:
                self._publish()
        self._publish()

    def _take_decoded(self, pieces: Sequence[tuple[RunIngest, FilePiece]], result: Decoded) -> None:
        for (run, piece), parts in zip(pieces, result, strict=True):
            piece.parts = parts
            with suppress(TooManyRejectsError):  # asked before the next piece is read
                piece.file.rejects.count(sum(part.rejects for part in parts))
            run.decoding -= 1
            self._build_when_read(run)

    def _take_built(self, runs: Sequence[RunIngest], result: Sequence[BuiltRun | DataError]) -> None:
        for run, built in zip(runs, result, strict=True):
            if isinstance(built, DataError):
                self._end(run, built)
            else:
                self._built[run.run_id] = (run, built)

    # -- the next job ----------------------------------------------------------------------------------------

    def _next_job(self) -> Job | None:
        # A run whose blocks are read is built before others are read: the largest one keeps a worker busy for longest.
        # Small ones wait for each other, because each build has a fixed cost.
        is_enough = sum(map(_build_bytes, self._ready)) >= _BUILD_BLOCKS * self._options.block_bytes
        job = None if is_enough else next(self._decoding, None)
        if job is None and self._ready:
            job = self._build_job()
        if job is None and self._postponed and not self._running:
            job = self._build_job_of([self._postponed.popleft()], is_shared=True)
        self._running += job is not None
        return job

    def _decode_jobs(self) -> Iterator[Job]:
        """Yield jobs of decoding; small blocks share one, also those of several runs, because each job has a fixed
        cost.
        """
        waiting: list[tuple[RunIngest, FilePiece, Block | Reject]] = []
        size = 0
        for run, piece, item in self._pieces():
            own = item.size if isinstance(item, Block) else 0
            # Submit the job before a block that would make it larger than `block_bytes`.
            if waiting and size + own > self._options.block_bytes:
                yield self._decode_job(waiting)
                waiting, size = [], 0
            waiting.append((run, piece, item))
            size += own
        if waiting:
            yield self._decode_job(waiting)

    def _decode_job(self, blocks: Sequence[tuple[RunIngest, FilePiece, Block | Reject]]) -> Job:
        task = Task(tuple(item for _, _, item in blocks), self._options, self._storage)
        pieces = [(run, piece) for run, piece, _ in blocks]
        return Job(decode_task, task, blocks[0][2].source_file, partial(self._take_decoded, pieces))

    def _pieces(self) -> Iterator[tuple[RunIngest, FilePiece, Block | Reject]]:
        """Yield the pieces to decode, run by run."""
        while self._unread:
            run = self._unread.popleft()
            try:
                yield from self._pieces_of(run)
                run.is_read = True
            except DataError as error:
                self._end(run, error)
            self._build_when_read(run)

    def _build_job(self) -> Job:
        """Return a job for some of the waiting runs: as many as fit one job, or at the end few enough that every worker
        gets some.
        """
        most_bytes = _BUILD_BLOCKS * self._options.block_bytes
        workers = self._engine.workers
        share = len(self._ready)
        if self._undecoded_bytes < workers * most_bytes:
            share = -(-share // workers)
        return self._build_job_of(take_together(self._ready, _build_bytes, most=share, most_bytes=most_bytes))

    def _build_job_of(self, runs: Sequence[RunIngest], *, is_shared: bool = False) -> Job:
        if len(self._runs) == 1:
            self._progress.stage(f"writing {runs[0].run_id}")
        tasks = tuple(self._run_task(run) for run in runs)
        return Job(build_runs, tasks, runs[0].source.name, partial(self._take_built, runs), is_shared=is_shared)

    def _is_for_all_workers(self, run: RunIngest) -> bool:
        """Return whether all workers build a run together, at the end, because one of them would end after the
        others.
        """
        others = self._engine.workers - 1
        is_longest = others * run.size_bytes > _WORK_PER_BUILD * self._undecoded_bytes
        worth = max(_PARALLEL_BUILD_FACTOR * self._options.bytes_per_worker, _BUILD_BLOCKS * self._options.block_bytes)
        # Parts of the build run in other processes, which must see the same folder.
        return run.size_bytes >= worth and is_longest and self._storage.has_lock

    # -- one run -------------------------------------------------------------------------------------------

    def _new_files(self, run: RunIngest) -> list[TraceFile]:
        """Return the files that probably have to be read, judged only by name and size: no file is opened."""
        usable = usable_files(self._manifest.runs.get(run.source.run_id), self._options_hash, self._staged_names)
        sizes = {name: file.size_bytes for name, file in usable.items()}
        return [file for file in run.source.trace_files if sizes.get(file.key) != file.size]

    def _pieces_of(self, run: RunIngest) -> Iterator[tuple[RunIngest, FilePiece, Block | Reject]]:
        """Begin a run, and yield the pieces of its files that are new or changed; those of a bucket are fetched
        first.
        """
        source = run.source
        taken = {other.run_id for other in self._runs if other.failed is None}
        run.run_id = run_id = resolve_run_id(self._manifest, source, taken)
        run.before = self._manifest.runs.get(run_id)
        if run.before is not None and run.before.tables:
            run.before = self._store.whole(run_id, run.before)
            if run.before is None:
                run.warnings.append(f"{run_id}: its tables are damaged, or files of them missing; it is read again")
        if run_id != source.run_id:
            is_other = source.run_id in self._manifest.runs or source.run_id in taken
            why = (
                "another run of that name is in the tables already; this one is"
                if is_other
                else "is in the tables already, as"
            )
            run.warnings.append(f"{source.run_id}: {why} {run_id}")
        usable = usable_files(run.before, self._options_hash, self._staged_names)
        run.unchanged = [e for f in source.trace_files if (e := unchanged(f, usable.get(f.key)))]
        # The staged parts of a run that stays as it is are not read.
        if len(run.unchanged) < len(source.trace_files) or not self._stays(run, run.unchanged):
            damaged = {entry.path for entry in run.unchanged if not self._is_whole(entry)}
            usable = {name: entry for name, entry in usable.items() if name not in damaged}
            run.unchanged = [entry for entry in run.unchanged if entry.path not in damaged]
            if damaged:
                run.warnings.append(
                    f"{run_id}: the staged rows of {len(damaged)} of its files are damaged; the files are read again"
                )
        names = {entry.path for entry in run.unchanged}
        changed = [f for f in source.trace_files if f.key not in names]
        local = [f for f in changed if f.filesystem is None]
        remote = deque(f for f in changed if f.filesystem is not None)
        for file in local:
            yield from self._pieces_in(run, self._file(file, ContentHash()), file)
        most_bytes = self._options.fetched_bytes
        while group := take_together(remote, lambda file: file.size, most=len(remote), most_bytes=most_bytes):
            # The copies are gone when the last block is read, not when it is decoded: blocks carry their bytes.
            with self._storage.scratch() as scratch:
                for file, copy in zip(group, fetch(group, scratch, self._progress.read), strict=True):
                    refuse_other_signal(copy.file)
                    # The time of a file in a bucket changes with every upload, its content need not.
                    entry = unchanged(file, usable.get(file.key), copy.content_hash)
                    if entry and self._is_whole(entry):
                        run.unchanged.append(entry)
                    else:
                        yield from self._pieces_in(run, self._file(file, copy.content_hash), copy.file)

    def _file(self, file: TraceFile, content: ContentHash | str) -> _FileIngest:
        return _FileIngest(file, content, Rejects(self._options, file.name))

    def _is_whole(self, entry: ReadFile) -> bool:
        return all(self._is_whole_part(part.name) for part in entry.parts)

    def _pieces_in(
        self, run: RunIngest, work: _FileIngest, copy: TraceFile
    ) -> Iterator[tuple[RunIngest, FilePiece, Block | Reject]]:
        """Read a file, from its copy if it is in a bucket: the bytes of that were hashed and reported when it was
        made.
        """
        run.files.append(work)
        content = None if isinstance(work.content, str) else work.content
        for item in read_blocks(
            copy,
            self._options,
            on_read=self._progress.read if content else None,
            content_hash=content,
            by_path=self._by_path and content is not None,
        ):
            if work.rejects.is_full:
                break
            piece = FilePiece(work, item.offset if isinstance(item, Block) else item.source_offset)
            work.pieces.append(piece)
            run.decoding += 1
            yield run, piece, item

    def _entry_of(self, work: _FileIngest) -> ReadFile:
        """Return the manifest entry of a file that was read; it does not depend on the order of decoding."""
        file, rejects = work.file, Rejects(self._options, work.file.name)
        parts: list[StagedPart] = []
        for piece in work.pieces:
            parts += piece.parts
            try:
                rejects.count(sum(part.rejects for part in piece.parts))
            except TooManyRejectsError as error:
                # In the order of the file, whichever block was decoded first: rows after the last listed reject do not
                # count.
                self._progress.warn(f"{file.name}: {error.what}")
                last = rejects.rest(piece.offset)
                parts += decode_task(Task((last,), self._options, self._storage))[0]
                break
        return ReadFile(
            path=file.key,
            size_bytes=file.size,
            sha256=work.content if isinstance(work.content, str) else work.content.of(file),
            tool_version=__version__,
            parts=tuple(parts),
            modified_ns=file.modified_ns,
        )

    def _build_when_read(self, run: RunIngest) -> None:
        """Schedule the build of a run once all its files are decoded; skip it if nothing changed."""
        if run.failed is not None or not run.is_read or run.decoding:
            return
        stays = self._stays(run, [*run.unchanged, *map(self._entry_of, run.files)])
        run.files.clear()
        self._undecoded_bytes -= run.size_bytes
        if stays:
            self._stay(run)
        else:
            (self._postponed if self._is_for_all_workers(run) else self._ready).append(run)

    def _stay(self, run: RunIngest) -> None:
        """End a run that stays as it is; with the present times of its files in its entry, they need not be read next
        time.
        """
        if run.before is not None and run.entry is not None:
            entry = replace(run.before, files=run.entry.files)
            if entry != self._manifest.runs[run.run_id]:
                self._restamped[run.run_id] = entry
        self._end(run)

    def _stays(self, run: RunIngest, read: Sequence[ReadFile]) -> bool:
        """Return whether the run's tables still match its files and configuration; set its new manifest entry."""
        files = tuple(sorted(read, key=lambda file: file.path))
        run.columns = _run_columns(files, run.context)
        if run.kv_hashes is None:
            run.kv_hashes = sorted(map(content_hash_of, run.source.kv_files))
        # The hash of all inputs of the tables. If it changes, they are rebuilt; unchanged files come from their staged
        # parts.
        facts = (__version__, self._options_hash, sorted(run.columns.items()), run.kv_hashes)
        built_from = hashlib.sha256(repr(facts).encode()).hexdigest()
        run.entry = IngestedRun(
            source=run.source.folder, options=self._options_hash, built_from=built_from, files=files
        )
        before = run.before
        return (
            before is not None
            and before.built_from == built_from
            and _undated(before.files) == _undated(files)
            and "kv_events" in before.tables
        )

    def _run_task(self, run: RunIngest) -> RunTask:
        assert run.entry is not None  # noqa: S101 - a run that is ready has one
        files = run.source.kv_files
        is_carried = self._engine.carries_bytes or any(file.filesystem for file in files)
        kv = rows_beside(files, self._options) if files and is_carried else files
        return RunTask(
            run_id=run.run_id,
            name=run.source.name,
            files=run.entry.files,
            storage=self._storage,
            scratch=self._scratch if self._storage.has_lock else None,
            columns=run.columns,
            limits=_limits(run.context),
            context=run.context,
            kv=kv,
            options=self._options,
        )

    def _publish(self) -> None:
        """Make the runs that are built valid, all with one new manifest, in which others get the present times of their
        files.
        """
        if not (self._built or self._restamped):
            return
        began = time.monotonic()
        entries = dict(self._restamped)
        for run_id, (run, built) in self._built.items():
            tables = built.tables or put_parts(self._storage, run_id, built.parts)
            entries[run_id] = replace(run.entry or IngestedRun(), tables=tables)
        before = self._manifest.runs
        after = self._store.commit({i: (before.get(i), entry) for i, entry in entries.items()})
        self._manifest = self._manifest.with_runs(after)
        for run, built in self._built.values():
            run.rows = built.runs
            self._end(run)
        self._built.clear()
        self._restamped.clear()
        now = time.monotonic()
        self._publish_from = now + (now - began) / _PUBLISHING_SHARE

    def _end(self, run: RunIngest, failed: DataError | None = None) -> None:
        run.failed = failed
        self._ended += 1
        self._show()

    def _show(self) -> None:
        if len(self._runs) > 1:
            workers = f"{self._engine.workers} worker{'s' if self._engine.workers > 1 else ''}"
            self._progress.note(f"{self._ended:,} of {len(self._runs):,} runs, {workers}")


def _build_bytes(run: RunIngest) -> int:
    """Return about how many bytes of memory the rows of a run take: a compressed file has more than it is long."""
    files = run.entry.files if run.entry else ()
    spans = sum(part.spans + part.steps for file in files for part in file.parts)
    return max(run.size_bytes, _SPAN_BYTES * spans)


def _undated(files: Sequence[ReadFile]) -> list[ReadFile]:
    return [replace(file, modified_ns=None) for file in files]


def _run_columns(files: Sequence[ReadFile], context: RunContext) -> dict[str, str | int | None]:
    return {
        **_server_columns(context),
        "files": len(files),
        "bytes": sum(file.size_bytes for file in files),
        # Of hashes, so that the names of files and their order do not matter.
        "content_sha256": hashlib.sha256("".join(sorted(f.sha256 for f in files)).encode()).hexdigest(),
    }


@lru_cache(maxsize=64)  # the runs of a fleet share a context
def _server_columns(context: RunContext) -> dict[str, str | None]:
    return {
        "model": context.settings.model,
        "model_config": context.model_config,
        "settings": settings_to_json(context.settings),
        "gpu": gpu_to_json(context.gpu),
    }


@lru_cache(maxsize=64)
def _limits(context: RunContext) -> dict[str, float]:
    """Return the settings that bound values of the tables; vLLM's defaults, which are assumed, bound nothing."""
    settings = context.settings
    names = {c.limit for table in schema.TABLES.values() for c in table.columns if c.limit}
    values = {name: getattr(settings, name) for name in names if settings.sources.get(name) != "assumed"}
    return {name: float(value) for name, value in sorted(values.items()) if value is not None}
