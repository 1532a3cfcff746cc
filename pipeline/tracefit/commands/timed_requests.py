"""Read requests with their times: a log of a client, traces, a table of `requests`, CSV of requests, or rates per
hour.
"""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import polars as pl

from tracefit.commands.ingest import ingest
from tracefit.errors import DataError, TracefitError, UsageError
from tracefit.options import LoadOptions, named
from tracefit.replay.day import DayLoad
from tracefit.tables.store import TableStore
from tracefit.text import count, number

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_TIME, _PROMPT, _OUTPUT, _CACHED_TOKENS, _RATE_COLUMN = (
    "time",
    "prompt tokens",
    "output tokens",
    "cached tokens",
    "rate",
)
COLUMN_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    _TIME: ("timestamp", "arrival_s", "arrival_ns"),
    _PROMPT: ("prompt_tokens", "request tokens", "contexttokens"),
    _OUTPUT: ("output_tokens", "response tokens", "generatedtokens"),
    _CACHED_TOKENS: ("cached_prompt_tokens", "cached_tokens"),
}
"""Names of columns, in small letters: ours, those of the BurstGPT traces, and those of Azure's traces of LLM
inference."""
_RATE_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    **COLUMN_SPELLINGS,
    _TIME: ("hour",),
    _RATE_COLUMN: ("rate",),
}
_HOUR_S = 3600.0
_MOST_VALUE = 1e9
"""Largest rate or length that is one."""
_MOST_REQUESTS = 10_000_000
"""Requests of rates per hour, over the whole file: a fifth of a gigabyte."""


class TimedRequests(msgspec.Struct, frozen=True):
    """Requests that were read.

    Attributes:
        load: The requests that can be used, at least one.
        rows: Rows of the file.
        odd: Reason to rows that are left out for it.
        has_rates: Whether the file has rates, and the requests are drawn.
    """

    load: DayLoad
    rows: int
    odd: dict[str, int]
    has_rates: bool = False


def read_timed_requests(path: Path, lengths: Mapping[str, int | None]) -> TimedRequests:
    """Read requests with their times.

    Args:
        path: The file.
        lengths: `prompt` and `output` of every request, null where the file has them.

    Raises:
        UsageError: The file cannot be read, or lacks a column.
        DataError: No row is usable.
    """
    frame, lacks = _table(path), list[str]()
    if frame is not None:
        given = {_PROMPT: lengths.get("prompt"), _OUTPUT: lengths.get("output")}
        columns = _columns(frame, given, _RATE_SPELLINGS if _has_rates(frame) else COLUMN_SPELLINGS)
        lacks = [name for name, column in columns.items() if column is None and name != _CACHED_TOKENS]
    if frame is None or (lacks and _is_text(path)):
        frame = _ingested(path, None if frame is None else f"has no column of {lacks[0]}; {_known_columns()}")
        columns, lacks = _columns(frame, {}, COLUMN_SPELLINGS), []
    if lacks:
        raise UsageError(f"has no column of {lacks[0]}", where=str(path), hint=_known_columns())
    known = {name: column for name, column in columns.items() if column is not None}
    rows, odd = _usable(known, is_hours=_RATE_COLUMN in known)
    if not rows.height:
        counted = ", ".join(f"{reason}: {count(n)}" for reason, n in odd.items()) or "it is empty"
        raise DataError(f"no request is usable ({counted})", where=str(path))
    if _RATE_COLUMN in known:
        return TimedRequests(_drawn(rows, path), frame.height, odd, has_rates=True)
    ordered = rows.sort(_TIME)
    load = DayLoad(*(ordered[name].to_numpy() for name in (_TIME, _PROMPT, _OUTPUT, _CACHED_TOKENS)))
    return TimedRequests(load, frame.height, odd)


def _known_columns() -> str:
    return "columns are timestamp, prompt_tokens and output_tokens, or hour, rate, prompt_tokens and output_tokens"


