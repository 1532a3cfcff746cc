"""The engine's scheduler: which requests a step carries, with how many tokens each, and in which KV blocks.

There is no clock in here: `Scheduler.schedule`, `launch` and `update` are one step; the caller knows when.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tracefit.synth.laws import Composition

if TYPE_CHECKING:
    from tracefit.synth.options import SynthOptions

NO_PREFIX = -1
"""`Request.prefix` of a request that shares no prefix."""


class FinishStatus(StrEnum):
    """How a request ended, in the trace's words."""

    STOPPED = "stopped"
    LENGTH = "length"
    ABORTED = "aborted"


class AbortStage(StrEnum):
    """Where in its life a request loses its client."""

    NEVER = ""
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"


class JourneyPoint(NamedTuple):
    """One event of a request's journey through the engine core."""

    event: str  # QUEUED, SCHEDULED, FIRST_TOKEN, PREEMPTED or FINISHED
    ts_ns: int  # monotonic
    step_id: int  # the step it belongs to
    phase: str  # WAITING, PREFILL or DECODE
    prefill_done_tokens: int
    decode_done_tokens: int
    num_preemptions: int
    detail: str  # `schedule.kind` of SCHEDULED, `finish.status` of FINISHED, else empty


class QueueState(NamedTuple):
    """The state of the queue and the engine when a request was QUEUED."""

    requests_ahead: int
    tokens_ahead: int  # that those ahead have to compute
    running_reqs: int
    running_remaining_tokens: int  # output tokens that those running still have to generate
    blocks_free: int


class Request(msgspec.Struct, eq=False):
    """One request: as its client sends it, as the engine core has it, and its fate.

    Times are monotonic nanoseconds; those of the API process are 0 until the request has ended.
    """

    # As its client sends it.
    request_id: str  # in the engine core
    prompt_tokens: int
    output_tokens: int  # that it generates unless it is aborted
    max_tokens: int = 0  # where larger than `output_tokens` it stops by itself
    prefix: int = NO_PREFIX  # number of its shared prefix
    number: int = 0  # on its server, from 1
    api_id: str = ""
    load_phase: str = ""
    arrival_ns: int = 0
    api_work_us: float = 0.0  # from there to the engine's input socket
    is_chat: bool = False
    is_streaming: bool = True
    abort_stage: AbortStage = AbortStage.NEVER
    abort_share: float = 0.0  # how far into that stage its client goes, 0 to 1

    # As the engine core has it.
    done_tokens: int = 0  # output tokens so far
    computed_tokens: int = 0  # in the KV cache; from 0 again when preempted
    prefill_done_tokens: int = 0  # most prompt tokens ever computed: a preemption does not lower it
    cached_tokens: int = 0  # prompt tokens found in the prefix cache when last scheduled from scratch
    blocks: int = 0  # its KV blocks, shared ones included
    holds_prefix: bool = False  # the first of them are shared ones
    num_preemptions: int = 0
    finish_status: FinishStatus | None = None

    # Its fate.
    queue_state: QueueState | None = None
    points: list[JourneyPoint] = msgspec.field(default_factory=list)
    abort_ns: int | None = None  # when its client went
    batch_reqs: int = 0  # in the batch of the step it finished in; 0 if it was aborted
    finishing_reqs: int = 0  # that finished with that step
    cached_prompt_tokens: int = 0  # found in the prefix cache at the first scheduling
    handoff_ns: int = 0
    first_response_ns: int | None = None
    departed_ns: int = 0
    is_aborted: bool = False  # the API process ended it as aborted

    @property
    def socket_ns(self) -> int:
        """When it reaches the engine's input socket."""
        return self.arrival_ns + round(self.api_work_us * 1e3)

    @property
    def pending_tokens(self) -> int:
        """Tokens so far, prompt and output, that are not in the KV cache."""
        return self.prompt_tokens + self.done_tokens - self.computed_tokens

    def note(self, event: str, ts_ns: int, step_id: int, *, phase: str = "", detail: str = "") -> None:
        """Add a point of the journey with the request's present state."""
        phase = phase or ("DECODE" if self.done_tokens else "PREFILL")
        counts = self.prefill_done_tokens, self.done_tokens, self.num_preemptions
        self.points.append(JourneyPoint(event, ts_ns, step_id, phase, *counts, detail))

    def first(self, event: str) -> JourneyPoint | None:
        """Return the first point of that kind, if there is one."""
        return next((point for point in self.points if point.event == event), None)


