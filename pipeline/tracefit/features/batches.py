"""Terms for a batch as the server executes it: padded to a captured CUDA graph, and routed to experts.

vLLM captures CUDA graphs of decode batches at certain sizes and runs a batch at the next larger one, so that
the time of a step is a staircase over its requests. In a mixture of experts, a step reads the experts that
its tokens are routed to. Both are formulas over columns of the timeline with one server's numbers in them, as
a coefficient file carries them.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING

import polars as pl

from tracefit.models.columns import with_formulas
from tracefit.models.formulas import parse_formula

if TYPE_CHECKING:
    from tracefit.server.architecture import ModelArchitecture
    from tracefit.server.context import RunContext

PADDED_NAMES, EXPERTS, PADDED_EXPERTS = "padded_decode_reqs", "experts_read", "padded_experts_read"
BATCH_TERMS = (PADDED_NAMES, EXPERTS, PADDED_EXPERTS)
"""Columns that `add_batch_terms` adds."""

_LARGEST_GRAPH = 512
_STEPS_PER_FORMULA = 8
_FORMULA_DIGITS = 12
_WITHOUT_PROMPTS = "(1 - min(1, num_prefill_reqs))"


def capture_sizes(context: RunContext) -> tuple[int, ...]:
    """Return the batch sizes that CUDA graphs are captured at, in order; empty without graphs, or if they are unknown.

    The sizes are those of the setting, or else the default of vLLM's `_set_cudagraph_sizes`: 1, 2, 4, every
    8th up to 256 and every 16th up to the smaller of 512 and twice `max_num_seqs`.
    """
    settings = context.settings
    if context.gpu is None or settings.enforce_eager or settings.is_sglang:
        return ()
    if stated := _numbers(settings.other.get("cudagraph_capture_sizes")):
        return stated
    default = min(2 * (settings.max_num_seqs or 0), _LARGEST_GRAPH)
    largest = next(iter(_numbers(settings.other.get("max_cudagraph_capture_size"))), default)
    return tuple(n for n in (1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)) if n <= largest)


def _numbers(setting: object) -> tuple[int, ...]:
    """Return the sorted numbers of a setting (a number or a list as JSON text); empty for anything else."""
    try:
        value = json.loads(str(setting))
    except ValueError:
        return ()
    listed = value if isinstance(value, list) else [value]
    return tuple(sorted({n for n in listed if type(n) is int and 0 < n <= _LARGEST_GRAPH * 16}))


def batch_formulas(context: RunContext) -> dict[str, str]:
    """Return the `BATCH_TERMS` that a server's settings determine as formulas, after the helpers these use."""
    sizes, model = capture_sizes(context), context.architecture
    formulas = _staircase(sizes) if sizes else {}
    if model is not None and model.is_moe:
        ranks = context.settings.data_parallel or 1
        formulas[EXPERTS] = _experts(model, "num_decode_reqs", ranks)
        if sizes:
            formulas[PADDED_EXPERTS] = _experts(model, PADDED_NAMES, ranks)
    return formulas


def _staircase(sizes: tuple[int, ...]) -> dict[str, str]:
    """Return the padded size of a batch; a step with prompts, or beyond the largest size, is not padded."""
    steps = [
        f"min(num_decode_reqs, 1) * {sizes[0]}",
        *(f"{b - a} * min(1, max(0, num_decode_reqs - {a}))" for a, b in pairwise(sizes)),
        f"max(0, num_decode_reqs - {sizes[-1]})",
    ]
    parts = {
        f"{PADDED_NAMES}_{first}": " + ".join(steps[first : first + _STEPS_PER_FORMULA])
        for first in range(0, len(steps), _STEPS_PER_FORMULA)
    }
    return {
        **parts,
        PADDED_NAMES: f"min(1, num_prefill_reqs) * num_decode_reqs + {_WITHOUT_PROMPTS} * ({' + '.join(parts)})",
    }


def _experts(model: ModelArchitecture, decodes: str, ranks: int) -> str:
    """Return the distinct experts of a layer that a batch without prompts reads, expected if tokens choose evenly.

    A prompt reads all of them, which is part of the constant cost of a step with prompts: a term with the same amount
    in all such
    steps would stand for the rest of that cost. Ranks of data parallelism share the experts: the tokens of all of them
    count, and the others are taken to have as many.
    """
    missed = f"{1 - model.experts_per_token / model.experts:.{_FORMULA_DIGITS}g}"
    return f"{_WITHOUT_PROMPTS} * {model.experts} * (1 - {missed} ** ({ranks} * {decodes}))"


def add_batch_terms(timeline: pl.DataFrame, context: RunContext) -> pl.DataFrame:
    """Add `BATCH_TERMS` to a timeline, null for a server without them."""
    formulas = batch_formulas(context)
    frame = timeline.with_columns(pl.lit(None, pl.Float64).alias(name) for name in BATCH_TERMS)
    for name, text in formulas.items():
        frame = with_formulas(frame, {name: parse_formula(text, where=name)})
    return frame.drop(formulas.keys() - set(BATCH_TERMS))
