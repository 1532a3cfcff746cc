"""The report as a document: text, tables and figures in reading order, their numbers already written.

The page, the Markdown file and the terminal render the same document. A part that is a string is inline Markdown: a
heading (`## …`), a list item (`- …`) or a paragraph.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tracefit.results.figures import ShadedRegion

_NUMBER = re.compile(r"[-+]?[\d,.]+(e[-+]?\d+)?( %)?|-?")


@dataclass(frozen=True, slots=True)
class Table:
    """A table of written cells, inline Markdown each.

    Attributes:
        head: Names of the columns.
        rows: The cells.
        folded: A title under which a page folds the table away; null for a table most readers need.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    folded: str | None = None

    def numeric(self) -> tuple[bool, ...]:
        """Say of each column whether it holds numbers alone, and so is aligned to the right."""
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
    y_limits: tuple[float, float] | None = None
    """Limits of the y axis; points beyond them are drawn at its edge. All values fit if null."""
    levels: tuple[tuple[float, str], ...] = ()
    """Horizontal lines, with their names."""


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
        regions: Shaded intervals of the x axis.
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
    regions: tuple[ShadedRegion, ...] = ()
    marks: tuple[tuple[float, str], ...] = ()
    wide: bool = False

    def numbers(self) -> Table:
        """Return every number of the drawing as a table."""
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
            (region.kind, f"{region.start:.6g} to {region.end:.6g}", "") for region in self.regions
        ]
        marked += [(name, f"{place:.6g}", "") for place, name in self.marks]
        head = ("series", self.x_label, " / ".join(p.y_label for p in self.panels))
        return Table(head, (*rows, *marked))


ReportPart = str | Table | Figure


@dataclass(frozen=True, slots=True)
class Report:
    """A whole report, in reading order.

    Attributes:
        title: Its title.
        parts: Its parts.
        folded: Headings of the sections that a page shows folded.
    """

    title: str
    parts: tuple[ReportPart, ...]
    folded: frozenset[str] = frozenset()


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, folded: str | None = None) -> Table:
    """Make a table of written cells."""
    return Table(tuple(head), tuple(tuple(r) for r in rows), folded)
