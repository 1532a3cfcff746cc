"""Export to llm-d-latency-predictor: measured requests as rows of its training server, for a start that is not cold.

Read in `training/training_server.py` of August 2026: `POST /add_training_data_bulk` takes `{"entries": [TrainingEntry,
…]}`. A row has the state of the server when the request came, its lengths, and its TTFT and time per output token.
"""

from __future__ import annotations

import json

import polars as pl

from tracefit.consumers.base import OUT, Export, Source
from tracefit.errors import DataError
from tracefit.server.settings import ALL_SPANS
from tracefit.tables.schema import ENGINE

MOST_PREDICTOR_ROWS = 20_000
"""The latest requests."""


def to_latency_predictor(source: Source) -> Export:
    """Write the rows.

    Raises:
        DataError: No request has its latencies and the step that it was queued at.
    """
    steps = source.tables.timeline.select(
        *ENGINE, "kv_usage_ratio", "waiting_depth", "running_depth", queued_step="step_id"
    )
    needed = ["ttft_us", "itl_us", "prompt_tokens", "output_tokens", "waiting_depth", "running_depth"]
    requests = (
        source.tables.requests.join(steps, on=[*ENGINE, "queued_step"], how="inner")
        .drop_nulls([*needed, "kv_usage_ratio"])
        .sort("arrival_ns")
        .tail(MOST_PREDICTOR_ROWS)
    )
    if not requests.height:
        raise DataError(
            "no request has its latencies, and the batch and KV usage of the step it was queued at",
            hint=ALL_SPANS,
        )
    cached = pl.col("cached_prompt_tokens").fill_null(0) / pl.col("prompt_tokens")
    rows = requests.select(
        kv_cache_percentage=pl.col("kv_usage_ratio").clip(0.0, 1.0),
        input_token_length="prompt_tokens",  # noqa: S106 - a column
        num_request_waiting="waiting_depth",
        num_request_running="running_depth",
        actual_ttft_ms=pl.col("ttft_us") / 1e3,
        actual_tpot_ms=pl.col("itl_us") / 1e3,
        num_tokens_generated="output_tokens",
        prefix_cache_score=cached.clip(0.0, 1.0),
    )
    usage = (
        "curl --fail -H 'content-type: application/json' --data "
        f"@{OUT}/training-rows.json http://127.0.0.1:8000/add_training_data_bulk"
    )
    notes = (f"{requests.height:,} measured requests, not a model's: the predictor fits trees to them",)
    return Export({"training-rows.json": json.dumps({"entries": rows.to_dicts()})}, (), notes, usage)
