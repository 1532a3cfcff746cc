"""The package as a Python program uses it: paths of any kind, the folder `run` wrote, names in errors."""

from __future__ import annotations

import shutil
from functools import partial
from itertools import chain, repeat
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest

import tracefit
from tracefit.commands.ingest import plan_ingest
from tracefit.engines.jobs import Job
from tracefit.engines.local import LocalEngine
from tracefit.errors import naming_flags
from tracefit.options import DeploymentOption, IngestOptions, RunOption, TablesArgument, flag_of, named
from tracefit.reports.trained import RunResult, TrainResult
from tracefit.tables.schema import INGEST_TABLES
from tracefit.tables.store import TableStore

SCHEMAS = Path(__file__).parents[1] / "schemas" / "tables"


@pytest.mark.parametrize("kind", [str, Path, lambda p: [str(p)], lambda p: (p for p in [p])])
def test_paths_are_one_path_or_several(traces, tmp_path, kind):
    folder = traces.load(steps=40, requests=5).write(tmp_path / "busy")
    plan = plan_ingest(kind(folder), tmp_path / "tables")
    assert {f.run_id for f in plan.files} == {"busy"}


@pytest.mark.slow
def test_one_path_is_not_read_letter_by_letter(traces, tmp_path):
    folder = traces.load(steps=40, requests=5).write(tmp_path / "busy")
    assert [r.run_id for r in tracefit.inspect(str(folder)).runs] == ["busy"]
    assert [r.run_id for r in tracefit.ingest(str(folder), tmp_path / "tables").runs] == ["busy"]


def test_models_load_and_show_themselves(trained):
    models = tracefit.Models.load(trained)
    (deployment,) = models.deployment_ids
    assert "beta.cycle_time" in repr(models)
    assert deployment in repr(models)
    assert "beta.cycle_time" in repr(models.deployment())
    assert models.model("beta.cycle_time").deployment_id == deployment


def test_commands_take_the_folder_that_run_wrote(trained, tmp_path):
    assert tracefit.requests(trained).total.requests == 90
    assert [r.run_id for r in tracefit.inspect(trained).runs] == ["busy"]
    assert tracefit.export(trained, "csv", tmp_path / "csv").files
    assert tracefit.compare(trained, trained).models
    (tmp_path / "rows.csv").write_text("batch,prefill,kv_usage_ratio\n4,40,0.1\n")
    assert tracefit.predict(trained, tmp_path / "rows.csv", run="busy").rows == 1


def test_tables_are_one_call_away(trained, tmp_path):
    folder = tmp_path / "out"
    shutil.copytree(trained, folder)
    lazy = tracefit.scan(folder, "requests")
    for name in INGEST_TABLES:
        assert tracefit.scan(folder, name).collect().height == TableStore(folder / "tables").read(name).height, name
    assert isinstance(lazy, pl.LazyFrame)
    stored = pl.concat(pl.read_parquet(p) for p in (folder / "tables/requests").rglob("*.parquet"))
    assert lazy.collect().equals(stored.with_columns(pl.col("run_id").cast(pl.String)))
    assert tracefit.scan(folder / "tables", "timeline", run="busy").select(pl.len()).collect().item() == 240
    with pytest.raises(tracefit.UsageError, match="no table timelin; did you mean timeline"):
        tracefit.scan(folder, "timelin")
    with pytest.raises(tracefit.UsageError, match="no run buzy; did you mean busy"):
        tracefit.scan(folder, "requests", run="buzy")
    with pytest.raises(tracefit.UsageError, match="holds no tables"):
        tracefit.scan(tmp_path / "nowhere", "requests")


@pytest.mark.slow
def test_a_result_has_the_tables_of_its_own_runs(trained, new_traces, tmp_path):
    """Not those of earlier runs in the same folder."""
    for name, requests in (("one", 3), ("two", 5)):
        ingested = tracefit.ingest(
            new_traces().load(steps=40, requests=requests).write(tmp_path / name), tmp_path / "tables"
        )
    result = RunResult(ingested, TrainResult(*[tmp_path] * 4, (), ()))
    assert result.tables["requests"]["run_id"].to_list() == ["two"] * 5
    assert result.tables.scan("steps").select("run_id").unique().collect().item() == "two"
    assert set(result.tables) == {p.stem for p in SCHEMAS.glob("*.json")}
    assert {"kv_events", "rejects"} <= set(result.tables)
    assert "timeline" in repr(result.tables)
    assert (
        tracefit.scan(result.tables, "steps").collect().height
        == tracefit.scan(ingested.tables, "steps").collect().height
    )
    with pytest.raises(KeyError, match="no such"):
        result.tables["no such"]


