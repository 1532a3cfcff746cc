"""Two jobs in one folder: one waits or is refused with one line, and the results are of one job."""

from __future__ import annotations

import fcntl
import os
import threading

import pytest

import tracefit
from tracefit import TrainOptions, UsageError
from tracefit.progress import NullProgress
from tracefit.tables import disk
from tracefit.tables.disk import write_files
from tracefit.tables.store import TableStore

FAST = TrainOptions(fast=True, features="batch")


def _is_locked(folder):
    """Return whether another thread has to wait for a folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


class _AtStages(NullProgress):
    """Does something at the beginning of each stage, and keeps the warnings."""

    def __init__(self, action):
        self.action = action
        self.warnings = []
        self.waits = threading.Event()

    def stage(self, text):
        self.action(text)

    def warn(self, text):
        self.warnings.append(text)
        self.waits.set()


@pytest.fixture
def tables(tmp_path, traces):
    """Ingest one run."""
    tracefit.ingest(traces.load().write(tmp_path / "run"), tmp_path / "tables")
    return tmp_path / "tables"


@pytest.mark.slow
def test_run_has_its_tables_to_itself_until_its_report_is_written(tmp_path, traces):
    run, out = traces.load().write(tmp_path / "run"), tmp_path / "out"
    locked = {}
    progress = _AtStages(lambda text: locked.update({text: (out / "tables").exists() and _is_locked(out / "tables")}))
    tracefit.run(run, out, options=FAST, progress=progress)
    assert {text.split()[0] for text in locked} >= {"reading", "fitting", "replaying", "drawing"}
    assert all(locked.values())
    assert not _is_locked(out / "tables")


@pytest.mark.slow
def test_training_waits_for_another_writer_of_its_tables(tmp_path, tables):
    held = os.open(tables, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    progress = _AtStages(lambda _: None)
    job = threading.Thread(
        target=tracefit.train,
        args=(tables, tmp_path / "models"),
        kwargs={"options": FAST, "progress": progress},
    )
    job.start()
    try:
        assert progress.waits.wait(60)
        assert progress.warnings == [f"{tables}: another process is writing there; waiting for it"]
        assert not (tmp_path / "models").exists()
    finally:
        os.close(held)
        job.join(60)
    assert (tmp_path / "models" / "alpha.json").is_file()


@pytest.mark.slow
def test_training_frames_are_not_put_on_tables_that_changed(tmp_path, tables):
    # As in a bucket, where nobody waits: there it is another process that replaces the run.
    def change(text):
        if text.startswith("replaying"):
            store = TableStore(tables)
            store.write_runs([("run", {"steps": store.read("steps").head(1)})])

    with pytest.raises(UsageError, match=r"run run was changed by another process meanwhile"):
        tracefit.train(tables, tmp_path / "models", options=FAST, progress=_AtStages(change))
    assert not (tmp_path / "models").exists()
    assert "beta_training" not in TableStore(tables).manifest().runs["run"].tables


def test_the_files_of_one_result_are_put_in_place_together(tmp_path, monkeypatch):
    folders, locked = (tmp_path / "models", tmp_path), []
    put = disk._put_in_place
    monkeypatch.setattr(
        disk, "_put_in_place", lambda *names: (locked.append([_is_locked(f) for f in folders]), put(*names))
    )
    write_files({tmp_path / "models" / "alpha.json": "{}", tmp_path / "evaluation.json": "{}"})
    assert locked == [[True, True], [True, True]]
    assert not any(_is_locked(folder) for folder in folders)


def test_a_thread_may_lock_its_folder_again(tmp_path):
    with TableStore(tmp_path).lock():
        with TableStore(tmp_path).lock():
            assert _is_locked(tmp_path)
        assert _is_locked(tmp_path)
        write_files({tmp_path / "report.md": "text"})
    assert not _is_locked(tmp_path)
