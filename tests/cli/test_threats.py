"""Hostile and damaged input through the real command: one run lost and not all, nothing counted twice, no codes."""

from __future__ import annotations

import csv
import errno
import gzip
import io
import json
import os
import re
import shutil
from pathlib import Path

import polars as pl
import pytest

from containers import framed, record, span, to_json, to_protobuf, zstd
from tracefit import IngestOptions, TrainOptions, ingest, run
from tracefit.commands.requests import csv_text
from tracefit.errors import spreadsheet_safe
from tracefit.models.targets import TARGETS
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
def test_empty_run_is_named_and_others_are_read(tmp_path, tracefit, small, content):
    for name in ("a", "c"):
        small(tmp_path / "runs" / name)
    bad = small(tmp_path / "runs" / "b") / "traces.json"
    bad.write_text(content)
    code, _, stderr = tracefit("ingest", tmp_path / "runs", "--out", tmp_path / "tables")
    assert code == 3
    assert f"left out: {tmp_path / 'runs' / 'b'}: " in stderr
    assert TableStore(tmp_path / "tables").runs() == ["a", "c"]


@pytest.mark.slow
def test_inspect_leaves_out_an_empty_run(tmp_path, tracefit, small):
    for name in ("a", "b"):
        small(tmp_path / "runs" / name)
    (tmp_path / "runs" / "a" / "traces.json").write_text("")
    _, stdout, stderr = tracefit("inspect", tmp_path / "runs", "--json")
    assert [run["run_id"] for run in json.loads(stdout)["runs"]] == ["b"]
    assert "left out" in stderr


@pytest.mark.slow
def test_rotating_files_stay_one_run(tmp_path, tracefit, small):
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        pytest.param(lambda files: files, id="each"),
        pytest.param(lambda files: [files[0].parent / "*.json"], id="pattern", marks=pytest.mark.slow),
        pytest.param(lambda files: [files[0].parent], id="folder", marks=pytest.mark.slow),
    ],
)
def test_rotating_loose_files_stay_one_run(tmp_path, tracefit, loose, given):
    """The oldest is deleted, a new one comes: run after run."""
    tables, files = tmp_path / "tables", [loose(1), loose(2)]
    for number in (3, 4):
        tracefit("ingest", *given(files), "--out", tables)
        files.pop(0).unlink()
        files.append(loose(number))
    code, _, stderr = tracefit("ingest", *given(files), "--out", tables)
    assert (code in (0, 3), "another run" in stderr) == (True, False)
    assert len(TableStore(tables).runs()) == 1
    named = TableStore(tables).read("spans")["source_file"].unique().sort()
    assert named.to_list() == list(map(str, files))


@pytest.mark.slow
def test_rotating_loose_files_may_grow(tmp_path, tracefit, loose):
    first, second = loose(1), loose(2)
    tracefit("ingest", first, second, "--out", tmp_path / "tables")
    first.unlink()
    second.write_text(second.read_text() + loose(9).read_text())
    assert "another run" not in tracefit("ingest", second, loose(3), "--out", tmp_path / "tables")[2]
    assert len(TableStore(tmp_path / "tables").runs()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("removed", "rewritten", "given"),
    [([], [], [2, 3]), ([1, 2], [], [3, 4]), ([1], [2], [2, 3])],
    ids=["the old file is there", "no file is left", "a file has other content"],
)
def test_other_loose_files_are_another_run(tmp_path, tracefit, loose, removed, rewritten, given):
    files = {number: loose(number) for number in (1, 2, 3, 4)}
    tracefit("ingest", files[1], files[2], "--out", tmp_path / "tables")
    for number in removed:
        files[number].unlink()
    for number in rewritten:
        files[number].write_text(loose(9).read_text())
    _, _, stderr = tracefit("ingest", *(files[number] for number in given), "--out", tmp_path / "tables")
    assert "another run of that name is in the tables already" in stderr
    assert len(TableStore(tmp_path / "tables").runs()) == 2


@pytest.mark.slow
def test_spans_in_two_runs_are_trained_on_once(tmp_path, new_traces, tracefit, quick):
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


