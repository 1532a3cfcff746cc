"""tracefit-vllm in a real server when what is around it fails: it serves on, and what was sent is readable."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from receive.process import Process
from tracefit import ingest
from tracefit.tables.store import TableStore
from vllm_server.real_server import Server

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif("SERVER_PYTHON" not in os.environ, reason="no vLLM: `make test-vllm` names one"),
]

HERE = Path(__file__).parent
PLUGIN = HERE.parents[1] / "pipeline/tracefit-vllm"
OPTIONS = ("--max-model-len", "1024", "--max-num-seqs", "8", "--max-num-batched-tokens", "256")
REQUESTS = [
    ([draw.randrange(3, 500) for _ in range(draw.randint(4, 300))], draw.randint(2, 60))
    for draw in map(random.Random, range(20))
]


def exporters(folder: Path) -> list[int]:
    """Return the processes that send the spans of the servers in a folder, which their environment names."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_one = b"from tracefit_vllm.export import main" in (process / "cmdline").read_bytes()
            if is_one and os.fsencode(folder) in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


def tokens(server: Server) -> list[str]:
    """Return what requests that are sent one after another get: the likeliest tokens, and drawn ones.

    The server's seed draws: one of a request's own ends vLLM on CPUs.
    """
    return [server.complete(*one, temperature=heat).text for heat in (0, 1) for one in REQUESTS]


def lines_of(server: Server) -> list[str]:
    return [line for line in server.log.read_text().splitlines() if "tracefit-vllm" in line]


def test_it_changes_no_token_and_its_process_may_hang_or_end(tmp_path):
    receiver = Process(tmp_path / "traces")
    try:
        (tmp_path / "without").mkdir()
        server = Server(tmp_path / "without", receiver.grpc_port, *OPTIONS)
        try:
            wanted = [tokens(server) for _ in range(3)]
        finally:
            server.kill()
        (tmp_path / "with").mkdir()
        traced = ("--scheduler-cls", "tracefit_vllm.Scheduler", "--middleware", "tracefit_vllm.ApiTracing")
        server = Server(
            tmp_path / "with",
            receiver.grpc_port,
            *OPTIONS,
            *traced,
            PYTHONPATH=str(PLUGIN),
            FOLDER=str(tmp_path),
        )
        try:
            assert tokens(server) == wanted[0]
            (exporter,) = exporters(tmp_path)
            for number, of_now in zip((signal.SIGSTOP, signal.SIGKILL), wanted[1:], strict=True):
                os.kill(exporter, number)
                assert tokens(server) == of_now
            server.stop()
        finally:
            server.kill()
    finally:
        receiver.end()
    assert wanted[0][: len(REQUESTS)] == wanted[1][: len(REQUESTS)], "the likeliest"
    assert wanted[0][len(REQUESTS) :] != wanted[1][len(REQUESTS) :], "drawn"
    (line,) = lines_of(server)
    assert "tracing ends, serving goes on: BrokenPipeError" in line


def faulty(folder: Path, plugin: Path, port: int, *options: str, **environment: str) -> Server:
    """Start a server whose scheduler records its steps, with a plugin that has a fault or is timed."""
    return Server(
        folder,
        port,
        *("--max-model-len", "1024", "--max-num-batched-tokens", "1024", *options),
        *("--scheduler-cls", "faulty_plugin.Scheduler", "--async-scheduling", "--shutdown-timeout", "10"),
        TRACEFIT_VLLM="1",
        PYTHONPATH=f"{plugin}:{HERE}",
        RECORDED_STEPS=str(folder / "steps"),
        HOOK_TIME=str(folder / "time"),
        **environment,
    )


def test_a_note_that_raises_ends_the_tracing_with_one_line(plugin, tmp_path):
    receiver = Process(tmp_path / "traces")
    try:
        server = faulty(tmp_path, plugin, receiver.grpc_port, "--max-num-seqs", "8", FAIL_AT="60")
        try:
            for _ in range(2):
                done = server.complete_all(REQUESTS, at_once=12)
                assert [one.output_tokens for one in done] == [limit for _, limit in REQUESTS]
            server.stop()
        finally:
            server.kill()
    finally:
        code, _, said = receiver.end()
    assert code == 0, said
    (line,) = lines_of(server)
    assert "tracing ends, serving goes on: OSError: [Errno 28] No space left on device" in line
    found, wanted = rows_of(tmp_path / "traces", tmp_path / "tables"), wanted_of(tmp_path)
    assert found <= set(wanted)
    assert 0 < len(found) <= 61 < len(wanted)


