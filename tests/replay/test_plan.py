"""Plans by hand: a step is 1,000 us whatever is in it, 8 requests run at once, and each takes 10 steps; so 800 a second
are the most."""

from __future__ import annotations

import json
import re

import numpy as np
import polars as pl
import pytest

import tracefit
from replay.conftest import METRICS
from tracefit.coefficients.models import load
from tracefit.commands.ingest import ingest
from tracefit.replay.engine import EngineSettings
from tracefit.replay.plan import Curve, Fleet, Simulated, TrafficSample, carried_per_s, draw, full_server
from tracefit.synth import LoadPhase, SynthOptions, synth, write_run
from tracefit.tables.store import TableStore

TEN = tracefit.LoadOptions(prompt=10, output=10)
CHANGED = {"stretch_s": 30.0, "fastest_pct": -8.0, "slowest_pct": 9.0, "holdout_pct": 2.0, "adjusted": True}

pytestmark = pytest.mark.usefixtures("fewer_requests")


def one(folder, **asked):
    (plan,) = tracefit.plan(folder, requests=asked.pop("requests", TEN), **asked).plans
    return plan


@pytest.mark.slow
def test_the_largest_rate_is_slots_over_request_time(constant):
    assert one(constant(), rate=100, servers=2).capacity_per_s == pytest.approx(1600)
    twice = one(constant(), rate=100, servers=1, settings={"max_num_seqs": 16})
    assert twice.capacity_per_s == pytest.approx(1600)


def test_the_capacity_of_many_slots_has_the_prompts_of_those_that_follow(constant):
    """A thousand requests of 500 steps each are two a step, although the first thousand end ten a step: as their
    prompts began."""
    load = tracefit.LoadOptions(prompt=200, output=500)
    plan = one(constant(), rate=100, servers=1, settings={"max_num_seqs": 1000}, requests=load)
    assert plan.capacity_per_s == pytest.approx(2000, rel=0.02)


@pytest.mark.parametrize(
    ("decoded_us", "computed_us", "whole_us"), [(10, 2, 100 * 40 * 10 + 100 * 8 * 2), (10, 0, 100 * 40 * 10)]
)
def test_the_time_of_all_steps_is_that_of_their_tokens(decoded_us, computed_us, whole_us):
    # A hundred steps with eight tokens of prompts each; the first half generates 30 tokens a step, the other one 50.
    batch = np.repeat([30, 50], 50)
    time = 1.0 * (batch * decoded_us + 8 * computed_us)
    steps = pl.DataFrame({"batch": batch, "steps": 1, "prefill": 8.0, "time": time})
    begin = float(time[:50].sum() / 2)
    assert full_server(steps, 20, begin, float(time[:75].sum())).request_us == pytest.approx(whole_us / 20)


def test_a_kind_of_tokens_that_would_save_time_takes_none():
    decoded = np.r_[np.full(50, 30), np.full(50, 50)]
    computed = np.r_[np.full(50, 8.0), np.full(50, 4.0)]
    steps = pl.DataFrame({"batch": decoded, "steps": 1, "prefill": computed, "time": decoded * 10 - computed})
    full = full_server(steps, 1, 0.0, float(steps["time"].sum()))
    assert full.computed_us == 0
    assert 9.7 < full.decoded_us < 10


def test_latencies_are_those_of_the_steps(constant):
    at = one(constant(), rate=20, servers=1).at
    assert at.latency("itl_p99_ms").value == pytest.approx(1.0)
    assert at.latency("ttft_p50_ms").value == pytest.approx(1.0), "on an idle server the first step begins at once"
    assert 1.0 < at.latency("ttft_p99_ms").value <= 2.0, "else the step that runs ends first"
    assert at.running_mean == pytest.approx(0.2, rel=0.05), "Little's law: 20 a second for 10 ms each"


