"""Write files atomically, and turn errors of the disk into one line. A reader sees the old file or the new one."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import tempfile
import threading
from collections import deque
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Self

from tracefit.errors import UsageError
from tracefit.inputs.buckets import BucketPath, location_of, put

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from concurrent.futures import Future

    from tracefit.progress import Progress

SCRATCH_PREFIX = ".writing-"
_SYNC_THREADS = 2
_MOST_SYNCS = 64
"""Files that are open at a time because the disk does not have them yet."""

_ERRNO = re.compile(r"\[Errno (\d+)\]|\(os error (\d+)\)")
"""The number of an error in the text of one that pyarrow or polars raises."""

_HELD: set[tuple[int, int, int]] = set()
"""Folders that a thread of this process has locked: the thread, and the device and inode of the folder."""


@contextmanager
def disk_errors(root: Path) -> Iterator[None]:
    """Raise errors of the disk as one-line `UsageError`.

    Raises:
        UsageError: Something below `root` could not be written.
    """
    try:
        yield
    except OSError as error:
        # An error raised through polars or pyarrow has its number only in its text.
        match = _ERRNO.search(str(error))
        number = error.errno or int((match[1] or match[2]) if match else 0)
        if number in (errno.EEXIST, errno.ENOTDIR, errno.ELOOP):
            raise UsageError(
                "cannot be written (a file or a link to nothing stands where a folder is needed)",
                where=str(root),
                hint="choose another folder",
            ) from error
        full = number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise UsageError(
            f"cannot be written ({os.strerror(number) if number else error})",
            where=str(root),
            hint="the previous files are unchanged; free some space and run the command again" if full else None,
        ) from error


def warn_of_wait(folder: Path, progress: Progress | None) -> None:
    """Say that this process waits for the one that has locked a folder."""
    if progress is not None:
        progress.warn(f"{folder}: another process is writing there; waiting for it")


@contextmanager
def folder_lock(folder: Path, waiting: Callable[[], None]) -> Iterator[bool]:
    """Lock a folder that exists; if another process, or another thread, has locked it, call `waiting` and wait.

    Returns:
        Whether this call locked it; false if the thread had it locked already.
    """
    # The lock is on the folder itself: the system releases it with the process.
    handle = os.open(folder, os.O_RDONLY)
    try:
        facts = os.fstat(handle)
        key = threading.get_ident(), facts.st_dev, facts.st_ino
        if key in _HELD:
            yield False
            return
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(handle, fcntl.LOCK_EX)
        _HELD.add(key)
        try:
            yield True
        finally:
            _HELD.discard(key)
    finally:
        os.close(handle)


@contextmanager
def scratch_folder(root: Path) -> Iterator[Path]:
    """Make a folder below `root` to write in, and remove it afterwards with everything in it."""
    root.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_scratch(folder: Path) -> None:
    """Remove the scratch folders in a locked folder: those of writers that died."""
    for scratch in folder.glob(f"{SCRATCH_PREFIX}*"):
        shutil.rmtree(scratch, ignore_errors=True)


def create(path: Path) -> BinaryIO:
    """Open a new file for writing. Every file of the tables folder is written through this function."""
    return path.open("wb")


class Syncs:
    """Waits in threads until the disk has files that are written, so that the next ones are written meanwhile.

    The disk has them when its context ends without an error. Two threads: with more, the file system's own work on them
    takes longer than the disk.
    """

    def __init__(self) -> None:
        from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - takes a while to import

        self._threads = ThreadPoolExecutor(_SYNC_THREADS)
        self._running: deque[Future[None]] = deque()

    def add(self, stream: BinaryIO) -> None:
        """Take over a file that is written; it is closed.

        Raises:
            OSError: An earlier file cannot be written.
        """
        stream.flush()
        self._running.append(self._threads.submit(_sync, stream))
        self._wait(_MOST_SYNCS)

    def _wait(self, most: int) -> None:
        while len(self._running) > most:
            self._running.popleft().result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Wait until the disk has all files; raise `OSError` if one cannot be written. After an error, only close
        them.
        """
        try:
            if kind is None:
                self._wait(0)
        finally:
            self._threads.shutdown()


def _sync(stream: BinaryIO) -> None:
    with stream:
        os.fsync(stream.fileno())


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file in one step: a reader sees the old one or the new one, even after a crash."""
    with scratch_folder(path.parent) as scratch:
        _put_in_place(_draft(scratch, path, data), path)


def write_files(contents: Mapping[Path, bytes | str]) -> None:
    """Write the files of one result; text as UTF-8. Each is whole or missing.

    On disk, either all are written or none, and another process that writes to the same folders does so before or
    after; in a bucket, the files before a failed one are written.

    Raises:
        UsageError: A file cannot be written.
    """
    data_of = {
        location_of(name): content.encode() if isinstance(content, str) else content
        for name, content in contents.items()
    }
    on_disk = [path for path in data_of if not isinstance(path, BucketPath)]
    with ExitStack() as stack:
        # In one order, so that no two processes wait for each other.
        for path in sorted(on_disk):
            stack.enter_context(disk_errors(path))
            path.parent.mkdir(parents=True, exist_ok=True)
            if stack.enter_context(folder_lock(path.parent, lambda: None)):
                remove_scratch(path.parent)
        drafts = []
        for path, data in data_of.items():
            if isinstance(path, BucketPath):
                put(path, data)
                continue
            stack.enter_context(disk_errors(path))
            scratch = stack.enter_context(scratch_folder(path.parent))
            drafts.append((_draft(scratch, path, data), path))
        for draft, path in drafts:
            with disk_errors(path):
                _put_in_place(draft, path)


def _draft(scratch: Path, path: Path, data: bytes) -> Path:
    """Write the draft of a file, and wait until the disk has it."""
    draft = scratch / path.name
    with create(draft) as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    return draft


def _put_in_place(draft: Path, path: Path) -> None:
    draft.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in a folder; otherwise a power cut may lose new or renamed files."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
