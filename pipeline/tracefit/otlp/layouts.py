"""Read the attributes of many events column by column.

One line of code writes all events of a name, so that their attributes come in one order and differ only in the values.
The first event shows the *layout* of its first attribute: the text before the value, the kind of the value, the text
after it. The layout is compared with all other events at once, and the values of the events that match are read; then
the next attribute follows. An event without the attribute keeps its position until its next attribute comes up. Events
that match no layout are left to be parsed one by one.

So there are two readers of attributes in JSON_SYNTAX: this one for many events, and `json_records.read_pairs` for a few
and for what no layout matches. That one takes five times as long, and an ingest with it only a third longer than with
both. Both accept the same spellings as the same values: tests/otlp gives its cases to both (`each_reader`).
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import numpy as np
import polars as pl

from tracefit.inputs.otlp_wire import read_varint
from tracefit.otlp.model import scalar_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from numpy.typing import NDArray

    from tracefit.otlp.packed import Mask, PackedTexts, Positions

    _Read = Callable[[PackedTexts, Positions], "Values"]

ValueKind = Literal["int", "double", "bool", "string", "bytes"]

FEW_EVENTS = 24
"""Fewer events than this are parsed one by one in less time than it takes to set up arrays."""

_LAYOUT_ROWS = 8192
"""Events read at a time, so that their bytes stay in the processor's cache."""

_MAX_FAILURES, _FREE_ROUNDS = 8, 64
"""Events without match, and attributes tried, before reading stops for lack of progress."""

_INT64_DIGITS, _INT64_MAX = 19, np.uint64(2**63 - 1)
_LONGEST_NUMBER = 32


class Values(NamedTuple):
    """The values of one attribute in many events, arrays of shape (n,).

    Attributes:
        stops: Where each value ends.
        valid: Which values could be read; the other arrays mean nothing at the rest.
        content: The number or boolean; of a text the position where it begins, as it ends where the value ends.
    """

    stops: Positions
    valid: Mask
    content: NDArray[np.int64] | NDArray[np.float64] | Mask


class Attribute(msgspec.Struct, frozen=True):
    """The layout of one attribute.

    Attributes:
        key: Its key.
        kind: The value's kind.
        before: The text before the value.
        read: Reads the values that begin at some positions.
        skip: Finds only the ends of values that are not wanted; None if that takes as long as reading them.
        behind: The text after the value, up to the next attribute or the end of the event.
        any_byte: Offsets in `before` that may hold any byte (sizes, in protobuf).
        is_text: Whether the reader returns positions of texts, not values.
    """

    key: str
    kind: ValueKind
    before: bytes
    read: _Read
    skip: _Read | None = None
    behind: bytes = b""
    any_byte: tuple[int, ...] = ()
    is_text: bool = False


class Syntax(NamedTuple):
    """The syntax of a list of attributes: between brackets and commas (JSON_SYNTAX), or simply end to end
    (protobuf).
    """

    attribute_at: Callable[[bytes, int, int], Attribute | None]
    """Takes a text, the position of an attribute and the end; returns the layout, or None if it is unusual."""
    opening: bytes = b""
    separator: bytes = b""
    closing: bytes = b""


class _Piece(NamedTuple):
    """Values of one attribute in some of the events."""

    rows: Positions
    attribute: Attribute
    values: Values


def read_columns(
    texts: PackedTexts, rows: Positions, wanted: Collection[str], syntax: Syntax
) -> tuple[Positions, dict[str, pl.Series]]:
    """Read the attributes of events.

    Args:
        texts: The attributes of all events.
        rows: The events to read, ascending.
        wanted: Keys that become columns.
        syntax: The syntax of the attributes.

    Returns:
        The rows of the events that could be read, ascending, and a column for each wanted key. A value that
        an event lacks is null; a column with values of several kinds is text.
    """
    pieces: dict[str, list[_Piece]] = {}
    done: list[Positions] = [rows[:0]]
    for start in range(0, len(rows) if len(rows) >= FEW_EVENTS else 0, _LAYOUT_ROWS):
        reader = _LayoutReader(texts, rows[start : start + _LAYOUT_ROWS], wanted, syntax)
        done.append(reader.read())
        for piece in reader.pieces:
            pieces.setdefault(piece.attribute.key, []).append(piece)
    read = np.sort(np.concatenate(done))
    columns: dict[str, pl.Series] = {}
    for key, values in pieces.items():
        column = _column(texts, read, values)
        if column is None:  # not UTF-8: the parser finds out where
            return rows[:0], {}
        columns[key] = column.alias(key)
    return read, columns


