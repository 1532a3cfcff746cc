"""The loop of a recording with a real server: record badly, record as the report says, and see whether every use
becomes a yes.

    SERVER_PYTHON=ENVIRONMENT/bin/python PYTHONPATH=tests python -m benchmarks.recording_loop FOLDER

Half an hour on a machine where nothing else runs (`make bench-loop`). Each time `vllm serve` is started again, with a
small model of random weights, and its spans and its log are recorded. First one rate is sent for a minute. Then the
commands of the report are run as they are, with the server's address and the model's folder put in. Each recording is
fitted from only its spans, and with its log. It prints a table of the verdicts, and below it the criteria that lack a
yes. Recordings and reports stay in FOLDER.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import tracefit
from receive.process import Process
from vllm_server.real_server import CONFIG, Server, write_logging

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL = {
    **CONFIG,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    # `random` prompts of `vllm bench serve` begin at a random word and count on: of 512 words most repeat earlier ones,
    # and are prefix hits.
    "vocab_size": 32_768,
}
SERVER = ("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "64")
"""Steps in bfloat16 take ten times as long on most processors."""
BADLY = (
    'vllm bench serve --base-url "$BASE_URL" --model "$MODEL" --dataset-name random --seed 1 --request-rate 2 --num-prompts 120 '
    "--random-input-len 100 --random-output-len 40 --random-range-ratio 0.9 --ignore-eos"
)
USES = ("simulation", "capacity planning", "autoscaling", "alerting")
SOURCES = ("only spans", "spans and log")


def record(folder: Path, lines: list[str]) -> Path:
    """Run lines of a shell against a server of its own; return the run's folder below `traces`, and leave `server.log`
    beside it."""
    folder.mkdir(parents=True)
    receiver = Process(folder / "traces")
    try:
        logging = str(write_logging(folder))
        options = (*SERVER, "--enable-logging-iteration-details")
        server = Server(folder, receiver.grpc_port, *options, config=MODEL, VLLM_LOGGING_CONFIG_PATH=logging)
        try:
            _send(lines, server, folder)
            server.stop()
        finally:
            server.kill()
    finally:
        code, _, said = receiver.end()
    if code:
        raise SystemExit(f"the receiver ended with {code}: {said}")
    (run,) = (folder / "traces").iterdir()
    return run


def _send(lines: list[str], server: Server, folder: Path) -> None:
    """Run the lines, with the server's address and model in place of what a user puts in."""
    values = {"BASE_URL": f"http://127.0.0.1:{server.port}", "MODEL": str(server.model)}
    kept = [line for line in lines if not line.startswith(tuple(f"{name}=" for name in values))]
    script = folder / "load.sh"
    script.write_text("\n".join(["set -e", *kept, ""]))
    tools = Path(os.environ["SERVER_PYTHON"]).parent
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment = {**os.environ, **values, **offline, "PATH": f"{tools}:{os.environ['PATH']}"}
    with (folder / "load.log").open("wb") as log:
        subprocess.run(["bash", str(script)], env=environment, stdout=log, stderr=subprocess.STDOUT, check=True)


def fit(run: Path, folder: Path) -> dict[str, dict]:
    """Return what the report says of only the spans, and of the spans with the log."""
    found = {}
    for source in SOURCES:
        recording = folder / source.replace(" ", "-")
        shutil.copytree(run, recording / "traces" / "server")
        if source == "spans and log":
            shutil.copy(folder / "fine.log", recording / "traces" / "server" / "server.log")
        shutil.copy(folder / "model" / "config.json", recording / "traces" / "server" / "config.json")
        # A report of what to record is there without models too.
        with suppress(tracefit.DataError):
            tracefit.run(
                [recording / "traces"],
                recording / "out",
                server=tracefit.ServerOptions(run_config=folder / "server.log"),
            )
        (found[source],) = json.loads((recording / "out" / "evaluation.json").read_text())["deployments"]
    return found


def table(found: dict[str, dict[str, dict]]) -> Iterator[str]:
    """Yield the lines of a table: the recordings, the verdict on each use, and errors of models on the held-out
    steps."""
    yield f"| recording | {' | '.join(USES)} | step time, held out |"
    yield f"|---|{'---|' * (len(USES) + 1)}"
    for recording, sources in found.items():
        for source, deployment in sources.items():
            answers = [_answer(deployment["verdicts"].get(use)) for use in USES]
            yield f"| {recording}, {source} | {' | '.join(answers)} | {_step_error(deployment)} |"


def _answer(verdict: dict | None) -> str:
    if verdict is None:
        return "no model"
    of_machine = any(c["answer"] != "yes" and c["machine_pct"] is not None for c in verdict["criteria"])
    others = any(c["answer"] != "yes" and c["machine_pct"] is None for c in verdict["criteria"])
    return verdict["answer"] + (" (only the machine's noise)" if of_machine and not others else "")


def _step_error(deployment: dict) -> str:
    steps = deployment["models"].get("beta.cycle_time")
    return f"{steps['holdout']['mape_pct']:.1f} %" if steps else "no model"


def reasons(found: dict[str, dict[str, dict]]) -> Iterator[str]:
    """Yield a line for each criterion without a yes."""
    for recording, sources in found.items():
        for source, deployment in sources.items():
            for use, verdict in deployment["verdicts"].items():
                missed = (c["reason"] for c in verdict["criteria"] if c["answer"] != "yes")
                yield from (f"{recording}, {source}, {use}: {reason}" for reason in dict.fromkeys(missed))


def main() -> None:
    """Record twice, fit both, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    found = {}
    found["a minute of one rate"] = fit(record(folder / "bad", [BADLY]), folder / "bad")
    advice = found["a minute of one rate"]["spans and log"]["record"]
    lines = advice["command"]
    print("\n".join(["the report says to record:", *lines, ""]), flush=True)
    found["as the report says"] = fit(record(folder / "good", lines), folder / "good")
    print("\n".join([*table(found), "", *reasons(found)]))


if __name__ == "__main__":
    main()
