"""Latencies and step times over the load: counted by hand, runs overlaid, objectives as lines."""

from __future__ import annotations

import polars as pl
import pytest

import tracefit
from tracefit.coefficients.files import read_evaluation
from tracefit.commands.report import parse_slo
from tracefit.diagnostics.groups import bins_by_run
from tracefit.diagnostics.load import latencies_over_load, step_times_over_batch
from tracefit.errors import UsageError
from tracefit.reports.figures.evaluation import distribution_figures
from tracefit.reports.figures.load import latency_load_figure, runs_figure

MS = 1_000_000


def _requests(run="a", *, arrivals=(0, 10, 20, 90), ends=(50, 100, None, 95), ttft=(4, 6, 8, 10)):
    n = len(arrivals)
    return pl.DataFrame(
        {
            "run_id": [run] * n,
            "server": ["s"] * n,
            "arrival_ns": [a * MS for a in arrivals],
            "queued_ns": [None] * n,
            "finished_ns": [None if e is None else e * MS for e in ends],
            "aborted_ns": [None] * n,
            "departed_ns": [None] * n,
            "finish_status": ["stop", "aborted", "stop", "stop"][:n],
            "ttft_us": [1000.0 * t for t in ttft],
            "itl_us": [1000.0] * n,
            "e2e_us": [None] * n,
        },
        schema_overrides=dict.fromkeys(("queued_ns", "aborted_ns", "departed_ns", "finished_ns"), pl.Int64)
        | {"e2e_us": pl.Float64},
    )


def test_the_load_is_the_requests_in_flight_when_one_arrives():
    """At 0, 10, 20 and 90 ms 0, 1, 2 and 1 others: the third has no end and counts for nobody."""
    found = latencies_over_load(_requests())
    assert list(found) == ["ttft", "itl"], "nothing is known of E2E"
    bins = _bins(found["ttft"])
    assert [(b.low, b.high, b.median) for b in bins] == [(0, 0, 4), (1, 1, 8), (2, 2, 8)], (
        "requests that met one load are one group"
    )
    assert "50.0 % of 4 requests had TTFT within 6 ms;" in latency_load_figure("s", found, {"ttft": 6.0}).note
    assert found["itl"].height == 3, "one was cut off"
    assert "within" not in latency_load_figure("s", found, {}).note


def _bins(rows):
    return bins_by_run(rows, "in_flight", "ms")["a"]


def test_percentiles_of_a_group_lie_between_ranks():
    """Of 4, 6, 8 and 10 ms at one load, P10 is at rank 0.3 and P90 at rank 2.7."""
    (one,) = _bins(pl.DataFrame({"run_id": "a", "in_flight": [0.0] * 4, "ms": [4.0, 6.0, 8.0, 10.0]}))
    assert (one.p10, one.median, one.p90) == pytest.approx((4.6, 7.0, 9.4))


def test_loads_of_two_servers_do_not_add_up():
    other = _requests().with_columns(server=pl.lit("t"))
    bins = _bins(latencies_over_load(pl.concat([_requests(), other]))["ttft"])
    assert max(b.high for b in bins) == 2


def test_step_times_are_of_steps_followed_by_a_known_one():
    timeline = pl.DataFrame(
        {
            "run_id": ["a", "a", "a", "b"],
            "cycle_us": [7000.0, 9000.0, 8000.0, 5000.0],
            "cycle_source": ["adjacent", "adjacent", "interval", "adjacent"],
            "idle_after": [False, True, False, False],
            "running_depth": [3, 4, 5, 6],
        }
    )
    found = step_times_over_batch(timeline)
    assert {run: [(b.middle, b.median) for b in bins] for run, bins in found.items()} == {
        "a": [(3, 7)],
        "b": [(6, 5)],
    }


@pytest.fixture
def deployment(trained):
    return read_evaluation(trained / "evaluation.json").deployments[0]


def _figures(deployment, requests, slo_ms, more_runs=0):
    by_load = latency_load_figure("s", latencies_over_load(requests), slo_ms, more_runs)
    return {f.kind: f for f in (*distribution_figures(deployment, {}, slo_ms), by_load)}


def _marks(figure):
    return [(s["name"], s["x0"] if s["x0"] == s["x1"] else s["y0"]) for s in figure.layout["shapes"]]


def test_one_run_has_median_p90_and_a_near_objective(deployment):
    figures = _figures(deployment, _requests(), {"ttft": 20.0, "itl": 11.0})
    load = figures["latency-by-load"]
    assert [(t["name"], t["yaxis"]) for t in load.traces] == [
        ("median", "y"),
        ("P90", "y"),
        ("median", "y2"),
        ("P90", "y2"),
    ]
    assert _marks(load) == [("TTFT: SLO 20 ms", 20.0)], (
        "of ITL it is 11 times the largest: the line would squeeze the figure"
    )
    assert "100 % of 3 requests had ITL within 11 ms" in load.note


def test_an_objective_is_a_line_of_the_distribution_too(deployment):
    p50 = deployment.latency["ttft"].distribution.measured[10] / 1000
    figures = _figures(deployment, _requests(), {"ttft": p50})
    assert _marks(figures["ttft"]) == [(f"SLO {p50:,g} ms", p50)]
    assert _marks(figures["itl"]) == []


def test_several_runs_are_overlaid(deployment):
    both = pl.concat([_requests("a"), _requests("b", ttft=(5, 7, 9, 11))])
    load = _figures(deployment, both, {}, more_runs=3)["latency-by-load"]
    assert load.title == "Latencies against load, P90 of each run"
    assert [(t["name"], t["yaxis"]) for t in load.traces] == [
        ("a", "y"),
        ("b", "y"),
        ("a", "y2"),
        ("b", "y2"),
    ]
    assert [t["showlegend"] for t in load.traces] == [True, True, False, False], "each run is listed once"
    assert "3 more runs" in load.note
    assert {row[1] for row in load.summary.rows} == {"`a`", "`b`"}


def test_step_times_of_several_runs_are_overlaid(deployment):
    bins = _bins(latencies_over_load(_requests())["ttft"])
    figure = runs_figure("s", {"a": bins, "b": bins})
    assert [t["name"] for t in figure.traces] == ["a", "b"]
    assert runs_figure("s", {"a": bins}) is None


def test_objectives_of_the_command_line():
    assert parse_slo(["ttft=500", "ITL = 50ms"]) == {"ttft": 500, "itl": 50}


@pytest.mark.parametrize("text", ["ttft", "ttft=fast", "=3"])
def test_an_objective_of_another_form_is_refused(text):
    with pytest.raises(UsageError, match="slo"):
        tracefit.report("nowhere", slo_ms=parse_slo([text]))


@pytest.mark.parametrize("slo", [{"tpot": 5.0}, {"ttft": 0.0}, {"itl": float("inf")}])
def test_a_wrong_objective_is_refused(trained, tmp_path, slo):
    with pytest.raises(UsageError, match="no objective"):
        tracefit.report(trained, out=tmp_path, slo_ms=slo)


@pytest.mark.slow
def test_the_report_draws_the_objectives_it_is_given(trained, tmp_path):
    tracefit.report(trained, out=tmp_path, slo_ms={"itl": 3.0})
    text = (tmp_path / "report.html").read_text()
    assert "ITL: SLO 3 ms" in text
    assert "Latencies against load" in text
