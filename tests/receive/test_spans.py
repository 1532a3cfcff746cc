"""Parts of the spans that are written: those that tables are made of, and no text of users."""

from __future__ import annotations

import gzip
import json

import pytest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from receive.conftest import at_once
from tracefit import IngestOptions, ingest
from tracefit.receive.observed import Observed
from tracefit.receive.options import Rotation
from tracefit.receive.spans import (
    SLICE_ELEMENTS,
    PrivacyFilter,
    RequestError,
    Sender,
    gunzip,
    protobuf_of_json,
)
from tracefit.receive.spans import _ScopeSpans as PIECES
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
    (part,) = at_once(PrivacyFilter(**options).by_sender(body, Observed()))
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


@pytest.mark.slow
def test_other_spans_are_counted_as_in_a_file(secret, tmp_path):
    (part,) = at_once(PrivacyFilter().by_sender(secret, Observed()))
    store = TraceStore(tmp_path / "received", rotation=Rotation())
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
        at_once(PrivacyFilter().by_sender(body, Observed()))


def test_a_request_of_several_servers_goes_to_each(lib):
    body = b"".join(
        lib.request(n, service=service, instance=instance).SerializeToString()
        for n, (service, instance) in enumerate([("a", "1"), ("b", ""), ("a", "1"), ("a", "2")], 1)
    )
    parts = at_once(PrivacyFilter().by_sender(body, Observed()))
    assert [(part.sender, part.spans) for part in parts] == [
        (Sender("a", "1"), 2),
        (Sender("b", ""), 1),
        (Sender("a", "2"), 1),
    ]


def test_a_sender_without_a_name_has_a_folder_too(lib):
    (part,) = at_once(PrivacyFilter().by_sender(lib.request(1, service="").SerializeToString(), Observed()))
    assert part.sender == Sender("unknown", "")


@pytest.mark.parametrize(
    "spelling", [("resourceSpans", "scopeSpans", "traceId"), ("resource_spans", "scope_spans", "trace_id")]
)
def test_json_and_protobuf_say_the_same(spelling):
    resource, scope, trace_id = spelling
    span = {trace_id: "AB" * 16, "name": "x", "links": [{"traceId": "zz"}], "droppedEventsCount": 3}
    body = json.dumps({resource: [{scope: [{"spans": [span]}]}]}).encode()
    data = TracesData.FromString(at_once(protobuf_of_json(body)))
    (found,) = data.resource_spans[0].scope_spans[0].spans
    assert (found.trace_id, found.name, found.dropped_events_count) == (b"\xab" * 16, "x", 3)


def field(tag, content):
    """Return a field whose content is of a known length, encoded."""
    size, length = len(content), []
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([tag, *length, size]) + content


def request_of(*spans, resource=b"", scope=b"vllm.scheduler.step"):
    """Return a request with the fields of a `ScopeSpans`, encoded; of spans the tag is 0x12."""
    return field(0x0A, resource + field(0x12, field(0x0A, field(0x0A, scope)) + b"".join(spans)))


EVENT, ATTRIBUTE, OTHER = b"\x5a\x00", b"\x4a\x00", b"\xf8\x07\x00"
EVENT_ATTRIBUTE = b"\x1a\x00"
IN_JSON = {
    "resources": b'{"resourceSpans":[%b]}',
    "scopes": b'{"resourceSpans":[{"scopeSpans":[%b]}]}',
    "spans": b'{"resourceSpans":[{"scopeSpans":[{"spans":[%b]}]}]}',
    "events": b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"events":[%b]}]}]}]}',
}


@pytest.mark.parametrize(
    "body",
    {
        "resources": b"\x0a\x00" * 50_000,
        "scopes": field(0x0A, b"\x12\x00" * 50_000),
        "spans": request_of(b"\x12\x00" * 50_000),
        "events of spans": request_of(field(0x12, EVENT * 40) * 2000),
        "attributes of spans": request_of(field(0x12, ATTRIBUTE * 40) * 2000),
        "attributes of events": request_of(field(0x12, field(0x5A, EVENT_ATTRIBUTE * 40)) * 2000),
        "unknown fields of a request": OTHER * 50_000,
        "unknown fields of a resource": field(0x0A, OTHER * 50_000),
        "unknown fields of a scope": request_of(OTHER * 50_000),
        "long resources": request_of(resource=field(0x0A, b"\x0a\x00" * 30_000)) * 10,
    }.items(),
    ids=lambda item: item[0],
)
def test_a_request_of_too_many_parts_is_refused(monkeypatch, body):
    monkeypatch.setattr("tracefit.receive.spans.MAX_ELEMENTS", 40_000)
    with pytest.raises(RequestError, match="more than 40,000 spans, events and attributes"):
        at_once(PrivacyFilter().by_sender(body[1], Observed()))


