"""Which features stay and which penalty is taken, inside the training part."""

from __future__ import annotations

import numpy as np
import pytest

from designs import plain_design
from tracefit.fit.estimators import FEW_ROUNDS, RobustLinear, line, moments, standardised
from tracefit.fit.fitted import ANY_SIGN, NON_NEGATIVE, PENALTIES, FitOptions
from tracefit.fit.results import PenaltyChoice
from tracefit.fit.select import collinearity, time_blocks, usable_features


def _choice(x, y, blocks, **options):
    return plain_design(x, y, blocks).choose_penalty(FitOptions(**options))


def _columns(n=300, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 200, n).astype(float), rng.integers(1, 30, n).astype(float)


def _reasons(left):
    return {one.feature: one.reason for one in left}


def test_independent_features_stay_in_order():
    kept, left = usable_features(np.column_stack(_columns()), ["prefill", "decode"])
    assert (kept, left) == ([0, 1], [])


def test_a_constant_says_which_value_it_has():
    a, _ = _columns()
    kept, left = usable_features(np.column_stack([np.full(len(a), 64.0), a]), ["slots", "a"])
    assert kept == [1]
    assert _reasons(left) == {"slots": "constant in the training rows (64)"}


def test_unknown_features_are_left_out():
    a, b = _columns()
    b[:3] = np.nan
    kept, left = usable_features(np.column_stack([np.full(len(a), np.nan), a, b]), ["gpu", "a", "b"])
    assert kept == [1]
    assert _reasons(left)["gpu"] == "not known in these runs"
    assert _reasons(left)["b"] == "unknown on 3 of 300 training rows"


def test_of_two_equal_features_the_earlier_stays():
    a, b = _columns()
    kept, left = usable_features(np.column_stack([b, a, 3 * a + 7]), ["b", "first", "copy"])
    assert kept == [0, 1]
    assert "collinear" in _reasons(left)["copy"]
    assert "closest first" in _reasons(left)["copy"]
    assert "infinite" in _reasons(left)["copy"]


def test_a_sum_of_two_features_is_collinear_with_both():
    a, b = _columns()
    kept, left = usable_features(np.column_stack([a, b, a + b]), ["a", "b", "sum"])
    assert kept == [0, 1]
    assert list(_reasons(left)) == ["sum"]


@pytest.mark.parametrize(("share", "stays"), [(0.15, True), (0.05, False)])
def test_a_variance_inflation_of_ten_is_the_limit(share, stays):
    """A feature with `share` of its variance to itself has a variance inflation of 1 / share."""
    rng = np.random.default_rng(1)
    a, rest = rng.standard_normal((2, 20_000))
    mixed = np.sqrt(1 - share) * a + np.sqrt(share) * rest
    kept, _ = usable_features(np.column_stack([a, mixed]), ["a", "mixed"])
    assert (1 in kept) is stays


def test_small_variation_of_large_numbers_is_no_constant():
    rng = np.random.default_rng(0)
    kept, _ = usable_features(1e9 + rng.random((100, 1)), ["clock"])
    assert kept == [0]


def test_blocks_are_contiguous_in_each_runs_own_time():
    run = np.array([0, 1, 0, 1, 0, 0, 1, 1])
    time = np.array([30, 5, 10, 8, 20, 40, 6, 7])
    assert time_blocks(run, time, 2).tolist() == [1, 0, 0, 1, 0, 1, 0, 1]


def test_fewer_rows_than_blocks_are_a_block_each():
    assert len(set(time_blocks(np.zeros(3, int), np.arange(3), 5).tolist())) == 3


