"""Inputs a user can name: files, folders as collectors leave them, patterns, pipes and URLs."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
import threading
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pytest
from pyarrow.fs import FileSystemHandler, LocalFileSystem, PyFileSystem, SubTreeFileSystem

from tracefit.errors import DataError, UsageError
from tracefit.inputs.blocks import Block, load, read_blocks
from tracefit.inputs.discovery import STDIN, open_inputs
from tracefit.inputs.files import TraceFile, content_hash_of, fetch
from tracefit.inputs.formats import detect_format
from tracefit.inputs.framing import records

LINE = b'{"resourceSpans":[]}\n'


@pytest.fixture
def lay(tmp_path, monkeypatch):
    """Return a function that lays files under the working folder, which is a temporary one."""
    monkeypatch.chdir(tmp_path)

    def write(*names, data=LINE):
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    return write


def payloads(file):
    file = file if isinstance(file, TraceFile) else TraceFile.local(file)
    return [
        item.payload
        for block in read_blocks(file)
        if isinstance(block, Block)
        for item in records(load(block), block.shape)
    ]


def runs_of(*paths, **options):
    """Return run id to the names of its files."""
    with open_inputs(paths, **options) as inputs:
        assert len({run.run_id for run in inputs.runs}) == len(inputs.runs)
        return {run.run_id: [file.name for file in run.trace_files] for run in inputs.runs}


def notable(*paths):
    with open_inputs(paths) as inputs:
        return {left.name: left.reason for left in inputs.left_out if left.is_notable}


def refused(kind, *paths, **options):
    with pytest.raises(kind) as caught, open_inputs(paths, **options):
        pass
    line = caught.value.line()
    assert "\n" not in line
    return line


def test_rotated_files_of_a_folder_are_one_run(lay):
    names = [
        "run/traces.json",
        "run/traces-2026-02-14T05-02-14.173.json",
        "run/traces-2026-02-14T05-02-14.173.json.gz",
        "run/traces-2026-02-14T05-02-14.173-size.json",
        "run/traces-2026-02-14T06-02-14.173-time.jsonl.zst",
        "run/traces.binpb",
    ]
    lay(*names)
    assert runs_of("run") == {"run": sorted(names)}


def test_each_folder_with_traces_is_a_run(lay):
    lay("all/a/traces.json", "all/b/deep/traces.pb", "all/traces.json")
    assert runs_of("all") == {
        "all": ["all/traces.json"],
        "a": ["all/a/traces.json"],
        "deep": ["all/b/deep/traces.pb"],
    }


def test_a_folder_per_resource_attribute_is_a_run_each(lay):
    lay("out/pod-1/traces.json", "out/pod-2/traces.json")
    assert list(runs_of("out")) == ["pod-1", "pod-2"]


@pytest.mark.parametrize(
    "dates",
    [
        "year=2026/month=02/day=14/hour=05/minute=02",
        "dt=2026-02-14/hour=5",
        "2026/02/14/05",
        "2026/02",
    ],
)
def test_folders_of_dates_belong_to_the_folder_above_them(lay, dates):
    names = [f"prod/{dates}/traces_123456789.json.gz", f"prod/{dates[:-1]}9/traces_5.json.gz"]
    lay(*names, data=gzip.compress(LINE))
    assert runs_of("prod") == {"prod": sorted(names)}
    assert list(runs_of(f"prod/{dates}")) == ["prod"]


@pytest.mark.parametrize("name", ["2026", "02", "7", "a=b-not", "14/05"])
def test_numbers_alone_are_no_dates(lay, name):
    lay(f"runs/{name}/traces.json")
    expected = "runs" if "=" in name else Path(name).name
    assert list(runs_of("runs")) == [expected]


def test_rotated_files_below_a_run_configuration_are_of_its_run(lay):
    lay(
        "a/exp-config.yaml",
        "a/traces.json",
        "a/old/traces.json",
        "b/old/run.yaml",
        "b/old/traces.json",
        "b/traces.json",
    )
    assert runs_of("a", "b") == {
        "a": ["a/old/traces.json", "a/traces.json"],
        "b": ["b/traces.json"],
        "old": ["b/old/traces.json"],
    }
    with open_inputs(["a", "b"]) as inputs:
        configs = {run.run_id: run.run_configs for run in inputs.runs}
    assert configs == {"a": (Path("a/exp-config.yaml"),), "b": (), "old": (Path("b/old/run.yaml"),)}


def test_unnamed_formats_are_detected_by_content(lay, otlp):
    lay("run/otel-output", "run/export.txt", data=LINE)
    lay("run/dump.bin", data=otlp.framed([otlp.message()]))
    lay("run/config.json", "run/kv_events.jsonl", data=b'{"hidden_size": 8}\n')
    lay("run/notes.md", "run/table.parquet", data=b"PAR1 and more")
    lay("run/.hidden.json", "run/.git/traces.json")
    assert runs_of("run") == {"run": ["run/dump.bin", "run/export.txt", "run/otel-output"]}
    assert notable("run") == {}


def test_recordings_of_the_kv_cache_are_known_by_their_names(lay):
    known = ["kv_events-rank0.msgpack.zst", "kv_events.bin.gz", "kv_events.jsonl"]
    lay(
        "run/traces.json",
        *(f"run/{name}" for name in (*known, "kv_events.csv", "my_kv_events.txt")),
        data=b"x",
    )
    with open_inputs(["run"]) as inputs:
        (run,) = inputs.runs
    assert [file.name for file in run.kv_files] == [f"run/{name}" for name in known]


def test_a_file_named_like_traces_is_read_whatever_is_in_it(lay):
    """Its content is a reject then, and is not passed over."""
    lay("run/traces.json", data=b"rubbish")
    lay("run/traces-2.json", data=b"")
    assert runs_of("run") == {"run": ["run/traces-2.json", "run/traces.json"]}


@pytest.mark.parametrize("signal", ["Logs", "Metrics"])
def test_logs_and_metrics_are_skipped_and_reported(lay, signal):
    lay("run/traces.json")
    lay("run/other.json", "run/traces-other.json", data=b'{"resource%s":[]}\n' % signal.encode())
    assert runs_of("run") == {"run": ["run/traces.json"]}
    reason = f"it holds OTLP {signal.lower()}"
    assert notable("run") == {"run/other.json": reason, "run/traces-other.json": reason}


@pytest.mark.parametrize("signal", ["Logs", "Metrics"])
def test_named_logs_and_metrics_are_refused_before_reading(lay, signal):
    lay("traces.json")
    lay("run/other.json", data=b'{"resource%s":[]}\n' % signal.encode())
    assert f"holds OTLP {signal.lower()}, not traces" in refused(DataError, "traces.json", "run/other.json")
    assert f"holds OTLP {signal.lower()}" in refused(UsageError, "run")


def test_traces_in_a_file_that_other_signals_share_are_read(lay):
    lay("run/otel.json", data=b'{"resourceLogs":[]}\n' + LINE)
    assert runs_of("run/otel.json") == {"otel": ["run/otel.json"]}
    assert runs_of("run") == {"run": ["run/otel.json"]}
    assert len(payloads("run/otel.json")) == 2


def test_loose_files_are_one_run_under_their_common_stem(lay):
    lay("x/traces-day-1.json", "y/traces-day-2.json.gz")
    assert runs_of("x/traces-day-1.json", "y/traces-day-2.json.gz") == {
        "traces-day": ["x/traces-day-1.json", "y/traces-day-2.json.gz"]
    }


def test_named_files_belong_to_the_configuration_beside_them(lay):
    """As a shell writes out runs/*/traces*.json; the run is the one its folder would be."""
    names = [
        "runs/a/traces-1.json",
        "runs/a/traces-2.json",
        "runs/b/2026/02/14/traces.json",
        "c/traces.json",
        "d.json",
    ]
    lay(*names)
    lay("runs/a/exp-config.yaml", "runs/b/run.yaml", data=b"model: m\n")
    lay("runs/a/config.json", "c/config.json", data=b"{}")
    lay("runs/a/kv_events.jsonl", "c/kv_events.jsonl")
    with open_inputs([*names, "runs/a/kv_events.jsonl", "c/kv_events.jsonl"]) as inputs:
        found = {
            run.run_id: (
                [file.name for file in run.trace_files],
                [file.name for file in run.kv_files],
                next((path.relative_to(Path.cwd()).as_posix() for path in run.run_configs), None),
                run.model_config and run.model_config.relative_to(Path.cwd()).as_posix(),
            )
            for run in inputs.runs
        }
    assert found == {
        "a": (names[:2], ["runs/a/kv_events.jsonl"], "runs/a/exp-config.yaml", "runs/a/config.json"),
        "b": (names[2:3], [], "runs/b/run.yaml", None),
        "traces": (names[3:], ["c/kv_events.jsonl"], None, None),
    }
    assert runs_of("runs/?/*.*") == {"a": names[:2]}


def test_pattern_may_match_a_configuration(lay):
    lay("run/traces.json")
    lay("run/run.yaml", "run/config.json", data=b"{}")
    assert runs_of("run/*.json") == {"run": ["run/traces.json"]}


def test_patterns_stand_for_files_and_folders(lay):
    lay("a/traces.json", "b/traces.json", "c/d/traces.json", "loose-1.json", "loose-2.json", "[odd].json")
    assert list(runs_of("[ab]")) == ["a", "b"]
    assert runs_of("loose-?.json") == {"loose": ["loose-1.json", "loose-2.json"]}
    assert runs_of("**/traces.json") == {"traces": ["a/traces.json", "b/traces.json", "c/d/traces.json"]}
    assert runs_of("[odd].json") == {"odd": ["[odd].json"]}
    assert "none-*.json: matches no file or folder" in refused(UsageError, "none-*.json")


