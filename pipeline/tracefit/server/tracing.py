"""Server flags that turn on the traces a message asks for.

Stock vLLM does not have these flags: they belong to the fork of vLLM that the inference-sim project instruments. Messages
say so, because a stock server refuses to start with them.
"""

from __future__ import annotations

_FORK = "(inference-sim's fork of vLLM)"

ENDPOINT_FLAG = "--otlp-traces-endpoint"
"""A span of every request, from stock vLLM as well."""

STEP_FLAGS = f"--step-tracing-enabled --step-tracing-sample-rate 1.0 {_FORK}"
"""A summary of every engine step."""

JOURNEY_FLAGS = f"--enable-journey-tracing --journey-tracing-sample-rate 1.0 {_FORK}"
"""The events of every request."""

SNAPSHOT_FLAG = f"--step-tracing-rich-subsample-rate 1.0 {_FORK}"
"""The requests of every step, with what each has computed."""
