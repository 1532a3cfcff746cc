"""Where the brackets of JSON text close: by column operations over its marks, whatever they enclose."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np

from tracefit.sources.limits import CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from tracefit.sources.window import Window

_QUOTE, _OPENS = ord('"'), 0x02
"""The bit that tells `{` and `[` from `}` and `]`."""
_IS_MARK = bytes(chr(byte) in '"{}[]' for byte in range(256))
_FIRST_BYTES, _DOUBLINGS = 4096, 8


@dataclass(frozen=True, slots=True)
class Contents:
    """Values in a row, as far as was looked.

    Attributes:
        ends: Where each array and object among them ends.
        stop: Where the bracket is that closes what they are in, or -1.
    """

    ends: NDArray[np.int64]
    stop: int


class Scanner:
    """Looks at a text piece by piece; what is inside of a string is no bracket."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False

    def scan(self, piece: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where brackets are, and the depth behind each.

        A piece must not end between a backslash and what it escapes.
        """
        plain = without_escapes(piece)
        marks = np.flatnonzero(np.frombuffer(plain.translate(_IS_MARK), np.bool_))
        kinds = np.frombuffer(plain, np.uint8)[marks]
        quotes = kinds == _QUOTE
        in_string = np.bitwise_xor.accumulate(quotes) ^ self._in_string
        outside = ~(quotes | in_string)
        depths = self._depth + np.cumsum(np.where(kinds[outside] & _OPENS, 1, -1))
        if len(marks):
            self._in_string = bool(in_string[-1])
        if len(depths):
            self._depth = int(depths[-1])
        return marks[outside], depths

    def ends(self, piece: bytes, base: int = 0) -> Contents:
        """Return where values end, and where what they are in does; positions count from `base` before the piece."""
        before = self._depth
        positions, depths = self.scan(piece)
        stops = np.flatnonzero(depths < 0)[:1]
        inside = slice(None, stops[0] if len(stops) else None)
        closing = (np.diff(depths, prepend=before) < 0) & (depths == 0)
        ends = base + 1 + positions[inside][closing[inside]]
        return Contents(ends, base + int(positions[stops[0]]) if len(stops) else -1)


def scan_contents(window: Window, limit: int, *, count: int | None = None) -> Contents:
    """Look at values in a row, which the window begins with, until what they are in is closed.

    Args:
        window: The text; nothing of it is taken.
        limit: Bytes to look at.
        count: Values to look for; all if not given.
    """
    scanner, found, position = Scanner(), [], 0
    for size in growing_sizes():
        piece = next_piece(window, position, min(size, limit - position))
        contents = scanner.ends(piece, position)
        found.append(contents.ends)
        position += len(piece)
        if contents.stop >= 0 or not piece or (count and sum(map(len, found)) >= count):
            break
    return Contents(np.concatenate(found), contents.stop)


def growing_sizes() -> Iterator[int]:
    """Yield how much to look at, again and again: little at first, for most values are short."""
    yield from (_FIRST_BYTES << doubling for doubling in range(_DOUBLINGS))
    yield from repeat(CHUNK_BYTES)


def without_escapes(piece: bytes) -> bytes:
    """Return a text, as long as it was, in which every quote begins or ends a string."""
    return piece.replace(rb"\\", b"  ").replace(rb"\"", b"  ") if b"\\" in piece else piece


def next_piece(window: Window, position: int, size: int) -> bytes:
    """Return bytes from a position of the buffer on; less at the end, and not half of an escape."""
    window.fill(position + size)
    piece = window.peek(position, position + size)
    backslashes = len(piece) - len(piece.rstrip(b"\\"))
    return piece[:-1] if backslashes % 2 else piece
