"""A queue in the long run: waits by queueing theory, and replays that were too short for it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tracefit.coefficients.models import load
from tracefit.replay.engine import EngineSettings
from tracefit.replay.long_run import longer_waits, slot_waits_us
from tracefit.replay.plan import Fleet, TrafficSample


def test_each_request_takes_the_slot_that_is_free_first():
    arrival, service = np.array([0.0, 1.0, 2.0, 3.0, 20.0]), np.array([10.0, 2.0, 5.0, 1.0, 1.0])
    assert slot_waits_us(arrival, service, 1).tolist() == [0, 9, 10, 14, 0]
    # The second slot is free at 3, at 8 and at 9.
    assert slot_waits_us(arrival, service, 2).tolist() == [0, 0, 1, 5, 0]


@pytest.mark.parametrize("slots", [1, 8])
def test_the_mean_wait_is_that_of_the_theory(slots):
    """Erlang's C formula: requests at random, which take random times."""
    rng, load_per_slot = np.random.default_rng(1), 0.8
    offered = load_per_slot * slots
    waits = slot_waits_us(np.cumsum(rng.exponential(1 / offered, 300_000)), rng.exponential(1.0, 300_000), slots)
    last = offered**slots / math.factorial(slots) / (1 - load_per_slot)
    chance = last / (sum(offered**k / math.factorial(k) for k in range(slots)) + last)
    assert waits.mean() == pytest.approx(chance / (slots - offered), rel=0.08)
    assert (waits > 0).mean() == pytest.approx(chance, rel=0.05)


def _queue(seed, count):
    rng = np.random.default_rng(seed)
    return slot_waits_us(np.cumsum(rng.exponential(1 / 0.9, count)), rng.exponential(1.0, count), 1)


def test_a_replay_whose_queue_was_short_by_chance_has_that_of_the_long_run():
    rng, long = np.random.default_rng(2), _queue(0, 400_000)
    off, raw_off = [], []
    for seed in range(1, 9):
        short = _queue(seed, 5_000)
        # The replayed requests wait as in the model, and a little else.
        waited = short + rng.exponential(0.5, len(short))
        longer = longer_waits(waited, waited, short, long)
        expected = np.median(long + rng.exponential(0.5, len(long)))
        off.append(np.median(waited + longer.added_us) / expected - 1)
        raw_off.append(np.median(waited) / expected - 1)
        assert (waited + longer.added_us >= 0).all()
    assert np.abs(off).max() < 0.05 < np.abs(raw_off).max()


def test_a_model_that_says_nothing_of_the_waits_adds_nothing_to_them():
    short = _queue(1, 5_000)
    waited = np.random.default_rng(3).permutation(short)
    longer = longer_waits(waited, waited, short, 3 * _queue(0, 50_000))
    assert np.abs(longer.added_us).mean() < 0.03 * waited.mean()


def test_waits_without_any_difference_are_left_as_they_are():
    nothing = np.zeros(100)
    assert not longer_waits(nothing, nothing, nothing, nothing).added_us.any()
    assert not longer_waits(nothing, nothing, nothing, np.ones(1_000)).added_us.any()


def test_the_error_of_a_long_queue_is_that_between_queues():
    queues = [_queue(seed, 20_000) for seed in range(60)]
    shares = [(queue <= 4.0).mean() for queue in queues]
    errors = [longer_waits(*3 * [queue[:10]], queue).rank_errors for queue in queues]
    each = [np.interp(share, np.arange(1, 100) / 100, error) for share, error in zip(shares, errors, strict=True)]
    assert np.mean(each) == pytest.approx(np.std(shares), rel=0.25)


def test_a_server_with_one_slot_waits_as_the_theory_says(constant):
    """Pollaczek and Khinchine: at 95 % of what it can carry, requests of 10 ms wait for 95 ms in the mean."""
    tens = np.full(10, 10)
    settings = EngineSettings(1, 2048, 16)
    fleet = Fleet(load(constant()).deployment(None), {}, settings, TrafficSample(tens, tens, 0 * tens))
    assert fleet.capacity == pytest.approx(100)
    ttft_ms = fleet.at(1, 95.0, 10_000).latencies["ttft"] / 1e3
    assert ttft_ms.mean() == pytest.approx(95 + 1, rel=0.06)


@pytest.mark.parametrize(("blocks", "for_slots"), [(None, True), (16, True), (8, False)])
def test_a_server_whose_cache_is_full_first_has_the_waits_of_the_replay(constant, blocks, for_slots):
    # A request of 20 tokens takes two blocks of 16: eight slots need 160 tokens.
    tens = np.full(10, 10)
    settings = EngineSettings(8, 2048, 16, blocks)
    fleet = Fleet(load(constant()).deployment(None), {}, settings, TrafficSample(tens, tens, 0 * tens))
    found = fleet.at(1, 0.9 * fleet.capacity, 1_000)
    assert (found.longer is not None) is fleet.waits_for_slots is for_slots
