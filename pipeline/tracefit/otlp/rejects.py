"""Rejects of one record: as many as a reader may want to look at, and a count of the rest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tracefit.sources.records import Frame, Reject

MAX_REJECTS = 1000
"""Rejects listed of one record; a hostile one has millions of bad spans, each shorter than its reject."""


@dataclass(slots=True)
class RecordRejects:
    """Collects the rejects of one record."""

    frame: Frame
    _listed: list[Reject] = field(default_factory=list)
    _count: int = 0

    def add(self, make: Callable[[], Reject]) -> None:
        """Take one more; it is made only if it is listed."""
        self._count += 1
        if self._count <= MAX_REJECTS:
            self._listed.append(make())

    def all(self) -> list[Reject]:
        """Return those that are listed, and one that counts the others if there are any."""
        more = self._count - len(self._listed)
        return [*self._listed, *([self.frame.reject(f"{more} more bad spans")] if more else [])]
