"""The interface through which a command reports its progress: stages, bytes read, warnings.

A command takes any object with these five methods; `NullProgress` ignores everything, the command line draws a line
on the terminal (`tracefit.console.Terminal`).
"""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives reports on the progress of a command."""

    def stage(self, text: str) -> None:
        """Report that a new stage of work begins."""

    def note(self, text: str) -> None:
        """Report how far this stage is, in a few words."""

    def expect(self, size_bytes: int) -> None:
        """Report how many bytes of input this stage is going to read."""

    def read(self, size_bytes: int) -> None:
        """Report that this many more bytes of input have been read."""

    def warn(self, text: str) -> None:
        """Report something the user should know."""


class NullProgress:
    """Progress that ignores every report."""

    def stage(self, text: str) -> None:
        """Do nothing."""

    def note(self, text: str) -> None:
        """Do nothing."""

    def expect(self, size_bytes: int) -> None:
        """Do nothing."""

    def read(self, size_bytes: int) -> None:
        """Do nothing."""

    def warn(self, text: str) -> None:
        """Do nothing."""
