"""The server as measured and over the rate, and its slowest requests: numbers of the tables, and reasons counted by
hand."""

from __future__ import annotations

import json
import re

import numpy as np
import polars as pl
import pytest

import tracefit
from tracefit.coefficients.files import read_evaluation
from tracefit.diagnostics.slowest import SLOWEST_COLUMNS, slowest_requests
from tracefit.reports.document import MOST_WORDS, Report, Table, markdown_files, section
from tracefit.reports.figures.evaluation import rates_figure, served_figure
from tracefit.tables.schema import REQUESTS
from tracefit.tables.store import TableStore


@pytest.fixture
def requests(trained):
    return TableStore(trained / "tables").read("requests")


@pytest.fixture
def deployment(trained):
    (one,) = read_evaluation(trained / "evaluation.json").deployments
    return one


def test_served_latencies_are_those_of_all_requests(deployment, requests):
    rows = {row[0]: row[1] for row in served_figure(deployment).summary.rows}
    for name in ("ttft", "e2e"):
        ms = requests[f"{name}_us"].drop_nulls().to_numpy() / 1e3
        for q in (50, 90, 99):
            cell = float(rows[f"{name.upper()} P{q}"].replace(",", ""))
            assert cell == pytest.approx(np.percentile(ms, q), rel=0.006)
    (run,) = deployment.served
    assert (run.name, run.requests) == ("busy", requests.height)
    span = 1e-9 * (
        requests.select(pl.max_horizontal("departed_ns", "finished_ns").max()).item() - requests["arrival_ns"].min()
    )
    assert run.requests_per_s == pytest.approx(requests.height / span)


def test_goodput_is_of_requests_within_every_objective(trained, tmp_path, requests):
    limits = {name: float(requests[f"{name}_us"].median()) / 1e3 for name in ("ttft", "e2e")}
    tracefit.report(trained, out=tmp_path, slo_ms=limits)
    within = requests.filter(*(pl.col(f"{name}_us") <= 1e3 * ms for name, ms in limits.items()))
    (line,) = [x for x in (tmp_path / "report.md").read_text().splitlines() if x.startswith("| `busy` | ")][:1]
    share, rate = line.split(" | ")[-2:]
    assert float(share.removesuffix(" %")) == pytest.approx(100 * within.height / requests.height, rel=0.01)
    assert float(rate.removesuffix(" |")) > 0


def test_nobody_sets_an_objective_but_the_user(trained):
    text = (trained / "report.md").read_text()
    assert "SLO" not in text
    assert "within the objectives" not in text


@pytest.mark.slow
def test_a_line_is_dotted_beyond_the_load_of_the_training(deployment):
    figure = rates_figure(deployment, {"ttft": 30.0})
    points = deployment.rates
    assert [p.rate_per_s for p in points] == figure.curves["rates"] == sorted(figure.curves["rates"])
    for trace in figure.traces:
        is_dotted = trace["line"]["dash"] == "dot"
        drawn = [k for k, y in enumerate(trace["y"]) if y is not None]
        inside = [k for k in range(len(points) - 1) if {k, k + 1} <= set(drawn)]
        assert inside
        assert all(is_dotted == (points[k].extrapolates or points[k + 1].extrapolates) for k in inside)
    assert figure.curves["limits"] == {"TTFT P99": 30.0}
    assert rates_figure(deployment, {}).curves["limits"] == {}


# -- the slowest requests --------------------------------------------------------------------------------


def _request(name, *, arrival, scheduled, first, end, **more):
    ms = 1_000_000
    row = {
        "run_id": "r",
        "server": "s",
        "epoch": 0,
        "request_id": name,
        "arrival_ns": arrival * ms,
        "queued_ns": arrival * ms,
        "first_scheduled_ns": scheduled * ms,
        "ttft_us": 1e3 * (first - arrival),
        "e2e_us": 1e3 * (end - arrival),
        "queue_wait_us": 1e3 * (scheduled - arrival),
        "prefill_us": 1e3 * (first - scheduled),
        "decode_us": 1e3 * (end - first),
        "prompt_tokens": 100,
        "output_tokens": 11,
        "num_preemptions": 0,
    }
    return row | more


def _reasons(*rows):
    frame = REQUESTS.conform(pl.DataFrame(list(rows), infer_schema_length=None)).select(
        list(dict.fromkeys(SLOWEST_COLUMNS))
    )
    return {(r.name, r.latency): r.reason for r in slowest_requests(frame)}


def test_a_request_that_waits_says_behind_how_many():
    """At 10 ms two others are in the queue; at 30 ms one of them is scheduled already."""
    rows = [
        _request("a", arrival=0, scheduled=25, first=30, end=40),
        _request("b", arrival=5, scheduled=60, first=65, end=80),
        _request("c", arrival=10, scheduled=90, first=95, end=120),
        _request("d", arrival=30, scheduled=95, first=100, end=130),
    ]
    reasons = _reasons(*rows)
    assert reasons["c", "ttft"] == "waited 80 ms behind 2 requests"
    assert reasons["d", "ttft"] == "waited 65 ms behind 2 requests", "b and c; a runs"
    assert reasons["a", "ttft"] == "waited 25 ms for the next step; prefill of 100 tokens, 5 ms"


def test_a_long_prefill_says_in_how_many_chunks():
    slow = _request("p", arrival=0, scheduled=0, first=200, end=230, first_scheduled_step=7, first_token_step=10)
    assert _reasons(slow)["p", "ttft"] == "prefill of 100 tokens in 4 chunks, 200 ms"


def test_a_preempted_request_and_a_long_output_say_so():
    quick = [
        _request(f"q{k}", arrival=1000 * k, scheduled=1000 * k, first=1000 * k + 90, end=1000 * k + 91)
        for k in range(5)
    ]
    preempted = _request(
        "x", arrival=9000, scheduled=9000, first=9010, end=9810, num_preemptions=2, requeue_wait_us=500_000.0
    )
    reasons = _reasons(*quick, preempted | {"decode_us": 300_000.0})
    assert reasons["x", "e2e"] == "preempted 2 times, 500 ms; 11 output tokens at 30 ms each, 300 ms"


def test_a_request_that_was_cut_off_is_not_slow():
    assert _reasons(_request("a", arrival=0, scheduled=1, first=2, end=3) | {"finish_status": "aborted"}) == {}


# -- Markdown --------------------------------------------------------------------------------------------


def test_a_long_report_is_a_summary_with_working_links():
    words = "word " * (MOST_WORDS // 2)
    rows = Table(("run",), (("`[x](//evil)`",),))
    made = Report("t", "lead", ("first", section("Deployment `a/b`", words, rows), section("Deployment `a/b`", words)))
    files = markdown_files(made)
    first = files["report.md"]
    assert len(first.split()) < 40
    assert (
        re.findall(r"\]\(([^)]*)\)", first)
        == ["report/01-deployment-a-b.md", "report/02-deployment-a-b.md"]
        == list(files)[1:]
    )
    assert "](//evil)" not in files["report/01-deployment-a-b.md"]
    assert "first" in first
    assert words.strip() in files["report/02-deployment-a-b.md"]


def test_a_short_report_is_one_file():
    assert list(markdown_files(Report("t", "", (section("a", "b"), section("c", "d"))))) == ["report.md"]


def test_the_evaluation_has_the_numbers_of_the_page(trained):
    (deployment,) = json.loads((trained / "evaluation.json").read_text())["deployments"]
    assert deployment["rates"][0]["rate_per_s"] < deployment["rates"][-1]["rate_per_s"]
    assert deployment["served"][0]["name"] == "busy"
