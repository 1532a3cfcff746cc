"""One engine: requests pass its queue, its scheduler and its KV cache, and steps take as long as a model says.

The scheduler is that of vLLM's v1 engine: running requests first, then first come, first served; prompts in chunks of
the token budget, a prefix cache of full blocks, preemption of the request that came last. `SchedulerRules` has the
differences of simulators. Between an arrival and the end of a request the same requests decode. Such steps are computed
at once, so that the cost follows the number of requests and not the number of their tokens.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import insort
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tracefit.statistics import Vector


MOST_AT_ONCE = 128
"""Most steps whose times are computed at once: an arrival may cut them short."""


class StepBatch(NamedTuple):
    """The work of a step.

    Attributes:
        prefill_reqs: Requests that compute prompt tokens.
        prefill_tokens: Prompt tokens computed.
        prefill_context_tokens: Tokens of these requests that are in the cache already.
        prefill_pairs: Sum of t * (s + t / 2) over requests that compute t tokens of a prompt of s: a term of BLIS.
        decode_reqs: Requests that decode.
        context_tokens: Tokens in the caches of the requests that decode.
        waiting: Requests in the queue.
        prefill_attention_pairs: Sum of t * (c + t / 2) over requests that compute t tokens with c of theirs in the
            cache.
    """

    prefill_reqs: int = 0
    prefill_tokens: float = 0.0
    prefill_context_tokens: float = 0.0
    prefill_pairs: float = 0.0
    decode_reqs: int = 0
    context_tokens: float = 0.0
    waiting: int = 0
    prefill_attention_pairs: float = 0.0


class StepTimeModel(Protocol):
    """A model of step times, in us."""

    def step(self, batch: StepBatch) -> float:
        """Return the time of one step."""

    def decoding(self, batch: StepBatch, steps: int, growth: float) -> Vector:
        """Return the times of consecutive steps in which the same requests decode, shape (steps,).

        Args:
            batch: The first of these steps.
            steps: How many there are.
            growth: Tokens by which the context grows from step to step.
        """


class EngineSettings(msgspec.Struct, frozen=True):
    """Settings of a server that decide which requests a step has.

    Attributes:
        max_num_seqs: Most running requests.
        max_num_batched_tokens: Token budget of a step.
        block_size: Tokens per KV block.
        num_blocks: KV blocks; null where memory never runs out.
        by_priority: Whether the queue is sorted by priority. No trace says that of a request, so all have the same:
            they are served in the order of arrival, not of the queue, and the last to arrive is preempted first.
        chunked_prefill: Whether a prompt may be computed in chunks.
        prefix_caching: Whether full blocks of prompts are reused.
        async_scheduling: Whether a step is scheduled when the one before it starts.
        tokens_per_step: Tokens that a request gets from a step it decodes in: above 1 with speculative decoding.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int | None = None
    by_priority: bool = False
    chunked_prefill: bool = True
    prefix_caching: bool = True
    async_scheduling: bool = False
    tokens_per_step: float = 1


class SchedulerRules(msgspec.Struct, frozen=True):
    """Rules of the scheduler on which servers and simulators differ; the defaults are vLLM's.

    Attributes:
        keeps_output: A preempted request computes its prompt and its output so far again; otherwise it generates all
            output again.
        computes_last_token: At least one token of a prompt is computed, even if all of it is cached.
    """

    keeps_output: bool = True
    computes_last_token: bool = True


VLLM_RULES = SchedulerRules()
"""vLLM's rules: `vllm/v1/core/sched/scheduler.py` of 0.32."""

BLIS_RULES = SchedulerRules(keeps_output=False, computes_last_token=False)
"""The rules of inference-sim: `sim/simulator.go`, `sim/batch_formation.go` and `sim/kv/cache.go` of August 2026."""


StepGroup: TypeAlias = "tuple[Vector, int, int]"
"""Consecutive steps with the same requests: their ends in us, requests that run, requests that wait."""


