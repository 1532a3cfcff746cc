"""Replay the requests of a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from tracefit.replay.counted import CountedEngine
from tracefit.replay.engine import VLLM_RULES, ReplayedRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracefit.replay.engine import EngineSettings, SchedulerRules, StepGroup, StepTimeModel
    from tracefit.statistics import Integers, Vector


class RequestLoad(msgspec.Struct, frozen=True):
    """Requests in the order of arrival, every array of shape (n,).

    Attributes:
        arrival_us: Arrival.
        prompt_tokens: Prompt tokens.
        output_tokens: Output tokens, at least 1.
        prefix_tokens: Length of the prefix that each prompt shares with all prompts that share as many tokens; 0 if not
            given.
        generated_tokens: Output tokens that each request has when the replay begins, at 0; requests with any run from
            then on.
    """

    arrival_us: Vector | Integers
    prompt_tokens: Integers
    output_tokens: Integers
    prefix_tokens: Integers | None = None
    generated_tokens: Integers | None = None


class ReplayedTimes(msgspec.Struct, frozen=True):
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
    requests = [ReplayedRequest(i, *row) for i, row in enumerate(zip(*(c.tolist() for c in columns), strict=True))]
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


class TokenGaps(NamedTuple):
    """Times between two tokens of a request: a step gives one to every request that decodes, and all of them wait for
    it.

    Attributes:
        ends_us: When each step ends, shape (n,).
        gaps_us: Since the step before it ended, shape (n,).
        counts: Requests that decode in it, shape (n,).
    """

    ends_us: Vector
    gaps_us: Vector
    counts: Integers

    def within(self, begin_us: float, end_us: float) -> TokenGaps:
        """Return those of the steps that end between two times."""
        is_within = (self.ends_us >= begin_us) & (self.ends_us <= end_us)
        return TokenGaps(self.ends_us[is_within], self.gaps_us[is_within], self.counts[is_within])


def token_gaps(steps: Sequence[StepGroup], decoding: Sequence[int]) -> TokenGaps:
    """Return the times between tokens from the groups of steps of a replay, and the requests that decode in each group.

    A request decodes only after a step that gave it a token, so that no idle time is in a gap. One that is preempted
    waits for longer.
    """
    ends = np.concatenate([np.zeros(0), *(ends for ends, _, _ in steps)])
    counts = np.repeat(np.asarray(decoding, dtype=np.int64), [len(ends) for ends, _, _ in steps])
    decodes = counts > 0
    return TokenGaps(ends[decodes], np.diff(ends, prepend=0.0)[decodes], counts[decodes])
