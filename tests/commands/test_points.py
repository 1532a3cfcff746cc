"""Points of a benchmark: their table, the reason that nothing is fitted on them, and predictions beside them."""

from __future__ import annotations

import json

import polars as pl
import pytest

import clients
import tracefit
from tracefit.errors import DataError
from tracefit.reports.terminal_results import compare_text
from tracefit.tables.store import TableStore


@pytest.fixture
def points(tmp_path):
    """Write rows of a table of points; each is a concurrency or a rate, a TTFT and a TPOT in ms, a TP, a GPU."""

    def write(*rows, name="points.csv"):
        path = tmp_path / name
        head = "concurrency,request_rate,input_len,output_len,ttft_ms,tpot_ms,tp,comment\n"
        path.write_text(head + "".join(f"{row}\n" for row in rows))
        return path

    return write


def test_points_fill_a_table_and_give_no_model(points, tmp_path):
    path = points("4,,100,20,20.5,7.5,1,x", "8,,100,20,30.5,8.5,1,y", "8,,100,20,30.5,8.5,1,y")
    with pytest.raises(DataError, match="points of a benchmark give no model of steps") as error:
        tracefit.run(path, out=tmp_path / "out")
    assert "record single requests" in str(error.value)
    rows = TableStore(tmp_path / "out/tables").read("points").sort("concurrency")
    # One is there twice.
    assert rows["concurrency"].to_list() == [4, 8]
    assert rows["ttft_mean_us"].to_list() == [20_500, 30_500]
    assert rows["unread"].to_list() == ['["comment"]'] * 2


def test_the_reason_names_how_the_program_writes_requests(tmp_path):
    path = tmp_path / "sglang.jsonl"
    path.write_bytes(clients.sglang_bench(clients.planned(10), details=False))
    with pytest.raises(DataError, match=r"sglang\.bench_serving --output-details writes them"):
        tracefit.run(path, out=tmp_path / "out")


def test_requests_without_arrivals_say_so(tmp_path):
    path = tmp_path / "sglang.jsonl"
    path.write_bytes(clients.sglang_bench(clients.planned(40), request_rate=4.0))
    with pytest.raises(DataError, match="does not say when it sent the requests"):
        tracefit.run(path, out=tmp_path / "out")
    requests = TableStore(tmp_path / "out/tables").read("requests")
    assert requests["arrival_ns"].null_count() == requests.height == 40
    assert requests["client_ttft_us"].count() == 40


def traced(folder):
    """Write a run of an unmodified vLLM, whose resource names only the service."""
    keys = {"gen_ai.request.id": {"stringValue": "cmpl-1"}, "gen_ai.latency.e2e": {"doubleValue": 0.5}}
    span = {
        "traceId": "1" * 32,
        "spanId": "2" * 16,
        "name": "llm_request",
        "startTimeUnixNano": "1790000005000000000",
        "endTimeUnixNano": "1790000005500000000",
        "attributes": [{"key": key, "value": value} for key, value in keys.items()],
    }
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "engine"}}]}
    scopes = [{"scope": {"name": "vllm.tracing.otel"}, "spans": [span]}]
    folder.mkdir(parents=True)
    document = {"resourceSpans": [{"resource": resource, "scopeSpans": scopes}]}
    (folder / "traces.json").write_text(json.dumps(document) + "\n")
    return folder


@pytest.mark.slow
def test_points_beside_traces_change_no_request(points, tmp_path):
    alone, beside = (traced(tmp_path / name / "run") for name in ("alone", "beside"))
    (beside / "points.csv").write_bytes(points("4,,100,20,20.5,7.5,1,x").read_bytes())
    for folder in (alone, beside):
        tracefit.ingest(folder, folder.parent / "tables")
    without, stores = (TableStore(folder.parent / "tables") for folder in (alone, beside))
    assert stores.read("requests").equals(without.read("requests"))
    assert stores.read("requests")["server"].to_list() == ["engine"]
    assert stores.read("points").height == 1


def predictions(point):
    return {each.name: each.predicted_us for each in point.latencies}


