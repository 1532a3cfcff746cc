"""Predict the rows of a frame: what `predict` computes for one row, as column operations on the same compiled models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from tracefit.coefficients.compiled import (
    CompiledModel,
    expected_expression,
    linear_forms,
    terms_of,
)
from tracefit.coefficients.model import BoundaryModel, RegimesModel
from tracefit.coefficients.predict import p90_ape_pct, stand_ins
from tracefit.coefficients.workload import (
    OTHERS,
    REQUEST_INPUTS,
    RUNNING,
    STEP_INPUTS,
    others_like,
    prompt_step_groups,
    running_like,
)
from tracefit.errors import UsageError

if TYPE_CHECKING:
    from tracefit.coefficients.model import LinearForm, Model
    from tracefit.coefficients.predict import ScopeModels

OUTPUTS = ("predicted_us", "low_us", "high_us", "out_of_range")
"""Columns that are added to steps and to rows of features."""

DURATIONS = ("admission_us", "queue_wait_us", "prefill_us", "itl_us", "departure_us", "ttft_us", "e2e_us")
"""Columns that are added to requests; null where there is no model, and in what needs it."""

MAX_PREFILL_STEPS = 5_000_000
"""Steps of all prompts together."""


# -- rows of one model -----------------------------------------------------------------------------------


def predict_rows(model: Model, rows: pl.DataFrame) -> pl.DataFrame:
    """Add `predicted_us`, `low_us`, `high_us` and `out_of_range` (null inside the training range) to a frame.

    Args:
        model: The model; a boundary model as for a consumer without a step clock.
        rows: Its features, or the columns they are computed from. A null in one gives a null prediction.

    Raises:
        UsageError: A column is missing, or does not hold numbers.
    """
    return _predict(CompiledModel(model), rows, rows)


def _predict(compiled: CompiledModel, rows: pl.DataFrame, inputs: pl.DataFrame) -> pl.DataFrame:
    """Add predictions to `rows`, made from the columns of `inputs`, row by row of the same."""
    computed = compiled.computed(inputs, also=["prefill_tokens"])
    if clash := [c for c in OUTPUTS if c in rows.columns]:
        raise UsageError(f"the rows have a column {clash[0]} already", hint="rename it")
    predicted, q = compiled.expression(), _p90(compiled, "prefill_tokens" in computed.columns) / 100
    outside = _out_of_range(compiled)
    outputs = {
        "predicted_us": predicted,
        # The held-out errors are those of rows in the training range: outside they say nothing.
        "low_us": pl.when(outside.is_null()).then(predicted / (1 + q)),
        "high_us": pl.when(outside.is_null() & (q < 1)).then(predicted / (1 - q)),
        "out_of_range": outside,
    }
    # `with_columns` gives the prediction of a constant to every row, as `select` alone would not.
    return rows.hstack(computed.with_columns(**outputs).select(OUTPUTS))


def _p90(compiled: CompiledModel, by_prefill: bool) -> pl.Expr:
    """Return the held-out 90th percentile of the group each row belongs to, as `predict_row` takes it."""

    def of(group: str | None) -> pl.Expr:
        return pl.lit(p90_ape_pct(compiled.model, group), pl.Float64)

    if isinstance(compiled.model, RegimesModel | BoundaryModel):
        return compiled.by_regime([of(name) for name in linear_forms(compiled.model)])
    if not by_prefill:
        return of(None)
    prefill = pl.col("prefill_tokens")
    return (
        pl.when(prefill.is_null())
        .then(of(None))
        .when(prefill > 0)
        .then(of("mixed"))
        .otherwise(of("decode_only"))
    )


def _out_of_range(compiled: CompiledModel) -> pl.Expr:
    """Name the features outside the training range, null where there is none."""
    return compiled.by_regime([_out_of_range_of(f) for f in linear_forms(compiled.model).values()])


def _out_of_range_of(form: LinearForm) -> pl.Expr:
    named = [
        pl.when(~pl.col(t.feature).is_between(*t.training_range)).then(pl.lit(t.feature))
        for t in form.terms
        if t.training_range is not None
    ]
    if not named:
        return pl.lit(None, pl.String)
    text = pl.concat_str(named, separator=", ", ignore_nulls=True)
    return pl.when(text != "").then(text)


# -- steps -----------------------------------------------------------------------------------------------


def predict_steps(models: ScopeModels, rows: pl.DataFrame) -> pl.DataFrame:
    """Predict steps given as timeline columns or as a person describes them (`workload.STEP_INPUTS`).

    Raises:
        UsageError: As `predict_rows`.
    """
    model = models.step_model
    if not any(c in rows.columns for c in STEP_INPUTS):
        return predict_rows(model, rows)
    return _predict(models.compiled(model), rows, _described_steps(models, rows))


def _described_steps(models: ScopeModels, rows: pl.DataFrame) -> pl.DataFrame:
    """Complete described steps: what is not described is 0, and the server's settings are columns."""
    zero = [pl.lit(0.0).alias(c) for c in STEP_INPUTS if c not in rows.columns and c != "prefill_reqs"]
    given = rows.with_columns(zero)
    if "prefill_reqs" not in given.columns:
        given = given.with_columns(prefill_reqs=pl.col("prefill").clip(0.0, 1.0))
    return _with_settings(models, models.compiled(models.step_model), given)


