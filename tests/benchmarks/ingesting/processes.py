"""Whole processes measured: CPU and wall time from the first instruction to the last, and the memory of all of them."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

_PERIOD_S = 0.05
_HIGH_WATER = re.compile(r"VmHWM:\s+(\d+) kB")
_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20


class Measured(NamedTuple):
    """Time and memory of a process and its children."""

    cpu_s: float  # user and system time of all of them
    wall_s: float  # from start to end
    peak_mib: float  # most memory they had at one time
    output: str  # what the process wrote to stdout


def measure(
    command: Sequence[str],
    *,
    accepted: Sequence[int] = (0,),
    stdin: IO[bytes] | int | None = subprocess.DEVNULL,
) -> Measured:
    """Run a command and measure it.

    Args:
        command: The command line.
        accepted: Exit codes of success.

    Raises:
        RuntimeError: It ended with another code; the message holds the end of what it wrote to stderr.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        began = time.perf_counter()
        # An installed program has its bytecode. Where it may not be written, a second goes into compiling libraries.
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        process = subprocess.Popen(command, stdin=stdin, stdout=output, stderr=errors, env=env)
        watch = _Watch(process.pid)
        watch.start()
        # Time of descendants is in there too, once their parents have waited for them.
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        watch.stop()
        if process.returncode not in accepted:
            errors.seek(0)
            said = errors.read().decode(errors="replace")[-2000:]
            raise RuntimeError(f"{' '.join(command[:6])} ended with {process.returncode}: {said}")
        output.seek(0)
        return Measured(
            usage.ru_utime + usage.ru_stime,
            wall_s,
            # Where there is no /proc: the largest process, though its peak can be that of the one that started it.
            watch.peak_mib or usage.ru_maxrss / 1024,
            output.read().decode(),
        )


class _Watch(threading.Thread):
    """Looks at the memory of a process and its descendants, many times a second."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid, self._ended = pid, threading.Event()
        self.peak_mib = 0.0

    def run(self) -> None:
        while not self._ended.wait(_PERIOD_S):
            self._look()

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        self.join()

    def _look(self) -> None:
        private = shared = 0.0
        for pid in _tree(self._pid):
            try:
                # A process's own peak holds what was between two looks.
                found = _HIGH_WATER.search(Path(f"/proc/{pid}/status").read_text())
                _, resident, common, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
            except OSError:
                continue
            if found:
                self.peak_mib = max(self.peak_mib, int(found[1]) / 1024)
            private += (resident - common) * _PAGE_MIB
            shared = max(shared, common * _PAGE_MIB)
        self.peak_mib = max(self.peak_mib, private + shared)


def _tree(pid: int) -> list[int]:
    """Return a process and its descendants."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                found += map(int, task.read_text().split())
            except OSError:
                continue
    return found
