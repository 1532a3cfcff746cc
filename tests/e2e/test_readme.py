"""README.md is short, and its commands print what stands there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from scripts.make_readme import filled, shortened

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()


def test_a_stranger_reads_it_in_two_minutes():
    assert len(TEXT.encode()) <= 7_000


@pytest.mark.slow
def test_its_commands_print_what_stands_there(tmp_path):
    assert filled(TEXT, tmp_path, ROOT / "models") == TEXT


def test_left_out_lines_are_shown_as_such():
    assert shortened(["a 1", "b", "c", "a 2", "d"], "^a") == ["a 1\n", "…\n", "a 2\n"]


def test_errors_of_step_times_are_those_of_the_shipped_models():
    errors = [
        round(deployment["models"]["beta.cycle_time"]["holdout"]["mdape_pct"], 1)
        for deployment in json.loads((ROOT / "models/evaluation.json").read_text())["deployments"]
        if ".no-gpu." not in deployment["deployment_id"]
    ]
    low, high = re.search(r"step times on real GPUs \| ([\d.]+) to ([\d.]+) % median", TEXT).groups()
    assert (float(low), float(high)) == (min(errors), max(errors))
