"""The main job on traces of an unmodified vLLM: what its spans allow, and what is said of the rest."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from tracefit.commands.inspect import inspect
from tracefit.commands.train import run
from tracefit.reports.terminal_results import inspect_text
from tracefit.tables.store import TableStore

ROOT = Path(__file__).parents[2]
BOOT_NS = 1_700_000_000_000_000_000


@pytest.fixture
def stock(traces, tmp_path):
    """150 requests, ten per second; the one with prompt length n waits 10 us per token in the queue."""
    for number in range(1, 151):
        prompt = 100 + 37 * number % 400
        wait = 10e-6 * prompt
        facts = {
            "gen_ai.request.id": f"cmpl-{number}",
            "gen_ai.request.max_tokens": 40,
            "gen_ai.usage.prompt_tokens": prompt,
            "gen_ai.usage.completion_tokens": 31,
            "gen_ai.latency.time_in_queue": wait,
            "gen_ai.latency.time_to_first_token": wait + 0.023,
            "gen_ai.latency.e2e": wait + 0.323,
            "gen_ai.latency.time_in_model_prefill": 0.02,
            "gen_ai.latency.time_in_model_decode": 0.3,
            "gen_ai.latency.time_in_model_inference": 0.32,
        }
        traces.span("vllm.llm_engine", "llm_request", (number, number, 0), [], attributes=facts)
        span = traces.spans[-1]
        span["startTimeUnixNano"] = str(BOOT_NS + number * 100_000_000)
        span["endTimeUnixNano"] = str(BOOT_NS + number * 100_000_000 + round((wait + 0.323) * 1e9))
    return traces.write(tmp_path / "stock")


@pytest.mark.slow
def test_alpha_trains_on_the_wait_and_advises_on_the_rest(stock, tmp_path):
    result = run([stock], tmp_path / "out")
    assert [m.name for m in result.trained.fitted] == ["alpha.queue_wait", "alpha.admission"]
    assert result.trained.fitted[0].holdout_mape_pct < 1, "the wait is a line in the prompt's length"
    rows = pl.concat(
        pl.read_parquet(p, hive_partitioning=False) for p in (tmp_path / "out").rglob("alpha_training/**/*.parquet")
    )
    rows = {name: of for (name,), of in rows.partition_by("target", as_dict=True).items()}
    # TTFT is 23 ms longer than the wait, and the prefill takes 20 of them.
    assert rows["admission"]["y"].to_list() == pytest.approx([3_000] * 150)
    models = json.loads((tmp_path / "out" / "models" / "alpha.json").read_text())["models"]
    assert [m["target"]["source"].partition(",")[0] for m in models] == ["request spans"] * 2
    assert models[1]["target"]["definition"].startswith("TTFT less queue wait and prefill")
    rows = rows["queue_wait"]
    assert rows.height == 150
    assert rows["y"].to_list() == pytest.approx((10.0 * rows["prompt_tokens"]).to_list())
    missing = {name: str(one) for one in result.trained.not_fitted for name in one.models}
    # Here requests that run side by side have their tokens at times of their own, which one engine cannot do.
    assert "token times are closer together" in missing["beta.cycle_time"]
    assert "no flag of an unmodified vLLM gives it" in missing["alpha.departure"]


@pytest.mark.slow
def test_inspect_names_remedies_of_a_stock_server(stock, tmp_path, traces):
    said = inspect_text(inspect(stock))
    assert "--api-server-count 1" in " ".join(said.split())
    for flag in ("--step-tracing", "--enable-journey-tracing", "journey-tracing-sample-rate"):
        assert flag not in said
    # Nor is it shown as a lack that there are no events: no such span has any.
    assert not [text for text in ("both layers", "event", "sampled:", "step.duration_us") if f"  {text}" in said]
    traces.records.clear()
    of_fork = inspect_text(inspect(traces.load(steps=120, requests=0).write(tmp_path / "fork")))
    assert "--enable-journey-tracing" in of_fork
    assert "OTEL_TRACES_SAMPLER" not in of_fork


@pytest.mark.slow
def test_recording_of_steps_advises_stock_spans():
    said = " ".join(inspect_text(inspect(ROOT / "fixtures/recordings/fpm-dynamo")).split())
    assert said.count("a span of every request gives it: start the server with --otlp-traces-endpoint URL") == 2
    assert "departure overhead no no requests; no flag of an unmodified vLLM gives it" in said
    assert "fork of vLLM" not in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attribute", "value", "column"),
    [
        ("gen_ai.latency.time_in_queue", 1e9, "time_in_queue_us"),
        pytest.param("gen_ai.latency.time_in_queue", 1e300, "time_in_queue_us", marks=pytest.mark.slow),
        pytest.param("gen_ai.latency.time_in_queue", -5.0, "time_in_queue_us", marks=pytest.mark.slow),
        pytest.param("gen_ai.usage.prompt_tokens", 10**18, "prompt_tokens", marks=pytest.mark.slow),
    ],
)
def test_absurd_attribute_is_counted_and_changes_no_model(stock, tmp_path, quick, attribute, value, column):
    """One of 150 requests: a wait of thirty years made the error of the queue wait 16,000 %."""
    lines = (stock / "traces.json").read_text().splitlines()
    record = json.loads(lines[75])
    span = record["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    kind = "doubleValue" if isinstance(value, float) else "intValue"
    next(a for a in span["attributes"] if a["key"] == attribute)["value"] = {kind: value}
    lines[75] = json.dumps(record)
    (stock / "traces.json").write_text("\n".join(lines) + "\n")
    result = run([stock], tmp_path / "out", options=quick)
    assert result.exit_code == 3
    assert result.trained.fitted[0].holdout_mape_pct < 1
    tables = TableStore(tmp_path / "out" / "tables")
    assert tables.read("rejects")["reason"].to_list() == [f"requests.{column} is out of range"]
    assert tables.read("requests").height == 150
    assert tables.read("requests")[column].null_count() == 1
