"""Targets: the durations that models predict, each declared once.

A declaration states the measured interval, its events, the features and forms of a model, and the latencies
it adds to. Training, composition of latencies, `inspect`, `requests` and predictions read it from here. A new
target of requests is one more `Target` below, its feature set in `features.sets`, and, if its form is new,
that form in `fit.alpha`.

Nothing heavy is imported here: predictions need only the names.
"""

from __future__ import annotations

from typing import Literal

import msgspec

State = Literal["queue", "latest_step", "own_step"]
"""Engine state that the features of a target describe; see `features.training.alpha_rows`."""

FormName = Literal["line", "regimes", "two_regimes", "step_boundary", "constant"]

# In the order of a request's life: a latency is composed of its parts in the order in which they begin.
_EVENT_ORDER = ("arrival_ns", "queued_ns", "first_scheduled_ns", "first_token_ns", "finished_ns")


class Target(msgspec.Struct, frozen=True):
    """One interval in the life of a request, predicted by the model `alpha.<name>`.

    Attributes:
        name: Name in files, options and training frames.
        label: Its name in reports.
        title: Its name in messages, for readers without context.
        definition: The two events it lies between, as published with the model and in the report's list of terms.
        column: Column of the `requests` table with its duration, in us.
        begins: Column of the `requests` table with the event it begins at, in ns.
        step: Column of the `requests` table with the step counter at that event.
        feature_set: Name of the built-in feature set that a model is offered.
        state: The engine state its features describe: `queue`, the exact queue if journeys are complete;
            `latest_step`, the latest step known before the interval began; `own_step`, the batch of the step
            it began in.
        forms: Forms a model may take. The first follows from the engine's laws; another one must be clearly better.
        drop_outliers: Leave outliers out of the training part. Off if the model is meant for the tail.
        non_negative: No coefficient can be negative, whatever its feature declares.
        adds_to: The shortest latency that includes it: TTFT (and so E2E and the client's), or the client's
            only. Null for a target that is in no latency. Predictions of requests and the report's figure of
            TTFT list it by its label.
        without_events: The definition if spans without events give its values, which may include more; empty
            if no such span does.
        contains: The work in it, for the list of terms; empty if `definition` is enough.
        follows_from_steps: Composed latencies take it from the steps themselves if the batches are the traced ones.
    """

    name: str
    label: str
    title: str
    definition: str
    column: str
    begins: str
    step: str
    feature_set: str
    state: State = "latest_step"
    forms: tuple[FormName, ...] = ("line",)
    drop_outliers: bool = True
    non_negative: bool = False
    adds_to: Literal["ttft", "client"] | None = None
    without_events: str = ""
    contains: str = ""
    follows_from_steps: bool = False

    @property
    def model(self) -> str:
        """Name of the model."""
        return f"alpha.{self.name}"


class StepTarget(msgspec.Struct, frozen=True):
    """The time of an engine step, predicted by the model `beta.<name>`.

    Attributes:
        name: Name in files.
        source: Source of its values, as published with the model.
        definition: The measured interval, as published with the model.
    """

    name: str
    source: Literal["step_clock", "duration"]
    definition: str

    @property
    def model(self) -> str:
        """Name of the model."""
        return f"beta.{self.name}"


CYCLE_TIME = StepTarget("cycle_time", "step_clock", "start of a step to start of the next, engine busy")
DURATION_TARGET = StepTarget("duration", "duration", "step.duration_us as the server stamps it")


def is_step_model(name: str) -> bool:
    """Return whether a model of this name predicts the time of a step, not an overhead of a request."""
    return name.startswith("beta.")


STEP_TARGETS = (CYCLE_TIME, DURATION_TARGET)
"""In order of preference: if files have both, predictions use the first."""

LATENCY_TITLES: dict[str, str] = {"ttft": "TTFT", "itl": "ITL", "e2e": "E2E"}
"""The main latencies of requests: names in files, and as people write them."""

STEP_BEGINS = "first_scheduled_ns"
"""Event of a request at which the first of its steps begins."""

TARGETS: tuple[Target, ...] = (
    Target(
        name="queue_wait",
        label="queue wait",
        title="queue wait",
        definition="QUEUED to first SCHEDULED",
        column="queue_wait_us",
        begins="queued_ns",
        step="queued_step",
        feature_set="queue",
        state="queue",
        forms=("regimes", "two_regimes", "line"),
        # A queue wait of seconds among waits of 0.2 ms is not an outlier: the model is meant for it.
        drop_outliers=False,
        adds_to="ttft",
        follows_from_steps=True,
    ),
    Target(
        name="admission",
        label="admission",
        title="admission overhead",
        definition="ARRIVED to QUEUED",
        column="admission_us",
        begins="arrival_ns",
        # QUEUED carries the counter of the step before it: the step in progress when the request arrived.
        step="queued_step",
        feature_set="admission",
        forms=("step_boundary", "line"),
        # A request whose API work ran past a boundary waits a whole step more: the rule, not an outlier.
        drop_outliers=False,
        adds_to="ttft",
        without_events="TTFT less queue wait and prefill: ARRIVED to QUEUED, and the way back of the first token",
        contains="work of the API process, and the wait for the next step",
    ),
    Target(
        name="departure",
        label="departure",
        title="departure overhead",
        definition="FINISHED to DEPARTED",
        column="departure_us",
        begins="finished_ns",
        step="finished_step",
        feature_set="departure",
        state="own_step",
        # Outputs can only lengthen a departure; load may shorten other targets.
        non_negative=True,
        adds_to="client",
    ),
)
"""Targets of requests, in the order of the files."""

OF_CLIENTS: tuple[Target, ...] = (
    Target(
        name="network",
        label="network",
        title="network and front end",
        definition="TTFT at a load generator less TTFT at the server",
        column="network_us",
        begins="arrival_ns",
        step="queued_step",
        feature_set="network",
        contains=(
            "the way of the request to the server and of its first token back, and what the server's TTFT does not see"
        ),
    ),
)
"""Targets of requests whose client was recorded too; left out entirely without a client."""


def target_named(name: str) -> Target:
    """Return the target of a name; KeyError if it does not exist."""
    return {target.name: target for target in (*TARGETS, *OF_CLIENTS)}[name]


def around_steps() -> tuple[Target, ...]:
    """Return the targets that are in a latency, in the order a request goes through them."""
    return (*parts_of("ttft"), *parts_of("client"))


def parts_of(latency: Literal["ttft", "client"]) -> tuple[Target, ...]:
    """Return the targets whose `adds_to` is `latency`, in the order a request goes through them."""
    parts = (target for target in TARGETS if target.adds_to == latency)
    return tuple(sorted(parts, key=lambda target: _EVENT_ORDER.index(target.begins)))
