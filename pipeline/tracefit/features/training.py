"""Training frames: targets with the features that were known when their interval began."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tracefit.features.context import RunContext

ENGINE = ["run_id", "server", "epoch"]

STATE_COLUMNS = (
    "running_depth",
    "waiting_depth",
    "kv_usage_ratio",
    "num_prefill_reqs",
    "num_decode_reqs",
    "prefill_tokens",
    "decode_tokens",
)
"""What a sampled step says of the engine's state; requests take it from the latest one."""


def constants_of(context: RunContext) -> dict[str, float | None]:
    """Return what is the same for every row of a run, by the name features use; null where not known."""
    settings, model, gpu = context.settings, context.architecture, context.gpu
    return {
        "layers": _number(model.layers if model else None),
        "is_moe": _number(model.is_moe if model else None),
        "is_mha": _number(model.attention == "MHA" if model else None),
        "is_gqa": _number(model.attention == "GQA" if model else None),
        "is_mqa": _number(model.attention == "MQA" if model else None),
        "is_mla": _number(model.attention == "MLA" if model else None),
        "size_proxy": _number(model.size_proxy if model else None),
        "kv_bytes_per_token": _number(model.kv_bytes_per_token if model else None),
        "compute_to_bandwidth": _number(gpu.compute_to_bandwidth if gpu else None),
        "relative_performance": _number(gpu.relative_performance if gpu else None),
        "gpu_memory_gb": _number(gpu.memory_gb if gpu else None),
        "tensor_parallel": _number(settings.tensor_parallel),
        "pipeline_parallel": _number(settings.pipeline_parallel),
        "data_parallel": _number(settings.data_parallel),
        "max_num_seqs": _number(settings.max_num_seqs),
        "max_num_batched_tokens": _number(settings.max_num_batched_tokens),
        "max_model_len": _number(settings.max_model_len),
        "gpu_memory_utilization": _number(settings.gpu_memory_utilization),
        "enable_chunked_prefill": _number(settings.enable_chunked_prefill),
        "enable_prefix_caching": _number(settings.enable_prefix_caching),
        "enforce_eager": _number(settings.enforce_eager),
        "block_size": _number(settings.block_size),
    }


def _number(value: float | None) -> float | None:
    return None if value is None else float(value)


def beta_rows(timeline: pl.DataFrame, lags: Mapping[tuple[str, str], int], source: str) -> pl.DataFrame:
    """One row per step whose time is known: composition and `y` in us.

    With scheduling a step ahead (`lags` 1) step k executes between the starts of steps k+1 and k+2: its time is the
    cycle of the step after it.

    Args:
        timeline: The `timeline` table.
        lags: (run_id, server) to steps that scheduling runs ahead of execution.
        source: `clock` for cycle times, `duration` for `step.duration_us` as it is.

    Returns:
        Columns of the engine, step_id, ts_ns, source, y, excluded_because, and the composition.
    """
    rows = timeline.sort(*ENGINE, "step_id")
    idle = pl.col("idle_after")
    if source == "duration":
        rows = rows.with_columns(
            y=pl.col("duration_us").cast(pl.Float64), ts_ns=pl.col("ts_start_ns"), source=pl.lit("duration")
        )
    else:
        rows = _clock_rows(rows, lags)
        idle = idle | pl.col("next_idle").fill_null(value=False)
    known = rows.filter(pl.col("y").is_not_null())
    because = pl.when(idle).then(pl.lit("idle_gap")).otherwise(pl.lit(None, pl.String))
    return known.with_columns(excluded_because=because)


def _clock_rows(rows: pl.DataFrame, lags: Mapping[tuple[str, str], int]) -> pl.DataFrame:
    ahead = [key for key, lag in lags.items() if lag]
    is_ahead = (
        pl.struct("run_id", "server").is_in([{"run_id": r, "server": s} for r, s in ahead]) if ahead else None
    )

    def following(name: str) -> pl.Expr:
        return pl.when(pl.col("cycle_us").is_not_null()).then(pl.col(name).shift(-1).over(ENGINE))

    here = [
        pl.col("cycle_us").alias("y"),
        pl.col("ts_start_ns").alias("ts_ns"),
        pl.lit(value=False).alias("next_idle"),
    ]
    if is_ahead is not None:
        there = {"y": "cycle_us", "ts_ns": "ts_start_ns", "next_idle": "idle_after"}
        here = [
            pl.when(is_ahead)
            .then(following(there[e.meta.output_name()]))
            .otherwise(e)
            .alias(e.meta.output_name())
            for e in here
        ]
    return rows.with_columns(*here, source=pl.col("cycle_source"))


def preemption_heavy(rows: pl.DataFrame) -> pl.Expr:
    """Tell steps that preempted, or whose tokens are mostly a resumed request's recomputation.

    A recomputed request that has output counts as one decode request with many tokens. Where nothing was ever
    preempted many decode tokens are something else (speculative decoding).
    """
    if not int(rows["num_preempted"].sum() or 0):
        return pl.lit(value=False)
    recomputed = pl.col("decode_tokens") - pl.col("num_decode_reqs")
    return (pl.col("num_preempted") > 0) | (
        2 * recomputed > pl.col("prefill_tokens") + pl.col("decode_tokens")
    )


ALPHA_TARGETS = {
    "queue_wait": ("queue_wait_us", "queued_ns", "queued_step"),
    "admission": ("admission_us", "arrival_ns", "queued_step"),
    "departure": ("departure_us", "finished_ns", "finished_step"),
}
"""Target to its duration, the event its interval begins with, and the step counter then."""


def alpha_rows(requests: pl.DataFrame, steps: pl.DataFrame, target: str) -> pl.DataFrame:
    """One row per request whose `target` is known: `y` in us, and the state when its interval began.

    The state is that of the latest sampled step at or before, with its age (`state_age_us`). A departure is told by
    the requests finishing in the same step too.

    Args:
        requests: The `requests` table.
        steps: The `steps` table; may be empty.
        target: queue_wait, admission or departure.
    """
    duration, begin, step = ALPHA_TARGETS[target]
    finishing = pl.len().over([*ENGINE, "finished_step"])
    rows = requests.with_columns(
        target=pl.lit(target),
        y=pl.col(duration),
        ts_ns=pl.col(begin),
        at_step=pl.col(step),
        finishing_reqs=pl.when(pl.col("finished_step").is_not_null()).then(finishing),
    ).filter(pl.col("y").is_not_null() & pl.col("ts_ns").is_not_null())
    rows = rows.with_columns(
        excluded_because=pl.lit(None, pl.String),
        request_id=pl.coalesce("core_request_id", "request_id"),
    )
    state = _states(steps)
    joined = rows.sort("ts_ns").join_asof(
        state.sort("state_ns"), left_on="ts_ns", right_on="state_ns", by=ENGINE, check_sortedness=False
    )
    return joined.with_columns(state_age_us=(pl.col("ts_ns") - pl.col("state_ns")) / 1e3)


def _states(steps: pl.DataFrame) -> pl.DataFrame:
    used = pl.col("kv_blocks_total") - pl.col("kv_blocks_free")
    return steps.select(
        *ENGINE,
        *STATE_COLUMNS,
        "kv_blocks_free",
        "scheduled_tokens",
        state_ns=pl.col("ts_start_ns"),
        kv_blocks_used=used,
    )
