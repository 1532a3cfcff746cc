"""Build the `requests` table: one row per request, joined over the API and the core layer, with its durations.

`core_requests` and `api_requests` aggregate the events of each layer, and `join_requests` joins them by trace
and parent. `requests_from_spans` reads requests from spans without events by the rules of `dialects`, such as the
attributes of stock vLLM or the phases of the proposed lifecycle spans. Durations and rates follow vLLM's request
metrics; `schema.REQUESTS` documents them.
"""

from __future__ import annotations

import polars as pl

from tracefit.statistics import divided, sum_if_all_known
from tracefit.tables import dialects, schema
from tracefit.tables.dialects import REQUEST_RULES, Spelling
from tracefit.tables.schema import ENGINE

_API_TIMES = {
    "arrival_ns": "ARRIVED",
    "handoff_ns": "HANDOFF_TO_CORE",
    "departed_ns": "DEPARTED",
    "aborted_ns": "ABORTED",
}


def join_requests(
    core: pl.DataFrame, api: pl.DataFrame, described: pl.DataFrame, cached: pl.DataFrame, *, run_id: pl.Expr
) -> pl.DataFrame:
    """Join the requests of both layers into rows of the `requests` table.

    A core request belongs to the API span that is its parent in the same trace; one API span may have several core
    requests (n > 1). A request with only one layer still gives a row. Values of missing events are null: an in-flight
    request has no `finished_ns`.

    Args:
        core: The result of `core_requests` for all core spans of some traces.
        api: The result of `api_requests` for all API spans of the same traces.
        described: The result of `requests_from_spans` for all spans of the same traces.
        cached: The result of `cached_prompt_tokens` for the whole run.
        run_id: The run, from the server.

    Returns:
        Rows of the `requests` table, in no order; times in ns on the engine's clock, durations in us.
    """
    # A full join: a sampled trace may have only one layer.
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
        # Clients see the API's id; the core's has a suffix.
        request_id=pl.coalesce("request_id_api", "request_id"),
        core_request_id=pl.col("request_id"),
        prompt_tokens=pl.coalesce("prompt_tokens", "api_prompt_tokens"),
        output_tokens=pl.coalesce("output_tokens", "api_completion_tokens"),
        max_tokens=pl.coalesce("max_tokens", "api_max_tokens"),
        run_id=run_id,
    )
    hits = cached.drop("step_id")
    with_cache = both.join(hits, on=["server", "epoch", "core_request_id"], how="left")
    rows = _with_state(_with_durations(with_cache)).with_columns(dialect=pl.lit(dialects.JOURNEY))
    if described.height:
        rows = _add_requests_from_spans(rows, described).with_columns(run_id=run_id)
    return _with_rates(schema.REQUESTS.shape(rows))


def core_requests(journeys: pl.DataFrame) -> pl.DataFrame:
    """Return one row per core span: times, steps and counts of its events.

    Args:
        journeys: `journey_events` with the row and the parent_span_id of their span, whole spans only.
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
    """Return the sums of the times from each PREEMPTED to its RESUME before and after the first token, in us.

    If a preemption has no RESUME, the sum is unknown.
    """
    preempted = core.filter(pl.col("event") == "PREEMPTED").select("row")
    turns = core.filter(pl.col("event").is_in(["PREEMPTED", "SCHEDULED", "FIRST_TOKEN"]))
    turns = turns.join(preempted, on="row", how="semi", maintain_order="left")
    turns = turns.with_columns(
        after_first_token=(pl.col("event") == "FIRST_TOKEN").cum_sum().over("row") > 0,
    ).filter(pl.col("event") != "FIRST_TOKEN")
    resumed = pl.col("event").shift(-1).over("row") == "SCHEDULED"
    wait = _as_us(pl.col("ts_ns").shift(-1).over("row") - pl.col("ts_ns"))
    waits = turns.with_columns(wait_us=pl.when(resumed).then(wait)).filter(pl.col("event") == "PREEMPTED")
    late = pl.col("after_first_token")
    return waits.group_by("row").agg(
        preempted_events=pl.len(),
        requeue_before_us=sum_if_all_known(pl.col("wait_us").filter(~late)),
        requeue_after_us=sum_if_all_known(pl.col("wait_us").filter(late)),
    )


def api_requests(journeys: pl.DataFrame, api_spans: pl.DataFrame) -> pl.DataFrame:
    """Return one row per API span that has events: their times, and the facts on the span.

    Args:
        journeys: `journey_events` with the row of their span, whole spans only.
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
    stated = snapshots.filter(pl.col("effective_prompt_len").is_not_null()).with_columns(
        cached_prompt_tokens=hits, core_request_id="request_id"
    )
    return first_hits(stated)


