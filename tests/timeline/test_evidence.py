"""Which evidence stands where there are several kinds of it, and what is kept apart."""

from __future__ import annotations

import json

import polars as pl
import pytest

from together import together
from tracefit.tables import schema
from tracefit.timeline.engines import step_axis

COUNTS = ("num_prefill_reqs", "num_decode_reqs", "prefill_tokens", "decode_tokens")
AGREEMENT = ("journey_agrees", "journey_error_reqs", "journey_error_tokens")


def test_a_summary_takes_precedence_over_journeys(engine_tables, story):
    """A second prompt of a request is only in the summary: 2 decodes where the journeys know of one."""
    story.served("a", 1, 3).summary(2, num_decode_reqs=2, decode_tokens=2, running_depth=2)
    rows = engine_tables((story,)).rows(*COUNTS, "running_depth", "composition_source")
    assert rows[2] == (0, 2, 0, 2, 2, "summary")
    assert rows[3] == (0, 1, 0, 1, 1, "journey")


def test_shared_blocks_are_taken_from_the_last_summary(engine_tables, story):
    """The journeys count 7 blocks and a summary 10 in all: 3 are held by what they do not show, or 4 are shared."""
    story.served("a", 1, 5).summary(2, kv_blocks_free=990).summary(4, kv_blocks_free=997)
    used = engine_tables((story,)).rows("kv_blocks_used", "kv_usage_ratio")
    assert used == {1: (7, 0.007), 2: (10, 0.01), 3: (10, 0.01), 4: (3, 0.003), 5: (3, 0.003)}


def test_columns_that_a_summary_lacks_come_from_journeys(engine_tables, story):
    story.served("a", 1, 3).summary(2)
    assert engine_tables((story,)).rows("context_tokens", "waiting_tokens", "running_after")[2] == (100, 0, 1)


def test_complete_snapshots_take_precedence_over_journeys(engine_tables, story):
    story.served("a", 1, 3).summary(2)
    story.snapshot(2, "a", scheduled_tokens=1, num_computed_tokens=64, num_output_tokens=1)
    assert engine_tables((story,)).rows("context_tokens") == {1: (0,), 2: (64,), 3: (101,)}


def test_agreement_is_stated_where_there_are_both(engine_tables, story):
    story.served("a", 1, 4).summary(2).summary(3, num_decode_reqs=2, decode_tokens=2)
    story.summary(4, num_decode_reqs=0, decode_tokens=0, num_prefill_reqs=1, prefill_tokens=31)
    assert engine_tables((story,)).rows(*AGREEMENT) == {
        1: (None, None, None),
        2: (True, 0, 0),
        3: (False, -1, -1),
        4: (False, 0, 1 - 31),
    }


def test_without_all_journeys_no_composition_is_inferred(engine_tables, story):
    """The clock still has the starts that events of the sampled journeys tell."""
    story.served("a", 2, 4).summary(2).summary(6)
    rows = engine_tables((story,)).rows(
        "composition_source", "num_decode_reqs", "running_after", "start_source", complete=False
    )
    assert rows == {
        2: ("summary", 1, None, "summary"),
        3: (None, None, None, "update"),
        5: (None, None, None, "update"),
        6: ("summary", 1, None, "summary"),
    }


def test_without_journeys_context_is_estimated_from_used_blocks(engine_tables, story):
    """By hand, of blocks of 16: 10 * 16 slots, less half a block (7.5) for each request and the step's own tokens."""
    story.summary(1)
    story.summary(2, num_prefill_reqs=1, prefill_tokens=50, num_decode_reqs=2, decode_tokens=2)
    story.summary(3, num_prefill_reqs=1, prefill_tokens=50, num_decode_reqs=0, decode_tokens=0)
    story.summary(4, kv_blocks_free=1000).summary(5, kv_blocks_free=None)
    columns = ("context_tokens", "context_estimated")
    assert engine_tables((story,)).rows(*columns, complete=False) == {
        1: (152, True),  # 151.5, to the even one
        2: (86, True),  # 85.5, to the even one
        3: (0, True),
        4: (0, True),
        5: (None, False),
    }
    # Sampled journeys do not justify a guess: snapshots may show the batch.
    story.served("a", 2, 4)
    assert engine_tables((story,)).rows(*columns, complete=False)[1] == (None, False)


def test_a_cycle_ends_at_an_event_of_a_sampled_journey(engine_tables, story):
    story.served("a", 3, 6).summary(2)
    rows = engine_tables((story,)).rows("cycle_us", "cycle_source", "interval_steps", complete=False)
    # Without five steps that have both kinds the SCHEDULED event, 200 us late, stands for the start as it is.
    assert rows[2] == (10_200, "interval", 1)


def test_epochs_have_separate_steps(engine_tables, new_story):
    before = new_story(epoch=0).served("a", 1, 3)
    after = new_story(epoch=1, begin_us=500_000).served("b", 1, 2, prompt=7)
    table = engine_tables((before, after)).timeline().filter(pl.col("composition_source").is_not_null())
    assert table.select("epoch", "step_id", "prefill_tokens", "num_decode_reqs").rows() == [
        (0, 1, 100, 0),
        (0, 2, 0, 1),
        (0, 3, 0, 1),
        (1, 1, 7, 0),
        (1, 2, 0, 1),
    ]


