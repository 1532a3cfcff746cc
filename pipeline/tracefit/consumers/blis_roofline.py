"""The step-time terms of BLIS (inference-sim, backend `trained-physics`), by BLIS's definitions.

Coefficients that BLIS loads must be fitted on exactly these terms. Its simplifications are kept on purpose: the head
size is hidden // heads, FFNs have three matrices, KV elements take two bytes, windows and latent attention are unknown,
a MoE model has MoE layers only (Llama 4: one in `interleave_moe_layer_step` + 1), a decode request's context excludes
the token being made, a prefill request's attention sees its whole prompt, and links are as fast as memory.

With d hidden, H heads, d_h = d // H, d_kv = KV heads·d_h, T_p and T_d prefill and decode tokens, peak in FLOP/us, bw in
bytes/us, b bytes per weight, k experts per token, N experts, per MoE layer f = T·k·6·d·(expert width) + T·6·d·(shared
width) and per dense layer f = T·6·d·(FFN width):

- `blis_prefill_compute_us` = [L·2·T_p·d·(2d + 2d_kv) + Σ_layers f + L·4·H·Σ t·(s + t/2)·d_h] / tp / peak, over prefill
  requests with t new tokens of a prompt of s;
- `blis_decode_compute_us`: the same with T_d, and L·4·H·Σc·d_h for contexts c;
- `blis_weight_us` = [L·d·(2d + 2d_kv) + Σ_dense 3·d·(FFN width) + Σ_moe 3·d·(N·(expert width) + (shared width))]·b / tp
  / bw;
- `blis_tp_us` = 2·L·(T_p + T_d)·d·2 B·2·(tp - 1)/tp/bw;
- `blis_prefill_kv_us` = L·2·(d_kv/tp)·2 B·T_p/bw, `blis_decode_kv_us` the same with Σc + T_d.

Source: `sim/latency/trained_physics_model.go` of inference-sim, for one data-parallel rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import polars as pl

from tracefit.errors import DataError, UsageError
from tracefit.features.roofline import ROOFLINE_COLUMNS
from tracefit.tables.schema import ENGINE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracefit.server.architecture import ModelArchitecture
    from tracefit.server.hardware import Gpu
    from tracefit.statistics import Matrix, Vector


PAIRS_COLUMN = "prefill_pairs"
"""Optional column: Σ t·(s + t/2) over prefill requests, as `with_prefill_pairs` computes it; null if unknown.

Without it all prefill requests of a step count as equal, an error of up to 14 % of the prefill compute of a step with
several, and a prompt as long as what is computed of it after the step, which is exact for its last chunk.
"""

BLIS_TERMS: dict[str, str] = {
    "blis_prefill_compute_us": "us",
    "blis_decode_compute_us": "us",
    "blis_weight_us": "us",
    "blis_tp_us": "us",
    "blis_layers": "layer",
    "blis_requests": "request",
    "blis_one": "1",
    "blis_interleaved_moe_layers": "layer",
    "blis_prefill_kv_us": "us",
    "blis_decode_kv_us": "us",
}
"""Terms in the order of BLIS's ten beta coefficients, with their units."""

BLIS_ROOFLINE_TERMS = ("roofline_prefill_us", "roofline_decode_us", "roofline_memory_us")
"""Terms of its backend `roofline` at the peak rates: a step takes the larger of compute (the sum of two) and memory
time."""

# BLIS's constants, whatever the model's data types are.
_KV_BYTES = 2.0
_ACTIVATION_BYTES = 2.0


