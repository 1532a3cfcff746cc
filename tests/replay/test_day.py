"""Days by hand: a step is 1,000 us whatever is in it, 8 requests run at once, and each takes 100 steps; so 80 a second
are the most."""

from __future__ import annotations

import json
import re

import numpy as np
import polars as pl
import pytest

import tracefit
from clients import planned, vllm_bench
from tracefit import DayOptions, LoadOptions
from tracefit.coefficients.models import load as load_models
from tracefit.commands.timed_requests import read_timed_requests
from tracefit.replay import day
from tracefit.replay.day import windows_of
from tracefit.replay.engine import EngineSettings
from tracefit.replay.plan import Fleet
from tracefit.replay.scaler import needed_by_load, scaled

SHORT = DayOptions(window_s=20)
"""Windows of twenty seconds."""
SLO = {"ttft_p99": 500}
"""Servers that keep up keep to it, and a queue that grows for twenty seconds does not."""


@pytest.fixture(autouse=True)
def _fewer_requests(monkeypatch):
    """Replay fewer requests: servers that keep up are far from those that do not."""
    simulate = Fleet._simulate
    monkeypatch.setattr(Fleet, "_simulate", lambda *a: simulate(*a[:3], max(150, a[3] // 12)))
    monkeypatch.setattr(day, "MOST_REPLAYED", 500)
    monkeypatch.setattr(day, "LEAST_REPLAYED", 500)
    monkeypatch.setattr(day, "CHECKED_REQUESTS", 800)


def arrivals(rates, seconds=20.0, begin_s=0.0, seed=0):
    """Return Poisson arrivals at several rates, each for some seconds."""
    rng = np.random.default_rng(seed)
    parts = [np.sort(begin_s + seconds * (k + rng.random(int(rate * seconds)))) for k, rate in enumerate(rates)]
    return np.concatenate(parts)


@pytest.fixture
def csv(tmp_path):
    """Return a function that writes requests of ten and a hundred tokens, or rows of text."""

    def write(at_s=(), *, rows=(), head="timestamp,prompt_tokens,output_tokens", name="day.csv"):
        lines = [f"{at:.6f},10,100" for at in at_s]
        (tmp_path / name).write_text("\n".join([head, *lines, *rows]) + "\n")
        return tmp_path / name

    return write


def day_of(model, file, slo_ms=SLO, options=SHORT, **asked):
    requests = LoadOptions(arrivals=str(file), **asked)
    (plan,) = tracefit.plan(model, requests=requests, day=options, slo_ms=slo_ms).plans
    assert plan.reason is None, plan.reason
    return plan.day


def test_each_window_has_as_many_servers_as_keep_up(constant, csv):
    """50, 190 and 100 a second are 1, 3 and 2 servers of 80; an interval without requests has none."""
    found = day_of(constant(), csv(arrivals((50, 190, 0, 100))))
    assert [w.servers for w in found.windows] == [1, 3, 0, 2]
    assert (found.servers, found.servers_likely, found.binding) == (3, 3, 1)
    assert found.server_hours == pytest.approx(3 * 80 / 3600, rel=0.01)
    assert found.server_hours_by_window == pytest.approx((1 + 3 + 0 + 2) * 20 / 3600, rel=0.01)
    (ttft,) = found.latencies
    assert ttft.value < 300
    assert ttft.one_fewer > 1_000, "95 a second at each are 15 too many: 300 after twenty seconds"
    assert [w.rate_per_s for w in found.windows] == pytest.approx([50, 190, 0, 100], rel=0.01)


@pytest.mark.parametrize("seed", range(4))
def test_the_window_that_decides_needs_as_many_as_the_day(constant, csv, seed):
    """Windows so near to what a number of servers carries that their own replays may say less."""
    found = day_of(constant(ci95=(900.0, 1100.0)), csv(arrivals((78, 150, 158), seed=seed)))
    assert found.windows[found.binding].servers == max(w.servers for w in found.windows) == found.servers
    assert max(w.servers_likely for w in found.windows) == found.servers_likely


def test_a_burst_within_a_window_decides(constant, csv):
    """A second of 150 on top of 20 a second: on one server 90 of them wait for up to 1.1 s, on two hardly one does."""
    at_s = np.sort(np.concatenate([arrivals((20,)), 4 + arrivals((150,), seconds=1, seed=1)]))
    assert day_of(constant(), csv(at_s)).servers == 2
    assert day_of(constant(), csv(arrivals((27,)))).servers == 1, "as many requests, spread out"


def test_servers_are_enough_at_the_high_end(constant, csv):
    """Steps are up to 25 % longer: 64 a second are the most then."""
    found = day_of(constant(ci95=(700.0, 1300.0)), csv(arrivals((70, 170))))
    assert [(w.servers, w.servers_likely) for w in found.windows] == [(2, 1), (3, 3)]
    assert found.latencies[0].high > found.latencies[0].value


def test_longer_requests_need_more(constant, csv):
    """As many requests of 300 steps are three times the work."""
    file = csv(arrivals((60,)), rows=[f"{at:.6f},10,300" for at in 20 + arrivals((60,))])
    assert [w.servers for w in day_of(constant(), file).windows] == [1, 3]


def test_requests_in_turn_wait_less(constant, csv):
    file = csv(arrivals((150,)))
    random, in_turn = (day_of(constant(), file, router=r) for r in ("random", "round_robin"))
    assert (random.servers, in_turn.servers) == (2, 2)
    assert in_turn.latencies[0].value < 0.8 * random.latencies[0].value


def test_a_limit_that_no_server_keeps_to(constant, csv):
    model, file = constant(), csv(arrivals((10, 20)))
    found = tracefit.plan(model, requests=LoadOptions(arrivals=str(file)), day=SHORT, slo_ms={"itl_p50": 0.5})
    assert found.exit_code == 1
    assert "itl_p50 is 1 ms, not 0.5" in found.plans[0].reason


def test_a_window_that_no_number_carries_is_left_to_the_others(constant, csv):
    """Three requests of 900 steps take 900 ms each."""
    file = csv(arrivals((100,)), rows=[f"{at},10,900" for at in (22, 24, 26)])
    requests = LoadOptions(arrivals=str(file))
    (plan,) = tracefit.plan(constant(), requests=requests, day=SHORT, slo_ms={"e2e_p99": 500}).plans
    assert [w.servers for w in plan.day.windows] == [2, None]
    assert (plan.day.servers, plan.day.windows_missed, plan.met) == (2, 1, False)
    assert plan.notes[0].startswith(
        "in 1 window the objectives hold with no number of servers, first in that from 00:00:20"
    )


def test_requests_that_the_server_does_not_take_are_left_out(constant, csv):
    file = csv(arrivals((20,)), rows=["5,4000,97", "6,4000,96"])
    (plan,) = tracefit.plan(constant(), requests=LoadOptions(arrivals=str(file)), day=SHORT, slo_ms=SLO).plans
    assert plan.day.requests == 401
    assert any(n.startswith("1 of 402 requests are left out: they are longer") for n in plan.notes)


@pytest.fixture
def asked(constant, csv):
    """Return a command line."""
    options = ("--slo", "ttft_p99=500", "--window-s", "20", "--scale-up-s", "0", "--scale-step", "2")
    return ("plan", constant(), "--arrivals", csv(arrivals((50, 190)), rows=["9,10,0"]), *options)


def test_the_answer_reads_as_sentences(asked, tracefit):
    code, stdout, stderr = tracefit(*asked, "--price", "3600")
    assert (code, stderr) == (0, "")
    text = " ".join(stdout.split())
    assert "4,801 rows, 4,800 requests in 2 windows of 20 s" in text
    assert "1 row left out (output tokens below 1: 1)" in text
    assert "3 servers all day" in text
    # A server has two GPUs, of one a second each: three of them for 40 s.
    assert re.search(r"they cost 2[34]\d all day, \d+ with the scaler", text)
    assert "The window from 00:00:20 needs the most" in text
    assert re.search(r"00:00:20 +190 +10 +100 +3 +3", text)
    assert [line for line in stdout.splitlines() if len(line) > 80] == []


def test_json_and_a_page_have_the_day(asked, tracefit, tmp_path):
    pytest.importorskip("plotly")
    page = tmp_path / "day.html"
    _, stdout, _ = tracefit(*asked, "--json", "--figure", page)
    found = json.loads(stdout)["plans"][0]["day"]
    assert (found["servers"], found["odd"], found["scaler"]["step"]) == (3, {"output tokens below 1": 1}, 2)
    assert {change["servers"] % 2 for change in found["scaler"]["changes"]} == {0}
    (drawn,) = json.loads(re.search(r'id="figures">(.*?)</script>', page.read_text(), re.DOTALL)[1])["figures"].values()
    by_name = {trace["name"]: trace for trace in drawn["data"]}
    assert by_name["servers of each window"]["y"] == [1, 3, 3]
    assert by_name["servers all day"]["y"] == [3, 3, 3]
    assert by_name["requests per second"]["y"] == pytest.approx([50, 190, 190], rel=0.02)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--rate", "5"),
            "--rate 5: --arrivals day.csv has the rates, and a plan finds the servers; leave out --rate",
        ),
        (("--servers", "5"), "--servers 5: --arrivals day.csv has the rates"),
        (("--load", "other.csv"), "--load other.csv: --arrivals day.csv has the rates"),
        ((), "day.csv: cannot be read (no such file)"),
        (
            ("--arrivals", "posson"),
            "posson: cannot be read (no such file); give --arrivals poisson, traced, or a file",
        ),
        (
            ("--arrivals", "poisson", "--rate", "1", "--window-s", "60"),
            "--window-s is of a file of arrivals; give one with --arrivals",
        ),
    ],
)
def test_options_that_contradict_are_one_line(constant, tracefit, options, said):
    code, stdout, stderr = tracefit("plan", constant(), "--arrivals", "day.csv", "--slo", "ttft_p99=500", *options)
    assert (code, stdout, stderr.count("\n")) == (2, "", 1)
    assert said in stderr


