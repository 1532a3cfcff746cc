"""A report as Markdown. Nothing is computed here."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tracefit.errors import printable
from tracefit.reports.document import Figure, Table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tracefit.reports.document import Report


def markdown_text(report: Report) -> str:
    """Return the whole report as Markdown; figures in a few rows of numbers each."""
    parts = [f"# {report.title}"]
    for part in report.parts:
        if isinstance(part, Figure):
            parts += [f"**{part.title}.** {part.caption}", _table(part.summary)]
        elif isinstance(part, Table):
            parts += [f"{part.folded}:", _table(part)] if part.folded else [_table(part)]
        else:
            parts.append(part)
    return _harmless("\n\n".join(parts)) + "\n"


_TAG = re.compile(r"<(?=[A-Za-z/!?])")


def _harmless(text: str) -> str:
    """Take tags, links and codes of terminals out of Markdown: names in traces come from elsewhere.

    The report itself has none of them.
    """
    text = _TAG.sub("&lt;", text).replace("](", "]\\(")
    return "\n".join(printable(line) for line in text.split("\n"))


def _table(table: Table) -> str:
    rules = ["---:" if number else "---" for number in table.numeric()]
    return "\n".join([_row(table.head), _row(rules), *(_row(r) for r in table.rows)])


def _row(cells: Iterable[str]) -> str:
    # A pipe in a run's or a model's name must not end the cell.
    return "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in cells) + " |"


_MARKS = re.compile(r"`([^`]*)`|\*\*([^*]+)\*\*|\*([^*]+)\*")


def plain(text: str) -> str:
    """Take the marks of inline Markdown away."""
    return _MARKS.sub(lambda m: m[1] if m[1] is not None else plain(m[2] or m[3]), text)
