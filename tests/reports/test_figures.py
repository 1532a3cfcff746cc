"""Figures show the numbers of the tables and files they are of."""

from __future__ import annotations

import itertools
from unittest.mock import Mock

import polars as pl
import pytest

from tracefit.coefficients.files import read_coefficients, read_evaluation
from tracefit.diagnostics.engines import engine_run
from tracefit.diagnostics.rows import evaluated
from tracefit.fit.results import Overload, QueuePeriod
from tracefit.models.targets import TARGETS
from tracefit.reports.figures.elements import robust_limits
from tracefit.reports.figures.engines import engine_figure
from tracefit.reports.figures.models import model_figures, step_times_figure, thinned
from tracefit.tables.store import TableStore


@pytest.fixture(scope="module")
def drawn(trained):
    """Return a function from a model's name to its figures by the last word of their names."""
    evaluation = read_evaluation(trained / "evaluation.json").deployments[0]
    files = [read_coefficients(trained / "models" / f"{kind}.json") for kind in ("alpha", "beta")]
    models = {m.name: m for f in files for m in f.models}
    store = TableStore(trained / "tables")
    rows = {"alpha": store.read("alpha_training"), "beta": store.read("beta_training")}

    def figures(name, points=1000):
        frame = rows[name.split(".")[0]]
        if name.startswith("alpha."):
            frame = frame.filter(pl.col("target") == name.removeprefix("alpha."))
        made = model_figures(models[name], evaluated(models[name], frame), points=points)
        return {f.name.rsplit("-", 1)[-1]: f for f in made}, models[name], evaluation.models[name], frame

    return figures


def test_predicted_against_measured_is_every_held_out_row(drawn):
    figures, model, entry, frame = drawn("beta.cycle_time")
    series, _ = figures["against"].traces
    held = frame.filter((pl.col("split") == "holdout") & pl.col("excluded_reason").is_null()).sort("ts_ns")
    assert series["x"] == pytest.approx((held["y"] / 1000).to_list(), rel=1e-4)
    by_hand = model.intercept.value + sum(t.value * held[t.feature].to_numpy() for t in model.terms)
    assert series["y"] == pytest.approx(list(by_hand / 1000), rel=1e-4)
    # The error in the picture is the published one.
    errors = [abs(a - p) for a, p in zip(series["x"], series["y"], strict=True)]
    assert 1000 * sum(errors) / len(errors) == pytest.approx(entry.holdout.mae, rel=1e-3)


def test_residuals_over_time_mark_the_hold_out(drawn):
    figures, _, _, frame = drawn("beta.cycle_time")
    figure = figures["time"]
    train, held, medians = figure.traces
    assert (train["name"], held["name"]) == ("training rows", "held-out rows")
    assert medians["name"] == "median of each eighth"
    (band,) = figure.layout["shapes"]
    assert (band["name"], band["showlegend"]) == ("hold-out", True)
    assert max(train["x"]) < band["x0"] == pytest.approx(min(held["x"]), rel=1e-4)
    kept = frame.filter(pl.col("excluded_reason").is_null())
    assert (len(train["x"]), len(held["x"])) == tuple((kept["split"] == s).sum() for s in ("train", "holdout"))


def test_residuals_are_drawn_against_the_strongest_features(drawn):
    figures, model, _, _ = drawn("beta.cycle_time")
    effects = {t.feature: abs(t.value) * (t.training_range[1] - t.training_range[0]) for t in model.terms}
    strongest = sorted(effects, key=effects.get)[-2:]
    titles = {f.title for f in figures.values() if "residuals against" in f.title}
    assert titles == {f"beta.cycle_time: residuals against {name}" for name in strongest}


def test_a_caption_says_how_many_of_the_rows_are_drawn(drawn):
    figures, _, _, frame = drawn("beta.cycle_time", points=10)
    held = frame.filter((pl.col("split") == "holdout") & pl.col("excluded_reason").is_null()).height
    count = len(figures["against"].traces[0]["x"])
    assert count <= 10 < held
    assert f"{count} of {held} rows, evenly in time." in figures["against"].note
    whole, *_ = drawn("beta.cycle_time", points=1000)
    assert f"All {held} rows." in whole["against"].note


@pytest.mark.parametrize("points", [1, 7, 150, 999, 1000, 5000])
def test_many_rows_are_thinned_evenly(points):
    taken = thinned(pl.DataFrame({"a": range(1000)}), points)["a"].to_list()
    assert 0 < len(taken) <= points
    assert len({b - a for a, b in itertools.pairwise(taken)}) <= 1


