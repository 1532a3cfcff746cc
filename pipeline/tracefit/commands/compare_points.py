"""Compare predictions with the points of a benchmark: each point's load is replayed with the models of its
deployment.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tracefit.commands.ingest import ingest
from tracefit.commands.plan import PLANNED_SETTINGS, server_of, store_beside
from tracefit.errors import DataError, TracefitError
from tracefit.options import DeploymentOption, named
from tracefit.replay.points import PointLoad, latencies_at
from tracefit.results.models import ComparedLatency, ComparedPoint, CompareResult
from tracefit.server.hardware import find_gpu
from tracefit.server.settings import settings_from
from tracefit.tables.named_models import plain_model_name
from tracefit.tables.points import POINT_LATENCIES, STATISTICS
from tracefit.tables.store import TableStore
from tracefit.text import in_words, plural

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import polars as pl

    from tracefit.coefficients.models import Models
    from tracefit.models.deployment import DeploymentModels
    from tracefit.replay.plan import Fleet

_MOST_POINTS = 200
_MOST_NAMED_POINTS = 8
_NO_GAPS = (
    "percentiles of the time between two single tokens are not predicted where a step gives several: only "
    "its mean is compared"
)


def read_points(path: Path) -> pl.DataFrame:
    """Return the rows of `points` of a file.

    Raises:
        TracefitError: It cannot be read, or holds none.
    """
    with tempfile.TemporaryDirectory(prefix="tracefit-") as folder:
        ingest(path, folder)
        points = TableStore(folder).read("points")
    if not points.height:
        raise DataError(
            "holds no point of a benchmark",
            where=str(path),
            hint=(
                "a point has a concurrency or a rate, and a latency: columns such as concurrency, input_len, "
                "output_len, ttft_ms, tpot_ms"
            ),
        )
    return points


def compare_points(folder: Path, path: Path, points: pl.DataFrame, models: Models, chosen: str | None) -> CompareResult:
    """Compare predictions with points, each with those of the deployment that its model, GPU and settings name.

    Args:
        folder: The models' folder.
        path: The points' file or folder.
        points: Rows of `points`.
        models: The models.
        chosen: The deployment of all points, whatever name their model has; if null, they decide.

    Raises:
        UsageError: No or several deployments are the chosen one.
        DataError: No point can be compared.
    """
    rows = rows_in_order(points)
    compared, notes = predicted_points(store_beside(folder), models, rows[:_MOST_POINTS], chosen)
    if all(one.reason for one in compared):
        more = len({one.reason for one in compared}) - 1
        also = f" (and {plural(more, 'other reason')})" if more else ""
        raise DataError(f"no point can be compared: {compared[0].reason}{also}", where=str(path))
    if len(rows) > _MOST_POINTS:
        notes = (
            *notes,
            f"{len(rows) - _MOST_POINTS} points after the first {_MOST_POINTS} are not compared",
        )
    return CompareResult(folder, path, points=compared, notes=(*notes, *_notes(rows, compared)))


def rows_in_order(points: pl.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of `points` as they stand in their files."""
    return points.sort("source_file", "source_offset", "point").to_dicts()


def predicted_points(
    store: TableStore | None, models: Models, rows: Sequence[dict[str, Any]], chosen: str | None = None
) -> tuple[tuple[ComparedPoint, ...], tuple[str, ...]]:
    """Return points with their predictions, and notes on the settings of their servers; the first one has number 1.

    Args:
        store: The tables that the models were trained on; null without any.
        models: The models.
        rows: Rows of `points`.
        chosen: The deployment of all points; if null, they decide.

    Raises:
        UsageError: No or several deployments are the chosen one.
    """
    ids = [chosen] if chosen else [each or None for each in models.deployment_ids]
    servers = _Servers(store, [models.deployment(each) for each in ids], is_named=chosen is not None)
    compared = tuple(_compared(n, row, servers) for n, row in enumerate(rows, 1))
    return compared, tuple(dict.fromkeys(servers.notes))


class _NotComparedError(Exception):
    """Why a point is not compared."""


class _Servers:
    """The deployments of some models, and the servers that points were measured on, each made once.

    Attributes:
        notes: On the settings of the servers.
    """

    def __init__(self, store: TableStore | None, candidates: Sequence[DeploymentModels], *, is_named: bool) -> None:
        self.notes: list[str] = []
        self._store = store
        self._candidates = candidates
        self._is_named = is_named
        self._known: dict[tuple[str | None, str], Fleet] = {}

    def of(self, row: dict[str, Any]) -> tuple[Fleet, str | None]:
        """Return the server that a point was measured on, and the id of its deployment.

        Raises:
            _NotComparedError: No or several deployments are like it.
            TracefitError: Its server cannot be replayed.
        """
        stated = _settings_of(row)
        reasons = [self._unlike(row, stated, deployment) for deployment in self._candidates]
        like = [d for d, reason in zip(self._candidates, reasons, strict=True) if reason is None]
        if not like:
            of_several = f"none of the {len(reasons)} deployments is like it: " if len(reasons) > 1 else ""
            raise _NotComparedError(of_several + "; ".join(dict.fromkeys(filter(None, reasons))))
        if len(like) > 1:
            several = in_words([str(deployment.deployment_id) for deployment in like])
            raise _NotComparedError(
                f"{several} are like it: name one with {named(DeploymentOption)}, or give the points their model, "
                "gpu and tensor_parallel"
            )
        (deployment,) = like
        changes = {
            name: value
            for name, value in stated.items()
            if name in PLANNED_SETTINGS and value != deployment.setting(name)
        }
        key = (deployment.deployment_id, json.dumps(changes, sort_keys=True))
        if key not in self._known:
            self._known[key], notes = server_of(self._store, deployment, changes)
            self.notes += notes
        return self._known[key], deployment.deployment_id

    def _unlike(self, row: dict[str, Any], stated: dict[str, object], deployment: DeploymentModels) -> str | None:
        """Return why a point is of another deployment, as far as it says; null if it may be of this one."""
        own_model = deployment.setting("model")
        # Clients name a model as the server calls it, which may be a name of its own: that of the user counts more.
        if row["model"] and own_model and not self._is_named:
            names = {
                plain_model_name(str(name)) for name in (own_model, deployment.setting("served_model_name")) if name
            }
            if plain_model_name(row["model"]) not in names:
                option = named(DeploymentOption)
                return (
                    f"its model is {row['model']}, that of the deployment {own_model} ({option} compares it all "
                    "the same)"
                )
        parallel, own = row["tensor_parallel"], deployment.limit("tensor_parallel")
        if parallel is not None and own is not None and parallel != own:
            return f"it has {parallel} GPUs of tensor parallelism, the deployment {own:g}"
        gpu = deployment.gpu
        if row["gpu"] and gpu and _gpu_name(row["gpu"]) not in (None, _gpu_name(gpu)):
            return f"its GPU is {row['gpu']}, that of the deployment {gpu}"
        for name, value in stated.items():
            now = deployment.setting(name)
            if name not in PLANNED_SETTINGS and now is not None and now != value:
                return f"its {name} is {value}, that of the deployment {now}"
        return None


