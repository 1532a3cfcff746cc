"""Error against the number of training rows: whether more traces would make a better model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tracefit.fit.estimators import RobustLinear
from tracefit.fit.linear import FittedRegime, linear_terms, predict_regimes, target_of
from tracefit.fit.metrics import measure
from tracefit.fit.results import LearningPoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    import polars as pl

    from tracefit.fit.design import Design

SHARES = (0.1, 0.2, 0.4, 0.7, 1.0)
"""Shares of the training rows, the latest ones before the hold-out: the distance in time to it stays what it is."""


def learning_curve(
    parts: Sequence[FittedRegime],
    designs: Sequence[Design],
    judged: pl.DataFrame,
    *,
    fewest: int,
) -> tuple[LearningPoint, ...]:
    """Fit a model anew on ever more rows, features and penalty as they were chosen on all.

    A share that leaves a part fewer than `fewest` rows has no point.

    Args:
        parts: The fitted model.
        designs: The training rows of each part.
        judged: The held-out rows.
        fewest: Rows that every part needs.
    """
    y = target_of(judged)
    points = []
    for share in SHARES:
        chosen = [design.latest(share) for design in designs]
        rows = [int(mine.sum()) for mine in chosen]
        if min(rows) < fewest:
            continue
        refitted = list(parts)
        if share < 1:
            for index, (part, design, mine) in enumerate(zip(parts, designs, chosen, strict=True)):
                positive = part.signs.of(design.columns)
                model = RobustLinear(part.choice.penalty, part.choice.strength, positive=positive)
                model.fit(design.x[mine], design.y[mine], design.weights[mine])
                terms = linear_terms(design.columns, model.coef_, design.x)
                refitted[index] = replace(part, intercept=model.intercept_, terms=terms)
        errors = measure(y, predict_regimes(refitted, judged))
        if errors.mae is not None:
            points.append(LearningPoint(share, sum(rows), errors.mae, errors.mape_pct))
    return tuple(points)
