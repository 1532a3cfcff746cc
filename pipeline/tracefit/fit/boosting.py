"""Gradient boosting by least squares: small trees on binned features, each fitted to what those before it leave
(Friedman 2001).

Trees grow at the leaf with the largest gain first, over histograms of at most 63 bins per feature, as in LightGBM and
in scikit-learn's `HistGradientBoostingRegressor`, whose predictions these are. That library alone takes longer to
import than the fits of a run, and a hundred MB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from tracefit.statistics import Flags, Integers, Matrix, Vector

TREES = 30
LEAVES = 8
LEARNING_RATE = 0.3
"""Share of what a tree finds that is added to the prediction."""
_FEWEST_IN_LEAF = 20
"""Rows of a leaf."""
MOST_BINS = 63
_LEAST_GAIN = 1e-12
"""Gain over that of no split, below which rounding decides."""


def boosted(features: Matrix, y: Vector, evaluated: Matrix) -> Vector:
    """Fit trees, and return their predictions for other rows, shape (m,).

    Args:
        features: Shape (n, k); unknown is NaN, and falls on the side of a split that fits it best.
        y: The values to fit, shape (n,).
        evaluated: Features of the other rows, shape (m, k).
    """
    edges = [_edges(column) for column in features.T]
    unknown = 1 + max(map(len, edges))
    binned, asked = (
        [
            np.where(np.isnan(column), unknown, np.searchsorted(ends, column))
            for ends, column in zip(edges, rows.T, strict=True)
        ]
        for rows in (features, evaluated)
    )
    grower = _Grower(binned, unknown)
    mean = float(y.mean())
    fitted, predicted = np.full(len(y), mean), np.full(len(evaluated), mean)
    for _ in range(TREES):
        tree = grower.tree(y - fitted)
        for leaf in tree.leaves:
            fitted[leaf.rows] += LEARNING_RATE * leaf.mean
        predicted += LEARNING_RATE * tree.predict(asked)
    return predicted


def _edges(column: Vector) -> Vector:
    """Return the upper ends of all bins but the last: between values, or those of equal parts of the rows if the values
    are many.
    """
    known = column[~np.isnan(column)]
    values = np.unique(known)
    if len(values) <= MOST_BINS:
        return np.asarray((values[1:] + values[:-1]) / 2)
    percents = np.linspace(0, 100, MOST_BINS + 1)[1:-1]
    return np.unique(np.percentile(known, percents, method="averaged_inverted_cdf"))


class _Split(NamedTuple):
    """The best split of a leaf: rows with at most this bin of a feature, perhaps those where it is unknown, and the
    others.
    """

    gain: float
    feature: int
    bin: int
    unknown: int
    """Bin of unknown values, if they are with the lower ones; else -1."""

    def upper(self, bins: Integers) -> Flags:
        """Return which rows are above, by their bins of the feature."""
        is_upper: Flags = bins > self.bin
        return is_upper if self.unknown < 0 else is_upper & (bins != self.unknown)


_NO_SPLIT = _Split(0.0, 0, 0, -1)


class _Leaf(NamedTuple):
    """Rows of a leaf, and the mean in them."""

    rows: Integers
    mean: float
    counts: Matrix
    """Rows per feature and bin, shape (k, bins)."""
    sums: Matrix
    """Sums of what is fitted, of the same shape."""
    best: _Split


class _Tree(NamedTuple):
    """A tree by its leaves in the order they were made: a split leaves its lower part at the leaf's place, and appends
    the upper one.
    """

    splits: list[tuple[int, _Split]]
    leaves: list[_Leaf]

    def predict(self, binned: list[Integers]) -> Vector:
        """Return the leaves' means, shape (m,)."""
        at = np.zeros(len(binned[0]), dtype=np.int64)
        for new, (position, split) in enumerate(self.splits, 1):
            at[(at == position) & split.upper(binned[split.feature])] = new
        return np.array([leaf.mean for leaf in self.leaves])[at]


