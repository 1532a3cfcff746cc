"""Fit deployments: everything of one deployment, and the errors on a run, a model or a GPU that no training row came from.

A deployment is one model on one GPU with one set of server settings. This is the entry to the room: training calls `fit_deployment`,
which fits the step time, the targets of requests and the latencies they add up to, and `fit_across`, which leaves out every
run, model and GPU in turn.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import polars as pl
from threadpoolctl import threadpool_limits

from tracefit.features import targets, training
from tracefit.features.sets import BUILT_IN, Feature, FeatureSet
from tracefit.features.targets import CYCLE_TIME
from tracefit.fit import splits
from tracefit.fit.alpha import fit_target
from tracefit.fit.beta import StepTimes, beta_options, duration_cover, fit_step_times
from tracefit.fit.boundary import fit_boundary
from tracefit.fit.fitted import (
    NON_NEGATIVE,
    FittedBoundary,
    FittedDeployment,
    FittedModel,
    LinearFit,
    TooFewRows,
    target_of,
)
from tracefit.fit.holdout import summed_holdout
from tracefit.fit.latency import compose_latencies
from tracefit.fit.results import AcrossResult, ComposedLatencies, LeftOutErrors, LeftOutKind, Missing
from tracefit.fit.splits import counted, step_frame
from tracefit.fit.train import fit_linear, fit_regimes
from tracefit.fit.validation import measure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tracefit.fit.fitted import DeploymentOptions, DeploymentTables
    from tracefit.fit.results import Metrics
    from tracefit.server.context import Deployment


_T = TypeVar("_T")
_log = logging.getLogger("tracefit")
_REMEDY = "report it as CONTRIBUTING.md says; the log at level debug has the traceback"


@threadpool_limits.wrap(limits=1, user_api="blas")  # type: ignore[untyped-decorator]  # it has no types
def fit_deployment(
    deployment: Deployment,
    tables: DeploymentTables,
    beta_sets: Sequence[FeatureSet],
    options: DeploymentOptions,
) -> FittedDeployment:
    """Fit beta and the alpha models of one deployment, as far as its data allow.

    Linear algebra uses one thread: with matrices of few columns, threads cost more in waiting than they gain.
    """
    step_target = targets.DURATION if options.beta_target == "duration" else targets.CYCLE_TIME
    steps = _alone(
        lambda: fit_step_times(deployment, tables, beta_sets, options),
        lambda reason: StepTimes(
            duration_cover(tables.timeline), Missing(step_target.model, reason, _REMEDY)
        ),
    )
    beta = steps.result if isinstance(steps.result, FittedModel) else None
    constants = training.constants_of(deployment.context)
    of_clients = [t for t in targets.OF_CLIENTS if tables.requests[t.column].count()]
    results = [
        _alone(
            partial(fit_target, tables, target, constants, options),
            partial(Missing, target.model, remedy=_REMEDY),
        )
        for target in (*targets.TARGETS, *of_clients)
    ]
    alphas = [result for result in results if isinstance(result, FittedModel)]
    models = (*((beta,) if beta else ()), *alphas)
    frames = [alpha.fitted.rows for alpha in alphas]
    return FittedDeployment(
        deployment=deployment,
        tables=tables,
        source=steps.source,
        models=models,
        missing=tuple(result for result in (steps.result, *results) if isinstance(result, Missing)),
        alpha_rows=pl.concat(frames, how="diagonal_relaxed") if frames else None,
        beta_rows=beta.fitted.rows if beta else None,
        composed=_alone(
            lambda: compose_latencies(
                deployment,
                tables,
                models,
                beta.feature_definitions if beta else None,
                whole_steps=steps.are_whole,
            ),
            lambda reason: ComposedLatencies(None, f"{reason}; {_REMEDY}"),
        ),
        summed=summed_holdout(beta.fitted) if beta else None,
        notes=_thinned(tables),
    )


def _thinned(tables: DeploymentTables) -> tuple[str, ...]:
    read, whole = tables.requests.height, int(tables.runs["requests"].sum())
    if read >= whole:
        return ()
    return (
        f"{read:,} of {whole:,} requests are trained on: more of a server would take memory, and show no more",
    )


def _alone(fit: Callable[[], _T], without: Callable[[str], _T]) -> _T:
    """Return the result of a fit; if it raises an unexpected error, only this model is reported as not fitted."""
    try:
        return fit()
    except (Exception, pl.exceptions.PanicException) as error:  # noqa: BLE001 - the reason is published
        _log.debug("a model was not fitted", exc_info=True)
        text = " ".join(str(error).split())[:200]
        return without(f"unexpected {type(error).__name__} ({text})")


# -- leave one out ---------------------------------------------------------------------------------------

_ONE_DEPLOYMENT = "the rest is one deployment, which cannot separate reading the weights from a constant; trace two models or sizes"

POOLED = FeatureSet(
    "roofline_pooled",
    (
        Feature(
            "weights_read_us",
            "us",
            "weight_read_us + moe_expert_read_us",
            "reading weights, those of the experts visited too",
        ),
        *(f for f in BUILT_IN["roofline"].features if f.name not in ("weight_read_us", "moe_expert_read_us")),
    ),
)
"""The roofline terms, with one term for all weights: dense models alone cannot separate the cost of reading an expert, and
a byte costs the same whichever weight it belongs to. Their coefficients apply to any model on any GPU."""


@threadpool_limits.wrap(limits=1, user_api="blas")  # type: ignore[untyped-decorator]  # it has no types
def fit_across(deployments: Sequence[FittedDeployment], options: DeploymentOptions) -> AcrossResult:
    """Leave out in turn every run, model and GPU, and every deployment of a model with several on one GPU.

    For runs, every model of a deployment is refitted on the deployment's other runs. For models and GPUs, the step time is fitted once
    on the roofline terms of all remaining deployments: they are times of work, so that their coefficients compare across models
    and GPUs, and cannot be negative.
    """
    errors = [one for deployment in deployments for one in _runs_of(deployment)]
    notes = [] if errors else ["leave-one-run-out: no deployment has two runs"]
    pooled, unknown = _pooled_rows(deployments)
    notes += unknown
    titles: dict[LeftOutKind, str] = {"model": "leave-one-model-out", "gpu": "leave-one-GPU-out"}
    for kind, title in titles.items():
        found, note = _leave_groups(kind, title, pooled, options)
        errors += found
        notes += note
    for alike in pooled.partition_by("model", "gpu", maintain_order=True) if pooled.height else ():
        if alike["deployment"].n_unique() > 1:
            found, note = _leave_groups("deployment", "leave-one-deployment-out", alike, options)
            errors += found
            notes += note
    return AcrossResult(tuple(errors), tuple(notes))


def _runs_of(deployment: FittedDeployment) -> Iterator[LeftOutErrors]:
    for model in deployment.models:
        runs = sorted(model.fitted.rows["run_id"].unique())
        for run in runs if len(runs) > 1 else ():
            rows = _leave_out(model.fitted.rows, pl.col("run_id") == run)
            fitted = fit_regimes(rows, list(model.regimes), model.options)
            if isinstance(fitted, LinearFit):
                boundary = fit_boundary(fitted, deployment.tables.timeline) if model.boundary else None
                deployment_id, others = (
                    deployment.deployment.deployment_id,
                    tuple(r for r in runs if r != run),
                )
                yield LeftOutErrors(
                    "run",
                    run,
                    model.name,
                    deployment_id,
                    model.feature_set,
                    others,
                    *_measured(fitted, boundary),
                )


def _measured(
    fitted: LinearFit, boundary: FittedBoundary | None = None
) -> tuple[int, Metrics, Metrics, Metrics | None, float | None, float | None]:
    """Return the last fields of `LeftOutErrors`, from `rows_used` on."""
    v = (boundary or fitted).validation
    return fitted.rows_used, v.holdout, v.baseline, v.gradient_boosting, v.skill, v.interval_coverage_pct


def _leave_out(rows: pl.DataFrame, left_out: pl.Expr) -> pl.DataFrame:
    """Return the frame with the rows that `left_out` selects held out, and the training rows of the rest."""
    # Training rows that the fit left out (warm-up, outliers) are errors like any other once their group is held out.
    never = pl.when(splits.is_excluded(splits.NEVER_EVALUATED)).then("excluded_reason")
    return rows.filter(left_out | (pl.col("split") == "train")).with_columns(
        split=pl.when(left_out).then(pl.lit("holdout")).otherwise(pl.lit("train")),
        excluded_reason=pl.when(left_out).then(never).otherwise("excluded_reason"),
    )


def _pooled_rows(deployments: Sequence[FittedDeployment]) -> tuple[pl.DataFrame, list[str]]:
    """Return the step times of all deployments: deployment, model, gpu, and features that compare across them."""
    frames = [pl.DataFrame(schema={"model": pl.String, "gpu": pl.String})]
    notes = []
    for deployment in deployments:
        context = deployment.deployment.context
        source = deployment.source.beta_target_source
        if source is None or not any(m.name == CYCLE_TIME.model for m in deployment.models):
            continue
        if context.architecture is None or context.gpu is None:
            lacking = "config.json" if context.architecture is None else "GPU"
            notes.append(
                f"{deployment.deployment.deployment_id} takes no part in leaving out models and GPUs: no {lacking}"
            )
            continue
        timeline = training.with_roofline(deployment.tables.timeline, context)
        constants = training.constants_of(context)
        rows = step_frame(deployment.tables, timeline, POOLED, constants, source)
        used = counted(rows, "train")
        if used.height:
            names = {
                "deployment": deployment.deployment.deployment_id,
                "model": context.architecture.slug,
                "gpu": context.gpu.slug,
            }
            # Steps of a 70B model take ten times as long as those of an 8B one: without the scale they would decide the fit alone.
            scale = pl.lit(used["y"].median(), pl.Float64)
            named = {name: pl.lit(value) for name, value in names.items()}
            frames.append(rows.with_columns(row_scale_us=scale, **named))
    return pl.concat(frames, how="diagonal_relaxed"), notes


def _leave_groups(
    kind: LeftOutKind, title: str, pooled: pl.DataFrame, options: DeploymentOptions
) -> tuple[list[LeftOutErrors], list[str]]:
    names = sorted(pooled[kind].unique())
    if len(names) < 2:
        have = f"only {names[0]}" if names else "none"
        return [], [f"{title}: the data have {have}, two are needed"]
    found, notes = [], []
    for name in names:
        trained_on = tuple(n for n in names if n != name)
        rows = _leave_out(pooled, pl.col(kind) == name)
        rest = rows.filter(pl.col(kind) != name).partition_by("deployment")
        how = replace(beta_options(options), signs=NON_NEGATIVE)
        fitted = fit_linear(rows, _separable_features(rest), how)
        if isinstance(fitted, TooFewRows):
            notes.append(f"{title}, {name}: {fitted.reason}")
            continue
        if len(rest) == 1:
            notes.append(f"{title}, {name}: {_ONE_DEPLOYMENT}")
        beta = CYCLE_TIME.model
        measured = (*_measured(fitted), _by_batch_size(fitted.rows))
        found.append(LeftOutErrors(kind, name, beta, None, POOLED.name, trained_on, *measured))
    return found, notes


def _by_batch_size(rows: pl.DataFrame) -> Metrics:
    """Return the errors of a constant per batch size on the held-out rows: a table of past steps is the simplest forecast."""
    used, held = (counted(rows, split).sort("batch_requests") for split in ("train", "holdout"))
    table = used.group_by("batch_requests", maintain_order=True).agg(constant=pl.col("y").median())
    joined = held.join_asof(table, on="batch_requests", strategy="nearest", check_sortedness=False)
    return measure(target_of(joined), joined["constant"].to_numpy())


def _separable_features(frames: Sequence[pl.DataFrame]) -> list[Feature]:
    """Return the features whose coefficients this many deployments can separate.

    A feature that is constant within most deployments is determined by the differences between deployments alone. At most two fewer
    such features than deployments are offered: with as many coefficients as deployments a line goes through every deployment's mean and
    fits any data. Two deployments still get one, the first (reading weights): without it, its cost would count as a constant of
    the program, which does not change with the GPU or the model.
    """
    spare = max(len(frames) - 2, 1 if len(frames) == 2 else 0)
    offered = []
    for feature in POOLED.features:
        # Nine rows in ten are alike: a step without tokens has no weights to read.
        alike = [
            f[feature.name].quantile(0.05, "nearest") == f[feature.name].quantile(0.95, "nearest")
            for f in frames
        ]
        is_fixed = 2 * sum(alike) > len(frames)
        if not is_fixed or spare > 0:
            spare -= is_fixed
            offered.append(feature)
    return offered