# -- what is read ------------------------------------------------------------------------------------------

SPELLINGS = {
    "ours": ("timestamp,prompt_tokens,output_tokens", "12.5,7,9"),
    "BurstGPT": (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
        "12.5,ChatGPT,7,9,16,Conversation log",
    ),
    "Azure": ("TIMESTAMP,ContextTokens,GeneratedTokens", "1970-01-01 00:00:12.5000000,7,9"),
    "ISO 8601": ("timestamp,prompt_tokens,output_tokens", "1970-01-01T01:00:12.5+01:00,7,9"),
    "a load": ("prompt_tokens,output_tokens,arrival_s", "7,9,12.5"),
}


@pytest.mark.parametrize("kind", SPELLINGS)
def test_columns_of_public_traces_are_read(csv, kind):
    head, row = SPELLINGS[kind]
    found = read_timed_requests(csv(head=head, rows=[row]), {})
    load = found.load
    assert (load.at_s.tolist(), load.prompt_tokens.tolist(), load.output_tokens.tolist()) == (
        [12.5],
        [7],
        [9],
    )
    assert (found.rows, found.odd) == (1, {})


def test_odd_rows_are_counted_by_reason(csv):
    odd = [",7,9", "soon,7,9", "3,,9", "4,7,0", "5,-7,9", "6,seven,9", "7,7,inf", "-8,7,9", "9", "4,7,0.4"]
    found = read_timed_requests(csv(rows=[*odd, "2,7,9", "1,5,6.0"]), {})
    assert found.load.at_s.tolist() == [1, 2], "in order of time"
    assert found.load.output_tokens.tolist() == [6, 9]
    assert found.rows == 12
    assert found.odd == {
        "output tokens below 1": 2,
        "prompt tokens not a number": 1,
        "no prompt tokens": 2,
        "no time": 1,
        "output tokens not a number": 1,
        "prompt tokens below 1": 1,
        "time below 0": 1,
        "time not a number or a date": 1,
    }


