"""Progress on a terminal, silence elsewhere."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

from tracefit.console import Terminal, command
from tracefit.errors import DataError, UsageError


class _Screen(io.StringIO):
    def isatty(self):
        return True


def test_progress_shows_on_a_terminal_and_goes_away(monkeypatch):
    screen = _Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal(quiet=False)
    terminal.stage("reading busy")
    terminal.read(2_500_000)
    terminal.close()
    assert "reading busy" in screen.getvalue()


@pytest.mark.parametrize("quiet", [False, True])
def test_no_progress_where_nobody_watches(monkeypatch, capsys, quiet):
    terminal = Terminal(quiet=quiet)
    terminal.stage("reading")
    terminal.read(10)
    terminal.warn("odd")
    terminal.close()
    assert capsys.readouterr().err == ("" if quiet else "warning: odd\n")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (
            UsageError("is not JSON", where="f.json", hint="write it\nagain"),
            2,
            "tracefit: f.json: is not JSON; write it again\n",
        ),
        (DataError("too few rows"), 1, "tracefit: too few rows\n"),
    ],
)
def test_errors_are_one_line_and_their_exit_code(capsys, error, code, line):
    with pytest.raises(typer.Exit) as ended, command("try", quiet=True):
        raise error
    assert ended.value.exit_code == code
    assert capsys.readouterr().err == line


@dataclass
class _Result:
    out: Path
    parts: tuple[Path, ...] = ()


def test_results_are_text_or_json_or_nothing(capsys):
    result = _Result(Path("a"), (Path("b"),))
    Terminal(quiet=False).show(result, "text\n\n", as_json=False)
    assert capsys.readouterr().out == "text\n"
    Terminal(quiet=True).show(result, "text", as_json=False)
    assert capsys.readouterr().out == ""
    Terminal(quiet=False).show(result, "text", as_json=True)
    assert capsys.readouterr().out == '{\n  "out": "a",\n  "parts": [\n    "b"\n  ]\n}\n'


def test_bytes_to_read_are_a_bar_with_rate_and_time_left(monkeypatch):
    screen = _Screen()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal(quiet=False)
    terminal.stage("reading run")
    terminal.expect(4_000_000)
    terminal.read(1_000_000)
    terminal.read(1_000_000)
    terminal.close()
    assert "reading run" in screen.getvalue()
    assert "2.0/4.0 MB" in screen.getvalue()
    assert "MB/s" in screen.getvalue() or "?" in screen.getvalue()


def test_parts_of_work_are_one_bar_over_several_stages(monkeypatch):
    screen = _Screen()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal(quiet=False)
    terminal.expect_parts(3)
    for name in ("one", "two"):
        terminal.stage(f"fitting {name}")
        terminal.finish_part()
    terminal.close()
    assert "fitting two" in screen.getvalue()
    assert "2/3" in screen.getvalue()
