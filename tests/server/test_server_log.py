"""A server's log: its arguments, the engine's configuration, and the version's defaults for what neither names."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path

import polars as pl
import pytest

import tracefit as package
from tracefit.commands.deployments import deployments_of, write_timelines
from tracefit.commands.ingest import _starts_of
from tracefit.inputs.blocks import lines_with
from tracefit.inputs.discovery import open_inputs
from tracefit.inputs.files import TraceFile
from tracefit.server.context import deployment_of, read_context
from tracefit.server.server_log import LOG_MARKS, ServerStart, starts_of
from tracefit.server.settings import ServerSettings, read_settings, settings_from
from tracefit.synth import SynthOptions, synth, write_run
from tracefit.tables.store import TableStore

ARGUMENTS = (
    "INFO 11-28 00:01:16 [api_utils.py:286] non-default args: {'model_tag': 'org/m', 'model': 'org/m', "
    "'dtype': 'auto', 'max_num_seqs': 64}"
)
ENGINE = (
    "(EngineCore_DP0 pid=7) INFO 11-28 00:01:31 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: "
    "model='org/m', speculative_config=None, dtype=torch.bfloat16, max_seq_len=2048, tensor_parallel_size=2, "
    "pipeline_parallel_size=1, quantization=None, quantization_config=None, enforce_eager=True, kv_cache_dtype=auto, "
    "device_config={device}, enable_prefix_caching=False, enable_chunked_prefill=True, compilation_config={{'mode': "
    "<CompilationMode.NONE: 0>{more}}}"
)
CACHE = (
    "INFO 11-28 00:01:50 [kv_cache_utils.py:2327] GPU KV cache size: 262,144 tokens, Maximum concurrency for "
    "2,048 tokens: 128.00x"
)
NO_FILES = ServerSettings()


def engine(device="cuda", more=""):
    return ENGINE.format(device=device, more=more)


def context(lines, given=NO_FILES, gpu=None):
    return read_context((), None, given, gpu=gpu, starts=starts_of(lines))


def test_arguments_and_the_engine_s_configuration_are_read():
    settings = context([ARGUMENTS, engine(), CACHE]).settings
    read = {name: value for name, value in settings.values().items() if settings.sources[name] == "read"}
    assert read == {
        "model": "org/m",
        "tensor_parallel": 2,
        "pipeline_parallel": 1,
        "max_model_len": 2048,
        "max_num_seqs": 64,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
    }
    assert settings.measured() == {"num_gpu_blocks": 262_144 // 16}


@pytest.mark.parametrize(
    ("device", "gpu", "budget", "slots", "block"),
    [
        ("cuda", None, 2048, 256, 16),
        ("cuda", "H100", 8192, 1024, 16),
        ("cuda", "A100", 2048, 256, 16),
        ("cpu", None, 4096, 256, 128),
    ],
)
def test_limits_that_no_line_names_are_the_version_s_defaults(device, gpu, budget, slots, block):
    """As in vLLM 0.32: 2,048 tokens and 128 slots for each of two ranks on CPUs; large GPUs have more."""
    settings = context([engine(device)], gpu=gpu).settings
    assert (settings.max_num_batched_tokens, settings.max_num_seqs, settings.block_size) == (
        budget,
        slots,
        block,
    )
    assert {settings.sources[n] for n in ("max_num_batched_tokens", "max_num_seqs", "block_size")} == {"assumed"}


def test_the_token_budget_is_the_end_of_the_compiled_ranges():
    settings = context([ARGUMENTS, engine(more=", 'compile_ranges_endpoints': [512, 8192]")]).settings
    assert (settings.max_num_batched_tokens, settings.sources["max_num_batched_tokens"]) == (8192, "read")


def test_without_a_log_no_limit_is_assumed():
    assert context([]).settings.max_num_seqs is None
    assert context(["INFO Engine 000: Iteration(1): nothing of the server"]).settings.max_num_batched_tokens is None


def test_files_and_the_user_win_over_the_log_and_a_contradiction_is_said():
    given = settings_from({"max_num_seqs": 32, "model": "shown-name"}, where="run.yaml", source="read")
    found = context([ARGUMENTS, engine()], given)
    assert (found.settings.max_num_seqs, found.settings.model) == (32, "shown-name")
    assert any("max_num_seqs 64 → 32" in text for text in found.left_out)
    # A path and a served name are one model.
    assert not any("model" in text.split("(")[-1].split(")")[0] for text in found.left_out)


def test_a_restart_with_other_settings_is_said():
    again = ARGUMENTS.replace("'max_num_seqs': 64", "'max_num_seqs': 4")
    found = context([ARGUMENTS, engine(), again, engine()])
    assert found.settings.max_num_seqs == 4
    assert any("max_num_seqs 64 → 4" in text and "folder" in text for text in found.left_out)
    assert not context([ARGUMENTS, engine(), ARGUMENTS, engine()]).left_out


MORE_CACHE = CACHE.replace("262,144", "263,168")
BLOCKS = "INFO 11-28 00:01:50 [executor_base.py:112] # GPU blocks: {}, # CPU blocks: 0"


@pytest.mark.parametrize("caches", [(CACHE, MORE_CACHE), (BLOCKS.format(900), BLOCKS.format(905))])
def test_what_the_server_measured_makes_no_other_deployment(caches):
    """The memory that is left after loading differs a little from start to start."""
    first, second = (context([ARGUMENTS, engine(), cache]) for cache in caches)
    assert first.settings.num_gpu_blocks != second.settings.num_gpu_blocks
    assert deployment_of(first).deployment_id == deployment_of(second).deployment_id
    assert not context([ARGUMENTS, engine(), caches[0], ARGUMENTS, engine(), caches[1]]).left_out
    # Blocks that the operator asked for are a setting.
    asked = [ARGUMENTS.replace("'dtype'", f"'num_gpu_blocks_override': {n}, 'dtype'") for n in (900, 905)]
    stated = [context([arguments, engine(), caches[0]]) for arguments in asked]
    assert [one.settings.num_gpu_blocks for one in stated] == [900, 905]
    assert len({deployment_of(one).deployment_id for one in (first, *stated)}) == 3


def test_a_log_given_as_settings_has_the_measured_blocks(tmp_path):
    (tmp_path / "server.log").write_text("\n".join([ARGUMENTS, engine(), BLOCKS.format(900)]))
    settings = read_settings(tmp_path / "server.log")
    assert settings.measured() == {"num_gpu_blocks": 900}
    assert "num_gpu_blocks" not in settings.knobs()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ((16_160, 16_000, 16_080), []),
        ((16_000, 17_600), ["the servers measured num_gpu_blocks from 1,000 to 1,100: the smallest counts"]),
    ],
)
def test_starts_of_one_server_are_one_deployment_with_the_smallest_cache(tmp_path, tokens, said):
    for number, count in enumerate(tokens):
        options = SynthOptions(name=f"r{number}", requests=80, form="stock", seed=number)
        folder = write_run(synth(options), tmp_path / "runs")
        for name in ("exp-config.yaml", "run.yaml"):
            (folder / name).unlink(missing_ok=True)
        cache = CACHE.replace("262,144", f"{count:,}")
        (folder / "stderr.txt").write_text(f"{ARGUMENTS}\n{engine()}\n{cache}\n")
    package.ingest(tmp_path / "runs", tmp_path / "T")
    store = TableStore(tmp_path / "T")
    ((deployment, members),) = deployments_of(store.read("runs"), "T")
    assert len(members) == len(tokens)
    assert deployment.context.settings.num_gpu_blocks == 1_000
    assert [text for text in deployment.assumed() if "measured" in text] == said
    # Each run's own steps have its own cache.
    write_timelines(store, members)
    totals = store.read("timeline").group_by("run_id").agg(pl.col("kv_blocks_total").max())
    assert dict(totals.iter_rows()) == {f"r{n}": count // 16 - 1 for n, count in enumerate(tokens)}


def test_each_engine_of_a_server_prints_its_configuration_once():
    assert starts_of([ARGUMENTS, engine(), engine(), CACHE]) == starts_of([ARGUMENTS, engine(), CACHE])
    assert len(starts_of([engine(), engine()])) == 1


@pytest.mark.parametrize(
    "line",
    [
        "non-default args: {'max_num_seqs': 'many'}",
        "non-default args: {" + "[" * 5_000,
        "LLM engine (v0.32.0) with config: tensor_parallel_size=" + "9" * 400,
        "x" * 100_000 + "non-default args: {'max_num_seqs': 4}",
    ],
)
def test_odd_lines_cost_themselves(line):
    assert context([line]).settings.max_num_seqs is None


@pytest.mark.slow
def test_a_log_beside_spans_makes_a_run_replayable(tmp_path):
    folder = write_run(synth(SynthOptions(name="r", requests=80, form="stock")), tmp_path)
    for name in ("exp-config.yaml", "run.yaml"):
        (folder / name).unlink(missing_ok=True)
    with gzip.open(folder / "stderr.txt.gz", "wt") as file:
        file.write(f"{ARGUMENTS}\n{engine()}\nINFO Application startup complete.\n")
    with open_inputs(folder) as inputs:
        (source,) = inputs.runs
        assert _starts_of(source) == [starts_of([ARGUMENTS, engine()])[0]]
    result = package.ingest(folder, tmp_path / "T")
    assert result.runs[0].deployment_id.startswith("m.no-gpu.tp2")
    assert not [text for text in result.warnings if "stderr" in text]


def test_an_empty_start_states_nothing():
    assert ServerStart().defaults(None) == {}


def test_the_logging_configuration_of_the_docs_gives_microseconds():
    path = Path(__file__).parents[2] / "docs/how-to/vllm-logging.json"
    form = json.loads(path.read_text())["formatters"]["microseconds"]["format"]
    record = logging.LogRecord("vllm", logging.INFO, "loggers.py", 198, "Engine 000: Iteration(1)", None, None)
    record.created = 1_795_824_076.0959
    assert logging.Formatter(form).format(record) == "INFO 1795824076.095900 [loggers.py:198] Engine 000: Iteration(1)"


def test_only_settings_are_kept_of_the_arguments(tmp_path):
    line = ARGUMENTS.replace("'max_num_seqs'", "'api_key': ['sk-secret'], 'max_num_seqs'")
    (tmp_path / "server.log").write_text(line + "\n")
    for settings in (context([line, engine()]).settings, read_settings(tmp_path / "server.log")):
        assert settings.max_num_seqs == 64
        assert "sk-secret" not in repr(settings)


@pytest.mark.slow
def test_lines_of_a_log_are_bounded(tmp_path):
    """A small compressed file may have any number of lines: the last ones are kept, of so many bytes."""
    line = b"x args: {}\n"
    with gzip.open(tmp_path / "server.log.gz", "wb") as file:
        file.write(line * 300_000)
    file = TraceFile.local(tmp_path / "server.log.gz")
    assert len(lines_with(file, LOG_MARKS, most_bytes=1 << 30)) == 10_000
    assert not lines_with(file, LOG_MARKS, most_bytes=1 << 10)


def test_a_logged_prompt_is_not_a_start():
    prompt = "INFO Received request: prompt: '" + "x" * 900 + "non-default args: {'max_num_seqs': 2}'"
    assert context([ARGUMENTS, engine(), prompt]).settings.max_num_seqs == 64


def test_speculative_decoding_is_read_of_the_arguments_or_of_the_engine():
    """Otherwise its steps, of several tokens for a request, would be those of a server without it."""
    asked = "'speculative_config': {'method': 'ngram', 'num_speculative_tokens': 3}"
    arguments = ARGUMENTS.replace("'max_num_seqs': 64", asked)
    stated = "speculative_config=SpeculativeConfig(method='ngram', model=None, num_spec_tokens=3)"
    of_engine = engine().replace("speculative_config=None", stated)
    plain = context([ARGUMENTS, engine()])
    assert "speculative_config" not in plain.settings.other
    for lines in ([arguments, of_engine], [ARGUMENTS, of_engine]):
        found = context(lines)
        assert "ngram" in str(found.settings.other["speculative_config"])
        assert deployment_of(found).deployment_id != deployment_of(plain).deployment_id


def test_a_server_with_adapters_is_another_deployment():
    """Its layers multiply by those, too: a step takes longer."""
    with_adapters = context([ARGUMENTS.replace("'max_num_seqs'", "'enable_lora': True, 'max_num_seqs'"), engine()])
    without = context([ARGUMENTS.replace("'max_num_seqs'", "'enable_lora': False, 'max_num_seqs'"), engine()])
    plain = context([ARGUMENTS, engine()])
    assert deployment_of(without).deployment_id == deployment_of(plain).deployment_id
    assert deployment_of(with_adapters).deployment_id != deployment_of(plain).deployment_id
