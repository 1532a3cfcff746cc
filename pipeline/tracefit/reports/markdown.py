"""The report's content: the evaluation's numbers for a person, and the figures where they belong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefit.coefficients.model import (
    BoundaryModel,
    CoefficientFile,
    Condition,
    Expectation,
    LinearModel,
    Number,
    RegimesModel,
    Term,
)
from tracefit.reports.across import across_parts
from tracefit.reports.cells import ERRORS, count, metrics, number, share, table
from tracefit.reports.latency import burst_lines, latency_sections, summed_line
from tracefit.reports.model import Figure, Part, Report, Table
from tracefit.reports.trust import trust_lines
from tracefit.reports.verdicts import verdict_parts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tracefit.coefficients.evaluation import (
        Entry,
        Evaluation,
        IngestEntry,
        OverloadEntry,
        ScopeEvaluation,
    )

_PREAMBLE = (
    "Errors are on the hold-out: the last 30 % of each run in time, nothing left out of it but idle gaps. "
    "*Baseline* predicts the training median; *reference* is gradient boosting on the same features and rows."
)

AnyModel = LinearModel | RegimesModel | BoundaryModel


Figures = dict[tuple[str, str], tuple[Figure, ...]]
"""(scope_id, model name) to its figures; of a scope also `latency` and `engine`."""


def build_report(
    evaluation: Evaluation,
    alpha: CoefficientFile,
    beta: CoefficientFile,
    figures: Figures,
    *,
    with_tables: bool,
) -> Report:
    """Build the whole report.

    Args:
        evaluation: The evaluation.
        alpha: Its alpha file.
        beta: Its beta file.
        figures: What there is to draw.
        with_tables: Whether there were tables to draw rows of.
    """
    models = {(m.scope_id, m.name): m for m in (*beta.models, *alpha.models)}
    parts: list[Part] = [*verdict_parts(evaluation), _PREAMBLE, *_ingest(evaluation.ingest)]
    if not with_tables:
        parts.append(
            "There were no tables beside the evaluation: figures of rows, requests and runs are left out."
        )
    for scope in evaluation.scopes:
        parts += _scope(scope, models, figures)
    parts += [*across_parts(evaluation), *_provenance(beta)]
    return Report("tracefit report", tuple(parts))


def _ingest(entry: IngestEntry) -> list[Part]:
    rows = [
        ("files", count(entry.files)),
        ("bytes", count(entry.bytes)),
        ("spans", count(entry.spans)),
        ("spans of other scopes, left out", count(entry.other_spans)),
        ("records that could not be read (rejects)", count(entry.rejects)),
        ("spans there twice, counted once", count(entry.duplicates)),
        ("events the server's SDK dropped", count(entry.dropped_events)),
        *((f"events `{name}`", count(n)) for name, n in entry.events.items()),
    ]
    parts: list[Part] = ["## Data", table(("what", "count"), rows)]
    if entry.dropped_events:
        parts.append(
            f"**{count(entry.dropped_events)} events were dropped by the server's SDK** and are missing from every "
            "number here. Set `OTEL_SPAN_EVENT_COUNT_LIMIT` above 128 on the server."
        )
    return parts


def _scope(
    scope: ScopeEvaluation, models: dict[tuple[str | None, str], AnyModel], figures: Figures
) -> list[Part]:
    parts: list[Part] = [f"## Scope `{scope.scope_id}`", f"Runs: {', '.join(f'`{r}`' for r in scope.runs)}"]
    mine = {name: models[scope.scope_id, name] for name in scope.models}
    parts += _facts(next(iter(mine.values())) if mine else None)
    parts += [_overload(one) for one in scope.overloaded]
    parts.append(_errors(scope))
    parts += [f"- **{m.name}** was not fitted: {m.reason}{_remedy(m.remedy)}" for m in scope.not_fitted]
    if scope.summed_step_time is not None:
        parts.append(summed_line(scope.summed_step_time))
    parts += [*latency_sections(scope), *figures.get((scope.scope_id, "latency"), ())]
    parts += _timeline(scope)
    for name, entry in scope.models.items():
        parts += _model(name, entry, mine[name], scope.exclusions.get(name, {}))
        parts += figures.get((scope.scope_id, name), ())
    if drawn := figures.get((scope.scope_id, "engine")):
        parts += ["### The engine over the run", *drawn]
    return [*parts, *_ranges(mine)]


def _ranges(models: dict[str, AnyModel]) -> list[Part]:
    """Say what the models have seen: outside of it a prediction is an extrapolation."""
    rows = [
        (f"`{name}`", f"`{t.feature}`", _interval(t.seen))
        for name, model in models.items()
        for t in _all_terms(model)
        if t.seen is not None
    ]
    if not rows:
        return []
    text = (
        "Smallest and largest value in the training rows. Outside of them a prediction is an extrapolation."
    )
    return ["### Validity ranges", text, table(("model", "feature", "seen"), rows)]


def _all_terms(model: AnyModel) -> list[Term]:
    if isinstance(model, RegimesModel):
        return [t for r in model.regimes for t in r.terms]
    return [*(model.work if isinstance(model, BoundaryModel) else model).terms]


def _provenance(file: CoefficientFile) -> list[Part]:
    made = file.provenance
    if made is None:
        return []
    rows = [
        (made.tool, made.version),
        *((name, number) for name, number in made.libraries.items()),
        *((f"option {name}", str(value)) for name, value in made.options.items()),
    ]
    inputs = {m.training.inputs_sha256: m.scope_id or "" for m in file.models if m.training}
    rows += [(f"inputs of `{scope}`, sha256", f"`{digest}`") for digest, scope in inputs.items()]
    return ["## Provenance", table(("what", "value"), rows)]


def _overload(one: OverloadEntry) -> str:
    fate = (
        "it is trained on all the same, so that the models speak of an overloaded server"
        if one.trained_on
        else "it is left out of training (`--include-overloaded` keeps it)"
    )
    return f"**Run `{one.run_id}` was overloaded** ({'; '.join(one.reasons)}): {fate}."


def _remedy(remedy: str | None) -> str:
    return f"; {remedy}" if remedy else ""


def _facts(model: AnyModel | None) -> list[str]:
    facts = model.scope if model else None
    if facts is None:
        return []
    known = {**facts.settings}
    lines = [f"Model {facts.model or 'not named'}, GPU {facts.gpu or 'not given'}."]
    if facts.gpu is None:
        lines.append("Without a GPU specification hardware features are unknown and left out.")
    if not facts.architecture:
        lines.append("Without a config.json features of the model are unknown and left out.")
    if known:
        lines.append(
            "Settings: " + ", ".join(f"{k} {v}" for k, v in known.items() if k not in ("model", "gpu")) + "."
        )
    if facts.assumed:
        lines.append("Assumed, stated by no input: " + "; ".join(facts.assumed) + ".")
    return [" ".join(lines)]


_ERRORS = ("model", *ERRORS, "baseline MAE", "reference MAE")


def _errors(scope: ScopeEvaluation) -> Table:
    rows = []
    for name, entry in scope.models.items():
        reference = entry.reference.mae if entry.reference else None
        rows.append((f"`{name}`", *metrics(entry.holdout), number(entry.baseline.mae), number(reference)))
        rows += [(f"`{name}`, {kind}", *metrics(m), "", "") for kind, m in entry.by.items()]
    return table(_ERRORS, rows)


def _timeline(scope: ScopeEvaluation) -> list[Part]:
    t = scope.timeline
    rows = [
        ("servers", count(t.servers)),
        ("engine epochs", count(t.epochs)),
        ("steps sampled", count(t.steps_known)),
        ("step sampling", share(t.step_sampling)),
        ("journey sampling (estimated)", share(t.journey_sampling)),
        ("consecutive steps (cycles)", count(t.adjacent_cycles)),
        (
            "intervals between other known starts",
            f"{count(t.intervals)} over {count(t.interval_steps)} steps",
        ),
        ("idle gaps among both", count(t.idle_gaps)),
        (
            "events that disagree with the step clock",
            f"{count(t.clock_disagreements)} of {count(t.clock_checked_events)}",
        ),
        ("API events moved from another host's clock", count(t.moved_events)),
        ("steps whose batch the journeys tell exactly", share(t.composition_agreement)),
        ("busy time covered by `step.duration_us`", share(t.duration_coverage)),
        ("median cycle us", number(t.median_cycle_us)),
        ("median `step.duration_us`", number(t.median_duration_us)),
    ]
    parts: list[Part] = ["### Step clock", table(("what", "value"), rows)]
    if t.beta_target_because:
        parts.append(f"Step times come from the {t.beta_target_source}: {t.beta_target_because}.")
    if t.execution_lag_steps:
        parts.append(
            "Scheduling runs one step ahead of execution (asynchronous scheduling): the time of a step is the cycle "
            "after its own start."
        )
    if t.journey_sampling is not None and 0 < t.journey_sampling < 0.98:
        parts.append(
            "Journeys are sampled: batches are those of step summaries alone, and the queue state is that of the "
            "nearest sampled step, not exact."
        )
    return parts


def _model(name: str, entry: Entry, model: AnyModel, left_out: dict[str, int]) -> list[Part]:
    parts: list[Part] = [f"### `{name}`"]
    if model.target is not None:
        t = model.target
        parts.append(f"Target: {t.definition} ({t.unit}, from {t.source}).")
    parts += _coefficients(model)
    if entry.right_boundary_pct is not None:
        parts.append(
            f"Right step boundary: {number(entry.right_boundary_pct)} % of held-out requests whose step is known "
            f"({number(entry.right_boundary_without_work_pct)} % with zero API work)."
        )
    if entry.classifier is not None:
        counts = ", ".join(f"{k.replace('_', ' ')} {count(n)}" for k, n in entry.classifier.confusion.items())
        accuracy = number(entry.classifier.balanced_accuracy)
        parts.append(
            f"The condition of the first regime on the hold-out: balanced accuracy {accuracy} ({counts})."
        )
    if model.estimator is not None:
        e = model.estimator
        parts.append(f"Estimator: {e.name}, {e.penalty} penalty {e.strength:g}, chosen by {e.chosen_by}.")
    parts += burst_lines(entry.bursts)
    parts += trust_lines(entry)
    if model.training is not None:
        counts = ", ".join(f"{k} {count(v)}" for k, v in left_out.items()) or "none"
        parts.append(
            f"Rows: {count(model.training.rows_used)} of {count(model.training.rows)} trained, "
            f"{count(model.training.rows_holdout)} held out; left out: {counts}. "
            f"In-sample MAPE, for comparison with the hold-out's {number(entry.holdout.mape_pct)} %: "
            f"{number(entry.train.mape_pct)} %."
        )
    if entry.equations:
        kinds = ", ".join(f"{count(n)} {kind}" for kind, n in entry.equations.items())
        parts.append(f"Equations trained on: {kinds}.")
    if model.features_left_out:
        parts.append(
            "Features left out: "
            + "; ".join(f"`{x.feature}` {x.reason}" for x in model.features_left_out)
            + "."
        )
    return parts


def _coefficients(model: AnyModel) -> list[Part]:
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
        expected = model.expectation
        return [
            "API work:",
            _terms(model.work.intercept, model.work.terms),
            f"then the first step start at or after it, {number(model.offset.value)} us; without a step clock:",
            _terms(model.without_clock.intercept, model.without_clock.terms),
            *([_expectation(expected)] if expected else []),
        ]
    return [_terms(model.intercept, model.terms)]


def _expectation(expected: Expectation) -> str:
    return (
        f"Expected where nothing is known of the steps: {number(expected.intercept.value)} us, of a step in progress "
        f"{number(expected.residual.value)} us are left on the average (half a cycle, cycles weighted by their length) "
        f"and one is in progress {share(expected.busy_share)} of the time."
    )


def _condition(when: Condition) -> str:
    if not when.any:
        return "otherwise"
    tests = (f"`{c.feature}` {c.op} {f'`{c.feature2}`' if c.feature2 else number(c.value)}" for c in when.any)
    return "when " + " or ".join(tests)


def _terms(intercept: Number, terms: Iterable[Term]) -> Table:
    rows: list[tuple[str, ...]] = [
        ("intercept", "us", number(intercept.value), _interval(intercept.ci95), "")
    ]
    rows += [_term(t) for t in terms]
    return table(("term", "unit", "value", "95 % interval", "seen"), rows)


def _term(term: Term) -> tuple[str, ...]:
    return (f"`{term.feature}`", term.unit, number(term.value), _interval(term.ci95), _interval(term.seen))


def _interval(pair: tuple[float, float] | None) -> str:
    return f"{number(pair[0])} to {number(pair[1])}" if pair else ""
