"""Tables on disk: `TABLES/<table>/run_id=<run>/part-<content hash>.parquet`, and the manifest of valid ones.

`TABLES/manifest.json` also says which trace files were read. It is replaced last, in one rename or one
conditional write: a reader that follows it sees each run either as before or as after an ingest, never in
between. A file that it does not name is a leftover.
"""

from __future__ import annotations

import base64
import hashlib
import io
import random
import re
import tempfile
import time
from collections.abc import Mapping
from contextlib import contextmanager
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal, Protocol, Self

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Meta

from tracefit._version import __version__
from tracefit.errors import DataError, UsageError, did_you_mean
from tracefit.inputs.buckets import location_of, map_concurrently
from tracefit.inputs.files import display_name
from tracefit.options import IngestOutOption, flag_of
from tracefit.tables import schema
from tracefit.tables.disk import Syncs, create, disk_errors, warn_of_wait
from tracefit.tables.qualified import plain
from tracefit.tables.staging import STAGE_NAME
from tracefit.tables.storage import Bucket, Disk, Storage, digest_of, open_storage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tracefit.inputs.buckets import Version
    from tracefit.progress import Progress

MANIFEST_NAME = "manifest.json"

RunId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]+$")]
"""The name of a run's folder in a table; never a path."""

Count = Annotated[int, Meta(ge=0)]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the manifest's structs. Not pydantic: loading it takes as long as ingesting a small run."""


class StagedPart(_Strict, frozen=True):
    """Decoded rows of a trace file."""

    name: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}$", description="folder below .stage")]
    file: Annotated[Count, Meta(description="number that the file's rows have in the part: small files share one")]
    spans: Annotated[Count, Meta(description="spans of the vLLM scopes in it")]
    other_spans: Annotated[Count, Meta(description="spans of other scopes, counted and left out")]
    rejects: Annotated[Count, Meta(description="records in it that could not be read")]
    steps: Annotated[Count, Meta(description="steps of recordings beside spans")] = 0


class ReadFile(_Strict, frozen=True):
    """A trace file that was read; while name, size and hash are the same, it is not decoded again."""

    path: Annotated[str, Meta(description="its absolute path without links, or its URL; relative for a pipe")]
    size_bytes: Annotated[Count, Meta(description="its size as stored")]
    sha256: Annotated[str, Meta(description="SHA-256 of its bytes as stored")]
    tool_version: Annotated[str, Meta(description="version of tracefit that decoded it")]
    parts: tuple[StagedPart, ...]
    modified_ns: Annotated[
        int | None,
        Meta(
            description="Unix time of its last change (ctime), if that was long enough ago that a later change has "
            "another: with the size, it identifies the content"
        ),
    ] = None


_MANY_PARTS = 16
_SMALL_PART_BYTES = 256 << 10
"""At least this many parts of runs, of at most this size each, are read together; a long table is read column by
column."""


class TableFile(_Strict, frozen=True):
    """A Parquet file of one run and table."""

    name: Annotated[str, Meta(pattern=r"^part-[0-9a-f]{16}\.parquet$")]


class IngestedRun(_Strict, frozen=True):
    """One ingested run: its files and its tables."""

    source: Annotated[str | None, Meta(description="the folder it was read from; null for files named one by one")] = (
        None
    )
    options: Annotated[str | None, Meta(description="hash of the options that say what of a span is kept")] = None
    files: tuple[ReadFile, ...] = ()
    built_from: Annotated[
        str | None,
        Meta(description="hash of what its tables were built from, files and configuration; null before there are any"),
    ] = None
    tables: dict[str, TableFile] = {}
    stamp: Annotated[
        str | None,
        Meta(
            description="hash of size and time of change (ctime) of its tables' files on disk: while it is the same, "
            "they are not read to see whether they are whole"
        ),
    ] = None


def has_location(file: ReadFile) -> bool:
    """Return whether the name of a file says which file it is: a relative name, and that of a pipe, do not."""
    return "://" in file.path or file.path.startswith("/")


class Manifest(_Strict, frozen=True, dict=True):
    """The manifest of a tables folder."""

    manifest_version: Literal["1"] = "1"
    tool_version: str = __version__
    runs: dict[RunId, IngestedRun] = {}

    def with_runs(self, runs: Mapping[str, IngestedRun]) -> Manifest:
        """Return a manifest with these runs added or replaced."""
        return Manifest(runs={**self.runs, **runs})

    @cached_property
    def at_locations(self) -> dict[str, str]:
        """The runs that have tables, by their folders and by each of their files."""
        stored = [(run_id, run) for run_id, run in self.runs.items() if run.tables]
        files = {file.path: run_id for run_id, run in stored for file in run.files}
        return files | {run.source: run_id for run_id, run in stored if run.source}

    def staged(self) -> set[str]:
        """Return the names of all staged parts that are valid."""
        return {part.name for run in self.runs.values() for file in run.files for part in file.parts}


