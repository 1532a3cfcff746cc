"""Exit codes of results; those of errors are in `tracefit.errors`."""

from __future__ import annotations

EXIT_DONE = 0
EXIT_NOTHING = 1
"""The data cannot support the result."""

EXIT_QUARANTINE = 3
"""Done, with something in quarantine: rejects, dropped events or duplicate spans."""
