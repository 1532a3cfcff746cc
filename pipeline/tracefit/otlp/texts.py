"""Many short texts as one array, looked at in all of them at once, eight bytes at a time.

The bit tricks are the classic ones for finding a byte in a word: a subtraction borrows into the top bit of the first byte
that is below a bound. Bytes behind it can be marked wrongly, so only the first mark is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tracefit.otlp.octets import NotTextError, Octets, text_column

if TYPE_CHECKING:
    from collections.abc import Sequence

    import msgspec
    import polars as pl

    from tracefit.otlp.octets import Positions, Words

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
_POWERS_OF_TEN = np.array([10**n for n in range(_WORD + 1)], np.uint64)


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts end to end.

    Attributes:
        octets: All of them, then zeros.
        begins: Where each text begins; shape (n,).
        ends: Where it ends; shape (n,).
    """

    octets: Octets
    begins: Positions
    ends: Positions

    @classmethod
    def of(cls, texts: Sequence[bytes | msgspec.Raw]) -> Texts:
        """Lay texts, one at least, end to end."""
        return cls(*Octets.of(texts, margin=max(map(len, texts)) + _MARGIN))

    @property
    def nowhere(self) -> int:
        """A position among the zeros, where no literal and no value is found."""
        return self.octets.end

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
        word = self.octets.words[positions] ^ _DIGIT_ZEROS
        count = _first_mark((word + _ABOVE_NINE) | word)
        return count, _number_of(word, count)

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
            word = self.octets.words[positions + at]
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
        try:
            return text_column(self.octets.cut(starts, sizes), sizes)
        except NotTextError:
            return None


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
