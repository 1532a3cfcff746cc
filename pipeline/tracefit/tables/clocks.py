"""Separate clocks and step counters: several engines with one name, and layers on different hosts.

Replicas and data-parallel ranks often share a service.name and have no instance id. Two facts separate them:
every host has a monotonic clock with a different zero (*zero*: wall clock less engine clock), and every engine
on a host has a separate step counter. `split_engines` names the engines; the other functions handle times
on different clocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import polars as pl

from tracefit.tables.epochs import FASTEST_STEP_NS

if TYPE_CHECKING:
    from collections.abc import Callable

CLOCK_FACTS = ("zero", "first_ns", "last_ns", "first_step", "last_step")
"""Facts of a span's events: wall clock less engine clock, and the range of its step summaries; null without
such events."""

SAME_CLOCK_NS = 1_000_000_000
"""Zeros closer than this are one clock: within a boot, wall and monotonic clock agree to microseconds."""

LONE_SHARE = 0.02
"""A clock with one span and less than this share of the server's spans is a wrong time and not a host."""

_UNSAMPLED_STEPS = 300
"""A counter advances at most this many steps between two step spans, plus as many as fit into the time between them."""

_ADJACENT_NS = 500_000
"""An engine opens its next step span within this time after it closes the last one."""

_MAX_ERROR_STEPS = 50.0
"""Limit of the distance of an event from a counter: without it, a single event could decide for a span."""

_CLEAR_MARGIN_STEPS = 2.0
"""Margin of the best counter over the second best from which on its spans refine the interpolation."""

_CLOCK_ROUNDS = 3


def without_lone_clocks(spans: pl.DataFrame) -> pl.DataFrame:
    """Clear the clock columns of single spans on a clock: one absurd time is not a second host.

    Args:
        spans: server, and `CLOCK_FACTS`.
    """
    jump = pl.col("zero").sort().diff() > SAME_CLOCK_NS
    if not spans.select(jump.any()).item():
        return spans
    ordered = spans.select("server", "zero").with_row_index("row_number").drop_nulls("zero").sort("server", "zero")
    clocks = ordered.with_columns(clock=_clock_number())
    sizes = clocks.with_columns(
        spans_on_clock=pl.len().over("server", "clock"), spans_of_server=pl.len().over("server")
    ).sort("row_number")
    # A server with few spans may have a host with one span, so that clock stays.
    lone = sizes.filter(
        pl.col("spans_on_clock") == 1, pl.col("spans_on_clock") < pl.col("spans_of_server") * LONE_SHARE
    )
    is_lone = pl.int_range(pl.len(), dtype=pl.UInt32).is_in(lone["row_number"].implode())
    return spans.with_columns(pl.when(~is_lone).then(name).alias(name) for name in CLOCK_FACTS)


def clocks_of(spans: pl.DataFrame) -> pl.DataFrame:
    """Return the ranges of wall clock less engine clock that each server's spans agree on: server, low, high."""
    ordered = spans.select(pl.col("server").cast(pl.String), "zero").drop_nulls().sort("server", "zero")
    clocks = ordered.with_columns(clock=_clock_number())
    ranges = clocks.group_by("server", "clock").agg(
        low=pl.col("zero").min() - SAME_CLOCK_NS, high=pl.col("zero").max() + SAME_CLOCK_NS
    )
    return ranges.drop("clock").sort("server", "low")


def _clock_number() -> pl.Expr:
    """Return the number of each row's clock within its server, for rows sorted by server and zero; a jump begins a new
    clock.
    """
    is_new = (pl.col("zero").diff() > SAME_CLOCK_NS).over("server").fill_null(value=False)
    return is_new.cast(pl.Int64).cum_sum().over("server")


def is_off_clock(rows: pl.DataFrame, ts: str, clocks: pl.DataFrame) -> pl.Series:
    """Return which rows have an engine time that, compared with their wall-clock time, is on no clock of their server.

    Args:
        rows: server, unix_ns, `ts` and server_zero, the clock of most of the server's spans. With duration_us, `ts` may
            be
            that much earlier: a suspended step has the wall-clock time of its end.
        ts: The column of the engine time.
        clocks: The result of `clocks_of`.
    """
    zero = pl.col("unix_ns") - pl.col(ts)
    suspicious = ((zero - pl.col("server_zero")).abs() > SAME_CLOCK_NS).fill_null(value=False)
    if "duration_us" in rows.columns:
        of_end = zero - pl.col("duration_us").fill_null(0) * 1000
        suspicious &= ((of_end - pl.col("server_zero")).abs() > SAME_CLOCK_NS).fill_null(value=True)
    marks = rows.select(suspicious).to_series()
    # Nearly all traces end here; the join is for servers with several clocks.
    if not marks.any():
        return marks
    nearest = (
        rows.select(pl.col("server").cast(pl.String), zero=zero)
        .with_row_index("row_number")
        .sort("zero")
        .join_asof(clocks.sort("low"), left_on="zero", right_on="low", by="server", check_sortedness=False)
        .sort("row_number")
    )
    return marks & nearest.select((pl.col("zero") > pl.col("high")).fill_null(value=True)).to_series()


