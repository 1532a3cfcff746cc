"""Restarts: the step counter begins again, the clock does not."""

from __future__ import annotations

import pytest

from together import together


def _steps(traces, ids, start, *, server=None):
    return traces.steps(*(traces.summary(i, start + 1000 * n) for n, i in enumerate(ids)), server=server)


def _epochs(table, name="steps"):
    return table(name).select("epoch", "step_id").rows()


@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize("first", [30, 3, 1])
@together
def test_summaries_that_count_from_one_again_are_a_new_epoch(traces, first):
    _steps(_steps(traces, range(1, first + 1), 0), range(1, 11), 1_000_000)
    table = yield traces
    expected = [(0, i) for i in range(1, first + 1)] + [(1, i) for i in range(1, 11)]
    assert _epochs(table) == expected
    assert table("runs")["epochs"].to_list() == [2]


def test_order_in_the_file_is_not_order_in_time(tables_of, traces):
    _steps(_steps(traces, range(1, 11), 1_000_000), range(1, 31), 0)
    assert [step for epoch, step in _epochs(tables_of(traces)) if epoch == 1] == list(range(1, 11))


@pytest.mark.slow
@together
def test_journeys_alone_tell_a_restart(traces):
    traces.request(1, 0, step=100).request(2, 1_000_000, step=1)
    rows = (yield traces)("requests").select("epoch", "request_id", "first_scheduled_step").rows()
    assert rows == [(0, "cmpl-1", 100), (1, "cmpl-2", 1)]


@pytest.mark.slow
@together
def test_a_restart_that_summaries_and_journeys_both_tell_is_one(traces):
    _steps(traces, range(1, 31), 0).request(1, 3900, step=6, tokens_at=(5900, 9900))
    _steps(traces, range(1, 11), 1_000_000).request(2, 998_900, step=1, tokens_at=(1_000_900, 1_004_900))
    table = yield traces
    assert table("runs")["epochs"].to_list() == [2]
    assert set(table("steps")["epoch"]) == {0, 1}
    assert table("requests")["epoch"].to_list() == [0, 1]


@together
def test_three_starts_are_three_epochs(traces):
    for start in range(3):
        _steps(traces, range(1, 6), start * 1_000_000)
    assert (yield traces)("runs")["epochs"].to_list() == [3]


@together
def test_late_update_is_no_restart(traces):
    """Asynchronous scheduling: FIRST_TOKEN of step k comes when step k + 1 has begun."""
    _steps(traces, range(1, 41), 0)
    for step in range(2, 30, 4):
        at = 1000.0 * (step - 1) - 1150
        traces.request(step, at, step=step, output=5, tokens_at=(at + 2900, at + 6900))
    table = yield traces
    assert table("runs")["epochs"].to_list() == [1]
    assert set(table("journey_events")["epoch"]) == {0}


@together
def test_counters_of_two_servers_side_by_side_are_no_restarts(traces):
    for n in range(20):
        _steps(traces, [50 + n], 2000 * n, server="a")
        _steps(traces, [1 + n], 2000 * n + 700, server="b")
    assert (yield traces)("runs").select("server", "epochs").rows() == [("a", 1), ("b", 1)]


@pytest.mark.slow
@together
def test_snapshots_belong_to_the_epoch_of_their_step(traces):
    for start in (0, 1_000_000):
        traces.steps(traces.summary(1, start), traces.snapshot(1, start + 200, f"at-{start}"))
    rows = (yield traces)("request_snapshots").select("epoch", "request_id").rows()
    assert rows == [(0, "at-0"), (1, "at-1000000")]
