"""How well models hold beyond the load they were trained on: generated runs whose last 30 % carries a surge.

    python tests/benchmarks/models.py [--seeds 4] [--requests 400] [--quick]

Several models and GPUs by the roofline law, one by the linear law (noise of 2.4 % MAPE), surges of 1 to 3 times the
arrivals of training, steps traced at 1.0 and 0.1; a mixture of experts that drains to batches of one to three; QUEUED
stamped at the step start and at the arrival. Prints a table per kind of run with gradient boosting beside it, and what
of the bars does not hold.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

import tracefit
from tracefit.synth import SynthOptions, surge_phases, synth, write_run

if TYPE_CHECKING:
    from tracefit.synth.options import LawName

SERVERS: tuple[tuple[str, str, int, float, LawName], ...] = (
    ("llama-8b", "H100", 1, 16.0, "roofline"),
    ("llama-8b", "A100", 1, 8.0, "roofline"),
    ("llama-70b", "H100", 4, 8.0, "roofline"),
    ("qwen-moe-30b", "H100", 1, 10.0, "roofline"),
    ("llama-8b", "H100", 1, 16.0, "linear"),
)
"""Model, GPU, tensor-parallel ranks, arrivals per second of the steady load, and step-time law."""

SURGES = (1.0, 2.0, 3.0)
SPARSE_FACTOR = 4
"""Runs whose steps are traced at 0.1 are so many times as long."""

DRAIN = 0.05
"""Arrivals of a drain, as a share of the steady ones."""

MEAN_MAPE = {1.0: 3.0, 2.0: 3.5, 3.0: 4.0}
WORST_MAPE, MEAN_BIAS, WORST_BIAS = 6.0, 2.0, 4.0
DECODE_MAPE, PREFILL_MAPE, TAIL_MAPE, ADMISSION_FACTOR = 3.0, 8.0, 8.0, 1.2
TAIL_REQUESTS = 3


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of one run; errors in percent, null where a model is missing."""

    name: str
    surge: float
    sampling: float
    rows: int
    equations: int
    step: float
    boosted: float | None
    bias: float
    decode: float | None
    prefill: float | None
    features: str
    tail: float | None
    admission: float
    admission_reference: float
    admission_form: str


def measure(options: SynthOptions, surge: float, folder: Path) -> Measured:
    """Generate a run, train on it, and read its evaluation."""
    out = folder / options.name
    run = synth(options)
    tracefit.run([write_run(run, folder, formats=("protobuf",), compress="zst")], out)
    evaluation = json.loads((out / "evaluation.json").read_text())["deployments"][0]
    models = {
        m["name"]: m
        for kind in ("alpha", "beta")
        for m in json.loads((out / "models" / f"{kind}.json").read_text())["models"]
    }
    steps, admission = evaluation["models"]["beta.cycle_time"], evaluation["models"]["alpha.admission"]
    latency = evaluation["latency"]
    equations = steps["held_out_equations"]
    return Measured(
        name=options.name,
        surge=surge,
        sampling=options.step_sampling,
        rows=steps["holdout"]["n"],
        equations=sum(equations["rows_by_source"].values()) if equations else steps["holdout"]["n"],
        step=steps["holdout"]["mape_pct"],
        boosted=(steps["gradient_boosting"] or {}).get("mape_pct"),
        bias=evaluation["summed_step_time"]["bias_pct"],
        decode=latency["itl"]["given_measured_state"]["mape_pct"] if latency else None,
        prefill=latency["prefill"]["given_measured_state"]["mape_pct"] if latency else None,
        features=models["beta.cycle_time"]["feature_set"],
        tail=_tail(out, models["beta.cycle_time"]),
        admission=admission["holdout"]["mae"],
        admission_reference=admission["gradient_boosting"]["mae"],
        admission_form=models["alpha.admission"]["form"],
    )


def _tail(out: Path, model: dict[str, object]) -> float | None:
    """MAPE on held-out single steps of one to three requests; null where there are fewer than ten."""
    rows = pl.read_parquet(out / "tables" / "beta_training" / "**" / "*.parquet")
    batches = pl.read_parquet(out / "tables" / "timeline" / "**" / "*.parquet").select(
        "step_id", batch=pl.col("num_prefill_reqs") + pl.col("num_decode_reqs")
    )
    predicted = pl.lit(model["intercept"]["value"])
    for term in model["terms"]:
        predicted = predicted + term["value"] * pl.col(term["feature"])
    small = rows.join(batches, on="step_id").filter(
        (pl.col("split") == "holdout")
        & pl.col("excluded_reason").is_null()
        & (pl.col("source") != "interval")
        & pl.col("batch").is_between(1, TAIL_REQUESTS)
    )
    if small.height < 10:
        return None
    return 100 * small.select(((predicted - pl.col("y")).abs() / pl.col("y")).mean()).item()


