"""Prepare one run's tables for training: build a missing timeline, and the frames of its deployment's fits.

Runs are independent until their frames are concatenated, so engines may work on many at once.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, TypeVar

import msgspec
import polars as pl

from tracefit.engines.build import engine_limits, timelines_of
from tracefit.engines.jobs import Job, take_together
from tracefit.features.roofline import with_least_time
from tracefit.fit.fitted import DeploymentTables
from tracefit.fit.load import LOAD_REQUEST_COLUMNS, LOAD_STEP_COLUMNS, overload_of
from tracefit.recordings.kv_columns import with_kv_cache, with_prefix_hits
from tracefit.server.context import context_from_json
from tracefit.tables.dialects import STOCK
from tracefit.tables.points import points_stated
from tracefit.tables.runs import step_counters
from tracefit.tables.schema import ENGINE, SERVER
from tracefit.timeline import (
    COUNTED_COLUMNS,
    MOST_PLACED,
    clock_disagreements,
    events_of,
    execution_lags,
    queue_state,
    requeue_waits,
    unknown_batches,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tracefit.engines.jobs import TaskEngine
    from tracefit.fit.results import Overload
    from tracefit.server.context import RunContext
    from tracefit.tables.store import TableStore

BYTES_PER_JOB = 32 << 20
"""Bytes of the trace files of one job's runs: small runs share the cost of a job, whose frames are in memory
together."""

R = TypeVar("R")


class RunFrames(msgspec.Struct, frozen=True):
    """The data of one run for the fits of its deployment.

    Attributes:
        tables: The tables of a deployment with only this run.
        overload: Why the run counts as overloaded; null if it does not.
    """

    tables: DeploymentTables
    overload: Overload | None


class _StoredTables(msgspec.Struct, frozen=True):
    store: TableStore
    run_id: str

    def read(self, name: str, columns: Sequence[str] | None = None) -> pl.DataFrame:
        return self.store.read(name, [self.run_id], columns)

    def pieces(self, name: str) -> Iterator[pl.DataFrame]:
        yield self.read(name)


def timeline_in(store: TableStore, run_id: str) -> dict[str, pl.DataFrame]:
    """Build the timeline of a run from its tables in a folder; see `timelines_of`."""
    context = _context(store, store.read("runs", [run_id]), run_id)
    ((_, built),) = timelines_of({run_id: context}, lambda _: _StoredTables(store, run_id))
    return {n: rows if isinstance(rows, pl.DataFrame) else pl.concat(rows) for n, rows in built.items()}


_REQUEST_FACTS = (*SERVER, "dialect", "first_token_step")
"""Columns that say which requests of a run are read."""


def frames_of(store: TableStore, run_id: str) -> RunFrames:
    """Read the data for the fits from a run with a timeline.

    Raises:
        DataError: A table is missing or damaged.
    """
    runs = store.read("runs", [run_id])
    context = _context(store, runs, run_id)
    limits, architecture = engine_limits(context), context.architecture
    timeline, journeys = store.read("timeline", [run_id]), store.read("journey_events", [run_id])
    steps = store.read("steps", [run_id], [*ENGINE, "step_id", *LOAD_STEP_COLUMNS])
    examine = partial(
        unknown_batches,
        budget=limits.max_num_batched_tokens,
        has_steps=bool(steps.height),
        traced_share=context.settings.journey_tracing_sample_rate,
    )
    facts = store.read("requests", [run_id], [*_REQUEST_FACTS, *LOAD_REQUEST_COLUMNS])
    requests, unknown = _requests_of(store, run_id, facts, examine)
    # Spans of an unmodified server do not name the engine core's request: the client-facing id joins both.
    requests = requests.with_columns(core_request_id=pl.coalesce("core_request_id", "request_id"))
    # Steps counted from requests reuse the events of requests, so they are not independent evidence of the clock.
    events = journeys if journeys.height else events_of(requests)
    # Only complete journeys give the running requests of every step, and with them the queue state of each request.
    is_complete = timeline["running_after"].is_not_null().any()
    with_cache = with_kv_cache(
        timeline,
        store.read("kv_events", [run_id]),
        block_size=limits.block_size,
        kv_bytes_per_token=architecture.kv_bytes_per_token if architecture else None,
    )
    lags = {(run, server): lag for run, server, lag in execution_lags(timeline, events).iter_rows()}
    overload = overload_of(run_id, facts, steps)
    tables = DeploymentTables(
        runs=runs,
        timeline=with_least_time(with_prefix_hits(with_cache, requests), context),
        sampled_steps=steps.height,
        requests=requests,
        queue=queue_state(events, timeline, limits) if is_complete else None,
        counters=step_counters(steps.select(*ENGINE, "step_id"), events),
        clock_checks=clock_disagreements(timeline, journeys),
        # Without a lag in its journeys, a server is assumed to schedule in step with execution.
        lags={key: lags.get(key, 0) for key in runs.select(SERVER).iter_rows()},
        requeue_waits=requeue_waits(journeys),
        unknown_batches=unknown,
        requests_written_by=_written_by(store, runs),
    )
    return RunFrames(tables, overload)


def _written_by(store: TableStore, runs: pl.DataFrame) -> tuple[str, ...]:
    """Return how the programs of a run's points write single requests."""
    if not points_stated(runs):
        return ()
    written = store.read("points", list(runs["run_id"].unique()), ["requests_written_by"])
    return tuple(written["requests_written_by"].drop_nulls().unique().sort())


