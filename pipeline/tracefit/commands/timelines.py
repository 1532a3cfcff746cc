"""Build the `timeline` table of a run when a command first needs it, and keep it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefit.server.context import context_from_json
from tracefit.tables import schema
from tracefit.tables.runs import COMPLETE_SHARE

if TYPE_CHECKING:
    from collections.abc import Iterable

    import polars as pl

    from tracefit.server.context import RunContext
    from tracefit.tables.store import TableStore
    from tracefit.timeline import EngineLimits

DEFAULT_BLOCK_SIZE = 16

SMALL_RUN_ROWS = 100_000
"""Steps, journey events and snapshots of a run whose timeline `ingest` builds within its memory.

The timeline of a larger one is left to `train`, which has more: about 1 KiB for each step.
"""


def write_timelines(store: TableStore, run_ids: Iterable[str]) -> None:
    """Build the `timeline` of the runs without one.

    Args:
        store: Ingested tables.
        run_ids: The runs.

    Raises:
        UsageError: The folder cannot be written.
    """
    known = store.manifest().runs
    for run_id in run_ids:
        if run_id in known and "timeline" not in known[run_id].tables:
            store.write_run(run_id, timeline_of(store, run_id))


def timeline_of(store: TableStore, run_id: str) -> dict[str, pl.DataFrame]:
    """Build the timeline of one run, and add the step times it gives to the run's requests."""
    from tracefit.timeline import build_timeline, with_step_times  # noqa: PLC0415 - most ingests need none

    runs = store.read("runs", [run_id])
    first = runs.row(0, named=True)
    context = context_from_json(
        first["settings"], first["model_config"], first["gpu"], where=f"{store.root}/runs/run_id={run_id}"
    )
    snapshots = store.read("request_snapshots", [run_id])
    journeys, requests = store.read("journey_events", [run_id]), store.read("requests", [run_id])
    timeline = build_timeline(
        store.read("steps", [run_id]),
        snapshots,
        journeys,
        engine_limits(context),
        journeys_complete=_journeys_complete(context, runs, requests),
    )
    timed = with_step_times(schema.REQUESTS.shape(requests), timeline, journeys, snapshots)
    return {"timeline": timeline, "requests": schema.REQUESTS.conform(timed)}


def engine_limits(context: RunContext) -> EngineLimits:
    """Return the known limits of the server's scheduler."""
    from tracefit.timeline import EngineLimits  # noqa: PLC0415

    s = context.settings
    return EngineLimits(
        max_num_batched_tokens=s.max_num_batched_tokens,
        max_num_seqs=s.max_num_seqs,
        block_size=s.block_size or DEFAULT_BLOCK_SIZE,
        # vLLM reserves one block as the null block.
        num_blocks=s.num_gpu_blocks - 1 if s.num_gpu_blocks else None,
        chunked_prefill=s.enable_chunked_prefill is not False,
    )


def _journeys_complete(context: RunContext, runs: pl.DataFrame, requests: pl.DataFrame) -> bool:
    """Say whether every request has a journey: by the server's setting, else by the counts of step summaries."""
    if not requests["queued_ns"].is_not_null().any():
        return False
    rate = context.settings.journey_tracing_sample_rate
    if rate is None:
        shares = runs["journey_sampling"].drop_nulls().to_list()
        rate = min(shares, default=1.0)
    return rate >= COMPLETE_SHARE
