"""tracefit-vllm in vLLM's own schedulers and in Dynamo's, feature by feature: what is read of it is what a worker and a
client count.

`DYNAMO` names a folder with the packages ai-dynamo and ai-dynamo-runtime; without it, a stand-in has the methods of its
scheduler.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tracefit import ingest
from tracefit.tables.store import TableStore

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif("SERVER_PYTHON" not in os.environ, reason="no vLLM: `make test-vllm` names one"),
]

ROOT = Path(__file__).parents[2]
FEATURES = ("plain", "preempted", "prefixes", "drafts", "drafts-preempted", "remote", "rank")


@pytest.fixture(scope="module")
def driven(tmp_path_factory):
    folder = tmp_path_factory.mktemp("driven")
    dynamo = os.environ.get("DYNAMO", "")
    path = ":".join(filter(None, map(str, (ROOT / "pipeline/tracefit-vllm", ROOT / "tests", dynamo))))
    environment = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [os.environ["SERVER_PYTHON"], Path(__file__).with_name("drive_scheduler.py"), folder]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert ("dynamo" in done.stdout) == bool(dynamo)
    return folder


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("kind", ["async", "sync", "other"])
def test_steps_and_requests_are_exact(driven, tmp_path, feature, kind):
    run = driven / f"{feature}-{kind}"
    truth = json.loads((run / "truth.json").read_text())
    ingest([run / "traces.pb"], tmp_path)
    tables = TableStore(tmp_path)

    wanted = []
    for step, requests, running, waiting in truth["steps"]:
        prefill = [(tokens, before) for _, tokens, before, outputs in requests if not outputs]
        decode = [(tokens, before) for _, tokens, before, outputs in requests if outputs]
        sums = [sum(one[i] for one in of) for i in (0, 1) for of in (prefill, decode)]
        wanted.append((step, running, waiting, len(prefill), len(decode), *sums))
    columns = ["step_id", "running_depth", "waiting_depth", "num_prefill_reqs", "num_decode_reqs"]
    columns += ["prefill_tokens", "decode_tokens", "prefill_context_tokens", "context_tokens"]
    assert tables.read("steps").sort("step_id").select(columns).rows() == wanted

    columns = ["prompt_tokens", "output_tokens", "num_preemptions", "cached_prompt_tokens", "finish_status"]
    rows = tables.read("requests").sort("core_request_id").select(columns).rows()
    status = {"length": "length", "abort": "aborted"}
    wanted = [(p, out, n, cached or None, status[how]) for _, p, out, n, cached, how in truth["requests"]]
    assert rows == wanted
