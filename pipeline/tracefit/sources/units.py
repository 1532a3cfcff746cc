"""What the kinds of compression have in common: damage, the bound on expansion, and the search for beginnings."""

from __future__ import annotations

from typing import TYPE_CHECKING, BinaryIO

from tracefit.errors import TracefitError
from tracefit.sources.limits import FREE_EXPANSION_BYTES, MAX_EXPANSION

if TYPE_CHECKING:
    import re
    from collections.abc import Iterator


_SEARCH_BYTES = 64 << 10


class Damage(TracefitError):  # noqa: N818 - what is damaged is the data
    """A compressed unit cannot be decompressed to its end.

    Args:
        what: What is wrong with it.
        unit_start: Where the unit begins in the file.
        is_final: Nothing behind it is to be read either.
    """

    def __init__(self, what: str, unit_start: int, *, is_final: bool = False) -> None:
        super().__init__(what)
        self.unit_start = unit_start
        self.is_final = is_final


def bounded(raw: BinaryIO, start: int, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Pass chunks on until they are out of all proportion to what was read of the file since `start`.

    Raises:
        Damage: If they are.
    """
    produced = 0
    for chunk in chunks:
        yield chunk
        produced += len(chunk)
        if produced > FREE_EXPANSION_BYTES and produced > MAX_EXPANSION * (raw.tell() - start):
            what = f"decompression bomb: more than {MAX_EXPANSION} bytes for each compressed byte"
            raise Damage(what, start, is_final=True)


def matches(raw: BinaryIO, start: int, pattern: re.Pattern[bytes], longest: int) -> Iterator[int]:
    """Yield where in a file, from `start` on, a pattern of at most `longest` bytes matches."""
    data = b""
    while True:
        raw.seek(start + len(data))
        piece = raw.read(_SEARCH_BYTES)
        data += piece
        for found in pattern.finditer(data):
            yield start + found.start()
        if not piece:
            return
        kept = min(longest - 1, len(data))
        start += len(data) - kept
        data = data[len(data) - kept :]
