"""inference-perf: `per_request_lifecycle_metrics.json`, and the summaries of stages and of the run.

Read in inference-perf 0.1.1 and 0.2.0 (`inference_perf/apis/base.py`: lengths and times in `info` itself), 0.5.0 (in
`info.response_info`) and 0.7.0 (in `info.request_metrics` and `info.response_metrics`). Without streaming a request has
its end only. `request_lifecycle.per_request: true` writes the requests.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from tracefit.inputs.formats import Recording
from tracefit.recordings.clients.base import (
    BOOT,
    FILLS_POINTS,
    FILLS_REQUESTS,
    STEPPED,
    ClientRequest,
    Seconds,
    declare_client,
    finder,
    items_of,
    raw_items,
)
from tracefit.recordings.point_rows import checked, summed, unread_of
from tracefit.recordings.requests import TokenCount, from_json

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tracefit.inputs.framing import Shape
    from tracefit.inputs.rejects import Encoding
    from tracefit.recordings.point_rows import Point, PointParts

_PROGRAM = "inference-perf"
_WRITTEN_BY = "inference-perf with report.request_lifecycle.per_request: true"


class _Text(msgspec.Struct):
    input_tokens: TokenCount | None = None


class _RequestMetrics(msgspec.Struct):
    text: _Text | None = None


class _ResponseMetrics(msgspec.Struct):
    output_tokens: TokenCount | None = None
    output_token_times: list[Seconds] = []


class _PerfInfo(msgspec.Struct):
    request_metrics: _RequestMetrics | None = None
    response_metrics: _ResponseMetrics | None = None
    # Before 0.7.
    response_info: _ResponseMetrics | None = None
    # Before 0.5 they are here.
    input_tokens: TokenCount | None = None
    output_tokens: TokenCount | None = None
    output_token_times: list[Seconds] = []


class _PerfRequest(msgspec.Struct):
    start_time: Seconds
    end_time: Seconds
    info: _PerfInfo | None = None
    error: Any = None


def _holds_lists(record: bytes) -> bool:
    """Return whether the facts of a request hold a list of numbers."""
    info = _object(msgspec.json.decode(record).get("info"))
    held = [info, *(_object(info.get(name)) for name in ("response_metrics", "response_info"))]
    lists = (value for each in held for value in each.values() if isinstance(value, list) and value)
    return any(isinstance(value[0], int | float) for value in lists)


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _perf(record: bytes) -> ClientRequest:
    decoded = msgspec.json.decode(record, type=_PerfRequest)
    info = decoded.info or _PerfInfo()
    response = info.response_metrics or info.response_info or info
    # Without streaming there are only lengths; other lists are times under another name.
    is_whole = response.output_tokens is not None and not _holds_lists(record)
    text = info.request_metrics.text if info.request_metrics else info
    tokens = [time - decoded.start_time for time in response.output_token_times]
    return ClientRequest(
        start_s=decoded.start_time,
        token_s=tokens or None,
        first_s=tokens[0] if tokens else None,
        last_s=tokens[-1] if tokens else decoded.end_time - decoded.start_time if is_whole else None,
        prompt_tokens=text.input_tokens if text else None,
        output_tokens=response.output_tokens,
        error=decoded.error is not None,
    )


FORMAT = declare_client(
    Recording(
        "inference_perf",
        "inference-perf's requests",
        finder("document", rb'^\s*\[\s*\{\s*"start_time"\s*:[^,{}\[\]]{1,40},\s*"end_time"\s*:'),
        fills=FILLS_REQUESTS + STEPPED,
        units="s",
        clock=BOOT,
        versions="inference-perf 0.1.1 to 0.7.0, with and without streaming",
    ),
    items_of(raw_items, _perf),
)

# -- its summaries ------------------------------------------------------------------------------------------

_SUMMED_REQUESTS = {
    "time_to_first_token": "ttft",
    "time_per_output_token": "tpot",
    "inter_token_latency": "itl",
    "request_latency": "e2e",
}
_KNOWN = frozenset(
    (
        *("benchmark_time_seconds", "load_summary", "successes", "failures", "retries", "stage_metadata"),
        "normalized_time_per_output_token",
    )
)
"""Keys of a report and of its latencies that are known and not kept."""


def _summary(payload: bytes) -> Iterable[Point]:
    report = from_json(payload, dict[str, Any])
    load, good, failed = (_object(report.get(name)) for name in ("load_summary", "successes", "failures"))
    latencies = _object(good.get("latency"))
    point: Point = {
        "program": _PROGRAM,
        "requests_written_by": _WRITTEN_BY,
        "settings": {},
        "unread": unread_of([*(report.keys() - _KNOWN), *(latencies.keys() - _SUMMED_REQUESTS.keys() - _KNOWN)]),
    }
    for name, latency in _SUMMED_REQUESTS.items():
        values = _object(latencies.get(name))
        for statistic, keys in {
            "mean": ("mean",),
            "p50": ("median", "p50"),
            **{f"p{q}": (f"p{q}",) for q in (90, 95, 99)},
        }.items():
            column = f"{latency}_{statistic}_us"
            found = (summed(f"{name}.{key}", column, values.get(key), 1e6) for key in keys)
            point[column] = next(filter(None, found), None)
    rates = _object(good.get("throughput"))
    # A stage that keeps a concurrency has a rate too: the one that its requests were planned by.
    slots = summed("concurrency", "concurrency", load.get("concurrency"))
    point |= {
        "concurrency": slots,
        "rate_per_s": None if slots else summed("requested_rate", "rate_per_s", load.get("requested_rate")),
        "requests": summed("successes.count", "requests", good.get("count")),
        "failed_requests": summed("failures.count", "failed_requests", failed.get("count")) or 0,
        "duration_us": summed("benchmark_time_seconds", "duration_us", report.get("benchmark_time_seconds"), 1e6),
    }
    for name, column, value in (
        ("prompt_len.mean", "prompt_tokens", _object(good.get("prompt_len")).get("mean")),
        ("output_len.mean", "output_tokens", _object(good.get("output_len")).get("mean")),
        ("requests_per_sec", "requests_per_s", rates.get("requests_per_sec")),
        ("output_tokens_per_sec", "output_tokens_per_s", rates.get("output_tokens_per_sec")),
    ):
        point[column] = summed(name, column, value)
    return [checked(point)]


def _summaries(payload: bytes, _: str) -> PointParts:
    yield 0, payload, _summary


_INFERENCE_PERF_KEYS = [
    re.compile(key) for key in (rb'"load_summary"\s*:', rb'"successes"\s*:', rb'"failures"\s*:|"latency"\s*:')
]


def _find_summary(head: bytes) -> tuple[Shape, Encoding] | None:
    return ("document", "json") if all(key.search(head) for key in _INFERENCE_PERF_KEYS) else None


INFERENCE_PERF_SUMMARY = declare_client(
    Recording(
        "inference_perf_summary",
        "inference-perf's summary of a run or a stage",
        _find_summary,
        fills=FILLS_POINTS,
        units="s",
        clock="none",
        versions="inference-perf 0.1.1 to 0.7.0",
    ),
    points=_summaries,
)
