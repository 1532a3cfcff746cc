"""`tracefit compare`: what moved between two files, and whether an old one is still good on new traces."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import polars as pl
import pytest

from tracefit import TrainOptions, run
from tracefit.commands.ingest import ingest
from tracefit.synth import SynthOptions, synth, write_run
from tracefit.synth.laws import AdmissionLaw, LinearLaw


def _file(path, *, intercept=1000.0, slope=10.0, training_range=(0, 100), deployment="a.gpu.tp1.00000000", reach=5.0):
    term = {
        "feature": "prefill_tokens",
        "unit": "us/token",
        "value": slope,
        "ci95": [slope - 1, slope + 1],
        "training_range": list(training_range),
    }
    model = {
        "name": "beta.cycle_time",
        "deployment_id": deployment,
        "form": "linear",
        "intercept": {"value": intercept, "ci95": [intercept - reach, intercept + reach]},
        "terms": [term],
    }
    document = {"schema": "tracefit/coefficients", "version": 4, "kind": "beta", "models": [model]}
    path.write_text(json.dumps(document))
    return path


@pytest.fixture
def two(tmp_path):
    """A line and one that is 20 us lower at no token, and 2 us per token steeper; both saw 20 to 100 tokens."""
    return _file(tmp_path / "a.json"), _file(tmp_path / "b.json", intercept=980.0, slope=12.0, training_range=(20, 200))


def test_coefficients_side_by_side(tracefit, two):
    code, out, err = tracefit("compare", *two, "--json")
    result = json.loads(out)
    assert (code, err, result["verdict"]) == (0, "", None)
    changes = {c["term"]: c for c in result["models"][0]["changes"]}
    assert (changes["intercept"]["first"], changes["intercept"]["second"]) == (1000, 980)
    assert changes["intercept"]["apart"] is True, "995 to 1,005 and 975 to 985"
    assert changes["prefill_tokens"]["apart"] is False, "9 to 11 and 11 to 13"


def test_predictions_are_compared_where_both_were_trained(tracefit, two):
    """Over 20 to 100 tokens the second less the first is -20 + 2 x: 20 to 180 us."""
    result = json.loads(tracefit("compare", *two, "--json")[1])
    (shift,) = result["models"][0]["shifts"]
    assert shift["ranges"] == {"prefill_tokens": [20, 100]}
    assert (shift["low_us"], shift["high_us"]) == (pytest.approx(20), pytest.approx(180))
    assert shift["mean_us"] == pytest.approx(100, rel=0.1)
    text = tracefit("compare", *two)[1]
    assert "line: prefill_tokens" in text
    assert "apart" in text


def test_the_same_file_twice_is_said_to_be_the_same(tracefit, two):
    code, out, _ = tracefit("compare", two[0], two[0])
    assert (code, out.strip().splitlines()) == (
        0,
        ["beta.cycle_time  a.gpu.tp1.00000000", "  the same coefficients in both files"],
    )


def test_ranges_that_do_not_meet_are_reported(tracefit, two, tmp_path):
    far = _file(tmp_path / "far.json", training_range=(500, 900))
    code, out, _ = tracefit("compare", two[0], far, "--json")
    result = json.loads(out)
    assert (code, result["models"][0]["shifts"]) == (0, [])
    assert any("prefill_tokens do not overlap" in note for note in result["notes"])


def test_files_of_one_other_scope_are_compared_and_it_is_said(tracefit, two, tmp_path):
    other = _file(tmp_path / "o.json", deployment="b.gpu.tp1.00000000")
    result = json.loads(tracefit("compare", two[0], other, "--json")[1])
    assert any("which is another one" in note for note in result["notes"])


def test_files_with_nothing_in_common_are_one_line(tracefit, two, tmp_path):
    document = json.loads(two[0].read_text())
    document["models"][0]["name"] = "beta.other"
    (tmp_path / "n.json").write_text(json.dumps(document))
    code, out, err = tracefit("compare", two[0], tmp_path / "n.json")
    assert (code, out) == (1, "")
    assert "no model in common" in err


def test_a_trained_file_against_itself_has_not_moved(tracefit, trained):
    result = json.loads(tracefit("compare", trained / "models", trained / "models", "--json")[1])
    assert len(result["models"]) == 4
    for model in result["models"]:
        assert all(c["first"] == c["second"] for c in model["changes"])
        assert all(s["low_us"] == s["high_us"] == 0 for s in model["shifts"])
    assert any(s["points"] > 100 for m in result["models"] for s in m["shifts"])


CLOCK = ("step.ts_start_ns", "step.ts_end_ns", "ts.monotonic_ns", "ts.monotonic", "event.ts.monotonic")


def _tables(tmp_path, new_traces, change=None, *, slower=1.0, move=None, **load):
    """Ingest a busy run in which everything took so many times as long, or happened when `move` says."""
    trace = new_traces().load(**load)
    trace.change(trace.events(), move or (lambda time: type(time)(time * slower)), *CLOCK)
    folder = trace.write(tmp_path / "new")
    if change:
        change(folder)
    ingest([folder], tmp_path / "tables")
    return tmp_path / "tables"


@pytest.mark.slow
def test_an_old_file_is_good_on_more_of_the_same(tracefit, trained, tmp_path, new_traces):
    tables = _tables(tmp_path, new_traces, seed=8)
    code, out, err = tracefit("compare", trained / "models", tables, "--json")
    result = json.loads(out)
    assert (code, err, result["verdict"]) == (0, "", "good")
    drift = {d["model"]: d for d in result["drift"]}
    beta = drift["beta.cycle_time"]
    assert beta["rows"] + beta["rows_outside"] == 239, "every cycle of the new run but idle gaps"
    assert beta["now_mdape_pct"] < 2
    assert beta["then_mdape_pct"] < 2
    assert drift["alpha.admission"]["verdict"] == drift["alpha.departure"]["verdict"] == "good"


def test_training_data_never_drifts_from_what_was_trained_on_it(tracefit, trained):
    """Some requests met a burst: the mean error comes from them, and differs from part to part."""
    code, out, _ = tracefit("compare", trained / "models", trained / "tables", "--json")
    comparison = json.loads(out)
    assert (code, comparison["verdict"]) == (0, "good")
    assert {d["verdict"] for d in comparison["drift"]} == {"good"}


@pytest.mark.slow
def test_a_server_that_became_slower_has_drifted(tracefit, trained, tmp_path, new_traces):
    """Steps take 1.3 times as long: the old file is 1 - 1/1.3 = 23 % low."""
    tables = _tables(tmp_path, new_traces, slower=1.3, seed=8)
    code, out, _ = tracefit("compare", trained / "models", tables, "--json")
    result = json.loads(out)
    assert (code, result["verdict"]) == (1, "drifted")
    beta = next(d for d in result["drift"] if d["model"] == "beta.cycle_time")
    assert (beta["verdict"], beta["now_mdape_pct"]) == ("drifted", pytest.approx(23, abs=1.5))
    assert beta["now_bias_pct"] == pytest.approx(-23, abs=1.5)
    assert beta["limit_pct"] == pytest.approx(max(1.5 * beta["then_mdape_pct"], beta["then_mdape_pct"] + 2))
    text = tracefit("compare", trained / "models", tables)[1]
    assert "verdict: the file has drifted" in text
    assert tracefit("compare", trained / "models", tables, "--slack", 100)[0] == 0


@pytest.mark.slow
def test_new_traces_that_are_too_short_cannot_tell(tracefit, trained, tmp_path, new_traces):
    tables = _tables(tmp_path, new_traces, seed=8, steps=20, requests=10)
    code, out, _ = tracefit("compare", trained / "models/beta.json", tables, "--json")
    result = json.loads(out)
    assert (code, result["verdict"]) == (1, "unknown")
    assert "fewer than 30" in result["drift"][0]["reason"]


@pytest.mark.slow
def test_rows_outside_the_training_range_say_nothing_of_the_file(tracefit, trained, tmp_path, new_traces):
    """The file claims to know only steps without prompts, and is 20 % off on any other."""
    tables = _tables(tmp_path, new_traces, seed=8)
    document = json.loads((trained / "models/beta.json").read_text())
    (prefill,) = (t for t in document["models"][0]["terms"] if t["feature"] == "prefill_tokens")
    prefill["training_range"] = [0, 0]
    prefill |= {"value": 2 * prefill["value"], "ci95": None}
    (tmp_path / "narrow.json").write_text(json.dumps(document))
    code, out, _ = tracefit("compare", tmp_path / "narrow.json", tables, "--json")
    (beta,) = json.loads(out)["drift"]
    assert (code, beta["verdict"]) == (0, "good")
    steps = pl.read_parquet(f"{tables}/timeline/*/*.parquet").filter(pl.col("cycle_us").is_not_null())
    prompts = steps.filter(pl.col("prefill_tokens") > 0).height
    assert beta["rows_outside"] == pytest.approx(prompts, abs=10), "and a few with larger batches"


@pytest.mark.slow
def test_a_server_whose_speed_wanders_cannot_tell(tracefit, trained, tmp_path, new_traces):
    """Every other quarter of a second takes twice as long: half of the steps are 50 % off, and the next run's may not
    be."""

    def wander(time):
        # The events of a trace are stamped in nanoseconds, and in seconds.
        seconds = time / 1e9 if isinstance(time, int) else time
        quarters, rest = divmod(seconds, 0.25)
        slow = (quarters + 1) // 2 * 0.25 + (0.0 if quarters % 2 else rest)
        return type(time)((seconds + slow) * (1e9 if isinstance(time, int) else 1))

    tables = _tables(tmp_path, new_traces, move=wander, seed=8)
    code, out, _ = tracefit("compare", trained / "models/beta.json", tables, "--json")
    (beta,) = json.loads(out)["drift"]
    assert beta["now_mdape_pct"] > beta["limit_pct"]
    assert (code, beta["verdict"]) == (1, "unknown")
    assert "varies between parts of these runs" in beta["reason"]
    text = tracefit("compare", trained / "models/beta.json", tables)[1]
    assert "verdict: these traces cannot tell" in text


@pytest.fixture
def sampled_later(tmp_path):
    """Return models of a run that traced everything, and tables of one that traced a tenth of the steps and half of the
    requests."""
    options = SynthOptions(name="full", seed=1, requests=200)
    run([write_run(synth(options), tmp_path)], tmp_path / "out", options=TrainOptions(fast=True))
    later = replace(options, name="sampled", seed=2, requests=400, step_sampling=0.1, journey_sampling=0.5)
    ingest([write_run(synth(later), tmp_path)], tmp_path / "tables")
    return tmp_path / "out/models", tmp_path / "tables"


@pytest.mark.slow
def test_another_sampling_is_no_drift(tracefit, sampled_later):
    """One law made both. The steps that requests met are not known in the later run, so that admissions are 100 %
    off."""
    code, out, _ = tracefit("compare", *sampled_later, "--json")
    result = json.loads(out)
    assert (code, result["verdict"]) == (1, "unknown")
    assert "drifted" not in {d["verdict"] for d in result["drift"]}


@pytest.mark.slow
def test_new_traces_of_another_server_are_one_line(tracefit, trained, tmp_path, new_traces):
    def other(folder):
        with (folder / "exp-config.yaml").open("a") as config:
            config.write("enforce_eager: true\n")

    tables = _tables(tmp_path, new_traces, other, steps=20, requests=10)
    code, out, err = tracefit("compare", trained / "models", tables)
    assert (code, out) == (1, "")
    assert "no run of deployment" in err
    assert "(enforce_eager False → True)" in err
    assert err.count("\n") == 1


# -- what users see: a generated server of 64 slots, and another run whose configuration says the same ------------------------


@pytest.fixture(scope="module")
def served(once):
    """Return the folder of the models of a server at 14 requests per second."""

    def train(folder):
        first = write_run(synth(SynthOptions(name="first", seed=1, requests=300)), folder)
        run([first], folder / "out", options=TrainOptions(fast=True, features="batch"))

    return once("served", train) / "out"


@pytest.fixture
def compared(tracefit, served, tmp_path):
    """Return a function that compares models with a later run at 9 requests per second, whose configuration states 64
    slots."""

    def compare(models=None, **changes):
        options = SynthOptions(name="later", seed=2, requests=250, rate_per_s=9.0)
        later = write_run(synth(replace(options, **changes)), tmp_path)
        config = later / "exp-config.yaml"
        config.write_text(re.sub(r"max_num_seqs: \d+", "max_num_seqs: 64", config.read_text()))
        ingest([later], tmp_path / "tables")
        code, out, err = tracefit("compare", models or served, tmp_path / "tables", "--json")
        return code, json.loads(out) if out else err

    return compare


def _slower(factor):
    plain = LinearLaw()
    return LinearLaw(**{name: factor * getattr(plain, name) for name in LinearLaw.__struct_fields__})


def test_the_same_server_at_another_load_is_good(compared):
    code, result = compared()
    assert (code, result["verdict"], result["reasons"]) == (0, "good", [])
    latencies = {each["name"]: each for each in result["latencies"]}
    assert list(latencies) == [f"{name}_p{q}_us" for name in ("ttft", "itl", "e2e") for q in (50, 90)]
    assert {each["verdict"] for each in latencies.values()} == {"good"}
    e2e = latencies["e2e_p50_us"]
    assert e2e["error_pct"] == pytest.approx(100 * (e2e["replayed"] / e2e["measured"] - 1))
    assert e2e["low"] <= e2e["replayed"] <= e2e["high"]
    assert e2e["requests"] == pytest.approx(225, abs=15), "all but the first tenth, and those whose client left"


def test_a_limit_that_was_lowered_without_a_word_is_drift_by_what_users_see(tracefit, served, compared, tmp_path):
    """Eight slots instead of 64: steps take as long as before, and requests wait."""
    code, result = compared(max_num_seqs=8)
    assert (code, result["verdict"]) == (1, "drifted")
    steps = next(d for d in result["drift"] if d["model"] == "beta.cycle_time")
    assert steps["verdict"] == "good"
    ttft = next(each for each in result["latencies"] if each["name"] == "ttft_p90_us")
    assert ttft["verdict"] == "drifted"
    assert ttft["measured"] > 5 * ttft["high"]
    assert any(text.startswith("TTFT P90 of later") for text in result["reasons"])
    text = tracefit("compare", served, tmp_path / "tables")[1]
    assert re.search(r"TTFT P90 +[\d.,]+ .*drifted", text)
    assert "verdict: the file has drifted" in text
    assert "TTFT P90 of later" in text.split("verdict: the file has drifted")[1]


@pytest.mark.slow
def test_a_slower_machine_is_drift_of_its_steps(compared):
    """The old file is 1 - 1/1.4 = 29 % low."""
    code, result = compared(law=_slower(1.4))
    assert (code, result["verdict"]) == (1, "drifted")
    steps = next(d for d in result["drift"] if d["model"] == "beta.cycle_time")
    assert (steps["verdict"], steps["now_mdape_pct"]) == ("drifted", pytest.approx(29, abs=1.5))
    assert any(text.startswith("beta.cycle_time: the median error is 2") for text in result["reasons"])
    itl = next(each for each in result["latencies"] if each["name"] == "itl_p50_us")
    assert itl["error_pct"] == pytest.approx(-31, abs=3), "and batches grow with the steps"


@pytest.mark.slow
def test_a_few_milliseconds_more_before_the_queue_are_no_drift(compared):
    """Admissions take 4 ms more, and the file's model is 40 % low; no user notices."""
    code, result = compared(admission=AdmissionLaw(base_us=5_300.0))
    admission = next(d for d in result["drift"] if d["model"] == "alpha.admission")
    assert admission["now_mdape_pct"] > 10 * admission["limit_pct"]
    assert (admission["verdict"] != "good", admission["decides"]) == (True, False)
    assert (code, result["verdict"]) == (0, "good")


