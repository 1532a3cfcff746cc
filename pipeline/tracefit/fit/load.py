"""The load of a run: its phases, in which requests arrive at one rate, and whether its server kept up.

A model that is right on average over a run may be wrong in each of its loads: `find_phases` cuts the arrivals of a
server where their rate changes. In an overloaded run the queue grows for as long as the load test lasts, so that waits
depend on the length of the test and not on the server: such runs are left out of the fit unless a user includes them. A
run is overloaded when many requests fail, when its queue does not empty for a large share of its time, or when it
preempts many requests.
"""

from __future__ import annotations

from dataclasses import fields as fields_of
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.fit.results import Overload, QueuePeriod
from tracefit.models.validation import Phase
from tracefit.tables.schema import SERVER

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tracefit.statistics import Vector


# -- phases ----------------------------------------------------------------------------------------------

LEAST_LOAD_REQUESTS = 30
LEAST_SECONDS = 5.0
MOST_CUTS_DEEP = 4
GAIN_PER_LOG = 3.0
"""A cut must raise the log-likelihood of n arrivals by this many log(n)."""


def with_phases(rows: pl.DataFrame, at: str, arrivals: pl.DataFrame) -> pl.DataFrame:
    """Add `phase`, a struct of the fields of `Phase`: the phase of its server that began last before the time `at` of a
    row.

    It is null where the time is null, and for a server without arrivals (run_id, server, at_ns). Rows are then in the
    order of time, server by server.
    """
    # A time before the first arrival counts to the first phase.
    began = pl.when(pl.col("from_s") > 0).then("from_ns").otherwise(pl.lit(np.iinfo(np.int64).min))
    fields = [field.name for field in fields_of(Phase)]
    phases = find_phases(arrivals).select(*SERVER, phase=pl.struct(fields), from_ns=began).sort("from_ns")
    joined = rows.sort(at).join_asof(
        phases, left_on=at, right_on="from_ns", by=SERVER, coalesce=False, check_sortedness=False
    )
    phase = pl.when(pl.col("from_ns").is_not_null()).then("phase")
    return joined.with_columns(phase).drop("from_ns").sort(*SERVER, at, maintain_order=True)


def find_phases(arrivals: pl.DataFrame) -> pl.DataFrame:
    """Cut the requests of every server where their arrival rate changes.

    Binary segmentation of a Poisson process: n arrivals in T seconds have the log-likelihood n log(n / T) (up to a term
    that does not depend on the cut). The period is cut at the arrival that maximises the likelihood of both sides, if
    that gains 3 log(n) and each side has 30 requests and 5 s. Both sides are then cut in the same way, at most four
    levels deep.

    `arrivals` has run_id, server and at_ns, which may be null.

    Returns:
        One row per phase, in order: the fields of `Phase`, and from_ns.
    """
    phases = []
    ordered = arrivals.drop_nulls("at_ns").sort(*SERVER, "at_ns")
    for (run, server), requests in ordered.group_by(SERVER, maintain_order=True):
        at_ns = requests["at_ns"].to_numpy()
        at_s = (at_ns - at_ns[0]) / 1e9
        ends = [0, *_cuts(at_s, 0, len(at_s) - 1, MOST_CUTS_DEEP), len(at_s) - 1]
        for first, last in pairwise(ends):
            begin, end = float(at_s[first]), float(at_s[last])
            rate = (last - first) / (end - begin) if end > begin else 0.0
            # The arrival at a cut belongs to the phase that begins with it; the very last one begins none.
            count = last - first + (last == ends[-1])
            phases.append((run, server, begin, end, rate, count, at_ns[first]))
    schema = [*SERVER, "from_s", "to_s", "arrivals_per_s", "requests", "from_ns"]
    # Declared for servers without arrivals: there is no row to take the types from.
    kinds = {name: arrivals.schema[name] for name in SERVER} | {"from_s": pl.Float64(), "from_ns": pl.Int64()}
    return pl.DataFrame(phases, schema=schema, schema_overrides=kinds, orient="row")


def _cuts(arrivals_s: Vector, first: int, last: int, deep: int) -> list[int]:
    """Return the indices, between those of the first and the last arrival, at which a new rate begins."""
    begin, end, n = arrivals_s[first], arrivals_s[last], last - first
    if deep == 0 or n < 2 * LEAST_LOAD_REQUESTS:
        return []
    inner = np.arange(first + LEAST_LOAD_REQUESTS, last - LEAST_LOAD_REQUESTS + 1)
    at = arrivals_s[inner]
    inner = inner[(at - begin >= LEAST_SECONDS) & (end - at >= LEAST_SECONDS)]
    if len(inner) == 0:
        return []
    before, at = (inner - first).astype(float), arrivals_s[inner]
    split = _likelihood(before, at - begin) + _likelihood(n - before, end - at)
    best = int(np.argmax(split))
    if split[best] - n * np.log(n / (end - begin)) < GAIN_PER_LOG * np.log(n):
        return []
    cut = int(inner[best])
    return [*_cuts(arrivals_s, first, cut, deep - 1), cut, *_cuts(arrivals_s, cut, last, deep - 1)]


def _likelihood(count: Vector, seconds: Vector) -> Vector:
    return np.asarray(count * np.log(count / seconds))


