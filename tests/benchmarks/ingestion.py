"""Speed and memory of ingestion beside the plain way and two databases, on layouts nobody has tuned to.

Every file has a layout of its own, drawn at random: order, spelling and number of attributes, spelling of numbers,
snapshots or none, spans per record, lengths of requests. The seed is printed; `--seed` draws the same again.

Whole processes are measured, start included: `tracefit ingest`, which writes all its tables; a plain loop, which
decodes into dicts and writes nothing; and for JSON the readers of DuckDB and ClickHouse (chdb), where they are
installed, which write the event columns to Parquet. They take turns; medians are compared. Nothing is asserted about
time, but the tables must hold every span and event that was written.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import pyarrow.parquet as pq
from ingesting.layout import Layout, draw_layout
from ingesting.processes import Measured, measure
from ingesting.trace_files import Kind, Written, write_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

_HERE = Path(__file__).parent / "ingesting"
_PLAIN, _ONE, _TWO = "plain", "one", "two"
_READERS = ("duckdb", "chdb")
_CASES = {
    _ONE: "tracefit, 1 worker",
    _PLAIN: "plain loop",
    _TWO: "tracefit, 2 workers",
    "duckdb": "DuckDB read_json",
    "chdb": "chdb JSONEachRow",
}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZES = ("200MB", "2GB", "2MB")
_LAYOUT_SIZE = "40MB"
_TINY = 60_000
_ACCEPTED = (0, 3)
"""Exit codes: ingestion ends with 3 where the server's SDK had dropped events. That none is lost is checked by rows."""

_RATIO_BARS = {"json": 2.0, "protobuf": 1.7}
_LARGE, _HUGE, _SMALL = 150 * 10**6, 1_500 * 10**6, 4 * 10**6
"""Sizes from which, and up to which, the bars are meant."""
_SMALL_CPU_S = 0.8
_WORKERS_BAR = 1.6
_PEAK_MIB = 600


@dataclass(frozen=True)
class Sitting:
    """One file and what reading it took."""

    kind: Kind  # encoding
    size: str  # wanted size
    written: Written  # the file
    layout: Layout  # its layout
    rounds: dict[str, list[Measured]]  # what each case took, by round

    def median(self, case: str, what: str) -> float:
        """Return the median of `cpu_s`, `wall_s` or `peak_mib` of a case."""
        return float(statistics.median(getattr(one, what) for one in self.rounds[case]))

    def ratios(self, case: str, other: str, what: str = "cpu_s") -> list[float]:
        """Return how many times as much another case took, round by round."""
        pairs = zip(self.rounds[case], self.rounds[other], strict=True)
        return [getattr(theirs, what) / getattr(ours, what) for ours, theirs in pairs]