def test_a_table_of_requests_is_read(tmp_path):
    rows = {
        "arrival_ns": [2_500_000_000, 500_000_000, None],
        "prompt_tokens": [7, 8, 9],
        "output_tokens": [1, 2, 3],
    }
    pl.DataFrame({**rows, "cached_prompt_tokens": [16, None, 0]}).write_parquet(tmp_path / "part.parquet")
    found = read_timed_requests(tmp_path / "part.parquet", {})
    assert found.load.at_s.tolist() == [0.5, 2.5]
    assert found.load.cached_tokens.tolist() == [0, 6], "one token of a prompt is computed"
    assert found.odd == {"no time": 1}


def test_a_log_of_a_client_is_read(tmp_path):
    requests = planned(40)
    (tmp_path / "bench.json").write_bytes(vllm_bench(requests))
    load = read_timed_requests(tmp_path / "bench.json", {}).load
    sent = sorted((r.sent_s, r.prompt, r.output) for r in requests)
    assert load.at_s - load.at_s[0] == pytest.approx([s - sent[0][0] for s, *_ in sent], abs=1e-3)
    assert load.prompt_tokens.tolist() == [p for _, p, _ in sent]
    assert load.output_tokens.tolist() == [o for *_, o in sent]


def test_rates_per_hour_are_drawn(csv):
    rows = ["8,0.5,100,20", "9,2,50,10", "10,-1,50,10", "11,0,50,10"]
    found = read_timed_requests(csv(head="hour,rate,prompt_tokens,output_tokens", rows=rows), {})
    hours = np.floor(found.load.at_s / 3600)
    counts = [int((hours == hour).sum()) for hour in (8, 9, 11)]
    assert counts == pytest.approx([1800, 7200, 0], abs=4 * np.sqrt(7200))
    assert set(found.load.prompt_tokens[hours == 8]) == {100}
    assert (found.odd, found.has_rates) == ({"rate below 0": 1}, True)


