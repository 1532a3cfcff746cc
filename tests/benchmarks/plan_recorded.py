"""Plans of recorded servers for loads that were really run: errors, coverage and width of the intervals.

    python tests/benchmarks/plan_recorded.py RECORDING... --truth RUN:RATE... [--warm-up 20]

A recording is a folder for `tracefit run`. A truth is a folder of the same server's traces under a steady load, and its
requests per second. Requests of its first and last seconds are left out: the server was empty, or they had fewer beside
them. Each plan is asked with defaults. Nine percentiles (P50, P90 and P99 of TTFT, ITL and E2E) are printed with their
errors, their intervals, and a mark if the truth is outside; at the end the number of truths within the intervals, which
are to hold 90 %, and the median ratio of upper to lower ends.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import polars as pl

import tracefit
from tracefit.commands.ingest import ingest
from tracefit.statistics import percentile
from tracefit.tables.store import TableStore

LATENCIES = ("ttft", "itl", "e2e")
PERCENTS = (50, 90, 99)


def truth_of(folder: Path, warm_up_s: float) -> dict[str, float]:
    """Return the percentiles of a run's latencies in ms."""
    with tempfile.TemporaryDirectory() as scratch:
        ingest([folder], Path(scratch) / "tables")
        rows = TableStore(Path(scratch) / "tables").read("requests").drop_nulls("e2e_us")
    arrival = pl.col("arrival_ns")
    edge = int(1e9 * warm_up_s)
    rows = rows.filter(arrival.is_between(arrival.min() + edge, arrival.max() - edge // 2))
    return {
        f"{name}_p{q}_ms": percentile(rows[f"{name}_us"].drop_nulls().to_numpy(), q) / 1e3
        for name in LATENCIES
        for q in PERCENTS
    }


def main(arguments: list[str] | None = None) -> None:
    """Train on every recording, and plan every truth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", nargs="+", type=Path)
    parser.add_argument("--truth", nargs="+", required=True, metavar="RUN:RATE")
    parser.add_argument("--warm-up", type=float, default=0.0, metavar="SECONDS")
    asked = parser.parse_args(arguments)
    truths = {
        float(rate): truth_of(Path(folder), asked.warm_up)
        for folder, _, rate in (text.rpartition(":") for text in asked.truth)
    }
    inside, widths = [], defaultdict(list)
    for recording in asked.recordings:
        with tempfile.TemporaryDirectory() as out:
            tracefit.run([recording], out, options=tracefit.TrainOptions(fast=True))
            for rate, truth in truths.items():
                (plan,) = tracefit.plan(out, rate=rate, servers=1).plans
                between = f"{plan.capacity_low or 0:.2f} to {plan.capacity_high or 0:.2f}"
                print(
                    f"{recording.name} at {rate:g}/s: capacity {plan.capacity_per_s or 0:.2f} ({between}) "
                    f"{plan.reason or ''}"
                )
                for name, value in truth.items():
                    found = plan.at.latency(name) if plan.at else None
                    low = found.low if found else math.nan
                    high = math.nan if found is None else math.inf if found.high is None else found.high
                    holds = low <= value <= high
                    inside.append(holds)
                    widths[name.split("_")[1]].append(high / low if found else math.inf)
                    planned = (
                        "grows"
                        if found is None or found.value is None
                        else f"{found.value:,.0f} ({100 * (found.value / value - 1):+.0f} %)"
                    )
                    print(f"  {name} {value:,.0f}, planned {planned}, {low:,.0f} to {high:,.0f}{'' if holds else ' !'}")
    ratios = ", ".join(f"{q.upper()} {np.median(found):.2f}" for q, found in widths.items())
    print(f"{sum(inside)} of {len(inside)} within their intervals; median ratio of upper to lower end: {ratios}")


if __name__ == "__main__":
    main(sys.argv[1:])