def first_hits(hits: pl.DataFrame) -> pl.DataFrame:
    """Keep the first of each request's prefix-cache hits."""
    columns = ["server", "epoch", "core_request_id", "step_id", "cached_prompt_tokens"]
    ordered = hits.select(columns).sort("step_id", "cached_prompt_tokens")
    return ordered.unique(columns[:3], keep="first", maintain_order=True)


_RULE_KINDS = tuple({(rule.scope, rule.span): rule for rule in REQUEST_RULES}.values())
"""One rule of each kind of span that describes requests without events."""

_FROM_API = {
    "prompt_tokens": "api_prompt_tokens",
    "output_tokens": "api_completion_tokens",
    "max_tokens": "api_max_tokens",
}
_TEXT_NAMES = ("request_id", "route", "model")
_DURATIONS = tuple(c.name for c in schema.REQUESTS.columns if c.unit == "us")

_REQUEST_IDS = (*ENGINE, "trace_id")

_NUMBERS = {
    **{
        rule.attribute: (rule.column.removeprefix("api_"), rule.factor)
        for rule in REQUEST_RULES
        if rule.attribute and rule.column not in _TEXT_NAMES
    },
    **{api: (column, 1.0) for column, api in _FROM_API.items()},
}
"""Column of spans to the column of `requests` that it gives, and the factor between them."""

_FORWARD = next(name for name, (column, _) in _NUMBERS.items() if column == "model_forward_us")
_LATENCY_NAMES = tuple(name for name, (column, _) in _NUMBERS.items() if column in _DURATIONS)
_LASTED_S = (pl.col("end_unix_ns") - pl.col("start_unix_ns")) / 1e9
_LONGER_BY, _SLACK_S = 10.0, 1.0
"""A latency is longer than its span beyond this multiple of it plus this many seconds: spans may be cut short."""


def _number(name: str) -> pl.Expr:
    """Return the text of an attribute as a number; null if it is not a number."""
    return pl.col(name).cast(pl.Float64, strict=False)


def _in_seconds(spans: pl.DataFrame) -> pl.DataFrame:
    """Convert the latencies that an agent wrote in nanoseconds to seconds, and times that vLLM before 1.0 wrote in
    milliseconds.

    A span is converted if all its latencies fit into it as nanoseconds, and the longest does not fit as seconds.
    """
    forward = _number(_FORWARD)
    is_ms = (forward > _LASTED_S) & (forward <= 1e3 * (_LONGER_BY * _LASTED_S + _SLACK_S)) & (_LASTED_S > 0)
    in_ms = divided(forward, 1e3).cast(pl.String)
    spans = spans.with_columns(pl.when(is_ms).then(in_ms).otherwise(_FORWARD).alias(_FORWARD))
    values = [_number(name) for name in _LATENCY_NAMES]
    longest = pl.max_horizontal(values)
    whole = pl.all_horizontal(((value == 0) | (value >= 1)).fill_null(value=True) for value in values)
    is_ns = whole & (longest > 1e3 * _LASTED_S) & longest.is_between(1e8 * _LASTED_S, 1e10 * _LASTED_S)
    in_ns = spans.select(is_ns.fill_null(value=False)).to_series()
    if not in_ns.any():
        return spans
    return spans.with_columns(
        pl.when(in_ns).then(divided(_number(name), 1e9).cast(pl.String)).otherwise(name).alias(name)
        for name in _LATENCY_NAMES
    )


