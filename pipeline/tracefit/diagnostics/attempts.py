"""The parts of a report are made one by one: a part that cannot be made is a line of the report, and the others are
there.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

import msgspec
import polars as pl

from tracefit.errors import TracefitError, unexpected

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("tracefit")
_T = TypeVar("_T")


class Attempts(msgspec.Struct):
    """Makes parts of a report; `failed` has a sentence without its full stop for each that could not be made."""

    failed: list[str] = msgspec.field(default_factory=list)

    def make(self, what: str, make: Callable[[], _T], otherwise: _T) -> _T:
        """Return what `make` returns; if it raises an unexpected error, note it and return `otherwise`.

        Raises:
            TracefitError: `make` raises one, which is not a defect.
        """
        try:
            return make()
        except TracefitError:
            raise
        except (Exception, pl.exceptions.PanicException) as error:  # noqa: BLE001 - the report states it
            _log.debug("%s: not drawn", what, exc_info=True)
            self.failed.append(f"{what} cannot be drawn: {unexpected(error)}, a defect of tracefit")
            return otherwise
