"""The interface through which a command reports its progress: stages, bytes read, warnings.

A command takes any object with these methods; `NullProgress` ignores everything, the command line draws a line
on the terminal (`tracefit.console.Terminal`).
"""

from __future__ import annotations

from typing import Any, Protocol


class Progress(Protocol):
    """Receives reports on the progress of a command."""

    def stage(self, text: str) -> None:
        """Report that a new stage of work begins."""

    def note(self, text: str) -> None:
        """Report the progress of this stage in a few words."""

    def expect(self, size_bytes: int) -> None:
        """Report how many bytes of input this stage is going to read."""

    def read(self, size_bytes: int) -> None:
        """Report that this many more bytes of input have been read."""

    def expect_parts(self, parts: int) -> None:
        """Report how many parts of about equal work this and the next stages have."""

    def finish_part(self) -> None:
        """Report that one part is done."""

    def warn(self, text: str) -> None:
        """Report a warning for the user."""


class NullProgress:
    """Progress that ignores every report."""

    def stage(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    # One method under all names: all of them ignore their arguments.
    note = expect = read = expect_parts = finish_part = warn = stage


class KeptWarnings:
    """Passes every report on, and keeps the warnings for the result of the command."""

    def __init__(self, progress: Progress | None) -> None:
        self.warnings: list[str] = []
        self._progress = progress or NullProgress()
        self.stage, self.note = self._progress.stage, self._progress.note
        self.expect, self.read = self._progress.expect, self._progress.read
        self.expect_parts, self.finish_part = self._progress.expect_parts, self._progress.finish_part

    def warn(self, text: str) -> None:
        """Keep a warning, and pass it on."""
        self.warnings.append(text)
        self._progress.warn(text)
