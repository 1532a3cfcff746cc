"""Points of a benchmark: tables that someone keeps, and the summaries of load generators."""

from __future__ import annotations

import csv
import gzip
import json
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import clients
import tracefit
from decoding import decoded_block
from tracefit.inputs.blocks import Block, inspect_file
from tracefit.inputs.discovery import open_inputs
from tracefit.inputs.files import TraceFile
from tracefit.recordings import RECORDINGS
from tracefit.recordings.point_rows import meaning_of, spans_of_points
from tracefit.tables.dialects import POINT_KEY, POINT_SCOPE
from tracefit.tables.store import TableStore

FIXTURES = Path(__file__).parents[2] / "fixtures/clients"


def read(content, tmp_path):
    """Return the points of some content, and the reasons of its rejects."""
    path = tmp_path / "anything"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    found = inspect_file(TraceFile.local(path))
    assert found.recording is not None
    block = Block("log", found.shape, found.encoding, 0, None, path.stat().st_size, path.read_bytes())
    decoded = decoded_block(RECORDINGS[found.recording.name].decode, block, path.read_bytes())
    rows = decoded.spans.filter(scope=POINT_SCOPE)
    texts = [{each["key"]: each["value"] for each in row}[POINT_KEY] for row in rows["attributes"]]
    return [json.loads(text) for text in texts], [reject.reason for reject in decoded.rejects]


# -- tables that someone keeps ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "column", "factor"),
    [
        ("ttft_ms", "ttft_mean_us", 1e3),
        ("mean_ttft_ms", "ttft_mean_us", 1e3),
        ("P99 TTFT (ms)", "ttft_p99_us", 1e3),
        ("median_itl_ms", "itl_p50_us", 1e3),
        ("Time to First Token (s)", "ttft_mean_us", 1e6),
        ("tpot_us_p90", "tpot_p90_us", 1.0),
        ("e2e_latency_ns", "e2e_mean_us", 1e-3),
        ("p95_e2el_ms", "e2e_p95_us", 1e3),
        ("std_ttft_ms", "", 1e3),
        ("ttft", "ttft_mean_us", None),
        ("max_concurrency", "concurrency", 1.0),
        ("request_rate", "rate_per_s", 1.0),
        ("ISL", "prompt_tokens", 1.0),
        ("output_len", "output_tokens", 1.0),
        ("tp_size", "tensor_parallel", 1.0),
        ("gpu_name", "gpu", 1.0),
        ("model_id", "model", 1.0),
    ],
)
def test_a_name_says_what_a_column_is(name, column, factor):
    assert meaning_of(name) == (column, factor)


@pytest.mark.parametrize("name", ["comment", "accept_length", "gpu_util", "date"])
def test_other_names_say_nothing(name):
    assert meaning_of(name) is None


ROWS = [
    {"concurrency": 1, "isl": 512, "osl": 128, "ttft_ms": 20.5, "p99_tpot_ms": 7.1, "tp": 2, "note": "a"},
    {"concurrency": 8, "isl": 512, "osl": 128, "ttft_ms": 35.5, "p99_tpot_ms": 8.2, "tp": 2, "note": "b"},
]


def as_csv(delimiter):
    lines = [ROWS[0].keys(), *(map(str, row.values()) for row in ROWS)]
    return "\n".join(delimiter.join(line) for line in lines) + "\n"


TABLES = {
    "comma": as_csv(","),
    "semicolon": as_csv(";"),
    "tab, with BOM and CRLF": "\ufeff" + as_csv("\t").replace("\n", "\r\n"),
    "list": json.dumps(ROWS),
    "pretty list": json.dumps(ROWS, indent=2),
    "lines": "\n".join(map(json.dumps, ROWS)),
    "columns": json.dumps({name: [row[name] for row in ROWS] for name in ROWS[0]}),
    "pandas": json.dumps({name: {str(n): row[name] for n, row in enumerate(ROWS)} for name in ROWS[0]}),
    "object": json.dumps({"tp": 2, "points": [{k: v for k, v in row.items() if k != "tp"} for row in ROWS]}),
}


