"""tracefit: from vLLM OpenTelemetry traces to latency coefficients you can trust.

The commands of the command line are functions of this package::

    import tracefit

    result = tracefit.run("runs/", "out/")
    print(result.trained.fitted)
    print(tracefit.load("out/").predict_step(batch=32, context=1500, prefill=512))

They are imported on first use, so that `import tracefit` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefit._version import __version__
from tracefit.errors import DataError, TracefitError, UsageError

if TYPE_CHECKING:
    from tracefit.coefficients.models import Models, load
    from tracefit.commands.candidates import plan
    from tracefit.commands.compare import compare
    from tracefit.commands.export import export
    from tracefit.commands.ingest import ingest
    from tracefit.commands.inspect import inspect
    from tracefit.commands.locate import scan
    from tracefit.commands.predict import predict
    from tracefit.commands.replay import replay_runs
    from tracefit.commands.report import report
    from tracefit.commands.requests import requests
    from tracefit.commands.train import run, train
    from tracefit.commands.transfer import transfer
    from tracefit.commands.verify import verify
    from tracefit.options import (
        DayOptions,
        EngineChoice,
        IngestOptions,
        LoadOptions,
        ServerOptions,
        TrainOptions,
    )

_LAZY = {
    "DayOptions": "tracefit.options",
    "EngineChoice": "tracefit.options",
    "IngestOptions": "tracefit.options",
    "LoadOptions": "tracefit.options",
    "Models": "tracefit.coefficients.models",
    "ServerOptions": "tracefit.options",
    "TrainOptions": "tracefit.options",
    "compare": "tracefit.commands.compare",
    "export": "tracefit.commands.export",
    "ingest": "tracefit.commands.ingest",
    "inspect": "tracefit.commands.inspect",
    "load": "tracefit.coefficients.models",
    "plan": "tracefit.commands.candidates",
    "predict": "tracefit.commands.predict",
    "replay_runs": "tracefit.commands.replay",
    "report": "tracefit.commands.report",
    "requests": "tracefit.commands.requests",
    "run": "tracefit.commands.train",
    "scan": "tracefit.commands.locate",
    "train": "tracefit.commands.train",
    "transfer": "tracefit.commands.transfer",
    "verify": "tracefit.commands.verify",
}
"""Name to the module it is imported from on first use."""

__all__ = [
    "DataError",
    "DayOptions",
    "EngineChoice",
    "IngestOptions",
    "LoadOptions",
    "Models",
    "ServerOptions",
    "TracefitError",
    "TrainOptions",
    "UsageError",
    "__version__",
    "compare",
    "export",
    "ingest",
    "inspect",
    "load",
    "plan",
    "predict",
    "replay_runs",
    "report",
    "requests",
    "run",
    "scan",
    "train",
    "transfer",
    "verify",
]


def __getattr__(name: str) -> object:
    """Import a command or a class when it is first used."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'tracefit' has no attribute {name!r}")


# For the completion of notebooks, which would otherwise list only names that are already imported.
def __dir__() -> list[str]:
    """List the names that the package offers, already imported or not."""
    return sorted(__all__)
