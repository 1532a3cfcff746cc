"""How models are fitted: one target, and all targets of a scope."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
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
        truth: What the first regime's condition should have told, where there are regimes.
        judge: Held-out rows to measure the error on, when there are enough of them; all rows if not given.
        reference: Fit the gradient-boosted reference.
        positive: Costs can only add: no coefficient and no intercept below zero.
    """

    drop_outliers: bool = True
    groups: tuple[tuple[str, pl.Expr], ...] = ()
    judge: pl.Expr | None = None
    truth: pl.Expr | None = None
    reference: bool = True
    positive: bool = False


@dataclass(frozen=True, slots=True)
class ScopeOptions:
    """How a scope's models are fitted.

    Attributes:
        beta_target: Which step time to fit.
        positive: Allow no negative coefficient and no negative intercept in any model.
        reference: Fit the gradient-boosted reference beside every model.
    """

    beta_target: BetaTarget = "auto"
    positive: bool = False
    reference: bool = True
