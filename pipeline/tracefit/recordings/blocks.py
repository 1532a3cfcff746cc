"""Shared code of the formats: the contents of a block, and the faults of records that cannot be read."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    import polars as pl

UNREADABLE_RECORD = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of records that cannot be read."""


MOST_S = 2**32
"""Latest time in seconds, on any clock: in 2106."""
MOST_STEP_S = 3600
"""Longest time of a step in seconds."""
_LATEST_VERSION = re.compile(r"<=? (?:4294967296|9000000000|3600)\.0")
"""The bound in the fault of a time in seconds: only a finer unit has larger numbers."""


def fault_of(error: Exception) -> str:
    """Return the fault of a record that cannot be read: types and positions, never values."""
    if not isinstance(error, msgspec.ValidationError):
        return "malformed"
    fault = str(error)
    return f"{fault}: is it in ms, us or ns?" if _LATEST_VERSION.search(fault) else fault


class RecordedBlock(NamedTuple):
    """The contents of a block.

    Attributes:
        steps: Rows as `RECORDED_STEPS` without `file`.
        spans: Requests as spans.
        keys: Returns the keys of the first request, if its format has optional ones.
    """

    steps: pl.DataFrame
    spans: pl.DataFrame | None = None
    keys: Callable[[], list[str]] = list
