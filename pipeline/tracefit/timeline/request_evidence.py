"""Whether a recording has every request that was in the engine of an unmodified server: if some are missing, its batches are unknown.

A model of step times that is fitted on half of each batch looks as sure as a right one and is wrong by a factor. A recording
shows that requests are missing by ids that a sampler kept, by stamps that one engine cannot have made, by times that
contradict each other, and by requests that waited in an engine that should have been empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.statistics import robust_sd
from tracefit.tables.dialects import STOCK
from tracefit.tables.schema import REQUESTS, SERVER
from tracefit.timeline.request_counts import CountedRequests
from tracefit.timeline.request_graph import (
    DEFAULT_TOKEN_BUDGET,
    MAX_CONTRADICTING,
    SAME_STEP_NS,
    Graph,
    RequestArrays,
    is_counted,
    is_usable,
    robust_fit,
)

if TYPE_CHECKING:
    from tracefit.statistics import Vector

_MIN_SAMPLES = 20
"""Fewest requests, or steps, from which a share is computed."""

_MAX_EXAMINED = 20_000
"""Most requests of a server that are examined; more would show nothing new."""

_SURPRISE = 14.0
"""A pattern that chance produces once in e^14 recordings, about a million, does not count as chance."""

_MIN_SAMPLER_RATE = 1e-4
"""No sampler keeps a smaller share: ids that are all smaller come from a counter."""

_MAX_LACKING = 0.02
"""Largest share of requests without times or lengths, and of requests that contradict the others."""

_CLOSE, _MAX_CLOSE, _MIN_CLOSE_STAMPS = 0.2, 0.3, 3
"""Two stamps nearer than this share of a short step are not the ends of two steps of one engine; the largest number of such close
stamps, as a share of the number that independent engines would have; and the number up to which they are not evidence."""

_SCATTER_SD, _USUAL_SCATTER, _SURE_SHARE_SD = 3.0, 0.005, 4.0
"""A time is odd from this number of standard deviations on; the share of odd times without a reason; and the standard deviations by
which a larger share is sure."""

_MAX_SCATTER_P90 = 0.22
"""Times of steps are this far off a model of the batches, 90th percentile, where requests without a span are in them: 0.24 or
more with half of the requests of twelve generated runs. Complete, these have 0.05 to 0.12, and an overloaded CPU 0.19."""

_MAX_SCATTER_P80 = 0.07
"""The limit for the 80th percentile, which a few miscounted intervals move less: 0.04 to 0.06 in 27 of 30 generated bursts whose 90th
goes up to 0.23, and 0.29 or more with half of the requests."""

_SAME_TIME, _MAX_MISCOUNTED = 0.1, 0.005
"""A request that takes about the usual time, within this share, has about the usual tokens: at most this share has less than half."""

_MAX_UNEVENNESS = 0.2
"""The recorded requests fill a full cache this unevenly: 0.08 to 0.18 in generated runs, 0.13 in a real one; 0.24 to 0.7 where
three to five of ten are missing."""

_TRACE_ALL = "trace every request: OTEL_TRACES_SAMPLER=always_on, and no sampling after it"
_SHARED = "; or, if these servers are API processes of one engine, start it with --api-server-count 1"

_RECORD_ONE = "record a single engine: a server of one data-parallel rank with --api-server-count 1, under a separate OTEL_SERVICE_NAME"

_MIN_IDLE_ARRIVALS = 0.05
"""Least share of requests that arrive at an empty engine, for them to represent the whole recording."""

_LATE, _MAX_LATE = 0.4, 0.25
"""A wait of this share of a short step is a wait for a step in progress; the largest share of requests with one."""

_JITTER_US, _JITTER_STEPS, _JITTER_TAIL = 1_500.0, 1.5, 0.2
"""A front end on a machine with other work is late by about this time, and at random: with steps of 1.8 ms, 0.19 to 0.9 of the late requests of
five real recordings with every span were late by more than one and a half steps. A wait for a step in progress ends with the step: in
nine generated runs with sampled spans at most 0.19 of the late requests waited longer."""

_MAX_SLOWDOWN = 3.0
"""If the mean time per token is this many times the quickest one, the engine's delays delay arrivals too."""


