"""Many short texts as one array, looked at in all of them at once, eight bytes at a time.

The bit tricks are the classic ones for finding a byte in a word: a subtraction borrows into the top bit of the first byte
that is below a bound. Bytes behind it can be marked wrongly, so only the first mark is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence

Positions = NDArray[np.int64]
Mask = NDArray[np.bool_]
Words = NDArray[np.uint64]
Octets = bytes | msgspec.Raw

_WORD = 8
_MARGIN = 512
"""Bytes behind the last text that may be read, beyond the length of the longest text."""

_ONES = np.uint64(0x0101010101010101)
_TOPS = np.uint64(0x8080808080808080)
_DIGIT_ZEROS = _ONES * np.uint64(ord("0"))
_ABOVE_NINE = _ONES * np.uint64(0x76)
"""Added to a byte above nine, sets its top bit."""
_ONE, _SHIFT_TO_BYTES = np.uint64(1), np.uint64(3)
_ALL_BITS = 64
_PAIRS = tuple(
    (np.uint64((base << width) + 1), np.uint64(width), np.uint64(mask))
    for base, width, mask in (
        (10, 8, 0x00FF00FF00FF00FF),
        (100, 16, 0x0000FFFF0000FFFF),
        (10_000, 32, 0x00000000FFFFFFFF),
    )
)
"""Factor, shift and mask that join neighbouring digits, then pairs, then fours: the first of two is worth `base`."""
_FIRST_BYTES = np.array([(1 << 8 * n) - 1 for n in range(_WORD + 1)], np.uint64)
_POWERS_OF_TEN = np.array([10**n for n in range(_WORD + 1)], np.uint64)


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts end to end.

    Attributes:
        octets: All of them, then zeros.
        words: The eight bytes that begin at each position, as one number, the first byte lowest.
        begins: Where each text begins; shape (n,).
        ends: Where it ends; shape (n,).
        nowhere: A position among the zeros, where no literal and no value is found.
    """

    octets: NDArray[np.uint8]
    words: Words
    begins: Positions
    ends: Positions
    nowhere: int

    @classmethod
    def of(cls, texts: Sequence[Octets]) -> Texts:
        """Lay texts end to end."""
        sizes = np.fromiter(map(len, texts), np.int64, len(texts))
        ends = sizes.cumsum()
        octets = np.frombuffer(b"".join([*texts, bytes(int(sizes.max(initial=0)) + _MARGIN)]), np.uint8)
        words: Words = np.ndarray((len(octets) - _WORD + 1,), "<u8", octets, strides=(1,))
        return cls(octets, words, ends - sizes, ends, int(sizes.sum()))

    def have(self, positions: Positions, literal: bytes) -> Mask:
        """Return at which of the positions the literal stands."""
        count, size = len(positions), len(literal)
        every = np.ndarray((len(self.octets) - size + 1,), f"V{size}", self.octets, strides=(1,))
        stretches = every[positions]
        equal = stretches.view(np.uint8).reshape(count, size) == np.frombuffer(literal, np.uint8)
        # Row by row is slow, and in the usual case one look at all of them is enough.
        return np.ones(count, np.bool_) if equal.all() else np.asarray(equal.all(axis=1))

    def digits(self, positions: Positions, longest: int) -> tuple[Positions, Words]:
        """Read decimal digits.

        Args:
            positions: Where to begin; shape (n,).
            longest: How many digits to read at least, if there are so many.

        Returns:
            How many digits there are, and the number they make, modulo 2^64; shape (n,) each.
        """
        sizes, numbers = self._digits_of_word(positions)
        for at in range(_WORD, longest, _WORD):
            goes_on = sizes == at
            if not goes_on.any():
                break
            count, number = self._digits_of_word(positions + at)
            count = np.where(goes_on, count, 0)
            numbers = numbers * _POWERS_OF_TEN[count] + np.where(goes_on, number, 0)
            sizes = sizes + count
        return sizes, numbers

    def _digits_of_word(self, positions: Positions) -> tuple[Positions, Words]:
        word = self.words[positions] ^ _DIGIT_ZEROS
        count = _first_mark((word + _ABOVE_NINE) | word)
        return count, _number_of(word, count)

    def varints(self, starts: Positions, sizes: Positions) -> tuple[Mask, Words]:
        """Read base-128 numbers of known sizes, at most ten bytes.

        Args:
            starts: Where to begin; shape (n,).
            sizes: Bytes of each, at least 1; shape (n,).

        Returns:
            Which of them end where they should and not before, and the numbers; shape (n,) each.
        """
        low = np.minimum(sizes, _WORD)
        word = self.words[starts]
        good = (word & _TOPS & _FIRST_BYTES[low]) == (_TOPS & _FIRST_BYTES[np.minimum(sizes - 1, _WORD)])
        numbers = _septets(word & _FIRST_BYTES[low])
        if (sizes > _WORD).any():
            high = np.maximum(sizes - _WORD, 0)
            word = self.words[starts + _WORD] & _FIRST_BYTES[high]
            good &= ((word & _TOPS) == (_TOPS & _FIRST_BYTES[np.maximum(high - 1, 0)])) & (
                word >> np.uint64(9) == 0
            )
            numbers |= _septets(word) << np.uint64(7 * _WORD)
        return good, numbers

    def sizes_of_strings(self, positions: Positions, longest: int) -> Positions:
        """Return how many bytes are before the next quote, backslash or control character, up to `longest`."""
        return self._sizes_until(positions, longest, b'"\\', 0x20)

    def sizes_of_bare(self, positions: Positions, longest: int) -> Positions:
        """Return how many bytes are before the next comma, bracket, space or control character."""
        return self._sizes_until(positions, longest, b",}]", 0x21)

    def _sizes_until(self, positions: Positions, longest: int, ends: bytes, bound: int) -> Positions:
        sizes = np.zeros(len(positions), np.int64)
        goes_on = np.ones(len(positions), np.bool_)
        for at in range(0, longest, _WORD):
            word = self.words[positions + at]
            marks = (word - _ONES * np.uint64(bound)) & ~word
            for end in ends:
                other = word ^ (_ONES * np.uint64(end))
                marks |= (other - _ONES) & ~other
            count = np.where(goes_on, _first_mark(marks), 0)
            sizes += count
            goes_on = count == _WORD
            if not goes_on.any():
                break
        return sizes

    def cut(self, starts: Positions, sizes: Positions) -> pl.Series | None:
        """Return stretches of the texts as a String column, or None if they are not UTF-8."""
        offsets = np.concatenate([[0], sizes.cumsum()])
        indices = np.repeat(starts - offsets[:-1], sizes) + np.arange(offsets[-1])
        data = self.octets[indices]
        array = pa.Array.from_buffers(
            pa.large_string(), len(starts), [None, pa.py_buffer(offsets), pa.py_buffer(data)]
        )
        try:
            array.validate(full=True)
        except pa.ArrowInvalid:
            return None
        # By way of a batch: polars makes a series of an array with pyarrow.compute, which takes long to load.
        return pl.DataFrame(pa.RecordBatch.from_arrays([array], ["text"])).to_series()


