"""Storage of tables: a folder on disk, or a prefix in a bucket, with the same methods; other processes can use both.

Names are relative to it: `runs/run_id=a/part-0123456789abcdef.parquet`. A file appears whole or not at all, and
counts once the manifest names it. Writers of a folder wait for each other, by a lock. A bucket has no locks: there the
manifest is replaced only if it is still the one that was read.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import tempfile
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import msgspec
from msgspec.structs import replace

from tracefit.errors import DataError, UsageError
from tracefit.inputs import buckets
from tracefit.inputs.buckets import BucketPath, Version, location_of
from tracefit.tables.disk import SCRATCH_PREFIX, folder_lock, remove_scratch, scratch_folder, write_whole

if TYPE_CHECKING:
    import io
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

LEFTOVER_AGE = timedelta(days=1)
"""Age from which an object that no manifest names belongs to no writer or reader that is still at work."""


_STAMP_DIGITS = 16


class Disk(msgspec.Struct, frozen=True):
    """A folder on disk.

    Its methods raise `UsageError` if a file or one of its folders is a symbolic link: in a folder from
    someone else, a link may lead anywhere.
    """

    root: Path
    has_lock: ClassVar[bool] = True

    @contextmanager
    def lock(self, waiting: Callable[[], None], own: Iterable[str]) -> Iterator[Disk]:
        """Lock the folder for writing; if another process has locked it, call `waiting` and wait. A thread may lock it
        again.

        Args:
            waiting: Called before waiting.
            own: Names in the folder that are written to; others are not touched, and may be links.

        Returns:
            The storage to write to.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        with folder_lock(self.root, waiting) as is_first:
            if not is_first:
                yield self
                return
            for storage in self.root.iterdir():
                if storage.name in own or storage.name.startswith(SCRATCH_PREFIX):
                    self._path(storage.name)
                    if storage.is_dir():
                        _refuse_links_in(storage)
            # Scratch folders of writers that died, and of workers that an interruption stops.
            remove_scratch(self.root)
            try:
                yield self
            finally:
                remove_scratch(self.root)

    def scratch(self) -> AbstractContextManager[Path]:
        """Make a folder for files that are not finished, and remove it afterwards."""
        return scratch_folder(self.root)

    def put(self, files: Mapping[str, Path]) -> None:
        """Move files of a scratch folder to their names."""
        for name, file in files.items():
            target = self._checked(name)
            os.makedirs(target.rpartition("/")[0], exist_ok=True)  # noqa: PTH103 - as in `_checked`
            os.replace(file, target)  # noqa: PTH105

    @contextmanager
    def fetched(self, name: str) -> Iterator[Path]:
        """Return a file as one on disk, which stays as long as the context."""
        yield self._path(name)

    def scannable(self, name: str) -> str:
        """Return the path that polars scans."""
        return str(self._path(name))

    def children(self, folder: str) -> set[str]:
        """Return the names directly in a folder."""
        return {child.name for child in self._path(folder).glob("*")}

    def sizes(self, folders: Iterable[str]) -> list[int]:
        """Return the bytes of the files in each folder."""
        return [sum(file.stat().st_size for file in self._path(folder).iterdir()) for folder in folders]

    def leftovers(self, folder: str) -> list[str]:
        """Return the files below a folder, and folders without any: no other writer is at work."""
        # Empty folders too, as a crash leaves them.
        removable = []
        for here, folders, files in os.walk(self._checked(folder)):
            removable += [f"{here}/{name}" for name in files] if files or folders else [here]
        return [path[len(f"{self.root}/") :] for path in removable]

    def remove(self, names: Iterable[str]) -> None:
        """Remove files and empty folders, and the folders they leave empty."""
        for name in names:
            path = self._path(name)
            path.rmdir() if path.is_dir() else path.unlink()
            while (path := path.parent) != self.root and not any(path.iterdir()):
                path.rmdir()

    def read_versioned(self, name: str) -> tuple[bytes, Version | None]:
        """Return a small file, and its version if the storage has versions.

        Raises:
            FileNotFoundError: It is not there.
            DataError: It cannot be read.
        """
        path = self._path(name)
        try:
            with _open_regular(path) as stream:
                return stream.read(), None
        except FileNotFoundError:
            raise
        except OSError as error:
            raise DataError(f"cannot be read ({error.strerror})", where=str(path)) from error

    def signature(self, name: str) -> tuple[int, ...] | None:
        """Return a value that changes when a small file is replaced; null if the file is missing or checking would be
        costly.
        """
        try:
            facts = os.lstat(self.root / name)
        except OSError:
            return None
        return facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns

    def replace_if(self, name: str, data: bytes, version: Version | None) -> bool:  # noqa: ARG002 - the lock is held
        """Replace a small file if it is still the one that was read; return whether it was replaced."""
        write_whole(self.root / name, data)
        return True

    def stamp(self, names: Iterable[str]) -> tuple[str, int] | None:
        """Return a hash of the sizes of files and of the times of their last change, and the latest of these (Unix ns).

        Nobody can set the times (ctime) back. Null if a file is not there.
        """
        try:
            facts = [(name, os.lstat(f"{self.root}/{name}")) for name in names]
        except OSError:
            return None
        text = repr([(name, of.st_size, of.st_ctime_ns) for name, of in facts])
        latest = max((of.st_ctime_ns for _, of in facts), default=0)
        return hashlib.sha256(text.encode()).hexdigest()[:_STAMP_DIGITS], latest

    def _path(self, name: str) -> Path:
        return Path(self._checked(name))

    def _checked(self, name: str) -> str:
        # A string: there are dozens of names in each run, and making a `Path` takes longer than looking at a file.
        path = str(self.root)
        for part in name.split("/"):
            path = f"{path}/{part}" if part else path
            if os.path.islink(path):  # noqa: PTH114 - as above
                raise _link(Path(path))
        return path


