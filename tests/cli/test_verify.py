"""`tracefit verify`: every number of a file refitted, or the input that differs named."""

from __future__ import annotations

import json
import shutil

import pytest

from tracefit.commands.ingest import ingest
from tracefit.commands.train import train
from tracefit.options import TrainOptions


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["alpha", "beta"])
def test_a_file_is_confirmed_by_the_tables_it_came_from(tracefit, trained, kind):
    code, out, err = tracefit("verify", trained / f"models/{kind}.json", "--tables", trained / "tables", "--json")
    result = json.loads(out)
    assert (code, err, result["verified"], result["differing"], result["inputs"]) == (0, "", True, 0, [])
    text = (trained / f"models/{kind}.json").read_text()
    assert result["numbers"] > 50 * len(json.loads(text)["models"])


@pytest.fixture
def changed(trained, tmp_path):
    """Return a function that changes one number of a copy of beta.json and returns the copy."""

    def copy(change):
        document = json.loads((trained / "models/beta.json").read_text())
        change(document["models"][0])
        path = tmp_path / "beta.json"
        path.write_text(json.dumps(document))
        return path

    return copy


def _scale(model, factor):
    model["terms"][0]["value"] *= factor


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "code"), [(1 + 1e-5, 1), (1 + 1e-8, 0)])
def test_a_number_that_was_changed_is_found_beyond_a_millionth(tracefit, trained, changed, factor, code):
    path = changed(lambda m: _scale(m, factor))
    found, out, _ = tracefit("verify", path, "--tables", trained / "tables")
    assert found == code
    assert ("terms[0].value" in out) == bool(code)
    assert ("NOT verified" in out) == bool(code)


@pytest.mark.slow
def test_an_error_that_was_prettied_is_found(tracefit, trained, changed):
    def pretty(model):
        model["validation"]["holdout"]["mape_pct"] /= 2

    code, out, _ = tracefit("verify", changed(pretty), "--tables", trained / "tables")
    assert code == 1
    assert "validation.holdout.mape_pct" in out


@pytest.mark.slow
def test_other_traces_under_the_same_name_are_named(tracefit, trained, tmp_path, new_traces):
    ingest([new_traces().load(seed=5).write(tmp_path / "busy")], tmp_path / "tables")
    code, out, _ = tracefit("verify", trained / "models/beta.json", "--tables", tmp_path / "tables")
    assert code == 1
    assert "input differs: traces of run busy" in out
    assert "settings, config.json" not in out


@pytest.mark.slow
def test_another_configuration_is_named(tracefit, trained, tmp_path, new_traces):
    folder = new_traces().load().write(tmp_path / "busy")
    (folder / "exp-config.yaml").write_text((folder / "exp-config.yaml").read_text() + "block_size: 32\n")
    ingest([folder], tmp_path / "tables")
    code, out, _ = tracefit("verify", trained / "models/beta.json", "--tables", tmp_path / "tables")
    assert code == 1
    assert "input differs: settings, config.json or GPU of run busy" in out
    assert "traces of run busy" not in out


@pytest.mark.slow
def test_a_run_that_is_not_there_is_named(tracefit, trained, tmp_path, new_traces):
    ingest([new_traces().load(steps=60, requests=5).write(tmp_path / "other")], tmp_path / "tables")
    code, out, _ = tracefit("verify", trained / "models/beta.json", "--tables", tmp_path / "tables")
    assert code == 1
    assert "run busy is not in the tables" in out


@pytest.mark.slow
def test_a_feature_set_file_is_an_input_too(tracefit, trained, tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("features:\n- {name: decoding, unit: request, formula: num_decode_reqs}\n")
    tables = shutil.copytree(trained / "tables", tmp_path / "tables")  # training writes its frames there
    train(tables, tmp_path / "m", options=TrainOptions(features=str(own)))
    asked = ("verify", tmp_path / "m/beta.json", "--tables", tables)
    assert tracefit(*asked)[0] == 0
    moved = shutil.move(own, tmp_path / "moved.yaml")
    code, out, _ = tracefit(*asked)
    assert (code, "own.yaml cannot be read; name it with --features" in out) == (1, True)
    assert tracefit(*asked, "--features", moved)[0] == 0
    (tmp_path / "moved.yaml").write_text("features:\n- {name: d, unit: request, formula: num_decode_reqs}\n")
    code, out, _ = tracefit(*asked, "--features", moved)
    assert (code, "moved.yaml: sha256" in out) == (1, True)


def test_a_file_that_does_not_say_how_it_was_made_is_refused(tracefit, trained, tmp_path):
    document = json.loads((trained / "models/beta.json").read_text()) | {"provenance": None}
    (tmp_path / "beta.json").write_text(json.dumps(document))
    code, out, err = tracefit("verify", tmp_path / "beta.json", "--tables", trained / "tables")
    assert (code, out) == (1, "")
    assert "does not say how it was made" in err
    assert err.count("\n") == 1


def test_the_file_says_what_it_was_made_of(trained):
    document = json.loads((trained / "models/beta.json").read_text())
    training = document["models"][0]["training"]
    assert [one["run_id"] for one in training["inputs"]] == ["busy"]
    assert len(training["inputs"][0]["traces_sha256"]) == len(training["inputs"][0]["context_sha256"]) == 64
    assert training["time_range"][0]["holdout_from_ns"] > training["time_range"][0]["first_ns"]
    assert {"numpy", "polars"} <= set(document["provenance"]["libraries"])
    assert {"beta_target", "features", "positive"} <= set(document["provenance"]["options"])
