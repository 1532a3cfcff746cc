"""`vllm bench serve`: one document, or with `--append-result` a line for each benchmark.

Read in vLLM 0.32 and 0.33 (`vllm/benchmarks/serve.py`), and written by 0.32 with the backends `vllm` and `openai-chat`.
`--save-result` alone writes a summary, `--save-detailed` the requests too, in older versions without `start_times`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from tracefit.inputs.formats import Recording
from tracefit.recordings.clients.base import (
    BOOT,
    FILLS_POINTS,
    FILLS_REQUESTS,
    STEPPED,
    declare_client,
    finder,
)
from tracefit.recordings.clients.lists import points_of_lists, requests_of_lists

if TYPE_CHECKING:
    from tracefit.inputs.framing import Shape
    from tracefit.inputs.rejects import Encoding

_PROGRAM, _WRITTEN_BY = "vllm bench serve", "vllm bench serve --save-result --save-detailed"
_KNOWN = frozenset(
    (
        *("date", "endpoint_type", "backend", "label", "tokenizer_id", "num_prompts", "burstiness"),
        *(
            "total_input_tokens",
            "total_output_tokens",
            "total_token_throughput",
            "request_goodput",
            "request_goodput:",
        ),
        *(
            "max_output_tokens_per_s",
            "max_concurrent_requests",
            "rtfx",
            "ramp_up_strategy",
            "ramp_up_start_rps",
        ),
        *("ramp_up_end_rps", "goodput_config_dict", "best_of", "use_beam_search", "rps_change_events"),
        *("total_input_sequences", "input_sequence_throughput"),
        *("client_queue_time", "e2el_including_client_queue", "spec_decode_", "diffusion_", "probe_"),
    )
)
"""Keys that are known and not kept: themselves, without statistic and unit, or their beginnings."""

_WITH_LISTS = finder("document", rb'"input_lens"\s*:\s*\[', rb'"ttfts"\s*:\s*\[|"output_lens"\s*:\s*\[')
_WITH_SUMS = finder(
    "document", rb'"request_throughput"\s*:', rb'"(?:mean|median|p99)_ttft_ms"\s*:', rb'"tokenizer_id"\s*:'
)


def _find(head: bytes) -> tuple[Shape, Encoding] | None:
    return _WITH_LISTS(head) or _WITH_SUMS(head)


def _ended_s(date: Any) -> float | None:
    """Return the time at which a benchmark ends, from its date: local time in seconds."""
    try:
        return datetime.strptime(str(date), "%Y%m%d-%H%M%S").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


FORMAT = declare_client(
    Recording(
        "vllm_bench",
        "`vllm bench serve`",
        _find,
        fills=f"{FILLS_POINTS}; with `--save-detailed`, {FILLS_REQUESTS}{STEPPED}",
        units="s",
        clock=(
            f"{BOOT}; the date at the end of the benchmark, local time in seconds, gives the wall clock; without "
            "`start_times`, none, or the beginning of the benchmark where each request is sent when another one ends"
        ),
        versions="vLLM 0.32, 0.33, and older ones without `start_times`",
    ),
    partial(requests_of_lists, ended_s=_ended_s),
    partial(points_of_lists, program=_PROGRAM, known=_KNOWN, written_by=_WRITTEN_BY),
)