def unknown_batches(requests: pl.DataFrame, budget: int | None, *, has_steps: bool = False) -> pl.DataFrame:
    """Return the servers whose requests have only times and do not show the batches, with the reason.

    Args:
        requests: The `requests` table.
        budget: Token budget of a step, null if unknown.
        has_steps: Whether steps are recorded too, so that a client's tokens show its batches.

    Returns:
        One row per such server: run_id, server, reason.
    """
    return examine(requests, budget, has_steps=has_steps)[0]


def examine(
    requests: pl.DataFrame, budget: int | None, *, has_steps: bool = False
) -> tuple[pl.DataFrame, dict[tuple[object, ...], CountedRequests]]:
    """Return `unknown_batches`, and by server the arrays of its requests, which the count of their steps uses next."""
    # Requests that have steps were checked when they got them.
    is_checked = (pl.col("dialect") == STOCK) if has_steps else is_counted()
    without_steps = is_checked & pl.col("first_token_step").is_null()
    # Rows by number: with a million requests, every copy with all columns takes 200 MB.
    numbered = requests.select(*SERVER, "arrival_ns", is_usable=is_usable()).with_row_index("row")
    timed = numbered.filter(requests.select(without_steps).to_series())
    servers = timed.partition_by(SERVER, as_dict=True, maintain_order=True)
    reasons = []
    examined: dict[tuple[object, ...], CountedRequests] = {}
    for key, rows in servers.items():
        by_arrival = rows.select("row", "arrival_ns", "is_usable").sort("arrival_ns", "row")
        reason = _missing_facts(requests, by_arrival)
        if reason is None:
            usable = _middle(by_arrival.filter("is_usable")["row"])
            examined[key] = CountedRequests(requests, usable, budget or DEFAULT_TOKEN_BUDGET)
            reason = _contradiction(examined[key], rows.height)
        if reason is not None:
            shared = _SHARED if _TRACE_ALL in reason and len(servers) > 1 else ""
            reasons.append((*key, reason + shared))
    types = {name: REQUESTS.types[name] for name in SERVER}
    return pl.DataFrame(reasons, schema={**types, "reason": pl.String()}, orient="row"), examined


def _missing_facts(requests: pl.DataFrame, by_arrival: pl.DataFrame) -> str | None:
    """Return why the requests of one server, rows `row` of `requests`, show no batches whatever their times are."""
    if by_arrival.height < _MIN_SAMPLES:
        return f"{by_arrival.height} requests are too few to show whether they are all; record more"
    if (rate := sampled_rate(requests["trace_id"].gather(_middle(by_arrival["row"])))) is not None:
        return (
            f"a sampler kept about {100 * rate:.0f} % of the traces, as their ids show, and the batches contained the other "
            "requests too; trace every request: OTEL_TRACES_SAMPLER=always_on"
        )
    if (lacking := 1 - by_arrival["is_usable"].sum() / by_arrival.height) > _MAX_LACKING:
        return f"{100 * lacking:.0f} % of the requests lack times or lengths, and were in the batches too"
    return None


def _contradiction(server: CountedRequests, requests: int) -> str | None:
    """Return why the times of a server's requests show that its batches are unknown, and what to do; `requests` is their number."""
    arrays, graph = server.arrays, server.graph
    short_us = arrays.short_step_us()
    if (close := _close_share(arrays, graph, short_us)) > _MAX_CLOSE:
        return (
            "token times are closer together than two steps of one engine can be, as often as those of several engines or "
            f"front ends would be ({100 * min(close, 1.0):.0f} % of that); {_RECORD_ONE}"
        )
    if graph.time_conflicts > _MAX_LACKING:
        return f"the times of {100 * graph.time_conflicts:.0f} % of the requests contradict each other: they are of several engines"
    if arrays.is_client and (short := _miscounted(arrays)) > _MAX_MISCOUNTED:
        return (
            f"{100 * short:.1f} % of the requests lasted as long as the others with less than half of their tokens: a client that counts "
            "tokens in the text does not know those of the engine; take them from its usage field"
        )
    edges, counts = server.edges, server.counts
    # Where requests are preempted the cache is full: of the recorded requests only, or they would fill it unevenly.
    is_full = counts.unevenness is not None and counts.unevenness < _MAX_UNEVENNESS
    contradicting = edges.contradicting
    if not is_full:
        contradicting = max(contradicting, len(edges.preempted) / requests)
    if contradicting > MAX_CONTRADICTING:
        return (
            f"{100 * contradicting:.0f} % of the requests took more or fewer steps than tokens: preempted, by speculative decoding, "
            "or on another engine"
        )
    return None if is_full else _hidden_requests(arrays, short_us, counts.scatter)


