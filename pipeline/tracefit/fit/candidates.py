"""Choose between candidate models: feature sets for the step time, and forms for a request's wait.

Every candidate is fitted on one part of the training rows and evaluated on the rest of them, so that the hold-out remains
unused. Feature sets follow `SET_RULE`: error inside and beyond the training load, fewer features on a tie. Forms follow
`FORM_RULE`: the form that the engine's laws give stays unless another one is clearly better.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import polars as pl

from tracefit.fit import splits
from tracefit.fit.boundary import fit_boundary
from tracefit.fit.extrapolation import LOAD, error_beyond
from tracefit.fit.fitted import LinearFit
from tracefit.fit.linear import matrix
from tracefit.fit.results import Candidate
from tracefit.fit.select import FOLDS, choose_penalty
from tracefit.fit.train import fit_regimes, training_design

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracefit.fit.fitted import FitOptions
    from tracefit.fit.linear import FeatureColumn, RegimeRows

TIE = 0.02
"""Candidates whose score is within this share of the best one's tie with it; the fewest features decide."""

SET_RULE = (
    "smallest geometric mean of the error inside the training load (blocks of time left out in turn) and the error beyond "
    "it (fitted on the lower half of the load, evaluated on the upper half); within 2 % of it the fewest features"
)


def try_features(
    rows: pl.DataFrame, name: str, features: Sequence[FeatureColumn], options: FitOptions
) -> Candidate | None:
    """Measure a linear model of some features on the training rows; null where rows or features are too few.

    Args:
        rows: Training frame with the column `load`.
        name: Name of the candidate.
        features: The features.
        options: How it would be fitted.
    """
    design = training_design(rows, features, options)
    if design is None:
        return None
    used, data = design
    positive = options.signs.of(data.columns)
    folds = data.folds(FOLDS)
    choice = choose_penalty(
        data.x, data.y, folds, data.weights, options.penalties, positive=positive, counts=data.counts
    )
    load = matrix(used, [LOAD])[:, 0]
    return Candidate(name, len(data.columns), choice.score, error_beyond(data, load, options))


def choose(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Mark the candidate to fit, by `SET_RULE`, and give each candidate its reason."""
    best = min(candidates, key=lambda c: c.score)
    close = [c for c in candidates if c.score <= best.score * (1 + TIE)]
    winner = min(close, key=lambda c: (c.features, c.score))
    return tuple(
        replace(c, chosen=c is winner, reason=_reason(c, best=best, winner=winner)) for c in candidates
    )


def _reason(candidate: Candidate, *, best: Candidate, winner: Candidate) -> str:
    if candidate is winner:
        if winner is best:
            beyond = " and beyond" if winner.beyond_mae is not None else ""
            return f"smallest error inside{beyond} the training load"
        return f"within {100 * TIE:.0f} % of {best.name} with fewer features"
    if candidate.score <= best.score * (1 + TIE):
        return f"no better than {winner.name} with {winner.features} features"
    worse = [
        f"{100 * (error / best_error - 1):.0f} % worse {where}"
        for where, error, best_error in (
            ("inside", candidate.inside_mae, winner.inside_mae),
            ("beyond", candidate.beyond_mae, winner.beyond_mae),
        )
        if error is not None and best_error and error > best_error * (1 + TIE / 2)
    ]
    return f"{' and '.join(worse) or 'worse'} than {winner.name}"


MIN_GAIN = 0.05
"""Least share of the error that another form must remove to replace the form that the engine's laws give."""

CLOCK_US = 1.0
"""Smallest difference between errors, in us, that counts: the stamps resolve none below it."""

FORM_RULE = (
    "by the mean absolute error on the last 30 % of the training rows in time, fitted on those before; the form that the "
    "engine's laws give unless another is better by more than 5 %"
)

_BOUNDARY_NUMBERS = 2
"""Fitted numbers of the step boundary: the API work and the offset of the stamp."""


def choose_form(lawful: Candidate, other: Candidate) -> tuple[Candidate, ...]:
    """Mark the form to fit, by `FORM_RULE`, and give both forms their reason.

    Args:
        lawful: The form that the engine's laws give.
        other: The alternative form.
    """
    gain = 1 - other.inside_mae / lawful.inside_mae if lawful.inside_mae else 0.0
    clearly = gain > MIN_GAIN and lawful.inside_mae - other.inside_mae > CLOCK_US
    winner, loser = (other, lawful) if clearly else (lawful, other)
    if winner is other:
        why = f"removes {100 * gain:.0f} % of the error of {lawful.name}"
    elif gain > 0:
        why = f"{other.name} removes only {100 * gain:.1f} % of its error"
    else:
        why = "smallest error"
    beaten = f"error {loser.inside_mae:.4g} us, where {winner.name} has {winner.inside_mae:.4g} us"
    return tuple(
        replace(c, chosen=c is winner, reason=why if c is winner else beaten) for c in (lawful, other)
    )


def inner_rows(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the training rows as a frame of their own whose last 30 % in time are held out."""
    # The hold-out stays unused: a form that was chosen by it would look better there than it is.
    trained = rows.filter(pl.col("split") == "train").drop("split", "holdout_from_ns")
    return splits.split_by_time(trained)


def try_regimes(
    rows: pl.DataFrame, name: str, regimes: list[RegimeRows], options: FitOptions
) -> Candidate | None:
    """Measure a line, or a line per regime, on the inner hold-out; null where rows are too few.

    Args:
        rows: As `inner_rows` returns them.
        name: Name of the form.
        regimes: As for `fit_regimes`.
        options: How it would be fitted.
    """
    fitted = _fit(rows, regimes, options)
    if fitted is None or fitted.validation.holdout.mae is None:
        return None
    return Candidate(name, len(fitted.terms), fitted.validation.holdout.mae, None)


def try_boundary(
    rows: pl.DataFrame, regimes: list[RegimeRows], options: FitOptions, timeline: pl.DataFrame
) -> Candidate | None:
    """Measure the step boundary on the inner hold-out; null where rows, or known step starts, are too few.

    Args:
        rows: As `inner_rows` returns them.
        regimes: The line for requests whose boundary the step clock does not know.
        options: How it would be fitted.
        timeline: The `timeline` table.
    """
    fitted = _fit(rows, regimes, options)
    boundary = fit_boundary(fitted, timeline) if fitted else None
    if boundary is None or boundary.validation.holdout.mae is None:
        return None
    return Candidate("step_boundary", _BOUNDARY_NUMBERS, boundary.validation.holdout.mae, None)


def _fit(rows: pl.DataFrame, regimes: list[RegimeRows], options: FitOptions) -> LinearFit | None:
    fitted = fit_regimes(rows, regimes, replace(options, reference=False))
    return fitted if isinstance(fitted, LinearFit) else None
