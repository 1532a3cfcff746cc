"""From the records of an engine to its spans: the state of each request, step by step. No I/O, no vLLM, no clock."""

from __future__ import annotations

import random
import re
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from tracefit_vllm import records

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracefit_vllm.records import Header, Record

Attributes: TypeAlias = dict[str, str | int | float]

MOST_EVENTS = 1000
"""Events of a span: with more, a message passes the 4 MiB that collectors take."""

OPEN_NS = 5_000_000_000
"""A span of steps is closed after this time, so that an idle server's last steps are sent."""

_CORE_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
_PROMPT_INDEX = re.compile(r"(?<=.)-\d+$")


@dataclass
class Event:
    """An event of a span."""

    name: str
    unix_ns: int
    attributes: Attributes


@dataclass
class Span:
    """A span to export.

    Attributes:
        context: Trace id and span id; None where they are free.
        parent: Those of the caller, where it is known.
        dropped_events: Events that were lost before its end.
    """

    scope: str
    name: str
    start_ns: int
    end_ns: int
    attributes: Attributes
    events: list[Event]
    context: tuple[int, int] | None = None
    parent: tuple[int, int] | None = None
    dropped_events: int = 0


def client_id(core_id: str) -> str:
    """Return the id that the API server gave a request, from the engine core's: without choice, prompt and suffix."""
    name = _CORE_SUFFIX.sub("", core_id)
    choice, joint, rest = name.partition("_")
    if joint and choice.isdecimal():
        name = rest
    return _PROMPT_INDEX.sub("", name) if name.startswith("cmpl-") else name


def is_sampled(name: str, rate: float) -> bool:
    """Return whether the journey of a request is traced; the same in every process that knows its client id."""
    return rate >= 1 or zlib.crc32(name.encode()) < rate * 2**32


@dataclass
class _Request:
    """The state of a request: its journey so far, and its tokens.

    Attributes:
        computed: Tokens in the KV cache before the last step it was in; `scheduled` are those of that step.
        prefilled: Most prompt tokens ever computed: a preemption does not lower it.
        cached: Prompt tokens that were there when it was first scheduled; None before.
        blocks: KV blocks of its first cache group; None where vLLM does not say.
        context: Trace id and span id of its own span; `parent` those of its caller's.
        events: None if its journey is not traced.
    """

    prompt: int
    limit: int
    context: tuple[int, int] | None
    parent: tuple[int, int] | None
    events: list[Event] | None
    computed: int = 0
    scheduled: int = 0
    prefilled: int = 0
    outputs: int = 0
    preemptions: int = 0
    cached: int | None = None
    blocks: int = 0

    @property
    def phase(self) -> str:
        """Whether it has output."""
        return "DECODE" if self.outputs else "PREFILL"


@dataclass
class _Steps:
    """The open span of steps."""

    first: int
    last: int
    start_ns: int
    events: list[Event] = field(default_factory=list)


@dataclass
class _Drafts:
    """Drafts of a request that nobody has checked yet.

    Attributes:
        steps: Those that have them, and whose output has not come.
        guesses: A step, its attributes, and the key of a context in which all drafts of steps before count as right.
    """

    steps: set[int] = field(default_factory=set)
    guesses: list[tuple[int, Attributes, str]] = field(default_factory=list)


