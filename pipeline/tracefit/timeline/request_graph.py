"""The exact facts in the times of an unmodified server's requests: the tokens of one step, and the number of steps between tokens.

Outputs of one step carry the same stamp of the front end, so that stamps that coincide are one step: a *node*. A request is
scheduled right after the step before its first one, which may be a node too. Each request is then a chain of edges between
nodes, each so many steps and so much time on the engine's clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl

from tracefit.tables.dialects import CLIENT, STOCK

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tracefit.timeline.engines import Floats, Ints

SAME_STEP_NS = 1_500
"""Stamps of one step differ by the rounding of seconds as floats, 240 ns; those of different steps by a step."""

_SAME_STEP = 1 / 3
"""Tokens that a client receives less than this share of a short step apart are of one step."""

_NEAR = 0.25
"""Share of a short step: times that are less apart are the end of the same step."""

_APART = 2.4
"""Times that are this far apart are of two steps; between the two limits neither is sure."""

BUDGET = 2_048
"""Token budget if unknown: vLLM's smallest default."""

_BALANCES, _BALANCED = 300, 1e-3
"""Rounds of proportional fitting: where requests of minutes overlap, thirty leave 2 % between them; and the change that ends them."""

_FAR_STEPS, _FAR_SHARE, _USUAL_ODD = 1.0, 0.03, 0.02
"""An edge is far off beyond this number of steps, and this share of its steps. Runs of one token a step have a smaller share of such
edges than the last value."""

MOST_ODD = 0.1
"""Largest share of requests whose steps contradict those of the others."""

_QUICK, _LATE_SHARE, _TRIMS, _MOST_PREEMPTED = 0.2, 0.01, 100, 0.5
"""Quantile of the times per token that a request without a preemption has; share of its steps by which a request is late if it was
preempted; rounds of trimming; and the least share of the requests that must be left."""

NEEDED = ("arrival_ns", "ttft_us", "e2e_us", "queue_wait_us", "prefill_us", "decode_us")
"""Times without which the steps of a request cannot be counted."""

_OF_CLIENT = ("arrival_ns", "client_ttft_us", "client_e2e_us")

USED = (*NEEDED, *_OF_CLIENT[1:], "dialect", "prompt_tokens", "output_tokens")
"""Columns of a request that steps are counted from."""


def is_counted() -> pl.Expr:
    """Return which requests steps are counted from: of unmodified servers, or of a client if a run has no other requests."""
    of_client = pl.col("dialect") == CLIENT
    return (pl.col("dialect") == STOCK) | (of_client & of_client.all())


def is_usable() -> pl.Expr:
    """Say whether steps are counted from a request and it has all times and lengths; never null."""
    needed = pl.when(pl.col("dialect") == CLIENT).then(pl.all_horizontal(pl.col(_OF_CLIENT).is_not_null()))
    whole = needed.otherwise(pl.all_horizontal(pl.col(NEEDED).is_not_null()))
    has_lengths = pl.all_horizontal(pl.col("prompt_tokens", "output_tokens") > 0)
    return (whole & has_lengths & is_counted()).fill_null(value=False)


