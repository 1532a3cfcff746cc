"""Predict the rows of a frame: the computation of `predict`, as column operations on the same compiled models.

Rows may be frames of any library that narwhals supports, such as pandas and pyarrow, or plain Python (`as_frame`);
predictions come back in the same form. Only polars has to be installed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from copy import copy
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import narwhals.stable.v2 as nw
import numpy as np
import polars as pl
from narwhals.stable.v2.typing import IntoDataFrame, IntoFrame

from tracefit.coefficients.compiled import (
    CompiledModel,
    expected_at_boundary,
    linear_forms,
    terms_of,
)
from tracefit.coefficients.model import BoundaryModel, RegimesModel
from tracefit.coefficients.predict import MAX_NAME_SHOWN, PREDICTED, p90_ape_pct, stand_ins
from tracefit.coefficients.requests import Arithmetic, RequestComposer, Value, complete
from tracefit.coefficients.workload import (
    OTHERS,
    REQUEST_INPUTS,
    RUNNING,
    STEP_COLUMNS,
    STEP_INPUTS,
    impossible,
)
from tracefit.errors import UsageError, did_you_mean
from tracefit.features.targets import LATENCIES
from tracefit.fit.results import line_expression

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from tracefit.coefficients.model import Model
    from tracefit.coefficients.predict import DeploymentModels
    from tracefit.features import targets
    from tracefit.fit.results import Term


Rows = IntoFrame | Mapping[str, Any] | Iterable[Mapping[str, Any]]
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
        read = models.read(models.models.values()).union(REQUEST_INPUTS, OTHERS, FLAGS)
    else:
        read = models.read([models.step_model if of == "step" else models.require(of)])
    numbers = [name for name, kind in frame.schema.items() if kind.is_numeric() and name not in read]
    hints = {name: did_you_mean(name, read) for name in numbers}
    return {
        f"{name[:MAX_NAME_SHOWN]} ({hint})" if hint else name[:MAX_NAME_SHOWN]: bool(hint)
        for name, hint in hints.items()
    }


def _frame(rows: Any) -> pl.DataFrame:
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


OUTPUTS = (PREDICTED, "low_us", "high_us", "out_of_range")
"""Columns that are added to steps and to rows of features."""

FLAGS = {"prompt": "prompt_tokens", "output": "output_tokens"}
"""Flags of requests to the inputs that have another name."""

MAX_PREFILL_STEPS = 5_000_000
"""Steps of all prompts together."""


# -- rows of one model -----------------------------------------------------------------------------------


def predict_rows(model: Model, rows: pl.DataFrame) -> pl.DataFrame:
    """Add `predicted_us`, `low_us`, `high_us` and `out_of_range` (null inside the training range) to a frame.

    Args:
        model: The model; a boundary model as for a consumer without a step clock.
        rows: Its features, or the columns they are computed from. A null gives a null prediction.

    Raises:
        UsageError: A column is missing or not numeric.
    """
    return _predict(CompiledModel(model), rows, rows)


def _predict(
    compiled: CompiledModel, rows: pl.DataFrame, inputs: pl.DataFrame, beyond: Sequence[pl.Expr] = ()
) -> pl.DataFrame:
    """Add predictions to `rows`, made from the columns of `inputs`, row by row of the same.

    Args:
        compiled: The model.
        rows: The rows that predictions are added to.
        inputs: The columns that predictions are made from.
        beyond: Expressions that name inputs outside their training range, null inside it.
    """
    computed = compiled.computed(inputs, also=["prefill_tokens", *compiled.unmodeled])
    predicted, q = compiled.expression(), _p90(compiled, computed.columns) / 100
    outside = _listed([*beyond, _out_of_range(compiled, computed.columns)])
    outputs = {
        "predicted_us": predicted,
        # The held-out errors are from rows in the training range, so they do not apply outside it.
        "low_us": pl.when(outside.is_null()).then(predicted / (1 + q)),
        "high_us": pl.when(outside.is_null() & (q < 1)).then(predicted / (1 - q)),
        "out_of_range": outside,
    }
    # `with_columns` gives every row the prediction of a constant model; `select` would return one row.
    return _joined(rows, computed.with_columns(**outputs).select(OUTPUTS))


def _joined(rows: pl.DataFrame, predictions: pl.DataFrame) -> pl.DataFrame:
    # Predicting a frame twice would otherwise silently keep one of the two predictions.
    if clash := [c for c in predictions.columns if c in rows.columns]:
        raise UsageError(f"the rows have a column {clash[0]} already", hint="rename it")
    return rows.hstack(predictions)


def _p90(compiled: CompiledModel, columns: Collection[str]) -> pl.Expr:
    """Return the held-out 90th percentile of the group each row belongs to, as `predict_row` takes it."""

    def of(group: str | None) -> pl.Expr:
        return pl.lit(p90_ape_pct(compiled.model, group), pl.Float64)

    if isinstance(compiled.model, RegimesModel | BoundaryModel):
        return compiled.by_regime([of(name) for name in linear_forms(compiled.model)])
    # A model without features of prompts was still validated on both kinds of steps.
    prefill = pl.col("prefill_tokens") if "prefill_tokens" in columns else pl.lit(None, pl.Float64)
    by_prefill = pl.when(prefill > 0).then(of("mixed")).otherwise(of("decode_only"))
    return pl.when(prefill.is_null()).then(of(None)).otherwise(by_prefill)


def _out_of_range(compiled: CompiledModel, columns: Collection[str]) -> pl.Expr:
    """Name the features outside the training range, or else those without a term; null if all are inside.

    A prediction below 0 is named among them.
    """
    unmodeled = {name: ends for name, ends in compiled.unmodeled.items() if name in columns}
    forms = linear_forms(compiled.model).values()
    of_terms = [_outside_of(line_expression(form.intercept, form.terms), form.terms) for form in forms]
    return pl.coalesce(compiled.by_regime(of_terms), _names_outside(unmodeled))


def _outside_of(line: pl.Expr, terms: Iterable[Term]) -> pl.Expr:
    ranges = {t.feature: t.training_range for t in terms if t.training_range is not None}
    return _names_outside(ranges, pl.when(line < 0).then(pl.lit(PREDICTED)))


def _names_outside(ranges: Mapping[str, tuple[float, float]], *also: pl.Expr) -> pl.Expr:
    named = [pl.when(~pl.col(n).is_between(*ends)).then(pl.lit(n)) for n, ends in ranges.items()]
    return _listed([*named, *also])


def _listed(texts: Sequence[pl.Expr]) -> pl.Expr:
    """Join the texts that are not null; null if all are."""
    if not texts:
        return pl.lit(None, pl.String)
    text = pl.concat_str(texts, separator=", ", ignore_nulls=True)
    return pl.when(text != "").then(text)


# -- steps -----------------------------------------------------------------------------------------------


def predict_steps(models: DeploymentModels, rows: pl.DataFrame) -> pl.DataFrame:
    """Predict steps given as timeline columns or by `workload.STEP_INPUTS`.

    Raises:
        UsageError: As `predict_rows`, or the server does not run one of the steps; then no step is predicted.
    """
    _require_possible(models, "step", rows, (*STEP_INPUTS, *STEP_COLUMNS))
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
    described = _described_steps(models, rows)
    if models.usual_kv_usage is not None and not {"num_gpu_blocks", "kv_usage_ratio"} & set(rows.columns):
        described = described.with_columns(kv_usage_ratio=pl.lit(models.usual_kv_usage))
    # Raise for an unknown setting, as for a single step: nulls would hide which setting is missing.
    unknown = {name for name, value in models.server.items() if value is None and name not in rows.columns}
    if lacking := sorted(compiled.formulas.inputs(compiled.features, described.columns) & unknown):
        raise compiled.lacks(lacking, set(described.columns) - unknown)
    # A term that is the same input by another name is reported already.
    of_terms = {STEP_COLUMNS.get(t.feature) for t in terms_of(model) if t.training_range is not None}
    return _predict(compiled, rows, described, _beyond(models, "step", set(rows.columns) - of_terms))


def _beyond(
    models: DeploymentModels, of: Literal["step", "request"], columns: Collection[str]
) -> Sequence[pl.Expr]:
    """Name the inputs outside their training range, as `DeploymentModels.beyond` does; null inside it."""
    ranges = {n: ends for n, ends in models.input_ranges(of).items() if n in columns}
    # A 0 means not given, and an empty engine has no cached tokens.
    is_given = {
        n: pl.col(n) != 0 if of == "step" else pl.col("batch") > 0 if n == "context" else True for n in ranges
    }
    return [pl.when(is_given[n] & ~pl.col(n).is_between(*ends)).then(pl.lit(n)) for n, ends in ranges.items()]


def _require_possible(
    models: DeploymentModels, of: Literal["step", "request"], rows: pl.DataFrame, names: Collection[str]
) -> None:
    """Refuse rows if the server would not run one of them, as `workload.require_possible` does; name the first.

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


