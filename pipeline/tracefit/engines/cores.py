"""Which cores there are, and which of them each worker has."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_of(workers: int) -> list[int | None]:
    """Return a core for each of some workers, or null for each if they do not have all cores of this machine.

    Polars gives each query to a thread and waits for it. Woken on the core of another worker, the thread would wait for
    its turn: on two cores, that is a tenth of the time of a large ingest.
    """
    if sys.platform == "linux" and workers == available_cores():
        return [*sorted(os.sched_getaffinity(0))]
    return [None] * workers


def keep_to_core(core: int | None) -> None:
    """Keep this process on a core; null lets it run on any."""
    if core is not None and sys.platform == "linux":
        os.sched_setaffinity(0, {core})


def keep_here() -> None:
    """Keep this process on the core that it is on, with what it starts.

    For a process that does all of its work itself, in thousands of small queries: polars hands each to its own thread,
    which takes longer to wake on another core than most of them take. Without effect once polars is imported, whose
    threads may be on other cores by then.
    """
    if sys.platform == "linux" and "polars" not in sys.modules:
        with suppress(OSError, AttributeError):  # another C library than GNU's
            keep_to_core(ctypes.CDLL(None).sched_getcpu())
