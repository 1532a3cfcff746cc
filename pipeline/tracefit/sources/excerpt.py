"""What a reject may show of a record: its structure and its keys, and values only if the user asks for them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from tracefit.sources.records import Encoding

MAX_EXCERPT_CHARS = 200
_SCANNED_BYTES = 4096
_TOKEN = re.compile(
    r'"(?P<key>[A-Za-z_][A-Za-z_.]{0,39})"(?=\s*:)|(?P<string>"(?:[^"\\]|\\.)*+"?)|(?P<mark>[{}\[\]:,])|(?P<bare>[^\s"{}\[\]:,]+)',
    re.DOTALL,
)

_OTLP_KEYS = frozenset(
    [
        "trace",
        "batches",
        "resourceSpans",
        "resource",
        "attributes",
        "key",
        "value",
        "stringValue",
        "intValue",
        "doubleValue",
        "boolValue",
        "bytesValue",
        "arrayValue",
        "kvlistValue",
        "values",
        "schemaUrl",
        "scopeSpans",
        "instrumentationLibrarySpans",
        "instrumentationLibrary",
        "scope",
        "name",
        "version",
        "spans",
        "traceId",
        "spanId",
        "parentSpanId",
        "traceState",
        "flags",
        "kind",
        "startTimeUnixNano",
        "endTimeUnixNano",
        "events",
        "timeUnixNano",
        "links",
        "status",
        "code",
        "message",
        "droppedAttributesCount",
        "droppedEventsCount",
        "droppedLinksCount",
        "entityRefs",
        "resourceLogs",
        "resourceMetrics",
        "scopeLogs",
        "scopeMetrics",
        "logRecords",
        "metrics",
        "body",
    ]
)
_SNAKE_CASE_KEYS = frozenset(re.sub("[A-Z]", lambda m: f"_{m[0].lower()}", key) for key in _OTLP_KEYS)


def excerpt(payload: bytes, encoding: Encoding, *, show_values: bool = False) -> str:
    """Return the outline of a record that was rejected.

    What looks like a key in text that is not whole JSON may be part of a string. There only the keys of OTLP itself are
    shown.

    Args:
        payload: The record, or a piece of it; it may begin or end anywhere.
        encoding: How the payload was meant.
        show_values: Show the beginning of the payload as it is.

    Returns:
        At most `MAX_EXCERPT_CHARS` characters. Strings and numbers of JSON are shown as `…`; other
        encodings show their size alone.
    """
    if show_values:
        return _shortened(_as_text(payload[: 4 * MAX_EXCERPT_CHARS], encoding))
    if encoding != "json":
        return binary_excerpt(len(payload))
    text = payload[:_SCANNED_BYTES].decode("utf-8", errors="replace")
    whole = len(payload) <= _SCANNED_BYTES and is_json(payload)
    return _shortened("".join(_shown(token, whole=whole) for token in _TOKEN.finditer(text)))


def binary_excerpt(length: int) -> str:
    """Return the excerpt of bytes that are not text: how many they are."""
    return f"<binary, {length} bytes>"


def is_json(text: bytes) -> bool:
    """Return whether the text is one whole JSON value."""
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _as_text(payload: bytes, encoding: Encoding) -> str:
    """Return the payload with everything that is not printed as itself escaped."""
    text = payload.decode("utf-8" if encoding == "json" else "latin-1", errors="replace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_EXCERPT_CHARS else f"{text[: MAX_EXCERPT_CHARS - 1]}…"


def _shown(token: re.Match[str], *, whole: bool) -> str:
    if token.lastgroup == "mark":
        return token[0]
    if token.lastgroup == "key" and (whole or token["key"] in _OTLP_KEYS or token["key"] in _SNAKE_CASE_KEYS):
        return token[0]
    return "…" if token.lastgroup == "bare" else '"…"'
