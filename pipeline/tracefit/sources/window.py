"""A stream of chunks seen through a buffer: look ahead, find, take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefit.sources.compression import DamagedStreamError, Gap

if TYPE_CHECKING:
    from collections.abc import Iterator


class Window:
    """The part of a stream that has been read and not yet taken.

    Attributes:
        offset: Bytes taken so far: where in the stream the buffer begins.
        damage: Why the stream ended before its end, once that is known.
        gaps: Where in the stream something is missing and why, as far as it was read; whoever reports them empties it.
    """

    def __init__(self, chunks: Iterator[bytes | Gap]) -> None:
        self._chunks = chunks
        self._buffer = bytearray()
        self._ended = False
        self.offset = 0
        self.damage: str | None = None
        self.gaps: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._buffer)

    def fill(self, size: int) -> bool:
        """Read until the buffer holds `size` bytes; return whether it does."""
        while len(self._buffer) < size and not self._ended:
            self._read()
        return len(self._buffer) >= size

    def _read(self) -> None:
        try:
            chunk = next(self._chunks)
            if isinstance(chunk, Gap):
                self.gaps.append((self.offset + len(self._buffer), chunk.reason))
            else:
                self._buffer += chunk
        except StopIteration:
            self._ended = True
        except DamagedStreamError as error:
            self._ended, self.damage = True, error.what

    def peek(self, start: int, stop: int) -> bytes:
        """Return buffered bytes, of the buffer's own counting; `fill` comes first."""
        return bytes(memoryview(self._buffer)[start:stop])

    def buffered(self) -> bytearray:
        """Return the buffer itself, to be read before the next call and not to be changed."""
        return self._buffer

    def find(self, byte: bytes, limit: int, start: int = 0) -> int:
        """Return where `byte` is first found from `start` and before `limit`, or -1."""
        searched = start
        while (index := self._buffer.find(byte, searched, limit)) < 0:
            searched = len(self._buffer)
            if searched >= limit or not self.fill(searched + 1):
                return -1
        return index

    def take(self, size: int) -> bytes:
        """Return the first `size` bytes of the buffer, or all there are, and move behind them."""
        taken = self.peek(0, size)
        self.skip(size)
        return taken

    def skip(self, size: int) -> None:
        """Move behind the first `size` bytes of the buffer."""
        size = min(size, len(self._buffer))
        del self._buffer[:size]
        self.offset += size

    def take_past(self, byte: bytes) -> Iterator[bytes]:
        """Yield what is before the next `byte`, or before the end, chunk by chunk, and move behind it.

        Raises:
            DamagedStreamError: Behind the last byte of a stream that ended before its end.
        """
        while self.fill(1):
            index = self._buffer.find(byte)
            yield self.take(index if index >= 0 else len(self._buffer))
            if index >= 0:
                self.skip(len(byte))
                return
        if self.damage:
            raise DamagedStreamError(self.damage)

    def drain(self) -> int:
        """Move to the end of the stream; return how many bytes were passed over."""
        start = self.offset
        while self.fill(1):
            self.skip(len(self._buffer))
        return self.offset - start
