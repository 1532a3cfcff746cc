"""Models by regimes: a condition selects the line that predicts a row."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from tracefit.features.sets import BUILT_IN, Feature
from tracefit.fit import splits
from tracefit.fit.alpha import ALPHA_FORMS
from tracefit.fit.fitted import (
    FitOptions,
    LinearFit,
    RegimeRows,
    TooFewRows,
    predict_regimes,
)
from tracefit.fit.train import fit_regimes
from tracefit.models.schema import NO_CONDITION, Comparison, Condition

SLOPE = (Feature("ahead", "request", "ahead"),)
NO_SLOT = Condition(any=(Comparison(feature="slots", op="<=", value=0.0),))
REGIMES = [RegimeRows("queued", SLOPE, NO_SLOT), RegimeRows("free", SLOPE)]


def _frame(n=400, *, full=0.5, wrong=0):
    """A wait of 5,000 + 100 per request ahead without a slot, of 200 with one; the last `wrong` rows lie about
    slots."""
    rng = np.random.default_rng(0)
    queued, ahead = rng.random(n) < full, rng.integers(0, 50, n)
    condition = np.where(np.arange(n) >= n - wrong, ~queued, queued)
    columns = {
        "run_id": "r",
        "server": "s",
        "ts_ns": np.arange(n) * 1000,
        "ahead": ahead,
        "slots": np.where(condition, 0.0, 3.0),
        "queued": queued,
        "y": np.where(queued, 5000.0 + 100 * ahead, 200.0),
        "excluded_reason": None,
    }
    return splits.split_by_time(pl.DataFrame(columns, schema_overrides={"excluded_reason": pl.String}))


def _fit(frame, regimes=REGIMES) -> LinearFit:
    options = FitOptions(drop_outliers=False, reference=False, penalties=(("ridge", 1e-10),), label=pl.col("queued"))
    fitted = fit_regimes(frame, list(regimes), options)
    assert isinstance(fitted, LinearFit)
    return fitted


def test_each_regime_has_its_own_line():
    queued, free = _fit(_frame()).regimes
    assert (queued.regime.name, free.regime.name) == ("queued", "free")
    assert queued.intercept.value == pytest.approx(5000, rel=1e-3)
    assert queued.terms[0].value == pytest.approx(100, rel=1e-3)
    assert free.intercept.value == pytest.approx(200, rel=1e-3)
    assert queued.rows_used + free.rows_used == 280


def test_the_first_condition_that_holds_predicts():
    parts = _fit(_frame()).regimes
    rows = pl.DataFrame({"slots": [0.0, 1.0, -2.0, None], "ahead": [10, 10, 20, 10]})
    assert predict_regimes(parts, rows) == pytest.approx([6000, 200, 7000, 200], rel=1e-2)


def test_a_regime_with_too_few_rows_leaves_them_to_the_next():
    fitted = _fit(_frame(full=0.05))
    assert [(p.regime.name, p.rows_used) for p in fitted.regimes] == [("free", 280)]


def test_the_only_fitted_regime_predicts_all_rows():
    fitted = _fit(_frame(full=0.97))
    assert [p.regime.name for p in fitted.regimes] == ["queued"]
    assert fitted.regimes[0].regime.when == NO_CONDITION


def test_the_classifier_compares_the_condition_with_the_label():
    """Of 120 held-out rows the last 20 say the opposite of the truth."""
    holdout = _frame(wrong=20).filter(split="holdout")
    hit = holdout.with_columns(condition=pl.col("slots") <= 0).select("queued", "condition")
    counts = {pair: hit.filter(queued=pair[0], condition=pair[1]).height for pair in [(True, True), (True, False)]}
    classifier = _fit(_frame(wrong=20)).validation.classifier
    assert (classifier.confusion["true_positive"], classifier.confusion["false_negative"]) == (
        counts[True, True],
        counts[True, False],
    )
    assert classifier.confusion["false_negative"] + classifier.confusion["false_positive"] == 20
    positives, negatives = hit["queued"].sum(), (~hit["queued"]).sum()
    rates = (
        classifier.confusion["true_positive"] / positives,
        classifier.confusion["true_negative"] / negatives,
    )
    assert classifier.balanced_accuracy == pytest.approx(sum(rates) / 2)


def test_a_row_without_a_label_is_no_hit_and_no_miss():
    """Of 120 held-out rows the last 15 do not say whether they were queued."""
    unsure = pl.when(pl.col("ts_ns") < 385_000).then("queued")
    classifier = _fit(_frame().with_columns(queued=unsure)).validation.classifier
    assert (classifier.confusion["false_positive"], classifier.confusion["false_negative"]) == (0, 0)
    assert classifier.confusion["true_positive"] + classifier.confusion["true_negative"] == 105


def test_waits_for_room_and_for_prompts_have_their_own_lines():
    """Room comes at 2 ms per output token ahead, the turn of a prompt at 0.1 ms per prompt token ahead; else 0.2 ms
    pass."""
    rng, n = np.random.default_rng(1), 600
    ahead, tokens, need = rng.integers(0, 9_000, n), rng.integers(0, 9_000, n), rng.integers(0, 4, n)
    columns = {
        "free_slots": np.where(need == 0, 0, 5),
        "free_tokens": np.where(need < 2, -100, 100),
        "block_demand": np.where(need == 3, 9, 1),
        "kv_blocks_free": 4,
        "outputs_ahead": ahead,
        "running_remaining_tokens": 0,
        "tokens_ahead": tokens,
        "prompt_tokens": 100,
        "running_depth": 1,
        "y": np.select([(need == 0) | (need == 3), need == 1], [2_000.0 * ahead, 100.0 * tokens], 200.0),
        "queued": need != 2,
    }
    regimes = ALPHA_FORMS["regimes"](BUILT_IN["queue"].features, True)
    frame = _frame(n).with_columns(**{k: pl.lit(pl.Series(k, np.broadcast_to(v, n))) for k, v in columns.items()})
    fitted = _fit(frame, regimes)
    values = [(p.regime.name, {t.feature: t.value for t in p.terms}) for p in fitted.regimes]
    assert values == [
        ("queued", {"outputs_ahead": pytest.approx(2_000, rel=0.01)}),
        ("prompts_ahead", {"tokens_ahead": pytest.approx(100, rel=0.01)}),
        ("free", {}),
    ]
    assert fitted.validation.classifier.balanced_accuracy == 1


def test_too_few_rows_in_all_regimes():
    result = fit_regimes(_frame(30), REGIMES, FitOptions(reference=False, penalties=(("ridge", 1e-10),)))
    assert isinstance(result, TooFewRows)
    assert "30 and 10 are needed" in result.reason
