"""Candidates are evaluated inside and beyond the training load, and the stated rule chooses."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
import yaml

import tracefit
from tracefit.coefficients.files import read_evaluation
from tracefit.features.sets import BUILT_IN, LINE, Feature, FeatureSet, add_features
from tracefit.fit import splits
from tracefit.fit.beta import choose, try_features, typical_error_pct
from tracefit.fit.fitted import ANY_SIGN, FitOptions, Signs
from tracefit.fit.holdout import error_by_stretch, load_cut
from tracefit.fit.train import TrainingRows, fit_linear
from tracefit.models.validation import Candidate
from tracefit.synth import SynthOptions, synth, write_run


def _chosen(*candidates):
    (winner,) = [c for c in choose(candidates) if c.chosen]
    return winner.name


@pytest.mark.parametrize(("plain", "products", "chosen"), [(110, 200, "plain"), (200, 110, "products")])
def test_errors_inside_and_beyond_the_load_count_alike(plain, products, chosen):
    assert _chosen(Candidate("plain", 3, 100, plain), Candidate("products", 6, 96, products)) == chosen


@pytest.mark.parametrize(("features", "error", "chosen"), [(2, 101, "one"), (2, 103, "other"), (6, 101, "other")])
def test_ties_go_to_the_fewest_features(features, error, chosen):
    """An error within 2 % of the best one ties."""
    one, other = Candidate("one", features, error, error), Candidate("other", 6, 100, 100)
    assert _chosen(other, one) == _chosen(one, other) == chosen


def test_without_an_error_beyond_the_load_the_inside_decides():
    assert _chosen(Candidate("a", 2, 100, None), Candidate("b", 2, 90, None)) == "b"


def test_reasons_say_where_a_candidate_is_worse():
    (loser, winner) = choose([Candidate("products", 6, 96, 200), Candidate("plain", 3, 100, 110)])
    assert loser.reason == "82 % worse beyond than plain"
    assert winner.reason == "smallest error inside and beyond the training load"


@pytest.mark.parametrize(
    ("load", "cut"),
    [(np.arange(100.0), 49.0), (np.arange(59.0), 29.0), (np.arange(20.0), None), (np.ones(200), None)],
)
def test_both_halves_need_enough_rows(load, cut):
    assert load_cut(load) == cut


def _rows(n=600):
    """Twice as long with every request more: 1000 + 20 load + load^2 / 10, the load drawn for each row."""
    rng = np.random.default_rng(3)
    load = rng.integers(0, 200, n)
    return splits.split_by_time(
        pl.DataFrame(
            {
                "run_id": "r",
                "server": "s",
                "ts_ns": np.arange(n) * 1000,
                "load": load.astype(float),
                "reqs": load,
                "num_decode_reqs_squared": load**2,
                "y": 1000 + 20 * load + load**2 / 10 + rng.normal(0, 5, n),
                "excluded_reason": None,
            },
            schema_overrides={"excluded_reason": pl.String},
        )
    )


def test_the_error_beyond_the_load_is_of_a_fit_of_the_lower_half():
    """A line through load 0 to 100 of 1000 + 20 l + l^2/10: l^2/10 is 10 l - 166.7 + e there, e averaging out."""
    rows = _rows()
    how = FitOptions(reference=False, signs=ANY_SIGN)
    line = try_features(TrainingRows.of(rows), FeatureSet("line", (Feature("reqs", "request", "reqs"),)), how)
    both = (Feature("reqs", "request", "reqs"), Feature("num_decode_reqs_squared", "1", "reqs ** 2"))
    square = try_features(TrainingRows.of(rows), FeatureSet("square", both), how)
    assert square.inside_mae == pytest.approx(4.0, rel=0.15)
    assert square.beyond_mae == pytest.approx(4.0, rel=0.3)
    # Above the cut c the line misses l^2/10 - (c l / 10 - c^2 / 60).
    train = rows.filter(pl.col("split") == "train")["reqs"].to_numpy()
    cut = np.quantile(train, 0.5, method="inverted_cdf")
    above = train[train > cut]
    missed = np.mean(np.abs(above**2 / 10 - (cut * above / 10 - cut**2 / 60)))
    assert line.beyond_mae == pytest.approx(missed, rel=0.1)
    assert line.inside_mae < 0.3 * line.beyond_mae


def _batches_with_a_slow_kernel():
    """Batches of 1 to 32 in any order, 5 ms + 20 us a request, and 600 us more from 9 to 16."""
    rng = np.random.default_rng(5)
    decodes = rng.integers(1, 33, 2000)
    slow = (decodes > 8) & (decodes <= 16)
    columns = ("prefill_tokens", "context_tokens", "num_prefill_reqs", "prefill_context_tokens")
    rows = pl.DataFrame(
        {
            "run_id": "r",
            "server": "s",
            "ts_ns": np.arange(2000) * 1000,
            "load": decodes.astype(float),
            "num_decode_reqs": decodes,
            "y": 5000 + 20 * decodes + 600 * slow + rng.normal(0, 50, 2000),
            **dict.fromkeys(columns, 0),
            **dict.fromkeys(("experts_read", "padded_experts_read", "padded_decode_reqs", "excluded_reason")),
        },
        schema_overrides={"excluded_reason": pl.String, "experts_read": pl.Float64},
    )
    return splits.split_by_time(add_features(rows, BUILT_IN["line+sizes"], {}))


@pytest.mark.slow
def test_a_kernel_that_is_slow_at_some_sizes_corrects_the_line():
    rows = _batches_with_a_slow_kernel()
    options = FitOptions(reference=False, signs=Signs("declared", intercept=True), relative=True)
    plain, sizes = (try_features(TrainingRows.of(rows), BUILT_IN[name], options) for name in ("line", "line+sizes"))
    assert _chosen(plain, sizes) == "line+sizes"
    (regime,) = fit_linear(rows, BUILT_IN["line+sizes"].features, options).regimes
    seen = rows.group_by("num_decode_reqs", maintain_order=True).first()
    size = seen["num_decode_reqs"].to_numpy()
    truth = 5000 + 20 * size + 600 * ((size > 8) & (size <= 16))
    error = np.abs(regime.predict(seen) / truth - 1)
    assert error.max() < 0.035
    assert error.mean() < 0.01
    # No batch of 33 to 64 was seen: the line goes on.
    beyond = seen.head(1).with_columns(pl.col("^decodes_.*$") * 0, num_decode_reqs=48.0)
    assert regime.predict(beyond)[0] == pytest.approx(5000 + 20 * 48, rel=0.05)


def test_a_class_of_sizes_counts_batches_without_prompts():
    rows = pl.DataFrame({"num_decode_reqs": [0, 4, 5, 8, 9, 6], "num_prefill_reqs": [0, 0, 0, 0, 0, 1]})
    feature = next(f for f in BUILT_IN["line+sizes"].features if f.name == "decodes_5_to_8")
    added = add_features(rows, FeatureSet("one", (feature,)), {})
    assert added["decodes_5_to_8"].to_list() == [0, 0, 1, 1, 0, 0]


def test_too_few_rows_make_no_candidate():
    few = FeatureSet("line", (Feature("reqs", "request", "reqs"),))
    assert try_features(TrainingRows.of(_rows(30)), few, FitOptions()) is None


def test_a_set_without_a_term_that_defines_it_does_not_compete():
    rows = _rows().with_columns(bound=pl.lit(None, pl.Float64))
    features = (Feature("bound", "us", "bound"), Feature("reqs", "request", "reqs"))
    assert try_features(TrainingRows.of(rows), FeatureSet("bounded", features), FitOptions()) is not None
    assert (
        try_features(TrainingRows.of(rows), FeatureSet("bounded", features, defining=("bound",)), FitOptions()) is None
    )


def _line(name, features, inside, beyond):
    return Candidate(name, features, 0, 0, inside_pct=inside, beyond_pct=beyond, plain=True)


def _set(inside, beyond):
    return Candidate("set", 3, 100, 100, inside_pct=inside, beyond_pct=beyond)


@pytest.mark.parametrize(
    ("inside", "beyond", "chosen"),
    [
        (2.0, 2.0, "set"),
        (2.05, 2.0, "set"),
        (2.2, 2.0, "line"),
        # Better beyond the load, and worse than the line within it by more than noise.
        (2.4, 1.5, "line"),
        (2.2, 1.5, "set"),
    ],
)
def test_no_set_is_chosen_that_is_worse_than_the_line(inside, beyond, chosen):
    assert _chosen(_set(inside, beyond), _line("line", 5, 2.0, 2.0)) == chosen


@pytest.mark.parametrize(("error", "chosen"), [(1.0, "sizes"), (2.97, "sizes"), (3.5, "line")])
def test_corrections_are_chosen_where_they_help(error, chosen):
    plain, sizes = _line("line", 5, 3.0, 3.0), _line("sizes", 9, error, error)
    assert _chosen(_set(5.0, 5.0), plain, sizes) == chosen


@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize(("request_us", "slot_us"), [(40, 30), (70, 0), (0, 70)])
def test_an_empty_slot_costs_between_nothing_and_a_request(request_us, slot_us):
    """Batches of 1 to 32 run at multiples of 8: part of the time goes by requests, part by slots, and both parts are
    found."""
    decodes = np.tile(np.arange(1.0, 33.0), 40)
    padded = np.ceil(decodes / 8) * 8
    noise = np.random.default_rng(2).normal(0, 20, len(decodes))
    rows = splits.split_by_time(
        pl.DataFrame(
            {
                "run_id": "r", "server": "s", "ts_ns": np.arange(len(decodes)), "excluded_reason": None,
                "num_decode_reqs": decodes, "padded_decode_reqs": padded,
                "y": 5000 + request_us * decodes + slot_us * padded + noise,
            },
            schema_overrides={"excluded_reason": pl.String},
        )
    )  # fmt: skip
    options = FitOptions(relative=True, signs=Signs("declared", intercept=True))
    fitted = fit_linear(rows, [f for f in LINE.features if f.name in rows.columns], options)
    coefficients = {t.feature: t.value for t in fitted.terms}
    assert coefficients.get("num_decode_reqs", 0) == pytest.approx(request_us, abs=3)
    assert coefficients.get("padded_decode_reqs", 0) == pytest.approx(slot_us, abs=3)


def test_sizes_of_one_period_are_inside_the_load():
    """Batches of 1 to 8 are swept in the first tenth, 32 run after it; nothing but the sweep says that batches up to 4
    are fast."""
    rng = np.random.default_rng(4)
    decodes = np.concatenate([np.tile(np.arange(1.0, 9.0), 25), np.full(1800, 32.0)])
    rows = splits.split_by_time(
        pl.DataFrame(
            {
                "run_id": "r", "server": "s", "ts_ns": np.arange(2000), "excluded_reason": None, "load": decodes,
                "reqs": decodes, "fast": (decodes <= 4) * 1.0,
                "y": 5000 + 20 * decodes - 1000 * (decodes <= 4) + rng.normal(0, 5, 2000),
            },
            schema_overrides={"excluded_reason": pl.String},
        )
    )  # fmt: skip
    both = FeatureSet("both", (Feature("reqs", "request", "reqs"), Feature("fast", "1", "fast")))
    candidate = try_features(TrainingRows.of(rows), both, FitOptions(reference=False, signs=ANY_SIGN))
    assert candidate.inside_mae == pytest.approx(4, rel=0.1)


@pytest.mark.parametrize(("efficiency", "competes"), [(0.8, True), (1.25, False)])
def test_a_set_that_is_faster_than_the_peak_does_not_compete(efficiency, competes):
    rows = _rows().with_columns(bound=efficiency * pl.col("y"))
    bounded = FeatureSet("bounded", (Feature("bound", "us", "bound"),), defining=("bound",))
    assert (try_features(TrainingRows.of(rows), bounded, FitOptions()) is not None) is competes


def test_a_line_of_a_small_batch_goes_by_its_experts():
    """Decodes and experts are collinear in batches up to 8; beyond, experts saturate, as planted, and requests do not.

    The line keeps the experts, names the requests as collinear with them, and states their training range.
    """
    decodes = np.tile(np.arange(1.0, 9.0), 100)
    missed = 1 - 8 / 256
    time = np.arange(len(decodes))
    frame = pl.DataFrame(
        {
            "run_id": "r", "server": "s", "epoch": 0, "engine": 0, "ts_ns": time, "step_id": time,
            "excluded_reason": None, "experts_read": 256 * (1 - missed**decodes), "num_decode_reqs": decodes,
            "interval_steps": 1, "cycle_sd_us": 0.0,
        },
        schema_overrides={"excluded_reason": pl.String},
    ).with_columns(y=4_000 + 20 * pl.col("experts_read"))  # fmt: skip
    rows = splits.split_by_time(frame)
    fitted = fit_linear(
        rows,
        [LINE.features[0], LINE.features[2]],
        FitOptions(relative=True, signs=Signs("declared", intercept=True)),
    )
    (term,) = fitted.terms
    assert (term.feature, term.value) == ("experts_read", pytest.approx(20, rel=1e-3))
    assert term.collinear_with == ("num_decode_reqs",)
    (left,) = fitted.features_left_out
    assert (left.collinear_with, left.training_range) == (("experts_read",), (1.0, 8.0))


def test_a_typical_error_is_not_that_of_one_hiccup():
    """By hand: roots of 1 % nine times and of 9 once are 0.1 and 3, their mean 0.39, its square 15.21 %."""
    actual = np.full(10, 100.0)
    predicted = np.array([101.0] * 9 + [1000.0])
    assert typical_error_pct(predicted, actual) == pytest.approx(15.21)


def test_every_third_tenth_of_the_time_is_held_out():
    """Of 100 rows of 10 us + load the third, sixth and ninth ten are 20 % longer: the rest predicts 1 / 1.2 of them."""
    load = np.tile(np.arange(10.0) * 10 + 100, 10)
    is_held_out = np.arange(100) // 10 % 3 == 2
    rows = splits.split_by_time(
        pl.DataFrame(
            {
                "run_id": "r", "server": "s", "ts_ns": np.arange(100), "excluded_reason": None,
                "y": (10 + load) * np.where(is_held_out, 1.2, 1.0), "reqs": load,
            },
            schema_overrides={"excluded_reason": pl.String},
        )
    )  # fmt: skip
    feature = Feature("reqs", "request", "reqs")
    how = FitOptions(reference=False, signs=ANY_SIGN)
    errors = error_by_stretch(fit_linear(rows, [feature], how), [feature], how)
    assert errors.n == 30
    assert errors.mape_pct == pytest.approx(100 * (1 - 1 / 1.2), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("gpu", "compete"), [("H100", set()), (None, {"power", "work_max"})])
def test_sets_of_machines_without_a_gpu_do_not_compete_on_one(tmp_path, gpu, compete):
    """A GPU is bound by its memory and then by compute: no larger batch is cheaper per request."""
    run = write_run(synth(SynthOptions(name="r", requests=150, form="fpm")), tmp_path)
    settings = yaml.safe_load((run / "exp-config.yaml").read_text())
    assert settings["gpu"] == "H100"
    (run / "exp-config.yaml").write_text(yaml.safe_dump({**settings, "gpu": gpu}))
    tracefit.run([run], tmp_path / "out", options=tracefit.TrainOptions(fast=True))
    (deployment,) = read_evaluation(tmp_path / "out/evaluation.json").deployments
    names = {candidate.name for candidate in deployment.models["beta.cycle_time"].candidates}
    assert "batch" in names
    assert names & {"power", "work_max"} == compete
