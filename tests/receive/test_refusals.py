"""Refused requests are counted by cause; a cause is reported when it begins and when it ends."""

from __future__ import annotations

import asyncio
import errno
import http.client
import os

import grpc
import pytest

from tracefit.receive.options import IntakeLimits, Token
from tracefit.receive.refusals import Refusals

EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
LOGS = "/opentelemetry.proto.collector.logs.v1.LogsService/Export"
RIGHT = "Bearer " + "x" * 16
PROTOBUF = {"content-type": "application/x-protobuf"}


def test_a_cause_is_reported_when_it_begins_and_when_it_ends(monkeypatch):
    """After a minute without it; then it may begin again."""
    now, refusals = [0.0], Refusals()
    monkeypatch.setattr("tracefit.receive.refusals.time.monotonic", lambda: now[0])
    for now[0] in (0.0, 30.0, 89.0):
        refusals.add("disk", "cannot be written (No space left on device)", "10.0.0.7")
        refusals.add("token", "a token is needed", "10.0.0.8")
    begun = refusals.news()
    assert [text.split(":")[0] for text in begun] == [
        "requests are refused (disk)",
        "requests are refused (token)",
    ]
    assert "No space left on device" in begun[0]
    assert "10.0.0.7" in begun[0]
    now[0] = 148.9
    refusals.add("token", "a token is needed", "10.0.0.8")
    assert refusals.news() == []
    assert refusals.is_lasting("disk")
    now[0] = 149.0
    assert not refusals.is_lasting("disk")
    assert refusals.news() == ["no request is refused any more (disk): 3 were, none for 60 s"]
    refusals.add("disk", "cannot be written (Read-only file system)", "10.0.0.7")
    (again,) = refusals.news()
    assert "Read-only" in again
    assert (refusals.total, dict(refusals.counts)) == (8, {"disk": 4, "token": 4})


def _over_http(port, body=b"", path="/v1/traces", token=RIGHT, headers=PROTOBUF):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", path, body, {**headers, "authorization": token})
    status = connection.getresponse().status
    connection.close()
    return status


def _over_grpc(port, body=b"", path=EXPORT, token=RIGHT):
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary(path)(body, metadata=[("authorization", token)], timeout=30)
        except grpc.RpcError as error:
            return error.code().name
    return "OK"


CASES = {
    "token": ({"token": "Bearer wrong"}, {"token": "Bearer wrong"}, 2),
    "malformed": ({"body": b"\xff"}, {"body": b"\xff"}, 2),
    "other_signal": ({"path": "/v1/logs"}, {"path": LOGS}, 2),
    "too long": ({"body": b"x" * 2000}, {"body": b"x" * 2000}, 2),
    "of another type": ({"headers": {"content-type": "text/plain"}}, {}, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_every_refusal_is_counted_by_its_cause(lib, tmp_path, case):
    over_http, over_grpc, count = CASES[case]

    async def main():
        async with lib.running(tmp_path, token=_token(tmp_path), limits=IntakeLimits(message_bytes=1000)) as at:
            await asyncio.to_thread(lambda: _over_http(at.http_port, **over_http))
            await asyncio.to_thread(lambda: _over_grpc(at.grpc_port, **over_grpc))
            return at.intake.observed.refusals

    refusals = asyncio.run(main())
    assert dict(refusals.counts) == {case if case in ("token", "other_signal") else "malformed": count}
    (text,) = refusals.news()
    assert "127.0.0.1" in text


def _token(tmp_path):
    (tmp_path / "token").write_text("x" * 16)
    return Token(tmp_path / "token")


def test_a_disk_that_cannot_be_written_is_a_cause_of_its_own(lib, tmp_path, monkeypatch):
    def fails(descriptor, data):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "write", fails)
    body = lib.request(1).SerializeToString()

    async def main():
        async with lib.running(tmp_path / "runs", token=_token(tmp_path)) as at:
            await asyncio.to_thread(_over_http, at.http_port, body)
            await asyncio.to_thread(_over_grpc, at.grpc_port, body)
            return at.intake.observed.refusals

    refusals = asyncio.run(main())
    assert dict(refusals.counts) == {"disk": 2}
    assert "Read-only file system" in refusals.news()[0]
