"""Transfer: laws with planted coefficients, found on some servers and asked for on others."""

import json

import numpy as np
import polars as pl
import pytest
from msgspec.structs import replace

from tracefit.features.law import LAW_BATCH_COLUMNS, LAW_TERMS, kernels_of
from tracefit.features.sets import LAW_SET
from tracefit.fit.fitted import target_of
from tracefit.fit.transfer import (
    COMPILING,
    DECODES,
    Law,
    LawRows,
    as_run_by,
    calibrate,
    choose_sources,
    errors_of,
    fit_law,
    leave_out,
    nearest,
    parts_of_model,
    unseen_parts,
)
from tracefit.fit.validation import measure
from tracefit.server.context import RunContext, deployment_of
from tracefit.server.hardware import find_gpu
from tracefit.server.model_config import parse_architecture
from tracefit.server.settings import settings_from

DENSE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
LARGE = {
    **DENSE,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
SPARSE = {
    **DENSE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1024,
}

TRUTH = {
    "one": 400.0,
    "kernels": 3.0,
    "all_reduces": 6.0,
    "weight_read_us": 1.3,
    "moe_expert_read_us": 1.0,
    "decode_kv_read_us": 1.4,
    "prompt_matrix_us": 1.7,
    "prompt_attention_us": 2.0,
    "decode_matrix_us": 1.2,
    "tp_comm_us": 2.0,
    "batch_requests": 8.0,
    "launched_small": 15.0,
    "launched_large": 25.0,
}
PLANTED = Law(LAW_TERMS, tuple(TRUTH.get(term.feature.name, 0.0) for term in LAW_TERMS))


def _context(config=DENSE, gpu="H100", tp=1, **settings):
    stated = settings_from({"tensor_parallel": tp, "max_num_seqs": 128, **settings}, where="test")
    return RunContext(stated, parse_architecture(json.dumps(config), where="test"), find_gpu(gpu))


def server(config=DENSE, gpu="H100", tp=1, *, law=PLANTED, steps=1200, seed=0, noise=0.02, prompts=0.1, **settings):
    """Return the steps of a server with a planted law."""
    rng = np.random.default_rng(seed + tp)
    decodes = rng.integers(1, 100, steps)
    has_prompt = rng.random(steps) < prompts
    prefill = np.where(has_prompt, rng.integers(16, 4000, steps), 0)
    batches = {
        "num_prefill_reqs": has_prompt.astype(np.int64),
        "num_decode_reqs": decodes,
        "prefill_tokens": prefill,
        "decode_tokens": decodes,
        "context_tokens": decodes * rng.integers(50, 3000, steps),
        "prefill_context_tokens": np.zeros(steps, dtype=np.int64),
    }
    rows = pl.DataFrame({f"of_{name}": batches[name] for name in LAW_BATCH_COLUMNS})
    context = _context(config, gpu, tp, **settings)
    terms = as_run_by(rows, context)
    y = law.predict(terms) * np.exp(noise * rng.standard_normal(steps))
    known = rows.hstack(terms.select(LAW_SET.names))
    named = known.with_columns(y=pl.Series(y), run_id=pl.lit("run"), server=pl.lit("s"), step_id=pl.int_range(steps))
    return LawRows(deployment_of(context), named)


def _error_pct(law, target):
    return measure(target_of(target.rows), law.predict(target.rows)).mape_pct


@pytest.mark.parametrize(("unseen", "others"), [(2, (1, 4)), (8, (1, 2, 4)), (1, (2, 4))])
def test_another_tensor_parallelism_is_predicted_as_exactly_as_the_noise_allows(unseen, others):
    sources = [server(tp=tp) for tp in others]
    kind, chosen, _ = choose_sources(server(tp=unseen).context, sources)
    assert (kind, len(chosen)) == ("tensor_parallel", len(others))
    # The mean error of noise with a standard deviation of 2 % is 1.6 %.
    assert _error_pct(fit_law(chosen, kind), server(tp=unseen, seed=9)) < 2.5


def test_another_gpu_and_another_model_are_predicted_by_the_same_coefficients():
    sources = [server(gpu="H100"), server(gpu="A100"), server(LARGE, gpu="H100", tp=4)]
    target = server(gpu="H200")
    kind, chosen, _ = choose_sources(target.context, sources)
    assert (kind, len(chosen)) == ("gpu", 3)
    assert _error_pct(fit_law(chosen, kind), target) < 4
    target = server(LARGE, gpu="A100", tp=4)
    kind, chosen, _ = choose_sources(target.context, sources)
    assert (kind, len(chosen)) == ("model", 1)


def test_sources_of_the_same_model_and_gpu_come_before_all_others():
    sources = [server(tp=1), server(LARGE, tp=2), server(gpu="A100", tp=4)]
    kind, chosen, _ = choose_sources(_context(tp=8), sources)
    assert (kind, [one.context.settings.tensor_parallel for one in chosen]) == ("tensor_parallel", [1])


def test_a_model_is_the_same_under_another_name():
    kind, *_ = choose_sources(_context(tp=2, model="other/name"), [server(tp=1)])
    assert kind == "tensor_parallel"


def test_the_other_servers_are_ordered_by_how_unlike_the_new_one_they_are():
    sources = [server(tp=1), server(LARGE, tp=2), server(gpu="A100", tp=4)]
    wider = choose_sources(_context(tp=8), sources).wider
    assert [(step.kind, [one.deployment_id for one in step.sources]) for step in wider] == [
        ("gpu", [sources[2].deployment_id]),
        ("model", [sources[1].deployment_id]),
    ]
    kind, chosen, wider = choose_sources(_context(SPARSE), sources)
    assert (kind, len(chosen), [len(step.sources) for step in wider]) == ("model", 2, [1])
    assert choose_sources(_context(gpu="B300"), sources).wider == ()


def test_what_the_sources_cannot_tell_apart_is_as_it_was_found_on_other_servers():
    # Every source has all-reduces: their latency looks like a constant, which a server with one GPU does not have.
    truth = {**TRUTH, "all_reduces": 20.0}
    planted = replace(PLANTED, coefficients=tuple(truth.get(t.feature.name, 0.0) for t in LAW_TERMS))
    target = server(law=planted, gpu="H200", seed=9)
    own = [server(law=planted, gpu="H200", tp=tp) for tp in (2, 4)]
    small = {**DENSE, "hidden_size": 2048, "intermediate_size": 8192}
    others = [server(small, law=planted, gpu="H200", tp=tp) for tp in (1, 2, 4, 8)]
    kind, chosen, wider = choose_sources(target.context, [*own, *others])
    alone, together = fit_law(chosen, kind), fit_law(chosen, kind, wider)
    assert _error_pct(alone, target) > 8
    assert _error_pct(together, target) < 3
    # The prior of physics is 7.
    prior = {t.feature.name: t.prior for t, _ in together.pairs()}["all_reduces"]
    assert prior == fit_law(others, "model").value("all_reduces")
    assert prior == pytest.approx(20, rel=0.25)
    assert together.value("all_reduces") == pytest.approx(20, rel=0.25)
    assert alone.value("all_reduces") == pytest.approx(7, rel=0.25)


EIGHT_BITS = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}


