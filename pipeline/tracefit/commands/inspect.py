"""Inspect traces before fitting: facts, health of the journeys, and the models that can be trained."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias

import polars as pl

from tracefit.commands.deployments import deployments_of, write_timelines
from tracefit.commands.ingest import doubts_of_models, ingest_inputs
from tracefit.commands.locate import as_list, find_tables, is_tables
from tracefit.engines.local import LocalEngine
from tracefit.errors import UsageError
from tracefit.features.sets import FeatureSet
from tracefit.features.training import beta_rows
from tracefit.fit import splits
from tracefit.fit.results import COVERED_SHARE
from tracefit.fit.splits import MIN_HOLDOUT_ROWS, MIN_TRAIN_ROWS
from tracefit.inputs.blocks import inspect_file
from tracefit.inputs.discovery import open_inputs
from tracefit.models import targets
from tracefit.options import InspectedArgument, ServerOptions, named
from tracefit.progress import NullProgress, Progress
from tracefit.results.traces import (
    Allowance,
    DeploymentInspection,
    FileShape,
    Inspection,
    RunFacts,
    ScopeSpans,
    ServerFacts,
)
from tracefit.server.settings import (
    JOURNEY_FLAGS,
    NO_PREFIX_CACHE,
    NOT_OF_STOCK,
    SGLANG_STEPS,
    SNAPSHOT_FLAG,
    context_remedy,
    journey_remedy,
    step_remedy,
)
from tracefit.tables.dialects import CLIENT, SGLANG_DIALECT, dialect_of, is_known
from tracefit.tables.health import Check, health_checks
from tracefit.tables.runs import are_stock, step_counters
from tracefit.tables.sources import ADJACENT, REQUEST_SOURCE, SOURCES, is_from
from tracefit.tables.store import TableStore
from tracefit.text import plural
from tracefit.timeline import (
    clock_disagreements,
    events_of,
    execution_lags,
    is_at_recording_end,
    unknown_batches,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tracefit.inputs.files import TraceFile
    from tracefit.models.targets import Target
    from tracefit.results.traces import Allowed
    from tracefit.server.context import Deployment, RunContext


_TABLES_READ = ("runs", "spans", "journey_events", "requests", "steps", "timeline", "request_snapshots")
"""Tables that facts and evidence are taken from, read run by run."""


def inspect(
    paths: InspectedArgument,
    *,
    server: ServerOptions | None = None,
    progress: Progress | None = None,
) -> Inspection:
    """Describe traces or tables without fitting anything.

    Args:
        paths: Run folders, folders of run folders or trace files; or one folder that `run` or `ingest` wrote.
        server: Facts about the server in addition to the run's files; they do not change tables.
        progress: Receives reports on the progress.

    Raises:
        UsageError: A path, a configuration file or an option is wrong.
        DataError: A run has no vLLM spans.

    Examples:
        >>> import tracefit
        >>> (deployment,) = tracefit.inspect("runs/").deployments
        >>> {each.what: each.verdict for each in deployment.allows}["queue wait"]
        'yes'
    """
    paths = as_list(paths)
    progress = progress or NullProgress()
    tables = _tables_of(paths)
    if tables is not None:
        store = TableStore(tables).require()
        write_timelines(store, store.runs())
        return _inspect_tables(store, {}, progress)
    # Read as `ingest` reads, so that what is described here is what would be trained on.
    with tempfile.TemporaryDirectory(prefix="tracefit-inspect-") as scratch, open_inputs(paths) as inputs:
        ingest_inputs(inputs, scratch, server or ServerOptions(), progress, engine=LocalEngine())
        store = TableStore(scratch)
        write_timelines(store, store.runs())
        # By file: two sources with the same files are one run.
        sources = {file.key: file for source in inputs.runs for file in source.trace_files}
        files = {
            run_id: tuple(_file_shape(sources[known.path]) for known in run.files)
            for run_id, run in store.manifest().runs.items()
        }
        return _inspect_tables(store, files, progress)


def _tables_of(paths: list[str | Path]) -> Path | None:
    """Return the tables that the paths stand for, if they are tables and not traces."""
    if len(paths) != 1:
        return None
    try:
        tables = find_tables(paths[0])
        return tables if is_tables(tables) else None
    except UsageError:
        if os.path.lexists(paths[0]):
            raise
        # Traces in a bucket are read in other ways too: with options in their URL, without the library for tables.
        return None


def _file_shape(file: TraceFile) -> FileShape:
    contents = inspect_file(file)
    return FileShape(file.name.rpartition("/")[2], file.size, contents.compression or "none", str(contents))


def _scopes(spans: pl.DataFrame) -> tuple[ScopeSpans, ...]:
    counts: Counter[tuple[str, str | None]] = Counter()
    names = spans.filter(is_known()).group_by("scope", "name").len().sort("scope", "name")
    for scope, name, count in names.iter_rows():
        counts[scope, dialect_of(scope, name)] += count
    return tuple(ScopeSpans(scope, count, dialect) for (scope, dialect), count in counts.items())


def _inspect_tables(store: TableStore, files: dict[str, tuple[FileShape, ...]], progress: Progress) -> Inspection:
    facts: dict[str, RunFacts] = {}
    deployments: list[DeploymentInspection] = []
    for deployment, members in deployments_of(store.read("runs"), str(store.root)):
        evidence: Evidence = Counter()
        unknown: dict[str, None] = {}
        hits: dict[str, float] = {}
        for run_id in members:
            progress.stage(f"inspecting {run_id}")
            tables = {name: store.read(name, [run_id]) for name in _TABLES_READ}
            facts[run_id] = _run_facts(run_id, deployment, tables, files.get(run_id, ()))
            evidence.update(_evidence(tables))
            settings = deployment.context.settings
            batches = unknown_batches(
                tables["requests"],
                settings.max_num_batched_tokens,
                has_steps=bool(tables["steps"].height),
                traced_share=settings.journey_tracing_sample_rate,
            )
            unknown.update(dict.fromkeys(batches["reason"]))
            if settings.enable_prefix_caching is not False:
                hits |= _whole_prompts(tables)
        allows = _allowances(evidence, deployment.context, "; ".join(unknown), hits)
        deployments.append(DeploymentInspection(deployment.deployment_id, tuple(members), allows))
    return Inspection(tuple(facts[run_id] for run_id in store.runs()), tuple(deployments))


def _whole_prompts(tables: Mapping[str, pl.DataFrame]) -> dict[str, float]:
    """Return the servers whose spans show prefix-cache hits, as training finds them: tokens of prompts that are surely
    whole.
    """
    timeline = tables["timeline"]
    if REQUEST_SOURCE.name not in timeline["cycle_source"]:
        return {}
    lags = execution_lags(timeline, events_of(tables["requests"]))
    ahead = {(run_id, server): lag for run_id, server, lag in lags.iter_rows()}
    rows = beta_rows(timeline, FeatureSet("prompts", splits.PROMPT_FEATURES), {}, ahead, "clock")
    return splits.mark_prefix_hits(splits.split_by_time(rows))[1]


def _run_facts(
    run_id: str, deployment: Deployment, tables: Mapping[str, pl.DataFrame], files: tuple[FileShape, ...]
) -> RunFacts:
    rows, spans, journeys = tables["runs"], tables["spans"], tables["journey_events"]
    first = rows.row(0, named=True)
    checks = health_checks(journeys, tables["requests"], tables["steps"])
    clock = clock_disagreements(tables["timeline"], journeys)
    return RunFacts(
        run_id=run_id,
        deployment_id=deployment.deployment_id,
        bytes=first["bytes"],
        files=files,
        services=tuple(spans["service_name"].drop_nulls().unique().sort()),
        scopes=_scopes(spans),
        other_spans=first["other_spans"],
        other_scopes=json.loads(first["other_scopes"] or "{}"),
        servers=tuple(ServerFacts(**row) for row in rows.select(ServerFacts.__slots__).iter_rows(named=True)),
        events=json.loads(first["events"]),
        rejects=first["rejects"],
        implausible=json.loads(first["implausible"] or "{}"),
        missing_attributes=json.loads(first["missing_attributes"] or "{}"),
        unread=tuple(json.loads(first["unread"] or "[]")),
        models=tuple(chain(*doubts_of_models(deployment.context, first["models"]))),
        duplicate_spans=first["duplicate_spans"],
        checks=(*checks, _clock_check(clock)),
    )


def _clock_check(disagreements: pl.DataFrame) -> Check:
    of, bad = (int(disagreements[c].sum() or 0) for c in ("events", "disagreeing"))
    detail = f"{bad:,} stamped outside the step they name" if bad else ""
    return Check("events within their steps", of - bad, of, detail)


# -- evidence for models ---------------------------------------------------------------------------------
#
# Counts by name, so that those of several runs of one deployment add up: facts of the timeline and of the requests, and
# for each target the rows that training would use and hold out.

Evidence: TypeAlias = "Counter[str]"
_STEP_TIME = "step time"


def _evidence(tables: Mapping[str, pl.DataFrame]) -> Evidence:
    """Count the evidence in the tables of one run."""
    steps, timeline, requests = tables["steps"], tables["timeline"], tables["requests"]
    counters = step_counters(steps, tables["journey_events"])
    cycles = timeline.drop_nulls("cycle_us")
    busy = cycles.filter(~pl.col("idle_after"))
    adjacent = busy.filter(cycle_source=ADJACENT.name)
    evidence: Evidence = Counter(dict(busy.group_by("cycle_source").len().iter_rows()))
    evidence.update(
        steps=steps.height,
        logged_steps=timeline.filter(is_from(lambda source: source.is_stamped, "composition_source")).height,
        prompt_tokens=int(requests["prompt_tokens"].sum() or 0),
        prompts=int(timeline["num_prefill_reqs"].sum() or 0),
        computed_tokens=int(timeline["prefill_tokens"].sum() or 0),
        cut_off=timeline.filter(is_at_recording_end()).height,
        idle=cycles.filter("idle_after").height,
        busy_ns=round(1000 * adjacent["cycle_us"].sum()),
        covered_ns=round(1000 * adjacent["duration_us"].sum()),
        compared_steps=timeline["journey_agrees"].count(),
        agreeing_steps=timeline.filter("journey_agrees").height,
        steps_with_context=timeline["context_tokens"].count(),
        steps_with_estimate=timeline.filter("context_estimated").height,
        timeline_steps=timeline.height,
        requests=requests.height,
        instrumented_runs=int(not are_stock(tables["runs"])),
        requests_of_sglang=requests.filter(dialect=SGLANG_DIALECT).height,
        requests_of_clients=requests.filter(dialect=CLIENT).height,
        # Only complete journeys give the running requests of every step.
        complete_runs=int(timeline["running_after"].is_not_null().any()),
        runs=1,
        latencies=requests.drop_nulls(["ttft_us", "e2e_us"]).height,
        snapshots=tables["request_snapshots"].height,
        requests_with_cache=requests["cached_prompt_tokens"].count(),
    )
    evidence.update(_rows(_STEP_TIME, cycles, "ts_start_ns", "step_id", counters, idle=pl.col("idle_after")))
    for t in targets.TARGETS:
        known = requests.drop_nulls([t.column, t.begins])
        evidence.update(_rows(t.name, known, t.begins, t.step, counters, idle=pl.lit(value=False)))
    return evidence


def _rows(target: str, frame: pl.DataFrame, time: str, step: str, counters: pl.DataFrame, *, idle: pl.Expr) -> Evidence:
    """Split the rows of a target as training does, and count those it would use."""
    marked = frame.with_columns(ts_ns=pl.col(time), excluded_reason=pl.when(idle).then(pl.lit(splits.IDLE_GAP)))
    # The same split and marks as in training: the counts are those that a fit would see.
    split = splits.mark_warm_up(splits.split_by_time(marked), counters, step)
    return Counter({f"{target}, {part}": splits.counted_rows(split, part).height for part in ("train", "holdout")})


_Judgement: TypeAlias = "tuple[Allowed, str]"
"""A verdict and its reason."""


def _allowances(e: Evidence, context: RunContext, unknown: str, hits: Mapping[str, float]) -> tuple[Allowance, ...]:
    """Return which models the counts of one deployment allow, in reading order."""
    waits = {target.title: _wait(e, target) for target in targets.TARGETS}
    judged = {
        _STEP_TIME: _step_time(e, unknown),
        **({"step.duration_us": _durations(e)} if e["instrumented_runs"] else {}),
        "batch composition": _composition(e, hits),
        "context tokens": _context(e),
        "queue state": _queue_state(e),
        **waits,
        "TTFT, ITL and E2E": _latency(e),
        "prefix hits": _prefix_hits(e, hits),
        "roofline features": _hardware(context),
    }
    return tuple(
        Allowance(what, verdict, reason, trains=verdict == "yes" and (what == _STEP_TIME or what in waits))
        for what, (verdict, reason) in judged.items()
    )


def _suffice(e: Evidence, target: str) -> bool:
    return e[f"{target}, train"] >= MIN_TRAIN_ROWS and e[f"{target}, holdout"] >= MIN_HOLDOUT_ROWS


def _step_time(e: Evidence, unknown: str) -> _Judgement:
    counts: Counter[str] = Counter()
    for source in SOURCES.values():
        counts[source.evidence] += e[source.name]
    counts["idle gaps"] = e["idle"]
    counts["steps at the ends of the recording, where requests may be missing"] = e["cut_off"]
    steps = ", ".join(f"{n:,} {name}" for name, n in counts.items() if n)
    if _suffice(e, _STEP_TIME):
        without = f"; of some servers no step is known: {unknown}" if unknown else ""
        return "yes", f"{steps}; {_split(e, _STEP_TIME)}{without}"
    if unknown:
        return "no", f"the batches of the steps are not known: {unknown}"
    if not e["timeline_steps"]:
        is_sglang = 0 < e["requests"] == e["requests_of_sglang"]
        remedy = SGLANG_STEPS if is_sglang else step_remedy(stock=not e["instrumented_runs"])
        return "no", f"no step is known; {remedy}"
    return "no", f"{steps or 'no two known starts'}; {_too_few(e, _STEP_TIME)}"


def _without_steps(e: Evidence) -> _Judgement:
    """Say that no step is known; the remedy for an unmodified server is in the reason of the step time."""
    return "no", f"no step is known; {step_remedy(stock=False)}" if e["instrumented_runs"] else "no step is known"


def _durations(e: Evidence) -> _Judgement:
    if not e["busy_ns"] or not e["covered_ns"]:
        return "no", "no consecutive steps with a duration to compare with the step clock"
    covers = f"covers {_share(e['covered_ns'], e['busy_ns'])} of busy time"
    if e["covered_ns"] >= COVERED_SHARE * e["busy_ns"]:
        return "yes", f"{covers}: it is the step time"
    return "no", f"{covers}: it is the time inside schedule(), not the step"


def _composition(e: Evidence, hits: Mapping[str, float]) -> _Judgement:
    if hits:
        return (
            "limited",
            "every step, from the times of the requests, but prompt tokens in the cache count too",
        )
    if e["complete_runs"] and e["complete_runs"] == e["runs"]:
        agree = f"{_share(e['agreeing_steps'], e['compared_steps'])} of sampled steps agree with their summary"
        counted = "the times of the requests (assumed: every request has a span)"
        source = counted if e[REQUEST_SOURCE.name] else _complete(e)
        return "yes", f"every step, from {source}" + (f"; {agree}" if e["compared_steps"] else "")
    if e["logged_steps"] and e["logged_steps"] == e["timeline_steps"]:
        return "yes", "every step, from the lines of the log"
    if e["steps"]:
        return "limited", f"of the {e['steps']:,} sampled steps, from their summaries"
    return _without_steps(e)


def _context(e: Evidence) -> _Judgement:
    if not e["steps_with_context"]:
        if e["logged_steps"]:
            return (
                "no",
                (
                    "the log does not have them; "
                    f"{context_remedy(*(e[n] for n in ('requests', 'prompt_tokens', 'prompts', 'computed_tokens')))}"
                ),
            )
        if not e["instrumented_runs"]:
            return _without_steps(e)
        flags = f"{JOURNEY_FLAGS}, or {SNAPSHOT_FLAG}"
        return "no", f"no complete journeys and no whole sets of snapshots; start with {flags}"
    known = f"known on {_share(e['steps_with_context'], e['timeline_steps'])} of steps"
    if e["steps_with_estimate"]:
        share = _share(e["steps_with_estimate"], e["timeline_steps"])
        return "limited", f"{known}, estimated from the KV blocks in use on {share}"
    return "yes" if e["steps_with_context"] == e["timeline_steps"] else "limited", known


def _complete(e: Evidence) -> str:
    """Name the requests that are known from begin to end."""
    return "complete journeys" if e["instrumented_runs"] else "the span of every request"


def _queue_state(e: Evidence) -> _Judgement:
    if 0 < e["requests"] == e["requests_of_clients"]:
        return "no", "a client does not see what waits in the server"
    if e["complete_runs"] and e["complete_runs"] == e["runs"]:
        return (
            "yes",
            f"exact, from {'steps counted from requests' if e[REQUEST_SOURCE.name] else _complete(e)}",
        )
    if e["steps"]:
        return (
            "limited",
            f"that of the latest of {e['steps']:,} {'logged' if e['logged_steps'] else 'sampled'} steps",
        )
    return _without_steps(e)


def _wait(e: Evidence, target: Target) -> _Judgement:
    if _suffice(e, target.name):
        return "yes", _split(e, target.name, "requests")
    is_stock = not e["instrumented_runs"]
    remedy = journey_remedy(stock=is_stock, after_last_token=target.adds_to == "client")
    if not e["requests"]:
        return "no", f"no {'requests' if is_stock else 'journeys'}; {remedy}"
    if is_stock and not e[f"{target.name}, train"]:
        return "no", f"the spans of these requests do not carry it; {remedy}"
    return "no", _too_few(e, target.name, "requests with both events")


def _latency(e: Evidence) -> _Judgement:
    if e["latencies"]:
        return "yes", f"measured on {e['latencies']:,} of {e['requests']:,} requests"
    return "no", "no request with ARRIVED, FIRST_TOKEN and FINISHED"


def _prefix_hits(e: Evidence, hits: Mapping[str, float]) -> _Judgement:
    if hits:
        longest = min(hits.values())
        effect = (
            f"step times of prompts up to {longest:.0f} tokens are without"
            if longest
            else "of prompts of any length: what a prompt token takes is uncertain"
        )
        return "no", f"they show in the times, and no span names them; {effect}; {NO_PREFIX_CACHE}"
    if e["requests_with_cache"]:
        return "yes", f"known for {plural(e['requests_with_cache'], 'request')}"
    if e["snapshots"]:
        return "no", f"{e['snapshots']:,} snapshots, none with request.effective_prompt_len"
    return "no", f"no snapshots; {SNAPSHOT_FLAG}" if e["instrumented_runs"] else NOT_OF_STOCK


def _hardware(context: RunContext) -> _Judgement:
    needed = {
        f"config.json ({named(ServerOptions, 'model_config')})": context.architecture,
        f"a GPU ({named(ServerOptions, 'gpu')})": context.gpu,
    }
    if missing := [text for text, known in needed.items() if known is None]:
        return "no", f"without {' and '.join(missing)}"
    return "yes", "config.json and GPU are known"


def _split(e: Evidence, target: str, rows: str = "rows") -> str:
    return f"{e[f'{target}, train']:,} {rows} to train on, {e[f'{target}, holdout']:,} held out"


def _too_few(e: Evidence, target: str, rows: str = "rows") -> str:
    return f"{_split(e, target, rows)}: at least {MIN_TRAIN_ROWS} and {MIN_HOLDOUT_ROWS} are needed"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "none"
