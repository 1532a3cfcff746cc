"""Errors of step times on rows that training did not see: on those of a later time, and on those of a higher load.

Later rows, the hold-out: errors by phase, the bias of the sum, drift, and a refit. The bias of the sum is the error of
a simulation of the whole run. The refit separates two kinds of error: an error that remains after refitting on the
held-out rows cannot be removed by other coefficients, since the batch does not determine it; an error that disappears
comes from a change after the training part, mostly of the machine's speed.

Higher loads: the load of a step is the number of tokens in the caches of its batch, or its requests where the tokens
are not known. A capacity planner needs to know how a model extrapolates: it is fitted on the lower half of the load and
evaluated on the upper half, the hold-out error is given per range of load, and features with far larger values in the
run than in training are named.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import polars as pl

from tracefit.features.sets import Feature
from tracefit.fit import splits
from tracefit.fit.estimators import FEW_ROUNDS, MAX_ITER
from tracefit.fit.fitted import (
    FitOptions,
    active_regime,
    linear_terms,
    matrix,
    predict_regimes,
    target_of,
)
from tracefit.fit.load import with_phases
from tracefit.fit.results import SummedTime
from tracefit.fit.select import Design, estimator, time_blocks, usable_features
from tracefit.fit.splits import MIN_HOLDOUT_ROWS, MIN_TRAIN_ROWS, counted_rows, evaluation_rows, in_time
from tracefit.fit.train import MAX_UNKNOWN_SHARE, FitRows, design_of, server_numbers
from tracefit.fit.validation import extrapolated_rows, measure, reference
from tracefit.models.schema import Number
from tracefit.models.validation import (
    ErrorOverLoad,
    LoadBin,
    LoadExtrapolation,
    StepPhase,
)
from tracefit.tables.schema import ENGINE, SERVER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tracefit.fit.fitted import FittedRegime, LinearFit
    from tracefit.models.schema import Term
    from tracefit.models.validation import Metrics
    from tracefit.statistics import Flags, Integers, Matrix, Vector

FEWEST_HOLDOUT_BLOCKS = 10
"""Fewest blocks that a variance is estimated from: blocks of a short hold-out are shorter than by the rule."""

MOST_HOLDOUT_BLOCKS = 1_000
"""Upper limit of bootstrap blocks; longer hold-outs use longer blocks. More blocks would cost memory and not improve
the estimate."""

RESAMPLES = 2_000


def summed_time(predicted_us: Vector, actual_us: Vector, blocks: Integers) -> SummedTime | None:
    """Sum step times and bootstrap the bias of the sum by blocks of time; null where the measured sum is zero.

    Errors of consecutive steps are correlated. Whole blocks are therefore drawn with replacement, 2,000 times with a
    fixed seed (Kuensch 1989, blocks without overlap). A drift slower than a block does not widen the interval.

    All arguments are of shape (n,).
    """
    total, error = float(actual_us.sum()), predicted_us - actual_us
    if not total > 0:
        return None
    names, index = np.unique(blocks, return_inverse=True)
    drawn = np.random.default_rng(0).integers(0, len(names), size=(RESAMPLES, len(names)))
    predicted, actual = (np.bincount(index, us)[drawn].sum(axis=1) for us in (predicted_us, actual_us))
    return SummedTime(
        predicted_us=float(predicted_us.sum()),
        actual_us=total,
        bias_pct=100 * (float(predicted_us.sum()) / total - 1),
        bias_2sd_pct=2 * float(np.std(100 * predicted[actual > 0] / actual[actual > 0], ddof=1)),
        blocks=len(names),
        max_contribution_pct=100 * float(error[np.abs(error).argmax()]) / total,
    )


def block_length(series: Vector) -> int:
    """Return how many rows adjacent in time make a block, by the rule of Politis and White (2004; Patton et al. 2009).

    b = (2 G^2 / D)^(1/3) n^(1/3) with G = sum lambda(k/M) |k| R(k), D = 4/3 (sum lambda(k/M) R(k))^2 over lags |k| <=
    M, lambda the flat-top window (1 to one half, then linear to 0). M is twice the lag after which the next lags'
    autocorrelations are all within 2 sqrt(log10(n) / n), no more than sqrt(n) and those lags. At most 3 sqrt(n) and n /
    3.
    """
    n = len(series)
    if n < FEWEST_HOLDOUT_BLOCKS or np.ptp(series) == 0:
        return 1
    # `quiet` is how many consecutive lags must show no autocorrelation (K_N of the paper).
    quiet = max(5, int(np.sqrt(np.log10(n))))
    most = min(int(np.ceil(np.sqrt(n))) + quiet, n - 1)
    centered = series - series.mean()
    covariance = np.array([centered[: n - k] @ centered[k:] for k in range(most + 1)]) / n
    within = np.abs(covariance[1:] / covariance[0]) < 2 * np.sqrt(np.log10(n) / n)
    ends = np.flatnonzero(np.lib.stride_tricks.sliding_window_view(within, min(quiet, most)).all(axis=1))
    last = min(2 * max(int(ends[0]), 1), most) if len(ends) else most
    lag = np.arange(1, last + 1)
    window = np.minimum(1.0, 2 * (1 - lag / last)) * covariance[1 : last + 1]
    slope, level = 2 * float(lag @ window), float(covariance[0] + 2 * window.sum())
    if level == 0:
        return 1
    length = float(np.cbrt(2 * slope**2 / (4 / 3 * level**2) * n))
    return max(1, int(np.ceil(min(length, 3 * np.sqrt(n), n / 3))))


def summed_holdout(beta: LinearFit) -> SummedTime | None:
    """Sum the step times of beta's held-out rows; an interval counts as all of its steps.

    A server that traces a sample of its steps has few rows: they stand for all of its steps, or else a server that
    traces every step would decide the sum.

    Blocks are contiguous in the time of a server. Their length is `block_length` of the residuals of the training rows,
    the largest over the servers, with at least 10 blocks per server and at most 1,000 in total.
    """
    used, holdout = counted_rows(beta.rows, "train"), counted_rows(beta.rows, "holdout")
    if not holdout.height:
        return None
    # From the training residuals: those of the hold-out contain the drift that is being measured.
    length = _training_block_length(beta)
    stands_for, all_steps = _steps_stood_for(beta.rows, holdout)
    predicted, actual = _summands(beta, holdout)
    summed = summed_time(predicted * stands_for, actual * stands_for, _time_blocks(holdout, length))
    if summed is None:
        return None
    before, steps = _summands(beta, used)[0], matrix(holdout, ["interval_steps"])[:, 0]
    load_before = float(before.sum()) / float(matrix(used, ["interval_steps"]).sum())
    load = float(predicted @ stands_for) / float(steps @ stands_for)
    speed, two_sd = speed_change(beta, *(_time_blocks(rows, length) for rows in (used, holdout)))
    return replace(
        summed,
        speed_change_pct=speed,
        speed_change_2sd_pct=two_sd,
        drifting=speed is not None and two_sd is not None and abs(speed) > max(two_sd, MIN_SPEED_CHANGE_PCT),
        load_change_pct=100 * (load / load_before - 1) if load_before > 0 else None,
        steps_known_pct=100 * float(steps.sum()) / max(all_steps, float(steps.sum())),
    )


def _steps_stood_for(rows: pl.DataFrame, holdout: pl.DataFrame) -> tuple[Vector, float]:
    """Return how many steps of its server and epoch each step of the held-out rows stands for, shape (n,), and all
    steps.
    """
    # Idle gaps and restarts do not count as steps.
    idle = splits.is_excluded(splits.LEFT_OUT_ALWAYS)
    first, end = pl.col("step_id").min(), (pl.col("step_id") + pl.col("interval_steps")).max()
    steps = end - first - pl.col("interval_steps").filter(idle).sum()
    of_engine = rows.filter(split="holdout").group_by(ENGINE).agg(steps=steps)
    joined = holdout.join(of_engine, on=ENGINE, how="left", maintain_order="left")
    share = (pl.col("steps") / pl.col("interval_steps").sum().over(ENGINE)).clip(lower_bound=1.0)
    return np.asarray(joined.select(share).to_series().to_numpy()), float(of_engine["steps"].sum())


def _time_blocks(rows: pl.DataFrame, length: int) -> Integers:
    """Return the number of each row's block of time, of about `length` rows; blocks are numbered over all servers."""
    server, time = server_numbers(rows), rows.select(in_time()).to_series().to_numpy()
    servers = int(server.max()) + 1
    count = max(min(round(rows.height / servers / length), MOST_HOLDOUT_BLOCKS // servers), FEWEST_HOLDOUT_BLOCKS)
    return np.asarray(time_blocks(server, time, count) + server * count)


MIN_SPEED_CHANGE_PCT = 3.0
"""Smallest change of speed that is called one. A form that does not suit the server, and a load that changes, look like
1 to 2 %."""


def speed_change(
    beta: LinearFit, train_blocks: Integers, holdout_blocks: Integers
) -> tuple[float | None, float | None]:
    """Return how much longer steps of equal batches take in the hold-out than in the training part, in percent.

    Within each group of equal batches the medians of measured over predicted time are compared, so that an error of the
    model on such batches cancels. Groups are weighted by their rows in the part that has fewer. Null where no group has
    10 rows of both parts.

    The second value is two standard deviations of the first: each part has the standard error of the medians of its
    blocks of time, of measured time relative to that of equal batches in the training part.

    Args:
        beta: The fit.
        train_blocks: Block of time of each counted training row.
        holdout_blocks: Block of time of each counted held-out row.
    """
    parts = [counted_rows(beta.rows, split) for split in ("train", "holdout")]
    predicted = [predict_regimes(beta.regimes, rows) for rows in parts]
    if not all(p.size and (p > 0).all() for p in predicted):
        return None, None
    group, block = _equal_batches(beta, parts, predicted), (train_blocks, holdout_blocks)
    ratio = [target_of(rows) / us for rows, us in zip(parts, predicted, strict=True)]
    rows = pl.concat(pl.DataFrame({"part": k, "group": group[k], "block": block[k], "ratio": ratio[k]}) for k in (0, 1))
    before, after = (pl.col("ratio").filter(part=part) for part in (0, 1))
    fewest = pl.min_horizontal(before.len(), after.len())
    change = after.median() / before.median()
    groups = rows.group_by("group").agg(before=before.median(), change=change, rows=fewest).sort("group")
    groups = groups.filter(pl.col("rows") >= MIN_HOLDOUT_ROWS)
    if not groups.height:
        return None, None
    relative = pl.col("ratio") / pl.col("before")
    levels = rows.join(groups, on="group").group_by("part", "block").agg(level=relative.median())
    variances = levels.group_by("part").agg(level=pl.col("level").var() / pl.len())["level"]
    two_sd = None if variances.null_count() else 200 * math.sqrt(variances.sum())
    return 100 * (float(np.average(groups["change"], weights=groups["rows"])) - 1), two_sd


def _equal_batches(beta: LinearFit, parts: Sequence[pl.DataFrame], predicted: Sequence[Vector]) -> list[Integers]:
    """Return the group of equal batches of each row, by part.

    Equal are batches within a tenth of the model's predictions and a fifth of the term that moves predictions most: of
    two terms the other is then about equal too. Held-out rows outside the training range have a separate group.
    """

    def effect(term: Term) -> float:
        return abs(term.value) * float(np.std(matrix(parts[0], [term.feature])))

    def groups_of_equal_size(values: Sequence[Vector], count: int) -> list[Integers]:
        cuts = np.quantile(np.concatenate(values), np.arange(1, count) / count)
        return [np.searchsorted(cuts, v) for v in values]

    groups = groups_of_equal_size(predicted, 10)
    if beta.terms:
        name = max(beta.terms, key=effect).feature
        fifths = groups_of_equal_size([matrix(rows, [name])[:, 0] for rows in parts], 5)
        groups = [5 * tenth + fifth for tenth, fifth in zip(groups, fifths, strict=True)]
    outside, _ = extrapolated_rows(beta.regimes, parts[1])
    return [groups[0], np.where(outside, -1, groups[1])]


def _training_block_length(beta: LinearFit) -> int:
    lengths = [1]
    for _, rows in counted_rows(beta.rows, "train").sort(in_time()).group_by(SERVER):
        predicted, actual = _summands(beta, rows)
        lengths.append(block_length(predicted - actual))
    return max(lengths)


def _summands(beta: LinearFit, rows: pl.DataFrame) -> tuple[Vector, Vector]:
    """Return predicted and measured time of each row's steps."""
    steps = rows["interval_steps"].to_numpy().astype(float)
    return predict_regimes(beta.regimes, rows) * steps, rows["y"].to_numpy() * steps


def refit_on_holdout(fitted: LinearFit) -> tuple[FittedRegime, ...]:
    """Refit the regimes of a model on its held-out rows, with the estimator, penalty and signs it was trained with.

    A term that the held-out rows do not determine (constant, or a mix of other features) keeps its value. A regime with
    fewer held-out rows than a fit needs stays as it is.
    """
    holdout = counted_rows(fitted.rows, "holdout")
    active = active_regime(fitted.regimes, holdout)
    return tuple(
        _refitted(regime, holdout.filter(pl.Series(active == index))) for index, regime in enumerate(fitted.regimes)
    )


def _refitted(regime: FittedRegime, holdout: pl.DataFrame) -> FittedRegime:
    if holdout.height < MIN_TRAIN_ROWS:
        return regime
    offered = {f.name: f for f in regime.regime.features}
    data, _ = design_of(FitRows.of(holdout), [offered[t.feature] for t in regime.terms], relative=regime.relative)
    kept = [t for t in regime.terms if offered[t.feature] not in data.columns]
    # Terms that keep their value are subtracted from the target; the other terms are fitted to the remainder.
    kept_us = matrix(holdout, [t.feature for t in kept]) @ np.array([t.value for t in kept])
    model = estimator(regime.choice, regime.signs, data.columns)
    model.fit(data.x, data.y - kept_us, data.weights)
    terms = (*linear_terms(data.columns, model.coef_, data.x), *kept)
    return msgspec.structs.replace(regime, intercept=Number(value=model.intercept_), terms=terms)


def errors_by_phase(
    fitted: LinearFit, requests: pl.DataFrame, eval_filter: pl.Expr | None = None
) -> tuple[StepPhase, ...]:
    """Measure a step-time model on the held-out rows of each phase; servers without requests have no phases."""
    arrivals = requests.select(*SERVER, at_ns=pl.coalesce("arrival_ns", "queued_ns"))
    median = float(np.median(target_of(counted_rows(fitted.rows, "train"))))
    holdout = evaluation_rows(counted_rows(fitted.rows, "holdout"), eval_filter)
    in_phases = with_phases(holdout, "ts_ns", arrivals).drop_nulls("phase")
    return tuple(
        StepPhase(
            **cast("dict[str, Any]", phase),
            holdout=measure(target_of(rows), predict_regimes(fitted.regimes, rows)),
            baseline=measure(target_of(rows), np.full(rows.height, median)),
        )
        for (phase,), rows in in_phases.group_by("phase", maintain_order=True)
    )


# -- load ------------------------------------------------------------------------------------------------

LOAD = "load"
LOAD_FEATURES = (
    Feature("load_tokens", "token", "context_tokens + prefill_context_tokens"),
    Feature("load_requests", "request", "num_prefill_reqs + num_decode_reqs"),
)
"""Measures of load: the tokens in the caches of the batch, or its requests where the tokens are not known."""

LOWER_SHARE = 0.5
"""Share of the rows, by load, that a model is fitted on; it is evaluated on the rest."""

HOLDOUT_BINS = 12


def with_load(rows: pl.DataFrame) -> tuple[pl.DataFrame, str]:
    """Replace `LOAD_FEATURES` by the column `load`; return the rows and the name of its measure."""
    included = rows.filter(pl.col("excluded_reason").is_null())
    tokens, requests = (f.name for f in LOAD_FEATURES)
    by_tokens = included[tokens].null_count() / max(included.height, 1) <= MAX_UNKNOWN_SHARE
    load = pl.col(tokens if by_tokens else requests).cast(pl.Float64).fill_null(0.0)
    named = rows.with_columns(load.alias(LOAD)).drop(tokens, requests)
    return named, "running_tokens" if by_tokens else "batch_requests"


def load_cut(load: Vector) -> float | None:
    """Return the load that the lower half of rows does not exceed; null where either half is too small for a fit."""
    if not load.size:
        return None
    cut = float(np.quantile(load, LOWER_SHARE, method="inverted_cdf"))
    lower = int((load <= cut).sum())
    return cut if lower >= MIN_TRAIN_ROWS and load.size - lower >= MIN_HOLDOUT_ROWS else None


def beyond_load(data: Design, load: Vector, options: FitOptions) -> tuple[Vector, Flags] | None:
    """Fit the lower half of the load; return predictions of the upper half and which rows it has; null if rows are too
    few.

    Features, penalty and coefficients are all chosen again, only from rows of the lower half.
    """
    cut = load_cut(load)
    if cut is None:
        return None
    upper = load > cut
    return _fitted_below(data, ~upper, options, max_iter=FEW_ROUNDS)(data.x[upper]), upper


def mean_error(data: Design, predicted: Vector, rows: Flags) -> float:
    """Return the mean absolute error of predictions of some rows, weighted by their counts."""
    counts = data.counts[rows]
    return float(np.abs(predicted - data.y[rows]) @ counts / counts.sum())


def _fitted_below(
    data: Design, lower: Flags, options: FitOptions, *, max_iter: int = MAX_ITER
) -> Callable[[Matrix], Vector]:
    """Fit the `lower` rows and return a function that predicts features of shape (n, n_features), clipped at 0."""
    kept, _ = usable_features(data.x[lower], [c.name for c in data.columns])
    below = data.part(lower, kept)
    model = below.fit(below.ranked_first(options), options.signs, max_iter=max_iter)
    return lambda features: np.asarray(np.maximum(model.predict(features[:, kept]), 0.0))


_FITTED = pl.col("excluded_reason").is_null() | (pl.col("split") == "holdout")
"""Rows to fit, whichever part they are in: training rows lose warm-up and outliers, which held-out rows keep."""


def load_extrapolation(
    fitted: LinearFit, features: Sequence[Feature], load: str, options: FitOptions
) -> LoadExtrapolation | None:
    """Fit the form of a model on the lower half of the load of a whole run and measure it on the upper half.

    Both halves hold rows of the training part and of the hold-out; null where rows are too few.
    """
    rows = fitted.rows.filter(~splits.is_excluded(splits.NEVER_EVALUATED))
    kept = rows.filter(_FITTED)
    cut = load_cut(kept[LOAD].to_numpy())
    if cut is None:
        return None
    used = kept.filter(pl.col(LOAD) <= cut)
    above = evaluation_rows(rows.filter(pl.col(LOAD) > cut), options.eval_filter)
    errors, names = _error_of_a_fit(used, above, features, options)
    if errors is None:
        return None
    return LoadExtrapolation(
        **asdict(errors),
        load=load,
        cut=cut,
        gradient_boosting=reference(used, above, names) if options.reference else None,
    )


def _error_of_a_fit(
    used: pl.DataFrame, tested: pl.DataFrame, features: Sequence[Feature], options: FitOptions
) -> tuple[Metrics | None, list[str]]:
    """Refit a form on some rows and measure it on others; return the features too. Null where rows are too few."""
    # The noise of the last row of a log is not known: the fit of a model has no such row, these may have.
    used = used.drop_nulls("cycle_sd_us") if "cycle_sd_us" in used.columns else used
    if used.height < MIN_TRAIN_ROWS or tested.height < MIN_HOLDOUT_ROWS:
        return None, []
    offered = [f for f in features if f.name in used.columns and not used[f.name].null_count()]
    offered = [f for f in offered if not tested[f.name].null_count()]
    data, _ = design_of(FitRows.of(used), offered, relative=options.relative)
    if not data.columns:
        return None, []
    names = [c.name for c in data.columns]
    predict = _fitted_below(data, np.ones(len(data.y), dtype=bool), options)
    return measure(target_of(tested), predict(matrix(tested, names))), names


def error_by_stretch(fitted: LinearFit, features: Sequence[Feature], options: FitOptions) -> Metrics | None:
    """Fit the form of a model on seven of ten equal blocks of each server's rows, and measure it on the third, sixth
    and ninth.

    The last 30 % of a run that ends in a drain have small batches only: the blocks have the load of the whole run. Null
    where rows are too few.
    """
    rows = fitted.rows.filter(~splits.is_excluded(splits.NEVER_EVALUATED))
    position = in_time().rank("ordinal").over(SERVER) - 1
    is_held_out = (position * 10 // pl.len().over(SERVER)) % 3 == 2
    # Rows that a fit leaves out are errors like any other once they are held out.
    tested = evaluation_rows(rows.filter(is_held_out), options.eval_filter)
    return _error_of_a_fit(rows.filter(~is_held_out & _FITTED), tested, features, options)[0]


def error_over_load(fitted: LinearFit, load: str, options: FitOptions) -> ErrorOverLoad | None:
    """Measure a model on held-out rows in groups of equal size by load; null where there are no rows."""
    used = counted_rows(fitted.rows, "train")
    holdout = evaluation_rows(counted_rows(fitted.rows, "holdout"), options.eval_filter)
    if not used.height or not holdout.height:
        return None
    holdout = holdout.sort(LOAD)
    loads, actual, predicted = (
        holdout[LOAD].to_numpy(),
        target_of(holdout),
        predict_regimes(fitted.regimes, holdout),
    )
    # Groups of equal size: in bins of equal width the highest loads would be a row or two.
    groups = np.array_split(np.arange(holdout.height), min(HOLDOUT_BINS, holdout.height // MIN_HOLDOUT_ROWS or 1))
    return ErrorOverLoad(
        load=load,
        training_range=(float(used[LOAD].to_numpy().min()), float(used[LOAD].to_numpy().max())),
        bins=tuple(LoadBin(float(loads[g[0]]), float(loads[g[-1]]), measure(actual[g], predicted[g])) for g in groups),
    )


def beyond_training(terms: Sequence[Term], steps: pl.DataFrame) -> tuple[str, ...]:
    """Return a note for each feature whose largest value in the steps is more than twice its largest one in training.

    Where few steps are sampled few have a known time, and the longest prompts may be among the rest.
    """
    notes = []
    for term in (term for term in terms if term.feature in steps.columns):
        name, (_, trained_max) = term.feature, term.limits
        values = steps[name].drop_nulls()
        most = values.max()
        if isinstance(most, int | float) and most > 2 * max(trained_max, 0.0):
            share = 100 * int((values > trained_max).sum()) / len(values)
            notes.append(
                f"{name} is up to {trained_max:g} in the training rows and up to {most:g} in the runs' steps "
                f"({share:.2g} % are beyond): its coefficient says nothing of those"
            )
    return tuple(notes)
