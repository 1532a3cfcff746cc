"""Predictions of coefficient files, by hand: a server of 8 slots, 100 tokens a step and 100 blocks of 10 tokens.

A step takes 1,000 us + 10 per prefill token + 50 per decoding request + 0.5 per context token + 100 times the share of
prefill tokens.
"""

from __future__ import annotations

import json
import subprocess
import sys

import polars as pl
import pytest
from msgspec.structs import replace

import tracefit
from tracefit.errors import UsageError
from tracefit.models import targets


def test_step_is_described_by_its_batch_and_prompt_tokens(small):
    # 1,000 + 10 * 40 + 50 * 4 + 0.5 * 4 * 30 + 100 * 40 / 44
    prediction = tracefit.load(small).predict_step(batch=4, context=30, prefill=40)
    assert prediction.step.value_us == pytest.approx(1660 + 100 * 40 / 44)
    assert (prediction.assumed, prediction.out_of_range) == ((), ())


def test_range_is_that_of_held_out_rows_of_the_kind(small):
    models = tracefit.load(small)
    decode = models.predict_step(batch=4).step
    assert decode.value_us == 1200
    # |p - a| / a <= 0.2 on nine of ten rows: a from p / 1.2 to p / 0.8; mixed steps 0.6: p / 1.6 to p / 0.4.
    assert (decode.low_us, decode.high_us) == (pytest.approx(1000), pytest.approx(1500))
    mixed = models.predict_step(prefill=50).step
    assert mixed.value_us == 1600
    assert (mixed.low_us, mixed.high_us) == (pytest.approx(1000), pytest.approx(4000))


def test_errors_beyond_the_value_itself_leave_the_range_open(small, parts, write):
    step = parts["step"]
    step["validation"]["holdout"]["p90_ape_pct"] = 100.0
    write("beta", step)
    prediction = tracefit.load(small).predict_step(batch=4).step
    assert (prediction.low_us, prediction.high_us) == (pytest.approx(600), None)


def test_input_outside_the_training_range_is_named(small):
    prediction = tracefit.load(small).predict_step(batch=7, prefill=61)
    assert len(prediction.out_of_range) == 2
    assert "prefill_tokens 61 is outside 0 to 60" in prediction.out_of_range[0]
    assert "num_decode_reqs 7 is outside 0 to 6" in prediction.out_of_range[1]


def test_feature_without_a_term_has_a_training_range(small, parts, write):
    """Training saw prompts of up to 27 tokens a step, which say nothing about 90: that prediction has no interval."""
    flat = {
        **parts["step"],
        "terms": [parts["step"]["terms"][1]],
        "features_left_out": [
            {
                "feature": "prefill_tokens",
                "reason": "its coefficient is not above zero in these runs",
                "training_range": [0, 27],
            },
            {"feature": "context_tokens", "reason": "not known in these runs", "training_range": None},
            {"feature": "tiles", "reason": "collinear", "training_range": [0, 1]},
        ],
    }
    write("beta", flat)
    models = tracefit.load(small)
    inside, outside = (models.predict_step(batch=4, context=100, prefill=p) for p in (27, 90))
    assert (inside.out_of_range, inside.step.low_us is None) == ((), False)
    assert outside.step.value_us == inside.step.value_us
    assert outside.step.low_us is None
    (line,) = outside.out_of_range
    assert "prefill_tokens 90 is outside 0 to 27, the training range; the model has no term for it" in line
    rows = models.predict_step(pl.DataFrame({"batch": [4, 4, 7], "context": 100, "prefill": [27, 90, 90]}))
    # A term outside its range says enough.
    assert rows["out_of_range"].to_list() == [None, "prefill_tokens", "num_decode_reqs"]
    assert rows["low_us"].is_null().to_list() == [False, True, True]


IMPOSSIBLE_STEPS = [
    ({"batch": 9}, "batch: 9 is more than this server's max_num_seqs of 8: it runs no more at a time"),
    (
        {"batch": 8, "prefill": 93},
        "batch \\+ prefill: 101 is more than this server's max_num_batched_tokens of 100",
    ),
    ({"batch": 4, "context": 201}, "context: 201 is more than this server's max_model_len of 200"),
    ({"batch": -5}, "batch: -5 is not a count"),
    (
        {"num_decode_reqs": -4, "prefill_tokens": 1, "context_tokens": 0, "decode_tokens": 1},
        "num_decode_reqs: -4 is not a count",
    ),
]
IMPOSSIBLE_REQUESTS = [
    (
        {"prompt_tokens": 201},
        "prompt_tokens \\+ output_tokens: 202 is more than this server's max_model_len of 200",
    ),
    ({"prompt_tokens": 150, "output_tokens": 51}, "201 is more than .* 200: it refuses such a request"),
    ({"batch": 9, "queue": 1}, "batch: 9 is more than this server's max_num_seqs of 8"),
    ({"batch": 2, "context": 201}, "context: 201 is more than this server's max_model_len of 200"),
    ({"queue": -5}, "queue: -5 is not a count"),
    ({"cached": 10}, "cached: must be less than the prompt tokens"),
]


