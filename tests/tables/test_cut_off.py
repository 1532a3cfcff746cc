"""Which requests ended before they were complete."""

from __future__ import annotations

import polars as pl

from tracefit.tables.requests import is_cut_off


def test_request_of_unknown_status_is_not_cut_off():
    statuses = ["stopped", "length", None, "aborted", "error", "ignored"]
    rows = pl.DataFrame({"finish_status": statuses}).select(is_cut_off())
    assert rows["finish_status"].to_list() == [False, False, False, True, True, True]
