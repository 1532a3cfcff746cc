"""The rows that models were fitted on: as the tables `alpha_training` and `beta_training`, and as the specification's
samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from tracefit.commands.requests import csv_text
from tracefit.features.sets import Feature, FeatureSet
from tracefit.features.training import WORKLOAD_COLUMNS
from tracefit.fit.splits import step_frame
from tracefit.tables import schema

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tracefit.fit.fitted import FittedDeployment, FittedModel
    from tracefit.tables.store import Manifest, TableStore


def write_training_frames(store: TableStore, deployments: list[FittedDeployment], read: Manifest) -> None:
    """Write the rows of every run, left out ones too; runs that were not trained on have none.

    Raises:
        UsageError: The folder cannot be written, or another process has changed a run since the manifest was read.
    """
    columns = {kind: _training_columns(kind, deployments) for kind in ("alpha", "beta")}
    store.write_runs(_frames_of_runs(deployments, columns), read)


def _frames_of_runs(
    deployments: list[FittedDeployment], columns: dict[str, dict[str, pl.DataType]]
) -> Iterator[tuple[str, dict[str, pl.DataFrame]]]:
    for deployment in deployments:
        frames = {
            kind: {} if rows is None else rows.partition_by("run_id", as_dict=True)
            for kind, rows in (("alpha", deployment.alpha_rows), ("beta", deployment.beta_rows))
        }
        trained = sorted(deployment.tables.runs["run_id"].unique())
        # A run that an earlier training used may be left out now: its rows must not stay.
        left_out = [one.run_id for one in deployment.overloads if not one.trained_on]
        for run_id in (*trained, *left_out):
            parts = {
                f"{kind}_training": _training_part(kind, rows.get((run_id,)), deployment, columns[kind])
                for kind, rows in frames.items()
            }
            yield run_id, parts


def _training_columns(kind: str, deployments: list[FittedDeployment]) -> dict[str, pl.DataType]:
    """Return the further columns of a training table: the load of requests, and the features of any model.

    Every part of the table has all of them, null where a deployment lacks one: other readers take the folder as one
    table with one schema.
    """
    table = schema.TABLES[f"{kind}_training"]
    further: dict[str, pl.DataType] = {}
    for deployment in deployments:
        frame = deployment.alpha_rows if kind == "alpha" else deployment.beta_rows
        features = {f for m in deployment.models if m.name.startswith(f"{kind}.") for f in _offered(m)}
        for name, dtype in (frame.schema if frame is not None else {}).items():
            if name in WORKLOAD_COLUMNS:
                further.setdefault(name, dtype)
            elif name in features and name not in table.names:
                further.setdefault(name, pl.Float64())
    return further


def _training_part(
    kind: str, frame: pl.DataFrame | None, deployment: FittedDeployment, columns: dict[str, pl.DataType]
) -> pl.DataFrame:
    """Return the training rows of one run: the columns of the table, and `columns`."""
    table = schema.TABLES[f"{kind}_training"]
    rows = table.empty() if frame is None else frame
    rows = rows.with_columns(deployment_id=pl.lit(deployment.deployment.deployment_id))
    further = [
        (pl.col(c).cast(dtype) if c in rows.columns else pl.lit(None, dtype)).alias(c) for c, dtype in columns.items()
    ]
    return table.conform(rows.select(*(c for c in rows.columns if c in table.names), *further))


def _offered(model: FittedModel) -> list[str]:
    fitted = model.fitted
    compared = (name for part in fitted.regimes for name in part.regime.when.names)
    return [*(t.feature for t in fitted.terms), *(x.feature for x in fitted.features_left_out), *compared]


_ALPHA: Mapping[str, str | pl.Expr] = {
    "alpha_latency_ms": pl.col("y") / 1e3,
    "prompt_tokens": "prompt_tokens",
    "queue_depth": "waiting_depth",
    "running_depth": "running_depth",
    "kv_ratio": "kv_usage_ratio",
}
_BETA = {
    "num_prefill": "num_prefill_reqs",
    "num_decode": "num_decode_reqs",
    "prefill_tokens": "prefill_tokens",
    "decode_tokens": "decode_tokens",
    "kv_ratio": "kv_usage_ratio",
}
_SAMPLE_SET = FeatureSet("sample", tuple(Feature(column, "", column) for column in _BETA.values()))


def sample_tables(deployments: Sequence[FittedDeployment]) -> dict[str, str]:
    """Return file name to CSV text: alpha_sample.csv (queue waits) and beta_sample.csv (step times).

    The columns are the specification's. Unknown values are empty.
    """
    alpha, beta = ([rows for s in deployments if (rows := make(s)) is not None] for make in (_alpha, _beta))
    return {
        "alpha_sample.csv": _csv(alpha, (*_ALPHA, "model_size", "hw_type", "tp")),
        "beta_sample.csv": _csv(beta, ("step_duration_us", *_BETA, "model_type", "hw", "tp")),
    }


def _csv(frames: list[pl.DataFrame], columns: tuple[str, ...]) -> str:
    empty = pl.DataFrame(schema=dict.fromkeys(columns, pl.String))
    return csv_text(pl.concat(frames, how="vertical_relaxed") if frames else empty)


def _alpha(deployment: FittedDeployment) -> pl.DataFrame | None:
    if deployment.alpha_rows is None:
        return None
    context = deployment.deployment.context
    size = model_size(context.architecture.parameters) if context.architecture else None
    waits = deployment.alpha_rows.filter(pl.col("target") == "queue_wait").sort(*schema.SERVER, "ts_ns")
    return waits.select(
        **_ALPHA,
        model_size=pl.lit(size, pl.String),
        hw_type=pl.lit(context.gpu.name if context.gpu else None, pl.String),
        tp=pl.lit(context.settings.tensor_parallel, pl.Int64),
    )


def _beta(deployment: FittedDeployment) -> pl.DataFrame | None:
    if deployment.beta_rows is None or deployment.source.beta_target_source is None:
        return None
    context = deployment.deployment.context
    kind = context.architecture and ("moe" if context.architecture.is_moe else "dense")
    # The rows of the fit have the features that were offered, which need not be these.
    rows = step_frame(
        deployment.tables, deployment.tables.timeline, _SAMPLE_SET, {}, deployment.source.beta_target_source
    )
    return rows.sort(*schema.SERVER, "ts_ns").select(
        step_duration_us="y",
        **_BETA,
        model_type=pl.lit(kind, pl.String),
        hw=pl.lit(context.gpu.name if context.gpu else None, pl.String),
        tp=pl.lit(context.settings.tensor_parallel, pl.Int64),
    )


def model_size(parameters: int) -> str:
    """Write a parameter count as people say it: 7B, 34B, 1.5B, 350M."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if parameters >= unit:
            count = parameters / unit
            return f"{count:.1f}".rstrip("0").rstrip(".") + name if count < 10 else f"{count:.0f}{name}"
    return str(parameters)
