"""Steps from sums over the requests are those of an engine that goes through them."""

from __future__ import annotations

import numpy as np
import pytest

from tracefit.replay.counted import CountedEngine
from tracefit.replay.engine import EngineSettings, ReplayedRequest, ReplayEngine


class _Times:
    """Times that depend on every field of a step; it keeps the steps."""

    def __init__(self):
        self.batches = []

    def step(self, batch):
        self.batches.append(batch)
        of_prompts = 3.7 * batch.prefill_tokens + 7 * batch.prefill_reqs + 1e-5 * batch.prefill_pairs
        return self._of(batch, batch.context_tokens) + of_prompts + 1e-3 * batch.prefill_attention_pairs

    def decoding(self, batch, steps, growth):
        self.batches.append(batch)
        return self._of(batch, batch.context_tokens + growth * np.arange(steps))

    def _of(self, batch, context):
        return 100 + 11.3 * batch.decode_reqs + 0.013 * context + 0.5 * batch.waiting


def _replayed(engine, requests, settings):
    times = _Times()
    sent = [ReplayedRequest(k, *row) for k, row in enumerate(requests)]
    made = engine(times, settings, 10_000, shares_prefixes=False)
    for request in sent:
        made.send(request)
    made.run()
    of_requests = [(r.scheduled_us, r.first_us, r.last_us, r.cached, r.preemptions) for r in sent]
    steps = [(tuple(ends), *rest) for ends, *rest in made.steps]
    return repr(of_requests), steps, times.batches, made.preemptions


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_times_are_those_of_an_engine_that_goes_through_all_requests(is_async, chunked):
    """With memory that is never full, and with memory that runs out after some steps."""
    preempted = []
    for seed in range(16):
        rng = np.random.default_rng(seed)
        settings = EngineSettings(
            max_num_seqs=int(rng.integers(1, 12)),
            max_num_batched_tokens=int(rng.choice([16, 40, 200])) if chunked else 200,
            block_size=int(rng.choice([1, 8, 16])),
            num_blocks=None if seed % 2 else int(rng.integers(20, 100)),
            chunked_prefill=chunked,
            prefix_caching=bool(seed % 3),
            async_scheduling=is_async,
        )
        count = int(rng.integers(1, 60))
        arrivals = np.cumsum(rng.exponential(rng.choice([100, 1000, 5000]), count))
        lengths = rng.integers(1, 150, count), rng.integers(1, int(rng.choice([3, 60, 200])), count)
        requests = [*zip(arrivals.tolist(), *(one.tolist() for one in lengths), strict=True)]
        expected = _replayed(ReplayEngine, requests, settings)
        assert _replayed(CountedEngine, requests, settings) == expected
        preempted.append(expected[-1] > 0)
    assert any(preempted)
    assert not all(preempted)


def test_a_step_goes_through_no_requests_while_blocks_last(monkeypatch):
    monkeypatch.setattr(ReplayEngine, "_step", None)
    settings = EngineSettings(max_num_seqs=4, max_num_batched_tokens=64, block_size=16, num_blocks=100)
    requests = [(10.0 * k, 50, 20) for k in range(9)]
    assert len(_replayed(CountedEngine, requests, settings)[1]) > 9
