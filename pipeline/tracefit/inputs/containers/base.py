"""A container: a form in which other programs hold spans or lines of logs, which its reader turns into the usual one.

A container is recognised by the first bytes of the decompressed content, whatever the file's name. Its reader yields
OTLP JSON lines, or the lines that were wrapped; everything behind it is the same for all. Containers nest: an export of
lines may hold a dump of spans.
"""

from __future__ import annotations

import re
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from tracefit.inputs.compression import Gap, Piece
from tracefit.inputs.formats import RECORDINGS
from tracefit.inputs.framing import BOM, RECORD_START

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

CONTAINER_HEAD_BYTES, MOST_HEAD_BYTES = 64 << 10, 4 << 20
"""Bytes by which a container is recognised; of a document over several lines, whose end shows what it is, and of a log
that spans follow."""

PRETTY = re.compile(rb"[\[{]\s*\n|[\[{][^\n]*[\[{,:]\s*\n(?=[ \t\]}])")
"""The beginning of a document over several lines."""

_PLAIN_RECORD = re.compile(RECORD_START.pattern + rb"[^\n]{64}")
"""A record in a line of its own."""

MOST_NESTED = 4
"""Containers around each other that are opened."""


class Container(msgspec.Struct, frozen=True, eq=False):
    """A form of files, as one module declares it.

    Attributes:
        name: Its name, also of its fixture.
        title: Its name in words.
        holds: The content that it can have.
        version: The version or the date of the form that is read.
        source: Where it is described.
        find: Returns whether content that begins with some bytes is in it.
        read: Yields what is in it, given the content and the most bytes of an item.
    """

    name: str
    title: str
    holds: Literal["traces", "logs", "all"]
    version: str
    source: str
    find: Callable[[bytes], bool]
    read: Callable[[Iterator[Piece | Gap], int], Iterator[Piece | Gap]]


CONTAINERS: dict[str, Container] = {}
"""Containers by name, in the order they are tried."""


def register(container: Container) -> Container:
    """Register a container."""
    CONTAINERS[container.name] = container
    return container


def unwrapped(content: Iterator[Piece | Gap], most_bytes: int, found: list[Container]) -> Iterator[Piece | Gap]:
    """Yield the content inside all containers around it; content in none stays as it is.

    Args:
        content: Decompressed content.
        most_bytes: Longest item of a container.
        found: Receives the containers, the outermost first.
    """
    for _ in range(MOST_NESTED):
        head, content = peeked(content, CONTAINER_HEAD_BYTES)
        head = head.removeprefix(BOM).lstrip()
        # The usual case: there may be thousands of small files.
        container = None if _PLAIN_RECORD.match(head) else _container_of(head)
        if container is None and len(head) >= CONTAINER_HEAD_BYTES // 2 and (PRETTY.match(head) or _is_log(head)):
            head, content = peeked(content, MOST_HEAD_BYTES)
            container = _container_of(head.removeprefix(BOM).lstrip())
        if container is None:
            break
        found.append(container)
        content = container.read(content, most_bytes)
    yield from content


def _is_log(head: bytes) -> bool:
    """Return whether content is a program's output, which spans may follow; of one that is read itself, none are
    asked.
    """
    is_text = b"\n" in head and b"\0" not in head and not RECORD_START.match(head)
    return is_text and not any(mark in head for one in RECORDINGS.values() for mark in one.stamped)


def _container_of(head: bytes) -> Container | None:
    return next((one for one in CONTAINERS.values() if one.find(head)), None)


def peeked(content: Iterator[Piece | Gap], size: int) -> tuple[bytes, Iterator[Piece | Gap]]:
    """Return the first bytes of some content, and all of it."""
    parts: list[Piece | Gap] = []
    missing = size
    while missing > 0 and (item := next(content, None)) is not None:
        parts.append(item)
        missing -= 0 if isinstance(item, Gap) else len(item.data)
    head = b"".join(item.data for item in parts if isinstance(item, Piece))
    return head[:size], chain(parts, content)


