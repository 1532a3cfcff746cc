"""Results of `train`, `run`, `report` and `synth`: the files they wrote, and the models in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tracefit.results.exit_codes import EXIT_DONE, EXIT_QUARANTINE
from tracefit.results.ingestion import IngestResult


@dataclass(frozen=True, slots=True)
class ScopeSummary:
    """One scope that was fitted: its runs, and the server's settings as text."""

    scope_id: str
    runs: tuple[str, ...]
    settings: dict[str, str]


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """One fitted model in numbers."""

    name: str
    scope_id: str
    holdout_mdape_pct: float | None
    holdout_p90_ape_pct: float | None
    holdout_mape_pct: float | None
    holdout_mae: float | None
    baseline_mae: float | None
    reference_mae: float | None
    skill: float | None
    rows_used: int
    rows_holdout: int


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """One request latency, composed of the models, in numbers."""

    name: str
    scope_id: str
    requests: int
    teacher_forced_mdape_pct: float | None
    averages_only_mdape_pct: float | None
    baseline_mdape_pct: float | None
    teacher_forced_mape_pct: float | None
    averages_only_mape_pct: float | None
    baseline_mape_pct: float | None


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Where the models are, and how good they are."""

    models: Path
    files: tuple[Path, ...]
    evaluation: Path
    report: Path
    fitted: tuple[ModelSummary, ...]
    not_fitted: tuple[str, ...] = ()
    latencies: tuple[LatencySummary, ...] = ()
    quarantined: bool = False
    scopes: tuple[ScopeSummary, ...] = ()
    verdicts: dict[str, dict[str, str]] = field(default_factory=dict)
    """scope_id to use to verdict: yes, with limits or no."""

    @property
    def exit_code(self) -> int:
        """0, or 3 when what was ingested has something in quarantine."""
        return EXIT_QUARANTINE if self.quarantined else EXIT_DONE


@dataclass(frozen=True, slots=True)
class RunResult:
    """Result of the main job: ingest and train."""

    ingested: IngestResult
    trained: TrainResult
    out: Path = field(default_factory=Path)

    @property
    def exit_code(self) -> int:
        """0, or 3 when something is in quarantine."""
        return max(self.ingested.exit_code, self.trained.exit_code)


@dataclass(frozen=True, slots=True)
class ReportResult:
    """Where the report is."""

    files: tuple[Path, ...]
    verdicts: dict[str, dict[str, str]]
    """scope_id to use to verdict."""


@dataclass(frozen=True, slots=True)
class SynthResult:
    """The run folders that were generated."""

    folders: tuple[Path, ...]
    requests: int
    steps: int
