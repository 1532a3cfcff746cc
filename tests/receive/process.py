"""A receiver as users start it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys


class Process:
    """`tracefit receive` in a process of its own."""

    def __init__(self, out, *arguments):
        command = [sys.executable, "-m", "tracefit.cli", "receive", "--out", str(out)]
        ports = ["--grpc-port", "0", "--http-port", "0"]
        self.popen = subprocess.Popen(
            [*command, *ports, *map(str, arguments)],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        before = ""  # warnings come first; a command that ends at once closes the stream
        for line in self.popen.stderr:
            if len(found := re.findall(r":(\d+) \(", line)) == 2:
                break
            before += line
        else:
            raise AssertionError(before)
        self.before = before
        self.grpc_port, self.http_port = map(int, found)

    def end(self, number=signal.SIGTERM):
        """Send a signal and wait; return exit code, stdout, stderr."""
        if self.popen.poll() is None:
            self.popen.send_signal(number)
        out, err = self.popen.communicate(timeout=60)
        return self.popen.returncode, out, err
