"""The records that the engine's thread hands over: tuples of builtin types, which `marshal` writes without a call into
Python.

Times are nanoseconds of CLOCK_MONOTONIC, which all processes of a host share. A step is the count of schedule() calls.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

QUEUED, STEP, PREEMPTED, OUTPUT, ENDED, LOST = range(6)
"""The first element of each record:

QUEUED: (kind, time, step, request, prompt tokens, most output tokens, its caller's trace id and span id or None, its
own or None
    where its journey is not traced)
STEP: (kind, step, start, end, running, waiting, free blocks or None, requests that come in as (request, computed
tokens,
    blocks of each cache group), the other requests, their computed tokens, their new blocks, tokens by request,
    requests with drafts). The computed tokens are those before the step; drafts of steps whose output has not come
    count as right.
PREEMPTED: (kind, time, step, request)
OUTPUT: (kind, time, step, (request, new tokens) of all, (request, status) of those that end, (request, wrong drafts) of
those
    with drafts)
ENDED: (kind, time, step, requests, status)
LOST: (kind, records that found no room)

The step of QUEUED, PREEMPTED and ENDED is the last that began, that of OUTPUT the one that computed it.
"""

Record: TypeAlias = tuple[object, ...]


class Header(NamedTuple):
    """Facts that do not change while an engine runs; the first record it sends.

    Attributes:
        process_id: The engine's process.
        unix_offset_ns: Wall clock less CLOCK_MONOTONIC.
        endpoint: Where spans go; None for what the variables of OpenTelemetry say.
        rank: Data-parallel rank; None where there is one engine.
        block_size: Tokens of a KV block.
        blocks: KV blocks that requests can have.
        step_rate: Share of steps with a summary.
        snapshot_rate: Share of the summarised steps with a snapshot of each running request.
        closure_interval: Steps of a span.
    """

    process_id: int
    unix_offset_ns: int
    endpoint: str | None
    rank: int | None
    block_size: int
    blocks: int
    step_rate: float
    snapshot_rate: float
    closure_interval: int
