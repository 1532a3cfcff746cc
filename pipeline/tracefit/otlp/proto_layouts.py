"""Events that are written alike, read slot by slot.

The events of one name are written by one line of code, so that they have the same keys in the same order, and differ in
the values alone. So the first event is taken for the layout: what lies between its values is compared with all the other
events at once. Whatever does not fit is read in another way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tracefit.otlp.proto_walk import BYTES, Messages
from tracefit.sources import wire

if TYPE_CHECKING:
    from tracefit.otlp.octets import Mask, Octets, Positions

_ATTRIBUTE, _KEY, _VALUE = 3, 1, 2
_SHORT = 0x80
"""Sizes below this have a byte each."""


@dataclass(frozen=True, slots=True)
class Fitting:
    """Attributes of events that are written alike.

    Attributes:
        rows: Which events these are, ascending; shape (n,).
        keys: Their keys, in order.
        values: The values of each key, one per event.
    """

    rows: Positions
    keys: list[bytes]
    values: list[Messages]


def fit(octets: Octets, messages: Messages) -> Fitting | None:
    """Find the events that are written as the first.

    Args:
        octets: The bytes.
        messages: Attributes of events: from the first of each to the end of the last.

    Returns:
        Which they are and their values, or None if the first is written in an unusual way.
    """
    keys = _keys(octets, int(messages.start[0]), int(messages.stop[0]))
    if keys is None:
        return None
    position = messages.start
    fits = np.ones(len(position), np.bool_)
    values = []
    for key in keys:
        start, stop, is_there = _step(octets, position, key)
        is_there &= stop <= messages.stop
        if not is_there.all():
            fits &= is_there
            stop = np.where(fits, stop, octets.end)
        values.append(Messages(messages.record, start, stop))
        position = stop
    fits &= position == messages.stop
    rows = np.flatnonzero(fits)
    return Fitting(rows, keys, values if len(rows) == len(fits) else [each[rows] for each in values])


def _keys(octets: Octets, start: int, stop: int) -> list[bytes] | None:
    """Return the keys of one event, or None if there is anything but short attributes, each of a key and a value."""
    keys = []
    for number, wire_type, begin, end in wire.fields(octets.data, start, stop) or []:
        inside = wire.fields(octets.data, begin, end) or []
        if (number, wire_type) != (_ATTRIBUTE, BYTES) or end - begin >= _SHORT:
            return None
        if [field[:2] for field in inside] != [(_KEY, BYTES), (_VALUE, BYTES)]:
            return None
        keys.append(octets.data[inside[0][2] : inside[0][3]])
    return keys if keys or start == stop else None


def _step(octets: Octets, position: Positions, key: bytes) -> tuple[Positions, Positions, Mask]:
    """Read an attribute of a known key at each position; return where its value begins and ends, and where it is one."""
    literal = b"\x1a\0\x0a%c%b\x12\0" % (len(key), key)
    count, size = len(position), len(literal)
    found = octets.rows(position, size).view(np.uint8).reshape(count, size)
    attribute_size, value_size = found[:, 1].astype(np.int64), found[:, -1].astype(np.int64)
    found[:, 1] = 0
    found[:, -1] = 0
    if found.tobytes() == literal * count:  # the usual case, and much the fastest way to know
        is_there = np.ones(count, np.bool_)
    else:
        is_there = (found == np.frombuffer(literal, np.uint8)).all(axis=1)
    start = position + size
    is_there &= (attribute_size == value_size + (size - 2)) & (attribute_size < _SHORT)
    return start, start + value_size, is_there
