"""Training frames: one row per step or request, with its measured time and the features known when the interval began.

`step_rows` and `beta_rows` make the frame of step times, `alpha_rows` the frame of one target of requests.
Features describe the state before the interval, never events within it: a prediction could not know them.

Names in formulas that are not columns are numbers of one server (`constants_of`) or terms over columns
(`with_roofline`); a coefficient file carries the `definitions` of both, and needs neither config.json, the
GPU catalogue nor tracefit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import polars as pl

from tracefit.features.batches import add_batch_terms, batch_formulas
from tracefit.features.law import law_formulas
from tracefit.features.roofline import (
    LEAST_TIME,
    ROOFLINE_TERMS,
    WORK_TERMS,
    add_roofline,
    add_work,
    number_text,
    work_formulas,
)
from tracefit.features.sets import FeatureSet, add_features
from tracefit.models.formulas import names_in, parse_formula
from tracefit.server.architecture import AttentionKind
from tracefit.statistics import divided
from tracefit.tables.schema import ENGINE, SERVER
from tracefit.tables.sources import DURATION_SOURCE, is_from

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tracefit.models.targets import Target
    from tracefit.server.context import RunContext


STATE_COLUMNS = (
    "running_depth",
    "waiting_depth",
    "kv_usage_ratio",
    "num_prefill_reqs",
    "num_decode_reqs",
    "prefill_tokens",
    "decode_tokens",
)
"""Columns of a step that describe the engine's state."""


# -- the server's numbers --------------------------------------------------------------------------------

_SETTINGS = (
    "tensor_parallel",
    "pipeline_parallel",
    "data_parallel",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "gpu_memory_utilization",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "enforce_eager",
    "block_size",
)
_MODEL_COLUMNS = ("layers", "is_moe", "size_proxy", "kv_bytes_per_token")
_OF_GPU = ("compute_to_bandwidth", "relative_performance")


def constants_of(context: RunContext) -> dict[str, float | None]:
    """Return the values that are the same for every row of a run, by their name in formulas; null if unknown."""
    settings, model, gpu = context.settings, context.architecture, context.gpu
    kinds = get_args(AttentionKind)
    values: dict[str, float | None] = {
        **{name: getattr(model, name) if model else None for name in _MODEL_COLUMNS},
        **{f"is_{kind.lower()}": model.attention == kind if model else None for kind in kinds},
        **{name: getattr(gpu, name) if gpu else None for name in _OF_GPU},
        "gpu_memory_gb": gpu.memory_gb if gpu else None,
        **{name: getattr(settings, name) for name in _SETTINGS},
    }
    return {name: None if value is None else float(value) for name, value in values.items()}


def with_roofline(timeline: pl.DataFrame, context: RunContext) -> pl.DataFrame:
    """Add roofline terms (null without model and GPU), work (null without model) and `BATCH_TERMS` of every step."""
    model, gpu, tp = context.architecture, context.gpu, context.settings.tensor_parallel or 1
    terms = (*WORK_TERMS, *ROOFLINE_TERMS)
    timeline = timeline.with_columns(pl.lit(None, pl.Float64).alias(name) for name in terms)
    if model is not None:
        timeline = add_work(timeline, model, tp=tp)
        if gpu is not None:
            timeline = add_roofline(timeline, model, gpu, tp=tp)
    return add_batch_terms(timeline, context)


def definitions(formulas: Iterable[str], context: RunContext) -> dict[str, str]:
    """Return the definitions of the names in formulas that are not columns, in name order."""
    model, gpu, tp = context.architecture, context.gpu, context.settings.tensor_parallel or 1
    defined = {name: number_text(value) for name, value in constants_of(context).items() if value is not None}
    defined |= batch_formulas(context)
    if model is not None:
        defined |= work_formulas(model, tp=tp)
        defined |= law_formulas(context) if gpu is not None else {}
    needed: dict[str, str] = {}
    pending = list(formulas)
    for formula in pending:  # it grows on the way: a definition may use further names
        names = names_in(parse_formula(formula, where="feature")) & defined.keys() - needed.keys()
        needed |= {name: defined[name] for name in names}
        pending += (defined[name] for name in names)
    return dict(sorted(needed.items()))


# -- step times ------------------------------------------------------------------------------------------

_FLAGS = ("preemption_heavy", "has_prefill", "is_empty")


