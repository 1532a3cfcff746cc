"""`docs/coefficients.md`: its example is a valid model, and its arithmetic is the library's."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest

import tracefit
from tracefit import consumers
from tracefit.fit.splits import MIN_TRAIN_ROWS
from tracefit.options import Tolerance

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/coefficients.md").read_text()


@pytest.fixture
def example(tmp_path):
    (block,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    document = {
        "schema": "tracefit/coefficients",
        "version": 4,
        "kind": "beta",
        "models": [json.loads(block)],
    }
    schema = json.loads((ROOT / "schemas/coefficients.schema.json").read_text())
    jsonschema.validate(document, schema, jsonschema.Draft202012Validator)
    path = tmp_path / "beta.json"
    path.write_text(json.dumps(document))
    return path


def test_the_worked_example_is_what_it_says(example):
    sum_, products, result = re.search(r"^(7000 \+ .*) = (7000 .*) = ([\d.]+) us$", PAGE, re.MULTILINE).groups()
    by_hand = 0.0
    for addend in sum_.split(" + "):
        product = 1.0
        for factor in addend.split(" * "):
            product *= float(factor)
        by_hand += product
    assert by_hand == pytest.approx(float(result), abs=1e-3)
    assert sum(map(float, products.split(" + "))) == pytest.approx(float(result), abs=1e-3)
    prediction = tracefit.load(example).predict_step(batch=32, prefill=512)
    assert prediction.step.value_us == pytest.approx(float(result), abs=1e-9)
    assert prediction.out_of_range == ()
    assert dict(prediction.features)["prefill_share"] == pytest.approx(0.941176, abs=1e-6)


def test_the_numbers_of_the_drift_check_are_the_codes():
    tolerance, page = Tolerance(), (ROOT / "docs/how-to/drift-check.md").read_text().replace("\n", " ")
    assert f"at most {tolerance.factor:g} times the published one" in page
    assert f"{tolerance.factor:g} times the error that the file was published with" in page
    assert page.count(f"plus {tolerance.slack_pct:g} points") == 2
    assert f"fewer than {MIN_TRAIN_ROWS} rows" in page


def test_every_consumer_is_on_the_page():
    for name in consumers.CONSUMERS:
        assert f"| `{name}` |" in PAGE