def read_manifest(storage: Storage) -> tuple[Manifest, Version | None]:
    """Read a manifest and its version, for `replace_manifest`; a missing one is empty.

    Raises:
        DataError: The manifest is damaged or of another version.
        UsageError: It is a symbolic link, or the bucket cannot be read.
    """
    try:
        text, version = storage.read_versioned(MANIFEST_NAME)
    except FileNotFoundError:
        return Manifest(), None
    try:
        return msgspec.json.decode(text, type=Manifest), version
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(
            "is not a manifest of this version of tracefit",
            where=str(storage.root / MANIFEST_NAME),
            hint="ingest the traces into a new folder",
        ) from error


def replace_manifest(storage: Storage, manifest: Manifest, version: Version | None) -> bool:
    """Replace a manifest in one step if it is still the one that was read; return whether it was replaced."""
    # Indented: people read it to see which files a table was made of.
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    return storage.replace_if(MANIFEST_NAME, text + b"\n", version)


ROW_GROUP_ROWS = 128 * 1024
ROW_GROUP_BYTES = 16 << 20
"""Bytes of a row group: wide rows, such as spans, reach it before `ROW_GROUP_ROWS`."""

_SMALL_PART_ROWS = 1024
"""Rows up to which a table has no dictionaries, and its bytes are not counted: with many columns both take longer than
they save."""

PIECE_ROWS = 16 * 1024
"""Rows converted at a time, so that the copies stay small."""

_HASH_DIGITS = 16
_INGEST_AGAIN = "ingest the run again"
_REMOVE_AND_INGEST = f"remove it and {_INGEST_AGAIN}"

_ATTEMPTS = 20
_UNANSWERED = 5
_LOCK_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
"""Attempts to replace a manifest that other processes replace too, and the longest pauses between them."""

_REMOVABLE = re.compile(rf"{re.escape(STAGE_NAME)}/|[^/]+/run_id=[^/]+/part-[0-9a-f]{{{_HASH_DIGITS}}}\.parquet$")
"""Names of staged parts and of parts of tables; no other file is ever removed."""

_TOP_NAMES = {MANIFEST_NAME, STAGE_NAME, *schema.TABLES}


