"""Attributes in protobuf as arrays: which key, what kind of value, and the value or where it is."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from tracefit.otlp.proto_level import Level
from tracefit.otlp.proto_walk import Messages, read_fields

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tracefit.otlp.octets import Mask, Octets, Positions, Words

EMPTY, STRING, BOOL, INT, DOUBLE = 0, 0x0A, 0x10, 0x18, 0x21
"""Kinds of values: the tags of the scalar fields of `AnyValue`, and 0 for none."""

_KEY, _VALUE = 0x0A, 0x12
_ROUNDS = 16


class Codes:
    """Numbers for texts that occur again and again, from 0 in the order they are first met."""

    def __init__(self, octets: Octets) -> None:
        self._octets = octets
        self._codes: dict[bytes, int] = {}

    @property
    def texts(self) -> list[bytes]:
        """The texts, by number."""
        return list(self._codes)

    def of(self, starts: Positions, sizes: Positions) -> Positions:
        """Return the number of each stretch; shape (n,).

        Those that are as the first are found at once, then those as the first of the rest, and so on: of stretches
        that are alike for a reason that is quickly done.
        """
        if self._all_alike(starts, sizes):
            text = self._text(int(starts[0]), int(sizes[0]))
            return np.full(len(starts), self._codes.setdefault(text, len(self._codes)))
        codes = np.empty(len(starts), np.int64)
        rest = np.arange(len(starts))
        for _ in range(_ROUNDS):
            if not len(rest):
                return codes
            text = self._text(int(starts[rest[0]]), int(sizes[rest[0]]))
            same = (sizes[rest] == len(text)) & self._octets.equal(starts[rest], text)
            code = self._codes.setdefault(text, len(self._codes))
            if same.all():
                codes[rest] = code
                return codes
            codes[rest[same]] = code
            rest = rest[~same]
        texts = map(self._text, starts[rest].tolist(), sizes[rest].tolist())
        codes[rest] = [self._codes.setdefault(text, len(self._codes)) for text in texts]
        return codes

    def of_text(self, text: bytes) -> int:
        """Return the number of one text."""
        return self._codes.setdefault(text, len(self._codes))

    def _all_alike(self, starts: Positions, sizes: Positions) -> bool:
        if not len(starts) or not sizes[0] or (sizes != sizes[0]).any():
            return False
        size = int(sizes[0])
        text = self._text(int(starts[0]), size)
        return self._octets.rows(starts, size).tobytes() == text * len(starts)

    def _text(self, start: int, size: int) -> bytes:
        return self._octets.data[start : start + size]


@dataclass(frozen=True, slots=True)
class Values:
    """Attribute values.

    Attributes:
        owner: Which span or event each is of; shape (n,), as all of these.
        kind: What it is.
        number: The number as its 64 bits; 0 or 1 for a boolean.
        start: Where a string begins.
        size: Its bytes.
    """

    owner: Positions
    kind: NDArray[np.uint8]
    number: Words
    start: Positions
    size: Positions

    def __len__(self) -> int:
        return len(self.owner)

    def __getitem__(self, rows: Positions | Mask | slice) -> Values:
        return Values(self.owner[rows], self.kind[rows], self.number[rows], self.start[rows], self.size[rows])

    @classmethod
    def concat(cls, parts: Sequence[Values]) -> Values:
        """Put values end to end."""
        if len(parts) == 1:
            return parts[0]
        names = [field.name for field in fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


@dataclass(frozen=True, slots=True)
class Attributes:
    """Attributes of spans or events.

    Attributes:
        key_start: Where the key of each begins; shape (n,), as all of these.
        key_size: The key's bytes.
        values: The values.
    """

    key_start: Positions
    key_size: Positions
    values: Values


def read_attributes(octets: Octets, owner: Positions, messages: Messages) -> Attributes:
    """Read `KeyValue` messages.

    Args:
        octets: The bytes.
        owner: What each attribute is of; shape (n,).
        messages: The attributes.

    Raises:
        UnusualRecordsError: If a value is none of the scalar kinds, or written in an unusual way.
    """
    key_start, key_stop, value_start, value_stop = _pairs(octets, messages)
    values = read_values(octets, owner, Messages(messages.record, value_start, value_stop))
    return Attributes(key_start, key_stop - key_start, values)


def _pairs(octets: Octets, messages: Messages) -> tuple[Positions, Positions, Positions, Positions]:
    """Return where keys begin and end, and values; shape (n,) each."""
    key_tag, key_start, key_stop, key_good = read_fields(octets, messages.start)
    middle = np.minimum(key_stop, messages.stop)
    tag, start, stop, good = read_fields(octets, middle)
    usual = key_good & good & (key_tag == _KEY) & (tag == _VALUE) & (stop == messages.stop)
    if not usual.all():
        other = np.flatnonzero(~usual)
        level = Level.of(octets, messages[other], (_KEY, _VALUE))
        key_start[other], key_sizes = level.stretches(_KEY)
        start[other], sizes = level.stretches(_VALUE)
        key_stop[other], stop[other] = key_start[other] + key_sizes, start[other] + sizes
    return key_start, key_stop, start, stop


def read_values(octets: Octets, owner: Positions, messages: Messages) -> Values:
    """Read `AnyValue` messages.

    Args:
        octets: The bytes.
        owner: What each value is of; shape (n,).
        messages: The values.

    Raises:
        UnusualRecordsError: If a value is none of the scalar kinds, or written in an unusual way.
    """
    size = messages.stop - messages.start
    kind = octets.array[messages.start]
    kind[size == 0] = EMPTY
    start = messages.start + 1
    size -= 1
    number = octets.words[start]
    ints_good, ints = octets.varints(start, size, number)
    good = ints_good & (kind == INT)
    np.copyto(number, ints, where=good)
    if not good.all():
        rest = np.flatnonzero(~good)
        part = messages[rest]
        start[rest], size[rest], number[rest], good[rest] = _other_values(
            octets, part, kind[rest], number[rest]
        )
        messages.refuse(~good)
    return Values(owner, kind, number, start, size)


def _other_values(
    octets: Octets, messages: Messages, kind: NDArray[np.uint8], number: Words
) -> tuple[Positions, Positions, Words, Mask]:
    """Read values of other kinds than integers; return starts, sizes, numbers, and which are as they should be."""
    start = messages.start + 1
    size = messages.stop - start
    good = ((kind == EMPTY) & (size < 0)) | ((kind == DOUBLE) & (size == np.int64(8)))
    bools = kind == BOOL
    number = np.where(bools, number & np.uint64(0xFF), number)
    good |= bools & (size == 1) & (number <= 1)
    texts = np.flatnonzero(kind == STRING)
    _, start[texts], stop, text_good = read_fields(octets, messages.start[texts])
    size[texts] = stop - start[texts]
    good[texts] = text_good & (stop == messages.stop[texts])
    return start, size, number, good
