"""Parts of a step and of a first token: sums worked out by hand."""

from __future__ import annotations

import polars as pl
import pytest

from tracefit.coefficients.files import read_coefficients
from tracefit.diagnostics.breakdown import first_token_breakdown, step_breakdown
from tracefit.diagnostics.rows import evaluated, with_batches
from tracefit.models.schema import LinearModel
from tracefit.tables.store import TableStore


def _steps(**columns):
    count = len(columns["measured_ms"])
    base = {
        "num_prefill_reqs": [0] * count,
        "num_decode_reqs": [2] * count,
        "prefill_tokens": [0] * count,
        "decode_tokens": [2] * count,
        "context_tokens": [100] * count,
    }
    return pl.DataFrame(base | columns)


def _model(*terms, definitions=None):
    return LinearModel.model_validate(
        {
            "name": "beta.cycle_time",
            "intercept": {"value": 1000.0},
            "terms": [{"unit": "us", **t} for t in terms],
            "definitions": definitions or {},
        }
    )


def test_terms_of_one_kind_are_one_part():
    """1 ms + 2 requests at 0.5 ms + 4 (its square) at 0.25 ms: 1 ms of every step, 2 ms of requests."""
    model = _model(
        {"feature": "num_decode_reqs", "value": 500.0},
        {"feature": "num_decode_reqs_squared", "value": 250.0, "formula": "num_decode_reqs ** 2"},
    )
    steps = _steps(measured_ms=[3.0] * 20, num_decode_reqs_squared=[4.0] * 20)
    found = step_breakdown(model, steps)
    assert found.parts == {"every step": [1.0] * 10, "requests": [2.0] * 10}
    assert found.measured == [3.0] * 10
    assert found.rows == [2] * 10
    assert found.facts["requests"] == [2.0] * 10
    assert found.facts["context tokens"] == [100.0] * 10


def test_a_part_that_goes_with_another_bears_both_names():
    model = _model(
        {"feature": "num_decode_reqs", "value": 500.0, "collinear_with": ["context_tokens", "decode_tokens"]}
    )
    found = step_breakdown(model, _steps(measured_ms=[3.0] * 20))
    assert found.parts == {"every step": [1.0] * 10, "requests or context or generated tokens": [1.0] * 10}


def test_the_larger_of_two_sums_is_split_into_its_addends():
    """max(2 (prompts + generated), weights + context): 10 decode steps bound by memory, 10 with prompts by compute."""
    formula = "max(2 * (prefill_mflop + decode_mflop), weight_kb + kv_read_kb)"
    names = {"prefill_mflop": "prefill_tokens * 10", "decode_mflop": "decode_tokens", "weight_kb": "30"}
    model = _model(
        {"feature": "bound", "value": 100.0, "formula": formula},
        definitions=names | {"kv_read_kb": "context_tokens / 10"},
    )
    prompts = [0] * 10 + [7] * 10
    # 2 (0 + 2) = 4 below 30 + 10 = 40; 2 (70 + 2) = 144 above it.
    steps = _steps(measured_ms=[5.0] * 10 + [15.4] * 10, prefill_tokens=prompts, bound=[40.0] * 10 + [144.0] * 10)
    found = step_breakdown(model, steps)
    first, last = ({name: values[k] for name, values in found.parts.items()} for k in (0, -1))
    zero = {"prompt tokens": 0.0, "generated tokens": 0.0}
    assert first == pytest.approx({"every step": 1.0, "weights": 3.0, "context": 1.0, **zero})
    assert last == pytest.approx(
        {"every step": 1.0, "prompt tokens": 14.0, "generated tokens": 0.4, "weights": 0.0, "context": 0.0}
    )


def test_step_with_an_unknown_term_is_left_out():
    model = _model({"feature": "context_tokens", "value": 10.0})
    found = step_breakdown(model, _steps(measured_ms=[2.0] * 11, context_tokens=[None, *[100] * 10]))
    assert sum(found.rows) == 10
    assert found.parts["context"] == [1.0] * 10


def test_a_formula_of_another_form_stays_whole():
    model = _model({"feature": "mine", "value": 500.0, "formula": "max(prefill_tokens * decode_tokens, 3)"})
    found = step_breakdown(model, _steps(measured_ms=[2.5] * 10, mine=[3.0] * 10))
    assert found.parts == {"every step": [1.0] * 10, "mine": [1.5] * 10}


def test_parts_add_up_to_the_predictions_of_the_model(trained):
    (model,) = read_coefficients(trained / "models/beta.json").models
    store = TableStore(trained / "tables")
    rows = with_batches(store.read("beta_training"), store.read("timeline"))
    held = evaluated(model, rows).filter(split="holdout")
    found = step_breakdown(model, held)
    sums = [sum(values) for values in zip(*found.parts.values(), strict=True)]
    weighted = sum(s * n for s, n in zip(sums, found.rows, strict=True)) / sum(found.rows)
    assert weighted == pytest.approx(held["predicted_ms"].mean(), rel=1e-6)
    assert found.measured == sorted(found.measured), "short steps first"


def test_the_batch_of_a_step_is_the_one_that_executed():
    """Scheduling runs a step ahead: step 2 executes the batch of step 1. An interval of several steps has no one
    batch."""
    where = {"run_id": "r", "server": "s", "epoch": 0}
    steps = pl.DataFrame([{**where, "step_id": 1 + k, "source": "adjacent"} for k in range(3)])
    steps = pl.concat([steps, steps.tail(1).with_columns(source=pl.lit("interval"))])
    names = (
        "num_prefill_reqs",
        "num_decode_reqs",
        "prefill_tokens",
        "prefill_context_tokens",
        "decode_tokens",
    )
    batches = pl.DataFrame(
        [{**where, "step_id": 1 + k, **dict.fromkeys((*names, "context_tokens"), k)} for k in range(3)]
    )
    assert with_batches(steps, batches)["decode_tokens"].to_list() == [0, 1, 2, None]
    assert with_batches(steps, batches, lag_steps=1)["decode_tokens"].to_list() == [None, 0, 1, None]


def _requests(count, **columns):
    base = {"admission_us": 1e3, "queue_wait_us": 0.0, "prefill_us": 2e3, "prompt_tokens": 5}
    return pl.DataFrame({name: [value] * count for name, value in base.items()} | columns)


def test_ttft_is_admission_queue_and_prefill():
    queue = [0.0] * 19 + [40e3]
    rows = _requests(20, queue_wait_us=queue, ttft_us=[3e3 + q for q in queue])
    found = first_token_breakdown(rows)
    assert found.parts == {
        "admission": [1.0] * 10,
        "queue wait": [0.0] * 9 + [20.0],
        "prefill": [2.0] * 10,
    }
    assert found.measured == [3.0] * 9 + [23.0]


def test_requests_that_lack_a_part_are_left_out():
    rows = _requests(12, admission_us=[None, *[1e3] * 11], ttft_us=[3e3] * 12)
    assert sum(first_token_breakdown(rows).rows) == 11
    assert first_token_breakdown(rows.head(10)) is None, "too few for ten groups"
