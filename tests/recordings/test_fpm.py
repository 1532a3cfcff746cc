"""ForwardPassMetrics: files of every encoding, whole and damaged, to steps, timeline and a model of the step time."""

from __future__ import annotations

import gzip
import io
import json
import math
import struct
import tempfile
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import tracefit
from decoding import decoded_block
from recorded import WRITERS, arrays, csv_lines, json_lines, maps, record
from together import Recorded, together
from tracefit.errors import DataError
from tracefit.inputs.blocks import Block, inspect_file, read_blocks
from tracefit.inputs.discovery import open_inputs
from tracefit.inputs.files import TraceFile
from tracefit.inputs.framing import LENGTH_BYTES
from tracefit.inputs.rejects import Reject
from tracefit.options import IngestOptions
from tracefit.recordings import fpm
from tracefit.tables.store import TableStore

BUSY = {"num_decode_requests": 4, "sum_decode_kv_tokens": 800}
MIXED = BUSY | {"num_prefill_requests": 2, "sum_prefill_tokens": 96, "sum_prefill_kv_tokens": 32}
WAITING = {
    "queued_num_prefill_requests": 3,
    "queued_sum_prefill_tokens": 500,
    "queued_num_decode_requests": 1,
    "queued_sum_decode_kv_tokens": 70,
}


def steady(count, first=1, **fields):
    return [record(step, 0.01 + step / 1e5, **BUSY | fields) for step in range(first, first + count)]


def recorded(*contents, **settings):
    """Return a run of files with these contents, for a test that yields it."""
    return Recorded(json.dumps({"model": "m"} | settings), contents)


@pytest.fixture
def ingested(tmp_path):
    """Ingest files of some contents as one run; return its tables, and the result as `result`."""

    def of(*contents, options=None, **settings):
        folder = tmp_path / "runs" / "r"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.yaml").write_text(json.dumps({"model": "m"} | settings))
        for number, content in enumerate(contents):
            (folder / f"recorded-{number}").write_bytes(content)
        result = tracefit.ingest([folder], tmp_path / "t", options=options)
        names = ("steps", "timeline", "runs", "rejects")
        found = {n: pl.read_parquet(tmp_path / f"t/{n}/run_id=r/*.parquet") for n in names}
        return found | {"result": result}

    return of


def decoded(content, *, block_bytes=1 << 20):
    """Return the steps and the rejects of a file's blocks, each decoded by itself."""
    steps, rejects = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(content)
        for item in read_blocks(TraceFile.local(path), IngestOptions(block_bytes=block_bytes), by_path=False):
            if isinstance(item, Reject):
                rejects.append(item)
            else:
                found = decoded_block(fpm.decode, item, item.payload or b"")
                steps.append(found.steps)
                rejects += found.rejects
    return pl.concat(steps) if steps else None, rejects


# -- every encoding --------------------------------------------------------------------------------------


@pytest.mark.mostly_slow(every=8)
@pytest.mark.parametrize("compress", [None, "gzip", "zstd"])
@pytest.mark.parametrize("kind", WRITERS)
def test_a_record_becomes_a_step_with_its_contexts_and_its_time(ingested, kind, compress):
    records = [record(7, 0.0125, **MIXED, **WAITING), *steady(3, first=8)]
    content = b"".join(WRITERS[kind](records))
    if compress:
        content = gzip.compress(content) if compress == "gzip" else pa.Codec("zstd").compress(content, asbytes=True)
    tables = ingested(content)

    assert tables["result"].runs[0].rejects == 0
    assert tables["steps"].height == 4
    step = tables["timeline"].row(0, named=True)
    wanted = {
        "server": "w.dp0",
        "epoch": 0,
        "step_id": 7,
        "cycle_us": 12_500.0,
        "cycle_source": "fpm",
        "interval_steps": 1,
        "idle_after": False,
        "composition_source": "fpm",
        "num_prefill_reqs": 2,
        "num_decode_reqs": 4,
        "prefill_tokens": 96,
        "decode_tokens": 4,
        # In cache before the step: of decode requests, and of the prompts that are computed in parts.
        "context_tokens": 800,
        "prefill_context_tokens": 32,
        # 3 prompts and 1 preempted request wait: 500 and 70 tokens to compute.
        "running_depth": 6,
        "waiting_depth": 4,
        "waiting_tokens": 570,
        "ts_start_ns": None,
    }
    assert {name: step[name] for name in wanted} == wanted


