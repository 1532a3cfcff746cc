"""Containers: the forms in which other programs hold spans or lines of logs, one reader each; `base` says what one is.

Every module of this folder registers its containers when the folder is imported; no other module names them.
"""

from importlib import import_module

from tracefit.inputs.containers.base import CONTAINERS, Container, unwrapped

__all__ = ["CONTAINERS", "Container", "unwrapped"]

# The order in which they are tried.
for _name in ("lines", "jaeger", "zipkin", "console", "exports", "tables", "documents"):
    import_module(f"{__name__}.{_name}")
