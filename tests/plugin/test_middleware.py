"""The API server's side: when requests come and go, joined with the engine's by what vLLM passes on."""

from __future__ import annotations

import pytest


def answers(*, status=200, is_whole=True):
    async def app(send):
        await send({"type": "http.response.start", "status": status})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        if is_whole:
            await send({"type": "http.response.body", "body": b""})

    return app


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/v1/completions", "cmpl"), ("/v1/chat/completions", "chatcmpl"), ("/llm/v1/completions", "cmpl")],
)
def test_request_span_is_the_parent_of_the_engines(serve, path, kind):
    scope, (span,) = serve(answers(), path=path)
    headers = dict(scope["headers"])
    assert headers[b"traceparent"][:-2] == b"00-%032x-%016x-" % (span.context.trace_id, span.context.span_id)
    assert (span.name, span.attributes["gen_ai.request.id"]) == (
        "llm_request",
        f"{kind}-{headers[b'x-request-id'].decode()}",
    )
    assert [event.name for event in span.events] == ["api.ARRIVED", "api.DEPARTED"]
    arrived, departed = (event.attributes["event.ts.monotonic"] for event in span.events)
    assert arrived <= departed


def test_a_clients_id_and_trace_are_kept(serve):
    given = [(b"X-Request-Id", b"mine"), (b"traceparent", f"00-{7:032x}-{9:016x}-01".encode())]
    scope, (span,) = serve(answers(), headers=given)
    assert [v for k, v in scope["headers"] if k.lower() == b"x-request-id"] == [b"mine"]
    assert span.attributes["gen_ai.request.id"] == "cmpl-mine"
    assert (span.context.trace_id, span.parent.span_id) == (7, 9)


def test_a_client_that_goes_away_is_an_abort(serve):
    _, (span,) = serve(answers(is_whole=False))
    event = span.events[-1]
    assert (event.name, event.attributes["reason"]) == ("api.ABORTED", "client_disconnect")


def test_a_refused_request_and_other_routes_leave_no_span(serve):
    assert serve(answers(status=400))[1] == ()
    scope, spans = serve(answers(), path="/v1/models")
    assert (spans, scope["headers"]) == ((), [])


def test_the_share_of_journeys_is_that_of_the_engine(serve, monkeypatch):
    monkeypatch.setenv("TRACEFIT_VLLM_JOURNEY_TRACING_SAMPLE_RATE", "0")
    scope, spans = serve(answers())
    assert (spans, scope["headers"]) == ((), [])


def test_a_bad_setting_is_said_and_requests_are_served(serve, monkeypatch, caplog):
    monkeypatch.setenv("TRACEFIT_VLLM_JOURNEY_TRACING_SAMPLE_RATE", "most")
    scope, spans = serve(answers())
    assert (spans, scope["headers"]) == ((), [])
    (line,) = caplog.messages
    assert line.startswith("tracefit-vllm: no tracing: TRACEFIT_VLLM_JOURNEY_TRACING_SAMPLE_RATE=most")
