"""Requests as an unmodified server would describe them, made of generated runs whose every step is known."""

from __future__ import annotations

import numpy as np
import polars as pl

from tracefit.tables import schema


def stock_requests(run, *, delay_us=60.0, seed=0) -> pl.DataFrame:
    """Return rows of the `requests` table: the times and lengths in a run's stock spans, and nothing of its steps.

    Outputs of one step have one stamp of the engine, when it ends, and one of the front end, `delay_us` later on average.
    """
    rng = np.random.default_rng(seed)
    steps = run.truth_steps.select("server", "epoch", "step_id", out_ns="end_ns")
    steps = steps.with_columns(
        wall_ns=pl.col("out_ns") + rng.exponential(1e3 * delay_us, steps.height).astype(int)
    )
    done = run.truth_requests.filter(
        pl.col("first_token_step").is_not_null()
        & pl.col("finished_step").is_not_null()
        & pl.col("abort_ns").is_null()
    )
    for name in ("first_token", "finished"):
        at = steps.rename({"step_id": f"{name}_step", "out_ns": f"{name}_out", "wall_ns": f"{name}_wall"})
        done = done.join(at, on=["server", "epoch", f"{name}_step"], how="left", maintain_order="left")

    def us(end, begin):
        return (pl.col(end) - pl.col(begin)) / 1e3

    def seconds(end):
        # The front end subtracts times since 1970 in seconds, as floats: 240 ns are lost.
        return ((pl.col(end) / 1e9 + 1.7e9) - (pl.col("arrival_ns") / 1e9 + 1.7e9)) * 1e6

    ids = [rng.bytes(16).hex() for _ in range(done.height)]
    rows = done.select(
        "request_id",
        "prompt_tokens",
        "output_tokens",
        "max_tokens",
        "arrival_ns",
        run_id=pl.lit("run"),
        server=pl.lit("server"),
        epoch=pl.lit(0, pl.Int64),
        dialect=pl.lit("stock"),
        trace_id=pl.Series(ids, dtype=pl.String),
        queue_wait_us=us("first_scheduled_ns", "queued_ns"),
        prefill_us=us("first_token_out", "first_scheduled_ns"),
        decode_us=us("finished_out", "first_token_out"),
        ttft_us=seconds("first_token_wall"),
        e2e_us=seconds("finished_wall"),
    )
    return schema.REQUESTS.shape(rows)
