"""Logs of load generators: what a client measured of each request, and of each token where it says so.

| program | file | version read | tokens |
| --- | --- | --- | --- |
| `vllm bench serve --save-result --save-detailed` | JSON, one document or a line for each benchmark | vLLM 0.32, 0.33 | every one |
| GuideLLM `--output kind=json` | JSON, one document | 0.8.1 | first and last |
| inference-perf `per_request_lifecycle_metrics.json` | JSON, a list | 0.7.0, and older ones with the lengths and times in `info` itself | every one |
| AIPerf `profile_export.jsonl` | JSON lines | 0.13.0 | every one, if a chunk is one |
| experiments of inference-sim: `requests.json` and `measured.json` | JSON, a document and a list | February 2026 | first and last |

If every token has a time and the server has no other client, the tokens show the engine's steps: outputs of one step arrive at once,
and steps arrive apart (`tables.stages`). A prompt is assumed to be computed by the step of its first token. If only the first and
the last token have times, steps are counted, as for the spans of an unmodified server (`timeline.request_steps`).

A file has one benchmark or several, and each may have a clock of its own. One that is given twice has the same ids and counts once.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from datetime import UTC, datetime
from functools import partial
from hashlib import blake2b
from itertools import accumulate, chain
from statistics import fmean, median
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
import numpy as np
import polars as pl

from tracefit.inputs.formats import Recording, register
from tracefit.inputs.framing import records
from tracefit.recordings.blocks import MOST_S, UNREADABLE, RecordedBlock
from tracefit.recordings.requests import (
    TokenCount,
    as_spans,
    first_keys,
    from_json,
    lines_of,
    read_parts,
    seconds_to_ns,
)
from tracefit.tables.client_times import BENCHMARK_DIGITS
from tracefit.tables.dialects import CLIENT_KEYS, CLIENT_SCOPE, NOT_SENT_S
from tracefit.tables.rows import RECORDED_STEPS, UNKNOWN_SERVER
from tracefit.tables.sources import CycleSource, declare
from tracefit.tables.stages import batch_numbers, steps_of
from tracefit.tables.units import unit_fault, unit_question
from tracefit.tables.unread import LENGTHS, TIMES
from tracefit.text import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tracefit.inputs.blocks import Block
    from tracefit.inputs.framing import Shape
    from tracefit.inputs.rejects import Encoding, Rejects
    from tracefit.recordings.requests import Parts

STEPS = declare(
    CycleSource(
        name="client",
        recorder="token times of a load generator",
        interval="tokens of a step to those of the next, after idling from the send to the tokens, as the client received them",
        error="that of the way of a token to the client",
        seen_by="client",
        from_requests=True,
    )
)

_APART = 3
"""Tokens are of different steps if they arrive apart by more than the shorter of their times divided by this."""

_MOST_LASTED_S, _MOST_TOKENS = 1e6, 2**31
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=MOST_S)]
_MOST_ODD = 0.2
"""Largest share of requests that skip a step, or have two tokens in one, where all are of one engine."""

_Row: TypeAlias = tuple[Any, ...]
_REQUESTS: dict[str, Any] = {
    "benchmark": pl.Int64,
    "ended_s": pl.Float64,
    "request_id": pl.String,
    "start_s": pl.Float64,
    "token_s": pl.List(pl.Float64),
    "first_s": pl.Float64,
    "last_s": pl.Float64,
    "prompt_tokens": pl.Int64,
    "output_tokens": pl.Int64,
    "error": pl.Boolean,
}
"""Requests of a client: the number of their benchmark in the file, and its end on the wall clock if only that is known; when each
was sent, on the client's clock; the times of its tokens since then, or only of the first and the last."""


def _request(
    start_s: float,
    request_id: str | None = None,
    *,
    benchmark: int = 0,
    ended_s: float | None = None,
    token_s: list[float] | None = None,
    first_s: float | None = None,
    last_s: float | None = None,
    prompt_tokens: int | None = None,
    output_tokens: int | None = None,
    error: bool = False,
) -> _Row:
    """Return a row of `_REQUESTS`.

    Raises:
        msgspec.ValidationError: Its times are not in order, or a value is out of range.
    """
    since = [time for time in (first_s, *(token_s or ()), last_s) if time is not None]
    if since != sorted(since) or not all(0 <= time <= _MOST_LASTED_S for time in since):
        raise msgspec.ValidationError("times out of order or range")
    tokens = (prompt_tokens or 0, output_tokens or 0)
    if not (0 <= start_s <= MOST_S and all(0 <= count <= _MOST_TOKENS for count in tokens)):
        raise msgspec.ValidationError("out of range")
    times = (request_id, start_s, token_s, first_s, last_s)
    return benchmark, ended_s, *times, prompt_tokens, output_tokens, error