@pytest.mark.parametrize("form", TABLES)
def test_a_table_is_read_in_any_form(form, tmp_path):
    points, rejects = read(TABLES[form], tmp_path)
    assert not rejects
    assert [(p["concurrency"], p["prompt_tokens"], p["output_tokens"]) for p in points] == [
        (1, 512, 128),
        (8, 512, 128),
    ]
    assert [p["ttft_mean_us"] for p in points] == pytest.approx([20_500, 35_500])
    assert [p["tpot_p99_us"] for p in points] == pytest.approx([7_100, 8_200])
    assert {(p["program"], p["tensor_parallel"], *p["unread"]) for p in points} == {("table", 2, "note")}


@pytest.mark.parametrize(
    "content",
    ["concurrency,ttft,isl\n1,20,512\n2,30,512\n", '[{"request_rate": 2, "ttft": 20}]'],
)
def test_a_latency_without_a_unit_is_refused_by_name(content, tmp_path):
    points, rejects = read(content, tmp_path)
    assert not points
    assert rejects == ["no point (column ttft has no unit: name it ttft_ms or ttft_s)"]


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("1,x,100,20,10,1000", "no point (ttft_ms is not a number)"),
        ("1,-3,100,20,10,1000", "no point (ttft_ms is out of range)"),
        ("1,20,100", "no point (3 fields below 6 names)"),
        ("1,,100,20,,", "no point (no latency)"),
        ("1,20,-1,20,10,210", "no point (isl is out of range)"),
        # 20 ms and 99 times 10 ms are 1 s.
        (
            "1,20,100,100,10,1.01",
            "no point (e2e_mean is about 1/1,000 of ttft and the times of the tokens: is it in s?)",
        ),
    ],
)
def test_a_bad_row_costs_itself(row, fault, tmp_path):
    head = "concurrency,ttft_ms,isl,osl,tpot_ms,e2e_ms\n"
    points, rejects = read(f"{head}{row}\n2,20,100,20,10,210\n", tmp_path)
    assert [p["concurrency"] for p in points] == [2]
    assert rejects == [fault]


def test_a_table_without_rows_is_a_reject(tmp_path):
    assert read("concurrency,ttft_ms\n", tmp_path) == ([], ["no point (a table without rows)"])


def test_two_columns_of_one_kind_are_refused_unless_they_agree(tmp_path):
    head = "concurrency,isl,input_len,ttft_ms\n"
    points, rejects = read(f"{head}1,512,512,20\n2,512,500,20\n", tmp_path)
    assert [p["prompt_tokens"] for p in points] == [512]
    assert rejects == ["no point (columns isl and input_len are both prompt_tokens)"]


def test_a_setting_of_the_server_is_kept_and_a_rate_without_end_is_none(tmp_path):
    (point,), _ = read("request_rate,concurrency,ttft_ms,max_num_seqs\ninf,4,20,64\n", tmp_path)
    assert point["settings"] == {"max_num_seqs": "64"}
    assert "rate_per_s" not in point


# -- summaries ----------------------------------------------------------------------------------------------


def vllm_summary(**more):
    result = json.loads(clients.vllm_bench(clients.planned(20)))
    lists = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors")
    summary = {name: value for name, value in result.items() if name not in lists}
    return json.dumps(
        summary
        | {"model_id": "tiny", "tokenizer_id": "tiny", "request_rate": 8.0, "max_concurrency": None}
        | {"duration": 5.0, "completed": 20, "failed": 1, "request_throughput": 4.0}
        | {"total_input_tokens": 2_000, "total_output_tokens": 600, "mean_ttft_ms": 20.5, "p99_ttft_ms": 31.0}
        | {"std_ttft_ms": 3.0, "mean_tpot_ms": 7.5, "median_itl_ms": 7.25}
        | more
    )


def test_a_vllm_result_without_requests_is_a_point_and_names_the_flag(tmp_path):
    (point,), rejects = read(vllm_summary(new_key=1), tmp_path)
    assert not rejects
    assert point["requests_written_by"] == "vllm bench serve --save-result --save-detailed"
    wanted = {"rate_per_s": 8.0, "prompt_tokens": 100.0, "output_tokens": 30.0, "requests": 20}
    wanted |= {
        "failed_requests": 1,
        "ttft_mean_us": 20_500.0,
        "ttft_p99_us": 31_000.0,
        "tpot_mean_us": 7_500.0,
    }
    wanted |= {"itl_p50_us": 7_250.0, "model": "tiny", "duration_us": 5e6, "requests_per_s": 4.0}
    assert point.items() >= wanted.items()
    assert point["unread"] == ["new_key"]


