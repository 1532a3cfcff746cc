"""report.md: the evaluation's numbers for a person, none of its own."""

from __future__ import annotations

import json
import re

import pytest

from tracefit.coefficients.documents import Evaluation
from tracefit.coefficients.files import read_coefficients
from tracefit.commands.report import report_of
from tracefit.reports.document import Bullets, Figure, Report, Section, Table, markdown_text
from tracefit.tables.store import TableStore


@pytest.fixture
def report(trained):
    """Return a function that writes the report of the busy run, its evaluation changed first."""
    alpha, beta = (read_coefficients(trained / "models" / f"{kind}.json") for kind in ("alpha", "beta"))

    store = TableStore(trained / "tables")

    def write(change=lambda _: None):
        evaluation = json.loads((trained / "evaluation.json").read_text())
        change(evaluation)
        return markdown_text(report_of(Evaluation.model_validate(evaluation), alpha, beta, store).report)

    return write


def _rows(text, heading):
    """Cells of the table below the line that begins with `heading`."""
    table = text[text.index(heading) :].split("\n\n")[0] if heading.startswith("|") else text[text.index(heading) :]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def _number(cell):
    return float(cell.replace(",", "").removeprefix("<"))


def test_the_written_report_is_that_of_the_evaluation(trained, report):
    assert (trained / "report.md").read_text() == report()


def test_errors_are_those_of_the_hold_out(trained, report):
    models = json.loads((trained / "evaluation.json").read_text())["deployments"][0]["models"]
    rows = {row[0]: row[1:] for row in _rows(report(), "| model | n |")}
    for name, entry in models.items():
        held = entry["holdout"]
        expected = [held["n"], *(held[f"{k}_pct"] for k in ("mdape", "p90_ape", "p99_ape", "mape", "bias"))]
        expected += [held["mae"], entry["baseline"]["mae"], (entry["gradient_boosting"] or {}).get("mae")]
        cells = rows[f"`{name}`"]
        for cell, value in zip(cells, expected, strict=True):
            # Three digits of a duration; of a percentage one decimal, two below 1 %.
            same = cell == "-" if value is None else _number(cell) == pytest.approx(value, rel=5e-3, abs=0.05)
            assert same, name
    assert set(rows) >= {f"`{name}`" for name in models} | {"`beta.cycle_time`, decode only"}


def test_coefficients_are_those_of_the_file_with_intervals(trained, report):
    model = json.loads((trained / "models" / "beta.json").read_text())["models"][0]
    text = report()
    rows = {row[0]: row for row in _rows(text[text.index("## `beta.cycle_time`") :], "| term |")}
    assert _number(rows["intercept"][2]) == pytest.approx(model["intercept"]["value"], rel=1e-3)
    for term in model["terms"]:
        _, unit, value, interval, _ = rows[f"`{term['feature']}`"]
        assert unit == term["unit"]
        assert _number(value) == pytest.approx(term["value"], rel=1e-3)
        assert [_number(end) for end in interval.split(" to ")] == pytest.approx(term["ci95"], rel=1e-3)


def test_assumed_missing_and_left_out_facts_are_named(report):
    text = report()
    assert "GPU not given" in text
    assert "Without a GPU specification, hardware features are unknown" in text
    assumed = next(line for line in text.splitlines() if "Assumed, because no input states it: " in line)
    assert "gpu_memory_utilization 0.9 (vLLM's default)" in assumed
    assert ["`max_num_seqs`", "constant in the training rows (64)"] in _rows(text, "| feature | reason |")
    assert "left out: warm up 20" in text


def test_servers_and_their_sampling_rates_are_listed(report):
    def change(evaluation):
        (server,) = evaluation["ingest"]["servers"]
        assert (server["run_id"], server["server"], server["steps"], server["requests"]) == (
            "busy",
            "engine",
            240,
            90,
        )
        assert (server["step_sampling"], server["epochs"], server["dropped_events"]) == (1.0, 1, 0)
        server |= {
            "step_sampling": 0.125,
            "journey_sampling": None,
            "snapshot_sampling": 0.01,
            "seconds": 61.0,
        }

    (row,) = _rows(report(change), "| run | server |")
    assert row == ["`busy`", "engine", "61", "1", "90", "240", "12.5 %", "-", "1.0 %", "0"]


def test_rows_are_listed_by_run_and_model_with_exclusions(trained, report):
    rows = {row[1]: row for row in _rows(report(), "| run | model |")}
    evaluation = json.loads((trained / "evaluation.json").read_text())["deployments"][0]
    for file in ("alpha", "beta"):
        for model in json.loads((trained / "models" / f"{file}.json").read_text())["models"]:
            used = model["training"]
            cells = rows[f"`{model['name']}`"]
            assert cells[0] == "`busy`"
            assert [_number(c) for c in cells[2:4]] == [used["rows_used"], used["rows_holdout"]]
            left_out = dict(re.findall(r"([a-z ]+) (\d+)", cells[4]))
            assert {k.strip().replace(" ", "_"): int(n) for k, n in left_out.items()} == used["exclusions"]
    assert set(rows) == {f"`{name}`" for name in evaluation["models"]}


