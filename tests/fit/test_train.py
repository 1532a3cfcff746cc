"""Fitting one model on a frame and measuring it on its hold-out."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from msgspec.structs import replace
from sklearn.ensemble import HistGradientBoostingRegressor
from threadpoolctl import threadpool_limits

from tracefit.features.sets import Feature
from tracefit.fit import splits
from tracefit.fit.fitted import ANY_SIGN, NON_NEGATIVE, FitOptions, LinearFit, TooFewRows
from tracefit.fit.train import fit_linear

FEATURES = [Feature("prefill", "token", "prefill"), Feature("decode", "token", "decode")]
ONE_PENALTY = (("ridge", 1e-8),)
"""Spares these tests the search for a penalty, which has tests of its own."""

QUICK = FitOptions(reference=False, penalties=ONE_PENALTY)


def _frame(n=300, *, seed=0, **columns):
    """y = 2000 + 10 prefill + 50 decode, one row per microsecond, split by time."""
    rng = np.random.default_rng(seed)
    prefill, decode = rng.integers(0, 200, n), rng.integers(1, 30, n)
    frame = pl.DataFrame(
        {
            "run_id": "r",
            "server": "s",
            "ts_ns": np.arange(n) * 1000,
            "prefill": prefill,
            "decode": decode,
            "y": 2000 + 10 * prefill + 50 * decode + rng.normal(0, 20, n),
            "excluded_reason": None,
        },
        schema_overrides={"excluded_reason": pl.String},
    )
    return splits.split_by_time(frame.with_columns(**columns))


def _spoiled(frame, rows, factor=10.0):
    return frame.with_columns(
        y=pl.when(pl.col("ts_ns").is_in([r * 1000 for r in rows])).then(pl.col("y") * factor).otherwise("y")
    )


def _fit(frame, features=FEATURES, options=QUICK) -> LinearFit:
    fitted = fit_linear(frame, features, options)
    assert isinstance(fitted, LinearFit)
    return fitted


def _values(fitted):
    return {term.feature: term.value for term in fitted.terms}


def test_coefficients_and_counts():
    fitted = _fit(_frame())
    assert fitted.regimes[0].intercept.value == pytest.approx(2000, rel=0.01)
    assert _values(fitted) == pytest.approx({"prefill": 10, "decode": 50}, rel=0.02)
    assert (fitted.rows_train, fitted.rows_used, fitted.rows_holdout) == (210, 210, 90)


def test_the_training_range_is_that_of_the_training_rows():
    frame = _frame()
    train = frame.head(210)
    terms = {t.feature: t.training_range for t in _fit(frame).terms}
    assert terms["prefill"] == (train["prefill"].min(), train["prefill"].max())


def test_outliers_leave_the_training_part_only():
    frame = _spoiled(_frame(), [5, 50, 250])
    fitted = _fit(frame)
    marked = fitted.rows.filter(excluded_reason="outlier")
    assert marked["ts_ns"].to_list() == [5000, 50_000]
    assert (fitted.rows_used, fitted.rows_holdout) == (208, 90)


def test_the_hold_out_keeps_its_hiccups():
    """One row of 90 is ten times its true value: its error alone is at least 9 times 2,050 / 90 rows."""
    clean, hiccup = (_fit(f).validation.holdout for f in (_frame(), _spoiled(_frame(), [250])))
    assert hiccup.n == clean.n == 90
    assert hiccup.mae - clean.mae > 9 * 2050 / 90


def test_a_tail_that_is_the_signal_stays():
    fitted = _fit(_spoiled(_frame(), [5, 50]), options=replace(QUICK, drop_outliers=False))
    assert fitted.rows_used == 210
    assert fitted.rows["excluded_reason"].null_count() == 300


def test_gaps_leave_both_parts():
    gaps = pl.when(pl.col("ts_ns") % 10_000 == 0).then(pl.lit("idle_gap"))
    frame = _frame().drop("split", "holdout_from_ns").with_columns(excluded_reason=gaps)
    fitted = _fit(splits.split_by_time(frame))
    assert fitted.rows_used + fitted.rows_holdout == 270


def test_the_baseline_is_the_training_median():
    frame = _frame()
    holdout, median = frame.tail(90)["y"].to_numpy(), np.median(frame.head(210)["y"])
    validation = _fit(frame).validation
    assert validation.baseline.mae == pytest.approx(np.abs(holdout - median).mean())
    assert validation.skill == pytest.approx(1 - validation.holdout.mae / validation.baseline.mae)


def test_the_reference_is_gradient_boosting_on_the_same_rows():
    # As many training rows as bins: older versions of scikit-learn cut more values elsewhere.
    frame = _frame(90)
    x, y = frame.select("prefill").to_numpy().astype(float), frame["y"].to_numpy()
    boosted = HistGradientBoostingRegressor(
        max_iter=30, learning_rate=0.3, max_leaf_nodes=8, max_bins=63, early_stopping=False, random_state=0
    )
    with threadpool_limits(1):
        expected = np.abs(np.exp(boosted.fit(x[:63], np.log(y[:63])).predict(x[63:])) - y[63:]).mean()
    reference = _fit(frame, FEATURES[:1], FitOptions(penalties=ONE_PENALTY)).validation.gradient_boosting
    assert reference.mae == pytest.approx(expected)


def test_errors_are_given_for_groups_of_held_out_rows():
    small = pl.col("prefill") < 100
    options = FitOptions(
        penalties=ONE_PENALTY,
        groups=(("small", small), ("large", ~small), ("none", pl.col("decode") > 99)),
        reference=False,
    )
    frame = _frame()
    by = _fit(frame, options=options).validation.by_group
    assert {name: m.n for name, m in by.items()} == {
        "small": frame.tail(90).filter(small).height,
        "large": frame.tail(90).filter(~small).height,
    }


def test_predictions_below_zero_are_measured_as_zero():
    """y falls from 700 to 0 on the training part; a line through it is below zero on the hold-out, where y is 1."""
    frame = _frame(100).with_columns(prefill=pl.int_range(100))
    frame = frame.with_columns(y=pl.when(split="train").then(700.0 - 10 * pl.col("prefill")).otherwise(1.0))
    fitted = _fit(frame, FEATURES[:1])
    assert fitted.validation.holdout.mae == pytest.approx(1.0, abs=0.01)
    assert fitted.validation.extrapolated_rows == 30


def test_extrapolated_rows_are_counted_by_feature():
    is_held_out = pl.col("split") == "holdout"
    far = {
        "prefill": pl.col("ts_ns") == 250_000,
        "decode": pl.col("ts_ns").is_in([250_000, 260_000, 270_000]),
    }
    frame = _frame().with_columns(
        pl.when(is_held_out & rows).then(-5).otherwise(name).alias(name) for name, rows in far.items()
    )
    validation = _fit(frame).validation
    assert validation.extrapolated_rows == 3
    assert validation.extrapolated == {"prefill": 1, "decode": 3}


def test_a_prediction_interval_includes_the_outliers():
    """One row in twenty takes ten times as long: no 95 % interval may end below it, though none of them trained."""
    rows = range(7, 300, 20)
    fitted = _fit(_spoiled(_frame(), rows))
    assert fitted.rows_used < 210
    assert fitted.regimes[0].prediction_interval.high > 9
    assert fitted.validation.interval_coverage_pct > 97


def test_prediction_intervals_are_of_the_evaluated_rows():
    """Rows of kind 1 have ten times the noise."""
    kind = pl.int_range(300) % 2
    noise = pl.Series(np.random.default_rng(7).normal(0, 200, 300))
    frame = _frame(kind=kind).with_columns(y=pl.col("y") + kind * noise)
    quiet, loud = (
        _fit(frame, options=replace(QUICK, eval_filter=pl.col("kind") == k)).regimes[0].prediction_interval
        for k in (0, 1)
    )
    assert (loud.high - loud.low) > 4 * (quiet.high - quiet.low)


def test_a_feature_that_is_mostly_unknown_is_left_out():
    fitted = _fit(_frame(decode=pl.lit(None, pl.Int64)))
    assert _values(fitted).keys() == {"prefill"}
    assert [(x.feature, x.reason) for x in fitted.features_left_out] == [("decode", "not known in these runs")]


def test_a_share_of_unknown_values_says_how_large():
    unknown = pl.when(pl.col("ts_ns") % 10_000 != 0).then("decode")
    fitted = _fit(_frame(decode=unknown))
    assert [(x.feature, x.reason) for x in fitted.features_left_out] == [("decode", "not known on 10 % of the rows")]


def test_a_few_unknown_values_cost_training_rows_only():
    unknown = pl.when(~pl.col("ts_ns").is_in([5000, 6000, 250_000])).then("decode")
    fitted = _fit(_frame(decode=unknown))
    assert _values(fitted) == pytest.approx({"prefill": 10, "decode": 50}, rel=0.02)
    assert fitted.rows.filter(excluded_reason="unknown_features")["ts_ns"].to_list() == [5000, 6000]
    assert fitted.rows_holdout == 90


def test_held_out_rows_with_unknown_features_are_left_out():
    unknown = pl.when(~pl.col("ts_ns").is_in([5000, 250_000])).then("decode")
    fitted = _fit(_frame(decode=unknown), options=replace(QUICK, fill_unknown=False))
    assert fitted.rows.filter(excluded_reason="unknown_features")["ts_ns"].to_list() == [5000, 250_000]
    assert fitted.rows_holdout == 89


def test_without_features_the_line_is_the_training_median():
    """Some waits are very long: the model is no better and no worse than the baseline."""
    waits = pl.Series("y", np.random.default_rng(3).lognormal(5, 1.5, 300))
    fitted = _fit(_frame(y=waits), [], replace(QUICK, drop_outliers=False))
    assert fitted.regimes[0].intercept.value == fitted.rows.filter(split="train")["y"].median()
    assert fitted.validation.skill == 0


def test_a_feature_the_lasso_emptied_is_named():
    noise = np.random.default_rng(5).standard_normal(300)
    lasso = replace(QUICK, penalties=(("lasso", 0.5),))
    fitted = _fit(_frame(noise=noise), [*FEATURES, Feature("noise", "1", "noise")], lasso)
    assert ("noise", "set to zero by the Lasso") in [(x.feature, x.reason) for x in fitted.features_left_out]
    assert "prefill" in _values(fitted)


def test_costs_that_can_only_add_are_not_below_zero():
    frame = _frame().with_columns(y=pl.col("y") - 60 * pl.col("decode"))
    free, bound = (_fit(frame, options=replace(QUICK, signs=s)) for s in (ANY_SIGN, NON_NEGATIVE))
    assert _values(free)["decode"] < 0
    assert _values(bound).keys() == {"prefill"}
    assert [(x.feature, x.reason) for x in bound.features_left_out] == [
        ("decode", "its coefficient is not above zero in these runs")
    ]


@pytest.mark.parametrize(("rows", "reason"), [(41, "29 training and 12"), (13, "10 training and 3")])
def test_too_few_rows_say_how_many_and_how_many_are_needed(rows, reason):
    result = fit_linear(_frame(rows), FEATURES, QUICK)
    assert isinstance(result, TooFewRows)
    assert result.reason == f"{reason} held-out rows, 30 and 10 are needed"


def test_thirty_training_rows_are_enough():
    assert _fit(_frame(42)).rows_used == 30


def test_two_runs_are_one_model_split_each_by_its_own_time():
    late = _frame(seed=1).with_columns(run_id=pl.lit("q"), ts_ns=pl.col("ts_ns") + 10**15)
    both = pl.concat([_frame(), late]).drop("split", "holdout_from_ns")
    fitted = _fit(splits.split_by_time(both))
    assert (fitted.rows_used, fitted.rows_holdout) == (420, 180)


def test_a_fit_without_features_is_a_level():
    fitted = _fit(_frame(), [])
    assert fitted.terms == ()
    assert fitted.regimes[0].intercept.value == pytest.approx(_frame().head(210)["y"].mean(), rel=0.02)
