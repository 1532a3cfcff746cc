"""A shell whose `tracefit` and `python` are this process: a page has dozens of commands, and each would import for a
second."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import traceback
import warnings
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from typing import TYPE_CHECKING
from unittest.mock import patch

from tracefit.cli import main

if TYPE_CHECKING:
    from pathlib import Path

ASK = """#!/bin/bash
asked=$(mktemp -d "$ASKED/XXXXXX")
printf '%s\\0' "${0##*/}" "$@" >"$asked/words"
env -0 >"$asked/environment"
cat >"$asked/stdin"
mkfifo "$asked/code"
echo "$asked" >"$ASKED/questions"
read -r code <"$asked/code"
cat "$asked/stdout"
cat "$asked/stderr" >&2
exit "$code"
"""
"""A program that leaves its words, its environment and what it is given to the process that runs the shell."""


def run_in_bash(code: str, folder: Path, asked: Path) -> subprocess.CompletedProcess[str]:
    """Run lines of bash in a folder; `asked` is an empty one, for what they ask of this process."""
    for name in ("tracefit", "python"):
        (asked / name).write_text(ASK)
        (asked / name).chmod(0o755)
    os.mkfifo(asked / "questions")
    # Open for writing too: it does not end between two questions.
    questions = os.open(asked / "questions", os.O_RDWR)
    environment = {**os.environ, "PATH": f"{asked}{os.pathsep}{os.environ['PATH']}", "ASKED": str(asked)}
    with (
        (asked / "stdout").open("w") as stdout,
        (asked / "stderr").open("w") as stderr,
        subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", code],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
        ) as bash,
    ):
        while bash.poll() is None:
            if select.select([questions], [], [], 0.05)[0]:
                for line in os.read(questions, 4096).decode().split():
                    _answer(asked / line)
    os.close(questions)
    said = [(asked / name).read_text() for name in ("stdout", "stderr")]
    return subprocess.CompletedProcess(code, bash.returncode, *said)


def _answer(asked: Path) -> None:
    name, *arguments = _texts(asked / "words")
    variables = dict(text.partition("=")[::2] for text in _texts(asked / "environment"))
    out, err = StringIO(), StringIO()
    with (
        chdir(variables["PWD"]),
        patch.dict(os.environ, variables, clear=True),
        patch.object(sys, "argv", [name, *arguments]),
        (asked / "stdin").open() as stdin,
        patch.object(sys, "stdin", stdin),
        redirect_stdout(out),
        redirect_stderr(err),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # what is an error here is a line to who follows a page
        code = _ended(name, arguments)
    (asked / "stdout").write_text(out.getvalue())
    (asked / "stderr").write_text(err.getvalue())
    (asked / "code").write_text(f"{code}\n")


def _texts(path: Path) -> list[str]:
    return path.read_text().split("\0")[:-1]


def _ended(name: str, arguments: list[str]) -> int:
    """Run a command line, or the program on the standard input; return its exit code."""
    try:
        if name == "tracefit":
            main()
        else:
            assert arguments == ["-"], "pages have no other Python"
            exec(sys.stdin.read(), {"__name__": "__main__"})  # noqa: S102
    except SystemExit as ended:
        return int(ended.code or 0)
    except Exception:  # noqa: BLE001 - as the interpreter ends
        traceback.print_exc()
        return 1
    return 0
