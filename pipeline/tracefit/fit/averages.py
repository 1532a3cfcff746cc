"""Latencies of requests by someone who knows averages alone: the mean batch, the mean waits, the request's own lengths.

Everything is taken from the training part: a queue wait is the mean of the predicted ones, a decode step the mean
predicted step a decoding request was in, a prompt is computed in the mean step that carried prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

if TYPE_CHECKING:
    from collections.abc import Callable

    from tracefit.fit.metrics import Vector


@dataclass(frozen=True, slots=True)
class Averages:
    """What the training part says on the average; us where not told otherwise. Null where no row tells.

    Attributes:
        decode_us: Predicted time of a step, mean over the decoding requests of the steps.
        requeue_per_token_us: Wait after preemptions, per output token after the first.
        requeue_before_us: Wait after preemptions before the first token, per request.
        wait_us: Predicted queue wait.
        departure_us: Predicted departure overhead.
        hit_ratio: Share of the prompt tokens found in the prefix cache; 0 where nobody knows.
        prompt_step: One row: the columns of the timeline, mean over the requests whose prompts steps carried.
        other_prompts: Prompt tokens of the others in such a step.
    """

    decode_us: float | None
    requeue_per_token_us: float
    requeue_before_us: float
    wait_us: float | None
    departure_us: float | None
    hit_ratio: float
    prompt_step: pl.DataFrame | None
    other_prompts: float


def averages_of(
    steps: pl.DataFrame, requests: pl.DataFrame, *, wait_us: float | None, departure_us: float | None
) -> Averages:
    """Average the training part.

    Args:
        steps: Its steps: the columns of the timeline and predicted_us.
        requests: Its requests, teacher-forced.
        wait_us: Mean predicted queue wait.
        departure_us: Mean predicted departure overhead.
    """
    decoding = steps.filter(pl.col("predicted_us").is_not_null() & (pl.col("num_decode_reqs") > 0))
    weight = pl.col("num_decode_reqs")
    told = pl.col("prompt_tokens").is_not_null() & pl.col("cached_prompt_tokens").is_not_null()
    found = requests.filter(told).select(pl.col("cached_prompt_tokens", "prompt_tokens").sum()).row(0)
    decoded = (pl.col("output_tokens") - 1).clip(lower_bound=0)
    known = pl.col("forced_requeue_after_us").is_not_null() & decoded.is_not_null()
    after, tokens = (
        requests.filter(known).select(pl.col("forced_requeue_after_us").sum(), decoded.sum()).row(0)
    )
    prompts = steps.filter((pl.col("num_prefill_reqs") > 0) & (pl.col("prefill_tokens") > 0))
    share = pl.col("num_prefill_reqs") / pl.col("num_prefill_reqs").sum()
    others = pl.col("prefill_tokens") * (1 - 1 / pl.col("num_prefill_reqs"))
    return Averages(
        decode_us=decoding.select((pl.col("predicted_us") * weight).sum() / weight.sum()).item()
        if decoding.height
        else None,
        requeue_per_token_us=float(after) / tokens if tokens else 0.0,
        requeue_before_us=_number(requests["forced_requeue_before_us"].mean()) or 0.0,
        wait_us=wait_us,
        departure_us=departure_us,
        hit_ratio=float(found[0]) / float(found[1]) if found[1] else 0.0,
        prompt_step=_mean_step(prompts) if prompts.height else None,
        other_prompts=float(prompts.select((others * share).sum()).item() or 0.0),
    )


def averages_only(
    requests: pl.DataFrame,
    averages: Averages,
    step_time: Callable[[pl.DataFrame], Vector],
    *,
    admission_us: pl.Series | None,
    token_budget: int | None,
    lag_steps: int,
) -> pl.DataFrame:
    """Predict each request from averages and its own prompt and output lengths.

    A prompt that does not fit into what the mean batch leaves of the step's token budget is computed in equal parts.
    With scheduling a step ahead the first token comes a step later.

    Args:
        requests: Rows with prompt_tokens.
        averages: Of the training part.
        step_time: Timeline rows to predicted step times in us.
        admission_us: Expected admission of each request, null where no model tells.
        token_budget: max_num_batched_tokens, null where not known.
        lag_steps: Steps that scheduling runs ahead of execution.

    Returns:
        `requests` with mean_admission_us, mean_wait_us, mean_prefill_us, mean_itl_us, mean_departure_us.
    """
    itl = None if averages.decode_us is None else averages.decode_us + averages.requeue_per_token_us
    prefill = pl.Series([None] * requests.height, dtype=pl.Float64)
    if averages.prompt_step is not None and (averages.decode_us is not None or not lag_steps):
        extra = averages.requeue_before_us + lag_steps * (averages.decode_us or 0.0)
        prefill = _prompt_us(requests, averages, averages.prompt_step, step_time, token_budget) + extra
    return requests.with_columns(
        mean_admission_us=pl.lit(None, pl.Float64) if admission_us is None else admission_us,
        mean_wait_us=pl.lit(averages.wait_us, pl.Float64),
        mean_prefill_us=prefill,
        mean_itl_us=pl.lit(itl, pl.Float64),
        mean_departure_us=pl.lit(averages.departure_us, pl.Float64),
    )


def _prompt_us(
    requests: pl.DataFrame,
    averages: Averages,
    prompt_step: pl.DataFrame,
    step_time: Callable[[pl.DataFrame], Vector],
    token_budget: int | None,
) -> pl.Series:
    """Predict the steps that compute each request's prompt; null where its length is not known."""
    own = pl.col("own")
    left = (pl.lit(token_budget, pl.Float64) - pl.col("decode_tokens")).clip(lower_bound=1.0)
    parts = pl.when(left.is_null()).then(1.0).otherwise((own / left).ceil()).clip(lower_bound=1.0)
    tokens = requests.select(
        own=(pl.col("prompt_tokens").cast(pl.Float64) * (1 - averages.hit_ratio)).clip(lower_bound=1.0),
        cached=pl.col("prompt_tokens").cast(pl.Float64) * averages.hit_ratio,
    )
    rows = tokens.join(prompt_step, how="cross").with_columns(parts=parts)
    part = own / pl.col("parts")
    carried = part + averages.other_prompts
    rows = rows.with_columns(
        prefill_tokens=pl.when(left < carried).then(pl.max_horizontal(left, part)).otherwise(carried),
        prefill_context_tokens=pl.col("cached") + part * (pl.col("parts") - 1) / 2,
    )
    predicted = pl.Series(
        step_time(rows.with_columns(own.fill_null(0.0), pl.col("prefill_tokens").fill_null(0.0)))
    )
    return rows.select(pl.when(own.is_not_null()).then(predicted * pl.col("parts"))).to_series()


def _mean_step(prompts: pl.DataFrame) -> pl.DataFrame:
    """Average the numeric columns of steps over the requests whose prompts they carried."""
    weight = pl.col("num_prefill_reqs")
    numbers = [n for n, kind in prompts.schema.items() if kind.is_numeric()]
    means = [
        ((pl.col(n) * weight).sum() / weight.filter(pl.col(n).is_not_null()).sum()).alias(n) for n in numbers
    ]
    return prompts.select(means).fill_nan(None)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