@pytest.mark.slow
def test_a_few_milliseconds_decide_nothing_without_a_replay_either(compared):
    """Half of the requests are traced."""
    code, result = compared(admission=AdmissionLaw(base_us=5_300.0), journey_sampling=0.5)
    assert result["latencies"] == []
    assert any(note.startswith("run later is not replayed: journeys are a sample") for note in result["notes"])
    admission = next(d for d in result["drift"] if d["model"] == "alpha.admission")
    assert not admission["decides"]
    assert (code, result["verdict"]) == (0, "good")


@pytest.mark.slow
def test_waits_that_users_feel_decide_where_nothing_is_replayed(compared, served, tmp_path):
    """Only alpha.json: without step times there is no replay, and requests wait for seconds."""
    alpha = shutil.copy(served / "models/alpha.json", tmp_path / "alpha.json")
    code, result = compared(alpha, max_num_seqs=8)
    assert (code, result["verdict"], result["latencies"]) == (1, "drifted", [])
    assert any("without a model of step times" in note for note in result["notes"])
    assert any(text.startswith("alpha.queue_wait") for text in result["reasons"])


@pytest.mark.slow
def test_a_speed_that_the_machine_is_known_to_have_is_no_drift(compared, served, tmp_path):
    """Steps take 1.1 times as long; in the recording of the file the speed varied by 10 % between stretches."""
    shutil.copytree(served, tmp_path / "noisy")
    beta = tmp_path / "noisy/models/beta.json"
    document = json.loads(beta.read_text())
    document["models"][0]["validation"]["speed"] = {
        "stretch_s": 30.0,
        "stretches": 10,
        "sd_pct": 10.0,
        "fastest_pct": -15.0,
        "slowest_pct": 15.0,
        "holdout_pct": 0.0,
        "adjusted": True,
    }
    beta.write_text(json.dumps(document))
    code, result = compared(tmp_path / "noisy", law=_slower(1.1))
    steps = next(d for d in result["drift"] if d["model"] == "beta.cycle_time")
    assert (steps["verdict"], "its speed varies by as much" in steps["reason"]) == ("unknown", True)
    assert (code, result["verdict"]) == (1, "unknown")
    assert {each["verdict"] for each in result["latencies"]} == {"good", "unknown"}
    assert not any("drifted" in each["verdict"] for each in result["latencies"])


@pytest.mark.slow
def test_a_load_beyond_the_training_range_cannot_tell(compared, served, tmp_path):
    """The file claims to know batches of up to 4 only, and is wrong on any."""
    document = json.loads((served / "models/beta.json").read_text())
    document["models"][0]["deployment"]["input_ranges"]["step"]["batch"] = [0, 4]
    (tmp_path / "narrow.json").write_text(json.dumps(document))
    code, result = compared(tmp_path / "narrow.json", max_num_seqs=8)
    assert (code, result["verdict"]) == (1, "unknown")
    assert any("beyond the training range of the steps" in text for text in result["reasons"])
