"""Run jobs on this machine: in this process, or in workers of a `ProcessPoolExecutor`."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from tracefit.engines.processes import available_cores, process_pool, worker_surroundings
from tracefit.engines.tasks import TASKS_PER_WORKER, Job, WorkerError, attempt

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future, ProcessPoolExecutor
    from pathlib import Path

_TURN_S = 0.2


class _PoolJob:
    """A job, and its future or, of one that ran in this process, what came of it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.future: Future[tuple[Any, Exception | None]] | None = None
        self.ended: tuple[Any, Exception | None] | None = None


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
        self._held: _PoolJob | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)  # type: ignore[arg-type]  # the three arguments of every exit

    @property
    def ahead(self) -> int:
        """Jobs that have begun or wait for a worker; see `tasks.TaskEngine`."""
        return 1 if self.workers <= 1 else TASKS_PER_WORKER * self.workers

    def limit(self, workers: int) -> None:
        """Start no more processes than these."""
        self.workers = min(self.workers, workers)

    def check(self, folder: Path | None) -> None:
        """Do nothing: processes of this machine have what this one has."""

    def submit(self, job: Job) -> _PoolJob:
        """Begin a job in a worker, or keep it for this process while there is no other."""
        handle = _PoolJob(job)
        if self._held is None and not self._running:
            self._held = handle
            return handle
        for one in filter(None, (self._held, handle)):
            with worker_surroundings(self.workers):
                one.future = self._pool.submit(attempt, one.job.function, one.job.argument)
            self._running += 1
        self._held = None
        return handle

    def wait(self, handles: Sequence[_PoolJob]) -> list[_PoolJob]:
        """Run the job that was kept here, or wait until a worker has ended one."""
        from concurrent.futures import FIRST_COMPLETED  # noqa: PLC0415 - one worker needs no pool
        from concurrent.futures import wait as wait_for  # noqa: PLC0415

        if self._held is not None:
            handle, self._held = self._held, None
            handle.ended = attempt(handle.job.function, handle.job.argument)
            return [handle]
        # In turns: once polars has its own handler of Ctrl-C, a wait without an end is not interrupted.
        futures = [handle.future for handle in handles if handle.future is not None]
        while not (done := wait_for(futures, timeout=_TURN_S, return_when=FIRST_COMPLETED).done):
            pass
        self._running -= len(done)
        return [handle for handle in handles if handle.future in done]

    def result(self, handle: _PoolJob) -> Any:
        """Return what a job came to; see `tasks.TaskEngine`."""
        from concurrent.futures.process import BrokenProcessPool  # noqa: PLC0415

        try:
            value, error = handle.ended or handle.future.result()  # type: ignore[union-attr]  # it has ended
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
        return self._stack.enter_context(process_pool(self.workers))
