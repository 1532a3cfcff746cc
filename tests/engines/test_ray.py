"""Ray: the same tables as on this machine, whatever dies, and one line for what cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tracefit import EngineChoice, IngestOptions, TrainOptions, UsageError, ingest, train
from tracefit.engines.jobs import Job, WorkerError
from tracefit.progress import NullProgress
from tracefit.tables.store import TableStore

# Tests start clusters that nobody else sees: they need no token.
os.environ["RAY_AUTH_MODE"] = "disabled"
ray = pytest.importorskip("ray", reason="Ray is not installed: `make test-ray` installs it beside")
from ray.cluster_utils import Cluster  # noqa: E402 - after the test for Ray

from tracefit.engines.ray import MOST_TRIES, RayEngine  # noqa: E402

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.flaky(reason="a node of Ray has 30 s to start, a fixed limit, which a busy machine passes"),
    # Ray's own, of sockets and of what it deprecates.
    pytest.mark.filterwarnings("ignore"),
]

HERE = EngineChoice("ray")
CLIENT_PORT = 9941
OBJECTS_BYTES = 100 << 20

MANY_BLOCKS = IngestOptions(block_bytes=20_000)
"""Files are cut into so many blocks that every node gets some."""


@pytest.fixture(scope="module")
def cluster():
    """Return a cluster of three nodes of one CPU each, on this machine; tests may add more."""
    made = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 1,
            "include_dashboard": False,
            "object_store_memory": OBJECTS_BYTES,
            "ray_client_server_port": CLIENT_PORT,
        },
    )
    for _ in range(2):
        made.add_node(num_cpus=1, object_store_memory=OBJECTS_BYTES)
    yield made
    made.shutdown()


@pytest.fixture
def expected(tmp_path, fleet, bytes_of):
    """Return the tables as this process makes them."""
    ingest([fleet], tmp_path / "expected", workers=1, options=MANY_BLOCKS)
    return bytes_of(tmp_path / "expected")


def _nothing_left(tables):
    parts = {part.name for part in (tables / ".stage").iterdir()}
    assert parts == TableStore(tables).manifest().staged()
    assert not list(tables.glob(".writing-*"))


def test_ray_started_here_writes_the_same_bytes(tmp_path, fleet, bytes_of, expected):
    # Worth a process each: the last run is built here, and both workers do parts of it.
    options = replace(MANY_BLOCKS, bytes_per_worker=1)
    ingest([fleet], tmp_path / "tables", workers=2, engine=HERE, options=options)
    assert bytes_of(tmp_path / "tables") == expected
    _nothing_left(tmp_path / "tables")
    assert not ray.is_initialized()


def test_a_cluster_of_three_nodes_writes_the_same_bytes(tmp_path, fleet, bytes_of, expected, cluster, monkeypatch):
    monkeypatch.chdir(tmp_path)  # workers have a working folder of their own
    result = ingest([fleet], "tables", engine=EngineChoice("ray", cluster.address), options=MANY_BLOCKS)
    assert len(result.runs) == 5
    assert bytes_of(tmp_path / "tables") == expected


def test_training_on_a_cluster_gives_the_same_files(tmp_path, fleet, cluster, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ingest([fleet], "tables", workers=1)
    train("tables", "here", options=TrainOptions(fast=True))
    train("tables", "there", options=TrainOptions(fast=True), engine=EngineChoice("ray", cluster.address))
    for name in ("alpha.json", "beta.json"):
        assert (tmp_path / "there" / name).read_bytes() == (tmp_path / "here" / name).read_bytes()


def test_a_cluster_is_reached_by_its_client_port(tmp_path, fleet, bytes_of, cluster):
    ingest([fleet], tmp_path / "here", workers=1)
    for _ in range(3):  # Ray gives a client's server 30 seconds to start, which a busy machine passes
        done = _command(
            "ingest", fleet, "--out", tmp_path / "tables", "--ray-address", f"ray://127.0.0.1:{CLIENT_PORT}"
        )
        if "Initialization failure" not in done.stderr:
            break
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert bytes_of(tmp_path / "tables") == bytes_of(tmp_path / "here")


def _command(*arguments, cwd=None):
    code = "import sys; sys.path.pop(0); from tracefit.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments, "--engine", "ray", "--quiet"],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


class _Kills(NullProgress):
    """Kills a node when the first run is done: the others are decoded and built then."""

    def __init__(self, cluster, node):
        self.cluster, self.node, self.notes = cluster, node, []

    def note(self, text):
        self.notes.append(text)
        if text.startswith("1 of"):
            self.cluster.remove_node(self.node, allow_graceful=False)


def test_a_node_killed_in_the_middle_changes_nothing(tmp_path, fleet, bytes_of, expected, cluster):
    node = cluster.add_node(num_cpus=2, object_store_memory=OBJECTS_BYTES)
    progress = _Kills(cluster, node)
    choice = EngineChoice("ray", cluster.address)
    ingest([fleet], tmp_path / "tables", engine=choice, progress=progress, options=MANY_BLOCKS)
    assert progress.notes[0] == "0 of 5 runs, 5 workers"
    assert bytes_of(tmp_path / "tables") == expected
    _nothing_left(tmp_path / "tables")


DIES_ONCE = """
import os, pathlib
try:
    pathlib.Path({marker!r}).touch(exist_ok=False)
