"""The staged parts of a run, and which rows of each belong to which of its files.

Small files share a part. A file's rows are its own all the same: they count as long as the manifest names the part for
the file, and not a row longer, so that a file can change while its neighbours stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracefit.tables.manifest import ReadFile

_FILES = {"file": pl.UInt32, "place": pl.UInt32, "source_file": pl.String}


@dataclass(frozen=True, slots=True)
class RunPart:
    """A staged part of a run.

    Attributes:
        name: Its name.
        files: file (number in the part), place (what comes before what in the run), source_file. Rows of files that
            are not listed do not count.
    """

    name: str
    files: pl.DataFrame

    def of_files(self, rows: pl.DataFrame, column: str) -> pl.DataFrame:
        """Return the rows that count, with `place` or `source_file` in place of `file`."""
        named = self.files.select("file", column)
        return rows.join(named, on="file", how="inner", maintain_order="left").drop("file")


def parts_of(files: Sequence[ReadFile]) -> list[RunPart]:
    """List the parts of a run's files, which come in the order that decides which of two like spans counts."""
    rows: dict[str, list[tuple[int, int, str]]] = {}
    for place, (file, part) in enumerate((f, part) for f in files for part in f.parts):
        rows.setdefault(part.name, []).append((part.file, place, file.path))
    return [RunPart(name, pl.DataFrame(of, schema=_FILES, orient="row")) for name, of in rows.items()]