def sift_numbers(spans: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Clear impossible attributes: a negative number of tokens, or a wait that takes years or longer than its span.

    Args:
        spans: Rows of spans, with row and the columns `dialects.SPAN_KEYS` and `dialects.REQUEST_ATTRIBUTES`.

    Returns:
        The spans, and one row per cleared value: row, reason.
    """
    spans = _in_seconds(spans)
    faults = {}
    for name, (column, factor) in _NUMBERS.items():
        value = _number(name) * factor
        is_time = column in _DURATIONS
        too_long = (_LASTED_S > 0) & (value / 1e6 > _LONGER_BY * _LASTED_S + _SLACK_S) & is_time
        faults[name] = (
            pl.when(pl.col(name).is_not_null() & value.is_null())
            .then(pl.lit("not a number"))
            .when(~value.is_between(0, schema.MOST_US if is_time else schema.MOST_TOKENS))
            .then(pl.lit("out of range"))
            .when(too_long)
            .then(pl.lit("longer than its span"))
        )
    marks = spans.select(**faults)
    broken = [pl.DataFrame(schema={"row": pl.UInt32, "reason": pl.String})]
    for name, count in marks.count().row(0, named=True).items():
        if count:
            reason = pl.format(f"requests.{_NUMBERS[name][0]} is {{}}", marks[name])
            broken.append(spans.select("row", reason=reason).drop_nulls("reason"))
            spans = spans.with_columns(pl.when(marks[name].is_null()).then(name).alias(name))
    # An attribute that both the span and the API use is one value.
    return spans, pl.concat(broken).unique(maintain_order=True)


def request_spans(spans: pl.DataFrame) -> pl.DataFrame:
    """Return the spans that describe requests without events, with the columns that `requests_from_spans` needs.

    Args:
        spans: Rows of spans that count, with the columns `dialects.SPAN_KEYS`, server, server_zero, twin (the
            trace whose events describe the same request; it replaces the span's trace), and owner (for a
            stage, the span of its request).
    """
    spans = spans.with_columns(trace_id=pl.coalesce("twin", "trace_id"))
    ids = ("trace_id", "span_id", "parent_span_id", "scope", "name", "server", "server_zero", "owner")
    is_repeated = (pl.col("scope") == dialects.SGLANG_SCOPE) & pl.col("owner").is_null()
    return spans.filter(pl.any_horizontal(map(_matches, _RULE_KINDS)), ~is_repeated.fill_null(value=False)).select(
        *ids, "start_unix_ns", "end_unix_ns", *dialects.SPAN_KEYS
    )


def requests_from_spans(spans: pl.DataFrame) -> pl.DataFrame:
    """Return a row per request in spans: trace_id, owner, parent_span_id, server, dialect, and its facts.

    A stock `llm_request` span is a request; a phase belongs to the request that is its parent span. The owner
    is the span that stands for the request, and the parent is that of the owner. Facts are columns of the
    `requests` table, times in ns and durations in us. Wall-clock times are converted to the engine's clock if
    journeys show the difference, and otherwise stay as they are.
    """
    phase = pl.col("name").is_in(dialects.PHASE_SPANS)
    times = [pl.col(c) - pl.col("server_zero").fill_null(0) for c in ("start_unix_ns", "end_unix_ns")]
    with_owner = spans.with_columns(
        *times,
        owner=pl.coalesce("owner", pl.when(phase).then("parent_span_id").otherwise("span_id")).fill_null(""),
        dialect=pl.coalesce(pl.when(_matches(rule)).then(pl.lit(rule.dialect)) for rule in _RULE_KINDS),
    ).sort("start_unix_ns", "end_unix_ns", "span_id")
    columns: dict[str, list[pl.Expr]] = {}
    for rule in REQUEST_RULES:
        columns.setdefault(rule.column, []).append(_value(rule))
    grouped = with_owner.group_by("trace_id", "owner", maintain_order=True).agg(
        pl.col("server").first(),
        # If both a span of the whole request and spans of its phases describe it, the former names its dialect.
        pl.coalesce(pl.col("dialect").filter(~phase).first(), pl.col("dialect").first()).alias("dialect"),
        pl.col("parent_span_id").filter(~phase).first(),
        *(pl.coalesce(values).alias(name) for name, values in columns.items()),
    )
    return _completed(grouped)


def _matches(rule: Spelling) -> pl.Expr:
    scope = pl.col("scope").str.starts_with("vllm") if rule.scope is None else pl.col("scope") == rule.scope
    return (scope & (pl.col("name") == rule.span) if rule.span else scope).fill_null(value=False)


def _value(rule: Spelling) -> pl.Expr:
    matching = _matches(rule)
    durations = _as_us(pl.col("end_unix_ns") - pl.col("start_unix_ns")).filter(matching)
    if rule.take == "value":
        value = pl.col(rule.attribute or "").filter(matching).drop_nulls().first()
        return value if rule.column in _TEXT_NAMES else value.cast(pl.Float64, strict=False) * rule.factor
    if rule.take == "start":
        return pl.col("start_unix_ns").filter(matching).min()
    if rule.take == "end":
        return pl.col("end_unix_ns").filter(matching).max()
    kept = durations if rule.take == "duration" else durations.slice(1)
    return pl.when(durations.len() > 0).then(kept.sum())


def _completed(rows: pl.DataFrame) -> pl.DataFrame:
    """Add the times that follow from durations since the arrival."""
    return rows.with_columns(
        *(pl.col(source).cast(pl.Int64, strict=False).alias(name) for name, source in _FROM_API.items()),
        first_token_ns=pl.coalesce("first_token_ns", pl.col("arrival_ns") + _ns("ttft_us")),
        finished_ns=pl.coalesce("finished_ns", pl.col("arrival_ns") + _ns("e2e_us")),
    ).drop(*_FROM_API.values())


def _add_requests_from_spans(requests: pl.DataFrame, described: pl.DataFrame) -> pl.DataFrame:
    """Add the requests described by spans to those described by events.

    A request that both describe stays one row: values of spans fill the gaps that events leave. The two are the same
    request if the span is the request's span or its child, or has the same request id in the same trace.
    """
    rows, described = requests.with_row_index("_row"), described.with_row_index("_span")
    pairs = _pairs(rows, described)
    facts = [c for c in described.columns if c in schema.REQUESTS.names and c not in (*_REQUEST_IDS, "dialect")]
    both = rows.join(pairs, on="_row", how="left", maintain_order="left").join(
        described.select("_span", *facts), on="_span", how="left", suffix="_of_span", maintain_order="left"
    )
    # After the join, a fact that both have has a suffix; one that only spans have has its plain name.
    filled = both.with_columns(
        pl.coalesce(c, f"{c}_of_span").alias(c) for c in facts if f"{c}_of_span" in both.columns
    ).select(pl.exclude("_row", "_span", r"^.*_of_span$"))
    unpaired = described.join(pairs, on="_span", how="anti")
    return pl.concat([filled, _without_events(unpaired)], how="diagonal_relaxed")


def _pairs(rows: pl.DataFrame, described: pl.DataFrame) -> pl.DataFrame:
    """Return which span describes which row: `_row`, `_span`; ambiguous pairs are dropped."""
    client = pl.col("core_request_id").str.replace(dialects.CORE_ID_SUFFIX, "")
    rows = rows.with_columns(client_id=pl.coalesce(client, "request_id"))
    row_ids = _ids(rows, "_row", ("span_id_api", "span_id", "parent_span_id", "client_id"))
    span_ids = _ids(described, "_span", ("owner", "parent_span_id", "request_id"))
    pairs = row_ids.join(span_ids, on=["trace_id", "id"]).select("_row", "_span").unique()
    return pairs.filter((pl.len().over("_row") == 1) & (pl.len().over("_span") == 1))


def _ids(frame: pl.DataFrame, row: str, names: tuple[str, ...]) -> pl.DataFrame:
    parts = [frame.select(row, "trace_id", id=name) for name in names]
    return pl.concat(parts).filter(pl.col("id").is_not_null() & (pl.col("id") != "")).unique()


def _without_events(described: pl.DataFrame) -> pl.DataFrame:
    """Complete the rows of requests without events."""
    stated = [c for c in described.columns if c in (*_DURATIONS, "last_token_ns")]
    wanted = schema.REQUESTS.types | dict.fromkeys(
        ("preempted_events", "requeue_before_us", "requeue_after_us"), pl.Float64()
    )
    missing = [pl.lit(None, wanted[c]).alias(c) for c in wanted if c not in described.columns]
    rows = _with_durations(described.with_columns(*missing, *(pl.col(c).alias(f"{c}_stated") for c in stated)))
    rows = rows.with_columns(pl.coalesce(f"{c}_stated", c).alias(c) for c in stated)
    # The front end stamps only its end: the parts before the queue and on the way back cannot be separated.
    # The admission is rounded to whole nanoseconds: rounding errors around zero must not count as times in percentage
    # errors.
    admission = (pl.col("ttft_us") - pl.col("queue_wait_us") - pl.col("prefill_us")).round(3)
    # vLLM before 1.0 states neither prefill nor decode.
    is_missing = (pl.col("dialect") == dialects.STOCK) & pl.col("decode_us_stated").is_null()
    rows = rows.with_columns(
        admission_us=pl.coalesce("admission_us", admission),
        decode_us=pl.when(is_missing).then(pl.col("e2e_us") - pl.col("ttft_us")).otherwise("decode_us"),
    )
    # If phases are stated only as durations, their times are counted back from the first token: accurate enough to
    # order and split requests, but the difference to the arrival includes the way back from the engine.
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


STATES = {
    "stopped": "FINISHED_STOPPED",
    "length": "FINISHED_LENGTH_CAPPED",
    "aborted": "FINISHED_ABORTED",
    "ignored": "FINISHED_IGNORED",
    "error": "FINISHED_ERROR",
}
"""Finish status in traces to vLLM's name of the state."""

_LIVE_STATES = {
    "QUEUED": "WAITING",
    "SCHEDULED": "RUNNING",
    "FIRST_TOKEN": "RUNNING",
    "PREEMPTED": "PREEMPTED",
}
"""Last event of the engine core to the state of an unfinished request."""


def _as_us(ns: pl.Expr) -> pl.Expr:
    """Return nanoseconds as microseconds."""
    return divided(ns, 1e3)


def _us(end: str, start: str) -> pl.Expr:
    return _as_us(pl.col(end) - pl.col(start))


_CUT_OFF = ("aborted", "error", "ignored")
"""Finish statuses of requests that need not have produced a token."""


def is_cut_off() -> pl.Expr:
    """Return which rows of the `requests` table ended before they were complete; false if the status is unknown."""
    return pl.col("finish_status").is_in(_CUT_OFF).fill_null(value=False)


def latency_us(name: str) -> pl.Expr:
    """Return a latency of rows of the `requests` table in us; null where percentiles leave the request out.

    A request that was cut off may have its first token, but its other latencies say only when it ended.

    Args:
        name: ttft, itl, e2e or client.
    """
    column = pl.col(f"{name}_us")
    return column if name == "ttft" else pl.when(~is_cut_off()).then(column)


def _with_state(requests: pl.DataFrame) -> pl.DataFrame:
    """Add `state`, from the finish status, else the last event of the core, else the end of the API span.

    The state of a request with only an API span, which ended without an error, is unknown: null.
    """
    api = (
        pl.when(pl.col("aborted_ns").is_not_null())
        .then(pl.lit("FINISHED_ABORTED"))
        .when(pl.col("arrival_ns").is_not_null() & pl.col("departed_ns").is_null())
        .then(pl.lit("WAITING"))
    )
    finished = pl.col("finish_status").replace_strict(STATES, default=None, return_dtype=pl.String)
    live = pl.col("last_event").replace_strict(_LIVE_STATES, default=None, return_dtype=pl.String)
    from_api = pl.when(pl.col("last_event").is_null()).then(api)
    return requests.with_columns(state=pl.coalesce(finished, live, from_api))


_OF_API = {
    "admission_us": ("queued_ns", "arrival_ns"),
    "time_in_queue_us": ("first_scheduled_ns", "arrival_ns"),
    "ttft_us": ("first_token_ns", "arrival_ns"),
    "e2e_us": ("finished_ns", "arrival_ns"),
    "departure_us": ("departed_ns", "finished_ns"),
}
"""Durations between an event of the API and an event of the core: their end and start."""


def _of_api() -> dict[str, pl.Expr]:
    durations = {name: _us(*events) for name, events in _OF_API.items()}
    # An aborted request finishes when the server notices that its client left.
    left_first = (pl.col("finish_status") == "aborted") & (pl.col("departed_ns") < pl.col("finished_ns"))
    departure = pl.when(~left_first.fill_null(value=False)).then(durations["departure_us"])
    return durations | {"departure_us": departure}


def clock_bounds(requests: pl.DataFrame) -> pl.DataFrame:
    """Return causality's bounds on how far the API's clock is ahead of the core's: server, least_ns, most_ns.

    The core queues a request after the API hands it over, and the request departs from the API after the core finishes
    it. In an abort, the core finishes later.

    Args:
        requests: Rows of the `requests` table; requests without events set no bounds.
    """
    departed = pl.when(pl.col("finish_status") != "aborted").then("departed_ns")
    return requests.filter(pl.col("dialect") == dialects.JOURNEY).select(
        "server",
        least_ns=pl.max_horizontal("arrival_ns", "handoff_ns") - pl.col("queued_ns"),
        most_ns=departed - pl.col("finished_ns"),
    )


def with_api_moved(requests: pl.DataFrame, ahead: pl.DataFrame) -> pl.DataFrame:
    """Move the API's times of requests to the core's clock, and recompute the values that follow from both.

    Args:
        requests: Rows of the `requests` table.
        ahead: The result of `clocks.api_clocks`.
    """
    joined = requests.join(ahead.select("server", "ahead_ns"), on="server", how="left", maintain_order="left")
    is_off = pl.col("ahead_ns").is_not_null() & (pl.col("dialect") == dialects.JOURNEY)
    moved = joined.with_columns(
        pl.when(is_off).then(pl.col(c) - pl.col("ahead_ns")).otherwise(c).alias(c) for c in _API_TIMES
    )
    durations = {
        name: pl.when(is_off).then(pl.coalesce(value, name)).otherwise(name) for name, value in _of_api().items()
    }
    return _with_rates(moved.with_columns(**durations).drop("ahead_ns"))


def _with_durations(requests: pl.DataFrame) -> pl.DataFrame:
    """Add the durations of requests, in us; null if one of the two times is null.

    The formulas are those of vLLM's request metrics (`vllm.v1.metrics.stats`), except that the wait after a preemption
    counts as neither prefill nor decode.
    """
    counted = pl.col("preempted_events").fill_null(0)
    lost = pl.col("num_preemptions") > counted
    # Without preemptions the requeue wait is 0; after a preemption without events it is unknown.
    requeue = {
        side: pl.when(lost).then(None).when(counted > 0).then(f"requeue_{side}_us").otherwise(0.0)
        for side in ("before", "after")
    }
    cut_off = is_cut_off()
    several = pl.col("output_tokens") > 1
    return requests.with_columns(
        last_token_ns=pl.when(~cut_off & (pl.col("output_tokens") > 0)).then("finished_ns"),
        **_of_api(),
        queue_wait_us=_us("first_scheduled_ns", "queued_ns"),
        requeue_wait_us=pl.when(pl.col("first_scheduled_ns").is_not_null()).then(requeue["before"] + requeue["after"]),
        prefill_us=_us("first_token_ns", "first_scheduled_ns") - requeue["before"],
        decode_us=_us("finished_ns", "first_token_ns") - requeue["after"],
        engine_us=_us("finished_ns", "queued_ns"),
        client_us=_us("departed_ns", "arrival_ns"),
        itl_us=pl.when(several).then(_us("finished_ns", "first_token_ns") / (pl.col("output_tokens") - 1)),
    )


def _with_rates(requests: pl.DataFrame) -> pl.DataFrame:
    """Add times per token, throughput and shares of the latency to rows with durations.

    An inference time in the trace is kept; otherwise it is computed up to the last token.
    """
    e2e = pl.when(pl.col("e2e_us") > 0).then("e2e_us")
    later = pl.when(pl.col("output_tokens") > 1).then(pl.col("output_tokens") - 1)
    return requests.with_columns(
        inference_us=pl.coalesce("inference_us", _us("last_token_ns", "first_scheduled_ns")),
        tpot_us=_us("last_token_ns", "first_token_ns") / later,
        tokens_per_s=pl.col("output_tokens") / divided(e2e, 1e6),
        queue_ratio=pl.col("time_in_queue_us") / e2e,
        execute_ratio=pl.col("model_execute_us") / e2e,
    )