def _first_mark(marks: Words) -> Positions:
    """Return how many bytes are below the first that has its top bit set; eight if none has."""
    tops = marks & _TOPS
    return (np.bitwise_count(~tops & (tops - _ONE)) >> _SHIFT_TO_BYTES).astype(np.int64)


def _number_of(word: Words, count: Positions) -> Words:
    """Return the number that the first `count` bytes of each word make, each byte a digit's value."""
    # The digits move to the top, behind zeros; a shift by all 64 bits is 0 in numpy.
    value = word << (_ALL_BITS - (count << 3)).astype(np.uint64)
    for factor, width, mask in _PAIRS:
        value = ((value * factor) >> width) & mask
    return value


def _septets(word: Words) -> Words:
    """Close the gaps that the top bits of eight bytes leave between the other seven of each."""
    pairs = (word & np.uint64(0x007F007F007F007F)) | ((word & np.uint64(0x7F007F007F007F00)) >> np.uint64(1))
    fours = (pairs & np.uint64(0x00003FFF00003FFF)) | (
        (pairs & np.uint64(0x3FFF00003FFF0000)) >> np.uint64(2)
    )
    joined: Words = (fours & np.uint64(0x0FFFFFFF)) | (
        (fours & np.uint64(0x0FFFFFFF00000000)) >> np.uint64(4)
    )
    return joined