class TableStore:
    """A folder of tables, on disk or in a bucket. Everything in the manifest is complete; a run changes in one step.

    Attributes:
        storage: The storage of the tables.
        root: Its name.
    """

    def __init__(self, root: str | Path) -> None:
        """Name a folder of tables, which need not exist.

        Raises:
            UsageError: The name is empty, or not valid UTF-8, which the libraries that write Parquet cannot
                open, or a URL that does not name a bucket.
        """
        if not str(root):
            raise UsageError("the name of a tables folder is empty", hint="name a folder, or . for this one")
        try:
            str(root).encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                "is not a name in UTF-8", where=display_name(str(root)), hint="choose another folder"
            ) from error
        self.storage = open_storage(root)
        self.root: Path = self.storage.root
        self._checked: set[str] = set()
        self._pinned: Manifest | None = None
        self._known: tuple[tuple[int, ...] | None, Manifest] = None, Manifest()

    def write_runs(self, runs: Iterable[tuple[str, Mapping[str, pl.DataFrame]]], read: Manifest | None = None) -> None:
        """Replace the rows of runs in some tables, in one step.

        Everything is written to a temporary folder first; nothing of a run is touched before that succeeded.

        Args:
            runs: Each run, by its cleaned id, with table name to its conformed frame.
            read: The manifest that the runs were read by; the current one if not given.

        Raises:
            UsageError: The folder cannot be written, or another process has changed a run meanwhile.
        """
        with disk_errors(self.root), self.lock(), self.storage.scratch() as scratch:
            runs_before = (read or self.manifest()).runs
            changes = {}
            for run_id, frames in runs:
                with Syncs() as syncs, RunWriter(Path(tempfile.mkdtemp(dir=scratch)), syncs) as writer:
                    writer.write_all(frames)
                    parts = writer.close()
                # Other tables of the run stay as they are.
                before = runs_before.get(run_id)
                after = before or IngestedRun()
                tables = {**after.tables, **put_parts(self.storage, run_id, parts)}
                changes[run_id] = before, msgspec.structs.replace(after, tables=tables)
            if changes:
                self.commit(changes)

    @contextmanager
    def lock(self, progress: Progress | None = None) -> Iterator[None]:
        """Lock the folder for writing; if it is locked, warn of that and wait. A bucket has no lock."""
        before = self.storage
        with before.lock(partial(warn_of_wait, self.root, progress), _TOP_NAMES) as held:
            self.storage = held
            try:
                yield
            finally:
                self.storage = before

    def whole(self, run_id: str, run: IngestedRun) -> IngestedRun | None:
        """Return a run's entry, with its present stamp, if its tables exist and are unchanged; null if not.

        On disk, files that changed since the manifest was written are compared with their hashes; a bucket checks its
        own objects.
        """
        names = [part_name(name, run_id, part) for name, part in run.tables.items()]
        if isinstance(self.storage, Bucket):
            return run if self.storage.has(names) else None
        stamp, latest = self.storage.stamp(names) or (None, 0)
        # A change right after the files were written may have their time; the manifest was written after both.
        written = (self.storage.signature(MANIFEST_NAME) or (0,))[-1]
        if stamp is not None and stamp == run.stamp and latest < written:
            self._checked.update(names)
            return run
        try:
            for name in names:
                with self.storage.fetched(name) as path:
                    self._check(name, path)
        except (OSError, DataError):
            return None
        return msgspec.structs.replace(run, stamp=stamp)

    def _check(self, name: str, path: Path) -> None:
        """Compare a part with the hash in its name, once: Parquet does not notice changed values in a page."""
        if name in self._checked:
            return
        if path.name != _content_name(path):
            raise DataError("is not what was written", where=str(self.root / name), hint=_REMOVE_AND_INGEST)
        if self.storage.has_lock:  # each copy of an object is checked
            self._checked.add(name)

    def commit(self, changes: Mapping[str, tuple[IngestedRun | None, IngestedRun]]) -> dict[str, IngestedRun]:
        """Make new entries of runs valid, all in one step. The caller has the lock and has stored the parts.

        Args:
            changes: Run id to its entry as it was read, null if it had none, and its new entry.

        Returns:
            The new entries, with the stamps of their parts.

        Raises:
            UsageError: Another process has changed one of the runs meanwhile, or the storage cannot be written.
        """
        after = {run_id: self._stamped(run_id, entry) for run_id, (_, entry) in changes.items()}
        replaced = _parts_of({run_id: entry for run_id, (entry, _) in changes.items() if entry})
        try:
            self._commit(changes, after)
        except UsageError:
            # Readers of a table folder that ignore the manifest would read these too. The other process may have
            # removed the parts that were there before.
            self.storage.remove(_parts_of(after) - replaced - _parts_of(self.manifest().runs))
            raise
        if self.storage.has_lock:
            self._remove_unnamed(f"{name}/run_id={run_id}" for run_id in after for name in schema.TABLES)
        else:
            # Other unnamed files may be about to be published by another writer.
            self.storage.remove(replaced - _parts_of(after))
        return after

    def _stamped(self, run_id: str, entry: IngestedRun) -> IngestedRun:
        stamp = self.storage.stamp(part_name(name, run_id, part) for name, part in entry.tables.items())
        return msgspec.structs.replace(entry, stamp=stamp[0] if stamp else None)

    def _commit(
        self,
        changes: Mapping[str, tuple[IngestedRun | None, IngestedRun]],
        after: Mapping[str, IngestedRun],
    ) -> None:
        for attempt in range(_ATTEMPTS):
            manifest, version = read_manifest(self.storage)
            if all(manifest.runs.get(run_id) == entry for run_id, entry in after.items()):
                break  # an earlier attempt succeeded without an answer
            for run_id, (before, _) in changes.items():
                if manifest.runs.get(run_id) != before:
                    raise UsageError(
                        f"run {run_id} was changed by another process meanwhile",
                        where=str(self.root),
                        hint="the result of that process is kept; run the command again",
                    )
            try:
                if replace_manifest(self.storage, manifest.with_runs(after), version):
                    break
            except UsageError:  # the manifest may have been replaced all the same: read it to see
                if attempt >= _UNANSWERED:
                    raise
            time.sleep(random.uniform(0, min(2**attempt * _LOCK_PAUSE_S, _LONGEST_PAUSE_S)))  # noqa: S311 - spreads writers
        else:
            raise UsageError(
                f"cannot be replaced, in {_ATTEMPTS} attempts",
                where=str(self.root / MANIFEST_NAME),
                hint="the bucket must support conditional writes (If-Match), and writers must leave each other time",
            )

    @contextmanager
    def removing_leftovers(self) -> Iterator[None]:
        """On exit, delete files that no manifest references.

        After an error do so only on local disk: a bucket may be unreachable.
        """
        try:
            yield
        except BaseException:
            if self.storage.has_lock:
                self._remove_unnamed([STAGE_NAME])
            raise
        # In a bucket, parts of tables too: a writer that died has left them under their final names.
        self._remove_unnamed([STAGE_NAME if self.storage.has_lock else ""])

    def _remove_unnamed(self, folders: Iterable[str]) -> None:
        leftovers = [name for folder in folders for name in self.storage.leftovers(folder) if _REMOVABLE.match(name)]
        # Read after the listing: an old file that is not named by now never will be.
        manifest = self.manifest()
        parts, staged = _parts_of(manifest.runs), manifest.staged()
        self.storage.remove(name for name in leftovers if name not in parts and name.split("/")[1] not in staged)

    def manifest(self) -> Manifest:
        """Return the current manifest, which is read again only if it was replaced."""
        if self._pinned:
            return self._pinned
        signature = self.storage.signature(MANIFEST_NAME)
        if signature is None or signature != self._known[0]:
            self._known = signature, read_manifest(self.storage)[0]
        return self._known[1]

    def pinned(self, run_ids: Iterable[str]) -> TableStore:
        """Return a read-only view of some runs as they are now; workers need not read the manifest of all."""
        store = TableStore(self.root.absolute() if isinstance(self.storage, Disk) else self.root)
        runs = self.manifest().runs
        store._pinned = Manifest(runs={run_id: runs[run_id] for run_id in run_ids if run_id in runs})
        return store

    def runs(self) -> list[str]:
        """Return the ids of the ingested runs, sorted."""
        return sorted(run_id for run_id, run in self.manifest().runs.items() if "runs" in run.tables)

    def read(self, name: str, run_ids: list[str] | None = None, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """Read a table: of all runs or some, with all columns or some.

        Raises:
            DataError: A part is missing, has changed since it was written, or is not a readable Parquet file.
        """
        try:
            frames = self._read_parts(name, run_ids, columns)
        except FileNotFoundError:
            # The run was replaced after its manifest was read: the new manifest names the new files.
            try:
                frames = self._read_parts(name, run_ids, columns)
            except FileNotFoundError as error:
                raise DataError("is missing", where=str(error.filename), hint=_INGEST_AGAIN) from error
        if not frames:
            empty = schema.TABLES[name].empty()
            return empty if columns is None else empty.select(c for c in empty.columns if c in columns)
        table = pl.concat(frames, how="diagonal_relaxed")
        # Columns are added within a version of the tables: older files lack them.
        wanted = [c for c in schema.TABLES[name].columns if columns is None or c.name in columns]
        lacking = [c for c in wanted if c.name not in table.columns]
        return table.with_columns(pl.lit(None, c.polars).alias(c.name) for c in lacking)

    def scan(self, name: str, run_ids: list[str] | None = None) -> pl.LazyFrame:
        """Return a table as a lazy frame, of all runs or some; queries read only what they need, unchecked."""
        # Newer releases of polars read the key-value lists of Parquet as a type of their own.
        lists = [pl.col(c.name).cast(c.polars) for c in schema.TABLES[name].columns if c.kind == "map"]
        frames = [
            pl.scan_parquet(self.storage.scannable(part), hive_partitioning=False).with_columns(lists)
            for part in self._parts(name, run_ids)
        ]
        empty = schema.TABLES[name].empty().lazy()
        return pl.concat([empty, *frames], how="diagonal_relaxed").cast({pl.Categorical: pl.String})

    def _read_parts(self, name: str, run_ids: list[str] | None, columns: Sequence[str] | None) -> list[pl.DataFrame]:
        def read(part: str) -> pl.DataFrame:
            with self._checked_part(part) as path:
                return read_part(path, columns, where=str(self.root / part))

        parts = self._parts(name, run_ids)
        if not self.storage.has_lock:
            return map_concurrently(read, parts)
        table = schema.TABLES[name]
        wanted = [c for c in table.columns if columns is None or c.name in columns]
        # Frames of training have columns of their own.
        is_flat = not table.open_ended and all(c.kind != "map" for c in wanted)
        # Each file that is opened alone costs a millisecond.
        small = self._read_small(parts, [c.name for c in wanted]) if is_flat else []
        return small or list(map(read, parts))

    def _read_small(self, parts: Sequence[str], columns: Sequence[str]) -> list[pl.DataFrame]:
        """Return many small parts, read together as one frame; empty if they are few, or one is large or lacks a
        column.
        """
        paths = []
        if len(parts) < _MANY_PARTS:
            return []
        for part in parts:
            with self._checked_part(part) as path:
                paths.append(path)
                if path.stat().st_size > _SMALL_PART_BYTES:
                    return []
        try:
            rows = pl.read_parquet(
                paths,
                columns=list(columns),
                hive_partitioning=False,
                # Each of these takes longer than a small file.
                parallel="none",
                glob=False,
                use_statistics=False,
            )
        except (pl.exceptions.PolarsError, OSError):
            return []  # one by one, the fault has a name
        return [rows.with_columns(pl.col(pl.Categorical).cast(pl.String))]

    @contextmanager
    def _checked_part(self, part: str) -> Iterator[Path]:
        where = str(self.root / part)
        with self.storage.fetched(part) as path:
            try:
                self._check(part, path)
            except FileNotFoundError:
                raise
            except OSError as error:
                raise DataError(f"cannot be read ({error.strerror})", where=where, hint=_INGEST_AGAIN) from error
            yield path

    def _parts(self, name: str, run_ids: list[str] | None) -> list[str]:
        runs = self.manifest().runs
        wanted = sorted(runs if run_ids is None else runs.keys() & set(run_ids))
        return [part_name(name, i, runs[i].tables[name]) for i in wanted if name in runs[i].tables]

    def require(self) -> TableStore:
        """Return the store if it has ingested runs.

        Raises:
            UsageError: It has no runs.
        """
        if not self.runs():
            raise UsageError(
                "holds no tables",
                where=str(self.root),
                hint=f"`tracefit ingest RUNS {flag_of(IngestOutOption)} TABLES` makes them",
            )
        return self


class RunTables(Mapping[str, pl.DataFrame]):
    """The tables of some runs by name, each read on access: `tables["requests"]`.

    `tables.scan("timeline")` is a lazy frame; `tables["requests"].to_pandas()` and `.to_arrow()` are other
    libraries' frames.
    """

    def __init__(self, root: str | Path, run_ids: Sequence[str] | None = None) -> None:
        """Name the folder of tables, and its runs; all of them by default."""
        self.root = location_of(root)
        self._run_ids = None if run_ids is None else list(run_ids)

    def __repr__(self) -> str:
        return f"<Tables of {self.root}: {', '.join(self)}>"

    def __fspath__(self) -> str:
        """Return the folder, so that the tables of a result can be passed as a tables folder."""
        return str(self.root)

    def __iter__(self) -> Iterator[str]:
        return iter(schema.TABLES)

    def __len__(self) -> int:
        return len(schema.TABLES)

    def __getitem__(self, name: str) -> pl.DataFrame:
        """Read a table.

        Raises:
            KeyError: There is no table of that name.
            DataError: A part is not a readable Parquet file, or has changed since it was written.
        """
        if name not in schema.TABLES:
            raise KeyError(name)
        return TableStore(self.root).read(name, self._run_ids)

    def scan(self, name: str) -> pl.LazyFrame:
        """Return a table as a lazy frame: a query reads only the data it needs.

        Raises:
            UsageError: There is no table of that name.
        """
        if name not in schema.TABLES:
            raise UsageError(
                f"there is no table {name}",
                where=str(self.root),
                hint=did_you_mean(name, schema.TABLES) or f"there are: {', '.join(schema.TABLES)}",
            )
        return TableStore(self.root).scan(name, self._run_ids)


def part_name(table: str, run_id: str, part: TableFile) -> str:
    """Return the name of a part in its storage."""
    return f"{table}/run_id={run_id}/{part.name}"


def _parts_of(runs: Mapping[str, IngestedRun]) -> set[str]:
    return {part_name(name, run_id, part) for run_id, run in runs.items() for name, part in run.tables.items()}


def put_parts(storage: Storage, run_id: str, parts: Mapping[str, Path]) -> dict[str, TableFile]:
    """Store finished parts of a run; they count once a manifest names them. Any process may do this.

    Args:
        storage: The storage of the tables.
        run_id: A cleaned run id.
        parts: Table name to its part, in a scratch folder of the storage.
    """
    tables = {name: TableFile(name=part.name[part.name.index("part-") :]) for name, part in parts.items()}
    storage.put({part_name(name, run_id, tables[name]): part for name, part in parts.items()})
    return tables


class WrittenTables(Protocol):
    """The tables of some runs that were written."""

    def read(self, name: str, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """Return a table, with all columns or some."""

    def pieces(self, name: str) -> Iterator[pl.DataFrame]:
        """Yield the rows of a table in their order."""


class RunWriter:
    """Writes the tables of one run one after the other, each as one Parquet file, as their rows arrive.

    A table that is written again replaces the one before. The disk has the files once `syncs` says so.
    """

    def __init__(self, folder: Path, syncs: Syncs, prefix: str = "") -> None:
        self.folder = folder
        self._syncs = syncs
        self._prefix = prefix
        self._open: _TableFileWriter | None = None
        self._parts: dict[str, Path] = {}

    def write(self, name: str, rows: pl.DataFrame | pa.Table) -> None:
        """Write the next rows of a table, in its columns and order."""
        if self._open is None or self._open.table.name != name:
            self._finish()
            self._open = _TableFileWriter(schema.TABLES[name], self.folder, self._prefix)
        self._open.write(rows)

    def put(self, name: str, part: Path) -> None:
        """Add the file of a table; the file is already synced to disk."""
        self._parts[name] = part

    def write_if_missing(self, name: str) -> None:
        """Write an empty table if no rows of it have been written."""
        if name not in self._parts and (self._open is None or self._open.table.name != name):
            part, data = _empty_part(name)
            self._parts[name] = self.folder / f"{self._prefix}{part}"
            stream = create(self._parts[name])
            stream.write(data)
            self._syncs.add(stream)

    def write_all(self, tables: Mapping[str, pl.DataFrame | Iterator[pl.DataFrame]]) -> None:
        """Write whole tables, some of them in pieces."""
        for name, rows in tables.items():
            for piece in (rows,) if isinstance(rows, pl.DataFrame) else rows:
                self.write(name, piece)

    def read(self, name: str, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """Return a table that was written, with all columns or some."""
        self._finish()
        return read_part(self._parts[name], columns)

    def pieces(self, name: str) -> Iterator[pl.DataFrame]:
        """Yield the rows of a table that was written; another one may be written meanwhile."""
        self._finish()
        with pq.ParquetFile(self._parts[name]) as file:
            for rows in file.iter_batches(PIECE_ROWS):
                yield _to_polars(rows)

    def scan(self, name: str) -> pl.LazyFrame:
        """Return a table that was written as a lazy frame."""
        self._finish()
        return pl.scan_parquet(self._parts[name], hive_partitioning=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Close the file that is open, finished or not."""
        if self._open is not None:
            self._open.stream.close()

    def close(self) -> dict[str, Path]:
        """Finish the last table; return the file of each table, named after its content."""
        self._finish()
        return self._parts

    def _finish(self) -> None:
        if self._open is None:
            return
        name, part = self._open.table.name, self._open.close(self._syncs)
        # Named after their contents: an unchanged table keeps its name.
        if self._parts.get(name, part) != part:
            self._parts[name].unlink()
        self._parts[name] = part
        self._open = None


WrittenTable = Path | list[pl.DataFrame]
"""A table of one run as its file, or of several small ones as its rows."""


def write_table(name: str, rows: Iterable[pl.DataFrame], folder: Path | None) -> WrittenTable:
    """Write a table of one run into `RunsWriter.folder`, and wait until the disk has it; any process may do this.

    Without a folder, return the rows of the table.
    """
    if folder is None:
        return list(rows)
    with Syncs() as syncs, RunWriter(folder, syncs) as writer:
        writer.write_all({name: iter(rows)})
        return writer.close()[name]


class RunsWriter:
    """Writes the tables of some runs: of one as their rows arrive, of several small ones when all are complete.

    The disk has the files when its context ends without an error.
    """

    def __init__(self, scratch: Path, run_ids: Sequence[str]) -> None:
        self._syncs = Syncs()
        self._writers: dict[str, RunWriter] = {}
        # One folder: to remove one for each run takes longer than to write a table.
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=scratch))
        for number, run_id in enumerate(run_ids):
            prefix = f"{number}-" if len(run_ids) > 1 else ""
            self._writers[run_id] = RunWriter(folder, self._syncs, prefix)
        self._single_writer = self._writers[run_ids[0]] if len(run_ids) == 1 else None
        self.folder = self._single_writer.folder if self._single_writer else None
        self._rows: dict[str, list[pl.DataFrame]] = {}

    def put(self, name: str, table: WrittenTable) -> None:
        """Add a whole table, as `write_table` has written it."""
        if self._single_writer is not None:
            assert isinstance(table, Path)  # noqa: S101 - it was written into the folder
            self._single_writer.put(name, table)
        else:
            assert not isinstance(table, Path)  # noqa: S101 - there was no folder
            self._rows[name] = table

    def write(self, name: str, rows: pl.DataFrame) -> None:
        """Write the next rows of a table; those of several runs have qualified names."""
        if self._single_writer is not None:
            self._single_writer.write(name, rows)
        else:
            self._rows.setdefault(name, []).append(rows)

    def scan(self, name: str) -> pl.LazyFrame:
        """Return a table that was written as a lazy frame."""
        if self._single_writer is not None:
            return self._single_writer.scan(name)
        return pl.concat(self._rows[name]).lazy()

    def complete(self) -> None:
        """Give the rows of several runs their own names; from now on, tables are read and replaced."""
        self._rows = {name: [plain(pl.concat(rows))] for name, rows in self._rows.items()}

    def of(self, run_ids: Sequence[str]) -> WrittenTables:
        """Return the tables of some of the runs."""
        if self._single_writer is not None:
            return self._single_writer
        return _HeldTables(self._rows, frozenset(run_ids) if len(run_ids) < len(self._writers) else None)

    def replace(self, run_ids: Sequence[str], tables: Mapping[str, pl.DataFrame | Iterator[pl.DataFrame]]) -> None:
        """Write whole tables of some runs, in place of those before."""
        if self._single_writer is not None:
            self._single_writer.write_all(tables)
            return
        for name, rows in tables.items():
            others = ~pl.col("run_id").is_in(list(run_ids))
            kept = [piece.filter(others) for piece in self._rows.get(name, ())]
            self._rows[name] = [*kept, rows] if isinstance(rows, pl.DataFrame) else [*kept, *rows]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Close files that are open, finished or not."""
        for writer in self._writers.values():
            writer.__exit__(kind, *error)
        self._syncs.__exit__(kind, *error)

    def close(self) -> dict[str, dict[str, Path]]:
        """Finish all tables; return the files of each run by table, named after their contents."""
        for name, frames in self._rows.items():
            for rows in frames:
                # Converted once: that has a fixed cost for each column.
                converted = _to_arrow(rows, schema.TABLES[name])
                start = 0
                for length, run_id in rows["run_id"].rle().struct.unnest().iter_rows():
                    self._writers[run_id].write(name, converted.slice(start, length))
                    start += length
            for writer in self._writers.values():
                writer.write_if_missing(name)
        return {run_id: writer.close() for run_id, writer in self._writers.items()}


class _HeldTables(msgspec.Struct, frozen=True):
    """Tables in memory, of some runs or of all."""

    tables: Mapping[str, Sequence[pl.DataFrame]]
    run_ids: frozenset[str] | None

    def read(self, name: str, columns: Sequence[str] | None = None) -> pl.DataFrame:
        rows = pl.concat(self.tables[name])
        if self.run_ids is not None:
            rows = rows.filter(pl.col("run_id").is_in(list(self.run_ids)))
        return rows if columns is None else rows.select(c for c in rows.columns if c in columns)

    def pieces(self, name: str) -> Iterator[pl.DataFrame]:
        yield self.read(name)


class _TableFileWriter:
    """One Parquet file, in row groups of `ROW_GROUP_ROWS` or `ROW_GROUP_BYTES`, for frames of any size."""

    def __init__(self, table: schema.TableSchema, folder: Path, prefix: str = "") -> None:
        self.table = table
        self._prefix = prefix
        self._path = folder / f"{prefix}{table.name}.parquet"
        self.stream = create(self._path)
        self._sink = _HashedStream(self.stream)
        self._waiting: list[pa.Table] = []
        self._writer: pq.ParquetWriter | None = None

    def write(self, rows: pl.DataFrame | pa.Table) -> None:
        height = rows.num_rows if isinstance(rows, pa.Table) else rows.height
        for start in range(0, height or 1, PIECE_ROWS):
            # Also for a frame without rows: the file of an empty table has its columns.
            piece = rows.slice(start, PIECE_ROWS)
            self._waiting.append(piece if isinstance(piece, pa.Table) else _to_arrow(piece, self.table))
            rows_waiting = sum(piece.num_rows for piece in self._waiting)
            if rows_waiting <= _SMALL_PART_ROWS:
                continue
            if rows_waiting > ROW_GROUP_ROWS:
                # A piece is smaller than a group, so at most one piece is left over.
                group = pa.concat_tables(self._waiting)
                self._write_group(group.slice(0, ROW_GROUP_ROWS))
                self._waiting = [group.slice(ROW_GROUP_ROWS)]
            elif sum(piece.nbytes for piece in self._waiting) > ROW_GROUP_BYTES:
                self._write_group(pa.concat_tables(self._waiting))
                self._waiting = [self._waiting[-1].slice(0, 0)]  # columns without rows, for `close`

    def close(self, syncs: Syncs) -> Path:
        """Finish the file, and give it to `syncs`; return it under the name of its content."""
        group = pa.concat_tables(self._waiting)
        if group.num_rows or self._writer is None:
            self._write_group(group)
        if self._writer:
            self._writer.close()
        syncs.add(self.stream)
        part = _part_of(self._sink.digest.hexdigest())
        return self._path.rename(self._path.with_name(f"{self._prefix}{part}"))

    def _write_group(self, rows: pa.Table) -> None:
        if self._writer is None:
            # Ids and names repeat; a dictionary of times or features would be as long as they are. A small file is read
            # whole, so that it needs no statistics.
            is_long = rows.num_rows > _SMALL_PART_ROWS
            strings = [c.name for c in self.table.columns if c.kind == "string" and is_long]
            self._writer = pq.ParquetWriter(
                pa.PythonFile(self._sink, mode="w"),
                rows.schema,
                compression="zstd",
                use_dictionary=strings,
                write_statistics=is_long,
                store_schema=False,  # this schema has polars' large strings; `_readers_schema` is stored in its place
            )
            self._writer.add_key_value_metadata(_readers_schema(rows.schema))
        self._writer.write_table(rows, row_group_size=ROW_GROUP_ROWS)


@cache  # the same for every run
def _empty_part(name: str) -> tuple[str, bytes]:
    """Return the name and the bytes of the part of a table without rows."""
    with tempfile.TemporaryDirectory(prefix="tracefit-") as folder, Syncs() as syncs:
        writer = _TableFileWriter(schema.TABLES[name], Path(folder))
        writer.write(schema.TABLES[name].empty())
        part = writer.close(syncs)
        return part.name, part.read_bytes()


class _HashedStream(io.RawIOBase):
    """Passes bytes on to a stream, and hashes them: a file need not be read again for its name."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.digest = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return self._stream.write(data)


def _part_of(digest: str) -> str:
    return f"part-{digest[:_HASH_DIGITS]}.parquet"


def _content_name(path: Path) -> str:
    return _part_of(digest_of(path))


@lru_cache(maxsize=64)  # the same for every run
def _readers_schema(written: pa.Schema) -> dict[bytes, bytes]:
    """Return the metadata from which readers of Arrow take the types of the columns.

    `run_id` is a dictionary: pyarrow, and pandas with it, makes one of the `run_id=` in folder names, and
    stops where a file has another type than that.
    """
    texts = {
        pa.large_string(): pa.string(),
        pa.map_(pa.large_string(), pa.large_string()): pa.map_(pa.string(), pa.string()),
    }
    kinds = {f.name: texts.get(f.type, f.type) for f in written}
    if "run_id" in kinds:
        kinds["run_id"] = pa.dictionary(pa.int32(), pa.string())
    return {b"ARROW:schema": base64.b64encode(pa.schema(kinds.items()).serialize().to_pybytes())}


def _to_arrow(frame: pl.DataFrame, table: schema.TableSchema) -> pa.Table:
    """Make columns that Parquet stores as the published types; lists of key and value become maps."""
    arrow = frame.to_arrow(compat_level=pl.CompatLevel.oldest())
    for column in table.columns:
        if column.kind == "map" and column.name in frame.columns:
            index = frame.get_column_index(column.name)
            arrow = arrow.set_column(index, column.name, _to_map(frame[column.name]))
    return arrow


def _to_map(lists: pl.Series) -> pa.Array:
    lengths = lists.list.len().fill_null(0).to_numpy()
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    # Not pa.array, which imports pandas where that is installed.
    offsets = pa.Array.from_buffers(pa.int32(), len(ends), [None, pa.py_buffer(ends)])
    pairs = lists.explode(empty_as_null=False).drop_nulls().struct
    keys, values = (pairs.field(name).to_arrow(compat_level=pl.CompatLevel.oldest()) for name in ("key", "value"))
    return pa.MapArray.from_arrays(offsets, keys, values)


def read_part(part: Path, columns: Sequence[str] | None = None, *, where: str | None = None) -> pl.DataFrame:
    """Read a file of a table, with all columns or some.

    Args:
        part: The file on disk.
        columns: Columns to read; all if not given.
        where: The file as the user knows it, if it is a copy.

    Raises:
        FileNotFoundError: It is not there.
        DataError: It is not a readable Parquet file.
    """
    where = where or str(part)
    try:
        # Not read_table, which loads pyarrow's datasets first.
        with pq.ParquetFile(part) as file:
            wanted = [n for n in file.schema_arrow.names if columns is None or n in columns]
            if file.metadata.num_rows <= ROW_GROUP_ROWS:
                return _to_polars(file.read(wanted))
            # One column of a long table at a time: read together, they take three times their own memory.
            return pl.concat([_to_polars(file.read([name])) for name in wanted], how="horizontal")
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError("is not a readable Parquet file", where=where, hint=_INGEST_AGAIN) from error


def _to_polars(rows: pa.Table | pa.RecordBatch) -> pl.DataFrame:
    return pl.DataFrame(rows).with_columns(pl.col(pl.Categorical).cast(pl.String))
