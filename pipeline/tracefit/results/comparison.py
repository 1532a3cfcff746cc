"""Result of `compare`: the differences of two coefficient files, or the drift of one on new traces."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tracefit.coefficients.diff import CoefficientDiff, PredictionDiff

Verdict = Literal["good", "drifted", "unknown"]


@dataclass(frozen=True, slots=True)
class ModelComparison:
    """One model in two files."""

    model: str
    scope_id: str | None
    changes: tuple[CoefficientDiff, ...]
    shifts: tuple[PredictionDiff, ...]


@dataclass(frozen=True, slots=True)
class Drift:
    """One model of an old file on new traces.

    Attributes:
        model: Its name.
        scope_id: Its scope.
        rows: Rows of the new traces it was evaluated on; only idle gaps are left out.
        then_mdape_pct: Median error it was published with: that of its training or its held-out rows, the larger one.
        now_mdape_pct: Median error on the new traces.
        then_mae_us: Mean absolute error it was published with.
        now_mae_us: Mean absolute error on the new traces.
        now_bias_pct: 100 * (sum predicted - sum actual) / sum actual on the new traces.
        limit_pct: The error above which it counts as drifted.
        verdict: good, drifted, or unknown where the new traces do not decide.
        reason: Why it is unknown.
    """

    model: str
    scope_id: str | None
    rows: int
    then_mdape_pct: float | None
    now_mdape_pct: float | None
    then_mae_us: float | None
    now_mae_us: float | None
    now_bias_pct: float | None
    limit_pct: float | None
    verdict: Verdict
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class CompareResult:
    """Differences of two files, or the drift of one.

    Attributes:
        first: The first file or folder.
        second: The second, or the tables.
        models: Models that both files have.
        drift: Every model on the new traces, where the second is tables.
        verdict: Of the drift check: drifted if any model is, good if one is and none drifted; null for two files.
        notes: What could not be compared, and why.
    """

    first: Path
    second: Path
    models: tuple[ModelComparison, ...] = ()
    drift: tuple[Drift, ...] = ()
    verdict: Verdict | None = None
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0; 1 where the old file has drifted or the new traces do not decide."""
        return 1 if self.verdict in ("drifted", "unknown") else 0