def _is_text(path: Path) -> bool:
    return ".csv" in [s.lower() for s in path.suffixes]


def _table(path: Path) -> pl.DataFrame | None:
    """Return the rows of a CSV file, all as text, or of a Parquet file; null for a file of another kind."""
    try:
        if path.suffix.lower() == ".parquet":
            return pl.read_parquet(path)
        if not _is_text(path):
            return None
        return pl.read_csv(path, infer_schema=False, truncate_ragged_lines=True, encoding="utf8-lossy")
    except OSError as error:
        raise UsageError(f"cannot be read ({error.strerror or 'no such file'})", where=str(path)) from error
    except pl.exceptions.NoDataError:
        return pl.DataFrame()
    except pl.exceptions.PolarsError as error:
        raise UsageError(f"cannot be read ({str(error)[:200]})", where=str(path)) from error


def _ingested(path: Path, otherwise: str | None) -> pl.DataFrame:
    """Return the requests of a log of a client, or of traces.

    Args:
        path: The file, or a folder.
        otherwise: The fault of the file, if it is neither.
    """
    if not path.exists():
        choice = f"give {named(LoadOptions, 'arrivals')} poisson, traced, or a file"
        raise UsageError("cannot be read (no such file)", where=str(path), hint=choice)
    names = ["arrival_ns", "prompt_tokens", "output_tokens", "cached_prompt_tokens"]
    try:
        with tempfile.TemporaryDirectory(prefix="tracefit-") as folder:
            ingest(path, folder)
            store = TableStore(folder)
            found = store.read("requests", store.runs(), names)
    except TracefitError:
        if otherwise is None:
            raise
        raise UsageError(otherwise, where=str(path)) from None
    if not found.height:
        raise UsageError(otherwise or "has no requests", where=str(path))
    return found


def _has_rates(frame: pl.DataFrame) -> bool:
    return {"hour", "rate"} <= {_plain(name) for name in frame.columns}


def _plain(name: str) -> str:
    return name.strip().lower()


def _columns(
    frame: pl.DataFrame, given: Mapping[str, int | None], spellings: Mapping[str, tuple[str, ...]]
) -> dict[str, pl.Series | None]:
    """Return columns by what they hold; null where the file lacks one."""
    by_name = {_plain(name): name for name in reversed(frame.columns)}
    found: dict[str, pl.Series | None] = {}
    for what, names in spellings.items():
        name = next((by_name[n] for n in names if n in by_name), None)
        if (fixed := given.get(what)) is not None:
            found[what] = pl.Series([fixed], dtype=pl.Int64).new_from_index(0, frame.height)
        else:
            found[what] = None if name is None else frame[name]
    return found


def _usable(columns: Mapping[str, pl.Series], *, is_hours: bool) -> tuple[pl.DataFrame, dict[str, int]]:
    """Return the rows with a time and lengths as numbers, and how many others there are, by the first thing that is odd
    in each.
    """
    least = {_TIME: 0.0, _RATE_COLUMN: 0.0, _PROMPT: 1.0, _OUTPUT: 1.0}
    values = {
        name: _seconds(column, is_hours=is_hours) if name == _TIME else _numbers(column)
        for name, column in columns.items()
    }
    frame = pl.DataFrame({name: value.rename(name) for name, value in values.items()})
    is_missing = {name: _is_missing(columns[name]) for name in least if name in columns}
    reason = pl.coalesce(
        *(
            pl.when(is_missing[name])
            .then(pl.lit(f"no {name}"))
            .when(pl.col(name).is_null())
            .then(pl.lit(f"{name} not a number" if name != _TIME else "time not a number or a date"))
            .when(pl.col(name) < least[name])
            .then(pl.lit(f"{name} below {least[name]:g}"))
            .when((pl.col(name) > _MOST_VALUE) & (name != _TIME))
            .then(pl.lit(f"{name} above {_MOST_VALUE:,.0f}"))
            for name in is_missing
        )
    )
    frame = frame.with_columns(reason=reason)
    counts = frame["reason"].drop_nulls().value_counts().sort("count", "reason", descending=[True, False])
    good = frame.filter(pl.col("reason").is_null())
    cached = pl.col(_CACHED_TOKENS).fill_null(0) if _CACHED_TOKENS in frame.columns else pl.lit(0.0)
    good = good.with_columns(cached.clip(0, pl.col(_PROMPT) - 1).alias(_CACHED_TOKENS))
    lengths = pl.col(_PROMPT, _OUTPUT, _CACHED_TOKENS).round().cast(pl.Int64)
    return good.with_columns(lengths), dict(counts.iter_rows())


