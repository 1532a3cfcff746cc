"""The protobuf wire format, walked in many messages at once.

A message is a sequence of fields, of which each says where the next begins. So the messages of one level are walked in
step: the first field of all of them, then the second of those that have one, and so on. When few are left, such as spans
with hundreds of events, they are walked one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tracefit.otlp.model import TooMuchError
from tracefit.otlp.octets import septets
from tracefit.sources import wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracefit.otlp.octets import Mask, Octets, Positions, Words

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5

MAX_FIELDS = 600_000
"""Fields of one level that are held at a time, of more than one record: those of good spans are longer than two bytes."""

_FEW = 256
"""Messages that are walked faster one by one than in step."""

_ONE = np.uint64(1)
_TOP = np.uint8(0x80)
_SHORT_BYTES = np.uint8(0x87)
"""Of a tag of one byte: its top bit, which is none, and its wire type."""

_VISIBLE_ENDS = np.uint64(0x808080808080)
_LONGEST_NUMBER, _LONGEST_SIZE = 6, 4
_TYPE_SIZES = np.array([0, 8, 0, -1, -1, 4, -1, -1], np.int64)


Tags = NDArray[np.uint16]


class UnusualRecordsError(Exception):
    """Records that the walk leaves to the general decoder.

    They need not be wrong: whatever is rare is unusual too.

    Attributes:
        records: Their numbers, perhaps more than once.
    """

    def __init__(self, records: Positions) -> None:
        super().__init__()
        self.records = records


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages of one level.

    Attributes:
        record: The number of the record that each is in; shape (n,), as all of these.
        start: Where it begins.
        stop: Where it ends.
    """

    record: Positions
    start: Positions
    stop: Positions

    def __len__(self) -> int:
        return len(self.start)

    def __getitem__(self, rows: Positions | Mask | slice) -> Messages:
        return Messages(self.record[rows], self.start[rows], self.stop[rows])

    @classmethod
    def concat(cls, parts: Sequence[Messages]) -> Messages:
        """Put messages end to end."""
        record, start, stop = (
            np.concatenate([getattr(part, name) for part in parts]) for name in ("record", "start", "stop")
        )
        return cls(record, start, stop)

    def refuse(self, unusual: Mask) -> None:
        """Refuse the records of unusual messages.

        Raises:
            UnusualRecordsError: If there are any.
        """
        if unusual.any():
            raise UnusualRecordsError(self.record[unusual])

    def refuse_at(self, owner: Positions, unusual: Mask) -> None:
        """Refuse the records of those messages of which something is unusual.

        Raises:
            UnusualRecordsError: If there are any.
        """
        if unusual.any():
            raise UnusualRecordsError(self.record[owner[unusual]])


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of many messages. Those of one message are in its order.

    Attributes:
        owner: Which message each is a field of; shape (n,), as all of these.
        place: How many fields of that message are before it.
        tag: Its number and wire type, as on the wire.
        start: Where its content begins, after the size if it has one.
        stop: Where that ends.
    """

    owner: Positions
    place: Positions
    tag: Tags
    start: Positions
    stop: Positions


def walk(octets: Octets, messages: Messages) -> Fields:
    """Find the fields of messages.

    Raises:
        UnusualRecordsError: If some are not well-formed, or have groups, long tags or long numbers.
        TooMuchError: If there are too many fields, and more records than one.
    """
    unusual = np.zeros(len(messages), np.bool_)
    owners, fields = [], []
    owner = np.flatnonzero(messages.start < messages.stop)
    position, limit = messages.start[owner], messages.stop[owner]
    count = 0
    while len(owner) > _FEW:
        count += len(owner)
        _check_count(messages, count)
        tag, start, stop, good = read_fields(octets, position)
        owners.append(owner)
        fields.append((tag, start, stop))
        goes_on = stop < limit
        if goes_on.all() and good.all():
            position = stop
            continue
        unusual[owner[~good | (stop > limit)]] = True
        rows = np.flatnonzero(goes_on & good)
        owner, position, limit = owner[rows], stop[rows], limit[rows]
    place = np.repeat(np.arange(len(owners)), [len(each) for each in owners])
    found = []
    for each in zip(position.tolist(), limit.tolist(), strict=True):
        found.append(_walk_one(octets.data, *each))
        count += len(found[-1])
        _check_count(messages, count)
    counts = [len(positions) for positions in found]
    positions = np.array([position for positions in found for position in positions], np.int64)
    owners.append(np.repeat(owner, counts))
    tag, start, stop, good = read_fields(octets, positions)
    fields.append((tag, start, stop))
    messages.refuse_at(owners[-1], ~good | (stop > messages.stop[owners[-1]]))
    messages.refuse(unusual)
    places = np.arange(len(positions)) - np.repeat(np.cumsum(counts) - counts, counts).astype(np.int64)
    columns = map(np.concatenate, zip(*fields, strict=True))
    return Fields(np.concatenate(owners), np.concatenate([place, places + len(fields) - 1]), *columns)


def _check_count(messages: Messages, count: int) -> None:
    if count > MAX_FIELDS and messages.record[0] != messages.record[-1]:
        raise TooMuchError


def _walk_one(data: bytes, position: int, limit: int) -> list[int]:
    """Return where the fields of one message begin, as far as they are usual."""
    found: list[int] = []
    append = found.append
    while position < limit:
        append(position)
        size = data[position + 1]
        if data[position] & 0x87 != BYTES:
            is_short_number = size < 0x80 and data[position] & 0x87 == VARINT and data[position] > BYTES
            position = position + 2 if is_short_number else _behind_other(data, position)
        elif size < 0x80:
            position += 2 + size
        else:
            high = data[position + 2]
            position = (
                _behind_other(data, position) if high > 0x7F else position + 3 + size - 0x80 + (high << 7)
            )
    return found


def _behind_other(data: bytes, position: int) -> int:
    """Return where a field of any wire type ends; far behind everything if it is none."""
    field = wire.read_field(data, position)
    return len(data) if field is None else field[3]


def read_fields(octets: Octets, positions: Positions) -> tuple[Tags, Positions, Positions, Mask]:
    """Read one field at each position.

    Args:
        octets: The bytes.
        positions: Where the fields begin; shape (n,).

    Returns:
        Their tags, where the content begins and where it ends, and which of them are fields of a usual kind: the rest
        is of no use for the others; shape (n,) each.
    """
    start = positions + 2
    tag, size = octets.array[positions], octets.array[positions + 1]
    good = ((tag & _SHORT_BYTES) == BYTES) & (size < _TOP) & (tag > BYTES)
    stop = start + size
    if good.all():
        return tag.astype(np.uint16), start, stop, good
    tags = tag.astype(np.uint16)
    other = np.flatnonzero(~good)
    tags[other], start[other], stop[other], good[other] = _read_others(
        octets.words[positions[other]], positions[other]
    )
    return tags, start, stop, good


def _read_others(word: Words, positions: Positions) -> tuple[Tags, Positions, Positions, Mask]:
    """Read fields of any wire type; see `read_fields`."""
    has_long_tag = word >> np.uint64(7) & _ONE
    tag = ((word & np.uint64(0x7F)) | (has_long_tag * (word >> _ONE & np.uint64(0x3F80)))).astype(np.int64)
    rest = word >> (np.uint64(8) + has_long_tag * np.uint64(8))
    ends = ~rest & _VISIBLE_ENDS
    end = ends & (~ends + _ONE)
    number_size = (np.bitwise_count(end - _ONE) >> np.uint8(3)).astype(np.int64) + 1
    number = septets(rest & (end - _ONE)).astype(np.int64)
    wire_type = tag & 7
    is_number, is_bytes = wire_type == VARINT, wire_type == BYTES
    size = np.where(is_bytes, number, np.where(is_number, number_size, _TYPE_SIZES[wire_type]))
    start = positions + 1 + has_long_tag.astype(np.int64) + np.where(is_bytes, number_size, 0)
    good = (tag > 7) & (size >= 0) & ~((has_long_tag == _ONE) & (word & np.uint64(0x8000) != 0))
    good &= ~is_number | (number_size <= _LONGEST_NUMBER)
    good &= ~is_bytes | (number_size <= _LONGEST_SIZE)
    return tag.astype(np.uint16), start, start + np.where(good, size, 0), good