@pytest.fixture
def short(small, parts, write):
    """The small server, which takes requests of at most 200 tokens."""
    step = parts["step"]
    step["deployment"]["settings"]["max_model_len"] = 200
    write("beta", step)
    return tracefit.load(small)


@pytest.mark.parametrize(("step", "said"), IMPOSSIBLE_STEPS)
def test_step_beyond_server_limits_is_refused(short, step, said):
    most = {"batch": 8, "context": 200, "prefill": 92}
    assert short.predict_step(**most).step.value_us > 0
    if "batch" in step:
        with pytest.raises(UsageError, match=said):
            short.predict_step(**step)
    columns = dict.fromkeys(step, 1) if "batch" not in step else most
    with pytest.raises(UsageError, match=f"row 3: {said}.*2 such rows"):
        short.predict_step([columns, columns, columns | step, columns, columns | step])


@pytest.mark.parametrize(("request_", "said"), IMPOSSIBLE_REQUESTS)
def test_request_that_the_server_refuses_is_refused(short, request_, said):
    most = {"prompt_tokens": 10, "output_tokens": 1}
    assert short.predict_request(prompt_tokens=150, output_tokens=50, batch=8).ttft.value_us > 0
    with pytest.raises(UsageError, match=said):
        short.predict_request(**(most | request_))
    with pytest.raises(UsageError, match=f"row 2: .*{said}"):
        short.predict_request([most, most | request_, most])


def test_first_impossible_row_is_named(short):
    """Whatever rule it breaks: the second breaks the last rule, the third the first."""
    with pytest.raises(UsageError, match="row 2: context: 201"):
        short.predict_step({"batch": [1, 1, -1], "context": [1, 201, 1]})


def test_missing_context_is_an_assumption(small):
    assert tracefit.load(small).predict_step(batch=4).assumed == (
        "context 0: not given, as if the batch had no tokens in its caches",
    )
    stated = tracefit.load(small).predict_step(batch=4, features={"context_tokens": 100})
    assert stated.assumed == ()


def test_input_without_effect_is_named_with_its_check(small, parts, write):
    """The model has only the batch; training saw up to half of a cache, whose number of blocks the server does not
    state."""
    step = parts["step"]
    del step["deployment"]["settings"]["num_gpu_blocks"]
    step["terms"] = [parts["step"]["terms"][1]]
    step["features_left_out"] = [
        {"feature": "kv_usage_ratio", "reason": "collinear", "training_range": [0, 0.5]},
        {"feature": "waiting_depth", "reason": "collinear", "training_range": [0, 3]},
    ]
    write("beta", step)
    models = tracefit.load(small)
    said = models.predict_step(batch=4, context=300, waiting=2)
    (line,) = said.assumed
    assert line.startswith("context 300 changes nothing: no term of beta.cycle_time depends on it; ")
    assert line.endswith("with num_gpu_blocks as a feature, its range is checked")
    # 4 * (300 / 10 + 0.5) = 122 blocks.
    for blocks, outside in ((1001, 0), (201, 1)):
        checked = models.predict_step(batch=4, context=300, features={"num_gpu_blocks": blocks})
        assert (checked.assumed, len(checked.out_of_range)) == ((), outside)
    assert models.predict_step(batch=4).assumed == ()
    (small / "alpha.json").unlink()
    inputs = {"prompt_tokens": 10, "output_tokens": 5, "batch": 4, "context": 300}
    assert line in tracefit.load(small).predict_request(**inputs).assumed
    assert line not in tracefit.load(small).predict_request(**inputs, features={"num_gpu_blocks": 900}).assumed


def test_line_below_0_is_reported_as_unknown(small, parts, write):
    """-1,000 us + 100 per token ahead: with 5 tokens ahead it is 500 us below 0."""
    wait = parts["wait"]
    wait["regimes"][0]["intercept"]["value"] = -1000.0
    wait["validation"] = parts["step"]["validation"]
    write("alpha", parts["admission"], wait)
    models = tracefit.load(small)
    found = models.predict_request(prompt_tokens=50, output_tokens=5, queue=1)
    assert found.overheads["queue_wait"].value_us == 0
    line = "alpha.queue_wait: the model extrapolates to -500 us here; reported as 0, which means unknown, not no time"
    assert line in found.out_of_range
    longer = models.predict_request(prompt_tokens=50, output_tokens=15, queue=1)
    assert longer.overheads["queue_wait"].value_us == 500
    assert not [text for text in longer.out_of_range if "queue_wait" in text]
    rows = [{"free_slots": 0, "block_demand": 0, "kv_blocks_free": 9, "outputs_ahead": t} for t in (5, 10, 15)]
    wait = tracefit.predict(models, rows, of="alpha.queue_wait").predictions
    assert [(row["predicted_us"], row["low_us"], row["out_of_range"]) for row in wait] == [
        (0, None, "predicted_us"),
        (0, 0, None),
        (500, pytest.approx(500 / 1.2), None),
    ]


def test_a_long_request_leaves_each_range_in_one_line(small):
    found = tracefit.load(small).predict_request(prompt_tokens=900, output_tokens=1).out_of_range
    assert [line for line in found if "prefill_tokens" in line] == [
        "beta.cycle_time: prefill_tokens 100 is outside 0 to 60, the training range"
    ]


