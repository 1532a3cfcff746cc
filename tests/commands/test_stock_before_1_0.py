"""Spans of vLLM before 1.0: no prefill and no decode, and the forward time in milliseconds in some versions.

Attributes are those of `LLMEngine.create_trace_span` in
https://github.com/vllm-project/vllm/blob/v0.6.6/vllm/engine/llm_engine.py.
"""

from __future__ import annotations

import json

import polars as pl
import pytest

import tracefit
from tracefit.synth import SynthOptions, synth, write_run

_LATER = "gen_ai.latency.time_in_model_"


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Return tables of a stock run as it is, and as a server before 1.0 writes it."""
    folder = tmp_path_factory.mktemp("v0")
    run = write_run(synth(SynthOptions(form="stock", requests=150)), folder)
    tracefit.ingest([run], folder / "new")
    path = run / "traces.json"
    lines = []
    for line in path.read_text().splitlines():
        tree = json.loads(line)
        for resource_spans in tree["resourceSpans"]:
            for scope_spans in resource_spans["scopeSpans"]:
                scope_spans["scope"]["name"] = "vllm.llm_engine"
                for span in scope_spans["spans"]:
                    kept = [one for one in span["attributes"] if not one["key"].startswith(_LATER)]
                    forward = {"key": f"{_LATER}forward", "value": {"doubleValue": 250.0}}
                    span["attributes"] = [*kept, forward]
        lines.append(json.dumps(tree))
    path.write_text("\n".join(lines))
    tracefit.ingest([run], folder / "old")
    return {
        (age, name): pl.read_parquet(folder / age / name / "*/*.parquet")
        for age in ("new", "old")
        for name in ("requests", "timeline", "rejects")
    }


def test_decode_is_the_rest_after_the_first_token(tables):
    old = tables["old", "requests"]
    assert old["decode_us"].null_count() == 0
    assert (old["decode_us"] - (old["e2e_us"] - old["ttft_us"])).abs().max() == 0
    assert old["prefill_us"].null_count() == old.height
    difference = old.join(tables["new", "requests"], on="request_id", suffix="_new")
    assert (difference["decode_us"] - difference["decode_us_new"]).abs().median() < 1_000


def test_a_forward_time_in_milliseconds_is_read_in_them(tables):
    assert tables["old", "requests"]["model_forward_us"].unique().to_list() == [250_000.0]
    assert tables["old", "rejects"].height == 0


def test_steps_are_counted_from_them(tables):
    """The mean time of a step is that of the run with all attributes."""
    mean = {}
    for age in ("new", "old"):
        rows = tables[age, "timeline"].filter(pl.col("cycle_source") == "request")
        assert rows.height > 50
        mean[age] = rows["cycle_us"].median()
    assert mean["old"] == pytest.approx(mean["new"], rel=0.05)
