"""The package as a Python program uses it: paths of any kind, the folder `run` wrote, names in errors."""

from __future__ import annotations

from pathlib import Path

import pytest

import tracefit
from tracefit.commands.plan import plan_ingest


def test_the_package_lists_its_commands():
    listed = dir(tracefit)
    assert {
        "run",
        "ingest",
        "train",
        "inspect",
        "requests",
        "predict",
        "export",
        "compare",
        "verify",
        "report",
    } <= set(listed)
    assert {"load", "Models", "TrainOptions"} <= set(listed)


@pytest.mark.parametrize("kind", [str, Path, lambda p: [str(p)], lambda p: (p for p in [p])])
def test_paths_are_one_path_or_several(traces, tmp_path, kind):
    folder = traces.load(steps=40, requests=5).write(tmp_path / "busy")
    plan = plan_ingest(kind(folder), tmp_path / "tables")
    assert {f.run_id for f in plan.files} == {"busy"}


def test_one_path_is_not_read_letter_by_letter(traces, tmp_path):
    folder = traces.load(steps=40, requests=5).write(tmp_path / "busy")
    assert [r.run_id for r in tracefit.inspect(str(folder)).runs] == ["busy"]
    assert [r.run_id for r in tracefit.ingest(str(folder), tmp_path / "tables").runs] == ["busy"]


def test_models_load_and_show_themselves(trained):
    models = tracefit.Models.load(trained)
    (scope,) = models.scope_ids
    assert "beta.cycle_time" in repr(models)
    assert scope in repr(models)
    assert "beta.cycle_time" in repr(models.scope())
    assert models.model("beta.cycle_time").scope_id == scope


def test_commands_take_the_folder_that_run_wrote(trained, tmp_path):
    assert tracefit.requests(trained).total.requests == 90
    assert [r.run_id for r in tracefit.inspect(trained).runs] == ["busy"]
    assert tracefit.export(trained, "csv", tmp_path / "csv").files
    assert tracefit.compare(trained, trained).models
    (tmp_path / "rows.csv").write_text("batch,prefill\n4,40\n")
    assert tracefit.predict(trained, tmp_path / "rows.csv", run="busy").rows == 1


def test_a_scope_is_chosen_by_the_name_of_a_run(trained, tmp_path):
    assert tracefit.export(trained, "csv", tmp_path, run="busy").scope_id
    with pytest.raises(tracefit.UsageError, match="did you mean busy"):
        tracefit.export(trained, "csv", tmp_path, run="buzy")
    with pytest.raises(tracefit.UsageError, match="run busy is not of scope other"):
        tracefit.export(trained, "csv", tmp_path, run="busy", scope="other")


def test_errors_name_parameters_in_python_and_flags_on_the_command_line():
    error = tracefit.UsageError("several scopes are there", hint="name one with --scope or --run: a, b")
    assert str(error) == "several scopes are there; name one with `scope` or `run`: a, b"
    assert error.line() == "several scopes are there; name one with --scope or --run: a, b"
    server = tracefit.DataError("no steps", hint="start it with --step-tracing-enabled --run-config-x")
    assert str(server).endswith("--step-tracing-enabled --run-config-x"), "flags of others stay flags"