def test_a_duration_in_another_unit_is_a_reject(tmp_path):
    points, rejects = read(vllm_summary(duration=5_000), tmp_path)
    assert not points
    (reason,) = rejects
    assert "the duration is about 1,000 times requests over their throughput: is it in ms?" in reason


@pytest.mark.parametrize("details", [True, False])
def test_an_sglang_result_is_sglang_s(details, tmp_path):
    plans = clients.planned(10), clients.planned(20)
    lines = [clients.sglang_bench(plan, details=details, max_concurrency=4 * n) for n, plan in enumerate(plans, 1)]
    points, rejects = read(b"".join(lines), tmp_path)
    assert not rejects
    assert [(p["program"], p["concurrency"], p["requests"]) for p in points] == [
        ("sglang.bench_serving", 4, 10),
        ("sglang.bench_serving", 8, 20),
    ]
    for point, plan in zip(points, plans, strict=True):
        assert point["requests_written_by"] == "sglang.bench_serving --output-details"
        assert point["prompt_tokens"] == pytest.approx(sum(r.prompt for r in plan) / len(plan))
        ttft_s = sum(r.token_s[0] - r.sent_s for r in plan) / len(plan)
        assert point["ttft_mean_us"] == pytest.approx(1e6 * ttft_s)
        assert not point["unread"]


def test_a_broken_sglang_line_is_called_sglang_s(tmp_path):
    content = clients.sglang_bench(clients.planned(10)).replace(b'"ttfts": [', b'"ttfts": [0.1, ')
    assert read(content, tmp_path)[1] == ["no request of SGLang's `bench_serving` (lists of different lengths)"]


def test_guidellm_s_summary_has_the_load_and_the_time_between_tokens(tmp_path):
    content = gzip.decompress((FIXTURES / "guidellm/guidellm.json.gz").read_bytes())
    (point,), rejects = read(content, tmp_path)
    assert not rejects
    metrics = json.loads(content)["benchmarks"][0]["metrics"]
    assert (point["rate_per_s"], point["requests"]) == (8.0, 150)
    assert point["ttft_p99_us"] == pytest.approx(47_613.1, abs=0.1)
    gaps = metrics["inter_token_latency_ms"]["successful"]
    assert point["tpot_mean_us"] == pytest.approx(1e3 * gaps["mean"])
    assert point["e2e_p50_us"] == pytest.approx(1e6 * metrics["request_latency"]["successful"]["percentiles"]["p50"])
    assert not any(name.startswith("itl_") for name in point)


def of(mean, **more):
    return {"mean": mean, "min": mean / 2, "max": 2 * mean, **more}


def test_inference_perf_s_stage_is_a_point(tmp_path):
    """Inference-perf 0.5.0, `inference_perf/reportgen/base.py`."""
    report = {
        "benchmark_time_seconds": 10.0,
        "load_summary": {"count": 81, "schedule_delay": of(0.1), "requested_rate": 8.0, "achieved_rate": 8.1},
        "successes": {
            "count": 80,
            "latency": {
                "request_latency": of(0.5, median=0.4, p99=0.9),
                "normalized_time_per_output_token": of(0.02),
                "time_per_output_token": of(0.01),
                "time_to_first_token": of(0.05, p90=0.07),
                "inter_token_latency": of(0.011),
            },
            "throughput": {"requests_per_sec": 8.0, "output_tokens_per_sec": 368.0},
            "prompt_len": of(90.0),
            "output_len": of(46.0),
        },
        "failures": {"count": 1, "request_latency": None, "prompt_len": None},
    }
    (point,), rejects = read(json.dumps(report, indent=2), tmp_path)
    assert not rejects
    wanted = {
        "rate_per_s": 8.0,
        "requests": 80,
        "failed_requests": 1,
        "prompt_tokens": 90.0,
        "tpot_mean_us": 1e4,
    }
    wanted |= {"ttft_mean_us": 5e4, "e2e_p50_us": 4e5, "e2e_p99_us": 9e5, "itl_mean_us": 11e3}
    assert {name: point.get(name) for name in wanted} == pytest.approx(wanted)
    assert "per_request: true" in point["requests_written_by"]


