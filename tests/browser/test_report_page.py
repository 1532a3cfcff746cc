"""The report in a real browser: nothing fails, nothing is fetched, figures answer a mouse, nothing overlaps or is cut
off."""

from __future__ import annotations

import re

import pytest

from tracefit.coefficients.files import read_evaluation

pytestmark = pytest.mark.browser
WIDTHS = (390, 1280)

TEXTLESS = """
[...document.querySelectorAll('h1,h2,h3,h4,summary,th:not(:empty),.look,dt,dd')]
  .filter(e => !e.textContent.trim()).map(e => e.outerHTML.slice(0, 100))
"""
CUT_OFF = """
[...document.querySelectorAll('main, main *, header *')].filter(e => !e.closest('.scroll') && !e.closest('.plot *') && e.checkVisibility())
  .filter(e => { const r = e.getBoundingClientRect(); return r.width && (r.right > innerWidth + 1 || r.left < -1); })
  .map(e => e.outerHTML.slice(0, 100))
"""
TEXT_OUTSIDE = """
[...document.querySelectorAll('.plot')].filter(e => e.checkVisibility()).flatMap(p => { const b = p.getBoundingClientRect();
  return [...p.querySelectorAll('svg text')].filter(t => t.textContent && t.getBoundingClientRect().width).filter(t => {
    const r = t.getBoundingClientRect();
    return r.left < b.left - 2 || r.right > b.right + 2 || r.top < b.top - 2 || r.bottom > b.bottom + 2; })
  .map(t => p.dataset.figure + ': ' + t.textContent); })
"""
LEGEND_OVER_DATA = """
[...document.querySelectorAll('.plot')].filter(e => e.checkVisibility()).filter(p => {
  const legend = p.querySelector('.legend .bg'), data = p.querySelector('.bglayer rect, .draglayer .nsewdrag');
  return legend && data && legend.getBoundingClientRect().bottom > data.getBoundingClientRect().top + 3; })
  .map(p => p.dataset.figure)
"""
BLOCKS_OVERLAP = """
(() => { const all = [...document.querySelectorAll('main > *, .parts > *, figure > *')].filter(e => e.checkVisibility()), bad = [];
  for (const a of all) for (const b of all) if (a !== b && a.parentElement === b.parentElement) {
    const p = a.getBoundingClientRect(), q = b.getBoundingClientRect();
    const w = Math.min(p.right, q.right) - Math.max(p.left, q.left), h = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
    if (w > 1 && h > 1) bad.push(a.outerHTML.slice(0, 60) + ' / ' + b.outerHTML.slice(0, 60)); }
  return bad; })()
"""


UNFOLD = "document.querySelectorAll('details.section').forEach(d => d.open = true)"
DRAWN = "[...document.querySelectorAll('.plot')].filter(p => p.querySelector('.main-svg')).length"
PLOTS = "document.querySelectorAll('.plot').length"


def _draw_all(browser):
    """Bring every figure near the screen once, and wait until it is drawn."""
    browser.ask(UNFOLD)
    for number in range(browser.ask(PLOTS)):
        plot = f"document.querySelectorAll('.plot')[{number}]"
        browser.ask(f"{plot}.scrollIntoView({{block: 'center'}})")
        browser.until(f"!!{plot}.querySelector('.main-svg')")
    browser.ask("scrollTo(0, 0)")


@pytest.fixture(
    params=[(w, d) for w in WIDTHS for d in (False, True)],
    ids=lambda p: f"{p[0]}-{'dark' if p[1] else 'light'}",
)
def page(request, browser, trained):
    width, dark = request.param
    browser.open(trained / "report.html", width=width, dark=dark)
    return browser


def test_it_opens_without_an_error(page):
    _draw_all(page)
    assert page.ask("document.title") == "meta-llama/Llama-2-7b-hf | tracefit report"
    assert page.ask(DRAWN) == page.ask(PLOTS) > 10
    assert page.events_of("Runtime.exceptionThrown") == []
    assert [e for e in page.events_of("Log.entryAdded") if e["entry"]["level"] in ("error", "warning")] == []
    assert [e for e in page.events_of("Runtime.consoleAPICalled") if e["type"] in ("error", "warning")] == []


