"""Every `use` line: run as printed where its program is at hand, parsed against what its program documents where not.

BLIS: `blis run --help` and `blis replay --help` of August 2026 (commit f90a1e3a), run where BLIS=folder or
../shared/tools has it. llm-d-inference-sim: docs/configuration.md and docs/latency-simulation.md of v0.10.0 and v0.9.2.
Dynamo's mocker: its CLI reference, v1.4. vllm-vcr: `src/lib.rs` of August 2026.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import yaml
from msgspec.structs import replace

import tracefit
from tracefit.commands.export import export
from tracefit.consumers.base import flags
from tracefit.consumers.blis_replay import RooflineRates, replay_as_blis
from tracefit.consumers.blis_roofline import RooflineShape
from tracefit.replay.engine import EngineSettings
from tracefit.synth import SynthOptions, synth, write_run
from tracefit.synth.laws import GPUS, MODELS, RooflineLaw

ROOT = Path(__file__).parents[2]
BLIS = Path(os.environ.get("BLIS", ROOT / "../shared/tools")).resolve() / "blis"
needs_blis = pytest.mark.skipif(not BLIS.is_file(), reason="no blis (BLIS=folder)")

BLIS_SERVER = {
    "--latency-model": str,
    "--defaults-filepath": Path,
    "--model": str,
    "--model-config-folder": Path,
    "--hardware-config": Path,
    "--hardware": str,
    "--tp": int,
    "--total-kv-blocks": int,
    "--block-size-in-tokens": int,
    "--max-num-seqs": int,
    "--max-num-batched-tokens": int,
    "--max-model-len": int,
}
BLIS_RUN = {"--rate": float, "--num-requests": int} | {
    f"--{phase}-tokens{what}": int for phase in ("prompt", "output") for what in ("", "-stdev", "-min", "-max")
}
BLIS_REPLAY = {"--trace-header": Path, "--trace-data": Path}
MOCKER = {
    "--model-path": str,
    "--planner-profile-data": Path,
    "--max-num-seqs": int,
    "--max-num-batched-tokens": int,
    "--block-size": int,
    "--num-gpu-blocks-override": int,
}
VCR = {
    "--latency-trace": Path,
    "--max-num-seqs": int,
    "--max-num-batched-tokens": int,
    "--max-model-len": int,
    "--tokens-per-block": int,
    "--kv-cache-size": int,
}
LLM_D_KEYS = {
    "model",
    "max-model-len",
    "max-num-seqs",
    "latency-calculator",
    "prefill-overhead",
    "prefill-time-per-token",
    "prefill-time-std-dev",
    "inter-token-latency",
    "inter-token-latency-std-dev",
    "time-factor-under-load",
}


@pytest.fixture(scope="module")
def made(once):
    options = tracefit.TrainOptions(features="batch", fast=True)
    run = ROOT / "fixtures/generated/llama-70b-roofline"
    return once("a roofline", lambda out: tracefit.run([run], out, options=options))


@pytest.fixture
def exported(made, tmp_path):
    """Exports to a folder with a space in its name, with the words of its use line."""

    def run(to, **options):
        result = export(made / "models", to, tmp_path / "my exports" / to, **options)
        return result, shlex.split(result.usage)

    return run


def parsed(words, documented, switches=()):
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    for name, kind in documented.items():
        parser.add_argument(name, type=kind, required=True)
    for name in switches:
        parser.add_argument(name, action="store_true")
    given = vars(parser.parse_args(words))
    files = [v for v in given.values() if isinstance(v, Path)]
    assert files
    assert all(f.exists() for f in files), "files that the export wrote"
    return given


def replay_words(result):
    (line,) = (n for n in result.notes if n.startswith("replay of the traced requests: "))
    return shlex.split(line.removeprefix("replay of the traced requests: "))


@pytest.mark.slow
def test_blis_lines_state_the_traced_server(exported):
    result, words = exported("blis")
    assert words[:2] == ["blis", "run"]
    given = parsed(words[2:], BLIS_SERVER | BLIS_RUN)
    limits = ("total_kv_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "tp")
    assert [given[name] for name in limits] == [899, 64, 2048, 4096, 4]
    assert given["model"] == "meta-llama/Llama-2-70b-hf"
    hardware = json.loads(given["hardware_config"].read_text())[given["hardware"]]
    assert (hardware["TFlopsPeak"], hardware["BwPeakTBs"]) == (989.5, 3.35)
    assert json.loads((given["model_config_folder"] / "config.json").read_text())["num_hidden_layers"] == 80
    again = replay_words(result)
    assert again[:2] == ["blis", "replay"]
    traced = parsed(again[2:], BLIS_SERVER | BLIS_REPLAY)["trace_data"].read_text()
    assert "req-0" not in traced, "no request is named"
    assert len(traced.splitlines()) == given["num_requests"] + 1


@needs_blis
def test_blis_runs_its_use_line_as_printed(exported, tmp_path):
    result, _ = exported("blis")
    path = f"{BLIS.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["/bin/sh", "-c", result.usage],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
    )
    assert done.returncode == 0, done.stderr[-400:]
    assert '"completed_requests"' in done.stdout


@pytest.mark.slow
@needs_blis
@pytest.mark.parametrize(("blocks", "eight"), [(4096, False), (4096, True), (899, False), (400, False)])
def test_our_replay_is_what_blis_computes(exported, blis_rates, tmp_path, blocks, eight):
    """To the microsecond where memory suffices; where it preempts, to 0.1 % of E2E."""
    result, _ = exported("blis")
    if eight:
        # At 2.5 times the KV time beside the compute, short contexts are bound by one of them and long ones by the
        # other.
        text = (result.files[0].parent / "defaults.yaml").read_text()
        given = re.sub(r"beta_coeffs: .*", "beta_coeffs: [0.9, 2.5, 0, 0.5, 0, 12, 7180, 0]", text)
        (result.files[0].parent / "defaults.yaml").write_text(given)
    blis = replayed(result, tmp_path, blocks)
    e2e, ttft = ({i: r[key] for i, r in blis.items()} for key in ("e2e_us", "ttft_us"))
    folder = result.files[0].parent
    found = yaml.safe_load((folder / "defaults.yaml").read_text())["trained_physics_coefficients"]
    traced = pl.read_csv(folder / "trace-data.csv")
    own = replay_as_blis(
        *(traced[c].to_numpy() for c in ("arrival_time_us", "input_tokens", "output_tokens")),
        blis_rates(found["beta_coeffs"], 8192, 64, 8, 80, 28672, 4),
        tuple(found["alpha_coeffs"]),
        EngineSettings(64, 2048, 16, blocks),
    )
    assert len(e2e) == traced.height
    assert (own.preemptions > 0) == (blocks < 4096)
    off = np.array([own.e2e[i] / e2e[i] - 1 for i in range(traced.height)])
    if blocks == 4096:
        assert [own.ttft[i] for i in range(traced.height)] == [ttft[i] for i in range(traced.height)]
        assert not off.any()
    else:
        assert np.median(np.abs(off)) < 0.001


@pytest.mark.slow
@needs_blis
def test_blis_by_roofline_is_our_replay(tmp_path):
    """One decode instance by roofline: to the microsecond what we replay, and without alpha what `--latency-model
    roofline` gives."""
    law = RooflineLaw(MODELS["llama-8b"], GPUS["H100"], base_us=0.0, per_req_us=0.0)
    run = synth(SynthOptions(name="bound", seed=3, requests=350, rate_per_s=20.0, law=law))
    tracefit.run([write_run(run, tmp_path)], tmp_path / "made", options=tracefit.TrainOptions(fast=True))
    result = export(tmp_path / "made", "blis", tmp_path / "blis")
    assert "--decode-latency-model roofline" in result.usage
    (gpu,) = json.loads((tmp_path / "blis/hardware_config.json").read_text()).values()
    peak, bandwidth = 989.5e6, 3.35e6
    projections, ffn = 32 * 4096 * (2 * 4096 + 2 * 1024), 32 * 2 * 4096 * 14336
    shape = RooflineShape(
        token_us=2 * (projections + ffn + 32 * 4096) / peak,
        pair_us=32 * (4 * 4096 + 5 * 32) / peak,
        weights_us=2 * (projections + ffn) / bandwidth,
        experts_us=0.0,
        experts=0,
        chosen=0,
        kv_us=32 * 2 * 1024 * 2 / bandwidth,
        activation_us=32 * 4096 * 2 / bandwidth,
    )
    factors = np.array([1 / gpu["mfuPrefill"], 1 / gpu["mfuDecode"], 3.35 / gpu["BwPeakTBs"]])
    defaults = tmp_path / "blis/defaults.yaml"
    alpha = yaml.safe_load(defaults.read_text())["trained_physics_coefficients"]["alpha_coeffs"]
    traced = pl.read_csv(tmp_path / "blis/trace-data.csv")
    own = replay_as_blis(
        *(traced[c].to_numpy() for c in ("arrival_time_us", "input_tokens", "output_tokens")),
        RooflineRates(shape, factors),
        tuple(alpha),
        EngineSettings(64, 2048, 16, 4096),
    )
    blis = replayed(result, tmp_path, 4096)
    for i in range(traced.height):
        assert (blis[i]["ttft_us"], blis[i]["e2e_us"]) == (own.ttft[i], own.e2e[i])
    defaults.write_text(re.sub(r"alpha_coeffs: .*", "alpha_coeffs: [0, 0, 0]", defaults.read_text()))
    pool = replayed(result, tmp_path, 4096)
    command, _ = next(n for n in result.notes if n.startswith("replay of")).split(" --num-instances 2")
    command = command.replace("--latency-model trained-physics", "--latency-model roofline")
    assert replayed(replace(result, notes=(command,)), tmp_path, 4096) == pool


def replayed(result, folder, blocks):
    """Run an export's replay command in BLIS with so many KV blocks; request number to what it wrote."""
    words = [str(BLIS), *replay_words(result)[1:], "--results-path", str(folder / "res.json")]
    words[words.index("--total-kv-blocks") + 1] = str(blocks)
    done = subprocess.run([*words, "--horizon", "100000000000"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-400:]
    rows = json.loads((folder / "res.json").read_text())
    rows = rows if isinstance(rows, list) else rows["requests"]
    return {int(str(r["request_id"]).split("_")[-1]): r for r in rows}


@pytest.mark.parametrize("version", [None, "0.9.2"])
def test_llm_d_inference_sim_config_follows_its_rules(exported, version):
    """Closed keys, a model, Go durations, standard deviations as each version bounds them."""
    _, words = exported("llm-d-inference-sim", consumer_version=version)
    assert words[:2] == ["llm-d-inference-sim", "--config"]
    given = yaml.safe_load(Path(words[2]).read_text())
    assert given.keys() == LLM_D_KEYS
    assert given["model"] == "meta-llama/Llama-2-70b-hf"
    assert given["max-model-len"] == 4096
    us = {k: float(v.removesuffix("us")) for k, v in given.items() if isinstance(v, str) and v.endswith("us")}
    assert us["inter-token-latency-std-dev"] <= 0.3 * us["inter-token-latency"]
    if version:
        assert us["prefill-time-std-dev"] <= 0.3 * us["prefill-time-per-token"]


def test_vllm_vcr_line_states_the_traced_server(exported):
    _, words = exported("vllm-vcr")
    assert words[:2] == ["vllm-vcr", "play"]
    given = parsed(words[2:], VCR)
    assert [given[n] for n in ("max_num_seqs", "max_num_batched_tokens", "kv_cache_size")] == [64, 2048, 899]


@pytest.mark.slow
def test_mocker_line_states_the_traced_server(exported):
    _, words = exported("dynamo-mocker")
    assert words[:3] == ["python", "-m", "dynamo.mocker"]
    given = parsed(words[3:], MOCKER, ["--no-enable-prefix-caching", "--no-enable-chunked-prefill"])
    limits = ("max_num_seqs", "max_num_batched_tokens", "block_size", "num_gpu_blocks_override")
    assert [given[name] for name in limits] == [64, 2048, 16, 899]
    assert (given["no_enable_prefix_caching"], given["no_enable_chunked_prefill"]) == (True, False)


@pytest.mark.slow
def test_registry_line_copies_the_set(exported, tmp_path):
    result, _ = exported("blis-registry")
    (tmp_path / "clone/coefficients").mkdir(parents=True)
    subprocess.run(["/bin/sh", "-c", result.usage], check=True, cwd=tmp_path / "clone")
    assert yaml.safe_load((tmp_path / "clone/coefficients/coefficient-set.yaml").read_text())["kind"]


def test_csv_line_shows_the_table(exported):
    result, words = exported("csv")
    assert words[:3] == ["column", "-s,", "-t"]
    assert Path(words[3]).is_file()
    if shutil.which("column"):
        subprocess.run(["/bin/sh", "-c", result.usage], check=True, capture_output=True)


@pytest.mark.slow
@needs_blis
def test_shared_prefixes_are_cached_as_in_blis(blis_rates, tmp_path):
    options = SynthOptions(name="prefixes", seed=3, requests=300, prefix_fraction=0.5, rich_sampling=1.0)
    folder = write_run(synth(options), tmp_path, formats=("json",))
    tracefit.run([folder], tmp_path / "out", options=tracefit.TrainOptions(features="batch", fast=True))
    result = export(tmp_path / "out/models", "blis", tmp_path / "blis")
    blis = replayed(result, tmp_path, 4096)
    traced = pl.read_csv(tmp_path / "blis/trace-data.csv")
    shared = traced["prefix_length"].to_numpy()
    assert shared.any()
    found = yaml.safe_load((tmp_path / "blis/defaults.yaml").read_text())["trained_physics_coefficients"]
    own = replay_as_blis(
        traced["arrival_time_us"].to_numpy(),
        traced["input_tokens"].to_numpy() + shared,
        traced["output_tokens"].to_numpy(),
        blis_rates(found["beta_coeffs"], 4096, 32, 8, 32, 14336, 1),
        tuple(found["alpha_coeffs"]),
        EngineSettings(64, 2048, 16, 4096),
        shared=shared,
    )
    assert [own.e2e[i] for i in range(traced.height)] == [blis[i]["e2e_us"] for i in range(traced.height)]


@pytest.mark.slow
def test_check_without_blis_skips_and_counts(tmp_path):
    words = [sys.executable, str(ROOT / "tests/scripts/check_consumers.py"), str(tmp_path)]
    env = {**os.environ, "BLIS": str(tmp_path)}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0
    assert re.fullmatch(rf"skipped: \d+ replays, no blis in {re.escape(str(tmp_path))} \(BLIS=folder\)\n", done.stdout)


def test_the_page_and_the_readme_state_the_numbers_of_the_replay_figure():
    drawn = (ROOT / "docs/replay.svg").read_text()
    page = " ".join((ROOT / "docs/how-to/blis.md").read_text().split())
    assert "](../replay.svg)" in page
    itl, e2e = re.search(r"; ITL ([0-9.]+) % .*; E2E ([0-9.]+) % ", drawn).groups()
    assert f"At most, E2E is off by {e2e} % and ITL by {itl} % at P50 and P90" in page
    assert f"E2E {e2e} %, ITL {itl} % at most" in (ROOT / "README.md").read_text()


def test_line_quotes_words_that_a_shell_would_split():
    given = {"model": "my model; rm -r /", "tp": 2, "gone": None, "folder": "{out}/a b"}

    assert flags(given) == "--model 'my model; rm -r /' --tp 2 --folder {out}'/a b'"


def test_value_that_begins_like_an_option_is_a_value():
    assert flags({"model": "-rf", "tp": 2}) == "--model=-rf --tp 2"
