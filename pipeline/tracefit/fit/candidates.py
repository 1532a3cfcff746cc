"""Which form a model takes: every candidate is fitted inside the training part alone, and judged inside and beyond its load."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tracefit.fit.linear import matrix
from tracefit.fit.load import LOAD, error_beyond
from tracefit.fit.results import Candidate
from tracefit.fit.select import CANDIDATES, FOLDS, choose_penalty
from tracefit.fit.train import training_design

if TYPE_CHECKING:
    from collections.abc import Sequence

    import polars as pl

    from tracefit.fit.linear import FeatureColumn
    from tracefit.fit.options import FitOptions

TIE = 0.02
"""Candidates whose errors are this close to the best one's are as good: the one with the fewest features is chosen."""

RULE = (
    "smallest geometric mean of the error inside the training load (blocks of time left out in turn) and the error beyond "
    "it (fitted on the lower half of the load, judged on the upper half); within 2 % of it the fewest features"
)


def try_features(
    rows: pl.DataFrame,
    name: str,
    features: Sequence[FeatureColumn],
    options: FitOptions,
    *,
    quick: bool = False,
) -> Candidate | None:
    """Measure what a linear model of some features is worth on the training rows; null of too few rows or features.

    Args:
        rows: Training frame with the column `load`.
        name: Name of the candidate.
        features: The features.
        options: How it would be fitted.
        quick: Try one penalty only.
    """
    found = training_design(rows, features, options)
    if found is None:
        return None
    used, data = found
    penalties = CANDIDATES[:1] if quick else CANDIDATES
    positive = options.signs.of(data.columns)
    folds = data.folds(FOLDS)
    choice = choose_penalty(
        data.x, data.y, folds, data.weights, penalties, positive=positive, counts=data.counts
    )
    load = matrix(used, [LOAD])[:, 0]
    return Candidate(
        name, len(data.columns), choice.score, error_beyond(data, load, options.signs, penalties)
    )


def choose(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Mark the candidate to fit and say why: see `RULE`."""
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
        f"{100 * (own / other - 1):.0f} % worse {where}"
        for where, own, other in (
            ("inside", candidate.inside_mae, winner.inside_mae),
            ("beyond", candidate.beyond_mae, winner.beyond_mae),
        )
        if own is not None and other and own > other * (1 + TIE / 2)
    ]
    return f"{' and '.join(worse) or 'worse'} than {winner.name}"
