"""Definitions in a coefficient file: formulas alone, row by row, give what training computes over a frame."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from tracefit.features.definitions import definitions
from tracefit.features.expressions import evaluate, names_in, parse_formula
from tracefit.features.roofline import (
    ROOFLINE_COLUMNS,
    ROOFLINE_TERMS,
    WORK_TERMS,
    add_roofline,
    add_work,
    roofline_formulas,
    work_formulas,
)
from tracefit.server.context import RunContext
from tracefit.server.hardware import find_gpu
from tracefit.server.settings import ServerSettings


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
    return evaluate(node, {n: _by_formula(n, formulas, row) for n in names_in(node)})


@pytest.mark.parametrize(
    ("config", "tp"),
    [("llama-2-70b", 4), ("deepseek-v3", 2), ("qwen3-30b-a3b", 2), ("gemma-2-9b", 2), ("gpt-oss-20b", 1)],
)
def test_formulas_give_the_terms_of_the_roofline(load, config, tp):
    """Dense, latent attention, experts, windows and mixed precision."""
    arch, gpu = load(config), find_gpu("H100")
    formulas = roofline_formulas(arch, gpu, tp=tp)
    frame = add_roofline(_frame(), arch, gpu, tp=tp)
    for row in frame.iter_rows(named=True):
        columns = {name: row[name] for name in ROOFLINE_COLUMNS}
        for term in ROOFLINE_TERMS:
            assert _by_formula(term, formulas, columns) == pytest.approx(row[term], rel=1e-9), term


@pytest.mark.parametrize(("config", "tp"), [("llama-2-70b", 4), ("qwen3-30b-a3b", 2)])
def test_formulas_give_the_work_of_a_step_without_a_gpu(load, config, tp):
    arch = load(config)
    formulas = work_formulas(arch, tp=tp)
    for row in add_work(_frame(), arch, tp=tp).iter_rows(named=True):
        columns = {name: row[name] for name in ROOFLINE_COLUMNS}
        for term in WORK_TERMS:
            assert _by_formula(term, formulas, columns) == pytest.approx(row[term], rel=1e-9), term


def test_work_is_the_roofline_times_the_rates_of_the_hardware(load):
    """On an H100 of 989.5 TFLOP/s and 3,350 GB/s a MFLOP takes 1/989.5 us and a kB 1/3350 us."""
    arch, gpu = load("llama-2-70b"), find_gpu("H100")
    work, times = add_work(_frame(), arch, tp=4), add_roofline(_frame(), arch, gpu, tp=4)
    for name, rate in (("prefill_mflop", gpu.compute_tflops_fp16), ("kv_read_kb", gpu.memory_bandwidth_gb_s)):
        np.testing.assert_allclose(work[name] / rate, times[WORK_TERMS[name]], rtol=1e-12)


@pytest.mark.parametrize("digits", [12, 17])
def test_every_formula_is_short_enough_to_be_read_back(load, digits):
    for config in ("gpt-oss-120b", "llama-4-scout", "gemma-3-27b", "deepseek-v3"):
        for name, text in roofline_formulas(load(config), find_gpu("H100"), tp=1, digits=digits).items():
            parse_formula(text, where=name)


def test_names_are_defined_down_to_columns_and_no_further(load):
    context = RunContext(ServerSettings(max_num_seqs=64), load("llama-2-70b"), find_gpu("H100"))
    found = definitions(["prompt_tokens * running_depth / max_num_seqs", "decode_kv_read_us"], context)
    assert list(found) == ["decode_kv_read_us", "decode_visible_tokens", "max_num_seqs"]
    assert found["max_num_seqs"] == "64"


def test_what_nobody_knows_is_not_defined():
    assert definitions(["max_num_seqs * layers"], RunContext(ServerSettings())) == {}
