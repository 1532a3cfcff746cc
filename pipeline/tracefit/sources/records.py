"""What this room hands on: one frame per record of a file, or why a stretch of the file is none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from tracefit.sources.excerpt import binary_excerpt, excerpt

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Encoding = Literal["json", "protobuf", "msgpack"]


@dataclass(frozen=True, slots=True)
class Frame:
    """The bytes of one record: one export request, or one document of a file that was saved by hand.

    Attributes:
        source_file: The file as the caller named it; `-` is standard input.
        offset: Where the payload begins, in bytes of the decompressed file.
        payload: The record without its framing.
        encoding: How the payload is to be read.
        show_values: Whether the excerpt of a reject may show what is in it.
    """

    source_file: str
    offset: int
    payload: bytes
    encoding: Encoding
    show_values: bool = False

    def reject(self, reason: str, start: int = 0, stop: int | None = None) -> Reject:
        """Return the reject of this record, or of a stretch of it."""
        payload = self.payload[start:stop]
        return Reject(
            self.source_file,
            self.offset + start,
            len(payload),
            reason,
            excerpt(payload, self.encoding, show_values=self.show_values),
        )


@dataclass(frozen=True, slots=True)
class Reject:
    """A record that could not be read.

    `length` is in bytes of the decompressed file; `excerpt` shows structure and keys, and values only if that was asked
    for. One that stands for many, which are too many to list, has their `count`.
    """

    source_file: str
    source_offset: int
    length: int
    reason: str
    excerpt: str = ""
    count: int = 1


@dataclass(frozen=True, slots=True)
class Source:
    """Where records come from, and what may be shown of them."""

    name: str
    show_values: bool = False

    def frame(self, offset: int, payload: bytes, encoding: Encoding) -> Frame:
        """Return a record of the file."""
        return Frame(self.name, offset, payload, encoding, self.show_values)

    def reject(
        self, offset: int, length: int, reason: str, begins: bytes, encoding: Encoding = "json"
    ) -> Reject:
        """Return the reject of a stretch of which `begins` is the beginning, or all."""
        if encoding != "json" and not self.show_values:
            return Reject(self.name, offset, length, reason, binary_excerpt(length))
        return Reject(
            self.name, offset, length, reason, excerpt(begins, encoding, show_values=self.show_values)
        )


def joined(items: Iterable[Frame | Reject]) -> Iterator[Frame | Reject]:
    """Yield the same items; rejects of stretches that touch are one, for they are one damage."""
    held: Reject | None = None
    for item in items:
        if held and isinstance(item, Reject) and held.source_offset + held.length == item.source_offset:
            held = replace(held, length=held.length + item.length)
            continue
        if held:
            yield held
            held = None
        if isinstance(item, Reject):
            held = item
        else:
            yield item
    if held:
        yield held