def add_blis_terms(frame: pl.DataFrame, arch: ModelArchitecture, gpu: Gpu, *, tp: int) -> pl.DataFrame:
    """Add BLIS's terms of every step to a timeline.

    Args:
        frame: One row per step, with `ROOFLINE_COLUMNS` and perhaps `PAIRS_COLUMN`.
        arch: The model, as served (`model_config.as_served`).
        gpu: One of the GPUs it runs on.
        tp: Tensor-parallel ranks.

    Returns:
        The frame with the columns of `BLIS_TERMS`, all Float64; null where a column they need is.

    Raises:
        DataError: A column is missing.
        UsageError: BLIS refuses the model on `tp` ranks.
    """
    missing = [name for name in ROOFLINE_COLUMNS if name not in frame.columns]
    if missing:
        raise DataError(f"BLIS terms need the columns {', '.join(missing)}", hint="rebuild the timeline")
    arch.check_tensor_parallel(tp)
    if arch.kv_heads % tp:
        raise UsageError(f"BLIS needs KV heads ({arch.kv_heads}) divisible by tensor_parallel {tp}", where=arch.name)
    moe_layers = _moe_layers(arch)
    dense_widths = (arch.layers - moe_layers) * arch.ffn
    shared = 0 if _is_llama4(arch) else arch.shared_ffn  # BLIS does not read Llama 4's shared expert
    # Summed FFN widths that a token visits, and that are loaded.
    visited = moe_layers * (max(1, arch.experts_per_token) * arch.expert_ffn + shared) + dense_widths
    loaded = moe_layers * (arch.experts * arch.expert_ffn + shared) + dense_widths
    head_dim = _head_dim(arch)
    kv_width = arch.kv_heads * head_dim
    projections = arch.layers * arch.hidden * (2 * arch.hidden + 2 * kv_width)
    # FLOPs of a token in the matrices, and of a (query, visible) pair.
    token_flops = 2 * projections + 6 * arch.hidden * visited
    pair_flops = arch.layers * 4 * arch.heads * head_dim
    step_weight_bytes = (projections + 3 * arch.hidden * loaded) * _weight_bytes(arch)
    flops_per_us = _flops_per_us(arch, gpu, tp)
    bytes_per_us = gpu.memory_bandwidth_gb_s * 1e3
    kv_us_per_token = arch.layers * 2 * kv_width / tp * _KV_BYTES / bytes_per_us
    all_reduce_bytes = 2 * arch.layers * arch.hidden * _ACTIVATION_BYTES * 2 * (tp - 1) / tp
    prefill_reqs, decode_reqs, prefill, decode, contexts, prefill_contexts = (
        pl.col(name).cast(pl.Float64) for name in ROOFLINE_COLUMNS
    )
    # Σ t·(s + t/2) from sums: exact for one prefill request, and for several alike (n times t/n and s/n).
    prompts = prefill_contexts + prefill
    alike = prefill * (prompts + prefill / 2) / prefill_reqs
    prefill_pairs = pl.coalesce(PAIRS_COLUMN, alike) if PAIRS_COLUMN in frame.columns else alike
    terms = {
        "blis_prefill_compute_us": _where(prefill, (prefill * token_flops + prefill_pairs * pair_flops) / flops_per_us),
        "blis_decode_compute_us": _where(decode, (decode * token_flops + contexts * pair_flops) / flops_per_us),
        "blis_weight_us": pl.lit(step_weight_bytes / tp / bytes_per_us),
        "blis_tp_us": (prefill + decode) * (all_reduce_bytes / bytes_per_us),
        "blis_layers": pl.lit(arch.layers),
        "blis_requests": prefill_reqs + decode_reqs,
        "blis_one": pl.lit(1.0),
        "blis_interleaved_moe_layers": pl.lit(moe_layers if _is_llama4(arch) else 0),
        "blis_prefill_kv_us": prefill * kv_us_per_token,
        "blis_decode_kv_us": _where(decode, (contexts + decode) * kv_us_per_token),
    }
    return frame.with_columns(term.cast(pl.Float64).alias(name) for name, term in terms.items())


def _head_dim(arch: ModelArchitecture) -> int:
    if not arch.heads:
        raise UsageError("BLIS knows no model without attention", where=arch.name)
    return arch.hidden // arch.heads


def _is_llama4(arch: ModelArchitecture) -> bool:
    return arch.is_moe and arch.model_type.startswith("llama4")


def _moe_layers(arch: ModelArchitecture) -> int:
    if _is_llama4(arch):
        # BLIS takes the step for the dense layers between two MoE layers: 24 of Scout's 48 are MoE to it (all are), 16
        # of Maverick's (24).
        interleave_step = arch.moe_layer_ids[0] + 1
        return arch.layers // (interleave_step + 1)
    return arch.layers if arch.is_moe else 0


