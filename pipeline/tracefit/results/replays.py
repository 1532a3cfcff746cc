"""Replays of runs beside what was measured: part of evaluation.json, and what `tracefit replay` prints; imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Replayed:
    """A quantity as it was measured, and as the replay gives it.

    Attributes:
        name: ttft_p50_us, ..., client_p99_us (until the request departed), output_tokens_per_s or waiting_mean.
        measured: In the unit of its name.
        replayed: In the same unit.
        error_pct: 100 * (replayed - measured) / measured; null where nothing was measured.
        constant: What the training part measured, as a guess; null where that is not known.
        predicted: The same percentile of what `predict` says of each request on its arrival; null where it says nothing.
    """

    name: str
    measured: float
    replayed: float
    error_pct: float | None
    constant: float | None = None
    predicted: float | None = None

    def error_of(self, guess: float | None) -> float | None:
        """Return the error of another guess in percent; null where there is none."""
        return 100 * (guess / self.measured - 1) if self.measured and guess is not None else None


@dataclass(frozen=True, slots=True)
class QueueWindow:
    """Requests that wait in one window of the held-out time, on average.

    Attributes:
        from_s: Where it begins, in seconds after the begin of the held-out part.
        measured: As traced.
        replayed: In the replay.
    """

    from_s: float
    measured: float
    replayed: float


@dataclass(frozen=True, slots=True)
class RunReplay:
    """The held-out part of a run, replayed.

    Attributes:
        run_id: The run.
        scope_id: Whose models replay it; null where no scope was trained on it.
        requests: Requests that count: they come in the held-out part, and end in the run and in the replay.
        in_flight: Requests in the server when that part begins: given, not replayed from their arrival.
        quantities: Measured and replayed; empty where a replay is not possible.
        reason: Why it is not; null where it is.
        queue: The queue over time; empty where it is not known when requests were scheduled.
        notes: What the replay takes for granted.
    """

    run_id: str
    scope_id: str | None
    requests: int = 0
    in_flight: int = 0
    quantities: tuple[Replayed, ...] = ()
    reason: str | None = None
    queue: tuple[QueueWindow, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def errors(self) -> dict[str, float]:
        """Name of a quantity to its error in percent, where there is one."""
        return {q.name: q.error_pct for q in self.quantities if q.error_pct is not None}

    def worst_pct(self, *latencies: str) -> float | None:
        """Return the largest error of latencies at P50 and P90 in percent; null where the run is not replayed."""
        names = {f"{name}_p{q}_us" for name in latencies for q in (50, 90)}
        return max((abs(error) for name, error in self.errors.items() if name in names), default=None)

    def of(self, latency: str) -> tuple[Replayed, ...]:
        """Return P50, P90 and P99 of a latency; nothing where it is not known."""
        return tuple(q for q in self.quantities if q.name.startswith(f"{latency}_p"))
