"""Plan one kind of server for a file of arrivals: window by window, for all of them, and for a scaler."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from tracefit.errors import DataError, UsageError
from tracefit.options import DayOptions, LoadOptions, named
from tracefit.replay.day import DaySearch, windows_of
from tracefit.replay.plan import SOME_OUTSIDE_PCT, Fleet, curve_of
from tracefit.replay.scaler import EVERY_S, ScaledServers, needed_by_load, scaled
from tracefit.results.plans import (
    BindingLatency,
    DayPlan,
    PlannedLoad,
    PlannedWindow,
    ScalerPlan,
    ServerChange,
)
from tracefit.text import FIRST_DATE_NS, count, number, plural

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tracefit.commands.timed_requests import TimedRequests
    from tracefit.replay.day import DayLoad, DayWindow, End
    from tracefit.results.plans import Objective, ServerPlan
    from tracefit.statistics import Integers

_MOST_DRAWN_REQUESTS = 50_000
"""Requests of the day from which the capacity is computed."""
_MOST_WINDOWS = 3_000
_SPARES_PCT = (0.0, 10.0, 25.0, 50.0, 100.0)
"""Spare servers that are tried for a scaler, in percent."""
_ROUTED_DAY = {
    "random": "requests go to servers at random, so that one server's day is the file's own requests, thinned; "
    "replays of some servers stand for all",
    "round_robin": "requests go to servers in turn; replays of some servers stand for all",
}
_ASSUMED = (
    (
        "a server that keeps to the objectives at a rate does so at a lower one with requests that are no longer: such "
        "windows are not replayed"
    ),
    "the scaler follows the mean load of two minutes, by the largest rate at which one server keeps to the objectives",
    (
        "a server of the scaler is ready when it was asked for all of the start-up time, and let go when no load of "
        "five minutes needed it"
    ),
)


class DayQuestion(msgspec.Struct, frozen=True):
    """A file of arrivals to plan for.

    Attributes:
        timed: Its requests.
        file: Its name.
        options: How it is planned for.
        router: See `LoadOptions`.
    """

    timed: TimedRequests
    file: str
    options: DayOptions
    router: str = "random"


def day_server(server: Fleet, day: DayQuestion, longest_tokens: float | None) -> tuple[Fleet, DayLoad, str | None]:
    """Return a server with the requests of a day to draw from, those that it takes, and a note on the others.

    Args:
        server: A server without requests of its own.
        day: The day.
        longest_tokens: Most tokens of a request; null where that is not known.

    Raises:
        DataError: It takes no request.
    """
    load, note = day.timed.load, None
    blocks = server.settings.num_blocks
    if blocks is not None:
        longest_tokens = min(longest_tokens or math.inf, blocks * server.settings.block_size)
    if longest_tokens is not None:
        fits = load.prompt_tokens + load.output_tokens <= longest_tokens
        if lost := int((~fits).sum()):
            limit = f"{longest_tokens:,.0f} tokens"
            note = (
                f"{count(lost)} of {count(len(fits))} requests are left out: they are longer than the server "
                f"takes, {limit}"
            )
            load = load.of(fits)
    if not len(load.at_s):
        raise DataError(f"every request is longer than the server takes, {longest_tokens:,.0f} tokens", where=day.file)
    return (
        Fleet(server.deployment, server.server, server.settings, load.sample(_MOST_DRAWN_REQUESTS)),
        load,
        note,
    )


def with_day(
    plan: ServerPlan, fleet: Fleet, load: DayLoad, day: DayQuestion, errors: Mapping[str, float]
) -> ServerPlan:
    """Return a plan with its answer for a file of arrivals.

    Args:
        plan: The plan without its answer.
        fleet: The server, with these requests to draw from.
        load: The requests.
        day: The file.
        errors: See `DaySearch`.

    Raises:
        UsageError: There are too many windows.
    """
    window_s = day.options.window_s
    span_s = float(load.at_s[-1] - load.at_s[0])
    if span_s > _MOST_WINDOWS * window_s:
        raise UsageError(
            (
                f"its requests span {number(span_s / 3600)} hours, {count(_MOST_WINDOWS)} windows of {window_s:g} s at "
                "most can be planned for"
            ),
            where=day.file,
            hint=f"give times in seconds or as dates, or {named(DayOptions, 'window_s')} of more seconds",
        )
    search = DaySearch(fleet, load, windows_of(load.at_s, window_s), plan.objectives, errors, day.router != "random")
    likely = search.fewest_of_each("likely", [0] * len(search.windows))
    lengths = (float(load.prompt_tokens.mean()), float(load.output_tokens.mean()))
    what = "rates" if day.timed.has_rates else "requests"
    plan = replace(plan, load=PlannedLoad(f"{what} of {day.file}", *lengths))
    if all(one is None for one, w in zip(likely, search.windows, strict=True) if w.requests):
        return replace(plan, reason=_too_slow(search))
    of_the_day, binding = search.for_the_day(likely, "likely")
    sure = _sure(search, likely, of_the_day, binding)
    # A window by itself may need another number by chance than with the requests that really come before it: none needs
    # more than the day, and the one that decides needs as many.
    each = [one if one is None else min(one, sure.servers) for one in sure.each]
    likely = [one if one is None else min(one, of_the_day) for one in likely]
    each[sure.binding], likely[binding] = sure.servers, of_the_day
    ready, scaler, holds = _scaler(search, each, sure.end, day.options)
    answer = DayPlan(
        file=day.file,
        has_rates=day.timed.has_rates,
        rows=day.timed.rows,
        requests=len(load.at_s),
        odd=day.timed.odd,
        window_s=window_s,
        servers=sure.servers,
        servers_likely=sure.likely,
        binding=sure.binding,
        latencies=_latencies(search, sure.servers, sure.binding),
        windows_missed=sum(one is None for one in each),
        server_hours=sure.servers * span_s / 3600,
        server_hours_by_window=sum(
            (n or 0) * (w.end_s - w.begin_s) / 3600 for n, w in zip(each, search.windows, strict=True)
        ),
        windows=_windows(search, (each, likely), ready, holds, window_s),
        scaler=scaler,
    )
    missed = _missed_note(answer)
    return replace(
        plan,
        servers=sure.servers,
        servers_likely=sure.likely,
        is_sure=sure.is_sure,
        met=not answer.windows_missed,
        day=answer,
        notes=(*missed, *sure.notes, *plan.notes, _ROUTED_DAY[day.router], *_ASSUMED),
    )


class _Sure(NamedTuple):
    """Servers that are enough at the high end of the intervals, or as planned where no number is.

    Attributes:
        each: The servers of each window; null where no number is enough.
        servers: Those of the day.
        likely: Those of the day, if latencies are as planned.
        binding: The window that needs them.
        end: Which latencies decided.
        is_sure: Whether they are enough at the high end in every window.
        notes: On what the numbers rest.
    """

    each: list[int | None]
    servers: int
    likely: int
    binding: int
    end: End
    is_sure: bool
    notes: tuple[str, ...]


def _sure(search: DaySearch, likely: list[int | None], servers: int, binding: int) -> _Sure:
    """Search at the high end of the intervals; `servers` and the `binding` window are those of the day as planned."""
    steps = search.steps_of(search.of_the_day(binding, servers, "likely"))
    outside_pct, outside = search.fleet.law.outside(steps)
    search.slowness = search.fleet.law.slowness(steps, outside_pct)[1]
    notes: list[str] = []
    if outside_pct > SOME_OUTSIDE_PCT:
        share = f"for {outside_pct:.0f} % of the time the steps are outside what the models were trained on"
        notes.append(f"this rests on an extrapolation: {share} ({'; '.join(outside)})")
    as_planned = _Sure(likely, servers, servers, binding, "likely", True, tuple(notes))
    if search.slowness == 1.0 and all(error == 1.0 for error in search.errors.values()):
        return as_planned
    sure = search.fewest_of_each("high", likely)
    if unsure := sum(one is None and other is not None for one, other in zip(sure, likely, strict=True)):
        notes.append(
            f"in {plural(unsure, 'window')} no number of servers is sure to be enough: at the high end of the "
            "interval the objectives do not hold there"
        )
    if not any(sure):
        return as_planned._replace(is_sure=False, notes=tuple(notes))
    each = [other if one is None else one for one, other in zip(sure, likely, strict=True)]
    found, its_binding = search.for_the_day(sure, "high")
    if found <= servers:
        found, its_binding = servers, binding
    return _Sure(each, found, servers, its_binding, "high", not unsure, tuple(notes))


def _too_slow(search: DaySearch) -> str:
    busiest = max(range(len(search.windows)), key=lambda k: search.windows[k].requests)
    found = search.replayed(busiest, search.windows[busiest].requests, "likely", search.size)
    missed = ", ".join(
        f"{o.name.removesuffix('_ms')} is {number(ms)} ms, not {number(o.limit_ms)}"
        for o in search.objectives
        if (ms := search.value_ms(found, o.name, "likely")) > o.limit_ms
    )
    return (
        "no number of servers is enough: with a server for each request of a window, "
        f"{missed or 'the objectives do not hold'}"
    )


def _missed_note(day: DayPlan) -> tuple[str, ...]:
    if not day.windows_missed:
        return ()
    first = next(w for w in day.windows if w.servers is None)
    where = f"first in that from {first.begins} with {plural(first.requests, 'request')}"
    text = (
        f"in {plural(day.windows_missed, 'window')} the objectives hold with no number of servers, {where}: the "
        "others decide"
    )
    return (text,)


def _latencies(search: DaySearch, servers: int, binding: int) -> tuple[BindingLatency, ...]:
    """Return the objectives in the binding window, with the servers of the day and with one fewer."""
    planned, high = (search.of_the_day(binding, servers, end) for end in ("likely", "high"))
    fewer = search.of_the_day(binding, servers - 1, "likely") if servers > 1 else None

    def known(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return tuple(
        BindingLatency(
            name=one.name,
            limit_ms=one.limit_ms,
            value=known(search.value_ms(planned, one.name, "likely")),
            high=known(search.value_ms(high, one.name, "high")),
            one_fewer=None if fewer is None else known(search.value_ms(fewer, one.name, "likely")),
        )
        for one in search.objectives
    )


def begins(at_s: float) -> str:
    """Write a time: a date where its clock has dates, else hours and minutes."""
    if at_s * 1e9 >= FIRST_DATE_NS:
        return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M:%S}".removesuffix(":00")
    minutes, seconds = divmod(round(at_s), 60)
    return f"{minutes // 60:02}:{minutes % 60:02}" + (f":{seconds:02}" if seconds else "")


def _windows(
    search: DaySearch,
    servers: tuple[Sequence[int | None], Sequence[int | None]],
    ready: ScaledServers,
    holds: Mapping[int, bool],
    window_s: float,
) -> tuple[PlannedWindow, ...]:
    load = search.load
    rows = []
    for k, window in enumerate(search.windows):
        own = slice(window.first, window.end)
        here = ready.at(load.at_s[own])
        known = window.requests > 0
        rows.append(
            PlannedWindow(
                from_s=window.begin_s,
                begins=begins(math.floor(window.begin_s / window_s + 1e-9) * window_s),
                requests=window.requests,
                rate_per_s=window.rate,
                prompt_tokens=float(load.prompt_tokens[own].mean()) if known else None,
                output_tokens=float(load.output_tokens[own].mean()) if known else None,
                servers=servers[0][k],
                servers_likely=servers[1][k],
                scaled_mean=float(here.mean()) if known else None,
                scaled_most=int(here.max()) if known else None,
                scaled_holds=holds.get(k),
            )
        )
    return tuple(rows)


# -- a scaler --------------------------------------------------------------------------------------------


def _scaler(
    search: DaySearch, each: Sequence[int | None], end: End, options: DayOptions
) -> tuple[ScaledServers, ScalerPlan, dict[int, bool]]:
    """Return the servers that a scaler has ready, with the fewest spare ones with which the objectives hold, and where
    they do.
    """
    load, windows = search.load, search.windows
    lengths = (load.prompt_tokens, load.output_tokens)
    for_one = np.zeros(len(load.at_s))
    steady = curve_of(search.fleet, 1, search.errors).largest_rate(
        search.objectives, high=True if end == "high" else None
    )
    for k, (window, servers) in enumerate(zip(windows, each, strict=True)):
        own = slice(window.first, window.end)
        # A server's rate under a steady load of the whole day's requests, as far as those of the window are longer or
        # shorter.
        means = [float(c[own].mean() / c.mean()) for c in lengths if window.requests]
        at_each = max(
            search.carried(k, end),
            window.rate / servers if servers else 0.0,
            steady / max(means, default=1.0),
        )
        for_one[own] = 1 / (at_each or search.fleet.capacity)
    begin_s, needed = needed_by_load(load.at_s, for_one)
    decided = [k for k, one in enumerate(each) if one]
    for spare in _SPARES_PCT:
        ready = scaled(begin_s, needed, start_up_s=options.scale_up_s, step=options.scale_step, spare_pct=spare)
        there = ready.at(load.at_s)
        # The windows that lack most are replayed first: one that misses an objective is enough to try more spare
        # servers.
        short = sorted(decided, key=lambda k: _least(windows[k], there) / (each[k] or 1))
        holds = dict[int, bool]()
        for k in short:
            holds[k] = _scaled_holds(search, k, each[k] or 0, there, end)
            if not holds[k] and spare < _SPARES_PCT[-1]:
                break
        if all(holds.values()):
            break
    missed = sum(not one for one in holds.values())
    changed = np.flatnonzero(np.diff(ready.ready, prepend=-1))
    return (
        ready,
        ScalerPlan(
            scale_up_s=options.scale_up_s,
            step=options.scale_step,
            spare_pct=spare,
            holds=not missed,
            windows_missed=missed,
            most=int(ready.ready.max()),
            server_hours=ready.hours(float(load.at_s[-1])),
            changes=tuple(ServerChange(begin_s + EVERY_S * int(k), int(ready.ready[k])) for k in changed),
        ),
        holds,
    )


def _least(window: DayWindow, there: Integers) -> int:
    """Return the fewest servers that are ready in a window, from those at each arrival of the day."""
    return int(there[window.first : window.end].min())


def _scaled_holds(search: DaySearch, at: int, servers: int, there: Integers, end: End) -> bool:
    """Return whether a window keeps to the objectives with the servers that are ready at each arrival."""
    if _least(search.windows[at], there) >= servers:
        return True
    return search.keeps(search.replayed(at, there, end, search.size, as_came=True), end)


def refuse_options(objectives: Sequence[Objective], requests: LoadOptions, given: Mapping[str, object]) -> None:
    """Refuse what a file of arrivals leaves no room for.

    Raises:
        UsageError: An objective is missing, or an option contradicts the file.
    """
    option = f"{named(LoadOptions, 'arrivals')} {requests.arrivals}"
    for name, value in given.items():
        if value is not None:
            shown = f"{value:g}" if isinstance(value, float) else value
            raise UsageError(
                f"{name} {shown}: {option} has the rates, and a plan finds the servers",
                hint=f"leave out {name}",
            )
    if not objectives:
        raise UsageError(f"{option}: no objective is given", hint="such as ttft_p99=500 and itl_p99=50")
