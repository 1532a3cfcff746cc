"""Verdicts: the uses that a deployment's models are good enough for, by stated thresholds on hold-out measures.

A measure at or better than `yes` allows the use, one at or better than `with_limits` allows it with that limit; a worse
one, or a missing model, forbids it. A use is as good as the worst of its measures.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec.structs import replace

from tracefit.coefficients.documents import Criterion, Verdict, VerdictAnswer
from tracefit.errors import UsageError, did_you_mean
from tracefit.fit.noise import ABOUT
from tracefit.fit.splits import FEW_ROWS, TRAIN_SHARE
from tracefit.models.schema import STEP_MODELS
from tracefit.models.targets import target_named
from tracefit.options import TrainOptions, named
from tracefit.text import number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from tracefit.fit.results import SummedTime
    from tracefit.models.validation import Validation
    from tracefit.results.replays import RunReplay
    from tracefit.results.requests import RequestGroup

_ANSWER_RANK: dict[VerdictAnswer, int] = {"yes": 0, "with limits": 1, "no": 2}


class Measurements(NamedTuple):
    """Measurements of a deployment other than the validations of its models: summed step times, replays, the load so
    far.
    """

    summed: SummedTime | None = None
    replays: tuple[RunReplay, ...] = ()
    served: tuple[RequestGroup, ...] = ()


class Measure(msgspec.Struct, frozen=True):
    """A number of one model's validation and its name in messages; null where there is no such model or number."""

    models: tuple[str, ...]
    what: str
    of: Callable[[Validation, Measurements], float | None]
    unit: str = " %"
    higher_is_better: bool = False
    needed: bool = True
    """Whether the answer is at best "with limits" if the model does not give it."""
    unseen: str = ""
    """Why there is a model and no number; a general reason if empty."""


def _extrapolated_pct(entry: Validation, _: object) -> float | None:
    return 100 * entry.extrapolated_rows / entry.holdout.n if entry.holdout.n else None


def _summed_bias_pct(_: Validation, measured: Measurements) -> float | None:
    # Not the bias of single steps: a server that traces a sample has few of them.
    return None if measured.summed is None else abs(measured.summed.bias_pct)


def _replayed_pct(latencies: tuple[str, ...], _: Validation, measured: Measurements) -> float | None:
    """Return the largest error of a replay at P50 and P90, over the runs: good replays do not offset a wrong one."""
    worst = (replay.worst_pct(*latencies) for replay in measured.replays)
    return max((error for error in worst if error is not None), default=None)


def _has_queued(entry: Validation) -> bool:
    """Return whether any request queued in the hold-out: without one the hold-out cannot evaluate the model."""
    counts = entry.classifier.confusion if entry.classifier else {}
    return counts.get("true_positive", 0) + counts.get("false_negative", 0) > 0


def _regime_accuracy(entry: Validation, _: object) -> float | None:
    return entry.classifier.balanced_accuracy if entry.classifier and _has_queued(entry) else None


def _wait_skill(entry: Validation, _: object) -> float | None:
    # Without a queue in the hold-out every wait is the same 0.2 ms: skill on these says nothing about real waits.
    return entry.skill if entry.classifier is None or _has_queued(entry) else None


