"""The examples in the docstrings of the Python API run, on a small generated run."""

from __future__ import annotations

import doctest
import inspect

import pytest

import tracefit
from tracefit.synth import SynthOptions, synth, write_run

METHODS = ("coefficients", "deployment", "model", "predict_step", "predict_request")
PUBLIC = {
    # First `run`, which makes the folder `out/` of the other examples.
    "run": tracefit.run,
    **{n: f for n in tracefit.__all__ if inspect.isfunction(f := getattr(tracefit, n))},
    **{f"Models.{name}": getattr(tracefit.Models, name) for name in METHODS},
}


def _example(name):
    (example,) = doctest.DocTestFinder(recurse=False).find(PUBLIC[name], name, globs={})
    return example


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_function_has_an_example(name):
    assert _example(name).examples


@pytest.mark.slow
def test_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(synth(SynthOptions(name="busy", requests=100, seed=3)), tmp_path / "runs")
    failures = []
    runner = doctest.DocTestRunner(verbose=False)
    for name in PUBLIC:
        runner.run(_example(name), out=failures.append)
    assert not failures, "".join(failures)
