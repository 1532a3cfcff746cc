"""Ingest trace files into tables: `ingest` and its options.

Files that the tables folder knows are not decoded again. Each run is published in one step.
"""

from __future__ import annotations

import json
import re
from contextlib import ExitStack, suppress
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import polars as pl

from tracefit.commands.deployments import write_timelines
from tracefit.commands.scheduler import (
    IngestScheduler,
    RunIngest,
    resolve_run_id,
    unchanged,
    usable_files,
)
from tracefit.engines.build import is_small
from tracefit.engines.local import open_engine
from tracefit.errors import DataError, UsageError, did_you_mean
from tracefit.inputs.blocks import inspect_file, lines_with
from tracefit.inputs.discovery import Inputs, RunSource, open_inputs
from tracefit.inputs.files import content_hash_of
from tracefit.options import (
    LOCAL,
    EngineChoice,
    IngestOptions,
    IngestOutOption,
    PathsArgument,
    ServerOptions,
    WorkersOption,
    named,
)
from tracefit.progress import KeptWarnings, Progress
from tracefit.recordings import RECORDINGS
from tracefit.reports.document import plain
from tracefit.reports.facts import RAISE_EVENT_LIMIT, dropped_events
from tracefit.results.traces import IngestPlan, IngestResult, PlannedFile, RunSummary
from tracefit.server.context import RunContext, deployment_of, read_context
from tracefit.server.documents import excerpt, parse_yaml, read_bytes
from tracefit.server.server_log import LOG_MARKS, starts_of
from tracefit.server.settings import SETTING_NAMES, ServerSettings, canonical_name, settings_from
from tracefit.tables.client_times import UNMATCHED
from tracefit.tables.disk import disk_errors
from tracefit.tables.named_models import NamedModel, model_doubts
from tracefit.tables.record_servers import SHARED_NAME
from tracefit.tables.rows import hash_of_kept
from tracefit.tables.sources import SOURCES
from tracefit.tables.staging import staged_parts
from tracefit.tables.store import ReadFile, TableStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from tracefit.engines.jobs import TaskEngine
    from tracefit.inputs.files import TraceFile
    from tracefit.server.server_log import ServerStart
    from tracefit.tables.named_models import ModelDoubts

_MOST_REJECT_REASONS = 6

_OF_RUN = ("files", "bytes", "other_spans", "duplicate_spans", "rejects")
_OF_SERVER = ("spans", "dropped_events", "epochs", "steps", "requests", "lost_steps")
"""Counts of the `runs` table, which has a row per server: those of the run are in every row."""

_CLOCK_COLUMNS = ("api_clock_ahead_us", "api_clock_error_us")


def ingest(
    paths: PathsArgument,
    out: IngestOutOption,
    *,
    server: ServerOptions | None = None,
    options: IngestOptions | None = None,
    workers: WorkersOption = None,
    engine: EngineChoice = LOCAL,
    progress: Progress | None = None,
) -> IngestResult:
    """Read traces and write the tables of every run.

    Known files are not decoded again. A run whose files are the same stays as it is; a run whose files have grown or
    become more is brought up to date. The result is the same as if everything were read at once. Each run is written in
    one step; after an interruption, run the command again to complete the work.

    Memory hardly grows with the size of the files: each worker holds one range of a file at a time, and a few hundred
    bytes per span of a whole run. `train` builds the `timeline` of a run with more than `BuildLimits.small_run_rows`
    events.

    Args:
        paths: Run folders, folders of run folders, trace files (files without a run configuration next to them form one
            run together), patterns, `s3://`, `gs://` or `file://` URLs of these, or `-` for standard input.
        out: The tables folder, or its `s3://` or `gs://` URL. One process at a time writes to a folder, and a second
            one waits. In a bucket several processes can add different runs at the same time.
        server: Facts about the server in addition to the run's files.
        options: Which parts of the traces to keep.
        workers: Most processes that decode and build; one per core if not given.
        engine: Where these processes run: on this machine, or on Ray. The tables are the same, byte for byte.
        progress: Receives reports on the progress.

    Raises:
        UsageError: A path, a configuration file or an option is wrong, the folder cannot be written, or another process
            has changed the same run in a bucket; the tables are as they were.
        DataError: No run has vLLM spans, and nothing is written. If only some runs lack them, these are left out, and
            the result names them.

    Examples:
        >>> import tracefit
        >>> result = tracefit.ingest("runs/", "tables/")
        >>> [(run.run_id, run.requests) for run in result.runs]
        [('busy', 100)]
    """
    return ingest_and_hold(paths, out, None, server, options, engine=open_engine(engine, workers), progress=progress)


