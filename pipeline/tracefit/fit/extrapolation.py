"""How well a step-time model extrapolates to higher loads than it was fitted on, which a capacity planner needs to know.

The load of a step is the number of tokens in the caches of its batch, or its requests where the tokens are not known. A model
is fitted on the lower half of the load and evaluated on the upper half; the hold-out error is given per range of load; and
features with far larger values in the run than in training are named.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.features.sets import Feature
from tracefit.fit import splits
from tracefit.fit.design import design_of
from tracefit.fit.estimators import RobustLinear
from tracefit.fit.linear import matrix, max_inflations, predict_regimes, target_of
from tracefit.fit.results import ErrorOverLoad, LoadBin, LoadExtrapolation
from tracefit.fit.select import FOLDS, choose_penalty, usable_features
from tracefit.fit.splits import MIN_HOLDOUT_ROWS, MIN_TRAIN_ROWS, counted, evaluation_rows
from tracefit.fit.validation import measure, reference

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tracefit.fit.design import Design
    from tracefit.fit.fitted import FitOptions, LinearFit
    from tracefit.fit.linear import FittedTerm
    from tracefit.statistics import Flags, Matrix, Vector

LOAD = "load"
RUNNING_TOKENS, BATCH_REQUESTS = "running_tokens", "batch_requests"
LOAD_FEATURES = (
    Feature("load_tokens", "token", "context_tokens + prefill_context_tokens"),
    Feature("load_requests", "request", "num_prefill_reqs + num_decode_reqs"),
)
"""Measures of load: the tokens in the caches of the batch, or its requests where the tokens are not known."""

LOWER_SHARE = 0.5
"""Share of the rows, by load, that a model is fitted on; it is evaluated on the rest."""

MAX_UNKNOWN_SHARE = 0.05
BINS = 12


def with_load(rows: pl.DataFrame) -> tuple[pl.DataFrame, str]:
    """Replace `LOAD_FEATURES` by the column `load`; return what it is measured by.

    Args:
        rows: Training rows of step times with the columns of `LOAD_FEATURES`.
    """
    included = rows.filter(pl.col("excluded_reason").is_null())
    tokens, requests = (f.name for f in LOAD_FEATURES)
    share = included[tokens].null_count() / max(included.height, 1)
    known = share <= MAX_UNKNOWN_SHARE
    column = pl.col(tokens) if known else pl.col(requests)
    named = rows.with_columns(column.cast(pl.Float64).fill_null(0.0).alias(LOAD))
    return named.drop(tokens, requests), RUNNING_TOKENS if known else BATCH_REQUESTS


def load_cut(load: Vector) -> float | None:
    """Return the load that the lower half of rows does not exceed; null where either half is too small for a fit."""
    if not load.size:
        return None
    cut = float(np.quantile(load, LOWER_SHARE, method="inverted_cdf"))
    lower = int((load <= cut).sum())
    return cut if lower >= MIN_TRAIN_ROWS and load.size - lower >= MIN_HOLDOUT_ROWS else None


def error_beyond(
    data: Design,
    load: Vector,
    options: FitOptions,
) -> float | None:
    """Fit the lower half of the load and return the mean absolute error on the upper half; null where rows are too few.

    Features, penalty and coefficients are all chosen anew on the lower half, as in a fit of that half alone.

    Args:
        data: Training rows as arrays.
        load: Of each row, shape (n,).
        options: How it would be fitted.
    """
    cut = load_cut(load)
    if cut is None:
        return None
    upper = load > cut
    counts = data.counts[upper]
    predicted = _fitted_below(data, ~upper, options)(data.x[upper])
    return float(np.abs(predicted - data.y[upper]) @ counts / counts.sum())


def _fitted_below(data: Design, lower: Flags, options: FitOptions) -> Callable[[Matrix], Vector]:
    """Fit the `lower` rows and return a function that predicts features of shape (n, n_features), clipped at 0."""
    names, limits = [c.name for c in data.columns], max_inflations(data.columns)
    kept, _ = usable_features(data.x[lower], names, limits)
    x, y, weights = np.asfortranarray(data.x[lower][:, kept]), data.y[lower], data.weights[lower]
    positive = options.signs.of([data.columns[k] for k in kept])
    folds, counts = data.folds(FOLDS)[lower], data.counts[lower]
    choice = choose_penalty(x, y, folds, weights, options.penalties, positive=positive, counts=counts)
    model = RobustLinear(choice.penalty, choice.strength, positive=positive).fit(x, y, weights)
    return lambda features: np.asarray(np.maximum(model.predict(features[:, kept]), 0.0))


def load_extrapolation(
    fitted: LinearFit, features: Sequence[Feature], load: str, options: FitOptions
) -> LoadExtrapolation | None:
    """Fit the form of a model on the lower half of the load of a whole run and measure it on the upper half.

    Both halves hold rows of the training part and of the hold-out; null where rows are too few.

    Args:
        fitted: The model: its rows with the column `load`.
        features: The features it was offered.
        load: What load is measured by.
        options: How it was fitted.
    """
    rows = fitted.rows.filter(~pl.col("excluded_reason").is_in(splits.ALWAYS).fill_null(value=False))
    # Training rows lose warm-up and outliers as in any fit; held-out rows keep them, as in any evaluation.
    kept = rows.filter(pl.col("excluded_reason").is_null() | (pl.col("split") == "holdout"))
    cut = load_cut(kept[LOAD].to_numpy())
    if cut is None:
        return None
    used = kept.filter(pl.col(LOAD) <= cut)
    above = evaluation_rows(rows.filter(pl.col(LOAD) > cut), options.eval_filter)
    offered = [f for f in features if f.name in rows.columns and not rows[f.name].null_count()]
    data, _ = design_of(used, offered)
    if not data.columns or above.height < MIN_HOLDOUT_ROWS:
        return None
    names = [c.name for c in data.columns]
    predict = _fitted_below(data, np.ones(len(data.y), dtype=bool), options)
    errors = measure(target_of(above), predict(matrix(above, names)))
    return LoadExtrapolation(
        **asdict(errors),
        load=load,
        cut=cut,
        gradient_boosting=reference(used, above, names) if options.reference else None,
    )


def error_over_load(fitted: LinearFit, load: str, options: FitOptions) -> ErrorOverLoad | None:
    """Measure a model on held-out rows in groups of equal size by load; null where there are no rows.

    Args:
        fitted: The model: its rows with the column `load`.
        load: What load is measured by.
        options: How it was fitted.
    """
    used, held = (
        counted(fitted.rows, "train"),
        evaluation_rows(counted(fitted.rows, "holdout"), options.eval_filter),
    )
    if not used.height or not held.height:
        return None
    held = held.sort(LOAD)
    loads, actual, predicted = held[LOAD].to_numpy(), target_of(held), predict_regimes(fitted.regimes, held)
    # Groups of equal size: in bins of equal width the highest loads would be a row or two.
    groups = np.array_split(np.arange(held.height), min(BINS, held.height // MIN_HOLDOUT_ROWS or 1))
    return ErrorOverLoad(
        load=load,
        training_range=(float(used[LOAD].to_numpy().min()), float(used[LOAD].to_numpy().max())),
        bins=tuple(
            LoadBin(float(loads[g[0]]), float(loads[g[-1]]), measure(actual[g], predicted[g])) for g in groups
        ),
    )


def beyond_training(terms: Sequence[FittedTerm], steps: pl.DataFrame) -> tuple[str, ...]:
    """Return a note for each feature whose largest value in the steps is more than twice its largest one in training.

    Where few steps are sampled few have a known time, and the longest prompts may be among the rest.

    Args:
        terms: The terms of a step-time model.
        steps: Every known step; features that are no column of it are skipped.
    """
    notes = []
    for term in terms:
        name, (_, trained_max) = term.feature.name, term.training_range
        if name not in steps.columns:
            continue
        values = steps[name].drop_nulls()
        most = values.max()
        if isinstance(most, int | float) and most > 2 * max(trained_max, 0.0):
            share = 100 * int((values > trained_max).sum()) / len(values)
            notes.append(
                f"{name} is up to {trained_max:g} in the training rows and up to {most:g} in the runs' steps ({share:.2g} % are "
                "beyond): its coefficient says nothing of those"
            )
    return tuple(notes)
