"""The options of a synthetic run, the checks of their values, and the load they describe: who arrives when, with how many tokens.

Load, engine and sampling draw from streams of their own: an option of one leaves the draws of the others as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from tracefit.errors import UsageError
from tracefit.synth.engine import NO_PREFIX, SchedulerConfig
from tracefit.synth.laws import (
    GPUS,
    MODELS,
    AdmissionLaw,
    DepartureLaw,
    LinearLaw,
    Model,
    RooflineLaw,
    StepLaw,
    lookup,
)

_INFINITE = float("inf")

LawName: TypeAlias = Literal["linear", "roofline"]
DurationMode: TypeAlias = Literal["schedule", "step"]
InstanceIds: TypeAlias = Literal["auto", "none", "server", "process"]
QueuedStamp: TypeAlias = Literal["step_start", "arrival"]


@dataclass(frozen=True, slots=True)
class LengthMix:
    """A mixture of log-normal lengths.

    Attributes:
        components: (weight, median in tokens, sigma of the logarithm) of each; a sigma of 0 is a constant.
        minimum: Shortest length, tokens.
        maximum: Longest length, tokens.
    """

    components: tuple[tuple[float, float, float], ...]
    minimum: int = 1
    maximum: int = 4_096


@dataclass(frozen=True, slots=True)
class LoadPhase:
    """A period of the load.

    Attributes:
        name: For the reader.
        share: Share of the requests, relative to the other phases.
        rate: Factor on the arrival rate.
    """

    name: str
    share: float
    rate: float


DEFAULT_PHASES = (LoadPhase("light", 0.3, 0.4), LoadPhase("burst", 0.2, 3.0), LoadPhase("heavy", 0.5, 1.2))

_SURGE_SHARE = 0.3
"""Share of a run's time that a surge takes, at its end: what training holds out."""


def surge_phases(factor: float) -> tuple[LoadPhase, ...]:
    """Return a load that is steady for 70 % of its time and `factor` times as heavy in the rest.

    Raises:
        UsageError: The factor is not above 0.
    """
    if not factor > 0:
        raise UsageError("must be above 0", where="surge")
    # A phase's share is of the requests: its time times its rate.
    return (LoadPhase("steady", 1 - _SURGE_SHARE, 1.0), LoadPhase("surge", _SURGE_SHARE * factor, factor))


