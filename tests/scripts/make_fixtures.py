"""Write the generated part of `fixtures/` again: small runs, damaged files, and what each must yield by the generator's
truth.

The real runs in `fixtures/runs/` stay as they are.

`python tests/scripts/make_fixtures.py FOLDER`
"""

from __future__ import annotations

import gzip
import json
import shutil
import sys
from collections import Counter
from pathlib import Path

import polars as pl

sys.path.insert(0, str(Path(__file__).parents[1]))  # what it shares with the tests
from recorded import json_lines, log_lines, records_of
from recorded import record as no_step
from tracefit.synth import SynthOptions, SynthRun, synth, write_run

RUNS = (
    (SynthOptions(name="llama-8b-linear", seed=11, requests=400, rich_sampling=0.02), "json", "gz"),
    (SynthOptions(name="llama-8b-sampled", seed=12, requests=600, step_sampling=0.1), "protobuf", "zst"),
    (
        SynthOptions(
            name="llama-70b-roofline",
            seed=13,
            requests=300,
            law="roofline",
            model="llama-70b",
            tp=4,
            num_blocks=900,
        ),
        "json",
        "zst",
    ),
)
RECORDED = SynthOptions(name="fpm-dynamo", seed=15, requests=50, rate_per_s=2.0)
LOGGED = SynthOptions(name="vllm-log", seed=16, requests=400, rate_per_s=4.0)
DAMAGED = SynthOptions(name="damaged", seed=14, requests=60)


def yields(run: SynthRun) -> dict[str, object]:
    """Count what reading the run must give, from the generator's own lists."""
    events = Counter(event.name for span in run.spans for event in span.events)
    return {
        "spans": len(run.spans),
        "events": dict(sorted(events.items())),
        "steps": int(run.truth_steps["is_sampled"].sum()),
        "requests": run.truth_requests.height,
        "output_tokens": int(run.truth_requests["output_tokens"].sum()),
    }


def damage(lines: list[bytes]) -> tuple[bytes, int]:
    """Cut one line and glue the next one onto it, spoil another with a bad byte, cut the tail; rejects it must give."""
    glued = lines[0][: len(lines[0]) // 2] + lines[1]
    spoiled = lines[2][:40] + b"\xff" + lines[2][41:]
    return b"".join([glued, spoiled, *lines[3:-1], lines[-1][: len(lines[-1]) // 3]]), 3


def record(run: SynthRun, folder: Path) -> dict[str, int]:
    """Write the steps of a run as Dynamo's recorder does, a heartbeat after each one that leaves nothing to do."""
    written = write_run(run, folder)
    for name in ("traces.json", "truth_steps.csv.gz", "truth_requests.csv.gz"):
        (written / name).unlink()
    truth = run.truth_steps.drop_nulls("cycle_us")
    is_idle = truth.select(pl.col("start_ns").shift(-1) > pl.col("start_ns") + pl.col("cycle_us") * 1e3 + 1e6)
    records = []
    for one, is_last in zip(records_of(truth), is_idle.to_series(), strict=True):
        records += [one, no_step(0, 0.0, worker=one["worker_id"])] if is_last else [one]
    # Heartbeats count too.
    records = [one | {"counter_id": number} for number, one in enumerate(records)]
    (written / "fpm.jsonl.gz").write_bytes(gzip.compress(b"".join(json_lines(records)), mtime=0))
    return {"steps": len(records), "timed": truth.height}


def log(run: SynthRun, folder: Path) -> dict[str, int]:
    """Write the steps of a run as vLLM's log in its default format, whole seconds of local time, with a cut line and
    other output."""
    written = write_run(run, folder)
    for name in ("traces.json", "truth_steps.csv.gz", "truth_requests.csv.gz"):
        (written / name).unlink()
    lines = log_lines(run.truth_steps, fine=False)
    cut = lines[40][: len(lines[40]) // 2]
    text = [b"INFO Starting vLLM server\n", *lines[:40], cut, *lines[41:]]
    (written / "server.log.gz").write_bytes(gzip.compress(b"".join(text), mtime=0))
    return {"steps": len(lines) - 1, "rejects": 1}


def main(folder: Path) -> None:
    """Write the generated and the damaged runs below `folder`, which are removed first."""
    for generated in ("generated", "recordings", "damaged"):
        shutil.rmtree(folder / generated, ignore_errors=True)
    expected: dict[str, object] = {}
    for options, kind, compress in RUNS:
        run = synth(options)
        write_run(run, folder / "generated", formats=(kind,), compress=compress)
        expected[f"generated/{options.name}"] = yields(run)
    expected["recordings/fpm-dynamo"] = record(synth(RECORDED), folder / "recordings")
    expected["recordings/vllm-log"] = log(synth(LOGGED), folder / "recordings")
    broken = write_run(synth(DAMAGED), folder, formats=("json",))
    for truth in broken.glob("truth*"):
        truth.unlink()
    trace = broken / "traces.json"
    spoiled, rejects = damage(trace.read_bytes().splitlines(keepends=True))
    trace.unlink()
    trace.with_suffix(".json.gz").write_bytes(gzip.compress(spoiled, mtime=0))
    expected["damaged"] = {"rejects": rejects}
    (folder / "expected.json").write_text(json.dumps(expected, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
