"""Compare predictions of whole requests with measurements: the ranges of TTFT, ITL and E2E.

The intervals of the single models do not add up to one of a composed latency: errors of a step repeat in
every step of a request, and the batch changes while it runs. The range is therefore measured on the composed
latencies themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import polars as pl

from tracefit.fit.splits import MIN_HOLDOUT_ROWS, MIN_TRAIN_ROWS
from tracefit.fit.validation import measure
from tracefit.fit.validation import reference as gradient_boosting
from tracefit.models.describe import STEP_INPUTS, STEP_VALUES
from tracefit.models.frames import completed_requests, composed_requests
from tracefit.models.schema import PromptSteps, RequestRange, Workload
from tracefit.models.targets import LATENCY_TITLES
from tracefit.models.validation import NO_ROWS
from tracefit.tables.requests import is_cut_off
from tracefit.tables.schema import REQUEST, SERVER

if TYPE_CHECKING:
    from tracefit.models.deployment import DeploymentModels

Composed = Literal["ttft", "itl", "e2e"]

_ON_ARRIVAL = ("prompt_tokens", "output_tokens", "cached", "queue", "batch")
"""Inputs that describe a request on arrival. Few users know the cached tokens of others: `predict` assumes them."""

TAILS = (0.05, 0.95)
COVERAGE_PCT = 85.0
"""A range of nine in ten is published if at least this share of the held-out requests lies in it."""


_PROMPT_STEP_GROUPS = 5
"""Groups of steps with prompts: enough to follow a bend in the step time, few enough to predict each time."""


def workload_of(requests: pl.DataFrame, steps: pl.DataFrame) -> Workload | None:
    """Return the mean request of the training part; null without a request of known lengths.

    Args:
        requests: Columns of the `requests` table, and `split`.
        steps: Columns of the `timeline` table, only those of the training part.
    """
    trained = requests.filter(pl.col("prompt_tokens") > 0, pl.col("output_tokens") > 0, split="train")
    if not trained.height:
        return None
    outputs = pl.col("output_tokens")
    # A request runs in as many steps as it has output tokens: this is its weight in the running batch.
    context = (pl.col("prompt_tokens") + outputs / 2) * outputs
    remaining = ((pl.max_horizontal("max_tokens", outputs) - outputs / 2) * outputs).fill_null(0)
    means = trained.select(
        pl.col("prompt_tokens").mean(),
        pl.col("cached_prompt_tokens").fill_null(0).clip(0, pl.col("prompt_tokens")).mean(),
        pl.col("output_tokens").mean(),
        pl.col("max_tokens").mean(),
        running_context_tokens=context.sum() / outputs.sum(),
        running_remaining_tokens=remaining.sum() / outputs.sum(),
    )
    return Workload(requests=trained.height, prompt_steps=_prompt_steps(steps), **means.row(0, named=True))


def _prompt_steps(steps: pl.DataFrame) -> tuple[PromptSteps, ...]:
    """Sum up the steps that compute prompts, in groups of equal size; empty if there are too few."""
    prefills = steps.filter(pl.col("prefill_tokens") > 0, pl.col("num_prefill_reqs") > 0).sort("prefill_tokens")
    if prefills.height < _PROMPT_STEP_GROUPS:
        return ()
    groups = (
        prefills.group_by(pl.int_range(pl.len()) * _PROMPT_STEP_GROUPS // pl.len(), maintain_order=True)
        .agg(tokens=pl.col("prefill_tokens").mean(), prompts=pl.col("num_prefill_reqs").mean())
        .select("tokens", "prompts")
    )
    return tuple(PromptSteps(tokens=tokens, prompts=prompts) for tokens, prompts in groups.iter_rows())


def described_requests(
    requests: pl.DataFrame, timeline: pl.DataFrame, queue: pl.DataFrame | None = None
) -> pl.DataFrame:
    """Describe requests by the facts at their arrival, as a user of `predict` does.

    Later facts, such as the batch a request decodes in, are unknown then: with them errors would be smaller than those
    of any user. The output tokens count as known, as in `predict`.

    Args:
        requests: Columns of the `requests` table, and `split`.
        timeline: The engines' steps.
        queue: `timeline.queue.queue_state`, null if journeys are incomplete.

    Returns:
        Requests with known lengths, by `REQUEST`: prompt_tokens, output_tokens, cached, `queue` and `batch`
        (those that waited ahead of it and those that ran when it was queued; without `queue_state`, those of
        the step before); split, and the measured ttft_us, itl_us and e2e_us, null if it was cut off.
    """
    latest = timeline.drop_nulls("ts_start_ns").select(
        *SERVER,
        "ts_start_ns",
        "waiting_depth",
        "running_after",
        in_step=pl.col("num_decode_reqs") + pl.col("num_prefill_reqs"),
    )
    rows = (
        requests.filter((pl.col("prompt_tokens") > 0) & (pl.col("output_tokens") > 0))
        .drop_nulls("queued_ns")
        .sort("queued_ns")
        .join_asof(
            latest.sort("ts_start_ns"),
            left_on="queued_ns",
            right_on="ts_start_ns",
            by=SERVER,
            check_sortedness=False,
        )
    )
    if queue is not None:
        # The step before shows no request of a simultaneous burst: only journeys say which one is ahead.
        exact = queue.rename({"request_id": "core_request_id"}).select(*REQUEST, "waiting_ahead", "running_reqs")
        rows = rows.join(exact, on=REQUEST, how="left").with_columns(
            waiting_depth=pl.coalesce("waiting_ahead", "waiting_depth"),
            running_after=pl.coalesce("running_reqs", "running_after"),
        )
    cut_off = is_cut_off()
    # The last prompt token is always computed: its logits give the first output token.
    cached = pl.col("cached_prompt_tokens").fill_null(0).clip(0, pl.col("prompt_tokens") - 1)
    return rows.select(
        *REQUEST,
        pl.col("prompt_tokens", "output_tokens").cast(pl.Float64),
        cached=cached.cast(pl.Float64),
        # Requests with inconsistent or missing events are not counted in any queue.
        queue=pl.col("waiting_depth").fill_null(0).clip(lower_bound=0).cast(pl.Float64),
        batch=pl.coalesce("running_after", "in_step").fill_null(0).clip(lower_bound=0).cast(pl.Float64),
        split="split",
        measured_ttft_us="ttft_us",
        measured_itl_us=pl.when(~cut_off).then("itl_us"),
        measured_e2e_us=pl.when(~cut_off).then("e2e_us"),
    )


def input_ranges(described: pl.DataFrame, steps: pl.DataFrame) -> dict[str, dict[str, tuple[float, float]]]:
    """Return the smallest and largest value in training of the inputs of a step, and of a request on arrival.

    Args:
        described: See `described_requests`; without rows if journeys are not traced.
        steps: Columns of the `timeline` table, only those of the training part.
    """
    columns = {name: column for column, name in STEP_VALUES.items() if name in STEP_INPUTS and column in steps.columns}
    decodes = pl.col("num_decode_reqs") > 0
    batches = steps.select(
        *(pl.col(column).cast(pl.Float64).alias(name) for name, column in columns.items()),
        context=pl.when(decodes).then(pl.col("context_tokens") / pl.col("num_decode_reqs")),
    )
    trained = described.filter(pl.col("split") == "train").select(_ON_ARRIVAL)
    return {"request": _ends(trained), "step": _ends(batches)}


def _ends(rows: pl.DataFrame) -> dict[str, tuple[float, float]]:
    ends = {column.name: (column.min(), column.max()) for column in rows.get_columns()}
    return {
        name: (low, high) for name, (low, high) in ends.items() if isinstance(low, float) and isinstance(high, float)
    }


def predicted_requests(models: DeploymentModels, described: pl.DataFrame) -> pl.DataFrame:
    """Add predictions to described requests: `ttft_us`, `itl_us`, `e2e_us`, and `out_of_range`.

    A measured request is predicted even if the settings say that the server would refuse it.
    """
    given = completed_requests(models, described.select(_ON_ARRIVAL))
    columns = (*(f"{name}_us" for name in LATENCY_TITLES), "out_of_range")
    return described.hstack(composed_requests(models, given).select(columns))


def request_ranges(deployment_id: str, predicted: pl.DataFrame, *, reference: bool) -> tuple[RequestRange, ...]:
    """Measure the range of predictions on the training part, and check it on later requests.

    Args:
        deployment_id: The deployment of the models.
        predicted: See `predicted_requests`.
        reference: Fit gradient boosting on the same inputs and requests too.
    """
    ranges = (_range(deployment_id, name, predicted, reference=reference) for name in get_args(Composed))
    return tuple(one for one in ranges if one is not None)


def _range(deployment_id: str, latency: Composed, rows: pl.DataFrame, *, reference: bool) -> RequestRange | None:
    measured, predicted = pl.col(f"measured_{latency}_us"), pl.col(f"{latency}_us")
    requests = rows.filter((measured > 0) & (predicted > 0)).select(
        *_ON_ARRIVAL, "split", "out_of_range", y=measured.cast(pl.Float64), predicted=predicted
    )
    if not requests.height:
        return None
    train, holdout = (requests.filter(split=part) for part in ("train", "holdout"))
    # Outside the training range `predict` gives no range, so those requests do not count.
    inside, later = (part.filter(pl.col("out_of_range").is_null()) for part in (train, holdout))
    # Ratios: latencies of one run span three orders of magnitude, and their errors grow with them.
    ratio = pl.col("y") / pl.col("predicted")
    low, high = (inside.select(ratio.quantile(q, "linear")).item() for q in TAILS)
    coverage = None
    if inside.height and later.height:
        coverage = 100 * float(later.select(ratio.is_between(low, high).mean()).item())
    actual = holdout["y"].to_numpy()
    median = train["y"].median()
    reason = _no_range(inside.height, later.height, coverage)
    boosted = reference and train.height and holdout.height
    return RequestRange(
        deployment_id=deployment_id,
        latency=latency,
        low_ratio=None if reason else low,
        high_ratio=None if reason else high,
        requests=inside.height,
        requests_held_out=later.height,
        coverage_pct=coverage,
        holdout=measure(actual, holdout["predicted"].to_numpy()),
        baseline=measure(actual, np.full(actual.size, median)) if isinstance(median, float) else NO_ROWS,
        gradient_boosting=gradient_boosting(train, holdout, list(_ON_ARRIVAL)) if boosted else None,
        reason=reason,
    )


def _no_range(trained: int, held_out: int, coverage: float | None) -> str | None:
    # Both in the training range of the models.
    if trained < MIN_TRAIN_ROWS or held_out < MIN_HOLDOUT_ROWS or coverage is None:
        return (
            f"{trained} requests of the training part and {held_out} held-out ones, inside the training range, "
            "are too few for one"
        )
    # A range that later requests contradict is not published; one that is too wide is still true.
    if round(coverage) < COVERAGE_PCT:
        return (
            f"{coverage:.0f} % of the held-out requests lie in the range of nine in ten of the training part, "
            f"fewer than {COVERAGE_PCT:.0f} %"
        )
    return None
