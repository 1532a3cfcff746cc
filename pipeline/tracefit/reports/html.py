"""A report as one page: no script, no network, light and dark, on a phone and on paper. Nothing is computed here."""

from __future__ import annotations

import re
from collections import Counter
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from tracefit.reports.document import Figure, Table
from tracefit.reports.markdown import plain
from tracefit.reports.svg import WIDE, figure_svg

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tracefit.reports.document import Report, ReportPart

_CODE = re.compile(r"`([^`]*)`")
_EM = re.compile(r"(?<!\*)\*([^*]+)\*(?!\*)")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_LONG = 60
"""Characters above which a cell is prose, which a narrow screen puts below its row."""

_ANSWERS = {"**yes**": "yes", "**with limits**": "limits", "**no**": "no"}


def html_page(report: Report) -> str:
    """Return the whole report as one HTML page."""
    style = files("tracefit.reports").joinpath("report.css").read_text(encoding="utf-8")
    anchors = dict(_anchors(report.parts))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY, quote=True)}">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{escape(report.title)}</title><style>{style}</style></head>\n<body><header><h1>{_inline(report.title)}</h1>"
        f'<nav aria-label="Sections"><ul>{_contents(report.parts, anchors)}</ul></nav></header>\n'
        f"<main>\n{_body(report, anchors)}\n</main></body></html>\n"
    )


def _anchors(parts: Iterable[ReportPart]) -> Iterator[tuple[int, str]]:
    """Yield a unique anchor for every heading: (index of the part, anchor)."""
    uses: Counter[str] = Counter()
    for place, part in enumerate(parts):
        if _kind(part) == "heading":
            name = re.sub(r"[^a-z0-9]+", "-", str(part).lower()).strip("-") or "section"
            uses[name] += 1
            yield place, name if uses[name] == 1 else f"{name}-{uses[name]}"


def _contents(parts: Sequence[ReportPart], anchors: dict[int, str]) -> str:
    return "".join(
        f'<li class="h{_level(str(parts[place]))}"><a href="#{name}">{_inline(_heading(str(parts[place])))}</a></li>'
        for place, name in anchors.items()
    )


def _body(report: Report, anchors: dict[int, str]) -> str:
    """Render parts; list items that follow each other are one list, figures that do so one grid.

    A folded section ends where the next heading of its level begins.
    """
    lines: list[str] = []
    within: str | None = None
    folded = False
    for place, part in enumerate(report.parts):
        kind = _kind(part)
        if within and kind != within:
            lines.append(_CLOSE[within])
        if folded and kind == "heading" and _level(str(part)) == 2:
            lines.append("</details>")
            folded = False
        if kind in _OPEN and kind != within:
            lines.append(_OPEN[kind])
        within = kind if kind in _OPEN else None
        drawn = _part(part, kind, anchors.get(place, ""))
        if kind == "heading" and part in report.folded:
            drawn, folded = f'<details class="section"><summary>{drawn}</summary>', True
        lines.append(drawn)
    if within:
        lines.append(_CLOSE[within])
    if folded:
        lines.append("</details>")
    return "\n".join(lines)


_OPEN = {"item": "<ul>", "figure": '<div class="figures">'}
_CLOSE = {"item": "</ul>", "figure": "</div>"}


def _kind(part: ReportPart) -> str:
    if isinstance(part, Figure):
        return "figure"
    if isinstance(part, Table):
        return "table"
    if part.startswith("#"):
        return "heading"
    return "item" if part.startswith("- ") else "text"


def _part(part: ReportPart, kind: str, anchor: str) -> str:
    if isinstance(part, Figure):
        return _figure(part)
    if isinstance(part, Table):
        return _folded(part.folded, _table(part), "folded") if part.folded else _table(part)
    if kind == "heading":
        return f'<h{_level(part)} id="{anchor}">{_inline(_heading(part))}</h{_level(part)}>'
    return f"<li>{_inline(part[2:])}</li>" if kind == "item" else f"<p>{_inline(part)}</p>"


def _level(heading: str) -> int:
    return len(heading) - len(heading.lstrip("#"))


def _heading(part: str) -> str:
    return part.lstrip("#").strip()


def _inline(text: str) -> str:
    """Turn inline Markdown into HTML; everything else is escaped text."""
    pieces = _CODE.split(text)
    # Code inside bold is replaced first. A mark that is not closed stays as text.
    paired = sum(piece.count("**") for piece in pieces[::2]) % 2 == 0
    strong, out = False, []
    for number, piece in enumerate(pieces):
        if number % 2:
            out.append(f"<code>{escape(piece)}</code>")
            continue
        for k, words in enumerate(piece.split("**") if paired else [piece]):
            if k:
                strong = not strong
                out.append("<strong>" if strong else "</strong>")
            out.append(_EM.sub(r"<em>\1</em>", escape(words)))
    return "".join(out)


def _folded(title: str, content: str, kind: str) -> str:
    return f'<details class="{kind}"><summary>{_inline(title)}</summary>{content}</details>'


def _table(table: Table) -> str:
    numeric = table.numeric()
    head = "".join(
        f'<th scope="col"{_NUMBER if n else ""}>{_inline(c.replace(" %", _UNIT))}</th>'
        for c, n in zip(table.head, numeric, strict=True)
    )
    rows = "".join(
        f"<tr>{''.join(_cell(c, n) for c, n in zip(row, numeric, strict=True))}</tr>" for row in table.rows
    )
    wordy = ' class="wordy"' if any(len(c) > _LONG for row in table.rows for c in row) else ""
    label = escape(plain(", ".join(c for c in table.head if c)), quote=True)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table{wordy}><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


_UNIT = "\N{NO-BREAK SPACE}%"
_NUMBER = ' class="n"'


def _cell(text: str, numeric: bool) -> str:
    if text in _ANSWERS:
        return f'<td class="answer {_ANSWERS[text]}">{_inline(text)}</td>'
    kind = _NUMBER if numeric else ' class="long"' if len(text) > _LONG else ""
    return f"<td{kind}>{_inline(text)}</td>"


def _figure(figure: Figure) -> str:
    drawn = figure_svg(figure)
    if figure.wide:
        drawn = f'<div class="narrow">{drawn}</div><div class="broad">{figure_svg(figure, width=WIDE)}</div>'
    kind = ' class="wide"' if figure.wide else ""
    numbers = _folded("The numbers of this figure", _table(figure.numbers()), "numbers")
    return (
        f'<figure id="{escape(figure.name, quote=True)}"{kind}><p class="title">{_inline(figure.title)}</p>{drawn}'
        f"<figcaption>{_inline(figure.caption)}{numbers}</figcaption></figure>"
    )
