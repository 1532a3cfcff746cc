"""Everything that the figures of one deployment are drawn from, read from its tables."""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import msgspec
import polars as pl

from tracefit.diagnostics.attempts import Attempts
from tracefit.diagnostics.breakdown import Breakdown, first_token_breakdown, first_token_parts
from tracefit.diagnostics.engines import TIMELINE_COLUMNS, EngineRun, engine_run
from tracefit.diagnostics.load import latencies_over_load, measured_latencies, step_times_over_batch
from tracefit.diagnostics.rows import (
    MOST_DRAWN_RUNS,
    RESIDUAL_BATCH_COLUMNS,
    RESIDUAL_COLUMNS,
    STEP,
    evaluated,
    with_batches,
)
from tracefit.diagnostics.slowest import SLOWEST_COLUMNS, SlowRequest, slowest_requests
from tracefit.errors import UsageError
from tracefit.models.evaluate import CompiledModel
from tracefit.models.targets import LATENCY_TITLES, is_step_model
from tracefit.options import TablesOption, named
from tracefit.tables.client_times import CLIENT_TIMES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tracefit.coefficients.documents import DeploymentEvaluation
    from tracefit.diagnostics.groups import Bin
    from tracefit.models.schema import Model
    from tracefit.tables.store import TableStore

MOST_ENGINES = 4
"""Engines drawn per deployment; the tables have all of them."""

_DRAWN_REQUEST_COLUMNS = (
    *("run_id", "server", "arrival_ns", "queued_ns", "finished_ns", "aborted_ns", "departed_ns"),
    *("finish_status", "prompt_tokens", "dialect", *CLIENT_TIMES),
)

_DRAWN_STEP_COLUMNS = (*STEP, *RESIDUAL_BATCH_COLUMNS, "cycle_us", "cycle_source", "idle_after", "running_depth")


class DeploymentDiagnostics(msgspec.Struct, frozen=True):
    """The rows of one deployment, as its figures show them.

    Attributes:
        deployment: Its evaluation.
        models: Its models.
        steps: Rows of `beta_training`, with the batch that executed.
        waits: Rows of `alpha_training`.
        first_token: The parts of TTFT; null where too few requests have all its parts.
        latencies: Latency to its measured percentiles in ms.
        loads: Latency to the requests that have it, and their load when they arrived; of the first runs.
        step_times: Run to its step times over the batch; of the first runs.
        engines: Engines over time, those of overloaded runs first.
        slowest: The slowest requests.
        failed: The parts that cannot be drawn, because of unexpected errors.
    """

    deployment: DeploymentEvaluation
    models: Sequence[Model]
    steps: pl.DataFrame
    waits: pl.DataFrame
    first_token: Breakdown | None
    latencies: dict[str, dict[int, float]]
    loads: dict[str, pl.DataFrame]
    step_times: dict[str, list[Bin]]
    engines: tuple[EngineRun, ...]
    slowest: tuple[SlowRequest, ...]
    failed: tuple[str, ...] = ()

    def evaluated(self, model: Model) -> pl.DataFrame | None:
        """Return the rows of a model that count, see `rows.evaluated`; null where the tables are of another
        training.
        """
        if is_step_model(model.name):
            return evaluated(model, self.steps)
        return evaluated(model, self.waits.filter(target=model.name.removeprefix("alpha.")))


def models_of(deployment: DeploymentEvaluation, models: Sequence[Model]) -> list[Model]:
    """Return those of some published models that belong to a deployment."""
    return [m for m in models if m.deployment_id == deployment.deployment_id and m.name in deployment.models]


def diagnose(deployment: DeploymentEvaluation, models: Sequence[Model], store: TableStore) -> DeploymentDiagnostics:
    """Read the rows that the figures of a deployment show.

    Raises:
        UsageError: A run of the deployment has no tables.
    """
    missing = sorted(set(deployment.runs) - set(store.runs()))
    if missing:
        raise UsageError(
            f"holds no tables of {', '.join(missing)}",
            where=str(store.root),
            hint=f"name the tables folder with {named(TablesOption)}",
        )
    runs = list(deployment.runs)
    of_rows = sorted(RESIDUAL_COLUMNS.union(*(CompiledModel(m).columns_with_clock for m in models)))
    timeline = store.read("timeline", runs, _DRAWN_STEP_COLUMNS)
    steps = with_batches(
        store.read("beta_training", runs, of_rows).filter(deployment_id=deployment.deployment_id),
        timeline,
        lag_steps=deployment.timeline.execution_lag_steps,
    )
    durations = [*(f"{name}_us" for name in LATENCY_TITLES), *first_token_parts().values()]
    columns = dict.fromkeys([*_DRAWN_REQUEST_COLUMNS, *durations, *SLOWEST_COLUMNS])
    requests = store.read("requests", runs, list(columns))
    is_first = pl.col("run_id").is_in(runs[:MOST_DRAWN_RUNS])
    make = (attempts := Attempts()).make
    engines = _engines(deployment, store, steps, attempts)
    return DeploymentDiagnostics(
        deployment,
        models,
        steps,
        store.read("alpha_training", runs, of_rows).filter(deployment_id=deployment.deployment_id),
        make("the parts of TTFT", lambda: first_token_breakdown(requests), None),
        make("measured latencies", lambda: measured_latencies(requests), {}),
        make("latencies over the load", lambda: latencies_over_load(requests.filter(is_first)), {}),
        make("step times over the batch", lambda: step_times_over_batch(timeline.filter(is_first)), {}),
        tuple(islice(engines, MOST_ENGINES)),
        make("the slowest requests", lambda: slowest_requests(requests), ()),
        tuple(attempts.failed),
    )


def _engines(
    deployment: DeploymentEvaluation, store: TableStore, steps: pl.DataFrame, attempts: Attempts
) -> Iterator[EngineRun]:
    """Yield the engines of overloaded runs first, trained on or not: a reader should look at those."""
    overloads = {o.run_id: o for o in deployment.overloaded}
    stored = set(store.runs())
    for run_id in dict.fromkeys(r for r in (*overloads, *deployment.runs) if r in stored):
        timeline = store.read("timeline", [run_id], TIMELINE_COLUMNS)
        for (server,), rows in sorted(timeline.partition_by("server", as_dict=True).items()):
            training = steps.filter(run_id=run_id, server=server)
            draw = partial(engine_run, rows, training, overloads.get(run_id), run_id=run_id, server=server)
            engine = attempts.make(f"the engine of {run_id}, {server},", draw, None)
            if engine is not None:
                yield engine
