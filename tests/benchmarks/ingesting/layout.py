"""The layout of a trace file, drawn at random: what an exporter is free to choose.

A layout says nothing of the run: the same requests and steps can be written in any of them. No reader can have been
tuned to one, as it is drawn again in each sitting. The same seed draws the same layout.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

Value: TypeAlias = str | int | float | bool | bytes

_TOKENS = {
    "prefill.done_tokens": "prefill_done_tokens",
    "prefill.total_tokens": "prefill_total_tokens",
    "decode.done_tokens": "decode_done_tokens",
    "decode.max_tokens": "decode_max_tokens",
}
SPELLINGS: dict[str, dict[str, str]] = {
    "dotted": {},
    "underscored tokens": _TOKENS,
    "underscored": _TOKENS
    | {
        "scheduler.step": "scheduler_step",
        "ts.monotonic": "ts_monotonic",
        "ts.monotonic_ns": "ts_monotonic_ns",
        "schedule.kind": "schedule_kind",
        "finish.status": "finish_status",
    },
}
"""Spellings of journey attributes that written specifications use: the emitter's key to theirs."""

_COMMON_KINDS = ("ARRIVED", "HANDOFF_TO_CORE", "FIRST_RESPONSE_FROM_CORE", "DEPARTED", "ABORTED")
EVENT_KINDS = (
    *(f"api.{name}" for name in _COMMON_KINDS),
    *(f"journey.{name}" for name in ("QUEUED", "SCHEDULED", "FIRST_TOKEN", "PREEMPTED", "FINISHED")),
    "step.BATCH_SUMMARY",
    "step.REQUEST_SNAPSHOT",
)
SPAN_KINDS = ("llm_request", "llm_core", "scheduler_steps")

_EXTRA_KEYS = (
    "tenant",
    "deployment.region",
    "gpu.util",
    "gpu.temperature",
    "cache.hit",
    "lora.name",
    "step.idx",
    "step.label",
    "request.id_hash",
    "request.priority",
    "kv.blocks",
    "kv.transfer_bytes",
    "batch.kind",
    "queue.name",
    "scheduler.policy",
    "scheduler_note",
    "prefill.backend",
    "decode_graph",
    "vllm.version",
    "spec.accepted",
    "spec.acceptance_rate",
    "x",
    "name",
    "timeUnixNano",
)
"""Keys that tracefit does not know; some look much like those it does."""

_TEXTS = (
    "eu-west-1a",
    "",
    'a "quoted" word',
    "two\nlines and a\ttab",
    "C:\\models\\llama",
    "Zürich ☃",
    "/v1/internal/route?x=1&y=[2]",
    '{"key":"step.id","value":{"intValue":"7"}}',
    "long " * 30,
)
_DOUBLES = (0.0, 1.0, -1.5, 0.25, 1e-07, 6.02e23, 3.141592653589793, 99.5)
_INTEGERS = (0, 1, -1, 7, 4096, -(2**53), 2**40 + 3, 2**62)


