"""Requests of a planned engine as load generators log them, from the definitions of their formats; independent of the
package."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import yaml

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
    requests = [Request(f"r{n}", 0.06 * n + 0.013 * (n % 5), 20 + 37 * n % 180, 4 + 11 * n % 23) for n in range(count)]
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


def planned_in_turn(count: int, slots: int) -> list[Request]:
    """Return requests of a client that keeps so many at a time: it sends each as soon as another one ends."""
    requests = [Request(f"r{n}", 0.0, 20 + 37 * n % 180, 4 + 11 * n % 23) for n in range(count)]
    running, left, now = requests[:slots], requests[slots:], 0.0
    while running:
        prompts = sum(r.prompt for r in running if not r.token_s)
        now += STEP_S + PER_REQUEST_S * len(running) + PER_PROMPT_TOKEN_S * prompts
        for request in running:
            request.token_s.append(now)
        ended = [r for r in running if len(r.token_s) == r.output]
        running = [r for r in running if r not in ended]
        for _ in ended[: len(left)]:
            left[0].sent_s = now
            running.append(left.pop(0))
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


def vllm_bench_before_start_times(requests: list[Request], **more: Any) -> bytes:
    """Return the result of `vllm bench serve --save-detailed` of older versions of vLLM."""
    result = json.loads(vllm_bench(requests))
    del result["start_times"]
    return json.dumps(result | more).encode()


def sglang_bench(requests: list[Request], *, details: bool = True, **more: Any) -> bytes:
    """Return a line of SGLang's benchmark (sglang 0.5.23, `sglang/benchmark/serving.py`), with `--output-details` if
    asked."""
    ttfts, itls = [r.token_s[0] - r.sent_s for r in requests], [_gaps(r) for r in requests]
    gaps = [gap for some in itls for gap in some]
    lasts = max(r.token_s[-1] for r in requests) - min(r.sent_s for r in requests)
    summary = {
        "tag": None,
        "backend": "sglang",
        "dataset_name": "random",
        "request_rate": float("inf"),
        "max_concurrency": None,
        "sharegpt_output_len": None,
        "random_input_len": 1024,
        "random_output_len": 128,
        "random_range_ratio": 0.0,
        "server_info": {"model_path": "tiny"},
        "duration": lasts,
        "completed": len(requests),
        "total_input_tokens": sum(r.prompt for r in requests),
        "total_output_tokens": sum(r.output for r in requests),
        "total_output_tokens_retokenized": sum(r.output for r in requests),
        "request_throughput": len(requests) / lasts,
        "mean_ttft_ms": 1e3 * sum(ttfts) / len(ttfts),
        "p99_ttft_ms": 1e3 * max(ttfts),
        "mean_tpot_ms": 1e3 * sum(sum(g) / len(g) for g in itls) / len(itls),
        "mean_itl_ms": 1e3 * sum(gaps) / len(gaps),
        "concurrency": 3.3,
        "accept_length": None,
    }
    lists = {
        "input_lens": [r.prompt for r in requests],
        "output_lens": [r.output for r in requests],
        "ttfts": ttfts,
        "itls": itls,
        "generated_texts": ["w1 w2" for _ in requests],
        "errors": ["" for _ in requests],
    }
    return json.dumps(summary | more | (lists if details else {})).encode() + b"\n"


def guidellm_before_0_4(requests: list[Request]) -> bytes:
    """Return GuideLLM's report of 0.2 and 0.3 (guidellm 0.2.1, `guidellm/benchmark/benchmark.py`): no version in it."""

    def entry(r: Request) -> dict[str, Any]:
        return {
            "type_": "generative_text_response",
            "request_id": r.name,
            "request_type": "text_completions",
            "scheduler_info": {"requested": True, "targeted_start_time": UNIX_S + r.sent_s},
            "prompt": "w1",
            "output": "w2",
            "prompt_tokens": r.prompt,
            "output_tokens": r.output,
            "start_time": UNIX_S + r.sent_s,
            "end_time": UNIX_S + r.token_s[-1] + 1e-4,
            "first_token_time": UNIX_S + r.token_s[0],
            "last_token_time": UNIX_S + r.token_s[-1],
        }

    kinds = {"successful": [entry(r) for r in requests], "incomplete": [], "errored": [], "total": None}
    strategy = {"type_": "constant", "rate": 8.0}
    benchmark = {
        "type_": "generative_benchmark",
        "args": {"strategy": strategy, "warmup_number": None},
        "request_totals": {
            "successful": len(requests),
            "incomplete": 0,
            "errored": 0,
            "total": len(requests),
        },
        "requests": kinds,
    }
    return json.dumps({"benchmarks": [benchmark]}).encode()


