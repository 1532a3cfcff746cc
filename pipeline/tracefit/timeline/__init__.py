"""Reconstruct the work of the engine, step by step, from the tables: step clock, composition, idle gaps, queue state.

`build_timeline` makes the `timeline` table, one row per engine step. `queue_state` reads it for the queue ahead of a
request, `with_step_times` for the times of requests that follow from their steps.
"""

from tracefit.timeline.anchors import clock_disagreements, execution_lags
from tracefit.timeline.build import build_timeline
from tracefit.timeline.cached_prompts import longest_whole_prompt
from tracefit.timeline.composition import EngineLimits
from tracefit.timeline.logged_requests import place_on_log
from tracefit.timeline.logged_steps import every_start, is_logged, log_clock, without_jumps
from tracefit.timeline.queue import queue_state
from tracefit.timeline.request_evidence import unknown_batches
from tracefit.timeline.request_steps import (
    COUNTED_COLUMNS,
    MOST_PLACED,
    PLACED_COLUMNS,
    count_steps,
    events_of,
    is_at_recording_end,
)
from tracefit.timeline.request_times import with_step_times
from tracefit.timeline.segments import requeue_waits

__all__ = [
    "COUNTED_COLUMNS",
    "MOST_PLACED",
    "PLACED_COLUMNS",
    "EngineLimits",
    "build_timeline",
    "clock_disagreements",
    "count_steps",
    "events_of",
    "every_start",
    "execution_lags",
    "is_at_recording_end",
    "is_logged",
    "log_clock",
    "longest_whole_prompt",
    "place_on_log",
    "queue_state",
    "requeue_waits",
    "unknown_batches",
    "with_step_times",
    "without_jumps",
]
