"""Results of load generators: what a client measured of each request, and of each token where it says so, and their
summaries.

Each program has a module, which names the versions that it reads. `base` makes spans and steps of requests, `points` of
another room's module the points of summaries. A result that holds only a summary is a point, and says with which flag
of its program the requests are written.

If every token has a time and the server has no other client, the tokens show the engine's steps: outputs of one step
arrive at once, and steps arrive apart (`tables.stages`). A prompt is assumed to be computed by the step of its first
token. If only the first and the last token have times, steps are counted, as for the spans of an unmodified server
(`timeline.request_steps`).

A file has one benchmark or several, and each may have a clock of its own. One that is given twice has the same ids and
counts once. A result without the times at which requests were sent gives their latencies, and no arrivals.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__, prefix=f"{__name__}."):
    import_module(_module.name)