def test_what_is_named_twice_is_read_once(lay):
    lay("run/traces.json", "a.json")
    Path("b.json").symlink_to("a.json")
    assert runs_of("run", "./run", "run/") == {"run": ["run/traces.json"]}
    assert runs_of("a.json", "b.json", "./a.json") == {"a": ["a.json"]}


def test_the_first_bytes_of_many_traces_suffice(lay, monkeypatch):
    lay("a/traces.json", data=LINE * 10_000)
    lay("b/traces.json", data=b"\n" * 40_000 + LINE)  # the first bytes say nothing
    monkeypatch.setattr("tracefit.inputs.blocks.detect_format", detected := Mock(wraps=detect_format))
    assert list(runs_of(".")) == ["a", "b"]
    assert [len(call.args[0]) for call in detected.call_args_list] == [40_000 + len(LINE)]


def test_links_are_followed_and_loops_end(lay):
    lay("far/traces.json", "run/traces-1.json")
    Path("run/link").symlink_to("../far")
    Path("run/up").symlink_to("..")
    Path("run/self").symlink_to(".")
    Path("run/traces-2.json").symlink_to("../far/traces.json")
    with open_inputs(["run"]) as inputs:
        files = [file for run in inputs.runs for file in run.trace_files]
    assert {Path(file.path).resolve() for file in files} == {
        Path("far/traces.json").resolve(),
        Path("run/traces-1.json").resolve(),
    }


