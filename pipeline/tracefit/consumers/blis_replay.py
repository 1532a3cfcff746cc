"""Simulate BLIS: requests pass its queue, scheduler and KV cache and get the latencies that its own replay would give.

The simulation follows `sim/simulator.go`, `sim/batch_formation.go` and `sim/kv/cache.go` of inference-sim (August 2026) for one
instance: first come first served, chunked prefill, preemption of the running request that came last, and a prefix cache in
which a request finds shared prefixes and, after a preemption, its own prompt; its output is generated anew. Step times and
alpha are cut to whole us.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tracefit.statistics import Integers, Vector


@dataclass(frozen=True, slots=True)
class StepRates:
    """Step time of BLIS as a sum of six products, in us.

    Attributes:
        constant: Per step.
        request: Per request in the step.
        prefill_token: Per prompt token computed.
        prefill_pair: Per t * (s + t / 2) of a prefill request that computes t tokens of a prompt of s.
        decode_request: Per request that decodes.
        context_token: Per token in the caches of the requests that decode.
    """

    constant: float
    request: float
    prefill_token: float
    prefill_pair: float
    decode_request: float
    context_token: float


@dataclass(frozen=True, slots=True)
class ReplayLimits:
    """Limits of the scheduler.

    Attributes:
        max_num_seqs: Most running requests.
        max_num_batched_tokens: Token budget of a step.
        block_size: Tokens per KV block.
        num_blocks: KV blocks; None where memory never runs out.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int | None


@dataclass(frozen=True, slots=True)
class ReplayedRequests:
    """Latencies in us, one per request in the order given, NaN for one that never finished.

    Attributes:
        ttft: Arrival to first token.
        decode: First token to last token.
        e2e: Arrival to departure.
        preemptions: Preemptions over all requests.
    """

    ttft: Vector
    decode: Vector
    e2e: Vector
    preemptions: int


def replay(
    arrivals: Integers,
    prompts: Integers,
    outputs: Integers,
    rates: StepRates,
    alpha: tuple[int, int, int],
    limits: ReplayLimits,
    shared: Integers | None = None,
) -> ReplayedRequests:
    """Replay the requests of one engine.

    Args:
        arrivals: Times in us, ascending, shape (n,).
        prompts: Prompt tokens, shape (n,).
        outputs: Output tokens, at least 1, shape (n,).
        rates: The step time.
        alpha: Whole us: ARRIVED to QUEUED, FINISHED to DEPARTED, and FINISHED to DEPARTED per output token.
        limits: Limits of the scheduler.
        shared: Length of each prompt's shared prefix, the same for all prompts with that length; none if not given.
    """
    prefixes = [0] * len(prompts) if shared is None else shared.tolist()
    lengths = zip(prompts.tolist(), outputs.tolist(), prefixes, strict=True)
    requests = [_Request(i, *each) for i, each in enumerate(lengths)]
    engine = _Engine(requests, rates, limits)
    arriving = deque(zip((arrivals + alpha[0]).tolist(), requests, strict=True))
    while arriving or engine.running or engine.waiting:
        # An idle engine has no step boundary to wait for.
        if not engine.running and not engine.waiting:
            engine.now = max(engine.now, arriving[0][0])
        while arriving and arriving[0][0] <= engine.now:
            engine.waiting.append(arriving.popleft()[1])
        # The first of the queue needs more blocks than there are: it and all behind it wait forever.
        if not engine.step():
            break
    first, last = np.array([r.first for r in requests]), np.array([r.last for r in requests])
    # BLIS adds the per-token overhead to each token, and the fixed one once, at the end.
    ttft = np.asarray(first - arrivals + alpha[2], dtype=float)
    decode = last - first + alpha[2] * (outputs - 1).astype(float)
    return ReplayedRequests(ttft, decode, ttft + decode + alpha[1], engine.preemptions)


@dataclass(eq=False, slots=True)
class _Request:
    """A request, and how far it is: tokens in the KV cache, the blocks that hold them, and when its tokens came."""

    index: int
    prompt: int
    output: int
    prefix: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    unclaimed: int = 0
    """Prompt tokens, where the whole prompt was found: BLIS claims no block where no token is added."""
    first: float = math.nan
    last: float = math.nan


