"""The marks of the suite's own: a flaky test gets a second try, and of many like cases every n-th is quick."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SUITE = """
import pathlib
import pytest

tried = pathlib.Path(__file__).with_name("tried")

@pytest.fixture(scope="module")
def server():
    if not tried.exists():
        tried.touch()
        raise RuntimeError("it did not start")

@pytest.mark.flaky(reason="it starts late")
def test_of_a_server(server): pass

@pytest.mark.flaky(reason="it never starts")
def test_that_fails(): assert False

@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize("number", range(7))
def test_of_many_cases(number): assert number in (0, 3, 6)
"""


@pytest.mark.slow
def test_a_second_try_is_counted_and_every_third_case_is_quick(tmp_path):
    (tmp_path / "test_suite.py").write_text(SUITE)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "conftest",
        "-p",
        "no:xdist",
        "-c",
        TESTS.parent / "pyproject.toml",
    ]
    done = subprocess.run(
        [*command, "--rootdir", tmp_path, tmp_path],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "retried: test_suite.py::test_of_a_server: it starts late" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("1 failed, 3 passed, 4 deselected, 1 retried in ")