def ingest_and_hold(
    paths: PathsArgument,
    out: str | Path,
    held: ExitStack | None,
    server: ServerOptions | None,
    options: IngestOptions | None,
    *,
    engine: AbstractContextManager[TaskEngine],
    progress: Progress | None,
) -> IngestResult:
    """Ingest; see `ingest`. The folder stays locked until `held` is closed, so that what comes next is of these
    tables.
    """
    with open_inputs(paths, is_known=_known_traces(TableStore(out))) as inputs:
        return ingest_inputs(
            inputs, out, server or ServerOptions(), progress, options=options, engine=engine, held=held
        )


def _known_traces(store: TableStore) -> Callable[[TraceFile], bool]:
    """Return a function that says, without opening a file, whether its spans or steps were ingested before."""
    files: dict[str, ReadFile] = {}
    with suppress(DataError):  # raised where the tables are opened
        files = {file.path: file for run in store.manifest().runs.values() for file in run.files}

    def is_known(file: TraceFile) -> bool:
        entry = files.get(file.key)
        return (
            entry is not None
            and (entry.size_bytes, entry.modified_ns) == (file.size, file.modified_ns)
            and file.modified_ns is not None
            and any(part.spans or part.steps for part in entry.parts)
        )

    return is_known


def ingest_inputs(
    inputs: Inputs,
    out: str | Path,
    server: ServerOptions,
    progress: Progress | None,
    *,
    engine: AbstractContextManager[TaskEngine],
    options: IngestOptions | None = None,
    held: ExitStack | None = None,
) -> IngestResult:
    """Write the tables of runs, in their order; see `ingest`. `engine` is opened here, and `held` keeps the folder
    locked.
    """
    progress, options = KeptWarnings(progress), options or IngestOptions()
    store = TableStore(out)
    # Every configuration is read before anything is written: a wrong one must not leave half a result.
    contexts = _contexts(inputs.runs, server)
    # A folder of results holds logs and notes too: warn only of files that look like traces.
    left_out = [f"{left.name}: left out, {left.reason}" for left in inputs.left_out if left.is_notable]
    # The engine before the folder: without one, nothing is written. The folder is left after the engine: only then have
    # workers that an interruption stops left what they were writing.
    with ExitStack() as folder, engine as workplace:
        folder.enter_context(disk_errors(store.root))
        # A bucket has no lock to hold, only copies of its objects.
        owner = held if held is not None and store.storage.has_lock else folder
        owner.enter_context(store.lock(progress))
        folder.enter_context(store.removing_leftovers())
        runs = [RunIngest(source, context) for source, context in zip(inputs.runs, contexts, strict=True)]
        with store.storage.scratch() as scratch:
            IngestScheduler(runs, store, scratch, workplace, options, progress).ingest_all()
    # A failed run does not affect the others; if every run fails, the first error is the command's.
    failed = [run.failed for run in runs if run.failed is not None]
    if len(failed) == len(runs):
        raise failed[0]
    done = [run for run in runs if run.failed is None]
    unchanged = [run.run_id for run in done if run.rows is None]
    columns = (
        "run_id",
        "server",
        "events",
        "implausible",
        "unread",
        "models",
        "dialects",
        *_CLOCK_COLUMNS,
        *_OF_RUN,
        *_OF_SERVER,
    )
    rows_before = store.read("runs", unchanged, columns)
    built = [run.rows.select(columns) for run in done if run.rows is not None]
    rows = pl.concat([rows_before.select(columns), *built])
    facts = {one["run_id"]: one for one in _by_run(rows).iter_rows(named=True)}
    write_timelines(store, [run_id for run_id, own in facts.items() if is_small(own["events"], options.build)])
    summaries = {run.run_id: _summary(run.context, facts[run.run_id]) for run in done}
    for text in left_out:
        progress.warn(text)
    for text in dict.fromkeys(f"{run.run_id}: {text}" for run in done for text in run.context.left_out):
        progress.warn(text)
    ahead = _clocks_ahead(rows)
    for run in runs:
        of_run = (
            [f"left out: {run.failed.line()}"]
            if run.failed
            else [
                *_warnings_of(
                    store,
                    summaries[run.run_id],
                    facts[run.run_id],
                    ahead.get(run.run_id, ()),
                    run.context.settings,
                ),
                *_model_warnings(run, facts[run.run_id]["models"]),
            ]
        )
        for text in (*run.warnings, *of_run):
            progress.warn(text)
    return IngestResult(
        store.root, tuple(summaries.values()), tuple(progress.warnings), tuple(e.line() for e in failed)
    )