def _with_settings(models: ScopeModels, compiled: CompiledModel, rows: pl.DataFrame) -> pl.DataFrame:
    return rows.with_columns(
        pl.lit(v, pl.Float64).alias(name)
        for name, v in models.known_settings(compiled).items()
        if name not in rows.columns
    )


def _with_stand_ins(compiled: CompiledModel, rows: pl.DataFrame) -> pl.DataFrame:
    """Let the middle of the training range stand in for the feature of a term that is not known."""
    middles = stand_ins(terms_of(compiled.model))
    rows = compiled.formulas.frame(rows, middles)
    known = set(rows.columns)
    return rows.with_columns(
        pl.col(n).fill_null(v) if n in known else pl.lit(v).alias(n) for n, v in middles.items()
    )


# -- requests --------------------------------------------------------------------------------------------


def predict_requests(models: ScopeModels, rows: pl.DataFrame) -> pl.DataFrame:
    """Predict requests described by `workload.REQUEST_INPUTS`; adds the columns of `DURATIONS`.

    Args:
        models: Models of one scope.
        rows: prompt_tokens and output_tokens at least; further columns and features win over what follows from these.

    Raises:
        UsageError: A column is missing or has values that make no sense, or there is no model of step times.
    """
    given = _with_traffic(models, _inputs(models, rows))
    busy = pl.col("batch") > 0
    mean_us, met_us = _cycle(models, given, "batch", pl.col("context"))
    given = given.with_columns(decode_cycle_us=met_us, mean_cycle_us=mean_us)
    given = given.with_columns(pl.when(busy).then(pl.col("decode_cycle_us", "mean_cycle_us")))
    # The request decodes with the others, halfway through its output on average.
    own = pl.col("prompt_tokens") + pl.col("output_tokens") / 2
    shared = (pl.col("beside") * pl.col("context") + own) / pl.col("with_itself")
    prefill = _prefill(models, given)
    if models.setting("async_scheduling") is True:
        prefill = prefill + given["mean_cycle_us"].fill_null(0.0)
    durations = pl.DataFrame(
        {
            "admission_us": _overhead(models, "admission", given),
            "queue_wait_us": _overhead(models, "queue_wait", given),
            "prefill_us": prefill,
            "itl_us": _cycle(models, given, "with_itself", shared)[0],
            "departure_us": _overhead(models, "departure", given.with_columns(batch="with_itself")),
            "tokens": given["output_tokens"],
        }
    )
    ttft = pl.col("admission_us") + pl.col("queue_wait_us") + pl.col("prefill_us")
    durations = durations.with_columns(ttft_us=ttft, e2e_us=ttft + (pl.col("tokens") - 1) * pl.col("itl_us"))
    return rows.hstack(durations.select(DURATIONS))


def _with_traffic(models: ScopeModels, given: pl.DataFrame) -> pl.DataFrame:
    """Add the requests beside each one, what their prompts make of the steps, and the room they leave for prompts."""
    slots, limit = models.server["max_num_seqs"], models.server["max_num_batched_tokens"]
    cut = limit is not None and models.setting("enable_chunked_prefill") is not False
    beside = pl.col("batch") if slots is None else pl.col("batch").clip(0.0, max(slots - 1, 0.0))
    given = given.with_columns(beside=beside).with_columns(
        with_itself=pl.col("beside") + 1,
        budget=(pl.lit(limit) - pl.col("beside")).clip(lower_bound=1.0) if cut else pl.lit(float("inf")),
    )
    names = list(models.traffic.nodes)
    return models.traffic.frame(given, names).with_columns(pl.col(names).fill_null(0.0).fill_nan(0.0))