def test_a_loose_objective_needs_the_servers_that_keep_up(constant):
    plan = one(constant(), rate=1900, slo_ms={"itl_p99": 1.5})
    assert (plan.servers, plan.met, plan.largest_rate_per_s) == (3, True, pytest.approx(2400))
    # One server fewer has more than 800 a second each.
    assert one(constant(), rate=1900, servers=2).reason.startswith("the capacity of 2 servers is 1,600 ")


@pytest.mark.slow
def test_servers_are_enough_at_the_high_end(constant, tracefit):
    """A server serves 800 requests a second, and 800 / 1.084 with steps at the end of their 90 % range."""
    model = constant(ci95=(900.0, 1100.0))
    plan = one(model, rate=2300, slo_ms={"itl_p99": 1.5})
    assert (plan.servers, plan.servers_likely, plan.servers_low) == (4, 3, 3)
    _, stdout, _ = tracefit(
        *("plan", model, "--prompt", "10", "--output", "10", "--rate", "2300", "--slo", "itl_p99=1.5")
    )
    assert "4 servers (3 may be enough): the objectives hold" in " ".join(stdout.split())


@pytest.mark.slow
def test_where_no_number_is_sure_the_likely_one_is_said_to_be_so(constant):
    plan = one(constant(ci95=(900.0, 1100.0)), rate=1900, slo_ms={"itl_p99": 1.05})
    assert (plan.servers, plan.servers_likely) == (3, 3)
    assert plan.notes[0].startswith("no number of servers is sure to be enough")


@pytest.mark.slow
def test_a_kind_of_which_no_number_is_sure_comes_last(constant, tracefit):
    """Steps of 900 to 1,100 us may be above 1,050, those of 1,000 are not: of both, three servers carry the load."""
    unsure, sure = constant(ci95=(900.0, 1100.0), name="a.json"), constant(name="b.json")
    asked = ("--prompt", "10", "--output", "10", "--rate", "1900", "--slo", "itl_p99=1.05")
    _, stdout, _ = tracefit("plan", unsure, sure, *asked)
    rows = [line.split() for line in stdout.splitlines()[1:3]]
    assert [(row[1], row[2]) for row in rows] == [(str(sure), "3"), (str(unsure), "3,")]
    assert "3, not sure" in stdout.splitlines()[2]
    assert "3 servers may be enough, and no number is sure: the objectives hold" in " ".join(stdout.split())


@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 2, 3])
def test_a_rate_holds_if_it_is_not_above_the_largest(constant, servers):
    """Bursts make latencies of short replays inexact, and the answers to both questions meet nevertheless."""
    model, bursts = constant(), tracefit.LoadOptions(prompt=10, output=10, burstiness=0.3)
    objective = {"ttft_p99": 8.0}
    found = one(model, servers=servers, slo_ms=objective, requests=bursts)
    assert found.at.rate_per_s == found.largest_rate_per_s
    assert found.at.latency("ttft_p99_ms").value <= 8
    for share in (0.9, 0.98, 1.02, 1.1):
        rate = share * found.largest_rate_per_s
        asked = one(model, servers=servers, rate=rate, slo_ms=objective, requests=bursts)
        assert asked.met == (asked.largest_rate_per_s >= rate)
        assert asked.largest_rate_per_s == pytest.approx(found.largest_rate_per_s, rel=0.3), "of few requests"


def _at(rate, e2e_ms):
    return Simulated(rate, {"e2e": np.full(40, 1e3 * e2e_ms)}, (1, 1), 0, 0, 0, (), np.inf)


def test_a_longer_replay_moves_a_curve_near_it():
    """Half as much again at a rate: all of it there, a half of it half way to where its reach ends, and nothing
    beyond. The reach is a tenth of the largest rate.
    """
    points = [_at(rate, 10 * rate) for rate in (10.0, 50.0, 85.0, 90.0, 100.0)]
    longer = _at(80.0, 1.5 * Curve(points, {}).values_ms("e2e_p50", np.array([80.0]))[0])
    for anchors in ([longer], [longer, _at(90.0, 900)]):
        moved = Curve(points, {}, anchors)
        assert moved.rates.tolist() == [10, 50, 80, 85, 90, 100]
        expected = [100, 500, 1.5 * 800, 1.5**0.5 * 850, 900, 1000]
        assert moved.values_ms("e2e_p50", moved.rates) == pytest.approx(expected, rel=0.002)


