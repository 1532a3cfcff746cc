"""Plan servers for a day of arrivals: the fewest in each window of time, and the fewest that carry all of them.

Requests go to servers at random: each of n servers gets every request with a probability of 1 / n. So one server's day
is the whole day thinned, with its own arrivals and lengths, and replays of some of the n stand for all. A request has
one random number whatever n is (common random numbers): servers differ by their number and not by their luck.

The fewest servers of a window follow from a bisection. Its replays say something of other windows too: a server that
keeps to the objectives at a rate does so at a lower one, with requests that are no longer and come no less evenly.
Before a window the servers get its own beginning, backwards, so that they are as busy as in it. The fewest for the
whole day are then replayed for longer, with the requests that really come before a window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import polars as pl

from tracefit.replay.models import admission_us
from tracefit.replay.plan import BatchRecorder, Fleet, TrafficSample, batches_of, split_name
from tracefit.replay.run import RequestLoad, replay
from tracefit.statistics import percentile_of_counts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tracefit.replay.engine import StepBatch, StepGroup
    from tracefit.results.plans import Objective
    from tracefit.statistics import Flags, Integers, Vector

MOST_REPLAYED = 2_500
"""Requests of a replay in a search: P99 of TTFT near the capacity varies by some 10 percent between so many."""
LEAST_REPLAYED = 1_000
"""The same for a day of very many windows."""
_MANY_WINDOWS = 30
"""Windows from which on replays become shorter."""
CHECKED_REQUESTS = 20_000
"""Requests of a replay of a window that decides how many servers carry the day."""
_MOST_CHECKED = 3
"""Windows that decide how many servers carry the day: those that need most."""
_KEPT_REPLAYS = 4
"""Replays for the day that are kept: each takes a tenth of a gigabyte."""
_STEPS_UP = 40
"""A number for the day that is too small grows by a fortieth."""
_ROUTINGS = 4
"""Most times that the requests of a window are dealt out to its servers: few requests say little about chance."""

LEAD_TIMES = 2.0
"""Time before a window that is replayed with it, and not counted, over the time that a request takes in full
batches."""
LEAST_LEAD_S, MOST_LEAD_S = 30.0, 600.0
"""Its limits; it is at most as long as the window."""
_WINDOW_PARTS = 48
"""Most parts of a window: some stand for all where one server has very many requests."""
_BUSIEST, _FEWEST_PARTS = 3, 3
"""Parts that stand for themselves, and the fewest of the others."""
_LEAST_PART_S = 60.0
"""Shortest part that stands for others: a queue that grows shows in it."""
_BINS = (12, 120)
"""Parts of a window in which its requests are counted, to see how evenly they come."""
_FEWEST_ALIKE = 500
"""Requests of a window from which on others may be compared with it."""
_ALIKE_DAYS_SHARE = 0.05
"""Relative difference of lengths and of unevenness that counts as none."""
_FIRST_SHARE = 0.8
"""Share of the capacity at which a search begins."""
_MOST_TIMES = 64
"""Times the number at which a search begins that it tries: with more servers each has next to nothing to do."""

ServerSteps: TypeAlias = "tuple[tuple[tuple[StepBatch, float], ...], tuple[StepGroup, ...]]"
"""The batches of a server's steps with their times, and the steps."""
End = Literal["likely", "high"]
"""Latencies as planned, or at the high end of their intervals."""


