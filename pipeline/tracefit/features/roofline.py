"""Roofline terms: the time in us that each kind of work in a step would take if the hardware ran at its rated speed.

The terms are written once, as formulas over timeline columns with one server's numbers in them (`roofline_formulas`).
A coefficient file carries these formulas, and `add_roofline` compiles the same ones over a frame.

Each term is the time of one kind of work on one GPU of a tensor-parallel group, from the model's own architecture; a
fit finds the factor between it and the measured time. `TERM_FORMULAS` are their formulas, in which

- the visible tokens of a prompt token are, on average, (prefill_context_tokens + prefill_tokens / 2) /
  num_prefill_reqs, and those of a generated token context_tokens / num_decode_reqs; the exact value is a sum
  over requests, which is equal if they are alike. A layer with a window sees no more tokens than that.
  Where a cached entry stands for several tokens, each of them costs its share of the entry.
- only the last token of a request goes through the output head. The peak is the fp16 rate; the matrices of
  all layers run at the fp8 rate when the model computes in fp8 and the GPU can.
- KV heads fewer than ranks are repeated, so that there are min(tp, KV heads) shards of the cache; the latent
  of MLA is whole on every rank. Pipeline stages are not distinguished: a term is the work of all layers.
- all MoE terms are 0 for a dense model: each token's hidden vector goes to its experts and back through memory.

A term whose columns are unknown is null. Without requests, the cached tokens are 0 even if the timeline has null.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import starmap
from typing import TYPE_CHECKING

import polars as pl

import tracefit.recordings  # noqa: F401 - declares the sources of recorded steps
from tracefit.models.columns import with_formulas
from tracefit.models.formulas import parse_formula
from tracefit.server.hardware import Gpu
from tracefit.server.settings import SPECULATION
from tracefit.tables.sources import is_from

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tracefit.server.architecture import CacheRead, Experts, ModelArchitecture
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
    "prefill_compute_us": "(prefill_tokens * FLOPS_PER_TOKEN + sum over layers of prefill_tokens * min(visible "
    "tokens, WINDOW) * FLOPS_PER_PAIR + min(num_prefill_reqs, prefill_tokens) * HEAD_FLOPS) / "
    "TP / PEAK_FLOPS_PER_US",
    "decode_compute_us": "the same with decode_tokens and num_decode_reqs",
    "prefill_kv_write_us": "prefill_tokens * KV_BYTES_PER_TOKEN / KV_SHARDS / BYTES_PER_US",
    "decode_kv_read_us": "num_decode_reqs * sum over layers of min(visible tokens, WINDOW) * "
    "KV_BYTES_PER_TOKEN_AND_LAYER / KV_SHARDS / BYTES_PER_US",
    "weight_read_us": "min(prefill_tokens + decode_tokens, 1) * WEIGHT_BYTES / TP / BYTES_PER_US",
    "tp_comm_us": (
        "(prefill_tokens + decode_tokens) * ALL_REDUCES * HIDDEN_BYTES * 2 * (TP - 1) / TP / (LINK_BYTES_PER_US / 2)"
    ),
    "moe_expert_read_us": (
        "MOE_LAYERS * expected distinct experts of prefill_tokens + decode_tokens * EXPERT_BYTES / TP / BYTES_PER_US"
    ),
    "moe_dispatch_us": (
        "(prefill_tokens + decode_tokens) * MOE_LAYERS * 2 * EXPERTS_PER_TOKEN * HIDDEN_BYTES / BYTES_PER_US"
    ),
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

_MOST_COSTS = 3
"""Different costs of a visible token that a formula lists; with more it would be longer than formulas may be."""

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
        columns = with_formulas(columns, nodes)
    return frame.with_columns(columns[name] for name in ROOFLINE_TERMS)


def _of_requests(tokens: str, requests: str) -> pl.Expr:
    """Return the cached tokens of a step's requests; 0 without requests, even if the tokens are unknown."""
    return pl.when(pl.col(requests) == 0).then(0).otherwise(pl.col(tokens)).alias(tokens)


def add_work(frame: pl.DataFrame, arch: ModelArchitecture, *, tp: int) -> pl.DataFrame:
    """Add the columns of `WORK_TERMS`, amounts of work in 10^6 FLOPs and 10^3 bytes, as `add_roofline` adds times."""
    terms = add_roofline(frame.select(ROOFLINE_COLUMNS), arch, UNIT_HARDWARE, tp=tp)
    return frame.with_columns(terms[term].alias(name) for name, term in WORK_TERMS.items())


