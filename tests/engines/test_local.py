"""Runs are decoded and built by workers: same tables, each run whole or not at all, and nobody is idle for long."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tracefit import DataError, EngineChoice, IngestOptions, UsageError, ingest
from tracefit.commands.deployments import write_timelines
from tracefit.commands.ingest import ingest_inputs
from tracefit.engines import cores as engine_cores
from tracefit.engines.cores import available_cores
from tracefit.engines.jobs import Job, attempt, call_here, spread
from tracefit.engines.local import LocalEngine
from tracefit.inputs.discovery import open_inputs
from tracefit.options import BuildLimits, ServerOptions
from tracefit.progress import NullProgress
from tracefit.tables.store import TableStore

EVERY_BYTE = IngestOptions(bytes_per_worker=1)


@pytest.mark.slow
def test_one_worker_and_two_write_the_same_bytes(tmp_path, read_by_one, bytes_of, small_pieces):
    fleet, one = read_by_one
    ingest([fleet], tmp_path / "two", workers=2, options=small_pieces)
    assert {name.split("/")[1] for name in one} == {f"run_id={run}" for run in "abcde"}
    assert bytes_of(tmp_path / "two") == one


class _Recorded(LocalEngine):
    """An engine that runs everything here and notes the jobs in their order."""

    def __init__(self, workers=1, *, ended_last_first=False):
        super().__init__(workers)
        self.jobs, self.parts = [], []
        self._most, self._turn = (4, -1) if ended_last_first else (1, 0)

    def limit(self, workers):
        self.workers = min(self.workers, workers)

    def run(self, next_job):
        waiting = []
        noted = self.parts if any(job.is_shared for job in self.jobs) else self.jobs
        while True:
            while len(waiting) < self._most and (job := next_job()) is not None:
                noted.append(job)
                waiting.append(job)
            if not waiting:
                return
            assert len(waiting) == 1 or not any(job.is_shared for job in waiting), "beside a shared job"
            job = waiting.pop(self._turn)
            yield job, call_here(self, job)


def _recorded(folder, out, options=EVERY_BYTE, **how):
    """Ingest with a recording engine and return it."""
    engine = _Recorded(**how)
    with open_inputs([folder]) as inputs:
        ingest_inputs(inputs, out, ServerOptions(), NullProgress(), engine=engine, options=options)
    return engine


def _kinds(engine):
    return [(job.function.__name__, len(getattr(job.argument, "items", job.argument))) for job in engine.jobs]


@pytest.mark.slow
def test_small_runs_share_jobs(tmp_path, fleet):
    assert _kinds(_recorded(fleet, tmp_path / "tables")) == [("decode_task", 5), ("build_runs", 5)]


@pytest.mark.slow
def test_largest_run_is_read_and_built_first(tmp_path, fleet, small_pieces):
    engine = _recorded(fleet, tmp_path / "tables", small_pieces)
    read = [Path(job.name).parent.name for job in engine.jobs if job.function.__name__ == "decode_task"]
    assert read[0] == "a"
    built = [job.argument[0].run_id for job in engine.jobs if job.function.__name__ == "build_runs"]
    assert built[0] == "a"
    names = [job.function.__name__ for job in engine.jobs]
    assert "decode_task" in names[names.index("build_runs") :]


@pytest.mark.slow
def test_a_large_run_has_the_same_tables(tmp_path, fleet, bytes_of):
    ingest([fleet / "b"], tmp_path / "small", workers=1)
    few = IngestOptions(build=BuildLimits(small_run_rows=50))  # passed within the second table
    ingest([fleet / "b"], tmp_path / "large", workers=1, options=few)
    store = TableStore(tmp_path / "large")
    assert "timeline" not in store.manifest().runs["b"].tables
    write_timelines(store, ["b"])
    assert bytes_of(tmp_path / "large") == bytes_of(tmp_path / "small")


@pytest.mark.slow
def test_ready_runs_are_shared_out_to_all_workers(tmp_path, fleet):
    built = [n for name, n in _kinds(_recorded(fleet, tmp_path / "tables", workers=2)) if name == "build_runs"]
    assert built == [3, 1, 1]  # half of five, then half of the two that are left


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "last"), [(1, [6, 6]), (2, [3, 4, 3, 1, 1])])
def test_small_runs_fill_jobs_as_long_as_the_others_have_work(tmp_path, new_traces, workers, last):
    for number in range(24):
        new_traces().load(steps=40, requests=12).write(tmp_path / "runs" / f"run-{number:02}")
    size = (tmp_path / "runs" / "run-00" / "traces.json").stat().st_size
    options = replace(EVERY_BYTE, block_bytes=2 * size)
    engine = _recorded(tmp_path / "runs", tmp_path / "tables", options, workers=workers)
    built = [n for name, n in _kinds(engine) if name == "build_runs"]
    # Three blocks of two runs. When fewer than twelve are left, two workers each take half of those that wait, rounded
    # up: of 6, of 3 + 4, of 3 + 2, of 2, of 1.
    assert built == [6, 6, *last]


def _builds(engine):
    return [
        ([task.run_id for task in job.argument], job.is_shared)
        for job in engine.jobs
        if job.function.__name__ == "build_runs"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("ended_last_first", [False, True])
def test_all_workers_build_a_run_that_would_end_after_the_others(tmp_path, fleet, small_pieces, ended_last_first):
    options = replace(small_pieces, bytes_per_worker=(fleet / "a" / "traces.json").stat().st_size // 4)
    how = {"workers": 12, "ended_last_first": ended_last_first}
    *others, last = _builds(_recorded(fleet, tmp_path / "tables", options, **how))
    assert last == (["a"], True)
    assert {run for runs, is_shared in others for run in runs if not is_shared} == set("bcde")


@pytest.mark.slow
def test_of_equal_runs_one_worker_each_builds_all_but_the_last(tmp_path, new_traces, small_pieces):
    for run in "abc":
        new_traces().load(steps=40, requests=12).write(tmp_path / "runs" / run)
    smaller = replace(small_pieces, block_bytes=20_000)
    builds = _builds(_recorded(tmp_path / "runs", tmp_path / "tables", smaller, workers=2))
    assert builds == [(["a"], False), (["b"], False), (["c"], True)]


@pytest.mark.slow
def test_one_worker_shares_nothing(tmp_path, fleet):
    assert not any(job.is_shared for job in _recorded(fleet, tmp_path / "tables", workers=1).jobs)


@pytest.mark.slow
@pytest.mark.parametrize("ended_last_first", [False, True])
def test_parts_of_the_last_large_run_are_jobs(tmp_path, new_traces, bytes_of, small_pieces, ended_last_first):
    new_traces().load(steps=120, requests=30).write(tmp_path / "run")
    ingest([tmp_path / "run"], tmp_path / "one", workers=1, options=small_pieces)
    how = {"workers": 2, "ended_last_first": ended_last_first}
    engine = _recorded(tmp_path / "run", tmp_path / "two", small_pieces, **how)
    assert bytes_of(tmp_path / "two") == bytes_of(tmp_path / "one")
    assert [job.function.__name__ for job in engine.jobs if job.is_shared] == ["build_runs"]
    assert len(engine.parts) > 2 * 2 + 6  # windows, each read twice, and the tables
    assert all(pickle.dumps((job.function, job.argument)) for job in engine.parts)


@pytest.mark.parametrize("ended_last_first", [False, True])
def test_results_of_parts_have_the_order_of_the_parts(ended_last_first):
    engine = _Recorded(ended_last_first=ended_last_first)
    assert list(spread(engine, "run", str, iter(range(10)))) == [str(number) for number in range(10)]
    assert {job.name for job in engine.jobs} == {"run"}


def test_a_part_that_waits_for_a_result_is_asked_for_again():
    """A null item means that the next one needs a result first: the last item is the sum of the first two results."""
    results = []

    def items():
        yield from (1, 2)
        yield from itertools.takewhile(lambda _: len(results) < 2, itertools.repeat(None, 100))
        yield sum(results)

    results.extend(spread(_Recorded(ended_last_first=True), "run", (10).__mul__, items()))
    assert results == [10, 20, 300]


@pytest.mark.slow
def test_steps_of_stages_are_the_same_in_parts(tmp_path, bytes_of, small_pieces):
    """These steps are rows of the table only after the requests are joined."""
    run = Path(__file__).parents[2] / "fixtures/sglang/sglang-level3-tp2"
    options = replace(small_pieces, block_bytes=1 << 13, bytes_per_worker=1)
    ingest([run], tmp_path / "one", workers=1, options=options)
    engine = _recorded(run, tmp_path / "two", options, workers=2, ended_last_first=True)
    assert any(job.is_shared for job in engine.jobs)
    assert TableStore(tmp_path / "two").read("steps").height > 0
    assert bytes_of(tmp_path / "two") == bytes_of(tmp_path / "one")


@pytest.mark.slow
def test_rejects_of_every_table_are_listed_in_parts(tmp_path, traces, bytes_of, small_pieces):
    """A request departs 100 us before it finishes, which only the rows of `requests` show."""
    for number in range(1, 41):
        traces.request(number, 100_000 * number, step=5 * number, departs=300)
    first = next(s for s in traces.spans if s["name"] == "llm_request" and s["spanId"] == f"{2:016x}")
    traces.change(first["events"], lambda seconds: seconds - 400e-6, "event.ts.monotonic")
    run = traces.write(tmp_path / "run")
    ingest([run], tmp_path / "one", workers=1, options=small_pieces)
    engine = _recorded(run, tmp_path / "two", small_pieces, workers=2, ended_last_first=True)
    assert any(job.is_shared for job in engine.jobs)
    reasons = TableStore(tmp_path / "two").read("rejects")["reason"]
    assert "requests.departure_us is between events out of order" in reasons.to_list()
    assert bytes_of(tmp_path / "two") == bytes_of(tmp_path / "one")


@pytest.mark.mostly_slow(every=2)
@pytest.mark.skipif(sys.platform != "linux" or available_cores() < 2, reason="needs two cores of Linux")
@pytest.mark.parametrize("more", [0, 1])
def test_workers_have_a_core_each_if_they_have_all_cores(more, monkeypatch):
    """If other programs have some of the cores, the system chooses a core for each worker."""
    cores = os.sched_getaffinity(0)
    monkeypatch.setattr(engine_cores, "available_cores", lambda: len(cores) + more)
    wanted = {tuple(cores)} if more else {(core,) for core in cores}
    found, until = set(), time.monotonic() + 30

    def next_job():
        is_needed = found != wanted and time.monotonic() < until
        return Job(os.sched_getaffinity, 0, "run", None) if is_needed else None

    with LocalEngine(len(cores)) as engine:
        found.update(tuple(result) for _, result in engine.run(next_job))
    assert found == wanted


def _children():
    return {pid for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()}


@pytest.mark.skipif(sys.platform != "linux", reason="/proc names the children")
@pytest.mark.parametrize(("size", "started"), [(3, 2), (1, 0)])
def test_workers_start_before_the_first_jobs_are_made(size, started):
    before = _children()
    with LocalEngine(2) as engine:
        engine.limit(size)
        assert len(_children() - before) == started
    assert _children() <= before


def _done_by_workers(engine, calls):
    """Return the results of some calls, each of a function with one argument."""
    jobs = [Job(function, argument, "run", number) for number, (function, argument) in enumerate(calls)]
    waiting = iter(jobs)
    ended = {job.work: result for job, result in engine.run(lambda: next(waiting, None))}
    return [ended[job.work] for job in jobs]


def test_a_worker_has_threads_of_its_own_and_is_out_of_reach_of_ctrl_c(monkeypatch):
    monkeypatch.setenv("POLARS_MAX_THREADS", "77")
    calls = [(os.getenv, "POLARS_MAX_THREADS"), (os.getpgid, 0)]
    with LocalEngine(2) as engine:
        threads, group = _done_by_workers(engine, calls)
    assert threads == str(max(1, available_cores() // 2))
    assert group != os.getpgid(0), "Ctrl-C goes to the group of this process"
    assert os.environ["POLARS_MAX_THREADS"] == "77"


def test_a_defect_in_a_worker_is_raised_here_with_its_traceback():
    with LocalEngine(2) as engine, pytest.raises(ValueError, match="invalid literal") as caught:
        _done_by_workers(engine, [(int, "7"), (int, "seven")])
    assert any("In a worker" in note and "int" in note for note in caught.value.__notes__)


KILLED_AT_WORK = """
import os, signal, time
from tracefit.engines.jobs import Job
from tracefit.engines.local import LocalEngine

