"""Match requests of load generators with those of a server by length and order of arrival.

The clock of a benchmark differs from the server's by an offset of its own, which most pairs of equal length agree on.
Where the clock steps, each part has its offset; where it drifts, the offset of a request is about that of its
neighbours.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from tracefit.tables.units import unit_fault

_SAME_NS = 100_000_000
"""Largest scatter of the arrivals of one request between client and server."""

_LATE_NS = 1_000_000_000
"""Scatter of the few that a busy client or a new connection delays; they are found where requests of one length are
rare."""

_NEAR_NS = 10_000_000
"""Their usual scatter: where many requests have one length, few others are that near by chance."""

_MOST_PAIRS = 300_000
"""Pairs of equal length that are compared at once to find an offset."""

_LEAST_COMPARED_ARRIVALS = 16
"""Fewest requests that are compared with many pairs."""

_LEAST_PART = 8
"""Fewest requests of a part of a benchmark that show an offset of their own."""

_FEW_PAIRS = 1_000
"""Two requests agree on an offset by chance only among more pairs than these."""

_LEAST_MATCHED_SHARE, _LEAST_OF_ALL = 0.5, 0.2
"""Least share of the requests that agree on an offset: of those that spans could match by it, and of all."""

_LEAST_TIMES_CHANCE = 3.0
"""An offset needs so many times the pairs that agree on any offset by chance."""

_MOST_BY_CHANCE, _NEIGHBOURING_ARRIVALS, _LEAST_LOCAL = 0.005, 33, 0.5
"""Where a larger share of the requests has a request of its length by chance, a pair counts only among neighbours with
pairs."""

_MOST_HALVINGS, _MOST_VOTES = 5, 64
_REACH = 32
"""A request is sought with the offset of a matched one at most so many requests away, nearer ones first."""

_MOST_ROUNDS = 100
_SMOOTHED = 9
"""Neighbours whose median is the offset at a request."""

OTHER_RUN = "no offset of the client's clock fits, as for a benchmark of another run or tokens counted in another way"
OUTSIDE = "sent before or after the time that the spans cover"
NOT_TRACED = (
    "no span has their length at their time, as for requests that are not traced or tokens counted in another way"
)

_PAIR_TYPES: dict[str, type[pl.DataType]] = {
    "position": pl.UInt32,
    "client": pl.UInt32,
    "row": pl.UInt32,
    "apart": pl.Int64,
}


class _Offset(NamedTuple):
    """How far the server's clock is ahead of the client's, and how much single requests scatter."""

    ahead_ns: int
    scatter_ns: int


def pairs_by_arrival(sent: pl.DataFrame, received: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the pairs of equal output lengths and about equal arrivals, and why the other requests of clients have no
    pair.

    Args:
        sent: Requests of clients: row, benchmark, arrival_ns, output_tokens; none is null.
        received: Requests of servers: row, arrival_ns, output_tokens.

    Returns:
        client and row, the row numbers of both sides; and client, reason of the others.
    """
    received = received.sort("arrival_ns", "row")
    free, pairs = received, [pl.DataFrame(schema=_PAIR_TYPES)]
    reasons = [pl.DataFrame(schema={"client": pl.UInt32, "reason": pl.String})]
    benchmarks = sent.sort("arrival_ns", "row").partition_by("benchmark", maintain_order=True)
    for benchmark in benchmarks:
        requests = benchmark.rename({"row": "client"}).with_row_index("position")
        rough = _grown(requests, free, _first_pairs(requests, free))
        # By the offsets of their neighbours, requests that are near each other are distinguished.
        expected = requests.join(_smoothed(rough), on="position", maintain_order="left")
        moved = expected.with_columns(arrival_ns=pl.col("arrival_ns") + pl.col("ahead"))
        matched = _grown(requests, free, _nearest(requests, moved, free, _SAME_NS))
        free = free.join(matched, on="row", how="anti", maintain_order="left")
        pairs.append(matched)
        reasons.append(_reasons(requests, matched, received))
    return pl.concat(pairs).select("client", "row"), pl.concat(reasons)


def _first_pairs(requests: pl.DataFrame, free: pl.DataFrame) -> pl.DataFrame:
    """Return the pairs (`_PAIR_TYPES`) that agree on an offset: of the whole benchmark, of its halves if it has none,
    and of the rest.
    """
    pairs = [pl.DataFrame(schema=_PAIR_TYPES)]
    waiting = [(requests, 0)]
    for _ in range(_MOST_VOTES):
        if not waiting:
            break
        some, halvings = waiting.pop()
        offset = _offset(some, free, 2 if some.height == requests.height else _LEAST_PART)
        if offset:
            expected = some.with_columns(arrival_ns=pl.col("arrival_ns") + offset.ahead_ns)
            agreeing = _nearest(requests, expected, free, offset.scatter_ns)
            if _by_chance(some, free, offset.scatter_ns) > _MOST_BY_CHANCE:
                agreeing = _in_company(some, free, agreeing)
            pairs.append(agreeing)
            free = free.join(agreeing, on="row", how="anti", maintain_order="left")
            rest = some.join(agreeing, on="position", how="anti", maintain_order="left")
            if agreeing.height and rest.height >= _LEAST_PART:
                waiting.append((rest, halvings))
        elif halvings < _MOST_HALVINGS and some.height >= 2 * _LEAST_PART:
            half = some.height // 2
            waiting += [(some[half:], halvings + 1), (some[:half], halvings + 1)]
    return pl.concat(pairs)


