"""Whatever stops an ingest, what was there stays whole, and running it again completes it."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from tracefit import DataError, UsageError, ingest
from tracefit.commands.ingest import ingest_inputs
from tracefit.engines.local import LocalEngine
from tracefit.inputs.discovery import open_inputs
from tracefit.options import ServerOptions
from tracefit.progress import NullProgress
from tracefit.tables.store import TableStore

MOMENTS = int(os.environ.get("KILLED", "3"))
"""How many times an ingest is killed; `make fuzz` kills it more often."""

FORKING = """
import os, signal, sys, time, random
from tracefit import IngestOptions, ingest   # imported once: every child is at work at once

def child(run, tables):
    pid = os.fork()
    if pid == 0:
        ingest([run], tables, options=IngestOptions(bytes_per_worker=1), workers=int(workers))
        os._exit(0)
    return pid

workers, run, *folders = sys.argv[1:]
began = time.monotonic()
os.waitpid(child(run, folders.pop()), 0)
whole = time.monotonic() - began
moments = random.Random(7)
for tables in folders:
    pid = child(run, tables)
    time.sleep(whole * moments.random())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
"""
"""Ingests into the last folder undisturbed, and into all others until it is killed."""


@pytest.fixture
def grown(tmp_path, new_traces):
    """Return a function that makes a tables folder of the first half of a run, and the whole run's folder."""
    lines = new_traces().load(steps=120, requests=30).lines()
    folder = tmp_path / "run"
    folder.mkdir()
    trace = folder / "traces.json"

    def half(name):
        trace.write_text("".join(f"{line}\n" for line in lines[:20]))
        ingest([folder], tmp_path / name)
        trace.write_text("".join(f"{line}\n" for line in lines))
        return tmp_path / name

    return half, folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "moments"),
    [(1, MOMENTS), (2, MOMENTS)],
)
def test_kill_leaves_whole_tables_and_a_run_to_repeat(tmp_path, grown, contents, workers, moments):
    half, run = grown
    first = half("half")
    old = contents(first)
    folders = [tmp_path / f"killed-{n}" for n in range(moments)]
    for folder in folders:
        subprocess.run(["cp", "-r", first, folder], check=True)
    subprocess.run(
        [sys.executable, "-c", FORKING, str(workers), run, *folders, tmp_path / "whole"],
        check=True,
        timeout=300,
    )
    new = contents(tmp_path / "whole")
    assert new != old
    for folder in folders:
        left = contents(folder)
        assert _same_events(left, old) or _same_events(left, new)
        # Steps are worked out last: until then the table is empty, and never has those of other events.
        assert left in (old, new) or left["timeline"] == []
        ingest([run], folder, workers=1)
        assert contents(folder) == new
        assert not list(folder.glob(".writing-*"))
        parts = {p.name for p in (folder / ".stage").iterdir()}
        assert parts == TableStore(folder).manifest().staged()


def _same_events(one, other):
    """Tell whether all is the same except what follows from the steps."""
    later = ("timeline", "requests")
    return len(one["requests"]) == len(other["requests"]) and all(one[k] == other[k] for k in one if k not in later)


@pytest.fixture
def full_disk(monkeypatch):
    """Return a function after which the files that `pathlib` opens again take so many bytes between them."""

    def fill(size_bytes):
        left = [size_bytes]

        class Counted(io.FileIO):
            def write(self, data):
                left[0] -= len(memoryview(data).cast("B"))
                if left[0] < 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return super().write(data)

        opened = Path.open
        monkeypatch.setattr(
            Path,
            "open",
            lambda path, mode="r", **how: Counted(path, "w") if mode == "wb" else opened(path, mode, **how),
        )

    return fill


@pytest.mark.slow
@pytest.mark.parametrize(
    "size_bytes",
    [0, 3_000, 20_000, 45_000, 60_000],
)
def test_a_full_disk_is_one_line_and_leaves_what_was_whole(
    tmp_path, grown, contents, monkeypatch, full_disk, size_bytes, small_pieces
):
    half, run = grown
    tables = half("tables")
    old = contents(tables)
    full_disk(size_bytes)
    with pytest.raises(UsageError, match=r"tables: cannot be written \(No space left on device\)") as caught:
        ingest([run], tables, workers=1, options=small_pieces)
    monkeypatch.undo()
    assert "\n" not in caught.value.line()
    assert contents(tables) == old
    assert not list(tables.rglob(".writing-*"))
    ingest([run], tables, workers=1)
    ingest([run], tmp_path / "fresh")
    assert contents(tables) == contents(tmp_path / "fresh")


class _Warnings(NullProgress):
    def __init__(self):
        self.warnings = []
        self.waits = threading.Event()

    def warn(self, text):
        self.warnings.append(text)
        self.waits.set()


@pytest.mark.slow
def test_a_folder_in_use_is_waited_for(tmp_path, traces):
    run = traces.request(1, 0, step=1).write(tmp_path / "run")
    (tmp_path / "tables").mkdir()
    held = os.open(tmp_path / "tables", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    progress = _Warnings()
    second = threading.Thread(target=ingest, args=([run], tmp_path / "tables"), kwargs={"progress": progress})
    second.start()
    assert progress.waits.wait(30)
    assert progress.warnings == [f"{tmp_path / 'tables'}: another process is writing there; waiting for it"]
    assert not list((tmp_path / "tables").iterdir())
    os.close(held)
    second.join(30)
    assert TableStore(tmp_path / "tables").runs() == ["run"]


@pytest.mark.slow
def test_two_ingests_at_once_lose_nothing(tmp_path, new_traces, contents):
    runs = [new_traces().request(n, 0, step=1).write(tmp_path / f"run{n}") for n in (1, 2)]
    code = "import sys; from tracefit import ingest; ingest([sys.argv[1]], sys.argv[2])"
    jobs = [subprocess.Popen([sys.executable, "-c", code, run, tmp_path / "tables"]) for run in runs]
    assert [job.wait(60) for job in jobs] == [0, 0]
    assert TableStore(tmp_path / "tables").runs() == ["run1", "run2"]


class _Deadly(LocalEngine):
    """Workers that die of every job."""

    def run(self, next_job):
        return super().run(lambda: (job := next_job()) and replace(job, function=os._exit, argument=1))


def test_a_worker_that_dies_is_one_line(tmp_path, traces, small_pieces):
    run = traces.load(steps=240, requests=30).write(tmp_path / "run")
    with (
        open_inputs([run]) as inputs,
        pytest.raises(DataError, match=r"traces.json: a worker died while it was read") as caught,
    ):
        ingest_inputs(
            inputs,
            tmp_path / "tables",
            ServerOptions(),
            NullProgress(),
            engine=_Deadly(2),
            options=small_pieces,
        )
    assert "\n" not in caught.value.line()
    assert TableStore(tmp_path / "tables").runs() == []
