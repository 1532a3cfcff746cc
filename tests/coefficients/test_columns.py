"""Predictions of whole frames are those of one row at a time."""

from __future__ import annotations

import json

import polars as pl
import pytest

from tracefit.coefficients.columns import features_of, prediction
from tracefit.coefficients.files import read_coefficients
from tracefit.coefficients.model import BoundaryModel, LinearModel, RegimesModel
from tracefit.coefficients.predict import predict

COMMON = {"name": "m", "scope_id": "s"}


def _linear(intercept, **terms):
    return {
        "intercept": {"value": intercept},
        "terms": [{"feature": f, "unit": "us", "value": v} for f, v in terms.items()],
    }


def test_a_line_by_hand_is_clipped_and_null_without_a_feature():
    model = LinearModel.model_validate({**COMMON, **_linear(100.0, a=2.0, b=-50.0)})
    rows = pl.DataFrame({"a": [10.0, 1.0, 5.0], "b": [1.0, 9.0, None]})
    assert rows.select(prediction(model)).to_series().to_list() == [70.0, 0.0, None]
    assert features_of(model) == {"a", "b"}


def test_regimes_by_hand():
    model = RegimesModel.model_validate(
        {
            **COMMON,
            "form": "regimes",
            "regimes": [
                {
                    "name": "queued",
                    "when": {
                        "any": [
                            {"feature": "free", "op": "<=", "value": 0},
                            {"feature": "need", "op": ">", "feature2": "have"},
                        ]
                    },
                    **_linear(0.0, ahead=1000.0),
                },
                {"name": "free", "when": {"all": []}, **_linear(200.0)},
            ],
        }
    )
    rows = pl.DataFrame(
        {"free": [0, 1, 1, None], "need": [0, 5, 2, 9], "have": [9, 3, 2, 3], "ahead": [7.0, 2.0, 2.0, 1.0]}
    )
    assert rows.select(prediction(model)).to_series().to_list() == [7000.0, 2000.0, 200.0, 1000.0]
    assert features_of(model) == {"free", "need", "have", "ahead"}


def test_a_boundary_by_hand():
    """Work 1,400 us: 3,000 to the boundary waits for it; idle is the work alone; 900 us off is past it: unknown."""
    model = BoundaryModel.model_validate(
        {
            **COMMON,
            "form": "boundary",
            "boundary": "step_start",
            "work": _linear(1400.0),
            "offset": {"value": -30.0},
            "without_clock": _linear(9000.0),
        }
    )
    rows = pl.DataFrame({"step_residual_us": [3000.0, None, 900.0]})
    assert rows.select(prediction(model)).to_series().to_list() == [2970.0, 1400.0, None]


@pytest.mark.parametrize("kind", ["alpha", "beta"])
def test_a_frame_is_its_rows_one_by_one(trained, kind):
    file = read_coefficients(trained / "models" / f"{kind}.json")
    frame = pl.read_parquet(trained / "tables" / f"{kind}_training" / "**/*.parquet")
    for model in file.models:
        if isinstance(model, BoundaryModel):
            continue
        rows = frame.filter(pl.col("excluded_because").is_null())
        if kind == "alpha":
            rows = rows.filter(pl.col("target") == model.name.removeprefix("alpha."))
        rows = rows.head(40).with_columns(predicted=prediction(model))
        for row in json.loads(rows.select(*sorted(features_of(model)), "predicted").write_json()):
            wanted = row.pop("predicted")
            assert predict(model, row) == pytest.approx(wanted)