def test_no_cycle_reaches_over_a_restart(engine_tables, new_story):
    before = new_story(epoch=0).served("a", 1, 3)
    after = new_story(epoch=1, begin_us=500_000).served("b", 1, 3)
    table = engine_tables((before, after)).timeline()
    ends = table.group_by("epoch").agg(pl.col("cycle_us", "interval_steps").last()).sort("epoch")
    assert ends.rows() == [(0, None, None), (1, None, None)]
    assert table["cycle_us"].max() < 20_000


def test_a_request_in_flight_ends_with_its_engine(engine_tables, new_story):
    before = new_story(epoch=0).request("a", ("QUEUED", 0), ("SCHEDULED", 1), ("FIRST_TOKEN", 1)).served("c", 1, 2)
    after = new_story(epoch=1, begin_us=500_000).served("b", 1, 2, prompt=7)
    table = engine_tables((before, after)).timeline()
    assert table.filter(epoch=1).select("running_depth", "waiting_depth").rows() == [(1, 0), (1, 0)]


def test_a_request_does_not_wait_in_the_next_engine(engine_tables, new_story):
    before = new_story(epoch=0).served("c", 1, 2).request("a", ("QUEUED", 1))
    after = new_story(epoch=1, begin_us=500_000).served("b", 1, 2)
    table = engine_tables((before, after)).timeline()
    assert table.select("epoch", "step_id", "waiting_depth").rows() == [
        (0, 1, 0),
        (0, 2, 1),
        (1, 1, 0),
        (1, 2, 0),
    ]


def test_servers_of_one_file_do_not_mix(engine_tables, new_story):
    one = new_story(server="one").served("a", 1, 3, prompt=100)
    two = new_story(server="two", begin_us=3_000).served("b", 2, 3, prompt=40).summary(3)
    table = engine_tables((one, two)).timeline()
    assert table.select("server", "step_id", "prefill_tokens", "decode_tokens", "running_depth").rows() == [
        ("one", 1, 100, 0, 1),
        ("one", 2, 0, 1, 1),
        ("one", 3, 0, 1, 1),
        ("two", 2, 40, 0, 1),
        ("two", 3, 0, 1, 1),
    ]


def test_two_servers_steps_of_one_number_are_two_steps(engine_tables, new_story):
    stories = [new_story(server=name).summary(1).summary(2, at_us=us) for name, us in (("one", 0), ("two", 500))]
    table = engine_tables(tuple(stories)).timeline(complete=False)
    assert table.filter(step_id=1).select("server", "cycle_us").rows() == [
        ("one", 10_000.0),
        ("two", 10_500.0),
    ]


def test_the_first_of_two_summaries_of_a_step_counts(engine_tables, story):
    story.summary(1).summary(1, at_us=4_000, num_decode_reqs=7).summary(2)
    assert engine_tables((story,)).rows("num_decode_reqs", "cycle_us", complete=False) == {
        1: (1, 10_000.0),
        2: (1, None),
    }


def test_a_damaged_step_id_costs_no_memory_and_no_other_step(engine_tables, story):
    story.served("a", 1, 4).served("b", 2, 3).summary(3).summary(10**15, at_us=-(10**15) * 10_000 + 35_000)
    assert list(engine_tables((story,)).rows("num_decode_reqs")) == [1, 2, 3, 4]


def test_damaged_step_ids_at_both_ends_of_the_integers(engine_tables, story):
    story.served("a", 1, 4)
    for step in (-(2**63), 2**63 - 1):
        story.request(f"odd-{step}", ("SCHEDULED", step, {"at_us": 5_000}))
    assert list(engine_tables((story,)).rows("num_decode_reqs")) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("apart", "cycle_us"),
    [
        # In 10 ms an engine takes 50 steps of 200 us at most, and a hundred without work are nothing unusual.
        (1_000, 10_000),
        # Time enough, but the ids of so many steps that nothing tells of could be any numbers.
        (900_000, 900_000 * 10_000),
    ],
)
def test_a_gap_of_ids_is_no_steps(engine_tables, new_story, apart, cycle_us):
    """One request runs on; of its 40 steps 34 have an id that lies so far behind the one before."""
    story = new_story()
    ids = [*range(1, 7), *range(10 * apart, 44 * apart, apart)]
    for number, step in enumerate(ids, start=1):
        story.summary(step, at_us=number * cycle_us - step * 10_000)
    story.request(
        "a",
        ("QUEUED", 0),
        ("SCHEDULED", 1, {"at_us": cycle_us + 200}),
        ("FIRST_TOKEN", 1, {"at_us": 2 * cycle_us - 100}),
        ("FINISHED", ids[-1], {"done": 40, "at_us": 41 * cycle_us - 100}),
    )
    tables = engine_tables((story,))
    assert step_axis(tables.steps, tables.snapshots, tables.journeys).size == 40 + 34 * 2
    rows = tables.rows("cycle_us", "running_depth")
    assert [(step, rows[step][1]) for step in rows] == [(step, 1) for step in ids]
    # Step 6 ends where nobody knows; so do all behind it.
    assert [step for step in rows if rows[step][0] is not None] == [1, 2, 3, 4, 5]


