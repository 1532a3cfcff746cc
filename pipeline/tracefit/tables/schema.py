"""The published tables: name, key, columns with their types, units, meaning and bounds, and the rules of their rows.

Every module that writes, reads, checks or documents a table takes its shape from here. A trace with absurd
numbers is still valid OTLP. So a row that breaks a rule (`TableSchema.sift`) never reaches the table, is
counted under the rule's name in `runs.implausible`, and is listed in `rejects` with that name as its reason.
"""

from __future__ import annotations

from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Literal

import msgspec
import polars as pl

from tracefit.tables.dialects import JOURNEY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SERVER = ["run_id", "server"]
"""One server of one traced run: it has one clock. A list, as polars takes lists of column names; nothing changes it."""

ENGINE = [*SERVER, "epoch"]
"""One engine: step ids count up from 0 within it, and start again with the next epoch."""

REQUEST = [*ENGINE, "trace_id", "core_request_id"]
"""One request of an engine: with n > 1 choices, a trace has several."""

ColumnKind = Literal["string", "int64", "float64", "bool", "map", "json"]

_ATTRIBUTE_LIST = pl.List(pl.Struct({"key": pl.String, "value": pl.String}))
_POLARS: dict[ColumnKind, pl.DataType] = {
    "string": pl.String(),
    "int64": pl.Int64(),
    "float64": pl.Float64(),
    "bool": pl.Boolean(),
    "map": _ATTRIBUTE_LIST,
    "json": pl.String(),
}


class Column(msgspec.Struct, frozen=True):
    """One column. A missing value is null, never 0 or an empty string.

    Attributes:
        kind: Its type.
        name: Its name.
        doc: Its meaning.
        unit: Unit of its values.
        nullable: Whether a row may lack a value.
        least: Smallest value that is possible, in any run.
        most: Largest value that is possible, in any run.
        limit: Setting of the server that bounds the values of a run.
    """

    kind: ColumnKind
    name: str
    doc: str
    unit: str | None = None
    nullable: bool = True
    least: float | None = None
    most: float | None = None
    limit: str | None = None

    @property
    def polars(self) -> pl.DataType:
        """The column's type in a polars frame (a map is a list of key and value)."""
        return _POLARS[self.kind]


class Rule(msgspec.Struct, frozen=True):
    """A condition that every row of a table meets.

    Attributes:
        column: The column at fault in a row that breaks the rule.
        what: The fault in words: `out of range`.
        breaks: True on rows with the fault; null counts as false. It reads columns of the table, or evidence
            of the run that the caller of `sift` adds; rows that lack one are not checked.
    """

    column: str
    what: str
    breaks: pl.Expr


OFF_CLOCK, STRAY_STEP = "is_off_clock", "is_stray_step"
"""Evidence of the whole run on a row: its time is on none of the server's clocks, its step is far from those
around it."""


