"""Inputs of a fit: the tables of one scope (`ScopeTables`) and the options.

`ScopeOptions` are what a user chooses for all models of a scope; `FitOptions` are what follows from them for one target.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tracefit.fit.linear import ANY_SIGN, NON_NEGATIVE, Signs
from tracefit.server.tracing import without_attribute

if TYPE_CHECKING:
    from collections.abc import Mapping

    import polars as pl


BetaTarget = Literal["auto", "clock", "duration"]

COVERED_SHARE = 0.8
"""Where `step.duration_us` covers at least this share of busy time, durations are the step times."""


@dataclass(frozen=True, slots=True)
class FitOptions:
    """Options for fitting one target.

    Attributes:
        drop_outliers: Leave outliers out of the training rows. Off for a target whose tail is the signal.
        groups: Name to condition: hold-out errors are also given for these rows.
        label: True value of the first regime's condition, where there are regimes.
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
    """Options for fitting the models of a scope.

    Attributes:
        beta_target: The step time to fit.
        positive: Allow no negative coefficient and no negative intercept in any model.
        any_sign: Allow any sign, also where a feature declares one.
        reference: Fit the gradient-boosted reference beside every model.
    """

    beta_target: BetaTarget = "auto"
    positive: bool = False
    any_sign: bool = False
    reference: bool = True

    def signs(self, *, intercept: bool = False) -> Signs:
        """Return the signs in force; `intercept` is for a target whose intercept cannot be negative."""
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
    """State of the engine when each request was queued; null where journeys are not complete."""
    counters: pl.DataFrame
    """run_id, server, epoch, first_step, last_step."""
    lags: Mapping[tuple[str, str], int]
    """(run_id, server) to steps that scheduling runs ahead of execution."""
    requeue_waits: pl.DataFrame
    """`timeline.requeue_waits`: the steps that a preempted request waited through."""
    clock_checks: pl.DataFrame
    """run_id, server, events, disagreeing: engine core events compared with the starts of their steps."""

    def missing_attributes(self, events: str) -> tuple[str, ...]:
        """Return a sentence for each event, by a pattern of names, that lacks attributes: which, and what gives them."""
        found: dict[str, set[str]] = {}
        for text in self.runs["missing_attributes"].drop_nulls().unique():
            for event, attributes in json.loads(text).items():
                if re.fullmatch(events, event):
                    found.setdefault(event, set()).update(attributes)
        return tuple(without_attribute(event, sorted(found[event])) for event in sorted(found))
