"""The requests of an unmodified server on the steps that its log names: the log has the batches, the spans have the times.

A token's stamp is the end of a step, and so is a line of the log. The two clocks differ by whole quarters of an hour (a local
time, a year that the log does not write) and by the time until the line is printed. Which quarters follows from the prompts: a
step that computes as many tokens as the prompts of the requests that get their first token then. With fine stamps the line
of a step is then the nearest one; with whole seconds it is the one of that second with as many tokens. Requests that ran
at one time are an exact number of steps apart (`request_graph`), so that each such line votes for all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import polars.selectors as cs

from tracefit.statistics import robust_sd_expr
from tracefit.tables.schema import ENGINE
from tracefit.timeline.engines import range_add
from tracefit.timeline.logged_steps import CHANGE, FINE, LoggedSteps, is_logged
from tracefit.timeline.request_graph import BUDGET, USED, Spans, graph_of, is_usable, potentials
from tracefit.timeline.request_steps import STAMP_SD_US, RequestSteps, on_steps

if TYPE_CHECKING:
    from tracefit.timeline.composition import EngineLimits
    from tracefit.timeline.engines import Floats, Ints
    from tracefit.timeline.request_graph import Graph

_ZONE_S = 900
"""Time zones are apart by whole quarters of an hour."""

_PRINTED_S = 0.5
"""A line is printed at most so long after its step."""

_PAIRS, _NODES = 1_000_000, 300
"""Most pairs of a prompt and a line, and most prompts, from which the distance of the clocks is computed."""

_FOUND = 0.3
"""Least share of these prompts that are all prompt tokens of a line. Prefix-cache hits and chunks make it smaller."""

_AGREE = 0.5
"""Least share of the steps on which log and matched requests agree, if the two are of one server."""

_SURE_VOTES = 5
"""Votes of a line with as many tokens; one that is only the nearest has one vote, since outputs may be stamped some steps late."""

_ROUNDS = 3
"""Rounds of matching requests to lines of whole seconds, by the times of the lines between matched ones."""

_NEAR_S = 0.05
"""A fine stamp is at most so far from the end of its step."""


def place_on_log(requests: pl.DataFrame, clock: LoggedSteps, limits: EngineLimits) -> RequestSteps | None:
    """Give the requests of an unmodified server the steps of its log; null where the two do not match.

    Args:
        requests: The `requests` table of one run.
        clock: Its logged steps.
        limits: Limits of the scheduler.

    Returns:
        The requests that have steps, and the starts of the steps on the clock of the spans.
    """
    numbered = requests.with_row_index("row")
    rows = numbered.select("row", *ENGINE, *USED).filter(is_usable()).sort("arrival_ns", "row")
    lines = clock.steps.filter(is_logged()).drop_nulls("unix_ns").sort("epoch", "step_id")
    servers = {frame["server"].n_unique() for frame in (rows, lines)}
    if servers != {1} or rows["server"][0] != lines["server"][0]:
        return None
    spans = Spans.of(rows)
    g = graph_of(spans, limits.max_num_batched_tokens or BUDGET)
    # Steps of several lives of a server on one axis, apart from each other.
    last = lines.group_by("epoch", maintain_order=True).agg(pl.col("step_id").max() + 2)
    base = last.select("epoch", base=pl.col("step_id").cum_sum() - pl.col("step_id"))
    lines = lines.join(base, on="epoch", maintain_order="left").with_columns(
        at=pl.col("base") + pl.col("step_id"), seconds=(pl.col("unix_ns") - spans.zero_ns) / 1e9
    )
    is_coarse = CHANGE in clock.starts["start_source"]
    prompts = np.bincount(g.first, spans.prompt, g.size).astype(np.int64)
    nodes = pl.DataFrame({"node": np.arange(g.size), "node_s": g.at_us / 1e6, "prefill_tokens": prompts})
    ends = nodes[np.unique(np.r_[g.first, g.last])]
    apart_s = _apart_s(ends.filter(pl.col("prefill_tokens") > 0), lines, is_coarse=is_coarse)
    if apart_s is None:
        return None
    lines = lines.with_columns(pl.col("seconds") - apart_s)
    # Lines show the steps of each request: the order of scheduling is a guess where outputs are stamped a step late.
    ended = _numbers(g.of_tokens(), _votes(ends, lines, is_coarse=is_coarse))
    for _ in range(_ROUNDS if is_coarse and np.isfinite(ended).sum() > 1 else 0):
        # Prompts with prefix-cache hits match no line by their tokens: matched requests give the ends of the lines between them.
        timed = _timed(lines, g, ended)
        ended = _numbers(g.of_tokens(), _votes(ends, timed, is_coarse=False))
    known = np.isfinite(ended)
    placed_rows = known[g.first] & known[g.last]
    if not placed_rows.any():
        return None
    whole = np.interp(g.at_us, g.at_us[known], ended[known]).round().astype(np.int64)
    if _agreement(lines, whole[g.first][placed_rows], whole[g.last][placed_rows]) < _AGREE:
        return None
    epochs, bases = base["epoch"].to_numpy(), base["base"].to_numpy()
    life = np.searchsorted(bases, whole[g.last], side="right") - 1
    placed = on_steps(rows, spans, g, whole, 0).with_columns(
        cs.ends_with("_step") - pl.Series(bases[life]), epoch=pl.Series(epochs[life])
    )
    starts = _starts(lines, clock.starts, spans, g, ended, apart_s)
    return RequestSteps.of(requests, [placed.filter(pl.Series(placed_rows))], [starts])


def _agreement(lines: pl.DataFrame, first: Ints, last: Ints) -> float:
    """Return the share of the lines, from the first to the last matched request, with as many generating requests as decode there."""
    size = int(last.max()) + 1
    decoding = range_add(size, first + 1, last, np.ones(len(first)))
    inside = lines.filter(pl.col("at").is_between(int(first.min()), size - 1))
    return float((inside["num_decode_reqs"].to_numpy() == decoding[inside["at"].to_numpy()]).mean())


def _apart_s(prompts: pl.DataFrame, lines: pl.DataFrame, *, is_coarse: bool) -> float | None:
    """Return how far the log's clock is ahead of that of the spans, of coarse stamps in whole quarters of an hour; null if unknown.

    Args:
        prompts: node_s and prefill_tokens of the steps that first tokens come from.
        lines: seconds and prefill_tokens of the steps of the log.
        is_coarse: Whether stamps are rounded down to whole seconds.
    """
    # Use the rarest lengths, so that few lines have them by chance.
    same = lines.filter(pl.col("prefill_tokens") > 0).select("seconds", "prefill_tokens")
    counts = same.group_by("prefill_tokens").len()
    tried = prompts.join(counts, on="prefill_tokens").sort("len", "node_s")
    tried = tried.filter(pl.col("len").cum_sum() <= _PAIRS).head(_NODES)
    ahead = pl.col("seconds") - pl.col("node_s")
    pairs = (
        tried.join(same, on="prefill_tokens")
        .with_columns(quarters=(ahead / _ZONE_S).round())
        .with_columns(rest=ahead - pl.col("quarters") * _ZONE_S)
        .filter(pl.col("rest").is_between(-1.0 - _PRINTED_S, _PRINTED_S))
    )
    counted = pairs.group_by("quarters").agg(pl.col("node_s").n_unique(), pl.col("rest").median())
    best = counted.sort("node_s", pl.col("quarters").abs(), descending=[True, False]).head(1)
    if not best.height or best["node_s"][0] < _FOUND * tried.height:
        return None
    quarters, _, rest = best.row(0)
    return float(quarters * _ZONE_S + (0.0 if is_coarse else rest))


def _votes(ends: pl.DataFrame, lines: pl.DataFrame, *, is_coarse: bool) -> pl.DataFrame:
    """Return the lines that may end at each node: of about its time with as many tokens as its prompts, or with its fine stamp: node, at, votes."""
    window_s = (-1.0 - _PRINTED_S, _PRINTED_S) if is_coarse else (-_NEAR_S, _NEAR_S)
    keyed = lines.filter(pl.col("prefill_tokens") > 0).select(
        "at", "seconds", "prefill_tokens", second=pl.col("seconds").floor()
    )
    places = ends.filter(pl.col("prefill_tokens") > 0).with_columns(
        second=pl.concat_list(pl.col("node_s").floor() + back for back in (-2, -1, 0, 1))
    )
    ahead = pl.col("seconds") - pl.col("node_s")
    pairs = places.explode("second").join(keyed, on=["second", "prefill_tokens"])
    votes = [pairs.filter(ahead.is_between(*window_s)).select("node", "at", votes=pl.lit(_SURE_VOTES))]
    if not is_coarse:
        stamped = lines.select("at", "seconds").sort("seconds")
        nearest = ends.sort("node_s").join_asof(
            stamped, left_on="node_s", right_on="seconds", strategy="nearest", coalesce=False
        )
        votes.append(nearest.filter(ahead.abs() < _NEAR_S).select("node", "at", votes=pl.lit(1)))
    return pl.concat(votes)


def _timed(lines: pl.DataFrame, g: Graph, ended: Floats) -> pl.DataFrame:
    """Return the lines between nodes that have lines, and when they end: by the times in the lines, or evenly without.

    Args:
        lines: at, seconds, and cycle_us of the lines that have a step time.
        g: The graph of the requests.
        ended: Numbers of the lines that end at its nodes, NaN without one.
    """
    known = np.flatnonzero(np.isfinite(ended))
    numbers, at = ended[known], lines["at"].to_numpy()
    own = lines["cycle_us"].fill_null(strategy="mean").fill_null(1.0).cum_sum().to_numpy()
    seconds = np.interp(own, np.interp(numbers, at, own), g.at_us[known] / 1e6)
    # Where the engine idled between two nodes, the time of a line between them is unknown.
    idle = np.diff(np.r_[0, np.cumsum(~g.busy)][known]) > 0
    before = np.clip(np.searchsorted(numbers, at, side="right") - 1, 0, len(known) - 2)
    is_timed = (at >= numbers[0]) & (at <= numbers[-1]) & (~idle[before] | np.isin(at, numbers))
    return lines.with_columns(seconds=pl.Series(seconds)).filter(pl.Series(is_timed))


def _numbers(g: Graph, votes: pl.DataFrame) -> Floats:
    """Return the number of the line that ends at each node, shape (nodes,); NaN without one."""
    _, begin, end, steps, *_ = g.consistent()
    root, relative = potentials(g.size, begin, end, steps)
    offsets = pl.Series(relative).round().cast(pl.Int64)
    # The clock of a component that a front end stamped late may point to lines before the first one.
    least = (
        pl.DataFrame({"root": root, "offset": offsets}).group_by("root").agg(least=-pl.col("offset").min())
    )
    named = (
        votes.with_columns(root=pl.Series(root)[votes["node"]], first=votes["at"] - offsets[votes["node"]])
        .join(least, on="root")
        .filter(pl.col("first") >= pl.col("least"))
    )
    voted = (
        named.group_by("root", "first")
        .agg(pl.col("votes").sum())
        .with_columns(best=pl.col("votes").max().over("root"))
    ).filter(pl.col("votes") == pl.col("best"))
    # Of several lines with as many votes, the one nearest to the sure neighbours counts.
    number = _increasing(g, root, relative, voted.filter(pl.len().over("root") == 1))
    known = np.isfinite(number)
    if not known.any():
        return number
    at = np.interp(g.at_us, g.at_us[known], number[known])
    places = (
        pl.DataFrame({"root": root, "place": at - relative}).group_by("root").agg(pl.col("place").median())
    )
    nearest = (
        voted.join(places, on="root")
        .with_columns(away=(pl.col("first") - pl.col("place")).abs())
        .sort("root", "away", "first")
        .unique("root", keep="first", maintain_order=True)
    )
    return _increasing(g, root, relative, nearest)


def _increasing(g: Graph, root: Ints, relative: Floats, chosen: pl.DataFrame) -> Floats:
    """Return the numbers of the nodes of chosen clusters: of two that contradict the order of time, the one with more votes stays."""
    first, votes = np.full(g.size, np.nan), np.zeros(g.size)
    first[chosen["root"].to_numpy()] = chosen["first"].to_numpy()
    votes[chosen["root"].to_numpy()] = chosen["votes"].to_numpy()
    while True:
        number = first[root] + relative
        known = np.flatnonzero(np.isfinite(number))
        back = np.flatnonzero(np.diff(number[known]) < 0)
        if not back.size:
            return number
        left, right = root[known[back]], root[known[back + 1]]
        first[np.where(votes[left] < votes[right], left, right)] = np.nan


def _starts(
    lines: pl.DataFrame,
    logged: pl.DataFrame,
    spans: Spans,
    g: Graph,
    ended: Floats,
    apart_s: float,
) -> pl.DataFrame:
    """Return the starts of steps on the clock of the spans: at the nodes, and of fine stamps at the other lines."""
    tokens = np.unique(np.r_[g.first, g.last])
    known = tokens[np.isfinite(ended[tokens])]
    at_ns = spans.zero_ns + (g.at_us * 1e3).round().astype(np.int64)
    nodes = pl.DataFrame({"at": ended[known].astype(np.int64), "ts_start_ns": at_ns[known]})
    nodes = nodes.unique("at", keep="last", maintain_order=True).sort("at")
    engine = lines.select(*ENGINE, "base").unique("epoch").sort("base")
    nodes = nodes.join_asof(engine, left_on="at", right_on="base").select(
        *ENGINE,
        "ts_start_ns",
        step_id=pl.col("at") - pl.col("base") + 1,
        start_sd_us=pl.lit(STAMP_SD_US),
        start_source=pl.lit(FINE),
        pause=pl.lit(value=False),
    )
    # Steps that have both a node and a line show how far lines are from the ends of their steps.
    moved = logged.with_columns(pl.col("ts_start_ns") - round(apart_s * 1e9))
    both = moved.join(nodes, on=[*ENGINE, "step_id"], suffix="_node")
    late = pl.col("ts_start_ns") - pl.col("ts_start_ns_node")
    late_ns, sd_us = both.select(late.median().alias("ns"), sd_us=robust_sd_expr(late) / 1e3).row(0)
    is_fine = pl.col("start_source") == FINE
    moved = moved.with_columns(
        ts_start_ns=pl.col("ts_start_ns") - pl.when(is_fine).then(round(late_ns or 0)).otherwise(0),
        start_sd_us=pl.when(is_fine)
        .then(pl.max_horizontal("start_sd_us", pl.lit(sd_us)))
        .otherwise("start_sd_us"),
    )
    outside = ~pl.col("ts_start_ns").is_between(at_ns[known[0]], at_ns[known[-1]])
    others = moved.filter(is_fine | outside).join(nodes, on=[*ENGINE, "step_id"], how="anti")
    starts = pl.concat([nodes, others.select(nodes.columns)]).sort(*ENGINE, "step_id")
    # Idle times begin at nodes.
    idle = np.sort(at_ns[:-1][~g.busy])
    begins = starts["ts_start_ns"].to_numpy()
    until = np.r_[begins[1:], begins[-1:]]
    holds = np.searchsorted(idle, until) > np.searchsorted(idle, begins)
    return starts.with_columns(pause=pl.col("pause") | pl.Series(holds))
