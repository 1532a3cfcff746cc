"""LLMPerf: `…_individual_responses.json`, a list of requests without the times at which they were sent, and `…_summary.json`.

Read at ray-project/llmperf, version "2023-08-31" of its results (`token_benchmark_ray.py`, `src/llmperf/common_metrics.py`). Its
`inter_token_latency_s` is the whole time of a request over its output tokens, the prompt included: it is not read, and the time between
tokens follows from the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tracefit.recordings.clients.base import (
    POINTS,
    REQUESTS,
    ClientRow,
    Seconds,
    client_row,
    declare_client,
    finder,
    items_of,
    no_parts,
    number_of,
    raw_items,
)
from tracefit.recordings.point_rows import checked
from tracefit.recordings.requests import TokenCount, from_json
from tracefit.tables.dialects import NOT_SENT_S

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tracefit.recordings.point_rows import Point, PointParts


class _Response(msgspec.Struct):
    ttft_s: Seconds | None = None
    end_to_end_latency_s: Seconds | None = None
    number_input_tokens: TokenCount | None = None
    number_output_tokens: TokenCount | None = None
    error_code: Any = None


def _response(record: bytes) -> ClientRow:
    got = from_json(record, _Response)
    return client_row(
        NOT_SENT_S,
        first_s=got.ttft_s,
        last_s=got.end_to_end_latency_s,
        prompt_tokens=got.number_input_tokens,
        output_tokens=got.number_output_tokens,
        error=bool(got.error_code),
    )


FORMAT = declare_client(
    "llmperf",
    "LLMPerf's responses",
    finder("document", rb"^\s*\[\s*\{", rb'"end_to_end_latency_s"\s*:', rb'"ttft_s"\s*:'),
    items_of(raw_items, _response),
    versions='ray-project/llmperf, results of version "2023-08-31"',
    fills=REQUESTS,
    clock="none: it has durations only",
)


def _summary(payload: bytes) -> Iterable[Point]:
    report = from_json(payload, dict[str, Any])
    point: Point = {
        "program": "llmperf",
        "requests_written_by": "llmperf, as …_individual_responses.json",
        "settings": {},
        "unread": [],
    }
    for name, latency in (("ttft_s", "ttft"), ("end_to_end_latency_s", "e2e")):
        for statistic in ("mean", "p50", "p90", "p95", "p99"):
            key = statistic if statistic == "mean" else f"quantiles_{statistic}"
            if value := number_of(report.get(f"results_{name}_{key}")):
                point[f"{latency}_{statistic}_us"] = value * 1e6
    per_minute = number_of(report.get("results_num_completed_requests_per_min"))
    model = report.get("model")
    point |= {
        "model": model if isinstance(model, str) else None,
        "concurrency": number_of(report.get("num_concurrent_requests")) or None,
        "prompt_tokens": number_of(report.get("results_number_input_tokens_mean")) or None,
        "output_tokens": number_of(report.get("results_number_output_tokens_mean")) or None,
        "requests": int(number_of(report.get("results_num_completed_requests"))),
        "failed_requests": int(number_of(report.get("results_number_errors"))),
        "requests_per_s": per_minute / 60 or None,
    }
    ttft, e2e, output = (point.get(name) for name in ("ttft_mean_us", "e2e_mean_us", "output_tokens"))
    if ttft and e2e and output and output > 1:
        point["tpot_mean_us"] = (e2e - ttft) / (output - 1)
    return [checked(point)]


def _summaries(payload: bytes, _: str) -> PointParts:
    yield 0, payload, _summary


SUMMARY = declare_client(
    "llmperf_summary",
    "LLMPerf's summary",
    finder("document", rb'"num_concurrent_requests"\s*:', rb'"results_ttft_s_[a-z]'),
    no_parts,
    _summaries,
    versions='ray-project/llmperf, results of version "2023-08-31"',
    fills=POINTS,
    clock="none",
)
