"""Measure ingestion at scale, and work out from it how far the engines go.

    python tests/benchmarks/scale.py --size 2GB --runs 2000 --out scale.json   # measure (`make bench-scale`)
    python tests/benchmarks/scale.py --constants scale.json                    # the tables of how-far-it-goes.md

The same bytes are ingested as one run and as many, by one worker and two, as local processes and on Ray where that is
installed. Decoding, building and this process's own work are timed apart in one process: what each takes for a byte and
for a run is enough to simulate the scheduler of `commands/scheduler.py` with any number of workers.
"""

from __future__ import annotations

import argparse
import heapq
import importlib.util
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from ingesting.layout import draw_layout
from ingesting.processes import measure
from ingesting.trace_files import write_trace

from tracefit.commands.ingest import ingest_inputs
from tracefit.engines.decode import decode_task
from tracefit.engines.jobs import TASKS_PER_WORKER
from tracefit.engines.local import LocalEngine
from tracefit.inputs.discovery import open_inputs
from tracefit.options import BLOCK_BYTES, ServerOptions
from tracefit.progress import NullProgress
from tracefit.tables.store import TableStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tracefit.engines.jobs import Job

NETWORK_BYTES_S = 1.25e9
"""10 Gbit/s between this machine and the bucket or the workers: assumed, not measured."""

SERIAL_SHARE, SHARED_BYTES = 0.1, 256 << 20
"""Share of a build that one process does even if all workers build the run, and the size from which they do."""

PRICE_PER_CORE_HOUR = 0.05
"""US dollars: assumed, a usual price of a core of a rented machine."""

MB, TB = 1e6, 1e12


@dataclass(frozen=True)
class Constants:
    """Time of the work on one core of this machine, in seconds."""

    decode_byte: float  # decoding, for a byte
    decode_run: float  # decoding, for a run on top
    build_byte: float  # building, for a byte of the traces
    build_run: float  # building, for a run on top
    driver_byte: float  # the process that reads and publishes, for a byte
    driver_run: float  # the same for a run, without the manifest
    manifest_run: float  # writing the manifest, for each run in it
    job: float  # handing a job to another process and taking its result


# -- measured --------------------------------------------------------------------------------------------


class _Timed(LocalEngine):
    """One process, with the time that each function takes."""

    def __init__(self) -> None:
        super().__init__(1)
        self.seconds = {"decode": 0.0, "build": 0.0}

    def run(self, next_job: Callable[[], Job | None]) -> Iterator[tuple[Job, Any]]:
        while (job := next_job()) is not None:
            began = time.process_time()
            result = job.function(job.argument)
            kind = "decode" if job.function is decode_task else "build"
            self.seconds[kind] += time.process_time() - began
            yield job, result


def _split(folder: Path, out: Path) -> dict[str, float]:
    """Ingest in this process; return CPU seconds of decoding, building, the manifest and the rest."""
    engine = _Timed()
    commit, spent = TableStore.commit, [0.0]

    def timed(store: TableStore, changes: Any) -> Any:
        began = time.process_time()
        committed = commit(store, changes)
        spent[0] += time.process_time() - began
        return committed

    TableStore.commit = timed  # type: ignore[method-assign]  # only for this measurement
    began = time.process_time()
    with open_inputs([folder]) as inputs:
        ingest_inputs(inputs, out, ServerOptions(), NullProgress(), engine=engine)
    whole = time.process_time() - began
    TableStore.commit = commit  # type: ignore[method-assign]
    return {**engine.seconds, "driver": whole - sum(engine.seconds.values()) - spent[0]}


def _manifest_run(out: Path, entry: Any) -> float:
    """Return the seconds that a run takes in a manifest of ten thousand."""
    store, runs = TableStore(out), 10_000
    entries = {f"run-{n}": (None, msgspec.structs.replace(entry, tables={})) for n in range(runs)}
    began = time.perf_counter()
    store.commit(entries)
    store.manifest()
    return (time.perf_counter() - began) / runs


