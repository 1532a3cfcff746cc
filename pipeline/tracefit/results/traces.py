"""Results of the commands that read traces or their tables: `ingest`, `inspect`, `receive` and `requests`.

Fields are what `--json` prints and what `schemas/results/` describes; a change of one is a change for the
programs that read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tracefit.errors import EXIT_DONE, EXIT_NOTHING, EXIT_QUARANTINE
from tracefit.results.notebook import Shown
from tracefit.tables.health import Check

# -- ingest ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One ingested run."""

    run_id: str
    deployment_id: str
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
    lost_steps: int = 0
    """Numbers of the step counter between recorded steps that have no record."""
    unread: tuple[str, ...] = ()
    """Files that are recognised, but whose lengths, times or settings all stayed unread, each with the keys it has."""
    mixed: tuple[str, ...] = ()
    """Servers of different models that are read as one deployment, each in a sentence."""


@dataclass(frozen=True, slots=True)
class IngestResult(Shown):
    """The tables' folder, and the runs in it.

    Attributes:
        tables: The folder.
        runs: Runs that were read.
        warnings: Warnings for the user.
        failed: Runs that could not be read, each with the reason.
    """

    tables: Path
    runs: tuple[RunSummary, ...]
    warnings: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0, or 3 when something is in quarantine: runs, rejects, implausible or unread values, dropped events,
        duplicates or servers of other models.
        """
        troubled = any(
            r.rejects or r.implausible or r.unread or r.mixed or r.dropped_events or r.duplicate_spans
            for r in self.runs
        )
        return EXIT_QUARANTINE if troubled or self.failed else EXIT_DONE


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One trace file: its format, and the bytes that are not in the tables yet.

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
    # A file whose beginning has changed counts as grown too: either way it is read again.
    status: Literal["new", "grown", "known"]
    bytes_to_read: int


@dataclass(frozen=True, slots=True)
class IngestPlan(Shown):
    """The files an ingest would read.

    Attributes:
        files: Trace files, run by run.
        left_out: Other files, each with the reason.
    """

    files: tuple[PlannedFile, ...]
    left_out: tuple[str, ...] = ()


# -- inspect --------------------------------------------------------------------------------------------

Allowed = Literal["yes", "limited", "no"]


@dataclass(frozen=True, slots=True)
class FileShape:
    """One trace file: its name, size as stored, compression and shape in words."""

    name: str
    bytes: int
    compression: str
    shape: str


@dataclass(frozen=True, slots=True)
class ScopeSpans:
    """Spans of one instrumentation scope and their dialect; `lifecycle` spans are recognised by their names."""

    scope: str
    spans: int
    dialect: str | None


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """One server of a run; sampling rates are estimates, null if the traces do not show them."""

    # Columns of the `runs` table by name, in the order in which `--json` has always had them: the evaluation
    # shows others.
    server: str
    epochs: int
    spans: int
    requests: int
    steps: int
    dropped_events: int
    step_sampling: float | None
    journey_sampling: float | None
    snapshot_sampling: float | None
    first_unix_ns: int | None
    last_unix_ns: int | None


@dataclass(frozen=True, slots=True)
class RunFacts:
    """One run as it was read; `files` is empty when tables were inspected.

    `other_scopes` counts the spans of scopes that are not read. `implausible` counts the values left out, by
    the rule they broke; `missing_attributes` is event to its attributes without a usable value in any such
    event; `unread` are files whose requests all lack lengths or times; `models` are doubts whether all spans are of one
    model.
    """

    run_id: str
    deployment_id: str
    bytes: int
    files: tuple[FileShape, ...]
    services: tuple[str, ...]
    scopes: tuple[ScopeSpans, ...]
    # Without this count, traces of other programs would look empty.
    other_spans: int
    other_scopes: dict[str, int]
    servers: tuple[ServerFacts, ...]
    events: dict[str, int]
    rejects: int
    implausible: dict[str, int]
    missing_attributes: dict[str, list[str]]
    unread: tuple[str, ...]
    models: tuple[str, ...]
    duplicate_spans: int
    checks: tuple[Check, ...]


@dataclass(frozen=True, slots=True)
class Allowance:
    """One thing that the traces may or may not support, and the reason."""

    what: str
    verdict: Allowed
    reason: str
    trains: bool = False
    """Whether a model is fitted on it."""


@dataclass(frozen=True, slots=True)
class DeploymentInspection:
    """The models that the runs of one deployment allow together: models are fitted per deployment."""

    deployment_id: str
    runs: tuple[str, ...]
    allows: tuple[Allowance, ...]


@dataclass(frozen=True, slots=True)
class Inspection(Shown):
    """The result of `inspect`."""

    runs: tuple[RunFacts, ...]
    deployments: tuple[DeploymentInspection, ...]

    @property
    def exit_code(self) -> int:
        """0, or 1 when nothing can be trained."""
        trains = any(a.trains for deployment in self.deployments for a in deployment.allows)
        return EXIT_DONE if trains else EXIT_NOTHING


# -- receive --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReceivedFrom:
    """Spans received from one server process and acknowledged, by `service.name` and `service.instance.id` or host."""

    service: str
    instance: str
    spans: int


@dataclass(frozen=True, slots=True)
class RecordedFrom:
    """ForwardPassMetrics of one publisher: records on disk, messages lost, and messages not kept, by cause."""

    endpoint: str
    records: int
    lost_messages: int
    refused: int
    refused_by_cause: dict[str, int]


@dataclass(frozen=True, slots=True)
class ReceiveResult:
    """The received data: every counted span and record is on disk.

    Attributes:
        files: The trace files written last, at most a thousand.
        file_count: How many were written.
        received_from: The senders heard last, as many as may be active at once; the one with the most spans is first.
        forgotten_senders: How often another sender was forgotten after a silence, because there was no room for a new
            one.
        forgotten_spans: Spans of these; `spans` has all.
    """

    out: Path
    files: tuple[Path, ...]
    file_count: int
    bytes: int
    spans: int
    exports: int
    refused: int
    refused_by_cause: dict[str, int]
    dropped_events: int
    received_from: tuple[ReceivedFrom, ...]
    forgotten_senders: int = 0
    forgotten_spans: int = 0
    warnings: tuple[str, ...] = ()
    recorded_from: tuple[RecordedFrom, ...] = ()

    @property
    def exit_code(self) -> int:
        """0, or 3 when requests or messages were refused or lost: senders may not have repeated them."""
        lost = any(each.refused or each.lost_messages for each in self.recorded_from)
        return EXIT_QUARANTINE if self.refused or lost else EXIT_DONE
