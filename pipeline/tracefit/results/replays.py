"""Replays of runs beside measurements, for evaluation.json and `tracefit replay`; imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Replayed:
    """A measured quantity and its replayed value.

    Attributes:
        name: ttft_p50_us, ..., client_p99_us (until the request departed), output_tokens_per_s or waiting_mean.
        measured: In the unit of its name.
        replayed: In the same unit.
        error_pct: 100 * (replayed - measured) / measured; null without a measurement.
        constant: The value in the training part, as a constant guess; null if unknown.
        predicted: The same percentile of the predictions of `predict` for each request on arrival; null without any.
    """

    name: str
    measured: float
    replayed: float
    error_pct: float | None
    constant: float | None = None
    predicted: float | None = None

    def error_of(self, guess: float | None) -> float | None:
        """Return the error of another guess in percent; null without a guess or a measurement."""
        return 100 * (guess / self.measured - 1) if self.measured and guess is not None else None


@dataclass(frozen=True, slots=True)
class QueueWindow:
    """Requests that wait in one window of the held-out time, on average.

    Attributes:
        from_s: Its start, in seconds after the start of the held-out part.
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
        deployment_id: The deployment of the models; null if no deployment was trained on the run.
        requests: Requests that count: they arrive in the held-out part, and end in the run and in the replay.
        in_flight: Requests in the server when that part begins: given, not replayed from their arrival.
        quantities: Measured and replayed values; empty if a replay is not possible.
        reason: Why a replay is not possible; null if it is.
        queue: The queue over time; empty if scheduling times of requests are unknown.
        notes: Assumptions of the replay.
        at_holdout_speed: The quantities of another replay, with step times as much longer or shorter as those of equal batches were in
            the held-out part; empty where the machine kept its speed.
    """

    run_id: str
    deployment_id: str | None
    requests: int = 0
    in_flight: int = 0
    quantities: tuple[Replayed, ...] = ()
    reason: str | None = None
    queue: tuple[QueueWindow, ...] = ()
    notes: tuple[str, ...] = ()
    at_holdout_speed: tuple[Replayed, ...] = ()

    @property
    def errors(self) -> dict[str, float]:
        """Name of a quantity to its error in percent, if it has one."""
        return {q.name: q.error_pct for q in self.quantities if q.error_pct is not None}

    def worst_pct(self, *latencies: str) -> float | None:
        """Return the largest error of latencies at P50 and P90 in percent; null if the run is not replayed."""
        return _worst_pct(self.quantities, latencies)

    def worst_at_holdout_speed_pct(self, *latencies: str) -> float | None:
        """Return this error for the replay at the speed of the held-out part; null where the machine kept its speed."""
        return _worst_pct(self.at_holdout_speed, latencies)

    def of(self, latency: str) -> tuple[Replayed, ...]:
        """Return P50, P90 and P99 of a latency; empty if unknown."""
        return tuple(q for q in self.quantities if q.name.startswith(f"{latency}_p"))


def _worst_pct(quantities: tuple[Replayed, ...], latencies: tuple[str, ...]) -> float | None:
    names = {f"{name}_p{q}_us" for name in latencies for q in (50, 90)}
    errors = (abs(q.error_pct) for q in quantities if q.name in names and q.error_pct is not None)
    return max(errors, default=None)
