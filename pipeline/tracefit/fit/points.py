"""Points of closed loops as rows of the law: the mean step of a server that a client keeps at one concurrency; a law of
them, and its errors.

A request is with its client's first token for `ttft`, and decodes for `output_tokens * tpot`: of c requests that are
kept in flight, the share of the second decodes at a time. Every step ends batch / output_tokens requests, so that as
many prompts come in; a prompt takes one step, or several where it is longer than a step may be. The terms of the law
are those of steps without and with a prompt, weighed by how many there are of each: the mean time between two tokens is
that of such steps.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import polars as pl

from tracefit.features.law import LAUNCH, LAW_BATCH_COLUMNS, LAW_TERMS, with_law
from tracefit.features.sets import LAW_SET, add_features
from tracefit.fit.fitted import target_of
from tracefit.fit.transfer import (
    DECODES,
    FASTER,
    LawRows,
    TransferErrors,
    calibrate,
    errors_of,
    fitted_law,
    group_of,
    name_of,
    nearest,
    prompts_of,
    roofline,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracefit.fit.transfer import Kind, Law
    from tracefit.server.context import Deployment
    from tracefit.statistics import Vector

CLOSED_LOOP = ("concurrency", "prompt_tokens", "output_tokens", "ttft_us", "tpot_us")
"""Columns that a point is read from; `ttft_us` may be null."""
CACHE_TOO_SMALL = "the KV cache does not hold so many requests"
NOT_CLOSED = "no concurrency, length or time per token"
_UNSEEN = ("prompt_kernels", "decode_matrix_us")
POINT_TERMS = tuple(t for t in LAW_TERMS if t.of != LAUNCH and t.feature.name not in _UNSEEN)
"""Terms of the law that points show. No one sees the launches of steps with prompts in a mean over steps; the FLOPs of
generated tokens are computed while the weights are read, and in a sum they would take time of their own."""
POINT_STRENGTH = 0.01
"""Strength of the Ridge towards the priors for one server, which more of them divide."""
FEWEST_POINTS = 10
"""Points that a calibration needs."""
POINT_LEVEL_PCT = 80.0
"""Level of the interval that is nested."""
_SETTLING_ROUNDS = 4
_STEP_TOKENS = 8_192
"""Tokens of a step where the server does not state them: vLLM's default on GPUs of 80 GB and more."""


def point_rows(
    deployment: Deployment, points: pl.DataFrame, tpot_us: Vector | None = None, *, every: bool = False
) -> LawRows:
    """Return the mean steps of a server's points, with the terms of the law.

    Left out are points that are not a closed loop, that keep more requests in flight than the KV cache holds, and that
    are faster than the weights are read, or the prompts computed, at the rated speed.

    Args:
        deployment: The server, with a known model and GPU.
        points: One row per point, with `CLOSED_LOOP` as Float64.
        tpot_us: Times per token from which the decoding requests follow, shape (n,); those of the points if not given.
        every: Leave no point out.
    """
    settings = deployment.context.settings
    most_tokens = None if every else (settings.num_gpu_blocks or 0) * (settings.block_size or 16) or None
    size = pl.col("prompt_tokens") + pl.col("output_tokens")
    in_loop = pl.all_horizontal(pl.col(n) > 0 for n in CLOSED_LOOP if n != "ttft_us") & (pl.col("output_tokens") > 1)
    held = pl.lit(value=True) if most_tokens is None else pl.col("concurrency") * size <= most_tokens
    expected = points["tpot_us"] if tpot_us is None else pl.Series(tpot_us)
    reasons = points.with_row_index("step_id").with_columns(
        expected_us=expected,
        reason=pl.when(~in_loop.fill_null(value=False))
        .then(pl.lit(NOT_CLOSED))
        .when(~held)
        .then(pl.lit(CACHE_TOO_SMALL)),
    )
    loops = reasons.filter(pl.col("reason").is_null())
    decoding = pl.col("output_tokens") * pl.col("expected_us")
    loops = loops.with_columns(
        batch=pl.col("concurrency") * decoding / (decoding + pl.col("ttft_us").fill_null(0))
    ).with_columns(
        share=(
            pl.col("batch")
            / pl.col("output_tokens")
            * pl.max_horizontal(1.0, pl.col("prompt_tokens") / (settings.max_num_batched_tokens or _STEP_TOKENS))
        ).clip(upper_bound=1.0)
    )
    without, with_prompt = (_terms(loops, deployment, prompts=prompts) for prompts in (pl.lit(0.0), pl.lit(1.0)))
    share = loops["share"]
    rows = pl.DataFrame({name: (1 - share) * without[name] + share * with_prompt[name] for name in LAW_SET.names})
    decodes = _batches(loops, pl.lit(0.0)).select(pl.col(n).alias(f"of_{n}") for n in LAW_BATCH_COLUMNS)
    keys = loops.select("step_id", run_id=pl.lit("points"), server=pl.lit(""), ts_ns=pl.lit(0), y=pl.col("tpot_us"))
    found = pl.concat([keys, decodes, rows], how="horizontal")
    is_slow_enough = pl.col("y") >= pl.max_horizontal("weight_read_us", "prompt_matrix_us")
    kept = found if every else found.filter(is_slow_enough)
    counts = Counter(reasons["reason"].drop_nulls().to_list())
    counts[FASTER] += found.height - kept.height
    return LawRows(deployment, kept, dict(sorted((+counts).items())))