def _is_missing(column: pl.Series) -> pl.Series:
    if column.dtype == pl.String:
        return (column.str.strip_chars() == "").fill_null(value=True)
    return column.is_null()


def _numbers(column: pl.Series) -> pl.Series:
    """Return finite numbers, null for what is not one."""
    text = column.str.strip_chars() if column.dtype == pl.String else column
    if not (text.dtype == pl.String or text.dtype.is_numeric()):
        return pl.repeat(None, len(column), dtype=pl.Float64, eager=True)
    found = text.cast(pl.Float64, strict=False)
    return pl.select(pl.when(found.is_finite()).then(found)).to_series()


_DATE_AND_TIME = r"^\s*(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d)(:\d\d(?:\.\d+)?)?\s*(?:Z|UTC|([+-]\d\d):?(\d\d))?\s*$"


def _seconds(column: pl.Series, *, is_hours: bool) -> pl.Series:
    """Return times in s: numbers of seconds or of hours, or dates since 1970; of a column with both, those of the more
    frequent kind.
    """
    if column.dtype == pl.Datetime:
        return column.dt.epoch("us") / 1e6
    unit = _HOUR_S if is_hours else 1.0 / (1e9 if _plain(column.name).endswith("_ns") else 1.0)
    plain = _numbers(column) * unit
    if column.dtype != pl.String or plain.null_count() == 0:
        return plain
    parts = [column.str.extract(_DATE_AND_TIME, group) for group in range(1, 6)]
    text = parts[0] + "T" + parts[1] + parts[2].fill_null(":00")
    date = text.str.to_datetime("%Y-%m-%dT%H:%M:%S%.f", strict=False, time_unit="us").dt.epoch("us") / 1e6
    hours, minutes = (part.cast(pl.Float64, strict=False).fill_null(0.0) for part in parts[3:])
    ahead = pl.select(pl.when(parts[3].str.starts_with("-")).then(hours * 60 - minutes).otherwise(hours * 60 + minutes))
    date = date - ahead.to_series() * 60
    return date if date.null_count() < plain.null_count() else plain


def _drawn(rows: pl.DataFrame, path: Path) -> DayLoad:
    """Draw requests that come at random at the rate of each hour, with its lengths."""
    expected = float(rows[_RATE_COLUMN].sum()) * _HOUR_S
    if expected > _MOST_REQUESTS:
        raise UsageError(
            f"its rates are of {number(expected)} requests, {count(_MOST_REQUESTS)} at most can be planned for",
            where=str(path),
            hint="divide the rates, and multiply the servers",
        )
    rng = np.random.default_rng(0)
    counts = rng.poisson(rows[_RATE_COLUMN].to_numpy() * _HOUR_S)
    if not counts.sum():
        raise DataError("no request is usable (all rates are 0)", where=str(path))
    at_s = np.repeat(rows[_TIME].to_numpy(), counts) + _HOUR_S * rng.random(int(counts.sum()))
    order = np.argsort(at_s)
    lengths = (np.repeat(rows[name].to_numpy(), counts)[order] for name in (_PROMPT, _OUTPUT, _CACHED_TOKENS))
    return DayLoad(at_s[order], *lengths)
