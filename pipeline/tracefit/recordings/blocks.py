"""Shared code of the formats: the contents of a block, and the rejects of records that cannot be read."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tracefit.inputs.rejects import Reject, excerpt
from tracefit.otlp.model import TooManyRejectsError

if TYPE_CHECKING:
    from collections.abc import Callable

    import polars as pl

    from tracefit.inputs.blocks import Block

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of records that cannot be read."""


MOST_S = 2**32
"""Latest time in seconds, on any clock: in 2106."""
MOST_STEP_S = 3600
"""Longest time of a step in seconds."""
_LATEST = re.compile(r"<=? (?:4294967296|9000000000|3600)\.0")
"""The bound in the fault of a time in seconds: only a finer unit has larger numbers."""


def fault_of(error: Exception) -> str:
    """Return the fault of a record that cannot be read: types and positions, never values."""
    if not isinstance(error, msgspec.ValidationError):
        return "malformed"
    fault = str(error)
    return f"{fault}: is it in ms, us or ns?" if _LATEST.search(fault) else fault


class RecordedBlock(NamedTuple):
    """The contents of a block.

    Attributes:
        steps: Rows as `RECORDED_STEPS` without `file`.
        rejects: Bytes that cannot be read.
        spans: Requests as spans.
        keys: Returns the keys of the first request, if its format has optional ones.
    """

    steps: pl.DataFrame
    rejects: list[Reject]
    spans: pl.DataFrame | None = None
    keys: Callable[[], list[str]] = list


class Rejects:
    """Collects the rejects of one block.

    Args:
        block: The block.
        show_values: Whether excerpts may show values of records.
        max_rejects: Rejects after which the rest of the block is not decoded.
    """

    def __init__(self, block: Block, *, show_values: bool, max_rejects: int) -> None:
        self.rejects: list[Reject] = []
        self.block = block
        self._show_values = show_values
        self._max_rejects = max_rejects

    def add(self, offset: int, record: bytes, reason: str) -> None:
        """Add a record at an offset of the block.

        Raises:
            TooManyRejectsError: It is the last reject that is listed.
        """
        block = self.block
        shown = excerpt(record, block.encoding, show_values=self._show_values)
        self.rejects.append(Reject(block.source_file, block.offset + offset, len(record), reason, shown))
        if len(self.rejects) >= self._max_rejects:
            raise TooManyRejectsError(reason)