@dataclass(frozen=True, slots=True)
class Spans:
    """The requests of one server, one element each; times in us since `zero_ns`."""

    zero_ns: int
    arrival_us: Floats
    first_ns: Ints
    last_ns: Ints
    prompt: Floats
    decodes: Floats
    """Steps after that of the first token."""
    queue_us: Floats
    prefill_us: Floats
    decode_us: Floats
    is_client: bool = False
    """Its times are a client's, who receives the tokens of a step one after the other and does not see the scheduling."""

    @classmethod
    def of(cls, rows: pl.DataFrame) -> Spans:
        """Return the arrays of usable requests. A client does not see when one is scheduled: its TTFT is taken as the prefill."""
        if is_client := CLIENT in rows["dialect"]:
            ttft, e2e = pl.col("client_ttft_us"), pl.col("client_e2e_us")
            rows = rows.with_columns(
                ttft_us=ttft, e2e_us=e2e, queue_wait_us=pl.lit(0.0), prefill_us=ttft, decode_us=e2e - ttft
            )

        def stamp(name: str) -> pl.Expr:
            return pl.col("arrival_ns") + (pl.col(name) * 1e3).round().cast(pl.Int64)

        stamps = rows.select(first=stamp("ttft_us"), last=stamp("e2e_us"))
        decodes = (rows["output_tokens"] - 1).cast(pl.Float64).to_numpy()
        queue, prefill, decode = (
            rows[f"{name}_us"].to_numpy() for name in ("queue_wait", "prefill", "decode")
        )
        arrivals = rows["arrival_ns"].to_numpy()
        zero = int(arrivals.min())
        spans = cls(
            zero,
            (arrivals - zero) / 1e3,
            stamps["first"].to_numpy(),
            stamps["last"].to_numpy(),
            rows["prompt_tokens"].cast(pl.Float64).to_numpy(),
            decodes,
            queue,
            prefill,
            decode,
        )
        return spans._of_steps() if is_client else spans

    def _of_steps(self) -> Spans:
        """Return the times of a client as those of the steps: each is the first that came of its step."""
        stamps = np.concatenate([self.first_ns, self.last_ns])
        order = np.argsort(stamps, kind="stable")
        is_new = np.diff(stamps[order], prepend=0) > _SAME_STEP * 1e3 * self.short_step_us()
        stamps[order] = stamps[order][np.maximum.accumulate(np.where(is_new, np.arange(len(stamps)), 0))]
        first, last = np.split(stamps, 2)
        return replace(self, first_ns=first, last_ns=last, decode_us=(last - first) / 1e3, is_client=True)

    def short_step_us(self) -> float:
        """Return the time per token of the quick requests: about the shortest step."""
        several = self.decodes > 0
        if not several.any():
            return float(np.median(self.prefill_us))
        return float(np.quantile(self.decode_us[several] / self.decodes[several], 0.05))


