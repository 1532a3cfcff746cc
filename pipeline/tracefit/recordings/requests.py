"""Shared code of the formats of requests: their records as one frame, and its rows as spans would give them.

A request of a log takes the way of a request that a span describes: its times are attributes, in seconds, in the spelling of its
scope in `tables.dialects`. Values that the record lacks stay null.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
import polars as pl

from tracefit.inputs.framing import records
from tracefit.inputs.rejects import Reject, excerpt
from tracefit.tables.dialects import FRONT_SPAN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tracefit.inputs.blocks import Block

TokenCount = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
UnixSeconds = Annotated[float, msgspec.Meta(ge=10**9, le=2**32)]
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
NS_PER_S = 1e9
_MOST_OF_RECORD = 2**24
"""Requests in one record, for their ids."""


_T = TypeVar("_T")


def json_records(
    block: Block,
    payload: bytes,
    decode: Callable[[bytes], _T],
    what: str,
    *,
    show_values: bool,
    max_rejects: int,
) -> tuple[list[tuple[int, _T]], list[Reject]]:
    """Decode JSON lines one by one; a bad one costs itself alone.

    Args:
        block: The place of the bytes.
        payload: The bytes.
        decode: Decodes a line; raises one of `UNREADABLE` where it cannot.
        what: Reason of a reject, without the detail.
        show_values: Whether excerpts may show values.
        max_rejects: Rejects after which the rest is not decoded.

    Returns:
        Offset in the block's file and content of the lines that can be read, and the rejects.
    """
    decoded: list[tuple[int, _T]] = []
    rejects: list[Reject] = []
    for line in records(payload, "lines"):
        try:
            decoded.append((block.offset + line.offset, decode(line.payload)))
        except UNREADABLE as error:
            detail = str(error) if isinstance(error, msgspec.ValidationError) else "malformed"
            shown = excerpt(line.payload, "json", show_values=show_values)
            place = block.offset + line.offset
            rejects.append(Reject(block.source_file, place, len(line.payload), f"{what} ({detail})", shown))
            if len(rejects) >= max_rejects:
                break
    return decoded, rejects


def seconds_to_ns(seconds: pl.Expr) -> pl.Expr:
    """Return seconds as whole nanoseconds."""
    return (seconds * NS_PER_S).round().cast(pl.Int64)


def as_spans(requests: pl.DataFrame, scope: str, attributes: Iterable[str]) -> pl.DataFrame:
    """Return requests as spans, columns as `otlp.decode.SPAN_COLUMNS` as far as they are known.

    A request that was read twice has equal ids. They are no ids of a tracer, and have not their length.

    Args:
        requests: One row per request: source_offset, start_unix_ns, end_unix_ns, error (Boolean), and the attributes.
        scope: The scope whose spellings the attributes have.
        attributes: Those columns that are attributes.
    """
    number = pl.int_range(pl.len()).over("source_offset")
    return requests.select(
        "source_offset",
        trace_id=pl.col("start_unix_ns").map_batches(_digits, return_dtype=pl.String),
        span_id=(pl.col("source_offset") * _MOST_OF_RECORD + number + 1).map_batches(
            _digits, return_dtype=pl.String
        ),
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