def _weight_bytes(arch: ModelArchitecture) -> float:
    """Return one width for all matrices: that of the FFNs, which are most of a model."""
    return arch.expert_weight_bytes if arch.is_moe else arch.ffn_weight_bytes


def _flops_per_us(arch: ModelArchitecture, gpu: Gpu, tp: int) -> float:
    """Return the peak that BLIS assumes: fp8 for weights of one byte, where the GPU has it."""
    fp8 = gpu.compute_tflops_fp8 if _weight_bytes(arch) == 1.0 else None
    return tp * ((fp8 or gpu.compute_tflops_fp16) * 1e6)


class RooflineShape(msgspec.Struct, frozen=True):
    """The backend `roofline`: what a step computes and moves, by its definitions, as times at the peak rates in us.

    It differs from the other backend: FFNs have two matrices, a step reads the experts that its tokens are expected to
    choose, vector operations and activations count, and shared experts do not.

    Source: `sim/latency/roofline.go` of inference-sim, August 2026.
    """

    token_us: float
    pair_us: float
    weights_us: float
    experts_us: float
    experts: float
    chosen: float
    kv_us: float
    activation_us: float

    def terms(self, counts: Sequence[Vector | float]) -> Matrix:
        """Return the columns of `BLIS_ROOFLINE_TERMS`, shape (n, 3).

        Args:
            counts: prefill tokens, tokens of their requests in the cache, sum of t * (c + t / 2) over requests that
                compute t tokens with c in the cache, decoding requests, and their tokens in the cache; each of shape
                (n,) or one for all.
        """
        prefill, before, seen, decode, context = np.broadcast_arrays(*map(np.atleast_1d, counts))
        pairs = seen - prefill / 2  # the first of t tokens sees c, the next c + 1
        tokens = prefill + decode
        # It expects N * (1 - ((N - k) / N)^T) experts of N to be chosen.
        missed = (1 - self.chosen / self.experts) ** tokens if self.experts else 1.0
        memory = self.weights_us + self.experts_us * (1 - missed)
        memory = memory + self.kv_us * (tokens + before + context) + self.activation_us * tokens
        compute = (
            count * self.token_us + pairs_of * self.pair_us for count, pairs_of in ((prefill, pairs), (decode, context))
        )
        return np.column_stack([*compute, memory])


def roofline_shape(arch: ModelArchitecture, gpu: Gpu, *, tp: int) -> RooflineShape:
    """Return what the backend `roofline` makes of a model, as served, on `tp` GPUs."""
    moe_layers = _moe_layers(arch)
    hidden, kv_width = arch.hidden, arch.kv_heads * _head_dim(arch)
    projections = arch.layers * hidden * (2 * hidden + 2 * kv_width)
    dense = (arch.layers - moe_layers) * 2 * hidden * arch.ffn
    expert = moe_layers * 2 * hidden * arch.expert_ffn
    weight_bytes, flops_per_us = _weight_bytes(arch), _flops_per_us(arch, gpu, tp)
    bytes_per_us = tp * gpu.memory_bandwidth_gb_s * 1e3
    rope = 2 * arch.layers * hidden
    visited = dense + expert * max(1, arch.experts_per_token)
    return RooflineShape(
        token_us=(2 * projections + rope + 2 * visited) / flops_per_us,
        pair_us=arch.layers * (4 * hidden + 5 * arch.heads) / flops_per_us,
        weights_us=(projections + dense) * weight_bytes / bytes_per_us,
        experts_us=expert * arch.experts * weight_bytes / bytes_per_us,
        experts=arch.experts,
        chosen=arch.experts_per_token,
        kv_us=2 * arch.layers * kv_width * _KV_BYTES / bytes_per_us,
        activation_us=arch.layers * hidden * _ACTIVATION_BYTES / bytes_per_us,
    )


