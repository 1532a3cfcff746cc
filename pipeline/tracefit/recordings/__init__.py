"""Read recordings that are not spans: KV-cache events, and ForwardPassMetrics, one record for each engine step.

Each format has one module, which reads it and declares how a file is recognised, which tables its records fill, and their units and clock.
Every module of this room registers its format when the room is imported.
"""

from importlib import import_module
from pkgutil import iter_modules

from tracefit.inputs.formats import RECORDINGS

__all__ = ["RECORDINGS"]

for _module in iter_modules(__path__, prefix=f"{__name__}."):
    import_module(_module.name)
