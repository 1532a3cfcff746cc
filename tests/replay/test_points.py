"""Times between tokens of a replay, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tracefit.replay.points import ReplayedLatency
from tracefit.replay.run import token_gaps
from tracefit.statistics import percentile, percentile_of_counts


def test_a_gap_is_the_time_of_the_step_for_each_request_that_decodes_in_it():
    """A prompt until 30 us, two steps of two requests, one with a third prompt, and one more that ends 100 us later."""
    steps = [
        (np.array([30.0]), 2, 0),
        (np.array([40.0, 51.0]), 2, 0),
        (np.array([81.0]), 3, 0),
        (np.array([181.0]), 3, 0),
    ]
    gaps = token_gaps(steps, [0, 2, 2, 3])
    assert gaps.gaps_us.tolist() == [10, 11, 30, 100]
    assert gaps.counts.tolist() == [2, 2, 2, 3]
    assert gaps.within(41, 100).gaps_us.tolist() == [11, 30]
    itl = ReplayedLatency(gaps.gaps_us, gaps.counts)
    # 2 * (10 + 11 + 30) + 3 * 100, over nine tokens; the fifth of them waits for 30 us.
    assert itl.statistic_us("mean") == pytest.approx(402 / 9)
    assert itl.statistic_us("p50") == 30


@pytest.mark.parametrize("percent", [0, 1, 37.5, 50, 90, 99, 100])
def test_a_percentile_of_counts_is_that_of_the_values_one_by_one(percent):
    rng = np.random.default_rng(3)
    values, counts = rng.gamma(2.0, 5.0, 40), rng.integers(0, 5, 40)
    one_by_one = percentile(np.repeat(values, counts), percent)
    assert percentile_of_counts(values, counts, percent) == pytest.approx(one_by_one)


def test_a_latency_of_means_alone_has_no_percentile():
    itl = ReplayedLatency(np.array([8.0, 10.0]), has_percentiles=False)
    assert (itl.statistic_us("mean"), itl.statistic_us("p50")) == (9, None)
