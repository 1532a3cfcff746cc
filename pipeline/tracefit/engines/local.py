"""Where the work of a command runs: jobs in, results out in the order in which they end; and the engine of this machine.

An engine decides where a function runs, in this process, in others, or on other machines. The functions are the same:
`decode.decode_tasks` and `build.build_runs`, and for training those of `training`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, Self

from tracefit import memory
from tracefit.errors import DataError, TracefitError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future, ProcessPoolExecutor
    from multiprocessing.connection import Connection

TASKS_PER_WORKER = 2
"""Jobs that a worker has or that wait for it: each may hold a block's bytes."""


class WorkerError(DataError):
    """A worker died, and what it was at cannot be done."""


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A call of a function that may run anywhere.

    Attributes:
        function: A function of a module, without side effects but the files it writes.
        argument: Its argument; it can be pickled.
        name: The input it works on, for the line of an error.
        work: What the caller knows it by; it stays in this process.
        is_last: Whether no other job is left to run beside it, so that it may have the cores of several.
    """

    function: Callable[[Any], Any]
    argument: Any
    name: str
    work: Any
    is_last: bool = False


class TaskEngine(Protocol):
    """Where jobs run."""

    workers: int
    """Jobs that run at the same time, at most."""

    @property
    def ahead(self) -> int:
        """Jobs that have begun or wait for a worker, at most."""

    @property
    def carries_bytes(self) -> bool:
        """Whether workers may be without the files that this process reads: blocks carry their bytes then."""

    def limit(self, workers: int) -> None:
        """Use no more workers than this many, if they are started for this command alone."""

    def check(self, folder: Path | None) -> None:
        """Make sure that workers have this version of tracefit, and this folder if there is one.

        Raises:
            UsageError: They have not.
        """

    def submit(self, job: Job) -> Any:
        """Begin a job; return a handle for `wait` and `result`."""

    def wait(self, handles: Sequence[Any]) -> list[Any]:
        """Return the handles of jobs that have ended; there is one at least."""

    def result(self, handle: Any) -> Any:
        """Return what the function of an ended job returned.

        Raises:
            WorkerError: The worker died.
            TracefitError: The function raised it.
            OSError: The function raised it.
        """


def attempt(function: Callable[[Any], Any], argument: Any) -> tuple[Any, Exception | None]:
    """Call a function; return its result or the error it raised on purpose, which is no failure of the worker."""
    try:
        return function(argument), None
    except (TracefitError, OSError) as error:
        return None, error


def run_jobs(engine: TaskEngine, next_job: Callable[[], Job | None]) -> Iterator[tuple[Job, Any]]:
    """Run jobs; yield each when it has ended, with the handle of its result.

    Args:
        engine: Where they run.
        next_job: Returns the next job, or null if there is none until another job has ended.
    """
    pending: dict[Any, Job] = {}
    while True:
        while len(pending) < engine.ahead and (job := next_job()) is not None:
            pending[engine.submit(job)] = job
        if not pending:
            return
        job = None  # what has a name here is not freed
        for handle in engine.wait(list(pending)):
            yield pending.pop(handle), handle
        del handle


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_TURN_S = 0.2


@dataclass(slots=True, eq=False)
class _LocalJob:
    """A job, and what comes of it once it has begun."""

    job: Job
    future: Future[tuple[Any, Exception | None]] | None = None


class LocalEngine:
    """Processes of this machine. They are started when two jobs are there at the same time.

    A job that is alone runs in this process: it has all cores then, where a worker has its share.
    """

    carries_bytes = False

    def __init__(self, workers: int | None = None) -> None:
        """Take at most this many processes, or one for each core."""
        self.workers = workers or available_cores()
        self._stack = ExitStack()
        self._running = 0
        self._held: _LocalJob | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)  # type: ignore[arg-type]  # the three arguments of every exit

    @property
    def ahead(self) -> int:
        """Jobs that have begun or wait for a worker, at most."""
        return 1 if self.workers <= 1 else TASKS_PER_WORKER * self.workers

    def limit(self, workers: int) -> None:
        """Start no more processes than these."""
        self.workers = min(self.workers, workers)

    def check(self, folder: Path | None) -> None:
        """Do nothing: processes of this machine have what this one has."""

    def submit(self, job: Job) -> _LocalJob:
        """Begin a job in a worker, or keep it for this process while there is no other."""
        handle = _LocalJob(job)
        if self._held is None and not self._running:
            self._held = handle
            return handle
        for one in filter(None, (self._held, handle)):
            with worker_surroundings(self.workers):
                one.future = self._pool.submit(attempt, one.job.function, one.job.argument)
            self._running += 1
        self._held = None
        return handle

    def wait(self, handles: Sequence[_LocalJob]) -> list[_LocalJob]:
        """Run the job that was kept here, or wait until a worker has ended one."""
        from concurrent.futures import FIRST_COMPLETED, Future  # noqa: PLC0415 - takes a while to import
        from concurrent.futures import wait as wait_for  # noqa: PLC0415

        if self._held is not None:
            handle, self._held = self._held, None
            handle.future = Future()
            handle.future.set_result(attempt(handle.job.function, handle.job.argument))
            return [handle]
        # In turns: once polars has its own handler of Ctrl-C, a wait without an end is not interrupted.
        futures = [handle.future for handle in handles if handle.future is not None]
        while not (done := wait_for(futures, timeout=_TURN_S, return_when=FIRST_COMPLETED).done):
            pass
        self._running -= len(done)
        return [handle for handle in handles if handle.future in done]

    def result(self, handle: _LocalJob) -> Any:
        """Return what a job came to; see `TaskEngine`."""
        from concurrent.futures.process import BrokenProcessPool  # noqa: PLC0415

        try:
            value, error = handle.future.result()  # type: ignore[union-attr]  # it has ended
        except BrokenProcessPool as broken:
            raise WorkerError(
                "a worker died while it was read",
                where=handle.job.name,
                hint="if memory ran out, use fewer --workers",
            ) from broken
        if error is not None:
            raise error
        return value

    @cached_property
    def _pool(self) -> ProcessPoolExecutor:
        return self._stack.enter_context(_process_pool(self.workers))


@contextmanager
def _process_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Return a pool of spawned processes: a forked one would have the locks of polars' threads, and no threads."""
    import multiprocessing  # noqa: PLC0415 - as above
    from concurrent.futures import ProcessPoolExecutor  # noqa: PLC0415

    context = multiprocessing.get_context("spawn")
    ends, stop = context.Pipe(duplex=False)
    with worker_surroundings(workers):  # the pool starts a process too, which keeps track of its locks
        pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(ends,))
    try:
        yield pool
    except BaseException:
        stop.close()  # what workers are at is not waited for
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        stop.close()
        ends.close()


