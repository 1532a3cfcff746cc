"""The page: whole, self-contained, readable by machines that read aloud, and safe from what names hold."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from tracefit.coefficients.files import read_coefficients, read_evaluation
from tracefit.commands.report import report, report_of
from tracefit.reports.document import Figure, Panel, Report, Series, Table
from tracefit.reports.html import html_page
from tracefit.reports.svg import figure_svg
from tracefit.results.figures import ShadedRegion
from tracefit.tables.store import TableStore

VOID = {"meta", "link", "br", "hr", "img", "input"}


class _Page(HTMLParser):
    """Elements with their attributes and text; raises where one is closed that is not open."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open = [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        element = {"tag": tag, "attrs": dict(attrs), "text": ""}
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag, attrs):
        self.elements.append({"tag": tag, "attrs": dict(attrs), "text": ""})

    def handle_endtag(self, tag):
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def all(self, tag):
        return [e for e in self.elements if e["tag"] == tag]


@pytest.fixture(scope="module")
def page(trained):
    return _Page((trained / "report.html").read_text())


def test_the_verdict_comes_first(page):
    headings = [h["text"] for h in page.all("h2")]
    assert headings[0] == "Verdict"
    assert headings[1] == "Data"
    assert headings[-1] == "Provenance"
    tables = [table["text"] for table in page.all("table")]
    assert "median / P90 error" in tables[0]
    first = next(text for text in tables if text.startswith("use"))
    for use in ("simulation", "capacity planning", "autoscaling", "alerting"):
        assert use in first


def test_every_section_is_linked_and_every_link_leads_somewhere(page):
    ids = [e["attrs"]["id"] for e in page.elements if "id" in e["attrs"]]
    assert len(ids) == len(set(ids))
    targets = [a["attrs"]["href"] for a in page.all("a")]
    assert targets
    assert {t.removeprefix("#") for t in targets} <= set(ids)


def test_figures_are_described_in_words_and_numbers(page):
    figures = page.all("figure")
    assert len(figures) > 10
    wide = [f for f in figures if "wide" in f["attrs"].get("class", "")]
    assert len(wide) == 1, "the engine's timeline, drawn once for narrow screens and once for wide ones"
    assert len(page.all("svg")) == len(figures) + len(wide)
    details = [d for d in page.all("details") if d["attrs"]["class"] == "numbers"]
    assert len(page.all("figcaption")) == len(details) == len(figures)
    ids = {e["attrs"].get("id"): e["text"] for e in page.elements}
    for svg in page.all("svg"):
        assert svg["attrs"]["role"] == "img"
        for name in svg["attrs"]["aria-labelledby"].split():
            assert ids[name].strip()
    numbers = re.compile(r"[0-9]")
    assert all(numbers.search(d["text"]) for d in details)


def test_nothing_is_fetched_and_nothing_runs(trained):
    text = (trained / "report.html").read_text()
    assert not re.findall(r"https?://|//[a-z]|@import|url\(", text)
    assert "<script" not in text
    assert not re.findall(r"\son\w+=", text)
    assert "default-src &#x27;none&#x27;" in text
    assert len(text.encode()) < 2_000_000


def test_all_that_markdown_tells_is_on_the_page(trained, page):
    body = _words(page.all("main")[0]["text"])
    lines = (trained / "report.md").read_text().splitlines()
    # Markdown has a figure as a few rows, the page draws it.
    drawn = [
        k for k, line in enumerate(lines) if re.match(r"\*\*.*\.\*\* ", line) and lines[k + 2][:1] == "|"
    ]
    rows = {n for k in drawn for n in range(k + 2, next(m for m in range(k + 2, len(lines)) if not lines[m]))}
    assert len(drawn) == len(page.all("figure"))
    for k, line in enumerate(lines):
        if k in rows or not line or line.startswith("# "):
            continue
        if line.startswith("|"):
            said = re.split(r"(?<!\\)\|", line)[1:-1]
        else:
            said = line.split(".** ", 1) if k in drawn else [line.lstrip("#- ").removesuffix(":")]
        for words in said:
            assert set(words.strip()) <= set("-:") or _words(words) in body


def _words(text):
    return " ".join(re.sub(r"[`*]", "", text).split())


def test_headings_of_the_same_words_have_anchors_of_their_own():
    page = _Page(
        html_page(Report("r", ("## Scope `a`", "### Errors", "## Scope `b`", "### Errors", "## `日本`")))
    )
    ids = [h["attrs"]["id"] for tag in ("h2", "h3") for h in page.all(tag)]
    assert len(ids) == 5 == len(set(ids))
    assert {a["attrs"]["href"] for a in page.all("a")} == {f"#{i}" for i in ids}
    assert all(ids)


