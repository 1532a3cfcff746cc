"""Replay the requests of one or several servers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from tracefit.replay.engine import VLLM_RULES, ReplayedRequest, ReplayEngine

if TYPE_CHECKING:
    from tracefit.replay.engine import EngineSettings, SchedulerRules, StepTimeModel
    from tracefit.statistics import Integers, Vector

Routing = Literal["round_robin", "least_loaded", "prefix"]


@dataclass(frozen=True, slots=True)
class RequestLoad:
    """Requests in the order of arrival, every array of shape (n,).

    Attributes:
        arrival_us: Arrival.
        prompt_tokens: Prompt tokens.
        output_tokens: Output tokens, at least 1.
        prefix_tokens: Leading tokens of the prompt that it shares; none if not given.
        prefix_group: Requests of one group share the same prefix; if not given, those with the same `prefix_tokens`.
        priority: Smaller is served first where the queue is sorted by it.
        generated_tokens: Output tokens that each has already at the beginning, which is at 0; those with any run from there.
    """

    arrival_us: Vector | Integers
    prompt_tokens: Integers
    output_tokens: Integers
    prefix_tokens: Integers | None = None
    prefix_group: Integers | None = None
    priority: Integers | None = None
    generated_tokens: Integers | None = None


@dataclass(frozen=True, slots=True)
class ReplayedTimes:
    """Times of the requests in us, on the clock of their arrivals; NaN for one that is never served.

    Attributes:
        queued_us: When each is in the engine's queue.
        scheduled_us: When each is scheduled first.
        first_us: When its first token comes.
        last_us: When its last token comes.
        cached_tokens: Prompt tokens found in the prefix cache.
        server: The server that got it.
        preemptions: Preemptions over all requests.
        steps: Of each server, per stretch of steps with one set of requests: ends in us, requests that run, requests that wait.
    """

    queued_us: Vector
    scheduled_us: Vector
    first_us: Vector
    last_us: Vector
    cached_tokens: Integers
    server: Integers
    preemptions: int
    steps: tuple[tuple[tuple[Vector, int, int], ...], ...]


def replay(
    load: RequestLoad,
    times: StepTimeModel,
    settings: EngineSettings,
    *,
    admission_us: Vector | float = 0.0,
    servers: int = 1,
    routing: Routing = "round_robin",
    rules: SchedulerRules = VLLM_RULES,
) -> ReplayedTimes:
    """Replay requests.

    Args:
        load: The requests.
        times: The model of step times.
        settings: Settings of each server.
        admission_us: Arrival to the engine's queue, without the wait for a step boundary, shape (n,) or one for all.
        servers: Number of equal servers.
        routing: Which server a request gets: the next one, the one with the fewest requests, or the one that had its prefix before.
        rules: Rules of the scheduler on which servers differ.
    """
    queued: Vector = np.asarray(load.arrival_us + admission_us, dtype=float)
    nothing = np.zeros(len(queued), dtype=np.int64)
    prefix = nothing if load.prefix_tokens is None else load.prefix_tokens
    group = nothing if load.prefix_group is None else load.prefix_group
    priority = nothing if load.priority is None else load.priority
    columns = (queued, load.prompt_tokens, load.output_tokens, prefix, group, priority)
    requests = [
        ReplayedRequest(i, *row) for i, row in enumerate(zip(*(c.tolist() for c in columns), strict=True))
    ]
    # Memory never runs out with as many blocks as all requests together fill.
    most = sum(-(-(r.prompt + r.output) // settings.block_size) + 1 for r in requests)
    engines = [ReplayEngine(times, settings, most, rules) for _ in range(servers)]
    server = nothing.copy()
    done = nothing if load.generated_tokens is None else load.generated_tokens
    for count, at in enumerate(np.flatnonzero(done).tolist()):
        server[at] = count % servers
        engines[server[at]].resume(requests[at], int(done[at]))
    homes: dict[tuple[int, int], int] = {}
    order = np.argsort(queued, kind="stable")
    for count, at in enumerate(order[done[order] == 0].tolist()):
        request = requests[at]
        number = count % servers
        if routing != "round_robin" and servers > 1:
            for engine in engines:
                engine.advance(request.queued_us)
            number = min(range(servers), key=lambda n: engines[n].load)
        if routing == "prefix" and request.prefix:
            number = homes.setdefault((request.group, request.prefix), number)
        server[at] = number
        engines[number].send(request)
    for engine in engines:
        engine.advance(math.inf)

    return ReplayedTimes(
        queued,
        np.array([r.scheduled_us for r in requests]),
        np.array([r.first_us for r in requests]),
        np.array([r.last_us for r in requests]),
        np.array([r.cached for r in requests]),
        server,
        sum(engine.preemptions for engine in engines),
        tuple(tuple(engine.steps) for engine in engines),
    )
