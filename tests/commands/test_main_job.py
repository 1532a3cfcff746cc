"""The main job: what it leaves, and that its parts and repetitions give the same."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from tracefit import DataError, ingest, run, train
from tracefit.models.targets import TARGETS
from tracefit.tables.schema import TABLES
from tracefit.tables.store import TableStore

RESULTS = ("models/alpha.json", "models/beta.json", "evaluation.json", "report.md", "report.html")
CONTRACT = {
    "runs",
    "spans",
    "journey_events",
    "steps",
    "request_snapshots",
    "requests",
    "timeline",
    "alpha_training",
    "beta_training",
    "rejects",
}


def test_the_job_leaves_tables_models_evaluation_and_report(trained):
    assert sorted(p.name for p in trained.iterdir()) == [
        "evaluation.json",
        "models",
        "report.html",
        "report.md",
        "tables",
    ]
    assert sorted(p.name for p in (trained / "models").iterdir()) == ["alpha.json", "beta.json"]
    assert {p.name for p in (trained / "tables").iterdir()} >= CONTRACT


@pytest.mark.slow
@pytest.mark.usefixtures("whole_pages")
def test_ingest_and_train_give_the_bytes_of_run(tmp_path, trained, new_traces):
    folder = new_traces().load().write(tmp_path / "busy")
    ingest([folder], tmp_path / "tables")
    shutil.rmtree(folder)
    train(tmp_path / "tables", tmp_path / "models")
    for result in RESULTS:
        here = tmp_path / "models" / result.removeprefix("models/")
        assert here.read_bytes() == (trained / result).read_bytes(), result


@pytest.fixture
def two_runs(tmp_path, new_traces):
    """Return a folder of two run folders, one a level deeper."""
    new_traces().load(steps=120, requests=60, seed=1).write(tmp_path / "runs" / "one")
    new_traces().load(steps=120, requests=60, seed=2).write(tmp_path / "runs" / "more" / "two")
    return tmp_path / "runs"


@pytest.mark.slow
def test_runs_of_one_deployment_are_trained_together(tmp_path, two_runs, models_of, quick):
    result = run([two_runs], tmp_path / "out", options=quick)
    assert {r.run_id for r in result.ingested.runs} == {"one", "two"}
    beta = models_of(tmp_path / "out" / "models")["beta.cycle_time"]
    assert beta["training"]["runs"] == ["one", "two"]
    # 119 cycles in each run: the first 70 %, rounded up, train; 20 of them are warm-up.
    assert (beta["training"]["rows"], beta["training"]["rows_holdout"]) == (2 * 84, 2 * 35)
    assert beta["training"]["rows_used"] == 2 * 64
    assert [r["run_id"] for r in beta["training"]["time_range"]] == ["one", "two"]


@pytest.mark.slow
def test_order_of_runs_does_not_matter(tmp_path, two_runs, quick):
    folders = [two_runs / "one", two_runs / "more" / "two"]
    run(folders, tmp_path / "a", options=quick)
    run(folders[::-1], tmp_path / "b", options=quick)
    for result in RESULTS:
        assert (tmp_path / "a" / result).read_bytes() == (tmp_path / "b" / result).read_bytes(), result


@pytest.mark.slow
def test_runs_of_two_configurations_are_two_deployments(tmp_path, two_runs, quick):
    with (two_runs / "one" / "exp-config.yaml").open("a") as config:
        config.write("enforce_eager: true\n")
    run([two_runs], tmp_path / "out", options=quick)
    deployments = json.loads((tmp_path / "out" / "evaluation.json").read_text())["deployments"]
    assert sorted(s["runs"] for s in deployments) == [["one"], ["two"]]
    names = {s["deployment_id"] for s in deployments}
    assert len(names) == 2
    assert all(name.startswith("llama-2-7b.no-gpu.tp1.") for name in names)


@pytest.mark.slow
def test_without_a_model_the_report_shows_the_server(tmp_path, new_traces, quick):
    """Three requests in two seconds, each with its first token 11.2 ms after it came."""
    few = new_traces()
    for number in range(3):
        few.request(number + 1, 1e6 * number, step=10 * number + 1)
    folder = few.write(tmp_path / "few")
    with pytest.raises(DataError, match=r"nothing can be fitted: .*report\.html says what the server did"):
        run([folder], tmp_path / "out", options=quick)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"report.md", "report.html", "tables"}
    text = (tmp_path / "out/report.md").read_text()
    assert "There is no model of step times: " in text
    assert "Run `few` is not replayed: no model was trained on run few." in text
    (row,) = [line for line in text.splitlines() if line.startswith("| `few` | 3 |")][:1]
    assert " 11.2 / 11.2 / 11.2 " in row
    # A deployment with nothing fitted stands beside others.
    new_traces().load(steps=120, requests=60).write(tmp_path / "busy").joinpath("exp-config.yaml").write_text(
        "model: other\n"
    )
    run([folder, tmp_path / "busy"], tmp_path / "both", options=quick)
    before = (tmp_path / "both/report.md").read_bytes()
    with pytest.raises(DataError, match="nothing can be fitted"):
        run([folder], tmp_path / "both", options=quick)
    assert (tmp_path / "both/report.md").read_bytes() == before, "models and report of a training stay together"


@pytest.mark.slow
def test_reused_folder_trains_on_the_named_run(tmp_path, two_runs, models_of, quick):
    first = run([two_runs / "one"], tmp_path / "out", options=quick)
    assert not any("also has" in text for text in first.trained.warnings)
    second = run([two_runs / "more"], tmp_path / "out", options=quick)
    beta = models_of(tmp_path / "out" / "models")["beta.cycle_time"]
    assert beta["training"]["runs"] == ["two"]
    assert "tables also has one of an earlier command; models and report are only of two" in second.trained.warnings[0]


def test_every_request_and_target_is_a_training_row(trained):
    rows = TableStore(trained / "tables").read("alpha_training")
    counts = dict(rows.group_by("target").len().iter_rows())
    assert counts == {target.name: 90 for target in TARGETS}
    assert set(rows["split"]) == {"train", "holdout"}
    wait = rows.filter(target="queue_wait")
    assert wait["y"].to_list() == pytest.approx([200.0] * 90, abs=0.01)


@pytest.mark.parametrize(("kind", "rule"), [("alpha", {"step_residual_us"}), ("beta", set())])
def test_training_rows_have_every_feature_offered(trained, kind, rule):
    """And what a boundary rule is judged with."""
    models = json.loads((trained / "models" / f"{kind}.json").read_text())["models"]
    offered = {x["feature"] for m in models for x in m["features_left_out"]}
    for model in models:
        line = model.get("without_clock", model)
        offered |= {t["feature"] for part in line.get("regimes", [line]) for t in part["terms"]}
    rows = TableStore(trained / "tables").read(f"{kind}_training")
    assert set(rows.columns) - set(TABLES[f"{kind}_training"].names) == offered | rule


def test_every_cycle_is_a_row_and_left_out_ones_are_marked(trained):
    rows = TableStore(trained / "tables").read("beta_training")
    assert rows["step_id"].to_list() == list(range(1, 240))
    assert rows.filter(excluded_reason="warm_up")["step_id"].to_list() == list(range(1, 21))
    assert rows.filter(split="holdout")["excluded_reason"].null_count() == 71


@pytest.mark.slow
def test_the_runs_table_says_where_every_setting_comes_from(tmp_path, traces):
    folder = traces.request(1, 0, step=1).write(tmp_path / "run")
    ingest([folder], tmp_path / "tables")
    row = TableStore(tmp_path / "tables").read("runs").row(0, named=True)
    settings = json.loads(row["settings"])["settings"]
    assert settings["max_num_seqs"] == {"value": 64, "source": "read"}
    assert settings["gpu_memory_utilization"] == {"value": 0.9, "source": "assumed"}
    assert json.loads(row["model_config"])["hidden_size"] == 4096
    assert (row["model"], row["gpu"], row["dialects"]) == (
        "meta-llama/Llama-2-7b-hf",
        None,
        "vllm.api,vllm.scheduler",
    )


COLUMNS = {
    "alpha": "alpha_latency_ms,prompt_tokens,queue_depth,running_depth,kv_ratio,model_size,hw_type,tp",
    "beta": "step_duration_us,num_prefill,num_decode,prefill_tokens,decode_tokens,kv_ratio,model_type,hw,tp",
}


@pytest.mark.slow
def test_sample_tables_have_the_columns_of_the_specification(tmp_path, traces, quick):
    folder = traces.load(steps=120, requests=60).write(tmp_path / "run")
    with (folder / "exp-config.yaml").open("a") as config:
        config.write("gpu: H100\n")
    ingest([folder], tmp_path / "tables")
    # A set that does not offer the columns of the sample.
    options = replace(quick, sample_csv=True, features="work_max")
    train(tmp_path / "tables", tmp_path / "models", options=options)
    texts = {kind: (tmp_path / "models" / f"{kind}_sample.csv") for kind in COLUMNS}
    for kind, path in texts.items():
        assert path.read_text().splitlines()[0] == COLUMNS[kind]
    alpha, beta = (pl.read_csv(path) for path in texts.values())
    assert (alpha.height, beta.height) == (60, 119)
    assert alpha["alpha_latency_ms"].to_list() == pytest.approx([0.2] * 60, abs=1e-5)
    assert alpha.select("model_size", "hw_type", "tp").unique().rows() == [("6.7B", "H100-SXM", 1)]
    assert beta.select("model_type", "hw", "tp").unique().rows() == [("dense", "H100-SXM", 1)]
    steps = TableStore(tmp_path / "tables").read("steps").head(119)
    names = ("num_prefill_reqs", "num_decode_reqs", "prefill_tokens", "decode_tokens", "kv_usage_ratio")
    np.testing.assert_allclose(beta.select(pl.nth(range(1, 6))).to_numpy(), steps.select(names).to_numpy())


@pytest.mark.slow
def test_a_sample_table_of_nothing_has_its_columns(tmp_path, traces, quick):
    folder = traces.load(steps=120, requests=0).write(tmp_path / "run")
    run([folder], tmp_path / "out", options=replace(quick, sample_csv=True))
    assert (tmp_path / "out" / "models" / "alpha_sample.csv").read_text() == COLUMNS["alpha"] + "\n"


def test_without_asking_there_are_no_sample_tables(trained):
    assert not list(trained.rglob("*.csv"))


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        (6_738_415_616, "6.7B"),
        (33_743_970_304, "34B"),
        (999, "999"),
        (350_000_000, "350M"),
        (1_500_000_000, "1.5B"),
    ],
)
def test_model_sizes_are_written_as_people_say_them(parameters, text):
    from tracefit.commands.training_tables import model_size  # noqa: PLC0415

    assert model_size(parameters) == text


@pytest.mark.slow
def test_clocks_that_disagree_are_counted_in_the_evaluation(tmp_path, traces, quick):
    """The API process of one host, an hour ahead, and two SCHEDULED events half a second before their step."""
    traces.load(steps=240, requests=100)
    api = [e for span in traces.spans if span["name"] == "llm_request" for e in span["events"]]
    traces.change(api, lambda at_s: at_s + 3600, "event.ts.monotonic")
    scheduled = traces.events("journey.SCHEDULED")[:2]
    traces.change(scheduled, lambda at_s: at_s - 0.5, "ts.monotonic")
    traces.change(scheduled, lambda at_ns: at_ns - 500_000_000, "ts.monotonic_ns")
    run([traces.write(tmp_path / "run")], tmp_path / "out", options=quick)
    evaluation = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    timeline = evaluation["deployments"][0]["timeline"]
    assert (timeline["clock_corrected_events"], timeline["clock_disagreements"]) == (len(api), 2)
    assert timeline["clock_checked_events"] == 300
    report = (tmp_path / "out" / "report.md").read_text()
    assert "| events that disagree with the step clock | 2 of 300 |" in report
