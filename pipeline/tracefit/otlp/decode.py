"""Decode blocks of whole records into frames of spans and events: the pure half of ingestion.

`decode_blocks` has no files, no processes and no state. JSON and protobuf each have a module
that divides a record into scopes and parses its spans down to the event; this one makes columns of both.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa

from tracefit.inputs.framing import next_record, records
from tracefit.inputs.rejects import Reject, Rejects, TooManyRejectsError, is_name
from tracefit.otlp import json_records, layouts
from tracefit.otlp.model import (
    AddReject,
    EncodedScope,
    Events,
    FieldError,
    Origin,
    Pairs,
    Span,
    kind_name,
    scalar_text,
    status_name,
)
from tracefit.otlp.packed import PackedTexts

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from tracefit.inputs.blocks import Block
    from tracefit.inputs.framing import Shape
    from tracefit.inputs.rejects import Encoding
    from tracefit.options import IngestOptions

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


class DecodeLimits(msgspec.Struct, frozen=True):
    """Bounds on the decoded data in memory at a time; they do not change the result.

    Attributes:
        piece_bytes: Bytes of spans of a piece of a long scope; None takes the default of the encoding.
        records_bytes: Bytes of records that become one batch; columns take several times as much
            while they are made.
        batch_bytes: Bytes of pieces of a very long record that make a batch at least: a record of many small
            scopes has as many pieces, and each batch has a fixed cost.
        max_pieces: Pieces and rejects: a file of tiny records has millions.
        max_spans: Spans after which a batch is built: decoded, short ones take twenty times their bytes.
    """

    piece_bytes: int | None = None
    records_bytes: int = 32 << 20
    batch_bytes: int = 4 << 20
    max_pieces: int = 1 << 16
    max_spans: int = 1 << 16


class Wanted(msgspec.Struct, frozen=True):
    """Which data of spans and events become columns; the rest is only counted.

    Attributes:
        span_keys: Attribute keys of spans that get a String column each.
        kept_keys: Attribute keys of spans that are kept in `attributes`.
        events: Event name to attribute key to the type of its column.
    """

    span_keys: tuple[str, ...] = ()
    kept_keys: frozenset[str] = frozenset()
    events: Mapping[str, Mapping[str, pl.DataType]] = msgspec.field(default_factory=dict)


class SpanBatch(msgspec.Struct, frozen=True):
    """Spans of some records as columns, in input order.

    Attributes:
        spans: One row per span, columns as in `SPAN_COLUMNS` and `Wanted.span_keys`; `span_row` counts from 0.
        events: Event name to a frame of its events: span_row, unix_ns, then a column per wanted key that occurs.
        event_counts: span_row, name, count: how many events of each name a span has, wanted or not.
        rejects: Input that is not in the frames, columns as in `REJECT_COLUMNS`.
        keys_of: Returns the keys of all attributes of a span that look like names, from its `span_row`.
    """

    spans: pl.DataFrame
    events: dict[str, pl.DataFrame]
    event_counts: pl.DataFrame
    rejects: pl.DataFrame
    keys_of: Callable[[int], list[str]]


class _Record(NamedTuple):
    """A record with its origin: the number of its block, its offset in the decompressed file, and its shape; and the
    rejects of its block.
    """

    file: int
    offset: int
    payload: bytes
    shape: Shape
    rejects: Rejects


class _ScopePiece(NamedTuple):
    """Spans of one scope of a record, their encoded length, and the number of the first in the record."""

    record: _Record
    origin: Origin
    spans: list[Any]
    size_bytes: int
    first: int


class _Encoding(Protocol):
    """The modules that read JSON and protobuf."""

    NAME: Encoding
    SYNTAX: layouts.Syntax
    PIECE_BYTES: int
    id_text: Callable[..., str]

    def scopes(self, payload: bytes, reject: AddReject, most_bytes: int) -> Iterator[EncodedScope]: ...
    def read_spans(self, encoded: Sequence[Any]) -> list[Span]: ...
    def read_span(self, encoded: Any) -> Span: ...
    def attributes_of(self, span: Span) -> bytes: ...
    def event_columns(self, events: list[Any]) -> Events: ...
    def read_pairs(self, attributes: bytes) -> Pairs: ...


def _encoding(name: Encoding) -> _Encoding:
    if name == "json":
        return json_records
    from tracefit.otlp import protobuf_records  # noqa: PLC0415 - JSON is read without protobuf's library

    return protobuf_records


def decode_blocks(
    blocks: Sequence[tuple[int, Block, bytes]],
    wanted: Wanted,
    options: IngestOptions,
    limits: DecodeLimits = DecodeLimits(),
    *,
    rejects: Sequence[tuple[int, Reject]] = (),
) -> Iterator[SpanBatch]:
    """Decode blocks of one encoding in common batches.

    Args:
        blocks: Each block with its number (column `file` of the frames) and its bytes.
        wanted: Which data become columns.
        options: Rejects of a block after which the rest of it is not decoded, and whether excerpts show values.
        limits: Bounds on the data in memory at a time.
        rejects: Rejects of the bytes around the blocks, numbered likewise; they come in the first batch.

    Yields:
        Batches of spans: one, or more where the records are long.
    """
    encoding = _encoding(blocks[0][1].encoding if blocks else "json")
    decoder = _BatchDecoder(encoding, wanted, options, limits, rejects)
    for file, block, payload in blocks:
        of_block = decoder.rejects_of(file)
        for item in records(payload, block.shape):
            if of_block.is_full:
                break  # the reader of the file counts its rejects, and reports the limit
            record = _Record(file, block.offset + item.offset, item.payload, block.shape, of_block)
            yield from decoder.add(record, item.fault)
    yield from decoder.flush()


def without_events(
    spans: Sequence[pl.DataFrame],
    rejects: Sequence[tuple[int, Reject]],
    wanted: Wanted,
    keys_of_file: Mapping[int, Callable[[], list[str]]],
) -> SpanBatch:
    """Return a batch of spans made from other records, numbered as in `decode_blocks`; missing columns are null."""
    built = _build([], [], json_records, wanted)
    assert not isinstance(built, set)  # noqa: S101 - there is nothing that could not be read
    empty, events, counts = built
    joined = pl.concat([empty, *spans], how="diagonal").select(empty.columns)
    numbered = joined.with_columns(
        span_row=pl.int_range(pl.len(), dtype=pl.UInt32), dropped_attributes=pl.lit(0, pl.Int64)
    )
    files = numbered["file"]
    return SpanBatch(numbered, events, counts, _reject_frame(list(rejects)), lambda row: keys_of_file[files[row]]())


class _BatchDecoder:
    """Collects encoded spans for batches, because each frame has a fixed cost."""

    def __init__(
        self,
        encoding: _Encoding,
        wanted: Wanted,
        options: IngestOptions,
        limits: DecodeLimits,
        rejects: Sequence[tuple[int, Reject]],
    ) -> None:
        self._encoding = encoding
        self._wanted = wanted
        self._options = options
        self._limits = limits
        self._collected: list[_ScopePiece] = []
        self._between = list(rejects)
        self._rejects: dict[int, Rejects] = {}
        self._rejected = len(rejects)  # since the last batch
        self._size = self._spans = 0

    def rejects_of(self, file: int) -> Rejects:
        """Return the rejects of a block, by its number."""
        # Offsets of records are those in the file.
        return self._rejects.setdefault(file, Rejects(self._options, encoding=self._encoding.NAME))

    def add(self, record: _Record, fault: str) -> Iterator[SpanBatch]:
        """Collect the spans of one record, or reject it for its fault; yield full batches."""
        limits = self._limits
        # The whole record stays in memory while its pieces are decoded.
        enough = max(limits.batch_bytes, limits.records_bytes - len(record.payload))
        with suppress(TooManyRejectsError):
            for piece in self._pieces(record, fault):
                self._collected.append(piece)
                self._spans += len(piece.spans)
                self._size += piece.size_bytes
                is_many = self._spans >= limits.max_spans or len(self._collected) >= limits.max_pieces
                if self._size >= enough or is_many:
                    yield from self.flush()
        if self._rejected >= limits.max_pieces:
            yield from self.flush()

    def _reject(
        self, record: _Record, reason: str, start: int = 0, end: int | None = None, shown: bytes | None = None
    ) -> None:
        self._rejected += 1
        record.rejects.add(record.offset + start, record.payload[start:end], reason, shown=shown)

    def _pieces(self, record: _Record, fault: str, *, is_inner: bool = False) -> Iterator[_ScopePiece]:
        """Yield the spans of each scope of a record; a long scope comes in pieces that can be decoded at once."""
        if fault:
            self._reject(record, fault)
            return
        most = self._limits.piece_bytes or self._encoding.PIECE_BYTES
        number = 0
        try:
            reject = partial(self._reject, record)
            for origin, spans, parsed_bytes in self._encoding.scopes(record.payload, reject, most):
                for part, size in [(list(spans), parsed_bytes)] if parsed_bytes else _divided(spans, most):
                    if part and origin:
                        yield _ScopePiece(record, origin, part, size, number)
                    number += len(part)
        except FieldError as error:
            # A wrong length can swallow the records after it.
            inside = -1 if is_inner else next_record(record.payload, record.shape, 1)
            if inside < 0:
                self._reject(record, error.what)
                return
            self._reject(record, "record cut: another begins inside", 0, inside)
            for item in records(record.payload[inside:], record.shape):
                inner = record._replace(offset=record.offset + inside + item.offset, payload=item.payload)
                yield from self._pieces(inner, item.fault, is_inner=True)

    def flush(self) -> Iterator[SpanBatch]:
        """Decode the collected spans, with a fast path for spans as exporters write them."""
        pieces = self._collected
        if not (pieces or self._rejected):
            return
        spans: list[list[Span]] = []
        for piece in pieces:
            try:
                spans.append(self._encoding.read_spans(piece.spans))
            except FieldError:
                spans.append(self._read_one_by_one(piece))
        # Attributes were taken on trust so far. Pieces with some that cannot be read are read again, to
        # reject the spans they are in.
        while isinstance(built := _build(pieces, spans, self._encoding, self._wanted), set):
            for number in built:
                spans[number] = self._read_one_by_one(pieces[number])
        every = list(chain.from_iterable(spans))
        of_blocks = ((file, one) for file, rejects in self._rejects.items() for one in rejects.take())
        rejects = _reject_frame([*self._between, *of_blocks])
        yield SpanBatch(*built, rejects, lambda row: self._keys_of(every[row]))
        self._collected, self._between = [], []
        self._rejected = self._size = self._spans = 0

    def _keys_of(self, span: Span) -> list[str]:
        pairs = self._encoding.read_pairs(bytes(self._encoding.attributes_of(span)))
        return [key for key, _ in pairs if is_name(key)]

    def _read_one_by_one(self, piece: _ScopePiece) -> list[Span]:
        """Return the spans of a piece that are valid, in any spelling; reject the others."""
        spans: list[Span] = []
        if piece.record.rejects.is_full:
            return spans
        with suppress(TooManyRejectsError):
            for number, encoded in enumerate(piece.spans, piece.first):
                try:
                    spans.append(self._encoding.read_span(encoded))
                except FieldError as error:
                    shown = bytes(encoded) if self._encoding.NAME == "json" else None
                    self._reject(piece.record, f"span {number}: {error.what}", shown=shown)
        return spans


def _divided(spans: Iterable[Any], most: int) -> Iterator[tuple[list[Any], int]]:
    """Split encoded spans into pieces of about `most` bytes; yield each with its length."""
    piece: list[Any] = []
    size = 0
    for span in spans:
        piece.append(span)
        size += len(span)
        if size >= most:
            yield piece, size
            piece, size = [], 0
    yield piece, size


def _build(
    pieces: list[_ScopePiece], decoded: list[list[Span]], encoding: _Encoding, wanted: Wanted
) -> tuple[pl.DataFrame, dict[str, pl.DataFrame], pl.DataFrame] | set[int]:
    """Build the frames of some spans; return instead the numbers of the pieces with attributes that cannot be read."""
    spans = list(chain.from_iterable(decoded))
    number = np.repeat(np.arange(len(pieces)), list(map(len, decoded)))
    events_of = [list(span.events) for span in spans]
    span_row = np.repeat(np.arange(len(spans), dtype=np.uint32), list(map(len, events_of)))
    events = encoding.event_columns(list(chain.from_iterable(events_of)))
    dropped = np.array([span.dropped_attributes_count for span in spans], np.int64)
    if events.dropped.any():
        dropped += np.bincount(span_row, events.dropped, len(spans)).astype(np.int64)
    names = {name: code for code, name in enumerate(dict.fromkeys(events.names))}
    codes = np.fromiter(map(names.__getitem__, events.names), np.int64, len(events.names))
    unreadable = set(number[span_row[events.bad]].tolist())
    frames: dict[str, pl.DataFrame] = {}
    for name, keys in wanted.events.items():
        if name in names:
            rows = np.flatnonzero(codes == names[name])
            to_types = partial(_as_type, types=keys)
            columns, bad = _read_attributes(events.texts, rows, keys, encoding, to_types, events.odd)
            unreadable |= set(number[span_row[bad]].tolist())
            if len(columns):
                row = columns["row"].to_numpy()
                times = pl.DataFrame({"span_row": span_row[row], "unix_ns": events.unix_ns[row]})
                frames[name] = times.hstack(columns.drop("row"))
    frame = _span_frame(spans, pieces, number, encoding, dropped)
    attributes, bad = _span_attributes(spans, frame["scope"], encoding, wanted)
    unreadable |= set(number[bad].tolist())
    if unreadable:  # then rows are missing in these frames
        return unreadable
    return frame.hstack(attributes), frames, _event_counts(names, codes, span_row)


def _read_attributes(
    texts: PackedTexts,
    rows: NDArray[np.int64],
    keys: Collection[str],
    encoding: _Encoding,
    convert: Callable[[pl.Series], pl.Series],
    parsed: Mapping[int, Pairs],
) -> tuple[pl.DataFrame, list[int]]:
    """Read the attributes of some spans or events: by column where a layout matches, else one by one.

    Args:
        texts: The attributes of all spans or events.
        rows: The rows to read, ascending.
        keys: Attributes that become columns.
        encoding: The encoding of the texts.
        convert: Gives a column, which has the name of its key, its type.
        parsed: Attributes that were read before, by row.

    Returns:
        A frame of those that can be read, in order: `row`, and a column per key that some have. The rows of the others.
    """
    unparsed = rows[~np.isin(rows, list(parsed))] if parsed else rows
    rows_read, columns_read = layouts.read_columns(texts, unparsed, keys, encoding.SYNTAX)
    rest = np.setdiff1d(rows, rows_read, assume_unique=True)
    pairs: list[dict[str, Any]] = []
    bad: list[int] = []
    for row in rest.tolist():
        try:
            read = parsed.get(row) or encoding.read_pairs(texts.data[texts.starts[row] : texts.ends[row]])
        except FieldError:
            bad.append(row)
        else:
            pairs.append(dict(read))  # the last counts if a key occurs twice
    parts = [(rows_read, columns_read), (rest[~np.isin(rest, bad)], _columns_of(pairs, keys))]
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


def _span_attributes(
    spans: list[Span], scopes: pl.Series, encoding: _Encoding, wanted: Wanted
) -> tuple[pl.DataFrame, list[int]]:
    """Return kept attributes of spans as lists of key and value, wanted ones as text columns, and bad rows."""
    texts = PackedTexts.of([encoding.attributes_of(span) for span in spans])
    # By scope, because one exporter writes its spans alike; not by name, which differs between step spans.
    scope_of = scopes.rank("dense").fill_null(0).to_numpy()
    keys = wanted.kept_keys.union(wanted.span_keys)
    frames = [pl.DataFrame(schema={"row": pl.Int64, **dict.fromkeys(wanted.span_keys, pl.String)})]
    bad: list[int] = []
    for scope in set(scope_of.tolist()):
        rows = np.flatnonzero(scope_of == scope)
        frame, unreadable = _read_attributes(texts, rows, keys, encoding, layouts.as_text, {})
        frames.append(frame)
        bad += unreadable
    columns = pl.concat(frames, how="diagonal").sort("row")
    kept = _key_value_lists(columns.select(sorted(wanted.kept_keys.intersection(columns.columns))), len(columns))
    return columns.select(kept.alias("attributes"), *wanted.span_keys), bad


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
    pieces: list[_ScopePiece],
    number: NDArray[np.int64],
    encoding: _Encoding,
    dropped: NDArray[np.int64],
) -> pl.DataFrame:
    kinds = {kind: kind_name(kind) for kind in {span.kind for span in spans}}
    codes = {code: status_name(code) for code in {span.status.code for span in spans}}
    columns: dict[str, Any] = {
        "span_row": np.arange(len(spans), dtype=np.uint32),
        "trace_id": [encoding.id_text(span.trace_id) for span in spans],
        "span_id": [encoding.id_text(span.span_id) for span in spans],
        "parent_span_id": [encoding.id_text(span.parent_span_id) for span in spans],
        "name": [span.name or None for span in spans],
        "kind": [kinds[span.kind] for span in spans],
        "start_unix_ns": [span.start_time_unix_nano or None for span in spans],
        "end_unix_ns": [span.end_time_unix_nano or None for span in spans],
        "status_code": [codes[span.status.code] for span in spans],
        "status_message": [span.status.message or None for span in spans],
        "dropped_events": [span.dropped_events_count for span in spans],
        "dropped_attributes": dropped,
    }
    of_pieces = pl.DataFrame(
        [(piece.record.file, piece.record.offset, *msgspec.structs.astuple(piece.origin)) for piece in pieces],
        schema=["file", "source_offset", "service_name", "service_instance_id", "host_name", "scope"],
        orient="row",
    )
    columns |= of_pieces[number].to_dict()
    frame = pl.DataFrame({name: columns[name] for name in SPAN_COLUMNS}, schema=SPAN_COLUMNS)
    return frame.with_columns(
        pl.col("trace_id", "span_id").str.to_lowercase(),
        pl.col("parent_span_id").str.to_lowercase().replace(["", "0" * 16], None),  # of zeros: no parent
    )


def _event_counts(names: dict[str, int], codes: NDArray[np.int64], span_row: NDArray[np.uint32]) -> pl.DataFrame:
    pairs = pl.DataFrame({"span_row": span_row, "code": codes})
    counts = pairs.group_by("span_row", "code").len("count").sort("span_row", "code")
    name = pl.Series("name", list(names), dtype=pl.String).gather(counts["code"])
    return pl.DataFrame([counts["span_row"], name, counts["count"]], schema=COUNT_COLUMNS)


def _as_type(column: pl.Series, types: Mapping[str, pl.DataType]) -> pl.Series:
    """Return values converted to the type of the column of their name, null if they cannot be.

    Exporters differ in how they write a number: 7, 7.0 and "7" are the same.
    """
    dtype = types[column.name]
    if column.dtype == dtype:
        return column
    # A cast would turn booleans into numbers and text into booleans: no exporter means that.
    if (column.dtype == pl.Boolean and dtype.is_numeric()) or (column.dtype == pl.String and dtype == pl.Boolean):
        return pl.Series([None], dtype=dtype).new_from_index(0, len(column))
    if column.dtype == pl.String and dtype.is_integer():
        # Only values that are not integers go by way of a float: beyond 2^53 floats are not exact.
        exact = column.cast(dtype, strict=False)
        return exact.zip_with(exact.is_not_null(), column.cast(pl.Float64, strict=False).cast(dtype, strict=False))
    return column.cast(dtype, strict=False)


def _reject_frame(rejects: Sequence[tuple[int, Reject]]) -> pl.DataFrame:
    rows = [(file, r.source_offset, r.length, r.reason, r.excerpt, r.count) for file, r in rejects]
    return pl.DataFrame(rows, schema=REJECT_COLUMNS, orient="row")
