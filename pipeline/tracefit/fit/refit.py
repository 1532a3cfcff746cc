"""A model of step times in hindsight: its own terms, fitted on the held-out rows themselves.

An error that is left in hindsight is not one of the coefficients: the batch does not tell it. What hindsight takes away is
what had changed since the training part, the level of the machine above all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.fit.design import design_of
from tracefit.fit.estimators import RobustLinear
from tracefit.fit.frames import counted
from tracefit.fit.linear import active_regime, linear_terms, matrix
from tracefit.fit.rows import MIN_TRAIN_ROWS

if TYPE_CHECKING:
    from tracefit.fit.linear import FittedRegime
    from tracefit.fit.results import LinearFit


def refit_on_holdout(fitted: LinearFit) -> tuple[FittedRegime, ...]:
    """Fit the parts of a model anew on its held-out rows, with the estimator, the penalty and the signs it was trained with.

    A term that the held-out rows cannot tell (constant, or a mix of others) keeps its value; so does a part that fewer of
    them than a fit needs speak for.

    Args:
        fitted: The model.
    """
    held = counted(fitted.rows, "holdout")
    speaker = active_regime(fitted.regimes, held)
    return tuple(
        _refitted(part, held.filter(pl.Series(speaker == index))) for index, part in enumerate(fitted.regimes)
    )


def _refitted(part: FittedRegime, held: pl.DataFrame) -> FittedRegime:
    if held.height < MIN_TRAIN_ROWS:
        return part
    data, _ = design_of(held, [t.feature for t in part.terms])
    untold = [t for t in part.terms if t.feature not in data.columns]
    kept_us = matrix(held, [t.feature.name for t in untold]) @ np.array([t.value for t in untold])
    model = RobustLinear(part.choice.penalty, part.choice.strength, positive=part.signs.of(data.columns))
    model.fit(data.x, data.y - kept_us, data.weights)
    terms = (*linear_terms(data.columns, model.coef_, data.x), *untold)
    return replace(part, intercept=model.intercept_, terms=terms)
