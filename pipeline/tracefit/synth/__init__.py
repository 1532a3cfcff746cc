"""Synthetic traces with known coefficients: a small model of the engine, written as the real emitter writes spans.

A run is simulated step by step with a step-time law whose coefficients are known, then written as the spans an
instrumented server sends. A fit on such a trace can be compared with the law, the timeline with the truth
tables. Nothing here is shared with the rooms that read traces: the two paths agree only if both are right.

    run = synth(SynthOptions(name="demo", seed=1, requests=500))
    folder = write_run(run, Path("runs"), compress="gz")
"""

from tracefit.synth.engine import Request, Scheduler, SchedulerConfig
from tracefit.synth.laws import (
    GPUS,
    MODELS,
    AdmissionLaw,
    Composition,
    DepartureLaw,
    LawGpu,
    LinearLaw,
    Model,
    RooflineLaw,
    StepLaw,
)
from tracefit.synth.logs import REQUEST_COLUMNS, STEP_COLUMNS
from tracefit.synth.options import DEFAULT_PHASES, LengthMix, LoadPhase, SynthOptions, surge_phases
from tracefit.synth.run import SynthRun, synth, write_run
from tracefit.synth.spans import Attributes, ExportBatch, GeneratedEvent, GeneratedSpan, SpanKind

__all__ = [
    "DEFAULT_PHASES",
    "GPUS",
    "MODELS",
    "REQUEST_COLUMNS",
    "STEP_COLUMNS",
    "AdmissionLaw",
    "Attributes",
    "Composition",
    "DepartureLaw",
    "ExportBatch",
    "GeneratedEvent",
    "GeneratedSpan",
    "LawGpu",
    "LengthMix",
    "LinearLaw",
    "LoadPhase",
    "Model",
    "Request",
    "RooflineLaw",
    "Scheduler",
    "SchedulerConfig",
    "SpanKind",
    "StepLaw",
    "SynthOptions",
    "SynthRun",
    "surge_phases",
    "synth",
    "write_run",
]
