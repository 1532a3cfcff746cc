"""Build the `runs` table: one row per run and server, with all facts that `train` needs without the traces.

`RunTally` adds up the other tables of a run, window by window, and estimates which shares of steps, snapshots and
requests were traced. `find_overlaps` finds runs that were ingested under two names, by their spans.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import polars as pl

from tracefit.tables import dialects, schema
from tracefit.tables.rows import INCOMPLETE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tracefit.tables.store import TableStore

_SERVER = "server"

COMPLETE_SHARE = 0.97
"""Journeys of at least this share of requests count as all: a few are lost to clients that reuse ids."""


@dataclass(slots=True)
class RunTally:
    """Adds up the tables of a run, window by window, for its rows in `runs`.

    The windows of a table come sorted and without another table between, an empty one where it has no rows. `requests` and
    `request_snapshots` come before `steps`.
    """

    run_id: str
    _values: dict[tuple[str, str], int] = field(default_factory=dict)
    _incomplete: set[str] = field(default_factory=set)
    _parts: dict[str, list[pl.DataFrame]] = field(default_factory=dict)

    def add(self, table: str, window: pl.DataFrame) -> None:
        """Add the next rows of a table."""
        if table in _EVENTS_OF and window.height:
            self._count_values(table, window)
        if table == "rejects":
            self._incomplete.update(window["reason"].unique().to_list())
        if table == "spans":
            vllm_spans = window.filter(dialects.is_known())
            self._keep("spans", vllm_spans.group_by(_SERVER).agg(_SPANS))
        elif table == "journey_events":
            self._keep("counters", _counters(_naming_steps(window)))
        elif table == "request_snapshots":
            self._keep("rich", window.select(_NARROW_STEP).unique(maintain_order=True))
        elif table == "steps":
            self._add_steps(window)
        elif table == "requests":
            self._keep("requests", window.group_by(_SERVER).agg(_LOAD))
            self._keep("edges", _edges(window))

    def rows(self, columns: Mapping[str, str | int | None]) -> pl.DataFrame:
        """Return the `runs` table: one row per server.

        Args:
            columns: Values that are the same for every server of the run.
        """
        spans = (
            self._kept("spans")
            .group_by(_SERVER)
            .agg(
                pl.col("spans", "dropped_events").sum(),
                pl.col("first_unix_ns").min(),
                pl.col("last_unix_ns").max(),
                dialects=pl.col("scopes").explode(empty_as_null=False).unique().sort().str.join(","),
            )
        )
        rows = spans
        for part in (self._epochs(), self._steps(), self._requests()):
            rows = rows.join(part, on=_SERVER, how="left")
        shared = {**columns, "run_id": self.run_id}
        zero = [pl.col(c).fill_null(0) for c in ("steps", "requests", "epochs", "rich_steps")]
        rows = rows.with_columns(*zero, *(pl.lit(v).alias(k) for k, v in shared.items()))
        traced = pl.col("steps") > 0
        return schema.RUNS.conform(
            rows.with_columns(
                step_sampling=pl.when(traced).then(pl.col("steps") / pl.col("counted")).otherwise(0.0),
                snapshot_sampling=pl.when(traced).then(pl.col("rich_steps") / pl.col("steps")),
            )
        )

    def _count_values(self, table: str, window: pl.DataFrame) -> None:
        """Count the values of each attribute, by event."""
        keys = _EVENTS_OF[table]
        if table == "journey_events":
            counts = window.group_by("event").agg(pl.col(c).count() for c in keys).rows(named=True)
        else:
            counts = [{"event": _EVENT_NAMES[table], **{c: window[c].count() for c in keys}}]
        for row in counts:
            name = row.pop("event")
            for column in _expected(table, name):
                place = (_EVENT_NAMES.get(name, name), keys[column][0])
                self._values[place] = self._values.get(place, 0) + row[column]

    def missing_attributes(self) -> dict[str, list[str]]:
        """Return event to the attributes that none of these events has a usable value of."""
        found: dict[str, list[str]] = {}
        for (event, attribute), n in sorted(self._values.items()):
            if not n:
                found.setdefault(event, []).append(attribute)
        for table, reason in INCOMPLETE.items():
            # Rows that lack what places them are in no table: here, none of the run's events has it.
            event, _, attributes = reason.partition(" without ")
            if reason in self._incomplete and not any(e == event for e, _ in self._values):
                found[_EVENT_NAMES[table]] = [attributes]
        return found

    def _keep(self, name: str, part: pl.DataFrame) -> None:
        self._parts.setdefault(name, []).append(part)

    def _kept(self, name: str) -> pl.DataFrame:
        return pl.concat(self._parts[name])

    def _add_steps(self, window: pl.DataFrame) -> None:
        self._keep("counters", _counters(window))
        if "running" not in self._parts:
            self._keep("running", _running(pl.concat(self._parts.pop("edges"))))
        steps = window.select(*_NARROW_STEP, "num_decode_reqs")
        self._keep("steps", _step_counts(steps, self._kept("running"), self._kept("rich")))

    def _epochs(self) -> pl.DataFrame:
        spans = self._kept("counters").group_by(_SERVER, "epoch")
        bounds = spans.agg(pl.col("first_step").min(), pl.col("last_step").max())
        return bounds.group_by(_SERVER).agg(
            epochs=pl.len(), counted=(pl.col("last_step") - pl.col("first_step") + 1).sum()
        )

    def _steps(self) -> pl.DataFrame:
        share = (pl.col("traced_decodes").sum() / pl.col("decodes").sum()).clip(0.0, 1.0)
        return (
            self._kept("steps")
            .group_by(_SERVER)
            .agg(pl.col("steps", "rich_steps").sum(), journey_sampling=pl.when(share.is_finite()).then(share))
        )

    def _requests(self) -> pl.DataFrame:
        first, last = pl.col("first_arrival").min(), pl.col("last_arrival").max()
        sums = (
            self._kept("requests")
            .group_by(_SERVER)
            .agg(
                pl.col("requests").sum(),
                arrival_rate_per_s=(pl.col("arrivals").sum() - 1) / ((last - first) / 1e9),
                prefix_hit_ratio=pl.col("cached_tokens").sum() / pl.col("known_prompt_tokens").sum(),
                **{f"{c}_mean": pl.col(c).sum() / pl.col(f"{c}_known").sum() for c in _MEANS},
            )
        )
        ratios = ("arrival_rate_per_s", "prefix_hit_ratio", *(f"{c}_mean" for c in _MEANS))
        return sums.with_columns(pl.when(pl.col(c).is_finite()).then(c).alias(c) for c in ratios)


_EVENTS_OF = {
    "journey_events": dialects.JOURNEY_KEYS,
    "steps": dialects.STEP_KEYS,
    "request_snapshots": dialects.SNAPSHOT_KEYS,
}
"""Table of events to column to the attributes it is read from."""

_EVENT_NAMES = {
    **{kind.event: kind.spellings[0] for kind in dialects.JOURNEY_EVENTS},
    "steps": dialects.STEP_EVENT,
    "request_snapshots": dialects.SNAPSHOT_EVENT,
}
"""Events as traces spell them, by their names in the tables."""

_CORE_EVENTS = tuple(kind.event for kind in dialects.JOURNEY_EVENTS if kind.layer == "core")
_ONE_EVENT = {"schedule_kind": "SCHEDULED", "finish_status": "FINISHED", "reason": "ABORTED"}
"""Column to the one event that has it."""

_OPTIONAL = ("effective_prompt_len",)
"""Columns that a server without a prefix cache has no value of."""


def _expected(table: str, event: str) -> list[str]:
    """Return the columns that every event of a name should have a value of."""
    of_event = [c for c in _EVENTS_OF[table] if _ONE_EVENT.get(c, event) == event and c not in _OPTIONAL]
    of_api = table == "journey_events" and event not in _CORE_EVENTS
    return [c for c in of_event if c in _ONE_EVENT] if of_api else of_event


_ENGINE = schema.ENGINE[1:]  # within the one run that is tallied
_STEP = [*_ENGINE, "step_id"]
_NARROW_ENGINE = (pl.col(_SERVER).cast(pl.Categorical), pl.col("epoch").cast(pl.UInt32))
"""Compact types, for frames that hold every request or step of a run."""
_NARROW_STEP = (*_NARROW_ENGINE, pl.col("step_id"))
_MEANS = ("prompt_tokens", "max_tokens", "output_tokens")
_SPANS = [
    pl.len().alias("spans"),
    pl.col("dropped_events").sum(),
    pl.col("start_unix_ns").min().alias("first_unix_ns"),
    pl.col("end_unix_ns").max().alias("last_unix_ns"),
    pl.col("scope").unique().alias("scopes"),
]
_LOAD = [
    pl.len().alias("requests"),
    pl.col("arrival_ns").count().alias("arrivals"),
    pl.col("arrival_ns").min().alias("first_arrival"),
    pl.col("arrival_ns").max().alias("last_arrival"),
    # Sums of integers, not means: they are exact in any order of windows.
    *(pl.col(c).sum() for c in _MEANS),
    *(pl.col(c).count().alias(f"{c}_known") for c in _MEANS),
    pl.col("cached_prompt_tokens").sum().alias("cached_tokens"),
    pl.col("prompt_tokens")
    .filter(pl.col("cached_prompt_tokens").is_not_null())
    .sum()
    .alias("known_prompt_tokens"),
]


def _edges(requests: pl.DataFrame) -> pl.DataFrame:
    """Return the steps at which requests begin and end decoding: (server, epoch, step_id, change)."""
    ends = requests.filter(pl.col("first_token_step").is_not_null() & pl.col("finished_step").is_not_null())
    return pl.concat(
        [
            ends.select(*_NARROW_ENGINE, step_id=pl.col("first_token_step") + 1, change=pl.lit(1, pl.Int8)),
            ends.select(*_NARROW_ENGINE, step_id=pl.col("finished_step") + 1, change=pl.lit(-1, pl.Int8)),
        ]
    )


def _running(edges: pl.DataFrame) -> pl.DataFrame:
    """Return how many traced requests decode from each step of `edges` on."""
    ordered = edges.sort("step_id")
    members = pl.col("change").cast(pl.Int32).cum_sum().over(_ENGINE)
    return ordered.select(*_STEP, members=members)


def _step_counts(steps: pl.DataFrame, running: pl.DataFrame, rich: pl.DataFrame) -> pl.DataFrame:
    """Count steps, steps with snapshots, and decodes per server, for `journey_sampling`.

    A traced request decodes in the sampled steps between its first token and its end; a summary counts all requests,
    traced or not. So the quotient estimates the share of requests with a journey. A server without step summaries has no
    estimate.
    """
    at_steps = steps.sort("step_id").join_asof(running, on="step_id", by=_ENGINE, check_sortedness=False)
    decoding = at_steps.group_by(_SERVER).agg(
        steps=pl.len(),
        traced_decodes=pl.col("members").cast(pl.Int64).fill_null(0).sum(),
        decodes=pl.col("num_decode_reqs").sum(),
    )
    with_snapshots = steps.join(rich, on=_STEP, how="semi").group_by(_SERVER).agg(rich_steps=pl.len())
    counts = decoding.join(with_snapshots, on=_SERVER, how="left")
    return counts.with_columns(pl.col(_SERVER).cast(pl.String))


def step_counters(steps: pl.DataFrame, journeys: pl.DataFrame) -> pl.DataFrame:
    """Return the first and last step of every epoch: (run_id, server, epoch, first_step, last_step)."""
    columns = [*schema.ENGINE, "step_id"]
    return _counters(pl.concat([steps[columns], _naming_steps(journeys)[columns]]))


def _naming_steps(journeys: pl.DataFrame) -> pl.DataFrame:
    # QUEUED carries the last step before it, 0 at a fresh start: it names no step of its own.
    return journeys.filter(pl.col("step_id").is_not_null() & (pl.col("event") != "QUEUED"))


def _counters(named: pl.DataFrame) -> pl.DataFrame:
    step = pl.col("step_id")
    return named.group_by(schema.ENGINE).agg(first_step=step.min(), last_step=step.max())


_SPAN_IDS = ("trace_id", "span_id", "start_unix_ns", "end_unix_ns")
"""What a span is known by: an id that two runs use for spans of other times is no span they share."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """A run with spans that also are in a run of at least the same size.

    Attributes:
        run_id: The run.
        other: The run that is kept.
        spans: Number of shared spans.
    """

    run_id: str
    other: str
    spans: int


def find_overlaps(store: TableStore, runs: pl.DataFrame) -> tuple[Overlap, ...]:
    """Find runs that share spans with a run that is kept: the same traces under two names, as from rotating files.

    Such spans would count twice, and rows held out of one run would train the model through the other. Larger runs are kept before smaller ones, equal ones by name. Only runs that overlap in time are compared, with
    eight bytes in memory for each of their spans.

    Args:
        store: The tables.
        runs: Rows of the `runs` table.

    Returns:
        One overlap per run to leave out, in the order of the rows.
    """
    spans = runs.group_by("run_id", maintain_order=True).agg(
        pl.col("spans").sum(), pl.col("first_unix_ns").min(), pl.col("last_unix_ns").max()
    )
    ordered = spans.sort(pl.col("spans"), pl.col("run_id"), descending=[True, False])
    held: dict[str, pl.Series] = {}

    def ids(run_id: str) -> pl.Series:
        if run_id not in held:
            held[run_id] = store.read("spans", [run_id], _SPAN_IDS).select(_SPAN_IDS).hash_rows()
        return held[run_id]

    kept: list[tuple[str, int, int]] = []
    found: dict[str, Overlap] = {}
    for run_id, _, first, last in ordered.iter_rows():
        beside = [name for name, begin, end in kept if begin <= last and first <= end]
        shared = {name: int(ids(run_id).is_in(ids(name).implode()).sum()) for name in beside}
        other = max(shared, key=shared.__getitem__, default=None)
        if other is not None and shared[other]:
            found[run_id] = Overlap(run_id, other, shared[other])
            del held[run_id]
        else:
            kept.append((run_id, first, last))
    return tuple(found[name] for name in spans["run_id"] if name in found)
