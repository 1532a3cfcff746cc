"""A scheduler with the interface of vLLM's, small enough to be read: what the plugin subclasses in its tests.

It batches continuously: running requests first, then waiting ones, within slots, a token budget and KV blocks.
Preempted requests compute everything again. `engine_step` is the engine's loop; with `ahead`, a step is scheduled
before the outputs of the one before it have come. Everything it does is in `truth`, for tests to compare.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace


class Status(enum.Enum):
    WAITING = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED_LENGTH_CAPPED = 4
    FINISHED_ABORTED = 5


class Reason(enum.Enum):
    LENGTH = 1


@dataclass(eq=False)
class Request:
    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    hits: int = 0
    trace_headers: dict | None = None
    resumable: bool = False
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    outputs: int = 0
    pending: int = 0  # outputs of steps that are not yet back
    blocks: int = 0

    def is_finished(self):
        return self.status.name.startswith("FINISHED")


@dataclass
class Output:
    """A step as the scheduler describes it; the fields that the plugin reads."""

    scheduled_new_reqs: list
    scheduled_cached_reqs: SimpleNamespace
    num_scheduled_tokens: dict
    scheduled_spec_decode_tokens: dict
    samples: list  # names of the requests that get a token of it


@dataclass
class Truth:
    steps: list = field(default_factory=list)
    preempted: list = field(default_factory=list)
    ended: dict = field(default_factory=dict)


class FakeScheduler:
    def __init__(self, *, slots=4, budget=64, blocks=1000, block_size=16, draft=0, endpoint="http://c:4317", rank=0):
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_index=rank, data_parallel_size=1),
            observability_config=SimpleNamespace(otlp_traces_endpoint=endpoint),
        )
        self.block_size, self.slots, self.budget, self.draft = block_size, slots, budget, draft
        self.free = blocks
        pool = SimpleNamespace(num_gpu_blocks=blocks + 1, get_num_free_blocks=lambda: self.free)
        self.kv_cache_manager = SimpleNamespace(block_pool=pool)
        self.requests, self.running, self.waiting = {}, [], deque()
        self.truth, self.count = Truth(), 0

    def add_request(self, request):
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def get_request_counts(self):
        return len(self.running), len(self.waiting)

    def _take(self, request, tokens):
        """Give a request the blocks of its tokens; return their ids, None where there are too few."""
        wanted = -(-(request.num_computed_tokens + tokens) // self.block_size) - request.blocks
        if wanted > self.free:
            return None
        self.free -= wanted
        request.blocks += wanted
        return (list(range(wanted)),)

    def _preempt_request(self, request, timestamp):
        self.free += request.blocks
        request.blocks = request.num_computed_tokens = request.pending = 0
        request.num_preemptions += 1
        request.status = Status.PREEMPTED
        self.waiting.appendleft(request)
        self.truth.preempted.append((self.count, request.request_id))

    def schedule(self, throttle_prefills=False):  # noqa: C901, PLR0912, PLR0915 - as vLLM's is
        self.count += 1
        budget, tokens, new, drafts = self.budget, {}, [], {}
        ids, computed, blocks = [], [], []
        for request in list(self.running):
            if request not in self.running:
                continue
            total = request.num_prompt_tokens + request.outputs + request.pending
            wanted = min(total - request.num_computed_tokens, budget)
            if wanted > 0 and wanted == total - request.num_computed_tokens and request.outputs:
                drafts[request.request_id] = [0] * min(self.draft, budget - wanted)
                wanted += len(drafts[request.request_id])
            if wanted <= 0 or request.outputs + request.pending >= request.max_tokens:
                continue
            while (got := self._take(request, wanted)) is None:
                victim = self.running.pop()
                if victim.request_id in tokens:
                    budget += tokens.pop(victim.request_id)
                    drafts.pop(victim.request_id, None)
                    at = ids.index(victim.request_id)
                    del ids[at], computed[at], blocks[at]
                self._preempt_request(victim, 0.0)
                if victim is request:
                    break
            if got is None:
                continue
            ids.append(request.request_id)
            computed.append(request.num_computed_tokens)
            blocks.append(got if got[0] else None)
            tokens[request.request_id] = wanted
            budget -= wanted
        while self.waiting and len(self.running) < self.slots and budget and not self._just_preempted():
            request = self.waiting[0]
            before = request.hits
            request.num_computed_tokens = before
            wanted = min(request.num_prompt_tokens + request.outputs - before, budget)
            if (got := self._take(request, wanted)) is None:
                break
            self.waiting.popleft()
            self.running.append(request)
            if request.status is Status.WAITING:
                new.append(SimpleNamespace(req_id=request.request_id, num_computed_tokens=before, block_ids=got))
            else:
                ids.append(request.request_id)
                computed.append(before)
                blocks.append(got)
            request.status = Status.RUNNING
            tokens[request.request_id] = wanted
            budget -= wanted
        self.truth.steps.append(
            [
                self.count,
                len(self.running),
                len(self.waiting),
                self.free,
                sorted(
                    (n, t, self.requests[n].num_computed_tokens, self.requests[n].outputs) for n, t in tokens.items()
                ),
            ]
        )
        samples = []
        for name, count in tokens.items():
            request = self.requests[name]
            request.num_computed_tokens += count
            if request.num_computed_tokens >= request.num_prompt_tokens + request.outputs + request.pending:
                request.pending += 1
                samples.append(name)
        cached = SimpleNamespace(req_ids=ids, num_computed_tokens=computed, new_block_ids=blocks)
        return Output(new, cached, tokens, {n: d for n, d in drafts.items() if d and n in tokens}, samples)

    def _just_preempted(self):
        return any(step == self.count for step, _ in self.truth.preempted)

    def update_from_output(self, scheduler_output, model_runner_output):
        outputs = []
        for name in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(name)
            if request is None or name not in scheduler_output.samples or not request.pending:
                continue
            request.pending -= 1
            sampled = model_runner_output.sampled_token_ids[model_runner_output.req_id_to_index[name]]
            drafted = len(scheduler_output.scheduled_spec_decode_tokens.get(name, ()))
            request.num_computed_tokens -= drafted - (len(sampled) - 1)
            given = min(len(sampled), request.max_tokens - request.outputs)
            request.outputs += given
            reason = Reason.LENGTH if request.outputs >= request.max_tokens else None
            outputs.append(SimpleNamespace(request_id=name, new_token_ids=[7] * given, finish_reason=reason))
            if reason:
                self._free(request, Status.FINISHED_LENGTH_CAPPED)
        return {0: SimpleNamespace(outputs=outputs)} if outputs else {}

    def _free(self, request, status):
        request.status = status
        self.free += request.blocks
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)
        del self.requests[request.request_id]
        self.truth.ended[request.request_id] = (status.name, request.outputs, request.num_preemptions)

    def finish_requests(self, request_ids, finished_status):
        for name in [request_ids] if isinstance(request_ids, str) else list(request_ids or self.requests):
            if name in self.requests:
                self._free(self.requests[name], finished_status)

    def shutdown(self):
        self.is_shut_down = True


def sample(output, right):
    """Return what a model gives of a step: a token, and as many of its drafts as it gets right."""
    drafts = output.scheduled_spec_decode_tokens
    sampled = [[7] * (1 + min(right, len(drafts.get(name, ())))) for name in output.num_scheduled_tokens]
    index = {name: at for at, name in enumerate(output.num_scheduled_tokens)}
    return SimpleNamespace(sampled_token_ids=sampled, req_id_to_index=index)


def engine(scheduler, arrivals, *, ahead=False, aborts=None, right=0):
    """Run requests to their end: `arrivals` are requests by the step before which they come, `aborts` names
    likewise."""
    aborts, open_, number = aborts or {}, deque(), 0
    while arrivals or scheduler.requests or open_:
        number += 1
        for request in arrivals.pop(number, []):
            scheduler.add_request(request)
        if number in aborts:
            scheduler.finish_requests(aborts[number], Status.FINISHED_ABORTED)
        if scheduler.requests:
            open_.append(scheduler.schedule())
        if open_ and (not ahead or len(open_) > 1 or not scheduler.requests):
            output = open_.popleft()
            scheduler.update_from_output(output, sample(output, right))
        assert number < 5000, "the engine makes no progress"
