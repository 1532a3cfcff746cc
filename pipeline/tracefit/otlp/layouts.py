"""Attributes of many events, read column by column.

The events of one name are written by one line of code, so that their attributes come in one order and differ in the
values alone. The first event shows how its first attribute is written: the text before the value, the value's kind, the
text behind it. These are compared with all the other events at once, and where they fit the values are read, and so on
with the next attribute. An event that lacks the attribute stays where it is until its own comes up. What fits nowhere is
left to be parsed one by one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import polars as pl

from tracefit.inputs.otlp_wire import read_varint

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from numpy.typing import NDArray

    from tracefit.otlp.packed import Mask, PackedTexts, Positions

    _Read = Callable[[PackedTexts, Positions], "Values"]

Kind = Literal["int", "double", "bool", "string", "bytes"]

FEW_EVENTS = 24
"""So few events are parsed one by one in less time than it takes to set up arrays."""

_BLOCK_ROWS = 8192
"""Events read at a time: what is looked at stays in the processor's cache."""

_MAX_FAILURES, _FREE_ROUNDS = 8, 64
"""Events that fit nowhere, and attributes tried, before the few that each of them brings forward are counted."""

_INT64_DIGITS, _INT64_MAX = 19, np.uint64(2**63 - 1)
_LONGEST_NUMBER = 32


class Values(NamedTuple):
    """The values of one attribute in many events, arrays of shape (n,).

    Attributes:
        stops: Where each value ends.
        valid: Which could be read; what else is said of the others means nothing.
        content: The number or boolean, or where a text begins that is cut out later.
        sizes: Bytes of that text.
    """

    stops: Positions
    valid: Mask
    content: NDArray[np.int64] | NDArray[np.float64] | Mask
    sizes: Positions


@dataclass(frozen=True, slots=True)
class Attribute:
    """How an attribute is written.

    Attributes:
        key: Its key.
        kind: The value's kind.
        before: The text before the value.
        read: Reads the values that begin at some positions.
        skip: Finds where they end, if nobody wants them; None if that takes as long as to read them.
        behind: The text behind the value, up to where the next attribute begins or the event ends.
        any_byte: Offsets in `before` where any byte will do (sizes, in protobuf).
        is_text: Whether the reader gives places of texts, not values.
        first: The value of the first event, where all events may have the same.
    """

    key: str
    kind: Kind
    before: bytes
    read: _Read
    skip: _Read | None = None
    behind: bytes = b""
    any_byte: tuple[int, ...] = ()
    is_text: bool = False
    first: bytes | None = None


class Syntax(NamedTuple):
    """How attributes follow each other: between brackets and commas, or simply end to end."""

    attribute_at: Callable[[bytes, int, int], Attribute | None]
    """Takes apart the attribute at a place of a text that ends at another; None if it is unusual."""
    opening: bytes = b""
    separator: bytes = b""
    closing: bytes = b""


class Columns(NamedTuple):
    """Events that could be read: which they are (ascending, shape (n,)), and a column for each wanted key."""

    rows: Positions
    columns: dict[str, pl.Series]


class _Piece(NamedTuple):
    """Values of one attribute in some of the events; `is_constant` if all of them are `attribute.first`."""

    rows: Positions
    attribute: Attribute
    values: Values
    is_constant: bool


def read_columns(
    texts: PackedTexts, rows: Positions, wanted: Collection[str], syntax: Syntax
) -> tuple[Columns, Positions]:
    """Read the attributes of events.

    Args:
        texts: The attributes of all events.
        rows: Which of them to read, ascending.
        wanted: Keys that columns are made of.
        syntax: How they are written.

    Returns:
        What could be read, and the rows that could not. A value that an event lacks is null; a column whose values are
        of several kinds is text.
    """
    pieces: dict[str, list[_Piece]] = {}
    done: list[Positions] = [rows[:0]]
    for start in range(0, len(rows) if len(rows) >= FEW_EVENTS else 0, _BLOCK_ROWS):
        walk = _Walk(texts, rows[start : start + _BLOCK_ROWS], wanted, syntax)
        done.append(walk.read())
        for piece in walk.pieces:
            pieces.setdefault(piece.attribute.key, []).append(piece)
    read = np.sort(np.concatenate(done))
    columns: dict[str, pl.Series] = {}
    for key, found in pieces.items():
        column = _column(texts, read, found)
        if column is None:  # not UTF-8: the parser finds out where
            return Columns(rows[:0], {}), rows
        columns[key] = column.alias(key)
    return Columns(read, columns), rows if not len(read) else np.setdiff1d(rows, read, assume_unique=True)


