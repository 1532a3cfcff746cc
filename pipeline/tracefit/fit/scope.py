"""Fit everything of one scope: the step time, the targets of requests, and the latencies they add up to.

A scope is one model on one GPU with one set of server settings. This is the entry to the room: training calls `fit_scope`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

import polars as pl
from threadpoolctl import threadpool_limits

from tracefit.features import targets, training
from tracefit.fit.alpha import fit_target
from tracefit.fit.beta import StepTimes, duration_cover, fit_step_times
from tracefit.fit.fitted import FittedModel, FittedScope
from tracefit.fit.holdout import summed_holdout
from tracefit.fit.latency import compose_latencies
from tracefit.fit.results import ComposedLatencies, Missing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tracefit.features.sets import FeatureSet
    from tracefit.fit.inputs import ScopeOptions, ScopeTables
    from tracefit.server.context import ModelScope

_T = TypeVar("_T")
_log = logging.getLogger("tracefit")
_REMEDY = "report it as CONTRIBUTING.md says; --log-level debug shows the traceback"


@threadpool_limits.wrap(limits=1, user_api="blas")  # type: ignore[untyped-decorator]  # it has no types
def fit_scope(
    scope: ModelScope, tables: ScopeTables, beta_sets: Sequence[FeatureSet], options: ScopeOptions
) -> FittedScope:
    """Fit beta and the alpha models of one scope, as far as its data allow.

    Linear algebra uses one thread: with matrices of few columns, threads cost more in waiting than they gain.

    Args:
        scope: The scope.
        tables: Its runs' tables.
        beta_sets: Feature sets for step times; cross-validation chooses among several.
        options: How to fit.
    """
    steps = _steps(scope, tables, beta_sets, options)
    beta = steps.result if isinstance(steps.result, FittedModel) else None
    constants = training.constants_of(scope.context)
    results = [_wait(tables, target, constants, options) for target in targets.TARGETS]
    alphas = [result for result in results if isinstance(result, FittedModel)]
    models = (*((beta,) if beta else ()), *alphas)
    frames = [alpha.fitted.rows for alpha in alphas]
    return FittedScope(
        scope=scope,
        tables=tables,
        cover=steps.cover,
        choice=steps.choice,
        models=models,
        missing=tuple(result for result in (steps.result, *results) if isinstance(result, Missing)),
        alpha_rows=pl.concat(frames, how="diagonal_relaxed") if frames else None,
        beta_rows=beta.fitted.rows if beta else None,
        composed=_alone(
            lambda: compose_latencies(
                scope, tables, models, beta.feature_definitions if beta else None, whole_steps=steps.are_whole
            ),
            lambda reason: ComposedLatencies({}, f"{reason}; {_REMEDY}"),
        ),
        summed=summed_holdout(beta.fitted) if beta else None,
    )


def _steps(
    scope: ModelScope, tables: ScopeTables, sets: Sequence[FeatureSet], options: ScopeOptions
) -> StepTimes:
    name = (targets.DURATION if options.beta_target == "duration" else targets.CYCLE_TIME).model
    return _alone(
        lambda: fit_step_times(scope, tables, sets, options),
        lambda reason: StepTimes(duration_cover(tables.timeline), None, Missing(name, reason, _REMEDY)),
    )


def _wait(
    tables: ScopeTables,
    target: targets.Target,
    constants: Mapping[str, float | None],
    options: ScopeOptions,
) -> FittedModel | Missing:
    return _alone(
        lambda: fit_target(tables, target, constants, options),
        lambda reason: Missing(target.model, reason, _REMEDY),
    )


def _alone(fit: Callable[[], _T], without: Callable[[str], _T]) -> _T:
    """Return what a fit gives; one that fails in a way nobody foresaw costs its own model, not those of the scope."""
    try:
        return fit()
    except (Exception, pl.exceptions.PanicException) as error:  # noqa: BLE001 - the reason is published
        _log.debug("a model was not fitted", exc_info=True)
        text = " ".join(str(error).split())[:200]
        return without(f"unexpected {type(error).__name__} ({text})")
