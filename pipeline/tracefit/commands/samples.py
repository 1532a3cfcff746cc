"""Write the specification's two sample tables as CSV."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracefit.fit.fitted import FittedScope


def sample_tables(scopes: Sequence[FittedScope]) -> dict[str, str]:
    """Return file name to CSV text: alpha_sample.csv (queue waits) and beta_sample.csv (step times).

    The columns are the specification's. Unknown values are empty.
    """
    return {
        "alpha_sample.csv": _csv([_alpha(s) for s in scopes if s.alpha_rows is not None], _ALPHA),
        "beta_sample.csv": _csv([_beta(s) for s in scopes if s.beta_rows is not None], _BETA),
    }


_ALPHA = (
    "alpha_latency_ms",
    "prompt_tokens",
    "queue_depth",
    "running_depth",
    "kv_ratio",
    "model_size",
    "hw_type",
    "tp",
)
_BETA = (
    "step_duration_us",
    "num_prefill",
    "num_decode",
    "prefill_tokens",
    "decode_tokens",
    "kv_ratio",
    "model_type",
    "hw",
    "tp",
)


def _csv(frames: list[pl.DataFrame], columns: tuple[str, ...]) -> str:
    empty = pl.DataFrame(schema=dict.fromkeys(columns, pl.String))
    return (pl.concat(frames, how="vertical_relaxed") if frames else empty).write_csv()


def model_size(parameters: int) -> str:
    """Write a parameter count as people say it: 7B, 34B, 1.5B, 350M."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if parameters >= unit:
            count = parameters / unit
            return f"{count:.1f}".rstrip("0").rstrip(".") + name if count < 10 else f"{count:.0f}{name}"
    return str(parameters)


def _alpha(scope: FittedScope) -> pl.DataFrame:
    context = scope.scope.context
    size = model_size(context.architecture.parameters) if context.architecture else None
    rows = scope.alpha_rows if scope.alpha_rows is not None else pl.DataFrame()
    waits = rows.filter(pl.col("target") == "queue_wait").sort("run_id", "server", "ts_ns")
    return waits.select(
        alpha_latency_ms=pl.col("y") / 1e3,
        prompt_tokens="prompt_tokens",
        queue_depth="waiting_depth",
        running_depth="running_depth",
        kv_ratio="kv_usage_ratio",
        model_size=pl.lit(size, pl.String),
        hw_type=pl.lit(context.gpu.name if context.gpu else None, pl.String),
        tp=pl.lit(context.settings.tensor_parallel, pl.Int64),
    )


def _beta(scope: FittedScope) -> pl.DataFrame:
    context = scope.scope.context
    kind = None
    if context.architecture is not None:
        kind = "moe" if context.architecture.is_moe else "dense"
    rows = scope.beta_rows if scope.beta_rows is not None else pl.DataFrame()
    return rows.sort("run_id", "server", "ts_ns").select(
        step_duration_us="y",
        num_prefill="num_prefill_reqs",
        num_decode="num_decode_reqs",
        prefill_tokens="prefill_tokens",
        decode_tokens="decode_tokens",
        kv_ratio="kv_usage_ratio",
        model_type=pl.lit(kind, pl.String),
        hw=pl.lit(context.gpu.name if context.gpu else None, pl.String),
        tp=pl.lit(context.settings.tensor_parallel, pl.Int64),
    )