# -- spans ------------------------------------------------------------------------------------------------

_INT64, _MOST_DEPTH = 2**63, 64
_SCOPES_OF_EVENTS = {"api.": "vllm.api", "journey.": "vllm.scheduler", "step.": "vllm.scheduler.step"}
_SCOPES_OF_NAMES = {
    "llm_core": "vllm.scheduler",
    **dict.fromkeys(("vllm_queue", "vllm_prefill", "vllm_decode", "vllm_async_kv_transfer"), "vllm.tracing.otel"),
    **dict.fromkeys(
        (
            *("tokenize", "api_server_dispatch", "request_process", "prefill_waiting", "prefill_forward"),
            *("chunked_prefill", "decode_forward", "decode_loop", "decode_waiting", "decode_transferred"),
            *("prefill_transfer_kv_cache", "prefill_bootstrap", "decode_prepare", "decode_bootstrap"),
        ),
        "sglang server",
    ),
}
_SCOPE_KEYS = ("otel.scope.name", "otel.library.name")
_STATUS = {"OK": 1, "ERROR": 2}
_KIND_NUMBERS = {"INTERNAL": 1, "SERVER": 2, "CLIENT": 3, "PRODUCER": 4, "CONSUMER": 5}
_SERVER_KEYS = ("service.instance.id", "host.name", "host.id")


class Faulty(ValueError):  # noqa: N818 - it is a state of a span
    """A span, or a value of it, is not as its container writes it."""


def value_of(value: Any, depth: int = 0) -> dict[str, Any]:
    """Return a JSON value as an attribute value of OTLP."""
    if depth > _MOST_DEPTH:
        raise Faulty("nested too deep")
    match value:
        case str():
            return {"stringValue": value}
        case bool():
            return {"boolValue": value}
        case int() if not -_INT64 <= value < _INT64:
            raise Faulty("number out of range")
        case int() | float():
            return {"doubleValue": value} if isinstance(value, float) else {"intValue": str(value)}
        case list():
            return {"arrayValue": {"values": [value_of(each, depth + 1) for each in value]}}
        case dict():
            return {"kvlistValue": {"values": pairs_of(value, depth + 1)}}
    return {}


def pairs_of(values: dict[str, Any], depth: int = 0) -> list[dict[str, Any]]:
    """Return a JSON object as attributes of OTLP; null is unset."""
    return [{"key": key, "value": value_of(value, depth)} for key, value in values.items() if value is not None]


def plain(value: Any) -> Any:
    """Return a value that a container writes as text: a number or Boolean, if it is the only one with this text."""
    if not isinstance(value, str) or not value or len(value) > 25:
        return value
    if value in {"true", "false"}:
        return value == "true"
    try:
        number: float = int(value) if value.lstrip("-").isdigit() else float(value)
    except ValueError:
        return value
    return number if str(number) == value and -_INT64 <= number < _INT64 else value


def hex_id(text: str, size: int) -> str:
    """Return an id in hex without its prefix, and with the zeros before it that some programs leave out; empty if all
    digits are zero.
    """
    digits = text.removeprefix("0x")
    return digits.rjust(size, "0") if digits.strip("0") else ""


def nanoseconds(microseconds: float) -> str:
    """Return microseconds as the text of nanoseconds."""
    return str(int(microseconds) * 1000)


class SpanItem(msgspec.Struct):
    """One span of any container.

    Attributes:
        trace_id, span_id, parent_id, name: As OTLP has them.
        start, end: Unix times in ns, as text.
        attributes: By key; those in which containers keep a span's scope, kind and status are taken out.
        events: Their time in ns as text, name and attributes.
        resource: Attributes of the resource.
        scope: Instrumentation scope, if the container has one.
        kind, status, message: As OTLP names them, without prefix.
    """

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start: str
    end: str
    attributes: dict[str, Any]
    events: list[tuple[str, str, dict[str, Any]]] = []
    resource: dict[str, Any] = {}
    scope: str = ""
    kind: str = ""
    status: str = ""
    message: str = ""