@pytest.mark.slow
def test_two_workers_with_one_id_are_left_out_of_one_file_and_told_apart_by_two(tmp_path, ingested):
    first = json_lines(steady(100, first=1), begin_ns=1_700_000_000_000_000_000)
    second = json_lines(steady(100, first=5_000), begin_ns=1_700_000_000_000_000_000)
    both = [line for pair in zip(first, second, strict=True) for line in pair]
    other = json_lines([record(k, 0.25, worker="other", **BUSY) for k in range(20)])
    tables = ingested(b"".join(both), b"".join(other))
    assert tables["runs"].select("server", "steps").rows() == [("other.dp0", 20)]
    assert tables["rejects"]["reason"].value_counts().rows() == [
        ("two engines share a name in one file: give one file each", 200)
    ]
    tables = ingested(b"".join(first), b"".join(second))
    assert tables["runs"].select("server", "steps", "lost_steps").rows() == [
        ("w.dp0 of recorded-0", 100, 0),
        ("w.dp0 of recorded-1", 100, 0),
    ]


@pytest.mark.slow
def test_the_receipt_gives_wall_clock_time(ingested):
    lines = json_lines([record(1, 0.5, **BUSY), record(2, 0.25, **BUSY)], begin_ns=1_700_000_000_000_000_000)
    tables = ingested(b"".join(lines))
    # Half a second and three quarters after the beginning.
    assert tables["steps"]["unix_ns"].to_list() == [1_700_000_000_500_000_000, 1_700_000_000_750_000_000]
    assert tables["runs"]["first_unix_ns"].to_list() == [1_700_000_000_500_000_000]

    untimed = ingested(b"".join(csv_lines(steady(3))))
    times = [untimed["steps"][c] for c in ("unix_ns", "ts_start_ns")] + [untimed["runs"]["first_unix_ns"]]
    assert all(column.is_null().all() for column in times)


@pytest.mark.parametrize("kind", WRITERS)
def test_the_format_is_found_by_content_alone(tmp_path, kind):
    path = tmp_path / "photo.png"
    path.write_bytes(b"".join(WRITERS[kind](steady(3))))
    contents = inspect_file(TraceFile.local(path))
    assert contents.recording is fpm.FORMAT
    assert str(contents).endswith(
        {"json": "ForwardPassMetrics (JSON) lines", "csv": "ForwardPassMetrics (CSV) lines"}.get(
            kind, "ForwardPassMetrics (MSGPACK) messages"
        )
    )


def test_standard_input_may_be_a_recording():
    content = b"".join(json_lines(steady(2)))
    with open_inputs("-", stdin=io.BytesIO(content)) as inputs:
        (file,) = inputs.runs[0].trace_files
        assert inspect_file(file).recording is fpm.FORMAT


@pytest.mark.slow
def test_known_files_are_not_decoded_again_and_grown_ones_are(ingested, monkeypatch):
    lines = json_lines(steady(10))
    assert ingested(b"".join(lines[:6]))["steps"].height == 6
    assert ingested(b"".join(lines))["steps"].height == 10

    def decode(*_, **__):
        raise AssertionError("decoded again")

    monkeypatch.setattr(fpm, "decode", decode)
    assert ingested(b"".join(lines))["steps"].height == 10


@pytest.mark.slow
@settings(max_examples=20)
@given(
    kind=st.sampled_from(list(WRITERS)),
    size=st.integers(200, 50_000),
    worker=st.text(st.characters(exclude_categories=["Cs"], exclude_characters=',"\r\n'), max_size=20).map(str.strip),
)
def test_any_size_of_blocks_gives_the_same_steps(kind, size, worker):
    # More than is read at once to find the format.
    records = steady(2500, worker=worker)
    steps, rejects = decoded(b"".join(WRITERS[kind](records)), block_bytes=size)
    assert not rejects
    assert steps["step_id"].to_list() == list(range(1, 2501))
    assert set(steps["server"]) == {f"{worker or 'unknown'}.dp0"}


