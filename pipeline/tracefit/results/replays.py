"""Replays of runs beside measurements, for evaluation.json and `tracefit replay`; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
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
class ReplayAtSpeed:
    """The held-out part of a run, replayed with step times of a machine at another speed.

    Attributes:
        slower_pct: How much longer every step takes than the model says, in percent.
        replayed: Name of a quantity of the run's replay to its value in this one; without latencies that have no end
            here.
    """

    slower_pct: float
    replayed: Mapping[str, float]


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
        at_speeds: Replays at speeds that the machine had: at the one of the held-out part as a whole, between two in
            which it is faster and slower by two standard deviations of a stretch of time; empty where the machine kept
            its speed.
    """

    run_id: str
    deployment_id: str | None
    requests: int = 0
    in_flight: int = 0
    quantities: tuple[Replayed, ...] = ()
    reason: str | None = None
    queue: tuple[QueueWindow, ...] = ()
    notes: tuple[str, ...] = ()
    at_speeds: tuple[ReplayAtSpeed, ...] = ()

    @property
    def errors(self) -> dict[str, float]:
        """Name of a quantity to its error in percent, if it has one."""
        return {q.name: q.error_pct for q in self.quantities if q.error_pct is not None}

    def worst_pct(self, *latencies: str) -> float | None:
        """Return the largest error of latencies at P50 and P90 in percent; null if the run is not replayed."""
        return _worst_pct(self.quantities, latencies)

    def beyond_speeds_pct(self, stretches: int, *latencies: str) -> float | None:
        """Return how far latencies at P50 and P90 are outside the replays at speeds that the machine had, in percent;
        the largest.

        A P90 comes from the slowest tenth of the time, which is one stretch or a few. A P50 comes from half of the
        stretches: their mean speed varies less than that of one, by the root of their number.

        Args:
            stretches: Stretches of time of the held-out part, each with a speed of its own.
            latencies: Names without the percentile.

        Returns:
            0 where the measured values are between the replayed ones; null where the machine kept its speed, or a
            latency has no end at one of its speeds.
        """
        if not self.at_speeds:
            return None
        worst = 0.0
        for q in self.quantities:
            latency, _, percentile = q.name.removesuffix("_us").rpartition("_p")
            if latency not in latencies or percentile not in _PERCENTILES or q.error_pct is None:
                continue
            values = [at.replayed[q.name] for at in self.at_speeds if q.name in at.replayed]
            if len(values) < len(self.at_speeds):
                return None
            middle = values[len(values) // 2]
            share = max(1.0, _PERCENTILES[percentile] * stretches) ** -0.5
            ends = [middle + share * (value - middle) for value in values]
            beyond = max(min(ends) - q.measured, q.measured - max(ends), 0.0)
            worst = max(worst, 100 * beyond / q.measured)
        return worst

    def of(self, latency: str) -> tuple[Replayed, ...]:
        """Return P50, P90 and P99 of a latency; empty if unknown."""
        return tuple(q for q in self.quantities if q.name.startswith(f"{latency}_p"))


_PERCENTILES = {"50": 0.5, "90": 0.1}
"""Percentiles that are judged, and the share of requests that is above."""


def _worst_pct(quantities: tuple[Replayed, ...], latencies: tuple[str, ...]) -> float | None:
    names = {f"{name}_p{q}_us" for name in latencies for q in _PERCENTILES}
    errors = (abs(q.error_pct) for q in quantities if q.name in names and q.error_pct is not None)
    return max(errors, default=None)
