"""Generate the load: arrival times, token counts, and the clients that leave early."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tracefit.synth.engine import NO_PREFIX

if TYPE_CHECKING:
    from tracefit.synth.options import LengthMix, SynthOptions


class AbortStage(StrEnum):
    """Where in its life a request loses its client."""

    NEVER = ""
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as its client sends it.

    Attributes:
        number: Running number on its server, from 1.
        phase: Name of the load's phase.
        arrival_ns: Time of arrival, monotonic.
        api_work_us: Time from there to the engine's input socket.
        prompt_tokens: Prompt length.
        output_tokens: Tokens it gets if it is left alone.
        max_tokens: The limit of output tokens in the request.
        prefix: Number of its shared prefix, or `NO_PREFIX`.
        is_chat: Whether it came on the chat route.
        is_streaming: Whether it streams.
        abort_stage: When its client goes.
        abort_share: How far into that stage, 0 to 1.
    """

    number: int
    phase: str
    arrival_ns: int
    api_work_us: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    prefix: int
    is_chat: bool
    is_streaming: bool
    abort_stage: AbortStage
    abort_share: float

    def api_id(self, server: int) -> str:
        """Return the id that the API process of a server gives the request."""
        route = "chatcmpl" if self.is_chat else "cmpl"
        return f"{route}-req-{server}-{self.number:06d}" if server else f"{route}-req-{self.number:06d}"

    def core_id(self, server: int, token: str) -> str:
        """Return its id in the engine core: longer by a random token and, for completions, the number of the prompt."""
        return f"{self.api_id(server)}-{token}" if self.is_chat else f"{self.api_id(server)}-0-{token}"


def arrivals(
    options: SynthOptions, rng: np.random.Generator, *, count: int, first_number: int, start_ns: int
) -> list[Arrival]:
    """Return `count` arrivals in order of time.

    Args:
        options: The run.
        rng: Source of every draw.
        count: How many.
        first_number: Running number of the first.
        start_ns: Time the load begins.
    """
    names, gaps_s = _gaps_s(options, rng, count)
    arrival_ns = start_ns + np.cumsum(np.round(gaps_s * 1e9).astype(np.int64))
    prompt, output, prefix = _lengths(options, rng, count)
    # A request that stops by itself asked for more than it got: `finish.status` is stopped, not length.
    stopped = rng.random(count) < options.stop_fraction
    spare = np.where(stopped, rng.integers(1, 257, count), 0)
    jitter = np.exp(rng.normal(0.0, 1.0, count) * options.admission.jitter)
    chat = rng.random(count) < options.chat_fraction
    streaming = rng.random(count) >= options.non_streaming_fraction
    stages = _abort_stages(options, rng, output)
    shares = rng.random(count)
    return [
        Arrival(
            number=first_number + i,
            phase=names[i],
            arrival_ns=int(arrival_ns[i]),
            api_work_us=options.admission.work_us(int(prompt[i])) * float(jitter[i]),
            prompt_tokens=int(prompt[i]),
            output_tokens=int(output[i]),
            max_tokens=int(output[i] + spare[i]),
            prefix=int(prefix[i]),
            is_chat=bool(chat[i]),
            is_streaming=bool(streaming[i]),
            abort_stage=stages[i],
            abort_share=float(shares[i]),
        )
        for i in range(count)
    ]


def _gaps_s(
    options: SynthOptions, rng: np.random.Generator, count: int
) -> tuple[list[str], npt.NDArray[np.float64]]:
    """Return each request's phase and the time since the one before: a Poisson process per phase."""
    shares = np.array([phase.share for phase in options.phases])
    # Phases share out the requests, not the time: each has its number of requests whatever the draws.
    bounds = np.round(np.cumsum(shares / shares.sum()) * count).astype(int)
    index = np.searchsorted(bounds, np.arange(count), side="right")
    rates = np.array([phase.rate for phase in options.phases]) * options.rate_per_s
    gaps = rng.exponential(1.0, count) / rates[index]
    return [options.phases[i].name for i in index], gaps


def _lengths(
    options: SynthOptions, rng: np.random.Generator, count: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return prompt lengths, output lengths and prefix numbers that the engine can hold."""
    longest = options.longest_sequence_tokens
    prefix_tokens = options.scheduler.prefix_tokens
    shared = rng.random(count) < options.prefix_fraction
    prefix = np.where(shared, rng.integers(0, options.num_prefixes, count), NO_PREFIX)
    if not prefix_tokens:
        prefix = np.full(count, NO_PREFIX)
    prompt = _draw(options.prompt_tokens, rng, count)
    # A shared prefix is never the whole prompt: the last token must be computed.
    prompt = np.where(prefix != NO_PREFIX, prompt + prefix_tokens, prompt)
    prompt = np.minimum(prompt, longest - 1)
    output = np.minimum(_draw(options.output_tokens, rng, count), longest - prompt)
    return prompt.astype(np.int64), output.astype(np.int64), prefix.astype(np.int64)


def _draw(mix: LengthMix, rng: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
    weights, medians, sigmas = (np.array(column) for column in zip(*mix.components, strict=True))
    which = rng.choice(len(weights), count, p=weights / weights.sum())
    lengths = medians[which] * np.exp(sigmas[which] * rng.normal(0.0, 1.0, count))
    return np.clip(np.round(lengths), mix.minimum, mix.maximum).astype(np.int64)


def _abort_stages(
    options: SynthOptions, rng: np.random.Generator, output_tokens: npt.NDArray[np.int64]
) -> list[AbortStage]:
    stages = (AbortStage.WAITING, AbortStage.PREFILL, AbortStage.DECODE)
    count = len(output_tokens)
    aborted = rng.random(count) < options.abort_fraction
    which = rng.integers(0, 3, count)
    # No client leaves during decode if its request has none.
    which = np.where(output_tokens < 2, which % 2, which)
    return [stages[which[i]] if aborted[i] else AbortStage.NEVER for i in range(count)]
