"""What the names in feature formulas stand for: formulas over timeline columns, one server's numbers put in.

A coefficient file that carries these can be evaluated without the model's config.json, the GPU catalogue or tracefit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefit.features.expressions import names_in, parse_formula
from tracefit.features.roofline import (
    UNIT_HARDWARE,
    WORK_TERMS,
    dispatch_bytes_per_token,
    tp_comm_us_per_token,
)
from tracefit.features.training import constants_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tracefit.server.architecture import ModelArchitecture
    from tracefit.server.context import RunContext
    from tracefit.server.hardware import Gpu

_DIGITS = 12


def definitions(formulas: Iterable[str], context: RunContext) -> dict[str, str]:
    """Define every name that the formulas use and that is no column of a step or a request, in name order.

    Args:
        formulas: Formulas of features, or names of them.
        context: The server the numbers are of.
    """
    known = {name: _number(value) for name, value in constants_of(context).items() if value is not None}
    model, gpu = context.architecture, context.gpu
    tp = context.settings.tensor_parallel or 1
    if model is not None:
        known |= work_formulas(model, tp=tp)
    if model is not None and gpu is not None:
        known |= roofline_formulas(model, gpu, tp=tp)
    found: dict[str, str] = {}
    wanted = set().union(*(_names(formula) for formula in formulas))
    while wanted := {name for name in wanted if name in known and name not in found}:
        found |= {name: known[name] for name in wanted}
        wanted = set().union(*(_names(found[name]) for name in wanted))
    return dict(sorted(found.items()))


def _names(formula: str) -> frozenset[str]:
    return names_in(parse_formula(formula, where="feature"))


def roofline_formulas(arch: ModelArchitecture, gpu: Gpu, *, tp: int) -> dict[str, str]:
    """Write the terms of `roofline.add_roofline` as formulas over its columns; equal to them where all are known.

    Args:
        arch: The model, as served.
        gpu: One of the GPUs it runs on.
        tp: Tensor-parallel ranks.
    """
    flops = gpu.compute_tflops_fp16 * 1e6 * tp
    matrix_flops = flops
    if arch.fp8_compute and gpu.compute_tflops_fp8 is not None:
        matrix_flops = gpu.compute_tflops_fp8 * 1e6 * tp
    matrix, head = arch.layer_flops_per_token / matrix_flops, arch.head_flops_per_token / flops
    bytes_per_us = gpu.memory_bandwidth_gb_s * 1e3
    kv = arch.kv_bytes_per_token_per_layer / arch.kv_shards(tp) / bytes_per_us
    expert = arch.moe_layers * arch.expert_bytes / tp / bytes_per_us
    missed = 1 - arch.experts_per_token / arch.experts if arch.is_moe else 0.0
    return {
        "prompt_visible_tokens": "(prefill_context_tokens + prefill_tokens / 2) / num_prefill_reqs",
        "decode_visible_tokens": "context_tokens / num_decode_reqs",
        "prefill_compute_us": _compute(
            "prefill", matrix, arch.prefill_pair_flops / flops, head, _seen(arch, "prompt_visible_tokens")
        ),
        "decode_compute_us": _compute(
            "decode", matrix, arch.decode_pair_flops / flops, head, _seen(arch, "decode_visible_tokens")
        ),
        "prefill_kv_write_us": f"prefill_tokens * {_number(arch.layers * kv)}",
        "decode_kv_read_us": f"num_decode_reqs * ({_seen(arch, 'decode_visible_tokens')}) * {_number(kv)}",
        "weight_read_us": "min(prefill_tokens + decode_tokens, 1) * "
        + _number(arch.fixed_weight_bytes / tp / bytes_per_us),
        "tp_comm_us": f"(prefill_tokens + decode_tokens) * {_number(tp_comm_us_per_token(arch, gpu, tp))}",
        "moe_expert_read_us": f"{_number(arch.experts * expert)} * "
        f"(1 - {_number(missed)} ** (prefill_tokens + decode_tokens))"
        if arch.is_moe
        else "0",
        "moe_dispatch_us": "(prefill_tokens + decode_tokens) * "
        + _number(dispatch_bytes_per_token(arch) / bytes_per_us),
        "layers": _number(float(arch.layers)),
        "batch_requests": "num_prefill_reqs + num_decode_reqs",
        "one": "1",
    }


def work_formulas(arch: ModelArchitecture, *, tp: int) -> dict[str, str]:
    """Write the columns of `roofline.add_work` as formulas over its columns; equal to them where all are known.

    Args:
        arch: The model, as served.
        tp: Tensor-parallel ranks.
    """
    terms = roofline_formulas(arch, UNIT_HARDWARE, tp=tp)
    helpers = {name: terms[name] for name in ("prompt_visible_tokens", "decode_visible_tokens")}
    return {**helpers, **{name: terms[term] for name, term in WORK_TERMS.items()}}


def _compute(phase: str, matrix: float, pair: float, head: float, seen: str) -> str:
    tokens, requests = f"{phase}_tokens", f"num_{phase}_reqs"
    matrices = f"{tokens} * {_number(matrix)}"
    attention = f"{tokens} * ({seen}) * {_number(pair)}"
    return f"{matrices} + {attention} + min({requests}, {tokens}) * {_number(head)}"


def _seen(arch: ModelArchitecture, tokens: str) -> str:
    """Tokens seen, summed over layers, each no more than its window."""
    parts = [
        f"{count} * {tokens if window is None else f'min({tokens}, {window})'}"
        for window, count in arch.window_groups
    ]
    return " + ".join(parts)


def _number(value: float) -> str:
    return f"{value:.{_DIGITS}g}"