jobs = [Job(time.sleep, 600, "run", None)] * 2
with LocalEngine(2) as engine:
    for _ in engine.run(lambda: jobs.pop() if jobs else os.kill(os.getpid(), signal.SIGKILL)):
        pass
"""


@pytest.mark.parametrize("how", ["script", "standard input"])
def test_workers_end_with_the_process_that_started_them(tmp_path, how):
    """They have its standard output too, which is at its end once they are gone. A script is not run again by them."""
    script = tmp_path / "script.py"
    script.write_text(KILLED_AT_WORK)
    given = (
        {"args": [sys.executable, script]}
        if how == "script"
        else {"args": [sys.executable, "-"], "input": KILLED_AT_WORK}
    )
    done = subprocess.run(**given, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGKILL, "", "")


@pytest.mark.slow
def test_the_order_in_which_jobs_end_changes_nothing(tmp_path, read_by_one, bytes_of, small_pieces):
    fleet, first = read_by_one
    _recorded(fleet, tmp_path / "last", small_pieces, ended_last_first=True)
    assert bytes_of(tmp_path / "last") == first


@pytest.mark.slow
def test_rejects_count_in_the_order_of_the_file(tmp_path, traces, bytes_of, small_pieces):
    folder = traces.load(steps=120, requests=60).write(tmp_path / "run")
    lines = (folder / "traces.json").read_text().splitlines(keepends=True)
    (folder / "traces.json").write_text("".join(text for line in lines for text in (line, "{]\n")))
    few = replace(small_pieces, max_rejects=7)
    _recorded(folder, tmp_path / "first", few)
    _recorded(folder, tmp_path / "last", few, ended_last_first=True)
    # Seven at most of the block in which the limit is passed, and one that says that the rest is not read.
    assert 7 < TableStore(tmp_path / "last").read("rejects")["count"].sum() <= 6 + 7 + 1
    assert bytes_of(tmp_path / "last") == bytes_of(tmp_path / "first")


@pytest.mark.slow
def test_a_run_that_fails_leaves_the_others_whole(tmp_path, fleet, new_traces):
    (fleet / "b" / "traces.json").write_text("no trace at all\n")
    result = ingest([fleet], tmp_path / "tables")
    assert [run.run_id for run in result.runs] == ["a", "c", "d", "e"]
    (line,) = result.failed
    assert line.startswith(f"{fleet}/b: none of its records can be read")
    assert TableStore(tmp_path / "tables").runs() == ["a", "c", "d", "e"]


@pytest.mark.slow
def test_two_runs_of_one_name_are_numbered_as_read_in_turn(tmp_path, new_traces):
    for number, folder in enumerate(("x/run", "y/run"), start=1):
        new_traces().request(number, 0, step=1).write(tmp_path / folder)
    result = ingest([tmp_path / "x" / "run", tmp_path / "y" / "run"], tmp_path / "tables")
    assert [run.run_id for run in result.runs] == ["run", "run-2"]
    assert result.warnings == ("run: another run of that name is in the tables already; this one is run-2",)


class _Notes(NullProgress):
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


@pytest.mark.slow
def test_progress_counts_runs_and_workers(tmp_path, fleet):
    progress = _Notes()
    ingest([fleet], tmp_path / "tables", workers=1, progress=progress)
    assert progress.notes == [f"{n} of 5 runs, 1 worker" for n in range(6)]


def _fails(argument):
    raise argument


@pytest.mark.parametrize(
    "error", [DataError("bad", where="here"), UsageError("odd", hint="other"), OSError(28, "full")]
)
def test_error_of_a_worker_is_raised_unchanged(error):
    value, found = pickle.loads(pickle.dumps(attempt(_fails, error, flags=False)))  # noqa: S301
    assert value is None
    assert type(found) is type(error)
    assert (str(found), vars(found)) == (str(error), vars(error))


def test_an_address_without_ray_is_refused(tmp_path, fleet):
    with pytest.raises(UsageError, match="goes with"):
        ingest([fleet], tmp_path / "tables", engine=EngineChoice(ray_address="auto"))
    assert not (tmp_path / "tables").exists()


def test_without_ray_it_is_one_line_and_nothing_is_written(tmp_path, fleet, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError) as caught:
        ingest([fleet], tmp_path / "tables", engine=EngineChoice("ray"))
    assert (caught.value.line(), caught.value.exit_code) == (
        "Ray is not installed; pip install 'tracefit[ray]'",
        2,
    )
    assert not (tmp_path / "tables").exists()
