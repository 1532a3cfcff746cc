"""Result of `export`: the files a consumer loads, and the error of exactly these."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tracefit.consumers.base import HeldOut


@dataclass(frozen=True, slots=True)
class ExportResult:
    """Files written for a consumer, and the held-out error of the exported form.

    Attributes:
        consumer: Its name.
        scope_id: The exported scope.
        files: The files.
        errors: Held-out errors of the exported form.
        notes: Limits a user has to know.
        usage: The command that loads the files.
    """

    consumer: str
    scope_id: str | None
    files: tuple[Path, ...]
    errors: tuple[HeldOut, ...]
    notes: tuple[str, ...]
    usage: str