def _list(payload: bytes) -> list[msgspec.Raw]:
    return from_json(payload, list[msgspec.Raw])


def _require_unit(what: str, seconds: float, of: str, others_s: float) -> None:
    """Refuse a time whose unit another one of the file contradicts.

    Raises:
        msgspec.ValidationError: It is off by a power of 1,000.
    """
    if others_s > 0 and (fault := unit_fault(what, of, seconds / others_s, "s")):
        raise msgspec.ValidationError(fault)


def _tokens_since(first_s: float, gaps_s: list[float]) -> list[float]:
    return [*accumulate(gaps_s, initial=first_s)]


# -- vllm bench serve ---------------------------------------------------------------------------------------


class _Bench(msgspec.Struct):
    start_times: list[msgspec.Raw]
    ttfts: list[msgspec.Raw]
    itls: list[msgspec.Raw]
    input_lens: list[msgspec.Raw]
    output_lens: list[msgspec.Raw]
    errors: list[msgspec.Raw] | None = None
    date: Any = None
    duration: Any = None
    mean_ttft_ms: Any = None
    mean_itl_ms: Any = None
    request_throughput: Any = None
    max_concurrency: Any = None


class _BenchRequest(msgspec.Struct, array_like=True):
    start_time: _Seconds
    ttft: _Seconds
    itl: list[_Seconds]
    input_len: TokenCount
    output_len: TokenCount
    error: str | None


_MOST_COMPARED = 1_000
"""Requests of a benchmark whose times are compared with its summary."""

_LONGER, _LEAST_LONGER, _LONGER_SHARE = 1.5, 2, 0.02
"""A request is longer than its benchmark by this factor, so many of them, and such a share: one may be damaged."""

_MOST_CROWD = 3.0
"""Requests at a time, in ratio to the most that a client sends: a summary may count failed ones apart."""

_LEAST_ODD_GAP_S, _LEAST_GAPS, _SLOW_CROWD = 3.0, 20, 64
"""A median time between tokens that is longer than a step of any server, of so many; slower ones have fewer requests at a time."""


def _bench_parts(payload: bytes) -> Parts[_Row]:
    """Yield the requests of each benchmark, or the whole benchmark if it cannot be divided."""
    for number, line in enumerate(records(payload, "lines")):
        try:
            bench = _bench_of(line.payload)
        except UNREADABLE as error:
            yield line.offset, line.payload, partial(_refuse, error)
            continue
        errors = bench.errors or [msgspec.Raw(b'""')] * len(bench.ttfts)
        columns = (bench.start_times, bench.ttfts, bench.itls, bench.input_lens, bench.output_lens, errors)
        read = partial(_bench_request, benchmark=number, ended_s=_date_s(bench.date))
        for values in zip(*columns, strict=True):
            yield line.offset, b"[%b]" % b",".join(map(bytes, values)), read


