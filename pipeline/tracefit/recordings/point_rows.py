"""Points of a benchmark: what their names mean, the rows of `points` that records give, and the spans that stand for
them.

A point is a load (a concurrency or a rate, and lengths) with latencies over all its requests. It names no request and
no step, so no model is fitted on it; a plan is compared with it. Tables of points (`points`) and summaries of load
generators (`clients`) give the same.

A name says what a column is: a latency, a statistic (the mean if none) and a unit, in any order, as in `mean_ttft_ms`,
`P99 TTFT (ms)` or `itl_s_p50`. A latency whose name has no unit is refused: nothing else shows it. Names that are not
read are kept.
"""

from __future__ import annotations

import itertools
import math
import re
from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec
import polars as pl

from tracefit.errors import printable
from tracefit.inputs.rejects import TooManyRejectsError
from tracefit.recordings.blocks import UNREADABLE_RECORD, fault_of
from tracefit.server.settings import SETTING_NAMES, canonical_name
from tracefit.tables.dialects import NOT_SENT_S, POINT_KEY, POINT_SCOPE
from tracefit.tables.points import POINT_LATENCIES, STATED, STATISTICS, text_of_point
from tracefit.tables.schema import POINTS
from tracefit.tables.units import DECODE_STEP_US, unit_fault

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from tracefit.inputs.blocks import Block
    from tracefit.inputs.rejects import Rejects

Point: TypeAlias = dict[str, Any]
"""Columns of `points` to their values; `settings` is an object, `unread` a list."""

PointParts: TypeAlias = "Iterable[tuple[int, bytes, Callable[[bytes], Iterable[Point]]]]"
"""Offset and bytes of each part of a block that has points, and the function that reads them or raises one of
`UNREADABLE_RECORD`."""

_MOST_UNREAD, _MOST_LABEL_CHARS = 64, 80
"""Columns of a point that are named though not read, and characters of a name."""

# -- names --------------------------------------------------------------------------------------------------

_TIME_FACTORS = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1e6),
    **dict.fromkeys(("ms", "msec", "millis", "millisecond", "milliseconds"), 1e3),
    **dict.fromkeys(("us", "usec", "micros", "microsecond", "microseconds"), 1.0),
    **dict.fromkeys(("ns", "nsec", "nanos", "nanosecond", "nanoseconds"), 1e-3),
}
"""Unit to us."""

_LATENCY_SPELLINGS = {
    **dict.fromkeys(("ttft", "time_to_first_token", "first_token_latency"), "ttft"),
    **dict.fromkeys(("tpot", "time_per_output_token"), "tpot"),
    **dict.fromkeys(("itl", "inter_token_latency", "intertoken_latency", "inter_token_latencies"), "itl"),
    **dict.fromkeys(
        (
            *("e2e", "e2el", "e2e_latency", "e2el_latency", "end_to_end_latency", "end_to_end"),
            *("request_latency", "e2e_request_latency", "latency"),
        ),
        "e2e",
    ),
}
_STATISTIC_NAMES = {
    **dict.fromkeys(("mean", "avg", "average"), "mean"),
    **dict.fromkeys(("p50", "median", "50th"), "p50"),
    **{f"p{q}": f"p{q}" for q in (90, 95, 99)},
    **{f"{q}th": f"p{q}" for q in (90, 95, 99)},
}
_OTHER_STATISTIC = re.compile(r"(?:std|stddev|stdev|std_dev|min|max|sum|count|variance|p\d{1,3}|p99_9)")
"""Statistics that programs write and `points` does not keep: they are known, and not counted as unread."""

