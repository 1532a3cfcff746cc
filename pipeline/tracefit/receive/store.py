"""Trace files on disk: a folder per sender, rotated files of length-prefixed zstd; all on disk when acknowledged.

A record is four bytes of length, big-endian, and one zstd frame with a
`TracesData`. Lines of recorded steps are zstd frames one after another, without lengths.

Few files are open at a time. One that was closed for another is opened again, as long as it is the file that
this store wrote and every byte of it is acknowledged. So a record that a crash cut is the last of its file.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections import OrderedDict, deque
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from tracefit.inputs.framing import LENGTH_BYTES
from tracefit.receive.runs import RunFolders
from tracefit.tables.disk import sync_folder

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from tracefit.receive.options import Rotation
    from tracefit.receive.spans import Sender, SenderSpans, SentForm

_RECORD_BYTES = 1 << 20
"""Messages are joined up to so many bytes: several in one frame compress better."""

_OPEN_FILES = 64
_KNOWN_FILES = 4096
"""Files, open or closed, that may get more records; as many as senders may be active."""
_NAMED_FILES = 1000
_ZSTD_LEVEL = 3  # the library's default

_FILE_NAMES: dict[SentForm, tuple[str, str]] = {"spans": ("traces", ".binpb"), "steps": ("fpm", ".jsonl.zst")}
"""Prefix and suffix of the names of files."""


def require_writable(root: Path) -> None:
    """Make a file in a folder, and remove it.

    Raises:
        OSError: The file cannot be made; permissions alone do not show a disk that is mounted read-only.
    """
    with tempfile.TemporaryFile(dir=root):
        pass


class _SenderFile(msgspec.Struct):
    """A file that gets the records of a sender; `durable_bytes` are on disk, `identity` is its device and inode."""

    path: Path
    begun_at: float
    identity: tuple[int, int]
    durable_bytes: int = 0

    def is_at_path(self) -> bool:
        """Return whether the path still names this file: a folder may have been removed, moved or replaced."""
        with contextlib.suppress(OSError):
            return _identity(self.path.stat()) == self.identity
        return False

    def reopened(self) -> int | None:
        """Return a new descriptor of the file; null if it is gone or has other bytes than this store wrote."""
        with contextlib.suppress(OSError):
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
            status = os.fstat(descriptor)
            if _identity(status) == self.identity and status.st_size == self.durable_bytes:
                return descriptor
            os.close(descriptor)
        return None


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


class TraceStore:
    """Writes spans to the files of their senders; used by one thread at a time.

    Args:
        root: The folder of run folders.
        rotation: When the next file of a sender begins.
        runs: Its run folders; without any configuration if not given.
        clock: Returns the time in seconds; tests pass their own.

    Attributes:
        files: The files begun last, at most a thousand.
        file_count: How many were begun.
        written_bytes: Bytes on disk.
    """

    def __init__(
        self,
        root: Path,
        *,
        rotation: Rotation,
        runs: RunFolders | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.root = root
        self.files: deque[Path] = deque(maxlen=_NAMED_FILES)
        self.file_count = 0
        self.written_bytes = 0
        self._rotation = rotation
        self._runs = runs or RunFolders(root, {})
        self._clock = clock
        self._known: OrderedDict[Sender, _SenderFile] = OrderedDict()  # the one written longest ago is first
        self._open: OrderedDict[Sender, int] = OrderedDict()  # descriptors, in the same order
        self._numbers = itertools.count(1)

    def commit(self, received: Iterable[SenderSpans]) -> dict[Sender, OSError]:
        """Write spans and wait until they are on disk; return the senders whose spans are not, with the reason."""
        by_sender: dict[Sender, list[bytes]] = {}
        for spans in received:
            by_sender.setdefault(spans.sender, []).append(spans.payload)
        # One sender whose disk is full or folder is gone must not cost the others their spans.
        failed = {}
        for sender, payloads in by_sender.items():
            data = b"".join(_encoded(payloads, sender.form))
            try:
                # A folder that is moved while it is written to: the spans go to a new one.
                if not (self._append(sender, data) or self._append(sender, data)):
                    raise FileNotFoundError(errno.ENOENT, "The folder is being moved or removed")
            except OSError as error:
                failed[sender] = error
        return failed

    def free_bytes(self) -> int | None:
        """Return the free bytes of the disk; null if the folder is gone."""
        with contextlib.suppress(OSError):
            return shutil.disk_usage(self.root).free
        return None

    def close(self) -> None:
        """Close every file; committed data are on disk already."""
        while self._open:
            os.close(self._open.popitem()[1])
        self._known.clear()

    def _append(self, sender: Sender, data: bytes) -> bool:
        """Write to the sender's file; return whether the path still names the file once the disk has the data."""
        file = self._file_of(sender)
        descriptor = self._open[sender]
        try:
            # A write may take a part, as on a disk that fills up.
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
            is_at_path = file.is_at_path()
        except OSError:
            self._abandon(sender, file)
            raise
        if not is_at_path:
            self._abandon(sender, file)
            return False
        file.durable_bytes += len(data)
        self.written_bytes += len(data)
        return True

    def _abandon(self, sender: Sender, file: _SenderFile) -> None:
        """Truncate the file to its acknowledged records and close it: after an error its state is unknown."""
        del self._known[sender]
        descriptor = self._open.pop(sender)
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, file.durable_bytes)
            if not file.durable_bytes:
                self.files.remove(file.path)
                self.file_count -= 1
                if file.is_at_path():
                    file.path.unlink()
        with contextlib.suppress(OSError):
            os.close(descriptor)

    def _file_of(self, sender: Sender) -> _SenderFile:
        """Return the file of a sender, and have it open: the one begun last, if it may get more, or a new one."""
        now = self._clock()
        file = self._known.pop(sender, None)
        descriptor = self._open.pop(sender, None)
        if file is not None:
            is_full = file.durable_bytes >= self._rotation.size_bytes
            is_full |= now - file.begun_at >= self._rotation.seconds
            if descriptor is not None and (is_full or not file.is_at_path()):
                os.close(descriptor)
                descriptor = None
            elif descriptor is None and not is_full:
                descriptor = file.reopened()
        if len(self._open) >= _OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        if file is None or descriptor is None:
            file, descriptor = self._new_file(self._runs.make(sender.service, sender.instance), sender.form, now)
        self._known[sender], self._open[sender] = file, descriptor
        if len(self._known) > _KNOWN_FILES:
            self._known.popitem(last=False)
        return file

    def _new_file(self, folder: Path, form: SentForm, now: float) -> tuple[_SenderFile, int]:
        """Begin a file; return it and its descriptor."""
        begin, end = _FILE_NAMES[form]
        while True:
            stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S.%f")[:-3]
            path = folder / f"{begin}-{stamp}Z-{next(self._numbers)}{end}"
            with contextlib.suppress(FileExistsError):
                # Exclusive: a file that is there is another receiver's. Not for everyone: request ids are in it.
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o640)
                try:
                    sync_folder(folder)  # without it the name may be gone after a crash, with all records
                except OSError:
                    os.close(descriptor)
                    path.unlink(missing_ok=True)
                    raise
                self.files.append(path)
                self.file_count += 1
                return _SenderFile(path, now, _identity(os.fstat(descriptor))), descriptor


def _encoded(payloads: Iterable[bytes], form: SentForm) -> Iterator[bytes]:
    """Yield zstd frames: all lines in one, messages joined to records with a length before each.

    Protobuf parses concatenated messages as one.
    """
    left = deque(payloads)
    if form == "steps":
        yield zstd.compress(b"".join(left), level=_ZSTD_LEVEL)
        return
    while left:
        record = bytearray(left.popleft())
        while left and len(record) + len(left[0]) <= _RECORD_BYTES:
            record += left.popleft()
        frame = zstd.compress(record, level=_ZSTD_LEVEL)
        yield len(frame).to_bytes(LENGTH_BYTES, "big") + frame
