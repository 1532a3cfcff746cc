"""Arrivals with known rates and bursts: the stretches are those that were drawn, and the burstiness is that of
theory."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import chi2

from tracefit.replay.arrivals import Burstiness, burstiness, relative_gaps, steady_stretches

S = 1_000_000_000
RATES, SECONDS = (1, 5, 2, 7, 3), (50, 60, 50, 40, 40)
CHANGES_S = np.cumsum(SECONDS)[:-1]


def drawn(gaps_s):
    """Return arrivals in ns, the first at the time of a recent clock."""
    at = np.concatenate(([0.0], np.cumsum(gaps_s)))
    return 1_790_000_000 * S + np.rint(at * S).astype(np.int64)


def at_rates(seed, rates=RATES, seconds=SECONDS, shape=1.0, pause_s=0.0):
    """Return arrivals with gamma gaps at one rate after the other, with pauses between them."""
    rng, begin, parts = np.random.default_rng(seed), 0.0, []
    for rate, length in zip(rates, seconds, strict=True):
        at = np.cumsum(rng.gamma(shape, 1 / (shape * rate), round(2 * rate * length) + 200))
        parts.append(begin + at[at < length])
        begin += length + pause_s
    return np.rint(np.concatenate(parts) * S).astype(np.int64)


def batches(seed, size, batch_gap_s, count, within_s=0.0):
    """Return arrivals in batches at Poisson times; the requests of a batch are `within_s` apart on average."""
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(batch_gap_s, count))[:, None]
    return np.sort(
        np.rint((at + np.cumsum(rng.exponential(1, (count, size)), 1) * within_s) * S).astype(np.int64).ravel()
    )


def cuts_s(arrival_ns):
    """Return when stretches begin, except the first, in seconds."""
    return np.array([arrival_ns[s.start] / S for s in steady_stretches(arrival_ns)[1:]])


# -- stretches ---------------------------------------------------------------------------------------------------------


def test_stretches_leave_no_arrival_out():
    for arrival_ns in (
        at_rates(0),
        batches(0, 40, 10, 40),
        drawn([]),
        drawn([1.0]),
        np.zeros(0, dtype=np.int64),
    ):
        covered = [np.arange(s.start, s.stop) for s in steady_stretches(arrival_ns)]
        assert np.concatenate([*covered, []]).tolist() == [*range(len(arrival_ns))]


def test_one_rate_is_one_stretch():
    """The penalty lets 5 of 100 be cut: that costs a gap, and a change that is not found costs more."""
    found = [len(steady_stretches(drawn(np.random.default_rng(s).exponential(1, 400)))) for s in range(100)]
    assert sum(n > 1 for n in found) <= 8


@pytest.mark.parametrize("seed", range(4))
def test_stretches_begin_where_the_rate_changes(seed):
    found = cuts_s(at_rates(seed))
    assert len(found) == len(CHANGES_S)
    # The slower side has a gap of at most a second on average, and its last one may be part of either.
    assert np.abs(found - CHANGES_S).max() < 5


def test_a_rate_that_rises_and_falls_again_is_found():
    """Both sides of every cut of the whole have nearly the same mean."""
    found = cuts_s(at_rates(1, (4, 12, 4), (200, 20, 200)))
    assert found == pytest.approx([200, 220], abs=3)


def test_bursts_at_two_rates_are_cut_once():
    """One dispersion for both: an extra cut now and then is chance."""
    loads = [at_rates(seed, (1, 6), (200, 100), shape=0.5) for seed in range(20)]
    found = [cuts_s(arrival_ns) for arrival_ns in loads]
    assert max(np.abs(cuts - 200).min() for cuts in found) < 10
    assert sum(len(cuts) > 1 for cuts in found) <= 2
    assert np.mean([burstiness([arrival_ns]).dispersion for arrival_ns in loads]) == pytest.approx(2, rel=0.1)


@pytest.mark.parametrize("shape", [0.2, 0.4, 3.0])
def test_bursts_are_not_cut_from_each_other(shape):
    found = [len(steady_stretches(at_rates(s, [4], [300], shape))) for s in range(20)]
    assert sum(n > 1 for n in found) <= 1


@pytest.mark.parametrize(("size", "within_s"), [(8, 0.0), (8, 0.005), (64, 0.0)])
def test_batches_are_not_cut_from_each_other(size, within_s):
    found = [len(steady_stretches(batches(s, size, size / 4, 1600 // size, within_s))) for s in range(10)]
    assert max(found) <= 2


def test_rounds_with_pauses_are_stretches():
    """Poisson rounds of 45 s at 1.6 to 7 requests a second, with 20 s between them."""
    arrival_ns = at_rates(3, (1.6, 7, 3.5, 5) * 3, (45,) * 12, pause_s=20)
    begins = cuts_s(arrival_ns)
    assert begins == pytest.approx(65 * np.arange(1, 12), abs=2)
    assert not burstiness([arrival_ns]).differs


@pytest.mark.slow
def test_fifty_thousand_arrivals_are_cut():
    """Rounds of 44 gaps are the most stretches that so many arrivals have, about."""
    gaps = np.random.default_rng(0).exponential(1, 50_000)
    gaps[::45] = 60
    assert len(steady_stretches(drawn(gaps))) == pytest.approx(50_000 / 45, rel=0.01)


# -- relative gaps -----------------------------------------------------------------------------------------------------


def test_gaps_are_relative_to_the_rate_of_their_stretch():
    """Exponential gaps have a coefficient of variation of 1; over all rates it is 1.46, by their second moment."""
    relative, overall = [], []
    for arrival_ns in map(at_rates, range(20)):
        gaps, found = np.diff(arrival_ns), relative_gaps(arrival_ns)
        assert found.mean() == pytest.approx(1)
        relative.append(found.std())
        overall.append(gaps.std() / gaps.mean())
    counts, rates = np.multiply(RATES, SECONDS), np.array(RATES)
    second = (counts * 2 / rates**2).sum() / counts.sum()
    by_theory = math.sqrt(second / (sum(SECONDS) / counts.sum()) ** 2 - 1)
    assert by_theory == pytest.approx(1.46, abs=0.005)
    assert np.mean(relative) == pytest.approx(1, abs=0.05)
    assert np.mean(overall) == pytest.approx(by_theory, abs=0.08)


def test_a_pause_is_in_no_relative_gap():
    arrival_ns = at_rates(4, (4, 4), (60, 60), pause_s=30)
    gaps = np.diff(arrival_ns)
    pause = int(np.argmax(gaps))
    assert gaps[pause] > 29 * S
    found = relative_gaps(arrival_ns)
    assert found * np.repeat([gaps[:pause].mean(), gaps[pause + 1 :].mean()], [pause, len(gaps) - pause - 1]) == (
        pytest.approx(np.delete(gaps, pause))
    )


def test_a_pause_near_an_end_is_in_no_relative_gap():
    """A request that tests the connection, and the load 20 s later."""
    load = 0.2 * np.random.default_rng(5).exponential(1, 300)
    found = relative_gaps(drawn([20.0, *load]))
    assert found == pytest.approx(load / load.mean(), abs=1e-6)


def test_few_gaps_and_arrivals_at_once_have_no_relative_gaps():
    rng = np.random.default_rng(0)
    assert len(relative_gaps(drawn(rng.exponential(1, 50)))) == 50
    assert not len(relative_gaps(drawn(rng.exponential(1, 49))))
    assert not len(relative_gaps(drawn(np.zeros(200))))


# -- burstiness --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [100, 400])
def test_a_poisson_process_does_not_differ_beyond_chance(count):
    found = [burstiness([drawn(np.random.default_rng(s).exponential(0.5, count))]) for s in range(100)]
    assert sum(b.differs for b in found) <= 2
    assert {b.shape for b in found if not b.differs} == {1.0}
    values, sd = np.array([b.dispersion for b in found]), found[0].sd
    # The mean and the standard deviation of a hundred values.
    assert values.mean() == pytest.approx(1, abs=3 * sd / 10)
    assert values.std() == pytest.approx(sd, rel=0.25)


def test_sd_is_by_theory():
    """The variance is 8.8 over the gaps; for sums of one gap it is 4, that of the squared coefficient of variation."""
    assert burstiness([drawn(np.ones(400))]).sd == pytest.approx(math.sqrt(8.8 / 400))


@pytest.mark.parametrize(("chance", "factor"), [(0.99865, 1.03), (0.00135, 0.97)])
def test_three_standard_deviations_are_those_of_a_variance(chance, factor):
    """A variance of 50 degrees of freedom has a standard deviation of 0.2, and these quantiles of chi-square / 50."""
    limit = chi2.ppf(chance, 50) / 50
    assert not Burstiness(limit / factor, 0.2, 220).differs
    assert Burstiness(limit * factor, 0.2, 220).differs


def test_short_stretches_do_not_bias_the_dispersion():
    """The mean of 40 gaps takes an eighth of the variance of sums of 5 with it: (40 - 5) / (40 + 1)."""
    values = [
        burstiness([drawn(np.random.default_rng([s, k]).exponential(1, 40)) for k in range(20)]).dispersion
        for s in range(40)
    ]
    assert np.mean(values) == pytest.approx(1, abs=0.04)


def test_a_poisson_process_at_several_rates_does_not_differ():
    assert sum(burstiness([at_rates(s)]).differs for s in range(40)) <= 1


@pytest.mark.parametrize("seed", range(5))
def test_rounds_as_the_report_advises_are_stretches(seed):
    """Its shortest: 23 long prompts in 45 s, and 150 requests in 10 s, which together looked like bursts."""
    rates, seconds = (0.74, 3, 5.9, 0.51, 15), (61, 40, 60, 45, 10)
    arrival_ns = at_rates(seed, rates * 3, seconds * 3, pause_s=25)
    assert burstiness([arrival_ns]).dispersion == pytest.approx(1, abs=0.25)


def test_bursty_rounds_with_pauses_have_the_dispersion_of_their_gaps():
    loads = [at_rates(s, [2] * 12, [60] * 12, shape=0.5, pause_s=20) for s in range(10)]
    assert [burstiness([arrival_ns]).dispersion for arrival_ns in loads] == pytest.approx([2.0] * 10, rel=0.25)


def test_gamma_gaps_have_their_shape():
    found = burstiness([at_rates(6, [4], [300], shape=0.4)])
    assert found.differs
    assert found.shape == pytest.approx(0.4, rel=0.25)
    assert found.shape == pytest.approx(1 / found.dispersion)


def test_batches_are_bursts():
    """Five gaps are one between batches with a chance of 5/8, with a mean of 8: a variance of 5/8 · 2 · 8² - 5² = 5 ·
    11."""
    assert burstiness([batches(7, 8, 2, 400)]).dispersion == pytest.approx(11, rel=0.25)


def test_one_gap_at_a_time_does_not_show_the_bursts():
    """Two states with exponential gaps, 20 requests each on average: the sums of five have twice the variance of single
    gaps."""
    rng = np.random.default_rng(8)
    fast = np.repeat(np.arange(200) % 2 == 0, rng.geometric(1 / 20, 200))
    found = relative_gaps(arrival_ns := drawn(rng.exponential(1, len(fast)) * np.where(fast, 0.1, 1)))
    assert burstiness([arrival_ns]).dispersion > 1.5 * found.var()


def test_bursts_of_less_than_ten_seconds_stay_bursts():
    """Forty requests in 0.2 s have enough gaps for a stretch; the server sees a burst."""
    assert burstiness([batches(9, 40, 10, 40, within_s=0.005)]).dispersion > 20


def test_equal_gaps_are_more_regular_than_a_poisson_process():
    found = burstiness([drawn(np.full(200, 0.25))])
    assert found.differs
    assert found.dispersion == pytest.approx(0, abs=1e-9)
    assert found.shape == pytest.approx(20)


def test_the_shape_of_large_batches_is_bounded():
    assert burstiness([batches(0, 64, 16, 30)]).shape == pytest.approx(0.05)


@pytest.mark.parametrize("gaps_s", [[], [1.0], [0.0] * 15 + [30.0], [0.0] * 500])
def test_few_gaps_do_not_differ(gaps_s):
    found = burstiness([drawn(gaps_s)])
    assert (found.dispersion, found.gaps, found.differs, found.shape) == (1.0, 0, False, 1.0)


def test_no_engines_do_not_differ():
    assert not burstiness([]).differs


def test_engines_count_together():
    """Each engine has its own rate, and most have too few gaps to differ."""
    rng = np.random.default_rng(10)
    engines = [drawn(rng.gamma(0.5, 2 / rate, 40)) for rate in (1, 2, 3, 4) * 4]
    assert sum(burstiness([one]).differs for one in engines) <= 4
    found = burstiness(engines)
    assert found.gaps == 16 * 40
    assert found.differs
    assert found.dispersion == pytest.approx(2, rel=0.3)
