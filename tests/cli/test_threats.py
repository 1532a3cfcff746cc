"""What an attacker and a bad day get, through the real command: one run lost and not all, nothing counted twice, no codes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tracefit.tables.store import TableStore

EVIL = "<img src=x onerror=alert(1)>[a](javascript:alert(1))\x1b[31m\x07"


def _part(tables, name):
    return next((tables / name).rglob("*.parquet"))


@pytest.fixture
def small(new_traces):
    """Return a function that writes a run of a few requests."""

    def write(folder, first=1, **options):
        traces = new_traces(**options)
        for number in range(first, first + 4):
            traces.request(number, 20_000 * number, step=number)
        return traces.steps(traces.summary(1, 5000)).write(folder)

    return write


@pytest.mark.slow
@pytest.mark.parametrize("content", ["", "garbage\n", "{}\n"])
def test_a_run_that_holds_nothing_is_named_and_the_others_are_read(tmp_path, tracefit, small, content):
    for name in ("a", "c"):
        small(tmp_path / "runs" / name)
    bad = small(tmp_path / "runs" / "b") / "traces.json"
    bad.write_text(content)
    code, _, stderr = tracefit("ingest", tmp_path / "runs", "--out", tmp_path / "tables")
    assert code == 3
    assert f"left out: {tmp_path / 'runs' / 'b'}: " in stderr
    assert TableStore(tmp_path / "tables").runs() == ["a", "c"]


def test_inspect_looks_into_the_runs_that_can_be_read(tmp_path, tracefit, small):
    for name in ("a", "b"):
        small(tmp_path / "runs" / name)
    (tmp_path / "runs" / "a" / "traces.json").write_text("")
    _, stdout, stderr = tracefit("inspect", tmp_path / "runs", "--json")
    assert [run["run_id"] for run in json.loads(stdout)["runs"]] == ["b"]
    assert "left out" in stderr


def test_a_window_of_files_that_rotates_stays_one_run(tmp_path, tracefit, small):
    folder = small(tmp_path / "run", 1)
    (folder / "traces.json").rename(folder / "traces-1.json")
    for number in (2, 3):
        (small(tmp_path / str(number), 4 * number) / "traces.json").rename(folder / f"traces-{number}.json")
        assert tracefit("ingest", folder, "--out", tmp_path / "tables")[0] in (0, 3)
        (folder / f"traces-{number - 1}.json").unlink()
    assert TableStore(tmp_path / "tables").runs() == ["run"]


@pytest.mark.slow
def test_spans_of_two_runs_are_warned_of_and_trained_on_once(tmp_path, new_traces, tracefit, quick):
    run = new_traces().load().write(tmp_path / "one" / "run")
    shutil.copytree(run, tmp_path / "two" / "again")
    with (tmp_path / "two" / "again" / "traces.json").open() as lines:
        kept = lines.readlines()[:-30]
    (tmp_path / "two" / "again" / "traces.json").write_text("".join(kept))
    code, _, stderr = tracefit("run", tmp_path / "one", tmp_path / "two", "--out", tmp_path / "out", "--fast")
    assert code == 0
    assert "run again: 151 of its spans are in run run too; it is left out of training" in stderr
    scope = json.loads((tmp_path / "out" / "evaluation.json").read_text())["scopes"][0]
    assert scope["runs"] == ["run"]


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["deleted", "damaged", "exchanged"])
def test_a_part_that_is_not_what_was_written_is_refused_and_repaired(tmp_path, tracefit, small, damage):
    run, tables = small(tmp_path / "run"), tmp_path / "tables"
    small(tmp_path / "other", 50)
    tracefit("ingest", run, "--out", tables)
    tracefit("ingest", tmp_path / "other", "--out", tmp_path / "others")
    before = TableStore(tables).read("requests").rows()
    part = _part(tables, "requests")
    if damage == "deleted":
        part.unlink()
    elif damage == "exchanged":
        shutil.copy(_part(tmp_path / "others", "requests"), part)
    else:
        content = bytearray(part.read_bytes())
        content[40] ^= 1
        part.write_bytes(content)
    code, _, stderr = tracefit("requests", tables)
    assert code == 1
    assert stderr.startswith(f"tracefit: {part}: is ")
    assert stderr.endswith("ingest the run again\n")
    _, _, stderr = tracefit("ingest", run, "--out", tables)
    assert "its tables are damaged" in stderr
    assert TableStore(tables).read("requests").rows() == before


@pytest.mark.slow
def test_names_of_servers_and_requests_reach_no_terminal_and_no_page_as_code(
    tmp_path, new_traces, tracefit, quick
):
    traces = new_traces(server=EVIL).load()
    assert tracefit("run", traces.write(tmp_path / "run"), "--out", tmp_path / "out", "--fast")[0] == 0
    report = (tmp_path / "out" / "report.md").read_text()
    assert "onerror" in report
    assert "<img" not in report
    assert "](javascript" not in report
    told = [
        tracefit("inspect", tmp_path / "out" / "tables"),
        tracefit("requests", tmp_path / "out" / "tables", "--each"),
        tracefit("report", tmp_path / "out"),
    ]
    assert "\\x1b[31m" in told[0][1]
    for text in (report, *(part for one in told for part in one[1:])):
        assert not {"\x1b", "\x07"} & set(text)


@pytest.mark.slow
def test_names_in_coefficient_files_reach_no_terminal_as_code(tmp_path, trained, tracefit):
    models = shutil.copytree(trained / "models", tmp_path / "models")
    for path in models.glob("*.json"):
        text = path.read_text()
        scope = json.loads(text)["models"][0]["scope_id"]
        path.write_text(text.replace(scope, "=evil\\u001b[31m\\u0007"))
    calls = [
        ("compare", models, trained / "models"),
        ("compare", models, models),
        ("verify", models / "beta.json", "--tables", trained / "tables"),
        ("export", models, "--to", "csv", "--out", tmp_path / "csv"),
        ("predict", models, "--batch", "4"),
    ]
    for arguments in calls:
        code, stdout, stderr = tracefit(*arguments)
        assert code in (0, 1, 2)
        assert not {"\x1b", "\x07"} & set(stdout + stderr), arguments
    assert "\n=evil" not in (tmp_path / "csv" / "coefficients.csv").read_text()


def test_an_id_is_no_formula_to_a_spreadsheet(tmp_path, tracefit, traces):
    traces.request(1, 0, step=1, **{"gen_ai.request.id": "=HYPERLINK(1)"})
    tracefit("ingest", traces.write(tmp_path / "run"), "--out", tmp_path / "tables")
    _, stdout, _ = tracefit("requests", tmp_path / "tables", "--each")
    assert ",'=HYPERLINK(1)," in stdout


def test_what_an_error_quotes_of_a_prompt_is_kept_nowhere(tmp_path, tracefit, traces):
    quoted = "patient Jane Doe"
    traces.api(1, {"ARRIVED": 0, "ABORTED": 10}).api(2, {"ARRIVED": 0, "ABORTED": 10})
    spans = [record["scopeSpans"][0]["spans"][0] for record in traces.records]
    for span, reason in zip(spans, (f"error in prompt: {quoted}", "client_disconnect"), strict=True):
        span["status"] = {"code": 2, "message": reason}
        span["events"][1]["attributes"].append({"key": "reason", "value": {"stringValue": reason}})
    folder, tables = traces.write(tmp_path / "run"), tmp_path / "tables"
    tracefit("ingest", folder, "--out", tables)
    store = TableStore(tables)
    assert sorted(store.read("spans")["status_message"]) == ["client_disconnect", "other"]
    assert sorted(store.read("journey_events")["reason"].drop_nulls()) == ["client_disconnect", "other"]
    kept = b"".join(path.read_bytes() for path in tables.rglob("*") if path.is_file())
    assert b"Jane" not in kept


@pytest.mark.parametrize("name", ["exp-config.yaml", "run.yaml", "config.json"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_configuration_that_is_a_pipe_or_a_device_is_refused(tmp_path, tracefit, small, name, kind):
    folder = small(tmp_path / "run")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name) if kind == "pipe" else (folder / name).symlink_to("/dev/zero")
    for given in (folder, folder / "traces.json"):
        code, _, stderr = tracefit("ingest", given, "--out", tmp_path / "tables")
        assert (code, stderr.count("\n")) == (2, 1)
        assert str(folder / name) in stderr


def test_a_trace_that_is_a_device_and_a_part_that_is_a_pipe_end(tmp_path, tracefit, small):
    folder, tables = small(tmp_path / "run"), tmp_path / "tables"
    (folder / "traces-x.json").symlink_to("/dev/zero")
    code, _, stderr = tracefit("ingest", folder, "--out", tables)
    assert code == 0
    assert "traces-x.json: left out, it is no regular file" in stderr
    part = _part(tables, "requests")
    part.unlink()
    os.mkfifo(part)
    code, _, stderr = tracefit("requests", tables)
    assert (code, stderr) == (
        1,
        f"tracefit: {part}: cannot be read (not a regular file); ingest the run again\n",
    )


@pytest.mark.parametrize("out", [["--out", ""], ["--out="]])
def test_an_empty_name_is_not_the_working_folder(tmp_path, monkeypatch, tracefit, small, out):
    run = small(tmp_path / "run")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert tracefit("ingest", run, *out) == (2, "", "tracefit: --out: is empty\n")
    assert list((tmp_path / "here").iterdir()) == []


def test_a_file_that_is_renamed_has_its_new_name(tmp_path, tracefit, small):
    folder, tables = small(tmp_path / "run"), tmp_path / "tables"
    for name in ("traces.json", "traces-new.json"):
        next(folder.glob("traces*")).rename(folder / name)
        tracefit("ingest", folder, "--out", tables)
        assert TableStore(tables).read("spans")["source_file"].unique().to_list() == [str(folder / name)]


@pytest.mark.slow
def test_names_that_are_not_utf_8_are_read_and_not_written(tmp_path, monkeypatch, tracefit, small):
    monkeypatch.setattr("tracefit.commands.reading.BYTES_PER_WORKER", 1)
    folder = small(tmp_path / "run")
    strange = os.fsdecode(os.fsencode(tmp_path) + b"/n\xff")
    folder.rename(strange)
    (Path(strange) / "traces.json").rename(Path(strange) / os.fsdecode(b"traces\xfe.json"))
    code, _, _ = tracefit("ingest", strange, "--out", tmp_path / "tables", "--workers", 2)
    assert code == 0
    assert TableStore(tmp_path / "tables").read("requests").height == 4
    code, _, stderr = tracefit("ingest", strange, "--out", strange + "t")
    assert (code, stderr.count("\n")) == (2, 1)
    assert "is not a name in UTF-8" in stderr


@pytest.mark.parametrize("option", [{"features": 5.0}, {"fast": "yes"}, {"positive": 1.0}])
def test_options_of_a_wrong_type_are_one_line(tmp_path, trained, tracefit, option):
    document = json.loads((trained / "models" / "beta.json").read_text())
    document["provenance"]["options"].update(option)
    (tmp_path / "beta.json").write_text(json.dumps(document))
    code, _, stderr = tracefit("verify", tmp_path / "beta.json", "--tables", trained / "tables")
    assert code in (1, 2)
    assert stderr.count("\n") == 1
    assert next(iter(option)) in stderr


@pytest.mark.slow
def test_a_model_without_a_scope_is_not_verified(tmp_path, trained, tracefit, quick):
    document = json.loads((trained / "models" / "beta.json").read_text())
    del document["models"][0]["scope_id"]
    (tmp_path / "beta.json").write_text(json.dumps(document))
    assert tracefit("verify", tmp_path / "beta.json", "--tables", trained / "tables")[0] == 1


def test_a_feature_of_a_column_of_texts_is_one_line(tmp_path, trained, tracefit, quick):
    (tmp_path / "f.yaml").write_text(
        "name: odd\nfeatures:\n  - {name: x, formula: run_id, unit: token, reason: text}\n"
    )
    tables = shutil.copytree(trained / "tables", tmp_path / "tables")  # training writes its frames there
    code, _, stderr = tracefit(
        "train", tables, "--out", tmp_path / "m", "--features", tmp_path / "f.yaml", "--fast"
    )
    assert code in (0, 1, 2)
    assert stderr.count("\n") <= 1