@contextmanager
def worker_surroundings(workers: int) -> Iterator[None]:
    """Set the environment that new workers start with.

    They import nothing from the working folder, which may hold any file, and do not run the caller's script again.
    Each worker has its own cores; more threads would only wait for each other.
    """
    threads = str(max(1, available_cores() // workers))
    changed = {**memory.SETTINGS, "POLARS_MAX_THREADS": threads, "PYTHONSAFEPATH": "1"}
    before = {name: os.environ.get(name) for name in changed}
    main, path = sys.modules["__main__"], sys.path
    os.environ.update(changed)
    sys.modules["__main__"] = ModuleType("__main__")
    sys.path = [folder for folder in path if folder not in ("", ".", str(Path.cwd()))]
    # Ctrl-C goes to every process of the terminal. Workers end with this one, which says what happened; they are started
    # with the signal blocked, for it could come before their first line of code.
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


def _begin(ends: Connection) -> None:
    """Set up a worker: its warnings would reach the user's terminal, past the log."""
    warnings.simplefilter("ignore")
    memory.reuse_freed()
    _end_with_parent(ends)


def _end_with_parent(ends: Connection) -> None:
    """End this worker when its parent dies or closes the other side of `ends`.

    Its result is lost then, and another process may take over the folder.
    """
    from multiprocessing import parent_process  # noqa: PLC0415
    from multiprocessing.connection import wait  # noqa: PLC0415

    parent = parent_process()
    assert parent is not None  # noqa: S101 - only workers call this

    def watch() -> None:
        wait([parent.sentinel, ends])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