class DayLoad(msgspec.Struct, frozen=True):
    """Requests in the order of arrival, every array of shape (n,).

    Attributes:
        at_s: Arrival in s, on any clock.
        prompt_tokens: Prompt tokens, at least 1.
        output_tokens: Output tokens, at least 1.
        cached_tokens: Leading tokens of each prompt from the prefix cache.
    """

    at_s: Vector
    prompt_tokens: Integers
    output_tokens: Integers
    cached_tokens: Integers

    def sample(self, most: int) -> TrafficSample:
        """Return requests to draw from: at most so many, evenly over the day."""
        step = -(-len(self.at_s) // most)
        return TrafficSample(self.prompt_tokens[::step], self.output_tokens[::step], self.cached_tokens[::step])

    def of(self, rows: Flags) -> DayLoad:
        """Return some of the requests."""
        return DayLoad(self.at_s[rows], self.prompt_tokens[rows], self.output_tokens[rows], self.cached_tokens[rows])


class DayWindow(NamedTuple):
    """A window of time.

    Attributes:
        begin_s: Its begin; of the first window, the first arrival.
        end_s: Its end; of the last window, the last arrival.
        first: Number of its first request.
        end: Number of the request after its last one.
    """

    begin_s: float
    end_s: float
    first: int
    end: int

    @property
    def requests(self) -> int:
        """The number of its requests."""
        return self.end - self.first

    @property
    def rate(self) -> float:
        """Requests per second, over all servers."""
        return self.requests / max(self.end_s - self.begin_s, 1e-3)


def windows_of(at_s: Vector, window_s: float) -> list[DayWindow]:
    """Cut arrivals, in ascending order, into windows that begin at multiples of their length; some may be empty."""
    first, last = (math.floor(float(at) / window_s) for at in (at_s[0], at_s[-1]))
    edges = np.arange(first, last + 2) * float(window_s)
    ends = np.searchsorted(at_s, edges)
    edges[0], edges[-1] = at_s[0], at_s[-1]
    return [
        DayWindow(float(edges[k]), float(edges[k + 1]), int(ends[k]), int(ends[k + 1])) for k in range(len(edges) - 1)
    ]


def cut_evenly(window: DayWindow, at_s: Vector, parts: int) -> list[DayWindow]:
    """Cut a window into parts of equal length."""
    edges = np.linspace(window.begin_s, window.end_s, parts + 1)
    ends = [window.first, *np.searchsorted(at_s, edges[1:-1]).tolist(), window.end]
    return [DayWindow(float(edges[k]), float(edges[k + 1]), ends[k], ends[k + 1]) for k in range(parts)]


class WindowReplay(msgspec.Struct, frozen=True):
    """Requests of a window on some of its servers.

    Attributes:
        latencies: ttft, itl and e2e in us; infinite for a request that is never served.
        counts: Requests that each stands for: name to an array of the same shape.
        steps: The steps of each server, as `batches_of` takes them.
    """

    latencies: Mapping[str, Vector]
    counts: Mapping[str, Integers]
    steps: tuple[ServerSteps, ...] = ()

    def percentile_ms(self, name: str) -> float:
        """Return the latency that a name such as `ttft_p99_ms` stands for; 0 where no request has it."""
        latency, q = split_name(name)
        values = self.latencies[latency]
        return percentile_of_counts(values, self.counts[latency], q) / 1e3 if len(values) else 0.0


class _Seen(NamedTuple):
    """A replay of a window.

    Attributes:
        kind: See `_kind`.
        rate: Requests per second at each server.
        holds: Whether the objectives held.
    """

    kind: Vector
    rate: float
    holds: bool


@dataclass
class DaySearch:
    """A search for the fewest servers.

    Attributes:
        fleet: Their server, with the requests of the day to draw from.
        load: The requests.
        windows: Windows of time.
        objectives: The objectives, which hold in each window.
        errors: Name of a percentile to the relative error of replays of recorded runs, a factor of at least 1.
        in_turn: Whether servers get requests in turn; otherwise at random.
        slowness: Factor on step times at the high end of their interval.
        size: Requests of a replay in the search.
        lead_s: Time before a window that is replayed with it.
    """

    fleet: Fleet
    load: DayLoad
    windows: Sequence[DayWindow]
    objectives: Sequence[Objective]
    errors: Mapping[str, float]
    in_turn: bool = False
    slowness: float = 1.0
    size: int = field(init=False)
    lead_s: float = field(init=False)
    _kinds: list[Vector | None] = field(init=False)
    _seen: dict[End, list[_Seen]] = field(default_factory=lambda: {"likely": [], "high": []})
    _draws_of: dict[int, Vector] = field(default_factory=dict)
    _day: dict[tuple[int, End], int | None] = field(default_factory=dict)
    _replays: dict[tuple[int, int, End], WindowReplay] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._kinds = [self._kind(window) for window in self.windows]
        many = max(len(self.windows) / _MANY_WINDOWS, 1.0)
        self.size = max(int(MOST_REPLAYED / many), LEAST_REPLAYED)
        filled_s = self.fleet.slots / self.fleet.capacity
        self.lead_s = min(max(LEAD_TIMES * filled_s, LEAST_LEAD_S), MOST_LEAD_S)

    # -- windows that are alike

    def _kind(self, window: DayWindow) -> Vector | None:
        """Return logarithms of lengths, and how uneven the arrivals are: the more of each, the fewer requests a server
        carries.

        Null for a window of few requests, which chance makes unlike others.
        """
        if window.requests < _FEWEST_ALIKE:
            return None
        own = slice(window.first, window.end)
        prompt, cached = self.load.prompt_tokens[own], self.load.cached_tokens[own]
        columns = (prompt, prompt - cached, self.load.output_tokens[own])
        lengths = [np.log(f(c)) for c in columns for f in (np.mean, lambda c: np.percentile(c, 90))]
        uneven = []
        for bins in _BINS:
            counts = np.histogram(self.load.at_s[own], bins, (window.begin_s, window.end_s))[0]
            # Beyond a Poisson process, whose counts are spread too.
            beyond = float(counts.var() - counts.mean()) / float(counts.mean()) ** 2
            uneven.append(math.sqrt(max(beyond, 0.0)))
        return np.array([*lengths, *uneven])

    def carried(self, number: int, end: End) -> float:
        """Return the largest rate at which a server was seen to keep to the objectives with requests like those of a
        window, or more demanding ones.
        """
        kind = self._kinds[number]
        return max(
            (
                s.rate
                for s in self._seen[end]
                if kind is not None and s.holds and bool((kind <= s.kind + _ALIKE_DAYS_SHARE).all())
            ),
            default=0.0,
        )

    def _missed_at(self, number: int, end: End) -> float:
        """Return the smallest rate at which a server missed one with requests like those of a window, or less demanding
        ones.
        """
        kind = self._kinds[number]
        return min(
            (
                s.rate
                for s in self._seen[end]
                if kind is not None and not s.holds and bool((kind >= s.kind - _ALIKE_DAYS_SHARE).all())
            ),
            default=math.inf,
        )

    # -- the search

    def fewest_of_each(self, end: End, begin: Sequence[int | None]) -> list[int | None]:
        """Return the fewest servers of every window: 0 without requests, null where no number keeps to the objectives.

        Args:
            end: Which latencies.
            begin: Numbers to begin with, 0 where none is known; a window with null has null.
        """
        work = [float(self.load.output_tokens[w.first : w.end].sum()) for w in self.windows]
        found: list[int | None] = [None if n is None else 0 for n in begin]
        at_each = 0.0
        # The windows with most work first: what they say holds for many of the others.
        for k in sorted(range(len(work)), key=lambda k: work[k], reverse=True):
            if begin[k] is None or not self.windows[k].requests:
                continue
            first = begin[k] or (math.ceil(work[k] / at_each - 1e-9) if at_each else 0)
            found[k] = self._fewest(k, end, first or self._first(k))
            at_each = work[k] / (found[k] or 0) if found[k] else at_each
        return found

    def _first(self, number: int) -> int:
        """Return a number of servers for a window, from their capacity."""
        return math.ceil(self.windows[number].rate / (_FIRST_SHARE * self.fleet.capacity))

    def _fewest(self, number: int, end: End, first: int) -> int | None:
        """Return the fewest servers that keep a window to the objectives; null if no number does."""
        window = self.windows[number]
        first = min(max(first, 1), window.requests)
        most = min(first * _MOST_TIMES, window.requests)
        # `few` are too few, `enough` are enough; the steps to them double.
        few, enough, step = 0, most + 1, 1
        servers = first
        while few + 1 < enough:
            if self._holds(number, servers, end):
                enough = servers
            else:
                few = servers
            if enough > most:
                servers, step = min(few + step, most), 2 * step
            elif few == 0 and enough == servers:
                servers, step = max(enough - step, 1), 2 * step
            else:
                servers = (few + enough) // 2
        return enough if enough <= most else None

    def _holds(self, number: int, servers: int, end: End) -> bool:
        """Return whether the objectives hold with some servers, from a replay if no other window says so."""
        each = self.windows[number].rate / servers
        if each <= self.carried(number, end):
            return True
        if each >= self._missed_at(number, end):
            return False
        holds = self.keeps(self.replayed(number, servers, end, self.size), end)
        if (kind := self._kinds[number]) is not None:
            self._seen[end].append(_Seen(kind, each, holds))
        return holds

    def keeps(self, found: WindowReplay, end: End) -> bool:
        """Return whether a replay keeps to the objectives."""
        return all(self.value_ms(found, one.name, end) <= one.limit_ms for one in self.objectives)

    def value_ms(self, found: WindowReplay, name: str, end: End) -> float:
        """Return a percentile of a replay; at the high end it is as much larger as replays of recorded runs were
        off.
        """
        return found.percentile_ms(name) * (self.errors.get(name, 1.0) if end == "high" else 1.0)

    def for_the_day(self, each: Sequence[int | None], end: End) -> tuple[int, int]:
        """Return the fewest servers that carry every window, and the number of the window that needs them.

        Args:
            each: The fewest servers of every window; null where no number is enough.
            end: Which latencies.
        """
        need = [
            (n or 0, w.rate / (self.carried(k, end) or 1.0), w.requests)
            for k, (n, w) in enumerate(zip(each, self.windows, strict=True))
        ]
        decided = [k for k, servers in enumerate(each) if servers]
        order = sorted(decided, key=lambda k: need[k], reverse=True)[:_MOST_CHECKED]
        servers, binding = max(need[order[0]][0], 1), order[0]
        step, most = max(1, servers // _STEPS_UP), _MOST_TIMES * servers
        while (missed := self._missed(order, servers, end)) is not None and servers < most:
            servers, binding = servers + step, missed
        while servers > 1 and (missed := self._missed(order, servers - 1, end)) is None:
            servers -= 1
        return servers, binding if missed is None else missed

    def _missed(self, numbers: Sequence[int], servers: int, end: End) -> int | None:
        """Return the first of some windows in which some servers all day miss an objective; null where each holds."""
        if (servers, end) not in self._day:
            found = ((k, self.of_the_day(k, servers, end)) for k in numbers)
            self._day[servers, end] = next((k for k, one in found if not self.keeps(one, end)), None)
        return self._day[servers, end]

    def of_the_day(self, number: int, servers: int, end: End) -> WindowReplay:
        """Return the longer replay of a window, with the requests that really come before it."""
        key = (number, servers, end)
        if key not in self._replays:
            if len(self._replays) >= _KEPT_REPLAYS:
                del self._replays[next(iter(self._replays))]
            self._replays[key] = self.replayed(number, servers, end, CHECKED_REQUESTS, as_came=True)
        return self._replays[key]

    # -- replays

    def replayed(
        self,
        number: int,
        servers: int | Integers,
        end: End,
        most: int,
        *,
        as_came: bool = False,
    ) -> WindowReplay:
        """Replay a window.

        Args:
            number: Its number.
            servers: How many servers there are; or how many at each arrival of the day, shape (n,).
            end: Which step times.
            most: About so many requests are replayed, if the window has as many.
            as_came: Whether the requests before the window are those that really came; else the servers are as busy as
                in it.
        """
        window = self.windows[number]
        least = servers if isinstance(servers, int) else int(servers[window.first : window.end].min())
        parts = list(self._parts(window, window.requests / least, most))
        found = [
            (part, stands_for, served)
            for part, stands_for in parts
            for served in self._served(
                part, servers, end, most // len(parts), as_came=as_came or part.first > window.first
            )
        ]
        counts = [np.full(len(served.ttft), stands_for) for _, stands_for, served in found]
        values = {
            name: np.concatenate([getattr(served, name) for *_, served in found]) for name in ("ttft", "itl", "e2e")
        }
        every = np.concatenate(counts)
        has = {name: ~np.isnan(v) for name, v in values.items()}
        return WindowReplay(
            {name: v[has[name]] for name, v in values.items()},
            {name: every[has[name]] for name in values},
            tuple(served.steps for *_, served in found),
        )

    def _parts(self, window: DayWindow, at_each: float, most: int) -> Iterator[tuple[DayWindow, int]]:
        """Yield the window; of one with very many requests at each server, some parts, and how many each stands for.

        Parts are ranked by their output tokens. The busiest ones stand for themselves, as a burst does, and of the
        others every k-th for those next to it.
        """
        parts = _WINDOW_PARTS
        while parts > 1 and (window.end_s - window.begin_s) / parts < max(_LEAST_PART_S, self.lead_s):
            parts //= 2
        if at_each <= 2 * most or parts < 2 * (_BUSIEST + _FEWEST_PARTS):
            yield window, 1
            return
        cut = cut_evenly(window, self.load.at_s, parts)
        ranked = sorted(cut, key=lambda p: self.load.output_tokens[p.first : p.end].sum(), reverse=True)
        yield from ((part, 1) for part in ranked[:_BUSIEST])
        others = ranked[_BUSIEST:]
        step = min(math.ceil(at_each / most), len(others) // _FEWEST_PARTS)
        for k in range(0, len(others), step):
            near = others[k : k + step]
            if (middle := near[len(near) // 2]).requests:
                yield middle, len(near)

    def _served(
        self, window: DayWindow, servers: int | Integers, end: End, most: int, *, as_came: bool
    ) -> Iterator[_Served]:
        """Yield the requests of one server after the other until there are enough."""
        which, at_s = self._with_lead(window, as_came=as_came)
        counts = (which >= window.first) & (which < window.end) & (at_s >= window.begin_s)
        here = servers if isinstance(servers, int) else servers[which]
        # One server gets all requests, and in turn the same ones go to one of them.
        draws = 1 if self.in_turn or int(np.max(here)) == 1 else _ROUTINGS
        left = min(most, draws * window.requests)
        for draw in range(draws):
            server = which % here if self.in_turn else (self._drawn(draw)[which] * here).astype(int)
            for k in range(int(server.max()) + 1):
                mine = server == k
                if not counts[mine].any():
                    continue
                yield self._replayed(which[mine], at_s[mine], counts[mine], end)
                left -= int(counts[mine].sum())
                if left <= 0:
                    return

    def _drawn(self, draw: int) -> Vector:
        """Return a random number in [0, 1) for every request: n times it is the server, of n."""
        if draw not in self._draws_of:
            self._draws_of[draw] = np.random.default_rng(draw).random(len(self.load.at_s))
        return self._draws_of[draw]

    def _with_lead(self, window: DayWindow, *, as_came: bool) -> tuple[Integers, Vector]:
        """Return the numbers of the requests before and in a window, and their arrivals, in order."""
        at_s, own = self.load.at_s, np.arange(window.first, window.end)
        lead = min(self.lead_s, window.end_s - window.begin_s)
        if as_came:
            before = np.arange(np.searchsorted(at_s, window.begin_s - lead), window.first)
            times = at_s[before]
        else:
            before = np.arange(window.first, np.searchsorted(at_s, window.begin_s + lead))[::-1]
            times = np.nextafter(2 * window.begin_s - at_s[before], -math.inf)
        return np.concatenate([before, own]), np.concatenate([times, at_s[own]])

    def _replayed(self, which: Integers, at_s: Vector, counts: Flags, end: End) -> _Served:
        """Replay the requests of one server."""
        arrival = 1e6 * (at_s - at_s[0])
        prompt, output, cached = (
            column[which] for column in (self.load.prompt_tokens, self.load.output_tokens, self.load.cached_tokens)
        )
        fleet = self.fleet
        recorder = BatchRecorder(fleet.times, self.slowness if end == "high" else 1.0)
        admission = admission_us(fleet.deployment.models.get("alpha.admission"), arrival, prompt)
        times = replay(RequestLoad(arrival, prompt, output, cached), recorder, fleet.settings, admission_us=admission)
        first, last = (np.where(np.isnan(t), np.inf, t)[counts] for t in (times.first_us, times.last_us))
        with np.errstate(invalid="ignore"):
            itl = (last - first) / np.maximum(output[counts] - 1, 1)
        # A request that is never served has no tokens with times between them.
        itl = np.where(np.isfinite(last), itl, np.inf)
        itl = np.where(output[counts] > 1, itl, np.nan)
        return _Served(first - arrival[counts], itl, last - arrival[counts], (tuple(recorder.batches), times.steps))

    def steps_of(self, found: WindowReplay) -> pl.DataFrame:
        """Return the steps of a replay, see `batches_of`."""
        growth = self.fleet.settings.tokens_per_step
        return pl.concat([batches_of(*steps, growth) for steps in found.steps])


class _Served(NamedTuple):
    """Counted requests of one server, in us, and its steps; itl is NaN where a request has one token."""

    ttft: Vector
    itl: Vector
    e2e: Vector
    steps: ServerSteps