class TableSchema(msgspec.Struct, frozen=True, eq=False):
    """One published table: rows are sorted by `key`. Two are equal only if they are the same object.

    Attributes:
        name: Its name.
        doc: Meaning of a row.
        key: Columns that rows are sorted by.
        columns: Its columns.
        open_ended: Further float columns may follow (the features of a training frame).
        checks: Rules beyond the bounds of single columns.
        clears_values: An impossible value of a nullable column is set to null and the row stays: an event of a request
            still shows that something happened. In other tables, a row with one such value is left out.
    """

    name: str
    doc: str
    key: tuple[str, ...]
    columns: tuple[Column, ...]
    open_ended: bool = False
    checks: tuple[Rule, ...] = ()
    clears_values: bool = False

    @property
    def names(self) -> list[str]:
        """Column names in order."""
        return [column.name for column in self.columns]

    @property
    def types(self) -> dict[str, pl.DataType]:
        """Column name to its type in a polars frame."""
        return {column.name: column.polars for column in self.columns}

    @property
    def order(self) -> list[str]:
        """Columns that rows are sorted by, nulls last.

        Ties on the key are broken by every other plain column, so that row order never depends on input order.
        """
        rest = [c.name for c in self.columns if c.name not in self.key and c.kind != "map"]
        return [*self.key, *(n for n in rest if not n.startswith("source_"))]

    def conform(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Return `frame` with exactly this table's columns, types and row order."""
        shaped = self.shape(frame)
        return shaped.sort(self.order, nulls_last=True) if shaped.height > 1 else shaped

    def shape(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Return `frame` with exactly this table's columns and types, its rows as they are.

        Columns the frame lacks become null; columns the table does not know are dropped, unless the
        table is open-ended.
        """
        # Columns of the right type are taken as they are: an expression for each would take three times as long.
        types, height = frame.schema, frame.height
        columns = []
        for c in self.columns:
            if c.name not in types:
                columns.append(pl.Series(c.name, [None], c.polars).new_from_index(0, height))
            else:
                column = frame.get_column(c.name)
                columns.append(column if types[c.name] == c.polars else column.cast(c.polars))
        if self.open_ended:
            columns += [frame.get_column(n) for n in types if n not in self.names]
        return pl.DataFrame(columns)

    def rules(self, limits: Mapping[str, float]) -> Iterator[Rule]:
        """Yield the rules of a run's rows: bounds of single columns, then checks over several values.

        Args:
            limits: Settings of the server, by name; an unknown limit bounds nothing.
        """
        for c in self.columns:
            if c.least is not None and c.most is not None:
                least, most = (pl.lit(b, c.polars) for b in (c.least, c.most))
                yield Rule(c.name, "out of range", ~pl.col(c.name).is_between(least, most))
            if c.limit is not None and c.limit in limits:
                yield Rule(c.name, f"above {c.limit}", pl.col(c.name) > limits[c.limit])
        yield from self.checks

    def fault(self, rule: Rule) -> str:
        """Return the name under which rows that break a rule are counted: `steps.step_id is out of range`."""
        return f"{self.name}.{rule.column} is {rule.what}"

    def sift_derived(self, rows: pl.DataFrame, by: str) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Clear values that break a rule, in rows that follow from several spans.

        Args:
            rows: Rows of this table.
            by: The column that tells runs apart.

        Returns:
            The rows, and rows of `rejects` without a position in a file: `by`, reason, count.
        """
        numbered = rows.with_row_index("row")
        kept, broken = self.sift(numbered, {})
        named = broken.join(numbered.select("row", by), on="row").group_by(by, "reason")
        return kept.drop("row"), named.agg(count=pl.len().cast(pl.Int64)).sort(by, "reason")

    def sift(self, rows: pl.DataFrame, limits: Mapping[str, float]) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Leave out rows, or clear values, that break a rule.

        Args:
            rows: Rows with `row`, the number of their span, and columns of this table, not necessarily all.
            limits: Settings of the server, by name.

        Returns:
            The rows that stay, and one row per broken rule and row: row, reason.
        """
        rules, is_broken = _rules_for(self, tuple(sorted(limits.items())), tuple(rows.columns))
        # Usually no rule is broken, and this pass suffices.
        any_broken = rows.select(is_broken).row(0) if rules else ()
        fired = [rule for rule, is_any in zip(rules, any_broken, strict=True) if is_any]
        if not fired:
            return rows, _BROKEN
        nothing = pl.repeat(value=False, n=rows.height, eager=True)
        nullable = {c.name for c in self.columns if c.nullable} if self.clears_values else set()
        left_out, cleared, broken = nothing, dict[str, pl.Series](), [_BROKEN]
        for rule in fired:
            is_cleared = rule.column in nullable
            # A value, or a row, is reported once, under the first rule it breaks.
            before = cleared.get(rule.column, nothing) if is_cleared else left_out
            mark = rows.select(rule.breaks.fill_null(value=False)).to_series() & ~before
            broken.append(rows.filter(mark).select("row", reason=pl.lit(self.fault(rule))))
            if is_cleared:
                cleared[rule.column] = before | mark
            else:
                left_out = before | mark
        values = [pl.when(~mark).then(name).alias(name) for name, mark in cleared.items()]
        return rows.with_columns(values).filter(~left_out), pl.concat(broken)

    def empty(self) -> pl.DataFrame:
        """Return a frame without rows."""
        return _empty(self).clone()


@cache
def _empty(table: TableSchema) -> pl.DataFrame:
    return pl.DataFrame(schema=table.types)


@lru_cache(maxsize=64)
def _rules_for(
    table: TableSchema, limits: tuple[tuple[str, float], ...], columns: tuple[str, ...]
) -> tuple[list[Rule], list[pl.Expr]]:
    """Return the rules that rows with some columns can be checked by, and whether any row breaks each.

    Cached, because making the expressions takes as long as the check of a small run.
    """
    have = set(columns)
    rules = [rule for rule in table.rules(dict(limits)) if have.issuperset(rule.breaks.meta.root_names())]
    return rules, [rule.breaks.any().alias(str(n)) for n, rule in enumerate(rules)]


_BROKEN = pl.DataFrame(schema={"row": pl.UInt32, "reason": pl.String})

_MOST_COUNT = 2**31 - 1
MOST_TOKENS = 10**8
"""Ten times the longest context of any model, and more than a step can compute."""
MOST_KV_BLOCKS = 10**8
"""Blocks of 16 tokens of 10 kB each: sixteen terabytes."""
MOST_STEP = 2**40
"""A step of 100 us each for three years."""
_MOST_NS = 2**62
"""146 years. Differences of times up to here do not overflow."""
_HOUR_US = 3_600_000_000
MOST_US = 7 * 24 * _HOUR_US
"""The longest time that a request takes or waits: a week."""


_s = partial(Column, "string")
_i = partial(Column, "int64")
_json = partial(Column, "json")
_flag = partial(Column, "bool")
_ns = partial(Column, "int64", unit="ns")
_us = partial(Column, "float64", unit="us")
_f = partial(Column, "float64", unit="ratio")
# Columns with bounds: counts, sums over requests, steps, and times on the engine's clock.
_n = partial(Column, "int64", least=0, most=_MOST_COUNT)
_tokens = partial(Column, "int64", unit="token", least=0, most=MOST_TOKENS)
_blocks = partial(Column, "int64", unit="block", least=0, most=MOST_KV_BLOCKS)
_sum = partial(Column, "int64", unit="token", least=0, most=2**53)
_share = partial(Column, "float64", unit="ratio", least=0, most=1)
_duration = partial(Column, "float64", unit="us", least=0, most=MOST_US)
_step = partial(Column, "int64", least=0, most=MOST_STEP)
_clock = partial(Column, "int64", unit="ns", least=0, most=_MOST_NS)


_RUN_COLUMN = (
    _s(
        "run_id",
        "name of the run's folder; other characters than letters, digits, dot, dash and underscore are replaced",
    ),
    _s("server", "service.instance.id, else host.name, else service.name"),
)
_ENGINE_COLUMNS = (*_RUN_COLUMN, _i("epoch", "number of restarts of the step counter so far"))

RUNS = TableSchema(
    "runs",
    "one row per run and server: its configuration, counts and times",
    ("run_id", "server"),
    (
        *_RUN_COLUMN,
        _s("model", "model name as served"),
        _json("model_config", "config.json as it was read"),
        _json("settings", "server settings, each with where it came from (given, read, measured, assumed)"),
        _json("gpu", "GPU specification; null if unknown"),
        _s("dialects", "dialects of the trace, comma separated"),
        _i("files", "trace files read"),
        _i("bytes", "bytes read", "byte"),
        _s("content_sha256", "hash of the trace files' contents, as in the manifest"),
        _i("spans", "spans of this server"),
        _i("other_spans", "spans of other scopes, counted and left out of the tables"),
        _json(
            "other_scopes",
            "number of spans of each other scope, in the whole run; only the scopes with most spans, none of them read",
        ),
        _i("duplicate_spans", "spans read more than once"),
        _i("rejects", "records that could not be read, in the whole run"),
        _i("dropped_events", "events that the SDK says it dropped"),
        _i("dropped_attributes", "attributes that the SDK says it dropped"),
        _i(
            "clock_corrected_events",
            "API events stamped on another clock and moved to the engine core's",
        ),
        _us(
            "api_clock_ahead_us",
            (
                "how far the API's clock was ahead of the engine core's, from events that cause each other; null if "
                "they are in order"
            ),
        ),
        _us("api_clock_error_us", "largest possible error of api_clock_ahead_us, given the events of requests"),
        _json("events", "number of events of each name"),
        _json("implausible", "number of rows that broke each rule, in the whole run; `rejects` lists them"),
        _json(
            "missing_attributes",
            "for each event name, the attributes that never have a usable value, in the whole run",
        ),
        _json(
            "unread",
            "files of the run whose requests have no lengths or no times, with the keys they have instead",
        ),
        _json(
            "models",
            "models that spans name, in the whole run: server, service.name, model and number of spans of each",
        ),
        _i("epochs", "engine starts in the traces"),
        _i("steps", "steps with a summary or a record"),
        _i("lost_steps", "for recorded steps, step numbers without a record; null for sampled steps"),
        _i("requests", "requests"),
        _f("step_sampling", "steps with a summary or a record / steps counted"),
        _f("journey_sampling", "estimated share of requests with a journey"),
        _f("snapshot_sampling", "steps with snapshots / steps with a summary"),
        _f("arrival_rate_per_s", "requests arriving per second, first to last arrival", unit="1/s"),
        _f("prompt_tokens_mean", "mean prompt length", unit="token"),
        _f("max_tokens_mean", "mean number of output tokens allowed", unit="token"),
        _f("output_tokens_mean", "mean output length", unit="token"),
        _i("kv_events", "events of the KV cache"),
        _i("kv_duplicate_events", "starts of transfers that were recorded twice, in the whole run"),
        _i("kv_transfers", "transfers of KV blocks that were initiated"),
        _i("kv_transfers_unfinished", "transfers without an end"),
        _us("kv_block_lifetime_us", "mean lifetime of a removed KV block"),
        _f(
            "kv_prefix_hit_ratio",
            (
                "KV blocks of requests that were not stored again, as the cache had them / full blocks of their "
                "prompts; null unless all journeys are traced"
            ),
        ),
        _f("prefix_hit_ratio", "share of prompt tokens found in the prefix cache, from snapshots"),
        _ns("first_unix_ns", "start of the first span"),
        _ns("last_unix_ns", "end of the last span"),
    ),
)

SPANS = TableSchema(
    "spans",
    "one row per span of the vLLM scopes, and of other scopes if all spans are kept",
    ("run_id", "server", "start_unix_ns", "trace_id", "span_id"),
    (
        *_RUN_COLUMN,
        _s("trace_id", "lower-case hex"),
        _s("span_id", "lower-case hex"),
        _s("parent_span_id", "lower-case hex; null for a root"),
        _s("scope", "instrumentation scope"),
        _s("name", "span name"),
        _s("kind", "INTERNAL, SERVER, CLIENT, PRODUCER or CONSUMER"),
        _ns("start_unix_ns", "start"),
        _ns("end_unix_ns", "end"),
        _s("status_code", "UNSET, OK or ERROR"),
        _s("status_message", "one of a fixed list of reasons, or `other`, because messages may quote prompts"),
        _s("service_name", "service.name"),
        Column("map", "attributes", "allow-listed span attributes, scalars as JSON text"),
        _i("dropped_events", "events of this span that the SDK dropped"),
        _s("source_file", "file the span was read from"),
        _i("source_offset", "offset of its record in the decompressed file", "byte"),
    ),
)

JOURNEY_EVENTS = TableSchema(
    "journey_events",
    "one row per event of a request's journey, in the API and in the engine core",
    ("run_id", "server", "epoch", "ts_ns", "trace_id", "span_id", "event"),
    (
        *_ENGINE_COLUMNS,
        _s("trace_id", "lower-case hex"),
        _s("span_id", "lower-case hex"),
        _s("request_id", "gen_ai.request.id of the span"),
        _s("layer", "api or core"),
        _s("event", "ARRIVED, HANDOFF_TO_CORE, FIRST_RESPONSE_FROM_CORE, DEPARTED, ABORTED, QUEUED, ..."),
        _clock("ts_ns", "time on the engine's monotonic clock", nullable=False),
        _ns("unix_ns", "time on the wall clock"),
        _step("step_id", "scheduler.step"),
        _s("phase", "WAITING, PREFILL or DECODE"),
        _tokens("prefill_done_tokens", "largest number of prompt tokens computed so far", limit="max_model_len"),
        _tokens("prefill_total_tokens", "prompt tokens", limit="max_model_len"),
        _tokens("decode_done_tokens", "output tokens so far", limit="max_model_len"),
        _tokens("decode_max_tokens", "output tokens allowed"),
        _n("num_preemptions", "preemptions so far"),
        _s("schedule_kind", "FIRST or RESUME"),
        _s("finish_status", "stopped, length, aborted, ignored or error"),
        _s("reason", "reason of an API abort: one of a fixed list, or `other`"),
    ),
    checks=(
        Rule("ts_ns", "off the run's clock", pl.col(OFF_CLOCK)),
        Rule("step_id", "far from the steps around it", pl.col(STRAY_STEP)),
    ),
    clears_values=True,
)

STEPS = TableSchema(
    "steps",
    "one row per engine step that was sampled (BATCH_SUMMARY), recorded, or traced by SGLang",
    ("run_id", "server", "epoch", "step_id"),
    (
        *_ENGINE_COLUMNS,
        _step("step_id", "step counter, from 1", nullable=False),
        _clock("ts_start_ns", "start of schedule(); null for a recorded step"),
        _clock("ts_end_ns", "end of schedule()"),
        Column(
            "int64",
            "duration_us",
            "time inside schedule(), not the time of the step",
            "us",
            least=0,
            most=_HOUR_US,
        ),
        _n("running_depth", "running requests after scheduling", limit="max_num_seqs"),
        _n("waiting_depth", "waiting requests after scheduling"),
        _n("num_prefill_reqs", "scheduled requests without an output token", limit="max_num_seqs"),
        _n("num_decode_reqs", "scheduled requests with an output token", limit="max_num_seqs"),
        _tokens("scheduled_tokens", "tokens of the step", limit="max_num_batched_tokens"),
        _tokens("prefill_tokens", "tokens of prefill requests", limit="max_num_batched_tokens"),
        _tokens("decode_tokens", "tokens of decode requests", limit="max_num_batched_tokens"),
        _n("num_finished", "requests finished since the previous step"),
        _n("num_preempted", "requests preempted by this step"),
        Column("float64", "kv_usage_ratio", "KV blocks in use / total", "ratio", least=0, most=1),
        _blocks("kv_blocks_total", "KV blocks"),
        _blocks("kv_blocks_free", "free KV blocks"),
        _ns(
            "unix_ns",
            "wall clock at the end of schedule(), at the receipt of a record, or of a log's line",
        ),
        Column(
            "float64",
            "cycle_us",
            "time of a recorded step, or the elapsed time that a log's line prints; null for a heartbeat",
            "us",
            least=0,
            most=_HOUR_US,
        ),
        _s(
            "cycle_source",
            "source of the step, as docs/reference/recordings.md lists them; null for a sampled step",
        ),
        _sum("context_tokens", "tokens of decode requests in the KV cache before the step"),
        _sum("prefill_context_tokens", "tokens of prefill requests in the KV cache before the step"),
        _sum("waiting_tokens", "tokens that the waiting requests still have to compute"),
        _s("source_file", "file that a recorded step was read from"),
        _i("source_offset", "offset of its record in the decompressed file", "byte"),
    ),
    checks=(
        Rule("ts_start_ns", "off the run's clock", pl.col(OFF_CLOCK)),
        Rule("step_id", "far from the steps around it", pl.col(STRAY_STEP)),
        Rule("ts_end_ns", "before ts_start_ns", pl.col("ts_end_ns") < pl.col("ts_start_ns")),
        Rule("kv_blocks_free", "above kv_blocks_total", pl.col("kv_blocks_free") > pl.col("kv_blocks_total")),
    ),
)

REQUEST_SNAPSHOTS = TableSchema(
    "request_snapshots",
    "one row per running request of a rich-sampled step",
    ("run_id", "server", "epoch", "step_id", "request_id"),
    (
        *_ENGINE_COLUMNS,
        _step("step_id", "step counter", nullable=False),
        Column("string", "request_id", "core request id", nullable=False),
        _s("phase", "PREFILL or DECODE"),
        _tokens("num_prompt_tokens", "prompt tokens", limit="max_model_len"),
        _tokens("num_computed_tokens", "tokens computed before this step", limit="max_model_len"),
        _tokens("num_output_tokens", "output tokens before this step", limit="max_model_len"),
        _n("num_preemptions", "preemptions so far"),
        _tokens("scheduled_tokens", "tokens of this step", limit="max_num_batched_tokens"),
        _blocks("kv_blocks_allocated", "KV blocks of the request"),
        _n(
            "kv_blocks_cached",
            "floor(tokens so far / block size); not the number of prefix-cache hits",
            "block",
        ),
        _tokens("effective_prompt_len", "prompt tokens without prefix-cache hits", limit="max_model_len"),
    ),
    checks=(Rule("step_id", "far from the steps of the run", pl.col(STRAY_STEP)),),
)

LIFE = ("arrival_ns", "queued_ns", "first_scheduled_ns", "first_token_ns", "finished_ns", "departed_ns")
"""Events of a request, in the order in which each causes the next."""

BETWEEN = {
    "admission_us": LIFE[:2],
    "queue_wait_us": LIFE[1:3],
    "time_in_queue_us": LIFE[:3],
    "prefill_us": LIFE[2:4],
    "decode_us": LIFE[3:5],
    "ttft_us": LIFE[:4],
    "network_us": LIFE[:4],
    "engine_us": LIFE[1:5],
    "e2e_us": LIFE[:5],
    "departure_us": LIFE[4:],
    "client_us": LIFE,
    "itl_us": LIFE[3:5],
    "tpot_us": LIFE[3:5],
    "inference_us": LIFE[2:5],
    "tokens_per_s": LIFE[:5],
    "queue_ratio": LIFE[:5],
    "execute_ratio": LIFE[:5],
}
"""Columns of `requests` that follow from two of its events, to those two and the events between."""


def _in_order(column: str) -> Rule:
    """Return the rule that a value needs its events in order; values from spans without events are exempt."""
    # A client that leaves departs at once: the engine core may queue, schedule and finish its request after that.
    stays = ~(pl.col("finish_status") == "aborted").fill_null(value=False)
    core = LIFE[1:-1] if BETWEEN[column][-1] == "departed_ns" else ()
    times = [pl.when(stays).then(name) if name in core else pl.col(name) for name in BETWEEN[column]]
    early = [time < pl.max_horizontal(times[:n]) for n, time in enumerate(times) if n]
    has_events = pl.col(column).is_not_null() & (pl.col("dialect") == JOURNEY)
    return Rule(column, "between events out of order", pl.any_horizontal(early) & has_events)


REQUESTS = TableSchema(
    "requests",
    "one row per request, joined from the API and the engine core",
    ("run_id", "server", "epoch", "arrival_ns", "queued_ns", "core_request_id", "request_id"),
    (
        *_ENGINE_COLUMNS,
        _s("request_id", "client-facing id (API span), else the core id"),
        _s("core_request_id", "id inside the engine core"),
        _s("trace_id", "lower-case hex"),
        _s("route", "http.route"),
        _s("dialect", "the dialect of the trace that describes the request"),
        _s("state", "WAITING, RUNNING, PREEMPTED or FINISHED_*, as vLLM names them; null if unknown"),
        _s("stage", "PREFILL or DECODE: the last phase in the trace"),
        _ns("arrival_ns", "ARRIVED"),
        _ns("handoff_ns", "HANDOFF_TO_CORE"),
        _ns("queued_ns", "QUEUED"),
        _ns("first_scheduled_ns", "first SCHEDULED"),
        _ns("first_token_ns", "FIRST_TOKEN"),
        _ns("last_token_ns", "last output token: FINISHED, if the request was not cut off"),
        _ns("finished_ns", "FINISHED"),
        _ns("departed_ns", "DEPARTED"),
        _ns("aborted_ns", "ABORTED of the API span"),
        _i("queued_step", "step counter at QUEUED"),
        _i("first_scheduled_step", "step of the first SCHEDULED"),
        _i("first_token_step", "step of FIRST_TOKEN"),
        _i("finished_step", "step of FINISHED"),
        _i("prompt_tokens", "prompt tokens", "token"),
        _i("output_tokens", "output tokens", "token"),
        _i("max_tokens", "output tokens allowed", "token"),
        _i(
            "cached_prompt_tokens",
            "prompt tokens found in the prefix cache, from snapshots; without them, tokens loaded from another medium",
            "token",
        ),
        _i("kv_blocks_loaded", "KV blocks loaded from another medium", "block"),
        _i("kv_blocks_offloaded", "KV blocks stored to another medium since the last preemption", "block"),
        _i("num_preemptions", "preemptions"),
        _s("finish_status", "stopped, length, aborted, ignored or error"),
        _us(
            "admission_us",
            (
                "QUEUED - ARRIVED; for stock spans TTFT - queue wait - prefill, which includes the return of the first "
                "token"
            ),
        ),
        _us("queue_wait_us", "first SCHEDULED - QUEUED"),
        _duration("requeue_wait_us", "sum of RESUME - PREEMPTED, the time in which the request was preempted"),
        _us("time_in_queue_us", "first SCHEDULED - ARRIVED"),
        _duration("prefill_us", "FIRST_TOKEN - first SCHEDULED - time preempted before FIRST_TOKEN"),
        _duration("decode_us", "FINISHED - FIRST_TOKEN - time preempted after FIRST_TOKEN"),
        _us("ttft_us", "FIRST_TOKEN - ARRIVED"),
        _us("engine_us", "FINISHED - QUEUED"),
        _us("e2e_us", "FINISHED - ARRIVED"),
        _us("departure_us", "DEPARTED - FINISHED; null if an aborted request departs first"),
        _us("client_us", "DEPARTED - ARRIVED"),
        _duration("client_ttft_us", "time from send to first token at a load generator"),
        _duration("client_itl_us", "(last token - first token) / (output tokens - 1) at a load generator"),
        _duration("client_e2e_us", "time from send to last token at a load generator"),
        _duration("network_us", "client_ttft - ttft, the time in the network and the front end"),
        _us("itl_us", "(FINISHED - FIRST_TOKEN) / (output tokens - 1)"),
        _duration("itl_p99_us", "99th percentile of the request's inter-token times, if all of them were measured"),
        _us("tpot_us", "(last token - FIRST_TOKEN) / (output tokens - 1); null if cut off"),
        _us("inference_us", "last token - first SCHEDULED; null if cut off"),
        _duration("kv_transfer_us", "wait for KV blocks from another server, from spans"),
        _step("steps", "steps of the request, without those while it was preempted"),
        _share("steps_timed", "share of these steps with a measured scheduling time"),
        _duration(
            "scheduler_us",
            "scheduling time of these steps; an unmeasured one counts as the mean of the others",
        ),
        _duration(
            "model_forward_us",
            "time of the forward passes of these steps, from spans only, because a step's time does not show it",
        ),
        _duration("model_execute_us", "execution time of these steps, including sampling and synchronization"),
        _f("tokens_per_s", "output tokens / e2e", unit="token/s"),
        _f("queue_ratio", "time_in_queue / e2e"),
        _f("execute_ratio", "model_execute / e2e"),
    ),
    checks=tuple(map(_in_order, BETWEEN)),
    clears_values=True,
)

KV_EVENTS = TableSchema(
    "kv_events",
    "one row per KV-cache event; token ids are never copied",
    ("run_id", "server", "epoch", "unix_ns", "event", "transfer_id", "request_id"),
    (
        *_ENGINE_COLUMNS,
        _s("event", "BlockStored, BlockRemoved, TransferInitiated, …, as the server names them"),
        _ns("unix_ns", "wall clock of the event's batch"),
        _i("data_parallel_rank", "rank of the engine"),
        _i("step_id", "step in which the event happened"),
        _s(
            "step_source",
            "event if the event or its batch names the step, clock if its time is between two summaries",
        ),
        _i("initiated_step", "for the end of a transfer, the step in which it was initiated"),
        _s("request_id", "core request id"),
        _s("transfer_id", "id of the transfer, unique until its rank restarts"),
        _s("source_medium", "where blocks come from: GPU, CPU, DISK, …"),
        _s("dest_medium", "where blocks go to"),
        _s("medium", "where blocks are stored, removed or evicted; the connector of a remote transfer"),
        _i("source_rank", "rank that a remote transfer comes from"),
        _i("dest_rank", "rank that a remote transfer goes to"),
        _i("block_count", "blocks", "block"),
        _i("block_size", "tokens in a block", "token"),
        _flag("success", "the transfer succeeded"),
        _s("eviction_reason", "lru, capacity or preemption"),
        _us("lifetime_us", "for removed blocks, mean time since they were stored; null if unknown"),
        _s("source_file", "file that the event was read from"),
        _i("source_offset", "offset of its batch in the decompressed file", "byte"),
    ),
)

TIMELINE = TableSchema(
    "timeline",
    "one row per engine step in traces or records",
    ("run_id", "server", "epoch", "step_id"),
    (
        *_ENGINE_COLUMNS,
        _i("step_id", "step counter"),
        _ns("ts_start_ns", "start of the step; null if no trace shows it"),
        _s(
            "start_source",
            (
                "source of the start: summary, scheduled, update, request, or the source of stamped steps, with "
                "_change where a coarse stamp changes"
            ),
        ),
        _duration("start_sd_us", "standard deviation of the start; 0 for a summary"),
        Column(
            "float64",
            "cycle_us",
            "mean time of a step from this start to the next known start; null if unknown",
            "us",
            least=0,
            most=_MOST_NS / 1e3,
        ),
        _duration("cycle_sd_us", "standard deviation of cycle_us, from those of the starts"),
        _s(
            "cycle_source",
            "source of cycle_us: adjacent (between two consecutive summaries), interval (over several steps), "
            "request (both starts counted from requests), or one in docs/reference/recordings.md",
        ),
        _step("interval_steps", "number of steps that cycle_us averages"),
        _n("num_prefill_reqs", "scheduled requests without an output token"),
        _n("num_decode_reqs", "scheduled requests with an output token"),
        _sum("prefill_tokens", "tokens of prefill requests"),
        _sum("decode_tokens", "tokens of decode requests"),
        _sum("context_tokens", "tokens of decode requests in the KV cache before the step; null if unknown"),
        _sum("prefill_context_tokens", "tokens of prefill requests in the KV cache before the step"),
        _flag("context_estimated", "context_tokens are estimated from the KV blocks in use"),
        _n("running_depth", "running requests after scheduling"),
        _n("waiting_depth", "waiting requests after scheduling"),
        _sum("waiting_tokens", "tokens that the waiting requests still have to compute"),
        _share("kv_usage_ratio", "KV blocks in use / total"),
        _blocks("kv_blocks_used", "KV blocks in use"),
        _blocks("kv_blocks_total", "KV blocks"),
        _blocks("kv_blocks_freed", "KV blocks of the requests that end with this step"),
        _n("running_after", "requests still running once the step's outputs are processed"),
        _sum("remaining_after", "output tokens that these requests may still produce, by max_tokens"),
        _sum("prefill_left_after", "prompt tokens that these requests still have to compute"),
        _n("num_preempted", "requests preempted by this step"),
        _i("duration_us", "time inside schedule()", "us"),
        _s("composition_source", "summary, journey, request, or the source of a recorded step"),
        _flag("journey_agrees", "requests and tokens computed from journeys equal those in the summary"),
        _i("journey_error_reqs", "scheduled requests computed from journeys minus those in the summary"),
        _i("journey_error_tokens", "tokens computed from journeys minus those in the summary", "token"),
        _flag("idle_before", "the engine was idle before this step"),
        _flag("idle_after", "a step before the next known start left nothing running and nothing waiting"),
    ),
    clears_values=True,
)

_POINT_STATISTICS = {
    "mean": "mean",
    "p50": "median",
    "p90": "90th percentile",
    "p95": "95th percentile",
    "p99": "99th percentile",
}
_POINT_LATENCIES = {
    "ttft": "time from send to first token",
    "tpot": "(last token - first token) / (output tokens - 1) of a request",
    "itl": "time between two tokens, over the tokens of all requests",
    "e2e": "time from send to last token",
}

POINTS = TableSchema(
    "points",
    "one row per point of a benchmark: a load, and what a load generator measured of all its requests together",
    ("run_id", "source_file", "source_offset", "point"),
    (
        *_RUN_COLUMN,
        _n("point", "number of the point in its record"),
        _s("program", "what wrote it: a load generator, or table"),
        _s(
            "model",
            "model that it states; the run's is in `runs`, as are the GPU and the settings of its server",
        ),
        _s("gpu", "GPU that it states"),
        _n("tensor_parallel", "GPUs of a tensor-parallel server, as it states"),
        Column(
            "float64",
            "concurrency",
            "most requests at a time that the load generator keeps; with no rate, it sends one when another one ends",
            least=0,
            most=_MOST_COUNT,
        ),
        Column(
            "float64",
            "rate_per_s",
            "requests per second that it sends; null if it waits for others to end",
            "1/s",
            least=0,
            most=1e9,
        ),
        _n("requests", "requests that succeeded"),
        _n("failed_requests", "requests that failed"),
        Column("float64", "prompt_tokens", "mean prompt length", "token", least=0, most=MOST_TOKENS),
        Column("float64", "output_tokens", "mean output length", "token", least=0, most=MOST_TOKENS),
        Column("float64", "duration_us", "how long the benchmark took", "us", least=0, most=52 * MOST_US),
        Column("float64", "requests_per_s", "requests that succeeded per second", "1/s", least=0, most=1e9),
        Column(
            "float64",
            "output_tokens_per_s",
            "output tokens per second, over all requests",
            "1/s",
            least=0,
            most=1e12,
        ),
        *(
            _duration(f"{latency}_{statistic}_us", f"{words}: {of}")
            for latency, of in _POINT_LATENCIES.items()
            for statistic, words in _POINT_STATISTICS.items()
        ),
        _json("settings", "settings of the server that it states, by their names"),
        _json("unread", "columns and keys that are not read"),
        _s(
            "requests_written_by",
            "how its program writes single requests, which give models; null for a table",
        ),
        _s("source_file", "file that it was read from"),
        _i("source_offset", "offset of its record in the decompressed file", "byte"),
    ),
)

_TRAINING = (
    _us("y", "measured value of the target"),
    _s("split", "train or holdout, by the start of the interval"),
    _s("excluded_reason", "why the row is left out; null for a row that counts"),
)

ALPHA_TRAINING = TableSchema(
    "alpha_training",
    "one row per request and target; feature columns follow",
    ("run_id", "server", "epoch", "target", "ts_ns", "request_id"),
    (
        *_ENGINE_COLUMNS,
        _s("deployment_id", "deployment that the row belongs to"),
        _s("target", "the target of the model `alpha.<target>`"),
        _s("request_id", "core request id"),
        _ns("ts_ns", "time of the event that begins the interval"),
        *_TRAINING,
    ),
    open_ended=True,
)

BETA_TRAINING = TableSchema(
    "beta_training",
    "one row per step with a known time; feature columns follow",
    ("run_id", "server", "epoch", "step_id"),
    (
        *_ENGINE_COLUMNS,
        _s("deployment_id", "deployment that the row belongs to"),
        _i("step_id", "step counter"),
        _ns("ts_ns", "start of the interval"),
        _s("source", "duration, or one of the values of `timeline.cycle_source`"),
        *_TRAINING,
    ),
    open_ended=True,
)

REJECTS = TableSchema(
    "rejects",
    "one row per record that could not be read; a row stands for several if there are too many to list",
    ("run_id", "source_file", "source_offset", "reason"),
    (
        _s(
            "run_id",
            "name of the run's folder; other characters than letters, digits, dot, dash and underscore are replaced",
        ),
        _s("source_file", "file that the record is in"),
        _i("source_offset", "offset of the record in the decompressed file", "byte"),
        _i("length", "length of the record", "byte"),
        _s("reason", "why it could not be read"),
        _s("excerpt", "structure and keys of the record; values only if the user asks for them"),
        _i(
            "count",
            "bad records, spans or events that the row stands for; 1 unless there were too many to list",
        ),
    ),
)

TABLES: dict[str, TableSchema] = {
    table.name: table
    for table in (
        RUNS,
        SPANS,
        JOURNEY_EVENTS,
        STEPS,
        REQUEST_SNAPSHOTS,
        REQUESTS,
        KV_EVENTS,
        POINTS,
        TIMELINE,
        ALPHA_TRAINING,
        BETA_TRAINING,
        REJECTS,
    )
}
INGEST_TABLES = tuple(n for n in TABLES if n not in ("alpha_training", "beta_training"))
