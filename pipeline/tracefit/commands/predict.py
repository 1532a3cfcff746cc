"""Predict every row of a file from coefficient files."""

from __future__ import annotations

import math
import warnings
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from tracefit.coefficients.models import Models, load
from tracefit.commands.locate import choose_deployment
from tracefit.errors import UsageError
from tracefit.options import DeploymentOption, FeaturesOption, RowKindOption, RowsOutOption, RunOption, named
from tracefit.tables.disk import write_files

if TYPE_CHECKING:
    from collections.abc import Iterable

    import polars as pl

    from tracefit.models.frames import Rows
    from tracefit.progress import Progress
    from tracefit.results.models import RowPredictions


def predict(
    models: Models | str | Path,
    rows: str | Path | Rows,
    *,
    of: RowKindOption = "step",
    deployment: DeploymentOption = None,
    run: RunOption = None,
    out: RowsOutOption = None,
    progress: Progress | None = None,
) -> RowPredictions:
    """Predict every row of a CSV, Parquet or NDJSON file, or of a frame.

    Args:
        models: Loaded coefficient files, a file, or a folder that `train` or `run` wrote.
        rows: The file, a frame of any library that narwhals supports, or one mapping per row; the columns are the
            arguments of `Models.predict_step` or `predict_request`, or a model's features.
        of: `step`, `request`, or a model's name such as `alpha.queue_wait`.
        deployment: See `Models.deployment`.
        run: A run of the deployment, instead of its id.
        out: File for the rows with their predictions, in the format of its suffix: .csv, .parquet or .ndjson.
        progress: Receives a warning that names columns which no model reads; without it, Python warns.

    Raises:
        UsageError: The file cannot be read or written, lacks what the model needs, or has a row that describes nothing
            the
            server runs: the first one is named, and no row is predicted.

    Examples:
        >>> import tracefit
        >>> result = tracefit.predict("out/", [{"batch": 8, "context": 500}, {"batch": 16, "context": 500}])
        >>> [round(row["predicted_us"], -3) for row in result.predictions]
        [7000.0, 7000.0]
    """
    models = models if isinstance(models, Models) else load(models)
    # A single prediction needs neither a frame library nor what the results of other commands are made of.
    from tracefit.models.frames import (
        as_frame,
        predict_requests,
        predict_rows,
        predict_steps,
        unread_columns,
    )
    from tracefit.results.models import RowPredictions

    chosen = models.deployment(choose_deployment(models, deployment, run))
    frame = read_rows(Path(rows)) if isinstance(rows, str | Path) else as_frame(rows)
    if of == "step":
        predicted = predict_steps(chosen, frame)
    elif of == "request":
        predicted = predict_requests(chosen, frame)
    else:
        predicted = predict_rows(chosen.require(of), frame)
    where = str(rows) if isinstance(rows, str | Path) else "rows"
    if unread := unread_columns(chosen, of, frame):
        text = f"{where}: no model that predicts this reads {', '.join(unread)}"
        if progress is None:
            warnings.warn(text, stacklevel=2)
        else:
            progress.warn(text)
    outside = predicted.height - predicted["out_of_range"].null_count()
    if out is not None:
        _write(predicted, Path(out))
        return RowPredictions(predicted.height, outside, Path(out))
    plain = ({name: _scalar(v) for name, v in row.items()} for row in predicted.iter_rows(named=True))
    return RowPredictions(predicted.height, outside, None, tuple(plain))


def _scalar(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)


def read_rows(path: Path) -> pl.DataFrame:
    """Read a CSV, Parquet or NDJSON file.

    Raises:
        UsageError: It cannot be read, or is of another kind.
    """
    import polars as pl

    kind = _kind(path)
    try:
        if kind == "parquet":
            return pl.read_parquet(path)
        # All rows decide the types of the columns: a number may be whole in the first hundred.
        read = pl.read_csv if kind == "csv" else pl.read_ndjson
        return read(path, infer_schema_length=None)
    except OSError as error:
        raise UsageError(f"cannot be read ({error.strerror or 'no such file'})", where=str(path)) from error
    except pl.exceptions.PolarsError as error:
        reason = str(error)[:200]
        raise UsageError(f"cannot be read as {path.suffix[1:]} ({reason})", where=str(path)) from error


def _write(frame: pl.DataFrame, path: Path) -> None:
    content = BytesIO()
    getattr(frame, f"write_{_kind(path)}")(content)
    write_files({path: content.getvalue()})


def _kind(path: Path) -> str:
    kind = path.suffix.lower().removeprefix(".")
    kind = "ndjson" if kind == "jsonl" else kind
    if kind not in ("csv", "parquet", "ndjson"):
        raise UsageError("is not a .csv, .parquet, .ndjson or .jsonl file", where=str(path))
    return kind


def parse_features(texts: Iterable[str]) -> dict[str, float]:
    """Read `name=value` features from the command line.

    Raises:
        UsageError: A text has another form, or a value is not a finite number.
    """
    return parse_numbers(texts, named(FeaturesOption), "NAME=NUMBER", "kv_usage_ratio=0.8")


def parse_numbers(texts: Iterable[str], option: str, form: str, example: str) -> dict[str, float]:
    """Read texts such as `name=value` of an option from the command line.

    Raises:
        UsageError: A text has another form, or a value is not a finite number.
    """
    values: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not name.strip() or not math.isfinite(value):
            raise UsageError(f"{option} {text}: not of the form {form}", hint=f"such as {example}")
        values[name.strip()] = value
    return values