def test_no_request_leaves_the_page(page, trained):
    _draw_all(page)
    asked = {e["request"]["url"] for e in page.events_of("Network.requestWillBeSent")}
    assert {u for u in asked if not u.startswith(("data:", "blob:"))} == {(trained / "report.html").as_uri()}


def test_headings_and_captions_have_text(page):
    assert page.ask(TEXTLESS) == []


def test_nothing_is_cut_off_or_overlaps(page):
    _draw_all(page)
    for check in (CUT_OFF, TEXT_OUTSIDE, LEGEND_OVER_DATA, BLOCKS_OVERLAP):
        assert page.ask(check) == []
    assert page.ask("document.documentElement.scrollWidth <= innerWidth")


def test_numbers_open_below_their_figure(page):
    page.ask("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.ask(CUT_OFF) == []
    assert page.ask(BLOCKS_OVERLAP) == []


FIRST = "document.querySelector('.plot[data-figure$=step-times]')"


def test_hovered_step_shows_its_prediction(browser, trained):
    browser.open(trained / "report.html", width=1280)
    browser.ask(f"{FIRST}.scrollIntoView({{block: 'center'}})")
    browser.until(f"!!{FIRST}.querySelector('.points path')")
    place = (
        f"(r => [r.x + r.width / 2, r.y + r.height / 2])({FIRST}.querySelector('.points path').getBoundingClientRect())"
    )
    x, y = browser.ask(place)
    for shift in (0, 0.5):
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + shift, y=y)
    label = f"[...{FIRST}.querySelectorAll('.hoverlayer text')].map(t => t.textContent).join(' ')"
    browser.until(f"{label}.length > 0")
    shown = browser.ask(label)
    for words in ("measured, ms", "predicted, ms", "requests", "prompt tokens", "generated tokens"):
        assert f"{words}: " in shown


