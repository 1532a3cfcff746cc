"""Inspect says what is there and what it allows, and agrees with what training then does."""

from __future__ import annotations

import gzip

import pytest

from tracefit import DataError, ingest, inspect, run
from tracefit.models.targets import TARGETS
from tracefit.reports.terminal_results import inspect_text
from tracefit.tables.store import TableStore

WAITS = {"beta.cycle_time": "step time"} | {target.model: target.title for target in TARGETS}


@pytest.fixture
def allows():
    """Return a function from an inspection of one deployment to what it allows, by name."""

    def of(found):
        (deployment,) = found.deployments
        return {a.what: a for a in deployment.allows}

    return of


@pytest.mark.slow
def test_facts_of_a_run_are_those_that_went_in(tmp_path, traces):
    traces.load(steps=120, requests=60)
    folder = traces.write(tmp_path / "busy")
    (folder / "traces.json.gz").write_bytes(gzip.compress((folder / "traces.json").read_bytes()))
    (folder / "traces.json").unlink()
    (inspected,) = inspect([folder]).runs
    assert (inspected.run_id, inspected.services, inspected.rejects, inspected.duplicate_spans) == (
        "busy",
        ("vllm",),
        0,
        0,
    )
    assert [(f.name, f.compression, f.shape) for f in inspected.files] == [
        ("traces.json.gz", "gzip", "OTLP JSON lines")
    ]
    assert inspected.bytes == inspected.files[0].bytes == (folder / "traces.json.gz").stat().st_size
    spans = {s.scope: s.spans for s in inspected.scopes}
    assert spans == {"vllm.api": 60, "vllm.scheduler": 60, "vllm.scheduler.step": 1}
    assert inspected.events["step.BATCH_SUMMARY"] == 120
    assert inspected.events["api.ARRIVED"] == inspected.events["journey.FINISHED"] == 60
    (server,) = inspected.servers
    assert (server.server, server.epochs, server.requests, server.steps) == ("engine", 1, 60, 120)
    assert server.step_sampling == 1.0
    assert all(check.held == check.of for check in inspected.checks)


@pytest.mark.slow
def test_protobuf_is_detected_by_its_content(tmp_path, traces):
    traces.request(1, 0, step=1)
    (inspected,) = inspect([traces.write(tmp_path / "run", name="traces.pb")]).runs
    assert [f.shape for f in inspected.files] == ["one OTLP protobuf message"]


@pytest.mark.slow
def test_a_single_trace_file_is_a_run_too(tmp_path, traces):
    folder = traces.request(1, 0, step=1).write(tmp_path / "run")
    (inspected,) = inspect([folder / "traces.json"]).runs
    assert inspected.events["api.ARRIVED"] == 1


@pytest.mark.slow
def test_copies_of_a_run_are_one_run(tmp_path, traces):
    traces.load(steps=120, requests=60)
    folders = [traces.write(tmp_path / copy / "busy") for copy in ("a", "b")]
    (inspected,) = inspect(folders).runs
    assert [f.name for f in inspected.files] == ["traces.json"]
    assert inspected.events["api.ARRIVED"] == 60


@pytest.mark.slow
def test_tables_are_described_like_their_traces(tmp_path, traces):
    folder = traces.load(steps=120, requests=60).write(tmp_path / "busy")
    ingest([folder], tmp_path / "tables")
    of_traces, of_tables = inspect([folder]), inspect([tmp_path / "tables"])
    assert of_tables.deployments == of_traces.deployments
    assert of_tables.runs[0].checks == of_traces.runs[0].checks
    assert of_tables.runs[0].events == of_traces.runs[0].events


@pytest.mark.slow
def test_dropped_events_and_servers_are_reported(tmp_path, traces):
    traces.steps(traces.summary(1, 1000), dropped=7)
    traces.server = "other"
    traces.steps(traces.summary(1, 1000), traces.summary(2, 2000), server="other")
    (inspected,) = inspect([traces.write(tmp_path / "run")]).runs
    assert {s.server: (s.steps, s.dropped_events) for s in inspected.servers} == {
        "engine": (1, 7),
        "other": (2, 0),
    }


@pytest.mark.slow
def test_events_outside_their_steps_are_counted(tmp_path, traces):
    """Request 1 says SCHEDULED in step 2, which began at 3,000 us, but 1,990 us before that."""
    traces.steps(*(traces.summary(k, 1000 + 2000 * (k - 1)) for k in range(1, 8)))
    traces.core(1, [("QUEUED", 900, 0), ("SCHEDULED", 1010, 2, {"schedule.kind": "FIRST"})])
    traces.core(2, [("QUEUED", 900, 0), ("SCHEDULED", 3010, 2, {"schedule.kind": "FIRST"})])
    (inspected,) = inspect([traces.write(tmp_path / "run")]).runs
    clock = {c.name: c for c in inspected.checks}["events within their steps"]
    assert (clock.held, clock.of, clock.detail) == (1, 2, "1 stamped outside the step they name")