def _cycle(
    models: ScopeModels, given: pl.DataFrame, batch: str, context: pl.Expr
) -> tuple[pl.Series, pl.Series]:
    """Return the mean time of a step, those with prompts of others among them, and of one that an arrival meets."""
    groups = range(prompt_step_groups(models.workload))

    def with_prompts(tokens: str, reqs: str) -> pl.Series:
        return _steps(models, given, batch, context, prefill=pl.col(tokens), prefill_reqs=pl.col(reqs))

    mixed = [with_prompts(f"prompt_step_tokens_{k}", f"prompt_step_reqs_{k}") for k in groups]
    steps = pl.DataFrame(
        {
            "alone": _steps(models, given, batch, context),
            "with_mean": with_prompts("mean_prompt_tokens", "mean_prompt_reqs"),
            "share": given["prompt_step_share"],
            "mean_share": given["mean_prompt_share"],
            **{f"mixed_{k}": us for k, us in zip(groups, mixed, strict=True)},
        }
    )
    share, alone, of_mean, with_mean = (pl.col(c) for c in ("share", "alone", "mean_share", "with_mean"))
    several = share > 0
    average = pl.mean_horizontal(f"mixed_{k}" for k in groups)
    mean = pl.when(several).then((1 - share) * alone + share * average).otherwise(alone)
    simple = (1 - of_mean) * alone + of_mean * with_mean
    squares = (1 - of_mean) * alone**2 + of_mean * with_mean**2
    met = pl.when(simple == 0).then(0.0).when(several).then(squares / simple).otherwise(alone)
    found = steps.select(mean=mean, met=met)
    return found["mean"], found["met"]


def _inputs(models: ScopeModels, rows: pl.DataFrame) -> pl.DataFrame:
    """Complete described requests, as `RequestInput.inputs` does."""
    for name in ("prompt_tokens", "output_tokens"):
        if name not in rows.columns:
            raise UsageError(f"the rows have no column {name}", hint="prompt and output tokens are needed")
    clash = [c for c in DURATIONS if c in rows.columns]
    if clash:
        raise UsageError(f"the rows have a column {clash[0]} already", hint="rename it")
    known = [c for c in REQUEST_INPUTS if c in rows.columns]
    known += [c for c in OTHERS if c in rows.columns]
    if not all(rows.schema[c].is_numeric() or rows.schema[c] == pl.Null for c in known):
        raise UsageError("described requests are not all of numbers", where=", ".join(known))
    given = rows.with_columns(pl.col(c).cast(pl.Float64) for c in known)
    given = given.with_columns(pl.lit(None, pl.Float64).alias(c) for c in REQUEST_INPUTS if c not in known)
    given = given.with_columns(pl.col("queue", "cached").fill_null(0.0))
    given = given.with_columns(
        stated=pl.any_horizontal(
            pl.lit(value=False), *(pl.col(c).is_not_null() for c in OTHERS if c in known)
        )
    )
    given = given.with_columns(_others(models, given)).with_columns(_running(models)).drop("stated")
    given = given.with_columns(context=pl.col("context").fill_null(pl.col("others_context")))
    server = models.server
    slots, blocks, size = (server[n] for n in ("max_num_seqs", "num_gpu_blocks", "block_size"))
    limits = [pl.lit(slots, pl.Float64)] if slots is not None else []
    if blocks is not None and size is not None:
        limits.append(((blocks - 1) / (pl.col("context") / size + 0.5)).floor())
    full = pl.min_horizontal(*limits).clip(lower_bound=1.0) if limits else pl.lit(None, pl.Float64)
    given = given.with_columns(
        batch=pl.coalesce("batch", pl.when(pl.col("queue") == 0).then(0.0).otherwise(full))
    )
    wrong = given.filter(
        (pl.min_horizontal(REQUEST_INPUTS) < 0)
        | (pl.col("output_tokens") < 1)
        | (pl.col("cached") >= pl.col("prompt_tokens"))
        | pl.any_horizontal(pl.col(c).is_null() | pl.col(c).is_nan() for c in REQUEST_INPUTS)
    )
    if wrong.height:
        row = {c: wrong[c][0] for c in REQUEST_INPUTS}
        raise UsageError(f"{wrong.height} rows describe no request, such as {row}")
    return given


