"""The exact facts in the request times of an unmodified server: which tokens share a step, and the steps between
tokens.

The front end stamps all outputs of one step with the same time, so that equal stamps are one step: a *node*. A request
is scheduled right after the step before its first step, which may be a node too. Each request is then a chain of edges
between nodes, each with a number of steps and a time on the engine's clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import polars as pl
from msgspec.structs import replace

from tracefit.statistics import nonnegative
from tracefit.tables.dialects import CLIENT, STOCK
from tracefit.timeline import thresholds

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tracefit.timeline.engines import Floats, Ints

DEFAULT_TOKEN_BUDGET = 2_048
"""Token budget of a step if it is unknown: the smallest default of vLLM."""

_FIT_ROUNDS, _FIT_TOLERANCE = 300, 1e-3
"""Most rounds of `fit_steps`, and the change that ends them. Where requests of minutes overlap, 30 rounds leave errors
of 2 %."""

_TRIM_ROUNDS = 100
"""Most rounds that leave out preempted requests."""

_SERVER_TIMES = ("arrival_ns", "ttft_us", "e2e_us", "queue_wait_us", "prefill_us", "decode_us")
_OLD_TIMES = ("arrival_ns", "ttft_us", "e2e_us")
_CLIENT_TIMES = ("arrival_ns", "client_ttft_us", "client_e2e_us")
"""Times without which the steps of a request cannot be counted."""

GRAPH_COLUMNS = (*_SERVER_TIMES, *_CLIENT_TIMES[1:], "dialect", "prompt_tokens", "output_tokens")
"""Columns of a request that its steps are counted from."""


def is_counted() -> pl.Expr:
    """Return which requests steps are counted from: those of unmodified servers, or a client's if a run has no other
    requests.
    """
    of_client = pl.col("dialect") == CLIENT
    return (pl.col("dialect") == STOCK) | (of_client & of_client.all())


def is_usable() -> pl.Expr:
    """Return whether steps are counted from a request and it has all times and lengths; never null."""
    needed = pl.when(pl.col("dialect") == CLIENT).then(_has(_CLIENT_TIMES))
    # vLLM before 1.0 states no prefill.
    is_old = (pl.col("prefill_us").is_null() | (pl.col("dialect") != STOCK)).all()
    has_times = needed.when(is_old).then(_has(_OLD_TIMES)).otherwise(_has(_SERVER_TIMES))
    has_lengths = pl.all_horizontal(pl.col("prompt_tokens", "output_tokens") > 0)
    return (has_times & has_lengths & is_counted()).fill_null(value=False)


def _has(times: tuple[str, ...]) -> pl.Expr:
    return pl.all_horizontal(pl.col(times).is_not_null())


class RequestArrays(msgspec.Struct, frozen=True):
    """The requests of one server, one element each; times in us since `zero_ns`."""

    zero_ns: int
    arrival_us: Floats
    first_token_ns: Ints
    last_token_ns: Ints
    prompt_tokens: Floats
    decode_steps: Floats
    """Steps after the one of the first token."""
    queue_us: Floats
    prefill_us: Floats
    decode_us: Floats
    is_client: bool = False
    """Whether a client measured the times, or vLLM before 1.0 its front end: it receives the tokens of a step one by
    one and does not see the scheduling."""

    @classmethod
    def of(cls, rows: pl.DataFrame) -> RequestArrays:
        """Return the arrays of usable requests. A client does not see when a request is scheduled: its TTFT counts as
        the prefill.
        """
        is_old = not rows["prefill_us"].count()
        if is_client := is_old or CLIENT in rows["dialect"]:
            prefix = "client_" if CLIENT in rows["dialect"] else ""
            ttft, e2e = pl.col(f"{prefix}ttft_us"), pl.col(f"{prefix}e2e_us")
            rows = rows.with_columns(
                ttft_us=ttft, e2e_us=e2e, queue_wait_us=pl.lit(0.0), prefill_us=ttft, decode_us=e2e - ttft
            )

        def stamp(name: str) -> pl.Expr:
            return pl.col("arrival_ns") + (pl.col(name) * 1e3).round().cast(pl.Int64)

        stamps = rows.select(first=stamp("ttft_us"), last=stamp("e2e_us"))
        arrivals = rows["arrival_ns"].to_numpy()
        zero_ns = int(arrivals.min())
        arrays = cls(
            zero_ns,
            (arrivals - zero_ns) / 1e3,
            stamps["first"].to_numpy(),
            stamps["last"].to_numpy(),
            rows["prompt_tokens"].cast(pl.Float64).to_numpy(),
            (rows["output_tokens"] - 1).cast(pl.Float64).to_numpy(),
            rows["queue_wait_us"].to_numpy(),
            rows["prefill_us"].to_numpy(),
            rows["decode_us"].to_numpy(),
        )
        return arrays._of_steps() if is_client else arrays

    def to_ns(self, time_us: Floats) -> Ints:
        """Return times since `zero_ns` as stamps."""
        stamps: Ints = self.zero_ns + (time_us * 1e3).round().astype(np.int64)
        return stamps

    def _of_steps(self) -> RequestArrays:
        """Return a client's times as times of steps: each is the first that the client received of its step."""
        stamps = np.concatenate([self.first_token_ns, self.last_token_ns])
        order = np.argsort(stamps, kind="stable")
        is_new = np.diff(stamps[order], prepend=0) > thresholds.SAME_CLIENT_STAMP_SHARE * 1e3 * self.short_step_us()
        stamps[order] = stamps[order][np.maximum.accumulate(np.where(is_new, np.arange(len(stamps)), 0))]
        first, last = np.split(stamps, 2)
        return replace(self, first_token_ns=first, last_token_ns=last, decode_us=(last - first) / 1e3, is_client=True)

    def short_step_us(self) -> float:
        """Return the time per token of quick requests: about the shortest step."""
        several = self.decode_steps > 0
        if not several.any():
            return float(np.median(self.prefill_us))
        return float(np.quantile(self.decode_us[several] / self.decode_steps[several], 0.05))