@dataclass(eq=False, slots=True)
class ReplayedRequest:
    """A request and its progress.

    Attributes:
        index: Number of the request, in the order of arrival.
        queued_us: When it enters the engine's queue.
        prompt: Prompt tokens.
        output: Output tokens, at least 1.
        prefix: Leading prompt tokens that it shares with all requests that share as many.
        need: Tokens to compute before the next output token.
        computed: Tokens in the cache.
        held: Number of their blocks.
        blocks: These blocks by number, where requests share prefixes.
        unclaimed: Tokens without blocks: BLIS claims none for a prompt that is wholly cached.
        cached: Prompt tokens from the prefix cache when it was scheduled first.
        first_us: When its first token came; NaN before.
        last_us: When its last token came; NaN before.
        scheduled_us: Start of its first step; NaN before.
        preemptions: How often it was preempted.
    """

    index: int
    queued_us: float
    prompt: int
    output: int
    prefix: int = 0
    need: int = 0
    computed: float = 0
    held: int = 0
    blocks: list[int] = field(default_factory=list)
    unclaimed: int = 0
    cached: int = 0
    first_us: float = math.nan
    last_us: float = math.nan
    scheduled_us: float = math.nan
    preemptions: int = 0
    filled: float = 0
    """Tokens of its prompt in its blocks."""
    freed: _Stretch | None = None
    """Those left of the blocks that it had before it was preempted."""
    end: int = field(init=False)
    """Tokens in the cache when its last token comes: that one need not be put there."""

    def __post_init__(self) -> None:
        self.need = self.prompt
        self.end = self.prompt + self.output - 1


_BY_ARRIVAL = attrgetter("index")