def test_an_interval_far_from_a_longer_replay_is_that_of_the_short_one():
    spread = Simulated(10.0, {"e2e": np.linspace(5e3, 15e3, 40)}, (1, 1), 0, 0, 0, (), np.inf)
    points = [spread, _at(50.0, 500), _at(100.0, 1000)]
    for curve in (Curve(points, {}), Curve(points, {}, [_at(90.0, 900)])):
        low, high = (curve.ends_ms("e2e_p50", np.array([10.0]), high=end)[0] for end in (False, True))
        assert low < 9.9
        assert high > 10.1


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


@pytest.mark.slow
def test_fewer_servers_than_planned_miss_the_objective(constant):
    objective = {"ttft_p99": 3.0}
    plan = one(constant(), rate=900, slo_ms=objective)
    assert plan.met
    assert plan.at.latency("ttft_p99_ms").value <= 3.0
    assert plan.largest_rate_per_s >= 900
    assert one(constant(), rate=900, servers=plan.servers_likely - 1, slo_ms=objective).met is not True


@pytest.mark.slow
def test_no_number_of_servers_makes_a_step_shorter(constant):
    result = tracefit.plan(constant(), rate=40, slo_ms={"itl_p50": 0.5}, requests=TEN)
    assert result.exit_code == 1
    assert "itl_p50 is 1 ms, not 0.5" in result.plans[0].reason


@pytest.mark.slow
def test_a_price_is_of_every_gpu_of_a_server(constant):
    plan = one(constant(), rate=100, servers=3, price=3.6)
    # 6 GPUs at a tenth of a cent a second, for 1,000 output and as many prompt tokens.
    assert plan.cost_per_million_output_tokens == pytest.approx(6.0)
    assert plan.cost_per_million_tokens == pytest.approx(3.0)


@pytest.mark.slow
def test_slower_steps_make_the_interval(constant):
    at = one(constant(ci95=(900.0, 1100.0)), rate=20, servers=1).at
    found = at.latency("itl_p50_ms")
    # 1.645 sigma of the 1.96 that a 95 % interval spans: 8.4 %.
    assert (found.low, found.high) == (pytest.approx(0.916, abs=0.01), pytest.approx(1.084, abs=0.01))


@pytest.mark.slow
def test_the_speed_of_the_machine_is_in_every_interval(constant):
    """The 95th percentile of Student's t with 9 degrees of freedom is 1.833: 5 % of speed make a step 9.6 % longer."""
    model = constant(speed={**CHANGED, "stretches": 10, "sd_pct": 5.0})
    plan = one(model, rate=20, servers=1)
    found = plan.at.latency("itl_p50_ms")
    assert (found.low, found.high) == (pytest.approx(1 / 1.096, abs=0.02), pytest.approx(1.096, abs=0.02))
    assert plan.capacity_per_s == pytest.approx(800)
    assert (plan.capacity_low, plan.capacity_high) == pytest.approx((800 / 1.096, 800 * 1.096), rel=0.02)
    assert any("the speed of the machine changed during the recording" in note for note in plan.notes)
    rates = one(model, servers=1, slo_ms={"itl_p99": 1.2})
    assert (rates.largest_rate_low, rates.largest_rate_high) == pytest.approx((730, 877), rel=0.02)


@pytest.mark.slow
def test_a_speed_that_did_not_change_is_in_no_interval(constant):
    model = constant(speed={**CHANGED, "stretches": 10, "sd_pct": 1.5, "adjusted": False})
    found = one(model, rate=20, servers=1).at.latency("itl_p50_ms")
    assert (found.low, found.high) == pytest.approx((1.0, 1.0), abs=0.001)