def _described_steps(models: DeploymentModels, rows: pl.DataFrame) -> pl.DataFrame:
    """Complete described steps: missing inputs are 0, and the server's settings become columns."""
    zero = [pl.lit(0.0).alias(c) for c in STEP_INPUTS if c not in rows.columns and c != "prefill_reqs"]
    given = rows.with_columns(zero)
    if "prefill_reqs" not in given.columns:
        given = given.with_columns(prefill_reqs=pl.col("prefill").clip(0.0, 1.0))
    return _with_settings(models, models.compiled(models.step_model), given)


def _with_settings(models: DeploymentModels, compiled: CompiledModel, rows: pl.DataFrame) -> pl.DataFrame:
    return rows.with_columns(
        pl.lit(v, pl.Float64).alias(name)
        for name, v in models.known_settings(compiled).items()
        if name not in rows.columns
    )


def _with_stand_ins(compiled: CompiledModel, rows: pl.DataFrame) -> pl.DataFrame:
    """Use the middle of the training range for an unknown feature of a term."""
    middles = stand_ins(terms_of(compiled.model))
    rows = compiled.formulas.frame(rows, middles)
    columns = set(rows.columns)
    return rows.with_columns(
        pl.col(n).fill_null(v) if n in columns else pl.lit(v).alias(n) for n, v in middles.items()
    )


