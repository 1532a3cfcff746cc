"""Files that are not read, by their name and with the shortest way from there to one that is."""

from __future__ import annotations

import re
from typing import NamedTuple

_HEAD_BYTES = 64 << 10
_SPANS_OF_REQUESTS = "start the server with --otlp-traces-endpoint URL"


class UnreadKind(NamedTuple):
    """A kind of file that is not read.

    Attributes:
        pattern: A regular expression of a part of its beginning.
        title: Its name in words.
        way: The shortest way to a file that is read.
    """

    pattern: bytes
    title: str
    way: str


_HTML = rb"(?is)\A(?:\xef\xbb\xbf)?\s*<(?:!doctype html|html)\b"

UNREAD = {
    "page_of_jaeger": UnreadKind(
        _HTML + rb".*?(?:jaeger-ui|Jaeger UI)",
        "the page of Jaeger's user interface, which holds no spans",
        "save the answer of /api/traces?service=NAME&limit=100000",
    ),
    "page": UnreadKind(
        _HTML,
        "a web page, which holds no spans",
        "save the answer of the API that the page calls, in JSON",
    ),
    "answer_of_jaeger": UnreadKind(
        rb'(?s)\A\s*\{(?=[^{]{0,400}"(?:data|total)"\s*:)(?=.{0,2000}"(?:total|limit|offset)"\s*:\s*[0-9])(?=.{0,2000}"errors"\s*:)'
        rb'|\A\s*\{\s*"error"\s*:\s*\{\s*"httpCode"\s*:',
        "Jaeger's answer without spans",
        "save the answer of /api/traces?service=NAME&limit=100000",
    ),
    "jaeger": UnreadKind(
        rb'"operationName"\s*:|"operation_name"\s*:\s*"',
        "spans of Jaeger in another form than its API's",
        "save the answer of /api/traces?service=NAME&limit=100000",
    ),
    "zipkin": UnreadKind(
        rb'"binaryAnnotations"\s*:\s*\[',
        "spans of Zipkin, version 1",
        "save the answer of /api/v2/traces?limit=100000",
    ),
    "tempo": UnreadKind(
        rb'"rootServiceName"\s*:|"rootTraceName"\s*:|"spanSets?"\s*:\s*[\[{]|"inspectedBytes"\s*:|\A\{\s*"(?:traces|scopes|tagNames|tagValues)"\s*:\s*\[',
        "Tempo's answer to a search, which names traces and holds no spans",
        "save the answer of /api/v2/traces/ID for each",
    ),
    "console": UnreadKind(
        rb"\n\s+(?:instrumentationScope|traceId|parentSpanContext): [{'u]|ResourceSpans #[0-9]+\n"
        rb"|LoggingSpanExporter export|' : [0-9a-f]{32} [0-9a-f]{16} [A-Z]{6,8} \[tracer: "
        rb'|"SpanContext"\s*:\s*\{\s*"TraceID"\s*:',
        "spans as a console or debug exporter prints them for people",
        "use the exporter otlp, or the Collector's file exporter",
    ),
    "sums_of_profile": UnreadKind(
        rb"^(?:\xef\xbb\xbf)?Metric,(?:avg|min|max|p\d+)(?:,|\r?\n)",
        "a profile's CSV, which has sums and no request",
        "give the JSON files beside it, profile_export*.json and .jsonl",
    ),
    "prometheus": UnreadKind(
        rb"(?:^|\n)# (?:HELP|TYPE) [a-zA-Z_:][a-zA-Z0-9_:]* "
        rb'|(?:^|\n)[a-zA-Z_:][a-zA-Z0-9_:]*\{[a-zA-Z_][a-zA-Z0-9_]*="[^"\n]{0,200}"'
        rb"[^\n}]{0,2000}\} [-+0-9.eE]+(?: [0-9]+)?\r?\n",
        "Prometheus text, which has sums over requests and no single one",
        _SPANS_OF_REQUESTS,
    ),
    "query_of_metrics": UnreadKind(
        rb'"resultType"\s*:\s*"(?:matrix|vector|scalar)"|"result"\s*:\s*\[\s*\{\s*"metric"\s*:\s*\{',
        "an answer with metrics of Prometheus or Loki, which has no request and no line",
        "for a log, query its lines without rate() or count_over_time(); for requests, " + _SPANS_OF_REQUESTS,
    ),
    "sglang_log": UnreadKind(
        rb"(?:Decode|Prefill) batch[^\n]{0,200}#(?:running-req|new-seq)|sglang\.launch_server|server_args=ServerArgs\(",
        "SGLang's log, which has no time of single steps",
        "start the server with --enable-forward-pass-metrics or --enable-trace",
    ),
    "trtllm_log": UnreadKind(
        rb'\[TRT-LLM\]|\[TensorRT-LLM\]|host_step_time = |"iterLatencyMS"\s*:',
        "TensorRT-LLM's log or statistics, whose lines of steps are not read",
        "record the metrics of forward passes of Dynamo's worker",
    ),
    "vllm_log": UnreadKind(
        rb"Avg prompt throughput: |\bvLLM API server version ",
        "vLLM's log without a line for each step",
        "start the server with --enable-logging-iteration-details",
    ),
}
"""Kinds of files that are not read, by name, in the order they are tried."""


def known_as(head: bytes) -> str:
    """Return what a file is that is not read, and what to do; empty if it is not known."""
    beginning = head[:_HEAD_BYTES]
    found = (f"{kind.title}; {kind.way}" for kind in UNREAD.values() if re.search(kind.pattern, beginning))
    return next(found, "")