def flip_a_bit(part, _):
    content = bytearray(part.read_bytes())
    content[40] ^= 1
    part.write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    [lambda part, _: part.unlink(), flip_a_bit, lambda part, other: shutil.copy(other, part)],
    ids=["deleted", "damaged", "exchanged"],
)
def test_part_that_was_not_written_so_is_refused_and_repaired(tmp_path, tracefit, small, damage):
    run, tables = small(tmp_path / "run"), tmp_path / "tables"
    tracefit("ingest", run, "--out", tables)
    tracefit("ingest", small(tmp_path / "other", 50), "--out", tmp_path / "others")
    before, part = TableStore(tables).read("requests").rows(), _part(tables, "requests")
    damage(part, _part(tmp_path / "others", "requests"))
    code, _, stderr = tracefit("requests", tables)
    assert code == 1
    assert re.fullmatch(rf"tracefit: {part}: is .*ingest the run again\n", stderr)
    assert "its tables are damaged" in tracefit("ingest", run, "--out", tables)[2]
    assert TableStore(tables).read("requests").rows() == before


@pytest.fixture(scope="module")
def evil_server(tmp_path_factory, new_traces):
    """Return the results of a server whose name is HTML, a link and terminal codes."""
    folder = tmp_path_factory.mktemp("evil")
    run(
        [new_traces(server=EVIL).load().write(folder / "run")],
        folder / "out",
        options=TrainOptions(fast=True),
    )
    return folder / "out"


@pytest.mark.slow
def test_name_of_a_server_is_text_in_the_report(evil_server):
    report = (evil_server / "report.md").read_text()
    assert "onerror" in report
    assert re.findall(r"<img|\]\(javascript|\x1b|\x07", report) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", ["inspect OUT/tables", "requests OUT/tables --each", "report OUT"], ids=lambda c: c.split()[0]
)
def test_name_of_a_server_is_text_on_the_terminal(tracefit, evil_server, command):
    _, stdout, stderr = tracefit(*command.replace("OUT", str(evil_server)).split())
    assert re.findall(r"\x1b|\x07", stdout + stderr) == []


@pytest.mark.slow
def test_inspect_shows_codes_as_escapes(tracefit, evil_server):
    assert r"\x1b[31m" in tracefit("inspect", evil_server / "tables")[1]


@pytest.fixture
def evil_models(tmp_path, trained):
    """Return models of a deployment whose name is terminal codes and a formula."""
    models = shutil.copytree(trained / "models", tmp_path / "models")
    for path in models.glob("*.json"):
        deployment = json.loads(path.read_text())["models"][0]["deployment_id"]
        path.write_text(path.read_text().replace(deployment, r"=evil\u001b[31m\u0007"))
    return models


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "compare EVIL TRAINED/models",
        "compare EVIL EVIL",
        "verify EVIL/beta.json --tables TRAINED/tables",
        "export EVIL --to csv --out EVIL/csv",
        "predict EVIL --batch 4",
    ],
)
def test_name_in_a_coefficient_file_is_text_on_the_terminal(trained, tracefit, evil_models, command):
    words = command.replace("EVIL", str(evil_models)).replace("TRAINED", str(trained)).split()
    code, stdout, stderr = tracefit(*words)
    assert code in (0, 1, 2)
    assert re.findall(r"\x1b|\x07", stdout + stderr) == []


@pytest.mark.slow
def test_name_in_a_coefficient_file_is_no_formula(tracefit, evil_models):
    tracefit("export", evil_models, "--to", "csv", "--out", evil_models / "csv")
    assert "\n=evil" not in (evil_models / "csv" / "coefficients.csv").read_text()


@pytest.mark.slow
def test_id_is_no_formula_to_a_spreadsheet(tmp_path, tracefit, traces):
    traces.request(1, 0, step=1, **{"gen_ai.request.id": "=HYPERLINK(1)"})
    tracefit("ingest", traces.write(tmp_path / "run"), "--out", tmp_path / "tables")
    _, stdout, _ = tracefit("requests", tmp_path / "tables", "--each")
    assert ",'=HYPERLINK(1)," in stdout


