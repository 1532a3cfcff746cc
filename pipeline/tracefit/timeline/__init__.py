"""Tables become what the engine did, step by step: the step clock, composition, idle gaps, queue state."""

from tracefit.timeline.anchors import clock_disagreements, execution_lags
from tracefit.timeline.build import build_timeline
from tracefit.timeline.composition import EngineLimits
from tracefit.timeline.queue import queue_state
from tracefit.timeline.request_times import with_step_times
from tracefit.timeline.segments import requeue_waits

__all__ = [
    "EngineLimits",
    "build_timeline",
    "clock_disagreements",
    "execution_lags",
    "queue_state",
    "requeue_waits",
    "with_step_times",
]
