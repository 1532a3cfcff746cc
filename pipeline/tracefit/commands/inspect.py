"""Inspect traces before fitting: facts, health of the journeys, and the models that can be trained."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import polars as pl

from tracefit.commands.ingest import ServerOptions, ingest_inputs
from tracefit.commands.locate import as_list, find_tables, is_tables
from tracefit.commands.scopes import write_timelines
from tracefit.engines.local import LocalEngine
from tracefit.errors import UsageError
from tracefit.features import targets
from tracefit.fit import splits
from tracefit.fit.fitted import COVERED_SHARE
from tracefit.fit.splits import MIN_HOLDOUT_ROWS, MIN_TRAIN_ROWS
from tracefit.inputs.blocks import inspect_file
from tracefit.inputs.discovery import open_inputs
from tracefit.progress import KeptWarnings, Progress
from tracefit.results.commands import (
    Allowance,
    FileShape,
    Inspection,
    RunFacts,
    ScopeInspection,
    ScopeSpans,
    ServerFacts,
)
from tracefit.server.context import context_from_json, scope_of
from tracefit.server.settings import JOURNEY_FLAGS, SNAPSHOT_FLAG, STEP_FLAGS
from tracefit.tables.dialects import dialect_of
from tracefit.tables.health import Check, health_checks
from tracefit.tables.runs import step_counters
from tracefit.tables.store import TableStore
from tracefit.timeline import clock_disagreements

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from tracefit.features.targets import Target
    from tracefit.inputs.discovery import Inputs, RunSource
    from tracefit.inputs.files import TraceFile
    from tracefit.results.commands import Allowed, IngestResult
    from tracefit.server.context import RunContext


def inspect(
    paths: str | Path | Iterable[str | Path],
    *,
    server: ServerOptions | None = None,
    progress: Progress | None = None,
) -> Inspection:
    """Describe traces or tables without fitting anything.

    Args:
        paths: Run folders, folders of run folders or trace files; or one folder that `run` or `ingest` wrote.
        server: Facts about the server beyond the run's files; without effect on tables.
        progress: Receives reports on the progress.

    Raises:
        UsageError: A path, a configuration file or an option is wrong.
        DataError: A run holds no vLLM spans at all.
    """
    paths = as_list(paths)
    progress = KeptWarnings(progress)
    tables = _tables_of(paths)
    if tables is not None:
        store = TableStore(tables).require()
        write_timelines(store, store.runs())
        return _inspect_tables(store, {}, progress)
    # Read as `ingest` reads, so that what is described here is what would be trained on.
    with tempfile.TemporaryDirectory(prefix="tracefit-inspect-") as scratch, open_inputs(paths) as inputs:
        result = ingest_inputs(inputs, scratch, server or ServerOptions(), progress, engine=LocalEngine())
        write_timelines(TableStore(scratch), [run.run_id for run in result.runs])
        # Runs are ingested in the order they are found; of two with one name the second has a number by now.
        files = {
            run.run_id: tuple(_file_shape(file) for file in source.trace_files)
            for run, source in zip(result.runs, _read(inputs, result), strict=True)
        }
        return _inspect_tables(TableStore(scratch), files, progress)


def _tables_of(paths: list[str | Path]) -> Path | None:
    """Return the tables that the paths stand for, if they are tables and not traces."""
    if len(paths) != 1:
        return None
    try:
        found = find_tables(paths[0])
        return found if is_tables(found) else None
    except UsageError:
        if os.path.lexists(paths[0]):
            raise
        # Traces in a bucket are read in other ways too: with options in their URL, without the library for tables.
        return None


def _file_shape(file: TraceFile) -> FileShape:
    """Describe a file by its first bytes.

    Raises:
        UsageError: The file cannot be read.
    """
    contents = inspect_file(file)
    return FileShape(file.name.rpartition("/")[2], file.size, contents.compression or "none", str(contents))


def _read(inputs: Inputs, result: IngestResult) -> list[RunSource]:
    """Return the runs that were read, in order; the others are named in the result."""
    return [
        source
        for source in inputs.runs
        if not any(text.startswith(f"{source.name}: ") for text in result.failed)
    ]


def _scopes(spans: pl.DataFrame) -> tuple[ScopeSpans, ...]:
    counts = spans.group_by("scope", "name").len().sort("scope", "name")
    found: dict[tuple[str, str | None], int] = {}
    for scope, name, count in counts.iter_rows():
        key = (scope, dialect_of(scope, name))
        found[key] = found.get(key, 0) + count
    return tuple(ScopeSpans(scope, count, dialect) for (scope, dialect), count in found.items())


def _inspect_tables(
    store: TableStore, files: dict[str, tuple[FileShape, ...]], progress: Progress
) -> Inspection:
    facts: list[RunFacts] = []
    contexts: dict[str, RunContext] = {}
    evidence: dict[str, list[Evidence]] = {}
    for run_id in store.runs():
        progress.stage(f"inspecting {run_id}")
        rows = store.read("runs", [run_id])
        first = rows.row(0, named=True)
        place = f"{store.root}/runs/run_id={run_id}"
        context = context_from_json(first["settings"], first["model_config"], first["gpu"], where=place)
        scope_id = scope_of(context).scope_id
        facts.append(_run_facts(store, run_id, scope_id, rows, files.get(run_id, ())))
        contexts.setdefault(scope_id, context)
        evidence.setdefault(scope_id, []).append(gather(store, run_id))
    scopes = tuple(
        ScopeInspection(
            scope_id,
            tuple(f.run_id for f in facts if f.scope_id == scope_id),
            allowances(
                total(evidence[scope_id]),
                has_model_config=contexts[scope_id].architecture is not None,
                has_gpu=contexts[scope_id].gpu is not None,
            ),
        )
        for scope_id in sorted(evidence)
    )
    return Inspection(tuple(facts), scopes)


def _run_facts(
    store: TableStore, run_id: str, scope_id: str, rows: pl.DataFrame, files: tuple[FileShape, ...]
) -> RunFacts:
    first = rows.row(0, named=True)
    spans = store.read("spans", [run_id])
    journeys, requests = store.read("journey_events", [run_id]), store.read("requests", [run_id])
    checks = health_checks(journeys, requests, store.read("steps", [run_id]))
    clock = clock_disagreements(store.read("timeline", [run_id]), journeys)
    return RunFacts(
        run_id=run_id,
        scope_id=scope_id,
        bytes=first["bytes"],
        files=files,
        services=tuple(spans["service_name"].drop_nulls().unique().sort()),
        scopes=_scopes(spans),
        other_spans=first["other_spans"],
        servers=tuple(_server_facts(rows)),
        events=json.loads(first["events"]),
        rejects=first["rejects"],
        implausible=json.loads(first["implausible"] or "{}"),
        missing_attributes=json.loads(first["missing_attributes"] or "{}"),
        duplicate_spans=first["duplicate_spans"],
        checks=(*checks, _clock_check(clock)),
    )


def _server_facts(rows: pl.DataFrame) -> list[ServerFacts]:
    names = list(ServerFacts.__slots__)
    return [ServerFacts(**row) for row in rows.select(names).iter_rows(named=True)]


def _clock_check(disagreements: pl.DataFrame) -> Check:
    of, bad = (int(disagreements[c].sum() or 0) for c in ("events", "disagreeing"))
    detail = f"{bad:,} stamped outside the step they name" if bad else ""
    return Check("events within their steps", of - bad, of, detail)


# -- evidence for models ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Rows of one target that training would use and hold out."""

    train: int = 0
    holdout: int = 0

    @property
    def suffice(self) -> bool:
        """Whether these rows are enough to fit a model."""
        return self.train >= MIN_TRAIN_ROWS and self.holdout >= MIN_HOLDOUT_ROWS

    def __add__(self, other: RowCounts) -> RowCounts:
        """Add rows of another run of the same scope."""
        return RowCounts(self.train + other.train, self.holdout + other.holdout)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Counts of one run, or of several of one scope: they add up."""

    steps: int = 0
    adjacent: int = 0
    intervals: int = 0
    idle: int = 0
    step_rows: RowCounts = RowCounts()
    busy_us: float = 0.0
    covered_us: float = 0.0
    compared_steps: int = 0
    agreeing_steps: int = 0
    steps_with_context: int = 0
    timeline_steps: int = 0
    requests: int = 0
    complete_runs: int = 0
    runs: int = 0
    waits: Mapping[str, RowCounts] = field(default_factory=dict)
    """Rows of each target of requests, by its name."""
    latencies: int = 0
    snapshots: int = 0
    requests_with_cache: int = 0

    def __add__(self, other: Evidence) -> Evidence:
        """Add the counts of another run."""
        counts = [f.name for f in fields(self) if f.name != "waits"]
        names = self.waits.keys() | other.waits.keys()
        waits = {
            name: self.waits.get(name, RowCounts()) + other.waits.get(name, RowCounts()) for name in names
        }
        return Evidence(**{name: getattr(self, name) + getattr(other, name) for name in counts}, waits=waits)


def gather(store: TableStore, run_id: str) -> Evidence:
    """Count the evidence in the tables of one run."""
    steps, timeline = store.read("steps", [run_id]), store.read("timeline", [run_id])
    requests, journeys = store.read("requests", [run_id]), store.read("journey_events", [run_id])
    counters = step_counters(steps, journeys)
    adjacent = timeline.filter((pl.col("cycle_source") == "adjacent") & ~pl.col("idle_after"))
    cycles = timeline.filter(pl.col("cycle_us").is_not_null())
    compared = timeline["journey_agrees"].drop_nulls()
    return Evidence(
        steps=steps.height,
        adjacent=adjacent.height,
        intervals=cycles.filter((pl.col("cycle_source") == "interval") & ~pl.col("idle_after")).height,
        idle=int(cycles["idle_after"].sum() or 0),
        step_rows=_rows(cycles, "ts_start_ns", "step_id", counters, idle=pl.col("idle_after")),
        busy_us=float(adjacent["cycle_us"].sum() or 0.0),
        covered_us=float(adjacent["duration_us"].sum() or 0.0),
        compared_steps=compared.len(),
        agreeing_steps=int(compared.sum() or 0),
        steps_with_context=timeline["context_tokens"].count(),
        timeline_steps=timeline.height,
        requests=requests.height,
        # Only complete journeys give the running requests of every step.
        complete_runs=int(timeline["running_after"].is_not_null().any()),
        runs=1,
        latencies=requests.select(pl.all_horizontal(pl.col("ttft_us", "e2e_us").is_not_null()).sum()).item(),
        snapshots=store.read("request_snapshots", [run_id]).height,
        requests_with_cache=requests["cached_prompt_tokens"].count(),
        waits={target.name: _waits(requests, target, counters) for target in targets.TARGETS},
    )


def _waits(requests: pl.DataFrame, target: Target, counters: pl.DataFrame) -> RowCounts:
    known = requests.filter(pl.col(target.column).is_not_null() & pl.col(target.begins).is_not_null())
    return _rows(known, target.begins, target.step, counters, idle=pl.lit(value=False))


def _rows(frame: pl.DataFrame, time: str, step: str, counters: pl.DataFrame, *, idle: pl.Expr) -> RowCounts:
    """Split rows as training does, and count the rows it would use."""
    reason = pl.when(idle).then(pl.lit(splits.IDLE_GAP)).otherwise(pl.lit(None, pl.String))
    marked = frame.with_columns(ts_ns=pl.col(time), excluded_reason=reason)
    # The same split and marks as in training: the counts are those that a fit would see.
    split = splits.mark_warm_up(splits.split_by_time(marked), counters, step)
    return RowCounts(*(splits.counted(split, part).height for part in ("train", "holdout")))


def allowances(evidence: Evidence, *, has_model_config: bool, has_gpu: bool) -> tuple[Allowance, ...]:
    """Return which models the counts of one scope allow, in reading order."""
    return (
        _step_time(evidence),
        _durations(evidence),
        _composition(evidence),
        _context(evidence),
        _queue_state(evidence),
        *(_wait(evidence, target) for target in targets.TARGETS),
        _latency(evidence),
        _prefix_hits(evidence),
        _hardware(has_model_config=has_model_config, has_gpu=has_gpu),
    )


def total(parts: Iterable[Evidence]) -> Evidence:
    """Add up the counts of several runs."""
    return sum(parts, Evidence())


def _step_time(e: Evidence) -> Allowance:
    found = _list(
        (e.adjacent, "adjacent pairs"), (e.intervals, "intervals between known starts"), (e.idle, "idle gaps")
    )
    if e.step_rows.suffice:
        return Allowance("step time", "yes", f"{found}; {_split(e.step_rows)}", trains=True)
    if not e.timeline_steps:
        return Allowance("step time", "no", f"no step is known; start the server with {STEP_FLAGS}")
    return Allowance("step time", "no", f"{found or 'no two known starts'}; {_too_few(e.step_rows)}")


def _durations(e: Evidence) -> Allowance:
    name = "step.duration_us"
    if not e.busy_us or not e.covered_us:
        return Allowance(name, "no", "no consecutive steps with a duration to compare with the step clock")
    share = e.covered_us / e.busy_us
    if share >= COVERED_SHARE:
        return Allowance(name, "yes", f"covers {100 * share:.1f} % of busy time: it is the step time")
    reason = f"covers {100 * share:.1f} % of busy time: it is the time inside schedule(), not the step"
    return Allowance(name, "no", reason)


def _composition(e: Evidence) -> Allowance:
    name = "batch composition"
    if e.complete_runs and e.complete_runs == e.runs:
        agree = f"; {_share(e.agreeing_steps, e.compared_steps)} of sampled steps agree with their summary"
        said = agree if e.compared_steps else ""
        return Allowance(name, "yes", f"every step, from complete journeys{said}")
    if e.steps:
        return Allowance(name, "limited", f"of the {e.steps:,} sampled steps, from their summaries")
    return Allowance(name, "no", f"neither step summaries nor complete journeys; start with {JOURNEY_FLAGS}")


def _context(e: Evidence) -> Allowance:
    name = "context tokens"
    if not e.steps_with_context:
        flags = f"{JOURNEY_FLAGS}, or {SNAPSHOT_FLAG}"
        return Allowance(
            name, "no", f"no complete journeys and no whole sets of snapshots; start with {flags}"
        )
    verdict: Allowed = "yes" if e.steps_with_context == e.timeline_steps else "limited"
    return Allowance(name, verdict, f"known on {_share(e.steps_with_context, e.timeline_steps)} of steps")


def _queue_state(e: Evidence) -> Allowance:
    if e.complete_runs and e.complete_runs == e.runs:
        return Allowance("queue state", "yes", "exact, from complete journeys")
    if e.steps:
        return Allowance("queue state", "limited", f"that of the latest of {e.steps:,} sampled steps")
    return Allowance("queue state", "no", f"no step events and no complete journeys; start with {STEP_FLAGS}")


def _wait(e: Evidence, target: Target) -> Allowance:
    rows, name = e.waits.get(target.name, RowCounts()), target.title
    if rows.suffice:
        return Allowance(name, "yes", _split(rows, "requests"), trains=True)
    if not e.requests:
        return Allowance(name, "no", f"no journeys; start the server with {JOURNEY_FLAGS}")
    return Allowance(name, "no", _too_few(rows, "requests with both events"))


def _latency(e: Evidence) -> Allowance:
    name = "TTFT, ITL and E2E"
    if e.latencies:
        return Allowance(name, "yes", f"measured on {e.latencies:,} of {e.requests:,} requests")
    return Allowance(name, "no", "no request with ARRIVED, FIRST_TOKEN and FINISHED")


def _prefix_hits(e: Evidence) -> Allowance:
    if e.requests_with_cache:
        return Allowance("prefix hits", "yes", f"known of {e.requests_with_cache:,} requests")
    if e.snapshots:
        return Allowance(
            "prefix hits", "no", f"{e.snapshots:,} snapshots, none with request.effective_prompt_len"
        )
    return Allowance("prefix hits", "no", "no snapshots")


def _hardware(*, has_model_config: bool, has_gpu: bool) -> Allowance:
    name = "roofline features"
    missing = [
        text
        for known, text in (
            (has_model_config, "config.json (--model-config)"),
            (has_gpu, "a GPU (--gpu)"),
        )
        if not known
    ]
    if missing:
        return Allowance(name, "no", f"without {' and '.join(missing)}")
    return Allowance(name, "yes", "config.json and GPU are known")


def _split(rows: RowCounts, what: str = "rows") -> str:
    return f"{rows.train:,} {what} to train on, {rows.holdout:,} held out"


def _too_few(rows: RowCounts, what: str = "rows") -> str:
    return f"{_split(rows, what)}: at least {MIN_TRAIN_ROWS} and {MIN_HOLDOUT_ROWS} are needed"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "none"


def _list(*counts: tuple[int, str]) -> str:
    return ", ".join(f"{n:,} {what}" for n, what in counts if n)
