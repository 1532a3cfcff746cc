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
from tracefit.timeline.request_evidence import unknown_batches
from tracefit.timeline.request_graph import BUDGET, USED, Graph, Spans, balanced, graph_of, potentials, usable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from tracefit.timeline.composition import EngineLimits
    from tracefit.timeline.engines import Floats, Ints

_ROUNDS = 4
_SURE_SD = 1.3
"""Clusters join where every other integer is further off than this many standard deviations."""

STAMP_SD_US = 100.0
"""How far the place of a node on the wall clock is off, on two machines that were measured."""

_QUIET = 7.0
"""Requests that the mean rate expects to see where none came: e^-7 is a chance of 0.1 %."""

_WINDOWS, _WINDOW_REQUESTS = 10, 2_000
"""Of very many requests, those in so many windows of the recording are placed: a model needs no more, and memory is bounded."""


@dataclass(frozen=True, slots=True)
class RequestSteps:
    """Steps that were counted from requests.

    Attributes:
        requests: The `requests` table, with the steps and the times of the events of those that are counted.
        starts: The known starts of steps: ENGINE, step_id, ts_start_ns, start_sd_us, start_source, pause.
    """

    requests: pl.DataFrame
    starts: pl.DataFrame


_STARTS = {
    **{name: JOURNEY_EVENTS.types[name] for name in ENGINE},
    "step_id": pl.Int64(),
    "ts_start_ns": pl.Int64(),
    "start_sd_us": pl.Float64(),
    "start_source": pl.String(),
    "pause": pl.Boolean(),
}


def count_steps(requests: pl.DataFrame, limits: EngineLimits) -> RequestSteps:
    """Count the steps of every server of which the spans of all requests are known, and place its requests on them.

    Args:
        requests: The `requests` table of one run.
        limits: Limits of the scheduler.
    """
    budget = limits.max_num_batched_tokens
    numbered = requests.with_row_index("row")
    unknown = unknown_batches(requests, budget).select(SERVER)
    whole = (
        usable(numbered.select("row", *ENGINE, *USED))
        .join(unknown, on=SERVER, how="anti")
        .sort("arrival_ns", "row")
    )
    parts = [part for _, rows in whole.group_by(SERVER, maintain_order=True) for part in _windows(rows)]
    found = [_placed(part, budget or BUDGET) for part in parts]
    starts = pl.concat([pl.DataFrame(schema=_STARTS), *(one.starts for one in found)])
    if not found:
        return RequestSteps(requests, starts)
    placed = pl.concat([one.requests for one in found])
    updated = numbered.update(placed, on="row", how="left").drop("row")
    return RequestSteps(updated, starts)