@pytest.mark.parametrize("program", ["aiperf", "genai-perf"])
def test_a_profile_s_summary_is_a_point(program, tmp_path):
    """Of aiperf 0.13.0, `aiperf/common/models/export_models.py`, and genai-perf 0.0.16,
    `genai_perf/export_data/json_exporter.py`."""
    config = {"perf_analyzer": {"stimulus": {"concurrency": 16}}, "model_names": ["tiny"]}
    if program == "aiperf":
        config = {"endpoint": {"model_names": ["tiny"]}, "loadgen": {"concurrency": 16, "request_rate": None}}
    report = {
        **({"schema_version": "1.4", "aiperf_version": "0.13.0"} if program == "aiperf" else {}),
        "request_throughput": {"unit": "requests/sec", "avg": 12.0},
        "request_latency": {"unit": "ms", "avg": 1_018.0, "p50": 1_000.0, "p99": 1_400.0},
        "request_count": {"unit": "requests", "avg": 200},
        "time_to_first_token": {"unit": "ms", "avg": 30.0, "p90": 44.0, "std": 4.0},
        "inter_token_latency": {"unit": "ms", "avg": 7.8},
        "input_sequence_length": {"unit": "tokens", "avg": 512.0},
        "output_sequence_length": {"unit": "tokens", "avg": 128.0},
        "input_config": config,
    }
    (point,), rejects = read(json.dumps(report), tmp_path)
    assert not rejects
    wanted = {"program": program, "concurrency": 16.0, "model": "tiny", "requests": 200, "ttft_p90_us": 44e3}
    wanted |= {"tpot_mean_us": 7_800.0, "prompt_tokens": 512.0, "output_tokens": 128.0}
    assert {name: point.get(name) for name in wanted} == wanted
    assert point["e2e_p99_us"] == pytest.approx(1.4e6)
    report["time_to_first_token"]["unit"] = "fortnights"
    assert read(json.dumps(report), tmp_path) == (
        [],
        ["no summary of AIPerf's and genai-perf's summary (time_to_first_token of an unknown unit)"],
    )


def test_llmperf_s_time_per_token_counts_the_prompt_and_is_not_read(tmp_path):
    """ray-project/llmperf, `token_benchmark_ray.py`: its `inter_token_latency_s` is the whole time over the tokens."""
    report = {
        "version": "2023-08-31",
        "model": "tiny",
        "num_concurrent_requests": 4,
        "results_inter_token_latency_s_mean": 0.05,
        "results_ttft_s_quantiles_p99": 0.6,
        "results_ttft_s_mean": 0.5,
        "results_end_to_end_latency_s_mean": 5.0,
        "results_number_input_tokens_mean": 550.0,
        "results_number_output_tokens_mean": 101.0,
        "results_num_completed_requests": 80,
        "results_num_completed_requests_per_min": 48.0,
    }
    (point,), rejects = read(json.dumps(report), tmp_path)
    assert not rejects
    wanted = {
        "concurrency": 4.0,
        "ttft_mean_us": 5e5,
        "ttft_p99_us": 6e5,
        "tpot_mean_us": 45e3,
        "requests": 80,
    }
    assert {name: point.get(name) for name in wanted} == pytest.approx(wanted)
    assert not any(name.startswith("itl_") for name in point)


# -- the folder of AIPerf 0.13 ------------------------------------------------------------------------------


def aiperf_run(folder, *phases):
    """Write a result folder of aiperf 0.13.0 as one ran: its summary, and `phases/` with that of each phase.

    Each of the phases is its name, its entry in the configuration, its requests and its mean TTFT in ms.
    """
    entries = [{"name": name, "kind": "profiling", **entry} for name, entry, *_ in phases]
    config = {"models": {"items": [{"name": "tiny"}]}, "phases": entries}

    def write(path, requests, ttft_ms, **more):
        report = {
            "schema_version": "1.4",
            "aiperf_version": "0.13.0",
            "request_latency": {"unit": "ms", "avg": 10 * ttft_ms},
            "request_count": {"unit": "requests", "avg": float(requests)},
            "time_to_first_token": {"unit": "ms", "avg": ttft_ms},
            "input_sequence_length": {"unit": "tokens", "avg": 60.0},
            "output_sequence_length": {"unit": "tokens", "avg": 12.0},
            "input_config": config,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report | more, indent=2))

    for name, _, requests, ttft_ms in phases:
        write(folder / "phases" / name / "profile_export_aiperf.json", requests, ttft_ms)
    *_, (_, _, requests, ttft_ms) = phases
    write(folder / "profile_export_aiperf.json", requests, ttft_ms, warmup_metrics={})
    manifest = {"schema_version": 1, "phases": [{"phase_name": name} for name, *_ in phases]}
    (folder / "phase_manifest.json").write_text(json.dumps(manifest))
    return folder


