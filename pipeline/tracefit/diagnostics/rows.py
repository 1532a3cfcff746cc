"""Training rows beside the predictions of their models: residuals, and the batch that each step executed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import polars as pl

from tracefit.diagnostics.groups import US_PER_MS
from tracefit.fit.splits import FEW_ROWS, in_time
from tracefit.models.columns import amounts_of, column_of
from tracefit.models.evaluate import CompiledModel
from tracefit.models.schema import RegimesModel, main_forms
from tracefit.models.targets import is_step_model
from tracefit.tables.schema import ENGINE, SERVER
from tracefit.tables.sources import is_one_step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracefit.models.schema import Model

STEP = (*ENGINE, "step_id")

RESIDUAL_BATCH_COLUMNS = (
    *("num_prefill_reqs", "num_decode_reqs", "prefill_tokens", "prefill_context_tokens"),
    *("decode_tokens", "context_tokens"),
)
"""Columns of the work of a step."""

COMPOSITION = {
    "requests": pl.col("num_prefill_reqs") + pl.col("num_decode_reqs"),
    "prompt tokens": pl.col("prefill_tokens"),
    "generated tokens": pl.col("decode_tokens"),
    "context tokens": pl.col("context_tokens"),
}
"""Facts of a step that readers see, over columns of the `timeline` table."""

RESIDUAL_COLUMNS = frozenset({*STEP, "deployment_id", "target", "source", "ts_ns", "y", "split", "excluded_reason"})
"""Columns of training rows that figures need beside the features of the models."""

_STRONG = 2
"""Features that residuals are drawn over."""

MOST_DRAWN_RUNS = 6
"""Runs overlaid in one figure."""

TIME_BINS = 160

_BETWEEN_RUNS = 0.02
"""Room between two runs on a common time axis, as a share of all their time."""


def with_batches(steps: pl.DataFrame, batches: pl.DataFrame, *, lag_steps: int = 0) -> pl.DataFrame:
    """Add to rows of `beta_training` the batch that executed, by columns of `timeline`; null for an interval of several
    steps.

    With `lag_steps` 1 the batch of the step before executes: scheduling runs that far ahead.
    """
    single = pl.when(is_one_step()).then(pl.col("step_id"))
    new = [c for c in RESIDUAL_BATCH_COLUMNS if c not in steps.columns]
    return steps.with_columns(step_id=single).join(
        batches.select(*STEP, *new).with_columns(pl.col("step_id") + lag_steps),
        on=list(STEP),
        how="left",
        maintain_order="left",
    )


def evaluated(model: Model, rows: pl.DataFrame) -> pl.DataFrame | None:
    """Return the rows of a training frame that count, with prediction, measurement and residual in ms.

    Null where the frame lacks a feature of the model or has no held-out row.
    """
    compiled = CompiledModel(model)
    if not compiled.columns_with_clock <= set(rows.columns):
        return None
    kept = rows.filter(pl.col("excluded_reason").is_null())
    if is_step_model(model.name):
        # A mean over an interval is not a step: the report gives the errors on single steps, if there are enough of
        # them.
        single = kept.filter(is_one_step())
        kept = single if single.filter(split="holdout").height >= FEW_ROWS else kept
    # Time is in seconds, or in steps if the steps have no time.
    unit = 1 if kept["ts_ns"].null_count() else 1e9
    needed = {*STEP, *RESIDUAL_BATCH_COLUMNS, "ts_ns", "split", *compiled.columns_with_clock}
    values = amounts_of(kept, compiled.columns_with_clock)
    with np.errstate(all="ignore"):
        predicted_ms = compiled.evaluate_with_clock(values) / US_PER_MS
    # -1, where no condition holds, is the last one: null.
    names = pl.Series([*(name for name, _ in compiled.forms), None], dtype=pl.String)
    regime = names.gather(np.broadcast_to(compiled.active(values), kept.height) % len(names))
    kept = kept.select(
        *(c for c in kept.columns if c in needed),
        column_of("predicted_ms", predicted_ms, kept.height),
        measured_ms=pl.col("y") / US_PER_MS,
        at_s=(in_time() - in_time().min().over(SERVER)) / unit,
        regime=regime if isinstance(model, RegimesModel) else pl.lit("all"),
    )
    # Residuals are rounded to a nanosecond, the resolution of the clocks, so that rounding errors do not count as
    # residuals.
    residual = (pl.col("measured_ms") - pl.col("predicted_ms")).round(6)
    kept = kept.with_columns(residual_ms=residual).drop_nulls("residual_ms")
    return kept if kept.filter(split="holdout").height else None


def time_unit(rows: pl.DataFrame) -> str:
    """Return what `at_s` counts, for the label of an axis."""
    return "steps" if rows["ts_ns"].null_count() else "seconds"


def strongest_features(model: Model, rows: pl.DataFrame) -> list[str]:
    """Name the features that move the prediction most over the training range."""
    effects = {
        t.feature: abs(t.value) * (t.training_range[1] - t.training_range[0])
        for form in main_forms(model).values()
        for t in form.terms
        if t.training_range is not None and t.feature in rows.columns
    }
    return sorted(effects, key=lambda f: -effects[f])[:_STRONG]


IntervalKind = Literal["training range", "hold-out", "warm-up", "idle", "queue never empty", "overload"]


class MarkedInterval(NamedTuple):
    """An interval of time, in seconds into the run, or of the load, with a meaning."""

    kind: IntervalKind
    start: float
    end: float


def covered(kind: IntervalKind, rows: pl.DataFrame, by: Sequence[str]) -> list[MarkedInterval]:
    """Return the time that each group of rows covers; rows may have no time."""
    groups = rows.drop_nulls("at_s").group_by(by, maintain_order=True)
    return marked(kind, groups.agg(start=pl.col("at_s").min(), end=pl.col("at_s").max()))


def marked(kind: IntervalKind, ends: pl.DataFrame) -> list[MarkedInterval]:
    """Return the intervals from `start` to `end` of each row."""
    return [MarkedInterval(kind, start, end) for start, end in ends.select("start", "end").iter_rows()]


def steps_over_time(kept: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """Return the rows of `evaluated` on one time axis, runs one after the other without the time between them.

    Returns:
        The first runs: run_id, server and begins, where each begins on the axis in s; their rows, with `at_s` on the
            axis; and
        means over equal intervals of time: begins, at_s, measured_ms, predicted_ms.
    """
    # Without the time between runs: traces of two days would be two dots with nothing between them.
    runs = kept.group_by(SERVER, maintain_order=True).agg(seconds=pl.col("at_s").max()).head(MOST_DRAWN_RUNS)
    total = float(runs["seconds"].sum()) or 1.0
    begins = pl.col("seconds").cum_sum().shift(1, fill_value=0.0)
    runs = runs.with_columns(begins=begins + _BETWEEN_RUNS * total * pl.int_range(pl.len()))
    rows = (
        kept.join(runs, on=SERVER, how="inner", maintain_order="left")
        .with_columns(at_s=pl.col("at_s") + pl.col("begins"))
        .sort("at_s")
    )
    number = (pl.col("at_s") / (total / TIME_BINS)).floor()
    means = (
        rows.group_by("begins", number.alias("bin"), maintain_order=True)
        .agg(pl.col("at_s", "measured_ms", "predicted_ms").mean())
        .sort("at_s")
    )
    return runs, rows, means
