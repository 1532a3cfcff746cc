"""One level of protobuf messages: what their fields are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from tracefit.otlp.proto_walk import Fields, Messages, walk

if TYPE_CHECKING:
    from tracefit.otlp.octets import Mask, Octets, Positions


@cache
def _misread(tags: tuple[int, ...]) -> Mask:
    """Return which tags have the number of one of the given ones, but another wire type; shape (2^14,)."""
    every = np.arange(1 << 14)
    return np.isin(every >> 3, [tag >> 3 for tag in tags]) & ~np.isin(every, tags)


@dataclass(frozen=True, slots=True)
class Level:
    """Messages of one kind, and their fields."""

    octets: Octets
    messages: Messages
    fields: Fields

    @classmethod
    def of(cls, octets: Octets, messages: Messages, tags: tuple[int, ...]) -> Level:
        """Walk through messages of which fields with the given tags are of use; unknown ones do no harm.

        Raises:
            UnusualRecordsError: If some cannot be walked, or a field has not the wire type it should have.
        """
        fields = walk(octets, messages)
        messages.refuse_at(fields.owner, _misread(tags)[fields.tag])
        return cls(octets, messages, fields)

    def children(self, tag: int) -> tuple[Positions, Messages]:
        """Return the messages in a repeated field, in their order, and which of this level's messages each is in."""
        rows = np.flatnonzero(self.fields.tag == tag)
        owner = self.fields.owner[rows]
        order = np.argsort(owner, kind="stable")
        return owner[order], self._messages(rows[order])

    def children_by_place(self, tag: int) -> tuple[Positions, Positions, Messages]:
        """Return the messages in a repeated field, what they are in, and how many fields of that are before each.

        They are in any order but that of those in one message.
        """
        rows = np.flatnonzero(self.fields.tag == tag)
        return self.fields.owner[rows], self.fields.place[rows], self._messages(rows)

    def _messages(self, rows: Positions) -> Messages:
        record = self.messages.record[self.fields.owner[rows]]
        return Messages(record, self.fields.start[rows], self.fields.stop[rows])

    def stretches(self, tag: int) -> tuple[Positions, Positions]:
        """Return where a field's content begins, and its size; shape (messages,). Where it is unset: zeros, and 0.

        Raises:
            UnusualRecordsError: If a message has it twice.
        """
        rows = np.flatnonzero(self.fields.tag == tag)
        owner = self.fields.owner[rows]
        starts = np.full(len(self.messages), self.octets.end)
        sizes = np.zeros(len(self.messages), np.int64)
        if len(rows):
            self.messages.refuse(np.bincount(owner, minlength=len(self.messages)) > 1)
            starts[owner] = self.fields.start[rows]
            sizes[owner] = self.fields.stop[rows] - self.fields.start[rows]
        return starts, sizes

    def numbers(self, tag: int, most: int) -> Positions:
        """Return a varint field, 0 where it is unset; shape (messages,).

        Raises:
            UnusualRecordsError: If it is more than `most`.
        """
        starts, sizes = self.stretches(tag)
        if not sizes.any():
            return sizes
        good, numbers = self.octets.varints(starts, sizes, self.octets.words[starts])
        self.messages.refuse((sizes > 0) & (~good | (numbers > np.uint64(most))))
        return np.where(sizes > 0, numbers, np.uint64(0)).astype(np.int64)

    def times(self, tag: int) -> Positions:
        """Return a fixed64 field, 0 where it is unset; shape (messages,).

        Raises:
            UnusualRecordsError: If it is beyond int64.
        """
        starts, _ = self.stretches(tag)
        times = self.octets.words[starts].view(np.int64)
        self.messages.refuse(times < 0)
        return times
