"""ForwardPassMetrics: one record for each engine step, by workers of Dynamo (vLLM, TensorRT-LLM) and by SGLang.

Files are Dynamo's JSON lines (`{"received_at_ns": …, "metrics": {…}}`), those of its `--fpm-trace` (`{"timestamp": …,
"event": {"schema": "dynamo.fpm.trace.v1", "fpm": {…}}}`), AIConfigurator's `fpm_metrics_detail.csv`, or msgpack
messages one after another, as maps or arrays. Fields are those of version 1 in `dynamo/common/forward_pass_metrics.py`
(ai-dynamo 1.6.1), which `sglang/srt/observability/forward_pass_metrics.py` (sglang 0.5.23) repeats.

`wall_time` is in Dynamo the time from one step's output to the next one's, after idling from `schedule()` to the
output; in SGLang it is GPU time, as where the native recorder that vLLM was offered says so in `timing_scope`. A
heartbeat has none: the engine is idle.
"""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import datetime
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import polars as pl
from msgspec.structs import replace

from tracefit.inputs.formats import Recording, register
from tracefit.inputs.framing import BOM, LENGTH_BYTES, message_bytes, records
from tracefit.inputs.rejects import TooManyRejectsError
from tracefit.recordings.blocks import MOST_STEP_S, UNREADABLE_RECORD, RecordedBlock, fault_of
from tracefit.recordings.requests import from_json
from tracefit.tables.rows import RECORDED_STEPS, UNKNOWN_SERVER
from tracefit.tables.sources import CycleSource, StepFields, declare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tracefit.inputs.blocks import Block
    from tracefit.inputs.framing import Shape
    from tracefit.inputs.rejects import Encoding, Rejects

VERSION = 1
_NO_RECORD = "not a record of ForwardPassMetrics"
_CUT_RECORD = "record cut: another begins inside"
_NO_TOKENS = "ForwardPassMetrics count no decode tokens: one for each decode request is assumed"

# -- its steps ----------------------------------------------------------------------------------------------

_FPM_TITLE = "ForwardPassMetrics"

STEPS_OF_SGLANG = declare(
    CycleSource(
        name="fpm_gpu",
        recorder=_FPM_TITLE,
        interval="wall_time of ForwardPassMetrics: GPU time of the step, without what the engine does between steps",
        error="the record has fractions of a microsecond; it leaves out the engine's work between steps",
        target_source="forward_pass_metrics",
        notes=(_NO_TOKENS,),
        is_by_rank=True,
        caution="with overlap scheduling, SGLang's ForwardPassMetrics merge forwards of the GPU, and some batches "
        "are missing: record with --disable-overlap-schedule",
    )
)

FPM_STEPS = declare(
    CycleSource(
        name="fpm",
        recorder=_FPM_TITLE,
        interval=(
            "wall_time of ForwardPassMetrics: output of a step to output of the next, after idling from "
            "schedule() to output"
        ),
        error="the record has fractions of a microsecond",
        target_source="forward_pass_metrics",
        notes=(_NO_TOKENS,),
        is_by_rank=True,
        from_sglang=STEPS_OF_SGLANG.name,
        has_sweep=True,
        fields=StepFields(
            time="wall_time",
            stamp="received_at_ns",
            units="wall_time is read in s, latency_ms in ms",
        ),
    )
)

STEPS_OF_TRACE = declare(
    replace(
        FPM_STEPS,
        name="fpm_trace",
        if_lost="Dynamo's --fpm-trace samples steps unless the worker has DYN_FPM_MODE=full",
        fields=None,
    )
)

# -- how it is recognised ----------------------------------------------------------------------------------

_LINE_START = re.compile(rb'\{\s*"(?:received_at_ns|metrics|timestamp"\s*:\s*[0-9"][^{}]{0,99}"event)"\s*:')
_GPU_SCOPE = re.compile("cuda|gpu|device|hip|forward|kernel")
"""Words of a `timing_scope` that is time of the GPU, not the cycle."""
_TRACE_MARK = b'"dynamo.fpm.trace.'
_LATEST_NS = 4.3e18
# The patterns begin with a byte: the regex engine skips to one, but tries to look ahead everywhere.
_MAP_START = re.compile(rb"[\x85-\x8f](?=\xa7version)")
# Or an array of a version and a text.
_RECORD_MAP_START = re.compile(
    rb"[\x85-\x9f](?:(?<=[\x85-\x8f])(?=\xa7version)|(?<=[\x95-\x9f])(?=[\x01-\x0f](?:[\xa0-\xbf]|\xd9[\x20-\xff])))",
    re.DOTALL,
)
_MOST_PIECES = 8
_MOST_TRIED = 1000
_MOST_RECORD_BYTES = 1 << 20
"""Longest message; a usual one has 500 bytes."""
_MOST_HEADER_BYTES = 4096


