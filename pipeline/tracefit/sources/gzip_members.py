"""Gzip files: members one behind another, by RFC 1952."""

from __future__ import annotations

import re
import zlib
from typing import TYPE_CHECKING, BinaryIO

from tracefit.sources.limits import CHUNK_BYTES
from tracefit.sources.units import Damage, matches

if TYPE_CHECKING:
    from collections.abc import Iterator

_WBITS = 31  # zlib's way to say: a gzip header and trailer, nothing else
_PIECE_BYTES = 256 << 10
_TRIAL_BYTES = 16 << 10
_MEMBER = re.compile(rb"\x1f\x8b\x08[\x00-\x1f]", re.DOTALL)


class GzipMembers:
    """How gzip is read."""

    magic = b"\x1f\x8b"
    unit = "gzip member"

    def read(self, raw: BinaryIO, start: int) -> Iterator[bytes]:
        """Yield what is in the members from `start` on; see `compression` for the rest of this class."""
        raw.seek(start)
        inflate, in_member, member_start, position = zlib.decompressobj(_WBITS), False, start, start
        while piece := raw.read(_PIECE_BYTES):
            position += len(piece)
            data = piece
            while data := data if in_member else data.lstrip(b"\0"):  # tape blocks are padded with zeros
                if not in_member:
                    in_member, member_start = True, position - len(data)
                saved = inflate.copy()
                try:
                    chunk = inflate.decompress(data, CHUNK_BYTES)
                except zlib.error as error:
                    yield from _until_error(saved, data)
                    raise Damage("gzip data is corrupt", member_start) from error
                yield chunk
                data = inflate.unconsumed_tail
                if inflate.eof:
                    data = inflate.unused_data
                    inflate, in_member = zlib.decompressobj(_WBITS), False
        if in_member:
            yield inflate.flush()
            raise Damage("gzip data is cut", member_start)

    def starts(self, raw: BinaryIO, start: int) -> Iterator[int]:
        """Yield where something begins like a member."""
        return matches(raw, start, _MEMBER, 4)

    def is_unit(self, raw: BinaryIO, start: int) -> bool:
        """Return whether something can be decompressed at `start`."""
        raw.seek(start)
        inflate = zlib.decompressobj(_WBITS)
        try:
            return bool(inflate.decompress(raw.read(_TRIAL_BYTES), _TRIAL_BYTES)) or inflate.eof
        except zlib.error:
            return False


def _until_error(inflate: zlib._Decompress, data: bytes) -> Iterator[bytes]:
    """Yield what `data` holds before its corrupt byte; zlib drops the output of the call that fails."""
    for index in range(len(data)):
        try:
            yield inflate.decompress(data[index : index + 1])
        except zlib.error:
            return
