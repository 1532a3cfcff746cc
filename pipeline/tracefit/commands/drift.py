"""Check an old coefficient file on new traces: whether what users see, and the steps behind it, still is what the file
says.

The runs are replayed with the file's models, and TTFT, ITL and E2E compared with the measured ones: a changed limit of
the scheduler moves these although every step takes as long as before. The step times themselves are compared too.
Models of single waits are for information where a replay is possible: it contains their waits.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import polars as pl

from tracefit.coefficients.verdicts import THRESHOLDS
from tracefit.commands.deployments import deployments_of, load_deployment, write_timelines
from tracefit.commands.locate import published_replays
from tracefit.commands.replay import replay_new
from tracefit.errors import DataError, UsageError
from tracefit.features import training
from tracefit.features.sets import Feature, FeatureSet
from tracefit.fit import splits
from tracefit.fit.alpha import EXACT_QUEUE
from tracefit.fit.boundary import admission_with_clock, api_waits, step_clock
from tracefit.fit.fitted import target_of
from tracefit.fit.noise import ABOUT, machine_noise
from tracefit.fit.splits import MIN_TRAIN_ROWS, of_means, request_frame, step_frame
from tracefit.fit.validation import measure
from tracefit.models.evaluate import CompiledModel
from tracefit.models.frames import predict_rows
from tracefit.models.schema import BoundaryModel, terms_of
from tracefit.models.targets import is_step_model, target_named
from tracefit.reports.document import plain
from tracefit.reports.facts import not_replayed
from tracefit.results.models import CompareResult, Drift, DriftVerdict, LatencyDrift
from tracefit.statistics import LIKELY_SDS, SD_OF_MEDIAN, robust_sd_expr
from tracefit.tables.schema import SERVER
from tracefit.tables.sources import is_one_step
from tracefit.tables.store import TableStore
from tracefit.text import number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tracefit.coefficients.models import Models
    from tracefit.fit.fitted import DeploymentTables
    from tracefit.models.deployment import DeploymentModels
    from tracefit.models.schema import Model
    from tracefit.models.validation import Validation
    from tracefit.options import Tolerance
    from tracefit.replay.closed_loop import NewReplay
    from tracefit.results.replays import Replayed, RunReplay
    from tracefit.server.context import Deployment
    from tracefit.statistics import Flags, Vector

FELT_US = 10_000.0
"""Users do not notice that a request starts or ends so much sooner or later."""

MOST_COMPARED_STEPS = 4_000
"""Requests that are replayed, at up to four speeds each, over all runs: some seconds."""

_MOST_BEYOND_PCT = 10.0
"""Most requests beyond the training range for a replay that tells drift from extrapolation."""


def drift_check(one: Path, tables: Path, old: Models, wanted: Sequence[str], tolerance: Tolerance) -> CompareResult:
    """Check models on tables of new runs.

    Args:
        one: Where the models come from.
        tables: Folder of the tables.
        old: The models.
        wanted: The deployments to check.
        tolerance: How much worse they may be.

    Raises:
        DataError: No run of these deployments is there.
    """
    store = TableStore(tables).require()
    runs = store.read("runs")
    write_timelines(store, runs["run_id"].unique(maintain_order=True))
    here = {each.deployment_id: (each, members) for each, members in deployments_of(runs, str(tables))}
    checks: list[_Check] = []
    notes: list[str] = []
    for deployment_id in wanted:
        if deployment_id not in here:
            notes.append(f"deployment {deployment_id}: no run of it in {tables}")
            continue
        deployment, members = here[deployment_id]
        models = old.deployment(deployment_id)
        checks.append(_checked(store, one, models, deployment, members, tolerance))
    if not checks:
        changed = {
            text: None
            for deployment_id in wanted
            for other, _ in here.values()
            if (text := _changes(old.deployment(deployment_id), other))
        }
        raise DataError(
            f"no run of deployment {', '.join(wanted)} is here",
            where=str(tables),
            hint=(
                f"here {'is' if len(here) == 1 else 'are'} {'; '.join(changed) or ', '.join(here)}: fit these runs "
                "by themselves"
            ),
        )
    return CompareResult(
        one,
        tables,
        drift=tuple(d for check in checks for d in check.drift),
        latencies=tuple(latency for check in checks for latency in check.latencies),
        verdict=min((check.verdict for check in checks), key=_WORST_FIRST.index),
        reasons=tuple(dict.fromkeys(reason for check in checks for reason in check.reasons)),
        notes=(*notes, *(note for check in checks for note in check.notes)),
    )


def _changes(models: DeploymentModels, other: Deployment) -> str:
    """Name another deployment with the facts in which it differs, both values each; empty where the models state
    none.
    """
    facts = next((m.deployment for m in models.models.values() if m.deployment is not None), None)
    if facts is None:
        return ""
    context = other.context
    then = {**facts.settings, "model": facts.model, "gpu": facts.gpu}
    served = context.settings.model or (context.architecture.name if context.architecture else None)
    measured = context.settings.measured()  # differs without a change
    chosen = {n: value for n, value in context.settings.values().items() if n not in measured}
    now = {**chosen, "model": served, "gpu": context.gpu.name if context.gpu else None}
    # A setting that one side does not state may be the same on both.
    stated = {name: (then[name], value) for name, value in now.items() if None not in (then.get(name), value)}
    listed = ", ".join(f"{name} {before} → {after}" for name, (before, after) in stated.items() if before != after)
    return f"{other.deployment_id} ({listed})" if listed else ""


_WORST_FIRST: tuple[DriftVerdict, ...] = ("drifted", "unknown", "good")


class _Check(NamedTuple):
    """The check of one deployment: its models, the latencies of its runs, the verdict with its reasons, and notes."""

    drift: tuple[Drift, ...]
    latencies: tuple[LatencyDrift, ...]
    verdict: DriftVerdict
    reasons: tuple[str, ...]
    notes: tuple[str, ...]


def _checked(
    store: TableStore,
    one: Path,
    models: DeploymentModels,
    deployment: Deployment,
    members: Sequence[str],
    tolerance: Tolerance,
) -> _Check:
    loaded = load_deployment(store, members)
    drifts: list[Drift] = []
    speeds: dict[str, _Speed] = {}
    for model in models.models.values():
        try:
            alike = _alike(model, deployment, loaded)
        except (UsageError, DataError) as error:
            drifts.append(Drift(model.name, model.deployment_id, reason=error.line()))
            continue
        # If both models of steps exist, replays take whole cycles, which come first.
        if is_step_model(model.name) and not speeds:
            speeds = _speeds(alike, model.validation)
        drifts.append(_drift_of(model, alike, tolerance, speeds))
    steps_hold = any(is_step_model(d.model) and d.verdict == "good" for d in drifts)
    latencies, notes = _latencies(store, one, models, members, speeds, tolerance, steps_hold=steps_hold)
    decisive = [_decisive(d, models.models[d.model], is_replayed=bool(latencies)) for d in drifts]
    verdict, reasons = _verdict(decisive, latencies)
    return _Check(tuple(decisive), tuple(latencies), verdict, reasons, tuple(notes))


def _decisive(drift: Drift, model: Model, *, is_replayed: bool) -> Drift:
    """Say whether a model's own errors decide: step times do; single waits only without a replay, and if users feel the
    difference.
    """
    if is_step_model(model.name):
        return drift
    errors = (drift.now_mae_us, drift.then_mae_us or 0.0)
    is_felt = errors[0] is None or errors[0] - errors[1] >= FELT_US
    is_small = drift.verdict != "good" and not is_felt
    return replace(drift, decides=not is_replayed and not is_small)


def _verdict(drifts: Sequence[Drift], latencies: Sequence[LatencyDrift]) -> tuple[DriftVerdict, tuple[str, ...]]:
    """Return the verdict on a deployment, and why it is not good."""
    # Too few rows in the training range, or the machine's noise, say nothing against latencies that are right.
    are_right = bool(latencies) and all(each.verdict == "good" for each in latencies)
    evidence = [
        *((d.verdict, _error_text(d)) for d in drifts if d.decides and not (are_right and d.verdict == "unknown")),
        *((each.verdict, _latency_text(each)) for each in latencies),
    ]
    if not evidence:
        return "unknown", (_NOTHING_TO_REPLAY,)
    worst = min((verdict for verdict, _ in evidence), key=_WORST_FIRST.index)
    return worst, tuple(text for verdict, text in evidence if verdict == worst != "good")


_NOTHING_TO_REPLAY = (
    "no run can be replayed, and no model here has an effect that users feel: compare with beta.json too, and ingest "
    "traces of requests with a server's max_num_seqs and max_num_batched_tokens"
)


def _error_text(drift: Drift) -> str:
    limit = f"the median error is {number(drift.now_mdape_pct)} %, and {number(drift.limit_pct)} % is the limit"
    return f"{drift.model}: {drift.reason or limit}"


def _latency_text(each: LatencyDrift) -> str:
    name = each.name.removesuffix("_us").upper().replace("_", " ")
    values = f"{number(each.measured / 1e3)} ms measured, {number(each.replayed / 1e3)} ms replayed"
    return f"{name} of {each.run_id}: {values}" + (f"; {each.reason}" if each.reason else "")


# -- what users see -------------------------------------------------------------------------------------------


class _Speed(NamedTuple):
    """The speed of the machine in a run: how much longer steps take than predicted, and by how much that varies, as
    logarithms.
    """

    change: float = 0.0
    sd: float = 0.0


def _speeds(alike: _Alike, published: Validation | None) -> dict[str, _Speed]:
    """Return the speed of the machine in each run, from steps in the training range.

    It varies as much as in the recording that the models come from, or between tenths of the run, whichever is more.
    """
    speed = published.speed if published is not None else None
    sd_then = math.log1p(speed.sd_pct / 100) if speed is not None else 0.0
    actual = target_of(alike.rows)
    known = (actual > 0) & (alike.predicted > 0)
    logs = alike.rows.filter(pl.Series(known)).select(
        *SERVER, tenth=_tenth(), log=pl.Series(np.log(actual[known] / alike.predicted[known]))
    )
    parts = logs.group_by(*SERVER, "tenth").agg(
        pl.col("log").median(), rows=pl.len(), noise=robust_sd_expr(pl.col("log"))
    )
    wide = parts.filter(pl.col("rows") >= _LEAST_OF_TENTH)
    # A median of few rows scatters by chance.
    chance = (SD_OF_MEDIAN * pl.col("noise")) ** 2 / pl.col("rows")
    sds = wide.group_by("run_id").agg(variance=pl.col("log").var().fill_null(0.0) - chance.mean())
    medians = logs.group_by("run_id").agg(pl.col("log").median(), rows=pl.len())
    of_runs = medians.filter(pl.col("rows") >= MIN_TRAIN_ROWS).join(sds, on="run_id", how="left")
    return {
        run_id: _Speed(change, max(sd_then, math.sqrt(max(variance or 0.0, 0.0))))
        for run_id, change, variance in of_runs.select("run_id", "log", "variance").iter_rows()
    }


_LEAST_OF_TENTH = 10


def _latencies(
    store: TableStore,
    one: Path,
    models: DeploymentModels,
    members: Sequence[str],
    speeds: Mapping[str, _Speed],
    tolerance: Tolerance,
    *,
    steps_hold: bool,
) -> tuple[list[LatencyDrift], list[str]]:
    """Return the latencies of runs beside replays of these runs, and notes on runs that are not replayed."""
    if not any(map(is_step_model, models.models)):
        return [], [
            "nothing is replayed without a model of step times: compare with the folder that also has beta.json"
        ]
    then = published_replays(one, models)
    latencies: list[LatencyDrift] = []
    notes: dict[str, list[str]] = {}
    compared = 0
    chosen = {*members[:: -(-len(members) // _MOST_CHECKED_RUNS)]}
    for run_id in members:
        if run_id not in chosen or compared >= MOST_COMPARED_STEPS:
            most = f"a check replays {_MOST_CHECKED_RUNS} runs and {MOST_COMPARED_STEPS:,} requests"
            notes.setdefault(most, []).append(run_id)
            continue
        speed = speeds.get(run_id, _Speed())
        ends = {speed.change + side * LIKELY_SDS * speed.sd for side in (-1, 0, 1)}
        made = replay_new(store, models, run_id, [1.0, *map(math.exp, sorted(ends - {0.0}))])
        first = made.replays[0]
        compared += first.requests
        if first.reason is not None:
            notes.setdefault(first.reason, []).append(run_id)
        latencies += [
            _latency_drift(run_id, quantities, made, models, then, tolerance, steps_hold=steps_hold)
            for quantities in zip(*(r.quantities for r in made.replays), strict=True)
            if _is_compared(quantities[0], models)
        ]
    return latencies, [plain(not_replayed(runs, reason)) for reason, runs in notes.items()]


_MOST_CHECKED_RUNS = 50
_FELT = {f"{name}_p{q}_us": name for name in ("ttft", "itl", "e2e") for q in (50, 90)}
"""Percentiles that decide, and their latency."""


def _is_compared(each: Replayed, models: DeploymentModels) -> bool:
    latency = _FELT.get(each.name)
    # Without the admission a replayed first token is early by it.
    has_all = latency != "ttft" or "alpha.admission" in models.models
    return latency is not None and has_all and each.measured > 0


def _latency_drift(
    run_id: str,
    quantities: Sequence[Replayed],
    made: NewReplay,
    models: DeploymentModels,
    then: Sequence[RunReplay],
    tolerance: Tolerance,
    *,
    steps_hold: bool,
) -> LatencyDrift:
    """Compare a percentile with its replays: the first with the file's step times, the others at the speeds of the
    machine.
    """
    first = quantities[0]
    latency = _FELT[first.name]
    published = _published_pct(latency, models, then)
    allowed = (_ALLOWED_PCT[latency], tolerance.factor * published, published + tolerance.slack_pct)
    limit = max(allowed)
    low, high = (end(q.replayed for q in quantities) for end in (min, max))
    nearest = min(max(first.measured, low), high)
    verdict: DriftVerdict = "unknown"
    reason = None
    if _is_near(latency, first.measured, first.replayed, limit):
        verdict = "good"
    elif _is_near(latency, first.measured, nearest, limit):
        # A loaded server makes much of a speed that varies: step times that are as exact as published confirm the file.
        verdict = "good" if steps_hold else "unknown"
        reason = None if steps_hold else "the speed that this machine has, and how much it varies, may explain it"
    elif made.beyond_pct > _MOST_BEYOND_PCT:
        reason = (
            f"{number(made.beyond_pct)} % of the requests are beyond the training range of the steps: train on "
            "this load too"
        )
    else:
        verdict = "drifted"
    return LatencyDrift(
        run_id,
        models.deployment_id,
        first.name,
        requests=made.replays[0].requests,
        measured=first.measured,
        replayed=first.replayed,
        low=low,
        high=high,
        error_pct=first.error_pct,
        limit_pct=limit,
        verdict=verdict,
        reason=reason,
    )


def _is_near(latency: str, measured: float, replayed: float, limit_pct: float) -> bool:
    is_unfelt = latency != "itl" and abs(replayed - measured) < FELT_US
    return is_unfelt or _off_pct(replayed / measured) <= limit_pct


def _off_pct(ratio: float) -> float:
    """Return by how many percent the larger of two values is above the other: half and twice are as far off."""
    return 100 * (max(ratio, 1 / ratio) - 1) if ratio > 0 else math.inf


_ALLOWED_PCT = {
    latency: next(t.yes for t in THRESHOLDS if t.measure == measure)
    for latency, measure in (("ttft", "replay_ttft_pct"), ("itl", "replay_pct"), ("e2e", "replay_pct"))
}
"""Errors of a replay that are good enough for every use."""


def _published_pct(latency: str, models: DeploymentModels, then: Sequence[RunReplay]) -> float:
    """Return the error that a latency was published with: of replays of held-out parts, else of predictions of held-out
    requests.
    """
    quantities = (q for r in then for q in r.of(latency) if q.name in _FELT)
    errors = [_off_pct(1 + q.error_pct / 100) for q in quantities if q.error_pct is not None]
    predicted = models.ranges[latency].holdout.mdape_pct if latency in models.ranges else None
    return max(errors) if errors else predicted or 0.0


# -- single models --------------------------------------------------------------------------------------------


class _Alike(msgspec.Struct, frozen=True):
    """New rows like those that the published error was measured on.

    Attributes:
        rows: The rows within the training range.
        predicted: Predictions for them.
        outside: Rows left out: outside the training range, or without a feature.
        then: Median errors the file was published with on such rows; null if unknown.
        differs: How the evidence differs from the file's; null if it does not.
    """

    rows: pl.DataFrame
    predicted: Vector
    outside: int
    then: tuple[float | None, ...]
    differs: str | None = None


def _drift_of(model: Model, alike: _Alike, tolerance: Tolerance, speeds: Mapping[str, _Speed]) -> Drift:
    actual = target_of(alike.rows)
    now = measure(actual, alike.predicted)
    errors = _errors_of_tenths(alike.rows, actual, alike.predicted)
    # The median, which a few unusual requests do not change. Of both parts of the training data: the new traces may be
    # like either.
    then = max((median for median in alike.then if median is not None), default=None)
    # A median error of 0.5 % may triple by chance: the slack lets models that are nearly exact keep their verdict.
    limit = None if then is None else max(tolerance.factor * then, then + tolerance.slack_pct)
    is_of_steps = is_step_model(model.name)
    noise = machine_noise(alike.rows) if is_of_steps else None
    if limit is not None and noise is not None:
        # Steps of equal batches differ by as much: no file is better.
        limit = max(limit, ABOUT * noise.mdape_pct)
    verdict: DriftVerdict = "unknown"
    reason = None
    if now.n < MIN_TRAIN_ROWS:
        inside = " with known features within the training range" if alike.outside else ""
        reason = f"{now.n} rows{inside} are fewer than {MIN_TRAIN_ROWS}"
    elif limit is None or now.mdape_pct is None:
        reason = "the file states no errors"
    elif now.mdape_pct <= limit:
        verdict = "good"
    elif alike.differs is not None:
        reason = f"the error is larger, but {alike.differs}"
    elif now.mdape_pct - 2 * (spread := _spread_pct(errors, None if is_of_steps else limit)) <= limit:
        reason = (
            f"the error is larger by no more than it varies between parts of these runs (± {2 * spread:.2g} points)"
        )
    elif is_of_steps and (text := _speed_explains(alike, actual, speeds, limit)):
        reason = text
    else:
        verdict = "drifted"
    return Drift(
        model=model.name,
        deployment_id=model.deployment_id,
        rows=now.n,
        rows_outside=alike.outside,
        then_mdape_pct=then,
        now_mdape_pct=now.mdape_pct,
        then_mae_us=model.validation.holdout.mae if model.validation else None,
        now_mae_us=now.mae,
        now_bias_pct=now.bias_pct,
        limit_pct=limit,
        verdict=verdict,
        reason=reason,
    )


def _speed_explains(alike: _Alike, actual: Vector, speeds: Mapping[str, _Speed], limit: float) -> str | None:
    """Say that the machine's speed explains larger errors of steps, where it varies by as much; null where it does
    not.
    """
    if any(abs(speed.change) > LIKELY_SDS * speed.sd for speed in speeds.values()):
        return None
    change = alike.rows["run_id"].replace_strict(
        {run_id: speed.change for run_id, speed in speeds.items()}, default=0.0, return_dtype=pl.Float64
    )
    at_speed = measure(actual, alike.predicted * np.exp(change.to_numpy()))
    if at_speed.mdape_pct is None or at_speed.mdape_pct > limit:
        return None
    most = max(speeds.values(), key=lambda speed: abs(speed.change))
    return (
        f"the error is larger because the machine is {number(100 * abs(math.expm1(most.change)))} % "
        f"{'slower' if most.change > 0 else 'faster'}, and its speed varies by as much (± "
        f"{number(100 * math.expm1(LIKELY_SDS * most.sd))} %)"
    )


_DRIFT_PARTS = 10


def _errors_of_tenths(rows: pl.DataFrame, actual: Vector, predicted: Vector) -> Vector:
    """Return the median errors of the tenths of each server's time in percent, shape (tenths,)."""
    error = 100 * np.abs(predicted - actual)[actual != 0] / np.abs(actual[actual != 0])
    known = rows.filter(pl.Series(actual != 0)).select(*SERVER, "ts_ns", error=pl.Series(error))
    return known.group_by(*SERVER, tenth=_tenth()).agg(pl.col("error").median())["error"].to_numpy()


