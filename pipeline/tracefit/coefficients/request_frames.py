"""Requests of a frame: the arithmetic of `ScopeModels.request` as column operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from tracefit.coefficients.frames import derive, predict_rows, step_columns
from tracefit.coefficients.model import BoundaryModel
from tracefit.coefficients.values import columns_of, formulas_of, terms_of
from tracefit.coefficients.workload import REQUEST_COLUMNS, REQUEST_INPUTS
from tracefit.errors import UsageError

if TYPE_CHECKING:
    from tracefit.coefficients.model import Model
    from tracefit.coefficients.models import ScopeModels

PARTS = ("admission_us", "queue_wait_us", "prefill_us", "itl_us", "departure_us", "ttft_us", "e2e_us")
"""Columns that are added; null where there is no model, and in what needs it."""

MAX_PREFILL_STEPS = 5_000_000
"""Steps of all prompts together."""


def predict_requests(models: ScopeModels, rows: pl.DataFrame) -> pl.DataFrame:
    """Predict requests described by `workload.REQUEST_INPUTS`; adds the columns of `PARTS`.

    Args:
        models: Models of one scope.
        rows: prompt_tokens and output_tokens at least; further columns and features win over what follows from these.

    Raises:
        UsageError: A column is missing or has values that make no sense, or no model speaks of steps.
    """
    given = _inputs(models, rows)
    busy = pl.col("batch") > 0
    cycle = _steps(models, given, "batch", pl.col("context"))
    given = given.with_columns(decode_cycle_us=pl.when(cycle.is_not_null()).then(cycle))
    given = given.with_columns(decode_cycle_us=pl.when(busy).then("decode_cycle_us"))
    own = pl.col("prompt_tokens") + pl.col("output_tokens") / 2
    slots = models.server["max_num_seqs"]
    beside = pl.col("batch") if slots is None else pl.col("batch").clip(0.0, max(slots - 1, 0.0))
    given = given.with_columns(beside=beside).with_columns(with_itself=pl.col("beside") + 1)
    shared = (pl.col("beside") * pl.col("context") + own) / pl.col("with_itself")
    itl = _steps(models, given, "with_itself", shared)
    prefill = _prefill(models, given)
    if models.setting("async_scheduling") is True:
        prefill = prefill + given["decode_cycle_us"].fill_null(0.0)
    parts = pl.DataFrame(
        {
            "admission_us": _overhead(models, "admission", given),
            "queue_wait_us": _overhead(models, "queue_wait", given),
            "prefill_us": prefill,
            "itl_us": itl,
            "departure_us": _overhead(models, "departure", given.with_columns(batch="with_itself")),
            "tokens": given["output_tokens"],
        }
    )
    ttft = pl.col("admission_us") + pl.col("queue_wait_us") + pl.col("prefill_us")
    parts = parts.with_columns(ttft_us=ttft, e2e_us=ttft + (pl.col("tokens") - 1) * pl.col("itl_us"))
    return rows.hstack(parts.select(PARTS))


def _inputs(models: ScopeModels, rows: pl.DataFrame) -> pl.DataFrame:
    """Complete what is described, as `RequestQuestion.inputs` does."""
    for name in ("prompt_tokens", "output_tokens"):
        if name not in rows.columns:
            raise UsageError(f"the rows have no column {name}", hint="prompt and output tokens are needed")
    clash = [c for c in PARTS if c in rows.columns]
    if clash:
        raise UsageError(f"the rows have a column {clash[0]} already", hint="rename it")
    known = [c for c in REQUEST_INPUTS if c in rows.columns]
    if not all(rows.schema[c].is_numeric() or rows.schema[c] == pl.Null for c in known):
        raise UsageError("described requests are not all of numbers", where=", ".join(known))
    given = rows.with_columns(pl.col(c).cast(pl.Float64) for c in known)
    given = given.with_columns(pl.lit(None, pl.Float64).alias(c) for c in REQUEST_INPUTS if c not in known)
    halfway = pl.col("prompt_tokens") + pl.col("output_tokens") / 2
    given = given.with_columns(
        pl.col("queue", "cached").fill_null(0.0), context=pl.col("context").fill_null(halfway)
    )
    server = models.server
    slots, blocks, size = (server[n] for n in ("max_num_seqs", "num_gpu_blocks", "block_size"))
    limits = [pl.lit(slots, pl.Float64)] if slots is not None else []
    if blocks is not None and size is not None:
        limits.append(((blocks - 1) / (pl.col("context") / size + 0.5)).floor())
    full = pl.min_horizontal(*limits).clip(lower_bound=1.0) if limits else pl.lit(None, pl.Float64)
    given = given.with_columns(
        batch=pl.coalesce("batch", pl.when(pl.col("queue") == 0).then(0.0).otherwise(full))
    )
    wrong = given.filter(
        (pl.min_horizontal(REQUEST_INPUTS) < 0)
        | (pl.col("output_tokens") < 1)
        | (pl.col("cached") >= pl.col("prompt_tokens"))
        | pl.any_horizontal(pl.col(c).is_null() | pl.col(c).is_nan() for c in REQUEST_INPUTS)
    )
    if wrong.height:
        row = {c: wrong[c][0] for c in REQUEST_INPUTS}
        raise UsageError(f"{wrong.height} rows describe no request, such as {row}")
    return given.with_columns(
        pl.lit(v, pl.Float64).alias(n) for n, v in server.items() if n not in given.columns
    )


def _steps(
    models: ScopeModels, given: pl.DataFrame, batch: str, context: pl.Expr, **more: pl.Expr
) -> pl.Series:
    model = models.step_model
    described = given.select(batch=pl.col(batch), context=context, **more, **_overrides(model, given))
    columns = step_columns(described, models.server)
    return predict_rows(model, _stand_in(model, columns))["predicted_us"]


def _overrides(model: Model, given: pl.DataFrame) -> dict[str, pl.Expr]:
    """Columns of the frame that are features or columns of the model by name."""
    names = {t.feature for t in terms_of(model)} | columns_of(model)
    return {n: pl.col(n) for n in names if n in given.columns and n not in {"batch", "context"}}


def _prefill(models: ScopeModels, given: pl.DataFrame) -> pl.Series:
    """Add up the steps of every prompt, cut by what running requests leave of the token budget."""
    limit = models.server["max_num_batched_tokens"]
    cut = limit is not None and models.setting("enable_chunked_prefill") is not False
    left = pl.col("prompt_tokens") - pl.col("cached")
    budget = (pl.lit(limit) - pl.col("beside")).clip(lower_bound=1.0) if cut else left
    rows = given.with_row_index("request").with_columns(budget=budget)
    rows = rows.with_columns(chunks=(left / pl.col("budget")).ceil().cast(pl.Int64))
    if int(rows["chunks"].sum() or 0) > MAX_PREFILL_STEPS:
        raise UsageError(f"the prompts take more than {MAX_PREFILL_STEPS:,} steps together")
    rows = rows.with_columns(chunk=pl.int_ranges(0, "chunks")).explode("chunk")
    done = pl.col("chunk") * pl.col("budget")
    rows = rows.with_columns(
        prefill=pl.min_horizontal(pl.col("budget"), left - done), prefill_done=pl.col("cached") + done
    )
    us = _steps(
        models,
        rows,
        "beside",
        pl.col("context"),
        prefill=pl.col("prefill"),
        prefill_done=pl.col("prefill_done"),
    )
    sums = rows.select("request", us=us).group_by("request", maintain_order=True).agg(pl.col("us").sum())
    return sums["us"]


def _overhead(models: ScopeModels, name: str, given: pl.DataFrame) -> pl.Series:
    model = models.models.get(f"alpha.{name}")
    if model is None:
        return pl.Series([None] * given.height, dtype=pl.Float64)
    rows = derive(given, REQUEST_COLUMNS, columns_of(model))
    if not isinstance(model, BoundaryModel):
        return predict_rows(model, _stand_in(model, rows))["predicted_us"]
    work = derive(rows, formulas_of(model), [t.feature for t in model.work.terms])
    us = pl.lit(model.work.intercept.value)
    for term in model.work.terms:
        us = us + term.value * pl.col(term.feature)
    waited = (us + model.offset.value).clip(lower_bound=0.0) + pl.col("decode_cycle_us") / 2
    return work.select(
        us=pl.when(pl.col("batch") == 0).then(us.clip(lower_bound=0.0)).otherwise(waited)
    ).to_series()


def _stand_in(model: Model, rows: pl.DataFrame) -> pl.DataFrame:
    """Let the middle of the training range stand in for a feature that nothing tells."""
    middles = {t.feature: (t.seen[0] + t.seen[1]) / 2 for t in terms_of(model) if t.seen is not None}
    rows = derive(rows, formulas_of(model), middles)
    absent = [pl.lit(v).alias(n) for n, v in middles.items() if n not in rows.columns]
    nulls = [pl.col(n).fill_null(v) for n, v in middles.items() if n in rows.columns]
    return rows.with_columns(*absent, *nulls)