_of_steps = partial(Measure, STEP_MODELS)
_of_waits = partial(
    Measure,
    (target_named("queue_wait").model,),
    unit="",
    higher_is_better=True,
    unseen="no held-out request had to wait for room, so that the model of the queue is not tested",
)
_of_admission = partial(Measure, (target_named("admission").model,))
MEASURES: dict[str, Measure] = {
    "replay_pct": _of_steps(
        "largest error of E2E and ITL in a replay, at P50 and P90,", partial(_replayed_pct, ("e2e", "itl"))
    ),
    "replay_ttft_pct": _of_steps(
        "largest error of TTFT in a replay, at P50 and P90,", partial(_replayed_pct, ("ttft",))
    ),
    "step_mape_pct": _of_steps("mean error of step times", lambda e, _: e.holdout.mape_pct),
    "step_p90_ape_pct": _of_steps("90th percentile of the errors of step times", lambda e, _: e.holdout.p90_ape_pct),
    "step_bias_pct": _of_steps("bias of the summed step times", _summed_bias_pct),
    "step_skill": _of_steps(
        "share of the baseline's error that the step model removes:",
        lambda e, _: e.skill,
        unit="",
        higher_is_better=True,
    ),
    "step_extrapolated_pct": _of_steps("held-out steps outside the training range:", _extrapolated_pct),
    "step_prefill_reach_pct": _of_steps(
        "prompt tokens of the fullest training step, as a share of a step's token budget:",
        lambda e, _: e.prefill_reach_pct,
        higher_is_better=True,
        needed=False,
    ),
    "queue_wait_skill": _of_waits("share of the baseline's error that the queue-wait model removes:", _wait_skill),
    "queue_regime_accuracy": _of_waits(
        "balanced accuracy of predicting which requests wait for room:", _regime_accuracy
    ),
    "admission_skill": _of_admission(
        "share of the baseline's error that the admission model removes:",
        lambda e, _: e.skill,
        unit="",
        higher_is_better=True,
        needed=False,
    ),
    "admission_mdape_pct": _of_admission("median error of admission", lambda e, _: e.holdout.mdape_pct),
}


_OF_REPLAYS = {"replay_pct": ("e2e", "itl"), "replay_ttft_pct": ("ttft",)}
_REPLAYED = {"admission_mdape_pct", "admission_skill"}
"""Measures of the admission, which is a part of the TTFT of a replay: its wait for the step in progress scatters, but a
replay has it."""

_SKILLS_OF_WAITS = {*_REPLAYED, "queue_wait_skill"}
"""Measures that decide nothing where the errors are under a millisecond: no use can tell the difference."""


def _machine_pct(measure: str, yes: float, value: float, entry: Validation, measured: Measurements) -> float | None:
    """Return the noise of the machine in percent, if it explains a value that is worse than `yes`; else null.

    Steps of equal batches differ within seconds (`entry.noise`), and took longer or shorter in the hold-out than before
    it, and in
    one stretch of it than in another (`entry.speed`): a model that is fitted before the hold-out knows nothing of that.
    """
    speed = entry.speed if entry.speed is not None and entry.speed.adjusted else None
    change = _change_pct(measured.summed, speed.holdout_pct or 0.0 if speed else 0.0)
    if measure in _OF_REPLAYS and speed is not None:
        stretches = round(speed.stretches * (1 - TRAIN_SHARE))
        errors = (r.beyond_speeds_pct(stretches, *_OF_REPLAYS[measure]) for r in measured.replays)
        worst = max((error for error in errors if error is not None), default=None)
        return max(abs(change), speed.sd_pct) if worst is not None and worst <= yes else None
    noise = entry.noise
    floors = {
        "step_mape_pct": math.hypot(noise.mape_pct, change) if noise else 0.0,
        "step_p90_ape_pct": _far_off_pct(noise.p90_ape_pct, change) if noise else 0.0,
        "step_bias_pct": abs(change),
    }
    floor = floors.get(measure, 0.0)
    return floor if value <= ABOUT * floor else None


def _change_pct(summed: SummedTime | None, change_pct: float) -> float:
    """Return how much longer steps of equal batches took in the hold-out, in percent: the larger of two measures."""
    other = summed.speed_change_pct if summed is not None and change_pct else None
    return max(change_pct, other or 0.0, key=abs)


def _far_off_pct(noise_pct: float, change_pct: float) -> float:
    """Return the error of a prediction for a step that is off its mean by `noise_pct`, to the same side as the speed
    changed.
    """
    expected = 1 / (1 + change_pct / 100)
    kept = 1 - noise_pct / 100
    return 100 * (1 - expected * kept if change_pct >= 0 else expected / kept - 1)


