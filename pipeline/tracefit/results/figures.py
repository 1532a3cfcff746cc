"""Numbers that the report's figures are drawn from: prepared by a command, so that the report computes nothing.

Durations are in ms, times in seconds into the run. Of many rows a figure shows some (`Points`), taken evenly in time, and
all of them summed up in groups of equal size (`Bin`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

LATENCIES: Mapping[str, str] = {"ttft": "TTFT", "itl": "ITL", "e2e": "E2E"}
"""Latencies of requests that users ask for first: their names in files, and as people write them."""

US_PER_MS = 1e3

RegionKind = Literal["training range", "hold-out", "warm-up", "idle", "queue never empty", "overload"]


@dataclass(frozen=True, slots=True)
class ShadedRegion:
    """An interval of the x axis with a meaning."""

    kind: RegionKind
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Points:
    """Rows of one kind that are drawn; `facts` is what a reader sees of each besides, such as the composition of a step."""

    # Tuples, not frames: a report is built, compared and written without polars.
    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    facts: dict[str, tuple[float | None, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bin:
    """Rows whose x lies between `low` and `high`, the median of their x, and median, P10 and P90 of their y."""

    # Of equal size, not of equal width: the highest values of x would be a row or two.
    rows: int
    low: float
    high: float
    middle: float
    median: float
    p10: float
    p90: float


@dataclass(frozen=True, slots=True)
class Cloud:
    """One quantity over another: some of `rows` rows as points, all of them in groups of equal size along x."""

    points: tuple[Points, ...]
    rows: int
    bins: tuple[Bin, ...]


@dataclass(frozen=True, slots=True)
class OverTime:
    """Means of measured and predicted values over equal intervals of time, runs one after the other.

    Attributes:
        at_s: Middle of each interval, in seconds since the first run began, without the time between runs.
        measured: Mean in ms; null between two runs, where a line breaks.
        predicted: The same of predictions.
        rows: Some of the rows; their y is measured.
        runs: Name of each run, and where it begins.
        holdout: Where the hold-out of each run lies.
    """

    # Without the time between runs: traces of two days would be two dots with nothing between them.
    at_s: tuple[float, ...]
    measured: tuple[float | None, ...]
    predicted: tuple[float | None, ...]
    rows: Points
    runs: tuple[tuple[str, float], ...]
    holdout: tuple[ShadedRegion, ...]


@dataclass(frozen=True, slots=True)
class Breakdown:
    """What durations consist of: rows in groups of equal size from short to long, and the means of each group.

    `parts` is each part in ms by its name, `measured` the whole, `facts` what the rows are like by name.
    """

    # Means, not medians: those of the parts add up to that of the whole.
    parts: dict[str, tuple[float, ...]]
    measured: tuple[float, ...]
    rows: tuple[int, ...]
    facts: dict[str, tuple[float | None, ...]] = field(default_factory=dict)


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
        over_features: Measured less predicted over the features that move the prediction most, of held-out rows.
        timeline: Measured and predicted over time.
        breakdown: What the held-out durations consist of, by the terms of the model; null for a model with a boundary.
    """

    predicted: Cloud
    wide_range: bool
    without_place: int
    over_time: Cloud
    holdout: tuple[ShadedRegion, ...]
    servers: int
    over_features: dict[str, Cloud]
    timeline: OverTime
    breakdown: Breakdown | None = None


@dataclass(frozen=True, slots=True)
class EngineQuantity:
    """One quantity of an engine (`running`, `waiting`, `tokens`, `kv_pct` or `cycle_ms`) over equal intervals of its run.

    Values are means, of `cycle_ms` medians; the means before and in the hold-out are null without any.
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
    # Three values: overloaded runs are drawn first, and a reader has to know whether the models rest on one.
    overloaded: bool | None


@dataclass(frozen=True, slots=True)
class LatencyOverLoad:
    """A measured latency over the requests in flight when a request arrived, run by run.

    `slo_ms` is the longest it should take (its service level objective), `within_pct` the share of the `requests` requests that
    took no longer; both are null without an objective.
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
        engines: Engines, overloaded ones first; `more_engines` are left out.
        over_load: Latency to its values over the load.
        step_times: Run to the times in ms of its steps over the requests in the batch.
        more_runs: Runs that are left out of these two.
        first_token: What the measured TTFT consists of; null where no request has all of its parts.
    """

    models: dict[str, ModelRows]
    latencies_ms: dict[str, dict[int, float]]
    engines: tuple[EngineRun, ...]
    more_engines: int
    over_load: dict[str, LatencyOverLoad] = field(default_factory=dict)
    step_times: dict[str, tuple[Bin, ...]] = field(default_factory=dict)
    more_runs: int = 0
    first_token: Breakdown | None = None
