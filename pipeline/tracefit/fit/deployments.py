"""Fit deployments: everything of one deployment, and the errors on a run, a model or a GPU that no training row came
from.

A deployment is one model on one GPU with one set of server settings. This is the entry to the room: training calls
`fit_deployment`, which fits the step time, the targets of requests and the latencies they add up to, and `fit_across`,
which leaves out every run, model and GPU in turn.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import polars as pl
from msgspec.structs import replace
from threadpoolctl import threadpool_limits

from tracefit.errors import unexpected
from tracefit.features import training
from tracefit.features.roofline import LEAST_TIME
from tracefit.features.sets import BUILT_IN, Feature, FeatureSet
from tracefit.features.training import MOST_TOO_FAST, is_too_fast
from tracefit.fit import splits
from tracefit.fit.alpha import fit_target
from tracefit.fit.beta import beta_options, duration_cover, fit_step_times
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
from tracefit.fit.results import (
    AcrossResult,
    ComposedLatencies,
    LeftOutErrors,
    LeftOutKind,
    Missing,
)
from tracefit.fit.splits import counted_rows, step_frame
from tracefit.fit.train import fit_linear, fit_regimes
from tracefit.fit.validation import measure
from tracefit.models import targets
from tracefit.models.targets import CYCLE_TIME
from tracefit.server.settings import merge, settings_from
from tracefit.tables.sources import is_from

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tracefit.fit.fitted import DeploymentOptions, DeploymentTables
    from tracefit.models.validation import Metrics
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
    step_model = options.step_target.model
    source, step_times = _isolated(
        lambda: fit_step_times(deployment, tables, beta_sets, options),
        lambda reason: (duration_cover(tables.timeline), Missing(step_model, reason, _REMEDY)),
    )
    beta = step_times if isinstance(step_times, FittedModel) else None
    constants = training.constants_of(deployment.context)
    client_targets = [t for t in targets.OF_CLIENTS if tables.requests[t.column].count()]
    results = [
        _isolated(
            partial(fit_target, tables, target, constants, options),
            partial(Missing, target.model, remedy=_REMEDY),
        )
        for target in (*targets.TARGETS, *client_targets)
    ]
    models = tuple(result for result in (step_times, *results) if isinstance(result, FittedModel))
    frames = [model.fitted.rows for model in models if model is not beta]
    return FittedDeployment(
        deployment=deployment,
        tables=tables,
        source=source,
        models=models,
        missing=tuple(result for result in (step_times, *results) if isinstance(result, Missing)),
        alpha_rows=pl.concat(frames, how="diagonal_relaxed") if frames else None,
        beta_rows=beta.fitted.rows if beta else None,
        composed=_isolated(
            lambda: compose_latencies(deployment, tables, models, whole_steps=source.is_whole_step),
            lambda reason: ComposedLatencies(None, f"{reason}; {_REMEDY}"),
        ),
        summed=summed_holdout(beta.fitted) if beta else None,
        notes=_thinned(tables),
    )


_SEEN_LIMITS = {
    "max_num_batched_tokens": ("tokens", pl.col("prefill_tokens") + pl.col("decode_tokens")),
    "max_num_seqs": ("requests", pl.col("num_prefill_reqs") + pl.col("num_decode_reqs")),
}
"""Limits of a step, and what shows that a server has higher ones."""


def _contradiction(deployment: Deployment, timeline: pl.DataFrame) -> str | None:
    """Say that most steps are faster than the stated GPU can be with the stated model; null if they are not."""
    context = deployment.context
    if LEAST_TIME not in timeline.columns or context.gpu is None:
        return None
    share = timeline.drop_nulls("cycle_us").select(is_too_fast("cycle_us").mean()).item() or 0.0
    if share <= MOST_TOO_FAST:
        return None
    return (
        f"{share:.0%} of the step times are shorter than the rated speed of {context.gpu.name} allows for this model "
        "and tensor_parallel: one of the three is not the server's; the steps count, correct the settings"
    )


def with_seen_limits(deployment: Deployment, timeline: pl.DataFrame) -> tuple[Deployment, tuple[str, ...]]:
    """Return the deployment with the limits that its steps show where these are above the stated ones, and a sentence
    for each.

    Batches that follow from requests do not count: they are worked out, and may include prefix-cache hits. The id of
    the deployment stays.
    """
    context, stated = deployment.context, deployment.context.settings.values()
    inferred = is_from(lambda source: source.from_requests)
    fullest = timeline.filter(~inferred).select(
        expression.max().alias(name) for name, (_, expression) in _SEEN_LIMITS.items()
    )
    above: dict[str, int] = {}
    texts = []
    for name, (unit, _) in _SEEN_LIMITS.items():
        seen, limit = fullest[name].item(), stated.get(name)
        if isinstance(limit, int) and isinstance(seen, int) and seen > limit:
            above[name] = seen
            is_stated = "the settings say" if context.settings.sources.get(name) != "assumed" else "vLLM's default is"
            texts.append(
                f"a step has {seen:,} {unit}, and {is_stated} {name} {limit:,}: what is seen counts; correct the "
                "settings"
            )
    if contradiction := _contradiction(deployment, timeline):
        texts.append(contradiction)
    if not above:
        return deployment, tuple(texts)
    settings = merge(context.settings, settings_from(above, where="steps", source="read"))
    changed = replace(context, settings=settings, left_out=(*context.left_out, *texts))
    return replace(deployment, context=changed), tuple(texts)


def _thinned(tables: DeploymentTables) -> tuple[str, ...]:
    read, whole = tables.requests.height, int(tables.runs["requests"].sum())
    note = f"{read:,} of {whole:,} requests are trained on: more of a server would take memory, and show no more"
    return (note,) if read < whole else ()


def _isolated(fit: Callable[[], _T], without: Callable[[str], _T]) -> _T:
    """Return the result of a fit; if it raises an unexpected error, only this model is reported as not fitted."""
    try:
        return fit()
    except (Exception, pl.exceptions.PanicException) as error:  # noqa: BLE001 - the reason is published
        _log.debug("a model was not fitted", exc_info=True)
        return without(unexpected(error))


# -- leave one out ---------------------------------------------------------------------------------------

_ONE_DEPLOYMENT = (
    "the rest is one deployment, which cannot separate reading the weights from a constant; trace two models or sizes"
)

_WEIGHTS = ("weight_read_us", "moe_expert_read_us")
POOLED = FeatureSet(
    "roofline_pooled",
    (
        Feature("weights_read_us", "us", " + ".join(_WEIGHTS), "reading weights, those of the experts visited too"),
        *(f for f in BUILT_IN["roofline"].features if f.name not in _WEIGHTS),
    ),
)
"""The roofline terms, with one term for all weights: dense models alone cannot separate the cost of reading an expert,
and a byte costs the same whichever weight it belongs to. Their coefficients apply to any model on any GPU."""


@threadpool_limits.wrap(limits=1, user_api="blas")  # type: ignore[untyped-decorator]  # it has no types
def fit_across(deployments: Sequence[FittedDeployment], options: DeploymentOptions) -> AcrossResult:
    """Leave out in turn every run, model and GPU, and every deployment of a model with several on one GPU.

    For runs, every model of a deployment is refitted on the deployment's other runs. For models and GPUs, the step time
    is fitted once
    on the roofline terms of all remaining deployments: they are times of work, so that their coefficients compare
    across models and GPUs, and cannot be negative.
    """
    results: list[LeftOutErrors | str] = [one for deployment in deployments for one in _left_out_runs(deployment)]
    if not results:
        results.append("leave-one-run-out: no deployment has two runs")
    pooled, notes = _pooled_rows(deployments)
    results += notes
    results += _left_out_groups("model", "leave-one-model-out", pooled, options)
    results += _left_out_groups("gpu", "leave-one-GPU-out", pooled, options)
    for same_gpu in pooled.partition_by("model", "gpu", maintain_order=True) if pooled.height else ():
        if same_gpu["deployment"].n_unique() > 1:
            results += _left_out_groups("deployment", "leave-one-deployment-out", same_gpu, options)
    return AcrossResult(
        tuple(one for one in results if isinstance(one, LeftOutErrors)),
        tuple(one for one in results if isinstance(one, str)),
    )


def _left_out_runs(deployment: FittedDeployment) -> Iterator[LeftOutErrors]:
    deployment_id = deployment.deployment.deployment_id
    for model in deployment.models:
        runs = sorted(model.fitted.rows["run_id"].unique())
        for run in runs if len(runs) > 1 else ():
            rows = _leave_out(model.fitted.rows, pl.col("run_id") == run)
            fitted = fit_regimes(rows, model.regimes, model.options)
            if isinstance(fitted, TooFewRows):
                continue
            boundary = fit_boundary(fitted, deployment.tables.timeline) if model.boundary else None
            others = tuple(other for other in runs if other != run)
            measured = _measured(fitted, boundary)
            yield LeftOutErrors("run", run, model.name, deployment_id, model.feature_set, others, *measured)


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
        deployment_id, context = deployment.deployment.deployment_id, deployment.deployment.context
        source = deployment.source.beta_target_source
        if source is None or not any(m.name == CYCLE_TIME.model for m in deployment.models):
            continue
        if context.architecture is None or context.gpu is None:
            lacking = "config.json" if context.architecture is None else "GPU"
            notes.append(f"{deployment_id} takes no part in leaving out models and GPUs: no {lacking}")
            continue
        timeline = training.with_roofline(deployment.tables.timeline, context)
        rows = step_frame(deployment.tables, timeline, POOLED, training.constants_of(context), source)
        used = counted_rows(rows, "train")
        if used.height:
            named = rows.with_columns(
                # Steps of a 70B model take ten times as long as those of an 8B one: without the scale only they would
                # count.
                row_scale_us=pl.lit(used["y"].median(), pl.Float64),
                deployment=pl.lit(deployment_id),
                model=pl.lit(context.architecture.slug),
                gpu=pl.lit(context.gpu.slug),
            )
            frames.append(named)
    return pl.concat(frames, how="diagonal_relaxed"), notes


def _left_out_groups(
    kind: LeftOutKind, title: str, pooled: pl.DataFrame, options: DeploymentOptions
) -> Iterator[LeftOutErrors | str]:
    """Yield errors on each model, GPU or deployment, fitted on the others, and notes."""
    names = sorted(pooled[kind].unique())
    if len(names) < 2:
        present = f"only {names[0]}" if names else "none"
        yield f"{title}: the data have {present}, two are needed"
        return
    for name in names:
        trained_on = tuple(n for n in names if n != name)
        rows = _leave_out(pooled, pl.col(kind) == name)
        rest = rows.filter(pl.col(kind) != name).partition_by("deployment")
        how = replace(beta_options(options), signs=NON_NEGATIVE)
        fitted = fit_linear(rows, _separable_features(rest), how)
        if isinstance(fitted, TooFewRows):
            yield f"{title}, {name}: {fitted.reason}"
            continue
        if len(rest) == 1:
            yield f"{title}, {name}: {_ONE_DEPLOYMENT}"
        measured = (*_measured(fitted), _by_batch_size(fitted.rows))
        yield LeftOutErrors(kind, name, CYCLE_TIME.model, None, POOLED.name, trained_on, *measured)


def _by_batch_size(rows: pl.DataFrame) -> Metrics:
    """Return the errors of a constant per batch size on the held-out rows: a table of past steps is the simplest
    forecast.
    """
    used, holdout = (counted_rows(rows, split).sort("batch_requests") for split in ("train", "holdout"))
    table = used.group_by("batch_requests", maintain_order=True).agg(constant=pl.col("y").median())
    joined = holdout.join_asof(table, on="batch_requests", strategy="nearest", check_sortedness=False)
    return measure(target_of(joined), joined["constant"].to_numpy())


def _separable_features(frames: Sequence[pl.DataFrame]) -> list[Feature]:
    """Return the features whose coefficients this many deployments can separate.

    If a feature is constant within most deployments, only the differences between deployments determine its
    coefficient. With n deployments, at most n - 2 such features are offered: with n coefficients, a line goes through
    the mean of every deployment and
    fits any data. Two deployments still get one such feature, the first (reading weights): without it, the cost of
    reading weights would count as a constant of the program, which does not change with the GPU or the model.
    """
    spare = 1 if len(frames) == 2 else len(frames) - 2
    offered = []
    for feature in POOLED.features:
        columns = [frame[feature.name] for frame in frames]
        # Nine rows in ten must be alike, not all: a step without tokens has no weights to read.
        alike = [c.quantile(0.05, "nearest") == c.quantile(0.95, "nearest") for c in columns]
        is_fixed = 2 * sum(alike) > len(frames)
        if not is_fixed or spare > 0:
            spare -= is_fixed
            offered.append(feature)
    return offered
