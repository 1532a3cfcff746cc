"""The number of steps at every node of a server's requests, and how far a model of the batches explains the times between.

Each request is a chain of exact edges between nodes, each so many steps and so much engine time; nodes that edges join have
exact step numbers relative to each other. One integer per such cluster is left. Between two neighbouring nodes the batch is
constant, and a linear model of a step says how many steps the time in between holds; the numbers of steps give the model.
Both are repeated in turn (`counted`), and clusters join where the times leave one integer only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl

from tracefit.statistics import robust_sd
from tracefit.timeline.preemptions import steps_without_token
from tracefit.timeline.request_graph import USED, Spans, balanced, graph_of, potentials, robust_fit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tracefit.timeline.engines import Floats, Ints
    from tracefit.timeline.request_graph import Consistent, Graph

_ROUNDS = 4
_SURE_SD = 1.3
"""Clusters join where every other integer is further off than this many standard deviations."""

_FEW = 20
"""Fewest intervals that show how step times scatter."""

_FEW_FULL = 500
"""Fewest steps with a full cache that show whether the recorded requests fill it."""

_QUIET = 7.0
"""Requests that the mean rate expects to see where none came: e^-7 is a chance of 0.1 %."""


@dataclass(frozen=True, slots=True)
class Counts:
    """The number of every node, and facts of the intervals between neighbouring ones.

    Attributes:
        number: Steps that had ended by each node, idle gaps apart.
        busy: Whether a request is in the engine during each interval.
        scatter: How far the times of steps without a prompt are off a model of the batches, 80th and 90th percentile, as a
            share of them and per root of the steps; null where there are few.
        unevenness: Spread of the tokens in the caches while preempted requests wait, 10th to 90th percentile, as a share of the
            median; null where that is rare.
    """

    number: Ints
    busy: NDArray[np.bool_]
    scatter: tuple[float, float] | None
    unevenness: float | None


def counted(r: Spans, g: Graph, edges: Consistent) -> Counts:
    """Return the number of every node; `edges` are those of the graph that do not contradict each other."""
    busy = g.busy
    least = np.where(busy, 1.0, 0.0)
    time = np.diff(g.at_us)
    steps, begin, end, goal, _, preempted = edges
    root, relative = potentials(g.size, begin, end, goal)
    exact = np.unique(root, return_inverse=True)[1]
    cluster, offset = exact, relative
    for turn in range(_ROUNDS):
        at = np.r_[0.0, np.cumsum(steps)]
        batch = _batches(r, g, at, preempted)
        x = np.c_[steps, steps * batch.run, steps * batch.read, batch.tokens, batch.prompts]
        used = busy & (time > 0)
        beta = robust_fit(x[used], time[used])
        step = np.maximum(beta[0] + beta[1] * batch.run + beta[2] * batch.read, 1e-3)
        prompts_us = beta[3] * batch.tokens + beta[4] * batch.prompts
        guess = np.where(busy, np.maximum((time - prompts_us) / step, least), 0.0)
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
        steps = balanced(g, guess, begin[forward], end[forward], goal[forward], least)
    at = np.r_[0.0, np.cumsum(steps)]
    place = pl.DataFrame({"cluster": cluster, "at": at - offset}).select(
        pl.col("at").median().round().over("cluster")
    )
    number = (place["at"].to_numpy() + offset).round().astype(np.int64)
    # Two clusters whose order is not sure may cross: numbers grow with time, by one at least where a step ended.
    grown = np.cumsum(np.r_[0, least]).astype(np.int64)
    number = np.maximum.accumulate(number - grown) + grown
    steps = np.diff(number).astype(np.float64)
    known = known_nodes(r, g)
    scheduling = g.between(g.scheduled, g.first, np.ones(len(g.first)))
    plain = busy & (time > 0) & (steps > 0) & (scheduling == 0) & known[1:] & known[:-1]
    batch = _batches(r, g, number.astype(np.float64), preempted)
    x = np.c_[steps, steps * batch.run, steps * batch.read][plain]
    waits = batch.waiting > 0
    return Counts(number, busy, _scatter(x, time[plain]), _unevenness(batch.read[waits], steps[waits]))


class CountedRequests:
    """Requests of one server as arrays, with their graph, and the numbers of its nodes once these are used.

    Attributes:
        rows: Their numbers in the frame of requests, in the order of the arrays.
        spans: The requests.
        graph: Their graph.
    """

    def __init__(self, requests: pl.DataFrame, rows: pl.Series, budget: float) -> None:
        self.rows = rows
        self.spans = Spans.of(requests.select(USED)[rows])
        self.graph = graph_of(self.spans, budget)

    @cached_property
    def edges(self) -> Consistent:
        """The edges of the graph that do not contradict each other."""
        return self.graph.consistent()

    @cached_property
    def counts(self) -> Counts:
        """The number of every node."""
        return counted(self.spans, self.graph, self.edges)


class _Batches(NamedTuple):
    """The steps in each interval between neighbouring nodes, arrays of shape (size - 1,).

    `run` requests decode, and read `read` tokens on average; `prompts` are computed, of `tokens` together; `waiting` requests were
    preempted.
    """

    run: Floats
    read: Floats
    tokens: Floats
    prompts: Floats
    waiting: Floats


def _batches(r: Spans, g: Graph, at: Floats, lost: Ints) -> _Batches:
    """Return the batches of the intervals, if nodes are at these steps, and some requests were preempted."""
    is_lost = np.isin(np.arange(len(g.first)), lost)
    decodes = np.where(is_lost, r.decodes, at[g.last] - at[g.first])
    who, preempted, resumed = steps_without_token(at[g.first], at[g.last], r.prompt, decodes)
    back = np.minimum(np.searchsorted(at, resumed), g.size - 1)
    begin, end = np.r_[g.first, back], np.r_[g.last, g.last[who]]
    end[who] = np.minimum(np.searchsorted(at, preempted), g.last[who])
    # A resumed request computes its prompt and its output so far.
    prompt = np.r_[r.prompt, r.prompt[who] + preempted - at[g.first[who]]]
    ones = np.ones(len(begin))
    run = g.between(begin, end, ones)
    read = g.between(begin, end, prompt) + run * (at[1:] + at[:-1]) / 2 - g.between(begin, end, at[begin])
    tokens, prompts = (np.bincount(begin, amount, g.size)[1:].astype(np.float64) for amount in (prompt, ones))
    return _Batches(run, read, tokens, prompts, g.between(end[who], back, np.ones(len(who))))


def _scatter(x: Floats, time: Floats) -> tuple[float, float] | None:
    if len(time) < _FEW:
        return None
    model = np.maximum(x @ robust_fit(x, time), 1e-3)
    most, nearly_all = np.quantile(np.abs(time / model - 1) * np.sqrt(x[:, 0]), (0.8, 0.9))
    return float(most), float(nearly_all)


def _unevenness(read: Floats, steps: Floats) -> float | None:
    if steps.sum() < _FEW_FULL:
        return None
    order = np.argsort(read)
    share = np.cumsum(steps[order]) / steps.sum()
    low, middle, high = (float(read[order][np.searchsorted(share, q)]) for q in (0.1, 0.5, 0.9))
    return (high - low) / middle


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
        candidates = (
            votes.group_by("a", "b")
            .agg(apart=(pl.col("apart") * pl.col("weight")).sum() / weight, weight=weight)
            .with_columns(whole=pl.col("apart").round())
            .with_columns(z=(0.5 - (pl.col("apart") - pl.col("whole")).abs()) * pl.col("weight").sqrt())
            .filter(pl.col("z") > _SURE_SD)
            .sort("z", "a", "b", descending=[True, False, False])
            .with_row_index("rank")
        )
        if not candidates.height:
            return np.unique(cluster, return_inverse=True)[1], offset
        sides = pl.concat([candidates.select("rank", cluster=side) for side in ("a", "b")])
        surest = sides.group_by("cluster").agg(pl.col("rank").min())["rank"].unique().sort()
        taken = candidates[surest.to_numpy()]
        up, moved = potentials(
            int(cluster.max()) + 1, *(taken[name].to_numpy() for name in ("a", "b", "whole"))
        )
        offset, cluster = offset + moved[cluster], up[cluster]


def known_nodes(r: Spans, g: Graph) -> NDArray[np.bool_]:
    """Return the nodes at whose time every request in the engine has its span in the recording.

    A span is written when its request ends: one that ended before the first recorded span, or that still runs at the end of the
    recording, is missing. Where no request arrived for long before the end, the engine had become empty.
    """
    ends = g.at_us[g.last]
    stays = ends - r.arrival_us
    # Requests that arrived after the last recorded one, and were short enough to have ended too.
    short = np.clip(ends.max() - r.arrival_us.max() - stays, 0.0, None)
    expected = float(short.sum()) / max(float(np.ptp(r.arrival_us)), 1.0)
    until = ends.max() if expected > _QUIET else ends.max() - stays.max()
    inside: NDArray[np.bool_] = (g.at_us >= ends.min()) & (g.at_us <= until)
    return inside
