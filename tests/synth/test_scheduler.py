"""The scheduler against the rules of engine v1, on cases small enough to follow by hand."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracefit.synth import Request, Scheduler, SynthOptions


def _decoding(scheduler, name="C", *, prompt_tokens=7, output_tokens=100):
    """Add a request and run it until it decodes."""
    request = Request(name, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    scheduler.add(request)
    while not request.done_tokens:
        _step(scheduler)
    return request


def _step(scheduler):
    plan = scheduler.schedule()
    scheduler.launch(plan)
    scheduler.update(plan)
    return plan


def _tokens(plan):
    return {share.request.request_id: share.tokens for share in plan.scheduled}


def _worked_example(*, chunked_prefill):
    # C holds one block, no request can use the null block: 20 are free.
    config = SynthOptions(max_num_seqs=8, max_num_batched_tokens=64, num_blocks=22, chunked_prefill=chunked_prefill)
    scheduler = Scheduler(config)
    carried = _decoding(scheduler)
    assert (carried.blocks, scheduler.pool.free) == (1, 20)
    scheduler.add(Request("A", prompt_tokens=50, output_tokens=10))
    scheduler.add(Request("B", prompt_tokens=30, output_tokens=10))
    return scheduler, scheduler.schedule()


def test_worked_example_without_chunks_lets_b_wait():
    scheduler, plan = _worked_example(chunked_prefill=False)
    assert _tokens(plan) == {"C": 1, "A": 50}
    assert plan.composition.scheduled_tokens == 51
    assert [request.request_id for request in scheduler.waiting] == ["B"]
    assert {request.request_id: request.blocks for request in scheduler.running} == {"C": 1, "A": 4}
    assert scheduler.pool.free == 16


def test_worked_example_with_chunks_gives_b_the_rest():
    scheduler, plan = _worked_example(chunked_prefill=True)
    assert _tokens(plan) == {"C": 1, "A": 50, "B": 13}
    assert not scheduler.waiting
    scheduler.launch(plan)
    scheduler.update(plan)
    # A chunk yields no token; the rest of B follows, behind the tokens of those before it.
    plan = scheduler.schedule()
    assert _tokens(plan) == {"C": 1, "A": 1, "B": 17}
    assert (plan.composition.num_prefill_reqs, plan.composition.num_decode_reqs) == (1, 2)


def test_composition_counts_context_and_attention_pairs():
    scheduler, plan = _worked_example(chunked_prefill=True)
    assert (plan.composition.prefill_tokens, plan.composition.decode_tokens) == (63, 1)
    assert (plan.composition.context_tokens, plan.composition.prefill_context_tokens) == (7, 0)
    assert plan.composition.attention_pairs == 50 * 51 // 2 + 13 * 14 // 2
    scheduler.launch(plan)
    scheduler.update(plan)
    batch = scheduler.schedule().composition
    assert (batch.context_tokens, batch.prefill_context_tokens) == (8 + 50, 13)
    assert batch.attention_pairs == 17 * 13 + 17 * 18 // 2


def test_slots_limit_the_running():
    scheduler = Scheduler(SynthOptions(max_num_seqs=2))
    for name in "ABC":
        scheduler.add(Request(name, prompt_tokens=4, output_tokens=2))
    assert _tokens(_step(scheduler)) == {"A": 4, "B": 4}
    assert _tokens(_step(scheduler)) == {"A": 1, "B": 1}
    assert _tokens(_step(scheduler)) == {"C": 4}


def test_waiting_is_first_come_first_served():
    scheduler = Scheduler(SynthOptions(num_blocks=6, max_num_batched_tokens=200))
    _decoding(scheduler, prompt_tokens=20)
    scheduler.add(Request("long", prompt_tokens=60, output_tokens=2))
    scheduler.add(Request("short", prompt_tokens=4, output_tokens=2))
    assert _tokens(_step(scheduler)) == {"C": 1}


def _preempting():
    """Return a scheduler whose next step needs a block more than there are, and its three requests."""
    scheduler = Scheduler(SynthOptions(num_blocks=4, max_num_batched_tokens=40))
    requests = [Request(name, prompt_tokens=15, output_tokens=30) for name in "ABC"]
    scheduler.add(requests[0])
    _step(scheduler)
    for request in requests[1:]:
        scheduler.add(request)
    _step(scheduler)
    assert [request.computed_tokens for request in requests] == [16, 15, 15]
    assert scheduler.pool.free == 0
    return scheduler, requests


def test_the_last_running_request_is_preempted_and_queued_first():
    scheduler, (_, _, last) = _preempting()
    newcomer = Request("D", prompt_tokens=1, output_tokens=1)
    scheduler.add(newcomer)
    plan = scheduler.schedule()
    assert plan.preempted == [last]
    assert _tokens(plan) == {"A": 1, "B": 1}
    assert list(scheduler.waiting) == [last, newcomer]
    assert (last.blocks, last.computed_tokens, last.num_preemptions) == (0, 0, 1)
    assert (last.done_tokens, last.prefill_done_tokens) == (1, 15)


def test_no_one_is_admitted_in_a_step_that_preempts():
    scheduler = Scheduler(SynthOptions(num_blocks=5, max_num_batched_tokens=18))
    for name, prompt, done, blocks in (("A", 15, 2, 1), ("B", 15, 1, 1), ("C", 20, 1, 2)):
        request = Request(name, prompt, 30, done_tokens=done, blocks=blocks)
        request.computed_tokens = prompt + done - 1
        scheduler.running.append(request)
        scheduler.pool.take(blocks)
    # C gives two blocks back and A takes one; a first chunk of C again would fit into the other.
    plan = scheduler.schedule()
    assert [request.request_id for request in plan.preempted] == ["C"]
    assert scheduler.pool.free == 1
    assert _tokens(plan) == {"A": 1, "B": 1}
    assert _tokens(scheduler.schedule())["C"] == 16


def test_resumed_request_recomputes_prompt_and_output():
    scheduler, (first, second, last) = _preempting()
    _step(scheduler)
    scheduler.abort(first)
    scheduler.abort(second)
    plan = scheduler.schedule()
    assert plan.resumed == [last]
    assert not plan.first
    assert _tokens(plan) == {"C": 16}  # 15 prompt tokens and the one it had generated
    batch = plan.composition
    assert (batch.num_prefill_reqs, batch.num_decode_reqs) == (0, 1)
    assert (batch.decode_tokens, batch.recompute_tokens) == (16, 15)
    scheduler.launch(plan)
    scheduler.update(plan)
    assert last.done_tokens == 2


def test_the_last_of_the_running_preempts_itself():
    scheduler = Scheduler(SynthOptions(num_blocks=4, max_num_batched_tokens=40))
    scheduler.add(Request("A", prompt_tokens=20, output_tokens=30))
    last = Request("B", prompt_tokens=16, output_tokens=30)
    scheduler.add(last)
    _step(scheduler)
    plan = scheduler.schedule()
    assert plan.preempted == [last]
    assert _tokens(plan) == {"A": 1}
    assert list(scheduler.waiting) == [last]


def test_an_empty_step_follows_the_end_of_the_last_request():
    scheduler = Scheduler(SynthOptions())
    assert not scheduler.has_work
    scheduler.add(Request("A", prompt_tokens=3, output_tokens=1))
    _step(scheduler)
    assert scheduler.has_work
    plan = _step(scheduler)
    assert (plan.step_id, plan.num_finished, plan.scheduled) == (2, 1, [])
    assert not scheduler.has_work


def test_an_abort_during_the_step_throws_its_token_away():
    scheduler = Scheduler(SynthOptions())
    request = _decoding(scheduler)
    plan = scheduler.schedule()
    scheduler.launch(plan)
    assert scheduler.abort(request)
    outcome = scheduler.update(plan)
    assert (request.done_tokens, outcome.finished) == (1, [])
    assert scheduler.pool.free == scheduler.pool.total
    assert not scheduler.abort(request)


def _prefixed(name, *, prompt_tokens=50, prefix=0):
    return Request(name, prompt_tokens=prompt_tokens, output_tokens=5, prefix=prefix)


def test_prefix_hit_skips_whole_blocks_and_shares_them():
    scheduler = Scheduler(SynthOptions(num_blocks=21, prefix_fraction=1.0, prefix_tokens=32))
    scheduler.add(_prefixed("A"))
    _step(scheduler)
    hit, other = _prefixed("B"), _prefixed("C", prefix=1)
    scheduler.add(hit)
    scheduler.add(other)
    plan = scheduler.schedule()
    assert _tokens(plan) == {"A": 1, "B": 18, "C": 50}
    assert (hit.cached_tokens, hit.blocks, other.cached_tokens) == (32, 4, 0)
    # A: 4 blocks. B: 2 shared with A, 2 of its own. C: 4.
    assert scheduler.pool.free == 20 - 4 - 2 - 4


def test_prefix_stays_cached_until_its_blocks_are_needed():
    scheduler = Scheduler(SynthOptions(num_blocks=6, prefix_fraction=1.0, prefix_tokens=32))
    first = _prefixed("A", prompt_tokens=40)
    scheduler.add(first)
    _step(scheduler)
    scheduler.abort(first)
    assert scheduler.pool.free == 5
    assert scheduler.pool.is_cached(0)
    _decoding(scheduler, prompt_tokens=60)
    assert not scheduler.pool.is_cached(0)
    assert scheduler.pool.free == 1


def test_a_hit_does_not_count_its_prefix_as_free():
    scheduler = Scheduler(SynthOptions(num_blocks=6, prefix_fraction=1.0, prefix_tokens=32))
    first = _prefixed("A", prompt_tokens=40)
    scheduler.add(first)
    _step(scheduler)
    scheduler.abort(first)
    # 32 cached and 50 more need 4 blocks beside the 2 cached ones: one too many.
    scheduler.add(_prefixed("B", prompt_tokens=82))
    assert not scheduler.schedule().scheduled


@st.composite
def _histories(draw):
    chunked = draw(st.booleans())
    block_size = draw(st.sampled_from([1, 4, 16]))
    config = SynthOptions(
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.integers(8, 80)),
        num_blocks=draw(st.integers(6, 40)),
        block_size=block_size,
        chunked_prefill=chunked,
        prefix_fraction=1.0,
        prefix_tokens=block_size * draw(st.integers(0, 2)),
    )
    longest = config.longest_sequence_tokens
    sizes = st.tuples(st.integers(1, longest), st.integers(1, longest), st.integers(-1, 1), st.integers(0, 12))
    return config, draw(st.lists(sizes, min_size=1, max_size=12)), draw(st.integers(0, 5))


def _request(config, name, size):
    prompt, output, prefix, _ = size
    longest = config.longest_sequence_tokens
    prompt = min(prompt, longest - 1)
    # Without prefix caching, or too short for a prefix and a token of its own, it shares nothing.
    if not config.prefix_tokens or prompt <= config.prefix_tokens:
        prefix = -1
    return Request(name, prompt_tokens=prompt, output_tokens=min(output, longest - prompt), prefix=prefix)


def _check_blocks(scheduler, config):
    pool, size = scheduler.pool, config.block_size
    prefix_blocks = config.prefix_tokens // size
    own = sum(request.blocks - request.holds_prefix * prefix_blocks for request in scheduler.running)
    shared = {request.prefix for request in scheduler.running if request.holds_prefix}
    assert 0 <= pool.free == pool.total - own - len(shared) * prefix_blocks
    for request in scheduler.running:
        assert request.blocks * size >= request.computed_tokens > (request.blocks - 1) * size
    assert not any(request.blocks for request in scheduler.waiting)


def _check_plan(scheduler, plan, config):
    assert plan.composition.scheduled_tokens <= config.max_num_batched_tokens
    assert len(scheduler.running) <= config.max_num_seqs
    assert all(share.tokens > 0 for share in plan.scheduled)
    if plan.preempted:
        assert not plan.first
        assert not plan.resumed


@given(_histories())
def test_blocks_are_never_lost_and_everybody_ends(history):
    config, sizes, abort_after = history
    scheduler = Scheduler(config)
    requests = [_request(config, f"r{i}", size) for i, size in enumerate(sizes)]
    for number in count():
        for request, size in zip(requests, sizes, strict=True):
            if size[3] == number:
                scheduler.add(request)
        plan = scheduler.schedule()
        _check_plan(scheduler, plan, config)
        scheduler.launch(plan)
        _check_blocks(scheduler, config)
        scheduler.update(plan)
        if number == 12 + abort_after and requests[0].finish_status is None:
            scheduler.abort(requests[0])
        if number > 12 and not scheduler.has_work:
            break
        assert number < 20_000
    assert all(request.finish_status for request in requests)
    assert all(request.done_tokens == request.output_tokens for request in requests[1:])
    assert scheduler.pool.free == scheduler.pool.total


@pytest.mark.parametrize("chunked", [True, False])
def test_longest_sequence_fits_cache_and_budget(chunked):
    config = SynthOptions(num_blocks=11, max_num_batched_tokens=64, chunked_prefill=chunked)
    assert config.longest_sequence_tokens == (160 if chunked else 64)