def test_a_feature_that_nothing_reads_is_refused(small):
    models = tracefit.load(small)
    with pytest.raises(UsageError, match=r"reads contxt_tokens; did you mean context_tokens\?"):
        models.predict_step(batch=4, features={"contxt_tokens": 3})
    with pytest.raises(UsageError, match="reads bogus; their features are "):
        models.predict_request(prompt_tokens=10, output_tokens=5, features={"bogus": 3})


def test_a_feature_given_by_name_wins(small):
    prediction = tracefit.load(small).predict_step(batch=4, context=30, features={"context_tokens": 1000})
    assert prediction.step.value_us == 1000 + 200 + 500


def test_a_request_on_an_idle_engine(small):
    """Admission is the API's work, 300 + 2 * 50; the wait is 70; the prompt takes one step; the request decodes by
    itself."""
    prediction = tracefit.load(small).predict_request(prompt_tokens=50, output_tokens=11)
    assert prediction.overheads["admission"].value_us == 400
    assert prediction.overheads["queue_wait"].value_us == 70
    assert prediction.prefill.value_us == 1000 + 500 + 100
    # Halfway through its output it has 50 + 5.5 tokens in the cache.
    assert prediction.itl.value_us == 1000 + 50 + 0.5 * 55.5
    assert prediction.ttft.value_us == 400 + 70 + 1600
    assert prediction.e2e.value_us == pytest.approx(2070 + 10 * 1077.75)
    assert prediction.overheads["departure"].value_us == 230
    assert "batch 0: nothing else runs" in prediction.assumed


def test_a_request_waits_half_a_step_for_the_boundary(small):
    prediction = tracefit.load(small).predict_request(prompt_tokens=50, output_tokens=11, batch=2, context=100)
    cycle = 1000 + 100 + 0.5 * 200
    assert prediction.overheads["admission"].value_us == 400 - 20 + cycle / 2
    assert (prediction.overheads["admission"].low_us, prediction.overheads["admission"].high_us) == (
        380,
        380 + cycle,
    )
    assert prediction.overheads["queue_wait"].value_us == 70, "6 slots and 80 blocks are free"
    assert prediction.itl.value_us == pytest.approx(1000 + 150 + 0.5 * 255.5)


def test_a_queue_makes_a_request_wait_for_the_outputs_ahead(small):
    """12 ahead with 11 tokens each: 5,000 + 100 * 132. Slots hold 8, blocks 100 / (5.55 + 0.5) = 16: 8 run."""
    prediction = tracefit.load(small).predict_request(prompt_tokens=50, output_tokens=11, queue=12)
    assert prediction.overheads["queue_wait"].value_us == 18_200
    # The model's errors are those on the outputs that were ahead, not on 12 times the mean.
    assert (prediction.overheads["queue_wait"].low_us, prediction.overheads["queue_wait"].high_us) == (
        None,
        None,
    )
    assert any(text.startswith("batch 8:") for text in prediction.assumed)
    # One of the 8 has to go before it runs: it decodes with 7 others.
    assert prediction.itl.value_us == pytest.approx(1000 + 50 * 8 + 0.5 * 8 * 55.5)


@pytest.fixture
def busy(small, parts, write):
    """The small server, trained on requests of 60 prompt and 10 output tokens, 20 allowed; and how well it predicts."""
    mean = {
        "requests": 40,
        "prompt_tokens": 60,
        "cached_prompt_tokens": 0,
        "output_tokens": 10,
        "max_tokens": 20,
    }
    step = parts["step"]
    step["deployment"]["workload"] = mean
    write("beta", step)
    alpha = json.loads((small / "alpha.json").read_text())
    alpha["requests"] = [_range("itl", 0.8, 1.5), _range("ttft", None, None)]
    (small / "alpha.json").write_text(json.dumps(alpha))
    return tracefit.load(small)


def _range(latency, low, high):
    metrics = dict.fromkeys(("mape_pct", "mdape_pct", "mae", "rmse", "r2", "bias_pct", "p99_ape_pct"))
    errors = {"n": 50, **metrics, "mdape_pct": 31.0, "p90_ape_pct": 77.0}
    return {
        "deployment_id": "small.gpu.tp1.00000000",
        "latency": latency,
        "low_ratio": low,
        "high_ratio": high,
        "requests": 40,
        "coverage_pct": 90.0,
        "reason": "60 % of the held-out requests lie in it" if low is None else None,
        "holdout": errors,
        "baseline": errors,
    }