def test_dragging_zooms_and_the_legend_hides_a_line(browser, trained):
    browser.open(trained / "report.html", width=1280)
    browser.ask(f"{FIRST}.scrollIntoView({{block: 'center'}})")
    browser.until(f"!!{FIRST}.querySelector('.nsewdrag')")
    area = f"(r => [r.x, r.y, r.width, r.height])({FIRST}.querySelector('.nsewdrag').getBoundingClientRect())"
    left, top, width, height = browser.ask(area)
    before = browser.ask(f"{FIRST}.layout.xaxis.range")
    middle = top + height / 2
    press = {"button": "left", "clickCount": 1}
    browser.call("Input.dispatchMouseEvent", type="mousePressed", x=left + 0.2 * width, y=middle, **press)
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + 0.5 * width, y=middle, button="left")
    browser.call("Input.dispatchMouseEvent", type="mouseReleased", x=left + 0.5 * width, y=middle, **press)
    browser.until(f"{FIRST}.layout.xaxis.range[0] > {before[0]}")
    low, high = browser.ask(f"{FIRST}.layout.xaxis.range")
    assert (high - low) / (before[1] - before[0]) == pytest.approx(0.3, abs=0.02)
    toggle = (
        "(r => [r.x + r.width / 2, r.y + r.height / "
        f"2])({FIRST}.querySelectorAll('.legendtoggle')[1].getBoundingClientRect())"
    )
    x, y = browser.ask(toggle)
    browser.call("Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, **press)
    browser.call("Input.dispatchMouseEvent", type="mouseReleased", x=x, y=y, **press)
    browser.until(f"{FIRST}.data[1].visible === 'legendonly'")


def test_a_link_into_a_folded_section_opens_it(browser, trained):
    browser.open(trained / "report.html", width=1280)
    section = "document.querySelector('details.section')"
    assert browser.ask(f"{section}.open") is False
    browser.ask(f"location.hash = {section}.querySelector('[id]').id")
    browser.until(f"{section}.open")


PAPER_PX = 688
"""A4 less its margins of 14 mm."""


def test_on_paper_nothing_is_cut_off_and_what_is_folded_is_open(browser, trained):
    browser.open(trained / "report.html", width=PAPER_PX, paper=True, dark=True)
    browser.until(f"{DRAWN} === {PLOTS}")
    assert browser.ask(CUT_OFF) == []
    assert browser.ask(TEXT_OUTSIDE) == []
    wider = (
        "[...document.querySelectorAll('.scroll')].filter(e => e.checkVisibility() && e.scrollWidth > "
        "e.clientWidth + 1).length"
    )
    assert browser.ask(wider) == 0
    heights = "[...document.querySelectorAll('details.folded .scroll')].map(e => e.getBoundingClientRect().height)"
    assert min(browser.ask(heights)) > 20
    assert browser.ask("document.querySelector('nav').checkVisibility()") is False
    assert browser.ask("document.querySelector('.numbers').checkVisibility()") is False
    assert _brightness(browser.ask(INK)) < 200, "dark ink on paper, whatever the screen's colours"


INK = f"getComputedStyle({FIRST}.querySelector('.xtitle')).fill"


def _brightness(colour):
    return sum(int(n) for n in colour[4:-1].split(","))


def test_figures_and_page_follow_the_colours_of_the_screen(browser, trained):
    """Light, then dark in the same page: the texts of figures change with it."""
    browser.open(trained / "report.html", width=1280)
    browser.ask(f"{FIRST}.scrollIntoView({{block: 'center'}})")
    browser.until(f"!!{FIRST}.querySelector('.xtitle')")
    paper = "getComputedStyle(document.body).backgroundColor"
    light_ink = browser.ask(INK)
    light = _brightness(light_ink), _brightness(browser.ask(paper))
    scheme = {"name": "prefers-color-scheme", "value": "dark"}
    browser.call("Emulation.setEmulatedMedia", media="screen", features=[scheme])
    browser.until(f"{INK} !== '{light_ink}'")
    dark = _brightness(browser.ask(INK)), _brightness(browser.ask(paper))
    assert light[1] - light[0] > 450
    assert dark[0] - dark[1] > 450


RATE, LIMIT = "document.forms[0].elements.rate", "document.forms[0].elements.limit"
SAID = "document.forms[0].elements.{}.value"


def _set(browser, field, value):
    browser.ask(f"{field}.value = '{value}', {field}.dispatchEvent(new Event('input', {{bubbles: true}}))")


def test_a_rate_and_an_objective_move_over_the_curves(browser, trained):
    """At replayed rates and at limits that are replayed latencies, the page says the numbers of evaluation.json."""
    (deployment,) = read_evaluation(trained / "evaluation.json").deployments
    browser.open(trained / "report.html", width=1280)
    assert browser.ask(f"{LIMIT}.value") == "", "no objective that nobody set"
    assert browser.ask(SAID.format("largest")) == ""
    low, high = deployment.rates[1], deployment.rates[-2]
    for point in (low, high):
        _set(browser, RATE, point.rate_per_s)
        p50, p90, p99 = (point.latency(f"ttft_p{q}_ms").value for q in (50, 90, 99))
        said = re.search(r"TTFT ([\d.,]+) / ([\d.,]+) / ([\d.,]+),", browser.ask(SAID.format("latencies")))
        numbers = [float(n.replace(",", "")) for n in said.groups()]
        assert numbers == pytest.approx([p50, p90, p99], rel=0.006)
    _set(browser, "document.forms[0].elements.percentile", "E2E P50")
    _set(browser, LIMIT, high.latency("e2e_p50_ms").value)
    rate = float(re.search(r"up to ([\d.,]+) requests/s", browser.ask(SAID.format("largest")))[1].replace(",", ""))
    assert rate == pytest.approx(high.rate_per_s, rel=0.006)
    _set(browser, LIMIT, 0.001)
    assert browser.ask(SAID.format("largest")).endswith("at none of these rates")
    assert browser.events_of("Runtime.exceptionThrown") == []


def test_marks_of_the_figure_follow(browser, trained):
    (deployment,) = read_evaluation(trained / "evaluation.json").deployments
    browser.open(trained / "report.html", width=1280)
    plot = "document.querySelector('.plot[data-figure$=rates]')"
    browser.ask(f"{plot}.scrollIntoView()")
    browser.until(f"!!{plot}.querySelector('.main-svg')")
    at = deployment.rates[2].rate_per_s
    _set(browser, RATE, at)
    browser.until(f"Math.abs({plot}.layout.shapes[0].x0 - {at}) < 1e-9")
    assert browser.ask(f"{plot}.layout.shapes[1].visible") is False
    _set(browser, LIMIT, 25)
    browser.until(f"{plot}.layout.shapes[1].visible === true && {plot}.layout.shapes[1].y0 === 25")
