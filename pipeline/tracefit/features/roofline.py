"""Roofline terms: the time in us that each kind of work in a step would take if the hardware ran at its rated speed.

The terms are written once, as formulas over timeline columns with one server's numbers in them (`roofline_formulas`).
A coefficient file carries these formulas, and `add_roofline` compiles the same ones over a frame.

Each term is the time of one kind of work on one GPU of a tensor-parallel group, from the model's own architecture; a
fit finds the factor between it and the measured time. `TERM_FORMULAS` are their formulas, in which

- the visible tokens of a prompt token are, on average, (prefill_context_tokens + prefill_tokens / 2) /
  num_prefill_reqs, and those of a generated token context_tokens / num_decode_reqs; the exact value is a sum
  over requests, which is equal if they are alike. A layer with a window sees no more tokens than that.
- only the last token of a request goes through the output head. The peak is the fp16 rate; the matrices of
  all layers run at the fp8 rate when the model computes in fp8 and the GPU can.
- KV heads fewer than ranks are repeated, so that there are min(tp, KV heads) shards of the cache; the latent
  of MLA is whole on every rank. Pipeline stages are not distinguished: a term is the work of all layers.
- all MoE terms are 0 for a dense model: each token's hidden vector goes to its experts and back through memory.

A term whose columns are unknown is null. Without requests, the cached tokens are 0 even if the timeline has null.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import polars as pl

from tracefit.features.columns import to_polars
from tracefit.features.expressions import parse_formula
from tracefit.server.hardware import Gpu
from tracefit.tables.sources import CycleSource

if TYPE_CHECKING:
    from tracefit.server.architecture import ModelArchitecture
    from tracefit.server.context import RunContext

ROOFLINE_COLUMNS = (
    "num_prefill_reqs",
    "num_decode_reqs",
    "prefill_tokens",
    "decode_tokens",
    "context_tokens",
    "prefill_context_tokens",
)
"""Columns of the timeline that the terms are computed from."""

TERM_FORMULAS: dict[str, str] = {
    "prefill_compute_us": "(prefill_tokens * FLOPS_PER_TOKEN + sum over layers of prefill_tokens * min(visible tokens, WINDOW) * "
    "FLOPS_PER_PAIR + min(num_prefill_reqs, prefill_tokens) * HEAD_FLOPS) / TP / PEAK_FLOPS_PER_US",
    "decode_compute_us": "the same with decode_tokens and num_decode_reqs",
    "prefill_kv_write_us": "prefill_tokens * KV_BYTES_PER_TOKEN / KV_SHARDS / BYTES_PER_US",
    "decode_kv_read_us": "num_decode_reqs * sum over layers of min(visible tokens, WINDOW) * KV_BYTES_PER_TOKEN_AND_LAYER / "
    "KV_SHARDS / BYTES_PER_US",
    "weight_read_us": "min(prefill_tokens + decode_tokens, 1) * WEIGHT_BYTES / TP / BYTES_PER_US",
    "tp_comm_us": "(prefill_tokens + decode_tokens) * 2 * LAYERS * HIDDEN_BYTES * 2 * (TP - 1) / TP / (LINK_BYTES_PER_US / 2)",
    "moe_expert_read_us": "MOE_LAYERS * expected distinct experts of prefill_tokens + decode_tokens * EXPERT_BYTES / TP / BYTES_PER_US",
    "moe_dispatch_us": "(prefill_tokens + decode_tokens) * MOE_LAYERS * 2 * EXPERTS_PER_TOKEN * HIDDEN_BYTES / BYTES_PER_US",
    "layers": "LAYERS",
    "batch_requests": "num_prefill_reqs + num_decode_reqs",
}
"""The terms for a reader: names in capitals are numbers of config.json, the GPU and the settings, which a
coefficient file has."""

ROOFLINE_TERMS = (*TERM_FORMULAS, "one")
"""Columns that `add_roofline` adds, in order."""

WORK_TERMS: dict[str, str] = {
    "prefill_mflop": "prefill_compute_us",
    "decode_mflop": "decode_compute_us",
    "kv_write_kb": "prefill_kv_write_us",
    "kv_read_kb": "decode_kv_read_us",
    "weight_kb": "weight_read_us",
    "expert_kb": "moe_expert_read_us",
}
"""Columns that `add_work` adds, and the roofline term that each is on `UNIT_HARDWARE`."""

UNIT_HARDWARE = Gpu(
    name="1 TFLOP/s, 1 GB/s",
    compute_tflops_fp16=1.0,
    memory_gb=1.0,
    memory_bandwidth_gb_s=1.0,
    confidence="given",
)
"""Hardware on which a microsecond is 10^6 FLOPs, or 10^3 bytes: its times are amounts of work."""

_FILE_DIGITS = 12
"""Significant digits of numbers in the formulas of a file: three more than its coefficients have."""

_EXACT_DIGITS = 17
"""Significant digits that identify a float exactly, for training."""

_HELPERS = ("prompt_visible_tokens", "decode_visible_tokens")
_PCIE_GB_S = 64.0  # PCIe 4.0 x16, both directions added: the slot of GPUs without a direct link


def add_roofline(frame: pl.DataFrame, arch: ModelArchitecture, gpu: Gpu, *, tp: int) -> pl.DataFrame:
    """Add the roofline terms of every step to a timeline: the columns of `ROOFLINE_TERMS`, all Float64.

    The frame has one row per step, with `ROOFLINE_COLUMNS`; the model is as it is served on `tp` such GPUs.

    Raises:
        UsageError: The model cannot be divided over `tp` ranks.
    """
    arch.check_tensor_parallel(tp)
    # Exact numbers: with the 12 digits of files, coefficients would depend on how a formula is printed.
    formulas = roofline_formulas(arch, gpu, tp=tp, digits=_EXACT_DIGITS)
    columns = frame.select(
        *(name for name in ROOFLINE_COLUMNS if not name.endswith("context_tokens")),
        _of_requests("context_tokens", "num_decode_reqs"),
        _of_requests("prefill_context_tokens", "num_prefill_reqs"),
    )
    # Two rounds: the terms are formulas over the helpers.
    for names in (_HELPERS, ROOFLINE_TERMS):
        nodes = {name: parse_formula(formulas[name], where=name) for name in names}
        columns = columns.with_columns(to_polars(node, {}).alias(name) for name, node in nodes.items())
    return frame.with_columns(columns[name] for name in ROOFLINE_TERMS)


def _of_requests(tokens: str, requests: str) -> pl.Expr:
    """Return the cached tokens of a step's requests; 0 without requests, even if the tokens are unknown."""
    return pl.when(pl.col(requests) == 0).then(0).otherwise(pl.col(tokens)).alias(tokens)


