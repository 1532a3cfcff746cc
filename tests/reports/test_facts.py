"""A fact has the same words in a terminal, on the page and in the Markdown file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tracefit.coefficients.files import read_coefficients, read_evaluation
from tracefit.commands.report import report_of
from tracefit.fit.results import Overload
from tracefit.models.schema import NotFitted
from tracefit.reports.document import markdown_text
from tracefit.reports.facts import (
    dropped_events,
    expected_within,
    mean_misleads,
    not_compared,
    not_fitted,
    not_replayed,
    overloaded,
    point_load,
    worse_than_median,
)
from tracefit.reports.terminal_results import replay_text, train_text
from tracefit.reports.trained import TrainResult
from tracefit.results.models import MissingModels, ModelSummary, ReplayResult
from tracefit.results.replays import RunReplay

WAIT = ModelSummary("alpha.queue_wait", "d", 4.0, 9.0, 250.0, 9_000.0, 7_500.0, None, -0.2, 90, 30)


@pytest.fixture
def markdown(trained):
    """Return a function from changes of the deployment to the report."""
    evaluation = read_evaluation(trained / "evaluation.json")
    files = [read_coefficients(trained / "models" / f"{kind}.json") for kind in ("alpha", "beta")]
    (one,) = evaluation.deployments

    def report(**changes):
        changed = evaluation.model_copy(update={"deployments": (one.model_copy(update=changes),)})
        return markdown_text(report_of(changed, *files, None).report)

    report.deployment = one
    return report


def _in_terminal(*fitted, **more):
    text = train_text(TrainResult(Path("m"), (), Path("m/e"), Path("m/r"), fitted, **more))
    return " ".join(text.split())


def test_doubts_about_a_model(markdown):
    facts = (
        worse_than_median("alpha.queue_wait", -0.2, 9_000.0, 7_500.0, is_negligible=False),
        mean_misleads("alpha.queue_wait", 250.0, 4.0, 9.0),
    )
    entry = markdown.deployment.models["alpha.queue_wait"]
    holdout = replace(entry.holdout, mae=9_000.0, mape_pct=250.0, mdape_pct=4.0, p90_ape_pct=9.0)
    entry = replace(entry, skill=-0.2, holdout=holdout, baseline=replace(entry.baseline, mae=7_500.0))
    report = markdown(models={**markdown.deployment.models, "alpha.queue_wait": entry})
    for fact in facts:
        assert fact.line in _in_terminal(WAIT)
        assert fact.paragraph in report
    assert facts[0].line == (
        "alpha.queue_wait is worse than the training median on the hold-out: it is off by 9,000 us on average, the "
        "median by 7,500 us"
    )


def test_a_model_without_doubts_has_none():
    good = replace(WAIT, skill=0.5, holdout_mape_pct=5.0)
    assert "median on" not in _in_terminal(good)
    assert "misleads" not in _in_terminal(good)
    assert worse_than_median("a", -0.2, 9.0, 7.0, is_negligible=True) is None
    assert worse_than_median("a", None, 9.0, 7.0, is_negligible=False) is None


def test_a_model_that_was_not_fitted(markdown):
    missing = MissingModels("d", ("alpha.departure",), "no events", "trace the API")
    fact = not_fitted(missing.models, missing.reason, missing.remedy)
    assert fact.line == "alpha.departure was not fitted: no events; trace the API"
    assert fact.line in _in_terminal(not_fitted=(missing,))
    lost = NotFitted(deployment_id="d", name="alpha.departure", reason="no events", remedy="trace the API")
    assert f"**{fact.claim}**{fact.detail}" in markdown(not_fitted=(lost,))


def test_a_run_that_is_not_replayed(markdown):
    run = RunReplay("sparse", "d", reason="only steps were traced")
    words = "run sparse is not replayed: only steps were traced"
    assert words in replay_text(ReplayResult(runs=(run,)))
    assert words in _in_terminal(WAIT, replays=(run,))
    assert "Run `sparse` is not replayed: only steps were traced." in markdown(replays=(run,))
    many = [f"r{number}" for number in range(7)]
    assert not_replayed(many, "why") == "runs `r0`, `r1`, `r2`, `r3`, `r4` and 2 more are not replayed: why"


@pytest.mark.parametrize(
    ("trained_on", "fate"),
    [
        (True, "it is trained on all the same, so the models describe an overloaded server"),
        (False, "it is left out of training (--keep keeps it)"),
    ],
)
def test_an_overloaded_run(trained_on, fate):
    one = Overload("busy", ("the queue grew", "requests failed"), trained_on=trained_on)
    fact = overloaded(one, "--keep")
    assert fact.line == f"run busy was overloaded (the queue grew; requests failed): {fate}"
    assert fact.paragraph == f"**Run `busy` was overloaded** (the queue grew; requests failed): {fate}."


def test_points_of_a_benchmark():
    assert point_load(5.0, 8.0) == "5/s at most 8 at a time"
    assert (point_load(5.0, None), point_load(None, 8.0), point_load(None, None)) == (
        "5/s",
        "8 at a time",
        "",
    )
    assert not_compared(["3"], "why") == "point 3 is not compared: why"
    assert not_compared(["3", "4"], "why") == "points 3, 4 are not compared: why"


def test_counts_and_limits_in_words():
    assert dropped_events(1) == "1 event was dropped by the server's SDK"
    assert dropped_events(9_536) == "9,536 events were dropped by the server's SDK"
    assert expected_within({}) == "its errors are not known"
    assert (
        expected_within({"prompts": 20.0, "decodes": 12.5})
        == "nine of ten steps are expected within 20.0 % with prompts and 12.5 % without prompts"
    )