class _LayoutReader:
    """Reads a block of events attribute by attribute; an event is done when its position reaches its end."""

    def __init__(self, texts: PackedTexts, rows: Positions, wanted: Collection[str], syntax: Syntax) -> None:
        self._texts = texts
        self._rows = rows
        self._at = texts.starts[rows]
        self._wanted = wanted
        self._syntax = syntax
        self._done: list[Positions] = []
        self.pieces: list[_Piece] = []

    def read(self) -> Positions:
        """Return the events that could be read to their end."""
        self._open()
        failures = rounds = advanced = 0
        # If each attribute advances only a few events, parsing those one by one is faster.
        while len(self._rows) and failures < _MAX_FAILURES and advanced >= (rounds - _FREE_ROUNDS) * FEW_EVENTS:
            attribute = self._syntax.attribute_at(
                self._texts.data, int(self._at[0]), int(self._texts.ends[self._rows[0]])
            )
            # Bytes are skipped, but never become a column: base64 can be written in several ways.
            is_usual = attribute is not None and not (attribute.kind == "bytes" and attribute.key in self._wanted)
            first = int(self._rows[0])
            moved = self._advance(attribute) if attribute is not None and is_usual else np.zeros(0, np.int64)
            # The first event does not match its layout: it is left to the parser, and the next one shows its layout.
            if first not in moved[:1]:
                failures += 1
                self._keep(self._rows != first)
            rounds += 1
            advanced += len(moved)
        return np.concatenate(self._done) if self._done else self._rows[:0]

    def _open(self) -> None:
        """Advance past the opening bracket, and finish the events without attributes."""
        opening, closing = self._syntax.opening, self._syntax.closing
        self._keep(self._texts.equal(self._at, opening))
        self._at = self._at + len(opening)
        ends = self._texts.ends[self._rows]
        self._finish(self._texts.equal(self._at, closing) & (self._at + len(closing) == ends))

    def _keep(self, mask: Mask) -> None:
        if not mask.all():
            self._rows, self._at = self._rows[mask], self._at[mask]

    def _finish(self, mask: Mask) -> None:
        if mask.any():
            self._done.append(self._rows[mask])
            self._keep(~mask)

    def _advance(self, attribute: Attribute) -> Positions:
        """Read an attribute of all events in which it comes next; return these events."""
        fits = self._texts.equal(self._at, attribute.before, attribute.any_byte)
        every = bool(fits.all())
        rows, at = (self._rows, self._at) if every else (self._rows[fits], self._at[fits])
        is_wanted = attribute.key in self._wanted
        read = attribute.read if is_wanted or attribute.skip is None else attribute.skip
        values = read(self._texts, at + len(attribute.before))
        valid, is_last, after = self._behind(attribute, values, self._texts.ends[rows])
        if not valid.all():
            every = False
            fits[fits] = valid  # narrows the matching events to those whose value could be read
            rows, is_last, after = rows[valid], is_last[valid], after[valid]
            values = Values(values.stops[valid], valid[valid], values.content[valid])
        if is_wanted and len(rows):
            self.pieces.append(_Piece(rows, attribute, values))
        if every:
            self._at = after
            self._finish(is_last)
        else:
            self._at = self._at.copy()  # a piece may share the old array
            self._at[fits] = after
            fits[fits] = is_last
            self._finish(fits)
        return rows

    def _behind(self, attribute: Attribute, values: Values, ends: Positions) -> tuple[Mask, Mask, Positions]:
        """Check the text after values; return valid ones, last ones, and the start of the next attribute."""
        valid, after = values.valid, values.stops
        if attribute.behind:
            valid, after = valid & self._texts.equal(after, attribute.behind), after + len(attribute.behind)
        if not self._syntax.closing:
            return valid & (after <= ends), after == ends, after
        mark = self._texts.array[after]
        is_last = (mark == self._syntax.closing[0]) & (after + 1 == ends)
        return valid & (is_last | (mark == self._syntax.separator[0])), is_last, after + 1


