"""Export to AISimulate: two `fpm_forward_perf` tables with their sidecars, one of measured steps and one of the step
model on a grid.

A row is a step of one kind: (batch size, prompt tokens, tokens read from the cache) and its time in ms. Read in
`perf_database/fpm_forward.rs` of aiconfigurator-core 0.12 and in `collector/fpm_forward/database.py` of AISimulate
0.13: rows match a query where model path, system, version and identity columns are equal, and are interpolated along
the cache, then over the batch.
"""

from __future__ import annotations

import io
import json
import shlex
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.consumers.base import (
    OUT,
    Export,
    Source,
    held_out,
    model_name,
    train_and_holdout,
    worse_than_baseline,
)
from tracefit.consumers.dynamo import COLUMNS, axes, predicted_ms
from tracefit.consumers.dynamo_planner import steps_of_one_kind
from tracefit.errors import DataError
from tracefit.options import ServerOptions, named

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tracefit.results.models import HeldOut

_AISIMULATE_COLUMNS = (*COLUMNS, "prefill_context_tokens")
_SYSTEMS = {"A100-80GB-SXM": "a100_sxm", "A100-80GB-PCIe": "a100_pcie", "RTX-PRO-6000": "rtx_pro_6000_server"}
"""GPU name to AISimulate's, where it is not the name in lower case with `_` (of the B200 and B300 with `_sxm`)."""

_VERSION, _VERSIONS = "0.24.0", {"a100_sxm": "0.14.0"}
"""Version of vLLM that AISimulate 0.13 takes queries for, by system: it refuses others, and pairs labelled
otherwise."""

_CONTRACT = {
    "schema_name": "aic_fpm_forward_perf",
    "schema_version": 7,
    "coordinate_system": "iteration_totals_balanced_v1",
    "measurement_policy": "dynamo_native_single_sample_v1",
}
"""Values that its reader asks for; `tracefit_rows` names the kind of rows."""

_COUNT_COLUMNS = {
    "prefill": ("num_prefill_reqs", "prefill_context_tokens"),
    "decode": ("num_decode_reqs", "context_tokens"),
}
"""Columns of a step with its requests and the tokens that they read from the cache, by kind."""

_GRID_KEY = ("workload_kind", "batch_size", "total_prefill_tokens", "total_kv_read_tokens")


def to_aisimulate(source: Source) -> Export:
    """Write both tables.

    Raises:
        DataError: The data cannot support it, with the reason.
    """
    train, holdout = train_and_holdout(source, source.steps(_AISIMULATE_COLUMNS), _AISIMULATE_COLUMNS, "step times")
    grid = _grid(source, train)
    identity = _identity(source)
    files: dict[str, str | bytes] = {}
    for what, rows in (("measured", _measured(pl.concat([train, holdout]))), ("model", grid)):
        if rows.height:
            files |= _pair(what, rows, identity)
    errors = _errors(grid, train, holdout)
    notes = (
        (
            "measured/ holds medians of measured steps, model/ the step model on a grid: tracefit_rows in the sidecar "
            "says which"
        ),
        "steps that prefill and decode are in neither: AISimulate adds the two phases itself",
        (
            f"backend_version {identity['backend_version']} is the version that AISimulate 0.13 takes queries for, not "
            "the server's"
        ),
        "a query matches exactly or not at all: model, system, version, ranks and data types are those of the use line",
        *worse_than_baseline(errors),
    )
    return Export(files, errors, notes, _usage(identity))


def _usage(identity: Mapping[str, str | int | bool]) -> str:
    """Return a command that asks AISimulate for a decode step of 8 requests with 4,000 tokens in their caches."""
    asked = {
        "model": identity["model_path"],
        **{name: identity[name] for name in ("system", "backend", "backend_version", "tp", "pp")},
        "attention_dp": identity["dp"],
        "worker_type": "aggregated",
        "estimation_mode": "fpm_interpolation",
        "fallback_policy": "deny",
    }
    code = (
        "import json, sys; from aisimulate_core.sdk import ForwardPassPerfModelConfig as Config, "
        "RustForwardPassPerfModel as Model; config = {'fpm_interpolation': {'fpm_parquet_path': sys.argv[1]}}; model "
        "= Model.best_available(Config(estimator_config=config, **json.loads(sys.argv[2]))); "
        "print(model.predict_decode_latency_total(8, 4000), 'ms')"
    )
    table = f"{OUT}/model/fpm_forward_perf.parquet"
    return f"python -c {shlex.quote(code)} {table} {shlex.quote(json.dumps(asked))}"


def _identity(source: Source) -> dict[str, str | int | bool]:
    """Return the columns that are equal in all rows."""
    context = source.deployment.context
    settings, arch = context.settings, context.architecture
    if context.gpu is None:
        raise DataError(
            "AISimulate's tables are of a system, and the GPU is not known",
            hint=f"ingest the run again and name it with {named(ServerOptions, 'gpu')}",
        )
    name = context.gpu.name
    system = _SYSTEMS.get(name, name.lower().replace("-", "_") + ("_sxm" if name in {"B200", "B300"} else ""))
    # It calls fp8 with a scale per tensor `fp8`, and weights as they are `bfloat16`.
    quantization = (arch.quantization if arch else None) or settings.quantization or "bfloat16"
    tp, dp = settings.tensor_parallel or 1, settings.data_parallel or 1
    ranks = tp * dp if arch is not None and arch.is_moe else 1
    over_experts = bool(settings.enable_expert_parallel)
    return {
        "cell_id": f"tracefit-{source.deployment.deployment_id}",
        "model_path": model_name(source),
        "system": system,
        "backend": "vllm",
        "backend_version": _VERSIONS.get(system, _VERSION),
        "weight_quantization": quantization,
        "gemm_quant_mode": quantization,
        "moe_quant_mode": quantization,
        "fmha_quant_mode": "bfloat16",
        "comm_quant_mode": "half",
        "kv_cache_dtype": "fp8" if (settings.kv_cache_dtype or "auto").startswith("fp8") else "bfloat16",
        "tp": tp,
        "pp": settings.pipeline_parallel or 1,
        "dp": dp,
        "moe_tp": 1 if over_experts else ranks,
        "moe_ep": ranks if over_experts else 1,
        "cp": 1,
        "moe_backend": "auto",
        "attention_backend": "auto",
        "enable_wideep": False,
        "enable_eplb": False,
        "model_config_sha256": "",
        "execution_profile": "full",
        "engram_residency": "none",
        "input_modality": "text",
        "partition_policy": "balanced_v1",
    }


