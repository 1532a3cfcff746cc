"""Sections of the report on latencies of requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefit.reports.cells import ERRORS, count, metrics, number, reasons, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tracefit.coefficients.evaluation import (
        BurstEntry,
        LatencyErrorsEntry,
        PhaseEntry,
        ScopeEvaluation,
        StepPhaseEntry,
        SummedEntry,
    )
    from tracefit.reports.model import Part

_TITLES = {
    "ttft": "TTFT",
    "itl": "ITL",
    "e2e": "E2E",
    "client": "client",
    "prefill": "prefill",
    "execution": "execution",
}
_WAYS = ("teacher_forced", "refit_on_holdout", "averages_only", "baseline")
_GROUPED = ("ttft", "itl", "e2e")

_PREAMBLE = (
    "Of requests that came in the hold-out of every model. *Teacher-forced*: the real batches and the real waits, step "
    "times and overheads predicted. *Hindsight*: the same with the terms of the step time fitted on the held-out steps "
    "themselves; what is left is in no coefficient, and what it takes away has changed since the training part. *Averages "
    "only*: everything predicted from averages over the training part and the request's own lengths. *Baseline*: the "
    "training median."
)


def latency_sections(scope: ScopeEvaluation) -> list[Part]:
    """Return the sections on composed latencies; one line where there are none."""
    if not scope.latency:
        because = scope.latency_missing or "nothing was fitted"
        return ["### Request latencies", f"Not composed: {because}."]
    parts: list[Part] = [
        "### Request latencies",
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


def summed_line(entry: SummedEntry) -> str:
    """Say how far the sum of the hold-out's step times is off, and how sure that is."""
    return (
        f"**Step times of the hold-out summed:** predicted {entry.predicted_us / 1e6:,.2f} s, measured "
        f"{entry.actual_us / 1e6:,.2f} s, bias {entry.bias_pct:+.2f} % (two standard deviations {entry.bias_2sd_pct:.2f} %, "
        f"by bootstrap over {entry.blocks} blocks of time); the one step or interval furthest off has {entry.max_contribution_pct:+.2f} "
        f"points of it.{_drift(entry)}"
    )


def _drift(entry: SummedEntry) -> str:
    """Name a run whose sum is off by more than chance, with how the machine's speed at equal batches changed."""
    if not entry.drifting:
        return ""
    if entry.speed_change_pct is None:
        return " **Drifting:** more than two standard deviations off; no equal batches to compare the machine's speed by."
    longer = "longer" if entry.speed_change_pct >= 0 else "shorter"
    return (
        f" **Drifting:** more than two standard deviations off. Steps of equal batches take "
        f"{abs(entry.speed_change_pct):.1f} % {longer} in the hold-out than in the training part: no coefficients mend that."
    )


def burst_lines(bursts: Sequence[BurstEntry]) -> list[str]:
    """Name the bursts that lie outside the range of the admission model; nothing where there are none."""
    if not bursts:
        return []
    named = "; ".join(
        f"`{b.run_id}` {b.from_s:.2f} to {b.to_s:.2f} s: {count(b.requests)} requests, {count(b.holdout_requests)} held out"
        for b in bursts
    )
    said = (
        "**Bursts, outside the range of this model:** requests that arrived faster than the API process works, with work of "
        f"five or more in front of them ({named}). The API work was fitted without them. By the step clock the model lets "
        "each wait until the work on those before it is done, which a question about one request cannot know; the error "
        "above is with them (`burst`, `no_burst` apart)."
    )
    return [said]


def _rows(scope: ScopeEvaluation) -> Iterator[tuple[str, ...]]:
    for name, entry in scope.latency.items():
        for way in _WAYS:
            yield (_TITLES[name], way.replace("_", " "), *metrics(getattr(entry, way)))


_GROUP_HEAD = ("latency", *ERRORS, "averages only MAPE %", "baseline MAPE %")


def _by_run(scope: ScopeEvaluation) -> list[Part]:
    rows = [
        (f"`{run}`", *_group(_TITLES[name], errors))
        for name in _GROUPED
        for run, errors in scope.latency[name].by_run.items()
    ]
    if len(scope.runs) == 1 or not rows:
        return []
    return [table(("run", *_GROUP_HEAD), rows, folded="By run, teacher-forced")]


def _by_phase(scope: ScopeEvaluation) -> list[Part]:
    rows = [
        (_phase(phase), *_group(_TITLES[name], phase))
        for name in _GROUPED
        for phase in scope.latency[name].by_phase
    ]
    if not rows:
        return []
    title = "By workload phase (a stretch of a run in which requests arrive at one rate), teacher-forced"
    return [table(("phase", *_GROUP_HEAD), rows, folded=title)]


def _group(title: str, errors: LatencyErrorsEntry) -> tuple[str, ...]:
    others = (errors.averages_only.mape_pct, errors.baseline.mape_pct)
    return (title, *metrics(errors.teacher_forced), *(number(v) for v in others))


def step_phase_parts(phases: Sequence[StepPhaseEntry]) -> list[Part]:
    """Give the errors of step times by workload phase; nothing where there is one phase or none."""
    if len(phases) < 2:
        return []
    rows = [(_phase(p), *metrics(p.holdout), number(p.baseline.mape_pct)) for p in phases]
    title = "By workload phase (a stretch of a run in which requests arrive at one rate)"
    return [table(("phase", *ERRORS, "baseline MAPE %"), rows, folded=title)]


def _phase(phase: PhaseEntry | StepPhaseEntry) -> str:
    rate = f"{number(phase.arrivals_per_s)} requests/s"
    return f"`{phase.run_id}` {phase.from_s:.0f} to {phase.to_s:.0f} s, {rate}"
