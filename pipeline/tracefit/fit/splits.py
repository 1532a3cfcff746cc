"""Training frames: which rows train, which are held out, and which are left out of either part, by the published rules.

The first 70 % of each server's rows in time train, the rest is held out. Training rows also lose warm-up, outliers and
steps that mostly repeat work after a preemption. Held-out rows lose idle gaps, epoch boundaries, times that are not
positive or faster than the GPU, and rows that no model can predict: steps of unknown batches, and intervals with a
possible prefix-cache hit. They keep their hiccups: a user sees these too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.features import training
from tracefit.features.sets import Feature, FeatureSet, add_features
from tracefit.tables.schema import ENGINE, SERVER
from tracefit.tables.sources import REQUEST_SOURCE, is_from, names_of
from tracefit.timeline import longest_whole_prompt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tracefit.fit.fitted import DeploymentTables
    from tracefit.models.targets import Target
    from tracefit.models.validation import Validation

TRAIN_SHARE = 0.7
WARM_UP_STEPS = 20
WARM_UP_SHARE = 0.01

IDLE_GAP = "idle_gap"
EPOCH_BOUNDARY = "epoch_boundary"
PREFIX_HIT = "prefix_hit"
WARM_UP = "warm_up"
OUTLIER = "outlier"
PREEMPTION_HEAVY = "preemption_heavy"
UNKNOWN_FEATURES = "unknown_features"

LEFT_OUT_ALWAYS = (IDLE_GAP, EPOCH_BOUNDARY, PREFIX_HIT, training.NOT_POSITIVE, training.TOO_FAST)
"""Reasons that apply to both parts."""

NEVER_EVALUATED = (*LEFT_OUT_ALWAYS, UNKNOWN_FEATURES)
"""Reasons to leave a row out of an error, whichever part it is in."""

MIN_TRAIN_ROWS = 30
MIN_HOLDOUT_ROWS = 10
"""Fewest rows that a model is fitted on, and evaluated on."""

FEW_ROWS = 100
"""An error from fewer rows is uncertain: intervals are evaluated too then, and a verdict says so."""


def in_time() -> pl.Expr:
    """Return when each row began: its time, or, on a server that has steps without one, its number in the order of the
    rows.
    """
    has_times = pl.col("ts_ns").null_count().over(SERVER) == 0
    return pl.when(has_times).then("ts_ns").otherwise(pl.int_range(pl.len(), dtype=pl.Int64).over(SERVER))


def split_by_time(rows: pl.DataFrame) -> pl.DataFrame:
    """Add `split`: the first 70 % of each server's rows in time train, the rest is held out.

    Rows that are left out of both parts do not move the boundary; they get the part their time falls in.
    """
    # A boundary per server: clocks differ, and a run may start its servers one after the other.
    ordered = rows.with_columns(_began=in_time())
    first = (pl.len() * TRAIN_SHARE).ceil().cast(pl.Int64).clip(0, pl.len() - 1)
    split_rows = ordered.filter(~is_excluded(LEFT_OUT_ALWAYS)).sort(*SERVER, "_began")
    boundary = split_rows.group_by(SERVER).agg(holdout_from_ns=pl.col("_began").get(first))
    held_out = pl.col("_began") >= pl.col("holdout_from_ns")
    joined = ordered.join(boundary, on=SERVER, how="left", maintain_order="left")
    split = pl.when(held_out.fill_null(value=False)).then(pl.lit("holdout")).otherwise(pl.lit("train"))
    return joined.with_columns(split=split).drop("_began")


def is_excluded(reasons: Sequence[str]) -> pl.Expr:
    """Return whether a row is left out for one of the reasons."""
    return pl.col("excluded_reason").is_in(reasons).fill_null(value=False)


def mark(rows: pl.DataFrame, reason: str, condition: pl.Expr, *, holdout: bool = False) -> pl.DataFrame:
    """Mark training rows, and held-out ones on demand, that meet `condition` with `reason`, unless they are marked
    already.
    """
    # The first reason stays: the order of the marks is the order of the published rules.
    in_part = (pl.col("split") == "train") | holdout
    is_marked = pl.col("excluded_reason").is_null() & in_part & condition.fill_null(value=False)
    reasons = pl.when(is_marked).then(pl.lit(reason)).otherwise("excluded_reason")
    return rows.with_columns(excluded_reason=reasons)


def step_frame(
    tables: DeploymentTables,
    timeline: pl.DataFrame,
    features: FeatureSet,
    constants: Mapping[str, float | None],
    source: str,
) -> pl.DataFrame:
    """Return one row per step or interval of known time, split by time, with warm-up and preemption-heavy rows
    marked.
    """
    rows = training.beta_rows(timeline, features, constants, tables.lags, source)
    rows = keep_sweep(mark_warm_up(split_by_time(rows), tables.counters, "step_id"), timeline)
    return mark(rows, PREEMPTION_HEAVY, pl.col("preemption_heavy"))


def request_frame(
    tables: DeploymentTables, target: Target, features: FeatureSet, constants: Mapping[str, float | None]
) -> pl.DataFrame:
    """Return one row per request whose `target` is known, split by time, with warm-up marked."""
    rows = training.alpha_rows(tables.requests, tables.timeline, tables.queue, target)
    rows = split_by_time(add_features(rows, features, constants))
    return mark_warm_up(rows, tables.counters, "at_step")


PROMPT_FEATURES = tuple(
    Feature(f"hit_{name}", unit, formula)
    for name, unit, formula in (
        # With scheduling a step ahead the first decode of a request counts as a prefill of one token.
        ("prompts", "request", "num_prefill_reqs * min(1, max(0, prefill_tokens - num_prefill_reqs))"),
        ("prompt_tokens", "token", "prefill_tokens"),
        ("decodes", "request", "num_decode_reqs"),
        ("contexts", "token", "context_tokens"),
    )
)
"""Evidence of prefix-cache hits in steps that were counted from requests."""


def mark_prefix_hits(rows: pl.DataFrame) -> tuple[pl.DataFrame, dict[str, float]]:
    """Mark intervals of prompts that may be prefix-cache hits, where hits show; remove `PROMPT_FEATURES`.

    Returns:
        The rows; by server with hits, the length in tokens up to which prompts were computed as a whole. It is 0 where
        no prompt is sure to be, and no row of the server is marked then.
    """
    whole_prompts: dict[str, float] = {}
    plain = rows.rename(lambda name: name.removeprefix("hit_"))
    by_request = plain.filter(pl.col("excluded_reason").is_null(), source=REQUEST_SOURCE.name)
    for (_, server), part in by_request.group_by(SERVER, maintain_order=True):
        longest = longest_whole_prompt(part.drop_nulls(["decodes", "contexts", "prompts", "prompt_tokens"]))
        if longest is not None:
            whole_prompts[str(server)] = longest
    tokens = pl.col("hit_prompt_tokens") * pl.col("interval_steps")
    for server, longest in whole_prompts.items():
        if longest:
            rows = mark(rows, PREFIX_HIT, (pl.col("server") == server) & (tokens > longest), holdout=True)
    return rows.drop(f.name for f in PROMPT_FEATURES), whole_prompts


def mark_warm_up(rows: pl.DataFrame, counters: pl.DataFrame, step: str) -> pl.DataFrame:
    """Mark training rows of an epoch's warm-up, 1 % of its steps or 20, whichever is more.

    Args:
        rows: A frame that is split.
        counters: run_id, server, epoch, first_step, last_step.
        step: Column with the step a row began in.
    """
    steps = pl.col("last_step") - pl.col("first_step") + 1
    length = pl.max_horizontal((steps * WARM_UP_SHARE).ceil().cast(pl.Int64), pl.lit(WARM_UP_STEPS))
    ends = counters.select(*SERVER, "epoch", warm_up_until=pl.col("first_step") + length)
    joined = rows.join(ends, on=[*SERVER, "epoch"], how="left", maintain_order="left")
    return mark(joined, WARM_UP, pl.col(step) < pl.col("warm_up_until"))


_WORK_COLUMNS = ("prefill_tokens", "prefill_context_tokens", "num_decode_reqs", "context_tokens")
_PASS_FACTOR = 2.0
_MOST_COMPARED_ROWS = 10_000
"""A recorded step is a warm-up pass where another one with as much work or more, of so many, took less than half of its
time."""


def keep_sweep(rows: pl.DataFrame, timeline: pl.DataFrame) -> pl.DataFrame:
    """Take recorded steps of the warm-up back into training, except warm-up passes.

    A recording server sweeps through batch sizes before the load: small batches may occur only there. The first pass of
    a shape may take 70 times as long as the next.
    """
    work_of = timeline.select(*ENGINE, "step_id", *(pl.col(name).alias(f"_{name}") for name in _WORK_COLUMNS))
    steps = rows.with_row_index("_row").join(work_of, on=[*ENGINE, "step_id"], how="left", maintain_order="left")
    recorded = is_from(lambda source: source.has_sweep, "source")
    early = recorded & (pl.col("excluded_reason") == WARM_UP)
    compared = steps.filter(recorded & (pl.col("excluded_reason").is_null() | early))
    compared = compared.gather_every(max(1, -(-compared.height // _MOST_COMPARED_ROWS)))
    work, time = compared.select(f"_{name}" for name in _WORK_COLUMNS).to_numpy(), compared["y"].to_numpy()
    swept = steps.filter(early).select("_row", "y", *(f"_{name}" for name in _WORK_COLUMNS))
    steady = [
        row
        for row, took, *tokens in swept.iter_rows()
        if time[(work >= tokens).all(axis=1)].min(initial=np.inf) * _PASS_FACTOR >= took
    ]
    back = pl.int_range(pl.len()).is_in(steady)
    return rows.with_columns(excluded_reason=pl.when(~back).then("excluded_reason"))


def counted_rows(rows: pl.DataFrame, split: str) -> pl.DataFrame:
    """Return the rows of a split without the excluded ones."""
    return rows.filter((pl.col("split") == split) & pl.col("excluded_reason").is_null())


def evaluation_rows(holdout: pl.DataFrame, eval_filter: pl.Expr | None) -> pl.DataFrame:
    """Return the held-out rows for the error: those that `eval_filter` selects, or all where it selects fewer than
    100.
    """
    if eval_filter is None:
        return holdout
    selected = holdout.filter(eval_filter)
    return selected if selected.height >= FEW_ROWS else holdout


def of_means(validation: Validation | None) -> bool:
    """Return whether a model's errors are those of means over several steps, because the hold-out has too few single
    steps.
    """
    equations = validation.held_out_equations if validation else None
    if equations is None:
        return False
    of_several = names_of(lambda source: not source.is_one_step)
    means = sum(equations.rows_by_source.get(source, 0) for source in of_several)
    return equations.per_equation.n - means < FEW_ROWS
