"""Count the steps of an engine from the times of its requests, which the spans of an unmodified server have.

These requests have no step ids, but exact times on the engine's clock: a request is scheduled, its first and its last
token come out, and every step in between gives it one token. `request_graph` finds the steps that show in the times, as
nodes, and `request_counts` their numbers; this module gives the requests their steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import polars as pl

from tracefit.tables.schema import ENGINE, JOURNEY_EVENTS, REQUESTS, SERVER
from tracefit.timeline import thresholds
from tracefit.timeline.preemptions import steps_without_token
from tracefit.timeline.request_counts import CountedRequests, is_completely_recorded
from tracefit.timeline.request_evidence import examine
from tracefit.timeline.request_graph import DEFAULT_TOKEN_BUDGET, GRAPH_COLUMNS, is_counted, is_usable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tracefit.timeline.composition import EngineLimits
    from tracefit.timeline.engines import Ints
    from tracefit.timeline.request_graph import Graph, RequestArrays

_STEP_WINDOWS, _WINDOW_REQUESTS = 8, 2_000
"""Number of windows of a long recording whose requests get steps, and of requests in each: a model needs no more, and
memory is bounded."""

MOST_PLACED = _STEP_WINDOWS * _WINDOW_REQUESTS
"""Most requests of a server that get steps."""


class RequestSteps(msgspec.Struct, frozen=True):
    """Steps that were counted from requests.

    Attributes:
        rows: Row numbers of the counted requests in the `requests` table.
        requests: These rows of it, with the steps and the times of their events.
        starts: Starts of the anchored steps: ENGINE, step_id, ts_start_ns, start_sd_us, start_source, pause.
    """

    rows: pl.Series
    requests: pl.DataFrame
    starts: pl.DataFrame

    @classmethod
    def of(cls, requests: pl.DataFrame, placed: Iterable[pl.DataFrame], starts: Iterable[pl.DataFrame]) -> RequestSteps:
        """Join parts of the requests, each with `row` and the columns `PLACED_COLUMNS`, and the starts of their
        steps.
        """
        types = pl.Schema({"row": pl.UInt32(), **{name: REQUESTS.types[name] for name in PLACED_COLUMNS}})
        rows = pl.concat([pl.DataFrame(schema=types), *(part.cast(types) for part in placed)]).sort("row")
        with_steps = requests[rows["row"]].with_columns(rows.drop("row").get_columns())
        every_start = [pl.DataFrame(schema=_STARTS), *(part.select(*_STARTS) for part in starts)]
        return cls(rows["row"], with_steps, pl.concat(every_start))


PLACED_COLUMNS = (
    "epoch",
    *(f"{name}_ns" for name in ("queued", "first_scheduled", "first_token", "last_token", "finished")),
    *(f"{name}_step" for name in ("queued", "first_scheduled", "first_token", "finished")),
)
"""Columns of a request that follow from its steps."""

COUNTED_COLUMNS = (*ENGINE, "trace_id", *GRAPH_COLUMNS, "queued_ns", "first_token_step")
"""Columns of the `requests` table that show which steps its requests were in."""

_STARTS = {
    **{name: JOURNEY_EVENTS.types[name] for name in ENGINE},
    "step_id": pl.Int64(),
    "ts_start_ns": pl.Int64(),
    "start_sd_us": pl.Float64(),
    "start_source": pl.String(),
    "pause": pl.Boolean(),
}


def count_steps(requests: pl.DataFrame, limits: EngineLimits, *, traced_share: float | None = None) -> RequestSteps:
    """Count the steps of every server with the spans of all its requests, and give its requests their steps.

    Args:
        requests: The `requests` table of some runs.
        limits: Limits of their schedulers.
        traced_share: Share of the requests that have a span, as the configuration says; null if it says nothing.
    """
    budget = limits.max_num_batched_tokens
    unknown, examined = examine(requests, budget, traced_share=traced_share)
    end = pl.col("arrival_ns") + (1e3 * pl.coalesce("e2e_us", "client_e2e_us")).cast(pl.Int64)
    numbered = requests.select(*SERVER, is_usable=is_usable(), end=end).with_row_index("row")
    countable = numbered.filter("is_usable").join(unknown, on=SERVER, how="anti").sort("end", "row")
    columns = requests.select(*ENGINE, *GRAPH_COLUMNS).with_row_index("row")
    placed = []
    for server, rows in countable.group_by(SERVER, maintain_order=True):
        for window, numbers in enumerate(_windows(rows["row"])):
            part = columns[numbers].sort("arrival_ns", "row")
            if rows.height > MOST_PLACED:
                part = part.with_columns(epoch=pl.lit(window, pl.Int64))
            counted = examined.pop(server, None)
            if counted is None or not counted.rows.equals(part["row"]):
                counted = CountedRequests(requests, part["row"], budget or DEFAULT_TOKEN_BUDGET)
            placed.append(_placed(part, counted))
    return RequestSteps.of(requests, (rows for rows, _ in placed), (part for _, part in placed))


def _windows(rows: pl.Series) -> Iterator[pl.Series]:
    """Yield the requests of a server, ordered by their ends; if there are very many, those of some windows, each an
    epoch.
    """
    if rows.len() <= MOST_PLACED:
        yield rows
        return
    for begin in np.linspace(0, rows.len() - _WINDOW_REQUESTS, _STEP_WINDOWS).astype(int):
        yield rows[int(begin) : int(begin) + _WINDOW_REQUESTS]


def _placed(rows: pl.DataFrame, counted: CountedRequests) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return `row` and the columns `PLACED_COLUMNS` of the requests of one server, and the anchored starts of its
    steps.
    """
    arrays, graph, counts = counted.arrays, counted.graph, counted.counts
    # An idle gap gets an empty step, whose time belongs to no batch; with scheduling ahead, a step in progress comes
    # before it. A client sees the first step after a gap end but not begin: its time belongs to no batch either.
    gaps = np.r_[0, np.cumsum(~counts.busy)] * (1 + graph.lag + arrays.is_client)
    ended = counts.number - counts.number[0] + gaps + 1
    engine = {name: pl.lit(rows[name][0], _STARTS[name]) for name in ENGINE}
    step_of_node = {"step_id": ended + 1 + graph.lag, "ts_start_ns": arrays.to_ns(graph.time_us)}
    starts = pl.DataFrame(step_of_node).filter(is_completely_recorded(arrays, graph))
    starts = starts.unique("step_id", keep="last", maintain_order=True).with_columns(
        **engine,
        start_sd_us=pl.lit(thresholds.STAMP_SD_US),
        start_source=pl.lit("request"),
        pause=pl.lit(value=False),
    )
    return on_steps(rows, arrays, graph, ended, graph.lag), starts