class _Engine:
    """The scheduler's state between steps; `now` is the end of the latest one."""

    def __init__(self, requests: list[_Request], rates: StepRates, limits: ReplayLimits) -> None:
        # Memory never runs out with as many blocks as all requests together fill.
        most = sum(-(-(r.prompt + r.output) // limits.block_size) + 1 for r in requests)
        self.cache = _BlockCache(limits.num_blocks or most, limits.block_size)
        self.rates, self.limits = rates, limits
        self.running: list[_Request] = []
        self.waiting = deque[_Request]()
        self.preemptions = self.now = 0

    def step(self) -> bool:
        """Schedule and execute a step; return whether any request could run."""
        budget, preempted = self.limits.max_num_batched_tokens, self.preemptions
        # Tokens of each request; 0 where the whole prompt is in the cache.
        tokens: dict[_Request, int] = {}
        at = 0
        # Running requests first: `_reserve` may preempt from the end of the list while this walks it from the front.
        while at < len(self.running) and budget > 0:
            request = self.running[at]
            new = min(max(request.prompt - request.computed, 1), budget)
            if not self._reserve(request, new):
                break
            tokens[request] = new
            budget -= new
            at += 1
        # A step that preempted admits no one: the freed blocks are for the requests that run.
        while (
            self.waiting
            and budget > 0
            and len(self.running) < self.limits.max_num_seqs
            and preempted == self.preemptions
        ):
            request = self.waiting[0]
            cached = self.cache.find(request)
            new = min(request.prompt - cached * self.limits.block_size, budget)
            if not self.cache.admit(request, cached, new):
                break
            self.running.append(self.waiting.popleft())
            tokens[request] = new
            budget -= new
        could_run = bool(self.running)
        self._execute(tokens)
        return could_run

    def _reserve(self, request: _Request, new: int) -> bool:
        """Take the blocks of a running request's next tokens; preempt requests from the end of the list to free them.

        Returns:
            False if the request itself was preempted.
        """
        while not self.cache.grow(request, new):
            victim = self.running.pop()
            self.preemptions += 1
            self.cache.release(victim)
            self.waiting.appendleft(victim)
            if victim is request:
                return False
        return True

    def _execute(self, tokens: dict[_Request, int]) -> None:
        """Advance the clock by the step's time, in whole us and at least 1, and its requests by their tokens."""
        rates, batch = self.rates, 0
        prefilled = pairs = context = 0.0
        decoding = 0
        begun, finished = list[_Request](), list[_Request]()
        for request, new in tokens.items():
            done, prompt = request.computed, request.prompt
            batch += new > 0
            if done < prompt:
                prefilled += new
                pairs += new * (prompt + new / 2)
            elif new:
                decoding += 1
                context += done
            request.computed = done + new
            if not new or done < prompt == done + new:
                begun.append(request)
            # The last token comes out of a step that need not put it into the cache.
            if done + new >= prompt + request.output - 1:
                finished.append(request)
        took = (
            rates.constant
            + rates.request * batch
            + rates.prefill_token * prefilled
            + rates.prefill_pair * pairs
            + rates.decode_request * decoding
            + rates.context_token * context
        )
        self.now += max(int(took), 1) if batch else 1
        for request in begun:
            request.first = self.now
        for request in finished:
            request.last = self.now
            self.cache.release(request)
        if finished:
            gone = set(finished)
            self.running = [r for r in self.running if r not in gone]


class _BlockCache:
    """KV blocks by number: free blocks in the order they are taken, and full prompt blocks by their content."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        # A dictionary as an ordered set: removing the first key, or any other, takes constant time.
        self.free: dict[int, None] = dict.fromkeys(range(num_blocks))
        self.holders: dict[int, int] = {}
        self.content: dict[int, tuple[int, int]] = {}
        self.places: dict[tuple[int, int], int] = {}

    def _key(self, request: _Request, index: int) -> tuple[int, int]:
        """Return the key of a full block's content: a block of a shared prefix has the same key for all who share it."""
        is_shared = (index + 1) * self.block_size <= request.prefix
        return (-request.prefix if is_shared else request.index, index)

    def find(self, request: _Request) -> int:
        """Return the number of leading full blocks of a prompt that are in the cache."""
        count = 0
        while (count + 1) * self.block_size <= request.prompt and self._key(request, count) in self.places:
            count += 1
        return count

    def admit(self, request: _Request, cached: int, new: int) -> bool:
        """Take the blocks of a new request, `cached` of them found; return False and take none where there are too few."""
        blocks = [self.places[self._key(request, index)] for index in range(cached)]
        if -(-new // self.block_size) + sum(block in self.free for block in blocks) > len(self.free):
            return False
        request.computed = cached * self.block_size
        if not new:
            request.unclaimed = request.prompt
            return True
        for block in blocks:
            self.free.pop(block, None)
            self.holders[block] = self.holders.get(block, 0) + 1
        request.blocks = blocks
        return self.grow(request, new)

    def grow(self, request: _Request, new: int) -> bool:
        """Take blocks for a request's `new` next tokens; return False and take none where there are too few."""
        done, blocks = request.computed, request.blocks
        wanted = -(-(done + new - request.unclaimed) // self.block_size) - len(blocks)
        if wanted > len(self.free):
            return False
        for _ in range(max(wanted, 0)):
            block = next(iter(self.free))
            del self.free[block]
            self._forget(block)
            self.holders[block] = 1
            blocks.append(block)
        # Only blocks of the prompt can be found again: outputs have no known content.
        for index in range(done // self.block_size, min(done + new, request.prompt) // self.block_size):
            key = self._key(request, index)
            self.content[blocks[index]] = key
            self.places[key] = blocks[index]
        return True

    def _forget(self, block: int) -> None:
        key = self.content.pop(block, None)
        # Two requests may have computed the same prefix at once: only the later block is found, and forgotten here.
        if key is not None and self.places.get(key) == block:
            del self.places[key]

    def release(self, request: _Request) -> None:
        """Free a request's blocks, its last one first, so that the beginning of a prompt is reused last."""
        for block in reversed(request.blocks):
            self.holders[block] -= 1
            if not self.holders[block]:
                self.free[block] = None
        request.computed, request.blocks, request.unclaimed = 0, [], 0
