"""Hostile and damaged input through the real command: one run lost and not all, nothing counted twice, no codes."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from containers import framed, record, span, to_json, to_protobuf, zstd
from tracefit import IngestOptions, ingest
from tracefit.features.targets import TARGETS
from tracefit.tables.store import TableStore

MODELS = Path(__file__).parents[2] / "models"
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


@pytest.fixture
def loose(tmp_path, small):
    """Return a function that writes loose files (no configuration lies beside them), each with spans of its own."""

    def write(number):
        file = small(tmp_path / f"made-{number}", 4 * number) / "traces.json"
        (tmp_path / "loose").mkdir(exist_ok=True)
        return file.rename(tmp_path / "loose" / f"traces-{number}.json")

    return write


@pytest.mark.parametrize(
    "named",
    ["each", pytest.param("pattern", marks=pytest.mark.slow), pytest.param("folder", marks=pytest.mark.slow)],
)
def test_a_window_of_loose_files_that_rotates_stays_one_run(tmp_path, tracefit, loose, named):
    """The oldest is deleted, a new one comes: run after run."""
    tables, files = tmp_path / "tables", [loose(1), loose(2)]
    for number in (3, 4):
        paths = {"each": files, "pattern": [tmp_path / "loose" / "*.json"], "folder": [tmp_path / "loose"]}
        tracefit("ingest", *paths[named], "--out", tables)
        files.pop(0).unlink()
        files.append(loose(number))
    paths = {"each": files, "pattern": [tmp_path / "loose" / "*.json"], "folder": [tmp_path / "loose"]}
    code, _, stderr = tracefit("ingest", *paths[named], "--out", tables)
    assert (code in (0, 3), "another run" in stderr) == (True, False)
    store = TableStore(tables)
    assert len(store.runs()) == 1
    assert store.read("spans")["source_file"].unique().sort().to_list() == list(map(str, files))


@pytest.mark.slow
def test_a_window_of_two_loose_files_of_which_one_grew_stays_one_run(tmp_path, tracefit, loose):
    first, second = loose(1), loose(2)
    tracefit("ingest", first, second, "--out", tmp_path / "tables")
    first.unlink()
    second.write_text(second.read_text() + loose(9).read_text())
    assert "another run" not in tracefit("ingest", second, loose(3), "--out", tmp_path / "tables")[2]
    assert len(TableStore(tmp_path / "tables").runs()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "difference", ["the old file is still there", "no file is left", "the file of a name has other content"]
)
def test_loose_files_that_are_no_window_of_the_same_files_are_another_run(
    tmp_path, tracefit, loose, difference
):
    first, second, third = loose(1), loose(2), loose(3)
    tracefit("ingest", first, second, "--out", tmp_path / "tables")
    given = [second, third]
    if difference != "the old file is still there":
        first.unlink()
    if difference == "no file is left":
        given = [third, loose(4)]
        second.unlink()
    if difference == "the file of a name has other content":
        second.write_text(loose(9).read_text())
    _, _, stderr = tracefit("ingest", *given, "--out", tmp_path / "tables")
    assert "another run of that name is in the tables already" in stderr
    assert len(TableStore(tmp_path / "tables").runs()) == 2


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
    deployment = json.loads((tmp_path / "out" / "evaluation.json").read_text())["deployments"][0]
    assert deployment["runs"] == ["run"]


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
    messages = [
        tracefit("inspect", tmp_path / "out" / "tables"),
        tracefit("requests", tmp_path / "out" / "tables", "--each"),
        tracefit("report", tmp_path / "out"),
    ]
    assert "\\x1b[31m" in messages[0][1]
    for text in (report, *(part for one in messages for part in one[1:])):
        assert not {"\x1b", "\x07"} & set(text)


@pytest.mark.slow
def test_names_in_coefficient_files_reach_no_terminal_as_code(tmp_path, trained, tracefit):
    models = shutil.copytree(trained / "models", tmp_path / "models")
    for path in models.glob("*.json"):
        text = path.read_text()
        deployment = json.loads(text)["models"][0]["deployment_id"]
        path.write_text(text.replace(deployment, "=evil\\u001b[31m\\u0007"))
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
    for one, reason in zip(traces.spans, (f"error in prompt: {quoted}", "client_disconnect"), strict=True):
        one["status"] = {"code": 2, "message": reason}
        one["events"][1]["attributes"].append({"key": "reason", "value": {"stringValue": reason}})
    folder, tables = traces.write(tmp_path / "run"), tmp_path / "tables"
    tracefit("ingest", folder, "--out", tables)
    store = TableStore(tables)
    assert sorted(store.read("spans")["status_message"]) == ["client_disconnect", "other"]
    assert sorted(store.read("journey_events")["reason"].drop_nulls()) == ["client_disconnect", "other"]
    kept = b"".join(path.read_bytes() for path in tables.rglob("*") if path.is_file())
    assert b"Jane" not in kept


URLS = [
    "https://user:sEcrEt@host/x",
    "https:/user:sEcrEt@host/x",
    "s3://KEY:sEcrEt@bucket/x",
    "s3://KEY:s/EcrEt@bucket/x",
    "gs://sEcrEt@bucket/x",
    "file://user:sEcrEt@host/x",
]


@pytest.mark.parametrize("url", URLS)
def test_a_password_gets_into_no_name_and_no_line(tmp_path, monkeypatch, tracefit, small, url):
    """Taken for a path, a URL would be a folder that has the password in its name."""
    _refused_without_its_password(
        tmp_path, monkeypatch, tracefit, small, ["ingest", "RUN", "--out", "URL"], url
    )


@pytest.mark.parametrize("url", [URLS[0], URLS[3]])
@pytest.mark.parametrize(
    "command",
    [
        ["ingest", "RUN", "--out", "t", "--run-config", "URL"],
        ["ingest", "RUN", "--out", "t", "--gpu", "URL"],
        ["run", "RUN", "--out", "URL"],
        ["train", "URL", "--out", "m"],
        ["report", "URL"],
        ["requests", "URL"],
        ["predict", "URL", "--batch", "3"],
        ["predict", "MODELS", "--deployment", "tiny", "--rows", "URL"],
        ["export", "MODELS", "--deployment", "codellama", "--to", "csv", "--out", "URL"],
        ["compare", "URL", "MODELS"],
        ["verify", "URL"],
        ["verify", "MODELS", "--tables", "URL"],
        ["features", "--config", "URL"],
        ["synth", "--out", "URL"],
        ["receive", "--out", "URL", "--model", "m", "--gpu", "H100", "--stop-after", "0.1s"],
    ],
    ids=" ".join,
)
def test_no_command_names_a_password(tmp_path, monkeypatch, tracefit, small, url, command):
    _refused_without_its_password(tmp_path, monkeypatch, tracefit, small, command, url)


def _refused_without_its_password(tmp_path, monkeypatch, tracefit, small, command, url):
    monkeypatch.chdir(tmp_path)
    small(tmp_path / "run")
    words = {"URL": url, "RUN": "run", "MODELS": MODELS}
    code, stdout, stderr = tracefit(*(words.get(word, word) for word in command))
    assert (code, stdout, stderr.count("\n")) == (2, "", 1)
    assert not re.search("s?/?EcrEt", stderr), stderr
    assert not [path for path in tmp_path.rglob("*") if "EcrEt" in str(path) or ":" in str(path)]


@pytest.mark.parametrize(
    "url", ["https://user:sEcrEt@host/x", "s3://KEY:s/EcrEt@bucket/x", "file://u:sEcrEt@h/x"]
)
@pytest.mark.parametrize("command", ["ingest", "inspect"])
def test_a_url_to_read_from_is_named_without_its_password(tmp_path, tracefit, url, command):
    more = ["--out", tmp_path / "t"] if command == "ingest" else []
    code, _, stderr = tracefit(command, url, *more)
    assert (code, stderr.count("\n")) == (2, 1)
    assert "EcrEt" not in stderr


def test_two_run_descriptions_complete_each_other_or_are_refused(tmp_path, tracefit, small):
    folder, tables = small(tmp_path / "run"), tmp_path / "tables"
    (folder / "exp-config.yaml").write_text("model: m\nmax_num_seqs: 64\nnote: a\n")
    (folder / "run.yaml").write_text("max_num_seqs: 64\ngpu: H100\n")
    assert tracefit("ingest", folder, "--out", tables)[0] == 0
    settings = json.loads(TableStore(tables).read("runs")["settings"][0])["settings"]
    assert [settings[name]["value"] for name in ("model", "max_num_seqs", "gpu")] == ["m", 64, "H100"]
    for text, says in (
        ("max_num_seqs: 128\n", "max_num_seqs 128 contradicts 64"),
        ("note: b\n", "note b contradicts a"),
    ):
        (folder / "run.yaml").write_text(text)
        for given in (folder, folder / "traces.json"):
            code, _, stderr = tracefit("ingest", given, "--out", tables)
            assert (code, stderr.count("\n")) == (2, 1)
            assert f"{folder / 'run.yaml'}: {says}" in stderr
            assert "in exp-config.yaml beside it" in stderr
    # A description that the user names stands for both.
    assert tracefit("ingest", folder, "--out", tables, "--run-config", folder / "run.yaml")[0] == 0


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
def test_names_that_are_not_utf_8_are_read_and_not_written(tmp_path, tracefit, small):
    folder = small(tmp_path / "run")
    strange = os.fsdecode(os.fsencode(tmp_path) + b"/n\xff")
    folder.rename(strange)
    (Path(strange) / "traces.json").rename(Path(strange) / os.fsdecode(b"traces\xfe.json"))
    options = IngestOptions(bytes_per_worker=1)  # several processes read it: names travel between them too
    assert ingest([strange], tmp_path / "tables", options=options, workers=2).exit_code == 0
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
def test_a_model_without_a_deployment_is_not_verified(tmp_path, trained, tracefit, quick):
    document = json.loads((trained / "models" / "beta.json").read_text())
    del document["models"][0]["deployment_id"]
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


@pytest.fixture
def null_formulas(tmp_path):
    """Return a folder of models with a feature whose formula gives null for every row."""

    def write(kind, formula, *names):
        feature = {"feature": "odd", "unit": "us", "value": 1.0, "formula": formula}
        models = [
            {
                "name": f"{kind}.{name}",
                "deployment_id": "a.gpu.tp1.00000000",
                "form": "linear",
                "intercept": {"value": 100},
                "terms": [feature | ({"training_range": [0, 100]} if kind == "alpha" else {})],
            }
            for name in names
        ]
        document = {"schema": "tracefit/coefficients", "version": 3, "kind": kind, "models": models}
        (tmp_path / "odd" / f"{kind}.json").write_text(json.dumps(document))

    (tmp_path / "odd").mkdir()
    write("beta", "1e308 * 1e308 * prefill_tokens", "cycle_time")
    write("alpha", "(0 - 1) ** 0.5 * prompt_tokens", *(target.name for target in TARGETS))
    return tmp_path / "odd"


@pytest.mark.parametrize(
    "question",
    [
        ("--batch", 3),
        ("--batch", 3, "--json"),
        ("--prompt", 5, "--output", 5),
        ("--feature", "prefill_tokens=3"),
    ],
)
def test_a_formula_that_gives_null_is_one_line_that_names_it(tracefit, null_formulas, question):
    code, stdout, stderr = tracefit("predict", null_formulas, *question)
    assert (code, stdout) == (2, "")
    assert stderr == (
        "tracefit: beta.cycle_time: the formula of odd gives no finite number for these values; "
        "give the feature itself, or other values\n"
    )


@pytest.mark.parametrize(
    ("of", "columns", "predicted"),
    [
        ("step", "prefill_tokens,num_decode_reqs", "predicted_us"),
        ("request", "prompt_tokens,output_tokens", "e2e_us"),
        ("alpha.queue_wait", "prompt_tokens,output_tokens", "predicted_us"),
    ],
)
def test_a_formula_that_gives_null_leaves_a_row_without_prediction(
    tmp_path, tracefit, null_formulas, of, columns, predicted
):
    (tmp_path / "rows.csv").write_text(f"{columns}\n3,4\n")
    code, stdout, stderr = tracefit(
        "predict", null_formulas, "--rows", tmp_path / "rows.csv", "--of", of, "--json"
    )
    assert code == 0
    assert all("no model that predicts this reads" in line for line in stderr.splitlines())
    (row,) = json.loads(stdout)["predictions"]
    assert row[predicted] is None


def _without_stamps(folder):
    """Return the content of each file; tables that are written again with the same content have new times, which the manifest notes."""
    contents = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {path: re.sub(rb'"stamp": "[0-9a-f]{16}"', b"", content) for path, content in contents.items()}


class _FullDisk(io.FileIO):
    """A file on a disk without room."""

    def write(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.slow
@pytest.mark.parametrize("full_at", ["report.html", "alpha.json", "evaluation.json"])
def test_a_full_disk_in_train_leaves_nothing_half_written(
    tmp_path, monkeypatch, trained, tracefit, quick, full_at
):
    out = shutil.copytree(trained, tmp_path / "out")
    before = _without_stamps(out)

    opened = Path.open

    def full(path, mode="r", **how):
        is_full = path.name == full_at and mode == "wb"
        return _FullDisk(path, "w") if is_full else opened(path, mode, **how)

    monkeypatch.setattr(Path, "open", full)
    code, _, stderr = tracefit("train", out, "--out", out / "models", *quick)
    assert (code, stderr.count("\n")) == (2, 1)
    assert f"{full_at}: cannot be written (No space left on device)" in stderr
    assert _without_stamps(out) == before
    assert not list(out.rglob(".writing-*"))


def test_absurd_numbers_in_kv_events_cost_their_events(tmp_path, tracefit, small):
    """Each is a reject with its reason; what the others say of the requests stands."""
    folder = small(tmp_path / "run")
    tracefit("ingest", folder, "--out", tmp_path / "tables")
    request = TableStore(tmp_path / "tables").read("requests")["core_request_id"][0]
    good = [[1_700_000_000.5, [["CacheStoreCommitted", request, "CPU", 4, 1]], 0, 1]]
    odd = [
        ["CacheStoreCommitted", request, "CPU", 2**62, 1],
        ["CacheStoreCommitted", request, "CPU", 4, 2**63 - 1],
        ["BlockStored", [7], None, [5], 2**62, None, "GPU"],
    ]
    offloaded = []
    for events in ([], odd):
        batches = [*good, *([1_700_000_000.6, [event], 0, 1] for event in events)]
        (folder / "kv_events.jsonl").write_text("".join(json.dumps(batch) + "\n" for batch in batches))
        out = tmp_path / f"tables-{len(events)}"
        code, _, _ = tracefit("ingest", folder, "--out", out)
        store = TableStore(out)
        offloaded.append(store.read("requests")["kv_blocks_offloaded"].sum())
        assert (code, store.read("rejects").height) == (3 if events else 0, len(events))
    assert offloaded == [4, 4]


def _record(number):
    return record(span(number, name="llm_request"), scope="vllm.api")


def _line(number):
    return to_json(_record(number)) + b"\n"


def _message(number):
    return to_protobuf(_record(number))


def _framed(*numbers):
    return framed(map(_message, numbers))


CHANGING = {
    "gzip, then lines": (gzip.compress(_line(1)) + _line(2), [1, 2]),
    "lines, then zstd": (_line(1) + zstd(_line(2)), [1, 2]),
    "gzip, then zstd": (gzip.compress(_line(1)) + zstd(_line(2)), [1, 2]),
    "frames that begin with {": (b"{" + _framed(1, 2, 3)[1:], [2, 3]),
    "frames that begin with [": (b"[" + _framed(1, 2, 3)[1:], [2, 3]),
    "two junk bytes in a bare message": (
        _message(1) + _message(2)[:9] + b"\x07\xff" + _message(2)[9:] + _message(3) + _message(4),
        [1, 3, 4],
    ),
}
"""The content of a file, and the numbers of the spans that are whole."""


@pytest.mark.parametrize("name", CHANGING)
def test_a_format_that_changes_inside_a_file_costs_no_more_than_its_record(tmp_path, tracefit, name):
    content, whole = CHANGING[name]
    (tmp_path / "traces.json").write_bytes(content)
    code, _, _ = tracefit("ingest", tmp_path / "traces.json", "--out", tmp_path / "tables")
    assert code == (0 if len(whole) == 2 and whole[0] == 1 else 3)
    spans = TableStore(tmp_path / "tables").read("spans")["span_id"].to_list()
    assert spans == [f"{number:016x}" for number in whole]