class Encoded(NamedTuple):
    """A span in OTLP, its resource's attributes and its scope."""

    span: dict[str, Any]
    resource: dict[str, Any]
    scope: str


def encoded(span: SpanItem) -> Encoded:
    """Return a span in OTLP, with the facts that containers without a place for them keep in attributes.

    Raises:
        Faulty: A value cannot be in OTLP.
    """
    tags = dict(span.attributes)
    scopes = [str(tags.pop(key, None) or "") for key in _SCOPE_KEYS]
    for key in ("otel.scope.version", "otel.library.version", "internal.span.format", "w3c.tracestate"):
        tags.pop(key, None)
    kind = span.kind or str(tags.pop("span.kind", None) or "")
    status = span.status or str(tags.pop("otel.status_code", None) or "")
    message = span.message or str(tags.pop("otel.status_description", None) or "")
    error = tags.pop("error", None)
    if error not in (None, False, "", "false") and not status:
        status = "ERROR"
    dropped = {
        f"dropped{what}Count": _count(tags.pop(f"otel.dropped_{what.lower()}_count", 0))
        for what in ("Attributes", "Events", "Links")
    }
    span.scope = span.scope or next(filter(None, scopes), "") or _scope_of(span)
    otlp = {
        "traceId": hex_id(span.trace_id, 32),
        "spanId": hex_id(span.span_id, 16),
        "parentSpanId": hex_id(span.parent_id, 16),
        "name": span.name,
        "kind": _KIND_NUMBERS.get(kind.upper(), 1),
        "startTimeUnixNano": span.start,
        "endTimeUnixNano": span.end,
        "attributes": pairs_of(tags),
        "events": [
            {"timeUnixNano": at, "name": name, "attributes": pairs_of(values)} for at, name, values in span.events
        ],
        "status": {"code": _STATUS.get(status.upper(), 0), "message": message},
        **{key: count for key, count in dropped.items() if count},
    }
    return Encoded(otlp, span.resource, span.scope)


def _count(value: Any) -> int:
    if not isinstance(value, int | str) or not 0 <= int(value) < 2**32:
        raise Faulty("not a count")
    return int(value)


def _scope_of(span: SpanItem) -> str:
    """Return the scope that a span has where its server writes it, for containers that leave it out."""
    for _, name, _ in span.events:
        for prefix, scope in _SCOPES_OF_EVENTS.items():
            if name.startswith(prefix):
                return scope
    if span.name == "llm_request":
        return "vllm.tracing.otel" if any(key.startswith("gen_ai.latency.") for key in span.attributes) else "vllm.api"
    if span.name.startswith("scheduler_steps"):
        return "vllm.scheduler.step"
    if span.name in _SCOPES_OF_NAMES:
        return _SCOPES_OF_NAMES[span.name]
    return "sglang server" if {"rid", "thread_label"} & span.attributes.keys() else ""


def otlp_lines(spans: Iterable[Encoded]) -> list[bytes]:
    """Return spans as one line of OTLP JSON; consecutive ones of a resource and scope are together."""
    resources: list[dict[str, Any]] = []
    last: Any = None
    for span in spans:
        if last != (key := (span.resource, span.scope)):
            last = key
            resources.append(
                {
                    "resource": {"attributes": pairs_of(span.resource)},
                    "scopeSpans": [{"scope": {"name": span.scope}, "spans": []}],
                }
            )
        resources[-1]["scopeSpans"][0]["spans"].append(span.span)
    return [msgspec.json.encode({"resourceSpans": resources}) + b"\n"] if resources else []


def with_resource(service: str, tags: dict[str, Any]) -> dict[str, Any]:
    """Return the resource of a container that keeps only the name of the service; other facts may be among the tags."""
    found = {key: tags.pop(key) for key in _SERVER_KEYS if key in tags}
    return {"service.name": service, **found} if service else found
