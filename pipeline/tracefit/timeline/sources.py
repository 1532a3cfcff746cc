"""Sources of step times: each says whether its rows are single steps."""

from __future__ import annotations

from enum import StrEnum

import polars as pl


class CycleSource(StrEnum):
    """Values of `cycle_source` in `timeline` and `source` in `beta_training`."""

    ADJACENT = "adjacent"
    INTERVAL = "interval"
    DURATION = "duration"

    @property
    def is_one_step(self) -> bool:
        """Whether a row is the time of one step as it was sampled, not the mean over several."""
        return self is not CycleSource.INTERVAL


def is_one_step() -> pl.Expr:
    """Return which rows of `beta_training` are the time of one sampled step."""
    return pl.col("source").is_in([source.value for source in CycleSource if source.is_one_step])