def test_pipes_and_broken_links_are_reported(lay):
    lay("run/traces.json", "run/traces-old.json/traces.json")
    os.mkfifo("run/traces-pipe.json")
    os.mkfifo("run/other")
    Path("run/traces-gone.json").symlink_to("nowhere")
    assert runs_of("run") == {
        "run": ["run/traces.json"],
        "traces-old.json": ["run/traces-old.json/traces.json"],
    }
    reason = "it is not a regular file"
    assert notable("run") == {"run/traces-gone.json": reason, "run/traces-pipe.json": reason}


@pytest.mark.parametrize("name", ["é漢😀", "two\nlines", "a b", "-dash", "tab\tand \x1b[31m", "%41", "a=b,c"])
def test_names_of_every_kind(lay, name):
    lay(f"runs/{name}/traces{name}.json")
    with open_inputs(["runs"]) as inputs:
        (run,) = inputs.runs
    assert run.trace_files[0].name == f"runs/{name}/traces{name}.json"
    assert len(payloads(run.trace_files[0])) == 1


def test_a_name_that_is_not_utf8_is_shown_as_text(lay):
    path = os.fsdecode(b"traces-\xff.json")
    lay("run/x.json")
    Path("run/x.json").rename(f"run/{path}")
    (name,) = runs_of("run")["run"]
    assert name == "run/traces-\\udcff.json"
    with open_inputs([f"run/{path}"]) as inputs:
        assert len(payloads(inputs.runs[0].trace_files[0])) == 1
    assert "\\udcff" in refused(UsageError, f"no/{path}")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("missing", "no such file or folder"),
        ("missing/traces.json", "no such file or folder"),
        ("file.json/traces.json", "cannot be opened (Not a directory)"),
        ("", "is not a path"),
        ("a\0b", "is not a path"),
        ("x" * 5000, "cannot be opened (File name too long)"),
        ("https://host/traces.json", "is a URL of no known kind"),
        ("empty", "holds no trace files"),
        ("/dev/zero", "is a device or socket"),
    ],
)
def test_what_cannot_be_read_is_one_line(lay, path, says):
    lay("file.json")
    Path("empty").mkdir()
    assert says in refused(UsageError, path)


