"""Processor time of the first commands of a newcomer, beside that of another version, in turns on one machine.

    git worktree add build/before 21de2b08
    python tests/benchmarks/first_minute.py build/before [--rounds 3] [--only help fast]

Prints the median CPU seconds of both versions, user and system, their ratio, and the peak memory of both in MB. Other
work on the machine makes both slower: only the ratio counts. Both are compiled before, as pip compiles what it
installs.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
ONE = "fixtures/runs/cpu-overload"
COMMANDS = {
    "help": ["--help"],
    "one run, fast": ["run", ONE, "--fast", "--quiet"],
    "one run": ["run", ONE, "--quiet"],
    "five runs": ["run", "fixtures/runs", "--quiet"],
}
"""Name to arguments; each that writes gets a folder of its own. One run has 674 requests."""


def measure(tree: Path, arguments: list[str], compiled: str) -> tuple[float, float]:
    """Return CPU seconds and peak memory in MB of a command of the version in a folder."""
    with tempfile.TemporaryDirectory() as folder:
        out = ["--out", f"{folder}/out"] if arguments[0] == "run" else []
        program = [sys.executable, "-c", "import sys; from tracefit.cli import main; sys.exit(main())"]
        environment = _environment(tree, compiled)
        child = os.fork()
        if not child:
            # In a child of its own, so that the peak is that of this command only.
            done = subprocess.run(
                [*program, *arguments, *out],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.DEVNULL,
                check=False,
            )
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            text = f"{used.ru_utime + used.ru_stime} {used.ru_maxrss / 1024} {done.returncode}"
            Path(folder, "used").write_text(text)
            os._exit(0)
        os.waitpid(child, 0)
        seconds, peak, code = Path(folder, "used").read_text().split()
    if code not in ("0", "3"):
        raise SystemExit(f"{tree}: {' '.join(arguments)} ended with exit code {code}")
    return float(seconds), float(peak)


def _environment(tree: Path, compiled: str) -> dict[str, str]:
    """Return the variables of a process of a version; `compiled` is the folder of bytecode."""
    own = {"PYTHONPATH": str(tree / "pipeline"), "PYTHONPYCACHEPREFIX": compiled}
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | own


def main() -> None:
    """Measure every command in turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="folder of the other version")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=COMMANDS, default=[*COMMANDS])
    given = parser.parse_args()
    trees = (given.before.resolve(), ROOT)
    with tempfile.TemporaryDirectory() as compiled:
        for tree in trees:
            compile_all = [sys.executable, "-m", "compileall", "-q", str(tree / "pipeline/tracefit")]
            subprocess.run(compile_all, env=_environment(tree, compiled), check=True)
        for name in given.only:
            rounds = [[measure(tree, COMMANDS[name], compiled) for tree in trees] for _ in range(given.rounds)]
            before, now = (statistics.median(one[k][0] for one in rounds) for k in (0, 1))
            peaks = [max(one[k][1] for one in rounds) for k in (0, 1)]
            ratio = f"{now:.2f} s of {before:.2f} s: {now / before:.2f}"
            sys.stdout.write(f"{name}: {ratio}, peak {peaks[1]:.0f} MB of {peaks[0]:.0f} MB\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