_COUNT_NAMES = {
    **dict.fromkeys(
        (
            *("concurrency", "max_concurrency", "num_concurrent_requests", "concurrent_requests"),
            *(
                "num_concurrent",
                "concurrent_users",
                "num_users",
                "users",
                "clients",
                "num_clients",
                "streams",
            ),
        ),
        "concurrency",
    ),
    **dict.fromkeys(
        (
            *("rate", "request_rate", "requested_rate", "rate_per_s", "request_rate_per_s", "arrival_rate"),
            *("arrival_rate_per_s", "qps", "rps", "target_qps", "target_rps"),
        ),
        "rate_per_s",
    ),
    **dict.fromkeys(
        (
            *("isl", "input_len", "input_length", "input_tokens", "input_sequence_length", "prompt_len"),
            *("prompt_length", "prompt_tokens", "input_lens", "mean_input_len", "mean_input_tokens"),
            *("mean_prompt_tokens", "avg_input_tokens", "num_input_tokens", "number_input_tokens"),
        ),
        "prompt_tokens",
    ),
    **dict.fromkeys(
        (
            *("osl", "output_len", "output_length", "output_tokens", "output_sequence_length"),
            *("mean_output_len", "mean_output_tokens", "avg_output_tokens", "num_output_tokens"),
            *("number_output_tokens", "completion_tokens", "generated_tokens", "max_tokens"),
        ),
        "output_tokens",
    ),
    **dict.fromkeys(
        (
            *(
                "completed",
                "completed_requests",
                "num_completed_requests",
                "successful_requests",
                "num_requests",
            ),
            *("requests", "request_count", "num_prompts", "n_requests", "total_requests"),
        ),
        "requests",
    ),
    **dict.fromkeys(("failed", "failed_requests", "errors", "num_errors", "number_errors"), "failed_requests"),
    **dict.fromkeys(
        (
            *("request_throughput", "requests_per_s", "requests_per_sec", "requests_per_second", "req_per_s"),
            *("achieved_rate", "throughput_req_s", "request_throughput_req_s"),
        ),
        "requests_per_s",
    ),
    **dict.fromkeys(
        (
            *(
                "output_throughput",
                "output_tokens_per_s",
                "output_tokens_per_sec",
                "output_tokens_per_second",
            ),
            *("output_token_throughput", "output_throughput_tok_s", "output_tps"),
        ),
        "output_tokens_per_s",
    ),
}
"""Name to the column of a number without a unit of time."""

_LABEL_KEYS = {
    **dict.fromkeys(("hardware", "device", "gpu_model"), "gpu"),
    **dict.fromkeys(("tp", "num_gpus_tp", "tp_degree"), "tensor_parallel"),
    **dict.fromkeys(("model", "model_id", "model_name", "hf_id"), "model"),
}
"""Further spellings of the facts of a deployment, beside those of `server.settings`."""

_FACTS = ("model", "gpu", "tensor_parallel")


class _Named(NamedTuple):
    """The meaning of a column's name.

    Attributes:
        column: A column of `points`; empty for a known name that `points` does not keep.
        factor: Unit of its values in that of the column; null if the name states none and needs one.
    """

    column: str
    factor: float | None = 1.0


def _words(name: str) -> str:
    divided = re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "_", name.strip())
    return re.sub(r"[^a-z0-9.]+", "_", divided.lower()).strip("_")


def meaning_of(name: str, *, unit: str = "") -> _Named | None:
    """Return what a column of some name is; null if nothing is known of it.

    Args:
        name: The name.
        unit: The unit of latencies whose name states none.

    Examples:
        >>> meaning_of("P99 TTFT (ms)")
        _Named(column='ttft_p99_us', factor=1000.0)
        >>> meaning_of("request_rate")
        _Named(column='rate_per_s', factor=1.0)
        >>> meaning_of("ttft").factor is None
        True
    """
    words = _words(name)
    if words in _COUNT_NAMES:
        return _Named(_COUNT_NAMES[words])
    if (fact := _LABEL_KEYS.get(words, canonical_name(words))) in _FACTS:
        return _Named(fact)
    if words in ("duration", "duration_s", "benchmark_time_seconds", "duration_seconds"):
        return _Named("duration_us", 1e6 if words != "duration" or unit else None)
    parts = words.split("_")
    statistic, factor, quantity = "mean", _TIME_FACTORS.get(unit), list[str]()
    is_kept = True
    for part in parts:
        if part in _TIME_FACTORS:
            factor = _TIME_FACTORS[part]
        elif part in _STATISTIC_NAMES:
            statistic = _STATISTIC_NAMES[part]
        elif _OTHER_STATISTIC.fullmatch(part):
            is_kept = False
        elif part:
            quantity.append(part)
    latency = _LATENCY_SPELLINGS.get("_".join(quantity))
    if latency is None:
        column = _COUNT_NAMES.get("_".join(quantity))
        return None if column is None else _Named(column if is_kept and statistic == "mean" else "")
    return _Named(f"{latency}_{statistic}_us" if is_kept else "", factor)


def no_unit(name: str) -> str:
    """Return the fault of a column of latencies whose name has no unit."""
    plain = _words(name)
    return f"column {printable(name)[:_MOST_LABEL_CHARS]} has no unit: name it {plain}_ms or {plain}_s"


# -- one point ----------------------------------------------------------------------------------------------