class _Walk:
    """Some events on the way through their attributes: each has a place in its text, and leaves at its end."""

    def __init__(self, texts: PackedTexts, rows: Positions, wanted: Collection[str], syntax: Syntax) -> None:
        self._texts = texts
        self._rows = rows
        self._at = texts.starts[rows]
        self._wanted = wanted
        self._syntax = syntax
        self._done: list[Positions] = []
        self.pieces: list[_Piece] = []

    def read(self) -> Positions:
        """Read as far as possible; return the events that could be read to their end."""
        self._open()
        failures = rounds = advanced = 0
        # Where each attribute brings few events forward, parsing them one by one is faster.
        while (
            len(self._rows) and failures < _MAX_FAILURES and advanced >= (rounds - _FREE_ROUNDS) * FEW_EVENTS
        ):
            attribute = self._syntax.attribute_at(
                self._texts.data, int(self._at[0]), int(self._texts.ends[self._rows[0]])
            )
            # Bytes are passed over, but not made a column of: there are several ways to write them.
            is_usual = attribute is not None and not (
                attribute.kind == "bytes" and attribute.key in self._wanted
            )
            first = int(self._rows[0])
            moved = self._advance(attribute) if attribute is not None and is_usual else np.zeros(0, np.int64)
            if first not in moved[:1]:
                failures += 1
                self._keep(self._rows != first)
            rounds += 1
            advanced += len(moved)
        return np.concatenate(self._done) if self._done else self._rows[:0]

    def _open(self) -> None:
        """Pass the opening bracket, and let those go that have nothing in it."""
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
        """Read an attribute where it comes next; return the events that have it."""
        fits = self._texts.equal(self._at, attribute.before, attribute.any_byte)
        every = bool(fits.all())
        rows, at = (self._rows, self._at) if every else (self._rows[fits], self._at[fits])
        values, is_constant = self._read(attribute, at + len(attribute.before))
        valid, is_last, after = self._behind(attribute, values, self._texts.ends[rows])
        if not valid.all():
            every = False
            fits[fits] = valid  # of those that fit, the ones whose value could be read
            rows, is_last, after = rows[valid], is_last[valid], after[valid]
            values = Values(values.stops[valid], valid[valid], values.content[valid], values.sizes[valid])
        if attribute.key in self._wanted and len(rows):
            self.pieces.append(_Piece(rows, attribute, values, is_constant))
        if every:
            self._at = after
            self._finish(is_last)
        else:
            self._at = self._at.copy()
            self._at[fits] = after
            fits[fits] = is_last
            self._finish(fits)
        return rows

    def _read(self, attribute: Attribute, at: Positions) -> tuple[Values, bool]:
        """Read values; say too whether all are as the first."""
        is_wanted = attribute.key in self._wanted
        if attribute.first is not None:
            # Types, phases and the like are the same in all events of a name, and quickly known to be.
            same = self._texts.equal(at, attribute.first + attribute.behind)
            if same.all():
                return Values(
                    at + len(attribute.first), same, at, np.full(len(at), len(attribute.first))
                ), True
        read = attribute.read if is_wanted or attribute.skip is None else attribute.skip
        return read(self._texts, at), False

    def _behind(self, attribute: Attribute, values: Values, ends: Positions) -> tuple[Mask, Mask, Positions]:
        """Check what comes behind values: which are valid, which are the last, and where the next attribute begins."""
        valid, after = values.valid, values.stops
        if attribute.behind:
            valid, after = valid & self._texts.equal(after, attribute.behind), after + len(attribute.behind)
        if not self._syntax.closing:
            return valid & (after <= ends), after == ends, after
        mark = self._texts.array[after]
        is_last = (mark == self._syntax.closing[0]) & (after + 1 == ends)
        return valid & (is_last | (mark == self._syntax.separator[0])), is_last, after + 1


def _column(texts: PackedTexts, rows: Positions, pieces: Sequence[_Piece]) -> pl.Series | None:
    """Put the values of one attribute together, null for rows without; None if a text is not UTF-8."""
    kinds = {piece.attribute.kind for piece in pieces}
    # Pieces of a kind are made a column together: each costs something whatever its size.
    groups = [[piece] for piece in pieces] if len(kinds) > 1 else [pieces]
    series: list[pl.Series] = []
    for group in groups:
        column = _column_of_a_kind(texts, group)
        if column is None:
            return None
        series.append(column)
    if len(kinds) > 1:
        series = [_as_text(each) for each in series]
    column = series[0] if len(series) == 1 else pl.concat(series)
    own = np.concatenate([piece.rows for group in groups for piece in group])
    if len(own) == len(rows) and (own == rows).all():
        return column
    place = np.full(len(rows), -1, np.int64)
    at = np.searchsorted(rows, own)
    there = (at < len(rows)) & (rows[np.minimum(at, max(len(rows) - 1, 0))] == own) if len(rows) else at < 0
    place[at[there]] = np.flatnonzero(there)  # of a key that is there twice, the last counts
    index = pl.Series(place)
    return column.gather(index.set(index < 0, None))


