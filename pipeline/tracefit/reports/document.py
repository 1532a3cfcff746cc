"""The report as a document: text, tables, figures and sections in reading order, their numbers already written.

The page and the Markdown file render the same document. A part that is a string is a paragraph of inline
Markdown: `code`, **bold** and *emphasis*. The whole of it as Markdown is here too (`markdown_text`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeAlias, TypeVar, assert_never

import msgspec

from tracefit.errors import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tracefit.coefficients.documents import VerdictAnswer


_NUMBER_PATTERN = re.compile(r"[-+<]?[\d,.]+(e[-+]?\d+)?( %)?|-?")

T = TypeVar("T")
Trace: TypeAlias = dict[str, object]
"""One series of a figure, or its layout, in plotly's own terms."""


class Table(msgspec.Struct, frozen=True):
    """A table of written cells, inline Markdown each.

    Attributes:
        head: Names of the columns.
        rows: The cells.
        folded: A title under which a page folds the table away; null for a table most readers need.
        leads_to: The section that each row is about, to which a page links its first cell; empty for most tables.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    folded: str | None = None
    leads_to: tuple[Section, ...] = ()

    def numeric(self) -> tuple[bool, ...]:
        """Return for each column whether all its cells are numbers, which are aligned to the right."""
        columns = (tuple(row[k] for row in self.rows) for k in range(len(self.head)))
        # Some cells may be empty, but not all of them.
        return tuple(any(cells) and all(_NUMBER_PATTERN.fullmatch(cell) for cell in cells) for cells in columns)


class Bullets(msgspec.Struct, frozen=True):
    """A list of sentences."""

    items: tuple[str, ...]


class ShellLines(msgspec.Struct, frozen=True):
    """Lines of a shell to copy, shown as they are."""

    lines: tuple[str, ...]


class UseVerdict(msgspec.Struct, frozen=True):
    """Whether models are good enough for one use, and the reason in a sentence."""

    use: str
    answer: VerdictAnswer
    sentence: str


class Verdicts(msgspec.Struct, frozen=True):
    """The verdicts on all uses of one deployment."""

    uses: tuple[UseVerdict, ...]


class Figure(msgspec.Struct, frozen=True):
    """A figure as plotly draws it, and its meaning in words and numbers.

    Attributes:
        name: Unique in the report; letters, digits and dashes.
        kind: Its name for `plot` of a result, such as `step-times`.
        title: Its title.
        look: One sentence: what to look for.
        summary: The figure in a few rows, for readers without pictures.
        traces: Its series.
        layout: Its axes and marks; sizes and colours of the page come from a template.
        note: How many rows are drawn and the like; may be empty.
        hint: Mouse actions, shown only on the page; may be empty.
        wide: Takes the whole width of the page.
        height: In pixels.
        curves: The numbers behind its movable marks: `rates`, percentile to `values` in ms, whether a rate is `outside`
            the training, and the `limit` of an objective by percentile; empty without such marks.
    """

    name: str
    kind: str
    title: str
    look: str
    summary: Table
    traces: tuple[Trace, ...]
    layout: Trace
    note: str = ""
    hint: str = ""
    wide: bool = False
    height: int = 340
    curves: Trace = msgspec.field(default_factory=dict)

    @property
    def caption(self) -> str:
        """The sentence on what to look for, and the note."""
        return f"{self.look} {self.note}".rstrip()


class Section(msgspec.Struct, frozen=True):
    """Parts under a heading; a page shows a folded one closed, and of the choices only one open at a time."""

    title: str
    parts: tuple[ReportPart, ...]
    folded: bool = False
    is_choice: bool = False


ReportPart: TypeAlias = "str | Bullets | ShellLines | Table | Verdicts | Figure | Section"


class Report(msgspec.Struct, frozen=True):
    """A whole report, in reading order.

    Attributes:
        title: Its title.
        lead: Can I use this, and how sure is it: the first sentence.
        parts: Its parts.
        subject: The traced servers, in one line.
    """

    title: str
    lead: str = ""
    parts: tuple[ReportPart, ...] = msgspec.field(default_factory=tuple)
    subject: str = ""

    def figures(self) -> Iterator[Figure]:
        """Yield every figure, in reading order."""
        return (part for part in every_part(self.parts) if isinstance(part, Figure))


def every_part(parts: Iterable[ReportPart]) -> Iterator[ReportPart]:
    """Yield all parts in reading order, each section before its own."""
    for part in parts:
        yield part
        if isinstance(part, Section):
            yield from every_part(part.parts)


def kept(*parts: ReportPart | None) -> tuple[ReportPart, ...]:
    """Return the parts that say something: no empty text, list, table or section."""
    return tuple(part for part in parts if part and _content(part))


def _content(part: ReportPart) -> object:
    match part:
        case Table(rows=content) | Bullets(items=content) | Verdicts(uses=content) | Section(parts=content):
            return content
        case ShellLines(lines=content):
            return content
        case _:
            return part


def section(title: str, *parts: ReportPart | None, folded: bool = False) -> Section:
    """Make a section of the parts that say something; without any it is left out itself."""
    return Section(title, kept(*parts), folded)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, folded: str | None = None) -> Table:
    """Make a table of written cells."""
    return Table(tuple(head), tuple(tuple(r) for r in rows), folded)


def table_of(items: Iterable[T], columns: Mapping[str, Callable[[T], str]], *, folded: str | None = None) -> Table:
    """Make a table with a row per item; a column is its head and what it writes of an item."""
    return table(tuple(columns), [[cell(item) for cell in columns.values()] for item in items], folded=folded)


# -- as Markdown ----------------------------------------------------------------------------------------


MOST_WORDS = 12_000
"""Words of a report that is one Markdown file: more than that nobody reads in one go."""
PARTS = "report"
"""Folder of the sections of a longer report."""


def markdown_text(report: Report) -> str:
    """Return the whole report as Markdown; figures in a few rows of numbers each."""
    return _document([*_head(report), *_parts(report.parts, 2)])


def markdown_files(report: Report) -> dict[str, str]:
    """Return the Markdown files of a report by their names, `report.md` first; a long one has a file for each section,
    and links.
    """
    whole = markdown_text(report)
    sections = [part for part in report.parts if isinstance(part, Section)]
    if len(whole.split()) <= MOST_WORDS or len(sections) < 2:
        return {"report.md": whole}
    files, links = {}, []
    for number, one in enumerate(sections, 1):
        title = re.sub(r"[^A-Za-z0-9.]+", "-", one.title).strip("-.").lower()[:60] or "section"
        name = f"{PARTS}/{number:02}-{title}.md"
        files[name] = _document([f"# {_one_line(one.title)}", *_parts(one.parts, 2)])
        # Only the name of a file is in the link: titles hold names from traces, which come from elsewhere.
        links.append(f"- {_harmless(_one_line(one.title))}: [{name}]({name})")
    rest = [part for part in report.parts if not isinstance(part, Section)]
    summary = _document([*_head(report), *_parts(rest, 2)])
    return {"report.md": "\n".join([summary, *links]) + "\n"} | files


def _head(report: Report) -> list[str]:
    head = (f"# {report.title}", report.subject, report.lead and f"**{report.lead}**")
    return [_one_line(text) for text in head if text]


def _document(parts: Iterable[str]) -> str:
    return _harmless("\n\n".join(parts)) + "\n"


def _parts(parts: Iterable[ReportPart], level: int) -> Iterator[str]:
    for part in parts:
        match part:
            case str():
                yield _one_line(part)
            case Bullets(items):
                yield "\n".join(f"- {_one_line(item)}" for item in items)
            case ShellLines(lines):
                yield "\n".join(["```bash", *lines, "```"])
            case Table():
                yield from (f"{part.folded}:", _table(part)) if part.folded else (_table(part),)
            case Verdicts():
                rows = [(v.use, f"**{v.answer}**", v.sentence) for v in part.uses]
                yield _table(table(("use", "verdict", "reason"), rows))
            case Figure():
                yield from (_one_line(f"**{part.title}.** {part.caption}"), _table(part.summary))
            case Section():
                yield f"{'#' * level} {_one_line(part.title)}"
                yield from _parts(part.parts, level + 1)
            case _:
                assert_never(part)


def _one_line(text: str) -> str:
    """Take line breaks out of a text: after one in a server's name, the rest could begin a heading or a list."""
    return text.replace("\n", " ")


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
    return "| " + " | ".join(_one_line(c).replace("|", "\\|") for c in cells) + " |"


_MARKS = re.compile(r"`([^`]*)`|\*\*([^*]+)\*\*|\*([^*]+)\*")


def plain(text: str) -> str:
    """Take the marks of inline Markdown away."""
    # Bold and emphasis may have marks inside, code has none: what looks like one there is text.
    return _MARKS.sub(lambda m: m[1] if m[1] is not None else plain(m[2] or m[3]), text)
