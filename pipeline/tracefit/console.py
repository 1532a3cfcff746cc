"""What the command line says and where: progress and warnings on stderr, results on stdout, errors in one line."""

from __future__ import annotations

import dataclasses
import json
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tracefit.errors import TracefitError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.status import Status


class Terminal:
    """Tells a person of progress: a line that changes on a terminal, warnings always, nothing when quiet."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._status: Status | None = None
        self._bytes = 0
        self._stage = ""

    def stage(self, text: str) -> None:
        """Show the stage of work that begins."""
        self._stage = text
        self._show()

    def read(self, size_bytes: int) -> None:
        """Show how much has been read."""
        self._bytes += size_bytes
        self._show()

    def warn(self, text: str) -> None:
        """Print a warning on its own line."""
        if not self._quiet:
            self.close()
            sys.stderr.write(f"warning: {text}\n")

    def close(self) -> None:
        """Take the changing line away."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _show(self) -> None:
        if self._quiet or not sys.stderr.isatty():
            return
        text = f"{self._stage} ({self._bytes / 1e6:,.1f} MB read)" if self._bytes else self._stage
        if self._status is None:
            from rich.console import Console

            self._status = Console(stderr=True).status(text)
            self._status.start()
        self._status.update(text)


@contextmanager
def one_line_errors(told: Terminal) -> Iterator[None]:
    """Turn errors tracefit raises on purpose into one line and their exit code."""
    try:
        yield
    except TracefitError as error:
        told.close()
        sys.stderr.write(f"tracefit: {error.line()}\n")
        raise typer.Exit(error.exit_code) from error
    except KeyboardInterrupt:
        told.close()
        sys.stderr.write("tracefit: interrupted\n")
        raise typer.Exit(130) from None
    finally:
        told.close()


def show(result: Any, text: str, *, as_json: bool, quiet: bool) -> None:
    """Print a result: JSON for programs, text for people, nothing when quiet."""
    if as_json:
        sys.stdout.write(json.dumps(_plain(result), indent=2) + "\n")
    elif not quiet:
        sys.stdout.write(text.rstrip() + "\n")


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain = {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        code = getattr(value, "exit_code", None)
        return plain if code is None else {**plain, "exit_code": code}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value