class ReplayEngine:
    """The scheduler's state between steps.

    Attributes:
        now: End of the latest step, in us.
        running: Requests that have a slot and have not ended.
        waiting: Requests in the queue, the next one first.
        preemptions: Preemptions so far.
        steps: The steps so far.
    """

    def __init__(
        self,
        times: StepTimeModel,
        settings: EngineSettings,
        most_blocks: int,
        rules: SchedulerRules = VLLM_RULES,
        *,
        shares_prefixes: bool = True,
    ) -> None:
        """Start an empty engine.

        Args:
            times: The model of step times.
            settings: Settings of the server.
            most_blocks: Blocks if the settings state none: as many as all requests fill.
            rules: Rules of the scheduler on which servers differ.
            shares_prefixes: Whether a prompt may share a prefix with another one.
        """
        self.times, self.settings, self.rules = times, settings, rules
        # Where a prompt may be wholly cached, its blocks are not taken again: these keep their numbers.
        kind = _SharedBlocks if shares_prefixes or not rules.computes_last_token else _OwnBlocks
        self.cache = kind(most_blocks if settings.num_blocks is None else settings.num_blocks, settings)
        self.running: list[ReplayedRequest] = []
        self.waiting = deque[ReplayedRequest]()
        self.now = 0.0
        self.preemptions = 0
        self.steps: list[StepGroup] = []
        self._arriving = deque[ReplayedRequest]()
        self._started: float | None = None
        self._ended: list[ReplayedRequest] = []
        self._is_stuck = False

    def send(self, request: ReplayedRequest) -> None:
        """Add a request; requests come in the order of `queued_us`."""
        self._arriving.append(request)

    def resume(self, request: ReplayedRequest, generated: int) -> None:
        """Let a request run that has output tokens already; one whose blocks do not fit waits and computes them
        again.
        """
        request.first_us = request.scheduled_us = self.now
        done = min(request.prompt + generated - 1, request.end - 1)
        if len(self.running) < self.settings.max_num_seqs and self.cache.grow(request, done):
            request.computed = done
            self.running.append(request)
        else:
            request.need = done + 1
            self.send(request)

    def run(self) -> None:
        """Execute steps until every request has ended or can never be scheduled."""
        while not self._is_stuck:
            if not self.running and not self.waiting:
                # An idle engine has no step boundary to wait for.
                self._release()
                self._started = None
                if not self._arriving:
                    return
                self.now = max(self.now, self._arriving[0].queued_us)
            self._admit_arrivals()
            if not self._decode_on():
                self._step()

    @property
    def _scheduled_at(self) -> float:
        """When the next step is scheduled: a step ahead, that is when the latest one starts."""
        ahead = self.settings.async_scheduling and self._started is not None
        return self._started if ahead else self.now  # type: ignore[return-value]  # it is not None

    def _admit_arrivals(self) -> None:
        """Move arrived requests to the queue; those that come after the next step is scheduled wait for a later one."""
        arriving, seen = self._arriving, self._scheduled_at
        while arriving and arriving[0].queued_us <= seen:
            request = arriving.popleft()
            if self.settings.by_priority:
                insort(self.waiting, request, key=_BY_ARRIVAL)
            else:
                self.waiting.append(request)

    # -- steps with the same requests

    def _decode_on(self) -> bool:
        """Execute the steps until a request ends or arrives, if all running requests decode and none can be
        admitted.
        """
        running, settings = self.running, self.settings
        growth = settings.tokens_per_step
        if not running or self._ended or len(running) * growth > settings.max_num_batched_tokens:
            return False
        context, fewest = 0.0, math.inf
        for request in running:
            done = request.computed
            if done < request.need:
                return False
            context += done
            fewest = min(fewest, request.end - done)
        is_full = len(running) >= settings.max_num_seqs
        budget = settings.max_num_batched_tokens - len(running) * growth
        if self.waiting and not is_full and self._next(budget, admit=False) is not None:
            return False
        steps = self.cache.steps_until_full(running, min(math.ceil(fewest / growth), MOST_AT_ONCE), growth)
        if steps < 2:
            return False
        batch = StepBatch(decode_reqs=len(running), context_tokens=context, waiting=len(self.waiting))
        ends = self.now + self.times.decoding(batch, steps, growth * len(running)).cumsum()
        can_wait = is_full or (self.waiting and not settings.by_priority)
        arrives = self._arriving[0].queued_us if self._arriving and not can_wait else math.inf
        # The first boundary that sees the arrival; a step ahead, the step that begins there is scheduled already.
        seen = int(ends.searchsorted(arrives)) + (arrives > self.now)
        taken = min(seen + settings.async_scheduling, steps)
        self._started = self.now if taken == 1 else float(ends[taken - 2])
        self.now = float(ends[taken - 1])
        self.steps.append((ends[:taken], len(running), len(self.waiting)))
        for request in running:
            # Its blocks often have space for the next tokens.
            done = request.computed + taken * growth
            if done - request.unclaimed > request.held * settings.block_size:
                self.cache.grow(request, taken * growth)
            request.computed = done
        self._finish([r for r in running if r.computed >= r.end])
        return True

    # -- one step

    def _next(self, budget: float, *, admit: bool) -> float | None:
        """Return the tokens that the first of the queue computes; null where they or their blocks are too many.

        Args:
            budget: Tokens that the step has left.
            admit: Whether the blocks are taken.
        """
        request, settings = self.waiting[0], self.settings
        cached = self.cache.find(request, keep=1 if self.rules.computes_last_token else 0)
        wanted = request.need - cached * settings.block_size
        new = min(wanted, budget)
        if wanted > budget and not settings.chunked_prefill:
            return None
        return new if self.cache.admit(request, cached, new, takes=admit) else None

    def _step(self) -> None:
        """Schedule and execute a step."""
        # Tokens of each request; 0 where the whole prompt is in the cache.
        tokens: dict[ReplayedRequest, float] = {}
        preempted = self.preemptions
        budget = self._schedule_running(tokens)
        # A step that preempted admits no one: the freed blocks are for the requests that run.
        if preempted == self.preemptions:
            self._schedule_waiting(tokens, budget)
        # The first of the queue needs more blocks than the cache has: it and all behind it wait forever.
        self._is_stuck = bool(self.waiting) and not self.running and not self._ended
        self._release()
        if tokens:
            self._execute(tokens)
        else:
            self._started = None

    def _schedule_running(self, tokens: dict[ReplayedRequest, float]) -> float:
        """Give the running requests their tokens, and return those that the step has left."""
        budget: float = self.settings.max_num_batched_tokens
        growth, size = self.settings.tokens_per_step, self.settings.block_size
        lost = set[ReplayedRequest]()
        for request in tuple(self.running):
            if request in lost:
                continue
            done = request.computed
            decodes = done >= request.need
            if decodes and growth <= budget and done + growth - request.unclaimed <= request.held * size:
                # Its blocks often have space for the next tokens. Those of its prompt are full.
                tokens[request] = growth
                budget -= growth
                continue
            wanted = growth if decodes else request.need - done
            new = min(budget, wanted)
            # To give one its blocks, others may lose theirs.
            while new and request not in lost and not self.cache.grow(request, new):
                victim = self._preempt()
                lost.add(victim)
                budget += tokens.pop(victim, 0)
            if not new or request in lost:
                break
            tokens[request] = new
            budget -= new
        return budget

    def _schedule_waiting(self, tokens: dict[ReplayedRequest, float], budget: float) -> None:
        """Admit requests from the queue while there are tokens, slots and blocks."""
        slots = self.settings.max_num_seqs - len(self._ended)
        while self.waiting and budget > 0 and len(self.running) < slots:
            new = self._next(budget, admit=True)
            if new is None:
                break
            request = self.waiting.popleft()
            if math.isnan(request.scheduled_us):
                request.scheduled_us, request.cached = self._scheduled_at, int(request.computed)
            self.running.append(request)
            tokens[request] = new
            budget -= new

    def _preempt(self) -> ReplayedRequest:
        """Take the blocks and the slot of the request that got its slot last, by priority of the last to arrive; return
        it.
        """
        victim = max(self.running, key=_BY_ARRIVAL) if self.settings.by_priority else self.running[-1]
        self.running.remove(victim)
        self.preemptions += 1
        victim.preemptions += 1
        if self.rules.keeps_output and victim.computed >= victim.need:
            victim.need = int(victim.computed) + 1
        self.cache.release(victim)
        insort(self.waiting, victim, key=_BY_ARRIVAL)
        return victim

    def _execute(self, tokens: dict[ReplayedRequest, float]) -> None:
        """Advance the clock by the step's time, and its requests by their tokens."""
        prefill_reqs = decode_reqs = 0
        prefilled = before = pairs = seen = context = 0.0
        begun, finished = list[ReplayedRequest](), list[ReplayedRequest]()
        for request, new in tokens.items():
            done, need = request.computed, request.need
            if done < need:
                prefill_reqs += 1
                prefilled += new
                before += done
                pairs += new * (need + new / 2)
                seen += new * (done + new / 2)
            elif new:
                decode_reqs += 1
                context += done
            request.computed = done + new
            if (not new or done < need <= done + new) and not (self.rules.keeps_output and request.first_us > 0):
                begun.append(request)
            # The last token comes out of a step that need not put it into the cache.
            if done + new >= request.end:
                finished.append(request)
        batch = StepBatch(prefill_reqs, prefilled, before, pairs, decode_reqs, context, len(self.waiting), seen)
        self._started = self.now
        self.now += self.times.step(batch)
        self.steps.append((np.array([self.now]), len(tokens), len(self.waiting)))
        for request in begun:
            request.first_us = self.now
        self._finish(finished)

    def _finish(self, finished: Sequence[ReplayedRequest]) -> None:
        """End requests; a step ahead, the next step is scheduled before their slots and blocks are free."""
        if not finished:
            return
        for request in finished:
            request.last_us = self.now
        gone = set(finished)
        self.running = [r for r in self.running if r not in gone]
        self._ended.extend(finished)
        if not self.settings.async_scheduling:
            self._release()

    def _release(self) -> None:
        for request in self._ended:
            self.cache.release(request)
        self._ended.clear()


