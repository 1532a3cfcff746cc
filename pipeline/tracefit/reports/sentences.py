"""Verdicts as sentences: what a person who decides reads first, made of the numbers of the evaluation.

"Step times are typically within 2.8 % (nine in ten within 9.7 %), but a quarter of the held-out load was never trained
on."
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tracefit.coefficients.verdicts import machine_words
from tracefit.fit.splits import of_means
from tracefit.models.targets import LATENCY_TITLES, is_step_model
from tracefit.reports.document import UseVerdict, Verdicts
from tracefit.text import count, number, percent, sentence

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tracefit.coefficients.documents import Criterion, DeploymentEvaluation, Verdict
    from tracefit.fit.results import SummedTime
    from tracefit.models.validation import SpeedVariation, Validation
    from tracefit.results.replays import RunReplay

_FRACTIONS = (
    (5.0, "a twentieth"),
    (10.0, "a tenth"),
    (20.0, "a fifth"),
    (25.0, "a quarter"),
    (100 / 3, "a third"),
    (50.0, "half"),
    (200 / 3, "two thirds"),
    (75.0, "three quarters"),
    (90.0, "nine tenths"),
    (100.0, "all"),
)
_FEW_HELD_OUT = 50
"""Held-out steps below which the errors themselves are uncertain, and the lead says so."""

_MUCH_EXTRAPOLATED_PCT = 10.0
_MUCH_BIAS_PCT = 3.0
"""Bias of the summed step times from which on capacity planning is no longer a yes."""

_LITTLE_PROMPT_PCT = 25.0
_MOST_VERDICT_REASONS = 2
"""Reasons given with a verdict: the first ones matter most, evaluation.json has all."""


def fraction(pct: float) -> str:
    """Return a percentage as a fraction in words where one is near, else in percent."""
    # "A quarter" is read faster than 24.6 %, and says as much.
    near, words = min(_FRACTIONS, key=lambda each: abs(each[0] - pct))
    # "All" must not stand for 99 %.
    exactly_all = near < 100 or pct > 99.5
    return words if abs(near - pct) <= 0.08 * near and exactly_all else f"{percent(pct)} %"


def step_entry(deployment: DeploymentEvaluation) -> Validation | None:
    """Return the evaluation of the model of step times; null without one."""
    return next((e for name, e in deployment.models.items() if is_step_model(name)), None)


def step_times(entry: Validation) -> str:
    """Name the quantity whose errors a model of step times has: the mean of several steps where no single one was
    seen.
    """
    return "mean step times" if of_means(entry) else "step times"


def lead(deployment: DeploymentEvaluation) -> str:
    """Say what the server carried and can carry, then how well a replay reproduces it, how exact step times are, and
    what most limits that.

    Without a model of step times the reason comes first, then what to do.
    """
    steps, carried = _of_steps(deployment), carried_text(deployment)
    if not _has_step_times(deployment):
        return " ".join(filter(None, (steps, carried)))
    return " ".join(filter(None, (carried, _replayed(deployment), steps)))


_SHARE_OF_CAPACITY = 0.8
"""Share of its capacity up to which a server of steady load is planned without objectives."""


def carried_text(deployment: DeploymentEvaluation) -> str:
    """Say what a server carried and can carry, and how many servers the recorded load needs; empty where no request was
    recorded.
    """
    load, capacity = deployment.load, deployment.capacity
    carried = load.carried_per_s if load else None
    if carried is None or load is None:
        return ""
    text = f"One server carried {number(carried)} requests/s over {number(load.over_s)} s"
    if capacity is None:
        return f"{text}."
    ends = (number(capacity.capacity_low), number(capacity.capacity_high))
    between = f" ({' to '.join(ends)})" if ends[0] != ends[1] else ""
    together = load.carried_together_per_s or carried
    servers = max(math.ceil(together / (_SHARE_OF_CAPACITY * capacity.capacity_per_s) - 1e-9), 1)
    needs = "1 server is" if servers == 1 else f"{count(servers)} servers are"
    return (
        f"{text} and can serve {number(capacity.capacity_per_s)}{between}; from {number(capacity.knee_per_s)} on, the "
        f"knee, latency grows faster than throughput. For the {number(together)}/s recorded, {needs} enough, at up to "
        "four fifths of the capacity."
    )


def _replayed(deployment: DeploymentEvaluation) -> str:
    """Say how far the replay of a run is from the measurement; the least exact of several runs, empty without one."""
    run = least_exact_replay(deployment)
    if run is None:
        return ""
    points = {label: run.of(name)[:2] for name, label in LATENCY_TITLES.items()}
    errors = [
        f"{label} by {' and '.join(f'{q.error_pct:+.1f} %' for q in p50_and_p90)}"
        for label, p50_and_p90 in points.items()
        if p50_and_p90 and all(q.error_pct is not None for q in p50_and_p90)
    ]
    replayed = sum(bool(r.quantities) for r in deployment.replays)
    which = f" of `{run.run_id}`, the least exact of {replayed} runs," if replayed > 1 else ""
    return f"A replay{which} from only arrivals and lengths is off at P50 and P90 of {', of '.join(errors)}."


def least_exact_replay(deployment: DeploymentEvaluation) -> RunReplay | None:
    """Return the run with the largest error of its replay; null without a replay."""
    errors = [(error, run) for run in deployment.replays if (error := run.worst_pct(*LATENCY_TITLES)) is not None]
    return max(errors, key=lambda pair: pair[0], default=(None, None))[1]


def _has_step_times(deployment: DeploymentEvaluation) -> bool:
    entry = step_entry(deployment)
    return entry is not None and entry.holdout.mdape_pct is not None


def _of_steps(deployment: DeploymentEvaluation) -> str:
    entry = step_entry(deployment)
    if entry is None or entry.holdout.mdape_pct is None:
        lost = next((m for m in deployment.not_fitted if is_step_model(m.name)), None)
        remedy = f" {sentence(lost.remedy)}" if lost and lost.remedy else ""
        return f"There is no model of step times: {lost.reason if lost else 'the traces do not show them'}.{remedy}"
    errors = f"{step_times(entry)} are typically within {percent(entry.holdout.mdape_pct)} %"
    if entry.holdout.p90_ape_pct is not None:
        errors += f" (nine in ten within {percent(entry.holdout.p90_ape_pct)} %)"
    limit = _limit(deployment, entry)
    return sentence(f"{errors}, {f'but {limit}' if limit else 'measured on load like the load they were trained on'}")


def _limit(deployment: DeploymentEvaluation, entry: Validation) -> str:
    """Name the fact that most limits where the errors hold; empty where none does."""
    held = entry.holdout.n
    outside = 100 * entry.extrapolated_rows / held if held else 0.0
    # The fact that matters most comes first: with few rows none of the others is certain.
    if held < _FEW_HELD_OUT:
        return f"only {count(held)} held-out steps say so"
    if outside >= _MUCH_EXTRAPOLATED_PCT:
        return f"{fraction(outside)} of the held-out load was never trained on"
    if any(one.trained_on for one in deployment.overloaded):
        return "they describe a server that was overloaded"
    if entry.prefill_reach_pct is not None and entry.prefill_reach_pct < _LITTLE_PROMPT_PCT:
        return (
            f"no step trained on had more than {percent(entry.prefill_reach_pct)} % of the prompt tokens a step may "
            "have: longer prompts are a guess"
        )
    return "" if deployment.summed_step_time is None else _summed_limit(deployment.summed_step_time)


def _summed_limit(summed: SummedTime) -> str:
    """Name a change of the server's speed or, without one, a bias of the sum; empty where there is neither."""
    if change := speed_change(summed):
        return f"the server changed: {change}"
    if abs(summed.bias_pct) > max(summed.bias_2sd_pct, _MUCH_BIAS_PCT):
        high = "high" if summed.bias_pct > 0 else "low"
        return f"summed over time they are {percent(abs(summed.bias_pct))} % too {high}"
    return ""


