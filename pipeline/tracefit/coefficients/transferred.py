"""Publish a transfer: the law as a model of step times with one server's numbers in it, and what was measured on
servers left out.

The longer of the GPU's work and the launches is two regimes of steps with prompts, whose condition compares the two
sums: consumers evaluate it as any other model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.coefficients.documents import DeploymentEvaluation, Evaluation, IngestEntry, TimelineEntry
from tracefit.coefficients.verdicts import Measurements, verdicts_of
from tracefit.features.law import (
    COMPUTE,
    COMPUTE_BOUND,
    GPU_BOUND,
    LAUNCH,
    LAUNCH_BOUND,
    LAW_BATCH_COLUMNS,
    MEMORY,
    MEMORY_BOUND,
    OVERHEAD,
    LawTerm,
)
from tracefit.features.training import definitions
from tracefit.fit.fitted import target_of
from tracefit.fit.results import LeftOutErrors, Missing
from tracefit.fit.transfer import DECODES, PROMPTS, as_run_by, part_of, thinned
from tracefit.fit.validation import measure, skill
from tracefit.models import schema
from tracefit.models.targets import CYCLE_TIME
from tracefit.models.validation import NO_ROWS, Metrics, Validation

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tracefit.fit.transfer import Calibration, Fold, Kind, Law, LawRows
    from tracefit.server.context import Deployment, RunContext

_DEFINITION = "start of a step to the start of the next one, from a law that was fitted on other servers"
_LAW_DIGITS = 12
_ALWAYS_BOUND = "always_bound_us"
_TERMS_PER_FORMULA = 5
_LEAST_COEFFICIENT = 1e-6
_ONLY_PROMPTS = {"prompt_matrix_us", "prompt_attention_us", "prompt_kernels"}
"""Terms that are 0 in steps without prompts."""


def step_model(
    deployment: Deployment,
    law: Law,
    sources: Sequence[LawRows],
    transfer: schema.Transfer,
    validation: Validation,
    *,
    training: schema.Training | None = None,
    notes: tuple[str, ...] = (),
) -> schema.RegimesModel:
    """Return the law as the model of a server's step times.

    Args:
        deployment: The server.
        law: The coefficients.
        sources: Servers whose steps show how far the terms reach.
        transfer: Where the law comes from.
        validation: Its errors.
        training: Steps of the server itself, for a calibrated law.
        notes: Sentences on it.
    """
    reach = _reach(sources, deployment.context)
    # A dense model reads no experts: that term is 0 for whatever batch.
    used = [(t, c) for t, c in law.pairs() if c > 0 and reach[t.feature.name].to_numpy().any()]
    regimes = tuple(
        schema.Regime(name=name, when=when, intercept=schema.Number(value=0.0), terms=_terms(terms, reach))
        for name, when, terms in _regimes(law, used)
    )
    sums = _sums(law, used)
    formulas = [t.feature.formula for t, _ in used]
    is_calibrated = transfer.calibration is not None and transfer.calibration.used
    return schema.RegimesModel(
        form="regimes",
        name=CYCLE_TIME.model,
        deployment_id=deployment.deployment_id,
        origin="calibrated" if is_calibrated else "transferred",
        transfer=transfer,
        target=schema.TargetFacts(name=CYCLE_TIME.name, definition=_DEFINITION, source="law"),
        training=training,
        validation=replace(validation, n_features=sum(len(regime.terms) for regime in regimes)),
        deployment=facts_of(deployment, sources),
        feature_set="law",
        definitions=dict(sorted({**definitions(formulas, deployment.context), **sums}.items())),
        regimes=regimes,
        notes=notes,
    )


_Terms = Sequence[tuple[LawTerm, float]]


def _regimes(law: Law, used: _Terms) -> Iterator[tuple[str, schema.Condition, _Terms]]:
    """Yield the sums that a step may take, each with its condition: name, condition, terms.

    Names begin with the phase, whose errors the regime has.
    """
    has_prompt = schema.Comparison(feature="num_prefill_reqs", op=">", value=0.0)
    is_launched = schema.Comparison(feature=LAUNCH_BOUND, op=">", feature2=GPU_BOUND)
    is_computed = schema.Comparison(feature=COMPUTE_BOUND, op=">", feature2=MEMORY_BOUND)
    launches = [p for p in used if part_of(p[0], law.form) == LAUNCH]
    yield f"{PROMPTS}, launches", schema.Condition(all=(has_prompt, is_launched)), launches
    work = [p for p in used if part_of(p[0], law.form) != LAUNCH]
    without = [p for p in work if p[0].feature.name not in _ONLY_PROMPTS]
    for phase, condition, terms in ((PROMPTS, (has_prompt,), work), (DECODES, (), without)):
        if law.form == "longer":
            compute = [p for p in terms if part_of(p[0], law.form) != MEMORY]
            yield f"{phase}, compute", schema.Condition(all=(*condition, is_computed)), compute
            terms = [p for p in terms if part_of(p[0], law.form) != COMPUTE]  # noqa: PLW2901
        yield phase, schema.Condition(all=condition), terms


def _sums(law: Law, used: _Terms) -> dict[str, str]:
    """Return the sums that conditions compare, as definitions."""
    parts = {
        name: [p for p in used if part_of(p[0], law.form) == part]
        for name, part in (
            (_ALWAYS_BOUND, OVERHEAD),
            (MEMORY_BOUND, MEMORY),
            (COMPUTE_BOUND, COMPUTE),
            (LAUNCH_BOUND, LAUNCH),
        )
    }
    formulas = {n: f for name, terms in parts.items() for n, f in _sum_formulas(name, terms).items()}
    return {**formulas, GPU_BOUND: f"{_ALWAYS_BOUND} + max({MEMORY_BOUND}, {COMPUTE_BOUND})"}


def _sum_formulas(name: str, terms: _Terms) -> dict[str, str]:
    """Return a sum of terms as formulas, some terms each: a formula has a largest length."""
    parts = {
        f"{name}_{first}": " + ".join(
            f"{value:.{_LAW_DIGITS}g} * ({t.feature.formula})" for t, value in terms[first : first + _TERMS_PER_FORMULA]
        )
        for first in range(0, len(terms), _TERMS_PER_FORMULA)
    }
    return {**parts, name: " + ".join(parts) or "0"}


def _terms(terms: Sequence[tuple[LawTerm, float]], reach: pl.DataFrame) -> tuple[schema.Term, ...]:
    """Return terms with the range of each in `reach`; a constant has none."""

    def ends(name: str) -> tuple[float, float] | None:
        values = reach[name].to_numpy()
        low, high = float(values.min()), float(values.max())
        # The weights are read in every step: a term of the server, not of its load, has no range.
        return (low, high) if high - low > _LEAST_COEFFICIENT * high else None

    return tuple(
        schema.Term(
            feature=t.feature.name,
            unit=t.feature.coefficient_unit,
            value=value,
            sign=t.feature.sign,
            training_range=ends(t.feature.name),
            formula=t.feature.formula,
        )
        for t, value in terms
    )


def _reach(sources: Sequence[LawRows], context: RunContext) -> pl.DataFrame:
    """Return the batches of the sources as the new server would run them."""
    batches = [f"of_{name}" for name in LAW_BATCH_COLUMNS]
    return as_run_by(pl.concat([thinned(one.rows).select(batches) for one in sources]), context)


_STEP_RANGES = {
    "batch": "of_num_decode_reqs",
    "prefill": "of_prefill_tokens",
    "prefill_reqs": "of_num_prefill_reqs",
}


def facts_of(deployment: Deployment, sources: Sequence[LawRows]) -> schema.DeploymentFacts:
    """Return the server that a transfer is for, and how far the steps of its sources reach."""
    context = deployment.context
    ranges = {
        name: (
            min(float(one.rows[column].min()) for one in sources),  # type: ignore[arg-type]
            max(float(one.rows[column].max()) for one in sources),  # type: ignore[arg-type]
        )
        for name, column in _STEP_RANGES.items()
    }
    return schema.DeploymentFacts(
        model=context.settings.model or (context.architecture.name if context.architecture else None),
        gpu=context.gpu.name if context.gpu else None,
        architecture=dict(context.architecture.facts()) if context.architecture else {},
        hardware=dict(context.gpu.facts()) if context.gpu else {},
        settings=dict(context.settings.values()),
        assumed=deployment.assumed(),
        input_ranges={"step": ranges},
    )


def law_coefficients(law: Law, left_out: Mapping[str, tuple[float, float]]) -> tuple[schema.LawCoefficient, ...]:
    """Return the coefficients of a law, each with its range over the laws that were fitted without one of the
    sources.
    """
    return tuple(
        schema.LawCoefficient(
            feature=t.feature.name,
            unit=t.feature.coefficient_unit,
            value=value,
            part=part_of(t, law.form),
            low=t.low,
            high=t.high if math.isfinite(t.high) else None,
            prior=t.prior,
            left_out_range=left_out.get(t.feature.name),
        )
        for t, value in law.pairs()
    )


def ranges_of(laws: Sequence[Law]) -> dict[str, tuple[float, float]]:
    """Return the least and largest coefficient of each term over some laws."""
    names = dict.fromkeys(t.feature.name for law in laws for t, _ in law.pairs())
    values = {name: [law.value(name) for law in laws] for name in names}
    return {name: (min(found), max(found)) for name, found in values.items()}


def coverage_pct(across: Sequence[LeftOutErrors]) -> float | None:
    """Return the percent of all left-out rows within the interval that the other sources give; null where these are too
    few for one.
    """
    known = [(e.interval_coverage_pct, e.errors.n) for e in across if e.interval_coverage_pct is not None]
    rows = sum(n for _, n in known)
    return sum(c * n for c, n in known) / rows if rows else None


def validation_of(law: Law, across: Sequence[LeftOutErrors], calibration: Calibration | None) -> Validation:
    """Return the errors of a law: on the servers that were left out, or, after a calibration, on left-out blocks of its
    steps.
    """
    if calibration is not None:
        holdout = calibration.after if calibration.used else calibration.before
        groups: Mapping[str, Metrics] = calibration.by_phase
    else:
        holdout = pooled([one.errors for one in across])
        groups = {
            phase: pooled([one.by_phase[phase] for one in across if phase in one.by_phase])
            for phase in (DECODES, PROMPTS)
        }
    nearest = pooled([one.nearest for one in across if one.nearest is not None])
    return Validation(
        unit="us",
        n_features=sum(value > 0 for value in law.coefficients),
        train=NO_ROWS,
        holdout=holdout,
        baseline=nearest,
        gradient_boosting=None,
        by_group={name: m for name, m in groups.items() if m.n},
        skill=skill(holdout, nearest) if holdout.n and nearest.n else None,
    )


def pooled(parts: Sequence[Metrics]) -> Metrics:
    """Return errors over several servers, each with the same weight; its rows are added up."""
    parts = [one for one in parts if one.n]
    if not parts:
        return NO_ROWS

    def mean(name: str) -> float | None:
        values = [v for one in parts if (v := getattr(one, name)) is not None]
        return float(np.mean(values)) if values else None

    return Metrics(
        n=sum(one.n for one in parts),
        mape_pct=mean("mape_pct"),
        mdape_pct=mean("mdape_pct"),
        mae=mean("mae"),
        rmse=mean("rmse"),
        r2=mean("r2"),
        bias_pct=mean("bias_pct"),
        p90_ape_pct=mean("p90_ape_pct"),
        p99_ape_pct=mean("p99_ape_pct"),
    )


def left_out_errors(
    folds: Sequence[Fold], kind: Kind, sources: Sequence[LawRows], own: Mapping[str, Metrics]
) -> tuple[LeftOutErrors, ...]:
    """Return the errors of the folds as the evaluation has them; `own` are the errors of each deployment's own
    model.
    """
    rows = {one.deployment_id: one.rows for one in sources}
    results = []
    for fold in folds:
        actual = target_of(rows[fold.deployment_id])
        trained = np.concatenate([target_of(rows[name]) for name in fold.trained_on])
        baseline = measure(actual, np.full(len(actual), float(np.median(trained))))
        results.append(
            LeftOutErrors(
                kind=kind,
                left_out=fold.left_out,
                model=CYCLE_TIME.model,
                deployment_id=fold.deployment_id,
                feature_set="law",
                trained_on=fold.trained_on,
                rows_used=len(trained),
                errors=fold.errors,
                baseline=baseline,
                gradient_boosting=None,
                skill=skill(fold.errors, baseline),
                interval_coverage_pct=fold.coverage_pct,
                nearest=fold.nearest,
                roofline=fold.roofline,
                own=own.get(fold.deployment_id),
                by_phase=fold.by_phase,
            )
        )
    return tuple(results)


def evaluation_of(
    deployment_id: str,
    model: schema.Model,
    alpha: Sequence[schema.Model],
    across: Sequence[LeftOutErrors],
    missing: tuple[Missing, ...],
    notes: tuple[str, ...],
) -> Evaluation:
    """Return the evaluation of a transfer: no run of the server was read."""
    models = {m.name: m.validation for m in (model, *alpha) if m.validation is not None}
    entry = DeploymentEvaluation(
        deployment_id=deployment_id,
        runs=(),
        models=models,
        verdicts=verdicts_of(models, Measurements()),
        not_fitted=missing,
        latency_missing="no request of this server was traced",
        timeline=_NO_TIMELINE,
        notes=notes,
    )
    return Evaluation(ingest=_NOTHING_READ, deployments=(entry,), across=tuple(across))


_NOTHING_READ = IngestEntry(files=0, bytes=0, spans=0, events={}, rejects=0, dropped_events=0, duplicates=0)
_NO_TIMELINE = TimelineEntry(
    epochs=0,
    servers=0,
    steps_known=0,
    adjacent_cycles=0,
    idle_gaps=0,
    step_sampling=None,
    journey_sampling=None,
    duration_coverage=None,
    dropped_events=0,
)