def roofline_formulas(arch: ModelArchitecture, gpu: Gpu, *, tp: int, digits: int = _FILE_DIGITS) -> dict[str, str]:
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
    readings = arch.readings(tp)
    # Layers with equal costs are counted first, so that windows do not change the last digits of a sum.
    writes: Counter[float] = Counter()
    for attention, n in arch.attentions.items():
        writes[attention.cached_bytes(arch.kv_bytes) / attention.kv_shards(tp) / bytes_per_us] += n
    written = sum(n * cost for cost, n in writes.items())
    # A ring all-reduce, one after each part of a layer, moves 2 (tp - 1) / tp of the payload over each link (Patarasuk
    # and Yuan 2009).
    link_bytes_per_us = (gpu.link_gb_s or _PCIE_GB_S) / 2 * 1e3
    all_reduces = arch.all_reduces * arch.hidden * arch.dtype_bytes * 2 * (tp - 1) / tp / link_bytes_per_us
    prompt_tokens, decode_tokens = _HELPERS

    def compute(phase: str, seen: str, flops_of: Callable[[CacheRead], float]) -> str:
        tokens = f"{phase}_tokens"
        pairs = _visible(readings, seen, lambda reading: flops_of(reading) / flops)
        attention = " + ".join(f"{tokens} * ({visible}) * {number(cost)}" for cost, visible in pairs) or "0"
        return f"{tokens} * {number(matrix)} + {attention} + min(num_{phase}_reqs, {tokens}) * {number(head)}"

    read = " + ".join(
        f"num_decode_reqs * ({visible}) * {number(cost)}"
        for cost, visible in _visible(
            readings, decode_tokens, lambda reading: reading.cached_bytes / reading.shards / bytes_per_us
        )
    )

    def experts_read(moe: Experts, layers: int) -> str:
        # An expert is missed by one token with this probability (experts chosen evenly), by all T tokens with its power
        # T: expected distinct experts = experts * (1 - missed ** T).
        missed = 1 - moe.per_token / moe.count
        all_of_them = moe.count * (layers * arch.bytes_of_expert(moe) / tp / bytes_per_us)
        return f"{number(all_of_them)} * (1 - {number(missed)} ** {tokens})"

    tokens = "(prefill_tokens + decode_tokens)"
    dispatch_bytes = sum(
        n * 2 * moe.per_token * (moe.latent or arch.hidden) * arch.dtype_bytes for moe, n in arch.moes.items()
    )
    return {
        "prompt_visible_tokens": "(prefill_context_tokens + prefill_tokens / 2) / num_prefill_reqs",
        "decode_visible_tokens": "context_tokens / num_decode_reqs",
        "prefill_compute_us": compute("prefill", prompt_tokens, lambda r: r.prefill_pair_flops),
        "decode_compute_us": compute("decode", decode_tokens, lambda r: r.decode_pair_flops),
        "prefill_kv_write_us": f"prefill_tokens * {number(written)}",
        "decode_kv_read_us": read or "0",
        "weight_read_us": f"min(prefill_tokens + decode_tokens, 1) * {number(weights)}",
        "tp_comm_us": f"{tokens} * {number(all_reduces)}",
        "moe_expert_read_us": " + ".join(starmap(experts_read, arch.moes.items())) or "0",
        "moe_dispatch_us": f"{tokens} * {number(dispatch_bytes / bytes_per_us)}",
        "layers": number(float(arch.layers)),
        "batch_requests": "num_prefill_reqs + num_decode_reqs",
        "one": "1",
    }


def matrix_formulas(arch: ModelArchitecture, gpu: Gpu, *, tp: int, digits: int = _FILE_DIGITS) -> dict[str, str]:
    """Return the compute of a step by kind: matrices and attention of prompt tokens, and matrices of generated ones, in
    us at the GPU's peak.

    Formulas over `ROOFLINE_COLUMNS` and the helpers of `roofline_formulas`.
    """
    number = partial(number_text, digits=digits)
    flops = gpu.compute_tflops_fp16 * 1e6 * tp
    fp8_flops = gpu.compute_tflops_fp8 * 1e6 * tp if arch.fp8_compute and gpu.compute_tflops_fp8 else flops
    matrix, head = arch.layer_flops_per_token / fp8_flops, arch.head_flops_per_token / flops
    pairs = _visible(arch.readings(tp), _HELPERS[0], lambda reading: reading.prefill_pair_flops / flops)
    return {
        "prompt_matrix_us": (
            f"prefill_tokens * {number(matrix)} + min(num_prefill_reqs, prefill_tokens) * {number(head)}"
        ),
        "prompt_attention_us": " + ".join(f"prefill_tokens * ({visible}) * {number(cost)}" for cost, visible in pairs)
        or "0",
        "decode_matrix_us": f"decode_tokens * {number(matrix + head)}",
    }


LEAST_TIME = "least_us"
"""Column that `with_least_time` adds."""