def on_steps(rows: pl.DataFrame, arrays: RequestArrays, graph: Graph, ended: Ints, lag: int) -> pl.DataFrame:
    """Return `row` and the columns `PLACED_COLUMNS`: the steps of requests and the times of their events.

    Args:
        rows: The requests, with their number `row`.
        arrays: The same requests as arrays.
        graph: Their graph.
        ended: Last step that had ended by each node of the graph.
        lag: Steps that scheduling runs ahead of execution in this numbering of steps.
    """
    at_ns = arrays.to_ns(graph.time_us)
    first, last = ended[graph.first], ended[graph.last]
    # The last step that has ended when a request is scheduled or queued is interpolated by time between two nodes.
    scheduled = np.interp(graph.scheduled_us, graph.time_us, ended).round() + np.where(
        graph.into_idle_engine, 1, 1 + lag
    )
    scheduled = np.where(arrays.prompt_tokens <= graph.budget, np.maximum(scheduled, first - 1), scheduled)
    scheduled = np.clip(np.where(graph.in_one_step, first, scheduled), 1, first).astype(np.int64)
    queued_us = graph.scheduled_us - arrays.queue_us
    # The steps of the wait, and not the step that runs when it begins: no node may say when that step ended.
    at_queued, at_scheduled = (np.interp(us, graph.time_us, ended) for us in (queued_us, graph.scheduled_us))
    queued = scheduled - 1 - (at_scheduled - at_queued).round().astype(np.int64)
    return pl.DataFrame(
        {
            "row": rows["row"],
            "epoch": rows["epoch"],
            "queued_ns": arrays.to_ns(queued_us),
            "first_scheduled_ns": arrays.to_ns(graph.scheduled_us),
            "first_token_ns": at_ns[graph.first],
            "last_token_ns": at_ns[graph.last],
            "finished_ns": at_ns[graph.last],
            "queued_step": np.maximum(queued, 0),
            "first_scheduled_step": scheduled,
            "first_token_step": first,
            "finished_step": last,
        }
    )


