"""Replay the requests of a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tracefit.replay.counted import CountedEngine
from tracefit.replay.engine import VLLM_RULES, ReplayedRequest

if TYPE_CHECKING:
    from tracefit.replay.engine import EngineSettings, SchedulerRules, StepGroup, StepTimeModel
    from tracefit.statistics import Integers, Vector


@dataclass(frozen=True, slots=True)
class RequestLoad:
    """Requests in the order of arrival, every array of shape (n,).

    Attributes:
        arrival_us: Arrival.
        prompt_tokens: Prompt tokens.
        output_tokens: Output tokens, at least 1.
        prefix_tokens: Length of the prefix that each prompt shares with all prompts that share as many tokens; 0 if not given.
        generated_tokens: Output tokens that each request has when the replay begins, at 0; requests with any run from then on.
    """

    arrival_us: Vector | Integers
    prompt_tokens: Integers
    output_tokens: Integers
    prefix_tokens: Integers | None = None
    generated_tokens: Integers | None = None


@dataclass(frozen=True, slots=True)
class ReplayedTimes:
    """Times of the requests in us, on the clock of their arrivals; NaN for one that is never served.

    Attributes:
        queued_us: When each enters the engine's queue.
        scheduled_us: When each is scheduled first.
        first_us: When its first token comes.
        last_us: When its last token comes.
        cached_tokens: Prompt tokens from the prefix cache.
        preemptions: Preemptions over all requests.
        steps: The steps, in groups of consecutive ones with the same requests.
    """

    queued_us: Vector
    scheduled_us: Vector
    first_us: Vector
    last_us: Vector
    cached_tokens: Integers
    preemptions: int
    steps: tuple[StepGroup, ...]


def replay(
    load: RequestLoad,
    times: StepTimeModel,
    settings: EngineSettings,
    *,
    admission_us: Vector | float = 0.0,
    rules: SchedulerRules = VLLM_RULES,
) -> ReplayedTimes:
    """Replay requests.

    Args:
        load: The requests.
        times: The model of step times.
        settings: Settings of the server.
        admission_us: Arrival to the engine's queue, without the wait for a step boundary, shape (n,) or one for all.
        rules: Rules of the scheduler on which servers differ.
    """
    queued: Vector = np.asarray(load.arrival_us + admission_us, dtype=float)
    nothing = np.zeros(len(queued), dtype=np.int64)
    prefix = nothing if load.prefix_tokens is None else load.prefix_tokens
    done = nothing if load.generated_tokens is None else load.generated_tokens
    columns = (queued, load.prompt_tokens, load.output_tokens, prefix)
    requests = [
        ReplayedRequest(i, *row) for i, row in enumerate(zip(*(c.tolist() for c in columns), strict=True))
    ]
    # With as many blocks as all requests fill, memory never runs out.
    most = sum(-(-(r.prompt + r.output) // settings.block_size) + 1 for r in requests)
    engine = CountedEngine(times, settings, most, rules, shares_prefixes=bool(np.any(prefix)))
    for at in np.flatnonzero(done).tolist():
        engine.resume(requests[at], int(done[at]))
    order = np.argsort(queued, kind="stable")
    for at in order[done[order] == 0].tolist():
        engine.send(requests[at])
    engine.run()
    return ReplayedTimes(
        queued,
        np.array([r.scheduled_us for r in requests]),
        np.array([r.first_us for r in requests]),
        np.array([r.last_us for r in requests]),
        np.array([r.cached for r in requests]),
        engine.preemptions,
        tuple(engine.steps),
    )
