"""`tracefit export` through the entry point: what is written, what is refused, and with which exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_an_export_prints_the_error_of_the_exported_form(tracefit, tmp_path, trained):
    code, out, err = tracefit("export", trained / "models", "--to", "llm-d-inference-sim", "--out", tmp_path / "sim")
    assert (code, err) == (0, "")
    assert "exported form, held out" in out
    assert (tmp_path / "sim" / "config.yaml").exists()
    code, out, _ = tracefit(
        "export",
        trained / "models",
        "--to",
        "llm-d-inference-sim",
        "--out",
        tmp_path,
        "--tables",
        trained / "tables",
        "--json",
    )
    result = json.loads(out)
    assert (code, result["consumer"], result["errors"][0]["unit"]) == (0, "llm-d-inference-sim", "us")
    assert [Path(f).name for f in result["files"]] == ["config.yaml"]


def test_what_cannot_be_converted_is_one_line_and_1(tracefit, tmp_path, trained):
    code, out, err = tracefit("export", trained / "models", "--to", "blis", "--out", tmp_path / "blis")
    assert (code, out) == (1, "")
    assert "the GPU is not known" in err
    assert err.count("\n") == 1
    code, _, err = tracefit("export", trained / "models", "--to", "vidur", "--out", tmp_path / "x")
    assert (code, "per operator" in err) == (1, True)
    code, _, err = tracefit("export", trained / "models", "--to", "nobody", "--out", tmp_path / "x")
    assert (code, "known: aisimulate, blis" in err) == (2, True)
    assert not (tmp_path / "blis").exists()


@pytest.mark.parametrize(
    "command",
    [("export", "--to", "dynamo-mocker", "--out"), ("predict", "--batch", 4), ("predict", "--prompt", 50)],
    ids=lambda command: f"{command[0]} {command[1]}",
)
def test_a_step_model_that_was_not_fitted_is_a_fault_of_the_data(tracefit, tmp_path, trained, command):
    """But a file of step times that was not given is a fault of the command line."""
    beta = json.loads((trained / "models" / "beta.json").read_text())
    missing = {"name": "beta.cycle_time", "reason": "no step was seen", "remedy": "trace steps"}
    beta |= {"models": [], "not_fitted": [missing | {"deployment_id": beta["models"][0]["deployment_id"]}]}
    (tmp_path / "beta.json").write_text(json.dumps(beta))
    (tmp_path / "alpha.json").write_bytes((trained / "models" / "alpha.json").read_bytes())
    what, *options = command
    if what == "export":
        options += [tmp_path / "mocker", "--tables", trained / "tables"]
    code, out, err = tracefit(what, tmp_path, *options)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "was not fitted: no step was seen; trace steps" in err
    code, _, err = tracefit(what, tmp_path / "alpha.json", *options)
    assert (code, "no model beta.cycle_time" in err) == (2, True)