class Slow(TraceServiceServicer):
    """A collector that answers after seconds, until it is quick; it counts the plugin's events."""

    delay_s = 3.0

    def __init__(self) -> None:
        self.is_quick, self.events, self.dropped = threading.Event(), 0, 0

    def Export(self, request, context):  # noqa: N802 - as the service names it
        self.is_quick.wait(self.delay_s)
        scopes = [scope for resource in request.resource_spans for scope in resource.scope_spans]
        for scope in scopes:
            if scope.scope.name in ("vllm.scheduler", "vllm.scheduler.step"):
                self.events += sum(len(span.events) for span in scope.spans)
                self.dropped += sum(span.dropped_events_count for span in scope.spans)
        return ExportTraceServiceResponse()


def test_slow_collector_delays_no_step(plugin, tmp_path):
    slow, collector = Slow(), grpc.server(ThreadPoolExecutor(4))
    add_TraceServiceServicer_to_server(slow, collector)
    port = collector.add_insecure_port("127.0.0.1:0")
    collector.start()
    requests = [(prompt, 150) for prompt, _ in REQUESTS] * 32
    rich = {"TRACEFIT_VLLM_STEP_TRACING_RICH_SUBSAMPLE_RATE": "1"}
    try:
        server = faulty(tmp_path, plugin, port, "--max-num-seqs", "64", **rich)
        try:
            server.complete_all(requests, at_once=64)
            slow.is_quick.set()
            time.sleep(10)  # a message more, and the rest
            server.complete_all(REQUESTS, at_once=12)
            server.stop()
        finally:
            server.kill()
        until = time.monotonic() + 30
        while exporters(tmp_path) and time.monotonic() < until:
            time.sleep(0.5)
    finally:
        collector.stop(None)
    assert int((tmp_path / "time").read_text()) / 1e9 < slow.delay_s
    rows = [json.loads(line) for line in (tmp_path / "steps.0").read_text().splitlines()]
    of_steps = sum(1 + running for _, _, running, _ in rows)
    of_requests = 4 * (len(requests) + len(REQUESTS))  # queued, scheduled, first token, finished
    assert slow.dropped > 0
    assert slow.events + slow.dropped == of_steps + of_requests
    assert lines_of(server) == []


def wanted_of(folder: Path) -> list[tuple[int, ...]]:
    """Return what the recorder says of each step, as `rows_of` does."""
    rows = []
    for step, requests, *_ in map(json.loads, (folder / "steps.0").read_text().splitlines()):
        parts = ([one for one in requests if not one[3]], [one for one in requests if one[3]])
        rows.append((step, *map(len, parts), *(sum(one[1] for one in part) for part in parts)))
    return rows


def rows_of(traces: Path, out: Path) -> set[tuple[int, ...]]:
    ingest([traces], out)
    columns = ["step_id", "num_prefill_reqs", "num_decode_reqs", "prefill_tokens", "decode_tokens"]
    return set(TableStore(out).read("steps").select(columns).rows())


def test_export_survives_collector_faults_and_a_kill(plugin, tmp_path):
    """Every step that was scheduled a second before the kill is read, and none that was not."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ("--scheduler-cls", "recording_scheduler.RecordingAsync", "--async-scheduling")
    environment = {"TRACEFIT_VLLM": "1", "RECORDED_STEPS": str(tmp_path / "steps")}
    environment["PYTHONPATH"] = f"{plugin}:{HERE}"
    server, receiver = Server(tmp_path, port, *OPTIONS, *flags, **environment), None
    try:
        server.complete_all(REQUESTS, at_once=12)  # nobody listens
        with socket.create_server(("127.0.0.1", port)) as hangs:
            hangs.settimeout(1)
            server.complete_all(REQUESTS, at_once=12)
            time.sleep(3)
        receiver = Process(tmp_path / "first", "--grpc-port", port)
        server.complete_all(REQUESTS, at_once=12)
        until = time.monotonic() + 60
        while not list((tmp_path / "first").rglob("*.*")) and time.monotonic() < until:
            time.sleep(1)
        receiver.end(signal.SIGKILL)
        server.complete_all(REQUESTS, at_once=12)
        receiver = Process(tmp_path / "second", "--grpc-port", port)
        with ThreadPoolExecutor(12) as clients:
            for one in REQUESTS * 20:
                clients.submit(server.complete, *one)
            time.sleep(8)
            recorded = (tmp_path / "steps.0").read_text().splitlines()
            time.sleep(1)
            server.kill()
            clients.shutdown(cancel_futures=True)
        until = time.monotonic() + 30
        while exporters(tmp_path) and time.monotonic() < until:
            time.sleep(0.5)
    finally:
        server.kill()
        if receiver:
            receiver.end()
    found = rows_of(tmp_path / "first", tmp_path / "1") | rows_of(tmp_path / "second", tmp_path / "2")
    wanted = wanted_of(tmp_path)
    assert set(wanted[: len(recorded)]) <= found <= set(wanted)
