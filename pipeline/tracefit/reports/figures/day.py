"""Servers over a day: the load, the servers of each window, those that carry all of it, and those of a scaler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefit.reports.document import Figure, Table
from tracefit.reports.figures.elements import (
    GREY,
    MEASURED_COLOR,
    ORANGE,
    PINK,
    PREDICTED_COLOR,
    anchor,
    axis_of,
    line,
    panels,
)
from tracefit.text import count, number, plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracefit.reports.document import Trace
    from tracefit.results.plans import DayPlan, ServerPlan

_DRAWN_HOUR_S = 3600.0


def day_figure(plan: ServerPlan) -> Figure | None:
    """Draw the servers of a file of arrivals over its time; null for a plan at a steady rate."""
    day = plan.day
    if day is None:
        return None
    traces = (
        _steps("requests per second", day, [w.rate_per_s for w in day.windows], MEASURED_COLOR),
        _steps("output tokens of a request", day, [w.output_tokens for w in day.windows], GREY, yaxis="y2"),
        _steps("servers of each window", day, [w.servers for w in day.windows], PREDICTED_COLOR, yaxis="y3"),
        _steps("servers all day", day, [day.servers] * len(day.windows), ORANGE, yaxis="y3", dash="dash"),
        _scaler(day),
    )
    axes = [
        axis_of("requests/s", rangemode="tozero"),
        axis_of("output tokens", rangemode="tozero"),
        axis_of("servers", rangemode="tozero"),
    ]
    binding = day.windows[day.binding]
    return Figure(
        name=anchor(f"{plan.folder}-{plan.deployment_id}-day"),
        kind="day",
        title=f"{plural(day.servers, 'server')} of `{plan.deployment_id}` carry all of {day.file}",
        look=(
            "Look for windows in which the scaler has fewer servers than the window needs: there the load grows "
            "faster than servers start."
        ),
        note=f"Windows of {number(day.window_s)} s. The window that needs the most servers begins at {binding.begins}.",
        summary=Table(
            ("from", "requests/s", "output tokens", "servers", "scaler, mean", "scaler, most"),
            tuple(
                (
                    w.begins,
                    number(w.rate_per_s),
                    number(w.output_tokens),
                    "-" if w.servers is None else count(w.servers),
                    number(w.scaled_mean),
                    "-" if w.scaled_most is None else count(w.scaled_most),
                )
                for w in day.windows
            ),
        ),
        traces=traces,
        layout=panels(axis_of(f"hours since {day.windows[0].begins}"), axes),
        wide=True,
        height=520,
    )


def _hours(day: DayPlan, at_s: Sequence[float]) -> list[float]:
    return [(at - day.windows[0].from_s) / _DRAWN_HOUR_S for at in at_s]


def _end_s(day: DayPlan) -> float:
    """Return the end of the last arrival, from the hours of the servers of the day."""
    return day.windows[0].from_s + day.server_hours / day.servers * _DRAWN_HOUR_S


def _steps(name: str, day: DayPlan, values: Sequence[float | None], colour: str, **more: object) -> Trace:
    """Draw a value of each window, which holds until the next one begins."""
    at = _hours(day, [*(w.from_s for w in day.windows), _end_s(day)])
    return _held(line(name, at, [*values, values[-1]], colour, **more))  # type: ignore[arg-type]  # a dash is a text


def _scaler(day: DayPlan) -> Trace:
    changes = day.scaler.changes
    at = _hours(day, [*(c.from_s for c in changes), _end_s(day)])
    servers = [float(c.servers) for c in changes]
    return _held(line("servers of the scaler", at, [*servers, servers[-1]], PINK, yaxis="y3"))


def _held(trace: Trace) -> Trace:
    """Draw a line in steps."""
    style = trace["line"]
    return {**trace, "line": {**style, "shape": "hv"}} if isinstance(style, dict) else trace
