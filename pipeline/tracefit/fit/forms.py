"""Which form a model of a request's wait takes: each is fitted on the first part of the training rows, judged on the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import polars as pl

from tracefit.fit import rows as rules
from tracefit.fit.boundary import fit_boundary
from tracefit.fit.results import Candidate, LinearFit
from tracefit.fit.train import fit_regimes

if TYPE_CHECKING:
    from tracefit.fit.linear import Regime
    from tracefit.fit.options import FitOptions

WORTH = 0.05
"""Least share of the error that another form must remove to take the place of the one that the engine's laws give."""

CLOCK_US = 1.0
"""A difference of errors that no stamp tells."""

RULE = (
    "by the mean absolute error on the last 30 % of the training rows in time, fitted on those before; the form that the "
    "engine's laws give unless another is better by more than 5 %"
)

BOUNDARY, LINE, REGIMES = "step_boundary", "line", "regimes"

_BOUNDARY_NUMBERS = 2
"""What the step boundary is fitted by: the API work and the offset of the stamp."""


def choose_form(lawful: Candidate, other: Candidate) -> tuple[Candidate, ...]:
    """Mark the form to fit and say why, by `RULE`.

    Args:
        lawful: The form that the engine's laws give.
        other: The other one.
    """
    gain = 1 - other.inside_mae / lawful.inside_mae if lawful.inside_mae else 0.0
    clearly = gain > WORTH and lawful.inside_mae - other.inside_mae > CLOCK_US
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
    """Return the training rows of a frame as a frame of their own, its last 30 % in time held out."""
    trained = rows.filter(pl.col("split") == "train").drop("split", "holdout_from_ns")
    return rules.split_by_time(trained)


def try_regimes(
    rows: pl.DataFrame, name: str, regimes: list[Regime], options: FitOptions
) -> Candidate | None:
    """Measure a line or a line per regime; null of too few rows.

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
    rows: pl.DataFrame, regimes: list[Regime], options: FitOptions, timeline: pl.DataFrame
) -> Candidate | None:
    """Measure API work and the step boundary after it; null of too few rows, or where the step clock knows too little.

    Args:
        rows: As `inner_rows` returns them.
        regimes: The line that speaks for requests whose boundary the step clock does not know.
        options: How it would be fitted.
        timeline: The `timeline` table.
    """
    fitted = _fit(rows, regimes, options)
    boundary = fit_boundary(fitted, timeline) if fitted else None
    if boundary is None or boundary.validation.holdout.mae is None:
        return None
    return Candidate(BOUNDARY, _BOUNDARY_NUMBERS, boundary.validation.holdout.mae, None)


def _fit(rows: pl.DataFrame, regimes: list[Regime], options: FitOptions) -> LinearFit | None:
    fitted = fit_regimes(rows, regimes, replace(options, reference=False))
    return fitted if isinstance(fitted, LinearFit) else None
