"""The report's content in reading order: the evaluation's numbers for a person, and the figures where they belong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefit.coefficients.model import CoefficientFile, RegimesModel, Term
from tracefit.reports.across import across_parts
from tracefit.reports.cells import ERRORS, count, metrics, number, plural, table
from tracefit.reports.data import clock_parts, data_parts
from tracefit.reports.latency import latency_sections, summed_line
from tracefit.reports.model import Figure, Part, Report, Table
from tracefit.reports.models import AnyModel, interval, model_parts, terms_of
from tracefit.reports.verdicts import verdict_parts

if TYPE_CHECKING:
    from tracefit.coefficients.evaluation import Evaluation, OverloadEntry, ScopeEvaluation

_PREAMBLE = (
    "Errors are on the hold-out: the last 30 % of each run in time, nothing left out of it but idle gaps and restarts. "
    "*Baseline* predicts the training median; *reference* is gradient boosting on the same features and rows."
)

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
    parts: list[Part] = [_of_what(evaluation), *verdict_parts(evaluation), _PREAMBLE, *data_parts(evaluation)]
    if not with_tables:
        parts.append(
            "There were no tables beside the evaluation: figures of rows, requests and runs are left out."
        )
    for scope in evaluation.scopes:
        mine = {name: models[scope.scope_id, name] for name in scope.models}
        parts += _scope(scope, mine, figures)
    parts += [*across_parts(evaluation), *_provenance(alpha, beta)]
    return Report("tracefit report", tuple(parts))


def _of_what(evaluation: Evaluation) -> str:
    servers = evaluation.ingest.servers
    counts = (
        plural(len({s.run_id for s in servers}), "run"),
        plural(len(evaluation.scopes), "scope"),
        plural(sum(s.requests for s in servers), "request"),
        plural(sum(s.steps for s in servers), "traced step"),
    )
    return f"Latency models of a vLLM server, fitted on its traces: {', '.join(counts)}."


def _scope(scope: ScopeEvaluation, models: dict[str, AnyModel], figures: Figures) -> list[Part]:
    parts: list[Part] = [f"## Scope `{scope.scope_id}`", f"Runs: {', '.join(f'`{r}`' for r in scope.runs)}."]
    parts += _facts(next(iter(models.values())) if models else None)
    parts += [_overload(one) for one in scope.overloaded]
    parts += ["### Errors on the hold-out", _errors(scope)]
    parts += [f"- **{m.name}** was not fitted: {m.reason}{_remedy(m.remedy)}" for m in scope.not_fitted]
    if scope.summed_step_time is not None:
        parts.append(summed_line(scope.summed_step_time))
    parts += clock_parts(scope.timeline)
    # Step times before waits, as one reads them.
    for name, entry in sorted(scope.models.items(), key=lambda item: not item[0].startswith("beta.")):
        parts += model_parts(name, entry, models[name], scope.exclusions.get(name, {}))
        parts += figures.get((scope.scope_id, name), ())
    parts += [*latency_sections(scope), *figures.get((scope.scope_id, "latency"), ())]
    if drawn := figures.get((scope.scope_id, "engine")):
        parts += ["### The engine over the run", *drawn]
        if len(drawn) < scope.timeline.servers:
            parts.append(
                f"{len(drawn)} of {count(scope.timeline.servers)} engines are drawn, overloaded ones first."
            )
    if (scope.scope_id, "engine") not in figures:
        parts.append(
            "Figures of this scope are left out, so that the page stays small; train on its runs alone to see them."
        )
    return [*parts, *_ranges(models)]


def _facts(model: AnyModel | None) -> list[Part]:
    facts = model.scope if model else None
    if facts is None:
        return []
    lines = [f"Model {facts.model or 'not named'}, GPU {facts.gpu or 'not given'}."]
    if facts.gpu is None:
        lines.append("Without a GPU specification hardware features are unknown and left out.")
    if not facts.architecture:
        lines.append("Without a config.json features of the model are unknown and left out.")
    if facts.assumed:
        lines.append("Assumed, stated by no input: " + "; ".join(facts.assumed) + ".")
    settings = [(f"`{k}`", str(v)) for k, v in facts.settings.items() if k not in ("model", "gpu")]
    shown: list[Part] = [" ".join(lines)]
    return [*shown, table(("setting", "value"), settings, folded="Server settings")] if settings else shown


def _overload(one: OverloadEntry) -> str:
    fate = (
        "it is trained on all the same, so that the models speak of an overloaded server"
        if one.trained_on
        else "it is left out of training (`--include-overloaded` keeps it)"
    )
    return f"**Run `{one.run_id}` was overloaded** ({'; '.join(one.reasons)}): {fate}."


def _remedy(remedy: str | None) -> str:
    return f"; {remedy}" if remedy else ""


_ERRORS = ("model", *ERRORS, "baseline MAE", "reference MAE")


def _errors(scope: ScopeEvaluation) -> Table:
    rows = []
    for name, entry in scope.models.items():
        reference = entry.gradient_boosting.mae if entry.gradient_boosting else None
        rows.append((f"`{name}`", *metrics(entry.holdout), number(entry.baseline.mae), number(reference)))
        rows += [
            (f"`{name}`, {kind.replace('_', ' ')}", *metrics(m), "", "") for kind, m in entry.by_group.items()
        ]
    return table(_ERRORS, rows)


def _ranges(models: dict[str, AnyModel]) -> list[Part]:
    """Say what the models have seen: outside of it a prediction is an extrapolation."""
    rows = [
        (f"`{name}`{regime}", f"`{t.feature}`", interval(t.training_range))
        for name, model in models.items()
        for regime, t in _all_terms(model)
        if t.training_range is not None
    ]
    if not rows:
        return []
    text = (
        "Smallest and largest value in the training rows. Outside of them a prediction is an extrapolation."
    )
    return ["### Validity ranges", text, table(("model", "feature", "seen"), rows)]


def _all_terms(model: AnyModel) -> list[tuple[str, Term]]:
    if isinstance(model, RegimesModel):
        return [(f", {r.name}", t) for r in model.regimes for t in r.terms]
    return [("", t) for t in terms_of(model)]


def _provenance(alpha: CoefficientFile, beta: CoefficientFile) -> list[Part]:
    made = beta.provenance or alpha.provenance
    if made is None:
        return []
    rows = [
        (made.tool, made.version),
        *((name, version) for name, version in made.libraries.items()),
        *((f"option {name.replace('_', '-')}", _option(value)) for name, value in made.options.items()),
        *((f"file of option {name}, sha256", f"`{digest}`") for name, digest in made.files.items()),
    ]
    inputs = {m.training.inputs_sha256: m.scope_id or "" for m in (*beta.models, *alpha.models) if m.training}
    rows += [(f"inputs of `{scope}`, sha256", f"`{digest}`") for digest, scope in inputs.items()]
    return ["## Provenance", table(("what", "value"), rows)]


def _option(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
