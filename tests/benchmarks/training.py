"""Cost of training, references and intervals included, on tables of the size of a long day.

    python tests/benchmarks/training.py [--steps 1000000] [--requests 100000] [--fast]
    python tests/benchmarks/training.py --runs 10000                                     # many small runs of one
    deployment

Tables are drawn directly: every step is traced, its time follows from its batch. Many runs are copies of one of sixty
requests, ten minutes apart. Prints seconds, CPU seconds and the peak memory of `tracefit train`, which runs in a
process of its own.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import polars as pl

import tracefit
from timeline import ENGINE, journeys
from tracefit.engines.training import timeline_in
from tracefit.synth import SynthOptions, synth, write_run
from tracefit.tables import schema
from tracefit.tables.store import TableStore


def step_frame(rng: np.random.Generator, steps: int) -> pl.DataFrame:
    """Draw summaries of all steps: 7,000 us and 26 per prefill token, 15 per decode, with noise and hiccups."""
    prefill = np.where(rng.random(steps) < 0.3, rng.integers(1, 2048, steps), 0)
    decode = rng.integers(1, 60, steps)
    cycle = (7000 + 26 * prefill + 15 * decode) * np.exp(rng.normal(0, 0.03, steps))
    cycle += np.where(rng.random(steps) < 0.01, rng.exponential(50_000, steps), 0)
    start = np.concatenate([[0], np.cumsum(cycle[:-1] * 1000)]).astype(np.int64) + 10**12
    free = rng.integers(1000, 40_000, steps)
    columns = {
        "step_id": np.arange(1, steps + 1),
        "ts_start_ns": start,
        "unix_ns": start,
        "duration_us": rng.integers(300, 700, steps),
        "num_prefill_reqs": (prefill > 0).astype(int),
        "num_decode_reqs": decode,
        "prefill_tokens": prefill,
        "decode_tokens": decode,
        "scheduled_tokens": prefill + decode,
        "running_depth": decode + (prefill > 0),
        "waiting_depth": rng.integers(0, 3, steps),
        "kv_blocks_free": free,
        "kv_blocks_total": np.full(steps, 50_000),
        "kv_usage_ratio": 1 - free / 50_000,
    }
    facts = {"num_finished": 0, "num_preempted": 0, **ENGINE}
    return schema.STEPS.conform(pl.DataFrame(columns).with_columns(**{k: pl.lit(v) for k, v in facts.items()}))


def request_frame(rng: np.random.Generator, events: pl.DataFrame) -> pl.DataFrame:
    """Make the requests of core events, with arrivals and departures drawn about them."""
    first = events.filter(pl.col("schedule_kind").is_null() | (pl.col("schedule_kind") == "FIRST"))
    times = first.pivot("event", index="request_id", values="ts_ns", aggregate_function="first")
    ids = first.pivot("event", index="request_id", values="step_id", aggregate_function="first")
    facts = events.group_by("request_id").agg(
        pl.col("trace_id").first(),
        prompt_tokens=pl.col("prefill_total_tokens").first(),
        output_tokens=pl.col("decode_done_tokens").max(),
        max_tokens=pl.col("decode_max_tokens").first(),
    )
    joined = times.join(ids, on="request_id", suffix="_step").join(facts, on="request_id")
    work = pl.Series(rng.normal(1400, 60, joined.height) * 1000).cast(pl.Int64)
    after = pl.Series(rng.normal(3000, 300, joined.height) * 1000).cast(pl.Int64)
    rows = joined.select(
        "trace_id",
        "request_id",
        "prompt_tokens",
        "output_tokens",
        "max_tokens",
        core_request_id="request_id",
        arrival_ns=pl.col("QUEUED") - work,
        queued_ns="QUEUED",
        first_scheduled_ns="SCHEDULED",
        first_token_ns="FIRST_TOKEN",  # noqa: S106
        finished_ns="FINISHED",
        departed_ns=pl.col("FINISHED") + after,
        queued_step="QUEUED_step",
        first_scheduled_step="SCHEDULED_step",
        first_token_step="FIRST_TOKEN_step",  # noqa: S106
        finished_step="FINISHED_step",
        num_preemptions=pl.lit(0),
        finish_status=pl.lit("length"),
        queue_wait_us=(pl.col("SCHEDULED") - pl.col("QUEUED")) / 1e3,
        admission_us=work / 1e3,
        departure_us=after / 1e3,
    )
    return schema.REQUESTS.conform(rows.with_columns(**{k: pl.lit(v) for k, v in ENGINE.items()}))


def draw(tables: Path, runs: Path, steps: int, requests: int) -> None:
    """Write the tables of one run of so many steps and requests."""
    rng = np.random.default_rng(0)
    name = str(ENGINE["run_id"])
    tracefit.ingest([write_run(synth(SynthOptions(name=name, requests=20)), runs)], tables)
    sampled = step_frame(rng, steps)
    events = journeys(rng, sampled["ts_start_ns"].to_numpy(), requests)
    store = TableStore(tables)
    frames = {
        "runs": store.read("runs").with_columns(server=pl.lit(ENGINE["server"])),
        "steps": sampled,
        "journey_events": events,
        "requests": request_frame(rng, events),
    }
    store.write_runs([(name, {**frames, "timeline": schema.TABLES["timeline"].empty()})])
    store.write_runs([(name, timeline_in(store, name))])


def copy(tables: Path, runs: Path, count: int) -> None:
    """Write the tables of so many runs of one deployment."""
    one = TableStore(runs / "tables")
    tracefit.ingest([write_run(synth(SynthOptions(name="run", requests=60)), runs)], one.root)
    frames = {name: one.scan(name).collect() for name in one.manifest().runs["run"].tables}
    shifted = {name: [c for c in frame.columns if c.endswith("unix_ns")] for name, frame in frames.items()}
    os.fsync = lambda _: None  # a crash would lose nothing that anybody wants
    for first in range(0, count, 1_000):
        TableStore(tables).write_runs(
            (
                f"run-{number:05d}",
                {
                    name: frame.with_columns(
                        *(pl.col(c) + number * 600 * 10**9 for c in shifted[name]),
                        run_id=pl.lit(f"run-{number:05d}"),
                    )
                    for name, frame in frames.items()
                },
            )
            for number in range(first, min(first + 1_000, count))
        )


def measure(tables: Path, out: Path, *, fast: bool) -> None:
    """Train on tables and print what it cost this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = tracefit.train(tables, out, options=tracefit.TrainOptions(fast=fast))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    for model in result.fitted:
        print(f"  {model.name:18s} {model.rows_used:9,} rows, MAPE {model.holdout_mape_pct:.3g} %")
    peak, of_worker = (
        resource.getrusage(who).ru_maxrss / 2**20 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    print(f"training {wall:.1f} s, CPU {cpu:.1f} s, peak {peak:.2f} GiB, of a worker at most {of_worker:.2f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=1, help="so many small runs in place of a long one")
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--tables", type=Path, help="train on these instead of drawing some")
    options = parser.parse_args()
    if options.tables:
        measure(options.tables, options.tables.parent / "models", fast=options.fast)
        return
    with tempfile.TemporaryDirectory() as root:
        tables = Path(root) / "tables"
        if options.runs > 1:
            copy(tables, Path(root) / "runs", options.runs)
        else:
            draw(tables, Path(root) / "runs", options.steps, options.requests)
        # A process of its own: the peak is that of training, not of drawing.
        mine = [sys.executable, __file__, "--tables", str(tables), *["--fast"] * options.fast]
        subprocess.run(mine, check=True)


if __name__ == "__main__":
    main()
