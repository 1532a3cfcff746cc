"""The edge to frames: columns of a frame become arrays, models are evaluated over them, and predictions become columns.

Rows may be frames of any library that narwhals supports, such as pandas and pyarrow, or plain Python (`as_frame`);
predictions come back in the same form. Only polars has to be installed.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import polars as pl

from tracefit.errors import UsageError, did_you_mean
from tracefit.models.amounts import largest
from tracefit.models.columns import amounts_of, column_of
from tracefit.models.deployment import MAX_NAME_SHOWN
from tracefit.models.describe import OTHERS, REQUEST_INPUTS, RUNNING, STEP_INPUTS, STEP_VALUES, impossible
from tracefit.models.evaluate import CompiledModel
from tracefit.models.predict import PREDICTED_COLUMN, outside_training, p90_ape_pct
from tracefit.models.request import RequestComposer, complete
from tracefit.models.schema import terms_of
from tracefit.models.targets import LATENCY_TITLES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from typing import TypeAlias, TypeVar

    from narwhals.stable.v2.typing import IntoDataFrame, IntoFrame

    from tracefit.models.amounts import Amount, Truth
    from tracefit.models.deployment import DeploymentModels
    from tracefit.models.evaluate import Evaluated
    from tracefit.models.formulas import Amounts
    from tracefit.models.schema import Model
    from tracefit.statistics import Flags

    Rows: TypeAlias = IntoFrame | Mapping[str, Any] | Iterable[Mapping[str, Any]]
    """A frame, columns by name (`{"batch": [1, 2]}`), or one mapping per row (`[{"batch": 1}, {"batch": 2}]`)."""

    FrameT = TypeVar("FrameT", bound=IntoDataFrame)
    """A frame in memory of a library that narwhals supports: predictions come back as a frame of the same library."""


def as_frame(rows: Rows) -> pl.DataFrame:
    """Return rows as a polars frame, in their order; an index of pandas is not among the columns.

    Raises:
        UsageError: The argument is not rows.
    """
    try:
        return _frame(rows)
    except (TypeError, ValueError, pl.exceptions.PolarsError) as error:
        raise UsageError(f"cannot be read as rows ({str(error)[:200]})", where="rows") from error


def with_predictions(models: DeploymentModels, rows: Rows, of: Literal["step", "request"]) -> Any:
    """Return rows with the columns that `predict_steps` or `predict_requests` adds: as a frame of the caller's library.

    A lazy frame, columns by name and mappings come back as a polars frame. Columns that look misspelt cause a warning.

    Raises:
        UsageError: The argument is not rows, or as `predict_steps` and `predict_requests`.
    """
    frame = as_frame(rows)
    predicted = predict_steps(models, frame) if of == "step" else predict_requests(models, frame)
    if misspelt := [text for text, hint in unread_columns(models, of, frame).items() if hint]:
        # Reported at the line that called `Models.predict_step` or `predict_request`.
        warnings.warn(f"no model that predicts this reads {', '.join(misspelt)}", stacklevel=3)
    import narwhals.stable.v2 as nw  # noqa: PLC0415 - only for frames of callers: a training has none

    callers = nw.from_native(cast("Any", rows), pass_through=True)
    if not isinstance(callers, nw.DataFrame) or isinstance(rows, pl.DataFrame):
        return predicted
    added = [
        nw.new_series(
            column.name,
            column.to_list(),
            nw.String if column.dtype == pl.String else nw.Float64,
            backend=callers.implementation,
        )
        for column in predicted.get_columns()[frame.width :]
    ]
    return callers.with_columns(*added).to_native()


def unread_columns(models: DeploymentModels, of: str, frame: pl.DataFrame) -> dict[str, bool]:
    """Return the numeric columns that no prediction uses, with the closest used name, and whether there is one.

    Text columns may label rows, and rows of a table have columns for other uses: neither is reported.

    Args:
        models: The models of a deployment.
        of: `step`, `request` or the name of a model.
        frame: The rows to predict.
    """
    if "run_id" in frame.columns:
        return {}
    if of == "request":
        read = models.read(models.models.values()).union(REQUEST_INPUTS, OTHERS, REQUEST_FLAGS)
    else:
        read = models.read([models.step_model if of == "step" else models.require(of)])
    numbers = [name for name, kind in frame.schema.items() if kind.is_numeric() and name not in read]
    hints = {name: did_you_mean(name, read) for name in numbers}
    return {
        f"{name[:MAX_NAME_SHOWN]} ({hint})" if hint else name[:MAX_NAME_SHOWN]: bool(hint)
        for name, hint in hints.items()
    }


def _frame(rows: Any) -> pl.DataFrame:
    import narwhals.stable.v2 as nw  # noqa: PLC0415 - see `with_predictions`

    frame = nw.from_native(rows, pass_through=True)
    if isinstance(frame, nw.LazyFrame):
        frame = frame.collect(backend="polars")
    if isinstance(frame, nw.DataFrame):
        return frame.to_polars()
    if hasattr(rows, "to_dict") and hasattr(rows, "iloc"):  # a row of a pandas frame
        rows = [rows.to_dict()]
    # A frame that narwhals does not support, or columns by name, which may mix integers and floats; a single
    # number fills its column.
    if isinstance(rows, Mapping) or hasattr(rows, "__arrow_c_stream__"):
        return pl.DataFrame(rows, strict=False)
    listed = list(rows)
    if wrong := next((row for row in listed if not isinstance(row, Mapping)), None):
        raise TypeError(f"{type(wrong).__name__} is not a mapping of names to values")
    return pl.DataFrame([dict(row) for row in listed], infer_schema_length=None)


# -- predictions ----------------------------------------------------------------------------------------


OUTPUTS = (PREDICTED_COLUMN, "low_us", "high_us", "out_of_range")
"""Columns that are added to steps and to rows of features."""

REQUEST_FLAGS = {"prompt": "prompt_tokens", "output": "output_tokens"}
"""Flags of requests to the inputs that have another name."""


# -- rows of one model -----------------------------------------------------------------------------------


def evaluated(compiled: CompiledModel, frame: pl.DataFrame, also: Amounts | None = None) -> Evaluated:
    """Evaluate a model over the rows of a frame; a boundary model as for a consumer without a step clock.

    Args:
        compiled: The model.
        frame: Its features, or the columns they are computed from.
        also: Amounts by name, which win over columns.

    Raises:
        UsageError: A column is missing or not of numbers.
    """
    given = {**amounts_of(frame, compiled.looked_at), **(also or {})}
    compiled.require(compiled.features, {*frame.columns, *given})
    with np.errstate(all="ignore"):
        return compiled.evaluate(given)


def predict_rows(model: Model, rows: pl.DataFrame) -> pl.DataFrame:
    """Add `predicted_us`, `low_us`, `high_us` and `out_of_range` (null inside the training range) to a frame.

    Args:
        model: The model; a boundary model as for a consumer without a step clock.
        rows: Its features, or the columns they are computed from. A null gives a null prediction.

    Raises:
        UsageError: A column is missing or not numeric.
    """
    compiled = CompiledModel(model)
    return _joined(rows, _predictions(compiled, evaluated(compiled, rows), {}, rows.height))


def _predictions(compiled: CompiledModel, found: Evaluated, beyond: Mapping[str, Truth], rows: int) -> pl.DataFrame:
    """Return the columns `OUTPUTS` of an evaluation; `beyond` are inputs outside their training range by name, and for
    which rows.
    """
    with np.errstate(all="ignore"):
        outside = _names(
            [*beyond.items(), *((each.feature, each.rows) for each in outside_training(compiled, found))],
            rows,
        )
        predicted = np.broadcast_to(largest(found.amount, 0.0), rows)
        q = _p90(compiled, found) / 100
        # The held-out errors are from rows in the training range, so they do not apply outside it.
        inside = outside.is_null().to_numpy()
        low = np.where(inside, predicted / (1 + q), np.nan)
        high = np.where(inside & (q < 1), predicted / (1 - q), np.nan)
    columns = dict(zip(OUTPUTS, (predicted, low, high), strict=False))
    return pl.DataFrame([column_of(name, amount, rows) for name, amount in columns.items()]).with_columns(
        out_of_range=outside
    )


def _joined(rows: pl.DataFrame, predictions: pl.DataFrame) -> pl.DataFrame:
    # Predicting a frame twice would otherwise silently keep one of the two predictions.
    if clash := [c for c in predictions.columns if c in rows.columns]:
        raise UsageError(f"the rows have a column {clash[0]} already", hint="rename it")
    return rows.hstack(predictions)


def _p90(compiled: CompiledModel, found: Evaluated) -> Amount:
    """Return the held-out 90th percentile of the group each row belongs to, as `predict_row` takes it; NaN without
    one.
    """

    def of(group: str | None) -> float:
        errors = p90_ape_pct(compiled.model, group)
        return np.nan if errors is None else errors

    names = [name for name, _ in found.forms]
    if names != ["line"]:
        return np.choose(np.maximum(found.index, 0), [of(name) for name in names])
    # A model without features of prompts was still validated on both kinds of steps.
    values = compiled.formulas.values(found.values, ["prefill_tokens"])
    prefill = values.get("prefill_tokens", np.nan)
    by_prefill = np.where(prefill > 0, of("mixed"), of("decode_only"))
    return np.where(np.isnan(prefill), of(None), by_prefill)


def _names(found: Iterable[tuple[str, Truth]], rows: int) -> pl.Series:
    """Return the names whose condition holds for a row, each once, in a column; null without any."""
    by_name: dict[str, Flags] = {}
    for name, holds in found:
        before = by_name.get(name, False)
        by_name[name] = np.broadcast_to(np.logical_or(before, holds), rows)
    if not any(holds.any() for holds in by_name.values()):
        return pl.Series("out_of_range", [None], pl.String).new_from_index(0, rows)
    columns = pl.DataFrame({str(k): holds for k, holds in enumerate(by_name.values())})
    named = [pl.when(pl.col(str(k))).then(pl.lit(name)) for k, name in enumerate(by_name)]
    text = pl.concat_str(named, separator=", ", ignore_nulls=True)
    return columns.select(out_of_range=pl.when(text != "").then(text)).to_series()


# -- steps -----------------------------------------------------------------------------------------------


def predict_steps(models: DeploymentModels, rows: pl.DataFrame) -> pl.DataFrame:
    """Predict steps given as timeline columns or by `describe.STEP_INPUTS`.

    Raises:
        UsageError: As `predict_rows`, or the server does not run one of the steps; then no step is predicted.
    """
    _require_possible(models, "step", rows, (*STEP_INPUTS, *STEP_VALUES))
    return evaluated_steps(models, rows)


def evaluated_steps(models: DeploymentModels, rows: pl.DataFrame) -> pl.DataFrame:
    """Predict steps as `predict_steps` does, including steps that the server does not run, for a consumer's grid.

    Raises:
        UsageError: As `predict_rows`.
    """
    model = models.step_model
    if not any(c in rows.columns for c in STEP_INPUTS):
        return predict_rows(model, rows)
    compiled = models.compiled(model)
    given = amounts_of(rows, compiled.looked_at | {*STEP_INPUTS})
    described = {name: given.pop(name) for name in STEP_INPUTS if name in given}
    values = models.step_values(described, given)
    # Raise for an unknown setting, as for a single step: nulls would hide which setting is missing.
    unknown = {name for name, value in models.server.items() if value is None and name not in rows.columns}
    if lacking := sorted(compiled.formulas.inputs(compiled.features, values) & unknown):
        raise compiled.lacks(lacking, values.keys() - unknown)
    compiled.require(compiled.features, values)
    with np.errstate(all="ignore"):
        found = compiled.evaluate(values)
        # A term that is the same input by another name is reported already.
        of_terms = {STEP_VALUES.get(t.feature) for t in terms_of(model) if t.training_range is not None}
        beyond = _beyond(models, "step", {n: v for n, v in described.items() if n not in of_terms})
    return _joined(rows, _predictions(compiled, found, beyond, rows.height))


def _beyond(models: DeploymentModels, of: Literal["step", "request"], given: Amounts) -> dict[str, Truth]:
    """Return the inputs outside their training range, as `DeploymentModels.beyond` does, and for which rows."""
    ranges = {name: ends for name, ends in models.input_ranges(of).items() if name in given}

    # A 0 means not given, and an empty engine has no cached tokens.
    def is_given(name: str) -> Truth:
        if of == "step":
            return given[name] != 0
        return given["batch"] > 0 if name == "context" else True

    return {n: is_given(n) & ((given[n] < low) | (given[n] > high)) for n, (low, high) in ranges.items()}


def _require_possible(
    models: DeploymentModels, of: Literal["step", "request"], rows: pl.DataFrame, names: Collection[str]
) -> None:
    """Refuse rows if the server would not run one of them, as `describe.require_possible` does; name the first.

    Either all rows are predicted or none, so that the result has the rows of the input.
    """
    given = {
        name: rows[name].cast(pl.Float64).to_numpy()
        for name in names
        if name in rows.columns and rows.schema[name].is_numeric()
    }
    rules = [
        (np.flatnonzero(broken), name, values, words)
        for broken, name, values, words in impossible(of, given, models.limit)
        if broken.any()
    ]
    if rules:
        (row, *_), name, values, words = min(rules, key=lambda rule: rule[0][0])
        count = np.unique(np.concatenate([rows for rows, *_ in rules])).size
        more = f" ({count:,} such rows)" if count > 1 else ""
        raise UsageError(f"{name}: {words.format(values[row])}{more}", where=f"row {row + 1:,}")


# -- requests --------------------------------------------------------------------------------------------


_COMPLETED = (*REQUEST_INPUTS, *OTHERS, *RUNNING, "steps_of_others", "capacity")
"""Columns of completed requests."""


def predict_requests(models: DeploymentModels, rows: pl.DataFrame) -> pl.DataFrame:
    """Predict requests described by `describe.REQUEST_INPUTS`.

    Args:
        models: Models of one deployment.
        rows: prompt_tokens and output_tokens at least; further columns and features win over what follows from these.

    Returns:
        The rows with a `*_us` column per duration that `compose` predicts, `*_low_us` and `*_high_us` of
        TTFT, ITL and E2E, and `out_of_range`, which names the inputs outside the training range; these rows
        have no range.

    Raises:
        UsageError: A column is missing, the server would refuse one of the requests (then no request is
            predicted), or the model of step times is missing.
    """
    given = completed_requests(models, rows)
    _require_possible(models, "request", given, (*REQUEST_INPUTS, *OTHERS))
    return _joined(rows, composed_requests(models, given))


def composed_requests(models: DeploymentModels, given: pl.DataFrame) -> pl.DataFrame:
    """Return the columns that `predict_requests` adds to requests as `completed_requests` completes them."""
    inputs = amounts_of(given, _COMPLETED)
    read = {name for model in models.models.values() for name in models.compiled(model).read}
    features = amounts_of(given, read - inputs.keys())
    with np.errstate(all="ignore"):
        composer = RequestComposer(models, inputs, features)
        durations = composer.compose()
        notes = [*_beyond(models, "request", inputs).items()]
        notes += ((each.feature, each.rows) for each in composer.outside)
        if (added := composer.added_wait) is not None:
            notes.append(("queue", added.rows))
        outside = _names(notes, given.height)
    columns = [
        column_of(f"{name}_us", np.nan if value is None else value, given.height) for name, value in durations.items()
    ]
    inside = pl.col("out_of_range").is_null()
    ranges = [
        pl.when(inside).then(pl.col(f"{name}_us") * ratio).alias(f"{name}_{end}_us")
        for name in LATENCY_TITLES
        for end, ratio in zip(("low", "high"), models.range_of(name), strict=True)
    ]
    added_columns = pl.DataFrame(columns).with_columns(out_of_range=outside).with_columns(ranges)
    return added_columns.select(pl.exclude("out_of_range"), "out_of_range")


def completed_requests(models: DeploymentModels, rows: pl.DataFrame) -> pl.DataFrame:
    """Complete described requests; columns may have the names of the flags (`REQUEST_FLAGS`)."""
    rows = rows.with_columns(
        pl.col(flag).alias(name)
        for flag, name in REQUEST_FLAGS.items()
        if flag in rows.columns and name not in rows.columns
    )
    for flag, name in REQUEST_FLAGS.items():
        if name not in rows.columns:
            rest = [
                c for c in rows.columns if c not in (*REQUEST_FLAGS, *REQUEST_FLAGS.values(), *REQUEST_INPUTS, *OTHERS)
            ]
            close = (f"column {c}: {meant} " for c in rest if (meant := did_you_mean(c, (flag, name))))
            needed = f"columns {' and '.join(REQUEST_FLAGS.values())}, or {' and '.join(REQUEST_FLAGS)}, are needed"
            raise UsageError(f"the rows have no column {name}", hint=f"{next(close, '')}{needed}")
    inputs = [c for c in (*REQUEST_INPUTS, *OTHERS) if c in rows.columns]
    if not all(rows.schema[c].is_numeric() or rows.schema[c] == pl.Null for c in inputs):
        raise UsageError("described requests have values that are not numbers", where=", ".join(inputs))
    numbers = rows.select(pl.col(c).cast(pl.Float64) for c in inputs)
    unknown = np.full(rows.height, np.nan)
    given = dict.fromkeys((*REQUEST_INPUTS, *OTHERS), unknown) | {c: numbers[c].to_numpy() for c in inputs}
    completed = complete(given, models.server, models.workload)
    described = rows.with_columns(
        pl.Series(name, np.broadcast_to(value, rows.height), pl.Float64) for name, value in completed.items()
    )
    # A NaN from the caller does not stand for an unknown value: null does.
    is_nan = [pl.col(c).is_nan() for c in REQUEST_INPUTS]
    callers = [numbers[c].is_nan().fill_null(value=False) for c in inputs]
    wrong = described.select(pl.any_horizontal(*is_nan, *callers).arg_true()).to_series()
    if wrong.len():
        row = {c: described[c][wrong[0]] for c in REQUEST_INPUTS}
        raise UsageError(f"{wrong.len():,} rows describe no request, such as {row}", where=f"row {wrong[0] + 1:,}")
    return described