def _column_of_a_kind(texts: PackedTexts, pieces: Sequence[_Piece]) -> pl.Series | None:
    content = np.concatenate([piece.values.content for piece in pieces])
    attribute = pieces[0].attribute
    if not attribute.is_text:
        return pl.Series(content)
    if all(piece.is_constant and piece.attribute.first == attribute.first for piece in pieces):
        text = texts.strings(content[:1], pieces[0].values.sizes[:1])
        text = None if text is None else text.new_from_index(0, len(content))
    else:
        text = texts.strings(content, np.concatenate([piece.values.sizes for piece in pieces]))
    return _doubles(text) if attribute.kind == "double" and text is not None else text


def _as_text(column: pl.Series) -> pl.Series:
    if column.dtype == pl.Float64:
        return pl.Series([repr(value) for value in column.to_list()], dtype=pl.String)
    return column.cast(pl.String)


def _doubles(text: pl.Series) -> pl.Series | None:
    numbers = text.cast(pl.Float64, strict=False)
    # What JSON calls a number and a double cannot hold is for the parser to refuse.
    return None if numbers.null_count() or numbers.is_infinite().any() else numbers


# JSON: an array of {"key": …, "value": {"intValue": …}} in either order, with any white space.

_KEY = r'"key" : "(?P<key{n}>[^"\\]*)"'
_VALUE = (
    r'"value" : \{{ "(?P<kind{n}>int|double|bool|string|bytes)Value" : '
    r'(?:"(?P<quoted{n}>(?:[^"\\]|\\.)*+)"|(?P<bare{n}>[^"{{}}\[\],:\s]+)) \}}'
)
_EITHER_ORDER = (
    rf" \{{ (?:{_KEY.format(n=1)} , {_VALUE.format(n=1)}|{_VALUE.format(n=2)} , {_KEY.format(n=2)}) \}} "
)
_JSON_ATTRIBUTE = re.compile(_EITHER_ORDER.replace(" ", r"\s*").encode())
"""Spaces in the patterns above stand for any white space."""


def _json_attribute(text: bytes, start: int, stop: int) -> Attribute | None:
    """Take the attribute apart that begins at `start`; None if it is no scalar in the usual spelling."""
    found = _JSON_ATTRIBUTE.match(text, start, stop)
    if found is None:
        return None
    order = "1" if found["key1"] is not None else "2"
    key, is_quoted = found[f"key{order}"], found[f"bare{order}"] is None
    value = ("quoted" if is_quoted else "bare") + order
    how = _JSON_READERS.get((found[f"kind{order}"], is_quoted))
    if how is None or not key.isascii():
        return None
    kind, read, skip = how
    before, behind = text[start : found.start(value)], text[found.end(value) : found.end()]
    is_string = read is _read_strings
    return Attribute(
        key=key.decode(),
        kind=kind,
        before=before,
        read=partial(_read_doubles, end=behind[:1]) if kind == "double" else read,
        skip=skip,
        behind=behind,
        is_text=is_string or kind == "double",
        first=found[value] if is_string and b"\\" not in found[value] else None,
    )


def _read_ints(texts: PackedTexts, positions: Positions) -> Values:
    """Read decimal numbers; what is beyond int64, or has leading zeros, is not valid."""
    firsts = texts.array[positions]
    negative = firsts == ord("-")
    any_negative = bool(negative.any())
    starts = positions + negative if any_negative else positions
    sizes, numbers = texts.digits(starts)
    valid = (sizes == 1) | ((sizes > 0) & (texts.array[starts] != ord("0")))
    if (sizes >= _INT64_DIGITS).any():
        valid &= (sizes < _INT64_DIGITS) | ((sizes == _INT64_DIGITS) & (numbers <= _INT64_MAX))
    signed = numbers.view(np.int64)
    return Values(
        starts + sizes, valid, np.where(negative, -signed, signed) if any_negative else signed, sizes
    )


def _read_doubles(texts: PackedTexts, positions: Positions, end: bytes) -> Values:
    sizes = texts.sizes_until(positions, end, _LONGEST_NUMBER)
    return Values(positions + sizes, sizes > 0, positions, sizes)


def _read_bools(texts: PackedTexts, positions: Positions) -> Values:
    true, false = texts.equal(positions, b"true"), texts.equal(positions, b"false")
    sizes = np.where(true, 4, 5)
    return Values(positions + sizes, true | false, true, sizes)


