"""OTLP over gRPC and HTTP as its specification has it: what is accepted, what is refused, and how."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import http.client
import json
import ssl
import threading
from collections.abc import Generator

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from tracefit.errors import UsageError
from tracefit.receive import intake
from tracefit.receive.options import IntakeLimits, ReceiveOptions, Rotation, Token
from tracefit.receive.spans import RequestError
from tracefit.receive.store import TraceStore

PROTOBUF = {"content-type": "application/x-protobuf"}
JSON = {"content-type": "application/json"}
SPAN = {
    "traceId": "0AF7651916CD43DD8448EB211C80319C",
    "spanId": "b7ad6b7169203331",
    "name": "llm_request",
    "kind": "SPAN_KIND_SERVER",
    "startTimeUnixNano": "1",
    "endTimeUnixNano": 2,
}


def in_thread(function, *arguments):
    return asyncio.get_running_loop().run_in_executor(None, function, *arguments)


def post(port, body, headers, *, path="/v1/traces", method="POST", context=None):
    """Return code, headers and body of an answer."""
    kind = http.client.HTTPSConnection if context else http.client.HTTPConnection
    more = {"context": context} if context else {}
    with contextlib.closing(kind("127.0.0.1", port, timeout=30, **more)) as connection:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.headers.items()), answer.read()


def export(port, message, *, metadata=(), compression=None, credentials=None, timeout=30):
    """Return the code, the details and the trailers of a gRPC export."""
    channel = (
        grpc.secure_channel(f"localhost:{port}", credentials)
        if credentials
        else grpc.insecure_channel(f"127.0.0.1:{port}")
    )
    with channel:
        call = channel.unary_unary(
            "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
            request_serializer=lambda m: m if isinstance(m, bytes) else m.SerializeToString(),
            response_deserializer=trace_service_pb2.ExportTraceServiceResponse.FromString,
        )
        try:
            _, done = call.with_call(message, metadata=metadata, compression=compression, timeout=timeout)
        except grpc.RpcError as error:
            done = error
        return done.code().name, done.details(), dict(done.trailing_metadata() or ())


def sent_over_http(lib, tmp_path, body, headers, *, limits=None, token=None, **how):
    async def main():
        async with lib.running(tmp_path, limits=limits, token=token) as at:
            return await in_thread(lambda: post(at.http_port, body, headers, **how))

    return asyncio.run(main())


def sent_over_grpc(lib, tmp_path, message, *, limits=None, token=None, **how):
    async def main():
        async with lib.running(tmp_path, limits=limits, token=token) as at:
            return await in_thread(lambda: export(at.grpc_port, message, **how))

    return asyncio.run(main())


@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip])
def test_grpc_takes_a_request(lib, tmp_path, compression):
    assert sent_over_grpc(lib, tmp_path, lib.request(1, 2), compression=compression)[0] == "OK"
    assert [span for _, span in lib.span_ids(tmp_path)] == [b"\0" * 7 + b"\1", b"\0" * 7 + b"\2"]


@pytest.mark.parametrize("is_gzip", [False, True])
def test_http_takes_protobuf(lib, tmp_path, is_gzip):
    body = lib.request(1, 2).SerializeToString()
    headers = {**PROTOBUF, **({"content-encoding": "gzip"} if is_gzip else {})}
    code, said, content = sent_over_http(lib, tmp_path, gzip.compress(body) if is_gzip else body, headers)
    assert (code, said["content-type"], content) == (200, "application/x-protobuf", b"")
    assert len(lib.span_ids(tmp_path)) == 2


@pytest.mark.parametrize("is_gzip", [False, True])
def test_http_takes_json_whose_ids_are_hexadecimal(lib, tmp_path, is_gzip):
    body = json.dumps(
        {"resourceSpans": [{"scopeSpans": [{"scope": {"name": "vllm.api"}, "spans": [SPAN]}]}], "more": 1}
    ).encode()
    headers = {"content-type": "application/json; charset=utf-8"}
    headers |= {"content-encoding": "gzip"} if is_gzip else {}
    code, said, content = sent_over_http(lib, tmp_path, gzip.compress(body) if is_gzip else body, headers)
    assert (code, said["content-type"], json.loads(content)) == (200, "application/json", {})
    assert lib.span_ids(tmp_path) == [(bytes.fromhex(SPAN["traceId"]), bytes.fromhex(SPAN["spanId"]))]


def test_http_takes_a_chunked_body(lib, tmp_path):
    body = lib.request(*range(1, 50)).SerializeToString()
    chunks = iter([body[:100], body[100:]])
    assert sent_over_http(lib, tmp_path, chunks, PROTOBUF)[0] == 200
    assert len(lib.span_ids(tmp_path)) == 49


def test_connection_survives_a_refused_request(lib, tmp_path):
    def talk(port):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        codes = []
        for number, path in ((1, "/v1/traces"), (2, "/v1/logs"), (3, "/v1/traces")):
            connection.request("POST", path, lib.request(number).SerializeToString(), PROTOBUF)
            answer = connection.getresponse()
            answer.read()
            codes.append(answer.status)
            assert connection.sock is not None, "closed after this answer"
        connection.close()
        return codes

    async def main():
        async with lib.running(tmp_path) as at:
            return await in_thread(talk, at.http_port)

    assert asyncio.run(main()) == [200, 404, 200]
    assert len(lib.span_ids(tmp_path)) == 2


@pytest.mark.parametrize("path", ["/v1/logs", "/v1/metrics", "/", "/v1/traces/x"])
def test_http_refuses_other_signals_politely(lib, tmp_path, path):
    code, _, content = sent_over_http(lib, tmp_path, b"{}", JSON, path=path)
    assert code == 404
    assert "traces" in json.loads(content)["message"]
    assert "\n" not in json.loads(content)["message"]


@pytest.mark.parametrize(
    ("headers", "method", "code"),
    [
        ({"content-type": "text/plain"}, "POST", 415),
        ({**PROTOBUF, "content-encoding": "br"}, "POST", 415),
        (PROTOBUF, "GET", 405),
    ],
)
def test_http_says_what_it_takes(lib, tmp_path, headers, method, code):
    got, _, content = sent_over_http(lib, tmp_path, b"x", headers, method=method)
    assert got == code
    assert Status.FromString(content).message


def test_grpc_refuses_other_signals_politely(lib, tmp_path):
    def both(port):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            calls = (
                (
                    metrics_service_pb2_grpc.MetricsServiceStub,
                    metrics_service_pb2.ExportMetricsServiceRequest,
                ),
                (logs_service_pb2_grpc.LogsServiceStub, logs_service_pb2.ExportLogsServiceRequest),
            )
            for stub, message in calls:
                with pytest.raises(grpc.RpcError) as refused:
                    stub(channel).Export(message(), timeout=30)
                assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
                assert "only traces" in refused.value.details()

    async def main():
        async with lib.running(tmp_path) as at:
            await in_thread(both, at.grpc_port)

    asyncio.run(main())


@pytest.mark.parametrize("body", [b"\xff\xff", b"\x0a\x05abc", b"\x0a\x03\x12\x01\x0a"])
def test_malformed_request_is_refused_for_good(lib, tmp_path, body):
    assert sent_over_http(lib, tmp_path, body, PROTOBUF)[0] == 400
    code, _, trailers = sent_over_grpc(lib, tmp_path, body)
    assert code == "INVALID_ARGUMENT"
    assert "google.rpc.retryinfo-bin" not in trailers


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"resourceSpans": 1}',
        b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "xy"}]}]}]}',
        b"[" * 100000,
        b'{"resourceSpans": [{"resource": 7}]}',
        b'{"resourceSpans": [{"resource": {"a": ' + b"9" * 10000 + b"}}]}",
        b"\xff",
    ],
)
def test_json_that_is_no_request_is_refused_in_a_line(lib, tmp_path, body):
    code, _, content = sent_over_http(lib, tmp_path, body, JSON)
    assert (code, json.loads(content)["code"]) == (400, 3)


def test_an_empty_request_is_fine(lib, tmp_path):
    assert sent_over_http(lib, tmp_path, b"", PROTOBUF)[0] == 200
    assert sent_over_grpc(lib, tmp_path, b"")[0] == "OK"
    assert lib.span_ids(tmp_path) == []


SMALL = IntakeLimits(message_bytes=10_000, header_bytes=4096, read_s=0.3)


@pytest.mark.parametrize("how", ["plain", "chunked", "gzip"])
def test_http_has_a_limit_on_a_message_sent_and_decompressed(lib, tmp_path, how):
    body = lib.request(1, note="x" * 10_000).SerializeToString()
    headers = {
        "plain": {},
        "chunked": {},
        "gzip": {"content-encoding": "gzip"},
    }[how]
    sent = {"plain": body, "chunked": iter([body[:6000], body[6000:]]), "gzip": gzip.compress(body)}[how]
    code, _, content = sent_over_http(lib, tmp_path, sent, PROTOBUF | headers, limits=SMALL)
    assert code == (400 if how == "gzip" else 413)
    assert "10,000 bytes" in Status.FromString(content).message
    assert lib.span_ids(tmp_path) == []


def test_grpc_has_the_same_limits(lib, tmp_path):
    message = lib.request(1, note="x" * 10_000)
    assert sent_over_grpc(lib, tmp_path, message, limits=SMALL)[0] == "RESOURCE_EXHAUSTED"
    code, said, _ = sent_over_grpc(lib, tmp_path, message, limits=SMALL, compression=grpc.Compression.Gzip)
    assert (code, "10,000 bytes when decompressed" in said) == ("INVALID_ARGUMENT", True)
    assert lib.span_ids(tmp_path) == []


@pytest.mark.parametrize("damage", ["cut", "twice", "none"])
def test_damaged_gzip_is_refused(lib, tmp_path, damage):
    whole = gzip.compress(lib.request(1).SerializeToString())
    body = {"cut": whole[:-9], "twice": whole + whole, "none": b"plain"}[damage]
    assert sent_over_http(lib, tmp_path, body, {**PROTOBUF, "content-encoding": "gzip"})[0] == 400


def test_headers_have_a_limit(lib, tmp_path):
    code, _, _ = sent_over_http(lib, tmp_path, b"", PROTOBUF | {"x-long": "x" * 5000}, limits=SMALL)
    assert code == 431
    code, _, _ = sent_over_grpc(lib, tmp_path, b"", limits=SMALL, metadata=(("x-long", "x" * 5000),))
    assert code == "RESOURCE_EXHAUSTED"


def test_stalled_sender_loses_its_reader(lib, tmp_path):
    limits = IntakeLimits(readers=1, read_s=0.3)

    async def main():
        async with lib.running(tmp_path, limits=limits) as at:
            reader, writer = await asyncio.open_connection("127.0.0.1", at.http_port)
            head = b"POST /v1/traces HTTP/1.1\r\nhost: x\r\ncontent-type: application/x-protobuf\r\n"
            writer.write(head + b"content-length: 100\r\n\r\nabc")
            other = await in_thread(post, at.http_port, lib.request(1).SerializeToString(), PROTOBUF)
            stalled = await reader.readline()
            writer.close()
            return other[0], stalled

    assert asyncio.run(main()) == (200, b"HTTP/1.1 503 \r\n")


def test_busy_receiver_says_when_to_retry(lib, tmp_path):
    """One request holds the only place; the next waits for it too long, the one after finds no room to wait in."""
    limits = IntakeLimits(readers=1, queued_requests=1, queue_s=0.3, read_s=30)

    async def main():
        async with lib.running(tmp_path, limits=limits) as at:
            _, writer = await asyncio.open_connection("127.0.0.1", at.http_port)
            writer.write(
                b"POST /v1/traces HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{"
            )
            await lib.until(lambda: at.intake.open_requests)
            over_http = await in_thread(post, at.http_port, b"{}", JSON)
            over_grpc = await in_thread(export, at.grpc_port, lib.request(1))
            writer.write(b"        ")
            writer.write(b"")
            writer.close()
            return over_http, over_grpc, at.intake.observed.refusals.counts

    (code, headers, content), (name, said, trailers), refused = asyncio.run(main())
    assert (code, headers["retry-after"]) == (503, "1")
    assert json.loads(content) == {"code": 14, "message": "too many requests at once"}
    assert (name, said) == ("UNAVAILABLE", "too many requests at once")
    assert RetryInfo.FromString(trailers["google.rpc.retryinfo-bin"]).retry_delay.seconds == 1
    (detail,) = Status.FromString(trailers["grpc-status-details-bin"]).details
    unpacked = RetryInfo()
    assert detail.Unpack(unpacked)
    assert unpacked.retry_delay.seconds == 1
    assert refused["busy"] >= 2


def test_http_connections_have_a_limit(lib, tmp_path):
    async def main():
        async with lib.running(tmp_path, limits=IntakeLimits(accepted=1)) as at:
            _, writer = await asyncio.open_connection("127.0.0.1", at.http_port)
            reader, second = await asyncio.open_connection("127.0.0.1", at.http_port)
            answer = await reader.read()
            writer.close()
            second.close()
            return answer

    assert asyncio.run(main()).startswith(b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\n")


def test_more_servers_in_one_request_than_may_be_active_are_refused_for_good(lib, tmp_path):
    body = b"".join(lib.request(1, instance=name).SerializeToString() for name in "abc")

    async def main():
        async with lib.running(tmp_path, limits=IntakeLimits(senders=2)) as at:
            return (await in_thread(export, at.grpc_port, body))[0], at.intake.observed.refusals

    code, refusals = asyncio.run(main())
    assert (code, dict(refusals.counts)) == ("INVALID_ARGUMENT", {"malformed": 1})


def take(intake, message, order, name):
    """Have a message taken in as if a sender had sent it, and note in the end that it was."""

    async def read():
        return message.SerializeToString()

    async def main():
        await intake.take(read)
        order.append(name)

    return asyncio.ensure_future(main())


def test_a_request_that_takes_long_does_not_hold_up_another(lib, tmp_path, monkeypatch):
    """The second one comes while the first is decoded, and is answered before it."""
    monkeypatch.setattr("tracefit.receive.spans.SLICE_ELEMENTS", 100)
    order = []

    async def main():
        async with lib.running(tmp_path) as at:
            steps = lib.request(*range(1, 10_000), scope="vllm.scheduler.step")
            long = take(at.intake, steps, order, "long")
            await lib.until(lambda: at.intake.observed.step_spans)
            await take(at.intake, lib.request(1), order, "short")
            await long

    asyncio.run(main())
    assert order == ["short", "long"]


def test_a_refusal_does_not_hold_the_request(lib, tmp_path):
    """A sender may take its time to read the answer."""

    def held(error):
        """Yield what the frames of an error hold, and of what it came from."""
        while error is not None:
            traceback = error.__traceback__
            while traceback is not None:
                if traceback.tb_frame.f_code.co_filename.endswith(("intake.py", "spans.py")):
                    yield from traceback.tb_frame.f_locals.values()
                traceback = traceback.tb_next
            error = error.__context__

    async def main():
        async with lib.running(tmp_path) as at:
            for content in (b"\xff" * 100, gzip.compress(b"x")[:-9], gzip.compress(b"\xff")):

                async def read(content=content):
                    return content

                with pytest.raises(RequestError) as refused:
                    await at.intake.take(read)
                assert not [each for each in held(refused.value) if isinstance(each, bytes | Generator)]

    asyncio.run(main())


def test_short_requests_do_not_wait_for_long_ones(lib, tmp_path, monkeypatch):
    """Long ones are decoded one after another, and while they wait others are read: there is one reader."""
    monkeypatch.setattr("tracefit.receive.spans.SLICE_ELEMENTS", 100)
    monkeypatch.setitem(intake._SHORT_BYTES, "protobuf", 1000)
    order = []
    steps = lib.request(*range(1, 5_000), scope="vllm.scheduler.step")
    # A quarter of it has room for two that wait, as long as ended ones take none.
    limits = IntakeLimits(readers=1, pending_bytes=9 * steps.ByteSize())

    async def main():
        async with lib.running(tmp_path, limits=limits) as at:
            long = [take(at.intake, steps, order, "long") for _ in range(3)]
            await lib.until(lambda: at.intake.open_requests == 3)
            await take(at.intake, lib.request(1), order, "short")
            await asyncio.gather(*long)
            await take(at.intake, steps, order, "later")

    asyncio.run(main())
    assert order == ["short", "long", "long", "long", "later"]


TOKEN = "a-token-of-some-length"  # noqa: S105


@pytest.fixture
def token(tmp_path):
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    return Token(path)


@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer wrong", TOKEN, f"Bearer {TOKEN}x", "Bearer é"])
def test_without_the_token_nothing_is_taken(lib, tmp_path, token, given):
    body = lib.request(1).SerializeToString()
    headers = PROTOBUF | ({} if given is None else {"authorization": given.encode()})
    code, said, _ = sent_over_http(lib, tmp_path, body, headers, token=token)
    assert (code, said["www-authenticate"]) == (401, "Bearer")
    if given is None or given.isascii():
        metadata = () if given is None else (("authorization", given),)
        assert sent_over_grpc(lib, tmp_path, body, token=token, metadata=metadata)[0] == "UNAUTHENTICATED"
    assert lib.span_ids(tmp_path) == []


def test_request_with_the_token_is_taken(lib, tmp_path, token):
    given = f"Bearer {TOKEN}"
    body = lib.request(1).SerializeToString()
    assert sent_over_http(lib, tmp_path, body, PROTOBUF | {"authorization": given}, token=token)[0] == 200
    metadata = (("authorization", given),)
    assert sent_over_grpc(lib, tmp_path, body, token=token, metadata=metadata)[0] == "OK"


@pytest.mark.parametrize("content", ["", "short", "two words of a token\n", "ünïcödé-tökens-are-not-sent\n"])
def test_a_token_that_protects_nothing_is_refused(tmp_path, content):
    (tmp_path / "token").write_text(content)
    with pytest.raises(UsageError, match="token of 16 or more"):
        Token(tmp_path / "token")


def test_both_ports_speak_tls_with_a_certificate(lib, tmp_path, certificate):
    cert, key = certificate
    options = ReceiveOptions(grpc_port=0, http_port=0, tls_cert=cert, tls_key=key)
    body = lib.request(1).SerializeToString()

    async def main():
        async with lib.running(tmp_path, options=options) as at:
            context = ssl.create_default_context(cafile=cert)
            over_http = await in_thread(lambda: post(at.http_port, body, PROTOBUF, context=context))
            credentials = grpc.ssl_channel_credentials(cert.read_bytes())
            over_grpc = await in_thread(lambda: export(at.grpc_port, body, credentials=credentials))
            with pytest.raises((OSError, http.client.HTTPException)):
                await in_thread(post, at.http_port, body, PROTOBUF)
            return over_http[0], over_grpc[0]

    assert asyncio.run(main()) == (200, "OK")
    assert len(lib.span_ids(tmp_path)) == 2


@pytest.mark.mostly_slow(every=4)
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.com"])  # noqa: S104
def test_an_address_beyond_this_machine_needs_tls_or_a_word(host, certificate):
    cert, key = certificate
    with pytest.raises(UsageError, match=r"ReceiveOptions.tls_key`, or say `ReceiveOptions.insecure"):
        ReceiveOptions(host=host).require_safe()
    ReceiveOptions(host=host, insecure=True).require_safe()
    ReceiveOptions(host=host, tls_cert=cert, tls_key=key).require_safe()
    with pytest.raises(UsageError, match="go together"):
        ReceiveOptions(host=host, tls_cert=cert).require_safe()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_loopback_needs_nothing(host):
    ReceiveOptions(host=host).require_safe()


def test_a_port_that_is_taken_is_one_line(lib, tmp_path):
    async def main():
        async with lib.running(tmp_path) as at:
            for taken in ({"grpc_port": at.grpc_port}, {"http_port": at.http_port}):
                options = ReceiveOptions(**{"grpc_port": 0, "http_port": 0, **taken})
                with pytest.raises(UsageError, match="cannot listen"):
                    async with lib.running(tmp_path, options=options):
                        pass

    asyncio.run(main())


def test_a_slow_disk_stops_the_senders_not_the_memory(lib, tmp_path, monkeypatch):
    """Nothing more is read while more waits for the disk than may; what was read is acknowledged in the end."""
    writes, gate = threading.Event(), threading.Event()
    store = TraceStore(tmp_path, rotation=Rotation())
    commit = store.commit
    monkeypatch.setattr(store, "commit", lambda parts: (writes.set(), gate.wait(30), commit(parts))[2])
    limits = IntakeLimits(pending_bytes=1000)

    async def main():
        async with lib.running(tmp_path, store=store, limits=limits) as at:
            first = asyncio.ensure_future(in_thread(export, at.grpc_port, lib.request(*range(1, 100))))
            await lib.until(writes.is_set)
            refused = await in_thread(export, at.grpc_port, lib.request(1000))
            over_http = await in_thread(post, at.http_port, b"{}", JSON)
            gate.set()
            return refused, over_http, await first

    refused, over_http, first = asyncio.run(main())
    assert refused[:2] == ("UNAVAILABLE", "the disk does not keep up")
    assert RetryInfo.FromString(refused[2]["google.rpc.retryinfo-bin"]).retry_delay.seconds == 5
    assert (over_http[0], over_http[1]["retry-after"]) == (503, "5")
    assert first[0] == "OK"
    assert len(lib.span_ids(tmp_path)) == 99
