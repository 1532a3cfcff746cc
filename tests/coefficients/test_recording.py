"""Recipes for a yes on every use: rates of what was carried or can be served, lengths as recorded, and commands that a
shell runs."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace

import pytest

from tracefit.coefficients.documents import (
    Criterion,
    DeploymentEvaluation,
    TimelineEntry,
    Verdict,
)
from tracefit.coefficients.recording import to_record
from tracefit.results.plans import PlannedLatency, PlanPoint, ServerCapacity
from tracefit.results.requests import RecordedLoad
from tracefit.server.settings import ServerSettings

CARRIED = 6.8
LOAD = RecordedLoad(CARRIED, CARRIED, 30.0, 100.0, 90.0, 40.0, 0.9, 0.6)
"""Requests of 100 prompt tokens, 10 of them cached, and 40 output tokens."""


def _verdict(answer):
    criterion = Criterion(
        measure="step_mape_pct",
        value=1.0,
        yes=2.0,
        with_limits=3.0,
        higher_is_better=False,
        answer=answer,
        reason="",
    )
    return Verdict(answer=answer, reasons=(), criteria=(criterion,))


def _deployment(*, answers=("no", "yes"), load=LOAD, capacity=None, running=50.0):
    clock = TimelineEntry(
        epochs=1,
        servers=1,
        steps_known=0,
        adjacent_cycles=0,
        idle_gaps=0,
        step_sampling=None,
        journey_sampling=None,
        duration_coverage=None,
        dropped_events=0,
    )
    latency = PlannedLatency("e2e_p50_ms", 1000.0, None, None)
    rates = (
        [PlanPoint(share * capacity, (latency,), 0, running, 0, 0, (), False) for share in (0.15, 1)]
        if capacity
        else []
    )
    return DeploymentEvaluation(
        deployment_id="d",
        runs=("r",),
        verdicts=dict(zip(("simulation", "alerting"), map(_verdict, answers), strict=True)),
        models={},
        timeline=clock,
        load=load,
        capacity=ServerCapacity(capacity, capacity, capacity, capacity / 2) if capacity else None,
        rates=tuple(rates),
    )


def _record(settings=None, **deployment):
    return to_record(_deployment(**deployment), settings or ServerSettings(model="tiny", max_num_seqs=64))


def _by_name(record):
    return {one.name: one for one in record.stretches}


def test_yes_on_every_use_needs_no_recording():
    assert _record(answers=("yes", "yes")) is None
    assert _record(answers=("yes", "with limits")).uses == ("alerting",)


def test_nothing_is_recorded_for_what_the_machine_does():
    deployment = _deployment(answers=("no", "yes"))
    (criterion,) = deployment.verdicts["simulation"].criteria
    by_machine = criterion.model_copy(update={"machine_pct": 1.0})
    verdict = deployment.verdicts["simulation"].model_copy(update={"criteria": (by_machine,)})
    changed = deployment.model_copy(update={"verdicts": {**deployment.verdicts, "simulation": verdict}})
    assert to_record(deployment, ServerSettings()) is not None
    assert to_record(changed, ServerSettings()) is None


def test_rates_are_shares_of_what_a_server_can_serve():
    one = _by_name(_record(capacity=10.0))
    assert {name: s.requests_per_s for name, s in one.items()} == {
        # 0.7 requests are in the server on average if each takes a second.
        "light": 0.7,
        "moderate": 4.0,
        "heavy": 8.0,
        # Half of 10 requests of 90 computed and 40 output tokens a second.
        "long prompts": pytest.approx(0.5 * 10 * 130 / (1077 + 40), rel=0.01),
        "too much": 20.0,
    }
    assert [s.requests for s in one.values()] == [42, 160, 480, 27, 200]


def test_without_a_capacity_rates_are_those_carried_and_a_burst_fills_the_server():
    """The mean of a run with pauses between its loads is less than what the server carried."""
    one = _by_name(_record())
    assert (one["moderate"].requests_per_s, one["heavy"].requests_per_s) == (3.4, 6.8)
    assert one["too much"].requests >= 2 * 64, "twice as many as run at once"
    assert one["too much"].requests_per_s == 14, "twice the rate carried"
    assert "6.8/s carried so far" in one["heavy"].reason


def test_the_kv_cache_may_hold_fewer_requests_than_there_are_slots():
    slow = replace(LOAD, carried_per_s=0.1)
    many = _by_name(_record(ServerSettings(max_num_seqs=64), load=slow))["too much"]
    few = _by_name(_record(ServerSettings(max_num_seqs=64, num_gpu_blocks=350, block_size=16), load=slow))["too much"]
    assert (many.requests, few.requests) == (128, 80), "350 blocks hold 40 requests of 140 tokens"


def test_a_slow_server_with_many_slots_gets_as_many_requests_as_it_can_run():
    one = _by_name(_record(capacity=2.0, running=100.0, load=replace(LOAD, carried_per_s=1.0)))["too much"]
    assert (one.requests_per_s, one.requests) == (10, 200), "twice those that fit, within 20 s"


def test_lengths_are_as_recorded_and_long_prompts_fit_into_a_step_and_the_context():
    settings = ServerSettings(max_num_batched_tokens=2048, max_model_len=1000)
    one = _by_name(_record(settings, capacity=10.0))
    heavy, long = one["heavy"], one["long prompts"]
    assert (heavy.prompt_tokens, heavy.prompt_spread, heavy.output_tokens, heavy.output_spread) == (
        100,
        0.9,
        40,
        0.6,
    )
    assert long.prompt_tokens * 1.9 + 40 * 1.6 <= 1000
    assert long.prompt_tokens * 1.9 > 800
    # Prompts that fill half of a step as they are need no others.
    assert "long prompts" not in _by_name(_record(ServerSettings(max_num_batched_tokens=256), capacity=10.0))


def test_a_server_without_requests_gets_a_load_all_the_same():
    record = _record(ServerSettings(), load=None)
    assert all(s.requests_per_s > 0 for s in record.stretches)
    assert any("no request was recorded" in s.reason for s in record.stretches)


@pytest.mark.parametrize("capacity", [None, 0.5, 10.0, 300.0])
def test_the_recording_takes_minutes_and_no_seed_comes_twice(capacity):
    record = _record(capacity=capacity)
    assert 10 <= record.minutes <= 16
    seeds = [seed for s in record.stretches for seed in s.seeds]
    assert len(set(seeds)) == len(seeds) == record.rounds * len(record.stretches)


def _calls(record, tmp_path, shell="bash"):
    """Run the commands with a `vllm` that prints its arguments, each before a unit separator."""
    fake = tmp_path / "vllm"
    fake.write_text("#!/bin/sh\nprintf '%s\\037' \"$@\"\nprintf '\\036'\n")
    fake.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = "\n".join(record.command)
    done = subprocess.run([shell, "-c", command], capture_output=True, text=True, check=True, env=path)
    assert not done.stderr
    calls = [line.split("\x1f")[:-1] for line in done.stdout.split("\x1e")[:-1]]
    return [dict(zip(call[2:-1:2], call[3:-1:2], strict=True)) for call in calls if call[:2] == ["bench", "serve"]]


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_the_commands_send_every_stretch_once_in_each_round(tmp_path, shell):
    record = _record(capacity=10.0)
    calls = _calls(record, tmp_path, shell)
    assert [int(call["--seed"]) for call in calls] == [
        s.seeds[k] for k in range(record.rounds) for s in record.stretches
    ]
    for call, s in zip(calls, record.stretches * record.rounds, strict=True):
        assert (float(call["--request-rate"]), int(call["--num-prompts"])) == (s.requests_per_s, s.requests)
        lengths = (int(call["--random-input-len"]), int(call["--random-output-len"]))
        assert lengths == (s.prompt_tokens, s.output_tokens)
        assert json.loads(call["--random-range-ratio"]) == {
            "input": s.prompt_spread,
            "output": s.output_spread,
        }
        assert (call["--model"], call["--base-url"]) == ("tiny", "http://server:8000")
    assert sum("#" in line and s.reason in line for line in record.command for s in record.stretches) == 5


@pytest.mark.parametrize("model", [None, "$(touch evil)", "a b", "--help", "x'; touch evil; '"])
def test_a_name_that_a_shell_would_read_is_not_in_the_commands(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    record = _record(ServerSettings(model=model), capacity=10.0)
    assert {call["--model"] for call in _calls(record, tmp_path)} == {"model"}
    assert [path.name for path in tmp_path.iterdir()] == ["vllm"]
    assert model is None or model not in "\n".join(record.command)
