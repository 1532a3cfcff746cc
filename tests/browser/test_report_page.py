"""The report in a real browser: nothing fails, nothing is fetched, nothing overlaps or is cut off."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.browser
WIDTHS = (360, 1400)

TEXTLESS = """
[...document.querySelectorAll('h1,h2,h3,h4,figcaption,summary,th:not(:empty),svg>title,svg>desc')]
  .filter(e => !e.textContent.trim()).map(e => e.outerHTML.slice(0, 100))
"""
CUT_OFF = """
[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll') && !e.closest('svg *') && e.checkVisibility())
  .filter(e => { const r = e.getBoundingClientRect(); return r.width && (r.right > innerWidth + 1 || r.left < -1); })
  .map(e => e.outerHTML.slice(0, 100))
"""
TEXT_OUTSIDE = """
[...document.querySelectorAll('svg')].flatMap(s => { const b = s.getBoundingClientRect();
  return [...s.querySelectorAll('text')].filter(t => { const r = t.getBoundingClientRect();
    return r.left < b.left - 1 || r.right > b.right + 1 || r.top < b.top - 1 || r.bottom > b.bottom + 1; })
  .map(t => s.querySelector('title').textContent + ': ' + t.textContent); })
"""
TEXTS_OVERLAP = """
[...document.querySelectorAll('svg')].flatMap(s => { const all = [...s.querySelectorAll('text')].map(t => [t, t.getBoundingClientRect()]);
  const bad = [];
  for (let i = 0; i < all.length; i++) for (let j = i + 1; j < all.length; j++) { const [a, b] = [all[i][1], all[j][1]];
    const w = Math.min(a.right, b.right) - Math.max(a.left, b.left), h = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (w > 1 && h > 3) bad.push(s.querySelector('title').textContent + ': ' + all[i][0].textContent + ' / ' + all[j][0].textContent); }
  return bad; })
"""
BLOCKS_OVERLAP = """
(() => { const all = [...document.querySelectorAll('main > *, .figures > *, figure > *')].filter(e => e.checkVisibility()), bad = [];
  for (const a of all) for (const b of all) if (a !== b && a.parentElement === b.parentElement) {
    const p = a.getBoundingClientRect(), q = b.getBoundingClientRect();
    const w = Math.min(p.right, q.right) - Math.max(p.left, q.left), h = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
    if (w > 1 && h > 1) bad.push(a.outerHTML.slice(0, 60) + ' / ' + b.outerHTML.slice(0, 60)); }
  return bad; })()
"""


@pytest.fixture(params=WIDTHS)
def page(request, browser, trained):
    browser.open(trained / "report.html", width=request.param)
    return browser


def test_it_opens_without_an_error(page):
    assert page.ask("document.title") == "tracefit report"
    assert page.told("Runtime.exceptionThrown") == []
    assert [e for e in page.told("Log.entryAdded") if e["entry"]["level"] == "error"] == []
    assert [e for e in page.told("Runtime.consoleAPICalled") if e["type"] in ("error", "warning")] == []


def test_no_request_leaves_the_page(page, trained):
    asked = {e["request"]["url"] for e in page.told("Network.requestWillBeSent")}
    assert {url for url in asked if not url.startswith("data:")} == {(trained / "report.html").as_uri()}


def test_headings_figures_and_captions_have_text(page):
    assert page.ask(TEXTLESS) == []
    assert page.ask("document.querySelectorAll('svg').length") > 10


@pytest.mark.parametrize("check", [CUT_OFF, TEXT_OUTSIDE], ids=["blocks", "text in figures"])
def test_nothing_is_cut_off(page, check):
    assert page.ask(check) == []
    assert page.ask("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("check", [BLOCKS_OVERLAP, TEXTS_OVERLAP], ids=["blocks", "text in figures"])
def test_nothing_overlaps(page, check):
    assert page.ask(check) == []


def test_numbers_open_below_their_figure(page):
    page.ask("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.ask(CUT_OFF) == []
    assert page.ask(BLOCKS_OVERLAP) == []


def test_wide_screens_and_narrow_ones_have_their_own_drawing_of_the_engine(page):
    shown = """[...document.querySelectorAll('figure.wide svg')].filter(s => s.checkVisibility())
      .map(s => s.viewBox.baseVal.width)"""
    assert page.ask(shown) == [1080 if page.ask("innerWidth") > 1000 else 420]


PAPER_PX = 688
"""A4 less its margins of 14 mm."""


def test_on_paper_nothing_is_cut_off_and_what_is_folded_is_open(browser, trained):
    browser.open(trained / "report.html", width=PAPER_PX, paper=True)
    assert browser.ask(CUT_OFF) == []
    assert browser.ask(TEXT_OUTSIDE) == []
    wider = "[...document.querySelectorAll('.scroll')].filter(e => e.checkVisibility() && e.scrollWidth > e.clientWidth + 1).length"
    assert browser.ask(wider) == 0
    heights = (
        "[...document.querySelectorAll('details.folded .scroll')].map(e => e.getBoundingClientRect().height)"
    )
    assert min(browser.ask(heights)) > 20
    assert browser.ask("document.querySelector('nav').checkVisibility()") is False
    assert browser.ask("document.querySelector('.numbers').checkVisibility()") is False


def test_light_and_dark_differ_and_can_be_read(browser, trained):
    colours = []
    for dark in (False, True):
        browser.open(trained / "report.html", width=1400, dark=dark)
        style = "(s => [s.color, s.backgroundColor])(getComputedStyle(document.body))"
        colours.append([[int(n) for n in c[4:-1].split(",")] for c in browser.ask(style)])
    (ink, paper), (dark_ink, dark_paper) = colours
    assert sum(paper) - sum(ink) > 450
    assert sum(dark_ink) - sum(dark_paper) > 450
