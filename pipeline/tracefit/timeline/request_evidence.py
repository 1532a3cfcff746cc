"""Whether a recording has every request that was in the engine of an unmodified server: if some are missing, its batches are unknown.

A server writes a span for every request unless it is set to sample, so a recording counts as complete until something contradicts
it: a sampler in the run's configuration or in the ids that it kept, stamps that one engine cannot have made, times that contradict
each other, waits that the known requests do not explain, and steps without a prompt that take as long as steps with one. A model
of step times that is fitted on half of each batch looks as sure as a right one and is wrong by a factor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.statistics import SD_OF_MEDIAN, robust_sd
from tracefit.tables.dialects import STOCK
from tracefit.tables.schema import REQUESTS, SERVER
from tracefit.timeline.request_counts import CountedRequests, Counts
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

_LENGTH_GROUPS, _SURE_FALL_SD = 12, 5.0
"""Groups of prompts by length, and the standard errors by which the median time of longer ones is surely below that of shorter ones."""

_SAME_TIME, _MAX_MISCOUNTED = 0.1, 0.005
"""A request that takes about the usual time, within this share, has about the usual tokens: at most this share has less than half."""

_MAX_UNEVENNESS = 0.2
"""The recorded requests fill a full cache this unevenly: 0.08 to 0.18 in generated runs, 0.13 in a real one; 0.24 to 0.7 where
three to five of ten are missing."""

_TRACE_ALL = "trace every request: OTEL_TRACES_SAMPLER=always_on, and no sampling after it"
_SHARED = "; or, if these servers are API processes of one engine, start it with --api-server-count 1"

_RECORD_ONE = "record a single engine: a server of one data-parallel rank with --api-server-count 1, under a separate OTEL_SERVICE_NAME"

_LATE, _LATE_CHANCE = 0.4, 0.05
"""A wait of this share of a short step is a wait for a step in progress. There are too many of them if chance gives as many with a lower
probability than this."""

_FEW_LATE, _QUARTILES_LATE, _MOST_LATE, _MOST_LATE_SHORT, _SHORT_US = 0.02, 3.0, 0.15, 0.2, 10_000.0
"""Share of such waits in a complete recording: the first number, and the second times the lower quartile of all waits, in steps, as
jitter of a front end makes them; at most the third, or the fourth if steps are shorter than the last number. Complete
recordings of real servers have up to 0.12, and 0.21 with steps of 4 ms; with 30 % of the requests removed they have 0.19 to 0.35, and
generated ones, whose front end has no jitter, 0.12 to 0.5."""

_MIN_PLAIN, _MAX_SKEW, _PROMPT_SHARE = 50, 1.5, 0.2
"""Fewest plain intervals that show a skew; how far long ones may be off, as a multiple of short ones; and the share of a prompt that is
about as long as one. Complete recordings of real servers have a skew of 0.65 to 1.3, and 2.6 with steps of 4 ms, whose noise is above `_NOISY`;
with 30 % of the requests removed they have 1.5 to 4.6, and generated ones 1.3 to 13."""

_NOISY = 0.48
"""Standard deviation of a step's time, as a share of it, above which a skew says nothing: a machine with other work stalls now and then."""

_LONG_STEPS = 16
"""In intervals of more steps, what disturbs single steps averages out."""

_LEAST_NOISE = 1e-4
"""Least noise of a step, as a share of its time: a simulator's steps have none, and stamps are whole microseconds."""

_SHORT_STEPS, _MAX_NOISE = 4, 0.45
"""Intervals of up to so many steps show whether tokens count the steps: above this standard deviation they do not. It is 0.08 to 0.27 in
complete recordings, 0.35 with steps of 4 ms on a busy machine, and 0.55 or more where 5 % of the tokens come in pairs."""

_MIN_FULL = 0.5
"""Share of the plain steps with a queue in which about as many requests run as ever do: 1 in a complete recording of a full engine;
0.1 to 0.2 where 30 % of the requests are missing."""

_JITTER_US, _JITTER_STEPS, _JITTER_TAIL = 1_500.0, 1.5, 0.2
"""A front end on a machine with other work is late by about this time, and at random: with steps of 1.8 ms, 0.19 to 0.9 of the late requests of
five real recordings with every span were late by more than one and a half steps. A wait for a step in progress ends with the step: in
nine generated runs with sampled spans at most 0.19 of the late requests waited longer."""

