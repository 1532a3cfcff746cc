"""Worker processes of this machine: how they are started, what they take from this one, and that they end with it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from tracefit import memory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing.connection import Connection


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def process_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
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
