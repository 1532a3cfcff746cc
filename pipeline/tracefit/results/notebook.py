"""Results in a notebook: tables in place of a repr."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracefit.text import count, number

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Shown:
    """A result that a notebook shows as tables, one per kind of row it holds."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return "\n".join(_tables(type(self).__name__, self))


def _tables(title: str, result: Any) -> Iterator[str]:
    """Yield a table of the plain values of a result, then one of each tuple of rows."""
    values = {f.name: getattr(result, f.name) for f in fields(result)}
    plain = {name: text for name, value in values.items() if (text := _cell(value))}
    if plain:
        yield _table(title, ("", ""), list(plain.items()))
    for name, value in values.items():
        if is_dataclass(value):
            yield from _tables(f"{title}.{name}", value)
        elif isinstance(value, tuple) and value and all(is_dataclass(one) for one in value):
            yield _rows(f"{title}.{name}", value)
        elif isinstance(value, dict) and value and all(isinstance(one, dict) for one in value.values()):
            heads = list(dict.fromkeys(key for one in value.values() for key in one))
            rows = [(str(key), *(_cell(one.get(head)) or "" for head in heads)) for key, one in value.items()]
            yield _table(f"{title}.{name}", ("", *heads), rows)


def _rows(title: str, rows: Sequence[Any]) -> str:
    # A field that is itself rows has no cell: only `--json` shows rows within rows.
    shown = [f.name for f in fields(rows[0]) if any(_cell(getattr(row, f.name)) is not None for row in rows)]
    return _table(title, shown, [[_cell(getattr(row, name)) or "" for name in shown] for row in rows])


def _cell(value: object) -> str | None:
    """Write a plain value, or a short list of them; null for values with a table of their own."""
    match value:
        case None:
            return ""
        # Before int, which bool is a kind of.
        case bool() | str() | Path():
            return str(value)
        case int():
            return count(value)
        case float():
            return number(value)
        case tuple() | list() if all(isinstance(one, str | Path) for one in value):
            return ", ".join(map(str, value))
        case _:
            return None


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    # Escaped: names in results come from traces, which anyone may have written.
    heads = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in head) if any(head) else ""
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><caption>{escape(title)}</caption><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
