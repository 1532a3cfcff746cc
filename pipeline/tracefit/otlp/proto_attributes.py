"""Attributes in protobuf, parsed one by one or read as columns."""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING, Any

import msgspec
from google.protobuf.message import DecodeError
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

from tracefit.otlp.model import Pairs, Part, Scalar, UncheckedAttributeError
from tracefit.otlp.proto_slots import template_of
from tracefit.otlp.templates import parts_by_template
from tracefit.otlp.values import Plain, check_depth, finite, nested_text

if TYPE_CHECKING:
    from collections.abc import Iterable


_SCALAR_KINDS = ("string_value", "int_value", "double_value", "bool_value")


class ProtobufEvent(msgspec.Struct, gc=False, frozen=True):
    """An event as it was parsed, and serialized, to be read with others at once.

    It is its own `attributes`: an object less for each of the many events.
    """

    time_unix_nano: int
    name: str
    dropped_attributes_count: int
    message: Any
    serialized: bytes

    @property
    def attributes(self) -> ProtobufEvent:
        """What `ProtobufAttributes` reads."""
        return self


def read_pairs(attributes: Iterable[bytes]) -> Pairs:
    """Return keys and values of serialized `KeyValue` messages, in order.

    Raises:
        UncheckedAttributeError: If an attribute is no message.
        FieldError: If a value is nested too deep.
    """
    try:
        messages = [KeyValue.FromString(attribute) for attribute in attributes]
    except DecodeError as error:
        raise UncheckedAttributeError("attribute is not a protobuf message") from error
    return [(message.key, _scalar(message.value)) for message in messages]


class ProtobufAttributes:
    """Reads the attributes of `ProtobufEvent`."""

    def pairs(self, attributes: ProtobufEvent) -> Pairs:
        """Return keys and values of one event, in order; see `read_pairs` for what it raises."""
        return read_pairs(attributes.message.attributes)

    def parts(self, attributes: list[ProtobufEvent]) -> list[Part]:
        """Sort events by layout and read each layout as columns; see `AttributeReader`."""
        return parts_by_template([event.serialized for event in attributes], template_of)


READER = ProtobufAttributes()


def _scalar(value: Any) -> Scalar:
    kind = value.WhichOneof("value")
    if kind in _SCALAR_KINDS:
        scalar: Scalar = getattr(value, kind)
        return scalar
    nested = _container(value, kind, 1)
    return nested if isinstance(nested, str) or nested is None else nested_text(nested)


def _plain(value: Any, depth: int) -> Plain:
    """Read a value inside another, as what it is in plain JSON."""
    check_depth(depth)
    kind = value.WhichOneof("value")
    if kind == "double_value":
        return finite(value.double_value)
    if kind in _SCALAR_KINDS:
        scalar: Scalar = getattr(value, kind)
        return scalar
    return _container(value, kind, depth)


def _container(value: Any, kind: str | None, depth: int) -> Plain:
    if kind == "array_value":
        return [_plain(item, depth + 1) for item in value.array_value.values]
    if kind == "kvlist_value":
        return {pair.key: _plain(pair.value, depth + 1) for pair in value.kvlist_value.values}
    return b64encode(value.bytes_value).decode() if kind == "bytes_value" else None
