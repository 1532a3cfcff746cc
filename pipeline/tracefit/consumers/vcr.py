"""Export to vllm-vcr: measured requests as its `--latency-trace`, from which it fits a model of latencies.

Read in `crates/sim-trace/src/trace.rs` of August 2026: a line of JSON per request, the first line may be `{"meta": …}`.
`itl_ctx` has the state of the engine at the step that closed each gap between two tokens.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import polars as pl

from tracefit.consumers.base import OUT, Export, Source, block_size, flags, kv_blocks, model_name
from tracefit.errors import DataError
from tracefit.server.settings import ALL_SPANS
from tracefit.tables.schema import ENGINE

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST_VCR_REQUESTS = 5_000
"""The latest requests."""

_VCR_FIELDS = ("prompt_tokens", "cached_tokens", "output_tokens", "ttft_ms", "concurrency", "arrival_ms")


def to_vcr(source: Source) -> Export:
    """Write the trace.

    Raises:
        DataError: No request has its latencies.
    """
    requests = _requests(source)
    if not requests.height:
        raise DataError("no request has its time to first token and between tokens", hint=ALL_SPANS)
    settings, gpu = source.deployment.context.settings, source.deployment.context.gpu
    meta = {
        "model": model_name(source),
        "gpu": gpu.name if gpu else None,
        "tp": settings.tensor_parallel,
        "max_num_seqs": settings.max_num_seqs,
        "source": "tracefit",
    }
    records = [_record(row) for row in requests.iter_rows(named=True)]
    lines = [{"meta": {name: value for name, value in meta.items() if value is not None}}, *records]
    gaps = sum("itl_ms" in record for record in records)
    since = requests["queued_ns"].count()
    notes = (
        (
            f"{len(records):,} measured requests, {gaps:,} with each gap between tokens, the others with its mean; "
            "vllm-vcr fits a model"
        ),
        (
            f"ttft_ms of {since:,} requests begins at QUEUED, of the others at arrival: vllm-vcr runs vLLM's front "
            "end, whose work counts once"
        ),
    )
    served = flags(
        {
            "latency-trace": f"{OUT}/latency-trace.jsonl",
            "max-num-seqs": settings.max_num_seqs,
            "max-num-batched-tokens": settings.max_num_batched_tokens,
            "max-model-len": settings.max_model_len,
            "tokens-per-block": block_size(source),
            "kv-cache-size": kv_blocks(source),
        }
    )
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    return Export({"latency-trace.jsonl": text}, (), notes, f"vllm-vcr play {served}")


def _requests(source: Source) -> pl.DataFrame:
    """Return the requests with, as lists over the steps after the first token, `cycle_us`, `running_depth` and
    `finished` prompts.
    """
    requests = source.tables.requests
    # A step that ends a prompt is marked with the whole of it, however many chunks it took.
    prompts = requests.group_by(*ENGINE, step_id="first_token_step").agg(finished=pl.col("prompt_tokens").sum())
    steps = source.tables.timeline.select(*ENGINE, "step_id", "cycle_us", "running_depth", "interval_steps").join(
        prompts, on=[*ENGINE, "step_id"], how="left", maintain_order="left"
    )
    timed = requests.drop_nulls(["ttft_us", "itl_us", "prompt_tokens", "output_tokens", "arrival_ns"]).filter(
        (pl.col("output_tokens") > 1) & pl.col("finish_status").ne_missing("aborted")
    )
    rows = timed.sort("arrival_ns").tail(MOST_VCR_REQUESTS).with_row_index("i")
    # One step after the first token for each further one, or the gaps are unknown.
    tokens = pl.col("finished_step") - pl.col("first_token_step") == pl.col("output_tokens") - 1
    decoding = (
        rows.filter(tokens)
        .select("i", *ENGINE, step_id=pl.int_ranges(pl.col("first_token_step") + 1, pl.col("finished_step") + 1))
        .explode("step_id")
        .join(steps, on=[*ENGINE, "step_id"], how="left", maintain_order="left")
    )
    whole = (pl.col("cycle_us").is_not_null() & pl.col("running_depth").is_not_null()).all()
    listed = decoding.group_by("i", maintain_order=True).agg(
        pl.col("cycle_us", "running_depth"), pl.col("finished").fill_null(0), whole=whole
    )
    first = steps.select(*ENGINE, first_scheduled_step="step_id", concurrency="running_depth")
    since_queued_ms = (pl.col("first_token_ns") - pl.col("queued_ns")) / 1e6
    return (
        rows.join(listed.filter("whole"), on="i", how="left", maintain_order="left")
        .join(first, on=[*ENGINE, "first_scheduled_step"], how="left", maintain_order="left")
        .with_columns(
            cached_tokens=pl.col("cached_prompt_tokens").fill_null(0),
            ttft_ms=pl.coalesce(since_queued_ms, pl.col("ttft_us") / 1e3),
            arrival_ms=(pl.col("arrival_ns") - pl.col("arrival_ns").min()) / 1e6,
            itl_ms=pl.col("cycle_us").list.eval((pl.element() / 1e3).round(6)),
            mean_ms=(pl.col("itl_us") / 1e3).round(6),
            gaps=pl.col("output_tokens") - 1,
        )
    )


def _record(row: Mapping[str, object]) -> dict[str, object]:
    """Return a line of the trace; what is not known is left out."""
    record = {name: row[name] for name in _VCR_FIELDS if row[name] is not None}
    if row["whole"]:
        context = {"num_running": row["running_depth"], "prefill_tokens": row["finished"]}
        return record | {"itl_ms": row["itl_ms"], "itl_ctx": context}
    return record | {"itl_summary": {"mean_ms": row["mean_ms"], "count": row["gaps"]}}