WARM_UP = ("warmup", {"kind": "warmup", "type": "poisson", "concurrency": 1, "rate": 20.0}, 4, 19.0)
MEASURED = ("profiling", {"type": "poisson", "concurrency": 30, "rate": 20.0}, 12, 42.0)


def points_under(paths, tmp_path):
    """Return program, load and requests of the points of some paths, and the names of files that are left out."""
    with open_inputs(paths) as inputs:
        left_out = [left.name.rpartition("run/")[2] for left in inputs.left_out if left.is_notable]
    with TemporaryDirectory(dir=tmp_path) as tables:
        tracefit.ingest(paths, tables)
        rows = TableStore(tables).read("points").sort("source_file").to_dicts()
    columns = ("program", "concurrency", "rate_per_s", "requests", "model")
    return [tuple(row[name] for name in columns) for row in rows], left_out


def test_a_run_of_phases_is_one_point_and_its_phases_are_named(tmp_path):
    run = aiperf_run(tmp_path / "run", WARM_UP, MEASURED)
    parts = [f"phases/{name}/profile_export_aiperf.json" for name in ("profiling", "warmup")]
    files = sorted(map(str, run.rglob("profile_export*.json")))
    for paths in ([run], files):
        points, left_out = points_under(paths, tmp_path)
        assert points == [("aiperf", 30.0, 20.0, 12, "tiny")]
        assert sorted(left_out) == parts


def test_a_phase_s_folder_alone_is_that_phase(tmp_path):
    run = aiperf_run(tmp_path / "run", WARM_UP, MEASURED)
    points, left_out = points_under([run / "phases"], tmp_path)
    assert points == [("aiperf", 30.0, 20.0, 12, "tiny"), ("aiperf, warmup", 1.0, 20.0, 4, "tiny")]
    assert not left_out


def test_a_run_of_several_measured_loads_has_none_and_its_phases_have_theirs(tmp_path):
    stages = [(f"stage{n}", {"type": "concurrency", "concurrency": n}, 10 * n, 20.0) for n in (2, 8)]
    run = aiperf_run(tmp_path / "run", WARM_UP, *stages)
    ((_, slots, rate, *_),), _ = points_under([run], tmp_path)
    assert (slots, rate) == (None, None)
    points, _ = points_under([run / "phases"], tmp_path)
    assert [point[1:3] for point in points] == [(2.0, None), (8.0, None), (1.0, 20.0)]


def test_a_phase_that_replays_a_trace_has_no_load(tmp_path):
    replayed = ("profiling", {"type": "fixed_schedule", "concurrency": 30}, 12, 42.0)
    ((_, slots, rate, *_),), _ = points_under([aiperf_run(tmp_path / "run", replayed)], tmp_path)
    assert (slots, rate) == (None, None)


# -- GuideLLM's CSV -----------------------------------------------------------------------------------------


def guidellm_csv():
    return gzip.decompress((FIXTURES / "guidellm-csv/benchmarks.csv.gz").read_bytes())


def test_guidellm_s_csv_has_a_point_for_each_benchmark(tmp_path):
    points, rejects = read(guidellm_csv(), tmp_path)
    assert not rejects
    assert [(p["concurrency"], p["requests"], p["model"]) for p in points] == [
        (2.0, 30, "test-model"),
        (6.0, 30, "test-model"),
    ]
    # From the requests in the JSON report of the same run.
    wanted = [
        {
            "ttft_mean_us": 23_395.165,
            "e2e_mean_us": 163_140.957,
            "tpot_mean_us": 15_470.876,
            "ttft_p95_us": 47_171.116,
        },
        {
            "ttft_mean_us": 46_210.138,
            "e2e_mean_us": 199_014.020,
            "tpot_mean_us": 16_633.157,
            "ttft_p95_us": 140_347.719,
        },
    ]
    assert [{name: point[name] for name in one} for point, one in zip(points, wanted, strict=True)] == [
        pytest.approx(one) for one in wanted
    ]
    assert [(p["prompt_tokens"], p["output_tokens"]) for p in points] == [(pytest.approx(34.5), 10.0)] * 2
    assert "--output-path report.json" in points[0]["requests_written_by"]


