"""The queue a request meets on arrival, by hand: 16 tokens to a block, 100 blocks, 8 slots, 2,048 tokens a step."""

from __future__ import annotations

import pytest

AHEAD = ("waiting_ahead", "tokens_ahead", "blocks_ahead", "outputs_ahead")
RUNNING = ("running_reqs", "running_remaining_tokens", "kv_blocks_free")
ROOM = ("free_slots", "free_tokens", "block_demand")


def _of(found, columns):
    return tuple(found[name] for name in columns)


def test_before_the_first_step_everything_is_free(engine_tables, story):
    found = engine_tables((story.served("a", 1, 3, prompt=100),)).queue()["a"]
    assert _of(found, (*AHEAD, *RUNNING)) == (0, 0, 0, 0, 0, 0, 100)
    assert _of(found, ROOM) == (8, 2048, 7)


def test_those_queued_before_and_not_yet_scheduled_wait_ahead(engine_tables, story):
    story.served("a", 1, 9, prompt=100)
    story.request("b", ("QUEUED", 2), ("SCHEDULED", 6), ("FINISHED", 6, {"done": 1}), prompt=20, max_tokens=5)
    story.request("c", ("QUEUED", 3), ("SCHEDULED", 6), ("FINISHED", 6, {"done": 1}), prompt=33, max_tokens=7)
    story.request("d", ("QUEUED", 4), ("SCHEDULED", 7), ("FINISHED", 7, {"done": 1}), prompt=50)
    found = engine_tables((story,)).queue()["d"]
    # Blocks: ceil(20 / 16) + ceil(33 / 16) = 2 + 3, and ceil(50 / 16) = 4 of its own.
    assert _of(found, AHEAD) == (2, 53, 5, 12)
    assert found["block_demand"] == 5 + 4
    assert found["token_steps_ahead"] == 5 * (20 + 5 / 2) + 7 * (33 + 7 / 2)


def test_requests_drained_at_once_wait_in_their_order(engine_tables, story):
    story.served("a", 1, 9)
    for name, at_us in (("b", 29_950), ("c", 29_952)):
        queued = ("QUEUED", 2, {"at_us": at_us})
        story.request(name, queued, ("SCHEDULED", 3), ("FINISHED", 3, {"done": 1}), prompt=10)
    queue = engine_tables((story,)).queue()
    assert [queue[name]["waiting_ahead"] for name in ("b", "c")] == [0, 1]


def test_running_requests_hold_blocks_and_still_put_out_tokens(engine_tables, story):
    """After step 3: a has put out 3 of 20 tokens and b 2 of 6; they hold ceil(102 / 16) + ceil(41 / 16) blocks."""
    story.served("a", 1, 9, prompt=100).served("b", 2, 5, prompt=40, max_tokens=6)
    story.request("c", ("QUEUED", 3), ("SCHEDULED", 4), ("FINISHED", 4, {"done": 1}), prompt=10)
    found = engine_tables((story,)).queue()["c"]
    assert _of(found, RUNNING) == (2, (20 - 3) + (6 - 2), 100 - 7 - 3)
    assert _of(found, ROOM) == (8 - 2, 2048 - 2, 1)


def test_a_request_finished_in_the_step_before_is_gone(engine_tables, story):
    """QUEUED comes after the update of step 3, in which b ended and gave back its ceil(41 / 16) blocks."""
    story.served("a", 1, 9, prompt=100).served("b", 2, 3, prompt=40)
    story.request("c", ("QUEUED", 3), ("SCHEDULED", 4), ("FINISHED", 4, {"done": 1}), prompt=10)
    assert _of(engine_tables((story,)).queue()["c"], RUNNING) == (1, 20 - 3, 100 - 7)


def test_a_request_aborted_in_its_prompt_frees_its_blocks(engine_tables, story):
    """100 of 900 tokens computed hold 7 blocks, not 57."""
    story.served("a", 1, 9, prompt=10)
    story.request("b", ("QUEUED", 1), ("SCHEDULED", 2), ("FINISHED", 2, {"finish_status": "aborted"}), prompt=900)
    story.request("c", ("QUEUED", 2), ("SCHEDULED", 4), ("FINISHED", 4, {"done": 1}), prompt=10)
    table = engine_tables((story,))
    assert table.rows("kv_blocks_used", "kv_blocks_freed", max_num_batched_tokens=101)[2] == (1 + 7, 7)
    assert table.queue(max_num_batched_tokens=101)["c"]["kv_blocks_free"] == 99


def test_a_preempted_request_waits_with_its_output_to_recompute(engine_tables, story):
    story.preempted("a", 4, 7, 8, out=3, total=5)
    story.request("b", ("QUEUED", 5), ("SCHEDULED", 8), ("FINISHED", 8, {"done": 1}), prompt=10)
    found = engine_tables((story,)).queue()["b"]
    assert _of(found, AHEAD) == (1, 103, 7, 17)
    assert _of(found, RUNNING) == (0, 0, 100)


