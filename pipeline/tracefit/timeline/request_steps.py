"""The steps of an engine, counted from its requests' own times: what the spans of an unmodified server allow.

A request has no step ids there, but exact times on the engine's clock: it is scheduled, its first and its last token come out,
and every step between gives it one token. Outputs of one step carry the same stamp of the front end, so that stamps that
coincide are one step: a *node*. A request is scheduled right after the step before its first one, which may be a node too.

So each request is a chain of exact edges between nodes, each so many steps and so much engine time; nodes that edges join have
exact step numbers relative to each other. One integer per such cluster is left. Between two neighbouring nodes the batch is
constant, and a linear model of a step says how many steps the time in between holds; the numbers of steps give the model.
Both are repeated in turn (`_counted`), and clusters join where the times leave one integer only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from scipy.optimize import nnls

from tracefit.statistics import robust_sd
from tracefit.tables.dialects import STOCK
from tracefit.tables.schema import ENGINE, JOURNEY_EVENTS, SERVER
from tracefit.timeline.engines import Floats, Ints

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tracefit.timeline.composition import EngineLimits

_SAME_STEP_NS = 1_500
"""Stamps of one step differ by the rounding of seconds as floats, 240 ns; those of different steps by a step."""

_NEAR = 0.25
"""Share of a short step: what is less apart is the same step's end."""

_ROUNDS = 4
_BALANCES = 30
_SURE_SD = 1.3
"""Clusters join where every other integer is further off than this many standard deviations."""

_BUDGET = 2_048
"""Token budget where it is not known: vLLM's smallest default."""

_STAMP_SD_US = 100.0
"""How far the place of a node on the wall clock is off, on two machines that were measured."""

_QUIET = 7.0
"""Arrivals that the mean rate expects between the last one and the end of an engine that had run dry: e^-7 is a chance of 0.1 %."""

_LONG_STAY = 0.99

NEEDED = ("arrival_ns", "ttft_us", "e2e_us", "queue_wait_us", "prefill_us", "decode_us")
"""Times that a request must have to be placed."""


def stock_requests(requests: pl.DataFrame) -> pl.DataFrame:
    """Return the requests that an unmodified server describes."""
    return requests.filter(pl.col("dialect") == STOCK)


def usable(requests: pl.DataFrame) -> pl.DataFrame:
    """Return the requests of unmodified servers that have all times and lengths."""
    lengths = (pl.col("prompt_tokens") > 0) & (pl.col("output_tokens") > 0)
    return stock_requests(requests).drop_nulls(NEEDED).filter(lengths)


def unknown_batches(requests: pl.DataFrame) -> pl.DataFrame:
    """Placeholder."""
    return pl.DataFrame(schema={**{n: _STARTS[n] for n in SERVER}, "reason": pl.String})


@dataclass(frozen=True, slots=True)
class RequestSteps:
    """Steps that were counted from requests.

    Attributes:
        requests: The `requests` table, with the steps and the times of the events of those that are counted.
        starts: The known starts of steps: ENGINE, step_id, ts_start_ns, start_sd_us, start_source.
    """

    requests: pl.DataFrame
    starts: pl.DataFrame


_STARTS = {
    **{name: JOURNEY_EVENTS.types[name] for name in ENGINE},
    "step_id": pl.Int64(),
    "ts_start_ns": pl.Int64(),
    "start_sd_us": pl.Float64(),
    "start_source": pl.String(),
}


def count_steps(requests: pl.DataFrame, limits: EngineLimits) -> RequestSteps:
    """Count the steps of every server of which the spans of all requests are known, and place its requests on them.

    Args:
        requests: The `requests` table of one run.
        limits: Limits of the scheduler.
    """
    numbered = requests.with_row_index("row")
    unknown = unknown_batches(requests).select(SERVER)
    whole = usable(numbered).join(unknown, on=SERVER, how="anti").sort("arrival_ns", "row")
    found = [_placed(rows, limits) for _, rows in whole.group_by(SERVER, maintain_order=True)]
    starts = pl.concat([pl.DataFrame(schema=_STARTS), *(one.starts for one in found)])
    if not found:
        return RequestSteps(requests, starts)
    placed = pl.concat([one.requests for one in found])
    updated = numbered.update(placed, on="row", how="left").drop("row")
    return RequestSteps(updated, starts)


