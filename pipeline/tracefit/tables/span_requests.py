"""Build requests from spans without events: attributes of stock vLLM, phases of the proposed lifecycle spans.

`requests_from_spans` applies the rules of `dialects`; `add_requests_from_spans` joins the result with the requests that
events describe.
"""

from __future__ import annotations

from functools import reduce
from operator import and_, or_

import polars as pl

from tracefit.tables import dialects, schema
from tracefit.tables.dialects import REQUEST_RULES, Spelling
from tracefit.tables.durations import as_us, with_durations
from tracefit.tables.keys import ENGINE

_KINDS = tuple({(rule.scope, rule.span): rule for rule in REQUEST_RULES}.values())
"""One rule of each kind of span."""

_FROM_API = {
    "prompt_tokens": "api_prompt_tokens",
    "output_tokens": "api_completion_tokens",
    "max_tokens": "api_max_tokens",
}
_TEXT = ("request_id", "route", "model")
_DURATIONS = tuple(c.name for c in schema.REQUESTS.columns if c.unit == "us")

_KEY = ["trace_id", "owner"]
_IDS = (*ENGINE, "trace_id")


_SPAN = (
    "trace_id",
    "span_id",
    "parent_span_id",
    "scope",
    "name",
    "server",
    "start_unix_ns",
    "end_unix_ns",
    "server_zero",
)


_MOST_US = 7 * 24 * 3_600_000_000
"""The longest time that a request takes or waits: a week."""

_NUMBERS = {
    **{
        rule.attribute: (rule.column.removeprefix("api_"), rule.factor)
        for rule in REQUEST_RULES
        if rule.attribute and rule.column not in _TEXT
    },
    **{api: (column, 1.0) for column, api in _FROM_API.items()},
}
"""Column of spans to the column of `requests` that it gives, and the factor between them."""


