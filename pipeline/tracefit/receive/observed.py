"""Counts of incoming spans, warnings about what they lack, and the live view of both on the terminal.

These are first impressions of the last minutes, in time to start the server with other flags. What is published comes from
the tables.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from rich.console import Console
from rich.live import Live
from rich.text import Text

from tracefit.receive.refusals import Refusals
from tracefit.tables import dialects
from tracefit.text import UNKNOWN, columns, count

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_RECENT = 1000
"""Times that medians are taken of."""

_OPEN_REQUESTS = 10_000
"""Requests of which one of both spans has come, remembered until the other does: with sampling some never do."""

_REFRESH_S = 0.5
_WINDOW_S = 10.0
_DEFAULT_SPAN_EVENTS = 128
"""Events that OpenTelemetry's SDK keeps of a span unless OTEL_SPAN_EVENT_COUNT_LIMIT says otherwise."""

_ENOUGH_REQUESTS = 50
"""Finished requests after which a kind of span that has not come is missing: a request takes many steps."""

_SPELLED = {spelled: e.event for e in dialects.JOURNEY_EVENTS for spelled in e.spellings}
_STEP_SCOPES = {s.scope for s in dialects.SPELLINGS if s.event == dialects.STEP_EVENT}
_STEP_COLUMNS = {key: column for column, keys in dialects.STEP_KEYS.items() for key in keys}
_TTFT_FACTORS = {
    s.attribute: s.factor / 1e6 for s in dialects.REQUEST_RULES if s.column == "ttft_us" and s.attribute
}
"""Attributes that hold a time to the first token, to what makes seconds of their values."""


@dataclass(slots=True)
class Observed:
    """Counts since the start, and the last times seen.

    Attributes:
        spans: Spans acknowledged.
        exports: Requests to the receiver acknowledged.
        refusals: Requests to the receiver that were refused, by cause.
        unnamed: Whether spans came from a server without a service name.
        steps: Engine steps traced.
        requests: Requests of the server that finished.
        dropped_events: Events that senders say their SDK dropped.
        largest_span: Most events of a step span, dropped ones included.
        ttft_s: Last times from arrival to the first token.
        cycle_ms: Last times from the start of a step to the start of the next one while requests ran.
    """

    spans: int = 0
    exports: int = 0
    refusals: Refusals = field(default_factory=Refusals)
    unnamed: bool = False
    steps: int = 0
    step_spans: int = 0
    requests: int = 0
    dropped_events: int = 0
    largest_span: int = 0
    ttft_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    cycle_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _open_requests: OrderedDict[bytes, tuple[str, int]] = field(default_factory=OrderedDict)
    _history: deque[tuple[float, int, int]] = field(default_factory=deque)
    _warned: set[str] = field(default_factory=set)

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
        for event in span.events:
            name = _SPELLED.get(event.name)
            if name == "FINISHED":
                self.requests += 1
            elif name == "FIRST_TOKEN":
                self._match(span.trace_id, "first token", event.time_unix_nano)

    def _add_api(self, scope: str, span: Any) -> None:
        if scope in dialects.API_SCOPES:
            self._match(span.trace_id, "arrival", span.start_time_unix_nano)
            return
        self.requests += 1
        attributes = map(KeyValue.FromString, span.attributes)
        self.ttft_s.extend(
            a.value.double_value * _TTFT_FACTORS[a.key] for a in attributes if a.key in _TTFT_FACTORS
        )

    def _match(self, trace_id: bytes, what: Literal["arrival", "first token"], unix_ns: int) -> None:
        """Bring arrival and first token together: two processes export them, in any order."""
        # A second span of the same kind (n > 1) takes the place of the first.
        known, other_ns = self._open_requests.pop(trace_id, (what, 0))
        if known != what:
            self.ttft_s.append(abs(unix_ns - other_ns) / 1e9)
            return
        self._open_requests[trace_id] = (what, unix_ns)
        if len(self._open_requests) > _OPEN_REQUESTS:
            self._open_requests.popitem(last=False)

    def _add_steps(self, span: Any) -> None:
        self.step_spans += 1
        self.largest_span = max(self.largest_span, len(span.events) + span.dropped_events_count)
        before: tuple[int, int, int] | None = None
        for event in span.events:
            if event.name != dialects.STEP_EVENT:
                continue
            self.steps += 1
            attributes = map(KeyValue.FromString, event.attributes)
            numbers = {_STEP_COLUMNS.get(a.key): a.value.int_value for a in attributes}
            step, start = numbers.get("step_id", 0), numbers.get("ts_start_ns", 0)
            # Start to start while requests run or wait, as in the timeline; an idle engine waits for requests, not for a step.
            if before is not None and step == before[0] + 1 and before[2]:
                self.cycle_ms.append((start - before[1]) / 1e6)
            depth = numbers.get("running_depth", 0) + numbers.get("waiting_depth", 0)
            before = step, start, depth

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
        """Return what the traces lack, each once: the server can still be started with the right flags."""
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
                f"the server's SDK has dropped {self.dropped_events:,} events: a step span has up to {self.largest_span:,} "
                f"of them; start the server with OTEL_SPAN_EVENT_COUNT_LIMIT={needed}"
            )
            yield "dropped", text
        if self.requests >= _ENOUGH_REQUESTS and not self.step_spans:
            flags = "--step-tracing-enabled --step-tracing-sample-rate 0.1"
            yield "steps", f"{self.requests:,} requests and no step: start the server with {flags}"
        if self.step_spans and self.steps >= 10 * _ENOUGH_REQUESTS and not self.requests:
            flags = "--enable-journey-tracing --journey-tracing-sample-rate 1.0"
            yield "journeys", f"{self.steps:,} steps and no request: start the server with {flags}"


async def show_live(observed: Observed, console: Console | None = None) -> None:
    """Show what comes in, on stderr, until cancelled."""
    with Live(console=console or Console(stderr=True), auto_refresh=False, transient=True) as view:
        while True:
            view.update(live_table(observed), refresh=True)
            await asyncio.sleep(_REFRESH_S)


def _median(times: Collection[float], decimals: int, unit: str) -> str:
    return f"{statistics.median(times):,.{decimals}f} {unit}" if times else UNKNOWN


def live_table(observed: Observed) -> Text:
    """Return the view of this moment."""
    spans_per_s, steps_per_s = observed.rates()
    rows = {
        "spans": f"{count(observed.spans)} ({spans_per_s:,.0f}/s)",
        "steps": f"{count(observed.steps)} ({steps_per_s:,.0f}/s)",
        "requests": count(observed.requests),
        "TTFT, median": _median(observed.ttft_s, 3, "s"),
        "step time, median": _median(observed.cycle_ms, 2, "ms"),
        "events dropped by the sender": count(observed.dropped_events),
        "requests refused": count(observed.refusals.total),
    }
    return Text(columns(None, rows.items(), left=(0, 1)))