def test_one_request_at_a_time_takes_the_model_s_steps(trained, points):
    (point,) = tracefit.compare(trained, points("1,,64,9,20,10,1,x")).points
    models = tracefit.load(trained)
    alone = {"num_decode_reqs": 1, "decode_tokens": 1, "num_prefill_reqs": 0, "prefill_tokens": 0}
    step = pl.DataFrame([alone | {"running_depth": 1, "kv_usage_ratio": 0.0}])
    mean_us = models.predict_step(step)["predicted_us"].mean()
    predicted = predictions(point)
    assert predicted["tpot_mean"] == pytest.approx(mean_us, rel=0.02)
    (tpot,) = (each for each in point.latencies if each.name == "tpot_mean")
    assert tpot.measured_us == 10_000
    assert tpot.error_pct == pytest.approx(100 * (predicted["tpot_mean"] / 10_000 - 1))


def test_more_requests_at_a_time_take_longer(trained, points):
    result = tracefit.compare(trained, points("1,,64,20,20,10,1,x", "16,,64,20,20,10,1,x", ",0.01,64,20,20,10,1,x"))
    alone, many, seldom = map(predictions, result.points)
    assert many["ttft_mean"] > alone["ttft_mean"]
    assert many["tpot_mean"] > alone["tpot_mean"]
    # A request each hundred seconds is alone too.
    assert seldom["tpot_mean"] == pytest.approx(alone["tpot_mean"], rel=0.02)
    assert (result.points[2].concurrency, result.points[2].rate_per_s) == (None, 0.01)
    assert "1 column not read: comment" in result.notes


@pytest.mark.slow
def test_a_point_of_another_server_is_not_compared(tracefit, trained, points):
    path = points("1,,64,20,20,10,1,x", "1,,64,20,20,10,8,x", ",,64,20,20,10,1,x", "2,,,20,20,10,1,x")
    code, out, _ = tracefit("compare", trained, path, "--json")
    result = json.loads(out)
    assert code == 3
    assert [p["reason"] for p in result["points"]] == [
        None,
        "it has 8 GPUs of tensor parallelism, the deployment 1",
        "neither a concurrency nor a rate is known",
        "no prompt_tokens",
    ]
    code, out, _ = tracefit("compare", trained, path)
    assert code == 3
    assert "point 2 (points.csv) is not compared: it has 8 GPUs" in " ".join(out.split())


@pytest.mark.slow
def test_points_in_tables_are_compared_too(trained, points, tmp_path):
    path = points("1,,64,20,20,10,1,x")
    tracefit.ingest(path, tmp_path / "tables")
    of_file, of_tables = (tracefit.compare(trained, each).points for each in (path, tmp_path / "tables"))
    assert of_file == of_tables


def test_a_recording_without_points_says_what_a_point_is(trained, tmp_path):
    path = tmp_path / "log.json"
    path.write_bytes(clients.inference_perf(clients.planned(10)))
    with pytest.raises(DataError, match="holds no point of a benchmark; a point has"):
        tracefit.compare(trained, path)


# -- the deployment of a point, and its settings ------------------------------------------------------------------


@pytest.fixture
def two_servers(trained, tmp_path):
    """Return coefficient files of the trained deployment and of another model on H100s whose steps take ten times as
    long."""

    def of_other(model):
        other = json.loads(json.dumps(model))
        other["deployment_id"] = "other-70b.h100.tp2.00000000"
        facts = other["deployment"]
        facts |= {"model": "org/Other-70B", "gpu": "H100"}
        facts["settings"] |= {"model": "org/Other-70B", "gpu": "H100", "tensor_parallel": 2}
        return other

    folder = tmp_path / "models"
    folder.mkdir()
    for name in ("alpha.json", "beta.json"):
        (path,) = trained.rglob(name)
        document = json.loads(path.read_text())
        for model in document["models"]:
            model["deployment"]["settings"]["num_gpu_blocks"] = 2_000
        others = [of_other(model) for model in document["models"]]
        if name == "beta.json":
            for each in others[0]["terms"], [others[0]["intercept"]]:
                for number in each:
                    number["value"] *= 10
                    number["ci95"] = number["ci95"] and [10 * end for end in number["ci95"]]
        document["models"] += others
        (folder / name).write_text(json.dumps(document))
    return folder


OF_SERVERS = "concurrency,input_len,output_len,tpot_ms,model,gpu,tp\n"