def test_a_deployment_is_chosen_by_the_name_of_a_run(trained, tmp_path):
    assert tracefit.export(trained, "csv", tmp_path, run="busy").deployment_id
    with pytest.raises(tracefit.UsageError, match="did you mean busy"):
        tracefit.export(trained, "csv", tmp_path, run="buzy")
    with pytest.raises(tracefit.UsageError, match="run busy is not of deployment other"):
        tracefit.export(trained, "csv", tmp_path, run="busy", deployment="other")


def test_texts_name_options_as_their_reader_does():
    assert f"{named(DeploymentOption)} or {named(RunOption)}" == "`deployment` or `run`"
    assert named(IngestOptions, "max_document_mib") == "`IngestOptions.max_document_mib`"
    with naming_flags():
        assert f"{named(DeploymentOption)} or {named(RunOption)}" == "--deployment or --run"
        assert named(IngestOptions, "max_document_mib") == "--max-document"
        assert named(TablesArgument) == "`tables`", "an argument has no flag"
        assert named(IngestOptions, "block_bytes") == "`IngestOptions.block_bytes`", "not on the command line"
    assert flag_of(IngestOptions, "max_document_mib") == "--max-document", "a file has any reader"


@pytest.mark.slow
def test_a_worker_names_options_as_its_parent_does():
    one = Job(partial(named, IngestOptions), "max_rejects", "options", None)
    for flags, name in ((False, "`IngestOptions.max_rejects`"), (True, "--max-rejects")):
        with naming_flags(flags=flags), LocalEngine(2) as engine:
            done = [value for _, value in engine.run(chain([one, one], repeat(None)).__next__)]
        assert done == [name, name]


class ArrowFrame:
    """A frame of a library that narwhals does not know, and that exports Arrow."""

    def __init__(self, columns):
        self._table = pa.table(columns)

    def __arrow_c_stream__(self, requested_schema=None):
        return self._table.__arrow_c_stream__(requested_schema)


def _pandas(columns):
    return pytest.importorskip("pandas").DataFrame(columns, index=[3, 7])


def _duckdb(columns):
    rows = pa.table(columns)  # noqa: F841 - DuckDB finds it by its name
    return pytest.importorskip("duckdb").sql("SELECT * FROM rows")


def _rows(columns):
    return (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))


FRAMES = {
    "polars": (pl.DataFrame, "polars"),
    "polars, lazy": (pl.LazyFrame, "polars"),
    "pandas": (_pandas, "pandas"),
    "pyarrow": (pa.table, "pyarrow"),
    "duckdb": (_duckdb, "polars"),
    "Arrow": (ArrowFrame, "polars"),
    "columns by name": (dict, "polars"),
    "one mapping per row": (lambda columns: list(_rows(columns)), "polars"),
    "a generator of mappings": (_rows, "polars"),
}
"""Kind of rows to how they are made, and the library that their predictions come back in."""


@pytest.mark.mostly_slow(every=5)
@pytest.mark.parametrize("kind", FRAMES)
def test_rows_of_any_frame_are_predicted(trained, kind):
    models = tracefit.Models.load(trained)
    make, library = FRAMES[kind]
    found = models.predict_step(make({"batch": [4, 9], "prefill": [40.0, 0.0], "kv_usage_ratio": [0.1, 0.2]}))
    assert type(found).__module__.split(".")[0] == library
    steps = pl.DataFrame(found)
    assert steps.columns[:3] == ["batch", "prefill", "kv_usage_ratio"], "an index is not a column"
    assert steps.columns[3:] == ["predicted_us", "low_us", "high_us", "out_of_range"]
    assert steps["predicted_us"].to_list() == [
        pytest.approx(models.predict_step(batch=b, prefill=p, features={"kv_usage_ratio": kv}).step.value_us)
        for b, p, kv in ((4, 40, 0.1), (9, 0, 0.2))
    ]
    requests = models.predict_request(make({"prompt_tokens": [40, 90], "output_tokens": [10, 20]}))
    assert pl.DataFrame(requests)["itl_us"].to_list() == [
        pytest.approx(models.predict_request(prompt_tokens=p, output_tokens=o).itl.value_us)
        for p, o in ((40, 10), (90, 20))
    ]
    rows = make({"batch": [4, 9], "kv_usage_ratio": [0.1, 0.2]})
    assert tracefit.predict(models, rows).rows == 2, "the command takes them too"