CASES = {
    "everything": (240, 90, set(WAITS)),
    "only steps": (120, 0, {"beta.cycle_time"}),
    "only journeys": (0, 90, set(WAITS)),
    "few requests": (120, 12, {"beta.cycle_time"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_allowed_models_are_those_that_training_fits(tmp_path, traces, allows, quick, case):
    steps, requests, wanted = CASES[case]
    folder = traces.load(steps=steps, requests=requests).write(tmp_path / "run")
    found = inspect([folder])
    said = {model for model, what in WAITS.items() if allows(found)[what].verdict == "yes"}
    fitted = {m.name for m in run([folder], tmp_path / "out", options=quick).trained.fitted}
    assert said == fitted == wanted
    assert found.exit_code == 0


@pytest.mark.slow
def test_rows_are_counted_as_training_counts_them(tmp_path, traces, allows, quick):
    folder = traces.load().write(tmp_path / "run")
    text = allows(inspect([folder]))["step time"].reason
    run([folder], tmp_path / "out", options=quick)
    rows = TableStore(tmp_path / "out" / "tables").read("beta_training")
    kept = rows.filter(rows["excluded_reason"].is_null() | (rows["excluded_reason"] == "outlier"))
    train, held = ((kept["split"] == part).sum() for part in ("train", "holdout"))
    assert f"{train} rows to train on, {held} held out" in text
    # 240 steps: 239 pairs; by hand, the first 70 % rounded up train, less 20 of warm-up.
    assert (train, held) == (168 - 20, 71)
    assert text.startswith("239 adjacent pairs")


@pytest.mark.slow
def test_runs_of_one_deployment_count_together(tmp_path, new_traces, allows, quick):
    """Neither of the two has the 30 requests that training wants; both together do."""
    for name, seed in (("one", 1), ("two", 2)):
        new_traces().load(steps=120, requests=30, seed=seed).write(tmp_path / "runs" / name)
    one, both = inspect([tmp_path / "runs" / "one"]), inspect([tmp_path / "runs"])
    assert allows(one)["departure overhead"].verdict == "no"
    assert allows(both)["departure overhead"].verdict == "yes"
    assert "alpha.departure" in {
        m.name for m in run([tmp_path / "runs"], tmp_path / "out", options=quick).trained.fitted
    }


@pytest.mark.slow
def test_three_requests_allow_nothing(tmp_path, traces, allows):
    for number in (1, 2, 3):
        traces.request(number, 20_000 * number, step=6 * number)
    found = inspect([traces.write(tmp_path / "few")])
    assert found.exit_code == 1
    assert not any(a.trains for a in found.deployments[0].allows)
    assert "at least 30 and 10 are needed" in allows(found)["queue wait"].reason


def test_no_vllm_spans_at_all_is_an_error(tmp_path):
    (tmp_path / "traces.json").write_text('{"resourceSpans": []}\n')
    with pytest.raises(DataError, match="holds no spans of vllm"):
        inspect([tmp_path])


@pytest.mark.slow
def test_evidence_of_steps_alone(tmp_path, traces, allows):
    found = allows(inspect([traces.load(steps=120, requests=0).write(tmp_path / "run")]))
    assert {what: a.verdict for what, a in found.items()} == {
        "step time": "yes",
        "step.duration_us": "no",
        "batch composition": "limited",
        "context tokens": "limited",  # estimated from KV blocks in use
        "queue state": "limited",
        "queue wait": "no",
        "admission overhead": "no",
        "departure overhead": "no",
        "TTFT, ITL and E2E": "no",
        "prefix hits": "no",
        "roofline features": "no",
    }
    # The load claims 5 % of each step's time, rounded to whole microseconds.
    assert "covers 5.0 % of busy time" in found["step.duration_us"].reason
    assert found["roofline features"].reason == "without a GPU (`ServerOptions.gpu`)"
    assert found["prefix hits"].reason.startswith("no snapshots; --step-tracing-rich-subsample-rate")


def test_durations_that_are_the_step_time_are_reported_as_such(tmp_path, traces, allows):
    folder = traces.load(steps=120, requests=0, covered=0.95).write(tmp_path / "run")
    assert allows(inspect([folder]))["step.duration_us"].verdict == "yes"


@pytest.mark.slow
def test_complete_journeys_make_queue_and_composition_exact(tmp_path, traces, allows):
    folder = traces.load(steps=0, requests=90).write(tmp_path / "run")
    found = allows(inspect([folder]))
    assert found["queue state"].reason == "exact, from complete journeys"
    assert found["batch composition"].reason == "every step, from complete journeys"
    assert found["context tokens"].reason == "known on 100.0 % of steps"
    assert found["TTFT, ITL and E2E"].reason == "measured on 90 of 90 requests"


@pytest.mark.slow
def test_prefix_hits_need_snapshots_with_prompt_lengths(tmp_path, new_traces, allows):
    verdicts = {}
    for name, more in (("without", {}), ("with", {"effective_prompt_len": 60})):
        one = new_traces().request(1, 0, step=1)
        one.steps(one.summary(1, 1200), one.snapshot(1, 1250, "cmpl-1-0-00000000", **more))
        verdicts[name] = allows(inspect([one.write(tmp_path / name)]))["prefix hits"]
    assert verdicts["without"].reason == "1 snapshots, none with request.effective_prompt_len"
    assert (verdicts["with"].verdict, verdicts["with"].reason) == ("yes", "known for 1 request")


@pytest.mark.slow
def test_scopes_that_were_seen_and_not_read_are_named(tmp_path, traces):
    traces.request(1, 0, step=1).span("tgi.router\x1b[31m", "generate", (9, 9, 0), [])
    traces.span("tgi.router\x1b[31m", "generate", (9, 10, 0), []).span("x" * 500, "y", (9, 11, 0), [])
    found = inspect([traces.write(tmp_path / "run")])
    assert found.runs[0].other_scopes == {r"tgi.router\x1b[31m": 2, "x" * 64: 1}
    assert r"tgi.router\x1b[31m, 2 spans, not read" in inspect_text(found)
    assert {scope.dialect for scope in found.runs[0].scopes} == {"journey"}


def test_traces_of_another_engine_name_it(tmp_path, traces):
    folder = traces.span("tgi.router", "generate", (9, 9, 0), []).write(tmp_path / "run")
    with pytest.raises(DataError, match=r"1 spans of other scopes \(tgi\.router\), 0 unreadable"):
        inspect([folder])
