"""Errors of step times in each workload phase: whether a model that is right on the average is right in every load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.fit.frames import counted
from tracefit.fit.metrics import Metrics, measure
from tracefit.fit.parts import predict_parts, target_of
from tracefit.fit.phases import SERVER, Phase, phases_of_servers
from tracefit.fit.train import judged_rows

if TYPE_CHECKING:
    from tracefit.fit.train import Fitted


@dataclass(frozen=True, slots=True)
class StepPhase:
    """Errors on the held-out steps that began in one phase of one server, and those of the training median."""

    run_id: str
    server: str
    phase: Phase
    holdout: Metrics
    baseline: Metrics


def errors_by_phase(
    fitted: Fitted, requests: pl.DataFrame, judge: pl.Expr | None = None
) -> tuple[StepPhase, ...]:
    """Measure a model of step times on the held-out rows of each phase; nothing of servers without requests.

    Args:
        fitted: The model.
        requests: The `requests` table: a phase is a stretch in which they arrive at one rate.
        judge: Held-out rows to measure the error on, as for the fit.
    """
    phases = phases_of_servers(requests.select(*SERVER, at_ns=pl.coalesce("arrival_ns", "queued_ns")))
    median = float(np.median(target_of(counted(fitted.rows, "train"))))
    held = judged_rows(counted(fitted.rows, "holdout"), judge).drop_nulls("ts_ns").sort(*SERVER, "ts_ns")
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
                    measure(actual, predict_parts(fitted.parts, part)),
                    measure(actual, np.full(len(actual), median)),
                )
            )
    return tuple(found)
