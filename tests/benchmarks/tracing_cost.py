"""The cost of tracing for a real vLLM server: throughput at three loads, without traces and with each way to record it.

    SERVER_PYTHON=ENVIRONMENT/bin/python PYTHONPATH=tests python -m benchmarks.tracing_cost [--rounds 2] [--requests 96]

A quarter of an hour on a machine where nothing else runs (`make bench-tracing`). A server of a small model with random
weights is started for each way: without traces; with a span a request, as `--otlp-traces-endpoint` gives it; with the
iteration log besides; and with the plugin, which records every step and every event of a request. Clients keep 1, 8 or
32 requests in flight. The receiver runs on the same machine. Each way has its turn in every round, in another order.
Prints tokens per second, the loss against no traces with the spread between rounds, and the time that it takes per step
and per request.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from receive.process import Process
from vllm_server.real_server import CONFIG, Server

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
WAYS = ("no traces", "spans", "spans and iteration log", "plugin")
LOADS = (1, 8, 32)
PROMPT, OUTPUT = 64, 96
MODEL = {
    **CONFIG,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
OPTIONS = (
    "--dtype",
    "float32",
    "--max-model-len",
    "512",
    "--max-num-seqs",
    "32",
    "--no-enable-prefix-caching",
)


def plugin_in(folder: Path) -> Path:
    """Install the plugin into a folder, as pip does."""
    source = shutil.copytree(ROOT / "pipeline/tracefit-vllm", folder / "source")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--target", str(folder / "site"))
    subprocess.run([os.environ["SERVER_PYTHON"], "-m", "pip", "install", *options, str(source)], check=True)
    return folder / "site"


def throughputs(way: str, folder: Path, plugin: Path, requests: int) -> Iterator[tuple[int, float]]:
    """Start a server that is traced in a way, and yield each load with its output tokens per second."""
    folder.mkdir(parents=True)
    receiver = None if way == "no traces" else Process(folder / "traces")
    options, environment = list(OPTIONS), dict[str, str]()
    if way == "spans and iteration log":
        options += ["--enable-logging-iteration-details"]
    if way == "plugin":
        options += ["--middleware", "tracefit_vllm.ApiTracing"]
        environment = {"TRACEFIT_VLLM": "1", "PYTHONPATH": str(plugin)}
    try:
        server = Server(folder, receiver and receiver.grpc_port, *options, config=MODEL, **environment)
        try:
            draw = random.Random(1)
            asked = [([draw.randrange(3, 500) for _ in range(PROMPT)], OUTPUT) for _ in range(requests)]
            server.complete_all(asked[: max(LOADS)], at_once=max(LOADS))  # warm-up
            for load in LOADS:
                # One client alone takes as long for an eighth of the requests.
                some = asked[: max(requests * min(load, 8) // 8, 12)]
                began = time.perf_counter()
                done = server.complete_all(some, at_once=load)
                seconds = time.perf_counter() - began
                yield load, sum(one.output_tokens for one in done) / seconds
            server.stop()
        finally:
            server.kill()
    finally:
        if receiver is not None:
            receiver.end()


def main() -> None:
    """Measure every way in turn, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=96)
    asked = parser.parse_args()
    found: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch:
        plugin = plugin_in(Path(scratch) / "plugin")
        for number in range(asked.rounds):
            for way in WAYS if number % 2 == 0 else WAYS[::-1]:
                folder = Path(scratch) / f"{number}-{WAYS.index(way)}"
                for load, tokens_per_s in throughputs(way, folder, plugin, asked.requests):
                    found[way, load].append(tokens_per_s)
                    print(f"round {number + 1}, {way}, {load}: {tokens_per_s:.1f}", file=sys.stderr, flush=True)
    print("| way | in flight | tokens/s | loss % | between rounds % | us per step | us per request |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for way in WAYS:
        for load in LOADS:
            here, without = (statistics.fmean(found[name, load]) for name in (way, WAYS[0]))
            values = found[way, load]
            spread = 100 * (max(values) - min(values)) / here
            # In a closed loop a step gives a token to each request in flight.
            step_us = 1e6 * load * (1 / here - 1 / without)
            cells = [f"{here:.0f}", f"{100 * (1 - here / without):+.1f}", f"{spread:.1f}"]
            cells += [f"{step_us:+.0f}", f"{step_us * OUTPUT / load:+.0f}"]
            print(f"| {way} | {load} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
