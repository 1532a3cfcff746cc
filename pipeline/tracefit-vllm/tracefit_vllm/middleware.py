"""When requests reach the API server and leave it: `--middleware tracefit_vllm.ApiTracing`.

A span of scope `vllm.api` per request, of the server's own tracer, that is the parent of the engine core's. The two are
joined by the headers that vLLM passes on: a `traceparent`, and the `X-Request-Id`, from which it makes the request's
id.
"""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tracefit_vllm.recorder import logger
from tracefit_vllm.settings import SettingError, Settings
from tracefit_vllm.spans import is_sampled

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping

    Message = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]

ROUTES = {"/v1/completions": "cmpl", "/v1/chat/completions": "chatcmpl"}
"""Routes that are traced, and what begins the ids of their requests."""

_PROPAGATOR = TraceContextTextMapPropagator()


class ApiTracing:
    """ASGI middleware that traces requests for completions."""

    def __init__(self, app: Any, tracer: trace.Tracer | None = None) -> None:
        self._app, self._tracer = app, tracer
        try:
            self._rate = Settings.read().journey_tracing_sample_rate
        except SettingError as error:
            self._rate = 0.0
            logger.warning("tracefit-vllm: no tracing: %s", error)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a request on, and trace it."""
        # Below --root-path the route is the end of the path.
        kind = next((k for route, k in ROUTES.items() if scope.get("path", "").endswith(route)), None)
        if scope["type"] != "http" or scope["method"] != "POST" or kind is None:
            await self._app(scope, receive, send)
            return
        headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        name = headers.get("x-request-id") or uuid.uuid4().hex
        if is_sampled(f"{kind}-{name}", self._rate):
            span = self._begin(f"{kind}-{name}", scope["path"], headers)
            carrier: dict[str, str] = {}
            _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
            added = {"x-request-id": name, **carrier}
            kept = [(k, v) for k, v in scope["headers"] if k.decode("latin-1").lower() not in added]
            scope = {**scope, "headers": kept + [(k.encode(), v.encode("latin-1")) for k, v in added.items()]}
            await self._follow(span, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _begin(self, name: str, route: str, headers: dict[str, str]) -> trace.Span:
        # Not before the first request: the server makes its tracer after its middleware.
        tracer = self._tracer or trace.get_tracer("vllm.api")
        attributes = {"gen_ai.request.id": name, "http.route": route}
        context = _PROPAGATOR.extract(headers)
        span = tracer.start_span("llm_request", context, kind=trace.SpanKind.SERVER, attributes=attributes)
        _event(span, "ARRIVED")
        return span

    async def _follow(self, span: trace.Span, scope: Message, receive: Receive, send: Send) -> None:
        is_refused = is_done = False

        async def sent(message: Message) -> None:
            nonlocal is_refused, is_done
            is_refused |= message.get("status", 200) >= 400
            await send(message)
            is_done |= message["type"] == "http.response.body" and not message.get("more_body")

        reason = "client_disconnect"
        try:
            await self._app(scope, receive, sent)
        except Exception:  # the application's own: it goes on to the server, and the span says so
            reason = "error"
            raise
        finally:
            # A refused request leaves no span, as it leaves none in the engine.
            if not is_refused:
                if is_done:
                    _event(span, "DEPARTED")
                else:
                    _event(span, "ABORTED", reason=reason)
                span.end()


def _event(span: trace.Span, name: str, **attributes: str) -> None:
    now_ns, at_ns = time.monotonic_ns(), time.time_ns()
    span.add_event(f"api.{name}", {"event.ts.monotonic": now_ns / 1e9, **attributes}, at_ns)
