"""Which requests ended before they were complete."""

from __future__ import annotations

import polars as pl

from tracefit.tables.requests import is_cut_off


def test_a_request_is_cut_off_by_its_status_and_not_where_that_is_unknown():
    statuses = ["stopped", "length", None, "aborted", "error", "ignored"]
    rows = pl.DataFrame({"finish_status": statuses}).select(is_cut_off())
    assert rows["finish_status"].to_list() == [False, False, False, True, True, True]
