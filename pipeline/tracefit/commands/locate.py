"""Find models and tables below a folder that a command wrote (users name OUT of `tracefit run`), and choose a
deployment.

`predict` only looks for models, and is quick without polars: code that opens tables is imported where it is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tracefit.coefficients.files import find_models, read_evaluation
from tracefit.errors import UsageError, did_you_mean, known_names
from tracefit.inputs.buckets import BucketPath, location_of
from tracefit.options import DeploymentOption, TablesOption, named

if TYPE_CHECKING:
    from collections.abc import Iterable

    import polars as pl

    from tracefit.coefficients.models import Models
    from tracefit.models.deployment import DeploymentModels
    from tracefit.results.replays import RunReplay
    from tracefit.tables.store import TableStore


def as_list(paths: str | Path | Iterable[str | Path]) -> list[str | Path]:
    """Return one path or several as a list: a string is one path, not its letters."""
    return [paths] if isinstance(paths, str | Path) else list(paths)


def is_tables(path: str | Path) -> bool:
    """Say whether a path is a folder of tables with at least one run."""
    from tracefit.tables.store import TableStore  # noqa: PLC0415

    folder = location_of(path)
    # In a bucket, only the manifest is read.
    return (isinstance(folder, BucketPath) or folder.is_dir()) and bool(TableStore(folder).runs())


def find_tables(path: str | Path) -> Path:
    """Return the tables folder that a path stands for: itself, or `tables/` below it."""
    path = location_of(path)
    return path / "tables" if not is_tables(path) and is_tables(path / "tables") else path


def tables_of(models: str | Path) -> Path:
    """Return the tables that models were trained on: `tables/` in their folder, or beside it.

    Raises:
        UsageError: No tables are there.
    """
    path = find_models(models)
    folder = path if path.is_dir() else path.parent
    for tables in (folder / "tables", folder.parent / "tables"):
        if tables.is_dir():
            return tables
    raise UsageError(
        "the tables that the models were trained on are needed",
        where=str(models),
        hint=f"give them with {named(TablesOption)}",
    )


def published_replays(models: str | Path, deployment: DeploymentModels) -> tuple[RunReplay, ...]:
    """Return the replays of a deployment's runs from the evaluation in the models' folder or beside it; none without
    one.

    Raises:
        UsageError: The evaluation is damaged.
    """
    path = find_models(models)
    folder = path if path.is_dir() else path.parent
    for evaluation in (folder / "evaluation.json", folder.parent / "evaluation.json"):
        entries = read_evaluation(evaluation).deployments if evaluation.is_file() else ()
        of_deployment = (s for s in entries if s.deployment_id == deployment.deployment_id)
        if replays := tuple(r for s in of_deployment for r in s.replays if r.quantities):
            return replays
    return ()


def trained_tables(models: str | Path, tables: str | Path | None) -> TableStore:
    """Open the tables that models were trained on: `tables`, or those beside the models.

    Raises:
        UsageError: The folder holds no tables.
    """
    from tracefit.tables.store import TableStore  # noqa: PLC0415

    return TableStore(tables_of(models) if tables is None else find_tables(tables)).require()


def scan(folder: str | Path, table: str, *, run: str | None = None) -> pl.LazyFrame:
    """Return a table as a lazy polars frame; a query reads only the columns and rows it needs.

    `scan(...).collect()` is a polars frame, whose methods `to_pandas()` and `to_arrow()` make frames of these
    libraries.

    Args:
        folder: Tables, or the folder that `run` wrote.
        table: Its name, such as `requests` or `timeline`.
        run: The run whose rows to read; all runs if not given.

    Raises:
        UsageError: The folder has no tables, lacks this table, or lacks this run.

    Examples:
        >>> import polars as pl
        >>> import tracefit
        >>> tracefit.scan("out/", "requests").select(pl.len()).collect().item()
        100
    """
    from tracefit.tables.store import RunTables, TableStore  # noqa: PLC0415

    store = TableStore(find_tables(folder)).require()
    if run is not None and run not in (known := store.runs()):
        raise UsageError(
            f"there is no run {run}",
            where=str(store.root),
            hint=did_you_mean(run, known) or f"there are: {', '.join(known)}",
        )
    return RunTables(store.root, None if run is None else [run]).scan(table)


def choose_deployment(models: Models, deployment: str | None, run: str | None) -> str | None:
    """Return the id of the deployment that was trained on a run; without a run, return `deployment`, an id or a part of
    one.

    Raises:
        UsageError: No deployment was trained on the run, or the deployment that was is another one.
    """
    if run is None:
        return deployment
    runs: dict[str, list[str]] = {}
    for deployment_id in models.deployment_ids:
        trained = (m.training for m in models.deployment(deployment_id).models.values())
        for name in {r for t in trained if t is not None for r in t.runs}:
            runs.setdefault(name, []).append(deployment_id)
    fitting = [s for s in runs.get(run, []) if deployment is None or deployment in s]
    if len(fitting) == 1:
        return fitting[0]
    if run in runs:
        problem = "belongs to several deployments" if fitting else f"is not of deployment {deployment}"
        raise UsageError(
            f"run {run} {problem}",
            where=models.where,
            hint=f"name one with {named(DeploymentOption)}: {', '.join(runs[run])}",
        )
    hint = known_names(run, sorted(runs), title="runs") if runs else "the files name no runs"
    raise UsageError(f"no model was trained on run {run}", where=models.where, hint=hint)
