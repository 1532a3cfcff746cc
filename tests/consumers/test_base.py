"""The list of consumers, and the load that requests ran under, worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace

import polars as pl
import pytest
import yaml

from tracefit.consumers import CONSUMERS
from tracefit.consumers.base import block_size, commented, timed_requests, yaml_text
from tracefit.server.settings import assume_defaults, settings_from

ENGINE = {"run_id": "r", "server": "s", "epoch": 0}


def _load(steps, first_scheduled=4):
    """Return the load of a request that decodes in steps 6 to 15; in step k, k requests run."""
    timeline = pl.DataFrame([{**ENGINE, "step_id": k, "running_depth": k} for k in steps])
    request = {
        **ENGINE,
        "first_scheduled_ns": 1,
        "first_scheduled_step": first_scheduled,
        "first_token_step": 5,
        "finished_step": 15,
        "prompt_tokens": 10,
        "cached_prompt_tokens": None,
        "itl_us": 7.0,
    }
    source = SimpleNamespace(tables=SimpleNamespace(timeline=timeline, requests=pl.DataFrame([request])))
    return timed_requests(source, "itl_us").select("running_start", "running_decode").row(0)


def test_load_is_of_the_first_step_and_of_mean_decode_steps():
    assert _load(range(1, 21)) == (4, sum(range(6, 16)) / 10)


@pytest.mark.parametrize("missing", [range(11, 16), (10,), (15,)])
@pytest.mark.parametrize(("first_step", "running_start"), [(1, 4), (5, None)])
def test_load_is_unknown_where_a_step_is_missing(missing, first_step, running_start):
    """Without steps 11 to 15, the mean of those up to 10 is 8.0: the load is 10.5."""
    assert _load([k for k in range(first_step, 21) if k not in missing]) == (running_start, None)


def test_consumers_are_in_the_order_of_their_names():
    assert list(CONSUMERS) == sorted(CONSUMERS)


@pytest.mark.parametrize(("stated", "used", "size"), [({}, 3, 128), ({}, 20, 16), ({"block_size": 32}, 3, 32)])
def test_the_tokens_of_a_block_are_stated_or_those_of_the_steps(stated, used, size):
    """Two requests with 320 tokens in their caches: three blocks of 128, one of them half empty, or 20 of 16."""
    settings = assume_defaults(settings_from({"num_gpu_blocks": 1000, **stated}, where="x", source="read"))
    steps = {"kv_blocks_used": used, "num_prefill_reqs": 0, "num_decode_reqs": 2, "context_tokens": 320}
    timeline = pl.DataFrame([{**steps, "kv_blocks_total": None}] * 5, schema_overrides={"kv_blocks_total": pl.Int64})
    context = SimpleNamespace(settings=settings)
    tables, deployment = SimpleNamespace(timeline=timeline), SimpleNamespace(context=context)
    assert block_size(SimpleNamespace(tables=tables, deployment=deployment)) == size


@pytest.mark.parametrize(
    "name",
    [
        "=1+1",
        "- a: {b: 1} # c",
        "!!python/object/apply:os.system [id]",
        "\"'\\`",
        "a\nevil: true",
        "Ä-😀",
        "\u2028\x85\x7f\x1b\t",
        "1e5",
        "no",
    ],
)
def test_every_name_comes_back_from_yaml(name):
    assert yaml.safe_load(commented([name], f"model: {yaml_text(name)}\n")) == {"model": name}
