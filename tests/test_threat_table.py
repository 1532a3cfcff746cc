"""The table of threats names tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_threat_names_a_test_that_is_there():
    page = (ROOT / "docs" / "explanation" / "threats.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")][2:]
    named = [re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row) for row in rows]
    assert rows
    assert all(named)
    for path, test in (one for row in named for one in row):
        assert f"def {test}(" in (ROOT / path).read_text(), f"{path}::{test}"
