"""Trace files to tables."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
import yaml

from tracefit.errors import DataError, UsageError, did_you_mean
from tracefit.features.context import RunContext, gpu_to_json, read_context, scope_of, settings_to_json
from tracefit.features.settings import SETTINGS, ServerSettings, canonical_name
from tracefit.otlp import decode_frames
from tracefit.sources import Inputs, RunSource, TraceFile, open_inputs, read_frames
from tracefit.tables import dialects
from tracefit.tables.build import EventTables, build_event_tables
from tracefit.tables.requests import build_requests
from tracefit.tables.runs import journey_sampling, run_rows
from tracefit.tables.store import TableStore
from tracefit.timeline import EngineLimits, build_timeline
from tracefit.verbs.results import IngestResult, Progress, RunSummary, Silent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tracefit.otlp.batch import SpanBatch

_CHUNK = 1 << 20

COMPLETE_SHARE = 0.97
"""Journeys of this share of requests count as all of them: a few are lost to clients that reuse ids."""

DEFAULT_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What the user says about the server, instead of or on top of the run's own files.

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


def ingest(
    paths: Iterable[str | Path],
    out: str | Path,
    *,
    server: ServerOptions | None = None,
    progress: Progress | None = None,
) -> IngestResult:
    """Read traces and write the tables of every run found.

    Args:
        paths: Run folders, folders of run folders, trace files (which make one run together), patterns, `s3://`, `gs://`
            or `file://` URLs of these, or `-` for standard input.
        out: The tables folder. A run that is there with the same contents is replaced.
        server: What is known about the server beyond the run's files.
        progress: Told of what is going on.

    Raises:
        UsageError: A path, a configuration file or an option is wrong; nothing is written.
        DataError: A run holds no vLLM spans at all; nothing of it is written.
    """
    with open_inputs(paths) as inputs:
        return ingest_inputs(inputs, out, server or ServerOptions(), progress or Silent())


def ingest_inputs(inputs: Inputs, out: str | Path, server: ServerOptions, told: Progress) -> IngestResult:
    """Write the tables of runs that were found already; the result has them in the same order. See `ingest`."""
    store = TableStore(out)
    # Every configuration is read before anything is written: a wrong one must not leave half a result.
    contexts = [_context(source, server) for source in inputs.runs]
    warnings = [f"{left.name}: left out, {left.reason}" for left in inputs.left_out if left.notable]
    summaries = []
    for source, context in zip(inputs.runs, contexts, strict=True):
        told.stage(f"reading {source.run_id}")
        digest, size = _content_hash(source.trace_files)
        run_id = _free_run_id(store, source.run_id, digest, warnings)
        events = build_event_tables(_batches(source.trace_files, told), run_id=run_id)
        _require_spans(source, events)
        frames = _tables(run_id, events, context)
        frames["runs"] = run_rows(run_id, events, frames, _run_columns(source, context, digest, size))
        store.write_run(run_id, frames)
        summaries.append(_summary(run_id, context, frames["runs"], events))
        warnings += _warnings_of(run_id, summaries[-1])
    for text in warnings:
        told.warn(text)
    return IngestResult(Path(out), tuple(summaries), tuple(warnings))


def _context(source: RunSource, server: ServerOptions) -> RunContext:
    return read_context(
        server.run_config or source.run_config,
        server.model_config or source.model_config,
        server.settings,
        gpu=server.gpu,
    )


def _content_hash(files: tuple[TraceFile, ...]) -> tuple[str, int]:
    """Hash the files' bytes in the order of their own hashes, so that names and order do not matter."""
    digests = []
    size = 0
    for file in files:
        digest = hashlib.sha256()
        with file.open() as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
                size += len(chunk)
        digests.append(digest.hexdigest())
    return hashlib.sha256("".join(sorted(digests)).encode()).hexdigest(), size


def _free_run_id(store: TableStore, run_id: str, digest: str, warnings: list[str]) -> str:
    """Keep the id of a run that is there with the same contents; another run of that name gets a number."""
    present = set(store.runs())
    candidate, count = run_id, 1
    while candidate in present:
        known = store.read("runs", [candidate])
        if known.height and known["content_sha256"][0] == digest:
            return candidate
        count += 1
        candidate = f"{run_id}-{count}"
    if candidate != run_id:
        warnings.append(
            f"{run_id}: another run of that name is in the tables already; this one is {candidate}"
        )
    return candidate