def _offset(sent: pl.DataFrame, received: pl.DataFrame, least: int) -> _Offset | None:
    """Return the offset that most pairs of equal length agree on; null if too few do."""
    joined = _pairs_of_equal_length(sent, received)
    apart, positions, rows = (joined[name].to_numpy() for name in ("apart", "position", "row"))
    if not apart.size:
        return None
    compared = int(joined["compared"][0])
    # Of two ranges in random order, the differences are densest in the middle: twice the mean.
    density = 2 * apart.size / max(int(apart[-1] - apart[0]), 1)
    least += least < _LEAST_PART and apart.size > _FEW_PAIRS
    for scatter in (_NEAR_NS, _SAME_NS):
        until = np.searchsorted(apart, apart + scatter, side="right")
        counts = until - np.arange(apart.size)
        best = int(np.argmax(counts))
        if apart.size > _FEW_PAIRS and counts[best] < _LEAST_TIMES_CHANCE * density * scatter:
            continue
        window = slice(best, until[best])
        ahead = int(np.median(apart[window]))
        agreeing = min(np.unique(positions[window]).size, np.unique(rows[window]).size)
        first, last = (int(sent["arrival_ns"][at]) + ahead for at in (0, -1))
        at_that_time = int(received["arrival_ns"].is_between(first - scatter, last + scatter).sum())
        needed = (
            _LEAST_MATCHED_SHARE * min(compared, at_that_time),
            _LEAST_OF_ALL * min(compared, received.height),
        )
        if agreeing >= max(least, *needed):
            return _Offset(ahead, scatter)
    return None


