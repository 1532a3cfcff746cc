"""`tracefit transfer` on generated servers: from tables to a plan, its refusals, and calibration."""

import json
import re
import shutil
from pathlib import Path

import polars as pl
import pytest

import tracefit
from tracefit import evaluator
from tracefit.coefficients.boxed import boxed_law
from tracefit.commands.described import SERVER_FILE
from tracefit.replay.plan import StepLawUncertainty
from tracefit.synth import SynthOptions, synth, write_run
from tracefit.synth.laws import GPUS, MODELS, RooflineLaw
from tracefit.synth.options import LengthMix

RUNS = Path(__file__).parents[2] / "fixtures" / "runs"
MODEL, GPU = "llama-8b", "H100"
LIMIT = SynthOptions().max_num_seqs


def _generate(folder, tp, *, model=MODEL, gpu=GPU, seed=0, requests=80, **law):
    step_law = RooflineLaw(MODELS[model], GPUS[gpu], tp=tp, allreduce_latency_us=0.0, **law)
    options = SynthOptions(
        name=f"{model}-{gpu}-tp{tp}",
        law=step_law,
        model=model,
        gpu=gpu,
        tp=tp,
        requests=requests,
        form="fpm",
        seed=seed,
    )
    return write_run(synth(options), folder)


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Return the folders of runs by tensor parallelism, and the tables of those of tp 1 and tp 4."""
    folder = tmp_path_factory.mktemp("servers")
    runs = {tp: _generate(folder / "runs", tp) for tp in (1, 2, 4)}
    tracefit.ingest([str(runs[1]), str(runs[4])], folder / "out" / "tables")
    return runs, folder / "out"


@pytest.fixture(scope="module")
def new(servers, tmp_path_factory):
    """Return the folder of a transfer to tp 2."""
    runs, out = servers
    folder = tmp_path_factory.mktemp("new")
    tracefit.transfer(out, folder, server=_server(runs[2]))
    return folder


def _server(run, **more):
    return tracefit.ServerOptions(model_config=run / "config.json", run_config=run / "exp-config.yaml", **more)


@pytest.fixture
def command(request):
    """Return the function that runs the entry point, under a name that is not the library's."""
    return request.getfixturevalue("tracefit")


def _target(run):
    return ("--model-config", run / "config.json", "--run-config", run / "exp-config.yaml")


@pytest.mark.slow
def test_a_server_is_predicted_from_two_others(servers, new):
    runs, _ = servers
    truth = tracefit.run(str(runs[2]), new / "truth", options=tracefit.TrainOptions(fast=True))
    assert truth.trained.fitted
    models, own = tracefit.load(new), tracefit.load(new / "truth")
    for batch, prefill in ((4, 0), (16, 0), (8, 1500)):
        law = models.predict_step(batch=batch, context=400, prefill=prefill).step.value_us
        assert law == pytest.approx(own.predict_step(batch=batch, context=400, prefill=prefill).step.value_us, rel=0.12)


def test_a_model_says_where_it_comes_from(new):
    (model,) = json.loads((new / "beta.json").read_text())["models"]
    assert model["origin"] == "transferred"
    assert model["transfer"]["kind"] == "tensor_parallel"
    assert [name.split(".")[-2] for name in model["transfer"]["sources"]] == ["tp1", "tp4"]
    assert model["transfer"]["prior_sources"] == []
    assert model["transfer"]["tested"]
    law = {one["feature"]: one for one in model["transfer"]["law"]}
    assert 1 <= law["weight_read_us"]["value"] <= 2
    assert law["weight_read_us"]["left_out_range"]
    assert {regime["name"].partition(",")[0] for regime in model["regimes"]} == {"prompts", "decodes"}


