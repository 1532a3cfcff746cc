"""An error that nobody foresaw is one line and exit code 4, and harms nothing that was on disk."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import polars as pl
import pytest

COMMANDS = {
    "run": ("tracefit.commands.train.train", "run {runs} --out {out} --fast"),
    "ingest": ("tracefit.commands.ingest.open_inputs", "ingest {runs} --out {out}/tables"),
    "inspect": ("tracefit.commands.inspect.open_inputs", "inspect {runs}"),
    "train": ("tracefit.commands.train.fit_scope", "train {out} --out {out}/models"),
    "report": ("tracefit.reports.page.html_page", "report {out}"),
    "compare": ("tracefit.commands.compare.compare", "compare {out} {out}"),
    "verify": ("tracefit.commands.verify.fit_runs", "verify {out}"),
    "requests": ("tracefit.commands.requests.requests", "requests {out}"),
    "predict": ("tracefit.coefficients.models.Models.predict_step", "predict {out}/models --batch 3"),
    "export": ("tracefit.commands.export._trained_on", "export {out} --to blis --out {out}/blis"),
    "features": ("tracefit.commands.train.beta_feature_sets", "features"),
    "synth": ("tracefit.synth.run.json_lines", "synth --out {out}/runs --requests 3"),
}
"""Command to a function that its work goes through, and how it is called."""


@pytest.fixture
def out(trained, tmp_path):
    """Return a copy of what the main job left."""
    return shutil.copytree(trained, tmp_path / "out")


def _contents(folder):
    files = [p for p in Path(folder).rglob("*") if p.is_file()]
    return {p.relative_to(folder): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unexpected_error_is_one_line_and_changes_nothing(tracefit, monkeypatch, trained, out, command):
    target, line = COMMANDS[command]

    def fail(*_, **__):
        raise IndexError("index 3 is out of bounds\nfor axis 0")

    before = _contents(out)
    monkeypatch.setattr(target, fail)
    code, stdout, stderr = tracefit(*line.format(runs=trained.parent / "busy", out=out).split())
    assert (code, stdout, stderr.count("\n")) == (4, "", 1)
    assert stderr.startswith(f"tracefit: {command}")
    assert "unexpected IndexError (index 3 is out of bounds for axis 0)" in stderr
    assert "CONTRIBUTING.md" in stderr
    assert "--log-level debug" in stderr
    assert _contents(out) == before
    assert not list(out.rglob(".writing-*"))


def test_the_line_names_the_run_and_the_debug_log_has_the_traceback(tracefit, monkeypatch, out):
    def fail(*_, **__):
        raise pl.exceptions.PanicException("index out of range")

    monkeypatch.setattr("tracefit.commands.train.fit_scope", fail)
    for level in ([], ["--log-level", "debug"]):
        code, _, stderr = tracefit("train", out, "--out", out / "models", "--fast", *level)
        assert code == 4
        assert stderr.splitlines()[-1].startswith(f"tracefit: train on {out}: fitting ")
        assert "(busy): unexpected PanicException (index out of range) in train.py:" in stderr
        assert ("Traceback (most recent call last)" in stderr) == bool(level)


@pytest.mark.slow
def test_files_of_a_result_are_all_written_or_none(tracefit, monkeypatch, out):
    """The fourth file of the result cannot be made: the three before it stay as they were."""
    before = _contents(out / "models")
    monkeypatch.setattr("tracefit.reports.page.html_page", lambda _: "\ud800")
    code, _, stderr = tracefit("train", out, "--out", out / "models", "--fast", "--features", "batch")
    assert (code, "UnicodeEncodeError" in stderr) == (4, True)
    assert _contents(out / "models") == before


@pytest.mark.slow
def test_warnings_of_libraries_reach_the_debug_log_alone(process, trained):
    code = """
import warnings
from tracefit.commands import requests
from tracefit.cli import main
work = requests.requests
def noisy(*arguments, **options):
    warnings.warn("invalid value encountered in cast", RuntimeWarning)
    return work(*arguments, **options)
requests.requests = noisy
main()
"""
    for level in ([], ["--log-level", "debug"]):
        ended = process("requests", trained, *level, code=code)
        assert ended.returncode == 0, ended.stderr
        assert ("RuntimeWarning: invalid value encountered in cast" in ended.stderr) == bool(level)
        assert level or not ended.stderr


def test_a_fit_that_fails_costs_its_own_model(tracefit, monkeypatch, out):
    def fail(*_, **__):
        raise IndexError("boolean index did not match")

    monkeypatch.setattr("tracefit.fit.scopes.fit_step_times", fail)
    code, _, stderr = tracefit("train", out, "--out", out / "models", "--fast", "--features", "batch")
    assert (code, stderr) == (0, "")
    (scope,) = json.loads((out / "models" / "evaluation.json").read_text())["scopes"]
    assert set(scope["models"]) == {"alpha.queue_wait", "alpha.admission", "alpha.departure"}
    (missing,) = scope["not_fitted"]
    assert missing["name"] == "beta.cycle_time"
    assert missing["reason"] == "unexpected IndexError (boolean index did not match)"
