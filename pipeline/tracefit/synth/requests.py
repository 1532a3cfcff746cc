"""Requests of a simulation in other forms: SGLang's spans, logs with the engine's times, logs of load generators.

Fields are those of SGLang 0.5.23 at trace level 3, LLMServingSim's benchmark of vLLM, `vllm bench serve
--save-detailed` (0.32) and GuideLLM 0.8.1. Aborted requests are left out.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tracefit.synth.scheduler import FinishStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tracefit.synth.scheduler import Request
    from tracefit.synth.simulation import EpochLog

FRONT_LATE_NS, FRONT_JITTER = 150_000, 0.5
"""Time from a step's outputs to the front end's stamp of them: its median, and the sigma of its logarithm."""

_WAY_NS, _WAY_JITTER, _TURN_NS = 300_000, 0.3, 20_000
"""Time between client and front end, likewise, and between two responses of one step: assumed."""


class Served(NamedTuple):
    """A request that was served to its end; stamps are Unix nanoseconds."""

    request: Request
    queued_ns: int
    scheduled_ns: int
    prompt_steps: range  # indexes of the steps from its first to that of its first token
    token_steps: list[int]  # of the steps whose outputs its tokens are


def served(epoch: EpochLog) -> Iterator[Served]:
    """Yield the requests that were served to their end, in order of arrival."""
    for request in epoch.requests:
        if request.first("FIRST_TOKEN") is None or request.finish_status == FinishStatus.ABORTED:
            continue
        tokens: list[int] = []
        for point in request.points:
            # A step has one token of a request that runs: the last ones before it was preempted, or ended.
            if point.event in ("PREEMPTED", "FINISHED"):
                end = point.step_id - (point.event == "PREEMPTED")
                tokens += range(end - point.decode_done_tokens + len(tokens), end)
        first = next(point for point in request.points if point.event == "SCHEDULED").step_id - 1
        yield Served(
            request,
            request.points[0].ts_ns + epoch.unix_offset_ns,
            epoch.steps[first].start_ns + epoch.unix_offset_ns,
            range(first, tokens[0] + 1),
            tokens,
        )


def outputs_ns(epoch: EpochLog) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return when each step's outputs were ready, in Unix nanoseconds."""
    return np.array([step.output_ns + epoch.unix_offset_ns for step in epoch.steps], np.int64)


def seen_ns(epoch: EpochLog, rng: np.random.Generator) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return when the front end stamps each step's outputs: one process takes them in order."""
    late_ns = FRONT_LATE_NS * np.exp(FRONT_JITTER * rng.standard_normal(len(epoch.steps)))
    return np.maximum.accumulate(outputs_ns(epoch) + late_ns.astype(np.int64))


def request_log_lines(epochs: Iterable[EpochLog]) -> list[bytes]:
    """Return a line for each request, in order of arrival: arrival on the wall clock, the others on the engine's."""
    lines = []
    for epoch in epochs:
        out_ns = outputs_ns(epoch)
        for one in served(epoch):
            stamps = {
                "queued_ts": one.queued_ns,
                "scheduled_ts": one.scheduled_ns,
                "first_token_ts": int(out_ns[one.token_steps[0]]),
                "last_token_ts": int(out_ns[one.token_steps[-1]]),
            }
            record = {
                "request_id": one.request.api_id,
                "input_toks": one.request.prompt_tokens,
                "output_toks": one.request.done_tokens,
                "arrival_time": (one.request.arrival_ns + epoch.unix_offset_ns) / 1e9,
                **{name: (ns - epoch.unix_offset_ns) / 1e9 for name, ns in stamps.items()},
            }
            lines.append(json.dumps(record).encode() + b"\n")
    return lines


def client_lines(epochs: Sequence[EpochLog], rng: np.random.Generator, *, form: str) -> list[bytes]:
    """Return a load generator's log: `bench`, with the time of every token, or `guidellm`, of first and last."""
    rows = []
    for epoch in epochs:
        seen = seen_ns(epoch, rng)
        for number, one in enumerate(served(epoch)):
            way_ns = _WAY_NS * np.exp(_WAY_JITTER * rng.standard_normal(1 + len(one.token_steps)))
            # The front end answers one request of a step after the other.
            tokens = seen[one.token_steps] + way_ns[1:].astype(np.int64) + _TURN_NS * (number % 16)
            sent_ns = one.request.arrival_ns + epoch.unix_offset_ns - int(way_ns[0])
            rows.append((sent_ns, one.request, np.maximum.accumulate(tokens)))
    return [_bench(rows) if form == "bench" else _guide(rows)]


_Rows = list[tuple[int, "Request", "np.ndarray[Any, np.dtype[np.int64]]"]]


def _bench(rows: _Rows) -> bytes:
    boot_ns = min(sent for sent, _, _ in rows) - 10**12
    end_s = max(int(tokens[-1]) for _, _, tokens in rows) // 10**9
    result = {
        "date": f"{datetime.fromtimestamp(end_s, UTC):%Y%m%d-%H%M%S}",
        "input_lens": [request.prompt_tokens for _, request, _ in rows],
        "output_lens": [request.done_tokens for _, request, _ in rows],
        "ttfts": [(int(tokens[0]) - sent) / 1e9 for sent, _, tokens in rows],
        "itls": [(np.diff(tokens) / 1e9).tolist() for _, _, tokens in rows],
        "start_times": [(sent - boot_ns) / 1e9 for sent, _, _ in rows],
        "errors": ["" for _ in rows],
    }
    return json.dumps(result).encode()


def _guide(rows: _Rows) -> bytes:
    requests = [
        {
            "request_id": request.api_id,
            "info": {
                "timings": {
                    "request_start": sent / 1e9,
                    "first_token_iteration": int(tokens[0]) / 1e9,
                    "last_token_iteration": int(tokens[-1]) / 1e9,
                    "request_end": int(tokens[-1]) / 1e9,
                }
            },
            "prompt_tokens": request.prompt_tokens,
            "output_tokens": request.done_tokens,
        }
        for sent, request, tokens in rows
    ]
    benchmark = {"requests": {"successful": requests, "errored": [], "incomplete": []}}
    return json.dumps({"metadata": {"guidellm_version": "0.8.1"}, "benchmarks": [benchmark]}).encode()
