"""Whether a recording has every request that was in the engine of an unmodified server: if some are missing, its
batches are unknown.

A server writes a span for every request unless it is set to sample, so a recording counts as complete until something
contradicts it: a sampler in the run's configuration or in the ids that it kept, stamps that one engine cannot have
made, times that contradict each other, waits that the known requests do not explain, and steps without a prompt that
take as long as steps with one. A model of step times that is fitted on half of each batch looks as sure as a right one
and is wrong by a factor.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from tracefit.tables.dialects import STOCK
from tracefit.tables.schema import REQUESTS, SERVER
from tracefit.timeline import thresholds
from tracefit.timeline.evidence_statistics import (
    close_stamps,
    late_arrivals,
    miscounted_share,
    sampler_rate,
    skew,
    step_noise,
)
from tracefit.timeline.request_counts import CountedRequests, Counts
from tracefit.timeline.request_graph import (
    DEFAULT_TOKEN_BUDGET,
    is_counted,
    is_usable,
)

_MAX_EXAMINED = 20_000
"""Most requests of a server that are examined; more would show nothing new."""

_TRACE_ALL = "trace every request: OTEL_TRACES_SAMPLER=always_on, and no sampling after it"
_SHARED = "; or, if these servers are API processes of one engine, start it with --api-server-count 1"

_RECORD_ONE = (
    "record a single engine: a server of one data-parallel rank with --api-server-count 1, under a "
    "separate OTEL_SERVICE_NAME"
)


def unknown_batches(
    requests: pl.DataFrame,
    budget: int | None,
    *,
    has_steps: bool = False,
    traced_share: float | None = None,
) -> pl.DataFrame:
    """Return the servers whose requests have only times and do not show the batches, with the reason.

    Args:
        requests: The `requests` table.
        budget: Token budget of a step, null if unknown.
        has_steps: Whether steps are recorded too, so that a client's tokens show its batches.
        traced_share: Share of the requests that have a span, as the run's configuration says; null if it says nothing.

    Returns:
        One row per such server: run_id, server, reason.
    """
    return examine(requests, budget, has_steps=has_steps, traced_share=traced_share)[0]


def examine(
    requests: pl.DataFrame,
    budget: int | None,
    *,
    has_steps: bool = False,
    traced_share: float | None = None,
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
        reason = _sampled(traced_share) or _missing_facts(requests, by_arrival)
        if reason is None:
            usable = _middle(by_arrival.filter("is_usable")["row"])
            examined[key] = CountedRequests(requests, usable, budget or DEFAULT_TOKEN_BUDGET)
            reason = _contradiction(examined[key], rows.height)
        if reason is not None:
            shared = _SHARED if _TRACE_ALL in reason and len(servers) > 1 else ""
            reasons.append((*key, reason + shared))
    types = {name: REQUESTS.types[name] for name in SERVER}
    return pl.DataFrame(reasons, schema={**types, "reason": pl.String()}, orient="row"), examined


def _sampled(traced_share: float | None) -> str | None:
    if traced_share is None or traced_share >= 1:
        return None
    return f"the run's configuration says that {100 * traced_share:.3g} % of the requests have a span; {_TRACE_ALL}"


def _missing_facts(requests: pl.DataFrame, by_arrival: pl.DataFrame) -> str | None:
    """Return why the requests of one server, rows `row` of `requests`, show no batches whatever their times are."""
    if by_arrival.height < thresholds.LEAST_SAMPLES:
        return f"{by_arrival.height} requests are too few to show whether they are all; record more"
    if (rate := sampler_rate(requests["trace_id"].gather(_middle(by_arrival["row"])))) is not None:
        return (
            f"a sampler kept about {100 * rate:.0f} % of the traces, as their ids show, and the batches contained the "
            "other requests too; trace every request: OTEL_TRACES_SAMPLER=always_on"
        )
    if by_arrival["arrival_ns"].null_count() > thresholds.MOST_LACKING * by_arrival.height:
        return "a load generator that does not say when it sent the requests does not show the batches"
    if (lacking := 1 - by_arrival["is_usable"].sum() / by_arrival.height) > thresholds.MOST_LACKING:
        return f"{100 * lacking:.0f} % of the requests lack times or lengths, and were in the batches too"
    return None


def _contradiction(server: CountedRequests, requests: int) -> str | None:
    """Return why the times of a server's requests show that its batches are unknown, and what to do; `requests` is
    their number.
    """
    arrays, graph = server.arrays, server.graph
    if (close := close_stamps(arrays, graph)) > thresholds.MOST_CLOSE:
        return (
            "token times are closer together than two steps of one engine can be, as often as those of several "
            f"engines or front ends would be ({100 * min(close, 1.0):.0f} % of that); {_RECORD_ONE}"
        )
    if graph.time_conflicts > thresholds.MOST_LACKING:
        return (
            f"the times of {100 * graph.time_conflicts:.0f} % of the requests contradict each other: they are of "
            "several engines"
        )
    if arrays.is_client and (short := miscounted_share(arrays)) > thresholds.MOST_MISCOUNTED:
        return (
            f"{100 * short:.1f} % of the requests lasted as long as the others with less than half of their tokens: a "
            "client that counts tokens in the text does not know those of the engine; take them from its usage field"
        )
    edges, counts = server.edges, server.counts
    # Where requests are preempted the cache is full: of the recorded requests only, or they would fill it unevenly.
    is_full = counts.unevenness is not None and counts.unevenness < thresholds.MOST_UNEVENNESS
    contradicting = edges.contradicting
    if not is_full:
        contradicting = max(contradicting, len(edges.preempted) / requests)
    if contradicting > thresholds.MOST_CONTRADICTING:
        return (
            f"{100 * contradicting:.0f} % of the requests took more or fewer steps than tokens: preempted, by "
            "speculative decoding, or on another engine"
        )
    return None if is_full else _hidden_requests(server)


def _middle(rows: pl.Series) -> pl.Series:
    return rows.slice(max(0, (rows.len() - _MAX_EXAMINED) // 2), _MAX_EXAMINED)


def _hidden_requests(server: CountedRequests) -> str | None:
    """Return what shows that requests without a span were in the engine; null where nothing does."""
    late = None if server.arrays.is_client else late_arrivals(server.arrays)
    if late is not None and not late.is_jitter and late.chance <= thresholds.LATE_CHANCE:
        return (
            f"{late.late} of {late.arrivals} requests that came while no other was in the engine waited for a step "
            f"all the same: requests without a span were in the batches; {_TRACE_ALL}"
        )
    if reason := _unexplained_times(server.counts):
        return f"{reason}; {_TRACE_ALL}"
    full = server.counts.fullness
    # A full engine has its most requests, or its most tokens.
    if full is not None and full.share < thresholds.LEAST_FULL and full.unevenness > thresholds.MOST_UNEVENNESS:
        return (
            "requests waited although the recorded ones left room in the engine: requests without a span filled "
            f"it; {_TRACE_ALL}"
        )
    return None


def _unexplained_times(counts: Counts) -> str | None:
    """Return how the times of plain intervals contradict their batches; null where they do not."""
    plain = counts.plain
    if len(plain.steps) < thresholds.LEAST_PLAIN_INTERVALS:
        return None
    off = plain.time_us / plain.model_us - 1
    noise = step_noise(off, plain.steps)
    if noise is not None and noise > thresholds.MOST_NOISE:
        return (
            f"steps of equal batches differ by {100 * noise:.0f} %, as several tokens a step, preemptions, other work "
            "on the machine, or requests without a span make them"
        )
    skewed = skew(off, plain.steps)
    prompt = float(np.median(counts.prompt_us) / np.median(plain.model_us / plain.steps))
    is_short = skewed.longer < thresholds.LEAST_PROMPT_SHARE * prompt
    if skewed.noise > thresholds.NOISY or skewed.ratio < thresholds.MOST_SKEW or is_short:
        return None
    return (
        f"steps without a prompt are longer than their batches explain {skewed.ratio:.1f} times as far as shorter: "
        "prompts without a span were computed in them"
    )
