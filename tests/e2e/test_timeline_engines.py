"""Several engines in one file, and loads that bend the laws, against the generator's truth: a tenth of the steps
sampled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import polars as pl
import pytest

import tracefit
from tracefit.synth import LengthMix, SynthOptions, synth, write_run
from tracefit.tables.store import TableStore
from tracefit.timeline import EngineLimits, clock_disagreements, queue_state

BATCH = ("num_prefill_reqs", "num_decode_reqs", "prefill_tokens", "decode_tokens", "context_tokens")
STEP = ["server", "epoch", "step_id"]
LONG = LengthMix(((1.0, 900.0, 0.6),), minimum=4, maximum=3_000)

CASES = {
    "restarted": SynthOptions(seed=51, epochs=2),
    "servers": SynthOptions(seed=52, servers=2),
    "hosts without names": SynthOptions(seed=53, servers=2, instance_ids="none"),
    "aborts": SynthOptions(seed=54, abort_fraction=0.15),
    "chunks": SynthOptions(seed=55, prompt_tokens=LONG, max_num_batched_tokens=256, rate_per_s=5.0),
    "full slots": SynthOptions(seed=56, rate_per_s=40.0, max_num_seqs=16),
}
PREEMPTED = {"preempted": SynthOptions(seed=43, num_blocks=400)}


@dataclass
class Case:
    """A run's truth and tables; `server` of the truth is the name the tables have for it."""

    options: SynthOptions
    steps: pl.DataFrame
    requests: pl.DataFrame
    store: TableStore


def _named(truth: pl.DataFrame, names: pl.DataFrame) -> pl.DataFrame:
    return truth.rename({"server": "number"}).join(names, on="number")


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory):
    """Return a function from a case's name to the case; each is made once."""

    @cache
    def made(name: str) -> Case:
        options = replace((CASES | PREEMPTED)[name], requests=250, step_sampling=0.1)
        run, folder = synth(options), tmp_path_factory.mktemp("engines")
        tracefit.ingest([write_run(run, folder / "runs")], folder / "tables")
        store = TableStore(folder / "tables")
        kept = store.read("requests").select("server", "core_request_id")
        pairs = run.truth_requests.rename({"server": "number"}).join(kept, on="core_request_id")
        # A server of the truth that the tables do not hold together gets a name that none of them has.
        names = pairs.group_by("number").agg(pl.col("server").unique().sort().str.join(" and "))
        steps, requests = (_named(truth, names) for truth in (run.truth_steps, run.truth_requests))
        return Case(options, steps, requests, store)

    return made


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest, cases) -> Case:
    return cases(request.param)


@pytest.mark.mostly_slow(every=6)
def test_every_engine_is_found(case) -> None:
    runs, servers = case.store.read("runs"), case.options.servers
    assert set(runs["server"]) == set(case.requests["server"])
    assert runs.height == servers
    assert runs["epochs"].to_list() == [case.options.epochs] * servers
    assert runs["requests"].to_list() == [250] * servers


@pytest.mark.mostly_slow(every=6)
def test_hidden_steps_are_inferred_exactly(case) -> None:
    hidden = case.steps.filter(~pl.col("is_sampled"))
    both = hidden.join(case.store.read("timeline"), on=STEP, how="left", suffix="_inferred")
    agrees = pl.all_horizontal(pl.col(c).eq_missing(pl.col(f"{c}_inferred")) for c in BATCH)
    depths = (pl.col("running") == pl.col("running_depth")) & (pl.col("waiting") == pl.col("waiting_depth"))
    assert both.select((agrees & depths.fill_null(value=False)).mean()).item() >= 0.995


@pytest.mark.mostly_slow(every=6)
def test_their_starts_are_within_half_a_millisecond(case) -> None:
    timeline, journeys = case.store.read("timeline"), case.store.read("journey_events")
    anchored = journeys.filter(pl.col("event") == "SCHEDULED")
    hidden = case.steps.filter(~pl.col("is_sampled")).join(anchored, on=STEP, how="semi")
    both = hidden.join(timeline, on=STEP, how="left")
    error_us = (both["ts_start_ns"] - both["start_ns"]).abs() / 1e3
    assert both.height > 50
    assert (error_us <= 500).fill_null(value=False).mean() >= 0.99
    assert clock_disagreements(timeline, journeys)["disagreeing"].sum() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in PREEMPTED)], indirect=True
)
def test_the_queue_is_exact(case) -> None:
    limits = EngineLimits(case.options.max_num_batched_tokens, case.options.max_num_seqs)
    found = queue_state(case.store.read("journey_events"), case.store.read("timeline"), limits)
    both = case.requests.join(found, left_on="core_request_id", right_on="request_id", suffix="_inferred")
    pairs = (
        ("requests_ahead", "waiting_ahead"),
        ("tokens_ahead", "tokens_ahead_inferred"),
        ("running_reqs", "running_reqs_inferred"),
        ("blocks_free", "kv_blocks_free"),
    )
    exact = pl.all_horizontal((pl.col(a) == pl.col(b)).fill_null(value=False) for a, b in pairs)
    assert both.height == case.requests.height
    assert (case.requests["num_preemptions"].sum() > 0) == (case.options.num_blocks == 400)
    assert both.select(exact.mean()).item() >= 0.99
