"""Shared code of the formats of requests: reading the parts of a block, and requests as spans.

A request of a log becomes a span: its times are attributes, in seconds, in the spelling of its scope in
`tables.dialects`. Values that the record lacks stay null.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, TypeAlias, TypeVar

import msgspec
import polars as pl

from tracefit.inputs.framing import BOM, records
from tracefit.inputs.rejects import TooManyRejectsError, keys_in
from tracefit.recordings.blocks import MOST_S, UNREADABLE_RECORD, fault_of
from tracefit.tables.dialects import FRONT_SPAN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tracefit.inputs.blocks import Block
    from tracefit.inputs.rejects import Rejects

TokenCount = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
UnixSeconds = Annotated[float, msgspec.Meta(ge=10**9, le=MOST_S)]
_MOST_OF_RECORD = 2**24
"""Requests in one record, for their ids."""

# A text that does not end is one match too, so that no byte is read twice.
_NOT_FINITE = re.compile(rb'"(?:[^"\\]|\\.)*+"?|-?\b(?:NaN|Infinity)\b', re.DOTALL)

_T = TypeVar("_T")
Parts: TypeAlias = "Iterable[tuple[int, bytes, Callable[[bytes], _T]]]"
"""Offset and bytes of each part of a block, and the function that reads it or raises one of `UNREADABLE_RECORD`."""


def from_json(text: bytes, kind: type[_T]) -> _T:
    """Return a JSON value. `NaN` and `Infinity`, which Python writes and JSON lacks, are null: a field that is not read
    costs nothing.

    Raises:
        msgspec.DecodeError: It is another value, or not JSON.
    """
    text = text.removeprefix(BOM)
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        if b"NaN" not in text and b"Infinity" not in text:
            raise
        finite = _NOT_FINITE.sub(lambda match: match[0] if match[0][:1] == b'"' else b"null", text)
        return msgspec.json.decode(finite, type=kind)


def lines_of(payload: bytes, read: Callable[[bytes], _T]) -> Parts[_T]:
    """Return the lines of a block as parts that one function reads."""
    return ((line.offset, line.payload, read) for line in records(payload, "lines"))


def read_parts(
    block: Block, payload: bytes, parts: Callable[[bytes], Parts[_T]], what: str, rejects: Rejects
) -> list[tuple[int, _T]]:
    """Return offset and content of the parts of a block that can be read; only bad parts are rejected.

    Args:
        block: The position of the bytes.
        payload: The bytes.
        parts: Divides them; raises one of `UNREADABLE_RECORD` if that is impossible.
        what: Reason of a reject, without the detail.
        rejects: Receives the bad parts.
    """
    contents: list[tuple[int, _T]] = []
    with suppress(TooManyRejectsError):
        try:
            for offset, part, read in parts(payload):
                try:
                    contents.append((block.offset + offset, read(part)))
                except UNREADABLE_RECORD as error:
                    rejects.add(offset, part, f"{what} ({fault_of(error)})")
        except UNREADABLE_RECORD as error:
            rejects.add(0, payload, f"{what} ({fault_of(error)})")
    return contents


def first_keys(payload: bytes, parts: Callable[[bytes], Parts[_T]]) -> list[str]:
    """Return the keys of the first part of a block that can be read; see `keys_in`."""
    with suppress(*UNREADABLE_RECORD):
        for _, part, read in parts(payload):
            with suppress(*UNREADABLE_RECORD):
                read(part)
                return keys_in(part)
    return []


def seconds_to_ns(seconds: pl.Expr) -> pl.Expr:
    """Return seconds as whole nanoseconds."""
    return (seconds * 1e9).round().cast(pl.Int64)


def as_spans(
    requests: pl.DataFrame, scope: str, attributes: Iterable[str], number: pl.Expr | None = None
) -> pl.DataFrame:
    """Return requests as spans, columns as `otlp.decode.SPAN_COLUMNS` as far as the log has them.

    A request that is read twice has the same ids. They are not ids of a tracer and have another length.

    Args:
        requests: One row per request: source_offset, start_unix_ns, end_unix_ns, error (Boolean), and the attributes.
        scope: The scope whose spellings the attributes have.
        attributes: Those columns that are attributes.
        number: The number of each request, for its id; its place in the file if not given.
    """
    in_record = pl.int_range(pl.len()).over("source_offset")
    position = pl.col("source_offset") * _MOST_OF_RECORD + in_record
    span_number = (position if number is None else number) + 1
    return requests.select(
        "source_offset",
        trace_id=pl.col("start_unix_ns").map_batches(_digits, return_dtype=pl.String),
        span_id=span_number.map_batches(_digits, return_dtype=pl.String),
        scope=pl.lit(scope),
        name=pl.lit(FRONT_SPAN),
        start_unix_ns="start_unix_ns",
        end_unix_ns="end_unix_ns",
        status_code=pl.when("error").then(pl.lit("ERROR")).otherwise(pl.lit("OK")),
        **{name: pl.col(name).cast(pl.String) for name in attributes},
    )


def _digits(numbers: pl.Series) -> pl.Series:
    text = numbers.to_numpy().astype(">u8").tobytes().hex()
    return pl.Series([text[at : at + 16] for at in range(0, len(text), 16)], dtype=pl.String)
