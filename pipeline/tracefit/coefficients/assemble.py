"""Fitted scopes become coefficient files."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal

import polars as pl

from tracefit._version import __version__
from tracefit.coefficients import model as cf
from tracefit.coefficients.entries import entry, exclusions
from tracefit.features.definitions import definitions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracefit.fit.boundary import FittedBoundary
    from tracefit.fit.linear import FittedRegime
    from tracefit.fit.results import FittedModel, FittedScope, LinearFit
    from tracefit.server.context import Scope

_LIBRARIES = ("numpy", "scikit-learn", "polars", "pyarrow")

Kind = Literal["alpha", "beta"]


def provenance(options: dict[str, cf.Scalar], files: dict[str, str] | None = None) -> cf.Provenance:
    """State which program makes the files, with which libraries and options.

    Args:
        options: Options by name.
        files: sha256 of the files that options name, by option.
    """
    return cf.Provenance(
        tool="tracefit",
        version=__version__,
        libraries=libraries(),
        options=options,
        files=files or {},
    )


def libraries() -> dict[str, str]:
    """Versions of the libraries that numbers depend on."""
    return {name: version(name) for name in _LIBRARIES}


def coefficient_file(kind: Kind, scopes: Sequence[FittedScope], made_by: cf.Provenance) -> cf.CoefficientFile:
    """Collect the models of one kind over all scopes."""
    prefix = f"{kind}."
    return cf.CoefficientFile(
        kind=kind,
        models=tuple(_model(s, m) for s in scopes for m in s.models if m.name.startswith(prefix)),
        not_fitted=tuple(
            cf.NotFitted(name=m.name, scope_id=s.scope.scope_id, reason=m.reason, remedy=m.remedy)
            for s in scopes
            for m in s.missing
            if m.name.startswith(prefix)
        ),
        provenance=made_by,
    )


def _model(scope: FittedScope, model: FittedModel) -> cf.LinearModel | cf.RegimesModel | cf.BoundaryModel:
    fitted, first = model.fitted, model.fitted.regimes[0]
    common = {
        "name": model.name,
        "scope_id": scope.scope.scope_id,
        "target": cf.Target(name=model.target, definition=model.definition, source=model.source),
        "estimator": _estimator(fitted, first),
        "features_left_out": tuple(
            cf.FeatureLeftOut(feature=x.feature, reason=x.reason) for x in fitted.features_left_out
        ),
        "training": _training(scope, fitted),
        "validation": entry(model),
        "scope": scope_facts(scope.scope),
        "feature_set": model.feature_set,
        "definitions": definitions(_formulas(fitted), scope.scope.context),
        "notes": model.notes,
    }
    if model.boundary is not None:
        return _boundary(common, model.boundary, first)
    if len(fitted.regimes) == 1:
        return cf.LinearModel(**common, intercept=_intercept(first), terms=_terms(first))
    return cf.RegimesModel(form="regimes", **common, regimes=tuple(_regime(part) for part in fitted.regimes))


def _formulas(fitted: LinearFit) -> list[str]:
    """Formulas of a model's terms, and the names its conditions compare."""
    compared = [c for part in fitted.regimes for c in part.regime.any_of]
    names = [n for c in compared for n in (c.feature, c.feature2) if n]
    return [*(t.feature.formula or t.feature.name for t in fitted.terms), *names]


def _boundary(common: dict[str, Any], fitted: FittedBoundary, linear: FittedRegime) -> cf.BoundaryModel:
    slope = fitted.work_us_per_prompt_token
    terms = (cf.Term(feature="prompt_tokens", unit="us/token", value=slope),) if slope else ()
    return cf.BoundaryModel(
        **common,
        form="boundary",
        boundary="step_start",
        queue="one_at_a_time",
        work=cf.Work(intercept=cf.Number(value=fitted.work_us), terms=terms),
        offset=cf.Number(value=fitted.offset_us),
        without_clock=cf.Linear(intercept=_intercept(linear), terms=_terms(linear)),
        expectation=cf.Expectation(
            intercept=cf.Number(value=fitted.work_us + fitted.expected_wait_us),
            terms=terms,
            residual=cf.Number(value=fitted.residual_us),
            busy_share=fitted.busy_share,
        ),
    )


