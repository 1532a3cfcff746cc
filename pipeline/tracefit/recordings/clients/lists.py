"""Results with a list for each value of the requests, as `vllm bench serve` writes them, and SGLang's benchmark, which
began as its copy.

A line is a benchmark: its summary and, if asked for, lists of `input_lens`, `output_lens`, `ttfts`, `itls` and
`errors`. Newer versions of vLLM also list `start_times`. Where they are missing, a client that sent every request as
soon as one of `max_concurrency` ended has sent each when the earliest of those before it ended; the length of the
benchmark shows whether it did. Otherwise requests have latencies and no arrivals.
"""

from __future__ import annotations

import heapq
import math
import re
from contextlib import suppress
from functools import partial
from itertools import chain
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tracefit.inputs.framing import BOM, records
from tracefit.inputs.rejects import is_json
from tracefit.recordings.blocks import MOST_S, UNREADABLE_RECORD
from tracefit.recordings.clients.base import (
    ClientRequest,
    Seconds,
    number_of,
    raw_items,
    refuse,
    require_unit,
    tokens_since,
)
from tracefit.recordings.point_rows import point_of
from tracefit.recordings.requests import TokenCount, from_json
from tracefit.statistics import percentile
from tracefit.tables.dialects import NOT_SENT_S
from tracefit.tables.units import unit_question
from tracefit.text import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tracefit.recordings.point_rows import Point, PointParts
    from tracefit.recordings.requests import Parts

_LIST_KEYS = ("ttfts", "itls", "input_lens", "output_lens")
DETAILS = frozenset((*_LIST_KEYS, "start_times", "errors", "generated_texts", "latencies", "queue_times"))
"""Keys of the lists. A summary of vLLM has two of them: `latencies`, each the TTFT and the times between tokens
together, and `queue_times`, for which the client itself kept a request back before it was sent: they are not the
server's, and not kept."""

_LASTS_ALIKE = 0.05
"""A benchmark takes as long as its requests one after another do, within this share, if each is sent when another one
ends."""


_TOGETHER = 0.2
"""Parts that come together are apart by less than this share of the median gap between tokens."""


class _Bench(msgspec.Struct):
    ttfts: list[msgspec.Raw] | None = None
    itls: list[msgspec.Raw] | None = None
    input_lens: list[msgspec.Raw] | None = None
    output_lens: list[msgspec.Raw] | None = None
    start_times: list[msgspec.Raw] | None = None
    errors: list[msgspec.Raw] | None = None
    latencies: list[msgspec.Raw] | None = None
    date: Any = None
    duration: Any = None
    mean_ttft_ms: Any = None
    mean_itl_ms: Any = None
    request_rate: Any = None
    request_throughput: Any = None
    completed: Any = None
    max_concurrency: Any = None


class _BenchRequest(msgspec.Struct, array_like=True):
    start_time: Seconds
    ttft: Seconds
    itl: list[Seconds]
    input_len: TokenCount
    output_len: TokenCount
    error: str | None


_OF_STATISTIC = re.compile(r"^(?:mean|median|std|p\d+(?:\.\d+)?)_|_ms$")

_MOST_COMPARED_LISTS = 1_000
"""Requests of a benchmark whose times are compared with its summary."""

_LONGER_GAPS, _LEAST_LONGER, _LONGER_SHARE = 1.5, 2, 0.02
"""A request is longer than its benchmark by this factor, so many of them, and such a share: one may be damaged."""

_MOST_CROWD = 3.0
"""Requests at a time, in ratio to the most that a client sends: a summary may count failed ones apart."""

_LEAST_ODD_GAP_S, _LEAST_LIST_GAPS, _SLOW_CROWD = 3.0, 20, 64
"""A median time between tokens that is longer than a step of any server, of so many; slower ones have fewer requests at
a time."""


