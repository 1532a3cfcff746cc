"""Result of `inspect`: facts and health of each run, and what the runs of a scope can train together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tracefit.results.exit_codes import EXIT_DONE, EXIT_NOTHING
from tracefit.tables.health import Check

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
    """One server of a run; sampling rates are estimates, null where the traces do not show them."""

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

    `implausible` counts what was left out by the rule it broke; `missing_attributes` is event to the attributes that none
    of these events has a usable value of.
    """

    run_id: str
    scope_id: str
    bytes: int
    files: tuple[FileShape, ...]
    services: tuple[str, ...]
    scopes: tuple[ScopeSpans, ...]
    other_spans: int
    servers: tuple[ServerFacts, ...]
    events: dict[str, int]
    rejects: int
    implausible: dict[str, int]
    missing_attributes: dict[str, list[str]]
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
class ScopeInspection:
    """What the runs of one scope allow together: models are fitted per scope."""

    scope_id: str
    runs: tuple[str, ...]
    allows: tuple[Allowance, ...]


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything `inspect` found."""

    runs: tuple[RunFacts, ...]
    scopes: tuple[ScopeInspection, ...]

    @property
    def exit_code(self) -> int:
        """0, or 1 when nothing can be trained."""
        trains = any(a.trains for scope in self.scopes for a in scope.allows)
        return EXIT_DONE if trains else EXIT_NOTHING