def test_a_clean_line_takes_the_weakest_ridge():
    x = np.column_stack(_columns())
    y = 2000 + x @ [10.0, 50.0] + np.random.default_rng(2).normal(0, 1, len(x))
    choice = _choice(x, y, np.arange(len(y)) * 5 // len(y))
    assert (choice.penalty, choice.strength, choice.folds) == ("ridge", 1e-8, 5)
    assert choice.score == pytest.approx(np.sqrt(2 / np.pi), rel=0.15)  # mean absolute error of the noise


def test_features_of_noise_take_the_lasso():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, 15))
    y = 1000 + 100 * x[:, 0] + rng.normal(0, 100, 50)
    candidates = (("ridge", 1e-8), ("ridge", 1e-3), ("lasso", 0.03))
    assert _choice(x, y, np.arange(50) * 5 // 50, penalties=candidates).penalty == "lasso"


def test_correlated_weak_features_take_the_elastic_net():
    """Six noisy copies of one cause: averaging them beats picking one, dropping the rest beats keeping it."""
    rng = np.random.default_rng(0)
    cause = rng.standard_normal(60)
    x = np.column_stack([cause[:, None] + rng.standard_normal((60, 6)), rng.standard_normal((60, 14))])
    y = 1000 + 100 * cause + rng.normal(0, 30, 60)
    candidates = (("ridge", 1e-8), ("lasso", 0.2), ("elastic_net", 0.2))
    assert _choice(x, y, np.arange(60) * 5 // 60, penalties=candidates).penalty == "elastic_net"


def test_penalties_are_compared_within_the_bounds():
    """The slope is negative in truth: within bounds nothing is left but the level."""
    x = np.column_stack(_columns())[:, :1]
    y = 2000 - 10 * x[:, 0]
    blocks = np.arange(300) * 5 // 300
    assert _choice(x, y, blocks).score < 1
    bound = _choice(x, y, blocks, signs=NON_NEGATIVE).score
    assert bound == pytest.approx(np.abs(y - y.mean()).mean(), rel=0.05)


@pytest.mark.parametrize("strengths", [(1e-8, 1e-9), (1e-9, 1e-8)])
def test_ties_go_to_the_earlier_candidate(strengths):
    x = np.column_stack(_columns(100))
    y = x[:, 0] + np.random.default_rng(2).normal(0, 1, len(x))
    twins = tuple(("ridge", strength) for strength in strengths)
    assert _choice(x, y, np.arange(100) // 20, penalties=twins).strength == strengths[0]


def test_one_block_leaves_the_first_candidate_without_a_score():
    x = np.column_stack(_columns(20))
    choice = _choice(x, x[:, 0], np.zeros(20, dtype=np.int64))
    assert (choice.penalty, choice.folds) == ("ridge", 0)
    assert np.isnan(choice.score)


@pytest.mark.parametrize(("varied", "stays"), [(19, False), (20, True)])
def test_a_feature_that_varies_on_few_rows_is_left_out(varied, stays):
    column = np.zeros(300)
    column[:varied] = np.arange(1, varied + 1)
    kept, left = usable_features(column[:, None], ["rare"])
    assert (kept == [0]) is stays
    assert stays or _reasons(left)["rare"] == "differs from 0 on only 19 of 300 training rows"


@pytest.mark.parametrize(("burst", "misleads"), [(6.0, True), (1.0, False)])
def test_features_that_mislead_outside_a_burst_are_recognised(burst, misleads):
    """Two of five periods follow the feature, six times as steeply or as everywhere."""
    rng = np.random.default_rng(5)
    x = rng.uniform(1, 100, (200, 1))
    blocks = np.arange(200) // 40
    slope = np.where(np.isin(blocks, (0, 2)), burst, 1.0 if not misleads else 0.0)
    y = 500 + slope * x[:, 0] + rng.normal(0, 1, 200)
    design = plain_design(x, y, blocks)
    choice = design.choose_penalty(FitOptions())
    assert design.is_worse_than_constant(choice, FitOptions()) is misleads


def test_nothing_misleads_without_a_second_block():
    x = np.column_stack(_columns(50))
    design = plain_design(x, x[:, 0], np.zeros(50, dtype=np.int64))
    assert not design.is_worse_than_constant(design.choose_penalty(FitOptions()), FitOptions())


def test_independent_features_have_condition_and_inflation_one():
    x = np.array([[0.0, 0.0], [0.0, 10.0], [5.0, 0.0], [5.0, 10.0]])
    measured = collinearity(x, ["a", "b"], "all")
    assert measured.condition_number == pytest.approx(1)
    assert measured.variance_inflation == pytest.approx({"a": 1, "b": 1})


def test_two_features_of_correlation_r_by_hand():
    """Eigenvalues 1 + r and 1 - r; variance inflation 1 / (1 - r^2). Here r = 0.8."""
    a, b = np.array([1.0, -1.0, 1.0, -1.0]), np.array([1.0, 1.0, -1.0, -1.0])
    measured = collinearity(
        np.column_stack([a, 0.8 * a + 0.6 * b, np.array([1.0, -1.0, -1.0, 1.0])]) * [1, 9, 4],
        ["a", "b", "c"],
        "all",
    )
    assert measured.condition_number == pytest.approx(3)
    assert measured.variance_inflation == pytest.approx({"a": 1 / 0.36, "b": 1 / 0.36, "c": 1})


def test_one_feature_or_none_is_not_collinear():
    assert collinearity(np.arange(5.0)[:, None], ["a"], "all").variance_inflation == pytest.approx({"a": 1})
    assert collinearity(np.zeros((5, 0)), [], "all").condition_number is None


def test_a_padded_batch_stays_only_with_its_batch():
    """Experts that saturate a little go with batches of 1 to 32 and their sizes in fours: the batch is left out, and
    its size too."""
    batch = np.tile(np.arange(1.0, 33.0), 20)
    padded = np.ceil(batch / 4) * 4
    names = ["num_decode_reqs", "padded_decode_reqs"]
    kept, left = usable_features(np.column_stack([batch, padded]), names)
    assert (kept, left) == ([0, 1], [])
    experts = 1 - 0.99**batch
    kept, left = usable_features(np.column_stack([experts, batch, padded]), ["experts_read", *names])
    assert kept == [0]
    assert {one.feature: one.collinear_with for one in left} == dict.fromkeys(names, ("experts_read",))


@pytest.mark.parametrize("signs", [ANY_SIGN, NON_NEGATIVE])
def test_lines_of_folds_are_those_of_refits_on_the_rows_of_the_other_folds(signs):
    """Also where a feature is constant on the rows of all folds but one."""
    a, b = _columns()
    blocks = np.arange(300) // 60
    x = np.column_stack([a, b, np.where(blocks == 2, a * b, 7.0)])
    y = 500 + x @ [3.0, 40.0, 0.2] + np.random.default_rng(1).standard_t(2, 300) * 30
    first = PenaltyChoice("ridge", 1e-8, 0.0, 0)
    design = plain_design(x, y, blocks)
    positive = signs.of(design.columns)
    weights = RobustLinear("ridge", 1e-8, max_iter=FEW_ROUNDS, positive=positive).fit_rows(x, y).final
    folds = list(design.left_out(first, PENALTIES, signs))
    assert [int(test.sum()) for test, _ in folds] == [60] * 5
    for test, predictions in folds:
        z, center, scale = standardised(x[~test])
        summed = moments(z, y[~test], weights[~test])
        for penalty, found in zip(PENALTIES, predictions, strict=True):
            intercept, slopes = line(summed, -center / scale, *penalty, positive=positive, shrunk=())
            refitted = intercept + x[test] @ (slopes / scale)
            # Slopes that a search leaves at 0 in one way and at a rounding error in the other differ by that.
            np.testing.assert_allclose(found, refitted, rtol=1e-9, err_msg=str(penalty))