_TEXT_COLUMNS = frozenset(column.name for column in POINTS.columns if column.kind == "string")
_WHOLE = frozenset(column.name for column in POINTS.columns if column.kind == "int64")
_POINT_BOUNDS = {c.name: (c.least or 0.0, c.most or math.inf) for c in POINTS.columns if c.name in STATED}
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_NO_NUMBER = frozenset(("", "-", "none", "null", "nan", "n/a", "na", "trace"))


def _value_of(name: str, column: str, value: Any, factor: float) -> Any:
    """Return the value of a column; null for a missing one, and for a rate without end.

    Raises:
        msgspec.ValidationError: It is not a number, or out of range.
    """
    if value is None or (isinstance(value, str) and value.strip().lower() in _NO_NUMBER):
        return None
    if column in _TEXT_COLUMNS:
        return printable(str(value))[: _MOST_LABEL_CHARS * 4]
    if isinstance(value, bool):
        raise msgspec.ValidationError(f"{printable(name)[:_MOST_LABEL_CHARS]} is not a number")
    if isinstance(value, str) and _THOUSANDS.fullmatch(value.strip()):
        value = value.replace(",", "")
    try:
        number = float(value) * factor
    except (ValueError, TypeError, OverflowError):
        way = ": write a point before decimals" if isinstance(value, str) and "," in value else ""
        raise msgspec.ValidationError(f"{printable(name)[:_MOST_LABEL_CHARS]} is not a number{way}") from None
    if column == "rate_per_s" and (number == math.inf or number <= 0):
        return None
    if math.isnan(number):
        return None
    least, most = _POINT_BOUNDS[column]
    if not least <= number <= most:
        raise msgspec.ValidationError(f"{printable(name)[:_MOST_LABEL_CHARS]} is out of range")
    return round(number) if column in _WHOLE else number


def summed(name: str, column: str, value: Any, factor: float = 1.0) -> Any:
    """Return a number of a summary for a column of `points`; null for a missing one, and for 0, which says that nothing
    was measured.

    Raises:
        msgspec.ValidationError: It is not a number, or out of range.
    """
    return _value_of(name, column, value, factor) or None


def unread_of(names: Iterable[str]) -> list[str]:
    """Return names of a summary as they are kept in `unread`."""
    return [printable(str(name))[:_MOST_LABEL_CHARS] for name in sorted(set(names))][:_MOST_UNREAD]


def point_of(values: Mapping[str, Any], program: str, *, unit: str = "", known: Collection[str] = ()) -> Point:
    """Return a point from flat names and values.

    Args:
        values: Names to values.
        program: The program that wrote them.
        unit: The unit of latencies whose names state none.
        known: Names that are known and not kept.

    Raises:
        msgspec.ValidationError: A name of a latency has no unit, two columns contradict each other, or a value is not a
            number.
    """
    point: Point = {"program": program, "settings": {}, "unread": []}
    names: dict[str, str] = {}
    for name, value in values.items():
        shown = printable(name)[:_MOST_LABEL_CHARS]
        named = meaning_of(name, unit=unit)
        if named is not None and named.column:
            if named.factor is None:
                raise msgspec.ValidationError(no_unit(name))
            found = _value_of(name, named.column, value, named.factor)
            before = point.get(named.column)
            # A load generator states what was asked for beside what came; a table that has two of one kind is not
            # clear.
            if not unit and None not in (before, found) and before != found:
                raise msgspec.ValidationError(f"columns {names[named.column]} and {shown} are both {named.column}")
            if before is None and found is not None:
                point[named.column], names[named.column] = found, shown
        elif named is None and (setting := canonical_name(_words(name))) in SETTING_NAMES:
            if isinstance(value, str | int | float):
                point["settings"][setting] = value
        elif named is None and name not in known and len(point["unread"]) < _MOST_UNREAD:
            point["unread"].append(shown)
    return checked(point)