def test_bold_may_hold_code_and_stars_that_do_not_pair_are_stars():
    text = html_page(
        Report("r", ("**Run `a_b` was *not* overloaded** (`x**y`): *it* is", "2 ** 3 of `n` is `8`"))
    )
    assert (
        "<strong>Run <code>a_b</code> was <em>not</em> overloaded</strong> (<code>x**y</code>): <em>it</em> is"
        in text
    )
    assert "<p>2 ** 3 of <code>n</code> is <code>8</code></p>" in text


def test_numbers_stand_to_the_right_and_what_few_look_for_is_folded():
    table = Table(("name", "n", "MAPE %"), (("a", "1,234", "-"), ("b", "7", "2.5")), folded="Few look")
    text = html_page(Report("r", (table,)))
    assert (
        '<th scope="col">name</th><th scope="col" class="n">n</th><th scope="col" class="n">MAPE\xa0%</th>'
        in text
    )
    assert '<td>b</td><td class="n">7</td><td class="n">2.5</td>' in text
    assert '<details class="folded"><summary>Few look</summary>' in text
    assert "<details" not in html_page(Report("r", (Table(("a",), (("b",),)),)))


def test_what_is_marked_along_an_axis_is_in_the_legend_once():
    line = Series("s", "line", (0.0, 10.0), (1.0, 2.0))
    bands = (
        ShadedRegion("idle", 1.0, 2.0),
        ShadedRegion("overload", 3.0, 9.0),
        ShadedRegion("idle", 4.0, 5.0),
    )
    figure = Figure(
        "f",
        "t",
        "c",
        "x",
        (Panel("y", (line,)),),
        Table((), ()),
        regions=bands,
        marks=((7.0, "hold-out begins"),),
    )
    text = figure_svg(figure)
    for name in ("idle", "overload", "hold-out begins"):
        assert text.count(f">{name}</text>") == 1
    assert "warm-up" not in text


@pytest.mark.slow
def test_a_page_of_many_scopes_stays_small(trained, monkeypatch):
    """Fewer points are drawn first, then figures of the last scopes are left out, and that is said."""
    evaluation = read_evaluation(trained / "evaluation.json")
    alpha, beta = (read_coefficients(trained / "models" / f"{k}.json") for k in ("alpha", "beta"))
    store = TableStore(trained / "tables")

    def page_below(size):
        monkeypatch.setattr("tracefit.commands.report.MAX_PAGE_BYTES", size)
        return html_page(report_of(evaluation, alpha, beta, store))

    full = page_below(2_000_000)
    thinned = page_below(len(full.encode()) - 1)
    assert len(thinned) < len(full)
    assert thinned.count("<svg") == full.count("<svg")
    assert "Figures of this scope are left out" not in thinned
    bare = page_below(100_000)
    assert len(bare.encode()) <= 100_000
    assert "Figures of this scope are left out" in bare
    assert "<svg" not in bare


def test_names_cannot_break_out():
    hostile = "<script>alert(1)</script>"
    series = Series(hostile, "points", (1.0, 2.0), (1.0, 2.0))
    other = Series('"', "points", (1.0, 2.0), (1.0, 2.0))
    figure = Figure(
        "f", hostile, hostile, hostile, (Panel(hostile, (series, other)),), Table((hostile,), ((hostile,),))
    )
    text = html_page(
        Report(
            hostile, (f"## {hostile}", f"`{hostile}` **{hostile}**", figure, Table((hostile,), ((hostile,),)))
        )
    )
    assert "<script" not in text
    assert _Page(text).all("h1")[0]["text"] == hostile


def test_a_panel_draws_each_series_in_its_own_shape():
    lines = tuple(Series(n, "points", (1.0, 2.0), (1.0, 2.0)) for n in ("one", "two"))
    text = figure_svg(Figure("f", "t", "c", "x", (Panel("y", lines),), Table((), ())))
    dots, triangles = (
        re.findall(r'<path class="p0" d="(.*?)"', text),
        re.findall(r'<path class="q1" d="(.*?)"', text),
    )
    assert [d.count("M") for d in dots] == [d.count("M") for d in triangles] == [1, 2], (
        "the legend and two points"
    )


def test_report_anew_gives_the_bytes_of_the_job(trained, tmp_path):
    result, _ = report(trained, out=tmp_path)
    assert sorted(p.name for p in result.files) == ["report.html", "report.md"]
    for file in result.files:
        assert file.read_bytes() == (trained / file.name).read_bytes()


def test_without_tables_what_the_files_tell_is_drawn(trained, tmp_path):
    (tmp_path / "models").mkdir()
    for name in ("evaluation.json", "models/alpha.json", "models/beta.json"):
        (tmp_path / name).write_bytes((trained / name).read_bytes())
    report(tmp_path)
    text = (tmp_path / "report.html").read_text()
    titles = {f["text"] for f in _Page(text).all("title")}
    assert {"beta.cycle_time: what each term adds", "TTFT, predicted and measured"} <= titles
    assert not any("against" in t or "over time" in t or "The engine of" in t for t in titles)
    assert "no tables beside the evaluation" in text
    assert "Verdict" in text
