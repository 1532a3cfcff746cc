"""The step number of every node of a server's requests, and how well a model of the batches explains the times in
between.

Each request is a chain of exact edges between nodes, each with a number of steps and a time on the engine's clock.
Nodes that edges join have exact step numbers relative to each other; one integer per such cluster is unknown. Between
two neighbouring nodes the batch is constant, so that a linear model of a step tells how many steps fit into the time;
the numbers of steps give the model. `count_nodes` repeats both in turn, and joins clusters where the times leave one
integer only.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import polars as pl

from tracefit.statistics import robust_sd
from tracefit.timeline import thresholds
from tracefit.timeline.evidence_statistics import fullness, unevenness
from tracefit.timeline.preemptions import steps_without_token
from tracefit.timeline.request_graph import (
    GRAPH_COLUMNS,
    RequestArrays,
    build_graph,
    fit_steps,
    potentials,
    robust_fit,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tracefit.timeline.engines import Floats, Ints
    from tracefit.timeline.evidence_statistics import Fullness
    from tracefit.timeline.request_graph import ConsistentEdges, Graph

_COUNT_ROUNDS = 4
"""Rounds in which model and steps give each other."""


class Counts(msgspec.Struct, frozen=True):
    """The step number of every node, and facts of the intervals between neighbouring nodes.

    Attributes:
        number: Steps that had ended by each node, without idle gaps.
        busy: Whether a request is in the engine during each interval.
        plain: The intervals whose steps compute no known prompt.
        prompt_us: Time that each request's prompt adds to its steps, shape (requests,).
        prompts_per_step: Known prompts over the steps that were counted.
        unevenness: *U* of the tokens in the caches while preempted requests wait; null where that is rare.
        fullness: *F*, how full the engine was in plain steps while known requests waited in a queue; null where that is
            rare.
    """

    number: Ints
    busy: NDArray[np.bool_]
    plain: PlainIntervals
    prompt_us: Floats
    prompts_per_step: float
    unevenness: float | None
    fullness: Fullness | None


class PlainIntervals(NamedTuple):
    """Intervals between neighbouring nodes in which only decodes are known, arrays of shape (intervals,).

    Attributes:
        at_us: When each began.
        steps: Its steps.
        time_us: Its time.
        model_us: The time that its batch explains, with the speed that the machine had around then.
    """

    at_us: Floats
    steps: Floats
    time_us: Floats
    model_us: Floats


def count_nodes(arrays: RequestArrays, graph: Graph, edges: ConsistentEdges) -> Counts:
    """Return the step number of every node; `edges` are those of the graph that do not contradict each other."""
    server = _CountedServer(arrays, graph, edges.preempted)
    number = _whole_numbers(server, *_estimated_steps(server, edges))
    return _facts(server, number)


class _CountedServer(msgspec.Struct, frozen=True):
    """Requests of a server whose steps are counted, their graph, and the requests among them that were preempted."""

    arrays: RequestArrays
    graph: Graph
    preempted: Ints

    @property
    def least(self) -> Floats:
        """Fewest steps between neighbouring nodes: one where a request is in the engine; shape (size - 1,)."""
        return np.where(self.graph.busy, 1.0, 0.0)

    def batches(self, number: Floats) -> _Batches:
        """Return the batches of the intervals, with the nodes at some steps."""
        return _batches(self.arrays, self.graph, number, self.preempted)


def _terms(steps: Floats, batch: _Batches) -> Floats:
    """Return the terms of a step's time, summed over the steps of each interval; shape (size - 1, 5)."""
    return np.asarray(np.c_[steps, steps * batch.run, steps * batch.read, batch.tokens, batch.prompts], np.float64)


def _estimated_steps(server: _CountedServer, edges: ConsistentEdges) -> tuple[Ints, Floats, Floats]:
    """Return the cluster of each node, its exact steps from the first node of the cluster, and the steps of each
    interval, not yet whole.

    The steps give a model of a step's time, and the model the steps that fit into the time between two clusters, in
    turn.
    """
    graph, busy, least = server.graph, server.graph.busy, server.least
    time_us = np.diff(graph.time_us)
    root, exact_offset = potentials(graph.size, edges.begin, edges.end, edges.steps)
    exact = np.unique(root, return_inverse=True)[1]
    cluster, offset, steps = exact, exact_offset, edges.guess
    used = busy & (time_us > 0)
    for turn in range(_COUNT_ROUNDS):
        batch = server.batches(np.r_[0.0, np.cumsum(steps)])
        x = _terms(steps, batch)
        beta = robust_fit(x[used], time_us[used])
        step_us = np.maximum(beta[0] + beta[1] * batch.run + beta[2] * batch.read, 1e-3)
        prompts_us = beta[3] * batch.tokens + beta[4] * batch.prompts
        guess = np.where(busy, np.maximum((time_us - prompts_us) / step_us, least), 0.0)
        scatter = (time_us - x @ beta)[used] / step_us[used] / np.sqrt(steps[used])
        sd = np.sqrt(robust_sd(scatter) ** 2 * np.maximum(guess, 0.02) + 0.01)
        cluster, offset = exact, exact_offset
        if turn:
            cluster, offset = _joined(cluster, offset, guess, sd, busy)
        order = np.lexsort((np.arange(graph.size), cluster))
        same = cluster[order][1:] == cluster[order][:-1]
        begin, end = order[:-1][same], order[1:][same]
        goal = offset[end] - offset[begin]
        forward = goal > 0
        steps = fit_steps(graph, guess, begin[forward], end[forward], goal[forward], least)
    return cluster, offset, steps


