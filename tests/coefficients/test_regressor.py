"""`Models.as_sklearn`: scikit-learn's contract of a regressor, on the small server of conftest.py."""

from __future__ import annotations

import doctest
import json
import warnings

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from sklearn.base import clone, is_regressor
from sklearn.metrics import mean_absolute_error
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import estimator_checks_generator
from sklearn.utils.validation import check_is_fitted

import tracefit
from tracefit.coefficients import regressor as module

COLUMNS = ["context_tokens", "decode_tokens", "num_decode_reqs", "prefill_tokens"]
ROWS = np.array([[120.0, 4, 4, 0], [120, 4, 4, 40], [0, 0, 0, 50]])
# 1,000 + 10 * prefill + 50 * decode + 0.5 * context + 100 * prefill share
TIMES = [1260.0, 1660 + 100 * 40 / 44, 1600]

OF_FITTING = {
    "check_all_zero_sample_weights_error",  # nothing is weighted
    "check_sample_weights_shape",
    "check_fit2d_1sample",  # nothing is fitted: one row will do
    "check_n_features_in",  # known before `fit`
    "check_regressors_train",  # wants r2 of what it made up above 0.5
    "check_supervised_y_2d",  # y is not looked at
}
"""Checks that hold for what learns from X and y, and not for a file of coefficients."""


@pytest.fixture
def regressor(small):
    return tracefit.load(small).as_sklearn()


def test_rows_of_an_array_are_predicted_by_columns_in_their_order(regressor):
    assert list(regressor.feature_names_in_) == COLUMNS
    assert regressor.n_features_in_ == 4
    assert regressor.predict(ROWS).tolist() == pytest.approx(TIMES)


@pytest.mark.parametrize(
    "frame", [pl.DataFrame, pa.table, lambda c: pytest.importorskip("pandas").DataFrame(c, index=[3, 3, 1])]
)
def test_rows_of_a_frame_are_predicted_by_name(regressor, frame):
    columns = dict(zip(COLUMNS, ROWS.T, strict=True))
    reordered = frame({"other": ["a", "b", "c"], **dict(reversed(columns.items()))})
    assert regressor.predict(reordered).tolist() == pytest.approx(TIMES)


def test_columns_of_x_can_be_chosen(small):
    """Features of the model in place of the columns behind them."""
    names = ["num_decode_reqs", "context_tokens", "prefill_tokens", "prefill_share"]
    regressor = tracefit.load(small).as_sklearn(features=names)
    assert regressor.predict([[4, 120, 40, 0.5]]).tolist() == [1710]


def test_what_is_no_x_of_the_model_is_refused(regressor):
    with pytest.raises(tracefit.UsageError, match=r"no column prefill_tokens, which beta\.cycle_time needs"):
        regressor.predict(pl.DataFrame(ROWS[:, :3], schema=COLUMNS[:3]))
    with pytest.raises(ValueError, match="X has 3 features, but LatencyRegressor is expecting 4"):
        regressor.predict(ROWS[:, :3])
    with pytest.raises(ValueError, match="NaN"):
        regressor.predict(np.where(ROWS == 50, np.nan, ROWS))


def test_a_model_that_is_not_there_is_refused(small):
    with pytest.raises(tracefit.UsageError, match=r"no model beta\.other"):
        tracefit.load(small).as_sklearn("beta.other")


def test_it_goes_into_pipelines_metrics_and_cross_validation(regressor):
    check_is_fitted(regressor)
    assert is_regressor(regressor)
    assert mean_absolute_error(TIMES, regressor.predict(ROWS)) == pytest.approx(0)
    pipeline = make_pipeline(FunctionTransformer(), regressor).fit(ROWS, TIMES)
    assert pipeline.predict(ROWS).tolist() == pytest.approx(TIMES)
    scores = cross_val_score(
        regressor, ROWS, np.add(TIMES, [3, 6, 9]), cv=3, scoring="neg_mean_absolute_error"
    )
    assert scores.tolist() == pytest.approx([-3, -6, -9]), "nothing is learned from the other folds"


def test_a_clone_has_the_same_parameters_and_predicts_the_same(regressor):
    copy = clone(regressor)
    assert copy is not regressor
    assert copy.get_params() == regressor.get_params()
    assert copy.predict(ROWS).tolist() == pytest.approx(TIMES)
    assert copy.set_params(features=["prefill_tokens"]).n_features_in_ == 1


def test_every_model_of_a_training_predicts_from_its_training_table(trained):
    models = tracefit.load(trained)
    for kind in ("alpha", "beta"):
        rows = tracefit.scan(trained, f"{kind}_training").collect()
        for model in (m for file in models.files for m in file.models if m.name.startswith(kind)):
            regressor = models.as_sklearn(model.name)
            own = rows.filter(target=model.name.removeprefix("alpha.")) if kind == "alpha" else rows
            own = own.filter(pl.col("excluded_reason").is_null())
            assert own.height > 20
            assert np.isfinite(regressor.predict(own)).all()


@pytest.mark.slow
def test_scikit_learns_own_checks_hold(small, parts):
    """Each check makes an X of its own width: it has to hold for that one."""
    step = parts["step"] | {"terms": parts["step"]["terms"][:1]}
    (small / "beta.json").write_text(json.dumps(parts["document"]("beta", step)))
    models = tracefit.load(small)
    passed, failed = set(), {}
    for width in (1, 2, 3, 4, 5, 10, 30):
        columns = ["prefill_tokens", *(f"other_{n}" for n in range(1, width))]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for estimator, check in estimator_checks_generator(models.as_sklearn(features=columns)):
                name = getattr(check, "func", check).__name__
                try:
                    check(estimator)
                    passed.add(name)
                except Exception as error:  # noqa: BLE001 - a check says by any exception that it does not hold
                    if type(error).__name__ != "SkipTest":
                        failed[name] = f"{width}: {error}"
    missed = {name: text for name, text in failed.items() if name not in passed}
    assert missed.keys() <= OF_FITTING, missed
    assert len(passed) > 40


def test_the_example_of_the_docstring_holds():
    found = doctest.testmod(module)
    assert (found.failed, found.attempted) == (0, 6)
