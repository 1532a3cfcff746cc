"""Predictions of trained files: every reading of what was written gives the error the evaluation states."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from tracefit import evaluator
from tracefit.coefficients.files import read_coefficients
from tracefit.models.evaluate import CompiledModel
from tracefit.models.predict import predict_row
from tracefit.models.targets import TARGETS
from tracefit.tables.store import TableStore


@pytest.mark.parametrize(
    ("kind", "name"),
    [("beta", "cycle_time"), *(("alpha", target.name) for target in TARGETS)],
)
def test_evaluator_has_the_error_that_the_file_states(trained, kind, name):
    model = evaluator.load(trained / "models" / f"{kind}.json", f"{kind}.{name}")
    store = TableStore(trained / "tables")
    starts = store.read("timeline")["ts_start_ns"].drop_nulls().sort().to_numpy()
    rows = store.read(f"{kind}_training").filter(split="holdout")
    rows = rows.filter(pl.col("excluded_reason").is_null())
    if kind == "alpha":
        rows = rows.filter(target=name)
    predicted = np.array(
        [evaluator.predict(model, row, ((starts - row["ts_ns"]) / 1000).tolist()) for row in rows.iter_rows(named=True)]
    )
    errors = np.abs(predicted - rows["y"].to_numpy())
    assert errors.mean() == pytest.approx(model["validation"]["holdout"]["mae"], rel=1e-6, abs=1e-3)
    assert len(errors) == model["validation"]["holdout"]["n"]


def test_fitted_line_is_the_law_of_the_trace(trained):
    """Step time is 2,000 + 10 per prefill token + 50 per decode token."""
    model = read_coefficients(trained / "models" / "beta.json").models[0]
    names = {t.feature for t in model.terms} | {"prefill_tokens", "decode_tokens", "num_prefill_reqs"}
    base = dict.fromkeys(names, 0.0) | {"num_decode_reqs": 10.0, "decode_tokens": 10.0, "running_depth": 10.0}
    more = base | {"prefill_tokens": 100.0, "num_prefill_reqs": 1.0, "running_depth": 11.0}
    assert predict_row(CompiledModel(model), base).interval.value_us == pytest.approx(2500, rel=0.02)
    assert predict_row(CompiledModel(model), more).interval.value_us == pytest.approx(3500, rel=0.02)
