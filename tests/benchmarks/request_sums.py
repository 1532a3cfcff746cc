"""Errors of two models of step times: one from an unmodified server's spans, which show only sums, and one from true
steps.

    python tests/benchmarks/request_sums.py [DATA] [--seeds 1] [--requests 500]

Generated runs follow four laws, under load and with a surge of 2. Over the true steps of the last 30 %, the mean error
of the model from spans is compared with that of the model from full traces of the same run (bound: 1.3 times as much
plus a point). DATA is a folder of real runs with `scheduler_truth.jsonl.gz`. The median error over their true steps,
and the times of eight reference batches, are compared with those of the same feature set, fitted by tracefit itself on
the true steps of the first 70 % (bounds: 1.15 times, 1.5 with prefix-cache hits; 12 %). Returns 1 if a bound does not
hold.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

sys.path.insert(0, str(Path(__file__).parents[1]))

import tracefit
from stock import LAWS
from tracefit.models.frames import evaluated_steps
from tracefit.synth import SynthOptions, surge_phases, synth, write_run

if TYPE_CHECKING:
    from collections.abc import Iterator

TRAIN_SHARE = 0.7
FACTOR, POINTS = 1.3, 1.0
REAL = {"stock-vllm-0.32-cpu": 1.15, "stock-vllm-0.32-cpu-overload": 1.5}
"""Runs of DATA, and how many times the error of the true steps' model is allowed."""

BATCHES = [(n, context, 0) for n in (1, 4, 12) for context in (200, 400)] + [(8, 200, 256), (8, 400, 256)]
"""Decoding requests, tokens of context of each, and prompt tokens."""

MOST_OFF_PCT = 12.0


def _fitted(run: Path, out: Path, features: str = "auto") -> tracefit.Models:
    tracefit.run([run], out, options=tracefit.TrainOptions(fast=True, features=features), workers=1)
    return tracefit.load(out)


def _errors(models: tracefit.Models, steps: pl.DataFrame) -> pl.Series:
    """Return the errors of true steps, in percent; `steps` have the columns of a timeline and true_us."""
    found = evaluated_steps(models.deployment(), steps)
    return 100 * (found["predicted_us"] - found["true_us"]).abs() / found["true_us"]


def generated(law: str, surge: float, seed: int, requests: int, folder: Path) -> bool:
    """Print the errors of a generated run; return whether they are within the bound."""
    models = {}
    for form in ("instrumented", "stock"):
        options = SynthOptions(
            name=f"{law}-{surge:g}-{seed}-{form}",
            form=form,
            law=LAWS[law],
            seed=seed,
            rate_per_s=16.0,
            requests=round(requests * (TRAIN_SHARE + (1 - TRAIN_SHARE) * surge)),
            phases=surge_phases(surge),
            max_num_seqs=256,
            num_blocks=40_000,
        )
        run = synth(options)
        models[form] = _fitted(write_run(run, folder, formats=("protobuf",)), folder / f"{form}-out")
    truth = run.truth_steps.filter(pl.col("running") > 0)
    began, ended = truth["start_ns"].min(), truth["end_ns"].max()
    late = truth.filter(pl.col("start_ns") > began + TRAIN_SHARE * (ended - began))
    # Steps were traced all: the timeline of the full traces has their true batches.
    timeline = pl.read_parquet(folder / "instrumented-out/tables/timeline/**/*.parquet")
    steps = timeline.filter(~pl.col("idle_after")).join(late.select("step_id", true_us="cycle_us"), on="step_id")
    full, spans = (float(_errors(models[form], steps).mean()) for form in ("instrumented", "stock"))
    holds = spans <= FACTOR * full + POINTS
    chosen = " | ".join(models[form].model("beta.cycle_time").feature_set for form in ("instrumented", "stock"))
    print(
        f"{law} | {surge:g} | {seed} | {steps.height} | {full:.2f} | {spans:.2f} | {FACTOR * full + POINTS:.2f} | "
        f"{'yes' if holds else 'NO'} | {chosen}",
        flush=True,
    )
    return holds


