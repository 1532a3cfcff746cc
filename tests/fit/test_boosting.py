"""Gradient boosting beside scikit-learn's."""

from __future__ import annotations

import numpy as np
import pytest
import sklearn
from sklearn.ensemble import HistGradientBoostingRegressor
from threadpoolctl import threadpool_limits

from tracefit.fit.boosting import LEARNING_RATE, LEAVES, MOST_BINS, TREES, boosted


def _expected(features, y, evaluated):
    library = HistGradientBoostingRegressor(
        max_iter=TREES,
        learning_rate=LEARNING_RATE,
        max_leaf_nodes=LEAVES,
        max_bins=MOST_BINS,
        early_stopping=False,
        random_state=0,
    )
    with threadpool_limits(1):
        return library.fit(features, y).predict(evaluated)


SAME_BINS = pytest.mark.skipif(
    tuple(map(int, sklearn.__version__.split(".")[:2])) < (1, 9),
    reason="older versions of scikit-learn cut the values of a feature with more of them than bins elsewhere",
)


@pytest.mark.parametrize(("rows", "step"), [(90, 10.0), (400, 1.0), pytest.param(900, 0.0, marks=SAME_BINS)])
def test_predictions_are_those_of_scikit_learn(rows, step):
    """Few values of a feature, a bin for each, and more values than bins."""
    rng = np.random.default_rng(rows)
    x = rng.gamma(1.0, 100.0, (rows, 3))
    x = np.floor(x / step) if step else x
    x[:, 1] = 7.0
    y = np.log(1000 + 3 * x[:, 0] + 5 * x[:, 2] * (x[:, 0] > np.median(x[:, 0])) + rng.standard_normal(rows))
    train = 2 * rows // 3
    found = boosted(x[:train], y[:train], x[train:])
    assert found == pytest.approx(_expected(x[:train], y[:train], x[train:]), rel=1e-7)
    assert np.ptp(found) > 0.1


@SAME_BINS
def test_unknown_values_go_where_they_fit_best_as_in_scikit_learn():
    """In the recording, above a line, below it, or only in rows to predict."""
    rng = np.random.default_rng(3)
    x = rng.gamma(1.0, 100.0, (600, 3))
    y = np.log(1000 + 3 * x[:, 0] + 9 * x[:, 1] + 10 * x[:, 2])
    x[rng.random(600) < 0.2, 0] = np.nan
    x[x[:, 1] < 30, 1] = np.nan
    x[550:, 2] = np.nan
    found = boosted(x[:400], y[:400], x[400:])
    assert found == pytest.approx(_expected(x[:400], y[:400], x[400:]), rel=1e-7)


def test_too_few_rows_to_split_give_the_mean():
    x, y = np.arange(30.0)[:, None], np.arange(30.0)
    assert boosted(x, y, np.array([[3.0], [99.0]])) == pytest.approx([14.5, 14.5])