def _contexts(sources: Sequence[RunSource], server: ServerOptions) -> list[RunContext]:
    """Return the server of each run; the runs of a fleet have equal files, which are parsed once."""
    stated = stated_settings(server)
    contexts_by_key: dict[str, RunContext] = {}
    contexts = []
    for source in sources:
        configs = [server.run_config] if server.run_config else source.run_configs
        model_config = server.model_config or source.model_config
        try:
            # A file that the user names may be a pipe, which is read once.
            key: object = (
                server.run_config or [(file.name, read_bytes(file)) for file in configs],
                server.model_config or (model_config and read_bytes(model_config)),
            )
        except UsageError:
            key = source  # a long log, or a file that cannot be read
        starts = _starts_of(source)
        if (named := repr((key, starts))) not in contexts_by_key:
            contexts_by_key[named] = read_context(configs, model_config, stated, gpu=server.gpu, starts=starts)
        contexts.append(contexts_by_key[named])
    return contexts


_RECORD_FILES = re.compile(r"traces|\.(jsonl?|ndjson|binpb|pb|proto|otlp|parquet|csv)(\.|$)")
"""Names of files that are not a server's log, beside those of recordings. A log may have any other."""

_MOST_LOG_BYTES = 64 << 20


def _starts_of(source: RunSource) -> list[ServerStart]:
    """Return the starts of a run's server, in the order of time, from the logs beside its spans."""
    starts: list[ServerStart] = []
    recorded = [recording.file_name for recording in RECORDINGS.values() if recording.file_name]
    for file in source.trace_files:
        name = PurePath(file.path).name.lower()
        if not (_RECORD_FILES.search(name) or any(begin in name for begin in recorded)):
            with suppress(UsageError):  # it is reported where it is read
                starts += starts_of(lines_with(file, LOG_MARKS, most_bytes=_MOST_LOG_BYTES))
    return starts


