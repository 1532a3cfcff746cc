"""Which sources of step times are of one step."""

from __future__ import annotations

import polars as pl

from tracefit.tables.sources import CycleSource, is_one_step


def test_an_interval_is_no_step_and_every_other_source_is_one():
    sources = [*(source.value for source in CycleSource), None]
    rows = pl.DataFrame({"source": sources}).filter(is_one_step())
    assert rows["source"].to_list() == ["adjacent", "duration", "fpm", "fpm_gpu", "log", "sglang", "client"]
