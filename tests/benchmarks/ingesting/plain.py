"""The plain way to read a trace: decode every record, loop over all attributes into dicts, write nothing.

A process of its own, with nothing imported that it does not need: `python plain.py json|protobuf PATH`. Prints how many
attributes there were.
"""

from __future__ import annotations

import json
import sys


def read_json(path: str) -> int:
    """Decode JSON lines; return how many attributes there were."""
    count = 0
    with open(path, "rb") as stream:  # noqa: PTH123 - pathlib takes a while to import
        for line in stream:
            for resource_spans in json.loads(line)["resourceSpans"]:
                for scope_spans in resource_spans["scopeSpans"]:
                    for span in scope_spans["spans"]:
                        for holder in (span, *span.get("events", ())):
                            count += len({a["key"]: _plain(a["value"]) for a in holder["attributes"]})
    return count


def _plain(value: dict[str, object]) -> object:
    for kind, content in value.items():
        return int(str(content)) if kind == "intValue" else content
    return None


def read_protobuf(path: str) -> int:
    """Decode framed protobuf; return how many attributes there were."""
    from opentelemetry.proto.trace.v1.trace_pb2 import TracesData  # noqa: PLC0415

    count = 0
    with open(path, "rb") as stream:  # noqa: PTH123
        while head := stream.read(4):
            message = TracesData.FromString(stream.read(int.from_bytes(head, "big")))
            for resource_spans in message.resource_spans:
                for scope_spans in resource_spans.scope_spans:
                    for span in scope_spans.spans:
                        for holder in (span, *span.events):
                            values = {
                                a.key: getattr(a.value, str(a.value.WhichOneof("value")))
                                for a in holder.attributes  # type: ignore[attr-defined]
                            }
                            count += len(values)
    return count


if __name__ == "__main__":
    print((read_json if sys.argv[1] == "json" else read_protobuf)(sys.argv[2]))
