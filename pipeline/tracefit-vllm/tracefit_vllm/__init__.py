"""Journeys and steps of a released vLLM as OpenTelemetry spans, in the form that tracefit reads.

Nothing happens until it is switched on: by `TRACEFIT_VLLM=1`, or by `--scheduler-cls tracefit_vllm.Scheduler`.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tracefit_vllm import settings

if TYPE_CHECKING:
    from tracefit_vllm.middleware import ApiTracing

__all__ = ["ApiTracing", "Scheduler", "register"]


def register() -> None:
    """Make the server's scheduler a traced one, whichever it is, if the environment says so; an entry point of vLLM."""
    if not settings.is_on():
        return
    try:
        _register()
    except Exception as error:  # noqa: BLE001 - vLLM would end with an error of a plugin
        _say(error)


def _register() -> None:
    from tracefit_vllm.scheduler import refuse, traced  # noqa: PLC0415 - vLLM loads this in all its processes

    try:
        from vllm.config import SchedulerConfig  # noqa: PLC0415

        choose = SchedulerConfig.get_scheduler_cls
    except (ImportError, AttributeError) as error:
        refuse(str(error))
        return
    if getattr(choose, "is_traced", False):
        return

    def get_scheduler_cls(config: Any) -> Any:
        chosen = choose(config)
        # Another plugin may have wrapped an earlier registration, or choose anything.
        try:
            is_traced = chosen is Scheduler or hasattr(chosen, "_tracing")
            return chosen if is_traced else traced(chosen)
        except Exception as error:  # noqa: BLE001 - the server starts without tracing
            _say(error)
            return chosen

    get_scheduler_cls.is_traced = True  # type: ignore[attr-defined]  # marks the function, which must not be wrapped twice
    SchedulerConfig.get_scheduler_cls = get_scheduler_cls


def _say(error: Exception) -> None:
    """Say that a server is not traced."""
    # The package's own modules may be what fails.
    logging.getLogger(settings.LOGGER).warning("tracefit-vllm: no tracing: %s: %s", type(error).__name__, error)


def Scheduler(vllm_config: Any, *args: Any, **options: Any) -> Any:  # noqa: N802 - in place of a class
    """Return a traced scheduler of the kind that the server would use: `--scheduler-cls tracefit_vllm.Scheduler`."""
    from tracefit_vllm.scheduler import traced  # noqa: PLC0415

    is_async = vllm_config.scheduler_config.async_scheduling
    module, name = ("async_scheduler", "AsyncScheduler") if is_async else ("scheduler", "Scheduler")
    if getattr(vllm_config, "diffusion_config", None) is not None:
        module, name = "diffusion_scheduler", f"Diffusion{name}"
    base = getattr(import_module(f"vllm.v1.core.sched.{module}"), name)
    return traced(base)(vllm_config, *args, **options)


def __getattr__(name: str) -> Any:
    if name == "ApiTracing":
        from tracefit_vllm.middleware import ApiTracing  # noqa: PLC0415

        return ApiTracing
    raise AttributeError(name)
