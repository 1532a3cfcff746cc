"""Plain columns of text, the same in a terminal, in a pipe and in a test."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence


def columns(head: Sequence[str] | None, rows: Iterable[Sequence[str]], *, left: Collection[int]) -> str:
    """Align cells in columns: those in `left` to the left, all others, which hold numbers, to the right."""
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
    """Move every line two places to the right."""
    return "\n".join(f"  {line}" if line else line for line in text.splitlines())
