"""Every command says of tables and results in a bucket what it says of the same in a folder."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

OUT = "s3://fleet/out"


@pytest.fixture
def same(bucket, trained, tracefit):
    """Return a function that runs a command on a folder and on its copy in the bucket, and compares what it says."""
    bucket.copy_of(trained, "out")

    def compare(*arguments):
        local = tracefit(*(str(a).replace(OUT, str(trained)) for a in arguments))
        remote = tracefit(*arguments)
        assert [part.replace(OUT, str(trained)) if isinstance(part, str) else part for part in remote] == [*local]
        return remote

    return compare


@pytest.mark.mostly_slow(every=6)
@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", OUT),
        ("inspect", f"{OUT}/tables"),
        ("requests", OUT),
        ("requests", OUT, "--json"),
        ("predict", OUT, "--batch", "4", "--context", "50", "--feature", "num_gpu_blocks=500"),
        ("compare", OUT, OUT),
    ],
    ids=" ".join,
)
def test_what_is_read_is_the_same(same, arguments):
    code, said, errors = same(*arguments)
    assert code == 0, errors
    assert said


@pytest.mark.slow
def test_models_are_verified(same):
    code, said, _ = same("verify", OUT)
    assert code == 0
    assert "confirmed" in said


@pytest.mark.slow
@pytest.mark.usefixtures("whole_pages")
def test_a_report_is_drawn_in_the_bucket(same, bucket):
    before = {name: bucket.objects.pop(f"out/{name}")[0] for name in ("report.md", "report.html")}
    code, _, _ = same("report", OUT)
    assert code == 0
    assert {name: bucket.objects[f"out/{name}"][0] for name in before} == before


@pytest.mark.slow
def test_a_whole_job_leaves_the_same_in_a_bucket(tmp_path, bucket, tracefit, new_traces):
    folder = new_traces().load().write(tmp_path / "busy")
    options = ("--fast", "--features", "batch")
    local = tracefit("run", folder, "--out", tmp_path / "out", *options)
    remote = tracefit("run", folder, "--out", OUT, *options)
    assert [str(part).replace(OUT, str(tmp_path / "out")) for part in remote] == [str(part) for part in local]
    for path in (tmp_path / "out").glob("**/*.*"):
        name = path.relative_to(tmp_path / "out").as_posix()
        if not name.startswith("tables/"):
            ours, theirs = bucket.objects[f"out/{name}"][0], path.read_bytes()
            assert _undated(name, ours) == _undated(name, theirs), name
    code, _, _ = tracefit("train", f"{OUT}/tables", "--out", f"{OUT}/again", *options)
    assert code == 0
    one, other = (bucket.objects[f"out/{folder}/beta.json"][0] for folder in ("models", "again"))
    assert _undated("beta.json", one) == _undated("beta.json", other)


def _undated(name, content):
    if not name.endswith("beta.json") and not name.endswith("alpha.json"):
        return len(content) > 0
    return json.loads(content)["models"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("ingest", "run", "--out", OUT), marks=pytest.mark.slow),
        pytest.param(("train", OUT, "--out", "models"), marks=pytest.mark.slow),
        pytest.param(("report", OUT), marks=pytest.mark.slow),
        ("requests", OUT),
    ],
)
def test_without_the_library_one_line_says_what_to_install(tmp_path, traces, arguments):
    traces.request(1, 0, step=1).write(tmp_path / "run")
    code = "import sys; sys.modules['obstore'] = None; from tracefit.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "need obstore; pip install 'tracefit[buckets]'" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_what_a_consumer_loads_is_written_to_the_bucket(bucket, trained, tracefit):
    bucket.copy_of(trained, "out")
    code, said, _ = tracefit("export", OUT, "--to", "csv", "--out", f"{OUT}/csv")
    assert code == 0
    assert f"{OUT}/csv/" in said
    assert bucket.names("out/csv/")