def potentials(size: int, begin: Ints, end: Ints, difference: Floats) -> tuple[Ints, Floats]:
    """Join nodes by edges with a difference x[end] - x[begin] each, shape (edges,).

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
        # Each higher root is joined to a lower one by one edge; chains are then shortened to one link.
        high, one = np.unique(np.maximum(a, b), return_index=True)
        root[high], offset[high] = np.minimum(a, b)[one], step[one]
        while True:
            above = root[root]
            moved = np.flatnonzero(above != root)
            if not moved.size:
                break
            offset[moved] += offset[root[moved]]
            root = above


class Consistent(NamedTuple):
    """Edges of a graph that do not contradict each other.

    Attributes:
        guess: Steps between neighbouring nodes, a first guess, shape (size - 1,).
        begin: First node of each edge.
        end: Last node of each edge.
        steps: Steps of each edge.
        odd: Share of all edges, without those of preempted requests, that are far off or contradict others.
        preempted: Requests that were preempted, where they are many.
    """

    guess: Floats
    begin: Ints
    end: Ints
    steps: Floats
    odd: float
    preempted: Ints


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
        decoded: Requests of the edges from a first token to the last one, which come before the others.
        lag: Steps that scheduling runs ahead of execution, 0 or 1.
        sched_us: When each request was scheduled.
        is_whole: Its prompt was computed by one step.
        is_fresh: Nothing was in the engine when it was scheduled.
        time_conflicts: Share of the requests whose decode time is not that between its nodes.
        budget: Token budget of a step.
    """

    at_us: Floats
    scheduled: Ints
    first: Ints
    last: Ints
    begin: Ints
    end: Ints
    steps: Floats
    decoded: Ints
    lag: int
    sched_us: Floats
    is_whole: NDArray[np.bool_]
    is_fresh: NDArray[np.bool_]
    time_conflicts: float
    budget: float

    @property
    def size(self) -> int:
        """Number of nodes."""
        return len(self.at_us)

    def of_tokens(self) -> Graph:
        """Return it with only the edges between tokens, whose steps are exact."""
        own = slice(len(self.decoded))
        return replace(self, begin=self.begin[own], end=self.end[own], steps=self.steps[own])

    def between(self, begin: Ints, end: Ints, amount: Floats) -> Floats:
        """Sum amounts over the intervals between neighbouring nodes that ranges of nodes cover; shape (size - 1,)."""
        change = np.bincount(begin, amount, self.size) - np.bincount(end, amount, self.size)
        return np.asarray(np.cumsum(change)[:-1], dtype=np.float64)

    @property
    def busy(self) -> NDArray[np.bool_]:
        """Return whether a request is in the engine between neighbouring nodes; shape (size - 1,)."""
        ones = np.ones(len(self.first))
        return (self.between(self.first, self.last, ones) > 0) | (
            self.between(self.scheduled, self.first, ones) > 0
        )

    def consistent(self) -> Consistent:
        """Return a first guess of the steps between neighbouring nodes, and the edges that do not contradict the others.

        A preempted request waits for steps without a token, and speculative decoding saves steps: where edges contradict
        each other, those that are far off the count of all edges are left out.
        """
        least = np.where(self.busy, 1.0, 0.0)
        mean_us = float((self.at_us[self.end] - self.at_us[self.begin]).sum() / max(self.steps.sum(), 1.0))
        guess = np.maximum(np.diff(self.at_us) / max(mean_us, 1.0), 1.0) * least
        guess = balanced(self, guess, self.begin, self.end, self.steps, least)
        edges = (self.begin, self.end, self.steps)
        sums = np.r_[0.0, np.cumsum(guess)]
        off = np.abs(self.steps - sums[self.end] + sums[self.begin])
        near = off <= np.maximum(_FAR_STEPS, _FAR_SHARE * self.steps)
        odd = 1 - float(near.mean()) if near.size else 0.0
        if odd < _USUAL_ODD and self._agree(*edges).all():
            return Consistent(guess, *edges, odd, np.empty(0, np.int64))
        whole, preempted = len(self.steps), np.empty(0, np.int64)
        if odd > MOST_ODD and (on_time := self._never_preempted(least)) is not None:
            near, odd, whole = on_time, 0.0, int(on_time.sum())
            preempted = self.decoded[~on_time[: len(self.decoded)]]
        begin, end, steps = (edge[near] for edge in edges)
        kept = self._agree(begin, end, steps)
        begin, end, steps = begin[kept], end[kept], steps[kept]
        odd = max(odd, 1 - len(steps) / max(whole, 1))
        guess = balanced(self, guess, begin, end, steps, least)
        return Consistent(guess, begin, end, steps, odd, preempted)

    def _never_preempted(self, least: Floats) -> NDArray[np.bool_] | None:
        """Return the edges of requests that had a token of every step; null where they are too few, or disagree.

        A preempted request has fewer tokens than there are steps, never more: edges far below the count of the others are
        left out, the largest difference first, and come back once the difference is small.
        """
        g = self.of_tokens()
        begin, end, steps = g.begin, g.end, g.steps
        quick_us = float(np.quantile((self.at_us[end] - self.at_us[begin]) / steps, _QUICK))
        guess = np.maximum(np.diff(self.at_us) / max(quick_us, 1.0), 1.0) * least
        kept = np.ones(len(steps), bool)
        for _ in range(_TRIMS):
            counts = balanced(self, guess, begin[kept], end[kept], steps[kept], least)
            sums = np.r_[0.0, np.cumsum(counts)]
            ahead = steps - (sums[end] - sums[begin])
            is_late = ahead < -np.maximum(_FAR_STEPS, _LATE_SHARE * steps)
            furthest = is_late & (ahead <= min(float(np.quantile(ahead[kept], 0.05)), -_FAR_STEPS))
            now = (kept & ~furthest) | ~is_late
            if now.sum() < _MOST_PREEMPTED * len(steps):
                return None
            if (now == kept).all():
                break
            kept = now
        near = np.abs(ahead[kept]) <= np.maximum(_FAR_STEPS, _LATE_SHARE * steps[kept])
        if not kept.any() or 1 - near.mean() > MOST_ODD:
            return None
        # Edges from scheduling to a first token say little here, and may be wrong.
        whole = np.zeros(len(self.steps), bool)
        whole[: len(kept)] = kept
        return whole

    def _agree(self, begin: Ints, end: Ints, steps: Floats) -> NDArray[np.bool_]:
        _, offset = potentials(self.size, begin, end, steps)
        return np.abs(offset[end] - offset[begin] - steps) <= 0.5