def measured_constants(one: Path, many: Path, runs: int, size: int, folder: Path, job: float) -> Constants:
    """Solve for what a byte and what a run takes: the same bytes as one run and as many."""
    out = folder / "split"
    _split(many / "run-00000", out / "first")  # what is imported and compiled on first use counts for nobody
    single, several = _split(one, out / "one"), _split(many, out / "many")
    entry = TableStore(out / "first").manifest().runs["run-00000"]
    per_run = {kind: max(several[kind] - single[kind], 0.0) / (runs - 1) for kind in single}
    per_byte = {kind: (single[kind] - per_run[kind]) / size for kind in single}
    return Constants(
        decode_byte=per_byte["decode"],
        decode_run=per_run["decode"],
        build_byte=per_byte["build"],
        build_run=per_run["build"],
        driver_byte=per_byte["driver"],
        driver_run=per_run["driver"],
        manifest_run=_manifest_run(out / "manifest", entry),
        job=job,
    )


def write_both(folder: Path, size: int, runs: int) -> tuple[Path, Path, int]:
    """Write a run, and as many bytes as many runs; return both folders and the bytes of each."""
    one, many, model = folder / "one", folder / "many", folder / "model"
    for each in (one / "run", model):
        each.mkdir(parents=True)
    small = write_trace(model, "json", size // runs, draw_layout(0))
    for number in range(runs):
        shutil.copytree(model, many / f"run-{number:05d}")
    whole = write_trace(one / "run", "json", runs * small.size, draw_layout(0))
    return one, many, whole.size


def _ingest(folder: Path, tables: Path, engine: str, workers: int, *, on_one_core: bool = False) -> tuple[float, float]:
    """Return wall seconds and peak memory (MiB) of the command; its tables stay in a new folder below `tables`.

    ext4 makes files three times as slowly in the minutes after many were removed.
    """
    out = tempfile.mkdtemp(dir=tables)
    given = ["ingest", str(folder), "--out", out, "--engine", engine, "--workers", str(workers), "--quiet"]
    pinned = ["taskset", "-c", "0"] if on_one_core else []
    taken = measure([*pinned, sys.executable, "-m", "tracefit.cli", *given], accepted=(0, 3))
    return taken.wall_s, taken.peak_mib


def measure_all(size: int, runs: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Measure the table and the constants."""
    one, many, size = write_both(folder, size, runs)
    out, start = folder / "tables", folder / "start"
    out.mkdir()
    shutil.copytree(many / "run-00000", start / "run")
    engines = ["local", *(["ray"] if importlib.util.find_spec("ray") else [])]
    rows, starts = [], {}
    for engine in engines:
        starts[engine] = statistics.median(_ingest(start, out, engine, 1)[0] for _ in range(rounds))
        for shape, path in (("one run", one), (f"{runs:,} runs", many)):
            # One worker here has all cores for the tables of one run: what it takes with one alone shows what a core is
            # worth.
            pinned = engine == "local" and path == one and shutil.which("taskset") is not None
            for workers, on_one_core in ((1, True), (1, False), (2, False))[0 if pinned else 1 :]:
                taken = [_ingest(path, out, engine, workers, on_one_core=on_one_core) for _ in range(rounds)]
                wall = statistics.median(t[0] for t in taken)
                rows.append(
                    {
                        "engine": engine,
                        "shape": shape,
                        "workers": workers,
                        "on_one_core": on_one_core,
                        "wall_s": wall,
                        "peak_mib": max(t[1] for t in taken),
                    }
                )
                where = " on one core" if on_one_core else ""
                print(f"{engine}, {shape}, {workers} workers{where}: {wall:.1f} s", file=sys.stderr)
    constants = measured_constants(one, many, runs, size, folder, job=0.002)
    return {
        "size": size,
        "runs": runs,
        "rows": rows,
        "starts": starts,
        "constants": asdict(constants),
        "load": os.getloadavg(),
    }


# -- simulated -------------------------------------------------------------------------------------------


class _Simulation:
    """The scheduler of `commands/scheduler.py`, on a clock of its own.

    The rules: the largest run first, builds before blocks, two jobs for each worker at most, runs smaller than a block
    share jobs, runs that one worker would build longer than the others work are built by all at the end, a tenth of the
    time for the manifest at most.
    """

    def __init__(self, constants: Constants, runs: list[float], workers: int, grain: float) -> None:
        self.c, self.order, self.workers = constants, sorted(runs, reverse=True), workers
        self.blocks = [max(1, round(size / grain)) for size in self.order]
        self.left = list(self.blocks)
        self.free = [0.0] * workers
        self.pending: list[tuple[float, int]] = []  # when a job ends, and the run of its block; -1 for a build
        self.ready: list[float] = []
        self.shared: list[float] = []
        self.undecoded = sum(runs)
        self.driver = self.busy = self.network = 0.0

    def run(self) -> dict[str, float]:
        """Return seconds of wall time, and those that each resource is busy."""
        c = self.c
        for number, size in enumerate(self.order):
            each, share = size / self.blocks[number], 1 / self.blocks[number]
            for _ in range(self.blocks[number]):
                self._build()
                self.network += each / NETWORK_BYTES_S
                self.driver = max(
                    self.driver + each * c.driver_byte + c.driver_run * share + self._job(each), self.network
                )
                self._give(each * c.decode_byte + c.decode_run * share, number)
        while self.pending:
            self._take()
            self._build()
        for size in self.shared:
            seconds = c.build_byte * size + c.build_run
            self.busy += seconds
            self.driver += seconds * (SERIAL_SHARE + (1 - SERIAL_SHARE) / self.workers)
        count = len(self.order)
        manifest = min(0.1 * self.driver, c.manifest_run * count**2 / 2) + c.manifest_run * count
        reading = sum(self.order) * c.driver_byte + count * c.driver_run
        return {
            "wall_s": self.driver + manifest,
            "workers_s": self.busy,
            "driver_s": reading,
            "network_s": self.network,
            "manifest_s": manifest,
        }

    def _job(self, size: float) -> float:
        return self.c.job * min(1.0, size / BLOCK_BYTES)

    def _build(self) -> None:
        while self.ready:
            size = self.ready.pop()
            if size >= SHARED_BYTES and (self.workers - 1) * size > 2 * self.undecoded:
                self.shared.append(size)
            else:
                self.driver += self._job(size)
                self._give(self.c.build_byte * size + self.c.build_run, -1)

    def _give(self, seconds: float, run: int) -> None:
        while len(self.pending) >= TASKS_PER_WORKER * self.workers:
            self._take()
        ends = max(heapq.heappop(self.free), self.driver) + seconds
        heapq.heappush(self.free, ends)
        heapq.heappush(self.pending, (ends, run))
        self.busy += seconds

    def _take(self) -> None:
        ended, run = heapq.heappop(self.pending)
        self.driver = max(self.driver, ended)
        if run >= 0:
            self.left[run] -= 1
            if not self.left[run]:
                self.undecoded -= self.order[run]
                self.ready.append(self.order[run])


def simulate(constants: Constants, runs: list[float], workers: int, *, grain: float = BLOCK_BYTES) -> dict[str, float]:
    """Return seconds of wall time and of each resource, for runs of these bytes, read in blocks of `grain` bytes."""
    return _Simulation(constants, runs, workers, grain).run()


def first_to_end(found: dict[str, float], workers: int) -> str:
    """Name the resource that is busy for the largest share of the time."""
    shares = {
        "decode and build CPU": found["workers_s"] / workers,
        "the process that reads": found["driver_s"],
        "network of that process": found["network_s"],
        "manifest": found["manifest_s"],
    }
    name = max(shares, key=shares.__getitem__)
    share = shares[name] / found["wall_s"]
    return f"{name} ({100 * min(share, 1):.0f} %)" if share > 0.5 else f"the largest run ({name} {100 * share:.0f} %)"


def _hours(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


FLEETS = {
    "1 TB, 1,000 runs of 1 GB": [1e9] * 1000,
    "1 TB, 100,000 runs of 10 MB": [1e7] * 100_000,
    "1 TB, half of it one run": [5e11] + [1e9] * 500,
    "100 TB, 100,000 runs of 1 GB": [1e9] * 100_000,
}


def print_report(data: dict[str, Any]) -> None:
    """Print the tables as Markdown."""
    c, size = Constants(**data["constants"]), data["size"]
    print(f"## Measured: {size / MB:,.0f} MB as one run and as {data['runs']:,}\n")
    print("| engine | input | workers | wall s | without start s | MB/s | times one worker | peak MiB |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    net = {
        (r["engine"], r["shape"], r["workers"]): r["wall_s"] - data["starts"][r["engine"]]
        for r in data["rows"]
        if not r["on_one_core"]
    }
    for r in data["rows"]:
        own = r["wall_s"] - data["starts"][r["engine"]]
        gain = net[r["engine"], r["shape"], 1] / own
        workers = f"{r['workers']}, on one core" if r["on_one_core"] else r["workers"]
        print(
            f"| {r['engine']} | {r['shape']} | {workers} | {r['wall_s']:.1f} | {own:.1f} | {size / MB / own:.0f} | "
            f"{gain:.2f} | {r['peak_mib']:.0f} |"
        )
    print("\nStart: " + ", ".join(f"{e} {s:.1f} s" for e, s in data["starts"].items()) + ".\n")
    print("| constant | value |\n|---|---:|")
    for name, kind in (("decode", "decoding"), ("build", "building"), ("driver", "reading and publishing")):
        rate, own = getattr(c, f"{name}_byte"), getattr(c, f"{name}_run")
        print(f"| {kind} | {1 / rate / MB:,.0f} MB/s of a core, and {1e3 * own:.0f} ms for a run |")
    print(f"| manifest | {1e6 * c.manifest_run:.0f} us for each run in it |")
    print(
        "\n## The simulation against what was measured\n\n| input | workers | measured s | simulated s "
        "|\n|---|---:|---:|---:|"
    )
    for shape, runs in (
        ("one run", [float(size)]),
        (f"{data['runs']:,} runs", [size / data["runs"]] * data["runs"]),
    ):
        for workers in (1, 2):
            if ("local", shape, workers) in net:
                print(
                    f"| {shape} | {workers} | {net['local', shape, workers]:.1f} | "
                    f"{simulate(c, runs, workers)['wall_s']:.1f} |"
                )
    print("\n## Simulated\n\n| input | workers | time | core hours | USD | ends first |\n|---|---:|---:|---:|---:|---|")
    for name, runs in FLEETS.items():
        for workers in (2, 16, 64, 256):
            found = simulate(c, runs, workers, grain=max(BLOCK_BYTES, sum(runs) / 400_000))
            cores = (found["wall_s"] * (workers + 1)) / 3600
            print(
                f"| {name} | {workers} | {_hours(found['wall_s'])} | {cores:,.0f} | "
                f"{cores * PRICE_PER_CORE_HOUR:,.2f} | {first_to_end(found, workers)} |"
            )


def main() -> None:
    """Measure, or read what was measured, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="2GB", help="bytes, such as 2GB or 200MB")
    parser.add_argument("--runs", type=int, default=2000, help="runs that the bytes are cut into")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write what was measured here, as JSON")
    parser.add_argument("--constants", type=Path, help="measure nothing, read this")
    given = parser.parse_args()
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)  # before minutes of measuring
    if given.constants:
        data = json.loads(given.constants.read_text())
    else:
        size = int(float(given.size[:-2]) * {"MB": 1e6, "GB": 1e9}[given.size[-2:].upper()])
        with tempfile.TemporaryDirectory() as temporary:
            data = measure_all(size, given.runs, given.rounds, Path(temporary))
        if given.out:
            given.out.write_text(json.dumps(data, indent=1) + "\n")
    print_report(data)


if __name__ == "__main__":
    main()