class _Grower:
    """The binned rows that all trees are fitted to."""

    def __init__(self, binned: list[Integers], unknown: int) -> None:
        """Take the bins of each feature, shape (n,); the last one is of unknown values."""
        self._columns, self._unknown = binned, unknown
        self._every = np.arange(len(binned[0]))
        self._counts = self._histogram(self._every, None)
        self._has_unknown = self._counts[:, -1:] > 0

    def tree(self, residual: Vector) -> _Tree:
        """Fit one tree to what is left, shape (n,)."""
        sums = self._histogram(self._every, residual)
        leaves, splits = [self._leaf(self._every, self._counts, sums)], list[tuple[int, _Split]]()
        while len(leaves) < LEAVES:
            position = max(range(len(leaves)), key=lambda k: leaves[k].best.gain)
            parent = leaves[position]
            if parent.best.gain <= 0:
                break
            splits.append((position, parent.best))
            is_upper = parent.best.upper(self._columns[parent.best.feature][parent.rows])
            parts = [parent.rows[~is_upper], parent.rows[is_upper]]
            leaves[position : position + 1], more = self._parts(
                parent, parts, residual, is_last=len(leaves) == LEAVES - 1
            )
            leaves += more
        return _Tree(splits, leaves)

    def _parts(
        self, parent: _Leaf, parts: list[Integers], residual: Vector, *, is_last: bool
    ) -> tuple[list[_Leaf], list[_Leaf]]:
        """Return the lower and the upper leaf of a split."""
        if is_last or max(map(len, parts)) < 2 * _FEWEST_IN_LEAF:
            # None of them is split.
            lower, upper = (
                _Leaf(rows, float(residual[rows].mean()), parent.counts, parent.sums, _NO_SPLIT) for rows in parts
            )
            return [lower], [upper]
        # The histogram of the larger part is what the smaller one leaves.
        small = int(len(parts[1]) < len(parts[0]))
        counts, sums = (self._histogram(parts[small], values) for values in (None, residual))
        both = [self._leaf(parts[small], counts, sums)]
        both.insert(1 - small, self._leaf(parts[1 - small], parent.counts - counts, parent.sums - sums))
        return both[:1], both[1:]

    def _histogram(self, rows: Integers, values: Vector | None) -> Matrix:
        """Return the sum of values per feature and bin, or the number of rows, shape (k, bins)."""
        weights = None if values is None else values[rows]
        return np.array([np.bincount(column[rows], weights, self._unknown + 1) for column in self._columns])

    def _leaf(self, rows: Integers, counts: Matrix, sums: Matrix) -> _Leaf:
        total, count = float(sums[0].sum()), len(rows)
        if count < 2 * _FEWEST_IN_LEAF:
            return _Leaf(rows, total / count, counts, sums, _NO_SPLIT)
        below, left = counts[:, :-1].cumsum(axis=1), sums[:, :-1].cumsum(axis=1)
        gains = [self._gains(below, left, total, count)]
        if self._has_unknown.any():
            # Unknown values on the lower side; of equal splits the last one, as the library takes it.
            with_unknown = self._gains(below + counts[:, -1:], left + sums[:, -1:], total, count)
            gains.append(np.where(self._has_unknown, with_unknown, 0.0)[:, ::-1])
        side, feature, end = np.unravel_index(np.argmax(gains), (len(gains), *below.shape))
        most = float(gains[side][feature, end])
        end = below.shape[1] - 1 - end if side else end
        if most <= _LEAST_GAIN * total**2 / count:
            most = 0.0
        # Where a feature is unknown in no row, a row to predict in which it is goes with the most.
        goes_low = side or not (self._has_unknown[feature, 0] or 2 * below[feature, end] <= count)
        best = _Split(most, int(feature), int(end), self._unknown if goes_low else -1)
        return _Leaf(rows, total / count, counts, sums, best)

    def _gains(self, below: Matrix, left: Matrix, total: float, count: int) -> Matrix:
        """Return by how much a split after each bin lowers the squares, shape (k, bins); 0 where it leaves too few
        rows.
        """
        above = count - below
        right = total - left
        gains = left * left / np.maximum(below, 1) + right * right / np.maximum(above, 1) - total**2 / count
        return np.where(np.minimum(below, above) < _FEWEST_IN_LEAF, 0.0, gains)
