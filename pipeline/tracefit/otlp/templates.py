"""Texts of one layout to columns.

The events of one name are written by one line of code, so that their encodings differ in the values alone. The first
event is taken for a template: what lies between its values is compared with all the other events at once, and the values
are read from where they must be. An event that differs in anything else makes the next template; what no template fits
is left to be parsed by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.otlp.model import Part
from tracefit.otlp.texts import Texts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import msgspec
    from numpy.typing import NDArray

    from tracefit.otlp.octets import Mask, Positions

MAX_TEMPLATES = 8
"""Layouts tried on the events of one name; optional attributes make two or three."""

_BLOCK_ROWS = 8192


@dataclass(frozen=True, slots=True)
class Found:
    """The values of one slot in many texts, whose arrays have the shape (n,).

    Attributes:
        stops: Where each value ends, and what follows it begins.
        good: Which are as they should be; the rest of `Found` is of no use for the others.
        content: The number or boolean itself, or the position of a text that is cut out later.
        sizes: Bytes of that text, where there is one.
    """

    stops: Positions
    good: Mask
    content: NDArray[np.int64] | NDArray[np.float64] | Mask
    sizes: Positions


@dataclass(frozen=True, slots=True)
class Slot:
    """A value and how to read it.

    Attributes:
        key: The attribute's key; None for what no column is made of.
        literal: What lies between the value before and this one.
        find: Reads the values that begin at some positions.
        column: Makes a column of contents and sizes, or None if it cannot.
    """

    key: str | None
    literal: bytes
    find: Callable[[Texts, Positions], Found]
    column: Callable[[Texts, NDArray[np.int64], Positions], pl.Series | None]


@dataclass(frozen=True, slots=True)
class Template:
    """A text as its values and what follows the last."""

    slots: tuple[Slot, ...]
    tail: bytes


def parts_by_template(
    texts: Sequence[bytes | msgspec.Raw], template_of: Callable[[bytes], Template | None]
) -> list[Part]:
    """Sort texts by template and read each sort as columns.

    Args:
        texts: One per event.
        template_of: Takes one text apart, or returns None if it is unusual.

    Returns:
        Parts that have every text once, the last perhaps without columns.
    """
    together = Texts.of(texts)
    rest = np.arange(len(texts))
    left_over: list[int] = []
    parts = []
    for _ in range(MAX_TEMPLATES):
        if not len(rest):
            break
        template = template_of(bytes(texts[rest[0]]))
        part = _match(template, together, rest) if template else None
        if part is None or not len(part.rows):
            left_over.append(int(rest[0]))
            rest = rest[1:]
        else:
            parts.append(part)
            rest = np.setdiff1d(rest, part.rows, assume_unique=True)
    rows = np.sort(np.concatenate([np.array(left_over, np.int64), rest]))
    return [*parts, Part(rows, None)] if len(rows) else parts


def _match(template: Template, texts: Texts, rows: Positions) -> Part | None:
    """Read the values of those rows that the template fits; None if a column of them cannot be made."""
    blocks = [
        _match_block(template, texts, rows[start : start + _BLOCK_ROWS])
        for start in range(0, len(rows), _BLOCK_ROWS)
    ]
    fits = np.concatenate([block[0] for block in blocks])
    columns: dict[str, pl.Series] = {}
    for index, slot in enumerate(template.slots):
        if slot.key is None:
            continue
        found = [block[1][index] for block in blocks]
        content = np.concatenate([values.content for values in found])[fits]
        sizes = np.concatenate([values.sizes for values in found])[fits]
        column = slot.column(texts, content, sizes)
        if column is None:
            return None
        columns[slot.key] = column.alias(slot.key)  # of a key that is there twice, the last counts
    return Part(rows[fits], columns)


def _match_block(template: Template, texts: Texts, rows: Positions) -> tuple[Mask, list[Found]]:
    """Walk through the template in some rows at once, few enough for their texts to stay in the cache."""
    position, fits = texts.begins[rows], np.ones(len(rows), np.bool_)
    found = []
    for slot in template.slots:
        fits &= texts.octets.equal(position, slot.literal)
        values = slot.find(texts, np.where(fits, position + len(slot.literal), texts.nowhere))
        fits &= values.good
        position = np.where(fits, values.stops, texts.nowhere)
        found.append(values)
    fits &= texts.octets.equal(position, template.tail) & (position + len(template.tail) == texts.ends[rows])
    return fits, found


def plain_column(_: Texts, content: NDArray[np.int64], __: Positions) -> pl.Series | None:
    """Make a column of numbers or booleans that have been read."""
    return pl.Series(content)


def text_column(texts: Texts, starts: Positions, sizes: Positions) -> pl.Series | None:
    """Make a column of stretches of the texts, or None if they are not UTF-8."""
    return texts.cut(starts, sizes)
