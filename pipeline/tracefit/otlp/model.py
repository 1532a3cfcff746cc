"""The span model between readers and columns: the JSON and the protobuf reader both produce it, `decode` consumes it.

Its limits and rules for values (enum names, numbers that JSON lacks, nesting) hold for both encodings.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from tracefit.errors import TracefitError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray

    from tracefit.otlp.packed import PackedTexts

INT64_MAX = 2**63 - 1
MAX_VALUE_DEPTH = 40
"""Levels of arrays and key-value lists in one attribute value."""

SPAN_KINDS = ("UNSPECIFIED", "INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER")
STATUS_CODES = ("UNSET", "OK", "ERROR")
"""Enum names of a span by number; on the wire they carry a prefix."""

ID_BYTES = {"traceId": 16, "spanId": 8, "parentSpanId": 8}

AttributeValue = int | float | bool | str | None
"""An attribute's value: one of four scalar kinds; a nested value is JSON text (a str), an empty one None."""

Pairs = list[tuple[str, AttributeValue]]
"""Attributes in wire order."""

Plain = AttributeValue | list["Plain"] | dict[str, "Plain"]
"""A nested attribute value, with bytes as base64 text, and numbers that JSON lacks as strings."""


class FieldError(TracefitError):
    """A field has a value that OTLP does not allow; the message names the field, not the value."""


class AddReject(Protocol):
    """Rejects a byte range of a record."""

    def __call__(self, reason: str, start: int = 0, end: int | None = None, shown: bytes | None = None) -> None:
        """Reject the bytes from `start` to `end`; the excerpt shows `shown`, or all of them.

        Raises:
            TooManyRejectsError: It was the last reject that is listed.
        """
        ...


Span = Any
"""A checked span as the parser of its encoding returns it, with the field names of OTLP: trace_id, …, status.code.

`kind` and `status.code` are numbers, or names of them; times are within int64. Ids, attributes and events are
still in the form of the encoding, whose functions `id_text`, `attributes_of` and `event_columns` read them.
"""


class Origin(msgspec.Struct, frozen=True):
    """Facts that spans share: those of their resource and scope."""

    service_name: str | None = None
    service_instance_id: str | None = None
    host_name: str | None = None
    scope: str | None = None

    @classmethod
    def of(cls, resource: Iterable[tuple[str, AttributeValue]], scope: str) -> Origin:
        """Return the origin for resource attributes and a scope's name; a value that is not a string is unset."""
        named = {key: value or None for key, value in resource if isinstance(value, str)}
        host = named.get("host.name") or named.get("host.id")
        return cls(named.get("service.name"), named.get("service.instance.id"), host, scope or None)


class EncodedScope(NamedTuple):
    """The spans of one scope of a record, in order.

    Attributes:
        origin: Their resource and scope; None if they are rejected already.
        spans: Encoded ones, or parsed ones where all of a scope are valid and it is short.
        parsed_bytes: Encoded length of parsed ones; 0 if they are encoded.
    """

    origin: Origin | None
    spans: Iterable[Any]
    parsed_bytes: int = 0


class Events(NamedTuple):
    """Events as columns.

    Attributes:
        names: Their names.
        unix_ns: Their times; shape (n,).
        texts: Their attributes, encoded.
        dropped: How many attributes the emitter left out; shape (n,).
        odd: Attributes of the events that were read one by one, by index.
        bad: Indexes of events that cannot be read.
    """

    names: list[str]
    unix_ns: NDArray[np.int64]
    texts: PackedTexts
    dropped: NDArray[np.int64]
    odd: dict[int, Pairs]
    bad: list[int]


def kind_name(kind: int | str) -> str | None:
    """Return the kind of a span by name, null if it is unspecified or unknown; see `_enum_name`."""
    name = _enum_name(kind, "SPAN_KIND_", SPAN_KINDS)
    return None if name == SPAN_KINDS[0] else name


def status_name(code: int | str) -> str | None:
    """Return the status code of a span by name, null if it is unknown; see `_enum_name`."""
    return _enum_name(code, "STATUS_CODE_", STATUS_CODES)


def _enum_name(value: int | str, prefix: str, names: tuple[str, ...]) -> str | None:
    """Return the name of an enum value, which JSON spells as a number or as a name.

    Raises:
        FieldError: No enum value has this name.
    """
    if isinstance(value, str) and not re.fullmatch(r"-?\d{1,9}", value):
        if value.removeprefix(prefix) not in names:
            raise FieldError(f"{prefix.strip('_').replace('_', ' ').lower()} has a name of no value")
        return value.removeprefix(prefix)
    number = int(value)  # unknown numbers are valid: a newer version may define them
    return names[number] if 0 <= number < len(names) else None


def scalar_text(value: AttributeValue) -> str | None:
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
        FieldError: `depth` is beyond it.
    """
    if depth > MAX_VALUE_DEPTH:
        raise FieldError(f"value is nested deeper than {MAX_VALUE_DEPTH} levels")