def test_prompts_of_others_lengthen_the_steps_of_a_request(busy):
    """2 others of 10 output tokens: a fifth of the steps carries a prompt of 60, 12 tokens a step on average."""
    prediction = busy.predict_request(prompt_tokens=50, output_tokens=11, batch=2, context=100)
    alone = 1000 + 50 * 3 + 0.5 * 255.5
    mixed = alone + 10 * 60 + 100 * 60 / 63
    assert prediction.itl.value_us == pytest.approx(0.8 * alone + 0.2 * mixed)
    # Its own prompt shares its step with 12 tokens of others.
    assert prediction.prefill.value_us == pytest.approx(1000 + 50 * 2 + 0.5 * 200 + 10 * 62 + 100 * 62 / 64)
    # It meets a step in proportion to how long it is: E[c^2] / E[c], and half of that is left.
    short, long = 1200, 1200 + 600 + 100 * 60 / 62
    met = (0.8 * short**2 + 0.2 * long**2) / (0.8 * short + 0.2 * long)
    assert prediction.overheads["admission"].value_us == pytest.approx(380 + met / 2)
    assert any("prompt 60, output 10; as many arrive as finish" in text for text in prediction.assumed)


@pytest.fixture
def bursty(small, parts, write):
    """The small server, whose prompts came in steps of 30 tokens (one request) and of 90 (two)."""
    step = parts["step"]
    step["deployment"]["workload"] = {
        "requests": 40,
        "prompt_tokens": 60,
        "cached_prompt_tokens": 0,
        "output_tokens": 10,
        "max_tokens": 20,
        "running_context_tokens": 80,
        "running_remaining_tokens": 25,
        "prompt_steps": [{"tokens": 30, "prompts": 1}, {"tokens": 90, "prompts": 2}],
    }
    write("beta", step)
    return tracefit.load(small)


def test_prompts_of_others_come_in_steps_like_those_of_training(bursty):
    """2 others of 10 output tokens: 12 tokens a step, so a fifth of the steps has 30 or 90, one as often as the
    other."""
    prediction = bursty.predict_request(prompt_tokens=50, output_tokens=11, batch=2, context=100)
    alone = 1000 + 50 * 3 + 0.5 * 255.5
    few, many = (alone + 10 * n + 100 * n / (n + 3) for n in (30, 90))
    assert prediction.itl.value_us == pytest.approx(0.8 * alone + 0.1 * few + 0.1 * many)
    # On arrival it meets the step of the mean prompt, a step of 60 in five.
    short, long = 1200, 1200 + 600 + 100 * 60 / 62
    met = (0.8 * short**2 + 0.2 * long**2) / (0.8 * short + 0.2 * long)
    assert prediction.overheads["admission"].value_us == pytest.approx(380 + met / 2)


def test_more_prompts_than_in_training_crowd_every_step(bursty):
    """7 others of 2 output tokens: 3.5 prompts or 210 tokens a step, 3.5 times those of training; a step has room for
    93."""
    prediction = bursty.predict_request(
        prompt_tokens=50, output_tokens=11, batch=7, context=100, features={"others_output": 2}
    )
    assert prediction.itl.value_us == pytest.approx(1000 + 50 * 8 + 0.5 * (700 + 55.5) + 10 * 93 + 100 * 93 / (93 + 8))


def test_running_requests_are_like_those_of_training(bursty):
    assert any("context 80 of the others: the mean" in t for t in _assumed(bursty))
    stated = _assumed(bursty, features={"others_output": 40})
    assert any("context 80 of the others: halfway" in t for t in stated), "60 + 40 / 2"


def _assumed(models, **more):
    return models.predict_request(prompt_tokens=50, output_tokens=11, batch=2, **more).assumed


def test_rows_have_the_same_steps_with_prompts(bursty):
    rows = pl.DataFrame(
        {
            "prompt_tokens": [50, 50, 90],
            "output_tokens": [11, 11, 500],
            "batch": [2, 7, 8],
            "context": [None, 100, None],
            "queue": [0, 0, 3],
            "others_output": [None, 2.0, 40.0],
        }
    )
    assert_rows_are_as_single_requests(bursty, rows)


def assert_rows_are_as_single_requests(models, rows):
    for row, found in zip(rows.to_dicts(), models.predict_request(rows).to_dicts(), strict=True):
        features = {n: row.pop(n) for n in ("others_output",) if n in row}
        one = models.predict_request(**row, features={n: v for n, v in features.items() if v is not None})
        parts = one.overheads | {name: getattr(one, name) for name in ("prefill", "itl", "ttft", "e2e")}
        for part, duration in parts.items():
            assert found[f"{part}_us"] == pytest.approx(duration.value_us), (row, part)
        assert (found["out_of_range"] is None) == (not one.out_of_range), (row, one.out_of_range)
        for part in ("ttft", "itl", "e2e"):
            ends = (parts[part].low_us, parts[part].high_us)
            assert (found[f"{part}_low_us"], found[f"{part}_high_us"]) == (
                ends if ends[0] is None else pytest.approx(ends)
            )


def test_those_ahead_are_like_the_requests_trained_on(busy):
    """3 ahead with 20 tokens allowed each: 5,000 + 100 * 60, though the request itself is far longer."""
    prediction = busy.predict_request(prompt_tokens=90, output_tokens=500, queue=3, batch=8)
    assert prediction.overheads["queue_wait"].value_us == 11_000


def test_lengths_of_others_can_be_stated(small):
    inputs = {"prompt_tokens": 50, "output_tokens": 11, "batch": 2, "context": 100}
    models = tracefit.load(small)
    stated = models.predict_request(**inputs, features={"others_prompt": 60, "others_output": 10})
    assert stated.itl.value_us > models.predict_request(**inputs).itl.value_us


