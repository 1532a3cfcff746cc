"""Streams that are closed, full, ASCII or not read to the end, a working folder that is gone, Ctrl-C: no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = f"{sys.executable} -m tracefit.cli"


@pytest.fixture
def shell(tmp_path):
    """Return a function that runs a line in a shell: exit code of the command, stdout, stderr."""

    def call(line, **environment):
        done = subprocess.run(
            ["bash", "-c", line],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env=os.environ | environment,
        )
        assert "Traceback" not in done.stderr + done.stdout
        assert "Exception ignored" not in done.stderr
        return done.returncode, done.stdout, done.stderr

    return call


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["--version", "features"])
def test_result_lost_to_a_closed_stdout_is_a_failure(shell, asked):
    line = "tracefit: standard output: cannot be written (Bad file descriptor)\n"
    assert shell(f"{COMMAND} {asked} >&-") == (2, "", line)
    assert shell(f"{COMMAND} {asked} >&- 2>&- <&-")[0] == 2


@pytest.mark.slow
def test_silent_command_ignores_a_closed_stdout(shell, traces, tmp_path):
    run = traces.request(1, 0, step=1).write(tmp_path / "run")
    assert shell(f"{COMMAND} ingest {run} --out tables --quiet >&-") == (0, "", "")
    assert (tmp_path / "tables" / "manifest.json").exists()


@pytest.mark.parametrize("asked", ["--help", pytest.param("features", marks=pytest.mark.slow)])
def test_a_full_stdout_is_one_line_and_exit_code_2(shell, asked):
    code, _, stderr = shell(f"{COMMAND} {asked} >/dev/full")
    assert (code, stderr) == (
        2,
        "tracefit: standard output: cannot be written (No space left on device)\n",
    )


@pytest.mark.parametrize("asked", ["--help", pytest.param("features", marks=pytest.mark.slow)])
def test_reader_that_leaves_shows_in_the_exit_code_alone(asked):
    """The code of a program that SIGPIPE ended: 128 + 13."""
    gone, stdout = os.pipe()
    os.close(gone)
    command = [sys.executable, "-m", "tracefit.cli", asked]
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
    os.close(stdout)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.slow
@pytest.mark.parametrize("where", ["&-", "/dev/full"])
def test_full_stderr_keeps_the_exit_code(shell, where):
    assert shell(f"{COMMAND} inspect nothing-here 2>{where}")[0] == 2


@pytest.mark.slow
def test_an_ascii_terminal_gets_escapes(shell, trained):
    code, stdout, _ = shell(f"{COMMAND} report {trained} --out .", PYTHONIOENCODING="ascii")
    assert code == 0
    assert stdout.isascii()


def test_a_working_folder_that_is_gone_is_one_line(shell):
    code, _, stderr = shell(f"mkdir gone; cd gone; rmdir ../gone; {COMMAND} inspect here")
    assert (code, stderr) == (
        2,
        "tracefit: the working folder is gone; change to an existing folder\n",
    )


@pytest.mark.slow
def test_ctrl_c_with_workers_is_one_line(tmp_path, traces):
    """The whole group of processes gets the signal, as from a terminal, while workers have most of the blocks before
    them."""
    run = traces.load(steps=240, requests=30).write(tmp_path / "run")
    once = (run / "traces.json").read_bytes()
    (run / "traces.json").write_bytes(once * (60_000_000 // len(once)))
    arguments = ["ingest", run, "--out", tmp_path / "tables", "--workers", "2"]
    process = subprocess.Popen(
        [*COMMAND.split(), *arguments], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while not list(tmp_path.glob("tables/.stage/*")):
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (130, "tracefit: interrupted\n")
    assert list(Path(tmp_path / "tables").glob(".writing-*")) == []
