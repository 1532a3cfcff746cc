"""GuideLLM's report: one document, JSON or YAML, with several benchmarks.

Read in guidellm 0.2.1 and 0.3.0 (`guidellm/benchmark/benchmark.py`: times beside lengths), 0.4.0 to 0.6.0 and 0.8.1
(`guidellm/schemas/…/request_stats.py`: times in `info.timings`). 0.3.0, 0.5.4 and 0.8.1 ran against a stub. A report
may hold a sample of the requests only, which are not the load: they have latencies then, without arrivals. Requests
before `measure_start_time` are a warm-up.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from tracefit.errors import UsageError
from tracefit.inputs.formats import Recording
from tracefit.recordings.blocks import UNREADABLE_RECORD
from tracefit.recordings.clients.base import (
    COUNTED,
    FILLS_POINTS,
    FILLS_REQUESTS,
    WALL,
    ClientRequest,
    Seconds,
    declare_client,
    number_of,
    refuse,
)
from tracefit.recordings.point_rows import checked, summed, unread_of
from tracefit.recordings.requests import TokenCount, from_json
from tracefit.server.documents import parse_yaml_object
from tracefit.tables.dialects import NOT_SENT_S

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tracefit.inputs.framing import Shape
    from tracefit.inputs.rejects import Encoding
    from tracefit.recordings.point_rows import Point, PointParts
    from tracefit.recordings.requests import Parts

PROGRAM = "guidellm"
_WRITTEN_BY = "guidellm with a JSON report, and no limit on sampled requests"


class _Timings(msgspec.Struct):
    request_start: Seconds | None = None
    request_end: Seconds | None = None
    first_token_iteration: Seconds | None = None
    last_token_iteration: Seconds | None = None


class _GuideInfo(msgspec.Struct):
    timings: _Timings


class _GuideRequest(msgspec.Struct):
    request_id: str | None = None
    info: _GuideInfo | None = None
    response_id: str | None = None
    prompt_tokens: TokenCount | None = None
    output_tokens: TokenCount | None = None
    # Before 0.4.
    start_time: Seconds | None = None
    end_time: Seconds | None = None
    first_token_time: Seconds | None = None
    last_token_time: Seconds | None = None


class _GuideRequests(msgspec.Struct):
    successful: list[msgspec.Raw] | None = None
    errored: list[msgspec.Raw] | None = None
    incomplete: list[msgspec.Raw] | None = None


class _Totals(msgspec.Struct):
    successful: Any = None


class _GuideMetrics(msgspec.Struct):
    request_totals: _Totals | None = None


class _SchedulerMetrics(msgspec.Struct):
    measure_start_time: Any = None


class _GuideBenchmark(msgspec.Struct):
    requests: _GuideRequests | None = None
    metrics: _GuideMetrics | None = None
    request_totals: _Totals | None = None
    scheduler_metrics: _SchedulerMetrics | None = None


class _Guide(msgspec.Struct):
    benchmarks: list[msgspec.Raw]


def _guide(record: bytes, *, benchmark: int, error: bool, is_sample: bool, measured_s: float) -> ClientRequest:
    decoded = msgspec.json.decode(record, type=_GuideRequest)
    if decoded.info is not None:
        times = decoded.info.timings
    else:
        ends = (decoded.end_time, decoded.first_token_time, decoded.last_token_time)
        times = _Timings(decoded.start_time, *ends)
    start = times.request_start
    if start is None:
        raise msgspec.ValidationError("no time of its start")
    first, last = times.first_token_iteration, times.last_token_iteration
    if first is None:
        # Without streaming there is neither; one without the other is another version's.
        last = times.request_end if last is None and not error else None
    return ClientRequest(
        start_s=NOT_SENT_S if is_sample else start,
        request_id=decoded.response_id or decoded.request_id,
        benchmark=benchmark,
        first_s=None if first is None else first - start,
        last_s=None if last is None else last - start,
        prompt_tokens=decoded.prompt_tokens or None,  # GuideLLM writes 0 if it could not count them
        output_tokens=decoded.output_tokens,
        error=error,
        is_result=start >= measured_s,
    )


def _report(payload: bytes) -> list[msgspec.Raw]:
    """Return the benchmarks of a report in JSON or YAML.

    Raises:
        msgspec.DecodeError: It is not a report.
    """
    if not _YAML.match(payload[:_MOST_SEARCHED]):
        return from_json(payload, _Guide).benchmarks
    try:
        document = parse_yaml_object(payload, where="the report")
    except UsageError as error:
        raise msgspec.ValidationError(error.what) from None
    return from_json(msgspec.json.encode(document), _Guide).benchmarks


def _guide_parts(payload: bytes) -> Parts[ClientRequest]:
    for number, text in enumerate(_report(payload)):
        try:
            benchmark = from_json(bytes(text), _GuideBenchmark)
        except UNREADABLE_RECORD as error:
            yield 0, bytes(text), partial(refuse, error)
            continue
        if benchmark.requests is None and benchmark.metrics is None:
            yield 0, bytes(text), partial(refuse, msgspec.ValidationError("neither requests nor metrics"))
        lists = benchmark.requests or _GuideRequests()
        totals = (benchmark.metrics and benchmark.metrics.request_totals) or benchmark.request_totals
        good = lists.successful or []
        is_sample = totals is not None and number_of(totals.successful) > len(good)
        measured_s = number_of(benchmark.scheduler_metrics and benchmark.scheduler_metrics.measure_start_time)
        failed = (lists.errored or []) + (lists.incomplete or [])
        for requests, is_error in ((good, False), (failed, True)):
            read = partial(_guide, benchmark=number, error=is_error, is_sample=is_sample, measured_s=measured_s)
            yield from ((0, bytes(request), read) for request in requests)


# -- its summary --------------------------------------------------------------------------------------------

_SUMMED_REPORT = {
    "time_to_first_token_ms": ("ttft", 1e3),
    # Between the first token and the last, for each request; `time_per_output_token_ms` counts the prompt's time too.
    "inter_token_latency_ms": ("tpot", 1e3),
    "request_latency": ("e2e", 1e6),
}

_MEAN_KEYS = {
    "prompt_token_count": "prompt_tokens",
    "output_token_count": "output_tokens",
    "requests_per_second": "requests_per_s",
    "output_tokens_per_second": "output_tokens_per_s",
}
_KNOWN = frozenset(
    (
        *(
            "type_",
            "config",
            "scheduler_state",
            "scheduler_metrics",
            "metrics",
            "requests",
            "warnings",
            "start_time",
        ),
        *(
            "end_time",
            "duration",
            "warmup_duration",
            "cooldown_duration",
            "id_",
            "run_id",
            "args",
            "run_stats",
            "worker",
        ),
        *("request_loader", "extras", "request_totals", "request_samples", "benchmark"),
        *(
            "text",
            "image",
            "video",
            "audio",
            "tool_call",
            "turns",
            "root_dispatch_delay",
            "slo_determined_requests",
            "slo_attainment",
            "request_goodput",
        ),
        *(
            "request_dispatch_delay",
            "turn_predecessor_delay",
            "turn_scheduling_delay",
            "request_scheduled_latency",
        ),
    )
)
"""Keys of a benchmark and of its metrics that are known and not kept, beside metrics that are given by status."""


def _of_good(metrics: dict[str, Any], name: str) -> dict[str, Any]:
    found = metrics.get(name)
    good = found.get("successful") if isinstance(found, dict) else None
    return good if isinstance(good, dict) and number_of(good.get("count")) else {}


def _point(text: bytes) -> Iterable[Point]:
    benchmark = from_json(text, dict[str, Any])
    metrics = benchmark.get("metrics")
    if not isinstance(metrics, dict) or not any(_of_good(metrics, name) for name in _SUMMED_REPORT):
        return []  # nothing succeeded
    kept = {name for name, value in metrics.items() if isinstance(value, dict) and "successful" in value}
    point: Point = {
        "program": PROGRAM,
        "requests_written_by": _WRITTEN_BY,
        "settings": {},
        "unread": unread_of([*(benchmark.keys() - _KNOWN), *(metrics.keys() - kept - _KNOWN)]),
    }
    for name, (latency, factor) in _SUMMED_REPORT.items():
        good = _of_good(metrics, name)
        percentiles = good.get("percentiles")
        values = {"mean": good.get("mean"), **(percentiles if isinstance(percentiles, dict) else {})}
        for statistic in ("mean", "p50", "p90", "p95", "p99"):
            column = f"{latency}_{statistic}_us"
            point[column] = summed(f"{name}.{statistic}", column, values.get(statistic), factor)
    for name, column in _MEAN_KEYS.items():
        point[column] = summed(f"{name}.mean", column, _of_good(metrics, name).get("mean"))
    totals = metrics.get("request_totals") or benchmark.get("request_totals")
    if isinstance(totals, dict):
        point["requests"] = summed("request_totals.successful", "requests", totals.get("successful"))
        failed = summed("request_totals.errored", "failed_requests", totals.get("errored"))
        point["failed_requests"] = failed or 0
    point["duration_us"] = summed("duration", "duration_us", benchmark.get("duration"), 1e6)
    held = (_object(benchmark.get("config")).get("backend"), benchmark.get("worker"))
    models = (_object(held[0]).get("model"), _object(held[1]).get("backend_model"))
    point["model"] = next((model for model in models if isinstance(model, str)), None)
    return [checked(point | _load(benchmark))]


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _load(benchmark: dict[str, Any]) -> Point:
    """Return the load of a benchmark, from the strategy of its scheduler."""
    held = (benchmark.get("config"), benchmark.get("args"))
    strategy: dict[str, Any] = next(
        (h["strategy"] for h in held if isinstance(h, dict) and isinstance(h.get("strategy"), dict)), {}
    )
    return load_of(strategy)


def load_of(strategy: dict[str, Any]) -> Point:
    """Return the load of a scheduler's strategy."""
    match strategy.get("type_"):
        case "synchronous":
            return {"concurrency": 1.0}
        case "concurrent":
            return {"concurrency": number_of(strategy.get("streams")) or None}
        case "constant" | "poisson":
            return {"rate_per_s": number_of(strategy.get("rate")) or None}
        case "throughput":
            return {"concurrency": number_of(strategy.get("max_concurrency")) or None}
    return {}


def _points(payload: bytes, _: str) -> PointParts:
    return ((0, bytes(text), _point) for text in _report(payload))


# -- declaration --------------------------------------------------------------------------------------------

_MOST_SEARCHED = 1 << 20
_YAML = re.compile(rb"\s*(?:args|benchmarks|metadata|config|conclusions):[ \n]")
_JSON_KEY = re.compile(rb'"guidellm_version"\s*:|"type_"\s*:\s*"generative_benchmark"')
_YAML_KEY = re.compile(
    rb"\n\s*(?:-\s+)?(?:guidellm_version:|type_: generative_(?:benchmark|request_stats|text_response))"
)


def _find(head: bytes) -> tuple[Shape, Encoding] | None:
    if _YAML.match(head):
        return ("document", "text") if _YAML_KEY.search(head) else None
    return ("document", "json") if _JSON_KEY.search(head) else None


FORMAT = declare_client(
    Recording(
        "guidellm",
        "GuideLLM's report",
        _find,
        fills=f"{FILLS_POINTS}; {FILLS_REQUESTS}{COUNTED}",
        units="s",
        clock=WALL,
        versions="guidellm 0.2.1 to 0.8.1, JSON and YAML",
    ),
    _guide_parts,
    _points,
)