def _others(models: ScopeModels, given: pl.DataFrame) -> list[pl.Expr]:
    """Return the columns of `OTHERS`: as given, else of the mean request trained on, else as the request's own."""
    mean = others_like(models.workload)
    own = dict(zip(OTHERS, ("prompt_tokens", "cached", "output_tokens", "output_tokens"), strict=True))
    like = {name: pl.col(own[name]) if mean is None else pl.lit(mean[name]) for name in OTHERS}
    filled = {
        name: pl.col(name).fill_null(value) if name in given.columns else value
        for name, value in like.items()
    }
    unknown = pl.lit(float("inf")) if mean is None else filled["others_output"]
    steps = pl.col("others_output").fill_null(unknown) if "others_output" in given.columns else unknown
    return [*(value.alias(name) for name, value in filled.items()), steps.alias("steps_of_others")]


def _running(models: ScopeModels) -> list[pl.Expr]:
    """Return the columns of `RUNNING`: as measured in training unless the row itself states what the others are like."""
    measured = running_like(models.workload)
    halfway = pl.col("others_output") / 2
    of_means = (pl.col("others_prompt") + halfway, (pl.col("others_max") - halfway).clip(lower_bound=0.0))
    if measured is None:
        return [value.alias(name) for name, value in zip(RUNNING, of_means, strict=True)]
    return [
        pl.when("stated").then(value).otherwise(measured[name]).alias(name)
        for name, value in zip(RUNNING, of_means, strict=True)
    ]


def _steps(
    models: ScopeModels, given: pl.DataFrame, batch: str, context: pl.Expr, **more: pl.Expr
) -> pl.Series:
    """Predict a step per row: `batch` names the column of its decodes, `more` are further inputs of the step."""
    compiled = models.compiled(models.step_model)
    own = ({t.feature for t in terms_of(compiled.model)} | CompiledModel(compiled.model).inputs) - {
        "batch",
        "context",
    }
    named = {n: pl.col(n) for n in own if n in given.columns}
    steps = _described_steps(models, given.select(batch=pl.col(batch), context=context, **more, **named))
    return _predict(compiled, steps, _with_stand_ins(compiled, steps))["predicted_us"]


def _prefill(models: ScopeModels, given: pl.DataFrame) -> pl.Series:
    """Add up the steps of every prompt, cut by what running requests leave of the token budget."""
    left = pl.col("prompt_tokens") - pl.col("cached")
    chunks = pl.max_horizontal((left / pl.col("budget")).ceil(), 1.0)
    rows = given.with_row_index("request").with_columns(chunks=chunks.cast(pl.Int64))
    if int(rows["chunks"].sum() or 0) > MAX_PREFILL_STEPS:
        raise UsageError(f"the prompts take more than {MAX_PREFILL_STEPS:,} steps together")
    rows = rows.with_columns(chunk=pl.int_ranges(0, "chunks")).explode("chunk")
    # Without a budget there is one chunk, and 0 times it would not be a number.
    done = pl.when(pl.col("chunk") == 0).then(0.0).otherwise(pl.col("chunk") * pl.col("budget"))
    own = pl.min_horizontal(pl.col("budget"), left - done)
    chunk = {
        "prefill": pl.min_horizontal(own + pl.col("prompt_tokens_per_step"), "budget"),
        "prefill_reqs": 1 + pl.col("prompts_per_step"),
        "prefill_done": pl.col("cached") + done,
    }
    us = _steps(models, rows, "beside", pl.col("context"), **chunk)
    sums = rows.select("request", us=us).group_by("request", maintain_order=True).agg(pl.col("us").sum())
    return sums["us"]


def _overhead(models: ScopeModels, name: str, given: pl.DataFrame) -> pl.Series:
    """Predict an overhead of every request; null where there is no model of it."""
    model = models.models.get(f"alpha.{name}")
    if model is None:
        return pl.Series([None] * given.height, dtype=pl.Float64)
    compiled = models.compiled(model)
    rows = _with_settings(models, compiled, given)
    if not isinstance(model, BoundaryModel):
        return _predict(compiled, rows, _with_stand_ins(compiled, rows))["predicted_us"]
    features = [t.feature for t in model.work.terms]
    compiled.require(features, rows.columns)
    expected = expected_expression(model, pl.col("decode_cycle_us"), idle=pl.col("batch") == 0)
    return compiled.formulas.frame(rows, features).select(us=expected).to_series()
