"""CONTRIBUTING says what is there: rooms, files, targets of the Makefile, commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tracefit.coefficients.workload import STEP_COLUMNS
from tracefit.features.sets import BUILT_IN
from tracefit.features.targets import TARGETS
from tracefit.fit.alpha import FORMS
from tracefit.tables.schema import REQUESTS, TIMELINE

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
PACKAGE = ROOT / "pipeline/tracefit"
ROOMS = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}


def test_it_opens_with_five_lines():
    assert re.findall(r"^(\d)\. ", TEXT.partition("\n## ")[0], re.MULTILINE) == list("12345")


def test_every_room_is_in_the_layout():
    assert set(re.findall(r"^\| `(\w+)/` \|", TEXT, re.MULTILINE)) == ROOMS


def test_every_room_is_in_the_picture():
    page = (ROOT / "docs/explanation/architecture.md").read_text()
    (picture,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    assert {room for room in ROOMS if not re.search(rf"\b{room}\b", picture)} == set()


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"`((?:pipeline|docs|tests|fixtures)/[\w./-]*)`", TEXT)))
)
def test_the_files_it_names_are_there(path):
    assert (ROOT / path).exists()


def test_the_files_a_json_line_passes_are_there():
    (sentence,) = re.findall(r"A JSON line becomes rows in (.*?), in this order", TEXT, re.DOTALL)
    files = re.findall(r"`([\w/]+\.py)`", sentence)
    assert len(files) > 3
    assert [file for file in files if not (PACKAGE / file).exists()] == []


def test_the_make_targets_it_names_are_there():
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {word for words in re.findall(r"`make ([a-z -]+)", TEXT) for word in words.split()}
    assert named - targets == set()


def test_what_a_target_declares_is_in_the_files_named_beside_it():
    for target in TARGETS:
        assert target.feature_set in BUILT_IN
        assert set(target.forms) <= FORMS.keys()
        assert {target.column, target.begins, target.step} <= set(REQUESTS.names)


def test_the_columns_that_follow_from_a_described_step_are_declared():
    assert set(STEP_COLUMNS) - set(TIMELINE.names) == set()
