"""The report's sections on request latencies, summed step times, bursts and workload phases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefit.reports.document import table
from tracefit.reports.text import ERRORS, count, metrics, number, percent, reasons

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tracefit.coefficients.evaluation import ScopeEvaluation
    from tracefit.fit.results import Burst, LatencyErrors, Phase, StepPhase, SummedTime
    from tracefit.reports.document import ReportPart

_TITLES = {
    "ttft": "TTFT",
    "itl": "ITL",
    "e2e": "E2E",
    "client": "client",
    "prefill": "prefill",
    "execution": "execution",
}
_WAYS = {
    "teacher_forced": "teacher forced",
    "refit_on_holdout": "refit on hold-out",
    "averages_only": "averages only",
    "baseline": "baseline",
}
_GROUPED = ("ttft", "itl", "e2e")

_PREAMBLE = (
    "Errors on requests that arrived in the hold-out of every model. *Teacher-forced*: measured batches and waits, "
    "predicted step times and overheads. *Refit on hold-out*: the same with the terms of the step time fitted on the "
    "held-out steps themselves; the error that remains is in no coefficient, the error that disappears comes from changes "
    "since the training part. *Averages only*: everything predicted from averages over the training part and the "
    "request's own lengths. *Baseline*: the training median."
)


def latency_parts(scope: ScopeEvaluation) -> list[ReportPart]:
    """Return the text and tables on composed latencies; one line where none was composed."""
    if not scope.latency:
        reason = scope.latency_missing or "nothing was fitted"
        return [f"Not composed: {reason}."]
    parts: list[ReportPart] = [
        _PREAMBLE,
        table(("latency", "predicted", *ERRORS), _rows(scope)),
    ]
    named = [(_TITLES[name], entry.definition) for name, entry in scope.latency.items()]
    parts.append(table(("latency", "is"), named, folded="What each latency is"))
    left_out = [(_TITLES[name], reasons(e.left_out)) for name, e in scope.latency.items() if e.left_out]
    if left_out:
        title = "Requests without a teacher-forced prediction in the hold-out"
        parts.append(table(("latency", "requests"), left_out, folded=title))
    parts += _by_run(scope)
    parts += _by_phase(scope)
    return parts


def summed_line(entry: SummedTime) -> str:
    """Return the bias of the summed step times of the hold-out, with its uncertainty."""
    return (
        f"**Step times of the hold-out summed:** predicted {entry.predicted_us / 1e6:,.2f} s, measured "
        f"{entry.actual_us / 1e6:,.2f} s, bias {entry.bias_pct:+.2f} % (two standard deviations {entry.bias_2sd_pct:.2f} %, "
        f"by bootstrap over {entry.blocks} blocks of time); the step or interval with the largest error contributes "
        f"{entry.max_contribution_pct:+.2f} points.{_drift(entry)}"
    )


def _drift(entry: SummedTime) -> str:
    """Describe a sum that is off by more than chance, with the change of speed at equal batches."""
    if not entry.drifting:
        return ""
    if entry.speed_change_pct is None:
        return " **Drifting:** more than two standard deviations off; there are no equal batches to compare the speed by."
    longer = "longer" if entry.speed_change_pct >= 0 else "shorter"
    return (
        f" **Drifting:** more than two standard deviations off. Steps of equal batches take "
        f"{abs(entry.speed_change_pct):.1f} % {longer} in the hold-out than in the training part: no coefficient can correct that."
    )


def burst_lines(bursts: Sequence[Burst]) -> list[str]:
    """Return the bursts outside the range of the admission model."""
    if not bursts:
        return []
    named = "; ".join(
        f"`{b.run_id}` {b.from_s:.2f} to {b.to_s:.2f} s: {count(b.requests)} requests, {count(b.holdout_requests)} held out"
        for b in bursts
    )
    text = (
        "**Bursts, outside the range of this model:** requests that arrived faster than the API process works, each behind "
        f"five or more others ({named}). The API work was fitted without them. With a step clock the model lets each of "
        "them wait until those before it are done; a prediction for a single request cannot know of the others. The errors "
        "above include them (`burst` and `no_burst` apart)."
    )
    return [text]


def _rows(scope: ScopeEvaluation) -> Iterator[tuple[str, ...]]:
    for name, entry in scope.latency.items():
        for way, label in _WAYS.items():
            yield (_TITLES[name], label, *metrics(getattr(entry, way)))


_GROUP_HEAD = ("latency", *ERRORS, "averages only MAPE %", "baseline MAPE %")


def _by_run(scope: ScopeEvaluation) -> list[ReportPart]:
    rows = [
        (f"`{run}`", *_group(_TITLES[name], errors))
        for name in _GROUPED
        for run, errors in scope.latency[name].by_run.items()
    ]
    if len(scope.runs) == 1 or not rows:
        return []
    return [table(("run", *_GROUP_HEAD), rows, folded="By run, teacher-forced")]


def _by_phase(scope: ScopeEvaluation) -> list[ReportPart]:
    rows = [
        (_phase(phase), *_group(_TITLES[name], phase))
        for name in _GROUPED
        for phase in scope.latency[name].by_phase
    ]
    if not rows:
        return []
    title = "By workload phase (an interval of a run with one arrival rate), teacher-forced"
    return [table(("phase", *_GROUP_HEAD), rows, folded=title)]


def _group(title: str, errors: LatencyErrors) -> tuple[str, ...]:
    others = (errors.averages_only.mape_pct, errors.baseline.mape_pct)
    return (title, *metrics(errors.teacher_forced), *(percent(v) for v in others))


def step_phase_parts(phases: Sequence[StepPhase]) -> list[ReportPart]:
    """Return the errors of step times by workload phase, where there are at least two."""
    if len(phases) < 2:
        return []
    rows = [(_phase(p), *metrics(p.holdout), percent(p.baseline.mape_pct)) for p in phases]
    title = "By workload phase (an interval of a run with one arrival rate)"
    return [table(("phase", *ERRORS, "baseline MAPE %"), rows, folded=title)]


def _phase(phase: Phase) -> str:
    rate = f"{number(phase.arrivals_per_s)} requests/s"
    return f"`{phase.run_id}` {phase.from_s:.0f} to {phase.to_s:.0f} s, {rate}"