def with_prefill_pairs(timeline: pl.DataFrame, requests: pl.DataFrame) -> pl.DataFrame:
    """Add `PAIRS_COLUMN` to a timeline: BLIS sums over the prefill requests of a step, a summary only has their total.

    A prompt that one step computes follows from its request. For a prompt in chunks, each step computed what the other
    prompts leave of the step's prefill tokens, and the last step computed the rest of the prompt. A step whose tokens
    do not add up (a request that is not traced, or was preempted) is null.

    Args:
        timeline: The `timeline` table: columns of the engine, step_id, prefill_tokens.
        requests: The `requests` table.
    """
    key = [*ENGINE, "step_id"]
    whole_lives = requests.filter(
        pl.all_horizontal(pl.col("first_scheduled_step", "first_token_step", "prompt_tokens").is_not_null())
        & (pl.col("num_preemptions").fill_null(0) == 0)
    ).with_columns(need=pl.col("prompt_tokens") - pl.col("cached_prompt_tokens").fill_null(0))
    in_one = pl.col("first_scheduled_step") == pl.col("first_token_step")
    whole = whole_lives.filter(in_one).select(*ENGINE, "prompt_tokens", step_id="first_scheduled_step", tokens="need")
    filled = whole.group_by(key).agg(filled=pl.col("tokens").sum())
    steps = timeline.select(*key, "prefill_tokens").join(filled, on=key, how="left", maintain_order="left")
    computed = pl.concat([whole, _chunks(whole_lives.filter(~in_one), steps)], how="vertical_relaxed")
    tokens = pl.col("tokens").cast(pl.Float64)
    sums = computed.group_by(key).agg(
        pl.col("tokens").sum(), pairs=(tokens * (pl.col("prompt_tokens") + tokens / 2)).sum()
    )
    rows = timeline.join(sums, on=key, how="left", maintain_order="left")
    even = pl.when(pl.col("tokens") == pl.col("prefill_tokens")).then("pairs")
    return rows.with_columns(even.alias(PAIRS_COLUMN)).drop("tokens", "pairs")


def _chunks(chunked: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Return the tokens that each step computed of each prompt in chunks; prompts scheduled earlier take their tokens
    first.

    Args:
        chunked: Requests whose prompts took several steps, with `need`.
        steps: Columns of the engine, step_id, prefill_tokens and `filled`, tokens of the prompts computed whole.
    """
    kept = chunked.select(*ENGINE, "prompt_tokens").schema
    shape = pl.Schema({**kept, "step_id": pl.Int64(), "tokens": pl.Int64()})
    # `room`: prefill tokens of a step that no prompt accounts for yet. Only of the steps in the timeline: ids may be
    # far apart.
    room = (pl.col("prefill_tokens") - pl.col("filled").fill_null(0)).fill_null(0).clip(lower_bound=0)
    engines = {
        engine: (rows["step_id"].to_numpy(), rows["room"].to_numpy(writable=True))
        for engine, rows in steps.sort("step_id").with_columns(room=room).group_by(ENGINE, maintain_order=True)
    }
    # A loop, for each prompt takes what the earlier ones leave; only prompts in chunks come here.
    rows = []
    ordered = chunked.sort(*ENGINE, "first_scheduled_step", "first_scheduled_ns")
    columns = ordered.select(*ENGINE, "prompt_tokens", "first_scheduled_step", "first_token_step", "need")
    for *engine, prompt, first, last, need in columns.iter_rows():
        if tuple(engine) not in engines:
            continue
        step_ids, left = engines[tuple(engine)]
        span = slice(*np.searchsorted(step_ids, [first, last + 1]))
        taken = np.diff(np.minimum(np.cumsum(left[span]), need), prepend=0)
        if last in step_ids[span]:
            # It computes the rest.
            taken[-1] = need - taken[:-1].sum()
        left[span] = np.maximum(left[span] - taken, 0)
        chunks = zip(step_ids[span].tolist(), taken.tolist(), strict=True)
        rows += [(*engine, prompt, step, tokens) for step, tokens in chunks if tokens > 0]
    return pl.DataFrame(rows, schema=shape, orient="row")


def _where(tokens: pl.Expr, term: pl.Expr) -> pl.Expr:
    """Return the term, 0 in a step without such tokens even if other columns are unknown, null if it is not finite."""
    return pl.when(tokens == 0).then(0.0).when(term.is_finite()).then(term)
