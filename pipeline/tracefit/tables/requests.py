"""Build the `requests` table: one row per request, joined over the API and the core layer, with its durations.

`core_requests` and `api_requests` aggregate the events of each layer, and `join_requests` joins them by trace and parent.
"""

from __future__ import annotations

import polars as pl

from tracefit.tables import dialects, schema
from tracefit.tables.durations import as_us, with_durations, with_rates, with_state
from tracefit.tables.span_requests import add_requests_from_spans

_API_TIMES = {
    "arrival_ns": "ARRIVED",
    "handoff_ns": "HANDOFF_TO_CORE",
    "departed_ns": "DEPARTED",
    "aborted_ns": "ABORTED",
}


def join_requests(
    core: pl.DataFrame, api: pl.DataFrame, described: pl.DataFrame, cached: pl.DataFrame, *, run_id: str
) -> pl.DataFrame:
    """Join the requests of both layers into rows of the `requests` table.

    A core request belongs to the API span that is its parent in the same trace; one API span may have several cores
    (n > 1). A layer without the other still gives a row. A request without an event has null there: an in-flight
    request has no `finished_ns`.

    Args:
        core: What `core_requests` gives, of all core spans of some traces.
        api: What `api_requests` gives, of all API spans of the same traces.
        described: What `requests_from_spans` gives, of all spans of the same traces.
        cached: What `cached_prompt_tokens` gives, of the whole run.
        run_id: The run.

    Returns:
        Rows of the `requests` table, in no order; times in ns on the engine's clock, durations in us.
    """
    joined = core.join(
        api,
        left_on=["trace_id", "parent_span_id"],
        right_on=["trace_id", "span_id"],
        how="full",
        suffix="_api",
        coalesce=False,
    )
    both = joined.with_columns(
        pl.coalesce(name, f"{name}_api").alias(name) for name in ("trace_id", "server", "epoch")
    ).with_columns(
        request_id=pl.coalesce("request_id_api", "request_id"),
        core_request_id=pl.col("request_id"),
        prompt_tokens=pl.coalesce("prompt_tokens", "api_prompt_tokens"),
        output_tokens=pl.coalesce("output_tokens", "api_completion_tokens"),
        max_tokens=pl.coalesce("max_tokens", "api_max_tokens"),
        run_id=pl.lit(run_id),
    )
    hits = cached.drop("step_id")
    with_cache = both.join(hits, on=["server", "epoch", "core_request_id"], how="left")
    rows = with_state(with_durations(with_cache)).with_columns(dialect=pl.lit(dialects.JOURNEY))
    rows = add_requests_from_spans(rows, described).with_columns(run_id=pl.lit(run_id))
    return with_rates(schema.REQUESTS.shape(rows))


def core_requests(journeys: pl.DataFrame) -> pl.DataFrame:
    """Return one row per core span: times, steps and counts of its events.

    Args:
        journeys: `journey_events` with the row and the parent_span_id of their span; every event of a span or none.
    """
    core = journeys.filter(pl.col("layer") == "core").sort("ts_ns", maintain_order=True)

    def first(event: str, column: str) -> pl.Expr:
        return pl.col(column).filter(pl.col("event") == event).first()

    def last(event: str, column: str) -> pl.Expr:
        return pl.col(column).filter(pl.col("event") == event).last()

    rows = core.group_by("row").agg(
        pl.col("trace_id", "span_id", "server", "epoch", "request_id", "parent_span_id").first(),
        queued_ns=first("QUEUED", "ts_ns"),
        queued_step=first("QUEUED", "step_id"),
        first_scheduled_ns=first("SCHEDULED", "ts_ns"),
        first_scheduled_step=first("SCHEDULED", "step_id"),
        first_token_ns=first("FIRST_TOKEN", "ts_ns"),
        first_token_step=first("FIRST_TOKEN", "step_id"),
        finished_ns=last("FINISHED", "ts_ns"),
        finished_step=last("FINISHED", "step_id"),
        finish_status=last("FINISHED", "finish_status"),
        prompt_tokens=pl.col("prefill_total_tokens").max(),
        max_tokens=pl.col("decode_max_tokens").max(),
        output_tokens=last("FINISHED", "decode_done_tokens"),
        num_preemptions=pl.col("num_preemptions").max(),
        last_event=pl.col("event").last(),
        stage=pl.col("phase").filter(pl.col("phase") != "WAITING").last(),
    )
    return rows.join(_requeue_waits(core), on="row", how="left").drop("row")