def test_servers_that_are_less_like_the_new_one_are_what_the_law_draws_to(servers, new, tmp_path):
    runs, out = servers
    other = _generate(tmp_path / "runs", 2, model="llama-70b", gpu="A100")
    tracefit.ingest(str(other), tmp_path / "other" / "tables")
    result = tracefit.transfer([out, tmp_path / "other"], tmp_path / "new", server=_server(runs[2]))
    (model,) = json.loads((tmp_path / "new" / "beta.json").read_text())["models"]
    (name,) = model["transfer"]["prior_sources"]
    assert ".a100-" in name
    assert [source.split(".")[-2] for source in model["transfer"]["sources"]] == ["tp1", "tp4"]
    assert f"what these cannot tell apart is as it was found on {name}" in result.notes
    assert result.prior_sources == (name,)
    assert f"the priors are a law of `{name}`, or of physics" in (tmp_path / "new" / "report.md").read_text()
    assert "come from physics, and no fit moves them; so do the priors." in (new / "report.md").read_text()
    of_physics = json.loads((new / "beta.json").read_text())["models"][0]["transfer"]["law"]
    priors = [{one["feature"]: one["prior"] for one in law} for law in (of_physics, model["transfer"]["law"])]
    assert priors[0]["weight_read_us"] == 1.25 != priors[1]["weight_read_us"]
    assert evaluator.load(tmp_path / "new" / "beta.json", model["name"])


def test_the_evaluation_has_the_errors_of_each_server_that_was_left_out(new):
    across = json.loads((new / "evaluation.json").read_text())["across"]
    assert [one["left_out"] for one in across] == ["tp1", "tp4"]
    for one in across:
        assert one["kind"] == "tensor_parallel"
        assert one["errors"]["mape_pct"] < one["nearest"]["mape_pct"]
        assert one["errors"]["mape_pct"] < one["roofline"]["mape_pct"]
    report = (new / "report.md").read_text()
    assert "Errors on servers that were left out" in report
    assert "last 30 %" not in report


def test_the_stand_alone_evaluator_agrees(new):
    model = evaluator.load(new / "beta.json", "beta.cycle_time")
    models = tracefit.load(new)
    for batch, prefill in ((1, 0), (40, 0), (8, 40), (8, 2000)):
        row = {
            "num_prefill_reqs": int(prefill > 0),
            "num_decode_reqs": batch,
            "prefill_tokens": prefill,
            "decode_tokens": batch,
            "context_tokens": batch * 300,
            "prefill_context_tokens": 0,
        }
        expected = models.predict_step(batch=batch, context=300, prefill=prefill).step.value_us
        assert evaluator.predict(model, row) == pytest.approx(expected, rel=1e-6)


def test_no_refit_confirms_a_transfer(new, command):
    code, _, error = command("verify", new)
    assert code == 1
    assert "is of a transfer, which no refit confirms; compare it with traces of the server" in error


def test_the_report_of_a_transfer_names_code_as_it_is_and_says_what_is_missing(new):
    report = (new / "report.md").read_text()
    assert "There is no model `alpha.admission`: no source has a model of it." in report
    assert not re.search(r"Alpha\.|Num_gpu|`None`", report)


def test_the_largest_batch_of_the_sources_is_within_their_range(new):
    (model,) = json.loads((new / "beta.json").read_text())["models"]
    most = model["deployment"]["input_ranges"]["step"]["batch"][1]
    models = tracefit.load(new)
    assert not models.predict_step(batch=most, context=400).out_of_range
    assert models.predict_step(batch=most + 1, context=400).out_of_range


def test_a_prediction_has_the_interval_of_its_phase(new):
    (model,) = json.loads((new / "beta.json").read_text())["models"]
    pct = model["transfer"]["p90_ape_pct"]["decodes"]
    step = tracefit.load(new).predict_step(batch=8, context=300).step
    assert step.low_us == pytest.approx(step.value_us / (1 + pct / 100), rel=1e-6)


def test_a_plan_is_as_uncertain_as_servers_that_were_left_out(new):
    model = tracefit.load(new).model("beta.cycle_time")
    step = {
        "batch": 8.0,
        "context": 300.0,
        "prefill": 0.0,
        "prefill_reqs": 0.0,
        "prefill_done": 0.0,
        "waiting": 0.0,
    }
    batches = pl.DataFrame([{**step, "steps": 1.0, "time": 1.0}])

    def slowness(sd_pct):
        transfer = model.transfer.model_copy(update={"sd_pct": sd_pct})
        return StepLawUncertainty(model.model_copy(update={"transfer": transfer}), {}).slowness(batches, 0.0)

    assert slowness(0.0) == pytest.approx((1.0, 1.0))
    # The 5th and 95th percentile of a normal logarithm are 1.645 standard deviations away.
    assert slowness(20.0) == pytest.approx((1.2**-1.645, 1.2**1.645), rel=0.03)


