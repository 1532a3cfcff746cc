"""Exports, each evaluated by the consumer's published formula written down here, on tables read row by row.

The run is `fixtures/generated/llama-8b-linear`: a step takes 7,000 us + 26 per prefill token + 15 per decode request +
0.003 per context token + 40 per prefill request; the API works 1,450 us on a request.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shutil
from functools import cache
from hashlib import sha256
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import yaml
from scipy.interpolate import RegularGridInterpolator

import tracefit
from tracefit.commands.export import export
from tracefit.consumers import dynamo
from tracefit.consumers.blis_replay import replay_as_blis
from tracefit.errors import DataError, UsageError
from tracefit.replay.engine import EngineSettings
from tracefit.synth import SynthOptions, synth, write_run
from tracefit.synth.laws import GPUS, MODELS, RooflineLaw

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "d": 4096,
    "H": 32,
    "kv": 8,
    "L": 32,
    "ff": 14336,
    "tp": 1,
    "peak": 989.5e6,
    "bw": 3350e3,
    "bpp": 2.0,
}


@pytest.fixture(scope="module")
def made(once):
    options = tracefit.TrainOptions(features="batch", fast=True)
    run = ROOT / "fixtures/generated/llama-8b-linear"
    return once("linear", lambda out: tracefit.run([run], out, options=options))


@pytest.fixture(scope="module")
def exported(made, tmp_path_factory):
    """Return a function that exports to a consumer, once: its result and its folder."""

    @cache
    def to(consumer, **options):
        folder = tmp_path_factory.mktemp(consumer)
        return export(made / "models", consumer, folder, **options), folder

    return to


def _table(made, name):
    return pl.concat([pl.read_parquet(p) for p in (made / "tables" / name).rglob("*.parquet")], how="diagonal_relaxed")


@pytest.fixture(scope="module")
def steps(made):
    """Held-out steps with their contents and their time."""
    rows = _table(made, "beta_training").filter(split="holdout").filter(pl.col("excluded_reason").is_null())
    keys = ["run_id", "server", "epoch", "step_id"]
    contents = _table(made, "timeline").drop(
        "ts_start_ns", "waiting_depth", "running_depth", "kv_usage_ratio", strict=False
    )
    columns = [c for c in contents.columns if c not in rows.columns or c in keys]
    return rows.filter(source="adjacent").join(contents.select(columns), on=keys)


def _ape(actual, predicted):
    return 100 * float(np.mean(np.abs(predicted - actual) / actual))


def _error(result, what):
    return next(e for e in result.errors if e.what == what)


def _prefill_chunks(made):
    """Tokens computed and prompt length of every prefill of a step, request by request: those scheduled first come
    first."""
    prefill = dict(_table(made, "timeline").select("step_id", "prefill_tokens").iter_rows())
    requests = _table(made, "requests").drop_nulls(["first_token_step"]).sort("first_scheduled_ns")
    chunks = {}
    in_one = pl.col("first_scheduled_step") == pl.col("first_token_step")
    for row in pl.concat([requests.filter(in_one), requests.filter(~in_one)]).iter_rows(named=True):
        left = row["prompt_tokens"]
        for step in range(row["first_scheduled_step"], row["first_token_step"] + 1):
            taken = left if step == row["first_token_step"] else min(prefill[step], left)
            prefill[step], left = prefill[step] - taken, left - taken
            chunks.setdefault(step, []).append((taken, row["prompt_tokens"]))
    return {step: of if not prefill[step] else None for step, of in chunks.items()}


def _blis_terms(row, chunks):
    """T of BLIS in its order, from its documentation."""
    k = SETTINGS
    dh = k["d"] // k["H"]
    dkv = k["kv"] * dh
    t_p, t_d = row["prefill_tokens"], row["decode_tokens"]
    dense = k["d"] * (2 * k["d"] + 2 * dkv)
    matrices = 2 * dense / k["tp"] + 6 * k["d"] * k["ff"] / k["tp"]
    known = chunks.get(row["step_id"])
    prompts = row["prefill_context_tokens"] + t_p
    alike = t_p * (prompts + t_p / 2) / row["num_prefill_reqs"] if t_p else 0.0
    pairs = sum(t * (s + t / 2) for t, s in known) if known else alike
    per_kv = k["L"] * 2 * (dkv / k["tp"]) * 2 / k["bw"]
    return [
        k["L"] * (t_p * matrices + 4 * (k["H"] / k["tp"]) * pairs * dh) / k["peak"],
        k["L"] * (t_d * matrices + 4 * (k["H"] / k["tp"]) * row["context_tokens"] * dh) / k["peak"],
        k["L"] * (dense + 3 * k["d"] * k["ff"]) * k["bpp"] / k["tp"] / k["bw"],
        2 * k["L"] * (t_p + t_d) * k["d"] * 2 * 2 * (k["tp"] - 1) / k["tp"] / k["bw"],
        k["L"],
        row["num_prefill_reqs"] + row["num_decode_reqs"],
        1,
        0,
        per_kv * t_p,
        per_kv * (row["context_tokens"] + t_d),
    ]


def _coefficients(folder):
    return yaml.safe_load((folder / "defaults.yaml").read_text())["trained_physics_coefficients"]


def _alpha(folder):
    return _coefficients(folder)["alpha_coeffs"]


def _larger(terms):
    return [max(terms[0], terms[8]), max(terms[1], terms[9]), *terms[2:8]]


def test_blis_file_has_the_keys_that_blis_reads(exported):
    """It refuses others, and drops the digits after the decimal point of an alpha."""
    document = yaml.safe_load((exported("blis")[1] / "defaults.yaml").read_text())
    assert list(document) == ["trained_physics_coefficients"]
    coefficients = document["trained_physics_coefficients"]
    assert list(coefficients) == ["alpha_coeffs", "beta_coeffs"]
    assert [type(value) for value in coefficients["alpha_coeffs"]] == [int] * 3
    assert len(coefficients["beta_coeffs"]) == 8, "the larger of compute and KV, as physics has it"
    assert all(math.isfinite(v) and v >= 0 for values in coefficients.values() for v in values)


def test_blis_step_error_is_that_of_its_formula(made, steps, exported):
    result, folder = exported("blis")
    beta, chunks = _coefficients(folder)["beta_coeffs"], _prefill_chunks(made)
    assert 1 < beta[0] < 3, "26 us a prompt token are 1.6 times what its arithmetic takes at the peak"
    assert sum(of is not None for of in chunks.values()) > 0.95 * len(chunks)
    terms = [_larger(_blis_terms(row, chunks)) for row in steps.iter_rows(named=True)]
    predicted = np.floor(np.array(terms) @ np.array(beta))
    stated = _error(result, "step time")
    assert stated.n == steps.height
    assert stated.mape_pct == pytest.approx(_ape(steps["y"].to_numpy(), predicted), rel=1e-6)
    assert stated.mae < stated.baseline_mae / 3
    assert _error(result, "step time, decode only").mape_pct < 2.6, "decode steps are what an ITL is made of"


@pytest.fixture(scope="module")
def replayed(made, exported, blis_rates):
    """Return the requests that count in the hold-out and their replay: the file's numbers through BLIS's queue,
    scheduler and cache."""
    coefficients = _coefficients(exported("blis")[1])
    requests = _table(made, "requests").drop_nulls(["arrival_ns", "first_token_ns"]).sort("arrival_ns")
    latencies = replay_as_blis(
        ((requests["arrival_ns"] - requests["arrival_ns"][0]).to_numpy() / 1e3).round().astype(np.int64),
        requests["prompt_tokens"].to_numpy(),
        requests["output_tokens"].fill_null(1).clip(lower_bound=1).to_numpy(),
        blis_rates(coefficients["beta_coeffs"], *(SETTINGS[size] for size in ("d", "H", "kv", "L", "ff", "tp"))),
        tuple(coefficients["alpha_coeffs"]),
        EngineSettings(64, 2048, 16, 4096),
    )
    begins = _table(made, "beta_training").filter(split="holdout")["ts_ns"].min()
    rows = requests.with_columns(TTFT=latencies.ttft, E2E=latencies.e2e).filter(
        pl.col("arrival_ns") >= begins, pl.col("finish_status") != "aborted", pl.col("output_tokens") > 1
    )
    return rows.drop_nulls("departed_ns")


@pytest.mark.parametrize(("latency", "measured"), [("E2E", "client_us"), ("TTFT", "ttft_us")])
def test_blis_replay_error_is_that_of_its_file(exported, replayed, latency, measured):
    stated = _error(exported("blis")[0], f"{latency} of a request, replayed")
    assert stated.n == replayed.height
    expected = _ape(replayed[measured].to_numpy(), replayed[latency].to_numpy())
    assert stated.mape_pct == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_blis_replay_follows_the_gaps_between_tokens(exported):
    assert _error(exported("blis")[0], "ITL of a request, replayed").mape_pct < 1


@pytest.mark.slow
def test_blis_registry_notes_coefficients_that_do_not_transfer(exported):
    """With ten coefficients, prefill compute is 0 and prefill KV hundreds of times nominal: that holds only for this
    run."""
    notes = exported("blis-registry")[0].notes
    assert any(note.startswith("no transfer: beta8 (prefill KV) is ") for note in notes)
    assert not any(note.startswith("no transfer") for note in exported("blis")[0].notes)


@pytest.mark.parametrize("start", ["weighting: eight coefficients, ", "replayed as BLIS would, "])
def test_blis_file_states_the_notes_of_its_fit(exported, start):
    result, folder = exported("blis")
    (note,) = (note for note in result.notes if note.startswith(start))
    assert f"# {note}\n" in (folder / "defaults.yaml").read_text()


def test_blis_notes_name_the_choice_and_the_eleventh_beta(exported):
    notes = exported("blis")[0].notes
    assert any("the closest replay of" in note for note in notes)
    assert any("the eleventh that BLIS reads" in note for note in notes)


def test_blis_alpha0_is_the_api_work_without_a_wait(made, exported):
    _, folder = exported("blis")
    alpha0 = _alpha(folder)[0]
    assert alpha0 == pytest.approx(1450, abs=150)
    assert "# alpha0 is the API's work, by the admission model: " in (folder / "defaults.yaml").read_text()
    admission = _table(made, "requests")["admission_us"].mean()
    assert admission > 3 * alpha0, "the mean of ARRIVED to QUEUED contains the wait for the boundary"


def test_blis_departure_error_is_that_of_its_alphas(made, exported):
    result, folder = exported("blis")
    _, fixed, per_token = _alpha(folder)
    tokens = _table(made, "requests").select("run_id", request_id="core_request_id", tokens="output_tokens")
    rows = _table(made, "alpha_training").filter(target="departure", split="holdout")
    rows = rows.filter(pl.col("excluded_reason").is_null()).join(tokens, on=["run_id", "request_id"])
    expected = _ape(rows["y"].to_numpy(), fixed + per_token * rows["tokens"].to_numpy())
    assert _error(result, "FINISHED to DEPARTED").mape_pct == pytest.approx(expected, rel=1e-6)


def _without(made, tmp_path, change):
    folder = tmp_path / "models"
    folder.mkdir()
    alpha = json.loads((made / "models/alpha.json").read_text())
    alpha["models"] = [m for m in (change(m) for m in alpha["models"]) if m is not None]
    (folder / "alpha.json").write_text(json.dumps(alpha))
    (folder / "beta.json").write_text((made / "models/beta.json").read_text())
    return folder


def _as_line(model):
    if model["name"] != "alpha.admission":
        return model
    line = ("boundary", "queue", "work", "offset", "without_clock", "expectation")
    kept = {k: v for k, v in model.items() if k not in line}
    return kept | {k: model["without_clock"][k] for k in ("form", "intercept", "terms")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [lambda m: m if m["name"] == "alpha.queue_wait" else None, _as_line],
    ids=["only the wait", "no clock"],
)
def test_wait_is_never_exported_as_alpha0(made, tmp_path, change):
    """Without a rule for the wait, alpha0 is what the soonest requests took: little more than the API's 1,450 us."""
    folder = _without(made, tmp_path, change)
    result = export(folder, "blis", tmp_path / "out", tables=made / "tables")
    assert 1_450 < _alpha(tmp_path / "out")[0] < 1_450 + 0.2 * 7_500
    assert any("the others contain a wait for the step in progress" in note for note in result.notes)


