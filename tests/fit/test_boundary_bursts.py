"""Bursts in front of the API process, worked out by hand."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from tracefit.fit.boundary import api_waits, find_bursts, mark_bursts


def _rows(arrivals_ms, *, server="s", train=None, admission_us=2_000.0):
    count = len(arrivals_ms)
    train = count if train is None else train
    return pl.DataFrame(
        {
            "run_id": "r",
            "server": server,
            "ts_ns": [round(at * 1e6) for at in arrivals_ms],
            "y": admission_us,
            "split": ["train"] * train + ["holdout"] * (count - train),
        }
    )


def test_work_ahead_is_the_backlog_of_a_serial_process():
    rows = _rows([0.0, 1.0, 1.5, 9.0])
    # Work of 2 ms each: done at 2, 4, 6 and 11 ms; 1 ms and 2.5 ms are left when the second and third come.
    assert api_waits(rows, np.full(4, 2_000.0)) == pytest.approx([0, 1_000, 2_500, 0])


def test_each_server_works_on_its_own_requests():
    rows = pl.concat([_rows([4.0, 0.0, 1.0]), _rows([1.0], server="t")])
    # In order of arrival: work of 3, 2 and 5 ms at 0, 1 and 4 ms; done at 3, 5 and 10 ms.
    waits = api_waits(rows, np.array([5_000.0, 3_000, 2_000, 7_000]))
    assert waits == pytest.approx([1_000, 0, 2_000, 0])


def test_a_burst_begins_with_the_sixth_request_at_once():
    at_once = [0.0, 10_000, *[20_000.0] * 10, 30_000]
    marked = mark_bursts(_rows(at_once))
    assert marked["in_burst"].to_list() == [False] * 2 + [False] * 5 + [True] * 5 + [False]


def test_requests_a_process_keeps_up_with_are_no_burst():
    assert not mark_bursts(_rows([2.0 * k for k in range(100)]))["in_burst"].any()


def test_bursts_have_a_server_times_and_held_out_requests():
    rows = _rows([0.0, *[5_000.0] * 8, *[6_500.0] * 9, 7_000], train=9)
    other = _rows([100.0, *[900.0] * 7], server="t")
    first, second, third = find_bursts(mark_bursts(pl.concat([rows, other])))
    assert (first.server, first.from_s, first.to_s) == ("s", 5, 5)
    assert (first.requests, first.holdout_requests) == (3, 0)
    assert (second.from_s, second.requests, second.holdout_requests) == (6.5, 4, 4)
    assert (third.server, third.from_s, third.requests) == ("t", 0.8, 2)


def test_marking_bursts_keeps_the_order_of_rows():
    shuffled = _rows([0.0, 10_000, *[20_000.0] * 10]).sample(fraction=1, shuffle=True, seed=1)
    assert mark_bursts(shuffled).drop("in_burst").equals(shuffled)
    assert find_bursts(mark_bursts(shuffled.clear())) == ()
