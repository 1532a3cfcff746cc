"""Where its environment cannot be made, a line says why and nothing is left."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "vllm_environment.sh"


@pytest.mark.parametrize(
    ("program", "does", "says"),
    [
        ("python3", "exit 1", "Python 3.11 on Linux x86-64"),
        ("df", "printf 'head\\n/dev/a 9 5 4999 1 /\\n'", "5,000 MB of disk"),
        ("timeout", "exit 124", "PyTorch for CPUs could not be installed, or not in time"),
    ],
)
def test_it_is_refused_in_one_line(tmp_path, program, does, says):
    programs = {"python3": "exit 0", "df": "printf 'head\\n/dev/a 9 4 5000 1 /\\n'"} | {program: does}
    (tmp_path / "bin").mkdir()
    for name, line in programs.items():
        file = tmp_path / "bin" / name
        file.write_text(f"#!/bin/sh\n{line}\n")
        file.chmod(0o755)
    path = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    made = subprocess.run(
        [SCRIPT, tmp_path / "made"], env=path, capture_output=True, text=True, check=False, timeout=60
    )
    assert (made.returncode, made.stdout) == (1, "")
    (line,) = made.stderr.splitlines()
    assert line.startswith("no environment of vLLM: ")
    assert says in line
    assert not (tmp_path / "made").exists()
