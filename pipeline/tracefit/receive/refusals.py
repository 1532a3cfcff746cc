"""Refused requests: how many of each cause, and when a cause begins and ends."""

from __future__ import annotations

import time
from collections import Counter
from typing import Literal

Cause = Literal["busy", "connections", "disk", "malformed", "other_signal", "senders", "token"]
"""Why a request is refused.

`busy`: too many at once, or not delivered in time. `connections`: too many of them. `disk`: the disk is full,
slow or cannot be written. `malformed`: not a request of traces, or too long. `other_signal`: sent to a path
or method that takes no traces. `senders`: from a new server while as many as may be are active. `token`: missing
or wrong.
"""

QUIET_S = 60.0
"""A cause has ended if nothing was refused for it for this long; senders retry sooner."""


class Refusals:
    """Counts refused requests, by cause."""

    def __init__(self) -> None:
        self.counts: Counter[Cause] = Counter()
        self._last: dict[Cause, float] = {}
        self._counts_before: dict[Cause, int] = {}
        self._news: list[str] = []

    @property
    def total(self) -> int:
        """All refused requests."""
        return self.counts.total()

    def add(self, cause: Cause, text: str, sender: str) -> None:
        """Count a refused request; `text` and `sender`, its address, are reported if it is the first of its cause."""
        if cause not in self._last:
            self._counts_before[cause] = self.counts[cause]
            self._news.append(f"requests are refused ({cause}): {text}; the first is from {sender}")
        self.counts[cause] += 1
        self._last[cause] = time.monotonic()

    def is_lasting(self, cause: Cause) -> bool:
        """Return whether a request was refused for a cause that has not ended."""
        return time.monotonic() - self._last.get(cause, -QUIET_S) < QUIET_S

    def lasting(self) -> list[Cause]:
        """Return the causes that have not ended, in the order of the alphabet."""
        return sorted(cause for cause in self._last if self.is_lasting(cause))

    def news(self) -> list[str]:
        """Return a line for each cause that has begun or ended since the last call."""
        for cause in [cause for cause in self._last if not self.is_lasting(cause)]:
            count = self.counts[cause] - self._counts_before[cause]
            self._news.append(f"no request is refused any more ({cause}): {count:,} were, none for {QUIET_S:g} s")
            del self._last[cause]
        news, self._news = self._news, []
        return news
