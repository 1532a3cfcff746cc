"""Summaries at the end of a command: blocks per deployment, no line wider than a terminal, the page to open last."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tracefit.models.targets import TARGETS
from tracefit.reports.terminal_results import ingest_text, run_text, train_text
from tracefit.reports.trained import RunResult, TrainResult
from tracefit.results.models import (
    DeploymentSummary,
    LatencySummary,
    MissingModels,
    ModelSummary,
)
from tracefit.results.requests import Quantiles, RequestGroup
from tracefit.results.traces import IngestResult, RunSummary
from tracefit.text import DeploymentLabel, deployment_labels

RUN = RunSummary("busy", "deployment", 1, 1000, 1416, 3, 2, 5, 0, 9536, 1, 1, 6764, 674)
MODEL = ModelSummary(
    "beta.cycle_time",
    "deployment",
    holdout_mdape_pct=1.234,
    holdout_p90_ape_pct=4.91,
    holdout_mape_pct=2.345,
    holdout_mae=1859.4,
    baseline_mae=4728.0,
    reference_mae=None,
    skill=0.6067,
    rows_used=4436,
    rows_holdout=2019,
)
LATENCY = LatencySummary("ttft", "deployment", 79, 27.4, 81.0, 33.4, 25.1, 2.5)


def _trained(*fitted, **more):
    files = (Path("m/beta.json"), Path("m/report.html"))
    return TrainResult(Path("m"), files, Path("m/e"), Path("m/r"), fitted, **more)


def test_counts_stand_below_their_heads():
    text = ingest_text(IngestResult(Path("out/tables"), (RUN,)))
    head, row = text.splitlines()[:2]
    for name, value in {
        "spans": "1,416",
        "steps": "6,764",
        "requests": "674",
        "rejects": "5",
        "dropped events": "9,536",
        "duplicates": "2",
    }.items():
        end = head.index(name) + len(name)
        assert row[:end].split()[-1] == value
    assert row.startswith("busy")
    assert "out/tables" in text


def test_errors_files_and_missing_models():
    missing = MissingModels("deployment", ("alpha.queue_wait", "alpha.departure"), "why", "what to do")
    lines = train_text(_trained(MODEL, not_fitted=(missing,))).splitlines()
    assert lines[0] == "deployment deployment"
    assert lines[2].split() == ["beta.cycle_time", "1.23", "%", "4.91", "%", "1,859", "4,728", "2,019"]
    assert "  alpha.queue_wait, alpha.departure were not fitted: why; what to do" in lines
    assert "wrote   m/beta.json" in lines


def test_a_mean_that_a_few_rows_dominate_is_called_misleading():
    assert "misleads" not in train_text(_trained(MODEL))
    admission = replace(MODEL, name="alpha.admission", holdout_mdape_pct=0.06, holdout_mape_pct=105.0)
    text = " ".join(train_text(_trained(admission)).split())
    assert (
        "alpha.admission: the mean error misleads. Half of the held-out rows are within 0.06 %, nine of ten within "
        "4.9 %; a few rows that are far off, or small, raise the mean to 105 %. Read the median error and the MAE"
    ) in text


def test_one_deployment_is_a_few_lines_of_80_columns():
    names = ("beta.cycle_time", *(target.model for target in TARGETS))
    uses = ("simulation", "capacity planning", "autoscaling", "alerting")
    result = _trained(
        *(replace(MODEL, name=n, deployment_id="llama-3.1-8b-instruct.h100-sxm.tp1.d956bf21") for n in names),
        latencies=(replace(LATENCY, deployment_id="llama-3.1-8b-instruct.h100-sxm.tp1.d956bf21"),),
        deployments=(DeploymentSummary("llama-3.1-8b-instruct.h100-sxm.tp1.d956bf21", ("busy",), {}),),
        verdicts={"llama-3.1-8b-instruct.h100-sxm.tp1.d956bf21": dict.fromkeys(uses, "with limits")},
    )
    text = run_text(RunResult(IngestResult(Path("t"), (RUN,)), result))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "open    m/report.html"
    block = lines[lines.index("deployment llama-3.1-8b-instruct.h100-sxm.tp1") :]
    assert block.index("") <= 9 + len(TARGETS)
    # The table has errors a user can have; those with measured state are below it.
    assert next(line for line in block if line.startswith("  TTFT ")).split() == [
        *("TTFT", "27.4", "%", "81", "%", "33.4", "%", "25.1", "%", "79")
    ]
    assert "  given the measured queue and batches: TTFT 2.5 %" in block


def test_a_verdict_that_is_not_yes_has_its_first_reason():
    result = _trained(
        MODEL,
        verdicts={"deployment": {"simulation": "no", "capacity planning": "yes", "alerting": "no"}},
        reasons={"deployment": {"simulation": "few rows", "capacity planning": "good", "alerting": "few rows"}},
    )
    assert "  simulation, alerting: no, few rows\n  capacity planning: yes\n" in train_text(result)


def test_deployments_with_one_name_show_runs_and_settings():
    settings = {"max_num_seqs": "64", "dtype": "bfloat16"}
    labels = deployment_labels(
        {
            "m.gpu.tp1.00000001": (("monday",), settings),
            "m.gpu.tp1.00000002": (("friday", "sunday"), settings | {"max_num_seqs": "128"}),
            "other.gpu.tp1.00000003": (("monday",), settings),
        }
    )
    assert labels == {
        "m.gpu.tp1.00000001": DeploymentLabel("m.gpu.tp1.00000001", "run monday; max_num_seqs 64"),
        "m.gpu.tp1.00000002": DeploymentLabel("m.gpu.tp1.00000002", "runs friday, sunday; max_num_seqs 128"),
        "other.gpu.tp1.00000003": DeploymentLabel("other.gpu.tp1"),
    }


def test_the_recording_that_may_give_a_yes_is_said():
    for minutes, words in ((12, "for a yes: record 12 minutes as the report says"), (1, "record 1 minute as")):
        deployments = (DeploymentSummary("deployment", ("busy",), {}, minutes),)
        assert words in train_text(_trained(MODEL, deployments=deployments))
    none = (DeploymentSummary("deployment", ("busy",), {}),)
    assert "for a yes" not in train_text(_trained(MODEL, deployments=none))


def test_served_latencies_are_above_the_errors():
    """In milliseconds, of a run whose first token came in 12.5 ms at the median; of several runs the largest ones."""
    ms = Quantiles(90, 0.02, 0.0125, 0.0391, 0.25)
    none = Quantiles(0, None, None, None, None)
    busy = RequestGroup("run", "busy", 100, 4, 0, 0, 0, 0, 20.0, 5.0, 512.4, ms, none, ms, none)
    deployments = (DeploymentSummary("deployment", ("busy", "a", "b", "c"), {}),)
    lines = train_text(_trained(MODEL, deployments=deployments, served=(busy,))).splitlines()
    measured = lines.index("  measured  P50 ms  P90 ms  P99 ms  requests")
    assert lines[measured + 1].split() == ["TTFT", "12.5", "39.1", "250", "90"]
    assert lines[measured + 2].split() == ["E2E", "12.5", "39.1", "250", "90"]
    assert lines[measured + 3] == "  the server: 5 requests/s, 512 output tokens/s, 4 of 100 requests failed"
    assert measured < next(k for k, line in enumerate(lines) if "beta.cycle_time" in line)
    fewer = [replace(busy, name=name, requests=n, failed=0) for n, name in enumerate("abc", 1)]
    text = train_text(_trained(MODEL, deployments=deployments, served=(*fewer, busy)))
    assert [line.split()[1] for line in text.splitlines() if line.startswith("  TTFT ")] == ["busy", "c", "b"]
    assert "  1 more run with requests: see the report" in text