@pytest.mark.slow
def test_beyond_the_training_the_form_is_as_wrong_as_it_was_there(constant):
    """All steps are outside the training: 10 % beyond the load, 1.645 times for an end of 90 %."""
    beyond = {**dict.fromkeys(METRICS), "n": 100, "bias_pct": -10.0, "load": "running_tokens", "cut": 5.0}
    model = constant(training=(9, 10), load_extrapolation={**beyond, "gradient_boosting": None})
    found = one(model, rate=500, servers=1).at.latency("itl_p50_ms")
    assert found.high == pytest.approx(1.178, rel=0.04)
    assert one(constant(training=(9, 10)), rate=500, servers=1).at.latency("itl_p50_ms").high < 1.02


@pytest.mark.slow
@pytest.mark.parametrize("rate", [100, 900, 1500])
def test_the_largest_rate_does_not_depend_on_the_rate_asked(constant, rate):
    model, objective = constant(ci95=(900.0, 1100.0)), {"ttft_p99": 3.0}
    alone, beside = (
        one(model, servers=2, slo_ms=objective),
        one(model, rate=rate, servers=2, slo_ms=objective),
    )
    ends = ("largest_rate_low", "largest_rate_per_s", "largest_rate_high", "knee_per_s", "capacity_high")
    assert [getattr(beside, end) for end in ends] == [getattr(alone, end) for end in ends]


@pytest.mark.slow
def test_the_largest_rate_of_two_objectives_is_the_smaller_one(constant):
    first, second = {"ttft_p99": 3.0}, {"e2e_p90": 11.5}
    each = [one(constant(), servers=1, slo_ms=slo).largest_rate_per_s for slo in (first, second)]
    assert each[0] != each[1]
    for both in ({**first, **second}, {**second, **first}):
        assert one(constant(), servers=1, slo_ms=both).largest_rate_per_s == min(each)


@pytest.mark.parametrize(("rate", "is_open"), [(755, False), (765, True)])
def test_above_95_percent_of_the_capacity_only_itl_has_a_high_end(constant, rate, is_open):
    """A server carries 800 a second: 760 are 95 % of them."""
    plan = one(constant(), rate=rate, servers=1)
    assert (plan.at.latency("ttft_p50_ms").high is None) is is_open
    assert plan.at.latency("ttft_p50_ms").value > 0
    assert plan.at.latency("itl_p50_ms").high is not None
    assert any("more than 95 % of the capacity" in note for note in plan.notes) is is_open


@pytest.mark.slow
def test_a_rate_that_shorter_steps_would_serve_is_answered(constant, tracefit):
    """830 a second are more than the 800 that are likely, and less than the 873 at the low end of the step time."""
    model = constant(ci95=(900.0, 1100.0))
    plan = one(model, rate=830, servers=1, slo_ms={"ttft_p99": 500})
    ttft, itl = (plan.at.latency(f"{name}_p50_ms") for name in ("ttft", "itl"))
    assert (plan.reason, plan.met, ttft.value, ttft.high) == (None, False, None, None)
    assert 0.5 < ttft.low < 10
    assert itl.value == pytest.approx(1.0), "of full batches, however long the queue is"
    lengths = ("--prompt", "10", "--output", "10")
    code, stdout, _ = tracefit("plan", model, *lengths, "--rate", "830", "--servers", "1")
    assert code == 0
    assert re.search(r"TTFT P50 +grows +[\d.]+ to no end", stdout)
    assert re.search(r"the capacity is 800 \(7[34]\d to 8[67]\d\)", " ".join(stdout.split()))
    assert "their queues only grow" in one(model, rate=900, servers=1).reason


