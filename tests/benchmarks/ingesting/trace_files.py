"""Trace files of any size in a given layout.

A few runs are simulated. Each is then written again and again, every time as later requests: other ids, later times,
further steps, other prompt lengths, and other cuts between records. Everything that changes from copy to copy is a slot
of a span's text (JSON) or a field of its message (protobuf), so that a gigabyte takes less than a minute.
"""

from __future__ import annotations

import base64
import json
import random
import re
import shutil
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from ingesting.layout import order_of
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from tracefit.synth import LengthMix, SynthOptions, synth, write_run

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from ingesting.layout import Layout, Value

    from tracefit.synth import GeneratedEvent, GeneratedSpan

Kind: TypeAlias = Literal["json", "protobuf"]

_UNIT_BYTES = 6_000_000
_UNITS = 3
_SIZE_OF_EVENT = {"json": 700, "protobuf": 330}
_PROCESSES = {"vllm.api": "api"}
_REQUEST = re.compile(r"(chatcmpl-|cmpl-)req-(\d+)(-0)?(-[0-9a-f]{8})?")


class Shift(IntEnum):
    """How a number changes in a later copy."""

    UNIX = 0
    MONOTONIC = auto()
    SECONDS = auto()
    STEP = auto()
    SEQUENCE = auto()
    PROMPT = auto()
    LIMIT = auto()
    BLOCKS = auto()
    TEXT = auto()
    """The number is an index into the copy's texts."""


class Slot(NamedTuple):
    """A value that differs from copy to copy."""

    shift: Shift
    base: int


_SHIFTS = {
    "ts.monotonic_ns": Shift.MONOTONIC,
    "step.ts_start_ns": Shift.MONOTONIC,
    "step.ts_end_ns": Shift.MONOTONIC,
    "ts.monotonic": Shift.SECONDS,
    "event.ts.monotonic": Shift.SECONDS,
    "scheduler.step": Shift.STEP,
    "step.id": Shift.STEP,
    "scheduler.step_range_start": Shift.STEP,
    "scheduler.step_range_end": Shift.STEP,
    "scheduler.span_sequence": Shift.SEQUENCE,
    "gen_ai.usage.prompt_tokens": Shift.PROMPT,
    "prefill.total_tokens": Shift.PROMPT,
    "prefill.done_tokens": Shift.PROMPT,
    "request.num_prompt_tokens": Shift.PROMPT,
    "request.num_computed_tokens": Shift.PROMPT,
    "request.effective_prompt_len": Shift.PROMPT,
    "gen_ai.request.max_tokens": Shift.LIMIT,
    "decode.max_tokens": Shift.LIMIT,
    "kv.blocks_total_gpu": Shift.BLOCKS,
    "kv.blocks_free_gpu": Shift.BLOCKS,
    "gen_ai.request.id": Shift.TEXT,
    "request.id": Shift.TEXT,
}


@dataclass
class Written:
    """A trace file and what is in it."""

    path: Path  # the file
    size: int = 0  # its length in bytes
    records: int = 0  # its records
    # Rows it must make, by table.
    rows: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("spans", "journey_events", "steps", "request_snapshots"), 0)
    )
    # Attribute keys it holds, by family of events, as it spells them: key to `int`, `float` or `str`.
    columns: dict[str, dict[str, str]] = field(default_factory=dict)