@pytest.mark.slow
def test_blis_alpha0_where_queued_is_stamped_on_arrival(tmp_path):
    run = synth(SynthOptions(name="arrival", queued_stamp="arrival", requests=250))
    tracefit.run([write_run(run, tmp_path)], tmp_path / "out", options=tracefit.TrainOptions(fast=True))
    result = export(tmp_path / "out", "blis", tmp_path / "blis")
    queued = run.truth_requests.drop_nulls("queued_ns")
    work_us = (queued["socket_ns"] - queued["arrival_ns"]).mean() / 1e3
    assert _alpha(tmp_path / "blis")[0] == pytest.approx(work_us, rel=0.05)
    assert any("QUEUED is stamped on arrival" in note for note in result.notes)


@pytest.mark.slow
def test_blis_alpha0_from_stock_spans(tmp_path):
    """Spans of an unmodified server have neither steps nor QUEUED: both are worked out, and no wait stays in alpha0."""
    run = synth(SynthOptions(name="stock", form="stock", requests=250))
    tracefit.run([write_run(run, tmp_path)], tmp_path / "out", options=tracefit.TrainOptions(fast=True))
    result = export(tmp_path / "out", "blis", tmp_path / "blis")
    truth = run.truth_requests.drop_nulls("socket_ns")
    assert _alpha(tmp_path / "blis")[0] == pytest.approx(
        (truth["socket_ns"] - truth["arrival_ns"]).mean() / 1e3, rel=0.05
    )
    assert "# alpha0 is the API's work" in (tmp_path / "blis/defaults.yaml").read_text()
    assert _error(result, "ARRIVED to QUEUED, by alpha0 and the step boundary").mape_pct < 5


