"""Exports of log stores: Loki's answer to a query, CloudWatch Logs' events, Google Cloud Logging's entries.

Each gives the lines that were printed, in the order of time where the store answers with the newest first.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from tracefit.inputs.compression import Gap, Piece
from tracefit.inputs.containers.base import CONTAINER_HEAD_BYTES, Container, Faulty, peeked, register
from tracefit.inputs.containers.elements import items
from tracefit.inputs.containers.lines import Entry, iso_of_ns, printed
from tracefit.inputs.framing import BOM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_STAMP = re.compile(
    rb'"(?:timestamp"\s*:\s*"|@timestamp"\s*,\s*"value"\s*:\s*"|@timestamp"\s*:\s*")([0-9][0-9T:. Z-]{18,40})'
)
_UNSAFE_IN_LABELS = re.compile(r"[^A-Za-z0-9._@-]+")


def _lines(entries: list[Entry]) -> list[bytes]:
    """Return entries as content."""
    return [
        item.data for item in printed(iter(entries), sum(len(e.text) for e in entries) + 1) if isinstance(item, Piece)
    ]


def _reader(
    begins: re.Pattern[bytes], depth_of: Callable[[bytes], int], entries: Callable[[bytes], list[Entry]]
) -> Callable[[Iterator[Piece | Gap], int], Iterator[Piece | Gap]]:
    def read(content: Iterator[Piece | Gap], most_bytes: int) -> Iterator[Piece | Gap]:
        head, content = peeked(content, CONTAINER_HEAD_BYTES)
        depth = depth_of(head.removeprefix(BOM).lstrip())
        lines = items(content, depth, begins, most_bytes, lambda text: _lines(entries(text)))
        return in_order(lines, most_bytes, is_newest_first=_is_newest_first(head))

    return read


def _is_newest_first(head: bytes) -> bool:
    times = list(dict.fromkeys(_STAMP.findall(head)))
    return len(times) > 1 and times[0] > times[1]


def in_order(content: Iterator[Piece | Gap], most_bytes: int, *, is_newest_first: bool) -> Iterator[Piece | Gap]:
    """Return lines from the oldest to the newest."""
    return _reversed(content, most_bytes) if is_newest_first else content


def _reversed(content: Iterator[Piece | Gap], most_bytes: int) -> Iterator[Piece | Gap]:
    """Yield lines from the last to the first; of an export that is too long to be kept, a part at a time."""
    parts: list[bytes] = []
    size = 0
    for item in content:
        if isinstance(item, Gap):
            yield item
            continue
        parts.append(item.data)
        size += len(item.data)
        if size > most_bytes:
            yield Piece(_turned(parts), is_stored=False)
            parts, size = [], 0
    yield Piece(_turned(parts), is_stored=False)


def _turned(parts: list[bytes]) -> bytes:
    lines = b"".join(parts).splitlines(keepends=True)
    return b"".join(reversed(lines))


# -- Loki -------------------------------------------------------------------------------------------------


class _LokiStream(msgspec.Struct):
    values: list[list[Any]] | None = None
    stream: dict[str, str] | None = None


class _LokiLine(msgspec.Struct):
    """A line as logcli (`-o jsonl`) and Grafana's download write it."""

    line: str
    timestamp: str = ""
    labels: dict[str, Any] | None = None
    fields: dict[str, Any] | None = None


_STREAM = msgspec.json.Decoder(_LokiStream)
_LOKI_DECODER = msgspec.json.Decoder(_LokiLine)
_LOKI_FIELDS = 2
"""A line's time and text; newer answers have its other labels too."""

_LOKI_ANSWER = re.compile(
    rb'\{\s*(?:"status"\s*:\s*"success"\s*,\s*)?"data"\s*:\s*\{(?:\s*"encodingFlags"\s*:\s*\[[^\]{}]*\]\s*,)?'
    rb'\s*(?:"resultType"\s*:\s*"streams"|"result"\s*:\s*\[\s*\{\s*"stream"\s*:\s*\{)'
)
_LOKI_LINE = re.compile(rb'[\[\s]*\{\s*"(?:line"\s*:\s*"|labels"\s*:\s*\{[^{}]*\}\s*,\s*"line"\s*:\s*")')
_LOKI_TIME = re.compile(rb'"timestamp"\s*:\s*"')


def _is_loki(head: bytes) -> bool:
    return bool(_LOKI_ANSWER.match(head) or (_LOKI_LINE.match(head) and _LOKI_TIME.search(head)))


