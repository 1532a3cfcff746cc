"""Training frames with their split and what is left out of it, as every fit and every judgement of a fit takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from tracefit.features import training
from tracefit.features.sets import FeatureSet, add_features
from tracefit.fit import rows as rules

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tracefit.fit.inputs import ScopeTables


def step_frame(
    tables: ScopeTables,
    timeline: pl.DataFrame,
    features: FeatureSet,
    constants: Mapping[str, float | None],
    source: str,
) -> pl.DataFrame:
    """One row per step or interval of known time, split by time, warm-up and preemption-heavy rows marked.

    Args:
        tables: Tables of one scope.
        timeline: Its timeline, with whatever columns the features need.
        features: What a model is offered.
        constants: What is the same for every row.
        source: `clock` or `duration`, see `training.beta_rows`.
    """
    rows = training.beta_rows(timeline, features, constants, tables.lags, source)
    rows = mark_warm_up(rules.split_by_time(rows), tables.counters, "step_id")
    return rules.mark(rows, rules.PREEMPTION_HEAVY, pl.col("preemption_heavy"))


def request_frame(
    tables: ScopeTables, target: str, features: FeatureSet, constants: Mapping[str, float | None]
) -> pl.DataFrame:
    """One row per request whose `target` is known, split by time, warm-up marked.

    Args:
        tables: Tables of one scope.
        target: queue_wait, admission or departure.
        features: What a model is offered.
        constants: What is the same for every row.
    """
    rows = training.alpha_rows(tables.requests, tables.timeline, tables.queue, target)
    rows = rules.split_by_time(add_features(rows, features, constants))
    return mark_warm_up(rows, tables.counters, "at_step")


def mark_warm_up(rows: pl.DataFrame, counters: pl.DataFrame, step: str) -> pl.DataFrame:
    """Mark training rows of an epoch's warm-up; `step` is the column that says when a row began."""
    ends = rules.warm_up_ends(counters)
    joined = rows.join(ends, on=[*rules.SERVER, "epoch"], how="left", maintain_order="left")
    return rules.mark(joined, rules.WARM_UP, pl.col(step) < pl.col("warm_up_until"))


def counted(rows: pl.DataFrame, split: str) -> pl.DataFrame:
    """Return the rows of a part that are not left out."""
    return rows.filter((pl.col("split") == split) & pl.col("excluded_because").is_null())
