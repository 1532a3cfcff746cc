"""Speed and memory of a long recording of an unmodified server: one span per request, no event.

    python tests/benchmarks/unmodified.py [--requests 250000 1000000]

A generated run is repeated, an idle second between, with trace ids of its own each time. Prints seconds and peak memory
of `tracefit run` for each length: memory is bounded, and time grows with the requests.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import polars as pl
from ingesting.processes import measure

sys.path.insert(0, str(Path(__file__).parents[1]))

from stock import span_of, stock_requests, write_settings
from tracefit.synth import SynthOptions, synth

MOST_MIB = 1024


def write(requests: pl.DataFrame, count: int, folder: Path) -> int:
    """Write `count` spans as OTLP JSON lines and return the bytes."""
    write_settings(folder)
    lines = [json.dumps(span_of(row, 0)) for row in requests.iter_rows(named=True)]
    rows = requests.select("trace_id", "arrival_ns", "e2e_us").rows()
    ends = requests.select((pl.col("arrival_ns") + pl.col("e2e_us") * 1e3).max()).item()
    period_ns = int(ends - requests["arrival_ns"].min()) + 1_000_000_000
    resource = '{"attributes":[{"key":"service.name","value":{"stringValue":"vllm"}}]}'
    head = (
        f'{{"resourceSpans":[{{"resource":{resource},"scopeSpans":[{{"scope":{{"name":"vllm.tracing.otel"}},"spans":['
    )
    path = folder / "traces.jsonl"
    with path.open("w") as file:
        for number in range(count):
            turn, place = divmod(number, len(rows))
            trace_id, arrival_ns, e2e_us = rows[place]
            was = arrival_ns + 1_700_000_000_000_000_000
            end = was + -int(-e2e_us * 1e3 // 1)
            begin = was + turn * period_ns
            text = lines[place].replace(trace_id, os.urandom(16).hex(), 1)
            text = text.replace(f'"{was}"', f'"{begin}"', 1).replace(f'"{end}"', f'"{end + turn * period_ns}"', 1)
            file.write(f"{head}{text}]}}]}}]}}\n")
    return path.stat().st_size


def main() -> int:
    """Measure every length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[250_000, 1_000_000])
    lengths = parser.parse_args().requests
    requests = stock_requests(synth(SynthOptions(requests=2_000, rate_per_s=14.0, abort_fraction=0.0)))
    worst = 0.0
    for count in lengths:
        with tempfile.TemporaryDirectory() as folder:
            size = write(requests, count, Path(folder) / "stock")
            command = [
                sys.executable,
                "-m",
                "tracefit.cli",
                "run",
                f"{folder}/stock",
                "--out",
                f"{folder}/out",
            ]
            done = measure([*command, "--workers", "1"], accepted=(0, 1, 3))
            worst = max(worst, done.peak_mib)
            each = 1e6 * done.cpu_s / count
            print(
                (
                    f"{count:>9,} spans, {size / 2**20:5.0f} MiB: {done.wall_s:5.0f} s ({each:.0f} us of CPU a span), "
                    f"{done.peak_mib:5.0f} MiB"
                ),
                flush=True,
            )
    return int(worst > MOST_MIB)


if __name__ == "__main__":
    sys.exit(main())