@pytest.mark.parametrize("name", ["=1", "+1", "-1", "@A", "\t=1", "\n=1", "\uff1d1", "a=1"])
def test_csv_files_have_no_formulas(name):
    quoted = name if name == "a=1" else f"'{name}"
    assert spreadsheet_safe(name) == quoted
    assert list(csv.reader(io.StringIO(csv_text(pl.DataFrame({"hw": [name]}))))) == [["hw"], [quoted]]


@pytest.mark.slow
def test_prompt_quoted_by_an_error_is_not_kept(tmp_path, tracefit, traces):
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


OUT_OF = "ingest RUN --out URL"
READERS = ["ingest URL --out t", "inspect URL", "train URL --out m", "report URL", "requests URL"]
OTHERS = [
    "ingest RUN --out t --run-config URL",
    "ingest RUN --out t --gpu URL",
    "run RUN --out URL",
    "predict URL --batch 3",
    "predict MODELS --deployment tiny --rows URL",
    "export MODELS --deployment codellama --to csv --out URL",
    "compare URL MODELS",
    "verify URL",
    "verify MODELS --tables URL",
    "features --config URL",
    "synth --out URL",
    "receive --out URL --model m --gpu H100 --stop-after 0.1s",
]


@pytest.mark.parametrize(
    ("command", "url"),
    [
        *((OUT_OF, url) for url in URLS),
        *((command, url) for command in READERS for url in (URLS[0], URLS[3], URLS[5])),
        *((command, url) for command in OTHERS for url in (URLS[0], URLS[3])),
    ],
)
def test_password_gets_into_no_name_and_no_line(tmp_path, monkeypatch, tracefit, small, command, url):
    """Taken for a path, a URL would be a folder that has the password in its name."""
    monkeypatch.chdir(tmp_path)
    small(tmp_path / "run")
    words = {"URL": url, "RUN": "run", "MODELS": MODELS}
    code, stdout, stderr = tracefit(*(words.get(word, word) for word in command.split()))
    assert (code, stdout, stderr.count("\n")) == (2, "", 1)
    assert not re.search("s?/?EcrEt", stderr), stderr
    assert not [path for path in tmp_path.rglob("*") if "EcrEt" in str(path) or ":" in str(path)]


def described(folder, run_yaml):
    """Put two run descriptions into a run."""
    (folder / "exp-config.yaml").write_text("model: m\nmax_num_seqs: 64\nnote: a\n")
    (folder / "run.yaml").write_text(run_yaml)
    return folder


def test_two_run_descriptions_complete_each_other(tmp_path, tracefit, small):
    folder = described(small(tmp_path / "run"), "max_num_seqs: 64\ngpu: H100\n")
    assert tracefit("ingest", folder, "--out", tmp_path / "tables")[0] == 0
    settings = json.loads(TableStore(tmp_path / "tables").read("runs")["settings"][0])["settings"]
    assert [settings[name]["value"] for name in ("model", "max_num_seqs", "gpu")] == ["m", 64, "H100"]


@pytest.mark.parametrize("given", [".", "traces.json"], ids=["folder", "file"])
@pytest.mark.parametrize(
    ("run_yaml", "says"),
    [
        ("max_num_seqs: 128\n", "max_num_seqs 128 contradicts 64"),
        ("note: b\n", "note b contradicts a"),
    ],
    ids=["setting", "note"],
)
def test_contradicting_run_descriptions_are_refused(tmp_path, tracefit, small, run_yaml, says, given):
    folder = described(small(tmp_path / "run"), run_yaml)
    code, _, stderr = tracefit("ingest", folder / given, "--out", tmp_path / "tables")
    assert (code, stderr.count("\n")) == (2, 1)
    assert f"{folder / 'run.yaml'}: {says}" in stderr
    assert f"{says} in exp-config.yaml" in stderr


def test_named_run_description_stands_for_both(tmp_path, tracefit, small):
    folder = described(small(tmp_path / "run"), "note: b\n")
    named = ("--run-config", folder / "run.yaml")
    code, _, stderr = tracefit("ingest", folder, "--out", tmp_path / "tables", *named)
    # Its keys are not settings, and the other description is not read.
    assert code == 3
    assert "keys seen: note" in stderr


