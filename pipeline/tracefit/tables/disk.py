"""Write files atomically, in a locked folder, and turn errors of the disk into one line.

A reader sees an old file or a new one, never a part of it. Symbolic links inside a tables folder are refused.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from tracefit.errors import UsageError
from tracefit.inputs.buckets import BucketPath, place_of, put

if TYPE_CHECKING:
    import io
    from collections.abc import Callable, Iterator, Mapping

SCRATCH_PREFIX = ".writing-"
_ERRNO = re.compile(r"\[Errno (\d+)\]")


@contextmanager
def disk_errors(root: Path) -> Iterator[None]:
    """Raise errors of the disk as one-line `UsageError`.

    Raises:
        UsageError: Something below `root` could not be written.
    """
    try:
        yield
    except OSError as error:
        # An error raised through polars or pyarrow has lost its number; only its text has it.
        found = _ERRNO.match(str(error))
        number = error.errno or int(found[1] if found else 0)
        full = number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise UsageError(
            f"cannot be written ({os.strerror(number) if number else error})",
            where=str(root),
            hint="what was there before is untouched; free some space and run the command again"
            if full
            else None,
        ) from error


def inside(root: Path, *names: str) -> Path:
    """Return the path of a file or folder of the tables folder, which need not exist.

    Raises:
        UsageError: The path contains a symbolic link, which may lead anywhere if the tables folder came from elsewhere.
    """
    path = root
    for name in names:
        path = path / name
        if path.is_symlink():
            raise _link(path)
    return path


def open_regular(path: Path) -> io.BufferedReader:
    """Open a file of the tables folder for reading.

    Raises:
        FileNotFoundError: It is not there.
        OSError: It cannot be read, or is a pipe or a device, which would never end.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(handle, "rb")


def refuse_links(folder: Path) -> None:
    """Refuse symbolic links anywhere in a folder of the tables folder.

    Raises:
        UsageError: There is one.
    """
    folders = [folder]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    raise _link(Path(entry.path))
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))


def _link(path: Path) -> UsageError:
    return UsageError(
        "is a symbolic link, and nothing outside the tables folder is read, written or removed",
        where=str(path),
        hint="remove the link and ingest the traces again",
    )


@contextmanager
def scratch_folder(root: Path) -> Iterator[Path]:
    """Make a folder below `root` to write in, and remove it afterwards with everything in it."""
    root.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep(root: Path) -> None:
    """Remove the scratch folders of dead writers; only the holder of the lock may call this."""
    for folder in root.glob(f"{SCRATCH_PREFIX}*"):
        shutil.rmtree(folder, ignore_errors=True)


def create(path: Path) -> BinaryIO:
    """Open a new file for writing. Every file of the tables folder is written through this function."""
    return path.open("wb")


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file in one step: a reader sees the old one or the new one, even after a crash."""
    with scratch_folder(path.parent) as scratch:
        _draft(scratch, path, data).replace(path)
    sync_folder(path.parent)


def write_files(contents: Mapping[Path, bytes | str]) -> None:
    """Write the files of one result; text as UTF-8. Each is whole or not there.

    On disk none is written if one cannot be; in a bucket, those before it are.

    Raises:
        UsageError: A file cannot be written.
    """
    with ExitStack() as stack:
        drafts = []
        for name, content in contents.items():
            path, data = place_of(name), content.encode() if isinstance(content, str) else content
            if isinstance(path, BucketPath):
                put(path, data)
                continue
            stack.enter_context(disk_errors(path))
            scratch = stack.enter_context(scratch_folder(path.parent))
            drafts.append((_draft(scratch, path, data), path))
        for draft, path in drafts:
            with disk_errors(path):
                draft.replace(path)
                sync_folder(path.parent)


def _draft(scratch: Path, path: Path, data: bytes) -> Path:
    """Write what is to become a file, and wait until the disk has it."""
    draft = scratch / path.name
    with create(draft) as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    return draft


def sync_folder(folder: Path) -> None:
    """Flush a folder, so that renames in it survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def locked(root: Path, *, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a folder, which is on the folder itself; the system releases it with the process.

    Args:
        root: The tables folder; it is created if it does not exist.
        waiting: Called if another process holds the lock, before waiting for it.
    """
    root.mkdir(parents=True, exist_ok=True)
    handle = os.open(root, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
