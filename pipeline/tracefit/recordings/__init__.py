"""Read recordings that are no spans: KV-cache events, and ForwardPassMetrics, one record for each engine step.

One module a format: it declares how a file is recognised, what its records fill, in which units and on which clock, and reads it.
A module that is imported here is known everywhere; formats are tried in this order.
"""

from tracefit.recordings import fpm, kv_events

__all__ = ["fpm", "kv_events"]
