"""The recipe of a report closes the loop: a short recording of one rate, then one as its report says, then a yes on
every use.

The generator is the server. The recipe is read from evaluation.json, as a program that drives a load generator reads
it.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

import tracefit
from stock import LAWS
from tracefit.synth import LengthMix, LengthPhase, SynthOptions, synth, write_run

if TYPE_CHECKING:
    from pathlib import Path

    from tracefit.synth.laws import StepLaw

USES = ("simulation", "capacity planning", "autoscaling", "alerting")
SLOWER = 5
"""Factor on the times of a law: the generator simulates every step, and a slower server has fewer of them in ten
minutes."""
PAUSE_S = 20.0
"""Mean time from one call of the load generator to the next, in which the queue empties."""


@dataclass(frozen=True)
class Slower:
    law: StepLaw

    def step_us(self, step):
        return SLOWER * self.law.step_us(step)


def _uniform(mean, spread):
    lengths = np.linspace(max(mean * (1 - spread), 1), mean * (1 + spread), 39 if spread else 1)
    return LengthMix(tuple((1.0, float(round(n)), 0.0) for n in lengths), maximum=100_000)


def _server(law, seed, **load):
    """Return a server whose noise is 1 % of a step; no client leaves it, and none stops early."""
    settled = {
        "noise": 0.01,
        "abort_fraction": 0.0,
        "stop_fraction": 0.0,
        "chat_fraction": 0.0,
        "non_streaming_fraction": 0.0,
    }
    options = {
        "name": "run",
        "law": Slower(LAWS[law]),
        "max_num_seqs": 16,
        "max_num_batched_tokens": 1024,
        "gpu": None,
    }
    return SynthOptions(seed=seed, **settled, **options, **load)


def _badly(law):
    """Return a minute of one rate, with short prompts."""
    phase = LengthPhase("one rate", 1.0, 1.0, _uniform(100, 0.8), _uniform(60, 0.8))
    return _server(law, 1, requests=60, rate_per_s=1.0, phases=(phase,))


def _as_said(law, record):
    """Return a recording of the stretches of a recipe."""
    phases = []
    for k in range(record["rounds"]):
        for one in record["stretches"]:
            lengths = [_uniform(one[f"{kind}_tokens"], one[f"{kind}_spread"]) for kind in ("prompt", "output")]
            name = f"{one['seeds'][k]}"
            phases += [LengthPhase(f"before {name}", 1.0, 1 / PAUSE_S, *lengths)]
            phases += [LengthPhase(name, one["requests"] - 1.0, one["requests_per_s"], *lengths)]
    seed = record["stretches"][0]["seeds"][0]
    requests = sum(one["requests"] for one in record["stretches"]) * record["rounds"]
    return _server(law, seed, requests=requests, rate_per_s=1.0, phases=tuple(phases))


def _record(options, form, folder):
    """Write what a server sends: its spans, its spans and its log, or those of a plugin."""
    if form == "plugin":
        return write_run(synth(options), folder, compress="gz")
    made = write_run(synth(replace(options, form="stock")), folder, compress="gz")
    if form == "spans and log":
        log = write_run(synth(replace(options, form="log", name="log")), folder / "logs")
        (log / "vllm.log").rename(made / "vllm.log")
    return made


def _train(options, form, folder):
    made = _record(options, form, folder / "runs")
    # A report of what to record is there without models too.
    with suppress(tracefit.DataError):
        tracefit.run([made], folder / "out")
    (deployment,) = json.loads((folder / "out" / "evaluation.json").read_text())["deployments"]
    return deployment


def _answers(deployment):
    return {use: verdict["answer"] for use, verdict in deployment["verdicts"].items()}


COMBINATIONS = [(law, form) for law in LAWS for form in ("spans", "spans and log", "plugin")]
TRIED = [(law, ("spans", "spans and log", "plugin")[n % 3]) for n, law in enumerate(LAWS)]
"""Each law and each form at least once; `make fuzz` tries all."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("law", "form"),
    [
        pytest.param(*c, marks=pytest.mark.slow if c in TRIED else pytest.mark.campaign, id=", ".join(c))
        for c in COMBINATIONS
    ],
)
def test_the_report_of_a_bad_recording_leads_to_a_yes_in_one_round(tmp_path: Path, law, form):
    bad = _train(_badly(law), form, tmp_path / "bad")
    assert set(_answers(bad).values()) != {"yes"}
    assert set(bad["record"]["uses"]) == {use for use, answer in _answers(bad).items() if answer != "yes"}
    assert 10 <= bad["record"]["minutes"] <= 15
    good = _train(_as_said(law, bad["record"]), form, tmp_path / "good")
    assert _answers(good) == dict.fromkeys(USES, "yes")
    assert good["record"] is None
