"""A file that is not read is called by its name, with the shortest way from there."""

from __future__ import annotations

import pytest

import tracefit
from containers import record, span, to_json
from tracefit.errors import UsageError
from tracefit.inputs.blocks import inspect_file
from tracefit.inputs.files import TraceFile
from tracefit.inputs.unread import UNREAD

EXAMPLES = {
    # https://github.com/jaegertracing/jaeger-ui, packages/jaeger-ui/index.html
    "page_of_jaeger": b'<!doctype html><html lang="en"><head><title>Jaeger UI</title></head><body></body></html>',
    "page": b"<!doctype html>\n<html><head><title>Grafana</title></head><body></body></html>",
    # https://www.jaegertracing.io/docs/latest/architecture/apis/
    "answer_of_jaeger": (
        b'{"data":null,"total":0,"limit":0,"offset":0,"errors":[{"code":400,"msg":"parameter '
        b"'service' is required\"}]}"
    ),
    # Elasticsearch documents of Jaeger: https://www.jaegertracing.io/docs/latest/storage/elasticsearch/
    "jaeger": b'{"_index":"jaeger-span","_source":{"traceID":"1","operationName":"llm_request","startTimeMillis":1}}\n',
    # https://zipkin.io/pages/data_model.html, version 1
    "zipkin": b'[{"traceId":"1","id":"2","name":"x","annotations":[],"binaryAnnotations":[{"key":"a","value":"b"}]}]',
    # https://grafana.com/docs/tempo/latest/api_docs/#search
    "tempo": b'{"traces":[{"traceID":"2f3e","rootServiceName":"vllm","rootTraceName":"llm_request","durationMs":3}]}',
    # https://opentelemetry.io/docs/languages/js/exporters/#console
    "console": b"{\n  resource: { attributes: {} },\n  instrumentationScope: { name: 'x' },\n  traceId: 'f1'\n}\n",
    # genai-perf 0.0.16, genai_perf/export_data/csv_exporter.py
    "sums_of_profile": (
        b"Metric,avg,min,max,p99,p95,p90,p75,p50,p25\nTime To First Token (ms),20.1,18,30,30,29,28,22,20,19\n"
    ),
    # https://prometheus.io/docs/instrumenting/exposition_formats/
    "prometheus": (
        b"# HELP vllm:num_requests_running Requests.\n# TYPE vllm:num_requests_running "
        b"gauge\nvllm:num_requests_running 1\n"
    ),
    # A metric query of Loki: https://grafana.com/docs/loki/latest/reference/loki-http-api/
    "query_of_metrics": b'{"status":"success","data":{"resultType":"matrix","result":[{"metric":{},"values":[[1790000000,"1"]]}]}}',
    # https://docs.sglang.ai/
    "sglang_log": (
        b"[2026-08-19 18:34:27] Decode batch. #running-req: 4, #token: 900, token usage: 0.01, gen "
        b"throughput (token/s): 80\n"
    ),
    # https://nvidia.github.io/TensorRT-LLM/
    "trtllm_log": b"[08/19/2026-18:34:27] [TRT-LLM] [I] iter = 3, host_step_time = 12.1ms, num_scheduled_requests: 4\n",
    # https://docs.vllm.ai/
    "vllm_log": (
        b"INFO 08-19 18:34:27 [loggers.py:1] Engine 000: Avg prompt throughput: 1.0 tokens/s, Running: 1 reqs\n"
    ),
}


def test_every_kind_has_an_example():
    assert EXAMPLES.keys() == UNREAD.keys()


@pytest.mark.parametrize("kind", EXAMPLES)
def test_a_file_that_is_not_read_is_named_with_the_way_from_there(tmp_path, kind):
    (tmp_path / "any").write_bytes(EXAMPLES[kind])
    _, title, way = UNREAD[kind]
    assert str(inspect_file(TraceFile.local(tmp_path / "any"))) == f"not OTLP traces: {title}; {way}"


OTHERS = [
    # The search page, as a browser saves it: https://github.com/jaegertracing/jaeger-ui, packages/jaeger-ui/index.html
    (
        "page_of_jaeger",
        (
            b'\n<!DOCTYPE html>\n<html lang="en">\n<head><base href="/"/><title>x</title></head><body><div '
            b'id="jaeger-ui-root">'
        ),
    ),
    ("page", b"<html><head><title>Zipkin</title></head><body></body></html>"),
    ("answer_of_jaeger", b'{"data":["vllm-server"],"total":1,"limit":0,"offset":0,"errors":null}\n'),
    (
        "answer_of_jaeger",
        b'{"data":[{"name":"llm_request","spanKind":"server"}],"total":1,"limit":0,"offset":0,"errors":null}',
    ),
    ("tempo", b'{"traces":[],"metrics":{"inspectedBytes":"13","totalBlocks":13}}'),
    ("tempo", b'{"traces":[],"metrics":{"totalBlocks":13}}'),
    # Of /api/v3/traces
    ("answer_of_jaeger", b'{"error":{"httpCode":404,"message":"No traces found"}}'),
    ("tempo", b'{"scopes":[{"name":"span","tags":["gen_ai.request.id"]}]}'),
    # https://github.com/open-telemetry/opentelemetry-java, exporters/logging
    (
        "console",
        b"INFO: 'llm_request' : 0af7651916cd43dd8448eb211c80319c b7ad6b7169203331 SERVER [tracer: vllm:1.0] {}\n",
    ),
    # https://pkg.go.dev/go.opentelemetry.io/otel/exporters/stdout/stdouttrace
    ("console", b'{\n\t"Name": "llm_request",\n\t"SpanContext": {\n\t\t"TraceID": "0af7"}}\n'),
    # A part of the text, as grep leaves it.
    ("prometheus", b'vllm:e2e_request_latency_seconds_bucket{le="0.3",model_name="m"} 4.0\n'),
    # https://prometheus.io/docs/prometheus/latest/querying/api/
    (
        "query_of_metrics",
        b'{"status":"success","data":{"resultType":"vector","result":[{"metric":{"pod":"v"},"value":[1.7e9,"1"]}]}}',
    ),
    # /metrics of trtllm-serve: https://nvidia.github.io/TensorRT-LLM/
    ("trtllm_log", b'[{"gpuMemUsage":2,"iter":3,"iterLatencyMS":12.1,"kvCacheStats":{"maxNumBlocks":10}}]'),
]


@pytest.mark.parametrize(("kind", "content"), OTHERS)
def test_relatives_of_a_kind_have_its_name(tmp_path, kind, content):
    (tmp_path / "any").write_bytes(content)
    assert UNREAD[kind].title in str(inspect_file(TraceFile.local(tmp_path / "any")))


@pytest.mark.parametrize("kind", ["prometheus", "tempo"])
def test_ingest_says_so_of_a_file_and_of_one_beside_traces(tmp_path, kind):
    run = tmp_path / "r"
    run.mkdir()
    (run / "other.txt").write_bytes(EXAMPLES[kind])
    with pytest.raises(UsageError, match=UNREAD[kind].way.partition("/")[0].strip()):
        tracefit.ingest([run], tmp_path / "none")
    (run / "traces.json").write_bytes(to_json(record(span(1))))
    (run / "run.yaml").write_text("model: m\n")
    warnings = tracefit.ingest([run], tmp_path / "t").warnings
    assert [text for text in warnings if UNREAD[kind].title in text]
    assert not [text for text in warnings if "could not be read" in text]
