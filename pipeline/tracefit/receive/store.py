"""Trace files on disk: a folder per sender, rotated files of length-prefixed zstd; all on disk when acknowledged.

`OUT/<service.name>/exp-config.yaml` makes a run of everything below it; its files are in a folder for each
service.instance.id, because the API process and the engine core of one server are two instances with newer
SDKs, and belong to one run. A record is four bytes of length, big-endian, and one zstd frame with a
`TracesData`; a file is never reopened, so that a record cut by a crash is the last of its file. Lines of
recorded steps are zstd frames one after another, without lengths.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import re
import shutil
import sys
import tempfile
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from tracefit.inputs.folders import clean_run_id
from tracefit.inputs.framing import LENGTH_BYTES
from tracefit.tables.disk import sync_folder, write_whole

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from tracefit.receive.options import Rotation
    from tracefit.receive.spans import Sender, SenderSpans, SentForm

_RECORD_BYTES = 1 << 20
"""Messages are joined up to so many bytes: several in one frame compress better."""

_OPEN_FILES = 64  # with up to 256 connections, fewer than the 1,024 descriptors that a process has by default
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_LIKE_OURS = re.compile(r".*(-[0-9a-f]{8}|\.(json|yaml))")
"""Names with a hash, as cleaned ones have it, and names of files that commands look for, such as manifest.json."""

_ZSTD_LEVEL = 3  # the library's default

_NAMES: dict[SentForm, tuple[str, str]] = {"spans": ("traces", ".binpb"), "steps": ("fpm", ".jsonl.zst")}
"""Prefix and suffix of the names of files."""


def folder_name(text: str) -> str:
    """Return the name of the folder for a service or an instance: the name itself, or a cleaned one with a hash of it.

    Names come from the network: no folder is outside the root, is hidden or has the name of a file, and two different
    names do not share a folder.
    """
    if _PLAIN_NAME.fullmatch(text) and not text.endswith(".") and not _LIKE_OURS.fullmatch(text):
        return text
    return f"{clean_run_id(text[:200])[:80]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def require_writable(root: Path) -> None:
    """Make a file in a folder, and remove it.

    Raises:
        OSError: The file cannot be made; permissions alone do not show a disk that is mounted read-only.
    """
    with tempfile.TemporaryFile(dir=root):
        pass


@dataclass(slots=True)
class _OpenFile:
    """A file that is being written; `durable_bytes` are on disk."""

    path: Path
    descriptor: int
    opened_at: float
    durable_bytes: int = 0

    def is_at_path(self) -> bool:
        """Return whether the path still names this file: a folder may have been removed, moved or replaced."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return os.path.samestat(self.path.stat(), os.fstat(self.descriptor))
        return False


class TraceStore:
    """Writes spans to the files of their senders; used by one thread at a time."""

    def __init__(self, root: Path, *, rotation: Rotation, configs: Mapping[str, bytes]) -> None:
        self.root = root
        self.files: list[Path] = []
        self.written_bytes = 0
        self._rotation = rotation
        self._configs = configs
        self._open: OrderedDict[Sender, _OpenFile] = OrderedDict()
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
            os.close(self._open.popitem()[1].descriptor)

    def _append(self, sender: Sender, data: bytes) -> bool:
        """Write to the sender's file; return whether the path still names the file once the disk has the data."""
        file = self._file_of(sender)
        try:
            # A write may take a part, as on a disk that fills up.
            view = memoryview(data)
            while view:
                view = view[os.write(file.descriptor, view) :]
            os.fsync(file.descriptor)
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

    def _abandon(self, sender: Sender, file: _OpenFile) -> None:
        """Truncate the file to its acknowledged records and close it: after an error its state is unknown."""
        del self._open[sender]
        with contextlib.suppress(OSError):
            os.ftruncate(file.descriptor, file.durable_bytes)
            if not file.durable_bytes:
                self.files.remove(file.path)
                if file.is_at_path():
                    file.path.unlink()
        with contextlib.suppress(OSError):
            os.close(file.descriptor)

    def _file_of(self, sender: Sender) -> _OpenFile:
        now = time.monotonic()
        file = self._open.get(sender)
        if file is not None:
            is_full = file.durable_bytes >= self._rotation.size_bytes
            is_full |= now - file.opened_at >= self._rotation.seconds
            if not is_full and file.is_at_path():
                self._open.move_to_end(sender)
                return file
            os.close(self._open.pop(sender).descriptor)
        elif len(self._open) >= _OPEN_FILES:
            os.close(self._open.popitem(last=False)[1].descriptor)
        self._open[sender] = self._new_file(self._folder_of(sender), sender.form, now)
        return self._open[sender]

    def _folder_of(self, sender: Sender) -> Path:
        """Return the folder of a sender; make it with its configuration if it is missing."""
        run = self.root / folder_name(sender.service)
        folder = run / folder_name(sender.instance) if sender.instance else run
        _make_folder(folder, self.root)
        for name, content in self._configs.items():
            # A user or an earlier start may have put one there.
            if not (run / name).exists():
                write_whole(run / name, content)
        return folder

    def _new_file(self, folder: Path, form: SentForm, now: float) -> _OpenFile:
        begin, end = _NAMES[form]
        while True:
            stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S.%f")[:-3]
            path = folder / f"{begin}-{stamp}Z-{next(self._numbers)}{end}"
            with contextlib.suppress(FileExistsError):
                # Exclusive: a file that is there is another receiver's. Not for everyone: request ids are in it.
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o640)
                sync_folder(folder)  # without it the name may be gone after a crash, with all records
                self.files.append(path)
                return _OpenFile(path, descriptor, now)


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


def _make_folder(folder: Path, root: Path) -> None:
    """Make a folder below the root such that it survives a crash."""
    folder.mkdir(parents=True, exist_ok=True)
    for made in (folder, *folder.parents):
        sync_folder(made.parent)
        if made == root:
            break
