"""Read recordings that are no spans: KV-cache events, and ForwardPassMetrics, one record for each engine step.

One module a format: it declares how a file is recognised, what its records fill, in which units and on which clock, and reads it.
Every module of this room registers its format when the room is imported.
"""

from importlib import import_module
from pkgutil import iter_modules

from tracefit.inputs.formats import RECORDINGS

__all__ = ["RECORDINGS"]

for _module in iter_modules(__path__, prefix=f"{__name__}."):
    import_module(_module.name)