def _read_strings(texts: PackedTexts, positions: Positions) -> Values:
    # Up to the quote, or to a backslash, behind which the text then does not fit.
    sizes = texts.sizes_until(positions, b'"\\')
    return Values(positions + sizes, sizes >= 0, positions, sizes)


def _skip_strings(texts: PackedTexts, positions: Positions) -> Values:
    """Find where strings end, those with escapes too."""
    stops = positions + texts.sizes_until(positions, b'"\\')
    escaped = np.flatnonzero(texts.array[stops] == ord("\\"))
    while len(escaped):
        stops[escaped] += 2
        stops[escaped] += texts.sizes_until(stops[escaped], b'"\\')
        escaped = escaped[texts.array[stops[escaped]] == ord("\\")]
    return Values(stops, stops >= positions, positions, stops)


_JSON_READERS: dict[tuple[bytes, bool], tuple[Kind, _Read, _Read | None]] = {
    (b"int", True): ("int", _read_ints, None),
    (b"int", False): ("int", _read_ints, None),
    (b"double", False): (
        "double",
        _read_ints,
        None,
    ),  # by `_read_doubles`, which needs to know what ends them
    (b"bool", False): ("bool", _read_bools, None),
    (b"string", True): ("string", _read_strings, _skip_strings),
    (b"bytes", True): ("bytes", _read_strings, _skip_strings),
}
"""How values are read and skipped, by kind and whether they are in quotes; other spellings are left to the parser."""


# Protobuf: `attributes` fields of an event, each a KeyValue: 1a SIZE 0a SIZE key 12 SIZE value.

_ATTRIBUTE_TAG, _KEY_TAG, _VALUE_TAG = 0x1A, 0x0A, 0x12
_STRING_TAG, _BOOL_TAG, _INT_TAG, _DOUBLE_TAG, _BYTES_TAG = 0x0A, 0x10, 0x18, 0x21, 0x3A
_MORE = 0x80
"""The top bit of a byte of a size: another byte of it follows."""


def _protobuf_attribute(text: bytes, start: int, stop: int) -> Attribute | None:
    """Take the attribute apart that begins at `start`; None if it is no scalar as exporters write it."""
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
    if tags != [_ATTRIBUTE_TAG, _KEY_TAG, _VALUE_TAG] or not begin + size == value_at + value_size <= stop:
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
    own = (1, widths[0]), (len(before) - 1 - widths[2], widths[2])
    any_byte = tuple(offset + n for offset, width in own for n in range(width))
    return Attribute(
        key, kind, before, _checked(read, len(before), *own), None, b"", any_byte, is_text=is_text
    )


def _checked(read: _Read, literal_size: int, *sizes: tuple[int, int]) -> _Read:
    """Read values, and check that the sizes before them, of the attribute and of the value, end where they do.

    Args:
        read: Reads the values.
        literal_size: Bytes of the text before them.
        sizes: Where in that text each of the two sizes is, and how many bytes it takes.
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
    """Read sizes that take `width` bytes each; a size of another width gives one that fits nothing."""
    size = np.zeros(len(positions), np.int64)
    for place in range(width):
        byte = texts.array[positions + place].astype(np.int64)
        size |= (byte & (_MORE - 1)) << (7 * place)
        size[(byte >= _MORE) != (place < width - 1)] = np.iinfo(np.int32).min
    return size


def _read_sized_text(texts: PackedTexts, positions: Positions, width: int) -> Values:
    sizes = _size_at(texts, positions, width)
    return Values(positions + width + sizes, sizes >= 0, positions + width, sizes)


def _read_varints(texts: PackedTexts, positions: Positions) -> Values:
    sizes, numbers = texts.varints(positions)
    return Values(positions + sizes, sizes > 0, numbers.view(np.int64), sizes)


def _read_flags(texts: PackedTexts, positions: Positions) -> Values:
    flags = texts.array[positions]
    return Values(positions + 1, flags <= 1, flags == 1, positions)


def _read_fixed(texts: PackedTexts, positions: Positions) -> Values:
    content: NDArray[np.float64] = texts.words[positions].view(np.float64)
    return Values(positions + 8, np.ones(len(positions), np.bool_), content, positions)


_PROTOBUF_READERS: dict[int, tuple[Kind, _Read]] = {
    _STRING_TAG: ("string", _read_varints),
    _BOOL_TAG: ("bool", _read_flags),
    _INT_TAG: ("int", _read_varints),
    _DOUBLE_TAG: ("double", _read_fixed),
    _BYTES_TAG: ("bytes", _read_varints),
}
"""By the tag of the field of `AnyValue`; texts by `_read_sized_text`, which needs to know how wide their size is."""

JSON = Syntax(_json_attribute, b"[", b",", b"]")
PROTOBUF = Syntax(_protobuf_attribute)
