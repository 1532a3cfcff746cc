"""The command: options, the run's configuration, what it says, and the lines of the tutorial."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
import yaml

from tracefit.errors import UsageError
from tracefit.receive.options import parse_duration, parse_rotation
from tracefit.synth import SynthOptions, synth

ROOT = Path(__file__).parents[2]
EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
ANY = ("--grpc-port", "0", "--http-port", "0")


def export(port, message):
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        channel.unary_unary(EXPORT)(message.SerializeToString(), timeout=30)


def call(*arguments):
    command = [sys.executable, "-m", "tracefit.cli", "receive", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    ("text", "size"),
    [("64MiB", 64 << 20), ("500 kB", 500_000), ("1", 1), ("1.5GiB", 3 << 29), ("10KiB", 10240)],
)
def test_sizes(text, size):
    assert parse_rotation(text).size_bytes == size


@pytest.mark.parametrize(("text", "seconds"), [("5min", 300), ("90s", 90), ("1.5h", 5400), ("10 min", 600)])
def test_times(text, seconds):
    assert parse_duration(text) == seconds


def test_rotation_takes_either_or_both():
    both, size, seconds = (parse_rotation(text) for text in ("1MiB,10s", "1MiB", "10s"))
    assert (both.size_bytes, both.seconds) == (1 << 20, 10)
    assert (size.size_bytes, size.seconds) == (1 << 20, 300)
    assert (seconds.size_bytes, seconds.seconds) == (64 << 20, 10)


@pytest.mark.parametrize("text", ["", "x", "0", "-1MiB", "5 parsecs", "1MiB,,", "0s", "9" * 13, "1e9MiB"])
def test_what_is_no_rotation_is_refused(text):
    with pytest.raises(UsageError, match="is not a"):
        parse_rotation(text)


@pytest.mark.slow
def test_missing_settings_are_lines_to_fill_in(lib, start, tmp_path):
    receiver = start(tmp_path, "--model", "org/m", "--gpu", "H100", "--set", "max_num_seqs=64", "--set", "site=lab")
    export(receiver.grpc_port, lib.request(1))
    receiver.end()
    text = (tmp_path / "vllm" / "exp-config.yaml").read_text()
    assert yaml.safe_load(text) == {"model": "org/m", "max_num_seqs": 64, "site": "lab", "gpu": "H100"}
    blank = re.findall(r"^# (\w+):$", text, re.MULTILINE)
    assert blank == ["tensor_parallel", "max_model_len", "max_num_batched_tokens"]


@pytest.mark.slow
def test_nothing_needs_to_be_given(lib, start, tmp_path):
    receiver = start(tmp_path / "runs")
    export(receiver.grpc_port, lib.request(1))
    receiver.end()
    found = subprocess.run(
        [
            sys.executable,
            "-m",
            "tracefit.cli",
            "ingest",
            tmp_path / "runs",
            "--out",
            tmp_path / "tables",
            "--json",
        ],
        capture_output=True,
        check=False,
    )
    (run,) = json.loads(found.stdout)["runs"]
    assert (run["run_id"], run["spans"]) == ("vllm", 1)


COMMAND = "vllm serve org/m --tensor-parallel-size 2 --max-num-seqs 32 --enable-journey-tracing\n"
LOG = "INFO 11-22 non-default args: {'model': 'org/m', 'tensor_parallel_size': 2, 'max_num_seqs': 32}\n"


@pytest.mark.slow
@pytest.mark.parametrize("content", [COMMAND, LOG])
def test_a_command_line_or_a_log_is_read_of_vllm(lib, start, config_of, tmp_path, content):
    config = config_of("llama-2-7b")
    (tmp_path / "vllm.txt").write_text(content)
    (tmp_path / "config.json").write_text(json.dumps(config))
    receiver = start(
        tmp_path / "runs", "--run-config", tmp_path / "vllm.txt", "--model-config", tmp_path / "config.json"
    )
    export(receiver.grpc_port, lib.request(1))
    receiver.end()
    known = yaml.safe_load((tmp_path / "runs" / "vllm" / "exp-config.yaml").read_text())
    assert (known["model"], known["tensor_parallel"], known["max_num_seqs"]) == ("org/m", 2, 32)
    assert json.loads((tmp_path / "runs" / "vllm" / "config.json").read_text()) == config


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--gpu", "H9000.json"), "H9000.json"),
        pytest.param(("--host", "0.0.0.0"), "or say --insecure", marks=pytest.mark.slow),  # noqa: S104
        pytest.param(("--rotate", "much"), "--rotate: 'much' is not a size", marks=pytest.mark.slow),
        pytest.param(("--stop-after", "soon"), "--stop-after: 'soon' is not a time", marks=pytest.mark.slow),
        pytest.param(("--token-file", "missing"), "cannot be read", marks=pytest.mark.slow),
        pytest.param(("--set", "max_num_seq=1"), "did you mean", marks=pytest.mark.slow),
        pytest.param(("--tls-cert", "missing"), "go together", marks=pytest.mark.slow),
        pytest.param(("--tls-cert", "missing", "--tls-key", "missing"), "cannot listen", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_option_is_one_line_before_anything_is_received(tracefit, tmp_path, arguments, text):
    code, stdout, stderr = tracefit("receive", "--out", tmp_path / "runs", *ANY, *arguments)
    assert (code, stdout) == (2, "")
    assert stderr.startswith("tracefit: ")
    assert stderr.count("\n") == 1
    assert text in stderr


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_one_line(tracefit, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, stderr = tracefit("receive", "--out", tmp_path / "file" / "runs", *ANY)
    assert (code, stderr.count("\n")) == (2, 1)
    assert "cannot be written" in stderr


@pytest.mark.slow
def test_a_read_only_folder_is_refused_at_the_start():
    """Root may write where permissions forbid it, but not to /proc."""
    done = call("--out", "/proc", *ANY)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "/proc: cannot be written" in done.stderr


@pytest.mark.slow
def test_refused_requests_are_counted_by_cause(lib, start, tmp_path):
    (tmp_path / "token").write_text("x" * 16)
    receiver = start(tmp_path / "runs", "--token-file", tmp_path / "token", "--json")
    for _ in range(3):
        with pytest.raises(grpc.RpcError):
            export(receiver.grpc_port, lib.request(1))
    line = receiver.popen.stderr.readline()
    assert line.startswith("warning: requests are refused (token): a token is needed")
    code, out, err = receiver.end()
    assert (code, err) == (3, "")
    result = json.loads(out)
    assert (result["refused"], result["refused_by_cause"], result["exit_code"]) == (3, {"token": 3}, 3)


@pytest.mark.slow
def test_without_the_extra_it_says_what_to_install(tmp_path):
    code = "import sys; sys.modules['h11'] = None; from tracefit.cli import main; main()"
    command = [sys.executable, "-c", code, "receive", "--out", tmp_path, *ANY]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "tracefit: receiving needs the Python package h11; pip install 'tracefit[receive]'\n"


@pytest.mark.slow
def test_what_is_missing_is_warned_of_while_it_runs(start, tmp_path, new_traces):
    traces = new_traces()
    traces.steps(traces.summary(1, 0), dropped=300)
    receiver = start(tmp_path)
    with grpc.insecure_channel(f"127.0.0.1:{receiver.grpc_port}") as channel:
        channel.unary_unary(EXPORT)(traces.protobuf(), timeout=30)
    line = receiver.popen.stderr.readline()
    assert line.startswith("warning: the server's SDK has dropped 300 events")
    code, out, _ = receiver.end(signal.SIGINT)
    assert code == 0
    assert "vllm     engine        1" in out


@pytest.mark.slow
def test_quiet_says_nothing(tmp_path):
    done = call("--out", tmp_path, *ANY, "--stop-after", "0.1s", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
def test_the_tutorials_three_lines_work(lib, start, tmp_path):
    """Generated spans, sent by the SDK's exporter, stand for the server."""
    text = (ROOT / "docs/tutorial.md").read_text().partition("## Other servers")[2]
    block = re.search(r"```bash\n(tracefit receive.*?)```", text, re.DOTALL)[1].replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in block.splitlines() if line.strip()]
    receive, serve, run = lines
    assert receive[:2] == ["tracefit", "receive"]
    assert serve[serve.index("vllm") + 1] == "serve"
    assert serve[serve.index("--otlp-traces-endpoint") + 1] == "http://127.0.0.1:4317"
    options = [word for word in receive[2:] if word != "&"]
    options[options.index("--out") + 1] = str(tmp_path / "traces")
    receiver = start(*(options[options.index("--out") + 1 :][:1]), *without_out(options))
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415

    spans = lib.sdk_spans(synth(SynthOptions(requests=150, step_sampling=0.5)))
    OTLPSpanExporter(f"http://127.0.0.1:{receiver.grpc_port}", timeout=60).export(spans)
    assert receiver.end()[0] == 0
    arguments = [{"traces/": str(tmp_path / "traces"), "out/": str(tmp_path / "out")}.get(w, w) for w in run[1:]]
    done = subprocess.run([sys.executable, "-m", "tracefit.cli", *arguments, "--fast"], check=False)
    assert done.returncode in (0, 3)
    beta = json.loads((tmp_path / "out" / "models" / "beta.json").read_text())
    assert beta["models"]


def without_out(options):
    at = options.index("--out")
    return [*options[:at], *options[at + 2 :]]
