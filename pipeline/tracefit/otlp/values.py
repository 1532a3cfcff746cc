"""Attribute values as text."""

from __future__ import annotations

import json
import math

from tracefit.otlp.model import FieldError, Scalar

MAX_VALUE_DEPTH = 40
"""Levels of arrays and key-value lists in one value; protobuf's own limit is a little above."""

Plain = Scalar | list["Plain"] | dict[str, "Plain"]
"""A nested attribute value; bytes are base64 text in it, and numbers that JSON lacks are strings."""


def scalar_text(value: Scalar) -> str | None:
    """Return a string as it is, a number or boolean as JSON text, and None for an empty value."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(finite(value)).strip("'")


def finite(value: float) -> float | str:
    """Return the number, or its ProtoJSON name if JSON has no number for it."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def nested_text(value: Plain) -> str:
    """Return a nested value as compact JSON text."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def check_depth(depth: int) -> None:
    """Refuse values nested deeper than `MAX_VALUE_DEPTH`.

    Raises:
        FieldError: If `depth` is beyond it.
    """
    if depth > MAX_VALUE_DEPTH:
        raise FieldError(f"value is nested deeper than {MAX_VALUE_DEPTH} levels")