def _placed(rows: pl.DataFrame, limits: EngineLimits) -> RequestSteps:
    spans = Spans.of(rows)
    g = graph_of(spans, limits.max_num_batched_tokens or _BUDGET)
    counts = _counted(spans, g)
    # Idle gaps have empty steps: their time is that of no batch. With scheduling ahead the step in progress comes first.
    gaps = np.r_[0, np.cumsum(~counts.busy)] * (1 + g.lag)
    ended = counts.number - counts.number[0] + gaps + 1
    at_ns = spans.zero_ns + (g.at_us * 1e3).round().astype(np.int64)
    first, last = ended[g.first], ended[g.last]
    # What has ended when a request is scheduled or queued, between two nodes by the time.
    scheduled = np.interp(g.sched_us, g.at_us, ended).round() + np.where(g.is_fresh, 1, 1 + g.lag)
    budget = limits.max_num_batched_tokens or _BUDGET
    scheduled = np.where(spans.prompt <= budget, np.maximum(scheduled, first - 1), scheduled)
    scheduled = np.clip(np.where(g.is_whole, first, scheduled), 1, first).astype(np.int64)
    queued_us = g.sched_us - spans.queue_us
    queued = np.interp(queued_us, g.at_us, ended).round().astype(np.int64) + g.lag
    placed = pl.DataFrame(
        {
            "row": rows["row"],
            "queued_ns": spans.zero_ns + (queued_us * 1e3).round().astype(np.int64),
            "first_scheduled_ns": spans.zero_ns + (g.sched_us * 1e3).round().astype(np.int64),
            "first_token_ns": at_ns[g.first],
            "last_token_ns": at_ns[g.last],
            "finished_ns": at_ns[g.last],
            "queued_step": np.minimum(queued, scheduled - 1),
            "first_scheduled_step": scheduled,
            "first_token_step": first,
            "finished_step": last,
        }
    )
    known = _inside(spans, g)
    engine = {name: pl.lit(rows[name][0], _STARTS[name]) for name in ENGINE}
    starts = pl.DataFrame({"step_id": ended + 1 + g.lag, "ts_start_ns": at_ns}).filter(known)
    starts = starts.unique("step_id", keep="last", maintain_order=True).with_columns(
        **engine, start_sd_us=pl.lit(_STAMP_SD_US), start_source=pl.lit("request")
    )
    return RequestSteps(placed, starts.select(_STARTS.keys()))


def _inside(r: Spans, g: Graph) -> NDArray[np.bool_]:
    """Return which nodes lie where every request in the engine has its span in the recording.

    A span is written when its request ends: one that ended before the first span that we have, or that runs on when the
    recording ends, is missing. Where no request has come for long before the end, the engine had run dry.
    """
    ends, arrivals = g.at_us[g.last], (r.first_ns - r.zero_ns) / 1e3
    quiet = (ends.max() - arrivals.max()) * len(ends) / max(float(np.ptp(arrivals)), 1.0)
    stays = ends - g.sched_us + r.queue_us
    until = ends.max() if quiet > _QUIET else ends.max() - float(np.quantile(stays, _LONG_STAY))
    return (g.at_us >= ends.min()) & (g.at_us <= until)


def events_of(requests: pl.DataFrame) -> pl.DataFrame:
    """Return the core events that requests placed on steps have, as rows of `journey_events`; of other requests none."""
    own = requests.filter((pl.col("dialect") == STOCK) & pl.col("first_token_step").is_not_null())
    events = {
        "QUEUED": ("queued", 0),
        "SCHEDULED": ("first_scheduled", 0),
        "FIRST_TOKEN": ("first_token", 1),
        "FINISHED": ("finished", pl.col("output_tokens")),
    }
    rows = own.with_row_index("span_id").select(
        *ENGINE,
        "trace_id",
        pl.col("span_id").cast(pl.String),
        request_id=pl.coalesce("core_request_id", "request_id"),
        layer=pl.lit("core"),
        prefill_total_tokens="prompt_tokens",
        # Without a limit in the span, what was put out is the best guess of what it might be.
        decode_max_tokens=pl.coalesce("max_tokens", "output_tokens"),
        events=pl.concat_list(
            pl.struct(
                event=pl.lit(event),
                ts_ns=f"{name}_ns",
                step_id=f"{name}_step",
                decode_done_tokens=pl.lit(done) if isinstance(done, int) else done,
            )
            for event, (name, done) in events.items()
        ),
    )
    return JOURNEY_EVENTS.conform(rows.explode("events").unnest("events"))