def add_work(frame: pl.DataFrame, arch: ModelArchitecture, *, tp: int) -> pl.DataFrame:
    """Add the columns of `WORK_TERMS`, amounts of work in 10^6 FLOPs and 10^3 bytes, as `add_roofline` adds times."""
    terms = add_roofline(frame.select(ROOFLINE_COLUMNS), arch, UNIT_HARDWARE, tp=tp)
    return frame.with_columns(terms[term].alias(name) for name, term in WORK_TERMS.items())


def roofline_formulas(
    arch: ModelArchitecture, gpu: Gpu, *, tp: int, digits: int = _FILE_DIGITS
) -> dict[str, str]:
    """Return `ROOFLINE_TERMS` as formulas over `ROOFLINE_COLUMNS`, and the helpers these are written with.

    The model is as it is served on `tp` such GPUs; numbers in the formulas have `digits` significant digits.
    """
    number = partial(number_text, digits=digits)
    # FLOPs per us over all ranks. Attention runs at the fp16 rate; only the matrices of fp8 models run at the fp8 rate.
    flops = gpu.compute_tflops_fp16 * 1e6 * tp
    fp8_flops = gpu.compute_tflops_fp8 * 1e6 * tp if arch.fp8_compute and gpu.compute_tflops_fp8 else flops
    matrix, head = arch.layer_flops_per_token / fp8_flops, arch.head_flops_per_token / flops
    bytes_per_us = gpu.memory_bandwidth_gb_s * 1e3
    weights = arch.fixed_weight_bytes / tp / bytes_per_us
    kv = arch.kv_bytes_per_token_per_layer / arch.kv_shards(tp) / bytes_per_us
    # `experts * expert` below is the time to read all experts of all MoE layers.
    expert = arch.moe_layers * arch.expert_bytes / tp / bytes_per_us
    # A ring all-reduce, two per layer, moves 2 (tp - 1) / tp of the payload over each link (Patarasuk and Yuan 2009).
    link_bytes_per_us = (gpu.link_gb_s or _PCIE_GB_S) / 2 * 1e3
    all_reduces = arch.layers * 2 * arch.hidden * arch.dtype_bytes * 2 * (tp - 1) / tp / link_bytes_per_us
    prompt_visible, decode_visible = (_visible(arch, tokens) for tokens in _HELPERS)

    def compute(phase: str, pair_flops: int, visible: str) -> str:
        tokens = f"{phase}_tokens"
        attention = f"{tokens} * ({visible}) * {number(pair_flops / flops)}"
        return f"{tokens} * {number(matrix)} + {attention} + min(num_{phase}_reqs, {tokens}) * {number(head)}"

    # An expert is missed by one token with this probability (experts chosen evenly), by all T tokens with its power T:
    # expected distinct experts = experts * (1 - missed ** T).
    dispatch_bytes = arch.moe_layers * 2 * arch.experts_per_token * arch.hidden * arch.dtype_bytes
    tokens = "(prefill_tokens + decode_tokens)"
    missed = 1 - arch.experts_per_token / arch.experts if arch.is_moe else 0.0
    return {
        "prompt_visible_tokens": "(prefill_context_tokens + prefill_tokens / 2) / num_prefill_reqs",
        "decode_visible_tokens": "context_tokens / num_decode_reqs",
        "prefill_compute_us": compute("prefill", arch.prefill_pair_flops, prompt_visible),
        "decode_compute_us": compute("decode", arch.decode_pair_flops, decode_visible),
        "prefill_kv_write_us": f"prefill_tokens * {number(arch.context_layers * kv)}",
        "decode_kv_read_us": f"num_decode_reqs * ({decode_visible}) * {number(kv)}",
        "weight_read_us": f"min(prefill_tokens + decode_tokens, 1) * {number(weights)}",
        "tp_comm_us": f"{tokens} * {number(all_reduces)}",
        "moe_expert_read_us": f"{number(arch.experts * expert)} * (1 - {number(missed)} ** {tokens})"
        if arch.is_moe
        else "0",
        "moe_dispatch_us": f"{tokens} * {number(dispatch_bytes / bytes_per_us)}",
        "layers": number(float(arch.layers)),
        "batch_requests": "num_prefill_reqs + num_decode_reqs",
        "one": "1",
    }


