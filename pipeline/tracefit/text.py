"""Numbers, tables and names of deployments as text, the same in a terminal, in a pipe, on the page and in a test.

A number is written to its significant digits, an unknown one as `-`; deployments are named without the hash of
their settings if that is enough to distinguish them.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence


UNKNOWN = "-"
WIDTH = 80
"""Columns of the terminal that every table of a command's result fits into, unless one name is longer."""

FIRST_DATE_NS = 10**18
"""Earlier times have no date: their clock began at 0, or with the machine. 10^18 ns after 1970 is September 2001."""

_ZERO = 1e-12
"""Smaller absolute values are shown as 0; they are rounding noise."""


def number(value: float | None, digits: int = 3) -> str:
    """Write a number to so many significant digits, thousands in full; `-` if unknown."""
    if value is None:
        return UNKNOWN
    if abs(value) < _ZERO:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def exact(value: float | None) -> str:
    """Write a number with four digits, for readers of the report who compute with it."""
    return number(value, 4)


def percent(value: float | None) -> str:
    """Write a percentage without its sign, to its significant digits: 140, 13.4, 2.8, 0.04."""
    if value is None:
        return UNKNOWN
    if value == 0:
        return "0"
    # 0.00 would read as exactly zero.
    if abs(value) < 0.005:
        return "<0.01"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 1 else f"{value:.2f}"


def share(value: float | None) -> str:
    """Write a ratio in percent."""
    return UNKNOWN if value is None else f"{100 * value:.1f} %"


def count(value: int) -> str:
    """Write a count."""
    return f"{value:,}"


def plural(value: int, noun: str) -> str:
    """Write a count with its noun."""
    return f"{count(value)} {noun}{'' if value == 1 else 's'}"


def in_words(names: Sequence[str]) -> str:
    """Write names as a list: `a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


_MOST_NAMED_KEYS = 16


def unread(read: str, what: str, keys: Sequence[str]) -> str:
    """Say that nothing needed was found in what was read, and name the keys that are there.

    Args:
        read: Number and noun of the things read: `198 requests`.
        what: The rest of a sentence about none of them: `with lengths`.
        keys: The keys of one of them.
    """
    listed = ", ".join([*keys[:_MOST_NAMED_KEYS], *(["…"] if len(keys) > _MOST_NAMED_KEYS else [])])
    return f"read {read}, none {what}; keys seen: {listed or 'none'}"


def sentence(text: str) -> str:
    """Write a phrase as a sentence; a name of code at its beginning keeps its letters."""
    first = text.partition(" ")[0].rstrip(":,;.")
    is_name = any(mark in first for mark in "._") or ("-" in first and any(map(str.isdigit, first)))
    return f"{text}." if is_name else f"{text[:1].upper()}{text[1:]}."


def reasons(counts: Mapping[str, int]) -> str:
    """Write counts by reason in one line."""
    return ", ".join(f"{name.replace('_', ' ')} {count(n)}" for name, n in counts.items())


def mape_misleads(mape_pct: float | None, mdape_pct: float | None) -> bool:
    """Return whether a few rows with large relative errors dominate the mean: it is far above the median error."""
    # A mean below 10 % does not mislead; at ten times the median, it comes from a handful of rows.
    return mape_pct is not None and mdape_pct is not None and mape_pct > max(10.0, 10 * mdape_pct)


def columns(head: Sequence[str] | None, rows: Iterable[Sequence[str]], *, left: Collection[int] = (0,)) -> str:
    """Align cells in columns: those in `left` to the left, all others, which are numbers, to the right."""
    table = [tuple(r) for r in rows]
    if head is not None:
        table.insert(0, tuple(head))
    if not table:
        return ""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    )


def indented(text: str) -> str:
    """Indent every line by two spaces."""
    return "\n".join(f"  {line}" if line else line for line in text.splitlines())


# -- names of deployments ------------------------------------------------------------------------------------


class DeploymentLabel(msgspec.Struct, frozen=True):
    """A deployment as people write it.

    Attributes:
        name: The id without its hash if that identifies the deployment; else the whole id.
        detail: Its runs and the settings that differ from those of deployments with the same name; empty if the
            name is unique.
    """

    name: str
    detail: str = ""


def deployment_labels(
    deployments: Mapping[str, tuple[Sequence[str], Mapping[str, str]]],
) -> dict[str, DeploymentLabel]:
    """Return a label for each of several deployments, unique among them.

    Args:
        deployments: Deployment id to its runs and its settings.
    """
    # Readers cannot compare hashes: if only the hash differs, the settings are named too.
    shared = Counter(_without_hash(deployment_id) for deployment_id in deployments)
    labels = {}
    for deployment_id, (runs, settings) in deployments.items():
        name = _without_hash(deployment_id)
        if shared[name] == 1:
            labels[deployment_id] = DeploymentLabel(name)
            continue
        others = [s for other, (_, s) in deployments.items() if other != deployment_id and _without_hash(other) == name]
        differing = [
            f"{key} {value}"
            for key, value in sorted(settings.items())
            if any(other.get(key) != value for other in others)
        ]
        named = f"run{'s' * (len(runs) > 1)} {', '.join(runs)}" if runs else ""
        labels[deployment_id] = DeploymentLabel(deployment_id, "; ".join([*([named] if named else []), *differing]))
    return labels


def _without_hash(deployment_id: str) -> str:
    """Return a deployment id without its last part, eight hexadecimal digits of its settings."""
    name, _, digest = deployment_id.rpartition(".")
    is_hash = len(digest) == 8 and all(c in "0123456789abcdef" for c in digest)
    return name if name and is_hash else deployment_id
