"""The ForwardPassMetrics that Dynamo's vLLM worker would have published of a simulation, as its recorder writes them.

Fields and times are those of `dynamo/vllm/instrumented_scheduler.py` (ai-dynamo 1.6.1). `wall_time` is the
time from one step's outputs to the next one's; after no step or an empty one, from the end of `schedule()`.
An empty step has no record. A second without one brings a heartbeat, and heartbeats count too. The simulation
keeps no variances, so they are 0, and counts a waiting preempted request among the prompts.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tracefit.synth.laws import Composition

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tracefit.synth.simulation import EpochLog, StepLog

_HEARTBEAT_NS = 1_000_000_000
_RECEIVED_NS = 300_000
"""Time from a step's outputs to the recorder: assumed."""


def fpm_lines(epochs: Iterable[EpochLog]) -> list[bytes]:
    """Return one line for each record of all servers, in the order the recorder received them."""
    lines = sorted((at_ns, line) for epoch in epochs for at_ns, line in _records(epoch))
    return [line for _, line in lines]


def _records(epoch: EpochLog) -> Iterator[tuple[int, bytes]]:
    """Yield the records of one life of an engine: time of receipt, line."""
    counter, published_ns = 0, epoch.started_ns
    output_ns: int | None = None
    for step in epoch.steps:
        if not step.composition.scheduled_tokens:
            output_ns = None
            continue
        while published_ns + _HEARTBEAT_NS < step.output_ns:
            published_ns += _HEARTBEAT_NS
            yield _line(epoch, counter, published_ns, 0, None)
            counter += 1
        before_ns = step.start_ns + step.schedule_ns if output_ns is None else output_ns
        published_ns = output_ns = step.output_ns
        yield _line(epoch, counter, published_ns, output_ns - before_ns, step)
        counter += 1


def _line(epoch: EpochLog, counter: int, at_ns: int, wall_ns: int, step: StepLog | None) -> tuple[int, bytes]:
    received_ns = at_ns + epoch.unix_offset_ns + _RECEIVED_NS
    batch = step.composition if step else Composition()
    metrics = {
        "version": 1,
        "worker_id": f"worker-{epoch.server}",
        "dp_rank": 0,
        "counter_id": counter,
        "wall_time": wall_ns / 1e9,
        "scheduled_requests": {
            "num_prefill_requests": batch.num_prefill_reqs,
            "sum_prefill_tokens": batch.prefill_tokens,
            "var_prefill_length": 0.0,
            "sum_prefill_kv_tokens": batch.prefill_context_tokens,
            "num_decode_requests": batch.num_decode_reqs,
            "sum_decode_kv_tokens": batch.context_tokens,
            "var_decode_kv_tokens": 0.0,
        },
        "queued_requests": {
            "num_prefill_requests": step.waiting_depth if step else 0,
            "sum_prefill_tokens": step.waiting_tokens if step else 0,
            "var_prefill_length": 0.0,
            "num_decode_requests": 0,
            "sum_decode_kv_tokens": 0,
            "var_decode_kv_tokens": 0.0,
        },
    }
    text = json.dumps({"received_at_ns": received_ns, "metrics": metrics}, separators=(",", ":"))
    return received_ns, f"{text}\n".encode()
