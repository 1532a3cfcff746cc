"""An independent record of every step, for a server to load: a scheduler that writes what it did, and nothing else."""

from __future__ import annotations

import json
import os

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler


class _Recording:
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        name = f"{os.environ['RECORDED_STEPS']}.{self.vllm_config.parallel_config.data_parallel_index}"
        self._rows = open(name, "w", buffering=1)  # noqa: PTH123, SIM115 - while the server runs
        self._count = 0

    def schedule(self, *args, **options):
        output = super().schedule(*args, **options)
        self._count += 1
        # After scheduling, the tokens of this step are counted as computed.
        of = [
            (
                name,
                tokens,
                self.requests[name].num_computed_tokens - tokens,
                self.requests[name].num_output_tokens,
            )
            for name, tokens in output.num_scheduled_tokens.items()
        ]
        self._rows.write(json.dumps([self._count, of, len(self.running), len(self.waiting)]) + "\n")
        return output


class RecordingAsync(_Recording, AsyncScheduler):
    """Record the asynchronous scheduler."""


class RecordingSync(_Recording, Scheduler):
    """Record the synchronous scheduler."""
