"""OTLP/HTTP: POST /v1/traces, protobuf and JSON, plain and gzip. h11 parses HTTP/1.1, asyncio serves the sockets.

Every wait for a sender has a time limit, and the bytes before its token is checked have a size limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING

import h11
from google.protobuf import json_format
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from tracefit.errors import UsageError
from tracefit.options import named
from tracefit.receive.intake import ONLY_TRACES, TOKEN_NEEDED, BusyError
from tracefit.receive.options import ReceiveOptions
from tracefit.receive.spans import RequestError

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from tracefit.receive.intake import BodyEncoding, Intake
    from tracefit.receive.options import Token
    from tracefit.receive.refusals import Cause

_ENCODINGS: dict[str, BodyEncoding] = {"application/x-protobuf": "protobuf", "application/json": "json"}
_SIGNAL_PATHS = ("/v1/logs", "/v1/metrics")
# Written as it is: a connection beyond the limit gets no object that could answer.
_TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_READ_BYTES = 64 << 10
# HTTP status to google.rpc.Code, which OTLP puts in the body of a refusal.
_GRPC_CODES = {400: 3, 401: 16, 404: 12, 405: 12, 413: 3, 415: 3, 503: 14}
_OWN_CAUSES: tuple[Cause, ...] = ("busy", "connections", "disk", "senders")
"""Causes that lie with the receiver, and not with what is sent."""
_CAUSES: dict[int, Cause] = {401: "token", 404: "other_signal", 405: "other_signal"}


class _RefusalError(RequestError):
    """A request that is refused with another code than 400."""

    def __init__(self, code: int, text: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(text)
        self.cause = _CAUSES.get(code, "malformed")
        self.code = code
        self.headers = headers


class HttpServer:
    """The HTTP port."""

    def __init__(self, intake: Intake, token: Token, *, has_metrics: bool = False) -> None:
        self._intake = intake
        self._token = token
        self._has_metrics = has_metrics
        self._connections: dict[asyncio.Task[None], _Connection] = {}
        self._server: asyncio.Server | None = None
        self._tls: ssl.SSLContext | None = None

    async def start(self, options: ReceiveOptions) -> int:
        """Listen; return the port.

        Raises:
            UsageError: The port is taken, or certificate and key cannot be used.
        """
        where = f"HTTP, {options.host}:{options.http_port}"
        try:
            if options.tls_cert:
                self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
                self._tls.load_cert_chain(options.tls_cert, options.tls_key)
            self._server = await asyncio.start_server(self._serve, options.host, options.http_port, limit=_READ_BYTES)
        except ssl.SSLError as error:
            raise UsageError("not a certificate and its key", where=str(options.tls_cert)) from error
        except OSError as error:
            raise UsageError(
                f"cannot listen ({error.strerror})",
                where=where,
                hint=f"{named(ReceiveOptions, 'http_port')} takes another port",
            ) from error
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Take no more requests and wait for those in progress."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections.values():
            connection.close_when_idle()
        if self._connections:
            _, late = await asyncio.wait(self._connections, timeout=self._intake.limits.drain_s)
            for task in late:
                task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        limits = self._intake.limits
        if task is None or len(self._connections) >= limits.accepted:
            self._intake.observed.refusals.add("connections", f"more than {limits.accepted:,} connections", "HTTP")
            writer.write(_TOO_MANY if self._tls is None else b"")
            writer.close()
            return
        connection = _Connection(reader, writer, self._intake, self._token, self._has_metrics)
        self._connections[task] = connection
        try:
            if self._tls is not None:
                # Started here, so that the handshake counts as a connection and has a time limit.
                await writer.start_tls(self._tls, ssl_handshake_timeout=limits.read_s)
            await connection.serve()
        except (OSError, asyncio.CancelledError):  # the sender is gone or too slow, or the receiver stops
            writer.transport.abort()
        finally:
            del self._connections[task]
            writer.close()


@dataclass(eq=False)
class _Connection:
    """One connection of one sender, request after request."""

    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter
    _intake: Intake
    _token: Token
    _has_metrics: bool
    _is_idle: bool = True
    _is_head: bool = False
    _is_closing: bool = False

    def __post_init__(self) -> None:
        header_bytes = self._intake.limits.header_bytes
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=header_bytes)

    def close_when_idle(self) -> None:
        """Answer the request in progress, if any, and close."""
        self._is_closing = True
        if self._is_idle:
            self._writer.close()

    async def serve(self) -> None:
        """Answer requests until the sender closes the connection or the receiver stops."""
        with contextlib.suppress(h11.LocalProtocolError):
            try:
                while await self._serve_one():
                    self._http.start_next_cycle()
                    self._is_idle = True
            except h11.RemoteProtocolError as error:
                refusal = _RefusalError(error.error_status_hint, "not a request of HTTP/1.1")
                await self._send(self._refused(refusal), "protobuf")

    async def _serve_one(self) -> bool:
        """Answer one request; return whether another may follow."""
        limits = self._intake.limits
        if not self._http.trailing_data[0]:
            async with asyncio.timeout(limits.idle_s):
                await self._receive()
        async with asyncio.timeout(limits.read_s):
            request = await self._event()
        if not isinstance(request, h11.Request):
            return False
        self._is_idle = False
        self._is_head = request.method == b"HEAD"
        headers = {bytes(name).decode("latin-1"): bytes(value) for name, value in request.headers}
        kind = headers.get("content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
        encoding = _ENCODINGS.get(kind)
        refusal = page = None
        try:
            page = await self._page(request, headers)
            if page is None:
                await self._take(request, headers, encoding)
        except (BusyError, RequestError) as error:
            refusal = self._refused(error)
        # A sender that waits for 100 Continue has sent no body: its refusal comes at once.
        if not self._http.they_are_waiting_for_100_continue:
            await self._discard()
        if page is None:
            await self._send(refusal, encoding or "protobuf")
        else:
            await self._answer(*page)
        return self._http.states == {h11.CLIENT: h11.DONE, h11.SERVER: h11.DONE} and not self._is_closing

    async def _page(self, request: h11.Request, headers: dict[str, bytes]) -> tuple[int, str, bytes] | None:
        """Return status, type and content of a page for programs that are not senders; null for other requests."""
        path = request.target.partition(b"?")[0]
        if request.method not in (b"GET", b"HEAD") or path not in (b"/healthz", b"/metrics"):
            return None
        if path == b"/healthz":  # without a token: it says nothing of the servers
            return _health(self._intake)
        if not self._has_metrics:
            raise _RefusalError(404, f"metrics are off; {named(ReceiveOptions, 'metrics')} turns them on")
        self._require_token(headers)
        from tracefit.receive.metrics import CONTENT_TYPE, metrics_page  # noqa: PLC0415 - only for --metrics

        return 200, CONTENT_TYPE, metrics_page(self._intake, await self._intake.free_bytes())

    def _require_token(self, headers: dict[str, bytes]) -> None:
        if not self._token.accepts(headers.get("authorization", b"")):
            raise _RefusalError(401, TOKEN_NEEDED, (("www-authenticate", "Bearer"),))

    async def _take(self, request: h11.Request, headers: dict[str, bytes], encoding: BodyEncoding | None) -> None:
        # h11 limits the headers it waits for, but not those that came at once.
        if sum(len(name) + len(value) for name, value in headers.items()) > self._intake.limits.header_bytes:
            raise _RefusalError(431, "headers too long")
        path = request.target.partition(b"?")[0].decode("latin-1")
        if path in _SIGNAL_PATHS:
            raise _RefusalError(404, ONLY_TRACES)
        if path != "/v1/traces":
            raise _RefusalError(404, "no such path; traces are posted to /v1/traces")
        if request.method != b"POST":
            raise _RefusalError(405, "traces are posted", (("allow", "POST"),))
        self._require_token(headers)
        compression = headers.get("content-encoding", b"identity").strip().lower()
        if encoding is None or compression not in (b"identity", b"gzip"):
            raise _RefusalError(415, "send application/x-protobuf or application/json, plain or gzip")
        if int(headers.get("content-length", b"0")) > self._intake.limits.message_bytes:
            raise self._too_long()
        await self._intake.take(self._body, encoding, is_gzip=compression == b"gzip")

    def _refused(self, error: RequestError | BusyError) -> _RefusalError:
        """Count a refusal, and return it with its HTTP status."""
        host, *_ = self._writer.get_extra_info("peername") or ("a closed connection",)
        self._intake.observed.refusals.add(error.cause, error.line(), str(host))
        if isinstance(error, _RefusalError):
            return error
        if isinstance(error, BusyError):
            # Not 429, at which OpenTelemetry's Python SDK drops the spans.
            return _RefusalError(503, error.line(), (("retry-after", str(error.retry_s)),))
        return _RefusalError(400, error.line())

    def _too_long(self) -> _RefusalError:
        return _RefusalError(413, f"longer than {self._intake.limits.message_bytes:,} bytes")

    async def _body(self) -> bytes:
        chunks: list[bytes] = []
        size = 0
        if self._http.they_are_waiting_for_100_continue:
            await self._write(h11.InformationalResponse(status_code=100, headers=[]))
        while isinstance(event := await self._event(), h11.Data):
            chunks.append(bytes(event.data))
            size += len(event.data)
            # Counted on arrival: a chunked body states no length, and a stated length may be wrong.
            if size > self._intake.limits.message_bytes:
                raise self._too_long()
        if not isinstance(event, h11.EndOfMessage):
            raise RequestError("cut short")
        return b"".join(chunks)

    async def _discard(self) -> None:
        """Read the rest of a refused request and drop it: a client reads no answer while it still sends."""
        left = self._intake.limits.message_bytes
        with contextlib.suppress(TimeoutError, h11.RemoteProtocolError):
            async with asyncio.timeout(self._intake.limits.read_s):
                while left > 0 and self._http.their_state is h11.SEND_BODY:
                    event = await self._event()
                    left -= len(event.data) if isinstance(event, h11.Data) else 0

    async def _event(self) -> h11.Event:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            await self._receive()
        if isinstance(event, type):  # h11.PAUSED: the sender is ahead of the answers
            return h11.ConnectionClosed()
        return event

    async def _receive(self) -> None:
        self._http.receive_data(await self._reader.read(_READ_BYTES))

    async def _send(self, refusal: _RefusalError | None, encoding: BodyEncoding) -> None:
        """Answer: done, or a refusal a google.rpc.Status, as OTLP specifies."""
        message: Message = ExportTraceServiceResponse()
        if refusal is not None:
            message = Status(code=_GRPC_CODES.get(refusal.code, 2), message=refusal.what)
        as_json = encoding == "json"
        body = json_format.MessageToJson(message).encode() if as_json else message.SerializeToString()
        kind = "application/json" if as_json else "application/x-protobuf"
        await self._answer(refusal.code if refusal else 200, kind, body, refusal.headers if refusal else ())

    async def _answer(self, code: int, kind: str, body: bytes, more: tuple[tuple[str, str], ...] = ()) -> None:
        headers = [("content-type", kind), ("content-length", str(len(body))), *more]
        # If a body is not read to its end, the start of the next request is unknown.
        if self._is_closing or self._http.their_state is h11.SEND_BODY:
            headers.append(("connection", "close"))
        await self._write(
            h11.Response(status_code=code, headers=headers),
            h11.Data(data=b"" if self._is_head else body),
            h11.EndOfMessage(),
        )

    async def _write(self, *events: h11.Event) -> None:
        self._writer.write(b"".join(self._http.send(event) or b"" for event in events))
        async with asyncio.timeout(self._intake.limits.read_s):
            await self._writer.drain()


def _health(intake: Intake) -> tuple[int, str, bytes]:
    """Return the page of a health check: whether requests are taken, and why some are refused although it is well.

    A receiver that refuses only new servers is well: if it were not, a load balancer would keep all others from it.
    """
    text = "ok\n" if intake.is_ready else "not ready\n"
    own = [cause for cause in intake.observed.refusals.lasting() if cause in _OWN_CAUSES]
    if own:
        text += f"refused within the last minute: {', '.join(own)}\n"
    return 200 if intake.is_ready else 503, "text/plain", text.encode()
