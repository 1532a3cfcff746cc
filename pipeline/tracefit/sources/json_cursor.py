"""JSON text read value by value through a window: nothing is held but what is asked for."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from tracefit.errors import TracefitError
from tracefit.sources.json_scan import Scanner, growing_sizes, next_piece, without_escapes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracefit.sources.window import Window

SPACE = b" \t\r\n"
_MAX_KEY_BYTES = 1 << 10
_PEEKED_BYTES = 256
_SCALAR = re.compile(rb"[-+.\w]+")


class JsonDamageError(TracefitError):
    """The text makes no sense from the next byte of the window on."""


class JsonCursor:
    """A place in JSON text. What is read is taken from the window; what is wrong raises `JsonDamageError`."""

    def __init__(self, window: Window) -> None:
        self.window = window

    def next(self) -> bytes:
        """Move behind white space; return the byte there, or nothing at the end."""
        while self.window.fill(1):
            text = self.window.peek(0, _PEEKED_BYTES)
            rest = text.lstrip(SPACE)
            self.window.skip(len(text) - len(rest))
            if rest:
                return rest[:1]
        return b""

    def expect(self, byte: bytes) -> None:
        """Move behind a byte that has to come next."""
        if self.next() != byte:
            raise self.damage()
        self.window.skip(1)

    def ends(self, byte: bytes) -> bool:
        """Move behind a byte that ends a row of values, or behind the comma before the next."""
        if self.next() == byte:
            self.window.skip(1)
            return True
        self.expect(b",")
        return False

    def damage(self) -> JsonDamageError:
        """Return what to say of text that does not go on as JSON does."""
        return JsonDamageError("not JSON" if self.window.fill(1) else self.window.damage or "document is cut")

    def object_keys(self) -> Iterator[str]:
        """Yield the keys of an object; the value of each is to be read before the next."""
        self.expect(b"{")
        if self.next() == b"}":
            self.window.skip(1)
            return
        yield self._key()
        while not self.ends(b"}"):
            yield self._key()

    def _key(self) -> str:
        if self.next() != b'"':
            raise self.damage()
        text = self.value(_MAX_KEY_BYTES)
        self.expect(b":")
        try:
            return "" if text is None else msgspec.json.decode(text, type=str)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise JsonDamageError("not JSON") from error

    def value(self, limit: int) -> bytes | None:
        """Read a value of any size; return its text, None if it is longer than the limit."""
        first = self.next()
        kept = bytearray()
        for part in self._nested() if first in (b"{", b"[") else self._plain(first):
            if len(kept) <= limit:
                kept += part
        return bytes(kept) if len(kept) <= limit else None

    def _nested(self) -> Iterator[bytes]:
        scanner = Scanner()
        for size in growing_sizes():
            piece = next_piece(self.window, 0, size)
            positions, depths = scanner.scan(piece)
            closed = np.flatnonzero(depths <= 0)[:1]
            if len(closed):
                yield self.window.take(int(positions[closed[0]]) + 1)
                return
            if not piece:
                raise self.damage()
            yield self.window.take(len(piece))

    def _plain(self, first: bytes) -> Iterator[bytes]:
        if first == b'"':
            yield self.window.take(1)
            yield from self._rest_of_string()
            return
        scalar = _SCALAR.match(self.window.peek(0, _PEEKED_BYTES))
        if not scalar:
            raise self.damage()
        while scalar:
            yield self.window.take(scalar.end())
            self.window.fill(1)
            scalar = _SCALAR.match(self.window.peek(0, _PEEKED_BYTES))

    def _rest_of_string(self) -> Iterator[bytes]:
        for size in growing_sizes():
            piece = next_piece(self.window, 0, size)
            if not piece:
                raise self.damage()
            end = without_escapes(piece).find(b'"')
            yield self.window.take(end + 1 if end >= 0 else len(piece))
            if end >= 0:
                return