@pytest.mark.slow
def test_servers_are_planned_with_it(new, command):
    code, text, _ = command(
        "plan",
        new,
        "--rate",
        4,
        "--prompt",
        200,
        "--output",
        60,
        "--slo",
        "itl_p99=100",
        "--slo",
        "ttft_p99=2000",
    )
    assert code == 0
    assert "ITL P99" in text


def test_consumers_get_its_form(new, tmp_path, command):
    assert command("export", new, "--to", "csv", "--out", tmp_path / "csv")[0] == 0
    code, text, _ = command("export", new, "--to", "dynamo-mocker", "--out", tmp_path / "mocker")
    assert code == 0
    assert "not to measured ones" in " ".join(text.split())


def test_files_are_compared_and_reported_as_any_others(new, command):
    assert command("compare", new, new)[0] == 0
    code, text, _ = command("report", new)
    assert code == 0
    assert "Step times follow from a law from 2 deployments" in " ".join(text.split())


def test_the_command_prints_the_errors_on_left_out_servers(servers, tmp_path, command):
    runs, out = servers
    code, text, _ = command("transfer", out, *_target(runs[2]), "--out", tmp_path / "new")
    assert code == 0
    assert "transferred, from 2 deployments" in text
    assert "roofline %" in text
    assert (tmp_path / "new" / SERVER_FILE).exists()


@pytest.mark.slow
def test_the_server_asked_for_is_left_out_of_its_sources(servers, tmp_path):
    runs, _ = servers
    tables = tmp_path / "all"
    tracefit.ingest([str(run) for run in runs.values()], tables)
    result = tracefit.transfer(tables, tmp_path / "new", server=_server(runs[2]))
    assert [name.split(".")[-2] for name in result.sources] == ["tp1", "tp4"]
    assert "its own model is better than any law" in " ".join(result.warnings)


def test_a_server_that_is_in_two_folders_is_used_once(servers, tmp_path):
    runs, out = servers
    shutil.copytree(out, tmp_path / "copy")
    result = tracefit.transfer([out, tmp_path / "copy"], tmp_path / "new", server=_server(runs[2]))
    assert len(result.sources) == 2
    for name in result.sources:
        assert f"{name} is in two folders: the runs of {tmp_path / 'copy'} are not used" in result.warnings


def test_one_source_is_refused_unless_forced(servers, tmp_path, command):
    runs, _ = servers
    tracefit.ingest(str(runs[1]), tmp_path / "one")
    code, _, error = command("transfer", tmp_path / "one", *_target(runs[2]), "--out", tmp_path / "new")
    assert code == 1
    assert "one source only" in error
    assert "--calibrate" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "new").exists()
    result = tracefit.transfer(tmp_path / "one", tmp_path / "new", server=_server(runs[2]), force=True)
    assert not result.tested
    assert result.p90_ape_pct == {"decodes": 50.0, "prompts": 80.0}
    assert "untested" in (tmp_path / "new" / "report.md").read_text()


@pytest.mark.slow
def test_some_steps_of_the_server_lift_the_refusal(servers, tmp_path):
    runs, _ = servers
    slow = _generate(tmp_path / "slow", 2, base_us=6_000.0)
    tracefit.ingest(str(runs[1]), tmp_path / "one")
    result = tracefit.transfer(tmp_path / "one", tmp_path / "new", server=_server(slow), calibrate=str(slow))
    assert result.origin in {"calibrated", "fitted"}
    assert result.tested
    step = tracefit.load(tmp_path / "new").predict_step(batch=8, context=300).step.value_us
    truth = tracefit.run(str(slow), tmp_path / "truth", options=tracefit.TrainOptions(fast=True))
    own = tracefit.load(truth.trained.models).predict_step(batch=8, context=300).step.value_us
    assert step == pytest.approx(own, rel=0.06)


