"""ForwardPassMetrics and vLLM's log as their writers put them into files, from their definitions; independent of the
package."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Record = dict[str, Any]

SCHEDULED = (
    *("num_prefill_requests", "sum_prefill_tokens", "var_prefill_length", "sum_prefill_kv_tokens"),
    *("num_decode_requests", "sum_decode_kv_tokens", "var_decode_kv_tokens"),
)
QUEUED = tuple(name for name in SCHEDULED if name != "sum_prefill_kv_tokens")
CSV = (
    *("phase", "workload_segment", "counter_id", "worker_id", "dp_rank", "sum_prefill_tokens"),
    *("num_prefill_requests", "sum_prefill_kv_tokens", "var_prefill_length", "num_decode_requests"),
    *("sum_decode_kv_tokens", "var_decode_kv_tokens", "queued_prefill_requests", "queued_prefill_tokens"),
    *("queued_var_prefill_length", "queued_decode_requests", "queued_decode_kv_tokens"),
    *("queued_var_decode_kv_tokens", "latency_ms"),
)


def record(step: int, wall_s: float, *, worker: str = "w", rank: int = 0, version: int = 1, **fields: Any) -> Record:
    """Return a record; fields of the queue begin with `queued_`, all that are not given are 0."""

    def part(names: Iterable[str], prefix: str = "") -> Record:
        return {name: fields.get(prefix + name, 0.0 if name.startswith("var") else 0) for name in names}

    return {
        "version": version,
        "worker_id": worker,
        "dp_rank": rank,
        "counter_id": step,
        "wall_time": wall_s,
        "scheduled_requests": part(SCHEDULED),
        "queued_requests": part(QUEUED, "queued_"),
    }


def records_of(truth: pl.DataFrame, worker: str = "worker") -> list[Record]:
    """Return the steps of a generated run as records: a step with a known time, in order."""
    return [
        record(
            step["step_id"],
            step["cycle_us"] / 1e6,
            worker=worker,
            num_prefill_requests=step["num_prefill_reqs"],
            sum_prefill_tokens=step["prefill_tokens"],
            sum_prefill_kv_tokens=step["prefill_context_tokens"],
            num_decode_requests=step["num_decode_reqs"],
            sum_decode_kv_tokens=step["context_tokens"],
            queued_num_prefill_requests=step["waiting"],
            queued_sum_prefill_tokens=step["waiting_tokens"],
        )
        for step in truth.drop_nulls("cycle_us").iter_rows(named=True)
    ]


def json_lines(records: Iterable[Record], begin_ns: int = 1_700_000_000_000_000_000) -> list[bytes]:
    """Return Dynamo's lines: each is received when its step ends."""
    lines, at_ns = [], begin_ns
    for one in records:
        took = one["wall_time"]
        at_ns += round(took * 1e9) if isinstance(took, float) and math.isfinite(took) else 0
        lines.append(json.dumps({"received_at_ns": at_ns, "metrics": one}, separators=(",", ":")).encode() + b"\n")
    return lines


def csv_lines(records: Iterable[Record]) -> list[bytes]:
    """Return AIConfigurator's table, its header first."""
    lines = [",".join(CSV).encode() + b"\n"]
    for one in records:
        scheduled, queued = one["scheduled_requests"], one["queued_requests"]
        values = {
            "phase": "decode" if not scheduled["num_prefill_requests"] else "mixed",
            "workload_segment": "real",
            **one,
            **scheduled,
            "queued_prefill_requests": queued["num_prefill_requests"],
            "queued_prefill_tokens": queued["sum_prefill_tokens"],
            "queued_var_prefill_length": queued["var_prefill_length"],
            "queued_decode_requests": queued["num_decode_requests"],
            "queued_decode_kv_tokens": queued["sum_decode_kv_tokens"],
            "queued_var_decode_kv_tokens": queued["var_decode_kv_tokens"],
            "latency_ms": f"{one['wall_time'] * 1e3:.3f}",
        }
        lines.append(",".join(str(values[name]) for name in CSV).encode() + b"\n")
    return lines


def maps(records: Iterable[Record]) -> list[bytes]:
    """Return msgpack messages with the names of the fields."""
    return [msgspec.msgpack.encode(one) for one in records]


def arrays(records: Iterable[Record]) -> list[bytes]:
    """Return msgpack messages of only the values."""
    return [
        msgspec.msgpack.encode([list(v.values()) if isinstance(v, dict) else v for v in one.values()])
        for one in records
    ]


def framed(records: Iterable[Record]) -> list[bytes]:
    """Return messages with a length before each."""
    return [len(message).to_bytes(4, "big") + message for message in maps(records)]


WRITERS: dict[str, Callable[[Iterable[Record]], list[bytes]]] = {
    "json": json_lines,
    "csv": csv_lines,
    "maps": maps,
    "arrays": arrays,
    "framed": framed,
}


def log_lines(truth: pl.DataFrame, begin_ns: int = 1_700_000_000_000_000_000, *, fine: bool = True) -> list[bytes]:
    """Return the lines of vLLM's log of a generated run's steps that compute anything, numbered from 0; each ends its
    step.

    Without `fine` stamps are the local time, two hours ahead, in whole seconds and without a year.
    """
    lines = []
    computing = truth.filter(pl.col("prefill_tokens") + pl.col("decode_tokens") > 0)
    for number, step in enumerate(computing.iter_rows(named=True)):
        at_ns = begin_ns + step["end_ns"]
        local = datetime.fromtimestamp(at_ns // 10**9 + 7_200, UTC).strftime("%m-%d %H:%M:%S")
        stamp = f"{at_ns / 1e9:.6f} INFO 9" if fine else f"INFO {local} [loggers.py:198]"
        counts = (
            f"{step['num_prefill_reqs']} context requests, {step['prefill_tokens']} context tokens, "
            f"{step['num_decode_reqs']} generation requests, {step['decode_tokens']} generation tokens"
        )
        elapsed_ms = 0.8 * (step["end_ns"] - step["start_ns"]) / 1e6
        line = f"{stamp} Engine 000: Iteration({number}): {counts}, iteration elapsed time: {elapsed_ms:.2f} ms"
        lines.append(f"{line}, GPU KV cache usage: 0.5%\n".encode())
    return lines
