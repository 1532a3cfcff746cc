"""Counts of incoming spans, warnings about what they lack, and the live view of both on the terminal.

They cover the last minutes, early enough to restart the server with other flags. Published numbers come from
the tables.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from bisect import bisect_left
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from rich.console import Console
from rich.live import Live
from rich.text import Text

from tracefit.receive.refusals import Refusals
from tracefit.tables import dialects
from tracefit.text import UNKNOWN, columns, count

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

_RECENT = 1000
"""Number of last times that a median is taken of."""

_OPEN_REQUESTS = 10_000
"""Requests with one of their two spans received. Sampling may drop the other, so the table is bounded."""

_REFRESH_S = 0.5
_WINDOW_S = 10.0
_DEFAULT_SPAN_EVENTS = 128
"""Events that OpenTelemetry's SDK keeps of a span unless OTEL_SPAN_EVENT_COUNT_LIMIT says otherwise."""

_OF_FORK = "of inference-sim's fork of vLLM trace them; stock vLLM refuses to start with these flags"

_ENOUGH_REQUESTS = 50
"""Finished requests after which a kind of span that has not come is missing: a request takes many steps."""

_MAX_NUMBER_BYTES = 256
"""Longest attribute that can be a number. Longer ones, which may be lists of millions, are not parsed."""

_EVENT_OF = {spelled: e.event for e in dialects.EVENT_KINDS for spelled in e.spellings}
_STEP_SCOPES = {s.scope for s in dialects.SPELLINGS if s.event == dialects.STEP_EVENT}
_STEP_COLUMN_OF = {key: column for column, keys in dialects.STEP_KEYS.items() for key in keys}
_LATENCY_ATTRIBUTES = {
    s.attribute: (s.column, s.factor / 1e6)
    for s in dialects.REQUEST_RULES
    if s.column in ("ttft_us", "queue_wait_us") and s.attribute
}
"""Attributes that hold a TTFT or a queue wait: which of the two, and the factor that converts them to seconds."""

LATENCY_BOUNDS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
"""Upper bounds of classes of latencies: those of vLLM's metric of the TTFT."""

ERROR_BOUNDS = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
"""Upper bounds of classes of relative errors."""


