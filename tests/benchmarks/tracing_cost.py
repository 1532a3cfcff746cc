"""The cost of tracing for a real vLLM server: throughput at three loads, without traces and with each way to record it.

    SERVER_PYTHON=ENVIRONMENT/bin/python PYTHONPATH=tests python -m benchmarks.tracing_cost [--rounds 12]

A quarter of an hour on a machine where nothing else runs (`make bench-tracing`). Four servers of a small model with
random weights are started: without traces; with a span a request, as `--otlp-traces-endpoint` gives it; with the
iteration log besides; and with the plugin, which records every step and every event of a request. Clients keep 1, 8 or
32 requests in flight at one of them at a time, in turns of some seconds; the receivers run on the same machine. Prints
tokens per second, the time that is added to that without traces (median and quartiles over the rounds), and the same
per step and per request.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from receive.process import Process
from vllm_server.real_server import CONFIG, Server

ROOT = Path(__file__).parents[2]
WAYS = ("no traces", "spans", "spans and iteration log", "plugin")
LOADS = (1, 8, 32)
BLOCK = {1: 4, 8: 24, 32: 64}
"""Requests of a turn: some seconds at each load."""
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


class Traced:
    """A server that is traced in a way, with its receiver."""

    def __init__(self, way: str, folder: Path, plugin: Path) -> None:
        folder.mkdir(parents=True)
        self.receiver = None if way == "no traces" else Process(folder / "traces")
        options, environment = list(OPTIONS), dict[str, str]()
        if way == "spans and iteration log":
            options += ["--enable-logging-iteration-details"]
        if way == "plugin":
            options += ["--middleware", "tracefit_vllm.ApiTracing"]
            environment = {"TRACEFIT_VLLM": "1", "PYTHONPATH": str(plugin)}
        port = self.receiver and self.receiver.grpc_port
        self.server = Server(folder, port, *options, config=MODEL, **environment)

    def tokens_per_s(self, load: int, requests: list[tuple[list[int], int]]) -> float:
        """Return the output tokens per second of a closed loop."""
        began = time.perf_counter()
        done = self.server.complete_all(requests, at_once=load)
        return sum(one.output_tokens for one in done) / (time.perf_counter() - began)

    def end(self) -> None:
        """End the server and its receiver."""
        self.server.kill()
        if self.receiver is not None:
            self.receiver.end()


def measured(rounds: int, folder: Path) -> dict[tuple[str, int], list[float]]:
    """Return tokens per second of each way at each load, a value per round; all servers run, and one at a time has
    requests."""
    draw = random.Random(1)
    found: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    plugin = plugin_in(folder / "plugin")
    traced: dict[str, Traced] = {}
    try:
        for way in WAYS:
            traced[way] = Traced(way, folder / f"way-{WAYS.index(way)}", plugin)
        for number in range(-1, rounds):
            for load in LOADS:
                asked = [([draw.randrange(3, 500) for _ in range(PROMPT)], OUTPUT) for _ in range(BLOCK[load])]
                # Each way has its turn within seconds, in another order each time: the machine's speed is that of all.
                for way in random.Random(number).sample(WAYS, len(WAYS)):
                    tokens_per_s = traced[way].tokens_per_s(load, asked)
                    if number >= 0:  # before, a warm-up
                        found[way, load].append(tokens_per_s)
            print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    finally:
        for one in traced.values():
            one.end()
    return found


def main() -> None:
    """Measure every way in turn, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    with tempfile.TemporaryDirectory() as scratch:
        found = measured(parser.parse_args().rounds, Path(scratch))
    print("| way | in flight | tokens/s | share of the time % | quartiles | us per step | us per request |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for way in WAYS:
        for load in LOADS:
            here, without = np.array(found[way, load]), np.array(found[WAYS[0], load])
            share = 100 * (without / here - 1)
            low, middle, high = np.quantile(share, (0.25, 0.5, 0.75))
            # In a closed loop a step gives a token to each request in flight.
            step_us = 1e6 * load / float(np.median(without)) * middle / 100
            cells = [f"{np.median(here):.0f}", f"{middle:+.1f}", f"{low:+.1f} to {high:+.1f}"]
            cells += [f"{step_us:+.0f}", f"{step_us * OUTPUT / load:+.0f}"]
            print(f"| {way} | {load} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
