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


class EventAttributes(msgspec.Struct, gc=False, frozen=True):
    """The attributes of an event: each of them serialized, and the whole event, to be read with others at once."""

    each: Any
    event: bytes


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
    """Reads `EventAttributes`."""

    def pairs(self, attributes: EventAttributes) -> Pairs:
        """Return keys and values of one event, in order; see `read_pairs` for what it raises."""
        return read_pairs(attributes.each)

    def parts(self, attributes: list[EventAttributes]) -> list[Part]:
        """Sort events by layout and read each layout as columns; see `AttributeReader`."""
        return parts_by_template([each.event for each in attributes], template_of)


READER = ProtobufAttributes()


def _scalar(value: Any) -> Scalar:
    if value.WhichOneof("value") == "double_value":
        return float(value.double_value)
    plain = _plain(value, 1)
    return nested_text(plain) if isinstance(plain, list | dict) else plain


def _plain(value: Any, depth: int) -> Plain:
    """Read a value of any kind, as what it is in plain JSON."""
    check_depth(depth)
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(item, depth + 1) for item in value.array_value.values]
    if kind == "kvlist_value":
        return {pair.key: _plain(pair.value, depth + 1) for pair in value.kvlist_value.values}
    if kind == "bytes_value":
        return b64encode(value.bytes_value).decode()
    if kind == "double_value":
        return finite(value.double_value)
    return getattr(value, kind) if kind in ("string_value", "int_value", "bool_value") else None