def on_core_clock(journeys: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """Move API events to the clock of the engine core of their trace, if the two layers ran on different hosts.

    The correction compares the two wall clocks, and is as accurate as they agree.

    Args:
        journeys: layer, ts_ns, unix_ns of the events of both layers, and core_zero: wall clock less engine clock of the
            core spans in their trace.

    Returns:
        `journeys` with corrected ts_ns, and the number of corrected events.
    """
    zero, core = pl.col("unix_ns") - pl.col("ts_ns"), pl.col("core_zero")
    off = (pl.col("layer") == "api") & ((zero - core).abs() > SAME_CLOCK_NS).fill_null(value=False)
    corrected = journeys.select(off.sum()).item()
    if not corrected:
        return journeys, 0
    core_time = pl.col("unix_ns") - core
    return journeys.with_columns(ts_ns=pl.when(off).then(core_time).otherwise("ts_ns")), int(corrected)


_MIN_DISORDERED, _MIN_DISORDERED_SHARE = 10, 0.05
"""Least number and share of requests out of order that prove separate clocks; clients that reuse an id also cause
some."""

_TRIMMED = 0.02
"""Share of requests on each side that the bounds of the clock leave out if all bounds together contradict each
other."""


def api_clocks(bounds: pl.DataFrame) -> pl.DataFrame:
    """Find how far the API's clock is ahead of the core's, for servers with requests whose events are out of order.

    A constant difference shifts all bounds alike. So the middle between the largest lower and the smallest
    upper bound is wrong by at most half of their distance. If more than a few requests contradict every difference
    that the others allow, no clock is corrected.

    Args:
        bounds: server, least_ns, most_ns of every request; see `requests.clock_bounds`.

    Returns:
        server, ahead_ns, error_ns, for the servers whose clocks differ by an amount that the bounds show.
    """
    least, most = pl.col("least_ns"), pl.col("most_ns")
    sides = bounds.group_by("server").agg(
        disordered=pl.max_horizontal((least > 0).sum(), (most < 0).sum()),
        share=pl.max_horizontal((least > 0).mean(), (most < 0).mean()),
        least=least.max(),
        most=most.min(),
        trimmed_least=least.quantile(1 - _TRIMMED, "nearest"),
        trimmed_most=most.quantile(_TRIMMED, "nearest"),
    )
    is_whole = pl.col("least") <= pl.col("most")
    chosen = {side: pl.when(is_whole).then(side).otherwise(f"trimmed_{side}") for side in ("least", "most")}
    fitted = (
        sides.filter(pl.col("disordered") >= _MIN_DISORDERED, pl.col("share") >= _MIN_DISORDERED_SHARE)
        .with_columns(**chosen)
        .filter(pl.col("least") <= pl.col("most"))
    )
    return fitted.select(
        "server",
        ahead_ns=((pl.col("least") + pl.col("most")) / 2).round().cast(pl.Int64),
        error_ns=((pl.col("most") - pl.col("least")) / 2).ceil().cast(pl.Int64),
    ).sort("server")


def split_engines(spans: pl.DataFrame, marks_of: Callable[[pl.DataFrame], pl.DataFrame]) -> pl.DataFrame:
    """Give each of several engines with one server name a different one: `name#1`, `name#2`, in order of time.

    Hosts differ in the zero of their monotonic clock. Where step spans of one clock interleave, their step counters are
    followed from span to span, and a request belongs to the engine whose counter its events agree with. Lifetimes that
    follow each other in time are one server, restarted. Engines of one host that trace no steps stay together.

    Args:
        spans: span_row, server, start_unix_ns, end_unix_ns of the engines' spans, and `CLOCK_FACTS`.
        marks_of: Returns the events of some spans (span_row): span_row, ts_ns, unix_ns, step (the counter if the event
            marks the start of a step, one more if it marks the end), is_summary. Called if counters interleave.

    Returns:
        span_row, server: new names for the spans of servers that shared one.
    """
    unchanged = pl.DataFrame(schema={"span_row": spans.schema["span_row"], "server": pl.String})
    if _have_one_engine_each(spans):
        return unchanged
    clocked = _with_clock(spans)
    groups = [group for _, group in clocked.group_by("server", "clock", maintain_order=True)]
    engines = pl.concat([clocked.clear(), *(_with_counter(group, marks_of) for group in groups)], how="diagonal")
    # Only starts count: a request that runs across a jump of the wall clock does not prove a second host.
    lifetimes = (
        engines.group_by("server", "clock", "counter")
        .agg(begin=pl.col("start_unix_ns").min(), end=pl.col("start_unix_ns").max())
        .sort("server", "begin", "clock", "counter")
    )
    by_server = [rows.with_columns(_slots(rows)) for _, rows in lifetimes.group_by("server", maintain_order=True)]
    # One slot is one server, restarted or not: it keeps its name.
    shared = [rows for rows in by_server if rows["slot"].n_unique() > 1]
    if not shared:
        return unchanged
    names = pl.concat(shared).with_columns(name=pl.format("{}#{}", "server", pl.col("slot") + 1))
    renamed = engines.join(names, on=["server", "clock", "counter"], how="inner")
    return renamed.select("span_row", server="name")


def _have_one_engine_each(spans: pl.DataFrame) -> bool:
    """Return whether no server has zeros far apart or interleaved step spans, which is the usual case."""
    zeros = spans.group_by("server").agg(pl.col("zero").max() - pl.col("zero").min())
    if (zeros["zero"] > SAME_CLOCK_NS).any():
        return False
    stepping = spans.select("server", "first_ns", "last_ns").drop_nulls("first_ns").sort("server", "first_ns")
    latest = pl.col("last_ns").cum_max().shift(1).over("server")
    return not stepping.select((pl.col("first_ns") <= latest).any()).item()


def _with_clock(spans: pl.DataFrame) -> pl.DataFrame:
    """Add the number of each span's clock; spans without a zero join the last one. `counter` is set to 0."""
    ordered = spans.sort("server", "zero", "span_row", nulls_last=True)
    clocks = ordered.with_columns(clock=_clock_number())
    return clocks.with_columns(counter=pl.lit(0, pl.Int64)).sort("server", "clock", "first_ns", "span_row")


def _with_counter(spans: pl.DataFrame, marks_of: Callable[[pl.DataFrame], pl.DataFrame]) -> pl.DataFrame:
    """Add the number of each span's step counter to spans with one name and clock; it stays 0 if there is only one.

    Spans with step summaries are chained by them; all other spans follow the counter that their events agree with.
    """
    stepping = spans.filter(pl.col("first_ns").is_not_null())
    if not _interleave(stepping):
        return spans
    certain = _counters_of_step_spans(stepping)
    unassigned = spans.join(certain, on="span_row", how="anti").select("span_row")
    # Snapshots carry only wall-clock time.
    zero = spans["zero"].drop_nulls().first()
    marks = marks_of(spans.select("span_row")).with_columns(ts_ns=pl.coalesce("ts_ns", pl.col("unix_ns") - zero))
    assigned = pl.concat([certain, _by_agreement(unassigned, certain, marks)])
    return spans.drop("counter").join(assigned, on="span_row", how="left").with_columns(pl.col("counter").fill_null(0))


def _interleave(stepping: pl.DataFrame) -> bool:
    """Return whether a step span, in the order of `first_ns`, begins before an earlier one has ended."""
    return bool((stepping["first_ns"] <= stepping["last_ns"].cum_max().shift(1)).any())


def _counters_of_step_spans(stepping: pl.DataFrame) -> pl.DataFrame:
    """Return span_row and counter of step spans: chains that do not overlap in time are one counter, restarted."""
    chained = stepping.with_columns(_chains(stepping))
    lifetimes = (
        chained.group_by("chain")
        .agg(begin=pl.col("first_ns").min(), end=pl.col("last_ns").max())
        .sort("begin", "chain")
    )
    counters = lifetimes.with_columns(_slots(lifetimes)).select("chain", counter="slot")
    numbered = chained.drop("counter").join(counters, on="chain", maintain_order="left")
    return numbered.select("span_row", "counter")


class _StepSpan(NamedTuple):
    """A step span: its first and last summary on the engine's clock, and its own times on the wall clock."""

    first_ns: int
    last_ns: int
    first_step: int
    last_step: int
    start_unix_ns: int
    end_unix_ns: int


def _chains(spans: pl.DataFrame) -> pl.Series:
    """Return the number of the chain that each step span belongs to; a chain is one counter, followed span by span.

    Each span, in the order of `first_ns`, continues the chain that it fits best, or begins a new one if it fits no
    chain.
    """
    step_ns = _mean_step_ns(spans)
    last_of_chain: list[_StepSpan] = []
    numbers = []
    for span in map(_StepSpan._make, spans.select(_StepSpan._fields).iter_rows()):
        costs = {
            number: _cost_of_continuing(last, span, step_ns)
            for number, last in enumerate(last_of_chain)
            if _can_continue(last, span)
        }
        number = min(costs, key=costs.__getitem__, default=len(last_of_chain))
        # Replaces the chain's last span, or appends a new chain.
        last_of_chain[number : number + 1] = [span]
        numbers.append(number)
    return pl.Series("chain", numbers, pl.Int64)


def _mean_step_ns(spans: pl.DataFrame) -> float:
    steps, times = (float((spans[f"last_{c}"] - spans[f"first_{c}"]).sum()) for c in ("step", "ns"))
    return max(times / steps if steps else 0.0, float(FASTEST_STEP_NS))


def _can_continue(last: _StepSpan, span: _StepSpan) -> bool:
    """Return whether a counter can get from the end of one step span to the beginning of another."""
    pause_ns = span.first_ns - last.last_ns
    skipped = span.first_step - last.last_step - 1
    return pause_ns > 0 and 0 <= skipped <= _UNSAMPLED_STEPS + pause_ns / FASTEST_STEP_NS


def _cost_of_continuing(last: _StepSpan, span: _StepSpan, step_ns: float) -> tuple[bool, float]:
    """Return how badly a span continues a chain: whether it is not adjacent, then steps and time skipped, in steps."""
    skipped = span.first_step - last.last_step - 1
    gap_ns = abs(span.start_unix_ns - last.end_unix_ns)
    return gap_ns > _ADJACENT_NS, skipped + gap_ns / step_ns


def _slots(lifetimes: pl.DataFrame) -> pl.Series:
    """Assign lifetimes (`begin` to `end`, sorted by begin) to the fewest slots without overlap."""
    ends: list[int] = []
    slots = []
    for begin, end in lifetimes.select("begin", "end").iter_rows():
        free = [slot for slot, ended in enumerate(ends) if ended < begin]
        # Take the free slot that ended last: a restart follows at once.
        slot = max(free, key=ends.__getitem__, default=len(ends))
        ends[slot : slot + 1] = [end]
        slots.append(slot)
    return pl.Series("slot", slots, pl.Int64)


def _by_agreement(unassigned: pl.DataFrame, certain: pl.DataFrame, marks: pl.DataFrame) -> pl.DataFrame:
    """Give each span the counter that its events agree with best: span_row, counter.

    A counter is interpolated between its marks, which is inaccurate at first if few steps are sampled. So spans with a
    clearly best counter add their marks to it, and the assignment is repeated.
    """
    timed = marks.drop_nulls(["ts_ns", "step"]).sort("ts_ns")
    undecided = timed.join(unassigned, on="span_row", how="semi")
    # Summaries come first: they are exact, and their counter is certain.
    on_counters = timed.filter("is_summary").join(certain, on="span_row", how="inner")
    assigned = certain.clear()
    for _ in range(_CLOCK_ROUNDS):
        assigned = _best_counters(undecided, on_counters)
        clear = assigned.filter(pl.col("margin") > _CLEAR_MARGIN_STEPS).select("span_row", "counter")
        on_counters = timed.join(pl.concat([certain, clear]), on="span_row", how="inner")
    return assigned.select("span_row", "counter")


def _best_counters(undecided: pl.DataFrame, on_counters: pl.DataFrame) -> pl.DataFrame:
    """Return span_row, counter and margin: each span's best counter, and how many steps the second best is worse."""
    counters = sorted(on_counters["counter"].unique())
    errors = pl.concat([_errors(undecided, on_counters.filter(counter=n), n) for n in counters])
    ranked = errors.sort("span_row", "error", "counter")
    return ranked.group_by("span_row", maintain_order=True).agg(
        pl.col("counter").first(),
        margin=pl.col("error").get(1, null_on_oob=True) - pl.col("error").first(),
    )


def _errors(undecided: pl.DataFrame, on_counter: pl.DataFrame, counter: int) -> pl.DataFrame:
    """Return the mean distance of each span's events from an interpolated counter: span_row, counter, error."""
    points = on_counter.select("ts_ns", at_ns="ts_ns", at_step="step")
    before, after = (points.rename({"at_ns": f"{side}_ns", "at_step": f"{side}_step"}) for side in ("before", "after"))
    sides = undecided.select("span_row", "step", "ts_ns")
    # No exact matches: a span's events would confirm themselves once they are among the points.
    sides = sides.join_asof(before, on="ts_ns", allow_exact_matches=False)
    sides = sides.join_asof(after, on="ts_ns", strategy="forward", allow_exact_matches=False)
    span_ns = (pl.col("after_ns") - pl.col("before_ns")).clip(lower_bound=1)
    share = (pl.col("ts_ns") - pl.col("before_ns")) / span_ns
    between = pl.col("before_step") + share * (pl.col("after_step") - pl.col("before_step"))
    # Before the first point and after the last, the counter is assumed constant.
    expected = pl.coalesce(between, "before_step", "after_step")
    error = (pl.col("step") - expected).abs().clip(upper_bound=_MAX_ERROR_STEPS)
    return sides.group_by("span_row").agg(error=error.mean()).with_columns(counter=pl.lit(counter, pl.Int64))