def requests_of_lists(payload: bytes, ended_s: Callable[[Any], float | None]) -> Parts[ClientRequest]:
    """Yield the requests of each benchmark, or the whole benchmark if it cannot be divided; one without lists has none.

    Args:
        payload: Lines, each a benchmark.
        ended_s: Returns the end of a benchmark on the wall clock from its `date`.
    """
    for number, (offset, record) in enumerate(_benchmarks(payload)):
        try:
            bench = _bench_of(record)
        except UNREADABLE_RECORD as error:
            yield offset, record, partial(refuse, error)
            continue
        if bench is None:
            continue
        ttfts, itls, inputs, outputs = (getattr(bench, name) for name in _LIST_KEYS)
        errors = bench.errors or [msgspec.Raw(b'""')] * len(ttfts)
        starts = bench.start_times or _starts(bench)
        read = partial(
            _bench_request,
            benchmark=number,
            ended_s=ended_s(bench.date),
            empty=_empty_part(itls, outputs, errors),
        )
        for values in zip(starts, ttfts, itls, inputs, outputs, errors, strict=True):
            yield offset, b"[%b]" % b",".join(map(bytes, values)), read


def points_of_lists(payload: bytes, _: str, program: str, known: frozenset[str], written_by: str) -> PointParts:
    """Yield the summary of each benchmark."""
    for offset, record in _benchmarks(payload):
        yield offset, record, partial(_summary, program, known, written_by)


