"""The package as a Python program uses it: paths of any kind, the folder `run` wrote, names in errors."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest

import tracefit
from tracefit.commands.plan import plan_ingest


def test_the_package_lists_its_commands():
    listed = dir(tracefit)
    assert {
        "run",
        "ingest",
        "train",
        "inspect",
        "requests",
        "predict",
        "export",
        "compare",
        "verify",
        "report",
    } <= set(listed)
    assert {"load", "Models", "TrainOptions"} <= set(listed)


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
    (scope,) = models.scope_ids
    assert "beta.cycle_time" in repr(models)
    assert scope in repr(models)
    assert "beta.cycle_time" in repr(models.scope())
    assert models.model("beta.cycle_time").scope_id == scope


def test_commands_take_the_folder_that_run_wrote(trained, tmp_path):
    assert tracefit.requests(trained).total.requests == 90
    assert [r.run_id for r in tracefit.inspect(trained).runs] == ["busy"]
    assert tracefit.export(trained, "csv", tmp_path / "csv").files
    assert tracefit.compare(trained, trained).models
    (tmp_path / "rows.csv").write_text("batch,prefill\n4,40\n")
    assert tracefit.predict(trained, tmp_path / "rows.csv", run="busy").rows == 1


def test_a_scope_is_chosen_by_the_name_of_a_run(trained, tmp_path):
    assert tracefit.export(trained, "csv", tmp_path, run="busy").scope_id
    with pytest.raises(tracefit.UsageError, match="did you mean busy"):
        tracefit.export(trained, "csv", tmp_path, run="buzy")
    with pytest.raises(tracefit.UsageError, match="run busy is not of scope other"):
        tracefit.export(trained, "csv", tmp_path, run="busy", scope="other")


def test_errors_name_parameters_in_python_and_flags_on_the_command_line():
    error = tracefit.UsageError("several scopes are there", hint="name one with --scope or --run: a, b")
    assert str(error) == "several scopes are there; name one with `scope` or `run`: a, b"
    assert error.line() == "several scopes are there; name one with --scope or --run: a, b"
    server = tracefit.DataError("no steps", hint="start it with --step-tracing-enabled --run-config-x")
    assert str(server).endswith("--step-tracing-enabled --run-config-x"), "flags of others stay flags"


class OldFrame:
    """A frame of another library that has the interchange protocol alone, as pandas before 2.2."""

    def __init__(self, columns):
        self._table = pa.table(columns)

    def __dataframe__(self, *, allow_copy=True):
        return self._table.__dataframe__(allow_copy=allow_copy)


class NewFrame:
    """A frame of another library that exports Arrow, with the index a selection of rows leaves in pandas."""

    def __init__(self, columns):
        self._table = pa.table({**columns, "__index_level_0__": [3, 7]})

    def __arrow_c_stream__(self, requested_schema=None):
        return self._table.__arrow_c_stream__(requested_schema)


FRAMES = {
    "polars": pl.DataFrame,
    "polars, lazy": pl.LazyFrame,
    "pyarrow": pa.table,
    "columns by name": dict,
    "one mapping per row": lambda columns: [
        dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
    ],
    "a generator of mappings": lambda columns: (
        dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
    ),
    "Arrow": NewFrame,
    "interchange": OldFrame,
    "pandas": lambda columns: pytest.importorskip("pandas").DataFrame(columns, index=[3, 7]),
}


@pytest.mark.parametrize("kind", FRAMES)
def test_rows_of_any_frame_are_predicted(trained, kind):
    models = tracefit.Models.load(trained)
    steps = models.predict_step(
        FRAMES[kind]({"batch": [4, 9], "prefill": [40.0, 0.0], "kv_usage_ratio": [0.1, 0.2]})
    )
    assert steps.columns[:3] == ["batch", "prefill", "kv_usage_ratio"], "an index is no column"
    assert steps.columns[3:] == ["predicted_us", "low_us", "high_us", "out_of_range"]
    assert steps["predicted_us"].to_list() == [
        pytest.approx(models.predict_step(batch=b, prefill=p, features={"kv_usage_ratio": kv}).step.value_us)
        for b, p, kv in ((4, 40, 0.1), (9, 0, 0.2))
    ]
    requests = FRAMES[kind]({"prompt_tokens": [40, 90], "output_tokens": [10, 20]})
    assert models.predict_request(requests)["itl_us"].to_list() == [
        pytest.approx(models.predict_request(prompt_tokens=p, output_tokens=o).itl.value_us)
        for p, o in ((40, 10), (90, 20))
    ]
    rows = FRAMES[kind]({"batch": [4, 9]})
    assert tracefit.predict(models, rows).rows == 2, "the command takes them too"


@pytest.mark.parametrize("rows", ["batch", 7, [1, 2], [["batch", 4]], {"batch": [1, 2], "prefill": [1]}])
def test_what_is_no_rows_is_refused_in_one_line(trained, rows):
    with pytest.raises(tracefit.UsageError, match="rows"):
        tracefit.Models.load(trained).predict_step(rows)


def test_models_load_one_path_or_several(trained):
    files = [trained / "models" / "alpha.json", str(trained / "models" / "beta.json")]
    for paths in ((files,), files, (iter(files),)):
        assert tracefit.load(*paths).scope_ids == tracefit.load(trained).scope_ids
