"""Decode blocks of whole records into frames of spans and events: the pure half of ingestion.

`decode_blocks` knows nothing of files or processes, and keeps no state. JSON and protobuf each have a reader that parses
down to the event; one builder makes columns of both.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import polars as pl
import pyarrow as pa

from tracefit.inputs.framing import Damage, next_record, records
from tracefit.inputs.rejects import Reject, excerpt
from tracefit.otlp import json_records, layouts
from tracefit.otlp.model import (
    KINDS,
    STATUS_CODES,
    CheckedRecord,
    Events,
    FieldError,
    MakeReject,
    Pairs,
    Span,
    SpanGroup,
    UnreadableRecordsError,
    UnreadScope,
    scalar_text,
)
from tracefit.otlp.packed import PackedTexts

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from tracefit.inputs.blocks import Block
    from tracefit.inputs.framing import Record, Shape
    from tracefit.inputs.rejects import Encoding

SPAN_COLUMNS: dict[str, Any] = {
    "span_row": pl.UInt32,
    "file": pl.UInt32,
    "source_offset": pl.Int64,
    "trace_id": pl.String,
    "span_id": pl.String,
    "parent_span_id": pl.String,
    "scope": pl.String,
    "name": pl.String,
    "kind": pl.String,
    "start_unix_ns": pl.Int64,
    "end_unix_ns": pl.Int64,
    "status_code": pl.String,
    "status_message": pl.String,
    "service_name": pl.String,
    "service_instance_id": pl.String,
    "host_name": pl.String,
    "dropped_events": pl.Int64,
    "dropped_attributes": pl.Int64,
}
"""Leading columns of `SpanBatch.spans`; `attributes` and one per wanted attribute follow. A missing value is null.