def graph_of(r: Spans, budget: float) -> Graph:
    """Find the nodes of a server's requests and the edges between them.

    Args:
        r: The requests.
        budget: Token budget of a step: longer prompts are computed in chunks.
    """
    first, last, at, conflicts = _token_nodes(r)
    near = _NEAR * r.short_step_us()
    sched, whole, fresh, lag = _scheduling(r, first, last, at, budget)
    outs = len(at)
    right = np.minimum(np.searchsorted(at, sched), outs - 1)
    left = np.maximum(right - 1, 0)
    nearest = np.where(np.abs(at[right] - sched) < np.abs(at[left] - sched), right, left)
    apart = np.abs(at[nearest] - sched)
    snapped = (apart < near) & (nearest != first)
    # A time that is neither at a node nor clearly apart from all of them is ambiguous: it is not a node.
    used = np.flatnonzero((whole & (snapped | (apart > _APART * near)) | fresh) & (not r.is_client))
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
    place[np.setdiff1d(np.arange(len(first)), used)] = -1
    scheduled = np.where(
        place >= 0, rank[place], np.maximum(np.searchsorted(at, sched + near, side="right") - 1, 0)
    )
    first, last = rank[first], rank[last]
    if r.is_client:  # by the step of its first token, if that began as another one ended
        running = np.cumsum(np.bincount(first, minlength=outs) - np.bincount(last, minlength=outs))
        scheduled = np.where((first > 0) & (running[first - 1] > 0), first - 1, first)
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
        decoding,
        lag,
        sched,
        whole,
        fresh,
        conflicts,
        budget,
    )


def _token_nodes(r: Spans) -> tuple[Ints, Ints, Floats, float]:
    """Return the nodes of first and last tokens, the time of each node, and the share of requests that contradict it."""
    n = len(r.decodes)
    stamps = np.concatenate([r.first_ns, r.last_ns])
    order = np.argsort(stamps, kind="stable")
    numbers = np.cumsum(np.diff(stamps[order], prepend=stamps[order[0]]) > SAME_STEP_NS)
    node = np.empty(2 * n, np.int64)
    node[order] = numbers
    first, last = node[:n], node[n:]
    wall = np.bincount(node, (stamps - r.zero_ns) / 1e3) / np.bincount(node)
    root, relative = potentials(len(wall), first, last, r.decode_us)
    wrong = np.abs(relative[last] - relative[first] - r.decode_us) > _NEAR * r.short_step_us()
    # The engine's clock is exact within a component. A busy front end stamps outputs late, never early: the earliest stamp
    # gives the time of the component on the wall clock.
    off = pl.DataFrame({"root": root, "off": wall - relative}).select(pl.col("off").min().over("root"))
    at = np.maximum.accumulate(relative + off["off"].to_numpy())
    return first, last, at, float(wrong.mean())


