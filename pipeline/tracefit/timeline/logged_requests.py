"""Give the requests of an unmodified server the steps of its log: the log has the batches, the spans have the times.

A token's stamp marks the end of a step, and so does a line of the log. The two clocks differ by whole quarters of an
hour (a local time, a year that the log does not write) and by the time until the line is printed. The prompts show how
many quarters: a step computes as many tokens as the prompts of the requests that get their first token at its end. The
line of a step is then the nearest one if stamps are fine; if they are whole seconds, it is the line of that second with
as many tokens. Requests that ran at the same time are an exact number of steps apart (`request_graph`), so that each
such line votes for all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import polars.selectors as cs

from tracefit.statistics import robust_sd_expr
from tracefit.tables.schema import ENGINE
from tracefit.timeline import thresholds
from tracefit.timeline.engines import range_add
from tracefit.timeline.logged_steps import LoggedSteps, is_change, is_logged
from tracefit.timeline.request_graph import (
    DEFAULT_TOKEN_BUDGET,
    GRAPH_COLUMNS,
    RequestArrays,
    build_graph,
    is_usable,
    potentials,
)
from tracefit.timeline.request_steps import RequestSteps, on_steps

if TYPE_CHECKING:
    from tracefit.timeline.composition import EngineLimits
    from tracefit.timeline.engines import Floats, Ints
    from tracefit.timeline.request_graph import Graph

_MAX_PAIRS, _MAX_PROMPTS = 1_000_000, 300
"""Most pairs of a prompt and a line, and most prompts, that the difference of the clocks is computed from."""

_SURE_VOTES = 5
"""Votes of a line with as many tokens; a line that is only the nearest has one vote, since outputs may be stamped some
steps late."""

_MATCH_ROUNDS = 3
"""Rounds that match requests to lines of whole seconds, by times interpolated between the matched lines."""


def place_on_log(requests: pl.DataFrame, clock: LoggedSteps, limits: EngineLimits) -> RequestSteps | None:
    """Give the requests of an unmodified server the steps of its log; null if the two do not match.

    Args:
        requests: The `requests` table of one run.
        clock: Its logged steps.
        limits: Limits of the scheduler.

    Returns:
        The requests with steps, and the starts of the steps on the clock of the spans.
    """
    numbered = requests.with_row_index("row")
    rows = numbered.select("row", *ENGINE, *GRAPH_COLUMNS).filter(is_usable()).sort("arrival_ns", "row")
    lines = clock.steps.filter(is_logged()).drop_nulls("unix_ns").sort("epoch", "step_id")
    servers = {frame["server"].n_unique() for frame in (rows, lines)}
    if servers != {1} or rows["server"][0] != lines["server"][0]:
        return None
    arrays = RequestArrays.of(rows)
    graph = build_graph(arrays, limits.max_num_batched_tokens or DEFAULT_TOKEN_BUDGET)
    # Steps of all epochs on one axis, with a gap between epochs.
    last = lines.group_by("epoch", maintain_order=True).agg(pl.col("step_id").max() + 2)
    base = last.select("epoch", base=pl.col("step_id").cum_sum() - pl.col("step_id"))
    lines = lines.join(base, on="epoch", maintain_order="left").with_columns(
        at=pl.col("base") + pl.col("step_id"), seconds=(pl.col("unix_ns") - arrays.zero_ns) / 1e9
    )
    is_coarse = bool(clock.starts.select(is_change().any()).item())
    prompts = np.bincount(graph.first, arrays.prompt_tokens, graph.size).astype(np.int64)
    nodes = pl.DataFrame({"node": np.arange(graph.size), "node_s": graph.time_us / 1e6, "prefill_tokens": prompts})
    ends = nodes[np.unique(np.r_[graph.first, graph.last])]
    ahead_s = _log_ahead_s(ends.filter(pl.col("prefill_tokens") > 0), lines, is_coarse=is_coarse)
    if ahead_s is None:
        return None
    lines = lines.with_columns(pl.col("seconds") - ahead_s)
    # Edges from scheduling are left out: they are a guess where outputs are stamped a step late.
    tokens = graph.with_token_edges_only()
    ended = _line_numbers(tokens, _votes(ends, lines, is_coarse=is_coarse))
    for _ in range(_MATCH_ROUNDS if is_coarse and np.isfinite(ended).sum() > 1 else 0):
        # Prompts with prefix-cache hits match no line by their tokens, but by the time that matched requests give a
        # line.
        ended = _line_numbers(tokens, _votes(ends, _timed(lines, graph, ended), is_coarse=False))
    matched = np.isfinite(ended)
    is_placed = matched[graph.first] & matched[graph.last]
    if not is_placed.any():
        return None
    whole = np.interp(graph.time_us, graph.time_us[matched], ended[matched]).round().astype(np.int64)
    if _agreement(lines, whole[graph.first][is_placed], whole[graph.last][is_placed]) < thresholds.LEAST_AGREEMENT:
        return None
    epoch = base[np.searchsorted(base["base"].to_numpy(), whole[graph.last], side="right") - 1]
    placed = on_steps(rows, arrays, graph, whole, 0).with_columns(
        cs.ends_with("_step") - epoch["base"], epoch=epoch["epoch"]
    )
    starts = _starts(lines, clock.starts, arrays, graph, ended, ahead_s)
    return RequestSteps.of(requests, [placed.filter(pl.Series(is_placed))], [starts])


def _agreement(lines: pl.DataFrame, first: Ints, last: Ints) -> float:
    """Return the share of lines, from the first to the last matched request, that count as many decodes as the requests
    there.
    """
    size = int(last.max()) + 1
    decoding = range_add(size, first + 1, last, np.ones(len(first)))
    inside = lines.filter(pl.col("at").is_between(int(first.min()), size - 1))
    return float((inside["num_decode_reqs"].to_numpy() == decoding[inside["at"].to_numpy()]).mean())


def _log_ahead_s(prompts: pl.DataFrame, lines: pl.DataFrame, *, is_coarse: bool) -> float | None:
    """Return how far the log's clock is ahead of the spans' clock, in whole quarters of an hour if stamps are coarse;
    null if unknown.

    Args:
        prompts: node_s and prefill_tokens of the steps that give first tokens.
        lines: seconds and prefill_tokens of the log's steps.
        is_coarse: Whether stamps are rounded down to whole seconds.
    """
    # Rare lengths first: few lines have them by chance.
    same = lines.filter(pl.col("prefill_tokens") > 0).select("seconds", "prefill_tokens")
    counts = same.group_by("prefill_tokens").len()
    tried = prompts.join(counts, on="prefill_tokens").sort("len", "node_s")
    tried = tried.filter(pl.col("len").cum_sum() <= _MAX_PAIRS).head(_MAX_PROMPTS)
    ahead = pl.col("seconds") - pl.col("node_s")
    pairs = (
        tried.join(same, on="prefill_tokens")
        .with_columns(quarters=(ahead / thresholds.ZONE_S).round())
        .with_columns(rest=ahead - pl.col("quarters") * thresholds.ZONE_S)
        .filter(pl.col("rest").is_between(-1.0 - thresholds.PRINTED_S, thresholds.PRINTED_S))
    )
    counted = pairs.group_by("quarters").agg(pl.col("node_s").n_unique(), pl.col("rest").median())
    best = counted.sort("node_s", pl.col("quarters").abs(), descending=[True, False]).head(1)
    if not best.height or best["node_s"][0] < thresholds.LEAST_EXPLAINED * tried.height:
        return None
    quarters, _, rest = best.row(0)
    return float(quarters * thresholds.ZONE_S + (0.0 if is_coarse else rest))


def _votes(ends: pl.DataFrame, lines: pl.DataFrame, *, is_coarse: bool) -> pl.DataFrame:
    """Return the lines that may end at each node: near its time with as many tokens as its prompts, or nearest to it:
    node, at, votes.
    """
    window_s = (
        (-1.0 - thresholds.PRINTED_S, thresholds.PRINTED_S)
        if is_coarse
        else (-thresholds.NEAR_LINE_S, thresholds.NEAR_LINE_S)
    )
    keyed = lines.filter(pl.col("prefill_tokens") > 0).select(
        "at", "seconds", "prefill_tokens", second=pl.col("seconds").floor()
    )
    prompts = ends.filter(pl.col("prefill_tokens") > 0).with_columns(
        second=pl.concat_list(pl.col("node_s").floor() + back for back in (-2, -1, 0, 1))
    )
    ahead = pl.col("seconds") - pl.col("node_s")
    pairs = prompts.explode("second").join(keyed, on=["second", "prefill_tokens"])
    votes = [pairs.filter(ahead.is_between(*window_s)).select("node", "at", votes=pl.lit(_SURE_VOTES))]
    if not is_coarse:
        stamped = lines.select("at", "seconds").sort("seconds")
        nearest = ends.sort("node_s").join_asof(
            stamped, left_on="node_s", right_on="seconds", strategy="nearest", coalesce=False
        )
        votes.append(nearest.filter(ahead.abs() < thresholds.NEAR_LINE_S).select("node", "at", votes=pl.lit(1)))
    return pl.concat(votes)


def _timed(lines: pl.DataFrame, graph: Graph, ended: Floats) -> pl.DataFrame:
    """Return the lines between matched nodes with their ends, spaced by the step times in the lines, or evenly if they
    have none.

    Args:
        lines: at, seconds and cycle_us, null for lines without a step time.
        graph: The graph of the requests.
        ended: Number of the line that ends at each node, NaN if it has none.
    """
    matched = np.flatnonzero(np.isfinite(ended))
    numbers, at = ended[matched], lines["at"].to_numpy()
    passed_us = lines["cycle_us"].fill_null(strategy="mean").fill_null(1.0).cum_sum().to_numpy()
    seconds = np.interp(passed_us, np.interp(numbers, at, passed_us), graph.time_us[matched] / 1e6)
    # Where the engine idled between two nodes, the time of a line between them is unknown.
    idle = np.diff(np.r_[0, np.cumsum(~graph.busy)][matched]) > 0
    before = np.clip(np.searchsorted(numbers, at, side="right") - 1, 0, len(matched) - 2)
    is_timed = (at >= numbers[0]) & (at <= numbers[-1]) & (~idle[before] | np.isin(at, numbers))
    return lines.with_columns(seconds=pl.Series(seconds)).filter(pl.Series(is_timed))


def _line_numbers(graph: Graph, votes: pl.DataFrame) -> Floats:
    """Return the number of the line that ends at each node, shape (nodes,); NaN if no line does."""
    edges = graph.consistent_edges()
    root, relative = potentials(graph.size, edges.begin, edges.end, edges.steps)
    offsets = pl.Series(relative).round().cast(pl.Int64)
    nodes = pl.DataFrame({"root": root, "offset": offsets}).with_columns(least=-pl.col("offset").min().over("root"))
    voted = (
        pl.concat([votes, nodes[votes["node"]]], how="horizontal")
        .with_columns(first=pl.col("at") - pl.col("offset"))
        # A front end that stamps late may point a component to lines before the first one.
        .filter(pl.col("first") >= pl.col("least"))
        .group_by("root", "first")
        .agg(pl.col("votes").sum())
        .filter(pl.col("votes") == pl.col("votes").max().over("root"))
    )
    # If several lines have as many votes, the one nearest to the sure neighbours counts.
    number = _increasing(graph, root, relative, voted.filter(pl.len().over("root") == 1))
    sure = np.isfinite(number)
    if not sure.any():
        return number
    at = np.interp(graph.time_us, graph.time_us[sure], number[sure])
    expected = pl.DataFrame({"root": root, "expected": at - relative})
    nearest = (
        voted.join(expected.group_by("root").agg(pl.col("expected").median()), on="root")
        .with_columns(away=(pl.col("first") - pl.col("expected")).abs())
        .sort("root", "away", "first")
        .unique("root", keep="first", maintain_order=True)
    )
    return _increasing(graph, root, relative, nearest)


def _increasing(graph: Graph, root: Ints, relative: Floats, chosen: pl.DataFrame) -> Floats:
    """Return the numbers of the nodes in chosen clusters; if two contradict the order of time, the one with more votes
    stays.
    """
    first, votes = np.full(graph.size, np.nan), np.zeros(graph.size)
    first[chosen["root"].to_numpy()] = chosen["first"].to_numpy()
    votes[chosen["root"].to_numpy()] = chosen["votes"].to_numpy()
    while True:
        number = first[root] + relative
        numbered = np.flatnonzero(np.isfinite(number))
        back = np.flatnonzero(np.diff(number[numbered]) < 0)
        if not back.size:
            return number
        left, right = root[numbered[back]], root[numbered[back + 1]]
        first[np.where(votes[left] < votes[right], left, right)] = np.nan


def _starts(
    lines: pl.DataFrame,
    logged: pl.DataFrame,
    arrays: RequestArrays,
    graph: Graph,
    ended: Floats,
    ahead_s: float,
) -> pl.DataFrame:
    """Return the starts of steps on the clock of the spans: at the nodes, and at the other lines."""
    tokens = np.unique(np.r_[graph.first, graph.last])
    matched = tokens[np.isfinite(ended[tokens])]
    at_ns = arrays.to_ns(graph.time_us)
    nodes = pl.DataFrame({"at": ended[matched].astype(np.int64), "ts_start_ns": at_ns[matched]})
    nodes = nodes.unique("at", keep="last", maintain_order=True).sort("at")
    engine = lines.select(*ENGINE, "base", "cycle_source").unique("epoch").sort("base")
    nodes = nodes.join_asof(engine, left_on="at", right_on="base").select(
        *ENGINE,
        "ts_start_ns",
        step_id=pl.col("at") - pl.col("base") + 1,
        start_sd_us=pl.lit(thresholds.STAMP_SD_US),
        start_source="cycle_source",
        pause=pl.lit(value=False),
    )
    # Steps that have both a node and a line show how far lines are from the ends of their steps.
    moved = logged.with_columns(pl.col("ts_start_ns") - round(ahead_s * 1e9))
    both = moved.join(nodes, on=[*ENGINE, "step_id"], suffix="_node")
    late = pl.col("ts_start_ns") - pl.col("ts_start_ns_node")
    late_ns, sd_us = both.select(late.median().alias("ns"), sd_us=robust_sd_expr(late) / 1e3).row(0)
    is_fine = ~is_change()
    moved = moved.with_columns(
        ts_start_ns=pl.col("ts_start_ns") - pl.when(is_fine).then(round(late_ns or 0)).otherwise(0),
        start_sd_us=pl.when(is_fine).then(pl.max_horizontal("start_sd_us", pl.lit(sd_us))).otherwise("start_sd_us"),
    )
    outside = ~pl.col("ts_start_ns").is_between(at_ns[matched[0]], at_ns[matched[-1]])
    others = moved.filter(is_fine | outside).join(nodes, on=[*ENGINE, "step_id"], how="anti")
    starts = pl.concat([nodes, others.select(nodes.columns)]).sort(*ENGINE, "step_id")
    # Idle time begins at a node.
    idle = np.sort(at_ns[:-1][~graph.busy])
    begins = starts["ts_start_ns"].to_numpy()
    before = np.searchsorted(idle, begins)
    is_idle = np.r_[before[1:], before[-1:]] > before
    return starts.with_columns(pause=pl.col("pause") | pl.Series(is_idle))
