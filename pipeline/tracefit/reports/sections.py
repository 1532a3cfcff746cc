"""The sections of the report that an expert reads: the data, request latencies, and each model.

Each function turns a part of the published evaluation into parts of the document: tables, and sentences with their numbers.
`content` puts them in reading order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefit.coefficients.model import (
    BoundaryModel,
    Condition,
    Expectation,
    Model,
    Number,
    RegimesModel,
    Term,
)
from tracefit.reports.document import Bullets, Section, table
from tracefit.reports.text import ERRORS, count, exact, metrics, number, percent, reasons, sentence, share
from tracefit.results.figures import LATENCIES
from tracefit.server.settings import without_attribute

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tracefit.coefficients.model import (
        Evaluation,
        IngestEntry,
        ScopeEvaluation,
        ServerEntry,
        TimelineEntry,
    )
    from tracefit.fit.results import (
        Burst,
        LatencyErrors,
        Phase,
        PredictionInterval,
        StepPhase,
        SummedTime,
        Validation,
    )
    from tracefit.reports.document import ReportPart, Table


# -- the data -------------------------------------------------------------------------------------------


_SERVERS = (
    "run",
    "server",
    "seconds",
    "epochs",
    "requests",
    "steps",
    "steps sampled",
    "journeys sampled",
    "snapshots",
    "dropped events",
)
_SAMPLING = (
    "Sampling rates are estimated from the traces: the share of counted steps that have a summary; the share of the requests "
    "in step summaries that have a journey, `-` without any summary; the share of summarised steps that have snapshots."
)
_ROWS = (
    "Rows used, and rows left out by reason. Training leaves out warm-up, outliers and steps with many preemptions; "
    "idle gaps and restarts are left out everywhere. Errors are measured on the held-out rows."
)
_MANY_ROWS = 12


def data_parts(evaluation: Evaluation) -> list[ReportPart]:
    """Return the section on the input and on the rows of each model."""
    entry = evaluation.ingest
    parts: list[ReportPart] = [_ingested(entry)]
    if entry.dropped_events:
        parts.append(
            f"**{count(entry.dropped_events)} events were dropped by the server's SDK** and are missing from every "
            "number here. Set `OTEL_SPAN_EVENT_COUNT_LIMIT` above 128 on the server."
        )
    parts += [sentence(without_attribute(*lacking)) for lacking in entry.missing_attributes.items()]
    if entry.servers:
        parts += [
            _SAMPLING,
            table(_SERVERS, [_server(s) for s in entry.servers]),
        ]
    rows = [
        (f"`{r.run_id}`", f"`{r.model}`", count(r.trained), count(r.held_out), reasons(r.left_out) or "none")
        for scope in evaluation.scopes
        for r in sorted(scope.rows, key=lambda r: r.run_id)
    ]
    if rows:
        parts += [
            _ROWS,
            table(
                ("run", "model", "trained", "held out", "left out"),
                rows,
                folded="Rows by run and model" if len(rows) > _MANY_ROWS else None,
            ),
        ]
    events = [(f"`{name}`", count(n)) for name, n in entry.events.items()]
    return [*parts, table(("event", "count"), events, folded="Events by name")] if events else parts


def _ingested(entry: IngestEntry) -> ReportPart:
    rows = [
        ("files", count(entry.files)),
        ("bytes", count(entry.bytes)),
        ("spans", count(entry.spans)),
        ("spans of other scopes, left out", count(entry.other_spans)),
        ("unreadable records (rejects)", count(entry.rejects)),
        *((f"implausible values left out: {rule}", count(n)) for rule, n in entry.implausible.items()),
        ("duplicate spans, counted once", count(entry.duplicates)),
        ("events dropped by the server's SDK", count(entry.dropped_events)),
    ]
    return table(("what", "count"), rows)


def _server(s: ServerEntry) -> tuple[str, ...]:
    return (
        f"`{s.run_id}`",
        s.server,
        number(s.seconds),
        *(count(n) for n in (s.epochs, s.requests, s.steps)),
        *(share(rate) for rate in (s.step_sampling, s.journey_sampling, s.snapshot_sampling)),
        count(s.dropped_events),
    )


_MOST_SAMPLED = 0.98


def clock_parts(t: TimelineEntry) -> list[ReportPart]:
    """Return the section on the source of step times: the coverage of `step.duration_us`, and the step clock."""
    rows = [
        ("busy time covered by `step.duration_us`", share(t.duration_coverage)),
        ("median cycle, us", number(t.median_cycle_us)),
        ("median `step.duration_us`", number(t.median_duration_us)),
        ("steps known", count(t.steps_known)),
        ("consecutive steps (cycles)", count(t.adjacent_cycles)),
        (
            "intervals between other known starts",
            f"{count(t.intervals)} over {count(t.interval_steps)} steps",
        ),
        ("idle gaps among both", count(t.idle_gaps)),
        ("sampled steps whose batch agrees with the journeys", share(t.composition_agreement)),
        (
            "events that disagree with the step clock",
            f"{count(t.clock_disagreements)} of {count(t.clock_checked_events)}",
        ),
        ("API events corrected from another host's clock", count(t.clock_corrected_events)),
    ]
    parts: list[ReportPart] = []
    if t.beta_target_reason:
        parts.append(f"Step times come from the {t.beta_target_source}: {t.beta_target_reason}.")
    parts.append(table(("what", "value"), rows))
    if t.execution_lag_steps:
        parts.append(
            "Scheduling runs one step ahead of execution (asynchronous scheduling): the time of a step is the cycle "
            "after its own start."
        )
    # The rate is an estimate: nearly 1 may be 1.
    if t.journey_sampling is not None and 0 < t.journey_sampling < _MOST_SAMPLED:
        parts.append(
            "Journeys are sampled: batches are known from step summaries only, and the queue state is that of the "
            "nearest sampled step."
        )
    return [Section("`step.duration_us` and the step clock", tuple(parts))]


# -- request latencies ----------------------------------------------------------------------------------


_WAYS = {
    "teacher_forced": "teacher forced",
    "refit_on_holdout": "refit on hold-out",
    "averages_only": "averages only",
    "baseline": "baseline",
}

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
    named = [(LATENCIES.get(name, name), entry.definition) for name, entry in scope.latency.items()]
    parts.append(table(("latency", "is"), named, folded="What each latency is"))
    left_out = [
        (LATENCIES.get(name, name), reasons(e.left_out)) for name, e in scope.latency.items() if e.left_out
    ]
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
            yield (LATENCIES.get(name, name), label, *metrics(getattr(entry, way)))


_GROUP_HEAD = ("latency", *ERRORS, "averages only MAPE %", "baseline MAPE %")


def _by_run(scope: ScopeEvaluation) -> list[ReportPart]:
    rows = [
        (f"`{run}`", *_group(LATENCIES.get(name, name), errors))
        for name in LATENCIES
        for run, errors in scope.latency[name].by_run.items()
    ]
    # The errors of a single run are those of the first table.
    if len(scope.runs) == 1 or not rows:
        return []
    return [table(("run", *_GROUP_HEAD), rows, folded="By run, teacher-forced")]


def _by_phase(scope: ScopeEvaluation) -> list[ReportPart]:
    rows = [
        (_phase(phase), *_group(LATENCIES.get(name, name), phase))
        for name in LATENCIES
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


# -- one model ------------------------------------------------------------------------------------------


TROUBLE = 30.0
"""Condition number above which single coefficients are poorly determined (Belsley, Kuh and Welsch 1980)."""


def model_parts(entry: Validation, model: Model, left_out: dict[str, int]) -> list[ReportPart]:
    """Return the section on one model, without its figures.

    Args:
        entry: Its validation.
        model: The model.
        left_out: Rows left out of its fit, by reason.
    """
    parts: list[ReportPart] = []
    if model.target is not None:
        t = model.target
        parts.append(f"Predicts {t.definition} ({t.unit}, from {t.source.replace('_', ' ')}).")
    parts += [*_coefficients(model), *burst_lines(entry.bursts)]
    facts = (
        *_facts(entry, model, left_out),
        *trust_lines(entry),
        *(f"Note: {text}." for text in model.notes),
    )
    parts.append(Bullets(facts))
    parts += step_phase_parts(entry.by_phase)
    if entry.candidates:
        tried = [
            (
                f"`{c.name}`{' **chosen**' if c.chosen else ''}",
                count(c.features),
                number(c.inside_mae),
                number(c.beyond_mae),
                c.reason,
            )
            for c in entry.candidates
        ]
        head = ("candidate", "features", "MAE inside", "MAE beyond the load", "reason")
        parts.append(table(head, tried, folded="Candidates compared on the training part"))
    if model.features_left_out:
        rows = [(f"`{x.feature}`", x.reason) for x in model.features_left_out]
        parts.append(table(("feature", "reason"), rows, folded="Features left out"))
    return parts


def _facts(entry: Validation, model: Model, left_out: dict[str, int]) -> Iterator[str]:
    if entry.boundary_accuracy_pct is not None:
        yield (
            f"**Step boundary predicted correctly:** {percent(entry.boundary_accuracy_pct)} % of held-out requests whose step is known "
            f"({percent(entry.boundary_accuracy_without_work_pct)} % with zero API work)."
        )
    if entry.classifier is not None:
        accuracy = number(entry.classifier.balanced_accuracy)
        counts = reasons(entry.classifier.confusion)
        yield f"**Condition of the first regime, on the hold-out:** balanced accuracy {accuracy} ({counts})."
    if model.estimator is not None:
        e = model.estimator
        yield (
            f"**Estimator:** {e.name.replace('_', ' ')}, {e.penalty} penalty {e.strength:g}, chosen by {e.chosen_by}."
        )
    if model.training is not None:
        t = model.training
        yield (
            f"**Rows:** {count(t.rows_used)} of {count(t.rows)} trained, {count(t.rows_holdout)} held out; "
            f"left out: {reasons(left_out) or 'none'}."
        )
        yield (
            f"**In-sample MAPE,** for comparison with the hold-out's {percent(entry.holdout.mape_pct)} %: "
            f"{percent(entry.train.mape_pct)} %."
        )
    if entry.rows_by_source:
        yield f"**Training rows by source:** {reasons(entry.rows_by_source)}."


def _coefficients(model: Model) -> list[ReportPart]:
    if isinstance(model, RegimesModel):
        return [
            part
            for regime in model.regimes
            for part in (
                f"Regime *{regime.name}*, {_condition(regime.when)}:",
                _terms(regime.intercept, regime.terms),
            )
        ]
    if isinstance(model, BoundaryModel):
        # The wait itself is no coefficient: whoever simulates steps knows when the next one starts.
        expected = model.expectation
        return [
            "API work:",
            _terms(model.work.intercept, model.work.terms),
            f"then the first step start at or after it, {exact(model.offset.value)} us; without a step clock:",
            _terms(model.without_clock.intercept, model.without_clock.terms),
            *([_expectation(expected)] if expected else []),
        ]
    return [_terms(model.intercept, model.terms)]


def _expectation(expected: Expectation) -> str:
    return (
        f"Expected where the step starts are not known: {number(expected.intercept.value)} us; of a step in progress "
        f"{number(expected.residual.value)} us are left on average (half a cycle, cycles weighted by their length), "
        f"and a step is in progress {share(expected.busy_share)} of the time."
    )


def _condition(when: Condition) -> str:
    # The last regime has no condition of its own: it predicts what the others leave.
    if not when.any:
        return "otherwise"
    tests = (f"`{c.feature}` {c.op} {f'`{c.feature2}`' if c.feature2 else exact(c.value)}" for c in when.any)
    return "when " + " or ".join(tests)


def _terms(intercept: Number, terms: Iterable[Term]) -> Table:
    rows: list[tuple[str, ...]] = [("intercept", "us", exact(intercept.value), interval(intercept.ci95), "")]
    rows += [
        (f"`{t.feature}`", t.unit, exact(t.value), interval(t.ci95), interval(t.training_range))
        for t in terms
    ]
    return table(("term", "unit", "value", "95 % interval", "training range"), rows)


def interval(pair: tuple[float, float] | None) -> str:
    """Write both ends of a range; empty where there is none."""
    return f"{exact(pair[0])} to {exact(pair[1])}" if pair else ""


# How far the model can be trusted


def trust_lines(entry: Validation) -> list[str]:
    """Return one paragraph per fact of a model's validation."""
    lines = [
        _equations(entry),
        _intervals(entry),
        _collinearity(entry),
        _extrapolation(entry),
        _beyond_load(entry),
        _learning(entry),
    ]
    return [line for line in lines if line]


