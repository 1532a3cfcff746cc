"""Compose a request's latencies from predicted step times and overheads.

TTFT = admission + queue wait + steps to the first token; ITL = steps after it / (tokens - 1); E2E = TTFT + (tokens - 1) ITL.

There are two ways to know the steps of a request. `teacher_forced` takes the batches and the waits that were traced and sums
the predicted times of exactly the steps the request was in: its error is that of the models. `averages_only` knows the
request's own prompt and output length and averages over the training part (`averages_of`): its error is what a consumer gets
that simulates no batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from tracefit.statistics import mean_of
from tracefit.tables.keys import ENGINE, SERVER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tracefit.statistics import Vector

REQUEST = [*ENGINE, "trace_id", "core_request_id"]


def teacher_forced(
    requests: pl.DataFrame, steps: pl.DataFrame, waits: pl.DataFrame, lags: Mapping[tuple[str, str], int]
) -> pl.DataFrame:
    """Sum the predicted times of the steps each request was in, and its traced waits.

    A wait ends at a step start: the queue wait lasts from QUEUED to the start of the first step, the wait after a preemption
    from the start of the step that preempted to the start of the step that resumed. With scheduling a step ahead (lag 1)
    step k executes in the cycle after its own, so that tokens come a cycle later.

    Args:
        requests: The `requests` table.
        steps: Columns of the engine, step_id, ts_start_ns, predicted_us (null where the batch is not known).
        waits: `requeue_waits`.
        lags: (run_id, server) to steps that scheduling runs ahead of execution.

    Returns:
        `requests` with forced_queue_wait_us (queue), forced_prefill_us and forced_decode_us (without the waits after a
        preemption), forced_requeue_before_us and forced_requeue_after_us (the first token); null where a step is not
        known.
    """
    # A sum over consecutive steps is the difference of a cumulative sum at its two ends: no row per request and step.
    axis = _axis(steps)
    lag = pl.col("lag")
    rows = requests.join(
        _lag_column(requests, lags), on=SERVER, how="left", maintain_order="left"
    ).with_columns(token_step=pl.col("first_token_step") + lag, last_step=pl.col("finished_step") + lag)
    ends = {"first_scheduled_step": "begin", "token_step": "token", "last_step": "last"}
    for column, prefix in ends.items():
        rows = _located(rows, axis, column, prefix)
    rows = rows.join(_requeued(waits, axis, requests, lags), on=REQUEST, how="left", maintain_order="left")
    prefill = _summed("begin", "token", inclusive=True)
    decode = _summed("token", "last", inclusive=False)
    never_requeued = pl.col("requeues").is_null()
    requeue = {
        name: pl.when(never_requeued).then(0.0).otherwise(pl.col(name))
        for name in ("requeue_before_us", "requeue_after_us", "skipped_before_us", "skipped_after_us")
    }
    return rows.select(
        *requests.columns,
        forced_queue_wait_us=(pl.col("begin_start_ns") - pl.col("queued_ns")) / 1e3,
        forced_prefill_us=prefill - requeue["skipped_before_us"],
        forced_decode_us=decode - requeue["skipped_after_us"],
        forced_requeue_before_us=requeue["requeue_before_us"],
        forced_requeue_after_us=requeue["requeue_after_us"],
    )


def _axis(steps: pl.DataFrame) -> pl.DataFrame:
    """Return each step with cumulative sums up to its end on its engine: predicted time, and steps of unknown time."""
    ordered = steps.sort(*ENGINE, "step_id")
    predicted = pl.col("predicted_us")
    return ordered.select(
        *ENGINE,
        "step_id",
        start_ns=pl.col("ts_start_ns"),
        own_us=predicted.fill_null(0.0),
        own_unknown=predicted.is_null().cast(pl.Int64),
        sum_us=predicted.fill_null(0.0).cum_sum().over(ENGINE),
        unknown=predicted.is_null().cast(pl.Int64).cum_sum().over(ENGINE),
        # Rows and step ids advance together unless the frame lacks a step: `_summed` compares them.
        row=pl.int_range(pl.len()).over(ENGINE),
        at=pl.col("step_id"),
    )


def _located(rows: pl.DataFrame, axis: pl.DataFrame, column: str, prefix: str) -> pl.DataFrame:
    named = axis.rename({c: f"{prefix}_{c}" for c in axis.columns if c not in {*ENGINE, "step_id"}})
    return rows.join(
        named, left_on=[*ENGINE, column], right_on=[*ENGINE, "step_id"], how="left", maintain_order="left"
    )


def _summed(first: str, last: str, *, inclusive: bool) -> pl.Expr:
    """Return the predicted time between two located steps, with `last` and, if `inclusive`, `first` in it.

    Null unless every step between is known.
    """

    def difference(name: str, own: str) -> pl.Expr:
        whole = pl.col(f"{last}_{name}") - pl.col(f"{first}_{name}")
        return whole + pl.col(f"{first}_{own}") if inclusive else whole

    every = pl.col(f"{last}_row") - pl.col(f"{first}_row") == pl.col(f"{last}_at") - pl.col(f"{first}_at")
    known = every & (difference("unknown", "own_unknown") == 0)
    return pl.when(known).then(difference("sum_us", "own_us"))


def _requeued(
    waits: pl.DataFrame, axis: pl.DataFrame, requests: pl.DataFrame, lags: Mapping[tuple[str, str], int]
) -> pl.DataFrame:
    """Sum each request's traced waits after preemptions, and the predicted time of the steps these waits skip.

    With scheduling ahead, the step before the preemption still executes `lag` cycles later: the wait begins after it.
    """
    known = waits.rename({"request_id": "core_request_id"}).join(
        _lag_column(waits, lags), on=SERVER, how="left"
    )
    token = requests.select(*REQUEST, "first_token_step").unique(REQUEST)
    known = known.join(token, on=REQUEST, how="left").with_columns(
        from_step=pl.min_horizontal(pl.col("preempted_step") + pl.col("lag"), "resumed_step")
    )
    for column, prefix in {"from_step": "lost", "resumed_step": "back"}.items():
        known = _located(known, axis, column, prefix)
    # The sum runs to the end of the step that resumes, whose own time is no wait.
    skipped = _summed("lost", "back", inclusive=True) - pl.col("back_own_us")
    waited = (pl.col("back_start_ns") - pl.col("lost_start_ns")) / 1e3
    # A preemption before the first token lengthens TTFT, a later one the time between tokens.
    before = (pl.col("preempted_step") <= pl.col("first_token_step")).fill_null(value=True)
    return known.group_by(REQUEST).agg(
        requeues=pl.len(),
        requeue_before_us=_known_sum(waited.filter(before)),
        requeue_after_us=_known_sum(waited.filter(~before)),
        skipped_before_us=_known_sum(skipped.filter(before)),
        skipped_after_us=_known_sum(skipped.filter(~before)),
    )


def _known_sum(values: pl.Expr) -> pl.Expr:
    return pl.when(values.null_count() == 0).then(values.sum())


def _lag_column(rows: pl.DataFrame, lags: Mapping[tuple[str, str], int]) -> pl.DataFrame:
    servers = rows.select(SERVER).unique(maintain_order=True)
    keys = servers.rows()
    return servers.with_columns(
        lag=pl.Series([lags.get((run, server), 0) for run, server in keys], dtype=pl.Int64)
    )


@dataclass(frozen=True, slots=True)
class Averages:
    """Averages over the training part, in us unless stated otherwise; null where no row gives one.

    Attributes:
        decode_us: Mean predicted step time, each step weighted by its decoding requests.
        requeue_per_token_us: Wait after preemptions, per output token after the first.
        requeue_before_us: Wait after preemptions before the first token, per request.
        hit_ratio: Share of the prompt tokens found in the prefix cache; 0 where not known.
        prompt_step: One row: the columns of the timeline, mean over the requests whose prompts steps carried.
        other_prompts: Prompt tokens of the other requests in such a step.
    """

    decode_us: float | None
    requeue_per_token_us: float
    requeue_before_us: float
    hit_ratio: float
    prompt_step: pl.DataFrame | None
    other_prompts: float


def averages_of(steps: pl.DataFrame, requests: pl.DataFrame) -> Averages:
    """Average the training part.

    Args:
        steps: Its steps: the columns of the timeline and predicted_us.
        requests: Its requests, teacher-forced.
    """
    # A request meets a step in proportion to the requests in it: means are over requests, not over steps.
    decoding = steps.filter(pl.col("predicted_us").is_not_null() & (pl.col("num_decode_reqs") > 0))
    weight = pl.col("num_decode_reqs")
    has_hits = pl.col("prompt_tokens").is_not_null() & pl.col("cached_prompt_tokens").is_not_null()
    cached, prompt = (
        requests.filter(has_hits).select(pl.col("cached_prompt_tokens", "prompt_tokens").sum()).row(0)
    )
    decoded = (pl.col("output_tokens") - 1).clip(lower_bound=0)
    known = pl.col("forced_requeue_after_us").is_not_null() & decoded.is_not_null()
    after, tokens = (
        requests.filter(known).select(pl.col("forced_requeue_after_us").sum(), decoded.sum()).row(0)
    )
    prompts = steps.filter((pl.col("num_prefill_reqs") > 0) & (pl.col("prefill_tokens") > 0))
    share = pl.col("num_prefill_reqs") / pl.col("num_prefill_reqs").sum()
    other_tokens = pl.col("prefill_tokens") * (1 - 1 / pl.col("num_prefill_reqs"))
    return Averages(
        decode_us=decoding.select((pl.col("predicted_us") * weight).sum() / weight.sum()).item()
        if decoding.height
        else None,
        requeue_per_token_us=float(after) / tokens if tokens else 0.0,
        requeue_before_us=mean_of(requests["forced_requeue_before_us"]) or 0.0,
        hit_ratio=float(cached) / float(prompt) if prompt else 0.0,
        prompt_step=_mean_step(prompts) if prompts.height else None,
        other_prompts=float(prompts.select((other_tokens * share).sum()).item() or 0.0),
    )


def averages_only(
    requests: pl.DataFrame,
    averages: Averages,
    step_time: Callable[[pl.DataFrame], Vector],
    *,
    overheads_us: Mapping[str, pl.Series | float | None],
    token_budget: int | None,
    lag_steps: int,
) -> pl.DataFrame:
    """Predict each request from averages and its own prompt and output lengths.

    A prompt longer than what the mean batch leaves of the step's token budget is computed in equal chunks. With scheduling a
    step ahead the first token comes a step later.

    Args:
        requests: Rows with prompt_tokens.
        averages: Averages over the training part.
        step_time: Timeline rows to predicted step times in us.
        overheads_us: Target name to its expected duration, per request or the same for all; null without a model.
        token_budget: max_num_batched_tokens, null where not known.
        lag_steps: Steps that scheduling runs ahead of execution.

    Returns:
        `requests` with mean_prefill_us, mean_itl_us, and mean_<name>_us of every target.
    """
    itl = None if averages.decode_us is None else averages.decode_us + averages.requeue_per_token_us
    prefill = pl.Series([None] * requests.height, dtype=pl.Float64)
    if averages.prompt_step is not None and (averages.decode_us is not None or not lag_steps):
        extra = averages.requeue_before_us + lag_steps * (averages.decode_us or 0.0)
        prefill = _prompt_us(requests, averages, averages.prompt_step, step_time, token_budget) + extra
    return requests.with_columns(
        *(_column(us).alias(f"mean_{name}_us") for name, us in overheads_us.items()),
        mean_prefill_us=prefill,
        mean_itl_us=pl.lit(itl, pl.Float64),
    )


def _column(value: pl.Series | float | None) -> pl.Expr:
    return pl.lit(value) if isinstance(value, pl.Series) else pl.lit(value, pl.Float64)


def _prompt_us(
    requests: pl.DataFrame,
    averages: Averages,
    prompt_step: pl.DataFrame,
    step_time: Callable[[pl.DataFrame], Vector],
    token_budget: int | None,
) -> pl.Series:
    """Return the time of the steps that compute each request's prompt; null where its length is not known."""
    own = pl.col("own")
    # Running requests are scheduled first: prompts share what decodes leave of the token budget.
    left = (pl.lit(token_budget, pl.Float64) - pl.col("decode_tokens")).clip(lower_bound=1.0)
    chunks = pl.when(left.is_null()).then(1.0).otherwise((own / left).ceil()).clip(lower_bound=1.0)
    tokens = requests.select(
        own=(pl.col("prompt_tokens").cast(pl.Float64) * (1 - averages.hit_ratio)).clip(lower_bound=1.0),
        cached=pl.col("prompt_tokens").cast(pl.Float64) * averages.hit_ratio,
    )
    rows = tokens.join(prompt_step, how="cross").with_columns(chunks=chunks)
    chunk = own / pl.col("chunks")
    carried = chunk + averages.other_prompts
    rows = rows.with_columns(
        prefill_tokens=pl.when(left < carried).then(pl.max_horizontal(left, chunk)).otherwise(carried),
        # The k-th chunk finds k - 1 chunks in the cache: (chunks - 1) / 2 on average.
        prefill_context_tokens=pl.col("cached") + chunk * (pl.col("chunks") - 1) / 2,
    )
    predicted = pl.Series(
        step_time(rows.with_columns(own.fill_null(0.0), pl.col("prefill_tokens").fill_null(0.0)))
    )
    return rows.select(pl.when(own.is_not_null()).then(predicted * pl.col("chunks"))).to_series()


def _mean_step(prompts: pl.DataFrame) -> pl.DataFrame:
    """Average the numeric columns of steps over the requests whose prompts they carried."""
    weight = pl.col("num_prefill_reqs")
    numbers = [n for n, kind in prompts.schema.items() if kind.is_numeric()]
    means = [
        ((pl.col(n) * weight).sum() / weight.filter(pl.col(n).is_not_null()).sum()).alias(n) for n in numbers
    ]
    return prompts.select(means).fill_nan(None)
