"""One input file, wherever it lies: on disk, behind a URL, or kept from a pipe."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from tracefit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyarrow.fs import FileSystem

    from tracefit.sources.sniff import Contents

_REMOTE_BUFFER_BYTES = 8 << 20
"""Bytes asked of an object store at a time: each request costs a round trip."""


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A file that can be read from its beginning, any number of times; it may be handed to another process.

    Attributes:
        name: What the user knows it by: a path, a URL without credentials, or `-`. Always valid UTF-8.
        path: Where it is in its file system; for what came through a pipe, the copy on disk.
        size: Bytes as stored.
        modified_ns: Unix time of its last change, where that is known.
        filesystem: The file system it is in; None is the local disk.
        contents: What its head shows, where somebody has looked already.
    """

    name: str
    path: str
    size: int
    modified_ns: int | None = None
    filesystem: FileSystem | None = None
    contents: Contents | None = field(default=None, compare=False)

    @classmethod
    def local(cls, path: str | Path, *, name: str | None = None) -> TraceFile:
        """Return a file on the local disk.

        Args:
            path: Where it is.
            name: What to call it, if not by its path.

        Raises:
            UsageError: If it is not there or may not be looked at.
        """
        text = str(path)
        try:
            status = Path(text).stat()
        except OSError as error:
            raise cannot_open(name or shown(text), error) from error
        return cls(name or shown(text), text, status.st_size, status.st_mtime_ns)

    def open(self, *, on_read: Callable[[int], object] | None = None) -> BinaryIO:
        """Open the file for reading.

        Args:
            on_read: Told of the bytes of the file that were read, once each.

        Raises:
            UsageError: If it cannot be opened; later, from `read`, if reading it fails.
        """
        try:
            raw = self._opened()
        except OSError as error:
            raise cannot_open(self.name, error) from error
        return cast("BinaryIO", _Reading(raw, self.name, on_read))

    def _opened(self) -> BinaryIO:
        if self.filesystem is None:
            return Path(self.path).open("rb")
        stream = self.filesystem.open_input_stream(
            self.path, compression=None, buffer_size=_REMOTE_BUFFER_BYTES
        )
        return cast("BinaryIO", stream)


def shown(name: str) -> str:
    """Return a name as text that can be written anywhere: file names need not be valid UTF-8."""
    return name.encode("utf-8", "backslashreplace").decode()


def cannot_open(name: str, error: OSError) -> UsageError:
    """Return the error for a file that cannot be opened."""
    return UsageError(
        f"cannot be opened ({reason_of(error)})", where=name, hint="check the path and its permissions"
    )


def reason_of(error: OSError) -> str:
    """Return what an operating system or an object store says, short enough for one line."""
    text = error.strerror or str(error).partition("\n")[0]
    return text if len(text) <= 200 else f"{text[:199]}…"


class _Reading(io.RawIOBase):
    """A file whose failures name it, and whose progress is told."""

    def __init__(self, raw: BinaryIO, name: str, on_read: Callable[[int], object] | None) -> None:
        super().__init__()
        self._raw = raw
        self._name = name
        self._on_read = on_read
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
        self._position += len(data)
        if data and self._position > self._farthest:
            if self._on_read:
                self._on_read(self._position - self._farthest)
            self._farthest = self._position
        return data

    def close(self) -> None:
        self._raw.close()
        super().close()
