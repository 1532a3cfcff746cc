"""Results in a notebook: tables, and figures by name."""

from __future__ import annotations

import ast
import json
import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

import tracefit
from tracefit.reports.trained import RunResult, TrainResult
from tracefit.results.models import ModelSummary
from tracefit.results.notebook import Shown
from tracefit.results.traces import IngestResult


@pytest.fixture
def result(trained):
    return TrainResult(
        trained / "models",
        (),
        trained / "evaluation.json",
        trained / "report.md",
        (),
        tables=trained / "tables",
    )


@pytest.mark.slow
def test_a_result_draws_the_figures_of_the_report(result):
    figure = result.plot("step-breakdown")
    assert figure.layout.title.text == "What a step costs"
    assert "every step" in {trace.name for trace in figure.data}
    assert result.plot().layout.title.text.startswith("Step times over time")


def test_models_and_evaluation_of_a_run_are_frames(trained, result):
    error = ModelSummary("beta.cycle_time", "a.b.tp1", 2.5, 4.0, 3.0, 10.0, 40.0, 9.0, 0.75, 90, 30)
    done = RunResult(IngestResult(trained / "tables", (), (), ()), replace(result, fitted=(error,)), trained)
    written = json.loads((trained / "models/beta.json").read_text())["models"]
    steps = done.models.filter(model="beta.cycle_time", part="line", term="intercept")
    assert steps["value"].item() == next(m["intercept"]["value"] for m in written if m["name"] == "beta.cycle_time")
    assert done.evaluation.select("name", "holdout_mdape_pct").rows() == [("beta.cycle_time", 2.5)]


def test_an_unknown_figure_is_answered_with_all_names(result):
    with pytest.raises(tracefit.UsageError, match=r"did you mean timeline.*error-by-load, step-breakdown, first-token"):
        result.plot("timelin")


def test_the_figures_that_the_documentation_names_are_there(result):
    page = (Path(__file__).parents[2] / "docs/reference/api.md").read_text()
    named = re.findall(r"^\| `([a-z0-9._-]+)` \|", page[page.index("## Figures") :], re.MULTILINE)
    with pytest.raises(tracefit.UsageError) as error:
        result.plot("all of them")
    known = str(error.value).split("figures: ")[1].split(", ")
    assert set(named) - set(known) == {"runs"}, "there is one run here"
    assert len(named) > 8


@pytest.mark.slow
def test_a_deployment_is_chosen_by_a_part_of_its_id_or_a_run(result):
    assert result.plot("timeline", deployment="llama").data == result.plot("timeline", deployment="busy").data
    with pytest.raises(tracefit.UsageError, match="no deployment other"):
        result.plot("timeline", deployment="other")


def test_without_plotly_the_error_says_what_to_install(result, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.delitem(sys.modules, "tracefit.reports.page", raising=False)
    for name in [n for n in sys.modules if n.startswith("plotly.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(tracefit.TracefitError, match=r"pip install 'tracefit\[report\]'"):
        result.plot()


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    error: float | None


@dataclass(frozen=True, slots=True)
class _Result(Shown):
    folder: Path
    count: int
    rows: tuple[_Row, ...]
    verdicts: dict[str, dict[str, str]] = field(default_factory=dict)
    nothing: tuple[str, ...] = ()


def test_a_result_is_shown_as_tables():
    shown = _Result(Path("out"), 12345, (_Row("<b>", 0.5), _Row("c", None)), {"s": {"alerting": "no"}})._repr_html_()
    assert "<td>folder</td><td>out</td>" in shown
    assert "<td>count</td><td>12,345</td>" in shown
    assert "nothing" not in shown
    assert "<th>name</th><th>error</th>" in shown
    assert "<td>&lt;b&gt;</td><td>0.5</td>" in shown
    assert "<td>c</td><td></td>" in shown
    assert "<th>alerting</th>" in shown
    assert "<td>s</td><td>no</td>" in shown


def test_results_of_the_commands_are_shown(result, trained):
    for one in (result, tracefit.requests(trained), tracefit.inspect(trained)):
        assert one._repr_html_().startswith("<table>")


@pytest.mark.slow
def test_libraries_of_the_extra_are_imported_on_demand():
    package = Path(tracefit.__file__).parent
    libraries, page = ("plotly", "jinja2", "markupsafe"), "tracefit.reports.page"
    for path in package.rglob("*.py"):
        at_once = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.Import | ast.ImportFrom)]
        names = [n.module or "" if isinstance(n, ast.ImportFrom) else n.names[0].name for n in at_once]
        assert page not in names
        assert path.name == "page.py" or not any(n.split(".")[0] in libraries for n in names), path
