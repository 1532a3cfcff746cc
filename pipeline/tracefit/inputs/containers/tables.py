"""Tables that consoles of log stores export: CSV of CloudWatch Logs Insights and of Google's Logs Explorer, a line of a
log in each row.
"""

from __future__ import annotations

import re
from itertools import chain
from typing import TYPE_CHECKING

from tracefit.inputs.compression import Gap
from tracefit.inputs.containers.base import Container, register
from tracefit.inputs.containers.elements import lines_in
from tracefit.inputs.containers.exports import in_order
from tracefit.inputs.containers.lines import Entry, printed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracefit.inputs.compression import Piece

_MESSAGES = ("@message", "textPayload", "jsonPayload.message", "jsonPayload.log", "jsonPayload.msg")
_TIME_COLUMNS = ("@timestamp", "timestamp", "receiveTimestamp")
_LABEL_COLUMNS = {
    "@logStream": "container",
    "resource.labels.pod_name": "pod_name",
    "resource.labels.container_name": "container_name",
}
_CELL_NAME = r'"?[A-Za-z@][A-Za-z0-9@._/-]{0,127}"?'
_FIND = re.compile(
    rf'(?=[^\n]{{0,8000}}(?:^|[,"])(?:{"|".join(map(re.escape, _MESSAGES[:2]))})["\r\n,])'
    rf"{_CELL_NAME}(?:,{_CELL_NAME}){{1,200}}\r?\n".encode()
)
_FIELD = re.compile(rb',"(?:[^"]++|"")*+"(?=,|\Z)|,[^",]*+(?=,|\Z)')
_NO_ZONE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]+")
_BATCH_BYTES = 1 << 20


def _batches(lines: Iterator[bytes | Gap], most_bytes: int) -> Iterator[list[bytes] | Gap]:
    """Yield rows, as many as make a batch; a row goes on until its quotes are even."""
    rows: list[bytes] = []
    parts: list[bytes] = []
    size = 0
    is_open = False
    for line in lines:
        if isinstance(line, Gap):
            yield line
            continue
        parts.append(line)
        size += len(line) + 1
        is_open ^= bool(line.count(b'"') & 1)
        if not is_open or size > most_bytes:
            rows.append(b"\n".join(parts))
            parts, is_open = [], False
        if not parts and size > _BATCH_BYTES:
            yield rows
            rows, size = [], 0
    yield [*rows, b"\n".join(parts)] if parts else rows


def _entries(batches: Iterator[list[bytes] | Gap]) -> Iterator[Entry | Gap]:
    header: bytes | None = None
    for rows in batches:
        if isinstance(rows, Gap):
            yield rows
            continue
        if header is None and rows:
            header, *rows = rows  # noqa: PLW2901 - the first row has the names
        if rows and header is not None:
            yield from _read_rows(header, rows)


def _read_rows(header: bytes, rows: list[bytes]) -> Iterator[Entry | Gap]:
    names = next(_fields([header]), None) or []
    positions = {name: position for position, name in enumerate(names)}
    messages, times = ([positions[key] for key in keys if key in positions] for keys in (_MESSAGES, _TIME_COLUMNS))
    labels = [(positions[key], label) for key, label in _LABEL_COLUMNS.items() if key in positions]
    for row, fields in zip(rows, _fields(rows), strict=True):
        if fields is None or len(fields) != len(names):
            yield Gap("not a row of CSV", record=row)
            continue
        text = next((fields[position] for position in messages if fields[position]), "")
        time = next((fields[position] for position in times if fields[position]), "").replace(" ", "T", 1)
        yield Entry(
            text.rstrip("\n").encode(errors="replace"),
            f"{time}Z" if _NO_ZONE.fullmatch(time) else time,
            {label: fields[position] for position, label in labels if fields[position]},
        )


def _fields(rows: list[bytes]) -> Iterator[list[str] | None]:
    """Yield the fields of each row; None if it is not CSV."""
    # Rows are bounded already; the module's own limit would be that of all its users.
    for row in rows:
        found = _FIELD.findall(text := b"," + row)
        if b"".join(found) != text:
            yield None
            continue
        plain = (field[2:-1].replace(b'""', b'"') if field.startswith(b',"') else field[1:] for field in found)
        yield [field.decode(errors="replace") for field in plain]


def _read(content: Iterator[Piece | Gap], most_bytes: int) -> Iterator[Piece | Gap]:
    batches = _batches(lines_in(content, most_bytes), most_bytes)
    first = next(batches, [])
    entries = () if isinstance(first, Gap) else tuple(_entries(iter([first])))
    times = [entry.time for entry in entries if isinstance(entry, Entry)]
    lines = printed(_entries(chain([first], batches)), most_bytes)
    return in_order(lines, most_bytes, is_newest_first=bool(times) and times[0] > times[-1])


FORMAT = register(
    Container(
        name="log_table",
        title="CSV of CloudWatch Logs Insights or of Google's Logs Explorer",
        holds="all",
        version="of November 2026",
        source="https://docs.aws.amazon.com/AmazonCloudWatch/latest/logs/CWL_Insights-Saving-Queries.html",
        find=lambda head: bool(_FIND.match(head)),
        read=_read,
    )
)