_MAX_SLOWDOWN = 3.0
"""If the mean time per token is this many times the quickest one, the engine's delays delay arrivals too."""


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
    if by_arrival.height < _MIN_SAMPLES:
        return f"{by_arrival.height} requests are too few to show whether they are all; record more"
    if (rate := sampled_rate(requests["trace_id"].gather(_middle(by_arrival["row"])))) is not None:
        return (
            f"a sampler kept about {100 * rate:.0f} % of the traces, as their ids show, and the batches contained the other "
            "requests too; trace every request: OTEL_TRACES_SAMPLER=always_on"
        )
    if by_arrival["arrival_ns"].null_count() > _MAX_LACKING * by_arrival.height:
        return "a load generator that does not say when it sent the requests does not show the batches"
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
    return None if is_full else _hidden_requests(server, short_us)


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


def _hidden_requests(server: CountedRequests, short_us: float) -> str | None:
    """Return what shows that requests without a span were in the engine; null where nothing does."""
    if not server.arrays.is_client and (late := _late_at_empty(server.arrays, short_us)):
        return (
            f"{late[0]} of {late[1]} requests that came while no other was in the engine waited for a step all the same: "
            f"requests without a span were in the batches; {_TRACE_ALL}"
        )
    if reason := _unexplained_times(server.counts):
        return f"{reason}; {_TRACE_ALL}"
    fullness = server.counts.fullness
    # A full engine has its most requests, or its most tokens.
    if fullness is not None and fullness.most < _MIN_FULL and fullness.unevenness > _MAX_UNEVENNESS:
        return f"requests waited although the recorded ones left room in the engine: requests without a span filled it; {_TRACE_ALL}"
    return None


def _late_at_empty(arrays: RequestArrays, short_us: float) -> tuple[int, int] | None:
    """Return how many requests came to an empty engine and waited for a step, and how many came to one; null if jitter explains it.

    A request that arrives while the engine is empty is scheduled at once. If it waits for a step in progress, as most requests do
    while others run, others ran.
    """
    arrival_us, ends_us = arrays.arrival_us, (arrays.last_token_ns - arrays.zero_ns) / 1e3
    before_us = np.r_[-np.inf, np.maximum.accumulate(ends_us)[:-1]]
    to_empty = np.flatnonzero(arrival_us > before_us)
    slowdown = float(arrays.decode_us.sum() / max(arrays.decode_steps.sum(), 1.0)) / short_us
    if not to_empty.size or slowdown > _MAX_SLOWDOWN:
        return None
    waited_us = ((arrays.first_token_ns - arrays.zero_ns) / 1e3 - arrival_us - arrays.prefill_us)[to_empty]
    steps = (waited_us - np.quantile(waited_us, 0.1)) / short_us
    late = int((steps > _LATE).sum())
    is_jitter = _LATE * short_us < _JITTER_US and (steps > _JITTER_STEPS).sum() > _JITTER_TAIL * late
    most = _MOST_LATE_SHORT if short_us < _SHORT_US else _MOST_LATE
    usual = min(_FEW_LATE + _QUARTILES_LATE * float(np.quantile(steps, 0.25)), most)
    chance = _chance_of_more(late, to_empty.size, usual)
    return None if is_jitter or chance > _LATE_CHANCE else (late, to_empty.size)


def _chance_of_more(successes: int, trials: int, share: float) -> float:
    """Return the chance of at least as many successes, of the binomial distribution."""
    from scipy.special import bdtrc  # noqa: PLC0415 - commands that fit nothing do without

    return float(bdtrc(successes - 1, trials, share))


def _unexplained_times(counts: Counts) -> str | None:
    """Return how the times of plain intervals contradict their batches; null where they do not.

    Noise makes a step shorter about as often as longer. A prompt that is not known only makes it longer.
    """
    plain = counts.plain
    if len(plain.steps) < _MIN_PLAIN:
        return None
    off = plain.time_us / plain.model_us - 1
    short = off[plain.steps <= _SHORT_STEPS]
    if len(short) >= _MIN_SAMPLES and (noise := robust_sd(short)) > _MAX_NOISE:
        return (
            f"steps of equal batches differ by {100 * noise:.0f} %, as several tokens a step, preemptions, other work on the machine, or "
            "requests without a span make them"
        )
    off = off * np.sqrt(plain.steps)
    low, less, more, high = np.quantile(off, (0.05, 0.1, 0.9, 0.95))
    skew = np.sqrt(max(more * high, 0.0) / max(less * low, 1e-6))
    prompt = float(np.median(counts.prompt_us) / np.median(plain.model_us / plain.steps))
    if robust_sd(off) > _NOISY or skew < _MAX_SKEW or more < _PROMPT_SHARE * prompt:
        return None
    return (
        f"steps without a prompt are longer than their batches explain {skew:.1f} times as far as shorter: prompts without a span were "
        "computed in them"
    )


