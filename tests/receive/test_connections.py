"""Connections that do nothing: they are closed in time, and too many of them keep nobody out."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import resource
import socket

import pytest

from receive.test_protocols import PROTOBUF, export, in_thread, post
from tracefit.receive import connections
from tracefit.receive.options import IntakeLimits, ReceiveOptions

BEGUN = b"POST /v1/traces HTTP/1.1\r\nhost: x\r\n"
BODY_MISSING = BEGUN + b"content-type: application/x-protobuf\r\ncontent-length: 100\r\n\r\nabc"


@contextlib.asynccontextmanager
async def connected(port, count):
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for _ in range(count):
            found.append(await asyncio.open_connection("127.0.0.1", port))
            stack.callback(found[-1][1].close)
        yield found


@pytest.mark.parametrize("kind", ["http_port", "grpc_port"])
@pytest.mark.parametrize("limit", ["connections", "connections_of_address"])
def test_most_silent_of_too_many_connections_are_closed(lib, tmp_path, kind, limit):
    """Nothing is closed as long as they are few; of too many, one that has just sent something stays."""
    limits = IntakeLimits(**{"connections_of_address": 3, limit: 2})

    async def main():
        async with lib.running(tmp_path, limits=limits) as at:
            port = getattr(at, kind)

            def silent():
                return {each.port: each.silent_ms for each in connections.connections_of(port)}

            async with connected(port, 2):
                await lib.until(lambda: len(silent()) == 2)
                assert connections.close_silent(port, limits) == 0
            await lib.until(lambda: not silent())
            async with connected(port, 4) as found:
                ports = [writer.get_extra_info("sockname")[1] for _, writer in found]
                await lib.until(lambda: len(silent()) == 4 and min(silent().values()) > 5)
                for _, writer in found[:2]:
                    writer.write(BEGUN if kind == "http_port" else b"PRI * HTTP/2.0")
                await lib.until(
                    lambda: max(silent()[ports[n]] for n in (0, 1)) < min(silent()[ports[n]] for n in (2, 3))
                )
                assert connections.close_silent(port, limits) == 2
                await asyncio.gather(found[2][0].read(), found[3][0].read())
                await lib.until(lambda: set(silent()) == set(ports[:2]))

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["http_port", "grpc_port"])
def test_a_port_accepts_a_limited_number(lib, tmp_path, kind):
    async def main():
        async with lib.running(tmp_path, limits=IntakeLimits(accepted=1)) as at:
            body = lib.request(1).SerializeToString()

            async def is_taken():
                try:
                    if kind == "http_port":
                        return (await in_thread(post, at.http_port, body, PROTOBUF))[0] == 200
                    return (await in_thread(export, at.grpc_port, body))[0] == "OK"
                except (
                    OSError,
                    http.client.HTTPException,
                ):  # an answer to what is still being sent may be lost
                    return False

            async with connected(getattr(at, kind), 1):
                assert not await is_taken()
            while not await is_taken():
                pass

    asyncio.run(asyncio.wait_for(main(), 30))


@pytest.mark.parametrize("is_tls", [False, True])
@pytest.mark.parametrize(
    ("kind", "sent"),
    [("http_port", b""), ("http_port", BEGUN), ("grpc_port", b""), ("grpc_port", b"PRI * HTTP/2.0")],
)
def test_silent_or_half_open_connection_is_closed(lib, tmp_path, certificate, kind, sent, is_tls):
    """With TLS, the client sends bytes that are not a handshake, or nothing at all."""
    cert, key = certificate
    options = ReceiveOptions(grpc_port=0, http_port=0, **({"tls_cert": cert, "tls_key": key} if is_tls else {}))

    async def main():
        limits = IntakeLimits(idle_s=0.2, read_s=0.2)
        async with (
            lib.running(tmp_path, limits=limits, options=options) as at,
            connected(getattr(at, kind), 1) as found,
        ):
            ((reader, writer),) = found
            writer.write(sent)
            with contextlib.suppress(ConnectionResetError):
                while await reader.read(100):
                    pass

    asyncio.run(asyncio.wait_for(main(), 30))


@pytest.mark.parametrize("sent", [b"", BEGUN, BODY_MISSING])
@pytest.mark.parametrize("kind", ["http_port", "grpc_port"])
def test_hanging_sender_does_not_delay_the_end(lib, tmp_path, kind, sent):
    complaints = []

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        limits = IntakeLimits(drain_s=0.2)
        async with contextlib.AsyncExitStack() as clients, lib.running(tmp_path, limits=limits) as at:
            ((_, writer),) = await clients.enter_async_context(connected(getattr(at, kind), 1))
            writer.write(sent)
            await writer.drain()
            await in_thread(export, at.grpc_port, lib.request(1))
        await asyncio.sleep(0)  # what a task has to say is said once it is gone

    asyncio.run(asyncio.wait_for(main(), 30))
    assert complaints == []
    assert len(lib.span_ids(tmp_path)) == 1


def test_descriptor_limit_is_raised():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        descriptors = connections.want_descriptors()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert (soft, hard) == (
            4096 if before[1] == resource.RLIM_INFINITY else min(4096, before[1]),
            before[1],
        )
        assert descriptors == soft
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    ("descriptors", "found"),
    [(4096, (1536, 1024, 512)), (1 << 20, (1536, 1024, 512)), (1024, (384, 256, 128)), (100, (1, 1, 1))],
)
def test_connections_leave_descriptors_for_files(descriptors, found):
    """Of both ports, with 256 of them for the rest."""
    limits = IntakeLimits().within(descriptors)
    assert (limits.accepted, limits.connections, limits.connections_of_address) == found


def test_only_sockets_of_the_port_are_closed():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sender,
    ):
        accepted, _ = server.accept()
        with accepted:
            assert connections.close_silent(1, IntakeLimits(connections_of_address=0)) == 0
            sender.sendall(b"x")
            assert accepted.recv(1) == b"x"
            port = server.getsockname()[1]
            assert connections.close_silent(port, IntakeLimits(connections_of_address=0)) == 1
            assert sender.recv(1) == b""