def _find(head: bytes) -> tuple[Shape, Encoding] | None:
    if b'"scheduled_requests"' in head and b'"counter_id"' in head and _LINE_START.search(head):
        return "lines", "json"
    if _header_at(head, head.find(b"counter_id")):
        return "lines", "csv"
    if head.isascii():  # a message begins with a byte that is not
        return None
    for _, match in zip(range(_MOST_TRIED), _RECORD_MAP_START.finditer(head), strict=False):
        message = head[match.start() : match.start() + _MOST_RECORD_BYTES]
        if _version_of(message[: message_bytes(message)], "msgpack") is not None:
            return "messages", "msgpack"
    return None


def _header_at(content: bytes, at: int) -> bytes:
    """Return the line around an offset if it names the columns."""
    begin = content.rfind(b"\n", max(at - _MOST_HEADER_BYTES, 0), max(at, 0)) + 1
    line = content[begin : begin + _MOST_HEADER_BYTES].partition(b"\n")[0]
    return line if at >= 0 and _is_header(line) else b""


def _is_header(line: bytes) -> bool:
    return b"counter_id" in line and set(_fields_of(line)) >= _CSV.keys() - _CSV_OPTIONAL


def _fields_of(line: bytes) -> list[str]:
    text = line.removeprefix(BOM).decode("utf-8", errors="replace")
    return [name.strip('" \r') for name in text.split(",")]


# -- its records -------------------------------------------------------------------------------------------

# Bounds within which sums fit 64 bits; the rules of the tables are narrower.
_MOST_NUMBER = 2**40
_MOST_WORKER_CHARS = 200
_Count = Annotated[int, msgspec.Meta(ge=0, le=_MOST_NUMBER)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=MOST_STEP_S)]
_Name = Annotated[str, msgspec.Meta(max_length=_MOST_WORKER_CHARS)]
_UnixNs = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


def _metrics_type(*, array_like: bool) -> Any:
    """Return the type of a record; arrays have the fields in this order."""
    tokens: list[Any] = [("num_prefill_requests", _Count), ("sum_prefill_tokens", _Count)]
    # A variance is not read; one that Python could not compute is NaN.
    tokens += [("var_prefill_length", Any)]
    decodes: list[Any] = [("num_decode_requests", _Count), ("sum_decode_kv_tokens", _Count)]
    decodes += [("var_decode_kv_tokens", Any, 0.0)]
    scheduled, queued = (
        msgspec.defstruct(name, fields, array_like=array_like, gc=False)
        for name, fields in (
            ("Scheduled", [*tokens, ("sum_prefill_kv_tokens", _Count), *decodes]),
            ("Queued", [*tokens, *decodes]),
        )
    )
    fields: list[Any] = [("version", int), ("worker_id", _Name), ("dp_rank", _Count), ("counter_id", _Count)]
    fields += [("wall_time", _Seconds), ("scheduled_requests", scheduled)]
    fields += [("queued_requests", queued | None, None), ("timing_scope", str | None, None)]
    return msgspec.defstruct("Metrics", fields, array_like=array_like)


_MAP, _ARRAY = (_metrics_type(array_like=flag) for flag in (False, True))
_FpmLine = msgspec.defstruct("Line", [("metrics", _MAP), ("received_at_ns", _UnixNs | None, None)])
_DECODE_LINE = msgspec.json.Decoder(_FpmLine).decode
_TRACED = msgspec.defstruct("Traced", [("fpm", _MAP)])
_TRACE_LINE = msgspec.defstruct("TraceLine", [("event", _TRACED), ("timestamp", float | str | None, None)])
_DECODE_TRACE_LINE = msgspec.json.Decoder(_TRACE_LINE).decode
_DECODE_MAP, _DECODE_ARRAY = (msgspec.msgpack.Decoder(kind).decode for kind in (_MAP, _ARRAY))


class _Version(msgspec.Struct):
    version: int


class _VersionLine(msgspec.Struct):
    metrics: _Version


class _VersionArray(msgspec.Struct, array_like=True):
    version: int
    worker_id: str
    dp_rank: int


def _version_of(record: bytes, encoding: Encoding) -> int | None:
    """Return the version that a record states; null if it states none."""
    try:
        if encoding == "json":
            line: Any = msgspec.json.decode(record, type=_VersionLine)
            return int(line.metrics.version)
        kind: Any = _Version if record[:1] < b"\x90" else _VersionArray
        version: int = msgspec.msgpack.decode(record, type=kind).version
    except UNREADABLE_RECORD:
        return None
    return version


