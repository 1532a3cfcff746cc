"""`python -m tracefit.cli`."""

from tracefit.cli import main

main()