def guidellm_csv_before_0_4(*names):
    """Return the CSV of guidellm 0.3.1, `guidellm/benchmark/output.py`: one line of names, a distribution in four
    columns."""
    listed = "[min, 0.1, 1, 5, 10, 25, 75, 90, 95, 99, max]"
    metrics = {
        "Request latency": (1.5, 1.25, [*range(11)]),
        "Prompt token count": (64.0, 64.0, [64] * 11),
        "Output token count": (16.0, 16.0, [16] * 11),
        "Time to first token ms": (30.0, 25.0, [*range(20, 31)]),
        "Inter token latency ms": (98.0, 90.0, [*range(90, 101)]),
    }
    head = [
        "Type",
        "Run Id",
        "Id",
        "Name",
        "Start Time",
        "End Time",
        "Duration",
        "Successful Requests",
        "Errored Requests",
    ]
    values = [
        "generative_benchmark",
        "1",
        "2",
        "",
        "2025-01-01 00:00:00",
        "2025-01-01 00:00:09",
        "9.5",
        "40",
        "2",
    ]
    for name, (mean, median, percentiles) in metrics.items():
        head += [f"Successful {name} {statistic}" for statistic in ("mean", "median", "std dev", listed)]
        values += [str(mean), str(median), "0.5", str(percentiles)]
    lines = StringIO()
    writer = csv.writer(lines)
    writer.writerow([*head, "Args"])
    for name in names:
        writer.writerow([*values[:3], name, *values[4:], '{"profile": {}}'])
    return lines.getvalue()


def test_guidellm_s_csv_of_one_line_of_names_is_read(tmp_path):
    points, rejects = read(guidellm_csv_before_0_4("constant@2.50", "concurrent@4", "synchronous"), tmp_path)
    assert not rejects
    assert [(p.get("rate_per_s"), p.get("concurrency")) for p in points] == [
        (2.5, None),
        (None, 4.0),
        (None, 1.0),
    ]
    wanted = {
        "ttft_mean_us": 30e3,
        "ttft_p50_us": 25e3,
        "ttft_p90_us": 27e3,
        "ttft_p99_us": 29e3,
        "e2e_mean_us": 1.5e6,
    }
    wanted |= {
        "tpot_mean_us": 98e3,
        "tpot_p95_us": 98e3,
        "prompt_tokens": 64.0,
        "requests": 40,
        "failed_requests": 2,
    }
    assert {name: points[0][name] for name in wanted} == pytest.approx(wanted)


def test_a_row_of_other_columns_than_those_named_is_a_reject(tmp_path):
    """Until 0.6 only the columns of the first benchmark are named, and a benchmark without errors has fewer."""
    *lines, last = guidellm_csv().decode().splitlines()
    (cells,) = csv.reader([last])
    at = next(n for n, cell in enumerate(cells) if cell.startswith("[")) - 3
    for wrong in (cells[:at] + cells[at + 4 :], [*cells[:at], "1", *cells[at:-1]]):
        text = StringIO()
        csv.writer(text).writerow(wrong)
        points, (reason,) = read("\n".join([*lines, text.getvalue()]), tmp_path)
        assert [p["concurrency"] for p in points] == [2.0]
        assert "its columns are not those of the first benchmark" in reason
        assert "JSON" in reason


@pytest.mark.parametrize("strategy", ["concurrent@3", "concurrent"])
def test_a_csv_of_0_8_names_the_load_in_its_strategy(strategy, tmp_path):
    """guidellm 0.8.1, `guidellm/scheduler/strategies.py`; its profile lists loads and no strategies."""
    rows = list(csv.reader(guidellm_csv().decode().splitlines()))
    names = rows[1]
    for row in rows[3:]:
        row[names.index("Strategy")] = strategy
        row[names.index("Profile")] = '{"kind": "concurrent", "streams": [5, 7]}'
    text = StringIO()
    csv.writer(text).writerows(rows)
    points, _ = read(text.getvalue(), tmp_path)
    assert [p["concurrency"] for p in points] == ([3.0, 3.0] if "@" in strategy else [5.0, 7.0])


def test_a_csv_and_a_report_of_the_same_benchmark_are_one_point(tmp_path):
    report = gzip.decompress((FIXTURES / "guidellm/guidellm.json.gz").read_bytes())
    (point,), _ = read(report, tmp_path)
    once, again = (spans_of_points([(0, point | {"requests_written_by": way})]) for way in "ab")
    assert once["trace_id"].to_list() == again["trace_id"].to_list()


