"""Spans and lines in the containers that other programs hold them in, written from public descriptions; independent of
the readers.

Each function names the description. Spans are OTLP records as JSON trees, as in `containers`.
"""

from __future__ import annotations

import csv
import io
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Record = dict[str, Any]

_KINDS = {1: "internal", 2: "server", 3: "client", 4: "producer", 5: "consumer"}
_STATUS = {1: "OK", 2: "ERROR"}


def compact(tree: Any) -> str:
    return json.dumps(tree, separators=(",", ":"), ensure_ascii=False)


def _value(value: Record) -> Any:
    """Return an attribute value as plain JSON."""
    ((kind, plain),) = value.items()
    return {"intValue": int, "doubleValue": float}.get(kind, lambda same: same)(plain)


def _values(attributes: list[Record]) -> Record:
    return {one["key"]: _value(one["value"]) for one in attributes}


def _spans(records: list[Record]) -> Iterator[tuple[Record, str, Record]]:
    """Yield each span with the name of its scope and its resource's attributes."""
    for record in records:
        for resource_spans in record["resourceSpans"]:
            resource = _values(resource_spans["resource"]["attributes"])
            for scope_spans in resource_spans["scopeSpans"]:
                for span in scope_spans["spans"]:
                    yield span, scope_spans["scope"]["name"], resource


def _us(text: str) -> int:
    return int(text) // 1000


def _iso(text: str) -> str:
    return f"{datetime.fromtimestamp(int(text) // 10**9, UTC):%Y-%m-%dT%H:%M:%S}.{_us(text) % 10**6:06d}Z"


def _tag(key: str, value: Any) -> Record:
    kinds = {bool: "bool", int: "int64", float: "float64"}
    # Go writes 1.0 as 1.
    shown = int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value
    # Beyond 2^53, numbers are texts.
    shown = str(value) if isinstance(value, int) and abs(value) > 2**53 else shown
    return {"key": key, "type": kinds.get(type(value), "string"), "value": shown}


def jaeger(records: list[Record], *, indent: int | None = 2, together: bool = False) -> bytes:
    """https://www.jaegertracing.io/docs/latest/architecture/apis/, and `model/json` of
    github.com/jaegertracing/jaeger."""
    traces: dict[str, Record] = {}
    for span, scope, resource in _spans(records):
        of = "together" if together else span["traceId"]
        trace = traces.setdefault(of, {"traceID": span["traceId"], "spans": [], "processes": {}})
        service = {"serviceName": resource.get("service.name", ""), "tags": []}
        service["tags"] = [_tag(k, v) for k, v in resource.items() if k != "service.name"]
        keys = [key for key, one in trace["processes"].items() if one == service]
        process = keys[0] if keys else f"p{len(trace['processes']) + 1}"
        trace["processes"][process] = service
        tags = [_tag(k, v) for k, v in _values(span.get("attributes", [])).items()]
        tags += [_tag("otel.scope.name", scope), _tag("span.kind", _KINDS[span.get("kind", 1)])]
        if code := span.get("status", {}).get("code"):
            tags += [_tag("otel.status_code", _STATUS[code])] + [_tag("error", value=True)] * (code == 2)
        parent = span.get("parentSpanId")
        references = [{"refType": "CHILD_OF", "traceID": span["traceId"], "spanID": parent}] * bool(parent)
        start = _us(span["startTimeUnixNano"])
        trace["spans"].append(
            {
                "traceID": span["traceId"],
                "spanID": span["spanId"],
                "operationName": span["name"],
                "references": references,
                "startTime": start,
                "duration": _us(span["endTimeUnixNano"]) - start,
                "tags": tags,
                "logs": [
                    {
                        "timestamp": _us(event["timeUnixNano"]),
                        "fields": [
                            _tag("event", event["name"]),
                            *(_tag(k, v) for k, v in _values(event["attributes"]).items()),
                        ],
                    }
                    for event in span.get("events", [])
                ],
                "processID": process,
                "warnings": None,
            }
        )
    answer = {"data": list(traces.values()), "total": 0, "limit": 0, "offset": 0, "errors": None}
    return json.dumps(answer, indent=indent).encode()