LEAST_TIME = "least_us"
"""Column that `with_least_time` adds."""

_SPARSE_KEY = '"index_topk"'
"""Key of config.json that says that a token reads a choice of the context only."""


def with_least_time(timeline: pl.DataFrame, context: RunContext) -> pl.DataFrame:
    """Add the least time of every step in us that the rated speed of the GPUs allows, as `LEAST_TIME`, Float64.

    It is the time to read the weights and the cached keys and values once at the rated bandwidth, or to compute the tokens at the rated
    speed, whichever is longer. It is a bound, not an estimate: of the experts it reads those of one token, layers with a window count no
    context, prompts no context before them, and the fastest data type counts wherever any weight or the cache has fewer than two bytes. Stages of
    a pipeline, and data-parallel ranks that may share experts, divide it.

    Null where model or GPU is unknown, with speculative decoding, with linear attention of unknown sizes, and where the batch itself is an
    estimate: steps of requests and of clients that may have prefix-cache hits.
    """
    arch, gpu, settings = context.architecture, context.gpu, context.settings
    is_speculative = any(name.startswith(("speculative", "num_speculative")) for name in settings.other)
    if arch is None or gpu is None or is_speculative or (arch.linear_layers and arch.linear is None):
        return timeline.with_columns(pl.lit(None, pl.Float64).alias(LEAST_TIME))
    tp = settings.tensor_parallel or 1
    ranks = tp * (settings.pipeline_parallel or 1) * ((settings.data_parallel or 1) if arch.is_moe else 1)
    bytes_per_us = gpu.memory_bandwidth_gb_s * 1e3
    whole_layers = 0 if _SPARSE_KEY in (context.model_config or "") else arch.layer_windows.count(None)
    prefill, decode = pl.col("prefill_tokens").fill_null(0), pl.col("decode_tokens").fill_null(0)
    prompts, decodes = pl.col("num_prefill_reqs").fill_null(0), pl.col("num_decode_reqs").fill_null(0)
    # Blocks in use are an estimate of the context.
    is_counted = (
        ~pl.col("context_estimated").fill_null(value=False)
        if "context_estimated" in timeline.columns
        else pl.lit(value=True)
    )
    context_tokens = pl.when(is_counted, decodes > 0).then("context_tokens").fill_null(0)
    experts = arch.moe_layers * arch.experts_per_token * arch.expert_bytes
    kv_bytes = context_tokens * (whole_layers * arch.kv_bytes_per_token_per_layer)
    shards = ranks // tp * arch.kv_shards(tp)
    read_us = ((arch.fixed_weight_bytes + experts) / ranks + kv_bytes / shards) / bytes_per_us
    # The sum of the squares of prompts is least where they are equally long.
    pairs = pl.when(prompts > 0).then(prefill**2 / (2 * prompts)).otherwise(0.0)
    heads = pl.min_horizontal(prompts, prefill) + pl.min_horizontal(decodes, decode)
    flops = (
        (prefill + decode) * arch.layer_flops_per_token
        + heads * arch.head_flops_per_token
        + whole_layers * (pairs * arch.prefill_pair_flops + context_tokens * arch.decode_pair_flops)
    )
    least = pl.max_horizontal(read_us, flops / ranks / (_fastest_tflops(arch, gpu) * 1e6))
    is_known = (prefill + decode) > 0
    if settings.enable_prefix_caching is not False:
        is_known &= ~pl.col("cycle_source").is_in(
            [CycleSource.REQUEST.value, CycleSource.CLIENT.value]
        ).fill_null(value=False)
    return timeline.with_columns(pl.when(is_known).then(least.cast(pl.Float64)).alias(LEAST_TIME))