@pytest.mark.parametrize("model", ["beta.cycle_time", *(target.model for target in TARGETS)])
def test_every_figure_has_a_caption_and_a_summary(drawn, model):
    for figure in drawn(model, points=10)[0].values():
        assert figure.look.startswith("Look for")
        assert figure.look.endswith(".")
        assert figure.summary.rows


def _timeline(**columns):
    count = len(columns["running_depth"])
    base = {
        "ts_start_ns": [k * 1_000_000_000 for k in range(count)],
        "waiting_depth": [0] * count,
        "prefill_tokens": [10] * count,
        "decode_tokens": [5] * count,
        "kv_usage_ratio": [0.5] * count,
        "cycle_us": [1_000_000.0] * count,
        "interval_steps": [1] * count,
        "idle_after": [False] * count,
    }
    return pl.DataFrame(base | columns)


NO_TRAINING = pl.DataFrame(
    schema={"split": pl.String, "excluded_reason": pl.String, "ts_ns": pl.Int64, "epoch": pl.Int64}
)


def test_the_engine_over_its_run_by_hand():
    """80 s, 80 bins: one step of one second each; idle at 10, a request waits from 20 to 29 and from 40 to 59; the
    latter is what the evaluation calls an overload.
    """
    waiting = [1 if 20 <= k < 30 or 40 <= k < 60 else 0 for k in range(81)]
    idle = [k == 10 for k in range(81)]
    timeline = _timeline(running_depth=[4] * 81, waiting_depth=waiting, idle_after=idle)
    training = pl.DataFrame(
        {
            "split": ["train", "train", "holdout"],
            "excluded_reason": ["warm_up", "warm_up", None],
            "ts_ns": [0, 3_000_000_000, 56_000_000_000],
            "epoch": [0, 0, 0],
        }
    )
    queued = [
        QueuePeriod(server=s, from_ns=40_000_000_000, to_ns=60_000_000_000, peak=10, share=0.25)
        for s in ("s", "another")
    ]
    overload = Overload(run_id="r", reasons=("why",), trained_on=False, queued=tuple(queued))
    figure = engine_figure(engine_run(timeline, training, run_id="r", server="s", overload=overload))
    assert figure.title == "The engine of r, s: overloaded, left out of training"
    lines = {t["name"]: t for t in figure.traces}
    assert set(lines["requests running"]["y"]) == {4.0}
    assert lines["requests waiting"]["y"][25] == 1.0
    assert set(lines["tokens per step"]["y"]) == {15.0}
    assert set(lines["KV blocks in use, %"]["y"]) == {50.0}
    assert set(lines["step time, ms"]["y"]) == {1000.0}
    assert len({t["yaxis"] for t in figure.traces}) == 5, "each has a panel of its own"
    assert _marked(figure) == [
        ("hold-out begins", 56.0, 56.0),
        ("idle", 10.0, 11.0),
        ("overload", 40.0, 60.0),
        ("queue never empty", 20.0, 30.0),
        ("warm-up", 0.0, 3.0),
    ]


@pytest.mark.parametrize(
    ("later", "waiting", "said"),
    [
        (1, [0] * 81, "on average 4 requests run before the hold-out, 1 in it"),
        (
            3,
            [9] * 56 + [1] * 25,
            "on average 4 and 9 requests run and wait before the hold-out, 3 and 1 in it",
        ),
        (4, [0] * 81, None),
    ],
)
def test_training_on_the_fuller_part_is_noted(later, waiting, said):
    timeline = _timeline(running_depth=[4] * 56 + [later] * 25, waiting_depth=waiting)
    training = pl.DataFrame({"split": ["holdout"], "excluded_reason": [None], "ts_ns": [56_000_000_000], "epoch": [0]})
    figure = engine_figure(engine_run(timeline, training, run_id="r", server="s"))
    assert said in figure.note if said else "fuller" not in figure.note


def _marked(figure):
    return sorted((s["name"], s["x0"], s["x1"]) for s in figure.layout["shapes"])


def test_tokens_are_means_of_the_known_steps():
    """One step in ten is traced: a sum over time would be a tenth of the truth."""
    timeline = _timeline(running_depth=[4] * 801).gather_every(10)
    figure = engine_figure(engine_run(timeline, NO_TRAINING, run_id="r", server="s"))
    (tokens,) = (t for t in figure.traces if t["name"] == "tokens per step")
    assert set(tokens["y"]) == {15.0}