def _whole_numbers(server: _CountedServer, cluster: Ints, offset: Floats, steps: Floats) -> Ints:
    """Return the step number of every node, from whole numbers of steps between the clusters; shape (size,)."""
    number = np.r_[0.0, np.cumsum(steps)]
    first = pl.DataFrame({"cluster": cluster, "first": number - offset}).select(
        pl.col("first").median().round().over("cluster")
    )
    whole = (first.to_series().to_numpy() + offset).round().astype(np.int64)
    # Two clusters whose order is not sure may cross: numbers grow with time, by one at least where a step ended.
    grown = np.cumsum(np.r_[0, server.least]).astype(np.int64)
    return np.asarray(np.maximum.accumulate(whole - grown) + grown)


def _facts(server: _CountedServer, number: Ints) -> Counts:
    """Return the facts of the intervals between nodes with known step numbers."""
    arrays, graph, busy = server.arrays, server.graph, server.graph.busy
    time_us = np.diff(graph.time_us)
    steps = np.diff(number).astype(np.float64)
    whole = is_completely_recorded(arrays, graph)
    scheduling = graph.interval_sums(graph.scheduled, graph.first, np.ones(len(graph.first)))
    counted = busy & (time_us > 0) & (steps > 0)
    plain = counted & (scheduling == 0) & whole[1:] & whole[:-1]
    batch = server.batches(number.astype(np.float64))
    x = _terms(steps, batch)
    beta = robust_fit(x[counted], time_us[counted]) if counted.any() else np.zeros(5)
    waits = batch.waiting > 0
    step_us = float(time_us[counted].sum() / max(steps[counted].sum(), 1.0))
    queued = plain & _has_queue(arrays, graph, step_us)
    return Counts(
        number,
        busy,
        _plain(graph.time_us[:-1][plain], x[plain, :3], time_us[plain]),
        beta[3] * arrays.prompt_tokens + beta[4],
        float(batch.prompts[counted].sum() / max(steps[counted].sum(), 1.0)),
        unevenness(batch.read[waits], steps[waits], thresholds.LEAST_FULL_STEPS),
        fullness(batch.run[queued], batch.read[queued], steps[queued]),
    )


class CountedRequests:
    """Requests of one server as arrays, their graph, and the step numbers of its nodes, computed on first use.

    Attributes:
        rows: Their row numbers in the frame of requests, in the order of the arrays.
        arrays: The requests.
        graph: Their graph.
    """

    def __init__(self, requests: pl.DataFrame, rows: pl.Series, budget: float) -> None:
        self.rows = rows
        self.arrays = RequestArrays.of(requests.select(GRAPH_COLUMNS)[rows])
        self.graph = build_graph(self.arrays, budget)

    @cached_property
    def edges(self) -> ConsistentEdges:
        """The edges of the graph that do not contradict each other."""
        return self.graph.consistent_edges()

    @cached_property
    def counts(self) -> Counts:
        """The step number of every node."""
        return count_nodes(self.arrays, self.graph, self.edges)


class _Batches(NamedTuple):
    """The batch of each interval between neighbouring nodes, arrays of shape (size - 1,).

    Attributes:
        run: Requests that decode.
        read: Tokens that they read, on average over the steps.
        tokens: Tokens of the computed prompts.
        prompts: Computed prompts.
        waiting: Preempted requests.
    """

    run: Floats
    read: Floats
    tokens: Floats
    prompts: Floats
    waiting: Floats


