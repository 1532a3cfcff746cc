"""Errors across runs, models and GPUs: each left out in turn, predicted by a model fitted on the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import polars as pl
from threadpoolctl import threadpool_limits

from tracefit.features import training
from tracefit.features.sets import BUILT_IN, Feature, FeatureSet
from tracefit.features.targets import CYCLE_TIME
from tracefit.fit import splits
from tracefit.fit.beta import beta_options
from tracefit.fit.boundary import fit_boundary
from tracefit.fit.fitted import LinearFit, TooFewRows
from tracefit.fit.linear import NON_NEGATIVE, columns_of
from tracefit.fit.results import AcrossResult, LeftOutErrors, LeftOutKind
from tracefit.fit.splits import counted, step_frame
from tracefit.fit.train import fit_linear, fit_regimes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tracefit.fit.fitted import FittedModel, FittedScope
    from tracefit.fit.inputs import ScopeOptions
    from tracefit.fit.linear import FeatureColumn
    from tracefit.fit.results import Validation

_ONE_SCOPE = "the others are one scope, which cannot tell reading the weights from a constant; trace two models or sizes"

_WEIGHTS = Feature(
    "weights_read_us",
    "us",
    "weight_read_us + moe_expert_read_us",
    "reading weights, those of the experts visited too",
)

POOLED = FeatureSet(
    "roofline_pooled",
    (
        _WEIGHTS,
        *(f for f in BUILT_IN["roofline"].features if f.name not in ("weight_read_us", "moe_expert_read_us")),
    ),
)
"""The roofline terms, with one for all weights: dense models alone cannot tell what reading an expert costs, and a byte
is a byte. Their coefficients speak about any model on any GPU."""


@threadpool_limits.wrap(limits=1, user_api="blas")  # type: ignore[untyped-decorator]  # it has no types
def fit_across(scopes: Sequence[FittedScope], options: ScopeOptions) -> AcrossResult:
    """Leave out every run of a scope in turn, every model and every GPU.

    Runs: every model of the scope, refitted on its other runs. Models and GPUs: the step time, one fit on the roofline
    terms over the scopes of all others; its coefficients cannot be negative, they are multiples of times.

    Args:
        scopes: Every scope, fitted.
        options: How they were fitted.
    """
    errors = [one for scope in scopes for one in _runs_of(scope)]
    notes = [] if errors else ["leave-one-run-out: no scope has two runs"]
    frames, unknown = _pooled_frames(scopes)
    notes += unknown
    groups: tuple[tuple[LeftOutKind, str], ...] = (
        ("model", "leave-one-model-out"),
        ("gpu", "leave-one-GPU-out"),
    )
    for kind, title in groups:
        found, note = _leave_groups(kind, title, frames, options)
        errors += found
        notes += note
    return AcrossResult(tuple(errors), tuple(notes))


def _runs_of(scope: FittedScope) -> Iterator[LeftOutErrors]:
    for model in scope.models:
        runs = sorted(model.fitted.rows["run_id"].unique())
        for run in runs if len(runs) > 1 else ():
            rows = _leave_out(model.fitted.rows, pl.col("run_id") == run)
            fitted = fit_regimes(rows, list(model.recipe.regimes), model.recipe.options)
            if isinstance(fitted, LinearFit):
                yield LeftOutErrors(
                    kind="run",
                    left_out=run,
                    model=model.name,
                    scope_id=scope.scope.scope_id,
                    feature_set=model.feature_set,
                    trained_on=tuple(r for r in runs if r != run),
                    rows_used=fitted.rows_used,
                    validation=_validation(scope, model, fitted),
                )


def _validation(scope: FittedScope, model: FittedModel, fitted: LinearFit) -> Validation:
    boundary = fit_boundary(fitted, scope.tables.timeline) if model.boundary else None
    return boundary.validation if boundary else fitted.validation


def _leave_out(rows: pl.DataFrame, left_out: pl.Expr) -> pl.DataFrame:
    """Hold out all rows that `left_out` tells, whatever their training part lost; others keep their training part."""
    always = pl.when(pl.col("excluded_reason").is_in(splits.ALWAYS)).then("excluded_reason")
    return rows.filter(left_out | (pl.col("split") == "train")).with_columns(
        split=pl.when(left_out).then(pl.lit("holdout")).otherwise(pl.lit("train")),
        excluded_reason=pl.when(left_out).then(always).otherwise("excluded_reason"),
    )


@dataclass(frozen=True, slots=True)
class _Pooled:
    """The step times of one scope with features that compare across scopes."""

    names: dict[LeftOutKind, str]
    rows: pl.DataFrame


def _pooled_frames(scopes: Sequence[FittedScope]) -> tuple[list[_Pooled], list[str]]:
    frames, notes = [], []
    for scope in scopes:
        context = scope.scope.context
        if scope.choice is None or not any(m.name == CYCLE_TIME.model for m in scope.models):
            continue
        if context.architecture is None or context.gpu is None:
            lacking = "config.json" if context.architecture is None else "GPU"
            notes.append(f"{scope.scope.scope_id} takes no part in leaving out models and GPUs: no {lacking}")
            continue
        timeline = training.with_roofline(scope.tables.timeline, context)
        constants = training.constants_of(context)
        rows = step_frame(scope.tables, timeline, POOLED, constants, scope.choice.source)
        used = counted(rows, "train")
        if used.height:
            scale = pl.lit(used["y"].median(), pl.Float64)
            names: dict[LeftOutKind, str] = {"model": context.architecture.slug, "gpu": context.gpu.slug}
            frames.append(_Pooled(names, rows.with_columns(row_scale_us=scale)))
    return frames, notes


def _leave_groups(
    kind: LeftOutKind, title: str, frames: Sequence[_Pooled], options: ScopeOptions
) -> tuple[list[LeftOutErrors], list[str]]:
    names = sorted({frame.names[kind] for frame in frames})
    if len(names) < 2:
        have = f"only {names[0]}" if names else "none"
        return [], [f"{title}: the data have {have}, two are needed"]
    found, notes = [], []
    for name in names:
        others = tuple(n for n in names if n != name)
        pooled = [_leave_out(frame.rows, pl.lit(frame.names[kind] == name)) for frame in frames]
        rows = pl.concat(pooled, how="diagonal_relaxed")
        features = _told_apart(
            [p for p, frame in zip(pooled, frames, strict=True) if frame.names[kind] != name]
        )
        how = replace(beta_options(options), signs=NON_NEGATIVE)
        fitted = fit_linear(rows, features, how)
        if isinstance(fitted, TooFewRows):
            notes.append(f"{title}, {name}: {fitted.reason}")
            continue
        if sum(frame.names[kind] != name for frame in frames) == 1:
            notes.append(f"{title}, {name}: {_ONE_SCOPE}")
        found.append(
            LeftOutErrors(
                kind, name, CYCLE_TIME.model, None, POOLED.name, others, fitted.rows_used, fitted.validation
            )
        )
    return found, notes


def _told_apart(frames: Sequence[pl.DataFrame]) -> list[FeatureColumn]:
    """Offer the features that this many scopes can tell: of those constant within most, two fewer than there are scopes.

    With as many coefficients as scopes a line goes through every scope's mean, whatever the truth. Of two scopes one such
    feature is offered all the same, the first (reading weights): else what is the same in every step counts as a constant
    of the program, which no other GPU or model changes.
    """
    spare = max(len(frames) - 2, 1 if len(frames) == 2 else 0)
    offered = []
    for feature in columns_of(POOLED):
        fixed = 2 * sum(_is_fixed(frame[feature.name]) for frame in frames) > len(frames)
        if fixed and spare <= 0:
            continue
        spare -= fixed
        offered.append(feature)
    return offered


def _is_fixed(values: pl.Series) -> bool:
    """Tell whether nine rows in ten are alike: a step without tokens has no weights to read."""
    return values.quantile(0.05, "nearest") == values.quantile(0.95, "nearest")
