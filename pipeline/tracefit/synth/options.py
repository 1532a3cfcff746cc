"""The options of a synthetic run, and the checks of their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, NoReturn, TypeAlias, get_args, get_origin, get_type_hints

import msgspec

from tracefit.errors import UsageError
from tracefit.options import OptionFlag, named, option
from tracefit.synth.laws import (
    GPUS,
    MODELS,
    AdmissionLaw,
    DepartureLaw,
    LinearLaw,
    RooflineLaw,
    ServedModel,
    StepLaw,
    lookup,
)

_INFINITE = float("inf")

LawName: TypeAlias = Literal["linear", "roofline"]
Form: TypeAlias = Literal[
    "instrumented", "stock", "fpm", "log", "log_seconds", "sglang", "request_log", "bench", "guidellm"
]
DurationMode: TypeAlias = Literal["schedule", "step"]
InstanceIds: TypeAlias = Literal["auto", "none", "server", "process"]
QueuedStamp: TypeAlias = Literal["step_start", "arrival"]


SynthOutOption = Annotated[str | Path, OptionFlag("Folder in which to make the run folder.", "out", kind=Path)]
SurgeOption = Annotated[
    float | None,
    OptionFlag(
        (
            "Factor on the arrival rate in the last 30 % of the time, which is steady before; if not given, the load "
            "is light, then a burst, then heavy."
        ),
        "surge",
    ),
]
FormatsOption = Annotated[
    Literal["json", "protobuf", "both"],
    OptionFlag("JSON lines, framed protobuf, or a run folder of each.", "formats", flag="--format"),
]
CompressOption = Annotated[Literal["none", "gz", "zst"], OptionFlag("Compression of the trace files.", "compress")]


class LengthMix(msgspec.Struct, frozen=True):
    """A mixture of log-normal lengths, in tokens."""

    # (weight, median in tokens, sigma of the logarithm) of each; a sigma of 0 is a constant.
    components: tuple[tuple[float, float, float], ...]
    minimum: int = 1
    maximum: int = 4_096


class LoadPhase(msgspec.Struct, frozen=True):
    """A period of the load."""

    name: str  # for the reader
    share: float  # of the requests, relative to the other phases
    rate: float  # factor on the arrival rate


class LengthPhase(LoadPhase, frozen=True):
    """A period of the load whose requests have lengths of their own."""

    prompt_tokens: LengthMix
    output_tokens: LengthMix


DEFAULT_PHASES = (LoadPhase("light", 0.3, 0.4), LoadPhase("burst", 0.2, 3.0), LoadPhase("heavy", 0.5, 1.2))

_SURGE_SHARE = 0.3
"""Share of a run's time that a surge takes, at its end: the part that training holds out."""


def surge_phases(surge: float) -> tuple[LoadPhase, ...]:
    """Return a load that is steady for 70 % of its time and `surge` times as heavy in the rest.

    Raises:
        UsageError: The factor is not above 0.
    """
    if not surge > 0:
        raise UsageError("must be above 0", where=named(SurgeOption))
    # A phase's share of the requests is its time times its rate.
    return (LoadPhase("steady", 1 - _SURGE_SHARE, 1.0), LoadPhase("surge", _SURGE_SHARE * surge, surge))


