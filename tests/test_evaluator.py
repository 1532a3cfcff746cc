"""`tracefit/evaluator.py`, which users copy: alone with the standard library, and equal to the library on every model."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from tracefit import evaluator
from tracefit.coefficients.compiled import CompiledModel
from tracefit.coefficients.files import read_coefficients
from tracefit.coefficients.predict_frames import predict_rows
from tracefit.errors import UsageError
from tracefit.features.expressions import evaluate, parse_formula

ROOT = Path(__file__).parents[1]
FILES = [ROOT / of / f"{kind}.json" for of in ("models", "fixtures/models") for kind in ("alpha", "beta")]
MODELS = [
    pytest.param(path, index, id=f"{path.parent.relative_to(ROOT)}-{m['scope_id'][:12]}-{m['name']}")
    for path in FILES
    for index, m in enumerate(json.loads(path.read_text())["models"])
]


def _random_inputs(names, rng):
    """Return values from 0 to large ones; now and then one is unknown."""
    scales = (0.0, 1.0, 10.0, 1e3, 1e5)
    return {n: None if rng.random() < 0.03 else rng.random() * rng.choice(scales) for n in names}


@pytest.mark.parametrize(("path", "index"), MODELS)
def test_every_published_model_is_evaluated_as_the_library_does(path, index):
    plain = json.loads(path.read_text())["models"][index]
    model = read_coefficients(path).models[index]
    rng, names = random.Random(index), sorted(CompiledModel(model).inputs)
    inputs = [_random_inputs(names, rng) for _ in range(300)]
    rows = pl.DataFrame(inputs, schema=dict.fromkeys(names, pl.Float64))
    wanted = predict_rows(model, rows)["predicted_us"].to_list() if names else [None] * 300
    found = [evaluator.predict(plain, features) for features in inputs]
    assert found == [None if value is None else pytest.approx(value, rel=1e-12) for value in wanted]
    assert rows.width == 0 or sum(value is not None for value in wanted) > 100


BOUNDARY = {
    "form": "boundary",
    "boundary": "step_start",
    "work": {"intercept": {"value": 1400.0}, "terms": [{"feature": "prompt_tokens", "value": 0.4}]},
    "offset": {"value": -30.0},
    "without_clock": {"intercept": {"value": 9315.0}, "terms": []},
}


@pytest.mark.parametrize(
    ("starts", "expected"),
    [((500, 1439, 9000, 18_000), 8970), ((500, 1440, 9000), 1410), ((), 1440), (None, 9315)],
)
def test_a_boundary_is_the_first_step_start_after_the_work(starts, expected):
    """The work of 100 prompt tokens is 1,400 + 40 us; without step starts the line for that is used."""
    assert evaluator.predict(BOUNDARY, {"prompt_tokens": 100}, starts) == expected


@pytest.mark.parametrize(("queue", "expected"), [("one_at_a_time", 8970), (None, 1410)])
def test_work_left_on_the_requests_before_comes_first_where_the_model_has_a_queue(queue, expected):
    """1,440 us of its own and 600 us of those before: past the start at 1,440, the one at 9,000 is next."""
    model = {**BOUNDARY, "queue": queue}
    assert evaluator.predict(model, {"prompt_tokens": 100}, (500, 1440, 9000), api_wait_us=600) == expected


FORMULAS = [
    "a + b * c - 2 / a",
    "-a ** 2 + 0.5 ** b",
    "max(a, b, 3) - min(a * b, c / (a - a))",
    "a / (b - b)",
    "(0 - a) ** 0.5",
    "a ** -2",
    "1e300 ** 4 * a",
    "2 \u00d7 a \u00b7 b \u2212 c \u00f7 4",
    "max(0, (a * 1e200) ** 3)",
    "min(0, (0 - a * 1e200) ** 3)",
    "--a - +b",
]


@pytest.mark.parametrize("text", FORMULAS)
def test_formulas_mean_what_they_mean_in_the_library(text):
    node, rng = parse_formula(text, where="test"), random.Random(text)
    model = {"form": "linear", "intercept": {"value": 0}, "terms": []}
    for _ in range(50):
        values = {n: rng.choice([0.0, rng.random() * 10, -rng.random(), None]) for n in "abc"}
        found = evaluator._Values({**model, "definitions": {"f": text}}, values).get("f")
        wanted = evaluate(node, values)
        assert found == (None if wanted is None else pytest.approx(wanted, rel=1e-12)), values


REFUSED = [
    "__import__('os')",
    "a.b",
    "[a]",
    "a if a else b",
    "f(a)",
    "a // b",
    "'a'",
    "a < b",
    "a ** 9",
    "a ** b",
    "a ** - -2",
    "0x1f",
    "1_000",
    "True",
    "1e999",
    "1" * 350,
    "max(a, key=b)",
    "max()",
    "max(*a)",
    "max(max(max(max(max(a)))))",
    "+".join("a" * 250),
    "+".join("a" * 100_000),
    "(" * 190 + "a" + ")" * 190 + "+",
    "",
]


@pytest.mark.parametrize("text", REFUSED)
def test_what_the_library_refuses_in_a_formula_is_refused(text):
    with pytest.raises(UsageError):
        parse_formula(text, where="test")
    model = {"form": "linear", "intercept": {"value": 0}, "terms": [], "definitions": {"f": text}}
    with pytest.raises(ValueError, match="formula"):
        evaluator._Values(model, {"a": 1.0, "b": 2.0}).get("f")


def _regimes(when):
    free = {"when": {"all": []}, "intercept": {"value": 1.0}, "terms": []}
    return {"form": "regimes", "regimes": [{"when": when, "intercept": {"value": 2.0}, "terms": []}, free]}


X = {"feature": "x", "op": ">", "value": 0}


@pytest.mark.parametrize(
    ("when", "x", "expected"),
    [
        ({"any": []}, 1, 1),
        ({"all": []}, 1, 2),
        ({"any": [X]}, None, 1),
        ({"any": [X]}, float("nan"), 1),
        ({"any": [X]}, 1, 2),
        ({"all": [X]}, 0, 1),
    ],
)
def test_conditions_hold_by_the_contract(when, x, expected):
    assert evaluator.predict(_regimes(when), {"x": x}) == expected


def test_a_name_that_is_missing_is_an_error_that_names_it():
    with pytest.raises(KeyError, match="x"):
        evaluator.predict(_regimes({"any": [X]}), {})
    # Whichever comparison decides: the same as in the library.
    z = {"feature": "z", "op": ">", "value": 0}
    for when, x in (({"any": [X, z]}, 5), ({"all": [X, z]}, -5)):
        with pytest.raises(KeyError, match="z"):
            evaluator.predict(_regimes(when), {"x": x})
    circle = {"form": "linear", "intercept": {"value": 0}, "terms": [{"feature": "a", "value": 1}]}
    with pytest.raises(KeyError, match="a"):
        evaluator.predict({**circle, "definitions": {"a": "b", "b": "a"}}, {})


def test_a_model_is_found_by_its_name_and_a_part_of_its_scope(tmp_path):
    path = ROOT / "fixtures/models/beta.json"
    assert evaluator.load(path, "beta.cycle_time", "llama-2-70b")["scope_id"].startswith("llama-2-70b")
    for name, scope in (("beta.cycle_time", ""), ("beta.other", "llama-2-70b")):
        with pytest.raises(
            ValueError, match=r"beta\.json: \d models, not one, .*; there are: beta\.cycle_time of "
        ):
            evaluator.load(path, name, scope)
    other = tmp_path / "beta.json"
    for version in (1, 3):
        other.write_text(json.dumps({"schema": "tracefit/coefficients", "version": version, "models": []}))
        with pytest.raises(ValueError, match="of version 2"):
            evaluator.load(other, "beta.cycle_time")


def test_it_runs_alone_with_the_standard_library(tmp_path):
    shutil.copy(ROOT / "pipeline/tracefit/evaluator.py", tmp_path)
    code = (
        "import sys\nbefore = set(sys.modules)\nimport evaluator\n"
        "roots = {name.partition('.')[0] for name in set(sys.modules) - before} - {'evaluator'}\n"
        "print(sorted(roots - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
