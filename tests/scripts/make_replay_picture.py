"""Draw the README's replay figure: percentiles of TTFT, ITL and E2E in the trace and in the simulator, run by run."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from check_consumers import Replayed

LATENCIES = ("TTFT", "ITL", "E2E")
PERCENTILES = (50, 90, 99)
LEFT, PANEL, GAP, ROW, TOP = 128, 216, 22, 34, 62
STYLE = (
    "svg{background:#fff}text{font:11px sans-serif;fill:#57606a}.l{font-size:12px;fill:#1b1f24}.m{text-anchor:middle}"
    ".e{text-anchor:end}.g{stroke:#d0d7de;stroke-width:.5}.t{stroke:#1b1f24;stroke-width:1.6}.o{fill:#0063b1}"
    ".d{fill:none;stroke:#c05000;stroke-width:1.3}"
)


def picture(found: Sequence[Replayed]) -> str:
    """Return an SVG: a panel per latency, a row per run, on a logarithmic axis of milliseconds."""
    width = LEFT + len(LATENCIES) * (PANEL + GAP)
    height = TOP + ROW * len(found) + 26
    labels = 'role="img" aria-labelledby="replay-t replay-d"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" viewBox="0 0 {width} {height}" {labels}>',
        f"<style>{STYLE}</style>",
        '<title id="replay-t">Held-out requests: the trace against BLIS</title>',
        f'<desc id="replay-d">{_described(found)}</desc>',
        _legend(),
    ]
    for i, name in enumerate(LATENCIES):
        parts += _panel(found, name, LEFT + i * (PANEL + GAP), height)
    parts += [
        f'<text class="l e" x="{LEFT - 12}" y="{TOP + ROW * (i + 0.5) + 4:.1f}">{escape(one.run)}</text>'
        for i, one in enumerate(found)
    ]
    return "\n".join([*parts, "</svg>", ""])


def _described(found: Sequence[Replayed]) -> str:
    """Say what is drawn in numbers, for those who cannot see it."""
    worst = {
        name: max((abs(one.off(one.fitted, (name, p))), one.run, p) for one in found for p in (50, 90))
        for name in LATENCIES
    }
    said = "; ".join(f"{name} {off:.1f} % at P{p} of {run}" for name, (off, run, p) in worst.items())
    return escape(f"{len(found)} runs. With the exported coefficients P50 and P90 are off by at most: {said}.")


def _legend() -> str:
    y = 16
    return (
        f'<line class="t" x1="{LEFT}" x2="{LEFT}" y1="{y - 8}" y2="{y + 4}"/><text x="{LEFT + 8}" y="{y + 2}">trace, '
        f'P50 P90 P99 of held-out requests</text><circle class="o" cx="{LEFT + 240}" cy="{y - 2}" r="4"/><text '
        f'x="{LEFT + 250}" y="{y + 2}">BLIS, exported coefficients</text><circle class="d" cx="{LEFT + 425}" '
        f'cy="{y - 2}" r="4"/><text x="{LEFT + 435}" y="{y + 2}">BLIS, its defaults</text>'
    )


def _panel(found: Sequence[Replayed], name: str, x0: int, height: int) -> list[str]:
    values = [
        values_of[name, p] for one in found for values_of in (one.trace, one.fitted, one.defaults) for p in PERCENTILES
    ]
    low, high = math.log10(min(values)) - 0.05, math.log10(max(values)) + 0.05

    def at(ms: float) -> float:
        return x0 + PANEL * (math.log10(ms) - low) / (high - low)

    bottom = height - 26
    parts = [f'<text class="l m" x="{x0 + PANEL / 2:.1f}" y="{TOP - 12}">{name}, ms</text>']
    for power in range(math.ceil(low), math.floor(high) + 1):
        x = at(10.0**power)
        parts.append(f'<line class="g" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 4}" y2="{bottom}"/>')
        parts.append(f'<text class="m" x="{x:.1f}" y="{bottom + 15}">{10.0**power:,g}</text>')
    for i, one in enumerate(found):
        middle = TOP + ROW * (i + 0.5)
        parts.append(
            f'<line class="g" x1="{x0}" x2="{x0 + PANEL}" y1="{middle + ROW / 2:.1f}" y2="{middle + ROW / 2:.1f}"/>'
        )
        for j, p in enumerate(PERCENTILES):
            y = middle + 9 * (j - 1)
            parts.append(f'<circle class="d" cx="{at(one.defaults[name, p]):.1f}" cy="{y:.1f}" r="3.2"/>')
            parts.append(f'<circle class="o" cx="{at(one.fitted[name, p]):.1f}" cy="{y:.1f}" r="3"/>')
            x = at(one.trace[name, p])
            parts.append(f'<line class="t" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 4.5:.1f}" y2="{y + 4.5:.1f}"/>')
    return parts
