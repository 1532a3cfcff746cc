"""Result of `predict` on a file of rows. Light: a single prediction needs no frame library."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RowPredictions:
    """Predictions for the rows of a file.

    Attributes:
        rows: Number of rows.
        out_of_range: Rows outside the training range; null for requests, which have no one range.
        out: The file they were written to, or null.
        predictions: The rows with their predictions, where no output file was named.
    """

    rows: int
    out_of_range: int | None
    out: Path | None
    predictions: tuple[dict[str, object], ...] = ()
