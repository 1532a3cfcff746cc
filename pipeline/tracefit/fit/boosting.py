"""Gradient boosting by least squares: small trees on binned features, each fitted to what those before it leave (Friedman 2001).

Trees grow at the leaf with the largest gain first, over histograms of at most 255 bins per feature, as in LightGBM and in
scikit-learn's `HistGradientBoostingRegressor`, whose predictions these are. That library alone takes longer to import than the fits of
a run, and a hundred MB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from tracefit.statistics import Integers, Matrix, Vector

TREES = 50
LEAVES = 8
_RATE = 0.2
"""Share of what a tree finds that is added to the prediction."""
_FEWEST = 20
"""Rows of a leaf."""
_MOST_BINS = 255
_LEAST_GAIN = 1e-12
"""Gain over that of no split, below which rounding decides."""


def boosted(features: Matrix, y: Vector, evaluated: Matrix) -> Vector:
    """Fit trees, and return their predictions for other rows, shape (m,).

    Args:
        features: Shape (n, k); unknown is NaN, and counts as above all known values.
        y: The values to fit, shape (n,).
        evaluated: Features of the other rows, shape (m, k).
    """
    edges = [_edges(column) for column in features.T]
    binned, asked = (
        np.column_stack([np.searchsorted(e, c) for e, c in zip(edges, columns.T, strict=True)])
        for columns in (features, evaluated)
    )
    grower = _Grower(binned, 1 + max(map(len, edges)))
    mean = float(y.mean())
    fitted, predicted = np.full(len(y), mean), np.full(len(evaluated), mean)
    for _ in range(TREES):
        tree = grower.tree(y - fitted)
        for leaf in tree.leaves:
            fitted[leaf.rows] += _RATE * leaf.mean
        predicted += _RATE * tree.predict(asked)
    return predicted


def _edges(column: Vector) -> Vector:
    """Return the upper ends of all bins but the last: between values, or those of equal parts of the rows if the values are many."""
    known = column[~np.isnan(column)]
    values = np.unique(known)
    if len(values) <= _MOST_BINS:
        ends = (values[1:] + values[:-1]) / 2
    else:
        percents = np.linspace(0, 100, _MOST_BINS + 1)[1:-1]
        ends = np.unique(np.percentile(known, percents, method="averaged_inverted_cdf"))
    # Unknown values have a bin of their own.
    return ends if len(known) == len(column) else np.append(ends, np.inf)


class _Split(NamedTuple):
    """The best split of a leaf: rows with at most this bin of a feature, and the others."""

    gain: float
    feature: int
    bin: int


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
    """A tree by its leaves in the order they were made: a split leaves its lower part at the leaf's place, and appends the upper one."""

    splits: list[tuple[int, _Split]]
    leaves: list[_Leaf]

    def predict(self, binned: Integers) -> Vector:
        """Return the leaves' means, shape (m,)."""
        at = np.zeros(len(binned), dtype=np.int64)
        for new, (place, split) in enumerate(self.splits, 1):
            at[(at == place) & (binned[:, split.feature] > split.bin)] = new
        return np.array([leaf.mean for leaf in self.leaves])[at]


class _Grower:
    """The binned rows that all trees are fitted to."""

    def __init__(self, binned: Integers, bins: int) -> None:
        self._columns, self._bins = list(np.ascontiguousarray(binned.T)), bins
        self._every = np.arange(len(binned))
        self._counts = self._histogram(self._every, None)

    def tree(self, residual: Vector) -> _Tree:
        """Fit one tree to what is left, shape (n,)."""
        sums = self._histogram(self._every, residual)
        leaves, splits = [self._leaf(self._every, self._counts, sums)], list[tuple[int, _Split]]()
        while len(leaves) < LEAVES:
            place = max(range(len(leaves)), key=lambda k: leaves[k].best.gain)
            parent = leaves[place]
            if parent.best.gain <= 0:
                break
            splits.append((place, parent.best))
            is_upper = self._columns[parent.best.feature][parent.rows] > parent.best.bin
            parts = [parent.rows[~is_upper], parent.rows[is_upper]]
            # The histogram of the larger part is what the smaller one leaves.
            small = int(len(parts[1]) < len(parts[0]))
            counts, sums = (self._histogram(parts[small], values) for values in (None, residual))
            both = [self._leaf(parts[small], counts, sums)]
            both.insert(1 - small, self._leaf(parts[1 - small], parent.counts - counts, parent.sums - sums))
            leaves[place] = both[0]
            leaves.append(both[1])
        return _Tree(splits, leaves)

    def _histogram(self, rows: Integers, values: Vector | None) -> Matrix:
        """Return the sum of values per feature and bin, or the number of rows, shape (k, bins)."""
        weights = None if values is None else values[rows]
        return np.array([np.bincount(column[rows], weights, self._bins) for column in self._columns])

    def _leaf(self, rows: Integers, counts: Matrix, sums: Matrix) -> _Leaf:
        total, count = float(sums[0].sum()), len(rows)
        below, left = counts.cumsum(axis=1), sums.cumsum(axis=1)
        above = count - below
        with np.errstate(all="ignore"):
            gain = left**2 / below + (total - left) ** 2 / above - total**2 / count
        gain[(below < _FEWEST) | (above < _FEWEST)] = 0.0
        at = int(gain.argmax())
        most = float(gain.flat[at])
        scale = _LEAST_GAIN * float(total**2 / count)
        best = _Split(most if most > scale else 0.0, *divmod(at, self._bins))
        return _Leaf(rows, total / count, counts, sums, best)