class Threshold(msgspec.Struct, frozen=True):
    """Values of a measure from which on it allows a use, or allows it with limits."""

    use: str
    measure: str
    yes: float
    with_limits: float

    @property
    def name(self) -> str:
        """Its name in overrides."""
        return f"{self.use}.{self.measure}"


THRESHOLDS: tuple[Threshold, ...] = (
    Threshold("simulation", "replay_pct", 8.0, 20.0),
    Threshold("simulation", "replay_ttft_pct", 20.0, 40.0),
    Threshold("simulation", "step_mape_pct", 10.0, 25.0),
    Threshold("simulation", "step_bias_pct", 5.0, 15.0),
    Threshold("simulation", "step_skill", 0.5, 0.1),
    Threshold("simulation", "step_extrapolated_pct", 10.0, 50.0),
    Threshold("simulation", "step_prefill_reach_pct", 25.0, 0.0),
    Threshold("simulation", "admission_mdape_pct", 10.0, 50.0),
    Threshold("simulation", "admission_skill", 0.0, 0.0),
    Threshold("capacity planning", "replay_pct", 8.0, 20.0),
    Threshold("capacity planning", "replay_ttft_pct", 20.0, 40.0),
    Threshold("capacity planning", "step_bias_pct", 3.0, 10.0),
    Threshold("capacity planning", "step_mape_pct", 15.0, 30.0),
    Threshold("capacity planning", "step_extrapolated_pct", 10.0, 50.0),
    Threshold("capacity planning", "step_prefill_reach_pct", 25.0, 0.0),
    Threshold("autoscaling", "step_mape_pct", 15.0, 30.0),
    Threshold("autoscaling", "step_bias_pct", 5.0, 15.0),
    Threshold("autoscaling", "queue_regime_accuracy", 0.95, 0.8),
    Threshold("alerting", "step_p90_ape_pct", 20.0, 50.0),
    Threshold("alerting", "queue_regime_accuracy", 0.95, 0.8),
    Threshold("alerting", "queue_wait_skill", 0.5, 0.0),
)
"""Requirements of each use.

Simulation and capacity planning rest on a replay, which computes latencies only from arrivals and lengths. A
simulator also needs the API work, and step times that are right one by one and in sum; capacity planning needs
the sums; an autoscaler needs to know when requests begin to queue; an alert needs few large errors and the wait
itself. Simulation and planning need prompts of any length: a model trained only on short prompts is valid only
for short prompts.
"""


def verdicts_of(
    models: Mapping[str, Validation],
    measured: Measurements,
    thresholds: Iterable[Threshold] = THRESHOLDS,
) -> dict[str, Verdict]:
    """Return use to verdict.

    Where a replay shows TTFT, which contains the admission, that model's own errors decide nothing.

    Args:
        models: Published name to validation, of one deployment.
        measured: Other measurements of the deployment.
        thresholds: The requirements, in the order of their uses.
    """
    by_use: dict[str, list[Criterion]] = {}
    admission = target_named("admission").model
    is_replayed = admission in models and _replayed_pct(("ttft",), models[admission], measured) is not None
    for threshold in thresholds:
        of_waits = next((models[m] for m in MEASURES[threshold.measure].models if m in models), None)
        if is_replayed and threshold.measure in _REPLAYED:
            continue
        if threshold.measure in _SKILLS_OF_WAITS and of_waits is not None and of_waits.is_negligible:
            continue
        criterion = _criterion(models, measured, threshold)
        if MEASURES[threshold.measure].needed or criterion.value is not None:
            by_use.setdefault(threshold.use, []).append(criterion)
    return {use: _verdict(tuple(criteria)) for use, criteria in by_use.items()}


