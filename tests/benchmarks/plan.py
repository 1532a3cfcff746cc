"""Errors of plans: runs generated at one rate, planned for 1.5 times it, and compared with a run of the same requests at that rate.

    python tests/benchmarks/plan.py [--factor 1.5] [--requests 3000]

Prints errors in percent per law, with a ! where the measured value is outside the plan's interval, and what of the bars does not hold.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import tracefit
from tracefit.commands.ingest import ingest
from tracefit.synth import LoadPhase, SynthOptions, synth, write_run
from tracefit.tables.store import TableStore

LAWS = (
    ("llama-8b", "H100", 1, 14.0, "linear"),
    ("llama-8b", "A100", 1, 8.0, "roofline"),
    ("llama-70b", "H100", 4, 8.0, "roofline"),
    ("qwen-moe-30b", "H100", 1, 10.0, "roofline"),
)
"""Model, GPU, tensor-parallel ranks, arrivals per second that are recorded, and step-time law."""
BARS = {"ttft": (8.0, None, 12.0), "itl": (4.0, 4.0, None), "e2e": (3.0, 3.0, None)}
"""Largest errors of P50, P90 and P99 in percent; null where none is asked."""
MOST_S = 10.0


def measure(law: tuple[str, str, int, float, str], factor: float, requests: int, folder: Path) -> list[str]:
    """Print the errors of a law, and return what does not hold."""
    model, gpu, tp, rate, name = law
    runs = {}
    for label, at in (("recorded", rate), ("truth", factor * rate)):
        options = SynthOptions(
            name=label,
            seed=2,
            law=name,  # type: ignore[arg-type]  # one of two names
            model=model,
            gpu=gpu,
            tp=tp,
            requests=requests,
            rate_per_s=at,
            phases=(LoadPhase("steady", 1.0, 1.0),),
            abort_fraction=0.0,
        )
        runs[label] = write_run(synth(options), folder / "runs")
    tracefit.run([runs["recorded"]], folder / "out", options=tracefit.TrainOptions(fast=True))
    ingest([runs["truth"]], folder / "tables")
    truth = TableStore(folder / "tables").read("requests")
    began = time.process_time()
    (plan,) = tracefit.plan(folder / "out", rate=factor * rate, servers=1).plans
    spent = time.process_time() - began
    where = f"{model} {gpu} {name}"
    if plan.at is None:
        return [f"{where}: {plan.reason}"]
    shown, failed = [], [f"{where}: {spent:.1f} s"] if spent > MOST_S else []
    for latency, bars in BARS.items():
        measured = np.percentile(truth[f"{latency}_us"].drop_nulls().to_numpy(), (50, 90, 99)) / 1e3
        for q, bar, value in zip((50, 90, 99), bars, measured, strict=True):
            found = plan.at.latency(f"{latency}_p{q}_ms")
            error = 100 * (found.value / value - 1)
            is_inside = found.low <= value <= (found.high or np.inf)
            shown.append(f"{latency}_p{q} {error:+.1f}{'' if is_inside else '!'}")
            if bar is not None and abs(error) > bar:
                failed.append(f"{where}: {latency}_p{q} {error:+.1f} %, asked {bar:g} %")
    sys.stdout.write(f"{where}: {', '.join(shown)}; {spent:.1f} s, outside {plan.at.outside_pct:.0f} %\n")
    sys.stdout.flush()
    return failed


def main() -> None:
    """Measure every law."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--factor", type=float, default=1.5)
    parser.add_argument("--requests", type=int, default=3000)
    given = parser.parse_args()
    failed = []
    for law in LAWS:
        with tempfile.TemporaryDirectory() as folder:
            failed += measure(law, given.factor, given.requests, Path(folder))
    sys.stdout.writelines(f"does not hold: {line}\n" for line in failed)


if __name__ == "__main__":
    main()
