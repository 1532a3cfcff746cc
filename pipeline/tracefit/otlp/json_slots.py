"""The attributes of a JSON event as a template."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.otlp.model import INT64_MAX
from tracefit.otlp.templates import Found, Slot, Template, plain_column, text_column

if TYPE_CHECKING:
    from collections.abc import Callable

    from tracefit.otlp.octets import Positions
    from tracefit.otlp.texts import Texts

_LONGEST_NUMBER = 32
_LONGEST_STRING = 256
_INT64_DIGITS = 19
_MINUS, _ZERO = ord("-"), ord("0")

_SPACE = rb"[ \t\r\n]*"
_ATTRIBUTE = re.compile(
    _SPACE.join(
        [
            rb"",
            rb"\{",
            rb'"key"',
            rb":",
            rb'"(?P<key>[^"\\]*)"',
            rb",",
            rb'"value"',
            rb":",
            rb"\{",
            rb'"(?P<kind>int|double|bool|string)Value"',
            rb":",
            rb'(?:"(?P<quoted>[^"\\]*)"|(?P<bare>[^"{}\[\],: \t\r\n]+))',
            rb"\}",
            rb"\}",
            rb"(?P<more>[,\]])",
        ]
    )
)
_EMPTY = re.compile(rb"\[" + _SPACE + rb"\]")


def template_of(text: bytes) -> Template | None:
    """Take apart the attributes of one event.

    Args:
        text: A JSON array, known to be well-formed.

    Returns:
        Its template, or None if there is anything but scalars in the usual spelling.
    """
    if _EMPTY.fullmatch(text):
        return Template((), text)
    slots: list[Slot] = []
    literal_from, position, more = 0, 1, b","
    while more == b",":
        found = _ATTRIBUTE.match(text, position)
        if found is None or not found["key"].isascii():
            return None
        group = "quoted" if found["bare"] is None else "bare"
        slots.append(_slot(found["key"], found["kind"], group, text[literal_from : found.start(group)]))
        literal_from, position, more = found.end(group), found.end(), found["more"]
    return Template(tuple(slots), text[literal_from:]) if position == len(text) else None


def _slot(key: bytes, kind: bytes, group: str, literal: bytes) -> Slot:
    find = _FINDERS.get((kind, group), _find_nothing)
    column = {b"double": _double_column, b"string": text_column}.get(kind, plain_column)
    return Slot(key.decode(), literal, find, column)


def _find_ints(texts: Texts, positions: Positions) -> Found:
    """Read decimal numbers; beyond int64, or with leading zeros, they are not good."""
    firsts = texts.octets.array[positions]
    negative = firsts == _MINUS
    starts = positions
    if some_negative := bool(negative.any()):
        starts = positions + negative
        firsts = texts.octets.array[starts]
    sizes, numbers = texts.digits(starts, _INT64_DIGITS + 1)
    good = (sizes > 0) & ((firsts != _ZERO) | (sizes == 1))
    if (sizes >= _INT64_DIGITS).any():
        good &= (sizes <= _INT64_DIGITS) & (numbers <= INT64_MAX)
    signed = numbers.view(np.int64)
    return Found(
        starts + sizes, good, np.where(negative, -signed, signed) if some_negative else signed, sizes
    )


def _find_doubles(texts: Texts, positions: Positions) -> Found:
    sizes = texts.sizes_of_bare(positions, _LONGEST_NUMBER)
    return Found(positions + sizes, sizes > 0, positions, sizes)


def _double_column(texts: Texts, starts: Positions, sizes: Positions) -> pl.Series | None:
    text = texts.cut(starts, sizes)
    numbers = None if text is None else text.cast(pl.Float64, strict=False)
    # What JSON calls a number and a double cannot hold is the general decoder's to refuse.
    return None if numbers is None or numbers.null_count() or numbers.is_infinite().any() else numbers


def _find_bools(texts: Texts, positions: Positions) -> Found:
    true, false = texts.octets.equal(positions, b"true"), texts.octets.equal(positions, b"false")
    sizes = np.where(true, 4, 5)
    return Found(positions + sizes, true | false, true, sizes)


def _find_strings(texts: Texts, positions: Positions) -> Found:
    sizes = texts.sizes_of_strings(positions, _LONGEST_STRING)
    return Found(positions + sizes, sizes < _LONGEST_STRING, positions, sizes)


def _find_nothing(_: Texts, positions: Positions) -> Found:
    """Leave what is spelled unusually, such as a string for a boolean, to the parser."""
    return Found(positions, np.zeros(len(positions), np.bool_), positions, positions)


_FINDERS: dict[tuple[bytes, str], Callable[[Texts, Positions], Found]] = {
    (b"int", "quoted"): _find_ints,
    (b"int", "bare"): _find_ints,
    (b"double", "bare"): _find_doubles,
    (b"bool", "bare"): _find_bools,
    (b"string", "quoted"): _find_strings,
}
