"""Compare predictions with the points of a benchmark: each point's load is replayed with the models of a deployment."""

from __future__ import annotations

import json
import tempfile
from typing import TYPE_CHECKING, Any

from tracefit.commands.ingest import ingest
from tracefit.commands.plan import server_of
from tracefit.errors import DataError, TracefitError, UsageError
from tracefit.replay.points import PointLoad, latencies_at, statistic_us
from tracefit.results.models import ComparedLatency, ComparedPoint, CompareResult
from tracefit.server.hardware import find_gpu
from tracefit.tables.points import LATENCIES, STATISTICS
from tracefit.tables.store import TableStore
from tracefit.text import plural

if TYPE_CHECKING:
    from pathlib import Path

    import polars as pl

    from tracefit.coefficients.models import Models
    from tracefit.models.deployment import DeploymentModels
    from tracefit.replay.plan import Fleet

_MOST_POINTS = 200
_MOST_NAMED = 8
_NO_GAPS = "percentiles of the time between two single tokens are not predicted: only its mean is compared"


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
            hint="a point has a concurrency or a rate, and a latency: columns such as concurrency, input_len, output_len, ttft_ms, tpot_ms",
        )
    return points


def compare_points(
    folder: Path, path: Path, points: pl.DataFrame, models: Models, chosen: str | None
) -> CompareResult:
    """Compare predictions of a deployment with points.

    Args:
        folder: The models' folder.
        path: The points' file or folder.
        points: Rows of `points`.
        models: The models.
        chosen: The deployment; its only one if null.

    Raises:
        UsageError: There are several deployments, and none is chosen.
        DataError: No point can be compared.
    """
    deployment = models.deployment(chosen)
    fleet, notes = server_of(folder, deployment)
    rows = points.sort("source_file", "source_offset", "point").to_dicts()
    compared = tuple(_compared(n, row, fleet, deployment) for n, row in enumerate(rows[:_MOST_POINTS], 1))
    if all(one.reason for one in compared):
        raise DataError(f"no point can be compared: {compared[0].reason}", where=str(path))
    if len(rows) > _MOST_POINTS:
        notes = (*notes, f"{len(rows) - _MOST_POINTS} points after the first {_MOST_POINTS} are not compared")
    return CompareResult(folder, path, points=compared, notes=(*notes, *_notes(rows)))


def _notes(rows: list[dict[str, Any]]) -> list[str]:
    unread = sorted({name for row in rows for name in json.loads(row["unread"] or "[]")})
    more = f" and {len(unread) - _MOST_NAMED} more" if len(unread) > _MOST_NAMED else ""
    notes = (
        [f"{plural(len(unread), 'column')} not read: {', '.join(unread[:_MOST_NAMED])}{more}"]
        if unread
        else []
    )
    if any(row[f"itl_{statistic}_us"] is not None for row in rows for statistic in STATISTICS[1:]):
        notes.append(_NO_GAPS)
    return notes


def _compared(number: int, row: dict[str, Any], fleet: Fleet, deployment: DeploymentModels) -> ComparedPoint:
    load = None
    reason = _unlike(row, deployment) or _unloaded(row)
    quantities: tuple[ComparedLatency, ...] = ()
    if reason is None:
        load = _load(row)
        try:
            predicted = latencies_at(fleet, load)
        except UsageError:
            raise
        except TracefitError as error:
            reason = error.line()
        else:
            quantities = tuple(
                _beside(f"{latency}_{statistic}", float(measured), value)
                for latency in LATENCIES
                for statistic in (STATISTICS if latency != "itl" else STATISTICS[:1])
                if (measured := row[f"{latency}_{statistic}_us"]) is not None
                and (value := statistic_us(predicted[latency], statistic)) is not None
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


def _unlike(row: dict[str, Any], deployment: DeploymentModels) -> str | None:
    """Return why a point is of another deployment, as far as it says; null if it may be of this one."""
    parallel, own = row["tensor_parallel"], deployment.limit("tensor_parallel")
    if parallel is not None and own is not None and parallel != own:
        return f"it has {parallel} GPUs of tensor parallelism, the deployment {own:g}"
    gpu = deployment.gpu
    if row["gpu"] and gpu and _gpu_name(row["gpu"]) not in (None, _gpu_name(gpu)):
        return f"its GPU is {row['gpu']}, that of the deployment {gpu}"
    return None


def _gpu_name(name: str) -> str | None:
    try:
        return find_gpu(name).name
    except TracefitError:
        return None