@dataclass(frozen=True)
class Extra:
    """An attribute no reader knows: its key, the share of events that carry it, and the values it takes."""

    key: str
    share: float
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Layout:
    """Everything about a file that is not the run itself."""

    seed: int  # what it was drawn from
    spelling: str  # a name in `SPELLINGS`
    has_api_prefix: bool  # whether API events are called `api.ARRIVED` or `ARRIVED`
    clock: str  # core events carry seconds and `ns`, seconds and `zero` nanoseconds, or only `seconds`
    prompt_share: float  # share of snapshots with `request.effective_prompt_len`
    keeps_order: bool  # whether attributes stand in the emitter's order, unknown ones behind
    # Unknown attributes per kind of event, and per `resource`, `scope` and name of a span.
    extras: dict[str, tuple[Extra, ...]]
    resource: tuple[tuple[str, Value], ...]  # attributes of the resource; `{process}` in one is filled in
    mixes_processes: bool  # whether a record can hold spans of both processes
    spans_per_record: float  # median number of spans of a record
    record_spread: float  # sigma of the logarithm of that number
    record_bytes: int  # length at which a record is closed, whatever it holds
    # JSON: order of the keys of each kind of object, where it is not the Collector's.
    orders: dict[str, tuple[str, ...]]
    separators: tuple[str, str]  # JSON: what stands between items and behind a key
    quotes_integers: bool  # JSON: whether `intValue` is a string
    quotes_times: bool  # JSON: whether times are strings
    names_enums: bool  # JSON: whether `kind` and status codes are names
    whole_doubles: bool  # JSON: whether a whole double has a fraction (`1.0`)
    upper_ids: bool  # JSON: whether ids are in upper case
    is_ascii: bool  # JSON: whether other letters are escaped
    writes_empty: bool  # JSON: whether empty lists, strings and zeros are written
    has_event_zeros: bool  # JSON: whether events say that they dropped no attribute
    run: dict[str, Any] = field(repr=False)  # options of the generator that make the run
    _ranks: dict[tuple[str, str], float] = field(default_factory=dict, repr=False, compare=False)

    def key(self, key: str) -> str:
        """Return how an attribute of a journey event is spelled."""
        return SPELLINGS[self.spelling].get(key, key)

    def event_name(self, name: str) -> str:
        """Return what an event is called."""
        return name if self.has_api_prefix else name.removeprefix("api.")

    def rank(self, kind: str, key: str) -> float:
        """Return the place of an attribute among those of its kind of event."""
        place = self._ranks.get((kind, key))
        if place is None:
            place = random.Random(f"{self.seed}/{kind}/{key}").random()
            self._ranks[kind, key] = place
        return place

    def describe(self, kind: str) -> str:
        """Return the layout in a line."""
        optional = sum(extra.share < 1 for extras in self.extras.values() for extra in extras)
        count = sum(map(len, self.extras.values()))
        most = max(map(len, self.extras.values()), default=0)
        said = [
            self.spelling,
            "api. prefix" if self.has_api_prefix else "no api. prefix",
            f"clock in {self.clock}",
            "emitter's order" if self.keeps_order else "shuffled",
            f"{count} extra attributes on {len(self.extras)} kinds (most {most}, {optional} optional)",
            f"snapshots on {self.run['rich_sampling']:.0%} of steps",
            f"{self.run['step_sampling']:.0%} of steps",
            f"{self.spans_per_record:.0f} spans a record (cut at {self.record_bytes / 1e6:.1f} MB)",
            *(["both processes in a record"] if self.mixes_processes else []),
        ]
        if kind == "json":
            said += [
                f"separators {self.separators!r}",
                "integers as strings" if self.quotes_integers else "integers as numbers",
                "times as strings" if self.quotes_times else "times as numbers",
                "other key order: " + (", ".join(sorted(self.orders)) or "none"),
            ]
            odd = {
                "enums by name": self.names_enums,
                "upper-case ids": self.upper_ids,
                "ASCII only": self.is_ascii,
                "empty fields written": self.writes_empty,
                "droppedAttributesCount on events": self.has_event_zeros,
            }
            said += [name for name, holds in odd.items() if holds]
        return "; ".join(said)

    def with_record_bytes(self, most: int) -> Layout:
        """Return the layout with records no longer than `most` bytes, as far as spans allow."""
        return replace(self, record_bytes=min(self.record_bytes, most))


_OBJECTS = {
    "attribute": ("key", "value"),
    "event": ("timeUnixNano", "name", "attributes", "droppedAttributesCount"),
    "span": (
        "traceId",
        "spanId",
        "traceState",
        "parentSpanId",
        "flags",
        "name",
        "kind",
        "startTimeUnixNano",
        "endTimeUnixNano",
        "attributes",
        "droppedAttributesCount",
        "events",
        "droppedEventsCount",
        "links",
        "status",
    ),
    "scope spans": ("scope", "spans", "schemaUrl"),
    "scope": ("name", "version", "attributes"),
    "resource spans": ("resource", "scopeSpans", "schemaUrl"),
}
"""Keys of the objects of a trace, in the order the Collector writes them."""


def draw_layout(seed: int) -> Layout:
    """Draw a layout.

    Args:
        seed: The same seed draws the same layout.
    """
    rng = random.Random(f"layout {seed}")
    orders = {}
    for name, keys in _OBJECTS.items():
        if rng.random() < 0.5:
            orders[name] = tuple(rng.sample(keys, len(keys)))
    return Layout(
        seed=seed,
        spelling=rng.choice(list(SPELLINGS)),
        has_api_prefix=rng.random() < 0.7,
        clock=rng.choices(("ns", "zero", "seconds"), (6, 1, 1))[0],
        prompt_share=rng.choice((0.0, 1.0, 1.0, rng.random())),
        keeps_order=rng.random() < 0.25,
        extras=_extras(rng),
        resource=_resource(rng),
        mixes_processes=rng.random() < 0.3,
        spans_per_record=math.exp(rng.uniform(0, math.log(400))),
        record_spread=rng.choice((0.0, 0.4, 1.0)),
        record_bytes=round(math.exp(rng.uniform(math.log(500_000), math.log(16_000_000)))),
        orders=orders,
        separators=rng.choices(((",", ":"), (", ", ": "), (",", ": "), (", ", ":")), (4, 2, 1, 1))[0],
        quotes_integers=rng.random() < 0.6,
        quotes_times=rng.random() < 0.75,
        names_enums=rng.random() < 0.15,
        whole_doubles=rng.random() < 0.5,
        upper_ids=rng.random() < 0.1,
        is_ascii=rng.random() < 0.3,
        writes_empty=rng.random() < 0.3,
        has_event_zeros=rng.random() < 0.15,
        run=_run(rng),
    )


