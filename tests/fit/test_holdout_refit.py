"""A model of step times refitted on the rows it was measured on."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from tracefit.features.sets import Feature
from tracefit.fit import splits
from tracefit.fit.fitted import (
    ANY_SIGN,
    NON_NEGATIVE,
    FitOptions,
    LinearFit,
    RegimeRows,
    predict_regimes,
)
from tracefit.fit.holdout import refit_on_holdout
from tracefit.fit.train import fit_linear, fit_regimes
from tracefit.models.schema import Comparison, Condition

FEATURES = [Feature("prefill", "token", "prefill"), Feature("decode", "token", "decode")]
QUICK = FitOptions(reference=False, penalties=(("ridge", 1e-8),))
ROWS = 300
FROM = 210


def _frame(*, late=1.0, steps=1, **columns):
    """y = 2000 + 10 prefill + 50 decode, held out `late` times as much; a row is the mean of `steps` steps."""
    rng = np.random.default_rng(0)
    prefill, decode = rng.integers(0, 200, ROWS), rng.integers(1, 30, ROWS)
    frame = pl.DataFrame(
        {
            "run_id": "r",
            "server": "s",
            "ts_ns": np.arange(ROWS) * 1000,
            "prefill": prefill,
            "decode": decode,
            "interval_steps": steps,
            "cycle_sd_us": 0.0,
            "excluded_reason": None,
        },
        schema_overrides={"excluded_reason": pl.String},
    ).with_columns(**columns)
    machine = np.where(np.arange(ROWS) >= FROM, late, 1.0)
    law = 2000 + 10 * pl.col("prefill") + 50 * pl.col("decode") + pl.Series(rng.normal(0, 20, ROWS))
    return splits.split_by_time(frame.with_columns(y=law * pl.Series(machine)))


def _fit(frame, options=QUICK):
    fitted = fit_linear(frame, FEATURES, options)
    assert isinstance(fitted, LinearFit)
    return fitted


def _values(part):
    return {t.feature: t.value for t in part.terms}


def test_terms_are_those_of_the_held_out_rows():
    fitted = _fit(_frame(late=0.8))
    (part,) = refit_on_holdout(fitted)
    assert part.intercept.value == pytest.approx(1600, rel=0.02)
    assert _values(part) == pytest.approx({"prefill": 8, "decode": 40}, rel=0.03)
    assert _values(fitted.regimes[0]) == pytest.approx({"prefill": 10, "decode": 50}, rel=0.03)


def test_rows_left_out_of_the_hold_out_are_not_refitted():
    """Idle gaps, a hundred times as long, at every second held-out row."""
    idle = (pl.int_range(pl.len()) >= FROM) & (pl.int_range(pl.len()) % 2 == 0)
    frame = _frame(late=0.8)
    frame = frame.with_columns(
        y=pl.when(idle).then(pl.col("y") * 100).otherwise("y"),
        excluded_reason=pl.when(idle).then(pl.lit(splits.IDLE_GAP)).otherwise("excluded_reason"),
    )
    (part,) = refit_on_holdout(_fit(frame))
    assert _values(part) == pytest.approx({"prefill": 8, "decode": 40}, rel=0.05)


def test_a_term_that_is_constant_in_the_hold_out_keeps_its_value():
    """No prompt comes in the hold-out: its coefficient stays, and what predicts prompts does too."""
    prompts = pl.when(pl.int_range(pl.len()) < FROM).then("prefill").otherwise(100)
    fitted = _fit(_frame(prefill=prompts))
    (part,) = refit_on_holdout(fitted)
    assert _values(part)["prefill"] == _values(fitted.regimes[0])["prefill"]
    assert _values(part)["decode"] == pytest.approx(50, rel=0.03)
    assert part.intercept.value == pytest.approx(2000, rel=0.02)


def test_a_refit_keeps_the_signs_of_the_fit():
    """Held out, y falls by 20 with every decode."""
    frame = _frame().with_columns(
        y=pl.when(pl.col("split") == "holdout").then(pl.col("y") - 70 * pl.col("decode")).otherwise("y")
    )
    (free,), (bound,) = (
        refit_on_holdout(_fit(frame, FitOptions(reference=False, signs=signs, penalties=(("ridge", 1e-8),))))
        for signs in (ANY_SIGN, NON_NEGATIVE)
    )
    assert _values(free)["decode"] == pytest.approx(-20, rel=0.1)
    assert _values(bound).get("decode", 0.0) == 0.0


def test_a_regime_with_few_held_out_rows_is_not_refitted():
    """Mixed steps are a tenth of the hold-out, nine rows: too few to fit."""
    every = pl.when(pl.int_range(pl.len()) < FROM).then(2).otherwise(10)
    frame = _frame(
        late=0.8,
        prefill=pl.when(pl.int_range(pl.len()) % every == 0).then(pl.col("prefill") + 1).otherwise(0),
    )
    regimes = [
        RegimeRows("mixed", tuple(FEATURES), Condition(any=(Comparison(feature="prefill", op=">", value=0.0),))),
        RegimeRows("decode", (FEATURES[1],)),
    ]
    fitted = fit_regimes(frame, regimes, QUICK)
    assert isinstance(fitted, LinearFit)
    mixed_part, decode_part = refit_on_holdout(fitted)
    assert mixed_part == fitted.regimes[0]
    assert decode_part.intercept.value != fitted.regimes[1].intercept.value
    quiet = frame.filter((pl.col("split") == "holdout") & (pl.col("prefill") == 0))
    predicted = predict_regimes((mixed_part, decode_part), quiet)
    assert np.mean(predicted) == pytest.approx(quiet["y"].mean(), rel=0.02)
