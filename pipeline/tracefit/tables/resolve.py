"""Decide from all spans of some runs which spans count, which server each belongs to, and how the clocks compare.

Each span takes about a hundred bytes here: its ids, its times and the clock of its events. Nothing else of a whole run
is in memory at once.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa

from tracefit.tables import dialects
from tracefit.tables.clocks import CLOCK_FACTS, clocks_of, split_engines, without_lone_clocks
from tracefit.tables.qualified import qualified
from tracefit.tables.record_servers import NAMED_RECORD, clock_setbacks, record_servers, with_names
from tracefit.tables.rows import RECORDED_STEPS
from tracefit.tables.sources import is_from
from tracefit.tables.staging import read_staged

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tracefit.tables.spread import Spread
    from tracefit.tables.storage import Storage
    from tracefit.tables.store import ReadFile

_ENGINE_FACTS = ("server", "start_unix_ns", "end_unix_ns", *CLOCK_FACTS)
_NARROW = (
    "file",
    "row",
    "trace_id",
    "span_id",
    "parent_span_id",
    "scope",
    "request_id",
    "thread",
    *_ENGINE_FACTS,
)
_TRACE_ID = ["run", "trace_high", "trace_low"]
_SPAN_IDS = [*_TRACE_ID, "span"]
_SCOPES = pl.Enum(dialects.READ_SCOPES)
_HEX_DIGITS_OF_64_BITS = 16
_PARTS_AT_ONCE = 8
_FILES = {"file": pl.UInt32, "file_order": pl.UInt32, "source_file": pl.String, "run": pl.UInt32}


class RunPart(msgspec.Struct, frozen=True):
    """A staged part of some runs.

    Attributes:
        name: Its name.
        files: file (number in the part), file_order (of the file among those of all runs), source_file, run (its
            number). Rows of other files do not count.
        has_records: Whether recorded steps are among its rows.
    """

    name: str
    files: pl.DataFrame
    has_records: bool

    def of_files(self, rows: pl.DataFrame, *columns: str) -> pl.DataFrame:
        """Return the rows that count, with some of `file_order`, `source_file` and `run` instead of `file`."""
        named = self.files.select("file", *columns)
        return rows.join(named, on="file", how="inner", maintain_order="left").drop("file")


def parts_of(runs: Sequence[Sequence[ReadFile]]) -> list[RunPart]:
    """Return the parts of the files of all runs; the order of the files decides which of two equal spans counts."""
    rows: dict[str, list[tuple[int, int, str, int]]] = {}
    placed = ((file, part, run) for run, files in enumerate(runs) for file in files for part in file.parts)
    for order, (file, part, run) in enumerate(placed):
        rows.setdefault(part.name, []).append((part.file, order, file.path, run))
    recorded = {part.name for files in runs for file in files for part in file.parts if part.steps}
    return [
        RunPart(name, pl.DataFrame(files, schema=_FILES, orient="row"), name in recorded)
        for name, files in rows.items()
    ]


class ResolvedRuns(msgspec.Struct, frozen=True):
    """The staged parts of some runs, and facts of all their spans, numbered from part to part.

    Names of servers and traces are qualified if there are several runs.

    Attributes:
        several: Whether there are several runs.
        parts: The parts.
        firsts: Number of the first span of each part; at the end, the number of spans.
        facts: server, core_zero (wall clock less engine clock of the core spans in the trace), server_zero
            (the same, of the server) of each span; the server is null for spans that do not count.
        spans_read: Spans of the files of each run, by its number, duplicates included.
        clocks: The ranges of wall clock less engine clock that each server's spans agree on: server, low, high.
        twins: row, twin: for spans without events, the trace whose events describe the same request.
        log_owners: Number of a run to the one server of its spans, if its log also has one engine.
        record_servers: New names of engines in recordings, as `record_servers` returns them.
        clock_setbacks: Where the clocks of logs were set back, as `clock_setbacks` returns them.
        owners: row, owner: for spans of stages, the span of their request; null for spans that repeat another rank's.
    """

    several: bool
    parts: Sequence[RunPart]
    firsts: list[int]
    facts: pl.DataFrame
    spans_read: dict[int, int]
    clocks: pl.DataFrame
    twins: pl.DataFrame
    log_owners: dict[int, str]
    record_servers: pl.DataFrame
    clock_setbacks: pl.DataFrame
    owners: pl.DataFrame


def resolve(storage: Storage, parts: Sequence[RunPart], *, several: bool = False, spread: Spread = map) -> ResolvedRuns:
    """Find the spans of some runs that count, with their servers, and the clocks of the servers.

    A span is identified by (run, trace_id, span_id): if it was read twice, the first one counts.

    Args:
        storage: The folder or bucket of the staged parts.
        parts: The parts of the runs, at least one.
        several: Whether there are several runs.
        spread: Reads the parts; here, one after the other, if not given.
    """
    every, firsts = [], [0]
    some_parts = (parts[at : at + _PARTS_AT_ONCE] for at in range(0, len(parts), _PARTS_AT_ONCE))
    for some in spread(partial(_narrow_parts, storage, several=several), some_parts):
        for spans, height in some:
            every.append(spans.with_columns(pl.col("row") + pl.lit(firsts[-1], pl.UInt32)))
            firsts.append(firsts[-1] + height)
    spans = pl.concat(every)
    every.clear()  # the largest frames of this function: free them before the joins below
    # A part that several files share has rows of all of them: if two spans are equal, the one of the first file counts.
    if not spans["file_order"].is_sorted():
        spans = spans.sort("file_order", maintain_order=True)
    spans_read = dict(spans.group_by("run").len().iter_rows()) if several else {0: spans.height}
    spans = without_lone_clocks(_without_repeats(spans.drop("file_order"))).with_row_index("span_row")

    def marks_of(wanted: pl.DataFrame) -> pl.DataFrame:
        """Return the clock and the step counter of the events of some spans."""
        rows = spans.select("span_row", "row").join(wanted, on="span_row", how="semi")
        marks = []
        for part, (first, end) in zip(parts, pairwise(firsts), strict=True):
            if rows["row"].is_between(first, end, closed="left").any():
                events = _events_of(storage, part.name).with_columns(pl.col("row") + pl.lit(first, pl.UInt32))
                marks.append(rows.join(events, on="row", how="inner").drop("row"))
        return pl.concat(marks)

    spans = _with_server(spans, marks_of)
    twins = _twins(spans, several=several)
    if twins.height:
        spans = spans.join(twins, on="row", how="left", maintain_order="left")
        spans = spans.with_columns(server=pl.coalesce("twin_server", "server"))
    owners = _owners(spans)
    if owners.height:
        spans = spans.join(owners.select("row", "engine"), on="row", how="left", maintain_order="left")
        spans = spans.with_columns(server=pl.coalesce("engine", "server"))
    records = _named_records(storage, parts, several=several)
    renamed, setbacks = record_servers(records), clock_setbacks(records)
    del records
    numbers = pl.DataFrame({"row": np.arange(firsts[-1], dtype=np.uint32)})
    facts = numbers.join(_facts(spans), on="row", how="left", maintain_order="left").drop("row")
    return ResolvedRuns(
        several,
        parts,
        firsts,
        facts,
        spans_read,
        clocks_of(spans),
        twins.select("row", "twin"),
        _log_owners(storage, parts, spans.select("run", "server").unique(), renamed, several=several),
        renamed,
        setbacks,
        owners.drop_nulls("owner").select("row", "owner"),
    )


def _named_records(storage: Storage, parts: Sequence[RunPart], *, several: bool) -> pl.DataFrame:
    """Return the steps that engines recorded: source_file, file_order, and `NAMED_RECORD`."""
    frames = [pl.DataFrame(schema=_FILES | {name: RECORDED_STEPS[name] for name in NAMED_RECORD})]
    for part in (part for part in parts if part.has_records):
        rows = read_staged(storage, part.name, "recorded_steps", ("file", "cycle_source", *NAMED_RECORD))
        rows = rows.filter(is_from(lambda source: source.seen_by == "engine"))
        rows = part.of_files(rows, "file_order", "source_file", "run")
        frames.append(rows.with_columns(qualified("server")) if several else rows)
    return pl.concat(frame.select("source_file", "file_order", *NAMED_RECORD) for frame in frames)


def _log_owners(
    storage: Storage,
    parts: Sequence[RunPart],
    servers: pl.DataFrame,
    renamed: pl.DataFrame,
    *,
    several: bool,
) -> dict[int, str]:
    """Return the server of the spans of each run that has one server and one engine with records of it."""
    engines: dict[int, set[str]] = {}
    for part in (part for part in parts if part.has_records):
        rows = read_staged(storage, part.name, "recorded_steps", ("file", "server", "cycle_source"))
        logged = part.of_files(rows.filter(is_from(lambda source: source.of_traced_server)), "run", "source_file")
        if several:
            logged = logged.with_columns(qualified("server"))
        engines_of_part = with_names(logged, renamed).select("run", "server").drop_nulls().unique()
        for run, engine in engines_of_part.iter_rows():
            engines.setdefault(run, set()).add(engine)
    with_one_server = servers.unique("run", keep="none").select("run", "server")
    return {run: str(server) for run, server in with_one_server.iter_rows() if len(engines.get(run, ())) == 1}


def _twins(spans: pl.DataFrame, *, several: bool) -> pl.DataFrame:
    """Return the trace and server of the events with the request id of a stock span: row, twin, twin_server.

    A plugin inside the server starts a new trace if the client sends no trace id. An id in several traces is ambiguous.
    """
    scope = pl.col("scope")
    columns = ("row", "run", "request", "trace_high", "trace_low", "server")
    is_named = pl.col("request").is_not_null()
    stock_scopes = [s for s in dialects.FRONT_SCOPES if s not in dialects.API_SCOPES]
    stock = spans.filter(is_named & scope.is_in(stock_scopes)).select("row", "run", "request")
    # Without stock spans, skip a second pass over the spans with events: there may be millions.
    events_scopes = [*dialects.API_SCOPES, *dialects.CORE_SCOPES] if stock.height else []
    events = spans.filter(is_named & scope.is_in(events_scopes)).select(columns)
    by_request = events.group_by("run", "request").agg(
        pl.col("trace_high", "trace_low").first(),
        twin_server=pl.col("server").first(),
        traces=pl.struct("trace_high", "trace_low").n_unique(),
    )
    pairs = stock.join(by_request.filter(pl.col("traces") == 1), on=["run", "request"])
    twins = pairs.with_columns(_digits(pairs, "trace_high", "trace_low").alias("twin"))
    return twins.select("row", qualified("twin") if several else "twin", "twin_server")


def _owners(spans: pl.DataFrame) -> pl.DataFrame:
    """Return the request and the engine of each of SGLang's spans: row, owner, engine.

    Below the span of a request are spans of threads: of the front end, and of the scheduler of each rank, which are
    processes with different names. The engine takes the name of its first rank. The other ranks repeat the first
    rank's spans; their owner is null.
    """
    trace, above = _TRACE_ID, [*_TRACE_ID, "parent"]
    stages = spans.filter(pl.col("scope") == dialects.SGLANG_SCOPE)
    stages = stages.select("row", *_SPAN_IDS, "parent", pl.col("thread", "server").cast(pl.String))
    is_request = pl.col("thread") == ""
    stages = stages.with_columns(
        owner=pl.when(is_request).then("span").when(pl.col("thread").is_not_null()).then("parent")
    )
    # Stages are below threads, and spans of single steps below stages.
    for _ in range(2):
        parents = stages.select(*trace, parent="span", owner_above="owner", thread_above="thread").drop_nulls(
            "owner_above"
        )
        stages = (
            stages.join(parents.unique(above), on=above, how="left", maintain_order="left")
            .with_columns(owner=pl.coalesce("owner", "owner_above"), thread=pl.coalesce("thread", "thread_above"))
            .drop("owner_above", "thread_above")
        )
    label, rank, replica = (pl.col("thread").str.split("|").list.get(n, null_on_oob=True) for n in range(3))
    role = label.str.extract("^(Prefill|Decode)").str.to_lowercase()
    stages = stages.with_columns(
        pl.coalesce("owner", "parent"), is_first=rank.is_in(["", "0", "0 0"]).fill_null(value=True)
    )
    is_engine = label.str.contains("Scheduler").fill_null(value=False) & pl.col("is_first")
    request = [*trace, "owner"]
    name = pl.concat_str(
        pl.coalesce(pl.col("server").filter(is_engine).first(), pl.col("server").first()),
        role.drop_nulls().first(),
        pl.format("dp{}", replica.filter(is_engine & (replica != "")).first()),
        separator=" ",
        ignore_nulls=True,
    )
    named = stages.with_columns(name.over(request).cast(pl.Categorical).alias("engine"))
    owner = pl.when(pl.col("is_first")).then(_digits(named, "owner"))
    return named.select("row", owner.alias("owner"), "engine")


def _digits(rows: pl.DataFrame, *numbers: str) -> pl.Series:
    """Return ids of 64 bits each, one after the other, as hexadecimal digits."""
    ids = rows.select(pl.col(numbers).fill_null(0)).to_numpy().astype(">u8").tobytes()
    ends = 8 * len(numbers) * np.arange(rows.height + 1)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(ids)]
    digits = pa.Array.from_buffers(pa.large_binary(), rows.height, buffers)
    # Through a record batch: polars converts a bare array with pyarrow.compute, which takes long to import.
    frame = pl.DataFrame(pa.record_batch([digits], ["digits"]))
    return frame["digits"].bin.encode("hex")


def _without_repeats(spans: pl.DataFrame) -> pl.DataFrame:
    # Nearly always all spans differ, and hashes show that in a fraction of the memory of `unique`, which decides if
    # hashes are equal.
    if spans.select(_SPAN_IDS).hash_rows().n_unique() == spans.height:
        return spans
    return spans.unique(_SPAN_IDS, keep="first", maintain_order=True)


def _facts(spans: pl.DataFrame) -> pl.DataFrame:
    cores = spans.select(*_TRACE_ID, "scope", "zero").filter(pl.col("scope").is_in(dialects.CORE_SCOPES))
    # The median, because a span with an absurd time must not move the clock of its trace.
    zeros = cores.group_by(_TRACE_ID).agg(core_zero=pl.col("zero").median().cast(pl.Int64))
    return spans.select(
        "row",
        "server",
        spans.select(_TRACE_ID).join(zeros, on=_TRACE_ID, how="left", maintain_order="left")["core_zero"],
        server_zero=pl.col("zero").median().over("server").cast(pl.Int64),
    )


def _narrow_parts(storage: Storage, parts: Sequence[RunPart], *, several: bool) -> list[tuple[pl.DataFrame, int]]:
    """Return the spans of each part that count, with the columns that this module needs, and the number of all its
    spans.
    """
    narrow = []
    for part in parts:
        staged = read_staged(storage, part.name, "spans", _NARROW)
        narrow.append((_narrow(part.of_files(staged, "file_order", "run"), several=several), staged.height))
        del staged
    return narrow


def _narrow(spans: pl.DataFrame, *, several: bool) -> pl.DataFrame:
    """Return the columns that this module needs, with ids packed into numbers: 24 bytes instead of 64."""
    trace = pl.col("trace_id").str
    # The client-facing id: the same in all spans of a request.
    name = (
        pl.when(pl.col("scope").is_in(dialects.CORE_SCOPES))
        .then(pl.col("request_id").str.replace(dialects.CORE_ID_SUFFIX, ""))
        .otherwise("request_id")
    )
    server = qualified("server") if several else pl.col("server")
    return spans.select(
        "file_order",
        "run",
        "row",
        _number(trace.head(_HEX_DIGITS_OF_64_BITS)).alias("trace_high"),
        _number(trace.tail(_HEX_DIGITS_OF_64_BITS)).alias("trace_low"),
        _number(pl.col("span_id")).alias("span"),
        _number(pl.col("parent_span_id")).alias("parent"),
        pl.col("scope").cast(_SCOPES, strict=False),
        # The hash of a null is a number: no two spans without an id are of one request.
        pl.when(pl.col("request_id").is_not_null()).then(name.hash()).alias("request"),
        pl.col("thread").cast(pl.Categorical),
        server.cast(pl.Categorical),
        *_ENGINE_FACTS[1:],
    )


def _number(digits: pl.Expr) -> pl.Expr:
    # The decoder made ids lower-case hex; a missing parent stays null.
    return digits.str.to_integer(base=16, dtype=pl.UInt64)


def _with_server(spans: pl.DataFrame, marks_of: Callable[[pl.DataFrame], pl.DataFrame]) -> pl.DataFrame:
    """Name each span's server.

    The API server and the engine core are two processes and, with newer SDKs, two service.instance.ids: an API
    span belongs to the server of the core span below it; without a core span, to the engine if there is only one.
    Engines that share a name get a name each.
    """
    # API spans belong to no engine: they are not split, and inherit a name below.
    is_api = pl.col("scope").is_in(dialects.FRONT_SCOPES).fill_null(value=False)
    apart = split_engines(spans.select("scope", "span_row", *_ENGINE_FACTS).filter(~is_api), marks_of)
    if apart.height:
        apart = apart.with_columns(pl.col("server").cast(pl.Categorical))
        spans = spans.join(apart, on="span_row", how="left", suffix="_apart", maintain_order="left")
        spans = spans.with_columns(server=pl.coalesce("server_apart", "server")).drop("server_apart")
    elif spans["server"].n_unique() == spans["run"].n_unique():
        return spans  # each run has one server
    parents = (
        spans.select(*_TRACE_ID, "scope", span="parent", engine="server")
        .filter(pl.col("scope").is_in(dialects.CORE_SCOPES))
        .unique(_SPAN_IDS, keep="first", maintain_order=True)
    )
    names = spans.filter(~is_api).select("run", only="server").unique().unique("run", keep="none")
    engine = spans.select(_SPAN_IDS).join(parents, on=_SPAN_IDS, how="left", maintain_order="left")["engine"]
    # A request without a core span, such as one that never left the API process.
    only = spans.select("run").join(names, on="run", how="left", maintain_order="left")["only"]
    inherited = pl.coalesce(engine, only, "server")
    return spans.with_columns(server=pl.when(is_api).then(inherited).otherwise("server"))


def _events_of(storage: Storage, part: str) -> pl.DataFrame:
    steps = read_staged(storage, part, "steps", ("row", "unix_ns", "ts_start_ns", "step_id"))
    snapshots = read_staged(storage, part, "snapshots", ("row", "unix_ns", "step_id"))
    journeys = read_staged(storage, part, "journeys", ("row", "unix_ns", "ts_ns", "step_id", "layer", "event"))
    # SCHEDULED and PREEMPTED are stamped at the start of a step, in schedule(); all other events after its
    # execution, when the counter already stands one higher.
    late = pl.when(pl.col("event").is_in(["SCHEDULED", "PREEMPTED"])).then(0).otherwise(1)
    kinds = (
        (steps, pl.col("ts_start_ns"), pl.col("step_id"), True),
        (snapshots, pl.lit(None, pl.Int64), pl.col("step_id"), False),
        (journeys.filter(pl.col("layer") == "core"), pl.col("ts_ns"), pl.col("step_id") + late, False),
    )
    return pl.concat(
        rows.select("row", "unix_ns", ts_ns=ts_ns, step=step.cast(pl.Int64), is_summary=pl.lit(is_summary))
        for rows, ts_ns, step, is_summary in kinds
    )