@dataclass(frozen=True, slots=True)
class Spans:
    """The requests of one server, one element each; times in us since `zero_ns`."""

    zero_ns: int
    first_ns: Ints
    last_ns: Ints
    prompt: Floats
    decodes: Floats
    """Steps after that of the first token."""
    queue_us: Floats
    prefill_us: Floats
    decode_us: Floats

    @classmethod
    def of(cls, rows: pl.DataFrame) -> Spans:
        def stamp(name: str) -> pl.Expr:
            return pl.col("arrival_ns") + (pl.col(name) * 1e3).round().cast(pl.Int64)

        stamps = rows.select(first=stamp("ttft_us"), last=stamp("e2e_us"))
        decodes = (rows["output_tokens"] - 1).cast(pl.Float64).to_numpy()
        times = (rows[f"{name}_us"].to_numpy() for name in ("queue_wait", "prefill", "decode"))
        return cls(
            int(rows["arrival_ns"].min()),  # type: ignore[arg-type]  # no row lacks it
            stamps["first"].to_numpy(),
            stamps["last"].to_numpy(),
            rows["prompt_tokens"].cast(pl.Float64).to_numpy(),
            decodes,
            *times,
        )

    def short_step_us(self) -> float:
        """Return the time per token of the quick requests: about the shortest step."""
        several = self.decodes > 0
        if not several.any():
            return float(np.median(self.prefill_us))
        return float(np.quantile(self.decode_us[several] / self.decodes[several], 0.05))


