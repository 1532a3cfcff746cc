"""Receivers to send to, in a process of their own or in this one, and an independent reader of what they write."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from receive.process import Process
from receive.sdk_spans import sdk_spans
from tracefit.receive.grpc_server import GrpcServer
from tracefit.receive.http_server import HttpServer
from tracefit.receive.intake import Intake
from tracefit.receive.observed import Observed
from tracefit.receive.options import IntakeLimits, ReceiveOptions, Rotation, Token
from tracefit.receive.spans import PrivacyFilter
from tracefit.receive.store import TraceStore

if TYPE_CHECKING:
    from pathlib import Path

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


def records(path: Path) -> list[TracesData]:
    """Read a file of length-prefixed zstd; a record that is cut at its end is left out."""
    data, found = path.read_bytes(), []
    while len(data) >= 4:
        size = int.from_bytes(data[:4], "big")
        if len(data) < 4 + size:
            break
        found.append(TracesData.FromString(zstd.decompress(data[4 : 4 + size])))
        data = data[4 + size :]
    return found


def span_ids(folder: Path) -> list[tuple[bytes, bytes]]:
    """Return the ids of all spans below a folder."""
    return [
        (span.trace_id, span.span_id)
        for path in sorted(folder.rglob("traces-*.binpb"))
        for data in records(path)
        for resource in data.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def pairs(values):
    return [
        KeyValue(key=k, value=AnyValue(int_value=v) if isinstance(v, int) else AnyValue(string_value=v))
        for k, v in values.items()
    ]


def request(*numbers, scope="vllm.api", name="llm_request", service="vllm", instance="", **attributes):
    """Return an export request with a span for each number."""
    message = ExportTraceServiceRequest()
    spans = message.resource_spans.add()
    named = {"service.name": service, "service.instance.id": instance}
    spans.resource.attributes.extend(pairs({k: v for k, v in named.items() if v}))
    scope_spans = spans.scope_spans.add()
    scope_spans.scope.name = scope
    for number in numbers:
        span = scope_spans.spans.add(name=name, start_time_unix_nano=1, end_time_unix_nano=2)
        span.trace_id, span.span_id = number.to_bytes(16, "big"), number.to_bytes(8, "big")
        span.attributes.extend(pairs(attributes))
    return message


@pytest.fixture
def start():
    """Return a function that starts a receiver; all of them are gone in the end."""
    started = []

    def of(out, *arguments):
        started.append(Process(out, *arguments))
        return started[-1]

    yield of
    for each in started:
        each.end(signal.SIGKILL)


@asynccontextmanager
async def running(out, *, options=None, store=None, limits=None, token=None, privacy=None, has_metrics=False):
    """Run both ports in this process, with whatever the test puts in."""
    options = options or ReceiveOptions(grpc_port=0, http_port=0)
    store = store or TraceStore(out, rotation=Rotation())
    intake = Intake(store, privacy or PrivacyFilter(), Observed(), limits or IntakeLimits())
    token = token or Token(None)
    servers = (GrpcServer(intake, token), HttpServer(intake, token, has_metrics=has_metrics))
    grpc_port, http_port = [await each.start(options) for each in servers]
    writing = asyncio.create_task(intake.run())
    try:
        yield SimpleNamespace(grpc_port=grpc_port, http_port=http_port, intake=intake, store=store)
    finally:
        await asyncio.gather(*(each.stop() for each in servers))
        intake.close()
        await writing


async def until(condition):
    """Let the event loop go on until a condition holds."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what is waited for is inside the receiver
            await asyncio.sleep(0)


def at_once(work):
    """Do all of some work that is done in slices; return its result."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", folder / "key.pem", "-out", folder / "cert.pem"]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names, *files],
        check=True,
        capture_output=True,
    )
    return folder / "cert.pem", folder / "key.pem"


@pytest.fixture(scope="session")
def lib():
    """Return the helpers of these tests."""
    return SimpleNamespace(
        records=records,
        span_ids=span_ids,
        request=request,
        running=running,
        until=until,
        sdk_spans=sdk_spans,
        pairs=pairs,
    )
