"""The law of a step's time across servers: its terms, with the bounds and priors of their coefficients.

A term is a time at the GPU's rated speed, so that its coefficient is one over an efficiency and means the same on every
server, or a number of kernels, requests or layers, whose coefficient is a time. Bounds and priors come from physics and
are fixed before any fit: they are what makes coefficients that were found on some servers hold on others.

The time is the larger of two sums: the work of the GPU, and, in a step with prompts, whose kernels are not captured in
a CUDA graph, the time to launch them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import polars as pl

from tracefit.features.batches import PADDED_NAMES, batch_formulas
from tracefit.features.roofline import matrix_formulas, number_text, roofline_formulas
from tracefit.features.sets import LAW_SET
from tracefit.models.columns import with_formulas
from tracefit.models.formulas import names_in, parse_formula

if TYPE_CHECKING:
    from tracefit.features.sets import Feature
    from tracefit.server.architecture import Attention, Layer, ModelArchitecture
    from tracefit.server.context import RunContext

_EXACT_LAW_DIGITS = 17
_FILE_LAW_DIGITS = 12

OVERHEAD, MEMORY, COMPUTE, LAUNCH = "always", "memory", "compute", "launch"

LawForm = Literal["sum", "longer"]
"""How memory and compute share a step: one after the other, or side by side, so that the longer one is the time."""


class LawTerm(msgspec.Struct, frozen=True):
    """One term of the law.

    Attributes:
        feature: The amount, and why it counts.
        low: Least coefficient.
        high: Largest coefficient.
        prior: Coefficient that is expected before any step is seen.
        scale: How far from it a coefficient may be as easily as one of another term from its own.
        of: The kind of time: overhead (`always`), memory, compute, or the launches.
        same_server: Whether a sum has it only where all sources are of one model and GPU.
        alike: Name of the terms whose coefficients are expected to be alike; none if empty.
    """

    feature: Feature
    low: float
    high: float
    prior: float
    scale: float
    of: str = OVERHEAD
    same_server: bool = False
    alike: str = ""


def _terms(table: str) -> tuple[LawTerm, ...]:
    """Return the terms of a table: name, least and largest coefficient, prior, scale, the sum that it is in, and what
    it is like.
    """
    features = {feature.name: feature for feature in LAW_SET.features}
    terms = []
    for row in table.splitlines():
        name, low, high, prior, scale, of, *like = (cell.strip() for cell in row.split("|"))
        limit = math.inf if high == "-" else float(high)
        sum_of = of.removeprefix("same ")
        terms.append(
            LawTerm(features[name], float(low), limit, float(prior), float(scale), sum_of, sum_of != of, *like)
        )
    return tuple(terms)


# The memory of a GPU reaches about 0.8 of its rated speed, whatever is read; matrix products 0.65 of theirs. Evenly
# chosen experts are the most that a batch can reach, so that fewer are read than counted; those of 4 bits are unpacked
# on the way. A GPU runs no kernel in less than some microseconds, and launching one from Python takes several times as
# long. The CPU prepares a batch and samples in half a millisecond or two. An all-reduce of a small batch takes 5 to 10
# us between GPUs of one machine, and may send in both directions of a link at once.
LAW_TERMS = _terms("""\
one                     | 0   | -  | 600  | 1000 | always
kernels                 | 0   | -  | 3    | 3    | always
all_reduces             | 0   | -  | 7    | 7    | always
weight_read_us          | 1   | 2  | 1.25 | 1.25 | memory       | reads
moe_expert_read_us      | 0.6 | 2  | 1.2  | 1.2  | memory       | reads
narrow_expert_read_us   | 0   | 2  | 0.5  | 0.5  | memory
decode_kv_read_us       | 0.8 | 3  | 1.25 | 1.25 | memory       | reads
prompt_matrix_us        | 1   | 4  | 1.5  | 1.5  | compute
prompt_attention_us     | 1   | 6  | 1.5  | 3    | compute
decode_matrix_us        | 1   | 6  | 1.5  | 3    | same compute
tp_comm_us              | 0.5 | 20 | 1.5  | 3    | always
prompt_kernels          | 0   | -  | 0    | 20   | always
batch_requests          | 0   | -  | 0    | 40   | always
layers_x_graph_requests | 0   | -  | 0    | 1    | always
launched_small          | 0   | -  | 10   | 10   | launch
launched_large          | 0   | -  | 15   | 15   | launch
""")
"""The terms of the law, in order; `same` marks those that are offered only where all sources are of one model and GPU,
`reads` those that are expected to be alike."""

LAW_BATCH_COLUMNS = (
    "num_prefill_reqs",
    "num_decode_reqs",
    "prefill_tokens",
    "decode_tokens",
    "context_tokens",
    "prefill_context_tokens",
)
"""Columns of a step that the law reads."""

MEMORY_BOUND, COMPUTE_BOUND, GPU_BOUND, LAUNCH_BOUND = (
    *("memory_bound_us", "compute_bound_us"),
    *("gpu_bound_us", "launch_bound_us"),
)
"""Names of the sums in a coefficient file."""


# -- kernels ---------------------------------------------------------------------------------------------


class _Kernels(NamedTuple):
    """Kernels that vLLM runs for each kind of part of a layer, as its model code calls them; some are fused, and some
    more appear.
    """

    attention: int = 7  # norm, projection, split, rotation, write to the cache, attention, output
    latent_attention: int = (
        11  # norm, down, split, norm, up, rotation, write, into the latent, attention, out of it, output
    )
    compressed_attention: int = (
        24  # as latent attention; compression of the cache 5, grouped output 2, hyper-connections 6
    )
    indexer: int = 7  # query, key, norm, rotation, weights, scores, choice
    state: int = 8  # norm, two projections, convolution, gates, recurrence, gated norm, output
    ffn: int = 4  # norm, gate and up, activation, down
    experts: int = 8  # norm, router, choice, order, two grouped products, activation, sum
    shared_experts: int = 3  # gate and up, activation, down
    latent_experts: int = 2  # into the experts' vector, and out of it
    other: int = 1


_KERNELS = _Kernels()


def kernels_of(model: ModelArchitecture) -> int:
    """Return how many kernels a step runs over all layers."""
    return sum(map(_kernels_of_layer, model.stack))


def _kernels_of_layer(layer: Layer) -> int:
    k = _KERNELS
    count = sum(map(_kernels_of_attention, layer.attentions)) + k.ffn * len(layer.ffns)
    count += k.state * (layer.state is not None) + k.other * (layer.other > 0)
    if (moe := layer.experts) is not None:
        count += k.experts + k.shared_experts * (moe.shared_ffn > 0) + k.latent_experts * (moe.latent is not None)
    return count


def _kernels_of_attention(attention: Attention) -> int:
    if attention.compressed is not None:
        own = _KERNELS.compressed_attention
    else:
        own = _KERNELS.attention if attention.latent is None else _KERNELS.latent_attention
    return own + _KERNELS.indexer * (attention.indexer is not None)


# -- one server ------------------------------------------------------------------------------------------


def law_formulas(context: RunContext, *, digits: int = _FILE_LAW_DIGITS) -> dict[str, str]:
    """Return the names in the law's formulas that are not columns, as formulas with a server's numbers in them.

    Args:
        context: A server with a known model and GPU.
        digits: Significant digits of numbers.

    Raises:
        ValueError: Model or GPU is not known.
    """
    model, gpu, tp = context.architecture, context.gpu, context.settings.tensor_parallel or 1
    if model is None or gpu is None:
        raise ValueError("the law needs a model and a GPU")
    batch = batch_formulas(context)
    roofline = roofline_formulas(model, gpu, tp=tp, digits=digits)
    return {
        **roofline,
        **matrix_formulas(model, gpu, tp=tp, digits=digits),
        "kernels": number_text(float(kernels_of(model)), digits),
        "narrow_expert_read_us": roofline["moe_expert_read_us"] if model.expert_weight_bytes < 1 else "0",
        **batch,
        "all_reduces": number_text(float(model.all_reduces if tp > 1 else 0), digits),
        "graph_requests": PADDED_NAMES if PADDED_NAMES in batch else "num_decode_reqs",
    }


def with_law(timeline: pl.DataFrame, context: RunContext) -> pl.DataFrame:
    """Add the names in the law's formulas to the steps of a server, Float64; null without a known model and GPU.

    Where nothing says how much of a prompt was computed before, it is taken to be nothing.
    """
    if context.architecture is None or context.gpu is None:
        names = {name for f in LAW_SET.features for name in names_in(parse_formula(f.formula, where=f.name))}
        return timeline.with_columns(
            pl.lit(None, pl.Float64).alias(name) for name in sorted(names - {*LAW_BATCH_COLUMNS})
        )
    known = timeline.with_columns(
        prefill_context_tokens=pl.col("prefill_context_tokens").fill_null(0),
        context_tokens=pl.when(pl.col("num_decode_reqs") == 0).then(0).otherwise("context_tokens"),
    )
    # In turn: a formula may use the names before it.
    for name, text in law_formulas(context, digits=_EXACT_LAW_DIGITS).items():
        known = with_formulas(known, {name: parse_formula(text, where=name)})
    return known