def byte_count(text: str) -> int:
    """Return the bytes of a size such as `200MB`.

    Raises:
        ArgumentTypeError: It is another text.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(KB|MB|GB)", text.upper())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 200MB")
    return round(float(found[1]) * _UNITS[found[2]])


def command(case: str, kind: Kind, written: Written, out: Path) -> list[str]:
    """Return the command line of a case."""
    if case == _PLAIN:
        return [sys.executable, str(_HERE / "plain.py"), kind, str(written.path)]
    if case in _READERS:
        given = [case, str(written.path), str(out), json.dumps(written.columns)]
        return [sys.executable, str(_HERE / "readers.py"), *given]
    workers = "1" if case == _ONE else "2"
    given = ["ingest", str(written.path.parent), "--out", str(out), "--workers", workers, "--quiet"]
    return [sys.executable, "-m", "tracefit.cli", *given]


def run_case(case: str, kind: Kind, written: Written, folder: Path) -> Measured:
    """Measure one case, and check what it wrote.

    Raises:
        RuntimeError: It failed, or rows are missing.
    """
    out = folder / "written"
    out.mkdir()
    try:
        measured = measure(command(case, kind, written, out), accepted=_ACCEPTED)
        _check(case, written, out, measured)
    finally:
        shutil.rmtree(out)
    return measured


def _check(case: str, written: Written, out: Path, measured: Measured) -> None:
    if case == _PLAIN:
        return
    wanted = dict(written.rows)
    if case in _READERS:
        del wanted["spans"]
        found = json.loads(measured.output)
        rows = {
            "journey_events": found.get("api", 0) + found.get("journey", 0),
            "steps": found.get("step", 0),
            "request_snapshots": found.get("snapshot", 0),
        }
    else:
        rows = {
            table: sum(pq.read_metadata(part).num_rows for part in (out / table).rglob("*.parquet"))
            for table in (*wanted, "rejects")
        }
        wanted["rejects"] = 0
    if rows != wanted:
        raise RuntimeError(f"{_CASES[case]} wrote {rows}, where the file holds {wanted}")


def sit(kind: Kind, size: str, seed: int, cases: Sequence[str], rounds: int, folder: Path) -> Sitting:
    """Write a file in a layout of its own and measure all cases on it, turn by turn."""
    layout = draw_layout(seed)
    run = folder / f"{kind}-{size}-seed{seed}"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    written = write_trace(run, kind, byte_count(size), layout)
    os.sync()  # what is still being written would be measured too
    taken: dict[str, list[Measured]] = {case: [] for case in cases}
    for number in range(rounds):
        turn = number % len(cases)
        for case in (*cases[turn:], *cases[:turn]):
            taken[case].append(run_case(case, kind, written, folder))
            _progress(f"{run.name}, round {number + 1}: {_CASES[case]} {taken[case][-1].cpu_s:.2f} s of CPU")
    return Sitting(kind, size, written, layout, taken)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _spread(values: list[float]) -> str:
    middle = f"{statistics.median(values):.2f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.2f} to {max(values):.2f})"


def _print_table(sitting: Sitting) -> None:
    written = sitting.written
    held = ", ".join(f"{count:,} {table}" for table, count in written.rows.items())
    print(f"\n### {sitting.kind}, {written.size / 1e6:.0f} MB, seed {sitting.layout.seed}\n")
    print(f"Layout: {sitting.layout.describe(sitting.kind)}.\n")
    print(f"Contents: {written.records:,} records, {held}.\n")
    print("| case | CPU s | wall s | peak MiB | MB per CPU s | times the plain loop in CPU |")
    print("|---|---:|---:|---:|---:|---:|")
    for case in sitting.rounds:
        cpu_s = sitting.median(case, "cpu_s")
        ratio = _spread(sitting.ratios(case, _PLAIN)) if _PLAIN in sitting.rounds else ""
        print(
            f"| {_CASES[case]} | {cpu_s:.2f} | {sitting.median(case, 'wall_s'):.2f} | "
            f"{sitting.median(case, 'peak_mib'):.0f} | {written.size / 1e6 / cpu_s:.0f} | {ratio} |"
        )
    sys.stdout.flush()


def bars(sitting: Sitting) -> list[tuple[str, str, bool | None]]:
    """Return what is promised of a file, what was measured, and whether it holds; None where it is not promised."""
    size, cases = sitting.written.size, sitting.rounds
    file = f"{sitting.kind}, {size / 1e6:.0f} MB, seed {sitting.layout.seed}"
    is_large = size >= _LARGE
    found: list[tuple[str, str, bool | None]] = []

    def tell(promise: str, value: str, *, holds: bool, is_meant: bool) -> None:
        found.append((f"{file}: {promise}", value, holds if is_meant else None))

    if _ONE in cases and _PLAIN in cases and size > _SMALL:
        ratio, bar = statistics.median(sitting.ratios(_ONE, _PLAIN)), _RATIO_BARS[sitting.kind]
        tell(f"≥ {bar} times the plain loop in CPU", f"{ratio:.2f}", holds=ratio >= bar, is_meant=is_large)
    for reader in _READERS:
        if _ONE in cases and reader in cases:
            ratio = statistics.median(sitting.ratios(_ONE, reader))
            promise = f"ahead of {_CASES[reader]} in CPU"
            tell(promise, f"{ratio:.2f} times", holds=ratio > 1, is_meant=is_large)
    if _ONE in cases and _TWO in cases:
        ratio = statistics.median(sitting.ratios(_TWO, _ONE, "wall_s"))
        promise = f"two workers ≥ {_WORKERS_BAR} times one in wall time"
        tell(promise, f"{ratio:.2f}", holds=ratio >= _WORKERS_BAR, is_meant=size >= _HUGE)
    if _ONE in cases:
        peak = max(one.peak_mib for one in cases[_ONE])
        tell(f"one worker within {_PEAK_MIB} MiB", f"{peak:.0f} MiB", holds=peak <= _PEAK_MIB, is_meant=True)
        cpu_s = sitting.median(_ONE, "cpu_s")
        if size <= _SMALL:
            promise = f"under {_SMALL_CPU_S} s of CPU"
            tell(promise, f"{cpu_s:.2f} s", holds=cpu_s < _SMALL_CPU_S, is_meant=True)
    return found


def _print_bars(sittings: Sequence[Sitting]) -> None:
    said = {True: "holds", False: "**does not hold**", None: "no bar at this size"}
    print("\n## Bars\n\n| file and bar | measured | |\n|---|---:|---|")
    for promise, value, holds in (one for sitting in sittings for one in bars(sitting)):
        print(f"| {promise} | {value} | {said[holds]} |")
    sys.stdout.flush()


def _print_layouts(kinds: Sequence[Kind], size: str, seeds: range, rounds: int, folder: Path) -> None:
    """Measure ingestion and the plain loop on many layouts, and print the ratio of each as it is found."""
    starts = {kind: sit(kind, f"{_TINY // 1000}KB", 0, (_ONE, _PLAIN), 3, folder) for kind in kinds}
    for kind, tiny in starts.items():
        print(
            f"Start alone ({kind}): tracefit {tiny.median(_ONE, 'cpu_s'):.2f} s, "
            f"plain loop {tiny.median(_PLAIN, 'cpu_s'):.2f} s."
        )
    print("\n| seed | encoding | CPU s | plain, CPU s | ratio | ratio less start | peak MiB | layout |")
    print("|---:|---|---:|---:|---:|---:|---:|---|", flush=True)
    ratios: dict[Kind, list[float]] = {kind: [] for kind in kinds}
    for seed in seeds:
        for kind in kinds:
            one = sit(kind, size, seed, (_ONE, _PLAIN), rounds, folder)
            _forget(one)
            ours, plain = one.median(_ONE, "cpu_s"), one.median(_PLAIN, "cpu_s")
            net_ours, net_plain = (one.median(c, "cpu_s") - starts[kind].median(c, "cpu_s") for c in (_ONE, _PLAIN))
            ratios[kind].append(plain / ours)
            print(
                f"| {seed} | {kind} | {ours:.2f} | {plain:.2f} | {plain / ours:.2f} | "
                f"{net_plain / max(net_ours, 0.01):.2f} | {one.median(_ONE, 'peak_mib'):.0f} | "
                f"{one.layout.describe(kind).replace('|', '/')} |",
                flush=True,
            )
    print()
    for kind, found in ratios.items():
        print(f"{kind}: ratio {min(found):.2f} to {max(found):.2f}, median {statistics.median(found):.2f}.")


def _forget(sitting: Sitting) -> None:
    shutil.rmtree(sitting.written.path.parent)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", metavar="SIZE", help=f"default: {' '.join(_SIZES)}")
    parser.add_argument("--kind", choices=[*get_args(Kind), "both"], default="both")
    parser.add_argument("--only", nargs="+", choices=list(_CASES), help="cases to measure")
    parser.add_argument("--rounds", type=int, help="default: 3; of --layouts: 1")
    parser.add_argument("--seed", type=int, help="layout of the first file; each further file has the next")
    parser.add_argument("--layouts", type=int, metavar="N", help=f"the ratio on N layouts, of {_LAYOUT_SIZE}")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write the traces here and leave them")
    given = parser.parse_args()
    for size in given.size or ():
        try:
            byte_count(size)
        except argparse.ArgumentTypeError as error:
            parser.error(str(error))
    if given.rounds is not None and given.rounds < 1:
        parser.error("--rounds must be at least 1")
    return given


def _warm_up(kinds: Sequence[Kind], cases: Sequence[str], folder: Path) -> None:
    """Run everything once, so that nobody's first start compiles or reads libraries from disk."""
    for kind in kinds:
        _forget(sit(kind, f"{_TINY // 1000}KB", 0, _of_kind(cases, kind), 1, folder))


