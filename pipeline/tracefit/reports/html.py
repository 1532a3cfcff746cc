"""A report as one page: no script, no network, light and dark, on a phone and on paper. Nothing is computed here."""

from __future__ import annotations

import re
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from tracefit.reports.model import Figure, Table
from tracefit.reports.render import plain
from tracefit.reports.svg import figure_svg

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tracefit.reports.model import Part, Report

_CODE = re.compile(r"`([^`]*)`")
_STRONG = re.compile(r"\*\*([^*]+)\*\*")
_EM = re.compile(r"\*([^*]+)\*")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_LONG = 60
"""Characters above which a cell is prose, which a narrow screen puts below its row."""

_ANSWERS = {"**yes**": "yes", "**with limits**": "limits", "**no**": "no"}


def html_page(report: Report) -> str:
    """Return the whole report as one HTML page."""
    style = files("tracefit.reports").joinpath("report.css").read_text(encoding="utf-8")
    sections = [p for p in report.parts if isinstance(p, str) and p.startswith("## ")]
    links = "".join(f'<li><a href="#{_anchor(s)}">{_inline(_heading(s))}</a></li>' for s in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY, quote=True)}">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{escape(report.title)}</title><style>{style}</style></head>\n<body><header><h1>{_inline(report.title)}</h1>"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav></header>\n<main>\n{_body(report.parts)}\n</main></body></html>\n'
    )


def _body(parts: Iterable[Part]) -> str:
    """Render parts; list items that follow each other are one list, figures that do so one grid."""
    lines: list[str] = []
    within: str | None = None
    for part in parts:
        kind = _kind(part)
        if within and kind != within:
            lines.append(_CLOSE[within])
        if kind in _OPEN and kind != within:
            lines.append(_OPEN[kind])
        within = kind if kind in _OPEN else None
        lines.append(_part(part, kind))
    if within:
        lines.append(_CLOSE[within])
    return "\n".join(lines)


_OPEN = {"item": "<ul>", "figure": '<div class="figures">'}
_CLOSE = {"item": "</ul>", "figure": "</div>"}


def _kind(part: Part) -> str:
    if isinstance(part, Figure):
        return "figure"
    if isinstance(part, Table):
        return "table"
    if part.startswith("#"):
        return "heading"
    return "item" if part.startswith("- ") else "text"


def _part(part: Part, kind: str) -> str:
    if isinstance(part, Figure):
        return _figure(part)
    if isinstance(part, Table):
        return _table(part)
    if kind == "heading":
        level = len(part) - len(part.lstrip("#"))
        return f'<h{level} id="{_anchor(part)}">{_inline(_heading(part))}</h{level}>'
    return f"<li>{_inline(part[2:])}</li>" if kind == "item" else f"<p>{_inline(part)}</p>"


def _heading(part: str) -> str:
    return part.lstrip("#").strip()


def _anchor(heading: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")


def _inline(text: str) -> str:
    """Turn inline Markdown into HTML; everything else is text, whatever it looks like."""
    pieces = _CODE.split(text)
    return "".join(
        f"<code>{escape(piece)}</code>"
        if number % 2
        else _EM.sub(r"<em>\1</em>", _STRONG.sub(r"<strong>\1</strong>", escape(piece)))
        for number, piece in enumerate(pieces)
    )


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{_inline(c)}</th>' for c in table.head)
    rows = "".join(f"<tr>{''.join(_cell(c) for c in row)}</tr>" for row in table.rows)
    wordy = ' class="wordy"' if any(len(c) > _LONG for row in table.rows for c in row) else ""
    label = escape(plain(", ".join(c for c in table.head if c)), quote=True)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table{wordy}><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _cell(text: str) -> str:
    if text in _ANSWERS:
        return f'<td class="answer {_ANSWERS[text]}">{_inline(text)}</td>'
    kind = ' class="long"' if len(text) > _LONG else ""
    return f"<td{kind}>{_inline(text)}</td>"


def _figure(figure: Figure) -> str:
    caption = f"<strong>{_inline(figure.title)}.</strong> {_inline(figure.caption)}"
    numbers = f"<details><summary>The numbers of this figure</summary>{_table(figure.numbers())}</details>"
    return f'<figure id="{escape(figure.name, quote=True)}">{figure_svg(figure)}<figcaption>{caption}</figcaption>{numbers}</figure>'