def longest_whole_prompt(rows: pl.DataFrame) -> float | None:
    """Return the length up to which prompts are computed as a whole; null where nothing shows prefix-cache hits.

    A hit saves whole blocks, so that the times of prompts of about equal length differ by more than those of steps without a
    prompt, and longer prompts take less time than shorter ones. Without hits, times grow smoothly with the length, and scatter no
    more than those of other steps.

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
    noise = (excess_us / decode_us)[without]
    of_step, of_interval = _noise_shares(noise, steps[without])
    usual_noise = np.sqrt(of_step / steps[without] + of_interval)
    # The steps of an interval add up; the one with the prompt takes longer and scatters by as large a share.
    with_prompt_us = np.maximum(excess_us + step_us, step_us)
    variance = of_step * (step_us**2 * (steps - 1) + with_prompt_us**2)[one]
    variance += of_interval * (step_us * (steps - 1) + with_prompt_us)[one] ** 2
    length, excess_us = tokens[one], excess_us[one]
    # Against the line between the next shorter and the next longer prompt.
    weight = np.diff(length)[:-1] / np.maximum(length[2:] - length[:-2], 1)
    off_us = excess_us[1:-1] - (1 - weight) * excess_us[:-2] - weight * excess_us[2:]
    variance = variance[1:-1] + (1 - weight) ** 2 * variance[:-2] + weight**2 * variance[2:]
    odd = np.abs(off_us) > _SCATTER_SD * np.sqrt(variance)
    # Disturbances of steps without a prompt also disturb steps with one.
    is_odd = np.abs(noise - np.median(noise)) > _SCATTER_SD * usual_noise
    usual = _USUAL_SCATTER + float(is_odd.mean())
    if odd.mean() <= usual + _SURE_SHARE_SD * np.sqrt(usual / odd.size) and not _falls(excess_us):
        return None
    for most in 2.0 ** np.arange(int(np.log2(length[-1])), 3, -1):
        short = odd[length[1:-1] <= most]
        if (
            short.size >= _MIN_SAMPLES
            and short.sum() <= 1 + usual * short.size
            and not _falls(excess_us[length <= most])
        ):
            return float(most)
    return 0.0


def _noise_shares(noise: Vector, steps: Vector) -> tuple[float, float]:
    """Return the variance of a step by itself, and the one that the steps of an interval have in common; both of shares of the time.

    A machine that is slow for a second is so for every step of an interval: in long ones, that does not average out.
    """
    is_long = steps > _LONG_STEPS
    common = robust_sd(noise[is_long]) ** 2 if is_long.sum() >= _MIN_SAMPLES else 0.0
    is_short = steps <= _SHORT_STEPS
    if is_short.sum() < _MIN_SAMPLES:
        is_short = np.ones(len(steps), dtype=bool)
    # Short intervals have the common part, too.
    both = robust_sd(noise[is_short] * np.sqrt(steps[is_short])) ** 2
    return max(both - common * float(np.median(steps[is_short])), _LEAST_NOISE**2), common


def _falls(excess_us: Vector) -> bool:
    """Return whether some prompts surely take less time than shorter ones; times in the order of the lengths."""
    groups = np.array_split(excess_us, max(min(excess_us.size // _MIN_SAMPLES, _LENGTH_GROUPS), 1))
    middle = np.array([np.median(group) for group in groups])
    # The standard error of a median of normal values is sqrt(pi / 2) times that of their mean.
    error = np.array([SD_OF_MEDIAN * robust_sd(group) / np.sqrt(group.size) for group in groups])
    longest = np.maximum.accumulate(middle)
    error_of_longest = error[np.maximum.accumulate(np.where(middle == longest, np.arange(middle.size), 0))]
    return bool((longest - middle > _SURE_FALL_SD * np.hypot(error, error_of_longest)).any())
