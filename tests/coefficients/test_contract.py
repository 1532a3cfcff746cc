"""The published contract: the three forms, the JSON Schemas, and what training writes against both."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import jsonschema
import pydantic
import pytest

from scripts.make_schemas import schema_texts
from tracefit.coefficients.documents import CoefficientFile
from tracefit.coefficients.files import read_coefficients

SCHEMAS = Path(__file__).parents[2] / "schemas"
PUBLISHED = sorted(str(path.relative_to(SCHEMAS)) for path in SCHEMAS.rglob("*.json"))

LINEAR = """{"name": "beta.cycle_time", "deployment_id": "…", "target": {"definition": "start of a step to start of the next, engine busy", "unit": "us", "source": "step_clock"},
 "form": "linear", "intercept": {"value": 7408.99, "ci95": [7391.2, 7427.0]},
 "terms": [{"feature": "prefill_tokens", "unit": "us/token", "value": 26.59, "ci95": [26.1, 27.1], "training_range": [0, 2048]}]}"""
REGIMES = """{"name": "alpha.queue_wait", "form": "regimes", "regimes": [
   {"name": "queued", "when": {"any": [{"feature": "free_slots", "op": "<=", "value": 0}, {"feature": "block_demand_ahead", "op": ">", "feature2": "kv_blocks_free"}]},
    "intercept": {"value": 0.0}, "terms": []},
   {"name": "free", "when": {"all": []}, "intercept": {"value": 197.0}, "terms": []}]}"""
BOUNDARY = """{"name": "alpha.admission", "form": "boundary", "boundary": "step_start",
 "work": {"intercept": {"value": 1400.0}, "terms": [{"feature": "prompt_tokens", "unit": "us/token", "value": 0.4}]}, "offset": {"value": -30.0},
 "without_clock": {"form": "linear", "intercept": {"value": 9315.0}, "terms": []}}"""
FORMS = {"linear": LINEAR, "regimes": REGIMES, "boundary": BOUNDARY}


texts = cache(schema_texts)


def _wrapped(*models):
    wrapped = [json.loads(text) for text in models]
    return {"schema": "tracefit/coefficients", "version": 4, "kind": "alpha", "models": wrapped}


def _schema(name):
    return json.loads((SCHEMAS / f"{name}.schema.json").read_text())


@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize("form", FORMS)
def test_the_published_example_of_each_form_is_read_and_valid(tmp_path, form):
    path = tmp_path / "alpha.json"
    path.write_text(json.dumps(_wrapped(FORMS[form])))
    assert read_coefficients(path).models[0].form == form
    jsonschema.validate(_wrapped(FORMS[form]), _schema("coefficients"), jsonschema.Draft202012Validator)


def test_the_numbers_of_the_examples_arrive():
    linear, regimes, boundary = CoefficientFile.model_validate(_wrapped(*FORMS.values())).models
    assert (linear.intercept.ci95, linear.terms[0].training_range) == ((7391.2, 7427.0), (0, 2048))
    assert regimes.regimes[0].when.any[1].feature2 == "kv_blocks_free"
    assert regimes.regimes[1].when.all == ()
    assert (boundary.work.terms[0].value, boundary.offset.value) == (0.4, -30)
    assert boundary.without_clock.intercept.value == 9315


@pytest.mark.skipif(
    tuple(map(int, pydantic.VERSION.split(".")[:2])) < (2, 14),
    reason="older pydantic says the same in other words",
)
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_schemas_are_those_of_the_code(name):
    assert (SCHEMAS / name).read_text(encoding="utf-8") == texts()[name], "run `make schemas`"


def test_attributes_of_docstrings_describe_the_keys():
    metrics = _schema("coefficients")["$defs"]["Metrics"]
    assert metrics["properties"]["mae"]["description"] == "Mean absolute error."
    assert not [name for name, text in texts().items() if "Attributes:" in text]


def test_nothing_else_is_published():
    assert set(texts()) == set(PUBLISHED)


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("name", ["coefficients", "evaluation"])
def test_the_schemas_are_json_schemas_of_2020_12(name):
    schema = _schema(name)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("models/alpha.json", "coefficients"),
        ("models/beta.json", "coefficients"),
        ("evaluation.json", "evaluation"),
    ],
)
def test_files_of_training_are_valid(trained, file, name):
    document = json.loads((trained / file).read_text())
    jsonschema.validate(document, _schema(name), jsonschema.Draft202012Validator)
    assert document["schema"] == f"tracefit/{name}"


def test_schema_refuses_an_unknown_key():
    document = _wrapped(LINEAR) | {"surprise": 1}
    assert not jsonschema.Draft202012Validator(_schema("coefficients")).is_valid(document)


def test_written_model_states_its_target_and_training(trained):
    beta = json.loads((trained / "models" / "beta.json").read_text())
    model = beta["models"][0]
    assert (beta["kind"], model["name"], model["form"]) == ("beta", "beta.cycle_time", "linear")
    assert model["target"]["unit"] == "us"
    assert model["target"]["source"] == "step_clock"
    assert model["training"]["runs"] == ["busy"]
    assert model["training"]["exclusions"]["warm_up"] == 20
    assert model["training"]["rows_used"] + 20 <= model["training"]["rows"]
    assert model["deployment"]["model"] == "meta-llama/Llama-2-7b-hf"
    assert beta["provenance"]["tool"] == "tracefit"
    for term in model["terms"]:
        assert term["ci95"][0] <= term["value"] <= term["ci95"][1]
        assert term["training_range"][0] < term["training_range"][1]


def test_value_that_no_input_stated_is_marked_as_assumed(trained):
    deployment = json.loads((trained / "models" / "beta.json").read_text())["models"][0]["deployment"]
    assumed = " ".join(deployment["assumed"])
    assert "gpu_memory_utilization" in assumed
    assert "max_num_seqs" not in assumed


def test_validation_is_the_entry_of_the_evaluation(trained):
    evaluation = json.loads((trained / "evaluation.json").read_text())
    entries = evaluation["deployments"][0]["models"]
    for name in ("alpha", "beta"):
        for model in json.loads((trained / "models" / f"{name}.json").read_text())["models"]:
            assert model["validation"] == entries[model["name"]]
    assert set(entries) == {"beta.cycle_time", "alpha.queue_wait", "alpha.admission", "alpha.departure"}


@pytest.mark.slow
def test_the_evaluation_counts_what_was_read(trained):
    ingest = json.loads((trained / "evaluation.json").read_text())["ingest"]
    assert ingest["spans"] == 1 + 2 * 90
    assert ingest["events"] == {
        "api.ARRIVED": 90,
        "api.DEPARTED": 90,
        "journey.FINISHED": 90,
        "journey.FIRST_TOKEN": 90,
        "journey.QUEUED": 90,
        "journey.SCHEDULED": 90,
        "step.BATCH_SUMMARY": 240,
    }
    assert (ingest["files"], ingest["rejects"], ingest["duplicates"], ingest["dropped_events"]) == (
        1,
        0,
        0,
        0,
    )


def test_the_timeline_entry_counts_steps(trained):
    timeline = json.loads((trained / "evaluation.json").read_text())["deployments"][0]["timeline"]
    assert (timeline["servers"], timeline["epochs"], timeline["adjacent_cycles"]) == (1, 1, 239)
    assert timeline["step_sampling"] == 1.0
    assert timeline["duration_coverage"] == pytest.approx(0.05, rel=0.01)
