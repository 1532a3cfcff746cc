"""Many short texts end to end in one buffer, and arithmetic on all of them at once.

Everything here works on arrays of positions in the buffer: numpy compares or converts what lies at a hundred thousand
positions in the time Python needs for a thousand. Numbers are read eight bytes at a time, as one 64-bit word (the
first byte is the lowest); the bit tricks follow https://lemire.me/blog/2022/01/21/swar-explained-parsing-eight-digits/.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Sequence

    import msgspec
    from numpy.typing import NDArray

    Positions = NDArray[np.int64]
    Mask = NDArray[np.bool_]
    Words = NDArray[np.uint64]

WORD = 8
LONGEST_TEXT = 4096
"""Bytes up to which a string is read in place; longer ones are left to the parser."""

_MARGIN = 256
"""Zeros behind the last text: reading a word, a literal or a short string there stays inside the buffer."""

_ONES, _TOPS = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
_ONE, _SHIFT_TO_BYTES = np.uint64(1), np.uint8(3)
_DIGIT_ZEROS, _ABOVE_NINE = _ONES * np.uint64(ord("0")), _ONES * np.uint64(0x80 - 10)
_PAIRS = tuple(
    (np.uint64((base << width) + 1), np.uint64(width), np.uint64(mask))
    for base, width, mask in (
        (10, 8, 0x00FF00FF00FF00FF),
        (100, 16, 0x0000FFFF0000FFFF),
        (10_000, 32, 0x00000000FFFFFFFF),
    )
)
"""Factor, shift and mask that join neighbouring digits, then pairs, then fours: the first of two is worth `base`."""
_POWERS_OF_TEN = np.array([10**n for n in range(WORD + 1)], np.uint64)


@dataclass(frozen=True, slots=True)
class PackedTexts:
    """Texts end to end.

    Attributes:
        data: The bytes of all texts, then zeros.
        array: The same as an array.
        words: The word that begins at each position.
        starts: Where each text begins; shape (n,).
        ends: Where it ends; shape (n,).
    """

    data: bytes
    array: NDArray[np.uint8]
    words: Words
    starts: Positions
    ends: Positions

    @classmethod
    def of(cls, texts: Sequence[bytes | msgspec.Raw]) -> PackedTexts:
        """Put texts end to end."""
        sizes = np.fromiter(map(len, texts), np.int64, len(texts))
        data = b"".join([*texts, bytes(_MARGIN + int(sizes.max(initial=0)))])
        array = np.frombuffer(data, np.uint8)
        words: Words = np.ndarray((len(array) - WORD + 1,), "<u8", array, strides=(1,))
        ends = sizes.cumsum()
        return cls(data, array, words, ends - sizes, ends)

    @property
    def nowhere(self) -> int:
        """A position among the zeros, where no literal and no value is found."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def windows(self, positions: Positions, size: int) -> NDArray[np.void]:
        """Return the `size` bytes at each position; shape (n,)."""
        every = np.ndarray((len(self.array) - size + 1,), f"V{size}", self.array, strides=(1,))
        windows: NDArray[np.void] = every[positions]
        return windows

    def equal(self, positions: Positions, literal: bytes, any_byte: tuple[int, ...] = ()) -> Mask:
        """Return where the bytes are a literal; those at the offsets `any_byte` may be anything."""
        count, size = len(positions), len(literal)
        if not size:
            return np.ones(count, np.bool_)
        windows = self.windows(positions, size).view(np.uint8).reshape(count, size)
        for offset in any_byte:
            windows[:, offset] = literal[offset]
        # Nearly always all are alike, and comparing them as one string is much the fastest way to know.
        if windows.tobytes() == literal * count:
            return np.ones(count, np.bool_)
        mask: Mask = (windows == np.frombuffer(literal, np.uint8)).all(axis=1)
        return mask

    def digits(self, positions: Positions) -> tuple[Positions, Words]:
        """Read decimal digits, at most 24.

        Returns:
            How many digits there are at each position, and the number they make, modulo 2^64; shape (n,) each.
        """
        sizes, numbers = self._digits_of_word(positions)
        for at in (WORD, 2 * WORD):
            more = np.flatnonzero(sizes == at)
            if not len(more):
                break
            count, number = self._digits_of_word(positions[more] + at)
            numbers[more] = numbers[more] * _POWERS_OF_TEN[count] + number
            sizes[more] += count
        return sizes, numbers

    def _digits_of_word(self, positions: Positions) -> tuple[Positions, Words]:
        word = self.words[positions] ^ _DIGIT_ZEROS
        # A byte that is no digit has its top bit set after the addition, or had it before.
        count = _bytes_before_top((word + _ABOVE_NINE) | word)
        # The digits move to the top, behind zeros; a shift by all 64 bits is 0 in numpy.
        value = word << (np.uint64(64) - (count << 3).astype(np.uint64))
        for factor, width, mask in _PAIRS:
            value = ((value * factor) >> width) & mask
        return count, value

    def sizes_until(self, positions: Positions, ends: bytes, longest: int = LONGEST_TEXT) -> Positions:
        """Return how many bytes lie before the next byte that is one of `ends`; up to `longest`."""
        sizes = np.zeros(len(positions), np.int64)
        places = np.arange(len(positions))
        at = positions
        for _ in range(0, longest, WORD):
            word = self.words[at]
            marks = np.zeros(len(at), np.uint64)
            for end in ends:
                other = word ^ (_ONES * np.uint64(end))
                marks |= (other - _ONES) & ~other
            count = _bytes_before_top(marks)
            sizes[places] += count
            more = np.flatnonzero(count == WORD)
            if not len(more):
                break
            places, at = places[more], np.minimum(at[more] + WORD, self.nowhere)
        return sizes

    def varints(self, positions: Positions) -> tuple[Positions, Words]:
        """Read base-128 numbers of protobuf.

        Returns:
            How many bytes each takes (0 if it is longer than ten), and the number; shape (n,) each.
        """
        word = self.words[positions]
        sizes = _bytes_before_top(~word) + 1
        keep = np.uint64(64) - (sizes.clip(max=WORD) << 3).astype(np.uint64)
        numbers = _septets((word << keep) >> keep)
        longer = np.flatnonzero(sizes > WORD)
        if len(longer):
            # Two more bytes at most: 7 bits of the ninth, one of the tenth.
            first, second = (self.array[positions[longer] + WORD + n].astype(np.uint64) for n in (0, 1))
            two = first >= np.uint64(0x80)
            high = (first & np.uint64(0x7F)) | np.where(two, (second & _ONE) << np.uint64(7), np.uint64(0))
            numbers[longer] |= high << np.uint64(7 * WORD)
            sizes[longer] = np.where(two, np.where(second < np.uint64(2), 10, 0), 9)
        return sizes, numbers

    def strings(self, positions: Positions, sizes: Positions) -> pl.Series | None:
        """Return the bytes at some positions as a String column, or None if they are not UTF-8."""
        cut = self._cut(positions, sizes)
        offsets = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes, out=offsets[1:])
        array = pa.Array.from_buffers(
            pa.large_string(), len(sizes), [None, pa.py_buffer(offsets), pa.py_buffer(cut)]
        )
        if (cut >= 0x80).any():
            try:
                array.validate(full=True)
            except pa.ArrowInvalid:
                return None
        # By way of a batch: polars converts a bare array with pyarrow.compute, which takes long to import.
        return pl.DataFrame(pa.RecordBatch.from_arrays([array], ["text"])).to_series()

    def _cut(self, positions: Positions, sizes: Positions) -> NDArray[np.uint8]:
        longest, total = int(sizes.max(initial=0)), int(sizes.sum())
        if longest > _MARGIN or longest * len(sizes) > 8 * total:
            ends = sizes.cumsum()
            return self.array[np.repeat(positions - ends + sizes, sizes) + np.arange(total)]
        # Windows as long as the longest are copied much faster than bytes one by one.
        padded = self.windows(positions, max(longest, 1)).view(np.uint8).reshape(len(sizes), max(longest, 1))
        return padded[np.arange(max(longest, 1)) < sizes[:, None]]


def _bytes_before_top(marks: Words) -> Positions:
    """Return how many bytes come before the first that has its top bit set; eight if none has."""
    tops = marks & _TOPS
    return (np.bitwise_count(~tops & (tops - _ONE)) >> _SHIFT_TO_BYTES).astype(np.int64)


def _septets(word: Words) -> Words:
    """Close the gaps that the top bits of eight bytes leave between the other seven of each."""
    pairs = (word & np.uint64(0x007F007F007F007F)) | ((word & np.uint64(0x7F007F007F007F00)) >> _ONE)
    fours = (pairs & np.uint64(0x00003FFF00003FFF)) | (
        (pairs & np.uint64(0x3FFF00003FFF0000)) >> np.uint64(2)
    )
    joined: Words = (fours & np.uint64(0x0FFFFFFF)) | (
        (fours & np.uint64(0x0FFFFFFF00000000)) >> np.uint64(4)
    )
    return joined