def guidellm_yaml(requests: list[Request]) -> bytes:
    """Return GuideLLM's report as `--output-path report.yaml` writes it: PyYAML's dump of the same object."""
    return yaml.safe_dump(json.loads(guidellm(requests))).encode()


def inference_perf_0_5(requests: list[Request], *, streams: bool = True) -> bytes:
    """Return inference-perf's requests of 0.3 to 0.6 (inference-perf 0.5.0, `inference_perf/apis/base.py`)."""
    entries = json.loads(inference_perf(requests))
    for entry in entries:
        info = entry["info"]
        response = info["response_metrics"]
        if not streams:
            response = {"output_tokens": response["output_tokens"]}
        entry["info"] = {**info["request_metrics"]["text"], "extra_info": {}, "response_info": response}
    return json.dumps(entries).encode()


def genai_perf(requests: list[Request]) -> bytes:
    """Return genai-perf's `profile_export.json` (genai-perf 0.0.16, `genai_perf/profile_data_parser`); chat, with
    usage."""

    def event(delta: dict[str, Any] | None, usage: dict[str, int] | None = None) -> dict[str, str]:
        choices = [] if delta is None else [{"index": 0, "delta": delta}]
        data = {"object": "chat.completion.chunk", "choices": choices, "usage": usage}
        return {"response": f"data: {json.dumps(data)}\n\n"}

    def entry(r: Request) -> dict[str, Any]:
        usage = {"prompt_tokens": r.prompt, "completion_tokens": r.output}
        texts = [event({"content": f" w{n}"}) for n in range(r.output)]
        outputs = [event({"role": "assistant", "content": ""}), *texts, event(None, usage)]
        times = [r.token_s[0] - 1e-4, *r.token_s, r.token_s[-1] + 1e-4]
        return {
            "timestamp": round(1e9 * (UNIX_S + r.sent_s)),
            "request_inputs": {"payload": json.dumps({"messages": [{"role": "user", "content": "w1"}]})},
            "response_timestamps": [round(1e9 * (UNIX_S + t)) for t in times],
            "response_outputs": [*outputs[:-1], outputs[-1]],
        }

    experiment = {"experiment": {"mode": "concurrency", "value": 8}, "requests": [entry(r) for r in requests]}
    head = {"service_kind": "openai", "endpoint": "v1/chat/completions"}
    return json.dumps({"experiments": [experiment | {"window_boundaries": []}], "version": "", **head}).encode()


def llmperf(requests: list[Request]) -> bytes:
    """Return LLMPerf's `…_individual_responses.json` (ray-project/llmperf, `token_benchmark_ray.py`): no time of
    sending."""
    entries = []
    for r in requests:
        lasted = r.token_s[-1] - r.sent_s
        entries.append(
            {
                "error_code": None,
                "error_msg": "",
                # Its name for the whole time over the tokens.
                "inter_token_latency_s": lasted / r.output,
                "ttft_s": r.token_s[0] - r.sent_s,
                "end_to_end_latency_s": lasted,
                "request_output_throughput_token_per_s": r.output / lasted,
                "number_total_tokens": r.prompt + r.output,
                "number_output_tokens": r.output,
                "number_input_tokens": r.prompt,
            }
        )
    return json.dumps(entries).encode()


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

OTHER_VERSIONS = {
    "guidellm-0.2.json": guidellm_before_0_4,
    "guidellm.yaml": guidellm_yaml,
    "inference-perf-0.5.json": inference_perf_0_5,
    "genai-perf.json": genai_perf,
}
"""Likewise, of other versions and programs; their requests have the times at which they were sent."""

NOT_SENT = {
    "vllm-0.8.json": vllm_bench_before_start_times,
    "sglang.jsonl": sglang_bench,
    "individual_responses.json": llmperf,
}
"""Likewise, of programs that do not write when a request was sent."""

EXPERIMENT = {"requests.json": experiment_requests, "measured.json": experiment_latencies}
"""The two files of an experiment, likewise."""