def _requeue_waits(core: pl.DataFrame) -> pl.DataFrame:
    """Return the time between each PREEMPTED and the RESUME after it, in us: sums before and after the first token.

    If one preemption has no RESUME, the sum is unknown.
    """
    preempted = core.filter(pl.col("event") == "PREEMPTED").select("row")
    turns = core.filter(pl.col("event").is_in(["PREEMPTED", "SCHEDULED", "FIRST_TOKEN"]))
    turns = turns.join(preempted, on="row", how="semi", maintain_order="left")
    turns = turns.with_columns(
        after_first_token=(pl.col("event") == "FIRST_TOKEN").cum_sum().over("row") > 0,
    ).filter(pl.col("event") != "FIRST_TOKEN")
    resumed = pl.col("event").shift(-1).over("row") == "SCHEDULED"
    wait = as_us(pl.col("ts_ns").shift(-1).over("row") - pl.col("ts_ns"))
    waits = turns.with_columns(wait_us=pl.when(resumed).then(wait)).filter(pl.col("event") == "PREEMPTED")
    late = pl.col("after_first_token")
    return waits.group_by("row").agg(
        preempted_events=pl.len(),
        requeue_before_us=_known_sum(pl.col("wait_us").filter(~late)),
        requeue_after_us=_known_sum(pl.col("wait_us").filter(late)),
    )


def _known_sum(values: pl.Expr) -> pl.Expr:
    return pl.when(values.null_count() == 0).then(values.sum())


def api_requests(journeys: pl.DataFrame, api_spans: pl.DataFrame) -> pl.DataFrame:
    """Return one row per API span that has events: their times and the facts on the span itself.

    Args:
        journeys: `journey_events` with the row of their span; every event of a span or none.
        api_spans: row, route, api_* of the `llm_request` spans.
    """
    api = journeys.filter(pl.col("layer") == "api").sort("ts_ns", maintain_order=True)
    rows = api.group_by("row").agg(
        pl.col("trace_id", "span_id", "server", "epoch", "request_id").first(),
        *(
            pl.col("ts_ns").filter(pl.col("event") == event).first().alias(column)
            for column, event in _API_TIMES.items()
        ),
    )
    counts = ("api_prompt_tokens", "api_completion_tokens", "api_max_tokens")
    facts = api_spans.select("row", "route", *(pl.col(c).cast(pl.Int64, strict=False) for c in counts))
    return rows.join(facts, on="row", how="left").drop("row")


def cached_prompt_tokens(snapshots: pl.DataFrame) -> pl.DataFrame:
    """Return prefix-cache hits per request: prompt tokens less the effective prompt, as its first snapshot shows them.

    Args:
        snapshots: Rows of `request_snapshots`.

    Returns:
        server, epoch, core_request_id, step_id of the snapshot, cached_prompt_tokens.
    """
    hits = pl.col("num_prompt_tokens") - pl.col("effective_prompt_len")
    known = snapshots.filter(pl.col("effective_prompt_len").is_not_null()).with_columns(
        cached_prompt_tokens=hits, core_request_id="request_id"
    )
    return first_hits(known)


def first_hits(hits: pl.DataFrame) -> pl.DataFrame:
    """Keep the first of each request's prefix-cache hits."""
    columns = ["server", "epoch", "core_request_id", "step_id", "cached_prompt_tokens"]
    ordered = hits.select(columns).sort("step_id", "cached_prompt_tokens")
    return ordered.unique(columns[:3], keep="first", maintain_order=True)
