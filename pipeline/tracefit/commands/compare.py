"""Compare two coefficient files, or check an old file on new traces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefit.coefficients.diff import coefficient_diffs, prediction_diffs
from tracefit.coefficients.files import find_models, has_models
from tracefit.coefficients.models import load
from tracefit.commands.compare_points import compare_points, read_points
from tracefit.commands.drift import drift_check
from tracefit.commands.locate import choose_deployment, find_tables
from tracefit.errors import DataError
from tracefit.inputs.blocks import inspect_file
from tracefit.inputs.files import TraceFile
from tracefit.options import DeploymentOption, FirstArgument, RunOption, SecondArgument, Tolerance
from tracefit.results.models import CompareResult, ModelComparison
from tracefit.tables.points import points_stated
from tracefit.tables.store import TableStore

if TYPE_CHECKING:
    from pathlib import Path

    import polars as pl

    from tracefit.coefficients.models import Models


def compare(
    first: FirstArgument,
    second: SecondArgument,
    *,
    deployment: DeploymentOption = None,
    run: RunOption = None,
    tolerance: Tolerance | None = None,
) -> CompareResult:
    """Compare two coefficient files, check a file on new tables, or put predictions beside the points of a benchmark.

    Args:
        first: A coefficient file, a folder of them, or a folder that `run` wrote.
        second: Another such file or folder, or tables of new runs. If a folder has both models and tables, the models
            are compared.
            Or points: a table of them, a load generator's result with a summary, or tables that hold nothing else.
        deployment: Compare this deployment only; see `Models.deployment`.
        run: Compare the deployment of this run only.
        tolerance: For a drift check.

    Raises:
        UsageError: A file or folder is not valid.
        DataError: The two have no model in common.

    Examples:
        >>> import tracefit
        >>> tracefit.compare("out/models/", "out/tables/").verdict
        'good'
    """
    one, other = find_models(first), find_models(second)
    old = load(one)
    chosen = choose_deployment(old, deployment, run)
    wanted = [old.deployment(chosen).deployment_id or ""] if chosen is not None else list(old.deployment_ids)
    if (path := _file_of_points(other)) is not None:
        return compare_points(one, path, read_points(path), old, chosen)
    # A folder that `run` wrote has both: its models are compared, its tables only if they are named.
    if other.is_dir() and not has_models(other):
        other = find_tables(other)
    if (other / "runs").is_dir():
        points = _only_points(other)
        if points is not None:
            return compare_points(one, other, points, old, chosen)
        return drift_check(one, other, old, wanted, tolerance or Tolerance())
    new = load(other)
    compared: list[ModelComparison] = []
    notes: list[str] = []
    for deployment_id in wanted:
        pair = _partner(deployment_id, old, new, notes)
        if pair is None:
            continue
        left, right = old.deployment(deployment_id), new.deployment(pair)
        for name, model in left.models.items():
            if name not in right.models:
                notes.append(f"{name} of {deployment_id}: only in {one}")
                continue
            changes = tuple(coefficient_diffs(model, right.models[name]))
            shifts, reasons = prediction_diffs(model, right.models[name])
            # Why predictions cannot be compared matters where coefficients differ.
            notes += reasons if model != right.models[name] else []
            compared.append(ModelComparison(name, deployment_id, changes, tuple(shifts)))
    if not compared:
        raise DataError(
            "the two have no model in common",
            where=f"{one}, {other}",
            hint=f"deployments: {', '.join(old.deployment_ids)}; {', '.join(new.deployment_ids)}",
        )
    return CompareResult(one, other, tuple(compared), notes=tuple(notes))


def _file_of_points(path: Path) -> Path | None:
    """Return a file that may hold points of a benchmark; null for a folder, and for a coefficient file."""
    if not path.is_file():
        return None
    # A coefficient file is not a recording.
    return path if inspect_file(TraceFile.local(path)).recording is not None else None


def _only_points(tables: Path) -> pl.DataFrame | None:
    """Return the points of tables that hold nothing else; null for other tables."""
    store = TableStore(tables)
    return store.read("points") if points_stated(store.read("runs"), only=True) else None


def _partner(deployment_id: str, old: Models, new: Models, notes: list[str]) -> str | None:
    """Return the deployment of the other file to compare with: the same one, or its only one."""
    if deployment_id in new.deployment_ids:
        return deployment_id
    # Deployment ids hold a hash of the settings: after a change of one setting the same server has another id.
    if len(old.deployment_ids) == len(new.deployment_ids) == 1:
        notes.append(f"deployment {deployment_id} is compared with {new.deployment_ids[0]}, which is another one")
        return new.deployment_ids[0]
    notes.append(f"deployment {deployment_id}: only in the first")
    return None
