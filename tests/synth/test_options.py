"""Impossible options are refused, in words that help."""

from __future__ import annotations

import pytest

from tracefit.errors import UsageError
from tracefit.synth import LengthMix, LoadPhase, SynthOptions, surge_phases, synth


def _refusal(**options):
    with pytest.raises(UsageError) as caught:
        synth(SynthOptions(**options))
    return caught.value


@pytest.mark.parametrize(
    ("options", "where", "known"),
    [
        ({"model": "gpt-9"}, "model", "llama-70b, llama-8b, qwen-moe-30b, tiny"),
        ({"gpu": "Z80"}, "gpu", "A100, H100, H200, L4"),
        ({"law": "cubic"}, "law", "linear, roofline"),
        ({"law": "roofline", "gpu": None}, "gpu", "A100, H100, H200, L4"),
        ({"duration": "cycle"}, "duration", "schedule, step"),
        ({"queued_stamp": "later"}, "queued_stamp", "step_start, arrival"),
        ({"instance_ids": "all"}, "instance_ids", "auto, none, server, process"),
    ],
)
def test_an_unknown_value_lists_the_choices(options, where, known):
    error = _refusal(**options)
    assert str(error).startswith((where, f"`SynthOptions.{where}`"))
    assert error.hint == f"known: {known}"
    assert error.exit_code == 2


@pytest.mark.parametrize(
    "options",
    [
        {"requests": 0},
        {"tp": 0},
        {"epochs": 0},
        {"servers": 0},
        {"steps_per_span": 0},
        {"span_event_limit": 0},
        {"block_size": 0},
        {"abort_fraction": 1.1},
        {"step_sampling": -0.1},
        {"noise": -1.0},
        {"noise": float("nan")},
        {"empty_step_us": 0.0},
        {"rate_per_s": 0.0},
        {"phases": ()},
        {"phases": (LoadPhase("none", 0.0, 1.0),)},
        {"name": "../up"},
        {"name": ""},
        {"prompt_tokens": LengthMix(())},
        {"prompt_tokens": LengthMix(((1.0, 5.0, -1.0),))},
        {"output_tokens": LengthMix(((1.0, 5.0, 0.1),), minimum=9, maximum=8)},
        {"num_blocks": 1},
        {"prefix_fraction": 0.5, "prefix_tokens": 512, "num_blocks": 33},
    ],
)
def test_impossible_options_are_refused(options):
    error = str(_refusal(**options))
    assert any(f"SynthOptions.{name}`: " in error for name in (*options, "num_blocks"))


def test_a_surge_factor_of_zero_is_refused():
    with pytest.raises(UsageError, match="above 0"):
        surge_phases(0)


def test_a_single_phase_of_one_request_is_a_run():
    run = synth(SynthOptions(requests=1, phases=(LoadPhase("only", 1.0, 1.0),), abort_fraction=0.0))
    assert run.truth_requests.height == 1
    assert run.truth_steps["step_id"].to_list() == list(range(1, run.truth_steps.height + 1))


def test_more_epochs_than_requests_leave_some_without_a_step():
    run = synth(SynthOptions(requests=1, epochs=3, abort_fraction=0.0))
    assert run.truth_requests.height == 1
    assert run.truth_steps["epoch"].n_unique() == 1
