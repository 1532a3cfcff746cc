"""Result of `receive`: what was acknowledged, and so is on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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
