"""An error that nobody foresaw is one line and exit code 4, and harms nothing that was on disk."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import polars as pl
import pytest

from tracefit.models.targets import TARGETS

COMMANDS = {
    "run": ("numpy.random.default_rng", "run {runs} --out {out} --fast"),
    "ingest": ("polars.DataFrame.with_columns", "ingest {runs} --out {out}/tables"),
    "inspect": ("polars.DataFrame.with_columns", "inspect {runs}"),
    "train": ("numpy.random.default_rng", "train {out} --out {out}/models --fast"),
    "report": ("json.loads", "report {out}"),
    "compare": ("polars.DataFrame.filter", "compare {out} {out}"),
    "verify": ("polars.DataFrame.with_columns", "verify {out}"),
    "requests": ("polars.DataFrame.with_columns", "requests {out}"),
    "plan": ("numpy.random.default_rng", "plan {out} --rate 9 --servers 1 --set num_gpu_blocks=4096"),
    "predict": ("json.loads", "predict {out}/models --batch 3"),
    "export": ("polars.DataFrame.with_columns", "export {out} --to blis --out {out}/blis"),
    "synth": ("polars.DataFrame.__init__", "synth --out {out}/runs --requests 3"),
}
"""Command to a function of a library that its work goes through, and how it is called."""


@pytest.fixture
def out(trained, tmp_path):
    """Return a copy of what the main job left."""
    return shutil.copytree(trained, tmp_path / "out")


def _contents(folder):
    """Return the hash of every file, without the dates of files in the manifest, which an ingest of anything brings up
    to date."""
    contents = {p.relative_to(folder): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}
    undated = {
        name: re.sub(rb'"(modified_ns|stamp)": (null|\d+|"[0-9a-f]+")', b"", data) for name, data in contents.items()
    }
    return {name: hashlib.sha256(data).hexdigest() for name, data in undated.items()}


@pytest.mark.mostly_slow(every=6)
@pytest.mark.parametrize("command", COMMANDS)
def test_an_unexpected_error_is_one_line_and_changes_nothing(tracefit, monkeypatch, trained, out, command):
    target, line = COMMANDS[command]

    def fail(*_, **__):
        raise IndexError("index 3 is out of bounds\nfor axis 0")

    before = _contents(out)
    with monkeypatch.context() as broken:
        broken.setattr(target, fail)
        code, stdout, stderr = tracefit(*line.format(runs=trained.parent / "busy", out=out).split())
    assert (code, stdout, stderr.count("\n")) == (4, "", 1)
    assert stderr.startswith(f"tracefit: {command}")
    assert "unexpected IndexError (index 3 is out of bounds for axis 0)" in stderr
    assert "CONTRIBUTING.md" in stderr
    assert "--log-level debug" in stderr
    assert _contents(out) == before
    assert not list(out.rglob(".writing-*"))


@pytest.mark.slow
@pytest.mark.parametrize("level", [[], ["--log-level", "debug"]], ids=["usual", "debug"])
def test_line_names_the_run_and_debug_log_the_traceback(tracefit, monkeypatch, out, level):
    def fail(*_, **__):
        raise pl.exceptions.PanicException("index out of range")

    monkeypatch.setattr("numpy.random.default_rng", fail)  # which resampling begins with
    code, _, stderr = tracefit("train", out, "--out", out / "models", "--fast", *level)
    assert code == 4
    assert stderr.splitlines()[-1].startswith(f"tracefit: train on {out}: fitting ")
    assert "(busy): unexpected PanicException (index out of range) in " in stderr
    assert ("Traceback (most recent call last)" in stderr) == bool(level)


@pytest.mark.slow
def test_files_of_a_result_are_all_written_or_none(tracefit, monkeypatch, out):
    """The fourth file of the result cannot be made: the three before it stay as they were."""
    before = _contents(out / "models")
    monkeypatch.setattr("jinja2.Template.render", lambda *_, **__: "\ud800")
    code, _, stderr = tracefit("train", out, "--out", out / "models", "--fast", "--features", "batch")
    assert (code, "UnicodeEncodeError" in stderr) == (4, True)
    assert _contents(out / "models") == before


@pytest.mark.slow
@pytest.mark.parametrize("level", [[], ["--log-level", "debug"]], ids=["usual", "debug"])
def test_warnings_of_libraries_reach_the_debug_log_alone(process, trained, level):
    code = """
import warnings
import polars as pl
from tracefit.cli import main
work = pl.DataFrame.with_columns
def noisy(*arguments, **options):
    warnings.warn("invalid value encountered in cast", RuntimeWarning)
    return work(*arguments, **options)
pl.DataFrame.with_columns = noisy
main()
"""
    ended = process("requests", trained, *level, code=code)
    assert ended.returncode == 0, ended.stderr
    assert ("RuntimeWarning: invalid value encountered in cast" in ended.stderr) == bool(level)
    assert level or not ended.stderr


@pytest.mark.slow
def test_a_fit_that_fails_costs_its_own_model(tracefit, monkeypatch, out):
    def fail(*_, **__):
        raise IndexError("boolean index did not match")

    # Only the model of step times fails.
    monkeypatch.setattr("tracefit.fit.deployments.fit_step_times", fail)
    code, _, stderr = tracefit("train", out, "--out", out / "models", "--fast", "--features", "batch")
    assert (code, stderr) == (0, "")
    (deployment,) = json.loads((out / "models" / "evaluation.json").read_text())["deployments"]
    assert "alpha.admission" in deployment["models"]
    reasons = {missing["name"]: missing["reason"] for missing in deployment["not_fitted"]}
    assert reasons["beta.cycle_time"] == "unexpected IndexError (boolean index did not match)"
    assert reasons.keys() | deployment["models"].keys() == {"beta.cycle_time", *(t.model for t in TARGETS)}