def _points(steps: pl.DataFrame) -> pl.DataFrame:
    """Return the single steps of one kind in the columns of the tables."""
    return pl.concat(
        of_kind.select(
            workload_kind=pl.lit(kind),
            batch_size=pl.col(_COUNT_COLUMNS[kind][0]).cast(pl.Int64),
            total_prefill_tokens=pl.col("prefill_tokens").cast(pl.Int64),
            total_kv_read_tokens=pl.col(_COUNT_COLUMNS[kind][1]).cast(pl.Int64),
            latency_ms=pl.col("y").cast(pl.Float64) / 1e3,
        )
        for kind, of_kind in steps_of_one_kind(steps)
    )


def _measured(steps: pl.DataFrame) -> pl.DataFrame:
    """Return the median time of measured steps by what they computed: a point may be in a table once."""
    medians = _points(steps).group_by(_GRID_KEY, maintain_order=True).agg(pl.col("latency_ms").median())
    return medians.sort(_GRID_KEY)


def _grid(source: Source, train: pl.DataFrame) -> pl.DataFrame:
    """Evaluate the step model over the range of the training steps."""
    isl, _, context = axes(train)
    most = max(float(train["num_decode_reqs"].cast(pl.Float64).to_numpy().max()), 2.0)
    batches = np.unique(np.geomspace(1, most, len(context)).round())
    batch, each = (axis.ravel() for axis in np.meshgrid(batches, context, indexing="ij"))
    read = np.maximum(np.round(batch * each), 1.0)
    tokens = np.unique(isl.round())
    prefill = {
        "workload_kind": "prefill",
        "batch_size": 1,
        "total_prefill_tokens": tokens.astype(int),
        "total_kv_read_tokens": 0,
        "latency_ms": predicted_ms(source, pl.DataFrame({"prefill": tokens})),
    }
    decode = {
        "workload_kind": "decode",
        "batch_size": batch.astype(int),
        "total_prefill_tokens": 0,
        "total_kv_read_tokens": read.astype(int),
        "latency_ms": predicted_ms(source, pl.DataFrame({"batch": batch, "context": read / batch})),
    }
    rows = pl.concat([pl.DataFrame(prefill), pl.DataFrame(decode)], how="vertical_relaxed")
    return rows.filter(pl.col("latency_ms") > 0).unique(_GRID_KEY, keep="first").sort(_GRID_KEY)


def _pair(what: str, rows: pl.DataFrame, identity: dict[str, str | int | bool]) -> dict[str, str | bytes]:
    """Return the table and its sidecar, by path."""
    # Ranks are 64-bit: its reader takes narrower ones for unknown.
    same = {name: pl.lit(value, pl.Int64) if type(value) is int else pl.lit(value) for name, value in identity.items()}
    packed = io.BytesIO()
    rows.select(**same, **{c: c for c in rows.columns}).write_parquet(packed)
    content = packed.getvalue()
    sidecar = {
        **_CONTRACT,
        "row_count": rows.height,
        "parquet_sha256": sha256(content).hexdigest(),
        **{name: identity[name] for name in ("system", "backend", "backend_version")},
        "tracefit_rows": "medians of measured steps" if what == "measured" else "a step model on a grid",
    }
    name = f"{what}/fpm_forward_perf"
    return {f"{name}.parquet": content, f"{name}.metadata.json": json.dumps(sidecar, indent=2) + "\n"}


def _errors(grid: pl.DataFrame, train: pl.DataFrame, holdout: pl.DataFrame) -> tuple[HeldOut, ...]:
    """Return the errors of the grid of the model on held-out steps of one kind, read as AISimulate does."""
    errors = []
    for (kind,), steps in _points(holdout).group_by("workload_kind", maintain_order=True):
        axis = "total_prefill_tokens" if kind == "prefill" else "total_kv_read_tokens"
        curves = {
            float(n): (rows[axis].to_numpy().astype(float), rows["latency_ms"].to_numpy())
            for (n,), rows in grid.filter(workload_kind=kind).group_by("batch_size", maintain_order=True)
        }
        batches = np.array(sorted(curves))
        # Shape (batches, steps): each curve at each step, then each step between the curves on either side of its
        # batch.
        at, batch = (steps[name].to_numpy().astype(float) for name in (axis, "batch_size"))
        read = np.array([np.interp(at, *curves[n]) for n in batches])
        predicted = np.array([np.interp(n, batches, took) for n, took in zip(batch, read.T, strict=True)])
        actual, trained = steps["latency_ms"].to_numpy(), train["y"].to_numpy() / 1e3
        errors.append(held_out(f"step time, {kind}", "ms", actual, predicted, trained))
    return tuple(errors)