except FileExistsError:
    pass
else:
    os.kill(os.getpid(), 9)
"""


def _result_of(engine, code):
    jobs = [Job(exec, code, "traces.json", None)]
    ((_, result),) = engine.run(lambda: jobs.pop() if jobs else None)
    return result


def test_a_worker_killed_once_is_replaced(tmp_path, cluster):
    with RayEngine(cluster.address, None) as engine:
        assert _result_of(engine, DIES_ONCE.format(marker=str(tmp_path / "died"))) is None
    assert (tmp_path / "died").exists()


def test_a_worker_that_dies_every_time_is_one_line(cluster):
    line = f"traces.json: a worker died while it was read, {MOST_TRIES} times (WorkerCrashedError)"
    with RayEngine(cluster.address, None) as engine, pytest.raises(WorkerError) as caught:
        _result_of(engine, "import os; os.kill(os.getpid(), 9)")
    assert caught.value.line().startswith(line)


TAKES_MUCH = "import numpy, time; much = numpy.ones({size}, numpy.uint8); time.sleep(60)"


def test_a_worker_out_of_memory_is_one_line_after_a_few_tries(cluster):
    """Ray kills what takes a node past its limit, here a little above what is used now."""
    pages = {name: os.sysconf(name) for name in ("SC_PAGE_SIZE", "SC_PHYS_PAGES")}
    total = pages["SC_PAGE_SIZE"] * pages["SC_PHYS_PAGES"]
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    used = total - 1024 * int(meminfo["MemAvailable"].split()[0])
    limit = (used + (3 << 30)) / total
    code = TAKES_MUCH.format(size=5 << 30)
    script = f"""
from tracefit.engines.ray import RayEngine
from tracefit.engines.jobs import Job
with RayEngine(None, 1) as engine:
    jobs = [Job(exec, {code!r}, "traces.json", None)]
    try:
        list(engine.run(lambda: jobs.pop() if jobs else None))
    except Exception as error:
        print(error.line())
"""
    given = {"RAY_memory_usage_threshold": f"{limit:.3f}", "RAY_memory_monitor_refresh_ms": "100"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **given},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "4 times (OutOfMemoryError); if memory ran out, use fewer `workers`" in done.stdout, done.stderr


def test_workers_import_nothing_from_the_working_folder(tmp_path, fleet):
    for module in ("yaml", "polars", "numpy", "pickle", "socket"):
        marker = tmp_path / f"ran-{module}"
        (fleet / f"{module}.py").write_text(f"open({str(marker)!r}, 'w').close()\nraise SystemExit(9)\n")
    done = _command("ingest", ".", "--out", tmp_path / "tables", "--workers", "2", cwd=fleet)
    assert [p.name for p in tmp_path.glob("ran-*")] == []
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "nonsense", "auto"])
def test_silent_address_is_one_line_and_writes_nothing(tmp_path, fleet, address, monkeypatch):
    def finds_none(**_):
        raise ConnectionError("Could not find any running Ray instance.\nPlease start one.")

    if address == "auto":  # a cluster of another test may run
        monkeypatch.setattr(ray, "init", finds_none)
    with pytest.raises(UsageError) as caught:
        ingest([fleet], tmp_path / "tables", engine=EngineChoice("ray", address))
    assert caught.value.line().startswith(f"{address}: ")
    assert "\n" not in caught.value.line()
    assert not (tmp_path / "tables").exists()


def test_a_cluster_of_another_version_of_ray_is_one_line(tmp_path, fleet, cluster, monkeypatch):
    monkeypatch.setattr(ray, "__version__", "0.0.1")
    with pytest.raises(UsageError, match=r"Version mismatch.*same Ray and Python") as caught:
        ingest([fleet], tmp_path / "tables", engine=EngineChoice("ray", cluster.address))
    assert "\n" not in caught.value.line()
    assert not (tmp_path / "tables").exists()


def test_cluster_with_another_version_is_refused(tmp_path, fleet, cluster, monkeypatch, files_in):
    monkeypatch.setattr("tracefit.engines.ray.__version__", "0.0.1")
    with pytest.raises(UsageError, match=r"node .*: has tracefit .*, this is 0.0.1; install the same"):
        ingest([fleet], tmp_path / "tables", engine=EngineChoice("ray", cluster.address))
    assert files_in(tmp_path / "tables") == []


def test_a_folder_that_nodes_do_not_see_is_one_line(tmp_path, cluster):
    with (
        RayEngine(cluster.address, None) as engine,
        pytest.raises(UsageError, match=r"does not see .*bucket"),
    ):
        engine.check(tmp_path / "elsewhere" / ".writing-1")
