"""Result of `verify`: whether a refit confirms a coefficient file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Difference:
    """A value that the refit does not confirm: where in the file, what it says, what came out."""

    place: str
    in_file: str
    refitted: str


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Whether a coefficient file is what its inputs give.

    Attributes:
        file: The file.
        verified: Every number confirmed.
        numbers: Numbers that were compared.
        inputs: Inputs that differ from those the file was made from.
        differing: Values that were not confirmed.
        differences: The first of them.
        notes: What else differs: program and library versions.
    """

    file: Path
    verified: bool
    numbers: int
    inputs: tuple[str, ...]
    differing: int
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """0, or 1 where the file is not confirmed."""
        return 0 if self.verified else 1