@pytest.mark.slow
def test_limits_that_the_traces_state_are_those_of_the_server(servers, tmp_path):
    """Else they are vLLM's defaults, 1,024 requests on an H100, and a plan has twice the capacity."""
    runs, out = servers
    server = tracefit.ServerOptions(model_config=runs[2] / "config.json", gpu=GPU, tp=2)
    for name, traces, limit in (("without", None, 1024), ("with", str(runs[2]), LIMIT)):
        tracefit.transfer(out, tmp_path / name, server=server, calibrate=traces)
        (model,) = json.loads((tmp_path / name / "beta.json").read_text())["models"]
        assert model["deployment"]["settings"]["max_num_seqs"] == limit


@pytest.mark.slow
def test_an_own_fit_that_is_better_is_evaluated_as_one(tmp_path):
    """A mixture of experts is not what one dense model shows."""
    tracefit.ingest(str(RUNS / "qwen3-32b-tp4"), tmp_path / "one")
    run = RUNS / "qwen3.6-35b-a3b-tp2"
    server = tracefit.ServerOptions(model_config=run / "config.json", gpu="B300", tp=2)
    result = tracefit.transfer(tmp_path / "one", tmp_path / "new", server=server, calibrate=str(run))
    assert result.origin == "fitted"
    assert "used unchanged" not in " ".join(result.warnings), "of a law that is not taken"
    report = (tmp_path / "new" / "report.md").read_text()
    assert "1 run, 1 deployment, 0 requests, 6,704 traced steps" in report
    assert "| capacity planning | **with limits** | No run was replayed. |" in report
    (deployment,) = json.loads((tmp_path / "new" / "evaluation.json").read_text())["deployments"]
    assert deployment["runs"] == [run.name]
    assert "instead of the law" in deployment["notes"][-1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_attention_heads": 24}, "cannot be divided over 16"),
        ({"num_hidden_layers": 10**9}, "layers"),
        (
            {
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 512,
                "model_type": "qwen3_moe",
            },
            "experts",
        ),
    ],
)
def test_a_model_that_the_sources_say_nothing_of_is_one_line(servers, tmp_path, command, change, words):
    runs, out = servers
    config = json.loads((runs[2] / "config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, **change}))
    code, _, error = command(
        "transfer", out, "--model-config", path, "--gpu", GPU, "--tp", 16, "--out", tmp_path / "new"
    )
    assert code in {1, 2}
    assert words in error
    assert error.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_weights_that_do_not_fit_are_one_line(servers, tmp_path, command):
    runs, out = servers
    code, _, error = command(
        "transfer", out, "--model-config", runs[1] / "config.json", "--gpu", "T4", "--out", tmp_path / "new"
    )
    assert code == 2
    assert "leave no room for a KV cache" in error


@pytest.mark.parametrize("missing", ["--model-config", "--gpu"])
def test_a_server_needs_its_model_and_its_gpu(servers, tmp_path, command, missing):
    runs, out = servers
    given = {"--model-config": runs[1] / "config.json", "--gpu": GPU}
    del given[missing]
    code, _, error = command(
        "transfer", out, *(part for pair in given.items() for part in pair), "--out", tmp_path / "new"
    )
    assert code == 2
    assert missing in error


def test_a_source_is_not_overwritten(servers, command):
    runs, out = servers
    code, _, error = command("transfer", out, *_target(runs[2]), "--out", out)
    assert code == 2
    assert "is one of the sources" in error
    assert not (out / "beta.json").exists()


@pytest.mark.slow
def test_traces_of_another_server_calibrate_nothing(servers, tmp_path, command):
    runs, out = servers
    tracefit.ingest(str(runs[4]), tmp_path / "other")
    code, _, error = command(
        "transfer", out, *_target(runs[2]), "--calibrate", tmp_path / "other", "--out", tmp_path / "new"
    )
    assert code == 2
    assert "no run of" in error


@pytest.mark.slow
def test_without_prompts_in_the_sources_only_itl_is_planned(new, tmp_path, command):
    folder = tmp_path / "decodes"
    folder.mkdir()
    plain = json.loads((new / "beta.json").read_text())
    plain["models"][0]["transfer"]["has_prompts"] = False
    (folder / "beta.json").write_text(json.dumps(plain))
    load = ("--rate", 2, "--prompt", 100, "--output", 40)
    code, text, error = command("plan", folder, *load, "--slo", "ttft_p99=500")
    assert code == 1
    assert "only ITL is planned" in " ".join((text + error).split())
    code, text, _ = command("plan", folder, *load, "--slo", "itl_p99=500")
    assert code == 0
    assert "TTFT" not in text


# -- the law in the package --------------------------------------------------------------------------------


def _config(folder, **changes):
    config = MODELS["llama-8b"].config() | changes
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def untraced(tmp_path_factory):
    """Return the folder of a server that the law in the package answers."""
    folder = tmp_path_factory.mktemp("untraced")
    server = tracefit.ServerOptions(model_config=_config(folder), gpu="H200", tp=2)
    tracefit.transfer((), folder / "new", server=server)
    return folder / "new"


def test_without_folders_the_law_is_the_packages_own(untraced):
    (model,) = json.loads((untraced / "beta.json").read_text())["models"]
    boxed = boxed_law("vllm")
    assert model["origin"] == "transferred"
    assert model["transfer"]["kind"] == "model"
    assert model["transfer"]["has_prompts"] is False
    assert len(model["transfer"]["sources"]) == len(boxed.servers)
    assert model["transfer"]["p90_ape_pct"] == {"decodes": pytest.approx(boxed.errors["model"].p90_ape_pct, rel=1e-3)}
    assert {c["feature"] for c in model["transfer"]["law"]} == {c.feature for c in boxed.law}


def test_the_time_of_a_step_is_the_laws_sum(untraced):
    """By hand: 16 requests of 1,000 cached tokens, of the model's sizes and the GPU's speeds."""
    value = {c.feature: c.value for c in boxed_law("vllm").law}
    model, layers = MODELS["llama-8b"], 32
    bytes_per_us = 4_800e3
    weights = layers * (4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14_336) + 4096 * 128_256
    expected = value["one"] + value["kernels"] * layers * 11 + value["all_reduces"] * 2 * layers
    expected += value["weight_read_us"] * 2 * weights / 2 / bytes_per_us
    expected += value["decode_kv_read_us"] * 16 * 1_000 * model.kv_bytes_per_token / 2 / bytes_per_us
    expected += value["tp_comm_us"] * 16 * 2 * layers * 4096 * 2 * 2 / 2 / 450e3
    expected += value["batch_requests"] * 16 + value["layers_x_graph_requests"] * layers * 16
    step = tracefit.load(untraced).predict_step(batch=16, context=1_000)
    assert step.step.value_us == pytest.approx(expected, rel=0.01)


@pytest.mark.slow
def test_a_plan_of_it_has_the_time_between_tokens_alone(untraced, command):
    load = ("--rate", 2, "--prompt", 300, "--output", 60)
    code, out, _ = command("plan", untraced, *load, "--slo", "itl_p90=50")
    assert code == 0
    assert "ITL P90" in out
    assert "TTFT" not in out
    code, out, _ = command("plan", untraced, *load, "--slo", "ttft_p90=500")
    assert code == 1
    assert "only ITL is planned" in " ".join(out.split())


def test_another_engine_is_one_line(tmp_path, command):
    server = ("--model-config", _config(tmp_path), "--gpu", "H200")
    code, _, err = command("transfer", *server, "--engine", "sglang", "--out", tmp_path / "new")
    assert code == 2
    assert err.startswith("tracefit: --engine sglang: the package has no law of it; there is one of vllm")
    code, _, err = command("transfer", tmp_path, *server, "--engine", "vllm", "--out", tmp_path / "new")
    assert code == 2
    assert "leave it out where folders are given" in err


def test_speculative_decoding_and_unseen_layers_are_refused(tmp_path, command):
    server = ("--model-config", _config(tmp_path), "--gpu", "H200", "--out", tmp_path / "new")
    code, _, err = command("transfer", *server, "--set", "speculative_config.num_speculative_tokens=3")
    assert code == 2
    assert "with speculative decoding a step computes several tokens" in err
    two_bits = {"quant_method": "gptq", "bits": 2, "group_size": 128}
    server = (
        "--model-config",
        _config(tmp_path, quantization_config=two_bits),
        "--gpu",
        "H200",
        "--tp",
        2,
        "--out",
        tmp_path / "new",
    )
    code, _, err = command("transfer", *server)
    assert code == 1
    assert "no source has" in err
    assert "weights of 2" in err
    code, out, _ = command("transfer", *server, "--force")
    assert code == 0
    assert "untested" in out


def test_points_of_the_server_draw_the_law(tmp_path, command):
    config, new = _config(tmp_path), tmp_path / "new"
    server = ("--model-config", config, "--gpu", "H200", "--tp", 2)
    plain = command("transfer", *server, "--out", tmp_path / "plain")
    assert plain[0] == 0
    before = tracefit.load(tmp_path / "plain")
    rows = ["concurrency,input_len,output_len,ttft_ms,tpot_ms"]
    for concurrency in (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128):
        step = before.predict_step(batch=concurrency, context=512).step.value_us
        rows.append(f"{concurrency},256,512,20,{1.4 * step / 1000:.3f}")
    points = tmp_path / "points.csv"
    points.write_text("\n".join(rows) + "\n")
    code, out, _ = command("transfer", *server, "--calibrate", points, "--out", new)
    assert code == 0
    assert "calibrated" in out
    (model,) = json.loads((new / "beta.json").read_text())["models"]
    assert model["transfer"]["calibration"]["steps"] == 11
    after = tracefit.load(new).predict_step(batch=16, context=512).step.value_us
    assert after == pytest.approx(1.4 * before.predict_step(batch=16, context=512).step.value_us, rel=0.1)
    points.write_text("\n".join(rows[:5]) + "\n")
    code, out, err = command("transfer", *server, "--calibrate", points, "--out", new)
    assert code == 0
    assert "4 points are too few to calibrate with, 10 are needed" in out + err
    assert "4 points are too few to calibrate with" in (new / "report.md").read_text()
    points.write_text("\n".join([rows[0], *(f"16,256,{500 + n},20,9" for n in range(12))]) + "\n")
    code, out, err = command("transfer", *server, "--calibrate", points, "--out", new)
    assert code == 0
    assert "all have 16 decoding requests" in " ".join((out + err).split())


def test_a_server_without_stated_limits_is_no_source_of_itself(servers, tmp_path, command):
    runs, _ = servers
    copied = tmp_path / "runs" / "same"
    shutil.copytree(runs[1], copied)
    path = copied / "exp-config.yaml"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if "max_num" not in line))
    tracefit.ingest(str(copied), tmp_path / "out" / "tables")
    asked = ("--model-config", copied / "config.json", "--run-config", path)
    code, _, err = command("transfer", tmp_path / "out", *asked, "--out", tmp_path / "new")
    assert code == 1
    assert "it is the server asked for" in err