def is_at_recording_end() -> pl.Expr:
    """Return which steps counted from requests come before the first anchored start of an engine, or after the last
    one.

    At these ends of a recording, requests may be missing.
    """
    is_anchored = pl.col("start_source").is_not_null()
    starts = (is_anchored.cum_sum(reverse=reverse).over(ENGINE) for reverse in (False, True))
    return (pl.col("composition_source") == "request") & (pl.min_horizontal(starts) == 0)


def events_of(requests: pl.DataFrame) -> pl.DataFrame:
    """Return the core events of the requests that have steps, as rows of `journey_events`.

    A request that took more steps than it has tokens was preempted, once at most (`preemptions`).
    """
    rows = requests.filter(is_counted() & pl.col("first_token_step").is_not_null()).with_row_index("span_id")
    rows = pl.concat([rows.clear().with_columns(**_NOT_PREEMPTED), *map(_preempted, rows.partition_by(ENGINE))])
    first, first_ns = pl.col("first_token_step"), pl.col("first_token_ns")
    before_preemption = pl.col("preempted_step") - first
    per_step_ns = (pl.col("last_token_ns") - first_ns) / (pl.col("finished_step") - first)

    def at_ns(step: str) -> pl.Expr:
        return first_ns + ((pl.col(step) - first) * per_step_ns).cast(pl.Int64, strict=False)

    rows = rows.with_columns(preempted_ns=at_ns("preempted_step"), resumed_ns=at_ns("resumed_step"))
    events = (
        ("QUEUED", "queued", pl.lit(0, pl.Int64)),
        ("SCHEDULED", "first_scheduled", pl.lit(0, pl.Int64)),
        ("FIRST_TOKEN", "first_token", pl.lit(1, pl.Int64)),
        ("PREEMPTED", "preempted", before_preemption),
        ("SCHEDULED", "resumed", before_preemption),
        ("FINISHED", "finished", pl.col("output_tokens")),
    )
    events_by_row = rows.sort("span_id").select(
        *ENGINE,
        "trace_id",
        pl.col("span_id").cast(pl.String),
        request_id=pl.coalesce("core_request_id", "request_id"),
        layer=pl.lit("core"),
        prefill_total_tokens="prompt_tokens",
        # If the span has no limit, the output is its best guess.
        decode_max_tokens=pl.coalesce("max_tokens", "output_tokens"),
        events=pl.concat_list(
            pl.struct(
                pl.lit(event).alias("event"),
                pl.lit("RESUME" if name == "resumed" else None, pl.String).alias("schedule_kind"),
                pl.col(f"{name}_ns").alias("ts_ns"),
                pl.col(f"{name}_step").alias("step_id"),
                done_tokens.alias("decode_done_tokens"),
            )
            for event, name, done_tokens in events
        ),
    )
    exploded = events_by_row.explode("events").unnest("events")
    return JOURNEY_EVENTS.conform(exploded.filter(pl.col("step_id").is_not_null()))


_NOT_PREEMPTED = {name: pl.lit(None, pl.Int64) for name in ("preempted_step", "resumed_step")}


def _preempted(requests: pl.DataFrame) -> pl.DataFrame:
    """Add the steps that preempted and resumed the requests of an engine; null for requests that ran through."""
    steps = ("first_token_step", "finished_step", "prompt_tokens", "output_tokens")
    first, last, prompt, output = (requests[name].cast(pl.Float64).to_numpy() for name in steps)
    which, preempted, resumed = steps_without_token(first, last, prompt, output - 1)
    # Whole steps, with a token before and one after.
    out = np.round(resumed - preempted).astype(np.int64)
    begins = np.clip(preempted.round(), first[which] + 1, last[which] - out).astype(np.int64)
    requests = requests.with_columns(**_NOT_PREEMPTED)
    for name, values in (("preempted_step", begins), ("resumed_step", begins + out)):
        requests = requests.with_columns(requests[name].scatter(which, values))
    return requests
