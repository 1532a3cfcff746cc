"""Files: their bytes repeat, their formats agree, and their shape is the collector's."""

from __future__ import annotations

import gzip
import io
import json
from dataclasses import replace

import polars as pl
import pyarrow as pa
import pytest
import yaml
from opentelemetry.proto.trace.v1 import trace_pb2

from containers import to_protobuf
from tracefit.errors import UsageError
from tracefit.synth import TRUE_REQUEST_COLUMNS, TRUE_STEP_COLUMNS, LinearLaw, SynthOptions, synth, write_run


@pytest.fixture(scope="module")
def small():
    return synth(SynthOptions(name="small", requests=40, seed=4, rich_sampling=0.1, abort_fraction=0.2))


def _messages(data):
    messages = []
    while data:
        size = int.from_bytes(data[:4], "big")
        messages.append(trace_pb2.TracesData.FromString(data[4 : 4 + size]))
        assert len(data) >= 4 + size
        data = data[4 + size :]
    return messages


def _of_json(line):
    """Return a line of OTLP's JSON as the message that protobuf's own JSON reader makes of it."""
    return trace_pb2.TracesData.FromString(to_protobuf(json.loads(line)))


def _spans(message):
    return [s for r in message.resource_spans for scope in r.scope_spans for s in scope.spans]


def _attributes(owner):
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in owner.attributes}


@pytest.mark.slow
def test_json_and_protobuf_hold_the_same_spans(small, tmp_path):
    run = synth(replace(small.options, span_event_limit=50, chat_fraction=0.6))
    folder = write_run(run, tmp_path, formats=("json", "protobuf"))
    messages = _messages((tmp_path / "small-proto" / "traces.binpb").read_bytes())
    assert [_of_json(line) for line in (folder / "traces.json").read_bytes().splitlines()] == messages
    written = [span for message in messages for span in _spans(message)]
    sent = [span for batch in run.batches for spans in batch.by_scope().values() for span in spans]
    for found, span in zip(written, sent, strict=True):
        assert (found.trace_id.hex(), found.span_id.hex()) == (span.trace_id, span.span_id)
        assert (found.start_time_unix_nano, found.end_time_unix_nano) == (
            span.start_unix_ns,
            span.end_unix_ns,
        )
        assert (found.name, found.kind, found.flags) == (span.name, span.kind, span.flags)
        assert _attributes(found) == span.attributes
        assert [(e.name, e.time_unix_nano, _attributes(e)) for e in found.events] == [
            (event.name, event.unix_ns, event.attributes) for event in span.events
        ]
    assert any(span.dropped_events_count for span in written)
    assert {span.status.code for span in written} == {0, 2}


def test_two_formats_are_two_run_folders(small, tmp_path):
    folder = write_run(small, tmp_path, formats=("json", "protobuf"), compress="gz")
    assert folder == tmp_path / "small"
    assert {path.name for path in tmp_path.iterdir()} == {"small", "small-proto"}
    traces = [[path.name for path in sorted(tmp_path.glob(f"{name}/traces*"))] for name in ("small", "small-proto")]
    assert traces == [["traces.json.gz"], ["traces.binpb.gz"]]


def test_one_format_is_one_folder(small, tmp_path):
    assert write_run(small, tmp_path, formats=("protobuf",), compress="zst") == tmp_path / "small"
    assert [path.name for path in (tmp_path / "small").glob("traces*")] == ["traces.binpb.zst"]


def test_equal_options_give_equal_bytes(small, tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    write_run(small, first, formats=("json", "protobuf"), compress="gz")
    write_run(synth(small.options), second, formats=("json", "protobuf"), compress="gz")
    files = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert len(files) == 12
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in files)


@pytest.mark.parametrize("name", ["traces.json.gz", "truth_steps.csv.gz", "truth_requests.csv.gz"])
def test_gzip_headers_hold_no_time(small, tmp_path, name):
    assert (write_run(small, tmp_path, compress="gz") / name).read_bytes()[4:8] == bytes(4)


def test_another_seed_is_another_run(small):
    other = synth(replace(small.options, seed=5))
    assert not other.truth_steps.equals(small.truth_steps)
    assert {span.span_id for span in other.spans}.isdisjoint(span.span_id for span in small.spans)


def test_compression_changes_only_the_outside(small, tmp_path):
    plain = (write_run(small, tmp_path / "plain") / "traces.json").read_bytes()
    gz = (write_run(small, tmp_path / "gz", compress="gz") / "traces.json.gz").read_bytes()
    zst = (write_run(small, tmp_path / "zst", compress="zst") / "traces.json.zst").read_bytes()
    assert gzip.decompress(gz) == plain
    assert zst[:4] == bytes.fromhex("28b52ffd")
    assert pa.CompressedInputStream(pa.BufferReader(zst), "zstd").read() == plain


def test_json_has_the_shape_of_the_file_exporter(small, tmp_path):
    lines = (write_run(small, tmp_path) / "traces.json").read_text().splitlines()
    assert len(lines) == len(small.batches) > 1
    for line in lines:
        data = json.loads(line)
        # No blanks, and keys in the exporter's order.
        assert json.dumps(data, separators=(",", ":"), ensure_ascii=False) == line
        assert list(data) == ["resourceSpans"]
        (resource,) = data["resourceSpans"]
        assert list(resource) == ["resource", "scopeSpans"]
        for scope in resource["scopeSpans"]:
            assert list(scope) == ["scope", "spans"]
            _check_span_shape(scope["spans"][0])