def test_a_composed_latency_has_the_range_measured_on_requests(busy):
    prediction = busy.predict_request(prompt_tokens=40, output_tokens=11, batch=2, context=100)
    assert prediction.itl.low_us == pytest.approx(0.8 * prediction.itl.value_us)
    assert prediction.itl.high_us == pytest.approx(1.5 * prediction.itl.value_us)
    assert (prediction.ttft.low_us, prediction.ttft.high_us) == (None, None), "none was published"
    assert prediction.prefill.low_us is None, "intervals of steps do not add up"
    assert prediction.ranges == (
        (
            "TTFT: no range, 60 % of the held-out requests lie in it; predictions of 50 held-out requests were off "
            "by 31 % in the median, nine of ten by less than 77 %"
        ),
        "ITL: 90 % of 50 held-out requests lie in it",
        "E2E: no range, because the files have no ranges of requests",
    )


def test_prediction_outside_the_training_range_has_no_range(busy):
    prediction = busy.predict_request(prompt_tokens=90, output_tokens=11)
    assert any("prefill_tokens 90" in text for text in prediction.out_of_range)
    assert (prediction.itl.low_us, prediction.itl.high_us) == (None, None)
    step = busy.predict_step(batch=2, prefill=90)
    assert (step.step.low_us, step.step.high_us) == (None, None)
    assert busy.predict_step(batch=2, prefill=50).step.low_us is not None


def test_rows_have_the_same_prompts_of_others(busy):
    rows = pl.DataFrame(
        {
            "prompt_tokens": [50, 250, 90, 50],
            "output_tokens": [11, 1, 500, 7],
            "batch": [2, 2, 8, 0],
            "context": [100, 0, None, None],
            "queue": [0, 0, 3, 0],
            "others_output": [None, None, 4.0, None],
        }
    )
    assert_rows_are_as_single_requests(busy, rows)


def test_long_prompt_takes_several_steps_of_the_budget(small):
    """Beside 2 decoding requests 98 tokens fit a step: 250 tokens are 98 + 98 + 54."""
    prediction = tracefit.load(small).predict_request(prompt_tokens=250, output_tokens=1, batch=2, context=0)
    assert prediction.prefill_steps == 3
    shares = sum(100 * n / (n + 2) for n in (98, 98, 54))
    assert prediction.prefill.value_us == pytest.approx(3 * 1100 + 10 * 250 + shares)
    assert prediction.e2e == prediction.ttft, "one token: nothing is left to decode"


def test_cached_prompt_tokens_need_no_prefill(small):
    prediction = tracefit.load(small).predict_request(prompt_tokens=250, output_tokens=1, cached=240)
    assert (prediction.prefill_steps, prediction.prefill.value_us) == (1, 1000 + 100 + 100)


def test_missing_model_is_left_out_and_named(small, parts, write):
    write("alpha", parts["wait"])
    prediction = tracefit.load(small).predict_request(prompt_tokens=50, output_tokens=11)
    assert (prediction.overheads["admission"], prediction.ttft, prediction.e2e) == (None, None, None)
    assert prediction.overheads["queue_wait"].value_us == 70
    assert any("alpha.admission" in text for text in prediction.assumed)


def test_wait_without_a_queue_in_training_is_named(small, parts, write):
    wait = parts["departure"] | {"name": "alpha.queue_wait", "terms": []}
    write("alpha", wait)
    models = tracefit.load(small)
    inputs = {"prompt_tokens": 50, "output_tokens": 11}
    assert any("training shows no wait" in text for text in models.predict_request(**inputs, queue=3).out_of_range)
    assert not any("training shows no wait" in text for text in models.predict_request(**inputs).out_of_range)


def test_wait_without_a_queue_term_is_that_of_the_outputs_ahead(small, parts, write):
    """8 slots are full: 4 have to leave before this one runs. 11 steps each, 8 at a time."""
    wait = parts["departure"] | {"name": "alpha.queue_wait", "terms": []}
    write("alpha", parts["admission"], wait, parts["departure"])
    models = tracefit.load(small)
    inputs = {"prompt_tokens": 50, "output_tokens": 11, "context": 60}
    queued = models.predict_request(**inputs, queue=3)
    # It decodes beside 7 others of 60 tokens, halfway through its own output.
    cycle = 1000 + 50 * 8 + 0.5 * (7 * 60 + 55.5)
    found = queued.overheads["queue_wait"]
    assert found.value_us == pytest.approx(200 + 4 * 11 * cycle / 8)
    assert (found.low_us, queued.ttft.low_us, queued.e2e.low_us) == (None, None, None)
    assert any("outputs ahead * step time / slots" in text for text in queued.out_of_range)
    empty = models.predict_request(**inputs, batch=8)
    assert queued.ttft.value_us - empty.ttft.value_us == pytest.approx(3 * 11 * cycle / 8)
    # Two slots are free: none of two has to wait, the third one does.
    free = [models.predict_request(**inputs, queue=q, batch=6).overheads["queue_wait"] for q in (1, 2)]
    assert free[0].value_us == 200
    assert free[1].value_us == pytest.approx(200 + 11 * (1000 + 50 * 7 + 0.5 * (6 * 60 + 55.5)) / 8)
    rows = pl.DataFrame([inputs | {"queue": q, "batch": b} for q in (0, 2, 500) for b in (0, 6, 8)])
    assert_rows_are_as_single_requests(models, rows)
    assert models.predict_request(rows)["out_of_range"].str.contains("queue").fill_null(value=False).to_list()[3:] == [
        *(False, True, True),
        *(True, True, True),
    ]