def _intervals(entry: Validation) -> str:
    if not entry.prediction_intervals or entry.interval_coverage_pct is None:
        return ""
    several = len(entry.prediction_intervals) > 1
    limits = "; ".join(
        f"{f'*{p.regime}* ' if several else ''}{_limits(p, entry.unit)}" for p in entry.prediction_intervals
    )
    return f"**95 % prediction interval:** {limits}. It held {entry.interval_coverage_pct:.1f} % of the held-out rows."


def _limits(interval: PredictionInterval, unit: str) -> str:
    if interval.kind == "ratio":
        return f"{interval.low:.3g} to {interval.high:.3g} times the prediction"
    return f"the prediction {interval.low:+,.0f} to {interval.high:+,.0f} {unit}"


def _collinearity(entry: Validation) -> str:
    # Predictions do not suffer from collinearity, single coefficients do: who reads them as costs has to know.
    parts = []
    for one in entry.collinearity:
        # One feature alone is collinear with nothing.
        if one.condition_number is None or len(one.variance_inflation) < 2:
            continue
        worst = max(one.variance_inflation, key=lambda name: one.variance_inflation[name])
        name = f"*{one.regime}* " if len(entry.collinearity) > 1 else ""
        trouble = (
            "; **the data do not determine single coefficients well**"
            if one.condition_number > TROUBLE
            else ""
        )
        parts.append(
            f"{name}condition number {one.condition_number:.3g}, largest variance inflation "
            f"{one.variance_inflation[worst]:.3g} (`{worst}`){trouble}"
        )
    return f"**Collinearity of the kept features:** {'; '.join(parts)}." if parts else ""


