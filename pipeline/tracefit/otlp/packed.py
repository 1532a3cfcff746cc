"""Many short texts packed end to end into one buffer, and arithmetic on all of them at once.

All methods take arrays of positions in the buffer: numpy compares or converts the bytes at a hundred thousand positions
in the time Python needs for a thousand. Numbers are read eight bytes at a time, as one 64-bit word (the
first byte is the lowest); the bit tricks follow https://lemire.me/blog/2022/01/21/swar-explained-parsing-eight-digits/.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Positions = NDArray[np.int64]
    Mask = NDArray[np.bool_]
    Words = NDArray[np.uint64]

WORD = 8
LONGEST_TEXT = 4096
"""Bytes up to which a string is read in place; longer ones are left to the parser."""

_MARGIN = 256
"""Zeros after the last text, so that reading a word, a literal or a short string at its end stays inside the buffer."""

# A byte-wise constant times `_ONES` is that byte eight times over.
_ONES, _TOPS = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
_ONE_BYTE, _SHIFT_TO_BYTES = np.uint64(1), np.uint8(3)
_DIGIT_ZEROS, _ABOVE_NINE = _ONES * np.uint64(ord("0")), _ONES * np.uint64(0x80 - 10)
_PACKED_PAIRS = tuple(
    (np.uint64((base << width) + 1), np.uint64(width), np.uint64(mask))
    for base, width, mask in (
        (10, 8, 0x00FF00FF00FF00FF),
        (100, 16, 0x0000FFFF0000FFFF),
        (10_000, 32, 0x00000000FFFFFFFF),
    )
)
"""Factor, shift and mask that join adjacent digits, then pairs, then fours: the first of two is worth `base`."""
_POWERS_OF_TEN = np.array([10**n for n in range(WORD + 1)], np.uint64)


class PackedTexts(msgspec.Struct, frozen=True):
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
        # A view with a stride of one byte: words overlap, one begins at every position, and nothing is copied.
        words: Words = np.ndarray((len(array) - WORD + 1,), "<u8", array, strides=(1,))
        ends = sizes.cumsum()
        return cls(data, array, words, ends - sizes, ends)

    def windows(self, positions: Positions, size: int) -> NDArray[np.void]:
        """Return the `size` bytes at each position; shape (n,)."""
        every = np.ndarray((len(self.array) - size + 1,), f"V{size}", self.array, strides=(1,))
        windows: NDArray[np.void] = every[positions]
        return windows

    def equal(self, positions: Positions, literal: bytes, any_byte: tuple[int, ...] = ()) -> Mask:
        """Return at which positions a literal is; the bytes at its offsets `any_byte` may have any value."""
        count, size = len(positions), len(literal)
        if not size:
            return np.ones(count, np.bool_)
        windows = self.windows(positions, size).view(np.uint8).reshape(count, size)
        for offset in any_byte:
            windows[:, offset] = literal[offset]  # a copy: fancy indexing made `windows`
        # Nearly always all are equal, and comparing them as one string is by far the fastest test.
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
        # Numbers that fill the whole word may go on in the next one: its digits are appended.
        for at in (WORD, 2 * WORD):
            more = np.flatnonzero(sizes == at)
            if not len(more):
                break
            count, number = self._digits_of_word(positions[more] + at)
            numbers[more] = numbers[more] * _POWERS_OF_TEN[count] + number
            sizes[more] += count
        return sizes, numbers

    def _digits_of_word(self, positions: Positions) -> tuple[Positions, Words]:
        # "0" to "9" are 0x30 to 0x39, so that the exclusive or leaves 0 to 9 of digits, and more of all other bytes.
        word = self.words[positions] ^ _DIGIT_ZEROS
        # Adding 0x76 sets the top bit of bytes above 9, unless it was set before. A carry out of a byte goes
        # only to the bytes after it, which come after the first non-digit and do not count.
        count = _bytes_before_top((word + _ABOVE_NINE) | word)
        # Shift the digits to the end of the word: zeros come first, as leading zeros, and other bytes fall
        # off. A shift by all 64 bits is 0 in numpy.
        value = word << (np.uint64(64) - (count << 3).astype(np.uint64))
        # Each round multiplies and adds adjacent numbers at once: 8 digits to 4 pairs to 2 fours to 1 number.
        for factor, width, mask in _PACKED_PAIRS:
            value = ((value * factor) >> width) & mask
        return count, value

    def sizes_until(self, positions: Positions, ends: bytes, longest: int = LONGEST_TEXT) -> Positions:
        """Return how many bytes precede the next byte of `ends`; `longest` at most."""
        sizes = np.zeros(len(positions), np.int64)
        indexes = np.arange(len(positions))
        at = positions
        zeros = int(self.ends.max(initial=0))  # after the last text, where no value is found
        for _ in range(0, longest, WORD):
            word = self.words[at]
            marks = np.zeros(len(at), np.uint64)
            for end in ends:
                # Zero where the byte is `end`. Subtracting 1 then borrows into the top bit, as it does from
                # no other byte whose top bit was clear, at least up to the first match; later ones do not
                # count.
                other = word ^ (_ONES * np.uint64(end))
                marks |= (other - _ONES) & ~other
            count = _bytes_before_top(marks)
            sizes[indexes] += count
            more = np.flatnonzero(count == WORD)
            if not len(more):
                break
            # Go on with the texts that do not end in this word; those at the end of the buffer stay among its zeros.
            indexes, at = indexes[more], np.minimum(at[more] + WORD, zeros)
        return sizes

    def varints(self, positions: Positions) -> tuple[Positions, Words]:
        """Read base-128 numbers of protobuf.

        Returns:
            How many bytes each takes (0 if it is longer than ten), and the number; shape (n,) each.
        """
        word = self.words[positions]
        # The last byte of a number is the first with a clear top bit.
        sizes = _bytes_before_top(~word) + 1
        # Shift up and down again to clear the bytes after the number.
        keep = np.uint64(64) - (sizes.clip(max=WORD) << 3).astype(np.uint64)
        numbers = _septets((word << keep) >> keep)
        longer = np.flatnonzero(sizes > WORD)
        if len(longer):
            # At most two more bytes fit into 64 bits: 7 bits of the ninth, 1 bit of the tenth.
            first, second = (self.array[positions[longer] + WORD + n].astype(np.uint64) for n in (0, 1))
            two = first >= np.uint64(0x80)
            high = (first & np.uint64(0x7F)) | np.where(two, (second & _ONE_BYTE) << np.uint64(7), np.uint64(0))
            numbers[longer] |= high << np.uint64(7 * WORD)
            # A tenth byte above 1 would be a 65th bit, or an eleventh byte: no valid number.
            sizes[longer] = np.where(two, np.where(second < np.uint64(2), 10, 0), 9)
        return sizes, numbers

    def strings(self, positions: Positions, sizes: Positions) -> pl.Series | None:
        """Return the texts at some positions as a String column, or None if they are not UTF-8."""
        cut = self._cut(positions, sizes)
        offsets = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes, out=offsets[1:])
        array = pa.Array.from_buffers(pa.large_string(), len(sizes), [None, pa.py_buffer(offsets), pa.py_buffer(cut)])
        if (cut >= 0x80).any():  # pure ASCII, the usual case, is UTF-8 without a check
            try:
                array.validate(full=True)
            except pa.ArrowInvalid:
                return None
        # Through a record batch: polars converts a bare array with pyarrow.compute, which takes long to import.
        return pl.DataFrame(pa.RecordBatch.from_arrays([array], ["text"])).to_series()

    def _cut(self, positions: Positions, sizes: Positions) -> NDArray[np.uint8]:
        longest, total = int(sizes.max(initial=0)), int(sizes.sum())
        if longest > _MARGIN or longest * len(sizes) > 8 * total:
            # One index per byte of the result: its text's position plus its offset in the text.
            ends = sizes.cumsum()
            return self.array[np.repeat(positions - ends + sizes, sizes) + np.arange(total)]
        # Copying windows of the longest size, and then dropping the padding, is much faster than an index per byte.
        padded = self.windows(positions, max(longest, 1)).view(np.uint8).reshape(len(sizes), max(longest, 1))
        return padded[np.arange(max(longest, 1)) < sizes[:, None]]


def _bytes_before_top(marks: Words) -> Positions:
    """Return how many bytes precede the first one with its top bit set; eight without one."""
    tops = marks & _TOPS
    # `tops - 1` turns the zeros below the lowest set bit into ones; `& ~tops` keeps only those. Their number
    # is the index of that bit, 8 n + 7, and its eighth the number of whole bytes below. Without any bit all
    # 64 are ones: 8 bytes.
    return (np.bitwise_count(~tops & (tops - _ONE_BYTE)) >> _SHIFT_TO_BYTES).astype(np.int64)


def _septets(word: Words) -> Words:
    """Join the lower 7 bits of each of eight bytes, as protobuf stores a number, to one of 56 bits."""
    # Every other group moves down over the gap below it: 7-bit groups by 1 bit, 14-bit groups by 2, 28-bit ones by 4.
    pairs = (word & np.uint64(0x007F007F007F007F)) | ((word & np.uint64(0x7F007F007F007F00)) >> _ONE_BYTE)
    fours = (pairs & np.uint64(0x00003FFF00003FFF)) | ((pairs & np.uint64(0x3FFF00003FFF0000)) >> np.uint64(2))
    joined: Words = (fours & np.uint64(0x0FFFFFFF)) | ((fours & np.uint64(0x0FFFFFFF00000000)) >> np.uint64(4))
    return joined