@pytest.mark.parametrize("is_cached", [pytest.param(True, marks=pytest.mark.slow), False])
def test_prompts_of_a_clients_requests_count_as_cached_where_the_steps_are_too_short(tmp_path, is_cached):
    prompts = LengthMix(((1.0, 1_030.0, 0.001),), minimum=1_026)
    options = SynthOptions(
        name="client",
        law=RooflineLaw(MODELS[MODEL], GPUS[GPU]),
        form="stock",
        requests=300,
        rate_per_s=10.0,
        prompt_tokens=prompts,
        prefix_fraction=float(is_cached),
        prefix_tokens=1_024,
        num_prefixes=2,
        abort_fraction=0.0,
    )
    run = write_run(synth(options), tmp_path)
    result = tracefit.transfer((), tmp_path / "new", server=_server(run), calibrate=str(run), force=True)
    assert any("they are taken as cached" in text for text in result.warnings) == is_cached
    if is_cached:
        step = tracefit.load(tmp_path / "new").predict_step(batch=10, context=1_100).step.value_us
        # Weights and ten contexts at three quarters of the bandwidth, a constant, and 8 us for each request.
        read_gb = 2 * 8.03 + 10 * 1_100 * 32 * 2 * 8 * 128 * 2 / 1e9
        assert step == pytest.approx(1e6 * read_gb / (0.75 * 3_350) + 1_200 + 10 * 8, rel=0.05)
