"""What a reject may show of a record: its structure and its keys, never its values."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tracefit.sources.records import Encoding

MAX_EXCERPT_CHARS = 200
_SCANNED_BYTES = 4096
_TOKEN = re.compile(
    r'"(?P<key>[A-Za-z_][A-Za-z0-9_.]{0,39})"(?=\s*:)|(?P<string>"(?:[^"\\]|\\.)*+"?)|(?P<mark>[{}\[\]:,])|(?P<bare>[^\s"{}\[\]:,]+)',
    re.DOTALL,
)


def excerpt(payload: bytes, encoding: Encoding) -> str:
    """Return the outline of a record that was rejected.

    Args:
        payload: The record, or a piece of it; it may begin or end anywhere.
        encoding: How the payload was meant.

    Returns:
        At most `MAX_EXCERPT_CHARS` characters. Strings and numbers of JSON are shown as `…`; protobuf shows
        its size alone.
    """
    if encoding == "protobuf":
        return binary_excerpt(len(payload))
    text = payload[:_SCANNED_BYTES].decode("utf-8", errors="replace")
    outline = "".join(_shown(token) for token in _TOKEN.finditer(text))
    return outline if len(outline) <= MAX_EXCERPT_CHARS else outline[: MAX_EXCERPT_CHARS - 1] + "…"


def binary_excerpt(length: int) -> str:
    """Return the excerpt of bytes that are not text: how many they are."""
    return f"<protobuf, {length} bytes>"


def _shown(token: re.Match[str]) -> str:
    kind = token.lastgroup
    if kind in ("key", "mark"):
        return token[0]
    return '"…"' if kind == "string" else "…"