class SpanBuilder:
    """Follows the requests of one engine.

    After records are lost, earlier requests are no longer followed: their journeys end unfinished, and a step in which
    one of them has tokens gets no summary. The next span counts both as dropped events.

    If a step is scheduled before the output of the last one has come, and the last one has drafts, the scheduler counts
    all drafts as right. Once the output says how many were wrong, the step's contexts are corrected; if it never does,
    they are left out.
    """

    def __init__(self, header: Header, *, seed: int | None = None) -> None:
        self._header = header
        self._random = random.Random(seed)  # noqa: S311 - the choice of sampled steps is not a secret
        self._requests: dict[str, _Request] = {}
        self._running: dict[str, _Request] = {}
        self._drafts: dict[str, _Drafts] = {}
        self._steps: _Steps | None = None
        self._sequence = self._finished = self._preempted = 0
        self.dropped = 0

    def feed(self, record: Record) -> Iterator[Span]:
        """Take a record; yield the spans that it ends."""
        kind, *rest = record
        values: Any = rest  # a tuple of the kind's own shape, as `records` says
        if kind == records.STEP:
            yield from self._step(*values)
        elif kind == records.OUTPUT:
            yield from self._output(*values)
        elif kind == records.QUEUED:
            self._queued(*values)
        elif kind == records.PREEMPTED:
            self._preempt(*values)
        elif kind == records.ENDED:
            time_ns, step, names, status = values
            for name in names:
                yield from self._finish(name, time_ns, step, status)
        elif kind == records.LOST:
            self._lose(*values)

    def tick(self, now_ns: int) -> Iterator[Span]:
        """Yield the span of steps if it has been open for long."""
        is_guessed = any(drafts.guesses for drafts in self._drafts.values())
        if self._steps and now_ns - self._steps.start_ns > OPEN_NS and not is_guessed:
            yield self._close_steps(self._steps)

    def close(self) -> Iterator[Span]:
        """Yield what is open: the last steps, and the journeys as far as they are known."""
        if self._steps:
            yield self._close_steps(self._steps)
        for name, request in self._requests.items():
            if request.events:
                yield self._journey(name, request)

    # -- requests ------------------------------------------------------------------------------------------

    def _queued(
        self,
        time_ns: int,
        step: int,
        name: str,
        prompt: int,
        limit: int,
        caller: tuple[str, str] | None,
        own: tuple[str, str] | None,
    ) -> None:
        events: list[Event] | None = None if own is None else []
        request = _Request(prompt, limit, _numbers(own), _numbers(caller), events)
        self._requests[name] = request
        self._event(request, "QUEUED", time_ns, step, phase="WAITING")

    def _preempt(self, time_ns: int, step: int, name: str) -> None:
        self._preempted += 1
        if (request := self._running.pop(name, None)) is not None:
            request.preemptions += 1
            request.blocks = 0
            self._event(request, "PREEMPTED", time_ns, step)
        if (drafts := self._drafts.pop(name, None)) is not None:
            _leave_out(drafts)  # what is computed again does not say

    def _output(
        self,
        time_ns: int,
        step: int,
        outputs: list[tuple[str, int]],
        ended: list[tuple[str, str]],
        wrong: list[tuple[str, int]],
    ) -> Iterator[Span]:
        for name, count in wrong:
            self._check(name, step, count)
        for name, tokens in outputs:
            if tokens and (request := self._requests.get(name)) is not None:
                is_first = not request.outputs
                request.outputs += tokens
                if is_first:
                    self._event(request, "FIRST_TOKEN", time_ns, step)
        for name, status in ended:
            yield from self._finish(name, time_ns, step, status)

    def _check(self, name: str, step: int, wrong: int) -> None:
        """Take what the output of a step says of its drafts."""
        if (drafts := self._drafts.get(name)) is None or step not in drafts.steps:
            return
        for at, attributes, key in drafts.guesses:
            if at > step and key in attributes:
                attributes[key] -= wrong  # type: ignore[operator]  # attributes with these keys are counts
        drafts.steps.remove(step)
        drafts.guesses = [guess for guess in drafts.guesses if guess[0] > min(drafts.steps, default=guess[0])]
        if not drafts.steps:
            del self._drafts[name]
        if (request := self._requests.get(name)) is not None:
            request.computed -= wrong

    def _finish(self, name: str, time_ns: int, step: int, status: str) -> Iterator[Span]:
        self._running.pop(name, None)
        if (request := self._requests.pop(name, None)) is not None:
            self._finished += 1
            phase = request.phase if request.cached is not None else "WAITING"
            self._event(request, "FINISHED", time_ns, step, phase=phase, **{"finish.status": status})
            if request.events:
                yield self._journey(name, request)

    def _event(self, request: _Request, name: str, time_ns: int, step: int, *, phase: str = "", **more: str) -> None:
        if request.events is None:
            return
        attributes: Attributes = {
            "event.type": name,
            "ts.monotonic": time_ns / 1e9,
            "ts.monotonic_ns": time_ns,
            "scheduler.step": step,
            "phase": phase or request.phase,
            "prefill.done_tokens": request.prefilled,
            "prefill.total_tokens": request.prompt,
            "decode.done_tokens": request.outputs,
            "decode.max_tokens": request.limit,
            "num_preemptions": request.preemptions,
            **more,
        }
        request.events.append(Event(f"journey.{name}", self._unix(time_ns), attributes))

    def _journey(self, name: str, request: _Request) -> Span:
        events = request.events or []
        attributes: Attributes = {"gen_ai.request.id": name}
        return Span(
            "vllm.scheduler",
            "llm_core",
            events[0].unix_ns,
            events[-1].unix_ns,
            attributes,
            events,
            request.context,
            request.parent,
            self._take_dropped(),
        )

    # -- steps ---------------------------------------------------------------------------------------------

    def _step(
        self,
        step: int,
        start_ns: int,
        end_ns: int,
        running: int,
        waiting: int,
        free: int | None,
        new: list[tuple[str, int, Any]],
        others: list[str],
        computed: list[int],
        blocks: list[Any],
        tokens: dict[str, int],
        drafted: list[str],
    ) -> Iterator[Span]:
        # Not with its last step: that may have contexts which the output of the one before corrects.
        interval = self._header.closure_interval
        if self._steps and (step - 1) // interval != (self._steps.first - 1) // interval:
            yield self._close_steps(self._steps)
        for request in self._running.values():
            request.computed += request.scheduled
            request.scheduled = 0
        comes_in = set()
        hits = 0
        entries = [*new, *zip(others, computed, blocks, strict=True)]
        for name, before, got in entries:
            if (known := self._requests.get(name)) is None:
                continue
            known.computed, known.scheduled = before, tokens.get(name, 0)
            known.blocks += len(got[0]) if got else 0
            if name not in self._running:
                self._running[name] = known
                comes_in.add(name)
                is_first = known.cached is None
                kind = {"schedule.kind": "FIRST" if is_first else "RESUME"}
                self._event(known, "SCHEDULED", end_ns, step, **kind)
                if is_first:
                    known.cached = before
                    hits += before
            known.prefilled = max(known.prefilled, min(known.prompt, before + known.scheduled))

        is_sampled_step = self._random.random() < self._header.step_rate
        is_rich = self._random.random() < self._header.snapshot_rate
        finished, self._finished = self._finished, 0
        preempted, self._preempted = self._preempted, 0
        if is_sampled_step:
            summary = self._summary(tokens)
            if summary is None:
                self.dropped += 1
            else:
                times: Attributes = {
                    "step.id": step,
                    "step.ts_start_ns": start_ns,
                    "step.ts_end_ns": end_ns,
                    "step.duration_us": (end_ns - start_ns) // 1000,
                    "queue.running_depth": running,
                    "queue.waiting_depth": waiting,
                }
                counts = {
                    "batch.num_finished": finished,
                    "batch.num_preempted": preempted,
                    "batch.prefix_hit_tokens": hits,
                }
                at = self._unix(end_ns)
                events = [Event("step.BATCH_SUMMARY", at, times | summary | counts | self._usage(free))]
                # tracefit reads a request's prefix-cache hits from a snapshot: its first step with some always has one.
                shown = [
                    name for name, request in self._running.items() if is_rich or (name in comes_in and request.cached)
                ]
                events += [self._snapshot(step, at, name, self._running[name]) for name in shown]
                yield from self._add(step, start_ns, events)
                self._guess(step, events[0], tokens, dict(zip(shown, events[1:], strict=True)))
        for name in drafted:
            self._drafts.setdefault(name, _Drafts()).steps.add(step)

    def _guess(self, step: int, summary: Event, tokens: dict[str, int], snapshots: dict[str, Event]) -> None:
        """Note which contexts the drafts of steps before make uncertain."""
        for name, drafts in self._drafts.items():
            if name in tokens:
                of = "decode" if self._requests[name].outputs else "prefill"
                drafts.guesses.append((step, summary.attributes, f"batch.{of}_context_tokens"))
            if name in snapshots:
                drafts.guesses.append((step, snapshots[name].attributes, "request.num_computed_tokens"))

    def _summary(self, tokens: dict[str, int]) -> Attributes | None:
        """Return the batch of a step; None if a request is not known, for the batch would be a guess."""
        prefills = decodes = prefill_tokens = decode_tokens = prefill_context = decode_context = 0
        for name, count in tokens.items():
            if (request := self._requests.get(name)) is None:
                return None
            if request.outputs:
                decodes += 1
                decode_tokens += count
                decode_context += request.computed
            else:
                prefills += 1
                prefill_tokens += count
                prefill_context += request.computed
        return {
            "batch.num_prefill_reqs": prefills,
            "batch.num_decode_reqs": decodes,
            "batch.scheduled_tokens": prefill_tokens + decode_tokens,
            "batch.prefill_tokens": prefill_tokens,
            "batch.decode_tokens": decode_tokens,
            "batch.prefill_context_tokens": prefill_context,
            "batch.decode_context_tokens": decode_context,
        }

    def _usage(self, free: int | None) -> Attributes:
        total = self._header.blocks
        if free is None or not total:
            return {}
        return {
            "kv.usage_gpu_ratio": 1 - free / total,
            "kv.blocks_total_gpu": total,
            "kv.blocks_free_gpu": free,
        }

    def _snapshot(self, step: int, unix_ns: int, name: str, request: _Request) -> Event:
        attributes: Attributes = {
            "step.id": step,
            "request.id": name,
            "request.phase": request.phase,
            "request.num_prompt_tokens": request.prompt,
            "request.num_computed_tokens": request.computed,
            "request.num_output_tokens": request.outputs,
            "request.num_preemptions": request.preemptions,
            "request.scheduled_tokens_this_step": request.scheduled,
            "kv.blocks_allocated_gpu": request.blocks,
            "kv.blocks_cached_gpu": (request.prompt + request.outputs) // self._header.block_size,
            "request.effective_prompt_len": max(request.prompt - (request.cached or 0), 0),
        }
        return Event("step.REQUEST_SNAPSHOT", unix_ns, attributes)

    def _add(self, step: int, start_ns: int, events: list[Event]) -> Iterator[Span]:
        if self._steps and len(self._steps.events) + len(events) > MOST_EVENTS:
            yield self._close_steps(self._steps)
        if self._steps is None:
            self._steps = _Steps(step, step, start_ns)
        self._steps.last = step
        self._steps.events += events

    def _close_steps(self, open_: _Steps) -> Span:
        self._steps = None
        for drafts in self._drafts.values():
            _leave_out(drafts)
        self._sequence += 1
        attributes: Attributes = {
            "scheduler.span_sequence": self._sequence,
            "scheduler.step_range_start": open_.first,
            "scheduler.step_range_end": open_.last,
            "scheduler.closure_interval": self._header.closure_interval,
        }
        if self._header.rank is not None:
            attributes["data_parallel_rank"] = self._header.rank
        return Span(
            "vllm.scheduler.step",
            f"scheduler_steps_{self._sequence}",
            self._unix(open_.start_ns),
            open_.events[-1].unix_ns,
            attributes,
            open_.events,
            dropped_events=self._take_dropped(),
        )

    def _lose(self, count: int) -> None:
        self.dropped += count + sum(len(r.events or ()) for r in self._requests.values())
        for drafts in self._drafts.values():
            _leave_out(drafts)
        self._drafts.clear()
        self._requests.clear()
        self._running.clear()

    def _take_dropped(self) -> int:
        dropped, self.dropped = self.dropped, 0
        return dropped

    def _unix(self, time_ns: int) -> int:
        return time_ns + self._header.unix_offset_ns


def _leave_out(drafts: _Drafts) -> None:
    """Remove contexts that nothing will correct."""
    for _, attributes, key in drafts.guesses:
        attributes.pop(key, None)
    drafts.guesses.clear()


def _numbers(ids: tuple[str, str] | None) -> tuple[int, int] | None:
    return None if ids is None else (int(ids[0], 16), int(ids[1], 16))