def _intercept(part: FittedRegime) -> cf.Number:
    return cf.Number(value=part.intercept, ci95=part.intercept_ci95)


def _terms(part: FittedRegime) -> tuple[cf.Term, ...]:
    return tuple(
        cf.Term(
            feature=t.feature.name,
            unit=t.feature.unit,
            value=t.value,
            ci95=t.ci95,
            training_range=t.training_range,
            formula=t.feature.formula,
            sign=t.feature.sign,
        )
        for t in part.terms
    )


def _regime(part: FittedRegime) -> cf.Regime:
    any_of = tuple(
        cf.Comparison(feature=c.feature, op=c.op, value=c.value, feature2=c.feature2)
        for c in part.regime.any_of
    )
    when = cf.Condition(any=any_of) if any_of else cf.Condition(all=())
    return cf.Regime(name=part.regime.name, when=when, intercept=_intercept(part), terms=_terms(part))


def _estimator(fitted: LinearFit, part: FittedRegime) -> cf.Estimator:
    return cf.Estimator(
        name="huber_linear",
        penalty=part.choice.penalty,
        strength=part.choice.strength,
        huber=fitted.huber,
        chosen_by="mean absolute error of time-blocked cross-validation on the training part",
        cv_mae=part.choice.score if part.choice.folds else None,
        folds=part.choice.folds,
    )


def _training(scope: FittedScope, fitted: LinearFit) -> cf.Training:
    rows = fitted.rows
    ranges = (
        rows.group_by("run_id", "server")
        .agg(
            pl.col("ts_ns").min().alias("first"),
            pl.col("holdout_from_ns").first(),
            pl.col("ts_ns").max().alias("last"),
        )
        .drop_nulls()
        .sort("run_id", "server")
    )
    return cf.Training(
        runs=tuple(sorted(rows["run_id"].unique())),
        rows=fitted.rows_train,
        rows_used=fitted.rows_used,
        rows_holdout=fitted.rows_holdout,
        exclusions=exclusions(fitted),
        time_range=tuple(
            cf.TimeRange(run_id=run, server=server, first_ns=first, holdout_from_ns=boundary, last_ns=last)
            for run, server, first, boundary, last in ranges.iter_rows()
        ),
        inputs_sha256=_inputs_hash(scope),
        inputs=run_inputs(scope.tables.runs),
    )


def run_inputs(runs: pl.DataFrame) -> tuple[cf.RunInput, ...]:
    """State what the tables of runs were made from, in run order.

    Args:
        runs: Rows of the `runs` table.
    """
    columns = ("run_id", "content_sha256", "settings", "model_config", "gpu")
    rows = runs.unique("run_id", keep="first", maintain_order=True).select(columns).sort("run_id")
    return tuple(
        cf.RunInput(run_id=run, traces_sha256=traces, context_sha256=_sha256(json.dumps(context)))
        for run, traces, *context in rows.iter_rows()
    )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _inputs_hash(scope: FittedScope) -> str:
    contents = scope.tables.runs.select("run_id", "content_sha256").unique().sort("run_id")
    return hashlib.sha256("\n".join(":".join(row) for row in contents.iter_rows()).encode()).hexdigest()


def scope_facts(scope: Scope) -> cf.ScopeFacts:
    """State what a model speaks about."""
    context = scope.context
    return cf.ScopeFacts(
        model=context.settings.model or (context.architecture.name if context.architecture else None),
        gpu=context.gpu.name if context.gpu else None,
        architecture=dict(context.architecture.facts()) if context.architecture else {},
        hardware=dict(context.gpu.facts()) if context.gpu else {},
        settings=dict(context.settings.values()),
        assumed=scope.assumed(),
    )
