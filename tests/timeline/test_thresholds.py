"""The numbers that decide, and the statistics that they are compared with: each has a name, a definition and an
origin."""

import ast
import re
from pathlib import Path

import numpy as np
import pytest

from scripts.make_docs import ORIGINS
from tracefit.timeline import thresholds
from tracefit.timeline.cached_prompts import SinglePrompts, largest_drop_sd, odd_prompts
from tracefit.timeline.evidence_statistics import fullness, skew, step_noise, unevenness

ROOM = Path(thresholds.__file__).parent
SOURCE = Path(thresholds.__file__).read_text()
SYMBOLS = Path(__file__).parents[2] / "docs/explanation/request-sums.md"


def _documented():
    body = ast.parse(SOURCE).body[1:]
    return [(a.targets[0].id, " ".join(b.value.value.split())) for a, b in zip(body[::2], body[1::2], strict=True)]


def test_every_threshold_says_what_it_decides_and_where_it_comes_from():
    documented = _documented()
    assert len(documented) > 50
    wrong = [name for name, text in documented if len(re.findall(rf"(?<=\. )({'|'.join(ORIGINS)})\b", text)) != 1]
    assert wrong == []


def test_every_threshold_decides_something():
    code = "".join(path.read_text() for path in ROOM.glob("*.py"))
    assert [name for name, _ in _documented() if f"thresholds.{name}" not in code] == []


def test_no_other_module_of_the_room_has_thresholds():
    """A float, or a whole number below a thousand, that stands at the top of a module decides something, or bounds a
    loop."""
    bounds = {
        "_COUNT_ROUNDS",
        "_MATCH_ROUNDS",
        "_TRIM_ROUNDS",
        "_WINDOW",
        "_SAMPLES",
        "_SLACK_STEPS",
        "_GAP_STEPS",
        "_SURE_VOTES",
    }
    found = {
        (path.name, target.id)
        for path in ROOM.glob("*.py")
        if path.name != "thresholds.py"
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(node.value.value, float) or (isinstance(node.value.value, int) and node.value.value < 1000)
    }
    assert {(module, name) for module, name in found if name not in bounds} == set()


def test_statistics_have_the_symbols_of_the_explanation():
    table = dict(re.findall(r"^\| \*(\w)\* \| ([^|]+) \|", SYMBOLS.read_text(), re.MULTILINE))
    assert len(table) == 12
    code = "".join(path.read_text() for path in ROOM.glob("*.py"))
    used = set(re.findall(r"\*([A-Za-z])\*", code)) | set(re.findall(r'^"""([A-Z]),? ', SOURCE, re.MULTILINE))
    assert used - {"A"} <= table.keys()
    # T and K are facts of a graph.
    assert table.keys() - {"T", "K"} <= set(re.findall(r"\*([A-Za-z])\*", code))


def _depth(body):
    inner = [
        getattr(node, name)
        for node in body
        for name in ("body", "orelse", "finalbody")
        if isinstance(node, ast.If | ast.For | ast.While | ast.With | ast.Try | ast.FunctionDef | ast.ExceptHandler)
        and getattr(node, name, None)
    ]
    return max((1 + _depth(each) for each in inner), default=0)


@pytest.mark.parametrize("path", sorted(ROOM.glob("*.py")), ids=lambda path: path.stem)
def test_no_function_nests_deeper_than_three(path):
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    assert {f.name: _depth(f.body) for f in functions if _depth(f.body) > 3} == {}


# -- the statistics, by hand ------------------------------------------------------------------------------


def test_unevenness_weighs_by_steps():
    """Of 1,000 steps a tenth has up to 80 tokens, half up to 100 and nine tenths up to 120: (120 - 80) / 100."""
    read, steps = np.array([120.0, 80.0, 100.0]), np.array([300.0, 200.0, 500.0])
    assert unevenness(read, steps, 500) == pytest.approx(0.4)
    assert unevenness(read, steps, 1001) is None
    assert unevenness(np.zeros(3), steps, 500) is None


def test_fullness_is_the_share_of_steps_with_about_the_most_requests():
    """20 of 40 intervals with 100 or 96 requests, and 20 with 94; at most 100 run, and 95 are about as many."""
    run = np.repeat([100.0, 96.0, 94.0], (10, 10, 20))
    found = fullness(run, np.full(40, 50.0), np.full(40, 5.0))
    assert found is not None
    assert found == pytest.approx((0.5, 0.0))


def test_noise_is_that_of_short_intervals():
    """Errors of 0.1 and -0.1 have a median absolute deviation of 0.1; intervals of more than four steps do not
    count."""
    off = np.r_[np.tile([0.1, -0.1], 20), np.full(50, 5.0)]
    steps = np.r_[np.full(40, 2.0), np.full(50, 9.0)]
    assert step_noise(off, steps) == pytest.approx(1.4826 * 0.1)
    assert step_noise(off[40:], steps[40:]) is None


def test_skew_compares_the_two_sides():
    """The longer side of the errors is three times the shorter one; of four steps each error counts twice."""
    side = np.linspace(0.0, 1.0, 101)
    found = skew(np.r_[-side[1:], 3 * side] / 2, np.full(201, 4.0))
    assert found.ratio == pytest.approx(3.0)
    assert found.longer == pytest.approx(2.4)


def test_a_prompt_off_the_line_of_its_neighbours_is_odd():
    """Times grow by 1 us a token with 1 us of noise: the third is 10 us late, and puts its neighbours 5 us off a line
    through it."""
    length = np.array([10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0])
    prompts = SinglePrompts(length, length + np.array([0, 0, 0, 10, 0, 0, 0]), np.full(7, 1.0), 0.0)
    # Off by 5, sd of 1 and two halves: sqrt(1.5), so 4.1 standard deviations.
    assert odd_prompts(prompts).tolist() == [False, True, True, True, False]


def test_a_drop_counts_in_standard_errors():
    """Groups of 20 at 10 ± 1 and at 8 ± 1: each median has an error of sqrt(pi / 2) * 1.4826 / sqrt(20)."""
    times = np.r_[np.tile([9.0, 11.0], 10), np.tile([7.0, 9.0], 10)]
    error = np.sqrt(np.pi / 2) * 1.4826 / np.sqrt(20)
    assert largest_drop_sd(times) == pytest.approx(2 / (np.sqrt(2) * error), rel=1e-4)
    assert largest_drop_sd(np.sort(times)) == 0.0


def test_the_page_of_thresholds_lists_them_all():
    page = (Path(__file__).parents[2] / "docs/reference/thresholds.md").read_text()
    assert [name for name, _ in _documented() if f"| `{name}` |" not in page] == []
    assert sum(row.startswith("| `") for row in page.splitlines()) == len(_documented())
