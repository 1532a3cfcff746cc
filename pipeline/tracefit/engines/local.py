"""The engine of this machine: one process, or as many as there are cores; and the choice between it and Ray.

Workers do not import from the working folder, share the cores' threads among them, and end with the process
that started them.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self

from tracefit import memory
from tracefit.engines.cores import available_cores, keep_to_core, team_of
from tracefit.engines.jobs import TASKS_PER_WORKER, WorkerError, attempt, call_here
from tracefit.errors import UsageError, names_flags
from tracefit.options import EngineChoice, WorkersOption, named

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from concurrent.futures import Future, ProcessPoolExecutor
    from multiprocessing.connection import Connection

    from tracefit.engines.jobs import Job, TaskEngine

    _Outcome = tuple[Any, Exception | None]

_TURN_S = 0.2


class LocalEngine:
    """Processes of this machine, started by `limit`, or once two jobs are ready at the same time.

    A single job runs in this process with all cores; a worker has its share of them. A shared job gives parts of its
    work to the workers.
    """

    carries_bytes = False

    @property
    def is_here(self) -> bool:
        """Whether jobs run in this process."""
        return self.workers == 1

    def __init__(self, workers: int | None = None) -> None:
        """Take at most this many processes, or one for each core."""
        self.workers = workers or available_cores()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)  # type: ignore[arg-type]  # the three arguments of every exit

    def limit(self, workers: int) -> None:
        """Start no more processes than these; several start now, while the first jobs are made."""
        self.workers = min(self.workers, workers)
        if self.workers > 1:
            with worker_surroundings(self.workers):
                for _ in range(self.workers):  # each call starts a process, whatever it is
                    self._pool.submit(available_cores)

    def check(self, folder: Path | None) -> None:
        """Do nothing: processes of this machine have the same tracefit and folders."""

    def run(self, next_job: Callable[[], Job | None]) -> Iterator[tuple[Job, Any]]:
        """Run jobs; see `jobs.TaskEngine`."""
        most = 1 if self.workers <= 1 else TASKS_PER_WORKER * self.workers
        waiting: list[Job] = []
        running: dict[Future[_Outcome], Job] = {}
        while True:
            while len(waiting) + len(running) < most and (job := next_job()) is not None:
                waiting.append(job)
                if running or len(waiting) > 1:
                    running |= {self._begin(one): one for one in waiting}
                    waiting.clear()
            if waiting:
                job = waiting.pop()
                yield job, call_here(self, job)
            elif running:
                for future in _ended(running):
                    job = running.pop(future)
                    yield job, _result(future, job)
                del future
            else:
                return
            job = None  # a named object is not freed

    def _begin(self, job: Job) -> Future[_Outcome]:
        with worker_surroundings(self.workers):
            return self._pool.submit(attempt, job.function, job.argument, flags=names_flags())

    @cached_property
    def _pool(self) -> ProcessPoolExecutor:
        return self._stack.enter_context(_process_pool(self.workers))


def _ended(running: Collection[Future[_Outcome]]) -> Collection[Future[_Outcome]]:
    """Wait until a worker has ended a job, or several have."""
    from concurrent.futures import FIRST_COMPLETED, wait  # noqa: PLC0415 - takes a while to import

    # With a timeout: once polars handles Ctrl-C itself, an unlimited wait is not interrupted.
    while not (done := wait(running, timeout=_TURN_S, return_when=FIRST_COMPLETED).done):
        pass
    return done


def _result(future: Future[_Outcome], job: Job) -> Any:
    from concurrent.futures.process import BrokenProcessPool  # noqa: PLC0415 - as above

    try:
        value, error = future.result()
    except BrokenProcessPool as broken:
        raise WorkerError(
            "a worker died while it was read",
            where=job.name,
            hint=f"if memory ran out, use fewer {named(WorkersOption)}",
        ) from broken
    if error is not None:
        raise error
    return value


@contextmanager
def _process_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Return a pool of spawned processes: a forked one would have the locks of polars' threads, and no threads."""
    import multiprocessing  # noqa: PLC0415 - as above
    from concurrent.futures import ProcessPoolExecutor  # noqa: PLC0415

    context = multiprocessing.get_context("spawn")
    ends, stop = context.Pipe(duplex=False)
    with worker_surroundings(workers):  # the pool starts a process too, which keeps track of its locks
        pool = ProcessPoolExecutor(
            workers, mp_context=context, initializer=_begin, initargs=(ends, team_of(workers))
        )
    try:
        yield pool
    except BaseException:
        stop.close()  # running jobs are not waited for
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        stop.close()
        ends.close()


@contextmanager
def worker_surroundings(workers: int) -> Iterator[None]:
    """Set the environment that new workers start with.

    They import nothing from the working folder, which may hold any file, and do not run the caller's script
    again. Each worker has its own cores; more threads would only wait for each other. All this is set
    temporarily in this process, because a spawned process inherits it: `multiprocessing` has no arguments for
    it.
    """
    threads = str(max(1, available_cores() // workers))
    changed = {**memory.SETTINGS, "POLARS_MAX_THREADS": threads, "PYTHONSAFEPATH": "1"}
    before = {name: os.environ.get(name) for name in changed}
    main, path = sys.modules["__main__"], sys.path
    os.environ.update(changed)
    sys.modules["__main__"] = ModuleType("__main__")
    sys.path = [folder for folder in path if folder not in ("", ".", str(Path.cwd()))]
    # Ctrl-C goes to every process of the terminal. Workers end with this one, which reports the interruption;
    # they start with the signal blocked, because it could come before their first line of code.
    before_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before_mask)
        sys.modules["__main__"], sys.path = main, path
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _begin(ends: Connection, team: str | None) -> None:
    """Set up a worker. It ends when its parent dies or closes the other side of `ends`.

    Its result is then lost, and another process may lock the folder.

    Args:
        ends: Closed by the parent when it ends.
        team: See `keep_to_core`.
    """
    from multiprocessing import parent_process  # noqa: PLC0415 - takes a while to import
    from multiprocessing.connection import wait  # noqa: PLC0415

    keep_to_core(team)
    # Otherwise its warnings would bypass the log and reach the user's terminal.
    warnings.simplefilter("ignore")
    memory.reuse_freed()
    parent = parent_process()
    assert parent is not None  # noqa: S101 - only workers call this

    def watch() -> None:
        wait([parent.sentinel, ends])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def open_engine(choice: EngineChoice, workers: int | None) -> Iterator[TaskEngine]:
    """Open an engine.

    Args:
        choice: Which one.
        workers: Most jobs at the same time; as many as there are cores if not given.

    Raises:
        UsageError: Ray is not installed, does not answer, or is of another version.
    """
    if choice.name == "ray":
        from tracefit.engines.ray import RayEngine  # noqa: PLC0415 - an extra

        with RayEngine(choice.ray_address, workers) as engine:
            yield engine
        return
    if choice.ray_address is not None:
        raise UsageError(
            f"{named(EngineChoice, 'ray_address')} goes with {named(EngineChoice, 'name')} ray",
            hint="name that engine, or leave the address out",
        )
    with LocalEngine(workers) as local:
        yield local
