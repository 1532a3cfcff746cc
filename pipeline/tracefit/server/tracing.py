"""Server flags that turn on the traces a message asks for.

Stock vLLM does not have these flags: they belong to the fork of vLLM that the inference-sim project instruments. Messages
say so, because a stock server refuses to start with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

INSTRUMENTED_VERSION = "0.15.1"
"""Version of vLLM whose instrumented fork has every attribute that is read."""

_FORK = "(inference-sim's fork of vLLM)"

ENDPOINT_FLAG = "--otlp-traces-endpoint"
"""A span of every request, from stock vLLM as well."""

STEP_FLAGS = f"--step-tracing-enabled --step-tracing-sample-rate 1.0 {_FORK}"
"""A summary of every engine step."""

JOURNEY_FLAGS = f"--enable-journey-tracing --journey-tracing-sample-rate 1.0 {_FORK}"
"""The events of every request."""

SNAPSHOT_FLAG = f"--step-tracing-rich-subsample-rate 1.0 {_FORK}"
"""The requests of every step, with what each has computed."""


def without_attribute(event: str, attributes: Sequence[str]) -> str:
    """Say that no event of a name has some attributes, and which flag of which vLLM gives them."""
    flags = STEP_FLAGS if event.startswith("step.") else JOURNEY_FLAGS
    if event == "step.REQUEST_SNAPSHOT":
        flags = SNAPSHOT_FLAG
    return (
        f"no {event} has a usable {', '.join(attributes)}: what is computed from them is not known; "
        f"vLLM {INSTRUMENTED_VERSION} gives them with {flags}"
    )
