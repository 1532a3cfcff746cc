"""The requests of an unmodified server on the steps that its log names: the log has the batches, the spans have the times.

A token's stamp is the end of a step, and so is a line of the log. The two clocks differ by whole quarters of an hour (a local
time, a year that the log does not write) and by the time until the line is printed. Which quarters follows from the prompts: a
step that computes as many tokens as the prompts of the requests that get their first token then. With fine stamps the line
of a step is then the nearest one; with whole seconds it is the one of that second with as many tokens. Requests that ran
together are a number of steps apart that is known exactly (`request_graph`), so that each such line votes for all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import polars.selectors as cs

from tracefit.tables.schema import ENGINE
from tracefit.timeline.logged_steps import CHANGE, FINE, LoggedSteps, is_logged
from tracefit.timeline.request_graph import BUDGET, Spans, graph_of, potentials, usable, USED
from tracefit.timeline.request_steps import STAMP_SD_US, RequestSteps, on_steps

if TYPE_CHECKING:
    from tracefit.timeline.composition import EngineLimits
    from tracefit.timeline.engines import Floats
    from tracefit.timeline.request_graph import Graph

_ZONE_S = 900
"""Time zones are apart by whole quarters of an hour."""

_PRINTED_S = 0.5
"""A line is printed at most so long after its step."""

_PAIRS, _NODES = 1_000_000, 300
"""Prompts that the distance of the clocks is found from."""

_FOUND = 0.3
"""Least share of these prompts that a line computes whole, and alone. Prefix-cache hits and chunks make it smaller."""

_NEAR = 0.4
"""Share of a step that its line and its stamp are apart at most."""

_AGREE = 0.8
"""Least share of the lines that vote for the same step of requests that ran together."""


def place_on_log(requests: pl.DataFrame, clock: LoggedSteps, limits: EngineLimits) -> RequestSteps | None:
    """Place the requests of an unmodified server on the steps of its log; null where the two do not match.

    Args:
        requests: The `requests` table of one run.
        clock: Its logged steps.
        limits: Limits of the scheduler.

    Returns:
        The requests with the steps of their events, and the starts of the steps on the clock of the spans.
    """
    numbered = requests.with_row_index("row")
    rows = usable(numbered.select("row", *ENGINE, *USED)).sort("arrival_ns", "row")
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
    ended = _numbers(g, _votes_of_prompts(ends, lines) if is_coarse else _votes_of_stamps(ends, lines))
    known = np.isfinite(ended)
    placed_rows = known[g.first] & known[g.last]
    if not placed_rows.any():
        return None
    whole = np.interp(g.at_us, g.at_us[known], ended[known]).round().astype(np.int64)
    epochs, bases = base["epoch"].to_numpy(), base["base"].to_numpy()
    life = np.searchsorted(bases, whole[g.last], side="right") - 1
    placed = on_steps(rows, spans, g, whole, 0).with_columns(
        cs.ends_with("_step") - pl.Series(bases[life]), epoch=pl.Series(epochs[life])
    )
    starts = _starts(lines, clock.starts, spans, g, ended, base, apart_s)
    return RequestSteps(
        numbered.update(placed.filter(pl.Series(placed_rows)), on="row", how="left").drop("row"), starts
    )


def _apart_s(prompts: pl.DataFrame, lines: pl.DataFrame, *, is_coarse: bool) -> float | None:
    """Return how far the log's clock is ahead of that of the spans, of coarse stamps in whole quarters of an hour; null if unknown.

    Args:
        prompts: node_s and prefill_tokens of the steps that first tokens come from.
        lines: seconds and prefill_tokens of the steps of the log.
        is_coarse: Whether stamps are rounded down to whole seconds.
    """
    # Of the rarest lengths, so that few lines have them by chance.
    same = lines.filter(pl.col("prefill_tokens") > 0).select("seconds", "prefill_tokens")
    counts = same.group_by("prefill_tokens").len()
    tried = prompts.join(counts, on="prefill_tokens").sort("len", "node_s")
    tried = tried.filter(pl.col("len").cum_sum() <= max(_PAIRS, int(tried["len"].min() or 0))).head(_NODES)
    ahead = pl.col("seconds") - pl.col("node_s")
    pairs = (
        tried.join(same, on="prefill_tokens")
        .with_columns(quarters=(ahead / _ZONE_S).round())
        .with_columns(rest=ahead - pl.col("quarters") * _ZONE_S)
        .filter(pl.col("rest").is_between(-1.0 - _PRINTED_S, _PRINTED_S))
    )
    found = pairs.group_by("quarters").agg(pl.col("node_s").n_unique(), pl.col("rest").median())
    best = found.sort("node_s", pl.col("quarters").abs(), descending=[True, False]).head(1)
    if not best.height or best["node_s"][0] < _FOUND * tried.height:
        return None
    quarters, _, rest = best.row(0)
    return float(quarters * _ZONE_S + (0.0 if is_coarse else rest))


def _votes_of_stamps(ends: pl.DataFrame, lines: pl.DataFrame) -> pl.DataFrame:
    """Return the line that ends where each node is, of fine stamps: node, at."""
    stamped = lines.select("at", "seconds").sort("seconds")
    near_s = _NEAR * float(stamped["seconds"].diff().median() or 0.0)
    found = ends.sort("node_s").join_asof(
        stamped, left_on="node_s", right_on="seconds", strategy="nearest", coalesce=False
    )
    return found.filter((pl.col("seconds") - pl.col("node_s")).abs() < near_s).select("node", "at")


def _votes_of_prompts(ends: pl.DataFrame, lines: pl.DataFrame) -> pl.DataFrame:
    """Return the lines of the second of each node that compute as many tokens as its prompts have: node, at."""
    keyed = lines.filter(pl.col("prefill_tokens") > 0).select(
        "at", "seconds", "prefill_tokens", second=pl.col("seconds").floor()
    )
    places = ends.filter(pl.col("prefill_tokens") > 0).with_columns(
        second=pl.concat_list(pl.col("node_s").floor() + back for back in (-2, -1, 0, 1))
    )
    pairs = places.explode("second").join(keyed, on=["second", "prefill_tokens"])
    ahead = pl.col("seconds") - pl.col("node_s")
    return pairs.filter(ahead.is_between(-1.0 - _PRINTED_S, _PRINTED_S)).select("node", "at")


def _numbers(g: Graph, votes: pl.DataFrame) -> Floats:
    """Return the number of the line that ends at each node, shape (nodes,); NaN where none is known."""
    _, begin, end, steps, _ = g.consistent()
    root, relative = potentials(g.size, begin, end, steps)
    votes = votes.with_columns(
        root=pl.Series(root)[votes["node"]],
        first=votes["at"] - pl.Series(relative)[votes["node"]].round().cast(pl.Int64),
    )
    voters = votes.group_by("root").agg(voters=pl.col("node").n_unique())
    chosen = (
        votes.group_by("root", "first")
        .agg(votes=pl.col("node").n_unique())
        .sort("root", "votes", "first", descending=[False, True, False])
        .unique("root", keep="first", maintain_order=True)
        .join(voters, on="root")
        .filter(pl.col("votes") >= _AGREE * pl.col("voters"))
    )
    number = np.full(g.size, np.nan)
    number[chosen["root"].to_numpy()] = chosen["first"].to_numpy()
    number = number[root] + relative
    # Numbers grow with time: what contradicts its neighbours is not known.
    filled = np.where(np.isnan(number), -np.inf, number)
    behind = np.maximum.accumulate(filled)
    ahead = np.minimum.accumulate(np.where(np.isnan(number), np.inf, number)[::-1])[::-1]
    return np.where((number >= behind) & (number <= ahead), number, np.nan)


def _starts(
    lines: pl.DataFrame,
    logged: pl.DataFrame,
    spans: Spans,
    g: Graph,
    ended: Floats,
    base: pl.DataFrame,
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
    moved = logged.with_columns(pl.col("ts_start_ns") - round(apart_s * 1e9))
    outside = ~pl.col("ts_start_ns").is_between(at_ns[known[0]], at_ns[known[-1]])
    others = moved.filter((pl.col("start_source") == FINE) | outside).join(
        nodes, on=[*ENGINE, "step_id"], how="anti"
    )
    starts = pl.concat([nodes, others.select(nodes.columns)]).sort(*ENGINE, "step_id")
    # Idle times begin at nodes.
    idle = np.sort(at_ns[:-1][~g.busy])
    begins = starts["ts_start_ns"].to_numpy()
    until = np.r_[begins[1:], begins[-1:]]
    holds = np.searchsorted(idle, until) > np.searchsorted(idle, begins)
    return starts.with_columns(pause=pl.col("pause") | pl.Series(holds))
