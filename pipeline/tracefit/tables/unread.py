"""Requests of a file that is read, with lengths or times that all stay unread: the file names them in another way.

The rule holds for every reader of requests, because each makes spans: the attributes that `dialects` declares for a
scope are the values that its requests need.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import polars as pl

from tracefit.tables.dialects import REQUEST_RULES
from tracefit.text import plural, unread

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from tracefit.tables.dialects import Spelling

_LENGTHS = {"prompt tokens": "api_prompt_tokens", "output tokens": "api_completion_tokens"}
UNREAD_LENGTHS, UNREAD_TIMES = tuple(_LENGTHS), "times"
_NEEDS = (*UNREAD_LENGTHS, UNREAD_TIMES)

VALUES_READ: dict[str, Any] = {
    "file": pl.UInt32,
    "scope": pl.String,
    "requests": pl.Int64,
    **dict.fromkeys(_NEEDS, pl.Int64),
    "keys": pl.String,
}
"""Columns of `values_read`."""

_MOST_FILES = 16
"""How many files a run names."""

_RULES: dict[str, list[Spelling]] = defaultdict(list)
for _rule in REQUEST_RULES:
    if any(r.scope == _rule.scope and r.column in _LENGTHS.values() for r in REQUEST_RULES):
        _RULES[_rule.scope or ""].append(_rule)


def _gives(rule: Spelling, need: str) -> bool:
    """Return whether the value of a rule is a length, or a time beside those of the request's own span."""
    if need != UNREAD_TIMES:
        return rule.column == _LENGTHS[need]
    return rule.column.endswith("_us") if rule.attribute else rule.span not in _own_spans(rule.scope)


def _own_spans(scope: str | None) -> set[str | None]:
    return {rule.span for rule in _RULES[scope or ""] if rule.attribute}


def _is_there(need: str) -> pl.Expr:
    """Return whether a span gives its request what it needs."""
    return pl.any_horizontal(
        (pl.col("scope") == scope)
        & (pl.col(rule.attribute).is_not_null() if rule.attribute else pl.col("name") == rule.span)
        for scope, rules in _RULES.items()
        for rule in rules
        if _gives(rule, need)
    ).fill_null(value=False)


def _is_request() -> pl.Expr:
    """Return whether a span is the one of a request, which did not fail: a failed one may have no times."""
    named = (
        (pl.col("scope") == scope)
        & (pl.col("name") == rule.span if rule.span else pl.col(rule.attribute or "").is_not_null())
        for scope, rules in _RULES.items()
        for rule in rules
        if rule.column == "request_id"
    )
    return pl.any_horizontal(named).fill_null(value=False) & pl.col("status_code").ne_missing("ERROR")


def values_read(
    spans: pl.DataFrame,
    keys_of: Callable[[int], Iterable[str]],
    lacking: Mapping[int, Collection[str]],
) -> pl.DataFrame:
    """Count, by file and scope, the requests and the spans that give their lengths and times.

    Args:
        spans: Rows of spans with file, span_row, scope, name, status_code and `dialects.SPAN_KEYS`.
        keys_of: Returns the keys of the record of a span, from its `span_row`.
        lacking: File to the values that its format never has.

    Returns:
        Columns as `VALUES_READ`; `keys` are those of one request, if a count is 0.
    """
    # Flags first: grouping the spans themselves copies their texts, which may be of any length.
    flags = spans.select(
        "file", "scope", "span_row", *(_is_there(need).alias(need) for need in _NEEDS), requests=_is_request()
    )
    counted = (
        flags.filter(pl.col("scope").is_in(list(_RULES)))
        .group_by("file", "scope", maintain_order=True)
        .agg(
            pl.col(*_NEEDS, "requests").sum().cast(pl.Int64),
            first=pl.col("span_row").filter("requests").first(),
        )
    )
    rows = []
    for row in counted.filter(pl.col("requests") > 0).iter_rows(named=True):
        # A format without a value has every value that it can have.
        counts = row | dict.fromkeys(lacking.get(row["file"], ()), row["requests"])
        keys = None if all(counts[need] for need in _NEEDS) else ", ".join(keys_of(row["first"]))
        rows.append({**counts, "keys": keys})
    return pl.DataFrame(rows, schema=VALUES_READ)


def unread_requests(counts: pl.DataFrame) -> Iterator[tuple[int, str]]:
    """Yield the number of a run and a text for each of its files whose requests all lack a length or their times.

    Args:
        counts: Rows of `values_read`, with `run`, and `source_file` instead of `file`.
    """
    of_files = counts.group_by("run", "source_file", "scope").agg(
        pl.col("requests", *_NEEDS).sum(), pl.col("keys").drop_nulls().min()
    )
    lacks = of_files.filter(pl.any_horizontal(pl.col(need) == 0 for need in _NEEDS))
    for (run,), files in lacks.sort("run", "source_file", "scope").group_by("run", maintain_order=True):
        for row in files.head(_MOST_FILES).iter_rows(named=True):
            missing = [need for need in _NEEDS if not row[need]]
            if missing[: len(UNREAD_LENGTHS)] == [*UNREAD_LENGTHS]:
                missing = ["lengths", *missing[len(UNREAD_LENGTHS) :]]
            yield (
                int(str(run)),
                f"{row['source_file']}: "
                + unread(
                    plural(row["requests"], "request"),
                    f"with {' or '.join(missing)}",
                    (row["keys"] or "").split(", "),
                ),
            )
        if files.height > _MOST_FILES:
            yield int(str(run)), f"{files.height - _MOST_FILES:,} other files have such requests too"
