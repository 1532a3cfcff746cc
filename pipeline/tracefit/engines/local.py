"""The engine of this machine: one process, or as many as there are cores.

Workers do not import from the working folder, share the cores' threads among them, and end with the process that started them.
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
from typing import TYPE_CHECKING, Any, Self

from tracefit import memory
from tracefit.engines.jobs import TASKS_PER_WORKER, Job, WorkerError, attempt, available_cores

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future, ProcessPoolExecutor
    from multiprocessing.connection import Connection

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