@pytest.mark.parametrize(
    ("head", "rows", "code", "said"),
    [
        (
            "timestamp,prompt_tokens,output_tokens",
            ["1,0,5", "2,,5"],
            1,
            "day.csv: no request is usable (no prompt tokens: 1, prompt tokens below 1: 1)",
        ),
        ("timestamp,prompt_tokens,output_tokens", [], 1, "day.csv: no request is usable (it is empty)"),
        (
            "timestamp,prompt_tokens",
            ["1,5"],
            2,
            "day.csv: has no column of output tokens; columns are timestamp, prompt_tokens and output_tokens",
        ),
        (
            "timestamp,prompt_tokens,output_tokens",
            ["1,5,5", "1000000000,5,5"],
            2,
            "give times in seconds or as dates",
        ),
    ],
)
def test_a_file_that_cannot_be_planned_for_is_one_line(constant, csv, tracefit, head, rows, code, said):
    file = csv(head=head, rows=rows)
    found, stdout, stderr = tracefit("plan", constant(), "--arrivals", file, "--slo", "ttft_p99=500")
    assert (found, stdout, stderr.count("\n")) == (code, "", 1)
    assert said in stderr


def test_parts_of_a_window_stand_for_all(constant):
    """An hour on one server: 3 a second, and 60 a second for two minutes; three in five requests are outside of
    these."""
    at_s = np.sort(np.concatenate([arrivals((3,), 3600), 1000 + arrivals((60,), 120)]))
    tens, lengths = np.full(len(at_s), 10), np.where((at_s > 1000) & (at_s < 1120), 20, 100)
    load = day.DayLoad(at_s, tens, lengths, 0 * tens)
    fleet = Fleet(load_models(constant()).deployment(None), {}, EngineSettings(8, 2048, 16), load.sample(500), 400)
    search = day.DaySearch(fleet, load, windows_of(at_s, 3600), (), {})
    parts, whole = (search.replayed(0, 1, "likely", most) for most in (500, 10**9))
    assert len(whole.counts["e2e"]) == len(at_s)
    assert len(parts.counts["e2e"]) < 0.5 * len(at_s)
    assert parts.counts["e2e"].sum() == pytest.approx(len(at_s), rel=0.15)
    for name in ("e2e_p50_ms", "ttft_p99_ms"):
        assert parts.percentile_ms(name) == pytest.approx(whole.percentile_ms(name), rel=0.2), name


@pytest.mark.slow
def test_a_scaler_that_is_late_misses_the_window_of_a_step(constant, csv):
    """15 requests a second of 300 steps are one server, 60 are three; these are asked for when the queue is there."""
    rows = [f"{at:.6f},10,300" for at in arrivals((15, 15, 60, 60), seconds=120)]
    minutes = DayOptions(window_s=120, scale_up_s=60)
    found = day_of(constant(), csv(rows=rows), options=minutes)
    assert [w.servers for w in found.windows] == [1, 1, 3, 3]
    assert [w.scaled_holds for w in found.windows][:3] == [True, True, False]
    assert (found.scaler.holds, found.scaler.spare_pct) == (False, 100)
    steady = day_of(constant(), csv(rows=rows[: 15 * 240]), options=minutes).scaler
    assert (steady.holds, steady.spare_pct, steady.most) == (True, 0, 1)
    assert [change.servers for change in steady.changes] == [1]


# -- windows and a scaler ----------------------------------------------------------------------------------


def test_windows_begin_at_multiples_of_their_length():
    windows = windows_of(np.array([7.0, 9.0, 10.0, 31.0]), 10)
    assert [(w.begin_s, w.end_s, w.requests) for w in windows] == [
        (7, 10, 2),
        (10, 20, 1),
        (20, 30, 0),
        (30, 31, 1),
    ]


def test_a_scaler_is_late_by_its_start_up():
    """The load of one server becomes that of four after 20 intervals, and one again after 40; two minutes are four
    intervals.

    The mean of four is then 1.75, 2.5, 3.25 and 4. Servers that were asked for with the first of these are ready four
    intervals later.
    """
    needed = np.repeat([1.0, 4.0, 1.0], [20, 20, 40])
    found = scaled(0.0, needed, start_up_s=120, step=1, spare_pct=0).ready.tolist()
    assert found[:25] == [1] * 25
    assert found[25:28] == [2, 3, 4]
    # The mean no longer needs the fourth after 42 intervals; five minutes are ten of them.
    assert found[28:52] == [4] * 24
    assert found[52:] == [3, 2] + [1] * 26
    stepped = scaled(0.0, needed, start_up_s=0, step=3, spare_pct=50).ready
    assert set(stepped.tolist()) == {3, 6}, "1.5 and 6 servers in steps of three"


def test_needed_servers_follow_from_arrivals():
    begin, needed = needed_by_load(np.array([5.0, 6.0, 40.0]), np.array([30.0, 30.0, 60.0]))
    assert (begin, needed.tolist()) == (5.0, [2.0, 2.0])
