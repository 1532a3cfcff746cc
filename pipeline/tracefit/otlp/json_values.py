"""Attribute values of OTLP JSON, one at a time and by every rule of ProtoJSON."""

from __future__ import annotations

import re
from base64 import b64decode, b64encode, urlsafe_b64decode
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from tracefit.otlp.model import INT64_MAX, UINT32_MAX, FieldError, Scalar
from tracefit.otlp.values import Plain, check_depth, finite, nested_text

if TYPE_CHECKING:
    from collections.abc import Iterator

Json = dict[str, Any]

Int64 = Annotated[int, Meta(ge=-INT64_MAX - 1, le=INT64_MAX)]
Nanos = Annotated[int, Meta(ge=0, le=INT64_MAX)]
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Count = Annotated[int, Meta(ge=0, le=UINT32_MAX)]

_SCALAR_KINDS: tuple[tuple[str, Any], ...] = (
    ("intValue", Int64),
    ("doubleValue", float),
    ("boolValue", bool),
    ("stringValue", str),
)
"""Kinds of scalar values; if several are set, which is not valid, the first counts."""


def read_attributes(owner: Json) -> list[tuple[str, Scalar]]:
    """Read the attributes of a span or event.

    Raises:
        FieldError: If one of them is not valid.
    """
    return [(key, read_value(tree)) for key, tree in _key_values(owner, "attributes")]


def read_value(tree: Any) -> Scalar:
    """Read one attribute value, a nested one as JSON text.

    Raises:
        FieldError: If it is not valid.
    """
    value = as_object({} if tree is None else tree, "value")
    scalar = _scalar(value)
    if scalar is not None:
        return scalar
    nested = _container(value, 1)
    return nested if isinstance(nested, str) or nested is None else nested_text(nested)


def _scalar(value: Json) -> Scalar:
    """Read a scalar; all kinds that are set have to be valid."""
    scalars = [optional(value, name, kind) for name, kind in _SCALAR_KINDS]
    return next((scalar for scalar in scalars if scalar is not None), None)


def _plain(tree: Any, depth: int) -> Plain:
    """Read a value inside another, as what it is in plain JSON."""
    check_depth(depth)
    value = as_object({} if tree is None else tree, "value")
    scalar = _scalar(value)
    if scalar is None:
        return _container(value, depth)
    return finite(scalar) if isinstance(scalar, float) else scalar


def _container(value: Json, depth: int) -> Plain:
    if get(value, "arrayValue") is not None:
        return [_plain(item, depth + 1) for item in items(child(value, "arrayValue"), "values")]
    if get(value, "kvlistValue") is not None:
        pairs = _key_values(child(value, "kvlistValue"), "values")
        return {key: _plain(item, depth + 1) for key, item in pairs}
    if (encoded := optional(value, "bytesValue", str)) is not None:
        return b64encode(from_base64(encoded, "bytesValue")).decode()
    return None


def _key_values(owner: Json, name: str) -> Iterator[tuple[str, Any]]:
    for item in items(owner, name):
        pair = as_object(item, name)
        yield text(pair, "key"), pair.get("value")


@cache
def _snake_case(name: str) -> str:
    return re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", name)


def get(owner: Json, name: str) -> Any:
    """Return a field under its lowerCamelCase or snake_case key, or None if it is unset."""
    value = owner.get(name)
    return owner.get(_snake_case(name)) if value is None else value


def as_object(value: Any, name: str) -> Json:
    """Return the value if it is a JSON object.

    Raises:
        FieldError: If it is not.
    """
    if not isinstance(value, dict):
        raise FieldError(f"{name} is not an object")
    return value


def child(owner: Json, name: str) -> Json:
    """Return a field that is an object, empty if it is unset.

    Raises:
        FieldError: If it is something else.
    """
    value = get(owner, name)
    return {} if value is None else as_object(value, name)


def items(owner: Json, name: str) -> list[Any]:
    """Return a field that is an array, empty if it is unset.

    Raises:
        FieldError: If it is something else.
    """
    value = get(owner, name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise FieldError(f"{name} is not an array")
    return value


def optional(owner: Json, name: str, kind: Any) -> Any:
    """Convert a scalar field just as the typed decoder does, or return None if it is unset.

    Raises:
        FieldError: If it cannot be converted.
    """
    value = get(owner, name)
    if value is None:
        return None
    try:
        return msgspec.convert(value, kind | None, strict=False)
    except msgspec.ValidationError as error:
        raise FieldError(f"{name} is not valid") from error


def number(owner: Json, name: str, kind: Any) -> int:
    """Return an integer field, 0 if it is unset.

    Raises:
        FieldError: If it is something else or out of range.
    """
    value: int | None = optional(owner, name, kind)
    return value or 0


def text(owner: Json, name: str) -> str:
    """Return a string field, empty if it is unset.

    Raises:
        FieldError: If it is something else.
    """
    value: str | None = optional(owner, name, str)
    return value or ""


def from_base64(encoded: str, name: str) -> bytes:
    """Decode base64 of either alphabet, padded or not.

    Raises:
        FieldError: If it is not base64.
    """
    padded = encoded + "=" * (-len(encoded) % 4)
    decode = urlsafe_b64decode if "-" in encoded or "_" in encoded else b64decode
    try:
        return decode(padded)
    except ValueError as error:
        raise FieldError(f"{name} is not base64") from error