def test_only_the_widest_gaps_of_ids_are_no_steps(engine_tables, story):
    """The engine scheduled a request, ran it for 250,000 steps, and another one for as long."""
    for number, (first, last) in enumerate(((1, 100_001), (100_002, 350_002))):
        story.served(number, first, last, max_tokens=10**6)
    tables = engine_tables((story,))
    assert step_axis(tables.steps, tables.snapshots, tables.journeys).size == 100_001 + 1 + 2 + 1


@pytest.mark.parametrize("complete", [False, True])
def test_every_summary_column_of_the_timeline_is_filled(engine_tables, story, complete):
    """A column that is declared in both tables needs nothing else."""
    keys = {"run_id", "server", "epoch", "step_id", "ts_start_ns"}
    shared = sorted({*schema.STEPS.names} & {*schema.TIMELINE.names} - keys)
    values = {name: number for number, name in enumerate(shared, start=2)} | {
        "kv_usage_ratio": 0.25,
        "cycle_source": "fpm",
    }
    story.summary(1, **values).served("a", 1, 2)
    assert engine_tables((story,)).rows(*shared, complete=complete)[1] == tuple(map(values.get, shared))
    assert len(shared) > 9


@pytest.mark.mostly_slow(every=8)
@pytest.mark.parametrize("with_summaries", [False, True])
@pytest.mark.parametrize("lost", ["QUEUED", "SCHEDULED", "FIRST_TOKEN", "FINISHED"])
@pytest.mark.parametrize("lag", [0, 1])
def test_an_event_without_a_step_is_of_the_step_of_its_time(engine_tables, new_story, lost, with_summaries, lag):
    """Every tenth of 60 requests lacks the step of an event; other events, or summaries, show what ran."""
    names = ("running_depth", "waiting_depth", "remaining_after", "kv_blocks_used")
    stories = []
    for is_damaged in (False, True):
        story = new_story(lag=lag)
        for number in range(60):
            story.served(number, 1 + number, 9 + number, max_tokens=9)
        for step in range(1, 69) if with_summaries else ():
            story.summary(step, kv_blocks_total=None, running_depth=None, waiting_depth=None)
        for event in story.events[40::40]:
            damaged = next(e for e in story.events if e["trace_id"] == event["trace_id"] and e["event"] == lost)
            damaged["step_id"] = None if is_damaged else damaged["step_id"]
        stories.append(engine_tables((story,)).rows(*names))
    assert stories[1] == stories[0]


def test_a_request_without_an_end_runs_to_its_token_limit(engine_tables, story):
    story.served("a", 1, 30, max_tokens=30)
    story.request("b", ("QUEUED", 1), ("SCHEDULED", 2), ("FIRST_TOKEN", 2), max_tokens=5)
    rows = engine_tables((story,)).rows("running_depth", "remaining_after")
    assert [rows[step][0] for step in (1, 2, 6, 7)] == [1, 2, 2, 1]
    # Request a has 30 less its step; b has 5 less those of step 2 and after.
    assert [rows[step][1] for step in (1, 2, 6, 7)] == [29, 28 + 4, 24 + 0, 23]


def test_tokens_left_are_unknown_where_a_limit_is(engine_tables, story):
    story.served("a", 1, 9).served("b", 3, 5, max_tokens=None)
    rows = engine_tables((story,)).rows("remaining_after")
    assert [rows[step][0] for step in (2, 3, 4, 6)] == [18, None, None, 14]


def test_shared_blocks_are_unknown_where_fewer_are_in_use(engine_tables, story):
    """100 tokens hold 7 blocks; the summary says that the two requests share 6 of 14."""
    story.served("a", 1, 9, prompt=100).served("b", 1, 3, prompt=100).served("c", 11, 12, prompt=16)
    story.summary(2, kv_blocks_total=100, kv_blocks_free=92)
    used = engine_tables((story,)).rows("kv_blocks_used")
    assert [used[step][0] for step in (2, 3, 5, 10, 11)] == [8, 8, 1, 0, None]


@together
def test_a_derived_value_that_cannot_be_is_left_out_and_counted(traces):
    """A request puts out five tokens of three: in its last steps it would have -1 left."""
    traces.request(1, 0, step=1)
    core = traces.events("journey.FIRST_TOKEN") + traces.events("journey.SCHEDULED")
    for event in core:
        event["attributes"].append({"key": "decode.max_tokens", "value": {"intValue": "3"}})
    table = yield traces
    remaining = dict(table("timeline").select("step_id", "remaining_after").rows())
    assert [remaining[step] for step in (1, 2, 3, 4, 5)] == [2, 1, 0, None, 0]
    rule = {"timeline.remaining_after is out of range": 1}
    assert json.loads(table("runs")["implausible"][0]) == rule
    assert dict(table("rejects").select("reason", "count").rows()) == rule
