"""Scopes of ingested runs: group the runs by scope, and read the tables of one, its timelines built where they are missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from tracefit.engines.build import engine_limits, timeline_of
from tracefit.server.context import context_from_json, scope_of
from tracefit.tables.keys import ENGINE
from tracefit.tables.runs import step_counters

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tracefit.fit.fitted import ScopeTables
    from tracefit.server.context import ModelScope
    from tracefit.tables.store import TableStore


def write_timelines(store: TableStore, run_ids: Iterable[str]) -> None:
    """Build the `timeline` of the runs without one.

    Raises:
        UsageError: The folder cannot be written.
    """
    known = store.manifest().runs
    lacking = [run_id for run_id in run_ids if run_id in known and "timeline" not in known[run_id].tables]
    store.write_runs((run_id, timeline_in(store, run_id)) for run_id in lacking)


def timeline_in(store: TableStore, run_id: str) -> dict[str, pl.DataFrame]:
    """Build the timeline of a run from its tables in a folder; see `timeline_of`."""
    first = store.read("runs", [run_id]).row(0, named=True)
    where = f"{store.root}/runs/run_id={run_id}"
    context = context_from_json(first["settings"], first["model_config"], first["gpu"], where=where)
    return timeline_of(lambda name: store.read(name, [run_id]), context)


def scopes_of(runs: pl.DataFrame, where: str) -> list[tuple[ModelScope, list[str]]]:
    """Group the runs by scope, in the order of scope ids."""
    scopes: dict[str, ModelScope] = {}
    members: dict[str, list[str]] = {}
    # The table has a row per server; the settings are those of the run.
    one_per_run = runs.unique("run_id", keep="first", maintain_order=True)
    for row in one_per_run.select("run_id", "settings", "model_config", "gpu").iter_rows(named=True):
        place = f"{where}/runs/run_id={row['run_id']}"
        scope = scope_of(context_from_json(row["settings"], row["model_config"], row["gpu"], where=place))
        scopes.setdefault(scope.scope_id, scope)
        members.setdefault(scope.scope_id, []).append(row["run_id"])
    return [(scopes[i], members[i]) for i in sorted(scopes)]


def load_scope(store: TableStore, runs: pl.DataFrame, scope: ModelScope, run_ids: list[str]) -> ScopeTables:
    """Read the tables of one scope's runs.

    Args:
        store: The tables.
        runs: Rows of the `runs` table, of this scope's runs at least.
        scope: The scope.
        run_ids: Its runs.
    """
    # `ingest` needs none of these, and they take a second to import.
    from tracefit.fit.fitted import ScopeTables  # noqa: PLC0415
    from tracefit.kv.columns import with_kv_cache, with_prefix_hits  # noqa: PLC0415
    from tracefit.timeline import (  # noqa: PLC0415
        clock_disagreements,
        execution_lags,
        queue_state,
        requeue_waits,
    )

    limits = engine_limits(scope.context)
    timeline, journeys = store.read("timeline", run_ids), store.read("journey_events", run_ids)
    steps = store.read("steps", run_ids, [*ENGINE, "step_id"])
    own_runs = runs.filter(pl.col("run_id").is_in(run_ids))
    lags = {(run, server): lag for run, server, lag in execution_lags(timeline, journeys).iter_rows()}
    # Only complete journeys give the running requests of every step, and with them the queue state of each request.
    complete = timeline["running_after"].is_not_null().any()
    architecture = scope.context.architecture
    with_cache = with_kv_cache(
        timeline,
        store.read("kv_events", run_ids),
        block_size=limits.block_size,
        kv_bytes_per_token=architecture.kv_bytes_per_token if architecture else None,
    )
    requests = store.read("requests", run_ids)
    return ScopeTables(
        runs=own_runs,
        timeline=with_prefix_hits(with_cache, requests),
        sampled_steps=steps.height,
        requests=requests,
        queue=queue_state(journeys, timeline, limits) if complete else None,
        counters=step_counters(steps, journeys),
        clock_checks=clock_disagreements(timeline, journeys),
        # A server whose journeys do not show the lag is taken to schedule in step with execution.
        lags={key: lags.get(key, 0) for key in own_runs.select("run_id", "server").iter_rows()},
        requeue_waits=requeue_waits(journeys),
    )
