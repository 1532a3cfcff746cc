"""Predictions of whole requests held against measured ones: how far TTFT, ITL and E2E lie from what `predict` composes.

The intervals of the single models do not add up to one of a composed latency: errors of a step repeat in every step of a
request, and the batch changes while it runs. The range is therefore measured on the composed latencies themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import polars as pl

from tracefit.coefficients.model import PromptSteps, RequestRange, Workload
from tracefit.coefficients.predict_frames import predict_requests
from tracefit.fit.results import NO_ROWS
from tracefit.fit.splits import MIN_HOLDOUT_ROWS, MIN_TRAIN_ROWS
from tracefit.fit.validation import measure
from tracefit.tables.health import CUT_OFF
from tracefit.tables.schema import ENGINE, SERVER

if TYPE_CHECKING:
    from tracefit.coefficients.predict import ScopeModels

Composed = Literal["ttft", "itl", "e2e"]

TAILS = (0.05, 0.95)
COVERAGE_PCT = (85.0, 95.0)
"""A range of nine in ten is published where held-out requests say that it is one."""


_PROMPT_STEP_GROUPS = 5
"""Groups of steps with prompts: enough to follow a bend in the step time, few enough to predict each time."""


def workload_of(requests: pl.DataFrame, steps: pl.DataFrame) -> Workload | None:
    """Return the mean request of the training part; null where no lengths are known.

    Args:
        requests: Columns of the `requests` table, and `split`.
        steps: Columns of the `timeline` table, the steps of the training part alone.
    """
    known = requests.filter(
        (pl.col("split") == "train") & (pl.col("prompt_tokens") > 0) & (pl.col("output_tokens") > 0)
    )
    if not known.height:
        return None
    outputs = pl.col("output_tokens")
    # A request runs in as many steps as it has output tokens: so often does another one meet it.
    context = (pl.col("prompt_tokens") + outputs / 2) * outputs
    remaining = ((pl.max_horizontal("max_tokens", outputs) - outputs / 2) * outputs).fill_null(0)
    means = known.select(
        pl.col("prompt_tokens").mean(),
        pl.col("cached_prompt_tokens").fill_null(0).clip(0, pl.col("prompt_tokens")).mean(),
        pl.col("output_tokens").mean(),
        pl.col("max_tokens").mean(),
        running_context_tokens=context.sum() / outputs.sum(),
        running_remaining_tokens=remaining.sum() / outputs.sum(),
    )
    return Workload(requests=known.height, prompt_steps=_prompt_steps(steps), **means.row(0, named=True))


def _prompt_steps(steps: pl.DataFrame) -> tuple[PromptSteps, ...]:
    """Sum up the steps that compute prompts, in groups of equal size; none where there are too few."""
    known = steps.filter(pl.col("prefill_tokens") > 0, pl.col("num_prefill_reqs") > 0).sort("prefill_tokens")
    if known.height < _PROMPT_STEP_GROUPS:
        return ()
    groups = (
        known.group_by(pl.int_range(pl.len()) * _PROMPT_STEP_GROUPS // pl.len(), maintain_order=True)
        .agg(tokens=pl.col("prefill_tokens").mean(), prompts=pl.col("num_prefill_reqs").mean())
        .select("tokens", "prompts")
    )
    return tuple(PromptSteps(tokens=tokens, prompts=prompts) for tokens, prompts in groups.iter_rows())


def described_requests(
    requests: pl.DataFrame, timeline: pl.DataFrame, queue: pl.DataFrame | None = None
) -> pl.DataFrame:
    """Describe requests as a person would who asks for a prediction, of what the engine did.

    Args:
        requests: Columns of the `requests` table, and `split`.
        timeline: The engines' steps.
        queue: `timeline.queue.queue_state`, null where the journeys are not complete.

    Returns:
        Requests with known lengths: prompt_tokens, output_tokens, cached, `queue` and `running_depth` (those that waited
        ahead of it and those that ran when it was queued; without `queue_state`, those of the step before), `batch` and
        `context` (others beside it and mean tokens in the caches of a decoding request, over the steps it decoded in);
        split, and the measured ttft_us, itl_us and e2e_us, null where it was cut off.
    """
    steps = timeline.sort(*ENGINE, "step_id")
    decodes = pl.col("num_decode_reqs")
    sums = steps.select(
        *ENGINE,
        step="step_id",
        decodes=decodes.fill_null(0).cum_sum().over(ENGINE),
        steps=decodes.is_not_null().cast(pl.Int64).cum_sum().over(ENGINE),
        tokens=pl.col("context_tokens").fill_null(0).cum_sum().over(ENGINE),
    )
    rows = requests.filter((pl.col("prompt_tokens") > 0) & (pl.col("output_tokens") > 0)).drop_nulls(
        "queued_ns"
    )
    for column, prefix in (("first_token_step", "from"), ("finished_step", "to")):
        ends = sums.rename({c: f"{prefix}_{c}" for c in ("decodes", "steps", "tokens")})
        rows = rows.join(ends, left_on=[*ENGINE, column], right_on=[*ENGINE, "step"], how="left")
    met = steps.drop_nulls("ts_start_ns").select(
        *SERVER,
        "ts_start_ns",
        "waiting_depth",
        "running_after",
        met=pl.col("num_decode_reqs") + pl.col("num_prefill_reqs"),
    )
    rows = rows.sort("queued_ns").join_asof(
        met.sort("ts_start_ns"),
        left_on="queued_ns",
        right_on="ts_start_ns",
        by=SERVER,
        check_sortedness=False,
    )
    if queue is not None:
        # Of requests that come together the step before shows none: only the journeys say who is ahead of whom.
        exact = queue.select(*ENGINE, "trace_id", "request_id", ahead="waiting_ahead", run="running_reqs")
        rows = rows.join(
            exact,
            left_on=[*ENGINE, "trace_id", "core_request_id"],
            right_on=[*ENGINE, "trace_id", "request_id"],
            how="left",
        ).with_columns(
            waiting_depth=pl.coalesce("ahead", "waiting_depth"),
            running_after=pl.coalesce("run", "running_after"),
        )
    decoded, took = (pl.col(f"to_{c}") - pl.col(f"from_{c}") for c in ("decodes", "steps"))
    beside = pl.when(took > 0).then(decoded / took - 1).otherwise("met")
    context = pl.when(decoded > 0).then((pl.col("to_tokens") - pl.col("from_tokens")) / decoded)
    cut_off = pl.col("finish_status").is_in(CUT_OFF).fill_null(value=False)
    # The last prompt token is always computed: its logits give the first output token.
    cached = pl.col("cached_prompt_tokens").fill_null(0).clip(0, pl.col("prompt_tokens") - 1)
    return rows.select(
        pl.col("prompt_tokens", "output_tokens").cast(pl.Float64),
        cached=cached.cast(pl.Float64),
        # Journeys that lie, or lack an event, count below nobody.
        queue=pl.col("waiting_depth").fill_null(0).clip(lower_bound=0).cast(pl.Float64),
        batch=beside.fill_null(0.0).clip(lower_bound=0.0).cast(pl.Float64),
        running_depth=pl.coalesce("running_after", "met").clip(lower_bound=0).cast(pl.Float64),
        context=context.cast(pl.Float64),
        split="split",
        measured_ttft_us="ttft_us",
        measured_itl_us=pl.when(~cut_off).then("itl_us"),
        measured_e2e_us=pl.when(~cut_off).then("e2e_us"),
    )


def request_ranges(models: ScopeModels, described: pl.DataFrame) -> tuple[RequestRange, ...]:
    """Measure what `predict` makes of requests of the training part, and hold the range against later ones.

    Args:
        models: The models of one scope.
        described: See `described_requests`.
    """
    if models.scope_id is None or not described.height:
        return ()
    predicted = predict_requests(
        models,
        described.select(
            "prompt_tokens", "output_tokens", "cached", "queue", "batch", "running_depth", "context"
        ),
    )
    rows = described.hstack(predicted.select("ttft_us", "itl_us", "e2e_us"))
    return tuple(
        found for name in get_args(Composed) if (found := _range(models.scope_id, name, rows)) is not None
    )


def _range(scope_id: str, latency: Composed, rows: pl.DataFrame) -> RequestRange | None:
    measured, predicted = pl.col(f"measured_{latency}_us"), pl.col(f"{latency}_us")
    known = rows.filter((measured > 0) & (predicted > 0)).select(
        "split", measured=measured.cast(pl.Float64), predicted=predicted
    )
    if not known.height:
        return None
    train, held = (known.filter(pl.col("split") == side) for side in ("train", "holdout"))
    # Ratios: latencies of one run span three orders of magnitude, and their errors grow with them.
    ratio = pl.col("measured") / pl.col("predicted")
    low, high = (train.select(ratio.quantile(q, "linear")).item() for q in TAILS)
    coverage = None
    if train.height and held.height:
        coverage = 100 * float(held.select(ratio.is_between(low, high).mean()).item())
    actual = held["measured"].to_numpy()
    median = train["measured"].median()
    reason = _no_range(train.height, held.height, coverage)
    return RequestRange(
        scope_id=scope_id,
        latency=latency,
        low_ratio=None if reason else low,
        high_ratio=None if reason else high,
        requests=train.height,
        coverage_pct=coverage,
        holdout=measure(actual, held["predicted"].to_numpy()),
        baseline=measure(actual, np.full(actual.size, median)) if isinstance(median, float) else NO_ROWS,
        reason=reason,
    )


def _no_range(trained: int, held_out: int, coverage: float | None) -> str | None:
    if trained < MIN_TRAIN_ROWS or held_out < MIN_HOLDOUT_ROWS or coverage is None:
        return f"{trained} requests of the training part and {held_out} held-out ones are too few for one"
    low, high = COVERAGE_PCT
    # A range that later requests do not confirm would promise what the data deny.
    if not low <= round(coverage) <= high:
        return (
            f"{coverage:.0f} % of the held-out requests lie in the range of nine in ten of the training part, "
            f"not {low:.0f} to {high:.0f} %"
        )
    return None