@pytest.mark.mostly_slow(every=5)
@pytest.mark.parametrize("has_queue_term", [True, False])
@pytest.mark.parametrize("batch", [None, 0, 3, 7, 8])
def test_no_answer_falls_as_the_queue_grows(small, parts, write, batch, has_queue_term):
    """Also where the line of those that waited is below 0 for a short queue, or an admission falls with the queue."""
    wait = parts["wait"] if has_queue_term else parts["departure"] | {"name": "alpha.queue_wait", "terms": []}
    if has_queue_term:
        wait["regimes"][0]["intercept"]["value"] = -10_000.0
    admission = parts["departure"] | {
        "name": "alpha.admission",
        "intercept": {"value": 900.0},
        "terms": [{"feature": "waiting_depth", "unit": "us", "value": -7.0, "training_range": [0, 1000]}],
    }
    write("alpha", admission, wait)
    models = tracefit.load(small)
    asked = [{"prompt_tokens": 50, "output_tokens": 11, "queue": q, "batch": batch} for q in range(40)]
    times = [models.predict_request(**each).ttft.value_us for each in asked]
    assert times == sorted(times)
    assert times[-1] > 5 * times[0]
    assert models.predict_request(asked)["ttft_us"].to_list() == pytest.approx(times)


def test_every_input_beyond_training_is_named(small, parts, write):
    """Also those that no feature shows: in training 2 waited at most, prompts had 60 tokens, and 5 requests ran."""
    step = parts["step"]
    step["deployment"]["input_ranges"] = {
        "request": {"queue": [0, 2], "prompt_tokens": [10, 60], "batch": [0, 5]},
        "step": {"batch": [0, 5], "waiting": [0, 2], "prefill": [0, 60]},
    }
    write("beta", step)
    models = tracefit.load(small)
    asked = {"prompt_tokens": 62, "output_tokens": 5, "queue": 3, "batch": 6}
    beyond = models.predict_request(**asked).out_of_range
    for text in (
        "queue 3 is outside 0 to 2, the range of requests in training",
        "prompt_tokens 62 is outside 10 to 60",
        "batch 6 is outside 0 to 5",
    ):
        assert any(text in line for line in beyond), beyond
    inside = {"prompt_tokens": 20, "output_tokens": 5, "queue": 0, "batch": 5}
    assert models.predict_request(**inside).out_of_range == ()
    rows = models.predict_request([inside, asked])["out_of_range"].to_list()
    assert rows[0] is None
    assert {"queue", "prompt_tokens", "batch"} <= set(rows[1].split(", "))
    alone = models.predict_step(batch=4, waiting=3)
    assert alone.out_of_range == ("waiting 3 is outside 0 to 2, the range of steps in training",)
    assert (alone.step.low_us, alone.step.high_us) == (None, None)
    steps = models.predict_step([{"batch": 4, "waiting": w} for w in (2, 3)])
    assert steps["out_of_range"].to_list() == [None, "waiting"]
    # The feature that is the input says it already.
    assert len(models.predict_step(batch=2, prefill=61).out_of_range) == 1


def test_rows_of_requests_have_the_ranges_of_single_ones(busy):
    rows = busy.predict_request(
        [{"prompt_tokens": p, "output_tokens": 11, "batch": 2, "context": 100} for p in (40, 90)]
    )
    assert rows["out_of_range"].to_list() == [None, "prefill_tokens"]
    inside, outside = rows.to_dicts()
    assert inside["itl_low_us"] == pytest.approx(0.8 * inside["itl_us"])
    assert inside["itl_high_us"] == pytest.approx(1.5 * inside["itl_us"])
    assert (inside["ttft_low_us"], outside["itl_low_us"], outside["itl_high_us"]) == (None, None, None)


def test_a_step_ahead_makes_the_prompt_wait_a_cycle_more(small, parts, write):
    step = parts["step"]
    step["deployment"]["settings"]["async_scheduling"] = True
    inputs = {"prompt_tokens": 50, "output_tokens": 1, "batch": 2, "context": 100}
    before = tracefit.load(small).predict_request(**inputs).prefill.value_us
    write("beta", step)
    prediction = tracefit.load(small).predict_request(**inputs)
    assert prediction.prefill.value_us == pytest.approx(before + 1200)
    assert any("a step ahead" in text for text in prediction.assumed)


