"""Group ingested runs by deployment, choose those to train on, and read their tables; missing timelines are built."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.engines.local import LocalEngine
from tracefit.server.context import context_from_json, deployment_of, together

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tracefit.engines.jobs import TaskEngine
    from tracefit.fit.fitted import DeploymentTables
    from tracefit.server.context import Deployment
    from tracefit.tables.store import TableStore


def write_timelines(store: TableStore, run_ids: Iterable[str], engine: TaskEngine | None = None) -> None:
    """Build the `timeline` of the runs without one, in this process if no engine is given.

    Raises:
        UsageError: The folder cannot be written.
        WorkerError: A worker died.
    """
    stored = store.manifest().runs
    lacking = [run_id for run_id in run_ids if run_id in stored and "timeline" not in stored[run_id].tables]
    if lacking:
        from tracefit.engines.training import each_run, timeline_in  # noqa: PLC0415 - most ingests need none

        store.write_runs(each_run(engine or LocalEngine(1), timeline_in, store, lacking))


def deployments_of(runs: pl.DataFrame, where: str) -> list[tuple[Deployment, list[str]]]:
    """Group the runs by deployment, in the order of the names of their first runs."""
    deployments: dict[str, dict[Deployment, None]] = {}
    members: dict[str, list[str]] = {}
    # The table has a row per server; the settings are those of the run.
    one_per_run = runs.unique("run_id", keep="first", maintain_order=True)
    # The runs of a fleet have equal settings, which are read once.
    read: dict[tuple[str, str | None, str | None], Deployment] = {}
    for run_id, *stated in one_per_run.select("run_id", "settings", "model_config", "gpu").iter_rows():
        server = settings, model_config, gpu = tuple(stated)
        if server not in read:
            folder = f"{where}/runs/run_id={run_id}"
            read[server] = deployment_of(context_from_json(settings, model_config, gpu, where=folder))
        deployment = read[server]
        deployments.setdefault(deployment.deployment_id, {})[deployment] = None
        members.setdefault(deployment.deployment_id, []).append(run_id)
    order = sorted(deployments, key=lambda one: (min(members[one]), one))
    return [(together([*deployments[i]]), members[i]) for i in order]


def load_deployment(store: TableStore, run_ids: Sequence[str]) -> DeploymentTables:
    """Read the tables of one deployment's runs, which have their timelines."""
    from tracefit.engines.training import deployment_tables, frames_of  # noqa: PLC0415 - it takes a second to import

    return deployment_tables([frames_of(store, run_id).tables for run_id in sorted(run_ids)])


MOST_TRAINING_ROWS = 2_000_000
"""Steps and events of the runs of a deployment that are trained on together: about 1 KB of memory each.

A fit needs a few ten thousand rows; the rest makes its errors known by run and by load.
"""

MOST_TRAINING_RUNS = 500
"""Runs that are trained on together: some measures are taken run by run, and two thousand take a quarter of an hour."""


def sample_runs(runs: pl.DataFrame, members: Sequence[str], *, most_rows: int, most_runs: int) -> list[str]:
    """Return the runs of a deployment to train on, in the order of `members`: all, or evenly in the order of their
    beginning.

    Args:
        runs: Rows of the `runs` table.
        members: The runs of the deployment.
        most_rows: Most steps and events of the runs returned; a single run may have more.
        most_runs: Most runs.
    """
    of_deployment = runs.filter(pl.col("run_id").is_in(list(members)))
    # Steps that were not sampled are rows of the timeline too.
    steps = pl.when(pl.col("step_sampling") > 0).then(pl.col("steps") / pl.col("step_sampling"))
    sizes = (
        of_deployment.group_by("run_id", maintain_order=True)
        .agg(steps.sum().alias("steps"), pl.col("events").first(), began=pl.col("first_unix_ns").min())
        .sort("began", "run_id")
    )
    # The counts are those of the run, repeated in the row of every server.
    events = [sum(json.loads(text).values()) for text in sizes["events"].fill_null("{}")]
    rows, ids = np.array(events) + sizes["steps"].to_numpy(), sizes["run_id"].to_list()
    kept = min(len(ids), most_runs)
    chosen = _evenly(len(ids), kept)
    while kept > 1 and rows[chosen].sum() > most_rows:
        # By the mean size at first; runs of different sizes take a few rounds.
        kept = max(1, min(kept - 1, int(kept * most_rows / rows[chosen].sum())))
        chosen = _evenly(len(ids), kept)
    sampled = {ids[index] for index in chosen}
    return [run_id for run_id in members if run_id in sampled]


def sampling_note(kept: int, of: int) -> str:
    """Return the sentence that states a sampling."""
    return (
        f"trained on {kept:,} of {of:,} runs, evenly in the order of their beginning: more take memory and time, and "
        "tell no more; all are in the tables"
    )


def _evenly(count: int, kept: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return `kept` indices below `count`: the middles of as many equal parts."""
    return ((np.arange(kept) + 0.5) * count / kept).astype(np.int64)