def checked(point: Point) -> Point:
    """Return a point whose latencies agree on their unit.

    Raises:
        msgspec.ValidationError: One contradicts another by a power of 1,000, or there is no latency.
    """
    if not any(
        point.get(f"{latency}_{statistic}_us") is not None for latency in POINT_LATENCIES for statistic in STATISTICS
    ):
        raise msgspec.ValidationError("no latency")
    for statistic in STATISTICS:
        ttft, e2e = (point.get(f"{latency}_{statistic}_us") for latency in ("ttft", "e2e"))
        gap = point.get(f"tpot_{statistic}_us") or point.get(f"itl_{statistic}_us")
        output = point.get("output_tokens")
        if not (e2e and ttft is not None and gap and output and output > 1):
            continue
        made = ttft + gap * (output - 1)
        if fault := unit_fault(f"e2e_{statistic}", "ttft and the times of the tokens", e2e / max(made, 1e-9), "ms"):
            raise msgspec.ValidationError(fault)
    if fault := _order_fault(point) or _gap_fault(point) or _crowd_fault(point):
        raise msgspec.ValidationError(fault)
    served, rate = point.get("requests"), point.get("requests_per_s")
    if served and rate and (lasted := point.get("duration_us")):
        ratio = lasted / 1e6 / (served / rate)
        if fault := unit_fault("the duration", "requests over their throughput", ratio, "s"):
            raise msgspec.ValidationError(fault)
    return point


def _order_fault(point: Point) -> str | None:
    """Return the fault of percentiles of one latency that are not in order."""
    for latency in POINT_LATENCIES:
        known = [
            (f"{latency}_{statistic}", value)
            for statistic in STATISTICS
            if statistic != "mean" and (value := point.get(f"{latency}_{statistic}_us"))
        ]
        for (name, value), (higher, other) in itertools.pairwise(known):
            if value > other * (1 + 1e-6):
                return unit_fault(name, higher, value / other, "ms") or f"{name} is above {higher}"
    return None


def _gap_fault(point: Point) -> str | None:
    """Return the fault of a mean time between tokens that no step takes."""
    least, most = DECODE_STEP_US
    for name in ("tpot_mean", "itl_mean"):
        gap_us = point.get(f"{name}_us")
        if gap_us and not least <= gap_us <= most:
            side = "longer" if gap_us > most else "shorter"
            return f"{name} is {gap_us / 1e3:,.10g} ms, {side} than a step of any server: is its unit another one?"
    return None


def _crowd_fault(point: Point) -> str | None:
    """Return the fault of requests that take longer, or less, than those under way allow (Little's law)."""
    slots, rate, e2e_us = (point.get(name) for name in ("concurrency", "requests_per_s", "e2e_mean_us"))
    if not (slots and rate and e2e_us):
        return None
    ratio = rate * e2e_us / 1e6 / slots
    # A client with a rate may have fewer under way than it is allowed.
    if point.get("rate_per_s") and ratio < 1:
        return None
    return unit_fault("e2e_mean", "the concurrency over the throughput", ratio, "ms")


# -- spans of points ----------------------------------------------------------------------------------------


def read_points(
    block: Block, payload: bytes, parts: Callable[[bytes], PointParts], what: str, rejects: Rejects
) -> list[tuple[int, Point]]:
    """Return offset and content of the points of a block.

    A part that cannot be read is rejected with the reason `what`, unless something at its offset is rejected already.
    """
    points: list[tuple[int, Point]] = []
    known = rejects.offsets
    with suppress(TooManyRejectsError):
        try:
            for offset, part, read in parts(payload):
                try:
                    points += [(block.offset + offset, point) for point in read(part)]
                except UNREADABLE_RECORD as error:
                    if block.offset + offset not in known:
                        rejects.add(offset, part, f"{what} ({fault_of(error)})")
        except UNREADABLE_RECORD as error:
            if block.offset not in known:
                rejects.add(0, payload, f"{what} ({fault_of(error)})")
    return points


def spans_of_points(points: list[tuple[int, Point]]) -> pl.DataFrame:
    """Return points as spans: equal ones have equal ids, so that one that is given twice counts once."""
    start = int(NOT_SENT_S * 1e9)
    seen: dict[str, int] = {}
    rows = []
    for offset, point in points:
        # A program that writes its sums in two forms names the way to its requests in words of their own.
        text = text_of_point(point | {"requests_written_by": None})
        number = seen.setdefault(text, len(seen))
        digest = blake2b(text.encode(), digest_size=16).hexdigest()
        attributes = [{"key": POINT_KEY, "value": text_of_point(point | {"point": number})}]
        rows.append((offset, digest, digest[:16], POINT_SCOPE, POINT_KEY, start, start, "OK", attributes))
    kinds: dict[str, Any] = {
        "source_offset": pl.Int64,
        **dict.fromkeys(("trace_id", "span_id", "scope", "name"), pl.String),
        "start_unix_ns": pl.Int64,
        "end_unix_ns": pl.Int64,
        "status_code": pl.String,
        "attributes": pl.List(pl.Struct({"key": pl.String, "value": pl.String})),
    }
    return pl.DataFrame(rows, kinds, orient="row")
