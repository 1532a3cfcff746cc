"""tracefit-vllm in a real server: what it says of each step and request is what the scheduler did and the client
got."""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import pytest

from receive.process import Process
from tracefit import ingest
from tracefit.tables.store import TableStore
from vllm_server.real_server import Completion, Server

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif("SERVER_PYTHON" not in os.environ, reason="no vLLM: `make test-vllm` names one"),
]

PREFIX = [5] * 256
"""Two blocks of the KV cache that many prompts share: on CPUs a block has 128 tokens."""


KINDS = {
    "async": ["--scheduler-cls", "recording_scheduler.RecordingAsync", "--async-scheduling"],
    "sync": ["--scheduler-cls", "recording_scheduler.RecordingSync", "--no-async-scheduling"],
    "drafts": [
        *("--scheduler-cls", "recording_scheduler.RecordingSync", "--speculative-config"),
        '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}',
    ],
    "ranks": [
        *("--scheduler-cls", "recording_scheduler.RecordingAsync", "--async-scheduling"),
        *("--data-parallel-size", "2", "--api-server-count", "2"),
    ],
}


@dataclass(frozen=True)
class Recorded:
    """Answers that clients got from a server, with the traces it sent and the recorder's steps by data-parallel
    rank."""

    completions: list[Completion]
    several: list[Completion]
    abandoned: int
    traces: Path
    steps: list[Path]
    log: Path


@pytest.fixture(
    scope="module",
    params=[kind if kind == "async" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS],
)
def recorded(request, plugin, tmp_path_factory):
    """140 requests, more at a time than there are slots, in a cache that does not hold them, some with a shared
    prefix; five clients go away; three requests want several outputs, or have several prompts.
    """
    folder = tmp_path_factory.mktemp("recorded")
    receiver = Process(folder / "traces")
    options = ["--max-model-len", "1024", "--max-num-seqs", "8", "--max-num-batched-tokens", "256"]
    options += ["--num-gpu-blocks-override", "16", "--block-size", "128"]
    options += ["--shutdown-timeout", "10"]  # else vLLM kills its engine at once
    options += ["--middleware", "tracefit_vllm.ApiTracing", *KINDS[request.param]]
    environment = {
        "TRACEFIT_VLLM": "1",
        "TRACEFIT_VLLM_STEP_TRACING_RICH_SUBSAMPLE_RATE": "0.5",
        "PYTHONPATH": f"{plugin}:{Path(__file__).parent}",
        "RECORDED_STEPS": str(folder / "steps"),
    }
    try:
        server = Server(folder, receiver.grpc_port, *options, **environment)
        try:
            draw = random.Random(1)

            def prompt():
                rest = [draw.randrange(3, 500) for _ in range(draw.randint(4, 300))]
                return (PREFIX if draw.random() < 0.3 else []) + rest

            requests = [(prompt(), draw.randint(2, 150)) for _ in range(140)]
            completions = server.complete_all(requests[:40], at_once=12)
            for one in requests[:5]:
                server.abandon(*one)
            completions += server.complete_all(requests[40:], at_once=12)
            several = [server.complete(prompt(), 20, n=2), server.complete(prompt(), 20, n=3, temperature=1)]
            several.append(server.complete([prompt(), prompt()], 20))
            server.stop()
        finally:
            server.kill()
    finally:
        code, _, said = receiver.end()
    assert code == 0, said
    steps = sorted(folder.glob("steps.*"))
    return Recorded(completions, several, 5, folder / "traces", steps, server.log)


@pytest.fixture(scope="module")
def tables(recorded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    ingest([recorded.traces], folder)
    return TableStore(folder)


def test_every_step_is_what_the_scheduler_did(recorded, tables):
    columns = ["step_id", "running_depth", "waiting_depth", "num_prefill_reqs", "num_decode_reqs"]
    columns += ["prefill_tokens", "decode_tokens", "prefill_context_tokens", "context_tokens"]
    wanted = []
    for of_rank in recorded.steps:
        rows = []
        for line in of_rank.read_text().splitlines():
            step, requests, running, waiting = json.loads(line)
            prefill = [(tokens, before) for _, tokens, before, outputs in requests if not outputs]
            decode = [(tokens, before) for _, tokens, before, outputs in requests if outputs]
            sums = [sum(one[i] for one in of) for i in (0, 1) for of in (prefill, decode)]
            rows.append((step, running, waiting, len(prefill), len(decode), *sums))
        wanted.append(rows)
    steps = tables.read("steps").sort("step_id")
    found = [of_server.select(columns).rows() for of_server in steps.partition_by("server")]
    assert sorted(found) == sorted(wanted)


def test_every_request_is_what_the_client_got(recorded, tables):
    rows = tables.read("requests")
    of_several = {c.request_id for c in recorded.several}
    ones = rows.filter(~pl.col("request_id").is_in(of_several))
    assert ones["request_id"].n_unique() == ones.height == len(recorded.completions) + recorded.abandoned
    done = ones.filter(pl.col("finish_status") == "length")
    found = set(zip(done["request_id"], done["prompt_tokens"], done["output_tokens"], strict=True))
    assert found >= {(c.request_id, c.prompt_tokens, c.output_tokens) for c in recorded.completions}
    if len(recorded.steps) == 1:  # two ranks have room for all
        assert rows["num_preemptions"].sum() > 0
    assert rows["cached_prompt_tokens"].max() >= len(PREFIX)
    assert ones["departed_ns"].null_count() <= recorded.abandoned

    for completion, cores in zip(recorded.several, (2, 3, 2), strict=True):
        of_it = rows.filter(pl.col("request_id") == completion.request_id)
        assert (of_it.height, of_it["output_tokens"].sum()) == (cores, completion.output_tokens)


def test_they_give_all_models(recorded, tracefit, tmp_path):
    code, out, err = tracefit("run", recorded.traces, "--run-config", recorded.log, "--out", tmp_path)
    assert code == 0, out + err
    models = {
        model["name"]
        for kind in ("alpha", "beta")
        for model in json.loads((tmp_path / f"models/{kind}.json").read_text())["models"]
    }
    assert "not replayed" not in out
    uses = ("simulation", "capacity planning", "autoscaling", "alerting")
    assert all(use in " ".join(out.split()) for use in uses), "a verdict on each"
    assert models == {"alpha.admission", "alpha.queue_wait", "alpha.departure", "beta.cycle_time"}
