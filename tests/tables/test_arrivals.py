"""Requests of clients and of servers by length and arrival: on clocks that differ, step and drift."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from tracefit.tables.arrivals import NOT_TRACED, OTHER_RUN, OUTSIDE, pairs_by_arrival

AHEAD_S = 1234.567


def planned(count=400, *, seconds=3600.0, lengths=200, seed=0):
    """Return the send times and the output lengths of a benchmark."""
    rng = np.random.default_rng(seed)
    return np.sort(rng.uniform(0, seconds, count)), rng.integers(1, lengths + 1, count)


def rows(at_s, lengths, **columns):
    times = pl.Series((np.asarray(at_s) * 1e9).astype(np.int64))
    numbers = pl.int_range(len(at_s), dtype=pl.UInt32, eager=True)
    return pl.DataFrame(
        {"row": numbers, "arrival_ns": times, "output_tokens": pl.Series(lengths, dtype=pl.Int64)}
    ).with_columns(pl.lit(value).alias(name) for name, value in columns.items())


def server(sent_s, lengths, *, seed=1):
    """Return what a server receives: some milliseconds later, on its own clock."""
    return rows(sent_s + AHEAD_S + np.random.default_rng(seed).exponential(1e-3, len(sent_s)), lengths)


def shifted(sent_s, by):
    """Return times on a clock that is off."""
    return {
        "in one step": sent_s + np.where(sent_s > 1800, 0.5, 0.0),
        "in steps": sent_s + np.select([sent_s < 700, sent_s < 2000, sent_s < 2900], [0.0, 0.5, -0.5], 30.0),
        "with a drift": sent_s * (1 + 0.5 / 3600),
        "with a drift of 5 s": sent_s * (1 - 5 / 3600),
    }[by]


@pytest.mark.parametrize("by", ["in one step", "in steps", "with a drift", "with a drift of 5 s"])
def test_requests_match_on_a_clock_that_is_off(by):
    sent_s, lengths = planned()
    pairs, rest = pairs_by_arrival(rows(shifted(sent_s, by), lengths, benchmark="a"), server(sent_s, lengths))
    assert not rest.height
    assert (pairs["client"] == pairs["row"]).all()
    assert pairs.height == 400


@pytest.mark.parametrize("by", ["in one step", "with a drift"])
def test_requests_of_one_length_match_by_their_times(by):
    sent_s, _ = planned(1800)
    same = np.full(1800, 128)
    pairs, _ = pairs_by_arrival(rows(shifted(sent_s, by), same, benchmark="a"), server(sent_s, same))
    # Two requests within a few milliseconds may be exchanged.
    assert (pairs["client"] == pairs["row"]).sum() >= 0.98 * 1800


def test_each_benchmark_has_an_offset_of_its_own():
    sent_s, lengths = planned()
    sent = pl.concat(
        [
            rows(sent_s[:150] + 0.9, lengths[:150], benchmark="a"),
            rows(sent_s[150:] + 0.2, lengths[150:], benchmark="b").with_columns(pl.col("row") + 150),
        ]
    )
    pairs, rest = pairs_by_arrival(sent, server(sent_s, lengths))
    assert not rest.height
    assert (pairs["client"] == pairs["row"]).all()


def test_requests_that_a_server_does_not_trace_match_none():
    sent_s, lengths = planned(1000)
    is_traced = np.random.default_rng(5).random(1000) < 0.1
    traced = server(sent_s, lengths).filter(pl.Series(is_traced))
    pairs, rest = pairs_by_arrival(rows(sent_s, lengths, benchmark="a"), traced)
    assert sorted(pairs["client"]) == sorted(np.flatnonzero(is_traced))
    assert (pairs["client"] == pairs["row"]).all()
    before, after = np.flatnonzero(is_traced)[[0, -1]]
    reasons = dict(rest["reason"].value_counts().iter_rows())
    assert reasons == {
        OUTSIDE: before + 999 - after,
        NOT_TRACED: 999 - 1 * is_traced.sum() - (before + 998 - after),
    }


def test_a_benchmark_of_another_run_matches_none():
    sent_s, lengths = planned()
    others_s, others = planned(seed=9)
    pairs, rest = pairs_by_arrival(rows(sent_s, lengths, benchmark="a"), server(others_s, others))
    assert not pairs.height
    assert rest["reason"].to_list() == [OTHER_RUN] * 400


def test_start_times_in_another_unit_are_named():
    sent_s, lengths = planned()
    pairs, rest = pairs_by_arrival(rows(sent_s * 1e3, lengths, benchmark="a"), server(sent_s, lengths))
    assert not pairs.height
    assert rest["reason"].unique().to_list() == [
        "the range of start times is about 1,000 times that of the spans: is it in ms?"
    ]


def test_nothing_matches_nothing():
    empty = rows([], [], benchmark="a")
    assert [frame.height for frame in pairs_by_arrival(empty, rows([], []))] == [0, 0]
    pairs, rest = pairs_by_arrival(rows([1.0], [3], benchmark="a"), rows([], []))
    assert (pairs.height, rest.height) == (0, 1)