def test_guidellm_s_csv_without_a_whole_header_is_a_reject(tmp_path):
    lines = guidellm_csv().decode().splitlines(keepends=True)
    for content in ("".join(lines[:2]), "".join(lines[:3])):
        points, rejects = read(content, tmp_path)
        assert not points
        assert len(rejects) == 1


# -- what vLLM 0.32 writes beside its sums ------------------------------------------------------------------


def test_latencies_beside_a_vllm_summary_are_its_e2e(tmp_path):
    """vLLM 0.32.0, `vllm/benchmarks/serve.py`: without --save-detailed both lists stay, in seconds; a failed request
    has 0."""
    lists = {"latencies": [0.2, 0.3, 0.4, 0.0], "queue_times": [0.1] * 4}
    of_queue = {"mean_client_queue_time_ms": 100.0, "p99.9_e2el_including_client_queue_ms": 500.0}
    sums = {"mean_ttft_ms": 20.5, "mean_tpot_ms": 9.0}
    (point,), rejects = read(vllm_summary(**lists, **of_queue, **sums, spec_decode_num_drafts=3), tmp_path)
    assert not rejects
    # Linear between ranks, as NumPy's are: 0.2 + 0.9 * 2 * 0.1.
    wanted = {"e2e_mean_us": 3e5, "e2e_p50_us": 3e5, "e2e_p90_us": 3.8e5, "e2e_p99_us": 3.98e5}
    assert {name: point[name] for name in wanted} == pytest.approx(wanted)
    assert not point["unread"]


def test_a_vllm_summary_s_own_e2e_counts_more_than_its_latencies(tmp_path):
    (point,), _ = read(vllm_summary(latencies=[0.3], mean_e2el_ms=250.0), tmp_path)
    assert point["e2e_mean_us"] == 250e3
    assert "e2e_p50_us" not in point


def test_latencies_in_another_unit_than_the_times_of_tokens_are_a_reject(tmp_path):
    result = json.loads(clients.vllm_bench(clients.planned(20)))
    lasted = [ttft + sum(gaps) for ttft, gaps in zip(result["ttfts"], result["itls"], strict=True)]
    for factor, fault in (
        (1, None),
        (1e3, "the mean of latencies is about 1,000 times ttfts and itls: is it in ms?"),
    ):
        content = json.dumps(result | {"latencies": [factor * time for time in lasted]})
        reasons = " ".join(read(content, tmp_path)[1])
        assert fault in reasons if fault else not reasons


# -- values of summaries that are wrong ---------------------------------------------------------------------


def aiperf_report(**more):
    return {
        "aiperf_version": "0.13.0",
        "request_throughput": {"unit": "requests/sec", "avg": 12.0},
        "request_latency": {"unit": "ms", "avg": 1_018.0},
        "request_count": {"unit": "requests", "avg": 200},
        "time_to_first_token": {"unit": "ms", "avg": 30.0},
        "inter_token_latency": {"unit": "ms", "avg": 7.8},
        "output_sequence_length": {"unit": "tokens", "avg": 128.0},
        "input_config": {"loadgen": {"concurrency": 16}},
        **more,
    }


def inference_perf_report(**latencies):
    latency = {"time_to_first_token": of(0.05), "time_per_output_token": of(0.01), **latencies}
    return {
        "load_summary": {"requested_rate": 8.0},
        "successes": {"count": 80, "latency": latency, "output_len": of(46.0)},
        "failures": {"count": 0},
    }


def llmperf_report(**more):
    return {
        "num_concurrent_requests": 4,
        "results_ttft_s_mean": 0.5,
        "results_end_to_end_latency_s_mean": 5.0,
    } | more


def guidellm_report(**more):
    good = {"count": 5, "mean": 20.0, "percentiles": {"p50": 20.0}}
    metrics = {"time_to_first_token_ms": {"successful": good | more}}
    return {"metadata": {"guidellm_version": "0.8.1"}, "benchmarks": [{"metrics": metrics, "requests": {}}]}


@pytest.mark.parametrize("value", [-3.0, "fast", True, {"a": 1}])
@pytest.mark.parametrize(
    "of_value",
    [
        lambda v: aiperf_report(time_to_first_token={"unit": "ms", "avg": v}),
        lambda v: inference_perf_report(time_to_first_token={"mean": v}),
        lambda v: llmperf_report(results_ttft_s_mean=v),
        lambda v: guidellm_report(mean=v),
        lambda v: [{"concurrency": 1, "ttft_ms": v}],
    ],
)
def test_a_wrong_value_of_a_summary_is_a_reject(of_value, value, tmp_path):
    points, rejects = read(json.dumps(of_value(value)), tmp_path)
    assert not points
    (reason,) = rejects
    assert "is not a number)" in reason or "is out of range)" in reason


