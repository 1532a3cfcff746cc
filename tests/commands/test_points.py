"""Points of a benchmark: their table, the reason that nothing is fitted on them, and predictions beside them."""

from __future__ import annotations

import json

import polars as pl
import pytest

import clients
import tracefit
from tracefit.errors import DataError
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
    result = tracefit.compare(
        trained, points("1,,64,20,20,10,1,x", "16,,64,20,20,10,1,x", ",0.01,64,20,20,10,1,x")
    )
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
