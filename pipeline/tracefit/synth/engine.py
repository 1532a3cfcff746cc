"""The engine's scheduler: which requests a step carries, with how many tokens each, and in which KV blocks.

There is no clock in here: `Scheduler.schedule`, `launch` and `update` are one step; the caller knows when.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from tracefit.synth.laws import Composition

NO_PREFIX = -1
"""`Request.prefix` of a request that shares no prefix."""


class FinishStatus(StrEnum):
    """How a request ended, in the trace's words."""

    STOPPED = "stopped"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of the scheduler.

    Attributes:
        max_num_seqs: Requests that can run at once.
        max_num_batched_tokens: Token budget of a step.
        num_blocks: KV blocks, including the null block, which no request can use.
        block_size: Tokens in a block.
        chunked_prefill: Whether a prompt may be split over steps.
        prefix_tokens: Length of every shared prefix, whole blocks; 0 turns the prefix cache off.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2_048
    num_blocks: int = 4_097
    block_size: int = 16
    chunked_prefill: bool = True
    prefix_tokens: int = 0

    @property
    def longest_sequence_tokens(self) -> int:
        """Longest prompt plus output that can always finish, however often it is preempted."""
        in_cache = (self.num_blocks - 1) * self.block_size
        return in_cache if self.chunked_prefill else min(in_cache, self.max_num_batched_tokens)


