"""Files of earlier releases still load: `released/<version>/` holds what tracefit wrote when that version began.

They are never regenerated. A change that cannot read them needs a new version of the file.
"""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

import tracefit
from tracefit.coefficients.files import read_coefficients, read_evaluation, read_plain
from tracefit.coefficients.model import CoefficientFile, Evaluation

RELEASED = Path(__file__).parent / "released"
SCHEMAS = Path(__file__).parents[2] / "schemas"
VERSIONS = sorted(p.name for p in RELEASED.iterdir())


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", ["alpha", "beta"])
def test_coefficient_files_of_every_version_still_load(version, kind):
    path = RELEASED / version / f"{kind}.json"
    plain, file = json.loads(path.read_text()), read_coefficients(path)
    assert [m.name for m in file.models] == [m["name"] for m in plain["models"]]
    assert [m.scope_id for m in file.models] == [m["scope_id"] for m in plain["models"]]


@pytest.mark.parametrize("version", VERSIONS)
def test_evaluations_of_every_version_still_load(version):
    path = RELEASED / version / "evaluation.json"
    plain = json.loads(path.read_text())
    scope = read_evaluation(path).scopes[0]
    wanted = plain["scopes"][0]["models"]["beta.cycle_time"]["holdout"]["mae"]
    assert scope.models["beta.cycle_time"].holdout.mae == wanted


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["alpha", "beta", "evaluation"])
def test_files_of_every_version_are_valid_by_the_published_schema_once_read(version, name):
    kind = Evaluation if name == "evaluation" else CoefficientFile
    schema = "evaluation" if name == "evaluation" else "coefficients"
    jsonschema.validate(
        read_plain(RELEASED / version / f"{name}.json", kind),
        json.loads((SCHEMAS / f"{schema}.schema.json").read_text()),
        jsonschema.Draft202012Validator,
    )


def test_every_key_of_version_1_that_has_another_name_today_keeps_its_value():
    plain = json.loads((RELEASED / "1" / "beta.json").read_text())["models"][0]
    model = read_coefficients(RELEASED / "1" / "beta.json").models[0]
    assert [t.training_range for t in model.terms] == [tuple(t["seen"]) for t in plain["terms"]]
    assert model.validation.gradient_boosting.mae == plain["validation"]["reference"]["mae"]
    assert {k: m.mae for k, m in model.validation.by_group.items()} == {
        k: m["mae"] for k, m in plain["validation"]["by"].items()
    }
    assert model.validation.rows_by_source == plain["validation"]["equations"]
    old = json.loads((RELEASED / "1" / "alpha.json").read_text())["models"]
    for was, now in zip(old, read_coefficients(RELEASED / "1" / "alpha.json").models, strict=True):
        assert now.validation.boundary_accuracy_pct == was["validation"]["right_boundary_pct"]
    scope = json.loads((RELEASED / "1" / "evaluation.json").read_text())["scopes"][0]
    now = read_evaluation(RELEASED / "1" / "evaluation.json").scopes[0]
    assert now.timeline.beta_target_reason == scope["timeline"]["beta_target_because"]


def test_predictions_of_version_1_are_what_they_were():
    """Intercept and terms of the 8b scope in released/1/beta.json, put in by hand."""
    prediction = tracefit.load(RELEASED / "1").predict_step(scope="llama-3.1-8b", batch=32, prefill=512)
    by_hand = 7003.73635 + 25.9078545 * 512 - 4.3198 * 1 + 16.4753523 * 32 + 95.9923371 * 512 / 544
    assert prediction.step.value_us == pytest.approx(by_hand, rel=1e-9)


def test_names_of_version_1_that_are_words_of_its_keys_stay_as_they_are(tmp_path):
    """A definition and a group of rows may be called `seen` or `reference`."""
    plain = json.loads((RELEASED / "1" / "beta.json").read_text())
    model = plain["models"][0]
    model["definitions"] = {"seen": "1", "reference": "seen + 1"}
    model["validation"]["by"] = {"reference": model["validation"]["holdout"]}
    (tmp_path / "beta.json").write_text(json.dumps(plain))
    read = read_coefficients(tmp_path / "beta.json").models[0]
    assert read.definitions == {"seen": "1", "reference": "seen + 1"}
    assert set(read.validation.by_group) == {"reference"}
