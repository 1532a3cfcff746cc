"""LLMPerf: `…_individual_responses.json`, a list of requests without the times at which they were sent, and
`…_summary.json`.

Read at ray-project/llmperf, version "2023-08-31" of its results (`token_benchmark_ray.py`,
`src/llmperf/common_metrics.py`). Its `inter_token_latency_s` is the whole time of a request over its output tokens, the
prompt included: it is not read, and the time between tokens follows from the others.
"""

from __future__ import annotations

from contextlib import suppress
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from tracefit.inputs.formats import Recording
from tracefit.recordings.blocks import UNREADABLE_RECORD
from tracefit.recordings.clients.base import (
    FILLS_POINTS,
    FILLS_REQUESTS,
    ClientRequest,
    Seconds,
    declare_client,
    finder,
    items_of,
    raw_items,
)
from tracefit.recordings.point_rows import checked, summed, unread_of
from tracefit.recordings.requests import TokenCount, from_json
from tracefit.tables.dialects import NOT_SENT_S
from tracefit.tables.units import DECODE_STEP_US, unit_question

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tracefit.recordings.point_rows import Point, PointParts


_LEAST_RESPONSE_GAPS = 20
"""Fewest responses whose times are compared with those that a step takes."""


class _Response(msgspec.Struct):
    ttft_s: Seconds | None = None
    end_to_end_latency_s: Seconds | None = None
    number_input_tokens: TokenCount | None = None
    number_output_tokens: TokenCount | None = None
    error_code: Any = None


def _response(record: bytes) -> ClientRequest:
    got = from_json(record, _Response)
    return ClientRequest(
        start_s=NOT_SENT_S,
        first_s=got.ttft_s,
        last_s=got.end_to_end_latency_s,
        prompt_tokens=got.number_input_tokens,
        output_tokens=got.number_output_tokens,
        error=bool(got.error_code),
    )


def _responses(payload: bytes) -> list[msgspec.Raw]:
    """Return the responses of a file.

    Raises:
        msgspec.DecodeError: It cannot be read, or its times are longer than those of any server: nothing else in it
            shows their unit.
    """
    items = raw_items(payload)
    gaps = [gap for item in items if (gap := _gap_s(item))]
    if len(gaps) >= _LEAST_RESPONSE_GAPS and (typical := median(gaps)) > DECODE_STEP_US[1] / 1e6:
        raise msgspec.ValidationError(
            f"the median time between tokens is {typical:,.0f} s, longer than a step: {unit_question(1, 's')}"
        )
    return items


def _gap_s(item: msgspec.Raw) -> float:
    """Return the mean time between the tokens of a response; 0 if it cannot be read."""
    with suppress(*UNREADABLE_RECORD):
        got = msgspec.json.decode(item, type=_Response)
        if got.ttft_s and got.end_to_end_latency_s and (got.number_output_tokens or 0) > 1:
            return (got.end_to_end_latency_s - got.ttft_s) / ((got.number_output_tokens or 0) - 1)
    return 0.0


FORMAT = declare_client(
    Recording(
        "llmperf",
        "LLMPerf's responses",
        finder("document", rb"^\s*\[\s*\{", rb'"end_to_end_latency_s"\s*:', rb'"ttft_s"\s*:'),
        fills=FILLS_REQUESTS,
        units="s",
        clock="none: it has durations only",
        versions='ray-project/llmperf, results of version "2023-08-31"',
    ),
    items_of(_responses, _response),
)


_KNOWN = frozenset(
    (
        *("version", "name", "model", "mean_input_tokens", "stddev_input_tokens", "mean_output_tokens"),
        *("stddev_output_tokens", "num_concurrent_requests", "timestamp", "additional_sampling_params"),
    )
)
"""Keys that are known and not kept, beside results."""


def _summary(payload: bytes) -> Iterable[Point]:
    report = from_json(payload, dict[str, Any])
    point: Point = {
        "program": "llmperf",
        "requests_written_by": "llmperf, as …_individual_responses.json",
        "settings": {},
        "unread": unread_of(name for name in report if name not in _KNOWN and not name.startswith("results_")),
    }
    for name, latency in (("ttft_s", "ttft"), ("end_to_end_latency_s", "e2e")):
        for statistic in ("mean", "p50", "p90", "p95", "p99"):
            key = f"results_{name}_{statistic if statistic == 'mean' else f'quantiles_{statistic}'}"
            column = f"{latency}_{statistic}_us"
            point[column] = summed(key, column, report.get(key), 1e6)
    for key, column, factor in (
        ("num_concurrent_requests", "concurrency", 1.0),
        ("results_number_input_tokens_mean", "prompt_tokens", 1.0),
        ("results_number_output_tokens_mean", "output_tokens", 1.0),
        ("results_num_completed_requests", "requests", 1.0),
        ("results_number_errors", "failed_requests", 1.0),
        ("results_num_completed_requests_per_min", "requests_per_s", 1 / 60),
    ):
        point[column] = summed(key, column, report.get(key), factor)
    model = report.get("model")
    point["model"] = model if isinstance(model, str) else None
    ttft, e2e, output = (point.get(name) for name in ("ttft_mean_us", "e2e_mean_us", "output_tokens"))
    if ttft and e2e and output and output > 1:
        point["tpot_mean_us"] = (e2e - ttft) / (output - 1)
    return [checked(point)]


def _summaries(payload: bytes, _: str) -> PointParts:
    yield 0, payload, _summary


LLMPERF_SUMMARY = declare_client(
    Recording(
        "llmperf_summary",
        "LLMPerf's summary",
        finder("document", rb'"num_concurrent_requests"\s*:', rb'"results_ttft_s_[a-z]'),
        fills=FILLS_POINTS,
        units="s",
        clock="none",
        versions='ray-project/llmperf, results of version "2023-08-31"',
    ),
    points=_summaries,
)