_BlockKey: TypeAlias = tuple[bool, int, int]


class _Blocks(ABC):
    """The KV blocks of an engine, and which of them are in use."""

    def __init__(self, settings: EngineSettings) -> None:
        self.block_size, self.reuses = settings.block_size, settings.prefix_caching

    @property
    @abstractmethod
    def free_count(self) -> int:
        """Number of blocks that no request holds."""

    @abstractmethod
    def find(self, request: ReplayedRequest, keep: int) -> int:
        """Return the number of leading full blocks of a prompt that are in the cache, with at least `keep` tokens left
        to compute.
        """

    @abstractmethod
    def admit(self, request: ReplayedRequest, cached: int, new: float, *, takes: bool) -> bool:
        """Say whether there are blocks for a new request; if so and `takes`, take them, `cached` of them from the
        prefix cache.
        """

    @abstractmethod
    def grow(self, request: ReplayedRequest, new: float) -> bool:
        """Take blocks for a request's `new` next tokens; return False and take none if there are too few."""

    @abstractmethod
    def release(self, request: ReplayedRequest) -> None:
        """Free a request's blocks, its last one first, so that the beginning of a prompt is reused last."""

    def steps_until_full(self, running: Sequence[ReplayedRequest], steps: int, growth: float) -> int:
        """Return the number of steps, `steps` at most, for which there are blocks if all that run decode."""
        if len(running) * (steps * growth / self.block_size + 1) <= self.free_count:
            return steps
        done = np.array([r.computed for r in running], dtype=float)
        reserved = np.array([r.held * self.block_size + r.unclaimed for r in running])

        def fits(count: int) -> bool:
            wanted = np.ceil((done + count * growth - reserved) / self.block_size)
            return float(np.maximum(wanted, 0).sum()) <= self.free_count

        low, high = 0, steps
        if fits(high):
            return high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low


