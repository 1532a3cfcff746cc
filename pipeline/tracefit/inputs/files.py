"""One input file: on disk, in a bucket, or copied from a pipe.

A `TraceFile` has a name for the user and a path to read from. It can be read any number of times and, if it is on the
local disk, sent to another process. Every failure to read it is a `UsageError` that names it.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import stat
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, cast
from urllib.parse import unquote

import msgspec
from msgspec.structs import replace

from tracefit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from pyarrow.fs import FileSystem

_REMOTE_BUFFER_BYTES = 8 << 20
"""Bytes of one request to an object store: each costs a round trip."""

_AT_ONCE = 8
"""Files fetched at a time: a small one takes little more than a round trip."""

_TICK_NS = 2 * 10**9
"""Two changes of a file may have the same time if less than this is between them: clocks of file systems are coarse."""

_URL_PATTERN = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")  # one slash is enough: `pathlib` drops the second


class TraceFile(msgspec.Struct, frozen=True):
    """A file that can be read from its beginning, any number of times.

    Attributes:
        name: The name shown to the user: a path, a URL without credentials, or `-`. Always valid UTF-8.
        path: Its path in its file system; for a pipe, the path of the copy on disk.
        size: Bytes as stored.
        modified_ns: Unix time of its last change, if known and long enough ago that a later change has another: in a
            bucket of its contents, on disk of its contents, name or rights, which nobody can set back.
        filesystem: Its file system; None is the local disk.
        location: The name that it has wherever files are compared: its absolute path without links, or its URL, with
            the host of an endpoint other than the provider's; null for bytes of a pipe, which are compared by content.
    """

    name: str
    path: str
    size: int
    modified_ns: int | None = None
    filesystem: FileSystem | None = None
    location: str | None = None

    @classmethod
    def local(cls, path: str | Path, *, name: str | None = None, location: str | None = None) -> TraceFile:
        """Return a file on the local disk.

        Args:
            path: Its path.
            name: The name shown to the user, if not the path; the file is then a copy, which has no location.
            location: Its location, if it is known: to follow links takes long.

        Raises:
            UsageError: If it does not exist, is not accessible, or is a folder, pipe or device.
        """
        text = str(path)
        location = location if location or name else canonical(text)
        name = name or display_name(text)
        try:
            status = os.stat(text)  # noqa: PTH116 - a fleet has thousands of files, and a path takes longer than the look
        except OSError as error:
            raise cannot_open(name, error) from error
        if not stat.S_ISREG(status.st_mode):  # a pipe would block, a device never end
            raise UsageError("cannot be opened (not a regular file)", where=name)
        is_settled = status.st_ctime_ns < time.time_ns() - _TICK_NS
        modified_ns = status.st_ctime_ns if is_settled else None
        return cls(name, text, status.st_size, modified_ns, location=location)

    @property
    def key(self) -> str:
        """The name that it has in a manifest: its location; of a pipe, a relative name, which is not a location."""
        return self.location or self.name.lstrip("/")

    def open(
        self, *, on_read: Callable[[int], object] | None = None, content_hash: ContentHash | None = None
    ) -> BinaryIO:
        """Open the file for reading.

        Args:
            on_read: Receives the number of bytes of the file that were read, once for each byte.
            content_hash: Receives the bytes as they are read.

        Raises:
            UsageError: If it cannot be opened; later, from `read`, if reading it fails.
        """
        try:
            if self.filesystem is None:
                raw: BinaryIO = io.FileIO(self.path)
            else:
                raw = self.filesystem.open_input_stream(self.path, compression=None, buffer_size=_REMOTE_BUFFER_BYTES)
        except OSError as error:
            raise cannot_open(self.name, error) from error
        return cast("BinaryIO", _Reading(raw, self.name, on_read, content_hash))


def canonical(path: str) -> str:
    """Return the absolute path without links of a file or folder on disk, as valid UTF-8 text."""
    return display_name(os.path.realpath(path))


def display_name(name: str) -> str:
    """Return a file name as valid UTF-8 text, which names on disk need not be."""
    return name.encode("utf-8", "backslashreplace").decode()


def split_url(text: str) -> tuple[str, str]:
    """Return the lower-case scheme of a URL and the text after the slashes; for a path or file URL, `file` and the
    path.

    Raises:
        UsageError: A file URL holds credentials.
    """
    url = _URL_PATTERN.match(text)
    # A local file may be called `s3:` too, and then it is meant.
    if url is None or os.path.lexists(text):
        return "file", text
    scheme, rest = url[1].lower(), text[url.end() :]
    if scheme != "file":
        return scheme, rest
    if "@" in rest.partition("/")[0]:
        raise UsageError("credentials do not belong in this URL", where="file://", hint="file:///FOLDER")
    return scheme, unquote(f"/{rest.removeprefix('localhost/')}")


def shown_url(scheme: str, rest: str) -> str:
    """Return the scheme and the host or bucket of a URL: credentials and options stay out of every message."""
    host = rest.partition("?")[0].partition("/")[0].rpartition("@")[2]
    # A colon: a port, or a secret key with a slash in it.
    return display_name(f"{scheme}://{'' if ':' in host else host}")


def unknown_url(scheme: str, rest: str) -> UsageError:
    """Return the error for a URL of another kind."""
    return UsageError(
        "is a URL of no known kind",
        where=shown_url(scheme, rest),
        hint="s3://, gs:// and file:// are known; a folder of such a name is ./NAME",
    )


def cannot_open(name: str, error: OSError) -> UsageError:
    """Return the error for a file that cannot be opened."""
    return UsageError(f"cannot be opened ({reason_of(error)})", where=name, hint="check the path and its permissions")


def reason_of(error: OSError) -> str:
    """Return the message of an operating system or an object store, short enough for one line."""
    text = error.strerror or str(error).partition("\n")[0]
    return text if len(text) <= 200 else f"{text[:199]}…"


def read_fully(raw: BinaryIO, size: int) -> bytes:
    """Read `size` bytes, or up to the end: one read of a pipe or a store may return fewer."""
    data = raw.read(size)
    while 0 < len(data) < size and (piece := raw.read(size - len(data))):
        data += piece
    return data


class ContentHash:
    """The SHA-256 of a file's bytes, taken while the file is read for another purpose: one pass instead of two."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._size = 0

    def take(self, offset: int, data: bytes) -> None:
        """Hash the bytes read at an offset, as far as they continue the bytes hashed so far."""
        if offset <= self._size < offset + len(data):
            self._digest.update(memoryview(data)[self._size - offset :])
            self._size = offset + len(data)

    def of(self, file: TraceFile) -> str:
        """Return the hash in hex, after reading the rest of the file.

        Raises:
            UsageError: If it cannot be read.
        """
        if self._size < file.size or not file.size:
            with file.open() as raw:
                if self._size:  # a stream of a bucket cannot be positioned, and is read from its beginning
                    raw.seek(self._size)
                while piece := raw.read(1 << 20):
                    self._digest.update(piece)
        return self._digest.hexdigest()