def _fastest_tflops(arch: ModelArchitecture, gpu: Gpu) -> float:
    """Return the highest rate at which a part of the model may compute."""
    fewest = min(arch.attention_weight_bytes, arch.ffn_weight_bytes, arch.expert_weight_bytes, arch.kv_bytes)
    if fewest >= arch.dtype_bytes and arch.quantization is None and not arch.fp8_compute:
        return gpu.compute_tflops_fp16
    # GPUs without fp8 have int8, which is twice as fast as fp16.
    fast = gpu.compute_tflops_fp8 or 2 * gpu.compute_tflops_fp16
    return max(fast, gpu.compute_tflops_fp4 or 0.0) if fewest < 1 else fast


def work_formulas(arch: ModelArchitecture, *, tp: int) -> dict[str, str]:
    """Return `WORK_TERMS` as formulas over `ROOFLINE_COLUMNS`, and the helpers these are written with."""
    terms = roofline_formulas(arch, UNIT_HARDWARE, tp=tp)
    helpers = {name: terms[name] for name in _HELPERS}
    return {**helpers, **{name: terms[term] for name, term in WORK_TERMS.items()}}


def _visible(arch: ModelArchitecture, tokens: str) -> str:
    """Return a formula of the tokens that one token attends to, summed over layers, each no more than its window."""
    reached = (
        (tokens if window is None else f"min({tokens}, {window})", n) for window, n in arch.window_groups
    )
    return " + ".join(f"{layers} * {one}" for one, layers in reached) or "0"


def number_text(value: float, digits: int = _FILE_DIGITS) -> str:
    """Return a number as text for a formula."""
    return f"{value:.{digits}g}"
