"""A refusal is one line and leaves nothing half-written; damage is counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tracefit import DataError, UsageError, ingest, run, train
from tracefit.errors import TracefitError
from tracefit.options import IngestOptions, ServerOptions
from tracefit.tables.store import TableStore


def _refused(kind, paths, out, *, server=None):
    with pytest.raises(kind) as caught:
        run(paths, out, server=server)
    assert isinstance(caught.value, TracefitError)
    assert "\n" not in caught.value.line()
    return caught.value.line()


def test_a_name_cannot_command_a_terminal(tmp_path):
    path = tmp_path / "traces-\x1b[31m\x07.json"
    assert r"traces-\x1b[31m\x07.json: " in _refused(UsageError, [path], tmp_path / "out")


def test_a_folder_without_traces_says_what_a_run_folder_is(tmp_path):
    (tmp_path / "empty").mkdir()
    line = _refused(UsageError, [tmp_path / "empty"], tmp_path / "out")
    assert "traces*.json" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"", b"\n"])
def test_file_without_spans_is_refused_with_advice(tmp_path, content, files_in):
    (tmp_path / "traces.json").write_bytes(content)
    line = _refused(DataError, [tmp_path / "traces.json"], tmp_path / "out")
    assert "holds no spans" in line
    assert "--otlp-traces-endpoint" in line
    assert "--enable-journey-tracing" not in line, (
        "whose server it was is not known: it may refuse the flags of the fork"
    )
    assert not [name for name in files_in(tmp_path / "out") if name.endswith(".parquet")]


def test_a_text_file_is_not_otlp(tmp_path):
    (tmp_path / "traces.json").write_text("no trace at all\n")
    line = _refused(DataError, [tmp_path / "traces.json"], tmp_path / "out")
    assert "none of its records can be read" in line
    assert "Collector's file exporter" in line


def test_tables_that_were_never_ingested(tmp_path):
    with pytest.raises(UsageError, match="tracefit ingest"):
        train(tmp_path, tmp_path / "models")
    assert not (tmp_path / "models").exists()


def test_traces_of_other_programs_alone_hold_nothing(tmp_path, traces, files_in):
    traces.span("fastapi", "GET /", (1, 1, 0), [traces.event("x", 0, {})])
    line = _refused(DataError, [traces.write(tmp_path / "run")], tmp_path / "out")
    assert "--otlp-traces-endpoint" in line
    assert files_in(tmp_path / "out") == []


@pytest.mark.slow
def test_three_requests_are_too_few(tmp_path, traces, files_in):
    for number in (1, 2, 3):
        traces.request(number, 20_000 * number, step=6 * number)
    line = _refused(DataError, [traces.write(tmp_path / "run")], tmp_path / "out")
    assert "30" in line
    # No model, but the tables and a report of what the server did.
    left = set(files_in(tmp_path / "out"))
    tables = {name for name in left if name.startswith("tables/")}
    assert all(name.endswith((".parquet", ".arrow", ".json")) for name in tables)
    assert left - tables == {"report.html", "report.md"}
    assert not list((tmp_path / "out").rglob(".writing-*"))


@pytest.mark.slow
@pytest.mark.parametrize("stated", ["by the run", "by the user"])
def test_a_gpu_that_is_not_known_is_named_and_left_out(tmp_path, traces, quick, stated):
    folder = traces.load(steps=120).write(tmp_path / "run")
    server = ServerOptions(gpu="H9000") if stated == "by the user" else ServerOptions()
    if stated == "by the run":
        with (folder / "exp-config.yaml").open("a") as config:
            config.write("gpu: H9000\n")
    result = run([folder], tmp_path / "out", server=server, options=quick)
    (warning,) = [text for text in result.ingested.warnings if "GPU" in text]
    assert "GPU 'H9000' is not known: features of the GPU are left out (" in warning
    assert "known: H100, " in warning
    (deployment,) = {m.deployment_id for m in result.trained.fitted}
    assert ".h9000." in deployment


ODD = [
    ({"num_attention_heads": "many"}, "num_attention_heads must be a whole number"),
    ({"intermediate_size": [8, 9]}, "intermediate_size must be a whole number"),
    ({"hidden_size": 64.5}, "hidden_size must be a whole number"),
    ({"vocab_size": -1}, "vocab_size must be greater"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers must be less"),
    ({"torch_dtype": 16}, "torch_dtype must be text"),
    ({"quantization_config": [1]}, "quantization_config is a list"),
    ({"layer_types": ["hyena"]}, "layer_types must be a list"),
    ({"mamba_d_state": 16}, "mamba_d_state is not understood, and describes layers with a state"),
    (
        {"num_attention_heads": 7, "num_key_value_heads": 7, "head_dim": 8},
        "7 attention heads cannot be divided",
    ),
    (
        {"peft_type": "LORA", "base_model_name_or_path": "org/base"},
        "a LoRA adapter of org/base, not a model,",
    ),
]
"""Changes of the configuration of a model, and the warning of each."""

LACKING = ("hidden_size", "num_hidden_layers", "num_attention_heads")


@pytest.fixture(scope="module")
def warnings_of(tmp_path_factory, new_traces, config_json):
    """Return a function from a run to what is said of its model: each run has one of these configurations."""
    root = tmp_path_factory.mktemp("configurations")
    configurations = {f"odd-{n:02}": config_json | changes for n, (changes, _) in enumerate(ODD)}
    for key in LACKING:
        configurations[f"no-{key}"] = {k: v for k, v in config_json.items() if k != key}
    for name, configuration in configurations.items():
        folder = new_traces().load(steps=1, requests=0).write(root / "runs" / name)
        (folder / "config.json").write_text(json.dumps(configuration))
    said = ingest([root / "runs"], root / "tables", server=ServerOptions(tp=2)).warnings
    return lambda name: [text for text in said if text.startswith(f"{name}: ") and "of the model are left out" in text]


@pytest.mark.parametrize("key", LACKING)
def test_model_configuration_without_a_key_is_left_out(warnings_of, key):
    (text,) = warnings_of(f"no-{key}")
    assert f"of the model are left out: {key} is missing" in text


@pytest.mark.slow
def test_steps_are_fitted_without_the_configuration_of_the_model(tmp_path, traces, quick):
    folder = traces.load(steps=120).write(tmp_path / "run")
    (folder / "config.json").write_text("{}")
    result = run([folder], tmp_path / "out", options=quick)
    assert any("of the model are left out" in text for text in result.ingested.warnings)
    assert "beta.cycle_time" in [m.name for m in result.trained.fitted]


@pytest.mark.parametrize(("number", "warning"), [(n, warning) for n, (_, warning) in enumerate(ODD)])
def test_model_configuration_with_an_odd_value_is_left_out(warnings_of, number, warning):
    (text,) = warnings_of(f"odd-{number:02}")
    assert f"of the model are left out: {warning}" in text


def test_a_wrong_second_run_leaves_nothing_of_the_first(tmp_path, new_traces):
    good, bad = (new_traces().load(steps=60, requests=5).write(tmp_path / "runs" / n) for n in ("a", "b"))
    (bad / "config.json").write_text("[]")
    _refused(UsageError, [good, bad], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_failed_training_keeps_the_models_that_were_there(tmp_path, trained, new_traces):
    few = new_traces().request(1, 0, step=1).write(tmp_path / "few")
    ingest([few], tmp_path / "tables")
    models = tmp_path / "models"
    models.mkdir()
    (models / "beta.json").write_text("what was there")
    with pytest.raises(DataError):
        train(tmp_path / "tables", models)
    assert [p.name for p in models.iterdir()] == ["beta.json"]
    assert (models / "beta.json").read_text() == "what was there"


def test_an_output_folder_that_is_a_file(tmp_path, traces):
    (tmp_path / "out").write_text("a file")
    _refused(UsageError, [traces.load(steps=60, requests=0).write(tmp_path / "run")], tmp_path / "out")


@pytest.mark.slow
def test_too_many_rejects_end_the_reading(tmp_path, traces):
    folder = traces.request(1, 0, step=1).write(tmp_path / "run")
    bad = b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"traceId":"zz","spanId":"zz","name":"of no use"}]}]}]}\n'
    with (folder / "traces.json").open("ab") as stream:
        stream.write(bad * 10)
    result = ingest([folder], tmp_path / "t", workers=1, options=IngestOptions(max_rejects=3))
    assert any("traces.json" in text and "`IngestOptions.max_rejects`" in text for text in result.warnings)
    (found,) = result.runs
    store = TableStore(tmp_path / "t")
    assert store.read("requests").height == 1
    counts = store.read("rejects")["count"].to_list()
    assert counts[:3] == [1, 1, 1]
    assert len(counts) == 4, "the rest is one counted reject"
    assert store.read("runs")["rejects"].to_list() == [found.rejects] == [sum(counts)]


@pytest.mark.slow
def test_the_limit_on_rejects_holds_for_recordings_too(tmp_path, traces):
    folder = traces.request(1, 0, step=1).write(tmp_path / "run")
    (folder / "kv_events.jsonl").write_text("[1700000000.5, 1]\n" * 9)
    ingest([folder], tmp_path / "t", workers=1, options=IngestOptions(max_rejects=3))
    reasons = TableStore(tmp_path / "t").read("rejects").sort("source_offset")["reason"].to_list()
    assert len(reasons) == 4
    assert reasons[-1] == "more than 3 rejects: the rest of the file is not read (--max-rejects sets the limit)"


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["dropped", "twice"])
def test_dropped_events_or_duplicates_alone_are_quarantine(tmp_path, traces, quick, trouble):
    trace = traces.load(steps=120, requests=0)
    if trouble == "dropped":
        trace.steps(dropped=7).steps(dropped=2)
    else:
        trace.records *= 2
    folder = trace.write(tmp_path / "run")
    result = run([folder], tmp_path / "out", options=quick)
    assert (result.exit_code, result.ingested.exit_code, result.trained.exit_code) == (3, 3, 3)
    assert [m.name for m in result.trained.fitted] == ["beta.cycle_time"]
    says = (
        "9 events were dropped by the server's SDK; set OTEL_SPAN_EVENT_COUNT_LIMIT above 128"
        if trouble == "dropped"
        else "1 spans were there twice"
    )
    assert any(says in text for text in result.ingested.warnings)


@pytest.mark.slow
def test_one_token_requests_have_no_journey_sampling(tmp_path, traces, quick):
    """No step decodes anything: a share of decodes is a share of nothing."""
    for number in range(1, 91):
        start = 10_000.0 * number
        summary = traces.summary(
            number, start, num_prefill_reqs=1, num_decode_reqs=0, decode_tokens=0, prefill_tokens=number
        )
        traces.steps(summary)
        traces.request(number, start - 1100, step=number, output=1, tokens_at=(start + 9000, start + 9000))
    result = run([traces.write(tmp_path / "run")], tmp_path / "out", options=quick)
    assert "alpha.queue_wait" in {m.name for m in result.trained.fitted}


def _cut(path):
    path.write_bytes(path.read_bytes()[:-9])


def _flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _exchange(path):
    path.write_bytes(path.with_name("events.arrow").read_bytes())


@pytest.fixture
def kept(tmp_path, new_traces):
    """Return a run folder of two files, its tables, and a function that adds the next file; each is staged by
    itself."""
    folder, tables = tmp_path / "run", tmp_path / "tables"

    def add(first):
        traces = new_traces()
        for number in range(first, first + 5):
            traces.request(number, 20_000 * number, step=number)
        written = traces.steps(traces.summary(first, 20_000 * first)).write(folder)
        (written / "traces.json").rename(written / f"traces-{first}.json")

    for first in (10, 20):
        add(first)
        ingest([folder], tables)
    return folder, tables, add


def _parts_by_file(tables):
    (entry,) = TableStore(tables).manifest().runs.values()
    return {path.name: file.parts[0].name for file in entry.files for path in [Path(file.path)]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "kind"),
    [(_cut, "spans"), (_flip_a_bit, "steps"), (_exchange, "spans"), (Path.unlink, "steps")],
)
def test_a_damaged_staged_part_is_repaired_from_its_source(tmp_path, kept, damage, kind):
    folder, tables, add = kept
    before = _parts_by_file(tables)
    damage(tables / ".stage" / before["traces-10.json"] / f"{kind}.arrow")
    assert "damaged" not in " ".join(ingest([folder], tables).warnings), "nothing is built of it"
    add(30)
    line = "run: the staged rows of 1 of its files are damaged; the files are read again"
    assert line in ingest([folder], tables).warnings
    after = _parts_by_file(tables)
    assert {name for name in before if before[name] != after[name]} == {"traces-10.json"}
    ingest([folder], tmp_path / "fresh")
    for name in ("spans", "steps", "requests", "journey_events"):
        assert TableStore(tables).read(name).equals(TableStore(tmp_path / "fresh").read(name))
    assert {part.name for part in (tables / ".stage").iterdir()} == set(after.values())


@pytest.mark.slow
def test_damaged_staged_part_is_read_again(kept):
    folder, tables, _ = kept
    _flip_a_bit(tables / ".stage" / _parts_by_file(tables)["traces-20.json"] / "journeys.arrow")
    result = ingest([folder], tables, server=ServerOptions(settings={"max_num_seqs": 9}))
    assert any("are damaged; the files are read again" in text for text in result.warnings)
    assert TableStore(tables).read("requests").height == 10
