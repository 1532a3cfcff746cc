"""Select features and the penalty of a linear model, on the training rows only.

`usable_features` drops features that are unknown, constant or collinear with earlier ones. A fit takes its rows as
arrays (`Design`). `Design.choose_penalty` compares penalties by cross-validation over blocks of time: neighbouring rows
resemble each other, so that random folds would let a model see its test rows' neighbours.
`Design.is_worse_than_constant` decides by the same errors whether any features are worth having.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from tracefit.features.sets import PADDED_OF, PRODUCTS
from tracefit.fit.estimators import FEW_ROUNDS, MAX_ITER, RobustLinear, Sums, line, rows_of, sampled, standardised
from tracefit.fit.fitted import PENALTIES
from tracefit.fit.results import PenaltyChoice
from tracefit.models.schema import OmittedFeature
from tracefit.models.validation import Collinearity

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tracefit.features.sets import Feature
    from tracefit.fit.estimators import Penalty, Shrunk
    from tracefit.fit.fitted import FitOptions, Signs
    from tracefit.statistics import Flags, Integers, Matrix, Vector


MAX_VIF = 10.0
"""A feature whose variance inflation against the features before it exceeds this is left out as redundant."""

MAX_DERIVED_VIF = 100.0
"""The limit for a product of features, and for a padded batch after the batch itself. A square always correlates with
its root, a batch with its padded size; cross-validation decides on products, and signs bound padding."""

_PRODUCTS = frozenset(feature.name for feature in PRODUCTS)

MIN_VARIED_ROWS = 20
"""A feature that differs from its most common value on fewer rows is left out: its coefficient would describe those
rows."""

FOLDS = 5
_TIE = 1e-3
"""Penalties whose errors differ by a smaller share tie."""

ENOUGH_ROWS = 100_000
"""Most rows that penalties are ranked on, taken evenly over time: more rows give the same ranking."""

BLOCK_ROWS = 10
FEWEST_FOLD_BLOCKS, MOST_FOLD_BLOCKS = 10, 50
"""Blocks of time for confidence intervals: long enough that rows of different blocks are nearly independent, and enough
of them to estimate a variance."""

_PERMILLE = 1000

HARM_FACTOR = 1.1
"""Features are misleading above this multiple of a constant's error; useless ones raise it by a few percent only."""


def usable_features(x: Matrix, names: Sequence[str]) -> tuple[list[int], list[OmittedFeature]]:
    """Return the features, in the order declared, that are known, vary and are not a mix of the features before them.

    A feature is a mix of the kept ones when its variance inflation against them exceeds its limit: 1 / (1 - R^2) >
    limit, with R^2 of its regression on a constant and the kept features, which their correlations give.

    Returns:
        Kept column indices, and the other features with reasons.
    """
    kept: list[int] = []
    left_out: list[OmittedFeature] = []
    reasons = [_unusable(column) for column in x.T]
    correlations = _correlations(x, [k for k, reason in enumerate(reasons) if reason is None])
    for index, (name, reason) in enumerate(zip(names, reasons, strict=True)):
        if reason is not None:
            left_out.append(OmittedFeature(name, reason))
            continue
        with_kept = correlations[index, kept]
        # 1 - R^2: the share of the feature's variance that the kept features leave unexplained. None of these is a
        # mix of the others, so that their correlations are far from singular.
        unexplained = 1 - float(with_kept @ np.linalg.solve(correlations[np.ix_(kept, kept)], with_kept))
        is_derived = name in _PRODUCTS or PADDED_OF.get(name) in {names[k] for k in kept}
        if unexplained * (MAX_DERIVED_VIF if is_derived else MAX_VIF) >= 1:
            kept.append(index)
            continue
        alike = np.abs(with_kept)
        nearest = names[kept[int(np.argmax(alike))]]
        # A mix of several features goes with none of them.
        collinear_with = (nearest,) if (1 - alike.max() ** 2) * MAX_VIF < 1 else ()
        inflation = "infinite" if unexplained < 1e-10 else f"{1 / unexplained:.0f}"
        mix = f"collinear with the features before it, closest {nearest} (variance inflation {inflation})"
        left_out.append(OmittedFeature(name, mix, collinear_with=collinear_with))
    return kept, left_out


def _correlations(x: Matrix, columns: list[int]) -> Matrix:
    """Return the correlations between some of the features, none of them constant, at their places in an array of shape
    (n_features, n_features).
    """
    centered = x[:, columns] - x[:, columns].mean(axis=0)
    units = centered / np.sqrt(np.einsum("ij,ij->j", centered, centered))
    correlations = np.zeros((x.shape[1], x.shape[1]))
    correlations[np.ix_(columns, columns)] = units.T @ units
    return correlations


