"""Speed and memory of a long log of vLLM with a line for each step, through a pipe.

    python tests/benchmarks/iteration_log.py [--mb 500 2000] [--other 0]

Lines of the default format are made while they are read, so that they are on no disk. Prints seconds and peak memory of
`tracefit ingest -` for each size.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile

import polars as pl
from ingesting.processes import measure

MOST_MIB = 2048
_STEPS = 100_000
"""Steps written at a time."""


def lines(first: int, other: int) -> pl.DataFrame:
    """Return lines of steps of about 10 ms, each with `other` lines of another logger after it."""
    step = pl.int_range(first, first + _STEPS)
    prompts, running = (step % 9 == 0).cast(pl.Int64), 4 + step // 500 % 5
    at = pl.from_epoch(1_764_000_000 + step // 100).dt.strftime("%m-%d %H:%M:%S")
    line = pl.format(
        "INFO {} [loggers.py:199] Engine 000: Iteration({}): {} context requests, {} context tokens, {} generation "
        "requests, {} generation tokens, iteration elapsed time: {}.{} ms, GPU KV cache usage: 3.5%",
        at,
        step,
        prompts,
        200 * prompts,
        running,
        running,
        8 + prompts,
        10 + running,
    )
    access = pl.format('INFO:     127.0.0.1:{} - "POST /v1/completions HTTP/1.1" 200 OK', 50_000 + step % 999)
    each = pl.concat_str([line, *[access] * other], separator="\n")
    return pl.select(each)


def write(most: int, other: int) -> None:
    """Write at least so many bytes of lines to stdout."""
    written = step = 0
    while written < most:
        text = lines(step, other).write_csv(include_header=False, quote_style="never").encode()
        sys.stdout.buffer.write(text)
        written, step = written + len(text), step + _STEPS


def main() -> int:
    """Measure every size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, nargs="+", default=[500, 2_000], help="10^6 bytes of the log")
    parser.add_argument("--other", type=int, default=0, help="lines of other output for each step")
    parser.add_argument("--write", action="store_true", help="write a log of the first size to stdout")
    chosen = parser.parse_args()
    if chosen.write:
        write(chosen.mb[0] * 10**6, chosen.other)
        return 0
    worst = 0.0
    for size in chosen.mb:
        make = [sys.executable, __file__, "--write", "--mb", str(size), "--other", str(chosen.other)]
        with tempfile.TemporaryDirectory() as folder, subprocess.Popen(make, stdout=subprocess.PIPE) as log:
            command = [sys.executable, "-m", "tracefit.cli", "ingest", "-", "--out", f"{folder}/out"]
            done = measure([*command, "--workers", "1", "--quiet"], stdin=log.stdout)
        worst = max(worst, done.peak_mib)
        print(
            f"{size:>7,} MB: {done.wall_s:5.0f} s ({size / done.cpu_s:.0f} MB per s of CPU), {done.peak_mib:5.0f} MiB",
            flush=True,
        )
    return int(worst > MOST_MIB)


if __name__ == "__main__":
    sys.exit(main())
