"""The algebra that models are evaluated in: an amount is a float, or a numpy array of one per row, and NaN is unknown.

Python's operators `+ - *` and comparisons are the same for both, and NaN does in them what an unknown should: a sum
with it is unknown, a comparison with it does not hold. The functions below are the rest. numpy is imported only where
an array is: a row needs none.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeAlias

from tracefit.errors import UsageError
from tracefit.evaluator import power as power_of_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

Amount: TypeAlias = Any
"""A float, or an array of floats, shape (rows,)."""

Truth: TypeAlias = Any
"""A bool, or an array of bools, shape (rows,)."""


_is_finite, _UNKNOWN = math.isfinite, math.nan


def number(name: str, value: float | None) -> float:
    """Return a value of a row as an amount; null and NaN are unknown.

    Raises:
        UsageError: It is not a number.
    """
    try:
        return math.nan if value is None or math.isnan(value) else float(value)
    except (TypeError, OverflowError):  # text, or an integer of hundreds of digits
        raise UsageError("is not a number", where=name) from None


def known(value: float) -> float | None:
    """Return the number of one row; null where it is unknown."""
    return None if math.isnan(value) else value


def is_known(amount: Amount) -> Truth:
    """Return whether it is known."""
    return amount == amount  # only NaN differs from itself


def filled(amount: Amount, otherwise: Amount) -> Amount:
    """Return the amount where it is known, else another one."""
    return where(is_known(amount), amount, otherwise)


def finite(amount: Amount) -> Amount:
    """Return the amount, unknown unless it is finite."""
    if isinstance(amount, float):
        return amount if _is_finite(amount) else _UNKNOWN
    import numpy as np

    is_finite = np.isfinite(amount)
    return amount if is_finite.all() else np.where(is_finite, amount, np.nan)


def quotient(left: Amount, right: Amount) -> Amount:
    """Divide; by zero it gives 0, since without tokens or requests a ratio means nothing."""
    if isinstance(right, float):
        return left / (right or math.inf)
    import numpy as np

    return left / np.where(right == 0, np.inf, right)


def power(base: Amount, exponent: Amount) -> Amount:
    """Raise to a power: unknown if not real, or if one of both is, even where 1 is the base or 0 the exponent."""
    if isinstance(base, float) and isinstance(exponent, float):
        return power_of_numbers(base, exponent) if base == base and exponent == exponent else math.nan
    import numpy as np

    # Adding 0 turns -0.0 into 0.0, whose negative power would be infinite with the other sign.
    value = np.float_power(np.add(base, 0.0), exponent)  # `power` takes a root of minus infinity for unknown
    return np.where(is_known(base) & is_known(exponent), value, math.nan)


def smaller(one: Amount, other: Amount) -> Amount:
    """Return the smaller of two, as `smallest` does, and quicker."""
    if isinstance(one, float) and isinstance(other, float):
        return one if one <= other else other if other < one else _UNKNOWN
    return smallest(one, other)


def larger(one: Amount, other: Amount) -> Amount:
    """Return the larger of two, as `largest` does, and quicker."""
    if isinstance(one, float) and isinstance(other, float):
        return one if one >= other else other if other > one else _UNKNOWN
    return largest(one, other)


def smallest(*amounts: Amount) -> Amount:
    """Return the smallest; unknown if one of them is."""
    if all(isinstance(one, float) for one in amounts):
        return math.nan if any(map(math.isnan, amounts)) else min(amounts)
    import numpy as np

    return reduce(np.minimum, amounts)


def largest(*amounts: Amount) -> Amount:
    """Return the largest; unknown if one of them is."""
    if all(isinstance(one, float) for one in amounts):
        return math.nan if any(map(math.isnan, amounts)) else max(amounts)
    import numpy as np

    return reduce(np.maximum, amounts)


def where(condition: Truth, amount: Amount, otherwise: Amount) -> Amount:
    """Return the amount where a condition holds, else another one."""
    if isinstance(condition, bool):
        return amount if condition else otherwise
    import numpy as np

    return np.where(condition, amount, otherwise)


def anywhere(condition: Truth) -> bool:
    """Return whether a condition holds for a row."""
    return condition if isinstance(condition, bool) else bool(condition.any())


def everywhere(condition: Truth) -> bool:
    """Return whether a condition holds for every row."""
    return condition if isinstance(condition, bool) else bool(condition.all())


def any_of(truths: Sequence[Truth]) -> Truth:
    """Return whether one of several holds; none of no conditions does."""
    return reduce(lambda one, other: one | other, truths, False)


def all_of(truths: Sequence[Truth]) -> Truth:
    """Return whether all of several hold."""
    return reduce(lambda one, other: one & other, truths, True)
