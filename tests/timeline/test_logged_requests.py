"""Requests of an unmodified server on the steps of its log: the true steps of a generated run, with fine stamps and
whole seconds."""

from __future__ import annotations

from functools import cache

import numpy as np
import polars as pl
import pytest

from decoding import decoded_block
from recorded import log_lines
from stock import stock_requests
from tracefit.inputs.blocks import Block
from tracefit.recordings.iteration_log import decode
from tracefit.synth import SynthOptions, synth
from tracefit.tables import schema
from tracefit.timeline import EngineLimits, build_timeline, events_of, is_logged, log_clock, place_on_log

LIMITS = EngineLimits(max_num_batched_tokens=8192, max_num_seqs=256)


@cache
def busy_run():
    return synth(SynthOptions(requests=300, rate_per_s=8.0, seed=5))


def logged(run, **form):
    block = Block("f", "lines", "text", 0, None, 0, None, "log")
    found = decoded_block(decode, block, b"".join(log_lines(run.truth_steps, **form))).steps
    engine = {"run_id": pl.lit("run"), "server": pl.lit("server"), "epoch": pl.lit(0, pl.Int64)}
    return schema.STEPS.shape(found.with_columns(**engine))


def in_unix(requests):
    """Put requests on the wall clock, as spans are."""
    times = [c for c in requests.columns if c.endswith("_ns")]
    return requests.with_columns(pl.col(times) + 1_700_000_000_000_000_000)


def computing_steps(run):
    """Return the steps that compute something: the log numbers them from 0."""
    return run.truth_steps.filter(pl.col("prefill_tokens") + pl.col("decode_tokens") > 0)


def right_steps(placed, run):
    """Return the share of the placed requests whose first and last token are at their true step."""
    number = computing_steps(run).select("step_id").with_row_index("at", offset=0).cast(pl.Int64)
    true = run.truth_requests.select("request_id", "first_token_step", "finished_step")
    for name in ("first_token_step", "finished_step"):
        true = true.join(number.rename({"step_id": name, "at": f"true_{name}"}), on=name, how="left")
    known = placed.requests.join(true, on="request_id").drop_nulls("first_token_step")
    return known.select(
        pl.all_horizontal(
            pl.col(name) == pl.col(f"true_{name}") for name in ("first_token_step", "finished_step")
        ).mean()
    ).item()


@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize(
    ("fine", "delay_us"),
    [(True, 60.0), (False, 60.0), (True, 2_000.0)],
    ids=["microseconds", "seconds", "front end late"],
)
def test_requests_get_the_steps_that_they_were_in(fine, delay_us):
    run = busy_run()
    clock = log_clock(logged(run, fine=fine))
    requests = in_unix(stock_requests(run, delay_us=delay_us))
    placed = place_on_log(requests, clock, LIMITS)
    assert placed is not None
    assert right_steps(placed, run) > 0.99
    assert placed.requests["first_token_step"].count() >= 0.97 * requests.height

    steps = clock.steps.with_columns(cycle_us=pl.when(~is_logged()).then("cycle_us"))
    journeys = events_of(placed.requests)
    timeline = build_timeline(
        steps,
        schema.REQUEST_SNAPSHOTS.empty(),
        journeys,
        LIMITS,
        journeys_complete=True,
        known_starts=placed.starts,
    )
    # Contexts are the truth of the generator.
    computing = computing_steps(run)
    truth = computing.with_columns(step_id=pl.int_range(pl.len(), dtype=pl.Int64)).select(
        "step_id", true="context_tokens"
    )
    contexts = timeline.join(truth, on="step_id").drop_nulls("context_tokens")
    assert contexts.height > 0.9 * computing.height
    assert (contexts["context_tokens"] == contexts["true"]).mean() > 0.99


