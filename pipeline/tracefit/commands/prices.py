"""Prices of GPUs: one for all, or one for each by its name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tracefit.errors import UsageError
from tracefit.options import PriceOption, named
from tracefit.server.hardware import find_gpu

if TYPE_CHECKING:
    from collections.abc import Sequence

Prices = float | Mapping[str, float] | None
"""A price per GPU and hour: of every GPU, or by its name."""


def parse_prices(texts: Sequence[str]) -> Prices:
    """Read prices from the command line: a number for every GPU, or `H200=3.5` for one.

    Raises:
        UsageError: A text of another form, or a number beside names.
    """
    if not texts:
        return None
    pairs = [text.rpartition("=") for text in texts]
    try:
        values = {name.strip(): float(value) for name, _, value in pairs}
    except ValueError:
        values = {}
    if len(values) != len(texts) or ("" in values and len(values) > 1):
        raise UsageError(
            f"{named(PriceOption)} {' '.join(texts)}: not one price, and not prices by GPU",
            hint="a number such as 2.5, or a number for each GPU, such as H100=2.5 and H200=3.5",
        )
    return values.get("", values)


def price_of(prices: Prices, gpu: str | None) -> float | None:
    """Return the price of a GPU; null where none is stated."""
    return prices.get(gpu or "") if isinstance(prices, Mapping) else prices


def checked_prices(prices: Prices) -> Prices:
    """Return prices by the names of the catalogue.

    Raises:
        UsageError: A price is below 0 or not finite, or a GPU is not known.
    """
    if prices is None:
        return None
    for value in prices.values() if isinstance(prices, Mapping) else (prices,):
        if not 0 <= value < math.inf:
            raise UsageError(f"{named(PriceOption)} {value:g}: is out of range", hint="at least 0")
    return {find_gpu(name).name: value for name, value in prices.items()} if isinstance(prices, Mapping) else prices