def _terms(loops: pl.DataFrame, deployment: Deployment, *, prompts: pl.Expr) -> pl.DataFrame:
    """Return the law's terms of the steps of some loops without, or with, their share of prompts."""
    batches = _batches(loops, prompts)
    return add_features(with_law(batches, deployment.context), LAW_SET, {})


def _batches(loops: pl.DataFrame, prompts: pl.Expr) -> pl.DataFrame:
    """Return the batch of a loop's steps: its decoding requests, and the prompts of a step that has some if `prompts`
    is 1.
    """
    ended = pl.col("batch") / pl.col("output_tokens") / pl.col("share")
    return loops.select(
        num_prefill_reqs=prompts * ended,
        num_decode_reqs="batch",
        prefill_tokens=prompts * ended * pl.col("prompt_tokens"),
        decode_tokens="batch",
        context_tokens=pl.col("batch") * (pl.col("prompt_tokens") + pl.col("output_tokens") / 2),
        prefill_context_tokens=pl.lit(0.0),
    )


# -- a law of points ---------------------------------------------------------------------------------------


class PointServer(msgspec.Struct, frozen=True):
    """A server with its points, or with steps in their place.

    Attributes:
        deployment: The server.
        points: One row per point that is used, with `CLOSED_LOOP`; empty where it has steps.
        rows: The terms of the law of each point, or of each step.
    """

    deployment: Deployment
    points: pl.DataFrame
    rows: LawRows

    @classmethod
    def of(cls, deployment: Deployment, points: pl.DataFrame) -> PointServer:
        """Return a server with those of its points that can be used."""
        rows = point_rows(deployment, points)
        return cls(deployment, points[rows.rows["step_id"].to_list()], rows)

    @classmethod
    def of_steps(cls, steps: LawRows) -> PointServer:
        """Return a server with its steps without a prompt."""
        decodes = steps.rows.filter(~pl.Series(prompts_of(steps.rows)))
        nothing = pl.DataFrame(schema=dict.fromkeys(CLOSED_LOOP, pl.Float64))
        return cls(steps.deployment, nothing, LawRows(steps.deployment, decodes))

    @property
    def has_points(self) -> bool:
        """Whether it has points; else it has steps."""
        return self.points.height > 0


def fit_points(servers: Sequence[PointServer]) -> Law:
    """Fit the law to the points of some servers, which count the same each, and to steps, which count as the points of
    a server do.
    """
    of_points = [one for one in servers if one.has_points]
    of_server = sum(one.rows.rows.height for one in of_points) / max(len(of_points), 1)
    weights = np.concatenate(
        [
            np.full(height := one.rows.rows.height, 1.0 if one.has_points else (of_server or 1.0) / height)
            for one in servers
        ]
    )
    columns = [pl.col(name).cast(pl.Float64) for name in ("y", *(t.feature.name for t in POINT_TERMS))]
    rows = pl.concat([one.rows.rows.select(columns) for one in servers])
    return fitted_law(rows, weights / weights.sum(), POINT_TERMS, POINT_STRENGTH / len(servers))


def predict_points(law: Law, deployment: Deployment, points: pl.DataFrame) -> Vector:
    """Return the time per token at each point in us, shape (n,): with it the requests that decode at a time follow
    again, until they settle.
    """
    tpot_us = law.predict(point_rows(deployment, points, every=True).rows)
    for _ in range(_SETTLING_ROUNDS):
        tpot_us = law.predict(point_rows(deployment, points, tpot_us, every=True).rows)
    return tpot_us


class PointFold(msgspec.Struct, frozen=True):
    """A server that was left out, with what a law says of its points that was fitted on others; all arrays have the
    shape (n,), times are in us.

    Attributes:
        left_out: The tensor parallelism, model or GPU, or model and GPU, that was left out.
        law: The coefficients.
        actual: Times per token.
        predicted: Those of the law.
        unchanged: Those of a law of only the most similar server, with the numbers of that server.
        at_rated: The longer of compute and memory at the rated speed.
        median: The median of the others.
        is_covered: Whether each point is within the interval that the others give, as 0 or 1; empty where these are too
            few for one.
        calibrated_pct: Absolute errors in percent at the points that are left after a calibration with some; empty
            where they are too few.
    """

    left_out: str
    law: Law
    actual: Vector
    predicted: Vector
    unchanged: Vector
    at_rated: Vector
    median: Vector
    is_covered: Vector
    calibrated_pct: Vector

    @property
    def ape_pct(self) -> Vector:
        """Absolute errors in percent; shape (n,)."""
        return np.asarray(100 * np.abs(self.predicted - self.actual) / self.actual)

    @property
    def bias_log(self) -> float:
        """Logarithm of the measured sum over the predicted one."""
        return math.log(float(self.actual.sum()) / max(float(self.predicted.sum()), 1e-9))