def _fault(record: bytes, encoding: Encoding, decode_record: Callable[[bytes], Any]) -> str:
    """Return why a record is not read: types and positions, never values."""
    version = _version_of(record, encoding)
    if version is not None and version != VERSION:
        return f"ForwardPassMetrics of another version: {VERSION} is read"
    try:
        decode_record(record)
    except UNREADABLE_RECORD as error:
        return f"{_NO_RECORD} ({fault_of(error)})"
    return f"{_NO_RECORD} (malformed)"


_FPM_FIELDS = {
    "worker_id": "worker_id",
    "dp_rank": "dp_rank",
    "step_id": "counter_id",
    "wall_time_s": "wall_time",
    "num_prefill_reqs": "scheduled_requests.num_prefill_requests",
    "prefill_tokens": "scheduled_requests.sum_prefill_tokens",
    "prefill_context_tokens": "scheduled_requests.sum_prefill_kv_tokens",
    "num_decode_reqs": "scheduled_requests.num_decode_requests",
    "context_tokens": "scheduled_requests.sum_decode_kv_tokens",
}
_QUEUE_FIELDS = {
    "queued_prefill_reqs": "num_prefill_requests",
    "queued_prefill_tokens": "sum_prefill_tokens",
    "queued_decode_reqs": "num_decode_requests",
    "queued_decode_tokens": "sum_decode_kv_tokens",
}
"""Column to the field of a record it is read from."""
_FPM_TYPES: dict[str, Any] = {
    **dict.fromkeys(("source_offset", "unix_ns", *_FPM_FIELDS, *_QUEUE_FIELDS, "cycle_source"), pl.Int64),
    "cycle_source": pl.String,
    "worker_id": pl.String,
    "wall_time_s": pl.Float64,
}
_CSV = {
    **{field.rpartition(".")[2]: column for column, field in _FPM_FIELDS.items() if column != "wall_time_s"},
    "latency_ms": "wall_time_s",
    "queued_prefill_requests": "queued_prefill_reqs",
    "queued_prefill_tokens": "queued_prefill_tokens",
    "queued_decode_requests": "queued_decode_reqs",
    "queued_decode_kv_tokens": "queued_decode_tokens",
}
"""Column of AIConfigurator's CSV to our name of it."""
_CSV_OPTIONAL = {name for name in _CSV if name.startswith("queued")} | {"worker_id", "dp_rank"}

_fields_of_record, _fields_of_queue = attrgetter(*_FPM_FIELDS.values()), attrgetter(*_QUEUE_FIELDS.values())


_Record = tuple[int, int | None, Any]
"""Offset, time of receipt in unix ns, and metrics of a record."""


def decode(block: Block, payload: bytes, rejects: Rejects) -> RecordedBlock:
    """Decode a block of whole records; only bad ones are rejected.

    Args:
        block: The position of the bytes, and how they are encoded.
        payload: The bytes.
        rejects: Receives the bad ones; once they are too many, the rest is not decoded.
    """
    frames: list[pl.DataFrame] = [pl.DataFrame(schema=_FPM_TYPES)]
    rows: list[tuple[Any, ...]] = []
    of_block = STEPS_OF_TRACE if _TRACE_MARK in payload else FPM_STEPS
    with suppress(TooManyRejectsError):
        if block.encoding == "csv":
            for columns, lines in _tables_in(payload, block.header):
                frames.append(_of_lines(columns, lines, rejects))
        else:
            read = _of_json if block.encoding == "json" else _of_msgpack
            for offset, unix_ns, record in read(payload, rejects):
                queued = record.queued_requests
                queue = _fields_of_queue(queued) if queued else (None,) * len(_QUEUE_FIELDS)
                source = STEPS_OF_SGLANG if _GPU_SCOPE.search(record.timing_scope or "") else of_block
                rows.append((offset, unix_ns, *_fields_of_record(record), *queue, source.name))
    frames.append(pl.DataFrame(rows, schema=_FPM_TYPES, orient="row"))
    return RecordedBlock(_as_steps(pl.concat(frames), block.offset))