def _requests_of(
    store: TableStore, run_id: str, facts: pl.DataFrame, examine: Callable[[pl.DataFrame], pl.DataFrame]
) -> tuple[pl.DataFrame, tuple[str, ...]]:
    """Read the requests of a run by the `_REQUEST_FACTS` of all of them, and why the batches of its unmodified servers
    are unknown, which `examine` finds.

    A server with very many requests contributes those in the windows placed on steps, or else an even sample.
    """
    is_stock = pl.col("dialect") == STOCK
    placed = pl.col("first_token_step").is_not_null() & is_stock
    counts = facts.group_by(SERVER).agg(placed=placed.sum(), stock=is_stock.sum())
    windows = counts.filter(pl.col("placed") >= MOST_PLACED)["server"].to_list()
    rest = counts.filter(~pl.col("server").is_in(windows), pl.col("stock") > MOST_PLACED)
    if not windows and not rest.height:
        requests = store.read("requests", [run_id])
        return requests, tuple(examine(requests)["reason"])
    of = pl.col("server")
    every = -(-max(rest["stock"].to_list(), default=0) // MOST_PLACED)
    kept = placed | ~of.is_in(windows)
    if rest.height:
        kept &= ~of.is_in(rest["server"].to_list()) | (pl.col("row") % every == 0)
    chosen = store.scan("requests", [run_id]).with_row_index("row").filter(kept).drop("row")
    requests = chosen.collect(engine="streaming")
    if counts.height == len(windows):
        return requests, ()
    whole = store.read("requests", [run_id], COUNTED_COLUMNS).filter(~of.is_in(windows))
    return requests, tuple(examine(whole)["reason"])


def _context(store: TableStore, runs: pl.DataFrame, run_id: str) -> RunContext:
    # The table has a row per server; the settings are those of the run.
    first = runs.row(0, named=True)
    where = f"{store.root}/runs/run_id={run_id}"
    return context_from_json(first["settings"], first["model_config"], first["gpu"], where=where)


def deployment_tables(parts: Sequence[DeploymentTables]) -> DeploymentTables:
    """Return the tables of a deployment from those of its runs."""
    queues = [part.queue for part in parts if part.queue is not None]
    return DeploymentTables(
        runs=_concat([part.runs for part in parts]),
        timeline=_concat([part.timeline for part in parts]),
        sampled_steps=sum(part.sampled_steps for part in parts),
        requests=_concat([part.requests for part in parts]),
        queue=_concat(queues) if queues else None,
        counters=_concat([part.counters for part in parts]),
        clock_checks=_concat([part.clock_checks for part in parts]),
        lags={key: lag for part in parts for key, lag in part.lags.items()},
        requeue_waits=_concat([part.requeue_waits for part in parts]),
        unknown_batches=tuple(dict.fromkeys(text for part in parts for text in part.unknown_batches)),
        requests_written_by=tuple(dict.fromkeys(text for part in parts for text in part.requests_written_by)),
    )


def _concat(frames: list[pl.DataFrame]) -> pl.DataFrame:
    joined = pl.concat(frames, how="diagonal_relaxed", rechunk=True)
    # A column of one value is a scalar until it is copied to another process; the last digit of a division by
    # one differs.
    return pl.DataFrame(joined.get_columns())


def _of_each(function: Callable[[TableStore, str], R], store: TableStore, run_ids: Sequence[str]) -> tuple[R, ...]:
    return tuple(function(store, run_id) for run_id in run_ids)


def each_run(
    engine: TaskEngine, function: Callable[[TableStore, str], R], store: TableStore, run_ids: Sequence[str]
) -> Iterator[tuple[str, R]]:
    """Yield each run with the result of a function of this module, in the order in which jobs end.

    Raises:
        WorkerError: A worker died.
        DataError: A table is missing or damaged.
    """
    sizes = store.read("runs", list(run_ids), ["run_id", "bytes"]).unique("run_id", keep="first")
    waiting = deque(sizes.sort("run_id").iter_rows())
    # Limited by count too: otherwise one job would take all small runs, and other workers none.
    share = -(-len(waiting) // engine.workers)

    def next_job() -> Job | None:
        chosen = [run_id for run_id, _ in take_together(waiting, itemgetter(1), most=share, most_bytes=BYTES_PER_JOB)]
        if not chosen:
            return None
        # Pinned: the job reads the parts of the current manifest, even if others are published meanwhile.
        return Job(partial(_of_each, function, store.pinned(chosen)), chosen, name=chosen[0], work=chosen)

    for job, made in engine.run(next_job):
        yield from zip(job.work, made, strict=True)
