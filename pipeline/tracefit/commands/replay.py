"""Replay the held-out part of runs in a closed loop: the latencies of a load from its arrivals and lengths, and as
measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from tracefit.coefficients.files import find_models
from tracefit.coefficients.models import load
from tracefit.commands.locate import choose_deployment, tables_of
from tracefit.errors import TracefitError, UsageError, known_names
from tracefit.progress import NullProgress, Progress
from tracefit.replay.closed_loop import (
    LEFT,
    LOOP_REQUEST_COLUMNS,
    NewReplay,
    RunTraces,
    held_out_from,
    replay_new_run,
    replay_run,
)
from tracefit.results.models import ReplayResult
from tracefit.results.replays import RunReplay
from tracefit.tables.store import TableStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tracefit.coefficients.models import Models
    from tracefit.models.deployment import DeploymentModels
    from tracefit.options import ReplayedArgument, ReplayedRunOption

MOST_READ = 40_000
"""Requests of a server that a replay reads. Half come before the held-out part, for its medians and the requests in
flight."""

MOST_COMPARED_REQUESTS = 10_000
"""Held-out requests that a training replays, over all runs: some seconds. `tracefit replay` has no such limit."""


def replay_runs(
    folder: ReplayedArgument, *, run: ReplayedRunOption = None, progress: Progress | None = None
) -> ReplayResult:
    """Replay the held-out part of every run of a folder that `tracefit run` wrote.

    Args:
        folder: The folder.
        run: The run to replay; every run if not given.
        progress: Receives the name of each run.

    Raises:
        UsageError: There are no models, no tables or no such run.

    Examples:
        >>> import tracefit
        >>> (replay,) = tracefit.replay_runs("out/").runs
        >>> max(abs(each.error_pct) for each in replay.of("e2e")) < 10
        True
    """
    models, store = load(find_models(folder)), TableStore(tables_of(folder)).require()
    runs = store.runs()
    if run is not None and run not in runs:
        raise UsageError(f"there is no run {run}", where=str(folder), hint=known_names(run, runs, title="runs"))
    progress = progress or NullProgress()
    replays = []
    for one in [run] if run else runs:
        progress.stage(f"replaying {one}")
        replays.append(_run(store, models, one))
    return ReplayResult(tuple(replays))


def replay_all(store: TableStore, models: Models, runs: Iterable[str]) -> tuple[RunReplay, ...]:
    """Replay runs one after the other until `MOST_COMPARED_REQUESTS` requests have been compared; the others have that
    reason.
    """
    reason = f"a training replays {MOST_COMPARED_REQUESTS:,} requests; `tracefit replay` compares all of a run"
    replays: list[RunReplay] = []
    for one in runs:
        is_done = sum(r.requests for r in replays) >= MOST_COMPARED_REQUESTS
        replays.append(RunReplay(one, None, reason=reason) if is_done else _run(store, models, one))
    return tuple(replays)


def _run(store: TableStore, models: Models, run_id: str) -> RunReplay:
    """Replay one run, or say why that is not possible."""
    try:
        deployment = models.deployment(choose_deployment(models, None, run_id))
    except TracefitError as error:
        return RunReplay(run_id, None, reason=error.what)
    try:
        cuts = held_out_from(deployment, run_id)
    except TracefitError as error:
        return RunReplay(run_id, deployment.deployment_id, reason=str(error))
    traces = RunTraces(
        store.read("runs", [run_id]), _requests_near(store, run_id, cuts), store.scan("timeline", [run_id])
    )
    return replay_run(run_id, traces, deployment)


def replay_new(store: TableStore, deployment: DeploymentModels, run_id: str, factors: Sequence[float]) -> NewReplay:
    """Replay a run that a deployment's models were not fitted on, once for each factor on the step times."""
    requests = store.scan("requests", [run_id])
    arrivals = requests.select("server", "arrival_ns").drop_nulls().collect(engine="streaming")
    if arrivals.height > MOST_READ:
        ends = arrivals.group_by("server").agg(until=pl.col("arrival_ns").bottom_k(MOST_READ).max())
        kept = pl.col("arrival_ns") <= pl.col("until")
        requests = requests.join(ends.lazy(), on="server", how="left", nulls_equal=True).filter(kept)
    rows = requests.select(LOOP_REQUEST_COLUMNS).collect(engine="streaming")
    traces = RunTraces(store.read("runs", [run_id]), rows, store.scan("timeline", [run_id]))
    return replay_new_run(run_id, traces, deployment, factors)


def _requests_near(store: TableStore, run_id: str, cuts: Mapping[str, int]) -> pl.DataFrame:
    """Read the requests of a run; of a server with very many, those that arrive near its cut or are in the engine
    then.
    """
    arrivals = store.read("requests", [run_id], ["server", "arrival_ns"]).drop_nulls()
    if arrivals.height <= MOST_READ:
        return store.read("requests", [run_id], LOOP_REQUEST_COLUMNS)
    near = pl.lit(value=False)
    for server, cut in cuts.items():
        times = arrivals.filter(pl.col("server") == server)["arrival_ns"].sort()
        at = int(times.search_sorted(cut))
        first, last = times[max(0, at - MOST_READ // 2)], times[min(len(times), at + MOST_READ // 2) - 1]
        arrives_near = pl.col("arrival_ns").is_between(first, last)
        is_inside = (pl.col("arrival_ns") < cut) & LEFT.ge(cut)
        near |= (pl.col("server") == server) & (arrives_near | is_inside)
    rows = store.scan("requests", [run_id]).filter(near)
    return rows.select(LOOP_REQUEST_COLUMNS).collect(engine="streaming")
