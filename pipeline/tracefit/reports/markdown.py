"""report.md: the evaluation's numbers for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefit.coefficients.model import (
    BoundaryModel,
    CoefficientFile,
    Condition,
    LinearModel,
    Number,
    RegimesModel,
    Term,
)
from tracefit.reports.trust import trust_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tracefit.coefficients.evaluation import Entry, Evaluation, IngestEntry, MetricsEntry, ScopeEvaluation

_PREAMBLE = (
    "Errors are on the hold-out: the last 30 % of each run in time, nothing left out of it but idle gaps. "
    "*Baseline* predicts the training median; *reference* is gradient boosting on the same features and rows."
)

AnyModel = LinearModel | RegimesModel | BoundaryModel


def report_markdown(evaluation: Evaluation, alpha: CoefficientFile, beta: CoefficientFile) -> str:
    """Return the whole report as Markdown text."""
    models = {(m.scope_id, m.name): m for m in (*beta.models, *alpha.models)}
    parts = [
        "# tracefit report",
        _PREAMBLE,
        *_ingest(evaluation.ingest),
    ]
    for scope in evaluation.scopes:
        parts += _scope(scope, models)
    return "\n\n".join(parts) + "\n"


def _ingest(entry: IngestEntry) -> list[str]:
    rows = [
        ("files", _count(entry.files)),
        ("bytes", _count(entry.bytes)),
        ("spans", _count(entry.spans)),
        ("spans of other scopes, left out", _count(entry.other_spans)),
        ("records that could not be read (rejects)", _count(entry.rejects)),
        ("spans there twice, counted once", _count(entry.duplicates)),
        ("events the server's SDK dropped", _count(entry.dropped_events)),
        *((f"events `{name}`", _count(n)) for name, n in entry.events.items()),
    ]
    parts = ["## Data", _table(("what", "count"), rows)]
    if entry.dropped_events:
        parts.append(
            f"**{_count(entry.dropped_events)} events were dropped by the server's SDK** and are missing from every "
            "number here. Set `OTEL_SPAN_EVENT_COUNT_LIMIT` above 128 on the server."
        )
    return parts


def _scope(scope: ScopeEvaluation, models: dict[tuple[str | None, str], AnyModel]) -> list[str]:
    parts = [f"## Scope `{scope.scope_id}`", f"Runs: {', '.join(f'`{r}`' for r in scope.runs)}"]
    mine = {name: models[scope.scope_id, name] for name in scope.models}
    parts += _facts(next(iter(mine.values())) if mine else None)
    parts.append(_errors(scope))
    parts += [f"- **{m.name}** was not fitted: {m.reason}{_remedy(m.remedy)}" for m in scope.not_fitted]
    parts += _timeline(scope)
    for name, entry in scope.models.items():
        parts += _model(name, entry, mine[name], scope.exclusions.get(name, {}))
    return parts


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


_ERRORS = (
    "model",
    "n",
    "MAPE %",
    "median APE %",
    "P90 %",
    "P99 %",
    "bias %",
    "MAE us",
    "baseline MAE",
    "reference MAE",
)


def _errors(scope: ScopeEvaluation) -> str:
    rows = []
    for name, entry in scope.models.items():
        reference = entry.reference.mae if entry.reference else None
        rows.append((f"`{name}`", *_metrics(entry.holdout), _number(entry.baseline.mae), _number(reference)))
        rows += [(f"`{name}`, {kind}", *_metrics(m), "", "") for kind, m in entry.by.items()]
    return _table(_ERRORS, rows)


def _metrics(m: MetricsEntry) -> tuple[str, ...]:
    percentages = (m.mape_pct, m.mdape_pct, m.p90_ape_pct, m.p99_ape_pct, m.bias_pct)
    return (_count(m.n), *(_number(v) for v in percentages), _number(m.mae))


def _timeline(scope: ScopeEvaluation) -> list[str]:
    t = scope.timeline
    rows = [
        ("servers", _count(t.servers)),
        ("engine epochs", _count(t.epochs)),
        ("steps sampled", _count(t.steps_known)),
        ("step sampling", _share(t.step_sampling)),
        ("journey sampling (estimated)", _share(t.journey_sampling)),
        ("consecutive steps (cycles)", _count(t.adjacent_cycles)),
        (
            "intervals between other known starts",
            f"{_count(t.intervals)} over {_count(t.interval_steps)} steps",
        ),
        ("idle gaps among both", _count(t.idle_gaps)),
        (
            "events that disagree with the step clock",
            f"{_count(t.clock_disagreements)} of {_count(t.clock_checked_events)}",
        ),
        ("API events moved from another host's clock", _count(t.moved_events)),
        ("steps whose batch the journeys tell exactly", _share(t.composition_agreement)),
        ("busy time covered by `step.duration_us`", _share(t.duration_coverage)),
        ("median cycle us", _number(t.median_cycle_us)),
        ("median `step.duration_us`", _number(t.median_duration_us)),
    ]
    parts = ["### Step clock", _table(("what", "value"), rows)]
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


def _model(name: str, entry: Entry, model: AnyModel, left_out: dict[str, int]) -> list[str]:
    parts = [f"### `{name}`"]
    if model.target is not None:
        t = model.target
        parts.append(f"Target: {t.definition} ({t.unit}, from {t.source}).")
    parts += _coefficients(model)
    if entry.right_boundary_pct is not None:
        parts.append(
            f"Right step boundary: {_number(entry.right_boundary_pct)} % of held-out requests whose step is known "
            f"({_number(entry.right_boundary_without_work_pct)} % with zero API work)."
        )
    if entry.classifier is not None:
        counts = ", ".join(
            f"{k.replace('_', ' ')} {_count(n)}" for k, n in entry.classifier.confusion.items()
        )
        accuracy = _number(entry.classifier.balanced_accuracy)
        parts.append(
            f"The condition of the first regime on the hold-out: balanced accuracy {accuracy} ({counts})."
        )
    if model.estimator is not None:
        e = model.estimator
        parts.append(f"Estimator: {e.name}, {e.penalty} penalty {e.strength:g}, chosen by {e.chosen_by}.")
    parts += trust_lines(entry)
    if model.training is not None:
        counts = ", ".join(f"{k} {_count(v)}" for k, v in left_out.items()) or "none"
        parts.append(
            f"Rows: {_count(model.training.rows_used)} of {_count(model.training.rows)} trained, "
            f"{_count(model.training.rows_holdout)} held out; left out: {counts}. "
            f"In-sample MAPE, for comparison with the hold-out's {_number(entry.holdout.mape_pct)} %: "
            f"{_number(entry.train.mape_pct)} %."
        )
    if entry.equations:
        kinds = ", ".join(f"{_count(n)} {kind}" for kind, n in entry.equations.items())
        parts.append(f"Equations trained on: {kinds}.")
    if model.features_left_out:
        parts.append(
            "Features left out: "
            + "; ".join(f"`{x.feature}` {x.reason}" for x in model.features_left_out)
            + "."
        )
    return parts


def _coefficients(model: AnyModel) -> list[str]:
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
        return [
            "API work:",
            _terms(model.work.intercept, model.work.terms),
            f"then the first step start at or after it, {_number(model.offset.value)} us; without a step clock:",
            _terms(model.without_clock.intercept, model.without_clock.terms),
        ]
    return [_terms(model.intercept, model.terms)]


def _condition(when: Condition) -> str:
    if not when.any:
        return "otherwise"
    tests = (
        f"`{c.feature}` {c.op} {f'`{c.feature2}`' if c.feature2 else _number(c.value)}" for c in when.any
    )
    return "when " + " or ".join(tests)


def _terms(intercept: Number, terms: Iterable[Term]) -> str:
    rows: list[tuple[str, ...]] = [
        ("intercept", "us", _number(intercept.value), _interval(intercept.ci95), "")
    ]
    rows += [_term(t) for t in terms]
    return _table(("term", "unit", "value", "95 % interval", "seen"), rows)


def _term(term: Term) -> tuple[str, ...]:
    return (f"`{term.feature}`", term.unit, _number(term.value), _interval(term.ci95), _interval(term.seen))


def _interval(pair: tuple[float, float] | None) -> str:
    return f"{_number(pair[0])} to {_number(pair[1])}" if pair else ""


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _count(value: int) -> str:
    return f"{value:,}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [_row(head), _row(["---"] * len(head)), *(_row(r) for r in rows)]
    return "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    # A pipe in a run's or a model's name must not end the cell.
    return "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in cells) + " |"
