"""States of requests, as vLLM names them, and what is known of those that have not finished."""

from __future__ import annotations

import pytest

from together import together

QUEUED = ("QUEUED", 1000, 0)
SCHEDULED = ("SCHEDULED", 2000, 1, {"phase": "PREFILL"})
FIRST_TOKEN = ("FIRST_TOKEN", 9000, 1, {"phase": "DECODE"})
PREEMPTED = ("PREEMPTED", 12_000, 2, {"phase": "DECODE"})


def _request(tables_of, traces, events):
    return tables_of(traces.api(1, {"ARRIVED": 0}).core(1, events))("requests").row(0, named=True)


@pytest.mark.mostly_slow(every=4)
@pytest.mark.parametrize(
    ("events", "state", "stage"),
    [
        ([QUEUED], "WAITING", None),
        ([QUEUED, SCHEDULED], "RUNNING", "PREFILL"),
        ([QUEUED, SCHEDULED, FIRST_TOKEN], "RUNNING", "DECODE"),
        ([QUEUED, SCHEDULED, FIRST_TOKEN, PREEMPTED], "PREEMPTED", "DECODE"),
    ],
)
def test_a_request_in_flight_is_kept_with_nulls(tables_of, traces, events, state, stage):
    row = _request(tables_of, traces, events)
    assert (row["state"], row["stage"]) == (state, stage)
    unknown = (
        "finished_ns",
        "last_token_ns",
        "finish_status",
        "e2e_us",
        "tokens_per_s",
        "queue_ratio",
        "steps",
    )
    assert [row[name] for name in unknown] == [None] * len(unknown)


@pytest.mark.mostly_slow(every=6)
@pytest.mark.parametrize(
    ("status", "state"),
    [
        ("stopped", "FINISHED_STOPPED"),
        ("length", "FINISHED_LENGTH_CAPPED"),
        ("aborted", "FINISHED_ABORTED"),
        ("ignored", "FINISHED_IGNORED"),
        ("error", "FINISHED_ERROR"),
        ("of another kind", "FINISHED"),
    ],
)
def test_the_finish_status_is_the_state(tables_of, traces, status, state):
    finished = ("FINISHED", 50_000, 4, {"finish.status": status, "decode.done_tokens": 4})
    row = _request(tables_of, traces, [QUEUED, SCHEDULED, FIRST_TOKEN, finished])
    assert row["state"] == (None if state == "FINISHED" else state)


@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize(
    ("times", "state"),
    [
        ({"ARRIVED": 0}, "WAITING"),
        ({"ARRIVED": 0, "ABORTED": 900}, "FINISHED_ABORTED"),
        ({"ARRIVED": 0, "DEPARTED": 900}, None),
    ],
)
@together
def test_without_a_core_the_api_span_tells_what_it_can(traces, times, state):
    assert (yield traces.api(1, times))("requests")["state"].item() == state


@pytest.mark.slow
@together
def test_rates_are_those_of_the_formulas(traces):
    row = (yield traces.request(1, 0, step=1, output=5))("requests").row(0, named=True)
    # QUEUED at 1,000 us, SCHEDULED at 1,200, FIRST_TOKEN 10,000 later, 5 tokens, the last one at 51,200.
    expected = {
        "time_in_queue_us": 1_200,
        "inference_us": 50_000,
        "tpot_us": 40_000 / 4,
        "tokens_per_s": 5 / 0.0512,
        "queue_ratio": 1_200 / 51_200,
    }
    assert {key: row[key] for key in expected} == pytest.approx(expected)


@pytest.mark.slow
@together
def test_a_request_of_one_token_has_no_time_between_tokens(traces):
    trace = traces.request(1, 0, step=1, output=1, tokens_at=(11_200, 11_200))
    row = (yield trace)("requests").row(0, named=True)
    assert [row[name] for name in ("itl_us", "tpot_us", "itl_p99_us")] == [None, None, None]