@pytest.mark.slow
def test_several_deployments_have_their_verdicts_side_by_side(report):
    def change(evaluation):
        (deployment,) = evaluation["deployments"]
        evaluation["deployments"] = [deployment, deployment]

    text = report(change)
    rows = _rows(text, "| deployment | simulation |")
    assert len(rows) == 2
    assert set(rows[0][1:5]) <= {"**yes**", "**with limits**", "**no**"}
    # A run that is not replayed has no error; the step times' is the next best.
    assert all(re.fullmatch(r"-|[+-][\d.]+ / [+-][\d.]+ %", cell) for cell in rows[0][5:8])
    assert re.fullmatch(r"[\d.]+ / [\d.]+ %", rows[0][8])
    assert "| deployment | simulation |" not in report()


def test_replayed_latencies_are_above_the_errors_of_models(report):
    quantities = [
        {
            "name": f"{n}_p{q}_us",
            "measured": 2000.0,
            "replayed": 2100.0,
            "error_pct": 5.0,
            "constant": 1000.0,
            "predicted": None,
        }
        for n in ("ttft", "itl", "e2e")
        for q in (50, 90, 99)
    ]
    run = {"run_id": "busy", "deployment_id": "s", "requests": 50, "in_flight": 2, "quantities": quantities}

    def change(evaluation):
        evaluation["deployments"][0]["replays"] = [
            run,
            {"run_id": "sparse", "deployment_id": "s", "reason": "only steps were traced"},
        ]

    text = report(change)
    assert text.index("| run | replayed |") < text.index("| error of |")
    row = _rows(text, "| run | replayed |")[0]
    assert row == ["`busy`", "TTFT", "2", "2.1", "+5.0", "+5.0", "+5.0", "-50.0", "-", "-50.0", "-"]
    assert "Run `sparse` is not replayed: only steps were traced." in text
    assert "off at P50 and P90 of TTFT by +5.0 % and +5.0 %" in text.split("##")[0]


@pytest.mark.slow
def test_a_machine_of_several_speeds_is_named(report):
    def change(evaluation, *, adjusted):
        ends = {"fastest_pct": -12.1, "slowest_pct": 4.6, "holdout_pct": -11.1, "adjusted": adjusted}
        speed = {"stretch_s": 30.0, "stretches": 6, "sd_pct": 6.7, **ends}
        evaluation["deployments"][0]["models"]["beta.cycle_time"]["speed"] = speed

    text = report(lambda evaluation: change(evaluation, adjusted=True))
    said = (
        "steps of equal batches took from 12.1 % shorter to 4.6 % longer than the mean of the training part in "
        "stretches of 30 s (standard deviation 6.7 %), the hold-out 11.1 % shorter"
    )
    assert said in text
    assert "At another time the machine may have another speed again" in text
    assert "several speeds" not in report(lambda evaluation: change(evaluation, adjusted=False))


@pytest.mark.slow
def test_dropped_events_are_shouted(report):
    assert "were dropped" not in report()

    def change(evaluation):
        evaluation["ingest"]["dropped_events"] = 9536

    text = report(change)
    assert "**9,536 events were dropped by the server's SDK**" in text
    assert "OTEL_SPAN_EVENT_COUNT_LIMIT" in text


def test_a_missing_model_has_its_reason_and_remedy(report):
    def change(evaluation):
        lost = {"name": "alpha.departure", "reason": "no events", "remedy": "start with --flag"}
        evaluation["deployments"][0]["not_fitted"] = [lost]
        del evaluation["deployments"][0]["models"]["alpha.departure"]

    assert "**alpha.departure** was not fitted: no events; start with --flag" in report(change)


def test_extrapolations_are_counted(report):
    def change(evaluation):
        evaluation["deployments"][0]["models"]["beta.cycle_time"]["extrapolated_rows"] = 12

    assert "12 of 71 held-out rows lie outside the range" in report(change)


def test_scheduling_ahead_and_sampled_journeys_are_said(report):
    def change(evaluation):
        evaluation["deployments"][0]["timeline"] |= {"execution_lag_steps": 1, "journey_sampling": 0.1}

    text = report(change)
    assert "asynchronous scheduling" in text
    assert "Journeys are sampled" in text


def test_a_pipe_in_a_name_does_not_end_its_cell(report):
    def change(evaluation):
        evaluation["ingest"]["events"] = {"step|odd\nname": 7}

    rows = _rows(report(change), "| event | count |")
    assert ["`step\\|odd name`", "7"] in rows


def test_a_number_nobody_knows_is_a_dash(report):
    def change(evaluation):
        evaluation["deployments"][0]["models"]["beta.cycle_time"]["holdout"]["mape_pct"] = None

    rows = {row[0]: row for row in _rows(report(change), "| model | n |")}
    assert rows["`beta.cycle_time`"][5] == "-"


def test_a_line_break_in_a_name_begins_no_heading():
    name = "a\n# b\n- c"
    figure = Figure("f", "f", name, name, Table((name,), ((name,),)), (), {})
    text = markdown_text(Report(name, name, (name, Bullets((name,)), Section(name, (figure,))), name))
    assert {line for line in text.splitlines() if line} == {
        "# a # b - c",
        "a # b - c",
        "**a # b - c**",
        "- a # b - c",
        "## a # b - c",
        "**a # b - c.** a # b - c",
        "| a # b - c |",
        "| --- |",
    }
