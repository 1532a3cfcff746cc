"""Server flags that make vLLM write the traces a message asks for."""

from __future__ import annotations

STEP_FLAGS = "--step-tracing-enabled --step-tracing-sample-rate 1.0"
"""A summary of every engine step."""

JOURNEY_FLAGS = "--enable-journey-tracing --journey-tracing-sample-rate 1.0"
"""The events of every request."""

SNAPSHOT_FLAG = "--step-tracing-rich-subsample-rate 1.0"
"""The requests of every step, with what each has computed."""
