"""The log that an unmodified vLLM with `--enable-logging-iteration-details` would have written of a simulation.

Its lines are those of vLLM 0.32 (`vllm/v1/metrics/loggers.py`), of all servers in one file, each an engine.
An empty step has no line and no number. `log` has stamps in microseconds, as `%(created).6f` writes them;
`log_seconds` has those of the default format: local time, here UTC, in whole seconds and without a year.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tracefit.synth.simulation import EpochLog, StepLog

_PRINTED_NS = 200_000
"""Time from a step's outputs to its line: assumed."""


def iteration_lines(epochs: Iterable[EpochLog], *, is_fine: bool) -> list[bytes]:
    """Return one line for each step of all servers that computes anything, in the order they were printed."""
    lines = sorted((at_ns, line) for epoch in epochs for at_ns, line in _lines(epoch, is_fine=is_fine))
    return [line for _, line in lines]


def _lines(epoch: EpochLog, *, is_fine: bool) -> Iterator[tuple[int, bytes]]:
    computing = (step for step in epoch.steps if step.composition.scheduled_tokens)
    for number, step in enumerate(computing):
        at_ns = step.output_ns + epoch.unix_offset_ns + _PRINTED_NS
        if is_fine:
            head = f"{at_ns // 10**9}.{at_ns % 10**9 // 1000:06d} INFO 1"
        else:
            head = f"INFO {datetime.fromtimestamp(at_ns // 10**9, UTC):%m-%d %H:%M:%S} [loggers.py:199]"
        yield (
            at_ns,
            f"{head} Engine {epoch.server:03d}: {_message(number, step, epoch.blocks_total)}\n".encode(),
        )


def _message(number: int, step: StepLog, blocks_total: int) -> str:
    batch = step.composition
    # The wait for the result: the step less the time inside `schedule()`.
    elapsed_ms = (step.output_ns - step.start_ns - step.schedule_ns) / 1e6
    return (
        f"Iteration({number}): {batch.num_prefill_reqs} context requests, {batch.prefill_tokens} context tokens, "
        f"{batch.num_decode_reqs} generation requests, {batch.decode_tokens} generation tokens, iteration elapsed "
        f"time: {elapsed_ms:.2f} ms, GPU KV cache usage: {100 * (1 - step.blocks_free / blocks_total):.1f}%"
    )
