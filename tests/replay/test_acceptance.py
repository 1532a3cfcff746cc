"""Tokens a step, of traces with steps, of spans beside a log, and where the clocks of the two differ; and plans with
them."""

from __future__ import annotations

import polars as pl
import pytest

import tracefit
from tracefit.replay.acceptance import ACCEPTANCE_COLUMNS, measured_acceptance
from tracefit.tables import schema

ENGINE = {"run_id": "run", "server": "server", "epoch": 0}
MS = 1_000_000
pytestmark = pytest.mark.usefixtures("fewer_requests")


def _requests(count=20, **columns):
    """Return requests of 13 tokens, one after the other, whose first token comes 1 ms after step 10, 20, ... begins."""
    rows = [
        {**ENGINE, "trace_id": str(k), "output_tokens": 13, "first_token_ns": (10 * k + 1) * 10 * MS}
        for k in range(count)
    ]
    frame = pl.DataFrame(rows).with_columns(**columns)
    return schema.REQUESTS.shape(frame)


def _steps(count=220, *, drafts=3, ahead_ns=0):
    """Return steps of 10 ms, each with a decoding request and its drafts."""
    steps = pl.DataFrame({"step_id": range(count)}).with_columns(
        **{name: pl.lit(value) for name, value in ENGINE.items()},
        ts_start_ns=pl.col("step_id") * 10 * MS + ahead_ns,
        num_decode_reqs=1,
        decode_tokens=1 + drafts,
    )
    return schema.TIMELINE.shape(steps).lazy()


def test_steps_of_events_count():
    """12 tokens after the first one in 6 steps."""
    requests = _requests(first_token_step=pl.lit(5), finished_step=pl.lit(11))
    assert measured_acceptance(requests, _steps()) == pytest.approx((2.0, 2.0, 2.0))


def test_steps_between_the_stamps_of_tokens_count():
    """The requests take 4 and 8 steps in turn, each of a single request: 240 tokens in 120 steps, 3 or 1.5 a step."""
    count = pl.when(pl.int_range(pl.len()) % 2 == 0).then(4).otherwise(8)
    requests = _requests(last_token_ns=pl.col("first_token_ns") + count * 10 * MS)
    at = pl.col("step_id") % 20
    decodes = at.is_between(1, 4) | at.is_between(11, 18)
    steps = _steps(200).with_columns(num_decode_reqs=decodes.cast(pl.Int64))
    assert measured_acceptance(requests, steps) == pytest.approx((2.0, 1.5, 3.0))


def test_where_the_clocks_differ_only_the_sums_are_known():
    """The log is an hour ahead: 240 tokens in 100 steps of one request each."""
    requests = _requests(last_token_ns=pl.col("first_token_ns") + 50 * MS)
    hour_ns = 3_600_000 * MS
    assert measured_acceptance(requests, _steps(100, ahead_ns=hour_ns)) == pytest.approx((2.4, None, None))


def test_the_columns_that_a_plan_reads_are_enough():
    requests = _requests(last_token_ns=pl.col("first_token_ns") + 60 * MS).select(ACCEPTANCE_COLUMNS)
    found = measured_acceptance(requests, _steps(120))
    assert found is not None
    assert found.mean == pytest.approx(2.0)


def test_without_drafts_a_step_gives_a_token():
    requests = _requests(last_token_ns=pl.col("first_token_ns") + 50 * MS)
    assert measured_acceptance(requests, _steps(drafts=0)) is None
    preempted = _requests(first_token_step=pl.lit(5), finished_step=pl.lit(20))
    assert measured_acceptance(preempted, _steps()) is None


# -- plans -----------------------------------------------------------------------------------------------


def test_two_tokens_a_step_halve_the_time_per_token(constant):
    """Nine tokens after the first, in steps of 1 ms: nine of them, or five."""
    load = {"prompt": 10, "output": 11}
    without, with_drafts = (
        tracefit.plan(constant(), rate=20, servers=1, requests=tracefit.LoadOptions(**load, accept=accept)).plans[0]
        for accept in (None, 2.0)
    )
    assert without.drafts is None
    assert without.at.latency("itl_p50_ms").value == pytest.approx(1.0)
    assert with_drafts.at.latency("itl_p50_ms").value == pytest.approx(0.5)
    drafts = with_drafts.drafts
    assert (drafts.tokens_per_step, drafts.is_given, drafts.measured) == (2.0, True, None)
    assert drafts.step_mean_ms == pytest.approx(1.0)
    assert any("recorded without drafts" in note for note in with_drafts.notes)


def test_the_terminal_keeps_steps_and_tokens_apart(constant, tracefit):
    load = ("--prompt", "10", "--output", "11", "--rate", "20", "--servers", "1")
    _, out, _ = tracefit("plan", constant(), *load, "--accept", "2.4")
    text = " ".join(out.split())
    assert (
        "a step gives a request 2.4 tokens, as given; its outputs come a step apart, 1 ms, and ITL is the time per "
        "token"
    ) in text


@pytest.mark.parametrize(("hits", "ttft_ms", "pct"), [("none", 2.0, 0), ("60", 1.0, 60), ("traced", 2.0, 0)])
def test_cached_prompt_tokens_take_no_step(constant, hits, ttft_ms, pct):
    """A step computes up to 2,048 of the 4,000 prompt tokens: two steps of 1 ms, or one for the 1,600 that are not
    cached."""
    load = tracefit.LoadOptions(prompt=4_000, output=10, prefix_hits=hits)
    (plan,) = tracefit.plan(constant(), rate=5, servers=1, requests=load).plans
    assert plan.at.latency("ttft_p50_ms").value == pytest.approx(ttft_ms, rel=0.02)
    assert plan.load.prefix_hit_pct == pytest.approx(pct, abs=0.5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--prefix-hits", "100"), "--prefix-hits 100: is not a share of the prompt tokens"),
        (("--prefix-hits", "some"), "give traced, none, or percent"),
        (("--prefix-hits", "50", "--set", "enable_prefix_caching=false"), "the server has no prefix cache"),
        (("--accept", "0.5"), "--accept 0.5: is out of range"),
    ],
)
def test_absurd_options_are_one_line(constant, tracefit, options, said):
    load = ("--prompt", "10", "--output", "11", "--rate", "20", "--servers", "1")
    code, _, err = tracefit("plan", constant(), *load, *options)
    assert code == 2
    assert said in err
    assert "Traceback" not in err