def with_least_time(timeline: pl.DataFrame, context: RunContext) -> pl.DataFrame:
    """Add the least time of every step in us that the rated speed of the GPUs allows, as `LEAST_TIME`, Float64.

    It is the time to read the weights and the cached keys and values once at the rated bandwidth, or to compute the
    tokens at the rated
    speed, whichever is longer. It is a bound, not an estimate: of the experts it reads those of one token, layers with
    a window, or that choose the tokens they read, count no context, prompts no context before them, and the fastest
    data type counts wherever any weight or the cache has fewer than two bytes. Stages of a pipeline, and data-parallel
    ranks that may share experts, divide it.

    Null where model or GPU is unknown, with speculative decoding, and where the batch itself is an
    estimate: steps of requests and of clients that may have prefix-cache hits.
    """
    arch, gpu, settings = context.architecture, context.gpu, context.settings
    is_speculative = any(name.startswith(SPECULATION) for name in settings.other)
    if arch is None or gpu is None or is_speculative:
        return timeline.with_columns(pl.lit(None, pl.Float64).alias(LEAST_TIME))
    tp = settings.tensor_parallel or 1
    ranks = tp * (settings.pipeline_parallel or 1) * ((settings.data_parallel or 1) if arch.is_moe else 1)
    bytes_per_us = gpu.memory_bandwidth_gb_s * 1e3
    whole = [(reading, n) for reading, n in arch.readings(tp) if reading.window is None]
    prefill, decode = pl.col("prefill_tokens").fill_null(0), pl.col("decode_tokens").fill_null(0)
    prompts, decodes = pl.col("num_prefill_reqs").fill_null(0), pl.col("num_decode_reqs").fill_null(0)
    # Blocks in use are an estimate of the context.
    is_counted = (
        ~pl.col("context_estimated").fill_null(value=False)
        if "context_estimated" in timeline.columns
        else pl.lit(value=True)
    )
    context_tokens = pl.when(is_counted, decodes > 0).then("context_tokens").fill_null(0)
    experts = sum(n * moe.per_token * arch.bytes_of_expert(moe) for moe, n in arch.moes.items())
    kv_bytes = sum(n * reading.cached_bytes / reading.shards for reading, n in whole)
    read_us = ((arch.fixed_weight_bytes + experts) / ranks + context_tokens * (kv_bytes / (ranks // tp))) / bytes_per_us
    # The sum of the squares of prompts is least where they are equally long.
    pairs = pl.when(prompts > 0).then(prefill**2 / (2 * prompts)).otherwise(0.0)
    heads = pl.min_horizontal(prompts, prefill) + pl.min_horizontal(decodes, decode)
    flops = (
        (prefill + decode) * arch.layer_flops_per_token
        + heads * arch.head_flops_per_token
        + pairs * sum(n * reading.prefill_pair_flops for reading, n in whole)
        + context_tokens * sum(n * reading.decode_pair_flops for reading, n in whole)
    )
    least = pl.max_horizontal(read_us, flops / ranks / (_fastest_tflops(arch, gpu) * 1e6))
    is_known = (prefill + decode) > 0
    if settings.enable_prefix_caching is not False:
        is_known &= ~is_from(lambda source: source.from_requests)
    return timeline.with_columns(pl.when(is_known).then(least.cast(pl.Float64)).alias(LEAST_TIME))


def _fastest_tflops(arch: ModelArchitecture, gpu: Gpu) -> float:
    """Return the highest rate at which a part of the model may compute."""
    fewest = min(
        *(arch.attention_weight_bytes, arch.state_weight_bytes, arch.ffn_weight_bytes),
        *(arch.shared_weight_bytes, arch.expert_weight_bytes, arch.head_weight_bytes, arch.kv_bytes),
    )
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


def _visible(
    readings: Sequence[tuple[CacheRead, int]], tokens: str, cost: Callable[[CacheRead], float]
) -> list[tuple[float, str]]:
    """Return each cost of a visible token, and a formula of the tokens that one token sees at it.

    The tokens are summed over layers, each no more than its window; the costs of each window are summed instead if they
    are many.
    """

    def seen(window: int | None) -> str:
        return tokens if window is None else f"min({tokens}, {window})"

    groups: dict[float, Counter[int | None]] = {}
    for reading, n in readings:
        groups.setdefault(cost(reading), Counter())[reading.window] += n
    if len(groups) > _MOST_COSTS:
        sums: dict[int | None, float] = {}
        for reading, n in readings:
            sums[reading.window] = sums.get(reading.window, 0.0) + n * cost(reading)
        return [(total, seen(window)) for window, total in sums.items()]
    return [
        (
            one,
            " + ".join(
                f"{layers} * {seen(window)}"
                for window, layers in sorted(windows.items(), key=lambda item: (item[0] is not None, item[0] or 0))
            ),
        )
        for one, windows in groups.items()
    ]


def number_text(value: float, digits: int = _FILE_DIGITS) -> str:
    """Return a number as text for a formula."""
    return f"{value:.{digits}g}"
