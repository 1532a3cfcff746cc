"""Requests through vLLM's scheduler, by hand: a step is 1,000 us, and 1 us for each token of context or prompt where
asked."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tracefit.replay.decoding import MOST_OFF, TabledDecoding
from tracefit.replay.engine import EngineSettings, StepBatch
from tracefit.replay.run import RequestLoad, replay


class Steps:
    """Step times of 1,000 us, and a rate per prompt token."""

    def __init__(self, per_prompt_token=0.0):
        self.per_prompt_token = per_prompt_token

    def step(self, batch):
        return 1000.0 + self.per_prompt_token * batch.prefill_tokens

    def decoding(self, batch, steps, growth):
        return np.full(steps, 1000.0)


def run(requests, times=None, settings=None, *, prefix=None, **options):
    columns = [np.array(column, dtype=np.int64) for column in zip(*requests, strict=True)]
    load = RequestLoad(*columns, None if prefix is None else np.array(prefix, dtype=np.int64))
    return replay(load, times or Steps(), settings or EngineSettings(64, 100, 4), **options)


def test_scheduling_ahead_adds_a_scheduled_step_to_the_wait():
    # At 100 the step from 1000 is scheduled already: the second request is in the one from 2000.
    requests = [(0, 10, 9), (100, 10, 1)]
    ahead = run(requests, settings=EngineSettings(64, 100, 4, async_scheduling=True))
    assert run(requests).first_us.tolist() == [1000, 2000]
    assert ahead.first_us.tolist() == [1000, 3000]
    assert ahead.scheduled_us.tolist() == [0, 1000], "when the step before it starts"


def test_a_step_ahead_a_slot_is_free_a_step_later():
    requests = [(0, 10, 2), (0, 10, 1)]
    one_slot = {"max_num_seqs": 1, "max_num_batched_tokens": 100, "block_size": 4}
    assert run(requests, settings=EngineSettings(**one_slot)).first_us.tolist() == [1000, 3000]
    ahead = run(requests, settings=EngineSettings(**one_slot, async_scheduling=True))
    assert ahead.last_us.tolist() == [2000, 3000], "nothing runs between: the empty step takes no time"


@pytest.mark.parametrize(("by_priority", "first_us"), [(False, [1000, 3000, 2000]), (True, [1000, 2000, 3000])])
def test_priority_scheduling_serves_in_the_order_of_arrival(by_priority, first_us):
    # The second request arrives before the third and is queued after it, as a longer prompt takes longer in the API.
    settings = EngineSettings(1, 100, 4, by_priority=by_priority)
    assert run([(0, 10, 1), (20, 10, 1), (10, 10, 1)], settings=settings).first_us.tolist() == first_us


def test_preempted_request_recomputes_its_output():
    """6 blocks of 4: the sixth token of the first request takes the blocks of the second, which has five outputs."""
    found = run([(0, 8, 8), (0, 8, 8)], Steps(per_prompt_token=1.0), EngineSettings(64, 100, 4, num_blocks=6))
    assert found.preemptions == 1
    assert found.first_us.tolist() == [1016, 1016]
    # The first ends after eight steps; one has 16 prompt tokens. Then the second computes its prompt's last block
    # and five outputs again, in one step that gives the sixth, and needs two more.
    assert found.last_us[0] == 8016
    assert found.last_us[1] - 8016 == pytest.approx(3000, abs=20)


@pytest.mark.parametrize(("num_blocks", "first_us"), [(None, 1000.0), (2, 1000.0), (1, None), (0, None)])
def test_a_cache_too_small_for_a_request_never_serves_it(num_blocks, first_us):
    """A prompt of 8 tokens needs 2 blocks of 4; a cache of none is not one without an end."""
    found = run([(0, 8, 1)], settings=EngineSettings(64, 100, 4, num_blocks=num_blocks))
    assert found.first_us.tolist() == pytest.approx([math.nan if first_us is None else first_us], nan_ok=True)


def test_a_prompt_that_is_wholly_cached_computes_its_last_block():
    found = run([(0, 8, 1), (5000, 8, 1)], Steps(per_prompt_token=1.0), prefix=[8, 8])
    assert found.cached_tokens.tolist() == [0, 4]
    assert (found.first_us - found.queued_us).tolist() == [1008, 1004]


def test_without_chunks_a_prompt_waits_until_it_fits():
    settings = EngineSettings(64, 100, 4, chunked_prefill=False)
    assert run([(0, 60, 1), (0, 60, 1)], settings=settings).first_us.tolist() == [1000, 2000]
    assert run([(0, 60, 1), (0, 60, 1)], Steps(1.0)).first_us.tolist() == [1100, 2120]


def test_several_tokens_a_step_shorten_the_decoding():
    found = run([(0, 10, 9)], settings=EngineSettings(64, 100, 4, tokens_per_step=2))
    assert found.last_us[0] - found.first_us[0] == 4000


def test_the_api_delays_the_queue():
    assert run([(0, 10, 1)], admission_us=70.0).first_us.tolist() == [1070]


@pytest.mark.parametrize("seed", range(12))
def test_blocks_that_are_counted_give_the_times_of_blocks_by_number(seed):
    """A prefix that only one request has is shared with nobody, and yet blocks have numbers then."""
    rng = np.random.default_rng(seed)
    count = 120
    at = np.cumsum(rng.exponential(rng.choice([500, 3_000]), count)).astype(int)
    prompt, output = rng.integers(1, 400, count), rng.integers(1, 300, count)
    requests = list(zip(at.tolist(), prompt.tolist(), output.tolist(), strict=True))
    settings = EngineSettings(
        max_num_seqs=int(rng.choice([4, 16])),
        max_num_batched_tokens=int(rng.choice([64, 512])),
        block_size=16,
        num_blocks=60,
        by_priority=bool(seed % 2),
        prefix_caching=seed % 3 > 0,
        async_scheduling=bool(seed // 2 % 2),
        tokens_per_step=(1, 1.7)[seed // 4 % 2],
    )
    counted, numbered = (run(requests, Steps(30.0), settings, prefix=[0] * (count - 1) + [own]) for own in (0, 1))
    assert counted.preemptions == numbered.preemptions > 0
    for name in ("scheduled_us", "first_us", "last_us", "cached_tokens"):
        np.testing.assert_array_equal(getattr(counted, name), getattr(numbered, name))


class Bends:
    """Step times with a bend in their context, as of a roofline, or a jump; it counts how often it is asked."""

    def __init__(self, jump=0.0):
        self.jump, self.asked = jump, 0

    def step(self, batch):
        return float(self.decoding(batch, 1, 0.0)[0])

    def decoding(self, batch, steps, growth):
        self.asked += 1
        each = (batch.context_tokens + growth * np.arange(steps)) / batch.decode_reqs
        level = 500.0 + 10 * batch.waiting
        return level + np.maximum(300.0, 0.7 * each) + self.jump * (each > 700)


def test_decoding_from_a_table_is_that_of_the_model_without_asking_it_again():
    model = Bends()
    tabled = TabledDecoding(model)
    for first in (0.0, 100.0, 1_283.0, 1_900.0, 9_001.0):
        batch = StepBatch(decode_reqs=3, context_tokens=first)
        expected = Bends().decoding(batch, 40, 3.0)
        np.testing.assert_allclose(tabled.decoding(batch, 40, 3.0), expected, rtol=MOST_OFF)
    assert model.asked == 2, "the table, and a longer one"
    assert tabled.step(batch) == model.step(batch)


def test_a_model_that_jumps_is_not_read_from_a_table_and_a_queue_has_its_own():
    batch = StepBatch(decode_reqs=2, context_tokens=1_390.0, waiting=4)
    jumps = TabledDecoding(Bends(jump=200.0))
    np.testing.assert_array_equal(jumps.decoding(batch, 30, 2.0), Bends(jump=200.0).decoding(batch, 30, 2.0))
    queues = TabledDecoding(Bends(), reads_waiting=True)
    for waiting in (4, 0):
        queued = batch._replace(waiting=waiting)
        np.testing.assert_allclose(queues.decoding(queued, 30, 2.0), Bends().decoding(queued, 30, 2.0), rtol=MOST_OFF)
