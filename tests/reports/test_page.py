"""The page: whole, self-contained, readable by machines that read aloud, and safe from what names hold."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from plotly.graph_objects import Figure as PlotlyFigure

from tracefit.coefficients.files import read_coefficients, read_evaluation
from tracefit.commands.report import report, report_of
from tracefit.reports.document import (
    Bullets,
    Figure,
    Report,
    Section,
    Table,
    UseVerdict,
    Verdicts,
    markdown_text,
)
from tracefit.reports.figures.elements import name_text
from tracefit.reports.page import html_page
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
def text(trained):
    return (trained / "report.html").read_text()


@pytest.fixture(scope="module")
def page(text):
    return _Page(text)


def _without_scripts(text):
    return re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)


def _drawn(text):
    """Return what the page gives to its script: figures by name, and the two templates."""
    (data,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', text, re.DOTALL)
    return json.loads(data)


def test_the_facts_for_a_decision_come_first(text, page):
    """Subject, the sentence, what the server did in numbers, the four uses, what to record, folded, and the figures, in
    that order."""
    (title,) = page.all("h1")
    assert title["text"] == "meta-llama/Llama-2-7b-hf"
    marks = [
        '<p class="subject">',
        '<p class="lead">',
        "<table>",
        '<dl class="verdicts">',
        '<details class="section">',
    ]
    marks += ['<pre class="scroll commands"', "<figure id="]
    places = [text.index(mark) for mark in marks]
    assert places == sorted(places)
    uses = [d["text"].split()[0] for d in page.all("dt")]
    assert uses == ["Simulation", "Capacity", "Autoscaling", "Alerting"]
    lead = next(p["text"] for p in page.all("p") if p["attrs"].get("class") == "lead")
    assert re.match(r"One server carried [\d,.]+ requests/s over [\d.]+ s and can serve [\d.]+ ", lead)
    assert re.search(r"Step times are typically within [\d.]+\s% \(nine in ten within [\d.]+\s%\), ", lead)


def test_commands_to_copy_are_whole_and_as_in_the_evaluation(trained, page, text):
    (deployment,) = json.loads((trained / "evaluation.json").read_text())["deployments"]
    lines = deployment["record"]["command"]
    (shown,) = re.findall(r'<pre class="scroll commands" tabindex="0"><code>(.*?)</code></pre>', text, re.DOTALL)
    assert html.unescape(shown).splitlines() == lines
    assert sum(line.startswith("  vllm bench serve ") for line in lines) == len(deployment["record"]["stretches"])
    assert "```bash\n" + "\n".join(lines) + "\n```\n" in (trained / "report.md").read_text()


def test_waits_of_microseconds_are_no_facts_for_a_decision(trained):
    """A model of a wait that is worse than the median is named with its errors, and not before the figures."""
    evaluation = read_evaluation(trained / "evaluation.json")
    files = [read_coefficients(trained / "models" / f"{kind}.json") for kind in ("alpha", "beta")]
    (one,) = evaluation.deployments
    poor = replace(one.models["alpha.queue_wait"], skill=-0.1)
    assert poor.is_negligible
    worse = one.model_copy(update={"models": {**one.models, "alpha.queue_wait": poor}})
    made = report_of(evaluation.model_copy(update={"deployments": (worse,)}), *files, None).report
    assert not [part for part in made.parts if isinstance(part, str) and "worse than the training median" in part]
    assert "worse than the training median" not in markdown_text(made)
    long = replace(poor, holdout=replace(poor.holdout, mae=9_000.0))
    felt = one.model_copy(update={"models": {**one.models, "alpha.queue_wait": long}})
    made = report_of(evaluation.model_copy(update={"deployments": (felt,)}), *files, None).report
    assert (
        "`alpha.queue_wait` is worse than the training median" in markdown_text(made).split("Errors on the hold-out")[1]
    )


def test_every_section_is_linked_and_every_link_leads_somewhere(page):
    ids = [e["attrs"]["id"] for e in page.elements if "id" in e["attrs"]]
    assert len(ids) == len(set(ids))
    targets = [a["attrs"]["href"] for a in page.all("a")]
    assert targets
    assert {t.removeprefix("#") for t in targets} <= set(ids)


def test_figures_are_described_in_words_and_numbers(page, text):
    figures = page.all("figure")
    assert len(figures) > 10
    assert {f["attrs"]["id"] for f in figures} == set(_drawn(text)["figures"])
    assert all("Look for" in f["text"] for f in figures)
    details = [d for d in page.all("details") if d["attrs"].get("class") == "numbers"]
    assert len(page.all("figcaption")) == len(details) == len(figures)
    assert all(re.search(r"[0-9]", d["text"]) for d in details)
    labels = [d["attrs"]["aria-label"] for d in page.all("div") if d["attrs"].get("role") == "img"]
    assert len(labels) == len(figures)
    assert all(labels)


def test_the_figures_a_reader_asks_for_are_there_in_order(page):
    names = [re.sub(r"^.*tp1-[0-9a-f]{8}-", "", f["attrs"]["id"]) for f in page.all("figure")]
    assert names[:4] == ["replay", "rates", "step-times", "error-by-load"]
    assert names[4:7] == ["step-breakdown", "first-token", "latency-load"]
    assert names[7].startswith("engine-busy")


def test_a_step_shows_its_batch(text):
    figures = _drawn(text)["figures"]
    dots = next(f for name, f in figures.items() if name.endswith("step-times"))["data"][0]
    for words in ("measured, ms", "predicted, ms", "requests", "prompt tokens", "generated tokens"):
        assert f"{words}: %{{customdata[" in dots["hovertemplate"]
    assert len(dots["customdata"]) == len(dots["x"]) > 50
    assert [row[0] for row in dots["customdata"]] == pytest.approx(dots["y"], rel=1e-3)


def test_plotly_takes_the_figures_as_they_are(text):
    """The library refuses a property that it does not know; the browser would ignore it."""
    drawn = _drawn(text)
    for one in drawn["figures"].values():
        for template in drawn["templates"].values():
            PlotlyFigure(one["data"], {**one["layout"], "template": template})


def test_nothing_is_fetched_and_only_its_own_scripts_run(text):
    # Commands to copy have the address of a server.
    outside = re.sub(r'<pre class="scroll commands".*?</pre>', "", _without_scripts(text), flags=re.DOTALL)
    assert not re.findall(r"https?://|//[a-z]|@import|url\(|\son\w+=", outside)
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.replace("&#39;", "'").split(";"))
    assert rules["default-src"] == "'none'"
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    hashes = {base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts}
    assert set(rules["script-src"].split()) == {f"'sha256-{h}'" for h in hashes}
    assert len(scripts) == 2
    assert len(text.encode()) < 6_000_000


def test_all_lines_of_markdown_are_on_the_page(trained, page):
    body = _words(page.all("main")[0]["text"])
    for line in (trained / "report.md").read_text().splitlines():
        if line == "| use | verdict | reason |" or line.startswith("```"):
            continue  # the page has cards, and marks of its own around commands
        if line.startswith("|"):
            parts = re.split(r"(?<!\\)\|", line)[1:-1]
        else:
            parts = line.split(".** ", 1) if line.startswith("**") else [line.lstrip("#- ").removesuffix(":")]
        for words in parts:
            assert set(words.strip()) <= set("-:") or _words(words) in body


def _words(text):
    return " ".join(re.sub(r"[`*]", "", text).split()).lower()


def _page_of(*parts):
    return html_page(Report("r", parts=parts))


def test_sections_of_one_title_have_different_anchors():
    titles = ("Deployment `a`", "Deployment `b`", "`日本`")
    page = _Page(_page_of(*(Section(t, (Section("Errors", ()),)) for t in titles)))
    ids = [h["attrs"]["id"] for tag in ("h2", "h3") for h in page.all(tag)]
    assert len(ids) == 6 == len(set(ids))
    assert {a["attrs"]["href"] for a in page.all("a")} == {f"#{h['attrs']['id']}" for h in page.all("h2")}, (
        "the first level is listed"
    )


def test_bold_may_hold_code_and_stars_that_do_not_pair_are_stars():
    text = _page_of("**Run `a_b` was *not* overloaded** (`x**y`): *it* is", "2 ** 3 of `n` is `8`")
    assert (
        "<strong>Run <code>a_b</code> was <em>not</em> overloaded</strong> (<code>x**y</code>): <em>it</em> is" in text
    )
    assert "<p>2 ** 3 of <code>n</code> is <code>8</code></p>" in text


def test_numbers_are_right_aligned_and_details_are_folded():
    table = Table(("name", "n", "MAPE %"), (("a", "1,234", "-"), ("b", "<0.01", "2.5")), folded="Few look")
    text = _page_of(table)
    assert '<th scope="col">name</th><th scope="col" class="n">n</th><th scope="col" class="n">MAPE\xa0%</th>' in text
    assert '<td>b</td><td class="n">&lt;0.01</td><td class="n">2.5</td>' in text
    assert '<details class="folded"><summary>Few look</summary>' in text
    assert "<details" not in _page_of(Table(("a",), (("b",),)))


def test_a_cell_beside_prose_names_its_column():
    """A narrow screen shows such a table row by row, without its head."""
    text = _page_of(Table(("deployment", 'use "x"', "reason"), (("a", "**no**", "why " * 20),)))
    assert '<td class="answer no" data-head="use &#34;x&#34;">' in text
    assert '<td class="long" data-head="reason">' in text
    assert ' data-head="' not in _page_of(Table(("a", "b"), (("1", "2"),)))


@pytest.mark.slow
def test_a_page_of_many_deployments_stays_small(trained):
    """Fewer points are drawn first, then figures of the last deployments are left out, and that is said."""
    evaluation = read_evaluation(trained / "evaluation.json")
    alpha, beta = (read_coefficients(trained / "models" / f"{k}.json") for k in ("alpha", "beta"))
    store = TableStore(trained / "tables")

    def page_below(size):
        return html_page(report_of(evaluation, alpha, beta, store, page_bytes=size).report)

    full = page_below(6_000_000)
    thinned = page_below(len(full.encode()) - 1)
    assert len(thinned) < len(full)
    assert thinned.count("<figure") == full.count("<figure")
    assert "Figures of this deployment are left out" not in thinned
    bare = page_below(100_000)
    assert len(bare.encode()) <= 100_000, "without figures there is no plotly"
    assert "Figures of this deployment are left out" in bare
    assert "<figure" not in bare


HOSTILE = "</script><script>alert(1)</script><!--\u2028<a href='javascript:alert(1)'>x</a>"


def test_names_cannot_break_out():
    """A run, a model or a feature may be named anything: in a text, a table, a figure, a heading, a verdict."""
    table = Table((HOSTILE,), ((HOSTILE,),), folded=HOSTILE)
    trace = {"type": "scatter", "x": [1], "y": [1], "name": HOSTILE}
    figure = Figure(HOSTILE, "f", HOSTILE, HOSTILE, table, (trace,), {"title": {"text": HOSTILE}}, note=HOSTILE)
    verdicts = Verdicts((UseVerdict(HOSTILE, "no", HOSTILE),))
    section = Section(HOSTILE, (f"`{HOSTILE}` **{HOSTILE}**", figure, table, Bullets((HOSTILE,)), verdicts))
    text = html_page(Report(HOSTILE, HOSTILE, (section,), HOSTILE))
    assert len(re.findall("<script", _head_and_body(text))) == 3, "figures, plotly, the page's own"
    assert "<a href='javascript" not in text
    assert "\u2028" not in _raw_data(text)
    page = _Page(text)
    assert page.all("h1")[0]["text"] == HOSTILE
    assert _drawn(text)["figures"][HOSTILE]["data"][0]["name"] == HOSTILE


def _head_and_body(text):
    """Return the page without the text of plotly."""
    return text[: text.index("plotly.js v")] + text[text.rindex("</script>", 0, text.rindex("<script>")) :]


def _raw_data(text):
    return re.findall(r'id="figures">(.*?)</script>', text, re.DOTALL)[0]


def test_names_are_no_codes_to_a_terminal_that_prints_the_page():
    name = "a\x1b[31m\x07\x9b"
    table = Table((name,), ((name,),), folded=name)
    section = Section(name, (name, f"**{name}**", Figure("f", "f", name, name, table, (), {}), Bullets((name,))))
    text = html_page(Report(name, name, (section,), name))
    assert re.findall(r"[\x1b\x07\x9b]", _head_and_body(text)) == []
    assert _Page(text).all("h1")[0]["text"] == r"a\x1b[31m\x07\x9b"


def test_names_in_figures_are_no_links():
    """plotly makes links of its own out of `<a href=…>` in the texts of a figure."""
    assert name_text("<a href='//evil'>x</a> & \x1b[31m") == "&lt;a href='//evil'&gt;x&lt;/a&gt; &amp; \\x1b[31m"


@pytest.mark.usefixtures("whole_pages")
def test_a_second_report_gives_the_bytes_of_the_first(trained, tmp_path):
    result = report(trained, out=tmp_path)
    assert sorted(p.name for p in result.files) == ["report.html", "report.md"]
    for file in result.files:
        assert file.read_bytes() == (trained / file.name).read_bytes()


def test_without_tables_figures_of_the_files_are_drawn(trained, tmp_path):
    (tmp_path / "models").mkdir()
    for name in ("evaluation.json", "models/alpha.json", "models/beta.json"):
        (tmp_path / name).write_bytes((trained / name).read_bytes())
    report(tmp_path)
    text = (tmp_path / "report.html").read_text()
    titles = {h["text"] for h in _Page(text).all("h3")}
    assert {"Errors of step times by load", "TTFT, predicted and measured"} <= titles
    assert not any("against load" in t or "over time" in t or "The engine of" in t for t in titles)
    assert "no tables beside the evaluation" in text
    assert '<dl class="verdicts">' in text


WITHOUT_EXTRA = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("plotly", "jinja2"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
from tracefit.cli import main
main()
"""


@pytest.mark.slow
def test_without_the_extra_there_is_markdown(trained, tmp_path):
    command = [sys.executable, "-c", WITHOUT_EXTRA, "report", trained, "--out", tmp_path, "--json"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [Path(f).name for f in json.loads(done.stdout)["files"]] == ["report.md"]
    assert (tmp_path / "report.md").read_bytes() == (trained / "report.md").read_bytes()
    assert not (tmp_path / "report.html").exists()
    (line,) = done.stderr.splitlines()
    assert "pip install 'tracefit[report]'" in line


def test_a_table_leads_to_deployments_of_which_one_is_open():
    sections = tuple(Section(f"Deployment {n}", ("text",), folded=n > 1, is_choice=True) for n in (1, 2))
    table = Table(("deployment", "simulation"), (("`a`", "yes"), ("`b`", "no")), leads_to=sections)
    text = html_page(Report("t", "", (table, *sections)))
    assert '<td><a href="#section-deployment-2"><code>b</code></a></td>' in text
    assert re.findall(r'<details class="section choice"( open)?>', text) == [" open", ""]
