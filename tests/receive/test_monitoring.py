"""Monitoring of the receiver: health checks over both protocols, metrics for Prometheus, the dashboard."""

from __future__ import annotations

import asyncio
import errno
import http.client
import json
import os
import re
from pathlib import Path

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tracefit import load
from tracefit.receive.observed import StepErrors
from tracefit.receive.options import Token

ROOT = Path(__file__).parents[2]
CHECK = "/grpc.health.v1.Health/Check"
EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"


def get(port, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    content = answer.read().decode()
    assert connection.sock is not None, "closed after this answer"
    connection.close()
    return answer.status, content


def call(port, path, body=b"", metadata=()):
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            return channel.unary_unary(path)(body, metadata=metadata, timeout=30)
        except grpc.RpcError as error:
            return error.code().name


def token_at(tmp_path):
    (tmp_path / "token").write_text("x" * 16)
    return Token(tmp_path / "token")


def samples(text):
    """Return every sample as Prometheus reads it: by name, and by label where it has one."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_health_is_that_of_the_disk_and_needs_no_token(lib, tmp_path, monkeypatch):
    """The disk fails, and works again."""
    write = os.write

    def fails(descriptor, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    async def main():
        metadata = [("authorization", "Bearer " + "x" * 16)]
        found = []
        async with lib.running(tmp_path / "runs", token=token_at(tmp_path)) as at:
            for each in (write, fails, write):
                monkeypatch.setattr(os, "write", each)
                body = lib.request(1).SerializeToString()
                await asyncio.to_thread(call, at.grpc_port, EXPORT, body, metadata)
                found.append(
                    (
                        await asyncio.to_thread(get, at.http_port, "/healthz"),
                        await asyncio.to_thread(call, at.grpc_port, CHECK),
                    )
                )
            at.intake.close()
            found.append(await asyncio.to_thread(call, at.grpc_port, CHECK))
        return found

    cause = "refused within the last minute: disk\n"
    assert asyncio.run(main()) == [
        ((200, "ok\n"), SERVING),
        ((503, f"not ready\n{cause}"), NOT_SERVING),
        ((200, f"ok\n{cause}"), SERVING),
        NOT_SERVING,
    ]


@pytest.mark.parametrize(("path", "status"), [("/healthz", 200), ("/metrics", 404), ("/", 404)])
def test_a_question_for_the_head_alone_is_answered(lib, tmp_path, path, status):
    """Load balancers and monitors ask so. The connection stays open for the next request."""

    async def main():
        async with lib.running(tmp_path) as at:
            return await asyncio.to_thread(heads, at.http_port, path), await asyncio.to_thread(
                get, at.http_port, "/healthz"
            )

    def heads(port, path):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        found = []
        for _ in range(2):
            connection.request("HEAD", path)
            answer = connection.getresponse()
            found.append((answer.status, answer.read()))
        connection.close()
        return found

    found, health = asyncio.run(main())
    assert found == [(status, b"")] * 2
    assert health[0] == 200


def test_one_failing_sender_leaves_the_receiver_healthy(lib, tmp_path):
    (tmp_path / "broken").write_text("a file where a folder should be")
    body = b"".join(lib.request(1, service=name).SerializeToString() for name in ("broken", "vllm"))

    async def main():
        async with lib.running(tmp_path) as at:
            refused = await asyncio.to_thread(call, at.grpc_port, EXPORT, body)
            return refused, await asyncio.to_thread(get, at.http_port, "/healthz")

    refused, health = asyncio.run(main())
    assert isinstance(refused, str)
    assert health == (200, "ok\nrefused within the last minute: disk\n")


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (b"\x0a\x33opentelemetry.proto.collector.trace.v1.TraceService", SERVING),
        (b"\x0a\x05other", "NOT_FOUND"),
        (b"\xff", "INVALID_ARGUMENT"),
    ],
)
def test_health_is_asked_for_by_the_name_of_a_service(lib, tmp_path, request_, answer):
    async def main():
        async with lib.running(tmp_path) as at:
            return await asyncio.to_thread(call, at.grpc_port, CHECK, request_)

    assert asyncio.run(main()) == answer


def test_metrics_are_off_unless_asked_for_and_need_the_token(lib, tmp_path):
    async def main(**options):
        async with lib.running(tmp_path / "runs", token=token_at(tmp_path), **options) as at:
            codes = [
                (await asyncio.to_thread(lambda t=t: get(at.http_port, "/metrics", authorization=t)))[0]
                for t in ("Bearer wrong", "Bearer " + "x" * 16)
            ]
            return codes, dict(at.intake.observed.refusals.counts)

    assert asyncio.run(main()) == ([404, 404], {"other_signal": 2})
    assert asyncio.run(main(has_metrics=True)) == ([401, 200], {"token": 1})


def test_metrics_say_what_was_received(lib, tmp_path, new_traces):
    """Two spans of a request with 11.2 ms to its first token, 0.2 ms of them in the queue; a malformed one."""
    body = new_traces().request(1, 0, step=1).protobuf()

    async def main():
        async with lib.running(tmp_path, has_metrics=True) as at:
            await asyncio.to_thread(call, at.grpc_port, EXPORT, body)
            await asyncio.to_thread(call, at.grpc_port, EXPORT, b"\xff")
            return samples((await asyncio.to_thread(get, at.http_port, "/metrics"))[1]), at.store.files

    found, (path,) = asyncio.run(main())
    expected = {
        ("tracefit_receive_spans_total",): 2,
        ("tracefit_receive_requests_total",): 1,
        ("tracefit_receive_written_bytes_total",): path.stat().st_size,
        ("tracefit_receive_refused_total", "malformed"): 1,
        ("tracefit_receive_open_requests",): 0,
        ("tracefit_server_requests_total",): 1,
        ("tracefit_server_ttft_seconds_bucket", "0.01"): 0,
        ("tracefit_server_ttft_seconds_bucket", "0.02"): 1,
        ("tracefit_server_ttft_seconds_bucket", "+Inf"): 1,
        ("tracefit_server_ttft_seconds_sum",): pytest.approx(0.0112),
        ("tracefit_server_queue_wait_seconds_sum",): pytest.approx(0.0002),
    }
    assert {name: found[name] for name in expected} == expected
    assert found[("tracefit_receive_disk_free_bytes",)] > 0


def test_dashboard_and_page_name_exactly_the_metrics(lib, tmp_path):
    async def main():
        async with lib.running(tmp_path, has_metrics=True) as at:
            at.intake.observed.step_errors = StepErrors(0.02)
            return (await asyncio.to_thread(get, at.http_port, "/metrics"))[1]

    known = {
        family.name + "_total" * (family.type == "counter")
        for family in text_string_to_metric_families(asyncio.run(main()))
    }
    dashboard = json.loads((ROOT / "docs/how-to/receive-dashboard.json").read_text())
    queries = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    for text in (queries, (ROOT / "docs/how-to/receive.md").read_text()):
        named = re.findall(r"\btracefit_(?:receive|server|step)_\w+", text)
        assert {name.removesuffix("_bucket") for name in named} == known


@pytest.mark.slow
def test_step_times_are_compared_with_predicted_ones(start, tmp_path, new_traces):
    """100 KV blocks of 16 tokens hold 8 requests: half a block each is empty, 192 tokens are in each."""
    models = ROOT / "fixtures" / "models"
    step = {"num_prefill_reqs": 0, "num_decode_reqs": 8, "prefill_tokens": 0, "running_depth": 8}
    traces = new_traces()
    traces.steps(
        traces.summary(1, 0, **step, blocks_total_gpu=1000, blocks_free_gpu=900),
        traces.summary(2, 20_000, **step),
    )
    receiver = start(tmp_path, "--metrics", "--models", models, "--deployment", "llama-3.1-8b")
    call(receiver.grpc_port, EXPORT, traces.protobuf())
    found = {}
    while not found.get(("tracefit_step_measured_seconds_total",)):
        found = samples(get(receiver.http_port, "/metrics")[1])
    predicted = load(models).predict_step(deployment="llama-3.1-8b", batch=8, context=192).step.value_us
    assert found[("tracefit_step_measured_seconds_total",)] == pytest.approx(0.02)
    assert found[("tracefit_step_predicted_seconds_total",)] == pytest.approx(predicted / 1e6)
    assert found[("tracefit_step_error_ratio_sum",)] == pytest.approx(abs(predicted - 20_000) / 20_000)
    (of_deployment,) = (
        m["validation"]
        for m in json.loads((models / "beta.json").read_text())["models"]
        if m["deployment_id"].startswith("llama-3.1-8b")
    )
    published = max(of_deployment[part]["mdape_pct"] for part in ("train", "holdout")) / 100
    assert found[("tracefit_step_published_error_ratio",)] == pytest.approx(published)
