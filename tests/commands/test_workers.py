"""Processes that decode take nothing from the folder they are started in."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tracefit.tables.store import TableStore

SCRIPT = """
import resource
import tracefit
tables = tracefit.ingest(
    ".", "../tables", workers=2, options=tracefit.IngestOptions(block_bytes=20_000, bytes_per_worker=1)
)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime > 0)
"""
"""An ingest in which files as small as a test's are shared out to workers."""


@pytest.mark.slow
def test_workers_import_nothing_from_the_working_folder(tmp_path, traces):
    run = traces.load(steps=240, requests=30).write(tmp_path / "run")
    for module in ("yaml", "polars", "numpy", "pickle", "socket"):
        marker = tmp_path / f"ran-{module}"
        (run / f"{module}.py").write_text(f"open({str(marker)!r}, 'w').close()\nraise SystemExit(9)\n")
    # A script in a folder of its own, as the console script is: of that alone the path begins with its folder.
    script = tmp_path / "bin" / "script.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script], cwd=run, capture_output=True, text=True, check=False, timeout=120)
    assert [p.name for p in tmp_path.glob("ran-*")] == []
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", ""), "workers took part"
    assert TableStore(tmp_path / "tables").read("requests").height == 30
