"""The cost of tracing for a real vLLM server at three loads, without traces and with each way to record it.

    SERVER_PYTHON=ENVIRONMENT/bin/python PYTHONPATH=tests python -m benchmarks.tracing_cost [--rounds 30]

Twenty minutes on a machine where nothing else runs (`make bench-tracing`). Four servers of a small model with random
weights are started: without traces; with a span a request, as `--otlp-traces-endpoint` gives it; with the iteration log
besides; and with the plugin, which records every step and every event of a request. Clients keep 1, 8 or 32 requests in
flight at one of them at a time, in turns of some seconds; the receivers run on the same machine.

Wall time of a virtual machine varies by more than any of these costs, CPU time by far less. So a turn measures both:
the CPU time of the engine's thread, which is what makes a step longer; that of all other threads of the server and its
processes, which is work for another core; and tokens per second. Each is compared with the turn of the same round and
load without traces. Prints medians over the rounds, with the interval that holds 95 % of their bootstrapped medians.
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
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from receive.process import Process
from vllm_server.real_server import CONFIG, Server

ROOT = Path(__file__).parents[2]
WAYS = ("no traces", "spans", "spans and iteration log", "plugin")
LOADS = (1, 8, 32)
BLOCK = {1: 6, 8: 32, 32: 96}
"""Requests of a turn: some seconds at each load."""
PROMPT, OUTPUT = 64, 96
DRAWS = 2_000
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


def plugin_in(folder: Path) -> Path:
    """Install the plugin into a folder, as pip does."""
    source = shutil.copytree(ROOT / "pipeline/tracefit-vllm", folder / "source")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--target", str(folder / "site"))
    subprocess.run([os.environ["SERVER_PYTHON"], "-m", "pip", "install", *options, str(source)], check=True)
    return folder / "site"


def parents() -> dict[int, int]:
    """Return the parent of every process."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in brackets, may hold anything.
            found[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except FileNotFoundError:
            continue  # it has ended
    return found


def threads_cpu_ns(process: int) -> dict[int, int]:
    """Return the CPU time of each thread of a process in nanoseconds."""
    return {
        int(thread.parent.name): int(thread.read_text().split()[0])
        for thread in Path(f"/proc/{process}/task").glob("*/schedstat")
    }


@dataclass(frozen=True, slots=True)
class Turn:
    """What a turn takes: seconds of wall time, CPU time of the engine's thread and of the rest of the server, in
    microseconds per step; steps are those of a closed loop, where each gives a token to every request in flight."""

    tokens_per_s: float
    engine_us: float
    rest_us: float


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
        above = parents()
        (self.engine,) = (
            process
            for process, parent in above.items()
            if parent == self.server.pid and b"EngineCore" in Path(f"/proc/{process}/cmdline").read_bytes()
        )

    def cpu_ns(self) -> tuple[int, int]:
        """Return the CPU time of the engine's thread, and that of all other threads of the server's processes."""
        above, processes = parents(), {self.server.pid}
        while more := {one for one, parent in above.items() if parent in processes} - processes:
            processes |= more
        threads = {thread: ns for one in processes for thread, ns in threads_cpu_ns(one).items()}
        engine = threads.pop(self.engine)
        return engine, sum(threads.values())

    def turn(self, load: int, requests: list[tuple[list[int], int]]) -> Turn:
        """Measure a closed loop."""
        began, before = time.perf_counter(), self.cpu_ns()
        done = self.server.complete_all(requests, at_once=load)
        took_s = time.perf_counter() - began
        engine, rest = (after - ns for after, ns in zip(self.cpu_ns(), before, strict=True))
        tokens = sum(one.output_tokens for one in done)
        step_ns = 1e3 * tokens / load
        return Turn(tokens / took_s, engine / step_ns, rest / step_ns)

    def end(self) -> None:
        """End the server and its receiver."""
        self.server.kill()
        if self.receiver is not None:
            self.receiver.end()


def measured(rounds: int, folder: Path) -> dict[tuple[str, int], list[Turn]]:
    """Return the turns of each way at each load, one per round; all servers run, and one at a time has requests."""
    draw = random.Random(1)
    found: defaultdict[tuple[str, int], list[Turn]] = defaultdict(list)
    plugin = plugin_in(folder / "plugin")
    traced: dict[str, Traced] = {}
    try:
        for way in WAYS:
            traced[way] = Traced(way, folder / f"way-{WAYS.index(way)}", plugin)
        for number in range(-1, rounds):
            for load in LOADS:
                asked = [([draw.randrange(3, 500) for _ in range(PROMPT)], OUTPUT) for _ in range(BLOCK[load])]
                # Each way has its turn within seconds, in another order each time: the machine's speed is that of all.
                for way in random.Random(100 * number + load).sample(WAYS, len(WAYS)):
                    turn = traced[way].turn(load, asked)
                    if number >= 0:  # before, a warm-up
                        found[way, load].append(turn)
            print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    finally:
        for one in traced.values():
            one.end()
    return found


def between(values: np.ndarray) -> str:
    """Return the median with the interval of its bootstrapped values."""
    draws = np.random.default_rng(1).choice(values, (DRAWS, len(values)))
    low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
    digits = 0 if abs(np.median(values)) >= 10 else 1
    return f"{np.median(values):+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"


def main() -> None:
    """Measure every way in turn, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    with tempfile.TemporaryDirectory() as scratch:
        found = measured(parser.parse_args().rounds, Path(scratch))
    print("Without traces:")
    print("| in flight | tokens/s | step ms | engine's thread us per step | rest of the server us per step |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for load in LOADS:
        turns = found[WAYS[0], load]
        tokens, engine, rest = (
            float(np.median([getattr(turn, name) for turn in turns]))
            for name in ("tokens_per_s", "engine_us", "rest_us")
        )
        print(f"| {load} | {tokens:.0f} | {1e3 * load / tokens:.1f} | {engine:.0f} | {rest:.0f} |")
    print("\nAdded:")
    head = (
        "way",
        "in flight",
        "engine us per step",
        "% of it",
        "rest us per step",
        "server us per request",
        "tokens/s %",
    )
    print(f"| {' | '.join(head)} |\n| --- |{' ---: |' * (len(head) - 1)}")
    for way in WAYS[1:]:
        for load in LOADS:
            here, without = (
                {
                    name: np.array([getattr(turn, name) for turn in found[one, load]])
                    for name in ("tokens_per_s", "engine_us", "rest_us")
                }
                for one in (way, WAYS[0])
            )
            engine = here["engine_us"] - without["engine_us"]
            rest = here["rest_us"] - without["rest_us"]
            share = 100 * engine / without["engine_us"]
            tokens = 100 * (here["tokens_per_s"] / without["tokens_per_s"] - 1)
            cells = [between(values) for values in (engine, share, rest, (engine + rest) * OUTPUT / load, tokens)]
            print(f"| {way} | {load} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
