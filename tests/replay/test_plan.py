"""Plans by hand: a step is 1,000 us whatever is in it, 8 requests run at once, and each takes 10 steps; so 800 a second are the most."""

from __future__ import annotations

import json
import re

import numpy as np
import polars as pl
import pytest

import tracefit
from tracefit.commands.ingest import ingest
from tracefit.replay.plan import Simulated, TrafficSample, draw
from tracefit.synth import LoadPhase, SynthOptions, synth, write_run
from tracefit.tables.store import TableStore

TEN = tracefit.LoadOptions(prompt=10, output=10)


@pytest.fixture
def constant(tmp_path):
    """Return a coefficient file; `training` is the range of the requests that decode, `ci95` that of the step time."""

    def write(training=(0, 8), ci95=None, name="beta.json", feature="num_decode_reqs"):
        term = {"feature": feature, "unit": "us/request", "value": 0.0, "training_range": training}
        model = {
            "name": "beta.cycle_time",
            "deployment_id": "small.gpu.tp1.00000000",
            "form": "linear",
            "intercept": {"value": 1000.0, "ci95": ci95},
            "terms": [term],
            "deployment": {
                "model": "small",
                "gpu": "H100",
                "architecture": {},
                "hardware": {},
                "settings": {
                    "max_num_seqs": 8,
                    "max_num_batched_tokens": 2048,
                    "tensor_parallel": 2,
                    "max_model_len": 4096,
                },
            },
        }
        beta = {"schema": "tracefit/coefficients", "version": 3, "kind": "beta", "models": [model]}
        (tmp_path / name).write_text(json.dumps(beta))
        return tmp_path / name

    return write


def one(folder, **asked):
    (plan,) = tracefit.plan(folder, requests=asked.pop("requests", TEN), **asked).plans
    return plan


def test_the_largest_rate_is_slots_over_request_time(constant):
    assert one(constant(), rate=100, servers=2).capacity_per_s == pytest.approx(1600)
    twice = one(constant(), rate=100, servers=1, settings={"max_num_seqs": 16})
    assert twice.capacity_per_s == pytest.approx(1600)


def test_latencies_are_those_of_the_steps(constant):
    at = one(constant(), rate=20, servers=1).at
    assert at.latency("itl_p99_ms").value == pytest.approx(1.0)
    assert at.latency("ttft_p50_ms").value == pytest.approx(1.0), (
        "on an idle server the first step begins at once"
    )
    assert 1.0 < at.latency("ttft_p99_ms").value <= 2.0, "else the step that runs ends first"
    assert at.running_mean == pytest.approx(0.2, rel=0.05), "Little's law: 20 a second for 10 ms each"


def test_a_loose_objective_needs_the_servers_that_keep_up(constant):
    plan = one(constant(), rate=1900, slo_ms={"itl_p99": 1.5})
    assert (plan.servers, plan.met, plan.largest_rate_per_s) == (3, True, pytest.approx(2400))
    # One server fewer has more than 800 a second each.
    assert one(constant(), rate=1900, servers=2).reason.startswith("the capacity of 2 servers is 1,600 ")


def test_servers_are_enough_at_the_high_end(constant, tracefit):
    """A server serves 800 requests a second, and 800 / 1.084 with steps at the end of their 90 % range."""
    model = constant(ci95=(900.0, 1100.0))
    plan = one(model, rate=2300, slo_ms={"itl_p99": 1.5})
    assert (plan.servers, plan.servers_likely, plan.servers_low) == (4, 3, 3)
    _, stdout, _ = tracefit(
        *("plan", model, "--prompt", "10", "--output", "10", "--rate", "2300", "--slo", "itl_p99=1.5")
    )
    assert "4 servers (3 may be enough): the objectives hold" in " ".join(stdout.split())


def test_where_no_number_is_sure_the_likely_one_is_said_to_be_so(constant):
    plan = one(constant(ci95=(900.0, 1100.0)), rate=1900, slo_ms={"itl_p99": 1.05})
    assert (plan.servers, plan.servers_likely) == (3, 3)
    assert plan.notes[0].startswith("no number of servers is sure to be enough")


def test_drawn_lengths_are_spread_as_in_the_sample():
    """P90 of 900 lengths that are drawn at random out of 9,000 is 4 % off on average."""
    rng, off = np.random.default_rng(3), []
    for _ in range(12):
        prompt, output = rng.lognormal(6, 1, (2, 9000)).astype(int) + 1
        drawn = draw(TrafficSample(prompt, output, 0 * prompt), 900, 1)
        pairs = ((drawn.prompt_tokens, prompt), (drawn.output_tokens, output))
        off.append([abs(np.percentile(found, 90) / np.percentile(of, 90) - 1) for found, of in pairs])
    assert (np.mean(off, axis=0) < (0.025, 0.01)).all()