def test_no_path_at_all_is_one_line(lay):
    assert "no trace files were named" in refused(UsageError)


@contextmanager
def nobody():
    """Give up the rights of root, to whom nothing is forbidden; relative paths still lead from where the test is."""
    is_root = os.geteuid() == 0
    if is_root:
        Path().chmod(0o755)
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def test_what_may_not_be_read_is_one_line(lay):
    lay("run/traces.json", "run/closed/traces.json")
    Path("run/closed").chmod(0)
    with nobody():
        assert "run/closed: cannot be listed (Permission denied)" in refused(UsageError, "run")
    Path("run/closed").chmod(0o755)
    Path("run/traces.json").chmod(0)
    for path in ("run", "run/traces.json"):
        with nobody():
            assert "run/traces.json: cannot be opened (Permission denied)" in refused(UsageError, path)


def test_standard_input_is_a_run_that_can_be_read_twice(lay, otlp):
    data = otlp.COMPRESSIONS["zstd"](otlp.SHAPES["lines"](2))
    with open_inputs([STDIN], stdin=io.BytesIO(data)) as inputs:
        (run,) = inputs.runs
        (file,) = run.trace_files
        assert len(payloads(file)) == 2
        assert len(payloads(file)) == 2
        copy = Path(file.path)
    assert (run.run_id, file.name, file.size) == ("stdin", "-", len(data))
    assert not copy.exists()


def test_standard_input_of_another_signal_is_refused():
    line = refused(DataError, STDIN, stdin=io.BytesIO(b'{"resourceLogs":[]}'))
    assert line.startswith("-: holds OTLP logs")


def test_a_terminal_is_no_input():
    class Keyboard(io.BytesIO):
        def isatty(self):
            return True

    assert "standard input is a terminal" in refused(UsageError, STDIN, stdin=Keyboard())


def test_named_pipes_and_those_of_a_shell_are_read(lay):
    os.mkfifo("spans.json")
    read_end, write_end = os.pipe()

    def write(path):
        with open(path, "wb") as pipe:  # noqa: PTH123 - also takes a descriptor
            pipe.write(LINE)

    writers = [threading.Thread(target=write, args=[path]) for path in ("spans.json", write_end)]
    for writer in writers:
        writer.start()
    shell = f"/dev/fd/{read_end}"
    with open_inputs(["spans.json", shell]) as inputs:
        assert [run.run_id for run in inputs.runs] == ["spans", "stdin"]
        for run in inputs.runs:
            assert len(payloads(run.trace_files[0])) == 1
    for writer in writers:
        writer.join()
    os.close(read_end)


def test_file_urls_are_paths(lay, tmp_path):
    lay("my run/traces 100%.json")
    quoted = f"file://{tmp_path}/my%20run"
    expected = {"my-run": [f"{tmp_path}/my run/traces 100%.json"]}
    assert runs_of(quoted) == runs_of(quoted.replace("///", "//localhost/")) == expected
    assert runs_of(Path(quoted)) == expected  # a Path has one slash for three


@pytest.fixture
def bucket(lay, tmp_path):
    """Return a function that opens every URL as a folder, and the list of the URLs it was asked for."""
    asked = []

    def opened(url):
        asked.append(url)
        return SubTreeFileSystem(str(tmp_path / "store"), LocalFileSystem()), "bucket"

    return opened, asked


