"""Ingest trace files into tables: `ingest`, its options, and the order of its work on each run.

Files that the tables folder knows are not decoded again. Each run is published in one step.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tracefit import memory
from tracefit._version import __version__
from tracefit.commands.reading import KnownFiles, Reading, content_hash, options_hash, resolve_run_id
from tracefit.commands.scopes import SMALL_RUN_ROWS, write_timelines
from tracefit.engines.local import available_cores
from tracefit.errors import DataError, UsageError, did_you_mean
from tracefit.inputs.blocks import BLOCK_BYTES, ReadLimits
from tracefit.inputs.discovery import Inputs, RunSource, open_inputs
from tracefit.inputs.files import content_hash_of
from tracefit.inputs.formats import inspect_file
from tracefit.progress import NullProgress, Progress
from tracefit.results.traces import IngestPlan, IngestResult, PlannedFile, RunSummary
from tracefit.server.context import RunContext, gpu_to_json, read_context, scope_of
from tracefit.server.documents import excerpt, parse_yaml
from tracefit.server.settings import (
    ENDPOINT_FLAG,
    JOURNEY_FLAGS,
    SETTINGS,
    STEP_FLAGS,
    ServerSettings,
    canonical_name,
    settings_to_json,
)
from tracefit.tables import dialects, schema
from tracefit.tables.build import IngestCounts, build_tables
from tracefit.tables.disk import disk_errors, scratch_folder, sweep
from tracefit.tables.manifest import IngestedRun
from tracefit.tables.rows import RowOptions
from tracefit.tables.staging import STAGE_NAME
from tracefit.tables.store import RunWriter, TableStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import polars as pl

    from tracefit.inputs.files import TraceFile
    from tracefit.tables.manifest import ReadFile


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Facts about the server from the user, instead of or beyond the run's own files.

    Attributes:
        run_config: exp-config.yaml, run.yaml, a command line or a server log, for every run.
        model_config: config.json, for every run.
        gpu: GPU name, or a JSON file that describes one.
        settings: Single settings; they win over the files.
    """

    run_config: Path | None = None
    model_config: Path | None = None
    gpu: str | None = None
    settings: ServerSettings = field(default_factory=ServerSettings)


@dataclass(frozen=True, slots=True)
class IngestOptions:
    """Which part of the traces is kept. Traces are private data: text of users is not kept, except on request.

    Attributes:
        all_spans: Keep spans of other services and scopes too, in the `spans` table alone.
        keep_attributes: Keys of span attributes to keep beside the usual ones (ids, counts, routes, the model, sampling
            parameters).
        show_values: Show the beginning of a rejected record as it is, not only its structure and keys.
        max_document: Bytes of the longest record; it is held whole.
        max_rejects: Bad records of a file after which reading it stops.
        block_bytes: Bytes of a file that are decoded at once; with more, a worker takes more memory.
        bytes_per_worker: Bytes that are worth another process: it takes about as long to start as to decode 64 MiB.
    """

    all_spans: bool = False
    keep_attributes: tuple[str, ...] = ()
    show_values: bool = False
    max_document: int = 256 << 20
    max_rejects: int = 100_000
    block_bytes: int = BLOCK_BYTES
    bytes_per_worker: int = 64 << 20

    @property
    def limits(self) -> ReadLimits:
        """Bounds on reading one file."""
        return ReadLimits(self.max_document, self.max_rejects, self.block_bytes)

    @property
    def rows(self) -> RowOptions:
        """The options for the rows of the tables."""
        attributes = tuple(sorted({*dialects.SPAN_ATTRIBUTES, *self.keep_attributes}))
        return RowOptions(attributes, self.all_spans, self.show_values, self.max_rejects)