def write_trace(folder: Path, kind: Kind, size: int, layout: Layout) -> Written:
    """Write a run folder with a trace of at least `size` bytes.

    Args:
        folder: Where; its name becomes the run's.
        kind: Encoding.
        size: Wanted length. The file ends with the first record beyond it.
        layout: How it is written.
    """
    _sidecars(folder)
    layout = layout.with_record_bytes(max(size // 4, 50_000))
    units = [_Unit(layout, number, kind, min(_UNIT_BYTES, size // _UNITS)) for number in range(_UNITS)]
    encoding = _Json(layout) if kind == "json" else _Protobuf(layout)
    prepared = [encoding.prepare(unit) for unit in units]
    written = Written(folder / ("traces.json" if kind == "json" else "traces.binpb"))
    for unit in units:
        for family, columns in unit.columns.items():
            written.columns.setdefault(family, {}).update(columns)
    with written.path.open("wb") as out:
        for record, counts in _records(layout, units, prepared, encoding):
            written.size += out.write(record)
            written.records += 1
            for one in counts:
                for table, rows in one.items():
                    written.rows[table] += rows
            if written.size >= size:
                break
    return written


def _sidecars(folder: Path) -> None:
    """Write the configuration that lies beside a trace."""
    made = write_run(synth(SynthOptions(name="sidecars", requests=3)), folder / "made")
    shutil.copy(made / "config.json", folder / "config.json")
    # Copies of requests have longer prompts than the request: none may be beyond the server's limit.
    config = re.sub(r"max_model_len: \d+", "max_model_len: 8192", (made / "exp-config.yaml").read_text())
    (folder / "exp-config.yaml").write_text(config)
    shutil.rmtree(folder / "made")


def _options(layout: Layout, number: int, requests: int) -> SynthOptions:
    run, sigma = layout.run, layout.run["sigma"]
    return SynthOptions(
        seed=layout.seed * _UNITS + number,
        requests=requests,
        rich_sampling=run["rich_sampling"],
        step_sampling=run["step_sampling"],
        prompt_tokens=LengthMix(((0.7, run["prompt_median"], sigma), (0.3, 40.0, 0.4)), minimum=4),
        output_tokens=LengthMix(((0.6, run["output_median"], sigma), (0.4, 30.0, 0.6))),
        rate_per_s=run["rate_per_s"],
        chat_fraction=run["chat_fraction"],
        steps_per_span=run["steps_per_span"],
        span_event_limit=run["span_event_limit"],
    )


class _Unit:
    """A simulated run, its spans in the order they were sent, ready to be written again as a later one."""

    def __init__(self, layout: Layout, number: int, kind: Kind, size: int) -> None:
        self.layout = layout
        probe = synth(_options(layout, number, 40))
        events = sum(len(span.events) + 1 for span in probe.spans)
        requests = max(5, round(40 * size / (events * _SIZE_OF_EVENT[kind])))
        self.spans = synth(_options(layout, number, min(requests, 20_000))).spans
        self._rng = random.Random(f"unit {layout.seed} {number}")
        core = [event for span in self.spans if span.name == "llm_core" for event in span.events]
        offset = min(event.unix_ns - event.attributes["ts.monotonic_ns"] for event in core)  # type: ignore[operator]
        self.unix_ns = min(span.start_unix_ns for span in self.spans)
        self.monotonic_ns: int = self.unix_ns - int(offset)
        self.length_ns = max(span.end_unix_ns for span in self.spans) - self.unix_ns
        self.texts: list[tuple[str, str]] = []
        """Kind and content of each text: a trace's id, a span's, or a request's."""
        self._places: dict[tuple[str, str], int] = {}
        self.columns: dict[str, dict[str, str]] = {}
        self.requests = self.steps = self.sequences = 0

    def counts(self, span: GeneratedSpan) -> dict[str, int]:
        """Return the rows a span makes, by table."""
        if span.name.startswith("scheduler_steps"):
            snapshots = sum(event.name == "step.REQUEST_SNAPSHOT" for event in span.events)
            return {"spans": 1, "steps": len(span.events) - snapshots, "request_snapshots": snapshots}
        return {"spans": 1, "journey_events": len(span.events)}

    def text(self, kind: str, content: str) -> Slot:
        """Return the slot of a text that is another one in each copy."""
        place = self._places.setdefault((kind, content), len(self.texts))
        if place == len(self.texts):
            self.texts.append((kind, content))
            if kind == "request" and (found := _REQUEST.fullmatch(content)):
                self.requests = max(self.requests, int(found[2]))
        return Slot(Shift.TEXT, place)

    def unix(self, unix_ns: int) -> Slot:
        """Return the slot of a wall-clock time."""
        return Slot(Shift.UNIX, unix_ns - self.unix_ns)

    def span_name(self, span: GeneratedSpan) -> Slot | str:
        """Return a span's name, or the slot of the number behind it."""
        if span.name.startswith("scheduler_steps_"):
            return Slot(Shift.SEQUENCE, int(span.name.rpartition("_")[2]))
        return span.name

    def event_attributes(self, event: GeneratedEvent) -> list[tuple[str, Slot | Value]]:
        """Return the attributes of an event in this layout."""
        layout = self.layout
        pairs = dict(event.attributes)
        family = event.name.partition(".")[0]
        if family == "journey" and layout.clock == "seconds":
            del pairs["ts.monotonic_ns"]
        if event.name == "step.REQUEST_SNAPSHOT":
            family = "snapshot"
            if layout.prompt_share < 1 and self._rng.random() >= layout.prompt_share:
                del pairs["request.effective_prompt_len"]
        columns = self.columns.setdefault(family, {})
        found: list[tuple[str, Slot | Value]] = []
        for key, value in pairs.items():
            spelled = layout.key(key) if family == "journey" else key
            columns.setdefault(spelled, type(value).__name__)
            if key == "ts.monotonic_ns" and layout.clock == "zero":
                found.append((spelled, 0))
            else:
                found.append((spelled, self._slot(key, value)))
        return self._arranged(event.name, found)

    def span_attributes(self, span: GeneratedSpan) -> list[tuple[str, Slot | Value]]:
        """Return the attributes of a span itself in this layout."""
        kind = "scheduler_steps" if span.name.startswith("scheduler_steps") else span.name
        return self._arranged(kind, [(key, self._slot(key, value)) for key, value in span.attributes.items()])

    def _slot(self, key: str, value: Value) -> Slot | Value:
        """Return a value, or its slot where it differs from copy to copy."""
        shift = _SHIFTS.get(key)
        if shift is None:
            return value
        if shift is Shift.TEXT:
            return self.text("request", str(value))
        number: int = round(float(value) * 1e9) if shift is Shift.SECONDS else int(value)
        if shift is Shift.STEP:
            self.steps = max(self.steps, number)
        elif shift is Shift.SEQUENCE:
            self.sequences = max(self.sequences, number)
        elif shift is Shift.PROMPT and not number:
            return 0
        elif shift in (Shift.MONOTONIC, Shift.SECONDS):
            number -= self.monotonic_ns
        return Slot(shift, number)

    def _arranged(self, kind: str, pairs: list[tuple[str, Slot | Value]]) -> list[tuple[str, Slot | Value]]:
        """Return attributes with the unknown ones of this layout, in its order."""
        rng = self._rng
        pairs += [
            (extra.key, rng.choice(extra.values))
            for extra in self.layout.extras.get(kind, ())
            if extra.share == 1 or rng.random() < extra.share
        ]
        if not self.layout.keeps_order:
            pairs.sort(key=lambda pair: self.layout.rank(kind, pair[0]))
        return pairs


def _records(
    layout: Layout,
    units: list[_Unit],
    prepared: list[_PreparedJson | _PreparedProtobuf],
    encoding: _Json | _Protobuf,
) -> Iterator[tuple[bytes, list[dict[str, int]]]]:
    """Yield records without end, and what rows their spans make."""
    rng = np.random.default_rng(layout.seed)
    counts = [[unit.counts(span) for span in unit.spans] for unit in units]
    scopes = [[(_PROCESSES.get(span.scope, "core"), span.scope) for span in unit.spans] for unit in units]
    slots = [
        (np.array([s.base for s in one.slots], np.int64), np.array([s.shift for s in one.slots], np.int8))
        for one in prepared
    ]
    copies = _Copies(layout, rng)
    while True:
        for number, unit in enumerate(units):
            base, kinds = slots[number]
            values, texts = copies.next(unit, base, kinds)
            spans = zip(scopes[number], prepared[number].copies(values, kinds, texts), counts[number], strict=True)
            for group in _cut(layout, rng, spans):
                yield (
                    encoding.record([(*scope, data) for scope, data, _ in group]),
                    [counts for _, _, counts in group],
                )


_Encoded: TypeAlias = tuple[tuple[str, str], bytes, dict[str, int]]


def _cut(layout: Layout, rng: np.random.Generator, spans: Iterable[_Encoded]) -> Iterator[list[_Encoded]]:
    """Yield the spans record by record; those of two processes apart, unless the layout mixes them."""
    open_groups: dict[str, tuple[int, list[_Encoded]]] = {}
    lengths: dict[str, int] = {}
    for span in spans:
        process = "both" if layout.mixes_processes else span[0][0]
        if process not in open_groups:
            wanted = layout.spans_per_record * float(np.exp(layout.record_spread * rng.standard_normal()))
            open_groups[process] = (max(1, min(round(wanted), 1000)), [])
            lengths[process] = 0
        wanted_spans, group = open_groups[process]
        group.append(span)
        lengths[process] += len(span[1])
        if len(group) >= wanted_spans or lengths[process] >= layout.record_bytes:
            del open_groups[process]
            yield group
    for _, group in open_groups.values():
        yield group


class _Copies:
    """The clock, counters and names that go on from copy to copy."""

    def __init__(self, layout: Layout, rng: np.random.Generator) -> None:
        self._layout, self._rng = layout, rng
        self._unix_ns = 1_780_000_000_000_000_000 + int(rng.integers(0, 10**16))
        self._monotonic_ns = int(10 ** rng.uniform(11, 15))
        self._steps = self._sequences = self._requests = 0

    def next(self, unit: _Unit, base: np.ndarray, kinds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the values of all slots of the next copy, and its texts."""
        shifts = np.zeros(len(Shift), np.int64)
        shifts[Shift.UNIX] = self._unix_ns
        shifts[Shift.MONOTONIC] = shifts[Shift.SECONDS] = self._monotonic_ns
        shifts[Shift.STEP], shifts[Shift.SEQUENCE] = self._steps, self._sequences
        for shift, most in ((Shift.PROMPT, 60), (Shift.LIMIT, 40), (Shift.BLOCKS, 5_000)):
            shifts[shift] = self._rng.integers(0, most)
        texts = np.array(self._texts(unit), object)
        passed = unit.length_ns + int(self._rng.integers(2 * 10**9, 2 * 10**10))
        self._unix_ns += passed
        self._monotonic_ns += passed
        self._steps += unit.steps
        self._sequences += unit.sequences
        self._requests += unit.requests
        return base + shifts[kinds], texts

    def _texts(self, unit: _Unit) -> list[str]:
        random_hex = self._rng.bytes(16 * len(unit.texts)).hex()
        if self._layout.upper_ids:
            random_hex = random_hex.upper()
        numbered = self._layout.run["numbered_requests"]
        stems: dict[str, str] = {}
        texts = []
        for place, (kind, content) in enumerate(unit.texts):
            hexadecimal = random_hex[32 * place : 32 * place + 32]
            if kind == "trace":
                texts.append(hexadecimal)
            elif kind == "span":
                texts.append(hexadecimal[:16])
            else:
                prefix, number, prompt, token = _REQUEST.fullmatch(content).groups()  # type: ignore[union-attr]
                stem = stems.get(number)
                if stem is None:
                    stem = f"req-{self._requests + int(number):07d}" if numbered else hexadecimal.lower()
                    stems[number] = stem
                # A token of a request must be the same wherever it occurs, which one text is.
                texts.append(f"{prefix}{stem}{prompt or ''}{token or ''}")
        return texts


def _filled(values: np.ndarray, kinds: np.ndarray, texts: np.ndarray) -> list[Any]:
    """Return what stands in each slot of a copy."""
    filled = values.astype(object)
    is_seconds, is_text = kinds == Shift.SECONDS, kinds == Shift.TEXT
    filled[is_seconds] = (values[is_seconds] / 1e9).astype(object)
    filled[is_text] = texts[values[is_text]]
    return filled.tolist()


def _by_scope(spans: Iterable[tuple[str, str, bytes]]) -> dict[str, dict[str, list[bytes]]]:
    """Return spans by process and scope."""
    processes: dict[str, dict[str, list[bytes]]] = {}
    for process, scope, data in spans:
        processes.setdefault(process, {}).setdefault(scope, []).append(data)
    return processes


# JSON


_KIND_NAMES = {1: "SPAN_KIND_INTERNAL", 2: "SPAN_KIND_SERVER"}
_MARK = re.compile(r'"\\u0001(\d+)n\\u0001"|\\u0001(\d+)\\u0001')
"""The place of a slot in encoded text: a number, which takes its quotes with it, or a part of a string."""


class _Json:
    """Objects are dicts in the order of the layout; what is put in later stands in them as a mark."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._encode = json.JSONEncoder(ensure_ascii=layout.is_ascii, separators=layout.separators).encode
        self._marked: list[Any] = []

    def prepare(self, unit: _Unit) -> _PreparedJson:
        prepared = _PreparedJson()
        for span in unit.spans:
            template = self._encode(self._span(unit, span)).replace("%", "%%")
            prepared.slots += [self._marked[int(found[1] or found[2])] for found in _MARK.finditer(template)]
            prepared.templates.append(_MARK.sub("%s", template))
            prepared.ends.append(len(prepared.slots))
            self._marked.clear()
        return prepared

    def record(self, spans: Iterable[tuple[str, str, bytes]]) -> bytes:
        zero = "" if self._layout.writes_empty else None
        resource_spans = []
        for process, scopes in _by_scope(spans).items():
            listed = [
                self._object(
                    "scope spans",
                    scope=self._scope(scope),
                    spans=[self._mark(d, "n") for d in own],
                    schemaUrl=zero,
                )
                for scope, own in scopes.items()
            ]
            resource = {"attributes": self._attributes(_resource_pairs(self._layout, process))}
            resource_spans.append(self._object("resource spans", resource=resource, scopeSpans=listed, schemaUrl=zero))
        text = self._encode({"resourceSpans": resource_spans})
        record = b"".join(
            part.encode() if n % 2 == 0 else self._marked[int(part)]
            for n, part in enumerate(re.split(r'"\\u0001(\d+)n\\u0001"', text))
        )
        self._marked.clear()
        return record + b"\n"

    def _mark(self, content: Slot | bytes, kind: str = "") -> str:
        self._marked.append(content)
        return f"\x01{len(self._marked) - 1}{kind}\x01"

    def _object(self, name: str, /, **parts: Any) -> dict[str, Any]:
        """Return an object in the order of the layout, without what is None."""
        return {key: parts[key] for key in order_of(self._layout, name) if parts.get(key) is not None}

    def _scope(self, scope: str) -> dict[str, Any]:
        version = "" if self._layout.writes_empty else None
        extras = self._attributes(_scope_pairs(self._layout)) or None
        return self._object("scope", name=scope, version=version, attributes=extras)

    def _attributes(self, pairs: Iterable[tuple[str, Slot | Value]]) -> list[dict[str, Any]]:
        return [self._object("attribute", key=key, value=self._value(value)) for key, value in pairs]

    def _value(self, value: Slot | Value) -> dict[str, Any]:
        if not isinstance(value, Slot):
            return self._constant(value)
        if value.shift is Shift.TEXT:
            return {"stringValue": self._mark(value)}
        if value.shift is Shift.SECONDS:
            return {"doubleValue": self._mark(value, "n")}
        return {"intValue": self._mark(value, "" if self._layout.quotes_integers else "n")}

    def _constant(self, value: Value) -> dict[str, Any]:
        layout = self._layout
        if isinstance(value, bool):
            return {"boolValue": value}
        if isinstance(value, int):
            return {"intValue": str(value) if layout.quotes_integers else value}
        if isinstance(value, bytes):
            return {"bytesValue": base64.b64encode(value).decode()}
        if isinstance(value, str):
            return {"stringValue": value}
        whole = not layout.whole_doubles and value.is_integer() and abs(value) < 1e15
        return {"doubleValue": int(value) if whole else value}

    def _time(self, slot: Slot) -> str:
        return self._mark(slot, "" if self._layout.quotes_times else "n")

    def _event(self, unit: _Unit, event: GeneratedEvent) -> dict[str, Any]:
        return self._object(
            "event",
            timeUnixNano=self._time(unit.unix(event.unix_ns)),
            name=self._layout.event_name(event.name),
            attributes=self._attributes(unit.event_attributes(event)),
            droppedAttributesCount=0 if self._layout.has_event_zeros else None,
        )

    def _span(self, unit: _Unit, span: GeneratedSpan) -> dict[str, Any]:
        layout = self._layout
        is_empty = layout.writes_empty
        name = unit.span_name(span)
        parent = "" if is_empty else None
        if span.parent_span_id:
            parent = self._mark(unit.text("span", span.parent_span_id))
        events = [self._event(unit, event) for event in span.events]
        error_code = "STATUS_CODE_ERROR" if layout.names_enums else 2
        return self._object(
            "span",
            traceId=self._mark(unit.text("trace", span.trace_id)),
            spanId=self._mark(unit.text("span", span.span_id)),
            traceState="" if is_empty else None,
            parentSpanId=parent,
            flags=span.flags,
            name=f"scheduler_steps_{self._mark(name)}" if isinstance(name, Slot) else name,
            kind=_KIND_NAMES[span.kind.value] if layout.names_enums else span.kind.value,
            startTimeUnixNano=self._time(unit.unix(span.start_unix_ns)),
            endTimeUnixNano=self._time(unit.unix(span.end_unix_ns)),
            attributes=self._attributes(unit.span_attributes(span)),
            droppedAttributesCount=0 if is_empty else None,
            events=events if events or is_empty else None,
            droppedEventsCount=span.dropped_events if span.dropped_events or is_empty else None,
            links=[] if is_empty else None,
            status={"message": span.error, "code": error_code} if span.error else {},
        )


class _PreparedJson:
    def __init__(self) -> None:
        self.templates: list[str] = []
        self.ends: list[int] = []
        self.slots: list[Slot] = []

    def copies(self, values: np.ndarray, kinds: np.ndarray, texts: np.ndarray) -> Iterator[bytes]:
        """Yield every span with these values in its slots."""
        arguments = _filled(values, kinds, texts)
        start = 0
        for template, end in zip(self.templates, self.ends, strict=True):
            yield (template % tuple(arguments[start:end])).encode()
            start = end


# protobuf


class _Protobuf:
    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def prepare(self, unit: _Unit) -> _PreparedProtobuf:
        prepared = _PreparedProtobuf()
        for span in unit.spans:
            self._span(prepared, unit, span)
            prepared.ends.append(len(prepared.slots))
        return prepared

    def record(self, spans: Iterable[tuple[str, str, bytes]]) -> bytes:
        resource_spans = []
        for process, scopes in _by_scope(spans).items():
            resource = resource_pb2.Resource(
                attributes=[_key_value(*pair) for pair in _resource_pairs(self._layout, process)]
            )
            parts = [_field(1, resource.SerializeToString())]
            for scope, own in scopes.items():
                about = common_pb2.InstrumentationScope(
                    name=scope, attributes=[_key_value(*pair) for pair in _scope_pairs(self._layout)]
                )
                inner = [_field(1, about.SerializeToString()), *(_field(2, data) for data in own)]
                parts.append(_field(2, b"".join(inner)))
            resource_spans.append(_field(1, b"".join(parts)))
        message = b"".join(resource_spans)
        return len(message).to_bytes(4, "big") + message

    def _span(self, prepared: _PreparedProtobuf, unit: _Unit, span: GeneratedSpan) -> None:
        name = unit.span_name(span)
        message = trace_pb2.Span(
            flags=span.flags,
            name="" if isinstance(name, Slot) else name,
            kind=trace_pb2.Span.SpanKind.ValueType(span.kind),
            dropped_events_count=span.dropped_events,
        )
        message.status.SetInParent()
        if span.error:
            message.status.message = span.error
            message.status.code = trace_pb2.Status.STATUS_CODE_ERROR
        prepared.spans.append(message)
        prepared.add(message, "trace_id", unit.text("trace", span.trace_id))
        prepared.add(message, "span_id", unit.text("span", span.span_id))
        if span.parent_span_id:
            prepared.add(message, "parent_span_id", unit.text("span", span.parent_span_id))
        if isinstance(name, Slot):
            prepared.add(message, "name", name)
        prepared.add(message, "start_time_unix_nano", unit.unix(span.start_unix_ns))
        prepared.add(message, "end_time_unix_nano", unit.unix(span.end_unix_ns))
        self._fill(prepared, message.attributes, unit.span_attributes(span))
        for event in span.events:
            own = message.events.add(name=self._layout.event_name(event.name))
            prepared.add(own, "time_unix_nano", unit.unix(event.unix_ns))
            self._fill(prepared, own.attributes, unit.event_attributes(event))

    def _fill(self, prepared: _PreparedProtobuf, listed: Any, pairs: list[tuple[str, Slot | Value]]) -> None:
        for key, value in pairs:
            one = listed.add(key=key)
            if not isinstance(value, Slot):
                one.value.CopyFrom(_any_value(value))
            elif value.shift is Shift.TEXT:
                prepared.add(one.value, "string_value", value)
            elif value.shift is Shift.SECONDS:
                prepared.add(one.value, "double_value", value)
            else:
                prepared.add(one.value, "int_value", value)


class _PreparedProtobuf:
    def __init__(self) -> None:
        self.spans: list[trace_pb2.Span] = []
        self.ends: list[int] = []
        self.slots: list[Slot] = []
        self._targets: list[tuple[Any, str]] = []

    def add(self, message: Any, name: str, slot: Slot) -> None:
        self.slots.append(slot)
        self._targets.append((message, name))

    def copies(self, values: np.ndarray, kinds: np.ndarray, texts: np.ndarray) -> Iterator[bytes]:
        """Yield every span with these values in its slots."""
        for (message, name), value in zip(self._targets, _filled(values, kinds, texts), strict=True):
            if name.endswith("_id"):
                setattr(message, name, bytes.fromhex(value))
            elif name == "name":
                message.name = f"scheduler_steps_{value}"
            else:
                setattr(message, name, value)
        for span in self.spans:
            yield span.SerializeToString()


def _field(number: int, data: bytes) -> bytes:
    """Return a length-delimited field."""
    length, digits = len(data), bytearray([number << 3 | 2])
    while length > 127:
        digits.append(length & 127 | 128)
        length >>= 7
    digits.append(length)
    return bytes(digits) + data


def _key_value(key: str, value: Value) -> common_pb2.KeyValue:
    return common_pb2.KeyValue(key=key, value=_any_value(value))


def _any_value(value: Value) -> common_pb2.AnyValue:
    if isinstance(value, bool):
        return common_pb2.AnyValue(bool_value=value)
    if isinstance(value, int):
        return common_pb2.AnyValue(int_value=value)
    if isinstance(value, float):
        return common_pb2.AnyValue(double_value=value)
    if isinstance(value, bytes):
        return common_pb2.AnyValue(bytes_value=value)
    return common_pb2.AnyValue(string_value=value)


def _resource_pairs(layout: Layout, process: str) -> list[tuple[str, Any]]:
    """Return the attributes of a process."""
    pairs = [
        (key, value.format(process=process) if isinstance(value, str) else value) for key, value in layout.resource
    ]
    return [*pairs, *((extra.key, extra.values[0]) for extra in layout.extras.get("resource", ()))]


def _scope_pairs(layout: Layout) -> list[tuple[str, Any]]:
    """Return the attributes of a scope."""
    return [(extra.key, extra.values[0]) for extra in layout.extras.get("scope", ())]