def test_a_bucket_is_read_like_a_folder(lay, bucket):
    opened, _ = bucket
    dates = "year=2026/month=02/day=14/hour=05/minute=0"
    lay(*(f"store/bucket/prod/{dates}{n}/traces_{n}.json" for n in (1, 2)))
    lay("store/bucket/prod/exp-config.yaml", data=b"model: m\n")
    lay("store/bucket/prod/config.json", data=b"{}")
    lay("store/bucket/other/traces.json")
    for url in ("s3://bucket/prod", "s3://bucket/prod/", "S3://bucket/prod"):
        with open_inputs([url], filesystem_of=opened) as inputs:
            (run,) = inputs.runs
            assert run.run_id == "prod"
            assert [f.name for f in run.trace_files] == [f"s3://bucket/prod/{dates}{n}/traces_{n}.json" for n in (1, 2)]
            assert [path.read_bytes() for path in run.run_configs] == [b"model: m\n"]
            assert run.model_config.read_bytes() == b"{}"
            assert [line for file in run.trace_files for line in payloads(file)] == [LINE.strip()] * 2
    assert list(runs_of("gs://bucket", filesystem_of=opened)) == ["other", "prod"]
    with open_inputs(["s3://bucket/*/**/traces*.json"], filesystem_of=opened) as inputs:
        prod, other = inputs.runs if inputs.runs[0].run_id == "prod" else inputs.runs[::-1]
        assert (len(prod.trace_files), prod.run_configs[0].read_bytes()) == (2, b"model: m\n")
        assert (other.run_id, other.run_configs) == ("traces", ())


def test_objects_and_patterns_of_a_bucket(lay, bucket):
    opened, _ = bucket
    lay(*(f"store/bucket/{name}.json" for name in ("a/traces-1", "a/traces-2", "b/traces-1", "b/deep/traces-3")))
    one = "gs://bucket/a/traces-1.json"
    assert runs_of(one, filesystem_of=opened) == {"traces-1": [one]}
    assert runs_of(Path(one), filesystem_of=opened) == {"traces-1": [one]}
    assert runs_of("s3://bucket/*/traces-1.json", filesystem_of=opened) == {
        "traces-1": ["s3://bucket/a/traces-1.json", "s3://bucket/b/traces-1.json"]
    }
    assert list(runs_of("s3://bucket/[ab]", filesystem_of=opened)) == ["a", "b", "deep"]
    assert runs_of("s3://bucket/**/traces-[!1].json", filesystem_of=opened) == {
        "traces": ["s3://bucket/a/traces-2.json", "s3://bucket/b/deep/traces-3.json"]
    }
    assert "matches no file" in refused(UsageError, "s3://bucket/*/no.json", filesystem_of=opened)
    assert "no such file" in refused(UsageError, "s3://bucket/no", filesystem_of=opened)


def test_an_object_has_one_place_by_every_spelling(lay, bucket):
    """Credentials, options, the case of the scheme and slashes do not belong to the name."""
    opened, _ = bucket
    lay("store/bucket/prod/run/traces.json", "store/bucket/prod/run/exp-config.yaml")
    places = {}
    for folder in ("prod/run", "/prod//run/", "prod", "*/run", "prod/run/traces.json", "prod//*/traces.json"):
        for bucket_url in ("s3://bucket", "S3:/bucket", "s3://KEY:SECRET@bucket"):
            with open_inputs([f"{bucket_url}/{folder}"], filesystem_of=opened) as inputs:
                (run,) = inputs.runs
            places.setdefault((run.trace_files[0].location, run.run_id), set()).add(run.folder)
    assert places == {("s3://bucket/prod/run/traces.json", "run"): {"s3/bucket/prod/run", None}}
    urls = ["s3://bucket/prod/run", "S3://bucket//prod/run/traces.json", "s3://bucket/prod"]
    assert list(runs_of(*urls, filesystem_of=opened)) == ["run"]