@pytest.mark.parametrize("precision", [{}, EIGHT_BITS])
def test_a_model_that_is_left_out_is_in_no_prior_either(precision):
    # Were the model's own servers on another GPU used, its odd law would be known.
    odd = replace(PLANTED, coefficients=tuple(1.5 * c for c in PLANTED.coefficients))
    sources = [server(), server(LARGE, tp=4), server(SPARSE, law=odd)]
    elsewhere = server({**SPARSE, **precision}, gpu="A100", law=odd)
    kind, chosen, wider = choose_sources(_context({**DENSE, "num_hidden_layers": 40}), [*sources, elsewhere])
    (of_odd,) = [fold for fold in leave_out(chosen, kind, wider) if fold.deployment_id == sources[2].deployment_id]
    assert of_odd.law == fit_law(chosen[:2], kind)


def test_every_tensor_parallelism_is_left_out_in_turn_and_its_interval_holds():
    folds = leave_out([server(tp=tp, steps=600) for tp in (1, 2, 4, 8)], "tensor_parallel")
    assert [fold.left_out for fold in folds] == ["tp1", "tp2", "tp4", "tp8"]
    assert all((fold.errors.mape_pct or 99) < 3 for fold in folds)
    assert all((fold.coverage_pct or 0) > 85 for fold in folds)
    assert all((fold.errors.mape_pct or 99) < (fold.nearest.mape_pct or 0) / 5 for fold in folds)
    expected = errors_of(folds)
    # 1.645 standard deviations of 2 % hold nine of ten steps.
    assert 3.0 < expected.of(DECODES) < 6.0
    assert expected.folds == 4