def sift_numbers(spans: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Clear attributes that no request can have: fewer tokens than none, or a wait of years.

    Args:
        spans: Rows of spans, with row and the columns `dialects.SPAN_KEYS` and `dialects.REQUEST_ATTRIBUTES`.

    Returns:
        The spans, and one row per cleared value: row, reason.
    """
    broken = [pl.DataFrame(schema={"row": pl.UInt32, "reason": pl.String})]
    for name, (column, factor) in _NUMBERS.items():
        most = _MOST_US if column in _DURATIONS else schema.MOST_TOKENS
        value = pl.col(name).cast(pl.Float64, strict=False) * factor
        absurd = spans.select((~value.is_between(0, most)).fill_null(value=False)).to_series()
        if absurd.any():
            reason = pl.lit(f"requests.{column} is out of range")
            broken.append(spans.filter(absurd).select("row", reason=reason))
            spans = spans.with_columns(pl.when(~absurd).then(name).alias(name))
    # An attribute can be the span's own and the API's: it is one value.
    return spans, pl.concat(broken).unique(maintain_order=True)


def request_spans(spans: pl.DataFrame) -> pl.DataFrame:
    """Return the spans that describe requests without events, with the columns that `requests_from_spans` needs.

    Args:
        spans: Rows of spans that count, with the columns `dialects.SPAN_KEYS`, server and server_zero.
    """
    return spans.filter(reduce(or_, map(_matches, _KINDS))).select(*_SPAN, *dialects.SPAN_KEYS)


def requests_from_spans(spans: pl.DataFrame) -> pl.DataFrame:
    """Return one row per request that spans describe.

    A stock `llm_request` span is a request; a phase belongs to the request that is its parent span. Wall-clock times are
    put on the engine's clock where journeys show their difference; elsewhere the wall clock takes its place.

    Args:
        spans: What `request_spans` gives, of all spans of some traces.

    Returns:
        trace_id, owner (id of the span that stands for the request), parent_span_id of that span, server, dialect, and
        columns of the `requests` table: times in ns, durations in us.
    """
    phase = pl.col("name").is_in(dialects.PHASE_SPANS)
    times = [pl.col(c) - pl.col("server_zero").fill_null(0) for c in ("start_unix_ns", "end_unix_ns")]
    own = spans.with_columns(
        *times,
        owner=pl.when(phase).then("parent_span_id").otherwise("span_id").fill_null(""),
        dialect=pl.coalesce(pl.when(_matches(rule)).then(pl.lit(rule.dialect)) for rule in _KINDS),
    ).sort("start_unix_ns", "end_unix_ns", "span_id")
    columns: dict[str, list[pl.Expr]] = {}
    for rule in REQUEST_RULES:
        columns.setdefault(rule.column, []).append(_value(rule))
    grouped = own.group_by(_KEY, maintain_order=True).agg(
        pl.col("server").first(),
        # Where a span of the whole request and spans of its phases describe it, the former names its dialect.
        pl.coalesce(pl.col("dialect").filter(~phase).first(), pl.col("dialect").first()).alias("dialect"),
        pl.col("parent_span_id").filter(~phase).first(),
        *(pl.coalesce(values).alias(name) for name, values in columns.items()),
    )
    return _completed(grouped)


def _matches(rule: Spelling) -> pl.Expr:
    scope = pl.col("scope").str.starts_with("vllm") if rule.scope is None else pl.col("scope") == rule.scope
    return reduce(and_, [scope, *([pl.col("name") == rule.span] if rule.span else [])]).fill_null(value=False)


def _value(rule: Spelling) -> pl.Expr:
    matching = _matches(rule)
    durations = as_us(pl.col("end_unix_ns") - pl.col("start_unix_ns")).filter(matching)
    if rule.take == "value":
        found = pl.col(rule.attribute or "").filter(matching).drop_nulls().first()
        return found if rule.column in _TEXT else found.cast(pl.Float64, strict=False) * rule.factor
    if rule.take == "start":
        return pl.col("start_unix_ns").filter(matching).min()
    if rule.take == "end":
        return pl.col("end_unix_ns").filter(matching).max()
    kept = durations if rule.take == "duration" else durations.slice(1)
    return pl.when(durations.len() > 0).then(kept.sum())


def _completed(rows: pl.DataFrame) -> pl.DataFrame:
    """Add the times that follow from durations since the arrival."""
    ttft, e2e = (
        pl.col("arrival_ns") + (pl.col(c) * 1e3).round().cast(pl.Int64, strict=False)
        for c in ("ttft_us", "e2e_us")
    )
    return rows.with_columns(
        *(pl.col(source).cast(pl.Int64, strict=False).alias(name) for name, source in _FROM_API.items()),
        first_token_ns=pl.coalesce("first_token_ns", ttft),
        finished_ns=pl.coalesce("finished_ns", e2e),
    ).drop(*_FROM_API.values())


def add_requests_from_spans(requests: pl.DataFrame, described: pl.DataFrame) -> pl.DataFrame:
    """Add the requests described by spans to those described by events.

    A request described by both stays one row, with values of events first and of spans in the gaps. They are the same
    request if the span is the request's own, or its child.

    Args:
        requests: Rows with the ids `span_id_api`, `span_id`, `parent_span_id`, and durations.
        described: As `requests_from_spans` returns them.

    Returns:
        Rows of the `requests` table, with all columns of `requests`.
    """
    rows, described = requests.with_row_index("_row"), described.with_row_index("_span")
    pairs = _pairs(rows, described)
    facts = [c for c in described.columns if c in schema.REQUESTS.names and c not in (*_IDS, "dialect")]
    span_facts = described.select("_span", *(pl.col(c).alias(f"{c}_span") for c in facts))
    joined = rows.join(pairs, on="_row", how="left", maintain_order="left")
    joined = joined.join(span_facts, on="_span", how="left", maintain_order="left")
    filled = joined.with_columns(
        pl.coalesce([n for n in (c, f"{c}_span") if n in joined.columns]).alias(c) for c in facts
    ).drop("_row", "_span", *(f"{c}_span" for c in facts))
    return pl.concat([filled, _alone(described.join(pairs, on="_span", how="anti"))], how="diagonal_relaxed")


def _pairs(rows: pl.DataFrame, described: pl.DataFrame) -> pl.DataFrame:
    """Return which span describes which row: `_row`, `_span`; ambiguous pairs are dropped."""
    row_ids = _ids(rows, "_row", ("span_id_api", "span_id", "parent_span_id"))
    span_ids = _ids(described, "_span", ("owner", "parent_span_id"))
    pairs = row_ids.join(span_ids, on=["trace_id", "id"]).select("_row", "_span").unique()
    return pairs.filter((pl.len().over("_row") == 1) & (pl.len().over("_span") == 1))


def _ids(frame: pl.DataFrame, row: str, names: tuple[str, ...]) -> pl.DataFrame:
    parts = [frame.select(row, "trace_id", id=name) for name in names]
    return pl.concat(parts).filter(pl.col("id").is_not_null() & (pl.col("id") != "")).unique()


def _alone(described: pl.DataFrame) -> pl.DataFrame:
    """Complete the rows of requests without events."""
    given = [c for c in described.columns if c in (*_DURATIONS, "last_token_ns")]
    wanted: dict[str, pl.DataType] = {c.name: c.polars for c in schema.REQUESTS.columns}
    wanted |= dict.fromkeys(("preempted_events", "requeue_before_us", "requeue_after_us"), pl.Float64())
    missing = [pl.lit(None, wanted[c]).alias(c) for c in wanted if c not in described.columns]
    rows = with_durations(described.with_columns(*missing, *(pl.col(c).alias(f"{c}_given") for c in given)))
    rows = rows.with_columns(pl.coalesce(f"{c}_given", c).alias(c) for c in given)
    # Where phases are given as durations alone their times are counted back from the first token: good enough to order
    # requests by, and to split them, but the difference to the arrival holds the way back from the engine too.
    scheduled = pl.col("first_token_ns") - _ns("prefill_us")
    rows = rows.with_columns(first_scheduled_ns=pl.coalesce("first_scheduled_ns", scheduled))
    queued = pl.col("first_scheduled_ns") - _ns("queue_wait_us")
    return rows.with_columns(
        queued_ns=pl.max_horizontal(pl.coalesce("queued_ns", queued, "arrival_ns"), "arrival_ns"),
        last_token_ns=pl.coalesce("last_token_ns", pl.col("first_token_ns") + _ns("decode_us")),
        epoch=pl.lit(0, pl.Int64),
    )


def _ns(duration: str) -> pl.Expr:
    return (pl.col(duration) * 1e3).round().cast(pl.Int64, strict=False)