def speed_change(summed: SummedTime) -> str:
    """Say how the speed of the server changed after the training part; empty where that is not certain."""
    # A file of an earlier version may call a bias a drift.
    if not summed.drifting or summed.speed_change_pct is None or summed.speed_change_2sd_pct is None:
        return ""
    two_sd = percent(summed.speed_change_2sd_pct)
    return (
        f"steps of equal batches take {longer(summed.speed_change_pct)} in the hold-out than before it (± {two_sd} %)"
    )


def speed_text(speed: SpeedVariation) -> str:
    """Say how the speed of the machine varied over the recording."""
    of_holdout = "" if speed.holdout_pct is None else f", the hold-out {longer(speed.holdout_pct)}"
    return (
        "the speed of the machine changed during the recording: steps of equal batches took from "
        f"{longer(speed.fastest_pct)} to {longer(speed.slowest_pct)} than the mean of the training part in stretches "
        f"of {number(speed.stretch_s)} s (standard deviation {percent(speed.sd_pct)} %){of_holdout}"
    )


def longer(pct: float) -> str:
    """Write a change of a time in percent: `2.4 % longer`."""
    return f"{percent(abs(pct))} % {'longer' if pct >= 0 else 'shorter'}"


def verdicts(deployment: DeploymentEvaluation) -> Verdicts:
    """Return the verdict on every use, with its reason in a sentence."""
    lost = {f"{m.name} is not fitted": f"there is no model `{m.name}`: {m.reason}" for m in deployment.not_fitted}
    entry = step_entry(deployment)
    noun = step_times(entry) if entry else "step times"
    answers = (UseVerdict(use, v.answer, _reason(v, lost, noun)) for use, v in deployment.verdicts.items())
    return Verdicts(tuple(answers))