def _loki_depth(head: bytes) -> int:
    return 3 if _LOKI_ANSWER.match(head) else int(head.startswith(b"["))


def _loki(text: bytes) -> list[Entry]:
    if not text.startswith(b"{"):
        return []
    if _LOKI_LINE.match(text):
        line = _LOKI_DECODER.decode(text)
        time = iso_of_ns(int(line.timestamp)) if line.timestamp.isdigit() else line.timestamp
        return [Entry(line.line.rstrip("\n").encode(errors="replace"), time, line.labels or line.fields or {})]
    read = _STREAM.decode(text)
    values = read.values or []
    if not all(len(value) >= _LOKI_FIELDS and isinstance(value[0], str) for value in values):
        raise Faulty("not a time and a line")
    rows = [(int(value[0]), str(value[1]).rstrip("\n")) for value in values]
    if len(rows) > 1 and rows[0][0] > rows[-1][0]:
        rows.reverse()
    rows.sort(key=lambda row: row[0])
    return [Entry(line.encode(errors="replace"), iso_of_ns(ns), read.stream or {}) for ns, line in rows]


LOKI = register(
    Container(
        name="loki",
        title="Loki's answer to a query of logs",
        holds="all",
        version="API v1",
        source="https://grafana.com/docs/loki/latest/reference/loki-http-api/#query-logs-within-a-range-of-time",
        find=_is_loki,
        read=_reader(
            re.compile(rb'\{\s*"(?:stream"\s*:\s*\{|values"\s*:\s*\[|line"\s*:\s*"|labels"\s*:\s*\{)'),
            _loki_depth,
            _loki,
        ),
    )
)

# -- CloudWatch -------------------------------------------------------------------------------------------


class _CloudwatchEvent(msgspec.Struct, rename={"stream": "logStreamName"}):
    message: str | None = None
    timestamp: int | None = None
    stream: str = ""


class _Delivery(msgspec.Struct, rename={"stream": "logStream", "events": "logEvents"}):
    events: list[_CloudwatchEvent]
    stream: str = ""


class _Field(msgspec.Struct):
    field: str = ""
    value: str = ""


_EVENT, _DELIVERY = msgspec.json.Decoder(_CloudwatchEvent), msgspec.json.Decoder(_Delivery)
_EXPORT_DECODERS, _TEXT_DECODERS = msgspec.json.Decoder(list[_Field]), msgspec.json.Decoder(dict[str, Any])
_BEFORE = rb'\{\s*(?:"[A-Za-z]{1,40}"\s*:\s*"[^"\\]{0,2000}"\s*,\s*){0,4}'
"""Texts that an answer may have before its list: tokens of pages, a key, the language of the query."""

_CLOUDWATCH_ANSWER = re.compile(
    _BEFORE + rb'"(?:events"\s*:\s*\[\s*\{[^{}]{0,400}?"(?:timestamp|message|logStreamName)"'
    rb'|results"\s*:\s*\[\s*\[\s*\{\s*"(?:field|value)")'
)
_CLOUDWATCH_FIND = re.compile(
    _CLOUDWATCH_ANSWER.pattern + rb'|\[\s*\{\s*(?:"(?:logStreamName|eventId)"\s*:\s*"[^"\\]{0,600}"\s*,\s*){0,2}'
    rb'"timestamp"\s*:\s*[0-9]{13}\s*,\s*"message"'
    rb'|\[\s*\{\s*(?:"eventId"\s*:\s*"[^"\\]{0,600}"\s*,\s*)?"ingestionTime"\s*:\s*[0-9]{13}\s*,'
    rb'|[\[\s]*\{\s*"@(?:timestamp|message|logStream|ptr)"\s*:\s*"'
    rb'|\{\s*"messageType"\s*:\s*"(?:DATA|CONTROL)_MESSAGE"'
)


def _container(stream: str) -> dict[str, str]:
    name = _UNSAFE_IN_LABELS.sub("-", stream).strip("-")
    return {"container": name} if name else {}


def _cloudwatch_event(event: _CloudwatchEvent, stream: str = "") -> Entry:
    text = (event.message or "").rstrip("\n").encode(errors="replace")
    time = iso_of_ns(event.timestamp * 10**6) if event.timestamp is not None else ""
    return Entry(text, time, _container(event.stream or stream))