def _of_kind(cases: Sequence[str], kind: Kind) -> list[str]:
    return [case for case in cases if kind == "json" or case not in _READERS]


def _measure_all(given: argparse.Namespace, kinds: Sequence[Kind], cases: list[str], folder: Path) -> None:
    sittings = []
    seed = given.seed
    for size in given.size or _SIZES:
        for kind in kinds:
            own = _of_kind(cases, kind)
            if byte_count(size) <= _SMALL and not given.only:
                own = [case for case in own if case in (_ONE, _PLAIN)]
            if own:
                sittings.append(sit(kind, size, seed, own, given.rounds or 3, folder))
                _print_table(sittings[-1])
                if not given.keep:
                    _forget(sittings[-1])
            seed += 1
    _print_bars(sittings)


def main() -> None:
    """Print what was measured as Markdown tables."""
    given = _arguments()
    kinds: tuple[Kind, ...] = get_args(Kind) if given.kind == "both" else (given.kind,)
    cases = list(given.only or _CASES)
    if given.seed is None:
        given.seed = random.SystemRandom().randrange(10**6)
    print(f"# Ingestion, seed {given.seed}\n")
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{os.cpu_count()} CPUs, load {load}, Python {platform.python_version()}, {time.strftime('%F %R')}.\n")
    for missing in [c for c in cases if c in _READERS and not importlib.util.find_spec(c)]:
        cases.remove(missing)
        print(f"{_CASES[missing]} is left out: {missing} is not installed.\n")
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        _warm_up(kinds, [_ONE, _PLAIN] if given.layouts else cases, Path(temporary))
        if given.layouts:
            seeds = range(given.seed, given.seed + given.layouts)
            size = (given.size or [_LAYOUT_SIZE])[0]
            _print_layouts(kinds, size, seeds, given.rounds or 1, Path(temporary))
        else:
            _measure_all(given, kinds, cases, folder)


if __name__ == "__main__":
    main()
