"""Predictions of trained files: every reading of what was written gives the error the evaluation states."""

from __future__ import annotations

import json
import operator

import numpy as np
import polars as pl
import pytest

from tracefit.coefficients.compiled import CompiledModel
from tracefit.coefficients.files import read_coefficients
from tracefit.coefficients.predict import predict_row
from tracefit.tables.store import TableStore

OPS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq}


def _plain(model, row, starts):
    """What a consumer writes who has nothing but the file's description; `starts` are step starts in ns."""

    def line(part):
        return part["intercept"]["value"] + sum(t["value"] * row[t["feature"]] for t in part["terms"])

    def holds(c):
        return OPS[c["op"]](row[c["feature"]], row[c["feature2"]] if c["feature2"] else c["value"])

    if model["form"] == "boundary":
        after = row["ts_ns"] + 1000 * line(model["work"])
        boundary = next(start for start in starts if start >= after)
        return max(0.0, (boundary - row["ts_ns"]) / 1000 + model["offset"]["value"])
    if model["form"] == "regimes":
        whens = [(r, r["when"]) for r in model["regimes"]]
        model = next(
            r
            for r, w in whens
            if (w["any"] is None or any(map(holds, w["any"]))) and all(map(holds, w["all"] or []))
        )
    return max(0.0, line(model))


@pytest.mark.parametrize(
    ("kind", "name"),
    [("beta", "cycle_time"), ("alpha", "queue_wait"), ("alpha", "admission"), ("alpha", "departure")],
)
def test_a_plain_reading_of_the_file_has_the_error_the_evaluation_states(trained, kind, name):
    path = trained / "models" / f"{kind}.json"
    model = next(m for m in json.loads(path.read_text())["models"] if m["name"] == f"{kind}.{name}")
    store = TableStore(trained / "tables")
    starts = store.read("timeline")["ts_start_ns"].drop_nulls().sort().to_list()
    rows = store.read(f"{kind}_training").filter(split="holdout")
    rows = rows.filter(pl.col("excluded_reason").is_null())
    if kind == "alpha":
        rows = rows.filter(target=name)
    predicted = np.array([_plain(model, row, starts) for row in rows.iter_rows(named=True)])
    errors = np.abs(predicted - rows["y"].to_numpy())
    assert errors.mean() == pytest.approx(model["validation"]["holdout"]["mae"], rel=1e-6, abs=1e-3)
    assert len(errors) == model["validation"]["holdout"]["n"]


@pytest.mark.parametrize(("kind", "name"), [("beta", "beta.cycle_time"), ("alpha", "alpha.departure")])
def test_predict_agrees_with_the_plain_reading(trained, kind, name):
    path = trained / "models" / f"{kind}.json"
    plain = next(m for m in json.loads(path.read_text())["models"] if m["name"] == name)
    read = next(m for m in read_coefficients(path).models if m.name == name)
    rows = TableStore(trained / "tables").read(f"{kind}_training")
    rows = rows.filter(target="departure") if kind == "alpha" else rows
    for row in rows.head(50).iter_rows(named=True):
        features = {key: value for key, value in row.items() if isinstance(value, float)}
        assert predict_row(CompiledModel(read), features).interval.value_us == pytest.approx(
            _plain(plain, features, ())
        )


def test_the_fitted_line_is_the_one_the_trace_was_made_with(trained):
    """Step time is 2,000 + 10 per prefill token + 50 per decode token."""
    model = read_coefficients(trained / "models" / "beta.json").models[0]
    names = {t.feature for t in model.terms} | {"prefill_tokens", "decode_tokens", "num_prefill_reqs"}
    base = dict.fromkeys(names, 0.0) | {"num_decode_reqs": 10.0, "decode_tokens": 10.0, "running_depth": 10.0}
    more = base | {"prefill_tokens": 100.0, "num_prefill_reqs": 1.0, "running_depth": 11.0}
    assert predict_row(CompiledModel(model), base).interval.value_us == pytest.approx(2500, rel=0.02)
    assert predict_row(CompiledModel(model), more).interval.value_us == pytest.approx(3500, rel=0.02)