def _column(texts: PackedTexts, rows: Positions, pieces: Sequence[_Piece]) -> pl.Series | None:
    """Return the values of one attribute as a column, null for rows without; None if a text is not UTF-8."""
    kinds = {piece.attribute.kind for piece in pieces}
    # Pieces of one kind become one column, because each column has a fixed cost.
    groups = [[piece] for piece in pieces] if len(kinds) > 1 else [pieces]
    columns = [_column_of_a_kind(texts, group) for group in groups]
    series = [each for each in columns if each is not None]
    if len(series) < len(columns):
        return None
    column = pl.concat(map(as_text, series)) if len(kinds) > 1 else series[0]
    piece_rows = np.concatenate([piece.rows for piece in pieces])
    if len(piece_rows) == len(rows) and (piece_rows == rows).all():
        return column  # every event has the attribute, in order: the usual case
    if not len(rows):
        return column.clear()
    source = np.full(len(rows), -1, np.int64)
    at = np.searchsorted(rows, piece_rows)
    there = (at < len(rows)) & (rows[np.minimum(at, len(rows) - 1)] == piece_rows)
    source[at[there]] = np.flatnonzero(there)  # the last counts if a key occurs twice
    index = pl.Series(source)
    return column.gather(index.set(index < 0, None))


def _column_of_a_kind(texts: PackedTexts, pieces: Sequence[_Piece]) -> pl.Series | None:
    content = np.concatenate([piece.values.content for piece in pieces])
    attribute = pieces[0].attribute
    if not attribute.is_text:
        return pl.Series(content)
    text = texts.strings(content, np.concatenate([piece.values.stops for piece in pieces]) - content)
    return _doubles(text) if attribute.kind == "double" and text is not None else text


def as_text(column: pl.Series) -> pl.Series:
    """Return the values of attributes as text."""
    if column.dtype != pl.Float64:
        return column.cast(pl.String)
    distinct = column.unique()  # each number is formatted once: Python's shortest form, not that of polars
    return column.replace_strict(distinct, [scalar_text(value) for value in distinct], return_dtype=pl.String)


def _doubles(text: pl.Series) -> pl.Series | None:
    numbers = text.cast(pl.Float64, strict=False)
    # Text that is not a number, or a number beyond a double, is refused by the parser, with a reason.
    return None if numbers.null_count() or numbers.is_infinite().any() else numbers


# JSON_SYNTAX: an array of {"key": …, "value": {"intValue": …}} in either order, with any white space.

_KEY_PATTERN = r'"key" : "(?P<key{n}>[^"\\]*)"'
_VALUE_PATTERN = (
    r'"value" : \{{ "(?P<kind{n}>int|double|bool|string|bytes)Value" : '
    r'(?:"(?P<quoted{n}>(?:[^"\\]|\\.)*+)"|(?P<bare{n}>[^"{{}}\[\],:\s]+)) \}}'
)
_EITHER_ORDER = (
    rf" \{{ (?:{_KEY_PATTERN.format(n=1)} , {_VALUE_PATTERN.format(n=1)}|{_VALUE_PATTERN.format(n=2)} , "
    rf"{_KEY_PATTERN.format(n=2)}) \}} "
)
_JSON_ATTRIBUTE = re.compile(_EITHER_ORDER.replace(" ", r"\s*").encode())
"""Spaces in the patterns above stand for any white space."""