def runs(seeds: int, requests: int, *, quick: bool) -> list[tuple[str, float, SynthOptions]]:
    """Return what to run: kind, surge and options."""
    found = []
    for model, gpu, tp, rate, law in SERVERS[:1] if quick else SERVERS:
        base = SynthOptions(law=law, model=model, gpu=gpu, tp=tp, rate_per_s=rate, max_num_seqs=256, num_blocks=40_000)
        named = f"{model}-{gpu.lower()}-tp{tp}{'-linear' if law == 'linear' else ''}"
        for sampling in (1.0, 0.1):
            for surge in SURGES:
                for seed in range(seeds):
                    longer = 1 if sampling == 1.0 else SPARSE_FACTOR
                    options = replace(
                        base,
                        name=f"{named}-x{surge:g}-p{sampling:g}-s{seed}".replace(".", "_"),
                        seed=seed,
                        step_sampling=sampling,
                        phases=surge_phases(surge),
                        requests=round(requests * longer * (0.7 + 0.3 * surge)),
                    )
                    found.append((f"surge, {law} law", surge, options))
        if model.startswith("qwen"):
            for seed in range(seeds):
                options = replace(
                    base,
                    name=f"{named}-drain-s{seed}",
                    seed=seed,
                    phases=surge_phases(DRAIN),
                    requests=2 * requests,
                )
                found.append(("drain", DRAIN, options))
        if gpu == "A100" or quick:
            for stamp in ("step_start", "arrival"):
                for seed in range(seeds):
                    options = replace(
                        base,
                        name=f"{named}-{stamp}-s{seed}",
                        seed=seed,
                        queued_stamp=stamp,
                        requests=requests,
                    )
                    found.append((f"QUEUED at {stamp}", 1.0, options))
    return found


def report(kind: str, measured: list[Measured]) -> None:
    """Print the table of one kind of runs."""
    print(f"\n## {kind}\n")
    head = (
        "run", "rows", "equations", "step MAPE", "boosting", "summed bias", "ITL", "prefill", "tail", "admission MAE",
        "its reference", "form", "features",
    )  # fmt: skip
    print(" | ".join(head))
    print(" | ".join("---" for _ in head))
    for one in measured:
        numbers = (one.step, one.boosted, one.bias, one.decode, one.prefill, one.tail)
        cells = (one.name, str(one.rows), str(one.equations), *(_text(n) for n in numbers))
        waits = (f"{one.admission:.0f}", f"{one.admission_reference:.0f}", one.admission_form)
        print(" | ".join((*cells, *waits, one.features)))


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else float("nan")


def check(measured: list[tuple[str, Measured]]) -> list[str]:
    """Return every bar with what was measured."""
    lines = []

    def bar(text: str, value: float, limit: float) -> None:
        lines.append(f"{'ok  ' if value <= limit else 'MISS'} {text}: {value:.2f} (at most {limit:g})")

    for sampling in (1.0, 0.1):
        for surge in SURGES:
            mine = [m for k, m in measured if k.startswith("surge") and m.surge == surge and m.sampling == sampling]
            if not mine:
                continue
            where = f"surge {surge:g}, steps at {sampling:g}, {len(mine)} runs"
            bar(f"{where}, mean step MAPE", _mean([m.step for m in mine]), MEAN_MAPE[surge])
            bar(f"{where}, worst step MAPE", max(m.step for m in mine), WORST_MAPE)
            bar(f"{where}, mean summed bias", abs(_mean([m.bias for m in mine])), MEAN_BIAS)
            bar(f"{where}, worst summed bias", max(abs(m.bias) for m in mine), WORST_BIAS)
            bar(
                f"{where}, mean ITL MAPE",
                _mean([m.decode for m in mine if m.decode is not None]),
                DECODE_MAPE,
            )
            bar(
                f"{where}, mean prefill MAPE",
                _mean([m.prefill for m in mine if m.prefill is not None]),
                PREFILL_MAPE,
            )
            boosted = _mean([m.boosted for m in mine if m.boosted is not None])
            lines.append(f"     {where}, gradient boosting: {boosted:.2f}")
    drained = [m for k, m in measured if k == "drain" and m.tail is not None]
    if drained:
        bar(
            f"drain of a mixture of experts, {len(drained)} runs, worst tail MAPE",
            max(m.tail for m in drained),
            TAIL_MAPE,
        )
    for stamp in ("step_start", "arrival"):
        # Every other kind of run stamps QUEUED at the step start too.
        mine = [m for k, m in measured if (k == "QUEUED at arrival") is (stamp == "arrival")]
        if mine:
            worst = max(m.admission / m.admission_reference for m in mine)
            bar(
                f"admission, QUEUED at {stamp}, {len(mine)} runs, worst MAE by reference's",
                worst,
                ADMISSION_FACTOR,
            )
    return lines


def main() -> None:
    """Run everything and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--quick", action="store_true", help="one server only")
    given = parser.parse_args()
    measured: list[tuple[str, Measured]] = []
    with tempfile.TemporaryDirectory() as folder:
        for kind, surge, options in runs(given.seeds, given.requests, quick=given.quick):
            one = measure(options, surge, Path(folder))
            measured.append((kind, one))
            print(f"{one.name}: {one.step:.2f} %", file=sys.stderr, flush=True)
            shutil.rmtree(Path(folder) / options.name)
    for kind in dict.fromkeys(k for k, _ in measured):
        report(kind, [m for k, m in measured if k == kind])
    print("\n## Bars\n")
    print("\n".join(check(measured)))


if __name__ == "__main__":
    main()
