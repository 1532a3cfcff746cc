"""From the engine through an OpenTelemetry Collector of somebody else's to tables: `pip install --pre rotel` brings
one.

Skipped where it is not installed: its wheels are for few platforms.
"""

from __future__ import annotations

import importlib.util
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

import tracefit_vllm
from plugin.fake_vllm import engine
from plugin.test_scheduler import load
from receive.process import Process
from tracefit import ingest
from tracefit.tables.store import TableStore
from tracefit_vllm.recorder import Recorder
from tracefit_vllm.records import Header

FOUND = importlib.util.find_spec("rotel")
pytestmark = pytest.mark.skipif(FOUND is None, reason="no collector: `pip install --pre rotel`")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_for(port: int) -> None:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        with suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port)).close()
            return
        time.sleep(0.05)
    raise AssertionError("the collector does not listen")


@pytest.fixture(params=["grpc", "http"])
def collector(request, tmp_path):
    """Start a receiver and a collector that forwards to it; return the collector's port and what ends both."""
    receiver, port = Process(tmp_path / "traces"), free_port()
    to = {"grpc": receiver.grpc_port, "http": receiver.http_port}[request.param]
    agent = Path(FOUND.submodule_search_locations[0]) / "rotel-agent"
    command = [agent, "start", "--exporter", "otlp", "--otlp-exporter-protocol", request.param]
    command += ["--otlp-exporter-endpoint", f"http://127.0.0.1:{to}"]
    command += [
        "--otlp-grpc-endpoint",
        f"127.0.0.1:{port}",
        "--otlp-http-endpoint",
        f"127.0.0.1:{free_port()}",
    ]
    with (tmp_path / "collector.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)

    def end():
        process.send_signal(signal.SIGTERM)  # it sends what it has
        process.wait(30)
        code, _, said = receiver.end()
        assert code == 0, said

    try:
        wait_for(port)
        yield port, end
    finally:
        process.kill()
        process.wait()
        receiver.end()


def test_a_collector_between_changes_nothing(traced, built, collector, tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "fake")
    monkeypatch.setenv("TRACEFIT_VLLM_STEP_TRACING_RICH_SUBSAMPLE_RATE", "0.5")
    monkeypatch.setenv("PYTHONPATH", str(Path(tracefit_vllm.__file__).parents[1]))
    scheduler, kept = traced(blocks=12)
    engine(scheduler, load(200))
    port, end = collector
    made = Recorder(Header(*kept.records[0])._replace(endpoint=f"http://127.0.0.1:{port}"))
    for record in kept.records[1:]:
        made.put(record)
    made.close()
    made.wait()
    end()
    ingest([tmp_path / "traces"], tmp_path / "tables")
    tables = TableStore(tmp_path / "tables")
    found = tables.read("steps").sort("step_id").select("step_id", "scheduled_tokens").rows()
    assert found == [(step, sum(one[1] for one in batch)) for step, *_, batch in scheduler.truth.steps]
    requests = tables.read("requests").select("core_request_id", "output_tokens", "num_preemptions").rows()
    ended = [(name, outputs, times) for name, (_, outputs, times) in scheduler.truth.ended.items()]
    assert sorted(requests) == sorted(ended)
    assert any(times for *_, times in ended)
