"""What a step would take if hardware ran at its rated speed: roofline terms, in microseconds.

Each term is the time of one kind of work on one GPU of a tensor-parallel group, true to the model's own
architecture; a fit finds by how much the real step differs. With T_p, T_d the prefill and decode tokens of a
step, n_p, n_d its prefill and decode requests, and tp ranks:

- visible tokens of a prompt token, on average: v_p = C_p/n_p + T_p/n_p/2, where C_p = `prefill_context_tokens` is the
  sum over prefill requests of the tokens computed before this step. (Query, visible) pairs are T_p·v_p; the
  truth is a sum over requests, which equals it when they are alike.
- visible tokens of a generated token, on average: v_d = `context_tokens`/n_d; pairs are T_d·v_d.
- a layer with a window w sees min(v, w).

`prefill_compute_us` = [T_p·F + Σ_layers P_p·T_p·min(v_p, w) + min(n_p, T_p)·H] / tp / peak, `decode_compute_us` the same of
decode, with F the FLOPs per token in the matrices of all layers (its own experts only), P the FLOPs per pair,
H those of the output head, which only the last token of a request goes through. Peak is the fp16 rate; F runs
at the fp8 rate when the model computes in fp8 and the GPU can.

`prefill_kv_write_us` = T_p·(KV bytes per token)/shards/bandwidth; `decode_kv_read_us` = n_d·Σ_layers min(v_d, w)·(KV bytes
per token and layer)/shards/bandwidth. KV heads fewer than ranks are repeated, so shards = min(tp, KV heads); the
latent of MLA is whole on every rank, shards = 1.

`weight_read_us` = (weights but routed experts and input embedding)/tp/bandwidth in a step that has tokens.
`moe_expert_read_us` = (MoE layers)·(expected distinct experts of T_p + T_d tokens)·(bytes of an expert)/tp/bandwidth, beside
and not within the former. `moe_dispatch_us` = (MoE layers)·2·(T_p + T_d)·k·hidden·bytes/bandwidth: each token's hidden vector goes
to its k experts and back through memory. All three MoE terms are 0 for a dense model.

`tp_comm_us` = (layers)·2·(T_p + T_d)·hidden·bytes·2(tp - 1)/tp/(link/2): two ring all-reduces per layer, over one direction of the
link; PCIe 4.0 x16 where the GPU has no link of its own.

Pipeline stages are not told apart: a term is the work of all layers.

Null in, null out: a term whose columns are unknown is null, save where a count of 0 makes it 0 anyway.
"""

from __future__ import annotations

import operator
from functools import reduce
from typing import TYPE_CHECKING

import polars as pl

from tracefit.errors import DataError
from tracefit.server.hardware import Gpu
from tracefit.server.serving import check_parallelism

if TYPE_CHECKING:
    from tracefit.server.architecture import ModelArchitecture

ROOFLINE_COLUMNS = (
    "num_prefill_reqs",
    "num_decode_reqs",
    "prefill_tokens",
    "decode_tokens",
    "context_tokens",
    "prefill_context_tokens",
)
"""Columns of the timeline that the terms are computed from."""

ROOFLINE_TERMS: dict[str, str] = {
    "prefill_compute_us": "us",
    "decode_compute_us": "us",
    "prefill_kv_write_us": "us",
    "decode_kv_read_us": "us",
    "weight_read_us": "us",
    "tp_comm_us": "us",
    "moe_expert_read_us": "us",
    "moe_dispatch_us": "us",
    "layers": "layer",
    "batch_requests": "request",
    "one": "1",
}
"""Columns that `add_roofline` adds, in order, with their units."""

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
    sources={},
    confidence="given",
)
"""Hardware on which a microsecond is 10^6 FLOPs, or 10^3 bytes: its times are amounts of work."""

_PCIE_GB_S = 64.0  # PCIe 4.0 x16, both directions together


def add_roofline(frame: pl.DataFrame, arch: ModelArchitecture, gpu: Gpu, *, tp: int) -> pl.DataFrame:
    """Add the roofline terms of every step to a timeline.

    Args:
        frame: One row per step, with `ROOFLINE_COLUMNS`.
        arch: The model, as served (`serving.as_served`).
        gpu: One of the GPUs it runs on.
        tp: Tensor-parallel ranks.

    Returns:
        The frame with the columns of `ROOFLINE_TERMS`, all Float64.

    Raises:
        DataError: A column is missing.
        UsageError: The model cannot be divided over `tp` ranks.
    """
    missing = [name for name in ROOFLINE_COLUMNS if name not in frame.columns]
    if missing:
        raise DataError(f"roofline terms need the columns {', '.join(missing)}", hint="rebuild the timeline")
    return frame.with_columns(roofline_expressions(arch, gpu, tp=tp))


def add_work(frame: pl.DataFrame, arch: ModelArchitecture, *, tp: int) -> pl.DataFrame:
    """Add the work of every step: what its roofline terms count, in 10^6 FLOPs and 10^3 bytes, where no GPU is known.

    Args:
        frame: One row per step, with `ROOFLINE_COLUMNS`.
        arch: The model, as served (`serving.as_served`).
        tp: Tensor-parallel ranks.

    Returns:
        The frame with the columns of `WORK_TERMS`, all Float64.

    Raises:
        DataError: A column is missing.
        UsageError: The model cannot be divided over `tp` ranks.
    """
    terms = add_roofline(frame.select(ROOFLINE_COLUMNS), arch, UNIT_HARDWARE, tp=tp)
    return frame.with_columns(terms[term].alias(name) for name, term in WORK_TERMS.items())