Ids are lower-case hex. `kind` is INTERNAL, SERVER, CLIENT, PRODUCER, CONSUMER or null; `status_code` is UNSET, OK or
ERROR. `file` is the number of the block the span comes from, `source_offset` the offset of its record in the
decompressed file.
"""

ATTRIBUTE_LIST = pl.List(pl.Struct({"key": pl.String, "value": pl.String}))
"""Type of `attributes`: the attributes that are kept, sorted by key."""

EVENT_COLUMNS: dict[str, Any] = {"span_row": pl.UInt32, "unix_ns": pl.Int64}
"""Leading columns of the frames in `SpanBatch.events`; one per wanted attribute that some event has follows."""

REJECT_COLUMNS: dict[str, Any] = {
    "file": pl.UInt32,
    "source_offset": pl.Int64,
    "length": pl.Int64,
    "reason": pl.String,
    "excerpt": pl.String,
    "count": pl.Int64,
}
"""Columns of `SpanBatch.rejects`."""

COUNT_COLUMNS: dict[str, Any] = {"span_row": pl.UInt32, "name": pl.String, "count": pl.Int64}

_KINDS = (None, *KINDS[1:])
_MOST_SHARED_BYTES = 64 << 10
"""Bytes of resource and scope of a record that is split: each piece repeats them."""


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Bounds on what is held decoded at a time; they do not change what is read.

    Attributes:
        piece_bytes: Bytes of spans of a piece of a long record; None is what the encoding needs.
        records_bytes: Bytes of records whose spans are built together; columns take several times as much while they are
            made.
        batch_bytes: Bytes of pieces of a very long record that make a batch at least: a record of many small scopes has as
            many pieces, and each batch has a fixed cost.
        max_records: Records and damage: a file of tiny ones has millions.
        max_spans: Spans after which a batch is built: decoded, short ones take twenty times their bytes.
    """

    piece_bytes: int | None = None
    records_bytes: int = 32 << 20
    batch_bytes: int = 4 << 20
    max_records: int = 1 << 16
    max_spans: int = 1 << 16


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which data of spans and events become columns; the rest is only counted.

    Attributes:
        span_keys: Attribute keys of spans that get a String column each.
        kept_keys: Attribute keys of spans that are kept in `attributes`.
        events: Event name to attribute key to the type of its column.
        show_values: Whether excerpts of rejects may show values of records, which are private.
        max_rejects: Rejects of a block after which the rest of it is not decoded.
    """

    span_keys: tuple[str, ...] = ()
    kept_keys: frozenset[str] = frozenset()
    events: Mapping[str, Mapping[str, pl.DataType]] = field(default_factory=dict)
    show_values: bool = False
    max_rejects: int = 100_000


@dataclass(frozen=True, slots=True)
class SpanBatch:
    """Spans of some records as columns, in input order.

    Attributes:
        spans: One row per span, columns as in `SPAN_COLUMNS` and `Wanted.span_keys`; `span_row` counts from 0.
        events: Event name to a frame of its events: `EVENT_COLUMNS`, then a column per wanted key that occurs.
        event_counts: span_row, name, count: how many events of each name a span has, wanted or not.
        rejects: Input that is not in the frames, columns as in `REJECT_COLUMNS`.
    """

    spans: pl.DataFrame
    events: dict[str, pl.DataFrame]
    event_counts: pl.DataFrame
    rejects: pl.DataFrame


class _Record(NamedTuple):
    """A record with its origin: the number of its block, its offset in the decompressed file, and its shape.

    A piece of a long record has the offset and the length of the whole one, and the number of its first span in it.
    """

    file: int
    offset: int
    payload: bytes
    shape: Shape
    length: int
    first_span: int = 0


class _Reader(Protocol):
    """The modules that read JSON and protobuf."""

    @property
    def PIECE_BYTES(self) -> int: ...  # noqa: N802 - a constant of the module
    def unread_scopes(self, payload: bytes) -> list[UnreadScope] | None: ...
    def record_of(self, resource: bytes, scope: bytes, spans: Sequence[bytes]) -> bytes: ...
    def read_record(self, payload: bytes) -> list[SpanGroup] | None: ...
    def check_record(
        self, payload: bytes, reject: MakeReject, max_rejects: int, first_span: int = 0
    ) -> CheckedRecord: ...
    def event_columns(self, events: list[Any]) -> Events: ...
    def read_pairs(self, attributes: bytes) -> Pairs: ...


class _Encoding(NamedTuple):
    name: Encoding
    reader: _Reader
    syntax: layouts.Syntax


def _encoding(name: Encoding) -> _Encoding:
    if name == "json":
        return _Encoding(name, json_records, layouts.JSON)
    from tracefit.otlp import protobuf_records  # noqa: PLC0415 - JSON is read without protobuf's library

    return _Encoding(name, protobuf_records, layouts.PROTOBUF)


def decode_blocks(
    blocks: Sequence[tuple[int, Block, bytes]],
    wanted: Wanted,
    limits: DecodeLimits = DecodeLimits(),
    *,
    rejects: Sequence[tuple[int, Reject]] = (),
) -> Iterator[SpanBatch]:
    """Decode blocks of one encoding together.

    Args:
        blocks: Each block with its number (column `file` of the frames) and its bytes.
        wanted: Which data become columns.
        limits: Bounds on what is held at a time.
        rejects: Rejects of the bytes around the blocks, numbered likewise; they come in the first batch.

    Yields:
        Batches of spans: one, or more where the records are long.
    """
    encoding = _encoding(blocks[0][1].encoding if blocks else "json")
    decoder = _BatchDecoder(encoding, wanted, limits, rejects)
    for file, block, payload in blocks:
        for item in records(payload, block.shape):
            if decoder.rejected[file] >= wanted.max_rejects:
                break  # the reader of the file counts its rejects, and reports the limit
            yield from decoder.add(file, block, payload, item)
    yield from decoder.flush()


class _BatchDecoder:
    """Collects records until there are enough to make frames of: each frame has a fixed cost."""

    def __init__(
        self,
        encoding: _Encoding,
        wanted: Wanted,
        limits: DecodeLimits,
        rejects: Sequence[tuple[int, Reject]],
    ) -> None:
        self.rejected: Counter[int] = Counter()
        self._encoding = encoding
        self._wanted = wanted
        self._limits = limits
        self._held: list[_Record] = []
        self._damage = list(rejects)
        self._size = 0

    def add(self, file: int, block: Block, payload: bytes, item: Record | Damage) -> Iterator[SpanBatch]:
        """Collect one record of a block, or damage; yield batches when there is enough."""
        offset = block.offset + item.offset
        if isinstance(item, Damage):
            shown = payload[item.offset : item.offset + item.length]
            text = excerpt(shown, self._encoding.name, show_values=self._wanted.show_values)
            self._damage.append((file, Reject(block.source_file, offset, item.length, item.reason, text)))
            self.rejected[file] += 1
            if self._is_full:
                yield from self.flush()
            return
        whole = _Record(file, offset, item.payload, block.shape, len(item.payload))
        scopes = self._scopes_to_split(item.payload)
        beside = len(item.payload) if scopes else 0  # the whole record is in memory beside its pieces
        for first_span, piece in self._pieces(scopes) if scopes else [(0, item.payload)]:
            self._held.append(whole._replace(payload=piece, first_span=first_span))
            self._size += len(piece)
            is_batch = self._size >= self._limits.batch_bytes
            if self._is_full or (is_batch and self._size + beside >= self._limits.records_bytes):
                yield from self.flush()

    @property
    def _is_full(self) -> bool:
        held = len(self._held) + len(self._damage)
        return self._size >= self._limits.records_bytes or held >= self._limits.max_records

    @property
    def _piece_bytes(self) -> int:
        return self._limits.piece_bytes or self._encoding.reader.PIECE_BYTES

    def _scopes_to_split(self, payload: bytes) -> list[UnreadScope] | None:
        """Return the scopes of a record that is read in pieces, so that not all of its spans are in memory decoded at once.

        A short one is read whole, and so is one whose upper levels are not as exporters write them.
        """
        if len(payload) <= 2 * self._piece_bytes:
            return None
        scopes = self._encoding.reader.unread_scopes(payload)
        is_shared = any(
            len(resource) + len(scope) > _MOST_SHARED_BYTES for resource, scope, _ in scopes or ()
        )
        return None if is_shared else scopes

    def _pieces(self, scopes: list[UnreadScope]) -> Iterator[tuple[int, bytes]]:
        """Yield records of some spans of a scope each, with the number of their first span."""
        number = 0
        for resource, scope, spans in scopes:
            first = size = 0
            for place, span in enumerate(spans, start=1):
                size += len(span)
                if size >= self._piece_bytes or place == len(spans):
                    yield number + first, self._encoding.reader.record_of(resource, scope, spans[first:place])
                    first, size = place, 0
            number += len(spans)

    def flush(self) -> Iterator[SpanBatch]:
        """Decode the collected records; those with odd attributes are read once more by the careful reader."""
        held, damage = self._held, self._damage
        self._held, self._damage, self._size = [], [], 0
        start = 0
        while start < len(held) or damage:
            # The quick readers take attributes on trust and leave them to the builder. If it finds some that cannot be
            # read, their records go to the careful reader, which rejects bad spans alone. Each round adds a record: the
            # loop ends.
            with_care: set[int] = set()
            while True:
                groups, found, stop = self._read(held, start, with_care)
                try:
                    frames = _build(groups, held, self._encoding, self._wanted)
                except UnreadableRecordsError as error:
                    with_care |= error.records
                    continue
                break
            self.rejected.update(file for file, _ in found)
            yield SpanBatch(*frames, _reject_frame([*damage, *found]))
            start, damage = stop, []

    def _read(
        self, held: Sequence[_Record], start: int, with_care: set[int]
    ) -> tuple[_Groups, list[tuple[int, Reject]], int]:
        """Return the spans of records from `start` on, rejects for the rest, and where the next ones begin."""
        groups: _Groups = []
        rejects: list[tuple[int, Reject]] = []
        rejected = self.rejected.copy()
        spans = 0
        for number in range(start, len(held)):
            record = held[number]
            usual = None if number in with_care else self._encoding.reader.read_record(record.payload)
            if usual is None:
                left = self._wanted.max_rejects - rejected[record.file]
                checked = self._check(record, left) if left > 0 else CheckedRecord([], [])
                rejects += [(record.file, reject) for reject in checked.rejects]
                rejected[record.file] += len(checked.rejects)
                usual = checked.groups
            groups += [(number, group) for group in usual]
            spans += sum(len(group.spans) for group in usual)
            if spans >= self._limits.max_spans:
                return groups, rejects, number + 1
        return groups, rejects, len(held)

    def _check(self, record: _Record, max_rejects: int) -> CheckedRecord:
        """Read a record carefully; if it is unreadable, read the records inside, which a wrong length has swallowed."""
        reject = _reject_maker(record, self._encoding, self._wanted)
        checked = self._encoding.reader.check_record(record.payload, reject, max_rejects, record.first_span)
        inside = next_record(record.payload, record.shape, 1) if checked.is_unreadable else -1
        if inside < 0 or max_rejects <= 1:
            return checked
        groups, rejects = [], [reject("record cut: another begins inside", 0, inside)]
        for item in records(record.payload[inside:], record.shape):
            offset = record.offset + inside + item.offset
            if isinstance(item, Damage):
                rejects.append(reject(item.reason, inside + item.offset, inside + item.offset + item.length))
                continue
            inner = _Record(record.file, offset, item.payload, record.shape, len(item.payload))
            maker = _reject_maker(inner, self._encoding, self._wanted)
            found = self._encoding.reader.check_record(
                item.payload, maker, max(max_rejects - len(rejects), 1), 0
            )
            groups += found.groups
            rejects += found.rejects
        return CheckedRecord(groups, rejects)


_Groups = list[tuple[int, SpanGroup]]
"""Groups of spans, each with the index of its record among the collected ones."""


def _reject_maker(record: _Record, encoding: _Encoding, wanted: Wanted) -> MakeReject:
    def reject(reason: str, start: int = 0, end: int | None = None, shown: bytes | None = None) -> Reject:
        payload = record.payload[start:end]
        text = excerpt(payload if shown is None else shown, encoding.name, show_values=wanted.show_values)
        length = record.length if end is None and not start else len(payload)
        return Reject("", record.offset + start, length, reason, text)

    return reject


def _build(
    groups: _Groups, held: Sequence[_Record], encoding: _Encoding, wanted: Wanted
) -> tuple[pl.DataFrame, dict[str, pl.DataFrame], pl.DataFrame]:
    """Build the frames of some spans.

    Raises:
        UnreadableRecordsError: Spans or events have attributes that cannot be read.
    """
    spans = [span for _, group in groups for span in group.spans]
    number = np.repeat(
        np.array([number for number, _ in groups], np.int64), [len(g.spans) for _, g in groups]
    )
    span_row = np.repeat(np.arange(len(spans), dtype=np.uint32), [len(span.events) for span in spans])
    events = encoding.reader.event_columns(list(chain.from_iterable([span.events for span in spans])))
    dropped = np.array([span.dropped_attributes for span in spans], np.int64)
    if events.dropped.any():
        dropped += np.bincount(span_row, events.dropped, len(spans)).astype(np.int64)
    names = {name: code for code, name in enumerate(dict.fromkeys(events.names))}
    codes = np.fromiter(map(names.__getitem__, events.names), np.int64, len(events.names))
    unreadable = {int(number[span_row[place]]) for place in events.bad}
    frames: dict[str, pl.DataFrame] = {}
    for name, keys in wanted.events.items():
        if name in names:
            rows = np.flatnonzero(codes == names[name])
            found, bad = _read_attributes(events.texts, rows, keys, encoding, _to_types(keys), events.odd)
            unreadable |= set(number[span_row[bad]].tolist())
            if len(found):
                place = found["row"].to_numpy()
                known = pl.DataFrame({"span_row": span_row[place], "unix_ns": events.unix_ns[place]})
                frames[name] = known.hstack(found.drop("row"))
    attributes, bad = _span_attributes(spans, groups, encoding, wanted)
    unreadable |= set(number[bad].tolist())
    if unreadable:  # then rows are missing in these frames
        raise UnreadableRecordsError(unreadable)
    frame = _span_frame(spans, groups, number, held, dropped)
    return frame.hstack(attributes), frames, _event_counts(names, codes, span_row)


def _read_attributes(
    texts: PackedTexts,
    rows: NDArray[np.int64],
    keys: Collection[str],
    encoding: _Encoding,
    convert: Callable[[pl.Series], pl.Series],
    known: Mapping[int, Pairs],
) -> tuple[pl.DataFrame, list[int]]:
    """Read the attributes of some spans or events: by column where a layout matches, else one by one.

    Args:
        texts: The attributes of all spans or events.
        rows: The rows to read, ascending.
        keys: Attributes that become columns.
        encoding: The encoding of the texts.
        convert: Gives a column, which has the name of its key, its type.
        known: Attributes that were read before, by row.

    Returns:
        A frame of those that can be read, in order: `row`, and a column per key that some have. The rows of the others.
    """
    unknown = rows[~np.isin(rows, list(known))] if known else rows
    found = layouts.read_columns(texts, unknown, keys, encoding.syntax)
    rest = np.setdiff1d(rows, found.rows, assume_unique=True)
    pairs: list[dict[str, Any]] = []
    bad: list[int] = []
    for row in rest.tolist():
        try:
            read = known.get(row) or encoding.reader.read_pairs(
                texts.data[texts.starts[row] : texts.ends[row]]
            )
        except FieldError:
            bad.append(row)
        else:
            pairs.append(dict(read))  # the last counts if a key occurs twice
    parts = [(found.rows, found.columns), (rest[~np.isin(rest, bad)], _columns_of(pairs, keys))]
    frames = [
        pl.DataFrame({"row": some, **{key: convert(column) for key, column in columns.items()}})
        for some, columns in parts
        if len(some)
    ]
    if len(frames) > 1:
        return pl.concat(frames, how="diagonal").sort("row"), bad
    return frames[0] if frames else pl.DataFrame(schema={"row": pl.Int64}), bad


def _columns_of(pairs: list[dict[str, Any]], keys: Collection[str]) -> dict[str, pl.Series]:
    """Make columns of attributes that were read one by one; a column with several kinds of values is text."""
    columns = {}
    for key in keys:
        values = [each.get(key) for each in pairs]
        kinds = {type(value) for value in values} - {type(None)}
        if kinds:
            texts = values if len(kinds) == 1 else [scalar_text(value) for value in values]
            columns[key] = pl.Series(key, texts)
    return columns


def _to_types(types: Mapping[str, pl.DataType]) -> Callable[[pl.Series], pl.Series]:
    return lambda column: _as_type(column, types[column.name])


def _span_attributes(
    spans: list[Span], groups: _Groups, encoding: _Encoding, wanted: Wanted
) -> tuple[pl.DataFrame, list[int]]:
    """Return the attributes of spans: the kept ones as a list of key and value, the wanted ones as text columns; and bad rows."""
    texts = PackedTexts.of([span.attributes for span in spans])
    # By scope, because one exporter writes its spans alike; not by name, as every step span has a name of its own.
    scopes = {scope: code for code, scope in enumerate({group.origin.scope: None for _, group in groups})}
    codes = np.array([scopes[group.origin.scope] for _, group in groups], np.int64)
    scope_of = np.repeat(codes, [len(group.spans) for _, group in groups])
    keys = wanted.kept_keys.union(wanted.span_keys)
    frames = [pl.DataFrame(schema={"row": pl.Int64, **dict.fromkeys(wanted.span_keys, pl.String)})]
    bad: list[int] = []
    for scope in range(len(scopes)):
        rows = np.flatnonzero(scope_of == scope)
        frame, unreadable = _read_attributes(texts, rows, keys, encoding, layouts.as_text, {})
        frames.append(frame)
        bad += unreadable
    found = pl.concat(frames, how="diagonal").sort("row")
    kept = _key_value_lists(found.select(sorted(wanted.kept_keys.intersection(found.columns))), len(found))
    return found.select(kept.alias("attributes"), *wanted.span_keys), bad


def _key_value_lists(frame: pl.DataFrame, count: int) -> pl.Series:
    """Return a list of key and value for each of `count` rows, without the values that are null.

    Arrow's lists are made of offsets, which takes a tenth of the time of polars' expressions for lists.
    """
    if not frame.width:
        return pl.Series([[]], dtype=ATTRIBUTE_LIST).new_from_index(0, count)
    is_there = np.column_stack([column.is_not_null().to_numpy() for column in frame])
    rows, keys = np.nonzero(is_there)  # row by row, the keys of each in order
    values = pl.concat(list(frame)).gather(keys * count + rows)
    names = pl.Series(frame.columns, dtype=pl.String).gather(keys)
    pairs = pa.StructArray.from_arrays([names.to_arrow(), values.to_arrow()], ["key", "value"])
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum(is_there.sum(axis=1), out=offsets[1:])
    starts = pa.Array.from_buffers(pa.int64(), count + 1, [None, pa.py_buffer(offsets)])
    lists = pa.LargeListArray.from_arrays(starts, pairs)
    return pl.DataFrame(pa.RecordBatch.from_arrays([lists], ["lists"])).to_series()


def _span_frame(
    spans: list[Span],
    groups: _Groups,
    number: NDArray[np.int64],
    held: Sequence[_Record],
    dropped: NDArray[np.int64],
) -> pl.DataFrame:
    sizes = [len(group.spans) for _, group in groups]
    origins = {
        name: pl.Series([getattr(group.origin, name) for _, group in groups], dtype=pl.String).gather(
            np.repeat(np.arange(len(groups)), sizes)
        )
        for name in ("scope", "service_name", "service_instance_id", "host_name")
    }
    columns: dict[str, Any] = {
        "span_row": np.arange(len(spans), dtype=np.uint32),
        "file": np.array([record.file for record in held], np.uint32)[number],
        "source_offset": np.array([record.offset for record in held], np.int64)[number],
        "trace_id": [span.trace_id for span in spans],
        "span_id": [span.span_id for span in spans],
        "parent_span_id": [span.parent_span_id or None for span in spans],
        "scope": origins["scope"],
        "name": [span.name or None for span in spans],
        "kind": [_KINDS[span.kind] if 0 <= span.kind < len(_KINDS) else None for span in spans],
        "start_unix_ns": [span.start_unix_ns or None for span in spans],
        "end_unix_ns": [span.end_unix_ns or None for span in spans],
        "status_code": [
            STATUS_CODES[span.status_code] if 0 <= span.status_code < len(STATUS_CODES) else None
            for span in spans
        ],
        "status_message": [span.status_message or None for span in spans],
        "service_name": origins["service_name"],
        "service_instance_id": origins["service_instance_id"],
        "host_name": origins["host_name"],
        "dropped_events": [span.dropped_events for span in spans],
        "dropped_attributes": dropped,
    }
    return pl.DataFrame(columns, schema=SPAN_COLUMNS)


def _event_counts(
    names: dict[str, int], codes: NDArray[np.int64], span_row: NDArray[np.uint32]
) -> pl.DataFrame:
    # Row and name in one number, so that one sort groups them. `np.unique` would import `numpy.ma`, which takes as long as
    # decoding a few megabytes.
    pairs = np.sort(span_row.astype(np.int64) * max(len(names), 1) + codes)
    starts = np.flatnonzero(np.append(True, pairs[1:] != pairs[:-1])) if len(pairs) else pairs
    counts = np.diff(np.append(starts, len(pairs)))
    texts = pl.Series(list(names), dtype=pl.String)
    rows, code = np.divmod(pairs[starts], max(len(names), 1))
    return pl.DataFrame({"span_row": rows, "name": texts.gather(code), "count": counts}, schema=COUNT_COLUMNS)


def _as_type(column: pl.Series, dtype: pl.DataType) -> pl.Series:
    """Return values converted to the type of their column, null if they cannot be.

    Exporters differ in how they write a number: 7, 7.0 and "7" are the same.
    """
    if column.dtype == dtype:
        return column
    # A cast would turn booleans into numbers and text into booleans: no exporter means that.
    if (column.dtype == pl.Boolean and dtype.is_numeric()) or (
        column.dtype == pl.String and dtype == pl.Boolean
    ):
        return pl.Series([None], dtype=dtype).new_from_index(0, len(column))
    if column.dtype == pl.String and dtype.is_integer():
        # By way of a float only what is no integer: beyond 2^53 floats are not exact.
        exact = column.cast(dtype, strict=False)
        return exact.zip_with(
            exact.is_not_null(), column.cast(pl.Float64, strict=False).cast(dtype, strict=False)
        )
    return column.cast(dtype, strict=False)


def _reject_frame(rejects: Sequence[tuple[int, Reject]]) -> pl.DataFrame:
    rows = [(file, r.source_offset, r.length, r.reason, r.excerpt, r.count) for file, r in rejects]
    return pl.DataFrame(rows, schema=REJECT_COLUMNS, orient="row")