def _scheduling(
    r: Spans, first: Ints, last: Ints, at: Floats, budget: float
) -> tuple[Floats, NDArray[np.bool_], NDArray[np.bool_], int]:
    """Return when each request was scheduled, whether in one step, whether in an empty engine, and the steps scheduled ahead."""
    near = _NEAR * r.short_step_us()
    if r.is_client:
        never = np.zeros(len(first), bool)
        return at[first] - near, ~never, never, 0
    running = np.cumsum(np.bincount(first, minlength=len(at)) - np.bincount(last, minlength=len(at)))
    sched = at[first] - r.prefill_us
    before = np.maximum(np.searchsorted(at, sched, side="right") - 1, 0)
    # Where the prompts scheduled at one time fit into one step, none is cut into chunks.
    by_time = np.argsort(sched)
    total, times = np.r_[0.0, np.cumsum(r.prompt[by_time])], sched[by_time]
    until, since = np.searchsorted(times, sched + near, side="right"), np.searchsorted(times, sched - near)
    own, room = total[until] - total[since], budget - running[before]
    # Chunks of earlier prompts come first, and take room too.
    by_first = np.argsort(first, kind="stable")
    done = np.r_[0.0, np.cumsum(r.prompt[by_first])]
    left = total[since] - done[np.searchsorted(at[first[by_first]], sched + near, side="right")]
    whole = own + left <= room
    # With scheduling a step ahead a step ends between a request's SCHEDULED and its first token: nodes are as
    # dense there as anywhere. Otherwise no node is there.
    inside = np.searchsorted(at, at[first] - near) > np.searchsorted(at, sched + near)
    mean_us = float(r.decode_us.sum() / max(r.decodes.sum(), 1.0))
    busy_us = float(np.diff(at)[running[:-1] > 0].sum())
    density = min(1.0, len(at) * mean_us / max(busy_us, mean_us, 1.0))
    lag = int(whole.any() and inside[whole].mean() > density / 2)
    # A step in progress computes some of them.
    whole = own + np.maximum(left - lag * room, 0) <= room
    # A step is scheduled a little after the outputs before it.
    gap = sched - at[before]
    close = gap[(gap >= 0) & (gap < near)]
    sched = sched - (float(np.median(close)) if close.size else 0.0)
    started = np.searchsorted(np.sort(sched), sched - near)
    ended = np.searchsorted(at[np.sort(first)], sched + near)
    now = np.maximum(np.searchsorted(at, sched + near, side="right") - 1, 0)
    fresh = (started <= ended) & ((running[now] == 0) | (at[now] > sched + near))
    return sched, whole, fresh, lag


def balanced(g: Graph, steps: Floats, begin: Ints, end: Ints, goal: Floats, least: Floats) -> Floats:
    """Scale the steps of the intervals so that each range of nodes has its number of steps, by proportional fitting."""
    alone = np.flatnonzero(end - begin == 1)
    cover = np.maximum(g.between(begin, end, np.ones(len(begin))), 1)
    steps = steps.copy()
    for _ in range(_BALANCES):
        steps[begin[alone]] = goal[alone]
        sums = np.r_[0.0, np.cumsum(steps)]
        ratio = np.log(goal / np.maximum(sums[end] - sums[begin], 1e-9))
        change = g.between(begin, end, ratio) / cover
        steps = np.maximum(steps * np.exp(change), least)
        if np.abs(change).max(initial=0.0) < _BALANCED:
            break
    steps[begin[alone]] = goal[alone]
    return steps


def robust_fit(x: Floats, y: Floats) -> Floats:
    """Fit non-negative coefficients to relative errors, by least absolute deviations (reweighted least squares)."""
    from scipy.optimize import nnls  # noqa: PLC0415 - commands that fit nothing do without

    weight = 1 / y
    for _ in range(8):
        a, b = x * weight[:, None], y * weight
        square = a.T @ a
        lower = np.linalg.cholesky(square + 1e-9 * np.diag(square.diagonal() + 1e-30))
        beta = nnls(lower.T, np.linalg.solve(lower, a.T @ b))[0]
        error = np.abs(x @ beta - y) / y
        weight = 1 / y / np.sqrt(np.maximum(error, 0.3 * float(np.median(error)) + 1e-9))
    return np.asarray(beta, dtype=np.float64)
