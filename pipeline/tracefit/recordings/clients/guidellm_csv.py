"""GuideLLM's CSV: a row for each benchmark with sums over its requests, and no request.

Read in guidellm 0.2.1 and 0.3.1 (`guidellm/benchmark/output.py`: a line of names) and 0.4.0 to 0.8.1
(`guidellm/benchmark/outputs/csv.py`: three, of group, field and unit or statistic); 0.5.4 ran against a stub. Until 0.6
the names are those of the first benchmark: a row with other columns cannot be read below them. From 0.4 to 0.7 a row
names only the kind of its strategy, and all those of the run are in its profile.
"""

from __future__ import annotations

import csv
import math
import re
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from tracefit.inputs.formats import Recording
from tracefit.inputs.framing import records
from tracefit.recordings.blocks import UNREADABLE_RECORD
from tracefit.recordings.clients.base import FILLS_POINTS, declare_client, number_of
from tracefit.recordings.clients.guidellm import PROGRAM, load_of
from tracefit.recordings.point_rows import checked

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tracefit.inputs.framing import Shape
    from tracefit.inputs.rejects import Encoding
    from tracefit.recordings.point_rows import Point, PointParts

_WRITTEN_BY = (
    "guidellm with a JSON report beside the CSV (--output-path report.json, or --output kind=json), and "
    "no limit on sampled requests"
)
_FLAT_HEADER = re.compile(rb"^(?:\xef\xbb\xbf)?Type,Run Id,Id,Name,Start Time,")
_GROUPED = re.compile(rb"^(?:\xef\xbb\xbf)?Run(?:time)? Info,Run(?:time)? Info,")
_NAMES_OF_GROUPED = 3
_OLD_STATISTICS = re.compile(r" (mean|median|std dev|\[min, .*\])$")

_LATENCY_LABELS = {
    # Since 0.4, and before.
    "ttft": (("time to first token successful ms", "successful time to first token ms"), 1e3),
    # Between the first token and the last, for each request; the time per output token counts the prompt's time too.
    "tpot": (("inter token latency successful ms", "successful inter token latency ms"), 1e3),
    "e2e": (("request latency successful sec", "successful request latency"), 1e6),
}
_MEAN_LABELS = {
    "prompt_tokens": ("token metrics successful input tokens", "successful prompt token count"),
    "output_tokens": ("token metrics successful output tokens", "successful output token count"),
    "requests_per_s": ("server throughput successful requests/sec", "successful requests per second"),
    "output_tokens_per_s": (
        "token throughput successful output tokens/sec",
        "successful output tokens per second",
    ),
}
_COUNT_LABELS = {
    "requests": ("request counts successful", "successful requests"),
    "failed_requests": ("request counts errored", "errored requests"),
}
_LISTED_PERCENTILES = {"p90": 7, "p95": 8, "p99": 9}
"""Places of percentiles in a cell: [min, 0.1, 1, 5, 10, 25, 75, 90, 95, 99, max]."""
_LIST_SIZE = 11


def _find(head: bytes) -> tuple[Shape, Encoding] | None:
    return ("document", "csv") if _FLAT_HEADER.match(head) or _GROUPED.match(head) else None


def _fields(line: bytes) -> list[str]:
    (fields,) = csv.reader([line.decode()], strict=True)
    return [field.strip() for field in fields]


def _rows(payload: bytes, _: str) -> PointParts:
    lines = list(records(payload, "lines"))
    count = _NAMES_OF_GROUPED if _GROUPED.match(payload) else 1
    headers = [_fields(line.payload) for line in lines[:count]]
    if len(headers) < count or len({len(header) for header in headers}) > 1:
        raise msgspec.ValidationError("the names of the columns are not whole")
    names = [_OLD_STATISTICS.sub(_spelt, " ".join(filter(None, parts)).lower()) for parts in zip(*headers, strict=True)]
    above = [line.payload for line in lines[:count]]
    for line in lines[count:]:
        if line.payload not in above:  # files may stand one behind another
            yield line.offset, line.payload, partial(_point, names)
    if len(lines) == count:
        raise msgspec.ValidationError("no benchmark")


def _spelt(match: re.Match[str]) -> str:
    return " percentiles" if match[1].startswith("[") else match[0]


