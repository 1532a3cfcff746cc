"""The report in the terminal: the same parts, without marks."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from tracefit.commands.report import report
from tracefit.commands.train import TrainOptions, train
from tracefit.progress import NullProgress
from tracefit.reports.document import Bullets, Figure, Report, Section, Table, Verdicts, plain
from tracefit.reports.terminal import print_report

FILES = (Path("out/report.md"), Path("out/report.html"))


def _printed(made, width=800):
    console = Console(file=io.StringIO(), width=width, legacy_windows=False)
    print_report(made, FILES, console)
    return console.file.getvalue()


def test_what_a_report_says_is_printed_and_where_its_figures_are(trained, tmp_path):
    _, made = report(trained, out=tmp_path)
    printed = _printed(made)
    text = " ".join(printed.split())
    for words in _words(made.parts):
        assert " ".join(plain(words).split()) in text
    assert [line.strip() for line in printed.splitlines()][-2:] == ["out/report.md", "out/report.html"]


class Warned(NullProgress):
    def __init__(self):
        self.texts = []

    def warn(self, text):
        self.texts.append(text)


@pytest.mark.slow
def test_a_model_whose_training_rows_are_those_of_another_training_is_named(trained, tmp_path):
    """Another training on the same tables leaves rows with its own features."""
    shutil.copytree(trained, tmp_path / "out")
    own = tmp_path / "own.yaml"
    own.write_text(
        "name: own\nfeatures: [{name: tokens, unit: token, formula: prefill_tokens + decode_tokens}]\n"
    )
    progress = Warned()
    report(tmp_path / "out", progress=progress)
    assert progress.texts == []
    train(tmp_path / "out/tables", tmp_path / "other", options=TrainOptions(fast=True, features=str(own)))
    report(tmp_path / "out", progress=progress)
    (text,) = progress.texts
    assert text.startswith(
        "beta.cycle_time: no figures, the tables hold the training rows of another training"
    )


def test_tables_behind_figures_and_folds_are_left_to_the_files():
    rows = tuple((str(n),) for n in range(1000))
    figure = Figure("f", "f", "A title", "Look for it.", Table(("bin",), rows), (), {})
    made = Report("t", parts=(figure, Table(("row",), rows, folded="Every row"), Table(("kept",), (("7",),))))
    lines = [line.strip() for line in _printed(made, 60).splitlines()]
    assert "figure: A title" in lines
    assert "999" not in lines
    assert "7" in lines


def _words(parts):
    """Yield every text of a report."""
    for part in parts:
        match part:
            case Section():
                yield part.title
                yield from _words(part.parts)
            case Bullets(items):
                yield from items
            case Verdicts(uses):
                yield from (words for one in uses for words in (one.use, one.answer, one.sentence))
            case Figure():
                yield part.title
            case Table():
                yield from (c for row in part.rows for c in row if not part.folded)
            case _:
                yield part


def test_marks_are_taken_away_even_within_each_other():
    assert plain("**Run `a_b` was overloaded** by *so* `x*y*z`") == "Run a_b was overloaded by so x*y*z"


def test_numbers_stand_to_the_right():
    table = Table(("part", "ms"), (("all", "1.5"), ("hold-out", "123")))
    lines = [line.rstrip() for line in _printed(Report("t", parts=(table,)), 60).splitlines()]
    ends = [len(line) for line in lines if line.endswith((" ms", "1.5", "123"))]
    assert len(ends) == 3
    assert len(set(ends)) == 1
