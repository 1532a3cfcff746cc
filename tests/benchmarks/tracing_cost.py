"""The cost of tracing for a real vLLM server: throughput at three loads, without traces and with each way to record it.

    SERVER_PYTHON=ENVIRONMENT/bin/python PYTHONPATH=tests python -m benchmarks.tracing_cost [--rounds 80]

A quarter of an hour on a machine where nothing else runs (`make bench-tracing`). Four servers of a small model with
random weights are started: without traces; with a span a request, as `--otlp-traces-endpoint` gives it; with the
iteration log besides; and with the plugin, which records every step and every event of a request. Clients send 1, 8 or
32 requests at once to one of them at a time, and wait for all, while the other servers are stopped (except the
plugin's own process, which sends spans); the receivers run on the same machine.

The speed of a virtual machine changes by a fifth within a second, wall and CPU time alike, which is more than any of
these costs. So each wave of requests is compared with those right before and after it at the server without traces
(their geometric mean): two waves in turn differ by a tenth, and the median of eighty rounds by one or two percent.
Prints the output tokens per second, the time that is added to that without traces, with the interval that holds 95 % of
the bootstrapped medians, and the same per step and per request.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from receive.process import Process
from vllm_server.real_server import CONFIG, Server, install_plugin

WAYS = ("no traces", "spans", "spans and iteration log", "plugin")
LOADS = (1, 8, 32)
PROMPT, OUTPUT = 64, 64
"""Tokens of a request. A wave takes some tenths of a second."""
DRAWS = 2_000
WARM_UP = 3
"""Rounds that are not counted."""
MODEL = {**CONFIG, "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 4}
OPTIONS = (
    "--dtype",
    "float32",
    "--max-model-len",
    "512",
    "--max-num-seqs",
    "32",
    "--no-enable-prefix-caching",
)


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
        self.server.signal(signal.SIGSTOP)

    def wave_s(self, requests: list[tuple[list[int], int]]) -> float:
        """Return how long requests take that are sent at once. The server runs only meanwhile: one that idles looks for
        work all the time."""
        self.server.signal(signal.SIGCONT)
        began = time.perf_counter()
        self.server.complete_all(requests, at_once=len(requests))
        took_s = time.perf_counter() - began
        self.server.signal(signal.SIGSTOP)
        return took_s

    def end(self) -> None:
        """End the server and its receiver."""
        self.server.kill()
        if self.receiver is not None:
            self.receiver.end()


def measured(rounds: int, folder: Path) -> dict[tuple[str, int], list[tuple[float, float]]]:
    """Return the seconds of each wave by way and load, one per round, beside those without traces around it; all
    servers run, and one at a time has requests."""
    draw = random.Random(1)
    found: defaultdict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    plugin = install_plugin(folder / "plugin")
    traced: dict[str, Traced] = {}
    try:
        for way in WAYS:
            traced[way] = Traced(way, folder / f"way-{WAYS.index(way)}", plugin)
        untraced = traced[WAYS[0]]
        for number in range(-WARM_UP, rounds):
            for load in LOADS:
                asked = [([draw.randrange(3, 500) for _ in range(PROMPT)], OUTPUT) for _ in range(load)]
                before = untraced.wave_s(asked)
                for way in draw.sample(WAYS[1:], len(WAYS) - 1):
                    here, after = traced[way].wave_s(asked), untraced.wave_s(asked)
                    if number >= 0:
                        found[way, load].append((here, float(np.sqrt(before * after))))
                    before = after
            if number % 10 == 9:
                print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    finally:
        for one in traced.values():
            one.end()
    return found


def between(values: np.ndarray, digits: int = 0) -> str:
    """Return the median with the interval of its bootstrapped values."""
    draws = np.random.default_rng(1).choice(values, (DRAWS, len(values)))
    low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
    return f"{np.median(values):+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"


def main() -> None:
    """Measure every way in turn, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=80)
    with tempfile.TemporaryDirectory() as scratch:
        found = measured(parser.parse_args().rounds, Path(scratch))
    head = ("way", "in flight", "tokens/s", "without", "share of the time %", "us per step", "us per request")
    print(f"| {' | '.join(head)} |\n| --- |{' ---: |' * (len(head) - 1)}")
    for (way, load), waves in sorted(found.items(), key=lambda item: (WAYS.index(item[0][0]), item[0][1])):
        here, without = np.array(waves).T
        share, usual_s = here / without - 1, float(np.median(without))
        speeds = [f"{load * OUTPUT / float(np.median(seconds)):.0f}" for seconds in (here, without)]
        # A wave has a step for each token of a request; all its requests share them.
        per_step, per_request = (1e6 * usual_s * share / steps for steps in (OUTPUT, load))
        cells = [*speeds, between(100 * share, 1), between(per_step), between(per_request)]
        print(f"| {way} | {load} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
