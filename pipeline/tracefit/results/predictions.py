"""Result of `predict` on a file of rows. Light: a single prediction needs no frame library."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RowPredictions:
    """Predictions for the rows of a file.

    Attributes:
        rows: Number of rows.
        outside: Rows outside the training range; null where this is not known per row.
        out: The file they were written to, or null.
        predictions: The rows with their predictions, where no output file was named.
    """

    rows: int
    outside: int | None
    out: Path | None
    predictions: tuple[dict[str, object], ...] = ()
