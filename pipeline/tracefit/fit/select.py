"""Which features and which penalty: decided inside the training part, by time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tracefit.fit.estimators import RobustLinear
from tracefit.fit.linear import MAX_VIF
from tracefit.fit.results import Collinearity, FeatureLeftOut, PenaltyChoice
from tracefit.fit.solvers import Penalty, Positive, line, moments

if TYPE_CHECKING:
    from tracefit.fit.arrays import Integers, Matrix, Vector


MIN_VARIED_ROWS = 20
"""A coefficient that fewer rows than this speak for is a coefficient of those rows."""

FOLDS = 5
FOLD_ROUNDS = 5
"""Rounds of reweighting inside a fold: enough to rank penalties, which is all the folds are for."""

_TIE = 1e-3

ENOUGH_ROWS = 100_000
"""Penalties are ranked on so many rows, taken evenly over each stretch of time: more would rank them the same."""

WORTH = 0.05
"""Least share of the cross-validated error that a richer model must remove."""

CLEARLY = 1.1
"""Features of no use cost a few percent of cross-validated error; those that mislead cost more."""

CANDIDATES: tuple[tuple[Penalty, float], ...] = (
    *(("ridge", s) for s in (1e-8, 1e-4, 1e-3, 1e-2)),
    *(("lasso", s) for s in (1e-3, 1e-2, 3e-2)),
    *(("elastic_net", s) for s in (1e-3, 1e-2)),
)


def usable_features(
    x: Matrix, names: list[str], limits: list[float] | None = None
) -> tuple[list[int], list[FeatureLeftOut]]:
    """Keep, in the order declared, features that are known, vary and are not a mix of those before them.

    Args:
        x: Raw features of the training rows, shape (n, n_features); NaN where unknown.
        names: Feature names, in order of preference.
        limits: Largest variance inflation of each; `MAX_VIF` if not given.

    Returns:
        Kept column indices, and the others with reasons.
    """
    kept: list[int] = []
    left: list[FeatureLeftOut] = []
    # Columns of length 1: `basis` spans what the kept features tell, the constant first; `kept_units` are they themselves.
    basis = np.empty((len(x), len(names) + 1), order="F")
    basis[:, 0] = 1 / np.sqrt(max(len(x), 1))
    kept_units = np.empty((len(x), len(names)), order="F")
    for index, name in enumerate(names):
        column = x[:, index]
        reason = _unfit(column)
        if reason is None:
            unit = column - column.mean()
            unit /= np.linalg.norm(unit)
            known = basis[:, : len(kept) + 1]
            rest = unit - known @ (unit @ known)
            rest -= known @ (rest @ known)  # once more, against rounding
            share = float(rest @ rest)
            if share * (limits[index] if limits else MAX_VIF) < 1:
                alike = np.abs(unit @ kept_units[:, : len(kept)])
                reason = _collinear(names[kept[int(np.argmax(alike))]], share)
        if reason is not None:
            left.append(FeatureLeftOut(name, reason))
            continue
        basis[:, len(kept) + 1] = rest / np.linalg.norm(rest)
        kept_units[:, len(kept)] = unit
        kept.append(index)
    return kept, left


def _unfit(column: Vector) -> str | None:
    known = column[np.isfinite(column)]
    if known.size == 0:
        return "not known in these runs"
    if known.size < column.size:
        return f"unknown on {column.size - known.size} of {column.size} training rows"
    if np.ptp(known) <= 1e-12 * max(1.0, float(np.abs(known).max())):
        return f"constant in the training rows ({known[0]:.6g})"
    values, counts = np.unique(known, return_counts=True)
    varied = known.size - int(counts.max())
    if varied < MIN_VARIED_ROWS:
        common = values[int(np.argmax(counts))]
        return f"differs from {common:.6g} on only {varied} of {known.size} training rows"
    return None


def _collinear(nearest: str, share: float) -> str:
    inflation = "infinite" if share < 1e-10 else f"{1 / share:.0f}"
    return f"collinear with the features before it, closest {nearest} (variance inflation {inflation})"


def collinearity(x: Matrix) -> Collinearity:
    """Measure the collinearity of features that vary, shape (n, n_features)."""
    if not x.shape[1]:
        return Collinearity(None, ())
    correlation = np.atleast_2d(np.corrcoef(x, rowvar=False))
    values = np.linalg.eigvalsh(correlation)
    inverse = np.diag(np.linalg.pinv(correlation, hermitian=True))
    return Collinearity(
        float(np.sqrt(values[-1] / max(float(values[0]), np.finfo(float).eps))),
        tuple(max(float(v), 1.0) for v in inverse),
    )


def time_blocks(run: Integers, time: Integers, count: int) -> Integers:
    """Cut each run's rows into `count` contiguous blocks of time; block i of every run has number i.

    Args:
        run: Shape (n,), which run a row belongs to.
        time: Shape (n,), when it began; compared within a run only.
        count: Blocks per run.
    """
    block = np.zeros(len(run), dtype=np.int64)
    for one in np.unique(run):
        rows = np.flatnonzero(run == one)
        rank = np.argsort(np.argsort(time[rows], kind="stable"), kind="stable")
        block[rows] = rank * count // len(rows)
    return block


def choose_penalty(
    x: Matrix,
    y: Vector,
    blocks: Integers,
    weights: Vector | None = None,
    candidates: tuple[tuple[Penalty, float], ...] = CANDIDATES,
    *,
    positive: Positive = False,
    counts: Vector | None = None,
) -> PenaltyChoice:
    """Choose penalty and strength by leave-one-time-block-out error on the training rows.

    Within a fold all candidates share the Huber weights of the first one's fit: the rows that count are the same for
    all. Ties (within 0.1 %) go to the earlier candidate: Ridge before Lasso before elastic net, weaker before stronger.
    `counts`, as `weights` if not given, say how much the error of each row counts.
    """
    weights = np.ones(len(y)) if weights is None else weights
    counts = weights if counts is None else counts
    evenly = slice(None, None, -(-len(y) // ENOUGH_ROWS) or None)
    x, y, blocks = np.asfortranarray(x[evenly]), y[evenly], blocks[evenly]
    weights, counts = weights[evenly], counts[evenly]
    folds = [f for f in np.unique(blocks) if 0 < np.sum(blocks == f) < len(y)]
    if not folds:
        penalty, strength = candidates[0]
        return PenaltyChoice(penalty, strength, float("nan"), 0)
    shares = []
    for fold in folds:
        test = blocks == fold
        predictions = _fold_predictions(
            (x[~test], y[~test], weights[~test]), x[test], candidates, positive=positive
        )
        off = np.abs(np.maximum(predictions, 0.0) - y[test])
        shares.append(off @ counts[test] / counts.sum())
    by_fold = np.array(shares)
    errors = by_fold.sum(axis=0)
    best = 0
    for index, error in enumerate(errors):
        if error < errors[best] * (1 - _TIE):
            best = index
    chosen = tuple(float(share) for share in by_fold[:, best])
    return PenaltyChoice(*candidates[best], float(errors[best]), len(folds), chosen)


def improves(simple: PenaltyChoice, richer: PenaltyChoice) -> bool:
    """Tell whether a richer model is worth its terms: better by a standard error over the folds, and by 5 % at least.

    Args:
        simple: Cross-validation of the model to beat.
        richer: That of the other, on the same rows in the same folds.
    """
    if len(simple.fold_scores) < 2 or len(simple.fold_scores) != len(richer.fold_scores):
        return False
    gains = np.array(simple.fold_scores) - np.array(richer.fold_scores)
    error = float(gains.std(ddof=1)) * np.sqrt(len(gains))
    return bool(gains.sum() > max(error, WORTH * simple.score))


def is_worse_than_constant(
    x: Matrix,
    y: Vector,
    blocks: Integers,
    weights: Vector,
    choice: PenaltyChoice,
    counts: Vector | None = None,
) -> bool:
    """Tell whether the features predict left-out blocks of time clearly worse than a constant does.

    What they learnt is one stretch of the run then: a line through a burst is wrong by the burst's size in the quiet
    that follows.
    """
    if not choice.folds or not x.shape[1]:
        return False
    return (
        choice.score
        > CLEARLY * choose_penalty(x[:, :0], y, blocks, weights, CANDIDATES[:1], counts=counts).score
    )


def _fold_predictions(
    train: tuple[Matrix, Vector, Vector],
    x: Matrix,
    candidates: tuple[tuple[Penalty, float], ...],
    *,
    positive: Positive,
) -> Matrix:
    """Predict one fold by every candidate fitted on the others; shape (n_candidates, n_rows)."""
    first = RobustLinear(*candidates[0], max_iter=FOLD_ROUNDS, positive=positive).fit_rows(*train)
    center, scale = train[0].mean(axis=0), train[0].std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    of = moments(np.asfortranarray((train[0] - center) / scale), train[1], first.weights)
    lines = [line(of, -center / scale, *candidate, positive=positive) for candidate in candidates]
    return np.array([intercept + x @ (slopes / scale) for intercept, slopes in lines])


def out_of_fold(
    x: Matrix, y: Vector, blocks: Integers, weights: Vector, choice: PenaltyChoice, *, positive: Positive
) -> Vector:
    """Predict each time block by a model fitted on the others, clipped at 0, shape (n,); one block by itself."""
    predicted = np.zeros(len(y))
    for fold in np.unique(blocks):
        test = blocks == fold
        rest = ~test if not test.all() else test
        model = RobustLinear(choice.penalty, choice.strength, max_iter=FOLD_ROUNDS, positive=positive)
        predicted[test] = model.fit(x[rest], y[rest], weights[rest]).predict(x[test])
    return np.asarray(np.maximum(predicted, 0.0))
