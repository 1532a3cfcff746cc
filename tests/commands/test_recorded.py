"""The load of recorded runs: rates that were carried, not means over pauses, and lengths."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from tracefit.commands.recorded import recorded_load
from tracefit.tables import schema


class Tables:
    """Tables of a store, by name."""

    def __init__(self, requests, sampling=None):
        rows = pl.DataFrame(requests, infer_schema_length=None).with_columns(run_id=pl.lit("r"), epoch=0)
        self.tables = {
            "requests": schema.REQUESTS.conform(rows),
            "runs": pl.DataFrame({"journey_sampling": [sampling]}, schema={"journey_sampling": pl.Float64}),
        }

    def read(self, name, _runs, columns=None):
        return self.tables[name].select(columns or pl.all())


def _requests(*loads, server="s"):
    """Return requests at even rates, one load of (rate, begin, end) in s after the other; each takes a second."""
    arrivals = np.concatenate([np.arange(begin, end, 1 / rate) for rate, begin, end in loads])
    lengths = [(50, 30) if k % 2 else (150, 50) for k in range(len(arrivals))]
    return [
        {
            "server": server,
            "arrival_ns": round(1e9 * at),
            "finished_ns": round(1e9 * (at + 1)),
            "prompt_tokens": prompt,
            "output_tokens": output,
            "finish_status": "stopped",
        }
        for at, (prompt, output) in zip(arrivals, lengths, strict=True)
    ]


def test_the_rate_carried_is_that_of_the_busiest_half_minute():
    load = recorded_load(Tables(_requests((1, 0, 60), (6, 100, 160), (2, 200, 260))), ["r"])
    assert load.carried_per_s == pytest.approx(6, rel=0.02)
    assert load.over_s == 30
    assert (load.prompt_tokens, load.output_tokens) == (100, 40)
    # A standard deviation of 50 is that of a uniform distribution of 87 on both sides.
    assert (load.prompt_spread, load.output_spread) == (
        pytest.approx(0.87, abs=0.01),
        pytest.approx(0.43, abs=0.01),
    )


def test_a_short_run_carried_its_mean_rate():
    load = recorded_load(Tables(_requests((4, 0, 10))), ["r"])
    assert (load.carried_per_s, load.over_s) == (pytest.approx(40 / 10.75), pytest.approx(10.75))


def test_engines_of_one_run_carry_their_rates_together():
    rows = [*_requests((3, 0, 60)), *_requests((2, 0, 60), server="t")]
    load = recorded_load(Tables(rows), ["r"])
    assert (load.carried_per_s, load.carried_together_per_s) == (
        pytest.approx(3, rel=0.02),
        pytest.approx(5, rel=0.02),
    )


def test_a_sample_of_requests_stands_for_all():
    load = recorded_load(Tables(_requests((3, 0, 60)), sampling=0.1), ["r"])
    assert load.carried_per_s == pytest.approx(10 * 180 / 60.67, rel=0.01)


def test_requests_that_were_cut_off_are_no_load():
    cut_off = [row | {"finish_status": "aborted"} for row in _requests((3, 0, 60))]
    assert recorded_load(Tables(cut_off), ["r"]) is None