@dataclass(frozen=True, slots=True)
class SynthOptions:
    """One synthetic run; equal options give equal bytes.

    Attributes:
        name: Name of the run folder.
        seed: Seed of every draw. The draws of load, engine and sampling are separate streams: other sampling
            rates show more or less of the same run.
        law: Step-time law by name (coefficients by default, or from model and GPU) or as an object.
        admission: API work before the engine's input socket.
        departure: FINISHED to DEPARTED.
        model: Name in `MODELS`.
        gpu: Name in `GPUS`; None leaves the GPU out of the run's config and allows no roofline.
        tp: Tensor parallel size.
        requests: Requests per server, over all its epochs.
        rate_per_s: Mean arrival rate where a phase's factor is 1.
        prompt_tokens: Prompt lengths.
        output_tokens: Output lengths.
        phases: The load, in order.
        stop_fraction: Share of requests that stop before their `max_tokens`.
        abort_fraction: Share of requests whose client disconnects, a third each while waiting, in prefill and
            in decode.
        chat_fraction: Share of requests on the chat route.
        non_streaming_fraction: Share of completions requests that do not stream.
        prefix_fraction: Share of requests that start with a shared prefix.
        prefix_tokens: Length of a shared prefix, cut to whole blocks.
        num_prefixes: Different shared prefixes.
        max_model_len: Longest prompt plus output; cut to what KV cache and token budget can hold.
        max_num_seqs: Requests that can run at once.
        max_num_batched_tokens: Token budget of a step.
        num_blocks: KV blocks, the null block included.
        block_size: Tokens in a block.
        chunked_prefill: Whether a prompt may be split over steps.
        noise: Sigma of the log-normal factor on every step time.
        hiccup_rate: Chance that a step is delayed by something outside the law.
        hiccup_us: Mean of that delay (exponential).
        empty_step_us: Time of a step without tokens.
        step_sampling: Chance of a step to be in the trace.
        rich_sampling: Chance of such a step to carry request snapshots too.
        journey_sampling: Chance of a request to be in the trace.
        queued_stamp: When QUEUED is stamped: at the step start at which the engine core drains its socket, as the
            real emitter does, or when the API process is done with the request, as other engines do. Either way the
            next step start is when the scheduler sees it.
        duration: What `step.duration_us` says: time in `schedule()`, as the real emitter does, or the step time.
        span_event_limit: Events a span keeps: the last ones; None keeps all.
        steps_per_span: Steps a step span covers.
        epochs: Lives of the engine: each restart begins the step counter at 1 again, on the same clock.
        servers: Servers in the same file, each with its own clock.
        instance_ids: The owner of a `service.instance.id`: none, a server as a whole, or, as newer SDKs do, each
            process (the API's differs from the engine's). Auto is `none` for one server, else `server`.
    """

    name: str = "synth-run"
    seed: int = 0
    law: LawName | StepLaw = "linear"
    admission: AdmissionLaw = field(default_factory=AdmissionLaw)
    departure: DepartureLaw = field(default_factory=DepartureLaw)
    model: str = "llama-8b"
    gpu: str | None = "H100"
    tp: int = 1
    requests: int = 300
    rate_per_s: float = 14.0
    prompt_tokens: LengthMix = LengthMix(((0.6, 160.0, 0.6), (0.4, 600.0, 0.5)), minimum=4)
    output_tokens: LengthMix = LengthMix(((0.5, 40.0, 0.7), (0.5, 150.0, 0.5)))
    phases: tuple[LoadPhase, ...] = DEFAULT_PHASES
    stop_fraction: float = 0.5
    abort_fraction: float = 0.02
    chat_fraction: float = 0.2
    non_streaming_fraction: float = 0.1
    prefix_fraction: float = 0.0
    prefix_tokens: int = 128
    num_prefixes: int = 4
    max_model_len: int = 4_096
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2_048
    num_blocks: int = 4_097
    block_size: int = 16
    chunked_prefill: bool = True
    # Real step times leave a few percent about a linear model: 2.0 to 5.0 % on H100 traces.
    noise: float = 0.03
    hiccup_rate: float = 0.0
    hiccup_us: float = 30_000.0
    empty_step_us: float = 260.0
    step_sampling: float = 1.0
    rich_sampling: float = 0.0
    journey_sampling: float = 1.0
    queued_stamp: QueuedStamp = "step_start"
    duration: DurationMode = "schedule"
    span_event_limit: int | None = None
    steps_per_span: int = 100
    epochs: int = 1
    servers: int = 1
    instance_ids: InstanceIds = "auto"

    @property
    def architecture(self) -> Model:
        """The model that is served."""
        return lookup(MODELS, self.model, option="model")

    @property
    def scheduler(self) -> SchedulerConfig:
        """The limits of the engine."""
        # vLLM's prefix cache holds whole blocks: what is beyond the last one is computed by each request.
        prefix_blocks = self.prefix_tokens // self.block_size if self.prefix_fraction else 0
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            chunked_prefill=self.chunked_prefill,
            prefix_tokens=prefix_blocks * self.block_size,
        )

    @property
    def longest_sequence_tokens(self) -> int:
        """Longest prompt plus output the run holds."""
        return min(self.max_model_len, self.scheduler.longest_sequence_tokens)

    def step_law(self) -> StepLaw:
        """Return the law object, built from its name where only that was given.

        Raises:
            UsageError: The law is unknown, or a roofline lacks a GPU.
        """
        if not isinstance(self.law, str):
            return self.law
        if self.law == "linear":
            return LinearLaw()
        if self.law != "roofline":
            raise UsageError(f"unknown law {self.law!r}", where="law", hint="known: linear, roofline")
        if self.gpu is None:
            known = ", ".join(sorted(GPUS))
            raise UsageError("the roofline law needs a GPU", where="gpu", hint=f"known: {known}")
        return RooflineLaw(self.architecture, lookup(GPUS, self.gpu, option="gpu"), tp=self.tp)

    def check(self) -> None:
        """Refuse what cannot be simulated.

        Raises:
            UsageError: An option is out of range or unknown.
        """
        self.step_law()
        lookup(MODELS, self.model, option="model")
        if self.gpu is not None:
            lookup(GPUS, self.gpu, option="gpu")
        self._check_ranges()
        self._check_choices()
        self._check_lengths()

    def _check_ranges(self) -> None:
        for names, (low, high) in _BOUNDS.items():
            for where in names:
                value = getattr(self, where)
                # A limit of None is none; NaN is within no bounds.
                if value is not None and not low <= value <= high:
                    wanted = f"at least {low:g}" if high == _INFINITE else f"between {low:g} and {high:g}"
                    raise UsageError(f"{value} is out of range", where=where, hint=f"must be {wanted}")

    def _check_choices(self) -> None:
        for where, kind, word in _CHOICES:
            value = getattr(self, where)
            if value not in get_args(kind):
                hint = f"known: {', '.join(get_args(kind))}"
                raise UsageError(f"unknown {word} {value!r}", where=where, hint=hint)
        if not self.phases or any(phase.share <= 0 or phase.rate <= 0 for phase in self.phases):
            raise UsageError("every phase needs a share and a rate above 0", where="phases")
        if not self.rate_per_s > 0:
            raise UsageError("must be above 0", where="rate_per_s")
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise UsageError(f"{self.name!r} is not a folder's name", where="name")

    def _check_lengths(self) -> None:
        for where, mix in (("prompt_tokens", self.prompt_tokens), ("output_tokens", self.output_tokens)):
            if not mix.components or not 1 <= mix.minimum <= mix.maximum:
                raise UsageError("needs a component and 1 <= minimum <= maximum", where=where)
            if any(weight <= 0 or median < 1 or sigma < 0 for weight, median, sigma in mix.components):
                hint = "weights above 0, medians from 1, sigmas from 0"
                raise UsageError("impossible component", where=where, hint=hint)
        # A shared prefix, a prompt token of its own, and an output token.
        needed = self.scheduler.prefix_tokens + 2
        if self.longest_sequence_tokens < needed:
            raise UsageError(
                f"no request fits: the KV cache or the token budget holds {self.longest_sequence_tokens} tokens",
                where="num_blocks",
                hint=f"at least {needed} are needed",
            )


_CHOICES = (
    ("duration", DurationMode, "mode"),
    ("queued_stamp", QueuedStamp, "stamp"),
    ("instance_ids", InstanceIds, "choice"),
)
_SIZES = ("requests", "tp", "max_num_seqs", "max_num_batched_tokens", "block_size", "steps_per_span")
_SHARES = ("stop_fraction", "abort_fraction", "chat_fraction", "non_streaming_fraction", "prefix_fraction")
_RATES = ("hiccup_rate", "step_sampling", "rich_sampling", "journey_sampling")
_BOUNDS = {
    (*_SIZES, "epochs", "servers", "num_prefixes", "span_event_limit"): (1, _INFINITE),
    (*_SHARES, *_RATES): (0, 1),
    ("noise", "hiccup_us"): (0, _INFINITE),
    # A shorter empty step leaves no room for the stamps in it.
    ("empty_step_us",): (10, _INFINITE),
}
"""Names of options, and the least and largest value of each."""


# -- the load -------------------------------------------------------------------------------------------


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
