"""Inputs of a fit: the tables of one scope, how to fit a target, and which coefficients cannot be negative."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tracefit.fit.linear import ANY_SIGN, NON_NEGATIVE, Signs

if TYPE_CHECKING:
    from collections.abc import Mapping

    import polars as pl


BetaTarget = Literal["auto", "clock", "duration"]

COVERED_SHARE = 0.8
"""Durations that cover this share of busy time are the step times themselves."""


@dataclass(frozen=True, slots=True)
class FitOptions:
    """How a target is fitted.

    Attributes:
        drop_outliers: Leave outliers out of the training part. Not for a target whose tail is its signal.
        groups: Name to condition: hold-out errors are also given for these rows.
        label: What the first regime's condition should have told, where there are regimes.
        eval_filter: Held-out rows to measure the error on, when there are enough of them; all rows if not given.
        reference: Fit the gradient-boosted reference.
        signs: Which coefficients cannot be negative.
    """

    drop_outliers: bool = True
    groups: tuple[tuple[str, pl.Expr], ...] = ()
    eval_filter: pl.Expr | None = None
    label: pl.Expr | None = None
    reference: bool = True
    signs: Signs = ANY_SIGN


@dataclass(frozen=True, slots=True)
class ScopeOptions:
    """How a scope's models are fitted.

    Attributes:
        beta_target: Which step time to fit.
        positive: Allow no negative coefficient and no negative intercept in any model.
        any_sign: Allow any sign, whatever physics says of a feature.
        reference: Fit the gradient-boosted reference beside every model.
    """

    beta_target: BetaTarget = "auto"
    positive: bool = False
    any_sign: bool = False
    reference: bool = True

    def signs(self, *, intercept: bool = False) -> Signs:
        """Return the signs in force where features declare theirs; the constant's where it cannot be negative."""
        if self.positive:
            return NON_NEGATIVE
        return ANY_SIGN if self.any_sign else Signs("declared", intercept=intercept)


@dataclass(frozen=True, slots=True)
class ScopeTables:
    """The tables of the runs of one scope."""

    runs: pl.DataFrame
    timeline: pl.DataFrame
    sampled_steps: int
    requests: pl.DataFrame
    queue: pl.DataFrame | None
    """What each request found when it was queued; null where journeys are not complete."""
    counters: pl.DataFrame
    """run_id, server, epoch, first_step, last_step."""
    lags: Mapping[tuple[str, str], int]
    """(run_id, server) to steps that scheduling runs ahead of execution."""
    requeue_waits: pl.DataFrame
    """`timeline.requeue_waits`: which steps a preempted request waited through."""
    clock_checks: pl.DataFrame
    """run_id, server, events, disagreeing: engine core events held against the starts of their steps."""