def step_rows(
    timeline: pl.DataFrame,
    features: FeatureSet,
    constants: Mapping[str, float | None],
    lags: Mapping[tuple[str, str], int],
) -> pl.DataFrame:
    """Return one row per step of the timeline with the features of the batch that executes during its cycle.

    `lags` are the steps that scheduling runs ahead of execution, by (run_id, server): with 1, the batch of
    the previous step executes.

    Returns:
        The timeline in step order with the features, preemption_heavy, has_prefill and is_empty (nothing runs and
        nothing waits) of the batch that executes.
    """
    rows = add_features(timeline.sort(*ENGINE, "step_id"), features, constants)
    rows = rows.with_columns(
        preemption_heavy=_preemption_heavy(rows),
        has_prefill=pl.col("prefill_tokens") > 0,
        is_empty=(pl.col("running_depth") == 0) & (pl.col("waiting_depth") == 0),
    )
    if LEAST_TIME not in rows.columns:
        rows = rows.with_columns(pl.lit(None, pl.Float64).alias(LEAST_TIME))
    return _shifted(rows, [*features.names, *_FLAGS, LEAST_TIME], lags)


def _mean_if_known(name: str) -> pl.Expr:
    return pl.when(pl.col(name).null_count() == 0).then(pl.col(name).mean()).alias(name)


TOO_FAST = "faster_than_gpu"
"""Reason to leave out a step that took less time than the rated speed of the GPU allows: its time, or its batch, is not
its own."""

MOST_TOO_FAST = 0.5
"""Share of step times faster than the GPU from which on model, GPU or tensor parallelism are stated wrongly, and the
steps count."""

_LEAST_STEP_SHARE = 0.01
"""Share by which a measured time may be below the least one: for times and rates that are rounded."""


def is_too_fast(time_us: str) -> pl.Expr:
    """Say whether a time is shorter than `LEAST_TIME`; false where that is unknown."""
    return (pl.col(time_us) < pl.col(LEAST_TIME) * (1 - _LEAST_STEP_SHARE)).fill_null(value=False)


def beta_rows(
    timeline: pl.DataFrame,
    features: FeatureSet,
    constants: Mapping[str, float | None],
    lags: Mapping[tuple[str, str], int],
    source: str,
) -> pl.DataFrame:
    """Return one row per step, or interval of steps, whose time is known: features and `y`, both means per step.

    A model of step times is linear in its features: the mean cycle of an interval is the model at the mean
    features of its steps. With scheduling a step ahead (`lags` 1) step k executes between the starts of steps
    k+1 and k+2: a cycle is explained by the composition of the step before it.

    `source` is `clock` for cycle times, `duration` for `step.duration_us` as it is.

    Returns:
        Columns of the engine, step_id, ts_ns, source, interval_steps, cycle_sd_us, y (us), excluded_reason,
        preemption_heavy, has_prefill, and the features.
    """
    is_duration = source == "duration"
    if is_duration:
        # Scheduler CPU time is spent on the step's own batch, whenever that executes: no lag, and no interval of steps.
        lags = {}
        timeline = timeline.with_columns(
            cycle_us=pl.col("duration_us").cast(pl.Float64),
            cycle_source=pl.lit(DURATION_SOURCE.name),
            interval_steps=pl.lit(1, pl.Int64),
            cycle_sd_us=pl.lit(0.0),
            idle_after=pl.lit(value=False),
        )
    rows = step_rows(timeline, features, constants, lags)
    # The mean of a linear model is the model of the means: one row per interval, however many steps it has.
    # Null if one of its steps is unknown.
    means = [_mean_if_known(n) for n in features.names]
    # An unknown value of a single step stays unknown; an interval takes the values of its known steps.
    flags = [pl.col(n).any(ignore_nulls=not is_duration).alias(n) for n in _FLAGS]
    # A duration may be that of schedule(), which is not the GPU's.
    least = pl.lit(None, pl.Float64) if is_duration else _mean_if_known(LEAST_TIME)
    recorded = is_from(lambda source: source.is_stated, "composition_source")
    begins = pl.col("cycle_us").is_not_null() | pl.col("ts_start_ns").is_not_null() | recorded | is_duration
    other_engine = pl.any_horizontal(pl.col(name) != pl.col(name).shift(1) for name in ENGINE)
    # An interval begins at every step with a cycle or a known start, at every recorded step, and with every engine.
    steps = rows.with_columns(interval=(begins | other_engine.fill_null(value=False)).cum_sum())
    idle = (pl.col("idle_after") | pl.col("is_empty")).fill_null(value=False)
    too_fast = is_too_fast("y")
    too_fast &= too_fast.mean() <= MOST_TOO_FAST
    reason = pl.when(idle).then(pl.lit("idle_gap")).when(too_fast).then(pl.lit(TOO_FAST))
    # Only intervals with a known total time are rows of the fit; the others mark where the next one begins.
    return (
        steps.filter(pl.col("cycle_us").is_not_null())
        .select(
            *(*ENGINE, "interval", "step_id", "interval_steps", "cycle_sd_us", "idle_after"),
            ts_ns="ts_start_ns",
            source="cycle_source",
            y="cycle_us",
        )
        .join(steps.group_by("interval").agg(*means, *flags, least.alias(LEAST_TIME)), on="interval", how="left")
        .with_columns(excluded_reason=reason)
        .drop("interval", LEAST_TIME)
        .sort(*ENGINE, "step_id")
    )