def _settings_of(row: dict[str, Any]) -> dict[str, object]:
    """Return the settings that a point states, of the kinds that they have.

    Raises:
        _NotComparedError: A value is of another kind.
    """
    values = {name: _scalar(value) for name, value in json.loads(row["settings"] or "{}").items()}
    try:
        made = settings_from({n: v for n, v in values.items() if v is not None}, where="settings")
    except TracefitError as error:
        raise _NotComparedError(error.line()) from None
    return {name: getattr(made, name) for name, value in values.items() if value is not None}


def _scalar(value: Any) -> Any:
    """Return a value that a table may hold as text; null for a missing one."""
    if not isinstance(value, str):
        # A table of numbers has a count as 64.0 where a row of it lacks one.
        return int(value) if isinstance(value, float) and value.is_integer() else value
    text = value.strip()
    if text.lower() in ("", "-", "none", "null", "nan", "n/a"):
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    with suppress(ValueError):
        return _scalar(float(text.replace(",", "")))
    return text


def _notes(rows: list[dict[str, Any]], compared: Sequence[ComparedPoint]) -> list[str]:
    unread = sorted({name for row in rows for name in json.loads(row["unread"] or "[]")})
    more = f" and {len(unread) - _MOST_NAMED_POINTS} more" if len(unread) > _MOST_NAMED_POINTS else ""
    notes = (
        [f"{plural(len(unread), 'column')} not read: {', '.join(unread[:_MOST_NAMED_POINTS])}{more}"] if unread else []
    )
    has_gaps = any(
        row[f"itl_{statistic}_us"] is not None
        and not point.reason
        and not any(each.name == f"itl_{statistic}" for each in point.latencies)
        for row, point in zip(rows, compared, strict=False)
        for statistic in STATISTICS[1:]
    )
    return [*notes, _NO_GAPS] if has_gaps else notes


def _compared(number: int, row: dict[str, Any], servers: _Servers) -> ComparedPoint:
    load = deployment_id = None
    quantities: tuple[ComparedLatency, ...] = ()
    reason = _unloaded(row)
    if reason is None:
        load = _load(row)
        try:
            fleet, deployment_id = servers.of(row)
            predicted = latencies_at(fleet, load)
        except _NotComparedError as error:
            reason = str(error)
        except TracefitError as error:
            missing = [name for name in PLANNED_SETTINGS if name in error.what]
            columns = "columns" if len(missing) > 1 else "column"
            way = f"; or give the points the {columns} {' and '.join(missing)}" if missing else ""
            reason = error.line() + way
        else:
            quantities = tuple(
                _beside(f"{latency}_{statistic}", float(measured), value)
                for latency in POINT_LATENCIES
                for statistic in STATISTICS
                if (measured := row[f"{latency}_{statistic}_us"]) is not None
                and (value := predicted[latency].statistic_us(statistic)) is not None
            )
            reason = None if quantities else "none of its latencies is predicted"
    return ComparedPoint(
        number,
        row["program"],
        row["source_file"].rpartition("/")[2],
        row["concurrency"] if load is None or load.rate_per_s is None else None,
        row["rate_per_s"],
        row["prompt_tokens"],
        row["output_tokens"],
        quantities,
        reason,
        deployment_id,
    )


def _beside(name: str, measured_us: float, predicted_us: float) -> ComparedLatency:
    error = 100 * (predicted_us / measured_us - 1) if measured_us else None
    return ComparedLatency(name, measured_us, predicted_us, error)


def _load(row: dict[str, Any]) -> PointLoad:
    rate = row["rate_per_s"]
    return PointLoad(
        None if rate else round(row["concurrency"]),
        rate,
        max(round(row["prompt_tokens"]), 1),
        max(round(row["output_tokens"]), 1),
        row["requests"],
    )


def _unloaded(row: dict[str, Any]) -> str | None:
    if not (row["rate_per_s"] or (row["concurrency"] or 0) >= 1):
        return "neither a concurrency nor a rate is known"
    missing = [name for name in ("prompt_tokens", "output_tokens") if not row[name]]
    return f"no {' nor '.join(missing)}" if missing else None


def _gpu_name(name: str) -> str | None:
    try:
        return find_gpu(name).name
    except TracefitError:
        return None
