"""Tables become what the engine did, step by step: the step clock, composition, idle gaps."""

from tracefit.timeline.build import build_timeline, execution_lags

__all__ = ["build_timeline", "execution_lags"]