def _shifted(rows: pl.DataFrame, columns: list[str], lags: Mapping[tuple[str, str], int]) -> pl.DataFrame:
    """Give each step the batch that executes during its cycle: with scheduling ahead, that of the previous step.

    Rows are in step order, engine by engine.
    """
    if not any(lags.values()):
        return rows
    same_engine = pl.all_horizontal(pl.col(name) == pl.col(name).shift(1) for name in ENGINE)
    follows = same_engine & (pl.col("step_id").shift(1) == pl.col("step_id") - 1)

    def before(name: str) -> pl.Expr:
        value = pl.when("_follows").then(pl.col(name).shift(1))
        return pl.when(pl.col("_lag") > 0).then(value).otherwise(name).alias(name)

    marked = with_lag(rows, lags, "_lag").with_columns(_follows=follows)
    return marked.with_columns(before(name) for name in columns).drop("_lag", "_follows")


def with_lag(rows: pl.DataFrame, lags: Mapping[tuple[str, str], int], column: str = "lag") -> pl.DataFrame:
    """Add how many steps scheduling runs ahead of execution on the server of each row."""
    schema = {**{name: rows.schema[name] for name in SERVER}, column: pl.Int64()}
    # A join, not a condition for each: there may be thousands of runs.
    by_server = pl.DataFrame([(*server, lag) for server, lag in lags.items()], schema=schema, orient="row")
    joined = rows.join(by_server, on=SERVER, how="left", maintain_order="left")
    return joined.with_columns(pl.col(column).fill_null(0))


def _preemption_heavy(rows: pl.DataFrame) -> pl.Expr:
    """Return which steps preempted a request, or mostly recompute the tokens of a resumed one.

    A request with output that is recomputed counts as one decode request with many tokens. In runs without
    any preemption many decode tokens have another cause (speculative decoding).
    """
    if not rows["num_preempted"].sum():
        return pl.lit(value=False)
    # As published for training rows: recomputation above half of the step's tokens.
    recomputed = pl.col("decode_tokens") - pl.col("num_decode_reqs")
    heavy = 2 * recomputed > pl.col("prefill_tokens") + pl.col("decode_tokens")
    return (pl.col("num_preempted") > 0) | heavy


# -- requests --------------------------------------------------------------------------------------------

WORKLOAD_COLUMNS = (
    "prompt_tokens",
    "max_tokens",
    "prefix_hit_ratio",
    "arrival_rate_per_s",
    "state_age_us",
    "step_residual_us",
    "batch_fullness",
    "tokens_ahead",
)
"""Columns of every alpha training frame that describe the request and its load, whether a model uses them or not."""


NOT_POSITIVE = "not_positive"
"""Reason to leave out a request whose interval ends at or before its beginning: an abort departs before it finishes."""


def alpha_rows(
    requests: pl.DataFrame, timeline: pl.DataFrame, queue: pl.DataFrame | None, target: Target
) -> pl.DataFrame:
    """Return one row per request whose target is known: `y` in us, and the engine's state when its interval began.

    `target.state` selects the state: the exact `queue` where given, or the batch of the `own_step` of the
    event. Otherwise it is the state of the latest step with a known start and batch, `state_age_us` earlier.

    `queue` is `queue_state`, null where the journeys are not complete; the timeline may be empty.
    """
    # Requests that finish in one step depart one after another: the API process works through all of them.
    finishing = pl.len().over([*ENGINE, "finished_step"])
    rows = requests.with_columns(
        target=pl.lit(target.name),
        y=pl.col(target.column),
        ts_ns=pl.col(target.begins),
        at_step=pl.col(target.step),
        finishing_reqs=pl.when(pl.col("finished_step").is_not_null()).then(finishing),
    ).filter(pl.col("y").is_not_null() & pl.col("ts_ns").is_not_null())
    rows = _with_workload(rows).with_columns(
        excluded_reason=pl.when(pl.col("y") <= 0).then(pl.lit(NOT_POSITIVE)),
        # Spans of stock vLLM have no request in the engine core.
        request_id=pl.coalesce("core_request_id", "request_id"),
    )
    if target.state == "own_step":
        rows = rows.join(_states(timeline), left_on=[*ENGINE, "at_step"], right_on=[*ENGINE, "step_id"], how="left")
        return rows.with_columns(state_age_us=pl.lit(0.0))
    # Backward in time only: a step that starts later includes the events of the interval.
    latest = _states(timeline).drop_nulls(["state_ns", "running_depth"]).sort("state_ns")
    rows = rows.sort("ts_ns").join_asof(latest, left_on="ts_ns", right_on="state_ns", by=ENGINE, check_sortedness=False)
    age = (pl.col("ts_ns") - pl.col("state_ns")) / 1e3
    rows = _with_next_start(rows.with_columns(state_age_us=age), latest)
    return _with_queue(rows, queue) if target.state == "queue" else rows


