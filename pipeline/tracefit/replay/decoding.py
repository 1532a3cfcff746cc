"""Times of steps in which requests only decode, from a table: a replay asks for them a hundred times as often as they
are new.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from tracefit.replay.engine import MOST_AT_ONCE

if TYPE_CHECKING:
    from tracefit.replay.engine import StepBatch, StepTimeModel
    from tracefit.statistics import Vector

SPACING = 16.0
"""Tokens of context per request between two entries of a table."""

MOST_OFF = 5e-3
"""Largest relative error of a table half-way between two entries; a model that bends or jumps more is computed step by
step."""

_FEWEST_KEPT = 128


class TabledDecoding(msgspec.Struct, frozen=True):
    """A model of step times that is read from tables where requests only decode: one per number of requests, over their
    context.

    Between two entries times are interpolated. A time that is a line of the context is exact, as is that of the
    roofline on each side of its bend.

    Attributes:
        exact: The model.
        reads_waiting: Whether the model depends on the requests that wait: then there are tables for each number of
            these.
    """

    exact: StepTimeModel
    reads_waiting: bool = False
    _tables: dict[tuple[int, int], tuple[Vector, Vector] | None] = msgspec.field(default_factory=dict)

    def step(self, batch: StepBatch) -> float:
        """Return the time of one step in us."""
        return self.exact.step(batch)

    def decoding(self, batch: StepBatch, steps: int, growth: float) -> Vector:
        """Return the times of consecutive steps in which the same requests decode, in us; shape (steps,)."""
        per_entry = SPACING * batch.decode_reqs
        first, each = batch.context_tokens / per_entry, growth / per_entry
        table = self._table(batch, first + each * (steps - 1))
        if table is None:
            return self.exact.decoding(batch, steps, growth)
        at = first + each * (_STEP_NUMBERS[:steps] if steps <= len(_STEP_NUMBERS) else np.arange(steps))
        return np.asarray(np.interp(at, *table))

    def _table(self, batch: StepBatch, last: float) -> tuple[Vector, Vector] | None:
        """Return entries 0, 1, ... up to `last`, and the times at contexts of so many `SPACING` tokens per request;
        null where they may be wrong.
        """
        key = batch.decode_reqs, batch.waiting if self.reads_waiting else 0
        table = self._tables.get(key, _NO_DECODES)
        if table is not None and len(table[0]) <= last + 1:
            entries = max(_FEWEST_KEPT, 2 * int(last) + 2)
            half = SPACING * batch.decode_reqs / 2
            finer = self.exact.decoding(batch._replace(context_tokens=0.0), 2 * entries - 1, half)
            middle = (finer[:-1:2] + finer[2::2]) / 2
            is_exact = np.abs(middle - finer[1::2]) <= MOST_OFF * finer[1::2]
            table = (np.arange(entries, dtype=float), np.array(finer[::2])) if is_exact.all() else None
            self._tables[key] = table
        return table


_STEP_NUMBERS = np.arange(MOST_AT_ONCE, dtype=float)
_NO_DECODES = np.zeros(0), np.zeros(0)
