"""The engine of this machine: one process, or as many as there are cores; and the choice between it and Ray."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import cached_property
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Self

from tracefit import memory
from tracefit.engines.cores import available_cores, cores_of
from tracefit.engines.jobs import TASKS_PER_WORKER, call_here
from tracefit.engines.worker import Worker
from tracefit.errors import UsageError
from tracefit.options import EngineChoice, named

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path

    from tracefit.engines.jobs import Job, TaskEngine
    from tracefit.engines.worker import Outcome

_LOCAL_TURN_S = 0.2


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
            self._crew.start()

    def check(self, folder: Path | None) -> None:
        """Do nothing: processes of this machine have the same tracefit and folders."""

    def run(self, next_job: Callable[[], Job | None]) -> Iterator[tuple[Job, Any]]:
        """Run jobs; see `jobs.TaskEngine`."""
        most = 1 if self.workers <= 1 else TASKS_PER_WORKER * self.workers
        waiting: list[Job] = []
        running: dict[Future[Outcome], Job] = {}
        while True:
            while len(waiting) + len(running) < most and (job := next_job()) is not None:
                waiting.append(job)
                if running or len(waiting) > 1:
                    running |= {self._crew.submit(one): one for one in waiting}
                    waiting.clear()
            if waiting:
                job = waiting.pop()
                yield job, call_here(self, job)
            elif running:
                for future in _ended(running):
                    job = running.pop(future)
                    yield job, _value(future)
                del future
            else:
                return
            job = None  # a named object is not freed

    @cached_property
    def _crew(self) -> _Crew:
        return self._stack.enter_context(_Crew(self.workers))


class _Crew:
    """Workers, and for each a thread of this process that hands it jobs: whoever is free takes the next one."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._threads = ThreadPoolExecutor(size)
        self._workers: list[Worker] = []
        self._free = SimpleQueue[Worker]()

    def start(self) -> None:
        """Start the workers, if they are not yet there."""
        if self._workers:
            return
        # More threads than cores would only wait for each other.
        threads = str(max(1, available_cores() // self.size))
        environment = {**memory.ALLOCATOR_SETTINGS, memory.POLARS_THREADS: threads}
        self._workers += [Worker(environment, core) for core in cores_of(self.size)]
        for worker in self._workers:
            self._free.put(worker)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error, running jobs are not waited for.
        for worker in self._workers if kind is not None else ():
            worker.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.end()

    def submit(self, job: Job) -> Future[Outcome]:
        """Give a job to the next free worker."""
        self.start()
        return self._threads.submit(self._do, job)

    def _do(self, job: Job) -> Outcome:
        worker = self._free.get()  # there are as many threads as workers
        try:
            return worker.call(job)
        finally:
            self._free.put(worker)


def _ended(running: Collection[Future[Outcome]]) -> Collection[Future[Outcome]]:
    """Wait until a worker has ended a job, or several have."""
    # With a timeout: once polars handles Ctrl-C itself, an unlimited wait is not interrupted.
    while not (done := wait(running, timeout=_LOCAL_TURN_S, return_when=FIRST_COMPLETED).done):
        pass
    return done


def _value(future: Future[Outcome]) -> Any:
    value, error = future.result()
    if error is not None:
        raise error
    return value


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
