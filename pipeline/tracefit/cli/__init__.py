"""The command line: turn arguments into one call of the library. Heavy imports happen inside the commands."""

from __future__ import annotations

import sys

from tracefit.cli import commands
from tracefit.cli.program import app
from tracefit.console import run_program
from tracefit.memory import reuse_freed

__all__ = ["app", "commands", "main"]


def main() -> None:
    """Run the command line."""
    # Before any library is imported: the allocators read their settings when they start.
    reuse_freed()
    sys.exit(run_program(app))
