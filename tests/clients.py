"""Requests of a planned engine as load generators log them, from the definitions of their formats; independent of the package."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

UNIX_S = 1_800_000_000.0
STEP_S, PER_REQUEST_S, PER_PROMPT_TOKEN_S = 0.015, 0.0005, 0.00002


@dataclass
class Request:
    """A request of the plan; times in seconds since its beginning."""

    name: str
    sent_s: float
    prompt: int
    output: int
    token_s: list[float] = field(default_factory=list)


def planned(count: int = 120, *, way_s: float = 0.0) -> list[Request]:
    """Return requests that a simple engine served: every running one has a token of each step.

    A step takes 15 ms, 0.5 ms for each request in it and 20 us for each prompt token. A token is `way_s` on its way.
    """
    requests = [
        Request(f"r{n}", 0.06 * n + 0.013 * (n % 5), 20 + 37 * n % 180, 4 + 11 * n % 23) for n in range(count)
    ]
    waiting, running, now = sorted(requests, key=lambda r: r.sent_s), [], 0.0
    while waiting or running:
        if not running:
            now = max(now, waiting[0].sent_s)
        while waiting and waiting[0].sent_s <= now:
            running.append(waiting.pop(0))
        prompts = sum(r.prompt for r in running if not r.token_s)
        now += STEP_S + PER_REQUEST_S * len(running) + PER_PROMPT_TOKEN_S * prompts
        for place, request in enumerate(running):
            # The front end writes one after the other.
            request.token_s.append(now + way_s + 2e-5 * place)
        running = [r for r in running if len(r.token_s) < r.output]
    return requests


def _gaps(request: Request) -> list[float]:
    return [after - before for before, after in zip(request.token_s, request.token_s[1:], strict=False)]


def date_of(requests: list[Request]) -> str:
    """Return the date of a benchmark that ends with the last of its tokens: cut to whole seconds."""
    end_s = UNIX_S + max(r.token_s[-1] for r in requests)
    return f"{datetime.fromtimestamp(end_s, UTC):%Y%m%d-%H%M%S}"


def vllm_bench(requests: list[Request], date: str = "20270115-080100") -> bytes:
    """Return the result of `vllm bench serve --save-detailed`; its clock begins at boot."""
    boot = 5000.0
    result = {
        "date": date,
        "backend": "vllm",
        "num_prompts": len(requests),
        "completed": len(requests),
        "input_lens": [r.prompt for r in requests],
        "output_lens": [r.output for r in requests],
        "ttfts": [r.token_s[0] - r.sent_s for r in requests],
        "itls": [_gaps(r) for r in requests],
        "start_times": [boot + r.sent_s for r in requests],
        "generated_texts": ["w1 w2" for _ in requests],
        "errors": ["" for _ in requests],
    }
    return json.dumps(result).encode()


def guidellm(requests: list[Request]) -> bytes:
    """Return GuideLLM's report."""

    def entry(r: Request) -> dict[str, Any]:
        timings = {
            "request_start": UNIX_S + r.sent_s,
            "first_token_iteration": UNIX_S + r.token_s[0],
            "last_token_iteration": UNIX_S + r.token_s[-1],
            "request_end": UNIX_S + r.token_s[-1],
        }
        return {
            "type_": "generative_request_stats",
            "request_id": r.name,
            "response_id": f"chatcmpl-{r.name}",
            "info": {"timings": timings, "status": "completed"},
            "prompt_tokens": r.prompt,
            "output_tokens": r.output,
        }

    kinds = {"successful": [entry(r) for r in requests], "errored": [], "incomplete": [], "total": None}
    report = {"metadata": {"version": 2, "guidellm_version": "0.8.1"}, "benchmarks": [{"requests": kinds}]}
    return json.dumps(report).encode()


def inference_perf(requests: list[Request]) -> bytes:
    """Return inference-perf's `per_request_lifecycle_metrics.json`; its clock begins at boot."""
    boot = 5000.0
    entries = [
        {
            "start_time": boot + r.sent_s,
            "end_time": boot + r.token_s[-1],
            "info": {
                "request_metrics": {"text": {"input_tokens": r.prompt}},
                "response_metrics": {
                    "output_tokens": r.output,
                    "output_token_times": [boot + token for token in r.token_s],
                },
            },
            "error": None,
        }
        for r in requests
    ]
    return json.dumps(entries, indent=2).encode()


def aiperf(requests: list[Request]) -> bytes:
    """Return AIPerf's `profile_export.jsonl`."""

    def line(r: Request) -> bytes:
        metrics = {
            "time_to_first_token": {"value": 1e3 * (r.token_s[0] - r.sent_s), "unit": "ms"},
            "request_latency": {"value": 1e3 * (r.token_s[-1] - r.sent_s), "unit": "ms"},
            "input_sequence_length": {"value": r.prompt, "unit": "tokens"},
            "output_sequence_length": {"value": r.output, "unit": "tokens"},
            "inter_chunk_latency": {"value": [1e3 * gap for gap in _gaps(r)], "unit": "ms"},
        }
        metadata = {
            "x_request_id": r.name,
            "request_start_ns": round(1e9 * (UNIX_S + r.sent_s)),
            "request_end_ns": round(1e9 * (UNIX_S + r.token_s[-1])),
            "record_processor_id": "p",
            "was_cancelled": False,
        }
        return json.dumps({"metadata": metadata, "metrics": metrics, "error": None}).encode() + b"\n"

    return b"".join(map(line, requests))


def request_log(requests: list[Request]) -> bytes:
    """Return lines with the engine's times: scheduled as the step before the first token ended."""
    boot = 5000.0

    def line(r: Request) -> bytes:
        record = {
            "request_id": r.name,
            "input_toks": r.prompt,
            "output_toks": r.output,
            "arrival_time": UNIX_S + r.sent_s,
            "queued_ts": boot + r.sent_s + 0.001,
            "scheduled_ts": boot + r.sent_s + 0.001,
            "first_token_ts": boot + r.token_s[0],
            "last_token_ts": boot + r.token_s[-1],
        }
        return json.dumps(record).encode() + b"\n"

    return b"".join(map(line, requests))


def experiment_requests(requests: list[Request]) -> bytes:
    """Return what an experiment of inference-sim sent, as its `requests.json`."""
    sent = [
        {"index": n, "arrival_time_us": 1e6 * r.sent_s, "input_tokens": r.prompt, "output_tokens": r.output}
        for n, r in enumerate(requests)
    ]
    return json.dumps({"requests": sent}).encode()


def experiment_latencies(requests: list[Request]) -> bytes:
    """Return what it measured, as its `measured.json`."""
    measured = [
        {"index": n, "ttft_s": r.token_s[0] - r.sent_s, "e2e_s": r.token_s[-1] - r.sent_s}
        for n, r in enumerate(requests)
    ]
    return json.dumps(measured).encode()


FORMS = {
    "bench.json": vllm_bench,
    "guidellm.json": guidellm,
    "per_request_lifecycle_metrics.json": inference_perf,
    "profile_export.jsonl": aiperf,
}
"""Name of a file to the function that writes it."""

EXPERIMENT = {"requests.json": experiment_requests, "measured.json": experiment_latencies}
"""The two files of an experiment, likewise."""
