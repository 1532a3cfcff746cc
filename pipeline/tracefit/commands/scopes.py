"""Scopes of ingested runs: group the runs by scope, and read the tables of one, its timelines built where they are missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefit.engines.local import LocalEngine
from tracefit.server.context import context_from_json, scope_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import polars as pl

    from tracefit.engines.local import TaskEngine
    from tracefit.fit.fitted import ScopeTables
    from tracefit.server.context import ModelScope
    from tracefit.tables.store import TableStore


def write_timelines(store: TableStore, run_ids: Iterable[str], engine: TaskEngine | None = None) -> None:
    """Build the `timeline` of the runs without one.

    Args:
        store: The tables.
        run_ids: The runs.
        engine: Where they are built; in this process if not given.

    Raises:
        UsageError: The folder cannot be written.
        WorkerError: A worker died.
    """
    known = store.manifest().runs
    lacking = [run_id for run_id in run_ids if run_id in known and "timeline" not in known[run_id].tables]
    if lacking:
        from tracefit.engines.training import each_run, timeline_in  # noqa: PLC0415 - most ingests need none

        store.write_runs(each_run(engine or LocalEngine(1), timeline_in, store, lacking))


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


def load_scope(store: TableStore, run_ids: Sequence[str]) -> ScopeTables:
    """Read the tables of one scope's runs, which have their timelines."""
    from tracefit.engines.training import frames_of, scope_tables  # noqa: PLC0415 - it takes a second to import

    return scope_tables([frames_of(store, run_id).tables for run_id in sorted(run_ids)])
