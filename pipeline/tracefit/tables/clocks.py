"""Clocks and counters that do not compare: servers behind one name, and layers on different hosts.

Replicas and data-parallel ranks often share a service.name and have no instance id. Hosts differ in what their
monotonic clock counts from; engines on one host have step counters that run side by side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

if TYPE_CHECKING:
    from collections.abc import Callable

SAME_CLOCK_NS = 1_000_000_000
"""Clocks whose zeros lie less than this apart are one: within a boot, wall and monotonic clock agree to microseconds."""

_FASTEST_STEP_NS = 200_000
_UNSAMPLED_STEPS = 300
"""A counter goes on from one step span to the next by so many steps at most, or by as many as fit in between."""

_AT_ONCE_NS = 500_000
_CLEARLY_OFF_STEPS = 50.0
_CLEAR_STEPS = 2.0
_ROUNDS = 3


LONE_SHARE = 0.02
"""A clock that fewer of a server's spans are on is that of a single odd time, not of a host."""


def without_lone_clocks(spans: pl.DataFrame) -> pl.DataFrame:
    """Take from spans whose events alone speak of a clock what they say of it: one absurd time makes no second host.

    Args:
        spans: server, zero (wall clock less engine clock), first_ns, last_ns, first_step, last_step.
    """
    jump = pl.col("zero").sort().diff() > SAME_CLOCK_NS
    if not spans.select(jump.any()).item():
        return spans
    ordered = spans.select("server", "zero").with_row_index("place").drop_nulls("zero").sort("server", "zero")
    is_new = (pl.col("zero").diff() > SAME_CLOCK_NS).over("server").fill_null(value=False)
    groups = ordered.with_columns(clock=is_new.cast(pl.UInt32).cum_sum().over("server"))
    shared = groups.with_columns(on_it=pl.len().over("server", "clock"), of=pl.len().over("server")).sort(
        "place"
    )
    lone = shared.filter(pl.col("on_it") == 1, pl.col("on_it") < pl.col("of") * LONE_SHARE)
    is_lone = pl.int_range(pl.len(), dtype=pl.UInt32).is_in(lone["place"].implode())
    columns = ("zero", "first_ns", "last_ns", "first_step", "last_step")
    return spans.with_columns(pl.when(~is_lone).then(name).alias(name) for name in columns)


def clocks_of(spans: pl.DataFrame) -> pl.DataFrame:
    """Return the ranges of wall clock less engine clock that each server's spans agree on: server, low, high."""
    ordered = spans.select(pl.col("server").cast(pl.String), "zero").drop_nulls().sort("server", "zero")
    is_new = (pl.col("zero").diff() > SAME_CLOCK_NS).over("server").fill_null(value=False)
    clocks = ordered.with_columns(clock=is_new.cast(pl.UInt32).cum_sum().over("server"))
    ranges = clocks.group_by("server", "clock").agg(
        low=pl.col("zero").min() - SAME_CLOCK_NS, high=pl.col("zero").max() + SAME_CLOCK_NS
    )
    return ranges.drop("clock").sort("server", "low")


def is_off_clock(rows: pl.DataFrame, ts: str, clocks: pl.DataFrame) -> pl.Series:
    """Tell rows whose time on the engine's clock is on none of the clocks of their server; by their wall-clock time.

    Args:
        rows: server, unix_ns, `ts` and server_zero, the clock that most of the server's spans are on.
        ts: The time's column.
        clocks: What `clocks_of` returns.
    """
    zero = pl.col("unix_ns") - pl.col(ts)
    suspicious = ((zero - pl.col("server_zero")).abs() > SAME_CLOCK_NS).fill_null(value=False)
    marks = rows.select(suspicious).to_series()
    if not marks.any():
        return marks
    placed = (
        rows.select(pl.col("server").cast(pl.String), zero=zero)
        .with_row_index("place")
        .sort("zero")
        .join_asof(clocks.sort("low"), left_on="zero", right_on="low", by="server", check_sortedness=False)
        .sort("place")
    )
    return marks & placed.select((pl.col("zero") > pl.col("high")).fill_null(value=True)).to_series()


