"""Put one fault after another into a copy of the package, and see the quick tests of its room fail.

    python tests/scripts/plant_faults.py [ROOM ...]

A row says which test found the fault; `not found` is a gap in the quick tests. Returns 1 if there is one, and 2 where a
text to change is not in its file once: then the list below needs the new text.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Fault(NamedTuple):
    """A change of a file of the package, and the tests that have to notice it."""

    file: str
    old: str
    new: str
    tests: str = ""

    @property
    def room(self) -> str:
        """The room, or the module beside the rooms."""
        return Path(self.file).parts[0].removesuffix(".py")


FAULTS = (
    Fault("inputs/framing.py", 'return buffer.rfind(b"\\n") + 1', 'return buffer.rfind(b"\\n")'),
    Fault("otlp/json_records.py", "if len(spelled) < 2 * size else", "if len(spelled) > 2 * size else"),
    Fault("tables/requests.py", "return divided(ns, 1e3)", "return divided(ns, 1e6)"),
    Fault(
        "results/replays.py",
        "100 * (guess / self.measured - 1)",
        "100 * (guess / self.measured)",
        "reports replay",
    ),
    Fault("server/architecture.py", "if self.kv_heads == self.heads:", "if self.kv_heads >= 1:"),
    Fault("recordings/fpm.py", 'pl.col("wall_time_s") * 1e6', 'pl.col("wall_time_s") * 1e3'),
    Fault("timeline/build.py", "/ 1e3 / count,", "/ 1e3,"),
    Fault(
        "features/roofline.py",
        "arch.fixed_weight_bytes / tp / bytes_per_us",
        "arch.fixed_weight_bytes / bytes_per_us",
    ),
    Fault("models/evaluate.py", "(ends[0] + ends[1]) / 2", "(ends[0] + ends[1])", "models coefficients"),
    Fault("fit/splits.py", "TRAIN_SHARE = 0.7", "TRAIN_SHARE = 0.5"),
    Fault("coefficients/verdicts.py", "sign * value <= sign * end", "sign * value >= sign * end"),
    Fault("diagnostics/load.py", "percentile(ms, p)", "percentile(ms, p / 2)", "diagnostics reports"),
    Fault("replay/engine.py", "len(self.running) < slots:", "len(self.running) <= slots:"),
    Fault(
        "consumers/latency_predictor.py",
        'actual_ttft_ms=pl.col("ttft_us") / 1e3',
        'actual_ttft_ms=pl.col("ttft_us") / 1e6',
    ),
    Fault("engines/jobs.py", "while number in ended:", "while ended:"),
    Fault("reports/sentences.py", "{q.error_pct:+.1f} %", "{-q.error_pct:+.1f} %"),
    Fault("receive/http_server.py", "_RefusalError(503, error.line()", "_RefusalError(429, error.line()"),
    Fault(
        "commands/drift.py",
        "100 * (max(ratio, 1 / ratio) - 1)",
        "100 * (min(ratio, 1 / ratio) - 1)",
        "cli/test_compare.py commands",
    ),
    Fault(
        "synth/laws.py",
        "return 2 * self.num_layers * self.num_kv_heads",
        "return self.num_layers * self.num_kv_heads",
    ),
    Fault("console.py", "raise typer.Exit(code)", "raise typer.Exit(0)", "cli"),
    Fault(
        "evaluator.py",
        'max(float(start + model["offset"]["value"]), 0.0)',
        'float(start - model["offset"]["value"])',
        "test_evaluator.py",
    ),
)


def found_by(fault: Fault, copy: Path) -> str:
    """Plant a fault in the copy, run the tests and take it out again; return the test that failed, or nothing."""
    file = copy / "pipeline/tracefit" / fault.file
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    try:
        found = failed(copy, *(f"tests/{name}" for name in (fault.tests or fault.room).split()))
    finally:
        file.write_text(text, encoding="utf-8")
    # One that fails without the fault has not found it.
    return "" if found and failed(copy, found) else found


def failed(copy: Path, *tests: str) -> str:
    """Run tests until one fails; return it, or nothing."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:randomly", "-p", "no:cacheprovider", *tests],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy / "pipeline")},
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return found[1] if found and done.returncode == 1 else ""


def main(rooms: list[str]) -> int:
    """Plant the faults of the rooms that are named, or all; print a row for each."""
    for fault in FAULTS:
        found = (ROOT / "pipeline/tracefit" / fault.file).read_text(encoding="utf-8").count(fault.old)
        if found != 1:
            print(f"{fault.file} has {fault.old!r} {found} times, not once")
            return 2
    gaps = 0
    with tempfile.TemporaryDirectory() as folder:
        kept_out = shutil.ignore_patterns(".git", ".venv*", "build", "out", ".*_cache")
        copy = Path(shutil.copytree(ROOT, Path(folder) / "copy", ignore=kept_out))
        print("| room | fault | found by |\n| --- | --- | --- |")
        for fault in FAULTS:
            if not rooms or fault.room in rooms:
                test = found_by(fault, copy)
                gaps += not test
                print(f"| {fault.room} | `{fault.new}` | {f'`{test}`' if test else 'not found'} |", flush=True)
    return 1 if gaps else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
