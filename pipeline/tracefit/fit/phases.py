"""Workload phases of a run: periods of constant arrival rate, and the errors of a step-time model within each.

A model that is right on average over a run may be wrong in each of its loads. Phases are found by cutting the arrivals of a
server where their rate changes (`find_phases`).
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
"""A cut must raise the log-likelihood of n arrivals by this many log(n)."""


@dataclass(frozen=True, slots=True)
class ServerPhases:
    """The phases of one server, on its own clock."""

    first_ns: int
    """Its first arrival."""
    phases: tuple[Phase, ...]

    def numbers(self, at_ns: pl.Series) -> pl.Series:
        """Return the index of the phase at each time; null where the time is null, 0 before the first arrival."""
        seconds = ((at_ns - self.first_ns) / 1e9).fill_null(0.0).to_numpy()
        indices = pl.Series(phase_of(seconds, self.phases), dtype=pl.Int64)
        return pl.select(pl.when(at_ns.is_not_null()).then(indices)).to_series()


def phases_of_servers(arrivals: pl.DataFrame) -> dict[tuple[str, str], ServerPhases]:
    """Find the phases of every server that has arrivals.

    Args:
        arrivals: Columns run_id, server, at_ns.
    """
    found = {}
    for (run, server), requests in arrivals.drop_nulls("at_ns").group_by(SERVER):
        at = requests["at_ns"].sort()
        found[str(run), str(server)] = ServerPhases(int(at[0]), find_phases(((at - at[0]) / 1e9).to_numpy()))
    return found


def find_phases(arrivals_s: Vector) -> tuple[Phase, ...]:
    """Cut a run where its arrival rate changes.

    Binary segmentation of a Poisson process: n arrivals in T seconds have the log-likelihood n log(n / T) (up to a term that
    does not depend on the cut). The period is cut at the arrival that maximises the likelihood of both sides, if that gains
    3 log(n) and each side has 30 requests and 5 s. Both sides are then cut in the same way, at most four levels deep.

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
    """Return the indices, between those of the first and the last arrival, at which a new rate begins."""
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
    """Measure a step-time model on the held-out rows of each phase; servers without requests have no phases.

    Args:
        fitted: The model.
        requests: The `requests` table, whose arrivals define the phases.
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
        if (server_phases := phases.get((str(run), str(server)))) is None:
            continue
        with_phase = rows.with_columns(phase=server_phases.numbers(rows["ts_ns"]))
        for (number,), phase_rows in with_phase.group_by("phase", maintain_order=True):
            actual = target_of(phase_rows)
            found.append(
                StepPhase(
                    str(run),
                    str(server),
                    server_phases.phases[int(str(number))],
                    measure(actual, predict_regimes(fitted.regimes, phase_rows)),
                    measure(actual, np.full(len(actual), median)),
                )
            )
    return tuple(found)
