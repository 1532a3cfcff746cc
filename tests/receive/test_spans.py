"""What of the spans is written: what a user wrote is not, and what tables are made of is."""

from __future__ import annotations

import json

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from tracefit import IngestOptions, ingest
from tracefit.receive.observed import Observed
from tracefit.receive.options import Rotation
from tracefit.receive.spans import PrivacyFilter, RequestError, Sender, protobuf_of_json
from tracefit.receive.store import TraceStore
from tracefit.tables.store import TableStore

HIDDEN = b"\xfa\x7f\x06SECRET"
"""A field that OTLP does not have."""


@pytest.fixture
def secret(lib):
    """Return a request in which everything that can hold a text holds one that nobody may see."""
    message = lib.request(
        1, **{"gen_ai.request.id": "cmpl-1", "gen_ai.prompt": "SECRET", "user.email": "SECRET@example.com"}
    )
    (resource_spans,) = message.resource_spans
    resource_spans.resource.attributes.extend(lib.pairs({"process.command_args": "SECRET", "host.name": "h"}))
    resource_spans.schema_url = "SECRET"
    (scope_spans,) = resource_spans.scope_spans
    scope_spans.schema_url = "SECRET"
    scope_spans.scope.attributes.extend(lib.pairs({"SECRET": "SECRET"}))
    (span,) = scope_spans.spans
    span.trace_state = "SECRET=1"
    span.links.add(trace_state="SECRET").attributes.extend(lib.pairs({"SECRET": "SECRET"}))
    event = span.events.add(name="api.ABORTED", time_unix_nano=1)
    event.attributes.extend(lib.pairs({"reason": "client_disconnect", "error": "SECRET"}))
    exception = span.events.add(name="exception", time_unix_nano=1)
    exception.attributes.extend(lib.pairs({"exception.stacktrace": "SECRET"}))
    other = resource_spans.scope_spans.add()
    other.scope.name = "fastapi"
    other.spans.add().CopyFrom(span)
    other.spans[0].name, other.spans[0].status.message = "GET /users/SECRET", "SECRET"
    other.spans[0].attributes.extend(lib.pairs({"http.route": "/users/{id}", "url.full": "SECRET"}))
    return message.SerializeToString() + HIDDEN


def written(body, **options):
    (part,) = PrivacyFilter(**options).by_sender(body, Observed())
    return part, TracesData.FromString(part.payload)


def keys(attributes):
    return [attribute.key for attribute in attributes]


def test_nothing_a_user_wrote_is_written(secret):
    assert secret.count(b"SECRET") > 15
    part, data = written(secret)
    assert b"SECRET" not in part.payload
    assert part.sender == Sender("vllm", "h")
    vllm, other = (scope.spans[0] for scope in data.resource_spans[0].scope_spans)
    assert keys(vllm.attributes) == ["gen_ai.request.id"]
    assert [(event.name, keys(event.attributes)) for event in vllm.events] == [
        ("api.ABORTED", ["reason"]),
        ("exception", []),
    ]
    assert keys(data.resource_spans[0].resource.attributes) == ["service.name", "host.name"]
    assert (other.name, len(other.events), len(other.attributes)) == ("", 0, 0)
    assert part.spans == 2


def test_more_is_written_on_request(secret):
    _, data = written(secret, keep_attributes=("user.email",), all_spans=True)
    vllm, other = (scope.spans[0] for scope in data.resource_spans[0].scope_spans)
    assert keys(vllm.attributes) == ["gen_ai.request.id", "user.email"]
    assert other.name == "GET /users/SECRET"
    assert keys(other.attributes) == ["gen_ai.request.id", "user.email", "http.route"]
    assert len(other.events) == 0


def test_other_spans_are_counted_as_in_a_file(secret, tmp_path):
    (part,) = PrivacyFilter().by_sender(secret, Observed())
    store = TraceStore(tmp_path / "received", rotation=Rotation(), configs={})
    assert store.commit([part]) == {}
    store.close()
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "traces.pb").write_bytes(secret.removesuffix(HIDDEN))
    counted = []
    for name in ("received", "file"):
        ingest([tmp_path / name], tmp_path / f"tables-{name}", options=IngestOptions())
        runs = TableStore(tmp_path / f"tables-{name}").read("runs")
        counted.append(runs.select("spans", "other_spans", "rejects", "events").rows())
    assert counted[0] == counted[1]


VALUE = b"\x12\x03\x0a\x01x"


@pytest.mark.parametrize(
    ("encoded", "found"),
    [
        ([VALUE + b"\x0a\x11gen_ai.request.id"], 1),  # the value before the key
        ([b"\x0a\x91\x00gen_ai.request.id" + VALUE], 1),  # a length of two bytes
        ([b"", b"\x0a\x11gen_ai.request.id" + VALUE], 1),  # an empty attribute before it
        ([b"\x0a\x11gen_ai.request.iD" + VALUE], 0),
    ],
)
def test_attributes_are_known_however_they_are_encoded(encoded, found):
    """Protobuf allows all of them."""
    span = b"".join(b"\x4a" + bytes([len(one)]) + one for one in encoded)
    scope = b"\x0a\x0a\x0a\x08vllm.api\x12" + bytes([len(span)]) + span
    _, data = written(b"\x0a" + bytes([len(scope) + 2]) + b"\x12" + bytes([len(scope)]) + scope)
    (span,) = data.resource_spans[0].scope_spans[0].spans
    assert keys(span.attributes) == ["gen_ai.request.id"] * found


@pytest.mark.parametrize("attribute", [b"\x0a", b"\x0a\x05ab", b"\xff", b"\x0a\x02\xff\xfe"])
def test_attributes_that_cannot_be_read_are_no_request(attribute):
    span = b"\x4a" + bytes([len(attribute)]) + attribute
    scope = b"\x0a\x0a\x0a\x08vllm.api\x12" + bytes([len(span)]) + span
    body = b"\x0a" + bytes([len(scope) + 2]) + b"\x12" + bytes([len(scope)]) + scope
    with pytest.raises(RequestError, match="not an ExportTraceServiceRequest"):
        PrivacyFilter().by_sender(body, Observed())


def test_a_request_of_several_servers_goes_to_each(lib):
    body = b"".join(
        lib.request(n, service=service, instance=instance).SerializeToString()
        for n, (service, instance) in enumerate([("a", "1"), ("b", ""), ("a", "1"), ("a", "2")], 1)
    )
    parts = PrivacyFilter().by_sender(body, Observed())
    assert [(part.sender, part.spans) for part in parts] == [
        (("a", "1"), 2),
        (("b", ""), 1),
        (("a", "2"), 1),
    ]


def test_a_sender_without_a_name_has_a_folder_too(lib):
    (part,) = PrivacyFilter().by_sender(lib.request(1, service="").SerializeToString(), Observed())
    assert part.sender == Sender("unknown", "")


@pytest.mark.parametrize(
    "spelling", [("resourceSpans", "scopeSpans", "traceId"), ("resource_spans", "scope_spans", "trace_id")]
)
def test_json_and_protobuf_say_the_same(spelling):
    resource, scope, trace_id = spelling
    span = {trace_id: "AB" * 16, "name": "x", "links": [{"traceId": "zz"}], "droppedEventsCount": 3}
    body = json.dumps({resource: [{scope: [{"spans": [span]}]}]}).encode()
    data = TracesData.FromString(protobuf_of_json(body))
    (found,) = data.resource_spans[0].scope_spans[0].spans
    assert (found.trace_id, found.name, found.dropped_events_count) == (b"\xab" * 16, "x", 3)