def test_an_unknown_feature_has_the_middle_of_its_range(small, parts, write):
    term = {"feature": "arrival_rate_per_s", "unit": "us", "value": 2.0, "training_range": [10, 30]}
    wait = parts["departure"] | {"name": "alpha.queue_wait", "terms": [term]}
    write("alpha", wait)
    prediction = tracefit.load(small).predict_request(prompt_tokens=50, output_tokens=1)
    assert prediction.overheads["queue_wait"].value_us == 200 + 2 * 20
    assert any("arrival_rate_per_s 20" in text for text in prediction.assumed)


STRANGE = [
    ({"prompt_tokens": 50, "output_tokens": 0}, "at least 1 output token"),
    ({"prompt_tokens": 50, "output_tokens": 1, "cached": 50}, "cached"),
    ({"prompt_tokens": 50, "output_tokens": 1, "queue": -1}, "queue: -1 is not a count"),
    ({"prompt_tokens": 50, "output_tokens": 1, "batch": float("nan")}, "batch: nan is not a count"),
    ({"prompt_tokens": 1e9, "output_tokens": 1}, "more than 10,000 steps"),
]


@pytest.mark.parametrize(("inputs", "says"), STRANGE)
def test_request_that_makes_no_sense_is_refused(small, inputs, says):
    with pytest.raises(UsageError, match=says):
        tracefit.load(small).predict_request(**inputs)
    frame = pl.DataFrame([inputs])
    with pytest.raises(UsageError):
        tracefit.load(small).predict_request(frame)


def test_unknown_feature_of_a_step_is_named(small, parts, write):
    step = parts["step"]
    step["terms"][0] = {"feature": "x", "unit": "us", "value": 1.0, "formula": "mystery * prefill_tokens"}
    write("beta", step)
    with pytest.raises(UsageError, match=r"beta\.cycle_time needs mystery, which is not given"):
        tracefit.load(small).predict_step(batch=1)
    assert tracefit.load(small).predict_step(prefill=3, features={"mystery": 7}).step.value_us == 1121


@pytest.mark.parametrize("inputs", [{"batch": 1}, {"rows": [{"batch": 1}]}], ids=["row", "frame"])
@pytest.mark.parametrize("definitions", [{"a": "b", "b": "a + 1"}, {"a": "a"}])
def test_circle_of_definitions_is_refused(small, parts, write, definitions, inputs):
    circle = {"feature": "f", "unit": "us", "value": 1.0, "formula": "a + 1"}
    step = parts["step"] | {"terms": [circle], "definitions": definitions}
    write("beta", step)
    with pytest.raises(UsageError, match="defined by itself"):
        tracefit.load(small).predict_step(**inputs)


def test_doubling_definitions_cost_only_their_number(small, parts, write):
    chain = {f"d{i}": f"d{i + 1} + d{i + 1}" for i in range(45)} | {"d45": "batch"}
    step = parts["step"] | {
        "terms": [{"feature": "f", "unit": "us", "value": 1.0, "formula": "d0 / d0"}],
        "definitions": chain,
    }
    write("beta", step)
    models = tracefit.load(small)
    assert models.predict_step(batch=3).step.value_us == 1001
    assert models.predict_step(pl.DataFrame({"batch": [3]}))["predicted_us"].to_list() == [1001]


@pytest.fixture
def two_deployments(small, parts, write):
    """The small server and a slower one."""
    other = parts["step"] | {"deployment_id": "large.gpu.tp1.00000000", "intercept": {"value": 9000.0}}
    write("beta", parts["step"], other)
    return tracefit.load(small)


def test_deployment_is_selected_by_a_part_of_its_name(two_deployments):
    assert sorted(two_deployments.deployment_ids) == ["large.gpu.tp1.00000000", "small.gpu.tp1.00000000"]
    assert two_deployments.predict_step(deployment="large", batch=1).step.value_us == 9050


@pytest.mark.parametrize("deployment", [None, "gpu", "tiny"])
def test_choice_of_no_or_several_deployments_is_refused(two_deployments, deployment):
    with pytest.raises(UsageError, match=r"deployment`: .*large\.gpu"):
        two_deployments.predict_step(deployment=deployment, batch=1)


def test_missing_or_repeated_files_are_refused(small, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"neither alpha\.json nor beta\.json"):
        tracefit.load(tmp_path / "empty")
    with pytest.raises(UsageError, match="twice"):
        tracefit.load(small, small / "beta.json")


def test_frames_and_single_predictions_are_equal(small):
    models = tracefit.load(small)
    inputs = [
        {"prompt_tokens": p, "output_tokens": o, "queue": q, "cached": c, "batch": b}
        for p in (20, 250)
        for o in (1, 40)
        for q in (0, 12)
        for c in (0, 10)
        for b in (None, 3)
    ]
    assert_rows_are_as_single_requests(models, pl.DataFrame(inputs))
    steps = [{"batch": b, "context": c, "prefill": p} for b in (0, 4, 8) for c in (0, 30) for p in (0, 70)]
    rows = models.predict_step(pl.DataFrame(steps))
    for step, row in zip(steps, rows.iter_rows(named=True), strict=True):
        prediction = models.predict_step(**step)
        found = (prediction.step.value_us, prediction.step.low_us, prediction.step.high_us)
        assert (row["predicted_us"], row["low_us"], row["high_us"]) == pytest.approx(found), step
        assert (row["out_of_range"] is None) == (not prediction.out_of_range)