def test_the_model_of_a_point_chooses_its_deployment(two_servers, tmp_path):
    rows = [
        "Llama-2-7b-hf,,",
        "/models/other-70b,,",
        "other-70b,H100,2",
        ",H100,",
        "other-70b,A100,2",
        "third-8b,,",
        ",,",
    ]
    path = tmp_path / "points.csv"
    path.write_text(OF_SERVERS + "".join(f"1,64,9,10,{row}\n" for row in rows))
    result = tracefit.compare(two_servers, path)
    ids = [point.deployment_id for point in result.points]
    llama, other = (next(d for d in ids if d and d.startswith(name)) for name in ("llama", "other"))
    assert ids == [llama, other, other, None, None, None, None]
    small, large = (predictions(result.points[n])["tpot_mean"] for n in (0, 1))
    assert large == pytest.approx(10 * small, rel=1e-3)
    reasons = [point.reason or "" for point in result.points]
    # The trained deployment states no GPU, so that it may be on one.
    assert "are like it: name one with" in reasons[3]
    assert "none of the 2 deployments is like it: " in reasons[4]
    assert "its GPU is A100, that of the deployment H100" in reasons[4]
    assert "its model is third-8b" in reasons[5]
    assert f"{llama} and {other} are like it" in reasons[6]
    head, first, *_ = compare_text(result).splitlines()
    assert head.endswith("deployment")
    assert first.endswith(llama)


def test_a_named_deployment_counts_more_than_a_client_s_name_of_its_model(two_servers, tmp_path):
    path = tmp_path / "points.csv"
    path.write_text(OF_SERVERS + "1,64,9,10,served-as-this,,\n1,64,9,10,served-as-this,,8\n")
    first, second = tracefit.compare(two_servers, path, deployment="other").points
    assert first.deployment_id.startswith("other")
    assert second.reason == "it has 8 GPUs of tensor parallelism, the deployment 2"


def test_settings_of_a_point_are_those_of_its_server(trained, tmp_path):
    path = tmp_path / "points.csv"
    rows = "16,64,20,20,\n16,64,20,20,64\n16,64,20,20,1\n16,64,20,20,1.0\n16,64,20,20,many\n"
    path.write_text("concurrency,input_len,output_len,ttft_ms,max_num_seqs\n" + rows)
    usual, same, alone, again, wrong = tracefit.compare(trained, path).points
    assert predictions(usual) == predictions(same)
    # Fifteen of sixteen wait, each for all that are before it.
    assert predictions(alone)["ttft_mean"] > 5 * predictions(usual)["ttft_mean"]
    assert predictions(alone) == predictions(again)
    assert "max_num_seqs" in wrong.reason


def test_a_setting_of_another_server_is_a_reason(trained, tmp_path):
    path = tmp_path / "points.csv"
    path.write_text(
        "concurrency,input_len,output_len,ttft_ms,enforce_eager\n1,64,20,20,false\n1,64,20,20,true\n1,64,20,20,\n"
    )
    reasons = [point.reason for point in tracefit.compare(trained, path).points]
    assert reasons == [None, "its enforce_eager is True, that of the deployment False", None]


def test_limits_of_the_scheduler_come_from_the_points_where_the_models_lack_them(two_servers, tmp_path):
    for name in ("alpha.json", "beta.json"):
        document = json.loads((two_servers / name).read_text())
        for model in document["models"]:
            for setting in ("max_num_seqs", "max_num_batched_tokens"):
                model["deployment"]["settings"].pop(setting)
        (two_servers / name).write_text(json.dumps(document))
    path = tmp_path / "points.csv"
    path.write_text("concurrency,input_len,output_len,ttft_ms\n1,64,20,20\n")
    with pytest.raises(DataError) as error:
        tracefit.compare(two_servers, path, deployment="llama")
    text = error.value.line()
    assert "max_num_seqs and max_num_batched_tokens of the server are unknown" in text
    assert "or give the points the columns max_num_seqs and max_num_batched_tokens" in text
    path.write_text(
        "concurrency,input_len,output_len,ttft_ms,max_num_seqs,max_num_batched_tokens\n1,64,20,20,64,2048\n"
    )
    (point,) = tracefit.compare(two_servers, path, deployment="llama").points
    assert point.reason is None


