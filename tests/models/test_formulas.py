"""The formula language: what it computes, and what it refuses."""

from __future__ import annotations

import math

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracefit.errors import UsageError
from tracefit.models.amounts import known, number
from tracefit.models.columns import with_formulas
from tracefit.models.formulas import computation, names_in, parse_formula

ROW = {
    "a": 6.0,
    "b": 4.0,
    "zero": 0.0,
    "none": None,
    "c_2": -3.0,
    "large": 1e308,
    "infinite": math.inf,
    "nan": math.nan,
}


def evaluate(node, values):
    """Compute a formula for one row; None is unknown."""
    return known(computation(node)({name: number(name, value) for name, value in values.items()}))


def compute(formula, values=None, constants=None):
    """Compute a formula both ways, require that they agree, and return the result."""
    row = ROW if values is None else values
    node = parse_formula(formula, where="x")
    frame = pl.DataFrame({name: [value] for name, value in row.items()}, schema=dict.fromkeys(row, pl.Float64))
    by_frame = with_formulas(frame, {"y": node}, constants)["y"].to_list()[0]
    by_row = evaluate(node, {**row, **(constants or {})})
    assert by_frame == (None if by_row is None else pytest.approx(by_row, rel=1e-12, abs=1e-300))
    return by_row


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("1", 1),
        ("1.5e3", 1500),
        (".5", 0.5),
        ("a", 6),
        ("a + b", 10),
        ("a - b - 1", 1),
        ("a / b / 2", 0.75),
        ("2 + 3 * 4", 14),
        ("(2 + 3) * 4", 20),
        ("2 * a ** 2", 72),
        ("-a ** 2", -36),
        ("(-a) ** 2", 36),
        ("a ** -1", 1 / 6),
        ("a ** 0.5", math.sqrt(6)),
        ("--a", 6),
        ("-a + b", -2),
        ("a * -b", -24),
        ("min(a, b)", 4),
        ("max(a, b, 9)", 9),
        ("min(a)", 6),
        ("max(min(a, b), c_2) * 2", 8),
        ("max((0 - 1e300) ** 3, a)", 6),
        ("min((0 - 1e300) ** 4, a)", 6),
        ("min(1e300 ** 3, a)", 6),
        ("min(min(min(min(a, b), 3), 2), 1)", 1),
        ("a \u00d7 b \u00f7 2 \u2212 1", 11),
        ("  a+b  ", 10),
    ],
)
def test_value(formula, value):
    assert compute(formula) == pytest.approx(value)


@pytest.mark.parametrize("formula", ["a / zero", "zero / zero", "a / (b - 4)", "a / -zero", "a / (zero * c_2)"])
def test_division_by_zero_is_zero(formula):
    assert compute(formula) == 0


@pytest.mark.parametrize(
    "formula",
    [
        "none",
        "none + 1",
        "none * 0",
        "none / 0",
        "0 / none",
        "min(none, 1)",
        "max(1, none)",
        "none ** 0.5",
        "1 / min(none, 2)",
    ],
)
def test_null_operand_makes_null(formula):
    assert compute(formula) is None


@pytest.mark.parametrize(
    "formula",
    [
        "large * a",
        "large + large",
        "infinite",
        "nan",
        "nan / 0",
        "infinite / infinite",
        "infinite - 1",
        "max(nan, a)",
        "large ** 2",
        "c_2 ** 0.5",
        "zero ** -1",
        "(1e300) ** 4",
        "1e300 * 1e300 - 1e300 * 1e300",
    ],
)
def test_result_that_is_not_finite_is_null(formula):
    assert compute(formula) is None


def test_integer_beyond_any_float_is_no_number():
    with pytest.raises(UsageError, match="is not a number"):
        number("a", 10**400)


def test_typeset_signs_are_operators():
    assert parse_formula("a \u00b7 b \u2212 c \u00f7 2", where="x") == parse_formula("a * b - c / 2", where="x")


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        ("a +", "formula 'a +' cannot be parsed; a formula has numbers, names,"),
        ("a % b", "formula 'a % b' has '%', which is not allowed there;"),
        ("sum(a)", "formula 'sum(a)' calls 'sum'; only min and max can be called;"),
        ("a ** b", "formula 'a ** b' has an exponent that is not a number from -4 to 4;"),
        ("a // b", "formula 'a // b' has more in it than is allowed;"),
        ("9e999", "formula '9e999' has a number out of range;"),
        ("min(" * 5 + "a" + ")" * 5, "nests more than 4 calls;"),
    ],
)
def test_error_says_what_is_wrong(formula, message):
    with pytest.raises(UsageError) as caught:
        parse_formula(formula, where="x")
    assert message in str(caught.value)


