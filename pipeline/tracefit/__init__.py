"""tracefit: from vLLM OpenTelemetry traces to latency coefficients one can trust.

The verbs of the command line are here too::

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
    from tracefit.verbs.compare import compare
    from tracefit.verbs.export import export
    from tracefit.verbs.ingest import IngestOptions, ServerOptions, ingest
    from tracefit.verbs.inspect import inspect
    from tracefit.verbs.run import run
    from tracefit.verbs.train import TrainOptions, train
    from tracefit.verbs.verify import verify

_LAZY = {
    "load": "tracefit.coefficients.models",
    "Models": "tracefit.coefficients.models",
    "compare": "tracefit.verbs.compare",
    "export": "tracefit.verbs.export",
    "ingest": "tracefit.verbs.ingest",
    "IngestOptions": "tracefit.verbs.ingest",
    "ServerOptions": "tracefit.verbs.ingest",
    "inspect": "tracefit.verbs.inspect",
    "train": "tracefit.verbs.train",
    "TrainOptions": "tracefit.verbs.train",
    "run": "tracefit.verbs.run",
    "verify": "tracefit.verbs.verify",
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
