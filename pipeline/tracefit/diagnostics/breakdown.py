"""The parts of durations: a step, by the terms of its model; TTFT, by the intervals of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import polars as pl

from tracefit.diagnostics.groups import US_PER_MS, in_groups
from tracefit.diagnostics.rows import COMPOSITION
from tracefit.models.columns import with_definitions
from tracefit.models.evaluate import CompiledModel
from tracefit.models.formulas import (
    Binary,
    Call,
    Constant,
    Name,
)
from tracefit.models.targets import parts_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tracefit.models.formulas import Node
    from tracefit.models.schema import LinearModel

_QUANTILES = 10

EVERY_STEP = "every step"

STEP_PARTS: Mapping[str, tuple[str, ...]] = {
    EVERY_STEP: ("layers",),
    "weights": (
        "weight_read_us",
        "weight_kb",
        "moe_expert_read_us",
        "expert_kb",
        "experts_read",
        "padded_experts_read",
    ),
    "prompt tokens": (
        *("prefill_compute_us", "prefill_mflop", "prefill_kv_write_us", "kv_write_kb", "prefill_tokens"),
        *("prefill_tokens_squared", "prefill_tokens_x_layers", "prefill_share", "prompt_step"),
    ),
    "generated tokens": ("decode_compute_us", "decode_mflop", "decode_tokens"),
    "context": (
        *("decode_kv_read_us", "kv_read_kb", "context_tokens", "decode_tokens_x_kv_blocks"),
        *("kv_usage_ratio", "prefill_context_tokens"),
    ),
    "requests": (
        *("batch_requests", "num_prefill_reqs", "num_decode_reqs", "num_decode_reqs_squared"),
        *("first_decode_reqs", "running_depth", "padded_decode_reqs"),
    ),
    "waiting requests": ("waiting_depth",),
    "communication": ("tp_comm_us", "moe_dispatch_us"),
}
"""Part to the features that belong to it; any other feature is a part of its own."""

_PART_OF = {feature: part for part, features in STEP_PARTS.items() for feature in features}


class Breakdown(NamedTuple):
    """Durations in groups of equal size from short to long: means of each group, of the parts in ms by name and of the
    whole.
    """

    # Means, not medians: those of the parts add up to that of the whole.
    parts: dict[str, list[float]]
    measured: list[float]
    rows: list[int]
    facts: dict[str, list[float | None]]


def step_breakdown(model: LinearModel, steps: pl.DataFrame) -> Breakdown | None:
    """Return the parts of step times by the terms of their model, short steps first; null where no step has all of
    them.

    `steps` have `measured_ms`, the model's features, and the `timeline` columns of the batch that executed.
    """
    compiled = CompiledModel(model)
    largest = {t.feature: _largest_of(compiled.formulas.nodes.get(t.feature)) for t in model.terms}
    names = {name for sums in largest.values() for one in sums for name in one}
    rows = with_definitions(steps, compiled.formulas, names)
    parts: dict[str, list[pl.Expr]] = {EVERY_STEP: [pl.lit(model.intercept.value)]}
    for term in model.terms:
        sums = largest[term.feature]
        can_split = sums and all(set(one) <= set(rows.columns) for one in sums)
        addends = _split(sums) if can_split else {term.feature: pl.col(term.feature)}
        for name, value in addends.items():
            part = _or_others(_PART_OF.get(name, name), term.collinear_with)
            parts.setdefault(part, []).append(term.value * value)
    us = {name: pl.sum_horizontal(values, ignore_nulls=False) for name, values in parts.items()}
    return _breakdown(rows, us, pl.col("measured_ms"), COMPOSITION)


OR = " or "
"""Between the parts that the time of a term may belong to."""


def _or_others(part: str, collinear: Sequence[str]) -> str:
    """Return the name of a part, with those of the features that go with its own in the training rows."""
    return OR.join(dict.fromkeys([part, *(_PART_OF.get(name, name) for name in collinear)]))


def first_token_breakdown(requests: pl.DataFrame) -> Breakdown | None:
    """Return the parts of the measured TTFT, shortest first; null where no request has all of them."""
    us = {name: pl.col(column) for name, column in first_token_parts().items()}
    facts = {"prompt tokens": pl.col("prompt_tokens")}
    return _breakdown(requests, us, pl.col("ttft_us") / US_PER_MS, facts)


def first_token_parts() -> dict[str, str]:
    """Return the parts of TTFT: name to column of the `requests` table, in us."""
    return {target.label: target.column for target in parts_of("ttft")} | {"prefill": "prefill_us"}


def _breakdown(
    rows: pl.DataFrame, parts_us: Mapping[str, pl.Expr], whole_ms: pl.Expr, facts: Mapping[str, pl.Expr]
) -> Breakdown | None:
    """Sum up rows in groups of equal size by their duration; parts that are zero everywhere are left out."""
    # A part and a fact may have one name.
    columns = {f"part {name}": value / US_PER_MS for name, value in parts_us.items()}
    complete = rows.select(whole=whole_ms, **columns, **facts).drop_nulls(["whole", *columns])
    if complete.height < _QUANTILES:
        return None
    means = in_groups(complete, "whole", _QUANTILES).agg(
        pl.len().alias("rows"), pl.col(["whole", *columns, *facts]).mean()
    )
    return Breakdown(
        {name: means[f"part {name}"].to_list() for name in parts_us if means[f"part {name}"].abs().max()},
        means["whole"].to_list(),
        means["rows"].to_list(),
        {name: means[name].to_list() for name in facts},
    )


_Sum: TypeAlias = dict[str, float]
"""Name to factor."""


def _largest_of(node: Node | None) -> list[_Sum]:
    """Return the sums whose largest is the value of a formula; empty for any other formula."""
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
