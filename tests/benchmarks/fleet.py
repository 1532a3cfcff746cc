"""Cost of a fleet's small runs beside the same bytes as one run, and of one more file in one of the runs.

    python tests/benchmarks/fleet.py [--runs 200] [--mb 1] [--workers 1]

Prints CPU seconds and peak memory of `tracefit ingest`, a process of its own each time, and their ratio. The two take
turns, so that other work on the machine slows both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from ingesting.layout import draw_layout
from ingesting.processes import Measured, measure
from ingesting.trace_files import write_trace
from scale import MB, write_both


def _ingest(folder: Path, out: Path, workers: int) -> Measured:
    given = ["ingest", str(folder), "--out", str(out), "--workers", str(workers), "--quiet"]
    return measure([sys.executable, "-m", "tracefit.cli", *given], accepted=(0, 3))


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--mb", type=float, default=1.0, help="megabytes of a run")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        one, many, size = write_both(root, round(given.runs * given.mb * MB), given.runs)
        taken: dict[str, list[Measured]] = {"one run": [], f"{given.runs:,} runs": []}
        for number in range(given.rounds):
            for (shape, rounds), folder in zip(taken.items(), (one, many), strict=True):
                rounds.append(_ingest(folder, root / f"tables-{shape}-{number}", given.workers))
        for shape, rounds in taken.items():
            cpu_s, peak_mib = statistics.median(r.cpu_s for r in rounds), max(r.peak_mib for r in rounds)
            print(
                f"{size / MB:,.0f} MB as {shape}: {cpu_s:.1f} s of CPU, {size / MB / cpu_s:.0f} MB/s, {peak_mib:.0f} "
                "MiB"
            )
        alone, fleet = taken.values()
        ratios = [theirs.cpu_s / ours.cpu_s for ours, theirs in zip(alone, fleet, strict=True)]
        print(f"a fleet takes {statistics.median(ratios):.2f} times the CPU of one run (asked: 2.5)")
        (root / "more").mkdir()
        more = write_trace(root / "more", "json", 50_000, draw_layout(1))
        more.path.rename(many / "run-00000" / "traces-more.json")
        again = _ingest(many, root / f"tables-{given.runs:,} runs-0", given.workers)
        print(f"one more file in one of the runs: {again.cpu_s:.1f} s of CPU (asked: 2)")


if __name__ == "__main__":
    main()
