"""Events in protobuf as arrays, and runs of their attributes that have one key."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from tracefit.otlp.model import UINT32_MAX
from tracefit.otlp.proto_attributes import INT, Attributes, Codes, Values, read_attributes, read_values
from tracefit.otlp.proto_layouts import fit
from tracefit.otlp.proto_level import Level
from tracefit.otlp.proto_walk import Messages, UnusualRecordsError

if TYPE_CHECKING:
    from tracefit.otlp.octets import Octets, Positions
    from tracefit.otlp.proto_layouts import Fitting

_TIME, _NAME, _ATTRIBUTES, _DROPPED_ATTRIBUTES = 0x09, 0x12, 0x1A, 0x20

_BLOCK_EVENTS = 1 << 15
"""Events that are read together: enough for one call to do much, few enough to bound what is held for them."""

_MAX_LAYOUTS = 4
"""Layouts tried on the events of one name in a block; optional attributes make two or three."""

_NAME_SIZE_AT = 10
"""Where the size of its name is in an event that begins with time and name."""

_LONG_NAME = 0x80

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
        names: The names, by number: in any order.
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
        """Return names, times and counts of dropped attributes, and keep the runs; `begin` is the first one's number."""
        name, time, dropped = (np.zeros(len(messages), np.int64) for _ in range(3))
        rest = np.ones(len(messages), np.bool_)
        rows, attributes = self._read_heads(messages, name, time)
        for number in np.unique(name[rows]).tolist():
            here = np.flatnonzero(name[rows] == number)
            for _ in range(_MAX_LAYOUTS):
                fitting = fit(self._octets, attributes[here]) if len(here) else None
                if fitting is None or not len(fitting.rows):
                    break
                fitted = rows[here[fitting.rows]]
                self._add_fitting(number, fitted + begin, fitting)
                rest[fitted] = False
                here = np.delete(here, fitting.rows)
        others = np.flatnonzero(rest)
        if len(others):
            name[others], time[others], dropped[others] = self._read_others(others + begin, messages[others])
        return name, time, dropped

    def _read_heads(self, messages: Messages, name: Positions, time: Positions) -> tuple[Positions, Messages]:
        """Read names and times of events that begin with them.

        Returns:
            Which they are, and the rest of each.
        """
        octets = self._octets
        size = octets.array[messages.start + _NAME_SIZE_AT].astype(np.int64)
        attributes = messages.start + (_NAME_SIZE_AT + 1) + size
        rows = np.flatnonzero(
            (octets.array[messages.start] == _TIME)
            & (octets.array[messages.start + (_NAME_SIZE_AT - 1)] == _NAME)
            & (size < _LONG_NAME)
            & (attributes <= messages.stop)
        )
        start, attributes = messages.start[rows], attributes[rows]
        name[rows] = self.names.of(start + (_NAME_SIZE_AT + 1), size[rows])
        time[rows] = octets.words[start + 1].view(np.int64)
        usual = messages[rows]
        usual.refuse(time[rows] < 0)
        return rows, Messages(usual.record, attributes, usual.stop)

    def _add_fitting(self, name: int, owner: Positions, fitting: Fitting) -> None:
        kinds = [int(self._octets.array[values.start[0]]) for values in fitting.values]
        runs: dict[int, Values] = {}
        for wanted in (True, False):  # integers by themselves, for they are the most and quickly read
            places = [place for place, kind in enumerate(kinds) if (kind == INT) == wanted]
            if places:
                messages = Messages.concat([fitting.values[place] for place in places])
                values = read_values(self._octets, np.tile(owner, len(places)), messages)
                for number, place in enumerate(places):
                    runs[place] = values[number * len(owner) : (number + 1) * len(owner)]
        for place, key in enumerate(fitting.keys):
            self.runs.setdefault((name, self.keys.of_text(key)), []).append(runs[place])

    def _read_others(self, owner: Positions, messages: Messages) -> tuple[Positions, Positions, Positions]:
        """Read events that are written in any way; return names, times and counts of dropped attributes."""
        level = Level.of(self._octets, messages, (_TIME, _NAME, _ATTRIBUTES, _DROPPED_ATTRIBUTES))
        times, dropped = level.times(_TIME), level.numbers(_DROPPED_ATTRIBUTES, UINT32_MAX)
        name = self.names.of(*level.stretches(_NAME))
        event, place, attributes = level.children_by_place(_ATTRIBUTES)
        group = name[event] * _PLACES + np.minimum(place, _PLACES - 1)
        order = np.argsort(group, kind="stable")
        attributes = attributes[order]
        found = read_attributes(self._octets, owner[event[order]], attributes)
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
