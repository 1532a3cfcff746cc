"""Compose a request's latencies from predicted step times and overheads, and hold them against the measured ones.

TTFT = admission + queue wait + steps to the first token; ITL = steps after it / (tokens - 1); E2E = TTFT + (tokens - 1)
ITL.

`given_state` takes the queue and the batches that were measured and sums the predicted times of exactly the steps the
request was in: its error is that of the models. The error of `predict` on arrival is a different one: `latency_errors`
takes its predictions, which only the finished coefficient files give.

`compose_latencies` predicts the requests that are in the hold-out of every model they need: `state`, and `refit`, the
same with the step-time model refitted on the hold-out. `latency_errors` gives errors overall, per run and per workload
phase, and counts requests without a prediction by reason.
"""

from __future__ import annotations

import operator
from functools import reduce
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import polars as pl
from msgspec.structs import replace

from tracefit.features import training
from tracefit.features.sets import FeatureSet
from tracefit.fit.boundary import predict_admission
from tracefit.fit.fitted import predict_regimes
from tracefit.fit.holdout import refit_on_holdout
from tracefit.fit.load import with_phases
from tracefit.fit.results import (
    ComposedLatencies,
    Latency,
    LatencyErrors,
    PhaseErrors,
)
from tracefit.fit.validation import distribution, measure
from tracefit.models import targets
from tracefit.models.validation import NO_ROWS, Metrics
from tracefit.statistics import sum_if_all_known
from tracefit.tables.requests import is_cut_off
from tracefit.tables.schema import ENGINE, REQUEST, SERVER
from tracefit.timeline.step_sums import StepSums

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tracefit.fit.fitted import DeploymentTables, FittedModel, LinearFit
    from tracefit.server.context import Deployment
    from tracefit.statistics import Vector

# -- one request from its steps --------------------------------------------------------------------------


def given_state(
    requests: pl.DataFrame, steps: pl.DataFrame, waits: pl.DataFrame, lags: Mapping[tuple[str, str], int]
) -> pl.DataFrame:
    """Sum the predicted times of the steps each request was in, and its traced waits.

    A wait ends at a step start: the queue wait lasts from QUEUED to the start of the first step, the wait after a
    preemption from the start of the step that preempted to the start of the step that resumed. With scheduling a step
    ahead (lag 1) step k executes in the cycle after its own, so that tokens come a cycle later.

    Args:
        requests: The `requests` table.
        steps: Columns of the engine, step_id, ts_start_ns, predicted_us (null where the batch is not known).
        waits: `requeue_waits`.
        lags: (run_id, server) to steps that scheduling runs ahead of execution.

    Returns:
        `requests` with state_queue_wait_us (queue), state_prefill_us and state_decode_us (without the waits after a
        preemption), state_requeue_before_us and state_requeue_after_us (the first token); null where a step is not
        known.
    """
    sums, starts = StepSums(steps, "predicted_us"), steps.select(*ENGINE, "step_id", "ts_start_ns")
    rows = training.with_lag(requests, lags)
    rows = rows.join(_requeued(waits, sums, starts, rows), on=REQUEST, how="left", maintain_order="left")
    begin, lag = pl.col("first_scheduled_step"), pl.col("lag")
    token, last = pl.col("first_token_step") + lag, pl.col("finished_step") + lag
    prefill, decode = (
        sums.between(rows, after, until, missing="unknown")["predicted_us"]
        for after, until in ((begin - 1, token), (token, last))
    )

    def requeued(name: str) -> pl.Expr:
        return pl.when(pl.col("requeues").is_null()).then(0.0).otherwise(pl.col(name))

    return _started(rows, starts, "first_scheduled_step", "begin_ns").select(
        *requests.columns,
        state_queue_wait_us=(pl.col("begin_ns") - pl.col("queued_ns")) / 1e3,
        state_prefill_us=prefill - requeued("skipped_before_us"),
        state_decode_us=decode - requeued("skipped_after_us"),
        state_requeue_before_us=requeued("requeue_before_us"),
        state_requeue_after_us=requeued("requeue_after_us"),
    )


def _started(rows: pl.DataFrame, starts: pl.DataFrame, step: str, name: str) -> pl.DataFrame:
    at = starts.rename({"step_id": step, "ts_start_ns": name})
    return rows.join(at, on=[*ENGINE, step], how="left", maintain_order="left")


