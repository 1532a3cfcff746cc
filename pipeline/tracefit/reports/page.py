"""A report as one page: plotly's figures, no network, light and dark, on a phone and on paper. Nothing is computed
here.

This module alone needs what the extra `[report]` installs; it is imported where a page or a figure is drawn.

Names in a report come from traces, and anyone may have written those. The templates escape whatever they are given,
data for scripts is JSON that cannot end its element, and the page's policy lets no script run but the two whose hashes
it names.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from importlib.resources import files
from typing import TYPE_CHECKING

from tracefit.errors import TracefitError
from tracefit.reports.document import Section, every_part, plain
from tracefit.reports.figures.elements import CONFIG, TEMPLATES, anchor, name_text

try:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup, escape
    from plotly.offline import get_plotlyjs
except ImportError:
    raise TracefitError("figures need plotly and jinja2", hint="pip install 'tracefit[report]'") from None

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from plotly.graph_objects import Figure as PlotlyFigure

    from tracefit.reports.document import Figure, Report, ReportPart

_CODE = re.compile(r"`([^`]*)`")
_EM = re.compile(r"(?<!\*)\*([^*]+)\*(?!\*)")
_MARKED = re.compile(r"[*`%]")
_CODES = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control codes, which HTML has no place for either."""

_LONG_TABLE_ROWS = 60
"""Characters above which a cell is prose, which a narrow screen puts below its row."""

_PERCENT = "\N{NO-BREAK SPACE}%"
_ANSWERS = {"**yes**": "yes", "**with limits**": "limits", "**no**": "no"}


def html_page(report: Report) -> str:
    """Return the whole report as one HTML page."""
    anchors = dict(_anchors(report.parts))
    environment = Environment(
        loader=PackageLoader("tracefit.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_without_codes,
    )
    environment.filters.update(
        anchor=lambda part: anchors[id(part)],
        data=_data,
        inline=inline,
        kind=lambda part: type(part).__name__,
        plain=plain,
        wordy=lambda table: any(len(cell) > _LONG_TABLE_ROWS for row in table.rows for cell in row),
    )
    texts = files("tracefit.reports") / "templates"
    style, script = ((texts / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    plotly = get_plotlyjs()
    drawn = {
        f.name: {"data": f.traces, "layout": f.layout | {"height": f.height}}
        | ({"curves": f.curves} if f.curves else {})
        for f in report.figures()
    }
    return (
        environment.get_template("page.html").render(
            report=report,
            contents=[(part.title, anchors[id(part)]) for part in report.parts if isinstance(part, Section)],
            figures={"figures": drawn, "templates": TEMPLATES, "config": CONFIG} if drawn else None,
            policy=_policy(plotly, script),
            # Texts of this package and of plotly, not of a trace.
            style=Markup(style),  # noqa: S704
            plotly=Markup(plotly),  # noqa: S704
            script=Markup(script),  # noqa: S704
        )
        + "\n"
    )


def plotly_figure(figure: Figure) -> PlotlyFigure:
    """Return a figure as plotly's own for a notebook, with its title and the sentence on what to look for."""
    from plotly.graph_objects import Figure as PlotlyFigure  # noqa: PLC0415 - it checks figures, which a page leaves to the script

    drawn = PlotlyFigure(list(figure.traces), figure.layout)
    title = {
        "text": name_text(figure.title),
        "subtitle": {"text": name_text(plain(figure.look)), "font": {"size": 12}},
        "x": 0,
        "xref": "container",
        "pad": {"l": 12},
    }
    # A white page in both colour schemes of a notebook: its text is dark.
    return drawn.update_layout(
        template=TEMPLATES["light"],
        title=title,
        height=figure.height + 100,
        margin={"t": 130},
        paper_bgcolor="#fff",
    )


def _policy(*scripts: str) -> str:
    """Return a content security policy that lets these scripts run and no other, and fetches nothing."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _anchors(parts: Iterable[ReportPart]) -> Iterator[tuple[int, str]]:
    """Yield a unique anchor for every section: (its identity, its anchor)."""
    uses: Counter[str] = Counter()
    for section in (part for part in every_part(parts) if isinstance(part, Section)):
        name = anchor(section.title) or "section"
        uses[name] += 1
        # By identity: sections of two deployments may be equal.
        yield id(section), f"section-{name}" if uses[name] == 1 else f"section-{name}-{uses[name]}"


def _data(cell: str, is_number: bool, head: str) -> Markup:
    """Return a cell of a table.

    A narrow screen shows a table with prose row by row, and there each cell says what it is of: the `head` of its
    column.
    """
    # A function, not a macro: a report has thousands of cells, and a macro takes three times as long.
    kind = "long" if len(cell) > _LONG_TABLE_ROWS else ""
    kind = f"answer {_ANSWERS[cell]}" if cell in _ANSWERS else "n" if is_number else kind
    of = f' class="{kind}"' if kind else ""
    name = f' data-head="{escape(_without_codes(plain(head)))}"' if head else ""
    return Markup(f"<td{of}{name}>{inline(cell)}</td>")  # noqa: S704 - all pieces are escaped


def _without_codes(value: object) -> object:
    """Escape codes that a terminal would obey in a text of the report: someone may print the page there."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return _CODES.sub(lambda code: f"\\x{ord(code[0]):02x}", value)


def inline(text: str) -> Markup:
    """Turn inline Markdown into HTML; everything else is escaped text."""
    text = str(_without_codes(text))
    if not _MARKED.search(text):  # most cells of long tables
        return escape(text)
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
            out.append(_EM.sub(r"<em>\1</em>", str(escape(words)).replace(" %", _PERCENT)))
    return Markup("".join(out))  # noqa: S704 - all pieces are escaped