def _reason(verdict: Verdict, lost: Mapping[str, str], step_times: str) -> str:
    """Name the measures that decide: those that hold for a yes, those that fail for any other answer."""
    deciding = [c for c in verdict.criteria if c.answer == verdict.answer]
    sentences = list(dict.fromkeys(lost.get(c.reason, _sentence(c, step_times)) for c in deciding))
    return sentence("; ".join(sentences[:_MOST_VERDICT_REASONS]))


def _skill(model: str) -> Callable[[float], str]:
    """Return the sentence on the share of the baseline's error that a model removes."""
    no_better = f"{model} is no better than a constant guess, the training median"
    return lambda v: f"{model} removes {100 * v:.0f} % of the error of a constant guess" if v > 0 else no_better


_MEASURED: Mapping[str, Callable[[float], str]] = {
    "replay_pct": lambda v: f"replayed from arrivals and lengths, E2E and ITL are within {percent(v)} % at P50 and P90",
    "replay_ttft_pct": lambda v: f"replayed from arrivals and lengths, TTFT is within {percent(v)} % at P50 and P90",
    "step_mape_pct": lambda v: f"step times are off by {percent(v)} % on average",
    "step_p90_ape_pct": lambda v: f"one step time in ten is off by more than {percent(v)} %",
    "step_bias_pct": lambda v: f"summed over time, steps are off by {percent(v)} %",
    "step_skill": _skill("the model"),
    "step_extrapolated_pct": lambda v: (
        f"{percent(v)} % of the held-out steps carried a load that was never trained on"
        if v
        else "every held-out step carried a load that was trained on"
    ),
    "step_prefill_reach_pct": lambda v: (
        f"the fullest step trained on had {percent(v)} % of the prompt tokens a step may have"
    ),
    "queue_wait_skill": _skill("the model of the queue"),
    "queue_regime_accuracy": lambda v: f"which requests have to wait is predicted right {100 * v:.0f} % of the time",
    "admission_skill": _skill("the model of admission"),
    "admission_mdape_pct": lambda v: f"admission is typically within {percent(v)} %",
}
"""Measure to a sentence of its value."""


def _sentence(one: Criterion, step_times: str) -> str:
    # A measure of a later version has no sentence here: the reason in the file serves.
    words = _MEASURED.get(one.measure)
    if words is None or one.value is None:
        return one.reason
    text = words(one.value).replace("step time", step_times.removesuffix("s"))
    # The sentences of these write a share in percent: so must their threshold be.
    scale = 100 if one.measure.endswith(("_skill", "_accuracy")) else 1
    bound = scale * (one.with_limits if one.answer == "no" else one.yes)
    # A share of at least 0 is worse than a constant guess or not, which the sentence says itself.
    if one.answer == "yes" or (one.higher_is_better and not bound):
        return text
    needed = f"{text} ({'at least' if one.higher_is_better else 'at most'} {bound:g} % needed)"
    return needed if one.machine_pct is None else f"{needed}: {machine_words(one.measure, one.machine_pct)}"


def least_exact(deployments: Sequence[tuple[str, DeploymentEvaluation]]) -> str:
    """Say how exact the replays and the step times of several deployments are, each given by name and evaluation."""
    replays = [(name, least_exact_replay(deployment)) for name, deployment in deployments]
    errors = [(run.worst_pct(*LATENCY_TITLES) or 0.0, name) for name, run in replays if run is not None]
    replayed = ""
    if errors:
        error, worst = max(errors, key=lambda pair: pair[0])
        replayed = (
            f"Latencies of a replay from only arrivals and lengths are within {percent(error)} % at P50 and P90, "
            f"`{worst}` the least exact of {count(len(errors))} that can be replayed. "
        )
    return f"{replayed}{_least_exact_steps(deployments)}"


def _least_exact_steps(deployments: Sequence[tuple[str, DeploymentEvaluation]]) -> str:
    errors = [
        (entry.holdout.mdape_pct, name)
        for name, deployment in deployments
        if (entry := step_entry(deployment)) is not None and entry.holdout.mdape_pct is not None
    ]
    if not errors:
        return "There is no model of step times."
    best, worst = min(errors), max(errors)
    if len(errors) == 1:
        return (
            f"Step times of `{best[1]}` are typically within {percent(best[0])} %; the other deployments have no "
            "model of them."
        )
    if percent(best[0]) == percent(worst[0]):
        return f"Step times are typically within {percent(best[0])} % in every deployment."
    return (
        f"Step times are typically within {percent(best[0])} to {percent(worst[0])} %, by deployment; "
        f"`{worst[1]}` is the least exact."
    )
