"""Tables of a benchmark's points that someone keeps: CSV (comma, semicolon, tab or bar) or JSON.

JSON is a list of objects, lines, an object that holds such a list, or one of columns. `point_rows` says what the names
mean.
"""

from __future__ import annotations

import csv
import json
import re
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl

from tracefit.inputs.formats import Recording, register
from tracefit.inputs.framing import BOM, records
from tracefit.recordings.blocks import RecordedBlock
from tracefit.recordings.point_rows import meaning_of, no_unit, point_of, read_points, spans_of_points
from tracefit.recordings.requests import from_json
from tracefit.tables.points import POINT_LATENCIES
from tracefit.tables.rows import RECORDED_STEPS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from tracefit.inputs.blocks import Block
    from tracefit.inputs.framing import Shape
    from tracefit.inputs.rejects import Encoding, Rejects
    from tracefit.recordings.point_rows import Point, PointParts

_PROGRAM = "table"
_DELIMITERS = (b",", b";", b"\t", b"|")
_MOST_HEADER = 16 << 10
_RULE, _COMMA = re.compile(r":?-+:?"), re.compile(r"[-+]?\d+(?:,\d+)+")
_JSON_LATENCY = re.compile(
    rb'"[^"\\]{0,40}(?:ttft|tpot|itl|time_to_first_token|time_per_output_token|inter_token_latency|e2el?)[^"\\]{0,40}"\s*:',
    re.IGNORECASE,
)
_MOST_SEARCHED = 1 << 20
_POINT_LISTS = ("points", "results", "data", "rows", "runs", "benchmarks")
_NESTED_KEYS = ("settings", "config", "server", "args")


def _header(head: bytes) -> tuple[bytes, bytes]:
    """Return the first line that is not empty, and what divides its names; empty if it names no point."""
    lines = head[:_MOST_HEADER].removeprefix(BOM).splitlines()
    line = next((item for item in lines if item.strip() and not item.startswith(b"#")), b"")
    for delimiter in _DELIMITERS:
        inside = line.strip().strip(b"|") if delimiter == b"|" else line
        fields = [field.decode("utf-8", "replace").strip(" \"'") for field in inside.split(delimiter)]
        if len(fields) > 1 and _is_of_points(fields):
            return line, delimiter
    return b"", b""


def _is_of_points(names: Iterable[str]) -> bool:
    columns = {named.column for name in names if (named := meaning_of(name))}
    has_load = bool(columns & {"concurrency", "rate_per_s"})
    return has_load and any(column.partition("_")[0] in POINT_LATENCIES for column in columns)


def _find(head: bytes) -> tuple[Shape, Encoding] | None:
    if head.removeprefix(BOM).lstrip()[:1] not in (b"{", b"["):
        return ("document", "csv") if _header(head)[0] else None
    if not _JSON_LATENCY.search(head[:_MOST_SEARCHED]):
        return None
    first = _first_row(head.removeprefix(BOM).lstrip())
    return ("document", "json") if first is not None and _is_of_points(_flat(first)) else None


def _first_row(head: bytes) -> dict[str, Any] | None:
    """Return the first row of content that may be a table; null for other content, or where that row is too long."""
    text = head.decode("utf-8", "replace")
    if text.startswith("["):
        text = text[1:].lstrip()
    try:
        value, _ = json.JSONDecoder().raw_decode(text)
        first = next(_rows(value), None)
    except (ValueError, RecursionError, msgspec.ValidationError):
        return None
    return first if isinstance(first, dict) else None


def _csv_parts(payload: bytes) -> PointParts:
    line, delimiter = _header(payload)
    names: list[str] = []
    rows = 0
    for item in records(payload, "lines"):
        if item.payload.startswith(b"#") or (not names and item.payload.strip() != line.strip()):
            continue
        try:
            fields = _fields(item.payload, delimiter)
        except (csv.Error, ValueError):
            yield item.offset, item.payload, partial(_refuse, "no row of a table")
            continue
        if not names:
            names = _checked_names(fields)
        elif fields != names and not all(_RULE.fullmatch(field) for field in fields):
            # Tables may stand one behind another, and Markdown has a rule below the names.
            rows += 1
            fault = _row_fault(fields, names, delimiter)
            read = partial(_refuse, fault) if fault else partial(_points_in, dict(zip(names, fields, strict=True)))
            yield item.offset, item.payload, read
    if not rows:
        yield 0, payload, partial(_refuse, "a table without rows")


