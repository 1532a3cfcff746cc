"""Requests as an unmodified server would describe them, made of generated runs whose every step is known."""

from __future__ import annotations

import json
import math

import numpy as np
import polars as pl

from tracefit.synth.laws import GPUS, MODELS, LinearLaw, RooflineLaw
from tracefit.tables import schema


class Sum(RooflineLaw):
    """Computing and reading one after the other."""

    def step_us(self, step):
        """Return the time of a step in us."""
        return self.compute_us(step) + self.memory_us(step) + self.base_us


class Padded(LinearLaw, frozen=True):
    """Decode batches padded to a power of two, 60 us a request."""

    def step_us(self, step):
        """Return the time of a step in us."""
        return super().step_us(step) + 60.0 * 2 ** max(step.num_decode_reqs - 1, 0).bit_length()


LAWS = {
    "linear": LinearLaw(),
    "sum": Sum(MODELS["llama-8b"], GPUS["H100"]),
    "max": RooflineLaw(MODELS["llama-8b"], GPUS["H100"]),
    "padded": Padded(),
}


def stock_requests(run, *, delay_us=60.0, seed=0, ahead=False) -> pl.DataFrame:
    """Return rows of the `requests` table: the times and lengths in a run's stock spans, and nothing of its steps.

    Outputs of one step have one stamp of the engine, when it ends, and one of the front end, `delay_us` later on
    average. `ahead` is an engine that schedules a step while the one before it executes.
    """
    rng = np.random.default_rng(seed)
    steps = run.truth_steps.select("server", "epoch", "step_id", out_ns="end_ns")
    steps = steps.with_columns(wall_ns=pl.col("out_ns") + rng.exponential(1e3 * delay_us, steps.height).astype(int))
    done = run.truth_requests.filter(
        pl.col("first_token_step").is_not_null() & pl.col("finished_step").is_not_null() & pl.col("abort_ns").is_null()
    )
    for name in ("first_token", "finished"):
        at = steps.rename({"step_id": f"{name}_step", "out_ns": f"{name}_out", "wall_ns": f"{name}_wall"})
        done = done.join(at, on=["server", "epoch", f"{name}_step"], how="left", maintain_order="left")

    if ahead:
        before = run.truth_steps.filter(pl.col("running") > 0).select(
            "server",
            "epoch",
            first_scheduled_step=pl.col("step_id") + 1,
            ahead_ns=pl.col("start_ns") + 100_000,
        )
        done = done.join(before, on=["server", "epoch", "first_scheduled_step"], how="left", maintain_order="left")
        done = done.with_columns(first_scheduled_ns=pl.coalesce("ahead_ns", "first_scheduled_ns"))
        done = done.with_columns(queued_ns=pl.min_horizontal("queued_ns", "first_scheduled_ns"))

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


_ATTRIBUTES = {
    "gen_ai.latency.time_in_queue": "queue_wait_us",
    "gen_ai.latency.time_in_model_prefill": "prefill_us",
    "gen_ai.latency.time_in_model_decode": "decode_us",
    "gen_ai.latency.time_to_first_token": "ttft_us",
    "gen_ai.latency.e2e": "e2e_us",
}


def span_of(row, number) -> dict:
    """Return the span of a row of `stock_requests`, as OTLP JSON."""
    seconds = {key: row[name] / 1e6 for key, name in _ATTRIBUTES.items()}
    counts = {
        "gen_ai.usage.prompt_tokens": row["prompt_tokens"],
        "gen_ai.usage.completion_tokens": row["output_tokens"],
        "gen_ai.request.max_tokens": row["max_tokens"],
    }
    start = row["arrival_ns"] + 1_700_000_000_000_000_000
    return {
        "traceId": row["trace_id"],
        "spanId": f"{number + 1:016x}",
        "name": "llm_request",
        "kind": 2,
        "startTimeUnixNano": str(start),
        "endTimeUnixNano": str(start + math.ceil(row["e2e_us"] * 1e3)),
        "attributes": [
            {"key": "gen_ai.request.id", "value": {"stringValue": row["request_id"]}},
            *({"key": k, "value": {"intValue": str(v)}} for k, v in counts.items()),
            *({"key": k, "value": {"doubleValue": v}} for k, v in seconds.items()),
        ],
    }


def write_settings(folder) -> None:
    """Make a run folder with the settings of the server."""
    folder.mkdir(parents=True)
    (folder / "exp-config.yaml").write_text("model: tiny\nmax_num_batched_tokens: 2048\nmax_num_seqs: 64\n")


def write_stock(requests, folder) -> None:
    """Write requests as the spans of an unmodified server, and its settings."""
    write_settings(folder)
    spans = [span_of(row, n) for n, row in enumerate(requests.sort("arrival_ns").iter_rows(named=True))]
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "vllm"}}]}
    scope = {"scope": {"name": "vllm.tracing.otel"}, "spans": spans}
    whole = {"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}
    (folder / "traces.json").write_text(json.dumps(whole))
