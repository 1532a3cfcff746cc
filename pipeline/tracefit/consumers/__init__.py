"""Exports of coefficients in the forms that other programs load: one module per consumer, fitted on its own terms."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from tracefit.consumers.base import REGISTRY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tracefit.consumers.base import Consumer


def known() -> Mapping[str, Consumer]:
    """Return all consumers that the modules of this room register, by name and in name order."""
    for module in iter_modules(__path__, prefix=f"{__name__}."):
        import_module(module.name)
    return {name: REGISTRY[name] for name in sorted(REGISTRY)}
