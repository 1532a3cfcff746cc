"""Sources of step times: each says whether its rows are single steps, and whether a record states them."""

from __future__ import annotations

from enum import StrEnum

import polars as pl


class CycleSource(StrEnum):
    """Values of `cycle_source` in `steps` and `timeline` and `source` in `beta_training`.

    `fpm` is `wall_time` of ForwardPassMetrics, from the output of the step before it to its own; `fpm_gpu` is
    the same field with only GPU time, as SGLang measures it. `log` is the time from a line of vLLM's log to the
    next one, or the printed wait and the engine's usual work if these agree with the clock; `log_interval` is the mean
    of the steps between two changes of a coarse clock. `client` is the time between the tokens of two steps,
    as a load generator received them.
    """

    ADJACENT = "adjacent"
    INTERVAL = "interval"
    REQUEST = "request"
    DURATION = "duration"
    FPM = "fpm"
    FPM_GPU = "fpm_gpu"
    LOG = "log"
    LOG_INTERVAL = "log_interval"
    SGLANG = "sglang"
    CLIENT = "client"

    @property
    def is_one_step(self) -> bool:
        """Whether a row is the time of one step, not a mean over several (between anchors, or from requests)."""
        return self not in {CycleSource.INTERVAL, CycleSource.REQUEST, CycleSource.LOG_INTERVAL}

    @property
    def is_recorded(self) -> bool:
        """Whether a record states the time of the step; others are clock differences, or scheduling times."""
        return self in {CycleSource.FPM, CycleSource.FPM_GPU, CycleSource.SGLANG, CycleSource.CLIENT}

    @property
    def is_logged(self) -> bool:
        """Whether the steps come from vLLM's log."""
        return self in {CycleSource.LOG, CycleSource.LOG_INTERVAL}


RECORDS = {
    CycleSource.FPM.value: "ForwardPassMetrics",
    CycleSource.FPM_GPU.value: "ForwardPassMetrics",
    CycleSource.LOG.value: "iteration lines of vLLM's log",
    CycleSource.CLIENT.value: "token times of a load generator",
}
"""Name of the recorder of a step, by `cycle_source` in `steps`."""

MEANS = tuple(source.value for source in CycleSource if not source.is_one_step)
"""Sources whose rows are means over several steps."""

RECORDED = tuple(source.value for source in CycleSource if source.is_recorded)
"""Sources whose records state the time of their step."""


def is_one_step() -> pl.Expr:
    """Return which rows of `beta_training` are the time of one sampled or recorded step."""
    return pl.col("source").is_in([source.value for source in CycleSource if source.is_one_step])
