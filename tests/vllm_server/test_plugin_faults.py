"""tracefit-vllm in a real server when what is around it fails: it serves on, and what was sent is readable."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

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
    """Return what requests that are sent one after another get: the likeliest tokens (a seed of their own ends vLLM on CPUs)."""
    return [server.complete(*one, temperature=0).text for one in REQUESTS]


def test_it_changes_no_token_and_its_process_may_hang_or_end(tmp_path):
    receiver = Process(tmp_path / "traces")
    try:
        (tmp_path / "without").mkdir()
        server = Server(tmp_path / "without", receiver.grpc_port, *OPTIONS)
        try:
            wanted = tokens(server)
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
            assert tokens(server) == wanted
            (exporter,) = exporters(tmp_path)
            for number in (signal.SIGSTOP, signal.SIGKILL):
                os.kill(exporter, number)
                assert tokens(server) == wanted
            server.stop()
        finally:
            server.kill()
    finally:
        receiver.end()
    lines = [line for line in server.log.read_text().splitlines() if "tracefit-vllm" in line]
    assert len(lines) == 1
    assert "tracing ends, serving goes on: BrokenPipeError" in lines[0]


def rows_of(traces: Path, out: Path) -> set[tuple[int, ...]]:
    ingest([traces], out)
    columns = ["step_id", "num_prefill_reqs", "num_decode_reqs", "prefill_tokens", "decode_tokens"]
    return set(TableStore(out).read("steps").select(columns).rows())


def test_a_collector_may_be_away_or_hang_or_restart_and_the_server_be_killed(plugin, tmp_path):
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
    lines = (tmp_path / "steps.0").read_text().splitlines()
    wanted = []
    for step, requests, *_ in map(json.loads, lines):
        parts = ([one for one in requests if not one[3]], [one for one in requests if one[3]])
        wanted.append((step, *map(len, parts), *(sum(one[1] for one in part) for part in parts)))
    assert set(wanted[: len(recorded)]) <= found <= set(wanted)
