"""The page: whole, self-contained, readable by machines that read aloud, and safe from what names hold."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from tracefit.reports.html import html_page
from tracefit.reports.model import Figure, Panel, Report, Series, Table
from tracefit.reports.svg import Axis, axis_of, figure_svg, tick_text
from tracefit.verbs.report import report

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
    first = page.all("table")[0]["text"]
    for use in ("simulation", "capacity planning", "autoscaling", "alerting"):
        assert use in first


def test_every_section_is_linked_and_every_link_leads_somewhere(page):
    ids = [e["attrs"]["id"] for e in page.elements if "id" in e["attrs"]]
    assert len(ids) == len(set(ids))
    targets = [a["attrs"]["href"] for a in page.all("a")]
    assert targets
    assert {t.removeprefix("#") for t in targets} <= set(ids)


def test_figures_are_told_in_words_and_numbers(page):
    figures = page.all("figure")
    assert len(figures) > 10
    assert len(page.all("svg")) == len(page.all("figcaption")) == len(page.all("details")) == len(figures)
    ids = {e["attrs"].get("id"): e["text"] for e in page.elements}
    for svg in page.all("svg"):
        assert svg["attrs"]["role"] == "img"
        for name in svg["attrs"]["aria-labelledby"].split():
            assert ids[name].strip()
    numbers = re.compile(r"[0-9]")
    assert all(numbers.search(d["text"]) for d in page.all("details"))


def test_nothing_is_fetched_and_nothing_runs(trained):
    text = (trained / "report.html").read_text()
    assert not re.findall(r"https?://|//[a-z]|@import|url\(", text)
    assert "<script" not in text
    assert not re.findall(r"\son\w+=", text)
    assert "default-src &#x27;none&#x27;" in text
    assert len(text.encode()) < 2_000_000


def test_all_that_markdown_tells_is_on_the_page(trained, page):
    body = " ".join(page.all("main")[0]["text"].replace("*", "").split())
    for line in (trained / "report.md").read_text().splitlines():
        if line.startswith(("|", "#", "**")) or not line.strip():
            continue
        words = re.sub(r"[`*]", "", line.removeprefix("- "))
        assert " ".join(words.split()) in body


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


def test_points_are_where_the_axes_say():
    axis = Axis(0.0, 100.0, 50.0, 250.0)
    assert [axis.at(v) for v in (0, 25, 100, 130, -5)] == [50.0, 100.0, 250.0, 250.0, 50.0]
    log = Axis(1.0, 10_000.0, 0.0, 400.0, log=True)
    assert [log.at(v) for v in (1, 10, 1000)] == pytest.approx([0.0, 100.0, 300.0])


@pytest.mark.parametrize(
    ("low", "high", "log", "ticks"),
    [
        (0.0, 10.0, False, [0, 2, 4, 6, 8, 10]),
        (-3.0, 3.0, False, [-2, 0, 2]),
        (0.0, 0.047, False, [0, 0.01, 0.02, 0.03, 0.04]),
        (12.0, 1234.0, True, [100, 1000]),
        (1.0, 9.0, True, [2, 4, 6, 8]),
    ],
)
def test_ticks_are_round(low, high, log, ticks):
    assert Axis(low, high, 0.0, 1.0, log=log).ticks() == pytest.approx(ticks)


def test_a_single_value_still_has_an_axis():
    axis = axis_of([5.0], 0.0, 100.0, log=False)
    assert axis.at(5.0) == pytest.approx(50.0)
    assert axis.ticks()


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.02, "0.02"), (1500, "1500"), (12_000, "12k"), (3_500_000, "3.5M"), (0.30000000000000004, "0.3")],
)
def test_ticks_are_short(value, text):
    assert tick_text(value) == text


def test_a_panel_draws_each_series_in_its_own_shape():
    lines = tuple(Series(n, "points", (1.0, 2.0), (1.0, 2.0)) for n in ("one", "two"))
    text = figure_svg(Figure("f", "t", "c", "x", (Panel("y", lines),), Table((), ())))
    assert text.count("<circle") == text.count("<path") == 3, "two points and the legend"


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
