"""The composition of a step, worked out from only the journeys: each test has one law, with its arithmetic.

A batch is (prefill requests, prefill tokens, their context, decode requests, decode tokens, their context).
"""

from __future__ import annotations

import pytest

IDLE = (0, 0, 0, 0, 0, 0)


def test_an_undisturbed_request_has_a_token_per_step(engine_tables, story):
    story.served("a", 1, 4, prompt=100)
    assert engine_tables((story,)).batches() == {
        1: (1, 100, 0, 0, 0, 0),
        2: (0, 0, 0, 1, 1, 100),
        3: (0, 0, 0, 1, 1, 101),
        4: (0, 0, 0, 1, 1, 102),
    }


def test_a_batch_is_the_sum_of_its_requests(engine_tables, story):
    story.served("a", 1, 4, prompt=100).served("b", 2, 3, prompt=30).served("c", 3, 3, prompt=7)
    assert engine_tables((story,)).batches() == {
        1: (1, 100, 0, 0, 0, 0),
        2: (1, 30, 0, 1, 1, 100),
        3: (1, 7, 0, 2, 2, 101 + 30),
        4: (0, 0, 0, 1, 1, 102),
    }


def test_long_prompts_are_computed_in_chunks(engine_tables, story):
    story.served("a", 1, 4, prompt=20).served("b", 2, 4, prompt=300, prefilled=4)
    assert engine_tables((story,)).batches(max_num_batched_tokens=128) == {
        1: (1, 20, 0, 0, 0, 0),
        2: (1, 127, 0, 1, 1, 20),
        3: (1, 127, 127, 1, 1, 21),
        4: (1, 300 - 254, 254, 1, 1, 22),
    }


def test_the_second_chunked_prompt_gets_the_rest_of_the_budget(engine_tables, story):
    story.served("a", 1, 2, prompt=150, prefilled=2).served("b", 2, 3, prompt=120, prefilled=3)
    assert engine_tables((story,)).batches(max_num_batched_tokens=100) == {
        1: (1, 100, 0, 0, 0, 0),
        2: (2, 50 + 50, 100, 0, 0, 0),
        3: (1, 70, 50, 0, 0, 0),
    }


def test_prompts_share_a_step_with_a_last_chunk(engine_tables, story):
    story.served("a", 1, 2, prompt=150, prefilled=2).served("b", 2, 2, prompt=40)
    assert engine_tables((story,)).batches(max_num_batched_tokens=100)[2] == (2, 50 + 40, 100, 0, 0, 0)


def test_without_a_budget_chunks_are_even(engine_tables, story):
    story.served("a", 1, 3, prompt=300, prefilled=3)
    batches = engine_tables((story,)).batches(max_num_batched_tokens=None)
    assert [row[:3] for row in batches.values()] == [(1, 100, 0), (1, 100, 100), (1, 100, 200)]


def test_a_preempted_decode_is_computed_again(engine_tables, story):
    """Three tokens are out when step 4 takes its blocks; from step 6 on 100 + 3 tokens are computed again."""
    story.preempted("a", 4, 6, 8, out=3, total=6)
    assert engine_tables((story,)).batches() == {
        1: (1, 100, 0, 0, 0, 0),
        2: (0, 0, 0, 1, 1, 100),
        3: (0, 0, 0, 1, 1, 101),
        4: IDLE,
        5: IDLE,
        6: (0, 0, 0, 1, 103, 0),
        7: (0, 0, 0, 1, 1, 103),
        8: (0, 0, 0, 1, 1, 104),
    }
    assert engine_tables((story,)).rows("running_depth", "waiting_depth", "waiting_tokens", "num_preempted") == {
        **dict.fromkeys((1, 2, 3), (1, 0, 0, 0)),
        4: (0, 1, 103, 1),
        5: (0, 1, 103, 0),
        **dict.fromkeys((6, 7, 8), (1, 0, 0, 0)),
    }