def _unusable(column: Vector) -> str | None:
    """Return why a feature cannot be fitted by itself; null where it can."""
    if not column.size:
        return "not known in these runs"
    low, high = float(column.min()), float(column.max())
    if not (math.isfinite(low) and math.isfinite(high)):
        unknown = int((~np.isfinite(column)).sum())
        all_unknown = unknown == column.size
        return "not known in these runs" if all_unknown else f"unknown on {unknown} of {column.size} training rows"
    if high - low <= 1e-12 * max(1.0, abs(low), abs(high)):
        return f"constant in the training rows ({column[0]:.6g})"
    # A row that differs from the most common value makes two changes at most.
    if np.count_nonzero(column[1:] != column[:-1]) >= 2 * MIN_VARIED_ROWS:
        return None
    values, counts = np.unique(column, return_counts=True)
    varied, common = column.size - int(counts.max()), values[int(np.argmax(counts))]
    too_few = f"differs from {common:.6g} on only {varied} of {column.size} training rows"
    return too_few if varied < MIN_VARIED_ROWS else None


def collinearity(x: Matrix, names: Sequence[str], regime: str) -> Collinearity:
    """Measure the collinearity of the features of a regime."""
    if not x.shape[1]:
        return Collinearity(regime, None, {})
    correlation = np.atleast_2d(np.corrcoef(x, rowvar=False))
    values = np.linalg.eigvalsh(correlation)
    # The diagonal of the inverse correlation matrix holds the variance inflations.
    inflations = np.diag(np.linalg.pinv(correlation, hermitian=True))
    return Collinearity(
        regime,
        float(np.sqrt(values[-1] / max(float(values[0]), np.finfo(float).eps))),
        {name: max(float(v), 1.0) for name, v in zip(names, inflations, strict=True)},
    )