def jaeger_v3(records: list[Record]) -> bytes:
    """`/api/v3/traces`: https://www.jaegertracing.io/docs/latest/architecture/apis/."""
    merged = [each for record in records for each in record["resourceSpans"]]
    return json.dumps({"result": {"resourceSpans": merged}}).encode()


def zipkin(records: list[Record]) -> bytes:
    """https://zipkin.io/zipkin-api/; annotations as opentelemetry-exporter-zipkin-json writes them."""
    spans = []
    for span, scope, resource in _spans(records):
        values = _values(span.get("attributes", [])) | {"otel.scope.name": scope}
        if code := span.get("status", {}).get("code"):
            values["otel.status_code"] = _STATUS[code]
        start = _us(span["startTimeUnixNano"])
        one = {
            "traceId": span["traceId"],
            "id": span["spanId"],
            "name": span["name"],
            "timestamp": start,
            "duration": _us(span["endTimeUnixNano"]) - start,
            "localEndpoint": {"serviceName": resource.get("service.name")},
            "tags": {key: str(value) for key, value in values.items()},
            "annotations": [
                {
                    "timestamp": _us(event["timeUnixNano"]),
                    "value": json.dumps({event["name"]: _values(event["attributes"])}),
                }
                for event in span.get("events", [])
            ],
        }
        if span.get("parentSpanId"):
            one["parentId"] = span["parentSpanId"]
        if span.get("kind", 1) > 1:
            one["kind"] = _KINDS[span["kind"]].upper()
        spans.append(one)
    return json.dumps(spans).encode()


def console(records: list[Record], *, indent: int | None = 4) -> bytes:
    """`ReadableSpan.to_json`: https://github.com/open-telemetry/opentelemetry-python, opentelemetry-sdk; between them,
    a server's log."""
    texts = []
    for span, _, resource in _spans(records):
        context = {"trace_id": f"0x{span['traceId']}", "span_id": f"0x{span['spanId']}", "trace_state": "[]"}
        parent = span.get("parentSpanId")
        document = {
            "name": span["name"],
            "context": context,
            "kind": f"SpanKind.{_KINDS[span.get('kind', 1)].upper()}",
            "parent_id": f"0x{parent}" if parent else None,
            "start_time": _iso(span["startTimeUnixNano"]),
            "end_time": _iso(span["endTimeUnixNano"]),
            "status": {"status_code": _STATUS.get(span.get("status", {}).get("code"), "UNSET")},
            "attributes": _values(span.get("attributes", [])),
            "events": [
                {
                    "name": event["name"],
                    "timestamp": _iso(event["timeUnixNano"]),
                    "attributes": _values(event["attributes"]),
                }
                for event in span.get("events", [])
            ],
            "links": [],
            "resource": {"attributes": resource, "schema_url": ""},
        }
        texts.append(json.dumps(document, indent=indent))
    texts.insert(1, 'INFO:     127.0.0.1:4 - "POST /v1/completions HTTP/1.1" 200 OK {')
    return ("\n".join(texts) + "\n").encode()


def java(records: list[Record]) -> bytes:
    """OtlpJsonLoggingSpanExporter: https://github.com/open-telemetry/opentelemetry-java, exporters/logging-otlp."""
    head = (
        "Nov 28, 2026 8:00:00 PM io.opentelemetry.exporter.logging.otlp.internal.traces.OtlpStdoutSpanExporter "
        "export\nINFO: "
    )
    lines = [compact(each) for record in records for each in record["resourceSpans"]]
    return "".join(f"{head if n % 2 else ''}{line}\n" for n, line in enumerate(lines)).encode()


def pretty(records: list[Record]) -> bytes:
    """Documents over several lines, as `jq .` prints them."""
    return "".join(json.dumps(each, indent=2, ensure_ascii=False) + "\n" for each in records).encode()


