"""A serialized protobuf event as a template."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tracefit.otlp.templates import Found, Slot, Template, plain_column, text_column
from tracefit.sources import wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from tracefit.otlp.texts import Positions, Texts


_TIME_TAG, _NAME_TAG, _ATTRIBUTE_TAG = b"\x09", b"\x12", b"\x1a"
_KEY_TAG, _VALUE_TAG = b"\x0a", b"\x12"
_STRING, _BOOL, _INT, _DOUBLE = 0x0A, 0x10, 0x18, 0x21  # tags of the scalar kinds of AnyValue
_ONE_BYTE = 0x80
_LONGEST_VARINT = 10


def template_of(event: bytes) -> Template | None:
    """Take apart one event.

    Args:
        event: A serialized `Span.Event`.

    Returns:
        Its template, or None if there is anything but a time, a name and attributes with scalars, each of less than
        128 bytes.
    """
    fields = wire.fields(event, 0, len(event)) or []
    if [field[0] for field in fields] != [1, 2] + [3] * (len(fields) - 2) or event[:1] != _TIME_TAG:
        return None
    head = Slot(None, _TIME_TAG, _find_time, plain_column)
    literal = event[9 : fields[1][3]]
    slots = [head]
    for _, _, start, stop in fields[2:]:
        slot = _slot(event[start:stop], literal + _ATTRIBUTE_TAG)
        if slot is None:
            return None
        slots.append(slot)
        literal = b""
    return Template(tuple(slots), literal)


def _slot(attribute: bytes, literal: bytes) -> Slot | None:
    fields = wire.fields(attribute, 0, len(attribute)) or []
    if [field[:2] for field in fields] != [(1, 2), (2, 2)] or len(attribute) >= _ONE_BYTE:
        return None
    (_, _, key_start, key_stop), (_, _, start, _) = fields
    key, prefix = attribute[key_start:key_stop], attribute[: start - 1]
    kind = attribute[start] if start < len(attribute) else None
    if kind not in _FINDERS or not key.isascii():
        return None
    column = text_column if kind == _STRING else plain_column
    return Slot(key.decode(), literal, partial(_find_attributes, prefix=prefix, kind=kind), column)


def _find_time(_: Texts, positions: Positions) -> Found:
    return Found(positions + 8, np.ones(len(positions), np.bool_), positions, positions)


def _find_attributes(texts: Texts, positions: Positions, prefix: bytes, kind: int) -> Found:
    """Read attributes from their size on: the key, then the value, whose sizes have to agree with it."""
    octets = texts.octets
    value_sizes = octets[positions + 1 + len(prefix)].astype(np.int64)
    starts = positions + len(prefix) + 2
    good = (
        texts.have(positions + 1, prefix)
        & (octets[positions] == len(prefix) + 1 + value_sizes)
        & (value_sizes < _ONE_BYTE)
        & (octets[starts] == kind)
    )
    stops = np.where(good, starts + value_sizes, texts.nowhere)
    values = _FINDERS[kind](
        texts, np.where(good, starts + 1, texts.nowhere), np.where(good, value_sizes - 1, 0)
    )
    return Found(stops, good & values.good, values.content, values.sizes)


def _find_ints(texts: Texts, starts: Positions, sizes: Positions) -> Found:
    good, numbers = texts.varints(starts, np.minimum(sizes, _LONGEST_VARINT))
    return Found(starts, good & (sizes > 0) & (sizes <= _LONGEST_VARINT), numbers.view(np.int64), sizes)


def _find_doubles(texts: Texts, starts: Positions, sizes: Positions) -> Found:
    return Found(starts, sizes == 8, texts.words[starts].view(np.float64), sizes)


def _find_bools(texts: Texts, starts: Positions, sizes: Positions) -> Found:
    flags = texts.octets[starts]
    return Found(starts, (sizes == 1) & (flags <= 1), flags == 1, sizes)


def _find_strings(texts: Texts, starts: Positions, sizes: Positions) -> Found:
    lengths = texts.octets[starts].astype(np.int64)
    return Found(starts, (sizes > 0) & (lengths == sizes - 1), starts + 1, lengths)


_FINDERS: dict[int, Callable[[Texts, Positions, Positions], Found]] = {
    _INT: _find_ints,
    _DOUBLE: _find_doubles,
    _BOOL: _find_bools,
    _STRING: _find_strings,
}