def time_blocks(run: Integers, time: Integers, count: int) -> Integers:
    """Cut each run's rows into `count` contiguous blocks of time; block i of every run has number i."""
    _, number, rows = np.unique(run, return_inverse=True, return_counts=True)
    order = np.lexsort((time, number))
    rank = np.empty(len(run), dtype=np.int64)
    rank[order] = np.arange(len(run)) - np.repeat(np.cumsum(rows) - rows, rows)
    return np.asarray(rank * count // rows[number])


class Design(msgspec.Struct, frozen=True):
    """Training rows as arrays: features (n, n_features), and each of shape (n,) targets, weights, run and time.

    `weights` are inverse variances. `counts` leave out the noise that grows with the target, so that an error of so
    many us counts the same in a short step as in a long one: candidates are compared by `counts`.
    """

    columns: list[Feature]
    x: Matrix
    y: Vector
    weights: Vector
    counts: Vector
    run: Integers
    time: Integers
    folds: Integers
    """For cross-validation: contiguous in every run's time."""
    start: Vector | None = None
    """Huber's weights of an earlier fit of these rows, from which fits start; null if there is no such fit."""

    def blocks(self) -> Integers:
        """Blocks of time for intervals, numbered over all runs; shape (n,)."""
        rows = len(self.y) // (int(self.run.max()) + 1)
        count = min(max(rows // BLOCK_ROWS, FEWEST_FOLD_BLOCKS), MOST_FOLD_BLOCKS)
        return time_blocks(self.run, self.time, count) + self.run * count

    def part(self, rows: Flags | slice, columns: Sequence[int] | None = None) -> Design:
        """Return some rows of some columns, of all columns if these are not given."""
        names = ("y", "weights", "counts", "run", "time", "folds")
        start = None if self.start is None else self.start[rows]
        part = replace(self, x=self.x[rows], start=start, **{name: getattr(self, name)[rows] for name in names})
        if columns is None:
            return part
        x = np.asfortranarray(part.x[:, columns])
        return replace(part, columns=[self.columns[k] for k in columns], x=x)

    def latest(self, share: float) -> Flags:
        """Return which rows are in the last `share` of their run in time, to a permille; shape (n,)."""
        return time_blocks(self.run, self.time, _PERMILLE) >= round((1 - share) * _PERMILLE)

    def fit(self, choice: PenaltyChoice, signs: Signs, *, max_iter: int = MAX_ITER) -> RobustLinear:
        """Fit all rows with a penalty that was chosen."""
        model = estimator(choice, signs, self.columns, max_iter=max_iter)
        return model.fit(self.x, self.y, self.weights, self.start)

    def choose_penalty(self, options: FitOptions) -> PenaltyChoice:
        """Choose penalty and strength by cross-validation over the folds, blocks of time.

        The error of a candidate is the mean absolute error on each block, predicted by a fit on the other blocks. All
        candidates and blocks share the Huber weights of one fit of all rows, so that the same rows count for all. Ties
        (within 0.1 %) go to the earlier candidate: Ridge before Lasso before elastic net, weaker before stronger.

        Returns:
            The choice; the first candidate without a score where there are fewer than two blocks.
        """
        # Ceiling division: the smallest step that leaves no more than `ENOUGH_ROWS`.
        every_nth = slice(None, None, -(-len(self.y) // ENOUGH_ROWS) or None)
        data = self.part(every_nth, range(len(self.columns)))
        errors = []
        first = PenaltyChoice(*options.penalties[0], float("nan"), 0)
        for test, predictions in data.left_out(first, options.penalties, options.signs):
            absolute = np.abs(np.maximum(predictions, 0.0) - data.y[test])
            # Divided by the sum over all rows, the errors of the folds add up to the mean over all rows.
            errors.append(absolute @ data.counts[test] / data.counts.sum())
        if not errors:
            return first
        scores = np.sum(errors, axis=0)  # over the folds; one per candidate
        best = _first_best(scores)
        return PenaltyChoice(*options.penalties[best], float(scores[best]), len(errors))

    def ranked_first(self, options: FitOptions) -> PenaltyChoice:
        """Return `choose_penalty` for a fit that needs no score: a single candidate is the choice."""
        if len(options.penalties) > 1:
            return self.choose_penalty(options)
        return PenaltyChoice(*options.penalties[0], float("nan"), 0)

    def left_out(
        self, weighed: PenaltyChoice, candidates: Sequence[tuple[Penalty, float]], signs: Signs
    ) -> Iterator[tuple[Flags, Matrix]]:
        """Yield the rows of each fold, and predictions of them by every candidate fitted on the rows of the other
        folds.

        All lines share the Huber weights of the earlier fit of these rows (`start`), or else of a short one with the
        penalty `weighed`. With the weights fixed,
        the sums over the other folds are those over all rows without the fold's: each fold costs one pass over its own
        rows, and each candidate a system of the size of the number of features. The lines are those that least squares
        with these weights find on the other rows.

        Yields:
            Flags of shape (n,), and predictions of shape (n_candidates, rows of the fold); nothing where there is a
            single fold.
        """
        folds = np.unique(self.folds)
        if len(folds) < 2:
            return
        model = estimator(weighed, signs, self.columns, max_iter=FEW_ROUNDS)
        if self.start is None:
            weights = model.fit_rows(self.x, self.y, self.weights).final
        else:
            weights = sampled(self.y, self.weights) * self.start
        z, center, scale = standardised(self.x)
        level = float(self.y.mean())
        rows = rows_of(z, self.y - level)
        everything = Sums.of(rows, weights)
        for fold in folds:
            test = self.folds == fold
            of_rest = everything - Sums.of(rows[test], weights[test])
            summed, rest_center, rest_scale = of_rest.standardised(level)
            origin = (-center / scale - rest_center) / rest_scale
            lines = [
                line(summed, origin, *candidate, positive=model.positive, shrunk=model.shrunk)
                for candidate in candidates
            ]
            constants = np.array([intercept for intercept, _ in lines])
            slopes = np.array([slopes for _, slopes in lines]) / (rest_scale * scale)
            yield test, constants[:, None] + slopes @ self.x[test].T

    def is_worse_than_constant(self, choice: PenaltyChoice, options: FitOptions) -> bool:
        """Return whether the features predict left-out blocks of time clearly worse than a constant does.

        Such features describe one period of the run only: a line through a burst is wrong by the size of the burst in
        the quiet period that follows.
        """
        if not choice.folds or not self.columns:
            return False
        constant = self.part(slice(None), []).choose_penalty(replace(options, penalties=PENALTIES[:1]))
        return choice.score > HARM_FACTOR * constant.score

    def out_of_fold(self, choice: PenaltyChoice, signs: Signs) -> Vector:
        """Predict each block of time by a model fitted on the other blocks, clipped at 0; shape (n,).

        A single block is predicted by a model fitted on itself.
        """
        predicted = np.zeros(len(self.y))
        for test, (of_fold,) in self.left_out(choice, [(choice.penalty, choice.strength)], signs):
            predicted[test] = of_fold
        if len(np.unique(self.folds)) < 2:
            predicted = self.fit(choice, signs).predict(self.x)
        return np.asarray(np.maximum(predicted, 0.0))


def estimator(
    choice: PenaltyChoice, signs: Signs, features: Sequence[Feature], *, max_iter: int = MAX_ITER
) -> RobustLinear:
    """Return an estimator for a model of these features with a penalty that was chosen."""
    return RobustLinear(
        choice.penalty,
        choice.strength,
        max_iter=max_iter,
        positive=signs.of(features),
        shrunk=_shrunk(features),
    )


def _shrunk(features: Sequence[Feature]) -> Shrunk:
    return tuple(f.shrunk for f in features)


def _first_best(errors: Vector) -> int:
    """Return the index of the smallest error; ties, within `_TIE`, go to the earlier one."""
    best = 0
    for index, error in enumerate(errors):
        if error < errors[best] * (1 - _TIE):
            best = index
    return best