# -- lines around any content -----------------------------------------------------------------------------

TIME = "2026-09-21T13:33:25.123456789"


def docker(content: bytes, *, part: int = 16 << 10, beside: str = "") -> bytes:
    """https://docs.docker.com/engine/logging/drivers/json-file/; a line is cut at 16 KiB."""
    texts = []
    for line in content.decode().splitlines(keepends=True):
        ended = line if line.endswith("\n") else f"{line}\n"
        for begin in range(0, len(ended), part):
            entry = {"log": ended[begin : begin + part], "stream": "stdout", "time": f"{TIME}Z"}
            texts.append(compact(entry))
            other = compact({"log": f"{beside}\n", "stream": "stderr", "time": f"{TIME}Z"})
            texts += [other] * bool(beside and begin)
    return ("\n".join(texts) + "\n").encode()


def cri(content: bytes, *, part: int = 16 << 10, beside: str = "") -> bytes:
    """The log format of the kubelet's CRI:
    https://github.com/kubernetes/design-proposals-archive/blob/main/node/kubelet-cri-logging.md."""
    texts = []
    for line in content.decode().splitlines():
        starts = range(0, max(len(line), 1), part)
        for begin in starts:
            tag = "F" if begin == starts[-1] else "P"
            texts.append(f"{TIME}+00:00 stdout {tag} {line[begin : begin + part]}")
            texts += [f"{TIME}+00:00 stderr F {beside}"] * bool(beside and begin)
    return ("\n".join(texts) + "\n").encode()


def _stamps(content: bytes) -> list[tuple[int, str]]:
    """Return the lines of some content with the time in ns at which each is printed, a tenth of a second apart."""
    lines = content.decode().splitlines()
    return [(1_790_000_000_123_456_789 + number * 10**8, line) for number, line in enumerate(lines)]


def _iso_ns(unix_ns: int) -> str:
    return f"{datetime.fromtimestamp(unix_ns // 10**9, UTC):%Y-%m-%dT%H:%M:%S}.{unix_ns % 10**9:09d}Z"


def loki(content: bytes) -> bytes:
    """https://grafana.com/docs/loki/latest/reference/loki-http-api/; the newest line is the first."""
    values = [[str(ns), line] for ns, line in reversed(_stamps(content))]
    stream = {"stream": {"pod": "vllm-0", "container": "vllm"}, "values": values}
    data = {"resultType": "streams", "result": [stream], "stats": {"summary": {"totalLines": len(values)}}}
    return json.dumps({"status": "success", "data": data}).encode()


def cloudwatch(content: bytes) -> bytes:
    """`aws logs filter-log-events`:
    https://docs.aws.amazon.com/AmazonCloudWatchLogs/latest/APIReference/API_FilterLogEvents.html."""
    events = [
        {
            "logStreamName": "vllm/server/1",
            "timestamp": ns // 10**6,
            "message": line,
            "ingestionTime": ns // 10**6 + 7,
            "eventId": str(ns),
        }
        for ns, line in _stamps(content)
    ]
    searched = [{"logStreamName": "vllm/server/1", "searchedCompletely": True}]
    return json.dumps({"events": events, "searchedLogStreams": searched}, indent=4).encode()


def insights(content: bytes) -> bytes:
    """`aws logs get-query-results`:
    https://docs.aws.amazon.com/AmazonCloudWatchLogs/latest/APIReference/API_GetQueryResults.html."""
    rows = [
        [
            {"field": "@timestamp", "value": _iso_ns(ns)[:23].replace("T", " ")},
            {"field": "@message", "value": line},
            {"field": "@ptr", "value": "Cn0KQAo="},
        ]
        for ns, line in _stamps(content)
    ]
    return json.dumps({"results": rows, "statistics": {"recordsMatched": 1.0}, "status": "Complete"}).encode()


