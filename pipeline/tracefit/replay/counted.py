"""An engine whose steps follow from sums over its requests, as long as its KV blocks last.

Where none is preempted, all that decode get one token in each step. So a step follows from their number and the sum of
their tokens, and the step in which each ends is known when it begins to decode: the cost of a step does not grow with
its batch. The times are those of `ReplayEngine`, which goes through all running requests; it goes on from where the
blocks may not be enough.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

from tracefit.replay.engine import MOST_AT_ONCE, ReplayEngine, StepBatch, counted_blocks

if TYPE_CHECKING:
    from tracefit.replay.engine import ReplayedRequest


class CountedEngine(ReplayEngine):
    """An engine that counts while it can."""

    def run(self) -> None:
        """Execute steps until every request has ended or can never be scheduled."""
        if self._can_count:
            # Requests that decode: the step each ends in, a number in the order of admission, and the request.
            self._ends: list[tuple[int, int, ReplayedRequest]] = []
            self._partial: ReplayedRequest | None = None
            self._blocks = self.cache.free_count
            self._done = self._number = self._tokens = self._admitted = 0
            while self._counted():
                pass
            self._hand_over()
        super().run()

    @property
    def _can_count(self) -> bool:
        settings = self.settings
        return (
            counted_blocks(self.cache)
            and not self.running
            and settings.tokens_per_step == 1
            and not settings.by_priority
            # All that decode get their token: only the last request that runs can have a part of its prompt.
            and settings.max_num_batched_tokens > settings.max_num_seqs
            and all(request.prompt > 0 for request in self._arriving)
        )

    def _counted(self) -> bool:
        """Execute one or more steps; return False, with no step begun, where none follows or blocks may not be
        enough.
        """
        decoding, partial = len(self._ends), self._partial
        if not decoding and partial is None and not self.waiting:
            self._ended.clear()
            self._started = None
            if not self._arriving:
                return False
            self.now = max(self.now, self._arriving[0].queued_us)
        self._admit_arrivals()
        settings = self.settings
        left = settings.max_num_batched_tokens - decoding
        is_full = decoding >= settings.max_num_seqs
        fits = settings.chunked_prefill or not self.waiting or self.waiting[0].need <= left
        if decoding and partial is None and not self._ended and (is_full or not (self.waiting and fits)):
            steps = min(self._ends[0][0] - self._number, MOST_AT_ONCE)
            if steps > 1:
                return self._decode(steps, is_full=is_full)
        return self._mixed(left)

    def _may_lack(self, tokens: int, requests: int) -> bool:
        """Return whether blocks may not be enough for tokens of requests: each may have one that is not full."""
        tokens += self._tokens
        if self._ended:
            tokens += sum(request.end for request in self._ended)
            requests += len(self._ended)
        return tokens / self.settings.block_size + requests > self._blocks

    def _decode(self, steps: int, *, is_full: bool) -> bool:
        """Execute the steps until a request ends or arrives; see `ReplayEngine._decode_on`."""
        decoding, waiting = len(self._ends), len(self.waiting)
        if self._may_lack(steps * decoding, decoding):
            return False
        batch = StepBatch(decode_reqs=decoding, context_tokens=float(self._tokens), waiting=waiting)
        ends = self.now + self.times.decoding(batch, steps, decoding).cumsum()
        arrives = math.inf if is_full or waiting or not self._arriving else self._arriving[0].queued_us
        seen = int(ends.searchsorted(arrives)) + (arrives > self.now)
        taken = min(seen + self.settings.async_scheduling, steps)
        self._started = self.now if taken == 1 else float(ends[taken - 2])
        self.now = float(ends[taken - 1])
        self.steps.append((ends[:taken], decoding, waiting))
        self._number += taken
        self._tokens += decoding * taken
        self._end([])
        return True

    def _mixed(self, left: int) -> bool:
        """Execute a step that may have prompts, with so many tokens left for them."""
        settings, decoding, budget = self.settings, len(self._ends), left
        # Requests with the tokens they have, and those that they compute.
        prompts: list[tuple[ReplayedRequest, int, int]] = []
        if self._partial is not None:
            prompts.append((self._partial, self._done, min(left, self._partial.need - self._done)))
            left -= prompts[0][2]
        slots, begun = settings.max_num_seqs - len(self._ended), len(prompts)
        for request in self.waiting:
            new = min(request.need, left)
            if not left or decoding + len(prompts) >= slots or (new < request.need and not settings.chunked_prefill):
                break
            prompts.append((request, 0, new))
            left -= new
        running = decoding + len(prompts)
        if not running and self.waiting and not self._ended:
            return False
        if self._may_lack(decoding + budget - left, running):
            return False
        for request, _, _ in prompts[begun:]:
            self.waiting.popleft()
            request.scheduled_us = self._scheduled_at
        self._ended.clear()
        if running:
            self._execute_counted(prompts)
        else:
            self._started = None
        return True

    def _execute_counted(self, prompts: list[tuple[ReplayedRequest, int, int]]) -> None:
        """Advance the clock by the step's time, and its requests by their tokens."""
        decoding, waiting = len(self._ends), len(self.waiting)
        prefilled = before = pairs = seen = 0.0
        for request, done, new in prompts:
            prefilled += new
            before += done
            pairs += new * (request.need + new / 2)
            seen += new * (done + new / 2)
        context = float(self._tokens - (0 if self._partial is None else self._done))
        batch = StepBatch(len(prompts), prefilled, before, pairs, decoding, context, waiting, seen)
        self._started = self.now
        self.now += self.times.step(batch)
        self.steps.append((np.array([self.now]), decoding + len(prompts), waiting))
        self._number += 1
        self._tokens += decoding
        self._partial, self._done = None, 0
        finished: list[ReplayedRequest] = []
        begun: list[ReplayedRequest] = []
        for request, done, new in prompts:
            self._tokens += new
            if done + new < request.need:
                self._partial, self._done = request, done + new
                continue
            request.first_us = self.now
            (finished if request.end <= request.need else begun).append(request)
        self._end(finished)
        for request in begun:
            heappush(self._ends, (self._number + request.end - request.need, self._admitted, request))
            self._admitted += 1

    def _end(self, finished: list[ReplayedRequest]) -> None:
        """End requests that finished with their prompt, and those whose last step this was."""
        while self._ends and self._ends[0][0] <= self._number:
            finished.append(heappop(self._ends)[2])
        for request in finished:
            request.last_us = self.now
            self._tokens -= request.end
        if self.settings.async_scheduling:
            self._ended.extend(finished)

    def _hand_over(self) -> None:
        """Give the requests that run their tokens and blocks."""
        for ends, _, request in sorted(self._ends, key=lambda one: one[1]):
            self._resumed(request, request.end - (ends - self._number))
        if self._partial is not None:
            self._resumed(self._partial, self._done)
        ended = list(self._ended)
        self._ended.clear()
        for request in ended:
            self._resumed(request, request.end)
        self.running = self.running[: len(self.running) - len(ended)]
        self._ended.extend(ended)

    def _resumed(self, request: ReplayedRequest, done: int) -> None:
        self.cache.grow(request, done)
        request.computed = done
        self.running.append(request)
