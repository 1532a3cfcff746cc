"""Requests through BLIS's queue, scheduler and cache, by hand: a step is 1,000 us, and what its requests add."""

from __future__ import annotations

import numpy as np
import pytest

from tracefit.consumers.blis_replay import StepRates, replay_as_blis
from tracefit.replay.engine import EngineSettings

FLAT = StepRates(1000.0, 0.0, 0.0, 0.0, 0.0, 0.0)
WIDE = EngineSettings(max_num_seqs=64, max_num_batched_tokens=100, block_size=4, num_blocks=None)


def run(requests, rates=FLAT, alpha=(0, 0, 0), limits=WIDE):
    arrival, prompt, output = (np.array(column, dtype=np.int64) for column in zip(*requests, strict=True))
    return replay_as_blis(arrival, prompt, output, rates, alpha, limits)


def test_one_request_is_a_prefill_and_a_step_per_further_token():
    replayed = run([(500, 10, 3)])

    assert (replayed.ttft[0], replayed.decode[0], replayed.e2e[0]) == (1000, 2000, 3000)


def test_alpha_delays_the_queue_the_client_and_each_token():
    replayed = run([(0, 10, 3)], alpha=(70, 500, 9))

    assert replayed.ttft[0] == 70 + 1000 + 9
    assert replayed.decode[0] == 2 * (1000 + 9)
    assert replayed.e2e[0] == replayed.ttft[0] + replayed.decode[0] + 500


def test_a_request_waits_for_the_step_in_progress_and_for_a_slot():
    # The first runs from 0 to 3000. The second is there at 100, its prefill is the step from 1000.
    assert run([(0, 10, 3), (100, 10, 1)]).ttft.tolist() == [1000, 1900]
    one_slot = EngineSettings(1, 100, 4, None)
    assert run([(0, 10, 3), (100, 10, 1)], limits=one_slot).ttft.tolist() == [1000, 3900]


def test_an_idle_engine_starts_at_once():
    assert run([(0, 10, 1), (50_000, 10, 1)]).ttft.tolist() == [1000, 1000]


def test_step_adds_up_its_requests_and_is_cut_to_whole_us():
    # 2 requests, 30 prompt tokens; pairs: 10·(10 + 5) + 20·(20 + 10) = 750; the second ends with its prompt
    rates = StepRates(100.0, 7.0, 2.0, 0.5, 11.0, 0.25)
    replayed = run([(0, 10, 2), (0, 20, 1)], rates)
    first = 100 + 2 * 7 + 30 * 2 + 750 * 0.5
    assert replayed.ttft.tolist() == [int(first)] * 2
    assert replayed.decode[0] == int(100 + 7 + 11 + 0.25 * 10), "one decodes, 10 tokens in its cache"


def test_a_long_prompt_is_computed_in_chunks_of_the_budget():
    assert run([(0, 250, 1)]).ttft[0] == 3000
    rates = StepRates(0.0, 0.0, 1.0, 0.0, 0.0, 0.0)
    replayed = run([(0, 10, 9), (0, 250, 1)], rates)
    assert replayed.ttft[0] == 100, "90 tokens of the second share its step"
    assert replayed.ttft[1] == 100 + 99 + 61


def test_the_last_running_request_is_preempted():
    """6 blocks of 4: two prompts of 8 take 4, their second tokens the others; the sixth token of the first finds
    none."""
    replayed = run([(0, 8, 8), (0, 8, 8)], limits=EngineSettings(64, 100, 4, 6))

    assert replayed.preemptions == 1
    assert replayed.e2e[0] == 8000, "it lost nothing"
    # Preempted in the step from 5000; that of 6000 finds its prompt in the cache, and all 8 tokens come again.
    assert (replayed.ttft[1], replayed.decode[1]) == (7000, 7000)


def test_request_larger_than_the_cache_has_no_latency():
    replayed = run([(0, 100, 1), (10, 4, 1)], limits=EngineSettings(64, 100, 4, 6))

    assert np.isnan(replayed.e2e[0])


@pytest.mark.parametrize("blocks", [None, 10_000])
def test_blocks_that_never_run_out_change_nothing(blocks):
    requests = [(i * 300, 5 + i % 40, 1 + i % 17) for i in range(200)]
    replayed = run(requests, limits=EngineSettings(8, 64, 4, blocks))

    assert replayed.preemptions == 0
    assert replayed.e2e.sum() == run(requests, limits=EngineSettings(8, 64, 4, None)).e2e.sum()


def test_a_prefix_in_common_is_computed_once():
    """Prompts of 10, the first 8 tokens of two of them the same; 10 us a prompt token."""
    rates = StepRates(1000.0, 0.0, 10.0, 0.0, 0.0, 0.0)
    arrival, prompt, output = (np.array(v, dtype=np.int64) for v in ([0, 5000, 9000], [10] * 3, [1] * 3))
    replayed = replay_as_blis(arrival, prompt, output, rates, (0, 0, 0), WIDE, shared=np.array([8, 8, 0]))

    assert replayed.ttft.tolist() == [1100, 1020, 1100]