def _refuse_links_in(folder: Path) -> None:
    """Refuse links among the folders of runs; the contents of these folders are checked when they are used."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                raise _link(Path(entry.path))


def _link(path: Path) -> UsageError:
    return UsageError(
        "is a symbolic link, and nothing outside the tables folder is read, written or removed",
        where=str(path),
        hint="remove the link and ingest the traces again",
    )


def _open_regular(path: Path) -> io.BufferedReader:
    """Open a file for reading; it is refused if it is a link, a pipe or a device, which would never end."""
    # Opening a pipe would wait for a writer; with NONBLOCK it does not, and is refused below.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(handle, "rb")


class Bucket(msgspec.Struct, frozen=True):
    """A prefix in a bucket. Its methods raise `UsageError` if the bucket cannot be reached or refuses.

    Attributes:
        root: The prefix.
        kept: A folder with copies of the files this writer has put, because it reads staged parts several
            times; missing on other machines.
        kept_bytes: Most bytes of these copies.
    """

    root: BucketPath
    kept: Path | None = None
    kept_bytes: int = 1 << 30
    has_lock: ClassVar[bool] = False

    @contextmanager
    def lock(self, waiting: Callable[[], None], own: Iterable[str]) -> Iterator[Bucket]:  # noqa: ARG002 - as `Disk`
        """Return the storage itself, without a lock: the first to replace the manifest wins."""
        with self.scratch() as kept:
            yield replace(self, kept=kept)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Make a folder on disk for files that are not finished, and remove it afterwards."""
        with tempfile.TemporaryDirectory(prefix="tracefit-") as folder:
            yield Path(folder)

    def put(self, files: Mapping[str, Path]) -> None:
        """Copy files of a scratch folder to their names."""
        buckets.map_concurrently(lambda item: buckets.put(self._path(item[0]), item[1]), files.items())
        if self.kept is None or not self.kept.is_dir():
            return
        held = sum(path.stat().st_size for path in self.kept.rglob("*") if path.is_file())
        if held + sum(path.stat().st_size for path in files.values()) <= self.kept_bytes:
            Disk(self.kept).put(files)

    @contextmanager
    def fetched(self, name: str) -> Iterator[Path]:
        """Return a copy of an object on disk, which stays as long as the context."""
        if self.kept is not None and (kept := self.kept / name).is_file():
            yield kept
            return
        with self.scratch() as scratch:
            copy = scratch / name.rpartition("/")[2]
            buckets.download(self._path(name), copy)
            yield copy

    def has(self, names: Iterable[str]) -> bool:
        """Say whether all these objects are there."""
        return None not in buckets.map_concurrently(buckets.size_of, map(self._path, names))

    def scannable(self, name: str) -> str:
        """Return what polars scans for an object: its URL; polars reads the same environment."""
        return str(self._path(name))

    def children(self, folder: str) -> set[str]:
        """Return the names directly below a prefix."""
        return buckets.children(self._path(folder))

    def sizes(self, folders: Iterable[str]) -> list[int]:
        """Return the bytes of the objects below each prefix."""

        def size(folder: str) -> int:
            return sum(size for _, size, _ in buckets.below(self._path(folder)))

        return buckets.map_concurrently(size, folders)

    def leftovers(self, folder: str) -> list[str]:
        """Return the objects below a prefix that were written long ago.

        The others may be those of a writer that has not written its manifest yet, or of a reader that has
        read one before.
        """
        objects = [(f"{folder}/{name}".lstrip("/"), when) for name, _, when in buckets.below(self._path(folder))]
        # By the clock of the bucket: its newest object shows the approximate time.
        newest = max((when for _, when in objects), default=None)
        return [name for name, when in objects if newest and when < newest - LEFTOVER_AGE]

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects."""
        buckets.delete([self._path(name) for name in names])

    def read_versioned(self, name: str) -> tuple[bytes, Version | None]:
        """Return a small object and its version."""
        return buckets.get(self._path(name))

    def stamp(self, names: Iterable[str]) -> None:
        """Return null: a bucket checks its own objects."""

    def signature(self, name: str) -> tuple[int, ...] | None:  # noqa: ARG002 - as `Disk`
        """Return null: a look at an object takes as long as reading it."""
        return None

    def replace_if(self, name: str, data: bytes, version: Version | None) -> bool:
        """Replace a small object if its version is still the given one (null: missing); return whether it was replaced.

        Without an answer, which raises an error, it may have been replaced.
        """
        return buckets.put_if(self._path(name), data, version)

    def _path(self, name: str) -> BucketPath:
        return self.root / name


Storage = Disk | Bucket


def open_storage(root: str | Path) -> Storage:
    """Return the storage that a folder or a URL names; it need not exist.

    Raises:
        UsageError: The URL names no bucket, or holds credentials or options.
    """
    path = location_of(root)
    return Bucket(path) if isinstance(path, BucketPath) else Disk(path)


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file in hex.

    Raises:
        OSError: It cannot be read, or is a pipe or a device.
    """
    with _open_regular(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
