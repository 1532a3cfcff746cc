"""The command line, run in this process or in one of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest


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
