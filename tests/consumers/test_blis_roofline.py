"""BLIS's own terms, by hand arithmetic on a GPU of 1000 FLOP/us and 1000 bytes/us."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import polars as pl
import pytest

from tracefit.consumers.blis_roofline import (
    BLIS_TERMS,
    PAIRS_COLUMN,
    add_blis_terms,
    roofline_shape,
    with_prefill_pairs,
)
from tracefit.errors import DataError, UsageError


def terms(frame, arch, gpu, tp=1):
    return add_blis_terms(frame, arch, gpu, tp=tp).select(list(BLIS_TERMS)).row(0, named=True)


def test_dense_model_on_one_gpu(step, dense, gpu):
    # d = 8, H = 2, d_h = 4, d_kv = 4, d_ff = 16, L = 2
    projection, ffn = 8 * (16 + 8), 6 * 8 * 16
    per_token = 2 * (2 * projection + ffn)

    # prompts of 10 + 20 tokens in all: Σ t·(s + t/2) = 20·(30 + 10)/2 for two alike of t = 10, s = 15
    assert terms(step, dense, gpu) == pytest.approx(
        {
            "blis_prefill_compute_us": (20 * per_token + 2 * 4 * 2 * 2 * 10 * (15 + 5) * 4) / 1000,
            "blis_decode_compute_us": (3 * per_token + 2 * 4 * 2 * 30 * 4) / 1000,
            "blis_weight_us": 2 * (projection + 3 * 8 * 16) * 2 / 1000,
            "blis_tp_us": 0.0,
            "blis_layers": 2.0,
            "blis_requests": 5.0,
            "blis_one": 1.0,
            "blis_interleaved_moe_layers": 0.0,
            "blis_prefill_kv_us": 2 * 2 * 4 * 2 * 20 / 1000,
            "blis_decode_kv_us": 2 * 2 * 4 * 2 * (30 + 3) / 1000,
        }
    )


def test_moe_model_on_two_gpus(step, moe, gpu):
    # Every layer is taken to be MoE: k = 2 of N = 4 experts of width 6, shared 4; d_kv = 8
    projection = 8 * (16 + 16)
    per_token = 3 * (2 * projection + 6 * 8 * (2 * 6 + 4))
    found = terms(step, moe, gpu, tp=2)

    assert found["blis_decode_compute_us"] == pytest.approx((3 * per_token + 3 * 4 * 2 * 30 * 4) / 2 / 1000)
    assert found["blis_weight_us"] == pytest.approx(3 * (projection + 3 * 8 * (4 * 6 + 4)) * 2 / 2 / 1000)
    assert found["blis_tp_us"] == pytest.approx(2 * 3 * 23 * 8 * 2 * 2 * (1 / 2) / 1000)
    assert found["blis_prefill_kv_us"] == pytest.approx(3 * 2 * (8 / 2) * 2 * 20 / 1000)
    assert found["blis_interleaved_moe_layers"] == 0.0


def test_simplifications_of_blis_are_kept(step, load, gpu):
    qwen, deepseek = (load(name) for name in ("qwen3-30b-a3b", "deepseek-v3"))
    of_qwen, of_deepseek = terms(step, qwen, gpu), terms(step, deepseek, gpu)
    per_width = 2 * 2 * 20 / 1000

    assert of_qwen["blis_prefill_kv_us"] == pytest.approx(qwen.layers * 4 * 64 * per_width), "not 128 wide"
    assert of_deepseek["blis_prefill_kv_us"] == pytest.approx(61 * 7168 * per_width), "nor a latent"
    loaded = 256 * 2048 + 2048
    weights = 61 * 7168 * (2 * 7168 + 2 * 7168) + 61 * 3 * 7168 * loaded
    bytes_per_weight = deepseek.expert_weight_bytes
    assert of_deepseek["blis_weight_us"] == pytest.approx(weights * bytes_per_weight / 1000), "no dense layers"
    interleaved = [
        terms(step, load(name), gpu)["blis_interleaved_moe_layers"] for name in ("llama-4-scout", "llama-4-maverick")
    ]
    assert interleaved == [24, 16], "of 48 each"
    falcon = load("falcon-7b")
    assert terms(step, falcon, gpu)["blis_weight_us"] * 1000 > falcon.fixed_weight_bytes, "three matrices"


def test_kv_takes_two_bytes_whatever_the_model_says(step, dense, gpu):
    small = msgspec.structs.replace(dense, kv_bytes=1.0)

    assert terms(step, small, gpu) == terms(step, dense, gpu)


def test_weights_of_one_byte_compute_in_fp8_where_the_gpu_has_it(step, dense, gpu):
    arch = msgspec.structs.replace(dense, ffn_weight_bytes=1.0)
    fast = replace(gpu, compute_tflops_fp8=0.002)
    slow_us = terms(step, arch, gpu)["blis_prefill_compute_us"]

    assert terms(step, arch, fast)["blis_prefill_compute_us"] == pytest.approx(slow_us / 2)
    assert terms(step, dense, fast) == terms(step, dense, gpu)
    assert terms(step, arch, gpu)["blis_weight_us"] * 2 == terms(step, dense, gpu)["blis_weight_us"]


def test_unknown_context_matters_only_to_its_phase(step, dense, gpu):
    unknown = step.with_columns(context_tokens=None, prefill_context_tokens=None)
    found = terms(unknown, dense, gpu)

    assert {name for name, value in found.items() if value is None} == {
        "blis_prefill_compute_us",
        "blis_decode_compute_us",
        "blis_decode_kv_us",
    }
    idle = unknown.with_columns(prefill_tokens=0, decode_tokens=0)
    of_phases = ("blis_prefill_compute_us", "blis_decode_compute_us", "blis_decode_kv_us")
    assert [terms(idle, dense, gpu)[name] for name in of_phases] == [0.0, 0.0, 0.0]


def test_tokens_of_no_request_are_unknown_rather_than_infinite(step, dense, gpu):
    assert terms(step.with_columns(num_prefill_reqs=0), dense, gpu)["blis_prefill_compute_us"] is None


def test_terms_are_in_the_order_of_its_coefficients(step, dense, gpu):
    added = add_blis_terms(step, dense, gpu, tp=1)

    assert added.columns == [*step.columns, *BLIS_TERMS]
    assert len(BLIS_TERMS) == 10
    assert all(added.schema[name] == pl.Float64 for name in BLIS_TERMS)


def test_model_that_blis_refuses_is_refused(step, dense, gpu):
    with pytest.raises(UsageError, match=r"BLIS needs KV heads \(1\) divisible by tensor_parallel 2"):
        add_blis_terms(step, dense, gpu, tp=2)
    with pytest.raises(DataError, match="BLIS terms need the columns decode_tokens"):
        add_blis_terms(step.drop("decode_tokens"), dense, gpu, tp=1)


REQUESTS = {
    "run_id": "r",
    "server": "s",
    "epoch": 0,
    "first_scheduled_ns": 0,
    "cached_prompt_tokens": None,
    "num_preemptions": 0,
}


def pairs(prefill_tokens, *requests):
    """`PAIRS_COLUMN` of steps 1, 2, ... with these prefill tokens; requests as (first step, last step, prompt,
    more)."""
    timeline = pl.DataFrame(
        {"step_id": range(1, len(prefill_tokens) + 1), "prefill_tokens": prefill_tokens}
    ).with_columns(run_id=pl.lit("r"), server=pl.lit("s"), epoch=pl.lit(0, pl.Int64))
    rows = [
        REQUESTS
        | {"first_scheduled_step": first, "first_token_step": last, "prompt_tokens": prompt}
        | (more[0] if more else {})
        for first, last, prompt, *more in requests
    ]
    return with_prefill_pairs(timeline, pl.DataFrame(rows, infer_schema_length=None))[PAIRS_COLUMN].to_list()


def test_attention_is_summed_request_by_request():
    # 10·(10 + 5) + 30·(30 + 15), where two alike would be 40·(20 + 10) = 1,200
    assert pairs([40], (1, 1, 10), (1, 1, 30)) == [150 + 1350]


def test_chunks_see_their_whole_prompt():
    # 60 of 100 beside a prompt of 20, then the 40 that are left: 60·(100 + 30) + 20·30, 40·(100 + 20)
    assert pairs([80, 40], (1, 1, 20), (1, 2, 100)) == [7800 + 600, 4800]
    assert pairs([84], (1, 1, 100, {"cached_prompt_tokens": 16})) == [84 * (100 + 42)]


def test_second_prompt_in_chunks_takes_the_rest_of_a_step():
    # The first ends with 10 tokens in step 2; the second has 70 of its 100 there.
    later = {"first_scheduled_ns": 5}
    assert pairs([80, 80, 30], (1, 2, 90), (2, 3, 100, later)) == [
        80 * (90 + 40),
        10 * (90 + 5) + 70 * (100 + 35),
        30 * (100 + 15),
    ]


def test_prompt_over_a_gap_of_ids_is_in_the_recorded_steps():
    # As many steps as ids would not fit into any memory.
    assert pairs([100, 40], (1, 2**40, 140)) == [100 * (140 + 50), 40 * (140 + 20)]


def test_pairs_are_null_where_tokens_do_not_add_up(step, dense, gpu):
    assert pairs([50], (1, 1, 10)) == [None], "40 tokens of a request that is not traced"
    assert pairs([10, 10], (1, 1, 10), (2, 2, 10, {"num_preemptions": 1})) == [150, None]
    unknown, known = (step.with_columns(pl.lit(v, pl.Float64).alias(PAIRS_COLUMN)) for v in (None, 20 * (30 + 10) / 2))
    assert terms(unknown, dense, gpu) == terms(known, dense, gpu) == terms(step, dense, gpu)
    more = step.with_columns(pl.lit(400.0 + 1, pl.Float64).alias(PAIRS_COLUMN))
    found = terms(more, dense, gpu)["blis_prefill_compute_us"] - terms(known, dense, gpu)["blis_prefill_compute_us"]
    assert found == pytest.approx(2 * 4 * 2 * 4 / 1000)


def test_roofline_terms_by_hand(dense, gpu):
    # FFNs have two matrices: 2·8·16 each; 2 layers of projections 192, 2·8 for the position of a token; 5 vector
    # operations a head and pair
    per_token = 2 * (2 * 192 + 2 * 8 + 2 * 2 * 8 * 16)
    per_pair = 2 * (4 * 8 + 5 * 2)
    # Two prompts alike: 10 tokens each beside 5 in the cache meet 5 + 9/2.
    pairs = 2 * 10 * (5 + 9 / 2)
    counts = (20, 10, pairs + 20 / 2, 3, 30)
    ((prefill, decode, memory),) = roofline_shape(dense, gpu, tp=1).terms(counts)
    assert prefill == pytest.approx((20 * per_token + pairs * per_pair) / 1000)
    assert decode == pytest.approx((3 * per_token + 30 * per_pair) / 1000)
    weights = 2 * (192 + 2 * 8 * 16) * 2
    moved = 2 * 2 * 4 * 2 * (20 + 3 + 10 + 30) + 2 * 8 * 2 * 23
    assert memory == pytest.approx((weights + moved) / 1000)


def test_roofline_reads_the_experts_that_tokens_choose(moe, gpu):
    def memory(tokens):
        return roofline_shape(moe, gpu, tp=1).terms((0, 0, 0, tokens, 0))[0, 2]

    # k = 2 of N = 4: one token chooses 2, two 3, many 4; of 2·8·6 parameters in 3 layers. Other bytes grow with the
    # tokens alike.
    moved_per_token = (3 * 2 * 8 * 2 + 3 * 8 * 2) / 1000
    expert = 3 * 2 * 8 * 6 * 2 / 1000
    assert memory(2) - memory(1) == pytest.approx(1 * expert + moved_per_token)
    assert memory(101) - memory(100) == pytest.approx(moved_per_token)
