"""Find models and tables below a folder that a command wrote: users name OUT of `tracefit run`, not its parts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tracefit.errors import UsageError
from tracefit.tables.store import TableStore

if TYPE_CHECKING:
    from collections.abc import Iterable

COEFFICIENT_FILES = ("alpha.json", "beta.json")


def as_list(paths: str | Path | Iterable[str | Path]) -> list[str | Path]:
    """Return one path or several as a list: a string is one path, not its letters."""
    return [paths] if isinstance(paths, str | Path) else list(paths)


def has_models(folder: Path) -> bool:
    """Say whether a folder holds a coefficient file."""
    return any((folder / name).is_file() for name in COEFFICIENT_FILES)


def find_models(path: str | Path) -> Path:
    """Return the coefficient file or the folder of them that a path stands for: itself, or `models/` below it."""
    path = Path(path)
    below = path / "models"
    return below if path.is_dir() and not has_models(path) and has_models(below) else path


def is_tables(path: str | Path) -> bool:
    """Say whether a path is a folder of tables with at least one run."""
    return Path(path).is_dir() and bool(TableStore(path).runs())


def find_tables(path: str | Path) -> Path:
    """Return the tables folder that a path stands for: itself, or `tables/` below it."""
    path = Path(path)
    return path / "tables" if not is_tables(path) and is_tables(path / "tables") else path


def tables_of(models: str | Path) -> Path:
    """Return the tables that models were trained on: `tables/` in their folder, or beside it.

    Raises:
        UsageError: There are none.
    """
    path = find_models(models)
    folder = path if path.is_dir() else path.parent
    for place in (folder / "tables", folder.parent / "tables"):
        if place.is_dir():
            return place
    raise UsageError(
        "the tables that the models were trained on are needed",
        where=str(models),
        hint="give them with --tables",
    )