def potentials(size: int, begin: Ints, end: Ints, difference: Floats) -> tuple[Ints, Floats]:
    """Join nodes by edges of known differences x[end] - x[begin], shape (edges,).

    Returns:
        The root of each node's component, and x[node] - x[root], both of shape (size,).
    """
    root, offset = np.arange(size), np.zeros(size)
    while True:
        a, b = root[begin], root[end]
        apart = np.flatnonzero(a != b)
        if not apart.size:
            return root, offset
        a, b = a[apart], b[apart]
        step = difference[apart] + offset[begin[apart]] - offset[end[apart]]
        step[a > b] *= -1
        # Each higher root hangs on a lower one by one edge; chains are then shortened to one link.
        high, one = np.unique(np.maximum(a, b), return_index=True)
        root[high], offset[high] = np.minimum(a, b)[one], step[one]
        while True:
            above = root[root]
            moved = np.flatnonzero(above != root)
            if not moved.size:
                break
            offset[moved] += offset[root[moved]]
            root = above


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in the order of time, and the edges of requests between them.

    Attributes:
        at_us: Time of each node, since `Spans.zero_ns`.
        scheduled: Node at or before which each request was scheduled.
        first: Node of its first token.
        last: Node of its last token.
        begin: First node of each edge.
        end: Last node of each edge.
        steps: Steps of each edge.
        lag: Steps that scheduling runs ahead of execution, 0 or 1.
        sched_us: When each request was scheduled.
        is_whole: Its prompt was computed by one step.
        is_fresh: Nothing was in the engine when it was scheduled.
        time_conflicts: Share of the requests whose decode time is not that between its nodes.
    """

    at_us: Floats
    scheduled: Ints
    first: Ints
    last: Ints
    begin: Ints
    end: Ints
    steps: Floats
    lag: int
    sched_us: Floats
    is_whole: NDArray[np.bool_]
    is_fresh: NDArray[np.bool_]
    time_conflicts: float

    @property
    def size(self) -> int:
        return len(self.at_us)

    def between(self, begin: Ints, end: Ints, amount: Floats) -> Floats:
        """Sum amounts over the intervals between neighbouring nodes that ranges of nodes cover; shape (size - 1,)."""
        change = np.bincount(begin, amount, self.size) - np.bincount(end, amount, self.size)
        return np.asarray(np.cumsum(change)[:-1], dtype=np.float64)


def graph_of(r: Spans, budget: float) -> Graph:
    n = len(r.decodes)
    stamps = np.concatenate([r.first_ns, r.last_ns])
    order = np.argsort(stamps, kind="stable")
    numbers = np.cumsum(np.diff(stamps[order], prepend=stamps[order[0]]) > _SAME_STEP_NS)
    node = np.empty(2 * n, np.int64)
    node[order] = numbers
    first, last, outs = node[:n], node[n:], int(numbers[-1]) + 1
    wall = np.bincount(node, (stamps - r.zero_ns) / 1e3) / np.bincount(node)
    root, relative = potentials(outs, first, last, r.decode_us)
    wrong = np.abs(relative[last] - relative[first] - r.decode_us) > _NEAR * r.short_step_us()
    # The engine's clock is exact within a component; its place on the wall clock is the median of its stamps.
    off = pl.DataFrame({"root": root, "off": wall - relative}).select(pl.col("off").median().over("root"))
    at = np.maximum.accumulate(relative + off["off"].to_numpy())

    short = r.short_step_us()
    near = _NEAR * short
    running = np.cumsum(np.bincount(first, minlength=outs) - np.bincount(last, minlength=outs))
    sched = at[first] - r.prefill_us
    before = np.maximum(np.searchsorted(at, sched, side="right") - 1, 0)
    # Where the prompts scheduled together fit into one step, none is cut into chunks.
    by_time = np.argsort(sched)
    total, times = np.r_[0.0, np.cumsum(r.prompt[by_time])], sched[by_time]
    together = (
        total[np.searchsorted(times, sched + near, side="right")] - total[np.searchsorted(times, sched - near)]
    )
    whole = together + running[before] <= budget
    # With scheduling a step ahead a step ends between a request's SCHEDULED and its first token: nodes lie there
    # as densely as anywhere. Otherwise none does.
    inside = np.searchsorted(at, at[first] - near) > np.searchsorted(at, sched + near)
    several = r.decodes > 0
    mean_step = float(np.median(r.decode_us[several] / r.decodes[several])) if several.any() else short
    density = outs * mean_step / max(float(np.diff(at)[running[:-1] > 0].sum()), mean_step)
    lag = int(whole.any() and inside[whole].mean() > 0.5 * min(1.0, density))
    # A step is scheduled a little after the outputs before it.
    gap = sched - at[before]
    close = gap[(gap >= 0) & (gap < near)]
    sched = sched - (float(np.median(close)) if close.size else 0.0)

    started = np.searchsorted(np.sort(sched), sched - near)
    ended = np.searchsorted(at[np.sort(first)], sched + near)
    now = np.maximum(np.searchsorted(at, sched + near, side="right") - 1, 0)
    fresh = (started <= ended) & ((running[now] == 0) | (at[now] > sched + near))
    right = np.minimum(np.searchsorted(at, sched), outs - 1)
    left = np.maximum(right - 1, 0)
    nearest = np.where(np.abs(at[right] - sched) < np.abs(at[left] - sched), right, left)
    apart = np.abs(at[nearest] - sched)
    snapped = (apart < near) & (nearest != first)
    # What is neither at a node nor clearly apart from all of them could be either: it is no node.
    used = np.flatnonzero(whole & (snapped | (apart > 0.6 * short)) | fresh)
    own = used[~snapped[used]]
    own = own[np.argsort(sched[own], kind="stable")]
    number = np.cumsum(np.diff(sched[own], prepend=-np.inf) > near) - 1
    place = nearest.copy()
    place[own] = outs + number
    added = np.bincount(number, sched[own]) / np.bincount(number) if own.size else np.empty(0)

    at = np.r_[at, added]
    rank = np.empty(len(at), np.int64)
    in_time = np.argsort(at, kind="stable")
    rank[in_time] = np.arange(len(at))
    at = at[in_time]
    place[np.setdiff1d(np.arange(n), used)] = -1
    scheduled = np.where(place >= 0, rank[place], np.maximum(np.searchsorted(at, sched + near, side="right") - 1, 0))
    first, last = rank[first], rank[last]
    scheduled = np.minimum(scheduled, first)
    kept = used[whole[used] & (scheduled[used] < first[used])]
    decoding = np.flatnonzero((last > first) & (r.decodes > 0))
    return Graph(
        at,
        scheduled,
        first,
        last,
        np.r_[first[decoding], scheduled[kept]],
        np.r_[last[decoding], first[kept]],
        np.r_[r.decodes[decoding], np.where(fresh, 1.0, 1.0 + lag)[kept]],
        lag,
        sched,
        whole,
        fresh,
        float(wrong.mean()),
    )


def _balanced(g: Graph, steps: Floats, begin: Ints, end: Ints, goal: Floats, least: Floats) -> Floats:
    """Scale the steps of the intervals so that each range of nodes has its number of steps, by proportional fitting."""
    alone = np.flatnonzero(end - begin == 1)
    cover = np.maximum(g.between(begin, end, np.ones(len(begin))), 1)
    steps = steps.copy()
    for _ in range(_BALANCES):
        steps[begin[alone]] = goal[alone]
        sums = np.r_[0.0, np.cumsum(steps)]
        ratio = np.log(goal / np.maximum(sums[end] - sums[begin], 1e-9))
        steps = np.maximum(steps * np.exp(g.between(begin, end, ratio) / cover), least)
    steps[begin[alone]] = goal[alone]
    return steps


@dataclass(frozen=True, slots=True)
class _Counts:
    """The number of every node, and what is known of the intervals between neighbouring ones.

    Attributes:
        number: Steps that had ended by each node, idle gaps apart.
        cluster: Nodes of one cluster have numbers that are exact relative to each other.
        busy: Whether a request is in the engine during each interval.
        conflicts: Share of the edges that contradict the others.
    """

    number: Ints
    cluster: Ints
    busy: NDArray[np.bool_]
    conflicts: float


def _counted(r: Spans, g: Graph) -> _Counts:
    """Number the nodes."""
    ones = np.ones(len(r.prompt))
    run = g.between(g.first, g.last, ones)
    busy = (run > 0) | (g.between(g.scheduled, g.first, ones) > 0)
    least = np.where(busy, 1.0, 0.0)
    time = np.diff(g.at_us)
    tokens, prompts = (np.bincount(g.first, amount, g.size)[1:] for amount in (r.prompt, ones))
    prompts_running = g.between(g.first, g.last, r.prompt)

    typical = float(np.median(time[busy])) if not g.steps.size else float(np.sum(g.at_us[g.end] - g.at_us[g.begin]) / g.steps.sum())
    steps = _balanced(g, np.maximum(time / typical, 1.0) * least, g.begin, g.end, g.steps, least)
    begin, end, goal, conflicts = _consistent(g, steps)
    root, relative = potentials(g.size, begin, end, goal)
    exact = np.unique(root, return_inverse=True)[1]
    cluster, offset = exact, relative
    for turn in range(_ROUNDS):
        at = np.r_[0.0, np.cumsum(steps)]
        # A request's context in a step: its prompt and the tokens since.
        context = prompts_running + run * (at[1:] + at[:-1]) / 2 - g.between(g.first, g.last, at[g.first])
        x = np.c_[steps, steps * run, steps * context, tokens, prompts]
        used = busy & (time > 0)
        beta = _robust(x[used], time[used])
        step = np.maximum(beta[0] + beta[1] * run + beta[2] * context, 1e-3)
        guess = np.where(busy, np.maximum((time - beta[3] * tokens - beta[4] * prompts) / step, least), 0.0)
        scatter = (time - x @ beta)[used] / step[used] / np.sqrt(steps[used])
        sd = np.sqrt(robust_sd(scatter) ** 2 * np.maximum(guess, 0.02) + 0.01)
        cluster, offset = exact, relative
        if turn:
            cluster, offset = _joined(cluster, offset, guess, sd, busy)
        order = np.lexsort((np.arange(g.size), cluster))
        same = cluster[order][1:] == cluster[order][:-1]
        begin, end = order[:-1][same], order[1:][same]
        goal = offset[end] - offset[begin]
        forward = goal > 0
        steps = _balanced(g, guess, begin[forward], end[forward], goal[forward], least)
    at = np.r_[0.0, np.cumsum(steps)]
    place = pl.DataFrame({"cluster": cluster, "at": at - offset}).select(pl.col("at").median().round().over("cluster"))
    number = (place["at"].to_numpy() + offset).round().astype(np.int64)
    # Two clusters whose order is not sure may cross: numbers grow with time, by one at least where a step ended.
    grown = np.cumsum(np.r_[0, least]).astype(np.int64)
    return _Counts(np.maximum.accumulate(number - grown) + grown, cluster, busy, conflicts)


def _consistent(g: Graph, steps: Floats) -> tuple[Ints, Ints, Floats, float]:
    """Leave out edges that contradict others: a preempted request waits for steps, speculative decoding saves some."""
    root, offset = potentials(g.size, g.begin, g.end, g.steps)
    bad = np.abs(offset[g.end] - offset[g.begin] - g.steps) > 0.5
    if not bad.any():
        return g.begin, g.end, g.steps, 0.0
    sums = np.r_[0.0, np.cumsum(steps)]
    far = np.abs(np.log(g.steps / np.maximum(sums[g.end] - sums[g.begin], 1e-9)))
    kept = far <= max(0.02, 4 * float(np.median(far)))
    begin, end, goal = g.begin[kept], g.end[kept], g.steps[kept]
    root, offset = potentials(g.size, begin, end, goal)
    right = np.abs(offset[end] - offset[begin] - goal) <= 0.5
    return begin[right], end[right], goal[right], float(1 - right.sum() / len(g.steps))


def _joined(
    cluster: Ints, offset: Floats, guess: Floats, sd: Floats, busy: NDArray[np.bool_]
) -> tuple[Ints, Floats]:
    """Join clusters whose distance the intervals between them agree on; each with its surest partner, again and again."""
    while True:
        cut = np.flatnonzero(busy & (cluster[1:] != cluster[:-1]))
        a, b = cluster[:-1][cut], cluster[1:][cut]
        apart = np.where(a > b, -1.0, 1.0) * (guess[cut] + offset[:-1][cut] - offset[1:][cut])
        votes = pl.DataFrame(
            {"a": np.minimum(a, b), "b": np.maximum(a, b), "apart": apart, "weight": sd[cut] ** -2.0}
        )
        weight = pl.col("weight").sum()
        found = (
            votes.group_by("a", "b")
            .agg(apart=(pl.col("apart") * pl.col("weight")).sum() / weight, weight=weight)
            .with_columns(whole=pl.col("apart").round())
            .with_columns(z=(0.5 - (pl.col("apart") - pl.col("whole")).abs()) * pl.col("weight").sqrt())
            .filter(pl.col("z") > _SURE_SD)
            .sort("z", "a", "b", descending=[True, False, False])
            .with_row_index("rank")
        )
        if not found.height:
            return np.unique(cluster, return_inverse=True)[1], offset
        sides = pl.concat([found.select("rank", cluster=side) for side in ("a", "b")])
        surest = sides.group_by("cluster").agg(pl.col("rank").min())["rank"].unique().sort()
        taken = found[surest.to_numpy()]
        up, moved = potentials(
            int(cluster.max()) + 1, *(taken[name].to_numpy() for name in ("a", "b", "whole"))
        )
        offset, cluster = offset + moved[cluster], up[cluster]


def _robust(x: Floats, y: Floats) -> Floats:
    """Fit non-negative coefficients to relative errors, by least absolute deviations (reweighted least squares)."""
    weight = 1 / y
    for _ in range(8):
        a, b = x * weight[:, None], y * weight
        square = a.T @ a
        lower = np.linalg.cholesky(square + 1e-9 * np.diag(square.diagonal() + 1e-30))
        beta = nnls(lower.T, np.linalg.solve(lower, a.T @ b))[0]
        error = np.abs(x @ beta - y) / y
        weight = 1 / y / np.sqrt(np.maximum(error, 0.3 * float(np.median(error)) + 1e-9))
    return np.asarray(beta, dtype=np.float64)
