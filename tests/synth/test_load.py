"""Load and stamps of generated runs: epochs, servers, phases, lengths and surges are as the options say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from tracefit.synth import LengthMix, LengthPhase, LoadPhase, SynthOptions, surge_phases, synth


def test_a_restart_counts_steps_from_one_on_the_same_clock(read):
    run = synth(SynthOptions(requests=24, epochs=2, seed=3))
    first, second = (run.truth_steps.filter(run.truth_steps["epoch"] == epoch) for epoch in (0, 1))
    assert (first["step_id"][0], second["step_id"][0]) == (1, 1)
    assert second["start_ns"][0] > first["end_ns"][-1]
    assert run.truth_requests["request_id"].n_unique() == 24
    assert run.truth_requests["epoch"].value_counts()["count"].to_list() == [12, 12]
    names = [span.name for span in read(run.spans).step_spans]
    assert names.count("scheduler_steps_1") == 2


@pytest.mark.parametrize(("choice", "instances"), [("auto", 3), ("process", 6), ("none", 0)])
def test_servers_are_distinguished_by_their_resource(choice, instances):
    run = synth(SynthOptions(requests=12, servers=3, instance_ids=choice))
    ids = {batch.resource.get("service.instance.id") for batch in run.batches}
    assert len(ids - {None}) == instances
    assert sorted(set(run.truth_steps["server"])) == [0, 1, 2]
    assert run.truth_requests["request_id"].n_unique() == 36
    starts = run.truth_steps.group_by("server", maintain_order=True).first()["start_ns"]
    assert starts.diff().drop_nulls().min() > 10**12


@pytest.mark.slow
def test_one_server_has_no_instance_id(busy_run):
    assert all("service.instance.id" not in batch.resource for batch in busy_run.batches)


@pytest.mark.slow
def test_a_phase_sets_the_rate():
    phases = (LoadPhase("slow", 0.5, 1.0), LoadPhase("fast", 0.5, 10.0))
    rows = synth(SynthOptions(requests=200, rate_per_s=2.0, phases=phases)).truth_requests
    gaps = {}
    for name in ("slow", "fast"):
        part = rows.filter(rows["load_phase"] == name)
        assert part.height == 100
        gaps[name] = part["arrival_ns"].diff().mean() / 1e9
    assert gaps["slow"] == pytest.approx(0.5, rel=0.3)
    assert gaps["fast"] == pytest.approx(0.05, rel=0.3)


def test_a_phase_may_have_lengths_of_its_own():
    long = LengthPhase("long", 0.5, 1.0, LengthMix(((1.0, 700.0, 0.0),)), LengthMix(((1.0, 9.0, 0.0),)))
    options = SynthOptions(requests=40, abort_fraction=0.0, phases=(LoadPhase("usual", 0.5, 1.0), long))
    rows = synth(options).truth_requests
    of = {name: part for (name,), part in rows.partition_by("load_phase", as_dict=True).items()}
    assert set(of["long"].select("prompt_tokens", "output_tokens").iter_rows()) == {(700, 9)}
    usual = replace(options, phases=(LoadPhase("usual", 0.5, 1.0), LoadPhase("long", 0.5, 1.0)))
    same = synth(usual).truth_requests.filter(pl.col("load_phase") == "usual")["prompt_tokens"]
    assert of["usual"]["prompt_tokens"].equals(same), "others keep theirs"


@pytest.mark.slow
def test_lengths_fit_into_the_engine():
    lengths = LengthMix(((1.0, 900.0, 1.5),), minimum=2, maximum=5_000)
    options = SynthOptions(
        requests=60, prompt_tokens=lengths, output_tokens=lengths, num_blocks=41, max_num_batched_tokens=256
    )
    rows = synth(options).truth_requests
    assert (rows["prompt_tokens"] + rows["max_tokens"]).max() >= 640
    assert (rows["prompt_tokens"] + rows["output_tokens"]).max() <= 640
    assert rows["output_tokens"].filter(rows["abort_ns"].is_null()).min() >= 1


def test_lengths_follow_their_mixture():
    prompts = LengthMix(((0.25, 10.0, 0.0), (0.75, 100.0, 0.0)))
    rows = synth(SynthOptions(requests=400, prompt_tokens=prompts, rate_per_s=100.0)).truth_requests
    assert set(rows["prompt_tokens"]) == {10, 100}
    assert (rows["prompt_tokens"] == 10).mean() == pytest.approx(0.25, abs=0.06)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_a_surge_is_the_last_thirty_percent_of_the_time(factor):
    short = LengthMix(((1.0, 1.0, 0.0),))  # when they arrive does not depend on what they ask for
    options = SynthOptions(
        requests=4_000,
        rate_per_s=200.0,
        phases=surge_phases(factor),
        seed=5,
        prompt_tokens=short,
        output_tokens=short,
    )
    arrivals = np.sort(synth(options).truth_requests["arrival_ns"].to_numpy())
    steady = round(4_000 * 0.7 / (0.7 + 0.3 * factor))
    first, rest = arrivals[:steady], arrivals[steady:]
    span = arrivals[-1] - arrivals[0]
    assert (first[-1] - first[0]) / span == pytest.approx(0.7, abs=0.04)
    rates = [len(part) / (part[-1] - part[0]) for part in (first, rest)]
    assert rates[1] / rates[0] == pytest.approx(factor, rel=0.12)


def test_requests_queued_at_arrival_wait_for_the_same_step():
    """The stamp moves back to the end of the API work; what is scheduled, and when, stays as it was."""
    truth = {
        stamp: synth(SynthOptions(requests=80, seed=2, queued_stamp=stamp)).truth_requests
        for stamp in ("step_start", "arrival")
    }
    late, early = truth["step_start"], truth["arrival"]
    scheduled = [c for c in late.columns if "scheduled" in c]
    assert scheduled
    assert late.select(scheduled).equals(early.select(scheduled))
    moved = (late["queued_ns"] - early["queued_ns"]).drop_nulls()
    assert (moved >= 0).all()
    assert moved.median() > 1_000_000
    work = early.select((pl.col("queued_ns") - pl.col("arrival_ns")) / 1e3).to_series().drop_nulls()
    assert 1_000 < work.median() < 2_500