@pytest.mark.parametrize("block_bytes", [200, 1 << 20])
def test_number_like_the_start_of_a_message_starts_none(block_bytes):
    # An array of seven, of version 1 and a text of one letter, inside the eight bytes of a float64.
    (seconds,) = struct.unpack(">d", bytes.fromhex("3f809701a1000000"))
    records = [record(step, seconds, **BUSY) for step in range(1, 3000)]
    steps, rejects = decoded(b"".join(arrays(records)), block_bytes=block_bytes)
    assert (steps["step_id"].to_list(), rejects) == (list(range(1, 3000)), [])


# -- idle gaps, lost steps, ranks ------------------------------------------------------------------------


@together
def test_a_heartbeat_is_an_idle_gap_and_no_step_time():
    tables = yield recorded(b"".join(maps([*steady(2), record(3, 0.0), *steady(2, first=4)])))
    rows = tables["timeline"].select("step_id", "cycle_us", "idle_before", "idle_after").rows()
    assert rows == [
        (1, 10_010.0, None, False),
        (2, 10_020.0, False, False),
        (3, None, False, True),
        (4, 10_040.0, True, False),
        (5, 10_050.0, False, False),
    ]
    assert tables["runs"]["lost_steps"].to_list() == [0]


def test_gaps_of_the_counter_are_lost_steps(ingested):
    tables = ingested(b"".join(csv_lines([*steady(2), *steady(3, first=6), *steady(1, first=20)])))
    # 3, 4, 5 and 9 to 19.
    assert tables["runs"]["lost_steps"].to_list() == [14]
    (warning,) = [text for text in tables["result"].warnings if "counter" in text]
    assert "14 numbers of the step counter have no record" in warning


@together
def test_workers_and_ranks_are_engines():
    records = [*steady(2), *steady(3, rank=1), *steady(4, worker="other")]
    tables = yield recorded(b"".join(arrays(records)))
    assert tables["runs"].select("server", "steps").rows() == [("other.dp0", 4), ("w.dp0", 2), ("w.dp1", 3)]


@together
def test_a_counter_that_starts_again_is_a_new_epoch():
    tables = yield recorded(b"".join(json_lines([*steady(20, first=100), *steady(20)])))
    epochs = tables["steps"].group_by("epoch").agg(pl.col("step_id").min(), pl.len()).sort("epoch")
    assert epochs.rows() == [(0, 100, 20), (1, 1, 20)]


# -- damage ----------------------------------------------------------------------------------------------


@pytest.mark.mostly_slow(every=5)
@pytest.mark.parametrize("kind", WRITERS)
@together
def test_record_of_another_version_is_a_reject(kind):
    if kind == "csv":
        pytest.skip("the table states no version")
    records = [*steady(2), record(3, 0.01, version=2, **BUSY), *steady(2, first=4)]
    tables = yield recorded(b"".join(WRITERS[kind](records)))
    assert tables["steps"]["step_id"].to_list() == [1, 2, 4, 5]
    assert tables["rejects"]["reason"].to_list() == ["ForwardPassMetrics of another version: 1 is read"]


@pytest.mark.parametrize("kind", ["json", "maps", "arrays"])
def test_a_file_of_another_version_alone_ends_with_one_line(ingested, kind):
    records = [record(step, 0.01, version=2, **BUSY) for step in range(3)]
    with pytest.raises(DataError, match="ForwardPassMetrics of another version: 1 is read"):
        ingested(b"".join(WRITERS[kind](records)))


def _changed(kind, value, field="sum_prefill_tokens"):
    one = record(2, 0.01, **BUSY)
    place = one["scheduled_requests"] if field in one["scheduled_requests"] else one
    place[field] = value
    return WRITERS[kind]([one])[-1]


@pytest.mark.mostly_slow(every=10)
@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sum_prefill_tokens", -1),
        ("sum_prefill_tokens", "many"),
        ("sum_prefill_tokens", 1.5),
        ("sum_prefill_tokens", 10**300),
        ("counter_id", None),
        ("counter_id", 2**63),
        ("wall_time", -0.5),
        ("wall_time", math.nan),
        ("wall_time", math.inf),
        ("wall_time", "NaN"),
    ],
)
@together
def test_an_odd_value_costs_its_record_alone_and_is_listed(kind, field, value):
    if isinstance(value, int) and value > 2**64 and kind not in ("json", "csv"):
        pytest.skip("msgpack has no such number")
    if kind == "csv" and field == "wall_time" and not isinstance(value, float):
        pytest.skip("the table has a number written out")
    before, after = WRITERS[kind](steady(1)), WRITERS[kind](steady(2, first=3))
    bad = _changed(kind, value, field)
    head = before[:1] if kind == "csv" else []
    tables = yield recorded(b"".join([*before, bad, *after[len(head) :]]))

    assert tables["steps"]["step_id"].to_list() == [1, 3, 4]
    (reject,) = tables["rejects"].rows(named=True)
    assert reject["source_offset"] in {sum(map(len, before)), sum(map(len, before)) + 4}
    assert reject["reason"]
    assert tables["runs"]["rejects"].to_list() == [1]


