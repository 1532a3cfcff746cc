"""The one evaluator: models written by hand, their predictions by hand, the same for a row and for a frame."""

from __future__ import annotations

import csv
from types import SimpleNamespace

import polars as pl
import pytest
from pydantic import TypeAdapter

from tracefit.consumers.csv import to_csv
from tracefit.errors import UsageError
from tracefit.models.columns import amounts_of, column_of, with_definitions
from tracefit.models.evaluate import CompiledModel
from tracefit.models.formulas import Formulas
from tracefit.models.frames import predict_rows
from tracefit.models.predict import predict_row
from tracefit.models.schema import Model
from tracefit.reports import content


def _linear(intercept, formulas=None, **terms):
    formulas = formulas or {}
    return {
        "intercept": {"value": intercept},
        "terms": [{"feature": f, "unit": "us", "value": v, "formula": formulas.get(f)} for f, v in terms.items()],
    }


def _model(**fields):
    return TypeAdapter(Model).validate_python({"name": "m", "deployment_id": "s", **fields})


def _line(intercept, formulas=None, **terms):
    return _model(form="linear", **_linear(intercept, formulas, **terms))


def _regimes(when, *, otherwise=True):
    queued = {"name": "queued", "when": when, **_linear(5000.0)}
    free = {"name": "free", "when": {"all": []}, **_linear(197.0)}
    return _model(form="regimes", regimes=[queued, *([free] if otherwise else [])])


def _row(model, features):
    return predict_row(CompiledModel(model), features).interval.value_us


def _frame(model, features):
    columns = {name: pl.Series([value], dtype=pl.Float64) for name, value in features.items()}
    return predict_rows(model, pl.DataFrame(columns))["predicted_us"][0]


both = pytest.mark.parametrize("predict", [_row, _frame], ids=["row", "frame"])


@both
@pytest.mark.parametrize(("a", "b", "expected"), [(0, 0, 2000), (7, 3, 1950), (0, 50, 0), (0, 51, 0)])
def test_line_is_intercept_and_terms_clipped_at_0(predict, a, b, expected):
    assert predict(_line(2000.0, a=10.0, b=-40.0), {"a": a, "b": b, "unused": 9}) == expected


@both
def test_constant_below_0_is_clipped(predict):
    assert predict(_line(-5.0), {"unused": 1}) == 0


@both
def test_a_feature_that_is_missing_is_an_error_that_names_it(predict):
    with pytest.raises(UsageError, match="m needs b, which is not given"):
        predict(_line(0.0, a=1.0, b=1.0), {"a": 1})
    with pytest.raises(UsageError, match="m needs x, y, which is not given"):
        predict(_line(0.0, {"f": "min(x, y) + a"}, f=1.0), {"a": 1})
    with pytest.raises(UsageError, match="m needs slots, which is not given"):
        predict(_regimes({"any": [SMALL]}), {"a": 1})


@pytest.mark.parametrize("model", [_line(5.0, a=1.0, b=1.0), _line(5.0, {"f": "a * b"}, f=1.0)])
def test_unknown_input_is_null_in_a_frame_and_an_error_in_a_row(model):
    assert _frame(model, {"a": 1, "b": None}) is None
    with pytest.raises(UsageError, match="m needs b, which is not given"):
        _row(model, {"a": 1, "b": None})


@both
def test_given_value_wins_over_its_formula(predict):
    model = _line(0.0, {"f": "a + missing"}, f=2.0)
    assert predict(model, {"f": 3}) == 6


@both
def test_formulas_build_on_definitions_and_on_each_other(predict):
    """f = 2 * d = 2 * (a + 3) = 10, g = f / 5 = 2."""
    definitions = {"f": "2 * d", "d": "a + c", "c": "3"}
    model = _model(form="linear", definitions=definitions, **_linear(1.0, {"g": "f / 5"}, g=7.0))
    assert predict(model, {"a": 2}) == 15


@pytest.mark.parametrize("definitions", [{"d": "d + 1"}, {"d": "e", "e": "d"}])
def test_circle_of_formulas_is_refused(definitions):
    with pytest.raises(UsageError, match="is defined by itself"):
        CompiledModel(_model(form="linear", definitions=definitions, **_linear(0.0, d=1.0)))


def test_column_of_text_is_named():
    with pytest.raises(UsageError, match="a: is not a column of numbers"):
        predict_rows(_line(0.0, a=1.0), pl.DataFrame({"a": ["x"]}))


# -- conditions ------------------------------------------------------------------------------------------

SMALL = {"feature": "slots", "op": "<=", "value": 0}
BLOCKS = {"feature": "demand", "op": ">", "feature2": "blocks"}


@both
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
        ({"any": [], "all": []}, 0, 11, False),
        ({"any": [], "all": [SMALL]}, 0, 11, False),
        ({"any": [SMALL], "all": []}, 0, 11, True),
        ({"any": [BLOCKS], "all": [SMALL]}, 3, 11, False),
        ({"any": [SMALL, BLOCKS]}, None, 11, True),
        ({"any": [SMALL, BLOCKS]}, None, 10, False),
        ({"all": [SMALL, BLOCKS]}, None, 11, False),
        ({"any": [SMALL]}, None, 11, False),
        ({"any": [BLOCKS]}, 0, None, False),
    ],
)
def test_first_regime_whose_condition_is_true_predicts(predict, when, slots, demand, queued):
    """An empty `any` is false, an empty `all` true, and a comparison with something unknown does not hold."""
    features = {"slots": slots, "demand": demand, "blocks": 10}
    assert predict(_regimes(when), features) == (5000 if queued else 197)