def _of_json(payload: bytes, rejects: Rejects) -> Iterator[_Record]:
    for item in records(payload, "lines"):
        line = item.payload
        decoded = _line(line)
        # Where lines are glued, each begins like a record.
        begins = [] if decoded else [match.start() for match in _LINE_START.finditer(line, 1)]
        for begin, end in pairwise([0, *begins, len(line)]):
            part = line[begin:end]
            decoded = _line(part) if begins else decoded
            if decoded:
                yield item.offset + begin, decoded.received_at_ns, decoded.metrics
            else:
                decode_line = _DECODE_TRACE_LINE if _TRACE_MARK in part else _DECODE_LINE
                reason = _fault(part, "json", decode_line) if end == len(line) else _CUT_RECORD
                rejects.add(item.offset + begin, part, reason)


def _line(text: bytes) -> Any:
    decoded: Any = None
    if _TRACE_MARK in text:
        with suppress(*UNREADABLE_RECORD):
            line: Any = from_json(text, _TRACE_LINE)
            decoded = _FpmLine(line.event.fpm, _unix_ns(line.timestamp))
        return decoded if decoded and decoded.metrics.version == VERSION else None
    try:
        decoded = _DECODE_LINE(text)
    except UNREADABLE_RECORD:
        with suppress(*UNREADABLE_RECORD):
            decoded = from_json(text, _FpmLine)
    return decoded if decoded and decoded.metrics.version == VERSION else None


def _unix_ns(time: float | str | None) -> int | None:
    """Return a time in unix ns, from its size in any unit; null if it does not count from 1970."""
    if isinstance(time, str):
        with suppress(ValueError):
            return int(datetime.fromisoformat(time).timestamp() * 1e9)
        return None
    units = (10**9, 10**6, 10**3, 1)
    return next((int(time * unit) for unit in units if time and 1e18 <= time * unit < _LATEST_NS), None)


def as_line(message: bytes, received_at_ns: int) -> tuple[bytes, float] | Literal["malformed", "version"]:
    """Return a published message as the line that Dynamo's recorder writes of it, and its `wall_time`; or why it is not
    read.

    Args:
        message: One msgpack message, a map or an array.
        received_at_ns: When it was received, in unix ns.
    """
    size, record = _message(message)
    if record is None or size != len(message):
        return "malformed" if _version_of(message, "msgpack") in {None, VERSION} else "version"
    metrics = msgspec.json.encode(msgspec.convert(record, _MAP, from_attributes=True))
    line = b'{"received_at_ns":%d,"metrics":%b}\n' % (received_at_ns, metrics)
    # JSON has no numbers that are not finite: a line is written only if it can be read again.
    return (line, record.wall_time) if _line(line) else "malformed"


def _of_msgpack(payload: bytes, rejects: Rejects) -> Iterator[_Record]:
    """Yield the messages that can be read. A length of four bytes may be before each: it ends the bytes of the one
    before.
    """
    # Without names a beginning is three bytes, which numbers have by chance: then several pieces are one message.
    starts = _MAP_START if _MAP_START.search(payload) else _RECORD_MAP_START
    begins = [*(match.start() for match in starts.finditer(payload)), len(payload)]
    if begins[0] not in {0, LENGTH_BYTES}:
        rejects.add(0, payload[: begins[0]], _NO_RECORD)
    number = 0
    while number < len(begins) - 1:
        begin, following = begins[number], number + 1
        for after in range(following, min(following + _MOST_PIECES, len(begins))):
            size, record = _message(payload[begin : begins[after]])
            if size:
                break
        rest = payload[begin + size : begins[after]]
        is_whole = size and len(rest) in {0, LENGTH_BYTES}
        if record is None and (not size or after > following):
            rejects.add(begin, payload[begin : begins[following]], "record cut")
            number = following
            continue
        if record is None:
            message = payload[begin : begin + size]
            rejects.add(begin, message, _fault(message, "msgpack", _decoder_of(message)))
        else:
            yield begin, None, record
        if not is_whole:
            rejects.add(begin + size, rest, _NO_RECORD)
        number = after


def _message(content: bytes) -> tuple[int, Any]:
    """Return the length of the message that some bytes begin with, 0 if it does not end, and its record if it can be
    read.
    """
    decode_record = _decoder_of(content)
    for measure in (len, message_bytes):
        size = measure(content)
        with suppress(*UNREADABLE_RECORD):
            decoded = decode_record(content[:size])
            return size, decoded if decoded.version == VERSION else None
    return size, None


def _decoder_of(message: bytes) -> Callable[[bytes], Any]:
    return _DECODE_MAP if message[:1] < b"\x90" else _DECODE_ARRAY


# -- AIConfigurator's table -------------------------------------------------------------------------------