def _requeued(waits: pl.DataFrame, sums: StepSums, starts: pl.DataFrame, requests: pl.DataFrame) -> pl.DataFrame:
    """Sum each request's traced waits after preemptions, and the predicted time of the steps these waits skip.

    With scheduling ahead, the step before the preemption still executes `lag` cycles later: the wait begins after it.
    """
    facts = requests.select(*REQUEST, "first_token_step", "lag").unique(REQUEST)
    begin = pl.min_horizontal(pl.col("preempted_step") + pl.col("lag"), "resumed_step")
    rows = waits.rename({"request_id": "core_request_id"}).join(facts, on=REQUEST, how="left")
    rows = _started(rows.with_columns(from_step=begin), starts, "from_step", "lost_ns")
    rows = _started(rows, starts, "resumed_step", "back_ns")
    # The step that resumes the request is not part of the wait.
    skipped = sums.between(rows, pl.col("from_step") - 1, pl.col("resumed_step") - 1, missing="unknown")
    rows = rows.with_columns(
        skipped_us=skipped["predicted_us"], requeue_us=(pl.col("back_ns") - pl.col("lost_ns")) / 1e3
    )
    # A preemption before the first token lengthens TTFT, a later one the time between tokens.
    before = (pl.col("preempted_step") <= pl.col("first_token_step")).fill_null(value=True)
    return rows.group_by(REQUEST).agg(
        pl.len().alias("requeues"),
        *(
            sum_if_all_known(pl.col(f"{name}_us").filter(side)).alias(f"{name}_{when}_us")
            for name in ("requeue", "skipped")
            for when, side in (("before", before), ("after", ~before))
        ),
    )


# -- all requests of a deployment -----------------------------------------------------------------------------


_DEFINITIONS = {
    "ttft": "FIRST_TOKEN - ARRIVED",
    "itl": "(FINISHED - FIRST_TOKEN) / (output tokens - 1)",
    "e2e": "FINISHED - ARRIVED = TTFT + (output tokens - 1) * ITL",
    "client": "DEPARTED - ARRIVED = E2E + departure",
    "prefill": "FIRST_TOKEN - first SCHEDULED, without waits after a preemption",
    "execution": "FINISHED - first SCHEDULED, without waits after a preemption: the steps the request was in",
}
"""Latencies, each measured between stamps of the server's own events."""

_UNTIL_FIRST_TOKEN = ("ttft", "prefill")
"""Latencies that a request which was cut off has too."""


def compose_latencies(
    deployment: Deployment, tables: DeploymentTables, models: Sequence[FittedModel], *, whole_steps: bool
) -> ComposedLatencies:
    """Compose the latencies of every request from the fitted models.

    A request is held out when each of its intervals began in the hold-out of the model for that interval: its arrival
    for the admission, its first step for the step time, its end for the departure.
    """
    beta = _step_model(models)
    if beta is None:
        return ComposedLatencies(None, "there is no model of the step time")
    if not whole_steps:
        return ComposedLatencies(None, "step.duration_us, beta's target, is not the time of a step here")
    if not tables.requests.height:
        return ComposedLatencies(None, "the traces hold no journeys of requests")
    requests = split_requests(tables.requests, models)
    if not (requests["split"] == "holdout").any() or not (requests["split"] == "train").any():
        return ComposedLatencies(None, "no request lies in the hold-out of every model, or none before it")
    steps = _predicted_steps(deployment, tables, beta)
    waits, lags = tables.requeue_waits, tables.lags
    refitted = given_state(requests, steps.with_columns(predicted_us="refit_us"), waits, lags)
    rows = given_state(requests, steps, waits, lags).with_columns(
        refit_prefill_us=refitted["state_prefill_us"], refit_decode_us=refitted["state_decode_us"]
    )
    return ComposedLatencies(_composed(_with_overheads(rows, tables, models)))


def latency_errors(composed: ComposedLatencies, predicted: pl.DataFrame | None) -> dict[str, Latency]:
    """Evaluate composed latencies on the held-out requests; empty without any.

    Args:
        composed: See `compose_latencies`.
        predicted: Predictions of `predict` by `REQUEST`: ttft_us, itl_us, e2e_us; null if it has no prediction.
    """
    if composed.rows is None:
        return {}
    rows = composed.rows
    if predicted is not None:
        columns = {f"predicted_{name}": f"{name}_us" for name in targets.LATENCY_TITLES}
        keyed = predicted.drop_nulls("core_request_id").unique(REQUEST).select(*REQUEST, **columns)
        rows = rows.join(keyed, on=REQUEST, how="left", maintain_order="left")
    unknown = {f"predicted_{name}" for name in _DEFINITIONS} - set(rows.columns)
    rows = rows.with_columns(pl.lit(None, pl.Float64).alias(name) for name in unknown)
    rows = with_phases(rows, "at_ns", rows)
    return {name: _latency(rows, name) for name in _DEFINITIONS}


