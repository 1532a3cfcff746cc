"""The statistics of the times of requests in complete recordings, and in others: where their thresholds come from.

    python tests/benchmarks/evidence.py [RUN ...] [--seeds 3] [--requests 400]

Generated servers of four laws at a low, middle and full load, and RUN, folders with the spans of unmodified servers,
are examined as they are; without 30 % of the requests; with one token in twenty beside the one before it, as a drafter
makes them; and with one length in ten counted in the text. Two generated servers are taken for one besides. Prints the
least, median and largest value of each statistic over the recordings of a kind, by the symbols of
`docs/explanation/request-sums.md`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

sys.path.insert(0, str(Path(__file__).parents[1]))

import tracefit
from stock import LAWS, stock_requests
from tracefit.synth import LoadPhase, SynthOptions, synth
from tracefit.timeline.evidence_statistics import (
    close_stamps,
    late_arrivals,
    miscounted_share,
    skew,
    step_noise,
)
from tracefit.timeline.request_counts import CountedRequests
from tracefit.timeline.request_graph import DEFAULT_TOKEN_BUDGET, is_usable

if TYPE_CHECKING:
    from collections.abc import Iterator

RATES = {"low": 1.0, "middle": 12.0, "full": 60.0}
REMOVED, PAIRED, AS_TEXT = 0.3, 0.05, 0.1


def statistics(requests: pl.DataFrame) -> dict[str, float]:
    """Return the statistics of the requests of one server by their symbols; those that say nothing are not there."""
    usable = requests.with_row_index("row").filter(is_usable()).sort("arrival_ns", "row")["row"]
    server = CountedRequests(requests, usable, DEFAULT_TOKEN_BUDGET)
    arrays, graph, edges, counts = server.arrays, server.graph, server.edges, server.counts
    found: dict[str, float | None] = {
        "T": graph.time_conflicts,
        "K": max(edges.contradicting, len(edges.preempted) / requests.height),
        "C": close_stamps(arrays, graph),
        "M": miscounted_share(arrays),
        "U where preempted": counts.unevenness,
    }
    if (late := late_arrivals(arrays)) is not None:
        found["L"] = late.late / late.arrivals
    if counts.fullness is not None:
        found |= {"F": counts.fullness.share, "U": counts.fullness.unevenness}
    if len(counts.plain.steps):
        off = counts.plain.time_us / counts.plain.model_us - 1
        skewed = skew(off, counts.plain.steps)
        found |= {"N": step_noise(off, counts.plain.steps), "N of a step": skewed.noise, "S": skewed.ratio}
    return {name: value for name, value in found.items() if value is not None}


def generated(seeds: int, count: int) -> Iterator[pl.DataFrame]:
    """Yield the requests of generated servers."""
    for law in LAWS.values():
        for rate in RATES.values():
            for seed in range(seeds):
                options = SynthOptions(
                    law=law,
                    rate_per_s=rate,
                    requests=count,
                    seed=seed,
                    phases=(LoadPhase("steady", 1.0, 1.0),),
                    abort_fraction=0.0,
                )
                yield stock_requests(synth(options), seed=seed)


def recorded(run: Path, folder: Path) -> Iterator[pl.DataFrame]:
    """Yield the requests of the servers of a run with stock spans."""
    tracefit.ingest([run], folder)
    requests = pl.read_parquet(folder / "requests/**/*.parquet")
    requests = requests.with_columns(first_token_step=pl.lit(None, pl.Int64))
    for one in requests.filter(is_usable()).partition_by("run_id", "server", maintain_order=True):
        if one.height > 100:
            yield one


def changed(requests: pl.DataFrame, seed: int) -> dict[str, pl.DataFrame]:
    """Return the requests as they are, and changed in each of the ways."""
    draw, output = np.random.default_rng(seed).random(requests.height), pl.col("output_tokens")
    # A step with two tokens: as many steps and times as before, and more tokens.
    paired = (output * (1 + PAIRED)).round().cast(pl.Int64)
    as_text = pl.when(pl.Series(draw < AS_TEXT)).then((output / 3).ceil().cast(pl.Int64)).otherwise(output)
    return {
        "complete": requests,
        "30 % removed": requests.filter(pl.Series(draw >= REMOVED)),
        "5 % of the tokens in pairs": requests.with_columns(output_tokens=paired),
        "10 % of the lengths from the text": requests.with_columns(output_tokens=as_text),
    }


def main() -> None:
    """Measure all kinds, and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=400)
    asked = parser.parse_args()
    found: defaultdict[tuple[str, str], list[float]] = defaultdict(list)

    def add(kind: str, requests: pl.DataFrame) -> None:
        for name, value in statistics(requests).items():
            found[name, kind].append(value)

    before: pl.DataFrame | None = None
    for seed, requests in enumerate(generated(asked.seeds, asked.requests)):
        for kind, rows in changed(requests, seed).items():
            add(f"generated, {kind}", rows)
        if before is not None:
            add("generated, two engines as one", pl.concat([before, requests]).sort("arrival_ns"))
        before = None if before is not None else requests
    with tempfile.TemporaryDirectory() as scratch:
        for number, run in enumerate(asked.runs):
            for requests in recorded(run, Path(scratch) / str(number)):
                for kind, rows in changed(requests, number).items():
                    add(f"recorded, {kind}", rows)
    print("| statistic | recordings | of | least | median | largest |\n| --- | --- | ---: | ---: | ---: | ---: |")
    for (name, kind), values in sorted(found.items()):
        least, middle, most = np.quantile(values, (0, 0.5, 1))
        print(f"| {name} | {kind} | {len(values)} | {least:.3g} | {middle:.3g} | {most:.3g} |")


if __name__ == "__main__":
    main()
