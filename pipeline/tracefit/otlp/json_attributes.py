"""Attributes of JSON events, from and to their text."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from tracefit.otlp.json_slots import template_of
from tracefit.otlp.json_values import Int64  # noqa: TC001 - msgspec reads the annotations
from tracefit.otlp.model import Pairs, Part, Scalar, UncheckedAttributeError
from tracefit.otlp.templates import parts_by_template


class ScalarValue(msgspec.Struct, gc=False, frozen=True, rename="camel", forbid_unknown_fields=True):
    """A scalar attribute value."""

    int_value: Int64 | None = None
    double_value: float | None = None
    bool_value: bool | None = None
    string_value: str | None = None

    def scalar(self) -> Scalar:
        """Return what is set; if several are, which is not valid, the first counts."""
        if self.int_value is not None:
            return self.int_value
        if self.double_value is not None:
            return self.double_value
        return self.bool_value if self.bool_value is not None else self.string_value


class _KeyValue(msgspec.Struct, gc=False, frozen=True, forbid_unknown_fields=True):
    key: str
    value: ScalarValue


_DECODER = msgspec.json.Decoder(list[_KeyValue], strict=False)


class JsonAttributes:
    """Reads the attributes of events from their JSON text."""

    def pairs(self, attributes: Raw) -> Pairs:
        """Return keys and values of one event, in order.

        Raises:
            UncheckedAttributeError: If it has anything but scalars in the usual spelling.
        """
        try:
            decoded = _DECODER.decode(attributes)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UncheckedAttributeError("event attributes are not of the usual form") from error
        return [(attribute.key, attribute.value.scalar()) for attribute in decoded]

    def parts(self, attributes: list[Raw]) -> list[Part]:
        """Sort events by layout and read each layout as columns; see `AttributeReader`."""
        return parts_by_template(attributes, template_of)


READER = JsonAttributes()


def attributes_json(pairs: Pairs) -> Raw:
    """Write attributes in the usual spelling, for `JsonAttributes` to read."""
    return Raw(msgspec.json.encode([{"key": key, "value": _value_json(value)} for key, value in pairs]))


def _value_json(value: Scalar) -> dict[str, Any]:
    if value is None:
        return {}
    if isinstance(value, float):  # as a string, for JSON has no number for NaN
        return {"doubleValue": repr(value)}
    kind = {bool: "boolValue", int: "intValue", str: "stringValue"}[type(value)]
    return {kind: value}