@both
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
def test_comparison_of_each_relation(predict, op, holds):
    model = _regimes({"all": [{"feature": "x", "op": op, "value": 2}]})
    assert [predict(model, {"x": x}) == 5000 for x in (1, 2, 3)] == list(holds)


def test_row_without_a_regime_is_an_error_and_null_in_a_frame():
    model = _regimes({"all": [SMALL]}, otherwise=False)
    with pytest.raises(UsageError, match="no regime of m"):
        _row(model, {"slots": 1})
    assert _frame(model, {"slots": 1}) is None
    assert _frame(model, {"slots": 0}) == 5000


@pytest.mark.parametrize("when", [{}, {"any": [{"feature": "x", "op": "<"}]}, {"any": [SMALL | {"feature2": "x"}]}])
def test_condition_of_no_or_two_right_sides_is_refused(when):
    with pytest.raises(ValueError, match="needs"):
        _regimes(when)


# -- the boundary rule -----------------------------------------------------------------------------------


def _boundary(intercept=1400.0, offset=-30.0, **more):
    return _model(
        form="boundary",
        boundary="step_start",
        work=_linear(intercept, prompt_tokens=0.4),
        offset={"value": offset},
        without_clock={"form": "linear", "intercept": {"value": 9315.0}, "terms": []},
        **more,
    )


def test_frame_uses_only_the_next_step_start():
    """The work takes 1,440 us. A boundary in 3,000 us is waited for; an idle engine takes only the work; one in 900 us
    is missed: unknown."""
    rows = pl.DataFrame({"step_residual_us": [3000.0, None, 900.0], "prompt_tokens": [100.0] * 3})
    compiled = CompiledModel(_boundary())
    admitted = compiled.evaluate_with_clock(amounts_of(rows, compiled.columns_with_clock))
    assert column_of("us", admitted, 3).to_list() == [2970.0, 1440.0, None]
    assert compiled.columns_with_clock == {"step_residual_us", "prompt_tokens"}


def test_long_chain_of_definitions_is_computed():
    """Each definition is computed from only its own inputs: as columns of one growing frame, 900 took 22 s."""
    chain = Formulas.parse({f"d{n}": f"d{n - 1} + 1" if n else "a" for n in range(900)}, where="chain")
    found = with_definitions(pl.DataFrame({"a": [1.0, 2.0]}), chain, ["d899"])
    assert found["d899"].to_list() == [900, 901]


@both
@pytest.mark.parametrize("op", ["<", "<=", ">", ">=", "=="])
def test_comparison_with_nan_is_false(predict, op):
    """polars by itself takes NaN for larger than every number."""
    nan = float("nan")
    assert predict(_regimes({"any": [{"feature": "x", "op": op, "value": 0}]}), {"x": nan}) == 197
    assert predict(_regimes({"all": [{"feature": "x", "op": op, "feature2": "x"}]}), {"x": nan}) == 197


def test_sum_with_nan_is_unknown():
    assert _frame(_line(1.0, a=1.0), {"a": float("nan")}) is None
    with pytest.raises(UsageError, match="needs a"):
        _row(_line(1.0, a=1.0), {"a": float("nan")})
    assert _frame(_line(1.0, {"b": "1 ** a"}, b=1.0), {"a": float("nan")}) is None


@both
@pytest.mark.parametrize(("side", "x"), [("any", 5), ("all", -5)])
def test_missing_name_is_an_error_whichever_comparison_decides(predict, side, x):
    tests = [{"feature": name, "op": ">", "value": 0} for name in "xz"]
    with pytest.raises(UsageError, match="needs z"):
        predict(_regimes({side: tests}), {"x": x})


ONE, OTHER = {"feature": "x", "op": ">", "value": 1}, {"feature": "x", "op": "<=", "feature2": "y"}


@pytest.mark.parametrize(
    ("when", "cell", "sentence"),
    [
        ({"any": []}, "never", "never"),
        ({"any": [], "all": [ONE]}, "never", "never"),
        ({"all": []}, "", "otherwise"),
        ({"all": [ONE]}, "x > 1.0", "when `x` > 1"),
        ({"any": [ONE, OTHER]}, "x > 1.0 or x <= y", "when `x` > 1 or `x` <= `y`"),
        ({"any": [ONE], "all": [OTHER]}, "(x > 1.0) and (x <= y)", "when (`x` > 1) and (`x` <= `y`)"),
    ],
)
def test_condition_is_written_in_csv_and_report(when, cell, sentence):
    """In a cell of the CSV export, and in the report."""
    model = _regimes(when)
    models = SimpleNamespace(models=SimpleNamespace(deployment_id="s", models={"m": model}))
    rows = csv.DictReader(to_csv(models).files["coefficients.csv"].splitlines())
    assert next(rows)["condition"] == cell
    assert next(iter(content._coefficients(model))) == f"Regime *queued*, {sentence}:"
