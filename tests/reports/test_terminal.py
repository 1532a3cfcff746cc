"""Warnings and output of `report`: the verdicts with their reasons, and where the report is."""

from __future__ import annotations

import shutil

import pytest

from tracefit.commands.report import report
from tracefit.commands.train import train
from tracefit.options import TrainOptions
from tracefit.progress import NullProgress
from tracefit.reports.document import plain
from tracefit.reports.terminal_results import report_text


def test_a_few_lines_have_errors_and_the_report_file(trained, tmp_path):
    result = report(trained, out=tmp_path)
    lines = report_text(result).splitlines()
    assert lines[0].startswith("One server carried ")
    assert "Step times are typically within " in " ".join(lines[:8])
    assert len(lines) < 30
    assert max(len(line) for line in lines if str(tmp_path) not in line) <= 80
    assert lines[-1] == f"open    {tmp_path}/report.html"
    text = " ".join(report_text(result).split())
    page = (tmp_path / "report.md").read_text()
    for deployment_id, uses in result.verdicts.items():
        for use, answer in uses.items():
            reason = result.reasons[deployment_id][use]
            assert f"{use}: {answer}. {reason}" in text
            assert f"| {use} | **{answer}** | {reason} |" in page


class Warned(NullProgress):
    def __init__(self):
        self.texts = []

    def warn(self, text):
        self.texts.append(text)


@pytest.mark.slow
def test_model_with_rows_of_another_training_is_named(trained, tmp_path):
    """Another training on the same tables leaves rows with its own features."""
    shutil.copytree(trained, tmp_path / "out")
    own = tmp_path / "own.yaml"
    own.write_text("name: own\nfeatures: [{name: tokens, unit: token, formula: prefill_tokens + decode_tokens}]\n")
    progress = Warned()
    report(tmp_path / "out", progress=progress)
    assert progress.texts == []
    train(tmp_path / "out/tables", tmp_path / "other", options=TrainOptions(fast=True, features=str(own)))
    report(tmp_path / "out", progress=progress)
    (text,) = progress.texts
    assert text.startswith("beta.cycle_time: no figures, the tables hold the training rows of another training")


def test_marks_are_taken_away_even_within_each_other():
    assert plain("**Run `a_b` was overloaded** by *so* `x*y*z`") == "Run a_b was overloaded by so x*y*z"
