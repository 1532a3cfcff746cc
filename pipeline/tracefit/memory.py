"""Set up a process for the size of its work, before polars and pyarrow are imported: its allocators and its threads.

By default polars and pyarrow keep freed memory for long, and the C library returns every large block to the system at
once, only to request it again: a tenth of the time of an ingest goes into zeroing these pages. And polars has a thread
per core, which looks for work a while after each of the thousands of small queries of a run.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ALLOCATOR_SETTINGS = {
    "_RJEM_MALLOC_CONF": "dirty_decay_ms:500,muzzy_decay_ms:0",  # polars
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    # numpy would start a thread per core, for a tenth of a second, to multiply small matrices
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),  # numpy and Python, by way of the C library
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}
"""Variables that are read at the start of a process, polars or pyarrow."""

_MANY_OBJECTS = 500_000
"""New objects after which the collector looks for cycles: imports and spans make very many objects, but
hardly any cycles."""

# M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def reuse_freed() -> None:
    """Set up the allocators of this process; without effect on libraries that are imported already.

    Only for tracefit's own processes: the whole process shares the C library's allocator.
    """
    for name, value in ALLOCATOR_SETTINGS.items():
        os.environ.setdefault(name, value)
    gc.set_threshold(_MANY_OBJECTS, 50, 100)
    # The interpreter looks for cycles once more at its end, among all objects of the libraries: a tenth of a second.
    atexit.register(gc.freeze)
    with suppress(OSError, AttributeError):  # another C library than GNU's
        change = ctypes.CDLL(None).mallopt
        for parameter in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
            change(parameter, 1 << 30)


POLARS_THREADS = "POLARS_MAX_THREADS"
"""Variable of the number of threads, read when polars is imported."""

_SMALL_BYTES = 32 * 2**20
"""Files up to which one thread is as quick as several, and takes a tenth less of the processors' time."""
_MOST_SMALL_FILES = 2_000


def are_small(inputs: Iterable[str]) -> bool:
    """Return whether files and folders to read are small, so that one thread is as quick as several."""
    left = float(_SMALL_BYTES)
    with suppress(OSError):  # what cannot be looked at may be large: the command says what is wrong with it
        for number, size in enumerate(_sizes_of(inputs)):
            left -= size
            if left < 0 or number >= _MOST_SMALL_FILES:
                return False
        return True
    return False


def use_one_thread() -> None:
    """Let polars have one thread; a setting of the user's stays."""
    os.environ.setdefault(POLARS_THREADS, "1")


def _sizes_of(inputs: Iterable[str]) -> Iterator[float]:
    """Yield the sizes of files in bytes; no limit for what is not on this machine's disk."""
    for path in map(Path, inputs):
        if not path.exists():
            yield math.inf
        for file in path.rglob("*") if path.is_dir() else (path,):
            with suppress(OSError):  # it is gone, or a link to nothing
                yield file.stat().st_size


def trim() -> None:
    """Return unused memory of the C library to the system."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
