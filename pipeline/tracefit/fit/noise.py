"""How much steps of equal batches differ although they ran near in time: no model of batches has a smaller error.

Processors change their clock and neighbours take memory bandwidth within seconds, so that two steps of the same batch
take different times. A recording on such a machine has a floor under every error, which more recording does not lower.
"""

from __future__ import annotations

import math

import numpy as np
import polars as pl

from tracefit.models.validation import MachineNoise
from tracefit.tables.schema import SERVER

NEAR_S = (1.0, 20.0)
"""Seconds between two steps that are compared. Neighbouring steps share a disturbance and differ by half as much;
further apart the speed of the machine changes, which is measured by itself (`fit.speed`)."""

ABOUT = 1.15
"""An error of up to this many times the machine's noise is the machine's: both are measured on some hundreds of
steps."""

LEAST_PAIRS = 100
"""Fewest pairs whose differences are a measure."""

_SAME_SHARE = 0.1
"""Amounts of tokens within this share are equal."""

_AMOUNTS = ("prefill_tokens", "context_tokens", "prefill_context_tokens")
_REQUEST_COUNTS = ("num_decode_reqs", "num_prefill_reqs")


def machine_noise(rows: pl.DataFrame) -> MachineNoise | None:
    """Return how much steps of equal batches differ, as errors of a model that knows the mean of each batch; null with
    few pairs.

    A pair is two steps, or intervals of as many steps, of one server with equal requests and about equal tokens. Its
    two times differ by the square root of two times what each is off their mean, if both are off by chance.

    Args:
        rows: A frame of step times: SERVER, `ts_ns`, `y` in us, `interval_steps`, `excluded_reason`, and what is known
            of the batches.
    """
    if not set(_REQUEST_COUNTS) <= set(rows.columns):
        return None
    used = rows.filter(pl.col("excluded_reason").is_null() & (pl.col("y") > 0)).drop_nulls(["ts_ns", *_REQUEST_COUNTS])
    amounts = [name for name in _AMOUNTS if name in used.columns and not used[name].null_count()]
    equal = {
        # Intervals of about as many steps: their means scatter by about as much.
        "steps_class": pl.col("interval_steps").log(2).round(),
        **{
            f"{name}_class": (pl.col(name).clip(lower_bound=1).log() / math.log1p(_SAME_SHARE)).floor()
            for name in amounts
        },
    }
    nearest_ns, furthest_ns = (int(1e9 * seconds) for seconds in NEAR_S)
    steps = used.select(*SERVER, *_REQUEST_COUNTS, "ts_ns", log=pl.col("y").log(), **equal).sort("ts_ns")
    pairs = steps.with_columns(from_ns=pl.col("ts_ns") + nearest_ns).join_asof(
        steps,
        left_on="from_ns",
        right_on="ts_ns",
        by=[*SERVER, *_REQUEST_COUNTS, *equal],
        strategy="forward",
        tolerance=furthest_ns - nearest_ns,
        check_sortedness=False,
    )
    apart = (pairs["log_right"] - pairs["log"]).abs().drop_nulls().to_numpy()
    if apart.size < LEAST_PAIRS:
        return None
    # Errors are shares of the measured time, and what disturbs a step makes it longer.
    off = -100 * np.expm1(-apart / math.sqrt(2))
    middle, high = np.quantile(off, (0.5, 0.9))
    return MachineNoise(NEAR_S, int(apart.size), float(off.mean()), float(middle), float(high))