def _by_run(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the facts of each run from its rows of the `runs` table, a row per server."""
    return rows.group_by("run_id").agg(
        pl.first("events", "implausible", "unread", "models", *_OF_RUN),
        pl.col("dialects").drop_nulls().str.split(",").explode().unique().sort(),
        pl.sum(*_OF_SERVER),
        servers=pl.len(),
    )


def _summary(context: RunContext, facts: Mapping[str, Any]) -> RunSummary:
    counts = {name: int(facts[name]) for name in ("servers", *_OF_RUN, *_OF_SERVER)}
    implausible = sum(json.loads(facts["implausible"] or "{}").values())
    return RunSummary(
        run_id=facts["run_id"],
        deployment_id=deployment_of(context).deployment_id,
        implausible=implausible,
        unread=(*context.settings.unread, *json.loads(facts["unread"] or "[]")),
        mixed=doubts_of_models(context, facts["models"]).mixed,
        **counts,
    )


def doubts_of_models(context: RunContext, models: str | None) -> ModelDoubts:
    """Return the doubts whether a run is of one model, from its server and `models` of its rows of the `runs` table."""
    named = [NamedModel(*each) for each in json.loads(models or "[]")]
    return model_doubts(
        named, context.served_names(), context.config_name(), has_adapters=context.settings.has_adapters
    )


def _model_warnings(run: RunIngest, models: str | None) -> list[str]:
    doubts = doubts_of_models(run.context, models)
    return [f"{run.run_id}: {text}" for text in (*doubts.mixed, *doubts.possible)]


def _clocks_ahead(rows: pl.DataFrame) -> dict[str, list[tuple[str, float, float]]]:
    """Return the servers of each run whose API has another clock than the core, how far it is ahead and to what error
    (us).
    """
    clocks_of: dict[str, list[tuple[str, float, float]]] = {}
    for run_id, *clock in rows.select("run_id", "server", *_CLOCK_COLUMNS).drop_nulls().iter_rows():
        clocks_of.setdefault(run_id, []).append(tuple(clock))
    return clocks_of


def _warnings_of(
    store: TableStore,
    run: RunSummary,
    facts: Mapping[str, Any],
    ahead: Iterable[tuple[str, float, float]],
    settings: ServerSettings,
) -> list[str]:
    run_id, texts = run.run_id, []
    shared = json.loads(facts["implausible"] or "{}").get(SHARED_NAME, 0)
    if shared:
        texts.append(f"{run_id}: {SHARED_NAME}; {shared:,} steps of them were left out")
    if run.rejects:
        records = "1 record" if run.rejects == 1 else f"{run.rejects:,} records"
        texts.append(f"{run_id}: {records} could not be read ({_reasons(store, run_id)}); see the rejects table")
    texts += [f"{run_id}: {text}" for text in run.unread]
    for server, ahead_us, error_us in ahead:
        side = "ahead of" if ahead_us > 0 else "behind"
        texts.append(
            f"{run_id}: the API's clock was {abs(ahead_us) / 1e3:,.1f} ms {side} the engine core's on {server}, "
            f"to {error_us / 1e3:,.1f} ms, by the order of their events; the API's events were moved"
        )
    if run.implausible > shared:
        texts.append(
            f"{run_id}: {run.implausible - shared:,} implausible values were left out "
            f"({_rules(facts['implausible'])}); `tracefit inspect` counts them by rule, the rejects table lists them"
        )
    unmatched = json.loads(facts["events"]).get(UNMATCHED, 0)
    if unmatched and UNMATCHED not in (facts["implausible"] or ""):
        texts.append(f"{run_id}: {unmatched:,} {UNMATCHED} were left out")
    if run.dropped_events:
        texts.append(f"{run_id}: {dropped_events(run.dropped_events)}; {plain(RAISE_EVENT_LIMIT)}")
    if run.duplicate_spans:
        what = "spans" if run.spans else "records"
        texts.append(f"{run_id}: {run.duplicate_spans} {what} were there twice and count once")
    sources = [SOURCES[name] for name in facts["dialects"] or () if name in SOURCES]
    if run.lost_steps:
        reasons = dict.fromkeys(source.if_lost for source in sources if source.if_lost)
        texts.append(
            f"{run_id}: {run.lost_steps:,} numbers of the step counter have no record: "
            + ("; ".join(reasons) or "these steps were lost, or left out of the file")
        )
    if settings.is_sglang and settings.async_scheduling is not False:
        of_sglang = [SOURCES.get(source.from_sglang, source) for source in sources]
        texts += [f"{run_id}: {text}" for text in dict.fromkeys(source.caution for source in of_sglang) if text]
    return texts


def _rules(implausible: str) -> str:
    """Sum up the rules that values break, those that most break first; engines that share a name have a line of their
    own.
    """
    rules: dict[str, int] = json.loads(implausible)
    rules.pop(SHARED_NAME, None)
    ordered = sorted(rules.items(), key=lambda rule: (-rule[1], rule[0]))
    listed = [f"{count:,} {rule}" for rule, count in ordered[:_MOST_REJECT_REASONS]]
    return ", ".join([*listed, *(["…"] if len(ordered) > _MOST_REJECT_REASONS else [])])


def _reasons(store: TableStore, run_id: str) -> str:
    """Sum up why records were rejected: "gzip data is cut" says that the rest of a file is not there, its one record
    does not.
    """
    implausible = store.read("runs", [run_id], ["implausible"])["implausible"][0]
    rules = json.loads(implausible or "{}")
    rejects = store.read("rejects", [run_id], ["reason", "count"]).filter(~pl.col("reason").is_in(list(rules)))
    totals = rejects.group_by("reason").agg(pl.col("count").sum()).sort(-pl.col("count"), "reason")
    listed = [f"{count:,} {reason}" for reason, count in totals.head(_MOST_REJECT_REASONS).iter_rows()]
    return ", ".join([*listed, *(["…"] if totals.height > _MOST_REJECT_REASONS else [])])


def stated_settings(server: ServerOptions) -> ServerSettings:
    """Return the settings that the user states.

    Raises:
        UsageError: A setting's name looks misspelt, or its value is not allowed.
    """
    settings = server.settings or {}
    for key in settings:
        _require_no_typo(key)
    return settings_from({**settings, "tensor_parallel": server.tp}, where=named(ServerOptions, "settings"))


def parse_assignments(texts: Iterable[str]) -> dict[str, object]:
    """Read `key=value` settings from the command line; values as YAML reads them.

    Raises:
        UsageError: A text without an equals sign, a key that is nearly that of a setting, or a value that is not YAML.
    """
    values: dict[str, object] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise UsageError(
                f"{named(ServerOptions, 'settings')} {excerpt(text)}: not of the form KEY=VALUE",
                hint="for example max_num_seqs=128",
            )
        _require_no_typo(key)
        values[key.strip()] = parse_yaml(value, where=f"{named(ServerOptions, 'settings')} {excerpt(key.strip())}")
    return values


def _require_no_typo(key: str) -> None:
    """Refuse a key that is nearly that of a setting; any other is kept as a fact of the deployment."""
    name = canonical_name(key)
    # A cutoff this high catches typos and lets settings of newer servers pass.
    meant = None if name in SETTING_NAMES else did_you_mean(name, SETTING_NAMES, cutoff=0.85)
    if meant:
        raise UsageError(f"{named(ServerOptions, 'settings')} {excerpt(key.strip())}: no such setting", hint=meant)


def plan_ingest(paths: PathsArgument, out: IngestOutOption, *, options: IngestOptions | None = None) -> IngestPlan:
    """Return which files `ingest` would read from the same paths into the same folder. Nothing is written.

    Raises:
        UsageError: A path is wrong or cannot be read.
        DataError: The folder's manifest is damaged, or a file that was named holds OTLP logs or metrics.
    """
    store = TableStore(out)
    with open_inputs(paths, is_known=_known_traces(store)) as inputs:
        files = [f for source in inputs.runs for f in _planned(source, store, options or IngestOptions())]
        return IngestPlan(tuple(files), tuple(f"{left.name}: {left.reason}" for left in inputs.left_out))


def _planned(source: RunSource, store: TableStore, options: IngestOptions) -> Iterator[PlannedFile]:
    manifest = store.manifest()
    run_id = resolve_run_id(manifest, source)
    usable = usable_files(manifest.runs.get(run_id), hash_of_kept(options), lambda: staged_parts(store.storage))
    for file in source.trace_files:
        contents, entry = inspect_file(file), usable.get(file.key)
        # A file in a bucket that was written again may be the same all the same.
        is_same = unchanged(file, entry) or (
            entry is not None and file.filesystem is not None and unchanged(file, entry, content_hash_of(file))
        )
        yield PlannedFile(
            run_id=run_id,
            file=file.name,
            shape=str(contents),
            compression=contents.compression,
            bytes=file.size,
            status="known" if is_same else "grown" if entry else "new",
            bytes_to_read=0 if is_same else file.size,
        )