@pytest.mark.parametrize(
    "body",
    {
        "events of a span": request_of(field(0x12, EVENT * 5_000_000)),
        "attributes of a span": request_of(field(0x12, ATTRIBUTE * 5_000_000)),
        "unknown fields of a span": request_of(field(0x12, OTHER * 5_000_000)),
        "attributes of an event": request_of(field(0x12, field(0x5A, EVENT_ATTRIBUTE * 5_000_000))),
        "attributes of a resource": request_of(resource=field(0x0A, b"\x0a\x00" * 5_000_000)),
        "attributes of a scope": field(0x0A, field(0x12, field(0x0A, b"\x1a\x00" * 5_000_000))),
    }.items(),
    ids=lambda item: item[0],
)
def test_millions_of_parts_are_refused_before_parsing(monkeypatch, body):
    """None of them is given to protobuf, which would make objects of a hundred bytes each."""
    parsed = []
    library = PIECES.FromString

    class Counting:
        @staticmethod
        def FromString(piece):  # noqa: N802 - protobuf's name
            parsed.append(len(piece))
            return library(piece)

    monkeypatch.setattr("tracefit.receive.spans._ScopeSpans", Counting)
    with pytest.raises(RequestError, match="more than 65,536"):
        at_once(PrivacyFilter().by_sender(body[1], Observed()))
    assert sum(parsed) < 100


@pytest.mark.parametrize("where", IN_JSON)
def test_json_request_of_too_many_objects_is_refused(where):
    with pytest.raises(RequestError, match="more than 1,048,576 objects"):
        at_once(protobuf_of_json(IN_JSON[where] % (b"{}," * 1_100_000 + b"{}")))


@pytest.mark.parametrize(
    "where", [b'"resource":{%b}', b'"scopeSpans":[{"scope":{%b}}]', b'"scopeSpans":[{"spans":[{%b}]}]']
)
def test_an_object_of_thousands_is_refused_in_json(where):
    inside = where % (b'"attributes":[' + b"{}," * 5000 + b"{}]")
    with pytest.raises(RequestError, match="more than 4,096 objects"):
        at_once(protobuf_of_json(b'{"resourceSpans":[{' + inside + b"}]}"))


def test_an_attribute_that_is_a_list_of_millions_is_not_unfolded(monkeypatch):
    """Neither for a number that may be in it, nor to find the key, which stands behind it in the second one."""
    parsed = []

    class Counting:
        @staticmethod
        def FromString(encoded):  # noqa: N802
            parsed.append(len(encoded))
            return KeyValue.FromString(encoded)

    privacy = PrivacyFilter()
    monkeypatch.setattr("tracefit.receive.observed.KeyValue", Counting)
    monkeypatch.setattr("tracefit.receive.spans.KeyValue", Counting)
    values = field(0x12, field(0x2A, b"\x0a\x00" * 1_000_000))
    kept, odd = field(0x0A, b"step.id") + values, values + field(0x0A, b"other")
    event = field(0x5A, field(0x12, b"step.BATCH_SUMMARY") + field(0x1A, kept) + field(0x1A, odd))
    (part,) = at_once(privacy.by_sender(request_of(field(0x12, event)), Observed()))
    (event,) = TracesData.FromString(part.payload).resource_spans[0].scope_spans[0].spans[0].events
    assert (part.spans, keys(event.attributes), parsed) == (1, ["step.id"], [])


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("stated", [50 << 20, 10])
def test_gzip_is_decompressed_as_far_as_it_says(stated):
    """Fifty MiB that say so, or that they are ten bytes: neither is decompressed."""
    body = gzip.compress(bytes(50 << 20))[:-4] + stated.to_bytes(4, "little")
    slices = []
    with pytest.raises(RequestError, match=r"longer than 16,777,216 bytes|something behind it"):
        slices.extend(gunzip(body, limit_bytes=16 << 20))
    assert len(slices) <= 1


@pytest.mark.parametrize("spans", [[b"\x0a\x10" + b"i" * 16 + EVENT * 10] * 2000, [EVENT * 20_000]], ids=len)
def test_other_requests_get_turns_during_a_long_one(spans):
    """In a request of many spans, and in one long span."""
    work = PrivacyFilter().by_sender(request_of(*(field(0x12, span) for span in spans)), Observed())
    assert sum(1 for _ in work) >= 20_000 // SLICE_ELEMENTS


def test_a_request_in_pieces_is_what_it_was(lib):
    """Spans of several pieces and one longer than a piece: all are written, in order, with their events."""
    message = lib.request(*range(1, 1001), note="x" * 200)
    (scope,) = message.resource_spans[0].scope_spans
    for number in range(1000):
        scope.spans[500].events.add(name="x" * 200, time_unix_nano=number)
    part, data = written(message.SerializeToString())
    spans = [span for each in data.resource_spans[0].scope_spans for span in each.spans]
    assert [int.from_bytes(span.trace_id, "big") for span in spans] == list(range(1, 1001))
    assert [event.time_unix_nano for event in spans[500].events] == list(range(1000))
    assert {each.scope.name for each in data.resource_spans[0].scope_spans} == {"vllm.api"}
    assert part.spans == 1000
