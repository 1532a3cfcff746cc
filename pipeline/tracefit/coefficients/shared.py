"""Two models of the same thing: number by number, and what they predict where both were trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.coefficients.frames import predict_rows
from tracefit.coefficients.model import (  # the schema of what compare prints needs Interval when it runs
    BoundaryModel,
    Interval,
    LinearModel,
    RegimesModel,
)
from tracefit.coefficients.values import columns_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tracefit.coefficients.model import Linear, Model, Number, Regime, Term, Work

QUESTIONS = 2000
_SAME_COUNT = {"decode_tokens": "num_decode_reqs", "num_decode_reqs": "decode_tokens"}
"""A decoding request has one token: where only one of the two is told, it tells the other."""


@dataclass(frozen=True, slots=True)
class Change:
    """One coefficient in two files.

    Attributes:
        part: Regime, or part of the model.
        term: Feature, `intercept` or `offset`.
        unit: Of the values.
        first: Value in the first file, null where it has none.
        first_ci95: Its interval.
        second: Value in the second file.
        second_ci95: Its interval.
        apart: Whether the intervals do not meet; null where one is missing.
    """

    part: str
    term: str
    unit: str
    first: float | None
    first_ci95: Interval | None
    second: float | None
    second_ci95: Interval | None
    apart: bool | None


@dataclass(frozen=True, slots=True)
class Shift:
    """How predictions of one part differ over the range both files were trained on, second less first.

    Attributes:
        part: Regime, or part of the model.
        questions: Points of the shared range that were asked about.
        first_us: Mean prediction of the first file.
        mean_us: Mean difference.
        low_us: Largest decrease.
        high_us: Largest increase.
        ranges: Shared range of every column.
    """

    part: str
    questions: int
    first_us: float
    mean_us: float
    low_us: float
    high_us: float
    ranges: dict[str, Interval]


def parts_of(model: Model) -> dict[str, LinearModel | Linear | Regime | Work]:
    """Return the linear parts of a model by name."""
    if isinstance(model, RegimesModel):
        return {regime.name: regime for regime in model.regimes}
    if isinstance(model, BoundaryModel):
        return {"work": model.work, "without_clock": model.without_clock}
    return {"line": model}


def changes(first: Model, second: Model) -> list[Change]:
    """Compare two models coefficient by coefficient, parts by their names."""
    left, right = _numbers(first), _numbers(second)
    return [_change(*key, left.get(key), right.get(key)) for key in dict.fromkeys([*left, *right])]


def _numbers(model: Model) -> dict[tuple[str, str, str], Number | Term]:
    found: dict[tuple[str, str, str], Number | Term] = {}
    for name, part in parts_of(model).items():
        found[name, "intercept", "us"] = part.intercept
        found |= {(name, t.feature, t.unit): t for t in part.terms}
    if isinstance(model, BoundaryModel):
        found["work", "offset", "us"] = model.offset
    return found


def _change(
    part: str, term: str, unit: str, first: Number | Term | None, second: Number | Term | None
) -> Change:
    a, b = (x.ci95 if x is not None else None for x in (first, second))
    apart = None if a is None or b is None else a[1] < b[0] or b[1] < a[0]
    values = (None if x is None else x.value for x in (first, second))
    one, other = values
    return Change(part, term, unit, one, a, other, b, apart)


def shifts(first: Model, second: Model) -> tuple[list[Shift], list[str]]:
    """Compare what the parts of two models predict over their shared training range.

    Returns:
        One shift per part that both have and whose columns have a known range, and why others have none.
    """
    found: list[Shift] = []
    said: list[str] = []
    left, right = parts_of(first), parts_of(second)
    for name in left:
        if name not in right:
            said.append(f"{first.name}, {name}: only in the first file")
            continue
        lines = _line(first, left[name]), _line(second, right[name])
        shift = _shift(name, *lines)
        if isinstance(shift, Shift):
            found.append(shift)
        else:
            said.append(f"{first.name}, {name}: {shift}")
    said += [f"{first.name}, {name}: only in the second file" for name in right if name not in left]
    return found, said


def _line(model: Model, part: LinearModel | Linear | Regime | Work) -> LinearModel:
    return LinearModel(
        name=model.name, intercept=part.intercept, terms=part.terms, definitions=model.definitions
    )


def _shift(name: str, first: LinearModel, second: LinearModel) -> Shift | str:
    ranges: dict[str, Interval] = {}
    for term in (*first.terms, *second.terms):
        if term.seen is not None:
            low, high = ranges.get(term.feature, term.seen)
            ranges[term.feature] = (max(low, term.seen[0]), min(high, term.seen[1]))
    empty = sorted(n for n, (low, high) in ranges.items() if low > high)
    if empty:
        return f"the training ranges of {', '.join(empty)} do not meet"
    columns = columns_of(first) | columns_of(second)
    lacking = sorted(c for c in columns if c not in ranges and _SAME_COUNT.get(c) not in ranges)
    if lacking:
        return f"no training range is known of {', '.join(lacking)}"
    asked = _questions(columns, ranges)
    told = [predict_rows(m, asked).select("predicted_us", "outside") for m in (first, second)]
    both = told[0]["outside"].is_null() & told[1]["outside"].is_null()
    if not both.any():
        return "no point lies in the training ranges of both"
    before, after = (t.filter(both)["predicted_us"].to_numpy() for t in told)
    difference = after - before
    return Shift(
        part=name,
        questions=len(before),
        first_us=float(before.mean()),
        mean_us=float(difference.mean()),
        low_us=float(difference.min()),
        high_us=float(difference.max()),
        ranges={c: ranges[c] for c in sorted(columns & set(ranges))},
    )


def _questions(columns: set[str], ranges: Mapping[str, Interval]) -> pl.DataFrame:
    """Return points spread over the ranges, corners of single columns included, the same ones every time."""
    rng = np.random.default_rng(0)
    free = sorted(c for c in columns if c in ranges)
    points = {
        c: rng.uniform(*ranges[c], QUESTIONS)
        if ranges[c][0] < ranges[c][1]
        else np.full(QUESTIONS, ranges[c][0])
        for c in free
    }
    ends = rng.integers(0, 4, (QUESTIONS, max(len(free), 1)))
    for i, c in enumerate(free):
        points[c] = np.where(
            ends[:, i] == 0, ranges[c][0], np.where(ends[:, i] == 1, ranges[c][1], points[c])
        )
    for c in sorted(columns):
        if c not in points:
            points[c] = points[_SAME_COUNT[c]]
    return pl.DataFrame(points or {"_": np.zeros(1)})