def _json_attribute(text: bytes, start: int, stop: int) -> Attribute | None:
    """Return the layout of the attribute at `start`; None if it is not a scalar in the usual spelling."""
    match = _JSON_ATTRIBUTE.match(text, start, stop)
    if match is None:
        return None
    order = "1" if match["key1"] is not None else "2"
    key, is_quoted = match[f"key{order}"], match[f"bare{order}"] is None
    value = ("quoted" if is_quoted else "bare") + order
    how = _JSON_READERS.get((match[f"kind{order}"], is_quoted))
    if how is None or not key.isascii():
        return None
    kind, read, skip = how
    before, behind = text[start : match.start(value)], text[match.end(value) : match.end()]
    return Attribute(
        key=key.decode(),
        kind=kind,
        before=before,
        read=partial(_read_doubles, end=behind[:1]) if kind == "double" else read,
        skip=skip,
        behind=behind,
        is_text=kind in ("double", "string", "bytes"),
    )


def _read_ints(texts: PackedTexts, positions: Positions) -> Values:
    """Read decimal numbers; one beyond int64, or with leading zeros, is not valid."""
    firsts = texts.array[positions]
    negative = firsts == ord("-")
    any_negative = bool(negative.any())
    starts = positions + negative if any_negative else positions
    sizes, numbers = texts.digits(starts)
    valid = (sizes == 1) | ((sizes > 0) & (texts.array[starts] != ord("0")))
    # Only 19 digits can be on either side of the limit; -2^63 itself is left to the parser.
    if (sizes >= _INT64_DIGITS).any():
        valid &= (sizes < _INT64_DIGITS) | ((sizes == _INT64_DIGITS) & (numbers <= _INT64_MAX))
    signed = numbers.view(np.int64)
    return Values(starts + sizes, valid, np.where(negative, -signed, signed) if any_negative else signed)


def _read_doubles(texts: PackedTexts, positions: Positions, end: bytes) -> Values:
    sizes = texts.sizes_until(positions, end, _LONGEST_NUMBER)
    return Values(positions + sizes, sizes > 0, positions)


def _read_bools(texts: PackedTexts, positions: Positions) -> Values:
    true, false = texts.equal(positions, b"true"), texts.equal(positions, b"false")
    sizes = np.where(true, 4, 5)
    return Values(positions + sizes, true | false, true)


def _read_strings(texts: PackedTexts, positions: Positions) -> Values:
    # Up to the quote, or to a backslash: after that the text does not match, and the parser reads the event.
    sizes = texts.sizes_until(positions, b'"\\')
    return Values(positions + sizes, sizes >= 0, positions)


def _skip_strings(texts: PackedTexts, positions: Positions) -> Values:
    """Find the ends of strings, escapes included."""
    stops = positions + texts.sizes_until(positions, b'"\\')
    escaped = np.flatnonzero(texts.array[stops] == ord("\\"))
    while len(escaped):
        stops[escaped] += 2  # the backslash, and the character it escapes
        stops[escaped] += texts.sizes_until(stops[escaped], b'"\\')
        escaped = escaped[texts.array[stops[escaped]] == ord("\\")]
    return Values(stops, stops >= positions, positions)


_JSON_READERS: dict[tuple[bytes, bool], tuple[ValueKind, _Read, _Read | None]] = {
    (b"int", True): ("int", _read_ints, None),
    (b"int", False): ("int", _read_ints, None),
    # Replaced by `_read_doubles` with the character that ends them.
    (b"double", False): ("double", _read_ints, None),
    (b"bool", False): ("bool", _read_bools, None),
    (b"string", True): ("string", _read_strings, _skip_strings),
    (b"bytes", True): ("bytes", _read_strings, _skip_strings),
}
"""How values are read and skipped, by kind and whether they are in quotes; other spellings are left to the parser."""


# Protobuf: `attributes` fields of an event, each a KeyValue: 1a SIZE 0a SIZE key 12 SIZE value.

_ATTRIBUTE_TAGS, _KEY_TAG, _VALUE_TAG = 0x1A, 0x0A, 0x12
_STRING_TAG, _BOOL_TAG, _INT_TAG, _DOUBLE_TAG, _BYTES_TAG = 0x0A, 0x10, 0x18, 0x21, 0x3A
_MORE = 0x80
"""The top bit of a varint's byte: another byte follows."""