def on_core_clock(journeys: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """Put API events on the clock of the engine core of their trace, where the two layers ran on different hosts.

    Such times come by way of the wall clocks, and are as good as these agree.

    Args:
        journeys: layer, ts_ns, unix_ns of the events of both layers, and core_zero: wall clock less engine clock of the
            core spans in their trace.

    Returns:
        `journeys` with ts_ns corrected, and how many events were moved.
    """
    zero, core = pl.col("unix_ns") - pl.col("ts_ns"), pl.col("core_zero")
    off = (pl.col("layer") == "api") & ((zero - core).abs() > SAME_CLOCK_NS).fill_null(value=False)
    moved = journeys.select(off.sum()).item()
    if not moved:
        return journeys, 0
    there = pl.col("unix_ns") - core
    return journeys.with_columns(ts_ns=pl.when(off).then(there).otherwise("ts_ns")), int(moved)


def split_engines(spans: pl.DataFrame, marks_of: Callable[[pl.DataFrame], pl.DataFrame]) -> pl.DataFrame:
    """Give every engine a server name of its own where several share one: `name#1`, `name#2`, in order of time.

    Hosts are told apart by the zero of their monotonic clock. Where step spans of one clock interleave, their step
    counters are followed from span to span, and a request belongs to the engine whose counter its events agree with.
    Lives that follow each other in time are one server, restarted. Engines of one host that trace no steps stay
    together.

    Args:
        spans: span_row, server, start_unix_ns, end_unix_ns of the engines' spans, and what their events say: zero (wall
            clock less engine clock), first_ns, last_ns, first_step, last_step of their step summaries.
        marks_of: Gives the events of some spans (span_row): span_row, ts_ns, unix_ns, step (the counter if the event
            marks the start of a step, one more if it marks the end), is_summary. Called where counters interleave.

    Returns:
        span_row, server: new names for the spans of servers that shared one.
    """
    if _are_one_each(spans):
        return pl.DataFrame(schema={"span_row": spans.schema["span_row"], "server": pl.String})
    clocked = _with_clock(spans)
    groups = [group for _, group in clocked.group_by("server", "clock", maintain_order=True)]
    engines = pl.concat(
        [clocked.clear(), *(_with_counter(group, marks_of) for group in groups)], how="diagonal"
    )
    # By starts alone: a request that outlives a jump of the wall clock does not make two hosts.
    lives = engines.group_by("server", "clock", "counter").agg(
        begin=pl.col("start_unix_ns").min(), end=pl.col("start_unix_ns").max()
    )
    lives = lives.sort("server", "begin", "clock", "counter")
    parts = [life.with_columns(_slots(life)) for _, life in lives.group_by("server", maintain_order=True)]
    shared = [part for part in parts if part["slot"].n_unique() > 1]
    if not shared:
        return pl.DataFrame(schema={"span_row": spans.schema["span_row"], "server": pl.String})
    names = pl.concat(shared).with_columns(name=pl.format("{}#{}", "server", pl.col("slot") + 1))
    renamed = engines.join(names, on=["server", "clock", "counter"], how="inner")
    return renamed.select("span_row", server="name")


def _are_one_each(spans: pl.DataFrame) -> bool:
    """Whether no server has zeros far apart or step spans that interleave: the usual case, decided with few copies."""
    zeros = spans.group_by("server").agg(pl.col("zero").max() - pl.col("zero").min())
    if (zeros["zero"] > SAME_CLOCK_NS).any():
        return False
    stepping = spans.select("server", "first_ns", "last_ns").drop_nulls("first_ns").sort("server", "first_ns")
    latest = pl.col("last_ns").cum_max().shift(1).over("server")
    return not stepping.select((pl.col("first_ns") <= latest).any()).item()


def _with_clock(spans: pl.DataFrame) -> pl.DataFrame:
    """Tell the clocks of each server apart by their zeros."""
    ordered = spans.sort("server", "zero", "span_row", nulls_last=True)
    jump = pl.col("zero").diff().over("server") > SAME_CLOCK_NS
    clocks = ordered.with_columns(clock=jump.fill_null(value=False).cast(pl.Int64).cum_sum().over("server"))
    return clocks.with_columns(counter=pl.lit(0, pl.Int64)).sort("server", "clock", "first_ns", "span_row")


def _with_counter(spans: pl.DataFrame, marks_of: Callable[[pl.DataFrame], pl.DataFrame]) -> pl.DataFrame:
    """Tell the step counters behind one name on one clock; `counter` is 0 throughout if there is but one."""
    stepping = spans.filter(pl.col("first_ns").is_not_null())
    if not (stepping["first_ns"] <= stepping["last_ns"].cum_max().shift(1)).any():
        return spans
    chains = stepping.with_columns(_chains(stepping))
    lives = chains.group_by("chain").agg(begin=pl.col("first_ns").min(), end=pl.col("last_ns").max())
    lives = lives.sort("begin", "chain")
    lives = lives.with_columns(_slots(lives)).select("chain", counter="slot")
    known = chains.join(lives, on="chain", suffix="_slot").select("span_row", counter="counter_slot")
    others = spans.join(known, on="span_row", how="anti").select("span_row")
    # Snapshots carry wall-clock time alone.
    marks = marks_of(spans.select("span_row")).with_columns(
        ts_ns=pl.coalesce("ts_ns", pl.col("unix_ns") - spans["zero"].drop_nulls().first())
    )
    assigned = pl.concat([known, _by_agreement(others, known, marks)])
    return (
        spans.drop("counter")
        .join(assigned, on="span_row", how="left")
        .with_columns(pl.col("counter").fill_null(0))
    )


def _chains(spans: pl.DataFrame) -> pl.Series:
    """Follow step counters from span to span: the number of the chain each span belongs to.

    An engine opens a step span as it closes the one before. Otherwise a span goes on with the chain it fits best, by
    the steps left out between them and the time left out, in steps.
    """
    columns = ("first_ns", "last_ns", "first_step", "last_step", "start_unix_ns", "end_unix_ns")
    steps, times = (float((spans[f"last_{c}"] - spans[f"first_{c}"]).sum()) for c in ("step", "ns"))
    step_ns = max(times / steps if steps else 0.0, float(_FASTEST_STEP_NS))
    ends: list[tuple[int, float, int]] = []
    numbers = []
    for first_ns, last_ns, first_step, last_step, opened_ns, closed_ns in spans.select(columns).iter_rows():
        costs = {}
        for number, (ended_ns, ended_step, ended_unix_ns) in enumerate(ends):
            skipped, pause_ns = first_step - ended_step - 1, first_ns - ended_ns
            if pause_ns > 0 and 0 <= skipped <= _UNSAMPLED_STEPS + pause_ns / _FASTEST_STEP_NS:
                gap_ns = abs(opened_ns - ended_unix_ns)
                costs[number] = (gap_ns > _AT_ONCE_NS, skipped + gap_ns / step_ns)
        number = min(costs, key=costs.__getitem__, default=len(ends))
        ends[number : number + 1] = [(last_ns, last_step, closed_ns)]
        numbers.append(number)
    return pl.Series("chain", numbers, pl.Int64)


def _slots(lives: pl.DataFrame) -> pl.Series:
    """Put lives (`begin` to `end`, sorted by begin) that do not overlap into as few slots as they fit in."""
    ends: list[int] = []
    slots = []
    for begin, end in lives.select("begin", "end").iter_rows():
        free = [slot for slot, ended in enumerate(ends) if ended < begin]
        # The one that ended last: a restart follows at once.
        slot = max(free, key=ends.__getitem__, default=len(ends))
        ends[slot : slot + 1] = [end]
        slots.append(slot)
    return pl.Series("slot", slots, pl.Int64)


def _by_agreement(others: pl.DataFrame, known: pl.DataFrame, marks: pl.DataFrame) -> pl.DataFrame:
    """Give each span the counter its events agree with best, interpolated between what is known of that counter.

    With few steps sampled that is rough at first; the spans that are told apart clearly make it finer.
    """
    timed = marks.drop_nulls(["ts_ns", "step"]).sort("ts_ns")
    undecided = timed.join(others, on="span_row", how="semi")
    clock = timed.filter("is_summary").join(known, on="span_row", how="inner")
    assigned = known.clear()
    for _ in range(_ROUNDS):
        counters = sorted(clock["counter"].unique())
        errors = pl.concat([_errors(undecided, clock.filter(counter=number), number) for number in counters])
        ranked = errors.sort("span_row", "error", "counter")
        assigned = ranked.group_by("span_row", maintain_order=True).agg(
            pl.col("counter").first(),
            margin=pl.col("error").get(1, null_on_oob=True) - pl.col("error").first(),
        )
        clear = assigned.filter(pl.col("margin") > _CLEAR_STEPS).select("span_row", "counter")
        clock = timed.join(pl.concat([known, clear]), on="span_row", how="inner")
    return assigned.select("span_row", "counter")


def _errors(undecided: pl.DataFrame, clock: pl.DataFrame, counter: int) -> pl.DataFrame:
    """Mean distance of each span's events from one counter as others tell it: span_row, counter, error in steps."""
    points = clock.select("ts_ns", at_ns="ts_ns", at_step="step")
    before, after = (
        points.rename({"at_ns": f"{side}_ns", "at_step": f"{side}_step"}) for side in ("before", "after")
    )
    sides = undecided.select("span_row", "step", "ts_ns")
    sides = sides.join_asof(before, on="ts_ns", allow_exact_matches=False)
    sides = sides.join_asof(after, on="ts_ns", strategy="forward", allow_exact_matches=False)
    span_ns = (pl.col("after_ns") - pl.col("before_ns")).clip(lower_bound=1)
    share = (pl.col("ts_ns") - pl.col("before_ns")) / span_ns
    between = pl.col("before_step") + share * (pl.col("after_step") - pl.col("before_step"))
    due = pl.coalesce(between, "before_step", "after_step")
    error = (pl.col("step") - due).abs().clip(upper_bound=_CLEARLY_OFF_STEPS)
    return sides.group_by("span_row").agg(error=error.mean()).with_columns(counter=pl.lit(counter, pl.Int64))
