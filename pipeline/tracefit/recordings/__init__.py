"""Read recordings that are not spans, such as KV-cache events, or ForwardPassMetrics with one record for each engine
step.

Each format has one module, which reads it and declares how a file is recognised, which tables its records fill, their
units and clock, and, if they are of steps, the sources of step times: which interval a time is, how it is known and
with what error. Every module of this room registers its format and its sources when the room is imported; no other room
names them.
"""

from importlib import import_module
from pkgutil import iter_modules

from tracefit.inputs.formats import RECORDINGS

__all__ = ["RECORDINGS"]

for _module in iter_modules(__path__, prefix=f"{__name__}."):
    import_module(_module.name)