@pytest.mark.parametrize("kind", ["json", "maps", "arrays", "framed"])
def test_a_cut_record_does_not_take_the_one_behind_it(kind):
    lines = WRITERS[kind](steady(9))
    begin = sum(map(len, lines[:4]))
    lines[4] = lines[4][: len(lines[4]) // 2]
    steps, rejects = decoded(b"".join(lines))
    assert steps["step_id"].to_list() == [1, 2, 3, 4, 6, 7, 8, 9]
    assert rejects
    assert all(begin <= r.source_offset < begin + len(lines[4]) + 4 for r in rejects)


@pytest.mark.parametrize("block_bytes", [300, 1 << 20])
def test_tables_in_a_row_are_read_by_their_headers(block_bytes):
    table = csv_lines(steady(3))
    reordered = [b",".join(reversed(line.strip().split(b","))) + b"\n" for line in csv_lines(steady(3, first=4))]
    steps, rejects = decoded(b"".join([*table, *reordered]), block_bytes=block_bytes)
    assert steps["step_id"].to_list() == [1, 2, 3, 4, 5, 6]
    assert steps["context_tokens"].to_list() == [800] * 6
    assert not rejects


def test_repeated_records_count_once(ingested):
    lines = json_lines(steady(6))
    other = json_lines([record(3, 0.5, **BUSY)], begin_ns=1_700_000_000_000_000_000)
    tables = ingested(b"".join(lines + lines), b"".join(other))
    assert tables["steps"]["step_id"].to_list() == [1, 2, 3, 4, 5, 6]
    assert tables["steps"]["cycle_us"][2] == pytest.approx(10_030.0)
    run = tables["result"].runs[0]
    assert (run.duplicate_spans, run.implausible) == (6, 1)
    assert tables["rejects"].select("reason", "source_file").rows()[0][0].startswith("steps.step_id is that of")


def test_rejects_are_limited():
    lines = json_lines(steady(3))
    block = Block("f", "lines", "json", 0, None, 0, None, "fpm")
    found = decoded_block(fpm.decode, block, b"{}\n" * 5 + b"[]\n" * 50 + lines[0], max_rejects=10)
    assert (len(found.rejects), found.steps.height) == (10, 0)


COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")
"""First bytes of gzip and zstd: a file that begins with them is a compressed one."""


LONG_VALUES = {*range(0xC4, 0xCA), *range(0xD9, 0xE0)}
"""First bytes of values of msgpack that state their length: binary, extension, text, array and map."""


@pytest.mark.slow
@settings(max_examples=60)
@given(
    kind=st.sampled_from(list(WRITERS)),
    where=st.floats(0, 1),
    removed=st.integers(0, 200),
    junk=st.binary(max_size=60),
    size=st.integers(300, 5000),
)
def test_damage_in_one_place_costs_the_records_it_touches(kind, where, removed, junk, size):
    parts = WRITERS[kind](steady(20))
    head = len(parts[0]) if kind == "csv" else 0  # the names of the columns stay
    ends = np.cumsum([len(part) for part in (parts[1:] if kind == "csv" else parts)]) + head
    whole = b"".join(parts)
    begin = head + round(where * (len(whole) - head))
    assume(begin or not junk.startswith(COMPRESSED))
    # In msgpack these may say that what follows, up to whole records, is one text: then it is.
    assume(kind not in ("maps", "arrays") or not LONG_VALUES.intersection(junk))
    end = min(begin + removed, len(whole))
    steps, _ = decoded(whole[:begin] + junk + whole[end:], block_bytes=size)
    first, last = np.searchsorted(ends, [begin, end], side="left") + 1
    # Without an end of its own, a damaged record has the next one glued to it: of a table both are one line.
    damaged = range(max(first - 1, 1), last + 2)
    assert {*range(1, 21)} - {*damaged} <= {*steps["step_id"]}


@pytest.mark.slow
@settings(max_examples=100)
@given(content=st.binary(max_size=400), kind=st.sampled_from(["json", "csv", "msgpack"]))
def test_bytes_that_are_no_records_are_rejects(content, kind):
    block = Block("f", "messages" if kind == "msgpack" else "lines", kind, 0, None, 0, None, "fpm", csv_lines([])[0])
    found = decoded_block(fpm.decode, block, content)
    assert not found.steps.height
    # Blank lines, `{}` and byte order marks hold nothing, and are passed over.
    text = content.replace(b"{}", b"").replace(b"\xef\xbb\xbf", b"").strip()
    assert found.rejects or not text or len(content) == LENGTH_BYTES


# -- beside other files ----------------------------------------------------------------------------------


def test_kv_cache_events_of_any_name_are_found_by_content(tmp_path):
    (tmp_path / "recorded.bin").write_bytes(b"".join(json_lines(steady(2))))
    (tmp_path / "cache.log").write_bytes(b'[1700000000.5,[["BlockRemoved",[1]]]]\n')
    for paths in ([tmp_path], sorted(tmp_path.iterdir())):
        with open_inputs(paths) as inputs:
            (run,) = inputs.runs
        assert [Path(f.name).name for f in run.trace_files] == ["recorded.bin"]
        assert [Path(f.name).name for f in run.kv_files] == ["cache.log"]


# -- a model of step times -------------------------------------------------------------------------------

LAYERS = ["linear_attention", "full_attention"] * 2


def drawn(count, **fields):
    """Return steps of a drawn batch whose time is 5,000 us, 20 more for each decode request and 0.01 for each token in
    cache."""
    rng = np.random.default_rng(3)
    for step in range(1, count + 1):
        requests, context = int(rng.integers(1, 30)), int(rng.integers(100, 50_000))
        noise = rng.normal(1, 0.01)
        yield record(
            step,
            (5_000 + 20 * requests + 0.01 * context) * noise / 1e6,
            **{"num_decode_requests": requests, "sum_decode_kv_tokens": context} | fields,
        )


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_a_table_alone_gives_a_model_of_steps_in_their_order(tmp_path, backend):
    folder = tmp_path / "one"
    folder.mkdir()
    settings = {"model": "new/model", "gpu": "X9000", "data_parallel_size": 2, "backend": backend}
    (folder / "run.yaml").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "layer_types": LAYERS}))
    (folder / "fpm_metrics_detail.csv").write_bytes(b"".join(csv_lines(drawn(400))))
    options = tracefit.TrainOptions(features="batch", fast=True)
    result = tracefit.run([folder], tmp_path / "out", options=options)
    tables = tmp_path / "out/tables"
    training = pl.read_parquet(tables / "beta_training/run_id=one/*.parquet").sort("step_id")

    # 400 steps without a time: the first 280 train, the others are held out.
    assert training["split"].to_list() == ["train"] * 280 + ["holdout"] * 120
    assert training["ts_ns"].is_null().all()
    (model,) = json.loads((tmp_path / "out/models/beta.json").read_text())["models"]
    terms = {term["feature"]: term["value"] for term in model["terms"]}
    assert model["intercept"]["value"] == pytest.approx(5_000, rel=0.02)
    assert terms["num_decode_reqs"] == pytest.approx(20, rel=0.1)
    assert terms["context_tokens"] == pytest.approx(0.01, rel=0.1)
    kind, words = ("fpm", "output of a step to output of the next") if backend == "vllm" else ("fpm_gpu", "GPU time")
    assert words in model["target"]["definition"]
    assert set(pl.read_parquet(tables / "timeline/run_id=one/*.parquet")["cycle_source"]) == {kind}
    # Unknown facts are stated: the GPU, the model, the other rank.
    warnings, page = " ".join(result.ingested.warnings), (tmp_path / "out/report.md").read_text()
    assert "GPU 'X9000' is not known: features of the GPU are left out" in warnings
    assert "features of the model are left out" in warnings
    assert "steps of 1 of 2 data-parallel ranks are recorded" in page
    assert words in page