def subscription(content: bytes) -> bytes:
    """https://docs.aws.amazon.com/AmazonCloudWatch/latest/logs/SubscriptionFilters.html; documents without a line end
    between them."""
    texts = [
        compact(
            {
                "messageType": "DATA_MESSAGE",
                "owner": "1",
                "logGroup": "g",
                "logStream": "vllm/server/1",
                "subscriptionFilters": ["f"],
                "logEvents": [{"id": str(ns), "timestamp": ns // 10**6, "message": line}],
            }
        )
        for ns, line in _stamps(content)
    ]
    return "".join(texts).encode()


def log_table(content: bytes) -> bytes:
    """`Export results` of Logs Insights:
    https://docs.aws.amazon.com/AmazonCloudWatch/latest/logs/AnalyzingLogData.html; newest first."""
    text = io.StringIO()
    rows = [(_iso_ns(ns)[:23].replace("T", " "), line) for ns, line in reversed(_stamps(content))]
    csv.writer(text, lineterminator="\n").writerows([("@timestamp", "@message"), *rows])
    return text.getvalue().encode()


def google_table(content: bytes) -> bytes:
    """Logs Explorer's download as CSV: https://cloud.google.com/logging/docs/view/logs-explorer-interface."""
    text = io.StringIO()
    names = ("insertId", "logName", "resource.labels.pod_name", "severity", "textPayload", "timestamp")
    rows = [(f"a{ns}", "projects/p/logs/x", "vllm-0", "INFO", line, _iso_ns(ns)) for ns, line in _stamps(content)]
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows([names, *rows])
    return text.getvalue().encode()


def google(content: bytes) -> bytes:
    """`gcloud logging read --format=json`: https://cloud.google.com/logging/docs/reference/v2/rest/v2/LogEntry; the
    newest is the first."""
    entries = [
        {
            "insertId": str(ns),
            "labels": {"k8s-pod/app": "vllm"},
            "logName": "projects/p/logs/stdout",
            "receiveTimestamp": _iso_ns(ns + 10**9),
            "resource": {"labels": {"container_name": "vllm", "pod_name": "vllm-0"}, "type": "k8s_container"},
            "severity": "INFO",
            "textPayload": line,
            "timestamp": _iso_ns(ns),
        }
        for ns, line in reversed(_stamps(content))
    ]
    return json.dumps(entries, indent=2).encode()


def journal(content: bytes) -> bytes:
    """`journalctl -o json`: https://systemd.io/JOURNAL_EXPORT_FORMATS/; text with colours is a list of bytes."""
    entries = [
        {
            "__CURSOR": "s=1",
            "__REALTIME_TIMESTAMP": str(ns // 1000),
            "__MONOTONIC_TIMESTAMP": "123456",
            "_HOSTNAME": "gpu-1",
            "_PID": "7",
            "SYSLOG_IDENTIFIER": "vllm",
            "MESSAGE": list(line.encode()) if number % 2 else line,
        }
        for number, (ns, line) in enumerate(_stamps(content))
    ]
    return "".join(json.dumps(entry) + "\n" for entry in entries).encode()


def cloudwatch_s3(records: list[Record]) -> bytes:
    """A line per event behind its time: https://docs.aws.amazon.com/AmazonCloudWatch/latest/logs/S3Export.html."""
    return "".join(f"{TIME[:23]}Z {json.dumps(record)}\n" for record in records).encode()


TRACES: dict[str, Callable[[list[Record]], bytes]] = {
    "jaeger": jaeger,
    "jaeger_v3": jaeger_v3,
    "zipkin": zipkin,
    "console": console,
    "java": java,
    "documents": pretty,
    "cloudwatch_s3": cloudwatch_s3,
}
"""Records to the bytes of a container of spans, by its name."""

LINES: dict[str, Callable[[bytes], bytes]] = {
    "docker": docker,
    "cri": cri,
    "loki": loki,
    "cloudwatch": cloudwatch,
    "google": google,
    "log_table": log_table,
    "journal": journal,
}
"""Content to the bytes of a container of lines, by its name."""
