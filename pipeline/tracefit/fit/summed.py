"""Step times of the hold-out summed: what a simulation of the whole run would be off by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tracefit.fit.frames import counted
from tracefit.fit.parts import predict_parts
from tracefit.fit.select import time_blocks

if TYPE_CHECKING:
    from tracefit.fit.estimators import NDArrayInt
    from tracefit.fit.metrics import Vector
    from tracefit.fit.train import Fitted

BLOCK_ROWS = 100
FEWEST_BLOCKS, MOST_BLOCKS = 10, 50
"""A machine's speed drifts for seconds: blocks of a few steps would call what is one draw of it many."""

RESAMPLES = 2_000


@dataclass(frozen=True, slots=True)
class SummedTime:
    """Sum of step times over the held-out rows.

    Attributes:
        predicted_us: Sum predicted.
        actual_us: Sum measured.
        two_sd_pct: Two standard deviations of the bias in percent, by block bootstrap.
        blocks: Blocks of time it was resampled by.
    """

    predicted_us: float
    actual_us: float
    two_sd_pct: float
    blocks: int

    @property
    def bias_pct(self) -> float:
        """Predicted less measured, in percent of measured."""
        return 100 * (self.predicted_us / self.actual_us - 1)


def summed_time(predicted_us: Vector, actual_us: Vector, blocks: NDArrayInt) -> SummedTime | None:
    """Sum step times and bootstrap the bias of the sum by blocks of time; null of no time.

    Steps that follow each other share the machine's mood, so that whole blocks are drawn, with replacement, 2,000
    times with a fixed seed (Kuensch 1989, without overlap).

    Args:
        predicted_us: Shape (n,).
        actual_us: Shape (n,).
        blocks: Shape (n,), the block of each row.
    """
    if not float(actual_us.sum()) > 0:
        return None
    _, index = np.unique(blocks, return_inverse=True)
    sums = np.stack([np.bincount(index, weights=w) for w in (predicted_us, actual_us)])
    count = sums.shape[1]
    drawn = np.random.default_rng(0).integers(0, count, size=(RESAMPLES, count))
    predicted, actual = sums[0][drawn].sum(axis=1), sums[1][drawn].sum(axis=1)
    spread = float(np.std(100 * predicted[actual > 0] / actual[actual > 0], ddof=1))
    return SummedTime(float(predicted_us.sum()), float(actual_us.sum()), 2 * spread, count)


def summed_holdout(beta: Fitted) -> SummedTime | None:
    """Sum the step times of beta's held-out rows, an interval as all of its steps.

    Blocks are contiguous in the time of a server, of 100 rows, no fewer than 10 and no more than 50 of them.
    """
    held = counted(beta.rows, "holdout")
    if not held.height:
        return None
    steps = held["interval_steps"].to_numpy().astype(float)
    server = held.select(s=(held.select("run_id", "server").to_struct().rank("dense") - 1))["s"].to_numpy()
    count = min(max(held.height // (int(server.max()) + 1) // BLOCK_ROWS, FEWEST_BLOCKS), MOST_BLOCKS)
    blocks = time_blocks(server, held["ts_ns"].to_numpy(), count) + server * count
    return summed_time(predict_parts(beta.parts, held) * steps, held["y"].to_numpy() * steps, blocks)