def test_a_recording_that_carried_more_is_the_bound(constant):
    deployment = load(constant()).deployment(None)
    tens = np.full(10, 10)
    fleet = Fleet(deployment, {}, EngineSettings(8, 2048, 16), TrafficSample(tens, tens, 0 * tens), 400, 1000.0)
    assert fleet.modelled_capacity == pytest.approx(800)
    assert (fleet.capacity, fleet.pace) == (1000.0, pytest.approx(0.8))
    found = fleet.at(1, 900.0)
    assert found.percentile_ms("itl_p50_ms") == pytest.approx(0.8), "all steps are as much shorter"


def test_carried_requests_are_those_of_half_a_minute():
    """10 a second for 20 s, then 4 a second for 60: 30 s have (200 + 40) / 30 = 8."""
    at_s = np.concatenate([np.arange(0, 20, 0.1), np.arange(20, 80, 0.25)])
    tokens = np.full((len(at_s), 2), 50.0)
    assert carried_per_s((1e9 * at_s).astype(np.int64), tokens, (50, 50)) == pytest.approx(8, rel=0.02)
    # Those that came fast have half the mean output.
    tokens[:200, 1] = 25
    assert carried_per_s((1e9 * at_s).astype(np.int64), tokens, (50, 50)) == pytest.approx(14 / 3, rel=0.02)
    assert carried_per_s((1e9 * at_s[:200]).astype(np.int64), tokens[:200], (50, 50)) is None


# -- arrivals ----------------------------------------------------------------------------------------------


@pytest.fixture
def load_of(tmp_path):
    """Return options for a file of requests with gaps between their arrivals, in seconds."""

    def write(gaps_s, **options):
        frame = pl.DataFrame({"arrival_s": np.cumsum(gaps_s), "prompt_tokens": 10, "output_tokens": 10})
        frame.write_csv(tmp_path / "load.csv")
        return tracefit.LoadOptions(file=tmp_path / "load.csv", **options)

    return write


def several_rates(seed=1):
    """Return gaps of a Poisson process of 40, 200, 80 and 320 a second."""
    rng = np.random.default_rng(seed)
    return np.concatenate([rng.exponential(1 / rate, 50 * rate) for rate in (40, 200, 80, 320)])


@pytest.mark.slow
def test_several_rates_of_a_recording_are_no_bursts(constant, load_of):
    at = {}
    for arrivals in ("poisson", "traced"):
        plan = one(constant(), rate=600, servers=1, requests=load_of(several_rates(), arrivals=arrivals))
        assert plan.arrivals.kind == arrivals
        at[arrivals] = plan.at.latency("ttft_p99_ms").value
    given = one(constant(), rate=600, servers=1, requests=tracefit.LoadOptions(10, 10, 1.0)).at
    assert at["poisson"] == given.latency("ttft_p99_ms").value
    assert at["traced"] == pytest.approx(at["poisson"], rel=0.35), "within stretches they come at random too"


@pytest.mark.slow
def test_bursts_of_a_recording_are_planned_for(constant, load_of):
    gaps = np.random.default_rng(1).gamma(0.25, 4 / 100, 6000)
    plan = one(constant(), rate=500, servers=1, requests=load_of(gaps))
    assert (plan.arrivals.kind, plan.arrivals.is_given) == ("gamma", False)
    assert plan.arrivals.shape == pytest.approx(0.25, rel=0.2)
    assert plan.arrivals.shape == pytest.approx(1 / plan.arrivals.traced_dispersion)
    poisson = one(constant(), rate=500, servers=1).at.latency("ttft_p99_ms").value
    assert plan.at.latency("ttft_p99_ms").value > 1.3 * poisson


