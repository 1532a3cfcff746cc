"""What the commands return, and the progress they report."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

EXIT_DONE = 0
EXIT_QUARANTINE = 3


class Progress(Protocol):
    """Told of what is going on; what it does with that is its own matter."""

    def stage(self, text: str) -> None:
        """Hear that a new stage of work begins."""

    def expect(self, size_bytes: int) -> None:
        """Hear how many bytes of input are going to be read in this stage."""

    def read(self, size_bytes: int) -> None:
        """Hear that so many more bytes of input are read."""

    def warn(self, text: str) -> None:
        """Hear of something the user should know."""


class Silent:
    """Progress that nobody watches."""

    def stage(self, text: str) -> None:
        """Say nothing."""

    def expect(self, size_bytes: int) -> None:
        """Say nothing."""

    def read(self, size_bytes: int) -> None:
        """Say nothing."""

    def warn(self, text: str) -> None:
        """Say nothing."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One ingested run."""

    run_id: str
    scope_id: str
    files: int
    bytes: int
    spans: int
    other_spans: int
    duplicate_spans: int
    rejects: int
    dropped_events: int
    servers: int
    epochs: int
    steps: int
    requests: int


@dataclass(frozen=True, slots=True)
class IngestResult:
    """Where the tables are, and what went into them."""

    tables: Path
    runs: tuple[RunSummary, ...]
    warnings: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0, or 3 when something is in quarantine: rejects, dropped events or duplicates."""
        troubled = any(r.rejects or r.dropped_events or r.duplicate_spans for r in self.runs)
        return EXIT_QUARANTINE if troubled else EXIT_DONE


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """One fitted model in numbers."""

    name: str
    scope_id: str
    holdout_mape_pct: float | None
    holdout_mae: float | None
    baseline_mae: float | None
    reference_mae: float | None
    skill: float | None
    rows_used: int
    rows_holdout: int


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """One latency of requests, composed of the models, in numbers."""

    name: str
    scope_id: str
    requests: int
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
    verdicts: dict[str, dict[str, str]] = field(default_factory=dict)
    """scope_id to use to verdict: yes, with limits or no."""

    @property
    def exit_code(self) -> int:
        """0, or 3 when what was ingested has something in quarantine."""
        return EXIT_QUARANTINE if self.quarantined else EXIT_DONE


@dataclass(frozen=True, slots=True)
class RunResult:
    """The main job: ingest and train."""

    ingested: IngestResult
    trained: TrainResult
    out: Path = field(default_factory=Path)

    @property
    def exit_code(self) -> int:
        """0, or 3 when something is in quarantine."""
        return max(self.ingested.exit_code, self.trained.exit_code)


@dataclass(frozen=True, slots=True)
class SynthResult:
    """The run folders that were generated."""

    folders: tuple[Path, ...]
    requests: int
    steps: int


@dataclass(frozen=True, slots=True)
class ReceivedFrom:
    """What one server process sent: spans acknowledged, by `service.name` and `service.instance.id` or host."""

    service: str
    instance: str
    spans: int


@dataclass(frozen=True, slots=True)
class ReceiveResult:
    """What was received: every span that is counted is on disk."""

    out: Path
    files: tuple[Path, ...]
    bytes: int
    spans: int
    exports: int
    refused: int
    dropped_events: int
    received_from: tuple[ReceivedFrom, ...]
    warnings: tuple[str, ...] = ()