def test_a_recomputed_request_is_chunked_like_a_prompt(engine_tables, story):
    """20 + 3 tokens again, 16 at most in a step: the fourth token comes out of step 7."""
    story.preempted("a", 5, 6, 8, out=3, total=5, prefilled=2, prompt=20)
    batches = engine_tables((story,)).batches(max_num_batched_tokens=16)
    assert [batches[step] for step in (1, 2)] == [(1, 16, 0, 0, 0, 0), (1, 4, 16, 0, 0, 0)]
    assert [batches[step] for step in (6, 7, 8)] == [
        (0, 0, 0, 1, 16, 0),
        (0, 0, 0, 1, 7, 16),
        (0, 0, 0, 1, 1, 23),
    ]


def test_a_prompt_preempted_in_prefill_starts_again_as_prefill(engine_tables, story):
    story.request(
        "a",
        ("QUEUED", 0),
        ("SCHEDULED", 1),
        ("PREEMPTED", 3),
        ("SCHEDULED", 5, {"schedule_kind": "RESUME"}),
        ("FIRST_TOKEN", 7),
        ("FINISHED", 8, {"done": 2}),
        prompt=300,
    )
    assert engine_tables((story,)).batches(max_num_batched_tokens=128) == {
        1: (1, 128, 0, 0, 0, 0),
        2: (1, 128, 128, 0, 0, 0),
        3: IDLE,
        4: IDLE,
        5: (1, 128, 0, 0, 0, 0),
        6: (1, 128, 128, 0, 0, 0),
        7: (1, 44, 256, 0, 0, 0),
        8: (0, 0, 0, 1, 1, 300),
    }


def test_preempted_in_the_step_after_it_was_scheduled(engine_tables, story):
    story.preempted("a", 2, 3, 3, out=1, total=2)
    assert engine_tables((story,)).batches() == {1: (1, 100, 0, 0, 0, 0), 2: IDLE, 3: (0, 0, 0, 1, 101, 0)}


def test_an_abort_while_waiting_is_in_no_batch(engine_tables, story):
    story.served("a", 1, 5)
    story.request("b", ("QUEUED", 1), ("FINISHED", 3, {"finish_status": "aborted"}), prompt=50)
    table = engine_tables((story,))
    assert [row[0] for row in table.batches().values()] == [1, 0, 0, 0, 0]
    assert table.rows("running_depth", "waiting_depth", "waiting_tokens") == {
        1: (1, 0, 0),
        2: (1, 1, 50),
        3: (1, 1, 50),
        4: (1, 0, 0),
        5: (1, 0, 0),
    }


def test_an_abort_straight_after_queued_waits_in_no_step(engine_tables, story):
    story.served("a", 1, 3)
    story.request("b", ("QUEUED", 1), ("FINISHED", 1, {"finish_status": "aborted", "at_us": 19_960}))
    assert [row[0] for row in engine_tables((story,)).rows("waiting_depth").values()] == [0, 0, 0]


def test_an_abort_in_decode_wastes_its_last_step(engine_tables, story):
    """Aborted while step 4 ran: the batch of step 4 held it, its fourth token is thrown away."""
    story.served("a", 1, 6, prompt=10).request(
        "b",
        ("QUEUED", 0),
        ("SCHEDULED", 1),
        ("FIRST_TOKEN", 1),
        ("FINISHED", 4, {"done": 3, "finish_status": "aborted"}),
    )
    batches = engine_tables((story,)).batches()
    assert [batches[step][3:] for step in (3, 4, 5)] == [(2, 2, 11 + 101), (2, 2, 12 + 102), (1, 1, 13)]


def test_an_abort_in_prefill_ends_its_chunks(engine_tables, story):
    story.served("a", 1, 6, prompt=10).request(
        "b",
        ("QUEUED", 1),
        ("SCHEDULED", 2),
        ("FINISHED", 3, {"finish_status": "aborted"}),
        prompt=300,
    )
    batches = engine_tables((story,)).batches(max_num_batched_tokens=101)
    assert [batches[step][:3] for step in (2, 3, 4)] == [(1, 100, 0), (1, 100, 100), (0, 0, 0)]