def _point(names: list[str], line: bytes) -> Iterable[Point]:
    try:
        fields = _fields(line)
    except csv.Error as error:
        raise msgspec.ValidationError(f"no row of a table: {error}") from None
    row = dict(zip(names, fields, strict=False))
    shifted = [v for name, v in row.items() if name.endswith(" percentiles") and v and not v.startswith("[")]
    if len(fields) != len(names) or shifted:
        raise msgspec.ValidationError(
            "its columns are not those of the first benchmark, whose names stand above: guidellm before 0.7 writes "
            "such rows; give the JSON report"
        )
    point: Point = {"program": PROGRAM, "requests_written_by": _WRITTEN_BY, "settings": {}, "unread": []}
    for latency, (spellings, factor) in _LATENCY_LABELS.items():
        for statistic, value in _statistics(row, spellings).items():
            point[f"{latency}_{statistic}_us"] = value * factor
    point |= {column: _statistics(row, spellings).get("mean") for column, spellings in _MEAN_LABELS.items()}
    point |= {column: int(_number(row, *spellings)) for column, spellings in _COUNT_LABELS.items()}
    point["duration_us"] = _number(row, "timings duration sec", "duration") * 1e6 or None
    return [checked(point | _load(row) | {"model": _model(row)})]


def _number(row: Mapping[str, str], *names: str) -> float:
    text = next((row[name] for name in names if name in row), "")
    try:
        number = float(text or 0)
    except ValueError:
        raise msgspec.ValidationError(f"{names[0]} is not a number") from None
    if number < 0 or number == math.inf:
        raise msgspec.ValidationError(f"{names[0]} is out of range")
    return number_of(number)


def _statistics(row: Mapping[str, str], spellings: tuple[str, ...]) -> dict[str, float]:
    """Return the mean, the median and percentiles of a quantity, without those that are 0 or missing."""
    values = {
        statistic: _number(row, *(f"{name} {word}" for name in spellings))
        for statistic, word in (("mean", "mean"), ("p50", "median"))
    }
    text = next((row[f"{name} percentiles"] for name in spellings if f"{name} percentiles" in row), "")
    if text:
        listed = msgspec.json.decode(text.replace("nan", "null").replace("None", "null"), type=list[float | None])
        if len(listed) != _LIST_SIZE:
            raise msgspec.ValidationError(f"{len(listed)} percentiles in place of {_LIST_SIZE}")
        values |= {statistic: number_of(listed[position]) for statistic, position in _LISTED_PERCENTILES.items()}
    return {statistic: value for statistic, value in values.items() if value}


# -- its load -----------------------------------------------------------------------------------------------


def _object(row: Mapping[str, str], *names: str) -> dict[str, Any]:
    text = next((row[name] for name in names if name in row), "")
    try:
        found = msgspec.json.decode(text)
    except UNREADABLE_RECORD:
        return {}
    return found if isinstance(found, dict) else {}


def _load(row: Mapping[str, str]) -> Point:
    kind, _, value = row.get("benchmark strategy", row.get("name", "")).partition("@")
    try:
        amount = number_of(float(value))
    except ValueError:
        amount = 0.0
    if amount or kind == "synchronous":
        return load_of({"type_": kind, "streams": amount, "rate": amount, "max_concurrency": amount})
    profile, index = _object(row, "run info profile"), int(_number(row, "run info run index"))
    done = profile.get("completed_strategies")
    if isinstance(done, list) and index < len(done) and isinstance(done[index], dict):
        return load_of(done[index])
    listed = {
        name: values[index]
        for name in ("streams", "rate")
        if isinstance(values := profile.get(name), list) and index < len(values)
    }
    return load_of({"type_": kind, **listed})


def _model(row: Mapping[str, str]) -> str | None:
    held = (_object(row, "run info backend").get("model"), _object(row, "worker").get("backend_model"))
    return next((model for model in held if isinstance(model, str)), None)


FORMAT = declare_client(
    Recording(
        "guidellm_csv",
        "GuideLLM's CSV",
        _find,
        fills=FILLS_POINTS,
        units="in the names of its columns",
        clock="none",
        versions="guidellm 0.2.1 to 0.8.1",
    ),
    points=_rows,
)