@dataclass(slots=True, eq=False)
class Request:
    """One request as the engine core sees it.

    Attributes:
        request_id: Id in the engine core.
        prompt_tokens: Prompt length.
        output_tokens: Tokens it will generate unless it is aborted.
        max_tokens: Most it may generate; where larger than `output_tokens` it stops by itself.
        prefix: Number of its shared prefix, or `NO_PREFIX`.
        done_tokens: Output tokens so far.
        computed_tokens: Tokens in the KV cache; starts again at 0 when preempted.
        prefill_done_tokens: Most prompt tokens that were ever computed; a preemption does not lower it.
        cached_tokens: Prompt tokens found in the prefix cache when last scheduled from scratch.
        blocks: KV blocks held, shared ones included.
        holds_prefix: Whether the first of them are shared ones.
        num_preemptions: How often it lost its blocks.
        finish_status: How it ended; None while it has not.
    """

    request_id: str
    prompt_tokens: int
    output_tokens: int
    max_tokens: int = 0
    prefix: int = NO_PREFIX
    done_tokens: int = 0
    computed_tokens: int = 0
    prefill_done_tokens: int = 0
    cached_tokens: int = 0
    blocks: int = 0
    holds_prefix: bool = False
    num_preemptions: int = 0
    finish_status: FinishStatus | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and output."""
        return self.prompt_tokens + self.done_tokens

    @property
    def pending_tokens(self) -> int:
        """Known tokens that are not in the KV cache."""
        return self.prompt_tokens + self.done_tokens - self.computed_tokens


@dataclass(slots=True)
class _Prefix:
    """Blocks of one shared prefix: kept while in use, and after that until the blocks are needed."""

    blocks: int
    users: int


class BlockPool:
    """KV blocks as counts: how many are free, and how many hold an unused prefix."""

    def __init__(self, num_blocks: int, prefix_blocks: int = 0) -> None:
        self.total = num_blocks - 1  # block 0 is the null block
        self._empty = self.total
        self._prefix_blocks = prefix_blocks
        self._prefixes: dict[int, _Prefix] = {}

    @property
    def free(self) -> int:
        """Blocks that can be handed out, including blocks of unused prefixes."""
        return self._empty + sum(kept.blocks for kept in self._prefixes.values() if not kept.users)

    def is_cached(self, prefix: int) -> bool:
        """Say whether the prefix is in the cache."""
        return prefix in self._prefixes

    def take(self, blocks: int, *, prefix: int = NO_PREFIX) -> bool:
        """Hand out `blocks` own blocks and, where one is named, the use of a cached prefix; or do nothing.

        Returns:
            Whether there were enough.
        """
        kept = self._prefixes.get(prefix)
        # Blocks of the prefix that is about to be used are not for eviction.
        reserved = kept.blocks if kept and not kept.users else 0
        if blocks > self._empty and blocks > self.free - reserved:
            return False
        if kept:
            kept.users += 1
        self._evict(blocks)
        self._empty -= blocks
        return True

    def _evict(self, blocks: int) -> None:
        """Drop unused prefixes, oldest first, until `blocks` are empty."""
        while self._empty < blocks:
            oldest = next(number for number, kept in self._prefixes.items() if not kept.users)
            self._empty += self._prefixes.pop(oldest).blocks

    def share(self, request: Request) -> bool:
        """Make the first blocks of `request` the cached ones of its prefix, unless there are some.

        Returns:
            Whether the request now uses shared blocks.
        """
        if request.prefix in self._prefixes:
            return False
        self._prefixes[request.prefix] = _Prefix(self._prefix_blocks, users=1)
        return True

    def give_back(self, request: Request) -> None:
        """Free the blocks of `request`; a shared prefix stays cached."""
        own = request.blocks
        if request.holds_prefix:
            kept = self._prefixes[request.prefix]
            kept.users -= 1
            own -= kept.blocks
        self._empty += own
        request.blocks = 0
        request.holds_prefix = False


class Scheduled(NamedTuple):
    """Share of one request in one step.

    Attributes:
        request: The request.
        tokens: Tokens of the step.
        computed_tokens: Tokens in the KV cache before them.
    """

    request: Request
    tokens: int
    computed_tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Outcome of one `schedule()`.

    Attributes:
        step_id: Counter of the step.
        scheduled: Shares, in the order they were granted.
        preempted: Requests that lost their blocks, in that order.
        first: Requests scheduled for the first time.
        resumed: Requests scheduled again after a preemption.
        num_finished: Requests that ended since the `schedule()` before.
        composition: Sums over `scheduled`.
    """

    step_id: int
    scheduled: tuple[Scheduled, ...]
    preempted: tuple[Request, ...]
    first: tuple[Request, ...]
    resumed: tuple[Request, ...]
    num_finished: int
    composition: Composition


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Results of the update of one step.

    Attributes:
        first_token: Requests that have their first output token.
        finished: Requests that ended, in the order of the batch.
    """

    first_token: tuple[Request, ...]
    finished: tuple[Request, ...]


@dataclass(slots=True)
class _Draft:
    """A step in the making."""

    budget: int
    scheduled: list[Scheduled] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    first: list[Request] = field(default_factory=list)
    resumed: list[Request] = field(default_factory=list)

    def grant(self, request: Request, tokens: int) -> None:
        self.scheduled.append(Scheduled(request, tokens, request.computed_tokens))
        self.budget -= tokens


class Scheduler:
    """First come, first served, with preemption by recompute.

    Attributes:
        waiting: Requests without a slot; a preempted one stands at the front.
        running: Requests with a slot, in the order they got it.
        pool: The KV blocks.
        step_id: Counter of the last scheduled step; 0 before the first.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.pool = BlockPool(config.num_blocks, config.prefix_tokens // config.block_size)
        self.step_id = 0
        self._num_finished = 0
        self._was_preempted: set[Request] = set()

    @property
    def has_work(self) -> bool:
        """Whether the engine takes another step: a request is left, or the end of one is not reported yet.

        The second makes the empty steps of a trace: after the last request ended there is one more.
        """
        return bool(self.running or self.waiting or self._num_finished)

    def add(self, request: Request) -> None:
        """Put a new request at the end of the queue."""
        self.waiting.append(request)

    def abort(self, request: Request) -> bool:
        """End a request whose client has gone; return whether it was still running or waiting."""
        if request.finish_status is not None:
            return False
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._end(request, FinishStatus.ABORTED)
        return True

    def schedule(self) -> StepPlan:
        """Decide what the next step carries."""
        self.step_id += 1
        draft = _Draft(self.config.max_num_batched_tokens)
        # Engine v1 serves running requests first, and admits no one in a step that preempts: freed blocks are for them.
        self._schedule_running(draft)
        if not draft.preempted:
            self._schedule_waiting(draft)
        num_finished, self._num_finished = self._num_finished, 0
        return StepPlan(
            self.step_id,
            tuple(draft.scheduled),
            tuple(draft.preempted),
            tuple(draft.first),
            tuple(draft.resumed),
            num_finished,
            compose(draft.scheduled),
        )

    def launch(self, plan: StepPlan) -> None:
        """Count the tokens of a step as computed; the engine does so before it executes the step."""
        for share in plan.scheduled:
            self._advance(share.request, share.tokens)

    def update(self, plan: StepPlan) -> StepOutcome:
        """Account for an executed step: output generated, requests that end."""
        first_token: list[Request] = []
        finished: list[Request] = []
        for share in plan.scheduled:
            request = share.request
            if request.finish_status is not None:
                continue  # aborted while the step ran: its token is thrown away
            if request.computed_tokens < request.prompt_tokens + request.done_tokens:
                continue  # a chunk that is not the last yields no token
            request.done_tokens += 1
            if request.done_tokens == 1:
                first_token.append(request)
            if request.done_tokens == request.output_tokens:
                finished.append(request)
        for request in finished:
            stopped = request.output_tokens < request.max_tokens
            self._end(request, FinishStatus.STOPPED if stopped else FinishStatus.LENGTH)
        if finished:
            self.running = [request for request in self.running if request.finish_status is None]
        return StepOutcome(tuple(first_token), tuple(finished))

    def _schedule_running(self, draft: _Draft) -> None:
        index, size = 0, self.config.block_size
        # The list shrinks from its end while we walk it: who is preempted had no turn yet.
        while index < len(self.running) and draft.budget:
            request = self.running[index]
            computed = request.computed_tokens
            tokens = min(request.prompt_tokens + request.done_tokens - computed, draft.budget)
            # Most tokens fall into a block the request holds already.
            if computed + tokens > request.blocks * size and not self._make_room(request, tokens, draft):
                break
            draft.grant(request, tokens)
            index += 1

    def _make_room(self, request: Request, tokens: int, draft: _Draft) -> bool:
        """Get blocks for a running request by preempting the ones after it; or preempt it."""
        while not self._allocate(request, tokens):
            victim = self.running.pop()
            self._preempt(victim)
            draft.preempted.append(victim)
            if victim is request:
                return False
        return True

    def _schedule_waiting(self, draft: _Draft) -> None:
        while self.waiting and draft.budget and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            if not self._admit(request, draft):
                break
            self.waiting.popleft()
            self.running.append(request)
            if request in self._was_preempted:
                self._was_preempted.remove(request)
                draft.resumed.append(request)
            else:
                draft.first.append(request)

    def _admit(self, request: Request, draft: _Draft) -> bool:
        """Give the first of the queue its tokens and blocks, if there are enough."""
        prefix = request.prefix if self.pool.is_cached(request.prefix) else NO_PREFIX
        hit_tokens = 0 if prefix == NO_PREFIX else self.config.prefix_tokens
        pending_tokens = request.num_tokens - hit_tokens
        # Without chunked prefill a prompt that does not fit waits, and everyone behind it.
        if pending_tokens > draft.budget and not self.config.chunked_prefill:
            return False
        tokens = min(pending_tokens, draft.budget)
        size = self.config.block_size
        if not self.pool.take(-(-(hit_tokens + tokens) // size) - hit_tokens // size, prefix=prefix):
            return False
        request.blocks = -(-(hit_tokens + tokens) // size)
        request.holds_prefix = prefix != NO_PREFIX
        request.computed_tokens = hit_tokens
        request.cached_tokens = hit_tokens
        draft.grant(request, tokens)
        return True

    def _allocate(self, request: Request, tokens: int) -> bool:
        """Get a running request the blocks its next tokens need."""
        missing = -(-(request.computed_tokens + tokens) // self.config.block_size) - request.blocks
        if not self.pool.take(missing):
            return False
        request.blocks += missing
        return True

    def _preempt(self, request: Request) -> None:
        """Take everything from a running request: it will be computed again, output included."""
        self.pool.give_back(request)
        # vLLM swaps nothing out: tokens are lost, while `prefill_done_tokens`, a high-water mark, stays.
        request.computed_tokens = 0
        request.num_preemptions += 1
        self._was_preempted.add(request)
        self.waiting.appendleft(request)

    def _advance(self, request: Request, tokens: int) -> None:
        request.computed_tokens += tokens
        if request.prefill_done_tokens < request.prompt_tokens:
            done = min(request.computed_tokens, request.prompt_tokens)
            request.prefill_done_tokens = max(request.prefill_done_tokens, done)
        if request.prefix == NO_PREFIX or request.holds_prefix:
            return
        # A whole prefix in own blocks becomes the cached one, unless another request was faster.
        if request.computed_tokens >= self.config.prefix_tokens:
            request.holds_prefix = self.pool.share(request)

    def _end(self, request: Request, status: FinishStatus) -> None:
        self.pool.give_back(request)
        self._was_preempted.discard(request)
        request.finish_status = status
        self._num_finished += 1


def compose(scheduled: list[Scheduled]) -> Composition:
    """Return the sums of a step, counted as the trace counts them."""
    prefill_reqs = prefill_tokens = prefill_context = decode_tokens = context = pairs = 0
    for share in scheduled:
        tokens, computed = share.tokens, share.computed_tokens
        # "Has output" makes a request decode, even one that computes its prompt again after a preemption.
        if share.request.done_tokens:
            decode_tokens += tokens
            context += computed
        else:
            prefill_reqs += 1
            prefill_tokens += tokens
            prefill_context += computed
        if tokens > 1:
            pairs += tokens * computed + tokens * (tokens + 1) // 2
    return Composition(
        num_prefill_reqs=prefill_reqs,
        num_decode_reqs=len(scheduled) - prefill_reqs,
        prefill_tokens=prefill_tokens,
        decode_tokens=decode_tokens,
        context_tokens=context,
        prefill_context_tokens=prefill_context,
        attention_pairs=pairs,
    )