def test_a_request_in_flight_at_the_end_decodes_on(engine_tables, story):
    story.request("a", ("QUEUED", 0), ("SCHEDULED", 1), ("FIRST_TOKEN", 1)).served("b", 3, 4, prompt=5)
    assert engine_tables((story,)).batches() == {
        1: (1, 100, 0, 0, 0, 0),
        2: (0, 0, 0, 1, 1, 100),
        3: (1, 5, 0, 1, 1, 101),
        4: (0, 0, 0, 2, 2, 102 + 5),
    }


def test_a_request_in_flight_in_its_prompt_computes_it_once(engine_tables, story):
    story.request("a", ("QUEUED", 0), ("SCHEDULED", 1), prompt=250).served("b", 9, 40, prompt=5)
    batches = engine_tables((story,)).batches(max_num_batched_tokens=100)
    assert [row[1] for row in batches.values()] == [100, 100, 50, *[0] * 5, 5, *[0] * 31]


def test_a_snapshot_shows_the_prefix_hits(engine_tables, story):
    story.served("a", 1, 2, prompt=100)
    story.snapshot(1, "a", num_prompt_tokens=100, effective_prompt_len=52)
    assert engine_tables((story,)).batches() == {1: (1, 52, 48, 0, 0, 0), 2: (0, 0, 0, 1, 1, 100)}


def test_a_hit_does_not_hold_for_a_prompt_computed_again(engine_tables, story):
    story.preempted("a", 2, 3, 3, out=1, total=2)
    story.snapshot(1, "a", num_prompt_tokens=100, effective_prompt_len=52)
    batches = engine_tables((story,)).batches()
    assert (batches[1][:3], batches[3][3:]) == ((1, 52, 48), (1, 101, 0))


def test_an_event_lost_between_two_schedulings_was_a_preemption(engine_tables, story):
    story.request(
        "a",
        ("QUEUED", 0),
        ("SCHEDULED", 1),
        ("FIRST_TOKEN", 1),
        ("SCHEDULED", 4, {"done": 2, "schedule_kind": "RESUME"}),
        ("FINISHED", 5, {"done": 4}),
    )
    assert engine_tables((story,)).batches()[4] == (0, 0, 0, 1, 102, 0)
    assert engine_tables((story,)).rows("running_depth")[4] == (1,)


def test_events_of_one_stamp_are_taken_in_the_order_of_a_life(engine_tables, story):
    at = {"at_us": 20_000}
    story.request("a", ("FINISHED", 2, {"done": 1, **at}), ("QUEUED", 1, at), ("SCHEDULED", 2, at))
    assert engine_tables((story,)).rows("running_depth", "waiting_depth") == {2: (1, 0)}


def test_a_request_queued_before_the_first_step_waits_from_it(engine_tables, story):
    story.served("a", 5, 6)
    story.request("b", ("QUEUED", 3), ("SCHEDULED", 6), ("FIRST_TOKEN", 6), ("FINISHED", 6, {"done": 1}))
    assert engine_tables((story,)).rows("waiting_depth") == {5: (1,), 6: (0,)}


def test_tokens_take_whole_blocks(engine_tables, story):
    """20 tokens in step 1, then one more each: 32 fill two blocks, the 33rd takes a third in step 14."""
    story.served("a", 1, 15, prompt=20)
    used = [row[0] for row in engine_tables((story,)).rows("kv_blocks_used").values()]
    assert used == [2] * 13 + [3] * 2


def test_chunks_take_their_blocks_as_they_come_and_keep_them(engine_tables, story):
    """100 of 250 tokens a step: 7, 13 and 16 blocks of 16; a step that gives it nothing leaves it what it has."""
    story.served("a", 1, 1, prompt=100).served("b", 2, 5, prompt=250, prefilled=5)
    story.served("c", 3, 3, prompt=100)
    used = [row[0] for row in engine_tables((story,)).rows("kv_blocks_used", max_num_batched_tokens=100).values()]
    assert used == [7, 7, 7 + 7, 13, 16]


@pytest.mark.parametrize("budget", [2048, None])
def test_no_requests_no_steps(engine_tables, story, budget):
    assert engine_tables((story,)).timeline(max_num_batched_tokens=budget).height == 0
