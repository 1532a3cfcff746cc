"""Logs of load generators and of requests: their times, the steps that tokens show, their join with the server,
damage."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import polars as pl
import pytest

import clients
import tracefit
from decoding import decoded_block
from tracefit.errors import DataError
from tracefit.inputs.blocks import Block, inspect_file
from tracefit.inputs.files import TraceFile
from tracefit.recordings import RECORDINGS
from tracefit.tables import schema
from tracefit.tables.arrivals import OTHER_RUN
from tracefit.tables.client_times import with_asked_lengths, with_client_times
from tracefit.tables.dialects import NOT_SENT_S, POINT_SCOPE
from tracefit.tables.store import TableStore

FIXTURES = Path(__file__).parents[2] / "fixtures/clients"


def decoded(content: bytes, tmp_path, **options):
    """Return what the format that is found in some content decodes of it."""
    path = tmp_path / "anything"
    path.write_bytes(content)
    found = inspect_file(TraceFile.local(path))
    assert found.recording is not None
    block = Block("log", found.shape, found.encoding, 0, None, len(content), content)
    whole = decoded_block(RECORDINGS[found.recording.name].decode, block, content, **options)
    return whole._replace(spans=whole.spans.filter(pl.col("scope") != POINT_SCOPE))


def latencies(spans):
    names = {name: f"client.latency.{name}" for name in ("ttft", "itl", "e2e")}
    return spans.select(pl.col(key).cast(pl.Float64).alias(name) for name, key in names.items())


WRITERS = clients.FORMS | clients.OTHER_VERSIONS


@pytest.mark.parametrize("name", WRITERS)
def test_a_client_s_times_are_those_of_the_plan(name, tmp_path):
    plan = clients.planned(30 if name.endswith("yaml") else 120)
    found = decoded(WRITERS[name](plan), tmp_path)
    assert not found.rejects
    measured = latencies(found.spans)
    for row, request in zip(measured.iter_rows(named=True), plan, strict=True):
        lasted = request.token_s[-1] - request.token_s[0]
        assert row["ttft"] == pytest.approx(request.token_s[0] - request.sent_s, abs=1e-6)
        assert row["e2e"] == pytest.approx(request.token_s[-1] - request.sent_s, abs=1e-6)
        assert row["itl"] == pytest.approx(lasted / (request.output - 1), abs=1e-6)
    assert found.spans["gen_ai.usage.prompt_tokens"].cast(pl.Int64).to_list() == [r.prompt for r in plan]
    sent = (found.spans["start_unix_ns"] - found.spans["start_unix_ns"][0]).to_numpy() / 1e9
    assert sent == pytest.approx([r.sent_s - plan[0].sent_s for r in plan], abs=1e-6)


@pytest.mark.parametrize("name", [name for name in WRITERS if not name.startswith("guidellm")])
def test_tokens_that_come_together_are_a_step(name, tmp_path):
    steps = decoded(WRITERS[name](clients.planned()), tmp_path).steps
    inner = steps.slice(1, steps.height - 2)
    running = inner["num_prefill_reqs"] + inner["num_decode_reqs"]
    law_us = 15_000 + 500 * running + 20 * inner["prefill_tokens"]
    # A step after idling begins when its request is sent, or when the engine wakes up: both are the same here.
    assert (inner["cycle_us"] - law_us).abs().max() < 1_000
    assert running.max() > 2
    plan = clients.planned()
    assert steps["prefill_tokens"].sum() == sum(r.prompt for r in plan)
    assert steps["decode_tokens"].sum() == sum(r.output - 1 for r in plan)
    # The n-th token but the first reads the prompt and the n - 2 tokens before it from the cache.
    read = sum((r.output - 1) * r.prompt + sum(range(r.output - 1)) for r in plan)
    assert steps["context_tokens"].sum() == read


def test_first_and_last_tokens_alone_show_no_step(tmp_path):
    assert not decoded(clients.guidellm(clients.planned()), tmp_path).steps.height


def test_tokens_of_two_engines_have_steps_without_times(tmp_path):
    plan = clients.planned(200)
    for request in plan[::2]:
        # The second engine is slower.
        first = request.token_s[0]
        request.token_s = [first + 1.37 * (token - first) for token in request.token_s]
    assert not decoded(clients.vllm_bench(plan), tmp_path).steps["cycle_us"].count()


@pytest.mark.parametrize("folder", ["vllm-bench", "guidellm", "aiperf", "inference-perf"])
def test_what_the_programs_wrote_is_read(folder, tmp_path):
    (path,) = (FIXTURES / folder).iterdir()
    found = decoded(gzip.decompress(path.read_bytes()), tmp_path)
    assert not found.rejects
    assert found.spans.height == (150 if folder == "guidellm" else 40)
    measured = latencies(found.spans)
    # A step of the stub takes 15 ms and 0.5 ms a request; the process that sleeps it adds to that.
    assert measured["itl"].min() > 0.015
    assert measured["itl"].median() < 0.022
    assert measured.select((pl.col("e2e") > pl.col("ttft")).all()).item()
    if folder != "guidellm":
        prompts = found.spans["gen_ai.usage.prompt_tokens"].cast(pl.Int64)
        assert found.steps["prefill_tokens"].sum() == prompts.sum()
        assert 15_000 < found.steps["cycle_us"].median() < 22_000


def test_an_older_inference_perf_has_lengths_and_times_beside_each_other(tmp_path):
    entries = json.loads(clients.inference_perf(clients.planned()))
    newer = decoded(json.dumps(entries).encode(), tmp_path)
    for entry in entries:
        info = entry["info"]
        entry["info"] = {**info["request_metrics"]["text"], **info["response_metrics"], "extra_info": {}}
    older = decoded(json.dumps(entries).encode(), tmp_path)
    lengths = ["gen_ai.usage.prompt_tokens", "gen_ai.usage.completion_tokens"]
    assert older.spans.equals(newer.spans)
    assert older.spans.select(pl.col(lengths).count()).row(0) == (120, 120)
    assert older.steps.equals(newer.steps)
    assert older.steps.height


@pytest.mark.parametrize("name", clients.NOT_SENT)
def test_a_client_that_does_not_say_when_it_sent_has_latencies_and_no_steps(name, tmp_path):
    plan = clients.planned(40)
    found = decoded(clients.NOT_SENT[name](plan), tmp_path)
    assert not found.rejects
    assert not found.steps.height
    measured = latencies(found.spans)
    assert measured["ttft"].to_list() == pytest.approx([r.token_s[0] - r.sent_s for r in plan], abs=1e-6)
    assert measured["e2e"].to_list() == pytest.approx([r.token_s[-1] - r.sent_s for r in plan], abs=1e-6)
    itl = [(r.token_s[-1] - r.token_s[0]) / (r.output - 1) for r in plan]
    assert measured["itl"].to_list() == pytest.approx(itl, abs=1e-6)
    assert found.spans["gen_ai.usage.prompt_tokens"].cast(pl.Int64).to_list() == [r.prompt for r in plan]


@pytest.mark.parametrize("form", [clients.sglang_bench, clients.vllm_bench_before_start_times])
def test_requests_that_are_sent_when_others_end_are_placed_by_that(form, tmp_path):
    plan = clients.planned_in_turn(60, slots=4)
    lasts = max(r.token_s[-1] for r in plan)
    options = {"max_concurrency": 4, "duration": lasts, "request_rate": "inf"}
    found = decoded(form(plan, **options), tmp_path)
    starts = found.spans["start_unix_ns"]
    assert ((starts - starts[0]).to_numpy() / 1e9) == pytest.approx([r.sent_s for r in plan], abs=1e-6)
    assert found.steps["cycle_us"].count() > 50
    # The same requests at a rate: nothing says when they were sent.
    assert not decoded(form(plan, **options | {"request_rate": 5.0}), tmp_path).steps.height
    # They do not fill the time that the benchmark took.
    assert not decoded(form(plan, **options | {"duration": 2 * lasts}), tmp_path).steps.height


@pytest.mark.parametrize("empty", ["role", "reason"])
def test_a_part_of_a_chat_without_a_token_is_no_token(empty, tmp_path):
    # `vllm bench serve --backend openai-chat` of vLLM 0.32: 12 tokens of a request have 12 gaps.
    plan = clients.planned()
    tokens = decoded(clients.vllm_bench(plan), tmp_path)
    result = json.loads(clients.vllm_bench(plan))
    for gaps in result["itls"]:
        gaps.insert(0 if empty == "role" else len(gaps), 8.7e-05)
    if empty == "role":
        result["ttfts"] = [ttft - 8.7e-05 for ttft in result["ttfts"]]
    chat = decoded(json.dumps(result | {"backend": "openai-chat"}).encode(), tmp_path)
    columns = ["decode_tokens", "prefill_tokens", "context_tokens", "num_decode_reqs"]
    assert chat.steps[columns].equals(tokens.steps[columns])
    assert (chat.steps["cycle_us"] - tokens.steps["cycle_us"]).abs().max() < 1
    # Where no part comes together with a token, nothing says which one has none.
    for gaps in result["itls"]:
        gaps[0 if empty == "role" else -1] = 0.04
    assert not decoded(json.dumps(result).encode(), tmp_path).steps.height


def test_an_sglang_file_of_several_runs_has_a_benchmark_for_each(tmp_path):
    plans = clients.planned(10), clients.planned(25)
    found = decoded(b"".join(map(clients.sglang_bench, plans)), tmp_path)
    assert (found.spans.height, len(found.rejects)) == (35, 0)
    assert found.spans["trace_id"].str.head(8).n_unique() == 2


@pytest.mark.parametrize("form", [clients.sglang_bench, clients.vllm_bench_before_start_times])
def test_results_that_a_tool_has_laid_out_are_those_in_lines(form, tmp_path):
    plans = clients.planned(10), clients.planned(25)
    lines = decoded(b"".join(form(plan).rstrip() + b"\n" for plan in plans), tmp_path)
    texts = [json.loads(form(plan)) | {"request_rate": "inf"} for plan in plans]
    one, several = (decoded(json.dumps(each, indent=2).encode(), tmp_path) for each in (texts[0], texts))
    ids = ["trace_id", "span_id"]
    assert [len(found.rejects) for found in (lines, one, several)] == [0, 0, 0]
    assert several.spans[ids].equals(lines.spans[ids])
    assert one.spans[ids].equals(lines.spans[ids][:10])


def test_requests_without_streaming_have_their_end(tmp_path):
    plan = clients.planned(10)
    found = decoded(clients.inference_perf_0_5(plan, streams=False), tmp_path)
    measured = latencies(found.spans)
    assert measured["e2e"].to_list() == pytest.approx([r.token_s[-1] - r.sent_s for r in plan], abs=1e-6)
    assert measured.select(pl.col("ttft", "itl").count()).row(0) == (0, 0)


def test_a_sample_of_a_report_s_requests_is_no_load(tmp_path):
    report = json.loads(clients.guidellm_before_0_4(clients.planned(20)))
    report["benchmarks"][0]["request_totals"]["successful"] = 1_000
    found = decoded(json.dumps(report).encode(), tmp_path)
    assert found.spans["start_unix_ns"].unique().to_list() == [int(NOT_SENT_S * 1e9)]
    assert latencies(found.spans)["ttft"].count() == 20


def test_a_warm_up_is_load_and_no_result(tmp_path):
    plan = clients.planned(20)
    lines = [json.loads(line) for line in clients.aiperf(plan).splitlines()]
    for n, line in enumerate(lines):
        line["metadata"]["benchmark_phase"] = "warmup" if n < 5 else "profiling"
    found = decoded("\n".join(map(json.dumps, lines)).encode(), tmp_path)
    assert latencies(found.spans)["ttft"].is_null().to_list() == [True] * 5 + [False] * 15
    assert found.steps["prefill_tokens"].sum() == sum(r.prompt for r in plan)
    report = json.loads(clients.guidellm(plan))
    report["benchmarks"][0]["scheduler_metrics"] = {"measure_start_time": clients.UNIX_S + plan[5].sent_s}
    found = decoded(json.dumps(report).encode(), tmp_path)
    assert latencies(found.spans)["e2e"].is_null().to_list() == [True] * 5 + [False] * 15


@pytest.mark.slow
def test_first_and_last_tokens_of_all_requests_give_the_steps(tmp_path):
    tracefit.run(FIXTURES / "guidellm", out=tmp_path / "out", options=tracefit.TrainOptions(fast=True))
    models = tracefit.load(tmp_path / "out")
    decodes = pl.Series("num_decode_reqs", [1, 3, 5])
    batches = pl.DataFrame([decodes, decodes.alias("decode_tokens"), (80 * decodes).alias("context_tokens")])
    batches = batches.with_columns(pl.lit(0).alias(name) for name in ("num_prefill_reqs", "prefill_tokens"))
    # The stub's law; its timers and the program's own stamps are late by some 0.2 ms.
    predicted = models.predict_step(batches)["predicted_us"].to_list()
    assert predicted == pytest.approx([15_500, 16_500, 17_500], rel=0.04)


@pytest.mark.slow
def test_requests_without_prompt_lengths_are_not_counted(tmp_path):
    plan = clients.planned()
    for request in plan:
        request.prompt = 0
    (tmp_path / "run").mkdir()
    (tmp_path / "run/guidellm.json").write_bytes(clients.guidellm(plan))
    (deployment,) = tracefit.inspect(tmp_path / "run").deployments
    reasons = {allowed.what: allowed.reason for allowed in deployment.allows}
    assert "100 % of the requests lack times or lengths" in reasons["step time"]


# -- damage -------------------------------------------------------------------------------------------------

EVERY_FORM = clients.FORMS | clients.EXPERIMENT


@pytest.mark.parametrize(
    ("form", "key"), [(clients.inference_perf, b'"start_time": '), (clients.request_log, b'"queued_ts": ')]
)
def test_log_with_an_odd_first_request_is_recognised(form, key, tmp_path):
    before, after = form(clients.planned(10)).split(key, 1)
    found = decoded(before + key + b"null" + after[after.index(b",") :], tmp_path)
    assert (found.spans.height, len(found.rejects)) == (9, 1)


@pytest.mark.parametrize("name", EVERY_FORM)
def test_a_record_with_a_text_for_a_time_costs_itself(name, tmp_path):
    content = EVERY_FORM[name](clients.planned(10))
    keys = {
        "bench.json": b'"start_times": [',
        "guidellm.json": b'"request_start": ',
        "per_request_lifecycle_metrics.json": b'"end_time": ',
        "profile_export.jsonl": b'"request_end_ns": ',
        "requests.json": b'"arrival_time_us": ',
        "measured.json": b'"e2e_s": ',
    }
    at = content.rindex(keys[name]) + len(keys[name])
    found = decoded(content[:at] + b'"secret", ' * name.startswith("bench") + content[at:], tmp_path)
    if not name.startswith("bench"):
        end = min(e for e in (content.find(b",", at), content.find(b"}", at)) if e >= 0)
        found = decoded(content[:at] + b'"secret"' + content[end:], tmp_path)
    # A benchmark of vLLM is one record; of the others one of ten.
    assert len(found.rejects) == 1
    assert found.spans.height == (0 if name == "bench.json" else 9)
    assert "secret" not in found.rejects[0].reason + found.rejects[0].excerpt


@pytest.mark.parametrize("name", EVERY_FORM)
def test_a_cut_file_is_a_reject_not_an_error(name, tmp_path):
    content = EVERY_FORM[name](clients.planned(10))
    found = decoded(content[: len(content) * 3 // 4], tmp_path)
    assert len(found.rejects) == 1


def bench_with(plan, **changed):
    """Return a benchmark of vLLM with some keys changed, as Python writes it: with NaN and Infinity."""
    return json.dumps(json.loads(clients.vllm_bench(plan)) | changed).encode()


@pytest.mark.parametrize(
    ("key", "bad"),
    [
        ("ttfts", -0.1),
        ("ttfts", float("nan")),
        ("start_times", None),
        ("output_lens", "x"),
        ("itls", [-0.01]),
    ],
)
def test_one_bad_value_of_a_benchmark_costs_its_request(key, bad, tmp_path):
    plan = clients.planned(10)
    values = json.loads(clients.vllm_bench(plan))[key]
    found = decoded(bench_with(plan, **{key: [*values[:3], bad, *values[4:]]}), tmp_path)
    assert len(found.rejects) == 1
    assert found.spans["gen_ai.usage.prompt_tokens"].cast(pl.Int64).to_list() == [r.prompt for r in plan[:3] + plan[4:]]


@pytest.mark.parametrize("form", [*EVERY_FORM.values(), clients.request_log])
def test_values_that_are_not_read_may_be_anything(form, tmp_path):
    """Python writes NaN and Infinity, which are not JSON, and texts may contain them."""
    content = form(clients.planned(10))
    for odd in (b'"summary": NaN, ', b'"rate": Infinity, ', b'"texts": ["a \\"NaN, ", -Infinity], '):
        at = content.rindex(b"{") + 1
        content = content[:at] + odd + content[at:]
    found = decoded(content, tmp_path)
    assert (found.spans.height, len(found.rejects)) == (10, 0)


def test_one_odd_benchmark_of_a_sweep_costs_itself(tmp_path):
    report = json.loads(clients.guidellm(clients.planned(10)))
    report["benchmarks"] += [{"requests": 3}, *report["benchmarks"]]
    report["benchmarks"][0] = {"requests": {"successful": None, "errored": None}}
    found = decoded(json.dumps(report).encode(), tmp_path)
    assert (found.spans.height, len(found.rejects)) == (10, 1)


@pytest.mark.parametrize(
    ("factors", "fault"),
    [
        ({"ttfts": 1e3}, "the mean of ttfts is about 1,000 times mean_ttft_ms: is it in ms?"),
        ({"itls": 1e6}, "the mean of itls is about 1,000,000 times mean_itl_ms: is it in us?"),
        ({"start_times": 1e3}, "the range of start_times is about 1,000 times duration: is it in ms?"),
    ],
)
def test_a_benchmark_whose_summary_has_another_unit_is_a_reject(factors, fault, tmp_path):
    plan = clients.planned(40)
    result = json.loads(clients.vllm_bench(plan))
    gaps = [gap for gaps in result["itls"] for gap in gaps]
    summary = {
        "duration": max(r.token_s[-1] for r in plan),
        "mean_ttft_ms": 1e3 * sum(result["ttfts"]) / len(plan),
        "mean_itl_ms": 1e3 * sum(gaps) / len(gaps),
    }
    assert decoded(bench_with(plan, **summary), tmp_path).spans.height == 40
    for key, factor in factors.items():
        summary[key] = [
            [v * factor for v in value] if isinstance(value, list) else value * factor for value in result[key]
        ]
    found = decoded(bench_with(plan, **summary), tmp_path)
    assert not found.spans.height
    assert [r.reason for r in found.rejects] == [f"no request of `vllm bench serve` ({fault})"]


def in_ms(content, *keys):
    """Return a log with the numbers of some keys in ms, not s."""
    pattern = rb'("(?:%s)": )([0-9.]+)' % "|".join(keys).encode()
    return re.sub(pattern, lambda match: match[1] + str(1e3 * float(match[2])).encode(), content)


def test_a_time_later_than_any_in_seconds_names_its_unit(tmp_path):
    for form, key in ((clients.guidellm, "request_start"), (clients.request_log, "arrival_time")):
        found = decoded(in_ms(form(clients.planned(5)), key), tmp_path)
        assert not found.spans.height
        assert len(found.rejects) == 5
        assert all("is it in ms, us or ns?" in reject.reason for reject in found.rejects)


def test_a_duration_that_its_own_stamps_contradict_is_a_reject(tmp_path):
    content = clients.aiperf(clients.planned(5)).replace(b'"unit": "ms"', b'"unit": "sec"')
    found = decoded(content, tmp_path)
    assert not found.spans.height
    fault = "request_latency is about 1,000 times request_end_ns - request_start_ns: is it in ms?"
    assert {reject.reason for reject in found.rejects} == {f"no request of AIPerf's records ({fault})"}


def test_a_log_whose_clocks_run_at_other_rates_is_a_reject(tmp_path):
    keys = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
    found = decoded(in_ms(clients.request_log(clients.planned(20)), *keys), tmp_path)
    assert not found.spans.height
    assert [reject.reason for reject in found.rejects] == [
        "no request of a log (the range of queued_ts is about 1,000 times that of arrival_time: is it in ms?)"
    ]


def test_a_benchmark_given_twice_counts_once(tmp_path):
    content = clients.vllm_bench(clients.planned(40))
    once, twice = (decoded(text, tmp_path) for text in (content, content + b"\n" + content + b"\n"))
    assert twice.steps.equals(once.steps)
    ids = ["trace_id", "span_id"]
    assert twice.spans.height == 80
    assert twice.spans[ids].unique().sort(ids).equals(once.spans[ids].sort(ids))
    assert once.spans[ids].n_unique() == 40


def test_benchmarks_of_one_file_are_on_one_clock(tmp_path):
    """Each date is cut to a whole second, by which the second benchmark seems to begin before the first one ends."""
    plan = clients.planned(80)
    content = b"\n".join(clients.vllm_bench(part, date=clients.date_of(part)) for part in (plan[:40], plan[40:]))
    starts = decoded(content, tmp_path).spans["start_unix_ns"]
    between_s = (starts - starts[0]).to_numpy() / 1e9
    assert between_s == pytest.approx([r.sent_s - plan[0].sent_s for r in plan], abs=1e-6)


def test_lists_of_different_lengths_are_a_reject(tmp_path):
    content = clients.vllm_bench(clients.planned(3)).replace(b'"ttfts": [', b'"ttfts": [0.1, ')
    assert [r.reason for r in decoded(content, tmp_path).rejects] == [
        "no request of `vllm bench serve` (lists of different lengths)"
    ]


# -- logs with the engine's times ---------------------------------------------------------------------------


def test_a_request_log_gives_the_engine_s_durations(tmp_path):
    plan = clients.planned(40)
    spans = decoded(clients.request_log(plan), tmp_path).spans
    measured = spans.select(pl.col("^gen_ai.latency.*$").cast(pl.Float64))
    for row, request in zip(measured.iter_rows(named=True), plan, strict=True):
        assert row["gen_ai.latency.time_in_queue"] == 0
        assert row["gen_ai.latency.time_in_model_decode"] == pytest.approx(
            request.token_s[-1] - request.token_s[0], abs=1e-6
        )
        # The shortest admission counts as 0: here all of them are, and take a millisecond.
        first = request.token_s[0] - request.sent_s - 0.001
        assert row["gen_ai.latency.time_to_first_token"] == pytest.approx(first, abs=1e-6)


@pytest.mark.slow
def test_the_soonest_queued_of_a_log_has_no_admission(tmp_path):
    (tmp_path / "run").mkdir()
    lines = [json.loads(line) for line in clients.request_log(clients.planned(40)).splitlines()]
    for n, line in enumerate(lines):
        line["scheduled_ts"] += 1.23456789e-4 * n
    (tmp_path / "run/requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tracefit.ingest(tmp_path / "run", tmp_path / "out")
    # All were queued a millisecond after they came: floats leave picoseconds of that.
    admission_us = TableStore(tmp_path / "out").read("requests")["admission_us"]
    assert all(us == 0 or us > 1e-3 for us in admission_us)
    assert admission_us.min() == 0


def test_a_line_with_times_out_of_order_costs_itself(tmp_path):
    lines = clients.request_log(clients.planned(3)).splitlines(keepends=True)
    lines[1] = lines[1].replace(b'"queued_ts": 5', b'"queued_ts": 6')
    found = decoded(b"".join(lines), tmp_path)
    assert found.spans.height == 2
    assert found.rejects[0].source_offset == len(lines[0])
    assert "times out of order" in found.rejects[0].reason


# -- the server's requests ----------------------------------------------------------------------------------


def both_sides(plan, *, ids, ahead_s=0.0, way_us=700.0):
    """Return the requests of a server and of a client whose clock is behind, in one table."""
    server = pl.DataFrame(
        {
            "request_id": [f"cmpl-{r.name}-0" for r in plan],
            "arrival_ns": [round(1e9 * (clients.UNIX_S + ahead_s + r.sent_s)) for r in plan],
            "output_tokens": [r.output for r in plan],
            "ttft_us": [1e6 * (r.token_s[0] - r.sent_s) for r in plan],
            "dialect": "stock",
        }
    )
    client = server.with_columns(
        request_id=pl.Series([r.name for r in plan]) if ids else pl.lit(None, pl.String),
        arrival_ns=pl.col("arrival_ns") - round(1e9 * ahead_s),
        client_ttft_us=pl.col("ttft_us") + way_us,
        client_e2e_us=1e6,
        # Only the ids can join them: nothing else is left to match.
        output_tokens=pl.lit(None, pl.Int64) if ids else pl.col("output_tokens"),
        ttft_us=pl.lit(None, pl.Float64),
        dialect=pl.lit("client"),
    )
    return schema.REQUESTS.conform(
        schema.REQUESTS.shape(
            pl.concat([server, client.sort("arrival_ns")], how="diagonal").with_columns(run_id=pl.lit("r"))
        )
    )


@pytest.mark.parametrize(("ids", "ahead_s"), [(True, 0.0), (True, 3600.0), (False, 0.0), (False, 3600.0)])
def test_a_client_s_times_stand_beside_the_server_s(ids, ahead_s):
    plan = clients.planned(100)
    joined, unmatched, faults = with_client_times(both_sides(plan, ids=ids, ahead_s=ahead_s))
    assert joined.height == 100
    assert not unmatched
    assert not faults
    assert joined["dialect"].unique().to_list() == ["stock"]
    assert joined["network_us"].to_list() == pytest.approx([700.0] * 100)


def test_clients_of_other_requests_are_not_joined():
    plan, others = clients.planned(60), clients.planned(60)
    for n, request in enumerate(others):
        request.sent_s = 0.31 * n + 0.2 * ((7 * n) % 5)
        request.name = f"other{n}"
    rows = both_sides(plan, ids=False).filter(dialect="stock")
    alone = both_sides(others, ids=False).filter(dialect="client")
    joined, unmatched, _ = with_client_times(pl.concat([rows, alone]))
    # The server's requests are the load.
    assert joined["dialect"].to_list() == ["stock"] * 60
    assert not joined["network_us"].count()
    assert unmatched == {OTHER_RUN: 60}


@pytest.mark.parametrize(
    ("column", "factor", "fault"),
    [
        ("client_ttft_us", 1e3, "the client's TTFT is about 1,000 times the server's: is it in ms?"),
        ("client_ttft_us", 1e6, "the client's TTFT is about 1,000,000 times the server's: is it in us?"),
        ("client_e2e_us", 1e3, "the client's E2E is about 1,000 times the server's: is it in ms?"),
    ],
)
def test_times_in_another_unit_than_the_server_s_are_left_out(column, factor, fault):
    rows = both_sides(clients.planned(40), ids=True).with_columns(
        e2e_us=pl.when(pl.col("dialect") == "stock").then(1e6)
    )
    joined, unmatched, faults = with_client_times(rows.with_columns(pl.col(column) * factor))
    assert faults == {fault: 40}
    assert not unmatched
    assert not joined.select("client_ttft_us", "client_e2e_us", "network_us").to_series().count()


def test_a_queue_before_the_server_is_no_other_unit():
    rows = both_sides(clients.planned(40), ids=True)
    # Each waits a second longer than the one before it, in front of a server that answers in some 20 ms.
    queued = rows.with_columns(pl.col("client_ttft_us") + 1e6 * pl.int_range(pl.len()))
    joined, _, faults = with_client_times(queued)
    assert not faults
    assert joined["client_ttft_us"].count() == 40


@pytest.mark.parametrize(
    ("short_us", "dialect", "changed"), [(1e6, "client", 4), (0.3e6, "client", 0), (1e6, "stock", 0)]
)
def test_short_texts_count_as_asked_where_times_say_so(short_us, dialect, changed):
    """Of 200 requests of 100 tokens and a second four show 30 tokens: whether they were that short, their time says."""
    columns = {
        "dialect": ["client"] * 199 + [dialect],
        "output_tokens": [30] * 4 + [100] * 196,
        "client_ttft_us": 50.0,
        "client_e2e_us": [50 + short_us] * 4 + [50 + 1e6] * 196,
    }
    requests, count = with_asked_lengths(schema.REQUESTS.shape(pl.DataFrame(columns)))
    assert count == changed
    assert requests["output_tokens"].to_list() == ([100] if changed else [30]) * 4 + [100] * 196
    if changed:
        assert requests["client_itl_us"].to_list() == pytest.approx([1e6 / 99] * 200)


def in_other_unit(result, factors):
    """Return a benchmark with lists of times times a factor."""
    for key, factor in factors.items():
        result[key] = [
            [v * factor for v in value] if isinstance(value, list) else value * factor for value in result[key]
        ]
    return json.dumps(result).encode()


@pytest.mark.parametrize("length", ["duration", "request_throughput"])
@pytest.mark.parametrize(
    ("factors", "fault"),
    [
        ({"ttfts": 1e3}, r"ttfts of \d+ requests add up to more than the benchmark took: is it in ms\?"),
        ({"itls": 1e3}, r"itls of \d+ requests add up to more than the benchmark took: is it in ms\?"),
        ({"itls": 1e6}, r"itls of \d+ requests add up to more than the benchmark took: is it in us\?"),
        (
            {"ttfts": 1e3, "itls": 1e3},
            r"ttfts of \d+ requests add up to more than the benchmark took: is it in ms\?",
        ),
    ],
)
def test_requests_that_outlast_their_benchmark_are_in_another_unit(factors, fault, length, tmp_path):
    plan = clients.planned(40)
    lasted = max(r.token_s[-1] for r in plan)
    summary = {"duration": lasted} if length == "duration" else {"request_throughput": 40 / lasted}
    result = json.loads(bench_with(plan, **summary))
    assert decoded(json.dumps(result).encode(), tmp_path).spans.height == 40
    found = decoded(in_other_unit(result, factors), tmp_path)
    assert not found.spans.height
    (reject,) = found.rejects
    assert re.search(fault, reject.reason)


def test_more_requests_at_a_time_than_the_client_sends_are_in_another_unit(tmp_path):
    # Each is far shorter than the benchmark, in ms too.
    plan = clients.planned(400)
    result = json.loads(bench_with(plan, duration=5_000.0, max_concurrency=4))
    assert decoded(json.dumps(result).encode(), tmp_path).spans.height == 400
    found = decoded(in_other_unit(result, {"ttfts": 1e3, "itls": 1e3}), tmp_path)
    assert not found.spans.height
    assert "more requests at a time than max_concurrency: is it in ms?" in found.rejects[0].reason


def test_a_benchmark_without_a_summary_has_gaps_of_a_step(tmp_path):
    plan = clients.planned(40)
    assert decoded(clients.vllm_bench(plan), tmp_path).spans.height == 40
    found = decoded(in_other_unit(json.loads(clients.vllm_bench(plan)), {"ttfts": 1e3, "itls": 1e3}), tmp_path)
    assert not found.spans.height
    assert re.search(r"the median of itls is 1\d, longer than a step: is it in ms\?", found.rejects[0].reason)


def test_slow_steps_of_few_requests_are_in_seconds(tmp_path):
    result = json.loads(bench_with(clients.planned(10)))
    slow = in_other_unit(result, {"ttfts": 300, "itls": 300}).replace(b'{"', b'{"duration": 2000.0, "', 1)
    assert decoded(slow, tmp_path).spans.height == 10


def test_one_request_that_outlasts_its_benchmark_costs_not_the_others(tmp_path):
    plan = clients.planned(40)
    result = json.loads(bench_with(plan, duration=max(r.token_s[-1] for r in plan)))
    result["itls"][7][0] = 5e4
    assert decoded(json.dumps(result).encode(), tmp_path).spans.height == 40


# -- repeats, and units that nothing else shows -------------------------------------------------------------


@pytest.mark.parametrize("name", ["per_request_lifecycle_metrics.json", "profile_export.jsonl"])
def test_a_request_that_a_file_has_twice_counts_once(name, tmp_path):
    write = clients.FORMS[name]
    requests = clients.planned(30)
    once, again = (tmp_path / each for each in ("once", "again"))
    for folder, some in ((once, requests), (again, [*requests, *requests[:7]])):
        folder.mkdir()
        (folder / name).write_bytes(write(some))
        tracefit.ingest(folder, tmp_path / f"{folder.name}-tables")
    of_once, of_again = (TableStore(tmp_path / f"{each}-tables") for each in ("once", "again"))
    columns = ["arrival_ns", "client_ttft_us", "client_e2e_us"]
    assert of_again.read("requests").select(columns).equals(of_once.read("requests").select(columns))
    assert of_again.read("timeline").height == of_once.read("timeline").height > 0
    assert of_again.read("runs")["duplicate_spans"].sum() == 7


def test_a_file_and_its_copy_with_repeats_are_the_same_requests(tmp_path):
    requests = clients.planned(30)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "a.json").write_bytes(clients.inference_perf(requests))
    (folder / "b.json").write_bytes(clients.inference_perf([*requests, *requests]))
    tracefit.ingest(folder, tmp_path / "tables")
    assert TableStore(tmp_path / "tables").read("requests").height == 30


@pytest.mark.parametrize("write", [clients.inference_perf, clients.llmperf, clients.aiperf])
def test_a_byte_order_mark_hides_no_result(write, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/x.json").write_bytes(b"\xef\xbb\xbf" + write(clients.planned(10)))
    tracefit.ingest(tmp_path / "run", tmp_path / "tables")
    assert TableStore(tmp_path / "tables").read("requests").height == 10


def test_responses_of_llmperf_that_no_server_takes_ask_for_their_unit(tmp_path):
    responses = json.loads(clients.llmperf(clients.planned(30)))
    for each in responses:
        each["ttft_s"], each["end_to_end_latency_s"] = (
            1e3 * each["ttft_s"],
            1e3 * each["end_to_end_latency_s"],
        )
    path = tmp_path / "responses.json"
    path.write_text(json.dumps(responses))
    with pytest.raises(DataError, match=r"the median time between tokens is 18 s, longer than a step: is it in ms\?"):
        tracefit.ingest(path, tmp_path / "tables")


def test_a_duration_in_another_unit_than_the_throughput_is_a_reject(tmp_path):
    path = tmp_path / "sglang.jsonl"
    result = json.loads(clients.sglang_bench(clients.planned(30)))
    for name in ("ttfts", "itls"):
        result[name] = [[1e3 * t for t in v] if isinstance(v, list) else 1e3 * v for v in result[name]]
    result |= {name: 1e3 * value for name, value in result.items() if name.endswith("_ms") or name == "duration"}
    path.write_text(json.dumps(result))
    with pytest.raises(DataError, match=r"duration is about 1,000 times requests over their throughput: is it in ms\?"):
        tracefit.ingest(path, tmp_path / "tables")
