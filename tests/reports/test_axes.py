"""Axes: values to pixels, and round values to label."""

from __future__ import annotations

import pytest

from tracefit.reports.svg import Axis, axis_of, spaced, tick_text


def test_points_are_where_the_axes_say():
    axis = Axis(0.0, 100.0, 50.0, 250.0)
    assert [axis.at(v) for v in (0, 25, 100, 130, -5)] == [50.0, 100.0, 250.0, 250.0, 50.0]
    log = Axis(1.0, 10_000.0, 0.0, 400.0, log=True)
    assert [log.at(v) for v in (1, 10, 1000)] == pytest.approx([0.0, 100.0, 300.0])


@pytest.mark.parametrize(
    ("low", "high", "log", "ticks"),
    [
        (0.0, 10.0, False, [0, 2, 4, 6, 8, 10]),
        (-3.0, 3.0, False, [-2, 0, 2]),
        (0.0, 0.047, False, [0, 0.01, 0.02, 0.03, 0.04]),
        (12.0, 1234.0, True, [20, 50, 100, 200, 500, 1000]),
        (1.0, 9.0, True, [1, 2, 3, 5, 7]),
        (0.5, 60_000.0, True, [1, 10, 100, 1000, 10_000]),
        (42.0, 88.0, True, [50, 60, 70, 80]),
    ],
)
def test_ticks_are_round(low, high, log, ticks):
    assert Axis(low, high, 0.0, 1.0, log=log).ticks() == pytest.approx(ticks)


def test_a_single_value_still_has_an_axis():
    axis = axis_of([5.0], 0.0, 100.0, log=False)
    assert axis.at(5.0) == pytest.approx(50.0)
    assert axis.ticks()


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.02, "0.02"), (1500, "1500"), (12_000, "12k"), (3_500_000, "3.5M"), (0.30000000000000004, "0.3")],
)
def test_ticks_are_short(value, text):
    assert tick_text(value) == text


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(("low", "high"), [(1.0, 9.0), (0.003, 70.0), (95.0, 105.0), (1.0, 1e9)])
def test_ticks_are_as_many_as_there_is_room_for(low, high, log):
    for most in (5, 7):
        ticks = Axis(low, high, 0.0, 1.0, log=log).ticks(most)
        assert 2 <= len(ticks) <= most
        assert low * (1 - 1e-6) <= min(ticks) <= max(ticks) <= high * (1 + 1e-6)
        assert ticks == sorted(set(ticks))


def test_labels_that_would_touch_are_left_out():
    """Five letters of 6 px are 30 px wide; a letter's width must stay free between two of them."""
    labels = [(100.0, "aaaaa"), (130.0, "bbbbb"), (140.0, "ccccc"), (176.0, "ddddd")]
    assert spaced(labels, 6.0) == [labels[0], labels[2], labels[3]]
