"""Many short stretches of bytes, looked at in all of them at once, eight bytes at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence

    import msgspec

Positions = NDArray[np.int64]
Mask = NDArray[np.bool_]
Words = NDArray[np.uint64]

_WORD = 8
_ONE = np.uint64(1)
_TOPS = np.uint64(0x8080808080808080)
_FIRST_BYTES = np.array([(1 << 8 * n) - 1 for n in range(_WORD + 1)], np.uint64)
_HEX = np.frombuffer(b"".join(b"%02x" % byte for byte in range(256)), "V2")
_PADDED_CUT = 128
"""Bytes up to which stretches are cut out of rows as long as the longest of them."""


class NotTextError(Exception):
    """Bytes that should be UTF-8 are not."""


@dataclass(frozen=True, slots=True)
class Octets:
    """Bytes in memory.

    Attributes:
        data: The bytes, then zeros for what reads a little too far.
        array: The same as an array.
        words: The eight bytes that begin at each position, as one number, the first byte lowest.
        end: Where the zeros begin.
    """

    data: bytes
    array: NDArray[np.uint8]
    words: Words
    end: int

    @classmethod
    def of(
        cls, payloads: Sequence[bytes | msgspec.Raw], *, margin: int = 0
    ) -> tuple[Octets, Positions, Positions]:
        """Lay payloads, one at least, end to end; also return where each begins and ends, shape (n,) each.

        Args:
            payloads: The payloads.
            margin: How far beyond the end is read, at most.
        """
        data = b"".join([*payloads, bytes(max(margin, 2 * _PADDED_CUT))])
        stops = np.fromiter(map(len, payloads), np.int64, len(payloads)).cumsum()
        array = np.frombuffer(data, np.uint8)
        words: Words = np.ndarray((len(array) - _WORD + 1,), "<u8", array, strides=(1,))
        return (
            cls(data, array, words, int(stops[-1])),
            np.concatenate([np.zeros(1, np.int64), stops[:-1]]),
            stops,
        )

    def rows(self, starts: Positions, size: int) -> NDArray[np.void]:
        """Return stretches of one size, as they are; shape (n,)."""
        every = np.ndarray((len(self.array) - size + 1,), f"V{size}", self.array, strides=(1,))
        stretches: NDArray[np.void] = every[starts]
        return stretches

    def equal(self, starts: Positions, text: bytes) -> Mask:
        """Return which of the stretches that begin there begin with the text; shape (n,)."""
        if not text:
            return np.ones(len(starts), np.bool_)
        count = -(-len(text) // _WORD)
        found = self.rows(starts, count * _WORD).view("<u8").reshape(len(starts), count)
        wanted = np.frombuffer(text.ljust(count * _WORD, b"\0"), "<u8")
        same: Mask = (found[:, -1] & _FIRST_BYTES[len(text) - (count - 1) * _WORD]) == wanted[-1]
        for column in range(count - 1):
            same &= found[:, column] == wanted[column]
        return same

    def varints(self, starts: Positions, sizes: Positions, word: Words) -> tuple[Mask, Words]:
        """Read base-128 numbers of known sizes.

        Args:
            starts: Where to begin; shape (n,).
            sizes: Bytes of each; shape (n,).
            word: The words that begin there; shape (n,).

        Returns:
            Which of them are one number of at most 64 bits that ends where it should, and the numbers; shape (n,) each.
        """
        ends = ~word & _TOPS
        below_end = (ends & (~ends + _ONE)) - _ONE
        good = (np.bitwise_count(below_end) >> np.uint8(3)) + np.uint8(1) == sizes
        numbers = septets(word & below_end)
        longer = np.flatnonzero(sizes > _WORD)
        if len(longer):
            good[longer], high = self._ends_of_varints(starts[longer] + _WORD, sizes[longer] - _WORD)
            good[longer] &= ends[longer] == 0
            numbers[longer] |= high << np.uint64(7 * _WORD)
        return good, numbers

    def _ends_of_varints(self, starts: Positions, sizes: Positions) -> tuple[Mask, Words]:
        """Read what is behind the eighth byte of varints, which is no more than eight bits; see `varints`."""
        word = self.words[starts]
        is_one, is_two = word & np.uint64(0x80) == 0, word & np.uint64(0xFE80) == np.uint64(0x80)
        good = (is_one & (sizes == 1)) | (is_two & (sizes == 2))
        last_bit = np.where(is_two, word >> _ONE & np.uint64(0x80), np.uint64(0))
        return good, (word & np.uint64(0x7F)) | last_bit

    def hex(self, starts: Positions, size: int) -> NDArray[np.uint8]:
        """Return stretches of one size in lower-case hexadecimal digits, end to end."""
        return _HEX[self.rows(starts, size).view(np.uint8)].view(np.uint8)

    def cut(self, starts: Positions, sizes: Positions) -> NDArray[np.uint8]:
        """Return stretches end to end."""
        longest = int(sizes.max(initial=0))
        total = int(sizes.sum())
        if total == 0:
            return np.empty(0, np.uint8)
        if longest > _PADDED_CUT or longest * len(sizes) > 8 * total:
            ends = sizes.cumsum()
            return self.array[np.repeat(starts - ends + sizes, sizes) + np.arange(total)]
        padded = self.rows(starts, longest).view(np.uint8).reshape(len(starts), longest)
        if int(sizes.min()) == longest:
            return padded.reshape(-1)
        return padded[np.arange(longest) < sizes[:, None]]


def text_column(octets: NDArray[np.uint8], sizes: Positions, *, is_null: Mask | None = None) -> pl.Series:
    """Return texts that are end to end as a String column.

    Raises:
        NotTextError: If they are not UTF-8.
    """
    offsets = np.concatenate([[0], sizes.cumsum()]).astype(np.int64)
    validity = None if is_null is None else pa.py_buffer(np.packbits(~is_null, bitorder="little"))
    buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(octets)]
    array = pa.Array.from_buffers(pa.large_string(), len(sizes), buffers)
    if not (octets < 0x80).all():
        try:
            array.validate(full=True)
        except pa.ArrowInvalid as error:
            raise NotTextError from error
    # By way of a batch: polars makes a series of an array with pyarrow.compute, which takes long to load.
    return pl.DataFrame(pa.RecordBatch.from_arrays([array], ["text"])).to_series()


def septets(word: Words) -> Words:
    """Close the gaps that the top bits of eight bytes leave between the other seven of each."""
    pairs = (word & np.uint64(0x007F007F007F007F)) | ((word & np.uint64(0x7F007F007F007F00)) >> _ONE)
    fours = (pairs & np.uint64(0x00003FFF00003FFF)) | (
        (pairs & np.uint64(0x3FFF00003FFF0000)) >> np.uint64(2)
    )
    joined: Words = (fours & np.uint64(0x0FFFFFFF)) | (
        (fours & np.uint64(0x0FFFFFFF00000000)) >> np.uint64(4)
    )
    return joined