def _pairs_of_equal_length(sent: pl.DataFrame, received: pl.DataFrame) -> pl.DataFrame:
    """Return pairs of equal output lengths: position, row, apart (how far the server's time is ahead, in ns,
    increasing), compared.

    If there are very many, only the middle ones of the client's requests are `compared`, and if that does not do, the
    server's first ones.
    """
    received_of = received.group_by("output_tokens").len("received")

    def count(of: pl.DataFrame) -> int:
        return int(of.join(received_of, on="output_tokens")["received"].sum())

    if (pairs := count(sent)) > _MOST_PAIRS:
        some = max(sent.height * _MOST_PAIRS // pairs, min(_LEAST_COMPARED_ARRIVALS, sent.height))
        sent = sent.slice((sent.height - some) // 2, some)
        received = received.head(max(int(received.height * _MOST_PAIRS / max(count(sent), _MOST_PAIRS)), 1))
    joined = sent.join(received, on="output_tokens", suffix="_server")
    apart = pl.col("arrival_ns_server") - pl.col("arrival_ns")
    return joined.select("position", "row", apart=apart, compared=pl.lit(sent.height)).sort("apart", "position", "row")


def _nearest(requests: pl.DataFrame, expected: pl.DataFrame, free: pl.DataFrame, scatter_ns: int) -> pl.DataFrame:
    """Return the pairs (`_PAIR_TYPES`) of requests with the nearest of equal length, each once.

    Args:
        requests: The requests of the benchmark.
        expected: Some of them, with their arrivals on the server's clock.
        free: Requests of the server without a pair.
        scatter_ns: The most that the arrivals may differ by.
    """
    joined = (
        expected.select("position", "arrival_ns", "output_tokens")
        .sort("arrival_ns")
        .join_asof(
            free.select("row", "output_tokens", "arrival_ns", at_ns="arrival_ns"),
            on="arrival_ns",
            by="output_tokens",
            strategy="nearest",
            tolerance=scatter_ns,
            check_sortedness=False,
        )
    )
    error = (pl.col("at_ns") - pl.col("arrival_ns")).abs()
    once = joined.drop_nulls("row").sort(error, "position").unique("row", keep="first", maintain_order=True)
    stated = requests.select("position", "client", sent_ns="arrival_ns")
    return once.join(stated, on="position", how="left").select(
        "position", "client", "row", apart=pl.col("at_ns") - pl.col("sent_ns")
    )


def _by_chance(sent: pl.DataFrame, received: pl.DataFrame, scatter_ns: int) -> float:
    """Return the share of requests that have one of equal length within the scatter at any time."""
    others = sent.join(received.group_by("output_tokens").len("others"), on="output_tokens")["others"]
    return float((1 - (-2.0 * scatter_ns / _lasted_ns(received) * others).exp()).sum()) / sent.height


def _lasted_ns(requests: pl.DataFrame) -> int:
    return max(int(requests["arrival_ns"][-1]) - int(requests["arrival_ns"][0]), 1)


def _in_company(sent: pl.DataFrame, received: pl.DataFrame, pairs: pl.DataFrame) -> pl.DataFrame:
    """Return the pairs (`_PAIR_TYPES`) most of whose neighbours have pairs too, as far as the server traces them."""
    traced = received.height * _lasted_ns(sent) / (_lasted_ns(received) * sent.height)
    has_pair = pl.col("position").is_in(pairs["position"].implode()).cast(pl.Float64)
    local = has_pair.rolling_mean(_NEIGHBOURING_ARRIVALS, center=True, min_samples=1)
    dense = sent.filter(local >= _LEAST_LOCAL * min(1.0, traced))
    return pairs.join(dense, on="position", how="semi", maintain_order="left")


def _grown(requests: pl.DataFrame, free: pl.DataFrame, pairs: pl.DataFrame) -> pl.DataFrame:
    """Return pairs (`_PAIR_TYPES`) with those of further requests, found with the offsets of their neighbours."""
    steps = [(_REACH, _NEAR_NS), (_REACH, _SAME_NS)]
    steps += [
        (requests.height, scatter_ns)
        for scatter_ns in (_SAME_NS, _LATE_NS)
        if free.height and _by_chance(requests, free, scatter_ns) < _MOST_BY_CHANCE
    ]
    free = free.join(pairs, on="row", how="anti", maintain_order="left")
    for _ in range(_MOST_ROUNDS):
        if not steps or not pairs.height or pairs.height == requests.height or not free.height:
            break
        found = pairs.clear()
        for side in ("before", "after"):
            expected = _expected(requests, pairs, *steps[0][:1])
            rest = expected.drop_nulls(side).join(found, on="position", how="anti", maintain_order="left")
            moved = rest.with_columns(arrival_ns=pl.col("arrival_ns") + pl.col(side))
            new = _nearest(requests, moved, free, steps[0][1])
            free = free.join(new, on="row", how="anti", maintain_order="left")
            found = pl.concat([found, new])
        pairs = pl.concat([pairs, found])
        if not found.height:
            steps = steps[1:]
    return pairs


def _expected(requests: pl.DataFrame, pairs: pl.DataFrame, reach: int) -> pl.DataFrame:
    """Return the requests without a pair, with the offsets of the nearest pairs `before` and `after`, null beyond
    `reach`.
    """
    return (
        requests.join(_smoothed(pairs), on="position", how="left", maintain_order="left")
        .with_columns(before=pl.col("ahead").forward_fill(reach), after=pl.col("ahead").backward_fill(reach))
        .filter(pl.col("ahead").is_null())
    )


def _smoothed(pairs: pl.DataFrame) -> pl.DataFrame:
    """Return the offset at each pair, the median of those around it: position, ahead."""
    smoothed = pl.col("apart").rolling_median(_SMOOTHED, center=True, min_samples=1)
    return pairs.sort("position").select("position", ahead=smoothed.round().cast(pl.Int64))


def _reasons(requests: pl.DataFrame, pairs: pl.DataFrame, received: pl.DataFrame) -> pl.DataFrame:
    """Return client and reason of the requests of a benchmark without a pair."""
    if not pairs.height:
        fault = _unit_of(requests, received) or OTHER_RUN
        return requests.select("client", reason=pl.lit(fault))
    rest = _expected(requests, pairs, requests.height)
    at_ns = pl.col("arrival_ns") + pl.coalesce("before", "after")
    least, most = received["arrival_ns"].min(), received["arrival_ns"].max()
    is_covered = at_ns.is_between(pl.lit(least) - _SAME_NS, pl.lit(most) + _SAME_NS)
    return rest.select("client", reason=pl.when(is_covered).then(pl.lit(NOT_TRACED)).otherwise(pl.lit(OUTSIDE)))


def _unit_of(requests: pl.DataFrame, received: pl.DataFrame) -> str | None:
    """Return the fault of start times that fit the server's in another unit."""
    since = pl.col("arrival_ns") - pl.col("arrival_ns").min()
    for power in (1, 2, 3):
        scaled = requests.with_columns(arrival_ns=(since / 1000.0**power).round().cast(pl.Int64))
        if requests.height > 2 and _offset(scaled, received, 2):
            return unit_fault("the range of start times", "that of the spans", 1000.0**power, "s")
    return None