def test_the_number_of_kv_blocks_comes_from_the_points_too(trained, tmp_path):
    """Files without their tables do not show it."""
    folder = tmp_path / "models"
    folder.mkdir()
    for name in ("alpha.json", "beta.json"):
        (path,) = trained.rglob(name)
        (folder / name).write_bytes(path.read_bytes())
    path = tmp_path / "points.csv"
    path.write_text("concurrency,input_len,output_len,ttft_ms,num_gpu_blocks\n1,64,20,20,\n1,64,20,20,2000\n")
    without, stated = tracefit.compare(folder, path).points
    assert without.reason.endswith("; or give the points the column num_gpu_blocks")
    assert stated.reason is None


# -- times between single tokens ----------------------------------------------------------------------------


def test_percentiles_of_the_time_between_tokens_are_predicted(trained, tmp_path):
    path = tmp_path / "points.csv"
    path.write_text(
        "concurrency,request_rate,input_len,output_len,mean_tpot_ms,mean_itl_ms,p50_itl_ms,p99_itl_ms\n"
        "16,,512,20,10,10,10,10\n,4,512,20,10,10,10,10\n1,,512,20,10,10,10,10\n4,,64,1,10,10,10,10\n"
    )
    result = tracefit.compare(trained, path)
    busy, at_rate, alone, single = result.points
    for point in (busy, at_rate, alone):
        got = predictions(point)
        # Every request has as many tokens, so that the mean over tokens is that over requests.
        assert got["itl_mean"] == pytest.approx(got["tpot_mean"], rel=0.02)
        assert got["itl_p50"] <= got["itl_p99"]
    # A step with another request's prompt takes longer.
    assert predictions(busy)["itl_p99"] > 1.2 * predictions(busy)["itl_p50"]
    # Alone, the times grow only with the context.
    assert predictions(alone)["itl_p99"] < 1.1 * predictions(alone)["itl_p50"]
    assert single.reason == "none of its latencies is predicted"
    assert not any("single tokens" in note for note in result.notes)


# -- the report ---------------------------------------------------------------------------------------------


def section_of(folder):
    """Return the section on points of a report's text, without the alignment of its table."""
    text = (folder / "report.md").read_text()
    begin = text.index("## Points of a benchmark")
    page = folder / "report.html"
    assert not page.exists() or "Points of a benchmark" in page.read_text()
    return text[begin : text.index("\n## ", begin + 1)]


def test_the_report_shows_points_without_models(points, tmp_path):
    path = points("4,,100,20,20.5,7.5,1,x", ",2.5,64,8,30.25,8.5,1,y")
    with pytest.raises(DataError):
        tracefit.run(path, out=tmp_path / "out")
    text = section_of(tmp_path / "out")
    assert "no request and no step: no model of steps is fitted on it." in text
    assert "| 1 | 4 at a time | 100 | 20 | TTFT | 20.5 |  |  |  |  |" in text
    assert "|  |  |  |  | TPOT | 7.5 |  |  |  |  |" in text
    assert "| 2 | 2.5/s | 64 | 8 | TTFT | 30.2 |  |  |  |  |" in text
    assert "Columns that are not read: `comment`." in text
    assert "tracefit compare" in text


@pytest.mark.slow
def test_the_report_of_a_fitted_run_has_predictions_beside_its_points(new_traces, points, quick, tmp_path):
    run = new_traces().load().write(tmp_path / "runs/busy")
    rows = ("1,,64,9,20,10,1,x", "1,,64,9,20,10,8,x")
    (tmp_path / "runs/bench").mkdir()
    (tmp_path / "runs/bench/points.csv").write_bytes(points(*rows).read_bytes())
    tracefit.run([run, tmp_path / "runs/bench"], out=tmp_path / "out", options=quick)
    text = section_of(tmp_path / "out")
    compared = tracefit.compare(tmp_path / "out", points(*rows)).points
    (tpot,) = (each for each in compared[0].latencies if each.name == "tpot_mean")
    assert f"| TPOT | 10 / {tpot.predicted_us / 1e3:.3g} |" in text
    assert "Point 2 is not compared: it has 8 GPUs of tensor parallelism, the deployment 1." in text
    before = (tmp_path / "out/report.md").read_bytes()
    tracefit.report(tmp_path / "out")
    assert (tmp_path / "out/report.md").read_bytes() == before