@pytest.mark.parametrize(
    ("scheme", "environment", "options", "host"),
    [
        ("s3", {"AWS_ENDPOINT_URL": "http://Minio.Corp:9000/"}, "", "http://minio.corp:9000"),
        ("s3", {"AWS_ENDPOINT_URL": "https://minio.corp:443"}, "", "https://minio.corp"),
        ("s3", {"AWS_ENDPOINT_URL_S3": "http://a", "AWS_ENDPOINT_URL": "http://b"}, "", "http://a"),
        ("s3", {"AWS_ENDPOINT_URL": "http://a"}, "?endpoint_override=b:9&scheme=http", "http://b:9"),
        ("s3", {"AWS_ENDPOINT_URL": "http://a"}, "?endpoint_override=http%3A%2F%2Fb%3A9", "http://b:9"),
        ("s3", {"AWS_ENDPOINT_URL": "http://user:pw@[fd00::1]:9"}, "", "http://[fd00::1]:9"),
        ("gs", {"CLOUD_STORAGE_EMULATOR_ENDPOINT": "http://localhost:4443"}, "", "http://localhost:4443"),
        # The provider's own: a region or a private address is no other store.
        ("s3", {}, "?region=eu-west-1", None),
        ("s3", {"AWS_ENDPOINT_URL": ""}, "", None),
        ("s3", {"AWS_ENDPOINT_URL": "https://s3.eu-west-1.amazonaws.com"}, "", None),
        ("s3", {"AWS_ENDPOINT_URL": "https://storage.googleapis.com"}, "", "https://storage.googleapis.com"),
        ("gs", {"AWS_ENDPOINT_URL": "http://minio.corp:9000"}, "", None),
        ("gs", {"CLOUD_STORAGE_EMULATOR_ENDPOINT": "https://storage.googleapis.com"}, "", None),
    ],
)
def test_an_object_at_an_endpoint_has_its_host_in_its_place(
    lay, bucket, monkeypatch, scheme, environment, options, host
):
    opened, _ = bucket
    lay("store/bucket/prod/run/traces.json")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with open_inputs([f"{scheme}://bucket/prod/run{options}"], filesystem_of=opened) as inputs:
        (run,) = inputs.runs
    (file,) = run.trace_files
    url = f"{host or f'{scheme}:/'}/bucket/prod/run"
    assert (file.location, run.folder) == (f"{url}/traces.json", url.replace("://", "/"))
    assert file.name == f"{scheme}://bucket/prod/run/traces.json"


def test_an_endpoint_that_is_no_url_is_one_line(bucket, monkeypatch):
    opened, _ = bucket
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://host:port")
    assert "cannot be read (Port could not be cast" in refused(UsageError, "s3://bucket/run", filesystem_of=opened)


def test_places_on_disk_are_absolute_and_without_links(lay, tmp_path):
    lay("far/traces.json", "far/deep/exp-config.yaml", "far/deep/year=2026/traces.json", "run/traces-1.json")
    Path("run/link").symlink_to("../far")
    Path("run/traces-2.json").symlink_to("../far/traces.json")
    Path("to-run").symlink_to("run")
    at = tmp_path.resolve()
    for path in ("run", "./run/", "to-run", str(tmp_path / "run"), f"file://{tmp_path}/to-run"):
        with open_inputs([path]) as inputs:
            places = {run.folder: [file.location for file in run.trace_files] for run in inputs.runs}
        assert places == {
            f"{at}/run": [f"{at}/run/traces-1.json", f"{at}/far/traces.json"],
            f"{at}/far": [f"{at}/far/traces.json"],
            f"{at}/far/deep": [f"{at}/far/deep/year=2026/traces.json"],
        }, path


def test_credentials_of_a_url_reach_the_store_and_no_name(lay, bucket):
    opened, asked = bucket
    lay("store/bucket/run/traces.json")
    url = "s3://KEY:SECRET@bucket/run?region=eu-west-1"
    assert runs_of(url, filesystem_of=opened) == {"run": ["s3://bucket/run/traces.json"]}
    assert asked == ["s3://KEY:SECRET@bucket/?region=eu-west-1"]
    line = refused(UsageError, url.replace("run?", "none?"), filesystem_of=opened)
    assert "SECRET" not in line
    assert "KEY" not in line


def test_a_store_that_refuses_is_one_line_of_usage():
    def forbidden(_):
        raise OSError("When listing: AWS Error ACCESS_DENIED during ListObjectsV2\nmore\nlines")

    line = refused(UsageError, "s3://bucket/run", filesystem_of=forbidden)
    assert line.startswith("s3://bucket/run: cannot be read (When listing: AWS Error ACCESS_DENIED")
    assert "more" not in line