@pytest.mark.slow
def test_blis_alpha_is_0_without_requests(tmp_path):
    run = synth(SynthOptions(name="steps", form="fpm", requests=200))
    tracefit.run([write_run(run, tmp_path)], tmp_path / "out", options=tracefit.TrainOptions(fast=True))
    result = export(tmp_path / "out", "blis", tmp_path / "blis")
    assert _alpha(tmp_path / "blis") == [0, 0, 0]
    assert any("alpha0 is 0" in note for note in result.notes)
    assert not (tmp_path / "blis/trace-data.csv").exists()
    assert "--trace-data" not in " ".join([result.usage, *result.notes])


@pytest.fixture(scope="module")
def bound_run(tmp_path_factory):
    """Steps that take the larger of compute and memory time, at 55 % of the peak and 75 % of the bandwidth, and nothing
    else."""
    out = tmp_path_factory.mktemp("bound")
    law = RooflineLaw(MODELS["llama-8b"], GPUS["H100"], base_us=0.0, per_req_us=0.0)
    run = synth(SynthOptions(name="bound", seed=3, requests=350, rate_per_s=20.0, law=law))
    tracefit.run([write_run(run, out)], out / "made", options=tracefit.TrainOptions(features="batch", fast=True))
    return out / "made"


@pytest.mark.slow
def test_blis_roofline_is_chosen_where_steps_follow_it(bound_run, tmp_path):
    result = export(bound_run, "blis", tmp_path)
    assert any(note.startswith("weighting: roofline, ") for note in result.notes)
    assert not any("no transfer" in note for note in result.notes)
    (gpu,) = json.loads((tmp_path / "hardware_config.json").read_text()).values()
    # Its FFNs have two matrices of three: of the weights and of the arithmetic it sees about 0.7.
    share = (2 * 4096 * (4096 + 1024) + 2 * 4096 * 14336) / (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336)
    assert gpu["mfuPrefill"] == pytest.approx(0.55 * share, rel=0.05)
    assert gpu["BwPeakTBs"] == pytest.approx(3.35 * 0.75 * share, rel=0.1)
    assert _error(result, "step time").mape_pct < 3.5, "only the clock's noise"
    for latency in ("TTFT", "ITL", "E2E"):
        assert abs(_error(result, f"{latency} of a request, replayed").bias_pct) < 5


@pytest.mark.slow
def test_blis_roofline_takes_alpha_through_a_pool(bound_run, tmp_path):
    """`--latency-model roofline` ends with "--alpha-coeffs/--beta-coeffs cannot be used"; a decode instance's own
    backend does not."""
    result = export(bound_run, "blis", tmp_path)
    (replayed,) = (note for note in result.notes if note.startswith("replay of the traced requests: "))
    for command in (result.usage, replayed):
        assert "--latency-model trained-physics" in command
        assert (
            "--num-instances 2 --prefill-instances 1 --decode-instances 1 --pd-decider never "
            "--decode-latency-model roofline"
        ) in command
    found = _coefficients(tmp_path)
    assert found["alpha_coeffs"][0] == pytest.approx(1450, abs=150)
    assert found["alpha_coeffs"][1] == 0, "the second is per prompt token here"
    assert len(found["beta_coeffs"]) >= 7
    assert any(found["beta_coeffs"]), "it refuses betas that are all 0, and reads none"


