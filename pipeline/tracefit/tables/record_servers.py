"""Tell engines apart that records of steps give one name.

A log or a recording names its engine by number or worker, and two servers may have the same: two pods in one log
without prefixes, two logs of `Engine 000` in one folder. The step counter of one engine goes up record by record, and
falls back only at a restart. In a file with two engines it goes from one counter to the other and back, again and
again: no record says whose it is. Files that follow each other, in steps or in time, are of one engine, and files that
do not are of one engine each.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

import msgspec
import polars as pl

from tracefit.tables.epochs import STEP_JITTER
from tracefit.tables.rows import UNKNOWN_SERVER

if TYPE_CHECKING:
    from collections.abc import Sequence

SHARED_NAME = "two engines share a name in one file: give one file each"
"""Reason of a record whose engine is not known."""

CLOCK_SETBACK = "steps.unix_ns goes back: the clock of the log was set back, and later times were moved"
"""Reason of a record after which times are moved."""

_LEAST_SETBACK_NS = 2 * 10**9
"""Stamps of whole seconds may go back by less between two lines."""

_UNKNOWN_GAP_NS = 60 * 10**9

_NEAR_STEPS = 64
"""Records within which a counter that another one interrupts goes on."""

_FEWEST_SIGNS = 4
"""Least changes between two counters that show two engines: damage gives a few."""

_SERVER_KEY = ["server", "source_file"]
_POSITION = ("file_order", "source_offset")
_VALUES = ("cycle_us", "scheduled_tokens", "num_prefill_reqs", "num_decode_reqs", "context_tokens")
_SUFFIXES = re.compile(r"(\.(gz|zst|log|txt|out|jsonl?|csv|msgpack|bin|[0-9]+))+$")
NAMED_RECORD = ("server", "source_offset", "unix_ns", "step_id", *_VALUES)
"""Columns of recorded steps that `record_servers` needs."""


def record_servers(records: pl.DataFrame) -> pl.DataFrame:
    """Return new names of engines that share one: server, source_file, name; the name is null if the file has several
    engines.

    Args:
        records: Columns source_file, file_order (its number) and `NAMED_RECORD`, of logs and ForwardPassMetrics.
    """
    unchanged = pl.DataFrame(schema=dict.fromkeys([*_SERVER_KEY, "name"], pl.String))
    values = pl.struct(_VALUES).hash()
    records = records.select(*_SERVER_KEY, *_POSITION, "unix_ns", "step_id", values=values).sort("server", *_POSITION)
    falls = (pl.col("step_id").diff() <= 0).sum()
    facts = records.group_by("server").agg(falls=falls, files=pl.col("source_file").n_unique())
    suspects = facts.filter((pl.col("falls") >= _FEWEST_SIGNS) | (pl.col("files") > 1))
    if not suspects.height:
        return unchanged
    records = records.join(suspects, on="server", how="semi", maintain_order="left")
    # A record that is there twice, in one file or in two, is one record.
    first = records.unique(["server", "step_id", "values"], keep="first", maintain_order=True)
    shared = _shared(first).with_columns(name=pl.lit(None, pl.String))
    apart = _by_file(records, first).join(shared, on=_SERVER_KEY, how="anti")
    return pl.concat([unchanged, shared, apart])


def clock_setbacks(records: pl.DataFrame) -> pl.DataFrame:
    """Return where the clock of a log was set back: server, source_file, source_offset of the first record after it,
    moved_ns.

    Times from there on are moved by `moved_ns`, the sum of all such jumps so far, so that they go on after the time
    before. The time
    between is not known: it is made so long that it is not a step's.

    Args:
        records: As for `record_servers`.
    """
    ordered = records.sort("server", *_POSITION)
    grown, follows = (pl.col(name).diff().over(_SERVER_KEY) for name in ("unix_ns", "step_id"))
    marked = ordered.with_columns(
        back=pl.when((grown < -_LEAST_SETBACK_NS) & (follows == 1)).then(_UNKNOWN_GAP_NS - grown)
    )
    marked = marked.drop_nulls("back").with_columns(moved_ns=pl.col("back").cum_sum().over(_SERVER_KEY))
    return marked.select(*_SERVER_KEY, "source_offset", "moved_ns")


def with_one_clock(rows: pl.DataFrame, setbacks: pl.DataFrame) -> pl.DataFrame:
    """Return recorded steps with times on the clock that the log began with.

    Args:
        rows: Columns server, source_file, source_offset, unix_ns.
        setbacks: The result of `clock_setbacks`.
    """
    if not setbacks.height:
        return rows
    moved = rows.with_row_index("_row").sort("source_offset")
    moved = moved.join_asof(setbacks.sort("source_offset"), on="source_offset", by=_SERVER_KEY, check_sortedness=False)
    later = pl.col("unix_ns") + pl.col("moved_ns").fill_null(0)
    return moved.sort("_row").with_columns(unix_ns=later).drop("_row", "moved_ns")


def with_names(rows: pl.DataFrame, renamed: pl.DataFrame) -> pl.DataFrame:
    """Return recorded steps with the new names of their engines; `server` is null where a record's engine is not known.

    Args:
        rows: Columns server, source_file.
        renamed: The result of `record_servers`.
    """
    if not renamed.height:
        return rows
    is_renamed = renamed.with_columns(is_renamed=pl.lit(value=True))
    named = rows.join(is_renamed, on=_SERVER_KEY, how="left", maintain_order="left")
    server = pl.when(pl.col("is_renamed").is_null()).then("server").otherwise("name")
    return named.with_columns(server=server).drop("name", "is_renamed")


def _shared(records: pl.DataFrame) -> pl.DataFrame:
    """Return server and source_file of the files in which two counters take turns.

    A sign of that is a record that goes on with another counter than the record before it, if that one is of a counter
    too: far from it, at a step that follows a record nearby which nothing followed; or close to it, at a step that was
    there just before with other values.
    """
    step = pl.col("step_id")
    rows = records.select(*_SERVER_KEY, "step_id", at=pl.int_range(pl.len()).over(_SERVER_KEY)).with_columns(
        before=step.shift(1).over(_SERVER_KEY),
        after=step.shift(-1).over(_SERVER_KEY),
        own=step - 1,
        following=step + 1,
    )
    of_counters = rows.select(*_SERVER_KEY, "at", found="step_id", found_at="at", found_after="after")
    sides: tuple[tuple[str, Literal["backward", "forward"]], ...] = (
        ("own", "backward"),
        ("following", "forward"),
    )
    for wanted, strategy in sides:
        found = of_counters.rename({"found_at": f"{wanted}_at", "found_after": f"{wanted}_after"}).with_columns(
            pl.col("at").alias("position")
        )
        rows = rows.join_asof(
            found.drop("at"),
            left_on="at",
            right_on="position",
            by_left=[*_SERVER_KEY, wanted],
            by_right=[*_SERVER_KEY, "found"],
            strategy=strategy,
            check_sortedness=False,
        ).drop("found", "position", strict=False)
    is_of_counter = pl.col("own_at").is_not_null() | pl.col("following_at").is_not_null()
    change = (step - pl.col("before")).abs()
    goes_on = (pl.col("at") - pl.col("own_at") <= _NEAR_STEPS) & (pl.col("own_after") != step)
    is_again = pl.col("at") - pl.col("at").shift(1).over([*_SERVER_KEY, "step_id"]) <= _NEAR_STEPS
    signs = (
        (step - pl.col("before") != 1)
        & is_of_counter.shift(1).over(_SERVER_KEY)
        & pl.when(change > STEP_JITTER).then(goes_on).otherwise(is_again & (step > 1))
    )
    counted = rows.sort(*_SERVER_KEY, "at").with_columns(sign=signs).group_by(_SERVER_KEY).agg(pl.col("sign").sum())
    return counted.filter(pl.col("sign") >= _FEWEST_SIGNS).select(_SERVER_KEY)


class _Counter(msgspec.Struct):
    """The files of one engine so far: the first of them, the last step, the highest one, and the last time."""

    file: str
    last_step: int
    most_step: int
    last_ns: int | None


def _by_file(records: pl.DataFrame, first: pl.DataFrame) -> pl.DataFrame:
    """Return new names of servers whose files are of several engines: server, source_file, name."""
    times = {"begin": pl.col("unix_ns").min(), "end": pl.col("unix_ns").max()}
    step = pl.col("step_id")
    steps = {"first_step": step.first(), "last_step": step.last(), "least": step.min(), "most": step.max()}
    files = first.group_by(_SERVER_KEY, maintain_order=True).agg(**times, **steps, order=pl.col("file_order").min())
    # A file whose records are all in another one is of the engine of that one.
    origin = first.select("server", "step_id", "values", origin="source_file")
    copies = (
        records.join(files, on=_SERVER_KEY, how="anti")
        .unique(_SERVER_KEY)
        .join(origin, on=["server", "step_id", "values"])
    )
    names = []
    for (server,), own in files.sort("begin", "order", nulls_last=True).group_by("server", maintain_order=True):
        engine_of = _engines_of(own)
        if len(set(engine_of.values())) == 1:
            continue
        for file, origin_file in copies.filter(server=server).select("source_file", "origin").iter_rows():
            engine_of[file] = engine_of[origin_file]
        named = _named_after(str(server), list(dict.fromkeys(engine_of.values())))
        names += [(server, file, named[engine]) for file, engine in engine_of.items()]
    return pl.DataFrame(names, dict.fromkeys([*_SERVER_KEY, "name"], pl.String), orient="row")


def _engines_of(files: pl.DataFrame) -> dict[str, str]:
    """Return each file's engine, which is named by its first file; `files` of one server are in the order of time."""
    counters: list[_Counter] = []
    engine_of = {}
    for file, begin, end, first_step, last_step, least, most in files.select(
        "source_file", "begin", "end", "first_step", "last_step", "least", "most"
    ).iter_rows():
        following = [c for c in counters if 0 < first_step - c.last_step <= STEP_JITTER]
        later = [
            c for c in counters if (least > c.most_step if begin is None or c.last_ns is None else begin >= c.last_ns)
        ]
        if not (following or later):
            counters.append(_Counter(file, last_step, most, end))
        counter = (following or later or counters)[-1]
        counter.last_step, counter.most_step = last_step, max(most, counter.most_step)
        counter.last_ns = end if counter.last_ns is None or end is None else max(end, counter.last_ns)
        engine_of[file] = counter.file
    return engine_of


def _named_after(server: str, files: Sequence[str]) -> dict[str, str]:
    """Return the name of each file's engine: the name of the file, and the number of the engine in it."""
    stems = [_SUFFIXES.sub("", file.rpartition("/")[2]) for file in files]
    if len(set(stems)) < len(stems):
        stems = [f"{stem}#{number}" for number, stem in enumerate(stems, start=1)]
    run, unknown, engine = server.rpartition(f"{UNKNOWN_SERVER}.dp")
    is_unknown = bool(unknown) and not run.strip("0123456789")
    return {
        file: f"{run}{stem}.dp{engine}" if is_unknown else f"{server} of {stem}"
        for file, stem in zip(files, stems, strict=True)
    }