def test_file_brings_its_own_definitions(trained, small, parts, write):
    """A term of a name that is defined by the file: 64 requests at most, 8 running."""
    fullness = {"feature": "fullness", "unit": "us", "value": 8.0, "formula": "running_depth / slots"}
    step = parts["step"] | {"terms": [fullness], "definitions": {"slots": "64"}}
    write("beta", step)
    assert tracefit.load(small).predict_step(batch=8).step.value_us == 1001
    frame = tracefit.load(small).predict_step(pl.DataFrame({"running_depth": [16, None]}))
    assert frame["predicted_us"].to_list() == [1002, None]


def test_a_constant_is_predicted_for_every_row(small, parts, write):
    step = parts["step"] | {"terms": []}
    write("beta", step)
    frame = tracefit.load(small).predict_step(pl.DataFrame({"x": [1, 2]}))
    assert frame["predicted_us"].to_list() == [1000, 1000]


def test_trained_files_predict_their_own_training_rows(trained):
    """Feature rows as training left them: the mean absolute error is the one the evaluation states."""
    rows = pl.read_parquet(trained / "tables/beta_training/*/*.parquet").filter(split="holdout")
    prediction = tracefit.load(trained / "models").predict_step(rows)
    stated = json.loads((trained / "models/beta.json").read_text())["models"][0]["validation"]["holdout"]
    error = (prediction["predicted_us"] - prediction["y"]).abs().mean()
    assert error == pytest.approx(stated["mae"], rel=1e-6)


def test_a_target_that_adds_to_ttft_is_part_of_it_in_predictions(small, monkeypatch):
    """Its declaration and its model are enough: the same admission a second time makes TTFT longer by it."""
    before = tracefit.load(small).predict_request(prompt_tokens=50, output_tokens=3, batch=2, context=100)
    twice = replace(targets.target_named("admission"), name="again")
    monkeypatch.setattr(targets, "TARGETS", (*targets.TARGETS, twice))
    alpha = json.loads((small / "alpha.json").read_text())
    admission = next(m for m in alpha["models"] if m["name"] == "alpha.admission")
    alpha["models"].append({**admission, "name": "alpha.again"})
    (small / "alpha.json").write_text(json.dumps(alpha))
    again = tracefit.load(small).predict_request(prompt_tokens=50, output_tokens=3, batch=2, context=100)
    assert again.ttft.value_us == pytest.approx(before.ttft.value_us + before.overheads["admission"].value_us)
    rows = tracefit.load(small).predict_request(
        pl.DataFrame({"prompt_tokens": [50], "output_tokens": [3], "batch": [2], "context": [100]})
    )
    assert rows["ttft_us"].item() == pytest.approx(again.ttft.value_us)


def test_a_column_by_name_may_mix_counts_and_fractions(small):
    found = tracefit.load(small).predict_step({"batch": [4, 2.5, None], "prefill": 0})["predicted_us"]
    assert found.to_list() == [1200, 1125, None]


def test_a_misspelt_column_is_named(small):
    models = tracefit.load(small)
    with pytest.warns(UserWarning, match=r"reads prefil \(did you mean prefill\?\)$"):
        models.predict_step({"batch": [4], "prefil": [40], "my_number": [3]})
    with pytest.warns(UserWarning, match=r"reads que \(did you mean queue\?\)$"):
        models.predict_request([{"prompt_tokens": 50, "output_tokens": 3, "que": 1}])


def test_rows_of_requests_have_the_names_of_flags_too(small, recwarn):
    models = tracefit.load(small)
    named = models.predict_request([{"prompt_tokens": 50, "output_tokens": 10, "queue": 2}])
    flags = models.predict_request([{"prompt": 50, "output": 10, "queue": 2}])
    assert flags.columns[:3] == ["prompt", "output", "queue"]
    assert flags[:, 3:].equals(named[:, 3:])
    assert not recwarn.list


@pytest.mark.parametrize(
    ("columns", "meant"),
    [
        ({"promt": [100], "output": [20]}, "column promt: did you mean prompt?"),
        ({"prompt": [100], "outptu": [20]}, "column outptu: did you mean output?"),
        ({"prompt": [100], "output_token": [20]}, "column output_token: did you mean output_tokens?"),
        ({"prompt_tokns": [100], "output_tokens": [20]}, "column prompt_tokns: did you mean prompt_tokens?"),
    ],
)
def test_a_misspelt_column_is_the_one_that_is_named(small, columns, meant):
    with pytest.raises(UsageError) as caught:
        tracefit.load(small).predict_request(pl.DataFrame(columns))
    assert meant in str(caught.value)


@pytest.mark.slow
def test_row_is_evaluated_without_polars_and_numpy(small):
    code = (
        "import sys, tracefit\n"
        f"models = tracefit.load({str(small)!r})\n"
        "models.predict_request(prompt_tokens=50, output_tokens=11, queue=3)\n"
        "models.predict_step(batch=4)\n"
        "print(sorted({'polars', 'numpy', 'sklearn', 'pyarrow'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