@pytest.mark.parametrize("url", ["s3://", "s3://bucket/x?nonsense=1", "s3://b ü cket/x"])
def test_malformed_url_is_refused_in_one_line(url):
    refused(UsageError, url)


class Store(FileSystemHandler):
    """A store whose one object never ends, or fails after some bytes."""

    def __init__(self, fails_after=None):
        self.served = 0
        self.fails_after = fails_after

    def get_type_name(self):
        return "store"

    def get_file_info(self, paths):
        return [pa.fs.FileInfo(path, pa.fs.FileType.File, size=1 << 40) for path in paths]

    def open_input_stream(self, path):
        store = self

        class Endless(io.RawIOBase):
            def readable(self):
                return True

            def read(self, size=-1):
                if store.fails_after is not None and store.served >= store.fails_after:
                    raise OSError("connection reset")
                data = (b" " * 4000 + LINE) * (size // 4100)
                store.served += len(data)
                return data

        return pa.PythonFile(Endless(), mode="r")

    def _unused(self, *_):
        raise NotImplementedError

    copy_file = create_dir = delete_dir = delete_dir_contents = delete_file = delete_root_dir_contents = _unused
    get_file_info_selector = move = normalize_path = open_append_stream = open_input_file = _unused
    open_output_stream = _unused


def test_a_connection_that_breaks_is_one_line_and_no_short_file():
    store = Store(fails_after=30 << 20)
    file = TraceFile("s3://b/traces.json", "b/traces.json", 1 << 40, filesystem=PyFileSystem(store))
    with pytest.raises(UsageError, match=r"s3://b/traces.json: cannot be read beyond byte \d+ \(connection reset\)"):
        payloads(file)


@pytest.mark.parametrize("compression", ["plain", "gzip", "zstd"])
def test_progress_is_reported_in_bytes_of_the_file(tmp_path, otlp, compression):
    path = tmp_path / "traces.json"
    path.write_bytes(otlp.COMPRESSIONS[compression]((b" " * 4000 + LINE) * 1000)[:-3])
    progress: list[int] = []
    otlp.read_file(TraceFile.local(path), on_read=progress.append)
    assert sum(progress) == path.stat().st_size


def test_a_file_can_be_handed_to_another_process(tmp_path):
    path = tmp_path / "traces.json"
    path.write_bytes(LINE)
    remote = TraceFile("s3://b/traces.json", str(path), 1, filesystem=LocalFileSystem())
    for file in (TraceFile.local(path), remote):
        assert len(payloads(pickle.loads(pickle.dumps(file)))) == 1  # noqa: S301


def test_remote_files_are_read_once_and_hashed_on_the_way(lay, tmp_path):
    lay("a.json", "b.json")
    Path("scratch").mkdir()
    remote = [
        TraceFile(f"s3://b/{n}", str(tmp_path / n), 1, filesystem=LocalFileSystem()) for n in ("a.json", "b.json")
    ]
    progress: list[int] = []
    copies = fetch(remote, Path("scratch"), progress.append)
    assert [copy.file.name for copy in copies] == ["s3://b/a.json", "s3://b/b.json"]
    assert [payloads(copy.file) for copy in copies] == [[LINE.strip()]] * 2
    assert sum(progress) == 2 * len(LINE)
    expected = hashlib.sha256(LINE).hexdigest()
    assert [copy.content_hash for copy in copies] == [expected] * 2
    assert content_hash_of(TraceFile.local("a.json")) == expected


@pytest.mark.parametrize("name", ["exp-config.yaml", "config.json"])
def test_a_configuration_that_is_no_file_is_refused(lay, name):
    lay("run/traces.json")
    os.mkfifo(f"run/{name}")
    assert "not a regular file" in refused(UsageError, "run/traces.json")
    assert f"run/{name}: is not a regular file" in refused(UsageError, "run")
    Path(f"run/{name}").unlink()
    Path(f"run/{name}").symlink_to("/dev/zero")
    assert "not a regular file" in refused(UsageError, "run/traces.json")
    assert f"run/{name}: is not a regular file" in refused(UsageError, "run")


def test_a_pattern_that_matches_a_pipe_or_device_does_not_hang(lay):
    lay("run/traces-1.json")
    os.mkfifo("run/traces-2.json")
    assert "run/traces-2.json: cannot be opened (not a regular file)" in refused(UsageError, "run/*.json")
