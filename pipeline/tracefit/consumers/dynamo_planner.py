"""Export to Dynamo's planner: ForwardPassMetrics of measured steps, and profiling data of the model on a grid.

Read in `dynamo/planner/monitoring/perf_metrics.py` of ai-dynamo 1.6.1: the planner starts from the records that a
worker's `get_perf_metrics` returns (`{"results": [{"point": {"point_type": …}, "fpms": […]}]}`), or from
`profile_results_dir` (`prefill_raw_data.json`, `decode_raw_data.json`), which it makes records of. It fits lines to
them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.consumers.base import OUT, Export, Source, block_size, kv_blocks, train_and_holdout
from tracefit.consumers.dynamo import COLUMNS, errors_of, grids_of

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_RECORDS = 5_000
"""Records of each kind: the latest. The planner keeps fewer."""


def to_dynamo_planner(source: Source) -> Export:
    """Write both forms.

    Raises:
        DataError: The data cannot support it, with the reason.
    """
    train, holdout = train_and_holdout(source, source.steps(COLUMNS), COLUMNS, "step times")
    grids = grids_of(source, train, 0.0)
    active, context = np.meshgrid(grids["decode_active_kv_tokens"], grids["decode_context_length"], indexing="ij")
    whole = active >= context  # a request at least: the planner rounds the batch
    blocks = kv_blocks(source)
    most = blocks * block_size(source) if blocks else int(active.max())
    prefill = {
        "prefill_isl": grids["prefill_isl"].tolist(),
        "prefill_ttft": grids["prefill_ttft_ms"].tolist(),
    }
    decode = {
        "x_kv_usage": (active[whole] / most).tolist(),
        "y_context_length": context[whole].tolist(),
        "z_itl": grids["decode_itl"][whole].tolist(),
        "max_kv_tokens": most,
    }
    notes = (
        "benchmark_results.json holds measured steps, the two others the step model on a grid",
        "steps that prefill and decode are in neither: the planner has no kind for them",
        f"profile_results_dir: {OUT} is the planner's setting; errors are those of the grid between its points",
    )
    files: dict[str, str | bytes] = {
        "benchmark_results.json": json.dumps({"status": "ok", "results": _results(pl.concat([train, holdout]))}),
        "prefill_raw_data.json": json.dumps(prefill),
        "decode_raw_data.json": json.dumps(decode),
    }
    return Export(files, errors_of(grids, train, holdout), notes, f"ls {OUT}")


def steps_of_one_kind(steps: pl.DataFrame) -> Iterator[tuple[str, pl.DataFrame]]:
    """Yield the latest single steps that only prefill, then those that only decode; a row of an interval is a mean of
    steps.
    """
    single = steps.filter(pl.col("interval_steps") == 1).sort("ts_ns")
    prefills, decodes = pl.col("prefill_tokens") > 0, pl.col("num_decode_reqs") > 0
    for kind, chosen in (("prefill", prefills & ~decodes), ("decode", decodes & ~prefills)):
        yield kind, single.filter(chosen).tail(MOST_RECORDS)


def _results(steps: pl.DataFrame) -> list[dict[str, object]]:
    scheduled = {
        "num_prefill_requests": "num_prefill_reqs",
        "sum_prefill_tokens": "prefill_tokens",
        "num_decode_requests": "num_decode_reqs",
        "sum_decode_kv_tokens": "context_tokens",
    }
    counts = pl.struct(pl.col(column).cast(pl.Int64).alias(name) for name, column in scheduled.items())
    return [
        {
            "point": {"point_type": kind},
            "fpms": rows.select(wall_time=pl.Series(rows["y"].to_numpy() / 1e6), scheduled_requests=counts).to_dicts(),
        }
        for kind, rows in steps_of_one_kind(steps)
    ]
