"""Plans: how many servers a load needs, and what they would do; what `tracefit plan` prints. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tracefit.errors import EXIT_DONE, EXIT_NOTHING
from tracefit.results.notebook import Shown


@dataclass(frozen=True, slots=True)
class PlannedLatency:
    """A percentile of a latency under a load, with its interval.

    Attributes:
        name: ttft_p50_ms, itl_p99_ms, e2e_p90_ms and the like.
        value: In ms, of the requests of a steady load; null where the queue grows without end.
        low: Lower end, in ms, 90 %: the uncertainty of the step time, by its coefficients and the changes of the
            machine's speed, and the draw of the requests, as independent errors; at least the error of replays of
            recorded runs.
        high: Upper end, in ms; null where the servers may not keep up.
    """

    name: str
    value: float | None
    low: float | None
    high: float | None

    def keeps_to(self, limit_ms: float) -> bool:
        """Return whether the value is within a limit."""
        return self.value is not None and self.value <= limit_ms


@dataclass(frozen=True, slots=True)
class PlanPoint:
    """The servers at one rate.

    Attributes:
        rate_per_s: Requests per second, over all servers.
        latencies: P50, P90 and P99 of TTFT, ITL and E2E, and the percentiles of the objectives.
        output_tokens_per_s: Over all servers.
        running_mean: Requests that run on a server, on average.
        waiting_mean: Requests that wait at a server, on average.
        outside_pct: Share of the busy time in steps outside what the models were trained on, in percent.
        outside: Features that leave the training, and how far.
        extrapolates: Whether that is so much that the latencies rest on it.
    """

    rate_per_s: float
    latencies: tuple[PlannedLatency, ...]
    output_tokens_per_s: float
    running_mean: float
    waiting_mean: float
    outside_pct: float
    outside: tuple[str, ...]
    extrapolates: bool

    def latency(self, name: str) -> PlannedLatency:
        """Return the percentile of this name."""
        return next(one for one in self.latencies if one.name == name)


@dataclass(frozen=True, slots=True)
class ServerCapacity:
    """Rates that one server can carry, by its models and by the recording, with requests like those traced.

    Attributes:
        capacity_per_s: Requests per second above which its queue only grows.
        capacity_low: The same with step times at the high end of their interval.
        capacity_high: The same with step times at the low end.
        knee_per_s: The rate with the largest ratio of rate to mean E2E: beyond it latency grows faster than throughput.
    """

    capacity_per_s: float
    capacity_low: float
    capacity_high: float
    knee_per_s: float


@dataclass(frozen=True, slots=True)
class Objective:
    """The longest that a percentile of a latency may be.

    Attributes:
        name: Such as ttft_p99_ms.
        limit_ms: The longest, in ms.
    """

    name: str
    limit_ms: float


@dataclass(frozen=True, slots=True)
class PlannedArrivals:
    """When the requests of a plan come: at a steady rate.

    Attributes:
        kind: Poisson arrivals; gamma distributed gaps; or gaps as traced, over the mean of their stretch of steady
            rate.
        shape: Shape of gamma gaps: 1 is Poisson, less comes in bursts; null for traced gaps.
        is_given: Whether the shape was given, and not found.
        traced_dispersion: Index of dispersion of the arrivals within stretches of steady rate of the recording, 1 for a
            Poisson process; null where it is not known.
        traced_dispersion_sd: Its standard deviation for a Poisson process; null with it.
    """

    kind: Literal["poisson", "gamma", "traced"]
    shape: float | None = 1.0
    is_given: bool = False
    traced_dispersion: float | None = None
    traced_dispersion_sd: float | None = None


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """The requests of a plan.

    Attributes:
        source: Where their lengths come from.
        prompt_tokens: Mean prompt.
        output_tokens: Mean output.
        traced_rate_per_s: Requests per second that were traced at one engine; null where that is not known.
        prefix_hit_pct: Percent of the prompt tokens in the prefix cache.
    """

    source: str
    prompt_tokens: float
    output_tokens: float
    traced_rate_per_s: float | None = None
    prefix_hit_pct: float = 0.0


@dataclass(frozen=True, slots=True)
class PlannedDrafts:
    """Speculative decoding of a plan: ITL is the time per token, TPOT; outputs come a step apart.

    Attributes:
        tokens_per_step: Tokens that a request gets from a step it decodes in.
        is_given: Whether that was given, and not measured.
        measured: The same in the recording; null where a step gives one token.
        measured_p10: Its tenth percentile over the recorded requests; null where only sums are known.
        measured_p90: Its ninetieth.
        step_mean_ms: Mean time of a step at the rate: the time between two outputs of a request.
    """

    tokens_per_step: float
    is_given: bool
    measured: float | None
    measured_p10: float | None
    measured_p90: float | None
    step_mean_ms: float | None


@dataclass(frozen=True, slots=True)
class PlannedWindow:
    """A window of time of a file of arrivals.

    Attributes:
        from_s: Its begin, in s on the clock of the file.
        begins: The same as a date, if that clock has dates, else in hours and minutes.
        requests: Requests that arrive in it.
        rate_per_s: The same per second, over all servers.
        prompt_tokens: Their mean prompt; null without requests.
        output_tokens: Their mean output; null without requests.
        servers: The fewest that keep its requests to the objectives at the high end of the intervals, or
            `servers_likely` where no number does; 0 without requests; null where no number does at all.
        servers_likely: The fewest, if latencies are as planned.
        scaled_mean: Servers that the scaler has ready, on average over the requests; null without requests.
        scaled_most: The most that it has ready; null without requests.
        scaled_holds: Whether the objectives hold with it; null without requests, and where no number of servers keeps
            to them.
    """

    from_s: float
    begins: str
    requests: int
    rate_per_s: float
    prompt_tokens: float | None
    output_tokens: float | None
    servers: int | None
    servers_likely: int | None
    scaled_mean: float | None = None
    scaled_most: int | None = None
    scaled_holds: bool | None = None


@dataclass(frozen=True, slots=True)
class BindingLatency:
    """An objective in the window that needs the most servers.

    Attributes:
        name: Such as ttft_p99_ms.
        limit_ms: The objective, in ms.
        value: With the planned servers, in ms; null where requests are never served.
        high: The high end of its interval.
        one_fewer: As `value`, with one server fewer; null also where there is only one.
    """

    name: str
    limit_ms: float
    value: float | None
    high: float | None
    one_fewer: float | None


@dataclass(frozen=True, slots=True)
class ServerChange:
    """The number of servers that a scaler has ready from a time on, in s on the clock of the file."""

    from_s: float
    servers: int


@dataclass(frozen=True, slots=True)
class ScalerPlan:
    """Servers that a scaler needs, which follows the load by what a server carries.

    Attributes:
        scale_up_s: Time from asking for a server to its first request.
        step: Servers come and go by as many.
        spare_pct: Servers that it has to ask for beyond those that the load needs, in percent; the most that was tried
            where `holds` is false.
        holds: Whether the objectives hold in every window that some number of servers keeps to them.
        windows_missed: Windows in which they do not.
        most: The most servers that are ready.
        server_hours: Hours of all servers.
        changes: The servers over time.
    """

    scale_up_s: float
    step: int
    spare_pct: float
    holds: bool
    windows_missed: int
    most: int
    server_hours: float
    changes: tuple[ServerChange, ...]


@dataclass(frozen=True, slots=True)
class DayPlan:
    """Servers for a file of arrivals.

    Attributes:
        file: The file.
        has_rates: Whether it has rates per hour, and the requests were drawn.
        rows: Its rows.
        requests: Requests that were planned for.
        odd: Reason to rows that were left out for it.
        window_s: Length of a window, in s.
        servers: The fewest that carry every window at the high end of the intervals, or `servers_likely` where no
            number does.
        servers_likely: The fewest, if latencies are as planned.
        binding: Number of the window that needs them, from 0.
        latencies: The objectives in that window.
        windows_missed: Windows that no number of servers keeps to the objectives; the others decide.
        server_hours: Hours of `servers` servers from the first arrival to the last.
        server_hours_by_window: Hours of the servers of each window.
        windows: The windows, in order.
        scaler: The servers that a scaler needs.
        cost: Price of `server_hours`, in the currency of the price of a GPU; null without one.
        cost_scaled: The same for the hours of the scaler's servers.
    """

    file: str
    has_rates: bool
    rows: int
    requests: int
    odd: dict[str, int]
    window_s: float
    servers: int
    servers_likely: int
    binding: int
    latencies: tuple[BindingLatency, ...]
    windows_missed: int
    server_hours: float
    server_hours_by_window: float
    windows: tuple[PlannedWindow, ...]
    scaler: ScalerPlan
    cost: float | None = None
    cost_scaled: float | None = None


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """The answer for one kind of server.

    Attributes:
        folder: Where its models are.
        deployment_id: Its deployment.
        arrivals: When the requests come; null where it was not decided.
        reason: Why there is no answer; null where there is one.
        gpus_per_server: GPUs of one server.
        gpu: Its GPU; null where that is not known.
        origin: Whether its model of step times is fitted, transferred or calibrated.
        is_tested: Whether anything shows how exact that model is.
        settings: Settings that the plan changes.
        objectives: The limits of latencies.
        load: The requests planned for, if any.
        drafts: Speculative decoding; null without.
        servers: Servers: the fewest that keep to the objectives at the rate with latencies at the high end of their
            intervals, or `servers_likely` where no number does; or those that were given.
        servers_low: The fewest, if latencies are at the low end of their intervals.
        servers_likely: The fewest, if latencies are as planned.
        is_sure: Whether `servers` are enough at the high end of the intervals; false where no number is.
        rate_per_s: The rate that was given; null without one.
        largest_rate_per_s: The largest rate at which these servers keep to the objectives; null where none does. It
            depends only on the objectives, the servers and the arrivals, unless the longer replay at the rate that was
            given contradicts it.
        largest_rate_low: The same with latencies at the high end of their intervals; null where none does.
        largest_rate_high: The same with latencies at the low end.
        capacity_per_s: The rate above which the queue of these servers only grows.
        capacity_low: The same with step times at the high end of their interval; null where it was not computed.
        capacity_high: The same with step times at the low end.
        carried_per_s: Requests per second like the planned ones that as many recorded servers finished; null where that
            is not known.
        knee_per_s: The rate with the largest ratio of rate to mean E2E (Kleinrock's power): beyond it latency grows
            faster than throughput.
        met: Whether the objectives hold at `at`.
        at: These servers at the rate that was given, or at the largest one.
        curve: These servers over the rates up to their capacity.
        cost_per_million_output_tokens: At `at`, in the currency of the price; null without a price.
        cost_per_million_tokens: The same with prompt tokens counted too.
        day: The answer for a file of arrivals, hour by hour; `servers` and `servers_likely` are those that carry all of
            it.
        notes: Assumptions behind the answer, and steps that it rests on.
    """

    folder: str
    deployment_id: str | None
    arrivals: PlannedArrivals | None = None
    reason: str | None = None
    gpus_per_server: int = 1
    gpu: str | None = None
    origin: str = "fitted"
    is_tested: bool = True
    settings: dict[str, str] | None = None
    objectives: tuple[Objective, ...] = ()
    load: PlannedLoad | None = None
    drafts: PlannedDrafts | None = None
    servers: int | None = None
    servers_low: int | None = None
    servers_likely: int | None = None
    is_sure: bool = True
    rate_per_s: float | None = None
    largest_rate_per_s: float | None = None
    largest_rate_low: float | None = None
    largest_rate_high: float | None = None
    capacity_per_s: float | None = None
    capacity_low: float | None = None
    capacity_high: float | None = None
    carried_per_s: float | None = None
    knee_per_s: float | None = None
    met: bool | None = None
    at: PlanPoint | None = None
    curve: tuple[PlanPoint, ...] = ()
    cost_per_million_output_tokens: float | None = None
    cost_per_million_tokens: float | None = None
    day: DayPlan | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankedServers:
    """The cost of one kind of server for a load.

    Attributes:
        name: Its folder, or its GPU and tensor parallelism where it was tried.
        deployment_id: Its deployment.
        gpu: Its GPU; null where that is not known.
        servers: Servers that are enough.
        servers_low: The fewest, if latencies are at the low end of their intervals.
        is_sure: Whether `servers` are enough at the high end of the intervals; false where no number is.
        gpus: GPUs of all of them.
        gpus_low: The same for the fewest.
        cost_per_hour: Their price; null without one.
        cost_per_hour_low: The same for the fewest.
        binds: The objective that is nearest to its limit.
        origin: Whether its model is fitted, transferred or calibrated.
        is_tested: Whether anything shows how exact its model is.
        ties: Whether it may be the cheapest within the intervals.
    """

    name: str
    deployment_id: str | None
    gpu: str | None
    servers: int
    servers_low: int
    is_sure: bool
    gpus: int
    gpus_low: int
    cost_per_hour: float | None
    cost_per_hour_low: float | None
    binds: str | None
    origin: str
    is_tested: bool
    ties: bool


@dataclass(frozen=True, slots=True)
class PlanResult(Shown):
    """How many servers a load needs, for each kind of server.

    Attributes:
        plans: One per deployment, in the order of the folders.
        ranked: Kinds of server that carry the rate, the cheapest first; empty without a rate, or with one kind.
        left_out: Servers that were to be tried and are not planned, with the reasons.
    """

    plans: tuple[ServerPlan, ...]
    ranked: tuple[RankedServers, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0, or 1 where there is no answer for any kind of server."""
        return EXIT_DONE if any(plan.reason is None for plan in self.plans) else EXIT_NOTHING
