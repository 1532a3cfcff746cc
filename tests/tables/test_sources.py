"""Sources of step times are asked for what they declare."""

from __future__ import annotations

import polars as pl
import pytest

import tracefit.recordings  # noqa: F401 - declares the sources of recorded steps
from tracefit.recordings import RECORDINGS
from tracefit.tables.sources import (
    SOURCES,
    CycleSource,
    declare,
    is_by_client,
    is_from,
    is_one_step,
    names_of,
)


def _names(expression, column="source"):
    rows = pl.DataFrame({column: [*SOURCES, None]}).filter(expression)
    return sorted(rows[column])


def test_an_interval_is_no_step_and_every_other_source_is_one():
    expected = ["adjacent", "client", "duration", "fpm", "fpm_gpu", "fpm_trace", "log", "sglang"]
    assert _names(is_one_step()) == expected


@pytest.mark.parametrize(
    ("has", "expected"),
    [
        (lambda source: source.is_stated, ["client", "fpm", "fpm_gpu", "fpm_trace", "sglang"]),
        (lambda source: source.is_stamped, ["log", "log_interval"]),
        (lambda source: source.from_requests, ["client", "request"]),
        (lambda source: source.seen_by == "engine", ["fpm", "fpm_gpu", "fpm_trace", "log", "log_interval"]),
    ],
)
def test_rows_are_chosen_by_a_property_of_their_source(has, expected):
    assert _names(is_from(has, "source")) == sorted(names_of(has)) == expected


def test_rows_without_a_source_are_from_none():
    rows = pl.DataFrame({"cycle_source": ["client", None, "fpm"]})
    assert rows.select(is_by_client()).to_series().to_list() == [True, False, False]
    assert rows.select(~is_by_client()).to_series().to_list() == [False, True, True]


def test_a_source_that_is_declared_later_is_asked_too(monkeypatch):
    monkeypatch.setattr("tracefit.tables.sources.SOURCES", dict(SOURCES))
    declare(CycleSource(name="ticks", is_one_step=False))
    assert "ticks" not in _names(is_one_step())
    assert "ticks" in names_of(lambda source: source.is_stated)


def test_formats_and_sources_fit_together():
    """A format gives declared sources; a source names declared ones."""
    given = [name for recording in RECORDINGS.values() for name in recording.sources]
    named = [name for source in SOURCES.values() for name in (source.means, source.from_sglang) if name]
    assert {*given, *named} <= SOURCES.keys()
    of_spans = {source.name for source in SOURCES.values() if source.seen_by == "spans"}
    assert SOURCES.keys() - set(given) == of_spans
    assert all(SOURCES[name].recorder and SOURCES[name].interval and SOURCES[name].error for name in given)
