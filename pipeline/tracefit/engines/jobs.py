"""The interface of engines: jobs go in, results come out in the order in which they end.

An engine decides where the function of a job runs: in this process, in others (`local`), or on other machines
(`ray`). The functions are the same everywhere: `decode.decode_task` and `build.build_runs`, and for training
those of `training`.
"""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from tracefit.errors import DataError, TracefitError, naming_flags

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

TASKS_PER_WORKER = 2
"""Jobs that a worker has or that wait for it: each may hold a block's bytes."""


_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class WorkerError(DataError):
    """A worker died, and its job cannot be completed."""


class Job(msgspec.Struct, frozen=True, eq=False):
    """A call of a function that may run anywhere.

    Attributes:
        function: A function of a module, without side effects but the files it writes.
        argument: Its argument; it can be pickled.
        name: The input it works on, for the line of an error.
        work: The caller's key for the job; it stays in this process.
        is_shared: Whether all workers do parts of it, while no other job runs. It runs in this process, and its
            function has a second argument, which calls functions on the workers as `map` does (`spread`).
    """

    function: Callable[..., Any]
    argument: Any
    name: str
    work: Any
    is_shared: bool = False


class TaskEngine(Protocol):
    """Where jobs run."""

    workers: int
    """Jobs that run at the same time, at most."""

    @property
    def carries_bytes(self) -> bool:
        """Whether workers may lack the files that this process reads, so that blocks carry their bytes."""

    @property
    def is_here(self) -> bool:
        """Whether jobs run in this process, which has the bytes of their blocks already."""

    def limit(self, workers: int) -> None:
        """Use at most this many workers, if they are started only for this command; the jobs come soon."""

    def check(self, folder: Path | None) -> None:
        """Make sure that workers have this version of tracefit, and this folder, if given.

        Raises:
            UsageError: A worker lacks one of them.
        """

    def run(self, next_job: Callable[[], Job | None]) -> Iterator[tuple[Job, Any]]:
        """Run jobs; yield each when it has ended, with the result of its function.

        Args:
            next_job: Returns the next job, or null if the next one has to wait for a running job.

        Raises:
            WorkerError: A worker died.
            TracefitError: The function of a job raised it.
            OSError: The function of a job raised it.
        """


def attempt(
    function: Callable[[Any], Any], argument: Any, *, flags: bool | Mapping[str, str]
) -> tuple[Any, Exception | None]:
    """Call a function; return its result, or the error it raised on purpose, which is not a failure of the worker.

    Args:
        function: The work of the job.
        argument: Its input.
        flags: How its texts name options, as those of the process that has the job do: see `naming_flags`.
    """
    try:
        with naming_flags(flags=flags):
            return function(argument), None
    except (TracefitError, OSError) as error:
        return None, error


def call_here(engine: TaskEngine, job: Job) -> Any:
    """Call the function of a job in this process; return its result. A shared one gives parts of its work to all
    workers.
    """
    parts = [partial(spread, engine, job.name)] if job.is_shared else []
    return job.function(job.argument, *parts)


def spread(
    engine: TaskEngine, name: str, function: Callable[[_Item], _Result], items: Iterable[_Item]
) -> Iterator[_Result]:
    """Call a function for each item, on the workers of an engine; yield the results in the order of the items.

    Args:
        engine: The engine, which runs nothing else.
        name: The input, for the line of an error.
        function: It can be pickled, as its items and results can.
        items: Its arguments, taken when a worker is free; null if the next one has to wait for a result.
    """
    waiting, numbers = iter(items), count()

    def next_job() -> Job | None:
        item = next(waiting, None)
        return None if item is None else Job(function, item, name, next(numbers))

    ended: dict[int, _Result] = {}
    number = 0
    for job, result in engine.run(next_job):
        ended[job.work] = result
        while number in ended:
            yield ended.pop(number)
            number += 1


def take_together(
    waiting: deque[_Item], size_bytes: Callable[[_Item], int], *, most: int, most_bytes: int
) -> list[_Item]:
    """Take items to work on together, because small ones share a fixed cost; a larger one is taken by itself."""
    taken: list[_Item] = []
    while waiting and len(taken) < most and (not taken or size_bytes(waiting[0]) <= most_bytes):
        taken.append(waiting.popleft())
        most_bytes -= size_bytes(taken[-1])
    return taken
