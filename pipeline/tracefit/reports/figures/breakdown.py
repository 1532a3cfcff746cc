"""Figures of what durations consist of: a step, and TTFT."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING, Unpack

from tracefit.diagnostics.breakdown import OR, STEP_PARTS
from tracefit.models.targets import parts_of
from tracefit.reports.document import Figure, Table
from tracefit.reports.figures.elements import (
    AMBER,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    PURPLE,
    TEAL,
    FigureWords,
    anchor,
    axis_of,
    line,
    name_text,
    rounded,
)
from tracefit.text import count, number, percent, plural

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tracefit.diagnostics.breakdown import Breakdown
    from tracefit.reports.document import Trace

_PART_COLOURS = dict(zip(STEP_PARTS, (GREY, BLUE, ORANGE, GREEN, PURPLE, TEAL, PINK, AMBER), strict=True))

_OVERHEAD_COLOURS = (BLUE, PINK, GREEN, PURPLE, TEAL, AMBER, GREY)
"""Colours of the overheads in TTFT, in the order a request goes through them; without that of the prefill."""


def breakdown_figure(deployment_id: str, breakdown: Breakdown | None) -> Figure | None:
    """Draw the parts of held-out steps, short steps first."""
    return _stacked(
        breakdown,
        _PART_COLOURS,
        "step",
        "predicted step time, ms",
        name=anchor(f"{deployment_id}-step-breakdown"),
        kind="step-breakdown",
        title="What a step costs",
        look="Look for the part that grows towards the long steps: that is what to change to make them shorter.",
        note="*Every step* is what even the smallest step costs: launches, and reading the weights unless they are a "
        "part of their own. Parts joined by *or* go together in the training rows: which of them costs the time "
        "is not known.",
    )


def first_token_figure(deployment_id: str, breakdown: Breakdown | None) -> Figure | None:
    """Draw the parts of the measured TTFT, requests with the shortest first."""
    overheads = parts_of("ttft")
    colours = dict(zip((target.label for target in overheads), cycle(_OVERHEAD_COLOURS), strict=False))
    meanings = [f"*{target.label}* ({target.definition})" for target in overheads]
    return _stacked(
        breakdown,
        colours | {"prefill": ORANGE},
        "request",
        "measured TTFT, ms",
        name=anchor(f"{deployment_id}-first-token"),
        kind="first-token",
        title="Where TTFT goes",
        look="Look for what the slow requests have that the fast ones do not: a queue asks for more servers, a "
        "prefill for shorter prompts or larger steps.",
        note=f"The parts: {', '.join([*meanings, '*prefill* (first SCHEDULED to FIRST_TOKEN)'])}.",
    )


def _stacked(
    breakdown: Breakdown | None, colours: Mapping[str, str], noun: str, y: str, **words: Unpack[FigureWords]
) -> Figure | None:
    """Draw the parts of durations as bars on each other; null without any."""
    if breakdown is None:
        return None
    width = 100 / len(breakdown.rows)
    at = [width * (k + 0.5) for k in range(len(breakdown.rows))]
    groups = [f"{width * k:.0f} to {width * (k + 1):.0f} %" for k in range(len(breakdown.rows))]
    facts = [
        "<br>".join(f"{n}: {number(v)}" for n, values in breakdown.facts.items() if (v := values[k]) is not None)
        for k in range(len(groups))
    ]
    wholes = [sum(values) for values in zip(*breakdown.parts.values(), strict=True)]
    traces: list[Trace] = [
        {
            "type": "bar",
            "name": name_text(part),
            "x": at,
            "y": rounded(values),
            "width": 0.84 * width,
            "marker": {"color": colours.get(part.split(OR)[0], AMBER)},
            "customdata": [
                (
                    f"{percent(100 * v / whole) if whole else '-'} % of {number(whole)} ms<br>mean of "
                    f"{plural(n, noun)}, {group}<br>{fact}"
                )
                for v, whole, n, group, fact in zip(values, wholes, breakdown.rows, groups, facts, strict=True)
            ],
            "hovertemplate": "%{fullData.name}: %{y:.3~f} ms<br>%{customdata}<extra></extra>",
        }
        for part, values in breakdown.parts.items()
    ]
    # Parts of a step are predicted, so that the measurement beside them shows what they miss; those of TTFT are
    # measured.
    if noun == "step":
        outline = {"color": "#1b1f24", "width": 1.5}
        diamond = {"symbol": "diamond", "size": 8, "color": "#fff", "line": outline}
        hover = "measured: %{y:.3~f} ms<extra></extra>"
        traces.append(
            line(
                "measured",
                at,
                breakdown.measured,
                "#fff",
                mode="markers",
                marker=diamond,
                hovertemplate=hover,
            )
        )
    columns = ([number(v) for v in values] for values in (*breakdown.parts.values(), breakdown.measured))
    axis = axis_of(f"{noun}s from the shortest to the longest, %", range=[0, 100], showgrid=False)
    return Figure(
        **words,
        summary=Table(
            (f"{noun}s by length", f"{noun}s", *(f"{p}, ms" for p in breakdown.parts), "measured, ms"),
            tuple(zip(groups, map(count, breakdown.rows), *columns, strict=True)),
        ),
        traces=tuple(traces),
        # Relative: a part below zero, such as a negative intercept, hangs below the axis.
        layout={"xaxis": axis, "yaxis": axis_of(y), "barmode": "relative"},
    )
