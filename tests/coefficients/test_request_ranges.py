"""Ranges of composed latencies: described from tables by hand, calibrated on requests whose errors are planted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

import tracefit
from tracefit.coefficients.files import read_coefficients
from tracefit.coefficients.request_ranges import (
    described_requests,
    input_ranges,
    predicted_requests,
    request_ranges,
    workload_of,
)
from tracefit.synth import SynthOptions, surge_phases, synth, write_run
from tracefit.tables.schema import REQUEST

ENGINE = {"run_id": "r", "server": "s", "epoch": 0}


def _requests(**columns):
    rows = {
        "prompt_tokens": [40, 60, None],
        "cached_prompt_tokens": [None, 20, None],
        "output_tokens": [3, 5, 7],
        "max_tokens": [8, 16, None],
        "finish_status": ["stop", "aborted", "stop"],
        "queued_ns": [10, 25, 30],
        "first_token_step": [2, 3, 4],
        "finished_step": [4, 6, 9],
        "ttft_us": [1.0, 2.0, 3.0],
        "itl_us": [1.0, 2.0, 3.0],
        "e2e_us": [4.0, 5.0, 6.0],
        "split": ["train", "train", "holdout"],
        "trace_id": ["t0", "t1", "t2"],
        "core_request_id": ["c0", "c1", "c2"],
    }
    return pl.DataFrame(rows | columns).with_columns(**{k: pl.lit(v) for k, v in ENGINE.items()})


def _timeline():
    return pl.DataFrame(
        {
            "step_id": [1, 2, 3, 4, 5, 6],
            "ts_start_ns": [0, 20, 40, 60, 80, 100],
            "num_decode_reqs": [0, 4, 5, 3, 7, 9],
            "num_prefill_reqs": [1, 0, 0, 0, 0, 0],
            "prefill_tokens": [40, 0, 0, 0, 0, 0],
            "context_tokens": [0, 400, 500, 420, 700, 900],
            "waiting_depth": [2, 6, 0, 0, 0, 0],
            "running_after": [1, 3, 4, 3, 7, 9],
        }
    ).with_columns(**{k: pl.lit(v) for k, v in ENGINE.items()})


def test_the_mean_request_is_that_of_the_training_part():
    mean = workload_of(_requests(), _timeline())
    assert mean is not None
    assert (mean.requests, mean.prompt_tokens, mean.cached_prompt_tokens) == (2, 50, 10)
    assert (mean.output_tokens, mean.max_tokens) == (4, 12)
    assert mean.prompt_steps == (), "fewer steps with prompts than groups"
    assert workload_of(_requests(output_tokens=[0, 0, 7]), _timeline()) is None


def test_running_requests_are_weighted_by_their_steps():
    mean = workload_of(_requests(), _timeline())
    assert mean is not None
    # 3 steps of one with 40 + 1.5 tokens and 8 - 1.5 to go, 5 of one with 60 + 2.5 and 16 - 2.5.
    assert mean.running_context_tokens == pytest.approx((3 * 41.5 + 5 * 62.5) / 8)
    assert mean.running_remaining_tokens == pytest.approx((3 * 6.5 + 5 * 13.5) / 8)


def test_steps_with_prompts_are_grouped_by_tokens():
    steps = pl.DataFrame(
        {
            "prefill_tokens": [90, 0, 10, 20, 40, None, 30, 50, 60, 80, 100, 70],
            "num_prefill_reqs": [3, 0, 1, 1, 2, None, 1, 2, 2, 3, 4, 3],
        }
    )
    mean = workload_of(_requests(), steps)
    assert mean is not None
    assert [(g.tokens, g.prompts) for g in mean.prompt_steps] == [
        (15, 1),
        (35, 1.5),
        (55, 2),
        (75, 3),
        (95, 3.5),
    ]


def test_request_is_described_by_the_facts_at_its_arrival():
    first, second = described_requests(_requests(), _timeline()).sort("prompt_tokens").to_dicts()
    # In the step before it was queued 2 waited and 1 ran, whatever it decoded beside in steps 3 and 4.
    assert (first["queue"], first["batch"], first["cached"]) == (2, 1, 0)
    assert (second["queue"], second["batch"], second["cached"]) == (6, 3, 20)
    assert (second["measured_ttft_us"], second["measured_e2e_us"]) == (2.0, None), "it was cut off"


def test_complete_journeys_give_the_queue_on_arrival():
    # Requests that come together: the step before shows none of them waiting.
    queue = pl.DataFrame(
        [{"trace_id": "t1", "request_id": "c1", "waiting_ahead": 40, "running_reqs": 32}]
    ).with_columns(**{k: pl.lit(v) for k, v in ENGINE.items()})
    first, second = described_requests(_requests(), _timeline(), queue).sort("prompt_tokens").to_dicts()
    assert (second["queue"], second["batch"]) == (40, 32)
    assert (first["queue"], first["batch"]) == (2, 1), "not in the journeys: as the step before shows"


def test_later_steps_do_not_change_a_description():
    """Later steps may be as full as they like: nobody who asks for a prediction knows them."""
    later = _timeline().with_columns(
        pl.when(pl.col("step_id") > 2).then(99).otherwise(c).alias(c)
        for c in ("num_decode_reqs", "context_tokens", "running_after", "waiting_depth")
    )
    assert described_requests(_requests(), later).equals(described_requests(_requests(), _timeline()))


def test_the_ranges_of_inputs_are_those_of_the_training_part():
    described = described_requests(_requests(), _timeline())
    last = described.tail(1).with_columns(queue=pl.lit(90.0), split=pl.lit("holdout"))
    found = input_ranges(pl.concat([described, last]), _timeline())
    assert found["request"] == {
        "prompt_tokens": (40, 60),
        "output_tokens": (3, 5),
        "cached": (0, 20),
        "queue": (2, 6),
        "batch": (1, 3),
    }
    assert found["step"]["batch"] == (0, 9)
    assert found["step"]["context"] == (100, 140), "400 / 4 to 420 / 3 tokens"
    assert (found["step"]["prefill"], found["step"]["waiting"]) == ((0, 40), (0, 6))


@pytest.mark.long
@pytest.mark.slow
def test_composed_requests_sum_up_under_steady_load(tmp_path):
    """Four steady runs at the edge of their KV cache: what single runs miss either way, they miss by chance.

    Not all of it: on arrival a batch is known that will be another one while the request decodes. ITL is no better than
    a median.
    """
    bias, won = [], []
    for seed in range(3, 7):
        run = SynthOptions(
            name=f"steady-{seed}",
            seed=seed,
            requests=500,
            law="roofline",
            model="llama-70b",
            tp=4,
            num_blocks=900,
            rate_per_s=10.0,
            phases=surge_phases(1.0),
        )
        write_run(synth(run), tmp_path / run.name, formats=("protobuf",))
        fast = tracefit.TrainOptions(fast=True, features="roofline")
        out = tracefit.run(tmp_path / run.name, tmp_path / f"out-{seed}", options=fast).out
        by_name = {r.latency: r for r in read_coefficients(out / "models" / "alpha.json").requests}
        bias.append(by_name["e2e"].holdout.bias_pct)
        won += [by_name[name].holdout.mae < by_name[name].baseline.mae for name in ("ttft", "e2e")]
    assert abs(np.mean(bias)) < 7, bias
    assert all(won), "both beat a constant median on each run"


@pytest.mark.parametrize("deployment", ["llama-2-70b", "llama-3.1-8b"])
def test_composed_requests_of_the_fixtures_are_close(deployment):
    """fixtures/models/ is what training makes of fixtures/generated/: TTFT and E2E beat a constant median, no latency
    is far off in sum.

    Not ITL: its law has a large constant, and the batch that a request arrives in is not the one it decodes in.
    """
    alpha = read_coefficients(Path(__file__).parents[2] / "fixtures/models/alpha.json")
    by_name = {r.latency: r for r in alpha.requests if r.deployment_id.startswith(deployment)}
    ttft, itl, e2e = by_name["ttft"], by_name["itl"], by_name["e2e"]
    assert ttft.holdout.mae < ttft.baseline.mae
    assert e2e.holdout.mae < e2e.baseline.mae
    assert abs(itl.holdout.bias_pct) < 5
    # The 70B run ends in a longer queue than any it was trained on: part of its wait is extrapolated.
    assert abs(e2e.holdout.bias_pct) < (8 if deployment == "llama-2-70b" else 5)
    for one in by_name.values():
        published = one.low_ratio is not None
        enough = one.requests_held_out >= 10 and one.requests >= 30
        assert published == (enough and round(one.coverage_pct) >= 85)


def _described(models, ratios, split):
    rows = pl.DataFrame(
        {
            "prompt_tokens": [50.0] * len(ratios),
            "output_tokens": [11.0] * len(ratios),
            "cached": [0.0] * len(ratios),
            "queue": [0.0] * len(ratios),
            "batch": [2.0] * len(ratios),
        }
    ).with_columns(pl.lit("x").alias(name) for name in REQUEST)
    predicted = models.predict_request(rows.drop(REQUEST))
    measured = [(predicted[f"{n}_us"] * pl.Series(ratios)).alias(f"measured_{n}_us") for n in ("ttft", "itl", "e2e")]
    described = rows.with_columns(pl.Series("split", split), *measured)
    return predicted_requests(models.deployment(), described)


def test_the_range_is_that_of_the_training_requests(small):
    models = tracefit.load(small)
    trained, later = list(np.linspace(0.8, 1.2, 101)), list(np.linspace(0.8, 1.2, 40))
    rows = _described(models, trained + later, ["train"] * 101 + ["holdout"] * 40)
    ranges = request_ranges("deployment", rows, reference=True)
    assert len(ranges) == 3
    for one in ranges:
        assert (one.low_ratio, one.high_ratio) == (pytest.approx(0.82), pytest.approx(1.18))
        assert one.coverage_pct == pytest.approx(90, abs=0.1), "2 of 40 on either side"
        assert (one.requests, one.requests_held_out, one.holdout.n, one.reason) == (101, 40, 40, None)
        # All requests are alike: boosted trees can say no more of them than the median.
        assert one.gradient_boosting.mae == pytest.approx(one.baseline.mae, rel=0.05)


def test_a_range_that_is_too_wide_is_still_a_range(small):
    models = tracefit.load(small)
    rows = _described(models, [*np.linspace(0.8, 1.2, 101), *[1.0] * 40], ["train"] * 101 + ["holdout"] * 40)
    for one in request_ranges("deployment", rows, reference=False):
        assert (one.coverage_pct, one.reason, one.gradient_boosting) == (100, None, None)
        assert one.low_ratio == pytest.approx(0.82)


def test_requests_that_get_no_range_do_not_count_for_it(small):
    """Prompts of 61 tokens are outside the range of steps: they are far off, and `predict` gives them no range."""
    models = tracefit.load(small)
    rows = _described(models, [*np.linspace(0.8, 1.2, 141)], ["train"] * 101 + ["holdout"] * 40)
    far = rows.with_columns(measured_ttft_us=pl.col("measured_ttft_us") * 50, out_of_range=pl.lit("prefill_tokens"))
    alone, both = (request_ranges("deployment", r, reference=False)[0] for r in (rows, pl.concat([rows, far])))
    assert (both.low_ratio, both.high_ratio) == (alone.low_ratio, alone.high_ratio)
    assert (both.requests_held_out, both.holdout.n) == (40, 80), "the errors are those of all requests"


@pytest.mark.parametrize(
    ("later", "said"),
    [
        (np.linspace(1.3, 1.5, 40), "0 % of the held-out"),
        (np.full(5, 1.0), "too few"),
    ],
)
def test_range_not_confirmed_by_the_holdout_is_null(small, later, said):
    models = tracefit.load(small)
    trained = list(np.linspace(0.8, 1.2, 101))
    rows = _described(models, trained + list(later), ["train"] * 101 + ["holdout"] * len(later))
    for one in request_ranges("deployment", rows, reference=False):
        assert (one.low_ratio, one.high_ratio) == (None, None)
        assert said in one.reason
