"""Which cores there are, and workers that have one each."""

from __future__ import annotations

import os
import socket
import sys
import uuid


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def team_of(workers: int) -> str | None:
    """Return a new name for workers that have a core each; null if they do not have all cores of this machine."""
    return uuid.uuid4().hex if sys.platform == "linux" and workers == available_cores() else None


_CLAIMS: list[socket.socket] = []
"""Names that this process has taken: they stay taken as long as the sockets are open."""


def keep_to_core(team: str | None) -> None:
    """Keep this process on a core that no other process of the team has; without a team, let it run on any.

    Polars gives each query to a thread and waits for it. Woken on the core of another worker, the thread would wait for its turn:
    on two cores, that is a tenth of the time of a large ingest.
    """
    for core in sorted(os.sched_getaffinity(0)) if team and sys.platform == "linux" else ():
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0tracefit-{team}-{core}")  # no file: free again when the process ends
        except OSError:
            claim.close()
            continue
        os.sched_setaffinity(0, {core})
        _CLAIMS.append(claim)
        return
