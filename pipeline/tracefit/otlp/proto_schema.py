"""The OTLP trace messages, trimmed to the fields that columns are made of.

The wire format does not tell a message from the bytes of one. Attributes are declared as bytes here, so that one that
is nested too deep is told from a record that cannot be parsed. Times are declared signed: what is beyond int64 shows as
negative.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "tracefit.otlp.trimmed"
_Proto = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bytes": _Proto.TYPE_BYTES,
    "string": _Proto.TYPE_STRING,
    "int32": _Proto.TYPE_INT32,
    "uint32": _Proto.TYPE_UINT32,
    "sfixed64": _Proto.TYPE_SFIXED64,
}
_MESSAGES = {
    "TracesData": "repeated ResourceSpans resource_spans 1",
    "ResourceSpans": "optional Resource resource 1, repeated ScopeSpans scope_spans 2",
    "Resource": "repeated bytes attributes 1",
    "ScopeSpans": "optional Scope scope 1, repeated Span spans 2",
    "Scope": "optional string name 1",
    "Span": (
        "optional bytes trace_id 1, optional bytes span_id 2, optional bytes parent_span_id 4, "
        "optional string name 5, optional int32 kind 6, "
        "optional sfixed64 start_time_unix_nano 7, optional sfixed64 end_time_unix_nano 8, "
        "repeated bytes attributes 9, optional uint32 dropped_attributes_count 10, "
        "repeated Event events 11, optional uint32 dropped_events_count 12, optional Status status 15"
    ),
    "Event": (
        "optional sfixed64 time_unix_nano 1, optional string name 2, repeated bytes attributes 3, "
        "optional uint32 dropped_attributes_count 4"
    ),
    "Status": "optional string message 2, optional int32 code 3",
}


def _field(text: str) -> descriptor_pb2.FieldDescriptorProto:
    label, kind, name, number = text.split()
    field = _Proto(name=name, number=int(number))
    field.label = _Proto.LABEL_REPEATED if label == "repeated" else _Proto.LABEL_OPTIONAL
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = _Proto.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    return field


def _pool() -> descriptor_pool.DescriptorPool:
    file = descriptor_pb2.FileDescriptorProto(
        name="tracefit/trimmed.proto", package=_PACKAGE, syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        file.message_type.add(name=name, field=[_field(text) for text in fields.split(", ")])
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool


def _message_class(pool: descriptor_pool.DescriptorPool, name: str) -> Any:
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


_POOL = _pool()

TracesData = _message_class(_POOL, "TracesData")
"""Message class of a record."""

Resource = _message_class(_POOL, "Resource")
"""Message class of what spans come from."""

Scope = _message_class(_POOL, "Scope")
"""Message class of the instrumentation that wrote them."""
