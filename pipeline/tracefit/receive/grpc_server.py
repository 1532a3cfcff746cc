"""OTLP/gRPC: the trace service of opentelemetry-proto, on grpcio.

Two settings let the receiver bound the memory of the library. The method is registered as one that takes a
stream, which is the same on the wire but hands over a request before its message is read. And the library
does not decompress: its limit would count only compressed bytes.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.wrappers_pb2 import Int32Value, StringValue
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from tracefit.errors import UsageError
from tracefit.options import named
from tracefit.receive.intake import ONLY_TRACES, TOKEN_NEEDED, BusyError
from tracefit.receive.options import ReceiveOptions
from tracefit.receive.spans import RequestError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tracefit.receive.intake import Intake
    from tracefit.receive.options import Token
    from tracefit.receive.refusals import Cause

    _Context = grpc.aio.ServicerContext[bytes, bytes]
    _Trailers = tuple[tuple[str, bytes], ...]

_TRACE_SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
_EXPORT = f"/{_TRACE_SERVICE}/Export"
# grpc.health.v1: its request is a string, its response an enumeration, both in field 1, as in protobuf's wrappers. The
# package grpcio-health-checking needs a newer protobuf than OpenTelemetry's older SDKs allow.
_HEALTH = "/grpc.health.v1.Health/Check"
_SERVING, _NOT_SERVING = 1, 2
_ACKNOWLEDGED = ExportTraceServiceResponse().SerializeToString()
_LOOKAHEAD_BYTES = 64 << 10
_STREAMS = 8  # of one connection: requests that wait for the disk have one too
_IDENTITY_AND_GZIP = 0b101  # bits of grpc_compression_algorithm; the one between them is deflate

# It reports clients that hang up, with a traceback.
logging.getLogger("grpc._cython.cygrpc").addHandler(logging.NullHandler())


class GrpcServer:
    """The gRPC port."""

    def __init__(self, intake: Intake, token: Token) -> None:
        limits = intake.limits
        self._server = grpc.aio.server(
            options=[
                # Two receivers on one port would each get a part of every run.
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", limits.message_bytes),
                ("grpc.max_metadata_size", limits.header_bytes),
                # Between the two limits the library refuses at random: they are the same.
                ("grpc.absolute_max_metadata_size", limits.header_bytes),
                ("grpc.max_concurrent_streams", _STREAMS),
                # Bytes of a message that the library takes before it is read; its default is megabytes from
                # every connection.
                ("grpc.http2.lookahead_bytes", _LOOKAHEAD_BYTES),
                ("grpc.http2.bdp_probe", 0),
                ("grpc.compression_enabled_algorithms_bitset", _IDENTITY_AND_GZIP),
                ("grpc.per_message_decompression", 0),
                ("grpc.max_allowed_incoming_connections", limits.accepted),
                ("grpc.server_handshake_timeout_ms", int(limits.read_s * 1000)),
                ("grpc.max_connection_idle_ms", int(limits.idle_s * 1000)),
                ("grpc.keepalive_time_ms", 60_000),
                # The library's five minutes would close connections of senders that ping more often (too_many_pings).
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
            ]
        )
        self._server.add_generic_rpc_handlers((_Handlers(intake, token),))
        self._drain_s = limits.drain_s

    async def start(self, options: ReceiveOptions) -> int:
        """Listen; return the port.

        Raises:
            UsageError: The port is taken, or certificate and key cannot be used.
        """
        address = f"[{options.host}]" if ":" in options.host else options.host
        address = f"{address}:{options.grpc_port}"
        try:
            if options.tls_cert and options.tls_key:
                pair = (options.tls_key.read_bytes(), options.tls_cert.read_bytes())
                port = self._server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
            else:
                port = self._server.add_insecure_port(address)
        except (RuntimeError, OSError) as error:
            raise UsageError(
                "cannot listen",
                where=f"gRPC, {address}",
                hint=f"is the port taken? {named(ReceiveOptions, 'grpc_port')} takes another",
            ) from error
        await self._server.start()
        return int(port)

    async def stop(self) -> None:
        """Take no more requests and wait for those in progress."""
        await self._server.stop(self._drain_s)


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self, intake: Intake, token: Token) -> None:
        self._intake = intake
        self._token = token

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handlers = {_EXPORT: self._export, _HEALTH: self._check}
        handle = handlers.get(handler_call_details.method, self._refuse_other)
        return grpc.stream_unary_rpc_method_handler(handle)

    async def _export(self, _: AsyncIterator[bytes], context: _Context) -> bytes:
        metadata = dict(context.invocation_metadata() or ())
        if not self._token.accepts(metadata.get("authorization", "")):
            await self._refuse(context, "token", grpc.StatusCode.UNAUTHENTICATED, TOKEN_NEEDED)
        try:
            # Read from the context: an iterator would keep the message until the disk has it.
            await self._intake.take(lambda: _message(context))
        except BusyError as error:
            await self._refuse(context, error.cause, grpc.StatusCode.UNAVAILABLE, error.line(), _retry_after(error))
        except RequestError as error:
            await self._refuse(context, error.cause, grpc.StatusCode.INVALID_ARGUMENT, error.line())
        return _ACKNOWLEDGED

    async def _check(self, messages: AsyncIterator[bytes], context: _Context) -> bytes:
        """Answer a health check, which needs no token; an empty name stands for the whole server."""
        try:
            async with asyncio.timeout(self._intake.limits.read_s):
                name = StringValue.FromString(await anext(aiter(messages), b"")).value
        except (DecodeError, TimeoutError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not a HealthCheckRequest")
        if name not in ("", _TRACE_SERVICE):
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return Int32Value(value=_SERVING if self._intake.is_ready else _NOT_SERVING).SerializeToString()

    async def _refuse_other(self, _: AsyncIterator[bytes], context: _Context) -> NoReturn:
        await self._refuse(context, "other_signal", grpc.StatusCode.UNIMPLEMENTED, ONLY_TRACES)

    async def _refuse(
        self, context: _Context, cause: Cause, code: grpc.StatusCode, text: str, trailers: _Trailers = ()
    ) -> NoReturn:
        self._intake.observed.refusals.add(cause, text, context.peer())
        await context.abort(code, text, trailers)


async def _message(context: _Context) -> bytes:
    message = await context.read()
    if isinstance(message, bytes):
        return message
    raise RequestError("no message")  # or one beyond the limit, which the library has refused


def _retry_after(error: BusyError) -> _Trailers:
    """Return the delay after which senders retry; in OTLP they retry after UNAVAILABLE."""
    retry = RetryInfo()
    retry.retry_delay.seconds = error.retry_s
    status = Status(code=grpc.StatusCode.UNAVAILABLE.value[0], message=error.line())
    status.details.add().Pack(retry)
    return (
        ("grpc-status-details-bin", status.SerializeToString()),
        ("google.rpc.retryinfo-bin", retry.SerializeToString()),  # where OpenTelemetry's Python SDK looks
    )