def _batches(files: tuple[TraceFile, ...], progress: Progress) -> Iterator[SpanBatch]:
    for file in files:
        yield from decode_frames(read_frames(file, on_read=progress.read))


def _require_spans(source: RunSource, events: EventTables) -> None:
    if events.counts.spans:
        return
    seen = f"{events.counts.other_spans} spans of other scopes, {events.counts.rejects} unreadable records"
    raise DataError(
        f"holds no spans of {', '.join(dialects.VLLM_SCOPES)} ({seen})",
        where=source.name,
        hint="start the server with --enable-journey-tracing and --step-tracing-enabled",
    )


def _tables(run_id: str, events: EventTables, context: RunContext) -> dict[str, pl.DataFrame]:
    core = events.spans.filter(pl.col("scope") == dialects.CORE_SCOPE)
    parents = core.select("trace_id", "span_id", "parent_span_id")
    journeys, snapshots = events.journey_events, events.request_snapshots
    requests = build_requests(journeys, events.api_spans, snapshots, parents, run_id=run_id)
    timeline = build_timeline(
        events.steps,
        snapshots,
        journeys,
        engine_limits(context),
        journeys_complete=_journeys_complete(context.settings, events.steps, requests),
    )
    return {
        "spans": events.spans,
        "journey_events": journeys,
        "steps": events.steps,
        "request_snapshots": snapshots,
        "requests": requests,
        "timeline": timeline,
        "rejects": events.rejects,
    }


def engine_limits(context: RunContext) -> EngineLimits:
    """Return what the server's scheduler is bound by, as far as it is known."""
    s = context.settings
    return EngineLimits(
        max_num_batched_tokens=s.max_num_batched_tokens,
        max_num_seqs=s.max_num_seqs,
        block_size=s.block_size or DEFAULT_BLOCK_SIZE,
        # vLLM keeps one block back that stands for "no block".
        num_blocks=s.num_gpu_blocks - 1 if s.num_gpu_blocks else None,
        chunked_prefill=s.enable_chunked_prefill is not False,
    )


def _journeys_complete(settings: ServerSettings, steps: pl.DataFrame, requests: pl.DataFrame) -> bool:
    """Tell whether every request has a journey: by the server's setting, else by what step summaries count."""
    if not requests["queued_ns"].is_not_null().any():
        return False
    if settings.journey_tracing_sample_rate is not None:
        return settings.journey_tracing_sample_rate >= COMPLETE_SHARE
    shares = journey_sampling(steps, requests)
    return min(shares.values(), default=1.0) >= COMPLETE_SHARE


def _run_columns(
    source: RunSource, context: RunContext, digest: str, size: int
) -> dict[str, str | int | None]:
    return {
        "model": context.settings.model,
        "model_config": context.model_config,
        "settings": settings_to_json(context.settings),
        "gpu": gpu_to_json(context.gpu),
        "files": len(source.trace_files),
        "bytes": size,
        "content_sha256": digest,
    }


def _summary(run_id: str, context: RunContext, runs: pl.DataFrame, events: EventTables) -> RunSummary:
    counts = events.counts
    first = runs.row(0, named=True)
    return RunSummary(
        run_id=run_id,
        scope_id=scope_of(context).scope_id,
        files=first["files"],
        bytes=first["bytes"],
        spans=counts.spans,
        other_spans=counts.other_spans,
        duplicate_spans=counts.duplicate_spans,
        rejects=counts.rejects,
        dropped_events=counts.dropped_events,
        servers=runs.height,
        epochs=int(runs["epochs"].sum()),
        steps=int(runs["steps"].sum()),
        requests=int(runs["requests"].sum()),
    )


def _warnings_of(run_id: str, run: RunSummary) -> list[str]:
    texts = []
    if run.rejects:
        texts.append(f"{run_id}: {run.rejects} records could not be read; see the rejects table")
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
                f"--set {text}: not of the form KEY=VALUE", hint="for example --set max_num_seqs=128"
            )
        _require_no_typo(key)
        try:
            values[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UsageError(f"--set {text}: the value cannot be read") from error
    return values


def _require_no_typo(key: str) -> None:
    """Refuse a key that is nearly a known one; any other that nobody knows is kept as a fact of the scope."""
    name = canonical_name(key)
    meant = None if name in SETTINGS else did_you_mean(name, SETTINGS, cutoff=0.85)
    if meant:
        raise UsageError(f"--set {key.strip()}: no such setting", hint=meant)
