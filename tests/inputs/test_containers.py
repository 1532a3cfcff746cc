"""Spans and lines in the containers of other programs: the tables are those of the plain file."""

from __future__ import annotations

import gzip
import json
from functools import cache

import polars as pl
import pytest
from polars.testing import assert_frame_equal

import tracefit
import wrapped
from containers import framed, record, span, to_json, to_protobuf, zstd
from tracefit.inputs.blocks import Block, inspect_file, load, read_blocks
from tracefit.inputs.compression import Expansion, Gap, pieces
from tracefit.inputs.containers import CONTAINERS
from tracefit.inputs.files import TraceFile
from tracefit.options import IngestOptions
from tracefit.synth import SynthOptions, synth, write_run

SOURCES = ("source_file", "source_offset")
RUN = "model: m\n"


def _in_us(tree):
    """Round the times of spans and events to microseconds, the unit of most containers."""
    if isinstance(tree, list):
        return [_in_us(each) for each in tree]
    if not isinstance(tree, dict):
        return tree
    return {
        k: f"{int(v) // 1000}000" if k.endswith("TimeUnixNano") or k == "timeUnixNano" else _in_us(v)
        for k, v in tree.items()
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the records of a small generated run, by its form."""
    found = {}
    for form in ("instrumented", "stock", "sglang"):
        folder = tmp_path_factory.mktemp(form)
        path = write_run(synth(SynthOptions(form=form, requests=6)), folder) / "traces.json"
        found[form] = [_in_us(json.loads(line)) for line in path.read_text().splitlines()]
    return found


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Ingest the bytes of one file; return its tables without where rows come from."""

    def of(content, name="traces.json", **options):
        folder = tmp_path_factory.mktemp("tables") / "r"
        folder.mkdir(parents=True)
        (folder / "run.yaml").write_text(RUN)
        (folder / name).write_bytes(content)
        result = tracefit.ingest([folder], folder.parent / "t", options=IngestOptions(**options))
        found = {}
        for path in sorted((folder.parent / "t").glob("*/run_id=r")):
            frame = pl.read_parquet(path / "*.parquet")
            columns = [c for c in frame.columns if c not in {*SOURCES, "bytes", "content_sha256"}]
            found[path.parent.name] = frame.select(columns)
        return found | {"result": result}

    return of


@pytest.fixture(scope="module")
def plain(tables, runs):
    """Return a function from a form to the tables of the plain file; each is made once."""
    return cache(lambda form: tables(_plain(runs[form])))


def _same(found, expected):
    assert found.keys() == expected.keys()
    for name, frame in expected.items():
        if name != "result":
            assert_frame_equal(found[name], frame, check_row_order=name != "spans")


@pytest.mark.mostly_slow(every=6)
@pytest.mark.parametrize("form", ["instrumented", "stock", "sglang"])
@pytest.mark.parametrize("container", wrapped.TRACES)
def test_spans_in_any_container_give_the_tables_of_the_plain_file(tables, runs, plain, container, form):
    _same(tables(wrapped.TRACES[container](runs[form]), "any.name"), plain(form))


def _plain(records):
    return "".join(wrapped.compact(each) + "\n" for each in records).encode()


@pytest.mark.mostly_slow(every=6)
@pytest.mark.parametrize("lines", wrapped.LINES)
@pytest.mark.parametrize("inner", ["plain", "jaeger", "console"])
def test_containers_nest(tables, runs, plain, lines, inner):
    records = runs["stock"]
    content = _plain(records) if inner == "plain" else wrapped.TRACES[inner](records)
    found = tables(gzip.compress(wrapped.LINES[lines](content)), "container-json.log.gz")
    _same(found, plain("stock"))


def _lines_of_loki(content, key, time):
    """Each line with its time and labels; the newest is the first."""
    (stream,) = json.loads(wrapped.loki(content))["data"]["result"]
    return [{key: stream["stream"], "line": line, "timestamp": time(int(ns))} for ns, line in stream["values"]]


def _events(content):
    return json.loads(wrapped.cloudwatch(content))["events"]


def _by_line(entries):
    return "".join(f"{json.dumps(entry)}\n" for entry in entries)


EXPORTS = {
    # `jq -S`, or any tool that sorts keys.
    "loki, sorted": lambda c: json.dumps(json.loads(wrapped.loki(c)), sort_keys=True, indent=2),
    # X-Loki-Response-Encoding-Flags: https://grafana.com/docs/loki/latest/reference/loki-http-api/
    "loki, flags": lambda c: (
        wrapped.loki(c).decode().replace('"data": {', '"data": {"encodingFlags": ["categorize-labels"], ')
    ),
    # https://grafana.com/docs/loki/latest/query/logcli/, -o jsonl
    "logcli": lambda c: _by_line(
        _lines_of_loki(c, "labels", lambda ns: f"2026-09-21T13:33:{ns // 10**8 % 600 / 10:04.1f}Z")
    ),
    # Grafana's download of the logs in Explore
    "grafana": lambda c: json.dumps(
        [
            {"line": one["line"], "timestamp": one["timestamp"], "fields": one["fields"]}
            for one in _lines_of_loki(c, "fields", str)
        ],
        indent=2,
    ),
    # `aws logs get-log-events`, as boto3 and `--query` write it
    "cloudwatch, tokens first": lambda c: json.dumps(
        {"nextForwardToken": "f/3", "nextBackwardToken": "b/3", "events": _events(c)}
    ),
    "cloudwatch, only events": lambda c: json.dumps(_events(c), indent=4),
    "cloudwatch, only events, sorted": lambda c: json.dumps(_events(c), sort_keys=True),
    "cloudwatch, only times and messages": lambda c: json.dumps(
        [{key: one[key] for key in ("timestamp", "message")} for one in _events(c)]
    ),
    # The answer of GetQueryResults states the language of the query first.
    "insights": lambda c: json.dumps({"queryLanguage": "CWLI", **json.loads(wrapped.insights(c))}, indent=4),
    "google, CSV": lambda c: wrapped.google_table(c).decode(),
    # https://cloud.google.com/logging/docs/reference/v2/rest/v2/entries/list
    "entries.list": lambda c: json.dumps({"entries": json.loads(wrapped.google(c)), "nextPageToken": "x"}),
    "entries.list, page first": lambda c: json.dumps(
        {"nextPageToken": "x", "entries": json.loads(wrapped.google(c))}, indent=2
    ),
}


@pytest.mark.parametrize("export", EXPORTS)
def test_other_answers_of_a_log_store_give_the_same_lines(reading, export):
    content = b"".join(to_json(record(span(n))) + b"\n" for n in range(1, 6))
    assert reading(EXPORTS[export](content).encode()) == (content, [])


def test_a_row_of_csv_goes_on_over_line_ends_and_a_row_that_is_cut_is_rejected_alone(reading):
    lines = [json.dumps(record(span(n)), indent=1).encode() for n in range(1, 4)]
    rows = [b'2026-09-21 13:33:2%d.123,"%b"\n' % (n, line.replace(b'"', b'""')) for n, line in enumerate(lines)]
    rows.insert(2, b"2026-09-21 13:33:21.123,a,b,c\n")
    rows.append(b'2026-09-21 13:33:29.123,"cut\n')
    found, rejects = reading(b"@timestamp,@message\n" + b"".join(rows))
    assert [b"%032x" % n in found for n in range(1, 4)] == [True, True, True]
    assert [(reject.reason, reject.count) for reject in rejects] == [("not a row of CSV", 1)] * 2


STARTUP = b"".join(b"INFO 09-21 13:33:25 [loader.py:%d] Loading a shard of the model\n" % n for n in range(3000))


@pytest.mark.parametrize("lines", [None, "docker", "cri"])
@pytest.mark.parametrize("container", ["console", "java"])
def test_spans_after_a_long_start_of_the_server_are_read(reading, container, lines):
    content = wrapped.TRACES[container]([record(span(n)) for n in range(1, 6)])
    around = wrapped.LINES[lines] if lines else bytes
    assert len(STARTUP) > 128 << 10
    assert reading(around(STARTUP + content)) == reading(content)


def test_a_log_that_is_read_itself_stays_one_though_spans_follow(reading):
    step = b"INFO 09-21 13:33:25 [core.py:1] Iteration(1): 0 context requests, 0 context tokens, "
    step += b"1 generation requests, 1 generation tokens, iteration elapsed time: 2.00 ms\n"
    found, _ = reading(step + STARTUP + wrapped.console([record(span(1))]))
    assert b"Iteration(1)" in found


# -- parts, damage and hostile content --------------------------------------------------------------------


def read(path, **options):
    """Return the content of the blocks of a file, and its rejects."""
    items = list(read_blocks(TraceFile.local(path), IngestOptions(**options)))
    return b"".join(load(item) for item in items if isinstance(item, Block)), [
        item for item in items if not isinstance(item, Block)
    ]


@pytest.fixture
def reading(tmp_path):
    def of(content, **options):
        (tmp_path / "f").write_bytes(content)
        return read(tmp_path / "f", **options)

    return of


@pytest.mark.parametrize("lines", ["docker", "cri"])
@pytest.mark.parametrize("part", [7, 16 << 10])
def test_parts_of_a_line_are_joined_though_another_stream_is_between_them(reading, lines, part):
    content = b"".join(to_json(record(span(number, name="x" * 400))) + b"\n" for number in range(1, 4))
    found, rejects = reading(getattr(wrapped, lines)(content, part=part, beside="other"))
    assert [line for line in found.splitlines() if line != b"other"] == content.splitlines()
    assert (b"other" in found) == (part < 999)
    assert not rejects


def test_a_file_with_many_streams_keeps_no_more_parts_than_one_with_two(reading):
    """Each of nine streams is within the limit, all together are not."""
    entry = {"log": "x" * (16 << 10), "time": wrapped.TIME}
    lines = [json.dumps({**entry, "stream": f"s{n % 9}"}) for n in range(9 * 30)]
    _, rejects = reading("\n".join(lines).encode(), max_document_mib=1)
    assert "line longer than 1 MiB" in [reject.reason for reject in rejects]


def test_a_line_of_a_runtime_that_is_cut_is_rejected_alone(reading):
    content = wrapped.docker(b"".join(to_json(record(span(n))) + b"\n" for n in range(1, 4)))
    first, second, third = content.splitlines(keepends=True)
    found, rejects = reading(first + second[:50] + b"\n" + third)
    assert [f"{n:032x}".encode() in found for n in (1, 2, 3)] == [True, False, True]
    assert [reject.reason for reject in rejects] == ["not a line of Docker's"]


def test_a_span_that_cannot_be_read_costs_itself(reading):
    records = [record(*(span(n) for n in range(1, 6)))]
    jaeger = wrapped.jaeger(records, together=True).replace(b'"spanID": "%016x"' % 3, b'"spanID": 3')
    zipkin = wrapped.zipkin(records).replace(b'"id": "%016x"' % 3, b'"id": 3')
    console = wrapped.console(records).replace(b'"span_id": "0x%016x"' % 3, b'"span_id": 3')
    for content in (jaeger, zipkin, console):
        found, rejects = reading(content)
        assert [b'"%032x"' % n in found for n in range(1, 6)] == [True, True, False, True, True]
        assert [reject.count for reject in rejects] == [1]
        assert rejects[0].reason.startswith("not a span of")
        assert rejects[0].length > 50


@pytest.mark.parametrize("damage", [b'"', b"{", b"}", b"]", b"\\", b""])
@pytest.mark.parametrize("container", ["jaeger", "jaeger_v3", "zipkin", "documents"])
def test_records_before_and_after_damage_are_kept(reading, container, damage):
    """A byte too many or a cut in the middle of one item; every other one is read."""
    content = wrapped.TRACES[container]([record(span(n)) for n in range(1, 60)])
    at = content.index(b"%032x" % 30)
    cut = at + 40 if not damage else at
    found, rejects = reading(content[:at] + damage + content[cut:])
    missing = [n for n in range(1, 60) if b"%032x" % n not in found]
    assert len(missing) <= 1
    assert rejects or not missing


@pytest.mark.parametrize("container", wrapped.TRACES)
def test_a_dump_that_ends_anywhere_is_read_up_to_there(reading, container):
    content = wrapped.TRACES[container]([record(span(n)) for n in range(1, 21)])
    at = content.index(b"%032x" % 15)
    found, rejects = reading(content[: at + 60])
    whole = [n for n in range(1, 21) if b"%032x" % n in found]
    assert set(whole) >= set(range(1, 15 if container != "jaeger_v3" else 14))
    # A line that is not JSON is a reject of the reader behind.
    assert container in {"java", "cloudwatch_s3"} or rejects


@pytest.mark.parametrize("value", [b"9" * 300, b"[" * 10_000 + b"]" * 10_000])
def test_a_number_of_300_digits_and_10_000_arrays_are_one_reject(reading, value):
    content = wrapped.jaeger([record(span(1)), record(span(2))], indent=None)
    tag = b'"tags": [{"key": "x", "type": "int64", "value": %b}, {"key": "otel.scope.name"'
    hostile = content.replace(b'"tags": [{"key": "otel.scope.name"', tag % value, 1)
    found, rejects = reading(hostile)
    assert hostile != content
    assert [b"%032x" % n in found for n in (1, 2)] == [False, True]
    assert [reject.count for reject in rejects] == [1]


@pytest.mark.parametrize("count", ["x", [1], {"a": 1}, None, -1, 2**40])
def test_a_count_of_dropped_events_that_is_none_costs_its_span(reading, count):
    content = wrapped.jaeger([record(span(1)), record(span(2))], indent=None)
    tag = json.dumps({"key": "otel.dropped_events_count", "type": "int64", "value": count}).encode()
    hostile = content.replace(b'"tags": [{"key": "otel.scope', b'"tags": [%b, {"key": "otel.scope' % tag, 1)
    found, rejects = reading(hostile)
    assert hostile != content
    assert [b"%032x" % n in found for n in (1, 2)] == [False, True]
    assert [reject.reason for reject in rejects] == ["not a span of Jaeger's"]


def test_a_time_of_the_console_exporter_without_a_zone_is_utc(reading):
    content = wrapped.console([record(span(1))])
    without = content.replace(b'Z",', b'",')
    assert without != content
    assert reading(without) == reading(content)


@pytest.mark.parametrize("value", [[], ["1790000000000000000"], [[1], "x"], [1, "x"], {}, "x"])
def test_a_value_of_loki_that_is_no_line_is_one_reject_of_its_stream(reading, value):
    answer = json.loads(wrapped.loki(to_json(record(span(1)))))
    answer["data"]["result"].append({"stream": {"pod": "b"}, "values": [value]})
    found, rejects = reading(json.dumps(answer).encode())
    assert found == to_json(record(span(1))) + b"\n"
    assert [reject.count for reject in rejects] == [1]


def test_a_process_that_is_missing_or_names_itself_gives_no_resource(reading):
    content = wrapped.jaeger([record(span(1), span(2), resource=[])], together=True)
    answer = json.loads(content)
    trace = answer["data"][0]
    trace["processes"] = {"p1": {"serviceName": "a", "tags": [], "processID": "p1", "processes": {"p1": {}}}}
    trace["spans"][1]["processID"] = "p9"
    # Each is the parent of the other.
    for one, other in ((0, 1), (1, 0)):
        reference = {"refType": "CHILD_OF", "traceID": "x", "spanID": trace["spans"][other]["spanID"]}
        trace["spans"][one]["references"] = [reference]
    found, rejects = reading(json.dumps(answer).encode())
    assert not rejects
    assert found.count(b'"service.name"') == 1


_TOO_LONG = "longer than 1 MiB: raise `IngestOptions.max_document_mib` to read it"


def test_an_item_longer_than_the_limit_is_one_reject_and_the_next_is_read(reading):
    records = [record(*(span(n, name="x" * 600) for n in range(1, 3000))), record(span(9999, name="y"))]
    records[1]["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["traceId"] = "f" * 32
    long, short = (json.loads(wrapped.jaeger([each], together=True)) for each in records)
    long["data"] += short["data"]
    found, rejects = reading(json.dumps(long).encode(), max_document_mib=1)
    assert b"f" * 32 in found
    assert [reject.reason for reject in rejects] == [_TOO_LONG]


def test_a_dump_is_read_an_item_at_a_time(tmp_path):
    """Only the first blocks are asked for: no more of the file is read than they need."""
    records = [record(span(n, name="x" * 9000)) for n in range(1, 2000)]
    (tmp_path / "f").write_bytes(wrapped.jaeger(records))
    read_bytes = []
    blocks = read_blocks(TraceFile.local(tmp_path / "f"), IngestOptions(block_bytes=1 << 20), on_read=read_bytes.append)
    assert isinstance(next(blocks), Block)
    assert sum(read_bytes) < 12 << 20 < (tmp_path / "f").stat().st_size


def test_an_empty_answer_is_empty(tmp_path):
    (tmp_path / "f").write_bytes(b'{"data":[],"total":0,"limit":0,"offset":0,"errors":null}')
    assert inspect_file(TraceFile.local(tmp_path / "f")).shape == "empty"


def test_a_container_is_named_with_what_is_in_it(tmp_path):
    (tmp_path / "f").write_bytes(wrapped.docker(wrapped.jaeger([record(span(1))])))
    assert (
        str(inspect_file(TraceFile.local(tmp_path / "f")))
        == "lines of Docker's json-file driver with Jaeger's API answer, as OTLP JSON lines"
    )


# -- compressed twice -------------------------------------------------------------------------------------


@pytest.mark.parametrize("outer", [gzip.compress, zstd])
@pytest.mark.parametrize("inner", ["framed zstd", "gzip", "zstd"])
def test_content_that_is_compressed_twice_is_read(reading, outer, inner):
    records = [to_protobuf(record(span(n))) for n in range(1, 50)]
    plain = framed(records)
    compress = {
        "framed zstd": lambda _: framed([zstd(one) for one in records]),
        "gzip": gzip.compress,
        "zstd": zstd,
    }
    assert reading(outer(compress[inner](plain))) == (plain, [])


def test_a_file_of_the_receiver_in_gzip_that_is_damaged_keeps_what_is_readable(reading):
    records = [to_protobuf(record(span(n))) for n in range(1, 400)]
    data = framed([zstd(one) for one in records])
    at = len(data) // 2
    found, rejects = reading(gzip.compress(data[:at] + data[at + 9 :]))
    assert found.count((399).to_bytes(16, "big")) == 1
    assert found.count((1).to_bytes(16, "big")) >= 1
    assert rejects


def test_two_layers_expand_no_more_than_one_may(tmp_path):
    bomb = gzip.compress(gzip.compress(b"0" * (4 << 20)))
    (tmp_path / "f").write_bytes(bomb)
    bounds = Expansion(free_bytes=1 << 16, max_ratio=200)
    with (tmp_path / "f").open("rb") as raw:
        items = list(pieces(raw, bounds))
    assert sum(len(item.data) for item in items if not isinstance(item, Gap)) <= 200 * len(bomb) + (1 << 20)
    assert any(isinstance(item, Gap) and item.reason.startswith("decompression bomb") for item in items)


def test_every_container_has_an_example():
    assert {*wrapped.TRACES, *wrapped.LINES} == CONTAINERS.keys()