class _Stretch(msgspec.Struct):
    """Free blocks that follow each other in the order they are taken, and were one request's."""

    count: int
    reusable: int
    """How many of them, the last ones, are full blocks of its prompt."""


class _OwnBlocks(_Blocks):
    """KV blocks by their count, where no two prompts share a prefix.

    Only a preempted request then finds blocks in the cache: its own, which are one stretch of the free ones, its first
    block last. The part that was not taken since is the beginning of the prompt. Its times are those with blocks by
    number.
    """

    def __init__(self, num_blocks: int, settings: EngineSettings) -> None:
        super().__init__(settings)
        self._free = num_blocks
        self._stretches = deque([_Stretch(num_blocks, 0)])

    @property
    def free_count(self) -> int:
        return self._free

    def find(self, request: ReplayedRequest, keep: int) -> int:
        if not self.reuses or request.freed is None:
            return 0
        left = min(request.freed.count, request.freed.reusable)
        return min(left, max(min(request.prompt, request.need - keep), 0) // self.block_size)

    def admit(self, request: ReplayedRequest, cached: int, new: float, *, takes: bool) -> bool:
        if math.ceil(new / self.block_size) + cached > self._free:
            return False
        if not takes:
            return True
        request.computed = request.filled = cached * self.block_size
        if request.freed is not None:
            request.freed.count -= cached
            self._free -= cached
            request.freed = None
        request.held = cached
        return self.grow(request, new)

    def grow(self, request: ReplayedRequest, new: float) -> bool:
        done = request.computed
        wanted = math.ceil((done + new - request.unclaimed) / self.block_size) - request.held
        if wanted > self._free:
            return False
        if wanted > 0:
            request.held += wanted
            self._free -= wanted
            while wanted:
                first = self._stretches[0]
                taken = min(wanted, first.count)
                first.count -= taken
                wanted -= taken
                if not first.count:
                    self._stretches.popleft()
        if done < request.prompt:
            request.filled = min(done + new, request.prompt)
        return True

    def release(self, request: ReplayedRequest) -> None:
        if request.held:
            request.freed = _Stretch(request.held, int(request.filled) // self.block_size)
            self._stretches.append(request.freed)
            self._free += request.held
        request.computed, request.held, request.unclaimed, request.filled = 0, 0, 0, 0


def counted_blocks(cache: _Blocks) -> bool:
    """Return whether blocks are known by their count only."""
    return isinstance(cache, _OwnBlocks)


class _SharedBlocks(_Blocks):
    """KV blocks by number: free blocks in the order they are taken, and full prompt blocks by their content."""

    def __init__(self, num_blocks: int, settings: EngineSettings) -> None:
        super().__init__(settings)
        # An ordered set. To find the first key of a plain dictionary takes as long as the number of keys removed before
        # it.
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        # Holders of a block beyond the first, where there are any.
        self.more_holders: dict[int, int] = {}
        self.content: dict[int, _BlockKey] = {}
        self.block_of: dict[_BlockKey, int] = {}

    @property
    def free_count(self) -> int:
        return len(self.free)

    def _keys(self, request: ReplayedRequest, first: int, end: int) -> Iterator[_BlockKey]:
        """Yield the keys of full blocks' contents: a block of a shared prefix has the same key for all who share it."""
        shared = max(first, min(request.prefix // self.block_size, end))
        for index in range(first, shared):
            yield True, request.prefix, index
        for index in range(shared, end):
            yield False, request.index, index

    def find(self, request: ReplayedRequest, keep: int) -> int:
        if not self.reuses:
            return 0
        count, block_of = 0, self.block_of
        for key in self._keys(request, 0, max(min(request.prompt, request.need - keep), 0) // self.block_size):
            if key not in block_of:
                break
            count += 1
        return count

    def admit(self, request: ReplayedRequest, cached: int, new: float, *, takes: bool) -> bool:
        reused = [self.block_of[key] for key in self._keys(request, 0, cached)]
        unused = sum(block in self.free for block in reused)
        if math.ceil(new / self.block_size) + unused > len(self.free):
            return False
        if not takes:
            return True
        request.computed = cached * self.block_size
        if not new:
            request.unclaimed = request.prompt
            return True
        request.blocks, request.held = reused, cached
        for block in reused:
            if block in self.free:
                del self.free[block]
            else:
                self.more_holders[block] = self.more_holders.get(block, 0) + 1
        return self.grow(request, new)

    def grow(self, request: ReplayedRequest, new: float) -> bool:
        done, blocks, size = request.computed, request.blocks, self.block_size
        wanted = math.ceil((done + new - request.unclaimed) / size) - len(blocks)
        if wanted > len(self.free):
            return False
        take, content, block_of = self.free.popitem, self.content, self.block_of
        for _ in range(wanted):
            block, _ = take(last=False)
            key = content.pop(block, None)
            # Two requests may have computed the same prefix at once: only the later block is in the map, and leaves it
            # here.
            if key is not None and block_of.get(key) == block:
                del block_of[key]
            blocks.append(block)
        request.held = len(blocks)
        # Only blocks of the prompt can be reused: the content of outputs is unknown.
        if done >= request.prompt or not self.reuses:
            return True
        first, end = int(done) // size, int(min(done + new, request.prompt)) // size
        for key, block in zip(self._keys(request, first, end), blocks[first:end], strict=True):
            content[block] = key
            block_of[key] = block
        return True

    def release(self, request: ReplayedRequest) -> None:
        free, more = self.free, self.more_holders
        for block in reversed(request.blocks):
            if block not in more:
                free[block] = None
            elif more[block] > 1:
                more[block] -= 1
            else:
                del more[block]
        request.computed, request.held, request.blocks, request.unclaimed = 0, 0, [], 0
