"""What a report is made of, whatever it is rendered as: parts of text, tables and figures, numbers already written.

A part that is a string is inline Markdown: a heading (`## …`), a list item (`- …`) or a paragraph.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_NUMBER = re.compile(r"[-+]?[\d,.]+(e[-+]?\d+)?( %)?|-?")


@dataclass(frozen=True, slots=True)
class Table:
    """A table of written cells, inline Markdown each.

    Attributes:
        head: Names of the columns.
        rows: The cells.
        folded: A title under which a page may fold the table away: what few readers look for.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    folded: str | None = None

    def numeric(self) -> tuple[bool, ...]:
        """Tell which columns hold numbers alone, and so belong to the right."""
        columns = (tuple(row[k] for row in self.rows) for k in range(len(self.head)))
        return tuple(any(cells) and all(_NUMBER.fullmatch(cell) for cell in cells) for cells in columns)


@dataclass(frozen=True, slots=True)
class Series:
    """Values of one kind in a panel: `x` and `y` of equal length.

    Of `bars` and `intervals`, y is the number of the category, x the value; `low` and `high` are the ends of intervals.
    """

    name: str
    kind: Literal["points", "line", "bars", "intervals"]
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes."""

    y_label: str
    series: tuple[Series, ...]
    log_y: bool = False
    diagonal: bool = False
    """Draw the line on which y equals x."""
    zero: bool = False
    """Draw the line on which y is zero."""


BandKind = Literal["training range", "hold-out", "warm-up", "idle", "queue never empty", "overload"]


@dataclass(frozen=True, slots=True)
class Band:
    """A stretch of the x axis that means something."""

    kind: BandKind
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Figure:
    """One or several panels above each other that share their x axis.

    Attributes:
        name: Unique in the report; letters, digits and dashes.
        title: What is shown.
        caption: What to look for.
        x_label: The x axis and its unit.
        panels: From top to bottom.
        categories: Names of the categories, where y is a category.
        log_x: Whether the x axis is logarithmic.
        bands: Marked stretches of the x axis.
        marks: Marked places on the x axis, with their names.
        wide: Takes the whole width of a wide page.
        summary: The figure in a few rows, for reports without pictures.
    """

    name: str
    title: str
    caption: str
    x_label: str
    panels: tuple[Panel, ...]
    summary: Table
    categories: tuple[str, ...] = ()
    log_x: bool = False
    bands: tuple[Band, ...] = ()
    marks: tuple[tuple[float, str], ...] = ()
    wide: bool = False

    def numbers(self) -> Table:
        """Return every number that is drawn, in writing."""
        rows = [
            (
                series.name,
                *((self.categories[int(y)],) if self.categories else ()),
                f"{x:.6g}",
                *(() if self.categories else (f"{y:.6g}",)),
            )
            for panel in self.panels
            for series in panel.series
            for x, y in zip(series.x, series.y, strict=True)
        ]
        if self.categories:
            return Table(("series", "of", self.x_label), tuple(rows))
        marked: list[tuple[str, ...]] = [
            (band.kind, f"{band.start:.6g} to {band.end:.6g}", "") for band in self.bands
        ]
        marked += [(name, f"{place:.6g}", "") for place, name in self.marks]
        head = ("series", self.x_label, " / ".join(p.y_label for p in self.panels))
        return Table(head, (*rows, *marked))


Part = str | Table | Figure


@dataclass(frozen=True, slots=True)
class Report:
    """A whole report, in reading order."""

    title: str
    parts: tuple[Part, ...]
