"""Spans of SGLang's own tracing module (`scripts/make_sglang_fixture.py`) against the plan that it was called with."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from tracefit import DataError, TrainOptions, ingest, inspect
from tracefit import run as run_all
from tracefit.tables.store import TableStore

FIXTURES = Path(__file__).parents[2] / "fixtures/sglang"
STAMP_US = 1.0
"""SGLang computes wall-clock times in seconds as floats, which are a quarter of a microsecond apart."""


@pytest.fixture
def read(tmp_path):
    def tables(run: str) -> TableStore:
        ingest([FIXTURES / run], tmp_path / run)
        return TableStore(tmp_path / run)

    return tables


def plan(run: str) -> pl.DataFrame:
    """Return the planned requests: their lengths, and times in us."""
    requests = json.loads((FIXTURES / run / "truth.json").read_text())["requests"]
    return pl.DataFrame(
        {
            "request_id": r["rid"],
            "prompt_tokens": r["prompt"],
            "output_tokens": r["output"],
            "cached_prompt_tokens": r["cached"],
            "queue_wait_us": 1e6 * (r["scheduled"] - r["queued"]),
            "prefill_us": 1e6 * (r["tokens"][0] - r["scheduled"]),
            "engine_us": 1e6 * (r["tokens"][-1] - r["queued"]),
            "itl_us": 1e6 * (r["tokens"][-1] - r["tokens"][0]) / max(1, r["output"] - 1),
            # The plan has each output at the client a millisecond later.
            "ttft_us": 1e6 * (r["tokens"][0] + 0.001 - r["arrival"]),
            "e2e_us": 1e6 * (r["tokens"][-1] + 0.001 - r["arrival"]),
        }
        for r in requests
    )


@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize("run", ["sglang-level1", "sglang-level2", "sglang-level3-tp2"])
def test_times_of_requests_are_the_planned_ones_at_every_level(read, run):
    found, wanted = read(run).read("requests"), plan(run)
    both = wanted.join(found, on="request_id", suffix="_found", how="left")
    assert (found.height, found["server"].n_unique()) == (wanted.height, 1)
    for column in wanted.columns[1:]:
        # A stage ends when the request is given up, a tenth of a millisecond after its last token.
        slack = 100.0 + STAMP_US if column in {"engine_us", "itl_us"} else STAMP_US
        known = both.filter(pl.col("output_tokens") > 1) if column == "itl_us" else both
        off = (known[column] - known[f"{column}_found"]).abs()
        assert off.null_count() == 0, column
        assert off.max() <= slack, column


@pytest.mark.slow
def test_prefill_and_decode_servers_are_apart(read):
    found, wanted = read("sglang-apart").read("requests"), plan("sglang-apart")
    roles = found.with_columns(role=pl.col("server").str.extract(r" (\w+)$")).partition_by("role", as_dict=True)
    prefill, decode = (wanted.join(roles[role,], on="request_id", suffix="_found") for role in ("prefill", "decode"))
    assert prefill.height == decode.height == wanted.height
    assert (prefill["prefill_us"] - prefill["prefill_us_found"]).abs().max() <= STAMP_US
    assert (prefill["queue_wait_us"] - prefill["queue_wait_us_found"]).abs().max() <= STAMP_US
    # The plan hands the caches over in 2 ms, and decodes 3 ms after the first token.
    assert (prefill["kv_transfer_us"] - 2000).abs().max() <= STAMP_US
    assert (decode["queue_wait_us_found"] - 1000).abs().max() <= STAMP_US
    assert (decode["e2e_us"] + 3000 - decode["e2e_us_found"]).abs().max() <= STAMP_US
    assert decode["prefill_us_found"].null_count() == decode.height


@pytest.mark.slow
def test_ranks_that_repeat_each_other_count_once(read):
    store = read("sglang-level3-tp2")
    spans, runs = store.read("spans"), store.read("runs")
    assert spans.filter(pl.col("name") == "prefill_waiting").height == 2 * plan("sglang-level3-tp2").height
    assert runs.select("requests", "duplicate_spans", "dialects").rows() == [(30, 0, "sglang server")]


@pytest.mark.slow
def test_spans_of_steps_give_the_planned_batches(read):
    run = "sglang-level3-tp2"
    store = read(run)
    planned = json.loads((FIXTURES / run / "truth.json").read_text())["steps"]
    chunked = {
        r["rid"] for r in json.loads((FIXTURES / run / "truth.json").read_text())["requests"] if len(r["chunks"]) > 1
    }
    found = store.read("steps").sort("step_id")
    assert found["step_id"].to_list() == list(range(1, len(planned) + 1))
    for step, row in zip(planned, found.iter_rows(named=True), strict=True):
        assert (row["num_prefill_reqs"], row["num_decode_reqs"]) == (
            len(step["prefill"]),
            len(step["decode"]),
        )
        assert row["context_tokens"] == sum(context for _, context in step["decode"])
        assert row["decode_tokens"] == len(step["decode"])
        if any(rid in chunked for rid, *_ in step["prefill"]):
            # How a prompt is divided into chunks is not in the spans.
            assert row["prefill_tokens"] is row["scheduled_tokens"] is None
        else:
            assert row["prefill_tokens"] == sum(tokens for _, tokens, _ in step["prefill"])
            assert row["prefill_context_tokens"] == sum(before for *_, before in step["prefill"])
    inner = list(zip(planned, found["cycle_us"], strict=True))[1:-1]
    assert all(abs(1e6 * step["cycle"] - us) <= STAMP_US for step, us in inner)
    assert found["cycle_us"].is_null().to_list() == [True, *[False] * (found.height - 2), True]


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("run", ["sglang-level1", "sglang-level2"])
def test_no_step_is_made_up_where_spans_of_steps_are_not_there(read, run):
    assert read(run).read("steps").height == 0


@pytest.mark.slow
def test_step_times_of_sglangs_spans_are_fitted(tmp_path):
    options = TrainOptions(features="batch", fast=True)
    result = run_all(FIXTURES / "sglang-level3-tp2", tmp_path / "out", options=options)
    assert "beta.cycle_time" in [model.name for model in result.trained.fitted]
    (model,) = json.loads((tmp_path / "out/models/beta.json").read_text())["models"]
    terms = {term["feature"]: term["value"] for term in model["terms"]}
    # The plan has 200 us for each request that decodes, and 20 for its result.
    assert terms["running_depth"] == pytest.approx(220, rel=0.01)
    assert "by SGLang's spans" in model["target"]["definition"]
    assert model["target"]["source"] == "step_clock"


@pytest.mark.slow
def test_what_gives_steps_is_said_in_sglangs_terms(tmp_path):
    (deployment,) = inspect([FIXTURES / "sglang-level1"]).deployments
    (steps,) = [allowed for allowed in deployment.allows if allowed.what == "step time"]
    assert "SGLANG_TRACE_LEVEL=3" in steps.reason
    (deployment,) = inspect([FIXTURES / "sglang-level3-tp2"]).deployments
    (steps,) = [allowed for allowed in deployment.allows if allowed.what == "step time"]
    assert steps.trains
    assert "recorded steps; " in steps.reason
    with pytest.raises(DataError, match="SGLANG_TRACE_LEVEL=3"):
        run_all(FIXTURES / "sglang-level1", tmp_path / "out", options=TrainOptions(fast=True))