UNITS = [
    "dimensionless",
    "us_per_layer",
    "us_per_request",
    "us_per_step",
    "us_per_hop",
    "us_per_transfer",
    "us_per_load",
    "us_per_token",
]


@pytest.fixture(scope="module")
def registry(exported):
    """Return the document of the export to BLIS's registry, and its entries by name."""
    document = yaml.safe_load((exported("blis-registry")[1] / "coefficient-set.yaml").read_text())
    return document, {name: entry for item in document["coefficients"] for name, entry in item.items()}


@pytest.mark.slow
def test_blis_registry_set_has_thirteen_entries(registry):
    document, entries = registry
    assert (set(document), document["kind"]) == ({"kind", "name", "coefficients"}, "CoefficientSet")
    assert len(entries) == len(document["coefficients"]) == 13
    assert entries["per_layer_overhead"]["units"] == "us_per_layer"
    assert entries["output_token_processing"]["units"] == "us_per_token"


@pytest.mark.slow
def test_blis_registry_entries_follow_its_rules(registry):
    """Closed keys, units and methods, zero only where nothing is charged, sources."""
    needed = {"value", "units", "method", "fitted", "deployment"}
    deployment = {"hardware": ["h100"], "model": ["meta-llama/Llama-3.1-8B-Instruct"], "tp": [1]}
    for name, entry in registry[1].items():
        assert needed <= set(entry) <= needed | {"sources", "rationale", "ci95", "validated"}
        assert re.fullmatch(r"[a-z0-9_]+", name)
        assert math.isfinite(entry["value"])
        assert entry["units"] in UNITS
        assert (entry["value"] == 0) == (entry["method"] == "not_charged")
        assert entry["fitted"] is (entry["method"] == "measured")
        assert entry["rationale"] if entry["method"] != "measured" else entry["sources"]
        for source in entry.get("sources", ()):
            assert set(source) == {"kind", "cite", "role"}
            assert (source["kind"], source["role"]) == ("model", "primary")
        assert entry["deployment"] == deployment


def test_blis_registry_error_is_that_of_its_values(made, steps, exported, registry):
    values = [entry["value"] for entry in registry[1].values()]
    chunks = _prefill_chunks(made)
    terms = np.array([_blis_terms(row, chunks) for row in steps.iter_rows(named=True)])
    stated = _error(exported("blis-registry")[0], "step time").mape_pct
    assert stated == pytest.approx(_ape(steps["y"].to_numpy(), np.floor(terms @ values[:10])), rel=1e-6)
    rationale = registry[1]["per_step_overhead"]["rationale"]
    assert f"Held-out step time of the set: {stated:.3g} %" in rationale


@pytest.mark.slow
def test_blis_registry_has_the_alphas_of_the_file(exported, registry):
    assert [entry["value"] for entry in registry[1].values()][10:] == _alpha(exported("blis")[1])


def _us(duration):
    value, unit = re.fullmatch(r"([0-9.]+)(ns|us|ms|s)", duration).groups()
    return float(value) * {"ns": 1e-3, "us": 1, "ms": 1e3, "s": 1e6}[unit]


def _llm_d(folder):
    """Return the config with durations in us."""
    values = yaml.safe_load((folder / "config.yaml").read_text())
    return {k: _us(v) if re.fullmatch(r"[0-9.]+us", str(v)) else v for k, v in values.items()}


def _load_factor(config, running):
    return 1 + (config["time-factor-under-load"] - 1) * (running - 1) / 63


def _held_requests(made, target):
    """Return the last 30 % of the requests with a duration, and the running requests by step."""
    requests = _table(made, "requests").filter(pl.col(target) > 0, pl.col("first_scheduled_ns").is_not_null())
    requests = requests.sort("first_scheduled_ns")
    running = dict(_table(made, "timeline").select("step_id", "running_depth").iter_rows())
    return requests[math.ceil(0.7 * requests.height) :], running


def test_llm_d_inference_sim_config_is_of_the_server(exported):
    config = _llm_d(exported("llm-d-inference-sim")[1])
    assert (config["latency-calculator"], config["max-num-seqs"]) == ("per-token", 64)
    assert (config["model"], config["max-model-len"]) == ("meta-llama/Llama-3.1-8B-Instruct", 4096)


def test_llm_d_inference_sim_latencies_follow_the_law(exported):
    """7,000 us + 15 per decode request; of 1 to 64, with contexts of some hundred tokens and prefills between."""
    config = _llm_d(exported("llm-d-inference-sim")[1])
    assert 7000 < config["inter-token-latency"] < 9000
    assert config["time-factor-under-load"] >= 1
    assert config["inter-token-latency-std-dev"] <= 0.3 * config["inter-token-latency"]


def test_llm_d_inference_sim_prefill_error_is_of_its_formula(made, exported):
    result, folder = exported("llm-d-inference-sim")
    config, (rows, running) = _llm_d(folder), _held_requests(made, "prefill_us")
    predicted = []
    for row in rows.iter_rows(named=True):
        uncached = row["prompt_tokens"] - (row["cached_prompt_tokens"] or 0)
        took = config["prefill-overhead"] + uncached * config["prefill-time-per-token"]
        predicted.append(took * _load_factor(config, running[row["first_scheduled_step"]]))
    stated = _error(result, "prefill of a request")
    assert stated.n == rows.height
    expected = _ape(rows["prefill_us"].to_numpy(), np.array(predicted))
    assert stated.mape_pct == pytest.approx(expected, rel=1e-6)


