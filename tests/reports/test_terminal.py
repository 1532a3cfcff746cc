"""The report in the terminal: the same parts, without marks."""

from __future__ import annotations

import io

from rich.console import Console

from tracefit.commands.report import report
from tracefit.reports.document import Bullets, Figure, Report, Section, Table, Verdicts
from tracefit.reports.markdown import plain
from tracefit.reports.terminal import print_report


def _printed(made, width=800):
    console = Console(file=io.StringIO(), width=width, legacy_windows=False)
    print_report(made, console)
    return console.file.getvalue()


def test_every_part_is_printed(trained, tmp_path):
    _, made = report(trained, out=tmp_path)
    text = " ".join(_printed(made).split())
    for words in _words(made.parts):
        assert " ".join(plain(words).split()) in text


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
                yield from (part.title, part.look, part.note)
                yield from (c for row in part.summary.rows for c in row)
            case Table():
                yield from (c for row in part.rows for c in row)
            case _:
                yield part


def test_marks_are_taken_away_even_within_each_other():
    assert plain("**Run `a_b` was overloaded** by *so* `x*y*z`") == "Run a_b was overloaded by so x*y*z"


def test_numbers_stand_to_the_right_and_figures_are_their_summary():
    summary = Table(("part", "ms"), (("all", "1.5"), ("hold-out", "123")))
    figure = Figure("f", "f", "A title", "Look for it.", summary, (), {})
    lines = [line.rstrip() for line in _printed(Report("t", parts=(figure,)), 60).splitlines()]
    assert "A title" in lines
    ends = [len(line) for line in lines if line.endswith((" ms", "1.5", "123"))]
    assert len(ends) == 3
    assert len(set(ends)) == 1
