"""The report in the terminal: the same parts, without marks."""

from __future__ import annotations

import io

from rich.console import Console

from tracefit.commands.report import report
from tracefit.reports.document import Figure, Panel, Report, Series, Table
from tracefit.reports.markdown import plain
from tracefit.reports.terminal import print_report


def _printed(made, width=800):
    console = Console(file=io.StringIO(), width=width, legacy_windows=False)
    print_report(made, console)
    return console.file.getvalue()


def test_every_part_is_printed(trained, tmp_path):
    _, made = report(trained, out=tmp_path)
    text = " ".join(_printed(made).split())
    for part in made.parts:
        if isinstance(part, str):
            assert " ".join(plain(part.lstrip("# ")).split()) in text
        else:
            table = part.summary if isinstance(part, Figure) else part
            for cell in (c for row in table.rows for c in row if c):
                assert " ".join(plain(cell).split()) in text


def test_marks_are_taken_away_even_within_each_other():
    assert plain("**Run `a_b` was overloaded** by *so* `x*y*z`") == "Run a_b was overloaded by so x*y*z"


def test_numbers_stand_to_the_right_and_figures_are_their_summary():
    summary = Table(("part", "ms"), (("all", "1.5"), ("hold-out", "123")))
    figure = Figure(
        "f", "A title", "Look for it.", "x", (Panel("y", (Series("s", "line", (1.0,), (2.0,)),)),), summary
    )
    lines = [line.rstrip() for line in _printed(Report("t", (figure,)), 60).splitlines()]
    assert "A title" in lines
    ends = [len(line) for line in lines if line.endswith((" ms", "1.5", "123"))]
    assert len(ends) == 3
    assert len(set(ends)) == 1