def potentials(size: int, begin: Ints, end: Ints, difference: Floats) -> tuple[Ints, Floats]:
    """Find x with x[end] - x[begin] = difference along a spanning forest of the edges, which have the shape (edges,).

    Components are joined as in a union-find structure that keeps the difference of each node from its root.

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
        # One edge joins each higher root to a lower one; chains of roots are then shortened to one link.
        high, one = np.unique(np.maximum(a, b), return_index=True)
        root[high], offset[high] = np.minimum(a, b)[one], step[one]
        while True:
            above = root[root]
            moved = np.flatnonzero(above != root)
            if not moved.size:
                break
            offset[moved] += offset[root[moved]]
            root = above


class ConsistentEdges(NamedTuple):
    """Edges of a graph that do not contradict each other.

    Attributes:
        guess: First guess of the steps between neighbouring nodes, shape (size - 1,).
        begin: First node of each edge.
        end: Last node of each edge.
        steps: Steps of each edge.
        contradicting: Share of the edges that are far off or contradict others; edges of preempted requests do not
            count.
        preempted: The preempted requests, where they are many.
    """

    guess: Floats
    begin: Ints
    end: Ints
    steps: Floats
    contradicting: float
    preempted: Ints


class Graph(msgspec.Struct, frozen=True):
    """Nodes in the order of time, and the edges of requests between them.

    Attributes:
        time_us: Time of each node, since `RequestArrays.zero_ns`.
        scheduled: Node at or before which each request was scheduled.
        first: Node of its first token.
        last: Node of its last token.
        begin: First node of each edge.
        end: Last node of each edge.
        steps: Steps of each edge.
        decoded: Request of each edge from a first to a last token; these edges come before the others.
        lag: Steps that scheduling runs ahead of execution, 0 or 1.
        scheduled_us: Time at which each request was scheduled.
        in_one_step: Whether one step computed its whole prompt.
        into_idle_engine: Whether the engine was empty when it was scheduled.
        time_conflicts: Share of the requests whose decode time differs from the time between their nodes.
        budget: Token budget of a step.
    """

    time_us: Floats
    scheduled: Ints
    first: Ints
    last: Ints
    begin: Ints
    end: Ints
    steps: Floats
    decoded: Ints
    lag: int
    scheduled_us: Floats
    in_one_step: NDArray[np.bool_]
    into_idle_engine: NDArray[np.bool_]
    time_conflicts: float
    budget: float

    @property
    def size(self) -> int:
        """Number of nodes."""
        return len(self.time_us)

    def with_token_edges_only(self) -> Graph:
        """Return the graph with only the edges from first to last tokens, whose steps are exact."""
        tokens = slice(len(self.decoded))
        return replace(self, begin=self.begin[tokens], end=self.end[tokens], steps=self.steps[tokens])

    def interval_sums(self, begin: Ints, end: Ints, amount: Floats) -> Floats:
        """Sum the amounts of the ranges of nodes that cover each interval between neighbouring nodes; shape (size -
        1,).
        """
        change = np.bincount(begin, amount, self.size) - np.bincount(end, amount, self.size)
        return np.asarray(np.cumsum(change)[:-1], dtype=np.float64)

    @property
    def busy(self) -> NDArray[np.bool_]:
        """Whether a request is in the engine between neighbouring nodes; shape (size - 1,)."""
        ones = np.ones(len(self.first))
        return (self.interval_sums(self.first, self.last, ones) > 0) | (
            self.interval_sums(self.scheduled, self.first, ones) > 0
        )

    def consistent_edges(self) -> ConsistentEdges:
        """Return a first guess of the steps between neighbouring nodes, and the edges that do not contradict the
        others.

        A preempted request waits for steps without a token, and speculative decoding saves steps: where edges
        contradict each other, those that are far off the count of all edges are left out.
        """
        least = np.where(self.busy, 1.0, 0.0)
        mean_us = float((self.time_us[self.end] - self.time_us[self.begin]).sum() / max(self.steps.sum(), 1.0))
        guess = np.maximum(np.diff(self.time_us) / max(mean_us, 1.0), 1.0) * least
        edges = (self.begin, self.end, self.steps)
        guess = fit_steps(self, guess, *edges, least)
        sums = np.r_[0.0, np.cumsum(guess)]
        off = np.abs(self.steps - sums[self.end] + sums[self.begin])
        near = off <= np.maximum(thresholds.FAR_STEPS, thresholds.FAR_SHARE * self.steps)
        contradicting = 1 - float(near.mean()) if near.size else 0.0
        if contradicting < thresholds.USUAL_CONTRADICTING and self._are_consistent(*edges).all():
            return ConsistentEdges(guess, *edges, contradicting, np.empty(0, np.int64))
        count, preempted = len(self.steps), np.empty(0, np.int64)
        if contradicting > thresholds.MOST_CONTRADICTING and (on_time := self._never_preempted(least)) is not None:
            near, contradicting, count = on_time, 0.0, int(on_time.sum())
            preempted = self.decoded[~on_time[: len(self.decoded)]]
        begin, end, steps = (edge[near] for edge in edges)
        consistent = self._are_consistent(begin, end, steps)
        begin, end, steps = begin[consistent], end[consistent], steps[consistent]
        contradicting = max(contradicting, 1 - len(steps) / max(count, 1))
        guess = fit_steps(self, guess, begin, end, steps, least)
        return ConsistentEdges(guess, begin, end, steps, contradicting, preempted)

    def _never_preempted(self, least: Floats) -> NDArray[np.bool_] | None:
        """Return which edges are of requests with a token of every step; null where these are too few, or disagree.

        A preempted request has fewer tokens than there are steps, never more: edges far below the count of the others
        are left out, the largest difference first, and come back once the difference is small.
        """
        tokens = self.with_token_edges_only()
        begin, end, steps = tokens.begin, tokens.end, tokens.steps
        quick_us = float(np.quantile((self.time_us[end] - self.time_us[begin]) / steps, thresholds.QUICK_QUANTILE))
        guess = np.maximum(np.diff(self.time_us) / max(quick_us, 1.0), 1.0) * least
        kept = np.ones(len(steps), bool)
        for _ in range(_TRIM_ROUNDS):
            counts = fit_steps(self, guess, begin[kept], end[kept], steps[kept], least)
            sums = np.r_[0.0, np.cumsum(counts)]
            ahead = steps - (sums[end] - sums[begin])
            is_late = ahead < -np.maximum(thresholds.FAR_STEPS, thresholds.LATE_SHARE * steps)
            furthest = is_late & (ahead <= min(float(np.quantile(ahead[kept], 0.05)), -thresholds.FAR_STEPS))
            next_kept = (kept & ~furthest) | ~is_late
            if next_kept.sum() < thresholds.LEAST_NOT_PREEMPTED * len(steps):
                return None
            if (next_kept == kept).all():
                break
            kept = next_kept
        near = np.abs(ahead[kept]) <= np.maximum(thresholds.FAR_STEPS, thresholds.LATE_SHARE * steps[kept])
        if not kept.any() or 1 - near.mean() > thresholds.MOST_CONTRADICTING:
            return None
        # Edges from scheduling to a first token say little here, and may be wrong.
        is_kept = np.zeros(len(self.steps), bool)
        is_kept[: len(kept)] = kept
        return is_kept

    def _are_consistent(self, begin: Ints, end: Ints, steps: Floats) -> NDArray[np.bool_]:
        _, offset = potentials(self.size, begin, end, steps)
        return np.abs(offset[end] - offset[begin] - steps) <= 0.5


def build_graph(arrays: RequestArrays, budget: float) -> Graph:
    """Find the nodes of a server's requests and the edges between them.

    Args:
        arrays: The requests.
        budget: Token budget of a step: longer prompts are computed in chunks.
    """
    first, last, at, conflicts = _token_nodes(arrays)
    near = thresholds.NEAR_SHARE * arrays.short_step_us()
    scheduled_us, in_one_step, into_idle, lag = _scheduling(arrays, first, last, at, budget)
    token_nodes = len(at)
    right = np.minimum(np.searchsorted(at, scheduled_us), token_nodes - 1)
    left = np.maximum(right - 1, 0)
    nearest = np.where(np.abs(at[right] - scheduled_us) < np.abs(at[left] - scheduled_us), right, left)
    apart = np.abs(at[nearest] - scheduled_us)
    snapped = (apart < near) & (nearest != first)
    # A time that is neither at a node nor clearly away from every node is ambiguous and gets no node.
    is_clear = (in_one_step & (snapped | (apart > thresholds.CLEAR_MULTIPLE * near))) | into_idle
    used = np.flatnonzero(is_clear & (not arrays.is_client))
    added = used[~snapped[used]]
    added = added[np.argsort(scheduled_us[added], kind="stable")]
    number = np.cumsum(np.diff(scheduled_us[added], prepend=-np.inf) > near) - 1
    node = nearest.copy()
    node[added] = token_nodes + number
    added_us = np.bincount(number, scheduled_us[added]) / np.bincount(number) if added.size else np.empty(0)

    at = np.r_[at, added_us]
    rank = np.empty(len(at), np.int64)
    in_time = np.argsort(at, kind="stable")
    rank[in_time] = np.arange(len(at))
    at = at[in_time]
    node[np.setdiff1d(np.arange(len(first)), used)] = -1
    scheduled = np.where(node >= 0, rank[node], _last_until(at, scheduled_us + near))
    first, last = rank[first], rank[last]
    if arrays.is_client:  # by the step of its first token, if that began as another one ended
        running = _running(first, last, token_nodes)
        scheduled = np.where((first > 0) & (running[first - 1] > 0), first - 1, first)
    scheduled = np.minimum(scheduled, first)
    counted = used[in_one_step[used] & (scheduled[used] < first[used])]
    decoding = np.flatnonzero((last > first) & (arrays.decode_steps > 0))
    return Graph(
        at,
        scheduled,
        first,
        last,
        np.r_[first[decoding], scheduled[counted]],
        np.r_[last[decoding], first[counted]],
        np.r_[arrays.decode_steps[decoding], np.where(into_idle, 1.0, 1.0 + lag)[counted]],
        decoding,
        lag,
        scheduled_us,
        in_one_step,
        into_idle,
        conflicts,
        budget,
    )


def _last_until(at: Floats, times: Floats) -> Ints:
    """Return the last node at or before each time; the first node where none is."""
    return np.maximum(np.searchsorted(at, times, side="right") - 1, 0)


def _running(first: Ints, last: Ints, size: int) -> Ints:
    """Return how many requests decode after each node, shape (size,)."""
    return np.cumsum(np.bincount(first, minlength=size) - np.bincount(last, minlength=size))


def _token_nodes(arrays: RequestArrays) -> tuple[Ints, Ints, Floats, float]:
    """Return the nodes of first and last tokens, the time of each node, and the share of requests that contradict
    it.
    """
    n = len(arrays.decode_steps)
    stamps = np.concatenate([arrays.first_token_ns, arrays.last_token_ns])
    order = np.argsort(stamps, kind="stable")
    numbers = np.cumsum(np.diff(stamps[order], prepend=stamps[order[0]]) > thresholds.SAME_STAMP_NS)
    node = np.empty(2 * n, np.int64)
    node[order] = numbers
    first, last = node[:n], node[n:]
    wall_us = np.bincount(node, (stamps - arrays.zero_ns) / 1e3) / np.bincount(node)
    root, relative_us = potentials(len(wall_us), first, last, arrays.decode_us)
    off_us = np.abs(relative_us[last] - relative_us[first] - arrays.decode_us)
    is_wrong = off_us > thresholds.NEAR_SHARE * arrays.short_step_us()
    # The engine's clock is exact within a component. A busy front end stamps outputs late, never early: the earliest
    # stamp gives the time of the component on the wall clock.
    shifts = pl.DataFrame({"root": root, "shift_us": wall_us - relative_us})
    shift_us = shifts.select(pl.col("shift_us").min().over("root")).to_series().to_numpy()
    return first, last, np.maximum.accumulate(relative_us + shift_us), float(is_wrong.mean())


def _scheduling(
    arrays: RequestArrays, first: Ints, last: Ints, at: Floats, budget: float
) -> tuple[Floats, NDArray[np.bool_], NDArray[np.bool_], int]:
    """Return when each request was scheduled, whether in one step, whether into an idle engine, and the steps scheduled
    ahead.
    """
    near = thresholds.NEAR_SHARE * arrays.short_step_us()
    if arrays.is_client:
        never = np.zeros(len(first), bool)
        return at[first] - near, ~never, never, 0
    running = _running(first, last, len(at))
    scheduled_us = at[first] - arrays.prefill_us
    before = _last_until(at, scheduled_us)
    # Where the prompts scheduled at one time fit into one step, none is cut into chunks.
    by_time = np.argsort(scheduled_us)
    total, times = np.r_[0.0, np.cumsum(arrays.prompt_tokens[by_time])], scheduled_us[by_time]
    since = np.searchsorted(times, scheduled_us - near)
    until = np.searchsorted(times, scheduled_us + near, side="right")
    together, room = total[until] - total[since], budget - running[before]
    # Chunks of earlier prompts come first, and take room too.
    by_first = np.argsort(first, kind="stable")
    done = np.r_[0.0, np.cumsum(arrays.prompt_tokens[by_first])]
    left = total[since] - done[np.searchsorted(at[first[by_first]], scheduled_us + near, side="right")]
    in_one_step = together + left <= room
    # With scheduling a step ahead a step ends between a request's SCHEDULED and its first token: nodes are as
    # dense there as anywhere. Otherwise no node is there.
    inside = np.searchsorted(at, at[first] - near) > np.searchsorted(at, scheduled_us + near)
    mean_us = float(arrays.decode_us.sum() / max(arrays.decode_steps.sum(), 1.0))
    busy_us = float(np.diff(at)[running[:-1] > 0].sum())
    density = min(1.0, len(at) * mean_us / max(busy_us, mean_us, 1.0))
    lag = int(in_one_step.any() and inside[in_one_step].mean() > density / 2)
    # A step in progress computes some of the earlier chunks.
    in_one_step = together + np.maximum(left - lag * room, 0) <= room
    # A step is scheduled a little after the outputs before it.
    gap = scheduled_us - at[before]
    close = gap[(gap >= 0) & (gap < near)]
    scheduled_us = scheduled_us - (float(np.median(close)) if close.size else 0.0)
    started = np.searchsorted(np.sort(scheduled_us), scheduled_us - near)
    ended = np.searchsorted(at[np.sort(first)], scheduled_us + near)
    now = _last_until(at, scheduled_us + near)
    into_idle = (started <= ended) & ((running[now] == 0) | (at[now] > scheduled_us + near))
    return scheduled_us, in_one_step, into_idle, lag


def fit_steps(graph: Graph, steps: Floats, begin: Ints, end: Ints, goal: Floats, least: Floats) -> Floats:
    """Scale the steps of the intervals until those of each range of nodes add up to its `goal`.

    Each round multiplies an interval by the geometric mean of the ratios of the ranges that cover it, as generalized
    iterative scaling does (Darroch and Ratcliff 1972).
    """
    single = np.flatnonzero(end - begin == 1)
    cover = np.maximum(graph.interval_sums(begin, end, np.ones(len(begin))), 1)
    steps = steps.copy()
    for _ in range(_FIT_ROUNDS):
        steps[begin[single]] = goal[single]
        sums = np.r_[0.0, np.cumsum(steps)]
        log_ratio = np.log(goal / np.maximum(sums[end] - sums[begin], 1e-9))
        change = graph.interval_sums(begin, end, log_ratio) / cover
        steps = np.maximum(steps * np.exp(change), least)
        if np.abs(change).max(initial=0.0) < _FIT_TOLERANCE:
            break
    steps[begin[single]] = goal[single]
    return steps


def robust_fit(x: Floats, y: Floats) -> Floats:
    """Return the non-negative coefficients of `y` in `x` with the least absolute relative errors.

    Iteratively reweighted least squares (Schlossmacher 1973), each round with no negative coefficient (`nonnegative`).
    """
    weight = 1 / y
    for _ in range(8):
        a, b = x * weight[:, None], y * weight
        square = a.T @ a
        beta = nonnegative(square + 1e-9 * np.diag(square.diagonal() + 1e-30), a.T @ b, np.ones(x.shape[1], bool))
        error = np.abs(x @ beta - y) / y
        weight = 1 / y / np.sqrt(np.maximum(error, 0.3 * float(np.median(error)) + 1e-9))
    return beta
