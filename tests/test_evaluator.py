"""`tracefit/evaluator.py`, which users copy: alone with the standard library, and equal to the library on every model."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tracefit import evaluator
from tracefit.coefficients.compiled import CompiledModel
from tracefit.coefficients.files import read_coefficients
from tracefit.features.expressions import evaluate, parse_formula

ROOT = Path(__file__).parents[1]
FILES = [
    *(ROOT / "models" / f"{kind}.json" for kind in ("alpha", "beta")),
    *(ROOT / "tests/coefficients/released/1" / f"{kind}.json" for kind in ("alpha", "beta")),
]
MODELS = [
    pytest.param(path, index, id=f"{path.parent.name}-{m['scope_id'][:12]}-{m['name']}")
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
    compiled = CompiledModel(read_coefficients(path).models[index])
    rng = random.Random(index)
    predicted = 0
    for _ in range(300):
        features = _random_inputs(sorted(compiled.inputs), rng)
        starts = sorted(rng.random() * 5e4 for _ in range(rng.choice([0, 1, 20])))
        for step_starts in (None, starts):
            wanted = compiled.predict(features, step_starts, api_wait_us=200.0)
            found = evaluator.predict(plain, features, step_starts, api_wait_us=200.0)
            assert (found is None) == (wanted is None), features
            if wanted is not None:
                predicted += 1
                assert found == pytest.approx(wanted, rel=1e-12), features
    assert predicted > 100


FORMULAS = [
    "a + b * c - 2 / a",
    "-a ** 2 + 0.5 ** b",
    "max(a, b, 3) - min(a * b, c / (a - a))",
    "a / (b - b)",
    "(0 - a) ** 0.5",
    "a ** -2",
    "1e300 ** 4 * a",
    "2 \u00d7 a \u00b7 b \u2212 c \u00f7 4",
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


@pytest.mark.parametrize(
    "text", ["__import__('os')", "a.b", "[a]", "a if a else b", "f(a)", "a // b", "'a'", "a < b"]
)
def test_anything_else_in_a_formula_is_refused(text):
    model = {"form": "linear", "intercept": {"value": 0}, "terms": [], "definitions": {"f": text}}
    with pytest.raises(ValueError, match="not allowed"):
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
        ({"any": [X]}, 1, 2),
        ({"all": [X]}, 0, 1),
    ],
)
def test_conditions_hold_by_the_contract(when, x, expected):
    assert evaluator.predict(_regimes(when), {"x": x}) == expected


def test_a_name_that_is_missing_is_an_error_that_names_it():
    with pytest.raises(KeyError, match="x"):
        evaluator.predict(_regimes({"any": [X]}), {})
    circle = {"form": "linear", "intercept": {"value": 0}, "terms": [{"feature": "a", "value": 1}]}
    with pytest.raises(KeyError, match="a"):
        evaluator.predict({**circle, "definitions": {"a": "b", "b": "a"}}, {})


def test_a_model_is_found_by_its_name_and_a_part_of_its_scope(tmp_path):
    path = ROOT / "models" / "beta.json"
    assert evaluator.load(path, "beta.cycle_time", "llama-2-70b")["scope_id"].startswith("llama-2-70b")
    for name, scope in (("beta.cycle_time", ""), ("beta.other", "llama-2-70b")):
        with pytest.raises(ValueError, match=r"beta\.json: \d models"):
            evaluator.load(path, name, scope)
    other = tmp_path / "beta.json"
    other.write_text(json.dumps({"schema": "tracefit/coefficients", "version": 3, "models": []}))
    with pytest.raises(ValueError, match="version 1 or 2"):
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
