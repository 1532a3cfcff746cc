"""SGLang's `bench_serving`: it appends a line for each benchmark.

Read in sglang 0.4.0 to 0.5.23 (`sglang/bench_serving.py`, since 0.5.20 or so `sglang/benchmark/serving.py`). A line is
a summary; with `--output-details` it has the requests too, without the times at which they were sent.
"""

from __future__ import annotations

from functools import partial

from tracefit.inputs.formats import Recording
from tracefit.recordings.clients.base import FILLS_POINTS, FILLS_REQUESTS, STEPPED, declare_client, finder
from tracefit.recordings.clients.lists import points_of_lists, requests_of_lists

_PROGRAM, _WRITTEN_BY = "sglang.bench_serving", "sglang.bench_serving --output-details"
_KNOWN = frozenset(
    (
        *("tag", "backend", "dataset_name", "sharegpt_output_len", "random_input_len", "random_output_len"),
        *("random_range_ratio", "server_info", "total_input_tokens", "total_input_text_tokens"),
        *("total_input_vision_tokens", "total_output_tokens", "total_output_tokens_retokenized"),
        *(
            "input_throughput",
            "output_throughput_retokenized",
            "total_throughput",
            "total_throughput_retokenized",
        ),
        # The mean number of requests that were under way: what was kept to is `max_concurrency`.
        *(
            "concurrency",
            "accept_length",
            "max_output_tokens_per_s",
            "max_concurrent_requests",
            "cache_report",
        ),
        *("cached_tokens", "cached_tokens_details"),
    )
)
"""Keys that are known and not kept."""


def _no_end(_: object) -> None:
    return None


FORMAT = declare_client(
    Recording(
        "sglang_bench",
        "SGLang's `bench_serving`",
        finder(
            "document",
            rb'"(?:sharegpt_output_len|accept_length|total_output_tokens_retokenized|random_range_ratio)"\s*:',
            rb'"(?:mean|median)_ttft_ms"\s*:|"ttfts"\s*:',
        ),
        fills=(
            f"{FILLS_POINTS}; with `--output-details`, {FILLS_REQUESTS}{STEPPED}, if each is sent when another one ends"
        ),
        units="s",
        clock="none; the beginning of the benchmark where each request is sent when another one ends",
        versions="sglang 0.4.0 to 0.5.23",
    ),
    partial(requests_of_lists, ended_s=_no_end),
    partial(points_of_lists, program=_PROGRAM, known=_KNOWN, written_by=_WRITTEN_BY),
)
