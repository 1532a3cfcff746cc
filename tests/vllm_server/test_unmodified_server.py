"""A vLLM as it is installed: its spans and its log become steps and models, and what is said of them is for its
user."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from receive.process import Process
from tracefit import ingest
from tracefit.tables.store import TableStore
from vllm_server.real_server import Completion, Server, write_logging

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif("SERVER_PYTHON" not in os.environ, reason="no vLLM: `make test-vllm` names one"),
]

SLOTS = 8
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Recorded:
    """Counts of a server's client, the traces it sent meanwhile, and its log, in whole seconds and in microseconds."""

    completions: list[Completion]
    traces: Path
    log: Path
    fine_log: Path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A hundred requests, one at a time, two, and then more than there are slots."""
    folder = tmp_path_factory.mktemp("recorded")
    receiver = Process(folder / "traces")
    try:
        options = (
            "--max-model-len",
            "1024",
            "--max-num-seqs",
            str(SLOTS),
            "--enable-logging-iteration-details",
        )
        logging = str(write_logging(folder))
        server = Server(folder, receiver.grpc_port, *options, VLLM_LOGGING_CONFIG_PATH=logging)
        try:
            draw = random.Random(0)
            requests = [
                ([draw.randrange(3, 500) for _ in range(draw.randint(4, 600))], draw.randint(2, 60)) for _ in range(100)
            ]
            completions = server.complete_all(requests[:30], at_once=1)
            completions += server.complete_all(requests[30:50], at_once=2)
            completions += server.complete_all(requests[50:], at_once=SLOTS + 4)
            server.stop()
        finally:
            server.kill()
    finally:
        code, _, said = receiver.end()
    assert code == 0, said
    assert [(c.prompt_tokens, c.output_tokens) for c in completions] == [(len(p), n) for p, n in requests]
    return Recorded(completions, folder / "traces", server.log, folder / "fine.log")


def test_every_request_of_the_client_is_a_row(recorded, tmp_path):
    ingest([recorded.traces], tmp_path)
    rows = TableStore(tmp_path).read("requests")
    # Its span names a prompt of a completion: the first of one is -0.
    ids = rows["request_id"].str.strip_suffix("-0")
    found = zip(ids, rows["prompt_tokens"], rows["output_tokens"], strict=True)
    assert Counter(found) == Counter((c.request_id, c.prompt_tokens, c.output_tokens) for c in recorded.completions)


def test_spans_give_models_and_usable_advice(recorded, tracefit, tmp_path):
    code, out, err = tracefit("run", recorded.traces, "--run-config", recorded.log, "--out", tmp_path)
    assert (code, _warnings(err)) == (0, []), err
    # A machine that stalls, as a busy one does, has steps that no batch explains: then they are refused with the
    # reason.
    fitted = _models(tmp_path)
    assert fitted[:2] == ["alpha.admission", "alpha.queue_wait"]
    assert fitted[2:] == ["beta.cycle_time"] or "beta.cycle_time was not fitted" in out + err

    _, inspected, said = tracefit("inspect", recorded.traces)
    text = "".join([out, err, (tmp_path / "report.md").read_text(), inspected, said])
    assert "alpha.departure" in text  # what is missing is said
    assert _flags(text) <= _flags((ROOT / "docs/reference/cli.md").read_text()) | _flags(_options_of_vllm())


@pytest.mark.parametrize("log", ["log", "fine_log"])
def test_with_its_log_they_give_every_step_and_its_contexts(recorded, tracefit, tmp_path, log):
    traces = shutil.copytree(recorded.traces, tmp_path / "traces")
    (run,) = traces.iterdir()
    content = getattr(recorded, log).read_bytes()
    (run / "any-name").write_bytes(content)
    code, _, err = tracefit("run", traces, "--run-config", recorded.log, "--out", tmp_path / "out")
    assert (code, _warnings(err)) == (0, []), err
    assert _models(tmp_path / "out") == ["alpha.admission", "alpha.queue_wait", "beta.cycle_time"]

    tables = TableStore(tmp_path / "out/tables")
    steps, timeline = tables.read("steps"), tables.read("timeline")
    assert steps["step_id"].to_list() == list(range(content.count(b"Iteration(")))
    # Every prompt is computed once, and the first token of an output comes from it.
    wanted = [
        sum(c.prompt_tokens for c in recorded.completions),
        sum(c.output_tokens - 1 for c in recorded.completions),
    ]
    assert [steps[name].sum() for name in ("prefill_tokens", "decode_tokens")] == wanted
    assert timeline["step_id"].to_list() == steps["step_id"].to_list()
    # A busy machine stamps some tokens so late that a request has no place among whole seconds.
    assert timeline["context_tokens"].null_count() < 0.2 * timeline.height
    # Each decode of a request has one more token before it than the last.
    decoded = timeline.drop_nulls("context_tokens")
    assert (decoded["context_tokens"] > 0).eq(decoded["num_decode_reqs"] > 0).mean() > 0.99
    if log == "fine_log":
        assert timeline["interval_steps"].drop_nulls().value_counts(sort=True)["interval_steps"][0] == 1


def _warnings(err):
    """Return the warnings, without that of a queue: more requests than slots come, and a slow machine takes long for
    them."""
    return [line for line in err.splitlines() if "warning:" in line and " was overloaded (" not in line]


def _models(out):
    return sorted(
        model["name"]
        for kind in ("alpha", "beta")
        for model in json.loads((out / f"models/{kind}.json").read_text())["models"]
    )


def _flags(text):
    # vLLM's parser adds the --no- forms: no source names them.
    return {flag.replace("--no-", "--", 1) for flag in re.findall(r"--[a-z][a-z-]+", text)}


def _options_of_vllm():
    """Return the source of the options of its server and of its load generator, which names each."""
    (package,) = Path(os.environ["SERVER_PYTHON"]).parents[1].glob("lib/*/site-packages/vllm")
    sources = [package / "engine/arg_utils.py", *(package / "benchmarks").rglob("*.py")]
    return "".join(source.read_text() for source in sources)
