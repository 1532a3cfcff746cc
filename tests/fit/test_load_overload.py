"""Which runs were overloaded, by the stated rules, and what becomes of them."""

from __future__ import annotations

import polars as pl
import pytest

from tracefit.fit.load import overload_of, runs_to_fit
from tracefit.fit.results import Overload
from tracefit.tables import schema

NO_STEPS = schema.STEPS.empty()


def _requests(spans, **columns):
    """Requests queued and scheduled at these seconds, none failed, none preempted."""
    frame = pl.DataFrame({"queued_ns": [int(a * 1e9) for a, _ in spans]}).with_columns(
        first_scheduled_ns=pl.Series([int(b * 1e9) for _, b in spans]),
        server=pl.lit("s"),
        finish_status=pl.lit("length"),
        num_preemptions=pl.lit(0),
    )
    return frame.with_columns(**columns)


def _reasons(requests, steps=NO_STEPS):
    overload = overload_of("r", requests, steps)
    return list(overload.reasons) if overload else []


QUIET = [(at, at + 0.001) for at in range(100)]


def test_a_quiet_run_is_not_overloaded():
    assert _reasons(_requests(QUIET)) == []


def test_a_run_of_one_instant_has_no_queue():
    assert _reasons(_requests([(5, 5)] * 20)) == []


@pytest.mark.parametrize(("failed", "over"), [(10, False), (11, True)])
@pytest.mark.parametrize("status", ["aborted", "error"])
def test_more_than_a_tenth_failed(failed, over, status):
    statuses = pl.when(pl.int_range(pl.len()) < failed).then(pl.lit(status)).otherwise("finish_status")
    reasons = _reasons(_requests(QUIET, finish_status=statuses))
    assert reasons == (["11.0 % of requests failed or were given up"] if over else [])


@pytest.mark.parametrize(("preempted", "over"), [(10, False), (11, True)])
def test_more_preemptions_than_one_for_ten_requests(preempted, over):
    counts = (pl.int_range(pl.len()) < preempted).cast(pl.Int64)
    reasons = _reasons(_requests(QUIET, num_preemptions=counts))
    assert reasons == (["11 preemptions of 100 requests"] if over else [])


def _queue(peak, lasts, *, length=100.0):
    """A run with a period of `lasts` seconds from second 10 on in which up to `peak` requests wait."""
    first = 10.0
    waiting = [(first + 0.001 * n, first + lasts - 0.001 * (peak - n)) for n in range(peak)]
    return [(0.0, 0.0), *waiting, (length, length)]


@pytest.mark.parametrize(
    ("peak", "lasts", "over"), [(10, 26.0, True), (9, 26.0, False), (10, 24.0, False), (30, 90.0, True)]
)
def test_a_queue_of_ten_for_a_quarter_of_the_run_is_overload(peak, lasts, over):
    reasons = _reasons(_requests(_queue(peak, lasts)))
    text = f"a queue of up to {peak} requests did not empty for {lasts:.0f} % of the run"
    assert reasons == ([text] if over else [])


def test_two_queues_with_an_empty_moment_between_are_two():
    spans = [*_queue(12, 20.0), *[(a + 21, b + 21) for a, b in _queue(12, 20.0)[1:-1]]]
    assert _reasons(_requests(sorted(spans))) == []


def test_without_journeys_the_queue_comes_from_sampled_steps():
    depths = [0] * 10 + [12] * 30 + [0] * 60
    steps = pl.DataFrame(
        {
            "run_id": "r",
            "server": "s",
            "ts_start_ns": [n * 10**9 for n in range(100)],
            "waiting_depth": depths,
            "num_preempted": 0,
        }
    )
    none = _requests(QUIET).clear()
    assert _reasons(none, steps) == ["a queue of up to 12 requests did not empty for 30 % of the run"]


def test_the_period_names_the_server_of_its_queue():
    """From the first request that waits, at 10 s, for 30 s: of the other server's queue of 9 nothing is said."""
    both = [_requests(_queue(12, 30.0)), _requests(_queue(9, 80.0), server=pl.lit("t"))]
    overload = overload_of("r", pl.concat(both), NO_STEPS)
    (period,) = overload.queued
    assert (period.server, period.peak) == ("s", 12)
    assert (period.from_ns, period.to_ns) == (10_000_000_000, pytest.approx(40_000_000_000, abs=2e6))
    assert period.share == pytest.approx(0.3, abs=1e-3)


@pytest.mark.parametrize(
    ("overloaded", "include", "trained"),
    [("", False, "abc"), ("b", False, "ac"), ("b", True, "abc"), ("abc", False, "abc")],
)
def test_overloaded_runs_are_left_out_unless_included_or_all_are(overloaded, include, trained):
    flags = tuple(Overload(run_id, ("why",)) for run_id in overloaded)
    runs, overloads = runs_to_fit(list("abc"), flags, include=include)
    assert "".join(runs) == trained
    assert [one.trained_on for one in overloads] == [one.run_id in trained for one in flags]
