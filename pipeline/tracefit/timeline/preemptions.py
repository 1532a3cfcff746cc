"""Find the preemptions of requests that have only the times of their tokens: the steps that gave them no token.

A scheduler whose KV cache is full preempts the request that was scheduled last. The times give the number of steps
without a token. The cache gives the first of them: it is full at the level at which it stays most evenly filled.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np

from tracefit.timeline import thresholds

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tracefit.timeline.engines import Floats, Ints

_LEVELS = 0.3, 1.0, 8
"""Levels to try: lowest and highest share of the peak of the cache with preemptions as late as possible, and their
number."""

_SAMPLES = 200
"""The cache is sampled at the ends of about this many requests."""

_LEAVES, _LATEST_STEP, _COMES, _RESUMES = range(4)
"""Events of a request, in the order in which they happen at one step. `_LATEST_STEP` is the last step that can have
preempted it."""


def steps_without_token(first: Floats, last: Floats, prompt: Floats, decodes: Floats) -> tuple[Ints, Floats, Floats]:
    """Return the steps that gave preempted requests no token.

    Args:
        first: Step of the first token of each request of an engine, shape (n,).
        last: Step of its last token.
        prompt: Its prompt tokens.
        decodes: Its tokens after the first.

    Returns:
        Indices of the preempted requests, the step that preempted each, and the step that resumed it.
    """
    lost = np.maximum(last - first - decodes, 0.0)
    lost[lost <= np.maximum(thresholds.LEAST_LOST_STEPS, thresholds.LEAST_LOST_SHARE * decodes)] = 0.0
    which = np.flatnonzero(lost)
    if not which.size:
        return which, lost[which], lost[which]
    lives = (first, last, prompt, decodes, lost)
    best, begins = np.inf, last[which] - lost[which]
    cached, _ = _cached(lives, begins, which)
    for full in cached.max() * np.linspace(*_LEVELS):
        tried = _FullCache(lives, full).run()[which]
        cached, waits = _cached(lives, tried, which)
        uneven = float(np.std(cached[waits]) / np.mean(cached[waits])) if waits.sum() > 1 else np.inf
        if uneven < best:
            best, begins = uneven, tried
    return which, begins, begins + lost[which]


class _FullCache:
    """Requests that come, run and leave, in a cache that holds `full` tokens: whom it preempts, and at which step.

    Attributes:
        begins: Step that preempts each request, shape (n,); infinite where no step has.
    """

    def __init__(self, lives: tuple[Floats, ...], full: float) -> None:
        self._first, self._last, self._prompt, self._decodes, self._lost = lives
        self._full, self._used, self._now = full, 0.0, 0.0
        self._running: dict[int, None] = {}
        self._latest = np.maximum(self._last - self._lost, self._first + 1)
        self.begins = np.full(len(self._last), np.inf)
        self._events = [(float(at), _LEAVES, i) for i, at in enumerate(self._last)]
        self._events += [(float(at), _COMES, i) for i, at in enumerate(self._first)]
        self._events += [(float(self._latest[i]), _LATEST_STEP, int(i)) for i in np.flatnonzero(self._lost)]
        heapq.heapify(self._events)

    def run(self) -> Floats:
        """Return the step that preempts each request, at the latest the last that can have; shape (n,)."""
        happens = {
            _LEAVES: self._leaves,
            _LATEST_STEP: self._preempted_at_latest,
            _COMES: self._comes,
            _RESUMES: self._resumes,
        }
        while self._events:
            at, kind, i = self._events[0]
            self._make_room_until(at)
            if self._events[0][0] < at:
                continue
            heapq.heappop(self._events)
            self._pass_to(at)
            happens[kind](i, at)
        return np.asarray(np.minimum(self.begins, self._latest))

    def _make_room_until(self, at: float) -> None:
        """Preempt while the cache is over full before a step: the last to come of the requests that lost steps."""
        while self._used + len(self._running) * (at - self._now) > self._full:
            victim = next((j for j in reversed(self._running) if self._may_lose(j)), None)
            if victim is None:
                return
            self._pass_to(self._now + max(0.0, (self._full - self._used) / max(len(self._running), 1)))
            begun = float(self._first[victim])
            self._preempt(victim, max(self._now, begun + 1.0) if self._now > begun else self._now + 1.0)

    def _may_lose(self, i: int) -> bool:
        return bool(self._lost[i]) and bool(np.isinf(self.begins[i]))

    def _pass_to(self, at: float) -> None:
        """Let each running request decode until a step."""
        self._used, self._now = self._used + len(self._running) * (at - self._now), at

    def _preempt(self, i: int, at: float) -> None:
        del self._running[i]
        self.begins[i] = at
        self._used -= self._prompt[i] + at - self._first[i]
        heapq.heappush(self._events, (at + float(self._lost[i]), _RESUMES, i))

    def _leaves(self, i: int, _: float) -> None:
        if i in self._running:
            del self._running[i]
            self._used -= self._prompt[i] + self._decodes[i]

    def _preempted_at_latest(self, i: int, at: float) -> None:
        if i in self._running and np.isinf(self.begins[i]):
            self._preempt(i, at)

    def _comes(self, i: int, _: float) -> None:
        self._running[i] = None
        self._used += self._prompt[i]

    def _resumes(self, i: int, at: float) -> None:
        if at < self._last[i]:
            self._running[i] = None
            self._used += self._prompt[i] + self.begins[i] - self._first[i]


def _cached(lives: tuple[Floats, ...], begins: Floats, which: Ints) -> tuple[Floats, NDArray[np.bool_]]:
    """Return the tokens in the cache at the ends of some requests, and whether a preempted request waits then."""
    first, last, prompt, _, lost = lives
    out, back = np.full((2, len(last)), np.inf)
    out[which], back[which] = begins, begins + lost[which]
    at = np.sort(last)[:: max(1, len(last) // _SAMPLES)]
    cached, waits = np.empty(len(at)), np.empty(len(at), bool)
    for row, step in enumerate(at):
        is_out = (out <= step) & (step < back)
        is_in = (first <= step) & (step <= last) & ~is_out
        cached[row] = (prompt + step - first - np.where(back <= step, lost, 0.0))[is_in].sum()
        waits[row] = is_out.any()
    return cached, waits
