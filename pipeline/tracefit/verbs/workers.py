"""Processes that decode pieces of trace files side by side.

A worker is `python -m tracefit.verbs.workers`: it reads a task per line from its standard input and answers with a line
each, so that it needs nothing of the program that started it. Rows go by way of the disk. The process that ingests works
too: it is the first of the workers, and the others start while it is already at it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, cast

from pydantic import BaseModel

from tracefit import memory
from tracefit.errors import DataError, TracefitError, UsageError
from tracefit.sources.files import TraceFile
from tracefit.sources.shape import Shape
from tracefit.sources.stretches import Stretch
from tracefit.tables.rows import RowOptions
from tracefit.verbs.decoding import Decoded, Piece, Task, decode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tracefit.tables.manifest import StagedPart

BYTES_PER_WORKER = 96 << 20
"""Bytes that are worth another process: it takes about as long to start as to decode these."""


class _OrderedPiece(BaseModel):
    """A piece as a worker is told of it."""

    name: str
    path: str
    size_bytes: int
    stretch: Stretch
    shape: Shape

    @classmethod
    def of(cls, piece: Piece) -> _OrderedPiece:
        return cls(
            name=piece.file.name,
            path=piece.file.path,
            size_bytes=piece.size_bytes,
            stretch=piece.stretch,
            shape=piece.shape,
        )

    def piece(self) -> Piece:
        file = TraceFile(self.name, self.path, self.size_bytes)
        return Piece(file, self.stretch, self.shape, self.size_bytes)


class _Order(BaseModel):
    """A task as a worker is told of it."""

    pieces: tuple[_OrderedPiece, ...]
    options: RowOptions
    scratch: Path
    stage: Path

    @classmethod
    def of(cls, task: Task) -> _Order:
        return cls(
            pieces=tuple(map(_OrderedPiece.of, task.pieces)),
            options=task.options,
            scratch=task.scratch,
            stage=task.stage,
        )

    def task(self) -> Task:
        return Task(tuple(piece.piece() for piece in self.pieces), self.options, self.scratch, self.stage)


class _Answer(BaseModel):
    """What became of it: parts, or an error."""

    parts: Decoded = ()
    failed: Literal["data", "usage", "disk"] | None = None
    what: str = ""
    where: str | None = None
    hint: str | None = None
    errno: int | None = None


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def decode_all(
    tasks: Sequence[Task], *, workers: int, on_read: Callable[[int], object]
) -> dict[Piece, tuple[StagedPart, ...]]:
    """Decode pieces of files, by several processes where there is enough to do.

    Args:
        tasks: The pieces, as they are to be decoded together.
        workers: Most processes to use, this one included.
        on_read: Told of the bytes that were read, as stored; by one thread at a time.

    Returns:
        The parts of each piece.

    Raises:
        DataError: A file holds something else than traces, or a worker died.
        UsageError: A file cannot be read.
        OSError: A part cannot be written.
    """
    size = sum(task.bytes_to_decode for task in tasks)
    share = _Share(tasks, on_read)
    with _helpers(min(workers, len(tasks), size // BYTES_PER_WORKER) - 1, share):
        share.work(lambda task: decode(task, on_read=share.tell))
    return share.settle()


class _Share:
    """Tasks that are taken one by one, what became of them, and the first error."""

    def __init__(self, tasks: Sequence[Task], on_read: Callable[[int], object]) -> None:
        self._left = dict.fromkeys(tasks)
        self._on_read = on_read
        self._done: dict[Piece, tuple[StagedPart, ...]] = {}
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def work(self, decode_one: Callable[[Task], Decoded]) -> None:
        """Take tasks and decode them until none is left or one failed."""
        while task := self._next():
            try:
                self._done.update(zip(task.pieces, decode_one(task), strict=True))
            except BaseException as error:  # noqa: BLE001 - whoever settles raises it
                self._error = self._error or error
                return

    def _next(self) -> Task | None:
        with self._lock:
            task = None if self._error else next(iter(self._left), None)
            if task:
                del self._left[task]
            return task

    def tell(self, size_bytes: int) -> None:
        """Tell of bytes that were read."""
        with self._lock:
            self._on_read(size_bytes)

    def settle(self) -> dict[Piece, tuple[StagedPart, ...]]:
        """Return what was done, or raise the first error."""
        if self._error is not None:
            raise self._error
        return self._done


@contextmanager
def _helpers(count: int, share: _Share) -> Iterator[None]:
    """Run so many processes beside the block, and wait for them behind it."""
    threads = [threading.Thread(target=_serve, args=(share, count + 1), daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join()


def _serve(share: _Share, processes: int) -> None:
    """Keep one process at work."""
    # Each has its own core; more threads would only wait for each other.
    threads = str(max(1, available_cores() // processes))
    process = subprocess.Popen(
        [sys.executable, "-m", "tracefit.verbs.workers"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**memory.SETTINGS, **os.environ, "POLARS_MAX_THREADS": threads},
    )
    with process:
        try:
            share.work(lambda task: _ask(process, task, share.tell))
        finally:
            # One that died takes no more of what was written to it.
            with suppress(BrokenPipeError):
                cast("BinaryIO", process.stdin).close()


def _ask(process: subprocess.Popen[bytes], task: Task, tell: Callable[[int], None]) -> Decoded:
    assert process.stdin is not None  # noqa: S101 - both are pipes
    assert process.stdout is not None  # noqa: S101
    try:
        process.stdin.write(_Order.of(task).model_dump_json().encode() + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except BrokenPipeError:
        line = b""
    if not line:
        raise DataError(
            f"the worker that read it died (exit status {process.wait()})",
            where=task.name,
            hint="if memory ran out, use fewer --workers",
        )
    answer = _Answer.model_validate_json(line)
    if answer.failed == "disk":
        raise OSError(answer.errno, answer.what)
    if answer.failed:
        kind = UsageError if answer.failed == "usage" else DataError
        raise kind(answer.what, where=answer.where, hint=answer.hint)
    tell(task.size_bytes)
    return answer.parts


def _answer(task: Task, parent: int) -> _Answer:
    try:
        # Without its parent nobody wants the rest, and somebody else may be at work in the folder.
        return _Answer(parts=decode(task, go_on=lambda: os.getppid() == parent))
    except TracefitError as error:
        kind: Literal["usage", "data"] = "usage" if isinstance(error, UsageError) else "data"
        return _Answer(failed=kind, what=error.what, where=error.where, hint=error.hint)
    except OSError as error:
        return _Answer(failed="disk", what=error.strerror or str(error), errno=error.errno)


def _work() -> None:
    """Answer tasks until there are no more."""
    parent = os.getppid()
    for line in sys.stdin.buffer:
        answer = _answer(_Order.model_validate_json(line).task(), parent)
        sys.stdout.buffer.write(answer.model_dump_json().encode() + b"\n")
        sys.stdout.buffer.flush()
    # Taking the interpreter down in order would take a tenth of a second, which somebody waits for.
    os._exit(0)


if __name__ == "__main__":
    _work()