def split_requests(requests: pl.DataFrame, models: Sequence[FittedModel]) -> pl.DataFrame:
    """Add `at_ns` and `split`: `holdout` where no model has trained on any interval of the request, `train` where all
    may have.

    Requests in between are `partly` and count on neither side: they arrived in the training part and were computed in
    the hold-out.
    """
    rows = requests.with_columns(at_ns=pl.coalesce("arrival_ns", "queued_ns"))
    begins = {target.model: target.begins for target in (*targets.TARGETS, *targets.OF_CLIENTS)}
    sides = []
    for model in models:
        ends = _ends(model).rename({"holdout_from_ns": f"{model.name}_from_ns"})
        rows = rows.join(ends, on=SERVER, how="left", maintain_order="left")
        event = begins.get(model.name, targets.STEP_BEGINS)
        sides.append(pl.col(event) >= pl.col(f"{model.name}_from_ns"))
    # A missing event decides nothing, the others do. A server without rows in any model has no hold-out.
    has_holdout = pl.any_horizontal(pl.lit(value=False), *sides)
    held_out = pl.all_horizontal(has_holdout, *(side.fill_null(value=True) for side in sides))
    trained = pl.all_horizontal(pl.lit(value=True), *(~side.fill_null(value=False) for side in sides))
    split = pl.when(held_out).then(pl.lit("holdout")).when(trained).then(pl.lit("train"))
    return rows.select(*requests.columns, "at_ns", split=split.otherwise(pl.lit("partly")))


def trained_steps(timeline: pl.DataFrame, models: Sequence[FittedModel]) -> pl.DataFrame:
    """Return the steps before the step model's hold-out, or all steps without a step model."""
    beta = _step_model(models)
    if beta is None:
        return timeline
    return _with_training(timeline.sort(*ENGINE, "step_id"), beta).filter("in_training").drop("in_training")


def _step_model(models: Sequence[FittedModel]) -> FittedModel | None:
    return next((model for model in models if targets.is_step_model(model.name)), None)


def _with_training(steps: pl.DataFrame, beta: FittedModel) -> pl.DataFrame:
    """Add `in_training`, whether a step began before the hold-out of the step model; in step order, engine by
    engine.
    """
    rows = steps.join(_ends(beta), on=SERVER, how="left", maintain_order="left")
    # Only steps with an event have a known start. Those between follow the one before, and count too: averages over
    # steps with events would be biased towards prompts.
    began = pl.col("ts_start_ns").forward_fill().over(ENGINE)
    before = (began < pl.col("holdout_from_ns")).fill_null(value=False)
    return rows.with_columns(in_training=before).drop("holdout_from_ns")


def _ends(model: FittedModel) -> pl.DataFrame:
    rows = model.fitted.rows.drop_nulls("holdout_from_ns")
    return rows.group_by(SERVER).agg(pl.col("holdout_from_ns").first())


def _predicted_steps(deployment: Deployment, tables: DeploymentTables, beta: FittedModel) -> pl.DataFrame:
    """Predict every step whose batch is known, as trained and refitted on the hold-out; add `in_training`."""
    timeline = training.with_roofline(tables.timeline, deployment.context)
    constants = training.constants_of(deployment.context)
    features = FeatureSet(beta.feature_set, beta.regimes[0].features)
    rows = _with_training(training.step_rows(timeline, features, constants, tables.lags), beta)
    # With scheduling ahead an idle engine starts with a step in which nothing executes: it lasts as long as schedule().
    empty = pl.col("is_empty").fill_null(value=False)
    is_single = pl.col("in_training") & ~pl.col("idle_after") & (pl.col("interval_steps") == 1)
    empty_us = rows.filter(empty & is_single)["cycle_us"].median() or 0.0
    refitted = replace(beta.fitted, regimes=refit_on_holdout(beta.fitted))
    filled = pl.when(empty).then(pl.lit(empty_us)).when(pl.col("is_empty").is_not_null())
    return rows.select(
        *tables.timeline.columns,
        "in_training",
        predicted_us=filled.then(pl.Series(_step_times(beta.fitted, rows))),
        refit_us=filled.then(pl.Series(_step_times(refitted, rows))),
    )


def _step_times(beta: LinearFit, rows: pl.DataFrame) -> Vector:
    """Predict steps; an unknown feature gets the median of the training rows, as in the fit."""
    features = {t.feature: pl.col(t.feature).cast(pl.Float64) for t in beta.terms}
    medians = beta.rows.filter(split="train").select(value.median() for value in features.values())
    filled = [v.fill_nan(None).fill_null(medians[name].item() or 0.0) for name, v in features.items()]
    return predict_regimes(beta.regimes, rows.with_columns(filled))