def leave_points_out(servers: Sequence[PointServer], kind: Kind) -> tuple[PointFold, ...]:
    """Leave each tensor parallelism, model or GPU out in turn, or each model with all of a GPU and that GPU with all
    models.

    Errors are those of points; servers with steps only train.
    """
    folds: list[PointFold] = []
    for group, rest in _splits(servers, kind):
        law = fit_points(rest)
        inner = [
            np.concatenate([_ape_pct(inner_law, one) for one in here])
            for inner_group, others in _splits(rest, kind)
            if (here := _in_group(rest, kind, inner_group)) and (inner_law := fit_points(others))
        ]
        limit = float(np.quantile(np.concatenate(inner), POINT_LEVEL_PCT / 100)) if inner else None
        folds += [_point_fold(one, rest, law, kind, limit) for one in _in_group(servers, kind, group)]
    return tuple(folds)


def _in_group(servers: Sequence[PointServer], kind: Kind, group: object) -> list[PointServer]:
    """Return the servers of a group that have points."""
    return [one for one in servers if one.has_points and group_of(one.deployment.context, kind) == group]


def _splits(servers: Sequence[PointServer], kind: Kind) -> list[tuple[object, list[PointServer]]]:
    """Return each group with the servers that are unlike it: in both of two properties, where it is of two."""
    contexts = [one.deployment.context for one in servers]
    kinds: tuple[Kind, ...] = ("model", "gpu") if kind == "model_and_gpu" else (kind,)
    found = []
    with_points = [one.deployment.context for one in servers if one.has_points]
    for group, context in {group_of(context, kind): context for context in with_points}.items():
        rest = [
            one
            for one, other in zip(servers, contexts, strict=True)
            if all(group_of(other, k) != group_of(context, k) for k in kinds)
        ]
        if any(one.has_points for one in rest):
            found.append((group, rest))
    return found


def _ape_pct(law: Law, one: PointServer) -> Vector:
    actual = target_of(one.rows.rows)
    return np.asarray(100 * np.abs(predict_points(law, one.deployment, one.points) - actual) / actual)


def _point_fold(
    one: PointServer, rest: Sequence[PointServer], law: Law, kind: Kind, limit_pct: float | None
) -> PointFold:
    actual = target_of(one.rows.rows)
    by_rows = {id(other.rows): other for other in rest if other.has_points}
    source = by_rows[id(nearest(one.deployment.context, [other.rows for other in by_rows.values()]))]
    others = np.concatenate([target_of(other.rows.rows) for other in by_rows.values()])
    ape = _ape_pct(law, one)
    return PointFold(
        left_out=name_of(one.deployment.context, kind),
        law=law,
        actual=actual,
        predicted=predict_points(law, one.deployment, one.points),
        unchanged=predict_points(fit_points([source]), source.deployment, one.points),
        at_rated=roofline(one.rows.rows),
        median=np.full(len(actual), np.median(others)),
        is_covered=np.array([]) if limit_pct is None else (ape <= limit_pct).astype(float),
        calibrated_pct=_calibrated_pct(law, one),
    )


def _calibrated_pct(law: Law, one: PointServer) -> Vector:
    """Return the errors at the other points of a server after a calibration with `FEWEST_POINTS` of them, spread over
    its loads.
    """
    if one.points.height < 2 * FEWEST_POINTS:
        return np.array([])
    order = one.points.with_row_index("row").sort("concurrency", "prompt_tokens", "output_tokens")["row"].to_numpy()
    chosen = order[np.linspace(0, len(order) - 1, FEWEST_POINTS).astype(int)]
    made = calibrate(
        law, LawRows(one.deployment, one.rows.rows[chosen.tolist()]), errors_of(()), fewest=FEWEST_POINTS // 2
    )
    others = np.setdiff1d(np.arange(len(order)), chosen).tolist()
    actual = target_of(one.rows.rows)[others]
    predicted = predict_points(made.law if made else law, one.deployment, one.points[others])
    return np.asarray(100 * np.abs(predicted - actual) / actual)


def point_errors(folds: Sequence[PointFold]) -> TransferErrors:
    """Return the errors to expect of a law of points, at the mean step of a load: of all points that were left out
    together.
    """
    ape = np.concatenate([fold.ape_pct for fold in folds])
    spread = float(np.sqrt(np.mean([fold.bias_log**2 for fold in folds])))
    return TransferErrors({DECODES: float(np.quantile(ape, 0.9))}, spread, len({f.left_out for f in folds}))