def _check_span_shape(span):
    keys = "traceId spanId parentSpanId flags name kind startTimeUnixNano endTimeUnixNano attributes events status"
    assert list(span) == keys.split()
    assert isinstance(span["startTimeUnixNano"], str)
    assert isinstance(span["kind"], int)
    event = span["events"][0]
    assert list(event) == ["timeUnixNano", "name", "attributes"]
    for pair in event["attributes"]:
        ((kind, value),) = pair["value"].items()
        assert isinstance(value, (int, float) if kind == "doubleValue" else str)


def test_whole_doubles_have_no_fraction(small, tmp_path):
    text = (write_run(small, tmp_path) / "traces.json").read_text()
    assert '{"key":"gen_ai.request.temperature","value":{"doubleValue":0}}' in text
    assert '{"key":"gen_ai.request.top_p","value":{"doubleValue":1}}' in text


def test_summary_attributes_keep_the_order_of_the_emitter(small):
    event = next(event for span in small.spans for event in span.events if event.name == "step.BATCH_SUMMARY")
    assert list(event.attributes)[:4] == ["step.id", "step.ts_start_ns", "step.ts_end_ns", "step.duration_us"]
    assert list(event.attributes)[-3:] == ["kv.usage_gpu_ratio", "kv.blocks_total_gpu", "kv.blocks_free_gpu"]
    assert len(event.attributes) == 16


def test_exp_config_has_the_settings_of_the_server(small, tmp_path):
    run = synth(replace(small.options, requests=3, num_blocks=65, tp=2, step_sampling=0.5))
    config = yaml.safe_load((write_run(run, tmp_path) / "exp-config.yaml").read_text())
    expected = {
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "tensor_parallelism": 2,
        "max_model_len": 1_024,
        "max_num_batched_tokens": 2_048,
        "max_num_seqs": 64,
        "block_size": 16,
        "gpu": "H100",
        "enable_chunked_prefill": True,
        "enable_prefix_caching": False,
        "step_tracing_sample_rate": 0.5,
        "num_gpu_blocks_override": 65,
    }
    assert expected.items() <= config.items()


def test_no_gpu_leaves_the_key_out(small, tmp_path):
    run = synth(replace(small.options, requests=3, gpu=None))
    config = yaml.safe_load((write_run(run, tmp_path) / "exp-config.yaml").read_text())
    assert "gpu" not in config


def test_model_config_is_in_the_run_folder(small, tmp_path):
    config = json.loads((write_run(small, tmp_path) / "config.json").read_text())
    assert (config["model_type"], config["num_key_value_heads"]) == ("llama", 8)


def test_truth_is_in_the_run_folder(small, tmp_path):
    folder = write_run(small, tmp_path)
    truth = json.loads((folder / "truth.json").read_text())
    assert truth["law"] == "LinearLaw"
    assert LinearLaw(**truth["coefficients"]) == small.law
    assert (truth["seed"], truth["options"]["requests"]) == (4, 40)
    assert [path.name for path in folder.glob("traces*")] == ["traces.json"]
    for name, frame, columns in (
        ("truth_steps.csv.gz", small.truth_steps, TRUE_STEP_COLUMNS),
        ("truth_requests.csv.gz", small.truth_requests, TRUE_REQUEST_COLUMNS),
    ):
        data = io.BytesIO(gzip.decompress((folder / name).read_bytes()))
        assert pl.read_csv(data, schema=dict(columns)).equals(frame)


def test_truth_names_a_law_without_fields(tmp_path):
    class Constant:
        def step_us(self, step):
            return 4_000.0

        def __repr__(self):
            return "Constant(4000)"

    run = synth(SynthOptions(requests=3, law=Constant()))
    truth = json.loads((write_run(run, tmp_path) / "truth.json").read_text())
    assert (truth["law"], truth["coefficients"]) == ("Constant", "Constant(4000)")


def test_small_ratios_have_no_exponent(tmp_path):
    run = synth(SynthOptions(requests=4, num_blocks=200_001, chat_fraction=0.0))
    text = (write_run(run, tmp_path) / "traces.json").read_text()
    ratios = [part.split("}")[0] for part in text.split('"kv.usage_gpu_ratio","value":{"doubleValue":')[1:]]
    assert any(0 < float(ratio) < 1e-4 for ratio in ratios)
    assert not any("e" in ratio for ratio in ratios)
    steps = [
        event.attributes["kv.usage_gpu_ratio"]
        for span in run.spans
        for event in span.events
        if event.name == "step.BATCH_SUMMARY"
    ]
    assert sorted(map(float, ratios)) == sorted(steps)


@pytest.mark.parametrize(
    ("arguments", "where"),
    [({"formats": ("xml",)}, "formats"), ({"formats": ()}, "formats"), ({"compress": "lz4"}, "compress")],
)
def test_unknown_formats_are_refused(small, tmp_path, arguments, where):
    with pytest.raises(UsageError) as caught:
        write_run(small, tmp_path, **arguments)
    assert caught.value.where == where
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_one_line(small, tmp_path):
    (tmp_path / "small").write_text("in the way")
    with pytest.raises(UsageError, match="small: cannot write"):
        write_run(small, tmp_path)