def ingest(
    paths: str | Path | Iterable[str | Path],
    out: str | Path,
    *,
    server: ServerOptions | None = None,
    options: IngestOptions | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> IngestResult:
    """Read traces and write the tables of every run found.

    Known files are not decoded again: a run with the same files stays as it is, one whose
    files have grown or become more is brought up to date, and the result is that of reading everything at once. The
    folder changes run by run, in one step each; after an interruption, running the command again completes the work.

    Memory hardly grows with the files: each worker holds one range of a file at a time, and of a whole run a few
    hundred bytes per span. The `timeline` of a run of more than `SMALL_RUN_ROWS` events is left to `train`.

    Args:
        paths: Run folders, folders of run folders, trace files (files without a run configuration beside them make one run
            together), patterns, `s3://`, `gs://` or `file://` URLs of these, or `-` for standard input.
        out: The tables folder. One process at a time writes there; a second one waits.
        server: What is known about the server beyond the run's files.
        options: Which part of the traces is kept.
        workers: Processes that decode, at most; as many as there are cores if not given.
        progress: Receives reports on the progress.

    Raises:
        UsageError: A path, a configuration file or an option is wrong, or the folder cannot be written; the tables are
            as they were.
        DataError: Not a single run holds vLLM spans; nothing of them is written. One among others is left out, and the
            result names it.
    """
    with open_inputs(paths) as inputs:
        return ingest_inputs(
            inputs,
            out,
            server or ServerOptions(),
            progress or NullProgress(),
            options=options or IngestOptions(),
            workers=workers,
        )


def ingest_inputs(
    inputs: Inputs,
    out: str | Path,
    server: ServerOptions,
    progress: Progress,
    *,
    options: IngestOptions = IngestOptions(),
    workers: int | None = None,
) -> IngestResult:
    """Write the tables of known runs, in the same order. See `ingest`."""
    store = TableStore(out)
    # Every configuration is read before anything is written: a wrong one must not leave half a result.
    contexts = [_context(source, server) for source in inputs.runs]
    # A folder of results holds logs and notes too: only what looks like traces is worth a warning.
    warnings = [f"{left.name}: left out, {left.reason}" for left in inputs.left_out if left.is_notable]

    def waiting() -> None:
        progress.warn(f"{store.root}: another process is writing there; waiting for it")

    with disk_errors(store.root), store.lock(waiting):
        # What an interrupted ingest left: the lock says that nobody writes it any more.
        sweep(store.root)
        work = _Work(store, workers or available_cores(), options, progress)
        summaries: list[RunSummary] = []
        failed: list[DataError] = []
        try:
            for source, context in zip(inputs.runs, contexts, strict=True):
                try:
                    summaries.append(work.run(source, context, warnings))
                except DataError as error:
                    # Each run stands alone; of a single one, its error is the command's.
                    if len(inputs.runs) == 1:
                        raise
                    failed.append(error)
                    warnings.append(f"left out: {error.line()}")
        finally:
            _sweep_stage(store)
    if failed and not summaries:
        raise failed[0]
    # Outside the lock: a timeline is made of published tables alone.
    write_timelines(store, [s.run_id for s in summaries if _is_small(store, s.run_id)])
    for text in warnings:
        progress.warn(text)
    return IngestResult(Path(out), tuple(summaries), tuple(warnings), tuple(e.line() for e in failed))


def _context(source: RunSource, server: ServerOptions) -> RunContext:
    return read_context(
        server.run_config or source.run_config,
        server.model_config or source.model_config,
        server.settings,
        gpu=server.gpu,
    )


@dataclass(frozen=True, slots=True)
class _Work:
    """The facts that all runs of one call share; the folder's lock is held."""

    store: TableStore
    workers: int
    options: IngestOptions
    progress: Progress

    def run(self, source: RunSource, context: RunContext, warnings: list[str]) -> RunSummary:
        """Bring one run's tables up to date."""
        self.progress.stage(f"reading {source.run_id}")
        manifest = self.store.manifest()
        run_id = resolve_run_id(manifest, source)
        known = manifest.runs.get(run_id)
        if known is not None and known.tables and not self.store.is_intact(run_id):
            warnings.append(f"{run_id}: its tables are damaged, or files of them missing; it is read anew")
            known = None
        if run_id != source.run_id:
            warnings.append(
                f"{source.run_id}: another run of that name is in the tables already; this one is {run_id}"
            )
        options = options_hash(self.options.rows)
        reading = Reading(
            known=KnownFiles.of(known, options, self.store.root),
            options=self.options.rows,
            limits=self.options.limits,
            root=self.store.root,
            workers=self.workers,
            bytes_per_worker=self.options.bytes_per_worker,
            progress=self.progress,
        )
        read = reading.read(source.trace_files)
        # What decoding freed would count on top of what building the tables takes.
        memory.give_back()
        columns = _run_columns(read.files, context)
        kv_hashes = sorted(map(content_hash_of, source.kv_files))
        # Everything that the tables follow from: where it has changed they are built anew, from the staged parts where files are known.
        facts = (__version__, options, sorted(columns.items()), kv_hashes)
        built_from = hashlib.sha256(repr(facts).encode()).hexdigest()
        if known is None or known.built_from != built_from or not read.all_known:
            run = IngestedRun(source=source.folder, options=options, built_from=built_from, files=read.files)
            self._build(run_id, source, run, columns, _limits(context))
        # After the others: KV events are matched with the steps and requests of these tables.
        self._add_kv_events(run_id, source, context)
        summary = _summary(run_id, context, self.store.read("runs", [run_id]))
        warnings += _warnings_of(run_id, summary)
        return summary

    def _build(
        self,
        run_id: str,
        source: RunSource,
        run: IngestedRun,
        columns: dict[str, str | int | None],
        limits: dict[str, float],
    ) -> None:
        with scratch_folder(self.store.root) as scratch, RunWriter(scratch) as writer:
            self.progress.stage(f"writing {run_id}")
            counts = build_tables(
                run.files,
                run_id=run_id,
                stage=self.store.root / STAGE_NAME,
                scratch=scratch,
                write=writer.write,
                run_columns=columns,
                limits=limits,
            )
            _require_spans(source, counts)
            self.store.publish(run_id, run, writer.close(), keep=False)

    def _add_kv_events(self, run_id: str, source: RunSource, context: RunContext) -> None:
        """Read the run's KV-cache events, unless its tables have them."""
        run = self.store.manifest().runs[run_id]
        if "kv_events" in run.tables:
            return
        tables = {"kv_events": schema.KV_EVENTS.empty()}
        if source.kv_files:
            from tracefit.kv.columns import kv_tables  # noqa: PLC0415 - most runs have no recordings
            from tracefit.kv.recordings import read_kv  # noqa: PLC0415

            names = ("steps", "journey_events", "requests", "runs", "rejects")
            tables = kv_tables(
                read_kv(source.kv_files, max_rejects=self.options.max_rejects),
                {name: self.store.read(name, [run_id]) for name in names},
                run_id=run_id,
                block_size=context.settings.block_size,
            )
        with scratch_folder(self.store.root) as scratch, RunWriter(scratch) as writer:
            for name, rows in tables.items():
                writer.write(name, rows)
            self.store.publish(run_id, run, writer.close(), keep=True)


def _sweep_stage(store: TableStore) -> None:
    """Remove staged parts that the manifest does not name."""
    stage = store.root / STAGE_NAME
    if not stage.is_dir():
        return
    valid = store.manifest().staged()
    for part in stage.iterdir():
        if part.name not in valid:
            shutil.rmtree(part, ignore_errors=True)
    if not valid:
        stage.rmdir()


def _is_small(store: TableStore, run_id: str) -> bool:
    counts = store.read("runs", [run_id])
    # The counts are those of the run, repeated in the row of every server.
    events = sum(sum(json.loads(text).values()) for text in counts["events"].head(1))
    return events <= SMALL_RUN_ROWS


def _require_spans(source: RunSource, counts: IngestCounts) -> None:
    if counts.spans:
        return
    if counts.rejects and not counts.other_spans:
        raise DataError(
            f"is not OTLP: none of its records can be read as traces ({counts.rejects} rejected)",
            where=source.name,
            hint="traces are OTLP JSON or protobuf, as the Collector's file exporter writes them",
        )
    found = f"{counts.other_spans} spans of other scopes, {counts.rejects} unreadable records"
    raise DataError(
        f"holds no spans of {', '.join(dialects.VLLM_SCOPES)} ({found})",
        where=source.name,
        hint=f"start vLLM with {ENDPOINT_FLAG}; for steps and the events of each request add {STEP_FLAGS} and {JOURNEY_FLAGS}",
    )


def _run_columns(files: Sequence[ReadFile], context: RunContext) -> dict[str, str | int | None]:
    return {
        "model": context.settings.model,
        "model_config": context.model_config,
        "settings": settings_to_json(context.settings),
        "gpu": gpu_to_json(context.gpu),
        "files": len(files),
        "bytes": sum(file.size_bytes for file in files),
        "content_sha256": content_hash(files),
    }


def _limits(context: RunContext) -> dict[str, float]:
    """Return the settings that bound values of the tables; vLLM's defaults, which are assumed, bound nothing."""
    settings = context.settings
    names = {c.limit for table in schema.TABLES.values() for c in table.columns if c.limit}
    known = {name: getattr(settings, name) for name in names if settings.sources.get(name) != "assumed"}
    return {name: float(value) for name, value in sorted(known.items()) if value is not None}


def _summary(run_id: str, context: RunContext, runs: pl.DataFrame) -> RunSummary:
    first = runs.row(0, named=True)
    return RunSummary(
        run_id=run_id,
        scope_id=scope_of(context).scope_id,
        files=first["files"],
        bytes=first["bytes"],
        spans=int(runs["spans"].sum()),
        other_spans=first["other_spans"],
        duplicate_spans=first["duplicate_spans"],
        rejects=first["rejects"],
        implausible=sum(json.loads(first["implausible"] or "{}").values()),
        dropped_events=int(runs["dropped_events"].sum()),
        servers=runs.height,
        epochs=int(runs["epochs"].sum()),
        steps=int(runs["steps"].sum()),
        requests=int(runs["requests"].sum()),
    )


def _warnings_of(run_id: str, run: RunSummary) -> list[str]:
    texts = []
    if run.rejects:
        texts.append(f"{run_id}: {run.rejects} records could not be read; see the rejects table")
    if run.implausible:
        texts.append(
            f"{run_id}: {run.implausible} implausible values were left out; `tracefit inspect` counts them by rule, "
            "the rejects table lists them"
        )
    if run.dropped_events:
        texts.append(
            f"{run_id}: the server's SDK dropped {run.dropped_events} events; "
            "raise OTEL_SPAN_EVENT_COUNT_LIMIT (128 by default)"
        )
    if run.duplicate_spans:
        texts.append(f"{run_id}: {run.duplicate_spans} spans were there twice and count once")
    return texts


def parse_assignments(texts: Iterable[str]) -> dict[str, object]:
    """Read `key=value` settings from the command line; values as YAML reads them.

    Raises:
        UsageError: A text without an equals sign, a key that is nearly a known one, or a value that is not YAML.
    """
    values: dict[str, object] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise UsageError(
                f"--set {excerpt(text)}: not of the form KEY=VALUE",
                hint="for example --set max_num_seqs=128",
            )
        _require_no_typo(key)
        values[key.strip()] = parse_yaml(value, where=f"--set {excerpt(key.strip())}")
    return values


def _require_no_typo(key: str) -> None:
    """Refuse a key that is nearly a known one; any other unknown key is kept as a fact of the scope."""
    name = canonical_name(key)
    # A cutoff this high catches typos and lets settings of newer servers pass.
    meant = None if name in SETTINGS else did_you_mean(name, SETTINGS, cutoff=0.85)
    if meant:
        raise UsageError(f"--set {excerpt(key.strip())}: no such setting", hint=meant)


def plan_ingest(
    paths: str | Path | Iterable[str | Path], out: str | Path, *, options: IngestOptions | None = None
) -> IngestPlan:
    """Return which files `ingest` would read from the same paths into the same folder. Nothing is written.

    Args:
        paths: As for `ingest`.
        out: The tables folder; it need not exist.
        options: As for `ingest`.

    Raises:
        UsageError: A path is wrong or cannot be read.
        DataError: The folder's manifest is damaged, or a file that was named holds OTLP logs or metrics.
    """
    store = TableStore(out)
    with open_inputs(paths) as inputs:
        files = [
            f for source in inputs.runs for f in _planned(source, store, (options or IngestOptions()).rows)
        ]
        return IngestPlan(tuple(files), tuple(f"{left.name}: {left.reason}" for left in inputs.left_out))


def _planned(source: RunSource, store: TableStore, options: RowOptions) -> list[PlannedFile]:
    manifest = store.manifest()
    run_id = resolve_run_id(manifest, source)
    known = KnownFiles.of(manifest.runs.get(run_id), options_hash(options), store.root)
    return [_planned_file(run_id, file, known.status(file)) for file in source.trace_files]


def _planned_file(run_id: str, file: TraceFile, status: Literal["new", "grown", "known"]) -> PlannedFile:
    contents = inspect_file(file)
    return PlannedFile(
        run_id=run_id,
        file=file.name,
        shape=str(contents),
        compression=contents.compression,
        bytes=file.size,
        status=status,
        bytes_to_read=0 if status == "known" else file.size,
    )