def test_a_row_of_a_pandas_frame_is_a_row(trained):
    models = tracefit.load(trained)
    rows = _pandas({"batch": [4, 9], "kv_usage_ratio": [0.1, 0.2]})
    (predicted,) = models.predict_step(rows.iloc[0])["predicted_us"]
    expected = models.predict_step(batch=4, features={"kv_usage_ratio": 0.1})
    assert predicted == pytest.approx(expected.step.value_us)
    (row,) = tracefit.predict(models, rows.iloc[0]).predictions
    assert row["predicted_us"] == pytest.approx(expected.step.value_us)


def test_misspelt_column_is_a_python_warning(trained):
    with pytest.warns(UserWarning, match=r"rows: no model .* reads batsh \(did you mean batch\?\)"):
        tracefit.predict(trained, [{"batsh": 4, "batch": 3, "kv_usage_ratio": 0.1}])


def test_all_coefficients_are_a_frame(trained):
    models = tracefit.load(trained)
    frame = models.coefficients
    step = models.model("beta.cycle_time")
    values = frame.filter(model="beta.cycle_time", part="line").select("term", "value").rows()
    assert values == [("intercept", step.intercept.value), *((t.feature, t.value) for t in step.terms)]
    assert set(frame["model"]) == {
        "beta.cycle_time",
        "alpha.queue_wait",
        "alpha.admission",
        "alpha.departure",
    }


def test_predictions_of_a_pandas_frame_keep_its_index(trained):
    pandas = pytest.importorskip("pandas")
    rows = pandas.DataFrame(
        {"batch": [4, None, 60], "kv_usage_ratio": 0.1, "name": ["a", "b", "c"]}, index=["x", "y", "x"]
    )
    found = tracefit.load(trained).predict_step(rows)
    assert list(found.index) == ["x", "y", "x"]
    assert list(found["name"]) == ["a", "b", "c"]
    assert found["predicted_us"].dtype == "float64"
    assert found["predicted_us"].isna().tolist() == [False, True, False]
    assert found["out_of_range"].isna().tolist() == [True, True, False]
    assert "predicted_us" not in rows.columns


def test_unknown_setting_is_named_for_frames_and_steps(trained):
    models = tracefit.load(trained)
    lines = []
    for ask in (lambda: models.predict_step(batch=4), lambda: models.predict_step({"batch": [4, 9]})):
        with pytest.raises(tracefit.UsageError, match="needs num_gpu_blocks, which is not given") as raised:
            ask()
        lines.append(str(raised.value))
    assert all("\n" not in line for line in lines)
    assert all("give it (or kv_usage_ratio instead) with `features`, or as a column of `rows`" in x for x in lines)
    rows = {"batch": [4, 9], "num_gpu_blocks": [1000, None]}
    predicted = models.predict_step(rows)["predicted_us"].to_list()
    one = models.predict_step(batch=4, features={"num_gpu_blocks": 1000})
    assert predicted == [pytest.approx(one.step.value_us), None], "a null in a row is a null prediction"


@pytest.mark.parametrize("rows", ["batch", 7, [1, 2], [["batch", 4]], {"batch": [1, 2], "prefill": [1]}])
def test_what_is_no_rows_is_refused_in_one_line(trained, rows):
    with pytest.raises(tracefit.UsageError, match="rows"):
        tracefit.Models.load(trained).predict_step(rows)


@pytest.mark.slow
def test_server_settings_have_the_names_of_the_command_line(trained, tmp_path, traces):
    folder = traces.load(steps=30, requests=10).write(tmp_path / "run")
    server = tracefit.ServerOptions(settings={"max_num_seqs": 17, "tp": 2})
    (run,) = tracefit.ingest(folder, tmp_path / "tables", server=server).runs
    assert ".tp2." in run.deployment_id
    settings = tracefit.scan(tmp_path / "tables", "runs").collect()["settings"].item()
    assert '"max_num_seqs": {"value": 17' in settings
    for wrong, says in (
        ({"max_num_seq": 3}, "did you mean max_num_seqs"),
        ({"max_num_seqs": "many"}, "max_num_seqs"),
    ):
        with pytest.raises(tracefit.UsageError, match=says):
            tracefit.inspect(folder, server=tracefit.ServerOptions(settings=wrong))


def test_models_load_one_path_or_several(trained):
    files = [trained / "models" / "alpha.json", str(trained / "models" / "beta.json")]
    for paths in ((files,), files, (iter(files),)):
        assert tracefit.load(*paths).deployment_ids == tracefit.load(trained).deployment_ids
