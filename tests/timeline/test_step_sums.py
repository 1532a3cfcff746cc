"""Sums over consecutive steps: step k of the engine has the value k, so that steps 6 to 15 add up to 105."""

from __future__ import annotations

import polars as pl
import pytest

from tracefit.timeline.step_sums import StepSums

ENGINE = {"run_id": "r", "server": "s", "epoch": 0}


def _sums(steps, ends, *, missing, server="s"):
    table = pl.DataFrame([{**ENGINE, "step_id": k, "value": value} for k, value in steps])
    rows = pl.DataFrame([{**ENGINE, "server": server, "after": after, "last": last} for after, last in ends])
    return StepSums(table, "value").between(rows, pl.col("after"), pl.col("last"), missing=missing).rows()


def _steps(*ids):
    return [(k, float(k)) for k in ids]


def test_a_sum_is_between_two_steps():
    ends = [(10, 15), (5, 15), (None, 15), (7, 7), (5, None)]
    sums = _sums(_steps(*range(1, 21)), ends, missing="unknown")
    assert sums == [(65, 5), (105, 10), (None, None), (0, 0), (None, None)]


@pytest.mark.parametrize(
    ("steps", "shown"),
    [
        (_steps(*range(1, 11)), (40, 5)),
        (_steps(*range(1, 11), *range(16, 21)), (40, 5)),
        (_steps(*range(11, 21)), (65, 5)),
        ([*_steps(*range(1, 20))[:7], (8, None), *_steps(*range(9, 20))], (97, 9)),
        (_steps(20, 21), (0, 0)),
    ],
)
def test_a_missing_step_is_unknown_or_skipped(steps, shown):
    assert _sums(steps, [(5, 15)], missing="unknown") == [(None, shown[1])]
    assert _sums(steps, [(5, 15)], missing="skipped") == [shown]


def test_steps_of_another_engine_do_not_count():
    assert _sums(_steps(*range(1, 21)), [(5, 15)], missing="skipped", server="t") == [(0, 0)]