class ClassCounts:
    """Values since the start: how many in each class, their sum, and the last ones.

    Args:
        bounds: Upper bounds of the classes, ascending; a last class has no bound.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.recent: deque[float] = deque(maxlen=_RECENT)

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
        self.recent.append(value)


class ObservedStep(NamedTuple):
    """A step whose successor was traced too: the batch of its summary, and its cycle time."""

    num_prefill_reqs: int
    num_decode_reqs: int
    prefill_tokens: int
    waiting_depth: int
    kv_blocks_used: int | None
    cycle_us: float


class StepErrors(msgspec.Struct):
    """Measured step times and the errors of their predictions.

    Attributes:
        published: The model's median error on held-out steps, |predicted - measured| / measured; null if it
            has no such error.
        errors: The same error of the steps received so far.
        measured_s: Sum of their measured times.
        predicted_s: Sum of their predicted times.
    """

    published: float | None = None
    errors: ClassCounts = msgspec.field(default_factory=lambda: ClassCounts(ERROR_BOUNDS))
    measured_s: float = 0.0
    predicted_s: float = 0.0

    def add(self, steps: Iterable[ObservedStep], predicted_us: Iterable[float | None]) -> None:
        """Count steps and their predictions; a step without a prediction does not count."""
        for step, predicted in zip(steps, predicted_us, strict=True):
            if predicted is not None and step.cycle_us > 0:
                self.errors.add(abs(predicted - step.cycle_us) / step.cycle_us)
                self.measured_s += step.cycle_us / 1e6
                self.predicted_s += predicted / 1e6


class Observed(msgspec.Struct):
    """Counts since the start, and the last times seen.

    Attributes:
        spans: Spans acknowledged.
        exports: Requests to the receiver acknowledged.
        refusals: Requests to the receiver that were refused, by cause.
        unnamed: Whether spans came from a server without a service name.
        steps: Engine steps traced.
        requests: Requests of the server that finished.
        journeys: Finished requests whose events are traced.
        dropped_events: Events that senders say their SDK dropped.
        largest_span: Most events of a step span, dropped ones included.
        ttft_s: Times from arrival to the first token.
        queue_wait_s: Times from QUEUED to the first SCHEDULED.
        steps_seen: Steps to compare with a model, until they are taken from here; the last ones at most.
        step_errors: How they compare; null without a model.
    """

    spans: int = 0
    exports: int = 0
    refusals: Refusals = msgspec.field(default_factory=Refusals)
    unnamed: bool = False
    steps: int = 0
    step_spans: int = 0
    requests: int = 0
    journeys: int = 0
    dropped_events: int = 0
    largest_span: int = 0
    ttft_s: ClassCounts = msgspec.field(default_factory=lambda: ClassCounts(LATENCY_BOUNDS_S))
    queue_wait_s: ClassCounts = msgspec.field(default_factory=lambda: ClassCounts(LATENCY_BOUNDS_S))
    cycle_ms: deque[float] = msgspec.field(default_factory=lambda: deque(maxlen=_RECENT))
    steps_seen: deque[ObservedStep] = msgspec.field(default_factory=lambda: deque(maxlen=_RECENT))
    step_errors: StepErrors | None = None
    _open_requests: OrderedDict[bytes, tuple[str, int]] = msgspec.field(default_factory=OrderedDict)
    _history: deque[tuple[float, int, int]] = msgspec.field(default_factory=deque)
    _warned: set[str] = msgspec.field(default_factory=set)

    def add(self, scope: str, span: Any) -> None:
        """Count a span of vLLM's, whose attributes are encoded."""
        self.dropped_events += span.dropped_events_count
        if scope in dialects.CORE_SCOPES:
            self._add_core(span)
        elif scope in _STEP_SCOPES:
            self._add_steps(span)
        elif scope in dialects.FRONT_SCOPES and span.name == dialects.FRONT_SPAN:
            self._add_api(scope, span)

    def _add_core(self, span: Any) -> None:
        queued_ns = None
        for event in span.events:
            name = _EVENT_OF.get(event.name)
            if name == "FINISHED":
                self.requests += 1
                self.journeys += 1
            elif name == "QUEUED":
                queued_ns = event.time_unix_nano
            elif name == "SCHEDULED" and queued_ns is not None:
                self.queue_wait_s.add((event.time_unix_nano - queued_ns) / 1e9)
                queued_ns = None  # scheduled again after a preemption
            elif name == "FIRST_TOKEN":
                self._match(span.trace_id, "first token", event.time_unix_nano)

    def _add_api(self, scope: str, span: Any) -> None:
        if scope in dialects.API_SCOPES:
            self._match(span.trace_id, "arrival", span.start_time_unix_nano)
            return
        self.requests += 1
        for attribute in _numeric(span.attributes):
            if attribute.key in _LATENCY_ATTRIBUTES:
                column, factor = _LATENCY_ATTRIBUTES[attribute.key]
                latency = self.ttft_s if column == "ttft_us" else self.queue_wait_s
                latency.add(attribute.value.double_value * factor)

    def _match(self, trace_id: bytes, kind: Literal["arrival", "first token"], unix_ns: int) -> None:
        """Match arrival and first token, which two processes export in any order."""
        # A second span of the same kind (n > 1) replaces the first.
        seen_kind, seen_ns = self._open_requests.pop(trace_id, (kind, 0))
        if seen_kind != kind:
            self.ttft_s.add(abs(unix_ns - seen_ns) / 1e9)
            return
        self._open_requests[trace_id] = (kind, unix_ns)
        if len(self._open_requests) > _OPEN_REQUESTS:
            self._open_requests.popitem(last=False)

    def _add_steps(self, span: Any) -> None:
        self.step_spans += 1
        self.largest_span = max(self.largest_span, len(span.events) + span.dropped_events_count)
        before: dict[str | None, int] = {}
        steps = [event for event in span.events if event.name == dialects.STEP_EVENT]
        self.steps += len(steps)
        for event in steps[-_RECENT:]:
            attributes = _numeric(event.attributes)
            numbers = {_STEP_COLUMN_OF.get(a.key): a.value.int_value for a in attributes}
            # Start to start while requests run or wait, as in the timeline; an idle engine waits for
            # requests, not for a step.
            is_busy = before.get("running_depth", 0) + before.get("waiting_depth", 0) > 0
            if is_busy and numbers.get("step_id", 0) == before.get("step_id", 0) + 1:
                self._add_cycle(before, (numbers.get("ts_start_ns", 0) - before.get("ts_start_ns", 0)) / 1e3)
            before = numbers

    def _add_cycle(self, step: Mapping[str | None, int], cycle_us: float) -> None:
        self.cycle_ms.append(cycle_us / 1e3)
        blocks = step.get("kv_blocks_total")
        self.steps_seen.append(
            ObservedStep(
                num_prefill_reqs=step.get("num_prefill_reqs", 0),
                num_decode_reqs=step.get("num_decode_reqs", 0),
                prefill_tokens=step.get("prefill_tokens", 0),
                waiting_depth=step.get("waiting_depth", 0),
                kv_blocks_used=None if blocks is None else blocks - step.get("kv_blocks_free", 0),
                cycle_us=cycle_us,
            )
        )

    def take_steps(self) -> list[ObservedStep]:
        """Return the steps that came in since the last call, at most the last thousand of them."""
        steps = list(self.steps_seen)
        self.steps_seen.clear()
        return steps

    def rates(self) -> tuple[float, float]:
        """Return spans and steps per second, of the last ten seconds."""
        now = time.monotonic()
        self._history.append((now, self.spans, self.steps))
        while len(self._history) > 2 and now - self._history[1][0] >= _WINDOW_S:
            self._history.popleft()
        then, spans, steps = self._history[0]
        seconds = now - then
        return ((self.spans - spans) / seconds, (self.steps - steps) / seconds) if seconds else (0.0, 0.0)

    def new_warnings(self) -> list[str]:
        """Return a warning, once, for each kind of data that the traces lack: the server can still be restarted."""
        fresh = [(kind, text) for kind, text in self._missing() if kind not in self._warned]
        self._warned |= {kind for kind, _ in fresh}
        return [text for _, text in fresh]

    def _missing(self) -> Iterator[tuple[str, str]]:
        if self.unnamed:
            yield (
                "service",
                "a server has no service name: start it with OTEL_SERVICE_NAME=NAME, the name of its run",
            )
        if self.dropped_events:
            # The next power of two: the largest span so far need not be the largest to come.
            needed = 1 << max(self.largest_span - 1, _DEFAULT_SPAN_EVENTS).bit_length()
            text = (
                f"the server's SDK has dropped {self.dropped_events:,} events: a step span has up to "
                f"{self.largest_span:,} of them; start the server with OTEL_SPAN_EVENT_COUNT_LIMIT={needed}"
            )
            yield "dropped", text
        # An unmodified vLLM traces no step and has no flag for it.
        if self.requests >= _ENOUGH_REQUESTS and not self.step_spans and self.journeys:
            flags = "--step-tracing-enabled --step-tracing-sample-rate 0.1"
            yield "steps", f"{self.requests:,} requests and no step: {flags} {_OF_FORK}"
        if self.step_spans and self.steps >= 10 * _ENOUGH_REQUESTS and not self.requests:
            flags = "--enable-journey-tracing --journey-tracing-sample-rate 1.0"
            yield "journeys", f"{self.steps:,} steps and no request: {flags} {_OF_FORK}"


