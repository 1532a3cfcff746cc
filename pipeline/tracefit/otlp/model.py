"""The span model between readers and columns: the JSON and the protobuf reader both produce it, `decode` consumes it.

Its limits and rules for values (enum names, numbers that JSON lacks, nesting) hold for both encodings.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from tracefit.errors import TracefitError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from tracefit.inputs.rejects import Reject
    from tracefit.otlp.packed import PackedTexts

INT64_MAX = 2**63 - 1
MAX_VALUE_DEPTH = 40
"""Levels of arrays and key-value lists in one attribute value."""

KINDS = ("UNSPECIFIED", "INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER")
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


class UnreadableRecordsError(TracefitError):
    """Records read without checks hold unreadable attributes; `records` has their indexes."""

    def __init__(self, records: set[int]) -> None:
        super().__init__("attributes cannot be read")
        self.records = records


UnreadScope = tuple[bytes | msgspec.Raw, bytes | msgspec.Raw, "Sequence[bytes | msgspec.Raw]"]
"""The resource, the scope and the spans of a scope of a long record, all of them undecoded."""


class MakeReject(Protocol):
    """Makes the reject of a byte range of a record."""

    def __call__(
        self, reason: str, start: int = 0, end: int | None = None, shown: bytes | None = None
    ) -> Reject:
        """Return a reject of the bytes from `start` to `end`; its excerpt shows `shown`, or all of them."""
        ...


class Span(msgspec.Struct, frozen=True):
    """A checked span: ids are lower-case hex, or empty for no parent; times are within int64.

    `attributes` and `events` are still in the form of their encoding, whose functions turn them into columns.
    """

    trace_id: str
    span_id: str
    parent_span_id: str
    name: str
    kind: int
    start_unix_ns: int
    end_unix_ns: int
    attributes: bytes | msgspec.Raw
    events: Sequence[Any]
    dropped_attributes: int
    dropped_events: int
    status_code: int
    status_message: str


@dataclass(frozen=True, slots=True)
class Origin:
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


class SpanGroup(NamedTuple):
    """Spans of one origin, in the record's order."""

    origin: Origin
    spans: list[Span]


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


class CheckedRecord(NamedTuple):
    """The result of reading one record carefully: its good spans, and a reject for everything else."""

    groups: list[SpanGroup]
    rejects: list[Reject]
    is_unreadable: bool = False
    """Whether nothing of it could be read."""


def enum_number(value: int | str, prefix: str, names: tuple[str, ...]) -> int:
    """Return the number of an enum, which JSON spells as a number or as a name.

    Raises:
        FieldError: No enum value has this name.
    """
    if not isinstance(value, str):
        return value
    if re.fullmatch(r"-?\d{1,9}", value):  # unknown numbers are valid: a newer version may define them
        return int(value)
    if value.removeprefix(prefix) not in names:
        raise FieldError(f"{prefix.strip('_').replace('_', ' ').lower()} has a name of no value")
    return names.index(value.removeprefix(prefix))


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