def test_an_abort_while_waiting_leaves_the_queue(engine_tables, story):
    story.served("a", 1, 9)
    story.request("b", ("QUEUED", 1), ("FINISHED", 3, {"finish_status": "aborted"}), prompt=50)
    for name, step in (("c", 2), ("d", 4)):
        story.request(name, ("QUEUED", step), ("SCHEDULED", step + 1), ("FINISHED", step + 1, {"done": 1}))
    queue = engine_tables((story,)).queue()
    assert [queue[name]["waiting_ahead"] for name in ("c", "d")] == [1, 0]


def test_a_request_that_was_never_queued_cannot_leave_the_queue(engine_tables, story):
    """The server's SDK drops the first events of a long span."""
    story.request("a", ("SCHEDULED", 2), ("FINISHED", 9, {"done": 8}))
    for name, step in (("b", 1), ("c", 3)):
        story.request(name, ("QUEUED", step), ("SCHEDULED", step + 1), ("FINISHED", step + 1, {"done": 1}))
    assert _of(engine_tables((story,)).queue()["c"], AHEAD) == (0, 0, 0, 0)


def test_no_more_blocks_are_freed_than_are_used(engine_tables, story):
    """Two requests of 7 blocks each share 6: when both end, 8 are free, and not 14."""
    story.served("a", 1, 3).served("b", 1, 3)
    story.summary(3, kv_blocks_total=100, kv_blocks_free=92)
    story.request("c", ("QUEUED", 3), ("SCHEDULED", 4), ("FINISHED", 4, {"done": 1}))
    assert engine_tables((story,)).queue()["c"]["kv_blocks_free"] == 100


def test_free_blocks_are_never_negative(engine_tables, story):
    """Three requests of 7 blocks each, which share many, in a cache of 15."""
    for name in "abc":
        story.served(name, 1, 5)
    story.request("d", ("QUEUED", 3), ("SCHEDULED", 6), ("FINISHED", 6, {"done": 1}))
    assert engine_tables((story,)).queue(num_blocks=15)["d"]["kv_blocks_free"] == 0


def test_unfinished_prompts_take_tokens_of_the_next_step(engine_tables, story):
    """After step 2 a has 300 - 2 * 128 = 44 tokens to go; with its slot that leaves 128 - 1 - 44 of the budget."""
    story.served("a", 1, 6, prompt=300, prefilled=3)
    story.request("b", ("QUEUED", 2), ("SCHEDULED", 3), ("FINISHED", 3, {"done": 1}), prompt=10)
    found = engine_tables((story,)).queue(max_num_batched_tokens=128)["b"]
    assert _of(found, ("free_tokens", "running_remaining_tokens")) == (128 - 1 - 44, 20)


def test_free_blocks_come_from_a_summary(engine_tables, story):
    story.served("a", 1, 9).summary(3, kv_blocks_total=100, kv_blocks_free=42)
    story.request("b", ("QUEUED", 3), ("SCHEDULED", 4), ("FINISHED", 4, {"done": 1}))
    assert engine_tables((story,)).queue()["b"]["kv_blocks_free"] == 42


@pytest.mark.parametrize(
    ("limit", "column"), [("max_num_seqs", "free_slots"), ("max_num_batched_tokens", "free_tokens")]
)
def test_room_is_unknown_where_the_limit_is(engine_tables, story, limit, column):
    assert engine_tables((story.served("a", 1, 3),)).queue(**{limit: None})["a"][column] is None


def test_free_blocks_are_null_where_the_total_is_unknown(engine_tables, story):
    found = engine_tables((story.served("a", 1, 3),)).queue(num_blocks=None)["a"]
    assert _of(found, ("kv_blocks_free", "kv_blocks_total")) == (None, None)


def test_blocks_of_another_size(engine_tables, story):
    assert engine_tables((story.served("a", 1, 3, prompt=100),)).queue(block_size=32)["a"]["block_demand"] == 4


def test_engines_have_separate_queues(engine_tables, new_story):
    one = new_story(server="one").request("a", ("QUEUED", 0), ("SCHEDULED", 5), ("FINISHED", 5, {"done": 1}))
    two = new_story(server="two").served("b", 1, 3, prompt=10)
    again = new_story(server="two", epoch=1, begin_us=900_000).served("c", 1, 3, prompt=10)
    queue = engine_tables((one, two, again)).queue()
    assert {name: queue[name]["waiting_ahead"] for name in "abc"} == {"a": 0, "b": 0, "c": 0}
    assert queue["c"]["running_reqs"] == 0


def test_with_scheduling_ahead_the_last_step_is_still_under_way(engine_tables, new_story):
    """QUEUED after schedule() of step 40: the outputs of 39 are in, those of 40 are not; who ends with 40 still
    runs."""
    story = new_story(lag=1)
    for number in range(24):
        story.served(f"r{number}", 1 + 4 * number, 4 + 4 * number, prompt=100, max_tokens=4)
    for name, step in (("x", 40), ("y", 41)):
        story.request(
            name,
            ("QUEUED", step, {"at_us": step * 10_000 + 9_950}),
            ("FINISHED", step + 1, {"finish_status": "aborted"}),
        )
    queue = engine_tables((story,)).queue()
    assert _of(queue["x"], RUNNING) == (1, 4 - 3, 100 - 7)
    assert _of(queue["y"], RUNNING) == (1, 4 - 0, 100 - 7)