def _spread_pct(errors: Vector, wait_limit_pct: float | None) -> float:
    """Return the standard deviation of the median errors of tenths, in percentage points.

    A server whose speed wanders within a run does so between runs as well. Waits that are off throughout are not
    chance: it is 0 for a model of waits if two of three tenths are above its limit, however much they differ.
    """
    is_throughout = wait_limit_pct is not None and np.mean(errors > wait_limit_pct) >= _THROUGHOUT
    return 0.0 if is_throughout or len(errors) < 2 else float(np.std(errors, ddof=1))


_THROUGHOUT = 2 / 3


def _tenth() -> pl.Expr:
    return (pl.col("ts_ns").rank("ordinal").over(SERVER) - 1) * _DRIFT_PARTS // pl.len().over(SERVER)


def _alike(model: Model, deployment: Deployment, tables: DeploymentTables) -> _Alike:
    """Return the new rows that a model is evaluated on, with the published errors on rows of the same source."""
    features = FeatureSet(
        "file",
        tuple({t.feature: Feature(t.feature, "", t.formula or t.feature) for t in terms_of(model)}.values()),
    )
    constants = training.constants_of(deployment.context)
    published = model.validation
    then: tuple[float | None, ...] = ()
    differs = None
    if published is not None:
        then = published.train.mdape_pct, published.holdout.mdape_pct
    if is_step_model(model.name):
        source = "duration" if model.target is not None and model.target.source == "duration" else "clock"
        timeline = training.with_roofline(tables.timeline, deployment.context)
        rows = _all_new(step_frame(tables, timeline, features, constants, source))
        rows, differs = _steps_alike(rows, published)
    else:
        target = target_named(model.name.removeprefix("alpha."))
        rows = _all_new(request_frame(tables, target, features, constants))
        exact = model.target is not None and EXACT_QUEUE in model.target.source
        if target.state == "queue" and exact != (tables.queue is not None):
            differs = "the queue is known exactly in one of both only, in the other as the latest sampled step left it"
    # Conditions may compare facts that the new tables lack: null, such a condition is false, and the model still
    # predicts. A feature that lacks its inputs may be a column itself.
    lacking = CompiledModel(model).inputs - {*rows.columns, *(t.feature for t in terms_of(model))}
    nulls = (pl.lit(None, pl.Float64).alias(name) for name in sorted(lacking))
    predictions = predict_rows(model, rows.with_columns(nulls))
    predicted = predictions["predicted_us"].cast(pl.Float64).fill_null(float("nan")).to_numpy()
    inside = (predictions["out_of_range"].is_null() & predictions["predicted_us"].is_not_null()).to_numpy()
    if isinstance(model, BoundaryModel):
        by_clock, known = _by_clock(model, rows, tables)
        if (known & inside).sum() >= MIN_TRAIN_ROWS:
            # The step starts of the other requests are not known: how many these are is a matter of sampling.
            rows, predicted, inside = rows.filter(pl.Series(known)), by_clock[known], inside[known]
        else:
            without = published.by_group.get("without_clock") if published else None
            then = (without.mdape_pct,) if without else ()
            differs = "few of the step starts behind the admissions are known here"
    return _Alike(rows.filter(pl.Series(inside)), predicted[inside], int((~inside).sum()), then, differs)


