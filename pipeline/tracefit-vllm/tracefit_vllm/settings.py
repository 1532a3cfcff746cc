"""Switches of the plugin, as environment variables: the server's own flags cannot be extended."""

from __future__ import annotations

import os
from dataclasses import dataclass

PREFIX = "TRACEFIT_VLLM"
SWITCH = PREFIX

LOGGER = "vllm.tracefit_vllm"
"""The name of the log: vLLM prints what loggers below its own name say."""


class SettingError(Exception):
    """A variable has a value that it cannot have."""


@dataclass(frozen=True)
class Settings:
    """Shares that are traced, by the names of the specification.

    Attributes:
        journey_tracing_sample_rate: Share of the requests.
        step_tracing_sample_rate: Share of the steps, each by itself.
        step_tracing_rich_subsample_rate: Share of these with a snapshot of each running request.
        step_tracing_closure_interval: Steps in a span.
    """

    journey_tracing_sample_rate: float = 1.0
    step_tracing_sample_rate: float = 1.0
    step_tracing_rich_subsample_rate: float = 0.0
    step_tracing_closure_interval: int = 100

    @classmethod
    def read(cls) -> Settings:
        """Read the variables: `TRACEFIT_VLLM_STEP_TRACING_SAMPLE_RATE=0.1`."""
        values = {}
        for name, default in vars(cls()).items():
            variable = f"{PREFIX}_{name.upper()}"
            text = os.environ.get(variable, "")
            least, most = (1, 10_000) if isinstance(default, int) else (0, 1)
            try:
                value = type(default)(text) if text else default
                if not least <= value <= most:
                    raise ValueError  # noqa: TRY301 - the same line for both
            except ValueError:
                raise SettingError(f"{variable}={text}: a number from {least} to {most} is needed") from None
            values[name] = value
        return cls(**values)


def is_on() -> bool:
    """Return whether the environment switches tracing on."""
    return os.environ.get(SWITCH, "").lower() in ("1", "true", "yes", "on")