def test_constants_are_one_value_for_all_rows():
    assert compute("a * layers", constants={"layers": 4.0}) == 24
    assert compute("a * layers", constants={"layers": None}) is None


def test_integer_columns_are_computed_in_floats():
    frame = pl.DataFrame({"a": [2**62], "b": [3]})
    node = parse_formula("a * 4 / b", where="x")

    assert with_formulas(frame, {"y": node})["y"].to_list() == [pytest.approx(2**64 / 3)]


def test_names_are_those_needed():
    assert names_in(parse_formula("a * min(b, 3) + a ** 2", where="x")) == {"a", "b"}


@pytest.mark.parametrize(
    "formula",
    [
        "",
        "   ",
        "a b",
        "a +",
        "* a",
        "a ** b",
        "a ** 2 ** 2",
        "a ** 5",
        "a ** -9",
        "a ** ",
        "(a",
        "a)",
        "()",
        "a,b",
        "min()",
        "sum(a)",
        "__import__('os')",
        "a.b",
        "a[0]",
        "'a'",
        "a < b",
        "a if b else c",
        "lambda: a",
        "a ^ b",
        "a // b",
        "a % b",
        "1e999",
        "9" * 350,
        "1_000",
        "0x1f",
        "1j",
        "1if a else 2",
        "True",
        "None",
        "a.5",
        "1.2.3",
        "min(*a)",
        "min(a)(b)",
        "a @ b",
        "a, b",
        "not a",
        "a and b",
        "~a",
        "0.5 ** a ** b",
        "a := 1",
        "(" * 199 + ")" * 199,
        "a = 1",
        "a\n; b",
        "\u0661",
        "λ",
        "\x00",
        "a" * 401,
        "min(" * 6 + "a" + ")" * 6,
    ],
)
def test_anything_else_is_refused_on_one_line(formula):
    with pytest.raises(UsageError, match="formula") as caught:
        parse_formula(formula, where="set.yaml, feature 1")

    assert str(caught.value).startswith("set.yaml, feature 1: formula")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("formula", ["a/" * 199 + "a", "a+" * 199 + "a", "(" * 40 + "a" + ")" * 40, "-" * 399 + "a"])
def test_longest_formulas_still_compute(formula):
    compute(formula)


def _formulas():
    leaves = st.sampled_from([*ROW, "1", "2.5", "0", "1e-300"])

    def grow(inner):
        binary = st.tuples(inner, st.sampled_from(["+", "-", "*", "/"]), inner).map(lambda p: f"({' '.join(p)})")
        call = st.tuples(st.sampled_from(["min", "max"]), inner, inner).map(lambda p: f"{p[0]}({p[1]}, {p[2]})")
        power = st.tuples(inner, st.sampled_from(["2", "-1", "0.5", "3"])).map(lambda p: f"({p[0]}) ** {p[1]}")
        decay = inner.map(lambda exponent: f"0.5 ** ({exponent})")
        return binary | call | power | decay

    return st.recursive(leaves, grow, max_leaves=6)


@given(formula=_formulas())
def test_frames_and_rows_agree(formula):
    try:
        parse_formula(formula, where="x")
    except UsageError:
        return  # nested deeper than is allowed
    compute(formula)


@pytest.mark.slow
@given(text=st.text(max_size=60))
def test_any_text_is_computed_or_refused(text):
    try:
        node = parse_formula(text, where="x")
    except UsageError as error:
        assert "\n" not in str(error)  # noqa: PT017 - most texts are refused, some are formulas
        return
    evaluate(node, dict.fromkeys(names_in(node), 1.0))


@pytest.mark.parametrize("formula", ["min((0 - b) ** 0.5, a)", "min(a, (0 - b) ** 0.5)", "max(a, (0 - b) ** 0.5)"])
def test_an_operand_that_is_no_number_leaves_no_extreme(formula):
    assert compute(formula) is None