def _extrapolation(entry: Validation) -> str:
    if not entry.extrapolated_rows:
        return ""
    by_feature = ", ".join(f"`{name}` {rows:,}" for name, rows in entry.extrapolated.items())
    return (
        f"**Extrapolation:** {entry.extrapolated_rows:,} of {entry.holdout.n:,} held-out rows lie outside the range of "
        f"the training rows ({by_feature}): their predictions, and the errors above, are extrapolations."
    )


def _equations(entry: Validation) -> str:
    found = entry.held_out_equations
    if found is None:
        return ""
    kinds = ", ".join(f"{name} {rows:,}" for name, rows in found.rows_by_source.items())
    one, step = found.per_equation, found.per_step
    return (
        f"**All held-out cycles and intervals** ({kinds}): MAPE {percent(one.mape_pct)} % each (n = {one.n:,}), "
        f"{percent(step.mape_pct)} % and bias {percent(step.bias_pct)} % weighted by steps (n = {step.n:,} steps)."
    )


def _beyond_load(entry: Validation) -> str:
    found, inside = entry.load_extrapolation, entry.by_load.get("inside")
    if found is None:
        return ""
    beside = (
        f", gradient boosting {percent(found.gradient_boosting.mape_pct)} %"
        if found.gradient_boosting
        else ""
    )
    within = (
        f" On the hold-out inside the training ranges it is {percent(inside.mape_pct)} %." if inside else ""
    )
    return (
        f"**Beyond the load:** trained on the lower half of the load of the whole run ({found.load.replace('_', ' ')} up to "
        f"{number(found.cut)}), MAPE {percent(found.mape_pct)} % and bias {percent(found.bias_pct)} % on the upper half "
        f"(n = {found.n:,}){beside}.{within}"
    )


def _learning(entry: Validation) -> str:
    if len(entry.learning_curve) < 2:
        return ""
    points = ", ".join(f"{number(p.mae)} ({p.rows:,})" for p in entry.learning_curve)
    return f"**Hold-out MAE, {entry.unit},** by number of training rows, the latest before the hold-out: {points}."
