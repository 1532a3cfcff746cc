"""Cost of the timeline, the queue state and the training rows, on frames of the size of a long day.

    python tests/benchmarks/timeline.py [--steps 1000000] [--requests 100000] [--step-sampling 0.1]

Tables are drawn directly (no engine behind them): requests arrive evenly and run for as long as their outputs say;
some prompts are chunked, some requests are preempted and resumed. Prints seconds per stage and the peak memory.
"""

from __future__ import annotations

import argparse
import resource
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.features.sets import BUILT_IN
from tracefit.features.training import beta_rows, constants_of
from tracefit.server.context import read_context
from tracefit.server.settings import ServerSettings
from tracefit.tables import schema
from tracefit.timeline import EngineLimits, build_timeline, execution_lags, queue_state

if TYPE_CHECKING:
    from collections.abc import Iterator

CYCLE_NS = 9_000_000
BUDGET = 2048
ENGINE = {"run_id": "bench", "server": "engine", "epoch": 0}


def journeys(rng: np.random.Generator, starts: np.ndarray, requests: int) -> pl.DataFrame:
    """Draw the core events of all requests."""
    steps = len(starts)
    outputs = np.clip(rng.lognormal(np.log(120), 0.8, requests), 1, 1500).astype(np.int64)
    prompts = np.clip(rng.lognormal(np.log(400), 1.1, requests), 4, 8000).astype(np.int64)
    preempted = (rng.random(requests) < 0.03) & (outputs > 20)
    chunks = (prompts - 1) // BUDGET
    scheduled = np.sort(rng.integers(2, steps - 2000, requests))
    first = scheduled + chunks
    lost = first + outputs // 2  # preempted in this step, with half of the output done
    resumed = lost + 3
    finished = np.where(preempted, resumed, first) + outputs - 1 - np.where(preempted, outputs // 2, 0)
    done = {"QUEUED": 0, "SCHEDULED": 0, "FIRST_TOKEN": 1, "FINISHED": outputs}

    def events(name: str, step: np.ndarray, offset_us: float, rows: np.ndarray, **facts: object) -> pl.DataFrame:
        at = starts[np.minimum(step, steps - 1)] + int(offset_us * 1000)
        number = np.arange(requests)
        drawn = {
            "span_id": number,
            "ts_ns": at,
            "step_id": step,
            "prefill_total_tokens": prompts,
            "decode_done_tokens": np.broadcast_to(np.asarray(facts.pop("done", done.get(name))), requests),
            "decode_max_tokens": outputs + 100,
        }
        frame = pl.DataFrame({k: np.asarray(v)[rows] for k, v in drawn.items()})
        return frame.with_columns(event=pl.lit(name), **{k: pl.lit(v) for k, v in facts.items()})

    every = np.ones(requests, dtype=bool)
    last_us = CYCLE_NS / 1000 - 100
    parts = [
        events("QUEUED", scheduled - 1, last_us + 50, every),
        events("SCHEDULED", scheduled, 250, every, schedule_kind="FIRST"),
        events("FIRST_TOKEN", first, last_us, every),
        events("PREEMPTED", lost, 120, preempted, done=outputs // 2),
        events("SCHEDULED", resumed, 250, preempted, schedule_kind="RESUME", done=outputs // 2),
        events("FINISHED", finished, last_us, every, finish_status="length"),
    ]
    rows = pl.concat(parts, how="diagonal").with_columns(
        trace_id=pl.format("{}-trace", pl.col("span_id").cast(pl.String).str.zfill(32)),
        request_id=pl.format("cmpl-{}-0-00000000", "span_id"),
        span_id=pl.col("span_id").cast(pl.String).str.zfill(16),
        layer=pl.lit("core"),
        unix_ns=pl.col("ts_ns"),
    )
    return schema.JOURNEY_EVENTS.conform(rows.with_columns(**{k: pl.lit(v) for k, v in ENGINE.items()}))


def summaries(rng: np.random.Generator, starts: np.ndarray, sampling: float) -> pl.DataFrame:
    """Draw the summaries of the sampled steps; what they count does not matter to the cost."""
    steps = np.flatnonzero(rng.random(len(starts)) < sampling)
    frame = pl.DataFrame({"step_id": steps, "ts_start_ns": starts[steps], "unix_ns": starts[steps]})
    counts = {"running_depth": 20, "num_prefill_reqs": 1, "num_decode_reqs": 19, "prefill_tokens": 400}
    counts |= {"decode_tokens": 19, "waiting_depth": 0, "kv_blocks_total": 50_000, "kv_blocks_free": 30_000}
    counts |= {"duration_us": 400, "num_preempted": 0, "num_finished": 0, "scheduled_tokens": 419}
    return schema.STEPS.conform(frame.with_columns(**{k: pl.lit(v) for k, v in (counts | ENGINE).items()}))


@contextmanager
def stage(name: str, times: dict[str, float]) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    times[name] = time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--step-sampling", type=float, default=0.1)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    starts = np.cumsum(rng.normal(CYCLE_NS, 200_000, options.steps).astype(np.int64))
    events = journeys(rng, starts, options.requests)
    steps = summaries(rng, starts, options.step_sampling)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    constants = dict.fromkeys(constants_of(read_context([], None, ServerSettings())), 1.0)
    limits = EngineLimits(max_num_batched_tokens=BUDGET, max_num_seqs=256, num_blocks=50_000)
    times: dict[str, float] = {}
    with stage("timeline", times):
        timeline = build_timeline(steps, schema.REQUEST_SNAPSHOTS.empty(), events, limits, journeys_complete=True)
    with stage("lags", times):
        lags = {(run, server): lag for run, server, lag in execution_lags(timeline, events).iter_rows()}
    with stage("queue state", times):
        queue = queue_state(events, timeline, limits)
    with stage("training rows", times):
        rows = beta_rows(timeline, BUILT_IN["batch"], constants, lags, "clock")
    print(f"{timeline.height:,} steps, {queue.height:,} requests, {events.height:,} events, {rows.height:,} rows")
    for name, seconds in times.items():
        print(f"  {name:14s} {seconds:6.2f} s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"  {'all':14s} {sum(times.values()):6.2f} s   peak {peak / 2**20:.2f} GiB ({before / 2**20:.2f} before)")


if __name__ == "__main__":
    main()
