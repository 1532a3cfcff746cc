"""Which rows train, which are held out, which are left out: the published rules."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from tracefit.fit import splits
from tracefit.fit.train import outliers, relative_weights


def _rows(times, *, run="r", server="s", reasons=None):
    reasons = reasons or {}
    return pl.DataFrame(
        {
            "run_id": run,
            "server": server,
            "ts_ns": list(times),
            "excluded_reason": [reasons.get(t) for t in times],
        },
        schema_overrides={"ts_ns": pl.Int64, "excluded_reason": pl.String},
    )


def _held_out(frame, **which):
    return splits.split_by_time(frame).filter(split="holdout", **which)["ts_ns"].to_list()


@pytest.mark.parametrize(("count", "train"), [(10, 7), (100, 70), (90, 63), (7, 5), (3, 2)])
def test_the_last_30_percent_in_time_are_held_out(count, train):
    shuffled = np.random.default_rng(0).permutation(count).tolist()
    assert sorted(_held_out(_rows(shuffled))) == list(range(train, count))


def test_every_run_and_server_is_split_by_its_own_clock():
    early, late, other = _rows(range(10)), _rows(range(1000, 1020)), _rows(range(500, 510))
    frame = pl.concat([early, late.with_columns(run_id=pl.lit("q")), other.with_columns(server=pl.lit("t"))])
    assert _held_out(frame, run_id="r", server="s") == [7, 8, 9]
    assert _held_out(frame, run_id="q") == list(range(1014, 1020))
    assert _held_out(frame, server="t") == [507, 508, 509]


@pytest.mark.parametrize("reason", ["idle_gap", "epoch_boundary"])
def test_gaps_do_not_move_the_boundary(reason):
    gaps = dict.fromkeys(range(5, 50), reason)
    frame = _rows([*range(5), *range(5, 50), *range(100, 105)], reasons=gaps)
    assert splits.split_by_time(frame).filter(pl.col("excluded_reason").is_null())["split"].to_list() == [
        *["train"] * 7,
        *["holdout"] * 3,
    ]


def test_rows_keep_their_order():
    frame = _rows([5, 1, 9, 3])
    assert splits.split_by_time(frame)["ts_ns"].to_list() == [5, 1, 9, 3]


def test_marking_spares_the_hold_out_and_what_is_marked():
    frame = splits.split_by_time(_rows(range(10), reasons={2: "idle_gap"}))
    marked = splits.mark(frame, "warm_up", pl.col("ts_ns").is_in([1, 2, 8]))
    assert marked["excluded_reason"].to_list() == [None, "warm_up", "idle_gap", *[None] * 7]


def test_an_unknown_condition_marks_no_row():
    frame = splits.split_by_time(_rows(range(10))).with_columns(flag=pl.lit(None, pl.Boolean))
    assert splits.mark(frame, "outlier", pl.col("flag"))["excluded_reason"].null_count() == 10


@pytest.mark.parametrize(
    ("first", "last", "until"),
    [(1, 100, 21), (1, 2000, 21), (1, 2100, 22), (1, 10_000, 101), (501, 600, 521), (1, 2001, 22)],
)
def test_warm_up_is_one_percent_of_the_steps_or_twenty(first, last, until):
    counters = pl.DataFrame({"run_id": "r", "server": "s", "epoch": 0, "first_step": [first], "last_step": [last]})
    rows = pl.DataFrame(
        {
            "run_id": "r",
            "server": "s",
            "epoch": 0,
            "split": "train",
            "step_id": [until - 1, until],
            "excluded_reason": pl.Series([None, None], dtype=pl.String),
        }
    )
    marked = splits.mark_warm_up(rows, counters, "step_id")
    assert marked["excluded_reason"].to_list() == ["warm_up", None]


def test_an_outlier_is_far_in_spreads_and_by_a_factor():
    """y = 1000 + 10 x with a spread of 10: eight spreads are 80, the factor of three is 2,000 at least."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 100, 200).astype(float)[:, None]
    y = 1000 + 10 * x[:, 0] + rng.normal(0, 10, 200)
    y[3] *= 3.5
    y[5] /= 3.5
    y[7] *= 2.5  # far in spreads, not by the factor
    assert np.flatnonzero(outliers(x, y)).tolist() == [3, 5]


def test_a_wide_spread_has_no_outliers_by_the_factor_alone():
    rng = np.random.default_rng(0)
    x = rng.random((300, 1))
    y = 1000 * rng.lognormal(0, 1.5, 300)
    far = outliers(x, y)
    assert far.mean() < 0.1
    assert ((y > 3000) | (y < 1000 / 3)).mean() > 0.3


def test_equal_rows_are_no_outliers():
    """Nine in ten are the same to the last digit, so that the spread is 0; their mean is five times as long."""
    y = np.where(np.arange(200) % 10 == 0, 40_000.0, 1000.0)
    assert np.array_equal(outliers(np.zeros((200, 0)), y), y > 1000)


def _recorded(prompts, decodes, us):
    steps = range(len(us))
    rows = pl.DataFrame(
        {
            "run_id": "r", "server": "s", "epoch": 0, "step_id": steps, "split": "train", "source": "fpm",
            "excluded_reason": ["warm_up"] * 4 + [None] * (len(us) - 4), "y": us,
        }
    )  # fmt: skip
    timeline = rows.select("run_id", "server", "epoch", "step_id").with_columns(
        prefill_tokens=pl.Series(prompts), num_decode_reqs=pl.Series(decodes),
        prefill_context_tokens=0, context_tokens=pl.Series(decodes) * 100,
    )  # fmt: skip
    return rows, timeline


@pytest.mark.parametrize(("later_us", "one_decode"), [(2.6e3, None), (2.4e3, "warm_up")])
def test_a_sweep_trains_except_its_warm_up_passes(later_us, one_decode):
    """The first pass of 8 prompt tokens takes 274 ms, a later one of 16 takes 4; no other step has as many as two
    decodes.

    A step of one decode takes 5 ms: less than half of that, later, makes it a warm-up pass.
    """
    rows, timeline = _recorded([8, 16, 0, 0, 0], [0, 0, 1, 2, 1], [274e3, 4e3, 5e3, 9e3, later_us])
    marks = splits.keep_sweep(rows, timeline)["excluded_reason"].to_list()
    assert marks == ["warm_up", None, one_decode, None, None]


def test_warm_up_of_traced_steps_stays_out():
    rows, timeline = _recorded([8, 16, 0, 0, 0], [0, 0, 1, 2, 1], [4e3, 4e3, 5e3, 9e3, 5e3])
    kept = splits.keep_sweep(rows.with_columns(source=pl.lit("adjacent")), timeline)
    assert kept["excluded_reason"].to_list() == ["warm_up"] * 4 + [None]


def test_relative_weights_are_finite_where_most_times_are_zero():
    y = np.array([0.0] * 60 + [1e6] * 40)
    weights = relative_weights(np.arange(100.0)[:, None], y, np.ones(100))
    assert np.isfinite(weights).all()
    assert (weights > 0).all()
