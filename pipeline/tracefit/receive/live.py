"""The live view of the receiver: a few lines on the terminal that change."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.table import Table

if TYPE_CHECKING:
    from tracefit.receive.observed import Observed

_REFRESH_S = 0.5


async def show_live(observed: Observed, console: Console | None = None) -> None:
    """Show what comes in, on stderr, until cancelled."""
    with Live(console=console or Console(stderr=True), auto_refresh=False, transient=True) as view:
        while True:
            view.update(live_table(observed), refresh=True)
            await asyncio.sleep(_REFRESH_S)


def live_table(observed: Observed) -> Table:
    """Return the view of this moment."""
    spans_per_s, steps_per_s = observed.rates()
    ttft, cycle = observed.median_ttft_s, observed.median_cycle_us
    rows = {
        "spans": f"{observed.spans:,} ({spans_per_s:,.0f}/s)",
        "steps": f"{observed.steps:,} ({steps_per_s:,.0f}/s)",
        "requests": f"{observed.requests:,}",
        "TTFT, median": "-" if ttft is None else f"{ttft:,.3f} s",
        "step time, median": "-" if cycle is None else f"{cycle / 1e3:,.2f} ms",
        "events dropped by the sender": f"{observed.dropped_events:,}",
        "requests refused": f"{observed.refused:,}",
    }
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(name, value)
    return table
