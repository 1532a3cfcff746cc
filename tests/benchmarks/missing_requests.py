"""How surely requests without a span are noticed in the recording of an unmodified server, and what they cost where
they are not.

    python tests/benchmarks/missing_requests.py [RECORDING ...] [--seeds 10] [--requests 400]

Generated servers of four laws at a low, middle and full load, and RECORDING, folders with spans and a log with step
times, lose 10, 30 and 50 % of their requests at random. A row gives how many of the seeds are refused, and, for 10 %,
how far the median error of the step model on the true steps rises where it is fitted all the same. Returns 1 if a
complete recording is refused, if fewer than 95 % of the cases with 30 or 50 % removed are, or if the model of a
complete recording's spans errs more than 1.5 times as much on true steps as the one with the log.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

sys.path.insert(0, str(Path(__file__).parents[1]))

import tracefit
from stock import LAWS, stock_requests, write_stock
from tracefit.errors import TracefitError
from tracefit.models.frames import evaluated_steps
from tracefit.synth import LoadPhase, SynthOptions, synth, write_run
from tracefit.timeline import unknown_batches

if TYPE_CHECKING:
    from collections.abc import Iterator

BUDGET = 2_048
RATES = {"low": 1.0, "middle": 12.0, "full": 60.0}
REMOVED = (0.0, 0.1, 0.3, 0.5)
MOST_TIMES, LEAST_REFUSED = 1.5, 0.95
FAST = tracefit.TrainOptions(fast=True)


def error_pct(models: tracefit.Models | None, steps: pl.DataFrame) -> float:
    """Return the median error of the step model on true steps, which have a `true_us`; NaN without a model."""
    if models is None:
        return float("nan")
    found = evaluated_steps(models.deployment(), steps)
    return float((100 * (found["predicted_us"] / found["true_us"] - 1).abs()).median())


def fitted(requests: pl.DataFrame, folder: Path, config: Path | None) -> tracefit.Models | None:
    """Fit the requests' spans; null where they are refused."""
    shutil.rmtree(folder, ignore_errors=True)
    since = pl.col("arrival_ns") - pl.col("arrival_ns").min() + 1_000_000_000
    write_stock(requests.with_columns(arrival_ns=since), folder / "run")
    if config is not None:
        shutil.copy(config, folder / "run")
    try:
        tracefit.run([folder / "run"], folder / "out", options=FAST, workers=1)
        models = tracefit.load(folder / "out")
        models.model("beta.cycle_time")
    except TracefitError:
        return None
    return models


def steps_of(tables: Path) -> pl.DataFrame:
    """Return the steps of a timeline whose times are known, with `true_us`."""
    timeline = pl.read_parquet(tables / "timeline/**/*.parquet")
    known = timeline.filter(pl.col("cycle_us").is_not_null(), ~pl.col("idle_after"))
    return known.with_columns(true_us="cycle_us")


def kept(requests: pl.DataFrame, removed: float, seed: int) -> pl.DataFrame:
    """Return the requests without a random share."""
    return requests.filter(pl.Series(np.random.default_rng(seed).random(requests.height) >= removed))


def generated(
    folder: Path, seeds: int, count: int
) -> Iterator[tuple[str, int, pl.DataFrame, pl.DataFrame | None, Path | None]]:
    """Yield name, seed, requests and, of the first seed, the true steps of each generated server."""
    steady = (LoadPhase("steady", 1.0, 1.0),)
    for law in LAWS:
        for load, rate in RATES.items():
            for seed in range(seeds):
                options = SynthOptions(
                    name="run",
                    law=LAWS[law],
                    rate_per_s=rate,
                    requests=count,
                    seed=seed,
                    phases=steady,
                    abort_fraction=0.0,
                )
                run, steps = synth(options), None
                if not seed:
                    shutil.rmtree(folder, ignore_errors=True)
                    tracefit.ingest([write_run(run, folder)], folder / "tables")
                    steps = steps_of(folder / "tables")
                yield (
                    f"{law}, {load}",
                    seed,
                    stock_requests(run, seed=seed),
                    steps,
                    folder / "run/config.json",
                )


def recorded(recording: Path, folder: Path) -> tuple[pl.DataFrame, pl.DataFrame, tracefit.Models]:
    """Return the requests of a recording's spans, the steps of its log, and the models of both together."""
    tracefit.run([recording], folder / "both", options=FAST, workers=1)
    shutil.copytree(recording, folder / "spans", ignore=shutil.ignore_patterns("*.log*"))
    tracefit.ingest([folder / "spans"], folder / "tables")
    requests = pl.read_parquet(folder / "tables/requests/**/*.parquet")
    # Requests with steps were examined when they got them.
    requests = requests.with_columns(first_token_step=pl.lit(None, pl.Int64))
    return requests, steps_of(folder / "both/tables"), tracefit.load(folder / "both")


def main() -> int:
    """Measure all cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recordings", type=Path, nargs="*")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=400)
    asked = parser.parse_args()
    refused: dict[str, dict[float, list[bool]]] = {}
    costs: dict[str, str] = {}
    within = True

    def try_all(name: str, seeds: Iterator[int] | range, requests: pl.DataFrame) -> None:
        for removed in REMOVED:
            for seed in seeds if removed else (0,):
                reasons = unknown_batches(kept(requests, removed, 17 + seed), BUDGET)
                refused.setdefault(name, {}).setdefault(removed, []).append(bool(reasons.height))

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name, seed, requests, steps, config in generated(folder / "made", asked.seeds, asked.requests):
            try_all(name, range(seed, seed + 1), requests)
            if steps is not None:
                whole, less = (fitted(kept(requests, share, 17), folder / "fit", config) for share in (0.0, 0.1))
                costs[name] = f"{error_pct(whole, steps):.1f} | {error_pct(less, steps):.1f}"
        for recording in asked.recordings:
            requests, steps, both = recorded(recording, folder / recording.name)
            try_all(recording.name, range(asked.seeds), requests)
            config = next(iter(recording.rglob("config.json")), None)
            whole, less = (fitted(kept(requests, share, 17), folder / "fit", config) for share in (0.0, 0.1))
            alone, best = error_pct(whole, steps), error_pct(both, steps)
            within &= alone <= MOST_TIMES * best
            costs[recording.name] = f"{alone:.1f} ({best:.1f} with the log) | {error_pct(less, steps):.1f}"
    print(
        "server | complete | 10 % | 30 % | 50 % removed, refused | median error % on true steps, complete | with 10 "
        "% removed"
    )
    total = {removed: [0, 0] for removed in REMOVED}
    for name, by_share in refused.items():
        for removed, each in by_share.items():
            total[removed][0] += sum(each)
            total[removed][1] += len(each)
        print(f"{name} | {' | '.join(f'{sum(each)}/{len(each)}' for each in by_share.values())} | {costs[name]}")
    print(f"all | {' | '.join(f'{some}/{of}' for some, of in total.values())}")
    (false, _), *_ = total.values()
    caught, of = (sum(total[removed][n] for removed in REMOVED[2:]) for n in (0, 1))
    return int(false > 0 or caught < LEAST_REFUSED * of or not within)


if __name__ == "__main__":
    sys.exit(main())