def _batches(arrays: RequestArrays, graph: Graph, at: Floats, preempted: Ints) -> _Batches:
    """Return the batches of the intervals, with nodes at the steps `at` and some requests preempted."""
    is_preempted = np.isin(np.arange(len(graph.first)), preempted)
    first_step, last_step = at[graph.first], at[graph.last]
    decodes = np.where(is_preempted, arrays.decode_steps, last_step - first_step)
    who, out, resumed = steps_without_token(first_step, last_step, arrays.prompt_tokens, decodes)
    back = np.minimum(np.searchsorted(at, resumed), graph.size - 1)
    begin, end = np.r_[graph.first, back], np.r_[graph.last, graph.last[who]]
    end[who] = np.minimum(np.searchsorted(at, out), graph.last[who])
    # A resumed request computes its prompt and its output so far.
    prompt = np.r_[arrays.prompt_tokens, arrays.prompt_tokens[who] + out - first_step[who]]
    ones = np.ones(len(begin))
    sums = graph.interval_sums
    run = sums(begin, end, ones)
    read = sums(begin, end, prompt) + run * (at[1:] + at[:-1]) / 2 - sums(begin, end, at[begin])
    tokens, prompts = (np.bincount(begin, w, graph.size)[1:].astype(np.float64) for w in (prompt, ones))
    return _Batches(run, read, tokens, prompts, waiting=sums(end[who], back, np.ones(len(who))))


def _plain(at_us: Floats, x: Floats, time_us: Floats) -> PlainIntervals:
    """Return the intervals with the times that their batches explain: a model of all, times the middle ratio to it of a
    few seconds.
    """
    if not len(time_us):
        return PlainIntervals(at_us, x[:, 0], time_us, time_us)
    model_us = np.maximum(x @ robust_fit(x, time_us), 1e-3)
    around = pl.DataFrame({"window": at_us // thresholds.SPEED_US, "log": np.log(time_us / model_us)})
    speed = np.exp(around.select(pl.col("log").median().over("window")).to_series().to_numpy())
    return PlainIntervals(at_us, x[:, 0], time_us, model_us * speed)


def _has_queue(arrays: RequestArrays, graph: Graph, step_us: float) -> NDArray[np.bool_]:
    """Return between which nodes a known request waits that came some steps ago: only a full engine lets it wait; shape
    (size - 1,).
    """
    waits = graph.scheduled_us - arrays.arrival_us > thresholds.QUEUE_STEPS * step_us
    begin = np.searchsorted(graph.time_us, arrays.arrival_us[waits] + thresholds.QUEUE_STEPS * step_us)
    begin = np.minimum(begin, graph.scheduled[waits])
    return graph.interval_sums(begin, graph.scheduled[waits], np.ones(len(begin))) > 0


def _joined(cluster: Ints, offset: Floats, guess: Floats, sd: Floats, busy: NDArray[np.bool_]) -> tuple[Ints, Floats]:
    """Join clusters where the intervals between them agree on a whole distance, each with its surest partner, until
    none is left.
    """
    while True:
        cut = np.flatnonzero(busy & (cluster[1:] != cluster[:-1]))
        a, b = cluster[:-1][cut], cluster[1:][cut]
        apart = np.where(a > b, -1.0, 1.0) * (guess[cut] + offset[:-1][cut] - offset[1:][cut])
        votes = pl.DataFrame({"a": np.minimum(a, b), "b": np.maximum(a, b), "apart": apart, "weight": sd[cut] ** -2.0})
        weight = pl.col("weight").sum()
        candidates = (
            votes.group_by("a", "b")
            .agg(apart=(pl.col("apart") * pl.col("weight")).sum() / weight, weight=weight)
            .with_columns(whole=pl.col("apart").round())
            .with_columns(z=(0.5 - (pl.col("apart") - pl.col("whole")).abs()) * pl.col("weight").sqrt())
            .filter(pl.col("z") > thresholds.SURE_WHOLE_SD)
            .sort("z", "a", "b", descending=[True, False, False])
            .with_row_index("rank")
        )
        if not candidates.height:
            return np.unique(cluster, return_inverse=True)[1], offset
        sides = pl.concat([candidates.select("rank", cluster=side) for side in ("a", "b")])
        surest = sides.group_by("cluster").agg(pl.col("rank").min())["rank"].unique().sort()
        taken = candidates[surest.to_numpy()]
        joined, moved = potentials(int(cluster.max()) + 1, *(taken[name].to_numpy() for name in ("a", "b", "whole")))
        offset, cluster = offset + moved[cluster], joined[cluster]


def is_completely_recorded(arrays: RequestArrays, graph: Graph) -> NDArray[np.bool_]:
    """Return at which nodes every request in the engine has its span in the recording.

    A span is written when its request ends: requests that ended before the first recorded span, or still ran at the end
    of the recording, have none. Where no request arrived for long before the end, the engine had become empty.
    """
    ends = graph.time_us[graph.last]
    stays = ends - arrays.arrival_us
    # Requests that arrived after the last recorded one, and were short enough to have ended too.
    short = np.clip(ends.max() - arrays.arrival_us.max() - stays, 0.0, None)
    expected = float(short.sum()) / max(float(np.ptp(arrays.arrival_us)), 1.0)
    until = ends.max() if expected > thresholds.QUIET_REQUESTS else ends.max() - stays.max()
    inside: NDArray[np.bool_] = (graph.time_us >= ends.min()) & (graph.time_us <= until)
    return inside
