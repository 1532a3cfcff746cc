"""What durations consist of: step times by what the model charges for, and TTFT by what a request waits for.

A step's prediction is a sum of terms, so each term's share of it is known exactly. A term that is the larger of two sums
(compute or memory) is split into the addends of the larger one. Addends of one kind, such as everything that grows with
prompt tokens, are one part: a reader asks what a prompt costs, not what `prefill_mflop` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import polars as pl

from tracefit.coefficients.compiled import CompiledModel
from tracefit.features.expressions import Binary, Call, Constant, Name
from tracefit.results.figures import US_PER_MS, Breakdown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tracefit.coefficients.model import LinearModel
    from tracefit.features.expressions import Node

GROUPS = 10
EVERY_STEP = "every step"

_PARTS: Mapping[str, tuple[str, ...]] = {
    EVERY_STEP: ("layers",),
    "weights": ("weight_read_us", "weight_kb", "moe_expert_read_us", "expert_kb"),
    "prompt tokens": (
        "prefill_compute_us",
        "prefill_mflop",
        "prefill_kv_write_us",
        "kv_write_kb",
        "prefill_tokens",
        "prefill_tokens_squared",
        "prefill_tokens_x_layers",
        "prefill_share",
    ),
    "generated tokens": ("decode_compute_us", "decode_mflop", "decode_tokens"),
    "context": (
        "decode_kv_read_us",
        "kv_read_kb",
        "context_tokens",
        "decode_tokens_x_kv_blocks",
        "kv_usage_ratio",
    ),
    "requests": (
        "batch_requests",
        "num_prefill_reqs",
        "num_decode_reqs",
        "num_decode_reqs_squared",
        "first_decode_reqs",
        "running_depth",
    ),
    "waiting requests": ("waiting_depth",),
    "communication": ("tp_comm_us", "moe_dispatch_us"),
}
"""Part to the features that belong to it; any other feature is a part of its own."""

_PART_OF = {feature: part for part, features in _PARTS.items() for feature in features}

COMPOSITION = {
    "requests": pl.col("num_prefill_reqs") + pl.col("num_decode_reqs"),
    "prompt tokens": pl.col("prefill_tokens"),
    "generated tokens": pl.col("decode_tokens"),
    "context tokens": pl.col("context_tokens"),
}
"""What a reader sees of a step, over columns of the `timeline` table."""


def step_breakdown(model: LinearModel, steps: pl.DataFrame) -> Breakdown | None:
    """Return what step times consist of by the terms of their model, short steps first.

    Args:
        model: The model of step times.
        steps: Steps with `measured_ms`, the model's features, and the `timeline` columns of the batch that executed.

    Returns:
        Null where no step has everything that is needed.
    """
    compiled = CompiledModel(model)
    largest = {t.feature: _largest_of(compiled.formulas.nodes.get(t.feature)) for t in model.terms}
    known = compiled.formulas.frame(
        steps, {name for sums in largest.values() for one in sums for name in one}
    )
    parts: dict[str, list[pl.Expr]] = {EVERY_STEP: [pl.lit(model.intercept.value)]}
    for term in model.terms:
        sums = largest[term.feature]
        can_split = sums and all(set(one) <= set(known.columns) for one in sums)
        addends = _split(sums) if can_split else {term.feature: pl.col(term.feature)}
        for name, value in addends.items():
            parts.setdefault(_PART_OF.get(name, name), []).append(term.value * value)
    ms = {name: pl.sum_horizontal(values, ignore_nulls=False) / US_PER_MS for name, values in parts.items()}
    return _grouped(known, ms, pl.col("measured_ms"), COMPOSITION)


def first_token_breakdown(requests: pl.DataFrame) -> Breakdown | None:
    """Return what the measured TTFT consists of, requests with the shortest first.

    Args:
        requests: Rows of the `requests` table.

    Returns:
        Null where no request has all of its parts.
    """
    parts = {"admission": "admission_us", "queue": "queue_wait_us", "prefill": "prefill_us"}
    return _grouped(
        requests,
        {name: pl.col(column) / US_PER_MS for name, column in parts.items()},
        pl.col("ttft_us") / US_PER_MS,
        {"prompt tokens": pl.col("prompt_tokens")},
    )


def _grouped(
    rows: pl.DataFrame, parts: Mapping[str, pl.Expr], duration: pl.Expr, facts: Mapping[str, pl.Expr]
) -> Breakdown | None:
    """Sum up rows in groups of equal size by their duration; parts that are zero everywhere are left out."""
    columns = {f"part {k}": value for k, value in enumerate(parts.values())}
    known = rows.select(duration=duration, **columns, **facts).drop_nulls(["duration", *columns])
    if known.height < GROUPS:
        return None
    group = (pl.int_range(pl.len()) * GROUPS // pl.len()).alias("group")
    means = (
        known.sort("duration")
        .with_columns(group)
        .group_by("group", maintain_order=True)
        .agg(pl.len().alias("rows"), pl.col(["duration", *columns, *facts]).mean())
    )
    found = {name: means[column] for name, column in zip(parts, columns, strict=True)}
    return Breakdown(
        parts={name: tuple(values) for name, values in found.items() if values.abs().max()},
        measured=tuple(means["duration"]),
        rows=tuple(means["rows"]),
        facts={name: tuple(means[name]) for name in facts},
    )


_Sum: TypeAlias = dict[str, float]
"""Name to factor."""


def _largest_of(node: Node | None) -> list[_Sum]:
    """Return the sums that a formula is the largest of; none for any other formula."""
    if not isinstance(node, Call) or node.function != "max":
        return []
    sums = [_addends(argument) for argument in node.arguments]
    return [one for one in sums if one is not None] if None not in sums else []


def _split(sums: list[_Sum]) -> dict[str, pl.Expr]:
    """Return the addends of the largest of several sums, row by row: 0 where their sum is not the largest."""
    addends = [{name: factor * pl.col(name) for name, factor in one.items()} for one in sums]
    wholes = [pl.sum_horizontal(one.values(), ignore_nulls=False) for one in addends]
    largest = pl.concat_list(wholes).list.arg_max()
    return {
        name: pl.when(largest == k).then(value).otherwise(0.0)
        for k, one in enumerate(addends)
        for name, value in one.items()
    }


def _addends(node: Node, factor: float = 1.0) -> _Sum | None:
    """Return name to factor of a sum of names; null for any other formula."""
    match node:
        case Name(name):
            return {name: factor}
        case Binary("+", left, right):
            first, second = _addends(left, factor), _addends(right, factor)
            return None if first is None or second is None else first | second
        case Binary("*", Constant(value), other) | Binary("*", other, Constant(value)):
            return _addends(other, factor * value)
        case _:
            return None
