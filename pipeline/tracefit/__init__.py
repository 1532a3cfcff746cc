"""tracefit: from vLLM OpenTelemetry traces to latency coefficients one can trust.

The commands of the command line are here too::

    import tracefit

    result = tracefit.run(["runs/"], "out/")
    print(result.trained.models)
    print(tracefit.load("out/models").predict_step(batch=32, context=1500, prefill=512))

They are imported on first use, so that `import tracefit` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefit._version import __version__
from tracefit.errors import DataError, TracefitError, UsageError

if TYPE_CHECKING:
    from tracefit.coefficients.models import Models, load
    from tracefit.commands.compare import compare
    from tracefit.commands.export import export
    from tracefit.commands.ingest import IngestOptions, ServerOptions, ingest
    from tracefit.commands.inspect import inspect
    from tracefit.commands.run import run
    from tracefit.commands.train import TrainOptions, train
    from tracefit.commands.verify import verify

_LAZY = {
    "load": "tracefit.coefficients.models",
    "Models": "tracefit.coefficients.models",
    "compare": "tracefit.commands.compare",
    "export": "tracefit.commands.export",
    "ingest": "tracefit.commands.ingest",
    "IngestOptions": "tracefit.commands.ingest",
    "ServerOptions": "tracefit.commands.ingest",
    "inspect": "tracefit.commands.inspect",
    "train": "tracefit.commands.train",
    "TrainOptions": "tracefit.commands.train",
    "run": "tracefit.commands.run",
    "verify": "tracefit.commands.verify",
}

__all__ = [
    "DataError",
    "IngestOptions",
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
    "run",
    "train",
    "verify",
]


def __getattr__(name: str) -> object:
    """Import a verb when it is first used."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'tracefit' has no attribute {name!r}")