def _steps_alike(rows: pl.DataFrame, published: Validation | None) -> tuple[pl.DataFrame, str | None]:
    """Return the rows of the kind that a published error of step times is of: single steps, or intervals too.

    The second value says how the rows differ if none is of that kind.
    """
    # The mean over an interval is easier to predict than a single step.
    single = rows.filter(is_one_step())
    if not of_means(published):
        if single.height >= MIN_TRAIN_ROWS:
            return single, None
        return rows, "the file's error is that of single steps, and here are mostly intervals of several"
    if single.height == rows.height:
        return rows, "the file's error is that of intervals of several steps, and here are single steps"
    return rows, None


def _by_clock(model: BoundaryModel, rows: pl.DataFrame, tables: DeploymentTables) -> tuple[Vector, Flags]:
    """Predict admissions from known step starts only, without interpolation; also return for which rows these
    suffice.
    """
    tokens = rows["prompt_tokens"].fill_null(0).to_numpy().astype(float)
    work = model.work.intercept.value + model.work_us_per_prompt_token * tokens
    wait = api_waits(rows, work) if model.queue else np.zeros(len(work))
    clock = step_clock(tables.timeline)
    return admission_with_clock(rows, (clock, clock), wait, work + wait, model.offset.value)


def _all_new(rows: pl.DataFrame) -> pl.DataFrame:
    # Without idle gaps and epoch boundaries, on which the old file was not trained either.
    return rows.filter(~splits.is_excluded(splits.LEFT_OUT_ALWAYS))
