"""Synthetic traces with known coefficients: a small model of the engine, written as the real emitter writes spans.

A run is simulated step by step with a step-time law whose coefficients are known, then written as the spans an
instrumented server sends. A fit on such a trace can be compared with the law, the timeline with the truth
tables. Nothing here is shared with the rooms that read traces: the two paths agree only if both are right.

    run = synth(SynthOptions(name="demo", seed=1, requests=500))
    folder = write_run(run, Path("runs"), compress="gz")
"""

from importlib import import_module
from typing import TYPE_CHECKING

from tracefit.synth.laws import GPUS, MODELS, AdmissionLaw, Composition, LinearLaw, RooflineLaw, ServedModel
from tracefit.synth.options import (
    DEFAULT_PHASES,
    LengthMix,
    LengthPhase,
    LoadPhase,
    SynthOptions,
    surge_phases,
)

if TYPE_CHECKING:
    from tracefit.synth.run import TRUE_REQUEST_COLUMNS, TRUE_STEP_COLUMNS, SynthRun, synth, write_run
    from tracefit.synth.scheduler import Request, Scheduler
    from tracefit.synth.spans import Attributes, GeneratedEvent, GeneratedSpan, SpanKind

__all__ = [
    "DEFAULT_PHASES",
    "GPUS",
    "MODELS",
    "TRUE_REQUEST_COLUMNS",
    "TRUE_STEP_COLUMNS",
    "AdmissionLaw",
    "Attributes",
    "Composition",
    "GeneratedEvent",
    "GeneratedSpan",
    "LengthMix",
    "LengthPhase",
    "LinearLaw",
    "LoadPhase",
    "Request",
    "RooflineLaw",
    "Scheduler",
    "ServedModel",
    "SpanKind",
    "SynthOptions",
    "SynthRun",
    "surge_phases",
    "synth",
    "write_run",
]


# The command line needs only the options: help must not wait for the libraries of a simulation.
def __getattr__(name: str) -> object:
    """Import the simulation when it is first used."""
    for module in ("run", "scheduler", "spans") if name in __all__ else ():
        loaded = import_module(f"tracefit.synth.{module}")
        if hasattr(loaded, name):
            return getattr(loaded, name)
    raise AttributeError(f"module 'tracefit.synth' has no attribute {name!r}")
