"""The step clock from journey events: offsets measured where both are known, starts that cannot be, intervals."""

from __future__ import annotations

import polars as pl
import pytest

from tracefit.features.sets import Feature, FeatureSet
from tracefit.features.training import beta_rows
from tracefit.timeline import clock_disagreements, execution_lags

START = ("ts_start_ns", "start_source", "start_sd_us")


def _many(story, requests=8, *, every=5, output=3):
    """Requests one after the other, `every` steps apart, of so many tokens each; of each, all events are known."""
    for number in range(requests):
        first = 1 + every * number
        story.served(f"r{number}", first, first + output - 1)
    return story


def test_offsets_are_measured_on_steps_that_have_a_summary_too(engine_tables, story):
    """SCHEDULED comes 200 us after its step's start, FIRST_TOKEN and FINISHED 100 us before the next one."""
    _many(story)
    for step in range(1, 30):
        story.summary(step)
    rows = engine_tables((story,)).rows(*START)
    assert rows[31] == (story.at(31), "scheduled", 10.0)
    assert rows[32] == (story.at(32), "update", 10.0)
    assert rows[29] == (story.at(29), "summary", 0.0)


def test_the_spread_of_an_offset_is_its_standard_deviation(engine_tables, story):
    """Offsets of 100, 150, 200, 250 and 300 us: median 200, median distance from it 50."""
    for number, late in enumerate((100, 150, 200, 250, 300)):
        step = 10 * number + 1
        story.summary(step)
        story.request(f"r{number}", ("SCHEDULED", step, {"at_us": step * 10_000 + late}))
    story.request("hidden", ("SCHEDULED", 61)).summary(70)
    assert engine_tables((story,)).rows(*START, complete=False)[61] == (
        story.at(61),
        "scheduled",
        pytest.approx(50 * 1.4826),
    )


def test_a_kind_without_summaries_is_measured_against_the_other(engine_tables, story):
    """Steps with a summary begin with a SCHEDULED event and no update; steps with both kinds have no summary."""
    for number in range(6):
        story.summary(100 + 3 * number).request(f"s{number}", ("SCHEDULED", 100 + 3 * number))
        story.served(f"a{number}", 200 + 6 * number, 200 + 6 * number).served(
            f"b{number}", 201 + 6 * number, 203 + 6 * number
        )
    rows = engine_tables((story,)).rows(*START, complete=False)
    # Update to next SCHEDULED is 300 us, SCHEDULED is 200 us after its start: updates are 100 us before it.
    assert [rows[200 + 6 * n][0] for n in range(6)] == [story.at(200 + 6 * n) for n in range(6)]
    assert [rows[204 + 6 * n][0] for n in range(5)] == [story.at(204 + 6 * n) for n in range(5)]


def test_without_any_summary_the_two_kinds_meet_halfway(engine_tables, story):
    """From an update to the next SCHEDULED is 300 us: one is moved by +150, the other by -150."""
    _many(story, every=3)
    rows = engine_tables((story,)).rows(*START)
    assert {rows[step][0] - story.at(step) for step in rows if rows[step][0]} == {50_000}
    assert rows[1][1:] == ("scheduled", 10.0)
    assert rows[2][1:] == ("update", 10.0)


def test_the_first_event_inside_and_the_last_after_a_step_count(engine_tables, story):
    _many(story)
    for step in range(1, 30):
        story.summary(step)
    story.request("x", ("SCHEDULED", 31, {"at_us": 310_450})).request("y", ("FIRST_TOKEN", 31, {"at_us": 319_700}))
    rows = engine_tables((story,)).rows(*START)
    assert (rows[31][0], rows[32][0]) == (story.at(31), story.at(32))


def test_a_preemption_is_stamped_inside_its_step(engine_tables, story):
    _many(story)
    for step in range(1, 30):
        story.summary(step)
    story.request("x", ("PREEMPTED", 40)).summary(50)
    assert engine_tables((story,)).rows(*START)[40] == (story.at(40, -100), "scheduled", 10.0)