@pytest.mark.slow
def test_the_first_lines_say_which_arrivals_were_used(constant, load_of, tracefit):
    file, model = load_of(several_rates()).file, constant()
    asked = ("plan", model, "--load", file, "--rate", "20", "--servers", "1")
    _, stdout, _ = tracefit(*asked)
    first, second, *_ = stdout.splitlines()
    assert first.startswith("deployment ")
    assert second.startswith("  Poisson arrivals at a steady rate: the recorded ones, within")
    (found,) = json.loads(tracefit(*asked, "--json")[1])["plans"]
    assert list(found)[:3] == ["folder", "deployment_id", "arrivals"]
    assert found["arrivals"]["kind"] == "poisson"
    assert found["arrivals"]["traced_dispersion"] == pytest.approx(1, abs=0.1)
    _, stdout, _ = tracefit(*asked, "--burstiness", "0.5")
    assert stdout.splitlines()[1] == "  gamma arrivals of shape 0.5 at a steady rate"
    _, stdout, _ = tracefit(*asked, "--arrivals", "traced")
    assert stdout.splitlines()[1].startswith("  arrivals as traced at a steady rate")


def test_traced_arrivals_need_some(constant):
    plan = one(constant(), rate=20, servers=1, requests=tracefit.LoadOptions(10, 10, arrivals="traced"))
    assert plan.reason.startswith("0 gaps between arrivals at steady rates are known, 50 are needed")


@pytest.mark.slow
def test_an_answer_beyond_the_training_says_so(constant):
    assert not one(constant(), rate=500, servers=1).at.extrapolates
    plan = one(constant(training=(0, 2)), rate=500, servers=1)
    assert plan.at.extrapolates
    assert plan.notes[0].startswith("this rests on an extrapolation")
    assert "num_decode_reqs 3 to 8" in plan.notes[0]


@pytest.mark.slow
def test_bursts_wait_longer(constant):
    steady, bursts = (
        one(constant(), rate=500, servers=1, requests=tracefit.LoadOptions(10, 10, shape)) for shape in (1, 0.2)
    )
    name = "ttft_p99_ms"
    assert bursts.at.latency(name).value > 1.5 * steady.at.latency(name).value


@pytest.mark.parametrize(("in_turn", "spread"), [(False, 1.0), (True, 0.5)])
def test_in_turn_each_server_gets_every_fourth_request(in_turn, spread):
    """The sum of four exponential gaps has half the relative spread of one; a random part of a Poisson process is
    one."""
    one = np.array([1])
    drawn = draw(TrafficSample(one, one, 0 * one, in_turn=in_turn), 4000, 4)
    gaps = np.diff(drawn.arrival_us)
    assert gaps.std() / gaps.mean() == pytest.approx(spread, rel=0.05)


@pytest.mark.slow
def test_requests_in_turn_wait_less(constant):
    waits = [
        one(constant(), rate=2100, servers=3, requests=tracefit.LoadOptions(10, 10, router=router))
        for router in ("random", "round_robin")
    ]
    random, in_turn = (w.at.latency("ttft_p99_ms").value for w in waits)
    assert in_turn < 0.8 * random
    assert "requests go to servers in turn" in waits[1].notes


@pytest.mark.slow
def test_requests_of_a_file(constant, tmp_path):
    rows = pl.DataFrame({"prompt_tokens": [10, 10], "output_tokens": [5, 15]})
    rows.write_csv(tmp_path / "load.csv")
    plan = one(constant(), rate=80, servers=1, requests=tracefit.LoadOptions(file=tmp_path / "load.csv"))
    assert plan.load.output_tokens == 10
    assert plan.capacity_per_s == pytest.approx(800, rel=0.02)


@pytest.mark.slow
def test_what_is_not_known_of_a_step_is_no_step_without_time(constant):
    """The share of KV blocks in use is not known without their number: such steps are not as short as can be."""
    model = constant(feature="kv_usage_ratio")
    assert "does not know num_gpu_blocks of a step" in one(model, rate=20, servers=1).reason
    assert one(model, rate=20, servers=1, settings={"num_gpu_blocks": 101}).at.latency("itl_p50_ms").value == 1


