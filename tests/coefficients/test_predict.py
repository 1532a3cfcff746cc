"""Predictions of a file: by hand, and equal in every reading of the written one."""

from __future__ import annotations

import json
import operator

import numpy as np
import polars as pl
import pytest

from tracefit.coefficients.files import read_coefficients
from tracefit.coefficients.model import BoundaryModel, LinearModel, RegimesModel
from tracefit.coefficients.predict import predict
from tracefit.errors import UsageError
from tracefit.tables.store import TableStore

LINE = LinearModel.model_validate(
    {
        "name": "beta.cycle_time",
        "form": "linear",
        "intercept": {"value": 2000.0},
        "terms": [
            {"feature": "a", "unit": "us", "value": 10.0},
            {"feature": "b", "unit": "us", "value": -40.0},
        ],
    }
)


def _regimes(when, **more):
    queued = {"name": "queued", "when": when, "intercept": {"value": 5000.0}, "terms": []}
    free = {"name": "free", "when": {"all": []}, "intercept": {"value": 197.0}, "terms": []}
    last = [free] if more.get("otherwise", True) else []
    return RegimesModel.model_validate(
        {"name": "alpha.queue_wait", "form": "regimes", "regimes": [queued, *last]}
    )


@pytest.mark.parametrize(("a", "b", "expected"), [(0, 0, 2000), (7, 3, 1950), (0, 50, 0), (0, 51, 0)])
def test_a_line_is_the_intercept_and_the_terms_clipped_at_zero(a, b, expected):
    assert predict(LINE, {"a": a, "b": b, "unused": 9}) == expected


def test_a_feature_that_is_missing_is_named():
    with pytest.raises(UsageError, match=r"feature b is needed.*given: a"):
        predict(LINE, {"a": 1})


SMALL = {"feature": "slots", "op": "<=", "value": 0}
BLOCKS = {"feature": "demand", "op": ">", "feature2": "blocks"}


@pytest.mark.parametrize(
    ("when", "slots", "demand", "queued"),
    [
        ({"any": [SMALL, BLOCKS]}, 0, 5, True),
        ({"any": [SMALL, BLOCKS]}, 3, 11, True),
        ({"any": [SMALL, BLOCKS]}, 3, 10, False),
        ({"all": [SMALL, BLOCKS]}, 0, 11, True),
        ({"all": [SMALL, BLOCKS]}, 0, 10, False),
        ({"all": []}, 3, 5, True),
        ({"any": []}, 0, 11, False),
        ({"any": [BLOCKS], "all": [SMALL]}, 3, 11, False),
    ],
)
def test_the_first_regime_whose_condition_holds_speaks(when, slots, demand, queued):
    features = {"slots": slots, "demand": demand, "blocks": 10}
    assert predict(_regimes(when), features) == (5000 if queued else 197)


@pytest.mark.parametrize(
    ("op", "holds"),
    [
        ("<", (True, False, False)),
        ("<=", (True, True, False)),
        ("==", (False, True, False)),
        (">", (False, False, True)),
        (">=", (False, True, True)),
    ],
)
def test_comparisons_mean_what_they_say(op, holds):
    model = _regimes({"all": [{"feature": "x", "op": op, "value": 2}]})
    assert [predict(model, {"x": x}) == 5000 for x in (1, 2, 3)] == list(holds)


def test_no_regime_at_all_is_an_error():
    with pytest.raises(UsageError, match=r"no regime of alpha\.queue_wait"):
        predict(_regimes({"all": [SMALL]}, otherwise=False), {"slots": 1})


BOUNDARY = BoundaryModel.model_validate(
    {
        "name": "alpha.admission",
        "form": "boundary",
        "boundary": "step_start",
        "work": {
            "intercept": {"value": 1400.0},
            "terms": [{"feature": "prompt_tokens", "unit": "us/token", "value": 0.4}],
        },
        "offset": {"value": -30.0},
        "without_clock": {"form": "linear", "intercept": {"value": 9315.0}, "terms": []},
    }
)


@pytest.mark.parametrize(
    ("starts", "expected"),
    [
        ((500, 1439, 9000, 18_000), 8970),
        ((500, 1440, 9000), 1410),
        ((), 1440),
        (None, 9315),
    ],
)
def test_a_boundary_is_the_first_step_start_after_the_work(starts, expected):
    """The work of 100 prompt tokens is 1,400 + 40 us; without step starts the line for that is used."""
    assert predict(BOUNDARY, {"prompt_tokens": 100}, starts) == expected


@pytest.mark.parametrize(("queue", "expected"), [("one_at_a_time", 8970), (None, 1410)])
def test_work_left_on_the_requests_before_comes_first_where_the_model_has_a_queue(queue, expected):
    """1,440 us of its own and 600 us of those before: past the start at 1,440, the one at 9,000 is next."""
    model = BOUNDARY.model_copy(update={"queue": queue})
    assert predict(model, {"prompt_tokens": 100}, (500, 1440, 9000), api_wait_us=600) == expected


@pytest.mark.parametrize(
    "when", [{}, {"any": [{"feature": "x", "op": "<"}]}, {"any": [SMALL | {"feature2": "x"}]}]
)
def test_a_condition_that_says_nothing_or_too_much_is_refused(when):
    with pytest.raises(ValueError, match="needs"):
        _regimes(when)


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
    rows = rows.filter(pl.col("excluded_because").is_null())
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
        assert predict(read, features) == pytest.approx(_plain(plain, features, ()))


def test_the_fitted_line_is_the_one_the_trace_was_made_with(trained):
    """Step time is 2,000 + 10 per prefill token + 50 per decode token."""
    model = read_coefficients(trained / "models" / "beta.json").models[0]
    names = {t.feature for t in model.terms} | {"prefill_tokens", "decode_tokens", "num_prefill_reqs"}
    base = dict.fromkeys(names, 0.0) | {"num_decode_reqs": 10.0, "decode_tokens": 10.0, "running_depth": 10.0}
    more = base | {"prefill_tokens": 100.0, "num_prefill_reqs": 1.0, "running_depth": 11.0}
    assert predict(model, base) == pytest.approx(2500, rel=0.02)
    assert predict(model, more) == pytest.approx(3500, rel=0.02)