@pytest.mark.slow
def test_a_request_that_the_next_step_takes_is_queued_in_the_step_before():
    """No request gets its first or last token in most steps of a lightly loaded server, and the time of their ends is
    interpolated."""
    run = synth(SynthOptions(requests=300, rate_per_s=12.0, seed=5, max_num_seqs=16, noise=0.2, stop_fraction=0.0))
    placed = place_on_log(in_unix(stock_requests(run)), log_clock(logged(run)), LIMITS)
    assert placed is not None
    rows = placed.requests.drop_nulls("queued_step").select(
        at_once=pl.col("queue_wait_us") < 1_000.0,
        steps=pl.col("first_scheduled_step") - pl.col("queued_step"),
    )
    assert 30 < rows["at_once"].sum() < rows.height - 30
    assert (rows["at_once"] == (rows["steps"] == 1)).mean() > 0.99


@pytest.mark.slow
def test_requests_with_prefix_hits_match_whole_seconds():
    # No line has as many tokens as the prompts of half of the requests, and the server has a request in every slot.
    run = synth(SynthOptions(requests=300, rate_per_s=20.0, seed=7, prefix_fraction=0.5, max_num_seqs=12))
    requests = in_unix(stock_requests(run))
    placed = place_on_log(requests, log_clock(logged(run, fine=False)), LIMITS)
    assert placed is not None
    assert placed.requests["first_token_step"].count() >= 0.9 * requests.height
    assert right_steps(placed, run) > 0.95


@pytest.mark.slow
def test_a_front_end_that_stalls_at_first_tokens():
    # Every fifth request is alone in the server and its first token is stamped 0.2 s late; the engine's own times are
    # right.
    run = synth(SynthOptions(requests=100, rate_per_s=0.05, seed=7))
    requests = in_unix(stock_requests(run)).with_row_index()
    late_us = pl.when(pl.col("index") % 5 == 0).then(pl.min_horizontal(2e5, pl.col("decode_us") / 2)).otherwise(0.0)
    late = requests.with_columns(pl.col("ttft_us") + late_us).drop("index")
    placed = place_on_log(late, log_clock(logged(run)), LIMITS)
    assert placed is not None
    assert placed.requests["first_token_step"].count() >= 0.97 * requests.height
    assert right_steps(placed, run) > 0.97


def held_up(requests, every_us, longest_us, seed):
    """Stamp tokens late, as a front end does that is held up at random times."""
    draw = np.random.default_rng(seed)
    arrival_us = requests["arrival_ns"].to_numpy() / 1e3
    arrival_us -= arrival_us.min()
    begin_us = np.cumsum(draw.exponential(every_us, int(2 * (arrival_us.max() + 1e7) / every_us)))
    end_us = begin_us + draw.uniform(0, longest_us, len(begin_us))

    def late(name):
        at_us = arrival_us + requests[name].to_numpy()
        until_us = end_us[np.maximum(np.searchsorted(begin_us, at_us, side="right") - 1, 0)]
        return pl.Series(name, np.where(at_us >= begin_us[0], np.maximum(at_us, until_us), at_us) - arrival_us)

    return requests.with_columns(late("ttft_us"), late("e2e_us"))


@pytest.mark.slow
def test_a_slow_front_end_leaves_most_requests_on_whole_seconds():
    run = synth(SynthOptions(requests=300, rate_per_s=3.0, seed=5, max_num_seqs=8))
    requests = held_up(in_unix(stock_requests(run)), 2e5, 1e5, 5)
    placed = place_on_log(requests, log_clock(logged(run, fine=False)), LIMITS)
    assert 0.9 * requests.height <= placed.requests["first_token_step"].count() < 0.97 * requests.height
    assert right_steps(placed, run) > 0.9


@pytest.mark.slow
def test_stamps_before_the_first_line_match_no_request():
    run = synth(SynthOptions(requests=300, rate_per_s=20.0, seed=6, max_num_seqs=12))
    requests = held_up(in_unix(stock_requests(run)), 5e5, 3e5, 6)
    assert place_on_log(requests, log_clock(logged(run, fine=False)), LIMITS) is None


@pytest.mark.slow
def test_spans_of_another_server_match_no_line():
    other = synth(SynthOptions(requests=300, rate_per_s=8.0, seed=6))
    assert place_on_log(in_unix(stock_requests(other)), log_clock(logged(busy_run())), LIMITS) is None