def _windows(rows: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """Yield the requests of a server, or where they are very many those that end in some windows, an epoch of its own each."""
    if rows.height <= _WINDOWS * _WINDOW_REQUESTS:
        yield rows
        return
    by_end = rows.with_columns(end=pl.col("arrival_ns") + (1e3 * pl.col("e2e_us")).cast(pl.Int64)).sort(
        "end", "row"
    )
    for window, begin in enumerate(np.linspace(0, rows.height - _WINDOW_REQUESTS, _WINDOWS).astype(int)):
        part = by_end[int(begin) : int(begin) + _WINDOW_REQUESTS].drop("end")
        yield part.with_columns(epoch=pl.lit(window, pl.Int64)).sort("arrival_ns", "row")


def _placed(rows: pl.DataFrame, budget: float) -> RequestSteps:
    spans = Spans.of(rows)
    g = graph_of(spans, budget)
    counts = _counted(spans, g)
    # Idle gaps have empty steps: their time is that of no batch. With scheduling ahead the step in progress comes first.
    gaps = np.r_[0, np.cumsum(~counts.busy)] * (1 + g.lag)
    ended = counts.number - counts.number[0] + gaps + 1
    known = _inside(spans, g)
    engine = {name: pl.lit(rows[name][0], _STARTS[name]) for name in ENGINE}
    at_ns = spans.zero_ns + (g.at_us * 1e3).round().astype(np.int64)
    starts = pl.DataFrame({"step_id": ended + 1 + g.lag, "ts_start_ns": at_ns}).filter(known)
    starts = starts.unique("step_id", keep="last", maintain_order=True).with_columns(
        **engine, start_sd_us=pl.lit(STAMP_SD_US), start_source=pl.lit("request"), pause=pl.lit(value=False)
    )
    return RequestSteps(on_steps(rows, spans, g, ended, g.lag), starts.select(_STARTS.keys()))


def on_steps(rows: pl.DataFrame, spans: Spans, g: Graph, ended: Ints, lag: int) -> pl.DataFrame:
    """Return the steps and the times of the events of requests.

    Args:
        rows: The requests, with their number `row`.
        spans: The same as arrays.
        g: Their graph.
        ended: The last step that had ended by each node of it.
        lag: Steps that scheduling runs ahead, as steps are numbered.
    """
    at_ns = spans.zero_ns + (g.at_us * 1e3).round().astype(np.int64)
    first, last = ended[g.first], ended[g.last]
    # What has ended when a request is scheduled or queued, between two nodes by the time.
    scheduled = np.interp(g.sched_us, g.at_us, ended).round() + np.where(g.is_fresh, 1, 1 + lag)
    scheduled = np.where(spans.prompt <= g.budget, np.maximum(scheduled, first - 1), scheduled)
    scheduled = np.clip(np.where(g.is_whole, first, scheduled), 1, first).astype(np.int64)
    queued_us = g.sched_us - spans.queue_us
    queued = np.interp(queued_us, g.at_us, ended).round().astype(np.int64) + lag
    return pl.DataFrame(
        {
            "row": rows["row"],
            "epoch": rows["epoch"],
            "queued_ns": spans.zero_ns + (queued_us * 1e3).round().astype(np.int64),
            "first_scheduled_ns": spans.zero_ns + (g.sched_us * 1e3).round().astype(np.int64),
            "first_token_ns": at_ns[g.first],
            "last_token_ns": at_ns[g.last],
            "finished_ns": at_ns[g.last],
            "queued_step": np.maximum(np.minimum(queued, scheduled - 1), 0),
            "first_scheduled_step": scheduled,
            "first_token_step": first,
            "finished_step": last,
        }
    )


def _inside(r: Spans, g: Graph) -> NDArray[np.bool_]:
    """Return which nodes lie where every request in the engine has its span in the recording.

    A span is written when its request ends: one that ended before the first span that we have, or that runs on when the
    recording ends, is missing. Where no request has come for long before the end, the engine had run dry.
    """
    ends = g.at_us[g.last]
    stays = ends - r.arrival_us
    # Requests that came since the last one that we know, and were short enough to have ended too.
    short = np.clip(ends.max() - r.arrival_us.max() - stays, 0.0, None)
    expected = float(short.sum()) / max(float(np.ptp(r.arrival_us)), 1.0)
    until = ends.max() if expected > _QUIET else ends.max() - stays.max()
    inside: NDArray[np.bool_] = (g.at_us >= ends.min()) & (g.at_us <= until)
    return inside


def events_of(requests: pl.DataFrame) -> pl.DataFrame:
    """Return the core events that requests placed on steps have, as rows of `journey_events`; of other requests none."""
    own = requests.filter((pl.col("dialect") == STOCK) & pl.col("first_token_step").is_not_null())
    events = {
        "QUEUED": ("queued", pl.lit(0, pl.Int64)),
        "SCHEDULED": ("first_scheduled", pl.lit(0, pl.Int64)),
        "FIRST_TOKEN": ("first_token", pl.lit(1, pl.Int64)),
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
                pl.lit(event).alias("event"),
                pl.col(f"{name}_ns").alias("ts_ns"),
                pl.col(f"{name}_step").alias("step_id"),
                done.alias("decode_done_tokens"),
            )
            for event, (name, done) in events.items()
        ),
    )
    return JOURNEY_EVENTS.conform(rows.explode("events").unnest("events"))


@dataclass(frozen=True, slots=True)
class _Counts:
    """The number of every node, and what is known of the intervals between neighbouring ones.

    Attributes:
        number: Steps that had ended by each node, idle gaps apart.
        cluster: Nodes of one cluster have numbers that are exact relative to each other.
        busy: Whether a request is in the engine during each interval.
    """

    number: Ints
    cluster: Ints
    busy: NDArray[np.bool_]


def _counted(r: Spans, g: Graph) -> _Counts:
    """Return the number of every node."""
    ones = np.ones(len(r.prompt))
    run, busy = g.between(g.first, g.last, ones), g.busy
    least = np.where(busy, 1.0, 0.0)
    time = np.diff(g.at_us)
    tokens, prompts = (np.bincount(g.first, amount, g.size)[1:] for amount in (r.prompt, ones))
    prompts_running = g.between(g.first, g.last, r.prompt)

    steps, begin, end, goal, _ = g.consistent()
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
        steps = balanced(g, guess, begin[forward], end[forward], goal[forward], least)
    at = np.r_[0.0, np.cumsum(steps)]
    place = pl.DataFrame({"cluster": cluster, "at": at - offset}).select(
        pl.col("at").median().round().over("cluster")
    )
    number = (place["at"].to_numpy() + offset).round().astype(np.int64)
    # Two clusters whose order is not sure may cross: numbers grow with time, by one at least where a step ended.
    grown = np.cumsum(np.r_[0, least]).astype(np.int64)
    return _Counts(np.maximum.accumulate(number - grown) + grown, cluster, busy)


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