def _cloudwatch(text: bytes) -> list[Entry]:
    if text.startswith(b"["):
        return [_insight({one.field: one.value for one in _EXPORT_DECODERS.decode(text)})]
    if b'"logEvents"' in text:
        read = _DELIVERY.decode(text)
        return [_cloudwatch_event(event, read.stream) for event in read.events]
    if b'"@message"' in text:
        return [_insight(_TEXT_DECODERS.decode(text))]
    event = _EVENT.decode(text)
    return [] if event.message is None else [_cloudwatch_event(event)]


def _insight(fields: dict[str, Any]) -> Entry:
    time = str(fields.get("@timestamp", "")).replace(" ", "T")
    message = fields.get("@message", "")
    text = message if isinstance(message, str) else msgspec.json.encode(message).decode()
    return Entry(
        text.rstrip("\n").encode(errors="replace"),
        time if not time or time.endswith("Z") else f"{time}Z",
        _container(str(fields.get("@logStream", ""))),
    )


def _cloudwatch_depth(head: bytes) -> int:
    if head.startswith(b"["):
        return 1
    return 2 if _CLOUDWATCH_ANSWER.match(head) else 0


CLOUDWATCH = register(
    Container(
        name="cloudwatch",
        title="events of CloudWatch Logs",
        holds="all",
        version="API 2014-03-28",
        source="https://docs.aws.amazon.com/AmazonCloudWatchLogs/latest/APIReference/API_FilterLogEvents.html",
        find=lambda head: bool(_CLOUDWATCH_FIND.match(head)),
        read=_reader(
            re.compile(rb'\{\s*"(?:logStreamName|timestamp|message|@timestamp|messageType)"\s*:|\[\s*\{\s*"field"'),
            _cloudwatch_depth,
            _cloudwatch,
        ),
    )
)

# -- Google -----------------------------------------------------------------------------------------------


class _GoogleResource(msgspec.Struct):
    labels: dict[str, Any] | None = None


class _GoogleEntry(
    msgspec.Struct,
    rename={"text": "textPayload", "payload": "jsonPayload", "received": "receiveTimestamp"},
):
    text: str | None = None
    payload: dict[str, Any] | None = None
    timestamp: str = ""
    received: str = ""
    resource: _GoogleResource | None = None
    labels: dict[str, Any] | None = None


_ENTRY = msgspec.json.Decoder(_GoogleEntry)
_MESSAGE_KEYS = ("message", "log", "msg")
_GOOGLE_KEYS = re.compile(rb'"(?:textPayload|jsonPayload)"\s*:')
_GOOGLE_NAME = re.compile(rb'"logName"\s*:\s*"(?:projects|organizations|folders|billingAccounts)/')


_GOOGLE_ANSWER = re.compile(_BEFORE + rb'"entries"\s*:\s*\[')


def _google_depth(head: bytes) -> int:
    return 2 if _GOOGLE_ANSWER.match(head) else int(head.startswith(b"["))


def _google(text: bytes) -> list[Entry]:
    entry = _ENTRY.decode(text)
    payload = entry.payload or {}
    line = entry.text
    if line is None:
        line = next((payload[key] for key in _MESSAGE_KEYS if isinstance(payload.get(key), str)), None)
    if line is None:
        # The agent reads a line of JSON: it was the content itself.
        line = msgspec.json.encode(payload).decode() if payload else None
    if line is None:
        return []
    labels = {**((entry.resource and entry.resource.labels) or {}), **(entry.labels or {})}
    host = labels.get("compute.googleapis.com/resource_name")
    named: dict[str, Any] = {key: labels[key] for key in ("pod_name", "container_name") if key in labels}
    if not named and host:
        named = {"host": host}
    return [Entry(line.rstrip("\n").encode(errors="replace"), entry.timestamp or entry.received, named)]


GOOGLE = register(
    Container(
        name="google",
        title="entries of Google Cloud Logging",
        holds="all",
        version="API v2",
        source="https://cloud.google.com/logging/docs/reference/v2/rest/v2/LogEntry",
        find=lambda head: (
            head.startswith((b"{", b"[")) and bool(_GOOGLE_KEYS.search(head) and _GOOGLE_NAME.search(head))
        ),
        read=_reader(
            re.compile(rb'\{\s*"(?:insertId|jsonPayload|logName|textPayload|receiveTimestamp)"\s*:'),
            _google_depth,
            _google,
        ),
    )
)
