"""Sources of step times: how each one gets its times, and how far these are from those of the steps.

A source is declared where its steps are made: those that follow from spans here and in `tables.stages`, those of a
recording in the module of `recordings` that reads it. Other code asks for properties, so that a new recording is one
more declaration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec
import polars as pl

if TYPE_CHECKING:
    from collections.abc import Callable


class StepFields(msgspec.Struct, frozen=True, kw_only=True):
    """How a record names the times of its step, for messages about a wrong unit.

    Attributes:
        time: The field with the time of the step, in seconds.
        stamp: The field with the time of receipt, in unix ns.
        units: The units in which all fields of times are read.
    """

    time: str
    stamp: str
    units: str


class CycleSource(msgspec.Struct, frozen=True, kw_only=True):
    """A value of `cycle_source` in `steps` and `timeline`, and of `source` in `beta_training`.

    Attributes:
        name: The value.
        interval: The interval that is the time of a step, as published with a model; empty for the step clock's, from
            start to start.
        error: How far its times are from those of the steps, in words.
        recorder: The recorder of the steps in words; empty if they follow from spans.
        evidence: Its rows in words, where evidence is counted.
        seen_by: `engine`, whose counter numbers the steps; `client`, whose benchmarks are numbered apart, and which is
            the last resort; or `spans`.
        time: How a step gets its time: a record has it (`stated`), it lies between the stamps at the ends of two steps
            (`stamped`), or between two starts (`between`).
        sd_us: Standard deviation of a stated time, or of a stamp.
        is_one_step: Whether a row is the time of one step, not a mean over several.
        from_requests: Whether the batches follow from the times of requests, and so may include prefix-cache hits.
        means: The source of means over several steps, where stamps are too coarse to bound single ones.
        from_sglang: The source of the same records if the server is SGLang.
        of_traced_server: Whether its steps are the traced server's, if a run has one such server and one engine with
            records.
        has_sweep: Whether a server sweeps through batch sizes before the load while it records.
        is_by_rank: Whether data-parallel ranks record apart, so that some may be missing.
        fields: The names of its times, if their units are checked against each other.
        if_lost: Where its records are sampled, and how to record all, as a warning where numbers of the step counter
            are missing.
        caution: A warning wherever it occurs while the server's scheduler runs ahead of the GPU.
        target_source: Source of the target in coefficient files.
        notes: The gaps of its records, as notes of a model that was fitted on them.
    """

    name: str
    interval: str = ""
    error: str = ""
    recorder: str = ""
    evidence: str = "recorded steps"
    seen_by: Literal["engine", "client", "spans"] = "engine"
    time: Literal["stated", "stamped", "between"] = "stated"
    sd_us: float = 0.0
    is_one_step: bool = True
    from_requests: bool = False
    means: str = ""
    from_sglang: str = ""
    of_traced_server: bool = False
    has_sweep: bool = False
    is_by_rank: bool = False
    fields: StepFields | None = None
    if_lost: str = ""
    caution: str = ""
    target_source: str = "step_clock"
    notes: tuple[str, ...] = ()

    @property
    def is_stated(self) -> bool:
        """Whether a record has the time of the step."""
        return self.time == "stated"

    @property
    def is_stamped(self) -> bool:
        """Whether records have stamps at the ends of steps."""
        return self.time == "stamped"

    @property
    def is_by_client(self) -> bool:
        """Whether a client saw the steps."""
        return self.seen_by == "client"


SOURCES: dict[str, CycleSource] = {}
"""Sources by name: those of recordings once `tracefit.recordings` is imported."""

_Property: TypeAlias = "Callable[[CycleSource], object]"


def declare(source: CycleSource) -> CycleSource:
    """Declare a source of step times."""
    SOURCES[source.name] = source
    return source


def names_of(has: _Property) -> list[str]:
    """Return the names of the sources that have a property."""
    return [source.name for source in SOURCES.values() if has(source)]


def is_from(has: _Property, column: str = "cycle_source") -> pl.Expr:
    """Return which rows are from a source that has a property; those without a source are not."""
    return pl.col(column).is_in(names_of(has)).fill_null(value=False)


def is_by_client(column: str = "cycle_source") -> pl.Expr:
    """Return which rows are steps that a client saw."""
    return is_from(lambda source: source.is_by_client, column)


def is_one_step() -> pl.Expr:
    """Return which rows of `beta_training` are the time of one sampled or recorded step."""
    return is_from(lambda source: source.is_one_step, "source")


ADJACENT = declare(
    CycleSource(
        name="adjacent",
        error="that of the server's own stamps",
        evidence="adjacent pairs",
        seen_by="spans",
        time="between",
    )
)
INTERVAL = declare(
    CycleSource(
        name="interval",
        error="single steps are not known; an end is off by the lag of its event",
        evidence="intervals between known starts",
        seen_by="spans",
        time="between",
        is_one_step=False,
    )
)
REQUEST_SOURCE = declare(
    CycleSource(
        name="request",
        error="single steps are not known; an end is off by the time at which a token is stamped",
        evidence="intervals between token times",
        seen_by="spans",
        time="between",
        is_one_step=False,
        from_requests=True,
    )
)
DURATION_SOURCE = declare(
    CycleSource(
        name="duration",
        error="the time inside schedule() if the server stamps only that",
        evidence="durations",
        seen_by="spans",
        time="between",
    )
)
