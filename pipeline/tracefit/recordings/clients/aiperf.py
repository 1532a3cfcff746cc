"""AIPerf: `profile_export.jsonl`, a line for each request, and the summary `profile_export_aiperf.json`.

Read in aiperf 0.2.0 and 0.13.0 (`aiperf/common/models/record_models.py`, `export_models.py`). genai-perf, which came
before it, writes the same summary as `profile_export_genai_perf.json` (genai-perf 0.0.8 and 0.0.16,
`genai_perf/export_data/json_exporter.py`). `--export-level records` writes the requests, which is the default.

0.13 ran against a stub: beside the summary of the measured phases, `phases/` has a folder with that of only one phase,
for each of them, the warm-up too.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from tracefit.inputs.formats import Recording
from tracefit.inputs.framing import BOM
from tracefit.recordings.clients.base import (
    FILLS_POINTS,
    FILLS_REQUESTS,
    STEPPED,
    WALL,
    ClientRequest,
    declare_client,
    each_line,
    finder,
    number_of,
    require_unit,
    tokens_since,
)
from tracefit.recordings.point_rows import checked, summed, unread_of
from tracefit.recordings.requests import from_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tracefit.inputs.framing import Shape
    from tracefit.inputs.rejects import Encoding
    from tracefit.recordings.point_rows import Point, PointParts

_Nanoseconds = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_WARM_UP = "warmup"


class _AiValue(msgspec.Struct):
    value: float | list[float]
    unit: str


class _AiMetadata(msgspec.Struct):
    request_start_ns: _Nanoseconds
    request_end_ns: _Nanoseconds
    x_request_id: str | None = None
    was_cancelled: bool = False
    benchmark_phase: Any = None


class _AiRequest(msgspec.Struct):
    metadata: _AiMetadata
    metrics: dict[str, msgspec.Raw]
    error: Any = None


_UNIT_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "sec": 1.0, "s": 1.0, "tokens": 1.0}


def _aiperf(record: bytes) -> ClientRequest:
    decoded = from_json(record, _AiRequest)

    def value(name: str) -> Any:
        if name not in decoded.metrics:
            return None
        item = msgspec.json.decode(decoded.metrics[name], type=_AiValue)
        if item.unit not in _UNIT_SECONDS:
            raise msgspec.ValidationError(f"{name} of an unknown unit")
        factor = _UNIT_SECONDS[item.unit]
        return [v * factor for v in item.value] if isinstance(item.value, list) else item.value * factor

    def count(*names: str) -> int | None:
        number = next((n for n in map(value, names) if isinstance(n, float)), None)
        return None if number is None else int(number)

    ttft, gaps, latency = value("time_to_first_token"), value("inter_chunk_latency"), value("request_latency")
    tokens = tokens_since(ttft, gaps or []) if isinstance(ttft, float) else None
    lasted_ns = decoded.metadata.request_end_ns - decoded.metadata.request_start_ns
    # Without streaming there are neither; gaps alone are another version's.
    last_s = tokens[-1] if gaps and tokens else latency if tokens or gaps is None else None
    if last_s is not None:
        require_unit("request_latency", last_s, "request_end_ns - request_start_ns", lasted_ns / 1e9)
    return ClientRequest(
        start_s=decoded.metadata.request_start_ns / 1e9,
        request_id=decoded.metadata.x_request_id,
        token_s=tokens if gaps is not None else None,
        first_s=ttft,
        last_s=last_s,
        prompt_tokens=count("usage_prompt_tokens", "input_sequence_length"),
        output_tokens=count("usage_completion_tokens", "output_sequence_length"),
        error=decoded.error is not None or decoded.metadata.was_cancelled,
        is_result=decoded.metadata.benchmark_phase != _WARM_UP,
    )


FORMAT = declare_client(
    Recording(
        "aiperf",
        "AIPerf's records",
        finder("document", rb'"request_start_ns"\s*:', rb'"record_processor_id"\s*:'),
        fills=FILLS_REQUESTS + STEPPED,
        units="ms and ns",
        clock=WALL,
        versions="aiperf 0.2.0 to 0.13.0",
    ),
    each_line(_aiperf),
)

# -- its summary, and that of genai-perf --------------------------------------------------------------------

_SUMMED_RECORDS = {
    "time_to_first_token": "ttft",
    # (request latency - TTFT) / (output tokens - 1) of each request.
    "inter_token_latency": "tpot",
    "request_latency": "e2e",
}
_COUNTED = {
    "input_sequence_length": "prompt_tokens",
    "output_sequence_length": "output_tokens",
    "request_throughput": "requests_per_s",
    "output_token_throughput": "output_tokens_per_s",
    "request_count": "requests",
    "error_request_count": "failed_requests",
}
_KNOWN = frozenset(
    (
        *(
            "schema_version",
            "aiperf_version",
            "benchmark_id",
            "telemetry_data",
            "telemetry_stats",
            "input_config",
        ),
        *(
            "run_info",
            "was_cancelled",
            "is_complete",
            "incomplete_reason",
            "error_summary",
            "start_time",
            "end_time",
        ),
        *("warmup_metrics", "branch_stats", "records"),
    )
)
"""Keys that are known and not kept, beside metrics: all that have a unit."""
_WRITTEN_BY = {
    "aiperf": "aiperf profile, as profile_export.jsonl",
    "genai-perf": "genai-perf profile, as profile_export.json",
}


def _metric(report: dict[str, Any], name: str) -> dict[str, Any]:
    found = report.get(name)
    if found is not None and not isinstance(found, dict):
        raise msgspec.ValidationError(f"{name} is not a number")
    return found or {}


def _summary(payload: bytes, folder: str) -> Iterable[Point]:
    report = from_json(payload, dict[str, Any])
    config = report.get("input_config")
    # Only the whole run's file has that of its warm-up within.
    phase = None if "warmup_metrics" in report else folder
    load, phase = _load_of(config, phase)
    program = "aiperf" if "aiperf_version" in report or b"aiperf" in payload[:_MOST_SEARCHED] else "genai-perf"
    point: Point = {
        "program": f"{program}, {phase}" if phase == _WARM_UP else program,
        "requests_written_by": _WRITTEN_BY[program],
        "settings": {},
        "unread": unread_of(
            name
            for name, value in report.items()
            if name not in _KNOWN and not (isinstance(value, dict) and "unit" in value)
        ),
    }
    for name, latency in _SUMMED_RECORDS.items():
        metric = _metric(report, name)
        unit = str(metric.get("unit"))
        if not metric:
            continue
        if unit not in _UNIT_SECONDS:
            raise msgspec.ValidationError(f"{name} of an unknown unit")
        for statistic in ("mean", "p50", "p90", "p95", "p99"):
            key, column = "avg" if statistic == "mean" else statistic, f"{latency}_{statistic}_us"
            point[column] = summed(f"{name}.{key}", column, metric.get(key), _UNIT_SECONDS[unit] * 1e6)
    for name, column in _COUNTED.items():
        point[column] = summed(f"{name}.avg", column, _metric(report, name).get("avg"))
    models = [v for name in ("model_names", "model", "models") for v in _values_of(config, name)]
    models += [v for held in _values_of(config, "models") for v in _values_of(held, "name")]
    named = next((v for m in models for v in (m if isinstance(m, list) else [m]) if isinstance(v, str)), None)
    return [checked(point | load | {"model": named})]


def _load_of(config: Any, phase: str | None) -> tuple[Point, str | None]:
    """Return the load of a phase, and its kind; of all measured ones if it is null, and no load if those differ.

    Before 0.13 the configuration has one load, and that of the warm-up under other names.
    """
    listed = next((value for value in _values_of(config, "phases") if isinstance(value, list)), [])
    phases: list[dict[str, Any]] = [each for each in listed if isinstance(each, dict)]
    if not phases:
        return {
            "rate_per_s": next(filter(None, map(number_of, _values_of(config, "request_rate"))), None),
            "concurrency": next(filter(None, map(number_of, _values_of(config, "concurrency"))), None),
        }, None
    chosen = [each for each in phases if each.get("name") == phase] or [
        each for each in phases if each.get("kind", each.get("name")) != _WARM_UP
    ]
    loads = [_load_of_phase(each) for each in chosen]
    kinds = {str(each.get("kind", each.get("name"))) for each in chosen}
    if not loads or any(load != loads[0] for load in loads):
        return {}, None
    return loads[0], kinds.pop() if len(kinds) == 1 else None


def _load_of_phase(phase: dict[str, Any]) -> Point:
    rate = number_of(phase.get("rate")) or None
    # Without a rate, a concurrency is the load only of a phase that keeps to it: others replay the times of a trace.
    is_kept = rate is not None or phase.get("type", "concurrency") == "concurrency"
    return {
        "rate_per_s": rate,
        "concurrency": (number_of(phase.get("concurrency")) or None) if is_kept else None,
    }


def _values_of(config: Any, name: str) -> Iterator[Any]:
    """Yield the values of a key at any depth, the outermost first."""
    level = [config]
    while level:
        objects = [each for each in level if isinstance(each, dict)]
        yield from (each[name] for each in objects if name in each)
        level = [v for each in objects for v in each.values()]
        level += [v for each in level if isinstance(each, list) for v in each]


def _summaries(payload: bytes, path: str) -> PointParts:
    yield 0, payload, partial(_summary, folder=PurePath(path).parent.name)


_MOST_SEARCHED = 1 << 20
_AIPERF_KEYS = [
    re.compile(key)
    for key in (
        rb'"request_latency"\s*:\s*\{',
        rb'"unit"\s*:',
        rb'"avg"\s*:',
        rb'"input_config"\s*:|"input_sequence_length"\s*:\s*\{',
    )
]


def _find_summary(head: bytes) -> tuple[Shape, Encoding] | None:
    is_one = head.removeprefix(BOM).lstrip().startswith(b"{") and all(key.search(head) for key in _AIPERF_KEYS)
    return ("document", "json") if is_one else None


AIPERF_SUMMARY = declare_client(
    Recording(
        "aiperf_summary",
        "AIPerf's and genai-perf's summary",
        _find_summary,
        fills=FILLS_POINTS,
        units="as each value states",
        clock="none",
        versions="aiperf 0.2.0 to 0.13.0, genai-perf 0.0.8 to 0.0.16",
        parts_in="phases",
    ),
    points=_summaries,
)