def _bench_of(record: bytes) -> _Bench:
    """Return a benchmark whose lists fit together and whose times fit its summary.

    Raises:
        msgspec.DecodeError: It is not that of a benchmark, or its times contradict each other.
    """
    bench = from_json(record, _Bench)
    lists = (bench.start_times, bench.ttfts, bench.itls, bench.input_lens, bench.output_lens)
    if len({len(column) for column in (*lists, bench.errors or bench.ttfts)}) > 1:
        raise msgspec.ValidationError("lists of different lengths")
    every = -(-len(bench.ttfts) // _MOST_COMPARED) or 1
    starts, first = (_finite(raws[::every]) for raws in lists[:2])
    gaps_of = [*map(_finite_list, bench.itls[::every])]
    gaps = [*chain.from_iterable(gaps_of)]
    for what, seconds, of, other in (
        ("the mean of ttfts", fmean(first or [0]), "mean_ttft_ms", bench.mean_ttft_ms),
        ("the mean of itls", fmean(gaps or [0]), "mean_itl_ms", bench.mean_itl_ms),
    ):
        _require_unit(what, seconds, of, _number(other) / 1e3)
    # Requests may all be sent at once, but not for longer than the benchmark lasts.
    between = max(starts, default=0) - min(starts, default=0)
    _require_unit(
        "the range of start_times", max(between, _number(bench.duration)), "duration", _number(bench.duration)
    )
    for what, times in (("ttfts", first), ("itls", gaps_of)):
        fault = _lasting_fault(what, [t if isinstance(t, float) else sum(t) for t in times], bench)
        if fault:
            raise msgspec.ValidationError(fault)
    if (
        len(gaps) >= _LEAST_GAPS
        and (typical := median(gaps)) >= _LEAST_ODD_GAP_S
        and _is_crowded(gaps_of, bench)
    ):
        question = unit_question(_least_power(typical / _LEAST_ODD_GAP_S), "s")
        raise msgspec.ValidationError(f"the median of itls is {typical:,.0f}, longer than a step: {question}")
    return bench


def _lasting_fault(what: str, lasted_s: Sequence[float], bench: _Bench) -> str | None:
    """Return the fault of times of requests that are longer than the benchmark, or too long for the requests at a time."""
    lasts_s = _lasts_s(bench)
    if not (lasts_s and lasted_s):
        return None
    longer = sorted(time / lasts_s for time in lasted_s if time > _LONGER * lasts_s)
    if len(longer) >= min(len(lasted_s), max(_LEAST_LONGER, _LONGER_SHARE * len(lasted_s))):
        question = unit_question(_least_power(longer[len(longer) // 2]), "s")
        return (
            f"{what} of {plural(len(longer), 'request')} add up to more than the benchmark took: {question}"
        )
    slots = _number(bench.max_concurrency)
    at_once = len(bench.ttfts) * fmean(lasted_s) / lasts_s
    if slots and at_once > _MOST_CROWD * slots:
        question = unit_question(_least_power(at_once / slots), "s")
        return f"{what} add up to more requests at a time than max_concurrency: {question}"
    return None


def _lasts_s(bench: _Bench) -> float:
    """Return how long a benchmark took, as its summary says; 0 if it does not."""
    rate = _number(bench.request_throughput)
    return _number(bench.duration) or (len(bench.ttfts) / rate if rate else 0.0)


def _least_power(ratio: float) -> int:
    """Return the least power of 1,000 by which a time that is `ratio` times the largest possible one can be off."""
    return max(1, math.ceil(math.log(ratio, 1000) - 1e-3))


def _is_crowded(gaps_of: Sequence[Sequence[float]], bench: _Bench) -> bool:
    """Return whether more requests decode at a time than slow steps serve; true where the length of the benchmark is not known."""
    lasts_s = _lasts_s(bench)
    return not lasts_s or len(bench.ttfts) * fmean(map(sum, gaps_of)) / lasts_s > _SLOW_CROWD


def _refuse(error: Exception, _: bytes) -> _Row:
    raise error


def _number(value: Any) -> float:
    """Return a positive number of seconds, or 0 for any other value."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 < value < MOST_S else 0.0


def _finite(values: Iterable[msgspec.Raw]) -> list[float]:
    decoded = (msgspec.json.decode(value) for value in values)
    return [number for value in decoded if (number := _number(value))]


def _finite_list(values: msgspec.Raw) -> list[float]:
    decoded = msgspec.json.decode(values)
    return [number for value in decoded if (number := _number(value))] if isinstance(decoded, list) else []


def _bench_request(record: bytes, *, benchmark: int, ended_s: float | None) -> _Row:
    request = msgspec.json.decode(record, type=_BenchRequest)
    times = _tokens_since(request.ttft, request.itl)
    return _request(
        request.start_time,
        benchmark=benchmark,
        ended_s=ended_s,
        token_s=times,
        first_s=times[0],
        last_s=times[-1],
        prompt_tokens=request.input_len,
        output_tokens=request.output_len,
        error=bool(request.error),
    )


def _date_s(date: Any) -> float | None:
    """Return the time at which a benchmark ends, from its date: local time in seconds."""
    try:
        return datetime.strptime(str(date), "%Y%m%d-%H%M%S").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def _on_wall_clock(requests: pl.DataFrame) -> pl.DataFrame:
    """Return requests (`_REQUESTS`) with their starts on the wall clock if the end of their benchmark is known.

    Dates are cut to whole seconds. Benchmarks of a file whose dates allow one clock are on one clock, by the latest of them.
    """
    end = (pl.col("start_s") + pl.col("last_s").fill_null(0)).max()
    ahead = (
        requests.group_by("benchmark", maintain_order=True)
        .agg(ahead_s=pl.col("ended_s").first() - end)
        .drop_nulls()
    )
    if not ahead.height:
        return requests
    known = np.sort(ahead["ahead_s"].to_numpy())
    latest = known[np.searchsorted(known, ahead["ahead_s"].to_numpy() + 1, "left") - 1]
    joined = requests.join(
        ahead.with_columns(ahead_s=pl.Series(latest)), on="benchmark", how="left", maintain_order="left"
    )
    moved = pl.col("start_s") + pl.col("ahead_s")
    return joined.with_columns(
        start_s=pl.when(moved.is_between(0, MOST_S)).then(moved).otherwise("start_s")
    ).drop("ahead_s")


# -- GuideLLM -----------------------------------------------------------------------------------------------


class _Timings(msgspec.Struct):
    request_start: _Seconds
    request_end: _Seconds | None = None
    first_token_iteration: _Seconds | None = None
    last_token_iteration: _Seconds | None = None


class _GuideInfo(msgspec.Struct):
    timings: _Timings


class _GuideRequest(msgspec.Struct):
    info: _GuideInfo
    request_id: str
    response_id: str | None = None
    prompt_tokens: TokenCount | None = None
    output_tokens: TokenCount | None = None


class _GuideRequests(msgspec.Struct):
    successful: list[msgspec.Raw] | None = None
    errored: list[msgspec.Raw] | None = None
    incomplete: list[msgspec.Raw] | None = None


class _GuideBenchmark(msgspec.Struct):
    requests: _GuideRequests


class _Guide(msgspec.Struct):
    benchmarks: list[msgspec.Raw]


def _guide(record: bytes, *, benchmark: int, error: bool) -> _Row:
    decoded = msgspec.json.decode(record, type=_GuideRequest)
    times = decoded.info.timings
    start = times.request_start
    first, last = times.first_token_iteration, times.last_token_iteration
    return _request(
        start,
        decoded.response_id or decoded.request_id,
        benchmark=benchmark,
        first_s=None if first is None else first - start,
        last_s=None if last is None else last - start,
        prompt_tokens=decoded.prompt_tokens or None,  # GuideLLM writes 0 if it could not count them
        output_tokens=decoded.output_tokens,
        error=error,
    )


def _guide_parts(payload: bytes) -> Parts[_Row]:
    for number, text in enumerate(from_json(payload, _Guide).benchmarks):
        try:
            lists = msgspec.json.decode(text, type=_GuideBenchmark).requests
        except UNREADABLE as error:
            yield 0, bytes(text), partial(_refuse, error)
            continue
        failed = (lists.errored or []) + (lists.incomplete or [])
        for requests, is_error in ((lists.successful or [], False), (failed, True)):
            read = partial(_guide, benchmark=number, error=is_error)
            yield from ((0, bytes(request), read) for request in requests)


# -- inference-perf -----------------------------------------------------------------------------------------


class _Text(msgspec.Struct):
    input_tokens: TokenCount | None = None


class _RequestMetrics(msgspec.Struct):
    text: _Text | None = None


class _ResponseMetrics(msgspec.Struct):
    output_tokens: TokenCount | None = None
    output_token_times: list[_Seconds] = []


class _PerfInfo(msgspec.Struct):
    request_metrics: _RequestMetrics | None = None
    response_metrics: _ResponseMetrics | None = None
    # Older versions have them here.
    input_tokens: TokenCount | None = None
    output_tokens: TokenCount | None = None
    output_token_times: list[_Seconds] = []


class _PerfRequest(msgspec.Struct):
    start_time: _Seconds
    end_time: _Seconds
    info: _PerfInfo
    error: Any = None


def _perf(record: bytes) -> _Row:
    decoded = msgspec.json.decode(record, type=_PerfRequest)
    info = decoded.info
    response = info.response_metrics or info
    text = info.request_metrics.text if info.request_metrics else info
    tokens = [time - decoded.start_time for time in response.output_token_times]
    return _request(
        decoded.start_time,
        token_s=tokens or None,
        first_s=tokens[0] if tokens else None,
        last_s=tokens[-1] if tokens else decoded.end_time - decoded.start_time,
        prompt_tokens=text.input_tokens if text else None,
        output_tokens=response.output_tokens,
        error=decoded.error is not None,
    )


# -- AIPerf -------------------------------------------------------------------------------------------------


class _AiValue(msgspec.Struct):
    value: float | list[float]
    unit: str


class _AiMetadata(msgspec.Struct):
    request_start_ns: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    request_end_ns: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    x_request_id: str | None = None
    was_cancelled: bool = False


class _AiRequest(msgspec.Struct):
    metadata: _AiMetadata
    metrics: dict[str, msgspec.Raw]
    error: Any = None


_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "sec": 1.0, "s": 1.0, "tokens": 1.0}


def _aiperf(record: bytes) -> _Row:
    decoded = from_json(record, _AiRequest)

    def value(name: str) -> Any:
        if name not in decoded.metrics:
            return None
        item = msgspec.json.decode(decoded.metrics[name], type=_AiValue)
        if item.unit not in _UNITS:
            raise msgspec.ValidationError(f"{name} of an unknown unit")
        factor = _UNITS[item.unit]
        return [v * factor for v in item.value] if isinstance(item.value, list) else item.value * factor

    def count(*names: str) -> int | None:
        number = next((n for n in map(value, names) if isinstance(n, float)), None)
        return None if number is None else int(number)

    ttft, gaps, latency = value("time_to_first_token"), value("inter_chunk_latency"), value("request_latency")
    tokens = _tokens_since(ttft, gaps or []) if isinstance(ttft, float) else None
    lasted_ns = decoded.metadata.request_end_ns - decoded.metadata.request_start_ns
    last_s = tokens[-1] if gaps and tokens else latency
    if last_s is not None:
        _require_unit("request_latency", last_s, "request_end_ns - request_start_ns", lasted_ns / 1e9)
    return _request(
        decoded.metadata.request_start_ns / 1e9,
        decoded.metadata.x_request_id,
        token_s=tokens if gaps is not None else None,
        first_s=ttft,
        last_s=last_s,
        prompt_tokens=count("usage_prompt_tokens", "input_sequence_length"),
        output_tokens=count("usage_completion_tokens", "output_sequence_length"),
        error=decoded.error is not None or decoded.metadata.was_cancelled,
    )


# -- inference-sim's experiments ------------------------------------------------------------------------------


class _Sent(msgspec.Struct):
    index: TokenCount
    arrival_time_us: Annotated[float, msgspec.Meta(ge=0, le=MOST_S * 1e6)]
    input_tokens: TokenCount
    output_tokens: TokenCount
    has_error: bool = False


class _Experiment(msgspec.Struct):
    requests: list[msgspec.Raw]


class _Received(msgspec.Struct):
    index: TokenCount
    ttft_s: _Seconds
    e2e_s: _Seconds
    has_error: bool = False


def _sent(record: bytes) -> _Row:
    sent = msgspec.json.decode(record, type=_Sent)
    return _request(
        sent.arrival_time_us / 1e6,
        str(sent.index),
        prompt_tokens=sent.input_tokens,
        output_tokens=sent.output_tokens,
        error=sent.has_error,
    )


def _received(record: bytes) -> _Row:
    got = msgspec.json.decode(record, type=_Received)
    return _request(NOT_SENT_S, str(got.index), first_s=got.ttft_s, last_s=got.e2e_s, error=got.has_error)


def _experiment(payload: bytes) -> list[msgspec.Raw]:
    return from_json(payload, _Experiment).requests


# -- blocks -------------------------------------------------------------------------------------------------


def _items(
    split: Callable[[bytes], list[msgspec.Raw]], read: Callable[[bytes], _Row]
) -> Callable[[bytes], Parts[_Row]]:
    """Return a function that divides a document into the requests that `split` returns."""
    return lambda payload: ((0, bytes(item), read) for item in split(payload))


def _lines(read: Callable[[bytes], _Row]) -> Callable[[bytes], Parts[_Row]]:
    return lambda payload: lines_of(payload, read)


def _decoder(name: str, parts: Callable[[bytes], Parts[_Row]]) -> Callable[..., RecordedBlock]:
    """Return the decoder of a program's files."""

    def decode(block: Block, payload: bytes, rejects: Rejects) -> RecordedBlock:
        rows = read_parts(block, payload, parts, f"no request of {name}", rejects)
        digests = _digests([row for _, row in rows])
        requests = pl.DataFrame(
            [(offset, *row) for offset, row in rows],
            schema={"source_offset": pl.Int64, **_REQUESTS},
            orient="row",
        )
        # Of benchmarks with equal contents, the first one has steps.
        different = {digest: number for number, digest in reversed(digests.items())}
        digest = pl.Series([digests[row[0]] for _, row in rows], dtype=pl.String)
        requests = _on_wall_clock(requests).with_columns(digest=digest)
        once = requests.filter(pl.col("benchmark").is_in(list(different.values())))
        keys = partial(first_keys, payload, parts)
        return RecordedBlock(_steps_of_each(once), requests_seen(requests), keys)

    return decode


def _digests(rows: list[_Row]) -> dict[int, str]:
    """Return the number of each benchmark with a digest of its requests, in the order of the numbers."""
    contents: dict[int, Any] = defaultdict(lambda: blake2b(digest_size=BENCHMARK_DIGITS // 2))
    for benchmark, *request in rows:
        contents[benchmark].update(msgspec.json.encode(request))
    return {number: contents[number].hexdigest() for number in sorted(contents)}


def _steps_of_each(requests: pl.DataFrame) -> pl.DataFrame:
    """Return the steps of every benchmark, each numbered from 1."""
    benchmarks = requests.partition_by("benchmark", maintain_order=True)
    return pl.concat([steps_seen(requests.clear()), *map(steps_seen, benchmarks)])


def requests_seen(requests: pl.DataFrame) -> pl.DataFrame:
    """Return requests of a client (`_REQUESTS`, and the `digest` of their benchmark) as spans. One that failed has no times.

    Their ids are those of the benchmark and of the request in it, wherever they are read.
    """
    is_good = ~pl.col("error") & (pl.col("first_s") <= pl.col("last_s"))
    several = pl.col("output_tokens") > 1
    last = pl.when(is_good).then("last_s")
    values = {
        "request_id": pl.col("request_id"),
        "api_prompt_tokens": pl.col("prompt_tokens"),
        "api_completion_tokens": pl.col("output_tokens"),
        "client_ttft_us": pl.when(is_good).then("first_s"),
        "client_e2e_us": last,
        "client_itl_us": pl.when(several).then((last - pl.col("first_s")) / (pl.col("output_tokens") - 1)),
    }
    start = seconds_to_ns(pl.col("start_s"))
    rows = requests.with_columns(
        **{CLIENT_KEYS[column]: value for column, value in values.items()},
        start_unix_ns=start,
        end_unix_ns=start + seconds_to_ns(last.fill_null(0.0)),
    )
    number = pl.int_range(pl.len()).over("benchmark")
    spans = as_spans(rows, CLIENT_SCOPE, CLIENT_KEYS.values(), number)
    return spans.with_columns(trace_id=rows["digest"] + spans["trace_id"])


def steps_seen(requests: pl.DataFrame) -> pl.DataFrame:
    """Return the steps that the tokens of a client's requests (`_REQUESTS`) show, columns as `RECORDED_STEPS` but `file`.

    The result is empty if a request lacks the time of a token. Where requests skip steps, or have two tokens in one, as those of
    several engines do, their times stay unknown.
    """
    good = requests.filter(~pl.col("error")).with_row_index("request")
    names = [name for name in RECORDED_STEPS if name != "file"]
    is_whole = (good["token_s"].list.len() == good["output_tokens"]).fill_null(value=False)
    if not good.height or not is_whole.all():
        return pl.DataFrame(schema=RECORDED_STEPS).select(names)
    token = pl.int_range(pl.len()).over("request")
    tokens = (
        good.explode("token_s")
        .with_columns(token=token, end_ns=seconds_to_ns(pl.col("start_s") + pl.col("token_s")))
        .with_columns(
            busy_ns=pl.coalesce(pl.col("end_ns").shift(1).over("request"), seconds_to_ns(pl.col("start_s"))),
            is_loop=pl.col("token") > 0,
        )
        .with_columns(
            server=pl.lit(UNKNOWN_SERVER),
            lasted_ns=pl.col("end_ns") - pl.col("busy_ns"),
            tokens=pl.when("is_loop").then(1).otherwise("prompt_tokens"),
            context=pl.when("is_loop").then(pl.col("prompt_tokens") + pl.col("token") - 1).otherwise(0),
        )
    )
    steps = steps_of(tokens, 1, STEPS, _APART)
    if _odd_share(tokens) > _MOST_ODD:
        steps = steps.with_columns(cycle_us=pl.lit(None, pl.Float64))
    missing = [pl.lit(None).alias(name) for name in names if name not in steps.columns]
    whole = steps.with_columns(missing).with_columns(source_offset=pl.lit(good["source_offset"].min()))
    return whole.select(pl.col(name).cast(RECORDED_STEPS[name]) for name in names)


def _odd_share(tokens: pl.DataFrame) -> float:
    """Return the share of requests that are not in every step from their first token to their last."""
    spread = (
        batch_numbers(tokens, _APART)
        .group_by("request")
        .agg(odd=pl.col("batch").max() - pl.col("batch").min() + 1 != pl.len())
    )
    return float(spread["odd"].mean() or 0.0)  # type: ignore[arg-type]  # of Booleans


# -- declarations -------------------------------------------------------------------------------------------


def _find(shape: Shape, *patterns: bytes) -> Callable[[bytes], tuple[Shape, Encoding] | None]:
    keys = [re.compile(pattern) for pattern in patterns]
    return lambda head: (shape, "json") if all(key.search(head) for key in keys) else None


_FILLS = "`requests` with the client's TTFT, ITL and E2E, next to the server's if it traces the requests too"
_COUNTED = "; without spans, also `timeline`, as from spans of stock vLLM"
_STEPS = "; without spans, also `steps` and `timeline` with the batch of each step"

for _name, _title, _keys, _parts, _clock, _more in (
    (
        "vllm_bench",
        "`vllm bench serve --save-detailed`",
        (rb'"input_lens"\s*:\s*\[', rb'"ttfts"\s*:\s*\[|"output_lens"\s*:\s*\['),
        _bench_parts,
        "the client's, which begins at boot; the date at the end of the benchmark, local time in seconds, gives the wall clock",
        _STEPS,
    ),
    (
        "guidellm",
        "GuideLLM's report",
        (rb'"guidellm_version"\s*:',),
        _guide_parts,
        "the client's wall clock",
        _COUNTED,
    ),
    (
        "inference_perf",
        "inference-perf's requests",
        (rb'^\s*\[\s*\{\s*"start_time"\s*:[^,{}\[\]]{1,40},\s*"end_time"\s*:',),
        _items(_list, _perf),
        "the client's, which begins at boot",
        _STEPS,
    ),
    (
        "aiperf",
        "AIPerf's records",
        (rb'"request_start_ns"\s*:', rb'"record_processor_id"\s*:'),
        _lines(_aiperf),
        "the client's wall clock",
        _STEPS,
    ),
    (
        "experiment_requests",
        "the requests that an experiment of inference-sim sent",
        (rb'"requests"\s*:\s*\[', rb'"arrival_time_us"\s*:'),
        _items(_experiment, _sent),
        "the client's, which begins at its first request",
        _COUNTED,
    ),
    (
        "experiment_latencies",
        "the latencies that an experiment of inference-sim measured",
        (rb'^\s*\[\s*\{\s*"index"\s*:', rb'"ttft_s"\s*:'),
        _items(_list, _received),
        "none, because it has only durations; the file of sent requests has their times",
        "",
    ),
):
    register(
        Recording(
            name=_name,
            title=_title,
            # One block: the tokens of all requests show the steps.
            find=_find("document", *_keys),
            fills=_FILLS + _more,
            units={"aiperf": "ms and ns", "experiment_requests": "us"}.get(_name, "s"),
            clock=_clock,
            decode=_decoder(_title, _parts),
            asked="a load generator's log",
            sources=(STEPS.name,) if _more == _STEPS else (),
            lacks={"experiment_requests": (TIMES,), "experiment_latencies": LENGTHS}.get(_name, ()),
        )
    )
