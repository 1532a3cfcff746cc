"""Attribute values as arrays to columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from tracefit.otlp.octets import text_column
from tracefit.otlp.proto_attributes import BOOL, DOUBLE, EMPTY, STRING, Codes, Values
from tracefit.otlp.proto_walk import UnusualRecordsError
from tracefit.otlp.values import scalar_text

if TYPE_CHECKING:
    from tracefit.otlp.octets import Octets, Positions


def column_of(octets: Octets, values: Values) -> pl.Series:
    """Return values as a column of their kind; as text if that is not one, or they are empty.

    Raises:
        NotTextError: If a string is not UTF-8.
    """
    kinds = _kinds(values)
    if len(kinds) == 1:
        return _of_one_kind(octets, values, kinds[0])
    if len(kinds) == 2 and kinds[0] == EMPTY:
        is_there = values.kind != EMPTY
        column = _of_one_kind(octets, values[is_there], kinds[1])
        return spread(column, np.where(is_there, is_there.cumsum() - 1, -1))
    return texts_of(octets, values)


def texts_of(octets: Octets, values: Values) -> pl.Series:
    """Return values of any kinds as text, as `scalar_text` writes it.

    Raises:
        NotTextError: If a string is not UTF-8.
    """
    parts, places = [pl.Series([], dtype=pl.String)], []
    for kind in _kinds(values):
        places.append(np.flatnonzero(values.kind == kind))
        parts.append(_as_text(_of_one_kind(octets, values[places[-1]], kind)))
    if len(places) <= 1:
        return parts[-1]
    order = np.empty(len(values), np.int64)
    order[np.concatenate(places)] = np.arange(len(values))
    return pl.concat(parts).gather(order)


def spread(column: pl.Series, rows: Positions) -> pl.Series:
    """Return the given rows of a column, null for those below 0."""
    return column.gather(pl.Series(np.where(rows < 0, 0, rows)).set(pl.Series(rows < 0), None))


def unless_zero(numbers: Positions) -> pl.Series:
    """Return numbers as a column, null for 0."""
    column = pl.Series(numbers)
    return column if numbers.all() else column.set(pl.Series(numbers == 0), None)


def _kinds(values: Values) -> list[int]:
    kind = values.kind
    if len(kind) and (kind == kind[0]).all():
        return [int(kind[0])]
    return [int(each) for each in np.unique(kind)]


def _of_one_kind(octets: Octets, values: Values, kind: int) -> pl.Series:
    if kind == STRING:
        return text_column(octets.cut(values.start, values.size), values.size)
    if kind == EMPTY:
        return pl.Series([None], dtype=pl.String).new_from_index(0, len(values))
    if kind == BOOL:
        return pl.Series(values.number != 0)
    return pl.Series(values.number.view(np.float64 if kind == DOUBLE else np.int64))


def _as_text(column: pl.Series) -> pl.Series:
    if column.dtype == pl.Float64:
        is_finite = bool(column.is_finite().all())
        return pl.Series(list(map(repr if is_finite else scalar_text, column.to_list())), dtype=pl.String)
    return column.cast(pl.String)


def texts(codes: Codes, code_of: Positions, record: Positions) -> list[str]:
    """Return the texts of codes.

    Raises:
        UnusualRecordsError: If some are not UTF-8.
    """
    good = [_is_text(text) for text in codes.texts]
    if not all(good):
        raise UnusualRecordsError(record[~np.array(good)[code_of]])
    return [text.decode() for text in codes.texts]


def not_texts(octets: Octets, record: Positions, starts: Positions, sizes: Positions) -> Positions:
    """Return the records of those stretches that are not UTF-8."""
    stretches = zip(record.tolist(), starts.tolist(), sizes.tolist(), strict=True)
    bad = [number for number, start, size in stretches if not _is_text(octets.data[start : start + size])]
    return np.array(bad, np.int64)


def records_of_not_texts(octets: Octets, record: Positions, values: Values) -> Positions:
    """Return the records of those strings that are not UTF-8; `record` is by owner."""
    strings = values[values.kind == STRING]
    return not_texts(octets, record[strings.owner], strings.start, strings.size)


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
