"""A worker of this machine: a program of its own that does jobs for the process that started it.

It gets its environment, its import path and its core when it is started, so nothing of the caller is changed for it or
run again in it: not the caller's script, whatever that looks like, and nothing from the working folder. It ends with
the process that started it.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from tracefit import memory
from tracefit.engines.cores import keep_to_core
from tracefit.engines.jobs import WorkerError, attempt
from tracefit.errors import names_flags
from tracefit.options import WorkersOption, named

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tracefit.engines.jobs import Job

Outcome = tuple[Any, Exception | None]
"""The result of a job, or the error that it raised on purpose."""

_BEGIN = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from tracefit.engines.worker import main; main()"
"""The program of a worker; its arguments are the import path, the descriptor of its connection, and its core if it has
one."""


_END = b""
"""Instead of a call: there will be no other one."""

_GONE = (EOFError, OSError, pickle.UnpicklingError)
"""Errors of a connection whose other end is gone: before an object, between its parts, or when it is sent."""


class Worker:
    """A worker, as the process that started it sees it; it does one job at a time."""

    def __init__(self, environment: Mapping[str, str], core: int | None) -> None:
        """Start it.

        Args:
            environment: Variables beside those of this process.
            core: The core that it keeps to; any if null.
        """
        own, others = socket.socketpair()
        path = [folder for folder in map(str, sys.path) if folder not in ("", ".", str(Path.cwd()))]
        with own, others:
            self._process = subprocess.Popen(  # noqa: S603 - this Python, and this package
                [
                    *(sys.executable, "-P", "-c", _BEGIN, json.dumps(path), str(others.fileno())),
                    *([] if core is None else [str(core)]),
                ],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                pass_fds=[others.fileno()],
                # Ctrl-C goes to every process of the terminal's group: this process has it, and reports the
                # interruption.
                process_group=0,
            )
            self._stream = own.makefile("rwb")

    def kill(self) -> None:
        """Stop it at once; the result of its job is lost."""
        self._process.kill()

    def end(self) -> None:
        """Let it end, once it has no job."""
        with suppress(OSError):  # it is gone already
            self._send(_END)
        with suppress(OSError):
            self._stream.close()
        self._process.wait()

    def call(self, job: Job) -> Outcome:
        """Do a job.

        Raises:
            WorkerError: The worker died.
            Exception: The job raised an error that is not one of tracefit's or of the system, which is a defect.
        """
        try:
            # Pickled twice: the thread that takes the bytes must not import what they need.
            self._send(pickle.dumps((job.function, job.argument, names_flags())))
            reply: tuple[Outcome, BaseException | None] = pickle.load(self._stream)  # noqa: S301 - of our own worker
        except _GONE as gone:
            raise WorkerError(
                "a worker died while it was read",
                where=job.name,
                hint=f"if memory ran out, use fewer {named(WorkersOption)}",
            ) from gone
        outcome, defect = reply
        if defect is not None:
            raise defect
        return outcome

    def _send(self, call: bytes) -> None:
        pickle.dump(call, self._stream)
        self._stream.flush()


# -- in the process of the worker ---------------------------------------------------------------------------


def main() -> None:
    """Do the jobs that come, until there is no other one."""
    keep_to_core(int(sys.argv[3]) if len(sys.argv) > 3 else None)
    # Otherwise its warnings would bypass the log and reach the user's terminal.
    warnings.simplefilter("ignore")
    memory.reuse_freed()
    with socket.socket(fileno=int(sys.argv[2])) as connection, connection.makefile("rwb") as stream:
        calls = SimpleQueue[bytes]()
        threading.Thread(target=_receive, args=(stream, calls), daemon=True).start()
        while call := calls.get():
            stream.write(_outcome(call))
            stream.flush()


def _receive(stream: Any, calls: SimpleQueue[bytes]) -> None:
    """Take the calls from the connection. When its other end is gone, end this process: another one may lock the folder
    by now.
    """
    call = None
    while call != _END:
        try:
            call = pickle.load(stream)  # noqa: S301 - of the process that started this one
        except _GONE:
            os._exit(1)
        calls.put(call)


def _outcome(call: bytes) -> bytes:
    """Return the pickled outcome of a call, and the error that it did not raise on purpose."""
    try:
        function, argument, flags = pickle.loads(call)  # noqa: S301 - as above
        return pickle.dumps((attempt(function, argument, flags=flags), None))
    except BaseException as error:  # noqa: BLE001 - a defect is raised where the job came from
        error.add_note(f"In a worker:\n{''.join(traceback.format_exception(error))}")
        return _pickled(error)


def _pickled(error: BaseException) -> bytes:
    try:
        return pickle.dumps((None, error))
    except Exception:  # noqa: BLE001 - whatever such an error does when it is pickled
        return pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}")))
