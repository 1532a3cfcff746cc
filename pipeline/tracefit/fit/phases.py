"""Workload phases of a run: stretches of time in which requests arrive at one rate, and errors within each.

A model that is right on average over a run may be wrong in each of its loads.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.fit.linear import predict_regimes, target_of
from tracefit.fit.metrics import measure
from tracefit.fit.results import Phase, StepPhase
from tracefit.fit.splits import counted, evaluation_rows
from tracefit.tables.keys import SERVER

if TYPE_CHECKING:
    from tracefit.fit.arrays import Integers, Vector
    from tracefit.fit.fitted import LinearFit

LEAST_REQUESTS = 30
LEAST_SECONDS = 5.0
MOST_CUTS_DEEP = 4
GAIN_PER_LOG = 3.0
"""A change of rate must explain the arrivals better than none by 3 log(n) in log-likelihood."""


@dataclass(frozen=True, slots=True)
class ServerPhases:
    """The phases of one server, on its own clock."""

    first_ns: int
    """Its first arrival."""
    phases: tuple[Phase, ...]

    def numbers(self, at_ns: pl.Series) -> pl.Series:
        """Return the index of the phase at each time, null where it is null; before the first arrival is the first."""
        seconds = ((at_ns - self.first_ns) / 1e9).fill_null(0.0).to_numpy()
        told = pl.Series(phase_of(seconds, self.phases), dtype=pl.Int64)
        return pl.select(pl.when(at_ns.is_not_null()).then(told)).to_series()


def phases_of_servers(arrivals: pl.DataFrame) -> dict[tuple[str, str], ServerPhases]:
    """Find the phases of every server that has arrivals.

    Args:
        arrivals: Columns run_id, server, at_ns.
    """
    found = {}
    for (run, server), part in arrivals.drop_nulls("at_ns").group_by(SERVER):
        at = part["at_ns"].sort()
        found[str(run), str(server)] = ServerPhases(int(at[0]), find_phases(((at - at[0]) / 1e9).to_numpy()))
    return found


def find_phases(arrivals_s: Vector) -> tuple[Phase, ...]:
    """Cut a run where its arrival rate changes.

    Binary segmentation of a Poisson process: a stretch of n arrivals in T seconds has the log-likelihood n log(n / T);
    it is cut at the arrival where the two parts' likelihood is largest, if that gains 3 log(n) and either part has 30
    requests and 5 s, and so on in the parts, four cuts deep.

    Args:
        arrivals_s: Sorted arrival times in seconds, shape (n,), the first at 0.
    """
    if len(arrivals_s) == 0:
        return ()
    ends = [0, *_cuts(arrivals_s, 0, len(arrivals_s) - 1, MOST_CUTS_DEEP), len(arrivals_s) - 1]
    return tuple(_phase(arrivals_s, first, last, is_last=last == ends[-1]) for first, last in pairwise(ends))


def phase_of(arrivals_s: Vector, phases: tuple[Phase, ...]) -> Integers:
    """Return the index of the phase each arrival falls in; shape (n,)."""
    starts = np.array([p.from_s for p in phases])
    return np.asarray(np.clip(np.searchsorted(starts, arrivals_s, side="right") - 1, 0, None))


def _phase(arrivals_s: Vector, first: int, last: int, *, is_last: bool) -> Phase:
    begin, end = float(arrivals_s[first]), float(arrivals_s[last])
    count = last - first + is_last
    return Phase(begin, end, (last - first) / (end - begin) if end > begin else 0.0, count)


def _cuts(arrivals_s: Vector, first: int, last: int, deep: int) -> list[int]:
    """Return the arrivals, between the first and the last one, at which a new rate begins."""
    begin, end, n = arrivals_s[first], arrivals_s[last], last - first
    if deep == 0 or n < 2 * LEAST_REQUESTS:
        return []
    inner = np.arange(first + LEAST_REQUESTS, last - LEAST_REQUESTS + 1)
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


def errors_by_phase(
    fitted: LinearFit, requests: pl.DataFrame, eval_filter: pl.Expr | None = None
) -> tuple[StepPhase, ...]:
    """Measure a model of step times on the held-out rows of each phase; nothing of servers without requests.

    Args:
        fitted: The model.
        requests: The `requests` table: a phase is a stretch in which they arrive at one rate.
        eval_filter: Held-out rows to measure the error on, as for the fit.
    """
    phases = phases_of_servers(requests.select(*SERVER, at_ns=pl.coalesce("arrival_ns", "queued_ns")))
    median = float(np.median(target_of(counted(fitted.rows, "train"))))
    held = (
        evaluation_rows(counted(fitted.rows, "holdout"), eval_filter)
        .drop_nulls("ts_ns")
        .sort(*SERVER, "ts_ns")
    )
    found = []
    for (run, server), rows in held.group_by(SERVER, maintain_order=True):
        if (of := phases.get((str(run), str(server)))) is None:
            continue
        told = rows.with_columns(phase=of.numbers(rows["ts_ns"]))
        for (number,), part in told.group_by("phase", maintain_order=True):
            actual = target_of(part)
            found.append(
                StepPhase(
                    str(run),
                    str(server),
                    of.phases[int(str(number))],
                    measure(actual, predict_regimes(fitted.regimes, part)),
                    measure(actual, np.full(len(actual), median)),
                )
            )
    return tuple(found)