def _protobuf_attribute(text: bytes, start: int, stop: int) -> Attribute | None:
    """Return the layout of the attribute at `start`; None if it is not a scalar as exporters write it."""
    tags = []
    at, sizes, widths = start, [], []
    for level in ("attribute", "key", "value"):
        size, inside = read_varint(text, at + 1)
        if size < 0 or inside + size > stop:
            return None
        tags.append(text[at])
        sizes.append((inside, size))
        widths.append(inside - at - 1)
        at = inside + size if level == "key" else inside
    (begin, size), (key_at, key_size), (value_at, value_size) = sizes
    if tags != [_ATTRIBUTE_TAGS, _KEY_TAG, _VALUE_TAG] or not begin + size == value_at + value_size <= stop:
        return None
    if not value_size or text[value_at] not in _PROTOBUF_READERS:
        return None
    try:
        key = text[key_at : key_at + key_size].decode()
    except UnicodeDecodeError:
        return None
    kind, read = _PROTOBUF_READERS[text[value_at]]
    before = text[start : value_at + 1]
    is_text = kind in ("string", "bytes")
    if is_text:
        read = partial(_read_sized_text, width=read_varint(text, value_at + 1)[1] - value_at - 1)
    # Sizes of the attribute and of its value differ from event to event; `_checked` compares them with the values.
    size_fields = (1, widths[0]), (len(before) - 1 - widths[2], widths[2])
    any_byte = tuple(offset + n for offset, width in size_fields for n in range(width))
    return Attribute(key, kind, before, _checked(read, len(before), *size_fields), None, b"", any_byte, is_text=is_text)


def _checked(read: _Read, literal_size: int, *sizes: tuple[int, int]) -> _Read:
    """Return a reader that also checks the sizes of attribute and value: both must end where the value ends.

    Args:
        read: Reads the values.
        literal_size: Bytes of the text before a value.
        sizes: Offset of each of the two sizes in that text, and its width in bytes.
    """

    def read_checked(texts: PackedTexts, positions: Positions) -> Values:
        values = read(texts, positions)
        valid = values.valid
        for offset, width in sizes:
            at = positions - (literal_size - offset)
            valid = valid & (at + width + _size_at(texts, at, width) == values.stops)
        return values._replace(valid=valid)

    return read_checked


def _size_at(texts: PackedTexts, positions: Positions, width: int) -> Positions:
    """Read sizes of `width` bytes each; one of another width reads as a number that matches nothing."""
    size = np.zeros(len(positions), np.int64)
    for number in range(width):
        byte = texts.array[positions + number].astype(np.int64)
        size |= (byte & (_MORE - 1)) << (7 * number)
        # Every byte but the last must announce another.
        size[(byte >= _MORE) != (number < width - 1)] = np.iinfo(np.int32).min
    return size


def _read_sized_text(texts: PackedTexts, positions: Positions, width: int) -> Values:
    sizes = _size_at(texts, positions, width)
    return Values(positions + width + sizes, sizes >= 0, positions + width)


def _read_varints(texts: PackedTexts, positions: Positions) -> Values:
    sizes, numbers = texts.varints(positions)
    return Values(positions + sizes, sizes > 0, numbers.view(np.int64))


def _read_flags(texts: PackedTexts, positions: Positions) -> Values:
    flags = texts.array[positions]
    return Values(positions + 1, flags <= 1, flags == 1)


def _read_fixed(texts: PackedTexts, positions: Positions) -> Values:
    content: NDArray[np.float64] = texts.words[positions].view(np.float64)
    return Values(positions + 8, np.ones(len(positions), np.bool_), content)


_PROTOBUF_READERS: dict[int, tuple[ValueKind, _Read]] = {
    _STRING_TAG: ("string", _read_varints),
    _BOOL_TAG: ("bool", _read_flags),
    _INT_TAG: ("int", _read_varints),
    _DOUBLE_TAG: ("double", _read_fixed),
    _BYTES_TAG: ("bytes", _read_varints),
}
"""By the tag of the field of `AnyValue`; texts by `_read_sized_text`, which needs to know how wide their size is."""

JSON_SYNTAX = Syntax(_json_attribute, b"[", b",", b"]")
PROTOBUF = Syntax(_protobuf_attribute)