@pytest.mark.slow
def test_the_same_records_in_two_runs_train_once(tmp_path):
    for name in ("one", "two"):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "run.yaml").write_text('{"model": "m"}')
        (folder / "fpm.csv").write_bytes(b"".join(csv_lines(drawn(200))))
    options = tracefit.TrainOptions(features="batch", fast=True)
    result = tracefit.run([tmp_path / "runs"], tmp_path / "out", options=options)
    assert any("200 of its spans are in run one too" in text for text in result.trained.warnings)


# -- units --------------------------------------------------------------------------------------------------


def stored(tmp_path, lines):
    """Return the steps of some lines, and the rules that their values break."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/fpm.jsonl").write_bytes(b"".join(lines))
    result = tracefit.ingest(tmp_path / "run", tmp_path / "tables")
    store = TableStore(tmp_path / "tables")
    return result, store.read("steps"), json.loads(store.read("runs")["implausible"][0])


def busy(count, *, idle_every=10):
    """Return records of an engine that decodes in steps of 8 to 12 ms, and idles for two seconds now and then."""
    records = []
    for step in range(count):
        is_idle = step % idle_every == 0
        records.append(record(step, 2.0 if is_idle else 0.008 + 0.001 * (step % 5), **({} if is_idle else BUSY)))
    return records


def in_unit(lines, *, wall=1.0, received=1):
    """Return lines with their times in other units."""
    for text in lines:
        line = json.loads(text)
        line["metrics"]["wall_time"] *= wall
        line["received_at_ns"] //= received
        yield json.dumps(line).encode() + b"\n"


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize(
    ("wall", "received", "column", "fault"),
    [
        (1e3, 1, "cycle_us", "wall_time is about 1,000 times the time between the records: is it in ms?"),
        (
            1.0,
            10**6,
            "unix_ns",
            "the range of received_at_ns is about 1/1,000,000 of the time of the steps: is it in ms?",
        ),
    ],
)
def test_times_in_another_unit_than_the_receipts_are_left_out(wall, received, column, fault, tmp_path):
    lines = in_unit(json_lines(busy(200)), wall=wall, received=received)
    result, steps, implausible = stored(tmp_path, lines)
    assert implausible[fault] >= 180
    assert result.exit_code == 3
    assert any(fault in text for text in result.warnings)
    assert steps.height == 200
    assert not steps[column].count()


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("together", [1, 50])
def test_receipts_in_batches_are_no_other_unit(together, tmp_path):
    lines = json_lines(busy(200))
    # A receiver that sleeps gets many records at once, with the time of the last one.
    stamps = [json.loads(line)["received_at_ns"] for line in lines]
    late = [stamps[min(n // together * together + together - 1, 199)] for n in range(200)]
    held = [
        json.dumps(json.loads(line) | {"received_at_ns": at}).encode() + b"\n"
        for line, at in zip(lines, late, strict=True)
    ]
    result, steps, implausible = stored(tmp_path, held)
    assert (result.exit_code, implausible) == (0, {})
    assert steps["cycle_us"].count() == 200


def test_a_clock_that_jumps_is_no_other_unit(tmp_path):
    lines = json_lines(busy(200, idle_every=1000))
    jumped = [
        json.dumps(one | {"received_at_ns": one["received_at_ns"] + (n > 100) * 3600 * 10**9}).encode() + b"\n"
        for n, one in enumerate(map(json.loads, lines))
    ]
    _, steps, implausible = stored(tmp_path, jumped)
    assert implausible == {}
    assert steps["cycle_us"].count() == 200


def test_a_variance_that_is_not_a_number_costs_nothing():
    line = json_lines([record(1, 0.01, **BUSY)])[0].replace(b'"var_prefill_length":0.0', b'"var_prefill_length":NaN')
    found = decoded_block(fpm.decode, Block("f", "lines", "json", 0, None, len(line), line), line)
    assert (found.steps.height, found.rejects) == (1, [])


def test_steps_of_hours_name_their_unit(tmp_path):
    with pytest.raises(DataError, match=r"200 rejected.*is it in ms, us or ns\?"):
        stored(tmp_path, in_unit(json_lines(busy(200)), wall=1e6))


def test_a_table_of_steps_of_hours_is_rejected(tmp_path):
    header, *lines = csv_lines(busy(40))
    hours = [line.replace(line.rpartition(b",")[2], b"7200000\n") for line in lines[:3]]
    result, steps, _ = stored(tmp_path, [header, *hours, *lines[3:]])
    assert steps.height == 37
    assert result.runs[0].rejects == 3


def test_a_run_whose_every_step_is_impossible_is_an_error_of_the_data(tmp_path):
    with pytest.raises(DataError, match="every one of its records breaks a rule"):
        stored(tmp_path, json_lines([record(n, 0.01, num_decode_requests=2**35) for n in range(9)]))


@pytest.mark.mostly_slow(every=4)
@pytest.mark.parametrize(("factor", "shown"), [(1e3, "10 s"), (1e-3, "1e-05 s")])
@pytest.mark.parametrize("write", [csv_lines, maps])
def test_times_that_no_step_takes_are_left_out_where_records_have_no_receipt(write, factor, shown, tmp_path):
    records = [one | {"wall_time": one["wall_time"] * factor} for one in busy(200, idle_every=1000)]
    result, steps, implausible = stored(tmp_path, write(records))
    fault = (
        f"the median time of steps that only decode is {shown}, which no server takes: "
        "wall_time is read in s, latency_ms in ms"
    )
    assert list(implausible) == [fault]
    assert result.exit_code == 3
    assert any(fault in text for text in result.warnings)
    assert (steps.height, steps["cycle_us"].count()) == (200, 0)


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("factor", [300.0, 0.02])
def test_slow_and_fast_servers_have_their_times(factor, tmp_path):
    records = [one | {"wall_time": one["wall_time"] * factor} for one in busy(200, idle_every=1000)]
    result, steps, implausible = stored(tmp_path, csv_lines(records))
    assert (result.exit_code, implausible, steps["cycle_us"].count()) == (0, {}, 200)


def test_long_prompts_are_no_other_unit(tmp_path):
    prompt = {"num_prefill_requests": 1, "sum_prefill_tokens": 8192}
    _, steps, implausible = stored(tmp_path, csv_lines([record(n, 9.0, **prompt) for n in range(40)]))
    assert (implausible, steps["cycle_us"].count()) == ({}, 40)


# -- other recorders --------------------------------------------------------------------------------------


def traced(records, *, timestamp=1_790_000_000_000):
    """Return lines of Dynamo's `--fpm-trace`: https://docs.nvidia.com/dynamo, "Forward pass metrics", 1.6."""
    events = ({"schema": "dynamo.fpm.trace.v1", "worker_id": "w", "dp_rank": 0, "fpm": one} for one in records)
    lines = ({"timestamp": timestamp + number, "event": event} for number, event in enumerate(events))
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def metrics_of(records):
    return [json.loads(line)["metrics"] for line in json_lines(records)]