@pytest.mark.parametrize(
    "content",
    [
        aiperf_report(zz_new={"of": 1}),
        {**inference_perf_report(), "zz_new": 1},
        inference_perf_report(zz_new=of(1.0)),
        llmperf_report(zz_new=2),
    ],
)
def test_keys_of_a_summary_that_are_new_are_named(content, tmp_path):
    (point,), rejects = read(json.dumps(content), tmp_path)
    assert not rejects
    assert point["unread"] == ["zz_new"]


def test_what_the_programs_write_has_no_key_that_is_new(tmp_path):
    report = gzip.decompress((FIXTURES / "guidellm/guidellm.json.gz").read_bytes())
    for content in (report, json.dumps(aiperf_report()), guidellm_csv()):
        points, _ = read(content, tmp_path)
        assert [point["unread"] for point in points] == [[]] * len(points)


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        # 20 ms written as 20,000.
        (
            "1,20000,20000,,",
            "no point (tpot_mean is 20,000 ms, longer than a step of any server: is its unit another one?)",
        ),
        (
            "1,20,0.02,,",
            "no point (tpot_mean is 0.02 ms, shorter than a step of any server: is its unit another one?)",
        ),
        # Two requests a second that take 4 s are eight at a time.
        ("8,,,4000,2", None),
        (
            "8,,,4000000,2",
            "no point (e2e_mean is about 1,000 times the concurrency over the throughput: is it in us?)",
        ),
        (
            "8,,,4,2",
            "no point (e2e_mean is about 1/1,000 of the concurrency over the throughput: is it in s?)",
        ),
    ],
)
def test_a_unit_that_no_server_or_client_could_have_is_a_reject(row, fault, tmp_path):
    _, rejects = read(f"concurrency,ttft_ms,tpot_ms,e2e_ms,request_throughput\n{row}\n", tmp_path)
    assert rejects == ([] if fault is None else [fault])


def test_a_client_with_a_rate_may_have_fewer_at_a_time_than_allowed(tmp_path):
    points, rejects = read("concurrency,request_rate,e2e_ms,request_throughput\n512,2,400,2\n", tmp_path)
    assert not rejects
    assert len(points) == 1


@pytest.mark.parametrize(
    ("content", "ttft_ms", "fault"),
    [
        ("concurrency;ttft_ms\n1;4,5\n2;30\n", [30], "4,5 may be a decimal or thousands"),
        ("concurrency;ttft_ms\n1;2,048\n2;30\n", [30], "2,048 may be a decimal or thousands"),
        ('concurrency,isl,ttft_ms\n1,"2,048",30\n', [30], None),
        (
            'concurrency,ttft_ms\n1,"4,5"\n2,30\n',
            [30],
            "ttft_ms is not a number: write a point before decimals",
        ),
        ("# of Monday\nconcurrency,ttft_ms\n1,30\n# slower\n2,40\n", [30, 40], None),
        ("| concurrency | ttft_ms |\n| --- | ---: |\n| 1 | 30 |\n| 2 | 40 |\n", [30, 40], None),
    ],
)
def test_numbers_of_a_table_are_never_read_as_others(content, ttft_ms, fault, tmp_path):
    points, rejects = read(content, tmp_path)
    assert [point["ttft_mean_us"] / 1e3 for point in points] == ttft_ms
    assert all(fault in reason for reason in rejects) if fault else not rejects
    assert len(rejects) == (fault is not None)


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("1,40,30", "no point (ttft_p50 is above ttft_p99)"),
        ("1,40,0.05", "no point (ttft_p50 is about 1,000 times ttft_p99: is it in us?)"),
        ("1,30,30", None),
    ],
)
def test_percentiles_out_of_order_are_a_reject(row, fault, tmp_path):
    _, rejects = read(f"concurrency,p50_ttft_ms,p99_ttft_ms\n{row}\n", tmp_path)
    assert rejects == ([] if fault is None else [fault])


def test_guidellm_s_csv_may_stand_twice_in_a_file(tmp_path):
    points, rejects = read(guidellm_csv() * 2, tmp_path)
    assert not rejects
    assert [point["concurrency"] for point in points] == [2, 6, 2, 6]
