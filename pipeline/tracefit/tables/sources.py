"""Sources of step times: each says whether its rows are single steps, and whether a record states them."""

from __future__ import annotations

from enum import StrEnum

import polars as pl


class CycleSource(StrEnum):
    """Values of `cycle_source` in `steps` and `timeline` and `source` in `beta_training`.

    `fpm` is `wall_time` of ForwardPassMetrics, from the output of the step before it to its own; `fpm_gpu` the same where it
    is GPU time alone, as SGLang measures it. `sglang` is from the results of the step before it to its own, by SGLang's spans.
    """

    ADJACENT = "adjacent"
    INTERVAL = "interval"
    REQUEST = "request"
    DURATION = "duration"
    FPM = "fpm"
    FPM_GPU = "fpm_gpu"
    SGLANG = "sglang"

    @property
    def is_one_step(self) -> bool:
        """Whether a row is the time of one step as it was sampled or recorded, not the mean over several: between anchors, or counted from requests."""
        return self not in {CycleSource.INTERVAL, CycleSource.REQUEST}

    @property
    def is_recorded(self) -> bool:
        """Whether a record states the time of the step; others are differences of the step clock, or scheduling times."""
        return self in {CycleSource.FPM, CycleSource.FPM_GPU, CycleSource.SGLANG}


MEANS = tuple(source.value for source in CycleSource if not source.is_one_step)
"""Sources whose rows are means over several steps."""


def is_one_step() -> pl.Expr:
    """Return which rows of `beta_training` are the time of one sampled or recorded step."""
    return pl.col("source").is_in([source.value for source in CycleSource if source.is_one_step])