def _benchmarks(payload: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield offset and text of each benchmark: a line, or, where a tool has laid them out, an object or the items of a
    list.
    """
    lines = [(line.offset, line.payload) for line in records(payload, "lines")]
    whole = payload.removeprefix(BOM).strip()
    if whole.startswith(b"[") or (len(lines) > 1 and not is_json(lines[0][1])):
        with suppress(*UNREADABLE_RECORD):
            items = raw_items(whole) if whole.startswith(b"[") else [from_json(whole, msgspec.Raw)]
            lines = [(0, bytes(item)) for item in items]
    yield from lines


def _summary(program: str, known: frozenset[str], written_by: str, record: bytes) -> Iterable[Point]:
    values = from_json(record, dict[str, msgspec.Raw])
    summed = {name: msgspec.json.decode(raw) for name, raw in values.items() if name not in DETAILS}
    summed |= _e2e_of(values, summed)
    if not any(
        name.endswith(("_ttft_ms", "_tpot_ms", "_itl_ms", "_e2el_ms", "_e2el_s", "_latency_ms")) for name in summed
    ):
        if DETAILS.intersection(values):
            return []  # cut down to its requests
        raise msgspec.ValidationError("neither requests nor a summary")
    count = number_of(summed.get("completed"))
    for total, mean in (("total_input_tokens", "input_tokens"), ("total_output_tokens", "output_tokens")):
        if count and (tokens := number_of(summed.get(total))):
            summed[mean] = tokens / count
    flat = {name: value for name, value in summed.items() if not _is_known(name, known)}
    return [point_of(flat, program, unit="s") | {"requests_written_by": written_by}]


def _e2e_of(values: dict[str, msgspec.Raw], summed: dict[str, Any]) -> dict[str, float]:
    """Return mean and percentiles of `latencies`, if the summary itself has none; a failed request has 0 there."""
    if "latencies" not in values or any("_e2el_ms" in name for name in summed):
        return {}
    lasted = np.array(_finite_list(values["latencies"]))
    if not len(lasted):
        return {}
    return {"mean_e2el_s": float(lasted.mean())} | {f"p{q}_e2el_s": percentile(lasted, q) for q in (50, 90, 95, 99)}


def _is_known(name: str, known: frozenset[str]) -> bool:
    """Return whether a key is among some: itself, without its statistic and unit, or by its beginning, which ends in an
    underscore.
    """
    return not known.isdisjoint((name, _OF_STATISTIC.sub("", name))) or any(
        name.startswith(key) for key in known if key.endswith("_")
    )


def _bench_of(record: bytes) -> _Bench | None:
    """Return a benchmark whose lists fit together and whose times fit its summary; null if it has no lists.

    Raises:
        msgspec.DecodeError: It is not that of a benchmark, or its times contradict each other.
    """
    bench = from_json(record, _Bench)
    lists = {name: values for name in _LIST_KEYS if (values := getattr(bench, name)) is not None}
    if not lists and bench.start_times is None:
        return None
    if missing := [name for name in _LIST_KEYS if name not in lists]:
        raise msgspec.ValidationError(f"Object missing required field `{missing[0]}`")
    ttfts, itls = lists["ttfts"], lists["itls"]
    others = (bench.start_times or ttfts, bench.errors or ttfts, bench.latencies or ttfts)
    if len({len(column) for column in (*lists.values(), *others)}) > 1:
        raise msgspec.ValidationError("lists of different lengths")
    every = -(-len(ttfts) // _MOST_COMPARED_LISTS) or 1
    starts, first = (_finite(raws[::every]) for raws in (bench.start_times or [], ttfts))
    gaps_of = [*map(_finite_list, itls[::every])]
    gaps = [*chain.from_iterable(gaps_of)]
    for what, seconds, of, other in (
        ("the mean of ttfts", fmean(first or [0]), "mean_ttft_ms", bench.mean_ttft_ms),
        ("the mean of itls", fmean(gaps or [0]), "mean_itl_ms", bench.mean_itl_ms),
    ):
        require_unit(what, seconds, of, number_of(other) / 1e3)
    lasted = _finite((bench.latencies or [])[::every])
    if lasted and first:
        made = fmean(first) + sum(gaps) / len(first)
        require_unit("the mean of latencies", fmean(lasted), "ttfts and itls", made)
    rate = number_of(bench.request_throughput)
    served = (number_of(bench.completed) or len(ttfts)) / rate if rate else 0.0
    lasts = number_of(bench.duration)
    require_unit("duration", lasts or served, "requests over their throughput", served)
    # Requests may all be sent at once, but not for longer than the benchmark lasts.
    between = max(starts, default=0) - min(starts, default=0)
    require_unit("the range of start_times", max(between, lasts), "duration", lasts)
    for what, times in (("ttfts", first), ("itls", gaps_of)):
        fault = _lasting_fault(what, [t if isinstance(t, float) else sum(t) for t in times], bench, len(ttfts))
        if fault:
            raise msgspec.ValidationError(fault)
    if (
        len(gaps) >= _LEAST_LIST_GAPS
        and (typical := median(gaps)) >= _LEAST_ODD_GAP_S
        and _is_crowded(gaps_of, bench, len(ttfts))
    ):
        question = unit_question(_least_power(typical / _LEAST_ODD_GAP_S), "s")
        raise msgspec.ValidationError(f"the median of itls is {typical:,.0f}, longer than a step: {question}")
    return bench


def _lasting_fault(what: str, lasted_s: Sequence[float], bench: _Bench, count: int) -> str | None:
    """Return the fault of times of requests that are longer than the benchmark, or too long for the requests at a
    time.
    """
    lasts_s = _lasts_s(bench, count)
    if not (lasts_s and lasted_s):
        return None
    longer = sorted(time / lasts_s for time in lasted_s if time > _LONGER_GAPS * lasts_s)
    if len(longer) >= min(len(lasted_s), max(_LEAST_LONGER, _LONGER_SHARE * len(lasted_s))):
        question = unit_question(_least_power(longer[len(longer) // 2]), "s")
        return f"{what} of {plural(len(longer), 'request')} add up to more than the benchmark took: {question}"
    slots = number_of(bench.max_concurrency)
    at_once = count * fmean(lasted_s) / lasts_s
    if slots and at_once > _MOST_CROWD * slots:
        question = unit_question(_least_power(at_once / slots), "s")
        return f"{what} add up to more requests at a time than max_concurrency: {question}"
    return None


def _lasts_s(bench: _Bench, count: int) -> float:
    """Return how long a benchmark took, as its summary says; 0 if it does not."""
    rate = number_of(bench.request_throughput)
    return number_of(bench.duration) or (count / rate if rate else 0.0)


def _least_power(ratio: float) -> int:
    """Return the least power of 1,000 by which a time that is `ratio` times the largest possible one can be off."""
    return max(1, math.ceil(math.log(ratio, 1000) - 1e-3))


def _is_crowded(gaps_of: Sequence[Sequence[float]], bench: _Bench, count: int) -> bool:
    """Return whether more requests decode at a time than slow steps serve; true where the length of the benchmark is
    not known.
    """
    lasts_s = _lasts_s(bench, count)
    return not lasts_s or count * fmean(map(sum, gaps_of)) / lasts_s > _SLOW_CROWD


def _finite(values: Iterable[msgspec.Raw]) -> list[float]:
    decoded = (msgspec.json.decode(value) for value in values)
    return [number for value in decoded if (number := number_of(value))]


def _finite_list(values: msgspec.Raw) -> list[float]:
    decoded = msgspec.json.decode(values)
    return [number for value in decoded if (number := number_of(value))] if isinstance(decoded, list) else []


def _empty_part(
    itls: Sequence[msgspec.Raw], outputs: Sequence[msgspec.Raw], errors: Sequence[msgspec.Raw]
) -> int | None:
    """Return the index of the one part of every answer that has no token, 0 or -1; null if parts are tokens, or if it
    is not known.

    A chat's stream begins with a part that has only the role, and of some servers it ends with one that has only the
    reason. vLLM's program counts their times among those of the tokens. Such a part comes together with the token
    beside it.
    """
    answers: list[list[float]] = []
    for gaps, output, error in zip(itls, outputs, errors, strict=True):
        count, times = msgspec.json.decode(output), _numbers(gaps)
        if bytes(error) not in (b'""', b"null") or times is None or not isinstance(count, int) or count < 1:
            continue
        if len(times) != count:
            return None
        answers.append(times)
    longer = [gap for times in answers for gap in times[1:-1]]
    if not longer:
        return None
    first, last = median(times[0] for times in answers), median(times[-1] for times in answers)
    if min(first, last) > median(longer) * _TOGETHER:
        return None
    return 0 if first <= last else -1


def _numbers(values: msgspec.Raw) -> list[float] | None:
    """Return gaps between parts, also those of 0; null if one is not a number."""
    decoded = msgspec.json.decode(values)
    is_numbers = isinstance(decoded, list) and all(isinstance(v, int | float) for v in decoded)
    return decoded if is_numbers else None


def _bench_request(record: bytes, *, benchmark: int, ended_s: float | None, empty: int | None) -> ClientRequest:
    request = msgspec.json.decode(record, type=_BenchRequest)
    times = tokens_since(request.ttft, request.itl)
    tokens = [time for n, time in enumerate(times) if empty is None or n != empty % len(times)]
    return ClientRequest(
        start_s=request.start_time,
        benchmark=benchmark,
        ended_s=ended_s,
        token_s=tokens,
        first_s=times[0],
        last_s=times[-1],
        prompt_tokens=request.input_len,
        output_tokens=request.output_len,
        error=bool(request.error),
    )


# -- requests without the times at which they were sent -----------------------------------------------------


def _starts(bench: _Bench) -> list[msgspec.Raw]:
    """Return when each request was sent: as soon as another one ended if the benchmark took as long as that takes, or
    `NOT_SENT_S`.
    """
    lasted = [*_lasted(bench)]
    sent = _sent_in_turn(lasted, int(number_of(bench.max_concurrency)) or len(lasted))
    is_endless = not number_of(bench.request_rate)
    known = number_of(bench.duration)
    if not (is_endless and known and sent) or None in lasted:
        return [msgspec.Raw(repr(NOT_SENT_S).encode())] * len(lasted)
    took = max(start + (time or 0.0) for start, time in zip(sent, lasted, strict=True))
    if abs(took / known - 1) > _LASTS_ALIKE:
        return [msgspec.Raw(repr(NOT_SENT_S).encode())] * len(lasted)
    return [msgspec.Raw(repr(start).encode()) for start in sent]


def _lasted(bench: _Bench) -> Iterator[float | None]:
    """Yield how long each request took; null for one that failed or cannot be read."""
    errors = bench.errors or [msgspec.Raw(b'""')] * len(bench.ttfts or ())
    for first, gaps, error in zip(bench.ttfts or (), bench.itls or (), errors, strict=True):
        values = [msgspec.json.decode(first), *_finite_list(gaps)]
        is_known = number_of(values[0]) and bytes(error) in (b'""', b"null") and sum(values) < MOST_S
        yield sum(values) if is_known else None


def _sent_in_turn(lasted: Sequence[float | None], slots: int) -> list[float]:
    """Return when requests are sent if each waits for the earliest of `slots` before it to end."""
    ends: list[float] = []
    sent = []
    for time in lasted:
        start = heapq.heappop(ends) if len(ends) >= slots else 0.0
        heapq.heappush(ends, start + (time or 0.0))
        sent.append(start)
    return sent