@pytest.mark.parametrize("given", [".", "traces.json"], ids=["folder", "file"])
@pytest.mark.parametrize("name", ["exp-config.yaml", "run.yaml", "config.json"])
@pytest.mark.parametrize("place", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"])
def test_configuration_that_is_no_file_is_refused(tmp_path, tracefit, small, place, name, given):
    folder = small(tmp_path / "run")
    (folder / name).unlink(missing_ok=True)
    place(folder / name)
    code, _, stderr = tracefit("ingest", folder / given, "--out", tmp_path / "tables")
    assert (code, stderr.count("\n")) == (2, 1)
    assert str(folder / name) in stderr


def test_trace_that_is_a_device_is_left_out(tmp_path, tracefit, small):
    folder = small(tmp_path / "run")
    (folder / "traces-x.json").symlink_to("/dev/zero")
    code, _, stderr = tracefit("ingest", folder, "--out", tmp_path / "tables")
    assert code == 0
    assert "traces-x.json: left out, it is not a regular file" in stderr


@pytest.mark.slow
def test_part_that_is_a_pipe_is_refused(tmp_path, tracefit, small):
    tracefit("ingest", small(tmp_path / "run"), "--out", tmp_path / "tables")
    part = _part(tmp_path / "tables", "requests")
    part.unlink()
    os.mkfifo(part)
    code, _, stderr = tracefit("requests", tmp_path / "tables")
    says = f"tracefit: {part}: cannot be read (not a regular file); ingest the run again\n"
    assert (code, stderr) == (1, says)


@pytest.mark.parametrize("out", [["--out", ""], ["--out="]])
def test_empty_out_is_refused(tmp_path, monkeypatch, tracefit, small, out):
    run = small(tmp_path / "run")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert tracefit("ingest", run, *out) == (2, "", "tracefit: --out: is empty\n")
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.slow
def test_renamed_file_has_its_new_name(tmp_path, tracefit, small):
    folder, tables = small(tmp_path / "run"), tmp_path / "tables"
    for name in ("traces.json", "traces-new.json"):
        next(folder.glob("traces*")).rename(folder / name)
        tracefit("ingest", folder, "--out", tables)
        assert TableStore(tables).read("spans")["source_file"].unique().to_list() == [str(folder / name)]


@pytest.mark.slow
def test_names_beyond_utf_8_are_read_and_not_written(tmp_path, tracefit, small):
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
def test_option_of_a_wrong_type_is_one_line(tmp_path, trained, tracefit, option):
    document = json.loads((trained / "models" / "beta.json").read_text())
    document["provenance"]["options"].update(option)
    (tmp_path / "beta.json").write_text(json.dumps(document))
    code, _, stderr = tracefit("verify", tmp_path / "beta.json", "--tables", trained / "tables")
    assert code in (1, 2)
    assert stderr.count("\n") == 1
    assert next(iter(option)) in stderr


@pytest.mark.slow
def test_model_without_a_deployment_is_not_verified(tmp_path, trained, tracefit, quick):
    document = json.loads((trained / "models" / "beta.json").read_text())
    del document["models"][0]["deployment_id"]
    (tmp_path / "beta.json").write_text(json.dumps(document))
    assert tracefit("verify", tmp_path / "beta.json", "--tables", trained / "tables")[0] == 1


@pytest.mark.slow
def test_feature_of_a_text_column_is_one_line(tmp_path, trained, tracefit, quick):
    (tmp_path / "f.yaml").write_text(
        "name: odd\nfeatures:\n  - {name: x, formula: run_id, unit: token, reason: text}\n"
    )
    tables = shutil.copytree(trained / "tables", tmp_path / "tables")  # training writes its frames there
    code, _, stderr = tracefit("train", tables, "--out", tmp_path / "m", "--features", tmp_path / "f.yaml", "--fast")
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
        document = {"schema": "tracefit/coefficients", "version": 4, "kind": kind, "models": models}
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
def test_formula_without_a_value_is_named(tracefit, null_formulas, question):
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
def test_formula_without_a_value_predicts_null_for_a_row(tmp_path, tracefit, null_formulas, of, columns, predicted):
    (tmp_path / "rows.csv").write_text(f"{columns}\n3,4\n")
    code, stdout, stderr = tracefit("predict", null_formulas, "--rows", tmp_path / "rows.csv", "--of", of, "--json")
    assert code == 0
    assert all("no model that predicts this reads" in line for line in stderr.splitlines())
    (row,) = json.loads(stdout)["predictions"]
    assert row[predicted] is None


def _without_stamps(folder):
    """Return the content of each file; tables that are written again with the same content have new times, which the
    manifest notes."""
    contents = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {path: re.sub(rb'"stamp": "[0-9a-f]{16}"', b"", content) for path, content in contents.items()}


class _FullDisk(io.FileIO):
    """A file on a disk without room."""

    def write(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.slow
@pytest.mark.parametrize("full_at", ["report.html", "alpha.json", "evaluation.json"])
def test_full_disk_in_train_changes_nothing(tmp_path, monkeypatch, trained, tracefit, quick, full_at):
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


@pytest.mark.mostly_slow(every=4)
@pytest.mark.parametrize(
    ("odd", "code"),
    [
        ([], 0),
        ([["CacheStoreCommitted", "cmpl-1-0-00000000", "CPU", 2**62, 1]], 3),
        ([["CacheStoreCommitted", "cmpl-1-0-00000000", "CPU", 4, 2**63 - 1]], 3),
        ([["BlockStored", [7], None, [5], 2**62, None, "GPU"]], 3),
    ],
    ids=["no odd event", "blocks", "step", "block size"],
)
def test_absurd_number_in_a_kv_event_costs_that_event(tmp_path, tracefit, small, odd, code):
    folder, tables = small(tmp_path / "run"), tmp_path / "tables"
    events = [["CacheStoreCommitted", "cmpl-1-0-00000000", "CPU", 4, 1], *odd]
    batches = [json.dumps([1_700_000_000.5, [event], 0, 1]) + "\n" for event in events]
    (folder / "kv_events.jsonl").write_text("".join(batches))
    assert tracefit("ingest", folder, "--out", tables)[0] == code
    assert TableStore(tables).read("rejects").height == len(odd)
    assert TableStore(tables).read("requests")["kv_blocks_offloaded"].sum() == 4


def _record(number):
    return record(span(number, name="llm_request"), scope="vllm.api")


def _line(number):
    return to_json(_record(number)) + b"\n"


def _message(number):
    return to_protobuf(_record(number))


def _framed(*numbers):
    return framed(map(_message, numbers))


@pytest.mark.mostly_slow(every=6)
@pytest.mark.parametrize(
    ("content", "whole", "code"),
    [
        (gzip.compress(_line(1)) + _line(2), [1, 2], 0),
        (_line(1) + zstd(_line(2)), [1, 2], 0),
        (gzip.compress(_line(1)) + zstd(_line(2)), [1, 2], 0),
        (b"{" + _framed(1, 2, 3)[1:], [2, 3], 3),
        (b"[" + _framed(1, 2, 3)[1:], [2, 3], 3),
        (
            _message(1) + _message(2)[:9] + b"\x07\xff" + _message(2)[9:] + _message(3) + _message(4),
            [1, 3, 4],
            3,
        ),
    ],
    ids=[
        *("gzip, then lines", "lines, then zstd", "gzip, then zstd"),
        *("frames that begin with {", "frames that begin with [", "junk in a bare message"),
    ],
)
def test_format_that_changes_costs_one_record(tmp_path, tracefit, content, whole, code):
    (tmp_path / "traces.json").write_bytes(content)
    assert tracefit("ingest", tmp_path / "traces.json", "--out", tmp_path / "tables")[0] == code
    spans = TableStore(tmp_path / "tables").read("spans")["span_id"].to_list()
    assert spans == [f"{number:016x}" for number in whole]
