"""What the processes that decode take from the folder they are started in: nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tracefit.tables.store import TableStore

SHARED = """
import functools
import tracefit.commands.ingest as ingest
ingest.IngestOptions = functools.partial(ingest.IngestOptions, block_bytes=20_000, bytes_per_worker=1)
from tracefit.cli import main
main()
"""
"""The command, of files as small as a test's shared out to workers."""


@pytest.mark.slow
def test_workers_import_nothing_from_the_working_folder(tmp_path, traces):
    run = traces.load(steps=240, requests=30).write(tmp_path / "run")
    for module in ("yaml", "polars", "numpy", "pickle", "socket"):
        marker = tmp_path / f"ran-{module}"
        (run / f"{module}.py").write_text(f"open({str(marker)!r}, 'w').close()\nraise SystemExit(9)\n")
    # A script in a folder of its own, as the console script is: of that alone the path begins with its folder.
    script = tmp_path / "bin" / "tracefit-of-small-files"
    script.parent.mkdir()
    script.write_text(SHARED)
    command = [sys.executable, script, "ingest", ".", "--out", tmp_path / "tables"]
    done = subprocess.run(
        [*command, "--workers", "2"], cwd=run, capture_output=True, text=True, check=False, timeout=120
    )
    assert [p.name for p in tmp_path.glob("ran-*")] == []
    assert (done.returncode, done.stderr) == (0, "")
    assert TableStore(tmp_path / "tables").read("requests").height == 30
