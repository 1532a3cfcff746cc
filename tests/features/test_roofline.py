"""Roofline terms, by hand arithmetic on a GPU of 1000 FLOP/us and 1000 bytes/us; and the formulas that files carry of
them."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import polars as pl
import pytest

from tracefit.errors import UsageError
from tracefit.features.roofline import (
    LEAST_TIME,
    ROOFLINE_COLUMNS,
    ROOFLINE_TERMS,
    WORK_TERMS,
    add_roofline,
    add_work,
    roofline_formulas,
    with_least_time,
    work_formulas,
)
from tracefit.features.training import definitions
from tracefit.models.amounts import known
from tracefit.models.formulas import computation, names_in, parse_formula
from tracefit.server.architecture import LatentAttention
from tracefit.server.context import RunContext
from tracefit.server.hardware import find_gpu
from tracefit.server.settings import ServerSettings, settings_from


def terms(frame, arch, gpu, tp=1):
    return add_roofline(frame, arch, gpu, tp=tp).select(list(ROOFLINE_TERMS)).row(0, named=True)


def test_dense_model_on_one_gpu(step, dense, gpu):
    # Each prompt token sees 10/2 + 20/2/2 = 10 tokens, each generated one 30/3 = 10.
    assert terms(step, dense, gpu) == pytest.approx(
        {
            "prefill_compute_us": (20 * 2304 + 20 * 10 * 2 * 32 + 2 * 160) / 1000,
            "decode_compute_us": (3 * 2304 + 3 * 10 * 2 * 32 + 3 * 160) / 1000,
            "prefill_kv_write_us": 20 * 32 / 1000,
            "decode_kv_read_us": 3 * 10 * 32 / 1000,
            "weight_read_us": 2464 / 1000,
            "tp_comm_us": 0.0,
            "moe_expert_read_us": 0.0,
            "moe_dispatch_us": 0.0,
            "layers": 2.0,
            "batch_requests": 5.0,
            "one": 1.0,
        }
    )


def test_two_ranks_halve_the_work_but_not_the_one_kv_head(step, dense, gpu):
    one, two = terms(step, dense, gpu), terms(step, dense, gpu, tp=2)

    for name in ("prefill_compute_us", "decode_compute_us", "weight_read_us"):
        assert two[name] == pytest.approx(one[name] / 2)
    for name in ("prefill_kv_write_us", "decode_kv_read_us"):
        assert two[name] == one[name]
    # 2 layers, 2 all-reduces, 23 tokens of 8 elements of 2 bytes, 2·(2 - 1)/2 times over the link
    assert two["tp_comm_us"] == pytest.approx(2 * 2 * 23 * 8 * 2 / 1000)


def test_moe_model(moe, gpu):
    step = pl.DataFrame(dict(zip(ROOFLINE_COLUMNS, [[0], [2], [0], [2], [8], [0]], strict=True)))
    computed = terms(step, moe, gpu)

    assert computed["decode_compute_us"] == pytest.approx((2 * 3968 + 2 * 4 * 3 * 32 + 2 * 160) / 1000)
    assert computed["weight_read_us"] == pytest.approx(2.976)
    assert computed["moe_expert_read_us"] == pytest.approx(2 * 3 * 288 / 1000)
    assert computed["moe_dispatch_us"] == pytest.approx(2 * 2 * 2 * 2 * 8 * 2 / 1000)
    assert computed["prefill_compute_us"] == computed["prefill_kv_write_us"] == 0.0


def test_kv_heads_are_divided_over_ranks(step, moe, gpu):
    computed = terms(step, moe, gpu, tp=2)

    assert computed["prefill_kv_write_us"] == pytest.approx(20 * 3 * 32 / 2 / 1000)
    assert computed["decode_kv_read_us"] == pytest.approx(3 * 10 * 3 * 32 / 2 / 1000)


@pytest.mark.parametrize("tokens", [1, 2, 7, 500])
def test_moe_step_reads_the_experts_it_is_expected_to_visit(moe, gpu, tokens):
    """2,976 bytes that every step reads, and in 2 layers 4 · (1 - (2/4)^tokens) experts of 288 bytes."""
    step = pl.DataFrame(dict(zip(ROOFLINE_COLUMNS, [[1], [0], [tokens], [0], [0], [0]], strict=True)))
    computed = terms(step, moe, gpu, tp=2)
    read_us = computed["weight_read_us"] + computed["moe_expert_read_us"]

    assert read_us == pytest.approx((2976 + 2 * 4 * (1 - 0.5**tokens) * 288) / 2 / 1000)


def test_window_caps_reads_and_pairs_of_its_layers(step, dense, gpu, with_attention):
    computed = terms(step, with_attention(dense, windows=(None, 4)), gpu)

    assert computed["decode_kv_read_us"] == pytest.approx(3 * (10 + 4) * 16 / 1000)
    assert computed["prefill_compute_us"] == pytest.approx((20 * 2304 + 20 * (10 + 4) * 32 + 320) / 1000)
    assert computed["decode_compute_us"] == pytest.approx((3 * 2304 + 3 * (10 + 4) * 32 + 480) / 1000)
    assert computed["prefill_kv_write_us"] == pytest.approx(20 * 32 / 1000)


@pytest.mark.parametrize(("windows", "context_layers"), [((0, None), 1), ((0, 0), 0)])
def test_layers_of_linear_attention_have_no_context(step, dense, gpu, with_attention, windows, context_layers):
    computed = terms(step, with_attention(dense, windows=windows), gpu)

    assert computed["prefill_kv_write_us"] == pytest.approx(context_layers * 20 * 16 / 1000)
    assert computed["decode_kv_read_us"] == pytest.approx(context_layers * 3 * 10 * 16 / 1000)
    assert computed["decode_compute_us"] == pytest.approx((3 * 2304 + context_layers * 3 * 10 * 32 + 3 * 160) / 1000)
    assert computed["layers"] == 2.0


def test_latent_attention_is_whole_on_every_rank(step, dense, gpu, with_attention):
    latent = LatentAttention(q_lora_rank=None, kv_lora_rank=6, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=4)
    arch = with_attention(dense, latent=latent, kv_heads=2, head_dim=5)
    computed = terms(step, arch, gpu, tp=2)
    layer_flops = 2 * 2 * (292 + 384)

    assert computed["prefill_kv_write_us"] == pytest.approx(20 * 2 * 16 / 1000)
    assert computed["prefill_compute_us"] == pytest.approx((20 * layer_flops + 20 * 10 * 2 * 36 + 320) / 2 / 1000)
    assert computed["decode_compute_us"] == pytest.approx((3 * layer_flops + 3 * 10 * 2 * 56 + 480) / 2 / 1000)


def test_fp8_doubles_the_rate_of_the_matrices_alone(step, dense, gpu):
    fast = replace(gpu, compute_tflops_fp8=0.002)
    arch = msgspec.structs.replace(dense, fp8_compute=True)

    assert terms(step, arch, fast)["prefill_compute_us"] == pytest.approx((20 * 2304 / 2 + 12800 + 320) / 1000)
    assert terms(step, dense, fast) == terms(step, dense, gpu)
    assert terms(step, arch, gpu) == terms(step, dense, gpu)  # this GPU has no fp8


def test_fp8_rate_is_that_of_every_rank(step, dense, gpu):
    fast = replace(gpu, compute_tflops_fp8=0.002)
    arch = msgspec.structs.replace(dense, fp8_compute=True)

    assert terms(step, arch, fast, tp=2)["prefill_compute_us"] == pytest.approx(
        terms(step, arch, fast)["prefill_compute_us"] / 2
    )


def test_tokens_of_no_request_see_nothing(dense, gpu):
    step = pl.DataFrame(dict(zip(ROOFLINE_COLUMNS, [[0], [0], [5], [3], [9], [9]], strict=True)))
    computed = terms(step, dense, gpu)

    assert computed["prefill_compute_us"] == pytest.approx(5 * 2304 / 1000)
    assert computed["decode_compute_us"] == pytest.approx(3 * 2304 / 1000)
    assert computed["decode_kv_read_us"] == 0


def test_request_without_a_token_does_not_reach_the_head(dense, gpu):
    step = pl.DataFrame(dict(zip(ROOFLINE_COLUMNS, [[4], [0], [1], [0], [0], [0]], strict=True)))

    assert terms(step, dense, gpu)["prefill_compute_us"] == pytest.approx((2304 + 2 * 32 / 8 + 160) / 1000)


def test_gpu_without_a_link_of_its_own_talks_over_pcie(step, dense, gpu):
    computed = terms(step, dense, replace(gpu, link_gb_s=None), tp=2)

    assert computed["tp_comm_us"] == pytest.approx(2 * 2 * 23 * 8 * 2 / 32_000)


def test_recomputed_request_attends_with_every_token(dense, gpu):
    step = pl.DataFrame(dict(zip(ROOFLINE_COLUMNS, [[0], [1], [0], [100], [50], [0]], strict=True)))
    computed = terms(step, dense, gpu)

    assert computed["decode_compute_us"] == pytest.approx((100 * 2304 + 100 * 50 * 2 * 32 + 160) / 1000)
    assert computed["decode_kv_read_us"] == pytest.approx(50 * 32 / 1000)  # its cache is read once


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_step_without_tokens_costs_nothing(request, model, gpu):
    step = pl.DataFrame({name: [0] for name in ROOFLINE_COLUMNS})
    computed = terms(step, request.getfixturevalue(model), gpu, tp=2)

    assert {name for name, value in computed.items() if value} == {"layers", "one"}


def test_unknown_context_leaves_the_terms_without_it(step, dense, gpu):
    unknown = step.with_columns(context_tokens=None, prefill_context_tokens=None)
    computed = terms(unknown, dense, gpu)

    assert {name for name, value in computed.items() if value is None} == {
        "prefill_compute_us",
        "decode_compute_us",
        "decode_kv_read_us",
    }
    idle = unknown.with_columns(prefill_tokens=0, decode_tokens=0, num_prefill_reqs=0, num_decode_reqs=0)
    assert None not in terms(idle, dense, gpu).values()


def test_unknown_composition_is_unknown(step, dense, gpu):
    unknown = step.with_columns(*(pl.lit(None, pl.Int64).alias(name) for name in ROOFLINE_COLUMNS))
    computed = terms(unknown, dense, gpu)

    known = {name for name, value in computed.items() if value is not None}
    # A dense model has no experts, whatever it computes.
    assert known == {"layers", "one", "moe_expert_read_us"}


def test_terms_are_float64_columns_beside_the_others(step, dense, gpu):
    added = add_roofline(step, dense, gpu, tp=1)

    assert added.columns == [*step.columns, *ROOFLINE_TERMS]
    assert all(added.schema[name] == pl.Float64 for name in ROOFLINE_TERMS)


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_every_row_is_computed_by_itself(request, step, model, gpu):
    arch = request.getfixturevalue(model)
    steps = pl.concat([step, step.with_columns(pl.all() * 3), step])
    added = add_roofline(steps, arch, gpu, tp=1)

    assert added.height == 3
    assert added.row(0) == added.row(2) == add_roofline(step, arch, gpu, tp=1).row(0)


def test_model_that_cannot_be_divided_is_refused(step, dense, gpu):
    with pytest.raises(UsageError, match="2 attention heads cannot be divided over 3"):
        add_roofline(step, dense, gpu, tp=3)


# -- formulas of a file ----------------------------------------------------------------------------------


def _frame():
    rng = np.random.default_rng(5)
    reqs = rng.integers(0, 4, 60)
    decodes = rng.integers(0, 40, 60)
    return pl.DataFrame(
        {
            "num_prefill_reqs": reqs,
            "num_decode_reqs": decodes,
            "prefill_tokens": reqs * rng.integers(1, 900, 60),
            "decode_tokens": decodes,
            "context_tokens": decodes * rng.integers(1, 9000, 60),
            "prefill_context_tokens": reqs * rng.integers(0, 6000, 60),
        }
    )


def _by_formula(name, formulas, row):
    if name not in formulas:
        return row[name]
    node = parse_formula(formulas[name], where=name)
    return known(computation(node)({n: _by_formula(n, formulas, row) for n in names_in(node)}))


@pytest.mark.mostly_slow(every=5)
@pytest.mark.parametrize(
    ("config", "tp"),
    [("llama-2-70b", 4), ("deepseek-v3", 2), ("qwen3-30b-a3b", 2), ("gemma-2-9b", 2), ("gpt-oss-20b", 1)],
)
def test_formulas_of_a_file_give_the_columns_of_training(load, config, tp):
    """Dense, latent attention, experts, windows and mixed precision; with a GPU, and without one."""
    arch, gpu = load(config), find_gpu("H100")
    frame = add_work(add_roofline(_frame(), arch, gpu, tp=tp), arch, tp=tp)
    for names, formulas in (
        (ROOFLINE_TERMS, roofline_formulas(arch, gpu, tp=tp)),
        (WORK_TERMS, work_formulas(arch, tp=tp)),
    ):
        for row in frame.iter_rows(named=True):
            columns = {name: row[name] for name in ROOFLINE_COLUMNS}
            for name in names:
                assert _by_formula(name, formulas, columns) == pytest.approx(row[name], rel=1e-9), name


@pytest.mark.parametrize(
    ("name", "rate"), [("prefill_mflop", "compute_tflops_fp16"), ("kv_read_kb", "memory_bandwidth_gb_s")]
)
def test_work_is_the_roofline_times_the_rates_of_the_hardware(load, name, rate):
    """On an H100 of 989.5 TFLOP/s and 3,350 GB/s a MFLOP takes 1/989.5 us and a kB 1/3350 us."""
    arch, gpu = load("llama-2-70b"), find_gpu("H100")
    work, times = add_work(_frame(), arch, tp=4), add_roofline(_frame(), arch, gpu, tp=4)
    np.testing.assert_allclose(work[name] / getattr(gpu, rate), times[WORK_TERMS[name]], rtol=1e-12)


@pytest.mark.parametrize("digits", [12, 17])
@pytest.mark.parametrize("config", ["gpt-oss-120b", "llama-4-scout", "gemma-3-27b", "deepseek-v3"])
def test_every_formula_is_short_enough_to_be_read_back(load, config, digits):
    for name, text in roofline_formulas(load(config), find_gpu("H100"), tp=1, digits=digits).items():
        parse_formula(text, where=name)


def test_names_are_defined_down_to_columns_and_no_further(load):
    context = RunContext(ServerSettings(max_num_seqs=64), load("llama-2-70b"), find_gpu("H100"))
    computed = definitions(["prompt_tokens * running_depth / max_num_seqs", "decode_kv_read_us"], context)
    assert list(computed) == ["decode_kv_read_us", "decode_visible_tokens", "max_num_seqs"]
    assert computed["max_num_seqs"] == "64"


def test_an_unknown_constant_is_not_defined():
    assert definitions(["max_num_seqs * layers"], RunContext(ServerSettings())) == {}


# -- the least time of a step ------------------------------------------------------------------------------


def least(step, arch, gpu, **stated):
    context = RunContext(settings_from(stated, where="x"), arch, gpu)
    timeline = step if "cycle_source" in step.columns else step.with_columns(cycle_source=pl.lit("fpm"))
    return with_least_time(timeline, context)[LEAST_TIME].item()


DENSE_FLOPS = 23 * 2304 + 5 * 160 + 2 * (20**2 / 4 * 32 + 30 * 32)
"""Matrices, heads, and the pairs of two prompts as long as each other and of the cached tokens, in two layers."""


def test_the_least_time_of_a_step_is_that_of_its_flops_or_of_its_bytes(step, dense, gpu):
    assert least(step, dense, gpu) == pytest.approx(DENSE_FLOPS / 1000)
    slow = replace(gpu, memory_bandwidth_gb_s=0.01)
    assert least(step, dense, slow) == pytest.approx((2464 + 2 * 30 * 16) / 10)
    assert least(step, dense, gpu, tp=2) == pytest.approx(DENSE_FLOPS / 2000)
    assert least(step, dense, gpu, tp=2, pp=2) == pytest.approx(DENSE_FLOPS / 4000)
    # Replicas of a dense model share nothing.
    assert least(step, dense, gpu, dp=2) == pytest.approx(DENSE_FLOPS / 1000)


def test_the_least_time_counts_the_experts_of_one_token(step, moe, gpu):
    slow = replace(gpu, memory_bandwidth_gb_s=0.01)
    read = moe.fixed_weight_bytes + moe.moe_layers * moe.experts_per_token * moe.expert_bytes
    kv = moe.context_layers * 30 * moe.kv_bytes_per_token_per_layer

    assert least(step, moe, slow) == pytest.approx((read + kv) / 10)
    # Data-parallel ranks may share the experts.
    assert least(step, moe, slow, dp=2) == pytest.approx((read + kv) / 2 / 10)


def test_context_that_may_not_be_read_does_not_count(step, dense, gpu, with_attention):
    slow = replace(gpu, memory_bandwidth_gb_s=0.01)
    windows = with_attention(dense, windows=(None, 16))

    assert least(step, windows, slow) == pytest.approx((2464 + 30 * 16) / 10)
    assert least(step, with_attention(dense, indexed_tokens=2048), slow) == pytest.approx(2464 / 10)
    estimated = step.with_columns(context_estimated=pl.lit(value=True))
    assert least(estimated, dense, slow) == pytest.approx(2464 / 10)
    unknown = step.with_columns(context_tokens=pl.lit(None, pl.Int64))
    assert least(unknown, dense, slow) == pytest.approx(2464 / 10)


@pytest.mark.parametrize(
    ("weight_bytes", "fp8", "fp4", "rate"),
    [(2.0, 0.002, 0.004, 1), (1.0, 0.002, 0.004, 2), (1.0, None, None, 2), (0.5, 0.002, 0.004, 4)],
)
def test_the_fastest_data_type_of_the_model_counts(step, dense, gpu, weight_bytes, fp8, fp4, rate):
    arch = msgspec.structs.replace(
        dense,
        attention_weight_bytes=weight_bytes,
        ffn_weight_bytes=weight_bytes,
        expert_weight_bytes=weight_bytes,
    )
    fast = replace(gpu, compute_tflops_fp8=fp8, compute_tflops_fp4=fp4)

    assert least(step, arch, fast) == pytest.approx(DENSE_FLOPS / 1000 / rate)


@pytest.mark.parametrize(
    ("source", "prefix_caching", "known"),
    [("fpm", None, True), ("request", None, False), ("client", True, False), ("request", False, True)],
)
def test_a_batch_that_may_have_prefix_hits_has_no_least_time(step, dense, gpu, source, prefix_caching, known):
    timeline = step.with_columns(cycle_source=pl.lit(source))

    assert (least(timeline, dense, gpu, enable_prefix_caching=prefix_caching) is not None) is known


def test_without_model_gpu_or_with_drafts_there_is_no_least_time(step, dense, gpu):
    assert least(step, None, gpu) is None
    assert least(step, dense, None) is None
    assert least(step, dense, gpu, speculative_config="{}") is None
    empty = step.with_columns(pl.lit(0).alias(name) for name in step.columns)
    assert least(empty, dense, gpu) is None
