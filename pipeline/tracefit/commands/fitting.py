"""Choose the runs of the tables to train on, and fit their deployments."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import polars as pl
from msgspec.structs import replace

from tracefit import memory
from tracefit.commands.deployments import (
    MOST_TRAINING_ROWS,
    MOST_TRAINING_RUNS,
    deployments_of,
    sample_runs,
    sampling_note,
    write_timelines,
)
from tracefit.engines.local import LocalEngine
from tracefit.engines.training import deployment_tables, each_run, frames_of
from tracefit.errors import UsageError
from tracefit.features.sets import feature_sets
from tracefit.features.training import TOO_FAST
from tracefit.fit.deployments import fit_deployment, with_seen_limits
from tracefit.fit.fitted import DeploymentOptions
from tracefit.fit.load import runs_to_fit
from tracefit.fit.splits import is_excluded
from tracefit.options import ServerOptions, TrainOptions, named
from tracefit.reports.facts import overloaded
from tracefit.tables.runs import find_overlaps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracefit.engines.jobs import TaskEngine
    from tracefit.fit.fitted import FittedDeployment
    from tracefit.progress import Progress
    from tracefit.tables.store import TableStore

_MOST_NAMED_RUNS = 3

FEW_TOO_FAST = 0.01
"""Share of steps faster than the GPU up to which they are only counted: a stamp may be late now and then."""


class ChosenRuns(NamedTuple):
    """Runs to train on.

    Attributes:
        runs: Their rows of the `runs` table.
        notes: Deployment to notes on runs of it that are left out.
    """

    runs: pl.DataFrame
    notes: dict[str, tuple[str, ...]]


def choose_runs(store: TableStore, run_ids: Sequence[str] | None, progress: Progress) -> ChosenRuns:
    """Choose the runs to train on: a sample if there are very many, and none whose spans another one has too.

    Args:
        store: The tables.
        run_ids: Runs to choose from; every run if null.
        progress: Receives warnings of what is left out, and of runs without a configuration.
    """
    runs = store.read("runs", None if run_ids is None else list(run_ids))
    runs, notes = _sampled(store, runs, progress)
    runs = _without_copies(store, runs, progress)
    _warn_of_bare(runs, progress)
    return ChosenRuns(runs, notes)


def _sampled(
    store: TableStore, runs: pl.DataFrame, progress: Progress
) -> tuple[pl.DataFrame, dict[str, tuple[str, ...]]]:
    sampled: list[str] = []
    notes: dict[str, tuple[str, ...]] = {}
    for deployment, members in deployments_of(runs, str(store.root)):
        chosen = sample_runs(runs, members, most_rows=MOST_TRAINING_ROWS, most_runs=MOST_TRAINING_RUNS)
        sampled += chosen
        if len(chosen) < len(members):
            note = sampling_note(len(chosen), len(members))
            notes[deployment.deployment_id] = (note,)
            progress.warn(f"{deployment.deployment_id}: {note}")
    return runs.filter(pl.col("run_id").is_in(sampled)), notes


def _without_copies(store: TableStore, runs: pl.DataFrame, progress: Progress) -> pl.DataFrame:
    # Two servers that write to one collector file, or a file copied into a second folder, give the same spans twice.
    overlaps = find_overlaps(store, runs)
    for one in overlaps:
        progress.warn(
            f"run {one.run_id}: {one.spans:,} of its spans are in run {one.other} too; it is left out of training, for "
            "they would count twice"
        )
    return runs.filter(~pl.col("run_id").is_in([one.run_id for one in overlaps]))


def _warn_of_bare(runs: pl.DataFrame, progress: Progress) -> None:
    # Their features are fewer, and their settings are vLLM's defaults.
    bare = runs.filter(pl.all_horizontal(pl.col("model_config", "gpu", "model").is_null()))
    if bare.height:
        run_config, model_config, gpu = (named(ServerOptions, name) for name in ("run_config", "model_config", "gpu"))
        progress.warn(
            f"{', '.join(bare['run_id'].unique().sort())}: no server configuration was found, so hardware and model "
            f"features are left out and settings are assumed; name it with {run_config} (or {model_config}) and {gpu}"
        )


_FITTING_PARTS = 2
"""Parts of the work on a deployment that take about as long: its fits, and its replays with the page."""


def fit_runs(
    store: TableStore,
    runs: pl.DataFrame,
    options: TrainOptions,
    progress: Progress,
    engine: TaskEngine | None = None,
) -> list[FittedDeployment]:
    """Fit every deployment of some runs, rows of the `runs` table; `engine` makes the frames of each, this process if
    not given.
    """
    engine = engine or LocalEngine(1)
    write_timelines(store, runs["run_id"].unique(maintain_order=True), engine)
    sets = feature_sets(options.features)
    how = deployment_options(options)
    deployments = []
    grouped = deployments_of(runs, str(store.root))
    progress.expect_parts(_FITTING_PARTS * len(grouped))
    for deployment, members in grouped:
        progress.stage(f"fitting {deployment.deployment_id} ({some_runs(members)})")
        frames = dict(each_run(engine, frames_of, store, members))
        overloads = tuple(filter(None, (frames[run_id].overload for run_id in members)))
        kept, overloads = runs_to_fit(members, overloads, include=options.include_overloaded)
        for one in overloads:
            progress.warn(overloaded(one, named(TrainOptions, "include_overloaded")).line)
        tables = deployment_tables([frames[run_id].tables for run_id in sorted(kept)])
        frames.clear()
        # Memory that the frames took would add to the peak of the fits.
        memory.trim()
        seen, contradictions = with_seen_limits(deployment, tables.timeline)
        for text in contradictions:
            progress.warn(f"{deployment.deployment_id}: {text}")
        fitted = replace(fit_deployment(seen, tables, sets, how), overloads=overloads)
        deployments.append(fitted)
        progress.finish_part()
        _warn_of_too_fast(fitted, progress)
    return deployments


def _warn_of_too_fast(fitted: FittedDeployment, progress: Progress) -> None:
    rows, deployment = fitted.beta_rows, fitted.deployment
    count = 0 if rows is None else rows.filter(is_excluded([TOO_FAST])).height
    if rows is not None and count > FEW_TOO_FAST * rows.height:
        progress.warn(
            f"{deployment.deployment_id}: {count:,} of {rows.height:,} step times are shorter than the rated speed of "
            f"{deployment.context.gpu.name if deployment.context.gpu else 'the GPU'} allows, and are left out "
            f"({TOO_FAST}); check model, GPU and tensor_parallel"
        )


def deployment_options(options: TrainOptions) -> DeploymentOptions:
    """Return the options of training that the fits need."""
    if options.positive and options.any_sign:
        raise UsageError(
            f"{named(TrainOptions, 'positive')} and {named(TrainOptions, 'any_sign')} contradict each other",
            hint="give one of them",
        )
    return DeploymentOptions(
        options.beta_target, positive=options.positive, any_sign=options.any_sign, reference=not options.fast
    )


def some_runs(run_ids: Sequence[str]) -> str:
    """Name some runs in a line: the first ones, and how many more there are."""
    rest = len(run_ids) - _MOST_NAMED_RUNS
    return ", ".join(run_ids[:_MOST_NAMED_RUNS]) + (f" and {rest} more" if rest > 0 else "")
