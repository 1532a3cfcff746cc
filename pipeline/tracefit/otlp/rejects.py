"""Rejects of a batch: as many of each file as a reader may want to look at, and a count of the rest.

A hostile file has millions of bad spans, each shorter than its reject.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tracefit.otlp.model import Decoded
    from tracefit.sources.records import Frame, Reject

MAX_REJECTS = 10_000
"""Rejects listed of one file in one batch."""


@dataclass(slots=True)
class _Rest:
    """Rejects of a file that are counted alone: `first` shows where they begin and what that looks like."""

    first: Reject
    part: str
    stop: int = 0
    parts: int = 0
    others: int = 0

    def reject(self) -> Reject:
        kinds = [("records", self.others), (self.part, self.parts)]
        what = " and ".join(name for name, count in kinds if count)
        count, length = self.parts + self.others, self.stop - self.first.source_offset
        return replace(self.first, length=length, reason=f"{count} more bad {what}", count=count)


class Rejects:
    """Collects the rejects of a batch.

    Args:
        listed: Those that are listed however many they are.
        part: What the parts of a record are called.
    """

    def __init__(self, listed: Iterable[Reject] = (), *, part: str = "spans") -> None:
        self._part = part
        self._listed = list(listed)
        self._left: dict[str, int] = {}
        self._rest: dict[str, _Rest] = {}

    def left(self, file: str) -> int:
        """Return how many of a file are listed yet."""
        return self._left.get(file, MAX_REJECTS)

    def add(self, frame: Frame, make: Callable[[], Reject], *, is_part: bool = False) -> None:
        """Take what is wrong with a record, or a part of it; the reject is made only if it is listed."""
        left = self.left(frame.source_file)
        if left:
            self._left[frame.source_file] = left - 1
            self._listed.append(make())
        else:
            self._count(frame, parts=int(is_part), others=int(not is_part))

    def add_spans(self, frame: Frame, decoded: Decoded) -> None:
        """Take what is wrong with spans of a record, of which no more were listed than are left."""
        if decoded.rejects:
            self._left[frame.source_file] = self.left(frame.source_file) - len(decoded.rejects)
            self._listed += decoded.rejects
        if decoded.more:
            self._count(frame, parts=decoded.more)

    def count(self, frame: Frame, parts: int) -> None:
        """Take what is wrong with so many parts of a record, when none is listed any more."""
        self._count(frame, parts=parts)

    def _count(self, frame: Frame, *, parts: int = 0, others: int = 0) -> None:
        rest = self._rest.get(frame.source_file)
        if rest is None:
            rest = self._rest[frame.source_file] = _Rest(frame.reject(""), self._part)
        rest.stop = frame.offset + len(frame.payload)
        rest.parts += parts
        rest.others += others

    def all(self) -> list[Reject]:
        """Return those that are listed, and for each file that has more of them one that counts these."""
        return [*self._listed, *(rest.reject() for rest in self._rest.values())]
