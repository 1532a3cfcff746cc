"""The slowest requests of a deployment, and where each lost its time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl

from tracefit.diagnostics.groups import US_PER_MS, count_open
from tracefit.tables.requests import is_cut_off
from tracefit.tables.schema import ENGINE
from tracefit.text import count, number, plural

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_EACH = 5
"""Requests listed by each latency."""

_SMALL_SHARE = 0.1
"""Least share of a request's time that makes a part a reason."""

_REQUEST_NAMES = (*ENGINE, "request_id", "core_request_id")
SLOWEST_COLUMNS = (
    *(*_REQUEST_NAMES, "arrival_ns", "queued_ns", "first_scheduled_ns", "finish_status"),
    *("first_scheduled_step", "first_token_step", "prompt_tokens", "output_tokens", "num_preemptions"),
    *("ttft_us", "e2e_us", "admission_us", "queue_wait_us", "requeue_wait_us", "prefill_us", "decode_us"),
)
"""Columns of `requests` that `slowest_requests` reads."""


class SlowRequest(NamedTuple):
    """A slow request: the latency it is slow in, times in ms, null if unknown, and its reason in words."""

    latency: str
    run_id: str
    name: str
    ttft_ms: float | None
    e2e_ms: float | None
    prompt_tokens: int | None
    output_tokens: int | None
    reason: str


def slowest_requests(requests: pl.DataFrame) -> tuple[SlowRequest, ...]:
    """Return the requests with the longest TTFT, then those with the longest E2E, each once.

    Args:
        requests: Rows of the `requests` table with the columns of `SLOWEST_COLUMNS`.
    """
    parts = requests.partition_by(ENGINE, maintain_order=True)
    rows = pl.concat([_with_queue(part) for part in parts]) if parts else requests
    whole = rows.filter(~is_cut_off())
    worst = [
        whole.drop_nulls(f"{name}_us").top_k(_EACH, by=f"{name}_us").with_columns(latency=pl.lit(name))
        for name in ("ttft", "e2e")
    ]
    slowest = pl.concat(worst).unique([*_REQUEST_NAMES, "arrival_ns"], maintain_order=True)
    return tuple(
        SlowRequest(
            row["latency"],
            row["run_id"],
            row["request_id"] or row["core_request_id"] or "",
            _ms(row["ttft_us"]),
            _ms(row["e2e_us"]),
            row["prompt_tokens"],
            row["output_tokens"],
            _reason(row),
        )
        for row in slowest.iter_rows(named=True)
    )


def _with_queue(rows: pl.DataFrame) -> pl.DataFrame:
    """Add `behind`: the requests of the engine that waited in the queue when each was queued."""
    queued, scheduled = (rows[name].drop_nulls() for name in ("queued_ns", "first_scheduled_ns"))
    behind = count_open(queued, scheduled, rows["queued_ns"].fill_null(0))
    return rows.with_columns(behind=behind.clip(lower_bound=0))


def _ms(us: float | None) -> float | None:
    return None if us is None else us / US_PER_MS


def _reason(row: Mapping[str, Any]) -> str:
    """Return the parts that took most of a request's time, the longest first."""
    parts = sorted(_parts(row, until_first=row["latency"] == "ttft"), reverse=True)
    large = [text for us, text in parts if us >= _SMALL_SHARE * row[f"{row['latency']}_us"]]
    return "; ".join(large or [text for _, text in parts[:1]]) or "its trace does not show where the time went"


def _parts(row: Mapping[str, Any], *, until_first: bool) -> Iterator[tuple[float, str]]:
    """Yield the parts of a request's time in us, or of that until its first token, each with what took it."""
    if us := row["admission_us"]:
        yield us, f"{_time(us)} in the API process, before it was queued"
    if us := row["queue_wait_us"]:
        others = f"behind {plural(row['behind'], 'request')}" if row["behind"] else "for the next step"
        yield us, f"waited {_time(us)} {others}"
    if us := row["requeue_wait_us"]:
        times = int(row["num_preemptions"] or 0)
        yield us, f"preempted {'once' if times == 1 else f'{times} times'}, {_time(us)}"
    if us := row["prefill_us"]:
        first, last, prompt = row["first_scheduled_step"], row["first_token_step"], row["prompt_tokens"]
        tokens = f" of {count(int(prompt))} tokens" if prompt else ""
        chunks = None if first is None or last is None or row["num_preemptions"] else int(last - first) + 1
        split = f" in {chunks} chunks" if chunks and chunks > 1 else ""
        yield us, f"prefill{tokens}{split}, {_time(us)}"
    if (us := row["decode_us"]) and not until_first:
        output = int(row["output_tokens"] or 0)
        each = f" at {_time(us / (output - 1))} each" if output > 1 else ""
        yield us, f"{plural(output, 'output token')}{each}, {_time(us)}"


def _time(us: float) -> str:
    return f"{number(us / US_PER_MS)} ms"
