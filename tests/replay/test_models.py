"""Fitted models in a replay: their own numbers, by hand, and a run that is replayed in a closed loop."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import clients
import tracefit as package
from stock import stock_requests, write_stock
from tracefit.coefficients.documents import CoefficientFile
from tracefit.commands import replay as replay_command
from tracefit.consumers.blis_replay import StepRates, replay_as_blis
from tracefit.errors import DataError
from tracefit.models.validation import SpeedVariation
from tracefit.replay.closed_loop import (
    LOOP_REQUEST_COLUMNS,
    RunTraces,
    _counting,
    _first,
    _gave_up,
    _quantities,
    _with_hits,
    _with_outputs,
    block_tokens,
    held_out_from,
    missing_for_replay,
    replay_run,
)
from tracefit.replay.engine import EngineSettings, ReplayEngine, StepBatch
from tracefit.replay.models import FittedStepTimes, admission_us, departure_us
from tracefit.replay.run import RequestLoad, replay
from tracefit.reports.terminal_results import replay_text
from tracefit.results.models import ReplayResult
from tracefit.results.replays import QueueWindow, Replayed, RunReplay
from tracefit.synth import SynthOptions, synth, write_run
from tracefit.tables.store import TableStore

PACKAGE = Path(__file__).parents[2] / "pipeline/tracefit"


def value(number):
    return {"value": number, "ci95": None}


def model(**changes):
    kind = "alpha" if changes.get("name", "").startswith("alpha") else "beta"
    return CoefficientFile.model_validate(
        {"kind": kind, "models": [{"name": "beta.cycle_time", "form": "linear"} | changes]}
    ).models[0]


def term(feature, slope, formula=None):
    return {"feature": feature, "value": slope, "unit": "us", "formula": formula or feature}


def test_a_step_takes_what_its_line_says():
    terms = [term("context_tokens", 2.0), term("most", 3.0, "max(prefill_tokens, 10 * num_decode_reqs)")]
    times = FittedStepTimes(model(intercept=value(100.0), terms=terms), {"block_size": 16})
    assert times.step(StepBatch(1, 50, 0, 0, 2, 30)) == 100 + 2 * 30 + 3 * 50
    # The context of two requests grows by two tokens a step.
    decoding = times.decoding(StepBatch(decode_reqs=2, context_tokens=30), 3, 2)
    assert decoding.tolist() == [100 + 60 + 60, 100 + 64 + 60, 100 + 68 + 60]


def test_each_step_is_of_the_first_regime_that_holds():
    many = {"any": None, "all": [{"feature": "context_tokens", "op": ">", "value": 31}]}
    regimes = [
        {"name": "many", "when": many, "intercept": value(500.0), "terms": []},
        {"name": "rest", "when": {"all": []}, "intercept": value(7.0), "terms": []},
    ]
    times = FittedStepTimes(model(form="regimes", regimes=regimes), {})
    assert times.decoding(StepBatch(decode_reqs=2, context_tokens=30), 3, 2).tolist() == [7, 500, 500]


def test_model_with_an_unknown_input_is_refused():
    with pytest.raises(DataError, match="moon_phase"):
        FittedStepTimes(model(intercept=value(1.0), terms=[term("moon_phase", 1.0)]), {})


@pytest.mark.parametrize(("queue", "waits"), [(None, [110, 120, 110]), ("one_at_a_time", [110, 220, 110])])
def test_work_of_the_api_begins_when_the_work_before_it_ends(queue, waits):
    work = {"intercept": value(100.0), "terms": [term("prompt_tokens", 1.0)]}
    alpha = model(
        name="alpha.admission",
        form="boundary",
        boundary="step_start",
        queue=queue,
        work=work,
        offset=value(0.0),
        without_clock={"intercept": value(0.0), "terms": []},
    )
    found = admission_us(alpha, np.array([0.0, 10.0, 1000.0]), np.array([10, 20, 10]))
    # The second comes at 10, and work on it begins at 110.
    assert found.tolist() == pytest.approx(waits)


@pytest.mark.slow
def test_replay_of_a_generated_run_is_close(tmp_path):
    root = Path(__file__).parents[2] / "fixtures/generated"
    package.run([root / "llama-8b-linear"], tmp_path / "out")
    (found,) = package.replay_runs(tmp_path / "out").runs
    errors = {q.name: abs(q.error_pct) for q in found.quantities}
    assert found.reason is None
    assert found.requests > 100
    assert all(errors[f"{name}_p{q}_us"] < 3 for name in ("itl", "e2e") for q in (50, 90))
    assert errors["ttft_p50_us"] < 10
    assert errors["ttft_p90_us"] < 10


@pytest.mark.slow
def test_no_scheduler_but_the_replays_is_outside_the_generator():
    """Whatever its names: a scheduler takes requests from a queue in a loop until a limit of the server is reached."""
    limits = {"max_num_seqs", "max_num_batched_tokens", "num_blocks", "num_gpu_blocks"}
    taking = {"popleft", "pop", "popitem", "heappop"}

    def names(node, kind, key):
        return {getattr(n, key) for n in ast.walk(node) if isinstance(n, kind)}

    schedulers = set()
    for path in PACKAGE.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            loops = [node for node in ast.walk(function) if isinstance(node, ast.While)]
            takes = any(names(loop, ast.Attribute, "attr") & taking for loop in loops)
            if isinstance(function, ast.FunctionDef) and takes and names(function, ast.Attribute, "attr") & limits:
                schedulers.add(path.relative_to(PACKAGE).parts[0])
    assert schedulers == {"replay", "synth"}


def test_requests_of_blis_pass_the_one_engine(monkeypatch):
    monkeypatch.setattr(ReplayEngine, "run", lambda *_: pytest.fail("the engine ran"))
    one = [np.array([value]) for value in (0, 10, 3)]
    with pytest.raises(pytest.fail.Exception, match="the engine ran"):
        replay_as_blis(*one, StepRates(1000.0, *[0.0] * 5), (0, 0, 0), EngineSettings(8, 64, 16))


def requests_of(*rows):
    """Frames of the tables for requests of (arrival, first token, end, output tokens) in ms, cut at 1000; null is not
    known."""
    arrival, first, end, output = zip(*rows, strict=True)

    def ns(values):
        return pl.Series([None if v is None else v * 1_000_000 for v in values], dtype=pl.Int64)

    return pl.DataFrame(
        {
            "arrival_ns": ns(arrival),
            "first_token_ns": ns(first),
            "finished_ns": ns(end),
            "left": ns(end),
            "cut": ns([1000] * len(rows)),
            "output_tokens": pl.Series(output, dtype=pl.Int64),
            "max_tokens": pl.Series([500] * len(rows), dtype=pl.Int64),
            "itl_us": [None if e is None or not o else (e - f) * 1e3 / (o - 1) for _, f, e, o in rows],
            "is_complete": [o is not None and e is not None for _, _, e, o in rows],
            "dialect": "journey",
        }
    )


def test_requests_in_flight_at_the_split_go_on_at_their_speed():
    # 10 ms a token before the split; the second has run for 195 ms then, and decodes at half that speed later.
    rows = requests_of((0, 100, 200, 11), (700, 805, 3000, 100), (990, 1020, 1500, 9))
    found = _with_outputs(rows, rows.filter(pl.col("left") < pl.col("cut")))
    assert found["done"].to_list() == [91, 20, 0]
    assert found["output"].to_list() == [11, 100, 9]


def test_an_unknown_output_is_the_tokens_so_far_or_the_median():
    rows = requests_of((0, 100, 200, 11), (1000, 1100, 1195, None), (1000, None, 1100, None), (1200, 1300, None, None))
    found = _with_outputs(rows, rows.head(1))
    # Aborted after 95 ms, aborted without a token, still there at the end.
    assert found["output"].to_list() == [11, 10, 1, 11]
    assert found["is_guessed"].to_list() == [False, True, True, True]


def test_request_that_left_the_queue_loads_nothing():
    # Served; left in the queue; left before its first token; nobody saw it scheduled; still in the queue at the end.
    rows = requests_of(
        (0, 100, 200, 11), (0, None, 90, None), (0, None, 90, None), (0, 100, 200, 11), (0, None, None, None)
    ).with_columns(
        first_scheduled_ns=pl.Series([50, None, 50, None, None]),
        is_complete=pl.Series([True, False, False, True, False]),
    )
    assert rows.select(gone=_gave_up())["gone"].to_list() == [False, True, False, False, False]


@pytest.mark.slow
def test_a_replay_is_without_the_prompts_of_clients_who_left(tmp_path):
    """A third of the held-out requests once more, as if their clients had left the queue."""
    folder = write_run(synth(SynthOptions(name="r", requests=200, abort_fraction=0.0)), tmp_path)
    package.run([folder], tmp_path / "out", options=package.TrainOptions(fast=True, features="batch"))
    store, deployment = TableStore(tmp_path / "out/tables"), package.load(tmp_path / "out").deployment()
    requests = store.read("requests")
    unseen = ("first_scheduled_ns", "first_token_ns", "output_tokens")
    gone = requests.tail(30).with_columns(
        *(pl.lit(None, pl.Int64).alias(name) for name in unseen),
        finish_status=pl.lit("aborted"),
        request_id=pl.lit("gone"),
    )
    found = [
        replay_run("r", RunTraces(store.read("runs"), rows, store.scan("timeline", ["r"])), deployment).errors
        for rows in (requests, pl.concat([requests, gone]))
    ]
    assert found[0]
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_machine_of_another_speed_is_replayed_at_it_too(tmp_path):
    """Step times a fifth longer than the model's: an ITL, which is nothing but steps, is a fifth longer, or more as
    batches grow."""
    folder = write_run(synth(SynthOptions(name="r", requests=200, abort_fraction=0.0)), tmp_path)
    package.run([folder], tmp_path / "out", options=package.TrainOptions(fast=True, features="batch"))
    store, deployment = TableStore(tmp_path / "out/tables"), package.load(tmp_path / "out").deployment()
    traces = RunTraces(store.read("runs"), store.read("requests"), store.scan("timeline", ["r"]))
    assert not replay_run("r", traces, deployment).at_speeds
    step = deployment.step_model
    speed = SpeedVariation(30.0, 10, 8.0, -5.0, 20.0, 20.0, adjusted=True)
    changed = replace(
        deployment,
        models={
            **deployment.models,
            step.name: step.model_copy(update={"validation": replace(step.validation, speed=speed)}),
        },
    )
    found = replay_run("r", traces, changed)
    assert [round(at.slower_pct, 2) for at in found.at_speeds] == [
        round(100 * (1.2 * 1.08**n - 1), 2) for n in (-2, 0, 2)
    ]
    (before,) = (q.replayed for q in found.quantities if q.name == "itl_p50_us")
    fast, middle, slow = (at.replayed["itl_p50_us"] for at in found.at_speeds)
    assert 1.17 < middle / before < 1.5
    assert before < middle
    assert fast < middle < slow
    # The true times are those of the unchanged speed: 1.03 times as fast as the fastest of these.
    assert 0 <= found.beyond_speeds_pct(1, "itl") < found.beyond_speeds_pct(100, "itl")


def test_if_few_come_after_the_split_all_that_end_count():
    late = [(2000 + n, 2010, 2100, 5) for n in range(20)]
    early = [(900, 950, 1100, 5), (900, 950, 960, 5)]
    assert _counting(requests_of(*early, *late))["counts"].to_list() == [False, False] + 20 * [True]
    assert _counting(requests_of(*early, *late[1:]))["counts"].to_list() == [True, False] + 19 * [True]


def test_the_first_requests_are_compared_under_full_load():
    # One comes each ms and takes ten: the third ends at 1012, and what comes up to then loads the server.
    rows = _counting(requests_of(*((1000 + n, 1005 + n, 1010 + n, 5) for n in range(30))))
    kept = _first(rows, 3)
    assert kept["counts"].sum() == 3
    assert kept["arrival_ns"].max() == 1012 * 1_000_000


def test_blocks_of_a_platform_s_own_size_are_seen_in_the_steps():
    # Ten requests of 500 tokens in blocks of 128: 39 of them full, and on average half a block more for each.
    steps = {"num_prefill_reqs": 0, "num_decode_reqs": [10] * 3, "context_tokens": 5000, "kv_blocks_used": 44}
    assert block_tokens(pl.DataFrame(steps).lazy(), None, 16) == 128
    assert block_tokens(pl.DataFrame(steps | {"kv_blocks_used": 318}).lazy(), 400, 16) == 16
    # Half of the context is shared, and counted once.
    assert block_tokens(pl.DataFrame(steps | {"kv_blocks_used": 162}).lazy(), 400, 16) == 16
    # Nobody knows how many are used, but 100 of 16 tokens cannot hold 5,000.
    unknown = pl.DataFrame(steps).with_columns(kv_blocks_used=pl.lit(None, pl.Int64)).lazy()
    assert [block_tokens(unknown, blocks, 16) for blocks in (100, 300, None)] == [64, 16, 16]


ENGINE_OF = {"run_id": "r", "server": "s", "epoch": 0}


def test_tokens_that_no_step_computes_are_cached():
    prompts = pl.DataFrame(
        {"prompt_tokens": [300, 100, 200, 50], "cut": 1000, "cached_prompt_tokens": None}
    ).with_columns(pl.col("cached_prompt_tokens").cast(pl.Int64), **{k: pl.lit(v) for k, v in ENGINE_OF.items()})
    steps = pl.DataFrame(
        {"step_id": [1, 2, 3], "ts_start_ns": [1, 2, 2000], "num_prefill_reqs": [1, 2, 2]}
    ).with_columns(prefill_tokens=pl.Series([44, 150, 50]), **{k: pl.lit(v) for k, v in ENGINE_OF.items()})
    # The last step has a request that is not in the table.
    placed = prompts.with_columns(
        first_token_step=pl.Series([1, 2, 2, 3]), first_scheduled_step=pl.Series([1, 2, 2, 3])
    )
    assert _with_hits(placed, steps.lazy())["cached_prompt_tokens"].to_list() == [256, 50, 100, None]
    # Without places: 194 tokens of three prompts before the cut.
    alone = prompts.with_columns(first_token_step=pl.lit(None, pl.Int64), first_scheduled_step=None)
    assert _with_hits(alone, steps.lazy())["cached_prompt_tokens"].to_list() == [235, 35, 135, 0]


@pytest.mark.slow
def test_client_requests_are_replayed_on_server_steps(tmp_path):
    run = synth(SynthOptions(name="sampled", requests=400, journey_sampling=0.0, step_sampling=0.2, abort_fraction=0.0))
    folder = write_run(run, tmp_path)
    sent = run.truth_requests.sort("arrival_ns")
    front_s = 0.02
    zero_ns = sent["arrival_ns"][0]
    plan = [
        clients.Request(
            "",
            (r["arrival_ns"] - zero_ns) / 1e9,
            r["prompt_tokens"],
            r["output_tokens"],
            [(r[name] - zero_ns) / 1e9 + front_s for name in ("first_token_ns", "finished_ns")],
        )
        for r in sent.iter_rows(named=True)
    ]
    for name, form in clients.EXPERIMENT.items():
        (folder / name).write_bytes(form(plan))
    package.run([folder], tmp_path / "out")
    (found,) = package.replay_runs(tmp_path / "out").runs
    errors = {q.name: abs(q.error_pct) for q in found.quantities}
    assert found.reason is None
    assert found.requests > 80
    assert all(errors[f"{name}_p{q}_us"] < 5 for name in ("itl", "e2e", "ttft") for q in (50, 90))
    # Admissions are between the send and the queue too.
    assert "ms around the engine" in found.notes[-1]


@pytest.mark.slow
def test_replay_of_client_requests_has_no_queue(tmp_path):
    folder = write_run(synth(SynthOptions(form="guidellm", requests=200, abort_fraction=0.0)), tmp_path)
    package.run([folder], tmp_path / "out", options=package.TrainOptions(fast=True))
    (found,) = package.replay_runs(tmp_path / "out").runs
    errors = {q.name: abs(q.error_pct) for q in found.quantities}
    assert "waiting_mean" not in errors
    assert max(errors["itl_p50_us"], errors["e2e_p50_us"]) < 5


def _percentiles_us(rows, name):
    return [float(np.percentile(rows[f"{name}_us"].to_numpy(), q)) for q in (50, 90, 99)]


@pytest.mark.slow
def test_a_replay_compares_with_the_latencies_that_the_server_states(tmp_path):
    """An unmodified server stamps the outputs of one step one after the other; a counted step has one time."""
    run = synth(SynthOptions(name="r", requests=300, abort_fraction=0.0))
    write_stock(stock_requests(run, delay_us=1_000.0), tmp_path / "r")
    package.run([tmp_path / "r"], tmp_path / "out", options=package.TrainOptions(fast=True, features="batch"))
    (found,) = package.replay_runs(tmp_path / "out").runs
    assert found.reason is None
    requests = TableStore(tmp_path / "out/tables").read("requests")
    stamped = (requests["first_token_ns"] - requests["arrival_ns"]) / 1e3
    assert (stamped - requests["ttft_us"]).abs().max() > 500
    (cut,) = held_out_from(package.load(tmp_path / "out").deployment(), "r").values()
    held_out = requests.filter(pl.col("arrival_ns") >= cut)
    assert held_out.height == found.requests
    for name in ("ttft", "itl", "e2e"):
        assert [q.measured for q in found.of(name)] == pytest.approx(_percentiles_us(held_out, name)), name


def test_predictions_are_of_the_requests_that_a_replay_compares():
    """The first two of 22 requests were in flight at the split: their TTFT is not replayed, and not predicted beside
    the others."""
    facts = {"run_id": "r", "server": "s", "epoch": 0, "trace_id": [f"t{k}" for k in range(22)]}
    one_us = dict.fromkeys(("ttft_us", "itl_us", "e2e_us", "client_us", "output", "replayed_last"), 100.0)
    times = dict.fromkeys(("arrival", "first_scheduled", "replayed_scheduled", "replayed_first"), 0.0)
    others = {"core_request_id": "c", "done": [5, 5] + [0] * 20, "first_token": 50.0}
    rows = pl.DataFrame(facts | one_us | times | others).with_columns(
        finished="replayed_last", departed="replayed_last", replayed_departed="replayed_last"
    )
    # 20 to 39, and two that would be the largest.
    predicted = rows.with_columns(
        pl.Series(name, [1e6, 1e6, *map(float, range(20, 40))]) for name in ("ttft_us", "e2e_us")
    )
    found = {q.name: q for q in _quantities(rows, rows.clear(), predicted)}
    assert [found[f"ttft_p{q}_us"].predicted for q in (50, 90)] == pytest.approx([29.5, 37.1])
    assert found["e2e_p90_us"].predicted == pytest.approx(38.9), "of all 22"


def test_linear_admission_counts_as_on_an_idle_server():
    terms = [term("prompt_tokens", 2.0), term("running_depth", 50.0)]
    alpha = model(name="alpha.admission", intercept=value(300.0), terms=terms)
    assert admission_us(alpha, np.zeros(2), np.array([10, 20])).tolist() == [320, 340]
    assert admission_us(None, np.zeros(2), np.array([10, 20])).tolist() == [0, 0]


def test_a_departure_counts_the_batch_of_the_last_step():
    class Steps:
        def step(self, _):
            return 1000.0

        def decoding(self, _, steps, __):
            return np.full(steps, 1000.0)

    load = RequestLoad(np.zeros(3), np.full(3, 8), np.array([2, 2, 5]))
    times = replay(load, Steps(), EngineSettings(8, 64, 4))
    terms = [term("num_decode_reqs", 10.0), term("finishing_reqs", 1.0)]
    found = departure_us(model(name="alpha.departure", intercept=value(100.0), terms=terms), times, load.output_tokens)
    assert found.tolist() == [132, 132, 111], "three run when two of them end, one when the last does"


def test_a_run_without_a_replay_has_the_reason(trained, tracefit):
    code, said, _ = tracefit("replay", trained, "--json")
    runs = json.loads(said)["runs"]
    assert all(bool(run["quantities"]) != bool(run["reason"]) for run in runs)
    assert code == (0 if any(run["quantities"] for run in runs) else 1)


def test_training_publishes_what_the_command_replays(trained, tracefit):
    _, said, _ = tracefit("replay", trained, "--json")
    (deployment,) = json.loads((trained / "evaluation.json").read_text())["deployments"]
    published, replayed = deployment["replays"], json.loads(said)["runs"]
    assert [run["run_id"] for run in published] == [run["run_id"] for run in replayed]
    for one, other in zip(published, replayed, strict=True):
        assert [q["replayed"] for q in one["quantities"]] == pytest.approx([q["replayed"] for q in other["quantities"]])
        assert one["reason"] == other["reason"]


def test_a_run_that_is_not_there_is_named(trained, tracefit):
    code, _, error = tracefit("replay", trained, "--run", "nowhere")
    assert code == 2
    assert "there is no run nowhere" in error


@pytest.mark.parametrize(
    ("traced", "sampling", "reason"),
    [
        (0, 0.0, "no request was traced, only steps"),
        (4, 0.5, "journeys are a sample of 50%: the requests between them are unknown"),
        # Without any journey, other spans may show every request.
        (4, 0.0, None),
        (4, None, None),
    ],
)
def test_the_reason_against_a_replay_is_what_was_traced(traced, sampling, reason):
    facts = {"arrival_ns": range(traced), "prompt_tokens": [5] * traced, "output_tokens": [3] * traced}
    requests = pl.DataFrame(facts | {"finish_status": ["length"] * traced, "finished_ns": [9] * traced})
    run = pl.DataFrame({"journey_sampling": [sampling]}, schema={"journey_sampling": pl.Float64})
    assert missing_for_replay(run, requests, {"server": 1}) == reason


def test_a_replay_is_printed_with_its_queue_as_bars():
    queue = tuple(QueueWindow(at, *sides) for at, sides in enumerate([(0.0, 0.0), (4.0, 1.0), (8.0, 8.0)]))
    quantity = Replayed("e2e_p50_us", 200.0, 220.0, 10.0, 100.0)
    run = RunReplay("busy", "s", 30, 1, (quantity,), queue=queue, notes=("nothing is guessed",))
    text = replay_text(ReplayResult((run, RunReplay("sparse", None, reason="only steps were traced"))))
    assert "e2e_p50_us       200       220  +10.0 %   -50.0 %" in text
    assert "measured   ▄█\n" in text
    assert "replayed   ▁█\n" in text
    assert "note: nothing is guessed" in text
    assert "run sparse is not replayed: only steps were traced" in text


class _Requests:
    """Tables of a run of one server: a request every 10 ns that takes 5, and one in the engine all the time."""

    rows = pl.DataFrame(
        {"server": "s", "arrival_ns": [1, *range(10, 1010, 10)], "finished_ns": [9_999, *range(15, 1015, 10)]}
    ).with_columns(
        pl.lit(None).alias(name) for name in LOOP_REQUEST_COLUMNS if name not in ("server", "arrival_ns", "finished_ns")
    )

    def read(self, _name, _runs, columns):
        return self.rows.select(columns)

    def scan(self, _name, _runs):
        return self.rows.lazy()


def test_of_very_many_requests_those_about_the_cut_are_read(monkeypatch):
    monkeypatch.setattr(replay_command, "MOST_READ", 20)
    read = replay_command._requests_near(_Requests(), "r", {"s": 705})
    # Ten that come before the cut, ten after it, and who is inside.
    assert read["arrival_ns"].to_list() == [1, *range(610, 810, 10)]
    monkeypatch.setattr(replay_command, "MOST_READ", 101)
    assert replay_command._requests_near(_Requests(), "r", {"s": 705}).height == 101