def test_a_trace_of_dynamo_is_read_and_says_where_it_is_sampled(ingested):
    every = metrics_of(steady(30))
    tables = ingested(traced(every[::3]))
    assert tables["steps"].height == 10
    assert set(tables["timeline"]["cycle_source"]) == {"fpm_trace"}
    assert tables["timeline"]["cycle_us"][0] == pytest.approx(10_010)
    assert tables["rejects"].height == 0
    assert [text for text in tables["result"].warnings if "DYN_FPM_MODE=full" in text]


def test_a_trace_with_every_step_has_no_warning(ingested):
    tables = ingested(traced(metrics_of(steady(30))))
    assert tables["runs"]["lost_steps"].to_list() == [0]
    assert tables["result"].warnings == ()


@together
def test_a_record_of_gpu_time_is_not_the_cycle():
    records = metrics_of(steady(8))
    lines = [{"received_at_ns": 1_790_000_000_000_000_000 + n, "metrics": one} for n, one in enumerate(records)]
    for line in lines[:4]:
        line["metrics"]["timing_scope"] = "model_step_cuda"
    tables = yield recorded("".join(json.dumps(line) + "\n" for line in lines).encode())
    assert tables["timeline"].sort("step_id")["cycle_source"].to_list() == ["fpm_gpu"] * 4 + ["fpm"] * 4


@pytest.mark.parametrize(("overlap", "is_warned"), [({}, True), ({"async_scheduling": False}, False)])
def test_sglang_with_overlap_scheduling_is_warned_with_the_flag(ingested, overlap, is_warned):
    tables = ingested(b"".join(json_lines(steady(30))), sglang_version="0.5.23", **overlap)
    texts = [text for text in tables["result"].warnings if "--disable-overlap-schedule" in text]
    assert len(texts) == is_warned