class _Prefix(msgspec.Struct):
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
        """Hand out `blocks` unshared blocks and, where one is named, the use of a cached prefix; or do nothing.

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
        while self._empty < blocks:  # drop unused prefixes, oldest first
            oldest = next(number for number, kept in self._prefixes.items() if not kept.users)
            self._empty += self._prefixes.pop(oldest).blocks
        self._empty -= blocks
        return True

    def share(self, request: Request) -> bool:
        """Cache the first blocks of `request` as its prefix unless it is cached already; return whether it did."""
        if request.prefix in self._prefixes:
            return False
        self._prefixes[request.prefix] = _Prefix(self._prefix_blocks, users=1)
        return True

    def give_back(self, request: Request) -> None:
        """Free the blocks of `request`; a shared prefix stays cached."""
        unshared = request.blocks
        if request.holds_prefix:
            kept = self._prefixes[request.prefix]
            kept.users -= 1
            unshared -= kept.blocks
        self._empty += unshared
        request.blocks = 0
        request.holds_prefix = False


class Scheduled(NamedTuple):
    """Share of one request in one step."""

    request: Request
    tokens: int
    computed_tokens: int  # in the KV cache before them


class StepPlan(msgspec.Struct):
    """Outcome of one `schedule()`."""

    step_id: int
    budget: int  # tokens left to grant
    num_finished: int  # requests that ended since the `schedule()` before
    scheduled: list[Scheduled] = msgspec.field(default_factory=list)  # in the order of the grants
    preempted: list[Request] = msgspec.field(default_factory=list)  # in the order they lost their blocks
    first: list[Request] = msgspec.field(default_factory=list)  # scheduled for the first time
    resumed: list[Request] = msgspec.field(default_factory=list)  # scheduled again after a preemption
    composition: Composition = msgspec.field(default_factory=Composition)

    def grant(self, request: Request, tokens: int) -> None:
        """Give a request tokens of this step."""
        self.scheduled.append(Scheduled(request, tokens, request.computed_tokens))
        self.budget -= tokens


class StepOutcome(NamedTuple):
    """Results of the update of one step."""

    first_token: list[Request]  # have their first output token
    finished: list[Request]  # in the order of the batch


class Scheduler:
    """First come, first served, with preemption by recompute.

    Attributes:
        waiting: Requests without a slot; a preempted one is put at the front.
        running: Requests with a slot, in the order they got it.
        pool: The KV blocks.
        step_id: Counter of the last scheduled step; 0 before the first.
    """

    def __init__(self, options: SynthOptions) -> None:
        self._options = options
        self._prefix_tokens = options.shared_prefix_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.pool = BlockPool(options.num_blocks, self._prefix_tokens // options.block_size)
        self.step_id = 0
        self._num_finished = 0

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
        """Choose the requests and tokens of the next step."""
        self.step_id += 1
        plan = StepPlan(self.step_id, self._options.max_num_batched_tokens, self._num_finished)
        self._num_finished = 0
        # Engine v1 serves running requests first, and admits no one in a step that preempts: freed blocks are for them.
        self._schedule_running(plan)
        if not plan.preempted:
            self._schedule_waiting(plan)
        plan.composition = _compose(plan.scheduled)
        return plan

    def launch(self, plan: StepPlan) -> None:
        """Count the tokens of a step as computed; the engine does so before it executes the step."""
        for request, tokens, _ in plan.scheduled:
            request.computed_tokens += tokens
            done = min(request.computed_tokens, request.prompt_tokens)
            request.prefill_done_tokens = max(request.prefill_done_tokens, done)
            # A whole prefix in unshared blocks becomes the cached one, unless another request was faster.
            is_unshared = request.prefix != NO_PREFIX and not request.holds_prefix
            if is_unshared and request.computed_tokens >= self._prefix_tokens:
                request.holds_prefix = self.pool.share(request)

    def update(self, plan: StepPlan) -> StepOutcome:
        """Account for an executed step: output generated, requests that end."""
        outcome = StepOutcome([], [])
        for request, _, _ in plan.scheduled:
            # The token of a request that was aborted while the step ran is lost; a chunk that is not the last has none.
            if request.finish_status is not None or request.pending_tokens:
                continue
            request.done_tokens += 1
            if request.done_tokens == 1:
                outcome.first_token.append(request)
            if request.done_tokens == request.output_tokens:
                outcome.finished.append(request)
        for request in outcome.finished:
            stopped = request.output_tokens < request.max_tokens
            self._end(request, FinishStatus.STOPPED if stopped else FinishStatus.LENGTH)
        if outcome.finished:
            self.running = [request for request in self.running if request.finish_status is None]
        return outcome

    def _schedule_running(self, plan: StepPlan) -> None:
        index = 0
        # The list shrinks from its end while it is walked: a preempted request had no turn yet.
        while index < len(self.running) and plan.budget:
            request = self.running[index]
            tokens = min(request.pending_tokens, plan.budget)
            if not self._make_room(request, tokens, plan):
                break
            plan.grant(request, tokens)
            index += 1

    def _make_room(self, request: Request, tokens: int, plan: StepPlan) -> bool:
        """Get the blocks a running request needs by preempting the ones after it; or preempt it."""
        missing = self._blocks(request.computed_tokens + tokens) - request.blocks
        # Most tokens fall into a block that the request has already.
        while missing > 0 and not self.pool.take(missing):
            victim = self.running.pop()
            self._preempt(victim)
            plan.preempted.append(victim)
            if victim is request:
                return False
        request.blocks += max(missing, 0)
        return True

    def _schedule_waiting(self, plan: StepPlan) -> None:
        while self.waiting and plan.budget and len(self.running) < self._options.max_num_seqs:
            request = self.waiting[0]
            if not self._admit(request, plan):
                break
            self.waiting.popleft()
            self.running.append(request)
            (plan.resumed if request.num_preemptions else plan.first).append(request)

    def _admit(self, request: Request, plan: StepPlan) -> bool:
        """Give the first of the queue its tokens and blocks, if there are enough."""
        is_hit = self.pool.is_cached(request.prefix)
        hit_tokens = self._prefix_tokens if is_hit else 0
        pending_tokens = request.pending_tokens - hit_tokens
        # Without chunked prefill a prompt that does not fit waits, and everyone behind it.
        if pending_tokens > plan.budget and not self._options.chunked_prefill:
            return False
        tokens = min(pending_tokens, plan.budget)
        blocks = self._blocks(hit_tokens + tokens)
        if not self.pool.take(blocks - self._blocks(hit_tokens), prefix=request.prefix):
            return False
        request.blocks = blocks
        request.holds_prefix = is_hit
        request.computed_tokens = request.cached_tokens = hit_tokens
        plan.grant(request, tokens)
        return True

    def _blocks(self, tokens: int) -> int:
        """Return the number of blocks for a number of tokens."""
        return -(-tokens // self._options.block_size)

    def _preempt(self, request: Request) -> None:
        """Take everything from a running request: it will be computed again, output included."""
        self.pool.give_back(request)
        # vLLM swaps nothing out: tokens are lost, while `prefill_done_tokens`, a high-water mark, stays.
        request.computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.appendleft(request)

    def _end(self, request: Request, status: FinishStatus) -> None:
        self.pool.give_back(request)
        request.finish_status = status
        self._num_finished += 1


def _compose(scheduled: list[Scheduled]) -> Composition:
    """Return the sums of a step, counted as the trace counts them."""
    # "Has output" makes a request decode, even one that computes its prompt again after a preemption.
    decode = [share for share in scheduled if share.request.done_tokens]
    prefill = [share for share in scheduled if not share.request.done_tokens]
    return Composition(
        num_prefill_reqs=len(prefill),
        num_decode_reqs=len(decode),
        prefill_tokens=sum(share.tokens for share in prefill),
        decode_tokens=sum(share.tokens for share in decode),
        context_tokens=sum(share.computed_tokens for share in decode),
        prefill_context_tokens=sum(share.computed_tokens for share in prefill),
        attention_pairs=sum(
            tokens * computed + tokens * (tokens + 1) // 2 for _, tokens, computed in scheduled if tokens > 1
        ),
    )
