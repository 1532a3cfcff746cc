"""Logs of requests with the times of the engine, one JSON line for each request, as LLMServingSim's benchmarks of vLLM
write them.

`{"request_id": …, "input_toks": …, "output_toks": …, "arrival_time": …, "queued_ts": …, "scheduled_ts": …,
"first_token_ts": …, "last_token_ts": …}`: these are vLLM's statistics of a finished request (`RequestStateStats`), as
in its spans. The arrival is on the wall clock, the other times on the engine's monotonic clock. No request is queued
before it arrives, so the shortest admission is taken to be 0: admissions are known up to a constant.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import polars as pl

from tracefit.inputs.formats import Recording, register
from tracefit.recordings.blocks import MOST_S, RecordedBlock
from tracefit.recordings.requests import (
    TokenCount,
    UnixSeconds,
    as_spans,
    from_json,
    lines_of,
    read_parts,
    seconds_to_ns,
)
from tracefit.tables.dialects import LOG_SCOPE
from tracefit.tables.rows import RECORDED_STEPS
from tracefit.tables.units import unit_fault

if TYPE_CHECKING:
    from tracefit.inputs.blocks import Block
    from tracefit.inputs.framing import Shape
    from tracefit.inputs.rejects import Encoding, Rejects

_TIME_KEYS = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
_START = re.compile(rb'\{[^{}\[\]]{0,400}"queued_ts"\s*:[^,{}\[\]]{1,40},\s*"scheduled_ts"\s*:')
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=MOST_S)]


class _Line(msgspec.Struct):
    request_id: Annotated[str, msgspec.Meta(max_length=200)]
    input_toks: TokenCount
    output_toks: TokenCount
    arrival_time: UnixSeconds
    queued_ts: _Seconds
    scheduled_ts: _Seconds
    first_token_ts: _Seconds
    last_token_ts: _Seconds


_REQUEST_TYPES: dict[str, Any] = {
    "source_offset": pl.Int64,
    "request_id": pl.String,
    "input_toks": pl.Int64,
    "output_toks": pl.Int64,
    **dict.fromkeys(("arrival_time", *_TIME_KEYS), pl.Float64),
}


def _find(head: bytes) -> tuple[Shape, Encoding] | None:
    # One block: the offset between the two clocks follows from all of its requests.
    return ("document", "json") if _START.search(head) else None


def decode(block: Block, payload: bytes, rejects: Rejects) -> RecordedBlock:
    """Decode a block of whole lines into requests; only bad ones are rejected.

    Args:
        block: The position of the bytes.
        payload: The bytes.
        rejects: Receives the bad ones; once they are too many, the rest is not decoded.
    """
    records = read_parts(block, payload, lambda text: lines_of(text, _line), "no request of a log", rejects)
    rows = [(offset, *msgspec.structs.astuple(line)) for offset, line in records]
    lines = pl.DataFrame(rows, schema=_REQUEST_TYPES, orient="row")
    if fault := _unit_fault(lines):
        rejects.add(0, payload, f"no request of a log ({fault})")
        lines = lines.clear()
    requests = _as_spans(lines)
    return RecordedBlock(pl.DataFrame(schema=RECORDED_STEPS).drop("file"), requests)


def _line(text: bytes) -> _Line:
    line = from_json(text, _Line)
    times = [getattr(line, name) for name in _TIME_KEYS]
    if times != sorted(times):
        raise msgspec.ValidationError("times out of order")
    return line


def _unit_fault(lines: pl.DataFrame) -> str | None:
    """Return the fault of a log whose two clocks do not run at one rate: one of them is in another unit."""
    ranges = [lines[name].to_numpy() for name in ("queued_ts", "arrival_time")]
    engine_s, wall_s = (float(times.max(initial=0) - times.min(initial=np.inf)) for times in ranges)
    return unit_fault("the range of queued_ts", "that of arrival_time", engine_s / wall_s, "s") if wall_s > 0 else None


def _as_spans(lines: pl.DataFrame) -> pl.DataFrame:
    """Return requests as spans of stock vLLM; durations on the engine's clock, exact differences of its stamps."""
    stamps = lines.with_columns(seconds_to_ns(pl.col(name)) for name in ("arrival_time", *_TIME_KEYS))
    ahead = (pl.col("queued_ts") - pl.col("arrival_time")).min()
    between = {
        "time_in_queue": ("queued_ts", "scheduled_ts"),
        "time_in_model_prefill": ("scheduled_ts", "first_token_ts"),
        "time_in_model_decode": ("first_token_ts", "last_token_ts"),
        "time_in_model_inference": ("scheduled_ts", "last_token_ts"),
        "time_to_first_token": ("arrival_time", "first_token_ts"),
        "e2e": ("arrival_time", "last_token_ts"),
    }
    latencies = {
        f"gen_ai.latency.{name}": (pl.col(end) - pl.col(begin)) / 1e9 for name, (begin, end) in between.items()
    }
    facts = {
        "gen_ai.request.id": pl.col("request_id"),
        "gen_ai.usage.prompt_tokens": pl.col("input_toks"),
        "gen_ai.usage.completion_tokens": pl.col("output_toks"),
    }
    rows = stamps.with_columns(pl.col(name) - ahead for name in _TIME_KEYS).with_columns(
        start_unix_ns="arrival_time",
        end_unix_ns="last_token_ts",
        error=pl.lit(value=False),
        **latencies,
        **facts,
    )
    return as_spans(rows, LOG_SCOPE, (*latencies, *facts))


FORMAT = register(
    Recording(
        name="request_log",
        title="requests with the engine's times",
        find=_find,
        fills="`requests` with queue wait, prefill and decode; `timeline`, as from spans of stock vLLM",
        units="s",
        clock=(
            "the server's wall clock for arrivals, the engine's for other times; the request that was queued "
            "soonest after its arrival shows how far the two are apart"
        ),
        decode=decode,
    )
)