ARRIVAL_WINDOW_S = 10.0
"""Length of the window before an arrival in which the arrival rate is counted."""

_AFTER_ALL_NS = 2**62


def _with_workload(rows: pl.DataFrame) -> pl.DataFrame:
    """Add prefix_hit_ratio, and arrival_rate_per_s of the server in the window before the request arrived."""
    arrival, window = pl.col("arrival_ns"), f"{round(ARRIVAL_WINDOW_S * 1e9)}i"
    # The index of a rolling window has no nulls: unknown arrivals are the last rows of their server.
    earlier = pl.len().rolling(arrival.fill_null(_AFTER_ALL_NS), period=window, closed="left").over(SERVER)
    hits = pl.col("cached_prompt_tokens") / pl.col("prompt_tokens")
    return rows.sort(*SERVER, "arrival_ns", nulls_last=True).with_columns(
        prefix_hit_ratio=pl.when(pl.col("prompt_tokens") > 0).then(hits),
        arrival_rate_per_s=pl.when(arrival.is_not_null()).then(divided(earlier, ARRIVAL_WINDOW_S)),
    )


def _with_next_start(rows: pl.DataFrame, starts: pl.DataFrame) -> pl.DataFrame:
    """Add step_residual_us, the time from the event to the next known step start: the rest of the step in progress.

    Null if the engine was idle.
    """
    ends = starts.select(*ENGINE, next_start_ns="state_ns").sort("next_start_ns")
    joined = rows.sort("ts_ns").join_asof(
        ends, left_on="ts_ns", right_on="next_start_ns", by=ENGINE, strategy="forward", check_sortedness=False
    )
    rest = (pl.col("next_start_ns") - pl.col("ts_ns")) / 1e3
    busy = (pl.col("running_depth") > 0) | (pl.col("waiting_depth") > 0)
    return joined.with_columns(step_residual_us=pl.when(busy).then(rest))


_QUEUE_COLUMNS = (
    "outputs_ahead",
    "token_steps_ahead",
    "tokens_ahead",
    "blocks_ahead",
    "running_remaining_tokens",
    "free_slots",
    "free_tokens",
    "block_demand",
)


def _with_queue(rows: pl.DataFrame, queue: pl.DataFrame | None) -> pl.DataFrame:
    """Replace the state of the latest step by the exact state of the queue, if known."""
    if queue is None:
        return rows.with_columns(pl.lit(None, pl.Float64).alias(name) for name in _QUEUE_COLUMNS)
    keys = [*ENGINE, "trace_id", "request_id"]
    exact = {
        "waiting_depth": pl.col("waiting_ahead"),
        "running_depth": pl.col("running_reqs"),
        "kv_blocks_free": pl.col("kv_blocks_free"),
        "kv_usage_ratio": 1 - pl.col("kv_blocks_free") / pl.col("kv_blocks_total"),
        # The exact state is that of the instant itself.
        "state_age_us": pl.when(pl.col("waiting_ahead").is_not_null()).then(0.0),
    }
    state = queue.select(*keys, *_QUEUE_COLUMNS, **{f"exact_{name}": value for name, value in exact.items()})
    return rows.join(state, on=keys, how="left", maintain_order="left").with_columns(
        pl.coalesce(f"exact_{name}", name).alias(name) for name in exact
    )


def _states(timeline: pl.DataFrame) -> pl.DataFrame:
    """Return batch and queue of each step, as the state on arrival of requests."""
    # Used blocks may be an estimate from the journeys, above the total.
    free = (pl.col("kv_blocks_total") - pl.col("kv_blocks_used")).clip(lower_bound=0)
    return timeline.select(
        *ENGINE,
        "step_id",
        *STATE_COLUMNS,
        "kv_blocks_used",
        state_ns=pl.col("ts_start_ns"),
        kv_blocks_free=free,
    )
