"""A report as Markdown. Nothing is computed here."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, assert_never

from tracefit.errors import printable
from tracefit.reports.document import Bullets, Figure, Section, Table, Verdicts, table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tracefit.reports.document import Report, ReportPart


def markdown_text(report: Report) -> str:
    """Return the whole report as Markdown; figures in a few rows of numbers each."""
    parts = [
        f"# {report.title}",
        *filter(None, (report.subject, f"**{report.lead}**" if report.lead else "")),
    ]
    return _harmless("\n\n".join([*parts, *_parts(report.parts, 2)])) + "\n"


def _parts(parts: Iterable[ReportPart], level: int) -> Iterator[str]:
    for part in parts:
        match part:
            case str():
                yield part
            case Bullets(items):
                yield "\n".join(f"- {item}" for item in items)
            case Table():
                yield from (f"{part.folded}:", _table(part)) if part.folded else (_table(part),)
            case Verdicts():
                yield _table(verdict_table(part))
            case Figure():
                yield from (f"**{part.title}.** {part.caption}", _table(part.summary))
            case Section():
                yield f"{'#' * level} {part.title}"
                yield from _parts(part.parts, level + 1)
            case _:
                assert_never(part)


def verdict_table(verdicts: Verdicts) -> Table:
    """Return verdicts as a table, for readers without the page's cards."""
    return table(
        ("use", "verdict", "reason"), [(v.use, f"**{v.answer}**", v.sentence) for v in verdicts.uses]
    )


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