def test_of_many_idle_gaps_the_longest_are_marked():
    """Gaps of 3, 1, 2 and 4 s, then 59 of 4 s: of the 63 the 60 longest are all but those of 1, 2 and 3 s."""
    lengths = [3.0, 1.0, 2.0, *[4.0] * 60]
    starts = [sum(lengths[:k]) for k in range(64)]
    timeline = _timeline(
        running_depth=[1] * 64,
        ts_start_ns=[int(s * 1e9) for s in starts],
        cycle_us=[*(s * 1e6 for s in lengths), None],
        idle_after=[True] * 63 + [False],
    )
    figure = engine_figure(engine_run(timeline, NO_TRAINING, run_id="r", server="s"))
    assert [name for name, *_ in _marked(figure)] == ["idle"] * 60
    assert [start for _, start, _ in _marked(figure)] == pytest.approx(starts[3:-1])
    assert [s["showlegend"] for s in figure.layout["shapes"]] == [True, *[False] * 59], "in the legend once"


def test_warm_up_without_a_time_is_not_marked():
    """Steps of a log of whole seconds have no time where their line has no stamp."""
    training = pl.DataFrame(
        {
            "split": ["train", "train", "holdout"],
            "excluded_reason": ["warm_up"] * 2 + [None],
            "ts_ns": [None, 2_000_000_000, None],
            "epoch": [0, 1, 1],
        },
        schema_overrides={"ts_ns": pl.Int64},
    )
    timeline = _timeline(running_depth=[4] * 81)
    figure = engine_figure(engine_run(timeline, training, run_id="r", server="s"))
    assert _marked(figure) == [("warm-up", 2.0, 2.0)]


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("at", ["figures.deployment.engine_figure", "figures.deployment.rates_figure"])
def test_a_figure_that_cannot_be_drawn_is_a_line_of_the_report(trained, tmp_path, monkeypatch, tracefit, at):
    def drawn_on(out):
        code, _, stderr = tracefit("report", trained, "--out", out)
        return code, stderr, (out / "report.md").read_text()

    *_, whole = drawn_on(tmp_path / "whole")
    monkeypatch.setattr(f"tracefit.reports.{at}", Mock(side_effect=TypeError("no number")))
    code, stderr, report = drawn_on(tmp_path / "less")
    (note,) = [line for line in report.splitlines() if "cannot be drawn" in line]
    assert "unexpected TypeError (no number)" in note
    assert code == 0
    assert "warning: the report: " in stderr
    assert len(report) > 0.8 * len(whole)


def test_engine_with_few_facts_is_not_drawn():
    assert engine_run(_timeline(running_depth=[1]), NO_TRAINING, run_id="r", server="s") is None


def test_a_few_outliers_do_not_stretch_an_axis():
    """Residuals of -1 to 1 and one of 500: the axis holds the middle 98 % and half of its width to either side."""
    values = [k / 50 - 1 for k in range(101)]
    assert robust_limits(values) is None
    low, high = robust_limits([*values, 500.0])
    assert (low, high) == pytest.approx((-1.0, 2.0), abs=0.05)
    assert robust_limits([0.0] * 18 + [500.0]) is None, "too few to call one an outlier"


def test_medians_of_residuals_are_those_of_the_rows(drawn):
    """Eighths by time of the held-out and the training rows; the middle one by hand."""
    figures, model, _, frame = drawn("beta.cycle_time")
    medians = figures["time"].traces[-1]
    kept = frame.filter(pl.col("excluded_reason").is_null()).sort("ts_ns")
    by_hand = model.intercept.value + sum(t.value * kept[t.feature].to_numpy() for t in model.terms)
    residuals = sorted((kept["y"].to_numpy() - by_hand)[: -(-kept.height // 8)] / 1000)
    half = len(residuals) // 2
    middle = residuals[half] if len(residuals) % 2 else (residuals[half - 1] + residuals[half]) / 2
    assert len(medians["y"]) == 8
    assert medians["y"][0] == pytest.approx(middle, abs=1e-5)


def test_time_goes_on_through_several_runs(trained):
    """The busy run twice, as two servers' runs: the second begins after the first, with a gap where lines break."""
    (model,) = read_coefficients(trained / "models/beta.json").models
    rows = TableStore(trained / "tables").read("beta_training")
    twice = pl.concat([rows, rows.with_columns(run_id=pl.lit("second"))])
    figure = step_times_figure("s", evaluated(model, twice), points=1000, of_means=False)
    first, second = figure.layout["annotations"]
    points, measured, predicted = figure.traces
    kept = rows.filter(pl.col("excluded_reason").is_null())
    seconds = (kept["ts_ns"].max() - kept["ts_ns"].min()) / 1e9
    assert (first["x"], second["text"]) == (0.0, "second")
    assert second["x"] == pytest.approx(seconds * 1.04), "2 % of both runs' time lie between them"
    assert measured["x"] == sorted(measured["x"])
    assert measured["y"].count(None) == predicted["y"].count(None) == 1
    assert len(figure.layout["shapes"]) == 2
    assert max(points["x"]) == pytest.approx(second["x"] + seconds, rel=1e-4)
