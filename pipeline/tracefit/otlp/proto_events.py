"""Events in protobuf as arrays, and runs of their attributes that have one key."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from tracefit.otlp.model import UINT32_MAX
from tracefit.otlp.proto_attributes import Attributes, Codes, Values, read_attributes
from tracefit.otlp.proto_level import Level
from tracefit.otlp.proto_walk import Messages, UnusualRecordsError

if TYPE_CHECKING:
    from tracefit.otlp.octets import Octets, Positions

_TIME, _NAME, _ATTRIBUTES, _DROPPED_ATTRIBUTES = 0x09, 0x12, 0x1A, 0x20

_BLOCK_EVENTS = 2048
"""Events that are read together: few enough for their bytes to stay in the processor's cache."""

_PLACES = 64
"""Places of an attribute in its event that are told apart."""

_MAX_KEYS_OF_PLACE = 16
"""Keys at one place of the events of one name in a block, beyond which these are left to the general decoder."""


@dataclass(frozen=True, slots=True)
class Events:
    """Events of all spans.

    Attributes:
        record: The record each is in; shape (n,), as the next three.
        name: The number of its name.
        time: When it happened; 0 if that is unset.
        dropped: How many attributes it lacks.
        names: The names, by number: in the order of the first events.
        keys: The keys of attributes, by number.
        runs: By numbers of name and key, the values, those of an event in their order.
    """

    record: Positions
    name: Positions
    time: Positions
    dropped: Positions
    names: Codes
    keys: Codes
    runs: dict[tuple[int, int], list[Values]]


def read_events(octets: Octets, messages: Messages) -> Events:
    """Read events.

    Raises:
        UnusualRecordsError: If some are written in an unusual way.
    """
    reader = _Reader(octets)
    blocks, unusual = [], []
    for begin in range(0, max(len(messages), 1), _BLOCK_EVENTS):
        try:
            blocks.append(reader.read(begin, messages[begin : begin + _BLOCK_EVENTS]))
        except UnusualRecordsError as error:
            unusual.append(error.records)
    if unusual:
        raise UnusualRecordsError(np.concatenate(unusual))
    name, time, dropped = map(np.concatenate, zip(*blocks, strict=True))
    return Events(messages.record, name, time, dropped, reader.names, reader.keys, reader.runs)


class _Reader:
    """Reads block after block of events."""

    def __init__(self, octets: Octets) -> None:
        self._octets = octets
        self.names, self.keys = Codes(octets), Codes(octets)
        self.runs: dict[tuple[int, int], list[Values]] = {}

    def read(self, begin: int, messages: Messages) -> tuple[Positions, Positions, Positions]:
        """Return names, times and counts of dropped attributes, and keep the runs."""
        level = Level.of(self._octets, messages, (_TIME, _NAME, _ATTRIBUTES, _DROPPED_ATTRIBUTES))
        times, dropped = level.times(_TIME), level.numbers(_DROPPED_ATTRIBUTES, UINT32_MAX)
        name = self.names.of(*level.stretches(_NAME))
        owner, place, attributes = level.children_by_place(_ATTRIBUTES)
        group = name[owner] * _PLACES + np.minimum(place, _PLACES - 1)
        order = np.argsort(group.astype(np.uint16), kind="stable")
        attributes = attributes[order]
        found = read_attributes(self._octets, owner[order] + begin, attributes)
        self._add_runs(group[order], found, attributes)
        return name, times, dropped

    def _add_runs(self, group: Positions, found: Attributes, messages: Messages) -> None:
        """Cut attributes into runs of one key.

        Events of one name have the same key at the same place almost always, so that this is quickly done.
        """
        edges = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(group)]
        for begin, end in pairwise(edges if len(group) else ()):
            run = slice(begin, end)
            name = int(group[begin]) // _PLACES
            codes = self.keys.of(found.key_start[run], found.key_size[run])
            values = found.values[run]
            if (codes == codes[0]).all():
                self.runs.setdefault((name, int(codes[0])), []).append(values)
                continue
            keys = np.unique(codes).tolist()
            if len(keys) > _MAX_KEYS_OF_PLACE:
                raise UnusualRecordsError(messages.record[run])
            for key in keys:
                self.runs.setdefault((name, key), []).append(values[codes == key])