def test_the_worst_of_few_servers_decides_on_the_interval():
    odd = replace(PLANTED, coefficients=tuple(1.3 * c for c in PLANTED.coefficients))
    sources = [server(tp=1), server(tp=2), server(tp=4, law=odd)]
    expected = errors_of(leave_out(sources, "tensor_parallel"))
    assert expected.of(DECODES) > 15
    assert expected.sd_log > 0.1


def test_one_source_has_no_server_to_leave_out():
    assert leave_out([server(tp=2)], "tensor_parallel") == ()
    assert errors_of(()).folds == 0


def test_the_nearest_source_has_the_most_similar_weights_to_read():
    sources = [server(tp=1), server(tp=8)]
    assert nearest(_context(tp=4), sources) is sources[1]


def test_few_steps_of_a_server_draw_the_law_to_it():
    law = fit_law([server(tp=1), server(tp=4)], "tensor_parallel")
    slow = {**TRUTH, "kernels": 9.0, "batch_requests": 30.0}
    planted = replace(PLANTED, coefficients=tuple(slow.get(t.feature.name, 0.0) for t in LAW_TERMS))
    target = server(tp=2, law=planted, steps=2000)
    chosen = replace(target, rows=target.rows[::100])
    found = calibrate(law, chosen, errors_of(()))
    assert found.used
    assert found.before.mape_pct > 15
    assert found.after.mape_pct < 5
    assert _error_pct(found.law, target) < 4


def test_steps_that_confirm_the_law_leave_it_as_it_is():
    law = fit_law([server(tp=1), server(tp=2), server(tp=4)], "tensor_parallel")
    target = server(tp=8, steps=60, noise=0.1)
    found = calibrate(law, replace(target, rows=target.rows[:20]), errors_of(()))
    assert not found.used
    assert found.law is law


def test_steps_that_compile_are_left_out_and_counted():
    law = fit_law([server(tp=1), server(tp=4)], "tensor_parallel")
    target = server(tp=2, steps=200)
    slow = target.rows.with_columns(y=pl.when(pl.col("step_id") < 7).then(pl.col("y") * 30).otherwise("y"))
    found = calibrate(law, replace(target, rows=slow), errors_of(()))
    assert found.left_out[COMPILING] == 7
    assert _error_pct(found.law, target) < 3


def test_fewer_than_twenty_steps_calibrate_nothing():
    law = fit_law([server(tp=1)], "tensor_parallel")
    target = server(tp=2)
    assert calibrate(law, replace(target, rows=target.rows[:19]), errors_of(())) is None


def test_parts_of_a_model_that_no_source_has_are_named():
    assert unseen_parts(_context(LARGE), parts_of_model(server().context)) == ()
    assert unseen_parts(_context(SPARSE), parts_of_model(server().context)) == (
        "layers with experts",
        "experts of 16 bits",
    )
    assert unseen_parts(
        _context(SPARSE, enable_expert_parallel=True, tp=2), parts_of_model(server(SPARSE).context)
    ) == ("expert parallelism",)
    eight = _context({**DENSE, **EIGHT_BITS})
    assert "attention weights of 8 bits" in unseen_parts(eight, parts_of_model(server().context))


def test_kernels_are_counted_by_what_a_layer_does():
    # Attention runs 7 and a feed-forward network 4, in each of 32 layers; experts 8 instead.
    assert kernels_of(_context().architecture) == 32 * 11
    assert kernels_of(_context(SPARSE).architecture) == 32 * 15
