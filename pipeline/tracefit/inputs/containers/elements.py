"""Cut JSON text of any length into the values at one depth of brackets, without parsing what is around them.

A dump that is one document becomes its items, one after another, so that no more than one of them is in memory.
Brackets are found by column operations over the bytes of a chunk. After an item that cannot be read, the next beginning
of an item is searched in its bytes: a lost quote or bracket costs no more than the items it is in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from tracefit.inputs.compression import Gap, Piece
from tracefit.options import IngestOptions, named

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Generator, Iterable, Iterator

UNREADABLE_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError, OverflowError)
"""Errors of items that cannot be read."""

_OPEN, _NESTING = 1, -1
_DEPTH_OF = np.zeros(256, np.int8)
_DEPTH_OF[[ord("{"), ord("[")]] = _OPEN
_DEPTH_OF[[ord("}"), ord("]")]] = _NESTING


class _Depths:
    """Follows strings and brackets through the chunks of a text."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = self._is_escaped = False

    def marks(self, chunk: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the positions of the brackets outside strings, whether each opens, and the depth after it."""
        data = np.frombuffer(chunk, np.uint8)
        quotes = self._quotes(data)
        kinds = _DEPTH_OF[data]
        at = np.flatnonzero(kinds)
        before = np.searchsorted(quotes, at) + self._in_string
        at = at[before & 1 == 0]
        self._in_string = bool((len(quotes) + self._in_string) & 1)
        kinds = kinds[at]
        depths = self._depth + np.cumsum(kinds, dtype=np.int64)
        # A bracket too many closes nothing.
        if len(depths):
            depths -= np.minimum(np.minimum.accumulate(depths), 0)
            self._depth = int(depths[-1])
        return at, kinds == _OPEN, depths

    def _quotes(self, data: np.ndarray) -> np.ndarray:
        quotes = np.flatnonzero(data == ord('"'))
        slashes = np.flatnonzero(data == ord("\\"))
        if not (len(slashes) or self._is_escaped):
            return quotes
        # In a run of backslashes, each second one is escaped itself.
        begins = np.flatnonzero(np.diff(slashes, prepend=-2) != 1)
        sizes = np.diff(np.append(begins, len(slashes)))
        ends = slashes[begins] + sizes if len(slashes) else slashes
        if self._is_escaped and len(slashes) and slashes[0] == 0:
            sizes[0] -= 1
        escaped = ends[sizes & 1 == 1]
        if self._is_escaped and not (len(slashes) and slashes[0] == 0):
            escaped = np.append(0, escaped)
        self._is_escaped = bool(len(escaped)) and int(escaped[-1]) == len(data)
        return quotes[~np.isin(quotes, escaped)]


class _Cutter:
    """Cuts one text; `convert` turns an item into what is yielded for it, or raises one of `UNREADABLE_JSON`."""

    def __init__(
        self,
        depth: int,
        begins: re.Pattern[bytes],
        most_bytes: int,
        convert: Callable[[bytes], Iterable[bytes | Gap]],
    ) -> None:
        self._at_depth, self._begins, self._most, self._convert = depth, begins, most_bytes, convert
        self._depths = _Depths()
        self._parts: list[bytes] | None = None  # of the item that is open
        self._size = 0
        self._is_skipped = False
        self._again = most_bytes  # bytes that may be searched again after damage

    def feed(self, chunk: bytes) -> Iterator[bytes | Gap]:
        while chunk:
            chunk = yield from self._cut(chunk)

    def end(self) -> Iterator[bytes | Gap]:
        while self._parts is not None and not self._is_skipped:
            item, self._parts = b"".join(self._parts), None
            rest = yield from self._failed(item, "record cut", b"")
            yield from self.feed(rest)

    def _cut(self, chunk: bytes) -> Generator[bytes | Gap, None, bytes]:
        at, opens, depths = self._depths.marks(chunk)
        is_edge = depths == self._at_depth + opens
        start = 0
        for position, is_open in zip(at[is_edge].tolist(), opens[is_edge].tolist(), strict=True):
            if is_open:
                if self._parts is None:
                    self._parts, self._size, self._is_skipped, start = [], 0, False, position
            elif self._parts is not None:
                item, self._parts = b"".join([*self._parts, chunk[start : position + 1]]), None
                if self._is_skipped:
                    continue
                try:
                    converted = self._convert(item)
                except UNREADABLE_JSON:
                    return (yield from self._failed(item, "not a record", chunk[position + 1 :]))
                yield from converted
        if self._parts is not None and not self._is_skipped:
            self._parts.append(chunk[start:])
            self._size += len(chunk) - start
            if self._size > self._most:
                item, self._parts = b"".join(self._parts), [b""]
                self._is_skipped = True
                limit = named(IngestOptions, "max_document_mib")
                return (
                    yield from self._failed(item, f"longer than {self._most >> 20} MiB: raise {limit} to read it", b"")
                )
        return b""

    def _failed(self, item: bytes, reason: str, rest: bytes) -> Generator[bytes | Gap, None, bytes]:
        """Yield the gap of an item that cannot be read; return the bytes to go on with."""
        match = self._begins.search(item, 1) if self._again > 0 else None
        self._again -= len(item)
        if match is None:
            yield Gap(reason, record=item)
        else:
            yield Gap("record cut: another begins inside", record=item[: match.start()])
        if match or not self._is_skipped:
            # The bytes behind it are outside an item.
            self._depths, self._parts = _Depths(self._at_depth), None
        return (item[match.start() :] if match else b"") + rest


def items(
    content: Iterator[Piece | Gap],
    depth: int,
    begins: re.Pattern[bytes],
    most_bytes: int,
    convert: Callable[[bytes], Iterable[bytes | Gap]],
) -> Iterator[Piece | Gap]:
    """Yield what the items of JSON texts, one or several, are converted to, in order; damage as gaps.

    Args:
        content: The texts.
        depth: Brackets around an item.
        begins: Beginning of an item, by which the next one is found after damage.
        most_bytes: Longest item.
        convert: Returns the lines of an item and its gaps, or raises one of `UNREADABLE_JSON`.
    """
    cutter = _Cutter(depth, begins, most_bytes, convert)
    yield from joined(_fed(cutter, content))


def _fed(cutter: _Cutter, content: Iterator[Piece | Gap]) -> Iterator[bytes | Gap]:
    for item in content:
        if isinstance(item, Gap):
            yield item
        else:
            yield from cutter.feed(item.data)
    yield from cutter.end()


_ELEMENT_BYTES = 256 << 10


def joined(lines: Iterable[bytes | Gap]) -> Iterator[Piece | Gap]:
    """Yield lines as pieces of content; a gap stays in its place."""
    parts: list[bytes] = []
    size = 0
    for line in lines:
        if isinstance(line, Gap) or size >= _ELEMENT_BYTES:
            if parts:
                yield Piece(b"".join(parts), is_stored=False)
            parts, size = [], 0
        if isinstance(line, Gap):
            yield line
        elif line:
            parts.append(line)
            size += len(line)
    if parts:
        yield Piece(b"".join(parts), is_stored=False)


def lines_in(content: Iterator[Piece | Gap], most_bytes: int) -> Iterator[bytes | Gap]:
    """Yield the lines of some content without their ends; a line that is too long is a gap."""
    rest: list[bytes] = []
    size, is_long = 0, False
    for item in content:
        if isinstance(item, Gap):
            yield item
            continue
        first, *others = item.data.split(b"\n")
        rest.append(first)
        size += len(first)
        if size > most_bytes:
            rest, is_long = rest[:1], True
        if not others:
            continue
        yield _long(rest, most_bytes) if is_long else b"".join(rest).removesuffix(b"\r")
        *whole, last = others
        for line in whole:
            yield line.removesuffix(b"\r")
        rest, size, is_long = [last], len(last), False
    if size:
        yield _long(rest, most_bytes) if is_long else b"".join(rest)


def _long(parts: list[bytes], most_bytes: int) -> Gap:
    return Gap(
        f"longer than {most_bytes >> 20} MiB: raise {named(IngestOptions, 'max_document_mib')} to read it",
        record=b"".join(parts)[:4096],
    )


def first_end(text: bytes) -> int:
    """Return where the first bracket of a JSON text is closed; 0 if it is not."""
    at, _, depths = _Depths().marks(text)
    ends = np.flatnonzero(depths == 0)
    return int(at[ends[0]]) + 1 if len(ends) else 0
