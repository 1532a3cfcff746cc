"""Which coefficients of a fit cannot be negative."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracefit.fit.linear import FeatureColumn
    from tracefit.fit.solvers import Positive


@dataclass(frozen=True, slots=True)
class Signs:
    """Which signs are in force in a fit.

    Attributes:
        slopes: Of no coefficient, of those whose feature declares one, or of all.
        intercept: The intercept cannot be negative.
    """

    slopes: Literal["any", "declared", "non_negative"] = "declared"
    intercept: bool = False

    def of(self, features: Sequence[FeatureColumn]) -> Positive:
        """Return what cannot be negative in a model of these features."""
        if self.slopes == "declared":
            return (*(f.sign == "non_negative" for f in features), self.intercept)
        return (*(self.slopes == "non_negative" for _ in features), self.intercept)


ANY_SIGN = Signs("any")
NON_NEGATIVE = Signs("non_negative", intercept=True)
