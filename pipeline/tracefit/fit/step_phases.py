"""Errors of step times in each workload phase: whether a model that is right on the average is right in every load."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.fit.frames import counted
from tracefit.fit.linear import predict_regimes, target_of
from tracefit.fit.metrics import measure
from tracefit.fit.phases import SERVER, phases_of_servers
from tracefit.fit.results import StepPhase
from tracefit.fit.train import evaluation_rows

if TYPE_CHECKING:
    from tracefit.fit.results import LinearFit


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