def _verdict(criteria: tuple[Criterion, ...]) -> Verdict:
    """Return the worst answer of the criteria, with the reasons of those that gave it."""
    worst = max((c.answer for c in criteria), key=_ANSWER_RANK.__getitem__)
    reasons = dict.fromkeys(c.reason for c in criteria if c.answer == worst)
    return Verdict(answer=worst, reasons=tuple(reasons), criteria=criteria)


def _criterion(models: Mapping[str, Validation], measured: Measurements, threshold: Threshold) -> Criterion:
    """Compare one measure with its threshold."""
    measure = MEASURES[threshold.measure]
    entry = next((models[m] for m in measure.models if m in models), None)
    value = None if entry is None else measure.of(entry, measured)
    machine = None
    answer: VerdictAnswer
    if entry is None:
        answer, reason = "no", f"{measure.models[0]} is not fitted"
    elif value is None:
        # The hold-out has no such rows: the model is neither confirmed nor refuted.
        answer = "with limits"
        reason = measure.unseen or f"{measure.what.removesuffix(':')}: the hold-out does not show it"
        if threshold.measure in _OF_REPLAYS:
            reason = "no run was replayed"
            if measured.replays:
                reason = f"no run can be replayed: {measured.replays[0].reason}"
    else:
        sign = -1 if measure.higher_is_better else 1
        allows, limited = (sign * value <= sign * end for end in (threshold.yes, threshold.with_limits))
        answer = "yes" if allows else "with limits" if limited else "no"
        bound = threshold.with_limits if answer == "no" else threshold.yes
        required = f"at {'least' if measure.higher_is_better else 'most'} {bound:g}{measure.unit} required"
        # The verdict stands, but states how few rows it rests on.
        few = f" from {entry.holdout.n} rows only" if entry.holdout.n < FEW_ROWS else ""
        reason = f"{measure.what} {number(value)}{measure.unit}{few} ({required})"
        if answer != "yes":
            machine = _machine_pct(threshold.measure, threshold.yes, value, entry, measured)
        if machine is not None:
            reason = f"{reason}: {machine_words(threshold.measure, machine)}"
    return Criterion(
        measure=threshold.measure,
        value=value,
        yes=threshold.yes,
        with_limits=threshold.with_limits,
        higher_is_better=measure.higher_is_better,
        answer=answer,
        reason=reason,
        machine_pct=machine,
    )


def machine_words(measure: str, machine_pct: float) -> str:
    """Say that a machine's noise explains the value of a measure."""
    pct = f"{number(machine_pct)} %"
    noise = f"its speed {'varies' if measure in _OF_REPLAYS else 'changed'} by {pct}"
    if measure.endswith("ape_pct"):
        noise = f"by itself it puts steps {pct} off"
    return f"this machine is too noisy for that ({noise}), and no recording will help"


def override(texts: Iterable[str]) -> tuple[Threshold, ...]:
    """Return the thresholds with some replaced: `simulation.step_mape_pct=12:30` (yes, with limits).

    Raises:
        UsageError: No such threshold, or not two numbers.
    """
    # Uses have spaces in reports; on the command line a dash needs no quotes.
    changed = {t.name.replace(" ", "-"): t for t in THRESHOLDS}
    for text in texts:
        name, _, numbers = text.partition("=")
        if name not in changed:
            raise UsageError(
                f"{named(TrainOptions, 'thresholds')} {text}: no such threshold",
                hint=did_you_mean(name, changed) or f"thresholds: {', '.join(changed)}",
            )
        try:
            yes, with_limits = (float(n) for n in numbers.split(":"))
        except ValueError as error:
            raise UsageError(
                f"{named(TrainOptions, 'thresholds')} {text}: not of the form USE.MEASURE=YES:WITH_LIMITS",
                hint="for example simulation.step_mape_pct=12:30",
            ) from error
        changed[name] = replace(changed[name], yes=yes, with_limits=with_limits)
    return tuple(changed.values())