@pytest.mark.parametrize(
    ("alike", "sampled", "width"),
    # 1.645 times the error of the median's rank: half of the root of 1 / 2000 or 1 / 20 and of what was sampled.
    [(1, np.inf, 0.0184), (100, np.inf, 0.184), (1, 2000, 0.026)],
)
def test_the_draw_is_as_uncertain_as_its_parts_differ(alike, sampled, width):
    values = np.random.default_rng(2).permutation(np.arange(1, 2000 // alike + 1) / (2000 // alike))
    found = Simulated(1.0, {"e2e": np.repeat(1e3 * values, alike)}, (1, 1), 0, 0, 0, (), sampled)
    assert (found.drawn("e2e_p50", high=True) - 1) / 2 == pytest.approx(width, rel=0.35)


def test_fewer_servers_than_planned_miss_the_objective(constant):
    objective = {"ttft_p99": 3.0}
    plan = one(constant(), rate=900, slo_ms=objective)
    assert plan.met
    assert plan.at.latency("ttft_p99_ms").value <= 3.0
    assert plan.largest_rate_per_s >= 900
    assert one(constant(), rate=900, servers=plan.servers_likely - 1, slo_ms=objective).met is not True


def test_no_number_of_servers_makes_a_step_shorter(constant):
    result = tracefit.plan(constant(), rate=40, slo_ms={"itl_p50": 0.5}, requests=TEN)
    assert result.exit_code == 1
    assert "itl_p50 is 1 ms, not 0.5" in result.plans[0].reason


def test_a_price_is_of_every_gpu_of_a_server(constant):
    plan = one(constant(), rate=100, servers=3, price=3.6)
    # 6 GPUs at a tenth of a cent a second, for 1,000 output and as many prompt tokens.
    assert plan.cost_per_million_output_tokens == pytest.approx(6.0)
    assert plan.cost_per_million_tokens == pytest.approx(3.0)


def test_slower_steps_make_the_interval(constant):
    at = one(constant(ci95=(900.0, 1100.0)), rate=20, servers=1).at
    found = at.latency("itl_p50_ms")
    # 1.645 sigma of the 1.96 that a 95 % interval spans: 8.4 %.
    assert (found.low, found.high) == (pytest.approx(0.916, abs=0.01), pytest.approx(1.084, abs=0.01))


def test_an_answer_beyond_the_training_says_so(constant):
    assert not one(constant(), rate=500, servers=1).at.extrapolates
    plan = one(constant(training=(0, 2)), rate=500, servers=1)
    assert plan.at.extrapolates
    assert plan.notes[0].startswith("this rests on an extrapolation")
    assert "num_decode_reqs 3 to 8" in plan.notes[0]


def test_bursts_wait_longer(constant):
    steady, bursts = (
        one(constant(), rate=500, servers=1, requests=tracefit.LoadOptions(10, 10, shape))
        for shape in (1, 0.2)
    )
    name = "ttft_p99_ms"
    assert bursts.at.latency(name).value > 1.5 * steady.at.latency(name).value


@pytest.mark.parametrize(("in_turn", "spread"), [(False, 1.0), (True, 0.5)])
def test_in_turn_each_server_gets_every_fourth_request(in_turn, spread):
    """The sum of four exponential gaps has half the relative spread of one; a random part of a Poisson process is one."""
    one = np.array([1])
    drawn = draw(TrafficSample(one, one, 0 * one, in_turn=in_turn), 4000, 4)
    gaps = np.diff(drawn.arrival_us)
    assert gaps.std() / gaps.mean() == pytest.approx(spread, rel=0.05)


def test_requests_in_turn_wait_less(constant):
    waits = [
        one(constant(), rate=2100, servers=3, requests=tracefit.LoadOptions(10, 10, router=router))
        for router in ("random", "round_robin")
    ]
    random, in_turn = (w.at.latency("ttft_p99_ms").value for w in waits)
    assert in_turn < 0.8 * random
    assert "requests go to servers in turn" in waits[1].notes


def test_requests_of_a_file(constant, tmp_path):
    rows = pl.DataFrame({"prompt_tokens": [10, 10], "output_tokens": [5, 15]})
    rows.write_csv(tmp_path / "load.csv")
    plan = one(constant(), rate=80, servers=1, requests=tracefit.LoadOptions(file=tmp_path / "load.csv"))
    assert plan.load.output_tokens == 10
    assert plan.capacity_per_s == pytest.approx(800, rel=0.02)


def test_what_is_not_known_of_a_step_is_no_step_without_time(constant):
    """The share of KV blocks in use is not known without their number: such steps are not as short as can be."""
    model = constant(feature="kv_usage_ratio")
    assert "does not know num_gpu_blocks of a step" in one(model, rate=20, servers=1).reason
    assert (
        one(model, rate=20, servers=1, settings={"num_gpu_blocks": 101}).at.latency("itl_p50_ms").value == 1
    )


def test_plan_without_requests_has_a_reason(constant):
    found = tracefit.plan(constant(), rate=20, servers=1).plans[0].reason
    options = "`LoadOptions.prompt` and `LoadOptions.output`, or `LoadOptions.file`"
    assert found == f"no requests are traced here; give {options}"


def test_folders_are_planned_side_by_side(constant):
    plans = tracefit.plan([constant(), constant(name="other.json")], rate=900, servers=1, requests=TEN).plans
    assert [p.folder.rpartition("/")[2] for p in plans] == ["beta.json", "other.json"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--rate", "40"), "--slo: no objective is given"),
        (("--slo", "ttft_p99=500"), "neither --rate nor --servers is given"),
        (("--rate", "40", "--slo", "ttft=500"), "--slo ttft=500: no objective"),
        (("--rate", "40", "--slo", "speed_p99=500"), "--slo speed_p99=500: no objective"),
        (("--rate", "40", "--slo", "ttft_p0=500"), "--slo ttft_p0=500: no objective"),
        (("--rate", "-1", "--servers", "1"), "--rate -1: is out of range"),
        (("--rate", "1", "--servers", "1", "--figure", "plan.png"), "--figure plan.png: a figure is a page"),
        (("--rate", "1", "--servers", "1", "--burstiness", "0"), "--burstiness 0: is out of range"),
        (
            ("--rate", "1", "--servers", "1", "--set", "tp=4"),
            "--set tp=4: step times are those of tensor_parallel 2: record such a server",
        ),
        (
            ("--rate", "1", "--servers", "1", "--set", "seed=4"),
            "no rule of the scheduler and no model reads it",
        ),
        (("--rate", "1", "--servers", "1", "--prompt", "9000"), "no request is left to plan for"),
        (("--rate", "1", "--servers", "1", "--load", "no.csv"), "no.csv: cannot be read"),
        (
            ("--rate", "9", "--slo", "itl_p99=5", "--output", "1"),
            "--slo itl_p99: nearly every request has one",
        ),
    ],
)
def test_wrong_options_are_one_line(constant, tracefit, options, said):
    lengths = () if "--load" in options else ("--prompt", "10", "--output", "10")
    code, stdout, stderr = tracefit("plan", constant(), *lengths, *options)
    assert (code, stdout, stderr.count("\n")) == (2, "", 1)
    assert said in stderr


def test_a_plan_reads_as_a_sentence(constant, tracefit):
    code, stdout, _ = tracefit(
        *("plan", constant(), "--prompt", "10", "--output", "10", "--rate", "1900", "--slo", "itl_p99=1.5")
    )
    assert code == 0
    text = " ".join(stdout.split())
    assert "3 servers: the objectives hold at 1,900 requests per second; the largest rate is 2,400" in text
    assert "note: no run was replayed in a closed loop" in text


def test_a_plan_is_drawn_on_a_page(constant, tmp_path):
    pytest.importorskip("plotly")
    page = tmp_path / "plan.html"
    plan = one(constant(training=(0, 7)), rate=900, slo_ms={"ttft_p99": 3.0}, figure=page)
    (drawn,) = json.loads(re.search(r'id="figures">(.*?)</script>', page.read_text(), re.DOTALL)[1])[
        "figures"
    ].values()
    assert drawn["curves"]["rates"] == pytest.approx([p.rate_per_s for p in plan.curve])
    assert drawn["curves"]["limits"] == {"TTFT P99": 3.0}
    assert {t["line"]["dash"] for t in drawn["data"]} == {"solid", "dot"}, (
        "beyond seven requests at once it is dotted"
    )
    assert drawn["layout"]["shapes"][0]["x0"] == pytest.approx(900)


BARS = {"ttft": (8, 12, 12), "itl": (4, 4, 8), "e2e": (3, 3, 5)}
"""The most that P50, P90 and P99 may be off, in percent."""


@pytest.mark.slow
def test_plan_for_an_unrecorded_load_is_close(trained_at, truth_at):
    """Recorded at 14 requests per second, planned for 21, and compared with a run at 21 with the same requests."""
    plan = one(trained_at(14.0), rate=21.0, servers=1, requests=None)
    truth = truth_at(21.0)
    for latency, bars in BARS.items():
        measured = np.percentile(truth[f"{latency}_us"].drop_nulls().to_numpy(), (50, 90, 99)) / 1e3
        for q, bar, value in zip((50, 90, 99), bars, measured, strict=True):
            found = plan.at.latency(f"{latency}_p{q}_ms")
            assert found.value == pytest.approx(value, rel=bar / 100), f"{found.name}: {value}"


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    def make(rate):
        root = tmp_path_factory.mktemp("rate")
        options = SynthOptions(
            rate_per_s=rate,
            requests=3000,
            phases=(LoadPhase("steady", 1.0, 1.0),),
            abort_fraction=0.0,
            seed=2,
        )
        return root, write_run(synth(options), root / "runs")

    return make


@pytest.fixture(scope="module")
def trained_at(generated):
    def make(rate):
        root, folder = generated(rate)
        tracefit.run([folder], root / "out", options=tracefit.TrainOptions(fast=True))
        return root / "out"

    return make


@pytest.fixture(scope="module")
def truth_at(generated):
    def make(rate):
        root, folder = generated(rate)
        ingest([folder], root / "tables")
        return TableStore(root / "tables").read("requests")

    return make