# -- overload --------------------------------------------------------------------------------------------

MAX_FAILED_SHARE = 0.1
"""A run is overloaded when a larger share of its requests ended in an error or was given up by the client."""

MAX_QUEUED_SHARE = 0.25
MIN_PEAK = 10
"""A run is overloaded when its queue grew to `MIN_PEAK` requests and did not empty for a larger share of the run's
time."""

MAX_PREEMPTIONS_PER_REQUEST = 0.1
"""A run is overloaded when it preempts more often: the engine repeats work instead of doing new work."""

_FAILED_ENDS = ("aborted", "error")

LOAD_REQUEST_COLUMNS = ("server", "finish_status", "num_preemptions", "queued_ns", "first_scheduled_ns")
LOAD_STEP_COLUMNS = ("server", "ts_start_ns", "waiting_depth", "num_preempted")
"""Columns that the rules need."""


def overload_of(run_id: str, requests: pl.DataFrame, steps: pl.DataFrame) -> Overload | None:
    """Return why a run was overloaded; null if it was not.

    The depth of the queue comes from the journeys, or from the sampled steps of a run without journeys. The tables have
    the columns `LOAD_REQUEST_COLUMNS` and `LOAD_STEP_COLUMNS` at least, of this run only.
    """
    queued = tuple(_growing_queues(requests, steps))
    reasons = tuple(_broken_rules(requests, steps, queued))
    return Overload(run_id, reasons, queued=queued) if reasons else None


def runs_to_fit(
    run_ids: Sequence[str], overloads: Sequence[Overload], *, include: bool
) -> tuple[list[str], tuple[Overload, ...]]:
    """Return the runs of a deployment to fit, and the overloaded ones with `trained_on` set.

    Overloaded runs are left out, unless `include` is set or there is no other run.
    """
    overloaded = {one.run_id for one in overloads}
    sound = [run_id for run_id in run_ids if run_id not in overloaded]
    if sound and not include:
        return sound, tuple(overloads)
    return list(run_ids), tuple(replace(one, trained_on=True) for one in overloads)


def _broken_rules(requests: pl.DataFrame, steps: pl.DataFrame, queued: tuple[QueuePeriod, ...]) -> Iterator[str]:
    ended = requests["finish_status"].drop_nulls()
    share = int(ended.is_in(_FAILED_ENDS).sum()) / ended.len() if ended.len() else 0.0
    if share > MAX_FAILED_SHARE:
        yield f"{100 * share:.1f} % of requests failed or were given up"
    # Journeys and steps may each be sampled: either count is a lower bound.
    count = max(int(requests["num_preemptions"].sum() or 0), int(steps["num_preempted"].sum() or 0))
    if requests.height and count / requests.height > MAX_PREEMPTIONS_PER_REQUEST:
        yield f"{count} preemptions of {requests.height} requests"
    if queued:
        longest = max(queued, key=lambda period: period.share)
        yield f"a queue of up to {longest.peak} requests did not empty for {100 * longest.share:.0f} % of the run"


def _growing_queues(requests: pl.DataFrame, steps: pl.DataFrame) -> Iterator[QueuePeriod]:
    depth_of, rows = (_depth_by_journeys, requests) if requests.height else (_depth_by_steps, steps)
    # As arrays, one server after the other: a recording has millions of requests.
    for server in rows["server"].unique().sort():
        depth = depth_of(rows.filter(pl.col("server") == server))
        at_ns, waiting = depth["ts_ns"].to_numpy(), depth["waiting"].to_numpy()
        # Where all times are equal no time has passed: there is no share of it.
        if not at_ns.size or at_ns[0] == at_ns[-1]:
            continue
        # A period begins with the first request that waits and ends when none does.
        begins = np.union1d(0, np.flatnonzero(waiting == 0))
        peaks = np.maximum.reduceat(waiting, begins)
        from_ns = at_ns[begins + (waiting[begins] == 0) * (peaks > 0)]
        to_ns = np.append(at_ns[begins[1:]], at_ns[-1])
        shares = (to_ns - from_ns) / (at_ns[-1] - at_ns[0])
        for n in np.flatnonzero((peaks >= MIN_PEAK) & (shares > MAX_QUEUED_SHARE)):
            yield QueuePeriod(server, int(from_ns[n]), int(to_ns[n]), int(peaks[n]), float(shares[n]))


def _depth_by_journeys(requests: pl.DataFrame) -> pl.DataFrame:
    waits = requests.select("queued_ns", "first_scheduled_ns").drop_nulls()
    events = pl.concat(
        waits.select(ts_ns=name, change=pl.lit(change, pl.Int8))
        for name, change in (("queued_ns", 1), ("first_scheduled_ns", -1))
        # An arrival before a departure with the same stamp: otherwise the depth would drop below zero for a moment.
    ).sort("ts_ns", "change", descending=[False, True])
    return events.select("ts_ns", waiting=pl.col("change").cast(pl.Int64).cum_sum())


def _depth_by_steps(steps: pl.DataFrame) -> pl.DataFrame:
    rows = steps.drop_nulls(["ts_start_ns", "waiting_depth"])
    return rows.select(ts_ns="ts_start_ns", waiting="waiting_depth").sort("ts_ns")
