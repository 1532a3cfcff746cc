"""Compare two models of one target: coefficient by coefficient, and by their predictions where both were trained.

If features can replace each other, coefficients of two files may differ without any effect. Users notice different
predictions, so both models are also evaluated on the same points of their shared training range.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.models.evaluate import CompiledModel
from tracefit.models.frames import predict_rows
from tracefit.models.schema import LinearModel, linear_forms, numbers_of
from tracefit.results.models import CoefficientDiff, PredictionDiff

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tracefit.models.schema import Bounds, LinearForm, Model

COMPARED_POINTS = 2000
"""Number of points of the shared training range at which two models are compared."""

_SAME_COUNT = {"decode_tokens": "num_decode_reqs", "num_decode_reqs": "decode_tokens"}
"""A decoding request computes one token, so each of the two can stand in for the other."""


def coefficient_diffs(first: Model, second: Model) -> list[CoefficientDiff]:
    """Compare two models coefficient by coefficient; linear forms are matched by name."""
    left, right = numbers_of(first), numbers_of(second)
    diffs = []
    for key in dict.fromkeys([*left, *right]):
        # Disjoint intervals are a change beyond chance; overlapping ones may still hide a small change.
        (one, a), (other, b) = (
            (None, None) if x is None else (x.value, x.ci95) for x in (left.get(key), right.get(key))
        )
        apart = None if a is None or b is None else a[1] < b[0] or b[1] < a[0]
        diffs.append(CoefficientDiff(*key, one, a, other, b, apart))
    return diffs


def prediction_diffs(first: Model, second: Model) -> tuple[list[PredictionDiff], list[str]]:
    """Compare the predictions of the linear forms of two models over their shared training range.

    Returns:
        One difference per linear form that both have and whose columns have a range, and the reasons for the
        other forms.
    """
    diffs: list[PredictionDiff] = []
    notes: list[str] = []
    left, right = linear_forms(first), linear_forms(second)
    for name in dict.fromkeys([*left, *right]):
        if name in left and name in right:
            diff = _prediction_diff(name, _line(first, left[name]), _line(second, right[name]))
        else:
            diff = f"only in the {'first' if name in left else 'second'} file"
        if isinstance(diff, PredictionDiff):
            diffs.append(diff)
        else:
            notes.append(f"{first.name}, {name}: {diff}")
    return diffs, notes


def _line(model: Model, form: LinearForm) -> LinearModel:
    return LinearModel(name=model.name, intercept=form.intercept, terms=form.terms, definitions=model.definitions)


def _prediction_diff(name: str, first: LinearModel, second: LinearModel) -> PredictionDiff | str:
    ranges: dict[str, Bounds] = {}
    for term in (*first.terms, *second.terms):
        if term.training_range is not None:
            low, high = ranges.get(term.feature, term.training_range)
            ranges[term.feature] = (max(low, term.training_range[0]), min(high, term.training_range[1]))
    if empty := sorted(n for n, (low, high) in ranges.items() if low > high):
        return f"the training ranges of {', '.join(empty)} do not overlap"
    # Inputs, not features: two models with different features of the same columns can be compared too.
    columns = CompiledModel(first).inputs | CompiledModel(second).inputs
    if lacking := sorted(c for c in columns if c not in ranges and _SAME_COUNT.get(c) not in ranges):
        return f"no training range of {', '.join(lacking)}"
    points = _points(columns, ranges)
    predicted = [predict_rows(m, points).select("predicted_us", "out_of_range") for m in (first, second)]
    both = predicted[0]["out_of_range"].is_null() & predicted[1]["out_of_range"].is_null()
    if not both.any():
        return "no point lies in the training ranges of both"
    before, after = (p.filter(both)["predicted_us"].to_numpy() for p in predicted)
    difference = after - before
    return PredictionDiff(
        part=name,
        points=len(before),
        first_us=float(before.mean()),
        mean_us=float(difference.mean()),
        low_us=float(difference.min()),
        high_us=float(difference.max()),
        ranges={c: ranges[c] for c in sorted(columns & set(ranges))},
    )


def _points(columns: set[str], ranges: Mapping[str, Bounds]) -> pl.DataFrame:
    """Return points distributed over the ranges, with the ends of every single column; the same points every time."""
    rng = np.random.default_rng(0)
    free = sorted(c for c in columns if c in ranges)
    points = {
        c: rng.uniform(*ranges[c], COMPARED_POINTS)
        if ranges[c][0] < ranges[c][1]
        else np.full(COMPARED_POINTS, ranges[c][0])
        for c in free
    }
    # Half of the values are ends of ranges (0 and 1 of 0 to 3): lines differ most at extremes of both features.
    ends = rng.integers(0, 4, (COMPARED_POINTS, max(len(free), 1)))
    for i, c in enumerate(free):
        points[c] = np.choose(ends[:, i], [*ranges[c], points[c], points[c]])
    points |= {c: points[_SAME_COUNT[c]] for c in sorted(columns - points.keys())}
    return pl.DataFrame(points or {"_": np.zeros(1)})
