"""Latencies from averages over the training part, worked out by hand."""

from __future__ import annotations

import polars as pl
import pytest

from tracefit.fit.latency import averages_only

STEPS = pl.DataFrame(
    {
        "num_decode_reqs": [2, 1, 0, 4],
        "num_prefill_reqs": [0, 1, 3, 0],
        "prefill_tokens": [0, 100, 600, 0],
        "decode_tokens": [2, 1, 0, 4],
        "context_tokens": [50, 30, 0, None],
        "predicted_us": [10_000.0, 16_000.0, 40_000.0, None],
    }
)
REQUESTS = pl.DataFrame(
    {
        "prompt_tokens": [100, 300],
        "cached_prompt_tokens": [0, 100],
        "output_tokens": [11, 1],
        "forced_requeue_after_us": [5_000.0, 0.0],
        "forced_requeue_before_us": [0.0, 3_000.0],
    }
)


def _step_time(rows):
    """Take 1 ms, 10 us per prompt token and 100 us per decode token."""
    return (1_000 + 10 * rows["prefill_tokens"] + 100 * rows["decode_tokens"]).to_numpy()


def _averaged(prompt_tokens, *, budget=None, lag=0, steps=STEPS, requests=REQUESTS):
    return averages_only(
        pl.DataFrame({"prompt_tokens": prompt_tokens}, schema={"prompt_tokens": pl.Int64}),
        steps,
        requests,
        _step_time,
        overheads_us={
            "admission": pl.Series([2_000.0] * len(prompt_tokens)),
            "queue_wait": 200.0,
            "departure": None,
        },
        token_budget=budget,
        lag_steps=lag,
    )


def test_a_prompt_is_computed_in_the_mean_step_with_its_own_tokens():
    averaged = _averaged([400])
    # A quarter of the prompt is in the cache. Of four prompts three were in the step with no decode token, and each of them
    # had 400 other tokens beside it: 300 others on average, and a quarter of a decode token.
    step = 1_000 + 10 * (300 + 300) + 100 / 4
    # 3 ms of waits after preemptions, before the first token of one of two requests.
    assert averaged["mean_prefill_us"].item() == pytest.approx(step + 1_500)
    # Two requests saw a decode step of 10 ms, one saw one of 16 ms; the batch of four is not predicted. Waits after
    # preemptions: 5 ms over the 10 tokens after the first ones.
    assert averaged["mean_itl_us"].item() == (2 * 10_000 + 16_000) / 3 + 500
    assert averaged.select("mean_admission_us", "mean_queue_wait_us", "mean_departure_us").row(0) == (
        2_000,
        200,
        None,
    )


def test_a_prompt_above_the_token_budget_takes_several_steps():
    averaged = _averaged([800], budget=400)
    # 600 tokens to compute, 399.75 left of a step: two steps of 300, which the others fill up to what is left.
    step = 1_000 + 10 * 399.75 + 100 / 4
    assert averaged["mean_prefill_us"].item() == pytest.approx(2 * step + 1_500)


def test_scheduling_ahead_adds_a_step_to_the_first_token():
    without, with_lag = (_averaged([400], lag=lag)["mean_prefill_us"].item() for lag in (0, 1))
    assert with_lag - without == pytest.approx(12_000)


def test_unknown_values_stay_unknown():
    assert _averaged([None])["mean_prefill_us"].to_list() == [None]
    row = _averaged([400], steps=STEPS.clear(), requests=REQUESTS.clear()).row(0, named=True)
    assert [row[f"mean_{n}_us"] for n in ("prefill", "itl", "departure")] == [None] * 3