@dataclass(frozen=True, slots=True)
class SynthOptions:
    """One synthetic run; equal options give equal bytes.

    Sampling has a separate random stream, so its rates show more or less of the same run.

    Attributes:
        name: Name of the run folder.
        seed: Seed of every draw.
        law: Law of step times; its coefficients are in truth.json.
        model: Model preset, such as llama-8b.
        gpu: GPU preset, such as H100.
        tp: Tensor-parallel ranks.
        requests: Requests per server.
        rate_per_s: Mean arrivals per second.
        num_blocks: KV blocks, including the null block; a small number causes a queue and preemptions.
        noise: Sigma of the log-normal factor on a step's time.
        form: Content of the run: spans of inference-sim's fork (instrumented) or of an unmodified vLLM (stock, one span
            per request); only steps, as ForwardPassMetrics (fpm) or as lines of vLLM's log with microseconds (log) or
            whole seconds (log_seconds); SGLang's spans; the engine's times of each request (request_log); or the log of
            a load generator, with the time of every token (bench) or of the first and last token (guidellm).
        step_sampling: Share of steps that are traced.
        rich_sampling: Share of traced steps that have request snapshots.
        journey_sampling: Share of requests that are traced; for stock spans the trace id decides.
        duration: Meaning of step.duration_us: the time in schedule(), or the time of the step.
        queued_stamp: Time of QUEUED: the step start after the API work, or the end of that work.
    """

    name: str = option("synth-run")
    seed: int = option(0, minimum=0)
    law: LawName | StepLaw = option("linear", kind=LawName)
    model: str = option("llama-8b")
    gpu: str | None = option("H100")
    tp: int = option(1, minimum=1)
    requests: int = option(300, minimum=1)
    rate_per_s: float = option(14.0, flag="--rate")
    num_blocks: int = option(4_097, flag="--blocks", minimum=2)
    # Real step times leave a few percent about a linear model: 2.0 to 5.0 % on H100 traces.
    noise: float = option(0.03, minimum=0)
    form: Form = option("instrumented")
    step_sampling: float = option(1.0, minimum=0, maximum=1)
    rich_sampling: float = option(0.0, minimum=0, maximum=1)
    journey_sampling: float = option(1.0, minimum=0, maximum=1)
    duration: DurationMode = option("schedule")
    queued_stamp: QueuedStamp = option("step_start")

    admission: AdmissionLaw = field(default_factory=AdmissionLaw)
    departure: DepartureLaw = field(default_factory=DepartureLaw)
    prompt_tokens: LengthMix = LengthMix(((0.6, 160.0, 0.6), (0.4, 600.0, 0.5)), minimum=4)
    output_tokens: LengthMix = LengthMix(((0.5, 40.0, 0.7), (0.5, 150.0, 0.5)))
    phases: tuple[LoadPhase, ...] = DEFAULT_PHASES
    stop_fraction: float = 0.5  # of requests that stop before their `max_tokens`
    abort_fraction: float = 0.02  # whose client disconnects: a third each waiting, in prefill, in decode
    chat_fraction: float = 0.2  # on the chat route
    non_streaming_fraction: float = 0.1  # of completions requests that do not stream
    prefix_fraction: float = 0.0  # that start with a shared prefix
    prefix_tokens: int = 128  # length of a shared prefix, cut to whole blocks
    num_prefixes: int = 4

    max_model_len: int = 4_096  # cut to the tokens that fit into KV cache and token budget
    max_num_seqs: int = 64  # requests that can run at once
    max_num_batched_tokens: int = 2_048  # token budget of a step
    block_size: int = 16  # tokens in a block
    chunked_prefill: bool = True  # a prompt may be split over steps

    hiccup_rate: float = 0.0  # chance that a step is delayed by something outside the law
    hiccup_us: float = 30_000.0  # mean of that delay (exponential)
    empty_step_us: float = 260.0  # time of a step without tokens

    span_event_limit: int | None = None  # events a span keeps, the last ones; None keeps all
    steps_per_span: int = 100
    epochs: int = 1  # lives of the engine: each restart counts steps from 1 again, on the same clock
    servers: int = 1  # in the same file, each with its own clock
    # Which resource has a `service.instance.id`: none, a server as a whole, or each process, as newer SDKs do
    # (the API's differs from the engine's). Auto is `none` for one server, else `server`.
    instance_ids: InstanceIds = "auto"

    @property
    def architecture(self) -> ServedModel:
        """The model that is served."""
        return lookup(MODELS, self.model, option="model")

    @property
    def shared_prefix_tokens(self) -> int:
        """Length of every shared prefix; 0 where the prefix cache is off."""
        # vLLM's prefix cache has whole blocks: each request computes the tokens beyond the last one.
        return self.prefix_tokens // self.block_size * self.block_size if self.prefix_fraction else 0

    @property
    def longest_sequence_tokens(self) -> int:
        """Longest prompt plus output that can always finish, however often it is preempted."""
        in_cache = (self.num_blocks - 1) * self.block_size
        in_step = in_cache if self.chunked_prefill else self.max_num_batched_tokens
        return min(self.max_model_len, in_cache, in_step)

    def step_law(self) -> StepLaw:
        """Return the law object, built from its name if only that was given.

        Raises:
            UsageError: The law is unknown, or a roofline lacks a GPU.
        """
        return lookup(_LAWS, self.law, option="law")(self) if isinstance(self.law, str) else self.law

    def check(self) -> None:
        """Refuse options that cannot be simulated.

        Raises:
            UsageError: An option is out of range or unknown.
        """
        self.step_law()
        lookup(MODELS, self.model, option="model")
        if self.gpu is not None:
            lookup(GPUS, self.gpu, option="gpu")
        for name, kind in get_type_hints(SynthOptions).items():
            if get_origin(kind) is Literal and (value := getattr(self, name)) not in get_args(kind):
                _refuse(name, f"unknown value {value!r}", f"known: {', '.join(get_args(kind))}")
        self._check_numbers()
        if not self.name or "/" in self.name or self.name.startswith("."):
            _refuse("name", f"{self.name!r} is not a folder's name")

    def _check_numbers(self) -> None:
        for names, (low, high) in _OPTION_BOUNDS.items():
            for name in names:
                value = getattr(self, name)
                # None means no limit; NaN is outside all bounds.
                if value is not None and not low <= value <= high:
                    wanted = f"at least {low:g}" if high == _INFINITE else f"between {low:g} and {high:g}"
                    _refuse(name, f"{value} is out of range", f"must be {wanted}")
        if not self.rate_per_s > 0:
            _refuse("rate_per_s", "must be above 0")
        if not self.phases or any(phase.share <= 0 or phase.rate <= 0 for phase in self.phases):
            _refuse("phases", "every phase needs a share and a rate above 0")
        for name, mix in (("prompt_tokens", self.prompt_tokens), ("output_tokens", self.output_tokens)):
            if not mix.components or not 1 <= mix.minimum <= mix.maximum:
                _refuse(name, "needs a component and 1 <= minimum <= maximum")
            if any(weight <= 0 or median < 1 or sigma < 0 for weight, median, sigma in mix.components):
                _refuse(name, "impossible component", "weights above 0, medians from 1, sigmas from 0")
        # A shared prefix, another prompt token, and an output token.
        needed, most = self.shared_prefix_tokens + 2, self.longest_sequence_tokens
        if most < needed:
            fault = f"no request fits: the KV cache or the token budget holds {most} tokens"
            _refuse("num_blocks", fault, f"at least {needed} are needed")


def _refuse(name: str, fault: str, hint: str | None = None) -> NoReturn:
    raise UsageError(fault, where=named(SynthOptions, name), hint=hint)


_LAWS: Mapping[str, Callable[[SynthOptions], StepLaw]] = {
    "linear": lambda _: LinearLaw(),
    "roofline": lambda run: RooflineLaw(run.architecture, lookup(GPUS, run.gpu, option="gpu"), tp=run.tp),
}
_SIZES = ("requests", "tp", "max_num_seqs", "max_num_batched_tokens", "block_size", "steps_per_span")
_SHARES = ("stop_fraction", "abort_fraction", "chat_fraction", "non_streaming_fraction", "prefix_fraction")
_SHARE_OPTIONS = ("hiccup_rate", "step_sampling", "rich_sampling", "journey_sampling")
_OPTION_BOUNDS = {
    (*_SIZES, "epochs", "servers", "num_prefixes", "span_event_limit"): (1, _INFINITE),
    (*_SHARES, *_SHARE_OPTIONS): (0, 1),
    ("noise", "hiccup_us"): (0, _INFINITE),
    # A shorter empty step leaves no room for the stamps in it.
    ("empty_step_us",): (10, _INFINITE),
}
"""Names of options, and the least and largest value of each."""