def _tables_in(payload: bytes, header: bytes) -> Iterator[tuple[list[str], list[tuple[int, bytes]]]]:
    """Yield the names of the columns and the lines below them; a file may be several, one behind another."""
    lines: list[tuple[int, bytes]] = []
    for item in records(payload, "lines"):
        if _is_header(item.payload) and not (header and item.payload.endswith(header)):
            yield _fields_of(header), lines
            header, lines = item.payload, []
        elif item.payload != header:
            lines.append((item.offset, item.payload))
    yield _fields_of(header), lines


def _of_lines(columns: list[str], lines: list[tuple[int, bytes]], rejects: Rejects) -> pl.DataFrame:
    """Read lines of a table by column."""
    text = pl.Series("line", [line.decode("utf-8", errors="replace") for _, line in lines], pl.String)
    # Split once, not in the expression of each column.
    table, fields = text.str.split(",").alias("fields").to_frame(), pl.col("fields")
    faults = [pl.when(fields.list.len() != len(columns)).then(pl.lit(f"not {len(columns)} fields"))]
    values = {}
    for name, column in _CSV.items():
        position = columns.index(name) if name in columns else len(columns)
        field = fields.list.get(position, null_on_oob=True).str.strip_chars('" \r')
        values[column] = value = field.cast(_FPM_TYPES[column], strict=False)
        size = value.str.len_chars() if column == "worker_id" else value
        most = {"worker_id": _MOST_WORKER_CHARS, "wall_time_s": 1e3 * MOST_STEP_S}.get(column, _MOST_NUMBER)
        is_good = size.is_between(0, most).fill_null(value=False)
        is_empty = field.fill_null("") == "" if name in _CSV_OPTIONAL else pl.lit(value=False)
        faults.append(pl.when(~is_good & ~is_empty).then(pl.lit(f"{name} out of range, or no number")))
    numbers = table.select(
        **values, fault=pl.coalesce(faults), row=pl.int_range(pl.len()), unix_ns=pl.lit(None, pl.Int64)
    )
    for row, fault in numbers.drop_nulls("fault").select("row", "fault").iter_rows():
        offset, line = lines[row]
        rejects.add(offset, line, f"{_NO_RECORD} ({fault})")
    offsets = pl.Series([offset for offset, _ in lines], dtype=pl.Int64)
    return (
        numbers.with_columns(pl.col("wall_time_s") / 1e3, source_offset=offsets, cycle_source=pl.lit(None, pl.String))
        .filter(pl.col("fault").is_null())
        .select(list(_FPM_TYPES))
    )


# -- rows ---------------------------------------------------------------------------------------------------


def _as_steps(records: pl.DataFrame, offset: int) -> pl.DataFrame:
    """Return records as rows of steps; a heartbeat is a step of nothing, without a time.

    Each decode request is taken to compute one token: the record has no count of them.
    """
    worker = pl.when(pl.col("worker_id").str.len_chars() > 0).then("worker_id").otherwise(pl.lit(UNKNOWN_SERVER))
    requests = pl.col("num_prefill_reqs") + pl.col("num_decode_reqs")
    return records.with_columns(
        pl.col("source_offset") + offset,
        server=pl.concat_str(worker, pl.lit(".dp"), pl.col("dp_rank").fill_null(0)),
        cycle_us=pl.when(pl.col("wall_time_s") != 0).then(pl.col("wall_time_s") * 1e6),
        cycle_source=pl.col("cycle_source").fill_null(FPM_STEPS.name),
        decode_tokens=pl.col("num_decode_reqs"),
        scheduled_tokens=pl.col("prefill_tokens") + pl.col("num_decode_reqs"),
        running_depth=requests,
        waiting_depth=pl.col("queued_prefill_reqs") + pl.col("queued_decode_reqs"),
        waiting_tokens=pl.col("queued_prefill_tokens") + pl.col("queued_decode_tokens"),
    ).select(pl.col(name) for name in RECORDED_STEPS if name not in ("file", "kv_usage_ratio"))


FORMAT = register(
    Recording(
        name="fpm",
        title=_FPM_TITLE,
        asked="a recording of ForwardPassMetrics",
        file_name="fpm",
        find=_find,
        fills="`steps`, and `timeline` with context tokens and the time of each step",
        units="s (`wall_time`), ms (`latency_ms`), ns (`received_at_ns`)",
        clock="the receiver's wall clock; the CSV has no times, only the order of steps",
        sources=(FPM_STEPS.name, STEPS_OF_TRACE.name, STEPS_OF_SGLANG.name),
        decode=decode,
        message_start=_RECORD_MAP_START,
        header=lambda content: _header_at(content, content.rfind(b"counter_id")),
    )
)
