"""Padded batches and experts read, by hand arithmetic."""

from __future__ import annotations

import json

import polars as pl
import pytest

from tracefit.features.batches import BATCH_TERMS, add_batch_terms, batch_formulas, capture_sizes
from tracefit.features.training import definitions
from tracefit.server.context import RunContext
from tracefit.server.hardware import find_gpu
from tracefit.server.model_config import parse_architecture
from tracefit.server.settings import ServerSettings

MOE = json.dumps(
    {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 1000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "torch_dtype": "bfloat16",
    }
)


def _context(*, gpu="H100", moe=False, **settings):
    return RunContext(
        ServerSettings(**settings),
        parse_architecture(MOE, where="config.json", name="m") if moe else None,
        find_gpu(gpu) if gpu else None,
    )


def _steps(decodes, prefills=0, tokens=0):
    return pl.DataFrame({"num_decode_reqs": decodes, "num_prefill_reqs": prefills, "prefill_tokens": tokens})


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({"max_num_seqs": 10}, (1, 2, 4, 8, 16)),
        ({"max_num_seqs": 1024}, (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))),
        ({"max_num_seqs": 10, "other": {"cudagraph_capture_sizes": "[8, 2, 4]"}}, (2, 4, 8)),
        ({"other": {"max_cudagraph_capture_size": 8}}, (1, 2, 4, 8)),
    ],
)
def test_sizes_are_the_setting_or_vllms_default(settings, sizes):
    assert capture_sizes(_context(**settings)) == sizes


@pytest.mark.parametrize(
    "context",
    [
        _context(gpu=None, max_num_seqs=8),
        _context(max_num_seqs=8, enforce_eager=True),
        _context(max_num_seqs=8, other={"sglang_version": "0.5"}),
        _context(),
    ],
)
def test_without_graphs_or_their_sizes_nothing_is_padded(context):
    assert capture_sizes(context) == ()
    added = add_batch_terms(_steps([3]), context)
    assert added.select(BATCH_TERMS).rows() == [(None, None, None)]


def test_a_batch_without_prompts_runs_at_the_next_size():
    steps = _steps([0, 1, 2, 3, 5, 8, 9, 16, 17, 200, 300])
    padded = add_batch_terms(steps, _context(max_num_seqs=128))["padded_decode_reqs"]
    assert padded.to_list() == [0, 1, 2, 4, 8, 8, 16, 16, 24, 200, 300]
    mixed = add_batch_terms(_steps([5], prefills=[1], tokens=[100]), _context(max_num_seqs=128))
    assert mixed["padded_decode_reqs"].to_list() == [5]


def test_experts_are_those_that_decodes_of_all_ranks_choose():
    """By hand: of 8 experts a token misses one with 3/4; of 4 tokens on each of 2 ranks all miss it with (3/4)^8.

    A step with prompts reads all, which is a part of its flag.
    """
    added = add_batch_terms(_steps([3, 3], [0, 1], [0, 5]), _context(moe=True, max_num_seqs=8))
    assert added["experts_read"].to_list() == pytest.approx([8 * (1 - 0.75**3), 0])
    assert added["padded_experts_read"].to_list() == pytest.approx([8 * (1 - 0.75**4), 0])
    ranks = add_batch_terms(_steps([3]), _context(moe=True, max_num_seqs=8, data_parallel=2))
    assert ranks["padded_experts_read"].to_list() == pytest.approx([8 * (1 - 0.75**8)])


def test_a_file_defines_the_padded_batch_by_columns_of_a_step():
    context = _context(moe=True, max_num_seqs=512)
    defined = definitions(["padded_experts_read"], context)
    assert defined.keys() == batch_formulas(context).keys() - {"experts_read"}
    assert max(map(len, defined.values())) <= 400