def _middle(rows: pl.Series) -> pl.Series:
    return rows.slice(max(0, (rows.len() - _MAX_EXAMINED) // 2), _MAX_EXAMINED)


def _miscounted(arrays: RequestArrays) -> float:
    """Return the share of requests that have less than half of the usual tokens and take the usual time of all of them."""
    usual_us, usual = np.median(arrays.decode_us), np.median(arrays.decode_steps)
    is_usual_time = np.abs(arrays.decode_us / max(float(usual_us), 1.0) - 1) < _SAME_TIME
    return float((is_usual_time & (arrays.decode_steps < usual / 2)).mean())


def _close_share(arrays: RequestArrays, graph: Graph, short_us: float) -> float:
    """Return how many stamps are too close for two steps of one engine, as a share of those that independent engines would give.

    A delayed front end stamps the outputs of two steps right after each other: their engine times are a step apart.
    """
    stamps = np.concatenate([arrays.first_token_ns, arrays.last_token_ns])
    order = np.argsort(stamps, kind="stable")
    gaps_us = np.diff(stamps[order]) / 1e3
    engine_gaps_us = np.diff(graph.time_us[np.concatenate([graph.first, graph.last])[order]])
    apart = gaps_us > SAME_STEP_NS / 1e3
    close = int((apart & (np.maximum(gaps_us, engine_gaps_us) < _CLOSE * short_us)).sum())
    decoding = graph.interval_sums(graph.first, graph.last, np.ones(len(graph.first))) > 0
    busy_us = float(np.diff(graph.time_us)[decoding].sum())
    # Independent stamps come as a Poisson process: the chance that the next one is close.
    expected = apart.sum() * -np.expm1(-_CLOSE * short_us * apart.sum() / max(busy_us, 1.0))
    return float(close / expected) if close > _MIN_CLOSE_STAMPS else 0.0


def sampled_rate(trace_ids: pl.Series) -> float | None:
    """Return the share of traces that a sampler kept by their ids; null where it kept all, or leaves no mark in them.

    OpenTelemetry's samplers compare the end of a random id with a bound: the low 64 bits, as a number or without its sign,
    are below it (TraceIdRatioBased), or the low 56 bits above it (consistent probability sampling, W3C trace context level 2).
    The largest of n even numbers is below 1 by about 1 / n.
    """
    ids = trace_ids.drop_nulls().unique()
    ids = ids.filter(ids.str.contains("^[0-9a-f]{32}$"))
    if ids.len() < _MIN_SAMPLES:
        return None

    def number(start: int) -> Vector:
        return ids.str.slice(start, 8).str.to_integer(base=16).to_numpy() / 2.0**32

    high, low, middle = number(16), number(24), number(18)
    value = high + low / 2.0**32
    for share in (value, 2 * np.minimum(value, 1 - value), 1 - middle):
        most = float(share.max())
        # Ids that are not random do not spread evenly up to their largest either: even numbers have a standard deviation of
        # 1 / sqrt(12), 0.289, and their mean is within four standard errors of a half.
        even = abs(float(share.mean()) / max(most, 1e-300) - 0.5) < 4 * 0.289 / np.sqrt(len(share))
        if even and most > _MIN_SAMPLER_RATE and -np.log(most) * len(share) > _SURPRISE:
            return most
    return None


def _hidden_requests(
    arrays: RequestArrays, short_us: float, scatter: tuple[float, float] | None
) -> str | None:
    """Return why requests without a span were in the engine, or may have been; null where the recording shows that none was.

    A request that arrives while the engine is empty is scheduled at once. If it waits for a step in progress, as most requests
    do while others run, others ran. Where few arrive at an empty engine, the recorded batches must explain the times of the steps.
    """
    arrival_us, ends_us = arrays.arrival_us, (arrays.last_token_ns - arrays.zero_ns) / 1e3
    before_us = np.r_[-np.inf, np.maximum.accumulate(ends_us)[:-1]]
    to_idle = np.flatnonzero(arrival_us > before_us)
    lack = "few came to an empty engine"
    slowdown = float(arrays.decode_us.sum() / max(arrays.decode_steps.sum(), 1.0)) / short_us
    if slowdown > _MAX_SLOWDOWN:
        lack = f"a token took {slowdown:.1f} times as long on average as at its quickest, as on a machine with other work"
    elif to_idle.size >= _MIN_SAMPLES and not arrays.is_client:
        waited_us = ((arrays.first_token_ns - arrays.zero_ns) / 1e3 - arrival_us - arrays.prefill_us)[to_idle]
        steps = (waited_us - np.quantile(waited_us, 0.1)) / short_us
        late = steps > _LATE
        is_jitter = (
            _LATE * short_us < _JITTER_US and (steps > _JITTER_STEPS).sum() > _JITTER_TAIL * late.sum()
        )
        if late.mean() > _MAX_LATE and not is_jitter:
            return (
                f"{late.sum()} of {to_idle.size} requests that came while no other was in the engine waited for a step all the same: "
                f"requests without a span were in the batches; {_TRACE_ALL}"
            )
        if to_idle.size >= _MIN_IDLE_ARRIVALS * len(arrival_us):
            return None
    if scatter is not None and (scatter[0] <= _MAX_SCATTER_P80 or scatter[1] <= _MAX_SCATTER_P90):
        return None
    off = "too few steps to tell" if scatter is None else f"90th percentile {100 * scatter[1]:.0f} %"
    return (
        f"nothing shows that every request has a span: {lack}, and the times of steps are far off what the "
        f"recorded batches explain ({off}), as requests without a span, preemptions and several tokens a step make them; "
        f"{_TRACE_ALL}, and record some minutes of light load too"
    )


def longest_whole_prompt(rows: pl.DataFrame) -> float | None:
    """Return the length up to which prompts are computed as a whole; null where nothing shows prefix-cache hits.

    A hit saves whole blocks, so that the times of prompts of about equal length differ by more than those of steps without a
    prompt. Without hits, times change smoothly from one length to the next, and scatter no more than those of other steps.

    Args:
        rows: One row per interval: interval_steps; y (us), prompts, prompt_tokens, decodes and contexts, means per step.

    Returns:
        Tokens, a power of two; 0 where prompts of every length scatter.
    """
    steps = rows["interval_steps"].cast(pl.Float64).to_numpy()
    prompts, tokens, *batch = (
        rows[name].to_numpy() * steps for name in ("prompts", "prompt_tokens", "decodes", "contexts")
    )
    # Servers with CUDA graphs pad a batch to the next captured size.
    padded = 2 ** np.ceil(np.log2(np.maximum(rows["decodes"].to_numpy(), 1.0))) * steps
    x, time_us = np.c_[steps, *batch, padded], rows["y"].to_numpy() * steps
    number = prompts.round()
    without = number == 0
    one = np.flatnonzero(number == 1)
    if min(one.size, without.sum()) < _MIN_SAMPLES:
        return None
    one = one[np.argsort(tokens[one], kind="stable")]
    decode_us = x @ robust_fit(x[without], time_us[without])
    excess_us, step_us = time_us - decode_us, decode_us / steps
    noise = (excess_us / step_us / np.sqrt(steps))[without]
    sd = robust_sd(noise)
    # The steps of an interval add up; the one with the prompt takes longer and scatters by as large a share.
    with_prompt_us = np.maximum(excess_us + step_us, step_us)
    variance = (sd * step_us[one]) ** 2 * (steps[one] - 1) + (sd * with_prompt_us[one]) ** 2
    length, excess_us = tokens[one], excess_us[one]
    # Against the line between the next shorter and the next longer prompt.
    weight = np.diff(length)[:-1] / np.maximum(length[2:] - length[:-2], 1)
    off_us = excess_us[1:-1] - (1 - weight) * excess_us[:-2] - weight * excess_us[2:]
    variance = variance[1:-1] + (1 - weight) ** 2 * variance[:-2] + weight**2 * variance[2:]
    odd = np.abs(off_us) > _SCATTER_SD * np.sqrt(variance)
    # Disturbances of steps without a prompt also disturb steps with one.
    usual = _USUAL_SCATTER + float((np.abs(noise - np.median(noise)) > _SCATTER_SD * sd).mean())
    if odd.mean() <= usual + _SURE_SHARE_SD * np.sqrt(usual / odd.size):
        return None
    for most in 2.0 ** np.arange(int(np.log2(length[-1])), 3, -1):
        short = odd[length[1:-1] <= most]
        if short.size >= _MIN_SAMPLES and short.sum() <= 1 + usual * short.size:
            return float(most)
    return 0.0