def _with_overheads(rows: pl.DataFrame, tables: DeploymentTables, models: Sequence[FittedModel]) -> pl.DataFrame:
    """Add state_<name>_us of every target that does not follow from the steps: the prediction of its model."""
    by_name = {model.name: model for model in models}
    for target in (target for target in targets.TARGETS if not target.follows_from_steps):
        model, column = by_name.get(target.model), f"state_{target.name}_us"
        if model is None:
            rows = rows.with_columns(pl.lit(None, pl.Float64).alias(column))
            continue
        fitted = model.fitted
        if model.boundary:
            predicted = predict_admission(model.boundary, fitted.rows, tables.timeline)
        else:
            predicted = predict_regimes(fitted.regimes, fitted.rows)
        keyed = fitted.rows.select(*REQUEST, pl.Series(column, predicted)).drop_nulls("core_request_id")
        rows = rows.join(keyed.unique(REQUEST), on=REQUEST, how="left", maintain_order="left")
    return rows


def _composed(rows: pl.DataFrame) -> pl.DataFrame:
    """Add the prediction of every latency by both ways: state_ttft, refit_ttft, ..."""
    decoded = pl.col("output_tokens") - 1
    rows = rows.with_columns(execution_us=pl.col("prefill_us") + pl.col("decode_us"))
    before, after = (
        [pl.col(f"state_{target.name}_us") for target in targets.parts_of(latency)] for latency in ("ttft", "client")
    )
    # Only the step times are refitted: `refit` uses the overheads of the trained models.
    for way in ("state", "refit"):
        prefill, decode = pl.col(f"{way}_prefill_us"), pl.col(f"{way}_decode_us")
        until_last = decode + pl.col("state_requeue_after_us")
        ttft = reduce(operator.add, before, pl.col("state_requeue_before_us")) + prefill
        e2e = ttft + until_last
        composed = {
            "ttft": ttft,
            "itl": pl.when(decoded > 0).then(until_last / decoded),
            "prefill": prefill,
            "execution": prefill + decode,
            "e2e": e2e,
            "client": reduce(operator.add, after, e2e),
        }
        rows = rows.with_columns(latency.alias(f"{way}_{name}") for name, latency in composed.items())
    return rows


def _latency(rows: pl.DataFrame, name: str) -> Latency:
    cut_off = is_cut_off() & (name not in _UNTIL_FIRST_TOKEN)
    # Rows are in the order of time, server by server, and so are groups of them.
    rows = rows.with_columns(actual=pl.when(~cut_off).then(f"{name}_us"))
    median = rows.filter(split="train")["actual"].median()
    level = float(median) if isinstance(median, int | float) else None
    partly = int((rows["split"] == "partly").sum())
    holdout = rows.filter(split="holdout")
    evaluated = holdout.drop_nulls("actual")
    return Latency(
        *_errors(evaluated, name, level),
        definition=_DEFINITIONS[name],
        by_run={
            str(run): LatencyErrors(*_errors(rows, name, level))
            for (run,), rows in evaluated.group_by("run_id", maintain_order=True)
        },
        by_phase=tuple(
            PhaseErrors(*_errors(rows, name, level), **cast("dict[str, Any]", phase))
            for (phase,), rows in evaluated.drop_nulls("phase").group_by("phase", maintain_order=True)
        ),
        left_out={**_left_out(holdout, name), **({"partly_in_training": partly} if partly else {})},
        distribution=distribution(evaluated, "actual", f"predicted_{name}", f"state_{name}"),
    )


def _errors(rows: pl.DataFrame, name: str, median: float | None) -> tuple[Metrics, Metrics, Metrics, Metrics]:
    """Return the fields of `LatencyErrors`."""
    actual = rows["actual"].to_numpy().astype(float)

    def against(way: str) -> Metrics:
        predicted = rows[f"{way}_{name}"]
        known = predicted.is_not_null().to_numpy()
        return measure(actual[known], np.maximum(predicted.to_numpy().astype(float)[known], 0.0))

    baseline = NO_ROWS if median is None else measure(actual, np.full(len(actual), median))
    return against("predicted"), against("state"), against("refit"), baseline


def _left_out(holdout: pl.DataFrame, name: str) -> dict[str, int]:
    """Count held-out requests without a prediction given the measured state, each under the first reason that
    applies.
    """
    reason = (
        pl.when(is_cut_off() & (name not in _UNTIL_FIRST_TOKEN))
        .then(pl.lit("cut_off"))
        .when((pl.col("output_tokens") == 1) & (name == "itl"))
        .then(pl.lit("one_token"))
        .when(pl.col("actual").is_null())
        .then(pl.lit("event_missing"))
        .when(pl.col("state_prefill_us").is_null() | pl.col("state_decode_us").is_null())
        .then(pl.lit("steps_not_known"))
        .when(pl.col(f"state_{name}").is_null())
        .then(pl.lit("overhead_not_known"))
    )
    counts = holdout.select(reason=reason).drop_nulls().group_by("reason").len().sort("reason")
    return dict(counts.iter_rows())