def content_hash_of(file: TraceFile) -> str:
    """Return the SHA-256 of a file's bytes, in hex.

    Raises:
        UsageError: If it cannot be read.
    """
    return ContentHash().of(file)


class Fetched(NamedTuple):
    """A copy of a file on disk, under the file's own name, and the SHA-256 of its bytes in hex."""

    file: TraceFile
    content_hash: str


def fetch(files: Iterable[TraceFile], folder: Path, on_read: Callable[[int], object] | None = None) -> list[Fetched]:
    """Copy remote files to a folder on disk; each is read once.

    Args:
        files: The files.
        folder: Where to put the copies.
        on_read: Receives the number of bytes read, from one thread at a time.

    Returns:
        The copies, in the order of the files.

    Raises:
        UsageError: A file cannot be read.
        OSError: A copy cannot be written.
    """
    lock = threading.Lock()

    def report(size: int) -> None:
        with lock:
            if on_read:
                on_read(size)

    def fetch_one(file: TraceFile) -> Fetched:
        target, content_hash = folder / uuid.uuid4().hex, ContentHash()
        with file.open(on_read=report, content_hash=content_hash) as stream, target.open("wb") as copy:
            shutil.copyfileobj(stream, copy, 1 << 20)
            fetched = replace(file, path=str(target), size=copy.tell(), filesystem=None)
        return Fetched(fetched, content_hash.of(fetched))

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(fetch_one, files))


class _Reading(io.RawIOBase):
    """An open file whose failures name it, and whose progress is reported."""

    def __init__(
        self,
        raw: BinaryIO,
        name: str,
        on_read: Callable[[int], object] | None,
        content_hash: ContentHash | None,
    ) -> None:
        super().__init__()
        self._raw = raw
        self._name = name
        self._on_read = on_read
        self._content_hash = content_hash
        self._position = self._farthest = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._raw.seekable()

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = self._raw.seek(offset, whence)
        return self._position

    def read(self, size: int = -1) -> bytes:
        try:
            data = self._raw.read(size)
        except OSError as error:
            raise UsageError(
                f"cannot be read beyond byte {self._position} ({reason_of(error)})", where=self._name
            ) from error
        if self._content_hash:
            self._content_hash.take(self._position, data)
        self._position += len(data)
        # Bytes that are read again after damage were reported already.
        if data and self._position > self._farthest:
            if self._on_read:
                self._on_read(self._position - self._farthest)
            self._farthest = self._position
        return data

    def close(self) -> None:
        self._raw.close()
        super().close()