def test_scheduled_wins_over_a_disagreeing_update(engine_tables, story):
    """The engine was held up for 4 ms between the update of step 40 and the start of step 41."""
    _many(story, 12)
    for step in range(1, 30):
        story.summary(step)
    story.served("held", 41 + 20, 62).request("x", ("FIRST_TOKEN", 60, {"at_us": 605_900}))
    assert engine_tables((story,)).rows(*START)[61] == (story.at(61), "scheduled", 10.0)


def test_an_abort_is_no_update(engine_tables, story):
    """It is stamped when the disconnect is noticed, here in the middle of step 34."""
    _many(story)
    for step in range(1, 30):
        story.summary(step)
    story.request("x", ("FINISHED", 33, {"finish_status": "aborted", "at_us": 345_000}))
    assert engine_tables((story,)).rows("ts_start_ns")[34] == (story.at(34),)


@pytest.mark.parametrize("off_us", [-3_600_000_000, -45_000, 45_000, 3_600_000_000])
def test_a_stamp_far_off_is_left_out_and_takes_no_other_with_it(engine_tables, story, off_us):
    _many(story)
    for row in story.events:
        if row["request_id"] == "r3" and row["event"] == "SCHEDULED":
            row["ts_ns"] += off_us * 1000
            odd = row["step_id"]
    rows = engine_tables((story,)).rows("ts_start_ns")
    anchored = {1 + 5 * n + k for n in range(8) for k in (0, 1, 3)} - {odd, 39}
    assert {step for step, (start,) in rows.items() if start is not None} == anchored


def test_events_off_the_clock_of_the_summaries_are_counted(engine_tables, story):
    _many(story)
    for step in range(1, 36):
        story.summary(step)
    table = engine_tables((story,))
    assert clock_disagreements(table.timeline(), table.journeys).rows() == [("run", "engine", 24, 0)]
    for row in story.events[:3]:
        row["ts_ns"] += 50_000_000
    assert clock_disagreements(table.timeline(), table.journeys).rows() == [("run", "engine", 24, 2)]


def test_estimates_never_stand_over_a_summary(engine_tables, story):
    _many(story)
    for step in range(1, 36):
        story.summary(step, at_us=3_000 if step == 11 else 0)
    assert engine_tables((story,)).rows(*START)[11] == (story.at(11, 3_000), "summary", 0.0)


def test_an_interval_is_the_mean_of_its_steps(engine_tables, story):
    """Nothing is known of step 3: 2 to 4 is 2 steps in 10,000 + 13,000 us."""
    story.served("a", 1, 9).summary(2).summary(4, at_us=3_000).summary(5, at_us=3_000)
    rows = engine_tables((story,)).rows("cycle_us", "interval_steps", "cycle_source", "cycle_sd_us")
    assert rows[2] == (11_500, 2, "interval", 0.0)
    assert rows[3] == (None, None, None, None)
    assert rows[4] == (10_000, 1, "adjacent", 0.0)


def test_an_interval_is_as_uncertain_as_its_ends_per_step(engine_tables, story):
    """A SCHEDULED event 200 us after its start, with nothing to measure that by, may be 200 us off."""
    story.served("a", 1, 9).summary(4)
    rows = engine_tables((story,)).rows("ts_start_ns", "cycle_us", "interval_steps", "cycle_sd_us")
    assert rows[1] == (story.at(1, 200), 9_700.0, 1, pytest.approx(200 * 2**0.5))
    assert rows[2] == (story.at(2, -100), 20_100 / 2, 2, 200 / 2)


def test_an_interval_with_an_unknown_step_has_no_time(engine_tables, story):
    story.summary(1).summary(4).summary(5)
    assert engine_tables((story,)).rows("cycle_us", complete=False) == {1: (None,), 4: (10_000,), 5: (None,)}


def test_steps_without_tokens_are_members_of_their_interval(engine_tables, story):
    """Steps 3 and 4 carry nothing: their request waits for its blocks."""
    story.preempted("a", 3, 5, 6, out=2, total=4)
    for step in (1, 2, 6):
        story.summary(step)
    rows = engine_tables((story,)).rows("interval_steps", "decode_tokens", "idle_after")
    assert (rows[3][1], rows[4][1]) == (0, 0)
    assert sum(row[0] or 0 for row in rows.values()) == 5
    assert not any(row[2] for row in rows.values())


