"""For a server to load: a recording scheduler, and tracefit-vllm with one note that fails, and the longest time in any
of them.

`FAIL_AT` is the step after which the tokens of the next one are not noted: the disk is full. `HOOK_TIME` names a file
for the longest time.
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

from recording_scheduler import RecordingAsync as Scheduler  # noqa: F401 - `--scheduler-cls faulty_plugin.Scheduler`

from tracefit_vllm.scheduler import Tracing

FAIL_AT = int(os.environ.get("FAIL_AT", "0"))
HOOK_TIME = Path(os.environ["HOOK_TIME"])
_longest_ns = 0


def faulty(name):
    method = getattr(Tracing, name)

    def call(self, *values):
        global _longest_ns  # noqa: PLW0603 - of the process
        if FAIL_AT and name == "output" and self._step > FAIL_AT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        began_ns = time.monotonic_ns()
        result = method(self, *values)
        spent_ns = time.monotonic_ns() - began_ns
        if spent_ns > _longest_ns:
            _longest_ns = spent_ns
            HOOK_TIME.write_text(str(spent_ns))
        return result

    setattr(Tracing, name, call)


for note in ("queued", "begin", "scheduled", "output", "ended"):
    faulty(note)
