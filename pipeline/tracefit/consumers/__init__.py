"""Coefficients in the forms other programs load: one module per consumer, fitted on the consumer's own terms."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from tracefit.consumers.base import REGISTRY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tracefit.consumers.base import Consumer


def known() -> Mapping[str, Consumer]:
    """Return the consumers by name, in name order: those that any module of this room registers."""
    for module in iter_modules(__path__, prefix=f"{__name__}."):
        import_module(module.name)
    return {name: REGISTRY[name] for name in sorted(REGISTRY)}