def test_llm_d_inference_sim_itl_error_is_of_its_formula(made, exported):
    result, folder = exported("llm-d-inference-sim")
    config, (rows, running) = _llm_d(folder), _held_requests(made, "itl_us")
    predicted = []
    for row in rows.iter_rows(named=True):
        ran = [running[step] for step in range(row["first_token_step"] + 1, row["finished_step"] + 1)]
        predicted.append(config["inter-token-latency"] * _load_factor(config, np.mean(ran)))
    expected = _ape(rows["itl_us"].to_numpy(), np.array(predicted))
    assert _error(result, "inter-token latency of a request").mape_pct == pytest.approx(expected, rel=1e-6)


def test_llm_d_inference_sim_0_10_takes_the_whole_spread(exported):
    newer, new_folder = exported("llm-d-inference-sim")
    older, old_folder = exported("llm-d-inference-sim", consumer_version="v0.9.2")
    new, old = _llm_d(new_folder), _llm_d(old_folder)
    assert new["prefill-time-std-dev"] > 0.3 * new["prefill-time-per-token"]
    assert old["prefill-time-std-dev"] <= 0.3 * old["prefill-time-per-token"]
    assert {k: v for k, v in new.items() if k != "prefill-time-std-dev"}.items() <= old.items()
    assert "loads from llm-d-inference-sim v0.10.0" in newer.notes[0]
    assert "up to v0.9.2" in older.notes[0]


@pytest.mark.parametrize(
    ("to", "version", "says"),
    [
        ("llm-d-inference-sim", "newest", "`consumer_version` newest: is not a version"),
        ("blis", "1.0", "blis has one form for all versions"),
    ],
)
def test_wrong_consumer_version_is_refused(made, tmp_path, to, version, says):
    with pytest.raises(UsageError, match=says):
        export(made / "models", to, tmp_path, consumer_version=version)


@pytest.fixture(scope="module")
def grid(exported):
    return np.load(exported("dynamo-mocker")[1] / "perf_data.npz")


def test_dynamo_mocker_axes_rise(grid):
    axes = [grid[name] for name in ("decode_active_kv_tokens", "decode_context_length", "prefill_isl")]
    assert sorted(grid.files) == [
        "decode_active_kv_tokens",
        "decode_context_length",
        "decode_itl",
        "prefill_isl",
        "prefill_ttft_ms",
    ]
    assert grid["decode_itl"].shape == tuple(map(len, axes[:2]))
    assert all(np.all(np.diff(axis) > 0) for axis in axes)


@pytest.mark.parametrize(("kind", "prefills"), [("decode", False), ("prefill and decode", True)])
def test_dynamo_mocker_error_is_that_of_its_interpolation(exported, steps, grid, kind, prefills):
    """Linear over tokens and bilinear over (tokens in caches, tokens per request), beyond the grid too; at least 1
    ms."""
    outside = {"bounds_error": False, "fill_value": None}
    axes = (grid["decode_active_kv_tokens"], grid["decode_context_length"])
    itl = RegularGridInterpolator(axes, grid["decode_itl"], **outside)
    ttft = RegularGridInterpolator((grid["prefill_isl"],), grid["prefill_ttft_ms"], **outside)
    rows = steps.filter(pl.col("num_decode_reqs") > 0, (pl.col("prefill_tokens") > 0) == prefills)
    tokens, active, batch = (rows[c].to_numpy() for c in ("prefill_tokens", "context_tokens", "num_decode_reqs"))
    predicted = np.maximum(itl(np.column_stack([active, active / batch])), 1.0)
    if prefills:
        predicted += np.maximum(ttft(tokens[:, None]), 0.0)
    stated = _error(exported("dynamo-mocker")[0], f"step time, {kind}")
    assert stated.n == rows.height
    assert stated.mape_pct == pytest.approx(_ape(rows["y"].to_numpy() / 1e3, predicted), rel=1e-6)
    assert stated.mape_pct < 8


def test_dynamo_mocker_file_has_no_time_of_day(made, exported, tmp_path):
    export(made / "models", "dynamo-mocker", tmp_path)
    first = exported("dynamo-mocker")[1] / "perf_data.npz"
    assert (tmp_path / "perf_data.npz").read_bytes() == first.read_bytes()


def test_dynamo_mocker_itself_runs_on_the_grids(exported):
    """One request in its engine: 500 prompt tokens at 26 us and 40 for the prompt, then 99 tokens at 7,015 us and 0.003
    per token in cache."""
    core = pytest.importorskip("dynamo._core")
    profile = {
        "type": "external",
        "provider": "dynamo_profile",
        "config": {"path": str(exported("dynamo-mocker")[1] / "perf_data.npz")},
    }
    engine = {"backend": "vllm", "num_gpu_blocks": 4096, "block_size": 16, "timing_model": profile}
    served = core.run_mocker_synthetic_trace_replay(
        500,
        100,
        1,
        extra_engine_args={"engine": engine, "num_gpu_blocks_is_explicit": True},
        replay_concurrency=1,
    ).summary
    # Prompts share most steps with decodes here: the constant of 7,000 us is in the other grid.
    assert served["mean_ttft_ms"] == pytest.approx(13.04, rel=0.02)
    decoding = served["duration_ms"] - served["mean_ttft_ms"]
    assert decoding == pytest.approx(99 * (7.015 + 0.003e-3 * 550), rel=0.02)