def test_plan_without_requests_has_a_reason(constant):
    found = tracefit.plan(constant(), rate=20, servers=1).plans[0].reason
    options = "`LoadOptions.prompt` and `LoadOptions.output`, or `LoadOptions.file`"
    assert found == f"no requests are traced here; give {options}"


@pytest.mark.slow
def test_folders_are_planned_side_by_side(constant):
    plans = tracefit.plan([constant(), constant(name="other.json")], rate=900, servers=1, requests=TEN).plans
    assert [p.folder.rpartition("/")[2] for p in plans] == ["beta.json", "other.json"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--rate", "5"),
            (
                "no objective is given, such as ttft_p99=500 and itl_p99=50; --servers and --rate together need none: "
                "--rate 5 --servers 1"
            ),
        ),
        (("--servers", "3"), "--servers and --rate together need none: --rate 1 --servers 3"),
        (
            ("--rate", "1", "--servers", "1", "--arrivals", "traced", "--burstiness", "0.5"),
            "--burstiness 0.5: traced arrivals have their own bursts",
        ),
        (("--slo", "ttft_p99=500"), "neither --rate nor --servers is given"),
        (("--rate", "40", "--slo", "ttft=500"), "--slo ttft=500: no objective"),
        (("--rate", "40", "--slo", "speed_p99=500"), "--slo speed_p99=500: no objective"),
        (("--rate", "40", "--slo", "ttft_p0=500"), "--slo ttft_p0=500: no objective"),
        (("--rate", "-1", "--servers", "1"), "--rate -1: is out of range"),
        (("--rate", "1", "--servers", "1", "--figure", "plan.png"), "--figure plan.png: a figure is a page"),
        (("--rate", "1", "--servers", "1", "--burstiness", "0"), "--burstiness 0: is out of range"),
        (
            ("--rate", "1", "--servers", "1", "--set", "tp=4"),
            (
                "--set tp=4: step times are those of tensor_parallel 2: `tracefit transfer` computes those of another "
                "server"
            ),
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


@pytest.mark.slow
def test_a_plan_reads_as_a_sentence(constant, tracefit):
    code, stdout, _ = tracefit(
        *("plan", constant(), "--prompt", "10", "--output", "10", "--rate", "1900", "--slo", "itl_p99=1.5")
    )
    assert code == 0
    text = " ".join(stdout.split())
    assert "3 servers: the objectives hold at 1,900 requests per second; the largest rate is 2,400" in text
    assert "note: no run was replayed in a closed loop" in text


@pytest.mark.slow
def test_a_plan_is_drawn_on_a_page(constant, tmp_path):
    pytest.importorskip("plotly")
    page = tmp_path / "plan.html"
    plan = one(constant(training=(0, 7)), rate=900, slo_ms={"ttft_p99": 3.0}, figure=page)
    (drawn,) = json.loads(re.search(r'id="figures">(.*?)</script>', page.read_text(), re.DOTALL)[1])["figures"].values()
    assert drawn["curves"]["rates"] == pytest.approx([p.rate_per_s for p in plan.curve])
    assert drawn["curves"]["limits"] == {"TTFT P99": 3.0}
    assert {t["line"]["dash"] for t in drawn["data"]} == {"solid", "dot"}, "beyond seven requests at once it is dotted"
    assert drawn["layout"]["shapes"][0]["x0"] == pytest.approx(900)


BARS = {"ttft": (8, 12, 12), "itl": (4, 4, 8), "e2e": (3, 3, 5)}
"""The most that P50, P90 and P99 may be off, in percent."""


@pytest.mark.long
@pytest.mark.slow
def test_plan_for_an_unrecorded_load_is_close(trained_at, truth_at):
    """Recorded at 14 requests per second, planned for 21, and compared with a run at 21 with the same requests."""
    plan = one(trained_at(14.0), rate=21.0, servers=1, requests=None)
    assert plan.arrivals.kind == "poisson"
    # 420 requests in 30 s, and three times their standard deviation in the best of them.
    assert 13.0 < plan.carried_per_s < 17.0
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
