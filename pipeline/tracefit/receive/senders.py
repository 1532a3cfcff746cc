"""The servers that send: which are active, whether another one may begin, and how many spans each has sent.

Pods get new names at every start, so a receiver that runs for weeks hears from more servers than it can remember.
It remembers as many as may be active at once. One that has been silent for long makes room for a new one.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from tracefit.receive.options import IntakeLimits
    from tracefit.receive.spans import Sender


class Senders:
    """The senders heard last, at most `limits.senders` of them.

    Args:
        limits: How many may be active, and after which silence one is not.
        clock: Returns the time in seconds; tests pass their own.

    Attributes:
        spans: Acknowledged spans of each sender that is remembered.
        forgotten: How often a sender that had sent spans was forgotten; one that comes back may be forgotten again.
        forgotten_spans: Acknowledged spans of these.
    """

    def __init__(self, limits: IntakeLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.spans: Counter[Sender] = Counter()
        self.forgotten = 0
        self.forgotten_spans = 0
        self._most = limits.senders
        self._idle_s = limits.sender_idle_s
        self._clock = clock
        self._heard_at: OrderedDict[Sender, float] = OrderedDict()  # the one silent longest is first

    def active(self) -> int:
        """Return how many senders were heard within the idle time."""
        since = self._clock() - self._idle_s
        return sum(heard_at > since for heard_at in self._heard_at.values())

    def admit(self, senders: Collection[Sender]) -> bool:
        """Note that some senders were heard; return False, and note no new one, if there is no room for all of them."""
        now = self._clock()
        for sender in senders:
            if sender in self._heard_at:
                self._heard_at[sender] = now
                self._heard_at.move_to_end(sender)
        new = [sender for sender in senders if sender not in self._heard_at]
        too_many = max(len(self._heard_at) + len(new) - self._most, 0)
        longest_silent = list(islice(self._heard_at, too_many))
        if len(longest_silent) < too_many or any(
            self._heard_at[sender] > now - self._idle_s for sender in longest_silent
        ):
            return False
        for sender in longest_silent:
            self._forget(sender)
        self._heard_at.update(dict.fromkeys(new, now))
        return True

    def count(self, sender: Sender, spans: int) -> None:
        """Count acknowledged spans."""
        if sender in self._heard_at:
            self.spans[sender] += spans
        else:  # forgotten while its spans waited for the disk
            self.forgotten_spans += spans

    def _forget(self, sender: Sender) -> None:
        del self._heard_at[sender]
        if spans := self.spans.pop(sender, 0):
            self.forgotten += 1
            self.forgotten_spans += spans