def roofline_expressions(arch: ModelArchitecture, gpu: Gpu, *, tp: int) -> list[pl.Expr]:
    """Return one named expression over `ROOFLINE_COLUMNS` for each of `ROOFLINE_TERMS`.

    Args:
        arch: The model, as served (`serving.as_served`).
        gpu: One of the GPUs it runs on.
        tp: Tensor-parallel ranks.

    Raises:
        UsageError: The model cannot be divided over `tp` ranks.
    """
    check_parallelism(arch, tp)
    columns = {name: pl.col(name).cast(pl.Float64) for name in ROOFLINE_COLUMNS}
    prefill, decode = columns["prefill_tokens"], columns["decode_tokens"]
    prefill_reqs, decode_reqs = columns["num_prefill_reqs"], columns["num_decode_reqs"]
    tokens = prefill + decode
    prompt_visible = _mean(columns["prefill_context_tokens"] + prefill / 2, prefill_reqs)
    context = _mean(columns["context_tokens"], decode_reqs)
    bytes_per_us = gpu.memory_bandwidth_gb_s * 1e3
    kv_bytes_per_layer = arch.kv_bytes_per_token_per_layer / arch.kv_shards(tp)
    terms = {
        "prefill_compute_us": _compute_us(
            arch, gpu, tp, (prefill, prefill_reqs, prompt_visible), arch.prefill_pair_flops
        ),
        "decode_compute_us": _compute_us(
            arch, gpu, tp, (decode, decode_reqs, context), arch.decode_pair_flops
        ),
        "prefill_kv_write_us": prefill * (arch.layers * kv_bytes_per_layer / bytes_per_us),
        "decode_kv_read_us": _unless_zero(
            decode_reqs, decode_reqs * _visible(arch, context) * (kv_bytes_per_layer / bytes_per_us)
        ),
        "weight_read_us": _unless_zero(tokens, _like(tokens, arch.fixed_weight_bytes / tp / bytes_per_us)),
        "tp_comm_us": tokens * tp_comm_us_per_token(arch, gpu, tp),
        "moe_expert_read_us": _experts(arch, tokens)
        * (arch.moe_layers * arch.expert_bytes / tp / bytes_per_us),
        "moe_dispatch_us": tokens * (dispatch_bytes_per_token(arch) / bytes_per_us),
        "layers": pl.lit(arch.layers),
        "batch_requests": prefill_reqs + decode_reqs,
        "one": pl.lit(1.0),
    }
    return [term.cast(pl.Float64).alias(name) for name, term in terms.items()]


def _compute_us(
    arch: ModelArchitecture, gpu: Gpu, tp: int, work: tuple[pl.Expr, pl.Expr, pl.Expr], pair_flops: int
) -> pl.Expr:
    """Compute time of one phase; `work` is its tokens, its requests and the visible tokens of one token."""
    tokens, requests, visible = work
    flops_per_us = gpu.compute_tflops_fp16 * 1e6 * tp
    matrix_flops_per_us = flops_per_us
    if arch.fp8_compute and gpu.compute_tflops_fp8 is not None:
        matrix_flops_per_us = gpu.compute_tflops_fp8 * 1e6 * tp
    matrices = tokens * (arch.layer_flops_per_token / matrix_flops_per_us)
    attention = tokens * _visible(arch, visible) * (pair_flops / flops_per_us)
    heads = _smaller(requests, tokens) * (arch.head_flops_per_token / flops_per_us)
    return _unless_zero(tokens, matrices + attention + heads)


def _visible(arch: ModelArchitecture, tokens: pl.Expr) -> pl.Expr:
    """Tokens seen, summed over layers, each no more than its window."""
    parts = (
        (tokens if window is None else tokens.clip(upper_bound=float(window))) * count
        for window, count in arch.window_groups
    )
    return reduce(operator.add, parts)


def _mean(total: pl.Expr, count: pl.Expr) -> pl.Expr:
    """Total per count; 0 of a count of 0, null where either is unknown."""
    return pl.when(count > 0).then(total / count).when(count <= 0).then(0.0)


def _unless_zero(count: pl.Expr, term: pl.Expr) -> pl.Expr:
    """Return the term, or 0 where there is nothing to do, whatever else is unknown."""
    return pl.when(count == 0).then(0.0).otherwise(term)


def _like(column: pl.Expr, value: float) -> pl.Expr:
    """Return a constant for every row in which the column is known."""
    return pl.when(column.is_not_null()).then(pl.lit(value))


def _smaller(left: pl.Expr, right: pl.Expr) -> pl.Expr:
    return pl.when(left <= right).then(left).when(left > right).then(right)


def _experts(arch: ModelArchitecture, tokens: pl.Expr) -> pl.Expr:
    """Distinct experts expected in one MoE layer, as `ModelArchitecture.expected_experts`."""
    if not arch.is_moe:
        return tokens * 0.0
    missed = 1 - arch.experts_per_token / arch.experts
    return arch.experts * (1 - pl.lit(missed).pow(tokens))


def dispatch_bytes_per_token(arch: ModelArchitecture) -> float:
    """Bytes a token moves to its experts and back, over all MoE layers."""
    return arch.moe_layers * 2 * arch.experts_per_token * arch.hidden * arch.dtype_bytes


def tp_comm_us_per_token(arch: ModelArchitecture, gpu: Gpu, tp: int) -> float:
    """Time of a token's share of all all-reduces of a step, in us."""
    link_bytes_per_us = (gpu.link_gb_s or _PCIE_GB_S) / 2 * 1e3
    payload = arch.layers * 2 * arch.hidden * arch.dtype_bytes
    return payload * 2 * (tp - 1) / tp / link_bytes_per_us
