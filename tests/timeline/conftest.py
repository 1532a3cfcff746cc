"""Engines written by hand: tables of a few steps and requests whose every number a test can compute."""

from __future__ import annotations

from dataclasses import dataclass, field

import polars as pl
import pytest

from tracefit.tables import schema
from tracefit.timeline import EngineLimits, build_timeline, queue_state

CYCLE_US = 10_000
"""Step k starts at k times this, and is over when the next one starts."""

STAMPS_US = {"QUEUED": 9_950, "SCHEDULED": 200, "PREEMPTED": 100, "FIRST_TOKEN": 9_900, "FINISHED": 9_900}
"""When, after the start of the step an event names, it is stamped."""


@dataclass
class Story:
    """The work of one engine. Times are microseconds on its clock.

    `lag` 1 is an engine that schedules a step ahead: outputs of a step come out a cycle later.
    """

    server: str = "engine"
    epoch: int = 0
    begin_us: int = 0
    lag: int = 0
    events: list[dict] = field(default_factory=list)
    summaries: list[dict] = field(default_factory=list)
    shown: list[dict] = field(default_factory=list)

    def at(self, step, after_us=0) -> int:
        """Return nanoseconds: so long after the start of a step."""
        return round((self.begin_us + step * CYCLE_US + after_us) * 1000)

    def request(self, name, *events, prompt=100, max_tokens=20) -> Story:
        """Add a request: (event, step, facts) each; facts are columns, `done` output tokens, `at_us` its time."""
        for event, step, *more in events:
            facts = dict(more[0]) if more else {}
            done = facts.pop("done", 1 if event == "FIRST_TOKEN" else 0)
            late = CYCLE_US * self.lag if event in ("FIRST_TOKEN", "FINISHED") else 0
            at_us = facts.pop("at_us", None)
            ts_ns = self.at(step, STAMPS_US[event] + late) if at_us is None else round(at_us * 1000)
            row = {
                "server": self.server,
                "epoch": self.epoch,
                "trace_id": f"trace-{name}",
                "span_id": f"span-{name}",
                "request_id": name,
                "layer": "core",
                "event": event,
                "step_id": step,
                "ts_ns": ts_ns,
                "prefill_total_tokens": prompt,
                "decode_done_tokens": done,
                "decode_max_tokens": max_tokens,
            }
            self.events.append(row | facts)
        return self

    def served(self, name, first, last, *, prompt=100, max_tokens=20, prefilled=None) -> Story:
        """Add a request that nothing disturbs: scheduled in `first`, prompt complete in `prefilled`, a token a step."""
        prefilled = prefilled or first
        return self.request(
            name,
            ("QUEUED", first - 1),
            ("SCHEDULED", first),
            ("FIRST_TOKEN", prefilled),
            ("FINISHED", last, {"done": last - prefilled + 1, "finish_status": "length"}),
            prompt=prompt,
            max_tokens=max_tokens,
        )

    def preempted(self, name, lost, again, last, *, out, total, prefilled=1, **facts) -> Story:
        """Add a request scheduled in step 1 that loses its blocks in `lost`, `out` tokens out, and resumes in
        `again`."""
        return self.request(
            name,
            ("QUEUED", 0),
            ("SCHEDULED", 1),
            ("FIRST_TOKEN", prefilled),
            ("PREEMPTED", lost, {"done": out}),
            ("SCHEDULED", again, {"done": out, "schedule_kind": "RESUME"}),
            ("FINISHED", last, {"done": total}),
            **facts,
        )

    def summary(self, step, *, at_us=0, **columns) -> Story:
        """Add the summary of a step: one decoding request unless `columns` say otherwise."""
        facts = {"running_depth": 1, "waiting_depth": 0, "num_prefill_reqs": 0, "num_decode_reqs": 1}
        facts |= {"prefill_tokens": 0, "decode_tokens": 1, "scheduled_tokens": 1, "num_preempted": 0}
        facts |= {"kv_blocks_total": 1000, "kv_blocks_free": 990, "duration_us": 90}
        row = {
            "server": self.server,
            "epoch": self.epoch,
            "step_id": step,
            "ts_start_ns": self.at(step, at_us),
        }
        self.summaries.append(row | facts | columns)
        return self

    def snapshot(self, step, name, **columns) -> Story:
        """Add the snapshot of a request."""
        row = {"server": self.server, "epoch": self.epoch, "step_id": step, "request_id": name}
        self.shown.append(row | columns)
        return self


@dataclass
class EngineTables:
    """The tables of some stories, and what is made of them."""

    stories: tuple[Story, ...]

    def _table(self, table, rows) -> pl.DataFrame:
        return table.conform(pl.DataFrame([{"run_id": "run"} | row for row in rows], schema=table.types))

    @property
    def journeys(self) -> pl.DataFrame:
        return self._table(schema.JOURNEY_EVENTS, [row for s in self.stories for row in s.events])

    @property
    def steps(self) -> pl.DataFrame:
        return self._table(schema.STEPS, [row for s in self.stories for row in s.summaries])

    @property
    def snapshots(self) -> pl.DataFrame:
        return self._table(schema.REQUEST_SNAPSHOTS, [row for s in self.stories for row in s.shown])

    def timeline(self, *, complete=True, **limits) -> pl.DataFrame:
        """Build the timeline; `limits` are those of `EngineLimits`."""
        limits = EngineLimits(**{"max_num_batched_tokens": 2048, **limits})
        return build_timeline(self.steps, self.snapshots, self.journeys, limits, journeys_complete=complete)

    def rows(self, *columns, complete=True, **limits) -> dict[int, tuple]:
        """Return step to the values of some columns."""
        table = self.timeline(complete=complete, **limits)
        return {row[0]: row[1:] for row in table.select("step_id", *columns).iter_rows()}

    def batches(self, **limits) -> dict[int, tuple]:
        """Return step to (prefill requests, prefill tokens, their context, decode requests, tokens, context)."""
        names = ("num_prefill_reqs", "prefill_tokens", "prefill_context_tokens")
        more = ("num_decode_reqs", "decode_tokens", "context_tokens")
        return self.rows(*names, *more, **limits)

    def queue(self, **limits) -> dict[str, dict]:
        """Return request to what it found when it was queued."""
        limits = {"max_num_batched_tokens": 2048, "max_num_seqs": 8, "num_blocks": 100, **limits}
        found = queue_state(self.journeys, self.timeline(**limits), EngineLimits(**limits))
        return {row["request_id"]: row for row in found.iter_rows(named=True)}


@pytest.fixture
def story() -> Story:
    """Return an engine without steps or requests."""
    return Story()


@pytest.fixture
def new_story() -> type[Story]:
    """Return the class, for stories of several engines."""
    return Story


@pytest.fixture
def engine_tables() -> type[EngineTables]:
    """Return the class that makes tables of stories: `engine_tables((story,)).timeline()`."""
    return EngineTables