def _true_steps(run: Path) -> Iterator[dict[str, float]]:
    """Yield the steps that a recording scheduler saw: the batch, and the time from the outputs before to its own."""
    with gzip.open(run / "scheduler_truth.jsonl.gz", "rt") as file:
        lines = [json.loads(line) for line in file]
    # Outputs come in the order of the steps that compute something.
    steps = [line for line in lines if line["e"] == "step" and line["req"]]
    outputs = [line for line in lines if line["e"] == "out" and line["n"]]
    before_ns = running = 0
    for step, output in zip(steps, outputs, strict=True):
        prefills = [(at - n, n) for _, at, prompt, n in step["req"] if at - n < prompt]
        decodes = [at - n for _, at, prompt, n in step["req"] if at - n >= prompt]
        began_ns = before_ns if running else step["t"] + step["dt"]
        yield {
            "began_ns": began_ns,
            "ended_ns": output["t"],
            "true_us": (output["t"] - began_ns) / 1e3,
            "was_idle": running == 0,
            "num_prefill_reqs": len(prefills),
            "prefill_tokens": sum(n for _, n in prefills),
            "prefill_context_tokens": sum(at for at, _ in prefills),
            "num_decode_reqs": len(decodes),
            "decode_tokens": len(decodes),
            "context_tokens": sum(decodes),
            "running_depth": step["run"],
            "waiting_depth": step["wait"],
        }
        before_ns, running = output["t"], len(step["req"]) - len(output["fin"])


def _recorded(steps: pl.DataFrame) -> Iterator[str]:
    """Yield the steps as ForwardPassMetrics, which tracefit fits as they are."""
    without = dict.fromkeys(
        ("num_prefill_requests", "sum_prefill_tokens", "num_decode_requests", "sum_decode_kv_tokens"), 0
    ) | dict.fromkeys(("var_prefill_length", "var_decode_kv_tokens"), 0.0)
    for number, step in enumerate(steps.iter_rows(named=True)):
        metrics = {
            "version": 1,
            "worker_id": "w",
            "dp_rank": 0,
            "counter_id": number,
            "wall_time": step["true_us"] / 1e6,
            "scheduled_requests": {
                **without,
                "num_prefill_requests": step["num_prefill_reqs"],
                "sum_prefill_tokens": step["prefill_tokens"],
                "sum_prefill_kv_tokens": step["prefill_context_tokens"],
                "num_decode_requests": step["num_decode_reqs"],
                "sum_decode_kv_tokens": step["context_tokens"],
            },
            "queued_requests": {**without, "num_prefill_requests": step["waiting_depth"]},
        }
        at_ns = 1_700_000_000_000_000_000 + step["ended_ns"]
        yield json.dumps({"received_at_ns": at_ns, "metrics": metrics}) + "\n"


def real(data: Path, name: str, folder: Path) -> bool:
    """Print the errors of a real run; return whether they are within the bounds."""
    steps = pl.DataFrame(list(_true_steps(data / name)))
    for kind in ("spans", "true"):
        (folder / kind).mkdir()
        for facts in ("config.json", "run.yaml"):
            shutil.copy(data / name / facts, folder / kind)
    shutil.copytree(data / name / "otlp", folder / "spans/otlp")
    (folder / "true/fpm.jsonl").write_text("".join(_recorded(steps)))
    spans = _fitted(folder / "spans", folder / "spans-out")
    chosen = spans.model("beta.cycle_time").feature_set
    true = _fitted(folder / "true", folder / "true-out", chosen)
    began, ended = steps["began_ns"].min(), steps["ended_ns"].max()
    late = steps.filter(pl.col("began_ns") >= began + TRAIN_SHARE * (ended - began), ~pl.col("was_idle"))
    ours, theirs = (float(_errors(models, late).median()) for models in (spans, true))
    off = []
    for batch, context, prefill in BATCHES:
        us = [m.predict_step(batch=batch, context=context, prefill=prefill).step.value_us for m in (spans, true)]
        off.append(100 * (us[0] / us[1] - 1))
    print(
        f"{name}: {chosen}, {late.height} true steps: median error {ours:.2f} beside {theirs:.2f} % "
        f"({ours / theirs:.2f} times, at most {REAL[name]}); reference batches {min(off):+.1f} to {max(off):+.1f} % "
        f"(at most {MOST_OFF_PCT:g})"
    )
    return ours <= REAL[name] * theirs and max(map(abs, off)) <= MOST_OFF_PCT


def main() -> int:
    """Measure all runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--requests", type=int, default=500)
    options = parser.parse_args()
    held = []
    print("law | surge | seed | true steps | full traces | spans | bound | holds | features of each")
    for law in LAWS:
        for surge in (1.0, 2.0):
            for seed in range(1, 1 + options.seeds):
                with tempfile.TemporaryDirectory() as folder:
                    held.append(generated(law, surge, seed, options.requests, Path(folder)))
    for name in REAL if options.data else ():
        with tempfile.TemporaryDirectory() as folder:
            held.append(real(options.data, name, Path(folder)))
    return int(not all(held))


if __name__ == "__main__":
    sys.exit(main())