# -- requests --------------------------------------------------------------------------------------------


def predict_requests(models: DeploymentModels, rows: pl.DataFrame) -> pl.DataFrame:
    """Predict requests described by `workload.REQUEST_INPUTS`.

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
    unknown = np.full(given.height, np.nan)
    many = ManyRequests(models, given)
    durations = {f"{name}_us": unknown if value is None else value for name, value in many.compose().items()}
    outside = _distinct(many.outside)
    inside = outside.is_null()
    ranges = [
        pl.when(inside).then(pl.col(f"{name}_us") * ratio).alias(f"{name}_{end}_us")
        for name in LATENCIES
        for end, ratio in zip(("low", "high"), models.range_of(name), strict=True)
    ]
    return pl.DataFrame(durations).fill_nan(None).with_columns(*ranges, out_of_range=outside)


def _distinct(texts: Sequence[pl.Series]) -> pl.Series:
    """Return the names in columns of names, each once per row; null without any."""
    names = pl.concat_str(pl.all(), separator=", ", ignore_nulls=True).str.split(", ")
    named = names.list.unique(maintain_order=True).list.join(", ")
    columns = pl.DataFrame({f"{k}": names for k, names in enumerate(texts)})
    return columns.select(pl.when(named != "").then(named)).to_series()


def completed_requests(models: DeploymentModels, rows: pl.DataFrame) -> pl.DataFrame:
    """Complete described requests; columns may have the names of the flags (`FLAGS`)."""
    rows = rows.with_columns(
        pl.col(flag).alias(name)
        for flag, name in FLAGS.items()
        if flag in rows.columns and name not in rows.columns
    )
    for flag, name in FLAGS.items():
        if name not in rows.columns:
            rest = [c for c in rows.columns if c not in (*FLAGS, *FLAGS.values(), *REQUEST_INPUTS, *OTHERS)]
            close = (f"column {c}: {meant} " for c in rest if (meant := did_you_mean(c, (flag, name))))
            needed = f"columns {' and '.join(FLAGS.values())}, or {' and '.join(FLAGS)}, are needed"
            raise UsageError(f"the rows have no column {name}", hint=f"{next(close, '')}{needed}")
    inputs = [c for c in (*REQUEST_INPUTS, *OTHERS) if c in rows.columns]
    if not all(rows.schema[c].is_numeric() or rows.schema[c] == pl.Null for c in inputs):
        raise UsageError("described requests have values that are not numbers", where=", ".join(inputs))
    numbers = rows.select(pl.col(c).cast(pl.Float64) for c in inputs)
    unknown = np.full(rows.height, np.nan)
    given = dict.fromkeys((*REQUEST_INPUTS, *OTHERS), unknown) | {c: numbers[c].to_numpy() for c in inputs}
    completed = complete(ARRAYS, given, models.server, models.workload)
    described = rows.with_columns(
        pl.Series(name, np.broadcast_to(value, rows.height), pl.Float64) for name, value in completed.items()
    )
    # A NaN from the caller does not stand for an unknown value: null does.
    is_nan = [pl.col(c).is_nan() for c in REQUEST_INPUTS]
    callers = [numbers[c].is_nan().fill_null(value=False) for c in inputs]
    wrong = described.select(pl.any_horizontal(*is_nan, *callers).arg_true()).to_series()
    if wrong.len():
        row = {c: described[c][wrong[0]] for c in REQUEST_INPUTS}
        raise UsageError(
            f"{wrong.len():,} rows describe no request, such as {row}", where=f"row {wrong[0] + 1:,}"
        )
    return described


def _ratio(part: Value, whole: Value) -> Value:
    part, whole = np.broadcast_arrays(part, whole)
    return np.divide(part, whole, out=np.zeros(whole.shape), where=whole != 0)


ARRAYS = Arithmetic(
    least=np.minimum,
    most=np.maximum,
    where=np.where,
    ratio=_ratio,
    is_known=lambda value: ~np.isnan(value),
    filled=lambda value, otherwise: np.where(np.isnan(value), otherwise, value),
    anywhere=lambda condition: bool(np.any(condition)),
)
"""The arithmetic of many requests, in arrays; NaN is unknown."""


class ManyRequests(RequestComposer):
    """Predictions of the requests of a frame."""

    def __init__(self, models: DeploymentModels, rows: pl.DataFrame) -> None:
        """Take the requests, as `completed_requests` completes them."""
        self.rows = rows
        self.outside = [
            rows.with_columns(outside=_listed(_beyond(models, "request", rows.columns)))["outside"]
        ]
        """Inputs outside the training range: columns of names, null if inside."""
        model = models.step_model
        self._step_columns = {t.feature for t in terms_of(model)} | CompiledModel(model).inputs
        """Columns of a step that a row may give directly; they win over values derived from the description."""
        names = (*REQUEST_INPUTS, *OTHERS, *RUNNING, "steps_of_others", "capacity")
        super().__init__(models, ARRAYS, {name: rows[name].to_numpy() for name in names})

    def _evaluate_traffic(self) -> dict[str, Value]:
        names = list(self.models.traffic.nodes)
        frame = self.models.traffic.frame(self._with(self.inputs), names)
        return {name: frame[name].fill_null(0.0).fill_nan(0.0).to_numpy() for name in names}

    def _step(self, stated: Mapping[str, Value]) -> Value:
        """Predict a step of every request; NaN where it is unknown."""
        compiled = self.models.compiled(self.models.step_model)
        given = self._with(stated)
        steps = given.select(n for n in given.columns if n in self._step_columns or n in stated)
        return self._predicted(compiled, _described_steps(self.models, steps))

    def _prefill(self) -> Value:
        budget = np.broadcast_to(self.inputs["budget"], self.rows.height)
        left = self.inputs["prompt_tokens"] - self.inputs["cached"]
        counts = np.maximum(np.ceil(left / budget), 1.0)
        if counts.sum() > MAX_PREFILL_STEPS:
            raise UsageError(f"the prompts take more than {MAX_PREFILL_STEPS:,} steps in total")
        # One row per step: `request` is the request it belongs to, `k` its number.
        request = np.repeat(np.arange(counts.size), counts.astype(np.int64))
        k = np.arange(request.size) - np.repeat(np.cumsum(counts) - counts, counts.astype(np.int64))
        steps = copy(self)
        steps.rows, steps.outside = self.rows[request], []
        steps.inputs, steps.traffic = (
            {name: np.broadcast_to(value, counts.size)[request] for name, value in values.items()}
            for values in (self.inputs, self.traffic)
        )
        prefill = np.bincount(request, weights=steps.prompt_step(k), minlength=counts.size)
        named = pl.DataFrame({"request": request, "outside": _distinct(steps.outside)}).drop_nulls()
        by_request = named.group_by("request").agg(
            pl.col("outside").unique(maintain_order=True).str.join(", ")
        )
        every = pl.DataFrame({"request": np.arange(counts.size)})
        self.outside.append(
            every.join(by_request, on="request", how="left", maintain_order="left")["outside"]
        )
        return prefill

    def _overhead(
        self, target: targets.Target, inputs: Mapping[str, Value], *, noted: bool = True
    ) -> Value | None:
        model = self.models.models.get(target.model)
        if model is None:
            return None
        compiled = self.models.compiled(model)
        idle, cycle = self.inputs["batch"] == 0, inputs["decode_cycle_us"]
        # No step runs in an idle engine: values computed from its time are unknown.
        current = np.where(idle, np.nan, np.nan if cycle is None else cycle)
        given = self._with({**inputs, "decode_cycle_us": current})
        rows = _with_settings(
            self.models, compiled, given.with_columns(pl.col("decode_cycle_us").fill_nan(None))
        )
        if not isinstance(model, BoundaryModel):
            return self._predicted(compiled, rows, noted=noted)
        line, terms = line_expression(model.work.intercept, model.work.terms), model.work.terms
        work = self._evaluated(
            compiled.computed(rows, features=[t.feature for t in terms]),
            line.clip(lower_bound=0.0),
            _outside_of(line, terms) if noted else None,
        )
        expected, _, _ = expected_at_boundary(model, work, current, np.maximum)
        return np.where(idle, work, expected)

    def _beyond(self, name: str, where: Value, text: Callable[[], str]) -> None:  # noqa: ARG002 - rows keep only the names
        holds = pl.Series(np.broadcast_to(where, self.rows.height))
        self.outside.append(pl.select(pl.when(holds).then(pl.lit(name))).to_series())

    def _predicted(self, compiled: CompiledModel, rows: pl.DataFrame, *, noted: bool = True) -> Value:
        features = compiled.computed(_with_stand_ins(compiled, rows), also=compiled.unmodeled)
        outside = _out_of_range(compiled, features.columns) if noted else None
        return self._evaluated(features, compiled.expression(), outside)

    def _evaluated(self, rows: pl.DataFrame, expression: pl.Expr, outside: pl.Expr | None) -> Value:
        # `with_columns` gives every row the prediction of a constant model; `select` would return one row.
        predictions = rows.with_columns(predicted=expression.cast(pl.Float64), outside=outside)
        if outside is not None:
            self.outside.append(predictions["outside"])
        return predictions["predicted"].to_numpy()

    def _with(self, values: Mapping[str, Value]) -> pl.DataFrame:
        """Return the rows with values as columns."""
        return self.rows.with_columns(
            pl.Series(name, np.broadcast_to(value, self.rows.height), pl.Float64)
            for name, value in values.items()
        )
