"""Numbers that the report's figures are drawn from: prepared by a command, so that the report computes nothing.

Durations are in ms, times in seconds into the run. Of many rows a figure shows some (`Points`), taken evenly in time, and
all of them summed up in groups of equal size (`Bin`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

RegionKind = Literal["training range", "hold-out", "warm-up", "idle", "queue never empty", "overload"]


@dataclass(frozen=True, slots=True)
class ShadedRegion:
    """An interval of the x axis with a meaning."""

    kind: RegionKind
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Points:
    """Rows of one kind that are drawn: `x` and `y` of equal length."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Bin:
    """Rows whose x lies between `low` and `high`, with the median, P10 and P90 of their y."""

    rows: int
    low: float
    high: float
    middle: float
    """Median of x."""
    median: float
    p10: float
    p90: float


@dataclass(frozen=True, slots=True)
class Cloud:
    """One quantity over another: some rows as points, all rows in groups of equal size along x."""

    points: tuple[Points, ...]
    rows: int
    """Rows the points were taken from."""

    bins: tuple[Bin, ...]


@dataclass(frozen=True, slots=True)
class ModelRows:
    """Training and held-out rows of one model, evaluated.

    Attributes:
        predicted: Predicted over measured, of held-out rows; of a model with regimes one kind of points per regime.
        wide_range: The measurements span so much that the axes are logarithmic.
        without_place: Held-out rows with a zero, which have no place on a logarithmic axis.
        over_time: Measured less predicted over time, of all rows.
        holdout: Where the hold-out lies; empty where several servers' runs overlay each other.
        servers: Servers whose runs overlay each other.
        over_features: The same over the features that move the prediction most, of held-out rows.
    """

    predicted: Cloud
    wide_range: bool
    without_place: int
    over_time: Cloud
    holdout: tuple[ShadedRegion, ...]
    servers: int
    over_features: dict[str, Cloud]


@dataclass(frozen=True, slots=True)
class EngineQuantity:
    """One quantity of an engine over its run.

    Attributes:
        key: Its name, one of `running`, `waiting`, `tokens`, `kv_pct` and `cycle_ms`.
        at_s: Times.
        values: Its mean (of `cycle_ms` the median) over equal intervals of time.
        before_holdout: Mean of the values before the hold-out; null without any.
        in_holdout: Mean of the values in the hold-out.
    """

    key: str
    at_s: tuple[float, ...]
    values: tuple[float, ...]
    before_holdout: float | None
    in_holdout: float | None


@dataclass(frozen=True, slots=True)
class EngineRun:
    """What one engine did over its run; `overloaded` is null for a run that was not, else whether it was trained on."""

    run_id: str
    server: str
    quantities: tuple[EngineQuantity, ...]
    regions: tuple[ShadedRegion, ...]
    holdout_from_s: float | None
    overloaded: bool | None


@dataclass(frozen=True, slots=True)
class LatencyOverLoad:
    """A measured latency over the requests in flight when a request arrived.

    Attributes:
        runs: Run to its requests in groups of equal size by load.
        requests: Requests of all runs.
        slo_ms: The longest it should take (its service level objective); null without one.
        within_pct: Share of the requests that took no longer; null without an objective.
    """

    runs: dict[str, tuple[Bin, ...]]
    requests: int
    slo_ms: float | None
    within_pct: float | None


@dataclass(frozen=True, slots=True)
class ScopeRows:
    """Everything the figures of one scope show beside the published evaluation.

    Attributes:
        models: Model name to its rows.
        latencies_ms: Latency (`ttft`, `itl`, `e2e`) to the measured percentiles: percent to value.
        engines: Engines, overloaded ones first.
        more_engines: Engines that are left out.
        over_load: Latency to its values over the load.
        step_times: Run to the times in ms of its steps over the requests in the batch.
        more_runs: Runs that are left out of these two.
    """

    models: dict[str, ModelRows]
    latencies_ms: dict[str, dict[int, float]]
    engines: tuple[EngineRun, ...]
    more_engines: int
    over_load: dict[str, LatencyOverLoad] = field(default_factory=dict)
    step_times: dict[str, tuple[Bin, ...]] = field(default_factory=dict)
    more_runs: int = 0