def _planner(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


def test_dynamo_planner_gets_measured_steps(exported):
    """As `_extract_fpms_from_benchmark` of ai-dynamo 1.6.1 reads them; 7,000 us and 15 a request, 0.003 a token in
    cache."""
    results = _planner(exported("dynamo-planner")[1], "benchmark_results")["results"]
    records = {result["point"]["point_type"]: result["fpms"] for result in results}["decode"]
    batches = [record["scheduled_requests"] for record in records]
    assert not any(b["sum_prefill_tokens"] for b in batches)
    law = [7000 + 15 * b["num_decode_requests"] + 0.003 * b["sum_decode_kv_tokens"] for b in batches]
    took = 1e6 * np.array([record["wall_time"] for record in records])
    assert np.median(np.abs(took / law - 1)) < 0.03


def test_dynamo_planner_gets_prefills_of_the_model(exported):
    """As `_convert_profiling_data_to_fpms` reads them; 26 us a prompt token and 40 a prompt."""
    prefill = _planner(exported("dynamo-planner")[1], "prefill_raw_data")
    law = [7.0 + 0.026 * tokens + 0.04 for tokens in prefill["prefill_isl"]]
    assert prefill["prefill_ttft"] == pytest.approx(law, rel=0.03)


def test_dynamo_planner_gets_decodes_of_the_model(exported):
    decode = _planner(exported("dynamo-planner")[1], "decode_raw_data")
    tokens = np.array(decode["x_kv_usage"]) * decode["max_kv_tokens"]
    batch = tokens / np.array(decode["y_context_length"])
    assert (decode["max_kv_tokens"], batch.min() >= 1) == (4096 * 16, True)
    assert decode["z_itl"] == pytest.approx(7.0 + 0.015 * batch + 3e-6 * tokens, rel=0.03)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_dynamo_planner_itself_reads_both(exported, kind):
    read = pytest.importorskip("dynamo.planner.monitoring.perf_metrics")
    _, folder = exported("dynamo-planner")
    written = _planner(folder, "benchmark_results")
    (fpms,) = (r["fpms"] for r in written["results"] if r["point"]["point_type"] == kind)
    measured = read._extract_fpms_from_benchmark(written, read.SubComponentType(kind))
    assert [f.wall_time for f in measured] == [f["wall_time"] for f in fpms] != []
    on_grid = read._convert_profiling_data_to_fpms(str(folder), read.SubComponentType(kind))
    assert all(f.wall_time > 0 for f in on_grid)
    assert len(on_grid) > 30


def _fpm_table(folder):
    rows = pl.read_parquet(folder / "fpm_forward_perf.parquet")
    sidecar = json.loads((folder / "fpm_forward_perf.metadata.json").read_text())
    digest = sha256((folder / "fpm_forward_perf.parquet").read_bytes()).hexdigest()
    assert (sidecar["row_count"], sidecar["parquet_sha256"]) == (rows.height, digest)
    return rows, sidecar


def _linear_ms(rows):
    decode = 0.015 * pl.col("batch_size") + 3e-6 * pl.col("total_kv_read_tokens")
    prefill = 0.026 * pl.col("total_prefill_tokens") + 0.04 * pl.col("batch_size")
    return rows.select(7 + pl.when(workload_kind="prefill").then(prefill).otherwise(decode)).to_series().to_numpy()


@pytest.mark.parametrize(
    ("what", "said"),
    [("measured", "medians of measured steps"), ("model", "a step model on a grid")],
    ids=["measured", "model"],
)
def test_aisimulate_table_follows_its_loader(exported, what, said):
    """One row per point and kind, no prompt token in a decode step, equal labels in table and sidecar."""
    rows, sidecar = _fpm_table(exported("aisimulate")[1] / what)
    assert sidecar["tracefit_rows"] == said
    assert (sidecar["schema_name"], sidecar["schema_version"]) == ("aic_fpm_forward_perf", 7)
    for name in ("system", "backend", "backend_version"):
        assert rows[name].unique().to_list() == [sidecar[name]]
    sizes = ("tp", "pp", "dp", "moe_tp", "moe_ep", "cp", "batch_size")
    assert {str(rows.schema[name]) for name in sizes} == {"Int64"}
    key = ["workload_kind", "batch_size", "total_prefill_tokens", "total_kv_read_tokens"]
    assert not rows.select(key).is_duplicated().any()
    is_prefill = rows["workload_kind"] == "prefill"
    assert set(rows["workload_kind"]) == {"prefill", "decode"}
    assert ((rows["total_prefill_tokens"] > 0) == is_prefill).all()


@pytest.mark.parametrize(("what", "within"), [("measured", 0.15), ("model", 0.03)])
def test_aisimulate_table_has_the_times_of_the_law(exported, what, within):
    rows, _ = _fpm_table(exported("aisimulate")[1] / what)
    assert np.percentile(np.abs(rows["latency_ms"].to_numpy() / _linear_ms(rows) - 1), 95) < within


def test_aisimulate_table_has_a_measured_step(exported, steps):
    result, folder = exported("aisimulate")
    measured = pl.read_parquet(folder / "measured/fpm_forward_perf.parquet").filter(workload_kind="decode")
    one = steps.filter((pl.col("prefill_tokens") == 0) & (pl.col("num_decode_reqs") > 0)).tail(1)
    batch, cached = one["num_decode_reqs"].item(), one["context_tokens"].item()
    assert measured.filter(batch_size=batch, total_kv_read_tokens=cached).height == 1
    assert result.errors[0].mape_pct < 3


def test_aisimulate_itself_predicts_from_the_table(made, tmp_path):
    sdk = pytest.importorskip("aisimulate_core.sdk")
    export(made / "models", "aisimulate", tmp_path)
    # Without the network, it knows this architecture only under its own name.
    name, table = "meta-llama/Meta-Llama-3.1-8B", tmp_path / "model/fpm_forward_perf.parquet"
    pl.read_parquet(table).with_columns(model_path=pl.lit(name)).write_parquet(table)
    sidecar = table.with_suffix(".metadata.json")
    said = json.loads(sidecar.read_text()) | {"parquet_sha256": sha256(table.read_bytes()).hexdigest()}
    sidecar.write_text(json.dumps(said))
    asked = {n: said[n] for n in ("system", "backend", "backend_version")}
    config = sdk.ForwardPassPerfModelConfig(
        model=name,
        worker_type="aggregated",
        tp=1,
        estimation_mode="fpm_interpolation",
        fallback_policy="deny",
        estimator_config={"fpm_interpolation": {"fpm_parquet_path": str(table)}},
        **asked,
    )
    model = sdk.RustForwardPassPerfModel.best_available(config)
    for batch, cached in ((4, 1600), (8, 4000), (30, 20000)):
        expected = 7 + 0.015 * batch + 3e-6 * cached
        assert model.predict_decode_latency_total(batch, cached) == pytest.approx(expected, rel=0.02)
    for tokens in (100, 1500):
        assert model.predict_prefill_latency_total(1, tokens, 0) == pytest.approx(7.04 + 0.026 * tokens, rel=0.02)


@pytest.fixture(scope="module")
def vcr(made, exported):
    """Return the lines of the trace and the requests they are of."""
    lines = (exported("vllm-vcr")[1] / "latency-trace.jsonl").read_text().splitlines()
    requests = _table(made, "requests").drop_nulls(["ttft_us", "itl_us", "departed_ns"]).sort("arrival_ns")
    requests = requests.filter((pl.col("output_tokens") > 1) & (pl.col("finish_status") != "aborted"))
    return [json.loads(line) for line in lines], requests.to_dicts()


def test_vllm_vcr_trace_has_a_line_per_request(vcr):
    """The keys of `TraceRecord` in its `trace.rs`."""
    (meta, *records), requests = vcr
    assert meta["meta"]["max_num_seqs"] == 64
    assert len(records) == len(requests) > 300
    assert {key for record in records for key in record} <= {
        *("prompt_tokens", "cached_tokens", "output_tokens", "ttft_ms", "concurrency", "arrival_ms"),
        *("itl_ms", "itl_ctx", "itl_summary"),
    }


def test_vllm_vcr_ttft_begins_at_queued(vcr):
    """The API's work of 1.45 ms is the front end's."""
    (_, *records), requests = vcr
    for record, row in zip(records, requests, strict=True):
        assert record["ttft_ms"] == pytest.approx((row["first_token_ns"] - row["queued_ns"]) / 1e6)
        assert record["ttft_ms"] < row["ttft_us"] / 1e3 - 1.2


@pytest.mark.slow
def test_vllm_vcr_gets_each_gap_and_its_step(made, vcr):
    """The rules of `validate_record` in its `trace.rs`."""
    (_, *records), requests = vcr
    prompts = _table(made, "requests").group_by("first_token_step").agg(pl.col("prompt_tokens").sum())
    finished = dict(prompts.iter_rows())
    pairs = [(r, row) for r, row in zip(records, requests, strict=True) if "itl_ms" in r]
    assert len(pairs) > 0.9 * len(records)
    for record, row in pairs:
        context = record["itl_ctx"]
        lists = (record["itl_ms"], context["num_running"], context["prefill_tokens"])
        assert {len(values) for values in lists} == {row["output_tokens"] - 1}
        assert np.mean(record["itl_ms"]) == pytest.approx(row["itl_us"] / 1e3, rel=0.1)
        closing = range(row["first_token_step"] + 1, row["finished_step"] + 1)
        assert context["prefill_tokens"] == [finished.get(step, 0) for step in closing]


def test_vllm_vcr_gets_the_mean_of_gaps_that_are_unknown(vcr):
    (_, *records), requests = vcr
    for record, row in zip(records, requests, strict=True):
        if "itl_ms" not in record:
            assert record["itl_summary"]["count"] == row["output_tokens"] - 1


def test_llm_d_latency_predictor_gets_its_columns(made, exported):
    """Those of `TrainingEntry` in its training server of August 2026."""
    text = (exported("llm-d-latency-predictor")[1] / "training-rows.json").read_text()
    rows = json.loads(text)["entries"]
    queued = pl.col("queued_step") > 0  # at 0 nothing ran yet, and no step shows the state
    requests = _table(made, "requests").drop_nulls(["ttft_us", "itl_us"]).filter(queued).sort("arrival_ns")
    assert len(rows) == requests.height
    assert [r["input_token_length"] for r in rows] == requests["prompt_tokens"].to_list()
    for column, latency in (("actual_ttft_ms", "ttft_us"), ("actual_tpot_ms", "itl_us")):
        assert [1e3 * r[column] for r in rows] == pytest.approx(requests[latency].to_list())
    assert {k for row in rows for k in row} == {
        *("kv_cache_percentage", "input_token_length", "num_request_waiting", "num_request_running"),
        *("actual_ttft_ms", "actual_tpot_ms", "num_tokens_generated", "prefix_cache_score"),
    }
    assert all(0 <= r["kv_cache_percentage"] <= 1 for r in rows)


def test_vllm_sr_sim_gets_constant_and_slope_of_a_step(exported, steps):
    """`ManualProfile` of vllm-sr-sim 0.1.0: a step takes W + H · n seconds at the context that H is measured at."""
    result, folder = exported("vllm-sr-sim")
    profile = json.loads((folder / "profile.json").read_text())
    assert (profile["chunk"], profile["blk_size"], profile["max_slots"]) == (2048, 16, 64)
    sequences = (steps["num_decode_reqs"] + steps["num_prefill_reqs"]).to_numpy()
    predicted = 1e6 * (profile["W"] + profile["H"] * sequences)
    (stated,) = result.errors
    assert stated.mape_pct == pytest.approx(_ape(steps["y"].to_numpy(), predicted), rel=1e-6)
    assert profile["W"] == pytest.approx(0.007, rel=0.05)
    fleet_sim = pytest.importorskip("fleet_sim")
    assert fleet_sim.ManualProfile(**profile).iter_latency(0) == profile["W"]


def test_grid_without_prompts_has_an_extent():
    """An axis of one value has cells of no width: the mocker divides by it."""
    steps = pl.DataFrame({"prefill_tokens": [0, 0], "num_decode_reqs": [0, 1], "context_tokens": [0, 1]})
    for axis in dynamo.axes(steps):
        assert np.all(np.diff(axis) > 0)


def test_csv_has_every_number(made, exported):
    result, folder = exported("csv")
    rows = list(csv.DictReader(io.StringIO((folder / "coefficients.csv").read_text())))
    beta = json.loads((made / "models/beta.json").read_text())["models"][0]
    written = {r["term"]: float(r["value"]) for r in rows if r["model"] == "beta.cycle_time"}
    wanted = {"intercept": beta["intercept"]["value"]} | {t["feature"]: t["value"] for t in beta["terms"]}
    assert written == wanted
    admission = [r for r in rows if r["model"] == "alpha.admission"]
    assert {r["part"] for r in admission} == {"work", "without_clock"}
    assert _error(result, "beta.cycle_time").mape_pct == beta["validation"]["holdout"]["mape_pct"]


def test_folder_may_end_in_a_slash(made, tmp_path):
    result = export(made / "models", "csv", f"{tmp_path}/x/")
    assert result.usage.endswith(f" {tmp_path}/x/coefficients.csv")


@pytest.mark.parametrize(
    ("to", "says"),
    [
        ("vidur", "per operator, finer than a trace of steps can resolve"),
        ("LLMServingSim", "per operator, finer than a trace of steps can resolve"),
        ("aiconfigurator", "per operator, finer than a trace of steps can resolve"),
        ("wva", "it learns its parameters online"),
    ],
)
def test_consumer_that_takes_no_step_model_is_refused(made, tmp_path, to, says):
    with pytest.raises(DataError, match=says):
        export(made / "models", to, tmp_path)


def test_unknown_consumer_is_refused(made, tmp_path):
    with pytest.raises(UsageError, match="known: aisimulate, blis, blis-registry"):
        export(made / "models", "bliss", tmp_path)


def test_unknown_gpu_is_refused(trained, tmp_path):
    with pytest.raises(DataError, match="the GPU is not known"):
        export(trained / "models", "blis", tmp_path)


def test_lone_coefficient_file_needs_tables(made, tmp_path):
    models = shutil.copy(made / "models/beta.json", tmp_path)
    with pytest.raises(UsageError, match="give them with `tables`"):
        export(models, "llm-d-inference-sim", tmp_path)


def test_tables_of_other_runs_are_refused(made, trained, tmp_path):
    models = shutil.copy(made / "models/beta.json", tmp_path)
    with pytest.raises(DataError, match="runs llama-8b-linear that the models were trained on are not here"):
        export(models, "llm-d-inference-sim", tmp_path, tables=trained / "tables")


@pytest.mark.slow
def test_traces_without_journeys_are_refused_with_a_hint(tmp_path, new_traces):
    folder = new_traces().load(requests=0).write(tmp_path / "steps")
    tracefit.run([folder], tmp_path / "out", options=tracefit.TrainOptions(features="batch", fast=True))
    with pytest.raises(DataError, match=r"no row has both ends.*--enable-journey-tracing"):
        export(tmp_path / "out/models", "llm-d-inference-sim", tmp_path / "made")


@pytest.mark.slow
def test_blis_weighting_replays_training_requests_best(tmp_path):
    """On a roofline half the weight on prefill made decode 3 % short; what is chosen keeps ITL and E2E, both light and
    heavy."""
    folder = write_run(
        synth(SynthOptions(name="roofline", seed=5, requests=350, law="roofline")),
        tmp_path,
        formats=("json",),
    )
    tracefit.run([folder], tmp_path / "out", options=tracefit.TrainOptions(features="batch", fast=True))
    result = export(tmp_path / "out/models", "blis", tmp_path / "blis")
    (reason,) = (n for n in result.notes if n.startswith("weighting: "))
    worst, equal = re.search(r"at worst ([0-9.]+) times .* equal steps ([0-9.]+)", reason).groups()
    assert float(worst) <= float(equal)
    assert abs(_error(result, "ITL of a request, replayed").bias_pct) < 3
    assert abs(_error(result, "E2E of a request, replayed").bias_pct) < 3


@pytest.mark.slow
def test_blis_without_a_replay_says_so(made, tmp_path):
    """Of half the journeys a replay would have half the load."""
    out = tmp_path / "half"
    shutil.copytree(made, out)
    manifest = out / "tables/manifest.json"
    for path in list((out / "tables/runs").rglob("*.parquet")):
        pl.read_parquet(path).with_columns(journey_sampling=0.5).write_parquet(path)
        named = f"part-{sha256(path.read_bytes()).hexdigest()[:16]}.parquet"
        manifest.write_text(manifest.read_text().replace(path.name, named))
        path.rename(path.with_name(named))
    result = export(out / "models", "blis", tmp_path / "blis")
    assert not any(e.what.endswith("replayed") for e in result.errors)
    (reason,) = (n for n in result.notes if n.startswith("weighting: "))
    assert reason.endswith("journeys of all requests would let their replay choose")


@pytest.mark.slow
def test_blis_replay_computes_no_cached_prompt(tmp_path):
    options = SynthOptions(
        name="prefixes", seed=8, requests=300, prefix_fraction=0.7, prefix_tokens=512, rich_sampling=1.0
    )
    folder = write_run(synth(options), tmp_path, formats=("json",))
    tracefit.run([folder], tmp_path / "out", options=tracefit.TrainOptions(features="batch", fast=True))
    result = export(tmp_path / "out/models", "blis", tmp_path / "blis")
    assert abs(_error(result, "TTFT of a request, replayed").bias_pct) < 8
    traced = pl.read_csv(tmp_path / "blis/trace-data.csv")
    assert traced["prefix_length"].max() == 512
    assert (traced["input_tokens"] + traced["prefix_length"] == traced["server_input_tokens"]).all()
