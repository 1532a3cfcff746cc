"""The command line, run in this process or in one of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tracefit.cli import main


@pytest.fixture
def tracefit(monkeypatch, capsys):
    """Return a function that runs the entry point: exit code, stdout, stderr."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["tracefit", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return ended.value.code or 0, said.out, said.err

    return call


@pytest.fixture
def quick():
    """Return the options that spare a test half of the training."""
    return "--fast", "--features", "batch"


@pytest.fixture(scope="session")
def process():
    """Return a function that runs the command in a process of its own."""

    def call(*arguments, code="from tracefit.cli import main; main()"):
        command = [sys.executable, "-c", code, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    return call
