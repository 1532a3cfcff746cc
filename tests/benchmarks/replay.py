"""Speed and errors of replays.

    python tests/benchmarks/replay.py [--models fixtures/models] [--tokens 1000000] [--rate 10] [--requests 7000]
    [--speed]

Speed: requests with a million tokens through the scheduler, with the models of a folder, on one core; prompts and
outputs are drawn evenly from 50 to 350 tokens. Prints seconds of the processor per deployment, and says where the limit
of two seconds for a million tokens does not hold. Errors: generated runs of four step-time laws under a steady load,
and under surges of 2 and 3 times in the held-out part; prints errors of the replay in percent, each with its standard
error, and what of the bars does not hold. The standard error is of the run itself: of 20 blocks of its held-out time,
drawn with replacement. Where 800 requests are held out (3,000 in all), that of TTFT P50 is 2 %. Folders of runs
(--runs) are trained on and replayed in place of all that.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import numpy as np
import polars as pl

import tracefit
from tracefit.coefficients.models import load
from tracefit.replay import closed_loop
from tracefit.replay.engine import EngineSettings
from tracefit.replay.models import FittedStepTimes
from tracefit.replay.run import RequestLoad, replay
from tracefit.synth import SynthOptions, surge_phases, synth, write_run

if TYPE_CHECKING:
    from tracefit.replay.engine import StepBatch
    from tracefit.results.replays import Replayed, RunReplay
    from tracefit.statistics import Vector

MOST_S_PER_MILLION = 2.0
LAWS = (
    ("llama-8b", "H100", 1, 16.0, "linear"),
    ("llama-8b", "A100", 1, 8.0, "roofline"),
    ("llama-70b", "H100", 4, 8.0, "roofline"),
    ("qwen-moe-30b", "H100", 1, 10.0, "roofline"),
)
"""Model, GPU, tensor-parallel ranks, arrivals per second of the steady load, and step-time law."""
LATENCIES = ("ttft", "itl", "e2e")
QUANTITIES = tuple(f"{name}_p{q}_us" for name in LATENCIES for q in (50, 90))
IN_LOAD = dict(zip(QUANTITIES, (5.0, 10.0, 3.0, 3.0, 3.0, 3.0), strict=True))
UNDER_SURGE = dict(zip(QUANTITIES, (25.0, 25.0, 8.0, 8.0, 8.0, 8.0), strict=True))
"""Largest errors in percent; those of a surge are allowed where the verdict on simulation says no."""
BLOCKS, DRAWS = 20, 200


def of_runs(folders: list[Path], settings: list[str]) -> None:
    """Train on each run, and print the errors of its replay in percent, and those with the speed of the held-out
    steps."""
    print(" | ".join(("run", *(n.removesuffix("_us") for n in QUANTITIES), "requests", "simulation")))
    server = tracefit.ServerOptions(settings={k: json.loads(v) for k, v in (one.split("=", 1) for one in settings)})
    for run in folders:
        with tempfile.TemporaryDirectory() as folder:
            tracefit.run([run], folder, server=server)
            for deployment in json.loads((Path(folder) / "evaluation.json").read_text())["deployments"]:
                answer = deployment["verdicts"]["simulation"]["answer"]
                for found in deployment["replays"]:
                    _print(run.name, found["quantities"], found["requests"], found["reason"] or answer)
                if bias := (deployment["summed_step_time"] or {}).get("bias_pct"):
                    for replayed in _at_speed(folder, 1 / (1 + bias / 100)):
                        quantities = [{"name": n, "error_pct": e} for n, e in replayed.errors.items()]
                        _print(
                            f"{run.name} at {1 / (1 + bias / 100):.2f} times",
                            quantities,
                            replayed.requests,
                            "",
                        )


def _at_speed(folder: str, factor: float) -> tuple[RunReplay, ...]:
    """Replay with step times as much longer as the held-out ones are: what is left is not the drift of the machine."""

    class Scaled(FittedStepTimes):
        def step(self, batch: StepBatch) -> float:
            return factor * super().step(batch)

        def decoding(self, batch: StepBatch, steps: int, growth: float) -> Vector:
            return factor * super().decoding(batch, steps, growth)

    with mock.patch.object(closed_loop, "FittedStepTimes", Scaled):
        return tracefit.replay_runs(folder).runs


def _print(name: str, quantities: list[dict[str, object]], requests: int, answer: str) -> None:
    wrong = {q["name"]: q["error_pct"] for q in quantities}
    numbers = (f"{wrong[n]:+.1f}" if n in wrong else "-" for n in QUANTITIES)
    print(" | ".join((name, *numbers, str(requests), answer)), flush=True)


class Compared:
    """Requests that the last replay compared, whose percentiles the program takes as usual."""

    def __init__(self) -> None:
        self.rows = pl.DataFrame()
        self._quantities = closed_loop._quantities

    def __call__(self, rows: pl.DataFrame, *others: pl.DataFrame) -> tuple[Replayed, ...]:
        self.rows = rows.sort("arrival")
        return self._quantities(rows, *others)

    def standard_errors(self) -> dict[str, float]:
        """Return the standard error of each error in percent."""
        blocks = np.array_split(np.arange(self.rows.height), BLOCKS)
        sides = closed_loop._latencies(self.rows)
        rng, found = np.random.default_rng(0), []
        for _ in range(DRAWS):
            drawn = np.concatenate([blocks[k] for k in rng.integers(0, BLOCKS, BLOCKS)])
            measured, replayed = (
                [np.nanpercentile(side[name][drawn], (50, 90)) for name in LATENCIES] for side in sides
            )
            found.append(100 * (np.ravel(replayed) / np.ravel(measured) - 1))
        return dict(zip(QUANTITIES, np.std(found, axis=0).tolist(), strict=True))


def errors(requests: int, seed: int) -> bool:
    """Replay generated runs, print their errors, and say whether all bars hold."""
    holds = True
    names = (f"{n.removesuffix('_us')} (standard error)" for n in QUANTITIES)
    print(" | ".join(("run", *names, "requests", "simulation")))
    compared = Compared()
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(closed_loop, "_quantities", compared):
        for surge in (1.0, 2.0, 3.0):
            for model, gpu, tp, rate, law in LAWS:
                options = SynthOptions(
                    name=f"{model}-{gpu.lower()}-{law}-x{surge:g}",
                    seed=seed,
                    law=law,
                    model=model,
                    gpu=gpu,
                    tp=tp,
                    rate_per_s=rate,
                    max_num_seqs=256,
                    num_blocks=40_000,
                    phases=surge_phases(surge),
                    requests=round(requests * (0.7 + 0.3 * surge)),
                )
                out = Path(folder) / options.name
                tracefit.run(
                    [write_run(synth(options), Path(folder), formats=("protobuf",), compress="zst")],
                    out,
                    options=tracefit.TrainOptions(fast=True),
                )
                deployment = json.loads((out / "evaluation.json").read_text())["deployments"][0]
                (found,), answer = deployment["replays"], deployment["verdicts"]["simulation"]["answer"]
                wrong = {q["name"]: q["error_pct"] for q in found["quantities"]}
                bars = IN_LOAD if surge == 1.0 else UNDER_SURGE
                missed = [n for n, most in bars.items() if abs(wrong.get(n, np.inf)) > most]
                is_good = not missed or (surge > 1.0 and answer == "no")
                holds &= is_good
                chance = compared.standard_errors()
                numbers = (
                    f"{wrong.get(n, np.nan):+.1f}{'!' if n in missed else ''} ({chance[n]:.1f})" for n in QUANTITIES
                )
                cells = (f"{'ok  ' if is_good else 'MISS'} {options.name}", *numbers)
                print(" | ".join((*cells, str(found["requests"]), answer)), flush=True)
    return holds


def main() -> int:
    """Replay with the models of every deployment, and generated runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, default=Path(__file__).parents[2] / "fixtures/models")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--rate", type=float, default=10.0)
    parser.add_argument("--requests", type=int, default=7_000, help="of a generated run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--speed", action="store_true", help="no generated runs")
    parser.add_argument("--runs", type=Path, nargs="+", help="folders of runs")
    parser.add_argument("--set", action="append", default=[], help="a setting of their servers, as of `tracefit run`")
    options = parser.parse_args()
    if options.runs:
        of_runs(options.runs, options.set)
        return 0
    rng = np.random.default_rng(0)
    prompt, output = (rng.integers(50, 350, options.tokens // 400) for _ in range(2))
    load_ = RequestLoad(np.cumsum(rng.exponential(1e6 / options.rate, len(prompt))), prompt, output)
    tokens = int(prompt.sum() + output.sum())
    slow = False
    models = load(options.models)
    for deployment_id in models.deployment_ids:
        deployment = models.deployment(deployment_id)
        limits = ("max_num_seqs", "max_num_batched_tokens", "block_size", "num_gpu_blocks")
        settings = EngineSettings(*(int(deployment.server[name] or 0) for name in limits))
        times = FittedStepTimes(deployment.step_model, deployment.server)
        start = time.process_time()
        found = replay(load_, times, settings)
        took = time.process_time() - start
        steps = sum(len(ends) for ends, _, _ in found.steps)
        limit = MOST_S_PER_MILLION * tokens / 1e6
        slow |= took > limit
        print(
            f"{'MISS' if took > limit else 'ok  '} {deployment_id}: {tokens:,} tokens in {took:.2f} s (at most "
            f"{limit:.2f}), {steps:,} steps, {found.preemptions:,} preemptions"
        )
    return int(slow | (not options.speed and not errors(options.requests, options.seed)))


if __name__ == "__main__":
    sys.exit(main())