def test_idle_time_is_detected_without_any_summary(engine_tables, story):
    """After step 3 nobody is left: step 4 is empty, and a second goes by before step 5."""
    story.served("a", 1, 3)
    late = story.begin_us = 1_000_000
    story.served("b", 5, 7)
    rows = engine_tables((story,)).rows("idle_before", "idle_after", "running_depth", "cycle_us")
    assert [step for step, row in rows.items() if row[1]] == [4]
    assert [step for step, row in rows.items() if row[0]] == [5]
    assert rows[4][2] == 0
    assert rows[4][3] > late


def test_time_with_waiting_requests_is_not_idle(engine_tables, story):
    story.served("a", 1, 2).request(
        "b", ("QUEUED", 2), ("SCHEDULED", 5), ("FIRST_TOKEN", 5), ("FINISHED", 6, {"done": 2})
    )
    rows = engine_tables((story,)).rows("idle_after", "running_depth", "waiting_depth")
    assert rows[3] == (False, 0, 1)
    assert not any(row[0] for row in rows.values())


def _ahead(new_story, requests=24):
    return _many(new_story(lag=1), requests, every=4, output=4)


def test_scheduling_ahead_is_detected_without_summaries(engine_tables, new_story):
    table = engine_tables((_ahead(new_story),))
    assert execution_lags(table.steps, table.journeys).rows() == [("run", "engine", 1)]
    table = engine_tables((_many(new_story(), 24, every=4, output=4),))
    assert execution_lags(table.steps, table.journeys).rows() == [("run", "engine", 0)]


def test_with_scheduling_ahead_a_first_decode_counts_as_prefill(engine_tables, new_story):
    """Its token is not known yet when the step is scheduled, and a finished request stays for one more step."""
    rows = engine_tables((_ahead(new_story),)).batches()
    assert [rows[step] for step in (1, 2, 3, 4)] == [
        (1, 100, 0, 0, 0, 0),
        (1, 1, 100, 0, 0, 0),
        (0, 0, 0, 1, 1, 101),
        (0, 0, 0, 1, 1, 102),
    ]
    depths = engine_tables((_ahead(new_story),)).rows("running_depth", "running_after")
    assert [depths[step] for step in (1, 4, 5, 6)] == [(1, 1), (1, 1), (2, 1), (1, 1)]


def test_updates_anchor_two_starts_on_with_scheduling_ahead(engine_tables, new_story):
    """FIRST_TOKEN of step 1 comes out 100 us before step 3 starts."""
    story = _ahead(new_story)
    for step in range(1, 60):
        story.summary(step)
    rows = engine_tables((story,)).rows(*START)
    assert rows[61] == (story.at(61), "scheduled", 10.0)
    assert rows[63] == (story.at(63), "update", 10.0)


def test_scheduling_ahead_is_detected_per_server(engine_tables, new_story):
    ahead, plain = _ahead(new_story), _many(new_story(server="plain"), 24, every=4, output=4)
    table = engine_tables((ahead, plain)).timeline()
    second = table.filter(step_id=2).select("server", "num_prefill_reqs", "num_decode_reqs")
    assert second.rows() == [("engine", 1, 0), ("plain", 0, 1)]


def test_with_scheduling_ahead_the_next_epoch_starts_empty(engine_tables, new_story):
    before = _ahead(new_story)
    after = new_story(epoch=1, begin_us=5_000_000, lag=1).served("z", 1, 2)
    table = engine_tables((before, after)).timeline()
    assert table.filter(pl.col("epoch") == 1)["running_depth"].to_list() == [1, 1]


def test_with_scheduling_ahead_a_batch_explains_the_next_cycle(engine_tables, new_story):
    """Steps 1 and 5 compute 100 prompt tokens each; they execute during the cycles of steps 2 and 6."""
    story = _ahead(new_story)
    for step in range(1, 60):
        story.summary(step, prefill_tokens=100 if step % 4 == 1 else 0)
    tokens = FeatureSet("mine", (Feature("prefill_tokens", "token", "prefill_tokens"),))
    rows = beta_rows(engine_tables((story,)).timeline(), tokens, {}, {("run", "engine"): 1}, "clock")
    explained = dict(rows.filter(pl.col("step_id") < 10).select("step_id", "prefill_tokens").rows())
    assert {step for step, value in explained.items() if value == 100} == {2, 6}
