"""From the engine's thread to a process of our own: bounded, without I/O or a lock where the engine works."""

from __future__ import annotations

import logging
import marshal
import os
import struct
import subprocess
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING

from tracefit_vllm import records, settings

if TYPE_CHECKING:
    from tracefit_vllm.records import Header, Record

logger = logging.getLogger(settings.LOGGER)

MOST_WEIGHT = 200_000
"""Requests in records that wait, about 100 bytes each: what a collector that stands still costs."""

_BATCH_WEIGHT = 512
"""Requests in a frame: it is written in one go, and the engine's thread may wait for that."""

_DETACHED = "import os; os.fork() and os._exit(0); from tracefit_vllm.export import main; main()"
"""No descendant of the server: that kills its own when it ends, before the last spans are sent. With a session of its
own: Ctrl-C is for the server."""

_START_S = 30.0
_PAUSE_S = 0.05
_LAST_S = 2.0
SIZE = struct.Struct(">I")


class Recorder:
    """Takes records on one thread, and passes them on to a process that makes spans of them.

    `put` appends to a queue and returns: it does no I/O, takes no lock and never waits. A second thread writes the
    records to the process through a pipe, in pieces that hold the interpreter for some 100 us; where the process does
    not keep up, records that find no room are counted, and the count follows them.
    """

    def __init__(self, header: Header, command: list[str] | None = None) -> None:
        environment = {k: v for k, v in os.environ.items() if k != settings.SWITCH}
        read, self._pipe = os.pipe()
        try:
            process = subprocess.Popen(  # noqa: S603 - this interpreter, and a module of ours
                command or [sys.executable, "-c", _DETACHED],
                stdin=read,
                stdout=subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
        finally:
            os.close(read)
        self._process = process
        if command is None:
            process.wait(_START_S)  # it has begun the one that stays
        self._queue: deque[tuple[Record, int]] = deque()
        self._put = self._taken = self._lost = 0
        self._closing = threading.Event()
        self.is_on = True
        self._queue.append((tuple(header), 1))
        self._thread = threading.Thread(target=self._run, name="tracefit-vllm", daemon=True)
        self._thread.start()

    def put(self, record: Record, weight: int = 1) -> None:
        """Hand over a record of some requests; from one thread."""
        if not self.is_on:
            return
        if self._put - self._taken + weight > MOST_WEIGHT:
            self._lost += 1
            return
        if self._lost:
            self._queue.append(((records.LOST, self._lost), 0))
            self._lost = 0
        self._put += weight
        self._queue.append((record, weight))

    def end(self, why: str) -> None:
        """End tracing with a line; the server goes on."""
        if self.is_on:
            self.is_on = False
            logger.warning("tracefit-vllm: tracing ends, serving goes on: %s", why)
            self._queue.clear()
            self._closing.set()

    def close(self) -> None:
        """Send what is queued, for some seconds at most; the process, which outlives this one, goes on with the
        rest.
        """
        self._closing.set()
        self._thread.join(_LAST_S)

    def wait(self) -> None:
        """Wait until the process has ended; after `close`."""
        assert self._process.stdout is not None  # noqa: S101 - a pipe
        self._process.stdout.read()  # it writes nothing there, but holds it
        self._process.stdout.close()
        self._process.wait()

    def _run(self) -> None:
        try:
            while not self._closing.wait(_PAUSE_S):
                self._send()
            self._send()
        except Exception as error:  # noqa: BLE001 - after any error the server goes on, without tracing
            self.end(f"{type(error).__name__}: {error}")
        finally:
            os.close(self._pipe)  # its end: the process sends what it has, and ends

    def _send(self) -> None:
        while self._queue:
            batch, weight = [], 0
            while self._queue and weight < _BATCH_WEIGHT:
                record, one = self._queue.popleft()
                batch.append(record)
                weight += one
            data = marshal.dumps(batch)
            frame = memoryview(SIZE.pack(len(data)) + data)
            while frame:
                frame = frame[os.write(self._pipe, frame) :]
            self._taken += weight
