"""Decode blocks into staged rows, in local processes.

The engine only decides where `decode_task` runs: in this process, or in workers of a `ProcessPoolExecutor`. Results come
in the order of the tasks, and do not depend on the number of workers.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from tracefit import memory
from tracefit.errors import DataError
from tracefit.inputs.blocks import Block, load
from tracefit.inputs.rejects import Reject
from tracefit.otlp.decode import decode_blocks, empty_batch, reject_frame
from tracefit.tables.manifest import StagedPart
from tracefit.tables.rows import RowOptions, rows_of
from tracefit.tables.staging import write_staged

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from concurrent.futures import Future, ProcessPoolExecutor
    from multiprocessing.connection import Connection

    from tracefit.otlp.decode import SpanBatch
    from tracefit.tables.places import Place

_TURN_S = 0.2

TASKS_PER_WORKER = 2
"""Tasks that wait for a worker or for their turn: each may hold a block's bytes."""


@dataclass(frozen=True, slots=True)
class Task:
    """Blocks that are decoded together, and the place for their rows.

    Attributes:
        items: Blocks of one encoding, and the rejects between them.
        options: Which part of the input is kept.
        place: Where the staged parts go.
    """

    items: tuple[Block | Reject, ...]
    options: RowOptions
    place: Place


Decoded = tuple[tuple[StagedPart, ...], ...]
"""The staged parts of each item of a task; rows know their item by `file`."""


def decode_task(task: Task) -> Decoded:
    """Decode a task's blocks and write the staged parts.

    Raises:
        UsageError: A file cannot be read any more.
        OSError: A part cannot be written.
    """
    parts: list[list[StagedPart]] = [[] for _ in task.items]
    for batch in _batches(task):
        rows = rows_of(batch, task.options)
        name = write_staged(rows, task.place)
        for file, spans, other_spans, rejects in rows.counts.iter_rows():
            parts[file].append(
                StagedPart(name=name, file=file, spans=spans, other_spans=other_spans, rejects=rejects)
            )
    return tuple(map(tuple, parts))


def _batches(task: Task) -> Iterator[SpanBatch]:
    found = [(number, item) for number, item in enumerate(task.items) if isinstance(item, Reject)]
    blocks = [(number, item, load(item)) for number, item in enumerate(task.items) if isinstance(item, Block)]
    for batch in decode_blocks(blocks, task.options.wanted):
        yield batch if not found else batch.with_rejects(reject_frame(found))
        found = []
    if found:
        yield empty_batch(task.options.wanted).with_rejects(reject_frame(found))


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_tasks(tasks: Iterable[Task], *, workers: int) -> Iterator[tuple[Task, Decoded]]:
    """Decode tasks and yield each with its parts, in the order of the tasks.

    Args:
        tasks: The tasks; the iterator is advanced as workers become free.
        workers: Processes to use; one means this one.

    Raises:
        DataError: A worker died.
        UsageError: A file cannot be read any more.
        OSError: A part cannot be written.
    """
    if workers <= 1:
        for task in tasks:
            yield task, decode_task(task)
        return
    waiting: deque[tuple[Task, Future[Decoded]]] = deque()
    with _pool(workers) as pool:
        for task in tasks:
            with _worker_surroundings(workers):
                waiting.append((task, pool.submit(decode_task, task)))
            while len(waiting) >= TASKS_PER_WORKER * workers:
                yield _result(*waiting.popleft())
        while waiting:
            yield _result(*waiting.popleft())


def _result(task: Task, future: Future[Decoded]) -> tuple[Task, Decoded]:
    from concurrent.futures import wait as wait_for  # noqa: PLC0415
    from concurrent.futures.process import BrokenProcessPool  # noqa: PLC0415 - one worker needs no pool

    # In turns: once polars has its own handler of Ctrl-C, a wait without an end is not interrupted.
    while not wait_for([future], timeout=_TURN_S).done:
        pass
    try:
        return task, future.result()
    except BrokenProcessPool as error:
        names = [item.source_file for item in task.items]
        raise DataError(
            "a worker died while it was read", where=names[0], hint="if memory ran out, use fewer --workers"
        ) from error


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Return a pool of spawned processes: a forked one would have the locks of polars' threads, and no threads."""
    import multiprocessing  # noqa: PLC0415 - as above
    from concurrent.futures import ProcessPoolExecutor  # noqa: PLC0415

    context = multiprocessing.get_context("spawn")
    ends, stop = context.Pipe(duplex=False)
    with _worker_surroundings(workers):  # the pool starts a process too, which keeps track of its locks
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
def _worker_surroundings(workers: int) -> Iterator[None]:
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
