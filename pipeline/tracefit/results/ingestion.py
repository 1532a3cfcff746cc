"""Results of `ingest`: the runs that were read, and, for `--dry-run`, the files that would be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tracefit.results.exit_codes import EXIT_DONE, EXIT_QUARANTINE


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
    implausible: int
    dropped_events: int
    servers: int
    epochs: int
    steps: int
    requests: int


@dataclass(frozen=True, slots=True)
class IngestResult:
    """Where the tables are, and what went into them.

    Attributes:
        tables: The folder.
        runs: Runs that were read.
        warnings: What the user should know.
        failed: Runs that could not be read, each with the reason.
    """

    tables: Path
    runs: tuple[RunSummary, ...]
    warnings: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0, or 3 when something is in quarantine: runs, rejects, implausible values, dropped events or duplicates."""
        troubled = any(r.rejects or r.implausible or r.dropped_events or r.duplicate_spans for r in self.runs)
        return EXIT_QUARANTINE if troubled or self.failed else EXIT_DONE


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One trace file: what it is, and how much of it the tables do not have yet.

    Attributes:
        run_id: The run it would belong to.
        file: Its name.
        shape: Its format and record layout, in words.
        compression: gzip or zstd; null for none.
        bytes: Its size.
        status: `new`, `grown` (or changed), or `known` (nothing to read).
        bytes_to_read: Bytes that would be decoded.
    """

    run_id: str
    file: str
    shape: str
    compression: str | None
    bytes: int
    status: Literal["new", "grown", "known"]
    bytes_to_read: int


@dataclass(frozen=True, slots=True)
class IngestPlan:
    """What an ingest would read.

    Attributes:
        files: Trace files, run by run.
        left_out: Other files, each with the reason.
    """

    files: tuple[PlannedFile, ...]
    left_out: tuple[str, ...] = ()