def _fields(line: bytes, delimiter: bytes) -> list[str]:
    text = line.decode()
    if delimiter == b"|":  # Markdown has one at both ends
        text = text.strip().strip("|")
    (fields,) = csv.reader([text], delimiter=delimiter.decode(), skipinitialspace=True)
    return [field.strip() for field in fields]


def _row_fault(fields: list[str], names: list[str], delimiter: bytes) -> str | None:
    """Return the fault of a row; null if it has none."""
    if len(fields) != len(names):
        return f"{len(fields)} fields below {len(names)} names"
    # A program that divides fields by semicolons writes decimals, or thousands, with commas.
    if delimiter == b";" and (number := next(filter(_COMMA.fullmatch, fields), None)):
        return f"{number} may be a decimal or thousands: write a point before decimals, and nothing between thousands"
    return None


def _checked_names(names: list[str]) -> list[str]:
    """Return the names of columns.

    Raises:
        msgspec.ValidationError: One is there twice, or is a latency without a unit.
    """
    if len(set(names)) < len(names):
        raise msgspec.ValidationError("a column is there twice")
    for name in names:
        if (named := meaning_of(name)) and named.factor is None:
            raise msgspec.ValidationError(no_unit(name))
    return names


def _refuse(fault: str, _: bytes) -> Iterable[Point]:
    raise msgspec.ValidationError(fault)


def _points_in(row: Mapping[str, Any], _: bytes) -> Iterable[Point]:
    return [point_of(_flat(row), _PROGRAM)]


def _json_parts(payload: bytes) -> PointParts:
    try:
        value: Any = from_json(payload, object)
    except msgspec.DecodeError:
        for line in records(payload, "lines"):
            yield line.offset, line.payload, _line
        return
    for row in _rows(value):
        read: Callable[[bytes], Iterable[Point]] = partial(_refuse, "no object")
        yield 0, msgspec.json.encode(row), partial(_points_in, row) if isinstance(row, dict) else read


def _line(text: bytes) -> Iterable[Point]:
    return _points_in(from_json(text, dict[str, Any]), text)


def _rows(value: Any) -> Iterator[Any]:
    """Yield the rows of a JSON value: a list of them, an object that holds a list, an object of columns, or one row.

    Raises:
        msgspec.ValidationError: It is another value, or columns differ in length.
    """
    if isinstance(value, list):
        yield from value
        return
    if not isinstance(value, dict):
        raise msgspec.ValidationError("no table")
    held = next((value[name] for name in _POINT_LISTS if isinstance(value.get(name), list)), None)
    if held is not None:
        # Values beside the list hold for every row.
        beside = {name: item for name, item in value.items() if isinstance(item, str | int | float)}
        yield from (beside | row if isinstance(row, dict) else row for row in held)
    elif value and all(isinstance(column, list) for column in value.values()):
        if len({len(column) for column in value.values()}) > 1:
            raise msgspec.ValidationError("columns of different lengths")
        yield from (dict(zip(value, row, strict=True)) for row in zip(*value.values(), strict=True))
    elif value and all(isinstance(column, dict) for column in value.values()):
        first = next(iter(value.values()))
        yield from ({name: column.get(at) for name, column in value.items()} for at in first)
    else:
        yield value


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with the members of the objects in it that hold settings."""
    flat = {str(name): value for name, value in row.items()}
    for name in _NESTED_KEYS:
        if isinstance(flat.get(name), dict):
            flat |= flat.pop(name)
    return flat


_NO_STEP_ROWS = pl.DataFrame(schema={name: kind for name, kind in RECORDED_STEPS.items() if name != "file"})


def _decode(block: Block, payload: bytes, rejects: Rejects) -> RecordedBlock:
    parts = _csv_parts if block.encoding == "csv" else _json_parts
    points = read_points(block, payload, parts, "no point", rejects)
    return RecordedBlock(_NO_STEP_ROWS, spans_of_points(points))


FORMAT = register(
    Recording(
        name="points",
        title="table of a benchmark's points",
        find=_find,
        fills="`points`: loads and the latencies measured at each; `compare` puts predictions beside them",
        units="in the names of its columns: s, ms, us or ns",
        clock="none",
        decode=_decode,
        asked="a table of a benchmark's points",
    )
)