def _numeric(encoded: Iterable[bytes]) -> list[KeyValue]:
    return [KeyValue.FromString(a) for a in encoded if len(a) <= _MAX_NUMBER_BYTES]


async def show_live(observed: Observed) -> None:
    """Show the live view on stderr until cancelled."""
    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as view:
        while True:
            view.update(live_table(observed), refresh=True)
            await asyncio.sleep(_REFRESH_S)


def _median(times: Collection[float], decimals: int, unit: str) -> str:
    return f"{statistics.median(times):,.{decimals}f} {unit}" if times else UNKNOWN


def live_table(observed: Observed) -> Text:
    """Return the current view."""
    spans_per_s, steps_per_s = observed.rates()
    errors = {}
    if observed.step_errors is not None:
        percent = [100 * error for error in observed.step_errors.errors.recent]
        errors["error of predicted step times, median"] = _median(percent, 1, "%")
    rows = {
        "spans": f"{count(observed.spans)} ({spans_per_s:,.0f}/s)",
        "steps": f"{count(observed.steps)} ({steps_per_s:,.0f}/s)",
        "requests": count(observed.requests),
        "TTFT, median": _median(observed.ttft_s.recent, 3, "s"),
        "queue wait, median": _median([1e3 * s for s in observed.queue_wait_s.recent], 1, "ms"),
        "step time, median": _median(observed.cycle_ms, 2, "ms"),
        **errors,
        "events dropped by the sender": count(observed.dropped_events),
        "requests refused": count(observed.refusals.total),
    }
    return Text(columns(None, rows.items(), left=(0, 1)))