def order_of(layout: Layout, name: str) -> tuple[str, ...]:
    """Return the order of the keys of a kind of object."""
    return layout.orders.get(name, _OBJECTS[name])


def _extras(rng: random.Random) -> dict[str, tuple[Extra, ...]]:
    """Draw unknown attributes: of no kind of event, of some, or of all."""
    share = rng.choice((0.0, 0.5, 0.5, 1.0))
    extras = {}
    for kind in (*EVENT_KINDS, *SPAN_KINDS, "resource", "scope"):
        if rng.random() < share and (count := rng.randint(0, 6)):
            always = kind in ("resource", "scope")
            keys = rng.sample(_EXTRA_KEYS, count)
            extras[kind] = tuple(_extra(rng, key, always=always) for key in keys)
    return extras


def _extra(rng: random.Random, key: str, *, always: bool) -> Extra:
    share = 1.0 if always or rng.random() < 0.65 else rng.uniform(0.05, 0.95)
    kind = rng.choices(("text", "integer", "double", "boolean", "bytes", "number"), (4, 4, 3, 2, 1, 2))[0]
    values: tuple[Value, ...]
    if kind == "text":
        values = tuple(rng.sample(_TEXTS, rng.randint(1, 4)))
    elif kind == "integer":
        values = tuple(rng.sample(_INTEGERS, rng.randint(1, 5)))
    elif kind == "double":
        values = tuple(rng.sample(_DOUBLES, rng.randint(1, 5)))
    elif kind == "boolean":
        values = (True, False)
    elif kind == "bytes":
        values = tuple(rng.randbytes(rng.randint(0, 12)) for _ in range(3))
    else:
        values = tuple(rng.randrange(10**9) if rng.random() < 0.5 else rng.gauss(0, 1e3) for _ in range(500))
    return Extra(key, share, values)


def _resource(rng: random.Random) -> tuple[tuple[str, Value], ...]:
    pairs: list[tuple[str, Value]] = [("service.name", rng.choice(("vllm", "llm-server", "vllm-prod")))]
    optional: list[tuple[str, Value]] = [
        ("telemetry.sdk.language", "python"),
        ("telemetry.sdk.name", "opentelemetry"),
        ("telemetry.sdk.version", "1.45.2"),
        ("service.version", "0.15.1"),
        ("process.pid", rng.randint(100, 60_000)),
        ("k8s.pod.name", f"vllm-{rng.randrange(16**8):08x}"),
        ("host.arch", "amd64"),
    ]
    pairs += rng.sample(optional, rng.randint(0, len(optional)))
    instance = rng.choice(("none", "server", "process"))
    if instance != "none":
        suffix = "-{process}" if instance == "process" else ""
        pairs.append(("service.instance.id", f"{rng.randrange(16**12):012x}{suffix}"))
    rng.shuffle(pairs)
    return tuple(pairs)


def _run(rng: random.Random) -> dict[str, Any]:
    """Draw the run itself: load, lengths, and what of it is sampled."""
    rich = rng.choices((0.0, rng.uniform(0.02, 0.2), 1.0), (4, 4, 2))[0]
    prompt, output = math.exp(rng.uniform(3.5, 7.3)), math.exp(rng.uniform(2.3, 5.8))
    return {
        "rich_sampling": rich,
        "step_sampling": rng.choices((1.0, rng.uniform(0.1, 0.6)), (3, 1))[0],
        "prompt_median": prompt,
        "output_median": output,
        "sigma": rng.uniform(0.2, 0.9),
        # Of long requests fewer arrive, so that the queue does not grow without end.
        "rate_per_s": min(14.0, 40_000.0 / (prompt + 15 * output)) * rng.uniform(0.3, 1.1),
        "chat_fraction": rng.choice((0.0, 0.2, 0.5, 1.0)),
        "steps_per_span": rng.choice((20, 100, 100, 200)),
        "span_event_limit": rng.choice((None, None, None, 128)),
        "numbered_requests": rng.random() < 0.3,
    }
