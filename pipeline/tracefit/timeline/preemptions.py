"""Find the preemptions of requests that have only the times of their tokens: the steps that gave them no token.

A scheduler whose KV cache is full preempts the request that was scheduled last. The times give the number of steps without a
token. The cache gives the first of them: it is full at the level at which it stays most evenly filled.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tracefit.timeline.engines import Floats, Ints

_MIN_LOST, _MIN_LOST_SHARE = 1.0, 0.01
"""Steps without a token are a preemption if they are more than this, and more than this share of a request's tokens."""

_LEVELS = 0.3, 1.0, 8
"""Levels to try: lowest and highest share of the peak of the cache with preemptions as late as possible, and their number."""

_SAMPLES = 200
"""The cache is sampled at the ends of about this many requests."""

_LEAVES, _LATEST, _COMES, _RESUMES = range(4)
"""Events of a request, in the order in which they happen at one step. `_LATEST` is the last step that can have preempted it."""


def steps_without_token(
    first: Floats, last: Floats, prompt: Floats, decodes: Floats
) -> tuple[Ints, Floats, Floats]:
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
    lost[lost <= np.maximum(_MIN_LOST, _MIN_LOST_SHARE * decodes)] = 0.0
    which = np.flatnonzero(lost)
    if not which.size:
        return which, lost[which], lost[which]
    lives = (first, last, prompt, decodes, lost)
    best, begins = np.inf, last[which] - lost[which]
    cached, _ = _cached(lives, begins, which)
    for full in cached.max() * np.linspace(*_LEVELS):
        tried = _begins(*lives, full)[which]
        cached, waits = _cached(lives, tried, which)
        uneven = float(np.std(cached[waits]) / np.mean(cached[waits])) if waits.sum() > 1 else np.inf
        if uneven < best:
            best, begins = uneven, tried
    return which, begins, begins + lost[which]


def _begins(
    first: Floats, last: Floats, prompt: Floats, decodes: Floats, lost: Floats, full: float
) -> Floats:
    """Return the step that preempts each request if the cache is full at `full` tokens; shape (n,), infinite if no step does."""
    begins = np.full(len(last), np.inf)
    events = [(float(at), _LEAVES, i) for i, at in enumerate(last)]
    events += [(float(at), _COMES, i) for i, at in enumerate(first)]
    latest = np.maximum(last - lost, first + 1)
    events += [(float(latest[i]), _LATEST, int(i)) for i in np.flatnonzero(lost)]
    heapq.heapify(events)
    running: dict[int, None] = {}
    used, now = 0.0, 0.0

    def preempt(i: int, at: float) -> None:
        nonlocal used
        del running[i]
        begins[i] = at
        used -= prompt[i] + at - first[i]
        heapq.heappush(events, (at + float(lost[i]), _RESUMES, i))

    while events:
        at, kind, i = events[0]
        while used + len(running) * (at - now) > full:
            # The last to come of the requests that lost steps.
            victim = next((j for j in reversed(running) if lost[j] and np.isinf(begins[j])), None)
            if victim is None:
                break
            crossing = now + max(0.0, (full - used) / max(len(running), 1))
            used += len(running) * (crossing - now)
            now = crossing
            preempt(victim, max(now, first[victim] + 1.0) if now > first[victim] else now + 1.0)
        if events[0][0] < at:
            continue
        heapq.heappop(events)
        used, now = used + len(running) * (at - now), at
        if kind == _LEAVES and i in running:
            del running[i]
            used -= prompt[i] + decodes[i]
        elif kind == _LATEST and i in running and np.isinf(begins[i]):
            preempt(i, at)
        elif kind == _COMES:
            running[i] = None
            used += prompt[i]
        elif kind == _RESUMES and at < last[i]:
            running[i] = None
            used += prompt[i] + begins[i] - first[i]
    return np.asarray(np.minimum(begins, latest))


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
